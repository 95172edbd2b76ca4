/* SPDX-License-Identifier: Apache-2.0 */
/* Operations that a CUDA stream hands over, as the worker sees them: words in shared memory, which may hold anything.
 */
#include "job.h"

#include <unistd.h>

#include "memory.h"
#include "wire.h"

struct bench {
    struct worker worker;
    struct job job;
    struct mok_stream_slot *slot;
    uint32_t slots;
};

static int stream_open(struct bench *b, uint32_t queue, uint64_t bytes, int fd)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerStreamOpen open = MOK__WORKER_STREAM_OPEN__INIT;

    open.queue = queue;
    open.bytes = bytes;
    request.body_case = MOK__WORKER_REQUEST__BODY_STREAM_OPEN;
    request.stream_open = &open;
    return worker_ask(&b->worker, &request, &fd, 1, NULL);
}

static void bench_open(struct bench *b)
{
    struct worker *workers[] = { &b->worker };
    void *memory;
    int fd;

    worker_start(&b->worker, NULL);
    job_open(&b->job, workers, 1, &job_small);
    b->slots = b->job.client[0].queue.layout.cq_entries;
    uint64_t bytes = mok_memory_round(b->slots * sizeof(*b->slot));
    assert_int_equal(mok_memory_create("test-stream", bytes, &fd), 0);
    assert_int_equal(stream_open(b, 99999, bytes, fd), -MOK_ENOENT);
    assert_int_equal(stream_open(b, b->job.client[0].id, 8, fd), -MOK_ESIZE);
    assert_int_equal(stream_open(b, b->job.client[0].id, bytes, fd), 0);
    assert_int_equal(stream_open(b, b->job.client[0].id, bytes, fd), -MOK_EEXIST);
    assert_int_equal(mok_memory_map(fd, bytes, MOK_MAP_WRITE, &memory), 0);
    b->slot = memory;
    close(fd);
}

static void bench_close(struct bench *b)
{
    mok_memory_unmap(b->slot, mok_memory_round(b->slots * sizeof(*b->slot)));
    job_close(&b->job);
    worker_end(&b->worker);
}

static void submit(struct bench *b, uint64_t user_data, uint32_t slot, uint32_t number)
{
    struct mok_sqe sqe = job_forward(&b->job, 0, user_data);

    sqe.flags |= MOK_SQE_ON_STREAM;
    sqe.stream_slot = slot;
    sqe.stream_number = number;
    client_submit(&b->job.client[0], &sqe);
}

static void ring(struct bench *b, uint32_t slot, uint32_t number)
{
    __atomic_store_n(&b->slot[slot].doorbell, number, __ATOMIC_RELEASE);
}

static uint32_t done(const struct bench *b, uint32_t slot)
{
    return __atomic_load_n(&b->slot[slot].done, __ATOMIC_ACQUIRE);
}

static void an_operation_begins_with_its_doorbell_and_is_told_in_its_slot(void **state)
{
    struct bench b;
    struct mok_cqe cqe;
    (void)state;

    bench_open(&b);
    submit(&b, 1, 3, 7);
    assert_false(client_reap(&b.job.client[0], &cqe, 50));
    assert_int_equal(done(&b, 3), 0);
    ring(&b, 3, 6); /* an earlier operation's, come late */
    assert_false(client_reap(&b.job.client[0], &cqe, 30));
    ring(&b, 3, 7);
    client_expect(&b.job.client[0], 1, 0);
    assert_int_equal(done(&b, 3), 7);

    submit(&b, 2, 4, UINT32_MAX); /* numbers go round */
    ring(&b, 4, 2);
    client_expect(&b.job.client[0], 2, 0);
    assert_int_equal(done(&b, 4), UINT32_MAX);
    bench_close(&b);
}

static void one_that_is_not_there_holds_up_its_layer_and_nothing_else(void **state)
{
    struct bench b;
    struct job other;
    struct worker *workers[] = { &b.worker };
    struct mok_cqe cqe;
    (void)state;

    bench_open(&b);
    job_open(&other, workers, 1, &job_small);
    submit(&b, 1, 0, 1);
    job_submit_forward(&b.job, 0, 2);
    job_submit_forward(&other, 0, 3);
    client_expect(&other.client[0], 3, 0);
    assert_false(client_reap(&b.job.client[0], &cqe, 30));
    ring(&b, 0, 1);
    client_expect(&b.job.client[0], 1, 0);
    client_expect(&b.job.client[0], 2, 0);
    job_close(&other);
    bench_close(&b);
}

static void what_is_refused_or_cancelled_frees_its_stream(void **state)
{
    struct bench b;
    (void)state;

    bench_open(&b);
    struct mok_sqe sqe = job_forward(&b.job, 0, 1);
    sqe.flags |= MOK_SQE_ON_STREAM;
    sqe.stream_slot = 5;
    sqe.stream_number = 9;
    sqe.tokens = 100000;
    client_submit(&b.job.client[0], &sqe);
    client_expect(&b.job.client[0], 1, -MOK_ERANGE);
    assert_int_equal(done(&b, 5), 9);

    submit(&b, 2, b.slots, 1);
    struct mok_cqe cqe = client_expect(&b.job.client[0], 2, -MOK_ERANGE);
    assert_int_equal(cqe.argument, MOK_ARG_STREAM);
    assert_int_equal(cqe.bound, b.slots - 1);

    submit(&b, 3, 6, 1);
    job_submit_cancel(&b.job, 0, 4, 3);
    client_expect(&b.job.client[0], 4, 0);
    client_expect(&b.job.client[0], 3, -MOK_ECANCELED);
    assert_int_equal(done(&b, 6), 1);
    client_expect_alive(&b.job.client[0]);
    bench_close(&b);
}

static void a_failed_group_frees_the_streams_of_its_operations(void **state)
{
    struct bench b;
    (void)state;

    bench_open(&b);
    submit(&b, 1, 0, 1);
    submit(&b, 2, 1, 1);
    assert_int_equal(group_fail(&b.job.group, 0, -MOK_EPEER, 0), 0);
    client_expect(&b.job.client[0], 1, -MOK_EPEER);
    client_expect(&b.job.client[0], 2, -MOK_EPEER);
    assert_int_equal(done(&b, 0), 1);
    assert_int_equal(done(&b, 1), 1);
    bench_close(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_operation_begins_with_its_doorbell_and_is_told_in_its_slot),
        cmocka_unit_test(one_that_is_not_there_holds_up_its_layer_and_nothing_else),
        cmocka_unit_test(what_is_refused_or_cancelled_frees_its_stream),
        cmocka_unit_test(a_failed_group_frees_the_streams_of_its_operations),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
