/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward megakernel: one persistent grid of two-block clusters that takes tasks in list order. A cluster
 * multiplies up to 256 rows of one expert with one column tile of its weights, 128 rows a block; each block fetches
 * half of the weight tile and multicasts it to both. It never waits for another rank, and only for tasks that were
 * taken before its own. README.md has the shared-memory map and the barrier protocol.
 */
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#ifdef MOK_DEBUG_WAITS
#include <stdio.h>
#endif

#include "launch.cuh"
#include "layout.h"
#include "ptx.cuh"
#include "wgmma.cuh"

namespace mok
{
namespace
{

constexpr uint32_t a_offset = 0;
constexpr uint32_t b_offset = a_offset + MOK_STAGES * MOK_A_BYTES;
constexpr uint32_t stage_offset = b_offset + MOK_STAGES * MOK_B_BYTES;
constexpr uint32_t task_offset = stage_offset + MOK_CONSUMER_WARPS * MOK_WARP_STAGE_BYTES;
constexpr uint32_t bar_offset = task_offset + 2 * 16;
constexpr uint32_t smem_bytes = bar_offset + (2 * MOK_STAGES + 5) * 8;
static_assert(smem_bytes <= 232448, "more shared memory than a block can have");

/* Barriers, by index; task_empty and request are used in block 0 of the cluster only. */
constexpr uint32_t bar_full = 0, bar_empty = MOK_STAGES, bar_task_full = 2 * MOK_STAGES,
                   bar_task_empty = bar_task_full + 2, bar_request = bar_task_empty + 2;
constexpr uint32_t task_readers = MOK_CLUSTER * (MOK_CONSUMER_WARPS + 1 + MOK_GATHER_WARPS);
/* The loader asks for the next task when this many k-blocks of its own are left. */
constexpr uint32_t request_ahead = 8;

struct task {
    uint32_t row64, ring64, column, expert, rows, type, macrobatch;
    bool single, shared;
};

__device__ __forceinline__ task decode(uint4 v)
{
    task t;
    t.row64 = v.x;
    t.ring64 = v.y;
    t.column = v.z & 0xffffu;
    t.expert = v.z >> 16;
    t.rows = (v.w & 0xffu) + 1;
    t.type = v.w >> 8 & 3u;
    t.single = v.w >> 10 & 1u;
    t.shared = v.w >> 11 & 1u;
    t.macrobatch = v.w >> 12;
    return t;
}

/* One block's place: what its tile of a task is. */
struct block_view {
    uint32_t smem, rank;

