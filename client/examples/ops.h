/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dense arithmetic of the example: BF16 conversion, GEMMs, RMSNorm, cross entropy, a hash. FP32, row-major.
 * Deterministic: BLAS runs in one thread, every sum has one order.
 */
#ifndef EXAMPLE_OPS_H
#define EXAMPLE_OPS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Round to nearest even; NaN stays NaN. */
static inline uint16_t bf16_from_float(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float bf16_to_float(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;

    memcpy(&result, &bits, sizeof(result));
    return result;
}

void ops_to_bf16(size_t count, const float *from, uint16_t *to);

/* to += from */
void ops_add_bf16(size_t count, const uint16_t *from, float *to);

/* One BLAS thread from here on. Call once a process. */
void ops_init(void);

/* c[m][n] = a[m][k] b[n][k]^T + beta c */
void ops_gemm_nt(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c);
/* c[m][n] = a[m][k] b[k][n] + beta c */
void ops_gemm_nn(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c);
/* c[m][n] = a[k][m]^T b[k][n] + beta c */
void ops_gemm_tn(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c);

/* u[t] = gain * h[t] / rms(h[t]); inverse[t] = 1 / rms(h[t]). */
void ops_rmsnorm(size_t tokens, size_t hidden, const float *h, const float *gain, float *u, float *inverse);
/* d_h += and d_gain += from d_u. */
void ops_rmsnorm_backward(size_t tokens, size_t hidden, const float *h, const float *gain, const float *inverse,
                          const float *d_u, float *d_h, float *d_gain);

/*
 * Returns the sum over tokens of -log softmax(logits[t])[target[t]] and replaces the logits by their gradient
 * times `scale`.
 */
double ops_cross_entropy(size_t tokens, size_t classes, float *logits, const uint8_t *target, float scale);

/* 64-bit hash of `bytes`, chained through `state` (FNV-1a over 8-byte words). */
#define OPS_HASH_START 0xcbf29ce484222325ull
uint64_t ops_hash(uint64_t state, const void *data, size_t bytes);

#endif
