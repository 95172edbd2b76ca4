/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the megakernels share: the shared-memory map, barriers, tasks and their hand-out, bounded waits. A kernel is one
 * persistent grid of two-block clusters that take tasks in list order; nothing here knows what a task multiplies.
 */
#ifndef MOK_CUDA_PIPELINE_CUH
#define MOK_CUDA_PIPELINE_CUH

#ifdef MOK_DEBUG_WAITS
#include <stdio.h>
#endif

#include "layout.h"
#include "ptx.cuh"

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
    t.type = v.w >> MOK_TASK_TYPE_BIT & 7u;
    t.single = v.w >> MOK_TASK_SINGLE_BIT & 1u;
    t.shared = v.w >> MOK_TASK_SHARED_BIT & 1u;
    t.macrobatch = v.w >> MOK_TASK_MACROBATCH_BIT;
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

/*
 * Waits for task n; every lane gets it. One arrival a warp frees its place. The arrival must not overtake the load, which
 * may be stuck for long behind loads from another GPU: the vote needs what was loaded. No task is all ones.
 */
__device__ __forceinline__ uint4 next_task(const block_view &b, uint32_t n, uint32_t lane)
{
    uint32_t slot = n & 1u;
    mbar_wait(b.bar(bar_task_full + slot), n >> 1 & 1u);
    uint4 v = load_shared_16(b.smem + task_offset + 16 * slot);
    const bool loaded = __all_sync(~0u, v.w != ~0u);
    if (lane == 0 && loaded)
        mbar_arrive_cluster(cluster_address(b.bar(bar_task_empty + slot), 0));
    return v;
}

