/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One expert's products with their epilogues, an output tile at a time. A tile's weights are widened once and serve all
 * its rows. Knows nothing of routing, rings or other ranks.
 */
#include "host.h"

#include <string.h>

#include "ops.h"

/* What is added to the distance between rows, so that rows of a power of two do not fight for the same cache lines. */
#define SKEW 16u

static void stage_rows(float *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows)
{
    mok_host_stage(ret, matrix->columns + SKEW, matrix, row, rows, 0, matrix->columns);
}

/* out[rows][n] = or += staged rows of `depth` values times panels of n columns */
static void multiply(const struct mok_host_unit *unit, uint64_t rows, uint32_t n, uint32_t depth, const float *staged,
                     const float *panel, float *out, bool add)
{
    unit->engine->gemm(&(struct mok_gemm){ rows, n, depth, staged, depth + SKEW, 1, panel, out, n, add });
}

/* Rows of one block of `rows`, of which a unit's memory holds `most`: blocks of about one size, whole tiles each. */
static uint64_t block_of(uint64_t rows, uint32_t most)
{
    return mok_min_u64(mok_round_up(mok_div_up(rows, mok_div_up(rows, most)), MOK_HOST_ROW_STEP), most);
}

static uint32_t tile_at(const struct mok_plan *plan, uint32_t depth, uint32_t width, uint32_t tile, uint32_t *ret_count)
{
    uint32_t step = mok_host_tile_columns(plan, depth), from = tile * step;

    *ret_count = (uint32_t)mok_min_u64(step, width - from);
    return from;
}

uint32_t mok_host_hidden_tiles(const struct mok_host_ffn *ffn)
{
    return (uint32_t)mok_div_up(ffn->intermediate, mok_host_tile_columns(ffn->plan, ffn->hidden));
}

uint32_t mok_host_output_tiles(const struct mok_host_ffn *ffn)
{
    return (uint32_t)mok_div_up(ffn->hidden, mok_host_tile_columns(ffn->plan, ffn->intermediate));
}

uint32_t mok_host_wgrad_tiles(const struct mok_host_ffn *ffn)
{
    return (uint32_t)(mok_div_up(ffn->intermediate, MOK_HOST_WGRAD_ROWS) +
                      mok_div_up(ffn->hidden, MOK_HOST_WGRAD_ROWS));
}

/* Floats of the largest block that any of the functions below puts into a unit's memory. */
uint64_t mok_host_block_floats(const struct mok_plan *plan)
{
    uint32_t depth[3] = { plan->spec.hidden, plan->spec.intermediate, plan->spec.shared_intermediate };
    uint64_t floats = mok_max_u64(MOK_HOST_BLOCK_FLOATS, MOK_HOST_CHUNK_ROWS * MOK_HOST_WGRAD_COLUMNS);
    unsigned i;

    for (i = 0; i < 3; i++) {
        if (depth[i] == 0)
            continue;
        floats = mok_max_u64(floats, (uint64_t)mok_host_tile_columns(plan, depth[i]) * depth[i]);
        floats = mok_max_u64(floats, (uint64_t)mok_host_block_rows(depth[i]) * (depth[i] + SKEW));
    }
    return floats;
}

/* a = x gate^T, b = x up^T, h = SwiGLU. */
void mok_host_gate_up(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                      uint32_t tile, bool store_h)
{
    uint32_t depth = ffn->hidden, n;
    uint32_t from = tile_at(ffn->plan, depth, ffn->intermediate, tile, &n);
    uint64_t block = block_of(rows, mok_host_block_rows(depth)), done, i;

    mok_host_stage_transposed(unit->weight[0], &ffn->gate, from, n);
    mok_host_stage_transposed(unit->weight[1], &ffn->up, from, n);
    for (done = 0; done < rows; done += block) {
        uint64_t count = mok_min_u64(block, rows - done);

        stage_rows(unit->rows[0], &ffn->x, row + done, count);
        multiply(unit, count, n, depth, unit->rows[0], unit->weight[0], unit->out[0], false);
        multiply(unit, count, n, depth, unit->rows[0], unit->weight[1], unit->out[1], false);
        for (i = 0; i < count; i++) {
            uint64_t at = (row + done + i) * ffn->intermediate + from;
            float *h = unit->out[0] + i * n;

            mok_ops_swiglu(h, unit->out[1] + i * n, ffn->clamp, ffn->a + at, ffn->b + at, h, n);
            if (store_h)
                mok_host_store(&ffn->h, ffn->group, row + done + i, from, n, h);
        }
    }
}

