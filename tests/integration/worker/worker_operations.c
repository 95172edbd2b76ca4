/* SPDX-License-Identifier: Apache-2.0 */
/* Operations on real workers: that they run, in which order, what they say, and how they are cancelled. */
#include "job.h"

#include <unistd.h>

#include "dispatch.h"
#include "mok/types.h"

struct pair {
    struct worker worker[2];
    struct worker *of[2];
};

static void pair_start(struct pair *pair, const struct worker_options *options)
{
    for (unsigned i = 0; i < 2; i++) {
        worker_start(&pair->worker[i], options);
        pair->of[i] = &pair->worker[i];
    }
}

static void pair_end(struct pair *pair)
{
    worker_end(&pair->worker[0]);
    worker_end(&pair->worker[1]);
}

/* ------------------------------------------------------------------ sleeping and polling */

static void round_trips(uint64_t poll_us, unsigned rounds)
{
    const struct worker_options options = { .poll_us = poll_us };
    struct worker worker;
    struct client client;

    worker_start(&worker, &options);
    /* The counters wrap around on the way. */
    client_open(&client, &worker, harness_id(), 4, 0xFFFFFFF0u);
    for (unsigned i = 0; i < rounds; i++) {
        client_expect_alive(&client);
        if (i % 16 == 0)
            usleep(300); /* both asleep */
    }
    assert_int_equal(client_close(&client), 0);
    client_free(&client);
    worker_end(&worker);
}

static void a_worker_that_sleeps_is_woken_by_every_submission(void **state)
{
    (void)state;
    round_trips(0, 500);
}

static void a_worker_that_polls_needs_no_wake_up(void **state)
{
    (void)state;
    round_trips(1000000, 500);
}

static void a_worker_between_the_two_misses_nothing(void **state)
{
    (void)state;
    round_trips(20, 2000);
}

static uint32_t completions_of(const struct client *client)
{
    return __atomic_load_n(&client->end.header->cq_tail, __ATOMIC_ACQUIRE);
}

static void more_submissions_than_completions_fit_wait_for_the_client(void **state)
{
    const struct mok_sqe nop = { .opcode = MOK_OP_NOP };
    struct worker worker;
    struct client client;
    struct mok_sqe *entry;
    struct mok_cqe cqe;
    (void)state;

    worker_start(&worker, NULL);
    client_open(&client, &worker, harness_id(), 4, 0);
    for (uint64_t i = 0; i < 12; i++) {
        struct mok_sqe sqe = nop;
        sqe.user_data = i;
        /* 8 fit the completions, 4 more the submissions. */
        while (mok_queue_client_reserve(&client.end, &entry) == -MOK_EAGAIN)
            usleep(100);
        client_submit(&client, &sqe);
    }
    for (int waited = 0; waited < HARNESS_WAIT_MS && completions_of(&client) < 8; waited++)
        usleep(1000);
    usleep(20000); /* and no more than those */
    assert_int_equal(completions_of(&client), 8);
    for (uint64_t i = 0; i < 12; i++)
        client_expect(&client, i, 0);
    assert_false(client_reap(&client, &cqe, 10));
    client_free(&client);
    worker_end(&worker);
}

/* ------------------------------------------------------------------ order */

static void two_sleeping_workers_lose_no_wake_up_between_them(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    for (uint64_t i = 1; i <= 200; i++) {
        job_submit_forward(&job, (uint32_t)(i % 2), i);
        if (i % 8 == 0)
            usleep(500);
        job_submit_forward(&job, (uint32_t)(1 - i % 2), i);
        client_expect(&job.client[0], i, 0);
        client_expect(&job.client[1], i, 0);
    }
    job_close(&job);
    pair_end(&pair);
}

static void operations_of_a_layer_complete_in_the_order_of_their_submission(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    for (uint64_t i = 0; i < 8; i++) {
        job_submit_forward(&job, 0, 2 * i);
        job_submit_backward(&job, 0, 2 * i + 1);
    }
    for (uint64_t i = 0; i < 8; i++) {
        job_submit_forward(&job, 1, 2 * i);
        job_submit_backward(&job, 1, 2 * i + 1);
    }
    for (uint32_t rank = 0; rank < 2; rank++)
        for (uint64_t i = 0; i < 16; i++)
            client_expect(&job.client[rank], i, 0);
    job_close(&job);
    pair_end(&pair);
}

