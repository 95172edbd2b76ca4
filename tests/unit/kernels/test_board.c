/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dispatcher's state machine over a board: copies of each rank happen in its order, at any time, in pieces, mixed
 * with those of the others. Whatever happens, all ranks come to the same verdict, and nobody runs what was cancelled.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "board.h"
#include "mok/ring_abi.h"

#define RANKS 3u
#define OPS 6u
#ifdef MOK_SANITIZED /* one thread's arithmetic */
#define SEEDS 300
#else
#define SEEDS 2000
#endif
#define QUEUE 64u
#define PIECES 8u /* of a slot: a copy can be seen between any two */

/* A copy of a rank's stream: a post of a slot, or one reading of a look. */
struct copy {
    enum { POST, FIRST, SECOND } what;
    struct mok_board_slot slot;
    uint32_t left; /* pieces; they go in an order of their own */
    uint32_t order[RANKS * PIECES];
};

struct sim;
struct rank {
    struct sim *sim;
    struct mok_board board;
    struct mok_dispatch_view view;
    struct mok_dispatch_op op;
    struct copy queue[QUEUE];
    uint32_t head, tail;
    struct mok_board_slot reading[2][RANKS];
    bool looking, looked; /* a look is in the queue; its readings are there */
    bool asked;           /* for a cancel of this operation */
    uint64_t seq;         /* of the operation; 0: none yet */
    bool ran[OPS + 1], granted[OPS + 1];
    int32_t status[OPS + 1];
};

struct sim {
    uint64_t rng;
    struct mok_board_slot memory[RANKS];
    struct rank rank[RANKS];
    unsigned cancelled, refused, ran;
};

static uint32_t below(struct sim *sim, uint32_t bound)
{
    sim->rng ^= sim->rng << 13;
    sim->rng ^= sim->rng >> 7;
    sim->rng ^= sim->rng << 17;
    return (uint32_t)((sim->rng >> 11) % bound);
}

/* ------------------------------------------------------------------ a device's stream */

static void push(struct rank *rank, int what, const struct mok_board_slot *slot)
{
    struct copy *copy = &rank->queue[rank->tail++ % QUEUE];
    uint32_t pieces = what == POST ? PIECES : RANKS * PIECES;

    assert_true(rank->tail - rank->head < QUEUE);
    *copy = (struct copy){ .what = what, .left = pieces };
    if (slot)
        copy->slot = *slot;
    bool mixed = below(rank->sim, 2);
    uint32_t unit = mixed ? 1 : PIECES; /* what keeps together */
    for (uint32_t i = 0; i < pieces / unit; i++) {
        uint32_t other = below(rank->sim, i + 1);
        for (uint32_t j = 0; j < unit; j++) {
            copy->order[i * unit + j] = copy->order[other * unit + j];
            copy->order[other * unit + j] = i * unit + j;
        }
    }
}

/* One piece of the oldest copy; false: there is none. */
static bool move(struct rank *rank)
{
    const size_t bytes = sizeof(struct mok_board_slot) / PIECES;
    struct copy *copy = &rank->queue[rank->head % QUEUE];

    if (rank->head == rank->tail)
        return false;
    uint32_t piece = copy->order[--copy->left];
    if (copy->what == POST)
        memcpy((char *)&rank->sim->memory[rank->board.rank] + piece * bytes, (char *)&copy->slot + piece * bytes,
               bytes);
    else
        memcpy((char *)rank->reading[copy->what - FIRST] + piece * bytes, (char *)rank->sim->memory + piece * bytes,
               bytes);
    if (copy->left > 0)
        return true;
    rank->head++;
    if (copy->what == SECOND) {
        rank->looking = false;
        rank->looked = true;
    }
    return true;
}

static void post(struct rank *rank)
{
    struct mok_board_slot slot;

    mok_board_post(&rank->board, &slot);
    push(rank, POST, &slot);
}

static void look(struct rank *rank)
{
    if (rank->looking)
        return;
    rank->looking = true;
    rank->looked = false;
    push(rank, FIRST, NULL);
    push(rank, SECOND, NULL);
}

