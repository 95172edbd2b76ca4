/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An operation from submission to completion. Operations of a layer run one after the other, in the order in which they
 * were taken; the state machine of the first one is kernels/dispatch.h. Every operation gets exactly one completion,
 * unless its queue is gone.
 */
#include "dispatcher_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "flags_board.h"
#include "names.h"
#include "sync.h"
#include "util.h"

MOK_STATIC_ASSERT(MOK_OPF_ACCUMULATE_OUT == MOK_SQE_ACCUMULATE_OUT, "one numbering");
MOK_STATIC_ASSERT(MOK_OPF_OVERWRITE_WGRAD == MOK_SQE_OVERWRITE_WGRAD, "one numbering");

#define DETAIL_RANK_SHIFT 48
#define DETAIL_TOKEN_SHIFT 8

/* ------------------------------------------------------------------ lists */

static void queue_link(struct worker_op *op)
{
    struct worker_queue *queue = op->queue;

    op->queue_next = NULL;
    op->queue_previous = queue->last;
    if (queue->last)
        queue->last->queue_next = op;
    else
        queue->first = op;
    queue->last = op;
}

static void queue_unlink(struct worker_op *op)
{
    struct worker_queue *queue = op->queue;

    if (op->queue_previous)
        op->queue_previous->queue_next = op->queue_next;
    else
        queue->first = op->queue_next;
    if (op->queue_next)
        op->queue_next->queue_previous = op->queue_previous;
    else
        queue->last = op->queue_previous;
}

static void layer_activate(struct dispatcher *d, struct worker_layer *layer)
{
    if (layer->active)
        return;
    layer->active = true;
    layer->active_previous = NULL;
    layer->active_next = d->active;
    if (d->active)
        d->active->active_previous = layer;
    d->active = layer;
}

static void layer_deactivate(struct dispatcher *d, struct worker_layer *layer)
{
    layer->active = false;
    mok_store_relaxed(&layer->view.flags[layer->view.rank]->sleeping, 0);
    if (layer->active_previous)
        layer->active_previous->active_next = layer->active_next;
    else
        d->active = layer->active_next;
    if (layer->active_next)
        layer->active_next->active_previous = layer->active_previous;
}

void operations_abandon(struct dispatcher *d, struct worker_layer *layer)
{
    if (!layer->draining)
        return;
    layer->draining = false;
    if (!layer->first)
        layer_deactivate(d, layer);
}

static void layer_append(struct dispatcher *d, struct worker_op *op)
{
    struct worker_layer *layer = op->layer;

    op->layer_next = NULL;
    if (layer->last)
        layer->last->layer_next = op;
    else
        layer->first = op;
    layer->last = op;
    layer_activate(d, layer);
}

static void layer_remove_first(struct dispatcher *d, struct worker_layer *layer)
{
    layer->first = layer->first->layer_next;
    if (!layer->first) {
        layer->last = NULL;
        if (!layer->draining)
            layer_deactivate(d, layer);
    }
    layer->action = MOK_ACT_WAIT;
}

static void pin_regions(struct worker_op *op, bool pin)
{
    for (unsigned slot = 0; slot < MOK_REGION_COUNT; slot++) {
        if (!op->region[slot].buffer)
            continue;
        if (pin)
            op->region[slot].buffer->pins++;
        else
            op->region[slot].buffer->pins--;
    }
}

/* ------------------------------------------------------------------ completion */

/* `op` NULL: it had nothing to do with a layer. */
static void publish(struct dispatcher *d, struct worker_queue *queue, uint32_t slot, unsigned opcode,
                    const struct worker_op *op, struct mok_cqe *cqe)
{
    count_completed(d, queue, opcode, op, cqe);
    if (!queue->open)
        return;
    cqe->engine = (uint8_t)d->ops->kind;
    if (cqe->result < 0)
        d->errors++;
    queue->ops_done++;
    queue->device_ns += cqe->device_ns;
    queue->rows += cqe->rows;
    d->ops_done++;
    d->device_ns += cqe->device_ns;
    mok_queue_worker_complete(&queue->ring, slot, cqe);
}

/* ------------------------------------------------------------------ hand-over by streams */

/* Which of two numbers of a slot is further; both may be anything. */
static bool reached(const uint32_t *word, uint32_t number)
{
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - number) >= 0;
}

