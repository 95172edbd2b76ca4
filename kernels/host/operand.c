/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of operands on their way in (widened to FP32, exactly) and out (rounded to BF16 or quantised to MXFP8), and the
 * panels that a product reads its right operand from (gemm.h).
 */
#include "host.h"

#include <string.h>

#include "mx.h"
#include "ops.h"

#define CHUNK 512u /* a multiple of the values that share a scale */

static const uint16_t *bf16_at(const struct mok_host_matrix *matrix, uint64_t row, uint64_t column)
{
    return (const uint16_t *)(const void *)matrix->data + row * matrix->columns + column;
}

/* Part of one row. */
static void load(float *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t column, uint64_t columns)
{
    if (matrix->scale)
        mok_ops_dequantize(ret, matrix->data + row * matrix->columns + column,
                           matrix->scale + row * mok_mx_scales(matrix->columns) + column / MOK_MX_BLOCK, columns);
    else
        mok_ops_widen(ret, bf16_at(matrix, row, column), columns);
}

/*
 * Scales of the tiles that `rows` rows lie in, one for 32 columns each: the largest of their rows'. NaN keeps to its
 * rows.
 */
static void find_tile_scales(uint8_t *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows,
                             uint64_t column, uint64_t columns)
{
    uint64_t blocks = mok_mx_scales(columns), stride = mok_mx_scales(matrix->columns), r, b, i;
    uint64_t together = matrix->tile / MOK_MX_BLOCK;
    const uint8_t *scale = matrix->scale + row * stride + column / MOK_MX_BLOCK;

    memset(ret, 0, blocks);
    for (r = 0; r < rows; r++, scale += stride)
        for (b = 0; b < blocks; b++)
            if (scale[b] > ret[b] && scale[b] != MOK_E8M0_NAN)
                ret[b] = scale[b];
    for (b = 0; b < blocks; b += together) {
        uint64_t end = mok_min_u64(b + together, blocks);
        uint8_t largest = ret[b];

        for (i = b; i < end; i++)
            largest = ret[i] > largest ? ret[i] : largest;
        memset(ret + b, largest, end - b);
    }
}

/* Where the row begins tiles, finds their scales. */
static void enter_row(uint8_t *scale, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows, uint64_t r,
                      uint64_t column, uint64_t columns)
{
    if (matrix->tile && r % matrix->tile == 0)
        find_tile_scales(scale, matrix, row + r, mok_min_u64(matrix->tile, rows - r), column, columns);
}

void mok_host_stage(float *ret, uint64_t stride, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows,
                    uint64_t column, uint64_t columns)
{
    uint8_t scale[MOK_HOST_WGRAD_COLUMNS / MOK_MX_BLOCK];
    uint64_t r;

    for (r = 0; r < rows; r++) {
        enter_row(scale, matrix, row, rows, r, column, columns);
        load(ret + r * stride, matrix, row + r, column, columns);
        if (matrix->tile)
            mok_ops_reround(ret + r * stride, scale, columns);
    }
}

void mok_host_stage_panels(float *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows,
                           uint64_t column, uint64_t columns)
{
    uint8_t scale[MOK_HOST_WGRAD_COLUMNS / MOK_MX_BLOCK];
    uint64_t stride = rows * MOK_PANEL, r, at;
    float chunk[CHUNK];

    for (r = 0; r < rows; r++) {
        float *to = ret + r * MOK_PANEL;

        if (!matrix->scale) {
            mok_ops_widen_panels(to, stride, bf16_at(matrix, row + r, column), columns);
            continue;
        }
        enter_row(scale, matrix, row, rows, r, column, columns);
        for (at = 0; at < columns; at += CHUNK) {
            uint64_t count = mok_min_u64(CHUNK, columns - at);

            load(chunk, matrix, row + r, column + at, count);
            if (matrix->tile)
                mok_ops_reround(chunk, scale + at / MOK_MX_BLOCK, count);
            mok_ops_copy_panels(to + at / MOK_PANEL * stride, stride, chunk, count);
        }
    }
}

void mok_host_stage_transposed(float *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows)
{
    /* rows that are not a power of two apart do not fight for the same cache lines */
    float chunk[MOK_PANEL][CHUNK + 16];
    uint64_t r, at, i;

    for (r = 0; r < rows; r += MOK_PANEL)
        for (at = 0; at < matrix->columns; at += CHUNK) {
            uint64_t count = mok_min_u64(CHUNK, matrix->columns - at);

            for (i = 0; i < MOK_PANEL; i++)
                load(chunk[i], matrix, row + r + i, at, count);
            mok_ops_transpose16(ret + r * matrix->columns + at * MOK_PANEL, chunk[0], CHUNK + 16, count);
        }
}

void mok_host_store(const struct mok_host_rows *rows, uint32_t group, uint64_t row, uint64_t column, uint64_t count,
                    const float *value)
{
    uint64_t at = row * rows->columns + column;

    if (rows->scale)
        mok_ops_quantize(value, count, group, rows->data + at,
                         rows->scale + row * mok_mx_scales(rows->columns) + column / MOK_MX_BLOCK);
    else
        mok_ops_narrow((uint16_t *)(void *)rows->data + at, value, count);
}
