/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scales that come with their stage: for each row 16 bytes as they are fetched, of which a word becomes a float; for
 * each column a float. Used by the MXFP8 backward, whose turned weights have one scale for all columns of a half.
 */
#ifndef MOK_CUDA_MX_SLOTS_CUH
#define MOK_CUDA_MX_SLOTS_CUH

#include "mx.cuh"

namespace mok
{
namespace
{

/*
 * Of a stage: 16 bytes a row, whose first word becomes the scale; then a float a column. Words 1 and 2 of row 4 w
 * become the scale that all columns of either half have in gather warp w's eyes, or 0. Behind them: where rows and
 * columns' scales begin.
 */
constexpr uint32_t slot_bytes = mx_slot, slot_columns = mx_scale_columns, slot_stage_bytes = mx_scale_bytes,
                   slot_offset = mx_scale_offset;

/* Of a stage with a turned weight: a float a row, beside each other, then one for each half of the columns. */
constexpr uint32_t even_factor_bytes = MOK_TILE_M * 4, even_scale_bytes = even_factor_bytes + 16;
static_assert(even_scale_bytes + 16 * MOK_TILE_M <= slot_stage_bytes, "and codes of rows' scales, where others' lie");

/* ---- gather: rows of x, and everybody's scales ---- */

struct slot_gather : mx_gather {
    __device__ uint32_t scales(uint32_t stage) const
    {
        return b.smem + slot_offset + stage * slot_stage_bytes;
    }
    /* The first of the four codes in a word: all are equal. */
    __device__ static uint32_t scale(uint32_t word)
    {
        return __float_as_uint(mok_e8m0_to_f32(static_cast<uint8_t>(word)));
    }

    /* Begins to fetch this thread's two rows' and four columns' scales of k-block k. */
    __device__ void fetch(uint32_t stage, uint32_t k) const
    {
        const uint32_t to = scales(stage);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = own_row() + 64 * i;
            cp_async_16(to + slot_bytes * r, row(r) + p.common.hidden + (4 * k & ~15u), 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint8_t *at = noted(b.smem + mx_column_offset + 8 * (thread + 64 * i)) + 4 * k;
            const uint32_t word = to + slot_columns + 4 * (thread + 64 * i);
            if (scales_of_row<true>() % 4 == 0)
                cp_async_4(word, at);
            else
                store_shared_4(word, __ldg(at));
        }
    }

    /* What this thread has fetched of a stage is there, and becomes floats. */
    __device__ void finish(uint32_t stage, uint32_t k) const
    {
        const uint32_t at = scales(stage);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t slot = at + slot_bytes * (own_row() + 64 * i);
            store_shared_4(slot, scale(load_shared_4(slot + 4 * (k % 4))));
        }
        __syncwarp();
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t word = at + slot_columns + 4 * (thread + 128 * half);
            const uint32_t one = scale(load_shared_4(word)), two = scale(load_shared_4(word + 256));
            store_shared_4(word, one);
            store_shared_4(word + 256, two);
            const uint32_t first = __shfl_sync(~0u, one, 0);
            const bool same = __all_sync(~0u, one == first && two == first);
            if (lane == 0)
                store_shared_4(at + slot_bytes * (thread / 32 * 4) + 4 + 4 * half, same ? first : 0);
        }
        gather_landed(b, stage, lane);
    }

    /* All stages of a gate/up task whose tile begins at `column`: rows of x, swizzled as the tensor cores read them,
     * and scales. */
    __device__ __forceinline__ void fill(const task &t, uint32_t column)
    {
        const uint32_t k_blocks = p.common.k_blocks;
        const uint32_t chunk = thread % 8, first = thread / 8;
        const uint32_t dst = b.smem + a_offset + first * 128 + ((chunk ^ (first % 8)) * 16);
        note_columns<true>(t, column);
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            const uint32_t stage = pipe.stage();
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            const uint32_t at = k * MOK_MX_TILE_K + chunk * 16, bytes = at < p.common.hidden ? 16 : 0;
            const uint32_t to = dst + stage * MOK_A_BYTES;
#pragma unroll 4
            for (uint32_t i = 0; i < gather_rows; i++)
                cp_async_16(to + i * gather_step * 128, row(first + i * gather_step) + (bytes ? at : 0), bytes);
            fetch(stage, k);
            cp_async_commit();
            if (k > 0) {
                cp_async_wait<1>();
                finish((pipe.n - 1) % MOK_STAGES, k - 1);
            }
        }
        cp_async_wait<0>();
        finish((pipe.n - 1) % MOK_STAGES, k_blocks - 1);
    }
};

/* ---- consumers ---- */

struct slot_consumer : mx_consumer_base {
    /* sum += part times the scales of its rows and of its columns, which begin at `columns`; returns what it loaded
     * last. */
    __device__ __forceinline__ uint32_t promote(float *sum, const float (&part)[64], float upper, float lower,
                                                uint32_t columns) const
    {
        uint32_t last = 0;
#pragma unroll
        for (uint32_t j = 0; j < 16; j++) {
            const uint2 w = load_shared_8(columns + 32 * j);
            const float s0 = __uint_as_float(w.x), s1 = __uint_as_float(w.y);
            sum[4 * j] = __fmaf_rn(part[4 * j], __fmul_rn(upper, s0), sum[4 * j]);
            sum[4 * j + 1] = __fmaf_rn(part[4 * j + 1], __fmul_rn(upper, s1), sum[4 * j + 1]);
            sum[4 * j + 2] = __fmaf_rn(part[4 * j + 2], __fmul_rn(lower, s0), sum[4 * j + 2]);
            sum[4 * j + 3] = __fmaf_rn(part[4 * j + 3], __fmul_rn(lower, s1), sum[4 * j + 3]);
            last = w.y;
        }
        return last;
    }

