/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MAIN of a forward: schedule, dispatch, gate and up with SwiGLU, down, combine; the shared expert first.
 *
 * A ring slot j (one minibatch) of turn i:  dispatch -> gate_up -> down -> combine, and the next turn's dispatch as
 * soon as gate_up has read the rows.
 */
#include "host.h"

#include <string.h>

static bool saves(const struct mok_host_op *op)
{
    return op->args->context_mode != MOK_CONTEXT_NONE;
}

/* A macrobatch's products: gate_up of the next minibatch comes before down of this one, so that a wait at the end of
 * one is filled by the other. */
static enum mok_host_at routed_compute(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret)
{
    uint64_t steps, turn, step, slot;
    struct mok_host_ffn ffn;
    bool is_down;

    if (mok_host_turns(op, MOK_STAGE_SCAN, 0) == 0)
        return MOK_AT_LATER;
    steps = 2 * (uint64_t)op->slots;
    if (steps == 0 || at / steps >= op->macrobatches)
        return MOK_AT_END;
    turn = at / steps;
    step = at % steps;
    is_down = step + 1 == steps || (step > 0 && step % 2 == 0);
    if (is_down)
        slot = step + 1 == steps ? op->slots - 1 : step / 2 - 1;
    else
        slot = (step + 1) / 2;
    *ret = (struct mok_host_group){ is_down ? MOK_STAGE_DOWN : MOK_STAGE_GATE_UP, (uint32_t)slot, turn, 0 };
    mok_host_routed_ffn(op, 0, 0, &ffn);
    ret->tasks = mok_host_piece_tasks(op, ret, is_down ? mok_host_output_tiles(&ffn) : mok_host_hidden_tiles(&ffn));
    return MOK_AT_GROUP;
}

static enum mok_host_at forward_group(const struct mok_host_op *op, enum mok_host_list list, uint64_t at,
                                      struct mok_host_group *ret)
{
    uint64_t shared;

    if (list == MOK_LIST_COMM) {
        if (at < MOK_HOST_SCHEDULE_GROUPS)
            return mok_host_schedule_group(op, at, ret);
        if (at == MOK_HOST_SCHEDULE_GROUPS) {
            *ret = (struct mok_host_group){ MOK_STAGE_SAVE, 0, 0, saves(op) ? 1 : 0 };
            return MOK_AT_GROUP;
        }
        return mok_host_routed_comm(op, at - MOK_HOST_SCHEDULE_GROUPS - 1, ret);
    }
    shared = mok_host_shared_groups(op);
    if (at < shared)
        return mok_host_shared_group(op, at, ret);
    return routed_compute(op, at - shared, ret);
}

static bool forward_ready(const struct mok_host_op *op, const struct mok_host_group *group)
{
    uint64_t turn = group->turn;
    uint32_t slot = group->slot;

    switch (group->stage) {
    case MOK_STAGE_SAVE:
        return mok_host_turns(op, MOK_STAGE_SCAN, 0) > 0;
    case MOK_STAGE_DISPATCH:
        return mok_host_turns(op, MOK_STAGE_FILL, 0) > 0 && mok_host_turns(op, MOK_STAGE_GATE_UP, slot) >= turn;
    case MOK_STAGE_GATE_UP:
        return mok_host_turns(op, MOK_STAGE_DISPATCH, slot) > turn &&
               mok_host_turns(op, MOK_STAGE_DOWN, slot) >= turn;
    case MOK_STAGE_DOWN:
        return mok_host_turns(op, MOK_STAGE_GATE_UP, slot) > turn &&
               mok_host_turns(op, MOK_STAGE_COMBINE, slot) >= turn;
    case MOK_STAGE_COMBINE:
        return mok_host_turns(op, MOK_STAGE_DOWN, slot) > turn;
    default:
        return mok_host_schedule_ready(op, group) && mok_host_shared_ready(op, group);
    }
}

/* Written only now, when all ranks are well: a forward that fails leaves its context alone. */
static void save_context(const struct mok_host_op *op)
{
    const struct mok_engine_layer *layer = op->layer;
    const struct mok_plan *plan = &layer->plan;
    uint64_t slots = (uint64_t)op->args->tokens * plan->spec.topk;
    const uint8_t *sym = layer->sym[plan->spec.rank];
    uint8_t *context = op->args->context;
    struct mok_context_header header = {
        .magic = MOK_CONTEXT_MAGIC,
        .layer_hash = layer->hash,
        .mode = op->args->context_mode,
        .tokens = op->args->tokens,
    };

    if (header.mode == MOK_CONTEXT_FULL)
        header.ring_rows_kept = mok_min_u64(plan->ring_rows, op->padded_rows);
    memcpy(context, &header, sizeof(header));
    memcpy(context + plan->ctx_ids, sym + plan->sym_ids, slots * sizeof(int32_t));
    memcpy(context + plan->ctx_topk_weight, sym + plan->sym_topk_weight, slots * sizeof(float));
}

static void expert_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                        uint64_t index)
{
    bool is_down = group->stage == MOK_STAGE_DOWN;
    struct mok_host_piece piece;
    struct mok_host_ffn ffn;
    uint32_t tiles;

    mok_host_routed_ffn(op, 0, 0, &ffn);
    tiles = is_down ? mok_host_output_tiles(&ffn) : mok_host_hidden_tiles(&ffn);
    piece = mok_host_piece_of(op, group, tiles, index);
    mok_host_routed_ffn(op, mok_host_macrobatch(op, group), piece.expert, &ffn);
    if (is_down)
        mok_host_down(unit, &ffn, piece.row, piece.rows, piece.tile);
    else
        mok_host_gate_up(unit, &ffn, piece.row, piece.rows, piece.tile, true);
}

static void forward_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                         uint64_t index)
{
    switch (group->stage) {
    case MOK_STAGE_COUNT:
    case MOK_STAGE_SCAN:
    case MOK_STAGE_FILL:
        mok_host_schedule_task(op, group, index);
        return;
    case MOK_STAGE_SAVE:
        save_context(op);
        return;
    case MOK_STAGE_DISPATCH:
        mok_host_dispatch(op, unit, group, index);
        return;
    case MOK_STAGE_COMBINE:
        mok_host_combine(op, unit, group, index);
        return;
    case MOK_STAGE_GATE_UP:
    case MOK_STAGE_DOWN:
        expert_task(op, unit, group, index);
        return;
    default:
        mok_host_shared_task(op, unit, group, index);
    }
}

const struct mok_host_program mok_host_forward = { forward_group, forward_ready, forward_task };
