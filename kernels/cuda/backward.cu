/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backward megakernel: gate and up made again where the context has them not, d_hidden, d_input, weight gradients.
 * The same grid, stages and task hand-out as forward. Operands that lie across the sum are read as MN-major tiles: no
 * pass transposes anything. Adds rows in one order only, whatever the ring, the minibatch and the number of blocks.
 */
#include <cuda_runtime.h>

#include "consumer.cuh"
#include "gather.cuh"
#include "gradients.cuh"
#include "launch.cuh"
#include "loader.cuh"

namespace mok
{
namespace
{

constexpr uint32_t box_bytes = 64 * 128; /* 64 rows of 128 bytes: what every map loads at once */
/* Stages behind d_hidden's products: 64 columns of a (as A), of b (first quarter of B) each; results take their places. */
constexpr uint32_t gate_stages = MOK_TILE_N / 64;
/* Stages before a weight gradient's products, with 64 of the 256 intermediate columns of the stored sums each, as B. */
constexpr uint32_t stored_stages = MOK_TILE_N / 64;
static_assert(MOK_TILE_M * 64 * sizeof(float) == MOK_B_BYTES, "a quarter of the sums fills a stage's B");
static_assert(MOK_TILE_M * 128 == MOK_A_BYTES && 2 * MOK_A_BYTES == MOK_B_BYTES, "a; b and weighted h");

/* A task of MOK_TASK_WGRAD: 256 x 256 of one matrix of one run. */
struct wgrad_task {
    uint32_t row64, ring64, rows, expert, hidden_tile, inter_tile, matrix, macrobatch;
    bool shared, stored; /* stored: the sums start from what is stored */
    uint32_t cuts;       /* of BF16 gradients: where the sums come from, or go to, FP32 ones between two macrobatches */

    /* A run without rows has one block of zeros: its operands lie outside of everything. */
    __device__ uint32_t k_blocks() const
    {
        return (max(rows, 1u) + MOK_TILE_K - 1) / MOK_TILE_K;
    }
    __device__ uint32_t stages() const
    {
        return k_blocks() + (stored ? stored_stages : 0);
    }
    /* First hidden column of this block. */
    __device__ uint32_t hidden(uint32_t rank) const
    {
        return hidden_tile * MOK_UNIT_ROWS + rank * MOK_TILE_M;
    }
    __device__ uint32_t inter() const
    {
        return inter_tile * MOK_TILE_N;
    }
};

__device__ __forceinline__ wgrad_task decode_wgrad(const mok_cuda_backward_args &p, uint4 v)
{
    const uint4 *at = reinterpret_cast<const uint4 *>(p.runs + v.x);
    const uint4 lo = __ldcg(at), hi = __ldcg(at + 1); /* struct mok_cuda_run */
    wgrad_task w;
    w.row64 = lo.x;
    w.ring64 = lo.y;
    w.rows = lo.z;
    w.expert = lo.w & 0x7fffffffu;
    w.shared = lo.w >> 31;
    w.macrobatch = hi.x;
    w.stored = hi.z == 0;
    w.cuts = p.narrow ? hi.w : 0;
    w.hidden_tile = v.y;
    w.inter_tile = v.z;
    w.matrix = v.w & 0xffu;
    return w;
}

/* Plane of the FP32 sums, of the border behind this macrobatch or of the one before it. */
__device__ __forceinline__ uint32_t sums_plane(const wgrad_task &w, bool behind)
{
    return 3 * ((w.macrobatch + (behind ? 0 : 1)) % 2) + w.matrix;
}

/* a and b of the task's rows were made again by this kernel. */
__device__ __forceinline__ bool remade(const mok_cuda_backward_args &p, const task &t)
{
    return t.shared || t.macrobatch > 0 || !p.kept;
}

/* ---- loader: weight tiles, d_a, d_b, weighted h; stored sums ---- */

struct backward_loader : loader_base {
    const mok_cuda_backward_args &p;

