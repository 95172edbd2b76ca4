/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control thread: one request at a time becomes a command to the dispatcher, and the command that comes back
 * becomes the answer; several may be under way. Objects are found in this thread's own index.
 */
#include "control_internal.h"

#include <inttypes.h>
#include <poll.h>

#include "common/log.h"
#include "names.h"

/* What waits for mokd to read it; more means that mokd does not. */
#define MAX_UNREAD_BYTES (16u << 20)

/* ------------------------------------------------------------------ the other end */

void control_stop(struct control *c, uint64_t request, int code)
{
    if (c->stopping)
        return;
    c->stopping = true;
    if (!c->dispatcher) {
        control_reply(c, request, 0, "");
        c->stopped = true;
        return;
    }
    c->stop.kind = COMMAND_STOP;
    c->stop.request = request;
    c->stop.code = code;
    dispatcher_post(c->dispatcher, &c->stop);
}

/* The other end is gone, or cannot be understood: nobody will ask for anything any more. */
static void orphaned(struct control *c, int code)
{
    if (code < 0)
        mok_log(MOK_LOG_ERROR, "control", "socket unusable", "error=\"%s\"", mok_error_text(code));
    c->error = code;
    c->fd = mok_close(c->fd);
    control_stop(c, 0, -MOK_EDAEMON);
}

/* ------------------------------------------------------------------ answers */

static void send_with(struct control *c, const Mok__WorkerReply *reply, const int *fds, size_t count)
{
    if (c->fd < 0)
        return;
    int r = mok_wire_queue_send(&c->unsent, c->fd, &reply->base, fds, count);
    if (r < 0)
        orphaned(c, r == -MOK_EDAEMON ? 0 : r);
}

static void send_reply(struct control *c, const Mok__WorkerReply *reply)
{
    send_with(c, reply, NULL, 0);
}

void control_reply_memory(struct control *c, uint64_t request, int memory, uint8_t *fabric)
{
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
    Mok__WorkerMemory body = MOK__WORKER_MEMORY__INIT;

    reply.id = request;
    if (fabric) {
        body.fabric = (ProtobufCBinaryData){ .len = MOK_FABRIC_BYTES, .data = fabric };
        reply.body_case = MOK__WORKER_REPLY__BODY_MEMORY;
        reply.memory = &body;
    }
    send_with(c, &reply, &memory, 1);
}

void control_reply(struct control *c, uint64_t request, int code, const char *text)
{
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;

    reply.id = request;
    reply.code = code;
    reply.text = (char *)text;
    send_reply(c, &reply);
}

void control_reply_started(struct control *c, uint64_t request)
{
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
    Mok__WorkerStarted started = MOK__WORKER_STARTED__INIT;
    struct mok_message why = { 0 };

    started.sms_or_threads = c->on.limits.units;
    started.memory_bytes = c->on.limits.memory_bytes;
    if (c->on.ops->kind == MOK_DEVICE_CUDA) {
        started.uuid.data = c->on.limits.uuid;
        started.uuid.len = sizeof(c->on.limits.uuid);
    }
    if (c->on.ops->fabric_try) {
        started.fabric = c->on.ops->fabric_try(c->on.engine, &why) == 0;
        started.no_fabric = started.fabric ? (char *)"" : why.text;
    }
    reply.id = request;
    reply.body_case = MOK__WORKER_REPLY__BODY_STARTED;
    reply.started = &started;
    send_reply(c, &reply);
}

static void reply_stats(struct control *c, const struct dispatcher_command *command)
{
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
    Mok__WorkerStats stats = MOK__WORKER_STATS__INIT;
    size_t count = command->stats.count;
    _cleanup_free_ Mok__WorkerQueueStats *queue = calloc(count ? count : 1, sizeof(*queue));
    _cleanup_free_ Mok__WorkerQueueStats **pointer = calloc(count ? count : 1, sizeof(*pointer));

    if (!queue || !pointer) {
        control_reply(c, command->request, -MOK_ENOMEM, "stats: out of memory");
        return;
    }
    for (size_t i = 0; i < count; i++) {
        mok__worker_queue_stats__init(&queue[i]);
        queue[i].queue = command->stats.queue[i].queue;
        queue[i].ops_done = command->stats.queue[i].ops_done;
        queue[i].device_ns = command->stats.queue[i].device_ns;
        queue[i].rows = command->stats.queue[i].rows;
        pointer[i] = &queue[i];
    }
    stats.ops_done = command->stats.ops_done;
    stats.device_ns = command->stats.device_ns;
    stats.errors = command->stats.errors;
    stats.n_queue = count;
    stats.queue = pointer;
    reply.id = command->request;
    reply.body_case = MOK__WORKER_REPLY__BODY_STATS;
    reply.stats = &stats;
    send_reply(c, &reply);
}

static void reply_query(struct control *c, struct dispatcher_command *command)
{
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
    Mok__OpQueryReply query = MOK__OP_QUERY_REPLY__INIT;

    query.state = command->query.state;
    query.n_missing_rank = command->query.missing_count;
    query.missing_rank = command->query.missing;
    reply.id = command->request;
    reply.body_case = MOK__WORKER_REPLY__BODY_OP_QUERY;
    reply.op_query = &query;
    send_reply(c, &reply);
}

