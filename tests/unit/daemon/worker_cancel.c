/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks that cancel an operation while others join it: whatever the timing, all come to the same end. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "dispatch.h"
#include "mok/types.h"

enum { RANKS = 3, ROUNDS = 4000 };

static struct mok_layer_flags flags[RANKS];
static int verdict[RANKS][ROUNDS];
static int ran[RANKS][ROUNDS];
static uint32_t fault[RANKS][ROUNDS];

static struct mok_dispatch_view view_of(uint32_t rank)
{
    struct mok_dispatch_view view = { .ep = RANKS, .rank = rank };

    for (uint32_t r = 0; r < RANKS; r++)
        view.flags[r] = &flags[r];
    return view;
}

static uint32_t next_random(uint32_t *seed)
{
    *seed = *seed * 1664525u + 1013904223u;
    return *seed >> 16;
}

static void run_one(const struct mok_dispatch_view *view, unsigned round, uint32_t *seed)
{
    const struct mok_op_info info = { .kind = MOK_KIND_FORWARD };
    const struct mok_op_result fine = { 0 };
    struct mok_dispatch_op op;
    bool moved, wants = next_random(seed) % 4 == 0;
    unsigned patience = next_random(seed) % 8;

    mok_dispatch_begin(&op, round + 1, &info);
    for (unsigned looks = 0;; looks++) {
        switch (mok_dispatch_step(&op, view, 1, &moved)) {
        case MOK_ACT_WAIT:
            if (wants && op.state == MOK_ST_READY && looks >= patience) {
                mok_dispatch_cancel(&op, view, -MOK_ECANCELED);
                wants = false;
            }
            sched_yield();
            break;
        case MOK_ACT_MAIN:
            ran[view->rank][round] = 1;
            mok_dispatch_phase_done(&op, &fine);
            break;
        case MOK_ACT_PREPARE:
        case MOK_ACT_REDUCE:
            mok_dispatch_phase_done(&op, &fine);
            break;
        case MOK_ACT_COMPLETE:
            verdict[view->rank][round] = op.result.status;
            fault[view->rank][round] = op.fault_rank;
            return;
        }
    }
}

static void *run_rank(void *cookie)
{
    struct mok_dispatch_view view = view_of((uint32_t)(uintptr_t)cookie);
    uint32_t seed = 77u * (view.rank + 1);

    for (unsigned round = 0; round < ROUNDS; round++)
        run_one(&view, round, &seed);
    return NULL;
}

static void ranks_that_race_agree_on_every_operation(void **state)
{
    pthread_t thread[RANKS];
    unsigned cancelled = 0;
    (void)state;

    memset(flags, 0, sizeof(flags));
    for (uintptr_t r = 0; r < RANKS; r++)
        assert_int_equal(pthread_create(&thread[r], NULL, run_rank, (void *)r), 0);
    for (unsigned r = 0; r < RANKS; r++)
        pthread_join(thread[r], NULL);
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned r = 0; r < RANKS; r++) {
            assert_int_equal(verdict[r][round], verdict[0][round]);
            assert_int_equal(fault[r][round], fault[0][round]);
            assert_int_equal(ran[r][round], verdict[0][round] == 0);
        }
        cancelled += verdict[0][round] == -MOK_ECANCELED;
    }
    /* Both ends are reached, or nothing was tested. */
    assert_true(cancelled > 0 && cancelled < ROUNDS);
}

/* Both ranks as far as they get by themselves, with PREPARE done. */
static void make_ready(struct mok_dispatch_op *op, const struct mok_dispatch_view *view)
{
    const struct mok_op_info info = { .kind = MOK_KIND_FORWARD };
    const struct mok_op_result fine = { 0 };
    bool moved;

    mok_dispatch_begin(op, 1, &info);
    assert_int_equal(mok_dispatch_step(op, view, 1, &moved), MOK_ACT_PREPARE);
    mok_dispatch_phase_done(op, &fine);
    mok_dispatch_step(op, view, 1, &moved);
}

static void a_rank_waits_while_another_asks_and_does_as_that_says(void **state)
{
    struct mok_dispatch_view view[2] = { view_of(0), view_of(1) };
    struct mok_dispatch_op op[2];
    bool moved;
    (void)state;

    for (unsigned answer = MOK_CANCEL_GRANTED; answer <= MOK_CANCEL_REFUSED; answer++) {
        memset(flags, 0, sizeof(flags));
        view[0].ep = view[1].ep = 2;
        make_ready(&op[0], &view[0]);
        flags[0].cancel = 1 << 2 | MOK_CANCEL_ASKED;
        make_ready(&op[1], &view[1]);
        assert_int_equal(op[1].state, MOK_ST_READY);
        assert_int_equal(mok_dispatch_step(&op[1], &view[1], 1, &moved), MOK_ACT_WAIT);
        assert_int_equal(op[1].all_ready_ns, 0);
        flags[0].cancel = 1 << 2 | answer;
        enum mok_dispatch_action action = mok_dispatch_step(&op[1], &view[1], 1, &moved);
        assert_int_equal(action, answer == MOK_CANCEL_GRANTED ? MOK_ACT_WAIT : MOK_ACT_MAIN);
        assert_int_equal(op[1].result.status, answer == MOK_CANCEL_GRANTED ? -MOK_ECANCELED : 0);
    }
}

static void a_cancel_is_refused_once_all_are_ready_whoever_has_noticed(void **state)
{
    struct mok_dispatch_view view[2] = { view_of(0), view_of(1) };
    struct mok_dispatch_op op[2];
    bool moved;
    (void)state;

    memset(flags, 0, sizeof(flags));
    view[0].ep = view[1].ep = 2;
    make_ready(&op[0], &view[0]);
    make_ready(&op[1], &view[1]);
    assert_int_equal(op[1].state, MOK_ST_MAIN);
    assert_int_equal(mok_dispatch_cancel(&op[1], &view[1], -MOK_ECANCELED), -MOK_EBUSY);
    assert_int_equal(op[0].state, MOK_ST_READY);
    assert_int_equal(mok_dispatch_cancel(&op[0], &view[0], -MOK_ECANCELED), -MOK_EBUSY);
    assert_int_equal(mok_dispatch_step(&op[0], &view[0], 1, &moved), MOK_ACT_MAIN);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_waits_while_another_asks_and_does_as_that_says),
        cmocka_unit_test(a_cancel_is_refused_once_all_are_ready_whoever_has_noticed),
        cmocka_unit_test(ranks_that_race_agree_on_every_operation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