    /* Waits for the next stage; the bytes that will land in it include the other block's share. */
    __device__ uint32_t begin(uint32_t left, uint32_t stages, uint32_t bytes)
    {
        request(left, stages);
        mbar_wait(b.empty(pipe.stage()), pipe.phase() ^ 1u);
        mbar_expect(b.full(pipe.stage()), bytes);
        return b.full(pipe.stage());
    }
    __device__ uint32_t a_at() const
    {
        return b.smem + a_offset + pipe.stage() * MOK_A_BYTES;
    }
    __device__ uint32_t b_at() const
    {
        return b.smem + b_offset + pipe.stage() * MOK_B_BYTES;
    }

    /* 64 rows of 256 columns; each block fetches half and gives it to both, unless it is `alone`. */
    __device__ void columns_tile(bool alone, const CUtensorMap *map, uint32_t full, int32_t x, int32_t y, int32_t z)
    {
        const uint32_t dst = b_at(), first = alone ? 0 : 2 * b.rank;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            uint32_t q = first + i;
            if (alone) {
                tma_load_3d(dst + q * box_bytes, map, full, x + 64 * q, y, z);
                tma_load_3d(dst + (q + 2) * box_bytes, map, full, x + 64 * (q + 2), y, z);
            } else {
                tma_load_3d_multicast(dst + q * box_bytes, map, full, x + 64 * q, y, z, 3);
            }
        }
    }

    /* 128 rows of 64 columns. */
    __device__ void rows_tile(const CUtensorMap *map, uint32_t dst, uint32_t full, int32_t x, int32_t y)
    {
        tma_load_3d(dst, map, full, x, y, 0);
        tma_load_3d(dst + box_bytes, map, full, x, y + 64, 0);
    }

    __device__ void gate_up(const task &t)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        gate_up_tile<64>(t, s.gate, s.up, s.tiles);
    }

