/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the consumers make of a weight gradient's tile: it starts from zero or from stored sums, and goes into the
 * client's gradient, or on to the next macrobatch, FP32 or BF16. Other tasks of a backward are in backward.cu.
 */
#ifndef MOK_CUDA_BACKWARD_WGRAD_CUH
#define MOK_CUDA_BACKWARD_WGRAD_CUH

#include "backward_task.cuh"
#include "consumer.cuh"

namespace mok
{
namespace
{

struct wgrad_consumer : consumer_base {
    const mok_cuda_backward_args &p;

    __device__ wgrad_consumer(const consumer_base &base, const mok_cuda_backward_args &args) : consumer_base(base), p(args)
    {
    }

    /* Says that this warp has ended a task of its macrobatch, where somebody may wait for the ring's rows. */
    __device__ void ended(bool shared, uint32_t macrobatch, uint32_t mok_cuda_macrobatch::*done)
    {
        if (macrobatches > 1 && !shared && lane == 0)
            add_release(&(all.macrobatches[macrobatch].*done), 1);
    }

    /*
     * The next columns take the first places: a loop over parts of the sums whose body is there once, though registers
     * have no addresses.
     */
    template <uint32_t By> __device__ static void shift(float (&d)[128])
    {
#pragma unroll
        for (uint32_t i = 0; i + By < 128; i++)
            d[i] = d[i + By];
    }

    /* d[i] from what is stored, 64 columns of the tile a stage; `value(tile, row, column)` reads one. */
    template <class Value> __device__ void load_stored(float (&d)[128], Value value)
    {
#pragma unroll
        for (uint32_t q = 0; q < stored_stages; q++, pipe.n++) {
            const uint32_t stage = pipe.stage(), tile = b.smem + b_offset + stage * MOK_B_BYTES;
            mbar_wait(b.full(stage), pipe.phase());
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    d[32 * q + 4 * j + i] = value(tile, warp * 16 + lane / 4 + 8 * (i / 2), 8 * j + 2 * (lane % 4) + i % 2);
            __syncwarp();
            release(stage);
        }
    }

    /*
     * FP32. `Down`: rows of the tile are rows there, so a box is 32 columns of its 128 rows; otherwise rows of the tile are
     * columns there, and a box is 64 rows of 32 columns.
     */
    template <bool Down> __device__ void load_sums(float (&d)[128])
    {
        load_stored(d, [](uint32_t tile, uint32_t m, uint32_t n) {
            const uint32_t line = Down ? n / 32 * (2 * box_bytes) + m * 128 : m / 32 * box_bytes + n * 128;
            const uint32_t word = Down ? n % 32 : m % 32, key = Down ? m % 8 : n % 8;
            return __uint_as_float(load_shared_4(tile + line + (((word / 4) ^ key) * 16) + word % 4 * 4));
        });
    }

    /* BF16: a box is as wide as the 64 columns, or 64 rows of the tile. */
    template <bool Down> __device__ void load_bf16(float (&d)[128])
    {
        load_stored(d, [](uint32_t tile, uint32_t m, uint32_t n) {
            const uint32_t line = Down ? m * 128 : m / 64 * box_bytes + n * 128;
            const uint32_t value = Down ? n : m % 64, key = Down ? m % 8 : n % 8;
            const uint32_t two = load_shared_4(tile + line + (((value / 8) ^ key) * 16) + value % 8 / 2 * 4);
            return __uint_as_float(value % 2 ? two & 0xffff0000u : two << 16);
        });
    }

    /* Where a tile's FP32 sums go: into the gradient, or on to the next macrobatch. */
    __device__ float *sums_to(const wgrad_task &w) const
    {
        const uint64_t elements = static_cast<uint64_t>(p.set[w.shared].inter) * all.hidden;
        if (w.cuts & MOK_RUN_IS_CUT)
            return p.sums_rows + sums_plane(w, true) * elements;
        return static_cast<float *>(p.set[w.shared].gradient_rows[w.matrix]) + w.expert * elements;
    }

