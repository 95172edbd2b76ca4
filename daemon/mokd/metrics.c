/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Metrics for Prometheus. deploy/monitoring has the alerts and the dashboard that read them: a name that changes here
 * changes there. Labels are bounded: devices by the configuration, jobs by job_totals.h, layers by LAYERS_SHOWN.
 */
#include "metrics.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "client_queue.h"
#include "device.h"
#include "group.h"
#include "http.h"
#include "job_totals.h"
#include "layer.h"
#include "names.h"
#include "rack/rack.h"

#define LAYERS_SHOWN 256u
#define LABELS_BYTES 512

struct out {
    FILE *file;
    enum mokd_metrics_format format;
    const char *name, *suffix; /* of the family under way */
};

/* ------------------------------------------------------------------ writing */

enum type { COUNTER, GAUGE, HISTOGRAM, INFO };

/*
 * A new family. `unit`: the last part of the name, or NULL. In the older format a counter has the name of its sample.
 */
static void family(struct out *out, enum type type, const char *name, const char *unit, const char *help)
{
    static const char *const types[] = { "counter", "gauge", "histogram", "info" };
    static const char *const suffixes[] = { "_total", "", "", "_info" };
    bool open = out->format == MOKD_OPENMETRICS;
    const char *shown = open ? "" : suffixes[type];

    out->name = name;
    out->suffix = suffixes[type];
    fprintf(out->file, "# TYPE %s%s %s\n", name, shown, !open && type == INFO ? "gauge" : types[type]);
    if (open && unit)
        fprintf(out->file, "# UNIT %s %s\n", name, unit);
    fprintf(out->file, "# HELP %s%s %s\n", name, shown, help);
}

/* `labels` with braces, or "". */
static void whole(const struct out *out, const char *labels, uint64_t value)
{
    fprintf(out->file, "%s%s%s %" PRIu64 "\n", out->name, out->suffix, labels, value);
}

static void real(const struct out *out, const char *labels, double value)
{
    fprintf(out->file, "%s%s%s %.9g\n", out->name, out->suffix, labels, value);
}

static void seconds(const struct out *out, const char *labels, uint64_t ns)
{
    fprintf(out->file, "%s%s%s %" PRIu64 ".%09" PRIu64 "\n", out->name, out->suffix, labels, ns / 1000000000u,
            ns % 1000000000u);
}

/* Names of users come from the system: what would end a label is taken out. Job and device names need nothing. */
static const char *clean(const char *text, char *ret, size_t size)
{
    size_t used = 0;

    for (; *text && used + 1 < size; text++)
        ret[used++] = *text == '"' || *text == '\\' || (unsigned char)*text < 0x20 ? '_' : *text;
    ret[used] = '\0';
    return ret;
}

static const char *format_labels(char labels[LABELS_BYTES], const char *format, ...) _printf_(2, 3);
static const char *format_labels(char labels[LABELS_BYTES], const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(labels, LABELS_BYTES, format, arguments);
    va_end(arguments);
    return labels;
}

static const char *of_device(const struct mokd_device *device, char labels[LABELS_BYTES])
{
    return format_labels(labels, "{device=\"%s\"}", device->config->name);
}

/* ------------------------------------------------------------------ mokd itself */

static void add_daemon(struct out *out, const struct mokd_server *server)
{
    const struct mokd_session *session;
    uint64_t sessions = 0;
    char labels[LABELS_BYTES];

    TAILQ_FOREACH(session, &server->sessions, link)
        sessions += session->state == MOKD_SESSION_OPEN;
    family(out, INFO, "mok_build", NULL, "Version of mokd.");
    whole(out, format_labels(labels, "{version=\"%s\"}", MOK_BUILD_VERSION), 1);
    family(out, GAUGE, "mok_uptime_seconds", "seconds", "Time since mokd started.");
    seconds(out, "", mok_now_ns() - server->started_ns);
    family(out, GAUGE, "mok_sessions", NULL, "Sessions: connected processes of jobs.");
    whole(out, "", sessions);
    family(out, COUNTER, "mok_errors", NULL, "Requests refused, sessions ended by mokd, workers lost.");
    whole(out, "", server->errors);
    family(out, COUNTER, "mok_scrapes", NULL, "Times that these metrics were asked for.");
    whole(out, "", mokd_http_scrapes(server->http));
}

