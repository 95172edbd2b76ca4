/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What brings an MXFP8 backward's operands into the stages: one thread by TMA, two warps by 16-byte copies of rows and
 * of their scales. The weights' are one for 128 x 128 codes, or for 32 of a column, since they have been turned.
 * Multiplies nothing.
 */
#ifndef MOK_CUDA_MX_BACKWARD_FETCH_CUH
#define MOK_CUDA_MX_BACKWARD_FETCH_CUH

#include "loader.cuh"
#include "mx.cuh"
#if MOK_MX_SCALE == 128
#include "mx_slots.cuh"
#else
#include "mx_blocks.cuh"
#endif

namespace mok
{
namespace
{

constexpr uint32_t mx_box_bytes = 64 * 128; /* 64 rows of 128 bytes: a's and b's */
/* Stages behind d_hidden's products: 64 columns of a (as A), of b (first half of B's first half) each; results take
 * their places. */
constexpr uint32_t mx_gate_stages = MOK_TILE_N / 64;
static_assert(MOK_TILE_M * 128 == MOK_A_BYTES && 2 * MOK_A_BYTES == MOK_B_BYTES, "a; b and weighted h");

/* a and b of the task's rows were made again by this kernel. */
__device__ __forceinline__ bool mx_remade(const mok_cuda_mx_backward_args &p, const task &t)
{
    return t.macrobatch > 0 || !p.kept;
}

/* ---- loader: turned weights, d_a, d_b; a and b ---- */

struct mx_backward_loader : loader_base {
    const mok_cuda_mx_backward_args &p;

    /* 256 rows of 128 values; each block fetches half and gives it to both, unless it is alone with its tile. */
    __device__ void weight_tile(const task &t, const CUtensorMap *map, uint32_t full, int32_t x, int32_t y)
    {
        const int32_t e = t.expert;
        if (t.single) {
            tma_load_3d(b_at(), map, full, x, y, e);
            tma_load_3d(b_at() + MOK_B_BYTES / 2, map, full, x, y + MOK_TILE_N / 2, e);
        } else {
            tma_load_3d_multicast(b_at() + b.rank * (MOK_B_BYTES / 2), map, full, x, y + b.rank * (MOK_TILE_N / 2), e,
                                  3);
        }
    }

    __device__ void d_hidden(const task &t, uint4 v)
    {
        const uint32_t stages = all.k_blocks + mx_gate_stages;
        const int32_t x = b.column(t, p.hidden_tiles) * MOK_TILE_N;
#pragma unroll 1
        for (uint32_t k = 0; k < all.k_blocks; k++, pipe.n++) {
            uint32_t full = begin(stages - k, stages, MOK_B_BYTES);
            weight_tile(t, &p.down_t, full, k * (MOK_MX_TILE_K / 2), x);
        }
        const uint32_t ring = mx_remade(p, t);
        if (ring && b.rows(t) > 0) {
            const uint32_t *done = p.gates_done + t.row64 + b.row_first(t) / 64;
            wait_counter(all, done, p.mx.tiles * MOK_CONSUMER_WARPS, MOK_WAIT_GATES, v);
            fence_async();
        }
        const int32_t row = t.ring64 * 64 + b.row_first(t);
#pragma unroll 1
        for (uint32_t q = 0; q < mx_gate_stages; q++, pipe.n++) {
            uint32_t full = begin(mx_gate_stages - q, stages, 2 * MOK_A_BYTES);
#pragma unroll 1
            for (uint32_t i = 0; i < 2; i++) {
                tma_load_3d(a_at() + i * mx_box_bytes, &p.a[ring], full, x + 64 * q, row + 64 * i, 0);
                tma_load_3d(b_at() + i * mx_box_bytes, &p.b[ring], full, x + 64 * q, row + 64 * i, 0);
            }
        }
    }

    /* One of the two products of d_input, behind which `behind` stages follow. */
    __device__ void input_stages(const task &t, uint32_t behind, const CUtensorMap *weight, const CUtensorMap *rows)
    {
        const int32_t y = b.column(t, all.down_tiles) * MOK_TILE_N, row = t.ring64 * 64 + b.row_first(t);
#pragma unroll 1
        for (uint32_t k = 0; k < p.mx.h_blocks; k++, pipe.n++) {
            const int32_t x = k * (MOK_MX_TILE_K / 2);
            uint32_t full = begin(behind + p.mx.h_blocks - k, 2 * p.mx.h_blocks, MOK_A_BYTES + MOK_B_BYTES);
            weight_tile(t, weight, full, x, y);
            tma_load_3d(a_at(), rows, full, x, row, 0);
        }
    }

