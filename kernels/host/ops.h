/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loops over the elements of a row: widening, narrowing, SwiGLU, sums. Built for several instruction sets; all of them
 * give the same bits, because nothing here is contracted or reordered.
 */
#ifndef MOK_KERNELS_HOST_OPS_H
#define MOK_KERNELS_HOST_OPS_H

#include <stddef.h>
#include <stdint.h>

void mok_ops_widen(float *ret, const uint16_t *bf16, size_t count);
/* The same, 16 values at a time, each 16 `stride` floats behind those before; count is a multiple of 16. */
void mok_ops_widen_panels(float *ret, size_t stride, const uint16_t *bf16, size_t count);
void mok_ops_copy_panels(float *ret, size_t stride, const float *value, size_t count);
/* ret[i][j] = value[j][i], j < 16; rows of value are `stride` floats apart; count is a multiple of 8. */
void mok_ops_transpose16(float *ret, const float *value, size_t stride, size_t count);
void mok_ops_narrow(uint16_t *ret, const float *value, size_t count);
/* ret = value * factor */
void mok_ops_scale(float *ret, const float *value, float factor, size_t count);
/* sum += factor * value, product and sum rounded one after the other */
void mok_ops_add_scaled(float *sum, float factor, const uint16_t *bf16, size_t count);
void mok_ops_add(float *sum, const uint16_t *bf16, size_t count);
/* in an order that depends on count alone */
float mok_ops_dot(const float *x, const float *y, size_t count);

/* a, b: FP32 sums; stored as BF16, and h computed from what is stored. ret_h may be a. */
void mok_ops_swiglu(const float *a, const float *b, float limit, uint16_t *ret_a, uint16_t *ret_b, float *ret_h,
                    size_t count);
/* u: unweighted gradient of h; weight: routing weight. */
void mok_ops_swiglu_backward(const float *u, const uint16_t *a, const uint16_t *b, float limit, float weight,
                             float *ret_h, float *ret_d_a, float *ret_d_b, size_t count);

/* MXFP8, see mx.h; group 32 or 128, the row begins at a multiple of it. */
void mok_ops_quantize(const float *value, size_t count, uint32_t group, uint8_t *ret_code, uint8_t *ret_scale);
/* Values that were codes, under `scale` now: one for 32 of them, none smaller than what they had. */
void mok_ops_reround(float *value, const uint8_t *scale, size_t count);
void mok_ops_dequantize(float *ret, const uint8_t *code, const uint8_t *scale, size_t count);

#endif
