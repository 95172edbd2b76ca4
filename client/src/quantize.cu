/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weights to MXFP8 on a GPU, bit for bit as proto/mx says: values are read once, for the tensor and for its transpose.
 * Each thread holds 8 rows x 8 columns, a warp 16 rows, a block of eight warps a square of 128 x 128 values. Rows find
 * their scales among the 16 lanes that share them, columns in shared memory, through which the transpose leaves too.
 */
#include <cuda_runtime.h>

#include "instructions.cuh"
#include "mx.h"
#include "quantize.h"

namespace mok
{
namespace
{

constexpr uint32_t side = QUANTIZE_SIDE, own = 8; /* rows and columns of a thread */
constexpr uint32_t warps = QUANTIZE_THREADS / 32, blocks = side / MOK_MX_BLOCK;
constexpr uint32_t infinite = 0x7f800000u, whole = ~0u; /* mask of a warp */
static_assert(warps * 2 * own == side && 16 * own == side, "a thread's rows and columns make no square");

/* How eight values lie in words, and their magnitudes, which are compared as integers. */
struct bf16_values {
    static constexpr uint32_t bytes = 2, words = 4;

    __device__ static uint32_t magnitude(uint32_t word)
    {
        return word & 0x7fff7fffu;
    }
    /* With zeros for NaN and Inf. */
    __device__ static uint32_t finite(uint32_t word)
    {
        word = (word & 0x7fffu) >= 0x7f80u ? word & 0xffff0000u : word;
        return (word & 0x7fffffffu) >= infinite ? word & 0xffffu : word;
    }
    /* The bits of a value, as a float's. */
    __device__ static uint32_t bits(const void *from)
    {
        return static_cast<uint32_t>(*static_cast<const uint16_t *>(from)) << 16;
    }
    __device__ static uint32_t larger(uint32_t a, uint32_t b)
    {
        return __vmaxu2(a, b);
    }
    /* Of all magnitudes of a word, as the bits of a float. */
    __device__ static uint32_t largest(uint32_t m)
    {
        return max(m << 16, m & 0xffff0000u);
    }
    /* The largest of column c of eight, of its word. */
    __device__ static uint32_t of_column(uint32_t m, uint32_t c)
    {
        return c % 2 ? m & 0xffff0000u : m << 16;
    }
    __device__ static float value(const uint32_t (&word)[words], uint32_t c)
    {
        return __uint_as_float(of_column(word[c / 2], c));
    }
    /* Of each row over 4 or 16 lanes; two rows share a word on the way. */
    __device__ static void row_maxima(const uint32_t (&v)[own][words], bool wide, uint32_t (&ret)[own])
    {
#pragma unroll
        for (uint32_t i = 0; i < own; i += 2) {
            const uint32_t a = of_row(v[i]), b = of_row(v[i + 1]);
            uint32_t m = larger(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
            m = larger(m, __shfl_xor_sync(whole, m, 1));
            m = larger(m, __shfl_xor_sync(whole, m, 2));
            if (wide) {
                m = larger(m, __shfl_xor_sync(whole, m, 4));
                m = larger(m, __shfl_xor_sync(whole, m, 8));
            }
            ret[i] = m << 16;
            ret[i + 1] = m & 0xffff0000u;
        }
    }
    __device__ static uint32_t of_row(const uint32_t (&word)[words])
    {
        return larger(larger(magnitude(word[0]), magnitude(word[1])), larger(magnitude(word[2]), magnitude(word[3])));
    }
    __device__ static void load_one(uint32_t (&word)[words], uint32_t c, const void *from)
    {
        word[c / 2] |= static_cast<uint32_t>(*static_cast<const uint16_t *>(from)) << c % 2 * 16;
    }
};

struct f32_values {
    static constexpr uint32_t bytes = 4, words = 8;

