/* SPDX-License-Identifier: Apache-2.0 */
/* The worker's control socket: what it answers, what it refuses, how it ends, what it leaves behind. */
#include "job.h"

#include <dirent.h>
#include <signal.h>
#include <stdio.h>

#include "dispatch.h"
#include "memory.h"
#include "util.h"
#include "wire.h"

static int ask_simple(struct worker *worker, Mok__WorkerRequest__BodyCase kind, Mok__WorkerReply **ret_reply)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerPing ping = MOK__WORKER_PING__INIT;
    Mok__WorkerStop stop = MOK__WORKER_STOP__INIT;

    request.body_case = kind;
    if (kind == MOK__WORKER_REQUEST__BODY_PING)
        request.ping = &ping;
    else
        request.stop = &stop;
    return worker_ask(worker, &request, NULL, 0, ret_reply);
}

static int ask_start(struct worker *worker, uint32_t kind, uint32_t threads, size_t bells, Mok__WorkerReply **ret)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerStart start = MOK__WORKER_START__INIT;
    const int fds[] = { worker->bell, worker->bell };

    start.kind = kind;
    start.threads = threads;
    request.body_case = MOK__WORKER_REQUEST__BODY_START;
    request.start = &start;
    return worker_ask(worker, &request, fds, bells, ret);
}

static void start_says_what_the_device_is_and_comes_first_and_once(void **state)
{
    struct worker worker;
    Mok__WorkerReply *reply;
    (void)state;

    worker_spawn(&worker);
    assert_int_equal(ask_simple(&worker, MOK__WORKER_REQUEST__BODY_PING, NULL), -MOK_ESTATE);
    assert_int_equal(ask_start(&worker, 9, 1, 1, NULL), -MOK_ENOTSUP);
    assert_int_equal(ask_start(&worker, MOK_DEVICE_HOST, 0, 1, NULL), -MOK_ERANGE);
    assert_int_equal(ask_start(&worker, MOK_DEVICE_HOST, 1, 0, NULL), -MOK_EPROTO);
    assert_int_equal(ask_start(&worker, MOK_DEVICE_HOST, 1, 2, NULL), -MOK_EPROTO);
    assert_int_equal(ask_start(&worker, MOK_DEVICE_HOST, 2, 1, &reply), 0);
    assert_int_equal(reply->body_case, MOK__WORKER_REPLY__BODY_STARTED);
    assert_int_equal(reply->started->sms_or_threads, 2);
    assert_true(reply->started->memory_bytes > 0);
    mok_wire_free(&reply->base);
    assert_int_equal(ask_start(&worker, MOK_DEVICE_HOST, 1, 1, NULL), -MOK_ESTATE);
    worker_end(&worker);
}

static void stop_is_answered_and_ends_the_process(void **state)
{
    struct worker worker;
    (void)state;

    worker_start(&worker, NULL);
    assert_int_equal(ask_simple(&worker, MOK__WORKER_REQUEST__BODY_STOP, NULL), 0);
    assert_int_equal(worker_wait(&worker), 0);
    worker_end(&worker);
    worker_spawn(&worker);
    assert_int_equal(ask_simple(&worker, MOK__WORKER_REQUEST__BODY_STOP, NULL), 0);
    assert_int_equal(worker_wait(&worker), 0);
    worker_end(&worker);
}

static void signals_to_the_process_group_are_left_to_mokd(void **state)
{
    struct worker worker;
    (void)state;

    worker_start(&worker, NULL);
    assert_int_equal(kill(worker.pid, SIGTERM), 0);
    assert_int_equal(kill(worker.pid, SIGINT), 0);
    assert_int_equal(kill(worker.pid, SIGHUP), 0);
    assert_int_equal(ask_simple(&worker, MOK__WORKER_REQUEST__BODY_PING, NULL), 0);
    worker_end(&worker);
}

static void a_malformed_message_ends_the_worker_with_an_error(void **state)
{
    struct worker worker;
    const unsigned char noise[] = { 0xff, 0xff, 0xff, 0x01, 0x02 };
    (void)state;

    worker_start(&worker, NULL);
    assert_int_equal(write(worker.control, noise, sizeof(noise)), (ssize_t)sizeof(noise));
    assert_int_equal(worker_wait(&worker), 1);
    worker_end(&worker);
}