    __device__ void d_input(const task &t, uint4 v)
    {
        if (b.rows(t) > 0) {
            const uint32_t *done = all.hidden_done + t.row64 + b.row_first(t) / 64;
            wait_counter(all, done, p.hidden_tiles * MOK_CONSUMER_WARPS, MOK_WAIT_GRADIENTS, v);
            fence_async();
        }
#pragma unroll 1
        for (uint32_t up = 0; up < 2; up++)
            input_stages(t, up ? 0 : p.mx.h_blocks, up ? &p.up_t : &p.gate_t, up ? &p.d_b : &p.d_a);
    }
};

__device__ void load(const mok_cuda_mx_backward_args &p, const block_view &b, uint32_t lane)
{
    mx_backward_loader l = { { p.common, b, {} }, p };
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (lane != 0)
            continue;
        if (t.type == MOK_TASK_PULL)
            l.request(1, 1);
        else if (t.type == MOK_TASK_GATE_UP)
            l.gate_up_tile<MOK_TILE_N / 2>(t, p.mx.gate, p.mx.up, p.mx.tiles);
        else if (t.type == MOK_TASK_D_HIDDEN)
            l.d_hidden(t, v);
        else
            l.d_input(t, v);
    }
}

/* ---- gather: rows of x and of d_out, and everybody's scales ---- */

enum turned_weight { TURNED_DOWN, TURNED_GATE, TURNED_UP };

template <turned_weight W> __device__ __forceinline__ const void *turned_scales(const mok_cuda_mx_backward_args &q)
{
    return W == TURNED_DOWN ? q.down_t_scale : W == TURNED_GATE ? q.gate_t_scale : q.up_t_scale;
}

#if MOK_MX_SCALE == 128
using scale_consumer = slot_consumer;

struct turned_gather : slot_gather {
    const mok_cuda_mx_backward_args &q;

    /*
     * Codes of four k-blocks' scales of a row are 16 bytes, fetched at once: by turns behind the scales of the first
     * stage of a task, and of the next one. Other tasks' scales may still be in further ones.
     */
    __device__ uint32_t codes_of_rows(uint32_t stage, uint32_t k) const
    {
        return scales((stage + MOK_STAGES - k % 4 + k / 4 % 2) % MOK_STAGES) + even_scale_bytes;
    }
    __device__ void fetch_rows(uint32_t stage, uint32_t k, uint32_t behind) const
    {
        if (k % 4 != 0)
            return;
        const uint32_t to = codes_of_rows(stage, k);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = own_row() + 64 * i;
            cp_async_16(to + 16 * r, row(r) + behind + 4 * k, 16);
        }
    }

