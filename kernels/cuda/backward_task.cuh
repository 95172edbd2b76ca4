/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tasks of a backward, as its loader, its gather warps and its consumers read them: a weight gradient's tile of a run,
 * and which stages carry something else than operands. Decodes only.
 */
#ifndef MOK_CUDA_BACKWARD_TASK_CUH
#define MOK_CUDA_BACKWARD_TASK_CUH

#include "pipeline.cuh"

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
    template <uint32_t Depth = MOK_TILE_K> __device__ uint32_t k_blocks() const
    {
        return (max(rows, 1u) + Depth - 1) / Depth;
    }
    template <uint32_t Depth = MOK_TILE_K> __device__ uint32_t stages() const
    {
        return k_blocks<Depth>() + (stored ? stored_stages : 0);
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

} // namespace
} // namespace mok
#endif
