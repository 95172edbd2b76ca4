/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 on its way through a block: rows and scales into the stages, products of E4M3 tiles whose sums take the scales
 * as they are promoted to FP32, finished rows quantised. Formats and rounding are mx.h's.
 *
 * A stage holds 128 values of 128 rows and of 256 columns, and beside it for each row and column the scale as a float.
 */
#ifndef MOK_CUDA_MX_CUH
#define MOK_CUDA_MX_CUH

#include "consumer.cuh"
#include "gather.cuh"
#include "mx.h"

namespace mok
{
namespace
{

/* Results leave 128 bytes of a row at a time; behind them lie the scales, and where rows and columns' scales begin. */
constexpr uint32_t mx_row_bytes = 144, mx_warp_bytes = 16 * mx_row_bytes;
constexpr uint32_t mx_scale_offset = stage_offset + MOK_CONSUMER_WARPS * mx_warp_bytes;
/*
 * Of a stage: 16 bytes a row, as they are fetched, whose first word becomes the scale; then a float a column. Words 1 and 2 of
 * row 4 w become the scale that all columns of either half have in gather warp w's eyes, or 0.
 */
constexpr uint32_t mx_slot = 16, mx_scale_columns = MOK_TILE_M * mx_slot;
constexpr uint32_t mx_scale_bytes = mx_scale_columns + MOK_TILE_N * 4;
constexpr uint32_t mx_table_offset = mx_scale_offset + MOK_STAGES * mx_scale_bytes;
constexpr uint32_t mx_column_offset = mx_table_offset + MOK_TILE_M * 8; /* where each column's scales begin */
constexpr uint32_t mx_place_offset = mx_column_offset + MOK_TILE_N * 8; /* of finished rows */
static_assert(mx_place_offset + MOK_TILE_M * 8 <= task_offset, "scales do not fit behind the results");

/* Codes of a pair of values times 1 / their scale, NaN and Inf as mok_e4m3_encode has them. */
__device__ __forceinline__ uint32_t mx_codes(float lo, float hi, float inverse)
{
    uint32_t codes = pack_e4m3(__fmul_rn(lo, inverse), __fmul_rn(hi, inverse));
    const uint32_t l = __float_as_uint(lo), h = __float_as_uint(hi);
    if ((l & 0x7fffffffu) >= 0x7f800000u)
        codes = (codes & 0xff00u) | (l >> 24 & 0x80u) | MOK_E4M3_NAN;
    if ((h & 0x7fffffffu) >= 0x7f800000u)
        codes = (codes & 0xffu) | ((h >> 24 & 0x80u) | MOK_E4M3_NAN) << 8;
    return codes;
}

/* What a pair of codes is worth, as BF16: exact, but for what BF16 has not. */
__device__ __forceinline__ uint32_t mx_widen(uint32_t codes, float scale)
{
    float lo, hi;
    unpack_e4m3(codes, lo, hi);
    return pack_bf16(__fmul_rn(lo, scale), __fmul_rn(hi, scale));
}

/* The larger of amax and |value|, as bits; NaN and Inf do not take part. */
__device__ __forceinline__ uint32_t mx_amax(uint32_t amax, float value)
{
    const uint32_t magnitude = __float_as_uint(value) & 0x7fffffffu;
    return max(amax, magnitude < 0x7f800000u ? magnitude : 0u);
}

/* ---- gather: rows of x, and everybody's scales ---- */

struct mx_gather {
    const mok_cuda_mx_args &p;
    const block_view &b;
    uint32_t thread, lane;
    pipeline pipe;

