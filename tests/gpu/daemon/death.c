/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Clients on one GPU that die at bad moments. All of them are processes of their own; this one never starts CUDA.
 * Without MPS, where a death reaches nobody who has nothing to do with it.
 */
#include <cuda_runtime_api.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "actor.h"
#include "gpu.h"

#ifdef MOK_EMULATED /* slow, and slower on a busy machine */
#define PATIENCE 20
#define TOKENS 100
#else
#define PATIENCE 1
#define TOKENS 600
#endif

static const struct workload pair = { .hidden = 512,
                                      .intermediate = 256,
                                      .experts = 8,
                                      .topk = 2,
                                      .ep = 2,
                                      .max_tokens = TOKENS,
                                      .seed = 2,
                                      .forward_only = true };
static const struct workload alone = { .hidden = 512,
                                       .intermediate = 256,
                                       .experts = 8,
                                       .topk = 2,
                                       .ep = 1,
                                       .max_tokens = TOKENS,
                                       .seed = 2,
                                       .forward_only = true };

static struct actor_script script(const struct stack *stack, const char *group, const struct workload *problem,
                                  uint32_t rank, uint32_t device)
{
    return (struct actor_script){ .socket = stack->socket,
                                  .group = group,
                                  .problem = problem,
                                  .rank = rank,
                                  .device = device,
                                  .tokens = TOKENS,
                                  .first_token = TOKENS * rank,
                                  .stop_at = ACTOR_STEPPING };
}

static void sleep_us(long us)
{
    const struct timespec t = { us / 1000000, us % 1000000 * 1000 };
    nanosleep(&t, NULL);
}

static void a_killed_clients_peer_ends_with_a_code_and_others_go_on(void **state)
{
    static const long moment_us[] = { 1000, 7000, 23000, 61000 };
    struct stack stack;
    struct actor bystander, victim, peer;
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, 2, 0), 0);
    struct actor_script s = script(&stack, "bystander", &alone, 0, 0);
    assert_int_equal(actor_start(&bystander, &s), 0);
    assert_int_equal(actor_await(&bystander, ACTOR_STEPPING, 20000 * PATIENCE), 0);
    for (size_t i = 0; i < sizeof(moment_us) / sizeof(moment_us[0]); i++) {
        char group[32];
        snprintf(group, sizeof(group), "victim%zu", i);
        struct actor_script first = script(&stack, group, &pair, 0, 0), second = script(&stack, group, &pair, 1, 1);
        assert_int_equal(actor_start(&victim, &first), 0);
        assert_int_equal(actor_start(&peer, &second), 0);
        assert_int_equal(actor_await(&victim, ACTOR_STEPPING, 20000 * PATIENCE), 0);
        assert_int_equal(actor_await(&peer, ACTOR_STEPPING, 20000 * PATIENCE), 0);
        sleep_us(moment_us[i]);
        actor_kill(&victim);
        assert_int_equal(actor_join(&peer, 5000 * PATIENCE), 1); /* it says which code on stderr */
    }
    struct actor after;
    s = script(&stack, "after", &alone, 0, 1);
    s.stop_at = ACTOR_FINISHED;
    s.steps = 20;
    assert_int_equal(actor_start(&after, &s), 0);
    assert_int_equal(actor_join(&after, 20000 * PATIENCE), 0);
    assert_int_equal(actor_join(&bystander, 0), -1); /* still stepping */
    actor_kill(&bystander);
    assert_int_equal(stack_stop(&stack), 0);
}

/* Runs as a process of its own until it is killed: many operations queued on a stream, more than the device has begun.
 */
