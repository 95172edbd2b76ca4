/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products of FP32 matrices whose bits depend on nothing but the operands: every output element is one chain of fused
 * multiply-adds over k ascending, that starts from 0 or from what is stored. So neither the rows that share a call, nor
 * where a sum over k was cut, nor the vector width of the processor shows in a result. (Library products do not promise
 * that: theirs depend on a row's place among the others.)
 */
#ifndef MOK_KERNELS_HOST_GEMM_H
#define MOK_KERNELS_HOST_GEMM_H

#include <stdbool.h>
#include <stdint.h>

/* The right operand is stored in panels of so many columns: [n / 16][k][16]. n is a multiple of 16. */
#define MOK_PANEL 16u

/* c[m][n] (rows c_stride apart) = or += sum over k of a(m, k) * panel(k, n); a(m, k) is a[m * a_row + k * a_column]. */
struct mok_gemm {
    uint64_t rows, n, k;
    const float *a;
    uint64_t a_row, a_column;
    const float *panel;
    float *c;
    uint64_t c_stride;
    bool add;
};

typedef void mok_gemm_run(const struct mok_gemm *gemm);

/* The fastest for this processor; all give the same bits. */
mok_gemm_run *mok_gemm_choose(void);
void mok_gemm_plain(const struct mok_gemm *gemm);
#if defined(__x86_64__)
void mok_gemm_avx2(const struct mok_gemm *gemm);
#endif

#endif
