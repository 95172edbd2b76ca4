/* SPDX-License-Identifier: Apache-2.0 */
/* A worker may die between any two instructions; the client then gets each owed completion once, and only once. */
#include "support.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "sync.h"

#define ENTRIES 4u
#define NEAR_WRAP 0xFFFFFFF0u

static void assert_closed_and_empty(struct parties *p)
{
    struct mok_cqe cqe;

    mok_queue_close(&p->mokd, -MOK_EWORKER);
    assert_int_equal(mok_queue_client_reap(&p->client, &cqe), -MOK_EWORKER);
    assert_int_equal(p->mokd.header->sq_head, p->mokd.header->cq_tail);
    for (uint32_t i = 0; i < p->mokd.layout.cq_entries; i++)
        assert_int_equal(p->mokd.inflight[i].state, MOK_INFLIGHT_FREE);
}

static void nothing_owed_is_nothing_completed(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(submit(&p.client, 1), 0);
    complete(&p.worker, take(&p.worker, 1), 0);
    assert_int_equal(mok_queue_recover(&p.mokd, -MOK_EWORKER), 0);
    reap(&p.client, 1, 0);
    assert_closed_and_empty(&p);
    parties_close(&p);
}

static void what_was_taken_completes_with_the_code_once_however_often_one_recovers(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    for (uint64_t i = 1; i <= 3; i++)
        assert_int_equal(submit(&p.client, i), 0);
    take(&p.worker, 1);
    complete(&p.worker, take(&p.worker, 2), 0);
    assert_int_equal(mok_queue_recover(&p.mokd, -MOK_EWORKER), 1);
    assert_int_equal(mok_queue_recover(&p.mokd, -MOK_EWORKER), 0);
    reap(&p.client, 2, 0);
    reap(&p.client, 1, -MOK_EWORKER);
    assert_closed_and_empty(&p); /* 3 was never taken: the close code answers for it */
    parties_close(&p);
}

static void noted_but_not_yet_told_counts_as_taken(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(submit(&p.client, 5), 0);
    uint32_t slot = take(&p.worker, 5);
    p.mokd.header->sq_head = NEAR_WRAP; /* as if it died just before */
    assert_int_equal(p.mokd.inflight[slot].state, MOK_INFLIGHT_TAKEN);
    assert_int_equal(mok_queue_recover(&p.mokd, -MOK_EWORKER), 1);
    reap(&p.client, 5, -MOK_EWORKER);
    assert_closed_and_empty(&p);
    parties_close(&p);
}

static void a_completion_written_but_not_published_is_published_as_it_is(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(submit(&p.client, 5), 0);
    uint32_t slot = take(&p.worker, 5);
    complete(&p.worker, slot, 0);
    p.mokd.inflight[slot].state = MOK_INFLIGHT_COMPLETING;
    p.mokd.header->cq_tail = NEAR_WRAP;
    assert_int_equal(mok_queue_recover(&p.mokd, -MOK_EWORKER), 1);
    reap(&p.client, 5, 0);
    assert_closed_and_empty(&p);
    parties_close(&p);
}

static void a_completion_published_but_not_forgotten_is_not_published_again(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(submit(&p.client, 5), 0);
    uint32_t slot = take(&p.worker, 5);
    complete(&p.worker, slot, 0);
    p.mokd.inflight[slot].state = MOK_INFLIGHT_COMPLETING;
    assert_int_equal(mok_queue_recover(&p.mokd, -MOK_EWORKER), 0);
    reap(&p.client, 5, 0);
    assert_closed_and_empty(&p);
    parties_close(&p);
}

static void a_full_table_completes_whole(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    for (uint64_t i = 0; i < 2 * ENTRIES; i++) {
        assert_int_equal(submit(&p.client, i), 0);
        take(&p.worker, i);
    }
    assert_int_equal(mok_queue_recover(&p.mokd, -MOK_EWORKER), 2 * ENTRIES);
    uint64_t seen = 0;
    for (uint64_t i = 0; i < 2 * ENTRIES; i++) {
        struct mok_cqe cqe;
        assert_int_equal(mok_queue_client_reap(&p.client, &cqe), 1);
        assert_int_equal(cqe.result, -MOK_EWORKER);
        seen |= (uint64_t)1 << cqe.user_data;
    }
    assert_int_equal(seen, (1u << 2 * ENTRIES) - 1);
    assert_closed_and_empty(&p);
    parties_close(&p);
}

