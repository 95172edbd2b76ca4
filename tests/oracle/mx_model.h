/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A model of OCP MX quantisation to E4M3 by search: every code is decoded exactly in FP64 and the nearest one taken.
 * Far too slow to use, and far too plain to be wrong in the same way as the product.
 */
#ifndef MOK_TESTS_MX_MODEL_H
#define MOK_TESTS_MX_MODEL_H

#include <stddef.h>
#include <stdint.h>

#define MX_MODEL_MIN_EXPONENT (-127)
#define MX_MODEL_MAX_EXPONENT 127

/* The value of an E4M3 code: 1 sign, 4 exponent (bias 7), 3 mantissa bits; 0x7f and 0xff are NaN, there is no Inf. */
double mx_model_decode(uint8_t code);
/* The code nearest to `value`: ties to the even code, beyond 448 saturated; NaN gives 0x7f with the sign. */
uint8_t mx_model_encode(double value);
/* Smallest e in -127..127 with amax <= 448 * 2^e; -127 for 0. */
int mx_model_exponent(double amax);
/* Largest finite magnitude of `count` BF16 values. */
double mx_model_amax(const uint16_t *values, size_t count);

/* Replaces `count` values by what quantising them in groups of `group` and back gives; the last group may be short. */
void mx_model_round(float *values, size_t count, uint32_t group);
/* The same for [rows][columns] values in tiles of `group` rows and columns; tiles at the edges may be short. */
void mx_model_round_tiles(float *values, size_t rows, size_t columns, uint32_t group);

#endif
