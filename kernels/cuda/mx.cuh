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

/* How many values a scale is for. A file whose kernels depend on it is compiled for 128, and by a *_32.cu for 32. */
#ifndef MOK_MX_SCALE
#define MOK_MX_SCALE 128
#endif
#if MOK_MX_SCALE == 128
#define MOK_MX_OF_SCALE(name) name
#elif MOK_MX_SCALE == 32
#define MOK_MX_OF_SCALE(name) name##_32
#endif

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

constexpr uint32_t mx_pairs = MOK_MX_SCALE / 8; /* of a thread's that have one scale, where four threads have a row's values */

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
};

/* ---- consumers ---- */

struct mx_consumer_base : consumer_base {
    __device__ uint32_t results() const
    {
        return b.smem + stage_offset + warp * mx_warp_bytes;
    }

    /* sum += part times the scales of its rows and of its columns, which begin at `columns`, 32 of them every 64 bytes. */
    __device__ __forceinline__ void promote(float *sum, const float (&part)[64], float upper, float lower, uint32_t columns) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 16; j += 4) {
            const uint4 v = load_shared_16(columns + j / 4 * 64);
            const uint32_t words[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
            for (uint32_t i = 4 * j; i < 4 * j + 16; i += 4) {
                const float s0 = __uint_as_float(words[i / 4 % 4] << 16), s1 = __uint_as_float(words[i / 4 % 4] & 0xffff0000u);
                sum[i] = __fmaf_rn(part[i], __fmul_rn(upper, s0), sum[i]);
                sum[i + 1] = __fmaf_rn(part[i + 1], __fmul_rn(upper, s1), sum[i + 1]);
                sum[i + 2] = __fmaf_rn(part[i + 2], __fmul_rn(lower, s0), sum[i + 2]);
                sum[i + 3] = __fmaf_rn(part[i + 3], __fmul_rn(lower, s1), sum[i + 3]);
            }
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
};

} // namespace
} // namespace mok
#endif
