/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scales of 32 values: each matrix instruction is as deep as a scale reaches, and its sums take the scales as they are
 * promoted, four times a stage. What does not depend on how far a scale reaches is mx.cuh's.
 */
#ifndef MOK_CUDA_MX_BLOCKS_CUH
#define MOK_CUDA_MX_BLOCKS_CUH

#include "mx.cuh"

namespace mok
{
namespace
{

/*
 * A stage's scales, as BF16, which has all of E8M0. Columns: for each of the stage's four blocks of 32 along K one behind
 * the other; there 32 columns in 64 bytes, 2 q and 2 q + 1 beyond each eighth one at 16 q, as a consumer's lane q wants
 * them. Rows: the four blocks' together.
 */
constexpr uint32_t block_count = MOK_MX_TILE_K / MOK_MX_BLOCK;
constexpr uint32_t block_columns_bytes = MOK_TILE_N * 2, block_group_bytes = 32 * 2;
constexpr uint32_t block_rows = block_count * block_columns_bytes, block_row_bytes = block_count * 2;
static_assert(block_rows + MOK_TILE_M * block_row_bytes <= mx_scale_bytes, "scales do not fit beside a stage");

__device__ __forceinline__ uint32_t block_scales(const block_view &b, uint32_t stage)
{
    return b.smem + mx_scale_offset + stage * mx_scale_bytes;
}

/* Behind staged rows, four words: 1 where 32 columns of a half have the same scales in all of the stage's blocks. */
__device__ __forceinline__ uint32_t block_same(const block_view &b, uint32_t stage, uint32_t half)
{
    return b.smem + stage_offset + (1 + 2 * stage + half) * mx_row_bytes + 128;
}
static_assert(1 + 2 * MOK_STAGES < 15, "tasks lie behind the first and the last of a warp's staged rows");

/* ---- gather: everybody's scales, and rows that the loader does not bring ---- */

struct block_gather : mx_gather {
    /* Codes of one k-block: of this thread's two rows and four columns. */
    struct codes {
        uint32_t row[2], column[4];
    };

    /* Four codes from `at` on, of which `real` belong to the row. */
    __device__ static uint32_t load(const uint8_t *at, uint32_t real, bool aligned)
    {
        if (aligned)
            return __ldg(reinterpret_cast<const uint32_t *>(at));
        uint32_t word = 0;
#pragma unroll 1
        for (uint32_t j = 0; j < min(real, 4u); j++)
            word |= static_cast<uint32_t>(__ldg(at + j)) << 8 * j;
        return word;
    }

    /* Rows' scales begin `behind` bytes after what is noted of them; rows and columns have `count` each. */
    __device__ __forceinline__ codes ask(uint32_t k, uint32_t behind, uint32_t count) const
    {
        const uint32_t first = 4 * k, real = count - first;
        const uint32_t mask = real < 4 ? (1u << 8 * real) - 1 : ~0u; /* a row may end in the k-block */
        codes c;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++)
            c.row[i] = mask & __ldcg(reinterpret_cast<const uint32_t *>(row(own_row() + 64 * i) + behind + first));
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            c.column[i] = load(noted(b.smem + mx_column_offset + 8 * (thread + 64 * i)) + first, real, count % 4 == 0);
        return c;
    }

    __device__ static uint32_t narrow(uint32_t word, uint32_t block)
    {
        return __float_as_uint(mok_e8m0_to_f32(static_cast<uint8_t>(word >> 8 * block))) >> 16;
    }

    /* Puts them beside a stage. */
    __device__ __forceinline__ void put(uint32_t stage, const codes &c) const
    {
        const uint32_t at = block_scales(b, stage);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t to = at + block_rows + block_row_bytes * (own_row() + 64 * i), w = c.row[i];
            store_shared_4(to, narrow(w, 0) | narrow(w, 1) << 16);
            store_shared_4(to + 4, narrow(w, 2) | narrow(w, 3) << 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t group = 2 * i + thread / 32;
            const uint32_t to = at + group * block_group_bytes + lane % 8 / 2 * 16 + lane / 8 * 4 + lane % 2 * 2;
#pragma unroll
            for (uint32_t block = 0; block < block_count; block++)
                store_shared_2(to + block * block_columns_bytes, narrow(c.column[i], block));
            const bool same = __all_sync(~0u, c.column[i] == __shfl_sync(~0u, c.column[i], 0));
            if (lane == 0)
                store_shared_4(block_same(b, stage, i / 2) + group % 4 * 4, same);
        }
    }

