/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See ops.h. Each function is a plain loop that the compiler turns into vectors, once a listed instruction set.
 */
#include "ops.h"

#include "bf16.h"
#include "mx.h"
#include "../swiglu.h"

/* Resolvers of clones run before a sanitizer is up: those builds take the plain code. */
#if defined(__x86_64__) && !defined(MOK_SANITIZED)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

CLONES void mok_ops_widen(float *restrict ret, const uint16_t *restrict bf16, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++)
        ret[i] = mok_bf16_to_f32(bf16[i]);
}

CLONES void mok_ops_narrow(uint16_t *restrict ret, const float *restrict value, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++)
        ret[i] = mok_f32_to_bf16(value[i]);
}

CLONES void mok_ops_scale(float *ret, const float *value, float factor, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++)
        ret[i] = value[i] * factor;
}

CLONES void mok_ops_add_scaled(float *restrict sum, float factor, const uint16_t *restrict bf16, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++)
        sum[i] = sum[i] + factor * mok_bf16_to_f32(bf16[i]);
}

CLONES void mok_ops_add(float *restrict sum, const uint16_t *restrict bf16, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++)
        sum[i] = sum[i] + mok_bf16_to_f32(bf16[i]);
}

CLONES float mok_ops_dot(const float *restrict x, const float *restrict y, size_t count)
{
    float lane[16] = { 0 };
    size_t i, j;

    for (i = 0; i + 16 <= count; i += 16)
        for (j = 0; j < 16; j++)
            lane[j] = lane[j] + x[i + j] * y[i + j];
    for (; i < count; i++)
        lane[i % 16] = lane[i % 16] + x[i] * y[i];
    for (j = 8; j > 0; j /= 2)
        for (i = 0; i < j; i++)
            lane[i] = lane[i] + lane[i + j];
    return lane[0];
}

CLONES void mok_ops_swiglu(const float *a, const float *b, float limit, uint16_t *restrict ret_a,
                           uint16_t *restrict ret_b, float *ret_h, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++) {
        uint16_t a16 = mok_gate_to_bf16(a[i], limit), b16 = mok_up_to_bf16(b[i], limit);

        ret_a[i] = a16;
        ret_b[i] = b16;
        ret_h[i] = mok_swiglu(mok_bf16_to_f32(a16), mok_bf16_to_f32(b16), limit);
    }
}

CLONES void mok_ops_swiglu_backward(const float *restrict u, const uint16_t *restrict a, const uint16_t *restrict b,
                                    float limit, float weight, float *restrict ret_h, float *restrict ret_d_a,
                                    float *restrict ret_d_b, size_t count)
{
    size_t i;

    for (i = 0; i < count; i++) {
        float d_a, d_b;

        ret_h[i] = mok_swiglu_backward(mok_bf16_to_f32(a[i]), mok_bf16_to_f32(b[i]), limit, weight * u[i], &d_a, &d_b);
        ret_d_a[i] = d_a;
        ret_d_b[i] = d_b;
    }
}

CLONES void mok_ops_quantize(const float *value, size_t count, uint32_t group, uint8_t *ret_code, uint8_t *ret_scale)
{
    mok_mx_quantize_row(value, count, group, ret_code, ret_scale);
}

CLONES void mok_ops_dequantize(float *ret, const uint8_t *code, const uint8_t *scale, size_t count)
{
    mok_mx_dequantize_row(code, scale, count, ret);
}