static void unknown_names_are_refused_one_by_one(void **state)
{
    struct worker worker;
    struct client client;
    struct client *ranks[] = { &client };
    struct group group, none;
    struct layer layer = { .id = 4711, .group = &group };
    uint32_t op_state;
    uint64_t missing;
    (void)state;

    worker_start(&worker, NULL);
    client_open(&client, &worker, harness_id(), 4, 0);
    group_open(&group, harness_id(), ranks, 1);
    none = group;
    none.id = 4712;
    assert_int_equal(group_close(&none, 0), -MOK_ENOENT);
    assert_int_equal(group_fail(&none, 0, -MOK_EPEER, 0), -MOK_ENOENT);
    assert_int_equal(layer_close(&layer, 0), -MOK_ENOENT);
    assert_int_equal(buffer_unmap(&worker, client.session, 0, 0, 4713), -MOK_ENOENT);
    assert_int_equal(buffer_unmap(&worker, client.session, 4712, 0, 1), -MOK_ENOENT);
    assert_int_equal(buffer_unmap(&worker, client.session, group.id, 1, 1), -MOK_ERANK);
    assert_int_equal(op_query(&client, 12, &op_state, &missing), -MOK_ENOENT);
    struct client other = { .worker = &worker, .id = 4714 };
    assert_int_equal(client_close(&other), -MOK_ENOENT);
    assert_int_equal(op_query(&other, 12, &op_state, &missing), -MOK_ENOENT);
    assert_int_equal(client_close(&client), 0);
    assert_int_equal(client_close(&client), -MOK_ENOENT);
    client_free(&client);
    worker_end(&worker);
}

/* ------------------------------------------------------------------ memory */

static int ask_map(struct worker *worker, uint32_t buffer, uint64_t bytes, const int *fds, size_t count)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerBufferMap map = MOK__WORKER_BUFFER_MAP__INIT;

    map.session = 1;
    map.buffer = buffer;
    map.bytes = bytes;
    request.body_case = MOK__WORKER_REQUEST__BODY_BUFFER_MAP;
    request.buffer_map = &map;
    return worker_ask(worker, &request, fds, count, NULL);
}

static void a_buffer_has_one_descriptor_a_size_that_is_there_and_a_new_id(void **state)
{
    struct worker worker;
    int fds[2];
    (void)state;

    worker_start(&worker, NULL);
    assert_int_equal(mok_memory_create("test", 8192, &fds[0]), 0);
    fds[1] = fds[0];
    assert_int_equal(ask_map(&worker, 5, 8192, fds, 0), -MOK_EPROTO);
    assert_int_equal(ask_map(&worker, 5, 8192, fds, 2), -MOK_EPROTO);
    assert_int_equal(ask_map(&worker, 5, 0, fds, 1), -MOK_EARG);
    assert_int_equal(ask_map(&worker, 0, 8192, fds, 1), -MOK_EARG);
    assert_int_equal(ask_map(&worker, 5, 8193, fds, 1), -MOK_ESIZE);
    assert_int_equal(ask_map(&worker, 5, 8192, fds, 1), 0);
    assert_int_equal(ask_map(&worker, 5, 8192, fds, 1), -MOK_EEXIST);
    assert_int_equal(buffer_unmap(&worker, 2, 0, 0, 5), -MOK_EACCESS);
    assert_int_equal(buffer_unmap(&worker, 1, 0, 0, 5), 0);
    assert_int_equal(buffer_unmap(&worker, 1, 0, 0, 5), -MOK_ENOENT);
    close(fds[0]);
    worker_end(&worker);
}

