/* SPDX-License-Identifier: Apache-2.0 */
/* How the matrix instruction is told where an operand lies in shared memory. Arithmetic only: the emulator uses it too. */
#ifndef MOK_CUDA_DESCRIPTOR_CUH
#define MOK_CUDA_DESCRIPTOR_CUH

#include <stdint.h>

namespace mok
{

/*
 * K-major tile, rows of 128 bytes, 128-byte swizzle, eight-row groups 1,024 bytes apart; `address` is 1,024-aligned.
 * 16 BF16 further along K is +2 (in units of 16 bytes).
 */
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address)
{
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

/*
 * MN-major tile (rows are K): blocks of 64 columns `block_bytes` apart, in each the K rows of 128 bytes one behind the
 * other, 128-byte swizzle; `address` is 1,024-aligned. 16 rows further along K is +128 (in units of 16 bytes).
 */
__device__ __forceinline__ uint64_t wgmma_descriptor_mn(uint32_t address, uint32_t block_bytes)
{
    return static_cast<uint64_t>((address & 0x3ffffu) >> 4) | (static_cast<uint64_t>(block_bytes >> 4) << 16) |
           (64ull << 32) | (1ull << 62);
}

} // namespace mok
#endif
