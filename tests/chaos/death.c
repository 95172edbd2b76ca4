/* SPDX-License-Identifier: Apache-2.0 */
/* SIGKILL of a client in each phase, of a worker, of mokd: the others finish or get a named code within two seconds. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "actor.h"
#include "stack.h"

enum { TWO_SECONDS = 2000, LONG = 30000 };

static const struct workload small = { .hidden = 64,
                                       .intermediate = 96,
                                       .experts = 4,
                                       .topk = 2,
                                       .ep = 2,
                                       .max_tokens = 64,
                                       .context_mode = MOK_CONTEXT_FULL,
                                       .seed = 7 };

static struct actor_script script(const struct stack *stack, const char *group, uint32_t rank, enum actor_phase stop,
                                  int steps)
{
    return (struct actor_script){ .socket = stack->socket,
                                  .group = group,
                                  .problem = &small,
                                  .rank = rank,
                                  .device = rank,
                                  .tokens = 64,
                                  .first_token = rank * 64,
                                  .stop_at = stop,
                                  .steps = steps };
}

/* Two actors that step for as long as the test lasts: they must never notice anything. */
static void start_bystanders(const struct stack *stack, struct actor bystander[2])
{
    for (uint32_t r = 0; r < 2; r++) {
        struct actor_script s = script(stack, "bystander", r, ACTOR_STEPPING, 0);
        assert_int_equal(actor_start(&bystander[r], &s), 0);
    }
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(actor_await(&bystander[r], ACTOR_STEPPING, LONG), 0);
}

static void assert_undisturbed(struct actor bystander[2])
{
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(actor_join(&bystander[r], 0), -1); /* still alive and stepping */
    for (uint32_t r = 0; r < 2; r++) /* only now: each needs the other */
        actor_kill(&bystander[r]);
}

/* A whole new job of both ranks works. */
static void assert_usable(const struct stack *stack, const char *group)
{
    struct actor actor[2];
    for (uint32_t r = 0; r < 2; r++) {
        struct actor_script s = script(stack, group, r, ACTOR_FINISHED, 3);
        assert_int_equal(actor_start(&actor[r], &s), 0);
    }
    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(actor_join(&actor[r], LONG), 0);
}

/* What the survivor of a two-rank job gets when `victim` dies; returns the code, checks the two seconds. */
static int survivor_code(const struct stack *stack, const char *group, struct actor *victim,
                         enum actor_phase victim_phase, long delay_us)
{
    struct workload_rank rank;
    int code = workload_open(&rank, &small, 0, 64, 0, stack->socket, group, 0);
    assert_int_equal(code, 0);
    assert_int_equal(actor_await(victim, victim_phase, LONG), 0);
    mok_ticket ticket = 0;
    if (victim_phase != ACTOR_STEPPING) {
        assert_int_equal(workload_forward(&rank, &ticket), 0);
        usleep((useconds_t)delay_us);
        actor_kill(victim);
    } else {
        double end = stack_now_ms() + (double)delay_us * 1e-3;
        while (stack_now_ms() < end && (code = workload_step(&rank, NULL, NULL)) == 0)
            ;
        assert_int_equal(code, 0);
        assert_int_equal(workload_forward(&rank, &ticket), 0);
        actor_kill(victim);
    }
    double start = stack_now_ms();
    mok_result result = { 0 };
    code = mok_wait(rank.session, ticket, 10000000000, &result);
    /* What the victim had submitted before it died may still complete: its steps are forward and backward in turn. */
    for (bool backward = true; code == 0 && result.code == 0; backward = !backward) {
        code = backward ? workload_backward(&rank, MOK_BACKWARD_OVERWRITE_WGRAD, &ticket)
                        : workload_forward(&rank, &ticket);
        if (code == 0)
            code = mok_wait(rank.session, ticket, 10000000000, &result);
    }
    code = code < 0 ? code : result.code;
    assert_true(stack_now_ms() - start < TWO_SECONDS);
    workload_close(&rank);
    return code;
}

