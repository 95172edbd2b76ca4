/* SPDX-License-Identifier: Apache-2.0 */
/*
 * FP32 to MXFP8 as the OCP Microscaling formats say: E4M3 elements, one E8M0 scale a block of 32 along a row.
 */
#ifndef EXAMPLE_MXFP8_H
#define EXAMPLE_MXFP8_H

#include <stddef.h>
#include <stdint.h>

#define MXFP8_BLOCK 32u

/* Scales of a row. */
static inline size_t mxfp8_scales(size_t length)
{
    return (length + MXFP8_BLOCK - 1) / MXFP8_BLOCK;
}

/* Nearest E4M3 value, ties to even, saturated at +-448; NaN and Inf become NaN. */
uint8_t mxfp8_element(float value);

/*
 * Quantises values[rows][length]. A group of `group` (32 or 128) values shares the smallest power of two, as scale,
 * that keeps its largest magnitude within 448; with 128, the group's four blocks store the same one.
 */
void mxfp8_quantize(size_t rows, size_t length, size_t group, const float *values, uint8_t *elements, uint8_t *scales);

#endif
