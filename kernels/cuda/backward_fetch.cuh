/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What brings a backward's operands into the stages: one thread by TMA, two warps by 16-byte copies of rows wherever
 * they lie. Multiplies nothing, stores nothing.
 */
#ifndef MOK_CUDA_BACKWARD_FETCH_CUH
#define MOK_CUDA_BACKWARD_FETCH_CUH

#include "backward_task.cuh"
#include "backward_stored.cuh"
#include "gather.cuh"

namespace mok
{
namespace
{

/* ---- loader: weight tiles, d_a, d_b, weighted h; stored sums ---- */

struct backward_loader : stored_loader {
    uint32_t here = ~0u; /* the run whose rows are known to be there */

    /* 64 rows of 256 columns; each block fetches half and gives it to both, unless it is `alone`. */
    __device__ void columns_tile(bool alone, const CUtensorMap *map, uint32_t full, int32_t x, int32_t y, int32_t z)
    {
        const uint32_t dst = b_at(), first = alone ? 0 : 2 * b.rank;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t q = first + i;
            if (alone) {
                tma_load_3d(dst + q * box_bytes, map, full, x + 64 * q, y, z);
                tma_load_3d(dst + (q + 2) * box_bytes, map, full, x + 64 * (q + 2), y, z);
            } else {
                tma_load_3d_multicast(dst + q * box_bytes, map, full, x + 64 * q, y, z, 3);
            }
        }
    }

    /* 128 rows of 64 columns. */
    __device__ void rows_tile(const CUtensorMap *map, uint32_t dst, uint32_t full, int32_t x, int32_t y)
    {
        tma_load_3d(dst, map, full, x, y, 0);
        tma_load_3d(dst + box_bytes, map, full, x, y + 64, 0);
    }

    __device__ void gate_up(const task &t)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        gate_up_tile<64>(t, s.gate, s.up, s.tiles);
    }

    __device__ void d_hidden(const task &t, uint4 v)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        const uint32_t stages = all.k_blocks + gate_stages;
        const int32_t x = b.column(t, s.hidden_tiles) * MOK_TILE_N, row = t.ring64 * 64 + b.row_first(t);
        for (uint32_t k = 0; k < all.k_blocks; k++, pipe.n++) {
            uint32_t full = begin(stages - k, stages, MOK_B_BYTES);
            columns_tile(t.single, &s.down, full, x, k * MOK_TILE_K, t.expert);
        }
        if (remade(p, t) && b.rows(t) > 0) {
            const uint32_t *done = p.gates_done + t.row64 + b.row_first(t) / 64;
            wait_counter(all, done, s.tiles * MOK_CONSUMER_WARPS, MOK_WAIT_GATES, v);
            fence_async();
        }
        const uint32_t ring = remade(p, t);
        for (uint32_t q = 0; q < gate_stages; q++, pipe.n++) {
            uint32_t full = begin(gate_stages - q, stages, 2 * MOK_A_BYTES);
            rows_tile(&s.a[ring], a_at(), full, x + 64 * q, row);
            rows_tile(&s.b[ring], b_at(), full, x + 64 * q, row);
        }
    }

    __device__ void d_input(const task &t, uint4 v)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        const uint32_t stages = 2 * s.k_blocks;
        const int32_t x = b.column(t, all.down_tiles) * MOK_TILE_N, row = t.ring64 * 64 + b.row_first(t);
        if (b.rows(t) > 0) {
            const uint32_t *done = all.hidden_done + t.row64 + b.row_first(t) / 64;
            wait_counter(all, done, s.hidden_tiles * MOK_CONSUMER_WARPS, MOK_WAIT_GRADIENTS, v);
            fence_async();
        }
        for (uint32_t k = 0; k < stages; k++, pipe.n++) {
            const bool up = k >= s.k_blocks;
            int32_t inner = (up ? k - s.k_blocks : k) * MOK_TILE_K;
            uint32_t full = begin(stages - k, stages, MOK_A_BYTES + MOK_B_BYTES);
            columns_tile(t.single, up ? &s.up : &s.gate, full, x, inner, t.expert);
            rows_tile(up ? &s.d_b : &s.d_a, a_at(), full, inner, row);
        }
    }

    /*
     * Waits until all rows of the run are there, which also says that the stored sums are. The whole warp looks, once a run:
     * to look at a counter takes as long as a k-block, 128 rows have one, and most tasks go on with the run of the one before.
     */
    __device__ void wait_run(const wgrad_task &w, uint4 v, uint32_t lane)
    {
        if (v.x == here)
            return;
        here = v.x;
        const uint32_t want = p.set[w.shared].hidden_tiles * MOK_CONSUMER_WARPS;
        for (uint32_t r = lane * MOK_TILE_M; r < w.rows; r += 32 * MOK_TILE_M)
            wait_counter(all, all.hidden_done + w.row64 + r / 64, want, MOK_WAIT_RUN, v);
        __syncwarp();
        fence_async();
    }

    __device__ void wgrad(const wgrad_task &w)
    {
        const mok_cuda_backward_set &s = p.set[w.shared];
        const CUtensorMap *map = w.matrix == MOK_WGRAD_GATE ? &s.d_a : w.matrix == MOK_WGRAD_UP ? &s.d_b : &s.h;
        const uint32_t blocks = w.k_blocks(), stages = w.stages();
        if (w.stored)
            stored_sums(w,
                        { w.matrix == MOK_WGRAD_DOWN, static_cast<int32_t>(w.hidden(b.rank)),
                          static_cast<int32_t>(w.inter()) },
                        stages);
        for (uint32_t k = 0; k < blocks; k++) {
            uint32_t full = begin(blocks - k, stages, MOK_B_BYTES);
            columns_tile(false, map, full, w.inter(), w.ring64 * 64 + k * MOK_TILE_K, 0);
            pipe.n++;
        }
    }
};

