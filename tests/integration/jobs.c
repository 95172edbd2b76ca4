/* SPDX-License-Identifier: Apache-2.0 */
/* Several jobs, layers and sessions at once through real daemons: independent, in any order, bitwise repeatable. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "actor.h"
#include "stack.h"

enum { LONG = 60000 };

static const struct workload base = { .hidden = 96,
                                      .intermediate = 64,
                                      .experts = 8,
                                      .topk = 3,
                                      .ep = 2,
                                      .max_tokens = 48,
                                      .context_mode = MOK_CONTEXT_FULL,
                                      .seed = 11,
                                      .masked = 0.1f };

/* ---------------------------------------------------------------- ranks as threads */

struct rank_thread {
    pthread_t thread;
    const struct stack *stack;
    const struct workload *problem;
    const char *group;
    uint32_t rank;
    int steps, late_ms;
    int code;
    uint64_t hash;
};

static void *run_rank(void *argument)
{
    struct rank_thread *t = argument;
    struct workload_rank rank;
    uint32_t tokens = 48 - 5 * t->rank;
    usleep((useconds_t)t->late_ms * 1000);
    t->code = workload_open(&rank, t->problem, t->rank, tokens, 48u * t->rank, t->stack->socket, t->group, t->rank);
    if (t->code < 0) {
        fprintf(stderr, "%s rank %u: %s\n", t->group, t->rank, mok_last_error());
        return NULL;
    }
    workload_poison(&rank);
    for (int i = 0; i < t->steps && t->code == 0; i++)
        t->code = workload_step(&rank, NULL, NULL);
    if (t->code < 0)
        fprintf(stderr, "%s rank %u: %s\n", t->group, t->rank, mok_last_error());
    t->hash = workload_hash(&rank);
    workload_close(&rank);
    return NULL;
}

static void run_group(const struct stack *stack, const struct workload *problem, const char *group, int late_ms,
                      uint64_t ret_hash[2])
{
    struct rank_thread t[2];
    for (uint32_t r = 0; r < 2; r++) {
        t[r] = (struct rank_thread){ .stack = stack, .problem = problem, .group = group, .rank = r, .steps = 3,
                                     .late_ms = r ? late_ms : 0 };
        pthread_create(&t[r].thread, NULL, run_rank, &t[r]);
    }
    for (uint32_t r = 0; r < 2; r++) {
        pthread_join(t[r].thread, NULL);
        assert_int_equal(t[r].code, 0);
        ret_hash[r] = t[r].hash;
    }
}

static void same_inputs_give_the_same_bits_whatever_the_timing(void **state)
{
    (void)state;
    uint64_t first[2], other[2];
    static const struct stack_options settings[] = {
        { .devices = 2, .threads = 1, .poll_us = 100 },
        { .devices = 2, .threads = 2, .chaos_delay_us = 400 },
        { .devices = 2, .threads = 3, .poll_us = 1000, .chaos_delay_us = 50 },
    };
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
        struct stack stack;
        assert_int_equal(stack_start(&stack, &settings[i]), 0);
        for (int round = 0; round < 3; round++) {
            run_group(&stack, &base, "bits", round * 30, i || round ? other : first);
            if (i || round)
                assert_memory_equal(first, other, sizeof(first));
        }
        assert_int_equal(stack_stop(&stack), 0);
    }
}

static void weights_that_are_bound_transposed_too_change_no_bit(void **state)
{
    (void)state;
    struct stack stack;
    struct workload plain = base, both;
    uint64_t hash[2][2];
    plain.precision = MOK_MXFP8_PER128;
    plain.tiles = true;
    both = plain;
    both.transposed = true;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 2 }), 0);
    run_group(&stack, &plain, "plain", 0, hash[0]);
    run_group(&stack, &both, "both", 0, hash[1]);
    assert_memory_equal(hash[0], hash[1], sizeof(hash[0]));
    assert_int_equal(stack_stop(&stack), 0);
}

/* ---------------------------------------------------------------- two jobs, opposite order */

struct pair_thread {
    pthread_t thread;
    const struct stack *stack;
    uint32_t rank;
    int code;
};

/* Rank 0 submits job A before B, rank 1 B before A; neither waits before both are in. */
static void *run_pair(void *argument)
{
    struct pair_thread *t = argument;
    struct workload_rank job[2];
    static const char *names[] = { "job-a", "job-b" };
    t->code = 0;
    for (int j = 0; j < 2 && t->code == 0; j++)
        t->code = workload_open(&job[j], &base, t->rank, 40, t->rank * 40, t->stack->socket, names[j], t->rank);
    for (int i = 0; i < 50 && t->code == 0; i++) {
        mok_ticket ticket[2];
        mok_result result;
        for (int n = 0; n < 2 && t->code == 0; n++) {
            int j = (int)((uint32_t)n ^ t->rank);
            t->code = workload_forward(&job[j], &ticket[j]);
        }
        for (int j = 0; j < 2 && t->code == 0; j++) {
            t->code = mok_wait(job[j].session, ticket[j], 20000000000, &result);
            t->code = t->code < 0 ? t->code : result.code;
        }
    }
    if (t->code < 0)
        fprintf(stderr, "rank %u: %s\n", t->rank, mok_last_error());
    for (int j = 0; j < 2; j++)
        workload_close(&job[j]);
    return NULL;
}

