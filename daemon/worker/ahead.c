/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An operation that the device starts by itself when its client's stream says so, with no thread of ours in between:
 * the one that is known to come next while the device belongs to one client. It has not begun until it is seen to run,
 * and is asked back as soon as anything else wants the device. Never decides an order that the dispatcher would not
 * have.
 */
#include "dispatcher_internal.h"

#include "util.h"

#define SETTLE_NS 50000u      /* its stream may be just as quick as we are: then it is started like any other */
#define BACK_OFF_NS 10000000u /* two want the device: for so long each is started when its turn has come */

static bool reached(const uint32_t *word, uint32_t number)
{
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - number) >= 0;
}

/* ------------------------------------------------------------------ which */

/* Whose operations are all that there are; NULL: nobody's, or those of several. */
static struct worker_queue *only_queue(const struct dispatcher *d)
{
    struct worker_queue *queue = d->active ? d->active->queue : NULL;

    for (const struct worker_layer *layer = d->active; layer; layer = layer->active_next)
        if (layer->queue != queue)
            return NULL;
    return queue;
}

static bool own_regions(const struct worker_op *op)
{
    const struct worker_group *group = op->layer->group;

    return !op->tokens || (op->region[MOK_REGION_X].buffer && op->region[MOK_REGION_X].buffer->group == group &&
                           (op->opcode != MOK_OP_BACKWARD || (op->region[MOK_REGION_D_OUT].buffer &&
                                                              op->region[MOK_REGION_D_OUT].buffer->group == group)));
}

/* Nothing but its stream, and what runs, is before it. */
static bool comes_next(const struct dispatcher *d, const struct worker_op *op)
{
    const struct worker_layer *layer = op->layer;
    const struct worker_op *first = layer->first;
    bool behind_running = layer == d->running && first->layer_next == op;

    return (first == op || behind_running) && op->on_stream && !op->begun && !op->cancelled && !op->dying_code &&
           !op->kept_back && layer->view.ep == 1 && !layer->draining && !worker_layer_is_over(layer) &&
           !layer->group->closed && op->queue->open && own_regions(op);
}

static struct worker_op *candidate(const struct dispatcher *d)
{
    struct worker_queue *queue = only_queue(d);

    /* Between the phases of an operation of several ranks the device is for whoever comes. */
    if (!queue || !queue->gated || !queue->stream || (d->running && d->running_phase != MOK_PHASE_WHOLE))
        return NULL;
    struct worker_op *op = d->running ? d->running->first->queue_next : queue->first;
    if (!op || !comes_next(d, op) || (!d->running && d->now_ns - op->taken_ns < SETTLE_NS))
        return NULL;
    return op;
}

/* ------------------------------------------------------------------ to the device and back */

static int start(struct dispatcher *d, struct worker_op *op)
{
    struct mok_stream_slot *slot = &op->queue->stream[op->stream_slot];
    const struct mok_engine_gate gate = { &slot->start, &slot->done, op->stream_number };

    d->ahead.peer = (struct mok_peer){ .tokens = op->tokens };
    if (op->tokens) {
        d->ahead.peer.x = op->region[MOK_REGION_X].address;
        d->ahead.peer.d_out = op->opcode == MOK_OP_BACKWARD ? op->region[MOK_REGION_D_OUT].address : NULL;
    }
    phases_fill_args(op->layer, op, &d->ahead.args);
    d->ahead.args.peer = &d->ahead.peer;
    return d->ops->start_ahead(op->layer->engine_layer, &d->ahead.args, &gate);
}

static void let_go(struct dispatcher *d)
{
    d->ahead.op = NULL;
    __atomic_store_n(&d->waiting, 0, __ATOMIC_RELEASE);
}

static void look_quiet(struct dispatcher *d)
{
    if (!d->ahead.withdrawn && __atomic_load_n(&d->quiet, __ATOMIC_RELAXED))
        ahead_withdraw(d);
}

void ahead_offer(struct dispatcher *d)
{
    struct worker_op *op;

    if (d->ahead.op) {
        look_quiet(d);
        return;
    }
    if (!d->active || !d->ops->start_ahead || d->now_ns < d->ahead.not_before_ns || !(op = candidate(d)))
        return;
    __atomic_store_n(&d->waiting, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&d->quiet, __ATOMIC_SEQ_CST)) {
        let_go(d);
        return;
    }
    op->kept_back = start(d, op) < 0;
    if (op->kept_back) {
        let_go(d);
        return;
    }
    d->ahead.op = op;
    d->ahead.withdrawn = false;
}

int ahead_start(struct dispatcher *d, struct worker_layer *layer, enum mok_phase phase)
{
    const struct worker_op *op = layer->first;

    if (phase == MOK_PHASE_WHOLE && op->on_stream && op->queue->gated) {
        struct mok_stream_slot *slot = &op->queue->stream[op->stream_slot];
        const struct mok_engine_gate gate = { &slot->start, &slot->done, op->stream_number };
        if (reached(&slot->start, op->stream_number) &&
            d->ops->start_ahead(layer->engine_layer, &layer->args, &gate) >= 0)
            return 0;
    }
    return d->ops->start(layer->engine_layer, &layer->args, phase);
}

void ahead_withdraw(struct dispatcher *d)
{
    if (!d->ahead.withdrawn)
        d->ops->withdraw(d->engine);
    d->ahead.withdrawn = true;
}

/* It runs: from now on it is like any other that does. */
static void becomes_running(struct dispatcher *d)
{
    struct worker_op *op = d->ahead.op;
    struct worker_layer *layer = op->layer;
    bool flags_moved = false;

    operations_await_no_more(d, op);
    operations_begin(layer, op);
    mok_dispatch_step(&op->dispatch, &layer->view, d->now_ns, &flags_moved);
    mok_dispatch_whole(&op->dispatch, &layer->view, d->now_ns);
    operations_make_runnable(d, layer, MOK_ACT_PREPARE);
    fair_pick(&d->share, &op->queue->share);
    layer->args = d->ahead.args;
    *layer->peer = d->ahead.peer;
    layer->args.peer = layer->peer;
    trace_phase_next(d, layer);
    let_go(d);
    phases_running(d, layer, MOK_PHASE_WHOLE);
}

bool ahead_poll(struct dispatcher *d)
{
    struct mok_op_result result = { 0 };

    if (!d->ahead.op)
        return false;
    struct worker_op *op = d->ahead.op;
    const struct mok_stream_slot *slot = &op->queue->stream[op->stream_slot];
    if (!d->running) /* what the engine tells now is of this one */
        trace_work_of(d, op->layer);
    int r = d->ops->poll(d->engine, &result);
    if (r == 1) {
        becomes_running(d);
        phases_ended(d, &result);
        return true;
    }
    if (r == 2) {
        op->kept_back = true; /* its gate stays open */
        d->ahead.not_before_ns = d->now_ns + BACK_OFF_NS;
        let_go(d);
        return true;
    }
    if (d->ahead.withdrawn)
        return false;
    if (reached(&slot->start, op->stream_number)) {
        becomes_running(d);
        return true;
    }
    if (reached(&slot->doorbell, op->stream_number)) /* a client that knows of no start */
        ahead_withdraw(d);
    return false;
}

bool ahead_take_back(struct dispatcher *d)
{
    struct worker_op *op = d->ahead.op;

    ahead_withdraw(d);
    while (d->ahead.op)
        phases_poll(d);
    return !op->begun;
}