/* Before the completion, so that who sees that finds the stream released. */
static void release_stream(const struct worker_queue *queue, uint32_t slot, uint32_t number)
{
    __atomic_store_n(&queue->stream[slot].done, number, __ATOMIC_RELEASE);
}

/* Whether the first operation of a layer has to wait for its client's stream. A cancelled one waits for nobody. */
static bool awaits_stream(struct dispatcher *d, struct worker_op *op)
{
    bool waits = op->on_stream && !op->begun && !op->cancelled && !op->dying_code &&
                 !reached(&op->queue->stream[op->stream_slot].doorbell, op->stream_number);

    if (waits != op->awaited)
        d->awaited += waits ? 1u : -1u;
    op->awaited = waits;
    return waits;
}

void operations_await_no_more(struct dispatcher *d, struct worker_op *op)
{
    d->awaited -= op->awaited;
    op->awaited = false;
}

/* The first operation of its layer leaves with this completion. */
static void leave(struct dispatcher *d, struct worker_op *op, struct mok_cqe *cqe)
{
    struct worker_layer *layer = op->layer;

    cqe->user_data = op->user_data;
    cqe->precision = (uint8_t)layer->plan.spec.precision;
    cqe->device_ns = op->device_ns;
    operations_await_no_more(d, op);
    layer_remove_first(d, layer);
    queue_unlink(op);
    pin_regions(op, false);
    d->something_ended = true;
    if (op->on_stream)
        release_stream(op->queue, op->stream_slot, op->stream_number);
    publish(d, op->queue, op->slot, op->opcode, op, cqe);
}

static void complete(struct dispatcher *d, struct worker_op *op)
{
    const struct mok_op_result *result = &op->dispatch.result;
    struct mok_cqe cqe = { .result = result->status };

    if (result->status == 0) {
        cqe.rows = result->rows;
        leave(d, op, &cqe);
        return;
    }
    cqe.argument = (uint16_t)result->argument;
    cqe.value = (uint64_t)result->bad_value;
    cqe.detail = op->dispatch.fault_rank;
    if (result->status == -MOK_EEXPERT) {
        cqe.bound = op->layer->plan.spec.experts;
        cqe.detail = (uint64_t)op->dispatch.fault_rank << DETAIL_RANK_SHIFT | result->bad_token << DETAIL_TOKEN_SHIFT |
                     result->bad_slot;
    }
    leave(d, op, &cqe);
}

void operations_bury(struct dispatcher *d, struct worker_op *op)
{
    struct mok_cqe cqe = { .result = op->dying_code };
    uint32_t rank;

    worker_layer_failure(op->layer, &rank);
    cqe.detail = rank;

    leave(d, op, &cqe);
}

static void refuse(struct dispatcher *d, struct worker_queue *queue, uint32_t slot, const struct mok_sqe *sqe,
                   const struct worker_fault *fault)
{
    struct mok_cqe cqe = { .user_data = sqe->user_data,
                           .result = fault->code,
                           .argument = fault->argument,
                           .value = fault->value,
                           .bound = fault->bound,
                           .detail = fault->detail };

    if (sqe->flags & MOK_SQE_ON_STREAM && queue->stream && sqe->stream_slot < queue->ring.layout.cq_entries)
        release_stream(queue, sqe->stream_slot, sqe->stream_number);
    publish(d, queue, slot, sqe->opcode, NULL, &cqe);
}

/* ------------------------------------------------------------------ groups and queues that break */

/*
 * All ranks have pushed: the rest is this rank's alone, so whoever leaves now has done its part. If it is this rank
 * that leaves, nobody waits for the rest.
 */
static bool needs_no_peer(const struct worker_op *op)
{
    return op->begun && !op->dying_code && op->dispatch.state == MOK_ST_REDUCING && op->queue->open &&
           !op->layer->group->closed;
}

/*
 * The first operation is completed where no peer is needed any more. A running one keeps the engine until that has let
 * go of its memory. All others leave now, in their order.
 */
