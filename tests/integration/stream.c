/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations in the order of CUDA streams, through the whole stack, with a libcuda made of threads: what the hand-over
 * promises does not depend on where the experts run.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "fake_cuda.h"
#include "stack.h"
#include "workload.h"

#define WAIT_NS 10000000000
#define DRAIN_MS 3000
#define GONE_MS 20000

static const struct workload problem = {
    .hidden = 64,
    .intermediate = 48,
    .experts = 4,
    .topk = 2,
    .ep = 1,
    .max_tokens = 50,
    .context_mode = MOK_CONTEXT_NONE,
    .seed = 5,
};

struct client {
    struct stack stack;
    struct workload_rank rank;
    struct CUstream_st *stream;
};

static void sleep_ms(long ms)
{
    const struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&t, NULL);
}

static void client_open_with(struct client *c, const struct workload *p, const struct stack_options *options)
{
    assert_int_equal(stack_start(&c->stack, options), 0);
    int code = workload_open(&c->rank, p, 0, p->max_tokens, 0, c->stack.socket, "stream", 0);
    if (code < 0)
        fail_msg("%s", mok_last_error());
    c->stream = fake_stream_new();
}

static void client_open(struct client *c, const struct workload *p)
{
    client_open_with(c, p, NULL);
}

static void client_close(struct client *c)
{
    workload_close(&c->rank);
    assert_true(fake_stream_drain(c->stream, DRAIN_MS));
    fake_stream_free(c->stream);
    stack_stop(&c->stack);
}

static mok_forward_args forward_args(const struct workload_rank *r)
{
    return (mok_forward_args){ .size = sizeof(mok_forward_args),
                               .tokens = r->tokens,
                               .context_mode = MOK_CONTEXT_NONE,
                               .x = { .buffer = r->x },
                               .ids = { .buffer = r->ids },
                               .topk_weight = { .buffer = r->weight },
                               .out = { .buffer = r->out } };
}

static mok_ticket submit(struct client *c)
{
    mok_forward_args args = forward_args(&c->rank);
    mok_ticket ticket = 0;

    if (mok_layer_forward_on_stream(c->rank.layer, &args, c->stream, &ticket) < 0)
        fail_msg("%s", mok_last_error());
    return ticket;
}

static int code_of(struct client *c, mok_ticket ticket)
{
    mok_result result = { 0 };
    int code = mok_wait(c->rank.session, ticket, WAIT_NS, &result);
    return code < 0 ? code : result.code;
}

static void set(void *cookie)
{
    __atomic_store_n((int *)cookie, 1, __ATOMIC_RELEASE);
}

static void hold(void *cookie)
{
    while (!__atomic_load_n((int *)cookie, __ATOMIC_ACQUIRE))
        sleep_ms(1);
}

