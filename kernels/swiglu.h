/* SPDX-License-Identifier: Apache-2.0 */
/*
 * SwiGLU and its gradient for one element, in FP32, from gate a and up b as they are saved (BF16 values):
 *     h = silu(a') * b',  silu(a) = a / (1 + exp(-a)),  a' = min(a, L), b' = min(max(b, -L), L)   (limit L; 0: none)
 * Plain multiplications and additions that must not be contracted, so that the bits are the same with any vector width.
 * NaN passes through the clamp; the gradient is zero where the clamp holds.
 */
#ifndef MOK_KERNELS_SWIGLU_H
#define MOK_KERNELS_SWIGLU_H

#include "hd.h"

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
