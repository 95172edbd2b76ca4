/* SPDX-License-Identifier: Apache-2.0 */
/* Supervision: a worker that dies takes its queues and groups with it and nothing else, and is replaced. */
#include "fixture.h"

#include <signal.h>
#include <string.h>

#include "queue.h"

enum { PATIENCE_MS = 30000 };

static pid_t worker_of(struct client *client, uint32_t device, uint32_t *ret_restarts)
{
    _cleanup_answer_ struct answer answer = client_status(client);
    const Mok__DeviceInfo *info = answer.reply->status->device[device];

    if (ret_restarts)
        *ret_restarts = info->restarts;
    return info->state == MOK__DEVICE_STATE__DEVICE_UP ? (pid_t)info->worker_pid : 0;
}

static pid_t wait_for_worker(struct client *client, uint32_t device, pid_t not_this)
{
    for (int waited = 0; waited < PATIENCE_MS; waited += 5) {
        pid_t pid = worker_of(client, device, NULL);
        if (pid > 0 && pid != not_this)
            return pid;
        sleep_ms(5);
    }
    fail_msg("no worker of device %u within %d seconds", device, PATIENCE_MS / 1000);
    return 0;
}

static struct answer open_queue(struct client *client, uint32_t device)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueOpen open = MOK__QUEUE_OPEN__INIT;

    open.device = device;
    open.entries = 8;
    request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
    request.queue_open = &open;
    return client_ask(client, &request);
}

/* ------------------------------------------------------------------ death */

static void a_killed_worker_is_replaced(void **state)
{
    struct client client;
    uint32_t restarts;

    client_open(&client, *state);
    pid_t first = wait_for_worker(&client, 0, 0), other = wait_for_worker(&client, 1, 0);
    kill(first, SIGKILL);
    pid_t second = wait_for_worker(&client, 0, first);
    assert_int_not_equal(second, first);
    worker_of(&client, 0, &restarts);
    assert_int_equal(restarts, 1);
    assert_int_equal(worker_of(&client, 1, &restarts), other);
    assert_int_equal(restarts, 0);
    client_close(&client);
}

static void the_queue_of_a_dead_worker_is_closed_and_another_can_be_opened(void **state)
{
    struct client client;
    struct mok_queue_client queue = { 0 };
    struct mok_cqe cqe;
    struct mok_sqe *sqe;

    client_open(&client, *state);
    pid_t worker = wait_for_worker(&client, 0, 0);
    {
        _cleanup_answer_ struct answer answer = open_queue(&client, 0);
        assert_int_equal(answer.reply->code, 0);
        assert_int_equal(mok_queue_client_open(answer.fds.fd[0], answer.fds.fd[1], answer.fds.fd[2], &queue), 0);
        assert_int_equal(mok_queue_client_reserve(&queue, &sqe), 0);
        kill(worker, SIGKILL);
        assert_int_equal(mok_queue_client_wait(&queue, 0, 0), 0);
        assert_int_equal(mok_queue_client_reap(&queue, &cqe), -MOK_EWORKER);
    }
    mok_queue_client_release(&queue);
    wait_for_worker(&client, 0, worker);
    client_queue(&client, 0);
    client_close(&client);
}

static void a_group_fails_with_the_worker_of_one_of_its_ranks(void **state)
{
    struct client clients[2];

    client_open(&clients[0], *state);
    client_open(&clients[1], *state);
    pid_t worker = wait_for_worker(&clients[0], 1, 0);
    uint32_t group = client_join(clients, 2, "worker");
    kill(worker, SIGKILL);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&clients[i]);
        assert_int_equal(answer.reply->body_case, MOK__REPLY__BODY_GROUP_FAILED);
        assert_int_equal(answer.reply->group_failed->group, group);
        assert_int_equal(answer.reply->group_failed->rank, 1);
        assert_int_equal(answer.reply->code, i == 1 ? -MOK_EWORKER : -MOK_EPEER);
        assert_non_null(strstr(answer.reply->text, "host1 was ended by signal 9"));
    }
    wait_for_worker(&clients[0], 1, worker);
    assert_int_not_equal(client_join(clients, 2, "worker"), group); /* formed again, the old one still there */
    client_close(&clients[0]);
    client_close(&clients[1]);
}