    /* Until then `pending` goes out: the stage may wait for rows whose pull waits behind a task that waits for this. */
    __device__ __forceinline__ void await(uint32_t stage)
    {
        if (__all_sync(~0u, mbar_try(b.full(stage), pipe.phase())))
            return;
        deliver();
        mbar_wait(b.full(stage), pipe.phase());
    }

    /* d = this group's 64 rows of A times 256 columns of B, over the stages of a task, 128 columns at a time. */
    __device__ __forceinline__ void multiply_mx(float (&d)[128], uint32_t k_blocks)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        const uint32_t row = slot_bytes * (warp * 16 + lane / 4), column = slot_columns + 8 * (lane % 4);
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            d[i] = 0.0f;
#pragma unroll 1
        for (const uint32_t end = pipe.n + k_blocks; pipe.n != end; pipe.n++) {
            const uint32_t stage = pipe.stage(), scales = b.smem + slot_offset + stage * slot_stage_bytes;
            const uint64_t at = a0 + stage * (MOK_A_BYTES / 16), bt = b0 + stage * (MOK_B_BYTES / 16);
            await(stage);
            float upper = 0.0f, lower = 0.0f;
            uint32_t last = 0;
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                float part[64];
                const uint64_t b_at = bt + half * (MOK_B_BYTES / 32);
                wgmma_fence();
                wgmma_m64n128k32_e4m3_first(part, at, b_at);
#pragma unroll
                for (uint32_t i = 1; i < MOK_MX_TILE_K / 32; i++)
                    wgmma_m64n128k32_e4m3(part, at + 2 * i, b_at + 2 * i);
                wgmma_commit();
                if (half == 0) {
                    deliver(); /* while the tensor cores are busy; at most once a task */
                    upper = __uint_as_float(load_shared_4(scales + row));
                    lower = __uint_as_float(load_shared_4(scales + row + 8 * slot_bytes));
                }
                const uint32_t same = load_shared_4(scales + 4 + 4 * half);
                const bool one = same != 0 && same == load_shared_4(scales + 4 * slot_bytes + 4 + 4 * half);
                wgmma_wait<0>();
#pragma unroll
                for (uint32_t i = 0; i < 64; i++)
                    settle(part[i]);
                if (one)
                    promote_same(d + 64 * half, part, __fmul_rn(upper, __uint_as_float(same)),
                                 __fmul_rn(lower, __uint_as_float(same)));
                else
                    last = promote(d + 64 * half, part, upper, lower, scales + column + half * 512);
            }
            /* no arrival overtakes a load of scales, see next_task */
            if (__all_sync(~0u, last != ~0u))
                release(stage);
        }
    }

    /*
     * The same of a turned weight, whose columns have one scale a half. What a group does between its products must be
     * shorter than the other's products: so these begin first, and scales are asked for behind them.
     */
    __device__ __forceinline__ void multiply_even(float (&d)[128], uint32_t k_blocks)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        const uint32_t row = 4 * (warp * 16 + lane / 4);
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            d[i] = 0.0f;
#pragma unroll 1
        for (const uint32_t end = pipe.n + k_blocks; pipe.n != end; pipe.n++) {
            const uint32_t stage = pipe.stage(), scales = b.smem + slot_offset + stage * slot_stage_bytes;
            const uint64_t at = a0 + stage * (MOK_A_BYTES / 16), bt = b0 + stage * (MOK_B_BYTES / 16);
            await(stage);
            float upper = 0.0f, lower = 0.0f;
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                float part[64];
                const uint64_t b_at = bt + half * (MOK_B_BYTES / 32);
                wgmma_fence();
                wgmma_m64n128k32_e4m3_first(part, at, b_at);
#pragma unroll
                for (uint32_t i = 1; i < MOK_MX_TILE_K / 32; i++)
                    wgmma_m64n128k32_e4m3(part, at + 2 * i, b_at + 2 * i);
                wgmma_commit();
                if (half == 0) {
                    deliver(); /* while the tensor cores are busy; at most once a task */
                    upper = __uint_as_float(load_shared_4(scales + row));
                    lower = __uint_as_float(load_shared_4(scales + row + 8 * 4));
                }
                const uint32_t same = load_shared_4(scales + even_factor_bytes + 4 * half);
                wgmma_wait<0>();
#pragma unroll
                for (uint32_t i = 0; i < 64; i++)
                    settle(part[i]);
                /* no arrival overtakes a load of scales, see next_task; the rows' were needed by the first half's sums */
                if (half == 1 && __all_sync(~0u, same != ~0u))
                    release(stage);
                if (same != 0) /* always; without a branch the compiler mixes both halves, and registers run out */
                    promote_same(d + 64 * half, part, __fmul_rn(upper, __uint_as_float(same)),
                                 __fmul_rn(lower, __uint_as_float(same)));
            }
        }
    }
};

} // namespace
} // namespace mok
#endif