    /* They are there and become floats; `columns`: the scales of the tile's two halves. */
    __device__ void finish_rows(uint32_t stage, uint32_t k, uint2 columns) const
    {
        const uint32_t codes = codes_of_rows(stage, k) + 4 * (k % 4);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = own_row() + 64 * i;
            store_shared_4(scales(stage) + 4 * r, scale(load_shared_4(codes + 16 * r)));
        }
        if (thread == 0)
            store_shared_8(scales(stage) + even_factor_bytes, __uint_as_float(columns.x), __uint_as_float(columns.y));
        gather_landed(b, stage, lane);
    }

    /*
     * Where the tile's noted rows begin, from this warp's first on, in 16 bytes: 16 words for each of the threads' rows,
     * where other tasks have their columns'. False: they are too far apart for that.
     */
    __device__ uint32_t apart(uint32_t r) const
    {
        return b.smem + mx_column_offset + r % 8 * 64 + r / 8 * 4;
    }
    __device__ bool note_apart() const
    {
        const uint8_t *first = row(thread / 32 * 4);
        bool near = true;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const int64_t bytes = row(own_row() + 64 * i) - first;
            const int32_t words = static_cast<int32_t>(bytes / 16);
            near = near && static_cast<int64_t>(words) * 16 == bytes;
            store_shared_4(apart(own_row() + 64 * i), words);
        }
        __syncwarp();
        return __all_sync(~0u, near);
    }

    /* Begins to fetch 16 bytes, `byte` bytes behind each of this thread's rows' beginnings, or zeros. */
    __device__ __forceinline__ void fetch_tile(uint32_t to, uint32_t byte, uint32_t bytes, bool near) const
    {
        const uint32_t first = thread / 8;
        if (!near) {
#pragma unroll 4
            for (uint32_t i = 0; i < gather_rows; i++)
                cp_async_16(to + i * gather_step * 128, row(first + i * gather_step) + byte, bytes);
            return;
        }
        const uint8_t *from = row(thread / 32 * 4) + byte;
#pragma unroll
        for (uint32_t i = 0; i < gather_rows; i += 4) {
            const uint4 v = load_shared_16(apart(first + i * gather_step));
            const uint32_t words[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
            for (uint32_t j = 0; j < 4; j++)
                cp_async_16(to + (i + j) * gather_step * 128, from + static_cast<int64_t>(static_cast<int32_t>(words[j])) * 16,
                            bytes);
        }
    }

    /* The first pair of scales of a task that multiplies a turned weight. */
    __device__ __forceinline__ uint32_t hidden_at(const task &t) const
    {
        return t.expert * q.common.k_blocks * q.hidden_tiles + b.column(t, q.hidden_tiles);
    }
    __device__ __forceinline__ uint32_t input_at(const task &t) const
    {
        return t.expert * q.mx.h_blocks * q.common.down_tiles + b.column(t, q.common.down_tiles);
    }

    /*
     * Stages of d_hidden, whose scales are from the `at`-th pair on. Rows of d_out are gathered too, swizzled as the
     * tensor cores read them.
     */
    __device__ __forceinline__ void fill_hidden(const task &, uint32_t at)
    {
        const uint32_t chunk = thread % 8, first = thread / 8, k_blocks = q.common.k_blocks;
        const uint32_t dst = b.smem + a_offset + first * 128 + ((chunk ^ (first % 8)) * 16);
        uint2 columns = make_uint2(0, 0);
        const bool near = note_apart();
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++, at += q.hidden_tiles) {
            const uint32_t stage = pipe.stage();
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            const uint32_t byte = k * MOK_MX_TILE_K + chunk * 16, bytes = byte < q.common.hidden ? 16 : 0;
            fetch_tile(dst + stage * MOK_A_BYTES, bytes ? byte : 0, bytes, near);
            fetch_rows(stage, k, q.common.hidden);
            cp_async_commit();
            if (k > 0) {
                cp_async_wait<1>();
                finish_rows((pipe.n - 1) % MOK_STAGES, k - 1, columns);
            }
            /* wanted a k-block later */
            columns = __ldg(static_cast<const uint2 *>(q.down_t_scale) + at);
        }
        cp_async_wait<0>();
        finish_rows((pipe.n - 1) % MOK_STAGES, k_blocks - 1, columns);
    }

    /*
     * All stages of d_input: one warp brings the scales of d_a's, then of d_b's rows, floats beside each other, the
     * other those of the columns, a pair each stage. The loader brings the rows.
     */
    __device__ __forceinline__ void fill_input(const task &t, uint32_t pair_at)
    {
        const bool rows = thread == 0;
        const uint64_t place = rows ? (t.ring64 * 64ull + b.row_first(t)) * sizeof(float) : pair_at * 8ull;
        const uint32_t step = rows ? q.mx.factor_rows * sizeof(float) : q.common.down_tiles * 8;
        fence_async(); /* rows' scales were stored by ordinary instructions */
        if (lane == 0) {
            const uint32_t end = pipe.n + 2 * q.mx.h_blocks, half = pipe.n + q.mx.h_blocks;
            uint64_t from = place + reinterpret_cast<uint64_t>(rows ? q.d_a_factor : q.gate_t_scale);
#pragma unroll 1
            for (pipeline at = pipe; at.n != end; at.n++, from += step) {
                if (at.n == half)
                    from = place + reinterpret_cast<uint64_t>(rows ? q.d_b_factor : q.up_t_scale);
                mbar_wait(b.empty(at.stage()), at.phase() ^ 1u);
                if (rows) {
                    mbar_expect(b.full(at.stage()), even_factor_bytes);
                    bulk_load(scales(at.stage()), reinterpret_cast<const void *>(from), even_factor_bytes,
                              b.full(at.stage()));
                } else {
                    const uint2 v = __ldg(reinterpret_cast<const uint2 *>(from));
                    store_shared_8(scales(at.stage()) + even_factor_bytes, __uint_as_float(v.x), __uint_as_float(v.y));
                    mbar_arrive(b.full(at.stage()));
                }
            }
        }
        __syncwarp();
        pipe.n += 2 * q.mx.h_blocks;
    }
};
#else
using scale_consumer = block_consumer;

struct turned_gather : block_gather {
    const mok_cuda_mx_backward_args &q;

    /* Stages of a gate/up task whose tile begins at `column`, with rows of x. */
    __device__ __forceinline__ void fill(const task &t, uint32_t column)
    {
        note_columns<true>(t, column);
        bring<true>(q.common.k_blocks, q.common.hidden, scales_of_row<true>(), q.common.hidden);
    }

