/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MAIN of a backward: schedule, reverse-combine of d_out (and x again, for what the context does not hold), gate and up
 * again, d_hidden, d_input, weight gradients, reverse-dispatch of d_x; the shared expert first.
 *
 * A ring slot j (one minibatch) of turn i:
 *     dispatch -> gate_up -> d_hidden -> d_input -> combine
 *                                     \-> wgrad -> the next turn's dispatch
 * Weight gradients of all minibatches are added one after the other, in canonical order.
 */
#include "host.h"

#include <string.h>

static uint32_t tiles_of(const struct mok_host_ffn *ffn, enum mok_host_stage stage)
{
    switch (stage) {
    case MOK_STAGE_D_INPUT:
        return mok_host_output_tiles(ffn);
    case MOK_STAGE_WGRAD:
        return mok_host_wgrad_tiles(ffn);
    default:
        return mok_host_hidden_tiles(ffn);
    }
}

/* gate_up of the next minibatch comes first, so that a wait at the end of one is filled by the other. */
static enum mok_host_at routed_compute(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret)
{
    static const enum mok_host_stage step_stage[4] = { MOK_STAGE_GATE_UP, MOK_STAGE_D_HIDDEN, MOK_STAGE_D_INPUT,
                                                       MOK_STAGE_WGRAD };
    uint64_t steps, turn, step, slot = 0;
    enum mok_host_stage stage = MOK_STAGE_GATE_UP;
    struct mok_host_ffn ffn;

    if (mok_host_turns(op, MOK_STAGE_SCAN, 0) == 0)
        return MOK_AT_LATER;
    steps = 4 * (uint64_t)op->slots + 1;
    turn = at / steps;
    if (turn >= op->macrobatches)
        return MOK_AT_END;
    step = at % steps;
    if (step > 0) {
        stage = step_stage[(step - 1) % 4];
        slot = (step - 1) / 4 + (stage == MOK_STAGE_GATE_UP ? 1 : 0);
        if (slot >= op->slots)
            return MOK_AT_SKIP;
    }
    *ret = (struct mok_host_group){ stage, (uint32_t)slot, turn, 0 };
    if (stage == MOK_STAGE_GATE_UP && mok_host_is_kept(op, turn))
        return MOK_AT_GROUP;
    mok_host_routed_ffn(op, 0, 0, &ffn);
    ret->tasks = mok_host_piece_tasks(op, ret, tiles_of(&ffn, stage));
    return MOK_AT_GROUP;
}

static uint64_t zero_tasks(const struct mok_host_op *op)
{
    const struct mok_plan *plan = &op->layer->plan;

    if (!(op->args->flags & MOK_OPF_OVERWRITE_WGRAD))
        return 0;
    return 3 * ((uint64_t)plan->local_experts + (plan->spec.shared_intermediate ? 1 : 0));
}

static enum mok_host_at backward_group(const struct mok_host_op *op, enum mok_host_list list, uint64_t at,
                                       struct mok_host_group *ret)
{
    uint64_t shared;

    if (list == MOK_LIST_COMM) {
        if (at < MOK_HOST_SCHEDULE_GROUPS)
            return mok_host_schedule_group(op, at, ret);
        return mok_host_routed_comm(op, at - MOK_HOST_SCHEDULE_GROUPS, ret);
    }
    if (at == 0) {
        *ret = (struct mok_host_group){ MOK_STAGE_ZERO, 0, 0, zero_tasks(op) };
        return MOK_AT_GROUP;
    }
    shared = mok_host_shared_groups(op);
    if (at - 1 < shared)
        return mok_host_shared_group(op, at - 1, ret);
    return routed_compute(op, at - 1 - shared, ret);
}