static void what_is_in_use_is_not_taken_away(void **state)
{
    struct worker first, second;
    struct worker *workers[] = { &first, &second };
    struct job job;
    Mok__LayerParams nothing = MOK__LAYER_PARAMS__INIT;
    (void)state;

    worker_start(&first, NULL);
    worker_start(&second, NULL);
    job_open(&job, workers, 2, &job_small);
    /* bound */
    assert_int_equal(buffer_unmap(&first, job.client[0].session, 0, 0, job.own[0].id), -MOK_EBUSY);
    /* an operation waits for rank 1 */
    job_submit_forward(&job, 0, 7);
    assert_int_equal(op_await(&job.client[0], 7, MOK_ST_READY), 1u << 1);
    assert_int_equal(buffer_unmap(&first, job.client[0].session, job.group.id, 0, job.x.id), -MOK_EBUSY);
    assert_int_equal(layer_bind(&job.layer, 0, &nothing), -MOK_EBUSY);
    assert_int_equal(layer_close(&job.layer, 0), -MOK_EBUSY);
    /* a peer's copy is in use only while that is read */
    assert_int_equal(buffer_unmap(&first, job.client[1].session, job.group.id, 1, job.d_out.id), 0);

    job_submit_forward(&job, 1, 8);
    client_expect(&job.client[0], 7, 0);
    client_expect(&job.client[1], 8, 0);
    assert_int_equal(buffer_unmap(&first, job.client[0].session, job.group.id, 0, job.x.id), 0);
    assert_int_equal(layer_bind(&job.layer, 0, &nothing), 0);
    assert_int_equal(layer_close(&job.layer, 0), 0);
    assert_int_equal(layer_close(&job.layer, 0), -MOK_ENOENT);
    job_close(&job);
    worker_end(&first);
    worker_end(&second);
}

/* A job, and a symmetric buffer of another group of the same session. */
struct lender {
    struct worker worker[2];
    struct job job;
    struct group group;
    struct buffer lent;
};

static void lender_open(struct lender *l)
{
    struct worker *workers[] = { &l->worker[0], &l->worker[1] };
    struct client *ranks[] = { &l->job.client[0] };

    worker_start(&l->worker[0], NULL);
    worker_start(&l->worker[1], NULL);
    job_open(&l->job, workers, 2, &job_small);
    group_open(&l->group, harness_id(), ranks, 1);
    buffer_symmetric(&l->lent, &l->group, 65536);
}

static void lender_close(struct lender *l)
{
    assert_int_equal(group_close(&l->group, 0), -MOK_ENOENT);
    buffer_free(&l->lent);
    job_close(&l->job);
    worker_end(&l->worker[0]);
    worker_end(&l->worker[1]);
}

static void leaving_a_group_unbinds_its_memory_from_other_groups(void **state)
{
    struct lender l;
    Mok__LayerParams params = MOK__LAYER_PARAMS__INIT;
    Mok__Region gate = MOK__REGION__INIT;
    (void)state;

    lender_open(&l);
    gate.buffer = l.lent.id;
    gate.length = l.lent.bytes;
    params.gate = &gate;
    assert_int_equal(layer_bind(&l.job.layer, 0, &params), 0);
    assert_int_equal(buffer_unmap(&l.worker[0], l.job.client[0].session, l.group.id, 0, l.lent.id), -MOK_EBUSY);
    assert_int_equal(group_close(&l.group, 0), 0);
    job_submit_forward(&l.job, 0, 1);
    assert_int_equal(client_expect(&l.job.client[0], 1, -MOK_ESTATE).argument, MOK_ARG_PARAMS);
    assert_int_equal(layer_bind(&l.job.layer, 0, &params), -MOK_EBUFFER);
    lender_close(&l);
}

static void leaving_a_group_ends_what_other_groups_do_with_its_memory(void **state)
{
    struct lender l;
    (void)state;

    lender_open(&l);
    struct mok_sqe sqe = job_forward(&l.job, 0, 1);
    sqe.region[MOK_REGION_OUT] = (struct mok_region){ .buffer = l.lent.id, .length = l.lent.bytes };
    client_submit(&l.job.client[0], &sqe);
    assert_int_equal(op_await(&l.job.client[0], 1, MOK_ST_READY), 1u << 1);
    assert_int_equal(group_close(&l.group, 0), 0);
    client_expect(&l.job.client[0], 1, -MOK_EBUFFER);
    Mok__WorkerReply *event = worker_event(&l.worker[0], HARNESS_WAIT_MS);
    assert_non_null(event);
    assert_int_equal(event->body_case, MOK__WORKER_REPLY__BODY_GROUP_BROKEN);
    assert_int_equal(event->code, -MOK_EBUFFER);
    assert_int_equal(event->group_broken->group, l.job.group.id);
    mok_wire_free(&event->base);
    lender_close(&l);
}

