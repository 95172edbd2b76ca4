/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backward megakernel: gate and up made again where the context has them not, d_hidden, d_input, weight gradients.
 * The same grid, stages and task hand-out as forward. Operands that lie across the sum are read as MN-major tiles: no
 * pass transposes anything. Adds rows in one order only, whatever the ring, the minibatch and the number of blocks.
 */
#include <cuda_runtime.h>
#include <type_traits>

#include "backward_fetch.cuh"
#include "backward_wgrad.cuh"
#include "launch.cuh"

namespace mok
{
namespace
{

struct backward_consumer : wgrad_consumer {
    using wgrad_consumer::wgrad_consumer;

    /* Waits until the tasks of a kind in the macrobatch before have ended. */
    __device__ void wait_before(const task &t, uint32_t mok_cuda_macrobatch::*done, uint32_t mok_cuda_macrobatch::*warps,
                                uint32_t what, uint4 v)
    {
        if (t.shared || t.macrobatch == 0)
            return;
        const mok_cuda_macrobatch *before = all.macrobatches + t.macrobatch - 1;
        wait_counter(all, &(before->*done), __ldcg(&(before->*warps)), what, v);
        __syncwarp();
    }

    __device__ void raise_later(const task &t, uint32_t *counters, uint32_t tiles)
    {
        if (b.rows(t) == 0 || !b.counts(t, tiles))
            return;
        pending = counters + t.row64 + b.row_first(t) / 64;
    }

    __device__ uint32_t own_column(const task &t) const
    {
        return t.single ? t.column + b.rank : t.column;
    }

    __device__ void gate_up(float (&d)[128], const task &t, uint4 v)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        uint32_t column = own_column(t), first = column * (MOK_TILE_N / 2);
        if (column >= s.tiles)
            return;
        uint32_t bytes = min(s.inter - first, MOK_TILE_N / 2) * 2, r = my_row(t);
        uint64_t at = (static_cast<uint64_t>(t.ring64) * 64 + r) * s.inter + first;
        wait_before(t, &mok_cuda_macrobatch::d_hidden_done, &mok_cuda_macrobatch::d_hidden_warps, MOK_WAIT_RING_GATES, v);
        auto place = [&](void *base) { return r != ~0u ? static_cast<__nv_bfloat16 *>(base) + at : nullptr; };
        /* gate, then up in its place: one body, lest the compiler run out of registers */
#pragma unroll 1
        for (uint32_t up = 0; up < 2; up++, shift<64>(d)) {
            const uint32_t sign = up ? 0x80000000u : 0;
            store<false>(place(up ? s.b_rows : s.a_rows), bytes, [&](uint32_t j, uint32_t half) {
                const uint32_t i = 4 * j + 2 * half;
                return pack_bf16(mok_side(d[i], sign, all.sides), mok_side(d[i + 1], sign, all.sides));
            });
        }
    }

