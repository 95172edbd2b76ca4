/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BF16, the upper half of a binary32: widening is exact, narrowing rounds to nearest even and keeps NaN a NaN.
 */
#ifndef MOK_MX_BF16_H
#define MOK_MX_BF16_H

#include "bits.h"

MOK_HD float mok_bf16_to_f32(uint16_t value)
{
    return mok_f32_from_bits((uint32_t)value << 16);
}

MOK_HD uint16_t mok_f32_to_bf16(float value)
{
    uint32_t bits = mok_f32_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;

    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

/* The value that storing as BF16 and loading again gives. */
MOK_HD float mok_bf16_round(float value)
{
    return mok_bf16_to_f32(mok_f32_to_bf16(value));
}

#endif