    __device__ uint32_t bar(uint32_t i) const
    {
        return smem + bar_offset + 8 * i;
    }
    __device__ uint32_t full(uint32_t stage) const
    {
        return bar(bar_full + stage);
    }
    __device__ uint32_t empty(uint32_t stage) const
    {
        return bar(bar_empty + stage);
    }
    /* First row of this block inside the unit. */
    __device__ uint32_t row_first(const task &t) const
    {
        return t.single ? 0 : rank * MOK_TILE_M;
    }
    __device__ uint32_t rows(const task &t) const
    {
        uint32_t first = row_first(t);
        return t.rows > first ? min(t.rows - first, MOK_TILE_M) : 0;
    }
    /* The column tile, and whether this block's result counts (an odd last column has no neighbour). */
    __device__ uint32_t column(const task &t, uint32_t tiles) const
    {
        return t.single ? min(t.column + rank, tiles - 1) : t.column;
    }
    __device__ bool counts(const task &t, uint32_t tiles) const
    {
        return !t.single || t.column + rank < tiles;
    }
};

/* Position in the ring of stages, the same in every role of a block. */
struct pipeline {
    uint32_t n = 0;
    __device__ uint32_t stage() const
    {
        return n % MOK_STAGES;
    }
    __device__ uint32_t phase() const
    {
        return n / MOK_STAGES & 1u;
    }
};

__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity)
{
#ifdef MOK_DEBUG_WAITS
    for (uint32_t i = 0; !mbar_try(bar, parity); i++)
        if (i > 20000000u) {
            printf("block %u thread %u: barrier %u parity %u\n", blockIdx.x, threadIdx.x,
                   (bar - 1024u - bar_offset) / 8, parity);
            __trap();
        }
#else
    while (!mbar_try(bar, parity)) {
    }
#endif
}

/* Waits for task n; every lane gets it. One arrival a warp frees its place. */
__device__ __forceinline__ uint4 next_task(const block_view &b, uint32_t n, uint32_t lane)
{
    uint32_t slot = n & 1u;
    mbar_wait(b.bar(bar_task_full + slot), n >> 1 & 1u);
    uint4 v = load_shared_16(b.smem + task_offset + 16 * slot);
    __syncwarp();
    if (lane == 0)
        mbar_arrive_cluster(cluster_address(b.bar(bar_task_empty + slot), 0));
    return v;
}

/* Waits until *counter >= want. On abort or after the limit it returns all the same: the operation has failed then. */
__device__ __forceinline__ void wait_slow(const mok_cuda_main_args &p, const uint32_t *counter, uint32_t want,
                                          uint32_t what, uint4 v)
{
    uint64_t start = timer_ns();
    for (uint32_t i = 0;; i++) {
        uint32_t seen = load_acquire(counter);
        if (seen >= want)
            return;
        if (i % 64 == 63) {
            if (load_acquire(p.abort_word))
                return;
            if (timer_ns() - start > p.wait_limit_ns) {
                if (atomicExch(p.abort_word, 1u) == 0) {
                    p.report->trip = { what, blockIdx.x, want, seen, { v.x, v.y, v.z, v.w } };
                    __threadfence_system();
                    p.report->tripped = 1;
                }
                return;
            }
        }
        __nanosleep(100);
    }
}

__device__ __forceinline__ void wait_counter(const mok_cuda_main_args &p, const uint32_t *counter, uint32_t want,
                                             uint32_t what, uint4 v)
{
    if (load_acquire(counter) < want)
        wait_slow(p, counter, want, what, v);
}

/* ---- scheduler: one thread of the cluster hands tasks to both blocks ---- */

__device__ void chaos(const mok_cuda_main_args &p, uint32_t id)
{
    if (p.chaos_delay_us == 0)
        return;
    uint32_t h = (id + 1) * 2654435761u ^ p.chaos_seed * 40503u ^ static_cast<uint32_t>(clock64());
    h ^= h >> 15;
    uint64_t until = timer_ns() + (h * 2246822519u >> 8) % (p.chaos_delay_us * 1000u);
    while (timer_ns() < until)
        __nanosleep(500);
}

__device__ void schedule(const mok_cuda_main_args &p, const block_view &b)
{
    const uint32_t tasks = __ldcg(&p.head->tasks);
    for (uint32_t n = 0;; n++) {
        uint32_t slot = n & 1u;
        if (n > 0)
            mbar_wait(b.bar(bar_request), (n - 1) & 1u);
        uint32_t id = atomicAdd(&p.head->next_task, 1u);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (id < tasks && load_acquire(p.abort_word) == 0) {
            v = __ldcg(reinterpret_cast<const uint4 *>(p.tasks) + id);
            chaos(p, id);
        }
        mbar_wait(b.bar(bar_task_empty + slot), (n >> 1 & 1u) ^ 1u);
        for (uint32_t r = 0; r < MOK_CLUSTER; r++) {
            uint32_t bar = cluster_address(b.bar(bar_task_full + slot), r);
            mbar_expect_cluster(bar, 16);
            store_async_16(cluster_address(b.smem + task_offset + 16 * slot, r), v, bar);
        }
        if (decode(v).type == MOK_TASK_END)
            return;
    }
}

/* ---- loader: one thread a block keeps weight tiles, and h, on their way ---- */

struct loader {
    const mok_cuda_main_args &p;
    const block_view &b;
    pipeline pipe;

    __device__ void request(uint32_t left, uint32_t k_blocks)
    {
        if (b.rank == 0 && left == min(request_ahead, k_blocks))
            mbar_arrive(b.bar(bar_request));
    }

    __device__ void gate_up(const task &t)
    {
        const mok_cuda_set &s = p.set[t.shared];
        const int32_t y = b.column(t, s.tiles) * (MOK_TILE_N / 2), e = t.expert;
        for (uint32_t k = 0; k < p.k_blocks; k++, pipe.n++) {
            request(p.k_blocks - k, p.k_blocks);
            uint32_t stage = pipe.stage(), full = b.full(stage), dst = b.smem + b_offset + stage * MOK_B_BYTES;
            int32_t x = k * MOK_TILE_K;
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            mbar_expect(full, MOK_B_BYTES);
            if (t.single) {
                tma_load_3d(dst, &s.gate, full, x, y, e);
                tma_load_3d(dst + MOK_B_BYTES / 2, &s.up, full, x, y, e);
            } else {
                tma_load_3d_multicast(dst + b.rank * (MOK_B_BYTES / 2), b.rank ? &s.up : &s.gate, full, x, y, e, 3);
            }
        }
    }

