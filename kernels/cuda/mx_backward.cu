/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backward megakernel of MXFP8 layers, but for weight gradients: gate and up made again, d_hidden, d_input.
 * Products are of E4M3 tiles; d_a, d_b and h leave quantised, and as the BF16 values that this comes to, which the
 * other backward multiplies for the weight gradients. A shared expert is BF16 and that one's too.
 */
#include <cuda_runtime.h>
#include <type_traits>

#include "launch.cuh"
#include "mx_backward_fetch.cuh"

namespace mok
{
namespace
{

constexpr uint32_t scale_blocks = MOK_MX_SCALE == 128 ? 0x01010101u : 1u; /* a scale's code times this is told of its blocks */

/* Tokenwise: weight gradients are MXFP8. Weighted h leaves quantised, and nothing as BF16. */
template <bool Tokenwise> struct mx_backward_consumer : scale_consumer {
    const mok_cuda_mx_backward_args &p;

    /* The next columns take the first places, as in wgrad_consumer. */
    template <uint32_t By> __device__ __forceinline__ static void shift(float (&d)[128])
    {
#pragma unroll
        for (uint32_t i = 0; i + By < 128; i++)
            d[i] = d[i + By];
    }

    /* No address of what comes next is worked out ahead and kept while products are made. */
    __device__ void begin_anew()
    {
        forget(warp);
        forget(lane);
    }

    /* The task waits in shared memory, behind the first of the staged rows: registers are full while products are made.
     */
    __device__ void note_task(uint4 v) const
    {
        __syncwarp();
        if (lane < 4)
            store_shared_4(results() + 128 + 4 * lane, lane < 2 ? lane ? v.y : v.x : lane == 2 ? v.z : v.w);
        __syncwarp();
    }
    __device__ uint4 noted_task() const
    {
        return load_shared_16(results() + 128);
    }

    __device__ uint32_t own_column(const task &t) const
    {
        return t.single ? t.column + b.rank : t.column;
    }

    __device__ void raise_later(const task &t, uint32_t *counters, uint32_t tiles)
    {
        if (b.rows(t) == 0 || !b.counts(t, tiles))
            return;
        pending = counters + t.row64 + b.row_first(t) / 64;
    }

    /* ---- gate and up, made again ---- */

    __device__ __forceinline__ void gate_up(float (&d)[128], const task &t)
    {
        const uint32_t column = own_column(t), first = column * (MOK_TILE_N / 2);
        if (column >= p.mx.tiles)
            return;
        const uint32_t columns = min(p.mx.inter - first, MOK_TILE_N / 2), r = my_row(t);
        const uint64_t at = (static_cast<uint64_t>(t.ring64) * 64 + r) * p.mx.inter + first;
        /* gate, then up in its place */
#pragma unroll 1
        for (uint32_t q = 0; q < 4; q++, shift<32>(d)) {
            const uint32_t skip = 64 * (q % 2), sign = q / 2 ? 0x80000000u : 0;
            void *base = q / 2 ? p.b_rows : p.a_rows;
            if (columns <= skip)
                continue;
            store_half<false>(r != ~0u ? static_cast<__nv_bfloat16 *>(base) + at + skip : nullptr,
                              min(columns - skip, 64u) * 2, [&](uint32_t j, uint32_t half) {
                                  const uint32_t i = 4 * j + 2 * half;
                                  return pack_bf16(mok_side(d[i], sign, all.sides),
                                                   mok_side(d[i + 1], sign, all.sides));
                              });
        }
    }

    /* ---- d_hidden ---- */

    /* silu of clamped gate, from its sigmoid: with the bits of forward's division, see backward.cu. */
    __device__ static float silu_of(float ac, float s)
    {
        float silu = __fmul_rn(ac, s);
        if (ac < -87.0f) {
            const float e = __fadd_rn(1.0f, exp2_approximate(__fmul_rn(ac, -1.4426950408889634f)));
            if (e > 0x1p126f)
                silu = __fdividef(ac, e);
        }
        return silu;
    }
    __device__ static float sigmoid(float ac)
    {
        return __fdividef(1.0f, __fadd_rn(1.0f, exp2_approximate(__fmul_rn(ac, -1.4426950408889634f))));
    }
    template <bool Clamped> __device__ float gate_of(float a) const
    {
        return Clamped && a > all.sides.limit ? all.sides.limit : a;
    }
    template <bool Clamped> __device__ float up_of(float v) const
    {
        const float limit = all.sides.limit, up = Clamped && v > limit ? limit : v;
        return Clamped && up < -limit ? -limit : up;
    }

    /* The scale of values whose largest in this thread is `amax`: four threads have a row's. */
    struct row_scale {
        uint8_t code;
        float inverse, factor;
    };
    __device__ static row_scale scale_of(uint32_t amax)
    {
        amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
        row_scale s;
        s.code = mok_mx_scale(__uint_as_float(amax));
        s.inverse = mok_e8m0_inverse(s.code);
        s.factor = mok_e8m0_to_f32(s.code);
        return s;
    }

    /* value * factor, and NaN of what is not finite: mx_codes wants more registers than there are. */
    __device__ static float scaled(float value, float factor)
    {
        return __fmaf_rn(value, factor, __fmul_rn(value, 0.0f));
    }

    /* 1 / the scale of the row's h times the routing weight, from the largest h of this thread; the scale is below 2^127. */
    __device__ static float weighted_inverse(uint32_t amax, float weight)
    {
        amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
        const float largest = fminf(__fmul_rn(fabsf(weight), __uint_as_float(amax)), 0x1.fffffep127f);
        return mok_e8m0_inverse(mok_mx_scale(largest));
    }

    /*
     * 128 columns of eight of this warp's rows. u[4 j + e], j < 16: columns 8 j + 2 (lane % 4) + e of row lane / 4 of
     * the eight; their a and b lie at `a_at` and `b_at`, columns from 64 on a stage further (`next` bytes behind, A and
     * B). They give way to d_a and d_b, weighted h goes beside b. Codes of d_a and d_b go to this warp's staging, eight
     * rows each; Tokenwise those of weighted h beside b in the first stage. Returns the scales of d_a in the first of a
     * row's four threads, that of weighted h in the third, those of d_b in the others; adds to `dot` this thread's part of
     * <u, h>. Rows that are not `real` are zeros as BF16, whatever the sums hold: weight gradients add them.
     */
    struct tile_at {
        uint32_t first, other,
            next; /* a and b in the first stage; how much further a lies in the second, b twice that */

        /* Codes of weighted h: the j-th pair, of 128 columns in one line. */
        __device__ __forceinline__ uint32_t h(uint32_t j, uint32_t lane) const
        {
            return ((other - lane % 4 * 2 + MOK_A_BYTES) ^ j / 2 * 16) + j % 2 * 8;
        }
        /* The j-th pair. */
        __device__ __forceinline__ uint32_t a(uint32_t j) const
        {
            return (first + j / 8 * next) ^ j % 8 * 16;
        }
        __device__ __forceinline__ uint32_t b(uint32_t j) const
        {
            return (other + j / 8 * 2 * next) ^ j % 8 * 16;
        }
        /* Addresses are worked out again, rather than kept. */
        __device__ __forceinline__ void begin_anew()
        {
            forget(first);
            forget(other);
            forget(next);
        }
    };
    template <bool Clamped>
    __device__ __forceinline__ uint32_t hidden_rows(float (&d)[128], tile_at at, float weight, bool real,
                                                    float &dot) const
    {
        uint32_t scales = 0;
#pragma unroll
        for (uint32_t first = 0; first < 16; first += mx_pairs) {
            const uint32_t end = first + mx_pairs;
            uint32_t amax = 0;
#pragma unroll 4
            for (uint32_t j = first; j < end; j++) { /* not all at once: registers run out */
                const uint32_t a = load_shared_4(at.a(j)), g = load_shared_4(at.b(j));
#pragma unroll
                for (uint32_t e = 0; e < 2; e++) {
                    const float ac = gate_of<Clamped>(__uint_as_float(e ? a & 0xffff0000u : a << 16));
                    const float bc = up_of<Clamped>(__uint_as_float(e ? g & 0xffff0000u : g << 16));
                    amax = mx_amax(amax, __fmul_rn(silu_of(ac, sigmoid(ac)), bc));
                }
            }
            const row_scale h_scale = scale_of(amax);
            float weighted = 0.0f; /* 1 / the scale of weighted h */
            if (Tokenwise) {
                weighted = weighted_inverse(amax, weight);
                if (lane % 4 == 2)
                    scales |= (254 - (__float_as_uint(weighted) >> 23)) << 2 * first;
            }
            at.begin_anew();
            uint32_t a_amax = 0, b_amax = 0;
#pragma unroll
            for (uint32_t j = first; j < end; j++) {
                const uint32_t a = load_shared_4(at.a(j)), g = load_shared_4(at.b(j));
                float h[2], s[2], silu[2], bc[2]; /* s again: registers for 32 of them are not to be had */
#pragma unroll
                for (uint32_t e = 0; e < 2; e++) {
                    const float ac = gate_of<Clamped>(__uint_as_float(e ? a & 0xffff0000u : a << 16));
                    bc[e] = up_of<Clamped>(__uint_as_float(e ? g & 0xffff0000u : g << 16));
                    s[e] = sigmoid(ac);
                    silu[e] = silu_of(ac, s[e]);
                    h[e] = __fmul_rn(silu[e], bc[e]);
                }
                float lo, hi;
                unpack_e4m3(mx_codes(h[0], h[1], h_scale.inverse), lo, hi);
                lo = __fmul_rn(lo, h_scale.factor);
                hi = __fmul_rn(hi, h_scale.factor);
                dot = __fmaf_rn(d[4 * j], lo, dot);
                dot = __fmaf_rn(d[4 * j + 1], hi, dot);
                if (Tokenwise)
                    store_shared_2(at.h(j, lane), pack_e4m3(scaled(__fmul_rn(weight, h[0]), weighted),
                                                            scaled(__fmul_rn(weight, h[1]), weighted)));
                else
                    store_shared_4(at.b(j) + MOK_A_BYTES,
                                   real ? pack_bf16(__fmul_rn(weight, lo), __fmul_rn(weight, hi)) : 0);
#pragma unroll
                for (uint32_t e = 0; e < 2; e++) {
                    const float d_h = __fmul_rn(weight, d[4 * j + e]), sigma = s[e];
                    float d_a = __fmul_rn(__fmul_rn(d_h, bc[e]), __fmaf_rn(silu[e], __fsub_rn(1.0f, sigma), sigma));
                    float d_b = __fmul_rn(d_h, silu[e]);
                    if (Clamped) {
                        const float raw_a = __uint_as_float(e ? a & 0xffff0000u : a << 16);
                        const float raw_b = __uint_as_float(e ? g & 0xffff0000u : g << 16);
                        d_a = raw_a > all.sides.limit ? 0.0f : d_a;
                        d_b = raw_b > all.sides.limit || raw_b < -all.sides.limit ? 0.0f : d_b;
                    }
                    store_shared_4(e ? at.b(j) : at.a(j), __float_as_uint(d_a)); /* for a moment FP32, in both's places */
                    d[4 * j + e] = d_b;
                    a_amax = mx_amax(a_amax, d_a);
                    b_amax = mx_amax(b_amax, d_b);
                }
            }
            const row_scale a_scale = scale_of(a_amax), b_scale = scale_of(b_amax);
            at.begin_anew();
            const uint32_t staged = results() + lane / 4 * mx_row_bytes + 2 * (lane % 4);
#pragma unroll
            for (uint32_t j = first; j < end; j++) {
                const uint32_t a = mx_codes(__uint_as_float(load_shared_4(at.a(j))),
                                            __uint_as_float(load_shared_4(at.b(j))), a_scale.inverse);
                const uint32_t g = mx_codes(d[4 * j], d[4 * j + 1], b_scale.inverse);
                store_shared_2(staged + 8 * j, a);
                store_shared_2(staged + 8 * mx_row_bytes + 8 * j, g);
                if (!Tokenwise) {
                    store_shared_4(at.a(j), real ? mx_widen(a, a_scale.factor) : 0);
                    store_shared_4(at.b(j), real ? mx_widen(g, b_scale.factor) : 0);
                }
            }
            if (!Tokenwise || lane % 4 != 2)
                scales |= static_cast<uint32_t>(lane % 4 ? b_scale.code : a_scale.code) << 2 * first;
        }
        return scales;
    }

    /* Of the noted task: this warp's first row of the ring, the first of 128 columns, and how many of them there are.
     */
    struct hidden_place {
        uint64_t row;
        uint32_t column, columns;
    };
    __device__ __forceinline__ hidden_place place_of(const task &t, uint32_t q) const
    {
        const uint32_t column = own_column(t) * MOK_TILE_N + 128 * q;
        return { static_cast<uint64_t>(t.ring64) * 64 + b.row_first(t) + warp * 16, column,
                 min(p.mx.inter - column, 128u) };
    }

    /* Eight rows of the first or second 128 columns, whose a and b are in two stages. */
    template <bool Clamped> __device__ __forceinline__ void hidden_half(float (&d)[128], uint32_t q, uint32_t half)
    {
        begin_anew();
        const uint32_t stage = pipe.stage(), own = warp * 16 + lane / 4 + 8 * half;
        const uint32_t to = own * 128 + lane / 4 * 16 + lane % 4 * 4;
        const tile_at tile = { b.smem + a_offset + stage * MOK_A_BYTES + to,
                               b.smem + b_offset + stage * MOK_B_BYTES + to,
                               stage == MOK_STAGES - 1 ? 0 - stage * MOK_A_BYTES : MOK_A_BYTES };
        const task before = decode(noted_task());
        const bool real = own < b.rows(before);
        float weight = 0.0f, dot = 0.0f;
        if (real)
            weight = __ldg(p.row_weight + static_cast<uint64_t>(before.row64) * 64 + b.row_first(before) + own);
        const uint32_t scales = hidden_rows<Clamped>(d, tile, weight, real, dot);
        dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, 1));
        dot = __fadd_rn(dot, __shfl_xor_sync(~0u, dot, 2));
        __syncwarp();
        begin_anew();
        const task t = decode(noted_task());
        const hidden_place at = place_of(t, q);
        const uint64_t row = at.row + 8 * half + lane / 4;
        if (lane % 4 == 0)
            __stcg(p.partial + row * p.mx.tiles + at.column / 128, dot);
        if (lane % 4 < (Tokenwise ? 3 : 2)) {
            uint8_t *told = lane % 4 == 0 ? p.d_a_scale : lane % 4 == 1 ? p.d_b_scale : p.mx.h_scale;
            __stcg(reinterpret_cast<uint32_t *>(told + row * p.mx.h_scale_bytes + at.column / 32), scales * scale_blocks);
            if (MOK_MX_SCALE == 128 && lane % 4 < 2)
                __stcg((lane % 4 ? p.d_b_factor : p.d_a_factor) + at.column / 128 * p.mx.factor_rows + row,
                       mok_e8m0_to_f32(static_cast<uint8_t>(scales)));
        }
        uint8_t *code = (lane < 8 ? p.d_a_code : p.d_b_code) + at.column;
        leave<false>(lane < 16 ? code + (at.row + 8 * half + lane % 8) * p.mx.inter : nullptr, at.columns);
    }

