/* SPDX-License-Identifier: Apache-2.0 */
#include "trace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client_queue.h"
#include "device.h"
#include "memory.h"
#include "timer.h"
#include "trace_events.h"

#define MIN_MS 10u
#define MAX_MS 60000u
/* Events of a device: some seconds of a busy one. */
#define CAPACITY 32768u
/* Sessions that an answer names; it fits a packet. */
#define MAX_SESSIONS 300u

struct mokd_trace {
    struct mokd_server *server;
    struct mokd_call call;
    uid_t uid;
    bool sees_all;
    bool hurry;              /* no more waiting */
    bool displaced;          /* by `next` */
    struct mokd_trace *next; /* an administrator's, which begins once this one has ended */
    uint32_t ms;
    uint64_t end_ms; /* of the loop's clock; 0: has not begun */
    struct mokd_timer *timer;
    struct mokd_gather gather;
    struct {
        int fd; /* -1: none */
        struct mok_trace *memory;
        bool asked;
    } part[]; /* [n_devices] */
};

static void trace_free(struct mokd_trace *trace)
{
    for (size_t i = 0; i < trace->server->n_devices; i++) {
        mok_memory_unmap(trace->part[i].memory, mok_trace_bytes(CAPACITY));
        mok_close(trace->part[i].fd);
    }
    mokd_timer_cancel(&trace->timer);
    free(trace);
}

/* ------------------------------------------------------------------ what the asker gets */

static const struct mokd_queue *queue_of(const struct mokd_device *device, uint32_t id)
{
    const struct mokd_queue *queue;

    TAILQ_FOREACH(queue, &device->queues, device_link)
        if (queue->id == id)
            return queue;
    return NULL;
}

/* What a queue that has gone meanwhile did is its user's, whom nobody knows any more. */
static bool may_see(const struct mokd_trace *trace, const struct mokd_device *device, uint32_t queue_id)
{
    if (trace->sees_all)
        return true;
    const struct mokd_queue *queue = queue_of(device, queue_id);
    return queue && queue->session->peer.uid == trace->uid;
}

/* False: it is none of the asker's business. Of others he sees that the device was busy, and with which phase. */
static bool censor(const struct mokd_trace *trace, const struct mokd_device *device, struct mok_trace_event *event)
{
    if (event->type == MOK_TRACE_SLEEP || may_see(trace, device, event->queue))
        return true;
    if (event->type != MOK_TRACE_PHASE)
        return false;
    event->queue = event->layer = event->slot = event->turn = 0;
    event->op = event->rows = 0;
    return true;
}

/* The worker may have died in the middle of an event, or gone wrong. */
static bool is_whole(const struct mok_trace_event *event)
{
    return event->type > MOK_TRACE_NONE && event->type < MOK_TRACE_TYPES && event->start_ns <= event->end_ns;
}

static void copy_part(const struct mokd_trace *trace, size_t index, struct mok_trace *ret, uint64_t *dropped)
{
    const struct mok_trace *memory = trace->part[index].memory;
    uint64_t written = memory ? __atomic_load_n(&memory->written, __ATOMIC_ACQUIRE) : 0;
    uint64_t first = written > CAPACITY ? written - CAPACITY : 0;

    *dropped += first;
    for (uint64_t i = first; i < written; i++) {
        struct mok_trace_event event = memory->event[i % CAPACITY];
        if (!is_whole(&event) || !censor(trace, trace->server->devices[index], &event))
            continue;
        event.device = (uint32_t)index;
        ret->event[ret->written++] = event;
    }
}

/* One memory with the events of all devices; *ret_fd is the caller's. */
static int make_copy(const struct mokd_trace *trace, int *ret_fd, uint64_t *ret_events, uint64_t *ret_dropped)
{
    _cleanup_fd_ int fd = -1;
    uint64_t bytes = mok_trace_bytes(0);
    void *address;

    for (size_t i = 0; i < trace->server->n_devices; i++) {
        const struct mok_trace *memory = trace->part[i].memory;
        uint64_t written = memory ? __atomic_load_n(&memory->written, __ATOMIC_ACQUIRE) : 0;
        bytes += (written < CAPACITY ? written : CAPACITY) * sizeof(struct mok_trace_event);
    }
    int r = mok_memory_create("mok-trace", mok_memory_round(bytes), &fd);
    if (r == 0)
        r = mok_memory_map(fd, bytes, MOK_MAP_WRITE, &address);
    if (r < 0)
        return r;
    struct mok_trace *copy = address;
    copy->magic = MOK_TRACE_MAGIC;
    copy->version = MOK_TRACE_VERSION;
    *ret_dropped = 0;
    for (size_t i = 0; i < trace->server->n_devices; i++)
        copy_part(trace, i, copy, ret_dropped);
    copy->capacity = (uint32_t)copy->written;
    *ret_events = copy->written;
    *ret_fd = mok_take_fd(&fd);
    mok_memory_unmap(address, bytes);
    return 0;
}

