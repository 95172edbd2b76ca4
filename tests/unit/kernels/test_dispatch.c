/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dispatcher's state machine under random interleavings: N simulated ranks run the same sequence of operations,
 * one event at a time in an order drawn from a seed, and every promise of dispatch.h is checked after every event.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <sched.h>

#include "dispatch.h"
#include "engine.h"
#include "mok/ring_abi.h"
#include "rng.h"

#define MAX_RANKS 6
#define MAX_OPS 6
#ifdef MOK_SANITIZED
#define SEEDS 100
#else
#define SEEDS 500
#endif

/* What each rank is told about an operation, and what must come of it. */
struct script {
    struct mok_op_info info;
    int prepare_status, main_status;
    int cancel_code; /* asked for at a random moment; 0: never */
    bool canceled;   /* the request was taken, so the operation must end with it */
};

struct sim_rank {
    struct mok_layer_flags *flags;
    struct mok_dispatch_view view;
    struct mok_dispatch_op op;
    uint64_t seq; /* operation in hand, 1..; 0: none yet */
    bool begun, canceled;
    enum mok_phase running;       /* 0: none */
    struct mok_op_info published; /* as it was at ready */
    struct mok_op_result result[MAX_OPS + 1];
    uint32_t fault[MAX_OPS + 1];
    bool reduced[MAX_OPS + 1];
    uint32_t completed;
};

struct sim {
    uint32_t ranks, ops;
    struct rng rng;
    uint64_t now;
    struct sim_rank rank[MAX_RANKS];
    struct script script[MAX_OPS + 1][MAX_RANKS];
};

static struct mok_op_info plain_info(uint64_t seq)
{
    return (struct mok_op_info){ .seq = seq,
                                 .kind = seq % 2 ? MOK_KIND_FORWARD : MOK_KIND_BACKWARD,
                                 .context_mode = MOK_CONTEXT_FULL };
}

static void sim_open(struct sim *sim, uint32_t ranks, uint32_t ops, uint64_t seed)
{
    memset(sim, 0, sizeof(*sim));
    sim->ranks = ranks;
    sim->ops = ops;
    sim->rng = (struct rng){ seed };
    sim->now = 1;
    for (uint32_t r = 0; r < ranks; r++) {
        sim->rank[r].flags = aligned_alloc(128, (sizeof(struct mok_layer_flags) + 127) / 128 * 128);
        assert_non_null(sim->rank[r].flags);
        memset(sim->rank[r].flags, 0, sizeof(struct mok_layer_flags));
    }
    for (uint32_t r = 0; r < ranks; r++) {
        sim->rank[r].view = (struct mok_dispatch_view){ .ep = ranks, .rank = r };
        for (uint32_t p = 0; p < ranks; p++)
            sim->rank[r].view.flags[p] = sim->rank[p].flags;
    }
    for (uint64_t n = 1; n <= ops; n++) {
        for (uint32_t r = 0; r < ranks; r++) {
            sim->script[n][r].info = plain_info(n);
            sim->script[n][r].info.tokens = rng_below(&sim->rng, 100);
            sim->script[n][r].info.x_offset = n * 1000 + r;
        }
    }
}

static void sim_close(struct sim *sim)
{
    for (uint32_t r = 0; r < sim->ranks; r++)
        free(sim->rank[r].flags);
}

/* True while rank `p` may still look at what another rank said about operation `seq`. */
static bool may_read(const struct sim_rank *p, uint64_t seq)
{
    if (p->seq != seq)
        return p->seq < seq;
    return p->completed < seq && p->op.state < MOK_ST_PUSHED;
}

static bool in_phase(const struct sim_rank *p, enum mok_phase phase)
{
    return p->running == phase;
}

/*
 * The memory of rank r that others touch: routing (written by r in PREPARE, read by all in MAIN) and slots (written
 * by all in MAIN, read by r in REDUCE). No two phases that run at the same time may conflict on it.
 */
