/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MOK_HD marks small functions that the host and a CUDA device share; everything marked so compiles as C and as
 * CUDA C and keeps no state.
 */
#ifndef MOK_KERNELS_HD_H
#define MOK_KERNELS_HD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__CUDACC__)
#define MOK_HD __host__ __device__ static inline
#else
#define MOK_HD static inline
#endif

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

MOK_HD float mok_f32_from_bits(uint32_t bits)
{
#if defined(__CUDA_ARCH__)
    return __uint_as_float(bits);
#else
    union {
        uint32_t u;
        float f;
    } pun;
    pun.u = bits;
    return pun.f;
#endif
}

MOK_HD uint32_t mok_f32_bits(float value)
{
#if defined(__CUDA_ARCH__)
    return __float_as_uint(value);
#else
    union {
        uint32_t u;
        float f;
    } pun;
    pun.f = value;
    return pun.u;
#endif
}

#endif
