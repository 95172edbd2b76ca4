/* SPDX-License-Identifier: Apache-2.0 */
/* mokd's status for people: one table a kind of thing, columns as wide as what is in them. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "mok/types.h"
#include "mokctl.h"
#include "names.h"
#include "plain.h"
#include "table.h"
#include "util.h"

void table_clear(struct table *table)
{
    for (size_t i = 0; i < table->cells; i++)
        free(table->cell[i]);
    free(table->cell);
}
void table_put(struct table *table, const char *format, ...)
{
    va_list arguments;
    char *text = NULL;

    if (table->cells == table->capacity) {
        size_t capacity = table->capacity ? 2 * table->capacity : 64;
        char **larger = realloc(table->cell, capacity * sizeof(*larger));
        table->failed |= !larger;
        if (!larger)
            return;
        table->cell = larger;
        table->capacity = capacity;
    }
    va_start(arguments, format);
    if (vasprintf(&text, format, arguments) < 0) {
        table->failed = true;
        text = NULL;
    }
    va_end(arguments);
    if (text)
        mok_plain_text(text, ""); /* one line */
    table->cell[table->cells++] = text;
}

void table_head(struct table *table, size_t columns, const char *const *names)
{
    table->columns = columns;
    for (size_t i = 0; i < columns; i++)
        table_put(table, "%s", names[i]);
}

int table_write(const struct table *table, FILE *out)
{
    int width[TABLE_MAX_COLUMNS] = { 0 };

    if (table->failed)
        return client_fail(MOK_ENOMEM, "no memory to print");
    for (size_t i = 0; i < table->cells; i++) {
        int length = (int)strlen(table->cell[i]);
        if (width[i % table->columns] < length)
            width[i % table->columns] = length;
    }
    for (size_t i = 0; i < table->cells; i++) {
        bool last = i % table->columns == table->columns - 1;
        if (last)
            fprintf(out, "%s\n", table->cell[i]);
        else
            fprintf(out, "%-*s  ", width[i % table->columns], table->cell[i]);
    }
    return 0;
}

int table_print(const struct table *table)
{
    return table_write(table, stdout);
}

/* ------------------------------------------------------------------ values for people */

void table_put_bytes(struct table *table, uint64_t bytes)
{
    static const char *const unit[] = { "B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB" };
    double value = (double)bytes;
    size_t i = 0;

    while (value >= 1024 && i + 1 < ARRAY_SIZE(unit)) {
        value /= 1024;
        i++;
    }
    if (i == 0)
        table_put(table, "%" PRIu64 " B", bytes);
    else
        table_put(table, "%.1f %s", value, unit[i]);
}

static void duration(uint64_t ms, char *ret, size_t capacity)
{
    uint64_t s = ms / 1000;

    if (s >= 86400)
        snprintf(ret, capacity, "%" PRIu64 "d %" PRIu64 "h", s / 86400, s / 3600 % 24);
    else if (s >= 3600)
        snprintf(ret, capacity, "%" PRIu64 "h %" PRIu64 "m", s / 3600, s / 60 % 60);
    else if (s >= 60)
        snprintf(ret, capacity, "%" PRIu64 "m %" PRIu64 "s", s / 60, s % 60);
    else
        snprintf(ret, capacity, "%" PRIu64 ".%" PRIu64 "s", s, ms % 1000 / 100);
}

static void put_duration(struct table *table, uint64_t ms)
{
    char text[64];

    duration(ms, text, sizeof(text));
    table_put(table, "%s", text);
}

/* By name where a session of that user says it, else by number. */
static void put_user(struct table *table, const Mok__StatusReply *status, uint32_t uid)
{
    for (size_t i = 0; i < status->n_job; i++) {
        if (status->job[i]->uid == uid && status->job[i]->user[0]) {
            table_put(table, "%s", status->job[i]->user);
            return;
        }
    }
    table_put(table, "%" PRIu32, uid);
}

const char *mokctl_device_state(unsigned state)
{
    switch (state) {
    case MOK__DEVICE_STATE__DEVICE_STARTING:
        return "starting";
    case MOK__DEVICE_STATE__DEVICE_UP:
        return "up";
    case MOK__DEVICE_STATE__DEVICE_FAILED:
        return "failed";
    }
    return "?";
}

/* ------------------------------------------------------------------ tables */

