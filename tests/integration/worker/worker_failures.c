/* SPDX-License-Identifier: Apache-2.0 */
/* What breaks and what goes on: time-outs, failed groups, hostile clients, dead workers, a dead mokd. */
#include "job.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dispatch.h"
#include "mok/types.h"
#include "util.h"
#include "wire.h"

#define MS 1000000ull

/* Takes long enough to be met while it runs. */
static const struct mok_layer_spec slow = {
    .hidden = 1024, .intermediate = 2048, .experts = 4, .topk = 4, .max_tokens = 512, .precision = MOK_BF16
};

static void expect_group_broken(struct worker *worker, const struct job *job, int code, uint32_t rank)
{
    Mok__WorkerReply *event = worker_event(worker, HARNESS_WAIT_MS);

    assert_non_null(event);
    assert_int_equal(event->body_case, MOK__WORKER_REPLY__BODY_GROUP_BROKEN);
    assert_int_equal(event->code, code);
    assert_true(event->text && *event->text);
    assert_int_equal(event->group_broken->group, job->group.id);
    assert_int_equal(event->group_broken->rank, rank);
    mok_wire_free(&event->base);
}

/* ------------------------------------------------------------------ time-outs */

static void a_peer_that_does_not_push_in_time_breaks_the_group_and_nothing_else(void **state)
{
    struct worker quick, late;
    struct worker *workers[] = { &quick, &late };
    struct job job, other;
    (void)state;

    worker_start(&quick, NULL);
    worker_start(&late, NULL);
    job_open(&job, workers, 2, &job_small);
    job_open(&other, workers, 1, &job_small);
    job_submit_forward(&job, 1, 1);
    assert_int_equal(op_await(&job.client[1], 1, MOK_ST_READY), 1u << 0);
    int status;
    assert_int_equal(kill(late.pid, SIGSTOP), 0); /* it has joined, and comes no further */
    assert_int_equal(waitpid(late.pid, &status, WUNTRACED), late.pid);
    assert_true(WIFSTOPPED(status));
    struct mok_sqe sqe = job_forward(&job, 0, 1);
    sqe.timeout_ns = 200 * MS; /* long enough for the quick one's part on a busy machine */
    client_submit(&job.client[0], &sqe);
    job_submit_forward(&job, 0, 2);
    assert_int_equal(client_expect(&job.client[0], 1, -MOK_ETIMEDOUT).detail, 1);
    assert_int_equal(client_expect(&job.client[0], 2, -MOK_EPEER).detail, 1);
    expect_group_broken(&quick, &job, -MOK_ETIMEDOUT, 1);
    assert_int_equal(kill(late.pid, SIGCONT), 0);

    job_submit_forward(&job, 0, 3);
    assert_int_equal(client_expect(&job.client[0], 3, -MOK_EPEER).detail, 1);
    job_submit_forward(&other, 0, 4);
    client_expect(&other.client[0], 4, 0);
    job_close(&job);
    job_close(&other);
    worker_end(&quick);
    worker_end(&late);
}

static void a_time_out_counts_from_the_moment_all_have_joined(void **state)
{
    struct worker first, second;
    struct worker *workers[] = { &first, &second };
    struct job job;
    (void)state;

    worker_start(&first, NULL);
    worker_start(&second, NULL);
    job_open(&job, workers, 2, &job_small);
    struct mok_sqe sqe = job_forward(&job, 0, 1);
    sqe.timeout_ns = 300 * MS;
    client_submit(&job.client[0], &sqe);
    usleep(500000);
    job_submit_forward(&job, 1, 1);
    client_expect(&job.client[0], 1, 0);
    client_expect(&job.client[1], 1, 0);
    job_close(&job);
    worker_end(&first);
    worker_end(&second);
}

static void an_operation_that_runs_for_too_long_is_stopped(void **state)
{
    struct worker worker;
    struct worker *workers[] = { &worker };
    struct job job;
    (void)state;

    worker_start(&worker, NULL);
    job_open(&job, workers, 1, &slow);
    struct mok_sqe sqe = job_forward(&job, 0, 1);
    sqe.timeout_ns = 5 * MS;
    client_submit(&job.client[0], &sqe);
    client_expect(&job.client[0], 1, -MOK_ETIMEDOUT);
    expect_group_broken(&worker, &job, -MOK_ETIMEDOUT, 0);
    client_expect_alive(&job.client[0]);
    job_close(&job);
    worker_end(&worker);
}