static void check_phases_do_not_conflict(const struct sim *sim)
{
    for (uint32_t r = 0; r < sim->ranks; r++) {
        for (uint32_t p = 0; p < sim->ranks; p++) {
            if (in_phase(&sim->rank[p], MOK_PHASE_MAIN)) {
                assert_false(in_phase(&sim->rank[r], MOK_PHASE_PREPARE));
                assert_false(in_phase(&sim->rank[r], MOK_PHASE_REDUCE));
                assert_true(sim->rank[r].flags->ready >= sim->rank[p].seq);
            }
            if (in_phase(&sim->rank[p], MOK_PHASE_REDUCE))
                assert_true(sim->rank[r].flags->pushed >= sim->rank[p].seq);
        }
    }
}

static void check_missing(const struct sim *sim, uint32_t r)
{
    const struct sim_rank *rank = &sim->rank[r];
    uint64_t mask[MOK_MAX_EP / 64], want[MOK_MAX_EP / 64] = { 0 };
    uint32_t count = 0;

    if (!rank->begun || rank->op.state == MOK_ST_MAIN || rank->op.state == MOK_ST_DONE)
        return;
    for (uint32_t p = 0; p < sim->ranks; p++) {
        uint64_t reached = rank->op.state < MOK_ST_MAIN ? sim->rank[p].flags->ready : sim->rank[p].flags->pushed;
        if (reached >= rank->seq)
            continue;
        want[p / 64] |= 1ull << (p % 64);
        count++;
    }
    assert_int_equal(mok_dispatch_missing(&rank->op, &rank->view, mask), count);
    assert_memory_equal(mask, want, sizeof(mask));
}

/* After an event on rank r: its flags moved by at most one, and its info only while nobody may look. */
static void check_flags(const struct sim *sim, uint32_t r, const struct mok_layer_flags *before, bool told)
{
    struct sim_rank *rank = (struct sim_rank *)&sim->rank[r];
    const struct mok_layer_flags *now = rank->flags;

    assert_true(now->ready - before->ready <= 1);
    assert_true(now->pushed - before->pushed <= 1);
    assert_true(now->pushed <= now->ready);
    if (now->ready != before->ready || now->pushed != before->pushed)
        assert_true(told);
    if (memcmp(&now->info, &before->info, sizeof(now->info)))
        for (uint32_t p = 0; p < sim->ranks; p++)
            assert_false(before->ready && p != r && may_read(&sim->rank[p], before->ready));
    if (now->ready != before->ready) {
        assert_int_equal(now->ready, rank->seq);
        assert_int_equal(now->info.seq, rank->seq);
        rank->published = now->info;
    }
    if (now->ready == rank->seq && rank->completed < rank->seq)
        assert_memory_equal(&now->info, &rank->published, sizeof(now->info));
}

static struct mok_op_result phase_result(struct sim *sim, uint32_t r)
{
    struct mok_op_result result = { .rows = 10 * r + 1, .device_ns = 5 };
    const struct script *script = &sim->script[sim->rank[r].seq][r];

    if (sim->rank[r].running == MOK_PHASE_MAIN)
        result.status = script->main_status;
    if (sim->rank[r].running == MOK_PHASE_PREPARE && script->prepare_status) {
        result.status = script->prepare_status;
        result.argument = 17;
        result.bad_token = 100 + r;
        result.bad_slot = r;
        result.bad_value = -7 - (int64_t)r;
    }
    return result;
}

static void act(struct sim *sim, uint32_t r, enum mok_dispatch_action action)
{
    struct sim_rank *rank = &sim->rank[r];

    switch (action) {
    case MOK_ACT_WAIT:
        break;
    case MOK_ACT_PREPARE:
        rank->running = MOK_PHASE_PREPARE;
        break;
    case MOK_ACT_MAIN:
        for (uint32_t p = 0; p < sim->ranks; p++)
            assert_int_equal(sim->rank[p].flags->info.x_offset, rank->seq * 1000 + p);
        rank->running = MOK_PHASE_MAIN;
        break;
    case MOK_ACT_REDUCE:
        rank->running = MOK_PHASE_REDUCE;
        rank->reduced[rank->seq] = true;
        break;
    case MOK_ACT_COMPLETE:
        assert_int_equal(rank->op.state, MOK_ST_DONE);
        rank->result[rank->seq] = rank->op.result;
        rank->fault[rank->seq] = rank->op.fault_rank;
        rank->completed++;
        rank->begun = false;
        break;
    default:
        fail_msg("unknown action %d", (int)action);
    }
}

