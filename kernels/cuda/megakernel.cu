/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward megakernel. A cluster multiplies up to 256 rows of one expert with one column tile of its weights, 128
 * rows a block; each block fetches half of the weight tile and multicasts it to both. It never waits for another rank,
 * and only for tasks that were taken before its own. README.md has the shared-memory map and the barrier protocol.
 */
#include <cuda_runtime.h>

#include "consumer.cuh"
#include "gather.cuh"
#include "launch.cuh"
#include "loader.cuh"
#include "transfer.cuh"

namespace mok
{
namespace
{

/* ---- loader: weight tiles, and h ---- */

struct forward_loader : loader_base {
    const mok_cuda_main_args &p;

    __device__ void pull(const task &t, uint32_t lane)
    {
        fetch_rows(*this, t, all.row_pull, all.x_row_bytes, lane);
    }

    __device__ void gate_up(const task &t, uint4)
    {
        const mok_cuda_set &s = p.set[t.shared];
        gate_up_tile<MOK_TILE_N / 2>(t, s.gate, s.up, s.tiles);
    }

    __device__ uint32_t hidden_tiles(const task &t) const
    {
        return p.set[t.shared].tiles;
    }

    __device__ void down(const task &t)
    {
        const mok_cuda_set &s = p.set[t.shared];
        down_tile(t, s.down, s.h_map, s.k_blocks);
    }
};

__device__ void load(const mok_cuda_main_args &p, const block_view &b, uint32_t lane)
{
    forward_loader l = { { p.common, b, {} }, p };
    load_forward(l, lane);
}

/* ---- gather: x rows ---- */

__device__ void gather(const mok_cuda_main_args &p, const block_view &b, uint32_t thread, uint32_t lane)
{
    pipeline pipe;
    pulled_rows known;
    const uint32_t macrobatches = __ldcg(&p.common.head->macrobatches);
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (t.type == MOK_TASK_PULL) {
            follow_rows(b, pipe, t, p.common.row_pull, p.common.x_row_bytes, lane);
        } else if (t.type == MOK_TASK_GATE_UP) {
            gather_tile_where(p.common, b, t, v, p.common.row_src, p.common.x_ring[t.macrobatch > 0],
                        t.macrobatch + 1 == macrobatches, known, pipe, thread, lane);
        } else if (t.type == MOK_TASK_DOWN) {
            gather_follow(b, pipe, p.set[t.shared].k_blocks, lane);
        }
    }
}

/* ---- consumers: two warpgroups a block multiply and hand results on ---- */

struct forward_consumer : consumer_base {
    const mok_cuda_main_args &p;

    template <bool Clamped> __device__ void gate_up(const float (&d)[128], const task &t, uint4 v)
    {
        const mok_cuda_set &s = p.set[t.shared];
        uint32_t column = t.single ? t.column + b.rank : t.column, first = column * (MOK_TILE_N / 2);
        if (column >= s.tiles)
            return;
        uint32_t bytes = min(s.inter - first, MOK_TILE_N / 2) * 2, r = my_row(t);
        uint64_t at = (static_cast<uint64_t>(t.ring64) * 64 + r) * s.inter + first;
        if (!t.shared && t.macrobatch + 1 < macrobatches) {
            const mok_cuda_macrobatch *before = all.macrobatches + t.macrobatch + 1;
            wait_counter(all, &before->down_done, __ldcg(&before->down_warps), MOK_WAIT_RING_H, v);
        }
        const float limit = Clamped ? all.clamp : 0.0f;
        auto place = [&](void *base) { return r != ~0u ? static_cast<__nv_bfloat16 *>(base) + at : nullptr; };
        if (p.context_a != nullptr && !t.shared && t.macrobatch == 0) {
            store<true>(place(p.context_a), bytes, [&](uint32_t j, uint32_t half) {
                return gate_pair<Clamped>(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
            });
            store<true>(place(p.context_b), bytes, [&](uint32_t j, uint32_t half) {
                return up_pair<Clamped>(d[4 * j + 2 * half + 64], d[4 * j + 2 * half + 65]);
            });
        }
        store<false>(place(s.h), bytes, [&](uint32_t j, uint32_t half) {
            const uint32_t i = 4 * j + 2 * half;
            return swiglu_pair(gate_pair<Clamped>(d[i], d[i + 1]), up_pair<Clamped>(d[i + 64], d[i + 65]), limit);
        });
    }

    __device__ void run()
    {
        macrobatches = __ldcg(&all.head->macrobatches);
        for (uint32_t n = 0;; n++) {
            uint4 v = next_task(b, n, lane);
            task t = decode(v);
            if (t.type != MOK_TASK_GATE_UP)
                deliver(); /* the next task may wait for it */
            if (t.type == MOK_TASK_END)
                break;
            if (t.type == MOK_TASK_PULL) {
                pull_forward(*this, t, v);
                continue;
            }
            float d[128]; /* of this task alone: a task's first product does not read it */
            bool is_down = t.type == MOK_TASK_DOWN, active = b.rows(t) > group * 64;
            void *to = nullptr;
            if (is_down && my_row(t) != ~0u)
                to = reinterpret_cast<void *>(__ldg(all.row_dst + static_cast<uint64_t>(t.row64) * 64 + my_row(t)));
            uint32_t k_blocks = is_down ? p.set[t.shared].k_blocks : all.k_blocks;
            if (active)
                multiply<false, false, false, true>(d, k_blocks);
            else
                skip(k_blocks);
            if (macrobatches > 1 && !t.shared && lane == 0) /* someone waits for the ring's rows */
                add_release(
                    is_down ? &all.macrobatches[t.macrobatch].down_done : &all.macrobatches[t.macrobatch].gate_up_done, 1);
            if (is_down) {
                if (active)
                    store_output(d, t.single ? t.column + b.rank : t.column, to);
            } else {
                if (active && all.clamp > 0.0f)
                    gate_up<true>(d, t, v);
                else if (active)
                    gate_up<false>(d, t, v);
                if (b.rows(t) > 0 && b.counts(t, p.set[t.shared].tiles))
                    pending = all.hidden_done + t.row64 + b.row_first(t) / 64;
            }
        }
    }
};

__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    main_kernel(const __grid_constant__ mok_cuda_main_args p)
{
    run_block<forward_consumer, MOK_CONSUMER_REGISTERS, MOK_PRODUCER_REGISTERS, apart_hand_out>(p);
}

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_main(const mok_cuda_main_args *args, uint32_t blocks, void *stream)
{
    return mok::launch(true, mok::main_kernel, dim3(args->common.retiring_blocks + blocks), MOK_THREADS, mok::smem_bytes, stream,
                       *args);
}

static int mok_cuda_main_setup()
{
    return cudaFuncSetAttribute(mok::main_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
}

extern "C" int mok_cuda_kernels_setup(void)
{
    int r = mok_cuda_schedule_setup();
    if (r == 0)
        r = mok_cuda_backward_setup();
    return r ? r : mok_cuda_main_setup();
}