    __device__ void d_hidden(const task &t, uint4 v)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        const uint32_t stages = all.k_blocks + gate_stages;
        const int32_t x = b.column(t, s.hidden_tiles) * MOK_TILE_N, row = t.ring64 * 64 + b.row_first(t);
        for (uint32_t k = 0; k < all.k_blocks; k++, pipe.n++) {
            uint32_t full = begin(stages - k, stages, MOK_B_BYTES);
            columns_tile(t.single, &s.down, full, x, k * MOK_TILE_K, t.expert);
        }
        if (remade(p, t) && b.rows(t) > 0) {
            const uint32_t *done = p.gates_done + t.row64 + b.row_first(t) / 64;
            wait_counter(all, done, s.tiles * MOK_CONSUMER_WARPS, MOK_WAIT_GATES, v);
            fence_async();
        }
        const uint32_t ring = remade(p, t);
        for (uint32_t q = 0; q < gate_stages; q++, pipe.n++) {
            uint32_t full = begin(gate_stages - q, stages, 2 * MOK_A_BYTES);
            rows_tile(&s.a[ring], a_at(), full, x + 64 * q, row);
            rows_tile(&s.b[ring], b_at(), full, x + 64 * q, row);
        }
    }

    __device__ void d_input(const task &t, uint4 v)
    {
        const mok_cuda_backward_set &s = p.set[t.shared];
        const uint32_t stages = 2 * s.k_blocks;
        const int32_t x = b.column(t, all.down_tiles) * MOK_TILE_N, row = t.ring64 * 64 + b.row_first(t);
        if (b.rows(t) > 0) {
            const uint32_t *done = all.hidden_done + t.row64 + b.row_first(t) / 64;
            wait_counter(all, done, s.hidden_tiles * MOK_CONSUMER_WARPS, MOK_WAIT_GRADIENTS, v);
            fence_async();
        }
        for (uint32_t k = 0; k < stages; k++, pipe.n++) {
            const bool up = k >= s.k_blocks;
            int32_t inner = (up ? k - s.k_blocks : k) * MOK_TILE_K;
            uint32_t full = begin(stages - k, stages, MOK_A_BYTES + MOK_B_BYTES);
            columns_tile(t.single, up ? &s.up : &s.gate, full, x, inner, t.expert);
            rows_tile(up ? &s.d_b : &s.d_a, a_at(), full, inner, row);
        }
    }

    /* The same where they are BF16: two boxes. */
    __device__ void stored_bf16(const wgrad_task &w, uint32_t stages)
    {
        const CUtensorMap *map = &p.set[w.shared].gradient[w.matrix];
        const int32_t hidden = w.hidden(b.rank), e = w.expert;
        for (uint32_t q = 0; q < stored_stages; q++, pipe.n++) {
            uint32_t full = begin(stages - q, stages, 2 * box_bytes), dst = b_at();
            int32_t inter = w.inter() + 64 * q;
#pragma unroll
            for (uint32_t i = 0; i < 2; i++)
                if (w.matrix == MOK_WGRAD_DOWN)
                    tma_load_3d(dst + i * box_bytes, map, full, inter, hidden + 64 * i, e);
                else
                    tma_load_3d(dst + i * box_bytes, map, full, hidden + 64 * i, inter, e);
        }
    }

    /* The stored sums, 64 intermediate columns a stage: of gate and up 64 rows of 128, of down 128 rows of 64. */
    __device__ void stored_sums(const wgrad_task &w, uint32_t stages)
    {
        if (p.narrow && !(w.cuts & MOK_RUN_GOES_ON))
            return stored_bf16(w, stages);
        const CUtensorMap *map = (w.cuts & MOK_RUN_GOES_ON) ? &p.sums[w.matrix == MOK_WGRAD_DOWN] : &p.set[w.shared].gradient[w.matrix];
        const int32_t hidden = w.hidden(b.rank), e = (w.cuts & MOK_RUN_GOES_ON) ? sums_plane(w, false) : w.expert;
        for (uint32_t q = 0; q < stored_stages; q++, pipe.n++) {
            uint32_t full = begin(stages - q, stages, MOK_B_BYTES), dst = b_at();
            int32_t inter = w.inter() + 64 * q;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                if (w.matrix == MOK_WGRAD_DOWN)
                    tma_load_3d(dst + i * box_bytes, map, full, inter + i / 2 * 32, hidden + i % 2 * 64, e);
                else
                    tma_load_3d(dst + i * box_bytes, map, full, hidden + i * 32, inter, e);
        }
    }

    __device__ void wgrad(const wgrad_task &w, uint4 v)
    {
        const mok_cuda_backward_set &s = p.set[w.shared];
        const CUtensorMap *map = w.matrix == MOK_WGRAD_GATE ? &s.d_a : w.matrix == MOK_WGRAD_UP ? &s.d_b : &s.h;
        const uint32_t blocks = w.k_blocks(), stages = w.stages(), want = s.hidden_tiles * MOK_CONSUMER_WARPS;
        const uint32_t *done = all.hidden_done + w.row64;
        for (uint32_t k = 0; k < blocks; k++) {
            if (k % 2 == 0 && w.rows > 0) { /* 128 rows have one counter; the first of them also says that the stored sums are there */
                wait_counter(all, done + k, want, MOK_WAIT_RUN, v);
                fence_async();
            }
            if (k == 0 && w.stored)
                stored_sums(w, stages);
            uint32_t full = begin(blocks - k, stages, MOK_B_BYTES);
            columns_tile(false, map, full, w.inter(), w.ring64 * 64 + k * MOK_TILE_K, 0);
            pipe.n++;
        }
    }
};