    __device__ void down(const task &t)
    {
        const mok_cuda_set &s = p.set[t.shared];
        const int32_t y = b.column(t, p.down_tiles) * MOK_TILE_N, e = t.expert;
        const int32_t row = t.ring64 * 64 + b.row_first(t);
        for (uint32_t k = 0; k < s.k_blocks; k++, pipe.n++) {
            request(s.k_blocks - k, s.k_blocks);
            uint32_t stage = pipe.stage(), full = b.full(stage), dst = b.smem + b_offset + stage * MOK_B_BYTES;
            int32_t x = k * MOK_TILE_K;
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            mbar_expect(full, MOK_A_BYTES + MOK_B_BYTES);
            if (t.single) {
                tma_load_3d(dst, &s.down, full, x, y, e);
                tma_load_3d(dst + MOK_B_BYTES / 2, &s.down, full, x, y + MOK_TILE_N / 2, e);
            } else {
                tma_load_3d_multicast(dst + b.rank * (MOK_B_BYTES / 2), &s.down, full, x, y + b.rank * (MOK_TILE_N / 2),
                                      e, 3);
            }
            tma_load_2d(b.smem + a_offset + stage * MOK_A_BYTES, &s.h_map, full, x, row);
            mbar_arrive(full, MOK_GATHER_WARPS); /* in the place of the gather warps, who only follow */
        }
    }
};

__device__ void load(const mok_cuda_main_args &p, const block_view &b, uint32_t lane)
{
    loader l = { p, b, {} };
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (lane != 0)
            continue;
        if (t.type == MOK_TASK_PULL) {
            l.request(1, 1);
        } else if (t.type == MOK_TASK_GATE_UP) {
            l.gate_up(t);
        } else {
            if (b.rows(t) > 0) {
                const uint32_t *done = p.hidden_done + t.row64 + b.row_first(t) / 64;
                wait_counter(p, done, p.set[t.shared].tiles * MOK_CONSUMER_WARPS, MOK_WAIT_HIDDEN, v);
                fence_async();
            }
            l.down(t);
        }
    }
}

/* ---- gather: two warps a block fetch x rows, wherever they lie ---- */

constexpr uint32_t gather_threads = MOK_GATHER_WARPS * 32;
constexpr uint32_t gather_step = gather_threads / 8; /* rows between a thread's rows */
constexpr uint32_t gather_rows = MOK_TILE_M / gather_step;

__device__ void gather_tile(const mok_cuda_main_args &p, const block_view &b, const task &t, pipeline &pipe,
                            uint32_t thread, uint32_t lane)
{
    const uint32_t chunk = thread % 8, row = thread / 8, rows = max(b.rows(t), 1u), first = b.row_first(t);
    const uint8_t *src[gather_rows];
#pragma unroll
    for (uint32_t i = 0; i < gather_rows; i++) {
        uint32_t r = min(row + i * gather_step, rows - 1) + (b.rows(t) ? first : 0);
        uint64_t at = __ldg(p.row_src + static_cast<uint64_t>(t.row64) * 64 + r);
        if (at & 1u)
            at = reinterpret_cast<uint64_t>(p.x_ring[t.macrobatch > 0]) +
                 (static_cast<uint64_t>(t.ring64) * 64 + r) * p.hidden * 2;
        src[i] = reinterpret_cast<const uint8_t *>(at) + chunk * 16;
    }
    const uint32_t dst = b.smem + a_offset + row * 128 + ((chunk ^ (row % 8)) * 16);
    auto landed = [&](uint32_t stage) {
        fence_async_shared();
        __syncwarp();
        if (lane == 0)
            mbar_arrive(b.full(stage));
    };
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
            landed((pipe.n - 1) % MOK_STAGES);
        }
    }
    cp_async_wait<0>();
    landed((pipe.n - 1) % MOK_STAGES);
}