    /*
     * All k-blocks of a task whose rows and columns are noted. Gathered: 128 bytes of each row too, swizzled as the tensor cores
     * read them, of rows of `bytes`; otherwise the loader brings them.
     */
    template <bool Gathered>
    __device__ __forceinline__ void bring(uint32_t k_blocks, uint32_t behind, uint32_t count, uint32_t bytes = 0)
    {
        const uint32_t chunk = thread % 8, first = thread / 8;
        const uint32_t to = b.smem + a_offset + first * 128 + ((chunk ^ (first % 8)) * 16);
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            const uint32_t stage = pipe.stage(), at = k * MOK_MX_TILE_K + chunk * 16;
            const codes c = ask(k, behind, count);
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            if (Gathered) {
#pragma unroll 4
                for (uint32_t i = 0; i < gather_rows; i++)
                    cp_async_16(to + stage * MOK_A_BYTES + i * gather_step * 128,
                                row(first + i * gather_step) + (at < bytes ? at : 0), at < bytes ? 16 : 0);
                cp_async_commit();
            }
            put(stage, c);
            if (!Gathered) {
                gather_landed(b, stage, lane);
            } else if (k > 0) {
                cp_async_wait<1>();
                gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
            }
        }
        if (Gathered) {
            cp_async_wait<0>();
            gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
        }
    }

    /* A forward's task that multiplies x, or h: the loader has brought rows beside each other. */
    template <bool X> __device__ __forceinline__ void fill(const task &t)
    {
        const uint8_t *rows = X ? p.x_rows[t.macrobatch > 0] : p.h_scale;
        const uint32_t bytes = X ? p.x_row_bytes : p.h_scale_bytes;
        note_rows(t, [&](uint32_t r) { return rows + (static_cast<uint64_t>(t.ring64) * 64 + r) * bytes; });
        note_columns<X>(t, b.column(t, X ? p.tiles : p.common.down_tiles) * (X ? MOK_TILE_N / 2 : MOK_TILE_N));
        bring<false>(X ? p.common.k_blocks : p.h_blocks, X ? p.common.hidden : 0, scales_of_row<X>());
    }
};

/* ---- consumers ---- */

struct block_consumer : mx_consumer_base {
    __device__ static float scale(uint32_t pair, uint32_t i)
    {
        return __uint_as_float(i ? pair & 0xffff0000u : pair << 16);
    }

    /* As promote, where 32 columns have one scale. */
    __device__ __forceinline__ static void promote_groups(float *sum, const float (&part)[64], float upper, float lower,
                                                          uint32_t columns)
    {
#pragma unroll
        for (uint32_t group = 0; group < 4; group++) {
            const float s = scale(load_shared_4(columns + group * block_group_bytes), 0);
            const float above = __fmul_rn(upper, s), below = __fmul_rn(lower, s);
#pragma unroll
            for (uint32_t i = 16 * group; i < 16 * group + 16; i += 4) {
                sum[i] = __fmaf_rn(part[i], above, sum[i]);
                sum[i + 1] = __fmaf_rn(part[i + 1], above, sum[i + 1]);
                sum[i + 2] = __fmaf_rn(part[i + 2], below, sum[i + 2]);
                sum[i + 3] = __fmaf_rn(part[i + 3], below, sum[i + 3]);
            }
        }
    }

