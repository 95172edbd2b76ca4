/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine runs one phase of one operation at a time: who gets it next, with which pointers, and what it cost.
 * Peers' buffers are looked up anew for each MAIN: what a peer says about its own memory is checked against what this
 * worker has mapped, and what cannot be resolved fails the operation on all ranks.
 */
#include "dispatcher_internal.h"

#include <string.h>

#include "common/log.h"
#include "util.h"

#define BF16_BYTES 2u

/* ------------------------------------------------------------------ arguments */

static void fill_params(const struct worker_span *param, struct mok_expert_params *ret)
{
    *ret = (struct mok_expert_params){
        .gate = param[WORKER_PARAM_GATE].address,
        .up = param[WORKER_PARAM_UP].address,
        .down = param[WORKER_PARAM_DOWN].address,
        .gate_scale = param[WORKER_PARAM_GATE_SCALE].address,
        .up_scale = param[WORKER_PARAM_UP_SCALE].address,
        .down_scale = param[WORKER_PARAM_DOWN_SCALE].address,
        .gate_transposed = param[WORKER_PARAM_GATE_TRANSPOSED].address,
        .up_transposed = param[WORKER_PARAM_UP_TRANSPOSED].address,
        .down_transposed = param[WORKER_PARAM_DOWN_TRANSPOSED].address,
        .shared_gate = param[WORKER_PARAM_SHARED_GATE].address,
        .shared_up = param[WORKER_PARAM_SHARED_UP].address,
        .shared_down = param[WORKER_PARAM_SHARED_DOWN].address,
        .d_gate = param[WORKER_PARAM_D_GATE].address,
        .d_up = param[WORKER_PARAM_D_UP].address,
        .d_down = param[WORKER_PARAM_D_DOWN].address,
        .d_shared_gate = param[WORKER_PARAM_D_SHARED_GATE].address,
        .d_shared_up = param[WORKER_PARAM_D_SHARED_UP].address,
        .d_shared_down = param[WORKER_PARAM_D_SHARED_DOWN].address,
    };
}

void phases_fill_args(const struct worker_layer *layer, const struct worker_op *op, struct mok_op_args *ret)
{
    *ret = (struct mok_op_args){
        .kind = op->opcode == MOK_OP_BACKWARD ? MOK_KIND_BACKWARD : MOK_KIND_FORWARD,
        .context_mode = op->context_mode,
        .flags = op->flags,
        .tokens = op->tokens,
        .ids = op->region[MOK_REGION_IDS].address,
        .topk_weight = op->region[MOK_REGION_TOPK_WEIGHT].address,
        .context = op->region[MOK_REGION_CONTEXT].address,
        .out = op->region[MOK_REGION_OUT].address,
        .d_x = op->region[MOK_REGION_D_X].address,
        .d_topk_weight = op->region[MOK_REGION_D_TOPK_WEIGHT].address,
        .peer = layer->peer,
    };
    fill_params(layer->param, &ret->params);
}

/* ------------------------------------------------------------------ peers */

static void unpin_peers(struct worker_layer *layer)
{
    for (uint32_t i = 0; i < layer->peer_pins; i++)
        layer->peer_pin[i]->pins--;
    layer->peer_pins = 0;
}

/* What `rank` names as (buffer, offset) is a copy of this group that we map, and holds its tokens. */
static bool resolve(struct dispatcher *d, struct worker_layer *layer, uint32_t rank, uint32_t id, uint64_t offset,
                    uint32_t tokens, const void **ret_address)
{
    uint64_t bytes = (uint64_t)tokens * layer->plan.spec.hidden * BF16_BYTES, end;
    uint32_t key_rank = rank == layer->view.rank ? WORKER_OWN_RANK : rank;

    *ret_address = NULL;
    if (!tokens)
        return true;
    struct worker_node *node = worker_index_find(&d->tables.buffers, worker_buffer_key(id, key_rank));
    struct worker_buffer *buffer = node ? worker_container_of(node, struct worker_buffer, dispatch_node) : NULL;
    if (!buffer || buffer->group != layer->group || !mok_add_u64(offset, bytes, &end) || end > buffer->bytes)
        return false;
    buffer->pins++;
    layer->peer_pin[layer->peer_pins++] = buffer;
    *ret_address = (const char *)buffer->address + offset;
    return true;
}

/* PREPARE sees this rank's own tokens, which were checked when the operation was taken. */
void phases_fill_own(struct worker_layer *layer, const struct worker_op *op)
{
    layer->peer[layer->view.rank] = (struct mok_peer){
        .x = op->region[MOK_REGION_X].address,
        .d_out = op->opcode == MOK_OP_BACKWARD ? op->region[MOK_REGION_D_OUT].address : NULL,
        .tokens = op->tokens,
    };
}

static bool resolve_peers(struct dispatcher *d, struct worker_layer *layer, struct mok_op_result *ret_result)
{
    bool backward = layer->args.kind == MOK_KIND_BACKWARD;

    for (uint32_t rank = 0; rank < layer->view.ep; rank++) {
        const struct mok_op_info info = layer->view.flags[rank]->info; /* what was checked is what is used */
        struct mok_peer *peer = &layer->peer[rank];
        bool fits = info.tokens <= layer->plan.spec.max_tokens;

        *peer = (struct mok_peer){ .tokens = info.tokens };
        if (!fits || !resolve(d, layer, rank, info.x_buffer, info.x_offset, info.tokens, &peer->x)) {
            *ret_result = (struct mok_op_result){ .status = -MOK_EBUFFER, .argument = MOK_ARG_REGION0 + MOK_REGION_X };
            ret_result->bad_value = info.x_buffer;
            return false;
        }
        if (backward && !resolve(d, layer, rank, info.d_out_buffer, info.d_out_offset, info.tokens, &peer->d_out)) {
            *ret_result =
                (struct mok_op_result){ .status = -MOK_EBUFFER, .argument = MOK_ARG_REGION0 + MOK_REGION_D_OUT };
            ret_result->bad_value = info.d_out_buffer;
            return false;
        }
    }
    return true;
}