static void store_y(const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows, uint32_t from, uint32_t n,
                    const float *value)
{
    uint64_t i;

    for (i = 0; i < rows; i++)
        mok_ops_narrow(ffn->y + (row + i) * ffn->hidden + from, value + i * n, n);
}

/* y = h down^T. */
void mok_host_down(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                   uint32_t tile)
{
    struct mok_host_matrix h = mok_host_matrix_of(ffn->h);
    uint32_t depth = ffn->intermediate, n;
    uint32_t from = tile_at(ffn->plan, depth, ffn->hidden, tile, &n);
    uint64_t block = block_of(rows, mok_host_block_rows(depth)), done;

    mok_host_stage_transposed(unit->weight[0], &ffn->down, from, n);
    for (done = 0; done < rows; done += block) {
        uint64_t count = mok_min_u64(block, rows - done);

        stage_rows(unit->rows[0], &h, row + done, count);
        multiply(unit, count, n, depth, unit->rows[0], unit->weight[0], unit->out[0], false);
        store_y(ffn, row + done, count, from, n, unit->out[0]);
    }
}

/*
 * One row's epilogue of u = d_out down: h again, d_a and d_b, and this tile's part of <u, h>. MXFP8 weight gradients
 * take the weighted h, which is quantised once, from the h that was not.
 */
static void d_hidden_row(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint32_t from,
                         uint32_t n, uint32_t tile, const float *u)
{
    struct mok_host_matrix h_matrix = mok_host_matrix_of(ffn->h);
    float *h = unit->rows[1], *d_a = h + n, *d_b = d_a + n, *rounded = d_b + n;
    float weight = ffn->weight ? ffn->weight[row] : 1.0f;
    uint64_t at = row * ffn->intermediate + from;

    mok_ops_swiglu_backward(u, ffn->a + at, ffn->b + at, ffn->clamp, weight, h, d_a, d_b, n);
    mok_host_store(&ffn->h, ffn->group, row, from, n, h);
    mok_host_store(&ffn->d_a, ffn->group, row, from, n, d_a);
    mok_host_store(&ffn->d_b, ffn->group, row, from, n, d_b);
    if (ffn->partial) {
        /* h as forward used it */
        mok_host_stage(rounded, n, &h_matrix, row, 1, from, n);
        ffn->partial[row * mok_host_hidden_tiles(ffn) + tile] = mok_ops_dot(u, rounded, n);
    }
    if (ffn->wgrad_tile) {
        mok_ops_scale(h, h, weight, n);
        mok_host_store(&ffn->h, ffn->group, row, from, n, h);
    }
}

void mok_host_d_hidden(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                       uint32_t tile)
{
    uint32_t depth = ffn->hidden, n;
    uint32_t from = tile_at(ffn->plan, depth, ffn->intermediate, tile, &n);
    uint64_t block = block_of(rows, mok_host_block_rows(depth)), done, i;

    mok_host_stage_panels(unit->weight[0], &ffn->down, 0, depth, from, n);
    for (done = 0; done < rows; done += block) {
        uint64_t count = mok_min_u64(block, rows - done);

        stage_rows(unit->rows[0], &ffn->g, row + done, count);
        multiply(unit, count, n, depth, unit->rows[0], unit->weight[0], unit->out[0], false);
        for (i = 0; i < count; i++)
            d_hidden_row(unit, ffn, row + done + i, from, n, tile, unit->out[0] + i * n);
    }
}

