/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward megakernel of MXFP8 layers: as megakernel.cu, with E4M3 tiles of 128 values a stage. x arrives quantised
 * (its rank does that in PREPARE), h is quantised where SwiGLU makes it. A shared expert is BF16 and not this kernel's:
 * it has the other one to itself.
 */
#include <cuda_runtime.h>

#include "launch.cuh"
#include "loader.cuh"
#include "mx.cuh"
#if MOK_MX_SCALE == 128
#include "mx_quads.cuh"
#else
#include "mx_blocks.cuh"
#endif

namespace mok
{
namespace
{

#if MOK_MX_SCALE == 128
using scale_gather = mx_quad_gather;
using scale_consumer = mx_quad_consumer;
#else
using scale_gather = block_gather;
using scale_consumer = block_consumer;
#endif

/* ---- x of this rank, on its way to everybody ---- */

constexpr uint32_t quantize_threads = 256, quantize_values = 8; /* of a thread, 16 bytes */
constexpr uint32_t quantize_tokens = 4;                         /* a thread's, so that enough is in flight */

/* Eight values; the lanes that have a scale's take it together. */
__device__ __forceinline__ void quantize(const mok_cuda_quantize_args &a, uint64_t token, uint32_t column, uint4 v)
{
    const uint32_t part[4] = { v.x, v.y, v.z, v.w };
    float value[quantize_values];
    uint32_t amax = 0;
#pragma unroll
    for (uint32_t i = 0; i < quantize_values; i++) {
        value[i] = __uint_as_float(i % 2 ? part[i / 2] & 0xffff0000u : part[i / 2] << 16);
        amax = mx_amax(amax, value[i]);
    }
#pragma unroll
    for (uint32_t lanes = 1; lanes < MOK_MX_SCALE / quantize_values; lanes *= 2)
        amax = max(amax, __shfl_xor_sync(~0u, amax, lanes));
    if (column >= a.hidden || token >= a.tokens)
        return;
    const uint8_t scale = mok_mx_scale(__uint_as_float(amax));
    const float inverse = mok_e8m0_inverse(scale);
    uint8_t *to = a.to + token * a.row_bytes;
    uint32_t codes[2] = {};
#pragma unroll
    for (uint32_t i = 0; i < quantize_values; i += 2)
        codes[i / 4] |= mx_codes(value[i], value[i + 1], inverse) << 8 * (i % 4);
    *reinterpret_cast<uint2 *>(to + column) = make_uint2(codes[0], codes[1]);
    if (a.wide != nullptr) {
        const float factor = mok_e8m0_to_f32(scale);
        uint8_t *wide = static_cast<uint8_t *>(a.wide) + (token * a.hidden + column) * 2;
        *reinterpret_cast<uint4 *>(wide) = make_uint4(mx_widen(codes[0], factor), mx_widen(codes[0] >> 16, factor),
                                                      mx_widen(codes[1], factor), mx_widen(codes[1] >> 16, factor));
    }
    if (column % MOK_MX_BLOCK == 0)
        to[a.hidden + column / MOK_MX_BLOCK] = scale;
}

__global__ void __launch_bounds__(quantize_threads) quantize_kernel(const __grid_constant__ mok_cuda_quantize_args a)
{
    const uint32_t column = (blockIdx.y * quantize_threads + threadIdx.x) * quantize_values;
    const uint64_t first = static_cast<uint64_t>(blockIdx.x) * quantize_tokens;
    let_next_kernel_start();
    if (!a.beside)
        wait_for_previous_kernel();
    if (a.bad_id == nullptr || !__ldcg(a.bad_id)) {
        uint4 v[quantize_tokens];
#pragma unroll
        for (uint32_t i = 0; i < quantize_tokens; i++) {
            /* hidden is a multiple of 16, so that all values of a thread are real, or none */
            const uint8_t *row = static_cast<const uint8_t *>(a.x) + (first + i) * a.hidden * 2 + 2 * column;
            v[i] = column < a.hidden && first + i < a.tokens ? __ldcs(reinterpret_cast<const uint4 *>(row)) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (uint32_t i = 0; i < quantize_tokens; i++)
            quantize(a, first + i, column, v[i]);
    }
    /* This kernel ends with its last block: one block's wait keeps order transitive, and the others hold no place. */
    if (a.beside && blockIdx.x == 0 && blockIdx.y == 0)
        wait_for_previous_kernel();
}

/* Whether pulls take the stages. With scales of 32 values gather warps have no register left to follow that. */
constexpr bool by_stages = MOK_MX_SCALE == 128;

/* ---- loader ---- */

/* Until all of this block's rows of the unit are there. */
__device__ __forceinline__ void wait_rows(const mok_cuda_mx_args &p, const block_view &b, const task &t, uint4 v)
{
    if (b.rows(t) > 0)
        wait_counter(p.common, p.common.pull_done + t.row64 + b.row_first(t) / 64, MOK_CONSUMER_WARPS * MOK_MX_PULLS,
                     MOK_WAIT_ROWS_HERE, v);
}

struct mx_loader : loader_base {
    const mok_cuda_mx_args &p;

    /* Consumers bring the rows, which may take all stages. */
    __device__ void pull(const task &, uint32_t lane)
    {
        if (lane != 0)
            return;
        request(1, 1);
        for (uint32_t i = 0; by_stages && i < MOK_STAGES; i++, pipe.n++) {
            mbar_wait(b.empty(pipe.stage()), pipe.phase() ^ 1u);
            mbar_arrive(b.full(pipe.stage()));
        }
    }

    __device__ void gate_up(const task &t, uint4 v)
    {
        const uint32_t what = b.column(t, p.tiles) | t.expert << 16;
        const uint32_t rows = (t.ring64 * 64 + b.row_first(t)) << 2 | t.single << 1 | (t.macrobatch > 0);
        wait_rows(p, b, t, v);
        fence_async();
        for (uint32_t k = 0; k < all.k_blocks; k++, pipe.n++) {
            const uint32_t full = begin(all.k_blocks - k, all.k_blocks, MOK_A_BYTES + MOK_B_BYTES), dst = b_at();
            uint32_t w = what, r = rows;
            forget(w); /* registers are few: of the task two words stay */
            forget(r);
            const int32_t at = k * MOK_TILE_K, y = (w & 0xffffu) * (MOK_TILE_N / 2), e = w >> 16;
            if (r & 2u) {
                tma_load_3d(dst, &p.gate, full, at, y, e);
                tma_load_3d(dst + MOK_B_BYTES / 2, &p.up, full, at, y, e);
            } else {
                tma_load_3d_multicast(dst + b.rank * (MOK_B_BYTES / 2), b.rank ? &p.up : &p.gate, full, at, y, e, 3);
            }
            if (r & 1u)
                tma_load_2d(a_at(), &p.x_map[1], full, at, r >> 2);
            else
                tma_load_2d(a_at(), &p.x_map[0], full, at, r >> 2);
        }
    }
    __device__ void down(const task &t)
    {
        down_tile(t, p.down, p.h_map, p.h_blocks);
    }
    __device__ uint32_t hidden_tiles(const task &) const
    {
        return p.tiles;
    }
};

__device__ void load(const mok_cuda_mx_args &p, const block_view &b, uint32_t lane)
{
    mx_loader l = { { p.common, b, {} }, p };
    load_forward(l, lane);
}

/* ---- gather ---- */

/* Until all of this block's rows of h are there. */
__device__ __forceinline__ void wait_hidden(const mok_cuda_mx_args &p, const block_view &b, const task &t, uint4 v)
{
    if (b.rows(t) > 0)
        wait_counter(p.common, p.common.hidden_done + t.row64 + b.row_first(t) / 64, p.tiles * MOK_CONSUMER_WARPS,
                     MOK_WAIT_HIDDEN, v);
}

/* The loader brings x and h; here come their scales, and the weights'. */
__device__ void gather(const mok_cuda_mx_args &p, const block_view &b, uint32_t thread, uint32_t lane)
{
    scale_gather g = { { p, b, thread, lane, {} } };
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (by_stages && t.type == MOK_TASK_PULL) {
            gather_follow(b, g.pipe, MOK_STAGES, lane);
        } else if (t.type == MOK_TASK_GATE_UP) {
            wait_rows(p, b, t, v);
            forget(v);
            g.fill<true>(decode(v));
        } else if (t.type == MOK_TASK_DOWN) {
            wait_hidden(p, b, t, v);
            forget(v);
            g.fill<false>(decode(v));
        }
    }
}

/* ---- consumers ---- */

struct mx_forward_consumer : scale_consumer {
    const mok_cuda_mx_args &p;

