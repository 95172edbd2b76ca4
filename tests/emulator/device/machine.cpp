/* SPDX-License-Identifier: Apache-2.0 */
/* The loop that runs a kernel: starts blocks as there is room, lets warps take turns, moves time on. */
#include "machine.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fiber.h"

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace emu
{

thread_local fiber *current;
thread_local machine *self;

/* Sleeps that change nothing, after which time jumps, so that limits of seconds trip soon. */
constexpr uint64_t idle_limit = 20000, idle_real_ns = 50000000;

uint32_t chance::next()
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return static_cast<uint32_t>((state * 0x2545f4914f6cdd1dull) >> 32);
}

static uint64_t real_ns()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<uint64_t>(t.tv_sec) * 1000000000ull + static_cast<uint64_t>(t.tv_nsec);
}

static void say_place(const fiber *f)
{
    if (!f)
        return;
    const grid &g = *f->in->in->of;
    fprintf(stderr, "emulator: launch %llu, seed %llu, kernel %p <<<(%u, %u, %u), %u>>>, block %llu, thread %u\n",
            static_cast<unsigned long long>(g.number), static_cast<unsigned long long>(self->seed), g.kernel, g.size.x,
            g.size.y, g.size.z, g.threads, static_cast<unsigned long long>(f->in->in->number),
            f->in->index * 32 + f->lane);
}

void fail(const char *format, ...)
{
    va_list ap;
    fflush(stdout);
    fprintf(stderr, "emulator: ");
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fprintf(stderr, "\n");
    say_place(current);
    abort();
}

void say_where_we_are()
{
    say_place(current);
}

block &my_block()
{
    return *current->in->in;
}

uint32_t lane_of()
{
    return current->lane;
}

uint32_t cluster_rank()
{
    return my_block().rank;
}

/* ---- turns ---- */

void machine::wake(fiber *f)
{
    warp *w = f->in;
    f->wait = WAIT_NOTHING;
    w->ready |= 1u << f->lane;
    if (!w->queued) {
        w->queued = true;
        runnable.push_back(w);
    }
}

void machine::wake_all(std::vector<fiber *> &waiting)
{
    for (fiber *f : waiting)
        wake(f);
    waiting.clear();
}

void machine::wait(wait_kind kind, uint32_t a, uint32_t b)
{
    fiber *f = current;
    f->wait = kind;
    f->wait_a = a;
    f->wait_b = b;
    mok_emulator_switch(&f->sp, sp);
}

void machine::yield()
{
    fiber *f = current;
    wake(f);
    mok_emulator_switch(&f->sp, sp);
}

void maybe_yield()
{
    if (self->random.one_in(self->with.yield_one_in))
        self->yield();
}

void machine::at(uint64_t when, std::function<void()> action)
{
    events.push({ when, order++, nullptr, std::move(action) });
}

uint64_t now_ns()
{
    self->now += 8;
    return self->now;
}

void sleep_ns(uint32_t ns)
{
    uint64_t long_enough = ns / 2 + self->random.below(ns + 1) + 1;
    self->events.push({ self->now + long_enough, self->order++, current, nullptr });
    self->wait(WAIT_SLEEP, ns);
}

static void fiber_main()
{
    fiber *f = current;
    f->in->in->of->body();
    f->done = true;
    mok_emulator_switch(&f->sp, self->sp);
    abort();
}

void machine::run_warp(warp *w)
{
    block *b = w->in;
    bool upwards = random.one_in(2);
    uint32_t lanes = w->ready;
    w->ready = 0;
    now += 10;
    blockIdx = b->index;
    blockDim = b->of->block_size;
    gridDim = b->of->size;
    while (lanes) {
        uint32_t i =
            upwards ? static_cast<uint32_t>(__builtin_ctz(lanes)) : 31u - static_cast<uint32_t>(__builtin_clz(lanes));
        lanes &= ~(1u << i);
        fiber *f = w->lane[i];
        if (!f->sp) {
            f->stack = stack_take();
            f->sp = stack_ready(f->stack, fiber_main);
        }
        if (lanes) { /* the next one, meanwhile */
            const fiber *next = w->lane[upwards ? __builtin_ctz(lanes) : 31 - __builtin_clz(lanes)];
            __builtin_prefetch(next->sp);
            __builtin_prefetch(static_cast<const uint8_t *>(next->sp) + 64);
        }
        current = f;
        threadIdx = f->thread;
        mok_emulator_switch(&sp, f->sp);
        current = nullptr;
        if (f->done)
            end_fiber(f);
    }
    if (b->alive == 0) {
        b->of->ended++;
        changes++;
        progress++;
    }
}

