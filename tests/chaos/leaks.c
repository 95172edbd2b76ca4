/* SPDX-License-Identifier: Apache-2.0 */
/*
 * 200 rounds of jobs that close properly, close early or are killed, and a thousand clients killed wherever they are:
 * nothing is left in mokd, workers or the system.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "actor.h"
#include "stack.h"

enum { ROUNDS = 200, WARM = 20, LONG = 30000 };

static const struct workload small = { .hidden = 64,
                                       .intermediate = 64,
                                       .experts = 4,
                                       .topk = 2,
                                       .ep = 2,
                                       .max_tokens = 32,
                                       .context_mode = MOK_CONTEXT_FULL,
                                       .seed = 3 };

struct census {
    int mokd_fds, worker_fds[2];
    long mokd_kb, worker_kb[2];
    size_t children;
    int shm_files;
    uint64_t bytes_used;
};

static int count_files(const char *path)
{
    int n = 0;
    DIR *dir = opendir(path);
    while (dir && readdir(dir))
        n++;
    if (dir)
        closedir(dir);
    return n;
}

static uint64_t bytes_used(const struct stack *stack)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = stack->socket, .job = "census" };
    mok_session *session;
    mok_limits limits;
    assert_int_equal(mok_session_open(&options, &session), 0);
    assert_int_equal(mok_limits_query(session, &limits), 0);
    mok_session_close(session);
    return limits.bytes_used;
}

/* As many as at each look of a quarter of a second. */
static int settled_descriptors(pid_t pid)
{
    int count = stack_descriptors(pid);

    for (int same = 0, tries = 0; same < 25 && tries < 1000; same++, tries++) {
        usleep(10000);
        int now = stack_descriptors(pid);
        if (now != count)
            same = 0;
        count = now;
    }
    return count;
}

static struct census take_census(const struct stack *stack)
{
    struct census c = { 0 };
    pid_t worker[2];
    for (int tries = 0; tries < 200 && bytes_used(stack) != 0; tries++)
        usleep(10000);
    c.bytes_used = bytes_used(stack);
    c.mokd_fds = settled_descriptors(stack->mokd); /* the probe session itself is gone then */
    c.mokd_kb = stack_resident_kb(stack->mokd);
    c.children = stack_workers(stack, worker, 2);
    for (int i = 0; i < 2; i++) {
        c.worker_fds[i] = stack_descriptors(worker[i]);
        c.worker_kb[i] = stack_resident_kb(worker[i]);
    }
    c.shm_files = count_files("/dev/shm");
    return c;
}

/*
 * round % 4: 0 both finish; 1 rank 1 killed while stepping; 2 rank 0 killed when joined; 3 both killed while stepping
 */
static void one_round(const struct stack *stack, int round)
{
    struct actor actor[2];
    char group[32];
    int kind = round % 4;
    snprintf(group, sizeof(group), "round%d", round);
    for (uint32_t r = 0; r < 2; r++) {
        enum actor_phase stop = kind == 0 ? ACTOR_FINISHED : kind == 2 && r == 0 ? ACTOR_JOINED : ACTOR_STEPPING;
        struct actor_script s = { .socket = stack->socket, .group = group, .problem = &small, .rank = r, .device = r,
                                  .tokens = 32, .first_token = r * 32, .stop_at = stop, .steps = 2 };
        assert_int_equal(actor_start(&actor[r], &s), 0);
    }
    if (kind == 0) {
        for (int r = 0; r < 2; r++)
            assert_int_equal(actor_join(&actor[r], LONG), 0);
        return;
    }
    for (int r = 0; r < 2; r++)
        assert_int_equal(actor_await(&actor[r], kind == 2 && r == 0 ? ACTOR_JOINED : ACTOR_STEPPING, LONG), 0);
    usleep((useconds_t)(round * 37 % 3000));
    actor_kill(&actor[kind == 2 ? 0 : 1]);
    if (kind == 3)
        actor_kill(&actor[0]);
    else
        assert_int_equal(actor_join(&actor[kind == 2 ? 1 : 0], LONG), 1);
}

static void rounds_of_jobs_leave_nothing(void **state)
{
    (void)state;
    struct stack stack;
    assert_int_equal(stack_start(&stack, NULL), 0);
    int null = dup(STDERR_FILENO);
    (void)!freopen("/dev/null", "w", stderr); /* actors say what killed them; here that is noise */
    for (int i = 0; i < WARM; i++)
        one_round(&stack, i);
    struct census before = take_census(&stack);
    for (int i = 0; i < ROUNDS; i++)
        one_round(&stack, i);
    struct census after = take_census(&stack);
    dup2(null, STDERR_FILENO);
    close(null);
    printf("mokd: %d -> %d descriptors, %ld -> %ld KB; workers: %d,%d -> %d,%d descriptors, %ld,%ld -> %ld,%ld KB\n",
           before.mokd_fds, after.mokd_fds, before.mokd_kb, after.mokd_kb, before.worker_fds[0], before.worker_fds[1],
           after.worker_fds[0], after.worker_fds[1], before.worker_kb[0], before.worker_kb[1], after.worker_kb[0],
           after.worker_kb[1]);
    assert_int_equal(after.bytes_used, 0);
    assert_int_equal(after.children, 2);
    assert_int_equal(after.mokd_fds, before.mokd_fds);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(after.worker_fds[i], before.worker_fds[i]);
        assert_true(after.worker_kb[i] < before.worker_kb[i] + 4096);
    }
    assert_true(after.mokd_kb < before.mokd_kb + 4096);
    assert_int_equal(after.shm_files, before.shm_files);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ---------------------------------------------------------------- a thousand kills */

