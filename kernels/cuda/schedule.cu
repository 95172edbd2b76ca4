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

/* Counts this block's slots [begin, end) of each local expert. */
__device__ void count_slots(const mok_cuda_schedule_args &a, scan_shared &s, uint64_t begin, uint64_t end)
{
    for (uint32_t e = threadIdx.x; e < a.local_experts; e += threads)
        s.count[e] = 0;
    if (own_first(a))
        for (uint32_t e = threadIdx.x; e < a.local_experts; e += threads)
            s.count_own[0][e] = s.count_own[1][e] = 0;
    __syncthreads();
    slot_walk walk = { 0 };
    for (uint64_t f0 = begin; f0 < end; f0 += threads) {
        uint64_t f = f0 + threadIdx.x;
        int32_t e = f < end ? local_expert(a, walk.find(a, f), f) : -1;
        const uint32_t whose = walk.rank < a.rank ? 0 : walk.rank == a.rank ? 1 : 2;
        /* one addition for all of a warp: experts are few */
        uint32_t peers = __match_any_sync(~0u, e < 0 ? -1 : e * 4 + (int32_t)whose);
        if (e < 0 || (peers & ((1u << threadIdx.x % 32) - 1)) != 0)
            continue;
        atomicAdd(&s.count[e], (uint32_t)__popc(peers));
        if (own_first(a) && whose < 2)
            atomicAdd(&s.count_own[whose][e], (uint32_t)__popc(peers));
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
        scan_experts(a, s.row64, [&](uint32_t e) { return div_up(s.rows[e], 64); });
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
 * For each thread with an expert (e >= 0) the number of its row among this block's rows of that expert: rows of earlier
 * rounds, then of earlier warps, then of earlier lanes (`peers`: the lanes of the warp with the same expert).
 */
__device__ uint32_t place_few(const mok_cuda_schedule_args &a, scan_shared &s, int32_t e, uint32_t peers,
                              uint32_t before)
{
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __syncthreads(); /* the round before has read */
    for (uint32_t i = lane; i < a.local_experts; i += 32)
        s.before[warp][i] = 0;
    __syncwarp();
    if (e >= 0 && before == 0)
        s.before[warp][e] = (uint16_t)__popc(peers);
    __syncthreads();
    for (uint32_t i = warp; i < a.local_experts; i += threads / 32) { /* lane: a warp */
        uint32_t v = s.before[lane][i], sum = v;
        for (uint32_t d = 1; d < 32; d *= 2) {
            uint32_t up = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? up : 0;
        }
        s.before[lane][i] = (uint16_t)(sum - v);
        if (lane == 31) {
            s.round_first[i] = s.next[i];
            s.next[i] += sum;
        }
    }
    __syncthreads();
    return e >= 0 ? s.round_first[e] + s.before[warp][e] + before : 0;
}

__device__ uint32_t place_many(scan_shared &s, int32_t e, uint32_t peers, uint32_t before)
{
    uint32_t first = 0;
    for (uint32_t w = 0; w < threads / 32; w++) { /* warps in turn */
        __syncthreads();
        if (threadIdx.x / 32 == w) {
            first = e >= 0 ? s.next[e] : 0;
            __syncwarp();
            if (e >= 0 && before == 0)
                s.next[e] = first + __popc(peers);
        }
    }
    return first + before;
}

/* Where a row of another rank is, and where from. */
struct far_row {
    uint64_t place; /* in the ring */
    uint32_t ring;  /* of macrobatch 0, or of the others */
    bool fetched;   /* by itself; otherwise an earlier row of the macrobatch brings its token */
};

/* All threads; row: of another rank's slot, or ~0. A round has all slots of a token beside each other. */
__device__ far_row find_far_row(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t row)
{
    __syncthreads(); /* the round before has read */
    s.far[threadIdx.x] = row;
    __syncthreads();
    if (row == ~0u)
        return {};
    const uint32_t ring64 = (uint32_t)(a.ring_rows / 64), macrobatch = row / 64 / ring64;
    const uint32_t begin = macrobatch * ring64 * 64, token = threadIdx.x / a.topk * a.topk;
    uint32_t first = row;
    for (uint32_t k = 0; k < a.topk; k++)
        first = s.far[token + k] >= begin ? min(first, s.far[token + k]) : first;
    return { (uint64_t)(first - begin), macrobatch > 0, first == row };
}

/*
 * Bit 0 of a source says: on another rank, so it is read from the ring once it has been pulled. Where pulls are apart a source
 * is where the row lies then, and another table says where from it is pulled; a backward finds in the context what such a
 * forward left there.
 */
__device__ void fill_rows(const mok_cuda_schedule_args &a, scan_shared &s, uint64_t begin, uint64_t end)
{
    const uint32_t lane = threadIdx.x % 32, round = a.apart || a.left_apart ? threads / a.topk * a.topk : threads;
    slot_walk walk = { 0 };
    for (uint64_t f0 = begin; f0 < end; f0 += round) {
        uint64_t f = f0 + threadIdx.x;
        uint32_t rank = 0;
        int32_t e = -1;
        if (f < end && threadIdx.x < round) {
            rank = walk.find(a, f);
            e = local_expert(a, rank, f);
        }
        uint32_t peers = __match_any_sync(~0u, e), before = __popc(peers & ((1u << lane) - 1));
        uint32_t place =
            a.local_experts <= few_experts ? place_few(a, s, e, peers, before) : place_many(s, e, peers, before);
        const uint64_t row = e < 0 ? 0 : (uint64_t)s.row64[e] * 64 + place;
        far_row far = {};
        if (a.apart || a.left_apart)
            far = find_far_row(a, s, e >= 0 && rank != a.rank ? (uint32_t)row : ~0u);
        if (e < 0)
            continue;
        const uint64_t slot = f - a.slot_first[rank];
        const uint64_t from = reinterpret_cast<uint64_t>(a.x[rank]) + slot / a.topk * a.x_row_bytes;
        a.row_src[row] = from | (rank != a.rank);
        if (rank != a.rank && (a.apart || (a.left_apart && far.ring == 0)))
            a.row_src[row] = reinterpret_cast<uint64_t>(a.x_ring[far.ring]) + far.place * a.x_row_bytes;
        if (a.apart)
            a.row_pull[row] = far.fetched ? from : 0;
        a.row_dst[row] = reinterpret_cast<uint64_t>(a.slot_rows[rank]) + slot * a.hidden * 2;
        if (a.backward) {
            const uint64_t slots = reinterpret_cast<uint64_t>(a.ids[rank]) + slot * 4; /* all of four bytes a slot */
            a.row_g[row] = (reinterpret_cast<uint64_t>(a.g[rank]) + slot / a.topk * a.g_row_bytes) | (rank != a.rank);
            if (a.row_x_wide != nullptr) { /* others' rows have a place once they are pulled */
                const uint64_t at = slot / a.topk * a.hidden * 2;
                a.row_x_wide[row] = rank == a.rank ? reinterpret_cast<uint64_t>(a.x_wide) + at : 1;
                a.row_g_wide[row] = rank == a.rank ? reinterpret_cast<uint64_t>(a.g_wide) + at : 1;
            }
            a.row_weight[row] = __ldcg(reinterpret_cast<const float *>(slots + a.weight_from_ids));
            a.row_weight_dst[row] = slots + a.weight_slots_from_ids;
        }
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
