/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 weight gradients: products of rows that have been turned, 128 tokens a stage, all by TMA. A tile of 128 x 128
 * or of 32 x 32 codes has one scale, so that a promotion is an addition a sum, once or four times a stage. Sums leave
 * by TMA, while the next task's products run. Tasks, and what sums start from, are those of the BF16 backward.
 */
#include <cuda_runtime.h>
#include <type_traits>

#include "backward_stored.cuh"
#include "backward_wgrad.cuh"
#include "launch.cuh"
#include "mx.h"

namespace mok
{
namespace
{

/*
 * 128 x 256 of a gradient. Its rows are rows of the tile, of each matrix: both operands have been turned, so either can
 * be the one with the rows.
 */
struct gradient_tile {
    uint32_t rows_operand, columns_operand;
    uint32_t row, column;               /* the first ones */
    uint32_t rows;                      /* of the whole gradient */
    uint32_t row_blocks, column_blocks; /* of scales */

    __device__ gradient_tile(const mok_cuda_mx_wgrad_args &q, const wgrad_task &w, uint32_t rank)
    {
        const bool down = w.matrix == MOK_WGRAD_DOWN;
        const uint32_t hidden = w.hidden_tile * MOK_UNIT_ROWS, inter = w.inter_tile * MOK_UNIT_ROWS;
        rows_operand = down ? MOK_TOKENWISE_G : w.matrix == MOK_WGRAD_GATE ? MOK_TOKENWISE_D_A : MOK_TOKENWISE_D_B;
        columns_operand = down ? MOK_TOKENWISE_H : MOK_TOKENWISE_X;
        row = (down ? hidden : inter) + rank * MOK_TILE_M;
        column = down ? inter : hidden;
        rows = down ? q.common.hidden : q.wide.set[0].inter;
        row_blocks = down ? q.hidden_blocks : q.inter_blocks;
        column_blocks = down ? q.inter_blocks : q.hidden_blocks;
    }
    /* There are rows for this consumer group. */
    __device__ bool has(uint32_t group) const
    {
        return row + group * 64 < rows;
    }
};

/*
 * The sums of a task leave from the two stages behind its products and from the results' place, as boxes of 64 rows of
 * 128 bytes: of each consumer group three in each stage, two in the results' place. A gather warp for each group, which
 * has nothing else to do, sends them away and then gives the stages back.
 */
constexpr uint32_t result_stages = 2, stage_boxes = 3, result_boxes = MOK_TILE_N / 32;
static_assert(MOK_CONSUMER_GROUPS * stage_boxes * box_bytes == MOK_A_BYTES + MOK_B_BYTES, "boxes fill a stage");
static_assert(result_boxes == result_stages * stage_boxes + 2, "boxes of a group");
static_assert(MOK_CONSUMER_GROUPS * 2 * box_bytes <= MOK_CONSUMER_WARPS * MOK_WARP_STAGE_BYTES, "results' place");
static_assert(MOK_GATHER_WARPS == MOK_CONSUMER_GROUPS, "a warp for each group");

/* `pipe`: at the first of the two stages. */
__device__ __forceinline__ uint32_t result_place(const block_view &b, pipeline pipe, uint32_t group, uint32_t box)
{
    if (box >= result_stages * stage_boxes)
        return b.smem + stage_offset + (2 * group + box % 2) * box_bytes;
    pipe.n += box / stage_boxes;
    const uint32_t i = box % stage_boxes;
    return i == 0 ? b.smem + a_offset + pipe.stage() * MOK_A_BYTES + group * box_bytes
                  : b.smem + b_offset + pipe.stage() * MOK_B_BYTES + (2 * group + i - 1) * box_bytes;
}

/* Barriers of a group and its gather warp: the places are free; boxes of a part, a stage's or the others, are there. */
enum result_barrier { RESULTS_FREE, RESULTS_THERE };
constexpr uint32_t result_parts = result_stages + 1, result_threads = 128 + 32;

__device__ __forceinline__ uint32_t result_barrier_of(uint32_t group, uint32_t barrier)
{
    return 1 + group * (RESULTS_THERE + result_parts) + barrier;
}

__device__ __forceinline__ uint32_t task_stages(const wgrad_task &w)
{
    return w.stages<MOK_MX_TILE_K>() + result_stages;
}

/* ---- loader ---- */

struct mx_wgrad_loader : stored_loader {
    const mok_cuda_mx_wgrad_args &q;

