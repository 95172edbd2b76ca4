/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Products through OpenBLAS, called single-threaded from the engine's own threads, so that results have the same bits
 * for any number of threads and any cut of the rows.
 */
#include "host.h"

#include <cblas.h>
#include <string.h>

/* Builds with AVX-512 take another path for products up to this size. */
#define SMALL_PRODUCT 1000000u

void mok_host_blas_open(struct mok_engine *engine)
{
    const char *core = openblas_get_corename();

    openblas_set_num_threads(1);
    engine->exact_rows = strcmp(core, "Haswell") != 0 && strcmp(core, "Zen") != 0;
}

/*
 * Rows a call gets. Whether a product is small is decided by its whole size: where that could depend on the rows, every
 * call gets exactly 16, so that a row always takes the same path.
 */
static uint32_t rows_a_call(const struct mok_engine *engine, uint32_t rows, uint32_t n, uint32_t k)
{
    return engine->exact_rows && (uint64_t)n * k * 16 <= SMALL_PRODUCT ? 16 : rows;
}

void mok_host_gemm_nt(const struct mok_engine *engine, uint32_t rows, uint32_t n, uint32_t k, const float *a,
                      const float *b, float beta, float *c)
{
    uint32_t step = rows_a_call(engine, rows, n, k), r;

    for (r = 0; r < rows; r += step)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)step, (blasint)n, (blasint)k, 1.0f,
                    a + (uint64_t)r * k, (blasint)k, b, (blasint)k, beta, c + (uint64_t)r * n, (blasint)n);
}

void mok_host_gemm_nn(const struct mok_engine *engine, uint32_t rows, uint32_t n, uint32_t k, const float *a,
                      const float *b, float beta, float *c)
{
    uint32_t step = rows_a_call(engine, rows, n, k), r;

    for (r = 0; r < rows; r += step)
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)step, (blasint)n, (blasint)k, 1.0f,
                    a + (uint64_t)r * k, (blasint)k, b, (blasint)n, beta, c + (uint64_t)r * n, (blasint)n);
}

void mok_host_gemm_tn_add(uint32_t m, uint32_t n, uint32_t k, const float *a, const float *b, float *c,
                          uint64_t stride)
{
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (blasint)m, (blasint)n, (blasint)k, 1.0f, a, (blasint)m, b,
                (blasint)n, 1.0f, c, (blasint)stride);
}