void machine::end_fiber(fiber *f)
{
    warp *w = f->in;
    block *b = w->in;
    if (!f->copies.empty() || !f->bulk.empty()) {
        current = f;
        fail("a thread ended while its copies were under way");
    }
    stack_give(f->stack);
    f->stack = nullptr;
    w->alive &= ~(1u << f->lane);
    b->alive--;
    b->in->alive--;
    progress++;
    end_of_lane(*w, f->lane);
    end_of_thread(*b);
    if (b->alive == 0) {
        if (!b->let_next)
            b->of->let_next++;
        b->let_next = true;
    }
}

/* ---- blocks come and go ---- */

void machine::start_cluster(grid &g)
{
    auto c = std::make_unique<cluster>();
    for (uint32_t rank = 0; rank < g.cluster_size; rank++) {
        auto b = std::make_unique<block>();
        uint64_t n = g.started++;
        b->of = &g;
        b->in = c.get();
        b->rank = rank;
        b->number = n;
        b->alive = g.threads;
        b->region = region_take();
        b->shared_bytes = g.shared_bytes;
        b->shared = b->region + region_bytes - (g.shared_bytes + 15) / 16 * 16;
        memset(b->shared, 0xff, region_bytes - static_cast<size_t>(b->shared - b->region));
        b->registers_free = 0;
        b->fibers = std::vector<fiber>(g.threads);
        b->warps = std::vector<warp>((g.threads + 31) / 32);
        b->index = { static_cast<uint32_t>(n % g.size.x), static_cast<uint32_t>(n / g.size.x % g.size.y),
                     static_cast<uint32_t>(n / g.size.x / g.size.y) };
        for (uint32_t t = 0; t < g.threads; t++) {
            fiber &f = b->fibers[t];
            warp &w = b->warps[t / 32];
            f.in = &w;
            f.lane = t % 32;
            f.thread = { t % g.block_size.x, t / g.block_size.x % g.block_size.y, t / g.block_size.x / g.block_size.y };
            w.lane[f.lane] = &f;
            w.alive |= 1u << f.lane;
        }
        for (uint32_t i = 0; i < b->warps.size(); i++) {
            b->warps[i].in = b.get();
            b->warps[i].index = i;
            b->warps[i].registers = 65536 / ((g.threads + 31) / 32 * 32) / 8 * 8;
        }
        c->alive += g.threads;
        c->blocks.push_back(std::move(b));
    }
    for (auto &b : c->blocks)
        for (fiber &f : b->fibers)
            wake(&f);
    g.resident.push_back(std::move(c));
    progress++;
}

void machine::end_cluster(grid &, cluster &c)
{
    for (auto &b : c.blocks) {
        check_block_left_nothing(*b);
        region_give(b->region);
    }
}

void machine::start_blocks(grid &g)
{
    for (size_t i = 0; i < g.resident.size();)
        if (g.resident[i]->alive == 0) {
            end_cluster(g, *g.resident[i]);
            g.resident.erase(g.resident.begin() + static_cast<ptrdiff_t>(i));
        } else {
            i++;
        }
    while (g.started < g.blocks && (g.resident.size() + 1) * g.cluster_size <= std::max(g.at_once, g.cluster_size))
        start_cluster(g);
}

/* ---- time ---- */

void machine::next_event()
{
    event e = events.top();
    events.pop();
    now = std::max(now, e.when);
    if (e.action) {
        e.action();
        progress++;
    } else {
        wake(e.wakes);
        check_stuck();
    }
}

