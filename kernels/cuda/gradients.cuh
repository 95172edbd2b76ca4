/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BF16 weight gradients: tiles of 128 hidden by 256 intermediate columns on their way into the sums and out of them. What is
 * stored comes through the stages, 64 intermediate columns each. Knows no runs and no tasks.
 */
#ifndef MOK_CUDA_GRADIENTS_CUH
#define MOK_CUDA_GRADIENTS_CUH

#include "consumer.cuh"

namespace mok
{
namespace
{

/* Where a block's tile lies in one matrix: its first hidden and intermediate columns. */
struct bf16_place {
    __nv_bfloat16 *rows;
    uint32_t inter, first_hidden, first_inter;
};

/*
 * d from the next four stages. `Down`: rows of the tile are rows there, 128 of 64 columns; otherwise they are columns there,
 * two boxes of 64 rows of 64.
 */
template <bool Down> __device__ void load_bf16(consumer_base &c, float (&d)[128])
{
    constexpr uint32_t box_bytes = 64 * 128;
    const uint32_t m0 = c.warp * 16 + c.lane / 4;
#pragma unroll
    for (uint32_t q = 0; q < 4; q++, c.pipe.n++) {
        const uint32_t stage = c.pipe.stage(), tile = c.b.smem + b_offset + stage * MOK_B_BYTES;
        mbar_wait(c.b.full(stage), c.pipe.phase());
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t m = m0 + 8 * (i / 2), n = 8 * j + 2 * (c.lane % 4) + i % 2;
                const uint32_t line = Down ? m * 128 : m / 64 * box_bytes + n * 128;
                const uint32_t value = Down ? n : m % 64, key = Down ? m % 8 : n % 8;
                const uint32_t two = load_shared_4(tile + line + (((value / 8) ^ key) * 16) + value % 8 / 2 * 4);
                d[32 * q + 4 * j + i] = __uint_as_float(value % 2 ? two & 0xffff0000u : two << 16);
            }
        __syncwarp();
        c.release(stage);
    }
}

/* Rows of the gradient are rows of the tile. */
__device__ void store_bf16_down(consumer_base &c, float (&d)[128], const bf16_place &to)
{
    const uint32_t row = to.first_hidden + c.warp * 16 + c.lane;
    __nv_bfloat16 *const line = to.rows + static_cast<uint64_t>(row) * to.inter;
#pragma unroll 1
    for (uint32_t q = 0; q < 2; q++, c.shift<64>(d)) {
        const uint32_t at = to.first_inter + 128 * q;
        if (at >= to.inter)
            return;
        c.store<true>(c.lane < 16 && row < c.all.hidden ? line + at : nullptr, min(to.inter - at, 128u) * 2,
                      [&](uint32_t j, uint32_t half) {
                          const uint32_t i = 4 * j + 2 * half;
                          return pack_bf16(d[i], d[i + 1]);
                      });
    }
}

/* Rows of the gradient are columns of the tile: 64 of them at a time, a sector each. */
__device__ void store_bf16_across(consumer_base &c, float (&d)[128], const bf16_place &to)
{
    constexpr uint32_t line = 16 * sizeof(__nv_bfloat16) + 16; /* and 16 bytes, so that eight rows fall on different banks */
    static_assert(64 * line <= MOK_WARP_STAGE_BYTES, "64 lines fit the staging rows");
    const uint32_t column = to.first_hidden + c.warp * 16 + c.lane % 2 * 8;
    /* of four matrices: rows 0..7, then 8..15 of the tile, of eight columns and of the next eight */
    const uint32_t at = c.stage() + ((c.lane >> 4) * 8 + c.lane % 8) * line + (c.lane >> 3 & 1u) * 16;
#pragma unroll 1
    for (uint32_t q = 0; q < 4; q++, c.shift<32>(d)) {
        const uint32_t first = to.first_inter + 64 * q;
        if (first >= to.inter)
            return;
        __syncwarp();
#pragma unroll
        for (uint32_t j = 0; j < 8; j += 2) {
            const uint32_t i = 4 * j;
            stmatrix_x4_transposed(at + 8 * j * line, pack_bf16(d[i], d[i + 1]), pack_bf16(d[i + 2], d[i + 3]),
                                   pack_bf16(d[i + 4], d[i + 5]), pack_bf16(d[i + 6], d[i + 7]));
        }
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 64; i += 16) {
            const uint32_t r = i + c.lane / 2;
            uint4 v = load_shared_16(c.stage() + r * line + c.lane % 2 * 16);
            if (column < c.all.hidden && first + r < to.inter)
                __stcs(reinterpret_cast<uint4 *>(to.rows + static_cast<uint64_t>(first + r) * c.all.hidden + column), v);
        }
    }
    __syncwarp();
}

} // namespace
} // namespace mok
#endif
