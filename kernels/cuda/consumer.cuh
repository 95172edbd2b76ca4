/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the consumers of every megakernel do: multiply the stages of a tile, store finished rows, pull remote ones.
 * Which tile that is, and what is made of the sums, the kernels say.
 */
#ifndef MOK_CUDA_CONSUMER_CUH
#define MOK_CUDA_CONSUMER_CUH

#include <cuda_bf16.h>

#include "../swiglu.h"
#include "pipeline.cuh"
#include "wgmma.cuh"

namespace mok
{
namespace
{

struct consumer_base {
    const mok_cuda_common &all;
    const block_view &b;
    uint32_t group, warp, lane; /* warp of the block's consumers */
    uint32_t empty_of_lane;     /* lane 0, 1: stage 0's empty barrier in that block */
    pipeline pipe;
    uint32_t macrobatches = 0;
    uint32_t *pending = nullptr; /* counter to raise once this warp's stores have landed */

    __device__ void release(uint32_t stage) const
    {
        if (lane < MOK_CLUSTER)
            mbar_arrive_cluster(empty_of_lane + 8 * stage);
    }

    /* Says that h is there: all lanes' stores are seen by whoever acquires the counter. */
    __device__ void deliver()
    {
        if (pending == nullptr)
            return;
        fence_async();
        __syncwarp();
        if (lane == 0)
            add_release(pending, 1);
        pending = nullptr;
    }

    /*
     * Before a task's first stage is waited for: where it is not there yet, what is pending goes out now. A stage may wait
     * for pulled rows, the pull for its turn behind a task that waits for what this warp has pending.
     */
    template <bool AtOnce> __device__ void deliver_unless_ready()
    {
        if (pending == nullptr)
            return;
        const uint32_t full = b.full(pipe.stage());
        if (!__all_sync(~0u, AtOnce ? mbar_test(full, pipe.phase()) : mbar_try(full, pipe.phase())))
            deliver();
    }

    /*
     * d (+)= this group's 64 rows of A times 256 columns of B, over the stages of a task. TransposedA, TransposedB: the
     * tile's rows are K, in blocks of 64 columns. Add: on top of what d holds; otherwise d starts from zero, and its first
     * product reads no register: a compiler that sees one read before it was written serialises the products.
     */
    template <bool TransposedA = false, bool TransposedB = false, bool Add = false, bool AtOnce = false>
    __device__ __forceinline__ void multiply(float (&d)[128], uint32_t k_blocks)
    {
        constexpr uint32_t a_step = TransposedA ? 128 : 2, b_step = TransposedB ? 128 : 2; /* of 16 along K */
        constexpr uint32_t block_bytes = MOK_TILE_K * 128;
        const uint32_t a_at = b.smem + a_offset + group * 64 * 128, b_at = b.smem + b_offset;
        const uint64_t a0 = TransposedA ? wgmma_descriptor_mn(a_at, block_bytes) : wgmma_descriptor(a_at);
        const uint64_t b0 = TransposedB ? wgmma_descriptor_mn(b_at, block_bytes) : wgmma_descriptor(b_at);
        auto block = [&](bool first) {
            uint32_t stage = pipe.stage();
            mbar_wait(b.full(stage), pipe.phase());
            uint64_t at = a0 + stage * (MOK_A_BYTES / 16), bt = b0 + stage * (MOK_B_BYTES / 16);
            wgmma_fence();
            if (first)
                wgmma_m64n256k16_first<TransposedA, TransposedB>(d, at, bt);
            else
                wgmma_m64n256k16<TransposedA, TransposedB>(d, at, bt, true);
#pragma unroll
            for (uint32_t i = 1; i < MOK_TILE_K / 16; i++)
                wgmma_m64n256k16<TransposedA, TransposedB>(d, at + a_step * i, bt + b_step * i, true);
            wgmma_commit();
        };
        deliver_unless_ready<AtOnce>();
        block(!Add);
        deliver(); /* while the tensor cores are busy */
        pipe.n++;
        for (uint32_t k = 1; k < k_blocks; k++, pipe.n++) {
            block(false);
            wgmma_wait<1>();
            release((pipe.n - 1) % MOK_STAGES);
        }
        wgmma_wait<0>();
        release((pipe.n - 1) % MOK_STAGES);
#pragma unroll
        for (uint32_t i = 0; i < 128; i++)
            settle(d[i]);
    }

    /* No row of this warpgroup is real: follows the stages. */
    __device__ void skip(uint32_t k_blocks)
    {
        deliver();
        for (uint32_t k = 0; k < k_blocks; k++, pipe.n++) {
            mbar_wait(b.full(pipe.stage()), pipe.phase());
            __syncwarp(); /* no lane is left behind by a round */
            release(pipe.stage());
        }
    }

    __device__ uint32_t stage() const
    {
        return b.smem + stage_offset + warp * MOK_WARP_STAGE_BYTES;
    }

