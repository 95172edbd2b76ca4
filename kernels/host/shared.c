/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared expert: every token of this rank, weight 1, BF16 whatever the layer's precision. Blocks of tokens pass one
 * after the other through a buffer of their own; nothing moves between ranks.
 */
#include "host.h"

static uint64_t blocks_of(const struct mok_host_op *op)
{
    if (op->layer->plan.spec.shared_intermediate == 0)
        return 0;
    return mok_div_up(op->args->tokens, op->layer->layout.shared_rows);
}

static uint64_t steps_of(const struct mok_host_op *op)
{
    return op->args->kind == MOK_KIND_FORWARD ? 2 : 4;
}

uint64_t mok_host_shared_groups(const struct mok_host_op *op)
{
    return blocks_of(op) * steps_of(op);
}

static uint16_t *bf16_at(const struct mok_engine_layer *layer, uint64_t offset)
{
    return (uint16_t *)(void *)(layer->memory + offset);
}

static void shared_ffn(const struct mok_host_op *op, uint64_t block, struct mok_host_ffn *ret)
{
    const struct mok_engine_layer *layer = op->layer;
    const struct mok_host_layout *layout = &layer->layout;
    const struct mok_layer_spec *spec = &layer->plan.spec;
    const struct mok_expert_params *params = &op->args->params;
    const struct mok_peer *own = &op->args->peer[spec->rank];
    uint64_t width = spec->shared_intermediate, skip = block * layout->shared_rows * spec->hidden;

    *ret = (struct mok_host_ffn){
        .plan = &layer->plan,
        .hidden = spec->hidden,
        .intermediate = spec->shared_intermediate,
        .clamp = spec->clamp,
        .gate = { .data = params->shared_gate, .columns = spec->hidden },
        .up = { .data = params->shared_up, .columns = spec->hidden },
        .down = { .data = params->shared_down, .columns = width },
        .d_gate = params->d_shared_gate,
        .d_up = params->d_shared_up,
        .d_down = params->d_shared_down,
        .narrow = mok_spec_bf16_gradients(spec),
        .x = { .data = (const uint8_t *)((const uint16_t *)own->x + skip), .columns = spec->hidden },
        .h = { layer->memory + layout->shared_h, NULL, width },
        .d_a = { layer->memory + layout->shared_d_a, NULL, width },
        .d_b = { layer->memory + layout->shared_d_b, NULL, width },
        .a = bf16_at(layer, layout->shared_a),
        .b = bf16_at(layer, layout->shared_b),
        .y = bf16_at(layer, layout->shared_out) + skip,
    };
    if (ret->narrow) {
        float *sums = (float *)(void *)(layer->memory + layout->shared_sums);

        ret->sums = (struct mok_host_sums){ block > 0 ? sums : NULL, block + 1 < blocks_of(op) ? sums : NULL };
    }
    if (op->args->kind == MOK_KIND_BACKWARD)
        ret->g = (struct mok_host_matrix){ .data = (const uint8_t *)((const uint16_t *)own->d_out + skip),
                                           .columns = spec->hidden };
}

enum mok_host_at mok_host_shared_group(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret)
{
    static const enum mok_host_stage forward[2] = { MOK_STAGE_SHARED_GATE_UP, MOK_STAGE_SHARED_DOWN };
    static const enum mok_host_stage backward[4] = { MOK_STAGE_SHARED_GATE_UP, MOK_STAGE_SHARED_D_HIDDEN,
                                                     MOK_STAGE_SHARED_D_INPUT, MOK_STAGE_SHARED_WGRAD };
    uint64_t steps = steps_of(op);
    enum mok_host_stage stage = steps == 2 ? forward[at % 2] : backward[at % 4];
    struct mok_host_ffn ffn;
    uint32_t tasks;

    shared_ffn(op, 0, &ffn);
    if (stage == MOK_STAGE_SHARED_GATE_UP || stage == MOK_STAGE_SHARED_D_HIDDEN)
        tasks = mok_host_hidden_tiles(&ffn);
    else if (stage == MOK_STAGE_SHARED_WGRAD)
        tasks = mok_host_wgrad_tiles(&ffn);
    else
        tasks = mok_host_output_tiles(&ffn);
    *ret = (struct mok_host_group){ stage, 0, at / steps, tasks };
    return MOK_AT_GROUP;
}

bool mok_host_shared_ready(const struct mok_host_op *op, const struct mok_host_group *group)
{
    uint64_t turn = group->turn;

    switch (group->stage) {
    case MOK_STAGE_SHARED_GATE_UP:
        if (op->args->kind == MOK_KIND_FORWARD)
            return mok_host_turns(op, MOK_STAGE_SHARED_DOWN, 0) >= turn;
        return mok_host_turns(op, MOK_STAGE_SHARED_WGRAD, 0) >= turn &&
               mok_host_turns(op, MOK_STAGE_SHARED_D_INPUT, 0) >= turn;
    case MOK_STAGE_SHARED_DOWN:
    case MOK_STAGE_SHARED_D_HIDDEN:
        return mok_host_turns(op, MOK_STAGE_SHARED_GATE_UP, 0) > turn;
    case MOK_STAGE_SHARED_D_INPUT:
        return mok_host_turns(op, MOK_STAGE_SHARED_D_HIDDEN, 0) > turn;
    case MOK_STAGE_SHARED_WGRAD:
        return mok_host_turns(op, MOK_STAGE_SHARED_D_HIDDEN, 0) > turn && mok_host_turns(op, MOK_STAGE_ZERO, 0) > 0;
    default:
        return true;
    }
}

void mok_host_shared_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                          uint64_t index)
{
    uint64_t from = group->turn * op->layer->layout.shared_rows;
    uint64_t rows = mok_min_u64(op->layer->layout.shared_rows, op->args->tokens - from);
    uint32_t tile = (uint32_t)index;
    struct mok_host_ffn ffn;

    shared_ffn(op, group->turn, &ffn);
    switch (group->stage) {
    case MOK_STAGE_SHARED_GATE_UP:
        mok_host_gate_up(unit, &ffn, 0, rows, tile, op->args->kind == MOK_KIND_FORWARD);
        return;
    case MOK_STAGE_SHARED_DOWN:
        mok_host_down(unit, &ffn, 0, rows, tile);
        return;
    case MOK_STAGE_SHARED_D_HIDDEN:
        mok_host_d_hidden(unit, &ffn, 0, rows, tile);
        return;
    case MOK_STAGE_SHARED_D_INPUT:
        mok_host_d_input(unit, &ffn, 0, rows, tile);
        return;
    default:
        mok_host_wgrad(unit, &ffn, 0, rows, tile);
    }
}