    /* The rows of this thread whose beginnings it notes: one of this warp's, and the one 64 below. */
    __device__ uint32_t own_row() const
    {
        return lane / 4 * 8 + thread / 32 * 4 + lane % 4;
    }
    __device__ uint32_t table(uint32_t row) const
    {
        return b.smem + mx_table_offset + 8 * row;
    }
    __device__ static void note(uint32_t to, const uint8_t *from)
    {
        const uint64_t at = reinterpret_cast<uint64_t>(from);
        store_shared_4(to, static_cast<uint32_t>(at));
        store_shared_4(to + 4, static_cast<uint32_t>(at >> 32));
    }
    __device__ static const uint8_t *noted(uint32_t to)
    {
        const uint2 at = load_shared_8(to);
        return reinterpret_cast<const uint8_t *>(static_cast<uint64_t>(at.y) << 32 | at.x);
    }
    /* Where each row of the tile begins, for this warp's own use: rows whose number is 4 w.. 4 w + 3 beyond 8 i. */
    template <class Place> __device__ void note_rows(const task &t, Place place) const
    {
        const uint32_t rows = max(b.rows(t), 1u), first = b.rows(t) ? b.row_first(t) : 0;
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = own_row() + 64 * i;
            note(table(r), place(min(r, rows - 1) + first));
        }
        __syncwarp();
    }
    __device__ const uint8_t *row(uint32_t r) const
    {
        return noted(table(r));
    }

    /* Of a task that multiplies x, or h: values of a row, and how far behind its beginning the scales lie. */
    template <bool X> __device__ uint32_t values() const
    {
        return X ? p.common.hidden : p.inter;
    }
    template <bool X> __device__ uint32_t scales_of_row() const
    {
        return (values<X>() + MOK_MX_BLOCK - 1) / MOK_MX_BLOCK;
    }

    /* Where the scales of this thread's four columns begin; the tile begins at `column`. */
    template <bool X> __device__ void note_columns(const task &t, uint32_t column) const
    {
        const uint32_t count = scales_of_row<X>(), rows = X ? p.inter : p.common.hidden;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            /* columns past the edge multiply nothing that is stored */
            const uint32_t r = min(column + (X ? i % 2 : i) * 64 + thread, rows - 1);
            const uint8_t *base = !X ? p.down_scale : i < 2 ? p.gate_scale : p.up_scale;
            note(b.smem + mx_column_offset + 8 * (thread + 64 * i),
                 base + (static_cast<uint64_t>(t.expert) * rows + r) * count);
        }
    }

    __device__ uint32_t scales(uint32_t stage) const
    {
        return b.smem + mx_scale_offset + stage * mx_scale_bytes;
    }
    /* The first of the four codes in a word: all are equal. */
    __device__ static uint32_t scale(uint32_t word)
    {
        return __float_as_uint(mok_e8m0_to_f32(static_cast<uint8_t>(word)));
    }

