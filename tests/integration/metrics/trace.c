/* SPDX-License-Identifier: Apache-2.0 */
/* mokctl trace: what the devices did, for who may know, one at a time, never longer than the asker is there or may
 * stay. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "actor.h"
#include "shell.h"
#include "stack.h"
#include "workload.h"

enum { TOKENS = 64, LONG_MS = 30000, REFUSED = 1, USAGE = 2 };

static const struct workload both = { .hidden = 64, .intermediate = 64, .experts = 4, .topk = 2, .ep = 2,
                                     .max_tokens = TOKENS, .context_mode = MOK_CONTEXT_FULL, .seed = 3 };
static struct stack stack;
static struct actor actors[2]; /* two ranks that step all the time */
static char mokctl[512];
static pid_t left_behind; /* a trace that is under way when mokd stops */

static int set_up(void **state)
{
    struct stack_options options = { .devices = 2 };

    (void)state;
    snprintf(mokctl, sizeof(mokctl), "%s", stack_program("client/mokctl"));
    if (stack_start(&stack, &options) < 0)
        return -1;
    chmod(stack.dir, 0711); /* so that another user finds the socket */
    for (uint32_t rank = 0; rank < 2; rank++) {
        struct actor_script script = { .socket = stack.socket, .group = "traced", .problem = &both, .rank = rank,
                                       .device = rank, .tokens = TOKENS, .first_token = rank * TOKENS,
                                       .stop_at = ACTOR_STEPPING };
        if (actor_start(&actors[rank], &script) < 0)
            return -1;
    }
    return actor_await(&actors[0], ACTOR_STEPPING, LONG_MS) | actor_await(&actors[1], ACTOR_STEPPING, LONG_MS);
}

static int tear_down(void **state)
{
    double start = stack_now_ms();

    (void)state;
    int code = stack_stop(&stack);
    if (stack_now_ms() - start > LONG_MS)
        code = -1;
    actor_kill(&actors[0]);
    actor_kill(&actors[1]);
    if (left_behind > 0)
        waitpid(left_behind, NULL, 0);
    return code;
}

static cJSON *trace_of_a_second(const char *as)
{
    int code;
    char *text = shell_output(&code, "%s %s --socket %s trace --seconds 1 --out -", as, mokctl, stack.socket);
    cJSON *root = code == 0 ? cJSON_Parse(text) : NULL;

    free(text);
    return root;
}

/* How many events have the name; on device `pid` if that is not 0. */
static int count(const cJSON *root, const char *name, int pid)
{
    const cJSON *event;
    int found = 0;

    cJSON_ArrayForEach(event, cJSON_GetObjectItem(root, "traceEvents"))
        found += strcmp(cJSON_GetObjectItem(event, "name")->valuestring, name) == 0 &&
                 (!pid || cJSON_GetObjectItem(event, "pid")->valueint == pid);
    return found;
}

static int count_tracks(const cJSON *root, const char *part)
{
    const cJSON *event;
    int found = 0;

    cJSON_ArrayForEach(event, cJSON_GetObjectItem(root, "traceEvents"))
    {
        const cJSON *arguments = cJSON_GetObjectItem(event, "args"), *name = cJSON_GetObjectItem(arguments, "name");
        found += name && strstr(name->valuestring, part);
    }
    return found;
}

static void a_trace_has_operations_phases_minibatches_transfers_and_waits_of_each_device(void **state)
{
    static const char *const expected[] = { "forward",  "backward", "prepare", "main",    "reduce",
                                            "dispatch", "combine",  "down",    "gate, up", "schedule",
                                            "waits for ranks to be ready" };

    (void)state;
    cJSON *root = trace_of_a_second("");
    assert_non_null(root);
    for (int pid = 1; pid <= 2; pid++)
        for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++)
            if (count(root, expected[i], pid) == 0)
                fail_msg("device %d has no \"%s\"", pid, expected[i]);
    assert_true(count(root, "sleeps", 0) > 0);
    assert_true(count_tracks(root, "device host0") == 1 && count_tracks(root, "device host1") == 1);
    assert_int_equal(count_tracks(root, "session"), 2);
    cJSON_Delete(root);
}

static void spans_lie_within_the_time_that_was_asked_for(void **state)
{
    const cJSON *event;

    (void)state;
    cJSON *root = trace_of_a_second("");
    assert_non_null(root);
    cJSON_ArrayForEach(event, cJSON_GetObjectItem(root, "traceEvents"))
    {
        const cJSON *ts = cJSON_GetObjectItem(event, "ts"), *duration = cJSON_GetObjectItem(event, "dur");
        if (ts)
            assert_true(ts->valuedouble >= 0 && ts->valuedouble + (duration ? duration->valuedouble : 0) < 20e6);
    }
    cJSON_Delete(root);
}

#define AS_NOBODY "setpriv --reuid=65534 --regid=65534 --clear-groups"

/* That is: one who is no administrator. */
static bool can_be_nobody(void)
{
    int code = -1;

    if (geteuid() == 0)
        free(shell_output(&code, AS_NOBODY " %s --help 2>&1", mokctl));
    return code == 0; /* else the build may be where others cannot go */
}

