/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The model's arithmetic on this CPU, one thread a rank; the functions themselves are in ops.c, router.c and
 * optimizer.c.
 */
#include <stdlib.h>
#include <string.h>

#include "backend.h"
#include "mok/types.h"
#include "ops.h"
#include "report.h"
#include "router.h"

static int host_open(const void *memory, int report)
{
    (void)memory;
    (void)report;
    ops_init();
    return 0;
}

static void host_close(void)
{
}

static void *host_stream(void)
{
    return NULL;
}

static int host_allocate(size_t bytes, void **ret)
{
    void *memory = calloc(1, bytes);

    if (!memory)
        return fail(-MOK_ENOMEM, "no memory for %zu bytes", bytes);
    *ret = memory;
    return 0;
}

static int host_put(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
    return 0;
}

static void host_zero(void *to, size_t bytes)
{
    memset(to, 0, bytes);
}

static void host_copy(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

static int host_to_mxfp8(const mok_mxfp8_options *options, const float *from, uint8_t *data, uint8_t *scales,
                         uint8_t *transposed, uint8_t *transposed_scales)
{
    mok_mxfp8_options turned = *options;
    int rc = mok_mxfp8_quantize(options, from, data, scales);

    turned.flags |= MOK_QUANTIZE_TRANSPOSE;
    return rc < 0 || !transposed ? rc : mok_mxfp8_quantize(&turned, from, transposed, transposed_scales);
}

static void host_initialise(float *to, size_t count, float constant, float deviation, uint64_t seed, uint64_t stream)
{
    for (size_t i = 0; i < count; i++)
        to[i] = deviation > 0 ? constant + deviation * rng_normal(seed, stream, i) : constant;
}

static void host_spread(size_t rows, size_t columns, const float *row, float *to)
{
    for (size_t r = 0; r < rows; r++)
        memcpy(to + r * columns, row, columns * sizeof(*row));
}

static void host_add_rows(size_t rows, size_t columns, const float *from, float *row)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t c = 0; c < columns; c++)
            row[c] += from[r * columns + c];
}

static size_t embedding_row(const struct batch *batch, uint32_t place, unsigned distance)
{
    return (size_t)distance * 256 + batch->text[place - distance];
}

static void host_embed(const struct batch *batch, size_t tokens, size_t hidden, const float *table, uint32_t *place,
                       float *h)
{
    memset(h, 0, tokens * hidden * sizeof(*h));
    for (size_t t = 0; t < tokens; t++, h += hidden) {
        place[t] = (uint32_t)batch_place(batch, t);
        for (unsigned w = 0; w < batch->window; w++) {
            const float *row = table + embedding_row(batch, place[t], w) * hidden;

            for (size_t i = 0; i < hidden; i++)
                h[i] += row[i];
        }
    }
}

static void host_embed_backward(const struct batch *batch, size_t tokens, size_t hidden, const uint32_t *place,
                                const float *d_h, float *d_table)
{
    for (size_t t = 0; t < tokens; t++, d_h += hidden) {
        for (unsigned w = 0; w < batch->window; w++) {
            float *row = d_table + embedding_row(batch, place[t], w) * hidden;

            for (size_t i = 0; i < hidden; i++)
                row[i] += d_h[i];
        }
    }
}

static void host_cross_entropy(const struct batch *batch, size_t tokens, size_t classes, const uint32_t *place,
                               float *logits, float scale, double *token_loss, double *loss)
{
    double sum = 0;

    for (size_t t = 0; t < tokens; t++) {
        token_loss[t] = ops_cross_entropy(1, classes, logits + t * classes, &batch->text[place[t] + 1], scale);
        sum += token_loss[t];
    }
    *loss += sum;
}

static void host_mark(enum phase phase)
{
    (void)phase;
}

static unsigned host_phases(double *ret_ms)
{
    (void)ret_ms;
    return 0;
}

const struct backend backend_host = {
    .open = host_open,
    .close = host_close,
    .stream = host_stream,
    .allocate = host_allocate,
    .release = free,
    .put = host_put,
    .get = host_put,
    .zero = host_zero,
    .copy = host_copy,
    .initialise = host_initialise,
    .to_bf16 = ops_to_bf16,
    .to_mxfp8 = host_to_mxfp8,
    .add_bf16 = ops_add_bf16,
    .gemm_nt = ops_gemm_nt,
    .gemm_nn = ops_gemm_nn,
    .gemm_tn = ops_gemm_tn,
    .spread = host_spread,
    .add_rows = host_add_rows,
    .embed = host_embed,
    .embed_backward = host_embed_backward,
    .rmsnorm = ops_rmsnorm,
    .rmsnorm_backward = ops_rmsnorm_backward,
    .router = router_forward,
    .router_backward = router_backward,
    .cross_entropy = host_cross_entropy,
    .adamw = adamw_step,
    .mark = host_mark,
    .phases = host_phases,
};