static void two_jobs_that_submit_in_opposite_order_do_not_deadlock(void **state)
{
    (void)state;
    struct stack stack;
    struct pair_thread t[2];
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 2, .chaos_delay_us = 100 }), 0);
    for (uint32_t r = 0; r < 2; r++) {
        t[r] = (struct pair_thread){ .stack = &stack, .rank = r };
        pthread_create(&t[r].thread, NULL, run_pair, &t[r]);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(t[r].thread, NULL);
        assert_int_equal(t[r].code, 0);
    }
    assert_int_equal(stack_stop(&stack), 0);
}

/* ---------------------------------------------------------------- many in flight, several layers */

struct flight_thread {
    pthread_t thread;
    const struct stack *stack;
    uint32_t rank;
    int code;
};

static int second_layer(struct workload_rank *rank, mok_layer **ret)
{
    const struct workload *p = rank->problem;
    mok_layer_options lo = { .size = sizeof(lo),
                             .hidden = p->hidden,
                             .intermediate = p->intermediate,
                             .experts = p->experts,
                             .topk = p->topk,
                             .max_tokens = p->max_tokens,
                             .precision = MOK_BF16 };
    mok_layer_params params = { .size = sizeof(params), .gate = { .buffer = rank->gate }, .up = { .buffer = rank->up },
                                .down = { .buffer = rank->down } };
    int code = mok_layer_create(rank->group, &lo, 30000, ret);
    return code < 0 ? code : mok_layer_bind(*ret, &params);
}

/* Two layers of equal shape; rank 0 interleaves 1,2,1,2..., rank 1 submits all of 1, then all of 2. */
static void *run_flight(void *argument)
{
    struct flight_thread *t = argument;
    enum { EACH = 12 };
    struct workload_rank rank;
    mok_layer *layer[2];
    mok_ticket ticket[2][EACH];
    t->code = workload_open(&rank, &base, t->rank, 48, t->rank * 48, t->stack->socket, "flight", t->rank);
    if (t->code == 0)
        t->code = second_layer(&rank, &layer[1]);
    layer[0] = rank.layer;
    for (int n = 0; n < 2 * EACH && t->code == 0; n++) {
        int which = t->rank == 0 ? n % 2 : n / EACH, index = t->rank == 0 ? n / 2 : n % EACH;
        rank.layer = layer[which];
        t->code = workload_forward(&rank, &ticket[which][index]);
    }
    for (int n = 2 * EACH - 1; n >= 0 && t->code == 0; n--) { /* reaped backwards */
        mok_result result;
        t->code = mok_wait(rank.session, ticket[n % 2][n / 2], 20000000000, &result);
        t->code = t->code < 0 ? t->code : result.code;
        if (t->code == 0 && result.dropped != 0)
            t->code = -1;
    }
    if (t->code < 0)
        fprintf(stderr, "rank %u: %s\n", t->rank, mok_last_error());
    workload_close(&rank);
    return NULL;
}

static void two_layers_of_equal_shape_interleaved_differently_stay_independent(void **state)
{
    (void)state;
    struct stack stack;
    struct flight_thread t[2];
    assert_int_equal(stack_start(&stack, NULL), 0);
    for (uint32_t r = 0; r < 2; r++) {
        t[r] = (struct flight_thread){ .stack = &stack, .rank = r };
        pthread_create(&t[r].thread, NULL, run_flight, &t[r]);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(t[r].thread, NULL);
        assert_int_equal(t[r].code, 0);
    }
    assert_int_equal(stack_stop(&stack), 0);
}

/* ---------------------------------------------------------------- waiting, late ranks, cancel */

struct late_thread {
    pthread_t thread;
    const struct stack *stack;
    pthread_barrier_t *cancelled;
    int first, second; /* codes of the operation that the peer cancels, and of the next */
};

static int forward_code(struct workload_rank *rank)
{
    mok_ticket ticket;
    mok_result result = { 0 };
    int code = workload_forward(rank, &ticket);
    if (code == 0)
        code = mok_wait(rank->session, ticket, 20000000000, &result);
    return code < 0 ? code : result.code;
}

static void *run_late(void *argument)
{
    struct late_thread *t = argument;
    struct workload_rank rank;
    t->first = t->second = workload_open(&rank, &base, 1, 48, 48, t->stack->socket, "late", 1);
    pthread_barrier_wait(t->cancelled);
    if (t->first == 0) {
        t->first = forward_code(&rank);
        t->second = forward_code(&rank);
    }
    workload_close(&rank);
    return NULL;
}

