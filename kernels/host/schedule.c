/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Builds the schedule (../schedule.h) from all ranks' symmetric routing: count a source each, scan, fill a source each.
 */
#include "host.h"

enum mok_host_at mok_host_schedule_group(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret)
{
    uint32_t ep = op->layer->plan.spec.ep;

    switch (at) {
    case 0:
        *ret = (struct mok_host_group){ MOK_STAGE_COUNT, 0, 0, ep };
        return MOK_AT_GROUP;
    case 1:
        *ret = (struct mok_host_group){ MOK_STAGE_SCAN, 0, 0, 1 };
        return MOK_AT_GROUP;
    case 2:
        *ret = (struct mok_host_group){ MOK_STAGE_FILL, 0, 0, ep };
        return MOK_AT_GROUP;
    default:
        return MOK_AT_END;
    }
}

bool mok_host_schedule_ready(const struct mok_host_op *op, const struct mok_host_group *group)
{
    switch (group->stage) {
    case MOK_STAGE_SCAN:
        return mok_host_turns(op, MOK_STAGE_COUNT, 0) > 0;
    case MOK_STAGE_FILL:
        return mok_host_turns(op, MOK_STAGE_SCAN, 0) > 0;
    default:
        return true;
    }
}

static uint64_t minibatches(const struct mok_host_op *op)
{
    const struct mok_plan *plan = &op->layer->plan;
    uint64_t whole = op->padded_rows / plan->ring_rows, rest = op->padded_rows % plan->ring_rows;

    return whole * mok_div_up(plan->ring_rows, plan->minibatch_rows) + mok_div_up(rest, plan->minibatch_rows);
}

static void scan(struct mok_host_op *op)
{
    const struct mok_plan *plan = &op->layer->plan;
    struct mok_schedule *schedule = &op->layer->schedule;

    mok_schedule_scan(schedule);
    op->padded_rows = schedule->padded_rows;
    op->macrobatches = mok_schedule_macrobatches(schedule, plan->ring_rows);
    op->slots = (uint32_t)mok_div_up(mok_min_u64(plan->ring_rows, op->padded_rows), plan->minibatch_rows);
    op->result.rows = schedule->rows;
    op->result.expert_rows = schedule->expert_rows;
    op->result.padded_rows = op->padded_rows;
    op->result.macrobatches = op->macrobatches;
    op->result.minibatches = minibatches(op);
    if (op->args->kind == MOK_KIND_BACKWARD && op->args->context_mode == MOK_CONTEXT_FULL &&
        op->layer->kept_rows != mok_min_u64(plan->ring_rows, op->padded_rows))
        mok_host_fail(op, -MOK_EARG, MOK_ARG_CONTEXT); /* not the context of these ranks' forward */
}

void mok_host_schedule_task(struct mok_host_op *op, const struct mok_host_group *group, uint64_t index)
{
    struct mok_engine_layer *layer = op->layer;
    const struct mok_plan *plan = &layer->plan;
    uint32_t first = plan->spec.rank * plan->local_experts, source = (uint32_t)index;
    const int32_t *ids = (const int32_t *)(const void *)(layer->sym[source] + plan->sym_ids);
    uint64_t slots = (uint64_t)op->args->peer[source].tokens * plan->spec.topk;

    if (group->stage == MOK_STAGE_COUNT)
        mok_schedule_count(ids, slots, first, plan->local_experts,
                           layer->schedule.count + (uint64_t)source * plan->local_experts);
    else if (group->stage == MOK_STAGE_SCAN)
        scan(op);
    else
        mok_schedule_fill(&layer->schedule, source, ids, slots, first);
}
