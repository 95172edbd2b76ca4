/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SwiGLU and its gradient for one element, in FP32, from gate a and up b as they are saved (BF16 values):
 *     h = silu(a') * b',  silu(a) = a / (1 + exp(-a)),  a' = min(a, L), b' = min(max(b, -L), L)   (limit L; 0: none)
 * Plain multiplications and additions that must not be contracted, so that the bits are the same with any vector width.
 * NaN passes through the clamp; the gradient is zero where the clamp holds. Whether it holds is decided by the sums before
 * they are rounded: what is saved of them is the nearest BF16 value on their side of the limit.
 */
#ifndef MOK_KERNELS_SWIGLU_H
#define MOK_KERNELS_SWIGLU_H

#include "bf16.h"

/* exp(x) to about one unit in the last place; overflows to Inf and underflows to 0. */
MOK_HD float mok_exp(float x)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted, n, r, p;
    uint32_t k, half;

    x = x < -104.0f ? -104.0f : x;
    x = x > 104.0f ? 104.0f : x;
    shifted = x * 1.44269504f + magic;
    n = shifted - magic;
    r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    /* 2^n in two factors, each a normal number; k is n in two's complement */
    k = mok_f32_bits(shifted) - mok_f32_bits(magic);
    half = (uint32_t)((int32_t)k >> 1);
    p = p * mok_f32_from_bits((half + 127u) << 23);
    return p * mok_f32_from_bits((k - half + 127u) << 23);
}

MOK_HD float mok_sigmoid(float x)
{
    return 1.0f / (1.0f + mok_exp(-x));
}

/* value of magnitude m, rounded to `bf16`, kept on its side of the limit */
MOK_HD uint16_t mok_keep_side(uint16_t bf16, float m, float rounded_m, float limit)
{
    uint16_t below = (uint16_t)(mok_f32_bits(limit) >> 16), sign = (uint16_t)(bf16 & 0x8000u);
    uint16_t above = (uint16_t)(below + 1u);

    bf16 = limit > 0 && m > limit && rounded_m <= limit ? (uint16_t)(sign | above) : bf16;
    return limit > 0 && m <= limit && rounded_m > limit ? (uint16_t)(sign | below) : bf16;
}

/* Gate a and up b as they are saved. */
MOK_HD uint16_t mok_gate_to_bf16(float a, float limit)
{
    uint16_t bf16 = mok_f32_to_bf16(a);

    return mok_keep_side(bf16, a, mok_bf16_to_f32(bf16), limit);
}

MOK_HD uint16_t mok_up_to_bf16(float b, float limit)
{
    uint16_t bf16 = mok_f32_to_bf16(b);
    float rounded = mok_bf16_to_f32(bf16);

    return mok_keep_side(bf16, b < 0 ? -b : b, rounded < 0 ? -rounded : rounded, limit);
}

MOK_HD float mok_clamp_gate(float a, float limit)
{
    return limit > 0 && a > limit ? limit : a;
}

MOK_HD float mok_clamp_up(float b, float limit)
{
    b = limit > 0 && b > limit ? limit : b;
    return limit > 0 && b < -limit ? -limit : b;
}

MOK_HD float mok_swiglu(float a, float b, float limit)
{
    a = mok_clamp_gate(a, limit);
    b = mok_clamp_up(b, limit);
    return a * mok_sigmoid(a) * b;
}

/* From d_h, the gradient with respect to h, to those with respect to a and b; returns h. */
MOK_HD float mok_swiglu_backward(float a, float b, float limit, float d_h, float *ret_d_a, float *ret_d_b)
{
    float ac = mok_clamp_gate(a, limit), bc = mok_clamp_up(b, limit);
    float s = mok_sigmoid(ac), silu = ac * s;
    float d_a = d_h * bc * (s + silu * (1.0f - s)), d_b = d_h * silu;

    *ret_d_a = limit > 0 && a > limit ? 0.0f : d_a;
    *ret_d_b = limit > 0 && (b > limit || b < -limit) ? 0.0f : d_b;
    return silu * bc;
}

#endif