static bool backward_ready(const struct mok_host_op *op, const struct mok_host_group *group)
{
    uint64_t turn = group->turn;
    uint32_t slot = group->slot;

    switch (group->stage) {
    case MOK_STAGE_DISPATCH:
        return mok_host_turns(op, MOK_STAGE_FILL, 0) > 0 && mok_host_turns(op, MOK_STAGE_WGRAD, slot) >= turn;
    case MOK_STAGE_GATE_UP:
        return mok_host_turns(op, MOK_STAGE_DISPATCH, slot) > turn;
    case MOK_STAGE_D_HIDDEN:
        return mok_host_turns(op, MOK_STAGE_GATE_UP, slot) > turn &&
               mok_host_turns(op, MOK_STAGE_DISPATCH, slot) > turn &&
               mok_host_turns(op, MOK_STAGE_COMBINE, slot) >= turn;
    case MOK_STAGE_D_INPUT:
        return mok_host_turns(op, MOK_STAGE_D_HIDDEN, slot) > turn;
    case MOK_STAGE_WGRAD:
        return mok_host_turns(op, MOK_STAGE_D_HIDDEN, slot) > turn && mok_host_turns(op, MOK_STAGE_ZERO, 0) > 0 &&
               op->wgrads >= turn * op->slots + slot;
    case MOK_STAGE_COMBINE:
        return mok_host_turns(op, MOK_STAGE_D_INPUT, slot) > turn;
    default:
        return mok_host_schedule_ready(op, group) && mok_host_shared_ready(op, group);
    }
}

static void zero(const struct mok_host_op *op, uint64_t index)
{
    const struct mok_layer_spec *spec = &op->layer->plan.spec;
    const struct mok_expert_params *params = &op->args->params;
    uint64_t expert = index / 3, row = spec->hidden * mok_host_gradient_bytes(&op->layer->plan);
    void *routed[3] = { params->d_gate, params->d_up, params->d_down };
    void *shared[3] = { params->d_shared_gate, params->d_shared_up, params->d_shared_down };

    if (expert < op->layer->plan.local_experts)
        memset((uint8_t *)routed[index % 3] + expert * row * spec->intermediate, 0, row * spec->intermediate);
    else
        memset(shared[index % 3], 0, row * spec->shared_intermediate);
}

static void expert_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                        uint64_t index)
{
    struct mok_host_piece piece;
    struct mok_host_ffn ffn;

    mok_host_routed_ffn(op, 0, 0, &ffn);
    piece = mok_host_piece_of(op, group, tiles_of(&ffn, group->stage), index);
    mok_host_routed_ffn(op, group->turn, piece.expert, &ffn);
    switch (group->stage) {
    case MOK_STAGE_GATE_UP:
        mok_host_gate_up(unit, &ffn, piece.row, piece.rows, piece.tile, false);
        return;
    case MOK_STAGE_D_HIDDEN:
        mok_host_d_hidden(unit, &ffn, piece.row, piece.rows, piece.tile);
        return;
    case MOK_STAGE_D_INPUT:
        mok_host_d_input(unit, &ffn, piece.row, piece.rows, piece.tile);
        return;
    default:
        ffn.sums = mok_host_sums_of(op, group, &piece);
        mok_host_wgrad(unit, &ffn, piece.row, piece.rows, piece.tile);
    }
}

static void backward_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                          uint64_t index)
{
    switch (group->stage) {
    case MOK_STAGE_COUNT:
    case MOK_STAGE_SCAN:
    case MOK_STAGE_FILL:
        mok_host_schedule_task(op, group, index);
        return;
    case MOK_STAGE_ZERO:
        zero(op, index);
        return;
    case MOK_STAGE_DISPATCH:
        mok_host_dispatch(op, unit, group, index);
        return;
    case MOK_STAGE_COMBINE:
        mok_host_combine(op, unit, group, index);
        return;
    case MOK_STAGE_GATE_UP:
    case MOK_STAGE_D_HIDDEN:
    case MOK_STAGE_D_INPUT:
    case MOK_STAGE_WGRAD:
        expert_task(op, unit, group, index);
        return;
    default:
        mok_host_shared_task(op, unit, group, index);
    }
}

const struct mok_host_program mok_host_backward = { backward_group, backward_ready, backward_task };
