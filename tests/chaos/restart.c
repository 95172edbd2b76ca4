/* SPDX-License-Identifier: Apache-2.0 */
/* mokd is killed, stopped and started again while jobs run: they go on, and nothing that they compute changes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "stack.h"
#include "trainer.h"

enum { LONG = 120000, STORE = 4096 };

static const struct workload small = { .hidden = 64, .intermediate = 96, .experts = 8, .topk = 2, .ep = 2,
                                       .max_tokens = 64, .context_mode = MOK_CONTEXT_FULL, .seed = 11 };

static struct trainer_script script(const struct stack *stack, const char *group, int steps)
{
    return (struct trainer_script){ .socket = stack->socket, .group = group, .problem = &small, .tokens = 64,
                                    .steps = steps, .devices = { 0, 1 } };
}

static void two_jobs_compute_the_same_though_mokd_is_killed_and_restarted(void **state)
{
    (void)state;
    struct stack stack;
    struct trainer job[2];
    uint64_t calm = 0, hash[2] = { 0 };
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE, .chaos_delay_us = 200 }), 0);
    struct trainer_script s = script(&stack, "calm", 60);
    s.pause_us = 2000;
    assert_int_equal(trainer_start(&job[0], &s), 0);
    assert_int_equal(trainer_join(&job[0], LONG, &calm), 0);
    struct trainer_script left = s, right = s;
    left.group = "left";
    right.group = "right";
    assert_int_equal(trainer_start(&job[0], &left), 0);
    assert_int_equal(trainer_start(&job[1], &right), 0);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(trainer_await(&job[0], 3 + i * 9, LONG), 0);
        assert_int_equal(trainer_await(&job[1], 3 + i * 9, LONG), 0);
        usleep((useconds_t)(i * 733 % 2900));
        assert_int_equal(stack_restart(&stack, i % 2 ? SIGTERM : SIGKILL), 0);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(trainer_join(&job[i], LONG, &hash[i]), 0);
        assert_int_equal(hash[i], calm);
    }
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_jobs_compute_the_same_though_mokd_is_killed_and_restarted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
