/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a plan asks of the CUDA engine: granules, defaults, and the sizes of the memory whose inner map is the engine's.
 * Arithmetic only; needs no GPU, so that a layer can be priced anywhere.
 */
#include "layout.h"

#include "../hd.h"
#include "../plan_backend.h"
#include "../schedule.h"
#include "mx.h"

#define PART_ALIGN 1024u
#define PULL_UNITS 16u

static uint64_t place(uint64_t *at, uint64_t bytes)
{
    uint64_t offset = *at;

    *at = mok_round_up(offset + bytes, PART_ALIGN);
    return offset;
}

static bool is_mx(const struct mok_plan *plan)
{
    return plan->spec.precision != MOK_BF16;
}

uint64_t mok_cuda_x_row_bytes(const struct mok_plan *plan)
{
    const uint64_t hidden = plan->spec.hidden;

    return is_mx(plan) ? mok_round_up(hidden + mok_mx_scales(hidden), 128) : 2 * hidden;
}

/* h: codes, and the scales of whole tiles. */
static uint64_t h_bytes(const struct mok_plan *plan)
{
    return plan->spec.intermediate * (is_mx(plan) ? 1ull : 2ull);
}

uint64_t mok_cuda_h_scale_bytes(const struct mok_plan *plan)
{
    return is_mx(plan) ? mok_round_up(4 * mok_div_up(plan->spec.intermediate, MOK_TILE_N / 2), 16) : 0;
}

uint64_t mok_cuda_factor_rows(const struct mok_plan *plan)
{
    return plan->ring_rows + MOK_TILE_M;
}

uint64_t mok_cuda_turned_scale_bytes(const struct mok_plan *plan, uint64_t rows, uint64_t columns)
{
    if (plan->spec.precision == MOK_MXFP8_PER32)
        return plan->local_experts * columns * mok_mx_scales(rows);
    return plan->local_experts * mok_div_up(rows, 128) * 2 * mok_div_up(columns, 256) * sizeof(float);
}

/* What an operand of MXFP8 weight gradients takes beside its scales, a row of the ring. */
static uint64_t tokenwise_columns(const struct mok_plan *plan, unsigned operand)
{
    return operand <= MOK_TOKENWISE_G ? plan->spec.hidden : plan->spec.intermediate;
}

uint32_t mok_cuda_tokenwise_values(const struct mok_plan *plan)
{
    return plan->spec.precision == MOK_MXFP8_PER32 ? MOK_MX_BLOCK : MOK_MX_TILE_K;
}

static bool has_wide(const struct mok_plan *plan)
{
    return is_mx(plan) && !mok_spec_mxfp8_wgrad(&plan->spec);
}

static void count_parts(const struct mok_plan *plan, struct mok_cuda_layout *l)
{
    const struct mok_layer_spec *spec = &plan->spec;
    uint64_t local = plan->local_experts, units;

    l->padded_rows = mok_schedule_rows_at_worst(plan->max_rows, plan->local_experts, plan->tile_rows);
    l->shared_rows = spec->shared_intermediate ? mok_round_up(spec->max_tokens, MOK_SEGMENT_ALIGN) : 0;
    l->counters = (l->padded_rows + l->shared_rows) / MOK_SEGMENT_ALIGN;
    l->gate_up_tiles = (uint32_t)mok_div_up(spec->intermediate, MOK_TILE_N / 2);
    l->shared_gate_up_tiles = (uint32_t)mok_div_up(spec->shared_intermediate, MOK_TILE_N / 2);
    l->down_tiles = (uint32_t)mok_div_up(spec->hidden, MOK_TILE_N);
    l->hidden_tiles = (uint32_t)mok_div_up(spec->intermediate, MOK_TILE_N);
    l->shared_hidden_tiles = (uint32_t)mok_div_up(spec->shared_intermediate, MOK_TILE_N);
    l->max_macrobatches = mok_div_up(l->padded_rows, plan->ring_rows);
    l->units_per_chunk = (uint32_t)mok_max_u64(mok_div_up(plan->minibatch_rows, MOK_UNIT_ROWS), 1);

    /* a segment ends with its expert, with its chunk or at the ring's border, and may end in a unit that is not full */
    units = l->padded_rows / MOK_UNIT_ROWS + local + l->max_macrobatches;
    l->max_segments = units / l->units_per_chunk + 2 * local + l->max_macrobatches + 8;
    l->max_chunks = l->max_segments;
    units += l->max_segments;
    l->max_pulls = spec->ep > 1 ? units : 0;
    l->max_runs = local + l->max_macrobatches + 1; /* a border cuts an expert; and the shared one */
    l->max_tasks = units * ((is_mx(plan) ? MOK_MX_PULLS : 1) + l->gate_up_tiles + l->hidden_tiles + l->down_tiles) +
                   mok_div_up(l->shared_rows, MOK_UNIT_ROWS) *
                       (l->shared_gate_up_tiles + l->shared_hidden_tiles + l->down_tiles) +
                   3ull * l->down_tiles * (l->max_runs * l->hidden_tiles + l->shared_hidden_tiles);
}