    /* In this warp's rows of two stages are d_a, d_b and weighted h now, which leave. */
    __device__ __forceinline__ void hidden_leave(uint32_t q)
    {
        begin_anew();
        const hidden_place at = place_of(decode(noted_task()), q);
        if (Tokenwise) {
            store_columns(b.smem + b_offset + pipe.stage() * MOK_B_BYTES + MOK_A_BYTES + warp * 16 * 128,
                          p.mx.h + at.row * p.mx.inter + at.column, p.mx.inter, at.columns);
            fence_async_shared();
            return;
        }
        const uint64_t base = (at.row * p.mx.inter + at.column) * 2, stride = p.mx.inter * 2ull;
#pragma unroll 1
        for (uint32_t i = 0; i < 2 && 64 * i < at.columns; i++) {
            const uint32_t stage = (pipe.n + i) % MOK_STAGES, own = warp * 16 * 128,
                           bytes = min(at.columns - 64 * i, 64u) * 2;
            const uint32_t a_tile = b.smem + a_offset + stage * MOK_A_BYTES + own;
            const uint32_t b_tile = b.smem + b_offset + stage * MOK_B_BYTES + own;
            const uint64_t to = base + 128 * i;
            store_columns(a_tile, static_cast<uint8_t *>(p.d_a_rows) + to, stride, bytes);
            store_columns(b_tile, static_cast<uint8_t *>(p.d_b_rows) + to, stride, bytes);
            store_columns(b_tile + MOK_A_BYTES, static_cast<uint8_t *>(p.h_rows) + to, stride, bytes);
        }
        fence_async_shared(); /* the next bytes come by another road */
    }

