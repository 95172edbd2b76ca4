/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routing on the device: PREPARE's check and copy of this rank's ids, and the schedule of an operation: for every row
 * of the local experts where it comes from and goes to, in canonical order (source rank, token, k), and the list of
 * tasks. Linear in the slots of all ranks; no atomic decides an order.
 *
 * One cluster makes the schedule: each block counts its share of the slots, reads its neighbours' counts, and writes
 * its rows; the first block meanwhile cuts experts into segments and orders their tasks, which all blocks then write.
 */
#include <cuda_runtime.h>

#include "launch.cuh"
#include "layout.h"
#include "ptx.cuh"
#include "schedule_order.cuh"

namespace
{

/* ---- PREPARE ---- */

/* The context is the client's memory: its header is copied once, and the copy is what is checked and told. */
__device__ void check_header(const mok_cuda_prepare_args &a)
{
    const mok_context_header &want = a.want;
    mok_context_header got = {};
    got.magic = __ldcv(&a.header->magic);
    got.layer_hash = __ldcv(&a.header->layer_hash);
    got.mode = __ldcv(&a.header->mode);
    got.tokens = __ldcv(&a.header->tokens);
    got.ring_rows_kept = __ldcv(&a.header->ring_rows_kept);
    a.report->header = got;
    const bool well = got.magic == want.magic && got.layer_hash == want.layer_hash && got.mode == want.mode &&
                      got.tokens == want.tokens && got.ring_rows_kept <= want.ring_rows_kept;
    if (!well && a.bad_id != nullptr)
        atomicMax(a.bad_id, (uint32_t)MOK_STOP_BAD);
}

__global__ void prepare_kernel(const __grid_constant__ mok_cuda_prepare_args a)
{
    mok::let_next_kernel_start();
    mok::wait_for_previous_kernel();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (a.header != nullptr)
            check_header(a);
        if (a.withdraw != nullptr && __ldcv(a.withdraw))
            atomicMax(a.bad_id, (uint32_t)MOK_STOP_WITHDRAWN);
    }
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < a.slots;
         i += (uint64_t)gridDim.x * blockDim.x) {
        int32_t id = a.ids[i];
        a.sym_ids[i] = id;
        a.sym_weight[i] = a.weight[i];
        if (id < -1 || id >= (int32_t)a.experts) {
            /* Among this kernel's threads; the CPU looks when it is over, and atomics of the whole system cannot be had on
             * every host's memory. */
            atomicMin(reinterpret_cast<unsigned long long *>(&a.report->bad_slot_flat), (unsigned long long)i);
            if (a.bad_id != nullptr)
                atomicMax(a.bad_id, (uint32_t)MOK_STOP_BAD);
        }
    }
}

/* ---- the context, but for the ring ---- */

__global__ void save_kernel(const __grid_constant__ mok_cuda_save_args a)
{
    mok::let_next_kernel_start();
    mok::wait_for_previous_kernel();
    if (__ldcg(a.bad_id))
        return;
    for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < a.slots;
         i += (uint64_t)gridDim.x * blockDim.x) {
        a.to_ids[i] = a.ids[i];
        a.to_weight[i] = a.weight[i];
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        mok_context_header header = a.header;
        header.ring_rows_kept = min((unsigned long long)header.ring_rows_kept, (unsigned long long)a.head->padded_rows);
        *a.to = header;
    }
}

/* ---- counting ---- */

struct slot_walk {
    uint32_t rank;

    /* The rank that holds slot f; f only grows from call to call. */
    __device__ uint32_t find(const mok_cuda_schedule_args &a, uint64_t f)
    {
        while (f >= a.slot_first[rank + 1])
            rank++;
        return rank;
    }
};

/* Local expert of slot f, or -1. */
__device__ __forceinline__ int32_t local_expert(const mok_cuda_schedule_args &a, uint32_t rank, uint64_t f)
{
    int32_t e = __ldcg(a.ids[rank] + (f - a.slot_first[rank])) - (int32_t)a.first_expert;
    return e >= 0 && e < (int32_t)a.local_experts ? e : -1;
}

/* Where experts and slots of a token are few, each warp has a share of its block's tokens and needs no other warp. */
__device__ __forceinline__ bool by_warps(const mok_cuda_schedule_args &a)
{
    return a.local_experts <= few_experts && a.topk <= 32;
}