    __device__ static uint32_t magnitude(uint32_t word)
    {
        return word & 0x7fffffffu;
    }
    __device__ static uint32_t finite(uint32_t word)
    {
        return magnitude(word) >= infinite ? 0 : word;
    }
    __device__ static uint32_t bits(const void *from)
    {
        return *static_cast<const uint32_t *>(from);
    }
    __device__ static uint32_t larger(uint32_t a, uint32_t b)
    {
        return max(a, b);
    }
    __device__ static uint32_t largest(uint32_t m)
    {
        return m;
    }
    __device__ static uint32_t of_column(uint32_t m, uint32_t)
    {
        return m;
    }
    __device__ static float value(const uint32_t (&word)[words], uint32_t c)
    {
        return __uint_as_float(word[c]);
    }
    __device__ static void row_maxima(const uint32_t (&v)[own][words], bool wide, uint32_t (&ret)[own])
    {
#pragma unroll
        for (uint32_t i = 0; i < own; i++) {
            uint32_t m = 0;
#pragma unroll
            for (uint32_t k = 0; k < words; k++)
                m = max(m, magnitude(v[i][k]));
            m = max(m, __shfl_xor_sync(whole, m, 1));
            m = max(m, __shfl_xor_sync(whole, m, 2));
            if (wide) {
                m = max(m, __shfl_xor_sync(whole, m, 4));
                m = max(m, __shfl_xor_sync(whole, m, 8));
            }
            ret[i] = m;
        }
    }
    __device__ static void load_one(uint32_t (&word)[words], uint32_t c, const void *from)
    {
        word[c] = *static_cast<const uint32_t *>(from);
    }
};

template <class V> using held = uint32_t[own][V::words];

/* Where a thread is in a square, and the square in the tensors. What of it is past an edge is told by what is left. */
struct place {
    const quantize_args &a;
    uint64_t matrix, row, column; /* of the square's first value */
    uint32_t lane, warp;
    uint32_t rows_left, columns_left;         /* of the square: 1..128 */
    uint32_t own_rows_left, own_columns_left; /* of the thread: 0..8 */

