/* SPDX-License-Identifier: Apache-2.0 */
/* A queue that is given back, by hand, with a real worker: it ends for good, and its place is free at once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cmocka.h>

#include "control.pb-c.h"
#include "mok/types.h"
#include "queue.h"
#include "stack.h"
#include "util.h"
#include "wire.h"

static struct stack stack;
static int client_fd;
static uint64_t last_id;

/* Sends and takes the answer; the caller frees it. `fds` NULL: none may come. */
static Mok__Reply *ask(Mok__Request *request, struct mok_wire_fds *fds)
{
    ProtobufCMessage *message = NULL;

    request->id = ++last_id;
    assert_int_equal(mok_wire_send(client_fd, &request->base, NULL, 0), 0);
    assert_int_equal(mok_wire_recv(client_fd, &mok__reply__descriptor, &message, fds), 1);
    assert_int_equal(((Mok__Reply *)message)->id, last_id);
    return (Mok__Reply *)message;
}

static void say_hello(void)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Hello body = MOK__HELLO__INIT;

    body.protocol_min = body.protocol_max = 1;
    body.job = (char *)"by-hand";
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = &body;
    Mok__Reply *reply = ask(&request, NULL);
    assert_int_equal(reply->code, 0);
    mok_wire_free(&reply->base);
}

static int start(void **state)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    (void)state;
    if (stack_start(&stack, &(struct stack_options){ .devices = 1 }) < 0)
        return -1;
    memcpy(address.sun_path, stack.socket, strlen(stack.socket) + 1);
    client_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    assert_int_equal(connect(client_fd, (struct sockaddr *)&address, sizeof(address)), 0);
    say_hello();
    return 0;
}

static int stop(void **state)
{
    (void)state;
    mok_close(client_fd);
    return stack_stop(&stack);
}

static uint32_t open_queue(struct mok_queue_client *ret)
{
    _cleanup_wire_fds_ struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueOpen body = MOK__QUEUE_OPEN__INIT;

    body.entries = 8;
    request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
    request.queue_open = &body;
    Mok__Reply *reply = ask(&request, &fds);
    assert_int_equal(reply->code, 0);
    assert_int_equal(fds.count, 3);
    uint32_t queue = reply->queue_open->queue;
    mok_wire_free(&reply->base);
    assert_int_equal(mok_queue_client_open(fds.fd[0], fds.fd[1], fds.fd[2], ret), 0);
    mok_wire_fds_take(&fds, 2); /* the doorbell is the queue's now */
    return queue;
}

static int close_queue(uint32_t queue)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueClose body = MOK__QUEUE_CLOSE__INIT;

    body.queue = queue;
    request.body_case = MOK__REQUEST__BODY_QUEUE_CLOSE;
    request.queue_close = &body;
    Mok__Reply *reply = ask(&request, NULL);
    int code = reply->code;
    mok_wire_free(&reply->base);
    return code;
}

static void run_nop(struct mok_queue_client *queue)
{
    struct mok_sqe *sqe;
    struct mok_cqe cqe;
    int r;

    assert_int_equal(mok_queue_client_reserve(queue, &sqe), 0);
    memset(sqe, 0, sizeof(*sqe));
    sqe->opcode = MOK_OP_NOP;
    sqe->user_data = 42;
    mok_queue_client_publish(queue);
    uint64_t until = mok_now_ns() + 10000000000u;
    while ((r = mok_queue_client_reap(queue, &cqe)) == 0 && mok_now_ns() < until)
        mok_queue_client_wait(queue, mok_queue_client_seen(queue), until);
    assert_int_equal(r, 1);
    assert_int_equal(cqe.result, 0);
    assert_int_equal(cqe.user_data, 42);
}

static void a_queue_given_back_is_closed_for_good_and_another_works(void **state)
{
    (void)state;
    for (int i = 0; i < 10; i++) {
        struct mok_queue_client queue;
        struct mok_sqe *sqe;
        struct mok_cqe cqe;
        uint32_t id = open_queue(&queue);
        int doorbell = queue.doorbell_fd;

        run_nop(&queue);
        assert_int_equal(close_queue(id), 0);
        assert_int_equal(mok_queue_client_reap(&queue, &cqe), -MOK_ECANCELED);
        assert_int_equal(mok_queue_client_reserve(&queue, &sqe), -MOK_ECANCELED);
        assert_int_equal(close_queue(id), -MOK_ENOENT);
        mok_queue_client_release(&queue);
        mok_close(doorbell);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_queue_given_back_is_closed_for_good_and_another_works),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
