/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward's way with scales. Those of rows are floats that lie beside each other for every k-block, and those of
 * columns one a half of a tile, so a stage's come by two bulk copies. Of tiles whose columns have several, gather warps
 * bring each column's, four k-blocks' at once. What does not differ from the backward is mx.cuh's.
 */
#ifndef MOK_CUDA_MX_QUADS_CUH
#define MOK_CUDA_MX_QUADS_CUH

#include <stddef.h>

#include "mx.cuh"

namespace mok
{
namespace
{

/* Of each stage: a float a row; then struct mok_cuda_mx_pair. Behind those of all stages lie columns' scales. */
constexpr uint32_t mx_factor_bytes = MOK_TILE_M * 4, mx_pair_bytes = sizeof(mok_cuda_mx_pair);
constexpr uint32_t mx_part_bytes = mx_factor_bytes + mx_pair_bytes;
/*
 * Columns' scales are fetched for four k-blocks (a quad) at once, 16 bytes a column. Of each of the last eight stages they are BF16, which
 * holds powers of two exactly: 64 bytes for 32 columns, of 2 q and 2 q + 1 beyond each eighth one at 16 q, as a consumer's lane q wants them.
 */
constexpr uint32_t mx_quad = 4, mx_column_stages = 2 * MOK_STAGES, mx_column_bytes = MOK_TILE_N * 2;
constexpr uint32_t mx_columns_offset = mx_scale_offset + MOK_STAGES * mx_part_bytes;
constexpr uint32_t mx_quad_offset = mx_columns_offset + mx_column_stages * mx_column_bytes;
static_assert(mx_quad == MOK_STAGES && mx_quad_offset + MOK_TILE_N * mx_slot <= mx_table_offset,
              "scales do not fit where stages' scales were");

struct mx_quad_gather : mx_gather {
    /* The first of the four codes in a word, as BF16: all are equal. */
    __device__ static uint32_t scale(uint32_t word)
    {
        return __float_as_uint(mok_e8m0_to_f32(static_cast<uint8_t>(word))) >> 16;
    }

    /* Begins to fetch this thread's four columns' scales of the quad that begins with k-block k. */
    template <bool X> __device__ __forceinline__ void fetch(uint32_t k) const
    {
        const uint32_t count = scales_of_row<X>();
        const uint64_t bases = X ? reinterpret_cast<uint64_t>(p.gate_scale) | reinterpret_cast<uint64_t>(p.up_scale) :
                                   reinterpret_cast<uint64_t>(p.down_scale);
        const bool whole = ((static_cast<uint32_t>(bases) | count) & 15u) == 0;
#pragma unroll 1
        for (uint32_t i = 0; i < 4; i++) {
            const uint8_t *at = noted(b.smem + mx_column_offset + 8 * (thread + 64 * i)) + 4 * k;
            const uint32_t slot = b.smem + mx_quad_offset + mx_slot * (thread + 64 * i);
            if (whole) {
                cp_async_16(slot, at, 16);
                continue;
            }
#pragma unroll 1
            for (uint32_t j = 0; j < 4 * mx_quad && 4 * k + j < count; j += 4)
                store_shared_4(slot + j, __ldg(at + j));
        }
    }

    /* What this thread has fetched of the quad that begins in stage n is there, and becomes BF16. */
    __device__ __forceinline__ void finish(uint32_t n) const
    {
#pragma unroll 1
        for (uint32_t i = 0; i < 4; i++) {
            const uint4 words = load_shared_16(b.smem + mx_quad_offset + mx_slot * (thread + 64 * i));
            const uint32_t to = b.smem + mx_columns_offset + (thread + 64 * i) / 32 * 64 + lane % 8 / 2 * 16 + lane / 8 * 4 + lane % 2 * 2;
            store_shared_2(to + n % mx_column_stages * mx_column_bytes, scale(words.x));
            store_shared_2(to + (n + 1) % mx_column_stages * mx_column_bytes, scale(words.y));
            store_shared_2(to + (n + 2) % mx_column_stages * mx_column_bytes, scale(words.z));
            store_shared_2(to + (n + 3) % mx_column_stages * mx_column_bytes, scale(words.w));
        }
    }

    /* A stage whose copies are the last but `Behind` of this thread's has landed. */
    template <int Behind> __device__ __forceinline__ void land(uint32_t n, uint32_t k) const
    {
        cp_async_wait<Behind>();
        if (k % mx_quad == 0)
            finish(n);
        gather_landed(b, n % MOK_STAGES, lane);
    }

    /* This warp's part of a stage's scales that are as consumers want them: the rows', or the pair of its columns. */
    __device__ bool brings_rows() const
    {
        return thread / 32 == 0;
    }
    __device__ uint32_t part_bytes() const
    {
        return brings_rows() ? mx_factor_bytes : mx_pair_bytes;
    }
    __device__ __forceinline__ void bring(uint64_t &from, uint32_t n) const
    {
        const uint32_t to = b.smem + mx_scale_offset + n % MOK_STAGES * mx_part_bytes + (brings_rows() ? 0 : mx_factor_bytes);
        bulk_load(to, reinterpret_cast<const void *>(from), part_bytes(), b.full(n % MOK_STAGES));
        from += brings_rows() ? 4 * p.factor_rows : mx_pair_bytes;
    }

