/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The product in plain C, and the choice among its implementations. See gemm.h for what all of them promise.
 */
#include "gemm.h"

#include <math.h>

static void plain_tile(const struct mok_gemm *gemm, uint64_t row, uint64_t column)
{
    const float *panel = gemm->panel + column * gemm->k, *a = gemm->a + row * gemm->a_row;
    float *c = gemm->c + row * gemm->c_stride + column, sum[MOK_PANEL];
    uint64_t k;
    unsigned j;

    for (j = 0; j < MOK_PANEL; j++)
        sum[j] = gemm->add ? c[j] : 0.0f;
    for (k = 0; k < gemm->k; k++)
        for (j = 0; j < MOK_PANEL; j++)
            sum[j] = fmaf(a[k * gemm->a_column], panel[k * MOK_PANEL + j], sum[j]);
    for (j = 0; j < MOK_PANEL; j++)
        c[j] = sum[j];
}

void mok_gemm_plain(const struct mok_gemm *gemm)
{
    uint64_t row, column;

    for (column = 0; column < gemm->n; column += MOK_PANEL)
        for (row = 0; row < gemm->rows; row++)
            plain_tile(gemm, row, column);
}

mok_gemm_run *mok_gemm_choose(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return mok_gemm_avx2;
#endif
    return mok_gemm_plain;
}