static void place_tokenwise(const struct mok_plan *plan, uint64_t *at, struct mok_cuda_layout *l)
{
    const uint32_t values = mok_cuda_tokenwise_values(plan);

    for (unsigned i = 0; i < MOK_TOKENWISE; i++) {
        uint64_t columns = tokenwise_columns(plan, i);

        l->tokenwise[i] = place(at, plan->ring_rows * columns);
        l->tokenwise_scale[i] = place(at, plan->ring_rows / values * mok_div_up(columns, values) * sizeof(float));
    }
}

/* What only a forward of MXFP8 with scales of 128 values uses. */
static void place_mx_forward(const struct mok_plan *plan, uint64_t *at, struct mok_cuda_layout *l)
{
    const struct mok_layer_spec *spec = &plan->spec;
    const uint64_t x_blocks = mok_div_up(spec->hidden, MOK_MX_TILE_K), h_blocks = mok_div_up(spec->intermediate, MOK_MX_TILE_K);
    const uint64_t rows = mok_cuda_factor_rows(plan), experts = plan->local_experts;

    l->x_factor = place(at, x_blocks * rows * sizeof(float));
    l->h_factor = place(at, h_blocks * rows * sizeof(float));
    l->gate_up_pairs = place(at, experts * l->gate_up_tiles * x_blocks * sizeof(struct mok_cuda_mx_pair));
    l->down_pairs = place(at, experts * l->down_tiles * h_blocks * sizeof(struct mok_cuda_mx_pair));
}

/* What only a backward of MXFP8 uses. */
static void place_mx_backward(const struct mok_plan *plan, uint64_t *at, struct mok_cuda_layout *l)
{
    const struct mok_layer_spec *spec = &plan->spec;
    const uint64_t hidden = spec->hidden, inter = spec->intermediate, experts = plan->local_experts;
    const uint64_t padded = l->counters * MOK_SEGMENT_ALIGN, wide = (uint64_t)spec->max_tokens * hidden * 2;
    const uint64_t scales = plan->ring_rows * mok_cuda_h_scale_bytes(plan);
    const uint64_t factors = mok_div_up(inter, MOK_MX_TILE_K) * mok_cuda_factor_rows(plan) * sizeof(float);

    if (has_wide(plan)) {
        l->x_wide = place(at, wide);
        l->g_wide = place(at, wide);
        l->row_x_wide = place(at, padded * sizeof(uint64_t));
        l->row_g_wide = place(at, padded * sizeof(uint64_t));
    } else {
        place_tokenwise(plan, at, l);
    }
    if (has_wide(plan) && spec->ep > 1) {
        l->x_wide_ring = place(at, plan->ring_rows * hidden * 2);
        l->g_wide_ring = place(at, plan->ring_rows * hidden * 2);
    }
    l->d_a_code = place(at, plan->ring_rows * inter);
    l->d_b_code = place(at, plan->ring_rows * inter);
    l->d_a_scale = place(at, scales);
    l->d_b_scale = place(at, scales);
    if (spec->precision != MOK_MXFP8_PER32) {
        l->d_a_factor = place(at, factors);
        l->d_b_factor = place(at, factors);
    }
    if (!spec->transposed_weights) {
        l->gate_t = place(at, experts * hidden * inter);
        l->up_t = place(at, experts * hidden * inter);
        l->down_t = place(at, experts * hidden * inter);
    }
    l->gate_t_scale = place(at, mok_cuda_turned_scale_bytes(plan, inter, hidden));
    l->up_t_scale = place(at, mok_cuda_turned_scale_bytes(plan, inter, hidden));
    l->down_t_scale = place(at, mok_cuda_turned_scale_bytes(plan, hidden, inter));
    l->spans = place(at, 2 * l->max_macrobatches * sizeof(struct mok_cuda_head));
}