__device__ void load(const mok_cuda_backward_args &p, const block_view &b, uint32_t lane)
{
    backward_loader l = { { p.common, b, {} }, p };
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
            l.gate_up(t);
        else if (t.type == MOK_TASK_D_HIDDEN)
            l.d_hidden(t, v);
        else if (t.type == MOK_TASK_D_INPUT)
            l.d_input(t, v);
        else
            l.wgrad(decode_wgrad(p, v), v);
    }
}

/* ---- gather: rows of x and of d_out ---- */

/*
 * This block's 128 hidden columns of the run's rows as an M-major tile, 64 rows a k-block; rows past the run's end and
 * columns past the last are zeros, whatever lies there. A thread knows the place of one row, the warp copies two at once.
 */
__device__ void gather_run(const mok_cuda_backward_args &p, const block_view &b, const wgrad_task &w, pipeline &pipe,
                           uint32_t thread, uint32_t lane, uint4 v)
{
    const mok_cuda_common &all = p.common;
    const bool down = w.matrix == MOK_WGRAD_DOWN, pulls = all.x_ring[1] != nullptr && !w.shared;
    const uint64_t *table = (down ? p.row_g : all.row_src) + static_cast<uint64_t>(w.row64) * 64;
    const uint64_t ring = reinterpret_cast<uint64_t>(down ? p.g_ring : all.x_ring[w.macrobatch > 0]) +
                          static_cast<uint64_t>(w.ring64) * 64 * all.hidden * 2;
    const uint32_t warp_row = thread / 32 * 32, vector = lane % 16, blocks = w.k_blocks();
    const uint32_t column = w.hidden(b.rank) + vector * 8;
    const uint64_t offset = column < all.hidden ? static_cast<uint64_t>(column) * 2 : 0;
    auto place = [&](uint32_t k) {
        if (w.rows == 0)
            return reinterpret_cast<uint64_t>(table); /* not looked at */
        uint32_t r = min(k * MOK_TILE_K + warp_row + lane, w.rows - 1);
        uint64_t at = __ldg(table + r);
        return at & 1u ? ring + static_cast<uint64_t>(r) * all.hidden * 2 : at;
    };
    uint64_t next = place(0);
    for (uint32_t k = 0; k < blocks; k++, pipe.n++) {
        const uint32_t stage = pipe.stage();
        const uint64_t at = next;
        if (pulls && w.rows > 0 && k % 2 == 0)
            wait_counter(all, all.pull_done + w.row64 + k, MOK_CONSUMER_WARPS, MOK_WAIT_ROWS_HERE, v);
        next = k + 1 < blocks ? place(k + 1) : 0;
        mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
        const uint32_t dst = b.smem + a_offset + stage * MOK_A_BYTES + vector / 8 * box_bytes + warp_row * 128;
        const uint32_t left = column < all.hidden && w.rows > k * MOK_TILE_K ? w.rows - k * MOK_TILE_K : 0;
#pragma unroll 4
        for (uint32_t i = 0; i < 16; i++) {
            const uint32_t from = 2 * i + lane / 16;
            uint64_t src = __shfl_sync(~0u, at, from) + offset;
            cp_async_16(dst + from * 128 + ((vector % 8) ^ (from % 8)) * 16, reinterpret_cast<const void *>(src),
                        warp_row + from < left ? 16 : 0);
        }
        cp_async_commit();
        if (k > 0) {
            cp_async_wait<1>();
            gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
        }
    }
    cp_async_wait<0>();
    gather_landed(b, (pipe.n - 1) % MOK_STAGES, lane);
}

