/* SPDX-License-Identifier: Apache-2.0 */
#include "client_queue.h"

#include <inttypes.h>
#include <stdio.h>

#include "admission.h"
#include "job_totals.h"
#include "layer.h"
#include "memory.h"
#include "mok/ring_abi.h"
#include "names.h"
#include "state.h"
#include "usage.h"

#define QUEUE_DESCRIPTORS 4u

/* ------------------------------------------------------------------ the object */

static void uncharge(struct mokd_user *user, uint64_t bytes, uint64_t descriptors)
{
    mokd_user_give_bytes(user, bytes);
    mokd_user_give(user, MOKD_DESCRIPTORS, descriptors);
}

static int charge(struct mokd_user *user, uint64_t bytes, uint64_t descriptors, struct mokd_error *error)
{
    int r = mokd_user_take_bytes(user, bytes, error);

    if (r < 0)
        return r;
    r = mokd_user_take(user, MOKD_DESCRIPTORS, descriptors, error);
    if (r < 0)
        mokd_user_give_bytes(user, bytes);
    return r;
}

/* The queue's memory, whose layout depends on its entries alone, and its descriptors. */
static int charge_queue(struct mokd_user *user, uint32_t entries, uint64_t *ret_bytes, struct mokd_error *error)
{
    struct mok_queue_layout layout;

    int r = mok_queue_layout(entries, &layout);
    if (r < 0)
        return mokd_error_set(error, r, "entries = %u: no queue: %s", entries, mok_error_text(r));
    uint64_t bytes = mok_memory_round(layout.control_bytes) + mok_memory_round(layout.submit_bytes) +
                     mok_memory_round(layout.inflight_bytes);
    r = charge(user, bytes, QUEUE_DESCRIPTORS, error);
    if (r < 0)
        return r;
    *ret_bytes = bytes;
    return 0;
}

static int charge_stream(struct mokd_queue *queue, uint64_t bytes, struct mokd_error *error)
{
    int r = charge(queue->session->user, bytes, 1, error);

    if (r < 0)
        return r;
    queue->stream.bytes = bytes;
    mokd_usage_hold_bytes(queue->usage, bytes);
    return 0;
}

static void stream_free(struct mokd_queue *queue)
{
    if (!queue->stream.bytes)
        return;
    mokd_usage_free_bytes(queue->usage, queue->stream.bytes);
    uncharge(queue->session->user, queue->stream.bytes, 1);
    queue->stream.bytes = 0;
    queue->stream.fd = mok_close(queue->stream.fd);
    queue->stream.open = false;
}

static struct mokd_queue *queue_new(struct mokd_session *session, struct mokd_device *device, uint64_t bytes)
{
    struct mokd_queue *queue = calloc(1, sizeof(*queue));

    if (!queue)
        return NULL;
    queue->bytes = bytes;
    queue->stream.fd = -1;
    queue->session = session;
    queue->device = device;
    queue->ring = (struct mok_queue)MOK_QUEUE_INIT;
    queue->id = mokd_server_next_id(session->server);
    queue->usage = mokd_usage_ref(session, device);
    mokd_usage_hold_bytes(queue->usage, bytes);
    TAILQ_INSERT_TAIL(&session->queues, queue, link);
    TAILQ_INSERT_TAIL(&device->queues, queue, device_link);
    device->n_queues++;
    return queue;
}

static void queue_free(struct mokd_queue *queue)
{
    mokd_job_totals_take(queue);
    stream_free(queue);
    mokd_usage_free_bytes(queue->usage, queue->bytes);
    mokd_usage_unref(queue->usage);
    uncharge(queue->session->user, queue->bytes, QUEUE_DESCRIPTORS);
    queue->session->ops_done += queue->ops_done;
    queue->session->device_ns += queue->counted.device_ns;
    queue->session->rows += queue->counted.rows;
    TAILQ_REMOVE(&queue->session->queues, queue, link);
    TAILQ_REMOVE(&queue->device->queues, queue, device_link);
    queue->device->n_queues--;
    mokd_device_emptier(queue->device);
    mok_queue_destroy(&queue->ring);
    free(queue);
}

