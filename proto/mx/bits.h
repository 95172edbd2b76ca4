/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MOK_HD marks small functions that the host and a CUDA device share; everything marked so compiles as C and as
 * CUDA C and keeps no state. Here: binary32 values as bits.
 */
#ifndef MOK_MX_BITS_H
#define MOK_MX_BITS_H

#include <stdint.h>

#if defined(__CUDACC__)
#define MOK_HD __host__ __device__ static inline
#else
#define MOK_HD static inline
#endif

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
