/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA kernels of the model around the MoE layers: each function queues one or two on `stream` and returns CUDA's
 * code. Arguments as in backend.h. No atomics: every sum has one order, so a repeat has the same bits.
 */
#ifndef EXAMPLE_KERNELS_H
#define EXAMPLE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "data.h"
#include "optimizer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum gemm { GEMM_NT, GEMM_NN, GEMM_TN };

int kernel_initialise(void *stream, float *to, size_t count, float constant, float deviation, uint64_t seed,
                      uint64_t numbers);
int kernel_to_bf16(void *stream, size_t count, const float *from, uint16_t *to);
int kernel_add_bf16(void *stream, size_t count, const uint16_t *from, float *to);
int kernel_adamw(void *stream, const struct adamw *adamw, const struct adamw_scales *scales,
                 const struct adamw_tensor *tensor, const float *gradient);

int kernel_gemm(void *stream, enum gemm kind, size_t m, size_t n, size_t k, const float *a, const float *b, float beta,
                float *c);
int kernel_spread(void *stream, size_t rows, size_t columns, const float *row, float *to);
int kernel_add_rows(void *stream, size_t rows, size_t columns, const float *from, float *row);

int kernel_embed(void *stream, const struct batch *batch, size_t tokens, size_t hidden, const float *table,
                 uint32_t *place, float *h);
int kernel_embed_backward(void *stream, const struct batch *batch, size_t tokens, size_t hidden, const uint32_t *place,
                          const float *d_h, float *d_table);
int kernel_rmsnorm(void *stream, size_t tokens, size_t hidden, const float *h, const float *gain, float *u,
                   float *inverse);
int kernel_rmsnorm_backward(void *stream, size_t tokens, size_t hidden, const float *h, const float *gain,
                            const float *inverse, const float *d_u, float *d_h, float *d_gain);
int kernel_router(void *stream, size_t tokens, size_t experts, size_t topk, const float *logits, int32_t *ids,
                  float *weight);
int kernel_router_backward(void *stream, size_t tokens, size_t experts, size_t topk, const int32_t *ids,
                           const float *weight, const float *d_weight, float *d_logits);
int kernel_cross_entropy(void *stream, const struct batch *batch, size_t tokens, size_t classes, const uint32_t *place,
                         float *logits, float scale, double *token_loss, double *loss);

#ifdef __cplusplus
}
#endif
#endif