/* Slots [begin, end) of a warp, `step` at a time, which are whole tokens. */
struct warp_share {
    uint64_t begin, end;
    uint32_t step;

    __device__ warp_share(const mok_cuda_schedule_args &a, uint64_t block_begin, uint64_t block_end)
        : step(32 / a.topk * a.topk)
    {
        constexpr uint32_t warps = threads / 32;
        const uint64_t tokens = (block_end - block_begin) / a.topk, each = (tokens + warps - 1) / warps * a.topk;
        begin = min(block_begin + threadIdx.x / 32 * each, block_end);
        end = min(begin + each, block_end);
    }
    __device__ bool has(uint64_t f, uint32_t lane) const
    {
        return lane < step && f < end;
    }
};

/* Looks the experts of the next `held_steps` steps up, all at once: they may be a trip to another GPU away. */
__device__ void hold_slots(const mok_cuda_schedule_args &a, scan_shared &s, const warp_share &share, slot_walk walk,
                           uint64_t f0)
{
    const uint32_t lane = threadIdx.x % 32;
    int32_t e[held_steps];
#pragma unroll
    for (uint32_t i = 0; i < held_steps; i++) {
        const uint64_t f = f0 + i * share.step + lane;
        e[i] = share.has(f, lane) ? local_expert(a, walk.find(a, f), f) : -1;
    }
#pragma unroll
    for (uint32_t i = 0; i < held_steps; i++)
        s.held[i][threadIdx.x] = (int16_t)e[i];
}

/*
 * All lanes call visit(slot, its rank, its local expert or -1) for the warp's slots in order, step by step. `again`: it
 * has been done before.
 */
template <class Visit>
__device__ __forceinline__ void each_slot(const mok_cuda_schedule_args &a, scan_shared &s, const warp_share &share,
                                          bool again, Visit visit)
{
    const uint32_t lane = threadIdx.x % 32;
    const bool all_held = share.end - share.begin <= held_steps * share.step;
    slot_walk walk = { 0 };
    for (uint64_t f0 = share.begin; f0 < share.end; f0 += held_steps * share.step) {
        if (!again || !all_held)
            hold_slots(a, s, share, walk, f0);
        for (uint32_t i = 0; i < held_steps && f0 + i * share.step < share.end; i++) {
            const uint64_t f = f0 + i * share.step + lane;
            visit(f, share.has(f, lane) ? walk.find(a, f) : 0, (int32_t)s.held[i][threadIdx.x]);
        }
    }
}

/* Adds one for each lane with an expert, in one addition for all lanes that have the same. */
__device__ __forceinline__ void count_slot(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t *count,
                                           uint32_t rank, int32_t e)
{
    const uint32_t whose = rank < a.rank ? 0 : rank == a.rank ? 1 : 2;
    const uint32_t peers = __match_any_sync(~0u, e < 0 ? -1 : e * 4 + (int32_t)whose);
    if (e < 0 || (peers & ((1u << threadIdx.x % 32) - 1)) != 0)
        return;
    atomicAdd(&count[e], (uint32_t)__popc(peers));
    if (own_first(a) && whose < 2)
        atomicAdd(&s.count_own[whose][e], (uint32_t)__popc(peers));
}

/* From each warp's counts to where its rows begin among the block's, and the block's counts. */
__device__ void scan_warps(const mok_cuda_schedule_args &a, scan_shared &s)
{
    const uint32_t lane = threadIdx.x % 32; /* a warp */
    for (uint32_t e = threadIdx.x / 32; e < a.local_experts; e += threads / 32) {
        const uint32_t v = s.of_warp[lane][e];
        uint32_t sum = v;
        for (uint32_t d = 1; d < 32; d *= 2) {
            const uint32_t up = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? up : 0;
        }
        s.of_warp[lane][e] = sum - v;
        if (lane == 31)
            s.count[e] = sum;
    }
}