static void two_jobs_in_opposite_order_do_not_wait_for_each_other(void **state)
{
    const struct worker_options options = { .chaos_delay_us = 100 };
    struct pair pair;
    struct job a, b;
    (void)state;

    pair_start(&pair, &options);
    job_open(&a, pair.of, 2, &job_small);
    job_open(&b, pair.of, 2, &job_small);
    for (uint64_t i = 1; i <= 20; i++) {
        job_submit_forward(&a, 0, i);
        job_submit_forward(&b, 0, i);
        job_submit_forward(&b, 1, i);
        job_submit_forward(&a, 1, i);
        for (uint32_t rank = 0; rank < 2; rank++) {
            client_expect(&a.client[rank], i, 0);
            client_expect(&b.client[rank], i, 0);
        }
    }
    job_close(&a);
    job_close(&b);
    pair_end(&pair);
}

static void a_job_whose_peer_is_late_holds_up_nobody(void **state)
{
    struct pair pair;
    struct job late, other;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&late, pair.of, 2, &job_small);
    job_open(&other, pair.of, 1, &job_small);
    job_submit_forward(&late, 0, 1);
    assert_int_equal(op_await(&late.client[0], 1, MOK_ST_READY), 1u << 1);
    for (uint64_t i = 1; i <= 5; i++) {
        job_submit_forward(&other, 0, i);
        client_expect(&other.client[0], i, 0);
    }
    job_submit_forward(&late, 1, 2);
    client_expect(&late.client[0], 1, 0);
    client_expect(&late.client[1], 2, 0);
    job_close(&late);
    job_close(&other);
    pair_end(&pair);
}

/* ------------------------------------------------------------------ what a completion says */

static void a_completion_says_what_ran_and_how_many_rows(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    job.rank_tokens[0] = 5;
    job.rank_tokens[1] = 3;
    /* All ids are 0, so that all rows are of rank 0's first expert. */
    job_submit_forward(&job, 0, 1);
    job_submit_forward(&job, 1, 1);
    struct mok_cqe first = client_expect(&job.client[0], 1, 0), second = client_expect(&job.client[1], 1, 0);
    assert_int_equal(first.rows, (5 + 3) * 2);
    assert_int_equal(second.rows, 0);
    assert_int_equal(first.engine, MOK_DEVICE_HOST);
    assert_int_equal(first.precision, MOK_BF16);
    assert_int_equal(first.argument, 0);
    assert_true(first.device_ns > 0);
    job_close(&job);
    pair_end(&pair);
}

static void a_bad_expert_fails_the_operation_on_all_ranks_and_names_the_slot(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    int32_t *ids = job_part(&job, 1, JOB_IDS);
    ids[3 * 2 + 1] = 4; /* token 3, slot 1; E is 4 */
    job_submit_forward(&job, 0, 1);
    job_submit_forward(&job, 1, 1);
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct mok_cqe cqe = client_expect(&job.client[rank], 1, -MOK_EEXPERT);
        assert_int_equal(cqe.argument, MOK_ARG_IDS);
        assert_int_equal(cqe.value, 4);
        assert_int_equal(cqe.bound, 4);
        assert_int_equal(cqe.detail, 1ull << 48 | 3 << 8 | 1);
    }
    ids[3 * 2 + 1] = -1;
    job_submit_forward(&job, 0, 2);
    job_submit_forward(&job, 1, 2);
    client_expect(&job.client[0], 2, 0);
    client_expect(&job.client[1], 2, 0);
    job_close(&job);
    pair_end(&pair);
}

static void ranks_that_disagree_are_all_told(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    job_submit_forward(&job, 0, 1);
    job_submit_forward(&job, 1, 1);
    client_expect(&job.client[0], 1, 0);
    client_expect(&job.client[1], 1, 0);
    job_submit_forward(&job, 0, 2);
    job_submit_backward(&job, 1, 2);
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct mok_cqe cqe = client_expect(&job.client[rank], 2, -MOK_EMISMATCH);
        assert_int_equal(cqe.argument, MOK_ARG_OPCODE);
        assert_int_equal(cqe.detail, 1);
    }
    struct mok_sqe plain = job_forward(&job, 0, 3), adds = job_forward(&job, 1, 3);
    adds.flags = MOK_SQE_ACCUMULATE_OUT;
    client_submit(&job.client[0], &plain);
    client_submit(&job.client[1], &adds);
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_int_equal(client_expect(&job.client[rank], 3, -MOK_EMISMATCH).argument, MOK_ARG_FLAGS);
    job_close(&job);
    pair_end(&pair);
}

