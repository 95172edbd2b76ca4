/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mokd that starts the MPS control daemon of its GPU itself (`mps = own`), the real one: clients run under it, and it
 * comes back after it was killed. Clients are processes of their own; this one never starts CUDA.
 */
#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "actor.h"
#include "gpu.h"

#define TOKENS 600
#define SOON_MS 30000

static const struct workload alone = { .hidden = 512,
                                       .intermediate = 256,
                                       .experts = 8,
                                       .topk = 2,
                                       .ep = 1,
                                       .max_tokens = TOKENS,
                                       .seed = 2,
                                       .forward_only = true };

/* Exit code of a client that does some steps. */
static int client_runs(const struct stack *stack)
{
    struct actor actor;
    struct actor_script script = { .socket = stack->socket,
                                   .group = "own",
                                   .problem = &alone,
                                   .tokens = TOKENS,
                                   .stop_at = ACTOR_FINISHED,
                                   .steps = 5 };

    assert_int_equal(actor_start(&actor, &script), 0);
    int code = actor_join(&actor, 10000);
    if (code < 0)
        actor_kill(&actor);
    return code;
}

static pid_t parent_of(pid_t pid, char name[64])
{
    char path[64];
    int parent = 0;

    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return 0;
    if (fscanf(file, "%*d (%63[^)]) %*c %d", name, &parent) != 2)
        parent = 0;
    fclose(file);
    return parent;
}

/* The control daemon that mokd has started; 0: there is none. */
static pid_t control_of(const struct stack *stack)
{
    DIR *dir = opendir("/proc");
    struct dirent *entry;
    pid_t found = 0;
    char name[64];

    assert_non_null(dir);
    while ((entry = readdir(dir)))
        if (parent_of(atoi(entry->d_name), name) == stack->mokd && strncmp(name, "nvidia-cuda-mps", 15) == 0)
            found = atoi(entry->d_name);
    closedir(dir);
    return found;
}

static bool is_there(const char *program)
{
    const char *from = getenv("PATH");
    char path[512];

    while (from && *from) {
        int length = (int)strcspn(from, ":");
        snprintf(path, sizeof(path), "%.*s/%s", length, from, program);
        if (access(path, X_OK) == 0)
            return true;
        from += length + (from[length] == ':');
    }
    return false;
}

static void mokd_keeps_an_mps_control_daemon_of_its_own(void **state)
{
    char pipe[64] = "/tmp/mok-own-mps-XXXXXX", lines[160];
    struct stack_options options = { .gpus = 1, .poll_us = 100, .daemon = lines };
    struct stack stack;
    char name[64];
    (void)state;

    assert_non_null(mkdtemp(pipe));
    snprintf(lines, sizeof(lines), "sharing = mps\nmps = own\nmps_pipe = %s", pipe);
    double start = stack_now_ms();
    assert_int_equal(stack_start(&stack, &options), 0);
    printf("device up %.0f ms after the start\n", stack_now_ms() - start);
    pid_t control = control_of(&stack);
    assert_true(control > 0);
    assert_int_equal(client_runs(&stack), 0);

    kill(control, SIGKILL);
    start = stack_now_ms();
    int code = -1;
    while (code != 0 && stack_now_ms() - start < SOON_MS)
        code = client_runs(&stack);
    printf("a client ran %.0f ms after the control daemon was killed\n", stack_now_ms() - start);
    if (code != 0)
        stack_print_log(&stack);
    assert_int_equal(code, 0);
    control = control_of(&stack);
    printf("control daemon: %s\n", control > 0 ? "started again" : "none");
    assert_int_equal(stack_stop(&stack), 0);
    assert_true(control == 0 || parent_of(control, name) == 0);
    snprintf(lines, sizeof(lines), "rm -rf %s", pipe);
    assert_int_equal(system(lines), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(mokd_keeps_an_mps_control_daemon_of_its_own) };

    gpu_or_skip();
    if (gpu_mps() || !is_there("nvidia-cuda-mps-control")) {
        fprintf(stderr, "skipped: MPS runs already, or is not installed\n");
        return 77;
    }
    gpu_copies();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