/* Counts this block's slots [begin, end) of each local expert. */
__device__ void count_slots(const mok_cuda_schedule_args &a, scan_shared &s, uint64_t begin, uint64_t end)
{
    for (uint32_t e = threadIdx.x; e < a.local_experts; e += threads)
        s.count[e] = 0;
    if (own_first(a))
        for (uint32_t e = threadIdx.x; e < a.local_experts; e += threads)
            s.count_own[0][e] = s.count_own[1][e] = 0;
    if (by_warps(a))
        for (uint32_t e = threadIdx.x % 32; e < a.local_experts; e += 32)
            s.of_warp[threadIdx.x / 32][e] = 0;
    __syncthreads();
    if (by_warps(a)) {
        each_slot(a, s, warp_share(a, begin, end), false, [&](uint64_t, uint32_t rank, int32_t e) {
            count_slot(a, s, s.of_warp[threadIdx.x / 32], rank, e);
        });
        __syncthreads();
        scan_warps(a, s);
        return;
    }
    slot_walk walk = { 0 };
    for (uint64_t f0 = begin; f0 < end; f0 += threads) {
        uint64_t f = f0 + threadIdx.x;
        int32_t e = f < end ? local_expert(a, walk.find(a, f), f) : -1;
        count_slot(a, s, s.count, walk.rank, e);
    }
}

/* From all blocks' counts to each expert's rows, and where this block's rows of it begin. */
__device__ void scan_counts(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t block)
{
    for (uint32_t e = threadIdx.x; e < a.local_experts; e += threads) {
        uint32_t before = 0, rows = 0;
        for (uint32_t b = 0; b < cluster_blocks; b++) {
            uint32_t n = mok::load_cluster(mok::cluster_address(mok::smem_address(&s.count[e]), b));
            before += b < block ? n : 0;
            rows += n;
        }
        s.next[e] = before;
        s.rows[e] = rows;
        for (uint32_t i = 0; i < 2 && own_first(a); i++) {
            s.own[i][e] = 0;
            for (uint32_t b = 0; b < cluster_blocks; b++)
                s.own[i][e] += mok::load_cluster(mok::cluster_address(mok::smem_address(&s.count_own[i][e]), b));
        }
        if (block == 0)
            a.report->expert_rows[e] = rows;
    }
    __syncthreads();
    if (threadIdx.x < 32)
        scan_experts(a, s.row64, [&](uint32_t e) { return padded64_of(a, s.rows[e]); });
    __syncthreads();
}

/* ---- filling ---- */

/* Task number i of a segment with `pairs` full units and perhaps a single one, `tiles` column tiles. */
__device__ void find_task(uint32_t i, uint32_t pairs, uint32_t single, uint32_t tiles, uint32_t &unit, uint32_t &column,
                          bool &is_single)
{
    uint32_t group = 2 * pairs + single, j = i / group, r = i % group;
    uint32_t columns = 2 * j + 1 == tiles ? 1 : 2;
    is_single = r >= columns * pairs;
    unit = is_single ? pairs : r % pairs;
    column = 2 * j + (is_single ? 0 : r / pairs);
}

__device__ __forceinline__ uint32_t pairs_of(uint32_t rows)
{
    const uint32_t tail = rows % MOK_UNIT_ROWS;
    return rows / MOK_UNIT_ROWS + (tail > MOK_TILE_M);
}

/* Units of a segment, two tiles each, that have rows of this rank's own tokens only. */
struct own_units {
    uint32_t first, count;
};

__device__ own_units find_own(const scan_shared &s, const mok_cuda_segment &g)
{
    const uint32_t e = g.expert, skip = (g.row64 - s.row64[e]) * 64; /* rows of the expert before this segment */
    const uint32_t begin = max(s.own[0][e], skip) - skip, last = s.own[0][e] + s.own[1][e];
    const uint32_t end = min(max(last, skip) - skip, g.rows);
    const uint32_t first = div_up(begin, MOK_UNIT_ROWS), units = end == g.rows ? pairs_of(end) : end / MOK_UNIT_ROWS;
    return { first, first < units ? units - first : 0 };
}

/* The same over a chunk, one warp: units of the segments before this one, and of all. */
struct own_of_chunk {
    uint32_t before, all;
};

__device__ own_of_chunk find_own_of_chunk(const mok_cuda_schedule_args &a, const scan_shared &s, uint32_t segment,
                                          uint32_t lane)
{
    const uint32_t chunk = a.segments[segment].chunk;
    auto walk = [&](bool back) {
        uint32_t units = 0, here = 32;
        for (uint32_t far = 0; here == 32; far += 32) {
            const uint32_t i = back ? segment - 1 - far - lane : segment + far + lane; /* past the first: beyond all */
            mok_cuda_segment g = {};
            if (i < a.head->segments)
                g = a.segments[i];
            const bool in = i < a.head->segments && g.chunk == chunk;
            units += __reduce_add_sync(~0u, in ? find_own(s, g).count : 0);
            here = __popc(__ballot_sync(~0u, in));
        }
        return units;
    };
    const uint32_t before = walk(true);
    return { before, before + walk(false) };
}