static void private_buffers_outlive_the_worker(void **state)
{
    struct client client;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__BufferFree body = MOK__BUFFER_FREE__INIT;

    client_open(&client, *state);
    client_expect_bytes(&client, 0);
    pid_t worker = wait_for_worker(&client, 0, 0);
    body.buffer = client_buffer(&client, 0, 1 << 20);
    kill(worker, SIGKILL);
    wait_for_worker(&client, 0, worker);
    assert_int_equal(client_bytes_used(&client), 1 << 20);
    request.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
    request.buffer_free = &body;
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, 0);
    client_expect_bytes(&client, 0);
    client_close(&client);
}

static void a_session_ends_cleanly_while_its_worker_is_dead(void **state)
{
    struct client client, bystander;

    client_open(&bystander, *state);
    client_open(&client, *state);
    pid_t worker = wait_for_worker(&client, 0, 0);
    client_queue(&client, 0);
    client_buffer(&client, 0, 1 << 20);
    client_join(&client, 1, "alone");
    kill(worker, SIGKILL);
    client_close(&client);
    client_expect_bytes(&bystander, 0);
    wait_for_worker(&bystander, 0, worker);
    _cleanup_answer_ struct answer answer = client_status(&bystander);
    assert_int_equal(answer.reply->status->n_group, 0);
    assert_int_equal(answer.reply->status->device[0]->sessions, 0);
    client_close(&bystander);
}