/* ------------------------------------------------------------------ layers and numbers */

static void memory_that_was_asked_for_comes_zeroed_and_is_the_askers(void **state)
{
    struct worker worker;
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerMemoryAlloc alloc = MOK__WORKER_MEMORY_ALLOC__INIT;
    _cleanup_wire_fds_ struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    char bytes[8192], zeros[8192] = { 0 };
    (void)state;

    worker_start(&worker, NULL);
    request.body_case = MOK__WORKER_REQUEST__BODY_MEMORY_ALLOC;
    request.memory_alloc = &alloc;
    assert_int_equal(worker_ask(&worker, &request, NULL, 0, NULL), -MOK_ESIZE);
    alloc.bytes = 8192;
    assert_int_equal(worker_ask_fds(&worker, &request, &fds), 0);
    assert_int_equal(fds.count, 1);
    assert_int_equal(pread(fds.fd[0], bytes, sizeof(bytes), 0), sizeof(bytes));
    assert_memory_equal(bytes, zeros, sizeof(bytes));
    assert_int_equal(ask_map(&worker, 5, 8192, fds.fd, 1), 0);
    worker_end(&worker);
    assert_int_equal(pwrite(fds.fd[0], "x", 1, 0), 1);
}

static void a_layer_that_mokd_planned_otherwise_is_refused(void **state)
{
    struct worker worker;
    struct client client;
    struct client *ranks[] = { &client };
    struct group group;
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerLayerOpen open = MOK__WORKER_LAYER_OPEN__INIT;
    Mok__LayerSpec spec = MOK__LAYER_SPEC__INIT;
    Mok__LayerMemory memory = MOK__LAYER_MEMORY__INIT;
    int fds[4];
    (void)state;

    worker_start(&worker, NULL);
    client_open(&client, &worker, harness_id(), 4, 0);
    group_open(&group, harness_id(), ranks, 1);
    for (unsigned i = 0; i < 4; i++)
        assert_int_equal(mok_memory_create("test", 1u << 20, &fds[i]), 0);
    spec.hidden = 32;
    spec.intermediate = 16;
    spec.experts = 4;
    spec.topk = 2;
    spec.max_tokens = 16;
    spec.precision = MOK_BF16;
    memory.symmetric_bytes = memory.private_bytes = 4096;
    open.group = group.id;
    open.queue = client.id;
    open.layer = harness_id();
    request.body_case = MOK__WORKER_REQUEST__BODY_LAYER_OPEN;
    request.layer_open = &open;
    assert_int_equal(worker_ask(&worker, &request, fds, 3, NULL), -MOK_EPROTO);
    open.spec = &spec;
    assert_int_equal(worker_ask(&worker, &request, fds, 3, NULL), -MOK_EPROTO);
    open.memory = &memory;
    assert_int_equal(worker_ask(&worker, &request, fds, 3, NULL), -MOK_ESIZE);
    assert_int_equal(worker_ask(&worker, &request, fds, 4, NULL), -MOK_EPROTO);
    spec.hidden = 33;
    assert_true(worker_ask(&worker, &request, fds, 3, NULL) < 0);
    open.queue = 99999;
    assert_int_equal(worker_ask(&worker, &request, fds, 3, NULL), -MOK_ENOENT);
    open.layer = 0;
    assert_int_equal(worker_ask(&worker, &request, fds, 3, NULL), -MOK_EARG);
    for (unsigned i = 0; i < 4; i++)
        close(fds[i]);
    client_free(&client);
    worker_end(&worker);
}