__device__ void gather(const mok_cuda_main_args &p, const block_view &b, uint32_t thread, uint32_t lane)
{
    pipeline pipe;
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (t.type == MOK_TASK_GATE_UP) {
            if (p.x_ring[1] != nullptr && !t.shared && b.rows(t) > 0)
                wait_counter(p, p.pull_done + t.row64 + b.row_first(t) / 64, MOK_CONSUMER_WARPS, MOK_WAIT_ROWS_HERE, v);
            gather_tile(p, b, t, pipe, thread, lane);
        } else if (t.type == MOK_TASK_DOWN) {
            /* parities tell neighbouring phases apart only, so stay in step with the stages */
            for (uint32_t k = 0; k < p.set[t.shared].k_blocks; k++, pipe.n++)
                mbar_wait(b.empty(pipe.stage()), pipe.phase() ^ 1u);
        }
    }
}

/* ---- consumers: two warpgroups a block multiply and hand results on ---- */

struct consumer {
    const mok_cuda_main_args &p;
    const block_view &b;
    uint32_t group, warp, lane; /* warp of the block's consumers */
    uint32_t empty_of_lane;     /* lane 0, 1: stage 0's empty barrier in that block */
    pipeline pipe;
    uint32_t macrobatches = 0;
    uint32_t *pending = nullptr; /* counter to raise once this warp's stores have landed */

    __device__ void release(uint32_t stage) const
    {
        if (lane < MOK_CLUSTER)
            mbar_arrive_cluster(empty_of_lane + 8 * stage);
    }

    /* Says that h is there: all lanes' stores are seen by whoever acquires the counter. */
    __device__ void deliver()
    {
        if (pending == nullptr)
            return;
        fence_async();
        __syncwarp();
        if (lane == 0)
            add_release(pending, 1);
        pending = nullptr;
    }