/* One warp writes a segment's tasks. */
__device__ void fill_segment(const mok_cuda_schedule_args &a, const scan_shared &s, uint32_t index, uint32_t lane)
{
    const mok_cuda_segment g = a.segments[index];
    const bool shared = g.expert >> 31;
    const uint32_t expert = g.expert & 0x7fffffffu, tail = g.rows % MOK_UNIT_ROWS;
    const uint32_t single = tail != 0 && tail <= MOK_TILE_M;
    const uint32_t units = div_up(g.rows, MOK_UNIT_ROWS), pairs = pairs_of(g.rows);
    const mok_cuda_chunk at = a.chunks[g.chunk];
    auto make = [&](mok_cuda_task_type type, uint32_t unit, uint32_t what, bool is_single) -> mok_cuda_task {
        uint32_t rows = min(MOK_UNIT_ROWS, g.rows - unit * MOK_UNIT_ROWS);
        uint32_t skip = unit * (MOK_UNIT_ROWS / 64);
        return { g.row64 + skip, g.ring64 + skip, what,
                 (rows - 1) | (uint32_t)type << MOK_TASK_TYPE_BIT | (uint32_t)is_single << MOK_TASK_SINGLE_BIT |
                     (uint32_t)shared << MOK_TASK_SHARED_BIT | g.macrobatch << MOK_TASK_MACROBATCH_BIT };
    };
    if (!shared)
        for (uint32_t i = lane; i < units * a.unit_pulls; i += 32)
            (a.apart ? a.pulls : a.tasks)[at.first_pull + g.pull + i] =
                make(MOK_TASK_PULL, i / a.unit_pulls, a.apart ? at.begin : i % a.unit_pulls, i / a.unit_pulls >= pairs);
    /* `chunk`: its first task of the type; `before`: those of segments before this one */
    auto put_tiles = [&](uint32_t chunk, uint32_t before, mok_cuda_task_type type, uint32_t tiles) {
        const uint32_t count = pairs * tiles + single * div_up(tiles, 2);
        own_units own = {};
        own_of_chunk own_all = {};
        if (own_first(a) && !shared && chunk == at.begin) { /* a macrobatch begins with what need not be pulled */
            own = find_own(s, g);
            own_all = find_own_of_chunk(a, s, index, lane);
        }
        const uint32_t own_tasks = own.count * tiles, own_first = chunk + own_all.before * tiles;
        const uint32_t first = chunk + before + (own_all.all - own_all.before) * tiles;
        for (uint32_t i = lane; i < count; i += 32) {
            uint32_t unit, column;
            bool is_single;
            if (i < own_tasks) {
                find_task(i, own.count, 0, tiles, unit, column, is_single);
                unit += own.first;
            } else {
                find_task(i - own_tasks, pairs - own.count, single, tiles, unit, column, is_single);
                unit += unit >= own.first ? own.count : 0;
            }
            a.tasks[i < own_tasks ? own_first + i : first + i - own_tasks] =
                make(type, unit, column | expert << 16, is_single);
        }
    };
    if (shared || !a.kept || g.macrobatch > 0)
        put_tiles(at.first_gate_up, g.gate_up, MOK_TASK_GATE_UP, shared ? a.shared_gate_up_tiles : a.gate_up_tiles);
    if (a.backward)
        put_tiles(at.first_d_hidden, g.d_hidden, MOK_TASK_D_HIDDEN, shared ? a.shared_hidden_tiles : a.hidden_tiles);
    put_tiles(at.first_down, g.down, a.backward ? MOK_TASK_D_INPUT : MOK_TASK_DOWN, a.down_tiles);
    if (shared)
        for (uint32_t t = lane; t < g.rows; t += 32) {
            uint64_t row = (uint64_t)g.row64 * 64 + t;
            a.row_src[row] = reinterpret_cast<uint64_t>(a.shared_x) + (uint64_t)t * a.hidden * 2;
            a.row_dst[row] = reinterpret_cast<uint64_t>(a.shared_y) + (uint64_t)t * a.hidden * 2;
            if (a.backward) {
                a.row_g[row] = reinterpret_cast<uint64_t>(a.shared_g) + (uint64_t)t * a.hidden * 2;
                a.row_weight[row] = 1.0f;
            }
        }
}

