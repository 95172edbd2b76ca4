/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Counts the host engine's memory; the plan's byte counts and the addresses the engine uses come from here alone.
 */
#include "layout.h"

#include "../hd.h"
#include "mx.h"
#include "../plan_backend.h"
#include "../schedule.h"

#define PART_ALIGN 256u

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

static struct mok_host_part place_part(const struct mok_plan *plan, uint64_t *at, uint64_t rows, uint64_t columns)
{
    struct mok_host_part part = { 0, 0 };

    part.data = place(at, rows * columns * (is_mx(plan) ? 1 : 2));
    if (is_mx(plan))
        part.scale = place(at, rows * mok_mx_scales(columns));
    return part;
}

static struct mok_host_kept place_kept(const struct mok_plan *plan, uint64_t *at, uint64_t rows)
{
    struct mok_host_kept kept;

    kept.x = place_part(plan, at, rows, plan->spec.hidden);
    kept.a = place(at, rows * plan->spec.intermediate * 2);
    kept.b = place(at, rows * plan->spec.intermediate * 2);
    return kept;
}

static void place_ring(const struct mok_plan *plan, uint64_t *at, uint64_t rows, struct mok_host_layout *layout)
{
    uint64_t hidden = plan->spec.hidden, intermediate = plan->spec.intermediate;
    uint64_t tiles = mok_div_up(intermediate, mok_host_tile_columns(plan, plan->spec.hidden));

    layout->kept = place_kept(plan, at, rows);
    layout->h = place_part(plan, at, rows, intermediate);
    layout->g = place_part(plan, at, rows, hidden);
    layout->d_a = place_part(plan, at, rows, intermediate);
    layout->d_b = place_part(plan, at, rows, intermediate);
    layout->y = place(at, rows * hidden * 2);
    layout->weight = place(at, rows * sizeof(float));
    layout->partial = place(at, rows * tiles * sizeof(float));
}

static void place_shared(const struct mok_plan *plan, uint64_t *at, struct mok_host_layout *layout)
{
    uint64_t width = plan->spec.shared_intermediate, tokens = plan->spec.max_tokens, rows;

    if (width == 0)
        return;
    rows = mok_min_u64(mok_round_up(tokens, MOK_HOST_TILE_ROWS), MOK_HOST_SHARED_ROWS);
    layout->shared_rows = rows;
    layout->shared_out = place(at, tokens * plan->spec.hidden * 2);
    layout->shared_a = place(at, rows * width * 2);
    layout->shared_b = place(at, rows * width * 2);
    layout->shared_h = place(at, rows * width * 2);
    layout->shared_d_a = place(at, rows * width * 2);
    layout->shared_d_b = place(at, rows * width * 2);
}

/* Where BF16 weight gradients may be cut, the sums so far stay FP32: rounded once, they do not depend on the cut. */
static void place_sums(const struct mok_plan *plan, uint64_t worst, uint64_t *at, struct mok_host_layout *layout)
{
    const struct mok_layer_spec *spec = &plan->spec;
    uint64_t bytes = 3 * (uint64_t)spec->hidden * sizeof(float);
    unsigned i;

    if (!mok_spec_bf16_gradients(spec))
        return;
    for (i = 0; i < 2 && worst > plan->minibatch_rows; i++)
        layout->sums[i] = place(at, bytes * spec->intermediate);
    if (spec->shared_intermediate && spec->max_tokens > layout->shared_rows)
        layout->shared_sums = place(at, bytes * spec->shared_intermediate);
}

void mok_host_layout_make(const struct mok_plan *plan, struct mok_host_layout *ret)
{
    struct mok_host_layout layout = { 0 };
    uint64_t experts = plan->local_experts, ep = plan->spec.ep, at = 0;
    uint64_t worst = mok_schedule_rows_at_worst(plan->max_rows, plan->local_experts, plan->tile_rows);

    layout.count = place(&at, ep * experts * sizeof(uint64_t));
    layout.start = place(&at, experts * ep * sizeof(uint64_t));
    layout.first = place(&at, (experts + 1) * sizeof(uint64_t));
    layout.expert_rows = place(&at, experts * sizeof(uint64_t));
    layout.live = place(&at, experts * sizeof(uint32_t));
    layout.row = place(&at, worst * sizeof(struct mok_row));
    place_ring(plan, &at, plan->ring_rows, &layout);
    place_shared(plan, &at, &layout);
    place_sums(plan, worst, &at, &layout);
    layout.bytes = at;
    *ret = layout;
}