static void report_22_peers_of_a_killed_client_get_epeer_in_every_phase(void **state)
{
    (void)state;
    static const struct {
        enum actor_phase phase;
        long delay_us;
    } cases[] = {
        { ACTOR_JOINED, 0 },       { ACTOR_JOINED, 20000 },    { ACTOR_FORWARD, 0 },      { ACTOR_FORWARD, 3000 },
        { ACTOR_STEPPING, 1000 },  { ACTOR_STEPPING, 7000 },   { ACTOR_STEPPING, 19000 }, { ACTOR_STEPPING, 43000 },
        { ACTOR_STEPPING, 71000 }, { ACTOR_STEPPING, 111000 },
    };
    struct stack stack;
    struct actor bystander[2];
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 2, .chaos_delay_us = 300 }), 0);
    start_bystanders(&stack, bystander);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char group[32];
        struct actor victim;
        snprintf(group, sizeof(group), "victim%zu", i);
        struct actor_script s = script(&stack, group, 1, cases[i].phase, 0);
        assert_int_equal(actor_start(&victim, &s), 0);
        int code = survivor_code(&stack, group, &victim, cases[i].phase, cases[i].delay_us);
        if (code != -MOK_EPEER)
            fprintf(stderr, "case %zu: %s\n", i, mok_error_name(code));
        assert_int_equal(code, -MOK_EPEER);
    }
    assert_undisturbed(bystander);
    assert_usable(&stack, "after");
    assert_int_equal(stack_stop(&stack), 0);
}

static void jobs_that_come_and_go_beside_a_busy_one_are_answered(void **state)
{
    (void)state;
    struct stack stack;
    struct actor bystander[2];
    assert_int_equal(stack_start(&stack, NULL), 0);
    start_bystanders(&stack, bystander);
    for (int round = 0; round < 40; round++) {
        char group[32];
        snprintf(group, sizeof(group), "guest%d", round);
        assert_usable(&stack, group);
    }
    assert_undisturbed(bystander);
    pid_t worker[8];
    assert_int_equal(stack_workers(&stack, worker, 8), 2);
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_rank_killed_before_the_group_is_whole_can_be_replaced(void **state)
{
    (void)state;
    struct stack stack;
    struct actor actor[3];
    assert_int_equal(stack_start(&stack, NULL), 0);
    struct actor_script first = script(&stack, "late", 1, ACTOR_FINISHED, 2);
    assert_int_equal(actor_start(&actor[0], &first), 0);
    usleep(300000); /* it waits for rank 0 now */
    actor_kill(&actor[0]);
    for (uint32_t r = 0; r < 2; r++) {
        struct actor_script s = script(&stack, "late", r, ACTOR_FINISHED, 2);
        assert_int_equal(actor_start(&actor[1 + r], &s), 0);
    }
    assert_int_equal(actor_join(&actor[1], LONG), 0);
    assert_int_equal(actor_join(&actor[2], LONG), 0);
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_killed_worker_fails_its_groups_with_a_code_and_comes_back(void **state)
{
    (void)state;
    struct stack stack;
    struct actor peer;
    pid_t worker[8];
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 2, .chaos_delay_us = 300 }), 0);
    assert_int_equal(stack_workers(&stack, worker, 8), 2);
    for (int round = 0; round < 3; round++) {
        struct workload_rank rank;
        char group[32];
        snprintf(group, sizeof(group), "worker%d", round);
        struct actor_script s = script(&stack, group, 1, ACTOR_STEPPING, 0);
        assert_int_equal(actor_start(&peer, &s), 0);
        assert_int_equal(workload_open(&rank, &small, 0, 64, 0, stack.socket, group, 0), 0);
        for (int i = 0; i < 3; i++)
            assert_int_equal(workload_step(&rank, NULL, NULL), 0);
        assert_int_equal(stack_workers(&stack, worker, 8), 2);
        mok_ticket ticket;
        assert_int_equal(workload_forward(&rank, &ticket), 0);
        kill(worker[round % 2], SIGKILL);
        double start = stack_now_ms();
        int code = 0;
        while (code == 0 && stack_now_ms() - start < 2 * TWO_SECONDS) {
            mok_result result = { 0 };
            code = ticket ? mok_wait(rank.session, ticket, 3000000000, &result) : 0;
            code = code < 0 ? code : result.code;
            if (code == 0)
                code = workload_forward(&rank, &ticket);
        }
        assert_true(stack_now_ms() - start < TWO_SECONDS);
        if (code != -MOK_EWORKER && code != -MOK_EPEER)
            fprintf(stderr, "round %d: %s: %s\n", round, mok_error_name(code), mok_last_error());
        assert_true(code == -MOK_EWORKER || code == -MOK_EPEER);
        workload_close(&rank);
        int ended = actor_join(&peer, LONG);
        assert_int_equal(ended, 1); /* it reported the code and left */
        assert_int_equal(stack_await(&stack), 0);
    }
    assert_usable(&stack, "after");
    assert_int_equal(stack_workers(&stack, worker, 8), 2);
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_killed_mokd_releases_every_client_and_leaves_no_worker(void **state)
{
    (void)state;
    struct stack stack;
    struct workload_rank rank;
    struct actor peer;
    pid_t worker[8];
    assert_int_equal(stack_start(&stack, NULL), 0);
    assert_int_equal(stack_workers(&stack, worker, 8), 2);
    struct actor_script s = script(&stack, "orphans", 1, ACTOR_JOINED, 0);
    assert_int_equal(actor_start(&peer, &s), 0);
    assert_int_equal(workload_open(&rank, &small, 0, 64, 0, stack.socket, "orphans", 0), 0);
    mok_ticket ticket;
    assert_int_equal(workload_forward(&rank, &ticket), 0); /* its peer never submits: it is pending */
    kill(stack.mokd, SIGKILL);
    double start = stack_now_ms();
    mok_result result = { 0 };
    int code = mok_wait(rank.session, ticket, 10000000000, &result);
    code = code < 0 ? code : result.code;
    assert_int_equal(code, -MOK_EDAEMON);
    assert_true(stack_now_ms() - start < TWO_SECONDS);
    assert_true(strlen(mok_last_error()) > 0);
    code = workload_forward(&rank, &ticket); /* refused, or ended as soon as the death is seen */
    if (code == 0)
        code = mok_wait(rank.session, ticket, 2000000000, NULL);
    assert_int_equal(code, -MOK_EDAEMON);
    workload_close(&rank);
    actor_kill(&peer);
    while (stack_now_ms() - start < TWO_SECONDS && (kill(worker[0], 0) == 0 || kill(worker[1], 0) == 0))
        usleep(10000);
    assert_int_equal(kill(worker[0], 0), -1);
    assert_int_equal(kill(worker[1], 0), -1);
    stack_stop(&stack);
}

