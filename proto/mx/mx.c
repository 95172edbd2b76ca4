/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole matrices to MXFP8 and back, on the CPU: for weights, tests and tools. Activations are quantised elsewhere,
 * inside dispatch and the epilogues, with the same functions of mx.h.
 */
#include "mx.h"

#include "bf16.h"
#include "mok/types.h"

#define LARGEST_GROUP 128u

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* What is stored: [rows][columns], with the distances between neighbours in the source. */
struct form {
    uint64_t rows, columns, row_step, column_step;
};

static struct form form_of(const struct mok_mx_matrix *matrix)
{
    if (matrix->transpose)
        return (struct form){ matrix->columns, matrix->rows, 1, matrix->columns };
    return (struct form){ matrix->rows, matrix->columns, matrix->columns, 1 };
}

static void load(const struct mok_mx_matrix *matrix, uint64_t at, uint64_t step, uint64_t count, float *ret)
{
    const uint16_t *narrow = matrix->value;
    const float *wide = matrix->value;
    uint64_t i;

    if (matrix->f32 && step == 1)
        for (i = 0; i < count; i++)
            ret[i] = wide[at + i];
    else if (matrix->f32)
        for (i = 0; i < count; i++)
            ret[i] = wide[at + i * step];
    else if (step == 1)
        for (i = 0; i < count; i++)
            ret[i] = mok_bf16_to_f32(narrow[at + i]);
    else
        for (i = 0; i < count; i++)
            ret[i] = mok_bf16_to_f32(narrow[at + i * step]);
}

/* `rows` rows from `row` on, `width` <= LARGEST_GROUP columns from `column` on, all under one scale. */
static void quantize_tile(const struct mok_mx_matrix *matrix, const struct form *form, uint64_t row, uint64_t rows,
                          uint64_t column, uint64_t width, uint8_t *ret_code, uint8_t *ret_scale)
{
    uint64_t scales = mok_mx_scales(form->columns), from = column * form->column_step, i, r;
    float line[LARGEST_GROUP], amax = 0, inverse;
    uint8_t scale;

    for (r = row; r < row + rows; r++) {
        float largest;

        load(matrix, r * form->row_step + from, form->column_step, width, line);
        largest = mok_mx_amax(line, width);
        amax = largest > amax ? largest : amax;
    }
    scale = mok_mx_scale(amax);
    inverse = mok_e8m0_inverse(scale);
    for (r = row; r < row + rows; r++) {
        if (rows > 1) /* else it is there from above */
            load(matrix, r * form->row_step + from, form->column_step, width, line);
        for (i = 0; i < width; i++)
            ret_code[r * form->columns + column + i] = mok_e4m3_encode(line[i] * inverse);
        for (i = column / MOK_MX_BLOCK; i * MOK_MX_BLOCK < column + width; i++)
            ret_scale[r * scales + i] = scale;
    }
}

int mok_mx_quantize_matrix(const struct mok_mx_matrix *matrix, uint32_t group, uint32_t tile_rows, uint8_t *ret_code,
                           uint8_t *ret_scale)
{
    struct form form = form_of(matrix);
    uint64_t row, column;

    if (group != MOK_MX_BLOCK && group != LARGEST_GROUP)
        return -MOK_ERANGE;
    if (tile_rows != 1 && (tile_rows != LARGEST_GROUP || group != LARGEST_GROUP))
        return -MOK_ERANGE;
    for (row = 0; row < form.rows; row += tile_rows)
        for (column = 0; column < form.columns; column += group)
            quantize_tile(matrix, &form, row, least(tile_rows, form.rows - row), column,
                          least(group, form.columns - column), ret_code, ret_scale);
    return 0;
}

void mok_mx_dequantize(const uint8_t *code, const uint8_t *scale, uint64_t rows, uint64_t columns, float *ret)
{
    uint64_t r;

    for (r = 0; r < rows; r++)
        mok_mx_dequantize_row(code + r * columns, scale + r * mok_mx_scales(columns), columns, ret + r * columns);
}