/*
 * Writes a share of the tasks of run r. Neighbours in the list are tiles of one matrix, `band` intermediate ones beside
 * each other, then the next hidden one: the blocks that run at a time read a band of d_a, d_b or h and few columns of x or
 * d_out, so that both are still in L2 when they are read again.
 */
__device__ void fill_run(const mok_cuda_schedule_args &a, uint32_t r, uint32_t thread, uint32_t step)
{
    const mok_cuda_run run = a.runs[r];
    const bool shared = run.expert >> 31;
    const uint32_t tiles = shared ? a.shared_hidden_tiles : a.hidden_tiles, count = wgrads_of(a, shared);
    uint32_t first = shared ? a.head->first_shared_wgrad : a.head->first_empty_wgrad + run.index * count;
    if (!shared && run.rows > 0)
        first = a.macrobatches[run.macrobatch].first_wgrad + run.index * count;
    for (uint32_t i = thread; i < count; i += step) {
        const uint32_t matrix = i / (a.down_tiles * tiles), tile = i % (a.down_tiles * tiles);
        const uint32_t band = tile / (wgrad_band * a.down_tiles) * wgrad_band, in_band = tile - band * a.down_tiles;
        const uint32_t width = min(wgrad_band, tiles - band);
        a.tasks[first + i] = { r, in_band / width, band + in_band % width,
                               matrix | (uint32_t)MOK_TASK_WGRAD << MOK_TASK_TYPE_BIT |
                                   (uint32_t)shared << MOK_TASK_SHARED_BIT |
                                   run.macrobatch << MOK_TASK_MACROBATCH_BIT };
    }
}

/*
 * For each thread with an expert (e >= 0) the number of its row among this block's, or warp's, rows of that expert: rows
 * of earlier rounds, then of earlier warps, then of earlier lanes (`before`, of `peers`, the lanes with the same expert).
 */
__device__ __forceinline__ uint32_t place_of_warp(uint32_t *next, int32_t e, uint32_t peers, uint32_t before)
{
    const uint32_t first = e >= 0 ? next[e] : 0;
    __syncwarp();
    if (e >= 0 && before == 0)
        next[e] = first + __popc(peers);
    __syncwarp();
    return first + before;
}

__device__ uint32_t place_in_turns(scan_shared &s, int32_t e, uint32_t peers, uint32_t before)
{
    uint32_t place = 0;
    for (uint32_t w = 0; w < threads / 32; w++) {
        __syncthreads();
        if (threadIdx.x / 32 == w)
            place = place_of_warp(s.next, e, peers, before);
    }
    return place;
}

/* Where a row of another rank is, and where from. */
struct far_row {
    uint64_t place; /* in the ring */
    uint32_t ring;  /* of macrobatch 0, or of the others */
    bool fetched;   /* by itself; otherwise an earlier row of the macrobatch brings its token */
};

/* `other(k)`: the row of slot k of the same token, where it is of another rank, or ~0; all lanes call it. */
template <class Other>
__device__ __forceinline__ far_row first_of_token(const mok_cuda_schedule_args &a, uint32_t row, Other other)
{
    const uint32_t ring64 = (uint32_t)(a.ring_rows / 64), macrobatch = row / 64 / ring64;
    const uint32_t begin = macrobatch * ring64 * 64;
    uint32_t first = row;
    for (uint32_t k = 0; k < a.topk; k++) {
        const uint32_t at = other(k);
        first = at >= begin ? min(first, at) : first;
    }
    if (row == ~0u)
        return {};
    return { (uint64_t)(first - begin), macrobatch > 0, first == row };
}

/* All threads; row: of another rank's slot, or ~0. A round has all slots of a token beside each other. */
__device__ far_row find_far_row(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t row)
{
    __syncthreads(); /* the round before has read */
    s.far[threadIdx.x] = row;
    __syncthreads();
    const uint32_t token = threadIdx.x / a.topk * a.topk;
    return first_of_token(a, row, [&](uint32_t k) { return s.far[min(token + k, threads - 1)]; });
}

