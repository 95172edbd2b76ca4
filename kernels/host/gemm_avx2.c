/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The product for processors with AVX2 and FMA: tiles of 6 rows and one panel stay in 12 registers while k runs through
 * a block that keeps the panel in the first-level cache.
 */
#if defined(__x86_64__)

#include <immintrin.h>

#include "gemm.h"
#include "touch.h"

#define TARGET __attribute__((target("avx2,fma")))
#define TILE_ROWS 6u
#if defined(__clang__)
#define UNROLLED _Pragma("clang loop unroll(full)")
#else
#define UNROLLED _Pragma("GCC unroll 6")
#endif
#define BLOCK_K 256u

/* `rows` is a constant where this is inlined, so that sum[] is registers. */
TARGET static inline __attribute__((always_inline)) void tile(const unsigned rows, uint64_t count, const float *a,
                                                              uint64_t a_row, uint64_t a_column, const float *panel,
                                                              float *c, uint64_t c_stride, bool add)
{
    __m256 sum[TILE_ROWS][2];
    uint64_t k;
    unsigned i;

    UNROLLED
    for (i = 0; i < rows; i++) {
        sum[i][0] = add ? _mm256_loadu_ps(c + i * c_stride) : _mm256_setzero_ps();
        sum[i][1] = add ? _mm256_loadu_ps(c + i * c_stride + 8) : _mm256_setzero_ps();
    }
    for (k = 0; k < count; k++) {
        __m256 left = _mm256_loadu_ps(panel), right = _mm256_loadu_ps(panel + 8);

        UNROLLED
        for (i = 0; i < rows; i++) {
            __m256 value = _mm256_broadcast_ss(a + i * a_row);

            sum[i][0] = _mm256_fmadd_ps(value, left, sum[i][0]);
            sum[i][1] = _mm256_fmadd_ps(value, right, sum[i][1]);
        }
        a += a_column;
        panel += MOK_PANEL;
    }
    UNROLLED
    for (i = 0; i < rows; i++) {
        _mm256_storeu_ps(c + i * c_stride, sum[i][0]);
        _mm256_storeu_ps(c + i * c_stride + 8, sum[i][1]);
    }
}

/* One panel's block of k, for all rows. */
TARGET static void panel_block(const struct mok_gemm *gemm, uint64_t column, uint64_t from, uint64_t count, bool add)
{
    const float *panel = gemm->panel + column * gemm->k + from * MOK_PANEL, *a = gemm->a + from * gemm->a_column;
    uint64_t a_row = gemm->a_row, a_column = gemm->a_column, stride = gemm->c_stride, row;
    float *c = gemm->c + column;

    for (row = 0; row + TILE_ROWS <= gemm->rows; row += TILE_ROWS)
        tile(TILE_ROWS, count, a + row * a_row, a_row, a_column, panel, c + row * stride, stride, add);
    a += row * a_row;
    c += row * stride;
    switch (gemm->rows - row) {
    case 5:
        tile(5, count, a, a_row, a_column, panel, c, stride, add);
        return;
    case 4:
        tile(4, count, a, a_row, a_column, panel, c, stride, add);
        return;
    case 3:
        tile(3, count, a, a_row, a_column, panel, c, stride, add);
        return;
    case 2:
        tile(2, count, a, a_row, a_column, panel, c, stride, add);
        return;
    case 1:
        tile(1, count, a, a_row, a_column, panel, c, stride, add);
        return;
    default:
        return;
    }
}

/* Rows of a are contiguous, or its columns are. */
static void touch(const struct mok_gemm *gemm)
{
    bool by_row = gemm->a_column == 1;
    uint64_t lines = by_row ? gemm->rows : gemm->k, length = by_row ? gemm->k : gemm->rows, i;
    uint64_t step = by_row ? gemm->a_row : gemm->a_column;

    for (i = 0; i < lines; i++)
        MOK_READS(gemm->a + i * step, length);
    MOK_READS(gemm->panel, gemm->n * gemm->k);
    for (i = 0; i < gemm->rows; i++)
        MOK_WRITES(gemm->c + i * gemm->c_stride, gemm->n);
    (void)length;
    (void)step;
}

void mok_gemm_avx2(const struct mok_gemm *gemm)
{
    uint64_t from, column;

    touch(gemm);
    for (from = 0; from < gemm->k; from += BLOCK_K) {
        uint64_t count = gemm->k - from < BLOCK_K ? gemm->k - from : BLOCK_K;

        for (column = 0; column < gemm->n; column += MOK_PANEL)
            panel_block(gemm, column, from, count, gemm->add || from > 0);
    }
}

#else
typedef int mok_gemm_avx2_is_not_for_this_processor;
#endif
