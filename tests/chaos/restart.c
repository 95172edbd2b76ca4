/* SPDX-License-Identifier: Apache-2.0 */
/* mokd is killed, stopped and started again while jobs run: they go on, and nothing that they compute changes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stack.h"
#include "trainer.h"

enum { LONG = 120000, STORE = 4096, OWN = 3 /* mokd's own: the state, and a pidfd for each of two workers */ };

static const struct workload small = { .hidden = 64, .intermediate = 96, .experts = 8, .topk = 2, .ep = 2,
                                       .max_tokens = 64, .context_mode = MOK_CONTEXT_FULL, .seed = 11 };

static struct trainer_script script(const struct stack *stack, const char *group, int steps)
{
    return (struct trainer_script){ .socket = stack->socket, .group = group, .problem = &small, .tokens = 64,
                                    .steps = steps, .pause_us = 1000, .devices = { 0, 1 } };
}

static uint64_t undisturbed(const struct stack *stack, int steps)
{
    struct trainer_script s = script(stack, "undisturbed", steps);
    struct trainer job;
    uint64_t hash = 0;

    assert_int_equal(trainer_start(&job, &s), 0);
    assert_int_equal(trainer_join(&job, LONG, &hash, NULL), 0);
    return hash;
}

static void expect_store(const struct stack *stack, size_t count)
{
    size_t now = fdstore_count(stack->store);

    for (int waited = 0; waited < LONG && now != count; waited += 10) {
        usleep(10000);
        now = fdstore_count(stack->store);
    }
    assert_int_equal(now, count);
}

/*
 * At some moment no more than that: who looked on before may have been counted with his connection, and mokd opens a
 * file now and then.
 */
static void expect_descriptors(const struct stack *stack, int count)
{
    int now = stack_descriptors(stack->mokd);

    for (int waited = 0; waited < LONG && now > count; waited += 10) {
        usleep(10000);
        now = stack_descriptors(stack->mokd);
    }
    if (now > count)
        fail_msg("%d descriptors, not %d", now, count);
}

static int lines_with(const struct stack *stack, const char *what)
{
    char line[1024];
    int count = 0;
    FILE *file = fopen(stack->log, "re");

    while (file && fgets(line, sizeof(line), file))
        count += strstr(line, what) != NULL;
    if (file)
        fclose(file);
    return count;
}

static uint64_t bytes_used(const struct stack *stack)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = stack->socket, .job = "census" };
    mok_session *session = NULL;
    mok_limits limits = { 0 };

    if (mok_session_open(&options, &session) < 0)
        return UINT64_MAX;
    mok_limits_query(session, &limits);
    mok_session_close(session);
    return limits.bytes_used;
}

static void expect_no_bytes(const struct stack *stack)
{
    uint64_t used = 1;

    for (int waited = 0; waited < LONG && (used = bytes_used(stack)) != 0; waited += 20)
        usleep(20000);
    assert_int_equal(used, 0);
}

/* What a service manager does to what is left of a service that was killed. */
static void kill_all(struct stack *stack)
{
    pid_t worker[8];
    size_t count = stack_workers(stack, worker, 8);

    assert_int_equal(stack_end(stack, SIGKILL), 0);
    for (size_t i = 0; i < count; i++)
        kill(worker[i], SIGKILL);
    assert_int_equal(stack_begin(stack), 0);
}

/* ------------------------------------------------------------------ jobs that go on */

static void two_jobs_compute_the_same_though_mokd_is_killed_and_restarted(void **state)
{
    (void)state;
    struct stack stack;
    struct trainer job[2];
    const char *const names[2] = { "left", "right" };
    uint64_t hash = 0;
    int steps = 0;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE, .chaos_delay_us = 200 }), 0);
    for (int i = 0; i < 2; i++) {
        struct trainer_script s = script(&stack, names[i], INT_MAX);
        assert_int_equal(trainer_start(&job[i], &s), 0);
    }
    for (int i = 0; i < 6; i++) {
        for (int k = 0; k < 2; k++)
            assert_int_equal(trainer_await(&job[k], trainer_steps(&job[k]) + 2, LONG), 0);
        usleep((useconds_t)(i * 733 % 2900));
        if (i % 3 == 2)
            kill_all(&stack);
        else
            assert_int_equal(stack_restart(&stack, i % 3 ? SIGTERM : SIGKILL), 0);
    }
    for (int i = 0; i < 2; i++) {
        assert_int_equal(trainer_await(&job[i], trainer_steps(&job[i]) + 2, LONG), 0);
        assert_true(trainer_recoveries(&job[i]) > 0);
        trainer_stop(&job[i]);
        assert_int_equal(trainer_join(&job[i], LONG, &hash, &steps), 0);
        assert_int_equal(undisturbed(&stack, steps), hash);
    }
    expect_store(&stack, OWN);
    assert_int_equal(stack_stop(&stack), 0);
}