    __device__ void multiply(float (&d)[128], uint32_t k_blocks)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            uint32_t stage = pipe.stage();
            mbar_wait(b.full(stage), pipe.phase());
            uint64_t at = a0 + stage * (MOK_A_BYTES / 16), bt = b0 + stage * (MOK_B_BYTES / 16);
            wgmma_fence();
#pragma unroll
            for (uint32_t i = 0; i < MOK_TILE_K / 16; i++)
                wgmma_m64n256k16(d, at + 2 * i, bt + 2 * i, k + i > 0);
            wgmma_commit();
            if (k == 0) {
                deliver(); /* while the tensor cores are busy */
            } else {
                wgmma_wait<1>();
                release((pipe.n - 1) % MOK_STAGES);
            }
        }
        wgmma_wait<0>();
        release((pipe.n - 1) % MOK_STAGES);
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            settle(d[i]);
    }

    /* No row of this warpgroup is real: follows the stages. */
    __device__ void skip(uint32_t k_blocks)
    {
        deliver();
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            mbar_wait(b.full(pipe.stage()), pipe.phase());
            release(pipe.stage());
        }
    }

    __device__ uint32_t stage() const
    {
        return b.smem + stage_offset + warp * MOK_WARP_STAGE_BYTES;
    }

    /*
     * Stores this warp's 16 rows x 128 columns; `pair(j, half)`: columns 8 j + 2 (lane % 4).. of row lane / 4 + 8 half.
     * `row`: where lane's row of the 16 begins, NULL where it does not count. `Streaming`: nothing
     * on this device reads it soon. Ordinary stores of whole lines: bulk copies
     * of so small rows keep the copy engine from the next tile's loads.
     */
    template <bool Streaming, class Pair> __device__ void store(void *row, uint32_t bytes, Pair pair)
    {
        uint32_t at = stage() + ((lane & 8u) + (lane & 7u)) * MOK_STAGE_ROW_BYTES + (lane >> 4) * 16;
        const uint32_t chunk = lane % 16 * 16;
        __syncwarp();
#pragma unroll
        for (uint32_t j = 0; j < 16; j += 2)
            stmatrix_x4(at + j * 16, pair(j, 0u), pair(j, 1u), pair(j + 1, 0u), pair(j + 1, 1u));
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 16; i += 2) {
            uint32_t r = i + lane / 16;
            uint64_t to = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row), r);
            uint4 v = load_shared_16(stage() + r * MOK_STAGE_ROW_BYTES + chunk);
            uint4 *place = reinterpret_cast<uint4 *>(to + chunk);
            if (to != 0 && chunk < bytes) {
                if (Streaming)
                    __stcs(place, v);
                else
                    __stcg(place, v);
            }
        }
        __syncwarp();
    }

    /* Row of the unit that lane < 16 stores, or ~0. */
    __device__ uint32_t my_row(const task &t) const
    {
        uint32_t r = warp * 16 + lane;
        return lane < 16 && r < b.rows(t) ? b.row_first(t) + r : ~0u;
    }

    /* From gate and up as a context keeps them, that is rounded to BF16. */
    __device__ static float swiglu(float a, float u, float limit)
    {
        if (limit > 0.0f) {
            a = a > limit ? limit : a; /* a NaN stays one */
            u = u > limit ? limit : u < -limit ? -limit : u;
        }
        float e = exp2_approximate(__fmul_rn(a, -1.4426950408889634f));
        return __fmul_rn(__fdividef(a, __fadd_rn(1.0f, e)), u);
    }

    /* Two neighbouring values of h from their gates and ups. */
    __device__ static uint32_t swiglu_pair(uint32_t a, uint32_t u, float limit)
    {
        return pack_bf16(swiglu(__uint_as_float(a << 16), __uint_as_float(u << 16), limit),
                         swiglu(__uint_as_float(a & 0xffff0000u), __uint_as_float(u & 0xffff0000u), limit));
    }

    __device__ void gate_up(const float (&d)[128], const task &t, uint4 v)
    {
        const mok_cuda_set &s = p.set[t.shared];
        uint32_t column = t.single ? t.column + b.rank : t.column, first = column * (MOK_TILE_N / 2);
        if (column >= s.tiles)
            return;
        uint32_t bytes = min(s.inter - first, MOK_TILE_N / 2) * 2, r = my_row(t);
        uint64_t at = (static_cast<uint64_t>(t.ring64) * 64 + r) * s.inter + first;
        if (!t.shared && t.macrobatch + 1 < macrobatches) {
            const mok_cuda_macrobatch *before = p.macrobatches + t.macrobatch + 1;
            wait_counter(p, &before->down_done, __ldcg(&before->down_warps), MOK_WAIT_RING_H, v);
        }
        auto place = [&](void *base) { return r != ~0u ? static_cast<__nv_bfloat16 *>(base) + at : nullptr; };
        if (p.context_a != nullptr && !t.shared && t.macrobatch == 0) {
            store<true>(place(p.context_a), bytes, [&](uint32_t j, uint32_t half) {
                return pack_bf16_anew(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
            });
            store<true>(place(p.context_b), bytes, [&](uint32_t j, uint32_t half) {
                return pack_bf16_anew(d[4 * j + 2 * half + 64], d[4 * j + 2 * half + 65]);
            });
        }
        store<false>(place(s.h), bytes, [&](uint32_t j, uint32_t half) {
            const uint32_t i = 4 * j + 2 * half;
            return swiglu_pair(pack_bf16(d[i], d[i + 1]), pack_bf16(d[i + 64], d[i + 65]), p.clamp);
        });
    }

    __device__ void down(const float (&d)[128], const task &t, void *to)
    {
        uint32_t column = t.single ? t.column + b.rank : t.column, first = column * MOK_TILE_N;
        if (column >= p.down_tiles)
            return;
#pragma unroll
        for (uint32_t q = 0; q < 2; q++) {
            uint32_t at = first + q * 128;
            if (at >= p.hidden)
                return;
            void *row = to != nullptr ? static_cast<__nv_bfloat16 *>(to) + at : nullptr;
            store<true>(row, min(p.hidden - at, 128u) * 2, [&](uint32_t j, uint32_t half) {
                const uint32_t i = 4 * (j + 16 * q) + 2 * half;
                return pack_bf16(d[i], d[i + 1]);
            });
        }
    }

    /* Copies this warp's share of the unit's remote rows into the ring. */
    __device__ void pull(const task &t, uint4 v)
    {
        if (t.macrobatch + 1 < macrobatches) {
            const mok_cuda_macrobatch *before = p.macrobatches + t.macrobatch + 1;
            wait_counter(p, &before->gate_up_done, __ldcg(&before->gate_up_warps), MOK_WAIT_RING_X, v);
            __syncwarp();
        }
        const uint32_t vectors = p.hidden / 8;
        uint32_t first = b.rank * MOK_TILE_M, rows = t.rows > first ? min(t.rows - first, MOK_TILE_M) : 0;
        for (uint32_t r = warp; r < rows; r += MOK_CONSUMER_WARPS) {
            uint64_t at = __ldg(p.row_src + static_cast<uint64_t>(t.row64) * 64 + first + r);
            if (!(at & 1u))
                continue;
            const uint4 *src = reinterpret_cast<const uint4 *>(at & ~1ull);
            uint4 *dst = static_cast<uint4 *>(p.x_ring[t.macrobatch > 0]) +
                         (static_cast<uint64_t>(t.ring64) * 64 + first + r) * vectors;
            for (uint32_t i = lane; i < vectors; i += 32 * 8) {
                uint4 w[8];
#pragma unroll
                for (uint32_t j = 0; j < 8; j++)
                    if (i + 32 * j < vectors)
                        w[j] = __ldcv(src + i + 32 * j);
#pragma unroll
                for (uint32_t j = 0; j < 8; j++)
                    if (i + 32 * j < vectors)
                        __stcg(dst + i + 32 * j, w[j]);
            }
        }
        __threadfence();
        __syncwarp();
        if (lane == 0 && rows > 0)
            add_release(p.pull_done + t.row64 + first / 64, 1);
    }

    __device__ void run()
    {
        macrobatches = __ldcg(&p.head->macrobatches);
        for (uint32_t n = 0;; n++) {
            uint4 v = next_task(b, n, lane);
            task t = decode(v);
            if (t.type != MOK_TASK_GATE_UP)
                deliver(); /* the next task may wait for it */
            if (t.type == MOK_TASK_END)
                break;
            if (t.type == MOK_TASK_PULL) {
                pull(t, v);
                continue;
            }
            float d[128]; /* of this task alone: a task's first product does not read it */
            bool is_down = t.type == MOK_TASK_DOWN, active = b.rows(t) > group * 64;
            void *to = nullptr;
            if (is_down && my_row(t) != ~0u)
                to = reinterpret_cast<void *>(__ldg(p.row_dst + static_cast<uint64_t>(t.row64) * 64 + my_row(t)));
            uint32_t k_blocks = is_down ? p.set[t.shared].k_blocks : p.k_blocks;
            if (active)
                multiply(d, k_blocks);
            else
                skip(k_blocks);
            if (macrobatches > 1 && !t.shared && lane == 0) /* someone waits for the ring's rows */
                add_release(
                    is_down ? &p.macrobatches[t.macrobatch].down_done : &p.macrobatches[t.macrobatch].gate_up_done, 1);
            if (is_down) {
                if (active)
                    down(d, t, to);
            } else {
                if (active)
                    gate_up(d, t, v);
                if (b.rows(t) > 0 && b.counts(t, p.set[t.shared].tiles))
                    pending = p.hidden_done + t.row64 + b.row_first(t) / 64;
            }
        }
    }
};

