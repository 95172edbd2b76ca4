/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 weight gradients: products of rows that have been turned, 128 tokens a stage, all by TMA. A tile of 128 x 128
 * codes has one scale, so that a promotion is an addition a sum. Tasks, stored sums and what is made of the sums are
 * those of the BF16 backward.
 */
#include <cuda_runtime.h>

#include "backward_stored.cuh"
#include "backward_wgrad.cuh"
#include "gather.cuh"
#include "launch.cuh"

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

struct mx_wgrad_consumer : wgrad_consumer {
    const mok_cuda_mx_wgrad_args &q;

    __device__ mx_wgrad_consumer(const consumer_base &base, const mok_cuda_mx_wgrad_args &args)
        : wgrad_consumer(base, args.wide), q(args)
    {
    }

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
        const uint32_t token = w.rows > 0 ? w.ring64 * 64 / MOK_MX_TILE_K : 0; /* without rows: times zeros */
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
                add_products(d, w);
            });
        }
    }
};

__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    mx_wgrad_kernel(const __grid_constant__ mok_cuda_mx_wgrad_args p)
{
    run_block<mx_wgrad_consumer, MOK_MX_BACKWARD_CONSUMER_REGISTERS, MOK_MX_BACKWARD_PRODUCER_REGISTERS>(p);
}

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_mx_wgrad(const mok_cuda_mx_wgrad_args *args, uint32_t blocks, void *stream)
{
    return mok::launch(true, mok::mx_wgrad_kernel, dim3(args->common.retiring_blocks + blocks), MOK_THREADS,
                       mok::smem_bytes, stream, *args);
}

extern "C" int mok_cuda_mx_wgrad_setup(void)
{
    return cudaFuncSetAttribute(mok::mx_wgrad_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
}