    /*
     * Gradients of one element: u with respect to h unweighted, w the routing weight; h as forward has it. Clamped: the
     * layer has a limit.
     */
    template <bool Clamped>
    __device__ void element(float a, float b_value, float u, float w, float &h, float &d_a, float &d_b) const
    {
        const float limit = all.sides.limit;
        const float ac = Clamped && a > limit ? limit : a, up = Clamped && b_value > limit ? limit : b_value;
        const float bc = Clamped && up < -limit ? -limit : up;
        const float e = __fadd_rn(1.0f, exp2_approximate(__fmul_rn(ac, -1.4426950408889634f)));
        const float s = __fdividef(1.0f, e), d_h = __fmul_rn(w, u);
        float silu = __fmul_rn(ac, s); /* the bits of forward's division, which multiplies by the reciprocal too */
        if (e > 0x1p126f)              /* but for these, which it scales first */
            silu = __fdividef(ac, e);
        h = __fmul_rn(silu, bc);
        d_a = __fmul_rn(__fmul_rn(d_h, bc), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
        d_b = __fmul_rn(d_h, silu);
        if (!Clamped)
            return;
        d_a = a > limit ? 0.0f : d_a;
        d_b = b_value > limit || b_value < -limit ? 0.0f : d_b;
    }

    /* One of the two rows of a warp's fragment that a thread has in d_hidden. */
    struct hidden_row {
        bool real;
        float weight, dot; /* dot: this thread's part of <u, h> */
    };

    /* Two neighbours: a and b in shared memory give way to d_a and d_b, weighted h goes beside them. */
    template <bool Clamped>
    __device__ void hidden_pair(uint32_t a_at, uint32_t b_at, float u0, float u1, hidden_row &row) const
    {
        const uint32_t a = load_shared_4(a_at), g = load_shared_4(b_at);
        float h0, h1, a0, a1, b0, b1;
        element<Clamped>(__uint_as_float(a << 16), __uint_as_float(g << 16), u0, row.weight, h0, a0, b0);
        element<Clamped>(__uint_as_float(a & 0xffff0000u), __uint_as_float(g & 0xffff0000u), u1, row.weight, h1, a1, b1);
        const uint32_t h = pack_bf16(h0, h1);
        row.dot = __fmaf_rn(u0, __uint_as_float(h << 16), row.dot);
        row.dot = __fmaf_rn(u1, __uint_as_float(h & 0xffff0000u), row.dot);
        /* rows of padding are zeros, whatever the sums hold: weight gradients add them */
        store_shared_4(a_at, row.real ? pack_bf16(a0, a1) : 0);
        store_shared_4(b_at, row.real ? pack_bf16(b0, b1) : 0);
        store_shared_4(b_at + MOK_A_BYTES, row.real ? pack_bf16(__fmul_rn(row.weight, h0), __fmul_rn(row.weight, h1)) : 0);
    }

    /* The epilogue of u = d_out down, 64 columns a stage. */
    __device__ void d_hidden(float (&d)[128], const task &t, uint4 v)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        const uint32_t column = own_column(t), first = column * MOK_TILE_N, rows = b.rows(t);
        const uint64_t ring_row = static_cast<uint64_t>(t.ring64) * 64 + b.row_first(t);
        if (column >= s.hidden_tiles) {
            skip(gate_stages);
            return;
        }
        hidden_row row[2];
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            uint32_t r = warp * 16 + lane / 4 + 8 * half;
            row[half] = { r < rows, 1.0f, 0.0f };
            if (!t.shared)
                row[half].weight =
                    r < rows ? __ldg(p.row_weight + static_cast<uint64_t>(t.row64) * 64 + b.row_first(t) + r) : 0.0f;
        }
        wait_before(t, &mok_cuda_macrobatch::wgrad_done, &mok_cuda_macrobatch::wgrad_warps, MOK_WAIT_RING_WGRADS, v);
        wait_before(t, &mok_cuda_macrobatch::down_done, &mok_cuda_macrobatch::down_warps, MOK_WAIT_RING_GRADIENTS, v);
#pragma unroll 1
        for (uint32_t q = 0; q < gate_stages; q++, pipe.n++, shift<28>(d)) {
            const uint32_t stage = pipe.stage(), at = first + 64 * q;
            mbar_wait(b.full(stage), pipe.phase());
            if (at < s.inter) {
                const uint32_t own = warp * 16 * 128; /* of both a's and b's tile */
                const uint32_t a_tile = b.smem + a_offset + stage * MOK_A_BYTES + own;
                const uint32_t b_tile = b.smem + b_offset + stage * MOK_B_BYTES + own;
#pragma unroll 1
                for (uint32_t half = 0; half < 2; half++) {
                    const uint32_t to = (lane / 4 + 8 * half) * 128 + lane % 4 * 4;
                    auto pairs = [&](auto clamped) {
#pragma unroll
                        for (uint32_t j = 0; j < 8; j++) {
                            const uint32_t at_j = to + ((j ^ (lane / 4)) * 16);
                            hidden_pair<clamped.value>(a_tile + at_j, b_tile + at_j, d[4 * j], d[4 * j + 1], row[0]);
                        }
                    };
                    if (all.clamp > 0.0f)
                        pairs(std::true_type{});
                    else
                        pairs(std::false_type{});
                    shift<2>(d);
                    const hidden_row done = row[0];
                    row[0] = row[1];
                    row[1] = done;
                }
                __syncwarp();
                const uint64_t base = ((ring_row + warp * 16) * s.inter + at) * 2, stride = s.inter * 2ull;
                const uint32_t bytes = min(s.inter - at, 64u) * 2;
                store_columns(a_tile, static_cast<uint8_t *>(s.d_a_rows) + base, stride, bytes);
                store_columns(b_tile, static_cast<uint8_t *>(s.d_b_rows) + base, stride, bytes);
                store_columns(b_tile + MOK_A_BYTES, static_cast<uint8_t *>(s.h_rows) + base, stride, bytes);
                fence_async_shared(); /* the next bytes come by another road */
            }
            __syncwarp();
            release(stage);
        }
#pragma unroll
        for (uint32_t half = 0; half < 2; half++) {
            float sum = row[half].dot;
            sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
            sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
            if (!t.shared && row[half].real && lane % 4 == 0)
                __stcg(p.partial + (ring_row + warp * 16 + lane / 4 + 8 * half) * s.hidden_tiles + column, sum);
        }
    }

    /* d_topk_weight of this warp's rows, tiles ascending, to their slots on the source rank. */
    __device__ void push_weights(const task &t)
    {
        const uint32_t tiles = p.set[0].hidden_tiles, r = my_row(t);
        if (t.shared || own_column(t) != 0 || r == ~0u)
            return;
        const float *part = p.partial + (static_cast<uint64_t>(t.ring64) * 64 + r) * tiles;
        float sum = 0.0f;
        for (uint32_t i = 0; i < tiles; i++)
            sum = __fadd_rn(sum, __ldcg(part + i));
        uint64_t to = __ldg(p.row_weight_dst + static_cast<uint64_t>(t.row64) * 64 + r);
        *reinterpret_cast<float *>(to) = sum;
    }