    __device__ place(const quantize_args &args, uint64_t m, uint64_t r, uint64_t c)
        : a(args), matrix(m), row(r), column(c), lane(threadIdx.x % 32), warp(threadIdx.x / 32),
          rows_left(left(args.rows - r, side)), columns_left(left(args.columns - c, side))
    {
        own_rows_left = rows_left > row_eighth() * own ? min(rows_left - row_eighth() * own, own) : 0;
        own_columns_left = columns_left > eighth() * own ? min(columns_left - eighth() * own, own) : 0;
    }
    __device__ static uint32_t left(uint64_t count, uint32_t most)
    {
        return count < most ? static_cast<uint32_t>(count) : most;
    }
    __device__ uint32_t eighth() const /* which 8 columns */
    {
        return lane % 16;
    }
    __device__ uint32_t row_eighth() const /* which 8 rows */
    {
        return warp * 2 + lane / 16;
    }
    /* Rows of all matrices up to this thread's first, and its first value. */
    __device__ uint64_t rows_before() const
    {
        return matrix * a.rows + row + row_eighth() * own;
    }
    __device__ uint64_t first() const
    {
        return rows_before() * a.columns + column + eighth() * own;
    }
    __device__ bool wide(uint32_t what) const
    {
        return a.wide & what;
    }
};

template <class V> __device__ void load(const place &p, held<V> &v)
{
    const uint8_t *from = static_cast<const uint8_t *>(p.a.values) + p.first() * V::bytes;
    const uint64_t pitch = p.a.columns * V::bytes;
#pragma unroll
    for (uint32_t i = 0; i < own; i++)
#pragma unroll
        for (uint32_t k = 0; k < V::words; k++)
            v[i][k] = 0;
    if (p.wide(QUANTIZE_WIDE_VALUES)) {
        /* rows are whole vectors of 16 bytes, but perhaps not whole eights of F32 */
#pragma unroll
        for (uint32_t i = 0; i < own; i++, from += pitch)
#pragma unroll
            for (uint32_t k = 0; k < V::words; k += 4)
                if (i < p.own_rows_left && k * 4 / V::bytes < p.own_columns_left) {
                    const uint4 w = __ldcs(reinterpret_cast<const uint4 *>(from) + k / 4);
                    v[i][k] = w.x, v[i][k + 1] = w.y, v[i][k + 2] = w.z, v[i][k + 3] = w.w;
                }
        return;
    }
#pragma unroll
    for (uint32_t i = 0; i < own; i++, from += pitch)
#pragma unroll
        for (uint32_t c = 0; c < own; c++)
            if (i < p.own_rows_left && c < p.own_columns_left)
                V::load_one(v[i], c, from + c * V::bytes);
}

/* As mok_mx_scale: 448 is 1.75 * 2^8, and a fraction above three quarters carries. */
__device__ __forceinline__ uint32_t scale_of(uint32_t amax)
{
    return static_cast<uint32_t>(max(static_cast<int32_t>((amax + 0x1fffffu) >> 23) - 8, 0));
}

/* As mok_e8m0_inverse, of a scale that some finite value made: at most 247. */
__device__ __forceinline__ float inverse_of(uint32_t scale)
{
    return __uint_as_float((254u - scale) << 23);
}

/* Codes of two finite values, each times what its group is multiplied by. */
__device__ uint32_t codes_of(float lo, float hi, float by)
{
    return pack_e4m3(__fmul_rn(lo, by), __fmul_rn(hi, by));
}

template <class V> __device__ uint2 row_codes(const uint32_t (&word)[V::words], float inverse)
{
    uint32_t codes[2] = {};
#pragma unroll
    for (uint32_t c = 0; c < own; c += 2)
        codes[c / 4] |= codes_of(V::value(word, c), V::value(word, c + 1), inverse) << 8 * (c % 4);
    return make_uint2(codes[0], codes[1]);
}

__device__ void store_row(const place &p, uint8_t *to, uint2 codes)
{
    if (p.wide(QUANTIZE_WIDE_DATA)) {
        if (p.own_columns_left)
            *reinterpret_cast<uint2 *>(to) = codes;
        return;
    }
    uint64_t all = static_cast<uint64_t>(codes.y) << 32 | codes.x;
#pragma unroll 1
    for (uint32_t c = 0; c < p.own_columns_left; c++, all >>= 8)
        to[c] = static_cast<uint8_t>(all);
}

/* The scales of a square's part of one row of a tensor, a byte each; blocks past the row's end, which is `left` values on, are none. */
__device__ void store_scales(uint8_t *to, bool at_once, uint32_t left, uint32_t scales)
{
    if (at_once) {
        *reinterpret_cast<uint32_t *>(to) = scales;
        return;
    }
#pragma unroll 1
    for (uint32_t g = 0; g * MOK_MX_BLOCK < left; g++, scales >>= 8)
        to[g] = static_cast<uint8_t>(scales);
}

/* ---- scales of 32 or 128 values along a row ---- */

template <class V> __device__ void rows(const place &p, const held<V> &v)
{
    uint32_t amax[own];
    uint8_t *to = p.a.data + p.first();
    const uint64_t of_row = mok_mx_scales(p.a.columns);
    uint8_t *scale_to = p.a.scales + p.rows_before() * of_row + p.column / MOK_MX_BLOCK + p.eighth() / 4;
    const bool notes = p.eighth() % 4 == 0 && p.own_columns_left;
    V::row_maxima(v, p.a.group == side, amax);
#pragma unroll
    for (uint32_t i = 0; i < own; i++, to += p.a.columns, scale_to += of_row) {
        const uint32_t scale = scale_of(amax[i]);
        const uint2 codes = row_codes<V>(v[i], inverse_of(scale));
        if (i >= p.own_rows_left)
            continue;
        store_row(p, to, codes);
        if (notes)
            *scale_to = static_cast<uint8_t>(scale);
    }
}

/* The eight codes of a column, to where the copy below finds them: without conflicts either way. */
__device__ void put_column(const place &p, uint32_t c, uint32_t lo, uint32_t hi)
{
    uint8_t *to = dynamic_shared() + (p.eighth() * own + c) * side + (p.row_eighth() ^ p.eighth()) * own;
    *reinterpret_cast<uint2 *>(to) = make_uint2(lo, hi);
}

__device__ void store_transposed(const place &p)
{
    constexpr uint32_t at_once = QUANTIZE_THREADS / 8; /* columns; a thread takes the same 16 rows of each */
    const uint32_t part = threadIdx.x % 8;
    uint32_t c = threadIdx.x / 8;
    const uint32_t left = p.rows_left > part * 16 ? p.rows_left - part * 16 : 0;
    uint8_t *to = p.a.transposed + (p.matrix * p.a.columns + p.column + c) * p.a.rows + p.row + part * 16;
    __syncthreads();
#pragma unroll
    for (uint32_t n = 0; n < side / at_once; n++, c += at_once, to += at_once * p.a.rows) {
        const uint32_t eighth = c / own;
        if (c >= p.columns_left || left == 0)
            continue;
        uint4 v = *reinterpret_cast<const uint4 *>(dynamic_shared() + c * side + ((part * 2 ^ eighth) & ~1u) * own);
        if (eighth % 2)
            v = make_uint4(v.z, v.w, v.x, v.y);
        if (p.wide(QUANTIZE_WIDE_TRANSPOSED)) {
            *reinterpret_cast<uint4 *>(to) = v;
            continue;
        }
#pragma unroll 1
        for (uint32_t i = 0; i < 16 && i < left; i++) {
            to[i] = static_cast<uint8_t>(v.x);
            v.x = v.x >> 8 | v.y << 24, v.y = v.y >> 8 | v.z << 24, v.z = v.z >> 8 | v.w << 24, v.w >>= 8;
        }
    }
}

/* Where the scales of column `c` of the square are stored. */
__device__ uint8_t *column_scales_at(const place &p, uint32_t c)
{
    const uint64_t of_row = mok_mx_scales(p.a.rows);
    return p.a.transposed_scales + (p.matrix * p.a.columns + p.column + c) * of_row + p.row / MOK_MX_BLOCK;
}

/* The largest magnitude of each column, for each warp's 16 rows. */
template <class V> __device__ void note_maxima(const place &p, const held<V> &v, uint32_t *maxima)
{
#pragma unroll
    for (uint32_t k = 0; k < V::words; k++) {
        uint32_t m = 0;
#pragma unroll
        for (uint32_t i = 0; i < own; i++)
            m = V::larger(m, V::magnitude(v[i][k]));
        m = V::larger(m, __shfl_xor_sync(~0u, m, 16));
        if (p.lane < 16)
            maxima[(p.warp * 16 + p.lane) * V::words + k] = m;
    }
}

/* One thread a column. */
template <class V> __device__ void column_scales(const place &p, const uint32_t *maxima, float *inverse)
{
    const uint32_t c = threadIdx.x;
    uint32_t amax[blocks] = {}, scales = 0;
    if (c >= side)
        return;
#pragma unroll
    for (uint32_t w = 0; w < warps; w++) {
        const uint32_t word = maxima[(w * 16 + c / own) * V::words + c % own * V::words / own];
        amax[w / 2] = max(amax[w / 2], V::of_column(word, c));
    }
    if (p.a.group == side)
        amax[0] = amax[1] = amax[2] = amax[3] = max(max(amax[0], amax[1]), max(amax[2], amax[3]));
#pragma unroll
    for (uint32_t g = 0; g < blocks; g++) {
        const uint32_t scale = scale_of(amax[g]);
        scales |= scale << 8 * g;
        inverse[g * side + c] = inverse_of(scale);
    }
    if (c < p.columns_left)
        store_scales(column_scales_at(p, c), p.wide(QUANTIZE_WIDE_TRANSPOSED_SCALES), p.rows_left, scales);
}

__device__ uint32_t *shared_maxima()
{
    return reinterpret_cast<uint32_t *>(dynamic_shared() + QUANTIZE_CODE_BYTES);
}

/* Behind note_maxima. */
template <class V> __device__ void columns(const place &p, const held<V> &v)
{
    float *inverse = reinterpret_cast<float *>(dynamic_shared() + QUANTIZE_CODE_BYTES + QUANTIZE_MAXIMA_BYTES);

    __syncthreads();
    column_scales<V>(p, shared_maxima(), inverse);
    __syncthreads();
    inverse += p.warp / 2 * side + p.eighth() * own;
#pragma unroll
    for (uint32_t c = 0; c < own; c++) {
        const float by = inverse[c];
        uint32_t codes[2] = {};
#pragma unroll
        for (uint32_t i = 0; i < own; i += 2)
            codes[i / 4] |= codes_of(V::value(v[i], c), V::value(v[i + 1], c), by) << 8 * (i % 4);
        put_column(p, c, codes[0], codes[1]);
    }
    store_transposed(p);
}

/* ---- one scale for the square: both ways have the same codes ---- */

/* Four words of four codes to those of the four columns. */
__device__ void transpose(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&ret)[own], uint32_t at)
{
    const uint32_t ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    const uint32_t ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
    ret[at] = __byte_perm(ab, cd, 0x5410);
    ret[at + 1] = __byte_perm(ab, cd, 0x7632);
    ret[at + 2] = __byte_perm(ab_high, cd_high, 0x5410);
    ret[at + 3] = __byte_perm(ab_high, cd_high, 0x7632);
}

template <class V> __device__ uint32_t square_scale(const place &p, const held<V> &v)
{
    uint32_t *maxima = shared_maxima(), amax = 0;
#pragma unroll
    for (uint32_t i = 0; i < own; i++)
#pragma unroll
        for (uint32_t k = 0; k < V::words; k++)
            amax = V::larger(amax, V::magnitude(v[i][k]));
    amax = __reduce_max_sync(whole, V::largest(amax));
    if (p.lane == 0)
        maxima[p.warp] = amax;
    __syncthreads();
#pragma unroll
    for (uint32_t w = 0; w < warps; w++)
        amax = max(amax, maxima[w]);
    return scale_of(amax);
}

template <class V> __device__ void square(const place &p, const held<V> &v)
{
    const uint32_t scale = square_scale<V>(p, v), scales = scale * 0x01010101u, n = threadIdx.x;
    const float inverse = inverse_of(scale);
    uint2 codes[own];
#pragma unroll
    for (uint32_t i = 0; i < own; i++)
        codes[i] = row_codes<V>(v[i], inverse);
    if (p.a.data != nullptr) {
        const uint64_t of_row = mok_mx_scales(p.a.columns);
        uint8_t *to = p.a.data + p.first();
#pragma unroll
        for (uint32_t i = 0; i < own; i++, to += p.a.columns)
            if (i < p.own_rows_left)
                store_row(p, to, codes[i]);
        if (n < p.rows_left)
            store_scales(p.a.scales + (p.matrix * p.a.rows + p.row + n) * of_row + p.column / MOK_MX_BLOCK,
                         p.wide(QUANTIZE_WIDE_SCALES), p.columns_left, scales);
    }
    if (p.a.transposed == nullptr)
        return;
    uint32_t lo[own], hi[own];
    transpose(codes[0].x, codes[1].x, codes[2].x, codes[3].x, lo, 0);
    transpose(codes[0].y, codes[1].y, codes[2].y, codes[3].y, lo, 4);
    transpose(codes[4].x, codes[5].x, codes[6].x, codes[7].x, hi, 0);
    transpose(codes[4].y, codes[5].y, codes[6].y, codes[7].y, hi, 4);
#pragma unroll
    for (uint32_t c = 0; c < own; c++)
        put_column(p, c, lo[c], hi[c]);
    if (n < p.columns_left)
        store_scales(column_scales_at(p, n), p.wide(QUANTIZE_WIDE_TRANSPOSED_SCALES), p.rows_left, scales);
    store_transposed(p);
}

/* ---- all squares ---- */

template <class V, bool Squares> __device__ void quantize(const place &p, const held<V> &v)
{
    if (Squares) {
        square<V>(p, v);
        return;
    }
    if (p.a.transposed != nullptr)
        note_maxima<V>(p, v, shared_maxima());
    if (p.a.data != nullptr) /* while others note theirs */
        rows<V>(p, v);
    if (p.a.transposed != nullptr)
        columns<V>(p, v);
}

template <class V> __device__ bool all_finite(const held<V> &v)
{
    uint32_t m = 0;
#pragma unroll
    for (uint32_t i = 0; i < own; i++)
#pragma unroll
        for (uint32_t k = 0; k < V::words; k++)
            m = V::larger(m, V::magnitude(v[i][k]));
    return V::largest(m) < infinite;
}

/* What is not finite takes no part, and then becomes NaN. */
template <class V> __device__ void leave_out(held<V> &v)
{
#pragma unroll
    for (uint32_t i = 0; i < own; i++)
#pragma unroll
        for (uint32_t k = 0; k < V::words; k++)
            v[i][k] = V::finite(v[i][k]);
}

template <class V> __device__ void put_nan(const place &p)
{
    const quantize_args &a = p.a;
#pragma unroll 1
    for (uint32_t i = 0; i < p.own_rows_left; i++)
#pragma unroll 1
        for (uint32_t c = 0; c < p.own_columns_left; c++) {
            const uint64_t at = p.first() + i * a.columns + c;
            const uint32_t bits = V::bits(static_cast<const uint8_t *>(a.values) + at * V::bytes);
            if ((bits & 0x7fffffffu) < infinite)
                continue;
            const uint8_t code = static_cast<uint8_t>((bits >> 24 & 0x80u) | MOK_E4M3_NAN);
            const uint64_t row = p.row + p.row_eighth() * own + i, column = p.column + p.eighth() * own + c;
            if (a.data != nullptr)
                a.data[at] = code;
            if (a.transposed != nullptr)
                a.transposed[(p.matrix * a.columns + column) * a.rows + row] = code;
        }
}

template <class V, bool Squares> __device__ void take(const place &p)
{
    held<V> v;
    load<V>(p, v);
    const bool finite = all_finite<V>(v);
    if (!finite)
        leave_out<V>(v);
    quantize<V, Squares>(p, v);
    /* behind the other threads' stores of the transpose, and before the next square comes into the same memory */
    __syncthreads();
    if (!finite)
        put_nan<V>(p);
}

template <class V, bool Squares> __device__ void run(const quantize_args &a)
{
    for (uint64_t m = blockIdx.z; m < a.matrices; m += gridDim.z)
        for (uint64_t r = static_cast<uint64_t>(blockIdx.y) * side; r < a.rows; r += static_cast<uint64_t>(gridDim.y) * side)
            for (uint64_t c = static_cast<uint64_t>(blockIdx.x) * side; c < a.columns; c += static_cast<uint64_t>(gridDim.x) * side)
                take<V, Squares>(place(a, m, r, c));
}

} // namespace
} // namespace mok

/* `at_once` on an SM: what the registers of its values let. */
#define KERNEL(name, values, squares, at_once)                                                                         \
    extern "C" __global__ void __launch_bounds__(QUANTIZE_THREADS, at_once)                                            \
        name(const __grid_constant__ quantize_args a)                                                                  \
    {                                                                                                                  \
        mok::run<mok::values, squares>(a);                                                                             \
    }
KERNEL(mok_quantize_bf16, bf16_values, false, 3)
KERNEL(mok_quantize_bf16_tiles, bf16_values, true, 3)
KERNEL(mok_quantize_f32, f32_values, false, 2)
KERNEL(mok_quantize_f32_tiles, f32_values, true, 1)