static void fail_layer(struct dispatcher *d, struct worker_layer *layer, int code)
{
    expect_drop(d);
    if (layer->board && (layer->first || layer->draining))
        board_settle(layer);
    if (d->running != layer)
        operations_step(d, layer); /* flags that moved before the failure count */
    operations_abandon(d, layer);
    if (!layer->first)
        return;
    bool keep = needs_no_peer(layer->first);
    for (struct worker_op *op = keep ? layer->first->layer_next : layer->first; op; op = op->layer_next)
        op->dying_code = op->dying_code ? op->dying_code : code;
    if (keep)
        return;
    bool ahead = d->ahead.op && d->ahead.op->layer == layer;
    if (ahead)
        ahead_withdraw(d);
    if (d->running == layer)
        d->ops->abort(d->engine);
    if (ahead || d->running == layer)
        return;
    while (layer->first)
        operations_bury(d, layer->first);
}

void operations_fail_group(struct dispatcher *d, struct worker_group *group, int code, uint32_t rank)
{
    /* The first reason stays; but who has been let finish may have to stop now, because it is this rank that leaves. */
    if (!group->code) {
        group->code = code;
        group->fault_rank = rank;
    }
    worker_index_each(&d->tables.layers, node, next)
    {
        struct worker_layer *layer = worker_container_of(node, struct worker_layer, dispatch_node);
        if (layer->group == group)
            fail_layer(d, layer, group->code);
    }
}

void operations_fail_layer(struct dispatcher *d, struct worker_layer *layer, int code, uint32_t rank)
{
    if (layer->code)
        return;
    layer->code = code;
    layer->fault_rank = rank;
    fail_layer(d, layer, code);
}

void operations_drop_queue(struct dispatcher *d, struct worker_queue *queue, int code)
{
    if (!queue->open)
        return;
    queue->open = false;
    mok_queue_worker_close(&queue->ring, code);
    worker_index_each(&d->tables.layers, node, next)
    {
        struct worker_layer *layer = worker_container_of(node, struct worker_layer, dispatch_node);
        if (layer->queue == queue)
            operations_fail_group(d, layer->group, -MOK_EPEER, layer->group->rank);
    }
}

static void queue_broken(struct dispatcher *d, struct worker_queue *queue)
{
    const struct mok_queue_fault *fault = &queue->ring.fault;
    struct worker_report *report = &queue->broken;

    *report = (struct worker_report){ .kind = WORKER_REPORT_QUEUE_BROKEN, .id = queue->id, .code = -MOK_ESESSION };
    snprintf(report->message.text, sizeof(report->message.text), "%s is %" PRIu64 " apart, bound %" PRIu64,
             mok_argument_text((int)fault->argument), fault->value, fault->bound);
    operations_drop_queue(d, queue, -MOK_ESESSION);
    mok_stats_add(&d->stats->broken_queues, 1);
    dispatcher_report(d, report);
}

void operations_break_group(struct dispatcher *d, struct worker_group *group, int code, uint32_t rank, int told,
                            const char *format, ...)
{
    struct worker_report *report = &group->broken;
    va_list args;

    if (group->code)
        return;
    *report = (struct worker_report){ .kind = WORKER_REPORT_GROUP_BROKEN, .id = group->id, .rank = rank, .code = told };
    va_start(args, format);
    vsnprintf(report->message.text, sizeof(report->message.text), format, args);
    va_end(args);
    operations_fail_group(d, group, code, rank);
    mok_stats_add(&d->stats->broken_groups, 1);
    dispatcher_report(d, report);
}

/* ------------------------------------------------------------------ deadlines */

static uint64_t deadline_of(const struct worker_op *op)
{
    bool may_expire = op->begun && !op->dying_code && op->timeout_ns && op->dispatch.all_ready_ns &&
                      (op->dispatch.state == MOK_ST_MAIN || op->dispatch.state == MOK_ST_PUSHED);
    uint64_t deadline;

    if (!may_expire)
        return UINT64_MAX;
    return mok_add_u64(op->dispatch.all_ready_ns, op->timeout_ns, &deadline) ? deadline : UINT64_MAX;
}

static uint32_t first_missing(const struct worker_layer *layer, const struct worker_op *op)
{
    uint64_t mask[MOK_MAX_EP / 64];

    if (op->dispatch.state == MOK_ST_PUSHED && mok_dispatch_missing(&op->dispatch, &layer->view, mask)) {
        for (uint32_t rank = 0; rank < layer->view.ep; rank++)
            if (mask[rank / 64] >> (rank % 64) & 1)
                return rank;
    }
    return layer->view.rank;
}

