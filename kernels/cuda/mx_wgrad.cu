/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 weight gradients: products of rows that have been turned, 128 tokens a stage, all by TMA. A tile of 128 x 128 or of
 * 32 x 32 codes has one scale, so that a promotion is an addition a sum, once or four times a stage. Tasks, stored sums and
 * what is made of the sums are those of the BF16 backward.
 */
#include <cuda_runtime.h>

#include "backward_stored.cuh"
#include "backward_wgrad.cuh"
#include "gather.cuh"
#include "launch.cuh"
#include "mx.h"

namespace mok
{
namespace
{

/* Which operands a matrix is the product of: rows of the tile, columns of it. */
__device__ __forceinline__ uint32_t rows_operand(const wgrad_task &w)
{
    return w.matrix == MOK_WGRAD_DOWN ? MOK_TOKENWISE_G : MOK_TOKENWISE_X;
}
__device__ __forceinline__ uint32_t columns_operand(const wgrad_task &w)
{
    return w.matrix == MOK_WGRAD_GATE ? MOK_TOKENWISE_D_A
           : w.matrix == MOK_WGRAD_UP ? MOK_TOKENWISE_D_B
                                      : MOK_TOKENWISE_H;
}

/* ---- loader ---- */

struct mx_wgrad_loader : stored_loader {
    const mok_cuda_mx_wgrad_args &q;

    __device__ void wgrad(const wgrad_task &w)
    {
        const CUtensorMap *rows = &q.operand[rows_operand(w)], *columns = &q.operand[columns_operand(w)];
        const uint32_t blocks = w.k_blocks<MOK_MX_TILE_K>(), stages = w.stages<MOK_MX_TILE_K>();
        const int32_t row = w.hidden(b.rank), column = w.inter() + b.rank * (MOK_TILE_N / 2);
        /* a run without rows lies past the edge, where zeros are */
        int32_t token = (w.rows > 0 ? w.ring64 * 64 : q.ring_rows) / 2;
        if (w.stored)
            stored_sums(w, stages);
#pragma unroll 1
        for (uint32_t k = 0; k < blocks; k++, pipe.n++, token += MOK_MX_TILE_K / 2) {
            const uint32_t full = begin(blocks - k, stages, MOK_A_BYTES + MOK_B_BYTES);
            tma_load_3d_multicast(b_at() + b.rank * (MOK_B_BYTES / 2), columns, full, token, column, 0, 3);
            tma_load_3d(a_at(), rows, full, token, row, 0);
        }
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

/* ---- gather: nothing, but for its arrivals ---- */

__device__ void gather(const mok_cuda_mx_wgrad_args &p, const block_view &b, uint32_t, uint32_t lane)
{
    pipeline pipe;
    for (uint32_t n = 0;; n++) {
        const uint4 v = next_task(b, n, lane);
        if (decode(v).type == MOK_TASK_END)
            return;
        gather_follow(b, pipe, decode_wgrad(p.wide, v).stages<MOK_MX_TILE_K>(), lane);
    }
}

/* ---- consumers ---- */

struct mx_wgrad_consumer_base : wgrad_consumer {
    const mok_cuda_mx_wgrad_args &q;

    __device__ mx_wgrad_consumer_base(const consumer_base &base, const mok_cuda_mx_wgrad_args &args)
        : wgrad_consumer(base, args.wide), q(args)
    {
    }

    template <class Products> __device__ __forceinline__ void run_products(Products products)
    {
        macrobatches = __ldcg(&all.head->macrobatches);
        for (uint32_t n = 0;; n++) {
            const uint4 v = next_task(b, n, lane);
            if (decode(v).type == MOK_TASK_END)
                break;
            wgrad_of<MOK_MX_TILE_K>(v, [&](float (&d)[128], const wgrad_task &w, auto stored) {
                if (!decltype(stored)::value) {
#pragma unroll
                    for (uint32_t i = 0; i < 128; i++)
                        d[i] = 0.0f;
                }
                if (w.rows > 0)
                    products(d, w);
                else
                    skip(w.k_blocks<MOK_MX_TILE_K>()); /* zeros, whose scales nobody has written */
            });
        }
    }
};

/* Tiles of 128 x 128. */
struct mx_wgrad_consumer : mx_wgrad_consumer_base {
    using mx_wgrad_consumer_base::mx_wgrad_consumer_base;

    /* The scales of a stage: of the tile's rows, of the first and the second half of its columns. */
    struct stage_scales {
        float rows, first, second;
    };
    /* Where they are, of the task's first stage; a block of 128 tokens further each stage. */
    struct scales_at {
        const float *rows, *first, *second;
        uint32_t rows_step, columns_step;

        __device__ __forceinline__ stage_scales take()
        {
            const stage_scales s = { __ldg(rows), __ldg(first), __ldg(second) };
            rows += rows_step;
            first += columns_step;
            second += columns_step;
            return s;
        }
    };
    __device__ __forceinline__ scales_at scales_of(const wgrad_task &w) const
    {
        const uint32_t token = w.ring64 * 64 / MOK_MX_TILE_K;
        const uint32_t row = min(w.hidden(b.rank) / 128, q.hidden_blocks - 1), column = w.inter() / 128;
        const float *columns = q.scale[columns_operand(w)] + static_cast<uint64_t>(token) * q.inter_blocks;
        return { q.scale[rows_operand(w)] + static_cast<uint64_t>(token) * q.hidden_blocks + row, columns + column,
                 columns + min(column + 1, q.inter_blocks - 1), q.hidden_blocks, q.inter_blocks };
    }

    /* d += this group's 64 rows of A times 256 columns of B, over the stages of a task, 128 columns at a time. */
    __device__ __forceinline__ void add_products(float (&d)[128], const wgrad_task &w)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        scales_at at = scales_of(w);
        stage_scales next = at.take();
#pragma unroll 1
        for (uint32_t left = w.k_blocks<MOK_MX_TILE_K>(); left != 0; left--, pipe.n++) {
            const uint32_t stage = pipe.stage();
            const uint64_t a_at = a0 + stage * (MOK_A_BYTES / 16), b_at = b0 + stage * (MOK_B_BYTES / 16);
            const stage_scales s = next;
            mbar_wait(b.full(stage), pipe.phase());
            if (left > 1)
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
                const float scale = __fmul_rn(s.rows, half ? s.second : s.first);
                wgmma_wait<0>();
#pragma unroll
                for (uint32_t i = 0; i < 64; i++) {
                    settle(part[i]);
                    d[64 * half + i] = __fmaf_rn(part[i], scale, d[64 * half + i]);
                }
            }
            release(stage);
        }
    }

