/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A phase that is on the device before its time, so that nothing but a word is between it and what goes before: an
 * operation's first, which its client's stream lets go with no thread of ours in between, or its REDUCE, which we do.
 * It is the one that is known to come next while the device belongs to one client, and is asked back as soon as
 * anything else wants the device. Never decides an order that the dispatcher would not have.
 */
#include "dispatcher_internal.h"

#include "util.h"

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

bool ahead_can_be_whole(const struct worker_op *op)
{
    return op->on_stream && op->queue->gated && op->queue->stream && op->layer->view.ep == 1 && own_regions(op);
}

bool ahead_comes_next(const struct dispatcher *d, const struct worker_op *op)
{
    const struct worker_layer *layer = op->layer;
    const struct worker_op *first = layer->first;
    bool behind_running = layer == d->running && first->layer_next == op;

    return (first == op || behind_running) && op->on_stream && !op->begun && !op->cancelled && !op->dying_code &&
           !op->kept_back && !layer->draining && !worker_layer_is_over(layer) && !layer->group->closed &&
           op->queue->open && (layer->view.ep > 1 || own_regions(op));
}

/* Between the phases of an operation of several ranks the device is for whoever comes. */
static bool ends_its_operation(enum mok_phase phase)
{
    return phase == MOK_PHASE_WHOLE || phase == MOK_PHASE_REDUCE;
}

static struct worker_op *candidate(const struct dispatcher *d, enum mok_phase *ret)
{
    struct worker_queue *queue = only_queue(d);
    struct worker_op *first = d->running ? d->running->first : NULL;

    if (!queue)
        return NULL;
    *ret = MOK_PHASE_REDUCE;
    if (first && d->running_phase == MOK_PHASE_MAIN)
        return first->kept_back || first->dying_code ? NULL : first;
    if (!queue->gated || !queue->stream || (first && !ends_its_operation(d->running_phase)))
        return NULL;
    struct worker_op *op = first ? first->queue_next : queue->first;
    if (!op || !ahead_comes_next(d, op))
        return NULL;
    *ret = op->layer->view.ep > 1 ? MOK_PHASE_PREPARE : MOK_PHASE_WHOLE;
    return op;
}

/* ------------------------------------------------------------------ to the device and back */

/* What the device starts and ends by; REDUCE waits for us. */
static struct mok_engine_gate gate_of(const struct worker_op *op, enum mok_phase phase, bool at_go)
{
    if (!op->on_stream || !op->queue->gated)
        return (struct mok_engine_gate){ 0 };
    struct mok_stream_slot *slot = &op->queue->stream[op->stream_slot];
    return (struct mok_engine_gate){ at_go ? NULL : &slot->start, ends_its_operation(phase) ? &slot->done : NULL,
                                     op->stream_number };
}

void ahead_fill_peer(const struct worker_op *op, struct mok_peer *ret)
{
    *ret = (struct mok_peer){ .tokens = op->tokens };
    if (!op->tokens)
        return;
    ret->x = op->region[MOK_REGION_X].address;
    ret->d_out = op->opcode == MOK_OP_BACKWARD ? op->region[MOK_REGION_D_OUT].address : NULL;
}

static int start(struct dispatcher *d, struct worker_op *op, enum mok_phase phase)
{
    const struct mok_engine_gate gate = gate_of(op, phase, phase == MOK_PHASE_REDUCE);

    phases_fill_args(op->layer, op, &d->ahead.args);
    if (phase == MOK_PHASE_PREPARE)
        phases_fill_own(op->layer, op);
    if (phase == MOK_PHASE_WHOLE) {
        ahead_fill_peer(op, &d->ahead.peer);
        d->ahead.args.peer = &d->ahead.peer;
    }
    return d->ops->start_ahead(op->layer->engine_layer, &d->ahead.args, phase, &gate);
}

void ahead_let_go(struct dispatcher *d)
{
    d->ahead.op = NULL;
    d->ahead.expected = NULL;
    d->ahead.we_let_go = false;
    __atomic_store_n(&d->waiting, 0, __ATOMIC_RELEASE);
}

bool ahead_may(struct dispatcher *d)
{
    __atomic_store_n(&d->waiting, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&d->quiet, __ATOMIC_SEQ_CST))
        return true;
    ahead_let_go(d);
    return false;
}