/* The ranks can no longer agree on this layer, so its group ends. */
static void expire(struct dispatcher *d, struct worker_layer *layer)
{
    struct worker_op *op = layer->first;
    uint32_t rank = first_missing(layer, op);

    op->dying_code = -MOK_ETIMEDOUT;
    operations_break_group(d, layer->group, -MOK_EPEER, rank, -MOK_ETIMEDOUT,
                           "operation %" PRIu64 " of layer %u timed out: rank %u has not done its part",
                           op->dispatch.seq, layer->id, rank);
}

uint64_t operations_check_deadlines(struct dispatcher *d)
{
    uint64_t earliest = UINT64_MAX;

    for (struct worker_layer *layer = d->active, *next; layer; layer = next) {
        next = layer->active_next;
        uint64_t deadline = layer->first ? deadline_of(layer->first) : UINT64_MAX;
        if (deadline > d->now_ns) {
            earliest = deadline < earliest ? deadline : earliest;
            continue;
        }
        expire(d, layer);
        /* The group's other layers may have left the list, `next` among them. */
        return d->now_ns;
    }
    return earliest;
}

/* ------------------------------------------------------------------ cancel and query */

struct worker_op *operations_find(const struct worker_queue *queue, uint64_t user_data)
{
    struct worker_op *op = queue->first;

    while (op && op->user_data != user_data)
        op = op->queue_next;
    return op;
}

bool operations_use(const struct worker_layer *layer, const struct worker_buffer *buffer)
{
    for (const struct worker_op *op = layer->first; op; op = op->layer_next) {
        for (unsigned slot = 0; !op->dying_code && slot < MOK_REGION_COUNT; slot++)
            if (op->region[slot].buffer == buffer)
                return true;
    }
    return false;
}

/*
 * A cancelled operation that is ready runs nowhere, so its client need not wait for ranks that may never come. Its
 * number stays in the layer until they have. True if it left.
 */
static bool leave_if_cancelled(struct dispatcher *d, struct worker_op *op)
{
    struct worker_layer *layer = op->layer;
    struct mok_cqe cqe = {
        .result = -MOK_ECANCELED, .argument = MOK_ARG_RANKS, .value = layer->view.rank, .detail = layer->view.rank
    };

    if (!op->cancelled || op->dispatch.state != MOK_ST_READY || !op->dispatch.published)
        return false;
    layer->withdrawn = op->dispatch;
    layer->draining = true;
    leave(d, op, &cqe);
    return true;
}

static int cancel(struct dispatcher *d, struct worker_queue *queue, uint64_t user_data)
{
    struct worker_op *op = operations_find(queue, user_data);

    if (!op)
        return -MOK_ENOENT;
    if (op->dying_code || (ahead_has(d, op) && !ahead_take_back(d)))
        return -MOK_EBUSY;
    if (op->begun) {
        int r = mok_dispatch_cancel(&op->dispatch, &op->layer->view, -MOK_ECANCELED);
        dispatcher_ring_peers(d, op->layer);
        if (r < 0)
            return r;
    }
    /* What has not begun still takes its turn, so that all ranks count the same operations. */
    op->cancelled = true;
    leave_if_cancelled(d, op);
    return 0;
}

/* ------------------------------------------------------------------ taking and stepping */

static void accept_op(struct dispatcher *d, struct worker_op *op)
{
    op->begun = false;
    op->cancelled = false;
    op->awaited = false;
    op->kept_back = false;
    op->dying_code = 0;
    op->device_ns = 0;
    memset(&op->dispatch, 0, sizeof(op->dispatch));
    count_taken(d, op);
    expect_learn(d, op);
    pin_regions(op, true);
    queue_link(op);
    layer_append(d, op);
    expect_meet(d, op);
}

