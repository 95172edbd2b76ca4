/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BF16 in the tests' own words: written apart from the product's, so that a mistake in one is seen by the other.
 */
#ifndef MOK_TESTS_PLAIN_BF16_H
#define MOK_TESTS_PLAIN_BF16_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float bf16_to_float(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

/* Nearest, ties to even; a NaN stays one. */
static inline uint16_t bf16_from_float(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
    if (isnan(value))
        return (uint16_t)(wide >> 16 | 0x40u);
    uint32_t kept = wide >> 16, dropped = wide & 0xffffu;
    if (dropped > 0x8000u || (dropped == 0x8000u && (kept & 1u)))
        kept++;
    return (uint16_t)kept;
}

static inline float bf16_round(float value)
{
    return bf16_to_float(bf16_from_float(value));
}

#endif