#ifdef MOK_SANITIZED
enum { KILLS = 100, AT_ONCE = 8 };
#else
enum { KILLS = 1000, AT_ONCE = 8 };
#endif

static const struct workload alone = { .hidden = 64,
                                       .intermediate = 64,
                                       .experts = 4,
                                       .topk = 2,
                                       .ep = 1,
                                       .max_tokens = 32,
                                       .context_mode = MOK_CONTEXT_NONE,
                                       .seed = 3,
                                       .forward_only = true };

/* Gets as far as its number says, then is killed. */
static void live_and_die(const struct stack *stack, int number)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = stack->socket, .job = "victim" };
    struct workload_rank rank;
    mok_session *session;
    mok_buffer *buffer;
    mok_ticket ticket;
    char group[32];

    snprintf(group, sizeof(group), "victim%d", number);
    if (number % 4 == 3) {
        if (workload_open(&rank, &alone, 0, 32, 0, stack->socket, group, (uint32_t)number / 4 % 2) < 0 ||
            workload_forward(&rank, &ticket) < 0)
            _exit(1);
        raise(SIGKILL);
    }
    if (mok_session_open(&options, &session) < 0)
        _exit(2);
    if (number % 4 >= 1 && mok_buffer_alloc_private(session, 0, 1 << 20, &buffer) < 0)
        _exit(3);
    if (number % 4 >= 2 && mok_nop(session, (uint32_t)number / 4 % 2, &ticket) < 0)
        _exit(4);
    raise(SIGKILL);
}

static void kill_many(const struct stack *stack, int count)
{
    int started = 0, ended = 0;

    while (ended < count) {
        for (; started < count && started - ended < AT_ONCE; started++) {
            pid_t pid = fork();
            assert_true(pid >= 0);
            if (pid == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                live_and_die(stack, started);
            }
        }
        int status;
        assert_true(wait(&status) > 0);
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
            fail_msg("a victim ended by itself: status %#x", (unsigned)status);
        ended++;
    }
}

static int count_lines(const char *path)
{
    FILE *file = fopen(path, "re");
    int lines = 0;

    for (int c; file && (c = fgetc(file)) != EOF;)
        lines += c == '\n';
    if (file)
        fclose(file);
    return lines;
}

static void report_23_a_thousand_kills_leave_no_file_descriptor_or_page_behind(void **state)
{
    struct stack stack;

    (void)state;
    assert_int_equal(stack_start(&stack, NULL), 0);
    kill_many(&stack, 3 * AT_ONCE);
    struct census before = take_census(&stack);
    int segments = count_lines("/proc/sysvipc/shm"), files = count_files(stack.dir);
    kill_many(&stack, KILLS);
    struct census after = take_census(&stack);
    printf("mokd: %d -> %d descriptors, %ld -> %ld KB; workers: %d,%d -> %d,%d descriptors, %ld,%ld -> %ld,%ld KB\n",
           before.mokd_fds, after.mokd_fds, before.mokd_kb, after.mokd_kb, before.worker_fds[0], before.worker_fds[1],
           after.worker_fds[0], after.worker_fds[1], before.worker_kb[0], before.worker_kb[1], after.worker_kb[0],
           after.worker_kb[1]);
    assert_int_equal(after.bytes_used, 0);
    assert_int_equal(after.mokd_fds, before.mokd_fds);
    for (int i = 0; i < 2; i++)
        assert_int_equal(after.worker_fds[i], before.worker_fds[i]);
#ifndef MOK_SANITIZED /* which keeps what was freed for a while */
    assert_true(after.mokd_kb < before.mokd_kb + 4096);
    for (int i = 0; i < 2; i++)
        assert_true(after.worker_kb[i] < before.worker_kb[i] + 4096);
#endif
    /* Nothing of MoK's has a name in the first place. */
    assert_int_equal(after.shm_files, before.shm_files);
    assert_int_equal(count_lines("/proc/sysvipc/shm"), segments);
    assert_int_equal(count_files(stack.dir), files);
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rounds_of_jobs_leave_nothing),
        cmocka_unit_test(report_23_a_thousand_kills_leave_no_file_descriptor_or_page_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
