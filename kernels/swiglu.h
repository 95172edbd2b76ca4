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

/* The BF16 values next to a limit: the largest that is not above it, the smallest above it. No limit: both infinite. */
struct mok_sides {
    float limit, below, above;
};

MOK_HD struct mok_sides mok_sides_of(float limit)
{
    const float infinite = mok_f32_from_bits(0x7f800000u);
    const uint32_t below = mok_f32_bits(limit) & 0xffff0000u;
    struct mok_sides sides = { infinite, infinite, infinite };

    if (limit > 0) {
        sides.limit = limit;
        sides.below = mok_f32_from_bits(below);
        sides.above = mok_f32_from_bits(below + 0x10000u);
    }
    return sides;
}

/* Moves a magnitude that rounding to BF16 could take across the limit to the nearest BF16 value on its own side. */
MOK_HD float mok_keep_side(float m, struct mok_sides sides)
{
    float low = m > sides.below ? sides.below : m, high = m < sides.above ? sides.above : m;

    return m > sides.limit ? high : low;
}

/* The same for a value whose limit has one side (sign_mask 0: gate), or two (sign_mask the sign's bit: up). */
MOK_HD float mok_side(float value, uint32_t sign_mask, struct mok_sides sides)
{
    const uint32_t sign = mok_f32_bits(value) & sign_mask;

    return mok_f32_from_bits(mok_f32_bits(mok_keep_side(mok_f32_from_bits(mok_f32_bits(value) ^ sign), sides)) | sign);
}

MOK_HD float mok_gate_side(float a, struct mok_sides sides)
{
    return mok_side(a, 0, sides);
}

MOK_HD float mok_up_side(float b, struct mok_sides sides)
{
    return mok_side(b, 0x80000000u, sides);
}

/* Gate a and up b as they are saved. */
MOK_HD uint16_t mok_gate_to_bf16(float a, float limit)
{
    return mok_f32_to_bf16(mok_gate_side(a, mok_sides_of(limit)));
}

MOK_HD uint16_t mok_up_to_bf16(float b, float limit)
{
    return mok_f32_to_bf16(mok_up_side(b, mok_sides_of(limit)));
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
