/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Turns MXFP8 weights, and rows for weight gradients, so that products along their rows find both operands side by side:
 * 8-bit products take nothing else. A tile of 128 x 128 gets the largest scale of its rows. Where they differ, codes of
 * the others are rounded anew: only values below 2^-6 of that scale lose anything.
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

constexpr uint32_t turn_threads = 256, turn_tile = 128;
/* The tile, then the scales of its rows, then what all threads must know. */
constexpr uint32_t turn_scales = turn_tile * turn_tile, turn_known = turn_scales + turn_tile,
                   turn_bytes = turn_known + 64;
/* Of rows, behind that: where each begins. */
constexpr uint32_t turn_places = turn_bytes, tokenwise_bytes = turn_places + turn_tile * 8;

struct turn_scale {
    uint32_t largest;
    bool even; /* all rows have it */
};

/* The tile's scale, from that of this thread's row, which may be past the edge; rows of NaN alone have none. */
__device__ __forceinline__ turn_scale turn_find(uint32_t code, bool real, uint8_t *memory)
{
    const uint32_t thread = threadIdx.x;
    uint32_t *known = reinterpret_cast<uint32_t *>(memory + turn_known);
    if (thread < turn_tile) {
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

/* Four codes that have a scale of their own, for the tile's. */
__device__ __forceinline__ uint32_t turn_codes(uint32_t codes, uint32_t own, uint32_t largest)
{
    if (own == largest)
        return codes;
    if (own == MOK_E8M0_NAN)
        return 0x7f7f7f7fu;
    const uint32_t down = largest - own;
    const float factor = down < 127 ? __uint_as_float((127 - down) << 23) : 0.0f;
    float a, b, c, d;
    unpack_e4m3(codes, a, b);
    unpack_e4m3(codes >> 16, c, d);
    return pack_e4m3(__fmul_rn(a, factor), __fmul_rn(b, factor)) | pack_e4m3(__fmul_rn(c, factor), __fmul_rn(d, factor))
                                                                       << 16;
}

/* Four rows of four columns become four columns of four rows. */
__device__ __forceinline__ void turn_4(uint32_t (&v)[4])
{
    const uint32_t ab = __byte_perm(v[0], v[1], 0x5140), ab2 = __byte_perm(v[0], v[1], 0x7362);
    const uint32_t cd = __byte_perm(v[2], v[3], 0x5140), cd2 = __byte_perm(v[2], v[3], 0x7362);
    v[0] = __byte_perm(ab, cd, 0x5410);
    v[1] = __byte_perm(ab, cd, 0x7632);
    v[2] = __byte_perm(ab2, cd2, 0x5410);
    v[3] = __byte_perm(ab2, cd2, 0x7632);
}

/* 128 x 128 codes on their way through a block: four rows of 16 columns a thread. */
struct turn_tile_of {
    uint8_t *memory;
    uint32_t smem, chunk, quad;

    __device__ explicit turn_tile_of(uint8_t *at)
        : memory(at), smem(smem_address(at)), chunk(threadIdx.x % 8), quad(threadIdx.x / 8)
    {
    }

    /* `v`: this thread's codes; all threads call it once the scales are known. */
    __device__ __forceinline__ void put(uint4 (&v)[4], const turn_scale &s) const
    {
        if (!s.even) {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t own = memory[turn_scales + 4 * quad + i];
                v[i] = make_uint4(turn_codes(v[i].x, own, s.largest), turn_codes(v[i].y, own, s.largest),
                                  turn_codes(v[i].z, own, s.largest), turn_codes(v[i].w, own, s.largest));
            }
        }
        put_4(0, v[0].x, v[1].x, v[2].x, v[3].x);
        put_4(4, v[0].y, v[1].y, v[2].y, v[3].y);
        put_4(8, v[0].z, v[1].z, v[2].z, v[3].z);
        put_4(12, v[0].w, v[1].w, v[2].w, v[3].w);
        __syncthreads();
    }

    __device__ __forceinline__ void put_4(uint32_t first, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) const
    {
        uint32_t word[4] = { r0, r1, r2, r3 };
        turn_4(word);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            store_shared_4(smem + (16 * chunk + first + i) * turn_tile + (quad ^ (4 * chunk)) * 4, word[i]);
    }

    /* Column n of the tile, so many of which there are, begins at to + n * stride; of rows only those before `rows` leave. */
    __device__ __forceinline__ void leave(uint8_t *to, uint64_t stride, uint32_t columns, uint32_t rows) const
    {
#pragma unroll
        for (uint32_t i = 0; i < turn_tile; i += turn_threads / 8) {
            const uint32_t n = i + quad;
            if (n < columns && 16 * chunk < rows)
                *reinterpret_cast<uint4 *>(to + n * stride + 16 * chunk) =
                    load_shared_16(smem + n * turn_tile + (chunk ^ (n / 16)) * 16);
        }
    }
};

__global__ void __launch_bounds__(turn_threads) turn_kernel(const __grid_constant__ mok_cuda_turn_args a)
{
    const mok_cuda_turned &w = a.weight[blockIdx.z];
    const uint32_t across = 2 * ((w.columns + 2 * turn_tile - 1) / (2 * turn_tile)), expert = blockIdx.y;
    const uint32_t row = blockIdx.x / across * turn_tile, column = blockIdx.x % across * turn_tile;
    const turn_tile_of tile(dynamic_shared());
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (row >= w.rows || __ldcg(a.bad_id))
        return;

    const uint32_t c = column + 16 * tile.chunk;
    const uint8_t *from = w.code + static_cast<uint64_t>(expert) * w.rows * w.columns;
    uint4 v[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t r = row + 4 * tile.quad + i;
        v[i] = r < w.rows && c < w.columns
                   ? __ldcs(reinterpret_cast<const uint4 *>(from + static_cast<uint64_t>(r) * w.columns + c))
                   : make_uint4(0, 0, 0, 0);
    }
    const uint64_t scales = (w.columns + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK;
    const uint8_t *scale = w.scale + expert * w.rows * scales + min(column, w.columns - 1) / MOK_MX_BLOCK;
    const bool real = threadIdx.x < turn_tile && row + threadIdx.x < w.rows;
    const turn_scale s = turn_find(real ? __ldg(scale + (row + threadIdx.x) * scales) : 0, real, tile.memory);
    if (threadIdx.x == 0)
        w.to_scale[(static_cast<uint64_t>(expert) * ((w.rows + turn_tile - 1) / turn_tile) + row / turn_tile) * across +
                   column / turn_tile] = mok_e8m0_to_f32(static_cast<uint8_t>(s.largest));
    tile.put(v, s);
    tile.leave(w.to + static_cast<uint64_t>(expert) * w.rows * w.columns + static_cast<uint64_t>(column) * w.rows + row,
               w.rows, column < w.columns ? w.columns - column : 0, w.rows - row);
}

/* ---- rows, for weight gradients ---- */

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

__global__ void __launch_bounds__(turn_threads) tokenwise_kernel(const __grid_constant__ mok_cuda_tokenwise_args a)
{
    const mok_cuda_tokenwise &o = a.operand[blockIdx.z];
    const uint32_t block = blockIdx.x, column = blockIdx.y * turn_tile, thread = threadIdx.x;
    const turn_tile_of tile(dynamic_shared());
    uint64_t *places = reinterpret_cast<uint64_t *>(tile.memory + turn_places);
    wait_for_previous_kernel();
    if (column >= o.columns || __ldcg(a.bad_id))
        return;
    const turn_rows_of at = find_rows(a, block);
    if (at.rows == 0)
        return;

    const bool real = thread < at.rows;
    uint32_t code = 0;
    if (thread < turn_tile) {
        const uint64_t row = static_cast<uint64_t>(block) * turn_tile + min(thread, at.rows - 1);
        const uint8_t *from, *scale;
        if (o.rows != nullptr) {
            const uint64_t source = __ldcg(o.rows + at.padded + min(thread, at.rows - 1));
            from = source & 1u ? o.ring + row * a.x_row_bytes : reinterpret_cast<const uint8_t *>(source);
            scale = from + o.columns;
        } else {
            from = o.code + row * o.columns;
            scale = o.scale + row * a.h_scale_bytes;
        }
        places[thread] = reinterpret_cast<uint64_t>(from + column);
        code = real ? __ldcg(scale + column / MOK_MX_BLOCK) : 0;
    }
    const turn_scale s = turn_find(code, real, tile.memory);
    uint4 v[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t r = 4 * tile.quad + i;
        v[i] = r < at.rows && column + 16 * tile.chunk < o.columns
                   ? __ldcg(reinterpret_cast<const uint4 *>(places[r] + 16 * tile.chunk))
                   : make_uint4(0, 0, 0, 0);
    }
    if (thread == 0)
        o.to_scale[static_cast<uint64_t>(block) * ((o.columns + turn_tile - 1) / turn_tile) + blockIdx.y] =
            mok_e8m0_to_f32(static_cast<uint8_t>(s.largest));
    tile.put(v, s);
    tile.leave(o.to + static_cast<uint64_t>(column) * a.ring_rows + block * turn_tile, a.ring_rows, o.columns - column,
               turn_tile);
}

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_turn(const mok_cuda_turn_args *args, void *stream)
{
    uint32_t tiles = 0;
    for (uint32_t i = 0; i < 3; i++) {
        const mok_cuda_turned &w = args->weight[i];
        const uint32_t n = (w.rows + mok::turn_tile - 1) / mok::turn_tile * 2 *
                           ((w.columns + 2 * mok::turn_tile - 1) / (2 * mok::turn_tile));
        tiles = n > tiles ? n : tiles;
    }
    return mok::launch(true, mok::turn_kernel, dim3(tiles, args->experts, 3), mok::turn_threads, mok::turn_bytes,
                       stream, *args);
}

extern "C" int mok_cuda_launch_tokenwise(const mok_cuda_tokenwise_args *args, void *stream)
{
    uint32_t columns = 0;
    for (uint32_t i = 0; i < MOK_TOKENWISE; i++)
        columns = args->operand[i].columns > columns ? args->operand[i].columns : columns;
    const dim3 grid(args->ring_rows / mok::turn_tile, (columns + mok::turn_tile - 1) / mok::turn_tile, MOK_TOKENWISE);
    return mok::launch(true, mok::tokenwise_kernel, grid, mok::turn_threads, mok::tokenwise_bytes, stream, *args);
}