__device__ void load(const mok_cuda_backward_args &p, const block_view &b, uint32_t lane)
{
    backward_loader l = { { { p.common, b, {} }, p } };
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        wgrad_task w = {};
        if (t.type == MOK_TASK_WGRAD) {
            w = decode_wgrad(p, v);
            l.wait_run(w, v, lane);
        }
        if (lane != 0)
            continue;
        if (t.type == MOK_TASK_PULL)
            l.request(1, 1);
        else if (t.type == MOK_TASK_GATE_UP)
            l.gate_up(t);
        else if (t.type == MOK_TASK_D_HIDDEN)
            l.d_hidden(t, v);
        else if (t.type == MOK_TASK_D_INPUT)
            l.d_input(t, v);
        else
            l.wgrad(w);
    }
}

/* ---- gather: rows of x and of d_out ---- */

/* Rows of a k-block of which one thread copies 16 bytes: half a warp copies 256 bytes of a row at once. */
constexpr uint32_t run_rows = MOK_TILE_K / (2 * MOK_GATHER_WARPS);
/*
 * k-blocks between a row's way into L2 and into shared memory. All blocks together read more than L2 holds, and memory
 * answers later than the stages can wait.
 */
constexpr uint32_t fetch_ahead = 6;

/*
 * This block's 128 hidden columns of the run's rows as an M-major tile, 64 rows a k-block; rows past the run's end and
 * columns past the last are zeros, whatever lies there. Two warps have the time of one product to copy 16 KiB, so a copy
 * costs an addition: where the next k-block's rows lie is known before it begins, and of which 128 bytes apart.
 */