    __device__ void wgrad(const wgrad_task &w)
    {
        const gradient_tile t(q, w, b.rank);
        const CUtensorMap *rows = &q.operand[t.rows_operand], *columns = &q.operand[t.columns_operand];
        const int32_t row = t.row, first = t.column, column = first + b.rank * (MOK_TILE_N / 2);
        const uint32_t stages = task_stages(w);
        /* a run without rows lies past the edge, where zeros are */
        int32_t token = (w.rows > 0 ? w.ring64 * 64 : q.ring_rows) / 2;
        if (w.stored)
            stored_sums(w, { true, row, first }, stages);
        uint32_t left = w.k_blocks<MOK_MX_TILE_K>() + result_stages;
#pragma unroll 1
        for (; left > result_stages; left--, pipe.n++, token += MOK_MX_TILE_K / 2) {
            const uint32_t full = begin(left, stages, MOK_A_BYTES + MOK_B_BYTES);
            tma_load_3d_multicast(b_at() + b.rank * (MOK_B_BYTES / 2), columns, full, token, column, 0, 3);
            tma_load_3d(a_at(), rows, full, token, row, 0);
        }
        for (; left > 0; left--, pipe.n++)
            begin(left, stages, 0); /* nothing lands where results leave from */
    }
};

__device__ void load(const mok_cuda_mx_wgrad_args &p, const block_view &b, uint32_t lane)
{
    mx_wgrad_loader l = { { { p.common, b, {} }, p.wide }, p };
    for (uint32_t n = 0;; n++) {
        const uint4 v = next_task(b, n, lane);
        if (decode(v).type == MOK_TASK_END)
            return;
        if (lane == 0)
            l.wgrad(decode_wgrad(p.wide, v));
    }
}

/* ---- gather: nothing; these warps send sums away ---- */

struct mx_wgrad_storer {
    const mok_cuda_mx_wgrad_args &q;
    const block_view &b;
    uint32_t group;
    pipeline pipe;

    /* The group's boxes of a part, each where it belongs; `narrow`: of 64 columns, which are half as many. */
    __device__ void send(const CUtensorMap *map, const gradient_tile &t, int32_t plane, bool narrow, uint32_t part)
    {
        const uint32_t end = min((part + 1) * stage_boxes, narrow ? result_boxes / 2 : result_boxes);
        for (uint32_t box = part * stage_boxes; box < end; box++)
            tma_store_3d(map, result_place(b, pipe, group, box), t.column + (narrow ? 64 : 32) * box,
                         t.row + group * 64, plane);
        bulk_commit();
    }

    /*
     * In the place of this group's warps, for both blocks: one by one, since nothing that lands in both keeps blocks in the
     * same phase here, so that arrivals may belong to two of them.
     */
    __device__ void release(uint32_t stage, uint32_t lane) const
    {
        __syncwarp();
        if (lane < MOK_CLUSTER * MOK_CONSUMER_WARPS / MOK_CONSUMER_GROUPS)
            mbar_arrive_cluster(cluster_address(b.empty(stage), lane % MOK_CLUSTER));
    }

    __device__ void store(const wgrad_task &w, uint32_t lane)
    {
        const gradient_tile t(q, w, b.rank);
        const mok_cuda_backward_args &p = q.wide;
        const bool cut = w.cuts & MOK_RUN_IS_CUT;
        const CUtensorMap *map = cut ? &p.sums[w.matrix == MOK_WGRAD_DOWN] : &p.set[0].gradient[w.matrix];
        const int32_t plane = cut ? sums_plane(w, true) : w.expert;
        pipe.n += w.stages<MOK_MX_TILE_K>();
        if (t.has(group)) {
            block_arrive(result_barrier_of(group, RESULTS_FREE), result_threads);
#pragma unroll 1
            for (uint32_t part = 0; part < result_parts; part++) {
                block_sync(result_barrier_of(group, RESULTS_THERE + part), result_threads);
                if (lane == 0)
                    send(map, t, plane, p.narrow && !cut, part);
                __syncwarp();
            }
            bulk_wait_read<2>();
            release(pipe.stage(), lane);
            bulk_wait_read<1>();
            release((pipe.n + 1) % MOK_STAGES, lane);
            bulk_wait_read();
            __syncwarp();
        }
        pipe.n += result_stages;
    }
};

__device__ void gather(const mok_cuda_mx_wgrad_args &p, const block_view &b, uint32_t thread, uint32_t lane)
{
    mx_wgrad_storer s = { p, b, thread / 32, {} };
    for (uint32_t n = 0;; n++) {
        const uint4 v = next_task(b, n, lane);
        if (decode(v).type == MOK_TASK_END)
            break;
        s.store(decode_wgrad(p.wide, v), lane);
    }
    bulk_wait(); /* the next kernel may go on from these sums */
}

/* ---- consumers ---- */

struct mx_wgrad_consumer_base : wgrad_consumer {
    const mok_cuda_mx_wgrad_args &q;

