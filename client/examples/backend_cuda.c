/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model's arithmetic queued on one CUDA stream of this process, whose GPU is that of the rank's device in mokd.
 * Never waits for the GPU but in put, get and phases. The first call that fails is what they tell.
 */
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "backend.h"
#include "kernels.h"
#include "report.h"

/* Of the last two steps: while one is queued, the one before may still be running. */
#define KEPT 2u

struct marks {
    cudaEvent_t *events;
    enum phase *phases;
    size_t count, capacity;
};

/* A rank is a process, and a process has one stream. */
static cudaStream_t stream;
static cudaError_t failure;
static int marking;
static struct marks marks[KEPT];
static unsigned current, steps; /* of marks; read out since the last call */
static double spent[PHASES];

static void check(int code)
{
    if (failure == cudaSuccess)
        failure = (cudaError_t)code;
}

static int told(void)
{
    if (failure == cudaSuccess)
        return 0;
    return fail(failure == cudaErrorMemoryAllocation ? -MOK_ENOMEM : -MOK_EDEVICE, "CUDA: %s",
                cudaGetErrorString(failure));
}

static int cuda_open(const void *memory, int report)
{
    struct cudaPointerAttributes attributes = { 0 };

    check(cudaPointerGetAttributes(&attributes, memory));
    check(cudaSetDevice(attributes.device));
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    marking = report;
    return told();
}

static void cuda_close(void)
{
    if (!stream)
        return;
    cudaStreamSynchronize(stream);
    for (unsigned i = 0; i < KEPT; i++) {
        for (size_t e = 0; e < marks[i].capacity; e++)
            cudaEventDestroy(marks[i].events[e]);
        free(marks[i].events);
        free(marks[i].phases);
        marks[i] = (struct marks){ 0 };
    }
    cudaStreamDestroy(stream);
    stream = NULL;
}

static void *cuda_stream(void)
{
    return stream;
}

/* ------------------------------------------------------------------ memory */

static int cuda_allocate(size_t bytes, void **ret)
{
    void *memory = NULL;

    check(cudaMalloc(&memory, bytes));
    if (failure == cudaSuccess)
        check(cudaMemsetAsync(memory, 0, bytes, stream));
    if (told() < 0) {
        cudaFree(memory);
        return fail(-MOK_ENOMEM, "no memory for %zu bytes on the GPU", bytes);
    }
    *ret = memory;
    return 0;
}

static void cuda_release(void *memory)
{
    cudaFree(memory);
}

static int transfer(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    check(cudaMemcpyAsync(to, from, bytes, kind, stream));
    check(cudaStreamSynchronize(stream));
    return told();
}

static int cuda_put(void *to, const void *host, size_t bytes)
{
    return transfer(to, host, bytes, cudaMemcpyHostToDevice);
}

static int cuda_get(void *host, const void *from, size_t bytes)
{
    return transfer(host, from, bytes, cudaMemcpyDeviceToHost);
}

static void cuda_zero(void *to, size_t bytes)
{
    check(cudaMemsetAsync(to, 0, bytes, stream));
}

static void cuda_copy(void *to, const void *from, size_t bytes)
{
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
}

/* ------------------------------------------------------------------ arithmetic */

static void cuda_initialise(float *to, size_t count, float constant, float deviation, uint64_t seed, uint64_t numbers)
{
    check(kernel_initialise(stream, to, count, constant, deviation, seed, numbers));
}

static void cuda_to_bf16(size_t count, const float *from, uint16_t *to)
{
    check(kernel_to_bf16(stream, count, from, to));
}

static int cuda_to_mxfp8(const mok_mxfp8_options *options, const float *from, uint8_t *data, uint8_t *scales,
                         uint8_t *transposed, uint8_t *transposed_scales)
{
    return mok_mxfp8_quantize_on_stream(options, from, data, scales, transposed, transposed_scales, (mok_stream)stream);
}

static void cuda_add_bf16(size_t count, const uint16_t *from, float *to)
{
    check(kernel_add_bf16(stream, count, from, to));
}

static void cuda_gemm_nt(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c)
{
    check(kernel_gemm(stream, GEMM_NT, m, n, k, a, b, beta, c));
}

static void cuda_gemm_nn(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c)
{
    check(kernel_gemm(stream, GEMM_NN, m, n, k, a, b, beta, c));
}

static void cuda_gemm_tn(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c)
{
    check(kernel_gemm(stream, GEMM_TN, m, n, k, a, b, beta, c));
}

static void cuda_spread(size_t rows, size_t columns, const float *row, float *to)
{
    check(kernel_spread(stream, rows, columns, row, to));
}

static void cuda_add_rows(size_t rows, size_t columns, const float *from, float *row)
{
    check(kernel_add_rows(stream, rows, columns, from, row));
}

static void cuda_embed(const struct batch *batch, size_t tokens, size_t hidden, const float *table, uint32_t *place,
                       float *h)
{
    check(kernel_embed(stream, batch, tokens, hidden, table, place, h));
}