    /* The epilogue of u = d_out down. */
    template <bool Clamped> __device__ __forceinline__ void d_hidden(float (&d)[128])
    {
        const uint32_t column = own_column(decode(noted_task()));
        if (column >= p.hidden_tiles) {
            consumer_base::skip(mx_gate_stages);
            return;
        }
#pragma unroll 1
        for (uint32_t q = 0; q < 2; q++, shift<60>(d)) {
            const pipeline next = { pipe.n + 1 };
            mbar_wait(b.full(pipe.stage()), pipe.phase());
            mbar_wait(b.full(next.stage()), next.phase());
            if (own_column(decode(noted_task())) * MOK_TILE_N + 128 * q < p.mx.inter) {
#pragma unroll 1
                for (uint32_t half = 0; half < 2; half++, shift<2>(d))
                    hidden_half<Clamped>(d, q, half);
                hidden_leave(q);
            }
            __syncwarp();
            release(pipe.stage());
            release((pipe.n + 1) % MOK_STAGES);
            pipe.n += 2;
        }
    }

    /* ---- d_input ---- */

    /* d_topk_weight of this warp's rows, tiles ascending, to their slots on the source rank. */
    __device__ void push_weights(const task &t)
    {
        const uint32_t tiles = p.mx.tiles, r = my_row(t);
        if (own_column(t) != 0 || r == ~0u)
            return;
        const float *part = p.partial + (static_cast<uint64_t>(t.ring64) * 64 + r) * tiles;
        float sum = 0.0f;
        for (uint32_t i = 0; i < tiles; i++)
            sum = __fadd_rn(sum, __ldcg(part + i));
        const uint64_t to = __ldg(p.row_weight_dst + static_cast<uint64_t>(t.row64) * 64 + r);
        *reinterpret_cast<float *>(to) = sum;
    }

