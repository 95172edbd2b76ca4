/* SPDX-License-Identifier: Apache-2.0 */
/* See dense_cuda.h. Functions and constants are those of cuBLAS 12 and 13, whose headers are not needed. */
#include "dense_cuda.h"

#include <dlfcn.h>
#include <library_types.h>
#include <stdio.h>
#include <stdlib.h>

#include "workload.h"

enum { OPERAND_AS_IT_IS = 0, SUMS_IN_FP32 = 68, ALGORITHM_OF_ITS_CHOICE = -1 };

/* Random values of one operand, repeated: what a product's power, and so its clock, depends on. */
enum { DRAWN_ROWS = 129 };

static struct {
    int (*create)(void **handle);
    int (*destroy)(void *handle);
    int (*set_stream)(void *handle, cudaStream_t stream);
    int (*multiply)(void *handle, int transpose_a, int transpose_b, int m, int n, int k, const void *alpha,
                    const void *a, cudaDataType type_a, int lda, const void *b, cudaDataType type_b, int ldb,
                    const void *beta, void *c, cudaDataType type_c, int ldc, int compute, int algorithm);
} blas;

static void *find_library(void)
{
    static const char *const places[] = { "libcublas.so.13", "libcublas.so.12", "/usr/local/cuda/lib64/libcublas.so.13",
                                          "/usr/local/cuda/lib64/libcublas.so.12" };
    const char *named = getenv("MOK_CUBLAS");
    void *library = NULL;

    if (named) {
        library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
        if (!library)
            fprintf(stderr, "mok-bench: no dense rate: MOK_CUBLAS: %s\n", dlerror());
        return library;
    }
    for (size_t i = 0; i < sizeof(places) / sizeof(places[0]) && !library; i++)
        library = dlopen(places[i], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "mok-bench: no dense rate: no libcublas.so.13 or .12 is found; MOK_CUBLAS may name one\n");
    return library;
}

bool dense_cuda_load(void)
{
    void *library = find_library();

    if (!library)
        return false;
    *(void **)(void *)&blas.create = dlsym(library, "cublasCreate_v2");
    *(void **)(void *)&blas.destroy = dlsym(library, "cublasDestroy_v2");
    *(void **)(void *)&blas.set_stream = dlsym(library, "cublasSetStream_v2");
    *(void **)(void *)&blas.multiply = dlsym(library, "cublasGemmEx");
    if (blas.create && blas.destroy && blas.set_stream && blas.multiply)
        return true;
    fprintf(stderr, "mok-bench: no dense rate: cuBLAS lacks a function: %s\n", dlerror());
    return false;
}

static int fail(const char *what, const char *why)
{
    fprintf(stderr, "mok-bench: the dense product: %s: %s\n", what, why);
    return -1;
}

static int check_blas(int status, const char *what)
{
    char why[48];

    snprintf(why, sizeof(why), "cuBLAS status %d", status);
    return status == 0 ? 0 : fail(what, why);
}

static int check_cuda(cudaError_t e, const char *what)
{
    return e == cudaSuccess ? 0 : fail(what, cudaGetErrorString(e));
}

static int fill(uint16_t *operand, enum workload_stream stream)
{
    const struct workload problem = { .seed = 1 };
    const size_t drawn = (size_t)DRAWN_ROWS * DENSE_SIZE, count = (size_t)DENSE_SIZE * DENSE_SIZE;
    uint16_t *values = malloc(drawn * sizeof(*values));
    int r = values ? 0 : fail("values", "out of memory");

    for (size_t i = 0; i < drawn && r == 0; i++)
        values[i] = workload_bf16(workload_value(&problem, stream, i));
    for (size_t done = 0; done < count && r == 0; done += drawn) {
        size_t now = count - done < drawn ? count - done : drawn;
        r = check_cuda(cudaMemcpy(operand + done, values, now * sizeof(*values), cudaMemcpyHostToDevice), "values");
    }
    free(values);
    return r;
}

int dense_cuda_open(struct dense_cuda *dense, cudaStream_t stream)
{
    const size_t bytes = sizeof(uint16_t) * DENSE_SIZE * DENSE_SIZE;
    uint16_t **matrices[] = { &dense->a, &dense->b, &dense->c };
    int r = check_blas(blas.create(&dense->handle), "starting cuBLAS");

    for (size_t i = 0; i < sizeof(matrices) / sizeof(matrices[0]) && r == 0; i++)
        r = check_cuda(cudaMalloc((void **)matrices[i], bytes), "memory");
    if (r == 0)
        r = check_blas(blas.set_stream(dense->handle, stream), "its stream");
    if (r == 0)
        r = fill(dense->a, STREAM_X);
    return r < 0 ? r : fill(dense->b, STREAM_D_OUT);
}

int dense_cuda_multiply(struct dense_cuda *dense)
{
    const float one = 1, zero = 0;

    return check_blas(blas.multiply(dense->handle, OPERAND_AS_IT_IS, OPERAND_AS_IT_IS, DENSE_SIZE, DENSE_SIZE,
                                    DENSE_SIZE, &one, dense->a, CUDA_R_16BF, DENSE_SIZE, dense->b, CUDA_R_16BF,
                                    DENSE_SIZE, &zero, dense->c, CUDA_R_16BF, DENSE_SIZE, SUMS_IN_FP32,
                                    ALGORITHM_OF_ITS_CHOICE),
                      "multiplying");
}

void dense_cuda_close(struct dense_cuda *dense)
{
    if (dense->handle)
        blas.destroy(dense->handle);
    cudaFree(dense->a);
    cudaFree(dense->b);
    cudaFree(dense->c);
    *dense = (struct dense_cuda){ 0 };
}