/* The same of a warp's step. */
__device__ __forceinline__ far_row find_far_row_of_warp(const mok_cuda_schedule_args &a, uint32_t row)
{
    const uint32_t token = threadIdx.x % 32 / a.topk * a.topk;
    if (__all_sync(~0u, row == ~0u))
        return {};
    return first_of_token(a, row, [&](uint32_t k) { return __shfl_sync(~0u, row, (token + k) % 32); });
}

/*
 * Writes where the row of slot f comes from and goes to. Bit 0 of a source says: on another rank, so it is read from the
 * ring once it has been pulled. Where pulls are apart a source is where the row lies then, and another table says where
 * from it is pulled; a backward finds in the context what such a forward left there.
 */
__device__ __forceinline__ void fill_row(const mok_cuda_schedule_args &a, uint32_t rank, uint64_t f, uint64_t row,
                                         const far_row &far)
{
    const uint64_t slot = f - a.slot_first[rank], token = slot / a.topk;
    const uint64_t from = reinterpret_cast<uint64_t>(a.x[rank]) + token * a.x_row_bytes;
    uint64_t source = from | (rank != a.rank);
    if (rank != a.rank && (a.apart || (a.left_apart && far.ring == 0)))
        source = reinterpret_cast<uint64_t>(a.x_ring[far.ring]) + far.place * a.x_row_bytes;
    a.row_src[row] = source;
    if (a.apart)
        a.row_pull[row] = far.fetched ? from : 0;
    a.row_dst[row] = reinterpret_cast<uint64_t>(a.slot_rows[rank]) + slot * a.hidden * 2;
    if (a.backward) {
        const uint64_t slots = reinterpret_cast<uint64_t>(a.ids[rank]) + slot * 4; /* all of four bytes a slot */
        a.row_g[row] = (reinterpret_cast<uint64_t>(a.g[rank]) + token * a.g_row_bytes) | (rank != a.rank);
        if (a.row_x_wide != nullptr) { /* others' rows have a place once they are pulled */
            const uint64_t at = token * a.hidden * 2;
            a.row_x_wide[row] = rank == a.rank ? reinterpret_cast<uint64_t>(a.x_wide) + at : 1;
            a.row_g_wide[row] = rank == a.rank ? reinterpret_cast<uint64_t>(a.g_wide) + at : 1;
        }
        a.row_weight[row] = __ldcg(reinterpret_cast<const float *>(slots + a.weight_from_ids));
        a.row_weight_dst[row] = slots + a.weight_slots_from_ids;
    }
}

/* The rows of this block's slots. */
__device__ void fill_rows(const mok_cuda_schedule_args &a, scan_shared &s, uint64_t begin, uint64_t end)
{
    const uint32_t lower = (1u << threadIdx.x % 32) - 1;
    const bool once = a.apart || a.left_apart; /* a token's row comes once */
    auto row_at = [&](int32_t e, uint32_t place) { return e < 0 ? 0 : (uint64_t)s.row64[e] * 64 + place; };
    if (by_warps(a)) {
        each_slot(a, s, warp_share(a, begin, end), true, [&](uint64_t f, uint32_t rank, int32_t e) {
            const uint32_t peers = __match_any_sync(~0u, e);
            const uint32_t place = place_of_warp(s.of_warp[threadIdx.x / 32], e, peers, __popc(peers & lower));
            const uint64_t row = row_at(e, e < 0 ? 0 : s.next[e] + place);
            far_row far = {};
            if (once)
                far = find_far_row_of_warp(a, e >= 0 && rank != a.rank ? (uint32_t)row : ~0u);
            if (e >= 0)
                fill_row(a, rank, f, row, far);
        });
        return;
    }
    const uint32_t round = once ? threads / a.topk * a.topk : threads;
    slot_walk walk = { 0 };
    for (uint64_t f0 = begin; f0 < end; f0 += round) {
        uint64_t f = f0 + threadIdx.x;
        uint32_t rank = 0;
        int32_t e = -1;
        if (f < end && threadIdx.x < round) {
            rank = walk.find(a, f);
            e = local_expert(a, rank, f);
        }
        const uint32_t peers = __match_any_sync(~0u, e);
        const uint64_t row = row_at(e, place_in_turns(s, e, peers, __popc(peers & lower)));
        far_row far = {};
        if (once)
            far = find_far_row(a, s, e >= 0 && rank != a.rank ? (uint32_t)row : ~0u);
        if (e >= 0)
            fill_row(a, rank, f, row, far);
    }
}