static struct mokd_queue *any_queue_of(const struct mokd_session *session, const struct mokd_device *device)
{
    struct mokd_queue *queue;

    TAILQ_FOREACH(queue, &session->queues, link)
        if (queue->device == device)
            return queue;
    return NULL;
}

struct mokd_queue *mokd_queue_of(const struct mokd_session *session, const struct mokd_device *device)
{
    struct mokd_queue *queue = any_queue_of(session, device);
    return queue && queue->open && !queue->closing ? queue : NULL;
}

static struct mokd_queue *queue_by_id(const struct mokd_session *session, uint32_t id)
{
    struct mokd_queue *queue;

    TAILQ_FOREACH(queue, &session->queues, link)
        if (queue->id == id && queue->open)
            return queue;
    return NULL;
}

static struct mokd_queue *queue_at_device(struct mokd_device *device, uint32_t id)
{
    struct mokd_queue *queue;

    TAILQ_FOREACH(queue, &device->queues, device_link)
        if (queue->id == id && queue->open)
            return queue;
    return NULL;
}

/* ------------------------------------------------------------------ opening */

static void hand_out(struct mokd_queue *queue)
{
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__QueueOpenReply body = MOK__QUEUE_OPEN_REPLY__INIT;
    int fds[] = { queue->ring.control_fd, queue->ring.submit_fd, queue->ring.doorbell_fd };

    queue->open = true;
    mokd_state_touch(queue->session->server); /* its id */
    body.queue = queue->id;
    body.control_bytes = queue->ring.layout.control_bytes;
    body.submit_bytes = queue->ring.layout.submit_bytes;
    reply.body_case = MOK__REPLY__BODY_QUEUE_OPEN;
    reply.queue_open = &body;
    mokd_call_reply(&queue->call, &reply, fds, ARRAY_SIZE(fds));
}

static void send_close(struct mokd_queue *queue, int code);

/* The worker has mapped the queue, or not: only now may the control page be sealed and the client see it. */
static void opened(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_queue *queue = cookie;
    struct mokd_call call = queue->call;
    struct mokd_error error = { 0 };

    (void)tag;
    if (answer->code < 0) {
        mokd_error_set(&error, answer->code, "queue on device %s: %s", queue->device->config->name, answer->text);
        queue_free(queue);
        mokd_call_fail(&call, &error);
        return;
    }
    int r = mok_queue_seal(&queue->ring);
    if (r < 0 || call.session->state == MOKD_SESSION_CLOSING) {
        mokd_error_set(&error, r < 0 ? r : -MOK_ESESSION, "queue on device %s: %s", queue->device->config->name,
                       mok_error_text(r < 0 ? r : -MOK_ESESSION));
        send_close(queue, error.code);
        mokd_call_fail(&call, &error);
        return;
    }
    hand_out(queue);
}

static int check_open(struct mokd_session *session, const Mok__QueueOpen *request, struct mokd_device **ret_device,
                      struct mokd_error *error)
{
    uint32_t bound = session->user->limits.queue_entries;

    int r = mokd_session_device(session, request->device, ret_device, error);
    if (r < 0)
        return r;
    if (!mok_is_power_of_two(request->entries) || request->entries < MOK_RING_MIN_ENTRIES ||
        request->entries > MOK_RING_MAX_ENTRIES)
        return mokd_error_set(error, -MOK_ERANGE, "entries = %u: must be a power of two in %u..%u", request->entries,
                              MOK_RING_MIN_ENTRIES, MOK_RING_MAX_ENTRIES);
    if (request->entries > bound)
        return mokd_error_set(error, -MOK_EQUOTA, "entries = %u: user %s may have %u in a queue", request->entries,
                              session->user->name, bound);
    const struct mokd_queue *queue = any_queue_of(session, *ret_device);
    if (queue)
        return mokd_error_set(error, -MOK_EEXIST, "device = %u: the session has queue %u on it", request->device,
                              queue->id);
    return mokd_admit_queue(session, *ret_device, error);
}