static uint64_t hash_of_out(const struct client *c)
{
    const uint8_t *bytes = mok_buffer_data(c->rank.out);
    uint64_t hash = 0xcbf29ce484222325u;

    for (uint64_t i = 0; i < (uint64_t)problem.max_tokens * problem.hidden * 2; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static void fill(void *cookie)
{
    workload_fill(cookie);
}

static void an_operation_begins_after_what_was_queued_before_it_and_ends_before_what_comes_later(void **state)
{
    struct client c;
    int go = 0, after = 0;
    mok_result result;
    (void)state;

    client_open(&c, &problem);
    mok_ticket plain, ticket;
    assert_int_equal(workload_forward(&c.rank, &plain), 0);
    assert_int_equal(code_of(&c, plain), 0);
    uint64_t want = hash_of_out(&c);
    memset(mok_buffer_data(c.rank.x), 0, mok_buffer_size(c.rank.x));
    workload_poison(&c.rank);

    fake_stream_call(c.stream, hold, &go);
    fake_stream_call(c.stream, fill, &c.rank);
    ticket = submit(&c);
    fake_stream_call(c.stream, set, &after);
    sleep_ms(30);
    assert_int_equal(mok_poll(c.rank.session, ticket, &result), 0); /* its inputs are not there */
    assert_int_equal(__atomic_load_n(&after, __ATOMIC_ACQUIRE), 0);
    set(&go);
    assert_true(fake_stream_drain(c.stream, DRAIN_MS));
    assert_int_equal(after, 1);
    assert_int_equal(mok_poll(c.rank.session, ticket, &result), 1); /* over before the stream went on */
    assert_int_equal(result.code, 0);
    assert_true(hash_of_out(&c) == want);
    client_close(&c);
}

static void many_operations_run_ahead_and_slots_are_used_again(void **state)
{
    struct client c;
    mok_ticket ticket[16];
    (void)state;

    client_open(&c, &problem);
    for (int round = 0; round < 20; round++) {
        for (size_t i = 0; i < 16; i++)
            ticket[i] = submit(&c);
        for (size_t i = 0; i < 16; i++)
            assert_int_equal(code_of(&c, ticket[i]), 0);
    }
    client_close(&c);
}

static void a_failed_operation_lets_its_stream_go_on(void **state)
{
    struct client c;
    (void)state;

    client_open(&c, &problem);
    ((int32_t *)mok_buffer_data(c.rank.ids))[3] = 77;
    mok_ticket ticket = submit(&c);
    assert_true(fake_stream_drain(c.stream, DRAIN_MS));
    assert_int_equal(code_of(&c, ticket), -MOK_EEXPERT);
    client_close(&c);
}

static void a_cancelled_operation_does_not_wait_for_its_stream(void **state)
{
    struct client c;
    int go = 0;
    (void)state;

    client_open(&c, &problem);
    fake_stream_call(c.stream, hold, &go);
    mok_ticket first = submit(&c), second = submit(&c);
    assert_int_equal(mok_cancel(c.rank.session, first), 0);
    assert_int_equal(code_of(&c, first), -MOK_ECANCELED);
    set(&go);
    assert_int_equal(code_of(&c, second), 0);
    assert_true(fake_stream_drain(c.stream, DRAIN_MS));
    client_close(&c);
}

static void a_stream_is_released_when_the_worker_dies(void **state)
{
    struct client c;
    pid_t worker[4];
    int go = 0;
    (void)state;

    client_open(&c, &problem);
    fake_stream_call(c.stream, hold, &go);
    mok_ticket ticket = submit(&c);
    size_t count = stack_workers(&c.stack, worker, 4);
    for (size_t i = 0; i < count; i++)
        kill(worker[i], SIGKILL);
    sleep_ms(50);
    set(&go);
    assert_true(fake_stream_drain(c.stream, DRAIN_MS));
    assert_int_equal(code_of(&c, ticket), -MOK_EWORKER);
    client_close(&c);
}

/* Those of a mokd that has gone follow it; what they still hold does not run then. */
static void await_end_of(const pid_t *worker, size_t count)
{
    for (int waited = 0; count > 0 && waited < GONE_MS; waited++) {
        if (kill(worker[count - 1], 0) < 0)
            count--;
        else
            sleep_ms(1);
    }
    assert_int_equal(count, 0);
}

static void a_stream_is_released_when_mokd_dies(void **state)
{
    struct client c;
    pid_t worker[4];
    int go = 0;
    (void)state;

    client_open(&c, &problem);
    fake_stream_call(c.stream, hold, &go);
    mok_ticket ticket = submit(&c);
    size_t count = stack_workers(&c.stack, worker, 4);
    kill(c.stack.mokd, SIGKILL);
    await_end_of(worker, count);
    set(&go);
    assert_true(fake_stream_drain(c.stream, DRAIN_MS));
    assert_int_equal(code_of(&c, ticket), -MOK_EDAEMON);
    client_close(&c);
}

static void a_stream_is_released_when_mokd_is_restarted_and_serves_the_next(void **state)
{
    struct client c;
    pid_t worker[4];
    int go = 0;
    (void)state;

    client_open_with(&c, &problem, &(struct stack_options){ .store = 256 });
    assert_int_equal(code_of(&c, submit(&c)), 0);
    assert_true(fake_stream_drain(c.stream, DRAIN_MS));
    uint64_t hash = hash_of_out(&c);
    for (int i = 0; i < 2; i++) {
        fake_stream_call(c.stream, hold, &go);
        mok_ticket ticket = submit(&c);
        size_t count = stack_workers(&c.stack, worker, 4);
        assert_int_equal(stack_restart(&c.stack, i ? SIGTERM : SIGKILL), 0);
        await_end_of(worker, count);
        set(&go);
        assert_true(fake_stream_drain(c.stream, DRAIN_MS));
        assert_int_equal(code_of(&c, ticket), -MOK_EDAEMON);
        if (mok_session_recover(c.rank.session, 20000) < 0)
            fail_msg("%s", mok_last_error());
        memset(mok_buffer_data(c.rank.out), 0xff, mok_buffer_size(c.rank.out));
        assert_int_equal(code_of(&c, submit(&c)), 0);
        assert_true(fake_stream_drain(c.stream, DRAIN_MS));
        assert_int_equal(hash_of_out(&c), hash);
        __atomic_store_n(&go, 0, __ATOMIC_RELEASE);
    }
    client_close(&c);
}

static void a_stream_is_released_when_the_session_closes(void **state)
{
    struct client c;
    int go = 0;
    (void)state;

    client_open(&c, &problem);
    fake_stream_call(c.stream, hold, &go);
    submit(&c);
    workload_close(&c.rank); /* the stream comes to the slot only after that: it must still be there */
    set(&go);
    assert_true(fake_stream_drain(c.stream, DRAIN_MS));
    fake_stream_free(c.stream);
    stack_stop(&c.stack);
}

static void what_cannot_be_handed_over_is_refused_and_leaves_no_trace(void **state)
{
    struct client c;
    mok_forward_args args;
    mok_ticket ticket = 0;
    (void)state;

    client_open(&c, &problem);
    args = forward_args(&c.rank);
    fake_cuda_capturing = true;
    assert_int_equal(mok_layer_forward_on_stream(c.rank.layer, &args, c.stream, &ticket), -MOK_ESTATE);
    fake_cuda_capturing = false;
    fake_cuda_batch_code = 1;
    assert_int_equal(mok_layer_forward_on_stream(c.rank.layer, &args, c.stream, &ticket), -MOK_EDEVICE);
    fake_cuda_batch_code = 0;
    args.tokens = 51;
    assert_int_equal(mok_layer_forward_on_stream(c.rank.layer, &args, c.stream, &ticket), -MOK_ERANGE);
    assert_int_equal(code_of(&c, submit(&c)), 0);
    client_close(&c);
}

static void stream_slots_that_the_driver_refused_once_serve_the_next_call(void **state)
{
    struct client c;
    mok_ticket ticket = 0;
    (void)state;

    client_open(&c, &problem);
    mok_forward_args args = forward_args(&c.rank);
    fake_cuda_register_code = 2; /* out of memory */
    assert_true(mok_layer_forward_on_stream(c.rank.layer, &args, c.stream, &ticket) < 0);
    fake_cuda_register_code = 0;
    assert_int_equal(code_of(&c, submit(&c)), 0);
    client_close(&c);
}

/* ------------------------------------------------------------------ memory of a GPU */

#if defined(MOK_HAVE_CUDA)
static mok_session *open_on_fake_gpu(struct stack *stack, const char *daemon)
{
    char lines[512];
    mok_session_options options = { .size = sizeof(options), .job = "gpu" };
    mok_session *session = NULL;

    snprintf(lines, sizeof(lines), "worker = %s\n%s", stack_program("tests/unit/daemon/fake-worker"), daemon);
    assert_int_equal(stack_start(stack, &(struct stack_options){ .gpus = 1, .daemon = lines }), 0);
    options.socket_path = stack->socket;
    if (mok_session_open(&options, &session) < 0)
        fail_msg("%s", mok_last_error());
    return session;
}

static void a_gpus_buffer_is_mapped_in_the_primary_context(void **state)
{
    struct stack stack;
    mok_buffer *buffer = NULL;
    (void)state;

    mok_session *session = open_on_fake_gpu(&stack, "");
    if (mok_buffer_alloc_private(session, 0, 10000, &buffer) < 0)
        fail_msg("%s", mok_last_error());
    assert_int_equal(mok_buffer_size(buffer), 10000);
    memset(mok_buffer_data(buffer), 1, 10000);
    assert_int_equal(mok_buffer_free(buffer), 0);
    mok_session_close(session);
    stack_stop(&stack);
}

static void cuda_outside_of_the_nodes_mps_is_refused_with_the_remedy(void **state)
{
    struct stack stack;
    mok_buffer *buffer = NULL;
    struct sockaddr_un at = { .sun_family = AF_UNIX };
    char lines[128], dir[] = "/tmp/mok-mps-XXXXXX";
    (void)state;

    /* Somebody who listens where an MPS control daemon would. */
    assert_non_null(mkdtemp(dir));
    snprintf(at.sun_path, sizeof(at.sun_path), "%s/control", dir);
    int control = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(control, (struct sockaddr *)&at, sizeof(at)), 0);
    assert_int_equal(listen(control, 8), 0);
    snprintf(lines, sizeof(lines), "sharing = mps\nmps_pipe = %s\n", dir);

    mok_session *session = open_on_fake_gpu(&stack, lines);
    assert_int_equal(mok_buffer_alloc_private(session, 0, 4096, &buffer), -MOK_ESHARING);
    assert_non_null(strstr(mok_last_error(), "CUDA_MPS_PIPE_DIRECTORY="));
    assert_non_null(strstr(mok_last_error(), dir));
    fake_cuda_mps = true;
    assert_int_equal(mok_buffer_alloc_private(session, 0, 4096, &buffer), 0);
    fake_cuda_mps = false;
    mok_session_close(session);
    stack_stop(&stack);
    close(control);
    unlink(at.sun_path);
    rmdir(dir);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_operation_begins_after_what_was_queued_before_it_and_ends_before_what_comes_later),
        cmocka_unit_test(many_operations_run_ahead_and_slots_are_used_again),
        cmocka_unit_test(a_failed_operation_lets_its_stream_go_on),
        cmocka_unit_test(a_cancelled_operation_does_not_wait_for_its_stream),
        cmocka_unit_test(a_stream_is_released_when_the_worker_dies),
        cmocka_unit_test(a_stream_is_released_when_mokd_dies),
        cmocka_unit_test(a_stream_is_released_when_mokd_is_restarted_and_serves_the_next),
        cmocka_unit_test(a_stream_is_released_when_the_session_closes),
        cmocka_unit_test(what_cannot_be_handed_over_is_refused_and_leaves_no_trace),
        cmocka_unit_test(stream_slots_that_the_driver_refused_once_serve_the_next_call),
#if defined(MOK_HAVE_CUDA)
        cmocka_unit_test(a_gpus_buffer_is_mapped_in_the_primary_context),
        cmocka_unit_test(cuda_outside_of_the_nodes_mps_is_refused_with_the_remedy),
#endif
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