    /* All stages of a task whose columns have one scale a half. */
    __device__ __forceinline__ void fill_even(uint64_t from, uint32_t k_blocks)
    {
        if (lane == 0)
            for (pipeline at = pipe; at.n != pipe.n + k_blocks; at.n++) {
                mbar_wait(b.empty(at.stage()), at.phase() ^ 1u);
                mbar_expect(b.full(at.stage()), part_bytes());
                bring(from, at.n);
            }
        __syncwarp();
        pipe.n += k_blocks;
    }

    /* The same of any weights, once it is noted where each column's scales begin. */
    template <bool X> __device__ __forceinline__ void fill_uneven(uint64_t from)
    {
        const uint32_t k_blocks = X ? p.common.k_blocks : p.h_blocks;
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            const uint32_t stage = pipe.stage();
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            if (lane == 0) {
                mbar_expect_bytes(b.full(stage), part_bytes());
                bring(from, pipe.n);
            }
            if (k % mx_quad == 0)
                fetch<X>(k);
            cp_async_commit();
            if (k > 0)
                land<1>(pipe.n - 1, k - 1);
        }
        land<0>(pipe.n - 1, k_blocks - 1);
    }

    /* All stages of a task that multiplies x, or h. Its rows' scales are there. */
    template <bool X> __device__ __forceinline__ void fill(const task &t)
    {
        const uint32_t tiles = X ? p.tiles : p.common.down_tiles, tile = b.column(t, tiles);
        const uint32_t k_blocks = X ? p.common.k_blocks : p.h_blocks;
        const mok_cuda_mx_pair *pairs = (X ? p.gate_up_pairs : p.down_pairs) + (t.expert * tiles + tile) * k_blocks;
        const float *rows = (X ? p.x_factor : p.h_factor) + t.ring64 * 64 + b.row_first(t);
        const uint64_t from = brings_rows() ? reinterpret_cast<uint64_t>(rows) : reinterpret_cast<uint64_t>(pairs);
        const uint32_t uneven = __ldcg(&pairs->uneven);
        fence_async(); /* rows' scales were stored by ordinary instructions */
        if (uneven == 0)
            return fill_even(from, k_blocks);
        note_columns<X>(t, tile * (X ? MOK_TILE_N / 2 : MOK_TILE_N));
        fill_uneven<X>(from);
    }
};

constexpr uint32_t mx_group_cycles = 700; /* by which the second warpgroup follows the first into a task */

struct mx_quad_consumer : mx_consumer_base {
    /* Begins 64 rows x 128 columns of a stage. */
    __device__ __forceinline__ static void begin(float (&part)[64], uint64_t a, uint64_t columns)
    {
        wgmma_fence();
        wgmma_m64n128k32_e4m3_again(part, a, columns);
#pragma unroll
        for (uint32_t i = 1; i < MOK_MX_TILE_K / 32; i++)
            wgmma_m64n128k32_e4m3(part, a + 2 * i, columns + 2 * i);
        wgmma_commit();
    }
    __device__ __forceinline__ static void end(float (&part)[64])
    {
        wgmma_wait<0>();
#pragma unroll
        for (uint32_t i = 0; i < 64; i++)
            settle(part[i]);
    }

    /* Whether the stage of pipe is there; else `pending` goes out, since it may wait for rows whose pull waits behind a task that waits for this. */
    __device__ __forceinline__ void await(bool ready)
    {
        if (__all_sync(~0u, ready))
            return;
        deliver();
        mbar_wait(b.full(pipe.stage()), pipe.phase());
    }

    /*
     * d = this group's 64 rows of A times 256 columns of B, over the stages of a task, 128 columns at a time. The other group's
     * products hide what this one does between its own, as long as that is shorter than they are: so products begin first, and
     * scales, and whether the next stage is there, are asked for behind them; and begun() is called behind the first. The second
     * group begins somewhat later than the first, so that they do not promote at the same time.
     */
    template <class Begun>
    __device__ __forceinline__ void multiply_mx(float (&d)[128], uint32_t k_blocks, const Begun &begun)
    {
        await(mbar_test(b.full(pipe.stage()), pipe.phase()));
        const uint32_t uneven = load_shared_4(scales_of(pipe.stage()) + mx_factor_bytes + offsetof(mok_cuda_mx_pair, uneven));
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            d[i] = 0.0f;
        if (group != 0)
            let_cycles_pass(mx_group_cycles);
        if (uneven != 0)
            multiply_of<false>(d, k_blocks, begun);
        else
            multiply_of<true>(d, k_blocks, begun);
    }
    __device__ __forceinline__ uint32_t scales_of(uint32_t stage) const
    {
        return b.smem + mx_scale_offset + stage * mx_part_bytes;
    }