/* Starts train_moe_lm; its output goes to a file in the stack's folder. */
static pid_t train(const struct stack *stack, const char *name)
{
    char log[160], out[160];

    snprintf(log, sizeof(log), "%s/%s.log", stack->dir, name);
    snprintf(out, sizeof(out), "%s/%s.out", stack->dir, name);
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    int fd = open(out, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    dup2(fd, STDOUT_FILENO);
    dup2(fd, STDERR_FILENO);
    setenv("MOK_SOCKET", stack->socket, 1);
    execl(stack_program("client/examples/train_moe_lm"), "train_moe_lm", "--steps", "12", "--batch", "4", "--seq", "16",
          "--hidden", "32", "--intermediate", "48", "--experts", "4", "--layers", "2", "--log", log, (char *)NULL);
    _exit(127);
}

static int steps_of(const struct stack *stack, const char *name)
{
    char path[160], line[1024];
    int count = 0;

    snprintf(path, sizeof(path), "%s/%s.log", stack->dir, name);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof(line), file))
        count++;
    if (file)
        fclose(file);
    return count;
}

static void parameters_of(const struct stack *stack, const char *name, char ret[64])
{
    char path[160], line[1024];

    ret[0] = 0;
    snprintf(path, sizeof(path), "%s/%s.out", stack->dir, name);
    FILE *file = fopen(path, "re");
    while (file && fgets(line, sizeof(line), file)) {
        if (sscanf(line, "parameters %63s", ret) != 1)
            continue;
        break;
    }
    if (file)
        fclose(file);
}

static int exit_code(pid_t pid)
{
    int status = -1;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void a_training_program_ends_with_the_parameters_of_an_undisturbed_run(void **state)
{
    (void)state;
    struct stack stack;
    char calm[64], disturbed[64];
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE }), 0);
    assert_int_equal(exit_code(train(&stack, "calm")), 0);
    pid_t job = train(&stack, "disturbed");
    for (int i = 0; i < 3; i++) {
        for (int waited = 0; waited < LONG && steps_of(&stack, "disturbed") < 1 + 3 * i; waited += 1)
            usleep(1000);
        assert_int_equal(stack_restart(&stack, i % 2 ? SIGTERM : SIGKILL), 0);
    }
    assert_int_equal(exit_code(job), 0);
    parameters_of(&stack, "calm", calm);
    parameters_of(&stack, "disturbed", disturbed);
    assert_int_equal(strlen(calm), 16);
    assert_string_equal(calm, disturbed);
    assert_int_equal(stack_stop(&stack), 0);
}

static void twenty_restarts_in_a_row_leave_nothing_behind(void **state)
{
    (void)state;
    struct stack stack;
    struct trainer job;
    uint64_t hash = 0;
    size_t kept = 0;
    int descriptors = 0, steps = 0;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE }), 0);
    struct trainer_script s = script(&stack, "steady", INT_MAX);
    assert_int_equal(trainer_start(&job, &s), 0);
    for (int i = 0; i < 20; i++) {
        assert_int_equal(trainer_await(&job, trainer_steps(&job) + 2, LONG), 0); /* so that it is back for certain */
        if (i == 2) {
            kept = fdstore_count(stack.store);
            descriptors = stack_descriptors(stack.mokd);
        } else if (i > 2) {
            expect_store(&stack, kept);
            expect_descriptors(&stack, descriptors);
        }
        assert_int_equal(stack_restart(&stack, i % 2 ? SIGTERM : SIGKILL), 0);
    }
    trainer_stop(&job);
    assert_int_equal(trainer_join(&job, LONG, &hash, &steps), 0);
    assert_true(steps > 40);
    assert_int_equal(undisturbed(&stack, steps), hash);
    expect_store(&stack, OWN);
    expect_no_bytes(&stack);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ------------------------------------------------------------------ those that do not come back */

