/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The status page's data. Sums since mokd started, from which the page makes rates and quantiles of the time between
 * two looks; whole numbers, all well below 2^53. What is long is cut: layers at LAYERS_SHOWN, and so on.
 */
#include "metrics.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "client_queue.h"
#include "device.h"
#include "group.h"
#include "job_totals.h"
#include "layer.h"
#include "mok/ring_abi.h"
#include "names.h"
#include "recent.h"
#include "status.h"

#define LAYERS_SHOWN 64u
#define SESSIONS_SHOWN 256u
#define GROUPS_SHOWN 256u

/* ------------------------------------------------------------------ writing */

/* Others' text: what is not plain ASCII shows as '?'. */
static void put_string(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fputc('\\', out);
        fputc(c < 0x20 || c >= 0x7f ? '?' : c, out);
    }
    fputc('"', out);
}

/* With the comma before, but for the first of an object. */
static void put_name(FILE *out, const char *name)
{
    fprintf(out, "%s\"%s\":", *name == '{' ? "{" : ",", *name == '{' ? name + 1 : name);
}

static void put_text(FILE *out, const char *name, const char *text)
{
    put_name(out, name);
    put_string(out, text);
}

static void put_whole(FILE *out, const char *name, uint64_t value)
{
    put_name(out, name);
    fprintf(out, "%" PRIu64, value);
}

static void put_list(FILE *out, const char *name, const uint64_t *values, size_t count)
{
    put_name(out, name);
    fputc('[', out);
    for (size_t i = 0; i < count; i++)
        fprintf(out, "%s%" PRIu64, i ? "," : "", mok_stats_get(&values[i]));
    fputc(']', out);
}

/* ------------------------------------------------------------------ devices */

static const char *state_text(const struct mokd_device *device)
{
    switch (device->state) {
    case MOKD_DEVICE_UP:
        return "up";
    case MOKD_DEVICE_FAILED:
        return "failed";
    case MOKD_DEVICE_RESTING:
    case MOKD_DEVICE_STARTING:
        break;
    }
    return "starting";
}

/* Of forward and backward together; zeros at the end are left out. */
static void put_latencies(FILE *out, const struct mok_stats *page)
{
    put_name(out, "latency");
    for (unsigned latency = 0; latency < MOK_LATENCIES; latency++) {
        struct mok_stats_histogram sum = { 0 };
        size_t count = MOK_STATS_BUCKETS;

        mok_stats_histogram_add(&sum, &page->latency[0][latency]);
        mok_stats_histogram_add(&sum, &page->latency[1][latency]);
        while (count > 0 && !sum.bucket[count - 1])
            count--;
        fputc(latency ? ',' : '{', out);
        fprintf(out, "\"%s\":[", mok_latency_text(latency));
        for (size_t i = 0; i < count; i++)
            fprintf(out, "%s%" PRIu64, i ? "," : "", sum.bucket[i]);
        fputc(']', out);
    }
    fputc('}', out);
}

static void put_page(FILE *out, const struct mok_stats *page)
{
    uint64_t done = 0, failed = 0, busy_ns = 0;

    for (unsigned kind = MOK_OP_FORWARD; kind <= MOK_OP_BACKWARD; kind++) {
        done += mok_stats_get(&page->ops[kind][0]);
        for (unsigned code = 1; code < MOK_STATS_CODES; code++)
            failed += mok_stats_get(&page->ops[kind][code]);
    }
    for (unsigned phase = 1; phase < MOK_STATS_PHASES; phase++)
        busy_ns += mok_stats_get(&page->phase_ns[phase]);
    put_whole(out, "done", done);
    put_whole(out, "failed", failed);
    put_whole(out, "in_flight", __atomic_load_n(&page->in_flight, __ATOMIC_RELAXED));
    put_whole(out, "rows", mok_stats_get(&page->rows));
    put_whole(out, "rows_dropped", mok_stats_get(&page->rows_dropped));
    put_whole(out, "busy_ns", busy_ns);
    put_whole(out, "ring_rows", mok_stats_get(&page->ring_rows));
    put_whole(out, "ring_capacity_rows", mok_stats_get(&page->ring_capacity));
    put_latencies(out, page);
}

static void put_device(FILE *out, const struct mokd_device *device)
{
    const struct mok_stats *page = mokd_stats_page_read(&device->stats);

    put_whole(out, "{index", device->index);
    put_text(out, "name", device->config->name);
    put_text(out, "kind", mok_device_kind_text(device->config->kind));
    put_text(out, "state", state_text(device));
    put_text(out, "reason", device->reason);
    put_whole(out, "units", device->units);
    put_whole(out, "memory_bytes", device->config->memory);
    put_whole(out, "memory_used", device->memory_used);
    put_whole(out, "sessions", device->n_queues);
    put_whole(out, "restarts", device->restarts);
    put_whole(out, "worker_pid", device->worker ? mokd_worker_pid(device->worker) : 0);
    if (page)
        put_page(out, page);
    fputc('}', out);
}

static void put_devices(FILE *out, const struct mokd_server *server)
{
    put_name(out, "devices");
    fputc('[', out);
    for (size_t i = 0; i < server->n_devices; i++) {
        if (i)
            fputc(',', out);
        put_device(out, server->devices[i]);
    }
    fputc(']', out);
}

/* ------------------------------------------------------------------ sessions */

static void put_queues(FILE *out, const struct mokd_session *session)
{
    const struct mokd_queue *queue;
    bool first = true;

    put_name(out, "devices");
    fputc('[', out);
    TAILQ_FOREACH(queue, &session->queues, link) {
        if (!first)
            fputc(',', out);
        first = false;
        put_whole(out, "{device", queue->device->index);
        put_whole(out, "queue", queue->id);
        put_whole(out, "ops", queue->counted.ops);
        put_whole(out, "errors", queue->counted.errors);
        put_whole(out, "rows", queue->counted.rows);
        put_whole(out, "device_ns", queue->counted.device_ns);
        put_whole(out, "in_flight", queue->in_flight);
        fputc('}', out);
    }
    fputc(']', out);
}