static uint64_t resident_bytes(void)
{
    unsigned long size, resident = 0;
    FILE *file = fopen("/proc/self/statm", "re");

    if (!file)
        return 0;
    if (fscanf(file, "%lu %lu", &size, &resident) != 2)
        resident = 0;
    fclose(file);
    return (uint64_t)resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static void add_process(struct out *out)
{
    struct rusage usage;

    getrusage(RUSAGE_SELF, &usage);
    family(out, COUNTER, "process_cpu_seconds", "seconds", "CPU time of mokd, without workers.");
    seconds(out, "",
            (uint64_t)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1000000000u +
                (uint64_t)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1000u);
    family(out, GAUGE, "process_resident_memory_bytes", "bytes", "Resident memory of mokd, without workers.");
    whole(out, "", resident_bytes());
}

static void add_groups(struct out *out, const struct mokd_server *server)
{
    static const enum mokd_group_state states[] = { MOKD_GROUP_FORMING, MOKD_GROUP_OPENING, MOKD_GROUP_READY,
                                                    MOKD_GROUP_FAILED };
    const struct mokd_group *group;
    uint64_t count[ARRAY_SIZE(states)] = { 0 };
    char labels[LABELS_BYTES];

    TAILQ_FOREACH(group, &server->groups, link)
        count[group->state]++;
    family(out, GAUGE, "mok_groups", NULL, "Groups by state.");
    for (size_t i = 0; i < ARRAY_SIZE(states); i++) /* opening shows as forming */
        if (states[i] != MOKD_GROUP_OPENING)
            whole(out, format_labels(labels, "{state=\"%s\"}", mokd_group_state_text(states[i])),
                  count[states[i]] + (states[i] == MOKD_GROUP_FORMING ? count[MOKD_GROUP_OPENING] : 0));
}

/* ------------------------------------------------------------------ devices */

#define devices_each(server, device)                                                                                   \
    for (size_t i_ = 0; i_ < (server)->n_devices; i_++)                                                                \
        for (const struct mokd_device *device = (server)->devices[i_]; device; device = NULL)

static void add_devices(struct out *out, const struct mokd_server *server)
{
    char labels[LABELS_BYTES];

    family(out, GAUGE, "mok_device_up", NULL, "Whether the device's worker is up.");
    devices_each(server, device) whole(out, of_device(device, labels), device->state == MOKD_DEVICE_UP);
    family(out, GAUGE, "mok_device_failed", NULL, "Whether the device was given up.");
    devices_each(server, device) whole(out, of_device(device, labels), device->state == MOKD_DEVICE_FAILED);
    family(out, COUNTER, "mok_device_restarts", NULL, "Times that the device's worker was started again.");
    devices_each(server, device) whole(out, of_device(device, labels), device->restarts);
    family(out, GAUGE, "mok_device_units", NULL, "Compute threads, or multiprocessors.");
    devices_each(server, device) whole(out, of_device(device, labels), device->units);
    family(out, GAUGE, "mok_device_memory_bytes", "bytes", "Memory that mokd may hand out on the device.");
    devices_each(server, device) whole(out, of_device(device, labels), device->config->memory);
    family(out, GAUGE, "mok_device_memory_used_bytes", "bytes", "Memory that mokd has handed out on the device.");
    devices_each(server, device) whole(out, of_device(device, labels), device->memory_used);
    family(out, GAUGE, "mok_device_sessions", NULL, "Sessions with a queue on the device.");
    devices_each(server, device) whole(out, of_device(device, labels), device->n_queues);
    family(out, COUNTER, "mok_device_recovered_ops", NULL,
           "Operations that mokd completed with an error because their worker had died.");
    devices_each(server, device) whole(out, of_device(device, labels), device->recovered_ops);
}

/* Those of the devices that have begun to count. */
#define pages_each(server, device, page)                                                                               \
    devices_each(server, device) for (const struct mok_stats *page = mokd_stats_page_read(&device->stats); page;       \
                                      page = NULL)

static const char *symbol_of(unsigned code, char *ret, size_t size)
{
    const char *symbol = mok_error_symbol((int)code);

    snprintf(ret, size, "%s", code == 0 ? "ok" : strncmp(symbol, "MOK_", 4) == 0 ? symbol + 4 : symbol);
    return ret;
}

static void add_ops(struct out *out, const struct mokd_server *server)
{
    char labels[LABELS_BYTES], symbol[32];

    family(out, COUNTER, "mok_ops", NULL, "Operations completed, by kind and result; ok, or the name of the error.");
    pages_each(server, device, page)
    {
        for (unsigned kind = 0; kind < MOK_STATS_KINDS; kind++) {
            for (unsigned code = 0; code < MOK_STATS_CODES; code++) {
                uint64_t count = mok_stats_get(&page->ops[kind][code]);
                if (count || code == 0)
                    whole(out,
                          format_labels(labels, "{device=\"%s\",op=\"%s\",result=\"%s\"}", device->config->name,
                                        mok_stats_kind_text(kind), symbol_of(code, symbol, sizeof(symbol))),
                          count);
            }
        }
    }
    family(out, GAUGE, "mok_ops_in_flight", NULL, "Operations taken by the worker and not completed.");
    pages_each(server, device, page)
        whole(out, of_device(device, labels), __atomic_load_n(&page->in_flight, __ATOMIC_RELAXED));
}

struct simple {
    const char *name, *help;
    size_t offset; /* of a u64 of struct mok_stats */
    bool is_time;
};

/* Counters that are one word of the page each. */
static const struct simple simple[] = {
    { "mok_rows", "Rows that experts have processed.", offsetof(struct mok_stats, rows), false },
    { "mok_rows_dropped", "Rows that were dropped. Always 0: no row ever is.", offsetof(struct mok_stats, rows_dropped),
      false },
    { "mok_tokens", "Tokens of operations that were done.", offsetof(struct mok_stats, tokens), false },
    { "mok_schedule_seconds", "Time of units that built schedules.", offsetof(struct mok_stats, schedule_ns), true },
    { "mok_transfer_seconds", "Time of units that moved rows between ranks.", offsetof(struct mok_stats, transfer_ns),
      true },
    { "mok_compute_seconds", "Time of units that ran experts.", offsetof(struct mok_stats, compute_ns), true },
    { "mok_macrobatches", "Macrobatches: passes of rows through the ring.", offsetof(struct mok_stats, macrobatches),
      false },
    { "mok_minibatches", "Minibatches handed to experts.", offsetof(struct mok_stats, minibatches), false },
    { "mok_ring_rows", "Rows, padded to tiles, that were in the ring, over all macrobatches.",
      offsetof(struct mok_stats, ring_rows), false },
    { "mok_ring_capacity_rows", "Rows that would have fitted the ring, over the same macrobatches.",
      offsetof(struct mok_stats, ring_capacity), false },
    { "mok_expert_max_rows", "Rows of the expert that had most, over main phases.",
      offsetof(struct mok_stats, expert_max_rows), false },
    { "mok_expert_mean_rows", "Rows of a local expert on average, over the same main phases.",
      offsetof(struct mok_stats, expert_mean_rows), false },
    { "mok_dispatcher_wakeups", "Times that the dispatcher slept and was woken.", offsetof(struct mok_stats, wakeups),
      false },
    { "mok_dispatcher_sleep_seconds", "Time that the dispatcher slept.", offsetof(struct mok_stats, sleep_ns), true },
    { "mok_peer_bells", "Workers of peers that were woken.", offsetof(struct mok_stats, peer_bells), false },
    { "mok_broken_queues", "Queues ended because their client broke the rules.",
      offsetof(struct mok_stats, broken_queues), false },
    { "mok_broken_groups", "Groups ended because an operation of theirs expired.",
      offsetof(struct mok_stats, broken_groups), false },
};

static void add_simple(struct out *out, const struct mokd_server *server)
{
    char labels[LABELS_BYTES];

    for (size_t i = 0; i < ARRAY_SIZE(simple); i++) {
        family(out, COUNTER, simple[i].name, simple[i].is_time ? "seconds" : NULL, simple[i].help);
        pages_each(server, device, page)
        {
            uint64_t value = mok_stats_get((const uint64_t *)(const void *)((const char *)page + simple[i].offset));
            if (simple[i].is_time)
                seconds(out, of_device(device, labels), value);
            else
                whole(out, of_device(device, labels), value);
        }
    }
}

static void add_phases(struct out *out, const struct mokd_server *server)
{
    char labels[LABELS_BYTES];

    family(out, COUNTER, "mok_device_busy_seconds", "seconds", "Time that the device ran phases of operations.");
    pages_each(server, device, page)
    {
        for (unsigned phase = 1; phase < MOK_STATS_PHASES; phase++)
            seconds(out,
                    format_labels(labels, "{device=\"%s\",phase=\"%s\"}", device->config->name,
                                  mok_stats_phase_text(phase)),
                    mok_stats_get(&page->phase_ns[phase]));
    }
    family(out, COUNTER, "mok_device_phases", NULL, "Phases of operations that the device ran.");
    pages_each(server, device, page)
    {
        for (unsigned phase = 1; phase < MOK_STATS_PHASES; phase++)
            whole(out,
                  format_labels(labels, "{device=\"%s\",phase=\"%s\"}", device->config->name,
                                mok_stats_phase_text(phase)),
                  mok_stats_get(&page->phases[phase]));
    }
}

/* The borders shown are the powers of two; the page has four times as many buckets. */
static void add_histogram(const struct out *out, const char *labels, const struct mok_stats_histogram *histogram)
{
    uint64_t count = 0;

    for (unsigned i = 0; i < MOK_STATS_BUCKETS; i++) {
        count += mok_stats_get(&histogram->bucket[i]);
        if (i % 4 == 0 && i < MOK_STATS_BUCKETS - 1)
            fprintf(out->file, "%s_bucket{%s,le=\"%.9g\"} %" PRIu64 "\n", out->name, labels,
                    (double)mok_stats_bucket_end(i) * 1e-9, count);
    }
    fprintf(out->file, "%s_bucket{%s,le=\"+Inf\"} %" PRIu64 "\n", out->name, labels, count);
    uint64_t sum = mok_stats_get(&histogram->sum_ns);
    fprintf(out->file, "%s_sum{%s} %" PRIu64 ".%09" PRIu64 "\n", out->name, labels, sum / 1000000000u,
            sum % 1000000000u);
    fprintf(out->file, "%s_count{%s} %" PRIu64 "\n", out->name, labels, count);
}

static void add_latencies(struct out *out, const struct mokd_server *server)
{
    char labels[LABELS_BYTES];

    family(
        out, HISTOGRAM, "mok_op_latency_seconds", "seconds",
        "Where the time of operations goes: queue (taken until the engine starts), ready_wait and push_wait (for other "
        "ranks), main and reduce (on the device; a group of one rank has all in main), total (taken until completed).");
    pages_each(server, device, page)
    {
        for (unsigned kind = 0; kind < 2; kind++)
            for (unsigned latency = 0; latency < MOK_LATENCIES; latency++)
                add_histogram(out,
                              format_labels(labels, "device=\"%s\",op=\"%s\",stage=\"%s\"", device->config->name,
                                            mok_stats_kind_text(1 + kind), mok_latency_text(latency)),
                              &page->latency[kind][latency]);
    }
}

/* ------------------------------------------------------------------ jobs and layers */

static void add_job_family(struct out *out, const struct mokd_server *server, size_t offset, bool is_time)
{
    const struct mokd_job_total *total;
    char labels[LABELS_BYTES], user[MOK_MAX_NAME + 1], job[MOK_MAX_NAME + 1];

    TAILQ_FOREACH(total, &server->job_totals, link) {
        uint64_t value = *(const uint64_t *)(const void *)((const char *)total + offset);
        format_labels(labels, "{user=\"%s\",uid=\"%d\",job=\"%s\"}", clean(total->user, user, sizeof(user)),
                      (int)total->uid, clean(total->job, job, sizeof(job)));
        if (is_time)
            seconds(out, labels, value);
        else
            whole(out, labels, value);
    }
}

static void add_jobs(struct out *out, const struct mokd_server *server)
{
    family(out, COUNTER, "mok_job_ops", NULL, "Operations completed, by user and job.");
    add_job_family(out, server, offsetof(struct mokd_job_total, ops), false);
    family(out, COUNTER, "mok_job_errors", NULL, "Operations that failed, by user and job.");
    add_job_family(out, server, offsetof(struct mokd_job_total, errors), false);
    family(out, COUNTER, "mok_job_rows", NULL, "Rows processed, by user and job.");
    add_job_family(out, server, offsetof(struct mokd_job_total, rows), false);
    family(out, COUNTER, "mok_job_device_seconds", "seconds", "Device time, by user and job.");
    add_job_family(out, server, offsetof(struct mokd_job_total, device_ns), true);
}

static void add_layer(struct out *out, const struct mokd_layer *layer, unsigned index, unsigned *left)
{
    char labels[LABELS_BYTES];
    struct mok_stats_layer stats;

    for (uint32_t rank = 0; *left && rank < layer->group->size; rank++) {
        const struct mokd_member *member = layer->group->member[rank];
        if (!member || !layer->part[rank].open)
            continue;
        if (!mokd_stats_page_layer(&member->device->stats, layer->id, &stats) || !stats.last_rows)
            continue;
        --*left;
        real(out,
             format_labels(labels, "{group=\"%s\",uid=\"%u\",layer=\"%u\",rank=\"%u\",device=\"%s\"}",
                           layer->group->name, layer->group->uid, index, rank, member->device->config->name),
             (double)stats.last_max_rows * (double)stats.local_experts / (double)stats.last_rows);
    }
}

static void add_layers(struct out *out, const struct mokd_server *server)
{
    const struct mokd_group *group;
    const struct mokd_layer *layer;
    unsigned left = LAYERS_SHOWN;

    family(out, GAUGE, "mok_layer_imbalance", NULL,
           "Rows of the expert that had most over the mean, of a layer's last main phase on a rank; 1: even.");
    TAILQ_FOREACH(group, &server->groups, link) {
        unsigned index = 0;
        if (group->state == MOKD_GROUP_FAILED) /* its name may be another one's already */
            continue;
        TAILQ_FOREACH(layer, &group->layers, link)
            add_layer(out, layer, index++, &left);
    }
}

/* ------------------------------------------------------------------ peers */

/* Families of one number a peer; this node is none. */
enum peer_number { PEER_UP, PEER_ROUND_TRIP, PEER_SILENCE, PEER_EPOCH, PEER_SENT, PEER_RECEIVED, PEER_DROPPED };

static void add_peer(struct out *out, const struct rack_node_info *info, enum peer_number what)
{
    char labels[LABELS_BYTES];

    format_labels(labels, "{peer=\"%s\"}", info->name);
    switch (what) {
    case PEER_UP:
        whole(out, labels, info->state == RACK_UP);
        return;
    case PEER_ROUND_TRIP:
        if (info->rtt_ns >= 0)
            seconds(out, labels, (uint64_t)info->rtt_ns);
        return;
    case PEER_SILENCE:
        seconds(out, labels, info->silent_ms * 1000000u);
        return;
    case PEER_EPOCH:
        whole(out, labels, info->epoch);
        return;
    case PEER_SENT:
        whole(out, labels, info->counters.sent);
        return;
    case PEER_RECEIVED:
        whole(out, labels, info->counters.received);
        return;
    case PEER_DROPPED:
        whole(out, labels, info->counters.stale + info->counters.expired + info->counters.malformed);
    }
}

/* So that what nodes serve can be told apart, and added up, by their names in the rack. */
static void add_node(struct out *out, const struct mokd_server *server)
{
    char labels[LABELS_BYTES], domain[MOK_MAX_NAME + 1];
    struct rack_node_info info;

    family(out, INFO, "mok_node", NULL, "This node's name in its rack, and its NVLink domain.");
    for (uint32_t node = 0; server->rack && node < RACK_MAX_NODES; node++)
        if (rack_info(server->rack, node, &info) == 0 && info.self)
            whole(out,
                  format_labels(labels, "{node=\"%s\",link_domain=\"%s\"}", info.name,
                                clean(info.link_domain, domain, sizeof(domain))),
                  1);
}

static void add_peers(struct out *out, const struct mokd_server *server)
{
    static const struct {
        enum peer_number number;
        enum type type;
        const char *name, *unit, *help;
    } families[] = {
        { PEER_UP, GAUGE, "mok_peer_up", NULL, "Whether the other node of the rack is up, as seen from here." },
        { PEER_ROUND_TRIP, GAUGE, "mok_peer_round_trip_seconds", "seconds", "Of a heartbeat, loop to loop." },
        { PEER_SILENCE, GAUGE, "mok_peer_silence_seconds", "seconds", "Time since the peer was heard." },
        { PEER_EPOCH, GAUGE, "mok_peer_epoch", NULL, "Grows each time that the peer is lost." },
        { PEER_SENT, COUNTER, "mok_peer_sent", NULL, "Commands sent to the peer." },
        { PEER_RECEIVED, COUNTER, "mok_peer_received", NULL, "Commands that came from the peer." },
        { PEER_DROPPED, COUNTER, "mok_peer_dropped", NULL,
          "Messages of the peer dropped: stale, expired or malformed." },
    };
    struct rack_node_info info;

    for (size_t i = 0; i < ARRAY_SIZE(families); i++) {
        family(out, families[i].type, families[i].name, families[i].unit, families[i].help);
        for (uint32_t node = 0; server->rack && node < RACK_MAX_NODES; node++)
            if (rack_info(server->rack, node, &info) == 0 && !info.self)
                add_peer(out, &info, families[i].number);
    }
}

char *mokd_metrics_text(struct mokd_server *server, enum mokd_metrics_format format, size_t *ret_length)
{
    char *text = NULL;
    struct out out = { .format = format, .file = open_memstream(&text, ret_length) };

    if (!out.file)
        return NULL;
    mokd_job_totals_take_all(server);
    add_daemon(&out, server);
    add_process(&out);
    add_groups(&out, server);
    add_devices(&out, server);
    add_ops(&out, server);
    add_simple(&out, server);
    add_phases(&out, server);
    add_latencies(&out, server);
    add_jobs(&out, server);
    add_layers(&out, server);
    add_node(&out, server);
    add_peers(&out, server);
    fputs("# EOF\n", out.file);
    bool failed = ferror(out.file);
    if (fclose(out.file) != 0 || failed) {
        free(text);
        return NULL;
    }
    return text;
}