static void sessions_whose_clients_died_with_mokd_are_freed(void **state)
{
    (void)state;
    struct stack stack;
    struct trainer job;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE, .daemon = "resume_timeout = 1" }), 0);
    assert_int_equal(stack_restart(&stack, SIGKILL), 0); /* so that both counts are of a mokd that has read a state */
    assert_int_equal(stack_await(&stack), 0);
    expect_store(&stack, OWN);
    int descriptors = stack_descriptors(stack.mokd);
    struct trainer_script s = script(&stack, "gone", INT_MAX);
    assert_int_equal(trainer_start(&job, &s), 0);
    assert_int_equal(trainer_await(&job, 2, LONG), 0);
    assert_true(fdstore_count(stack.store) > OWN);
    assert_int_equal(stack_end(&stack, SIGKILL), 0);
    trainer_kill(&job);
    assert_int_equal(stack_begin(&stack), 0);
    assert_int_equal(stack_await(&stack), 0);
    expect_store(&stack, OWN);
    expect_no_bytes(&stack);
    expect_descriptors(&stack, descriptors);
    assert_int_equal(stack_stop(&stack), 0);
}

static void the_other_rank_of_one_that_does_not_come_back_is_told(void **state)
{
    (void)state;
    struct stack stack;
    struct trainer job;
    struct workload_rank rank;
    mok_ticket ticket = 0;
    mok_result result = { 0 };
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE, .daemon = "resume_timeout = 1" }), 0);
    pid_t peer = fork();
    if (peer == 0) {
        workload_open(&rank, &small, 1, 64, 64, stack.socket, "pair", 1);
        for (;;)
            pause();
    }
    assert_int_equal(workload_open(&rank, &small, 0, 64, 0, stack.socket, "pair", 0), 0);
    assert_int_equal(workload_forward(&rank, &ticket), 0); /* its peer never joins */
    assert_int_equal(stack_end(&stack, SIGKILL), 0);
    kill(peer, SIGKILL);
    assert_int_equal(exit_code(peer), -1);
    assert_int_equal(mok_wait(rank.session, ticket, -1, &result), 0);
    assert_int_equal(result.code, -MOK_EDAEMON);
    assert_int_equal(workload_forward(&rank, &ticket), -MOK_EDAEMON);
    assert_non_null(strstr(mok_last_error(), "mok_session_recover"));
    assert_int_equal(stack_begin(&stack), 0);
    assert_int_equal(mok_session_recover(rank.session, LONG), -MOK_EPEER);
    assert_non_null(strstr(mok_last_error(), "group pair"));
    assert_int_equal(workload_forward(&rank, &ticket), -MOK_EPEER);
    assert_int_equal(mok_group_leave(rank.group), 0);
    assert_int_equal(mok_nop(rank.session, 0, &ticket), 0); /* the session lives */
    assert_int_equal(mok_wait(rank.session, ticket, -1, NULL), 0);
    workload_close(&rank);
    struct trainer_script s = script(&stack, "pair", 2);
    uint64_t hash = 0;
    assert_int_equal(trainer_start(&job, &s), 0);
    assert_int_equal(trainer_join(&job, LONG, &hash, NULL), 0);
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_session_can_be_closed_while_mokd_is_away(void **state)
{
    (void)state;
    struct stack stack;
    mok_session *session = NULL;
    mok_ticket ticket = 0;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE, .daemon = "resume_timeout = 1" }), 0);
    mok_session_options options = { .size = sizeof(options), .socket_path = stack.socket, .job = "short" };
    assert_int_equal(mok_session_open(&options, &session), 0);
    assert_int_equal(mok_nop(session, 0, &ticket), 0);
    assert_int_equal(mok_wait(session, ticket, -1, NULL), 0);
    assert_int_equal(stack_end(&stack, SIGKILL), 0);
    assert_int_equal(mok_session_recover(session, 200), -MOK_ETIMEDOUT);
    mok_session_close(session);
    assert_int_equal(stack_begin(&stack), 0);
    assert_int_equal(stack_await(&stack), 0);
    expect_store(&stack, OWN);
    /* One that has a bound of its own gives up by itself. */
    options.resume_ms = 300;
    assert_int_equal(mok_session_open(&options, &session), 0);
    assert_int_equal(stack_end(&stack, SIGKILL), 0);
    assert_int_equal(mok_session_recover(session, LONG), -MOK_EDAEMON);
    assert_int_equal(mok_nop(session, 0, &ticket), -MOK_EDAEMON);
    mok_session_close(session);
    assert_int_equal(stack_begin(&stack), 0);
    assert_int_equal(stack_await(&stack), 0);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ------------------------------------------------------------------ a store that does not help */