__device__ void gather_run(const mok_cuda_backward_args &p, const block_view &b, const wgrad_task &w, pipeline &pipe,
                           uint32_t thread, uint32_t lane)
{
    const mok_cuda_common &all = p.common;
    const uint64_t *table = (w.matrix == MOK_WGRAD_DOWN ? p.row_g : all.row_src) + (w.rows > 0 ? w.row64 * 64ull : 0);
    const uint32_t first = thread / 16 * run_rows, vector = lane % 16, blocks = w.k_blocks();
    const uint32_t column = w.hidden(b.rank), own_column = column + vector * 8;
    const uint32_t rows = own_column < all.hidden ? w.rows : 0;
    const uint64_t offset = own_column < all.hidden ? own_column * 2 : 0;
    const uint32_t to = b.smem + a_offset + vector / 8 * box_bytes + first * 128;
    uint64_t at[run_rows], later = 0;
    auto places = [&](uint32_t k) { /* of this thread's rows; rows of padding have some, too */
#pragma unroll
        for (uint32_t i = 0; i < run_rows; i += 2)
            load_l2_16(at[i], at[i + 1], table + k * MOK_TILE_K + first + i);
    };
    places(0);
    for (uint32_t k = 0; k < blocks; k++, pipe.n++) {
        const uint32_t stage = pipe.stage(), begin = k * MOK_TILE_K + first;
        mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
#pragma unroll
        for (uint32_t i = 0; i < run_rows; i++)
            cp_async_16(to + stage * MOK_A_BYTES + i * 128 + ((vector % 8) ^ (i % 8)) * 16,
                        reinterpret_cast<const void *>(at[i] + offset), begin + i < rows ? 16 : 0);
        cp_async_commit();
        if (k + 1 < blocks)
            places(k + 1);
        if (later != 0) {
            prefetch_l2(later + column * 2);
            prefetch_l2(later + column * 2 + 128);
        }
        const uint32_t far = (k + fetch_ahead) * MOK_TILE_K + thread; /* where it lies is known a round later */
        later = far < w.rows && column + 128 <= all.hidden ? load_l2_8(table + far) : 0;
        if (k > 0) {
            cp_async_wait<1>();
            gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
        }
    }
    cp_async_wait<0>();
    gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
}

/* All rows of a run that come from other ranks have been pulled, and the tables say where in the ring they lie. */
__device__ void wait_pulled(const mok_cuda_common &all, const wgrad_task &w, uint32_t lane, uint4 v)
{
    if (all.x_ring[1] != nullptr && !w.shared)
        for (uint32_t r = lane * MOK_TILE_M; r < w.rows; r += 32 * MOK_TILE_M)
            wait_counter(all, all.pull_done + w.row64 + r / 64, MOK_CONSUMER_WARPS, MOK_WAIT_ROWS_HERE, v);
    __syncwarp();
}

__device__ void gather(const mok_cuda_backward_args &p, const block_view &b, uint32_t thread, uint32_t lane)
{
    const mok_cuda_common &all = p.common;
    pipeline pipe;
    uint32_t here = ~0u; /* the run whose rows are known to be there */
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (t.type == MOK_TASK_GATE_UP) {
            gather_wait(all, b, t, v);
            gather_tile(all, b, t, all.row_src, all.x_ring[t.macrobatch > 0], pipe, thread, lane);
        } else if (t.type == MOK_TASK_D_HIDDEN) {
            gather_wait(all, b, t, v);
            gather_tile(all, b, t, p.row_g, p.g_ring, pipe, thread, lane);
            gather_follow(b, pipe, gate_stages, lane);
        } else if (t.type == MOK_TASK_D_INPUT) {
            gather_follow(b, pipe, 2 * p.set[t.shared].k_blocks, lane);
        } else if (t.type == MOK_TASK_WGRAD) {
            wgrad_task w = decode_wgrad(p, v);
            gather_follow(b, pipe, w.stored ? stored_stages : 0, lane);
            if (v.x != here)
                wait_pulled(all, w, lane, v);
            here = v.x;
            gather_run(p, b, w, pipe, thread, lane);
        }
    }
}

} // namespace
} // namespace mok
#endif