/* A worker that lost its mind before it died must not take mokd with it. */
static void recovery_survives_a_table_full_of_nonsense(void **state)
{
    (void)state;
    uint64_t seed = 11;

    for (int round = 0; round < 200; round++) {
        struct parties p;
        parties_open(&p, ENTRIES, NEAR_WRAP);
        for (size_t i = 0; i < p.mokd.layout.inflight_bytes / 8; i++)
            ((uint64_t *)(void *)p.mokd.inflight)[i] = next_random(&seed);
        for (uint32_t i = 0; i < p.mokd.layout.cq_entries; i++)
            p.mokd.inflight[i].state %= 4;
        int r = mok_queue_recover(&p.mokd, -MOK_EWORKER);
        assert_true(r >= 0 && r <= (int)p.mokd.layout.cq_entries);
        parties_close(&p);
    }
}

static void a_queue_that_owes_is_not_served_before_it_is_recovered(void **state)
{
    (void)state;
    struct mok_queue mokd;
    struct mok_queue_worker worker, next;

    assert_int_equal(mok_queue_create(ENTRIES, 0, &mokd), 0);
    assert_int_equal(mok_queue_worker_open(mokd.control_fd, mokd.submit_fd, mokd.inflight_fd, &worker), 0);
    mokd.inflight[1].state = MOK_INFLIGHT_TAKEN;
    assert_int_equal(mok_queue_worker_open(mokd.control_fd, mokd.submit_fd, mokd.inflight_fd, &next), -MOK_ESTATE);
    assert_int_equal(mok_queue_recover(&mokd, -MOK_EWORKER), 1);
    assert_int_equal(mok_queue_worker_open(mokd.control_fd, mokd.submit_fd, mokd.inflight_fd, &next), 0);
    mok_queue_worker_release(&next);
    mok_queue_close(&mokd, -MOK_EWORKER);
    assert_int_equal(mok_queue_worker_open(mokd.control_fd, mokd.submit_fd, mokd.inflight_fd, &next), -MOK_ESTATE);
    mok_queue_worker_release(&worker);
    mok_queue_destroy(&mokd);
}

/* ------------------------------------------------------------------ death at every instruction */

enum work {
    WORK_TAKE,     /* takes operation 2 while it owes 0 and 1 */
    WORK_COMPLETE, /* completes operation 1 while it owes 0 */
};

static uint32_t *done; /* shared with the child: its work is over */

/* Stops itself first, for the tracer; by a bare system call, so that few instructions are not the queue's. */
static void work_and_exit(struct parties *p, enum work work, uint32_t slot)
{
    const struct mok_cqe cqe = { .result = -MOK_ECANCELED, .rows = 123, .device_ns = 456 };
    struct mok_sqe sqe;

    if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) < 0)
        _exit(77);
    syscall(SYS_kill, getpid(), SIGSTOP);
    if (work == WORK_TAKE)
        mok_queue_worker_take(&p->worker, &sqe, &slot);
    else
        mok_queue_worker_complete(&p->worker, slot, &cqe);
    mok_store_release(done, 1);
    _exit(0);
}

static void assert_one_completion_each(struct parties *p)
{
    uint32_t told = p->mokd.header->sq_head - NEAR_WRAP;
    uint64_t seen = 0;
    struct mok_cqe cqe;
    int r;

    while ((r = mok_queue_client_reap(&p->client, &cqe)) == 1) {
        assert_true(cqe.user_data < told);
        assert_false(seen & (uint64_t)1 << cqe.user_data);
        seen |= (uint64_t)1 << cqe.user_data;
        if (cqe.user_data == 1 && cqe.result == -MOK_ECANCELED) {
            assert_int_equal(cqe.rows, 123);
            assert_int_equal(cqe.device_ns, 456);
        } else {
            assert_int_equal(cqe.result, -MOK_EWORKER);
            assert_int_equal(cqe.rows, 0);
        }
    }
    assert_int_equal(r, -MOK_EWORKER);
    assert_int_equal(seen, ((uint64_t)1 << told) - 1);
}