    __device__ void run()
    {
        run_products([&](float (&d)[128], const wgrad_task &w) { add_products(d, w); });
    }
};

/* Tiles of 32 x 32: as many tokens as one instruction is deep. A stage has four of them below each other, and eight beside. */
struct mx_wgrad_consumer_32 : mx_wgrad_consumer_base {
    using mx_wgrad_consumer_base::mx_wgrad_consumer_base;

    static constexpr uint32_t depth = MOK_MX_BLOCK, across = MOK_TILE_N / MOK_MX_BLOCK;
    static_assert(MOK_MX_TILE_K / depth * across == 32, "a lane has a tile of a stage");

    /* Where the scales of this lane's tile are, and of this warp's rows of as many tokens; a stage further each time. */
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
    __device__ __forceinline__ scales_at scales_of(const wgrad_task &w) const
    {
        const uint64_t token = w.ring64 * 64 / depth + lane / across;
        const uint32_t row = min((w.hidden(b.rank) + warp * 16) / depth, q.hidden_blocks - 1);
        const uint32_t column = min(w.inter() / depth + lane % across, q.inter_blocks - 1);
        return { q.scale[rows_operand(w)] + token * q.hidden_blocks + row,
                 q.scale[columns_operand(w)] + token * q.inter_blocks + column, MOK_MX_TILE_K / depth * q.hidden_blocks,
                 MOK_MX_TILE_K / depth * q.inter_blocks };
    }

    /* As above, one instruction at a time: while one group promotes, the other's products run. */
    __device__ __forceinline__ void add_products(float (&d)[128], const wgrad_task &w)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        scales_at at = scales_of(w);
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
    }

    __device__ void run()
    {
        run_products([&](float (&d)[128], const wgrad_task &w) { add_products(d, w); });
    }
};

template <class Consumer>
__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    mx_wgrad_kernel(const __grid_constant__ mok_cuda_mx_wgrad_args p)
{
    run_block<Consumer, MOK_MX_BACKWARD_CONSUMER_REGISTERS, MOK_MX_BACKWARD_PRODUCER_REGISTERS>(p);
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
