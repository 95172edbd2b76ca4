/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PREPARE: what this rank brings to an operation is checked here, before any rank starts. Routing is copied from the
 * caller's memory (forward) or the context (backward) to the symmetric workspace once, and the copy is what is checked
 * and used: the caller may write its memory at any time.
 */
#include "host.h"

#include <string.h>

#define BLOCK_SLOTS 8192u

static uint64_t slots_of(const struct mok_host_op *op)
{
    return (uint64_t)op->args->tokens * op->layer->plan.spec.topk;
}

static enum mok_host_at prepare_group(const struct mok_host_op *op, enum mok_host_list list, uint64_t at,
                                      struct mok_host_group *ret)
{
    if (list != MOK_LIST_COMM || at > 0)
        return MOK_AT_END;
    *ret = (struct mok_host_group){ MOK_STAGE_CHECK, 0, 0, mok_div_up(slots_of(op), BLOCK_SLOTS) };
    return MOK_AT_GROUP;
}

static bool prepare_ready(const struct mok_host_op *op, const struct mok_host_group *group)
{
    (void)op;
    (void)group;
    return true;
}

static void prepare_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                         uint64_t index)
{
    const struct mok_engine_layer *layer = op->layer;
    const struct mok_plan *plan = &layer->plan;
    const struct mok_op_args *args = op->args;
    uint64_t from = index * BLOCK_SLOTS, count = mok_min_u64(BLOCK_SLOTS, slots_of(op) - from), i;
    const uint8_t *context = args->context;
    const void *ids = args->ids, *weight = args->topk_weight;
    uint8_t *sym = layer->sym[plan->spec.rank];
    const int32_t *copy = (const int32_t *)(const void *)(sym + plan->sym_ids) + from;

    (void)unit;
    (void)group;
    if (args->kind == MOK_KIND_BACKWARD) {
        ids = context + plan->ctx_ids;
        weight = context + plan->ctx_topk_weight;
    }
    memcpy(sym + plan->sym_ids + from * 4, (const uint8_t *)ids + from * 4, count * 4);
    memcpy(sym + plan->sym_topk_weight + from * 4, (const uint8_t *)weight + from * 4, count * 4);
    for (i = 0; i < count; i++)
        if (copy[i] < -1 || copy[i] >= (int32_t)plan->spec.experts) {
            mok_host_fail_slot(op, -MOK_EEXPERT, args->kind == MOK_KIND_FORWARD ? MOK_ARG_IDS : MOK_ARG_CONTEXT,
                               (from + i) / plan->spec.topk, (from + i) % plan->spec.topk, copy[i]);
            return;
        }
}

const struct mok_host_program mok_host_prepare = { prepare_group, prepare_ready, prepare_task };

static int refuse(struct mok_op_result *ret, int code, uint32_t argument, int64_t value)
{
    ret->status = code;
    ret->argument = argument;
    ret->bad_value = value;
    return code;
}

static int check_params(const struct mok_plan *plan, const struct mok_op_args *args, struct mok_op_result *ret)
{
    const struct mok_expert_params *params = &args->params;
    bool shared = plan->spec.shared_intermediate != 0, mx = plan->spec.precision != MOK_BF16;

    if (!params->gate || !params->up || !params->down ||
        (mx && (!params->gate_scale || !params->up_scale || !params->down_scale)) ||
        (shared && (!params->shared_gate || !params->shared_up || !params->shared_down)))
        return refuse(ret, -MOK_ESTATE, MOK_ARG_PARAMS, 0);
    if (args->kind == MOK_KIND_FORWARD)
        return 0;
    if (!params->d_gate || !params->d_up || !params->d_down ||
        (shared && (!params->d_shared_gate || !params->d_shared_up || !params->d_shared_down)))
        return refuse(ret, -MOK_ESTATE, MOK_ARG_WGRADS, 0);
    return 0;
}