/* ------------------------------------------------------------------ the end of a phase */

static void phase_done(struct dispatcher *d, struct worker_layer *layer, const struct mok_op_result *result)
{
    struct worker_op *op = layer->first;

    unpin_peers(layer);
    op->device_ns += result->device_ns;
    if (op->dying_code) {
        while (layer->first && layer->first->dying_code && layer->first != d->ahead.op)
            operations_bury(d, layer->first);
        layer->action = MOK_ACT_WAIT;
        return;
    }
    layer->action = MOK_ACT_WAIT;
    mok_dispatch_phase_done(&op->dispatch, result);
}

void phases_ended(struct dispatcher *d, const struct mok_op_result *result)
{
    struct worker_layer *layer = d->running;

    if (result->status == -MOK_EINTERNAL && d->ops->explain) {
        struct mok_message why = { 0 };
        d->ops->explain(d->engine, &why);
        mok_log(MOK_LOG_ERROR, "operation", "a kernel waited in vain", "queue=%u device_ns=%" PRIu64 " error=\"%s\"",
                layer->first->queue->id, result->device_ns, why.text);
    }
    count_phase_end(d, layer, result);
    d->running = NULL;
    fair_charge(&layer->first->queue->share, result->device_ns);
    phase_done(d, layer, result);
}

bool phases_poll(struct dispatcher *d)
{
    struct mok_op_result result = { 0 };

    if (!d->running)
        return ahead_poll(d);
    if (d->ops->poll(d->engine, &result) != 1)
        return false;
    phases_ended(d, &result);
    return true;
}

/* ------------------------------------------------------------------ the next phase */

static struct worker_layer *most_deserving(struct dispatcher *d)
{
    struct worker_layer *best = NULL;

    for (struct worker_layer *layer = d->active; layer; layer = layer->active_next) {
        if (layer->action == MOK_ACT_WAIT)
            continue;
        if (!best || fair_before(&layer->first->queue->share, layer->runnable_order, &best->first->queue->share,
                                 best->runnable_order))
            best = layer;
    }
    return best;
}

/* A group of one rank has nobody to wait for between the phases. */
static enum mok_phase phase_of(const struct dispatcher *d, const struct worker_layer *layer)
{
    switch (layer->action) {
    case MOK_ACT_PREPARE:
        /* one that has been cancelled since it became runnable has to pass the verdict, which WHOLE leaves out */
        if (d->ops->runs_whole && layer->view.ep == 1 && layer->first->dispatch.info.status >= 0)
            return MOK_PHASE_WHOLE;
        return MOK_PHASE_PREPARE;
    case MOK_ACT_MAIN:
        return MOK_PHASE_MAIN;
    default:
        return MOK_PHASE_REDUCE;
    }
}

void phases_running(struct dispatcher *d, struct worker_layer *layer, enum mok_phase phase)
{
    d->running = layer;
    d->running_phase = phase;
    d->running_since_ns = d->now_ns;
    count_phase_start(d, layer, phase);
}

static bool another_wants_it(const struct dispatcher *d)
{
    for (const struct worker_layer *layer = d->active; layer; layer = layer->active_next)
        if (layer != d->running && layer->action != MOK_ACT_WAIT)
            return true;
    return false;
}

bool phases_start(struct dispatcher *d)
{
    struct mok_op_result result = { 0 };

    if (d->running) {
        if (ahead_is_busy(d) && another_wants_it(d)) /* else it would get the device before that is considered */
            ahead_withdraw(d);
        return false;
    }
    struct worker_layer *layer = most_deserving(d);
    if (!layer)
        return false;
    enum mok_phase phase = phase_of(d, layer);
    if (ahead_is_busy(d) && !ahead_is(d, layer, phase)) { /* whose turn it is now was not to be foreseen */
        ahead_withdraw(d);
        return false;
    }
    dispatcher_chaos(d);
    fair_pick(&d->share, &layer->first->queue->share);
    if (d->ahead.op) {
        ahead_go(d);
        return true;
    }
    phases_fill_args(layer, layer->first, &layer->args);
    if (phase == MOK_PHASE_WHOLE)
        mok_dispatch_whole(&layer->first->dispatch, &layer->view, d->now_ns);
    if ((phase == MOK_PHASE_MAIN || phase == MOK_PHASE_WHOLE) && !resolve_peers(d, layer, &result)) {
        phase_done(d, layer, &result);
        return true;
    }
    if (phase == MOK_PHASE_PREPARE)
        phases_fill_own(layer, layer->first);
    trace_phase_next(d, layer);
    int r = ahead_start(d, layer, phase);
    if (r < 0) {
        result = (struct mok_op_result){ .status = r };
        phase_done(d, layer, &result);
        return true;
    }
    phases_running(d, layer, phase);
    return true;
}
