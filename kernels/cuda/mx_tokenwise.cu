/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turns a macrobatch's rows for MXFP8 weight gradients, whose products run over tokens: a tile of 128 rows of an expert and
 * 128 columns, or of 32 and 32, gets the largest scale of its rows, as a weight that is turned. Rows that fill up the last
 * 128 are zeros.
 */
#include <cuda_runtime.h>

#include "launch.cuh"
#include "layout.h"
#include "mx_turn.cuh"

namespace mok
{
namespace
{

/* 128 x 128 codes, then where their rows begin, for each tile's columns the rows' scales, and the largest of each warp's. */
constexpr uint32_t most_tiles = turn_tile / MOK_MX_BLOCK; /* of scales, beside each other among 128 columns */
constexpr uint32_t row_places = turn_tile * turn_tile, row_scales = row_places + turn_tile * 8,
                   warp_scales = row_scales + most_tiles * turn_tile, found_rows = warp_scales + most_tiles * 16,
                   tokenwise_bytes = found_rows + 16;

/* The 128 rows of a ring that begin at `block`: the run that has them, its first row among them, and how many it has there. */
struct turn_rows_of {
    uint64_t padded;
    uint32_t rows;
};

__device__ __forceinline__ turn_rows_of find_rows(const mok_cuda_tokenwise_args &a, uint32_t block)
{
    const uint32_t count = __ldcg(&a.head->runs), lane = threadIdx.x % 32;
    for (uint32_t first = 0; first < count; first += 32) {
        uint4 lo = make_uint4(0, 0, 0, ~0u), hi = make_uint4(0, 0, 0, 0); /* struct mok_cuda_run */
        if (first + lane < count) {
            const uint4 *at = reinterpret_cast<const uint4 *>(a.runs + first + lane);
            lo = __ldcg(at);
            hi = __ldcg(at + 1);
        }
        const uint32_t skip = block * turn_tile - lo.y * 64; /* rows of the run before these; huge where it comes later */
        const bool has = !(lo.w >> 31) && hi.x == a.macrobatch && skip < lo.z;
        const uint32_t votes = __ballot_sync(~0u, has);
        if (votes != 0) {
            const int32_t who = __ffs(static_cast<int32_t>(votes)) - 1;
            const uint32_t row64 = __shfl_sync(~0u, lo.x, who), rows = __shfl_sync(~0u, lo.z, who);
            const uint32_t before = __shfl_sync(~0u, skip, who);
            return { row64 * 64ull + before, min(rows - before, turn_tile) };
        }
    }
    return { 0, 0 };
}

/*
 * The same for all threads of a block; none where there is nothing to do. One warp looks it up: everybody reads the same
 * few lines of memory, and those hold all blocks up where each warp asks for them.
 */
__device__ __forceinline__ turn_rows_of find_rows_once(const mok_cuda_tokenwise_args &a, uint32_t block,
                                                       uint8_t *memory)
{
    turn_rows_of *found = reinterpret_cast<turn_rows_of *>(memory + found_rows);
    if (threadIdx.x < 32) {
        const uint64_t first = static_cast<uint64_t>(a.macrobatch) * a.ring_rows + block * turn_tile;
        const bool none = first >= __ldcg(&a.head->padded_rows) || __ldcg(a.bad_id);
        const turn_rows_of at = none ? turn_rows_of{} : find_rows(a, block);
        if (threadIdx.x == 0)
            *found = at;
    }
    __syncthreads();
    return *found;
}

/* Where row `r` of the 128 begins, and its scales of the 128 columns. */
struct row_at {
    const uint8_t *codes, *scale;
};

__device__ __forceinline__ row_at find_row(const mok_cuda_tokenwise_args &a, const mok_cuda_tokenwise &o, uint32_t block,
                                           uint32_t column, uint64_t padded, uint32_t r)
{
    const uint64_t row = static_cast<uint64_t>(block) * turn_tile + r;
    if (o.rows == nullptr)
        return { o.code + row * o.columns + column, o.scale + row * a.h_scale_bytes + column / MOK_MX_BLOCK };
    const uint64_t source = __ldcg(o.rows + padded + r);
    const uint8_t *from = source & 1u ? o.ring + row * a.x_row_bytes : reinterpret_cast<const uint8_t *>(source);
    return { from + column, from + o.columns + column / MOK_MX_BLOCK };
}

/*
 * Tiles of Scale x Scale codes: each one's largest scale is that of its rows, NaN aside. A thread knows one row's, a byte for each
 * tile beside the other; a warp's rows are a tile's, or a quarter of them.
 */
template <uint32_t Scale> struct tile_scales {
    static constexpr uint32_t count = turn_tile / Scale;
    uint8_t *memory;

    __device__ __forceinline__ void find(uint32_t codes) const
    {
        const uint32_t thread = threadIdx.x;
        if (thread < turn_tile) {
#pragma unroll
            for (uint32_t i = 0; i < count; i++) {
                const uint32_t code = count == 1 ? codes : codes >> 8 * i & 0xffu;
                const uint32_t largest = __reduce_max_sync(~0u, code == MOK_E8M0_NAN ? 0u : code);
                memory[row_scales + i * turn_tile + thread] = static_cast<uint8_t>(code);
                if (thread % 32 == 0)
                    of_warps(i)[thread / 32] = largest;
            }
        }
        __syncthreads();
    }
    __device__ __forceinline__ uint32_t *of_warps(uint32_t across) const
    {
        return reinterpret_cast<uint32_t *>(memory + warp_scales) + 4 * across;
    }
    __device__ __forceinline__ uint32_t largest(uint32_t down, uint32_t across) const
    {
        const uint32_t *of = of_warps(across);
        return count == 1 ? max(max(of[0], of[1]), max(of[2], of[3])) : of[down];
    }
    __device__ __forceinline__ uint32_t of_row(uint32_t row, uint32_t across) const
    {
        return memory[row_scales + across * turn_tile + row];
    }
    /* To the operand's, of the 128 x 128 codes at (block, column_tile). */
    __device__ __forceinline__ void leave(const mok_cuda_tokenwise &o, uint32_t block, uint32_t column_tile) const
    {
        const uint32_t down = threadIdx.x / count, across = threadIdx.x % count, tiles = (o.columns + Scale - 1) / Scale;
        if (down < count && column_tile * count + across < tiles)
            o.to_scale[static_cast<uint64_t>(block * count + down) * tiles + column_tile * count + across] =
                mok_e8m0_to_f32(static_cast<uint8_t>(largest(down, across)));
    }
};

/* A row's scales of the 128 columns that `scale` is the first of: all the same, or four bytes. */
template <uint32_t Scale> __device__ __forceinline__ uint32_t load_scales(const uint8_t *scale)
{
    return Scale == turn_tile ? __ldcg(scale) : __ldcg(reinterpret_cast<const uint32_t *>(scale));
}

__host__ __device__ __forceinline__ uint32_t tiles_of(const mok_cuda_tokenwise &o)
{
    return (o.columns + turn_tile - 1) / turn_tile;
}

/* A block turns so many tiles beside each other: codes of the next one come while one is turned. */
constexpr uint32_t tiles_beside = 4;

__host__ __device__ __forceinline__ uint32_t groups_of(const mok_cuda_tokenwise &o)
{
    return (tiles_of(o) + tiles_beside - 1) / tiles_beside;
}

/* This thread's codes of a tile: four rows of 16 columns. */
struct tile_rows {
    const uint8_t *from[4]; /* NULL: no row, zeros */