/* ------------------------------------------------------------------ groups that fail, sessions that end */

static void a_failed_group_completes_what_waits_and_refuses_what_comes(void **state)
{
    struct worker first, second;
    struct worker *workers[] = { &first, &second };
    struct job job;
    (void)state;

    worker_start(&first, NULL);
    worker_start(&second, NULL);
    job_open(&job, workers, 2, &job_small);
    for (uint64_t i = 1; i <= 3; i++)
        job_submit_forward(&job, 0, i);
    assert_int_equal(op_await(&job.client[0], 1, MOK_ST_READY), 1u << 1);
    assert_int_equal(group_fail(&job.group, 0, -MOK_EWORKER, 1), 0);
    for (uint64_t i = 1; i <= 3; i++)
        assert_int_equal(client_expect(&job.client[0], i, -MOK_EWORKER).detail, 1);
    job_submit_forward(&job, 0, 4);
    struct mok_cqe cqe = client_expect(&job.client[0], 4, -MOK_EWORKER);
    assert_int_equal(cqe.argument, MOK_ARG_RANKS);
    assert_int_equal(cqe.detail, 1);
    /* The first reason stays. */
    assert_int_equal(group_fail(&job.group, 0, -MOK_EPEER, 0), 0);
    job_submit_forward(&job, 0, 5);
    client_expect(&job.client[0], 5, -MOK_EWORKER);
    job_close(&job);
    worker_end(&first);
    worker_end(&second);
}

static void what_runs_is_stopped_before_its_memory_goes(void **state)
{
    struct worker worker;
    struct worker *workers[] = { &worker };
    struct job job, other;
    (void)state;

    worker_start(&worker, NULL);
    job_open(&other, workers, 1, &job_small);
    for (unsigned how = 0; how < 3; how++) {
        job_open(&job, workers, 1, &slow);
        job_submit_forward(&job, 0, 1);
        op_await(&job.client[0], 1, MOK_ST_MAIN);
        uint64_t start = mok_now_ns();
        if (how == 0) {
            assert_int_equal(group_fail(&job.group, 0, -MOK_EPEER, 0), 0);
            client_expect(&job.client[0], 1, -MOK_EPEER);
        } else if (how == 1) {
            assert_int_equal(client_close(&job.client[0]), 0);
            assert_int_equal(group_close(&job.group, 0), 0);
        }
        if (how != 1) {
            assert_int_equal(group_close(&job.group, 0), 0);
            assert_int_equal(client_close(&job.client[0]), 0);
        }
        assert_int_equal(buffer_unmap(&worker, job.client[0].session, 0, 0, job.own[0].id), 0);
        assert_true(mok_now_ns() - start < 2000 * MS);
        job_free(&job);
        job_submit_forward(&other, 0, how);
        client_expect(&other.client[0], how, 0);
    }
    job_close(&other);
    worker_end(&worker);
}

static void a_closed_queue_drops_its_operations_and_tells_its_client(void **state)
{
    struct worker first, second;
    struct worker *workers[] = { &first, &second };
    struct job job;
    struct mok_cqe cqe;
    (void)state;

    worker_start(&first, NULL);
    worker_start(&second, NULL);
    job_open(&job, workers, 2, &job_small);
    job_submit_forward(&job, 0, 1);
    assert_int_equal(op_await(&job.client[0], 1, MOK_ST_READY), 1u << 1);
    assert_int_equal(client_close(&job.client[0]), 0);
    assert_int_equal(mok_queue_client_reap(&job.client[0].end, &cqe), -MOK_ESESSION);
    /* The layer is still there, without a queue; it goes with its group, and the memory with it. */
    assert_int_equal(layer_close(&job.layer, 0), 0);
    assert_int_equal(group_close(&job.group, 0), 0);
    assert_int_equal(buffer_unmap(&first, job.client[0].session, 0, 0, job.own[0].id), 0);
    assert_int_equal(group_close(&job.group, 1), 0);
    job_free(&job);
    worker_end(&first);
    worker_end(&second);
}

/* ------------------------------------------------------------------ hostile clients */

static void expect_queue_broken(struct worker *worker, const struct client *client)
{
    Mok__WorkerReply *event = worker_event(worker, HARNESS_WAIT_MS);

    assert_non_null(event);
    assert_int_equal(event->body_case, MOK__WORKER_REPLY__BODY_QUEUE_BROKEN);
    assert_int_equal(event->code, -MOK_ESESSION);
    assert_true(event->text && *event->text);
    assert_int_equal(event->queue_broken->queue, client->id);
    mok_wire_free(&event->base);
}

