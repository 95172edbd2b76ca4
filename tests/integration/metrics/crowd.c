/* SPDX-License-Identifier: Apache-2.0 */
/* 64 sessions with 32 operations in flight each: no error, and every one of them is counted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "crowd.h"
#include "http.h"
#include "stack.h"

static void sixty_four_sessions_with_thirty_two_in_flight_see_no_error(void **state)
{
    struct stack stack;
    char extra[160], door[64];
    struct stack_options options = { .devices = 2, .extra = extra };
    struct crowd crowd = { .sessions = 64, .in_flight = 32, .operations = 64, .devices = 2 };
    struct crowd_result result;

    (void)state;
    snprintf(door, sizeof(door), "/tmp/mok-crowd-%d", (int)getpid());
    snprintf(extra, sizeof(extra), "[metrics]\nlisten = unix:%s\n[limits]\nsessions = 80", door);
    assert_int_equal(stack_start(&stack, &options), 0);
    crowd.socket = stack.socket;
    assert_int_equal(crowd_run(&crowd, &result), 0);
    assert_int_equal(result.first_code, 0);
    assert_int_equal(result.failed, 0);
    assert_int_equal(result.done, 64 * 64);
    char *answer = http_get(door, "/metrics", "");
    assert_int_equal(http_sample(answer, "mok_ops_total{device=\"host0\",op=\"forward\",result=\"ok\"}") +
                         http_sample(answer, "mok_ops_total{device=\"host1\",op=\"forward\",result=\"ok\"}"),
                     64 * 64);
    assert_int_equal(http_sample(answer, "mok_ops_in_flight{device=\"host0\"}"), 0);
    assert_int_equal(http_sample(answer, "mok_ops_in_flight{device=\"host1\"}"), 0);
    free(answer);
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(sixty_four_sessions_with_thirty_two_in_flight_see_no_error) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