void mokd_queue_open(struct mokd_session *session, uint64_t id, const Mok__QueueOpen *request)
{
    struct mokd_error error = { 0 };
    struct mokd_device *device = NULL;
    uint64_t bytes = 0;

    if (check_open(session, request, &device, &error) < 0 ||
        charge_queue(session->user, request->entries, &bytes, &error) < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    struct mokd_queue *queue = queue_new(session, device, bytes);
    if (!queue)
        uncharge(session->user, bytes, QUEUE_DESCRIPTORS);
    int r = queue ? mok_queue_create(request->entries, request->initial_counter, &queue->ring) : -MOK_ENOMEM;
    if (r < 0) {
        if (queue)
            queue_free(queue);
        mokd_error_set(&error, r, "entries = %u: no queue: %s", request->entries, mok_error_text(r));
        mokd_session_refuse(session, id, &error);
        return;
    }
    Mok__WorkerRequest message = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerQueueOpen body = MOK__WORKER_QUEUE_OPEN__INIT;
    Mok__WorkerShare share;
    int fds[] = { queue->ring.control_fd, queue->ring.submit_fd, queue->ring.inflight_fd, queue->ring.doorbell_fd };
    body.queue = queue->id;
    body.session = session->id;
    body.control_bytes = queue->ring.layout.control_bytes;
    body.submit_bytes = queue->ring.layout.submit_bytes;
    body.inflight_bytes = queue->ring.layout.inflight_bytes;
    body.uid = session->user->uid;
    mokd_user_claim(session->user, &share);
    body.share = &share;
    body.weight = session->weight;
    message.body_case = MOK__WORKER_REQUEST__BODY_QUEUE_OPEN;
    message.queue_open = &body;
    queue->call = mokd_call_begin(session, id);
    mokd_device_send(device, &message, fds, ARRAY_SIZE(fds), MOKD_WORKER_TIMEOUT_MS, opened, queue, 0);
}

/* ------------------------------------------------------------------ stream slots */

static uint32_t slots_of(const struct mokd_queue *queue)
{
    return queue->ring.layout.cq_entries;
}

static void stream_answer(struct mokd_call *call, struct mokd_queue *queue)
{
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__StreamOpenReply body = MOK__STREAM_OPEN_REPLY__INIT;

    body.bytes = queue->stream.bytes;
    body.slots = slots_of(queue);
    reply.body_case = MOK__REPLY__BODY_STREAM_OPEN;
    reply.stream_open = &body;
    mokd_call_reply(call, &reply, &queue->stream.fd, 1);
}

static void stream_opened(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_call *call = cookie;
    struct mokd_error error = { 0 };
    struct mokd_queue *queue = queue_by_id(call->session, tag);

    if (answer->code < 0)
        mokd_error_set(&error, answer->code, "queue = %u: %s", tag, answer->text);
    else if (!queue)
        mokd_error_set(&error, -MOK_ENOENT, "queue = %u: has been closed meanwhile", tag);
    if (error.code < 0 && queue)
        stream_free(queue);
    if (error.code < 0) {
        mokd_call_fail(call, &error);
    } else {
        queue->stream.open = true;
        stream_answer(call, queue);
    }
    free(call);
}

static int stream_create(struct mokd_queue *queue, struct mokd_error *error)
{
    int r = charge_stream(queue, mok_memory_round(slots_of(queue) * sizeof(struct mok_stream_slot)), error);

    if (r < 0)
        return r;
    r = mok_memory_create("mok-stream", queue->stream.bytes, &queue->stream.fd);
    if (r < 0) {
        stream_free(queue);
        return mokd_error_set(error, r, "queue = %u: no memory for its stream slots: %s", queue->id, mok_error_text(r));
    }
    return 0;
}

static void stream_send(struct mokd_queue *queue, struct mokd_call *call)
{
    Mok__WorkerRequest message = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerStreamOpen body = MOK__WORKER_STREAM_OPEN__INIT;

    body.queue = queue->id;
    body.bytes = queue->stream.bytes;
    message.body_case = MOK__WORKER_REQUEST__BODY_STREAM_OPEN;
    message.stream_open = &body;
    mokd_device_send(queue->device, &message, &queue->stream.fd, 1, MOKD_WORKER_TIMEOUT_MS, stream_opened, call,
                     queue->id);
}

static int stream_begin(struct mokd_queue *queue, struct mokd_session *session, uint64_t id, struct mokd_error *error)
{
    if (queue->stream.bytes)
        return mokd_error_set(error, -MOK_EBUSY, "queue = %u: its stream slots are being made", queue->id);
    _cleanup_free_ struct mokd_call *call = calloc(1, sizeof(*call));
    if (!call)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    int r = stream_create(queue, error);
    if (r < 0)
        return r;
    *call = mokd_call_begin(session, id);
    stream_send(queue, mok_take_pointer(&call));
    return 0;
}

void mokd_stream_open(struct mokd_session *session, uint64_t id, const Mok__StreamOpen *request)
{
    struct mokd_queue *queue = queue_by_id(session, request->queue);
    struct mokd_error error = { 0 };

    if (!queue || queue->closing)
        mokd_error_set(&error, -MOK_ENOENT, "queue = %u: the session has no such queue", request->queue);
    else if (queue->stream.open) {
        struct mokd_call call = mokd_call_begin(session, id);
        stream_answer(&call, queue);
    } else {
        stream_begin(queue, session, id, &error);
    }
    if (error.code < 0)
        mokd_session_refuse(session, id, &error);
}

/* ------------------------------------------------------------------ closing */

static void closed(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_queue *queue = cookie;
    struct mokd_session *session = queue->session;
    struct mokd_call call = queue->close_call;

    (void)tag;
    (void)answer; /* closed by the worker, or the worker is dead: nobody serves it either way */
    queue_free(queue);
    if (call.session)
        mokd_call_done(&call);
    mokd_session_unref(session);
}

static void send_close(struct mokd_queue *queue, int code)
{
    Mok__WorkerRequest message = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerQueueClose body = MOK__WORKER_QUEUE_CLOSE__INIT;

    queue->closing = true;
    body.queue = queue->id;
    body.code = code;
    message.body_case = MOK__WORKER_REQUEST__BODY_QUEUE_CLOSE;
    message.queue_close = &body;
    mokd_session_ref(queue->session);
    mokd_device_refresh(queue->device); /* so that the queue's last operations are counted */
    mokd_device_send(queue->device, &message, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS, closed, queue, 0);
}

void mokd_queues_close(struct mokd_session *session, int code)
{
    struct mokd_queue *queue, *next;

    for (queue = TAILQ_FIRST(&session->queues); queue; queue = next) {
        next = TAILQ_NEXT(queue, link);
        if (queue->open && !queue->closing)
            send_close(queue, code);
    }
}

/* A layer of the session that the queue's worker runs for it, or NULL. */
static const struct mokd_layer *layer_served(const struct mokd_queue *queue)
{
    const struct mokd_member *member;
    const struct mokd_layer *layer;

    TAILQ_FOREACH(member, &queue->session->members, link) {
        if (member->device != queue->device)
            continue;
        TAILQ_FOREACH(layer, &member->group->layers, link)
            if (layer->part[member->rank].open)
                return layer;
    }
    return NULL;
}

/* The client's own wish: what it has in flight there is canceled. */
void mokd_queue_close(struct mokd_session *session, uint64_t id, const Mok__QueueClose *request)
{
    struct mokd_queue *queue = queue_by_id(session, request->queue);
    const struct mokd_layer *layer = queue ? layer_served(queue) : NULL;
    struct mokd_error error = { 0 };

    if (!queue || queue->closing)
        mokd_error_set(&error, -MOK_ENOENT, "queue = %u: the session has no such queue", request->queue);
    else if (layer)
        mokd_error_set(&error, -MOK_EBUSY, "queue = %u: layer %u of the session needs it", request->queue, layer->id);
    if (error.code < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    queue->close_call = mokd_call_begin(session, id);
    send_close(queue, -MOK_ECANCELED);
}

/* ------------------------------------------------------------------ what befalls them */

/* While mokd stops, that is why. */
static void recover(struct mokd_queue *queue)
{
    int code = queue->session->server->stopping ? -MOK_EDAEMON : -MOK_EWORKER;
    int owed = mok_queue_recover(&queue->ring, code);

    queue->device->recovered_ops += owed > 0 ? (uint64_t)owed : 0;
    mok_queue_close(&queue->ring, code);
    mok_log(MOK_LOG_INFO, "queue", "ended with its worker", "queue=%u session=%" PRIu64 " device=%s owed=%d", queue->id,
            queue->session->id, queue->device->config->name, owed);
}

void mokd_queues_recover(struct mokd_device *device)
{
    struct mokd_queue *queue, *next;

    for (queue = TAILQ_FIRST(&device->queues); queue; queue = next) {
        next = TAILQ_NEXT(queue, device_link);
        if (!queue->open)
            continue;
        recover(queue);
        if (!queue->closing) /* else the end of the request to close it frees it */
            queue_free(queue);
    }
}

void mokd_queue_broken(struct mokd_device *device, uint32_t id, int code, const char *text)
{
    struct mokd_queue *queue = queue_at_device(device, id);
    char sentence[MOKD_TEXT_MAX];

    if (!queue || queue->closing)
        return;
    snprintf(sentence, sizeof(sentence), "queue %u is broken: %s", id, text);
    mokd_session_close(queue->session, code, sentence);
}

void mokd_queue_take_stats(struct mokd_device *device, const Mok__WorkerQueueStats *stats)
{
    struct mokd_queue *queue = queue_at_device(device, stats->queue);
    if (!queue)
        return;
    queue->ops_done = stats->ops_done;
    mokd_job_totals_take_stats(queue, stats);
}

/* ------------------------------------------------------------------ questions */

struct op_query {
    struct mokd_call call;
};

static void op_answered(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct op_query *query = cookie;
    struct mokd_error error = { 0 };

    (void)tag;
    if (answer->code < 0) {
        mokd_error_set(&error, answer->code, "%s", answer->text);
        mokd_call_fail(&query->call, &error);
    } else if (answer->reply->body_case != MOK__WORKER_REPLY__BODY_OP_QUERY) {
        mokd_error_set(&error, -MOK_EINTERNAL, "the worker's answer fits no question");
        mokd_call_fail(&query->call, &error);
    } else {
        Mok__Reply reply = MOK__REPLY__INIT;
        reply.body_case = MOK__REPLY__BODY_OP_QUERY;
        reply.op_query = answer->reply->op_query;
        mokd_call_reply(&query->call, &reply, NULL, 0);
    }
    free(query);
}

void mokd_op_query(struct mokd_session *session, uint64_t id, const Mok__OpQuery *request)
{
    const struct mokd_queue *queue = queue_by_id(session, request->queue);
    struct mokd_error error = { 0 };
    struct op_query *query = NULL;

    if (!queue)
        mokd_error_set(&error, -MOK_ENOENT, "queue = %u: the session has no such queue", request->queue);
    else if (!(query = calloc(1, sizeof(*query))))
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (!query) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    Mok__WorkerRequest message = MOK__WORKER_REQUEST__INIT;
    Mok__OpQuery body = MOK__OP_QUERY__INIT;
    body.queue = request->queue;
    body.user_data = request->user_data;
    message.body_case = MOK__WORKER_REQUEST__BODY_OP_QUERY;
    message.op_query = &body;
    query->call = mokd_call_begin(session, id);
    mokd_device_send(queue->device, &message, NULL, 0, MOKD_WORKER_TIMEOUT_MS, op_answered, query, 0);
}
