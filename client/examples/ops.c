/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dense arithmetic on one thread. Nothing here knows of ranks or of the MoE layer.
 */
#include "ops.h"

#include <cblas.h>
#include <math.h>

#define RMS_EPSILON 1e-6f

void ops_init(void)
{
    openblas_set_num_threads(1);
}

void ops_to_bf16(size_t count, const float *from, uint16_t *to)
{
    for (size_t i = 0; i < count; i++)
        to[i] = bf16_from_float(from[i]);
}

void ops_add_bf16(size_t count, const uint16_t *from, float *to)
{
    for (size_t i = 0; i < count; i++)
        to[i] += bf16_to_float(from[i]);
}

void ops_gemm_nt(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (blasint)m, (blasint)n, (blasint)k, 1.0f, a, (blasint)k, b,
                (blasint)k, beta, c, (blasint)n);
}

void ops_gemm_nn(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (blasint)m, (blasint)n, (blasint)k, 1.0f, a, (blasint)k, b,
                (blasint)n, beta, c, (blasint)n);
}

void ops_gemm_tn(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c)
{
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (blasint)m, (blasint)n, (blasint)k, 1.0f, a, (blasint)m, b,
                (blasint)n, beta, c, (blasint)n);
}

void ops_rmsnorm(size_t tokens, size_t hidden, const float *h, const float *gain, float *u, float *inverse)
{
    for (size_t t = 0; t < tokens; t++) {
        const float *row = h + t * hidden;
        float sum = 0;

        for (size_t i = 0; i < hidden; i++)
            sum += row[i] * row[i];
        inverse[t] = 1.0f / sqrtf(sum / (float)hidden + RMS_EPSILON);
        for (size_t i = 0; i < hidden; i++)
            u[t * hidden + i] = row[i] * inverse[t] * gain[i];
    }
}

void ops_rmsnorm_backward(size_t tokens, size_t hidden, const float *h, const float *gain, const float *inverse,
                          const float *d_u, float *d_h, float *d_gain)
{
    for (size_t t = 0; t < tokens; t++) {
        const float *row = h + t * hidden, *d = d_u + t * hidden;
        float dot = 0, scale = inverse[t];

        for (size_t i = 0; i < hidden; i++) {
            d_gain[i] += d[i] * row[i] * scale;
            dot += d[i] * gain[i] * row[i];
        }
        dot *= scale * scale * scale / (float)hidden;
        for (size_t i = 0; i < hidden; i++)
            d_h[t * hidden + i] += d[i] * gain[i] * scale - row[i] * dot;
    }
}

double ops_cross_entropy(size_t tokens, size_t classes, float *logits, const uint8_t *target, float scale)
{
    double loss = 0;

    for (size_t t = 0; t < tokens; t++) {
        float *row = logits + t * classes, peak = row[0], sum = 0, wanted = row[target[t]];

        for (size_t c = 1; c < classes; c++)
            peak = row[c] > peak ? row[c] : peak;
        for (size_t c = 0; c < classes; c++) {
            row[c] = expf(row[c] - peak);
            sum += row[c];
        }
        loss += log((double)sum) - (double)(wanted - peak);
        for (size_t c = 0; c < classes; c++)
            row[c] *= scale / sum;
        row[target[t]] -= scale;
    }
    return loss;
}

uint64_t ops_hash(uint64_t state, const void *data, size_t bytes)
{
    const unsigned char *at = data;

    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint64_t word;

        memcpy(&word, at, 8);
        state = (state ^ word) * 0x100000001b3ull;
        state ^= state >> 29;
    }
    for (; bytes > 0; at++, bytes--)
        state = (state ^ *at) * 0x100000001b3ull;
    return state ^ (state >> 32);
}