    __device__ mx_wgrad_consumer_base(const consumer_base &base, const mok_cuda_mx_wgrad_args &args)
        : wgrad_consumer(base, args.wide), q(args)
    {
    }

    /*
     * 32 columns of this warp's rows. Rows with odd numbers go through them in another order: a half of a warp, which
     * stores at a time, would find four of its rows in the banks of two otherwise.
     */
    __device__ __forceinline__ void put_sums(const float (&d)[128], uint32_t box, uint32_t to) const
    {
        const bool odd = lane / 4 % 2;
        const uint32_t at = to + (((lane % 4 / 2) ^ (lane / 4) ^ (odd ? 4 : 0)) * 16) + lane % 2 * 8;
#pragma unroll
        for (uint32_t j = 0; j < 4; j++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t i = 16 * box + 4 * j + 2 * half, of_odd = 16 * box + 4 * (j ^ 2) + 2 * half;
                store_shared_8((at ^ (32 * j)) + half * 8 * 128, odd ? d[of_odd] : d[i],
                               odd ? d[of_odd + 1] : d[i + 1]);
            }
    }

    /* 64 columns of them as BF16. */
    __device__ __forceinline__ void put_bf16(const float (&d)[128], uint32_t box, uint32_t to) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 8; j++)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint32_t i = 32 * box + 4 * j + 2 * half;
                store_shared_4(to + half * 8 * 128 + (j ^ (lane / 4)) * 16 + lane % 4 * 4, pack_bf16(d[i], d[i + 1]));
            }
    }

    /* Boxes [first, end) go where the group's gather warp finds them; `from`: the first of the two stages. */
    template <bool Narrow>
    __device__ __forceinline__ void leave(const float (&d)[128], pipeline from, uint32_t first, uint32_t end) const
    {
        constexpr uint32_t boxes = Narrow ? result_boxes / 2 : result_boxes;
        const uint32_t row = (warp % 4 * 16 + lane / 4) * 128;
        __syncwarp();
        if (first == 0)
            block_sync(result_barrier_of(group, RESULTS_FREE), result_threads);
#pragma unroll
        for (uint32_t box = first; box < end; box++) {
            if (box % stage_boxes == 0 && box / stage_boxes < result_stages) {
                const pipeline at = { from.n + box / stage_boxes };
                mbar_wait(b.full(at.stage()), at.phase());
            }
            if (box < boxes) {
                const uint32_t to = result_place(b, from, group, box) + row;
                if (Narrow)
                    put_bf16(d, box, to);
                else
                    put_sums(d, box, to);
            }
            if (box % stage_boxes == stage_boxes - 1 || box == result_boxes - 1) {
                fence_async_shared();
                __syncwarp();
                block_arrive(result_barrier_of(group, RESULTS_THERE + box / stage_boxes), result_threads);
            }
        }
    }

    /* What the sums start from. */
    __device__ __forceinline__ void begin_sums(float (&d)[128], const wgrad_task &w)
    {
        if (!w.stored) {
#pragma unroll
            for (uint32_t i = 0; i < 128; i++)
                d[i] = 0.0f;
        } else if (p.narrow && !(w.cuts & MOK_RUN_GOES_ON)) {
            load_bf16<true>(d);
        } else {
            load_sums<true>(d);
        }
    }

    __device__ __forceinline__ bool leaves_narrow(const wgrad_task &w) const
    {
        return p.narrow && !(w.cuts & MOK_RUN_IS_CUT);
    }

    /* All tasks; `products` adds those of one to the sums, and says whether half of these have left. */
    template <class Products> __device__ __forceinline__ void run_products(Products products)
    {
        for (uint32_t n = 0;; n++) {
            const uint4 v = next_task(b, n, lane);
            if (decode(v).type == MOK_TASK_END)
                break;
            const wgrad_task w = decode_wgrad(p, v);
            const gradient_tile t(q, w, b.rank);
            if (!t.has(group)) {
                skip(task_stages(w));
                continue;
            }
            float d[128];
            begin_sums(d, w);
            bool half_left = false;
            if (w.rows > 0)
                half_left = products(d, w, t);
            else
                skip(w.k_blocks<MOK_MX_TILE_K>()); /* zeros, whose scales nobody has written */
            if (leaves_narrow(w))
                leave<true>(d, pipe, 0, result_boxes);
            else if (half_left)
                leave<false>(d, pipe, result_boxes / 2, result_boxes);
            else
                leave<false>(d, pipe, 0, result_boxes);
            pipe.n += result_stages;
        }
    }
};