static void a_worker_that_cannot_start_is_tried_again_with_pauses_and_the_others_serve(void **state)
{
    struct daemon daemon;
    struct client client;

    (void)state;
    daemon_start(&daemon, "[device host0]\n[device stillborn]\n", 0);
    client_open(&client, &daemon);
    wait_for_worker(&client, 0, 0);
    client_queue(&client, 0);
    sleep_ms(600);
    uint32_t restarts = 0;
    for (int waited = 0; waited < PATIENCE_MS && restarts < 2; waited += 5) {
        worker_of(&client, 1, &restarts);
        sleep_ms(5);
    }
    _cleanup_answer_ struct answer status = client_status(&client);
    const Mok__DeviceInfo *info = status.reply->status->device[1];
    assert_int_equal(info->state, MOK__DEVICE_STATE__DEVICE_STARTING);
    assert_in_range(info->restarts, 2, 8); /* one after the other they were hundreds */
    assert_non_null(strstr(info->reason, "could not start"));
    _cleanup_answer_ struct answer answer = open_queue(&client, 1);
    assert_int_equal(answer.reply->code, -MOK_EWORKER);
    assert_non_null(strstr(answer.reply->text, "device stillborn is being restarted"));
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* Connections take every descriptor of mokd that is left. */
static void a_worker_is_replaced_though_no_descriptor_is_left(void **state)
{
    struct daemon daemon;
    struct client watcher, hog[64];

    (void)state;
    daemon_start(&daemon, "[limits]\nsessions = 1\n[device host0]\n", 48);
    client_open(&watcher, &daemon);
    pid_t worker = wait_for_worker(&watcher, 0, 0);
    for (int i = 0; i < 64; i++)
        client_connect(&hog[i], &daemon);
    unsigned held = daemon_descriptors(&daemon);
    for (int waited = 0; waited < PATIENCE_MS && held < 47; waited += 5) {
        sleep_ms(5);
        held = daemon_descriptors(&daemon);
    }
    assert_true(held >= 47);
    kill(worker, SIGKILL);
    wait_for_worker(&watcher, 0, worker);
    for (int i = 0; i < 64; i++)
        client_close(&hog[i]);
    client_close(&watcher);
    assert_int_equal(daemon_stop(&daemon), 0);
}

#if defined(MOK_HAVE_CUDA)
static bool is_starting(struct client *client, uint32_t device)
{
    _cleanup_answer_ struct answer answer = client_status(client);
    return answer.reply->status->device[device]->state == MOK__DEVICE_STATE__DEVICE_STARTING;
}

/* The memory of a GPU is the worker's to make and mokd's to keep; the fake worker's is a memfd. */
static void memory_that_a_worker_made_outlives_it(void **state)
{
    struct daemon daemon;
    struct client client;
    Mok__BufferAlloc body;
    Mok__Request request = ask_alloc(&body, 0, 0, 5000);
    char word[8] = "";
    (void)state;

    daemon_start(&daemon, "[device gpu0]\nkind = cuda\nmemory = 1G\n[device poor]\nkind = cuda\nmemory = 1G\n", 0);
    client_open(&client, &daemon);
    pid_t worker = wait_for_worker(&client, 0, 0);
    wait_for_worker(&client, 1, 0);
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(answer.reply->buffer_alloc->kind, MOK_DEVICE_CUDA);
    assert_int_equal(answer.reply->buffer_alloc->bytes, 5000);
    assert_int_equal(answer.fds.count, 1);
    assert_int_equal(pwrite(answer.fds.fd[0], "kittens", 8, 0), 8);
    kill(worker, SIGKILL);
    wait_for_worker(&client, 0, worker);
    assert_int_equal(pread(answer.fds.fd[0], word, 8, 0), 8);
    assert_string_equal(word, "kittens");
    assert_int_equal(client_bytes_used(&client), 8192);
    _cleanup_answer_ struct answer status = client_status(&client);
    assert_int_equal(status.reply->status->device[0]->memory_used, 2 << 20);

    request = ask_alloc(&body, 0, 1, 5000);
    _cleanup_answer_ struct answer none = client_ask(&client, &request);
    assert_int_equal(none.reply->code, -MOK_ENOMEM);
    assert_non_null(strstr(none.reply->text, "device poor does not give them: out of memory"));
    assert_int_equal(client_bytes_used(&client), 8192);
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_gpu_that_cannot_be_opened_has_failed_at_once_and_says_why(void **state)
{
    struct daemon daemon;
    struct client client;

    (void)state;
    daemon_start(&daemon, "[device host0]\n[device stillborn]\nkind = cuda\nmemory = 1G\n", 0);
    client_open(&client, &daemon);
    wait_for_worker(&client, 0, 0);
    for (int waited = 0; waited < PATIENCE_MS && is_starting(&client, 1); waited += 5)
        sleep_ms(5);
    _cleanup_answer_ struct answer status = client_status(&client);
    assert_int_equal(status.reply->status->device[1]->state, MOK__DEVICE_STATE__DEVICE_FAILED);
    assert_int_equal(status.reply->status->device[1]->restarts, 0);
    assert_non_null(strstr(status.reply->status->device[1]->reason, "could not start"));
    _cleanup_answer_ struct answer answer = open_queue(&client, 1);
    assert_int_equal(answer.reply->code, -MOK_EDEVICE);
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

#endif

#define test(name) cmocka_unit_test_setup_teardown(name, daemon_setup, daemon_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        test(a_killed_worker_is_replaced),
        test(the_queue_of_a_dead_worker_is_closed_and_another_can_be_opened),
        test(a_group_fails_with_the_worker_of_one_of_its_ranks),
        test(private_buffers_outlive_the_worker),
        test(a_session_ends_cleanly_while_its_worker_is_dead),
        cmocka_unit_test(a_worker_is_replaced_though_no_descriptor_is_left),
#if defined(MOK_HAVE_CUDA)
        cmocka_unit_test(memory_that_a_worker_made_outlives_it),
        cmocka_unit_test(a_gpu_that_cannot_be_opened_has_failed_at_once_and_says_why),
#endif
        cmocka_unit_test(a_worker_that_cannot_start_is_tried_again_with_pauses_and_the_others_serve),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
