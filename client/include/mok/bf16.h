/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file bf16.h
 * BF16 from and to float, for programs that have no such type. Plain C99 and C++; needs nothing of libmok.
 */
#ifndef MOK_BF16_H
#define MOK_BF16_H

#include <stdint.h>
#include <string.h>

/** To nearest even; a NaN stays one. */
static inline uint16_t mok_bf16_from_float(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/** Exact. */
static inline float mok_bf16_to_float(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float widened;

    memcpy(&widened, &bits, sizeof(widened));
    return widened;
}

#endif