uint64_t mok_host_kept_make(const struct mok_plan *plan, struct mok_host_kept *ret)
{
    uint64_t at = 0;

    *ret = place_kept(plan, &at, plan->ring_rows);
    return at;
}

/* MXFP8 tiles hold whole groups of 128, so that an epilogue sees all values of a scale. */
uint32_t mok_host_tile_columns(const struct mok_plan *plan, uint32_t depth)
{
    uint64_t fit = MOK_HOST_BLOCK_FLOATS / depth;

    if (is_mx(plan))
        return (uint32_t)mok_min_u64(mok_max_u64(mok_round_down(fit, 128), 128), 512);
    return (uint32_t)mok_min_u64(mok_max_u64(mok_round_down(fit, 16), 16), 512);
}

uint32_t mok_host_block_rows(uint32_t depth)
{
    uint64_t fit = mok_min_u64(MOK_HOST_BLOCK_FLOATS / depth, 256);

    return (uint32_t)mok_max_u64(mok_round_down(fit, MOK_HOST_ROW_STEP), MOK_HOST_ROW_STEP);
}

static struct mok_plan_choice tile_rows(const struct mok_plan *plan)
{
    (void)plan;
    return (struct mok_plan_choice){ MOK_HOST_TILE_ROWS, "rows of one step of the weight gradients' sums" };
}

static uint32_t max_comm_units(const struct mok_plan *plan)
{
    return plan->device.units > 1 ? plan->device.units - 1 : 1;
}

static struct mok_plan_choice comm_units(const struct mok_plan *plan)
{
    if (plan->device.units == 1)
        return (struct mok_plan_choice){ 1, "the only thread does both" };
    return (struct mok_plan_choice){ mok_max_u64(plan->device.units / 8, 1),
                                     "an eighth of the threads look at transfers first" };
}

static uint32_t compute_units(const struct mok_plan *plan, uint32_t comm)
{
    return plan->device.units > comm ? plan->device.units - comm : 1;
}

static uint64_t ring_row_bytes(const struct mok_plan *plan)
{
    struct mok_host_layout layout;
    uint64_t at = 0;

    /* parts are aligned: what 256 rows take is exact */
    place_ring(plan, &at, 256, &layout);
    return mok_div_up(at, 256);
}

static struct mok_plan_choice ring_bytes(const struct mok_plan *plan)
{
    uint64_t rows = 2048 * ring_row_bytes(plan), least = 64u << 20;

    if (rows > least)
        return (struct mok_plan_choice){ rows, "2,048 rows: widening a weight costs little beside its products" };
    return (struct mok_plan_choice){ least, "64 MiB" };
}

/* Two full waves of 128 x 256 output tiles over the compute units; a tile that is widened once serves many rows. */
static struct mok_plan_choice minibatch_rows(const struct mok_plan *plan)
{
    uint64_t narrow = mok_min_u64(2ull * plan->spec.intermediate, plan->spec.hidden);
    uint64_t waves = mok_div_up(2ull * plan->compute_units * 128 * 256, narrow);

    if (waves > 1024)
        return (struct mok_plan_choice){ mok_min_u64(waves, 1u << 20), "two full waves of tiles" };
    return (struct mok_plan_choice){ 1024, "two full waves of tiles, and enough rows for each widened weight" };
}

static uint64_t context_ring_bytes(const struct mok_plan *plan)
{
    struct mok_host_kept kept;

    return mok_host_kept_make(plan, &kept);
}

static uint64_t private_bytes(const struct mok_plan *plan)
{
    struct mok_host_layout layout;

    mok_host_layout_make(plan, &layout);
    return layout.bytes;
}

const struct mok_plan_backend mok_host_plan_backend = {
    .tile_rows = tile_rows,
    .comm_units = comm_units,
    .max_comm_units = max_comm_units,
    .compute_units = compute_units,
    .ring_bytes = ring_bytes,
    .ring_row_bytes = ring_row_bytes,
    .minibatch_rows = minibatch_rows,
    .context_ring_bytes = context_ring_bytes,
    .private_bytes = private_bytes,
};