/* Tiles of 128 x 128. */
struct mx_wgrad_consumer : mx_wgrad_consumer_base {
    using mx_wgrad_consumer_base::mx_wgrad_consumer_base;

    /* Where this lane finds a scale of each stage: of the tile's rows, of the first or second half of its columns. */
    struct scales_at {
        const float *scale;
        uint32_t step;

        __device__ __forceinline__ float take()
        {
            const float s = __ldg(scale);
            scale += step;
            return s;
        }
    };
    __device__ __forceinline__ scales_at scales_of(const wgrad_task &w, const gradient_tile &t) const
    {
        const bool of_rows = lane == 0;
        const uint32_t blocks = of_rows ? t.row_blocks : t.column_blocks;
        const uint32_t block = of_rows ? t.row / 128 : t.column / 128 + (lane - 1) % 2;
        const float *scale = q.scale[of_rows ? t.rows_operand : t.columns_operand] + min(block, blocks - 1);
        return { scale + static_cast<uint64_t>(w.ring64 * 64 / MOK_MX_TILE_K) * blocks, blocks };
    }

    /*
     * d += this group's 64 rows of A times 256 columns of B, over the stages of a task, 128 columns at a time. True:
     * the first 128 have left, while the last product was made.
     */
    __device__ __forceinline__ bool add_products(float (&d)[128], const wgrad_task &w, const gradient_tile &t)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        const bool early = !leaves_narrow(w);
        scales_at at = scales_of(w, t);
        float next = at.take();
        auto add = [&](auto last) {
            constexpr bool Last = decltype(last)::value;
            const uint32_t stage = pipe.stage();
            const uint64_t a_at = a0 + stage * (MOK_A_BYTES / 16), b_at = b0 + stage * (MOK_B_BYTES / 16);
            const float own = next;
            mbar_wait(b.full(stage), pipe.phase());
            if (!Last)
                next = at.take();
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint64_t b_half = b_at + half * (MOK_B_BYTES / 32);
                float part[64];
                wgmma_fence();
                wgmma_m64n128k32_e4m3_first(part, a_at, b_half);
#pragma unroll
                for (uint32_t i = 1; i < MOK_MX_TILE_K / 32; i++)
                    wgmma_m64n128k32_e4m3(part, a_at + 2 * i, b_half + 2 * i);
                wgmma_commit();
                const float scale = __fmul_rn(__shfl_sync(~0u, own, 0), __shfl_sync(~0u, own, 1 + half));
                if (Last && half == 1 && early)
                    leave<false>(d, { pipe.n + 1 }, 0, result_boxes / 2);
                wgmma_wait<0>();
#pragma unroll
                for (uint32_t i = 0; i < 64; i++) {
                    settle(part[i]);
                    d[64 * half + i] = __fmaf_rn(part[i], scale, d[64 * half + i]);
                }
            }
            release(stage);
            pipe.n++;
        };
#pragma unroll 1
        for (uint32_t left = w.k_blocks<MOK_MX_TILE_K>(); left > 1; left--)
            add(std::false_type{});
        add(std::true_type{});
        return early;
    }

    __device__ void run()
    {
        run_products(
            [&](float (&d)[128], const wgrad_task &w, const gradient_tile &t) { return add_products(d, w, t); });
    }
};

/*
 * Tiles of 32 x 32: as many tokens as one instruction is deep. A stage has four of them below each other, and eight
 * beside.
 */
struct mx_wgrad_consumer_32 : mx_wgrad_consumer_base {
    using mx_wgrad_consumer_base::mx_wgrad_consumer_base;