    /* Finished rows over the hidden columns, each to its place. */
    __device__ __forceinline__ void d_input(const float (&d)[128], const task &t)
    {
        const uint32_t first = own_column(t) * MOK_TILE_N, r = my_row(t);
        uint64_t to = 0;
        if (r != ~0u)
            to = __ldg(all.row_dst + static_cast<uint64_t>(t.row64) * 64 + r);
#pragma unroll
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t at = first + q * 64;
            if (at >= all.hidden)
                return;
            store_half<true>(to != 0 ? reinterpret_cast<__nv_bfloat16 *>(to) + at : nullptr,
                             min(all.hidden - at, 64u) * 2, [&](uint32_t j, uint32_t half) {
                                 const uint32_t i = 4 * (j + 8 * q) + 2 * half;
                                 return pack_bf16(d[i], d[i + 1]);
                             });
        }
    }

    /* ---- pull ---- */

    /*
     * This warp's share of the unit's remote rows, which `source` names, into a ring (Here: they are in `ring`
     * already), and, but for Tokenwise, what their codes are worth as BF16 to `wide`, which `table` is told.
     */
    template <bool Here>
    __device__ __forceinline__ void pull_codes(const task &t, const uint64_t *source, void *ring, uint64_t *table,
                                               void *wide)
    {
        const uint32_t first = b.rank * MOK_TILE_M, rows = t.rows > first ? min(t.rows - first, MOK_TILE_M) : 0;
        if (Here && Tokenwise)
            return;
        for (uint32_t r = warp; r < rows; r += MOK_CONSUMER_WARPS) {
            const uint64_t unit_row = static_cast<uint64_t>(t.row64) * 64 + first + r;
            const uint64_t ring_row = static_cast<uint64_t>(t.ring64) * 64 + first + r, at = __ldcg(source + unit_row);
            if (!(at & 1u))
                continue;
            uint8_t *here = static_cast<uint8_t *>(ring) + ring_row * p.mx.x_row_bytes;
            uint8_t *to = static_cast<uint8_t *>(wide) + ring_row * all.hidden * 2;
            const uint8_t *from = Here ? here : reinterpret_cast<const uint8_t *>(at & ~1ull);
#pragma unroll 2
            for (uint32_t i = lane * 16; i < p.mx.x_row_bytes; i += 32 * 16) {
                const bool codes = i < all.hidden; /* or scales */
                const uint4 v = __ldcv(reinterpret_cast<const uint4 *>(from + i));
                const uint8_t scale = codes ? __ldcv(from + all.hidden + i / MOK_MX_BLOCK) : 0;
                if (!Here)
                    __stcg(reinterpret_cast<uint4 *>(here + i), v);
                if (!codes || Tokenwise)
                    continue;
                const float factor = mok_e8m0_to_f32(scale);
                uint4 *values = reinterpret_cast<uint4 *>(to + 2 * i);
                __stcg(values, make_uint4(mx_widen(v.x, factor), mx_widen(v.x >> 16, factor), mx_widen(v.y, factor),
                                          mx_widen(v.y >> 16, factor)));
                __stcg(values + 1, make_uint4(mx_widen(v.z, factor), mx_widen(v.z >> 16, factor), mx_widen(v.w, factor),
                                              mx_widen(v.w >> 16, factor)));
            }
            if (!Tokenwise && lane == 0)
                __stcg(table + unit_row, reinterpret_cast<uint64_t>(to));
        }
    }

    __device__ void pull(const task &t)
    {
        void *x_ring = all.x_ring[t.macrobatch > 0];
        begin_anew();
        pull_codes<false>(t, p.row_g, p.g_ring, p.row_g_wide, p.g_wide_ring);
        if (mx_remade(p, t))
            pull_codes<false>(t, all.row_src, x_ring, p.row_x_wide, p.x_wide_ring);
        else
            pull_codes<true>(t, all.row_src, x_ring, p.row_x_wide, p.x_wide_ring);
        pulled(t);
    }

    /* Products of the noted task and what is made of them. */
    __device__ __forceinline__ uint4 gate_up_tile(uint32_t k_blocks)
    {
        float d[128];
        multiply_mx(d, k_blocks);
        begin_anew();
        const uint4 v = noted_task();
        gate_up(d, decode(v));
        return v;
    }
    /* Of a turned weight: d_hidden, d_input. */
    __device__ __forceinline__ uint4 turned_tile(uint32_t k_blocks)
    {
        float d[128];
        multiply_even(d, k_blocks);
        begin_anew();
        const uint4 v = noted_task();
        const task t = decode(v);
        if (t.type == MOK_TASK_D_INPUT) {
            push_weights(t);
            d_input(d, t);
        } else if (all.clamp > 0.0f) {
            d_hidden<true>(d);
        } else {
            d_hidden<false>(d);
        }
        return v;
    }

    __device__ __forceinline__ void tile(uint4 v)
    {
        const task at_first = decode(v);
        const bool is_hidden = at_first.type == MOK_TASK_D_HIDDEN;
        const uint32_t k_blocks = at_first.type == MOK_TASK_D_INPUT ? 2 * p.mx.h_blocks : all.k_blocks;
        if (b.rows(at_first) <= group * 64) {
            consumer_base::skip(k_blocks + (is_hidden ? mx_gate_stages : 0));
        } else {
            note_task(v);
            v = at_first.type == MOK_TASK_GATE_UP ? gate_up_tile(k_blocks) : turned_tile(k_blocks);
        }
        const task t = decode(v);
        __syncwarp();
        if (t.type == MOK_TASK_GATE_UP)
            raise_later(t, p.gates_done, p.mx.tiles);
        else if (t.type == MOK_TASK_D_HIDDEN)
            raise_later(t, all.hidden_done, p.hidden_tiles);
        __syncwarp();
    }

    __device__ void run()
    {
        for (uint32_t n = 0;; n++) {
            uint4 v = next_task(b, n, lane);
            const uint32_t type = decode(v).type;
            if (type == MOK_TASK_D_INPUT || type == MOK_TASK_PULL || type == MOK_TASK_END)
                deliver(); /* the next task may wait for it */
            if (type == MOK_TASK_END)
                break;
            if (type == MOK_TASK_PULL)
                pull(decode(v));
            else
                tile(v);
        }
    }
};