static void a_submission_that_cannot_run_is_refused_and_does_not_count(void **state)
{
    struct pair pair;
    struct job job, other;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    job_open(&other, pair.of, 2, &job_small);

    struct mok_sqe sqe = job_forward(&job, 0, 1);
    sqe.tokens = 17;
    client_submit(&job.client[0], &sqe);
    struct mok_cqe cqe = client_expect(&job.client[0], 1, -MOK_ERANGE);
    assert_int_equal(cqe.argument, MOK_ARG_TOKENS);
    assert_int_equal(cqe.value, 17);
    assert_int_equal(cqe.bound, 16);

    sqe = job_forward(&job, 0, 2);
    sqe.layer = other.layer.id;
    client_submit(&job.client[0], &sqe);
    assert_int_equal(client_expect(&job.client[0], 2, -MOK_ENOENT).argument, MOK_ARG_LAYER);

    sqe = job_forward(&job, 0, 3);
    sqe.region[MOK_REGION_OUT].buffer = other.own[0].id;
    client_submit(&job.client[0], &sqe);
    assert_int_equal(client_expect(&job.client[0], 3, -MOK_EBUFFER).argument, MOK_ARG_OUT);

    sqe = job_forward(&job, 0, 4);
    sqe.region[MOK_REGION_X].buffer = other.x.id;
    client_submit(&job.client[0], &sqe);
    assert_int_equal(client_expect(&job.client[0], 4, -MOK_EBUFFER).argument, MOK_ARG_X);

    sqe = job_forward(&job, 0, 5);
    memset(&sqe, 0xff, offsetof(struct mok_sqe, user_data));
    client_submit(&job.client[0], &sqe);
    assert_int_equal(client_expect(&job.client[0], 5, -MOK_EOPCODE).argument, MOK_ARG_OPCODE);

    /* The other rank was not told of any of these, and both still count alike. */
    job_submit_forward(&job, 0, 6);
    job_submit_forward(&job, 1, 6);
    client_expect(&job.client[0], 6, 0);
    client_expect(&job.client[1], 6, 0);
    job_close(&job);
    job_close(&other);
    pair_end(&pair);
}

/* ------------------------------------------------------------------ cancel */

static void an_operation_that_waits_for_a_peer_is_cancelled_at_once(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    job_submit_forward(&job, 0, 1);
    assert_int_equal(op_await(&job.client[0], 1, MOK_ST_READY), 1u << 1);
    job_submit_cancel(&job, 0, 2, 1);
    client_expect(&job.client[0], 1, -MOK_ECANCELED);
    client_expect(&job.client[0], 2, 0);

    /* The peer learns when it comes, and both go on alike. */
    job_submit_forward(&job, 0, 3);
    job_submit_forward(&job, 1, 4);
    assert_int_equal(client_expect(&job.client[1], 4, -MOK_ECANCELED).detail, 0);
    job_submit_forward(&job, 1, 5);
    client_expect(&job.client[0], 3, 0);
    client_expect(&job.client[1], 5, 0);
    job_close(&job);
    pair_end(&pair);
}

static void operations_behind_it_are_cancelled_in_their_turn(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 2, &job_small);
    for (uint64_t i = 1; i <= 3; i++)
        job_submit_forward(&job, 0, i);
    assert_int_equal(op_await(&job.client[0], 1, MOK_ST_READY), 1u << 1);
    job_submit_cancel(&job, 0, 10, 3);
    client_expect(&job.client[0], 10, 0);
    for (uint64_t i = 1; i <= 3; i++)
        job_submit_forward(&job, 1, i);
    for (uint32_t rank = 0; rank < 2; rank++) {
        client_expect(&job.client[rank], 1, 0);
        client_expect(&job.client[rank], 2, 0);
        client_expect(&job.client[rank], 3, -MOK_ECANCELED);
    }
    job_close(&job);
    pair_end(&pair);
}

static void cancelling_what_is_not_there_says_so(void **state)
{
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, NULL);
    job_open(&job, pair.of, 1, &job_small);
    job_submit_cancel(&job, 0, 1, 99);
    struct mok_cqe cqe = client_expect(&job.client[0], 1, -MOK_ENOENT);
    assert_int_equal(cqe.argument, MOK_ARG_TARGET);
    assert_int_equal(cqe.value, 99);
    job_submit_forward(&job, 0, 2);
    client_expect(&job.client[0], 2, 0);
    job_submit_cancel(&job, 0, 3, 2);
    client_expect(&job.client[0], 3, -MOK_ENOENT);
    job_close(&job);
    pair_end(&pair);
}

