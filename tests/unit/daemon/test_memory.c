/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers: what is handed out is what was asked, and every byte is charged and comes back. */
#include "fixture.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static struct answer ask_free(struct client *client, uint32_t buffer)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__BufferFree body = MOK__BUFFER_FREE__INIT;

    body.buffer = buffer;
    request.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
    request.buffer_free = &body;
    return client_ask(client, &request);
}

static void expect_free(struct client *client, uint32_t buffer, int code)
{
    _cleanup_answer_ struct answer answer = ask_free(client, buffer);
    assert_int_equal(answer.reply->code, code);
}

static void expect_refused(struct client *client, uint32_t group, uint32_t device, uint64_t bytes, int code,
                           const char *part)
{
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, group, device, bytes);
    _cleanup_answer_ struct answer answer = client_ask(client, &request);

    assert_int_equal(answer.reply->code, code);
    if (!strstr(answer.reply->text, part))
        fail_msg("\"%s\" does not say \"%s\"", answer.reply->text, part);
    assert_int_equal(answer.fds.count, 0);
}

static void send_alloc(struct client *client, uint32_t group, uint64_t bytes, uint64_t timeout_ms)
{
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, group, 0, bytes);

    alloc.timeout_ms = timeout_ms;
    client_send(client, &request);
}

static void expect_answer(struct client *client, int code, const char *part)
{
    _cleanup_answer_ struct answer answer = client_receive(client);
    assert_non_null(answer.reply);
    assert_int_equal(answer.reply->code, code);
    if (!strstr(answer.reply->text, part))
        fail_msg("\"%s\" does not say \"%s\"", answer.reply->text, part);
}

static void open_pair(struct client *clients, const struct daemon *daemon)
{
    client_open(&clients[0], daemon);
    client_open(&clients[1], daemon);
}

static void close_pair(struct client *clients)
{
    client_close(&clients[0]);
    client_close(&clients[1]);
}

/* ------------------------------------------------------------------ private */

static void a_private_buffer_is_sealed_zeroed_and_as_large_as_asked(void **state)
{
    struct client client;
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, 0, 1, 5000);
    struct stat status;

    client_open(&client, *state);
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(answer.reply->buffer_alloc->bytes, 5000);
    assert_int_equal(answer.fds.count, 1);
    assert_int_equal(fstat(answer.fds.fd[0], &status), 0);
    assert_int_equal(status.st_size, 5000);
    int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
    assert_int_equal(fcntl(answer.fds.fd[0], F_GET_SEALS) & seals, seals);
    char *memory = mmap(NULL, 5000, PROT_READ | PROT_WRITE, MAP_SHARED, answer.fds.fd[0], 0);
    assert_ptr_not_equal(memory, MAP_FAILED);
    for (int i = 0; i < 5000; i++)
        assert_int_equal(memory[i], 0);
    munmap(memory, 5000);
    client_close(&client);
}

static void buffers_are_charged_and_come_back(void **state)
{
    struct client client;

    client_open(&client, *state);
    uint32_t first = client_buffer(&client, 0, 1000);
    uint32_t second = client_buffer(&client, 1, 1 << 20);
    assert_int_not_equal(first, second);
    assert_int_equal(client_bytes_used(&client), 4096 + (1 << 20)); /* whole pages */
    {
        _cleanup_answer_ struct answer status = client_status(&client);
        assert_int_equal(status.reply->status->device[0]->memory_used, 4096);
        assert_int_equal(status.reply->status->device[1]->memory_used, 1 << 20);
        assert_int_equal(status.reply->status->job[0]->buffers, 2);
    }
    expect_free(&client, first, 0);
    client_expect_bytes(&client, 1 << 20);
    expect_free(&client, second, 0);
    client_expect_bytes(&client, 0);
    client_close(&client);
}

