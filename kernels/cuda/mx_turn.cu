/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turns MXFP8 weights, so that products along their rows find both operands side by side: 8-bit products take nothing
 * else. A tile of 128 x 128, or of 32 x 32, gets the largest scale of its rows. Where they differ, codes of the others are
 * rounded anew: only values below 2^-6 of that scale lose anything. Of weights that come
 * turned, tiles' scales are found alone.
 */
#include <algorithm>

#include <cuda_runtime.h>

#include "launch.cuh"
#include "layout.h"
#include "mx_turn.cuh"

namespace mok
{
namespace
{

/* The tile, then the scales of its rows, of each 32 columns' if they have their own, then what all threads must know. */
constexpr uint32_t turn_blocks = turn_tile / MOK_MX_BLOCK;
constexpr uint32_t turn_scales = turn_tile * turn_tile, turn_known = turn_scales + turn_tile * turn_blocks,
                   turn_bytes = turn_known + 64;

/* Tiles of a weight one below the other, and beside each other, these in pairs. */
__host__ __device__ __forceinline__ uint32_t turn_down(uint32_t rows)
{
    return (rows + turn_tile - 1) / turn_tile;
}
__host__ __device__ __forceinline__ uint32_t turn_across(uint32_t columns)
{
    return 2 * ((columns + 2 * turn_tile - 1) / (2 * turn_tile));
}

struct turn_scale {
    uint32_t largest;
    bool even; /* all rows have it */
};

/* The tile's scale; rows of NaN alone have none. */
__device__ __forceinline__ turn_scale turn_find(const mok_cuda_turned &w, const uint8_t *scale, uint32_t row,
                                                uint8_t *memory)
{
    const uint32_t thread = threadIdx.x, r = row + thread;
    uint32_t *known = reinterpret_cast<uint32_t *>(memory + turn_known);
    if (thread < turn_tile) {
        const bool real = r < w.rows;
        const uint32_t code =
            real ? __ldg(scale + static_cast<uint64_t>(r) * ((w.columns + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK)) : 0;
        memory[turn_scales + thread] = static_cast<uint8_t>(code);
        const uint32_t largest = __reduce_max_sync(~0u, code == MOK_E8M0_NAN ? 0u : code);
        const uint32_t least = __reduce_min_sync(~0u, real ? code : 254u), most = __reduce_max_sync(~0u, code);
        if (thread % 32 == 0) {
            known[thread / 32] = largest;
            known[4 + thread / 32] = least;
            known[8 + thread / 32] = most;
        }
    }
    __syncthreads();
    const uint32_t largest = max(max(known[0], known[1]), max(known[2], known[3]));
    const uint32_t least = min(min(known[4], known[5]), min(known[6], known[7]));
    const uint32_t most = max(max(known[8], known[9]), max(known[10], known[11]));
    return { largest, least >= most && most != MOK_E8M0_NAN };
}

/*
 * The same for tiles of 32 x 32, which lie in blocks of 32 columns: a warp finds two of them, and tells them to the columns of the
 * turned weight. `scale`: of the expert; what is past the edge has none.
 */
__device__ __forceinline__ void turn_find_blocks(const mok_cuda_turned &w, const uint8_t *scale, uint8_t *to_scale, uint32_t row,
                                                 uint32_t column, uint8_t *memory)
{
    const uint32_t thread = threadIdx.x, lane = thread % 32, in = thread % turn_tile, r = row + in;
    const uint32_t from_count = (w.columns + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK, to_count = (w.rows + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK;
#pragma unroll
    for (uint32_t i = thread / turn_tile; i < turn_blocks; i += turn_threads / turn_tile) {
        const uint32_t block = column / MOK_MX_BLOCK + i, c = column + i * MOK_MX_BLOCK + lane;
        const bool real = r < w.rows && block < from_count;
        const uint32_t code = real ? __ldg(scale + static_cast<uint64_t>(r) * from_count + block) : 0;
        const uint32_t largest = __reduce_max_sync(~0u, code == MOK_E8M0_NAN ? 0u : code);
        memory[turn_scales + i * turn_tile + in] = static_cast<uint8_t>(code);
        memory[turn_known + i * turn_blocks + in / MOK_MX_BLOCK] = static_cast<uint8_t>(largest); /* all lanes the same */
        if (c < w.columns && row + in / MOK_MX_BLOCK * MOK_MX_BLOCK < w.rows)
            to_scale[static_cast<uint64_t>(c) * to_count + r / MOK_MX_BLOCK] = static_cast<uint8_t>(largest);
    }
    __syncthreads();
}

/* A block's share of tiles' scales: 32 beside each other, of 128 rows, sixteen a warp. */
constexpr uint32_t tile_lanes = 32, tile_warps = turn_threads / tile_lanes, tile_warp_rows = turn_tile / tile_warps;

/* Scales of tiles whose codes came turned: such a tile must have one. */
__global__ void __launch_bounds__(turn_threads) tile_scale_kernel(const __grid_constant__ mok_cuda_turn_args a)
{
    const mok_cuda_turned &w = a.weight[blockIdx.z];
    const uint32_t across = turn_across(w.columns), groups = (across + tile_lanes - 1) / tile_lanes;
    const uint32_t row = blockIdx.x / groups * turn_tile, expert = blockIdx.y;
    const uint32_t warp = threadIdx.x / tile_lanes, lane = threadIdx.x % tile_lanes;
    const uint32_t tile = blockIdx.x % groups * tile_lanes + lane;
    uint8_t *least = dynamic_shared(), *most = least + turn_threads; /* of each warp's rows */
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (row >= w.rows || __ldcg(a.bad_id))
        return;

    const uint32_t scales = (w.columns + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK;
    const uint8_t *from = w.scale + static_cast<uint64_t>(expert) * w.rows * scales +
                          min(tile * turn_tile, w.columns - 1) / MOK_MX_BLOCK;
    uint32_t low = MOK_E8M0_NAN, high = 0;
#pragma unroll
    for (uint32_t i = 0; i < tile_warp_rows; i++) {
        const uint32_t r = min(row + warp * tile_warp_rows + i, w.rows - 1); /* of the same tile: row is real */
        const uint32_t code = __ldg(from + static_cast<uint64_t>(r) * scales);
        low = min(low, code);
        high = max(high, code);
    }
    least[threadIdx.x] = static_cast<uint8_t>(low);
    most[threadIdx.x] = static_cast<uint8_t>(high);
    __syncthreads();
    if (warp != 0 || tile >= across)
        return;
    for (uint32_t i = 1; i < tile_warps; i++) {
        low = min(low, static_cast<uint32_t>(least[i * tile_lanes + lane]));
        high = max(high, static_cast<uint32_t>(most[i * tile_lanes + lane]));
    }
    static_cast<float *>(w.to_scale)[(static_cast<uint64_t>(expert) * turn_down(w.rows) + row / turn_tile) * across + tile] =
        mok_e8m0_to_f32(static_cast<uint8_t>(low == high ? low : MOK_E8M0_NAN));
}

template <bool Per32>
__global__ void __launch_bounds__(turn_threads) turn_kernel(const __grid_constant__ mok_cuda_turn_args a)
{
    const mok_cuda_turned &w = a.weight[blockIdx.z];
    const uint32_t across = turn_across(w.columns), expert = blockIdx.y;
    const uint32_t row = blockIdx.x / across * turn_tile, column = blockIdx.x % across * turn_tile;
    uint8_t *memory = dynamic_shared();
    const turned_tile tile(memory);
    const uint32_t thread = threadIdx.x, chunk = tile.chunk, quad = tile.quad;
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (row >= w.rows || __ldcg(a.bad_id))
        return;

    const uint32_t c = column + 16 * chunk;
    const uint8_t *from = w.code + static_cast<uint64_t>(expert) * w.rows * w.columns;
    uint4 v[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t r = row + 4 * quad + i;
        v[i] = r < w.rows && c < w.columns
                   ? __ldcs(reinterpret_cast<const uint4 *>(from + static_cast<uint64_t>(r) * w.columns + c))
                   : make_uint4(0, 0, 0, 0);
    }
    const uint64_t scales = (w.columns + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK;
    const uint8_t *scale = w.scale + expert * w.rows * scales;
    bool even = false;
    uint32_t largest;
    if (Per32) {
        const uint64_t to_scales = (w.rows + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK;
        turn_find_blocks(w, scale, static_cast<uint8_t *>(w.to_scale) + expert * w.columns * to_scales, row, column, memory);
        largest = memory[turn_known + chunk / 2 * turn_blocks + quad / 8];
    } else {
        const turn_scale s = turn_find(w, scale + min(column, w.columns - 1) / MOK_MX_BLOCK, row, memory);
        if (thread == 0)
            static_cast<float *>(w.to_scale)[(static_cast<uint64_t>(expert) * turn_down(w.rows) + row / turn_tile) * across +
                                              column / turn_tile] = mok_e8m0_to_f32(static_cast<uint8_t>(s.largest));
        even = s.even;
        largest = s.largest;
    }
    if (!even) {
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t own = memory[turn_scales + (Per32 ? chunk / 2 * turn_tile : 0) + 4 * quad + i];
            v[i] = rescale(own, largest).turn(v[i]);
        }
    }
    tile.put(v);
    tile.leave(w.to + static_cast<uint64_t>(expert) * w.rows * w.columns + static_cast<uint64_t>(column) * w.rows + row, w.rows,
               column < w.columns ? w.columns - column : 0, w.rows - row);
}

} // namespace
} // namespace mok

namespace
{

/* Blocks of the weight that has the most, each of `tiles` tiles beside each other. */
uint32_t grid_of(const mok_cuda_turn_args *args, uint32_t tiles)
{
    uint32_t most = 0;
    for (const mok_cuda_turned &w : args->weight)
        most = std::max(most, mok::turn_down(w.rows) * ((mok::turn_across(w.columns) + tiles - 1) / tiles));
    return most;
}

} // namespace

extern "C" int mok_cuda_launch_turn(const mok_cuda_turn_args *args, void *stream)
{
    return mok::launch(true, args->per32 ? mok::turn_kernel<true> : mok::turn_kernel<false>,
                       dim3(grid_of(args, 1), args->experts, 3), mok::turn_threads, mok::turn_bytes, stream, *args);
}

extern "C" int mok_cuda_launch_tile_scales(const mok_cuda_turn_args *args, void *stream)
{
    return mok::launch(true, mok::tile_scale_kernel, dim3(grid_of(args, mok::tile_lanes), args->experts, 3),
                       mok::turn_threads, 2 * mok::turn_threads, stream, *args);
}