static void put_state(struct table *table, const Mok__DeviceInfo *d)
{
    const char *state = mokctl_device_state(d->state);

    if (d->draining)
        table_put(table, "%s, %s", state, d->groups || d->sessions ? "draining" : "drained");
    else if (d->exclusive_group)
        table_put(table, "%s, group %" PRIu32 "'s alone", state, d->exclusive_group);
    else
        table_put(table, "%s", state);
}

static int print_devices(const Mok__StatusReply *status)
{
    static const char *const names[] = { "DEVICE", "NAME",     "KIND", "UNITS", "STATE",    "MEMORY",
                                         "USED",   "SESSIONS", "OPS",  "BUSY",  "RESTARTS", "WORKER" };
    _Static_assert(ARRAY_SIZE(names) <= TABLE_MAX_COLUMNS, "columns");
    _cleanup_table_ struct table table = { 0 };

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < status->n_device; i++) {
        const Mok__DeviceInfo *d = status->device[i];
        table_put(&table, "%" PRIu32, d->index);
        table_put(&table, "%s", d->name);
        table_put(&table, "%s", mok_device_kind_text(d->kind));
        table_put(&table, "%" PRIu32, d->threads);
        put_state(&table, d);
        table_put_bytes(&table, d->memory_bytes);
        table_put_bytes(&table, d->memory_used);
        table_put(&table, "%" PRIu32, d->sessions);
        table_put(&table, "%" PRIu64, d->ops_done);
        put_duration(&table, d->device_ns / 1000000);
        table_put(&table, "%" PRIu32, d->restarts);
        table_put(&table, "%" PRIu32, d->worker_pid);
    }
    int r = table_print(&table);
    for (size_t i = 0; r == 0 && i < status->n_device; i++) {
        const Mok__DeviceInfo *d = status->device[i];
        if (d->state != MOK__DEVICE_STATE__DEVICE_UP && d->reason[0])
            printf("%s: %s\n", d->name, d->reason);
    }
    return r;
}

/* What a restart of mokd does to it; away: there was one, and its client has not come back yet. */
static const char *restart_text(const Mok__JobInfo *job)
{
    return job->away ? "away" : job->resumable ? "goes on" : "ends";
}

static int print_jobs(const Mok__StatusReply *status)
{
    static const char *const names[] = { "SESSION", "JOB",    "USER",   "PID", "AGE",     "MEMORY", "BUFFERS",
                                         "GROUPS",  "LAYERS", "QUEUES", "OPS", "RESTART" };
    _Static_assert(ARRAY_SIZE(names) <= TABLE_MAX_COLUMNS, "columns");
    _cleanup_table_ struct table table = { 0 };

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < status->n_job; i++) {
        const Mok__JobInfo *j = status->job[i];
        table_put(&table, "%" PRIu64, j->session);
        table_put(&table, "%s", j->job);
        put_user(&table, status, j->uid);
        table_put(&table, "%" PRIu32, j->pid);
        put_duration(&table, j->age_ms);
        table_put_bytes(&table, j->bytes);
        table_put(&table, "%" PRIu32, j->buffers);
        table_put(&table, "%" PRIu32, j->groups);
        table_put(&table, "%" PRIu32, j->layers);
        table_put(&table, "%" PRIu32, j->queues);
        table_put(&table, "%" PRIu64, j->ops_done);
        table_put(&table, "%s", restart_text(j));
    }
    return table_print(&table);
}

/* Device of each rank, "node:device" where a group is on several nodes; "-" where nobody has joined. */
static void put_ranks(struct table *table, const Mok__GroupInfo *g)
{
    char text[2048] = "";
    size_t used = 0;

    for (size_t i = 0; i < g->n_device && used < sizeof(text); i++) {
        bool joined = i < g->n_session && g->session[i] != 0, elsewhere = i < g->n_node;
        int length = joined ? snprintf(text + used, sizeof(text) - used, "%s%s%s%" PRIu32, i ? "," : "",
                                       elsewhere ? g->node[i] : "", elsewhere ? ":" : "", g->device[i])
                            : snprintf(text + used, sizeof(text) - used, "%s-", i ? "," : "");
        used += (size_t)length;
    }
    table_put(table, "%s", text[0] ? text : "-");
}