/* Whatever the moment: both ranks see the same, the cancel says which, and the layer goes on. */
static void a_cancel_at_any_moment_leaves_the_ranks_agreed(void **state)
{
    const struct worker_options options = { .chaos_delay_us = 60 };
    unsigned count[2] = { 0 };
    struct pair pair;
    struct job job;
    (void)state;

    pair_start(&pair, &options);
    job_open(&job, pair.of, 2, &job_small);
    for (unsigned i = 0; i < 60; i++) {
        struct mok_cqe cqe[2], seen = { 0 };
        int code[2] = { 0 };
        job_submit_forward(&job, 0, 1);
        if (i % 3 == 0)
            usleep(50 * (i % 7));
        job_submit_forward(&job, 1, 1);
        usleep(150 * (i % 11));
        job_submit_cancel(&job, 0, 2, 1);
        for (unsigned k = 0; k < 2; k++) {
            assert_true(client_reap(&job.client[0], &cqe[k], HARNESS_WAIT_MS));
            code[cqe[k].user_data - 1] = cqe[k].result;
        }
        assert_true(client_reap(&job.client[1], &seen, HARNESS_WAIT_MS));
        assert_int_equal(seen.result, code[0]);
        if (code[0] == -MOK_ECANCELED)
            assert_int_equal(code[1], 0);
        else
            assert_true(code[0] == 0 && (code[1] == -MOK_EBUSY || code[1] == -MOK_ENOENT));
        count[code[0] == 0]++;
    }
    print_message("%u cancelled, %u too late\n", count[0], count[1]);
    job_close(&job);
    pair_end(&pair);
}

/* Ready to run, but the device is somebody else's: the cancel still says what becomes of it. */
static void an_operation_that_waits_for_the_device_ends_as_its_cancel_says(void **state)
{
    struct mok_layer_spec spec = job_small;
    unsigned count[2] = { 0 };
    struct pair pair;
    struct job long_job, job;
    (void)state;

    spec.max_tokens = 16384;
    pair_start(&pair, NULL);
    job_open(&long_job, pair.of, 1, &spec);
    job_open(&job, pair.of, 1, &job_small);
    for (unsigned i = 0; i < 20; i++) {
        struct mok_cqe cqe;
        int code[2] = { 0 };
        job_submit_forward(&long_job, 0, 1);
        usleep(300);
        job_submit_forward(&job, 0, 1);
        usleep(50 * (i % 4));
        job_submit_cancel(&job, 0, 2, 1);
        for (unsigned k = 0; k < 2; k++) {
            assert_true(client_reap(&job.client[0], &cqe, HARNESS_WAIT_MS));
            code[cqe.user_data - 1] = cqe.result;
        }
        assert_int_equal(code[0], code[1] == 0 ? -MOK_ECANCELED : 0);
        client_expect(&long_job.client[0], 1, 0);
        count[code[1] != 0]++;
    }
    print_message("%u cancelled, %u too late\n", count[0], count[1]);
    job_close(&job);
    job_close(&long_job);
    pair_end(&pair);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_worker_that_sleeps_is_woken_by_every_submission),
        cmocka_unit_test(a_worker_that_polls_needs_no_wake_up),
        cmocka_unit_test(a_worker_between_the_two_misses_nothing),
        cmocka_unit_test(more_submissions_than_completions_fit_wait_for_the_client),
        cmocka_unit_test(two_sleeping_workers_lose_no_wake_up_between_them),
        cmocka_unit_test(operations_of_a_layer_complete_in_the_order_of_their_submission),
        cmocka_unit_test(two_jobs_in_opposite_order_do_not_wait_for_each_other),
        cmocka_unit_test(a_job_whose_peer_is_late_holds_up_nobody),
        cmocka_unit_test(a_completion_says_what_ran_and_how_many_rows),
        cmocka_unit_test(a_bad_expert_fails_the_operation_on_all_ranks_and_names_the_slot),
        cmocka_unit_test(ranks_that_disagree_are_all_told),
        cmocka_unit_test(a_submission_that_cannot_run_is_refused_and_does_not_count),
        cmocka_unit_test(an_operation_that_waits_for_a_peer_is_cancelled_at_once),
        cmocka_unit_test(operations_behind_it_are_cancelled_in_their_turn),
        cmocka_unit_test(cancelling_what_is_not_there_says_so),
        cmocka_unit_test(a_cancel_at_any_moment_leaves_the_ranks_agreed),
        cmocka_unit_test(an_operation_that_waits_for_the_device_ends_as_its_cancel_says),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