    /* a or b as a context keeps them: this warp's rows, 64 columns at a time. */
    template <class Pair> __device__ __forceinline__ void keep(void *to, uint64_t at, bool mine, uint32_t columns, Pair pair)
    {
#pragma unroll
        for (uint32_t q = 0; q < 2; q++)
            if (columns > 64 * q)
                store_half<true>(mine ? static_cast<__nv_bfloat16 *>(to) + at + 64 * q : nullptr,
                                                min(columns - 64 * q, 64u) * 2,
                                                [&](uint32_t j, uint32_t half) { return pair(4 * (j + 8 * q) + 2 * half); });
    }

    template <bool Clamped> __device__ __forceinline__ void gate_up(float (&d)[128], const task &t, uint4 v)
    {
        const uint32_t column = t.single ? t.column + b.rank : t.column, first = column * (MOK_TILE_N / 2);
        if (column >= p.tiles)
            return;
        const uint32_t columns = min(p.inter - first, MOK_TILE_N / 2), r = my_row(t);
        const uint64_t row = static_cast<uint64_t>(t.ring64) * 64 + r;
        const bool mine = r != ~0u;
        if (t.macrobatch + 1 < macrobatches) {
            const mok_cuda_macrobatch *before = all.macrobatches + t.macrobatch + 1;
            wait_counter(all, &before->down_done, __ldcg(&before->down_warps), MOK_WAIT_RING_H, v);
        }
        auto gate = [&](uint32_t i) { return gate_pair<Clamped>(d[i], d[i + 1]); };
        auto up = [&](uint32_t i) { return up_pair<Clamped>(d[i + 64], d[i + 65]); };
        if (p.context_a != nullptr && t.macrobatch == 0) {
            keep(p.context_a, row * p.inter + first, mine, columns, gate);
            keep(p.context_b, row * p.inter + first, mine, columns, up);
        }
        const float limit = Clamped ? all.clamp : 0.0f;
        uint8_t *scale = mine ? p.h_scale + row * p.h_scale_bytes + 4 * column : nullptr;
        float *factor = p.h_factor + static_cast<uint64_t>(column) * p.factor_rows + t.ring64 * 64 + b.row_first(t) + warp * 16;
        __syncwarp();
#pragma unroll 1
        for (uint32_t half = 0; half < 2; half++) { /* in turns: both at once run out of registers */
            float h[32];
#pragma unroll
            for (uint32_t j = 0; j < 16; j++) {
                const uint32_t g = gate(4 * j), u = up(4 * j);
                h[2 * j] = swiglu(__uint_as_float(g << 16), __uint_as_float(u << 16), limit);
                h[2 * j + 1] = swiglu(__uint_as_float(g & 0xffff0000u), __uint_as_float(u & 0xffff0000u), limit);
            }
            quantise(h, half, scale, factor);
#pragma unroll
            for (uint32_t i = 0; i < 128; i += 4) {
                d[i] = d[i + 2];
                d[i + 1] = d[i + 3];
            }
        }
        __syncwarp();
        leave<false>(mine ? p.h + row * p.inter + first : nullptr, columns);
    }