__device__ void gather(const mok_cuda_backward_args &p, const block_view &b, uint32_t thread, uint32_t lane)
{
    const mok_cuda_common &all = p.common;
    pipeline pipe;
    for (uint32_t n = 0;; n++) {
        uint4 v = next_task(b, n, lane);
        task t = decode(v);
        if (t.type == MOK_TASK_END)
            return;
        if (t.type == MOK_TASK_GATE_UP) {
            gather_wait(all, b, t, v);
            gather_tile(all, b, t, all.row_src, all.x_ring[t.macrobatch > 0], pipe, thread, lane);
        } else if (t.type == MOK_TASK_D_HIDDEN) {
            gather_wait(all, b, t, v);
            gather_tile(all, b, t, p.row_g, p.g_ring, pipe, thread, lane);
            gather_follow(b, pipe, gate_stages, lane);
        } else if (t.type == MOK_TASK_D_INPUT) {
            gather_follow(b, pipe, 2 * p.set[t.shared].k_blocks, lane);
        } else if (t.type == MOK_TASK_WGRAD) {
            wgrad_task w = decode_wgrad(p, v);
            gather_follow(b, pipe, w.stored ? stored_stages : 0, lane);
            gather_run(p, b, w, pipe, thread, lane, v);
        }
    }
}

/* ---- consumers ---- */

struct backward_consumer : consumer_base {
    const mok_cuda_backward_args &p;

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