static void a_buffer_is_freed_once_and_by_its_owner(void **state)
{
    struct client owner, other;

    client_open(&owner, *state);
    client_open(&other, *state);
    uint32_t buffer = client_buffer(&owner, 0, 4096);
    expect_free(&other, buffer, -MOK_EBUFFER);
    expect_free(&owner, 0, -MOK_EBUFFER);
    expect_free(&owner, buffer, 0);
    expect_free(&owner, buffer, -MOK_EBUFFER);
    client_close(&owner);
    client_close(&other);
}

static void sizes_and_devices_that_are_not_there_are_refused(void **state)
{
    struct client client;

    client_open(&client, *state);
    expect_refused(&client, 0, 0, 0, -MOK_ESIZE, "bytes = 0");
    expect_refused(&client, 0, 0, UINT64_MAX, -MOK_ESIZE, "bytes = 18446744073709551615");
    expect_refused(&client, 0, 7, 4096, -MOK_ENODEV, "device = 7");
    expect_refused(&client, 99, 0, 4096, -MOK_ENOENT, "group = 99");
    assert_int_equal(client_bytes_used(&client), 0);
    client_close(&client);
}

static void a_device_hands_out_no_more_than_it_has(void **state)
{
    struct client client;

    client_open(&client, *state);
    uint32_t most = client_buffer(&client, 0, 60 << 20);
    expect_refused(&client, 0, 0, 5 << 20, -MOK_ENOMEM, "device host0 has 67108864 bytes, 62914560 of them in use");
    expect_free(&client, most, 0);
    client_expect_bytes(&client, 0);
    client_buffer(&client, 0, 64 << 20);
    client_close(&client);
}

static void a_user_has_no_more_than_his_limits(void **state)
{
    struct daemon daemon;
    struct client client, other;

    (void)state;
    daemon_start(&daemon, "[limits]\nbytes = 1M\nbuffers = 3\n[device host0]\n", 0);
    client_open(&client, &daemon);
    client_open(&other, &daemon);
    client_buffer(&client, 0, 1 << 19);
    expect_refused(&other, 0, 0, (1 << 19) + 1, -MOK_EQUOTA, "may have 1048576 bytes and has 524288");
    client_buffer(&client, 0, 1);
    expect_refused(&other, 0, 0, (1 << 19) - 1, -MOK_EQUOTA, "has 528384"); /* that one byte took a page */
    client_buffer(&other, 0, (1 << 19) - 4096);
    expect_refused(&client, 0, 0, 1, -MOK_EQUOTA, "may have 3 buffers and has 3"); /* his other session's too */
    client_close(&client);
    client_expect_bytes(&other, (1 << 19) - 4096);
    client_close(&other);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void freed_memory_is_gone_though_its_client_keeps_the_descriptor(void **state)
{
    struct client client;
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, 0, 0, 1 << 20);
    struct stat status;

    client_open(&client, *state);
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(fstat(answer.fds.fd[0], &status), 0);
    assert_int_equal(status.st_blocks, (1 << 20) / 512);
    expect_free(&client, answer.reply->buffer_alloc->buffer, 0);
    client_expect_bytes(&client, 0);
    assert_int_equal(fstat(answer.fds.fd[0], &status), 0);
    assert_int_equal(status.st_blocks, 0);
    client_close(&client);
}

static void a_queue_is_charged_while_it_is_there(void **state)
{
    struct client client, other;

    client_open(&client, *state);
    client_open(&other, *state);
    client_queue(&client, 0);
    uint64_t bytes = client_bytes_used(&other);
    assert_in_range(bytes, 3 * 4096, 1 << 20);
    assert_int_equal(bytes % 4096, 0);
    client_close(&client);
    client_expect_bytes(&other, 0);
    client_close(&other);
}

static void send_stream(struct client *client, uint32_t queue)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__StreamOpen body = MOK__STREAM_OPEN__INIT;

    body.queue = queue;
    request.body_case = MOK__REQUEST__BODY_STREAM_OPEN;
    request.stream_open = &body;
    client_send(client, &request);
}

static struct answer ask_stream(struct client *client, uint32_t queue)
{
    send_stream(client, queue);
    return client_receive(client);
}