/* d_x = d_a gate + d_b up. */
void mok_host_d_input(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                      uint32_t tile)
{
    struct mok_host_matrix d_a = mok_host_matrix_of(ffn->d_a), d_b = mok_host_matrix_of(ffn->d_b);
    uint32_t depth = ffn->intermediate, n;
    uint32_t from = tile_at(ffn->plan, depth, ffn->hidden, tile, &n);
    uint64_t block = block_of(rows, mok_host_block_rows(depth)), done;

    mok_host_stage_panels(unit->weight[0], &ffn->gate, 0, depth, from, n);
    mok_host_stage_panels(unit->weight[1], &ffn->up, 0, depth, from, n);
    for (done = 0; done < rows; done += block) {
        uint64_t count = mok_min_u64(block, rows - done);

        stage_rows(unit->rows[0], &d_a, row + done, count);
        stage_rows(unit->rows[1], &d_b, row + done, count);
        multiply(unit, count, n, depth, unit->rows[0], unit->weight[0], unit->out[0], false);
        multiply(unit, count, n, depth, unit->rows[1], unit->weight[1], unit->out[0], true);
        store_y(ffn, row + done, count, from, n, unit->out[0]);
    }
}

/* Rows as an operand of a weight gradient. */
static struct mok_host_matrix wgrad_operand(const struct mok_host_ffn *ffn, struct mok_host_matrix rows)
{
    rows.tile = ffn->wgrad_tile;
    return rows;
}

/* c[m][n] += staged[rows][m]^T panels of rows */
static void multiply_add(const struct mok_host_unit *unit, uint32_t m, uint32_t n, uint32_t rows, const float *staged,
                         float *c, uint64_t stride)
{
    unit->engine->gemm(
        &(struct mok_gemm){ m, n, rows, staged, 1, MOK_HOST_WGRAD_ROWS + SKEW, unit->weight[0], c, stride, true });
}

/* A block of a weight gradient: m rows of n columns of [..][columns], and where its sums are made. */
struct gradient_block {
    void *gradient;
    uint32_t matrix; /* of sums' three */
    uint64_t at, columns;
    uint32_t m, n;
    float *c;
    uint64_t stride;
};

static float *cut_at(const struct mok_host_ffn *ffn, float *sums, const struct gradient_block *block)
{
    return sums + block->matrix * (uint64_t)ffn->hidden * ffn->intermediate + block->at;
}

/* FP32 gradients are added to where they lie; sums of BF16 ones are made in `memory`. */
static void open_block(const struct mok_host_ffn *ffn, float *memory, struct gradient_block *block)
{
    uint32_t i;

    block->c = ffn->narrow ? memory : (float *)block->gradient + block->at;
    block->stride = ffn->narrow ? block->n : block->columns;
    for (i = 0; i < block->m && ffn->narrow; i++) {
        uint64_t skip = i * block->columns;
        float *row = memory + (uint64_t)i * block->n;

        if (ffn->sums.from)
            memcpy(row, cut_at(ffn, ffn->sums.from, block) + skip, block->n * sizeof(float));
        else
            mok_ops_widen(row, (const uint16_t *)block->gradient + block->at + skip, block->n);
    }
}

static void close_block(const struct mok_host_ffn *ffn, const struct gradient_block *block)
{
    uint32_t i;

    for (i = 0; i < block->m && ffn->narrow; i++) {
        uint64_t skip = i * block->columns;
        const float *row = block->c + (uint64_t)i * block->n;

        if (ffn->sums.to)
            memcpy(cut_at(ffn, ffn->sums.to, block) + skip, row, block->n * sizeof(float));
        else
            mok_ops_narrow((uint16_t *)block->gradient + block->at + skip, row, block->n);
    }
}

