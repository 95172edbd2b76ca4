/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dense rate that shares are of: one BF16 product of 8192^3 by cuBLAS, which is loaded at run time, so that neither
 * building nor running a benchmark needs it.
 */
#ifndef MOK_BENCH_DENSE_CUDA_H
#define MOK_BENCH_DENSE_CUDA_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stdint.h>

enum { DENSE_SIZE = 8192 };
#define DENSE_GFLOP (2e-9 * DENSE_SIZE * DENSE_SIZE * DENSE_SIZE)

/* What one GPU multiplies; all zero: nothing. */
struct dense_cuda {
    void *handle;
    uint16_t *a, *b, *c;
};

/* Before the first product, in one thread. False where there is no cuBLAS, after saying so in one line. */
bool dense_cuda_load(void);

/* On the current GPU; 0, or -1 after saying why. close() takes what open() left, whole or not. */
int dense_cuda_open(struct dense_cuda *dense, cudaStream_t stream);
int dense_cuda_multiply(struct dense_cuda *dense); /* puts one product on the stream */
void dense_cuda_close(struct dense_cuda *dense);

#endif
