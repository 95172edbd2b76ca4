/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Looks at MXFP8 weights' scales before the forward multiplies: of each tile of 256 columns and k-block, the scale that
 * all columns of either half have, if they have one. So the products read 16 bytes of a tile's scales, not 1,024.
 */
#include <cuda_runtime.h>

#include "launch.cuh"
#include "layout.h"
#include "mx.h"
#include "ptx.cuh"

namespace mok
{
namespace
{

constexpr uint32_t pairs_warps = 8, pairs_threads = 32 * pairs_warps;
constexpr uint32_t pairs_half_warps = pairs_warps / 2, pairs_rows = MOK_TILE_N / pairs_warps; /* a warp's */
/* What each warp has seen of 32 k-blocks; then whether a half had more than one scale. */
constexpr uint32_t pairs_uneven = pairs_threads * 4, pairs_bytes = pairs_uneven + 8;

/* Columns of a tile are rows of a weight: of one matrix, or for gate and up of one each. */
struct pairs_half {
    const uint8_t *scale; /* of the expert */
    uint32_t first, rows, row_scales;
};

/* The first of some columns' scales in k-block k, and beside it, from bit 8 on, 0 if all have it. */
__device__ __forceinline__ uint32_t pairs_look(const pairs_half &h, uint32_t column, uint32_t k)
{
    uint32_t code[pairs_rows], others = 0;
#pragma unroll
    for (uint32_t i = 0; i < pairs_rows; i++) /* columns past the edge multiply nothing that is stored */
        code[i] = __ldg(h.scale + static_cast<uint64_t>(min(h.first + column + i, h.rows - 1)) * h.row_scales + 4 * k);
#pragma unroll
    for (uint32_t i = 1; i < pairs_rows; i++)
        others |= code[i] ^ code[0];
    return code[0] | others << 8;
}

__global__ void __launch_bounds__(pairs_threads) pairs_kernel(const __grid_constant__ mok_cuda_pairs_args a)
{
    const bool down = blockIdx.x >= a.tiles;
    const uint32_t tile = down ? blockIdx.x - a.tiles : blockIdx.x, expert = blockIdx.y;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, half = warp / pairs_half_warps;
    const uint32_t rows = down ? a.hidden : a.inter, values = down ? a.inter : a.hidden;
    const uint32_t row_scales = (values + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK, k_blocks = (values + MOK_MX_TILE_K - 1) / MOK_MX_TILE_K;
    const uint8_t *scale = down ? a.down_scale : half ? a.up_scale : a.gate_scale;
    const pairs_half mine = { scale + static_cast<uint64_t>(expert) * rows * row_scales,
                              down ? tile * MOK_TILE_N + half * (MOK_TILE_N / 2) : tile * (MOK_TILE_N / 2), rows, row_scales };
    mok_cuda_mx_pair *to = (down ? a.down + (static_cast<uint64_t>(expert) * a.down_tiles + tile) * k_blocks :
                                   a.gate_up + (static_cast<uint64_t>(expert) * a.tiles + tile) * k_blocks);
    uint32_t *seen = reinterpret_cast<uint32_t *>(dynamic_shared()), *uneven = seen + pairs_uneven / 4;

    let_next_kernel_start(); /* the kernel before, which does so once all before it is over, makes nothing that this one reads */
    if (!__ldcg(a.bad_id)) {
        bool several = false;
        for (uint32_t first = 0; first < k_blocks; first += 32) {
            const uint32_t k = first + lane;
            if (k < k_blocks)
                seen[threadIdx.x] = pairs_look(mine, warp % pairs_half_warps * pairs_rows, k);
            __syncthreads();
            if (warp < 2 && k < k_blocks) { /* puts half number `warp` together */
                const uint32_t *of = seen + warp * pairs_half_warps * 32 + lane;
                uint32_t others = 0;
                for (uint32_t w = 0; w < pairs_half_warps; w++)
                    others |= of[32 * w] ^ (of[0] & 0xffu);
                to[k].half[warp] = others ? 0.0f : mok_e8m0_to_f32(static_cast<uint8_t>(of[0]));
                several |= others != 0;
            }
            __syncthreads();
        }
        const bool some = __any_sync(~0u, several);
        if (warp < 2 && lane == 0)
            uneven[warp] = some;
        __syncthreads();
        if (threadIdx.x == 0)
            to[0].uneven = uneven[0] | uneven[1];
    }
    /* One block's wait keeps order transitive, as in quantize_kernel. */
    if (blockIdx.x == 0 && blockIdx.y == 0)
        wait_for_previous_kernel();
}

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_pairs(const mok_cuda_pairs_args *args, void *stream)
{
    return mok::launch(true, mok::pairs_kernel, dim3(args->tiles + args->down_tiles, args->experts), mok::pairs_threads,
                       mok::pairs_bytes, stream, *args);
}