void machine::check_stuck()
{
    if (progress != idle_progress) {
        idle_progress = progress;
        idle_events = 0;
        jump = 0;
        return;
    }
    if (++idle_events < idle_limit)
        return;
    if (idle_events == idle_limit)
        idle_since = real_ns();
    if (real_ns() - idle_since < idle_real_ns) { /* somebody outside may still change something */
        timespec nap = { 0, 20000 };
        nanosleep(&nap, nullptr);
        return;
    }
    jump = jump ? std::min<uint64_t>(jump * 2, 100000000) : 1000;
    now += jump;
}

static const char *wait_name(wait_kind kind)
{
    static const char *const names[] = { "nothing", "lanes of its warp", "its block", "its cluster", "mbarrier",
                                         "time",    "the kernel before" };
    return names[kind];
}

void machine::report_deadlock()
{
    fflush(stdout);
    fprintf(stderr, "emulator: every thread waits and nothing is under way\n");
    for (auto &g : grids)
        for (auto &c : g->resident)
            for (auto &b : c->blocks) {
                const fiber *first = nullptr;
                uint32_t from = 0;
                for (uint32_t t = 0; t <= b->fibers.size(); t++) {
                    const fiber *f = t < b->fibers.size() ? &b->fibers[t] : nullptr;
                    if (first && f && !f->done && f->wait == first->wait && f->wait_a == first->wait_a &&
                        f->wait_b == first->wait_b)
                        continue;
                    if (first) {
                        char more[160] = "";
                        if (first->wait == WAIT_MBAR)
                            describe_mbar(*b, first->wait_a, more, sizeof(more));
                        else if (first->wait == WAIT_LANES)
                            snprintf(more, sizeof(more), " (%s, mask %#x)", meeting_name(first->wait_b), first->wait_a);
                        else
                            snprintf(more, sizeof(more), " (%u, %u)", first->wait_a, first->wait_b);
                        fprintf(stderr, "emulator: block %llu threads %u to %u wait for %s%s%s\n",
                                static_cast<unsigned long long>(b->number), from, t - 1, wait_name(first->wait), more,
                                first->wait == WAIT_MBAR && first->wait_b ? ", parity 1" : "");
                    }
                    first = f && !f->done ? f : nullptr;
                    from = t;
                }
            }
    if (!grids.empty())
        fprintf(stderr, "emulator: launch %llu, seed %llu\n", static_cast<unsigned long long>(grids[0]->number),
                static_cast<unsigned long long>(seed));
    abort();
}

/* ---- the loop ---- */

bool machine::all_ended() const
{
    return std::all_of(grids.begin(), grids.end(), [](const auto &g) { return g->completed; });
}

void machine::look_after_grids()
{
    for (size_t i = 0; i < grids.size(); i++) {
        grid &g = *grids[i];
        start_blocks(g);
        if (g.ended < g.blocks || g.completed)
            continue;
        g.completed = true;
        if (i + 1 < grids.size()) {
            grids[i + 1]->previous_done = true;
            wake_all(grids[i + 1]->waiting);
        }
    }
    grid &last = *grids.back();
    if (last.completed || last.alone || last.let_next < last.blocks)
        return;
    if (std::unique_ptr<grid> next = next_early(last)) {
        next->previous_done = false;
        grids.push_back(std::move(next));
        start_blocks(*grids.back());
    }
}

void machine::run(std::unique_ptr<grid> first)
{
    uint64_t seen = 0;
    grids.push_back(std::move(first));
    look_after_grids();
    while (!all_ended() || !events.empty()) {
        while (!events.empty() && events.top().when <= now)
            next_event();
        if (runnable.empty()) {
            look_after_grids();
            if (!runnable.empty() || (all_ended() && events.empty()))
                continue;
            if (events.empty())
                report_deadlock();
            next_event();
            continue;
        }
        size_t pick = random.below(static_cast<uint32_t>(runnable.size()));
        warp *w = runnable[pick];
        runnable[pick] = runnable.back();
        runnable.pop_back();
        do
            run_warp(w);
        while (w->ready && random.below(8) < with.stay_of_8);
        w->queued = w->ready != 0;
        if (w->queued)
            runnable.push_back(w);
        if (seen != changes) {
            seen = changes;
            look_after_grids();
        }
    }
    grids.clear();
}

} // namespace emu
