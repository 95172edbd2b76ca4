/* SPDX-License-Identifier: Apache-2.0 */
/* BF16 as device code sees it, on the CPU. */
#ifndef MOK_EMULATED_CUDA_BF16_H
#define MOK_EMULATED_CUDA_BF16_H

#include "cuda_runtime.h"

struct __nv_bfloat16 {
    uint16_t bits;
};

struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

inline float __bfloat162float(__nv_bfloat16 v)
{
    return __uint_as_float(static_cast<uint32_t>(v.bits) << 16);
}

inline __nv_bfloat16 __float2bfloat16_rn(float v)
{
    uint32_t u = __float_as_uint(v);

    if (v != v)
        return { 0x7fff };
    return { static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16) };
}

inline __nv_bfloat16 __float2bfloat16(float v)
{
    return __float2bfloat16_rn(v);
}

inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 v)
{
    return v.bits;
}

inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t v)
{
    return { v };
}

inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b)
{
    return { __float2bfloat16_rn(a), __float2bfloat16_rn(b) };
}

#endif