    /*
     * From here on the table says where this warp's remote rows lie in the ring, as gather_run has no time to find out.
     * Others of the unit's rows belong to other warps, which may still have to read where theirs come from.
     */
    __device__ void name_places(const task &t, uint64_t *table, const void *ring)
    {
        const uint32_t first = b.rank * MOK_TILE_M, rows = t.rows > first ? min(t.rows - first, MOK_TILE_M) : 0;
        const uint32_t r = warp + MOK_CONSUMER_WARPS * lane;
        __syncwarp();
        if (r >= rows)
            return;
        uint64_t *place = table + static_cast<uint64_t>(t.row64) * 64 + first + r;
        if (__ldcg(place) & 1u)
            __stcg(place, reinterpret_cast<uint64_t>(ring) +
                              (static_cast<uint64_t>(t.ring64) * 64 + first + r) * all.hidden * 2);
    }

    __device__ void pull(const task &t, uint4 v)
    {
        wait_before(t, &mok_cuda_macrobatch::wgrad_done, &mok_cuda_macrobatch::wgrad_warps, MOK_WAIT_RING_WGRADS, v);
        pull_rows(t, p.row_g, p.g_ring);
        if (remade(p, t))
            pull_rows(t, all.row_src, all.x_ring[1]);
        name_places(t, p.row_g, p.g_ring);
        name_places(t, all.row_src, all.x_ring[t.macrobatch > 0]); /* those of the context's, too */
        pulled(t);
    }

    __device__ void multiply_task(const task &t, uint4 v)
    {
        const bool remake = t.type == MOK_TASK_GATE_UP, hidden = t.type == MOK_TASK_D_HIDDEN;
        const uint32_t k_blocks = remake || hidden ? all.k_blocks : 2 * p.set[t.shared].k_blocks;
        float d[128]; /* of this task alone: its first product does not read it */
        if (b.rows(t) <= group * 64)
            return skip(k_blocks + (hidden ? gate_stages : 0));
        if (remake)
            multiply(d, k_blocks);
        else
            multiply<false, true>(d, k_blocks);
        if (remake) {
            gate_up(d, t, v);
        } else if (hidden) {
            d_hidden(d, t, v);
        } else {
            void *to = nullptr;
            if (my_row(t) != ~0u)
                to = reinterpret_cast<void *>(__ldg(all.row_dst + static_cast<uint64_t>(t.row64) * 64 + my_row(t)));
            push_weights(t);
            store_output(d, own_column(t), to);
        }
    }

    __device__ void run()
    {
        macrobatches = __ldcg(&all.head->macrobatches);
        for (uint32_t n = 0;; n++) {
            uint4 v = next_task(b, n, lane);
            task t = decode(v);
            const bool remake = t.type == MOK_TASK_GATE_UP, hidden = t.type == MOK_TASK_D_HIDDEN;
            /* the next task may wait for it: before its first product or, through tasks of two macrobatches, in others */
            if (!(remake || hidden) || macrobatches > 1)
                deliver();
            if (t.type == MOK_TASK_END)
                break;
            if (t.type == MOK_TASK_PULL) {
                pull(t, v);
            } else if (t.type == MOK_TASK_WGRAD) {
                wgrad(v);
            } else {
                multiply_task(t, v);
                if (remake) {
                    raise_later(t, p.gates_done, p.set[t.shared].tiles);
                } else if (hidden) {
                    ended(t.shared, t.macrobatch, &mok_cuda_macrobatch::d_hidden_done);
                    raise_later(t, all.hidden_done, p.set[t.shared].hidden_tiles);
                } else {
                    __syncwarp();
                    ended(t.shared, t.macrobatch, &mok_cuda_macrobatch::down_done);
                }
            }
        }
    }
};

__global__ void __cluster_dims__(MOK_CLUSTER, 1, 1) __launch_bounds__(MOK_THREADS, 1)
    backward_kernel(const __grid_constant__ mok_cuda_backward_args p)
{
    run_block<backward_consumer>(p);
}

} // namespace
} // namespace mok

extern "C" int mok_cuda_launch_backward(const mok_cuda_backward_args *args, uint32_t blocks, void *stream)
{
    return mok::launch(true, mok::backward_kernel, dim3(args->common.retiring_blocks + blocks), MOK_THREADS, mok::smem_bytes, stream,
                       *args);
}

extern "C" int mok_cuda_backward_setup(void)
{
    return cudaFuncSetAttribute(mok::backward_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, mok::smem_bytes);
}