    __device__ __forceinline__ void load(uint4 (&v)[4], bool real, uint32_t column) const
    {
#pragma unroll
        for (uint32_t r = 0; r < 4; r++)
            v[r] = real && from[r] != nullptr ? __ldcg(reinterpret_cast<const uint4 *>(from[r] + column)) :
                                                make_uint4(0, 0, 0, 0);
    }
};

template <uint32_t Scale>
__global__ void __launch_bounds__(turn_threads) tokenwise_kernel(const __grid_constant__ mok_cuda_tokenwise_args a)
{
    const uint32_t block = blockIdx.x, thread = threadIdx.x;
    uint32_t operand = 0, group = blockIdx.y; /* the operands' groups, one operand behind the other */
    for (; group >= groups_of(a.operand[operand]); operand++)
        group -= groups_of(a.operand[operand]);
    const mok_cuda_tokenwise &o = a.operand[operand];
    const uint32_t first = group * tiles_beside, tiles = min(tiles_of(o) - first, tiles_beside);
    uint8_t *memory = dynamic_shared();
    const turned_tile tile(memory);
    const tile_scales<Scale> scales = { memory };
    uint64_t *places = reinterpret_cast<uint64_t *>(memory + row_places);
    wait_for_previous_kernel();
    const turn_rows_of at = find_rows_once(a, block, memory);
    if (at.rows == 0)
        return;

    uint32_t codes[tiles_beside] = {};
    if (thread < at.rows) {
        const row_at row = find_row(a, o, block, first * turn_tile, at.padded, thread);
        places[thread] = reinterpret_cast<uint64_t>(row.codes);
#pragma unroll
        for (uint32_t i = 0; i < tiles_beside; i++)
            if (i < tiles)
                codes[i] = load_scales<Scale>(row.scale + i * (turn_tile / MOK_MX_BLOCK));
    }
    __syncthreads();
    tile_rows rows;
#pragma unroll
    for (uint32_t r = 0; r < 4; r++) {
        const uint32_t own = 4 * tile.quad + r;
        rows.from[r] = own < at.rows ? reinterpret_cast<const uint8_t *>(places[own]) + 16 * tile.chunk : nullptr;
    }
    const uint32_t column = first * turn_tile + 16 * tile.chunk; /* of this thread, in the first tile */
    uint4 next[4];
    rows.load(next, column < o.columns, 0);
#pragma unroll
    for (uint32_t i = 0; i < tiles_beside; i++) {
        if (i >= tiles)
            break;
        scales.find(codes[i]);
        const uint32_t across = 16 * tile.chunk / Scale, largest = scales.largest(4 * tile.quad / Scale, across);
        uint4 v[4];
#pragma unroll
        for (uint32_t r = 0; r < 4; r++)
            v[r] = next[r];
        if (i + 1 < tiles)
            rows.load(next, column + (i + 1) * turn_tile < o.columns, (i + 1) * turn_tile);
#pragma unroll
        for (uint32_t r = 0; r < 4; r++)
            v[r] = rescale(scales.of_row(4 * tile.quad + r, across), largest).turn(v[r]);
        scales.leave(o, block, first + i);
        tile.put(v);
        const uint32_t to = (first + i) * turn_tile;
        tile.leave(o.to + static_cast<uint64_t>(to) * a.ring_rows + block * turn_tile, a.ring_rows, o.columns - to,
                   turn_tile);
    }
}

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_tokenwise(const mok_cuda_tokenwise_args *args, void *stream)
{
    uint32_t tiles = 0;
    for (const mok_cuda_tokenwise &o : args->operand)
        tiles += mok::groups_of(o);
    const dim3 grid(args->ring_rows / mok::turn_tile, tiles);
    const auto kernel = args->per32 ? mok::tokenwise_kernel<32> : mok::tokenwise_kernel<128>;
    return mok::launch(true, kernel, grid, mok::turn_threads, mok::tokenwise_bytes, stream, *args);
}
