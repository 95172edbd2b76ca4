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

namespace
{

constexpr uint32_t threads = 1024;
constexpr uint32_t cluster_blocks = MOK_SCHEDULE_CLUSTER;

__device__ __forceinline__ uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

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

constexpr uint32_t few_experts = 128; /* up to here the warps of a block find their places at once, beyond in turns */
constexpr uint32_t own_experts = 512; /* beyond, a macrobatch does not begin with what need not be pulled */
constexpr uint32_t near_chunks = 512; /* kept on the chip while the order is made; the others cost trips to memory */

struct scan_shared {
    uint32_t count[MOK_MAX_EXPERTS]; /* of this block's slots; read by the other blocks */
    /* where own_first(): of those, of ranks before this one, and of this rank; of all slots the same */
    uint32_t count_own[2][own_experts], own[2][own_experts];
    uint32_t rows[MOK_MAX_EXPERTS];  /* of all slots */
    uint32_t next[MOK_MAX_EXPERTS];  /* the padded row that this block writes next, less 64 row64[] */
    uint32_t row64[MOK_MAX_EXPERTS + 1];
    uint32_t round_first[few_experts];
    uint16_t before[threads / 32][few_experts]; /* rows of the round in earlier warps */
    mok_cuda_chunk near[near_chunks];
    /* order_at_once: before each expert, and in all */
    uint32_t live[MOK_MAX_EXPERTS + 1], units[MOK_MAX_EXPERTS + 1], gate_ups[MOK_MAX_EXPERTS + 1],
        downs[MOK_MAX_EXPERTS + 1];
    uint16_t chunk[MOK_MAX_EXPERTS];
    uint16_t chunk_first[MOK_MAX_EXPERTS + 1]; /* expert */
    uint32_t chunks;
    uint32_t far[threads]; /* rows of a round's slots, as far as they are of other ranks; ~0 */
};

__device__ __forceinline__ mok_cuda_chunk &chunk_at(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t i)
{
    return i < near_chunks ? s.near[i] : a.chunks[i];
}

__device__ __forceinline__ bool own_first(const mok_cuda_schedule_args &a)
{
    return a.apart && a.local_experts <= own_experts;
}

__device__ uint32_t tasks_of(uint32_t rows, uint32_t tiles)
{
    uint32_t tail = rows % MOK_UNIT_ROWS;
    bool single = tail != 0 && tail <= MOK_TILE_M;
    uint32_t pairs = div_up(rows, MOK_UNIT_ROWS) - single;
    return pairs * tiles + single * div_up(tiles, 2);
}

/* One warp: exclusive sums of value(e) over the local experts, and their total behind the last. */
template <class Value> __device__ void scan_experts(const mok_cuda_schedule_args &a, uint32_t *to, Value value)
{
    const uint32_t lane = threadIdx.x % 32;
    uint32_t run = 0;
    for (uint32_t e0 = 0; e0 < a.local_experts; e0 += 32) {
        uint32_t e = e0 + lane, v = e < a.local_experts ? value(e) : 0, sum = v;
        for (uint32_t d = 1; d < 32; d *= 2) {
            uint32_t up = __shfl_up_sync(~0u, sum, d);
            sum += lane >= d ? up : 0;
        }
        if (e < a.local_experts)
            to[e] = run + sum - v;
        run += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0)
        to[a.local_experts] = run;
}

/* Whether a chunk of `units` is closed before `more` units of the next expert. */
__device__ __forceinline__ bool chunk_ends(uint32_t units, uint32_t more, uint32_t per_chunk)
{
    return units != 0 && (units + more > 2 * per_chunk || 4 * units >= 3 * per_chunk);
}

/* One thread: which experts make up a chunk. */
__device__ void group_experts(const mok_cuda_schedule_args &a, scan_shared &s)
{
    uint32_t chunk = 0, units = 0;
#pragma unroll 8
    for (uint32_t e = 0; e < a.local_experts; e++) {
        uint32_t more = div_up(s.rows[e], MOK_UNIT_ROWS);
        if (more != 0 && chunk_ends(units, more, a.units_per_chunk)) {
            chunk++;
            units = 0;
        }
        if (more != 0 && units == 0)
            s.chunk_first[chunk] = (uint16_t)e;
        s.chunk[e] = (uint16_t)chunk;
        units += more;
    }
    s.chunks = chunk + (units != 0);
    s.chunk_first[s.chunks] = (uint16_t)a.local_experts;
}

/*
 * Cuts experts into segments and segments into chunks; returns the number of chunks. One thread. An expert of at most
 * two chunks' units stays whole unless the ring ends in it.
 * Segments are only written here: reading them back would cost a trip to memory each.
 */
__device__ uint32_t cut_segments(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t &empty_runs)
{
    const uint32_t ring64 = (uint32_t)(a.ring_rows / 64), upc = a.units_per_chunk;
    uint32_t runs = 0, runs_here = 0; /* here: in this macrobatch */
    mok_cuda_run run = {};
    uint32_t row64 = 0, macrobatch = 0, border64 = ring64, segments = 0, chunks = 0, units_in_chunk = 0;
    uint64_t total = 0;
    mok_cuda_chunk c = {};
    for (uint32_t e = 0; e < a.local_experts; e++) {
        uint32_t left = s.rows[e], units = div_up(left, MOK_UNIT_ROWS), piece = units;
        if (units > 2 * upc)
            piece = div_up(units, (units + upc - 1) / upc);
        total += left;
        if (a.backward && left == 0 && a.overwrite)
            a.runs[runs++] = { 0, ring64, 0, e, 0, empty_runs++, 1, 0 };
        run = { 0, 0, 0, e, ~0u, 0, a.overwrite, 0 };
        while (left > 0) {
            for (; row64 >= border64; border64 += ring64) {
                macrobatch++;
                runs_here = 0;
            }
            uint32_t rows = min(min(left, piece * MOK_UNIT_ROWS), (border64 - row64) * 64);
            uint32_t n = div_up(rows, MOK_UNIT_ROWS);
            if (units_in_chunk != 0 && (c.macrobatch != macrobatch || chunk_ends(units_in_chunk, n, upc))) {
                chunk_at(a, s, chunks++) = c;
                c = {};
                units_in_chunk = 0;
            }
            c.macrobatch = macrobatch;
            a.segments[segments++] = { row64,   row64 + ring64 - border64, rows,    e,          macrobatch, chunks,
                                       c.pulls, c.gate_ups,                c.downs, c.d_hiddens };
            if (a.backward && run.macrobatch != macrobatch) { /* the one before is complete */
                if (run.rows > 0) {
                    run.cuts |= MOK_RUN_IS_CUT;
                    a.runs[runs++] = run;
                    run.cuts = MOK_RUN_GOES_ON;
                    run.fresh = 0;
                }
                run.row64 = row64;
                run.ring64 = row64 + ring64 - border64;
                run.rows = 0;
                run.macrobatch = macrobatch;
                run.index = runs_here++;
                c.runs++;
            }
            run.rows += rows;
            c.pulls += a.ep > 1 ? n : 0;
            c.gate_ups += a.kept && macrobatch == 0 ? 0 : tasks_of(rows, a.gate_up_tiles);
            c.d_hiddens += a.backward ? tasks_of(rows, a.hidden_tiles) : 0;
            c.downs += tasks_of(rows, a.down_tiles);
            units_in_chunk += n;
            left -= rows;
            row64 += div_up(rows, 64);
        }
        if (a.backward && run.rows > 0)
            a.runs[runs++] = run;
    }
    if (units_in_chunk != 0)
        chunk_at(a, s, chunks++) = c;
    if (a.shared_tokens > 0)
        a.segments[segments++] = { a.shared_row64, 0, a.shared_tokens, 1u << 31, 0, chunks, 0, 0, 0, 0 };
    if (a.backward && a.shared_hidden_tiles > 0 && (a.shared_tokens > 0 || a.overwrite))
        a.runs[runs++] = { a.shared_row64, a.shared_tokens ? 0 : a.shared_ring64, a.shared_tokens, 1u << 31, 0, 0,
                           a.overwrite,    0 };
    a.head->runs = runs;
    a.head->rows = total;
    a.head->padded_rows = (uint64_t)row64 * 64;
    a.head->segments = segments;
    a.report->rows = total;
    return chunks;
}

/* Nothing is taken yet. */
__device__ __forceinline__ void begin_lists(const mok_cuda_schedule_args &a, uint32_t pulls)
{
    a.head->pulls = pulls;
    a.head->next_task = a.head->next_pull = a.head->clusters = 0;
}

/* Where pulls are apart: gives a chunk its place behind `pulls` others, and says with which task its macrobatch begins. Returns its own pulls. */
__device__ __forceinline__ uint32_t begin_pulls(mok_cuda_chunk &c, uint32_t pulls, uint32_t begin)
{
    c.first_pull = pulls;
    c.begin = begin;
    return c.pulls;
}

/*
 * Task order: macrobatches from last to first; inside one, chunk i + 1 is fetched before chunk i's gate/up, and chunk
 * i's down comes after chunk i + 1's gate/up, so that a task that waits finds the work it waits for well under way.
 * Where pulls are apart they have a list of their own, in the same order.
 * The shared expert goes first and covers the first fetch. One thread.
 */
__device__ void order_tasks(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t chunks)
{
    bool shared_left = a.shared_tokens > 0;
    uint32_t next = 0, pulls = 0;
    mok_cuda_chunk shared = {};
    shared.gate_ups = tasks_of(a.shared_tokens, a.shared_gate_up_tiles);
    shared.downs = tasks_of(a.shared_tokens, a.down_tiles);
    auto take = [&](uint32_t count) {
        next += count;
        return next - count;
    };
    for (uint32_t end = chunks, begin; end > 0; end = begin) {
        uint32_t macrobatch = chunk_at(a, s, end - 1).macrobatch, gate_ups = 0, downs = 0;
        for (begin = end - 1; begin > 0 && chunk_at(a, s, begin - 1).macrobatch == macrobatch;)
            begin--;
        const uint32_t first = next;
        if (!a.apart)
            chunk_at(a, s, begin).first_pull = take(chunk_at(a, s, begin).pulls);
        if (shared_left)
            shared.first_gate_up = take(shared.gate_ups);
        for (uint32_t i = begin; i <= end; i++) {
            if (i + 1 < end && !a.apart)
                chunk_at(a, s, i + 1).first_pull = take(chunk_at(a, s, i + 1).pulls);
            if (i < end) {
                if (a.apart)
                    pulls += begin_pulls(chunk_at(a, s, i), pulls, first);
                gate_ups += chunk_at(a, s, i).gate_ups;
                chunk_at(a, s, i).first_gate_up = take(chunk_at(a, s, i).gate_ups);
            }
            if (shared_left)
                shared.first_down = take(shared.downs);
            shared_left = false;
            if (i > begin) {
                downs += chunk_at(a, s, i - 1).downs;
                chunk_at(a, s, i - 1).first_down = take(chunk_at(a, s, i - 1).downs);
            }
        }
        constexpr uint32_t warps = MOK_CONSUMER_WARPS * MOK_CLUSTER;
        a.macrobatches[macrobatch] = { gate_ups * warps, downs * warps };
    }
    if (shared_left) {
        shared.first_gate_up = take(shared.gate_ups);
        shared.first_down = take(shared.downs);
    }
    a.chunks[chunks] = shared;
    for (uint32_t i = 0; i < min(chunks, near_chunks); i++)
        a.chunks[i] = s.near[i];
    a.head->tasks = next;
    a.head->macrobatches = chunks ? chunk_at(a, s, chunks - 1).macrobatch + 1 : 0;
    begin_lists(a, pulls);
}

/* Tasks of a list that has a kernel to itself. */
__device__ void put_span(const mok_cuda_schedule_args &a, uint32_t span, uint32_t first, uint32_t end)
{
    mok_cuda_head head = {};
    head.tasks = end;
    head.next_task = first;
    head.macrobatches = 1; /* of which a kernel knows */
    a.spans[span] = head;
}

constexpr uint32_t wgrad_band = 8; /* tiles of intermediate columns, see fill_run */

/* Tasks of one weight gradient run. */
__device__ __forceinline__ uint32_t wgrads_of(const mok_cuda_schedule_args &a, bool shared)
{
    return 3 * a.down_tiles * (shared ? a.shared_hidden_tiles : a.hidden_tiles);
}

/*
 * Task order of a backward: macrobatches from first to last, so that it begins with what the context kept. Inside one,
 * chunk i + 1 is fetched before chunk i's gate/up, d_hidden is a chunk behind that, d_input another; then the weight
 * gradients, which nobody waits for: rows that other ranks wait for leave first. One thread.
 */
__device__ void order_backward(const mok_cuda_schedule_args &a, scan_shared &s, uint32_t chunks, uint32_t empty_runs)
{
    constexpr uint32_t warps = MOK_CONSUMER_WARPS * MOK_CLUSTER;
    uint32_t next = 0, macrobatches = 0, span = 0;
    mok_cuda_chunk shared = {};
    shared.gate_ups = tasks_of(a.shared_tokens, a.shared_gate_up_tiles);
    shared.d_hiddens = tasks_of(a.shared_tokens, a.shared_hidden_tiles);
    shared.downs = tasks_of(a.shared_tokens, a.down_tiles);
    auto take = [&](uint32_t count) {
        next += count;
        return next - count;
    };
    for (uint32_t begin = 0, end; begin < chunks; begin = end, macrobatches++) {
        uint32_t gate_ups = 0, d_hiddens = 0, downs = 0, runs = 0;
        const uint32_t macrobatch = chunk_at(a, s, begin).macrobatch;
        for (end = begin + 1; end < chunks && chunk_at(a, s, end).macrobatch == macrobatch;)
            end++;
        chunk_at(a, s, begin).first_pull = take(chunk_at(a, s, begin).pulls);
        if (begin == 0)
            shared.first_gate_up = take(shared.gate_ups);
        for (uint32_t i = begin; i < end + 2; i++) {
            if (i + 1 < end)
                chunk_at(a, s, i + 1).first_pull = take(chunk_at(a, s, i + 1).pulls);
            if (i < end) {
                mok_cuda_chunk &c = chunk_at(a, s, i);
                c.first_gate_up = take(c.gate_ups);
                gate_ups += c.gate_ups;
                runs += c.runs;
            }
            if (i == 0)
                shared.first_d_hidden = take(shared.d_hiddens);
            if (i > begin && i - 1 < end) {
                mok_cuda_chunk &c = chunk_at(a, s, i - 1);
                c.first_d_hidden = take(c.d_hiddens);
                d_hiddens += c.d_hiddens;
            }
            if (i == 1 && begin == 0)
                shared.first_down = take(shared.downs);
            if (i >= begin + 2) {
                mok_cuda_chunk &c = chunk_at(a, s, i - 2);
                c.first_down = take(c.downs);
                downs += c.downs;
            }
        }
        const uint32_t wgrads = runs * wgrads_of(a, false);
        a.macrobatches[macrobatch] = { gate_ups * warps, downs * warps,  0, 0, d_hiddens * warps, wgrads * warps, 0,
                                       0,                take(wgrads), {} };
        if (a.spans != nullptr) {
            put_span(a, 2 * macrobatches, span, next - wgrads);
            put_span(a, 2 * macrobatches + 1, next - wgrads, next);
            span = next;
        }
    }
    if (chunks == 0) {
        shared.first_gate_up = take(shared.gate_ups);
        shared.first_d_hidden = take(shared.d_hiddens);
        shared.first_down = take(shared.downs);
    }
    a.chunks[chunks] = shared;
    for (uint32_t i = 0; i < min(chunks, near_chunks); i++)
        a.chunks[i] = s.near[i];
    a.head->first_empty_wgrad = take(empty_runs * wgrads_of(a, false));
    if (a.spans != nullptr) { /* those without rows go with the last macrobatch's, if there is one */
        const uint32_t last = macrobatches ? macrobatches - 1 : 0;
        if (macrobatches == 0)
            put_span(a, 0, 0, 0);
        put_span(a, 2 * last + 1, macrobatches ? a.macrobatches[last].first_wgrad : 0, next);
        for (uint32_t i = 2 * last + 2; i < 2 * a.max_macrobatches; i++)
            put_span(a, i, 0, 0);
    }
    a.head->first_shared_wgrad = next;
    if (a.shared_hidden_tiles > 0 && (a.shared_tokens > 0 || a.overwrite))
        take(wgrads_of(a, true));
    a.head->tasks = next;
    a.head->macrobatches = macrobatches;
    begin_lists(a, 0);
}

/*
 * The same segments, chunks and order by all threads of a block, for the usual case: one macrobatch, and no expert of
 * more than two chunks. False, and nothing done, in any other.
 */
__device__ bool order_at_once(const mok_cuda_schedule_args &a, scan_shared &s)
{
    const uint32_t experts = a.local_experts, warp = threadIdx.x / 32;
    const uint32_t padded64 = s.row64[experts];
    bool large = (uint64_t)padded64 * 64 > a.ring_rows;
    for (uint32_t e = threadIdx.x; e < experts; e += threads)
        large |= div_up(s.rows[e], MOK_UNIT_ROWS) > 2 * a.units_per_chunk;
    if (__syncthreads_or(large))
        return false;
    if (warp == 0)
        scan_experts(a, s.live, [&](uint32_t e) { return (uint32_t)(s.rows[e] != 0); });
    if (warp == 1)
        scan_experts(a, s.units, [&](uint32_t e) { return a.ep > 1 ? div_up(s.rows[e], MOK_UNIT_ROWS) : 0; });
    if (warp == 2)
        scan_experts(a, s.gate_ups, [&](uint32_t e) { return tasks_of(s.rows[e], a.gate_up_tiles); });
    if (warp == 3)
        scan_experts(a, s.downs, [&](uint32_t e) { return tasks_of(s.rows[e], a.down_tiles); });
    if (threadIdx.x == 4 * 32)
        group_experts(a, s);
    if (warp == 5) { /* a ring's rows, so 32 bits are enough */
        uint32_t rows = 0;
        for (uint32_t e = threadIdx.x % 32; e < experts; e += 32)
            rows += s.rows[e];
        rows = __reduce_add_sync(~0u, rows);
        if (threadIdx.x % 32 == 0)
            a.head->rows = a.report->rows = rows;
    }
    __syncthreads();

    for (uint32_t e = threadIdx.x; e < experts; e += threads)
        if (s.rows[e] != 0) {
            uint32_t f = s.chunk_first[s.chunk[e]];
            a.segments[s.live[e]] = { s.row64[e],
                                      s.row64[e],
                                      s.rows[e],
                                      e,
                                      0,
                                      s.chunk[e],
                                      s.units[e] - s.units[f],
                                      s.gate_ups[e] - s.gate_ups[f],
                                      s.downs[e] - s.downs[f],
                                      0 };
        }
    /* tasks before chunk c, of each kind; see order_tasks for what comes after what */
    const uint32_t n = s.chunks;
    auto first_of = [&](uint32_t c) { return (uint32_t)s.chunk_first[min(c, n)]; };
    auto pulls_before = [&](uint32_t c) { return a.apart ? 0 : s.units[first_of(c)]; }; /* in the one list */
    const uint32_t shared_gate_ups = a.shared_tokens ? tasks_of(a.shared_tokens, a.shared_gate_up_tiles) : 0;
    const uint32_t shared_downs = a.shared_tokens ? tasks_of(a.shared_tokens, a.down_tiles) : 0;
    for (uint32_t c = threadIdx.x; c < n; c += threads) {
        mok_cuda_chunk k = {};
        if (a.apart)
            k.first_pull = s.units[first_of(c)];
        else if (c > 0)
            k.first_pull = s.units[first_of(c)] + s.gate_ups[first_of(c - 1)] + s.downs[first_of(c > 2 ? c - 2 : 0)] +
                           shared_gate_ups + (c > 1 ? shared_downs : 0);
        k.first_gate_up = pulls_before(c + 2) + s.gate_ups[first_of(c)] + s.downs[first_of(c > 1 ? c - 1 : 0)] +
                          shared_gate_ups + (c > 0 ? shared_downs : 0);
        k.first_down = pulls_before(c + 3) + s.gate_ups[first_of(c + 2)] + s.downs[first_of(c)] + shared_gate_ups +
                       shared_downs;
        a.chunks[c] = k;
    }
    if (threadIdx.x == 0) {
        uint32_t segments = s.live[experts];
        constexpr uint32_t warps = MOK_CONSUMER_WARPS * MOK_CLUSTER;
        mok_cuda_chunk shared = {};
        shared.first_gate_up = pulls_before(1);
        shared.first_down = pulls_before(2) + s.gate_ups[first_of(1)] + shared_gate_ups;
        a.chunks[n] = shared;
        if (a.shared_tokens > 0)
            a.segments[segments++] = { a.shared_row64, 0, a.shared_tokens, 1u << 31, 0, n, 0, 0, 0, 0 };
        a.macrobatches[0] = { s.gate_ups[experts] * warps, s.downs[experts] * warps };
        a.head->segments = segments;
        a.head->tasks = pulls_before(n) + s.gate_ups[experts] + s.downs[experts] + shared_gate_ups + shared_downs;
        a.head->macrobatches = n ? 1 : 0;
        a.head->padded_rows = (uint64_t)padded64 * 64;
        begin_lists(a, a.apart ? s.units[experts] : 0);
    }
    return true;
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
    if (a.ep > 1 && !shared)
        for (uint32_t i = lane; i < units; i += 32)
            (a.apart ? a.pulls : a.tasks)[at.first_pull + g.pull + i] =
                make(MOK_TASK_PULL, i, a.apart ? at.begin : 0, i >= pairs);
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

    mok::let_next_kernel_start();
    mok::wait_for_previous_kernel();
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