    /* Finished rows over the hidden columns, each to its place `to`. */
    __device__ __forceinline__ void down(const float (&d)[128], const task &t, void *to)
    {
        const uint32_t first = (t.single ? t.column + b.rank : t.column) * MOK_TILE_N;
#pragma unroll
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t at = first + q * 64;
            if (at >= all.hidden)
                return;
            store_half<true>(to != nullptr ? static_cast<__nv_bfloat16 *>(to) + at : nullptr,
                                            min(all.hidden - at, 64u) * 2, [&](uint32_t j, uint32_t half) {
                                                const uint32_t i = 4 * (j + 8 * q) + 2 * half;
                                                return pack_bf16(d[i], d[i + 1]);
                                            });
        }
    }

    __device__ void pull(const task &t, uint4 v)
    {
        if (t.macrobatch + 1 < macrobatches) {
            const mok_cuda_macrobatch *before = all.macrobatches + t.macrobatch + 1;
            wait_counter(all, &before->gate_up_done, __ldcg(&before->gate_up_warps), MOK_WAIT_RING_X, v);
            __syncwarp();
        }
        for (uint32_t i = 0; by_stages && i < MOK_STAGES; i++)
            mbar_wait(b.full((pipe.n + i) % MOK_STAGES), (pipe.n + i) / MOK_STAGES & 1u);
        __syncwarp();
        bring(t);
        pulled(t);
        for (uint32_t i = 0; by_stages && i < MOK_STAGES; i++, pipe.n++)
            release(pipe.stage());
    }

