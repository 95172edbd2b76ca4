/* SPDX-License-Identifier: Apache-2.0 */
/*
 * AdamW (Loshchilov, Hutter 2019) on FP32 master parameters: element-wise, so that any split of the parameters over
 * ranks gives the same bits.
 */
#ifndef EXAMPLE_OPTIMIZER_H
#define EXAMPLE_OPTIMIZER_H

#include <stddef.h>
#include <stdint.h>

struct adamw {
    float rate; /* learning rate before warm-up */
    float beta1, beta2, epsilon;
    float decay;     /* weight decay, times the rate */
    uint64_t warmup; /* steps of linear warm-up */
};

/* Usual constants, decay 0.01, ten steps of warm-up. */
struct adamw adamw_default(float rate);

/* One parameter tensor with its two moments. */
struct adamw_tensor {
    float *value, *first, *second;
    size_t count;
};

/* What a step's number comes to: the rate, and the divisors that correct the moments' start at 0. */
struct adamw_scales {
    float rate, first, second, keep;
};
struct adamw_scales adamw_scales(const struct adamw *adamw, uint64_t step, int decay);

/* Applies step number `step` (from 1) with gradient[count]; `decay` false for gains and biases. */
void adamw_step(const struct adamw *adamw, uint64_t step, int decay, const struct adamw_tensor *tensor,
                const float *gradient);

#endif