__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    main_kernel(const __grid_constant__ mok_cuda_main_args p)
{
    const block_view b = { smem_address(dynamic_shared()), cluster_rank() };
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0) {
        if (b.smem % 1024 != 0)
            __trap();
        for (uint32_t i = 0; i < MOK_STAGES; i++) {
            mbar_init(b.full(i), 1 + MOK_GATHER_WARPS);
            mbar_init(b.empty(i), MOK_CLUSTER * MOK_CONSUMER_WARPS);
        }
        for (uint32_t i = 0; i < 2; i++) {
            mbar_init(b.bar(bar_task_full + i), 1);
            mbar_init(b.bar(bar_task_empty + i), task_readers);
        }
        mbar_init(b.bar(bar_request), 1);
        mbar_init_fence();
    }
    cluster_sync();
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        p.report->schedule_to_ns = timer_ns();

    if (warp >= MOK_CONSUMER_WARPS) {
        registers_lower<MOK_PRODUCER_REGISTERS>();
        uint32_t role = warp - MOK_CONSUMER_WARPS;
        if (role == 0) {
            load(p, b, lane);
        } else if (role == 1) {
            if (b.rank == 0 && lane == 0)
                schedule(p, b);
        } else {
            gather(p, b, (role - 2) * 32 + lane, lane);
        }
    } else {
        registers_raise<MOK_CONSUMER_REGISTERS>();
        consumer c = { p, b, warp / 4, warp, lane, cluster_address(b.empty(0), lane % MOK_CLUSTER), {} };
        c.run();
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write to this one's barriers */
}

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_main(const mok_cuda_main_args *args, uint32_t blocks, void *stream)
{
    return mok::launch(true, mok::main_kernel, dim3(blocks / MOK_CLUSTER * MOK_CLUSTER), MOK_THREADS, mok::smem_bytes,
                       stream, *args);
}

static int mok_cuda_main_setup()
{
    return cudaFuncSetAttribute(mok::main_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
}

extern "C" int mok_cuda_kernels_setup(void)
{
    int r = mok_cuda_schedule_setup();
    return r ? r : mok_cuda_main_setup();
}