    /* Room for a piece of a row; all stages together are so many for each warp. */
    static constexpr uint32_t slot_bytes = 8192;
    static constexpr uint32_t slots = MOK_STAGES * (MOK_A_BYTES + MOK_B_BYTES) / slot_bytes / MOK_CONSUMER_WARPS;
    static_assert(slots == 3, "fetches that are under way are waited for by number");
    __device__ uint32_t slot(uint32_t i) const
    {
        return b.smem + a_offset + (warp + i % slots * MOK_CONSUMER_WARPS) * slot_bytes;
    }

    /* This warp's share of a pull: rows of x, wherever they lie, beside each other. */
    __device__ __forceinline__ void bring(const task &t)
    {
        constexpr uint32_t rows = MOK_TILE_M / MOK_MX_PULLS / MOK_CONSUMER_WARPS; /* of a warp */
        const uint32_t first = b.rank * MOK_TILE_M + (t.column * MOK_CONSUMER_WARPS + warp) * rows, end = min(t.rows, first + rows);
        if (first >= end)
            return;
        const uint64_t ring = static_cast<uint64_t>(t.ring64) * 64 + first;
        const uint64_t *sources = all.row_src + static_cast<uint64_t>(t.row64) * 64;
        const uint64_t own = __ldcg(sources + min(first + lane % rows, end - 1)) & ~1ull;
        uint8_t *to = p.x_rows[t.macrobatch > 0] + ring * p.x_row_bytes;
        if (!by_stages) {
            for (uint32_t r = 0; r < end - first; r++, to += p.x_row_bytes) {
                const uint64_t from = __shfl_sync(~0u, own, r);
                copy_row(reinterpret_cast<const uint4 *>(from), reinterpret_cast<uint4 *>(to), p.x_row_bytes / 16);
            }
            return;
        }
        copy_rows(own, to, end - first, [&] { turn_factors<rows>(own, ring); });
    }

    /* Rows of which lane i has the i-th one's place, beside each other to `to`, by way of this warp's part of the stages. */
    template <class Meanwhile>
    __device__ __forceinline__ void copy_rows(uint64_t own, uint8_t *to, uint32_t rows, const Meanwhile &meanwhile)
    {
        const uint32_t of_row = (p.x_row_bytes + slot_bytes - 1) / slot_bytes, pieces = rows * of_row;
        auto bytes = [&](uint32_t i) { return min(slot_bytes, p.x_row_bytes - i % of_row * slot_bytes); };
        auto fetch = [&](uint32_t i) {
            const uint64_t from = __shfl_sync(~0u, own, i / of_row) + i % of_row * slot_bytes;
            if (i < pieces)
                for (uint32_t at = 16 * lane; at < bytes(i); at += 16 * 32)
                    cp_async_16(slot(i) + at, reinterpret_cast<const uint8_t *>(from) + at, 16);
            cp_async_commit();
        };
#pragma unroll 1
        for (uint32_t i = 0; i < slots; i++)
            fetch(i);
        meanwhile();
#pragma unroll 1
        for (uint32_t i = 0; i < pieces; i++) {
            cp_async_wait<slots - 1>();
            fence_async_shared();
            __syncwarp();
            if (lane == 0) {
                bulk_store(to + i / of_row * p.x_row_bytes + i % of_row * slot_bytes, slot(i), bytes(i));
                bulk_commit();
                bulk_wait_read();
            }
            __syncwarp();
            fetch(i + slots);
        }
        if (lane == 0) {
            bulk_wait();
            fence_async();
        }
    }

    /* Scales of such rows, as floats, to where a k-block's of all rows lie beside each other. */
    template <uint32_t Rows> __device__ __forceinline__ void turn_factors(uint64_t own, uint64_t to)
    {
        static_assert(Rows == 4, "rows of a warp are stored as one vector");
        const uint64_t scales = own + all.hidden;
        uint64_t from[Rows];
#pragma unroll
        for (uint32_t i = 0; i < Rows; i++)
            from[i] = __shfl_sync(~0u, scales, i);
        for (uint32_t k = lane; k < all.k_blocks; k += 32) {
            float factor[Rows];
#pragma unroll
            for (uint32_t i = 0; i < Rows; i++)
                factor[i] = mok_e8m0_to_f32(static_cast<uint8_t>(__ldcv(reinterpret_cast<const uint32_t *>(from[i]) + k)));
            __stcg(reinterpret_cast<float4 *>(p.x_factor + static_cast<uint64_t>(k) * p.factor_rows + to),
                   make_float4(factor[0], factor[1], factor[2], factor[3]));
        }
    }