static bool take(struct rank *rank)
{
    bool moved;

    if (!rank->looked)
        return false;
    rank->looked = false;
    return mok_board_take(&rank->board, rank->reading[0], rank->reading[1], &moved);
}

/* As the worker does it; meanwhile the others' copies go on. */
static int settle(void *cookie)
{
    struct rank *rank = cookie;
    uint32_t slow = 1 + below(rank->sim, 20); /* the others */
    bool fresh = false;

    post(rank);
    for (;;) {
        if (take(rank) && fresh)
            return 0;
        if (!rank->looking) {
            fresh = true;
            look(rank);
        }
        move(rank);
        if (below(rank->sim, slow) == 0)
            move(&rank->sim->rank[below(rank->sim, RANKS)]);
    }
}

/* ------------------------------------------------------------------ a rank */

static void end_op(struct rank *rank)
{
    rank->status[rank->seq] = rank->op.result.status;
    rank->asked = false;
    rank->seq++;
    if (rank->seq > OPS)
        return;
    mok_dispatch_begin(
        &rank->op, rank->seq,
        &(struct mok_op_info){ .kind = MOK_KIND_FORWARD, .x_offset = rank->seq * 1000 + rank->board.rank });
}

static void run_main(struct rank *rank)
{
    for (uint32_t r = 0; r < RANKS; r++)
        assert_int_equal(rank->view.flags[r]->info.x_offset, rank->seq * 1000 + r);
    rank->ran[rank->seq] = true;
    rank->sim->ran++;
}

static void step(struct rank *rank)
{
    const struct mok_op_result well = { 0 };
    bool moved = false;

    take(rank);
    if (rank->seq > OPS)
        return;
    enum mok_dispatch_action action = mok_dispatch_step(&rank->op, &rank->view, 1, &moved);
    if (moved)
        post(rank);
    switch (action) {
    case MOK_ACT_WAIT:
        look(rank);
        return;
    case MOK_ACT_COMPLETE:
        end_op(rank);
        return;
    case MOK_ACT_MAIN:
        run_main(rank);
        break;
    case MOK_ACT_PREPARE:
    case MOK_ACT_REDUCE:
        break;
    }
    mok_dispatch_phase_done(&rank->op, &well);
}

static void cancel(struct rank *rank)
{
    if (rank->seq > OPS || rank->asked || rank->op.state > MOK_ST_READY)
        return;
    rank->asked = true;
    int r = mok_dispatch_cancel(&rank->op, &rank->view, -MOK_ECANCELED);
    post(rank);
    rank->granted[rank->seq] = r == 0;
    rank->sim->cancelled += r == 0;
    rank->sim->refused += r < 0;
}

static bool finished(const struct sim *sim)
{
    for (uint32_t r = 0; r < RANKS; r++)
        if (sim->rank[r].seq <= OPS)
            return false;
    return true;
}

static void begin(struct sim *sim, uint64_t seed)
{
    memset(sim->memory, 0, sizeof(sim->memory));
    memset(sim->rank, 0, sizeof(sim->rank));
    sim->rng = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;
    for (uint32_t r = 0; r < RANKS; r++) {
        struct rank *rank = &sim->rank[r];
        rank->sim = sim;
        mok_board_begin(&rank->board, RANKS, r, &rank->view);
        rank->view.settle = settle;
        rank->view.cookie = rank;
        end_op(rank);
    }
}

static void play(struct sim *sim, uint64_t seed)
{
    uint32_t speed[RANKS];

    begin(sim, seed);
    for (uint32_t r = 0; r < RANKS; r++)
        speed[r] = 1 + below(sim, 60);
    for (unsigned turn = 0; !finished(sim); turn++) {
        struct rank *rank = &sim->rank[below(sim, RANKS)];
        assert_true(turn < 10000000);
        if (below(sim, 4) == 0)
            step(rank);
        if (below(sim, 150) == 0)
            cancel(rank);
        for (uint32_t i = 0; i < speed[rank->board.rank]; i++)
            move(rank);
    }
}