    /*
     * d = this group's 64 rows of A times 256 columns of B, over the stages of a task: 128 columns and one instruction's
     * depth at a time. While one group promotes, the other's products run.
     */
    __device__ __forceinline__ void multiply_mx(float (&d)[128], uint32_t k_blocks)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        const uint32_t row = block_rows + block_row_bytes * (warp * 16 + lane / 4);
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            d[i] = 0.0f;
#pragma unroll 1
        for (const uint32_t end = pipe.n + k_blocks; pipe.n != end; pipe.n++) {
            const uint32_t stage = pipe.stage(), scales = block_scales(b, stage);
            const uint64_t at = a0 + stage * (MOK_A_BYTES / 16), bt = b0 + stage * (MOK_B_BYTES / 16);
            if (!__all_sync(~0u, mbar_try(b.full(stage), pipe.phase()))) {
                deliver(); /* the stage may wait for rows whose pull waits behind a task that waits for this */
                mbar_wait(b.full(stage), pipe.phase());
            }
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                const uint4 groups = load_shared_16(block_same(b, stage, half));
                const bool same = (groups.x & groups.y & groups.z & groups.w) != 0;
#pragma unroll 1
                for (uint32_t block = 0; block < block_count; block++) {
                    float part[64];
                    wgmma_fence();
                    wgmma_m64n128k32_e4m3_first(part, at + 2 * block, bt + half * (MOK_B_BYTES / 32) + 2 * block);
                    wgmma_commit();
                    if (half == 0)
                        deliver(); /* while the tensor cores are busy; at most once a task */
                    const uint32_t own = scales + row + block / 2 * 4, next = 8 * block_row_bytes;
                    const float upper = scale(load_shared_4(own), block % 2), lower = scale(load_shared_4(own + next), block % 2);
                    const uint32_t columns = scales + block * block_columns_bytes + half * 4 * block_group_bytes;
                    wgmma_wait<0>();
#pragma unroll
                    for (uint32_t i = 0; i < 64; i++)
                        settle(part[i]);
                    if (same)
                        promote_groups(d + 64 * half, part, upper, lower, columns);
                    else
                        promote(d + 64 * half, part, upper, lower, columns + 16 * (lane % 4));
                }
            }
            /* the arrival must not overtake the loads: the vote needs what the last one brought; no sum is this NaN */
            if (__all_sync(~0u, __float_as_uint(d[127]) != 0x7fc12345u))
                release(stage);
        }
    }
    __device__ __forceinline__ void multiply_even(float (&d)[128], uint32_t k_blocks)
    {
        multiply_mx(d, k_blocks);
    }

    /* A forward's; nothing is done beside its products. */
    template <class Begun>
    __device__ __forceinline__ void multiply_mx(float (&d)[128], uint32_t k_blocks, const Begun &begun)
    {
        begun();
        multiply_mx(d, k_blocks);
    }

    /*
     * Quantises eight rows' 128 columns of h into this warp's staging; the four scales go to `scale` of lane's row.
     * h[2 j + e]: column 8 j + 2 (lane % 4) + e of row lane / 4 + 8 half.
     */
    __device__ __forceinline__ void quantise(const float (&h)[32], uint32_t half, uint8_t *scale, float *) const
    {
        const uint32_t at = results() + (lane / 4 + 8 * half) * mx_row_bytes + 2 * (lane % 4);
        uint32_t scales = 0;
#pragma unroll
        for (uint32_t first = 0; first < 16; first += mx_pairs) {
            uint32_t amax = 0;
#pragma unroll
            for (uint32_t i = 2 * first; i < 2 * (first + mx_pairs); i++)
                amax = mx_amax(amax, h[i]);
            amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
            amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
            const uint32_t code = mok_mx_scale(__uint_as_float(amax));
            const float inverse = mok_e8m0_inverse(static_cast<uint8_t>(code));
#pragma unroll
            for (uint32_t j = first; j < first + mx_pairs; j++)
                store_shared_2(at + 8 * j, mx_codes(h[2 * j], h[2 * j + 1], inverse));
            scales |= code << 2 * first;
        }
        const uint64_t to = __shfl_sync(~0u, reinterpret_cast<uint64_t>(scale), lane / 4 + 8 * half);
        if (to != 0 && lane % 4 == 0)
            __stcg(reinterpret_cast<uint32_t *>(to), scales);
    }
};

} // namespace
} // namespace mok
#endif