static bool all_ready(const struct sim *sim, uint64_t seq)
{
    for (uint32_t r = 0; r < sim->ranks; r++)
        if (sim->rank[r].flags->ready < seq)
            return false;
    return true;
}

/* One event on rank r. */
static void sim_event(struct sim *sim, uint32_t r)
{
    struct sim_rank *rank = &sim->rank[r];
    struct mok_layer_flags before[MAX_RANKS];
    bool moved = false;

    for (uint32_t p = 0; p < sim->ranks; p++)
        before[p] = *sim->rank[p].flags;
    sim->now++;
    if (!rank->begun) {
        if (rank->seq == sim->ops)
            return;
        rank->seq++;
        rank->canceled = false;
        mok_dispatch_begin(&rank->op, rank->seq, &sim->script[rank->seq][r].info);
        rank->begun = true;
    } else if (sim->script[rank->seq][r].cancel_code && !rank->canceled && rng_below(&sim->rng, 3) == 0) {
        bool joined = all_ready(sim, rank->seq);
        int code = mok_dispatch_cancel(&rank->op, &rank->view, sim->script[rank->seq][r].cancel_code);
        assert_int_equal(code, joined ? -MOK_EBUSY : 0);
        rank->canceled = true;
        sim->script[rank->seq][r].canceled = !joined;
    } else if (rank->running && rng_below(&sim->rng, 2)) {
        struct mok_op_result result = phase_result(sim, r);
        mok_dispatch_phase_done(&rank->op, &result);
        rank->running = (enum mok_phase)0;
    } else if (rank->running) {
        assert_int_equal(mok_dispatch_step(&rank->op, &rank->view, sim->now, &moved), MOK_ACT_WAIT);
    } else {
        act(sim, r, mok_dispatch_step(&rank->op, &rank->view, sim->now, &moved));
    }
    for (uint32_t p = 0; p < sim->ranks; p++)
        if (p != r)
            assert_memory_equal(&before[p], sim->rank[p].flags, sizeof(before[p]));
    check_flags(sim, r, &before[r], moved);
    check_phases_do_not_conflict(sim);
    for (uint32_t p = 0; p < sim->ranks; p++)
        check_missing(sim, p);
}

static bool sim_done(const struct sim *sim)
{
    for (uint32_t r = 0; r < sim->ranks; r++)
        if (sim->rank[r].completed < sim->ops)
            return false;
    return true;
}

/* Runs to the end; random ranks get bursts of events, so that some run far ahead of others. */
static void sim_run(struct sim *sim)
{
    for (uint32_t burst = 0; !sim_done(sim); burst++) {
        assert_true(burst < 100000); /* stuck otherwise */
        uint32_t r = rng_below(&sim->rng, sim->ranks), length = 1 + rng_below(&sim->rng, 12);
        while (length--)
            sim_event(sim, r);
    }
}

/* All ranks must tell the same story of operation n. */
static void check_verdicts_equal(const struct sim *sim, uint64_t n)
{
    const struct mok_op_result *first = &sim->rank[0].result[n];

    for (uint32_t r = 1; r < sim->ranks; r++) {
        const struct mok_op_result *other = &sim->rank[r].result[n];
        assert_int_equal(other->status, first->status);
        assert_int_equal(other->argument, first->argument);
        assert_int_equal(other->bad_token, first->bad_token);
        assert_int_equal(other->bad_slot, first->bad_slot);
        assert_int_equal(other->bad_value, first->bad_value);
        assert_int_equal(sim->rank[r].fault[n], sim->rank[0].fault[n]);
    }
}

