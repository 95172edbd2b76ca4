/* SPDX-License-Identifier: Apache-2.0 */
/*
 * See ops.h. Each function is a plain loop that the compiler turns into vectors, once a listed instruction set.
 */
#include "ops.h"

#include <string.h>

#include "bf16.h"
#include "mx.h"
#include "touch.h"
#include "../swiglu.h"

/*
 * Resolvers of clones run before a sanitizer is up, and clang does not export what it clones: those take the plain
 * code.
 */
#if defined(__x86_64__) && !defined(MOK_SANITIZED) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

CLONES void mok_ops_widen(float *restrict ret, const uint16_t *restrict bf16, size_t count)
{
    size_t i;

    MOK_READS(bf16, count);
    MOK_WRITES(ret, count);
    for (i = 0; i < count; i++)
        ret[i] = mok_bf16_to_f32(bf16[i]);
}

CLONES void mok_ops_widen_panels(float *restrict ret, size_t stride, const uint16_t *restrict bf16, size_t count)
{
    size_t i, j;

    MOK_READS(bf16, count);
    for (i = 0; i < count; i += 16, ret += stride) {
        MOK_WRITES(ret, 16);
        for (j = 0; j < 16; j++)
            ret[j] = mok_bf16_to_f32(bf16[i + j]);
    }
}

CLONES void mok_ops_copy_panels(float *restrict ret, size_t stride, const float *restrict value, size_t count)
{
    size_t i, j;

    MOK_READS(value, count);
    for (i = 0; i < count; i += 16, ret += stride) {
        MOK_WRITES(ret, 16);
        for (j = 0; j < 16; j++)
            ret[j] = value[i + j];
    }
}

typedef float vector __attribute__((vector_size(32)));

/* 8 x 8 values, in three rounds of exchanges between pairs of rows. */
#define PAIR_1(a, b, low, high)                                                                                        \
    vector low = __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13),                                              \
           high = __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define PAIR_2(a, b, low, high)                                                                                        \
    vector low = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13),                                              \
           high = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define PAIR_4(a, b, low, high)                                                                                        \
    store(ret + (low) * 16, __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11));                                  \
    store(ret + (high) * 16, __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15))
#define load(from, to) vector to; memcpy(&(to), from, sizeof(to))
#define store(to, from) do { vector stored = from; memcpy(to, &stored, sizeof(stored)); } while (0)

CLONES void mok_ops_transpose16(float *all, const float *value, size_t stride, size_t count)
{
    size_t i, half;

    for (i = 0; i < 16; i++)
        MOK_READS(value + i * stride, count);
    MOK_WRITES(all, 16 * count);
    for (i = 0; i < count; i += 8)
        for (half = 0; half < 16; half += 8) {
            const float *from = value + half * stride + i;
            float *ret = all + i * 16 + half;

            load(from, a0);
            load(from + stride, a1);
            load(from + 2 * stride, a2);
            load(from + 3 * stride, a3);
            load(from + 4 * stride, a4);
            load(from + 5 * stride, a5);
            load(from + 6 * stride, a6);
            load(from + 7 * stride, a7);
            PAIR_1(a0, a1, b0, b1);
            PAIR_1(a2, a3, b2, b3);
            PAIR_1(a4, a5, b4, b5);
            PAIR_1(a6, a7, b6, b7);
            PAIR_2(b0, b2, c0, c1);
            PAIR_2(b1, b3, c2, c3);
            PAIR_2(b4, b6, c4, c5);
            PAIR_2(b5, b7, c6, c7);
            PAIR_4(c0, c4, 0, 4);
            PAIR_4(c1, c5, 1, 5);
            PAIR_4(c2, c6, 2, 6);
            PAIR_4(c3, c7, 3, 7);
        }
}

CLONES void mok_ops_narrow(uint16_t *restrict ret, const float *restrict value, size_t count)
{
    size_t i;

    MOK_READS(value, count);
    MOK_WRITES(ret, count);
    for (i = 0; i < count; i++)
        ret[i] = mok_f32_to_bf16(value[i]);
}

CLONES void mok_ops_scale(float *ret, const float *value, float factor, size_t count)
{
    size_t i;

    MOK_READS(value, count);
    MOK_WRITES(ret, count);
    for (i = 0; i < count; i++)
        ret[i] = value[i] * factor;
}

CLONES void mok_ops_add_scaled(float *restrict sum, float factor, const uint16_t *restrict bf16, size_t count)
{
    size_t i;

    MOK_READS(bf16, count);
    MOK_WRITES(sum, count);
    for (i = 0; i < count; i++)
        sum[i] = sum[i] + factor * mok_bf16_to_f32(bf16[i]);
}

CLONES void mok_ops_add(float *restrict sum, const uint16_t *restrict bf16, size_t count)
{
    size_t i;

    MOK_READS(bf16, count);
    MOK_WRITES(sum, count);
    for (i = 0; i < count; i++)
        sum[i] = sum[i] + mok_bf16_to_f32(bf16[i]);
}

CLONES float mok_ops_dot(const float *restrict x, const float *restrict y, size_t count)
{
    float lane[16] = { 0 };
    size_t i, j;

    MOK_READS(x, count);
    MOK_READS(y, count);
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

    MOK_READS(a, count);
    MOK_READS(b, count);
    MOK_WRITES(ret_a, count);
    MOK_WRITES(ret_b, count);
    MOK_WRITES(ret_h, count);
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

    MOK_READS(u, count);
    MOK_READS(a, count);
    MOK_READS(b, count);
    MOK_WRITES(ret_h, count);
    MOK_WRITES(ret_d_a, count);
    MOK_WRITES(ret_d_b, count);
    for (i = 0; i < count; i++) {
        float d_a, d_b;

        ret_h[i] = mok_swiglu_backward(mok_bf16_to_f32(a[i]), mok_bf16_to_f32(b[i]), limit, weight * u[i], &d_a, &d_b);
        ret_d_a[i] = d_a;
        ret_d_b[i] = d_b;
    }
}

CLONES void mok_ops_quantize(const float *value, size_t count, uint32_t group, uint8_t *ret_code, uint8_t *ret_scale)
{
    MOK_READS(value, count);
    MOK_WRITES(ret_code, count);
    MOK_WRITES(ret_scale, mok_mx_scales(count));
    mok_mx_quantize_row(value, count, group, ret_code, ret_scale);
}

CLONES void mok_ops_reround(float *value, const uint8_t *scale, size_t count)
{
    size_t at, i;

    MOK_READS(scale, mok_mx_scales(count));
    MOK_WRITES(value, count);
    for (at = 0; at < count; at += MOK_MX_BLOCK) {
        size_t end = count - at < MOK_MX_BLOCK ? count : at + MOK_MX_BLOCK;
        uint8_t shared = scale[at / MOK_MX_BLOCK];

        for (i = at; i < end; i++)
            value[i] = mok_mx_reround(value[i], shared);
    }
}

CLONES void mok_ops_dequantize(float *ret, const uint8_t *code, const uint8_t *scale, size_t count)
{
    MOK_READS(code, count);
    MOK_READS(scale, mok_mx_scales(count));
    MOK_WRITES(ret, count);
    mok_mx_dequantize_row(code, scale, count, ret);
}
