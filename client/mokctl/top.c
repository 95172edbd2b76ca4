/* SPDX-License-Identifier: Apache-2.0 */
/* A live look at devices and sessions: mokd tells sums, the differences between two looks are shown. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"
#include "error.h"
#include "mok/types.h"
#include "mokctl.h"
#include "screen.h"
#include "stats.h"
#include "table.h"

#define INTERVAL_S 2u
#define MAX_INTERVAL_S 3600u

/* ------------------------------------------------------------------ differences */

struct look {
    const Mok__StatsReply *now, *then; /* then NULL: none */
    double seconds;                    /* between them */
};

/* A sum that fell began again. */
static uint64_t grown(uint64_t now, uint64_t then)
{
    return now >= then ? now - then : now;
}

static const Mok__DeviceStats *device_then(const struct look *look, uint32_t index)
{
    for (size_t i = 0; look->then && i < look->then->n_device; i++)
        if (look->then->device[i]->index == index)
            return look->then->device[i];
    return NULL;
}

static const Mok__SessionStats *session_then(const struct look *look, const Mok__SessionStats *now)
{
    for (size_t i = 0; look->then && i < look->then->n_session; i++)
        if (look->then->session[i]->session == now->session && look->then->session[i]->device == now->device)
            return look->then->session[i];
    return NULL;
}

static void fill_histogram(const Mok__DeviceStats *device, unsigned latency, struct mok_stats_histogram *ret)
{
    *ret = (struct mok_stats_histogram){ 0 };
    if (!device || latency >= device->n_latency)
        return;
    for (size_t i = 0; i < device->latency[latency]->n_bucket && i < MOK_STATS_BUCKETS; i++)
        ret->bucket[i] = device->latency[latency]->bucket[i];
}

/* Between the looks; over all time where nothing happened between them. */
static uint64_t quantile(const Mok__DeviceStats *now, const Mok__DeviceStats *then, unsigned latency, double q)
{
    struct mok_stats_histogram all, before, between = { 0 };
    uint64_t count = 0;

    fill_histogram(now, latency, &all);
    fill_histogram(then, latency, &before);
    for (unsigned i = 0; i < MOK_STATS_BUCKETS; i++)
        count += between.bucket[i] = grown(all.bucket[i], before.bucket[i]);
    return mok_stats_quantile(count ? &between : &all, q);
}

static double ratio(uint64_t part, uint64_t whole)
{
    return whole ? (double)part / (double)whole : 0;
}

/* Device time of all its sessions between the looks. */
static uint64_t used_ns(const struct look *look, uint32_t device)
{
    uint64_t sum = 0;

    for (size_t i = 0; i < look->now->n_session; i++) {
        const Mok__SessionStats *now = look->now->session[i], *then = session_then(look, now);
        if (now->device == device)
            sum += grown(now->device_ns, then ? then->device_ns : 0);
    }
    return sum;
}

static const char *device_name(const struct look *look, uint32_t index)
{
    for (size_t i = 0; i < look->now->n_device; i++)
        if (look->now->device[i]->index == index)
            return look->now->device[i]->name;
    return "?";
}

/* ------------------------------------------------------------------ for people */

static void put_duration(struct table *table, uint64_t ns)
{
    if (ns < 1024)
        table_put(table, ns ? "<1us" : "-");
    else if (ns < 1000000)
        table_put(table, "%.0fus", (double)ns / 1e3);
    else if (ns < 1000000000)
        table_put(table, "%.1fms", (double)ns / 1e6);
    else
        table_put(table, "%.1fs", (double)ns / 1e9);
}

static int print_devices(const struct look *look, FILE *out)
{
    static const char *const names[] = { "DEVICE", "STATE",    "BUSY",     "OPS/S",  "FAIL/S", "ROWS/S",
                                         "DEPTH",  "WAIT p50", "WAIT p99", "OP p50", "OP p99", "IMBALANCE" };
    _cleanup_table_ struct table table = { 0 };

    _Static_assert(ARRAY_SIZE(names) <= TABLE_MAX_COLUMNS, "columns");
    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < look->now->n_device; i++) {
        const Mok__DeviceStats *now = look->now->device[i], *then = device_then(look, now->index);
        const Mok__DeviceStats none = MOK__DEVICE_STATS__INIT, *before = then ? then : &none;
        table_put(&table, "%s", now->name);
        table_put(&table, "%s", mokctl_device_state(now->state));
        table_put(&table, "%.1f%%", (double)grown(now->busy_ns, before->busy_ns) / look->seconds / 1e7);
        table_put(&table, "%.1f", (double)grown(now->done, before->done) / look->seconds);
        table_put(&table, "%.1f", (double)grown(now->failed, before->failed) / look->seconds);
        table_put(&table, "%.0f", (double)grown(now->rows, before->rows) / look->seconds);
        table_put(&table, "%" PRIu32, now->in_flight);
        put_duration(&table, quantile(now, then, MOK_LATENCY_QUEUE, 0.5));
        put_duration(&table, quantile(now, then, MOK_LATENCY_QUEUE, 0.99));
        put_duration(&table, quantile(now, then, MOK_LATENCY_TOTAL, 0.5));
        put_duration(&table, quantile(now, then, MOK_LATENCY_TOTAL, 0.99));
        table_put(&table, "%.2f",
                  ratio(grown(now->expert_max_rows, before->expert_max_rows),
                        grown(now->expert_mean_rows, before->expert_mean_rows)));
    }
    return table_write(&table, out);
}