    /* Where lane's finished row of down goes waits in shared memory: registers are full while products are made. */
    __device__ uint32_t place() const
    {
        return b.smem + mx_place_offset + 8 * (warp * 16 + lane % 16);
    }
    __device__ void note_place(const task &t) const
    {
        const uint32_t r = my_row(t);
        if (lane >= 16)
            return;
        const uint64_t to = r != ~0u ? __ldg(all.row_dst + static_cast<uint64_t>(t.row64) * 64 + r) : 0;
        store_shared_4(place(), static_cast<uint32_t>(to));
        store_shared_4(place() + 4, static_cast<uint32_t>(to >> 32));
    }
    __device__ void *noted_place() const
    {
        const uint2 at = load_shared_8(place());
        return reinterpret_cast<void *>(static_cast<uint64_t>(at.y) << 32 | at.x);
    }

    /* So does the task, behind the last of the staged rows. */
    __device__ uint32_t task_place() const
    {
        return results() + 15 * mx_row_bytes + 128;
    }
    __device__ void note_task(uint4 v) const
    {
        if (lane < 4)
            store_shared_4(task_place() + 4 * lane, lane < 2 ? lane ? v.y : v.x : lane == 2 ? v.z : v.w);
        __syncwarp();
    }
    __device__ uint4 noted_task() const
    {
        return load_shared_16(task_place());
    }

    __device__ __forceinline__ void tile(uint4 v)
    {
        const task at_first = decode(v);
        const uint32_t k_blocks = at_first.type == MOK_TASK_DOWN ? p.h_blocks : all.k_blocks;
        const bool active = b.rows(at_first) > group * 64;
        float d[128];
        note_task(v);
        if (active)
            multiply_mx(d, k_blocks, [&] {
                const task t = decode(noted_task());
                if (t.type == MOK_TASK_DOWN)
                    note_place(t);
            });
        else
            skip(k_blocks);
        v = noted_task();
        const task t = decode(v);
        if (macrobatches > 1 && lane == 0) /* someone waits for the ring's rows */
            add_release(t.type == MOK_TASK_DOWN ? &all.macrobatches[t.macrobatch].down_done :
                                                  &all.macrobatches[t.macrobatch].gate_up_done,
                        1);
        if (t.type == MOK_TASK_DOWN) {
            if (active)
                down(d, t, noted_place());
            return;
        }
        if (active && all.clamp > 0.0f)
            gate_up<true>(d, t, v);
        else if (active)
            gate_up<false>(d, t, v);
        if (b.rows(t) > 0 && b.counts(t, p.tiles))
            pending = all.hidden_done + t.row64 + b.row_first(t) / 64;
    }

    __device__ void run()
    {
        macrobatches = __ldcg(&all.head->macrobatches);
        for (uint32_t n = 0;; n++) {
            uint4 v = next_task(b, n, lane);
            task t = decode(v);
            if (t.type != MOK_TASK_GATE_UP)
                deliver(); /* the next task may wait for it */
            if (t.type == MOK_TASK_END)
                break;
            if (t.type == MOK_TASK_PULL)
                pull(t, v);
            else
                tile(v);
        }
    }
};

__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    mx_kernel(const __grid_constant__ mok_cuda_mx_args p)
{
    run_block<mx_forward_consumer, MOK_MX_CONSUMER_REGISTERS, MOK_MX_PRODUCER_REGISTERS>(p);
}

} // namespace
} // namespace mok

extern "C" int MOK_MX_OF_SCALE(mok_cuda_launch_mx_main)(const mok_cuda_mx_args *args, uint32_t blocks, void *stream)
{
    return mok::launch(true, mok::mx_kernel, dim3(args->common.retiring_blocks + blocks), MOK_THREADS, mok::smem_bytes, stream,
                       *args);
}

extern "C" int MOK_MX_OF_SCALE(mok_cuda_launch_quantize)(const mok_cuda_quantize_args *args, void *stream)
{
    if (args->tokens == 0)
        return 0;
    constexpr uint32_t columns = mok::quantize_threads * mok::quantize_values;
    const dim3 grid((args->tokens + mok::quantize_tokens - 1) / mok::quantize_tokens, (args->hidden + columns - 1) / columns);
    return mok::launch(true, mok::quantize_kernel, grid, mok::quantize_threads, 0, stream, *args);
}

extern "C" int MOK_MX_OF_SCALE(mok_cuda_mx_setup)(void)
{
    return cudaFuncSetAttribute(mok::mx_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
}