/* Waits until *counter >= want. On abort or after the limit it returns all the same: the operation has failed then. */
__device__ __forceinline__ void wait_slow(const mok_cuda_common &p, const uint32_t *counter, uint32_t want,
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
            /* signed: the clock's halves are read one after the other, so a look may be 4.3 s early or late */
            if (static_cast<int64_t>(timer_ns() - start) > static_cast<int64_t>(p.wait_limit_ns)) {
#ifdef MOK_DEBUG_WAITS
                printf("block %u thread %u: wait %u, %u of %u; task %u %u %#x %#x\n", blockIdx.x, threadIdx.x, what, seen, want,
                       v.x, v.y, v.z, v.w);
#endif
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

__device__ __forceinline__ void wait_counter(const mok_cuda_common &p, const uint32_t *counter, uint32_t want,
                                             uint32_t what, uint4 v)
{
    if (load_acquire(counter) < want)
        wait_slow(p, counter, want, what, v);
}

/* ---- scheduler: one thread of the cluster hands tasks to both blocks ---- */

__device__ void chaos(const mok_cuda_common &p, uint32_t id)
{
    if (p.chaos_delay_us == 0)
        return;
    uint32_t h = (id + 1) * 2654435761u ^ p.chaos_seed * 40503u ^ static_cast<uint32_t>(clock64());
    h ^= h >> 15;
    uint64_t until = timer_ns() + (h * 2246822519u >> 8) % (p.chaos_delay_us * 1000u);
    while (timer_ns() < until)
        __nanosleep(500);
}

/* Ends the task marked before, begins this one; what is marked now. */
__device__ uint32_t mark(const mok_cuda_common &p, uint32_t before, uint4 v)
{
    const task t = decode(v);
    const unsigned long long now = timer_ns();
    if (before < MOK_CUDA_MARKS)
        atomicMax(reinterpret_cast<unsigned long long *>(p.marks->ended + before), now);
    if (t.type == MOK_TASK_END)
        return ~0u;
    const uint32_t slot = t.shared ? 0 : t.macrobatch * p.slots + t.ring64 / p.slot_rows64;
    const uint32_t place = slot * MOK_CUDA_MARK_KINDS + (t.shared ? 0 : t.type);
    if (place < MOK_CUDA_MARKS)
        atomicMin(reinterpret_cast<unsigned long long *>(p.marks->begun + place), now);
    return place;
}

/* Chooses a cluster's tasks where there is one list of them. */
struct hand_out {
    const mok_cuda_common &p;
    uint32_t tasks, most, done = 0;

    __device__ explicit hand_out(const mok_cuda_common &common) : p(common)
    {
        tasks = __ldcg(&p.head->tasks);
        most = blockIdx.x < p.retiring_blocks ? p.retire_after : ~0u;
    }

    __device__ uint4 next()
    {
        uint32_t id = done < most ? atomicAdd(&p.head->next_task, 1u) : tasks; /* retires: what it has taken, it ends */
        uint4 v = make_uint4(0, 0, 0, 0);
        if (id < tasks && load_acquire(p.abort_word) == 0) {
            v = __ldcg(reinterpret_cast<const uint4 *>(p.tasks) + id);
            chaos(p, id);
            done += p.work[decode(v).type];
        }
        return v;
    }
};

/*
 * Chooses a cluster's tasks where pulls are a list of their own. The clusters that start first take pulls before all else; the others never do. Each list is
 * taken in order. A task of the one list waits for earlier tasks of its own, a gate/up also for pulls, and a pull for tasks
 * of the macrobatch before it: while those have not all been taken, a cluster with a pull in hand takes tasks, too, up to
 * the first that its pull may have to be ahead of. So any number of clusters comes to the end.
 */
struct apart_hand_out {
    const mok_cuda_common &p;
    uint32_t tasks, pulls, most;
    uint32_t done = 0;
    uint32_t pull;        /* in hand; `pulls` and more: none, and none will be */
    uint32_t later = ~0u; /* a task in hand that must come behind pulls */

    __device__ explicit apart_hand_out(const mok_cuda_common &common) : p(common)
    {
        tasks = __ldcg(&p.head->tasks);
        pulls = p.pull_clusters != 0 ? __ldcg(&p.head->pulls) : 0;
        most = blockIdx.x < p.retiring_blocks ? p.retire_after : ~0u;
        pull = pulls;
        if (pulls != 0 && atomicAdd(&p.head->clusters, 1u) < p.pull_clusters)
            pull = atomicAdd(&p.head->next_pull, 1u);
    }

    __device__ uint4 take_pull(uint4 v)
    {
        chaos(p, tasks + pull);
        pull = atomicAdd(&p.head->next_pull, 1u);
        return v;
    }

    __device__ uint4 next()
    {
        if (load_acquire(p.abort_word) != 0)
            return make_uint4(0, 0, 0, 0);
        uint4 v = make_uint4(0, 0, 0, 0);
        const bool has_pull = pull < pulls;
        if (has_pull) {
            v = __ldcg(reinterpret_cast<const uint4 *>(p.pulls) + pull);
            if (later >= v.z && v.z <= load_acquire(&p.head->next_task)) /* what it waits for has been taken, and begun */
                return take_pull(v);
        }
        if (later == ~0u) /* a cluster that retires ends what it has taken */
            later = done < most || has_pull ? atomicAdd(&p.head->next_task, 1u) : tasks;
        if (has_pull && later >= v.z)
            return take_pull(v);
        const uint32_t id = later;
        later = ~0u;
        if (id >= tasks)
            return make_uint4(0, 0, 0, 0);
        chaos(p, id);
        v = __ldcg(reinterpret_cast<const uint4 *>(p.tasks) + id);
        done += p.work[decode(v).type];
        return v;
    }
};

template <class HandOut> __device__ void schedule(const mok_cuda_common &p, const block_view &b)
{
    uint32_t marked = ~0u;
    HandOut tasks(p);
    for (uint32_t n = 0;; n++) {
        uint32_t slot = n & 1u;
        if (n > 0)
            mbar_wait(b.bar(bar_request), (n - 1) & 1u);
        const uint4 v = tasks.next();
        mbar_wait(b.bar(bar_task_empty + slot), (n >> 1 & 1u) ^ 1u);
        for (uint32_t r = 0; r < MOK_CLUSTER; r++) {
            uint32_t bar = cluster_address(b.bar(bar_task_full + slot), r);
            mbar_expect_cluster(bar, 16);
            store_async_16(cluster_address(b.smem + task_offset + 16 * slot, r), v, bar);
        }
        const uint32_t type = decode(v).type;
        if (p.marks != nullptr) {
            if (type == MOK_TASK_END) /* all have ended the one before when they have read this one */
                mbar_wait(b.bar(bar_task_empty + slot), n >> 1 & 1u);
            marked = mark(p, marked, v);
        }
        if (type == MOK_TASK_END)
            return;
    }
}

/* ---- a block begins ---- */

/*
 * One thread of each block, before anything else; a cluster_sync comes next. `fillers`: arrivals that make a stage full.
 */
__device__ void init_barriers(const block_view &b, uint32_t fillers)
{
    if (b.smem % 1024 != 0)
        __trap();
    for (uint32_t i = 0; i < MOK_STAGES; i++) {
        mbar_init(b.full(i), fillers);
        mbar_init(b.empty(i), MOK_CLUSTER * MOK_CONSUMER_WARPS);
    }
    for (uint32_t i = 0; i < 2; i++) {
        mbar_init(b.bar(bar_task_full + i), 1);
        mbar_init(b.bar(bar_task_empty + i), task_readers);
    }
    mbar_init(b.bar(bar_request), 1);
    mbar_init_fence();
}

/*
 * A kernel's body: barriers, then every warp its role. The kernel brings its own load and gather, told apart by their
 * arguments, and its Consumer.
 */
template <class Consumer, int ConsumerRegisters = MOK_CONSUMER_REGISTERS, int ProducerRegisters = MOK_PRODUCER_REGISTERS,
          class HandOut = hand_out, uint32_t Fillers = 1 + MOK_GATHER_WARPS, class Arguments>
__device__ __forceinline__ void run_block(const Arguments &p)
{
    const block_view b = { smem_address(dynamic_shared()), cluster_rank() };
    const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

    if (threadIdx.x == 0)
        init_barriers(b, Fillers);
    __syncwarp();
    cluster_sync();
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && threadIdx.x == 0)
        p.common.report->schedule_to_ns = timer_ns();

    if (warp >= MOK_CONSUMER_WARPS) {
        registers_lower<ProducerRegisters>();
        uint32_t role = warp - MOK_CONSUMER_WARPS;
        if (role == 0) {
            load(p, b, lane);
        } else if (role == 1) {
            if (b.rank == 0 && lane == 0)
                schedule<HandOut>(p.common, b);
        } else {
            gather(p, b, (role - 2) * 32 + lane, lane);
        }
    } else {
        registers_raise<ConsumerRegisters>();
        Consumer c = { { p.common, b, warp / 4, warp, lane, cluster_address(b.empty(0), lane % MOK_CLUSTER), {} }, p };
        c.run();
    }
    __syncwarp();
    cluster_sync(); /* the other block may still write to this one's barriers */
}

} // namespace
} // namespace mok
#endif
