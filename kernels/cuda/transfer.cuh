/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows of other ranks on their way into the ring, by bulk copies through the stages: the loader fetches them, the
 * consumers send them on, the gather warps arrive as ever. A row is there once a macrobatch for all that read it; where, the
 * schedule says. Which clusters do it, pipeline.cuh says.
 */
#ifndef MOK_CUDA_TRANSFER_CUH
#define MOK_CUDA_TRANSFER_CUH

#include "consumer.cuh"
#include "gather.cuh"
#include "loader.cuh"

namespace mok
{
namespace
{

constexpr uint32_t stage_bytes = MOK_A_BYTES + MOK_B_BYTES;
constexpr uint32_t slot_most = 16384, slot_least = 8192;
static_assert(MOK_A_BYTES % slot_most == 0 && MOK_B_BYTES % slot_most == 0, "no slot lies in two tiles");

/* How rows of so many bytes lie in the stages: in slots, a long one in several. */
struct row_slots {
    uint32_t row_bytes, bytes, count; /* count: of a stage */

    __device__ explicit row_slots(uint32_t row)
        : row_bytes(row), bytes(row > slot_least ? slot_most : slot_least), count(stage_bytes / bytes)
    {
    }
    /* Stages for `rows` of a cluster, the same in both blocks. */
    __device__ uint32_t stages(uint32_t rows) const
    {
        const uint32_t own = (rows + MOK_CLUSTER - 1) / MOK_CLUSTER, pieces = (row_bytes + bytes - 1) / bytes;
        return (own * pieces + count - 1) / count;
    }
    __device__ uint32_t at(const block_view &b, uint32_t stage, uint32_t slot) const
    {
        const uint32_t offset = slot * bytes;
        return b.smem + (offset < MOK_A_BYTES ? a_offset + stage * MOK_A_BYTES + offset :
                                                b_offset + stage * MOK_B_BYTES + offset - MOK_A_BYTES);
    }
};

/* Where the unit's row r is fetched from; 0: it is not, or there is none. */
__device__ __forceinline__ uint64_t fetched_from(const task &t, const uint64_t *from, uint32_t r)
{
    return r < t.rows ? __ldcg(from + static_cast<uint64_t>(t.row64) * 64 + r) : 0;
}

/* Rows of the unit that are fetched. */
__device__ __forceinline__ uint32_t fetched_rows(const task &t, const uint64_t *from, uint32_t lane)
{
    uint32_t rows = 0;
    for (uint32_t r = 0; r < t.rows; r += 32)
        rows += __popc(__ballot_sync(~0u, fetched_from(t, from, r + lane) != 0));
    return rows;
}

/* All lanes call piece(source, row of the unit, offset, bytes) for this block's, which are every other one. */
template <class Piece>
__device__ __forceinline__ void each_piece(const block_view &b, const task &t, const uint64_t *from, const row_slots &slots,
                                           uint32_t lane, Piece piece)
{
    uint32_t n = 0;
    for (uint32_t first = 0; first < t.rows; first += 32) {
        const uint64_t at = fetched_from(t, from, first + lane);
        for (uint32_t left = __ballot_sync(~0u, at != 0); left != 0; left &= left - 1, n++) {
            if (n % MOK_CLUSTER != b.rank)
                continue;
            const uint32_t r = __ffs(left) - 1;
            const uint64_t source = __shfl_sync(~0u, at, r);
            for (uint32_t offset = 0; offset < slots.row_bytes; offset += slots.bytes)
                piece(source, first + r, offset, min(slots.bytes, slots.row_bytes - offset));
        }
    }
}

/* ---- loader, all lanes ---- */

__device__ __forceinline__ void fetch_rows(loader_base &l, const task &t, const uint64_t *from, uint32_t row_bytes,
                                           uint32_t lane)
{
    const row_slots slots(row_bytes);
    const uint32_t stages = slots.stages(fetched_rows(t, from, lane));
    uint32_t slot = 0, left = stages;
    l.pipe.n = __shfl_sync(~0u, l.pipe.n, 0);
    auto begin = [&] {
        mbar_wait(l.b.empty(l.pipe.stage()), l.pipe.phase() ^ 1u);
        __syncwarp();
    };
    auto end = [&] {
        if (lane == 0)
            mbar_arrive(l.b.full(l.pipe.stage()));
        l.pipe.n++;
        left--;
        slot = 0;
    };
    if (lane == 0)
        l.request(1, 1);
    each_piece(l.b, t, from, slots, lane, [&](uint64_t source, uint32_t, uint32_t offset, uint32_t bytes) {
        if (slot == 0)
            begin();
        if (lane == 0) {
            const uint32_t full = l.b.full(l.pipe.stage());
            mbar_expect_bytes(full, bytes);
            bulk_load(slots.at(l.b, l.pipe.stage(), slot), reinterpret_cast<const void *>(source + offset), bytes, full);
        }
        if (++slot == slots.count)
            end();
    });
    if (slot != 0)
        end();
    while (left > 0) { /* the other block has one more */
        begin();
        end();
    }
}

/* ---- gather warps ---- */

__device__ __forceinline__ void follow_rows(const block_view &b, pipeline &pipe, const task &t, const uint64_t *from,
                                            uint32_t row_bytes, uint32_t lane)
{
    gather_follow(b, pipe, row_slots(row_bytes).stages(fetched_rows(t, from, lane)), lane);
}

/* Rows of a macrobatch, by 64, that a warp knows to have been pulled. */
struct pulled_rows {
    uint32_t first = 0, end = 0;
};

/*
 * Waits until rows [first64, end64) have been pulled; first64 is a macrobatch's first: a row's copy may be one that rows
 * before it have, too.
 */
__device__ __forceinline__ void wait_pulled(const mok_cuda_common &p, pulled_rows &known, uint32_t first64, uint32_t end64,
                                            uint32_t lane, uint4 v)
{
    if (known.first != first64)
        known = { first64, first64 };
    for (uint32_t i = known.end + lane; i < end64; i += 32)
        wait_counter(p, p.pull_done + i, MOK_CLUSTER * MOK_CONSUMER_WARPS, MOK_WAIT_ROWS_HERE, v);
    known.end = max(known.end, end64);
    __syncwarp();
}

/* For this block's rows of the unit. */
__device__ __forceinline__ void wait_pulled(const mok_cuda_common &p, pulled_rows &known, const block_view &b, const task &t,
                                            uint32_t lane, uint4 v)
{
    if (p.ring_bytes != 0 && !t.shared && b.rows(t) > 0)
        wait_pulled(p, known, t.row64 - t.ring64, t.row64 + (b.row_first(t) + b.rows(t) + 63) / 64, lane, v);
}

/*
 * The unit's rows as a K-major tile, all columns one k-block after the other. `table`: where each padded row lies; those
 * in `ring` are waited for. Rows past the unit's end repeat the last one. `first_macrobatch`: the kernel begins
 * with it. There alone a tile without pulled rows waits for none: elsewhere that its macrobatch's rows have been read must
 * mean that its pulls are over, which those of the next but one rely on.
 */
__device__ void gather_tile_where(const mok_cuda_common &p, const block_view &b, const task &t, uint4 v, const uint64_t *table,
                            const void *ring, bool first_macrobatch, pulled_rows &known, pipeline &pipe, uint32_t thread,
                            uint32_t lane)
{
    bool pulled = !first_macrobatch;
    const uint32_t chunk = thread % 8, row = thread / 8, rows = max(b.rows(t), 1u), first = b.row_first(t);
    const uint8_t *src[gather_rows];
#pragma unroll
    for (uint32_t i = 0; i < gather_rows; i++) {
        uint32_t r = min(row + i * gather_step, rows - 1) + (b.rows(t) ? first : 0);
        uint64_t at = __ldcg(table + static_cast<uint64_t>(t.row64) * 64 + r);
        pulled |= at - reinterpret_cast<uint64_t>(ring) < p.ring_bytes;
        src[i] = reinterpret_cast<const uint8_t *>(at) + chunk * 16;
    }
    if (__any_sync(~0u, pulled))
        wait_pulled(p, known, b, t, lane, v);
    gather_columns(p, b, src, pipe, thread, lane);
}

/* ---- consumers ---- */

/* Their places in `ring`, a piece a warp, in turns. */
__device__ __forceinline__ void send_rows(consumer_base &c, const task &t, const uint64_t *from, void *ring,
                                          uint32_t row_bytes)
{
    const row_slots slots(row_bytes);
    uint8_t *to = static_cast<uint8_t *>(ring) + static_cast<uint64_t>(t.ring64) * 64 * row_bytes;
    uint32_t slot = 0, left = slots.stages(fetched_rows(t, from, c.lane)), n = 0;
    auto begin = [&] {
        mbar_wait(c.b.full(c.pipe.stage()), c.pipe.phase());
        __syncwarp();
    };
    auto end = [&] {
        if (c.lane == 0)
            bulk_wait_read();
        __syncwarp();
        c.release(c.pipe.stage());
        c.pipe.n++;
        left--;
        slot = 0;
    };
    each_piece(c.b, t, from, slots, c.lane, [&](uint64_t, uint32_t row, uint32_t offset, uint32_t bytes) {
        if (slot == 0)
            begin();
        if (c.lane == 0 && n % MOK_CONSUMER_WARPS == c.warp) {
            bulk_store(to + static_cast<uint64_t>(row) * row_bytes + offset, slots.at(c.b, c.pipe.stage(), slot), bytes);
            bulk_commit();
        }
        n++;
        if (++slot == slots.count)
            end();
    });
    if (slot != 0)
        end();
    while (left > 0) {
        begin();
        end();
    }
}

/* Says that this warp's share of the unit is there. */
__device__ __forceinline__ void rows_sent(consumer_base &c, const task &t)
{
    if (c.lane == 0) {
        bulk_wait();
        fence_async();
        for (uint32_t i = 0; i < (t.rows + 63) / 64; i++)
            add_release(c.all.pull_done + t.row64 + i, 1);
    }
    __syncwarp();
}

/* Until the ring's previous rows have been read. */
__device__ __forceinline__ void wait_for_ring(consumer_base &c, const uint32_t *done, const uint32_t *warps, uint32_t what,
                                              uint4 v)
{
    wait_counter(c.all, done, __ldcg(warps), what, v);
    __syncwarp();
    fence_async();
}

/* A forward's pull. */
__device__ __forceinline__ void pull_forward(consumer_base &c, const task &t, uint4 v)
{
    if (t.macrobatch + 1 < c.macrobatches) {
        const mok_cuda_macrobatch *before = c.all.macrobatches + t.macrobatch + 1;
        wait_for_ring(c, &before->gate_up_done, &before->gate_up_warps, MOK_WAIT_RING_X, v);
    }
    send_rows(c, t, c.all.row_pull, c.all.x_ring[t.macrobatch > 0], c.all.x_row_bytes);
    rows_sent(c, t);
}

} // namespace
} // namespace mok
#endif