template <bool Tokenwise>
__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    mx_backward_kernel(const __grid_constant__ mok_cuda_mx_backward_args p)
{
    run_block<mx_backward_consumer<Tokenwise>, MOK_MX_BACKWARD_CONSUMER_REGISTERS, MOK_MX_BACKWARD_PRODUCER_REGISTERS>(p);
}

/* With MXFP8 weight gradients, and without. */
constexpr void (*tokenwise_backward)(mok_cuda_mx_backward_args) = mx_backward_kernel<true>;
constexpr void (*wide_backward)(mok_cuda_mx_backward_args) = mx_backward_kernel<false>;

} // namespace
} // namespace mok

extern "C" int MOK_MX_OF_SCALE(mok_cuda_launch_mx_backward)(const mok_cuda_mx_backward_args *args, uint32_t blocks, void *stream)
{
    return mok::launch(true, args->tokenwise ? mok::tokenwise_backward : mok::wide_backward,
                       dim3(args->common.retiring_blocks + blocks), MOK_THREADS, mok::smem_bytes, stream, *args);
}

extern "C" int MOK_MX_OF_SCALE(mok_cuda_mx_backward_setup)(void)
{
    int r = cudaFuncSetAttribute(mok::wide_backward, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
    if (r == 0)
        r = cudaFuncSetAttribute(mok::tokenwise_backward, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
    return r;
}