    /* BF16 gradients whose rows are rows of the tile. */
    __device__ void store_bf16_down(float (&d)[128], const wgrad_task &w)
    {
        const uint32_t inter = p.set[w.shared].inter, row = w.hidden(b.rank) + warp * 16 + lane;
        __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(p.set[w.shared].gradient_rows[MOK_WGRAD_DOWN]) +
                            (static_cast<uint64_t>(w.expert) * all.hidden + row) * inter;
#pragma unroll 1
        for (uint32_t q = 0; q < 2; q++, shift<64>(d)) {
            const uint32_t at = w.inter() + 128 * q;
            if (at >= inter)
                return;
            store<true>(lane < 16 && row < all.hidden ? to + at : nullptr, min(inter - at, 128u) * 2,
                        [&](uint32_t j, uint32_t half) {
                            const uint32_t i = 4 * j + 2 * half;
                            return pack_bf16(d[i], d[i + 1]);
                        });
        }
    }

    /* BF16 gradients whose rows are columns of the tile: 64 rows of them at a time, a sector each. */
    __device__ void store_bf16_across(float (&d)[128], const wgrad_task &w)
    {
        constexpr uint32_t line = 16 * sizeof(__nv_bfloat16) + 16; /* and 16 bytes, so that eight rows fall on different banks */
        static_assert(64 * line <= MOK_WARP_STAGE_BYTES, "64 lines fit the staging rows");
        const uint32_t inter = p.set[w.shared].inter, column = w.hidden(b.rank) + warp * 16 + lane % 2 * 8;
        __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(p.set[w.shared].gradient_rows[w.matrix]) +
                            static_cast<uint64_t>(w.expert) * inter * all.hidden + column;
        /* of four matrices: rows 0..7, then 8..15 of the tile, of eight columns and of the next eight */
        const uint32_t at = stage() + ((lane >> 4) * 8 + lane % 8) * line + (lane >> 3 & 1u) * 16;
#pragma unroll 1
        for (uint32_t q = 0; q < 4; q++, shift<32>(d)) {
            const uint32_t first = w.inter() + 64 * q;
            if (first >= inter)
                return;
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < 8; j += 2) {
                const uint32_t i = 4 * j;
                stmatrix_x4_transposed(at + 8 * j * line, pack_bf16(d[i], d[i + 1]), pack_bf16(d[i + 2], d[i + 3]),
                                       pack_bf16(d[i + 4], d[i + 5]), pack_bf16(d[i + 6], d[i + 7]));
            }
            __syncwarp();
#pragma unroll
            for (uint32_t i = 0; i < 64; i += 16) {
                const uint32_t r = i + lane / 2;
                uint4 v = load_shared_16(stage() + r * line + lane % 2 * 16);
                if (column < all.hidden && first + r < inter)
                    __stcs(reinterpret_cast<uint4 *>(to + static_cast<uint64_t>(first + r) * all.hidden), v);
            }
        }
        __syncwarp();
    }

    /* Sums whose rows are rows of the gradient: 64 columns at a time through this warp's staging rows. */
    __device__ void store_sums_down(float (&d)[128], const wgrad_task &w)
    {
        const uint32_t inter = p.set[w.shared].inter, row = w.hidden(b.rank) + warp * 16;
        float *to = sums_to(w) + static_cast<uint64_t>(row) * inter;
        const uint32_t chunk = lane % 16;
#pragma unroll
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t first = w.inter() + 64 * q;
            if (first >= inter)
                return;
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
#pragma unroll
                for (uint32_t half = 0; half < 2; half++)
                    store_shared_8(stage() + (lane / 4 + 8 * half) * MOK_STAGE_ROW_BYTES + (8 * j + 2 * (lane % 4)) * 4,
                                   d[32 * q + 4 * j + 2 * half], d[32 * q + 4 * j + 2 * half + 1]);
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
#pragma unroll
        for (uint32_t q = 0; q < 8; q++) {
            const uint32_t first = w.inter() + 32 * q;
            if (first >= inter)
                return;
            __syncwarp();
#pragma unroll
            for (uint32_t j = 0; j < 4; j++)
#pragma unroll
                for (uint32_t i = 0; i < 4; i++)
                    store_shared_4(stage() + (8 * j + 2 * (lane % 4) + i % 2) * line + (lane / 4 + 8 * (i / 2)) * 4,
                                   __float_as_uint(d[16 * q + 4 * j + i]));
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
                    load_bf16<true>(d);
                else if (narrow)
                    load_bf16<false>(d);
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
                store_bf16_down(d, w);
            else if (narrow)
                store_bf16_across(d, w);
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
};

} // namespace
} // namespace mok
#endif
