/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks of an operation's arguments that every engine makes before it starts a phase. Looks at the arguments alone,
 * never at the memory they point to.
 */
#include "args.h"

int mok_args_refuse(struct mok_op_result *ret, int code, uint32_t argument, int64_t value)
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
        return mok_args_refuse(ret, -MOK_ESTATE, MOK_ARG_PARAMS, 0);
    if (args->kind == MOK_KIND_FORWARD)
        return 0;
    if (plan->spec.transposed_weights &&
        (!params->gate_transposed || !params->up_transposed || !params->down_transposed))
        return mok_args_refuse(ret, -MOK_ESTATE, MOK_ARG_PARAMS, 0);
    if (!params->d_gate || !params->d_up || !params->d_down ||
        (shared && (!params->d_shared_gate || !params->d_shared_up || !params->d_shared_down)))
        return mok_args_refuse(ret, -MOK_ESTATE, MOK_ARG_WGRADS, 0);
    return 0;
}

int mok_args_check(const struct mok_plan *plan, const struct mok_op_args *args, struct mok_op_result *ret)
{
    bool forward = args->kind == MOK_KIND_FORWARD;
    int r;

    if (!forward && args->kind != MOK_KIND_BACKWARD)
        return mok_args_refuse(ret, -MOK_EOPCODE, MOK_ARG_OPCODE, args->kind);
    if (args->flags & ~(forward ? MOK_OPF_ACCUMULATE_OUT : MOK_OPF_OVERWRITE_WGRAD))
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_FLAGS, args->flags);
    if (args->tokens > plan->spec.max_tokens)
        return mok_args_refuse(ret, -MOK_ERANGE, MOK_ARG_TOKENS, args->tokens);
    if (args->context_mode > MOK_CONTEXT_RECOMPUTE || (!forward && args->context_mode == MOK_CONTEXT_NONE))
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT_MODE, args->context_mode);
    if (args->context_mode != MOK_CONTEXT_NONE && !args->context)
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT, 0);
    r = check_params(plan, args, ret);
    if (r < 0)
        return r;
    if (args->tokens > 0 && forward) {
        if (!args->ids)
            return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_IDS, 0);
        if (!args->topk_weight)
            return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_TOPK_WEIGHT, 0);
        if (!args->out)
            return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_OUT, 0);
    }
    if (args->tokens > 0 && !forward) {
        if (!args->d_x)
            return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_D_X, 0);
        if (!args->d_topk_weight)
            return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_D_TOPK_WEIGHT, 0);
    }
    return 0;
}

int mok_args_check_peers(const struct mok_plan *plan, const struct mok_op_args *args, struct mok_op_result *ret)
{
    uint32_t r;

    if (!args->peer)
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_RANKS, 0);
    for (r = 0; r < plan->spec.ep; r++) {
        const struct mok_peer *peer = &args->peer[r];

        if (peer->tokens > plan->spec.max_tokens)
            return mok_args_refuse(ret, -MOK_ERANGE, MOK_ARG_TOKENS, peer->tokens);
        if (peer->tokens > 0 && !peer->x)
            return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_X, r);
        if (peer->tokens > 0 && args->kind == MOK_KIND_BACKWARD && !peer->d_out)
            return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_D_OUT, r);
    }
    if (args->peer[plan->spec.rank].tokens != args->tokens)
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_TOKENS, args->tokens);
    return 0;
}

int mok_args_check_context(const struct mok_plan *plan, uint64_t hash, const struct mok_context_header *header,
                           uint32_t mode, uint32_t tokens, struct mok_op_result *ret)
{
    if (header->magic != MOK_CONTEXT_MAGIC || header->layer_hash != hash)
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT, (int64_t)header->magic);
    if (header->mode != mode)
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT_MODE, header->mode);
    if (header->tokens != tokens)
        return mok_args_refuse(ret, -MOK_ESIZE, MOK_ARG_TOKENS, header->tokens);
    if (header->mode == MOK_CONTEXT_FULL && header->ring_rows_kept > plan->ring_rows)
        return mok_args_refuse(ret, -MOK_EARG, MOK_ARG_CONTEXT, (int64_t)header->ring_rows_kept);
    return 0;
}