static int print_sessions(const struct look *look, FILE *out)
{
    static const char *const names[] = { "SESSION", "JOB",   "USER",   "PID",   "DEVICE",
                                         "SHARE",   "OPS/S", "ROWS/S", "DEPTH", "ERRORS" };
    _cleanup_table_ struct table table = { 0 };

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < look->now->n_session; i++) {
        const Mok__SessionStats *now = look->now->session[i], *then = session_then(look, now);
        const Mok__SessionStats none = MOK__SESSION_STATS__INIT, *before = then ? then : &none;
        table_put(&table, "%" PRIu64, now->session);
        table_put(&table, "%s", now->job);
        table_put(&table, "%s", now->user);
        table_put(&table, "%" PRIu32, now->pid);
        table_put(&table, "%s", device_name(look, now->device));
        table_put(&table, "%.1f%%", 100 * ratio(grown(now->device_ns, before->device_ns), used_ns(look, now->device)));
        table_put(&table, "%.1f", (double)grown(now->ops, before->ops) / look->seconds);
        table_put(&table, "%.0f", (double)grown(now->rows, before->rows) / look->seconds);
        table_put(&table, "%" PRIu32, now->in_flight);
        table_put(&table, "%" PRIu64, now->errors);
    }
    return table_write(&table, out);
}

static int print_tables(const struct look *look, FILE *out)
{
    int r = print_devices(look, out);

    if (r < 0 || look->now->n_session == 0)
        return r;
    fputc('\n', out);
    r = print_sessions(look, out);
    if (look->now->omitted)
        fprintf(out, "and %" PRIu32 " more\n", look->now->omitted);
    return r;
}

/* ------------------------------------------------------------------ for scripts */

static cJSON *device_json(const struct look *look, const Mok__DeviceStats *now)
{
    const Mok__DeviceStats *then = device_then(look, now->index);
    const Mok__DeviceStats none = MOK__DEVICE_STATS__INIT, *before = then ? then : &none;
    cJSON *object = cJSON_CreateObject();

    mokctl_json_number(object, "index", now->index);
    cJSON_AddStringToObject(object, "name", now->name);
    cJSON_AddStringToObject(object, "state", mokctl_device_state(now->state));
    cJSON_AddNumberToObject(object, "busy", (double)grown(now->busy_ns, before->busy_ns) / look->seconds / 1e9);
    cJSON_AddNumberToObject(object, "ops_per_second", (double)grown(now->done, before->done) / look->seconds);
    cJSON_AddNumberToObject(object, "failed_per_second", (double)grown(now->failed, before->failed) / look->seconds);
    cJSON_AddNumberToObject(object, "rows_per_second", (double)grown(now->rows, before->rows) / look->seconds);
    mokctl_json_number(object, "in_flight", now->in_flight);
    mokctl_json_number(object, "memory_bytes", now->memory_bytes);
    mokctl_json_number(object, "memory_used", now->memory_used);
    cJSON *latency = cJSON_AddObjectToObject(object, "latency_ns");
    for (unsigned i = 0; i < MOK_LATENCIES; i++) {
        cJSON *stage = cJSON_AddObjectToObject(latency, mok_latency_text(i));
        mokctl_json_number(stage, "p50", quantile(now, then, i, 0.5));
        mokctl_json_number(stage, "p99", quantile(now, then, i, 0.99));
    }
    return object;
}

static cJSON *session_json(const struct look *look, const Mok__SessionStats *now)
{
    const Mok__SessionStats *then = session_then(look, now);
    const Mok__SessionStats none = MOK__SESSION_STATS__INIT, *before = then ? then : &none;
    cJSON *object = cJSON_CreateObject();

    mokctl_json_number(object, "session", now->session);
    cJSON_AddStringToObject(object, "job", now->job);
    cJSON_AddStringToObject(object, "user", now->user);
    mokctl_json_number(object, "pid", now->pid);
    mokctl_json_number(object, "device", now->device);
    cJSON_AddNumberToObject(object, "share",
                            ratio(grown(now->device_ns, before->device_ns), used_ns(look, now->device)));
    cJSON_AddNumberToObject(object, "ops_per_second", (double)grown(now->ops, before->ops) / look->seconds);
    cJSON_AddNumberToObject(object, "rows_per_second", (double)grown(now->rows, before->rows) / look->seconds);
    mokctl_json_number(object, "in_flight", now->in_flight);
    mokctl_json_number(object, "errors", now->errors);
    return object;
}