static void check_verdict(const struct sim *sim, uint64_t n)
{
    const struct mok_op_result *result = &sim->rank[0].result[n];
    bool unwell = false;

    check_verdicts_equal(sim, n);
    for (uint32_t r = 0; r < sim->ranks; r++)
        unwell |= sim->script[n][r].prepare_status || sim->script[n][r].main_status || sim->script[n][r].canceled;
    if (!unwell) {
        assert_int_equal(result->status, 0);
        for (uint32_t r = 0; r < sim->ranks; r++)
            assert_int_equal(sim->rank[r].result[n].rows, 10 * r + 1);
        return;
    }
    uint32_t fault = sim->rank[0].fault[n];
    assert_true(fault < sim->ranks);
    assert_true(result->status < 0);
    const struct script *script = &sim->script[n][fault];
    if (result->status == -MOK_ECANCELED && result->argument == MOK_ARG_RANKS) { /* cancelled after it was ready */
        assert_int_equal(result->bad_value, fault);
        assert_true(sim->script[n][result->bad_value].canceled);
        return;
    }
    assert_true(result->status == script->prepare_status || result->status == script->main_status ||
                (script->canceled && result->status == script->cancel_code));
    if (result->status == -MOK_EEXPERT) {
        assert_int_equal(result->bad_token, 100 + fault);
        assert_int_equal(result->bad_slot, fault);
        assert_int_equal(result->bad_value, -7 - (int64_t)fault);
    }
}

static void well_ranks_finish_in_any_interleaving(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct sim sim;
        sim_open(&sim, 1 + (uint32_t)(seed % MAX_RANKS), 1 + (uint32_t)(seed % MAX_OPS), seed);
        sim_run(&sim);
        for (uint64_t n = 1; n <= sim.ops; n++)
            check_verdict(&sim, n);
        sim_close(&sim);
    }
}

static void unwell_ranks_fail_the_operation_alike_everywhere_and_the_next_one_runs(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct sim sim;
        sim_open(&sim, 1 + (uint32_t)(seed % MAX_RANKS), MAX_OPS, seed);
        for (uint64_t n = 1; n <= sim.ops; n++)
            for (uint32_t r = 0; r < sim.ranks; r++)
                if (rng_below(&sim.rng, 6) == 0)
                    sim.script[n][r].prepare_status = rng_below(&sim.rng, 2) ? -MOK_EEXPERT : -MOK_ESTATE;
        sim_run(&sim);
        for (uint64_t n = 1; n <= sim.ops; n++)
            check_verdict(&sim, n);
        sim_close(&sim);
    }
}

static void a_rank_whose_main_fails_fails_all_and_nobody_reduces(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct sim sim;
        sim_open(&sim, 1 + (uint32_t)(seed % MAX_RANKS), MAX_OPS, seed);
        for (uint64_t n = 1; n <= sim.ops; n++)
            for (uint32_t r = 0; r < sim.ranks; r++)
                if (rng_below(&sim.rng, 6) == 0)
                    sim.script[n][r].main_status = -MOK_EDEVICE;
        sim_run(&sim);
        for (uint64_t n = 1; n <= sim.ops; n++) {
            check_verdict(&sim, n);
            for (uint32_t r = 0; r < sim.ranks; r++)
                assert_int_equal(sim.rank[r].reduced[n], sim.rank[r].result[n].status == 0);
        }
        sim_close(&sim);
    }
}

static void cancel_before_all_are_ready_fails_all_ranks_and_later_is_refused(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct sim sim;
        sim_open(&sim, 1 + (uint32_t)(seed % MAX_RANKS), MAX_OPS, seed);
        for (uint64_t n = 1; n <= sim.ops; n++)
            sim.script[n][rng_below(&sim.rng, sim.ranks)].cancel_code = -MOK_ECANCELED;
        sim_run(&sim);
        for (uint64_t n = 1; n <= sim.ops; n++)
            check_verdict(&sim, n);
        sim_close(&sim);
    }
}