static void a_job_that_the_store_has_no_room_for_ends_with_mokd(void **state)
{
    (void)state;
    struct stack stack;
    struct trainer job;
    uint64_t hash = 0;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = 20 }), 0);
    struct trainer_script s = script(&stack, "many", INT_MAX);
    assert_int_equal(trainer_start(&job, &s), 0);
    assert_int_equal(trainer_await(&job, 2, LONG), 0);
    assert_true(fdstore_count(stack.store) <= 20);
    assert_int_equal(lines_with(&stack, "the service manager's store is full"), 1);
    assert_int_equal(stack_restart(&stack, SIGKILL), 0);
    assert_int_equal(trainer_join(&job, LONG, &hash, NULL), -MOK_EDAEMON);
    assert_int_equal(stack_await(&stack), 0);
    expect_store(&stack, OWN);
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_damaged_state_is_said_and_nothing_of_it_is_used(void **state)
{
    (void)state;
    struct stack stack;
    struct trainer job;
    uint64_t hash = 0;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .store = STORE }), 0);
    struct trainer_script s = script(&stack, "spoilt", INT_MAX);
    assert_int_equal(trainer_start(&job, &s), 0);
    assert_int_equal(trainer_await(&job, 2, LONG), 0);
    assert_int_equal(stack_end(&stack, SIGKILL), 0);
    int file = fdstore_dup(stack.store, "mok-state");
    assert_true(file >= 0);
    for (off_t at = 64; at < 20 << 20; at += 4096)
        (void)!pwrite(file, "spoilt", 6, at);
    close(file);
    assert_int_equal(stack_begin(&stack), 0);
    assert_int_equal(trainer_join(&job, LONG, &hash, NULL), -MOK_EDAEMON);
    assert_int_equal(stack_await(&stack), 0);
    assert_int_equal(lines_with(&stack, "no whole copy is left"), 1);
    expect_store(&stack, OWN);
    undisturbed(&stack, 2);
    assert_int_equal(stack_stop(&stack), 0);
}

/* The thread sanitizer cannot follow the threads of children that are forked beside the store's. */
#ifdef __SANITIZE_THREAD__
enum { FORKS_CLIENTS = 0 };
#else
enum { FORKS_CLIENTS = 1 };
#endif

int main(void)
{
    const struct CMUnitTest alone[] = {
        cmocka_unit_test(a_training_program_ends_with_the_parameters_of_an_undisturbed_run),
        cmocka_unit_test(a_session_can_be_closed_while_mokd_is_away),
    };
    const struct CMUnitTest forking[] = {
        cmocka_unit_test(two_jobs_compute_the_same_though_mokd_is_killed_and_restarted),
        cmocka_unit_test(twenty_restarts_in_a_row_leave_nothing_behind),
        cmocka_unit_test(sessions_whose_clients_died_with_mokd_are_freed),
        cmocka_unit_test(the_other_rank_of_one_that_does_not_come_back_is_told),
        cmocka_unit_test(a_job_that_the_store_has_no_room_for_ends_with_mokd),
        cmocka_unit_test(a_damaged_state_is_said_and_nothing_of_it_is_used),
    };
    int failed = cmocka_run_group_tests(alone, NULL, NULL);
    return FORKS_CLIENTS ? failed + cmocka_run_group_tests(forking, NULL, NULL) : failed;
}
