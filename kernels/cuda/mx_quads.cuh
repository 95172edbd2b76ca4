/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward's way with scales: four k-blocks' at once, so that the gather warps have little to do beside rows, and
 * consumers that begin products before they ask for anything else. What does not differ is mx.cuh's.
 */
#ifndef MOK_CUDA_MX_QUADS_CUH
#define MOK_CUDA_MX_QUADS_CUH

#include "mx.cuh"

namespace mok
{
namespace
{

/*
 * Scales of four k-blocks (a quad) lie together, in one of two sets by turns. Of a set: for each row 16 bytes, as they are
 * fetched, which become four floats; then 16 bytes a column. Of 32 columns' 512 bytes the first 256 become 64 for each k-block:
 * BF16, of columns 2 q and 2 q + 1 beyond each eighth one at 16 q, as a consumer's lane q wants them. A quad that all columns of a half have one scale for says so behind staged rows, see mx_same_place.
 */
constexpr uint32_t mx_quad = 4;
constexpr uint32_t mx_set_bytes = mx_scale_columns + MOK_TILE_N * mx_slot;
static_assert(mx_scale_offset + 2 * mx_set_bytes <= mx_table_offset, "sets do not fit where stages' scales were");

/* The scale that all columns of the first half have in gather warp w's eyes, or 0; behind it the second half's. */
__device__ __forceinline__ uint32_t mx_same_place(uint32_t set, uint32_t w, uint32_t k)
{
    return stage_offset + (4 * set + 2 * w + k / 2 % 2) * mx_row_bytes + 128 + k % 2 * 8;
}

struct mx_quad_gather : mx_gather {
    uint32_t quads = 0;     /* begun so far */
    uint32_t last_quad = 0; /* the stage's number in which the last one begins */

    __device__ uint32_t scales(uint32_t set) const
    {
        return b.smem + mx_scale_offset + set * mx_set_bytes;
    }
    /* The first of the four codes in a word: all are equal. */
    __device__ static float scale(uint32_t word)
    {
        return mok_e8m0_to_f32(static_cast<uint8_t>(word));
    }

    /* Begins to fetch this thread's two rows' and four columns' scales of the quad that begins with k-block k. */
    template <bool X> __device__ __forceinline__ void fetch(uint32_t set, uint32_t k) const
    {
        const uint32_t to = scales(set), count = scales_of_row<X>();
        const uint64_t bases = X ? reinterpret_cast<uint64_t>(p.gate_scale) | reinterpret_cast<uint64_t>(p.up_scale) :
                                   reinterpret_cast<uint64_t>(p.down_scale);
        const bool whole = ((static_cast<uint32_t>(bases) | count) & 15u) == 0;
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t r = own_row() + 64 * i;
            cp_async_16(to + mx_slot * r, row(r) + (X ? p.common.hidden : 0) + 4 * k, 16);
        }
#pragma unroll 1
        for (uint32_t i = 0; i < 4; i++) {
            const uint8_t *at = noted(b.smem + mx_column_offset + 8 * (thread + 64 * i)) + 4 * k;
            const uint32_t slot = to + mx_scale_columns + mx_slot * (thread + 64 * i);
            if (whole) {
                cp_async_16(slot, at, 16);
                continue;
            }
#pragma unroll 1
            for (uint32_t j = 0; j < 4 * mx_quad && 4 * k + j < count; j += 4)
                if (count % 4 == 0)
                    cp_async_4(slot + j, at + j);
                else
                    store_shared_4(slot + j, __ldg(at + j));
        }
    }