static size_t name_sessions(const struct mokd_trace *trace, Mok__TraceSession *ret, Mok__TraceSession **ret_pointers)
{
    size_t count = 0;

    for (size_t i = 0; i < trace->server->n_devices; i++) {
        const struct mokd_queue *queue;
        TAILQ_FOREACH(queue, &trace->server->devices[i]->queues, device_link) {
            if (count == MAX_SESSIONS || !may_see(trace, trace->server->devices[i], queue->id))
                continue;
            Mok__TraceSession *entry = &ret[count];
            *entry = (Mok__TraceSession)MOK__TRACE_SESSION__INIT;
            entry->queue = queue->id;
            entry->device = (uint32_t)i;
            entry->session = queue->session->id;
            entry->job = queue->session->job;
            entry->user = queue->session->user->name;
            entry->pid = (uint32_t)queue->session->peer.pid;
            ret_pointers[count++] = entry;
        }
    }
    return count;
}

static void answer(struct mokd_trace *trace)
{
    struct mokd_server *server = trace->server;
    _cleanup_free_ Mok__TraceSession *sessions = calloc(MAX_SESSIONS, sizeof(*sessions));
    _cleanup_free_ Mok__TraceSession **pointers = calloc(MAX_SESSIONS, sizeof(*pointers));
    char *names[MOK_MAX_DEVICES];
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__TraceReply body = MOK__TRACE_REPLY__INIT;
    struct mokd_error error = { 0 };
    _cleanup_fd_ int fd = -1;

    int r = sessions && pointers ? make_copy(trace, &fd, &body.events, &body.dropped) : -MOK_ENOMEM;
    if (r < 0) {
        mokd_error_set(&error, r, "trace: no memory for what was recorded: mokd is at a limit");
        mokd_call_fail(&trace->call, &error);
        return;
    }
    for (size_t i = 0; i < server->n_devices; i++)
        names[i] = (char *)server->devices[i]->config->name;
    body.n_device = server->n_devices;
    body.device = names;
    body.n_session = name_sessions(trace, sessions, pointers);
    body.session = pointers;
    body.displaced = trace->displaced;
    reply.body_case = MOK__REPLY__BODY_TRACE;
    reply.trace = &body;
    mokd_call_reply(&trace->call, &reply, &fd, 1);
}

/* ------------------------------------------------------------------ its course */

static void begin(struct mokd_trace *trace);

static void ended(struct mokd_gather *gather)
{
    struct mokd_trace *trace = mokd_container_of(gather, struct mokd_trace, gather);
    struct mokd_trace *next = trace->next;

    answer(trace);
    trace->server->trace = NULL;
    trace_free(trace);
    if (next)
        begin(next);
}

static void tell_workers(struct mokd_trace *trace, bool on)
{
    for (size_t i = 0; i < trace->server->n_devices; i++) {
        struct mokd_device *device = trace->server->devices[i];
        Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
        Mok__WorkerTrace body = MOK__WORKER_TRACE__INIT;

        if (device->state != MOKD_DEVICE_UP || trace->part[i].fd < 0 || (!on && !trace->part[i].asked))
            continue;
        trace->part[i].asked = true;
        body.bytes = on ? mok_trace_bytes(CAPACITY) : 0;
        request.body_case = MOK__WORKER_REQUEST__BODY_TRACE;
        request.trace = &body;
        mokd_gather_send(&trace->gather, device, &request, &trace->part[i].fd, on, MOKD_WORKER_TIMEOUT_MS, (uint32_t)i);
    }
}

/* A worker that died meanwhile, or that never began, does not matter: the others have something to tell. */
static void stop(struct mokd_trace *trace)
{
    mokd_timer_cancel(&trace->timer);
    mokd_gather_begin(&trace->gather, ended);
    tell_workers(trace, false);
    mokd_gather_end(&trace->gather);
}

static void time_is_up(void *cookie)
{
    stop(cookie);
}

