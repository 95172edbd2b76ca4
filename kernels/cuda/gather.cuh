/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two warps a block fetch rows of tokens, wherever they lie, by 16-byte asynchronous copies, swizzled as the tensor
 * cores read them. Reads rows only; where they come from is the schedule's business.
 */
#ifndef MOK_CUDA_GATHER_CUH
#define MOK_CUDA_GATHER_CUH

#include "pipeline.cuh"

namespace mok
{
namespace
{

constexpr uint32_t gather_threads = MOK_GATHER_WARPS * 32;
constexpr uint32_t gather_step = gather_threads / 8; /* rows between a thread's rows */
constexpr uint32_t gather_rows = MOK_TILE_M / gather_step;

/* Says that this warp's copies of a stage have landed. */
__device__ __forceinline__ void gather_landed(const block_view &b, uint32_t stage, uint32_t lane)
{
    fence_async_shared();
    __syncwarp();
    if (lane == 0)
        mbar_arrive(b.full(stage));
}

/* A K-major tile of rows, all columns, one k-block after the other; src: this thread's 16 bytes of its rows. */
__device__ __forceinline__ void gather_columns(const mok_cuda_common &p, const block_view &b,
                                               const uint8_t *const (&src)[gather_rows], pipeline &pipe,
                                               uint32_t thread, uint32_t lane)
{
    const uint32_t chunk = thread % 8, row = thread / 8;
    const uint32_t dst = b.smem + a_offset + row * 128 + ((chunk ^ (row % 8)) * 16);
    for (uint32_t k = 0; k < p.k_blocks; k++, pipe.n++) {
        uint32_t stage = pipe.stage(), bytes = k * MOK_TILE_K + chunk * 8 < p.hidden ? 16 : 0;
        uint32_t to = dst + stage * MOK_A_BYTES, skip = bytes ? k * 128 : 0;
        mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
#pragma unroll
        for (uint32_t i = 0; i < gather_rows; i++)
            cp_async_16(to + i * gather_step * 128, src[i] + skip, bytes);
        cp_async_commit();
        if (k > 0) {
            cp_async_wait<1>();
            gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
        }
    }
    cp_async_wait<0>();
    gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
}

/*
 * The unit's rows as a K-major tile, all columns one k-block after the other. `table`: where each padded row comes from
 * (bit 0: it was pulled); `ring`: where pulled rows lie. Rows past the unit's end repeat the last one.
 */
__device__ void gather_tile(const mok_cuda_common &p, const block_view &b, const task &t, const uint64_t *table,
                            const void *ring, pipeline &pipe, uint32_t thread, uint32_t lane)
{
    const uint32_t chunk = thread % 8, row = thread / 8, rows = max(b.rows(t), 1u), first = b.row_first(t);
    const uint8_t *src[gather_rows];
#pragma unroll
    for (uint32_t i = 0; i < gather_rows; i++) {
        uint32_t r = min(row + i * gather_step, rows - 1) + (b.rows(t) ? first : 0);
        uint64_t at = __ldcg(table + static_cast<uint64_t>(t.row64) * 64 + r);
        if (at & 1u)
            at = reinterpret_cast<uint64_t>(ring) + (static_cast<uint64_t>(t.ring64) * 64 + r) * p.hidden * 2;
        src[i] = reinterpret_cast<const uint8_t *>(at) + chunk * 16;
    }
    gather_columns(p, b, src, pipe, thread, lane);
}

/*
 * Stages that the loader fills alone. The gather warps arrive all the same: a warp that only watched could fall two phases
 * behind, and a parity tells neighbouring phases apart only.
 */
__device__ __forceinline__ void gather_follow(const block_view &b, pipeline &pipe, uint32_t stages, uint32_t lane)
{
    for (uint32_t k = 0; k < stages; k++, pipe.n++) {
        mbar_wait(b.empty(pipe.stage()), pipe.phase() ^ 1u);
        __syncwarp();
        if (lane == 0)
            mbar_arrive(b.full(pipe.stage()));
    }
}

/* Where pulls are, waits for this block's rows of the unit. */
__device__ __forceinline__ void gather_wait(const mok_cuda_common &p, const block_view &b, const task &t, uint4 v)
{
    if (p.x_ring[1] != nullptr && !t.shared && b.rows(t) > 0)
        wait_counter(p, p.pull_done + t.row64 + b.row_first(t) / 64, MOK_CONSUMER_WARPS, MOK_WAIT_ROWS_HERE, v);
}

} // namespace
} // namespace mok
#endif