static void sigterm_of_mokd_ends_waiting_clients_with_a_code(void **state)
{
    (void)state;
    struct stack stack;
    struct actor peer;
    struct workload_rank rank;
    assert_int_equal(stack_start(&stack, NULL), 0);
    struct actor_script s = script(&stack, "term", 1, ACTOR_JOINED, 0);
    assert_int_equal(actor_start(&peer, &s), 0);
    assert_int_equal(workload_open(&rank, &small, 0, 64, 0, stack.socket, "term", 0), 0);
    mok_ticket ticket;
    assert_int_equal(workload_forward(&rank, &ticket), 0);
    assert_int_equal(stack_stop(&stack), 0);
    mok_result result = { 0 };
    double start = stack_now_ms();
    int code = mok_wait(rank.session, ticket, 10000000000, &result);
    code = code < 0 ? code : result.code;
    assert_true(code == -MOK_EDAEMON || code == -MOK_ESESSION || code == -MOK_EPEER);
    assert_true(stack_now_ms() - start < TWO_SECONDS);
    workload_close(&rank);
    actor_kill(&peer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(report_22_peers_of_a_killed_client_get_epeer_in_every_phase),
        cmocka_unit_test(jobs_that_come_and_go_beside_a_busy_one_are_answered),
        cmocka_unit_test(a_rank_killed_before_the_group_is_whole_can_be_replaced),
        cmocka_unit_test(a_killed_worker_fails_its_groups_with_a_code_and_comes_back),
        cmocka_unit_test(a_killed_mokd_releases_every_client_and_leaves_no_worker),
        cmocka_unit_test(sigterm_of_mokd_ends_waiting_clients_with_a_code),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
