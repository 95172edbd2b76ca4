/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the client's kernel needs beyond the language: its dynamic shared memory, and the instruction that makes E4M3
 * codes. The emulated GPU of the tests has functions of the same names in the place of this file.
 */
#ifndef MOK_CLIENT_INSTRUCTIONS_CUH
#define MOK_CLIENT_INSTRUCTIONS_CUH

#include <stdint.h>

namespace mok
{

__device__ __forceinline__ uint8_t *dynamic_shared()
{
    extern __shared__ __align__(1024) uint8_t mok_dynamic_shared[];
    return mok_dynamic_shared;
}

/* Two E4M3 codes, lo in the low byte; to nearest even, saturated. NaN gives a NaN of any sign, Inf the largest number. */
__device__ __forceinline__ uint32_t pack_e4m3(float lo, float hi)
{
    uint16_t r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
}

} // namespace mok
#endif