static void ranks_that_disagree_get_mismatch_everywhere(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        struct sim sim;
        sim_open(&sim, 2 + (uint32_t)(seed % (MAX_RANKS - 1)), 3, seed);
        uint32_t odd = rng_below(&sim.rng, sim.ranks);
        struct mok_op_info *info = &sim.script[2][odd].info;
        if (seed % 3 == 0)
            info->kind = MOK_KIND_FORWARD + MOK_KIND_BACKWARD - info->kind;
        else if (seed % 3 == 1)
            info->context_mode = MOK_CONTEXT_RECOMPUTE;
        else
            info->flags ^= MOK_OPF_OVERWRITE_WGRAD;
        sim_run(&sim);
        check_verdict(&sim, 1);
        check_verdict(&sim, 3);
        check_verdicts_equal(&sim, 2);
        assert_int_equal(sim.rank[0].result[2].status, -MOK_EMISMATCH);
        assert_true(sim.rank[0].fault[2] < sim.ranks);
        if (sim.ranks > 2 && odd) /* with rank 0 the odd one, who is at fault is a matter of view */
            assert_int_equal(sim.rank[0].fault[2], odd);
        sim_close(&sim);
    }
}

/* Brings the rank's operation to ready. */
static void bring_to_ready(struct sim *sim, uint32_t r)
{
    for (int n = 0; n < 200 && sim->rank[r].flags->ready < 1; n++)
        sim_event(sim, r);
    assert_int_equal(sim->rank[r].flags->ready, 1);
}

static void joined_time_is_set_when_the_last_rank_is_ready_and_not_before(void **state)
{
    struct sim sim;
    bool moved;

    (void)state;
    sim_open(&sim, 3, 1, 11);
    bring_to_ready(&sim, 0);
    bring_to_ready(&sim, 1);
    for (int n = 0; n < 20; n++)
        assert_int_equal(mok_dispatch_step(&sim.rank[0].op, &sim.rank[0].view, 500, &moved), MOK_ACT_WAIT);
    assert_int_equal(sim.rank[0].op.all_ready_ns, 0);
    bring_to_ready(&sim, 2);
    assert_int_equal(mok_dispatch_step(&sim.rank[0].op, &sim.rank[0].view, 777, &moved), MOK_ACT_MAIN);
    assert_int_equal(sim.rank[0].op.all_ready_ns, 777);
    mok_dispatch_phase_done(&sim.rank[0].op, &(struct mok_op_result){ 0 });
    mok_dispatch_step(&sim.rank[0].op, &sim.rank[0].view, 999, &moved);
    assert_int_equal(sim.rank[0].op.all_ready_ns, 777);
    sim_close(&sim);
}

static void an_operation_of_one_rank_may_run_whole_and_cannot_be_cancelled_then(void **state)
{
    struct mok_op_result bad = { .status = -MOK_EEXPERT, .argument = MOK_ARG_IDS, .bad_token = 3, .bad_value = 9 };
    struct mok_dispatch_op *op;
    struct sim sim;
    bool moved;

    (void)state;
    sim_open(&sim, 1, 2, 12);
    op = &sim.rank[0].op;
    for (uint64_t n = 1; n <= 2; n++) {
        struct mok_op_info info = plain_info(n);
        mok_dispatch_begin(op, n, &info);
        assert_int_equal(mok_dispatch_step(op, &sim.rank[0].view, 1, &moved), MOK_ACT_PREPARE);
        mok_dispatch_whole(op, &sim.rank[0].view, 5);
        assert_int_equal(op->all_ready_ns, 5);
        assert_int_equal(mok_dispatch_cancel(op, &sim.rank[0].view, -MOK_ECANCELED), -MOK_EBUSY);
        assert_int_equal(mok_dispatch_step(op, &sim.rank[0].view, 6, &moved), MOK_ACT_WAIT);
        mok_dispatch_phase_done(op, n == 1 ? &bad : &(struct mok_op_result){ .rows = 7 });
        assert_int_equal(mok_dispatch_step(op, &sim.rank[0].view, 7, &moved), MOK_ACT_COMPLETE);
        assert_int_equal(op->result.status, n == 1 ? -MOK_EEXPERT : 0);
        assert_int_equal(op->result.rows, n == 1 ? 0 : 7);
        assert_int_equal(op->result.bad_token, n == 1 ? 3 : 0);
    }
    sim_close(&sim);
}