    /* Begins to fetch this thread's two rows' and four columns' scales of k-block k. */
    template <bool X> __device__ void fetch(uint32_t stage, uint32_t k) const
    {
        const uint32_t to = scales(stage);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = own_row() + 64 * i;
            cp_async_16(to + mx_slot * r, row(r) + (X ? p.common.hidden : 0) + (4 * k & ~15u), 16);
        }
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint8_t *at = noted(b.smem + mx_column_offset + 8 * (thread + 64 * i)) + 4 * k;
            const uint32_t word = to + mx_scale_columns + 4 * (thread + 64 * i);
            if (scales_of_row<X>() % 4 == 0)
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
            const uint32_t slot = at + mx_slot * (own_row() + 64 * i);
            store_shared_4(slot, scale(load_shared_4(slot + 4 * (k % 4))));
        }
        __syncwarp();
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t word = at + mx_scale_columns + 4 * (thread + 128 * half);
            const uint32_t one = scale(load_shared_4(word)), two = scale(load_shared_4(word + 256));
            store_shared_4(word, one);
            store_shared_4(word + 256, two);
            const uint32_t first = __shfl_sync(~0u, one, 0);
            const bool same = __all_sync(~0u, one == first && two == first);
            if (lane == 0)
                store_shared_4(at + mx_slot * (thread / 32 * 4) + 4 + 4 * half, same ? first : 0);
        }
        gather_landed(b, stage, lane);
    }

    /* All stages of a task whose tile begins at `column`; of x the rows too, swizzled as the tensor cores read them. */
    template <bool X> __device__ __forceinline__ void fill(const task &t, uint32_t column)
    {
        const uint32_t k_blocks = X ? p.common.k_blocks : p.h_blocks;
        const uint32_t chunk = thread % 8, first = thread / 8;
        const uint32_t dst = b.smem + a_offset + first * 128 + ((chunk ^ (first % 8)) * 16);
        note_columns<X>(t, column);
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            const uint32_t stage = pipe.stage();
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            if (X) {
                const uint32_t at = k * MOK_MX_TILE_K + chunk * 16, bytes = at < values<X>() ? 16 : 0;
                const uint32_t to = dst + stage * MOK_A_BYTES;
#pragma unroll 4
                for (uint32_t i = 0; i < gather_rows; i++)
                    cp_async_16(to + i * gather_step * 128, row(first + i * gather_step) + (bytes ? at : 0), bytes);
            }
            fetch<X>(stage, k);
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

struct mx_consumer_base : consumer_base {
    __device__ uint32_t results() const
    {
        return b.smem + stage_offset + warp * mx_warp_bytes;
    }

    /* sum += part times the scales of its rows and of its columns, which begin at `columns`. */
    __device__ __forceinline__ void promote(float *sum, const float (&part)[64], float upper, float lower, uint32_t columns) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 16; j++) {
            const uint2 w = load_shared_8(columns + 32 * j);
            const float s0 = __uint_as_float(w.x), s1 = __uint_as_float(w.y);
            sum[4 * j] = __fmaf_rn(part[4 * j], __fmul_rn(upper, s0), sum[4 * j]);
            sum[4 * j + 1] = __fmaf_rn(part[4 * j + 1], __fmul_rn(upper, s1), sum[4 * j + 1]);
            sum[4 * j + 2] = __fmaf_rn(part[4 * j + 2], __fmul_rn(lower, s0), sum[4 * j + 2]);
            sum[4 * j + 3] = __fmaf_rn(part[4 * j + 3], __fmul_rn(lower, s1), sum[4 * j + 3]);
        }
    }

    /* The same where all columns have one scale, which is in `upper` and `lower`. */
    __device__ __forceinline__ void promote_same(float *sum, const float (&part)[64], float upper, float lower) const
    {
#pragma unroll
        for (uint32_t i = 0; i < 64; i += 4) {
            sum[i] = __fmaf_rn(part[i], upper, sum[i]);
            sum[i + 1] = __fmaf_rn(part[i + 1], upper, sum[i + 1]);
            sum[i + 2] = __fmaf_rn(part[i + 2], lower, sum[i + 2]);
            sum[i + 3] = __fmaf_rn(part[i + 3], lower, sum[i + 3]);
        }
    }

    /* d = this group's 64 rows of A times 256 columns of B, over the stages of a task, 128 columns at a time. */
    __device__ __forceinline__ void multiply_mx(float (&d)[128], uint32_t k_blocks)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        const uint32_t row = mx_slot * (warp * 16 + lane / 4), column = mx_scale_columns + 8 * (lane % 4);
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            d[i] = 0.0f;
#pragma unroll 1
        for (const uint32_t end = pipe.n + k_blocks; pipe.n != end; pipe.n++) {
            const uint32_t stage = pipe.stage(), scales = b.smem + mx_scale_offset + stage * mx_scale_bytes;
            const uint64_t at = a0 + stage * (MOK_A_BYTES / 16), bt = b0 + stage * (MOK_B_BYTES / 16);
            if (!__all_sync(~0u, mbar_try(b.full(stage), pipe.phase()))) {
                deliver(); /* the stage may wait for rows whose pull waits behind a task that waits for this */
                mbar_wait(b.full(stage), pipe.phase());
            }
            const float upper = __uint_as_float(load_shared_4(scales + row));
            const float lower = __uint_as_float(load_shared_4(scales + row + 8 * mx_slot));
#pragma unroll
            for (uint32_t half = 0; half < 2; half++) {
                float part[64];
                const uint64_t b_at = bt + half * (MOK_B_BYTES / 32);
                const uint32_t same = load_shared_4(scales + 4 + 4 * half);
                const bool one = same != 0 && same == load_shared_4(scales + 4 * mx_slot + 4 + 4 * half);
                wgmma_fence();
                wgmma_m64n128k32_e4m3_first(part, at, b_at);
#pragma unroll
                for (uint32_t i = 1; i < MOK_MX_TILE_K / 32; i++)
                    wgmma_m64n128k32_e4m3(part, at + 2 * i, b_at + 2 * i);
                wgmma_commit();
                if (half == 0)
                    deliver(); /* while the tensor cores are busy; at most once a task */
                wgmma_wait<0>();
#pragma unroll
                for (uint32_t i = 0; i < 64; i++)
                    settle(part[i]);
                if (one)
                    promote_same(d + 64 * half, part, __fmul_rn(upper, __uint_as_float(same)),
                                 __fmul_rn(lower, __uint_as_float(same)));
                else
                    promote(d + 64 * half, part, upper, lower, scales + column + half * 512);
            }
            __syncwarp(); /* all lanes have read the scales */
            release(stage);
        }
    }

    /* Stores this warp's 16 rows x 64 columns of BF16; otherwise as consumer_base::store. */
    template <bool Streaming, class Pair> __device__ __forceinline__ void store_half(void *row, uint32_t bytes, Pair pair)
    {
        const uint32_t at = results() + (lane & 15u) * mx_row_bytes + (lane >> 4) * 16;
        __syncwarp();
#pragma unroll
        for (uint32_t j = 0; j < 8; j += 2)
            stmatrix_x4(at + j * 16, pair(j, 0u), pair(j, 1u), pair(j + 1, 0u), pair(j + 1, 1u));
        __syncwarp();
        leave<Streaming>(row, bytes);
    }

    /* What is in this warp's staging, up to 128 bytes of each row, goes out. */
    template <bool Streaming> __device__ __forceinline__ void leave(void *row, uint32_t bytes)
    {
        const uint32_t chunk = lane % 8 * 16;
#pragma unroll
        for (uint32_t i = 0; i < 16; i += 4) {
            const uint32_t r = i + lane / 8;
            const uint64_t to = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row), r);
            const uint4 v = load_shared_16(results() + r * mx_row_bytes + chunk);
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

    /*
     * Quantises eight rows' 128 columns of h into this warp's staging; the four scales go to `scale` of lane's row.
     * h[2 j + e]: column 8 j + 2 (lane % 4) + e of row lane / 4 + 8 half.
     */
    __device__ __forceinline__ void quantise(const float (&h)[32], uint32_t half, uint8_t *scale) const
    {
        const uint32_t at = results() + (lane / 4 + 8 * half) * mx_row_bytes + 2 * (lane % 4);
        uint32_t amax = 0;
#pragma unroll
        for (uint32_t i = 0; i < 32; i++)
            amax = mx_amax(amax, h[i]);
        amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
        const uint8_t code = mok_mx_scale(__uint_as_float(amax));
        const float inverse = mok_e8m0_inverse(code);
#pragma unroll
        for (uint32_t j = 0; j < 16; j++)
            store_shared_2(at + 8 * j, mx_codes(h[2 * j], h[2 * j + 1], inverse));
        const uint64_t to = __shfl_sync(~0u, reinterpret_cast<uint64_t>(scale), lane / 4 + 8 * half);
        if (to != 0 && lane % 4 == 0)
            __stcg(reinterpret_cast<uint32_t *>(to), code * 0x01010101u);
    }
};

} // namespace
} // namespace mok
#endif
