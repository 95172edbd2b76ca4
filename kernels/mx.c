/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole matrices to MXFP8 and back, on the CPU: for weights, tests and tools. Activations are quantised elsewhere,
 * inside dispatch and the epilogues, with the same functions of mx.h.
 */
#include "mx.h"

#include "layer.h"

/* `rows` rows from `row` on, 128 columns at most from `column` on, all under one scale. */
static void quantize_tile(const uint16_t *value, uint64_t columns, uint64_t row, uint64_t rows, uint64_t column,
                          uint64_t width, uint8_t *ret_code, uint8_t *ret_scale)
{
    uint64_t scales = mok_mx_scales(columns), i, r;
    float line[128], amax = 0, inverse;
    uint8_t scale;

    for (r = row; r < row + rows; r++) {
        float largest;

        for (i = 0; i < width; i++)
            line[i] = mok_bf16_to_f32(value[r * columns + column + i]);
        largest = mok_mx_amax(line, width);
        amax = largest > amax ? largest : amax;
    }
    scale = mok_mx_scale(amax);
    inverse = mok_e8m0_inverse(scale);
    for (r = row; r < row + rows; r++) {
        for (i = 0; i < width; i++)
            ret_code[r * columns + column + i] =
                mok_e4m3_encode(mok_bf16_to_f32(value[r * columns + column + i]) * inverse);
        for (i = column / MOK_MX_BLOCK; i * MOK_MX_BLOCK < column + width; i++)
            ret_scale[r * scales + i] = scale;
    }
}

int mok_mx_quantize(const uint16_t *value, uint64_t rows, uint64_t columns, uint32_t group, uint32_t tile_rows,
                    uint8_t *ret_code, uint8_t *ret_scale)
{
    uint64_t row, column;

    if (group != 32 && group != 128)
        return -MOK_ERANGE;
    if (tile_rows != 1 && (tile_rows != 128 || group != 128))
        return -MOK_ERANGE;
    for (row = 0; row < rows; row += tile_rows)
        for (column = 0; column < columns; column += group)
            quantize_tile(value, columns, row, mok_min_u64(tile_rows, rows - row), column,
                          mok_min_u64(group, columns - column), ret_code, ret_scale);
    return 0;
}

int mok_mx_quantize_transposed(const uint16_t *value, uint64_t rows, uint64_t columns, uint32_t group,
                               uint8_t *ret_code, uint8_t *ret_scale)
{
    uint64_t scales = mok_mx_scales(rows), column, row, i;
    float line[128];

    if (group != 32 && group != 128)
        return -MOK_ERANGE;
    for (column = 0; column < columns; column++)
        for (row = 0; row < rows; row += group) {
            uint64_t count = mok_min_u64(group, rows - row);

            for (i = 0; i < count; i++)
                line[i] = mok_bf16_to_f32(value[(row + i) * columns + column]);
            mok_mx_quantize_row(line, count, group, ret_code + column * rows + row,
                                ret_scale + column * scales + row / MOK_MX_BLOCK);
        }
    return 0;
}

void mok_mx_dequantize(const uint8_t *code, const uint8_t *scale, uint64_t rows, uint64_t columns, float *ret)
{
    uint64_t r;

    for (r = 0; r < rows; r++)
        mok_mx_dequantize_row(code + r * columns, scale + r * mok_mx_scales(columns), columns, ret + r * columns);
}