static void another_user_sees_that_the_device_is_busy_but_not_with_what(void **state)
{
    (void)state;
    if (!can_be_nobody())
        skip();
    cJSON *root = trace_of_a_second(AS_NOBODY);
    assert_non_null(root);
    assert_true(count(root, "somebody else's", 0) > 0);
    assert_int_equal(count(root, "forward", 0) + count(root, "dispatch", 0) + count(root, "main", 0), 0);
    assert_int_equal(count_tracks(root, "session"), 0);
    cJSON_Delete(root);
}

/* Of a minute; what it says goes to `says`. */
static pid_t start_long_trace(const char *as, const char *says)
{
    char command[1200];
    pid_t pid = fork();

    if (pid == 0) {
        snprintf(command, sizeof(command), "exec %s %s --socket %s trace --seconds 60 --out /dev/null > %s", as, mokctl,
                 stack.socket, says);
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    return pid;
}

/* Such a trace is under way: another one of the same user has been refused, with *ret_text. */
static pid_t be_tracing(const char *as, const char *says, char **ret_text)
{
    double start = stack_now_ms();

    for (;;) {
        int code;
        pid_t pid = start_long_trace(as, says);
        assert_true(pid > 0);
        usleep(300000);
        *ret_text =
            shell_output(&code, "%s %s --socket %s trace --seconds 1 --out /dev/null 2>&1", as, mokctl, stack.socket);
        if (code == REFUSED)
            return pid;
        free(*ret_text); /* ours was first; the other one was refused, or is under way only now */
        kill(pid, SIGKILL);
        waitpid(pid, NULL, 0);
        assert_true(stack_now_ms() - start < LONG_MS);
    }
}

static void the_next_one_waits_until_the_asker_of_the_first_has_gone(void **state)
{
    char *text;

    (void)state;
    pid_t first = be_tracing("", "/dev/null", &text);
    char *holder = NULL;
    assert_true(asprintf(&holder, "(pid %d) is under way, which ends within ", (int)first) > 0);
    assert_non_null(strstr(text, holder));
    free(holder);
    free(text);
    kill(first, SIGKILL);
    waitpid(first, NULL, 0);
    cJSON *root = NULL;
    for (double start = stack_now_ms(); !root && stack_now_ms() - start < LONG_MS;)
        root = trace_of_a_second("");
    assert_non_null(root);
    cJSON_Delete(root);
}

static void an_administrator_ends_the_trace_of_another_who_is_told_so(void **state)
{
    char says[600], *text;
    int status, code;

    (void)state;
    if (!can_be_nobody())
        skip();
    snprintf(says, sizeof(says), "%s/nobody.says", stack.dir);
    pid_t nobody = be_tracing(AS_NOBODY, says, &text);
    assert_non_null(strstr(text, "or by an administrator's"));
    free(text);
    double start = stack_now_ms();
    cJSON *root = trace_of_a_second("");
    assert_non_null(root);
    assert_true(count(root, "forward", 0) > 0);
    cJSON_Delete(root);
    assert_int_equal(waitpid(nobody, &status, 0), nobody);
    assert_int_equal(status, 0);
    assert_true(stack_now_ms() - start < LONG_MS);
    text = shell_output(&code, "cat %s", says);
    assert_non_null(strstr(text, "it ended early, since an administrator asked for one"));
    free(text);
}

static void wrong_usage_is_said(void **state)
{
    int code;

    (void)state;
    free(shell_output(&code, "%s --socket %s trace 2>&1", mokctl, stack.socket));
    assert_int_equal(code, USAGE);
    char *text = shell_output(&code, "%s --socket %s trace --seconds 61 --out x 2>&1", mokctl, stack.socket);
    assert_int_equal(code, USAGE);
    assert_non_null(strstr(text, "--seconds 61: must be a whole number in 1..60"));
    free(text);
    text = shell_output(&code, "%s --socket %s trace --out /no/such/place 2>&1", mokctl, stack.socket);
    assert_int_equal(code, REFUSED);
    assert_non_null(strstr(text, "/no/such/place cannot be written"));
    free(text);
}

static void a_worker_that_dies_takes_only_its_own_events_along(void **state)
{
    pid_t workers[2];

    (void)state;
    pid_t tracer = fork();
    if (tracer == 0) {
        execl(mokctl, "mokctl", "--socket", stack.socket, "trace", "--seconds", "2", "--out", "/dev/null",
              (char *)NULL);
        _exit(127);
    }
    usleep(500000);
    assert_int_equal(stack_workers(&stack, workers, 2), 2);
    kill(workers[1], SIGKILL);
    int status;
    assert_int_equal(waitpid(tracer, &status, 0), tracer);
    assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* What tear_down then sees: mokd is stopped while a trace of a minute is under way, and must not wait for it. */
static void mokd_stops_though_a_trace_is_under_way(void **state)
{
    char *text;

    (void)state;
    left_behind = be_tracing("", "/dev/null", &text);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_trace_has_operations_phases_minibatches_transfers_and_waits_of_each_device),
        cmocka_unit_test(spans_lie_within_the_time_that_was_asked_for),
        cmocka_unit_test(another_user_sees_that_the_device_is_busy_but_not_with_what),
        cmocka_unit_test(an_administrator_ends_the_trace_of_another_who_is_told_so),
        cmocka_unit_test(wrong_usage_is_said),
        cmocka_unit_test(the_next_one_waits_until_the_asker_of_the_first_has_gone),
        cmocka_unit_test(a_worker_that_dies_takes_only_its_own_events_along),
        cmocka_unit_test(mokd_stops_though_a_trace_is_under_way),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