/* The context is the caller's memory: its header is copied once, then checked. */
static int check_context(struct mok_engine_layer *layer, const struct mok_op_args *args, struct mok_op_result *ret)
{
    const struct mok_plan *plan = &layer->plan;
    struct mok_context_header header;

    memcpy(&header, args->context, sizeof(header));
    if (header.magic != MOK_CONTEXT_MAGIC || header.layer_hash != layer->hash)
        return refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT, (int64_t)header.magic);
    if (header.mode != args->context_mode)
        return refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT_MODE, header.mode);
    if (header.tokens != args->tokens)
        return refuse(ret, -MOK_ESIZE, MOK_ARG_TOKENS, header.tokens);
    if (header.mode == MOK_CONTEXT_FULL && header.ring_rows_kept > plan->ring_rows)
        return refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT, (int64_t)header.ring_rows_kept);
    layer->kept_rows = header.ring_rows_kept;
    return 0;
}

int mok_host_check_args(struct mok_engine_layer *layer, const struct mok_op_args *args, struct mok_op_result *ret)
{
    const struct mok_plan *plan = &layer->plan;
    bool forward = args->kind == MOK_KIND_FORWARD;
    int r;

    if (!forward && args->kind != MOK_KIND_BACKWARD)
        return refuse(ret, -MOK_EOPCODE, MOK_ARG_OPCODE, args->kind);
    if (args->flags & ~(forward ? MOK_OPF_ACCUMULATE_OUT : MOK_OPF_OVERWRITE_WGRAD))
        return refuse(ret, -MOK_EARG, MOK_ARG_FLAGS, args->flags);
    if (args->tokens > plan->spec.max_tokens)
        return refuse(ret, -MOK_ERANGE, MOK_ARG_TOKENS, args->tokens);
    if (args->context_mode > MOK_CONTEXT_RECOMPUTE || (!forward && args->context_mode == MOK_CONTEXT_NONE))
        return refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT_MODE, args->context_mode);
    if (args->context_mode != MOK_CONTEXT_NONE && !args->context)
        return refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT, 0);
    r = check_params(plan, args, ret);
    if (r < 0)
        return r;
    if (args->tokens > 0 && forward) {
        if (!args->ids)
            return refuse(ret, -MOK_EARG, MOK_ARG_IDS, 0);
        if (!args->topk_weight)
            return refuse(ret, -MOK_EARG, MOK_ARG_TOPK_WEIGHT, 0);
        if (!args->out)
            return refuse(ret, -MOK_EARG, MOK_ARG_OUT, 0);
    }
    if (args->tokens > 0 && !forward) {
        if (!args->d_x)
            return refuse(ret, -MOK_EARG, MOK_ARG_D_X, 0);
        if (!args->d_topk_weight)
            return refuse(ret, -MOK_EARG, MOK_ARG_D_TOPK_WEIGHT, 0);
    }
    return forward ? 0 : check_context(layer, args, ret);
}

int mok_host_check_peers(const struct mok_engine_layer *layer, const struct mok_op_args *args,
                         struct mok_op_result *ret)
{
    const struct mok_plan *plan = &layer->plan;
    uint32_t r;

    if (!args->peer)
        return refuse(ret, -MOK_EARG, MOK_ARG_RANKS, 0);
    for (r = 0; r < plan->spec.ep; r++) {
        const struct mok_peer *peer = &args->peer[r];

        if (peer->tokens > plan->spec.max_tokens)
            return refuse(ret, -MOK_ERANGE, MOK_ARG_TOKENS, peer->tokens);
        if (peer->tokens > 0 && !peer->x)
            return refuse(ret, -MOK_EARG, MOK_ARG_X, r);
        if (peer->tokens > 0 && args->kind == MOK_KIND_BACKWARD && !peer->d_out)
            return refuse(ret, -MOK_EARG, MOK_ARG_D_OUT, r);
    }
    if (args->peer[plan->spec.rank].tokens != args->tokens)
        return refuse(ret, -MOK_EARG, MOK_ARG_TOKENS, args->tokens);
    return 0;
}