/* What only a backward uses. */
static void place_backward(const struct mok_plan *plan, uint64_t *at, struct mok_cuda_layout *l)
{
    const uint64_t rows = plan->ring_rows * plan->spec.intermediate * 2;
    const uint64_t shared = l->shared_rows * plan->spec.shared_intermediate * 2;
    const uint64_t padded = l->counters * MOK_SEGMENT_ALIGN;

    l->runs = place(at, l->max_runs * sizeof(struct mok_cuda_run));
    l->gates_done = place(at, l->counters * sizeof(uint32_t));
    l->row_g = place(at, padded * sizeof(uint64_t));
    l->row_weight_dst = place(at, padded * sizeof(uint64_t));
    l->row_weight = place(at, padded * sizeof(float));
    l->a = place(at, rows);
    l->b = place(at, rows);
    l->d_a = place(at, has_wide(plan) || !is_mx(plan) ? rows : 0);
    l->d_b = place(at, has_wide(plan) || !is_mx(plan) ? rows : 0);
    if (plan->spec.ep > 1)
        l->g = place(at, plan->ring_rows * mok_cuda_x_row_bytes(plan));
    l->partial = place(at, plan->ring_rows * (is_mx(plan) ? l->gate_up_tiles : l->hidden_tiles) * sizeof(float));
    l->shared_a = place(at, shared);
    l->shared_b = place(at, shared);
    l->shared_d_a = place(at, shared);
    l->shared_d_b = place(at, shared);
    if (mok_spec_bf16_gradients(&plan->spec)) {
        l->sums_count = mok_min_u64(l->max_macrobatches - 1, 2);
        l->sums = place(at, l->sums_count * 3 * plan->spec.hidden * plan->spec.intermediate * sizeof(float));
    }
}

void mok_cuda_layout_make(const struct mok_plan *plan, struct mok_cuda_layout *ret)
{
    const struct mok_layer_spec *spec = &plan->spec;
    struct mok_cuda_layout l = { 0 };
    uint64_t at = 0;

    count_parts(plan, &l);
    l.head = place(&at, sizeof(struct mok_cuda_head));
    l.segments = place(&at, l.max_segments * sizeof(struct mok_cuda_segment));
    l.chunks = place(&at, (l.max_chunks + 1) * sizeof(struct mok_cuda_chunk));
    l.macrobatches = place(&at, (l.max_macrobatches + 1) * sizeof(struct mok_cuda_macrobatch));
    l.tasks = place(&at, l.max_tasks * sizeof(struct mok_cuda_task));
    l.pulls = place(&at, l.max_pulls * sizeof(struct mok_cuda_task));
    l.hidden_done = place(&at, l.counters * sizeof(uint32_t));
    l.pull_done = place(&at, l.counters * sizeof(uint32_t));
    l.row_src = place(&at, l.counters * MOK_SEGMENT_ALIGN * sizeof(uint64_t));
    l.row_dst = place(&at, l.counters * MOK_SEGMENT_ALIGN * sizeof(uint64_t));
    l.h = place(&at, plan->ring_rows * h_bytes(plan));
    l.h_scale = place(&at, plan->ring_rows * mok_cuda_h_scale_bytes(plan));
    if (spec->ep > 1 || is_mx(plan))
        l.x = place(&at, plan->ring_rows * mok_cuda_x_row_bytes(plan));
    if (spec->ep > 1)
        l.row_pull = place(&at, l.counters * MOK_SEGMENT_ALIGN * sizeof(uint64_t));
    l.shared_h = place(&at, l.shared_rows * spec->shared_intermediate * 2);
    l.shared_y = place(&at, spec->shared_intermediate ? (uint64_t)spec->max_tokens * spec->hidden * 2 : 0);
    l.h_wide = has_wide(plan) ? place(&at, plan->ring_rows * spec->intermediate * 2) : l.h;
    place_backward(plan, &at, &l);
    if (is_mx(plan)) {
        if (spec->precision == MOK_MXFP8_PER128)
            place_mx_forward(plan, &at, &l);
        place_mx_backward(plan, &at, &l);
    }
    l.bytes = at;
    *ret = l;
}

void mok_cuda_kept_make(const struct mok_plan *plan, struct mok_cuda_kept *ret)
{
    struct mok_cuda_kept kept = { 0 };
    uint64_t at = 0;

    if (plan->spec.ep > 1)
        kept.x = place(&at, plan->ring_rows * mok_cuda_x_row_bytes(plan));
    kept.a = place(&at, plan->ring_rows * plan->spec.intermediate * 2);
    kept.b = place(&at, plan->ring_rows * plan->spec.intermediate * 2);
    kept.bytes = at;
    *ret = kept;
}