bool operations_take(struct dispatcher *d, struct worker_queue *queue)
{
    struct worker_fault fault;
    struct mok_sqe sqe;
    uint32_t slot;

    if (!queue->open)
        return false;
    int r = mok_queue_worker_take(&queue->ring, &sqe, &slot);
    if (r < 0) {
        queue_broken(d, queue);
        return true;
    }
    if (r == 0)
        return false;
    dispatcher_chaos(d);
    struct worker_op *op = &queue->ops[slot];
    op->queue = queue;
    op->slot = slot;
    op->user_data = sqe.user_data;
    r = worker_validate(&d->tables, queue, &sqe, op, &fault);
    if (r < 0) {
        refuse(d, queue, slot, &sqe, &fault);
        return true;
    }
    if (op->layer) {
        accept_op(d, op);
        return true;
    }
    r = op->opcode == MOK_OP_CANCEL ? cancel(d, queue, sqe.cancel_target) : 0;
    fault = (struct worker_fault){ .code = r, .argument = r < 0 ? MOK_ARG_TARGET : MOK_ARG_NONE };
    fault.value = r < 0 ? sqe.cancel_target : 0;
    refuse(d, queue, slot, &sqe, &fault);
    return true;
}

void operations_begin(struct worker_layer *layer, struct worker_op *op)
{
    const struct worker_span *x = &op->region[MOK_REGION_X], *d_out = &op->region[MOK_REGION_D_OUT];
    struct mok_op_info info = {
        .kind = op->opcode == MOK_OP_BACKWARD ? MOK_KIND_BACKWARD : MOK_KIND_FORWARD,
        .context_mode = op->context_mode,
        .flags = op->flags,
        .tokens = op->tokens,
        .x_buffer = x->buffer ? x->buffer->id : 0,
        .x_offset = x->offset,
        .d_out_buffer = d_out->buffer ? d_out->buffer->id : 0,
        .d_out_offset = d_out->offset,
    };

    mok_dispatch_begin(&op->dispatch, ++layer->seq, &info);
    op->begun = true;
    if (op->cancelled)
        mok_dispatch_cancel(&op->dispatch, &layer->view, -MOK_ECANCELED);
}

void operations_make_runnable(struct dispatcher *d, struct worker_layer *layer, enum mok_dispatch_action action)
{
    layer->action = action;
    layer->runnable_order = ++d->order;
    layer->runnable_ns = d->now_ns;
    fair_wake(&d->share, &layer->first->queue->share);
}

/* The number of a withdrawn operation comes to its end like any other, but nothing is to be run or told. */
static bool drain(struct dispatcher *d, struct worker_layer *layer)
{
    bool flags_moved = false;
    enum mok_dispatch_action action = mok_dispatch_step(&layer->withdrawn, &layer->view, d->now_ns, &flags_moved);

    if (flags_moved)
        dispatcher_ring_peers(d, layer);
    if (action == MOK_ACT_WAIT)
        return flags_moved;
    operations_abandon(d, layer);
    return true;
}

bool operations_step(struct dispatcher *d, struct worker_layer *layer)
{
    bool moved = layer->draining && drain(d, layer);

    /* While an action is pending the operation belongs to the engine's queue. */
    while (!layer->draining && layer->first && layer->action == MOK_ACT_WAIT) {
        struct worker_op *op = layer->first;
        bool flags_moved = false;
        if (ahead_has(d, op)) /* the engine's, until that says what became of it */
            return moved;
        bool over = op->dying_code || op->dispatch.state == MOK_ST_DONE;
        if (d->ahead.op == op && over) { /* it needs no REDUCE any more */
            ahead_withdraw(d);
            return moved;
        }
        if (op->dying_code) {
            operations_bury(d, op);
            moved = true;
            continue;
        }
        if (awaits_stream(d, op))
            return moved;
        if (!op->begun)
            operations_begin(layer, op);
        enum mok_dispatch_action action = mok_dispatch_step(&op->dispatch, &layer->view, d->now_ns, &flags_moved);
        if (flags_moved)
            dispatcher_ring_peers(d, layer);
        moved |= flags_moved || action != MOK_ACT_WAIT;
        switch (action) {
        case MOK_ACT_WAIT:
            return leave_if_cancelled(d, op) || moved;
        case MOK_ACT_COMPLETE:
            if (op != d->ahead.op)
                complete(d, op);
            break;
        case MOK_ACT_PREPARE:
        case MOK_ACT_MAIN:
        case MOK_ACT_REDUCE:
            operations_make_runnable(d, layer, action);
            break;
        }
    }
    return moved;
}