static void begun(struct mokd_gather *gather)
{
    struct mokd_trace *trace = mokd_container_of(gather, struct mokd_trace, gather);

    if (!trace->hurry)
        trace->timer = mokd_timer_start(&trace->server->loop, trace->ms, time_is_up, trace);
    trace->end_ms = uv_now(&trace->server->loop) + trace->ms;
    if (!trace->timer)
        stop(trace);
}

static void begin(struct mokd_trace *trace)
{
    trace->server->trace = trace;
    mokd_gather_begin(&trace->gather, begun);
    tell_workers(trace, true);
    mokd_gather_end(&trace->gather);
}

static void hurry(struct mokd_trace *trace)
{
    trace->hurry = true;
    if (trace->timer)
        stop(trace);
}

void mokd_trace_hurry(struct mokd_server *server, const struct mokd_session *session)
{
    struct mokd_trace *trace = server->trace, *next = trace ? trace->next : NULL;

    if (next && (!session || next->call.session == session))
        hurry(next);
    if (trace && (!session || trace->call.session == session))
        hurry(trace);
}

static int make_memory(struct mokd_trace *trace)
{
    for (size_t i = 0; i < trace->server->n_devices; i++) {
        uint64_t bytes = mok_trace_bytes(CAPACITY);
        void *address;
        int r = 0;

        if (trace->server->devices[i]->state != MOKD_DEVICE_UP)
            continue;
        r = mok_memory_create("mok-trace", mok_memory_round(bytes), &trace->part[i].fd);
        if (r == 0)
            r = mok_memory_map(trace->part[i].fd, bytes, MOK_MAP_READ, &address);
        if (r < 0)
            return r;
        trace->part[i].memory = address;
    }
    return 0;
}

static int trace_new(struct mokd_session *session, uint32_t ms, struct mokd_trace **ret)
{
    struct mokd_server *server = session->server;
    struct mokd_trace *trace = calloc(1, sizeof(*trace) + server->n_devices * sizeof(trace->part[0]));

    if (!trace)
        return -MOK_ENOMEM;
    trace->server = server;
    trace->ms = ms;
    trace->uid = session->peer.uid;
    trace->sees_all = mokd_session_is_admin(session);
    for (size_t i = 0; i < server->n_devices; i++)
        trace->part[i].fd = -1;
    int r = make_memory(trace);
    if (r < 0) {
        trace_free(trace);
        return r;
    }
    *ret = trace;
    return 0;
}

/* Who has the place that `session` wants, and until when. */
static void refuse_busy(const struct mokd_server *server, struct mokd_error *error)
{
    const struct mokd_trace *trace = server->trace->next ? server->trace->next : server->trace;
    const struct mokd_session *holder = trace->call.session;
    uint64_t now_ms = uv_now(&server->loop);
    uint64_t left_ms = !trace->end_ms ? trace->ms : trace->end_ms > now_ms ? trace->end_ms - now_ms : 0;

    mokd_error_set(error, -MOK_EBUSY, "trace: one of %s (pid %d) is under way, which ends within %" PRIu64 " s%s",
                   holder->user->name, (int)holder->peer.pid, left_ms / 1000 + 1,
                   trace->sees_all ? "" : " or by an administrator's");
}

/* An administrator need not wait for the others. */
static bool may_displace(const struct mokd_session *session, const struct mokd_trace *trace)
{
    return mokd_session_is_admin(session) && !trace->sees_all && !trace->next;
}

void mokd_trace(struct mokd_session *session, uint64_t id, const Mok__Trace *request)
{
    struct mokd_server *server = session->server;
    struct mokd_error error = { 0 };
    struct mokd_trace *trace = NULL;

    if (request->milliseconds < MIN_MS || request->milliseconds > MAX_MS)
        mokd_error_set(&error, -MOK_ERANGE, "milliseconds = %u: must be in %u..%u", request->milliseconds, MIN_MS,
                       MAX_MS);
    else if (server->trace && !may_displace(session, server->trace))
        refuse_busy(server, &error);
    else if (trace_new(session, request->milliseconds, &trace) < 0)
        mokd_error_set(&error, -MOK_ENOMEM, "trace: no memory for events: mokd is at a limit");
    if (error.code < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    trace->call = mokd_call_begin(session, id);
    if (!server->trace) {
        begin(trace);
        return;
    }
    server->trace->next = trace;
    server->trace->displaced = true;
    hurry(server->trace);
}