static void cuda_embed_backward(const struct batch *batch, size_t tokens, size_t hidden, const uint32_t *place,
                                const float *d_h, float *d_table)
{
    check(kernel_embed_backward(stream, batch, tokens, hidden, place, d_h, d_table));
}

static void cuda_rmsnorm(size_t tokens, size_t hidden, const float *h, const float *gain, float *u, float *inverse)
{
    check(kernel_rmsnorm(stream, tokens, hidden, h, gain, u, inverse));
}

static void cuda_rmsnorm_backward(size_t tokens, size_t hidden, const float *h, const float *gain, const float *inverse,
                                  const float *d_u, float *d_h, float *d_gain)
{
    check(kernel_rmsnorm_backward(stream, tokens, hidden, h, gain, inverse, d_u, d_h, d_gain));
}

static void cuda_router(size_t tokens, size_t experts, size_t topk, const float *logits, int32_t *ids, float *weight)
{
    check(kernel_router(stream, tokens, experts, topk, logits, ids, weight));
}

static void cuda_router_backward(size_t tokens, size_t experts, size_t topk, const int32_t *ids, const float *weight,
                                 const float *d_weight, float *d_logits)
{
    check(kernel_router_backward(stream, tokens, experts, topk, ids, weight, d_weight, d_logits));
}

static void cuda_cross_entropy(const struct batch *batch, size_t tokens, size_t classes, const uint32_t *place,
                               float *logits, float scale, double *token_loss, double *loss)
{
    check(kernel_cross_entropy(stream, batch, tokens, classes, place, logits, scale, token_loss, loss));
}

static void cuda_adamw(const struct adamw *adamw, uint64_t step, int decay, const struct adamw_tensor *tensor,
                       const float *gradient)
{
    struct adamw_scales scales = adamw_scales(adamw, step, decay);

    check(kernel_adamw(stream, adamw, &scales, tensor, gradient));
}

/* ------------------------------------------------------------------ where the time goes */

static int grow(struct marks *m)
{
    size_t capacity = m->capacity ? 2 * m->capacity : 64;
    cudaEvent_t *events = realloc(m->events, capacity * sizeof(*events));
    enum phase *phases;

    if (!events)
        return -MOK_ENOMEM;
    m->events = events;
    phases = realloc(m->phases, capacity * sizeof(*phases));
    if (!phases)
        return -MOK_ENOMEM;
    m->phases = phases;
    for (; m->capacity < capacity; m->capacity++)
        if (cudaEventCreate(&m->events[m->capacity]) != cudaSuccess)
            return -MOK_EDEVICE;
    return 0;
}

/* Adds up a step that is over. */
static void read_out(struct marks *m)
{
    if (m->count == 0)
        return;
    check(cudaEventSynchronize(m->events[m->count - 1]));
    for (size_t i = 0; i + 1 < m->count; i++) {
        float ms = 0;

        check(cudaEventElapsedTime(&ms, m->events[i], m->events[i + 1]));
        spent[m->phases[i]] += (double)ms;
    }
    m->count = 0;
    steps++;
}

static void cuda_mark(enum phase phase)
{
    struct marks *m = &marks[current];

    if (!marking)
        return;
    if (m->count == m->capacity && grow(m) < 0) {
        marking = 0;
        return;
    }
    m->phases[m->count] = phase;
    check(cudaEventRecord(m->events[m->count++], stream));
    if (phase == PHASE_END) {
        current = (current + 1) % KEPT;
        read_out(&marks[current]);
    }
}

static unsigned cuda_phases(double *ret_ms)
{
    unsigned result;

    for (unsigned i = 1; i <= KEPT; i++)
        read_out(&marks[(current + i) % KEPT]);
    for (unsigned p = 0; p < PHASES; p++) {
        ret_ms[p] = spent[p];
        spent[p] = 0;
    }
    result = steps;
    steps = 0;
    return result;
}

static const struct backend cuda = {
    .queued = 1,
    .open = cuda_open,
    .close = cuda_close,
    .stream = cuda_stream,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .put = cuda_put,
    .get = cuda_get,
    .zero = cuda_zero,
    .copy = cuda_copy,
    .initialise = cuda_initialise,
    .to_bf16 = cuda_to_bf16,
    .to_mxfp8 = cuda_to_mxfp8,
    .add_bf16 = cuda_add_bf16,
    .gemm_nt = cuda_gemm_nt,
    .gemm_nn = cuda_gemm_nn,
    .gemm_tn = cuda_gemm_tn,
    .spread = cuda_spread,
    .add_rows = cuda_add_rows,
    .embed = cuda_embed,
    .embed_backward = cuda_embed_backward,
    .rmsnorm = cuda_rmsnorm,
    .rmsnorm_backward = cuda_rmsnorm_backward,
    .router = cuda_router,
    .router_backward = cuda_router_backward,
    .cross_entropy = cuda_cross_entropy,
    .adamw = cuda_adamw,
    .mark = cuda_mark,
    .phases = cuda_phases,
};

const struct backend *backend_cuda(void)
{
    return &cuda;
}