static struct mok_plan_choice tile_rows(const struct mok_plan *plan)
{
    if (mok_spec_mxfp8_wgrad(&plan->spec))
        return (struct mok_plan_choice){ MOK_MX_TILE_K, "rows that weight gradients multiply at a time" };
    return (struct mok_plan_choice){ MOK_SEGMENT_ALIGN, "rows that one warpgroup multiplies" };
}

static struct mok_plan_choice comm_units(const struct mok_plan *plan)
{
    if (plan->spec.ep == 1)
        return (struct mok_plan_choice){ 0, "one rank has nothing to pull" };
    return (struct mok_plan_choice){ mok_min_u64(PULL_UNITS, plan->device.units),
                                     "they take what NVLink gives; when all is there they multiply, too" };
}

static uint32_t max_comm_units(const struct mok_plan *plan)
{
    return plan->device.units;
}

static uint32_t compute_units(const struct mok_plan *plan, uint32_t comm)
{
    (void)comm;
    return plan->device.units;
}

static uint64_t ring_row_bytes(const struct mok_plan *plan)
{
    const uint64_t hidden = plan->spec.hidden, inter = plan->spec.intermediate, remote = plan->spec.ep > 1;
    /* codes and scales of h, d_a and d_b, of x, of rows of d_out of other ranks; MXFP8 has them beside what BF16 has */
    const uint64_t codes = 3 * (h_bytes(plan) + mok_cuda_h_scale_bytes(plan)) +
                           (remote ? 2 : 1) * mok_cuda_x_row_bytes(plan);
    /* h, a, b, d_a, d_b; x and rows of d_out of other ranks */
    const uint64_t wide = 2 * (5 * inter + remote * 2 * hidden), turned = 2 * hidden + 3 * inter;
    const uint64_t partial = sizeof(float) * mok_div_up(inter, is_mx(plan) ? MOK_TILE_N / 2 : MOK_TILE_N);
    const uint32_t values = mok_cuda_tokenwise_values(plan);
    const uint64_t tiles = 2 * mok_div_up(hidden, values) + 3 * mok_div_up(inter, values);

    if (mok_spec_mxfp8_wgrad(&plan->spec)) /* a and b, and what is turned, with its scales */
        return codes + 2 * 2 * inter + turned + mok_div_up(tiles * sizeof(float), values) + partial;
    return (is_mx(plan) ? codes : 0) + wide + partial;
}

static struct mok_plan_choice ring_bytes(const struct mok_plan *plan)
{
    uint64_t balanced = (uint64_t)plan->spec.max_tokens * plan->spec.topk + (uint64_t)plan->local_experts * plan->tile_rows;

    return (struct mok_plan_choice){ 2 * balanced * ring_row_bytes(plan), "twice the rows of balanced routing" };
}

/* Two full waves of tiles over the clusters. */
static struct mok_plan_choice minibatch_rows(const struct mok_plan *plan)
{
    uint64_t narrow = mok_min_u64(2ull * plan->spec.intermediate, plan->spec.hidden);
    uint64_t rows = mok_div_up(2ull * plan->compute_units * MOK_TILE_M * MOK_TILE_N, narrow);

    return (struct mok_plan_choice){ mok_min_u64(rows, 1u << 20), "two full waves of tiles" };
}

static uint64_t context_ring_bytes(const struct mok_plan *plan)
{
    struct mok_cuda_kept kept;

    mok_cuda_kept_make(plan, &kept);
    return kept.bytes;
}

static uint64_t private_bytes(const struct mok_plan *plan)
{
    struct mok_cuda_layout layout;

    mok_cuda_layout_make(plan, &layout);
    return layout.bytes;
}

/* x and d_out, quantised by their own rank. */
static uint64_t symmetric_bytes(const struct mok_plan *plan)
{
    return is_mx(plan) ? 2 * plan->spec.max_tokens * mok_cuda_x_row_bytes(plan) : 0;
}

const struct mok_plan_backend mok_cuda_plan_backend = {
    .tile_rows = tile_rows,
    .comm_units = comm_units,
    .max_comm_units = max_comm_units,
    .compute_units = compute_units,
    .ring_bytes = ring_bytes,
    .ring_row_bytes = ring_row_bytes,
    .minibatch_rows = minibatch_rows,
    .context_ring_bytes = context_ring_bytes,
    .private_bytes = private_bytes,
    .symmetric_bytes = symmetric_bytes,
};