    /* Says that this warp has ended a task of its macrobatch, where somebody may wait for the ring's rows. */
    __device__ void ended(bool shared, uint32_t macrobatch, uint32_t mok_cuda_macrobatch::*done)
    {
        if (macrobatches > 1 && !shared && lane == 0)
            add_release(&(all.macrobatches[macrobatch].*done), 1);
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

    /* Gradients of one element: u with respect to h unweighted, w the routing weight; h as forward has it. */
    __device__ void element(float a, float b_value, float u, float w, float &h, float &d_a, float &d_b) const
    {
        const float limit = all.sides.limit; /* infinite where there is none */
        const float ac = a > limit ? limit : a, up = b_value > limit ? limit : b_value, bc = up < -limit ? -limit : up;
        const float e = __fadd_rn(1.0f, exp2_approximate(__fmul_rn(ac, -1.4426950408889634f)));
        const float silu = __fdividef(ac, e), s = __fdividef(1.0f, e), d_h = __fmul_rn(w, u);
        h = __fmul_rn(silu, bc);
        d_a = __fmul_rn(__fmul_rn(d_h, bc), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
        d_b = __fmul_rn(d_h, silu);
        d_a = a > limit ? 0.0f : d_a;
        d_b = b_value > limit || b_value < -limit ? 0.0f : d_b;
    }

    /* One of the two rows of a warp's fragment that a thread has in d_hidden. */
    struct hidden_row {
        bool real;
        float weight, dot; /* dot: this thread's part of <u, h> */
    };

    /* Two neighbours: a and b in shared memory give way to d_a and d_b, weighted h goes beside them. */
    __device__ void hidden_pair(uint32_t a_at, uint32_t b_at, float u0, float u1, hidden_row &row) const
    {
        const uint32_t a = load_shared_4(a_at), g = load_shared_4(b_at);
        float h0, h1, a0, a1, b0, b1;
        element(__uint_as_float(a << 16), __uint_as_float(g << 16), u0, row.weight, h0, a0, b0);
        element(__uint_as_float(a & 0xffff0000u), __uint_as_float(g & 0xffff0000u), u1, row.weight, h1, a1, b1);
        const uint32_t h = pack_bf16(h0, h1);
        row.dot = __fmaf_rn(u0, __uint_as_float(h << 16), row.dot);
        row.dot = __fmaf_rn(u1, __uint_as_float(h & 0xffff0000u), row.dot);
        /* rows of padding are zeros, whatever the sums hold: weight gradients add them */
        store_shared_4(a_at, row.real ? pack_bf16(a0, a1) : 0);
        store_shared_4(b_at, row.real ? pack_bf16(b0, b1) : 0);
        store_shared_4(b_at + MOK_A_BYTES, row.real ? pack_bf16(__fmul_rn(row.weight, h0), __fmul_rn(row.weight, h1)) : 0);
    }

    /* Moves this warp's 16 rows of a swizzled 64-column tile to memory; `to`: the first row's place there. */
    __device__ void store_columns(uint32_t from, void *to, uint64_t stride, uint32_t bytes) const
    {
        const uint32_t chunk = lane % 8;
#pragma unroll
        for (uint32_t i = 0; i < 16; i += 4) {
            uint32_t r = i + lane / 8;
            uint4 v = load_shared_16(from + r * 128 + ((chunk ^ (r % 8)) * 16));
            if (chunk * 16 < bytes)
                __stcg(reinterpret_cast<uint4 *>(static_cast<uint8_t *>(to) + r * stride + chunk * 16), v);
        }
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
#pragma unroll
                    for (uint32_t j = 0; j < 8; j++) {
                        const uint32_t at_j = to + ((j ^ (lane / 4)) * 16);
                        hidden_pair(a_tile + at_j, b_tile + at_j, d[4 * j], d[4 * j + 1], row[0]);
                    }
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
     * d[i] from the stored sums. `Down`: rows of the tile are rows there, so a box is 32 columns of its 128 rows;
     * otherwise rows of the tile are columns there, and a box is 64 rows of 32 columns.
     */
    template <bool Down> __device__ void load_sums(float (&d)[128])
    {
        const uint32_t m0 = warp * 16 + lane / 4;
#pragma unroll
        for (uint32_t q = 0; q < stored_stages; q++, pipe.n++) {
            const uint32_t stage = pipe.stage(), tile = b.smem + b_offset + stage * MOK_B_BYTES;
            mbar_wait(b.full(stage), pipe.phase());
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const uint32_t m = m0 + 8 * (i / 2), n = 8 * j + 2 * (lane % 4) + i % 2;
                    const uint32_t line = Down ? n / 32 * (2 * box_bytes) + m * 128 : m / 32 * box_bytes + n * 128;
                    const uint32_t word = Down ? n % 32 : m % 32, key = Down ? m % 8 : n % 8;
                    d[32 * q + 4 * j + i] =
                        __uint_as_float(load_shared_4(tile + line + (((word / 4) ^ key) * 16) + word % 4 * 4));
                }
            __syncwarp();
            release(stage);
        }
    }

    /* A tile in BF16 gradients. */
    __device__ bf16_place place_of(const wgrad_task &w) const
    {
        const uint32_t inter = p.set[w.shared].inter;
        __nv_bfloat16 *rows = static_cast<__nv_bfloat16 *>(p.set[w.shared].gradient_rows[w.matrix]);
        return { rows + static_cast<uint64_t>(w.expert) * inter * all.hidden, inter, w.hidden(b.rank), w.inter() };
    }

    /* Where a tile's FP32 sums go: into the gradient, or on to the next macrobatch. */
    __device__ float *sums_to(const wgrad_task &w) const
    {
        const uint64_t elements = static_cast<uint64_t>(p.set[w.shared].inter) * all.hidden;
        if (w.cuts & MOK_RUN_IS_CUT)
            return p.sums_rows + sums_plane(w, true) * elements;
        return static_cast<float *>(p.set[w.shared].gradient_rows[w.matrix]) + w.expert * elements;
    }

    /* Sums whose rows are rows of the gradient: 64 columns at a time through this warp's staging rows. */
    __device__ void store_sums_down(float (&d)[128], const wgrad_task &w)
    {
        const uint32_t inter = p.set[w.shared].inter, row = w.hidden(b.rank) + warp * 16;
        float *to = sums_to(w) + static_cast<uint64_t>(row) * inter;
        const uint32_t chunk = lane % 16;
#pragma unroll 1
        for (uint32_t q = 0; q < 4; q++, shift<32>(d)) {
            const uint32_t first = w.inter() + 64 * q;
            if (first >= inter)
                return;
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
#pragma unroll
                for (uint32_t half = 0; half < 2; half++)
                    store_shared_8(stage() + (lane / 4 + 8 * half) * MOK_STAGE_ROW_BYTES + (8 * j + 2 * (lane % 4)) * 4,
                                   d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
            __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < 16; i += 2) {
                const uint32_t r = i + lane / 16, column = first + chunk * 4;
                uint4 v = load_shared_16(stage() + r * MOK_STAGE_ROW_BYTES + chunk * 16);
                if (row + r < all.hidden && column < inter)
                    __stcs(reinterpret_cast<uint4 *>(to + static_cast<uint64_t>(r) * inter + column), v);
            }
        }
        __syncwarp();
    }

    /* Sums whose rows are columns of the gradient: 32 rows of it at a time, 16 columns each. */
    __device__ void store_sums_across(float (&d)[128], const wgrad_task &w)
    {
        constexpr uint32_t line = 16 * sizeof(float) + 16; /* and 16 bytes, so that rows fall on different banks */
        static_assert(32 * line <= MOK_WARP_STAGE_BYTES, "32 lines fit the staging rows");
        const uint32_t inter = p.set[w.shared].inter, column = w.hidden(b.rank) + warp * 16 + lane % 4 * 4;
        float *to = sums_to(w) + column;
#pragma unroll 1
        for (uint32_t q = 0; q < 8; q++, shift<16>(d)) {
            const uint32_t first = w.inter() + 32 * q;
            if (first >= inter)
                return;
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < 4; j++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    store_shared_4(stage() + (8 * j + 2 * (lane % 4) + i % 2) * line + (lane / 4 + 8 * (i / 2)) * 4,
                                   __float_as_uint(d[4 * j + i]));
            __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < 32; i += 8) {
                const uint32_t r = i + lane / 4;
                uint4 v = load_shared_16(stage() + r * line + lane % 4 * 16);
                if (column < all.hidden && first + r < inter)
                    __stcs(reinterpret_cast<uint4 *>(to + static_cast<uint64_t>(first + r) * all.hidden), v);
            }
        }
        __syncwarp();
    }

    /* Weight gradients of a tile: x or d_out across d_a, d_b or weighted h. */
    __device__ void wgrad(uint4 v)
    {
        const wgrad_task w = decode_wgrad(p, v);
        const bool down = w.matrix == MOK_WGRAD_DOWN;
        if (w.hidden(b.rank) + group * 64 >= all.hidden) {
            skip(w.stages());
        } else {
            float d[128];
            if (w.stored) {
                const bool narrow = p.narrow && !(w.cuts & MOK_RUN_GOES_ON);
                if (narrow && down)
                    load_bf16<true>(*this, d);
                else if (narrow)
                    load_bf16<false>(*this, d);
                else if (down)
                    load_sums<true>(d);
                else
                    load_sums<false>(d);
                multiply<true, true, true>(d, w.k_blocks());
            } else {
                multiply<true, true>(d, w.k_blocks());
            }
            const bool narrow = p.narrow && !(w.cuts & MOK_RUN_IS_CUT);
            if (narrow && down)
                store_bf16_down(*this, d, place_of(w));
            else if (narrow)
                store_bf16_across(*this, d, place_of(w));
            else if (down)
                store_sums_down(d, w);
            else
                store_sums_across(d, w);
        }
        if (macrobatches > 1) { /* the next macrobatch may go on from these sums */
            fence_async();
            __syncwarp();
        }
        if (w.rows > 0)
            ended(w.shared, w.macrobatch, &mok_cuda_macrobatch::wgrad_done);
    }

    __device__ void pull(const task &t, uint4 v)
    {
        wait_before(t, &mok_cuda_macrobatch::wgrad_done, &mok_cuda_macrobatch::wgrad_warps, MOK_WAIT_RING_WGRADS, v);
        pull_rows(t, p.row_g, p.g_ring);
        if (remade(p, t))
            pull_rows(t, all.row_src, all.x_ring[1]);
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
