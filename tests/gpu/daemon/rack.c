/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One group over two daemons, a worker each: on two GPUs where there are two, else both on one. The bits are those of
 * one daemon, and who is lost is named.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu.h"
#include "rack_stack.h"
#include "workload.h"

#define RANKS 2u
#ifdef MOK_EMULATED /* slow, and slower on a busy machine */
#define TIMEOUT_MS 20000
#define STEPS 1
#else
#define TIMEOUT_MS 2000
#define STEPS 20
#endif

static const struct workload problem = { .hidden = 208,
                                         .intermediate = 144,
                                         .experts = 8,
                                         .topk = 3,
                                         .ep = RANKS,
                                         .max_tokens = 77,
                                         .context_mode = MOK_CONTEXT_FULL,
                                         .seed = 11,
                                         .masked = 0.2f };

struct rank_thread {
    pthread_t thread;
    const char *socket, *group;
    uint32_t rank, device;
    bool until_it_ends;
    pthread_barrier_t *begun;
    int code;
    double ended_ms;
    char text[512];
    uint64_t hash;
};

static void *run_rank(void *argument)
{
    struct rank_thread *t = argument;
    struct workload_rank rank;

    t->code = workload_open(&rank, &problem, t->rank, 77 - 20 * t->rank, 77u * t->rank, t->socket, t->group, t->device);
    if (t->code == 0)
        workload_poison(&rank);
    if (t->code == 0)
        t->code = workload_step(&rank, NULL, NULL);
    if (t->begun)
        pthread_barrier_wait(t->begun);
    for (int i = 1; t->code == 0 && (i < STEPS || t->until_it_ends); i++)
        t->code = workload_step(&rank, NULL, NULL);
    t->ended_ms = stack_now_ms();
    snprintf(t->text, sizeof(t->text), "%s", t->code < 0 ? mok_last_error() : "");
    if (t->code < 0)
        fprintf(stderr, "%s rank %u: %s\n", t->group, t->rank, t->text);
    if (t->code == 0)
        t->hash = workload_hash(&rank);
    workload_close(&rank);
    return NULL;
}

static void run_group(const char *group, const char *const socket[RANKS], const uint32_t device[RANKS],
                      uint64_t ret_hash[RANKS])
{
    struct rank_thread t[RANKS];

    for (uint32_t r = 0; r < RANKS; r++) {
        t[r] = (struct rank_thread){ .socket = socket[r], .group = group, .rank = r, .device = device[r] };
        pthread_create(&t[r].thread, NULL, run_rank, &t[r]);
    }
    for (uint32_t r = 0; r < RANKS; r++)
        pthread_join(t[r].thread, NULL);
    for (uint32_t r = 0; r < RANKS; r++) {
        assert_int_equal(t[r].code, 0);
        ret_hash[r] = t[r].hash;
    }
}

static int start_rack(struct rack_stack *rack)
{
    return rack_stack_start(rack, &(struct rack_stack_options){ .nodes = RANKS,
                                                                .gpus = 1,
                                                                .gpu_spread = gpu_count() > 1 ? 2 : 1,
                                                                .timeout_ms = TIMEOUT_MS,
                                                                .daemon = gpu_daemon_lines() });
}

static void two_daemons_give_the_bits_of_one(void **state)
{
    struct stack one;
    struct rack_stack rack;
    uint64_t first[RANKS], other[RANKS];
    (void)state;

    assert_int_equal(gpu_stack_start(&one, RANKS, 0), 0);
    run_group("one", (const char *[]){ one.socket, one.socket }, (uint32_t[]){ 0, 1 }, first);
    assert_int_equal(stack_stop(&one), 0);
    assert_int_equal(start_rack(&rack), 0);
    const char *nodes[] = { rack.node[0].socket, rack.node[1].socket }, *back[] = { nodes[1], nodes[0] };
    run_group("two", nodes, (uint32_t[]){ 0, 0 }, other);
    assert_memory_equal(first, other, sizeof(first));
    run_group("back", back, (uint32_t[]){ 0, 0 }, other);
    assert_memory_equal(first, other, sizeof(first));
    printf("%u steps a rank over two daemons on %u GPU\n", STEPS, gpu_count() > 1 ? 2 : 1);
    assert_int_equal(rack_stack_stop(&rack), 0);
}

