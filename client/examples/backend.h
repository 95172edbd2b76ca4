/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the model around the MoE layers is computed with: the CPU, where each call is done when it returns, or a GPU,
 * where calls are queued on one CUDA stream, in the order of the layers' operations on it. FP32, row-major,
 * deterministic: every sum has one order. Pointers are into memory of `allocate`, or of mokd on the same device, unless
 * they say "host".
 */
#ifndef EXAMPLE_BACKEND_H
#define EXAMPLE_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include "data.h"
#include "mok/mok.h"
#include "optimizer.h"

/* What a stretch of a step is spent on, for --report. */
enum phase {
    PHASE_DENSE,    /* the model around the layers */
    PHASE_FORWARD,  /* a layer's forward, from the stream to the worker and back */
    PHASE_BACKWARD, /* its backward */
    PHASE_SUM,      /* of the dense gradients, over the ranks */
    PHASE_UPDATE,   /* optimizer, and the weights to BF16 */
    PHASE_END,      /* of the step */
    PHASES,
};

struct backend {
    /* Calls are queued; then `stream` is theirs, once `open` has run. */
    int queued;
    /* After mokd gave out memory on the device (libmok starts CUDA as the node wants it), `memory` is some of that. */
    int (*open)(const void *memory, int report);
    void (*close)(void);
    void *(*stream)(void);

    int (*allocate)(size_t bytes, void **ret); /* zeroed */
    void (*release)(void *memory);
    /* To and from host memory; done when they return, after all calls before, whose first failure they tell. */
    int (*put)(void *to, const void *host, size_t bytes);
    int (*get)(void *host, const void *from, size_t bytes);
    void (*zero)(void *to, size_t bytes);
    void (*copy)(void *to, const void *from, size_t bytes);
    /* to[i] = constant + deviation * (standard normal i of that stream of rng.h) */
    void (*initialise)(float *to, size_t count, float constant, float deviation, uint64_t seed, uint64_t stream);

    void (*to_bf16)(size_t count, const float *from, uint16_t *to);
    /* FP32 weights to MXFP8, and their transposes unless NULL, as libmok does it. */
    int (*to_mxfp8)(const mok_mxfp8_options *options, const float *from, uint8_t *data, uint8_t *scales,
                    uint8_t *transposed, uint8_t *transposed_scales);
    void (*add_bf16)(size_t count, const uint16_t *from, float *to);
    /* c[m][n] = a b + beta c, beta 0 or 1; nt: a[m][k] b[n][k], nn: a[m][k] b[k][n], tn: a[k][m] b[k][n] */
    void (*gemm_nt)(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c);
    void (*gemm_nn)(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c);
    void (*gemm_tn)(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c);
    /* to[r] = row for each of `rows`; row += sum of from[r] */
    void (*spread)(size_t rows, size_t columns, const float *row, float *to);
    void (*add_rows)(size_t rows, size_t columns, const float *from, float *row);

    /* h[t] = sum over w < window of table[w][byte at distance w]; place[t]: where the token is in the text. */
    void (*embed)(const struct batch *batch, size_t tokens, size_t hidden, const float *table, uint32_t *place,
                  float *h);
    void (*embed_backward)(const struct batch *batch, size_t tokens, size_t hidden, const uint32_t *place,
                           const float *d_h, float *d_table);
    /* As in ops.h and router.h. */
    void (*rmsnorm)(size_t tokens, size_t hidden, const float *h, const float *gain, float *u, float *inverse);
    void (*rmsnorm_backward)(size_t tokens, size_t hidden, const float *h, const float *gain, const float *inverse,
                             const float *d_u, float *d_h, float *d_gain);
    void (*router)(size_t tokens, size_t experts, size_t topk, const float *logits, int32_t *ids, float *weight);
    void (*router_backward)(size_t tokens, size_t experts, size_t topk, const int32_t *ids, const float *weight,
                            const float *d_weight, float *d_logits);
    /* The target of a token is the byte after it. *loss += the sum over tokens; each one's loss goes to token_loss. */
    void (*cross_entropy)(const struct batch *batch, size_t tokens, size_t classes, const uint32_t *place,
                          float *logits, float scale, double *token_loss, double *loss);
    void (*adamw)(const struct adamw *adamw, uint64_t step, int decay, const struct adamw_tensor *tensor,
                  const float *gradient);

    /* From here on the stream's time belongs to `phase`. */
    void (*mark)(enum phase phase);
    /* Waits; the time of each phase over the steps marked since the last call, and how many they are. */
    unsigned (*phases)(double ret_ms[PHASES]);
};

extern const struct backend backend_host;
/* NULL where this program was built without nvcc. */
const struct backend *backend_cuda(void);

#endif