static void all_ranks_agree_and_nobody_runs_what_was_cancelled(void **state)
{
    struct sim *sim = calloc(1, sizeof(*sim));

    (void)state;
    assert_non_null(sim);
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        play(sim, seed);
        for (uint64_t n = 1; n <= OPS; n++) {
            bool granted = false;
            for (uint32_t r = 0; r < RANKS; r++)
                granted |= sim->rank[r].granted[n];
            for (uint32_t r = 0; r < RANKS; r++) {
                if (sim->rank[r].ran[n] == granted || sim->rank[r].status[n] != (granted ? -MOK_ECANCELED : 0))
                    fail_msg("seed %llu, operation %llu, rank %u: cancelled %d, ran %d, status %d",
                             (unsigned long long)seed, (unsigned long long)n, r, granted, sim->rank[r].ran[n],
                             sim->rank[r].status[n]);
            }
        }
    }
    printf("%u ran, %u cancels granted, %u refused\n", sim->ran, sim->cancelled, sim->refused);
    assert_true(sim->ran > SEEDS / 2 && sim->cancelled > SEEDS / 2 && sim->refused > SEEDS / 20);
    free(sim);
}

/* All at once. */
static void drain(struct rank *rank)
{
    while (move(rank))
        ;
}

/* A reading that passes one slot before a cancel is asked for there, and another after its rank has become ready. */
static void a_reading_that_a_cancel_overtakes_runs_nothing(void **state)
{
    struct sim *sim = calloc(1, sizeof(*sim));
    struct rank *asks = &sim->rank[0], *reads = &sim->rank[1], *late = &sim->rank[2];
    const size_t slot = sizeof(sim->memory[0]);
    bool moved;

    (void)state;
    assert_non_null(sim);
    begin(sim, 1);
    for (int i = 0; i < 2; i++) { /* PREPARE, then ready */
        step(asks);
        step(reads);
    }
    drain(asks);
    drain(reads);
    memcpy(reads->reading[0], sim->memory, 2 * slot);
    cancel(asks);
    assert_true(asks->granted[1]);
    step(late);
    step(late);
    drain(late);
    drain(asks);
    memcpy(&reads->reading[0][2], &sim->memory[2], slot);
    memcpy(reads->reading[1], sim->memory, sizeof(sim->memory));
    assert_true(mok_board_take(&reads->board, reads->reading[0], reads->reading[1], &moved));
    assert_int_equal(mok_dispatch_missing(&reads->op, &reads->view, (uint64_t[MOK_MAX_EP / 64]){ 0 }), 0);
    assert_true(mok_dispatch_step(&reads->op, &reads->view, 1, &moved) != MOK_ACT_MAIN);
    assert_int_equal(reads->op.result.status, -MOK_ECANCELED);
    free(sim);
}

static void a_look_that_is_not_whole_is_thrown_away(void **state)
{
    struct mok_board board = { 0 };
    struct mok_dispatch_view view = { 0 };
    struct mok_board_slot slot[2], whole;
    bool moved;

    (void)state;
    mok_board_begin(&board, 2, 0, &view);
    memset(slot, 0, sizeof(slot));
    assert_true(mok_board_take(&board, slot, slot, &moved));
    assert_false(moved);
    board.own.ready = 1;
    mok_board_post(&board, &whole);
    assert_false(mok_board_take(&board, slot, slot, &moved)); /* our own is not there yet */
    slot[0] = whole;
    assert_true(mok_board_take(&board, slot, slot, &moved));
    assert_true(moved);
    assert_int_equal(view.flags[0]->ready, 1);
    for (size_t byte = 0; byte < sizeof(whole); byte++) {
        slot[0] = whole;
        ((uint8_t *)&slot[0])[byte] ^= 0x40;
        assert_false(mok_board_take(&board, slot, slot, &moved));
    }
    slot[0] = whole;
    ((uint8_t *)&slot[1])[100] = 1; /* of one who has not posted */
    assert_false(mok_board_take(&board, slot, slot, &moved));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(all_ranks_agree_and_nobody_runs_what_was_cancelled),
        cmocka_unit_test(a_reading_that_a_cancel_overtakes_runs_nothing),
        cmocka_unit_test(a_look_that_is_not_whole_is_thrown_away),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