static void send_event(struct control *c, const struct worker_report *report)
{
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
    Mok__WorkerQueueBroken queue = MOK__WORKER_QUEUE_BROKEN__INIT;
    Mok__WorkerGroupBroken group = MOK__WORKER_GROUP_BROKEN__INIT;

    reply.code = report->code;
    reply.text = (char *)report->message.text;
    if (report->kind == WORKER_REPORT_QUEUE_BROKEN) {
        queue.queue = report->id;
        reply.body_case = MOK__WORKER_REPLY__BODY_QUEUE_BROKEN;
        reply.queue_broken = &queue;
    } else {
        group.group = report->id;
        group.rank = report->rank;
        reply.body_case = MOK__WORKER_REPLY__BODY_GROUP_BROKEN;
        reply.group_broken = &group;
    }
    send_reply(c, &reply);
}

/* ------------------------------------------------------------------ commands that come back */

static void answer(struct control *c, struct dispatcher_command *command)
{
    if (command->report.code < 0)
        control_reply(c, command->request, command->report.code, command->report.message.text);
    else if (command->kind == COMMAND_STATS)
        reply_stats(c, command);
    else if (command->kind == COMMAND_OP_QUERY)
        reply_query(c, command);
    else
        control_reply(c, command->request, 0, "");
    if (command->kind == COMMAND_STOP)
        c->stopped = true;
    free(command->stats.queue);
    if (command != &c->stop)
        free(command);
}

/* What the dispatcher let go of is destroyed before that is told. */
static void handle_command(struct control *c, struct dispatcher_command *command)
{
    control_collect(c, command);
    if (command->load.queue || command->load.group || command->load.buffers || command->load.layers)
        reaper_post(c->reaper, command);
    else
        answer(c, command);
}

static void handle_reports(struct control *c)
{
    struct worker_report *report = dispatcher_reports(c->dispatcher), *next;

    for (; report; report = next) {
        next = report->next;
        if (report->kind == WORKER_REPORT_COMMAND)
            handle_command(c, worker_container_of(report, struct dispatcher_command, report));
        else
            send_event(c, report);
    }
}

static void handle_reaped(struct control *c)
{
    struct worker_report *report = reaper_done(c->reaper), *next;

    for (; report; report = next) {
        next = report->next;
        answer(c, worker_container_of(report, struct dispatcher_command, report));
    }
}

/* ------------------------------------------------------------------ the loop */

static void receive(struct control *c)
{
    struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    ProtobufCMessage *message;

    int r = mok_wire_recv_lossy(c->fd, &mok__worker_request__descriptor, &message, &fds);
    if (r == -MOK_EAGAIN)
        return;
    if (r <= 0) {
        orphaned(c, r);
        return;
    }
    const Mok__WorkerRequest *request = (const Mok__WorkerRequest *)message;
    if (r == 2) /* only requests that begin something carry any: this one does not begin, all others go on */
        control_reply(c, request->id, -MOK_EFDS, "descriptors: the worker is at its limit");
    else
        control_handle(c, request, &fds);
    mok_wire_fds_close(&fds);
    mok_wire_free(message);
}

static void flush(struct control *c)
{
    int r = mok_wire_queue_flush(&c->unsent, c->fd);
    if (r < 0)
        orphaned(c, r == -MOK_EDAEMON ? 0 : r);
}

static void wait_and_handle(struct control *c)
{
    struct pollfd wait[] = {
        { .fd = c->fd, .events = POLLIN },
        { .fd = c->dispatcher ? dispatcher_fd(c->dispatcher) : -1, .events = POLLIN },
        { .fd = c->reaper ? reaper_fd(c->reaper) : -1, .events = POLLIN },
    };

    if (c->unsent.packets)
        wait[0].events |= POLLOUT;
    /* After stop nothing more is read, but that the other end goes away is still noticed. */
    if (c->stopping)
        wait[0].events &= ~POLLIN;
    if (poll(wait, ARRAY_SIZE(wait), -1) < 0)
        return;
    if (wait[1].revents)
        handle_reports(c);
    if (wait[2].revents)
        handle_reaped(c);
    if (c->fd >= 0 && wait[0].revents & POLLOUT)
        flush(c);
    if (c->fd >= 0 && wait[0].revents & (POLLIN | POLLHUP | POLLERR)) {
        if (c->stopping)
            c->fd = mok_close(c->fd);
        else
            receive(c);
    }
}

/* The threads have ended, so everything they had is ours again. */
static void tear_down(struct control *c)
{
    if (!c->dispatcher)
        return;
    dispatcher_join(c->dispatcher);
    reaper_stop(c->reaper);
    handle_reaped(c);
    control_destroy_all(c);
    reaper_free(c->reaper);
    dispatcher_free(c->dispatcher);
}

int control_serve(int fd)
{
    struct control *c = calloc(1, sizeof(*c));

    if (!c)
        return -MOK_ENOMEM;
    c->fd = fd;
    c->unsent.max_bytes = MAX_UNREAD_BYTES;
    while (!c->stopped)
        wait_and_handle(c);
    tear_down(c);
    while (c->fd >= 0 && c->unsent.packets)
        wait_and_handle(c);
    int error = c->error;
    control_release_trace(c);
    control_release_stats(c);
    mok_wire_queue_clear(&c->unsent);
    mok_close(c->fd);
    free(c);
    return error;
}
