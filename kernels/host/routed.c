/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the rows of a macrobatch lie in the ring, and which tasks a minibatch of them makes.
 */
#include "host.h"

#include "mx.h"

struct window {
    uint64_t base, begin, end; /* padded rows: the macrobatch's first, the minibatch's first and behind its last */
};

uint32_t mok_host_group_values(const struct mok_plan *plan)
{
    switch (plan->spec.precision) {
    case MOK_MXFP8_PER32:
        return 32;
    case MOK_MXFP8_PER128:
        return 128;
    default:
        return 0;
    }
}

/* Forward walks from last to first and so leaves macrobatch 0 in the ring; backward from first to last. */
uint64_t mok_host_macrobatch(const struct mok_host_op *op, const struct mok_host_group *group)
{
    return op->args->kind == MOK_KIND_FORWARD ? op->macrobatches - 1 - group->turn : group->turn;
}

static struct window window_of(const struct mok_host_op *op, const struct mok_host_group *group)
{
    const struct mok_plan *plan = &op->layer->plan;
    struct window window;
    uint64_t limit;

    window.base = mok_host_macrobatch(op, group) * plan->ring_rows;
    window.begin = window.base + (uint64_t)group->slot * plan->minibatch_rows;
    limit = mok_min_u64(window.base + plan->ring_rows, op->padded_rows);
    window.end = mok_min_u64(window.begin + plan->minibatch_rows, limit);
    if (window.begin > window.end)
        window.begin = window.end;
    return window;
}

uint64_t mok_host_piece_tasks(const struct mok_host_op *op, const struct mok_host_group *group, uint32_t tiles)
{
    const struct mok_schedule *schedule = &op->layer->schedule;
    struct window window = window_of(op, group);

    if (window.begin == window.end)
        return 0;
    return (uint64_t)(mok_schedule_find(schedule, window.end - 1) - mok_schedule_find(schedule, window.begin) + 1) *
           tiles;
}

struct mok_host_piece mok_host_piece_of(const struct mok_host_op *op, const struct mok_host_group *group,
                                        uint32_t tiles, uint64_t index)
{
    const struct mok_schedule *schedule = &op->layer->schedule;
    struct window window = window_of(op, group);
    uint32_t expert = schedule->live[mok_schedule_find(schedule, window.begin) + index / tiles];
    uint64_t from = mok_max_u64(window.begin, schedule->first[expert]);
    uint64_t to = mok_min_u64(window.end, schedule->first[expert] + schedule->expert_rows[expert]);

    return (struct mok_host_piece){ expert, (uint32_t)(index % tiles), from - window.base, to - from };
}

/* Parts of a minibatch's rows that are transferred apart: with few peers, several a peer. */
static uint64_t transfer_parts(const struct mok_host_op *op, const struct window *window)
{
    uint64_t tiles = mok_div_up(window->end - window->begin, op->layer->plan.tile_rows);

    return mok_min_u64(tiles, mok_max_u64(1, 8 / op->layer->plan.spec.ep));
}

uint64_t mok_host_transfer_tasks(const struct mok_host_op *op, const struct mok_host_group *group)
{
    struct window window = window_of(op, group);

    return transfer_parts(op, &window) * op->layer->plan.spec.ep;
}

struct mok_host_span mok_host_transfer_of(const struct mok_host_op *op, const struct mok_host_group *group,
                                          uint64_t index)
{
    const struct mok_plan *plan = &op->layer->plan;
    struct window window = window_of(op, group);
    uint64_t parts = transfer_parts(op, &window), part = index % parts;
    uint64_t tiles = mok_div_up(window.end - window.begin, plan->tile_rows);

    return (struct mok_host_span){
        .source = mok_schedule_peer(plan->spec.rank, plan->spec.ep, (uint32_t)(index / parts)),
        .base = window.base,
        .begin = window.begin + part * tiles / parts * plan->tile_rows,
        .end = mok_min_u64(window.begin + (part + 1) * tiles / parts * plan->tile_rows, window.end),
    };
}

bool mok_host_is_kept(const struct mok_host_op *op, uint64_t macrobatch)
{
    return op->args->context_mode == MOK_CONTEXT_FULL && macrobatch == 0;
}

struct mok_host_ring mok_host_ring_of(const struct mok_host_op *op, uint64_t macrobatch)
{
    const struct mok_engine_layer *layer = op->layer;
    bool in_context = op->args->kind == MOK_KIND_FORWARD ? op->args->context_mode == MOK_CONTEXT_FULL
                                                         : mok_host_is_kept(op, macrobatch);
    uint8_t *base = in_context ? (uint8_t *)op->args->context + layer->plan.ctx_ring : layer->memory;
    const struct mok_host_kept *kept = in_context ? &layer->context_ring : &layer->layout.kept;
    bool mx = mok_host_group_values(&layer->plan) != 0;

    return (struct mok_host_ring){
        .x = { base + kept->x.data, mx ? base + kept->x.scale : NULL, layer->plan.spec.hidden },
        .a = (uint16_t *)(void *)(base + kept->a),
        .b = (uint16_t *)(void *)(base + kept->b),
    };
}

struct mok_host_rows mok_host_rows_at(const struct mok_engine_layer *layer, const struct mok_host_part *part,
                                      uint64_t columns)
{
    bool mx = mok_host_group_values(&layer->plan) != 0;

    return (struct mok_host_rows){ layer->memory + part->data, mx ? layer->memory + part->scale : NULL, columns };
}