static void a_killed_daemon_is_named_with_its_rank_and_the_group_forms_again(void **state)
{
    struct rack_stack rack;
    struct rank_thread t[RANKS];
    pthread_barrier_t begun;
    uint64_t hash[RANKS];
    (void)state;

    assert_int_equal(start_rack(&rack), 0);
    pthread_barrier_init(&begun, NULL, RANKS + 1);
    for (uint32_t r = 0; r < RANKS; r++) {
        t[r] = (struct rank_thread){
            .socket = rack.node[r].socket, .group = "cut", .rank = r, .until_it_ends = true, .begun = &begun
        };
        pthread_create(&t[r].thread, NULL, run_rank, &t[r]);
    }
    pthread_barrier_wait(&begun);
    double start = stack_now_ms();
    rack_stack_kill(&rack, 1);
    for (uint32_t r = 0; r < RANKS; r++)
        pthread_join(t[r].thread, NULL);
    pthread_barrier_destroy(&begun);
    printf("the other rank was told after %.0f ms\n", t[0].ended_ms - start);
    assert_int_equal(t[0].code, -MOK_EPEER);
    assert_non_null(strstr(t[0].text, "rank 1"));
    assert_non_null(strstr(t[0].text, "node n1"));
    assert_true(t[0].ended_ms - start < 2 * TIMEOUT_MS);
    assert_true(t[1].code < 0);
    assert_int_equal(rack_stack_boot(&rack, 1), 0);
    assert_int_equal(rack_stack_await(&rack, 0, 1), 0);
    run_group("cut", (const char *[]){ rack.node[0].socket, rack.node[1].socket }, (uint32_t[]){ 0, 0 }, hash);
    assert_int_equal(rack_stack_stop(&rack), 0);
}

/* What mokctl says of the device's fabric handles: 1 it has them, 0 it has not and says why. */
static int fabric_of_device(void)
{
    struct stack stack;
    char command[600], text[4096];

    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    snprintf(command, sizeof(command), "%s --socket %s --json devices", stack_program("client/mokctl"), stack.socket);
    FILE *pipe = popen(command, "re");
    assert_non_null(pipe);
    text[fread(text, 1, sizeof(text) - 1, pipe)] = '\0';
    assert_int_equal(pclose(pipe), 0);
    assert_int_equal(stack_stop(&stack), 0);
    const char *why = strstr(text, "\"no_fabric\":");
    assert_non_null(why);
    printf("%.*s\n", (int)strcspn(why, "\n"), why);
    int has = strstr(text, "\"fabric\":\ttrue") != NULL;
    assert_true(has == (strstr(why, "code") == NULL));
    return has;
}

static void whether_there_are_fabric_handles_is_tried_and_said_with_the_reason(void **state)
{
    (void)state;
#ifdef MOK_EMULATED /* without an IMEX channel, and with one */
    char folder[] = "/tmp/mok-fabric-XXXXXX", command[64];
    assert_int_equal(fabric_of_device(), 0);
    assert_non_null(mkdtemp(folder));
    setenv("MOK_EMULATED_FABRIC", folder, 1);
    assert_int_equal(fabric_of_device(), 1);
    unsetenv("MOK_EMULATED_FABRIC");
    snprintf(command, sizeof(command), "rm -r %s", folder);
    assert_int_equal(system(command), 0);
#else
    fabric_of_device();
#endif
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whether_there_are_fabric_handles_is_tried_and_said_with_the_reason),
        cmocka_unit_test(two_daemons_give_the_bits_of_one),
        cmocka_unit_test(a_killed_daemon_is_named_with_its_rank_and_the_group_forms_again),
    };
    gpu_or_skip();
    gpu_copies();
    /* Under MPS the death of a worker at work takes every process on its GPU with it. */
    if (gpu_mps())
        cmocka_set_skip_filter("a_killed_*");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