static void wild_counters_close_the_queue_of_their_session_alone(void **state)
{
    struct worker worker;
    struct worker *workers[] = { &worker };
    struct job victim, job;
    struct mok_cqe cqe;
    (void)state;

    worker_start(&worker, NULL);
    job_open(&victim, workers, 1, &job_small);
    for (unsigned how = 0; how < 2; how++) {
        job_open(&job, workers, 1, &job_small);
        job_submit_forward(&victim, 0, 1);
        struct mok_queue_client *end = &job.client[0].end;
        if (how == 0)
            end->sq_tail += 1000;
        else
            end->submit->cq_head = 5;
        mok_queue_client_publish(end);
        expect_queue_broken(&worker, &job.client[0]);
        assert_int_equal(mok_queue_client_reap(end, &cqe), -MOK_ESESSION);
        client_expect(&victim.client[0], 1, 0);
        client_expect_alive(&victim.client[0]);
        job_close(&job);
    }
    job_close(&victim);
    worker_end(&worker);
}

static void a_doorbell_in_the_wrong_hands_does_no_harm(void **state)
{
    struct worker worker;
    struct client hostile, victim;
    const uint64_t almost_full = UINT64_MAX - 1;
    uint64_t count;
    (void)state;

    worker_start(&worker, NULL);
    client_open(&hostile, &worker, harness_id(), 4, 0);
    client_open(&victim, &worker, harness_id(), 4, 0);
    for (unsigned i = 0; i < 200; i++) {
        /* Full, emptied by the client, full again: the worker waits for edges and reads nothing. */
        assert_int_equal(write(hostile.queue.doorbell_fd, &almost_full, sizeof(almost_full)), 8);
        client_expect_alive(&victim);
        assert_int_equal(read(hostile.queue.doorbell_fd, &count, sizeof(count)), 8);
        client_expect_alive(&hostile);
        ssize_t ignored = read(hostile.queue.doorbell_fd, &count, sizeof(count));
        (void)ignored;
    }
    client_free(&hostile);
    client_free(&victim);
    worker_end(&worker);
}

static void noise_in_the_submissions_is_answered_entry_by_entry(void **state)
{
    struct worker worker;
    struct worker *workers[] = { &worker };
    struct job job;
    struct mok_cqe cqe;
    uint64_t seed = 12345;
    (void)state;

    worker_start(&worker, NULL);
    job_open(&job, workers, 1, &job_small);
    for (unsigned i = 0; i < 2000; i++) {
        /* A good submission with a few random bytes, so that every check is met. */
        struct mok_sqe sqe = i % 2 ? job_forward(&job, 0, 1) : job_backward(&job, 0, 1);
        for (unsigned k = 0; k < 1 + i % 3; k++) {
            seed = seed * 6364136223846793005ull + 1442695040888963407ull;
            ((unsigned char *)&sqe)[(seed >> 33) % sizeof(sqe)] = (unsigned char)(seed >> 56);
        }
        sqe.timeout_ns = 0; /* a time-out ends the group */
        client_submit(&job.client[0], &sqe);
        assert_true(client_reap(&job.client[0], &cqe, HARNESS_WAIT_MS));
        assert_int_equal(cqe.user_data, sqe.user_data);
        assert_true(cqe.result <= 0);
    }
    job_submit_forward(&job, 0, 7);
    client_expect(&job.client[0], 7, 0);
    job_close(&job);
    worker_end(&worker);
}

/* ------------------------------------------------------------------ death */