    /* The first column of a task that multiplies a turned weight. */
    __device__ __forceinline__ uint32_t hidden_at(const task &t) const
    {
        return b.column(t, q.hidden_tiles) * MOK_TILE_N;
    }
    __device__ __forceinline__ uint32_t input_at(const task &t) const
    {
        return b.column(t, q.common.down_tiles) * MOK_TILE_N;
    }

    /* Where the scales of this thread's four columns begin; the tile begins at `column`. */
    template <turned_weight W> __device__ void note_turned(const task &t, uint32_t column, uint32_t count) const
    {
        const uint32_t rows = W == TURNED_DOWN ? q.mx.inter : q.common.hidden;
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            note(b.smem + mx_column_offset + 8 * (thread + 64 * i),
                 static_cast<const uint8_t *>(turned_scales<W>(q)) +
                     (static_cast<uint64_t>(t.expert) * rows + min(column + 64 * i + thread, rows - 1)) * count);
    }

    /* Stages of such a task, whose tile begins at the column `at`. Rows of d_out are gathered too; the loader brings others. */
    __device__ __forceinline__ void fill_hidden(const task &t, uint32_t at)
    {
        const uint32_t count = scales_of_row<true>();
        note_turned<TURNED_DOWN>(t, at, count);
        bring<true>(q.common.k_blocks, q.common.hidden, count, q.common.hidden);
    }
    __device__ __forceinline__ void fill_input(const task &t, uint32_t at)
    {
        fill_input<TURNED_GATE>(t, at);
        fill_input<TURNED_UP>(t, at);
    }
    template <turned_weight W> __device__ __forceinline__ void fill_input(const task &t, uint32_t at)
    {
        const uint32_t count = scales_of_row<false>();
        const uint8_t *rows = W == TURNED_GATE ? q.d_a_scale : q.d_b_scale;
        const uint64_t first = static_cast<uint64_t>(t.ring64) * 64;
        note_rows(t, [&](uint32_t r) { return rows + (first + r) * q.mx.h_scale_bytes; });
        note_turned<W>(t, at, count);
        bring<false>(q.mx.h_blocks, 0, count, q.common.hidden);
    }
};
#endif

struct mx_backward_gather : turned_gather {
    __device__ __forceinline__ void gate_up(const task &t)
    {
        const uint8_t *ring = static_cast<const uint8_t *>(q.common.x_ring[t.macrobatch > 0]);
        note_rows(t, [&](uint32_t r) { return place(t, q.common.row_src, ring, r); });
        fill(t, b.column(t, q.mx.tiles) * (MOK_TILE_N / 2));
    }

    __device__ const uint8_t *place(const task &t, const uint64_t *table, const uint8_t *ring, uint32_t r) const
    {
        const uint64_t at = __ldg(table + static_cast<uint64_t>(t.row64) * 64 + r);
        return at & 1u ? ring + (static_cast<uint64_t>(t.ring64) * 64 + r) * q.mx.x_row_bytes
                       : reinterpret_cast<const uint8_t *>(at);
    }

    __device__ __forceinline__ void d_hidden(const task &t)
    {
        note_rows(t, [&](uint32_t r) { return place(t, q.row_g, static_cast<const uint8_t *>(q.g_ring), r); });
        fill_hidden(t, hidden_at(t));
        gather_follow(b, pipe, mx_gate_stages, lane);
    }

    /* The loader brings d_a and d_b; here come their scales. */
    __device__ __forceinline__ void d_input(uint4 v)
    {
        const task before = decode(v);
        if (b.rows(before) > 0)
            wait_counter(q.common, q.common.hidden_done + before.row64 + b.row_first(before) / 64,
                         q.hidden_tiles * MOK_CONSUMER_WARPS, MOK_WAIT_GRADIENTS, v);
        forget(v);
        const task t = decode(v);
        fill_input(t, input_at(t));
    }
};

__device__ void gather(const mok_cuda_mx_backward_args &p, const block_view &b, uint32_t thread, uint32_t lane)
{
    mx_backward_gather g = { { { { p.mx, b, thread, lane, {} } }, p } };
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        forget(g.lane);
        forget(g.thread); /* what follows from it is worked out anew for each task, rather than kept */
        if (t.type == MOK_TASK_GATE_UP) {
            gather_wait(p.common, b, t, v);
            g.gate_up(t);
        } else if (t.type == MOK_TASK_D_HIDDEN) {
            gather_wait(p.common, b, t, v);
            g.d_hidden(t);
        } else if (t.type == MOK_TASK_D_INPUT) {
            g.d_input(v);
        }
    }
}

} // namespace
} // namespace mok
#endif
