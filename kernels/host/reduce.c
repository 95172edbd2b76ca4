/* SPDX-License-Identifier: Apache-2.0 */
/*
 * REDUCE: sums a token's slots over k ascending in FP32 and rounds once. Slots with id -1 are not looked at: nobody
 * wrote them.
 */
#include "host.h"

#include <string.h>

#include "ops.h"

#define BLOCK_TOKENS 32u

static enum mok_host_at reduce_group(const struct mok_host_op *op, enum mok_host_list list, uint64_t at,
                                     struct mok_host_group *ret)
{
    if (list != MOK_LIST_COMPUTE || at > 0)
        return MOK_AT_END;
    *ret = (struct mok_host_group){ MOK_STAGE_REDUCE, 0, 0, mok_div_up(op->args->tokens, BLOCK_TOKENS) };
    return MOK_AT_GROUP;
}

static bool reduce_ready(const struct mok_host_op *op, const struct mok_host_group *group)
{
    (void)op;
    (void)group;
    return true;
}

struct token {
    const int32_t *ids;         /* [K] */
    const float *topk_weight;   /* [K] */
    const float *weight_slots;  /* [K] */
    const uint16_t *slots;      /* [K][H] */
    const uint16_t *shared;     /* [H], or NULL */
};

static struct token token_of(const struct mok_engine_layer *layer, uint64_t t)
{
    const struct mok_plan *plan = &layer->plan;
    const uint8_t *sym = layer->sym[plan->spec.rank];
    uint64_t slot = t * plan->spec.topk;
    struct token token = {
        .ids = (const int32_t *)(const void *)(sym + plan->sym_ids) + slot,
        .topk_weight = (const float *)(const void *)(sym + plan->sym_topk_weight) + slot,
        .weight_slots = (const float *)(const void *)(sym + plan->sym_weight_slots) + slot,
        .slots = (const uint16_t *)(const void *)(sym + plan->sym_slots) + slot * plan->spec.hidden,
    };

    if (plan->spec.shared_intermediate)
        token.shared = (const uint16_t *)(const void *)(layer->memory + layer->layout.shared_out) +
                       t * plan->spec.hidden;
    return token;
}

static void reduce_out(const struct mok_host_op *op, float *sum, uint64_t t)
{
    const struct mok_layer_spec *spec = &op->layer->plan.spec;
    struct token token = token_of(op->layer, t);
    uint16_t *out = (uint16_t *)op->args->out + t * spec->hidden;
    uint32_t k;

    if (op->args->flags & MOK_OPF_ACCUMULATE_OUT)
        mok_ops_widen(sum, out, spec->hidden);
    else
        memset(sum, 0, spec->hidden * sizeof(float));
    if (token.shared)
        mok_ops_add(sum, token.shared, spec->hidden);
    for (k = 0; k < spec->topk; k++)
        if (token.ids[k] >= 0)
            mok_ops_add_scaled(sum, token.topk_weight[k], token.slots + (uint64_t)k * spec->hidden, spec->hidden);
    mok_ops_narrow(out, sum, spec->hidden);
}

static void reduce_d_x(const struct mok_host_op *op, float *sum, uint64_t t)
{
    const struct mok_layer_spec *spec = &op->layer->plan.spec;
    struct token token = token_of(op->layer, t);
    float *d_topk_weight = op->args->d_topk_weight + t * spec->topk;
    uint32_t k;

    memset(sum, 0, spec->hidden * sizeof(float));
    if (token.shared)
        mok_ops_add(sum, token.shared, spec->hidden);
    for (k = 0; k < spec->topk; k++) {
        bool routed = token.ids[k] >= 0;

        d_topk_weight[k] = routed ? token.weight_slots[k] : 0.0f;
        if (routed)
            mok_ops_add(sum, token.slots + (uint64_t)k * spec->hidden, spec->hidden);
    }
    mok_ops_narrow((uint16_t *)op->args->d_x + t * spec->hidden, sum, spec->hidden);
}

static void reduce_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                        uint64_t index)
{
    uint64_t t, end = mok_min_u64((index + 1) * BLOCK_TOKENS, op->args->tokens);

    (void)group;
    for (t = index * BLOCK_TOKENS; t < end; t++)
        if (op->args->kind == MOK_KIND_FORWARD)
            reduce_out(op, unit->out[0], t);
        else
            reduce_d_x(op, unit->out[0], t);
}

const struct mok_host_program mok_host_reduce = { reduce_group, reduce_ready, reduce_task };