static void ping_tells_what_each_queue_did(void **state)
{
    struct worker worker;
    struct worker *workers[] = { &worker };
    struct job job;
    struct client other;
    Mok__WorkerReply *reply;
    (void)state;

    worker_start(&worker, NULL);
    job_open(&job, workers, 1, &job_small);
    client_open(&other, &worker, harness_id(), 4, 0);
    client_expect_alive(&other);
    client_expect_alive(&other);
    job_submit_forward(&job, 0, 1);
    struct mok_cqe cqe = client_expect(&job.client[0], 1, 0);
    assert_true(cqe.device_ns > 0);
    assert_int_equal(ask_simple(&worker, MOK__WORKER_REQUEST__BODY_PING, &reply), 0);
    assert_int_equal(reply->body_case, MOK__WORKER_REPLY__BODY_STATS);
    assert_int_equal(reply->stats->ops_done, 3);
    assert_int_equal(reply->stats->device_ns, cqe.device_ns);
    assert_int_equal(reply->stats->errors, 0);
    assert_int_equal(reply->stats->n_queue, 2);
    for (size_t i = 0; i < 2; i++) {
        bool is_job = reply->stats->queue[i]->queue == job.client[0].id;
        assert_int_equal(reply->stats->queue[i]->ops_done, is_job ? 1 : 2);
        assert_int_equal(reply->stats->queue[i]->device_ns, is_job ? cqe.device_ns : 0);
    }
    mok_wire_free(&reply->base);
    assert_int_equal(client_close(&other), 0);
    client_free(&other);
    job_close(&job);
    worker_end(&worker);
}

/* ------------------------------------------------------------------ nothing is left */

static unsigned count_descriptors(pid_t pid)
{
    char path[64];
    unsigned count = 0;

    snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *directory = opendir(path);
    assert_non_null(directory);
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

static unsigned count_memfds_mapped(pid_t pid)
{
    char path[64], line[512];
    unsigned count = 0;

    snprintf(path, sizeof(path), "/proc/%d/maps", (int)pid);
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        count += strstr(line, "/memfd:") != NULL;
    fclose(file);
    return count;
}

static void a_hundred_jobs_leave_no_descriptor_and_no_mapping(void **state)
{
    struct worker first, second;
    struct worker *workers[] = { &first, &second };
    struct job job;
    unsigned descriptors = 0;
    (void)state;

    worker_start(&first, NULL);
    worker_start(&second, NULL);
    for (unsigned i = 0; i < 100; i++) {
        job_open(&job, workers, 2, &job_small);
        job_submit_forward(&job, 0, 1);
        if (i % 2) {
            job_submit_forward(&job, 1, 1);
            client_expect(&job.client[0], 1, 0);
            client_expect(&job.client[1], 1, 0);
        }
        job_close(&job);
        if (i == 10)
            descriptors = count_descriptors(first.pid);
    }
    assert_int_equal(count_descriptors(first.pid), descriptors);
    assert_int_equal(count_memfds_mapped(first.pid), 0);
    assert_int_equal(count_memfds_mapped(second.pid), 0);
    worker_end(&first);
    worker_end(&second);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(start_says_what_the_device_is_and_comes_first_and_once),
        cmocka_unit_test(stop_is_answered_and_ends_the_process),
        cmocka_unit_test(signals_to_the_process_group_are_left_to_mokd),
        cmocka_unit_test(a_malformed_message_ends_the_worker_with_an_error),
        cmocka_unit_test(unknown_names_are_refused_one_by_one),
        cmocka_unit_test(a_buffer_has_one_descriptor_a_size_that_is_there_and_a_new_id),
        cmocka_unit_test(what_is_in_use_is_not_taken_away),
        cmocka_unit_test(leaving_a_group_unbinds_its_memory_from_other_groups),
        cmocka_unit_test(leaving_a_group_ends_what_other_groups_do_with_its_memory),
        cmocka_unit_test(memory_that_was_asked_for_comes_zeroed_and_is_the_askers),
        cmocka_unit_test(a_layer_that_mokd_planned_otherwise_is_refused),
        cmocka_unit_test(ping_tells_what_each_queue_did),
        cmocka_unit_test(a_hundred_jobs_leave_no_descriptor_and_no_mapping),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
