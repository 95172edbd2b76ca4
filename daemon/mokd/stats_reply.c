/* SPDX-License-Identifier: Apache-2.0 */
#include "stats_reply.h"

#include "client_queue.h"
#include "device.h"
#include "job_totals.h"
#include "mok/ring_abi.h"

/* An answer and its envelope stay within one packet. */
#define ANSWER_BYTES (MOK_WIRE_MAX_BYTES - 4096u)

/* A device's numbers and the memory behind them. */
struct device_stats {
    Mok__DeviceStats body;
    Mok__LatencyStats latency[MOK_LATENCIES], *latency_pointer[MOK_LATENCIES];
    struct mok_stats_histogram sum[MOK_LATENCIES];
};

struct answer {
    Mok__StatsReply body;
    struct device_stats *devices;
    Mok__DeviceStats **device_pointers;
    Mok__SessionStats *sessions, **session_pointers;
    size_t bytes;
};

static bool fits(struct answer *answer, const ProtobufCMessage *entry)
{
    size_t bytes = protobuf_c_message_get_packed_size(entry) + 8;

    if (answer->bytes + bytes > ANSWER_BYTES) {
        answer->body.omitted++;
        return false;
    }
    answer->bytes += bytes;
    return true;
}

static void fill_latencies(const struct mok_stats *page, struct device_stats *ret)
{
    for (unsigned i = 0; i < MOK_LATENCIES; i++) {
        size_t count = MOK_STATS_BUCKETS;

        mok_stats_histogram_add(&ret->sum[i], &page->latency[0][i]);
        mok_stats_histogram_add(&ret->sum[i], &page->latency[1][i]);
        while (count > 0 && !ret->sum[i].bucket[count - 1])
            count--;
        ret->latency[i] = (Mok__LatencyStats)MOK__LATENCY_STATS__INIT;
        ret->latency[i].n_bucket = count;
        ret->latency[i].bucket = ret->sum[i].bucket;
        ret->latency_pointer[i] = &ret->latency[i];
    }
    ret->body.n_latency = MOK_LATENCIES;
    ret->body.latency = ret->latency_pointer;
}

static void fill_counts(const struct mok_stats *page, Mok__DeviceStats *ret)
{
    for (unsigned kind = MOK_OP_FORWARD; kind <= MOK_OP_BACKWARD; kind++) {
        ret->done += mok_stats_get(&page->ops[kind][0]);
        for (unsigned code = 1; code < MOK_STATS_CODES; code++)
            ret->failed += mok_stats_get(&page->ops[kind][code]);
    }
    for (unsigned phase = 1; phase < MOK_STATS_PHASES; phase++)
        ret->busy_ns += mok_stats_get(&page->phase_ns[phase]);
    ret->in_flight = __atomic_load_n(&page->in_flight, __ATOMIC_RELAXED);
    ret->rows = mok_stats_get(&page->rows);
    ret->expert_max_rows = mok_stats_get(&page->expert_max_rows);
    ret->expert_mean_rows = mok_stats_get(&page->expert_mean_rows);
}

static void add_device(const struct mokd_device *device, struct answer *answer)
{
    struct device_stats *entry = &answer->devices[answer->body.n_device];
    const struct mok_stats *page = mokd_stats_page_read(&device->stats);
    Mok__DeviceInfo info;

    mokd_device_info(device, &info);
    entry->body = (Mok__DeviceStats)MOK__DEVICE_STATS__INIT;
    entry->body.index = device->index;
    entry->body.name = info.name;
    entry->body.state = info.state;
    entry->body.memory_bytes = info.memory_bytes;
    entry->body.memory_used = info.memory_used;
    if (page) {
        fill_counts(page, &entry->body);
        fill_latencies(page, entry);
    }
    answer->device_pointers[answer->body.n_device] = &entry->body;
    answer->body.n_device += fits(answer, &entry->body.base);
}

static void add_session(const struct mokd_queue *queue, struct answer *answer)
{
    Mok__SessionStats *entry = &answer->sessions[answer->body.n_session];
    const struct mokd_session *session = queue->session;

    *entry = (Mok__SessionStats)MOK__SESSION_STATS__INIT;
    entry->session = session->id;
    entry->job = (char *)session->job;
    entry->user = session->user->name;
    entry->pid = (uint32_t)session->peer.pid;
    entry->device = queue->device->index;
    entry->in_flight = queue->in_flight;
    entry->ops = queue->counted.ops;
    entry->errors = queue->counted.errors;
    entry->rows = queue->counted.rows;
    entry->device_ns = queue->counted.device_ns;
    answer->session_pointers[answer->body.n_session] = entry;
    answer->body.n_session += fits(answer, &entry->base);
}

static void fill(const struct mokd_server *server, struct answer *answer)
{
    answer->body = (Mok__StatsReply)MOK__STATS_REPLY__INIT;
    answer->body.now_ns = mok_now_ns();
    for (size_t i = 0; i < server->n_devices; i++)
        add_device(server->devices[i], answer);
    for (size_t i = 0; i < server->n_devices; i++) {
        const struct mokd_queue *queue;
        TAILQ_FOREACH(queue, &server->devices[i]->queues, device_link)
            add_session(queue, answer);
    }
    answer->body.device = answer->device_pointers;
    answer->body.session = answer->session_pointers;
}

void mokd_stats_query(struct mokd_session *session, uint64_t id)
{
    struct mokd_server *server = session->server;
    size_t n_queues = 1;
    struct mokd_error error = { 0 };

    for (size_t i = 0; i < server->n_devices; i++)
        n_queues += server->devices[i]->n_queues;
    _cleanup_free_ struct device_stats *devices = calloc(server->n_devices, sizeof(*devices));
    _cleanup_free_ Mok__DeviceStats **device_pointers = calloc(server->n_devices, sizeof(*device_pointers));
    _cleanup_free_ Mok__SessionStats *sessions = calloc(n_queues, sizeof(*sessions));
    _cleanup_free_ Mok__SessionStats **session_pointers = calloc(n_queues, sizeof(*session_pointers));
    if (!devices || !device_pointers || !sessions || !session_pointers) {
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
        mokd_session_refuse(session, id, &error);
        return;
    }
    struct answer answer = { .devices = devices,
                             .device_pointers = device_pointers,
                             .sessions = sessions,
                             .session_pointers = session_pointers };
    mokd_job_totals_take_all(server);
    fill(server, &answer);
    Mok__Reply reply = MOK__REPLY__INIT;
    reply.body_case = MOK__REPLY__BODY_STATS;
    reply.stats = &answer.body;
    struct mokd_call call = mokd_call_begin(session, id);
    mokd_call_reply(&call, &reply, NULL, 0);
}