static void look_quiet(struct dispatcher *d)
{
    if (!d->ahead.withdrawn && __atomic_load_n(&d->quiet, __ATOMIC_RELAXED))
        ahead_withdraw(d);
}

bool ahead_is_busy(const struct dispatcher *d)
{
    return d->ahead.op || d->ahead.expected;
}

bool ahead_has(const struct dispatcher *d, const struct worker_op *op)
{
    return op == d->ahead.op && !op->begun;
}

void ahead_offer(struct dispatcher *d)
{
    enum mok_phase phase;
    struct worker_op *op;

    if (ahead_is_busy(d)) {
        look_quiet(d);
        return;
    }
    if (!d->active || !d->ops->start_ahead || d->now_ns < d->ahead.not_before_ns)
        return;
    op = candidate(d, &phase);
    if (!op) {
        expect_offer(d);
        return;
    }
    if (!ahead_may(d))
        return;
    op->kept_back = start(d, op, phase) < 0;
    if (op->kept_back) {
        ahead_let_go(d);
        return;
    }
    d->ahead.op = op;
    d->ahead.phase = phase;
    d->ahead.withdrawn = false;
}

bool ahead_is(const struct dispatcher *d, const struct worker_layer *layer, enum mok_phase phase)
{
    return d->ahead.op && d->ahead.op == layer->first && phase == d->ahead.phase && phase == MOK_PHASE_REDUCE &&
           !d->ahead.withdrawn;
}

void ahead_go(struct dispatcher *d)
{
    struct worker_layer *layer = d->ahead.op->layer;

    layer->args = d->ahead.args;
    trace_phase_next(d, layer);
    d->ops->go(d->engine, NULL);
    ahead_let_go(d);
    phases_running(d, layer, d->ahead.phase);
}

int ahead_start(struct dispatcher *d, struct worker_layer *layer, enum mok_phase phase)
{
    const struct worker_op *op = layer->first;

    if (ends_its_operation(phase) && op->on_stream && op->queue->gated) {
        const struct mok_engine_gate gate = gate_of(op, phase, false);
        if (reached(gate.start, gate.number) &&
            d->ops->start_ahead(layer->engine_layer, &layer->args, phase, &gate) >= 0)
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
    if (d->ahead.phase == MOK_PHASE_WHOLE)
        mok_dispatch_whole(&op->dispatch, &layer->view, d->now_ns);
    operations_make_runnable(d, layer, MOK_ACT_PREPARE);
    fair_pick(&d->share, &op->queue->share);
    layer->args = d->ahead.args;
    if (d->ahead.phase == MOK_PHASE_WHOLE) {
        *layer->peer = d->ahead.peer;
        layer->args.peer = layer->peer;
    }
    trace_phase_next(d, layer);
    ahead_let_go(d);
    phases_running(d, layer, d->ahead.phase);
}

bool ahead_poll(struct dispatcher *d)
{
    struct mok_op_result result = { 0 };

    if (d->ahead.expected)
        return expect_poll(d);
    if (!d->ahead.op)
        return false;
    struct worker_op *op = d->ahead.op;
    if (!d->running) /* what the engine tells now is of this one */
        trace_work_of(d, op->layer);
    int r = d->ops->poll(d->engine, &result);
    if (r == 1 && op->begun) { /* the device fails; its phase will say so when it is started */
        op->kept_back = true;
        ahead_let_go(d);
        return true;
    }
    if (r == 1) {
        becomes_running(d);
        phases_ended(d, &result);
        return true;
    }
    if (r == 2) {
        op->kept_back = true; /* its gate stays open */
        d->ahead.not_before_ns = d->now_ns + BACK_OFF_NS;
        ahead_let_go(d);
        return true;
    }
    if (d->ahead.withdrawn || d->ahead.phase == MOK_PHASE_REDUCE)
        return false;
    const struct mok_stream_slot *slot = &op->queue->stream[op->stream_slot];
    if (reached(&slot->start, op->stream_number)) {
        const struct mok_engine_gate gate = gate_of(op, d->ahead.phase, true);
        if (d->ahead.we_let_go)
            d->ops->go(d->engine, &gate);
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