__global__ void __cluster_dims__(cluster_blocks, 1, 1) __launch_bounds__(threads, 1)
    schedule_kernel(const __grid_constant__ mok_cuda_schedule_args a)
{
    scan_shared &s = *reinterpret_cast<scan_shared *>(mok::dynamic_shared());
    const uint32_t block = mok::cluster_rank();
    /* the first block orders the tasks meanwhile */
    const uint64_t share = ((a.slots / a.topk + cluster_blocks - 2) / (cluster_blocks - 1)) * a.topk; /* whole tokens */
    const uint64_t begin = block ? min(share * (block - 1), a.slots) : 0, end = block ? min(begin + share, a.slots) : 0;

    mok::wait_for_previous_kernel();
    mok::let_next_kernel_start(); /* only now: x is quantised beside this one, once all before it is over */
    /* the word is constant until the operation's end, so that all threads of the cluster agree */
    if (__ldcg(a.bad_id)) {
        if (block == 0 && threadIdx.x == 0)
            a.head->tasks = a.head->pulls = a.head->macrobatches = 0;
        if (block == 0 && a.spans != nullptr)
            for (uint32_t i = threadIdx.x; i < 2 * a.max_macrobatches; i += threads)
                put_span(a, i, 0, 0);
        return;
    }
    if (block == 0 && threadIdx.x == 0)
        a.report->schedule_from_ns = mok::timer_ns();
    count_slots(a, s, begin, end);
    for (uint64_t i = block * threads + threadIdx.x; i < a.counters; i += cluster_blocks * threads) {
        a.hidden_done[i] = 0;
        a.pull_done[i] = 0;
        if (a.backward)
            a.gates_done[i] = 0;
    }
    mok::cluster_sync();
    scan_counts(a, s, block);
    if (block == 0 && (a.backward || !order_at_once(a, s)) && threadIdx.x == 0) {
        uint32_t empty_runs = 0, chunks = cut_segments(a, s, empty_runs);
        if (a.backward)
            order_backward(a, s, chunks, empty_runs);
        else
            order_tasks(a, s, chunks);
    }
    fill_rows(a, s, begin, end);
    mok::cluster_sync(); /* the segments and their chunks are there; no block is gone while another reads its counts */
    for (uint32_t g = block * (threads / 32) + threadIdx.x / 32; g < a.head->segments;
         g += cluster_blocks * (threads / 32))
        fill_segment(a, s, g, threadIdx.x % 32);
    if (a.backward) { /* a run to one warp, or to several where runs are few */
        constexpr uint32_t warps = cluster_blocks * (threads / 32);
        const uint32_t runs = a.head->runs, ways = max(warps / max(runs, 1u), 1u), lane = threadIdx.x % 32;
        for (uint32_t i = block * (threads / 32) + threadIdx.x / 32; i < runs * ways; i += warps)
            fill_run(a, i / ways, i % ways * 32 + lane, ways * 32);
    }
}

} // namespace

static dim3 blocks_for(uint64_t items)
{
    uint64_t blocks = (items + 255) / 256;
    return dim3(blocks < 1 ? 1 : blocks < 1024 ? blocks : 1024);
}

extern "C" int mok_cuda_launch_prepare(const mok_cuda_prepare_args *args, void *stream)
{
    return mok::launch(true, prepare_kernel, blocks_for(args->slots), 256, 0, stream, *args);
}

extern "C" int mok_cuda_launch_save(const mok_cuda_save_args *args, void *stream)
{
    return mok::launch(true, save_kernel, blocks_for(args->slots), 256, 0, stream, *args);
}

extern "C" int mok_cuda_launch_schedule(const mok_cuda_schedule_args *args, void *stream)
{
    return mok::launch(true, schedule_kernel, dim3(cluster_blocks), threads, sizeof(scan_shared), stream, *args);
}

extern "C" int mok_cuda_schedule_setup(void)
{
    return cudaFuncSetAttribute(schedule_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(scan_shared));
}
