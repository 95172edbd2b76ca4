/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of operands on their way in (widened to FP32, exactly) and out (rounded to BF16 or quantised to MXFP8).
 */
#include "host.h"

#include "mx.h"
#include "ops.h"

void mok_host_stage(float *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows, uint64_t column,
                    uint64_t columns)
{
    uint64_t r;

    for (r = row; r < row + rows; r++, ret += columns) {
        uint64_t at = r * matrix->columns + column;

        if (matrix->scale)
            mok_ops_dequantize(ret, matrix->data + at,
                               matrix->scale + r * mok_mx_scales(matrix->columns) + column / MOK_MX_BLOCK, columns);
        else
            mok_ops_widen(ret, (const uint16_t *)(const void *)matrix->data + at, columns);
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