    static constexpr uint32_t depth = MOK_MX_BLOCK, across = MOK_TILE_N / MOK_MX_BLOCK;
    static_assert(MOK_MX_TILE_K / depth * across == 32, "a lane has a tile of a stage");

    /* Where scales of this lane's tile are, and of this warp's rows of as many tokens; a stage further each time. */
    struct scales_at {
        const float *rows, *columns;
        uint32_t rows_step, columns_step;

        __device__ __forceinline__ float2 take()
        {
            const float2 s = make_float2(__ldg(rows), __ldg(columns));
            rows += rows_step;
            columns += columns_step;
            return s;
        }
    };
    __device__ __forceinline__ scales_at scales_of(const wgrad_task &w, const gradient_tile &t) const
    {
        const uint64_t token = w.ring64 * 64 / depth + lane / across;
        const uint32_t row = min((t.row + warp * 16) / depth, t.row_blocks - 1);
        const uint32_t column = min(t.column / depth + lane % across, t.column_blocks - 1);
        return { q.scale[t.rows_operand] + token * t.row_blocks + row,
                 q.scale[t.columns_operand] + token * t.column_blocks + column, MOK_MX_TILE_K / depth * t.row_blocks,
                 MOK_MX_TILE_K / depth * t.column_blocks };
    }

    /* As above, one instruction at a time: while one group promotes, the other's products run. */
    __device__ __forceinline__ bool add_products(float (&d)[128], const wgrad_task &w, const gradient_tile &t)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        scales_at at = scales_of(w, t);
        float2 next = at.take();
#pragma unroll 1
        for (uint32_t left = w.k_blocks<MOK_MX_TILE_K>(); left != 0; left--, pipe.n++) {
            const uint32_t stage = pipe.stage();
            const uint64_t a_at = a0 + stage * (MOK_A_BYTES / 16), b_at = b0 + stage * (MOK_B_BYTES / 16);
            const float own = __fmul_rn(next.x, next.y);
            mbar_wait(b.full(stage), pipe.phase());
            if (left > 1)
                next = at.take();
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
#pragma unroll 1
                for (uint32_t i = 0; i < MOK_MX_TILE_K / depth; i++) {
                    float part[64], scale[4];
                    wgmma_fence();
                    wgmma_m64n128k32_e4m3_first(part, a_at + 2 * i, b_at + half * (MOK_B_BYTES / 32) + 2 * i);
                    wgmma_commit();
#pragma unroll
                    for (uint32_t j = 0; j < 4; j++)
                        scale[j] = __shfl_sync(~0u, own, across * i + 4 * half + j);
                    wgmma_wait<0>();
#pragma unroll
                    for (uint32_t j = 0; j < 64; j++) {
                        settle(part[j]);
                        d[64 * half + j] = __fmaf_rn(part[j], scale[j / 16], d[64 * half + j]);
                    }
                }
            }
            release(stage);
        }
        return false;
    }

    __device__ void run()
    {
        run_products(
            [&](float (&d)[128], const wgrad_task &w, const gradient_tile &t) { return add_products(d, w, t); });
    }
};

template <class Consumer>
__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    mx_wgrad_kernel(const __grid_constant__ mok_cuda_mx_wgrad_args p)
{
    run_block<Consumer, MOK_MX_BACKWARD_CONSUMER_REGISTERS, MOK_MX_BACKWARD_PRODUCER_REGISTERS, hand_out, 1>(p);
}

constexpr void (*wgrad_128)(mok_cuda_mx_wgrad_args) = mx_wgrad_kernel<mx_wgrad_consumer>;
constexpr void (*wgrad_32)(mok_cuda_mx_wgrad_args) = mx_wgrad_kernel<mx_wgrad_consumer_32>;

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_mx_wgrad(const mok_cuda_mx_wgrad_args *args, uint32_t blocks, void *stream)
{
    const dim3 grid(args->common.retiring_blocks + blocks);
    const auto kernel = args->per32 ? mok::wgrad_32 : mok::wgrad_128;
    return mok::launch(true, kernel, grid, MOK_THREADS, mok::smem_bytes, stream, *args);
}

extern "C" int mok_cuda_mx_wgrad_setup(void)
{
    int r = cudaFuncSetAttribute(mok::wgrad_128, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
    if (r == 0)
        r = cudaFuncSetAttribute(mok::wgrad_32, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
    return r;
}
