/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How stored sums come into the stages ahead of a weight gradient's products, whatever these are of. Loads only.
 */
#ifndef MOK_CUDA_BACKWARD_STORED_CUH
#define MOK_CUDA_BACKWARD_STORED_CUH

#include "backward_task.cuh"
#include "loader.cuh"

namespace mok
{
namespace
{

struct stored_loader : loader_base {
    const mok_cuda_backward_args &p;

    /* Where a tile is in its gradient. */
    struct stored_tile {
        bool along;          /* its rows are rows there, otherwise its columns are */
        int32_t row, column; /* the first ones, of the tile */
    };

    /* BF16 gradients, 64 columns a stage: two boxes. */
    __device__ void stored_bf16(const wgrad_task &w, const stored_tile &t, uint32_t stages)
    {
        const CUtensorMap *map = &p.set[w.shared].gradient[w.matrix];
        const int32_t e = w.expert;
        for (uint32_t q = 0; q < stored_stages; q++, pipe.n++) {
            uint32_t full = begin(stages - q, stages, 2 * box_bytes), dst = b_at();
            int32_t column = t.column + 64 * q;
#pragma unroll
            for (uint32_t i = 0; i < 2; i++)
                if (t.along)
                    tma_load_3d(dst + i * box_bytes, map, full, column, t.row + 64 * i, e);
                else
                    tma_load_3d(dst + i * box_bytes, map, full, t.row + 64 * i, column, e);
        }
    }

    /* The stored sums, 64 columns a stage: 128 rows of 64, or 64 rows of 128. */
    __device__ void stored_sums(const wgrad_task &w, const stored_tile &t, uint32_t stages)
    {
        if (p.narrow && !(w.cuts & MOK_RUN_GOES_ON))
            return stored_bf16(w, t, stages);
        const CUtensorMap *map = (w.cuts & MOK_RUN_GOES_ON) ? &p.sums[w.matrix == MOK_WGRAD_DOWN] : &p.set[w.shared].gradient[w.matrix];
        const int32_t e = (w.cuts & MOK_RUN_GOES_ON) ? sums_plane(w, false) : w.expert;
        for (uint32_t q = 0; q < stored_stages; q++, pipe.n++) {
            uint32_t full = begin(stages - q, stages, MOK_B_BYTES), dst = b_at();
            int32_t column = t.column + 64 * q;
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                if (t.along)
                    tma_load_3d(dst + i * box_bytes, map, full, column + i / 2 * 32, t.row + i % 2 * 64, e);
                else
                    tma_load_3d(dst + i * box_bytes, map, full, t.row + i * 32, column, e);
        }
    }
};

} // namespace
} // namespace mok
#endif
