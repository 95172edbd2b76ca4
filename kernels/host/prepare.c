/* SPDX-License-Identifier: Apache-2.0 */
/*
 * PREPARE: what this rank brings to an operation is checked here, before any rank starts. Routing is copied from the
 * caller's memory (forward) or the context (backward) to the symmetric workspace once, and the copy is what is checked
 * and used: the caller may write its memory at any time.
 */
#include "host.h"

#include <string.h>

#include "../args.h"

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

/* The context is the caller's memory: its header is copied once, then checked. */
static int check_context(struct mok_engine_layer *layer, const struct mok_op_args *args, struct mok_op_result *ret)
{
    struct mok_context_header header;
    int r;

    memcpy(&header, args->context, sizeof(header));
    r = mok_args_check_context(&layer->plan, layer->hash, &header, args->context_mode, args->tokens, ret);
    if (r < 0)
        return r;
    layer->kept_rows = header.ring_rows_kept;
    return 0;
}

int mok_host_check_args(struct mok_engine_layer *layer, const struct mok_op_args *args, struct mok_op_result *ret)
{
    int r = mok_args_check(&layer->plan, args, ret);

    return r < 0 || args->kind == MOK_KIND_FORWARD ? r : check_context(layer, args, ret);
}

int mok_host_check_peers(const struct mok_engine_layer *layer, const struct mok_op_args *args,
                         struct mok_op_result *ret)
{
    return mok_args_check_peers(&layer->plan, args, ret);
}