/* What a death now would leave behind, as a queue of its own. False: the same as last time. */
static bool copy_remains(const struct parties *from, struct parties *to)
{
    const struct mok_queue_layout *layout = &from->mokd.layout;

    if (memcmp(to->mokd.inflight, from->mokd.inflight, layout->inflight_bytes) == 0 &&
        memcmp(to->mokd.header, from->mokd.header, layout->control_bytes) == 0)
        return false;
    memcpy(to->mokd.inflight, from->mokd.inflight, layout->inflight_bytes);
    memcpy(to->mokd.header, from->mokd.header, layout->control_bytes);
    memcpy(to->client.submit, from->client.submit, layout->submit_bytes);
    to->client.sq_tail = from->client.sq_tail;
    to->client.cq_head = from->client.cq_head;
    return true;
}

static void recover_and_check(struct parties *p)
{
    mok_queue_recover(&p->mokd, -MOK_EWORKER);
    mok_queue_close(&p->mokd, -MOK_EWORKER);
    assert_one_completion_each(p);
}

static void wait_for_stop(pid_t child)
{
    int status;

    assert_int_equal(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77)
        skip();
    assert_true(WIFSTOPPED(status));
}

/*
 * Stops the worker after each instruction. All that outlives a worker is its shared memory, so recovering a copy of
 * that is as good as killing the worker there; at last it is killed indeed.
 */
static void die_at_each_instruction(enum work work, uint32_t sleepers)
{
    struct parties p, remains;
    unsigned long instructions = 0, different = 0;
    int status;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    parties_open(&remains, ENTRIES, NEAR_WRAP);
    for (uint64_t i = 0; i < 3; i++)
        assert_int_equal(submit(&p.client, i), 0);
    p.client.submit->cq_sleepers = sleepers;
    take(&p.worker, 0);
    uint32_t slot = take(&p.worker, 1);
    done = mmap(NULL, sizeof(*done), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(done, MAP_FAILED);

    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        work_and_exit(&p, work, slot);
    for (wait_for_stop(child); !mok_load_acquire(done); instructions++) {
        assert_int_equal(ptrace(PTRACE_SINGLESTEP, child, NULL, NULL), 0);
        wait_for_stop(child);
        if (copy_remains(&p, &remains)) {
            recover_and_check(&remains);
            copy_remains(&p, &remains);
            different++;
        }
    }
    kill(child, SIGKILL);
    assert_int_equal(waitpid(child, &status, 0), child);
    recover_and_check(&p);
    print_message("%lu instructions, %lu different remains\n", instructions, different);
    assert_true(instructions > 30 && different >= 4);
    munmap(done, sizeof(*done));
    parties_close(&p);
    parties_close(&remains);
}

static void a_worker_killed_at_any_instruction_of_taking_leaves_one_completion_each(void **state)
{
    (void)state;
    die_at_each_instruction(WORK_TAKE, 0);
}

static void a_worker_killed_at_any_instruction_of_completing_leaves_one_completion_each(void **state)
{
    (void)state;
    die_at_each_instruction(WORK_COMPLETE, 0);
    die_at_each_instruction(WORK_COMPLETE, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_owed_is_nothing_completed),
        cmocka_unit_test(what_was_taken_completes_with_the_code_once_however_often_one_recovers),
        cmocka_unit_test(noted_but_not_yet_told_counts_as_taken),
        cmocka_unit_test(a_completion_written_but_not_published_is_published_as_it_is),
        cmocka_unit_test(a_completion_published_but_not_forgotten_is_not_published_again),
        cmocka_unit_test(a_full_table_completes_whole),
        cmocka_unit_test(recovery_survives_a_table_full_of_nonsense),
        cmocka_unit_test(a_queue_that_owes_is_not_served_before_it_is_recovered),
        cmocka_unit_test(a_worker_killed_at_any_instruction_of_taking_leaves_one_completion_each),
        cmocka_unit_test(a_worker_killed_at_any_instruction_of_completing_leaves_one_completion_each),
    };
    return cmocka_run_group_tests_name("queue recovery", tests, NULL, NULL);
}