static void missing_ranks_are_named_beyond_the_first_64(void **state)
{
    static struct mok_layer_flags flags[MOK_MAX_EP];
    struct mok_dispatch_view view = { .ep = MOK_MAX_EP, .rank = 3 };
    struct mok_dispatch_op op;
    uint64_t mask[MOK_MAX_EP / 64];
    bool moved;

    (void)state;
    memset(flags, 0, sizeof(flags));
    for (uint32_t r = 0; r < MOK_MAX_EP; r++) {
        view.flags[r] = &flags[r];
        flags[r].ready = r == 5 || r == 127 || r == 3 ? 0 : 1;
    }
    struct mok_op_info info = plain_info(1);
    mok_dispatch_begin(&op, 1, &info);
    assert_int_equal(mok_dispatch_step(&op, &view, 1, &moved), MOK_ACT_PREPARE);
    mok_dispatch_phase_done(&op, &(struct mok_op_result){ 0 });
    assert_int_equal(mok_dispatch_step(&op, &view, 2, &moved), MOK_ACT_WAIT);
    assert_int_equal(mok_dispatch_missing(&op, &view, mask), 2);
    assert_int_equal(mask[0], 1ull << 5);
    assert_int_equal(mask[1], 1ull << 63);
}

/*
 * The same on real threads: plain memory stands for routing and slots, so a thread sanitizer sees any missing
 * acquire or release, and values that are too old are seen without one.
 */
#define THREAD_OPS 400
struct thread_rank {
    struct mok_dispatch_view view;
    uint32_t ranks;
    uint64_t *routing, *slots; /* [ranks], [ranks][ranks] */
    uint64_t wrong;
    uint32_t cancel_chance; /* a cancel at one in so many looks; 0: none */
    int32_t status[THREAD_OPS + 1];
    pthread_t thread;
};

static void run_phase(struct thread_rank *me, enum mok_dispatch_action action, uint64_t n)
{
    for (uint32_t p = 0; p < me->ranks; p++) {
        if (action == MOK_ACT_MAIN) {
            me->wrong += me->routing[p] != n || me->view.flags[p]->info.x_offset != n * 1000 + p;
            me->slots[p * me->ranks + me->view.rank] = n;
        }
        if (action == MOK_ACT_REDUCE)
            me->wrong += me->slots[me->view.rank * me->ranks + p] != n;
    }
    if (action == MOK_ACT_PREPARE)
        me->routing[me->view.rank] = n;
}

static void *thread_main(void *argument)
{
    struct thread_rank *me = argument;
    struct mok_dispatch_op op;
    struct rng rng = { me->view.rank + 1 };
    bool moved;

    for (uint64_t n = 1; n <= THREAD_OPS; n++) {
        struct mok_op_info info = plain_info(n);
        info.x_offset = n * 1000 + me->view.rank;
        mok_dispatch_begin(&op, n, &info);
        for (;;) {
            if (me->cancel_chance && rng_below(&rng, me->cancel_chance) == 0)
                mok_dispatch_cancel(&op, &me->view, -MOK_ECANCELED);
            enum mok_dispatch_action action = mok_dispatch_step(&op, &me->view, n, &moved);
            if (action == MOK_ACT_COMPLETE)
                break;
            if (action == MOK_ACT_WAIT) {
                sched_yield();
                continue;
            }
            run_phase(me, action, n);
            mok_dispatch_phase_done(&op, &(struct mok_op_result){ 0 });
        }
        me->status[n] = op.result.status;
    }
    return NULL;
}