static void an_expired_wait_names_the_missing_rank_and_can_be_cancelled(void **state)
{
    (void)state;
    struct stack stack;
    struct workload_rank rank;
    pthread_barrier_t cancelled;
    mok_ticket ticket;
    mok_result result;
    assert_int_equal(stack_start(&stack, NULL), 0);
    pthread_barrier_init(&cancelled, NULL, 2);
    struct late_thread late = { .stack = &stack, .cancelled = &cancelled };
    pthread_create(&late.thread, NULL, run_late, &late);
    assert_int_equal(workload_open(&rank, &base, 0, 48, 0, stack.socket, "late", 0), 0);
    assert_int_equal(workload_forward(&rank, &ticket), 0);
    assert_int_equal(mok_wait(rank.session, ticket, 300000000, &result), -MOK_ETIMEDOUT);
    if (!strstr(mok_last_error(), "rank 1"))
        fail_msg("does not name rank 1: %s", mok_last_error());
    assert_int_equal(mok_cancel(rank.session, ticket), 0);
    pthread_barrier_wait(&cancelled);
    assert_int_equal(mok_wait(rank.session, ticket, 10000000000, &result), 0);
    assert_int_equal(result.code, -MOK_ECANCELED);
    assert_int_equal(forward_code(&rank), 0); /* nothing is out of step */
    assert_int_equal(mok_cancel(rank.session, ticket), -MOK_ENOENT);
    pthread_join(late.thread, NULL);
    assert_int_equal(late.first, -MOK_ECANCELED);
    assert_int_equal(late.second, 0);
    workload_close(&rank);
    pthread_barrier_destroy(&cancelled);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ---------------------------------------------------------------- a layer that one rank destroys */

struct destroyer {
    pthread_t thread;
    const struct stack *stack;
    pthread_barrier_t *step;
    int code;
};

static void *run_destroyer(void *argument)
{
    struct destroyer *t = argument;
    struct workload_rank rank;
    mok_layer *other = NULL;
    t->code = workload_open(&rank, &base, 1, 48, 48, t->stack->socket, "destroy", 1);
    if (t->code == 0)
        t->code = second_layer(&rank, &other);
    if (t->code == 0)
        t->code = forward_code(&rank);
    pthread_barrier_wait(t->step); /* rank 0's second operation waits for us */
    if (t->code == 0)
        t->code = mok_layer_destroy(rank.layer);
    rank.layer = other;
    if (t->code == 0)
        t->code = forward_code(&rank);
    pthread_barrier_wait(t->step);
    workload_close(&rank);
    return NULL;
}

static void a_layer_that_one_rank_destroys_ends_on_the_other_and_the_group_goes_on(void **state)
{
    (void)state;
    struct stack stack;
    struct workload_rank rank;
    pthread_barrier_t step;
    mok_layer *other;
    mok_ticket ticket;
    mok_result result;
    assert_int_equal(stack_start(&stack, NULL), 0);
    pthread_barrier_init(&step, NULL, 2);
    struct destroyer peer = { .stack = &stack, .step = &step };
    pthread_create(&peer.thread, NULL, run_destroyer, &peer);
    assert_int_equal(workload_open(&rank, &base, 0, 48, 0, stack.socket, "destroy", 0), 0);
    assert_int_equal(second_layer(&rank, &other), 0);
    assert_int_equal(forward_code(&rank), 0);
    assert_int_equal(workload_forward(&rank, &ticket), 0);
    pthread_barrier_wait(&step);
    assert_int_equal(mok_wait(rank.session, ticket, 20000000000, &result), 0);
    assert_int_equal(result.code, -MOK_EPEER);
    assert_int_equal(forward_code(&rank), -MOK_EPEER);
    mok_layer *destroyed = rank.layer;
    rank.layer = other;
    assert_int_equal(forward_code(&rank), 0);
    mok_layer_params params = { .size = sizeof(params), .gate = { .buffer = rank.gate } };
    assert_int_equal(mok_layer_bind(destroyed, &params), -MOK_EPEER);
    assert_int_equal(mok_buffer_free(rank.d_gate), -MOK_EBUSY); /* mokd counts the binding until the layer goes */
    assert_int_equal(mok_layer_destroy(destroyed), 0);
    assert_int_equal(mok_buffer_free(rank.d_gate), 0);
    rank.d_gate = NULL;
    pthread_barrier_wait(&step);
    pthread_join(peer.thread, NULL);
    assert_int_equal(peer.code, 0);
    workload_close(&rank);
    pthread_barrier_destroy(&step);
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_inputs_give_the_same_bits_whatever_the_timing),
        cmocka_unit_test(weights_that_are_bound_transposed_too_change_no_bit),
        cmocka_unit_test(two_jobs_that_submit_in_opposite_order_do_not_deadlock),
        cmocka_unit_test(two_layers_of_equal_shape_interleaved_differently_stay_independent),
        cmocka_unit_test(an_expired_wait_names_the_missing_rank_and_can_be_cancelled),
        cmocka_unit_test(a_layer_that_one_rank_destroys_ends_on_the_other_and_the_group_goes_on),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