static void a_queues_stream_slots_are_made_and_charged_once_and_had_again_by_who_asks_again(void **state)
{
    struct stat before, after;
    struct client client, other;

    client_open(&client, *state);
    client_open(&other, *state);
    uint32_t queue = client_queue(&client, 0);
    uint64_t alone = client_bytes_used(&other);
    _cleanup_answer_ struct answer first = ask_stream(&client, queue), second = ask_stream(&client, queue);
    assert_int_equal(first.reply->code, 0);
    assert_int_equal(second.reply->code, 0);
    assert_true(first.reply->stream_open->bytes > 0);
    assert_int_equal(second.reply->stream_open->slots, first.reply->stream_open->slots);
    assert_int_equal(fstat(first.fds.fd[0], &before), 0);
    assert_int_equal(fstat(second.fds.fd[0], &after), 0);
    assert_int_equal(after.st_ino, before.st_ino);
    assert_int_equal(client_bytes_used(&other), alone + first.reply->stream_open->bytes);
    client_close(&client);
    client_expect_bytes(&other, 0);
    client_close(&other);
}

/* mokd reads both before the worker has answered, unless it is held up in between. */
static void stream_slots_that_are_being_made_are_asked_for_again_a_moment_later(void **state)
{
    struct client client;

    client_open(&client, *state);
    uint32_t queue = client_queue(&client, 0);
    send_stream(&client, queue);
    send_stream(&client, queue);
    _cleanup_answer_ struct answer one = client_receive(&client), two = client_receive(&client);
    assert_true(one.reply->code == 0 || one.reply->code == -MOK_EBUSY);
    assert_true(two.reply->code == 0);
    _cleanup_answer_ struct answer third = ask_stream(&client, queue);
    assert_int_equal(third.reply->code, 0);
    client_close(&client);
}

static void a_closed_queues_submissions_are_gone_though_its_client_keeps_the_descriptor(void **state)
{
    Mok__Request open = MOK__REQUEST__INIT, close = MOK__REQUEST__INIT;
    Mok__QueueOpen body = MOK__QUEUE_OPEN__INIT;
    Mok__QueueClose end = MOK__QUEUE_CLOSE__INIT;
    struct client client;
    struct stat status;

    client_open(&client, *state);
    body.entries = 16;
    open.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
    open.queue_open = &body;
    _cleanup_answer_ struct answer opened = client_ask(&client, &open);
    assert_int_equal(opened.reply->code, 0);
    assert_int_equal(fstat(opened.fds.fd[1], &status), 0);
    assert_true(status.st_blocks > 0);
    end.queue = opened.reply->queue_open->queue;
    close.body_case = MOK__REQUEST__BODY_QUEUE_CLOSE;
    close.queue_close = &end;
    _cleanup_answer_ struct answer closed = client_ask(&client, &close);
    assert_int_equal(closed.reply->code, 0);
    assert_int_equal(fstat(opened.fds.fd[1], &status), 0);
    assert_int_equal(status.st_blocks, 0);
    client_close(&client);
}

