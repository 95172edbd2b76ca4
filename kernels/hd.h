/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole-number helpers that the host and a CUDA device share; MOK_HD (bits.h) marks such functions.
 */
#ifndef MOK_KERNELS_HD_H
#define MOK_KERNELS_HD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bits.h"

MOK_HD uint64_t mok_round_up(uint64_t value, uint64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

MOK_HD uint64_t mok_round_down(uint64_t value, uint64_t multiple)
{
    return value / multiple * multiple;
}

MOK_HD uint64_t mok_div_up(uint64_t value, uint64_t divisor)
{
    return (value + divisor - 1) / divisor;
}

MOK_HD uint64_t mok_min_u64(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

MOK_HD uint64_t mok_max_u64(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

#endif