    /*
     * Stores this warp's 16 rows x 128 columns; `pair(j, half)`: columns 8 j + 2 (lane % 4).. of row lane / 4 + 8 half.
     * `row`: where lane's row of the 16 begins, NULL where it does not count. `Streaming`: nothing
     * on this device reads it soon. Ordinary stores of whole lines: bulk copies
     * of so small rows keep the copy engine from the next tile's loads.
     */
    template <bool Streaming, class Pair> __device__ void store(void *row, uint32_t bytes, Pair pair)
    {
        uint32_t at = stage() + ((lane & 8u) + (lane & 7u)) * MOK_STAGE_ROW_BYTES + (lane >> 4) * 16;
        const uint32_t chunk = lane % 16 * 16;
        __syncwarp();
#pragma unroll
        for (uint32_t j = 0; j < 16; j += 2)
            stmatrix_x4(at + j * 16, pair(j, 0u), pair(j, 1u), pair(j + 1, 0u), pair(j + 1, 1u));
        __syncwarp();
#pragma unroll
        for (uint32_t i = 0; i < 16; i += 2) {
            uint32_t r = i + lane / 16;
            uint64_t to = __shfl_sync(~0u, reinterpret_cast<uint64_t>(row), r);
            uint4 v = load_shared_16(stage() + r * MOK_STAGE_ROW_BYTES + chunk);
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

    /* Row of the unit that lane < 16 stores, or ~0. */
    __device__ uint32_t my_row(const task &t) const
    {
        uint32_t r = warp * 16 + lane;
        return lane < 16 && r < b.rows(t) ? b.row_first(t) + r : ~0u;
    }

    /* From gate and up as a context keeps them, that is rounded to BF16. */
    __device__ static float swiglu(float a, float u, float limit)
    {
        a = mok_clamp_gate(a, limit);
        u = mok_clamp_up(u, limit);
        float e = exp2_approximate(__fmul_rn(a, -1.4426950408889634f));
        return __fmul_rn(__fdividef(a, __fadd_rn(1.0f, e)), u);
    }

    /* Two neighbours of gate, or of up, as they are saved. Clamped: the layer has a limit. */
    template <bool Clamped> __device__ uint32_t gate_pair(float lo, float hi) const
    {
        return Clamped ? pack_bf16_anew(mok_gate_side(lo, all.sides), mok_gate_side(hi, all.sides)) :
                         pack_bf16_anew(lo, hi);
    }
    template <bool Clamped> __device__ uint32_t up_pair(float lo, float hi) const
    {
        return Clamped ? pack_bf16_anew(mok_up_side(lo, all.sides), mok_up_side(hi, all.sides)) :
                         pack_bf16_anew(lo, hi);
    }

    /* Two neighbouring values of h from their gates and ups. */
    __device__ static uint32_t swiglu_pair(uint32_t a, uint32_t u, float limit)
    {
        return pack_bf16(swiglu(__uint_as_float(a << 16), __uint_as_float(u << 16), limit),
                         swiglu(__uint_as_float(a & 0xffff0000u), __uint_as_float(u & 0xffff0000u), limit));
    }

    /* Finished rows over the hidden columns: tile `column` of them, each to its place `to`. */
    __device__ void store_output(const float (&d)[128], uint32_t column, void *to)
    {
        const uint32_t first = column * MOK_TILE_N;
        if (column >= all.down_tiles)
            return;
#pragma unroll
        for (uint32_t q = 0; q < 2; q++) {
            uint32_t at = first + q * 128;
            if (at >= all.hidden)
                return;
            void *row = to != nullptr ? static_cast<__nv_bfloat16 *>(to) + at : nullptr;
            store<true>(row, min(all.hidden - at, 128u) * 2, [&](uint32_t j, uint32_t half) {
                const uint32_t i = 4 * (j + 16 * q) + 2 * half;
                return pack_bf16(d[i], d[i + 1]);
            });
        }
    }

    /* This warp copies a row of so many times 16 bytes, wherever it lies. */
    __device__ __forceinline__ void copy_row(const uint4 *src, uint4 *dst, const uint32_t vectors) const
    {
        for (uint32_t i = lane; i < vectors; i += 32 * 8) {
            uint4 w[8];
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                if (i + 32 * j < vectors)
                    w[j] = __ldcv(src + i + 32 * j);
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                if (i + 32 * j < vectors)
                    __stcg(dst + i + 32 * j, w[j]);
        }
    }

    /* Copies this warp's share of the unit's remote rows, which `table` names, into a ring. */
    __device__ void pull_rows(const task &t, const uint64_t *table, void *ring)
    {
        pull_rows(t, table, ring, all.hidden / 8);
    }

    /* The same for rows of so many times 16 bytes. */
    __device__ void pull_rows(const task &t, const uint64_t *table, void *ring, const uint32_t vectors)
    {
        uint32_t first = b.rank * MOK_TILE_M, rows = t.rows > first ? min(t.rows - first, MOK_TILE_M) : 0;
        for (uint32_t r = warp; r < rows; r += MOK_CONSUMER_WARPS) {
            uint64_t at = __ldcg(table + static_cast<uint64_t>(t.row64) * 64 + first + r);
            if (!(at & 1u))
                continue;
            const uint4 *src = reinterpret_cast<const uint4 *>(at & ~1ull);
            uint4 *dst = static_cast<uint4 *>(ring) + (static_cast<uint64_t>(t.ring64) * 64 + first + r) * vectors;
            copy_row(src, dst, vectors);
        }
    }

    /* Says that they are there. */
    __device__ void pulled(const task &t)
    {
        const uint32_t first = b.rank * MOK_TILE_M;
        __threadfence();
        __syncwarp();
        if (lane == 0 && t.rows > first)
            add_release(all.pull_done + t.row64 + first / 64, 1);
    }
};

} // namespace
} // namespace mok
#endif