/* 96 descriptors: 48 of them for one user, however small his buffers are. */
static void one_user_cannot_take_all_descriptors(void **state)
{
    struct daemon daemon;
    struct client hog, other;

    (void)state;
    daemon_start(&daemon, NULL, 96);
    client_open(&hog, &daemon);
    for (int i = 0; i < 48; i++)
        client_buffer(&hog, 0, 1);
    expect_refused(&hog, 0, 0, 1, -MOK_EQUOTA, "may have 48 descriptors and has 48");
    client_open(&other, &daemon); /* a connection still gets in */
    client_close(&hog);
    client_expect_bytes(&other, 0);
    client_buffer(&other, 0, 1); /* and what was closed is given back */
    client_close(&other);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_worker_that_cannot_map_makes_the_allocation_fail_without_a_trace(void **state)
{
    struct daemon daemon;
    struct client clients[2];

    (void)state;
    daemon_start(&daemon, "[device host0]\n[device deny-maps]\n", 0);
    open_pair(clients, &daemon);
    expect_refused(&clients[0], 0, 1, 4096, -MOK_ENOMEM, "no room for it");
    uint32_t group = client_join(clients, 2, "g");
    send_alloc(&clients[0], group, 4096, 0);
    send_alloc(&clients[1], group, 4096, 0);
    expect_answer(&clients[0], -MOK_ENOMEM, "rank 1: no room for it");
    expect_answer(&clients[1], -MOK_ENOMEM, "rank 1: no room for it");
    client_expect_bytes(&clients[0], 0);
    close_pair(clients);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* The worker lets go only once it is asked for the next one's memory: so that came before the dead ones' was free. */
static void report_25_a_dead_sessions_memory_goes_slowly_and_the_next_one_gets_in_meanwhile(void **state)
{
    enum { DYING = 8, BYTES = 4 << 20 };
    struct daemon daemon;
    struct client dying[DYING], next;

    (void)state;
    daemon_start(&daemon, "[device slow-drops]\nmemory = 64M\n", 0);
    for (int i = 0; i < DYING; i++) {
        client_open(&dying[i], &daemon);
        client_queue(&dying[i], 0);
        client_buffer(&dying[i], 0, BYTES);
    }
    for (int i = 0; i < DYING; i++)
        client_close(&dying[i]);
    client_open(&next, &daemon);
    uint32_t queue = client_queue(&next, 0);
    assert_true(client_bytes_used(&next) >= (uint64_t)DYING * BYTES);
    client_buffer(&next, 0, BYTES);
    Mok__Request request = MOK__REQUEST__INIT; /* so that the buffer alone is left */
    Mok__QueueClose body = MOK__QUEUE_CLOSE__INIT;
    body.queue = queue;
    request.body_case = MOK__REQUEST__BODY_QUEUE_CLOSE;
    request.queue_close = &body;
    _cleanup_answer_ struct answer answer = client_ask(&next, &request);
    assert_int_equal(answer.reply->code, 0);
    client_expect_bytes(&next, BYTES);
    client_close(&next);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_buffer_in_use_stays(void **state)
{
    struct daemon daemon;
    struct client client;

    (void)state;
    daemon_start(&daemon, "[device busy]\n", 0);
    client_open(&client, &daemon);
    uint32_t buffer = client_buffer(&client, 0, 4096);
    expect_free(&client, buffer, -MOK_EBUSY);
    assert_int_equal(client_bytes_used(&client), 4096);
    client_close(&client);
    client_open(&client, &daemon);
    client_expect_bytes(&client, 0); /* but not beyond its session */
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* ------------------------------------------------------------------ symmetric */

static void a_symmetric_buffer_has_one_id_and_a_copy_a_rank(void **state)
{
    struct client clients[2];
    uint32_t ids[2];
    ino_t inodes[2];

    open_pair(clients, *state);
    uint32_t group = client_join(clients, 2, "symmetric");
    send_alloc(&clients[1], group, 8192, 0);
    send_alloc(&clients[0], group, 8192, 0);
    for (int i = 0; i < 2; i++) {
        struct stat status;
        _cleanup_answer_ struct answer answer = client_receive(&clients[i]);
        assert_int_equal(answer.reply->code, 0);
        assert_int_equal(answer.fds.count, 1);
        assert_int_equal(fstat(answer.fds.fd[0], &status), 0);
        ids[i] = answer.reply->buffer_alloc->buffer;
        inodes[i] = status.st_ino;
    }
    assert_int_equal(ids[0], ids[1]);
    assert_int_not_equal(inodes[0], inodes[1]);
    assert_int_equal(client_bytes_used(&clients[0]), 2 * 8192);
    expect_free(&clients[0], ids[0], 0);
    client_expect_bytes(&clients[0], 8192);
    expect_free(&clients[1], ids[1], 0);
    client_expect_bytes(&clients[0], 0);
    close_pair(clients);
}

static void ranks_that_differ_on_the_size_all_learn_it(void **state)
{
    struct client clients[2];

    open_pair(clients, *state);
    uint32_t group = client_join(clients, 2, "differ");
    send_alloc(&clients[0], group, 4096, 0);
    send_alloc(&clients[1], group, 8192, 0);
    expect_answer(&clients[0], -MOK_EMISMATCH, "ranks 0 and 1 differ on bytes: 4096 and 8192");
    expect_answer(&clients[1], -MOK_EMISMATCH, "ranks 0 and 1 differ on bytes: 4096 and 8192");
    assert_int_equal(client_bytes_used(&clients[0]), 0);
    send_alloc(&clients[0], group, 4096, 0); /* the ranks are still in step */
    send_alloc(&clients[1], group, 4096, 0);
    expect_answer(&clients[0], 0, "");
    expect_answer(&clients[1], 0, "");
    close_pair(clients);
}

static void calls_meet_in_the_order_in_which_each_rank_makes_them(void **state)
{
    struct client clients[2];
    uint32_t ids[2][2];

    open_pair(clients, *state);
    uint32_t group = client_join(clients, 2, "order");
    send_alloc(&clients[0], group, 4096, 0);
    send_alloc(&clients[0], group, 8192, 0);
    send_alloc(&clients[1], group, 4096, 0);
    send_alloc(&clients[1], group, 8192, 0);
    for (int i = 0; i < 2; i++) {
        for (int n = 0; n < 2; n++) {
            _cleanup_answer_ struct answer answer = client_receive(&clients[i]);
            assert_int_equal(answer.reply->code, 0);
            ids[i][answer.reply->buffer_alloc->bytes == 8192] = answer.reply->buffer_alloc->buffer;
        }
    }
    assert_int_equal(ids[0][0], ids[1][0]);
    assert_int_equal(ids[0][1], ids[1][1]);
    assert_int_not_equal(ids[0][0], ids[0][1]);
    close_pair(clients);
}

static void a_call_that_waits_in_vain_fails_on_late_ranks_too(void **state)
{
    struct client clients[2];

    open_pair(clients, *state);
    uint32_t group = client_join(clients, 2, "vain");
    send_alloc(&clients[0], group, 4096, 50);
    expect_answer(&clients[0], -MOK_ETIMEDOUT, "no call came from rank 1");
    send_alloc(&clients[1], group, 4096, 0);
    expect_answer(&clients[1], -MOK_ETIMEDOUT, "rank 0 of group vain waited 50 ms");
    send_alloc(&clients[1], group, 4096, 0);
    send_alloc(&clients[0], group, 4096, 0);
    expect_answer(&clients[0], 0, "");
    expect_answer(&clients[1], 0, "");
    close_pair(clients);
}

static void a_rank_that_comes_alone_again_and_again_leaves_little_behind(void **state)
{
    enum { CALLS = 80, KEPT = 64 };
    struct client clients[2];

    open_pair(clients, *state);
    uint32_t group = client_join(clients, 2, "alone");
    for (int i = 0; i < CALLS; i++) {
        send_alloc(&clients[0], group, 4096, 1);
        expect_answer(&clients[0], -MOK_ETIMEDOUT, "no call came from rank 1");
    }
    for (int i = 0; i < CALLS; i++) {
        send_alloc(&clients[1], group, 4096, 0);
        expect_answer(&clients[1], -MOK_ETIMEDOUT,
                      i < CALLS - KEPT ? "other ranks gave this call of rank 1 up"
                                       : "rank 0 of group alone waited 1 ms");
    }
    send_alloc(&clients[1], group, 4096, 0); /* and they are in step */
    send_alloc(&clients[0], group, 4096, 0);
    expect_answer(&clients[0], 0, "");
    expect_answer(&clients[1], 0, "");
    close_pair(clients);
}

static void a_rank_beyond_its_limit_fails_the_call_for_all(void **state)
{
    struct client clients[2];

    open_pair(clients, *state);
    uint32_t group = client_join(clients, 2, "full");
    client_buffer(&clients[1], 1, 60 << 20);
    send_alloc(&clients[0], group, 5 << 20, 0);
    send_alloc(&clients[1], group, 5 << 20, 0);
    expect_answer(&clients[0], -MOK_ENOMEM, "rank 1: bytes = 5242880");
    expect_answer(&clients[1], -MOK_ENOMEM, "rank 1: bytes = 5242880");
    client_expect_bytes(&clients[0], 60 << 20);
    close_pair(clients);
}

static void a_waiting_call_ends_when_a_rank_goes(void **state)
{
    struct client clients[2];

    open_pair(clients, *state);
    uint32_t group = client_join(clients, 2, "gone");
    send_alloc(&clients[0], group, 4096, 0);
    client_bytes_used(&clients[0]); /* mokd has the call */
    client_close(&clients[1]);
    bool answered = false;
    for (int i = 0; i < 2; i++) { /* the event and the answer */
        _cleanup_answer_ struct answer answer = client_receive(&clients[0]);
        assert_int_equal(answer.reply->code, -MOK_EPEER);
        answered |= answer.reply->id != 0;
    }
    assert_true(answered);
    client_expect_bytes(&clients[0], 0);
    client_close(&clients[0]);
}

static void leaving_a_group_frees_its_symmetric_buffers(void **state)
{
    struct client clients[2];
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__GroupLeave body = MOK__GROUP_LEAVE__INIT;

    open_pair(clients, *state);
    body.group = client_join(clients, 2, "left");
    for (int i = 0; i < 3; i++) {
        send_alloc(&clients[0], body.group, 1 << 20, 0);
        send_alloc(&clients[1], body.group, 1 << 20, 0);
        expect_answer(&clients[0], 0, "");
        expect_answer(&clients[1], 0, "");
    }
    assert_int_equal(client_bytes_used(&clients[0]), 6 << 20);
    request.body_case = MOK__REQUEST__BODY_GROUP_LEAVE;
    request.group_leave = &body;
    _cleanup_answer_ struct answer answer = client_ask(&clients[1], &request);
    assert_int_equal(answer.reply->code, 0);
    client_expect_bytes(&clients[1], 3 << 20);
    client_close(&clients[0]);
    client_expect_bytes(&clients[1], 0);
    client_close(&clients[1]);
}

/* A daemon each: what one leaves charged is not the next one's. */
#define test(name) cmocka_unit_test_setup_teardown(name, daemon_setup, daemon_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        test(a_private_buffer_is_sealed_zeroed_and_as_large_as_asked),
        test(buffers_are_charged_and_come_back),
        test(a_buffer_is_freed_once_and_by_its_owner),
        test(sizes_and_devices_that_are_not_there_are_refused),
        test(a_device_hands_out_no_more_than_it_has),
        cmocka_unit_test(a_user_has_no_more_than_his_limits),
        test(freed_memory_is_gone_though_its_client_keeps_the_descriptor),
        test(a_queue_is_charged_while_it_is_there),
        test(a_queues_stream_slots_are_made_and_charged_once_and_had_again_by_who_asks_again),
        test(stream_slots_that_are_being_made_are_asked_for_again_a_moment_later),
        test(a_closed_queues_submissions_are_gone_though_its_client_keeps_the_descriptor),
        cmocka_unit_test(one_user_cannot_take_all_descriptors),
        cmocka_unit_test(a_worker_that_cannot_map_makes_the_allocation_fail_without_a_trace),
        cmocka_unit_test(report_25_a_dead_sessions_memory_goes_slowly_and_the_next_one_gets_in_meanwhile),
        cmocka_unit_test(a_buffer_in_use_stays),
        test(a_symmetric_buffer_has_one_id_and_a_copy_a_rank),
        test(ranks_that_differ_on_the_size_all_learn_it),
        test(calls_meet_in_the_order_in_which_each_rank_makes_them),
        test(a_call_that_waits_in_vain_fails_on_late_ranks_too),
        test(a_rank_that_comes_alone_again_and_again_leaves_little_behind),
        test(a_rank_beyond_its_limit_fails_the_call_for_all),
        test(a_waiting_call_ends_when_a_rank_goes),
        test(leaving_a_group_frees_its_symmetric_buffers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