static void put_sessions(FILE *out, const struct mokd_server *server)
{
    const struct mokd_session *session;
    unsigned shown = 0, hidden = 0;

    put_name(out, "sessions");
    fputc('[', out);
    TAILQ_FOREACH(session, &server->sessions, link) {
        if (session->state != MOKD_SESSION_OPEN)
            continue;
        if (shown == SESSIONS_SHOWN) {
            hidden++;
            continue;
        }
        if (shown++)
            fputc(',', out);
        put_whole(out, "{session", session->id);
        put_text(out, "job", session->job);
        put_text(out, "user", session->user->name);
        put_whole(out, "pid", (uint64_t)session->peer.pid);
        put_whole(out, "age_ms", (mok_now_ns() - session->started_ns) / 1000000u);
        put_whole(out, "buffers", session->n_buffers);
        put_queues(out, session);
        fputc('}', out);
    }
    fputc(']', out);
    put_whole(out, "sessions_hidden", hidden);
}

/* ------------------------------------------------------------------ groups and layers */

static void put_groups(FILE *out, const struct mokd_server *server)
{
    struct mokd_group_look look = { 0 };
    struct mokd_group_info group;

    put_name(out, "groups");
    fputc('[', out);
    for (unsigned shown = 0; shown < GROUPS_SHOWN && mokd_status_next_group(server, &look, &group); shown++) {
        if (shown)
            fputc(',', out);
        put_whole(out, "{group", group.info.group);
        put_text(out, "name", group.info.name);
        put_whole(out, "uid", group.info.uid);
        put_whole(out, "size", group.info.size);
        put_whole(out, "joined", group.info.joined);
        put_text(out, "state", group.info.state);
        put_text(out, "home", group.info.home);
        put_text(out, "error", group.info.error);
        fputc('}', out);
    }
    fputc(']', out);
}

static void put_layer(FILE *out, const struct mokd_layer *layer, unsigned index, uint32_t rank, unsigned *shown)
{
    const struct mokd_member *member = layer->group->member[rank];
    struct mok_stats_layer stats;

    if (!member || !layer->part[rank].open || !mokd_stats_page_layer(&member->device->stats, layer->id, &stats))
        return;
    if ((*shown)++)
        fputc(',', out);
    put_whole(out, "{layer", layer->id);
    put_whole(out, "index", index);
    put_text(out, "group", layer->group->name);
    put_whole(out, "rank", rank);
    put_text(out, "device", member->device->config->name);
    put_whole(out, "experts", stats.local_experts);
    put_whole(out, "ops", stats.ops);
    put_whole(out, "rows", stats.rows);
    put_whole(out, "max_rows", stats.max_rows);
    put_whole(out, "last_rows", stats.last_rows);
    put_whole(out, "last_max_rows", stats.last_max_rows);
    put_list(out, "expert_rows", stats.expert_rows, stats.bins);
    fputc('}', out);
}

static void put_layers(FILE *out, const struct mokd_server *server)
{
    const struct mokd_group *group;
    const struct mokd_layer *layer;
    unsigned shown = 0;

    put_name(out, "layers");
    fputc('[', out);
    TAILQ_FOREACH(group, &server->groups, link) {
        unsigned index = 0;
        TAILQ_FOREACH(layer, &group->layers, link) {
            for (uint32_t rank = 0; rank < group->size && shown < LAYERS_SHOWN; rank++)
                put_layer(out, layer, index, rank, &shown);
            index++;
        }
    }
    fputc(']', out);
}

/* ------------------------------------------------------------------ the whole */

static void put_recent(FILE *out)
{
    struct mokd_recent entries[MOKD_RECENT];
    size_t count = mokd_recent_read(entries);

    put_name(out, "recent");
    fputc('[', out);
    for (size_t i = 0; i < count; i++) {
        if (i)
            fputc(',', out);
        put_whole(out, "{unix_ms", entries[i].unix_ms);
        put_text(out, "level", mok_log_level_text((enum mok_log_level)entries[i].level));
        put_text(out, "component", entries[i].component);
        put_text(out, "message", entries[i].message);
        put_text(out, "fields", entries[i].fields);
        fputc('}', out);
    }
    fputc(']', out);
}

static void put_bucket_ends(FILE *out)
{
    uint64_t ends[MOK_STATS_BUCKETS - 1];

    for (unsigned i = 0; i < ARRAY_SIZE(ends); i++)
        ends[i] = mok_stats_bucket_end(i);
    put_list(out, "bucket_ends_ns", ends, ARRAY_SIZE(ends));
}

char *mokd_status_json(struct mokd_server *server, size_t *ret_length)
{
    char *text = NULL;
    FILE *out = open_memstream(&text, ret_length);

    if (!out)
        return NULL;
    mokd_job_totals_take_all(server);
    put_text(out, "{version", MOK_BUILD_VERSION);
    put_whole(out, "pid", (uint64_t)getpid());
    put_whole(out, "now_ns", mok_now_ns());
    put_whole(out, "uptime_ms", (mok_now_ns() - server->started_ns) / 1000000u);
    put_whole(out, "errors", server->errors);
    put_bucket_ends(out);
    put_devices(out, server);
    put_sessions(out, server);
    put_groups(out, server);
    put_layers(out, server);
    put_recent(out);
    fputs("}\n", out);
    bool failed = ferror(out);
    if (fclose(out) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}
