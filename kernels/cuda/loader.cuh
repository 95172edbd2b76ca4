/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread a block keeps tiles on their way into the stages by TMA. Here: what the loaders of every megakernel share.
 */
#ifndef MOK_CUDA_LOADER_CUH
#define MOK_CUDA_LOADER_CUH

#include "pipeline.cuh"

namespace mok
{
namespace
{

struct loader_base {
    const mok_cuda_common &all;
    const block_view &b;
    pipeline pipe;

    /* `left` of a task's stages are still to be filled. */
    __device__ void request(uint32_t left, uint32_t stages)
    {
        if (b.rank == 0 && left == min(request_ahead, stages))
            mbar_arrive(b.bar(bar_request));
    }

    /* Waits for the next stage; the bytes that will land in it include the other block's share. */
    __device__ uint32_t begin(uint32_t left, uint32_t stages, uint32_t bytes)
    {
        request(left, stages);
        mbar_wait(b.empty(pipe.stage()), pipe.phase() ^ 1u);
        mbar_expect(b.full(pipe.stage()), bytes);
        return b.full(pipe.stage());
    }
    __device__ uint32_t a_at() const
    {
        return b.smem + a_offset + pipe.stage() * MOK_A_BYTES;
    }
    __device__ uint32_t b_at() const
    {
        return b.smem + b_offset + pipe.stage() * MOK_B_BYTES;
    }

    /* 128 rows of gate beside the same 128 of up, over the hidden columns; the maps' boxes have BoxRows rows. */
    template <uint32_t BoxRows>
    __device__ void gate_up_tile(const task &t, const CUtensorMap &gate, const CUtensorMap &up, uint32_t tiles)
    {
        constexpr uint32_t half = MOK_TILE_N / 2;
        const int32_t y = b.column(t, tiles) * half, e = t.expert;
        for (uint32_t k = 0; k < all.k_blocks; k++, pipe.n++) {
            request(all.k_blocks - k, all.k_blocks);
            uint32_t stage = pipe.stage(), full = b.full(stage), dst = b.smem + b_offset + stage * MOK_B_BYTES;
            int32_t x = k * MOK_TILE_K;
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            mbar_expect(full, MOK_B_BYTES);
#pragma unroll
            for (uint32_t r = 0; r < half; r += BoxRows) {
                if (t.single) {
                    tma_load_3d(dst + r * 128, &gate, full, x, y + r, e);
                    tma_load_3d(dst + MOK_B_BYTES / 2 + r * 128, &up, full, x, y + r, e);
                } else {
                    tma_load_3d_multicast(dst + b.rank * (MOK_B_BYTES / 2) + r * 128, b.rank ? &up : &gate, full, x,
                                          y + r, e, 3);
                }
            }
        }
    }

    /* 256 rows of down, and this block's rows of h. */
    __device__ void down_tile(const task &t, const CUtensorMap &down, const CUtensorMap &h, uint32_t k_blocks)
    {
        const int32_t y = b.column(t, all.down_tiles) * MOK_TILE_N, e = t.expert;
        const int32_t row = t.ring64 * 64 + b.row_first(t);
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            request(k_blocks - k, k_blocks);
            uint32_t stage = pipe.stage(), full = b.full(stage), dst = b.smem + b_offset + stage * MOK_B_BYTES;
            int32_t x = k * MOK_TILE_K;
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            mbar_expect(full, MOK_A_BYTES + MOK_B_BYTES);
            if (t.single) {
                tma_load_3d(dst, &down, full, x, y, e);
                tma_load_3d(dst + MOK_B_BYTES / 2, &down, full, x, y + MOK_TILE_N / 2, e);
            } else {
                tma_load_3d_multicast(dst + b.rank * (MOK_B_BYTES / 2), &down, full, x, y + b.rank * (MOK_TILE_N / 2),
                                      e, 3);
            }
            tma_load_2d(b.smem + a_offset + stage * MOK_A_BYTES, &h, full, x, row);
        }
    }
};

/* A forward's tasks, by a Loader that knows where its tiles lie: pull, gate_up, down, and how many column tiles make h. */
template <class Loader> __device__ __forceinline__ void load_forward(Loader &l, uint32_t lane)
{
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(l.b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (t.type == MOK_TASK_PULL) {
            l.pull(t, lane);
            continue;
        }
        if (lane != 0)
            continue;
        if (t.type == MOK_TASK_GATE_UP) {
            l.gate_up(t, v);
        } else {
            if (l.b.rows(t) > 0) {
                const uint32_t *done = l.all.hidden_done + t.row64 + l.b.row_first(t) / 64;
                wait_counter(l.all, done, l.hidden_tiles(t) * MOK_CONSUMER_WARPS, MOK_WAIT_HIDDEN, v);
                fence_async();
            }
            l.down(t);
        }
    }
}

} // namespace
} // namespace mok
#endif