    /* What this thread has fetched of a quad is there, and becomes floats. */
    __device__ __forceinline__ void finish(uint32_t set) const
    {
        const uint32_t at = scales(set);
#pragma unroll
        for (uint32_t i = 0; i < 2; i++) {
            const uint32_t slot = at + mx_slot * (own_row() + 64 * i);
            const uint4 w = load_shared_16(slot);
            store_shared_8(slot, scale(w.x), scale(w.y));
            store_shared_8(slot + 8, scale(w.z), scale(w.w));
        }
#pragma unroll 1
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t column = at + mx_scale_columns + half * (MOK_TILE_N / 2 * mx_slot) + thread / 32 * 32 * mx_slot;
            const uint4 one = load_shared_16(column + lane * mx_slot), two = load_shared_16(column + (64 + lane) * mx_slot);
            const uint32_t words[2][4] = { { one.x, one.y, one.z, one.w }, { two.x, two.y, two.z, two.w } };
            __syncwarp(); /* the floats' places are others' words' */
#pragma unroll
            for (uint32_t k = 0; k < mx_quad; k++) {
                const uint32_t first = __shfl_sync(~0u, words[0][k], 0);
                const bool same = __all_sync(~0u, words[0][k] == first && words[1][k] == first);
                const uint32_t to = column + 64 * k + lane % 8 / 2 * 16 + lane / 8 * 4 + lane % 2 * 2;
                store_shared_2(to, __float_as_uint(scale(words[0][k])) >> 16);
                store_shared_2(to + 64 * mx_slot, __float_as_uint(scale(words[1][k])) >> 16);
                if (lane == k)
                    store_shared_4(b.smem + mx_same_place(set, thread / 32, k) + 4 * half, same ? __float_as_uint(scale(first)) : 0);
            }
        }
    }

    /* A stage whose copies are the last but `Behind` of this thread's has landed. */
    template <int Behind> __device__ __forceinline__ void land(uint32_t n, uint32_t k) const
    {
        cp_async_wait<Behind>();
        if (k % mx_quad == 0)
            finish(quads % 2);
        gather_landed(b, n % MOK_STAGES, lane);
    }

    /* All stages of a task whose tile begins at `column`. */
    template <bool X> __device__ __forceinline__ void fill(const task &t, uint32_t column)
    {
        const uint32_t k_blocks = X ? p.common.k_blocks : p.h_blocks;
        note_columns<X>(t, column);
        bool owed = false; /* the stage before has not been reported */
#pragma unroll 1
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            const uint32_t stage = pipe.stage();
            if (owed && !__all_sync(~0u, mbar_test(b.empty(stage), pipe.phase() ^ 1u))) {
                land<0>(pipe.n - 1, k - 1);
                owed = false;
            }
            mbar_wait(b.empty(stage), pipe.phase() ^ 1u);
            if (k % mx_quad == 0) {
                /* the set is free once the quad before the last has been read */
                if (pipe.n - last_quad < MOK_STAGES - 1 && last_quad > 0)
                    mbar_wait(b.empty((last_quad - 1) % MOK_STAGES), (last_quad - 1) / MOK_STAGES & 1u);
                last_quad = pipe.n;
                fetch<X>(++quads % 2, k);
            }
            cp_async_commit();
            if (owed)
                land<1>(pipe.n - 1, k - 1);
            owed = true;
        }
        land<0>(pipe.n - 1, k_blocks - 1);
    }
};

struct mx_quad_consumer : mx_consumer_base {
    uint32_t position = mx_quad; /* of a k-block among mx_quad_gather's quads */