#define THREAD_RANKS 3
static void run_on_threads(struct thread_rank rank[THREAD_RANKS], uint32_t cancel_chance)
{
    static struct mok_layer_flags flags[THREAD_RANKS];
    uint64_t routing[THREAD_RANKS] = { 0 }, slots[THREAD_RANKS * THREAD_RANKS] = { 0 };

    memset(flags, 0, sizeof(flags));
    for (uint32_t r = 0; r < THREAD_RANKS; r++) {
        rank[r] = (struct thread_rank){ .view = { .ep = THREAD_RANKS, .rank = r },
                                        .ranks = THREAD_RANKS,
                                        .routing = routing,
                                        .slots = slots,
                                        .cancel_chance = cancel_chance };
        for (uint32_t p = 0; p < THREAD_RANKS; p++)
            rank[r].view.flags[p] = &flags[p];
    }
    for (uint32_t r = 0; r < THREAD_RANKS; r++)
        assert_int_equal(pthread_create(&rank[r].thread, NULL, thread_main, &rank[r]), 0);
    for (uint32_t r = 0; r < THREAD_RANKS; r++)
        pthread_join(rank[r].thread, NULL);
    for (uint32_t r = 0; r < THREAD_RANKS; r++) {
        assert_int_equal(rank[r].wrong, 0);
        assert_int_equal(flags[r].ready, THREAD_OPS);
        assert_int_equal(flags[r].pushed, THREAD_OPS);
    }
}

static void ranks_on_threads_see_each_others_memory_in_order(void **state)
{
    static struct thread_rank rank[THREAD_RANKS];

    (void)state;
    run_on_threads(rank, 0);
    for (uint32_t r = 0; r < THREAD_RANKS; r++)
        for (uint64_t n = 1; n <= THREAD_OPS; n++)
            assert_int_equal(rank[r].status[n], 0);
}

static void a_cancel_that_races_with_the_last_join_ends_the_same_way_on_all_ranks(void **state)
{
    static struct thread_rank rank[THREAD_RANKS];

    (void)state;
    run_on_threads(rank, 20);
    for (uint64_t n = 1; n <= THREAD_OPS; n++)
        for (uint32_t r = 0; r < THREAD_RANKS; r++) {
            assert_int_equal(rank[r].status[n], rank[0].status[n]);
            assert_true(rank[r].status[n] == 0 || rank[r].status[n] == -MOK_ECANCELED);
        }
}

static void a_cancel_of_a_rank_that_waits_takes_effect_when_the_missing_rank_joins(void **state)
{
    struct sim sim;

    (void)state;
    sim_open(&sim, 3, 2, 12);
    bring_to_ready(&sim, 0);
    bring_to_ready(&sim, 2);
    assert_int_equal(mok_dispatch_cancel(&sim.rank[2].op, &sim.rank[2].view, -MOK_ECANCELED), 0);
    assert_int_equal(sim.rank[2].flags->info.status, 0); /* others may have read it */
    sim.script[1][2].canceled = true;
    bring_to_ready(&sim, 1);
    assert_int_equal(mok_dispatch_cancel(&sim.rank[0].op, &sim.rank[0].view, -MOK_ECANCELED), -MOK_EBUSY);
    sim_run(&sim);
    check_verdict(&sim, 1);
    assert_int_equal(sim.rank[0].result[1].status, -MOK_ECANCELED);
    assert_int_equal(sim.rank[0].result[1].argument, MOK_ARG_RANKS);
    assert_int_equal(sim.rank[0].result[1].bad_value, 2);
    assert_int_equal(sim.rank[0].fault[1], 2);
    check_verdict(&sim, 2);
    assert_int_equal(sim.rank[0].result[2].status, 0);
    sim_close(&sim);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(well_ranks_finish_in_any_interleaving),
        cmocka_unit_test(unwell_ranks_fail_the_operation_alike_everywhere_and_the_next_one_runs),
        cmocka_unit_test(a_rank_whose_main_fails_fails_all_and_nobody_reduces),
        cmocka_unit_test(cancel_before_all_are_ready_fails_all_ranks_and_later_is_refused),
        cmocka_unit_test(ranks_that_disagree_get_mismatch_everywhere),
        cmocka_unit_test(joined_time_is_set_when_the_last_rank_is_ready_and_not_before),
        cmocka_unit_test(an_operation_of_one_rank_may_run_whole_and_cannot_be_cancelled_then),
        cmocka_unit_test(missing_ranks_are_named_beyond_the_first_64),
        cmocka_unit_test(a_cancel_of_a_rank_that_waits_takes_effect_when_the_missing_rank_joins),
        cmocka_unit_test(ranks_on_threads_see_each_others_memory_in_order),
        cmocka_unit_test(a_cancel_that_races_with_the_last_join_ends_the_same_way_on_all_ranks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
