/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the control thread asks the dispatcher for. A command that takes memory away is parked until nothing looks at
 * that memory any more; meanwhile everyone else goes on.
 */
#include "dispatcher_internal.h"

#include <stdio.h>
#include <sys/epoll.h>

#include "util.h"

static void answer(struct dispatcher *d, struct dispatcher_command *command, int code)
{
    command->report.code = code;
    dispatcher_report(d, &command->report);
}

static void park(struct dispatcher *d, struct dispatcher_command *command)
{
    struct dispatcher_command **last = &d->parked;

    while (*last)
        last = &(*last)->next_parked;
    command->next_parked = NULL;
    *last = command;
    d->something_ended = true; /* perhaps there is nothing to wait for */
}

#define layers_each(d, layer)                                                                                          \
    worker_index_each(&(d)->tables.layers, layer##_node,                                                               \
                      layer##_next) for (struct worker_layer *layer =                                                  \
                                             worker_container_of(layer##_node, struct worker_layer, dispatch_node);    \
                                         layer; layer = NULL)

/* ------------------------------------------------------------------ queues */

static int queue_open(struct dispatcher *d, struct dispatcher_command *command)
{
    struct epoll_event event = { .events = EPOLLIN | EPOLLET };
    struct worker_queue *queue = command->queue;

    if (epoll_ctl(d->epoll, EPOLL_CTL_ADD, queue->doorbell, &event) < 0) {
        snprintf(command->report.message.text, sizeof(command->report.message.text), "queue %u: doorbell: %m",
                 queue->id);
        return -MOK_EIO;
    }
    worker_index_insert(&d->tables.queues, &queue->dispatch_node, queue->id);
    if (fair_join(&d->share, &queue->share, queue->uid, queue->spare_user))
        queue->spare_user = NULL;
    fair_weigh_session(&queue->share, queue->weight);
    if (queue->claim.weight)
        fair_weigh_user(&d->share, queue->uid, queue->claim.weight, queue->claim.priority);
    count_queue_open(d, queue);
    queue->next = d->queues;
    d->queues = queue;
    queue->open = true;
    return 0;
}

static bool queue_unlink(struct dispatcher *d, struct worker_queue *queue)
{
    if (queue->first)
        return false;
    for (struct worker_queue **link = &d->queues; *link; link = &(*link)->next) {
        if (*link == queue) {
            *link = queue->next;
            break;
        }
    }
    if (d->turn == queue)
        d->turn = queue->next;
    if (d->stats_turn == queue)
        d->stats_turn = queue->next;
    layers_each(d, layer)
    {
        if (layer->queue == queue)
            layer->queue = NULL;
    }
    epoll_ctl(d->epoll, EPOLL_CTL_DEL, queue->doorbell, NULL);
    worker_index_remove(&d->tables.queues, &queue->dispatch_node);
    count_queue_gone(queue);
    queue->left_user = fair_leave(&d->share, &queue->share);
    return true;
}

/* ------------------------------------------------------------------ buffers */

static int busy(struct mok_message *message, const char *how, uint32_t buffer, uint32_t layer)
{
    snprintf(message->text, sizeof(message->text), "buffer %u: %s layer %u", buffer, how, layer);
    return -MOK_EBUSY;
}

/* -MOK_EBUSY while the layer has an operation or a binding that uses the buffer. */
static int check_layer_unused(const struct worker_layer *layer, const struct worker_buffer *buffer,
                              struct mok_message *message)
{
    if (operations_use(layer, buffer))
        return busy(message, "used by an operation of", buffer->id, layer->id);
    for (unsigned param = 0; param < WORKER_PARAM_COUNT; param++)
        if (layer->param[param].buffer == buffer)
            return busy(message, "bound to", buffer->id, layer->id);
    return 0;
}

/* The same for all layers that can still run. */
static int check_unused(struct dispatcher *d, const struct worker_buffer *buffer, struct mok_message *message)
{
    layers_each(d, layer)
    {
        int r = worker_layer_is_over(layer) ? 0 : check_layer_unused(layer, buffer, message);
        if (r < 0)
            return r;
    }
    return 0;
}

static int buffer_unmap(struct dispatcher *d, struct dispatcher_command *command)
{
    struct worker_buffer *buffer = command->buffer;
    int r = buffer->own ? check_unused(d, buffer, &command->report.message) : 0;

    if (r == 0)
        worker_index_remove(&d->tables.buffers, &buffer->dispatch_node);
    return r;
}

static void unbind(struct worker_layer *layer, const struct worker_buffer *only)
{
    for (unsigned param = 0; param < WORKER_PARAM_COUNT; param++) {
        struct worker_span *span = &layer->param[param];
        if (span->buffer && (!only || span->buffer == only)) {
            span->buffer->pins--;
            *span = (struct worker_span){ 0 };
        }
    }
}

/* Bindings of layers that will never run again do not keep memory. */
static bool buffer_is_free(struct dispatcher *d, const struct worker_buffer *buffer)
{
    layers_each(d, layer)
    {
        bool held = layer == d->running || (d->ahead.op && d->ahead.op->layer == layer);
        if (worker_layer_is_over(layer) && !held)
            unbind(layer, buffer);
    }
    return buffer->pins == 0 && !d->ahead.expected; /* that pins nothing */
}

/* ------------------------------------------------------------------ layers */

static int layer_open(struct dispatcher *d, struct worker_layer *layer)
{
    worker_index_insert(&d->tables.layers, &layer->dispatch_node, layer->id);
    count_layer_open(d, layer);
    return 0;
}

static int layer_busy(struct dispatcher_command *command)
{
    snprintf(command->report.message.text, sizeof(command->report.message.text), "layer %u: operations are in flight",
             command->layer->id);
    return -MOK_EBUSY;
}

static int layer_bind(struct dispatcher_command *command)
{
    struct worker_layer *layer = command->layer;

    if (layer->first)
        return layer_busy(command);
    uint32_t rank;
    int code = worker_layer_failure(layer, &rank);
    if (code) {
        snprintf(command->report.message.text, sizeof(command->report.message.text), "layer %u: %s, by rank %u",
                 layer->id, layer->group->code ? "its group is broken" : "it was destroyed", rank);
        return code;
    }
    unbind(layer, NULL);
    for (unsigned param = 0; param < WORKER_PARAM_COUNT; param++) {
        layer->param[param] = command->span[param];
        if (layer->param[param].buffer)
            layer->param[param].buffer->pins++;
    }
    return 0;
}

static bool layer_unlink(struct dispatcher *d, struct worker_layer *layer)
{
    if (layer->first || d->ahead.expected == layer)
        return false;
    operations_abandon(d, layer);
    unbind(layer, NULL);
    worker_index_remove(&d->tables.layers, &layer->dispatch_node);
    count_layer_gone(layer);
    return true;
}

/* ------------------------------------------------------------------ groups */

#define buffers_each(d, buffer)                                                                                        \
    worker_index_each(&(d)->tables.buffers, buffer##_node,                                                             \
                      buffer##_next) for (struct worker_buffer *buffer =                                               \
                                              worker_container_of(buffer##_node, struct worker_buffer, dispatch_node); \
                                          buffer; buffer = NULL)

/* What another group of the session uses of memory that goes must not hold it back: mokd waits for the answer. */
static void take_from_others(struct dispatcher *d, const struct worker_group *group, struct worker_buffer *buffer)
{
    layers_each(d, layer)
    {
        struct mok_message how;
        if (layer->group == group || worker_layer_is_over(layer) || check_layer_unused(layer, buffer, &how) == 0)
            continue;
        if (layer->first)
            operations_break_group(d, layer->group, -MOK_EBUFFER, layer->group->rank, -MOK_EBUFFER,
                                   "layer %u uses buffer %u of group %u, which was left", layer->id, buffer->id,
                                   group->id);
        else
            unbind(layer, buffer);
    }
}

static void group_close(struct dispatcher *d, struct worker_group *group)
{
    group->closed = true;
    buffers_each(d, buffer)
    {
        if (buffer->own && buffer->group == group)
            take_from_others(d, group, buffer);
    }
    operations_fail_group(d, group, -MOK_EPEER, group->rank);
}

static bool group_unlink(struct dispatcher *d, struct worker_group *group)
{
    bool in_use = false;

    layers_each(d, layer)
    {
        if (layer->group == group && !layer_unlink(d, layer))
            in_use = true;
    }
    buffers_each(d, buffer)
    {
        if (buffer->group == group && !buffer_is_free(d, buffer))
            in_use = true;
    }
    if (in_use)
        return false;
    buffers_each(d, buffer)
    {
        if (buffer->group == group)
            worker_index_remove(&d->tables.buffers, &buffer->dispatch_node);
    }
    worker_index_remove(&d->tables.groups, &group->dispatch_node);
    return true;
}

/* ------------------------------------------------------------------ questions */

/* As many queues as an answer holds; the next one goes on behind the last of this one. */
static void stats(struct dispatcher *d, struct dispatcher_command *command)
{
    struct worker_queue *queue = d->stats_turn ? d->stats_turn : d->queues, *first = queue;

    command->stats.ops_done = d->ops_done;
    command->stats.device_ns = d->device_ns;
    command->stats.errors = d->errors;
    while (queue && command->stats.count < command->stats.capacity) {
        command->stats.queue[command->stats.count++] = (struct dispatcher_queue_stats){ .queue = queue->id,
                                                                                        .ops_done = queue->ops_done,
                                                                                        .device_ns = queue->device_ns,
                                                                                        .rows = queue->rows };
        queue = queue->next ? queue->next : d->queues;
        if (queue == first)
            break;
    }
    d->stats_turn = queue;
}

static int op_query(struct dispatcher_command *command)
{
    struct worker_op *op = operations_find(command->queue, command->query.user_data);
    uint64_t mask[MOK_MAX_EP / 64] = { 0 };

    if (!op) {
        snprintf(command->report.message.text, sizeof(command->report.message.text),
                 "queue %u: no operation %" PRIu64 " in flight", command->queue->id, command->query.user_data);
        return -MOK_ENOENT;
    }
    command->query.state = op->begun ? op->dispatch.state : MOK_ST_SUBMITTED;
    if (command->query.state != MOK_ST_READY && command->query.state != MOK_ST_PUSHED)
        return 0;
    mok_dispatch_missing(&op->dispatch, &op->layer->view, mask);
    for (uint32_t rank = 0; rank < op->layer->view.ep; rank++)
        if (mask[rank / 64] >> (rank % 64) & 1)
            command->query.missing[command->query.missing_count++] = rank;
    return 0;
}

/* ------------------------------------------------------------------ stop */

static void stop(struct dispatcher *d, struct dispatcher_command *command)
{
    d->stop = command;
    worker_index_each(&d->tables.groups, node, next)
    {
        struct worker_group *group = worker_container_of(node, struct worker_group, dispatch_node);
        operations_fail_group(d, group, command->code, group->rank);
    }
}

/* ------------------------------------------------------------------ the mailbox */

/* Whether a parked command is through. */
static bool resume(struct dispatcher *d, struct dispatcher_command *command)
{
    switch (command->kind) {
    case COMMAND_QUEUE_CLOSE:
        return queue_unlink(d, command->queue);
    case COMMAND_BUFFER_UNMAP:
        return buffer_is_free(d, command->buffer);
    case COMMAND_LAYER_CLOSE:
        return layer_unlink(d, command->layer);
    case COMMAND_GROUP_CLOSE:
        return group_unlink(d, command->group);
    default:
        return true;
    }
}

void commands_resume(struct dispatcher *d)
{
    struct dispatcher_command **link = &d->parked;

    while (*link) {
        struct dispatcher_command *command = *link;
        if (resume(d, command)) {
            *link = command->next_parked;
            answer(d, command, 0);
        } else {
            link = &command->next_parked;
        }
    }
}

static bool only_looks(const struct dispatcher_command *command)
{
    return command->kind == COMMAND_STATS || command->kind == COMMAND_OP_QUERY || command->kind == COMMAND_SHARE;
}

static void execute(struct dispatcher *d, struct dispatcher_command *command)
{
    int r = 0;

    if (!only_looks(command))
        expect_forget(d);
    switch (command->kind) {
    case COMMAND_QUEUE_OPEN:
        r = queue_open(d, command);
        break;
    case COMMAND_QUEUE_CLOSE:
        operations_drop_queue(d, command->queue, command->code);
        park(d, command);
        return;
    case COMMAND_SHARE:
        fair_weigh_user(&d->share, command->share.uid, command->share.claim.weight, command->share.claim.priority);
        if (command->queue && command->queue->open)
            fair_charge_session_elsewhere(&command->queue->share, command->share.elsewhere_ns, FAIR_LEAD_NS);
        else if (!command->queue)
            fair_charge_elsewhere(&d->share, command->share.uid, command->share.elsewhere_ns, FAIR_LEAD_NS);
        break;
    case COMMAND_STREAM_OPEN:
        command->queue->stream = command->queue->stream_memory;
        break;
    case COMMAND_BUFFER_MAP:
        worker_index_insert(
            &d->tables.buffers, &command->buffer->dispatch_node,
            worker_buffer_key(command->buffer->id, command->buffer->own ? WORKER_OWN_RANK : command->buffer->rank));
        break;
    case COMMAND_BUFFER_UNMAP:
        r = buffer_unmap(d, command);
        if (r == 0) {
            park(d, command);
            return;
        }
        break;
    case COMMAND_GROUP_OPEN:
        worker_index_insert(&d->tables.groups, &command->group->dispatch_node, command->group->id);
        break;
    case COMMAND_GROUP_FAIL:
        operations_fail_group(d, command->group, command->code, command->rank);
        break;
    case COMMAND_GROUP_CLOSE:
        group_close(d, command->group);
        park(d, command);
        return;
    case COMMAND_LAYER_OPEN:
        r = layer_open(d, command->layer);
        break;
    case COMMAND_LAYER_BIND:
        r = layer_bind(command);
        break;
    case COMMAND_LAYER_FAIL:
        operations_fail_layer(d, command->layer, command->code, command->rank);
        break;
    case COMMAND_LAYER_CLOSE:
        if (command->layer->first && !worker_layer_is_over(command->layer)) {
            r = layer_busy(command);
            break;
        }
        park(d, command);
        return;
    case COMMAND_STATS:
        stats(d, command);
        break;
    case COMMAND_TRACE:
        trace_begin(d, command->trace);
        break;
    case COMMAND_OP_QUERY:
        r = op_query(command);
        break;
    case COMMAND_STOP:
        stop(d, command);
        return;
    }
    answer(d, command, r);
}

bool commands_take(struct dispatcher *d)
{
    struct worker_report *report = dispatcher_inbox(d);
    bool moved = report;

    while (report) {
        struct dispatcher_command *command = worker_container_of(report, struct dispatcher_command, report);
        report = report->next;
        execute(d, command);
    }
    return moved;
}

void commands_finish(struct dispatcher *d)
{
    struct dispatcher_command *command = d->parked;

    while (command) {
        struct dispatcher_command *next = command->next_parked;
        answer(d, command, d->stop->code);
        command = next;
    }
    d->parked = NULL;
    answer(d, d->stop, 0);
}