static struct mok_host_matrix weight_of(const struct mok_host_op *op, const void *data, const void *scale,
                                        uint32_t expert, uint64_t rows, uint64_t columns)
{
    bool mx = mok_host_group_values(&op->layer->plan) != 0;

    return (struct mok_host_matrix){
        .data = (const uint8_t *)data + expert * rows * columns * (mx ? 1 : 2),
        .scale = mx ? (const uint8_t *)scale + expert * rows * mok_mx_scales(columns) : NULL,
        .columns = columns,
    };
}

static void *gradient_of(const struct mok_host_op *op, void *base, uint32_t expert, uint64_t elements)
{
    return base ? (uint8_t *)base + expert * elements * mok_host_gradient_bytes(&op->layer->plan) : NULL;
}

struct mok_host_sums mok_host_sums_of(const struct mok_host_op *op, const struct mok_host_group *group,
                                      const struct mok_host_piece *piece)
{
    const struct mok_engine_layer *layer = op->layer;
    const struct mok_schedule *schedule = &layer->schedule;
    uint64_t begin = window_of(op, group).base + piece->row, border = group->turn * op->slots + group->slot;
    float *sums[2];
    unsigned i;

    if (!mok_spec_bf16_gradients(&layer->plan.spec))
        return (struct mok_host_sums){ NULL, NULL };
    for (i = 0; i < 2; i++)
        sums[i] = (float *)(void *)(layer->memory + layer->layout.sums[i]);
    return (struct mok_host_sums){
        .from = begin > schedule->first[piece->expert] ? sums[(border + 1) % 2] : NULL,
        .to = begin + piece->rows < schedule->first[piece->expert] + schedule->expert_rows[piece->expert] ?
                  sums[border % 2] :
                  NULL,
    };
}

void mok_host_routed_ffn(const struct mok_host_op *op, uint64_t macrobatch, uint32_t expert, struct mok_host_ffn *ret)
{
    const struct mok_engine_layer *layer = op->layer;
    const struct mok_host_layout *layout = &layer->layout;
    const struct mok_layer_spec *spec = &layer->plan.spec;
    const struct mok_expert_params *params = &op->args->params;
    struct mok_host_ring ring = mok_host_ring_of(op, macrobatch);
    uint64_t hidden = spec->hidden, intermediate = spec->intermediate;
    struct mok_host_rows g = mok_host_rows_at(layer, &layout->g, hidden);

    *ret = (struct mok_host_ffn){
        .plan = &layer->plan,
        .hidden = spec->hidden,
        .intermediate = spec->intermediate,
        .clamp = spec->clamp,
        .group = mok_host_group_values(&layer->plan),
        .gate = weight_of(op, params->gate, params->gate_scale, expert, intermediate, hidden),
        .up = weight_of(op, params->up, params->up_scale, expert, intermediate, hidden),
        .down = weight_of(op, params->down, params->down_scale, expert, hidden, intermediate),
        .d_gate = gradient_of(op, params->d_gate, expert, intermediate * hidden),
        .d_up = gradient_of(op, params->d_up, expert, intermediate * hidden),
        .d_down = gradient_of(op, params->d_down, expert, intermediate * hidden),
        .wgrad_tile = mok_spec_mxfp8_wgrad(spec) ? mok_host_group_values(&layer->plan) : 0,
        .narrow = mok_spec_bf16_gradients(spec),
        .x = mok_host_matrix_of(ring.x),
        .g = mok_host_matrix_of(g),
        .h = mok_host_rows_at(layer, &layout->h, intermediate),
        .d_a = mok_host_rows_at(layer, &layout->d_a, intermediate),
        .d_b = mok_host_rows_at(layer, &layout->d_b, intermediate),
        .a = ring.a,
        .b = ring.b,
        .y = (uint16_t *)(void *)(layer->memory + layout->y),
        .weight = (const float *)(const void *)(layer->memory + layout->weight),
        .partial = (float *)(void *)(layer->memory + layout->partial),
    };
}

/*
 * The comm list behind the schedule: the first macrobatch is dispatched, then combine of each minibatch and dispatch of
 * the next macrobatch into its place take turns.
 */
enum mok_host_at mok_host_routed_comm(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret)
{
    uint64_t slots, turn, rest;

    if (mok_host_turns(op, MOK_STAGE_SCAN, 0) == 0)
        return MOK_AT_LATER;
    if (op->macrobatches == 0)
        return MOK_AT_END;
    slots = op->slots;
    if (at < slots) {
        *ret = (struct mok_host_group){ MOK_STAGE_DISPATCH, (uint32_t)at, 0, 0 };
    } else {
        turn = (at - slots) / (2 * slots);
        rest = (at - slots) % (2 * slots);
        if (turn >= op->macrobatches)
            return MOK_AT_END;
        if (rest % 2 == 0)
            *ret = (struct mok_host_group){ MOK_STAGE_COMBINE, (uint32_t)(rest / 2), turn, 0 };
        else if (turn + 1 < op->macrobatches)
            *ret = (struct mok_host_group){ MOK_STAGE_DISPATCH, (uint32_t)(rest / 2), turn + 1, 0 };
        else
            return MOK_AT_SKIP;
    }
    ret->tasks = mok_host_transfer_tasks(op, ret);
    return MOK_AT_GROUP;
}