    /* sum += part times the scales of its rows and of its columns, which begin at `columns`, 32 of them every 512 bytes. */
    __device__ __forceinline__ void promote(float *sum, const float (&part)[64], float upper, float lower, uint32_t columns) const
    {
#pragma unroll
        for (uint32_t j = 0; j < 16; j += 4) {
            const uint4 v = load_shared_16(columns + j / 4 * (32 * mx_slot));
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

    /* Begins 64 rows x 128 columns of a stage. */
    __device__ __forceinline__ static void begin(float (&part)[64], uint64_t a, uint64_t columns)
    {
        wgmma_fence();
        wgmma_m64n128k32_e4m3_first(part, a, columns);
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

    /*
     * d = this group's 64 rows of A times 256 columns of B, over the stages of a task, 128 columns at a time. The other group's
     * products hide what this one does between its own, as long as that is shorter than they are: so products begin first, and
     * scales, and whether the next stage is there, are asked for behind them.
     */
    __device__ __forceinline__ void multiply_mx(float (&d)[128], uint32_t k_blocks)
    {
        const uint64_t a0 = wgmma_descriptor(b.smem + a_offset + group * 64 * 128);
        const uint64_t b0 = wgmma_descriptor(b.smem + b_offset);
        const uint32_t row = mx_slot * (warp * 16 + lane / 4), column = mx_scale_columns + 16 * (lane % 4);
        bool ready = mbar_test(b.full(pipe.stage()), pipe.phase());
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            d[i] = 0.0f;
#pragma unroll 1
        for (const uint32_t last = pipe.n + k_blocks; pipe.n != last; position++) {
            const uint32_t stage = pipe.stage(), set = position / mx_quad % 2, k = position % mx_quad;
            const uint32_t scales = b.smem + mx_scale_offset + set * mx_set_bytes;
            const uint64_t at = a0 + stage * (MOK_A_BYTES / 16), bt = b0 + stage * (MOK_B_BYTES / 16);
            if (!__all_sync(~0u, ready)) {
                deliver(); /* the stage may wait for rows whose pull waits behind a task that waits for this */
                mbar_wait(b.full(stage), pipe.phase());
            }
            float part[64];
            begin(part, at, bt);
            deliver(); /* while the tensor cores are busy; at most once a task */
            const float upper = __uint_as_float(load_shared_4(scales + row + 4 * k));
            const float lower = __uint_as_float(load_shared_4(scales + row + 4 * k + 8 * mx_slot));
            const uint2 same = load_shared_8(b.smem + mx_same_place(set, 0, k)), other = load_shared_8(b.smem + mx_same_place(set, 1, k));
            const float s0 = __uint_as_float(same.x), s1 = __uint_as_float(same.y);
            if (same.x != 0 && same.y != 0 && same.x == other.x && same.y == other.y) {
                end(part);
                promote_same(d, part, __fmul_rn(upper, s0), __fmul_rn(lower, s0));
                begin(part, at, bt + MOK_B_BYTES / 32);
                pipe.n++;
                ready = mbar_test(b.full(pipe.stage()), pipe.phase());
                end(part);
                __syncwarp(); /* all lanes have what they read of the scales: the first half's sums needed it */
                release(stage);
                promote_same(d + 64, part, __fmul_rn(upper, s1), __fmul_rn(lower, s1));
            } else {
                const uint32_t columns = scales + column + 64 * k;
                end(part);
                promote(d, part, upper, lower, columns);
                begin(part, at, bt + MOK_B_BYTES / 32);
                pipe.n++;
                ready = mbar_test(b.full(pipe.stage()), pipe.phase());
                end(part);
                promote(d + 64, part, upper, lower, columns + MOK_TILE_N / 2 * mx_slot);
                /* the arrival must not overtake the loads: the vote needs what the last one brought; no sum is this NaN */
                if (__all_sync(~0u, __float_as_uint(d[127]) != 0x7fc12345u))
                    release(stage);
            }
        }
        end_quads();
    }

    /* As consumer_base's. */
    __device__ void skip(uint32_t k_blocks)
    {
        consumer_base::skip(k_blocks);
        position += k_blocks;
        end_quads();
    }
    __device__ void end_quads()
    {
        position = (position + mx_quad - 1) / mx_quad * mx_quad;
    }

    /*
     * Quantises eight rows' 128 columns of h into this warp's staging; the four scales go to `scale` of lane's row.
     * h[2 j + e]: column 8 j + 2 (lane % 4) + e of row lane / 4 + 8 half.
     */
    __device__ __forceinline__ void quantise(const float (&h)[32], uint32_t half, uint8_t *scale) const
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
        if (to != 0 && lane % 4 == 0)
            __stcg(reinterpret_cast<uint32_t *>(to), code * 0x01010101u);
    }
};

} // namespace
} // namespace mok
#endif