static int print_json(const struct look *look)
{
    cJSON *root = cJSON_CreateObject();

    cJSON_AddNumberToObject(root, "seconds", look->seconds);
    cJSON *devices = cJSON_AddArrayToObject(root, "devices");
    for (size_t i = 0; i < look->now->n_device; i++)
        cJSON_AddItemToArray(devices, device_json(look, look->now->device[i]));
    cJSON *sessions = cJSON_AddArrayToObject(root, "sessions");
    for (size_t i = 0; i < look->now->n_session; i++)
        cJSON_AddItemToArray(sessions, session_json(look, look->now->session[i]));
    mokctl_json_number(root, "omitted", look->now->omitted);
    char *text = cJSON_PrintUnformatted(root);
    cJSON_Delete(root);
    if (!text)
        return client_fail(MOK_ENOMEM, "no memory to print");
    puts(text);
    cJSON_free(text);
    return 0;
}

/* ------------------------------------------------------------------ the loop */

static int ask(struct control *control, struct control_answer *ret)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StatsQuery body = MOK__STATS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_STATS_QUERY;
    request.stats_query = &body;
    return control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_STATS, 0, ret);
}

/* Two looks, of which the newer is at `turn`. */
struct looks {
    struct control_answer answer[2];
    unsigned turn;
};

static int look_again(struct mokctl_line *line, struct looks *looks)
{
    looks->turn ^= 1;
    control_answer_clear(&looks->answer[looks->turn]);
    return ask(line->control, &looks->answer[looks->turn]);
}

static struct look difference(const struct looks *looks)
{
    struct look look = { .now = looks->answer[looks->turn].reply->stats,
                         .then = looks->answer[looks->turn ^ 1].reply->stats };

    look.seconds = (double)(look.now->now_ns - look.then->now_ns) / 1e9;
    look.seconds = look.seconds > 1e-3 ? look.seconds : 1e-3;
    return look;
}

/* *ret_text is to be freed, whatever is returned. */
static int draw(const struct looks *looks, char **ret_text)
{
    struct look look = difference(looks);
    size_t size;
    FILE *out = open_memstream(ret_text, &size);

    if (!out)
        return client_fail(MOK_ENOMEM, "no memory to print");
    int r = print_tables(&look, out);
    return fclose(out) == 0 ? r : client_fail(MOK_ENOMEM, "no memory to print");
}

static int show_live(struct mokctl_line *line, struct looks *looks, unsigned seconds)
{
    _cleanup_free_ char *text = NULL;
    enum screen_event event;
    int r = 0;

    screen_open();
    screen_show("mokctl top: looks at mokd, q ends it");
    while (r == 0 && fflush(stdout) == 0 && (event = screen_wait(seconds)) != SCREEN_QUIT) {
        if (event == SCREEN_TIME) {
            r = look_again(line, looks);
            if (r < 0)
                break;
            free(text);
            text = NULL;
            r = draw(looks, &text);
        }
        if (text)
            screen_show(text);
    }
    screen_close();
    return r;
}

static int show_lines(struct mokctl_line *line, struct looks *looks, unsigned seconds)
{
    for (;;) {
        struct timespec pause = { .tv_sec = (time_t)seconds };
        while (nanosleep(&pause, &pause) < 0)
            ;
        int r = look_again(line, looks);
        if (r < 0)
            return r;
        struct look look = difference(looks);
        r = line->json ? print_json(&look) : print_tables(&look, stdout);
        if (r < 0 || line->once)
            return r;
        if (!line->json)
            putchar('\n');
        if (fflush(stdout) != 0)
            return 0;
    }
}

int mokctl_top(struct mokctl_line *line)
{
    struct looks looks = { .answer = { CONTROL_ANSWER_INIT, CONTROL_ANSWER_INIT } };
    unsigned seconds = INTERVAL_S;

    if (line->interval && mokctl_whole_number("interval", line->interval, MAX_INTERVAL_S, &seconds) < 0)
        return EXIT_USAGE;
    int r = ask(line->control, &looks.answer[0]);
    if (r == 0)
        r = isatty(STDOUT_FILENO) && !line->once && !line->json ? show_live(line, &looks, seconds)
                                                                : show_lines(line, &looks, seconds);
    control_answer_clear(&looks.answer[0]);
    control_answer_clear(&looks.answer[1]);
    return r;
}
