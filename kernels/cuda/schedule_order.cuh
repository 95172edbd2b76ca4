/* SPDX-License-Identifier: Apache-2.0 */
/*
 * In which order an operation's tasks are done: experts' rows cut into segments, segments grouped to chunks, and where in
 * the lists each chunk's tasks begin. Of one block of the schedule's cluster; the tasks themselves schedule.cu writes.
 */
#ifndef MOK_CUDA_SCHEDULE_ORDER_CUH
#define MOK_CUDA_SCHEDULE_ORDER_CUH

#include "layout.h"

namespace
{

constexpr uint32_t threads = 1024;
constexpr uint32_t cluster_blocks = MOK_SCHEDULE_CLUSTER;

__device__ __forceinline__ uint32_t div_up(uint32_t a, uint32_t b)
{
    return (a + b - 1) / b;
}

/* An expert's rows with their padding, in 64 rows. */
__device__ __forceinline__ uint32_t padded64_of(const mok_cuda_schedule_args &a, uint32_t rows)
{
    return div_up(rows, 64 * a.tile_rows64) * a.tile_rows64;
}

constexpr uint32_t few_experts = 128; /* up to here a warp finds its rows' places by itself, beyond in turns */
constexpr uint32_t held_steps = MOK_SCHEDULE_STEPS; /* of a warp's slots, whose experts stay on the chip */
constexpr uint32_t own_experts = 512; /* beyond, a macrobatch does not begin with what need not be pulled */
constexpr uint32_t near_chunks = 512; /* kept on the chip while the order is made; the others cost trips to memory */

struct scan_shared {
    uint32_t count[MOK_MAX_EXPERTS]; /* of this block's slots; read by the other blocks */
    /* where own_first(): of those, of ranks before this one, and of this rank; of all slots the same */
    uint32_t count_own[2][own_experts], own[2][own_experts];
    uint32_t rows[MOK_MAX_EXPERTS];  /* of all slots */
    uint32_t next[MOK_MAX_EXPERTS];  /* the padded row that this block writes next, less 64 row64[] */
    uint32_t row64[MOK_MAX_EXPERTS + 1];
    /* where a warp has slots of its own: how many of each expert, then where its next row is, less next[] and 64 row64[] */
    uint32_t of_warp[threads / 32][few_experts + 1];
    int16_t held[held_steps][threads]; /* local experts of slots, or -1; of the thread alone */
    mok_cuda_chunk near[near_chunks];
    /* order_at_once: before each expert, and in all */
    uint32_t live[MOK_MAX_EXPERTS + 1], units[MOK_MAX_EXPERTS + 1], gate_ups[MOK_MAX_EXPERTS + 1],
        downs[MOK_MAX_EXPERTS + 1];
    uint16_t chunk[MOK_MAX_EXPERTS];
    uint16_t chunk_first[MOK_MAX_EXPERTS + 1]; /* expert */
    uint32_t chunks;
    uint32_t far[threads]; /* rows of a round's slots, as far as they are of other ranks; ~0 */
};

static_assert(sizeof(scan_shared) <= 227 * 1024, "a block's shared memory");

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
            c.pulls += n * a.unit_pulls;
            c.gate_ups += a.kept && macrobatch == 0 ? 0 : tasks_of(rows, a.gate_up_tiles);
            c.d_hiddens += a.backward ? tasks_of(rows, a.hidden_tiles) : 0;
            c.downs += tasks_of(rows, a.down_tiles);
            units_in_chunk += n;
            left -= rows;
            row64 += padded64_of(a, rows);
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
        scan_experts(a, s.units, [&](uint32_t e) { return div_up(s.rows[e], MOK_UNIT_ROWS) * a.unit_pulls; });
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

} // namespace
#endif