static void stream_for_ever(const struct stack *stack, int told)
{
    struct workload_rank rank;
    cudaStream_t stream;
    mok_ticket ticket[8];
    mok_result result;

    if (workload_open(&rank, &alone, 0, TOKENS, 0, stack->socket, "stream", 0) < 0 ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
        _exit(2);
    mok_forward_args args = { .size = sizeof(args),
                              .tokens = TOKENS,
                              .x = { .buffer = rank.x },
                              .ids = { .buffer = rank.ids },
                              .topk_weight = { .buffer = rank.weight },
                              .out = { .buffer = rank.out } };
    for (;;) {
        for (int i = 0; i < 8; i++)
            if (mok_layer_forward_on_stream(rank.layer, &args, (mok_stream)stream, &ticket[i]) < 0)
                _exit(3);
        if (write(told, "s", 1) != 1)
            _exit(4);
        for (int i = 0; i < 8; i++)
            if (mok_wait(rank.session, ticket[i], -1, &result) < 0)
                _exit(5);
    }
}

static void a_client_killed_with_operations_on_a_stream_leaves_the_device_well(void **state)
{
    static const long moment_us[] = { 0, 300, 3000, 17000 };
    struct stack stack;
    struct actor after;
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    for (size_t i = 0; i < sizeof(moment_us) / sizeof(moment_us[0]); i++) {
        int told[2], status;
        char byte;
        assert_int_equal(pipe(told), 0);
        pid_t pid = fork();
        assert_true(pid >= 0);
        if (pid == 0)
            stream_for_ever(&stack, told[1]);
        close(told[1]);
        assert_int_equal(read(told[0], &byte, 1), 1);
        sleep_us(moment_us[i]);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        close(told[0]);
        assert_true(WIFSIGNALED(status));
        struct actor_script s = script(&stack, "after", &alone, 0, 0);
        s.stop_at = ACTOR_FINISHED;
        s.steps = 2;
        assert_int_equal(actor_start(&after, &s), 0);
        assert_int_equal(actor_join(&after, 20000 * PATIENCE), 0);
    }
    assert_int_equal(stack_stop(&stack), 0);
}

/*
 * Under MPS the death of one may be the death of all on that GPU. Whatever it is, those who come later find the device
 * usable again. `worker`: the worker is killed, else the client.
 */
static void device_comes_back(struct stack *stack, bool worker, long moment_us)
{
    struct actor victim, after;
    pid_t pid[4];
    struct actor_script s = script(stack, worker ? "worker" : "client", &alone, 0, 0);

    assert_int_equal(actor_start(&victim, &s), 0);
    assert_int_equal(actor_await(&victim, ACTOR_STEPPING, 20000 * PATIENCE), 0);
    sleep_us(moment_us);
    if (worker) {
        assert_true(stack_workers(stack, pid, 4) >= 1);
        kill(pid[0], SIGKILL);
        printf("its client ended with %d\n", actor_join(&victim, 10000 * PATIENCE));
        actor_kill(&victim);
    } else {
        actor_kill(&victim);
    }
    double start = stack_now_ms();
    int code = -1;
    s = script(stack, "after", &alone, 0, 0);
    s.stop_at = ACTOR_FINISHED;
    s.steps = 5;
    while (code != 0 && stack_now_ms() - start < 10000) {
        assert_int_equal(actor_start(&after, &s), 0);
        code = actor_join(&after, 8000 * PATIENCE);
        if (code < 0)
            actor_kill(&after);
    }
    printf("%s killed: operations of a new client were done %.0f ms later\n", worker ? "worker" : "client",
           stack_now_ms() - start);
    assert_int_equal(code, 0);
}

static void under_mps_the_device_comes_back(void **state)
{
    struct stack stack;
    (void)state;

    if (!gpu_mps())
        skip();
    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    device_comes_back(&stack, false, 5000);
    device_comes_back(&stack, false, 31000);
    device_comes_back(&stack, true, 20000);
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_killed_clients_peer_ends_with_a_code_and_others_go_on),
        cmocka_unit_test(a_client_killed_with_operations_on_a_stream_leaves_the_device_well),
        cmocka_unit_test(under_mps_the_device_comes_back),
    };
    gpu_or_skip();
    gpu_copies();
    if (gpu_mps())
        cmocka_set_skip_filter("a_*");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