static int print_groups(const Mok__StatusReply *status)
{
    static const char *const names[] = { "GROUP", "NAME",   "USER",    "RANKS", "JOINED",
                                         "STATE", "LAYERS", "DEVICES", "ERROR" };
    _Static_assert(ARRAY_SIZE(names) <= TABLE_MAX_COLUMNS, "columns");
    _cleanup_table_ struct table table = { 0 };
    bool partial = false;

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < status->n_group; i++) {
        const Mok__GroupInfo *g = status->group[i];
        if (g->group)
            table_put(&table, "%" PRIu32, g->group);
        else
            table_put(&table, "-");
        table_put(&table, "%s", g->name);
        put_user(&table, status, g->uid);
        table_put(&table, "%" PRIu32, g->size);
        table_put(&table, "%" PRIu32 "%s", g->joined, g->partial ? " here" : "");
        table_put(&table, "%s%s%s", g->state, g->home[0] ? " at " : "", g->home);
        partial |= g->partial;
        table_put(&table, "%" PRIu32, g->layers);
        put_ranks(&table, g);
        table_put(&table, "%s", g->error[0] ? g->error : "-");
    }
    int r = table_print(&table);
    if (r == 0 && partial)
        fputs("\nhere: ranks of this node alone; mokctl groups on the node where they meet (at NODE) shows all that "
              "have come\n",
              stdout);
    return r;
}

static int print_layers(const Mok__StatusReply *status)
{
    static const char *const names[] = { "LAYER",        "GROUP",   "RANK", "DEVICE", "SESSION",   "HIDDEN",
                                         "INTERMEDIATE", "EXPERTS", "TOPK", "TOKENS", "PRECISION", "MEMORY" };
    _Static_assert(ARRAY_SIZE(names) <= TABLE_MAX_COLUMNS, "columns");
    _cleanup_table_ struct table table = { 0 };
    const Mok__LayerSpec none = MOK__LAYER_SPEC__INIT;

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < status->n_layer; i++) {
        const Mok__LayerInfo *l = status->layer[i];
        const Mok__LayerSpec *spec = l->spec ? l->spec : &none;
        table_put(&table, "%" PRIu32, l->layer);
        table_put(&table, "%s", l->group_name);
        table_put(&table, "%" PRIu32, l->rank);
        table_put(&table, "%" PRIu32, l->device);
        table_put(&table, "%" PRIu64, l->session);
        table_put(&table, "%" PRIu32, spec->hidden);
        if (spec->shared_intermediate)
            table_put(&table, "%" PRIu32 "+%" PRIu32, spec->intermediate, spec->shared_intermediate);
        else
            table_put(&table, "%" PRIu32, spec->intermediate);
        table_put(&table, "%" PRIu32, spec->experts);
        table_put(&table, "%" PRIu32, spec->topk);
        table_put(&table, "%" PRIu32, spec->max_tokens);
        table_put(&table, "%s", mok_precision_text(spec->precision));
        table_put_bytes(&table, l->bytes);
    }
    return table_print(&table);
}

static void print_store(const Mok__StatusReply *status)
{
    uint32_t goes_on = 0, away = 0;

    for (size_t i = 0; i < status->n_job; i++) {
        goes_on += status->job[i]->resumable;
        away += status->job[i]->away;
    }
    if (status->store_bound == 0) {
        fputs("over a restart: nothing, no service manager keeps descriptors\n\n", stdout);
        return;
    }
    printf("over a restart: %" PRIu32 " sessions go on (%" PRIu32 " away), with %" PRIu32 " of %" PRIu32
           " descriptors in the service manager's store\n\n",
           goes_on, away, status->store_used, status->store_bound);
}

static int print_status(const Mok__StatusReply *status)
{
    char up[64];

    duration(status->uptime_ms, up, sizeof(up));
    printf("mokd %s, pid %" PRIu32 ", up %s, %" PRIu64 " operations, %" PRIu64 " %s\n", status->version,
           status->pid, up, status->ops_done, status->errors, status->errors == 1 ? "error" : "errors");
    print_store(status);
    if (print_devices(status) < 0)
        return -1;
    putchar('\n');
    if (print_jobs(status) < 0)
        return -1;
    putchar('\n');
    if (print_groups(status) < 0)
        return -1;
    putchar('\n');
    return print_layers(status);
}

int mokctl_print_table(enum mokctl_part part, const Mok__StatusReply *status)
{
    switch (part) {
    case MOKCTL_DEVICES:
        return print_devices(status);
    case MOKCTL_JOBS:
        return print_jobs(status);
    case MOKCTL_GROUPS:
        return print_groups(status);
    case MOKCTL_LAYERS:
        return print_layers(status);
    case MOKCTL_STATUS:
        break;
    }
    return print_status(status);
}
