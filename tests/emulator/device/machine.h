/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The parts of a running kernel: grid, clusters, blocks, warps, fibers; and the machine that runs them. Time is
 * virtual: it moves when fibers run and jumps to the next event when none can.
 */
#ifndef MOK_EMULATOR_MACHINE_H
#define MOK_EMULATOR_MACHINE_H

#include <algorithm>
#include <memory>
#include <queue>
#include <vector>

#include "emulator.h"

namespace emu
{

constexpr uint32_t shared_start = 1024; /* the first bytes of a block's shared memory are the system's */
constexpr uint32_t rank_shift = 24;     /* of a cluster address: rank + 1 */
constexpr uint32_t shared_limit = 227 * 1024, shared_default_limit = 48 * 1024;

enum wait_kind : uint8_t { WAIT_NOTHING, WAIT_LANES, WAIT_BLOCK, WAIT_CLUSTER, WAIT_MBAR, WAIT_SLEEP, WAIT_KERNEL };

struct small_copy {
    uint32_t dst, size, bytes, group; /* size: of the destination; behind `bytes` it is zeroed */
    const void *src;
};

/* A copy or addition from shared memory, done when it is asked for or when its thread waits. */
struct bulk_op {
    uint32_t group;
    std::function<void()> run;
};

struct alignas(64) fiber {
    void *sp = nullptr; /* what a switch touches comes first */
    warp *in = nullptr;
    uint3 thread = {};
    uint32_t lane = 0;
    uint32_t wait_a = 0, wait_b = 0; /* what exactly is waited for, for the report */
    int vote = 0;
    wait_kind wait = WAIT_NOTHING;
    bool done = false;
    void *stack = nullptr;
    payload result = {};
    uint64_t cluster_phase = 0;
    std::vector<small_copy> copies; /* cp.async that have not landed */
    uint32_t copy_group = 0;        /* open one */
    std::vector<bulk_op> bulk;
    uint32_t bulk_group = 0;
};

struct matrix_unit; /* pending products of a warp; wgmma.cpp */

struct warp {
    block *in = nullptr;
    uint32_t index = 0, alive = 0; /* lanes that have not ended */
    uint32_t ready = 0;
    bool queued = false;
    fiber *lane[32] = {};
    std::vector<meeting> meetings;
    std::unique_ptr<matrix_unit> matrix;
    uint32_t registers = 0;
    warp();
    warp(warp &&);
    ~warp();
};

struct thread_barrier {
    uint32_t arrived = 0, expected = 0; /* 0: all of the block */
    int votes = 0;
    vote kind = VOTE_NONE;
    std::vector<fiber *> waiting;
};

struct mbar_waiters {
    uint32_t address;
    std::vector<fiber *> waiting;
};

struct cluster;
struct grid;

struct block {
    grid *of = nullptr;
    cluster *in = nullptr;
    uint32_t rank = 0, alive = 0, in_flight = 0; /* copies into its shared memory */
    uint64_t number = 0;
    uint3 index = {};
    std::vector<fiber> fibers;
    std::vector<warp> warps;
    uint8_t *shared = nullptr, *region = nullptr;
    uint32_t shared_bytes = 0;
    thread_barrier barrier[16];
    std::vector<mbar_waiters> mbars;
    uint64_t registers_free = 0;
    bool let_next = false;
};

struct cluster {
    std::vector<std::unique_ptr<block>> blocks;
    uint32_t alive = 0, arrived = 0;
    uint64_t phase = 0;
    std::vector<fiber *> waiting;
};

struct grid {
    const void *kernel;
    uint3 size, block_size;
    uint32_t cluster_size = 1, threads = 0, shared_bytes = 0;
    cudaStream_t stream = nullptr;
    std::function<void()> body;
    uint64_t number = 0; /* of the process's launches */
    uint64_t blocks = 0, started = 0, ended = 0, let_next = 0;
    uint32_t at_once = 0;         /* blocks that may be resident */
    bool previous_done = true;    /* the kernel before it */
    bool completed = false;       /* itself */
    bool alone = false;           /* the next kernel does not start early, though it might */
    std::vector<fiber *> waiting; /* for the kernel before */
    std::vector<std::unique_ptr<cluster>> resident;
};

struct event {
    uint64_t when, order;
    fiber *wakes;                 /* or */
    std::function<void()> action; /* something lands */
    bool operator<(const event &other) const
    {
        return when != other.when ? when > other.when : order > other.order;
    }
};

/* Xorshift; good enough to shuffle with. */
struct chance {
    uint64_t state;
    uint32_t next();
    uint32_t below(uint32_t bound)
    {
        return static_cast<uint32_t>(static_cast<uint64_t>(next()) * bound >> 32);
    }
    bool one_in(uint32_t n)
    {
        return below(n) == 0;
    }
};

/* How a launch behaves; drawn from its seed. */
struct manners {
    uint32_t yield_one_in;  /* of the places where a fiber may give way */
    uint32_t stay_of_8;     /* a warp that can go on does so */
    uint32_t late_of_8;     /* copies that land, products that run, as late as they may */
    uint32_t longest_delay; /* of a copy, ns */
};

struct machine {
    void *sp = nullptr; /* of the loop, while a fiber runs */
    uint64_t now = 0, progress = 0, order = 0, seed = 0;
    chance random = {};
    manners with = {};
    std::vector<warp *> runnable;
    std::priority_queue<event> events;
    uint64_t changes = 0;                     /* blocks that ended or let the next kernel start */
    std::vector<std::unique_ptr<grid>> grids; /* of a stream, in its order */
    std::unique_ptr<grid> (*next_early)(
        grid &last); /* the kernel that may start before the last one has ended, or NULL */

    /* Returns when all kernels have ended. */
    void run(std::unique_ptr<grid> first);
    void wake(fiber *f);
    void wake_all(std::vector<fiber *> &waiting);
    void at(uint64_t when, std::function<void()> action);
    /* Gives way until woken. */
    void wait(wait_kind kind, uint32_t a = 0, uint32_t b = 0);
    void yield();

  private:
    bool all_ended() const;
    void start_blocks(grid &g);
    void look_after_grids();
    void start_cluster(grid &g);
    void run_warp(warp *w);
    void end_fiber(fiber *f);
    void end_cluster(grid &g, cluster &c);
    void next_event();
    void check_stuck();
    [[noreturn]] void report_deadlock();
    uint64_t idle_events = 0, idle_progress = 0, idle_since = 0, jump = 0;
};
extern thread_local machine *self;

block &my_block();
void end_of_lane(warp &w, uint32_t lane); /* meetings that waited for it */
void end_of_thread(block &b);             /* barriers that waited for it */
void check_block_left_nothing(block &b);
void mbar_complete_bytes(block &b, uint32_t offset, uint32_t bytes);
void describe_mbar(block &b, uint32_t address, char *text, size_t size);

/* Stacks and shared memory, kept for the next kernel. */
void *stack_take();
void stack_give(void *stack);
constexpr uint32_t stack_bytes = 64 * 1024;
uint8_t *region_take();
void region_give(uint8_t *region);
constexpr uint32_t region_bytes = 256 * 1024;

} // namespace emu
#endif