    /*
     * Even: all columns of a half have one scale. Between two products nothing is left but the promotion: where the next stage
     * lies, whether it is there and what its scales make is found while the tensor cores are busy.
     */
    template <bool Even, class Begun>
    __device__ __forceinline__ void multiply_of(float (&d)[128], uint32_t k_blocks, const Begun &begun)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        const uint32_t row = 4 * (warp * 16 + lane / 4), column = b.smem + mx_columns_offset + 16 * (lane % 4);
        uint64_t at = a0 + pipe.stage() * (MOK_A_BYTES / 16), bt = b0 + pipe.stage() * (MOK_B_BYTES / 16);
        float part[64];
#pragma unroll
        for (uint32_t i = 0; i < 64; i++)
            part[i] = 0.0f;
#pragma unroll 1
        for (const uint32_t first = pipe.n, last = first + k_blocks; pipe.n != last;) {
            const uint32_t stage = pipe.stage(), scales = scales_of(stage);
            begin(part, at, bt);
            deliver(); /* at most once a task */
            if (pipe.n == first)
                begun();
            const float upper = __uint_as_float(load_shared_4(scales + row)), lower = __uint_as_float(load_shared_4(scales + row + 8 * 4));
            const uint2 same = Even ? load_shared_8(scales + mx_factor_bytes) : make_uint2(0, 0);
            const float s0 = __uint_as_float(same.x), s1 = __uint_as_float(same.y);
            const uint32_t columns = column + pipe.n % mx_column_stages * mx_column_bytes;
            float factor[4] = { __fmul_rn(upper, s0), __fmul_rn(lower, s0), __fmul_rn(upper, s1), __fmul_rn(lower, s1) };
#pragma unroll
            for (uint32_t i = 0; Even && i < 4; i++)
                settle(factor[i]);
            end(part);
            if (Even)
                promote_same(d, part, factor[0], factor[1]);
            else
                promote(d, part, upper, lower, columns);
            begin(part, at, bt + MOK_B_BYTES / 32);
            pipe.n++;
            at = a0 + pipe.stage() * (MOK_A_BYTES / 16);
            bt = b0 + pipe.stage() * (MOK_B_BYTES / 16);
            forget(at);
            forget(bt);
            if (pipe.n != last)
                await(mbar_test(b.full(pipe.stage()), pipe.phase()));
            end(part);
            if (Even) {
                __syncwarp(); /* all lanes have what they read of the scales: the first half's sums needed it */
                release(stage);
                promote_same(d + 64, part, factor[2], factor[3]);
            } else {
                promote(d + 64, part, upper, lower, columns + mx_column_bytes / 2);
                /* the arrival must not overtake the loads: the vote needs what the last one brought; no sum is this NaN */
                if (__all_sync(~0u, __float_as_uint(d[127]) != 0x7fc12345u))
                    release(stage);
            }
        }
    }

    /*
     * Quantises eight rows' 128 columns of h into this warp's staging; the four scales go to `scale` of lane's row, and as a
     * float to `factor`. h[2 j + e]: column 8 j + 2 (lane % 4) + e of row lane / 4 + 8 half.
     */
    __device__ __forceinline__ void quantise(const float (&h)[32], uint32_t half, uint8_t *scale, float *factor) const
    {
        const uint32_t at = results() + (lane / 4 + 8 * half) * mx_row_bytes + 2 * (lane % 4);
        float most = 0.0f, odd = 0.0f;
#pragma unroll
        for (uint32_t i = 0; i < 32; i++) {
            most = fmaxf(most, fabsf(h[i]));
            odd = __fmaf_rn(h[i], 0.0f, odd); /* NaN, if one value is not finite */
        }
        uint32_t amax = __float_as_uint(most);
        const bool finite = __all_sync(~0u, odd == 0.0f);
        if (!finite) {
            amax = 0;
#pragma unroll
            for (uint32_t i = 0; i < 32; i++)
                amax = mx_amax(amax, h[i]);
        }
        amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
        const uint8_t code = mok_mx_scale(__uint_as_float(amax));
        const float inverse = mok_e8m0_inverse(code);
        if (finite) {
#pragma unroll
            for (uint32_t j = 0; j < 16; j++)
                store_shared_2(at + 8 * j, pack_e4m3(__fmul_rn(h[2 * j], inverse), __fmul_rn(h[2 * j + 1], inverse)));
        } else {
#pragma unroll
            for (uint32_t j = 0; j < 16; j++)
                store_shared_2(at + 8 * j, mx_codes(h[2 * j], h[2 * j + 1], inverse));
        }
        const uint64_t to = __shfl_sync(~0u, reinterpret_cast<uint64_t>(scale), lane / 4 + 8 * half);
        if (to != 0 && lane % 4 == 0) {
            __stcg(reinterpret_cast<uint32_t *>(to), code * 0x01010101u);
            __stcg(factor + lane / 4 + 8 * half, mok_e8m0_to_f32(code));
        }
    }
};

} // namespace
} // namespace mok
#endif