/* Rows [from, from + m), columns [column, column + n) of d_gate += d_a^T x and d_up += d_b^T x. */
static void wgrad_gate_up(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                          uint32_t from, uint32_t m, uint32_t column, uint32_t n)
{
    struct mok_host_matrix x = wgrad_operand(ffn, ffn->x);
    struct mok_host_matrix d_a = wgrad_operand(ffn, mok_host_matrix_of(ffn->d_a));
    struct mok_host_matrix d_b = wgrad_operand(ffn, mok_host_matrix_of(ffn->d_b));
    uint64_t at = (uint64_t)from * ffn->hidden + column, stride = MOK_HOST_WGRAD_ROWS + SKEW, done;
    struct gradient_block gate = { ffn->d_gate, 0, at, ffn->hidden, m, n, NULL, 0 };
    struct gradient_block up = { ffn->d_up, 1, at, ffn->hidden, m, n, NULL, 0 };

    open_block(ffn, unit->out[0], &gate);
    open_block(ffn, unit->out[1], &up);
    for (done = 0; done < rows; done += MOK_HOST_CHUNK_ROWS) {
        uint32_t count = (uint32_t)mok_min_u64(MOK_HOST_CHUNK_ROWS, rows - done);

        mok_host_stage(unit->rows[0], stride, &d_a, row + done, count, from, m);
        mok_host_stage(unit->rows[1], stride, &d_b, row + done, count, from, m);
        mok_host_stage_panels(unit->weight[0], &x, row + done, count, column, n);
        multiply_add(unit, m, n, count, unit->rows[0], gate.c, gate.stride);
        multiply_add(unit, m, n, count, unit->rows[1], up.c, up.stride);
    }
    close_block(ffn, &gate);
    close_block(ffn, &up);
}

/* Rows [from, from + m), columns [column, column + n) of d_down += (weight * d_out)^T h. */
static void wgrad_down(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                       uint32_t from, uint32_t m, uint32_t column, uint32_t n)
{
    struct mok_host_matrix g = wgrad_operand(ffn, ffn->g), h = wgrad_operand(ffn, mok_host_matrix_of(ffn->h));
    bool weighted = ffn->wgrad_tile != 0; /* h is */
    uint64_t at = (uint64_t)from * ffn->intermediate + column, stride = MOK_HOST_WGRAD_ROWS + SKEW, done;
    struct gradient_block down = { ffn->d_down, 2, at, ffn->intermediate, m, n, NULL, 0 };
    uint32_t r;

    open_block(ffn, unit->out[0], &down);
    for (done = 0; done < rows; done += MOK_HOST_CHUNK_ROWS) {
        uint32_t count = (uint32_t)mok_min_u64(MOK_HOST_CHUNK_ROWS, rows - done);

        mok_host_stage(unit->rows[0], stride, &g, row + done, count, from, m);
        if (ffn->weight && !weighted)
            for (r = 0; r < count; r++)
                mok_ops_scale(unit->rows[0] + r * stride, unit->rows[0] + r * stride, ffn->weight[row + done + r], m);
        mok_host_stage_panels(unit->weight[0], &h, row + done, count, column, n);
        multiply_add(unit, m, n, count, unit->rows[0], down.c, down.stride);
    }
    close_block(ffn, &down);
}

/*
 * Rows are added one after the other to the FP32 value so far, in the expert's canonical order: no cut into chunks,
 * minibatches or macrobatches changes a bit. A tile of MXFP8 weight gradients is whole in each: all of them begin at
 * multiples of MOK_HOST_TILE_ROWS, as an expert's first row does. BF16 gradients are read before the expert's first row
 * and rounded behind its last.
 */
void mok_host_wgrad(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                    uint32_t tile)
{
    uint32_t gate_tiles = (uint32_t)mok_div_up(ffn->intermediate, MOK_HOST_WGRAD_ROWS);
    bool is_down = tile >= gate_tiles;
    uint32_t from = (is_down ? tile - gate_tiles : tile) * MOK_HOST_WGRAD_ROWS;
    uint32_t height = is_down ? ffn->hidden : ffn->intermediate, width = is_down ? ffn->intermediate : ffn->hidden;
    uint32_t m = (uint32_t)mok_min_u64(MOK_HOST_WGRAD_ROWS, height - from), column;
    uint32_t step = ffn->narrow ? MOK_HOST_NARROW_COLUMNS : MOK_HOST_WGRAD_COLUMNS;

    for (column = 0; column < width; column += step) {
        uint32_t n = (uint32_t)mok_min_u64(step, width - column);

        if (is_down)
            wgrad_down(unit, ffn, row, rows, from, m, column, n);
        else
            wgrad_gate_up(unit, ffn, row, rows, from, m, column, n);
    }
}
