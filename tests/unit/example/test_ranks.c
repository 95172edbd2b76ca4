/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rank processes of one job: sums are in rank order, and a rank that dies ends the others in good time.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "comm.h"
#include "launch.h"
#include "model.h"
#include "mok/types.h"

enum { RANKS = 3, FLOATS = 1001 };

static time_t now_s(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec;
}

static float value_of(unsigned rank, unsigned round, size_t i)
{
    return (float)(rank + 1) * 0.1f + (float)i / 3 + (float)round;
}

/* Many rounds back to back, so that a rank that is a round ahead would be noticed. */
static int sum_rank(unsigned rank, void *argument)
{
    struct comm *comm = argument;
    float data[FLOATS];

    for (unsigned round = 0; round < 50; round++) {
        double doubles[2] = { rank, round };

        for (size_t i = 0; i < FLOATS; i++)
            data[i] = value_of(rank, round, i);
        if (comm_sum(comm, rank, data, FLOATS) < 0 || comm_sum_double(comm, rank, doubles, 2) < 0)
            return 1;
        for (size_t i = 0; i < FLOATS; i++) {
            float expected = value_of(0, round, i) + value_of(1, round, i);

            expected += value_of(2, round, i);
            if (data[i] != expected)
                return 1;
        }
        if (doubles[0] != 3 || doubles[1] != 3.0 * round)
            return 1;
    }
    return 0;
}

static void sums_are_added_in_rank_order_on_every_rank(void **state)
{
    struct comm *comm;

    (void)state;
    assert_int_equal(comm_create(RANKS, FLOATS, 1, &comm), 0);
    assert_int_equal(launch(RANKS, "test", comm, sum_rank, comm), 0);
    comm_destroy(comm);
}

static int dying_rank(unsigned rank, void *argument)
{
    struct comm *comm = argument;

    if (rank == 1)
        raise(SIGKILL);
    return comm_barrier(comm) == -MOK_EPEER ? 1 : 0;
}

static void a_killed_rank_ends_the_others_at_their_barrier(void **state)
{
    struct comm *comm;
    time_t start = now_s();

    (void)state;
    assert_int_equal(comm_create(RANKS, FLOATS, 1, &comm), 0);
    assert_int_equal(launch(RANKS, "test", comm, dying_rank, comm), 1);
    assert_true(now_s() - start <= 2);
    assert_int_equal(comm_aborted(comm), 1);
    comm_destroy(comm);
}

static int failing_rank(unsigned rank, void *argument)
{
    struct comm *comm = argument;

    return rank == 2 ? 1 : comm_barrier(comm) < 0;
}

static void a_rank_that_fails_makes_the_job_fail(void **state)
{
    struct comm *comm;

    (void)state;
    assert_int_equal(comm_create(RANKS, FLOATS, 1, &comm), 0);
    assert_int_equal(launch(RANKS, "test", comm, failing_rank, comm), 1);
    assert_int_equal(comm_aborted(comm), 2);
    comm_destroy(comm);
}

/* Rank 0 sends SIGTERM to the launcher; all ranks see the request in the same round. */
static int stopping_rank(unsigned rank, void *argument)
{
    struct comm *comm = argument;
    double stop = 0;

    if (rank == 0)
        kill(getppid(), SIGTERM);
    while (stop == 0) {
        struct timespec pause = { .tv_nsec = 1000000 };

        nanosleep(&pause, NULL);
        stop = comm_stop_requested(comm);
        if (comm_sum_double(comm, rank, &stop, 1) < 0)
            return 1;
    }
    return LAUNCH_INTERRUPTED;
}

static void sigterm_of_the_launcher_is_a_stop_in_good_order(void **state)
{
    struct comm *comm;

    (void)state;
    assert_int_equal(comm_create(RANKS, FLOATS, 1, &comm), 0);
    assert_int_equal(launch(RANKS, "test", comm, stopping_rank, comm), LAUNCH_INTERRUPTED);
    assert_int_equal(comm_aborted(comm), -1);
    comm_destroy(comm);
}

static uint64_t dense_hash(struct model *model)
{
    uint64_t hash = 1;

    assert_int_equal(model_hash_dense(model, &hash), 0);
    return hash;
}

static uint64_t expert_hash(struct model *model, unsigned layer, unsigned expert)
{
    uint64_t hash = 1;

    assert_int_equal(model_hash_expert(model, layer, expert, &hash), 0);
    return hash;
}

static void initial_parameters_do_not_depend_on_the_number_of_ranks(void **state)
{
    struct model_shape shape = { .ranks = 1,
                                 .hidden = 16,
                                 .intermediate = 32,
                                 .experts = 4,
                                 .topk = 2,
                                 .layers = 2,
                                 .window = 2,
                                 .tokens = 1,
                                 .micro_batches = 1 };
    struct model *one, *two;

    (void)state;
    assert_int_equal(model_create(&shape, &backend_host, &one), 0);
    model_initialise(one, 9);
    shape.ranks = 2;
    shape.rank = 1;
    assert_int_equal(model_create(&shape, &backend_host, &two), 0);
    model_initialise(two, 9);
    assert_true(dense_hash(one) == dense_hash(two));
    assert_int_equal(model_dense(one).count, model_dense_count(&shape));
    for (unsigned l = 0; l < 2; l++)
        for (unsigned e = 0; e < 2; e++)
            assert_true(expert_hash(one, l, 2 + e) == expert_hash(two, l, e));
    assert_true(expert_hash(one, 0, 0) != expert_hash(one, 0, 1));
    model_free(one);
    model_free(two);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sums_are_added_in_rank_order_on_every_rank),
        cmocka_unit_test(a_killed_rank_ends_the_others_at_their_barrier),
        cmocka_unit_test(a_rank_that_fails_makes_the_job_fail),
        cmocka_unit_test(sigterm_of_the_launcher_is_a_stop_in_good_order),
        cmocka_unit_test(initial_parameters_do_not_depend_on_the_number_of_ranks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