static void a_killed_worker_loses_no_completion(void **state)
{
    struct worker first, second;
    struct worker *workers[] = { &first, &second };
    struct job job;
    struct mok_cqe cqe;
    (void)state;

    worker_start(&first, NULL);
    worker_start(&second, NULL);
    job_open(&job, workers, 2, &job_small);
    client_expect_alive(&job.client[0]);
    for (uint64_t i = 1; i <= 5; i++)
        job_submit_forward(&job, 0, i);
    assert_int_equal(op_await(&job.client[0], 1, MOK_ST_READY), 1u << 1);
    uint32_t op_state;
    uint64_t missing;
    while (op_query(&job.client[0], 5, &op_state, &missing) < 0)
        usleep(200);
    worker_kill(&first);
    assert_int_equal(mok_queue_recover(&job.client[0].queue, -MOK_EWORKER), 5);
    mok_queue_close(&job.client[0].queue, -MOK_EWORKER);
    for (uint64_t i = 1; i <= 5; i++) {
        assert_true(client_reap(&job.client[0], &cqe, HARNESS_WAIT_MS));
        assert_int_equal(cqe.result, -MOK_EWORKER);
        assert_in_range(cqe.user_data, 1, 5);
    }
    assert_int_equal(mok_queue_client_reap(&job.client[0].end, &cqe), -MOK_EWORKER);
    /* The other rank hears of it from mokd. */
    job_submit_forward(&job, 1, 1);
    assert_int_equal(group_fail(&job.group, 1, -MOK_EPEER, 0), 0);
    client_expect(&job.client[1], 1, -MOK_EPEER);
    client_expect_alive(&job.client[1]);
    job_close(&job);
    worker_end(&second);
}

static void when_mokd_is_gone_all_that_is_owed_completes_and_the_rings_close(void **state)
{
    struct worker first, second;
    struct worker *workers[] = { &first, &second };
    struct job waits, runs;
    struct mok_cqe cqe;
    (void)state;

    worker_start(&first, NULL);
    worker_start(&second, NULL);
    job_open(&waits, workers, 2, &job_small);
    job_open(&runs, workers, 1, &slow);
    job_submit_forward(&waits, 0, 1);
    job_submit_forward(&waits, 0, 2);
    op_await(&waits.client[0], 1, MOK_ST_READY);
    job_submit_forward(&runs, 0, 3);
    op_await(&runs.client[0], 3, MOK_ST_MAIN);
    worker_end(&first);
    client_expect(&waits.client[0], 1, -MOK_EDAEMON);
    client_expect(&waits.client[0], 2, -MOK_EDAEMON);
    client_expect(&runs.client[0], 3, -MOK_EDAEMON);
    assert_int_equal(mok_queue_client_reap(&waits.client[0].end, &cqe), -MOK_EDAEMON);
    assert_int_equal(mok_queue_client_reap(&runs.client[0].end, &cqe), -MOK_EDAEMON);
    job_close(&waits);
    job_free(&runs);
    worker_end(&second);
}

static void a_worker_does_not_outlive_its_parent_even_with_an_open_socket(void **state)
{
    struct worker worker;
    int status;
    (void)state;

    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    int report[2];
    assert_int_equal(pipe(report), 0);
    pid_t parent = fork();
    assert_true(parent >= 0);
    if (parent == 0) {
        worker_start(&worker, NULL);
        /* A process in between keeps the socket open. */
        pid_t holder = fork();
        if (holder == 0) {
            pause();
            _exit(0);
        }
        const pid_t pids[] = { worker.pid, holder };
        _exit(write(report[1], pids, sizeof(pids)) == (ssize_t)sizeof(pids) ? 0 : 1);
    }
    pid_t pids[2];
    assert_int_equal(read(report[0], pids, sizeof(pids)), (ssize_t)sizeof(pids));
    assert_int_equal(waitpid(parent, &status, 0), parent);
    worker = (struct worker){ .pid = pids[0] };
    assert_int_equal(worker_wait(&worker), -SIGALRM);
    kill(pids[1], SIGKILL);
    waitpid(pids[1], &status, 0);
    close(report[0]);
    close(report[1]);
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_peer_that_does_not_push_in_time_breaks_the_group_and_nothing_else),
        cmocka_unit_test(a_time_out_counts_from_the_moment_all_have_joined),
        cmocka_unit_test(an_operation_that_runs_for_too_long_is_stopped),
        cmocka_unit_test(a_failed_group_completes_what_waits_and_refuses_what_comes),
        cmocka_unit_test(what_runs_is_stopped_before_its_memory_goes),
        cmocka_unit_test(a_closed_queue_drops_its_operations_and_tells_its_client),
        cmocka_unit_test(wild_counters_close_the_queue_of_their_session_alone),
        cmocka_unit_test(a_doorbell_in_the_wrong_hands_does_no_harm),
        cmocka_unit_test(noise_in_the_submissions_is_answered_entry_by_entry),
        cmocka_unit_test(a_killed_worker_loses_no_completion),
        cmocka_unit_test(when_mokd_is_gone_all_that_is_owed_completes_and_the_rings_close),
        cmocka_unit_test(a_worker_does_not_outlive_its_parent_even_with_an_open_socket),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
