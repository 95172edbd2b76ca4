/* SPDX-License-Identifier: Apache-2.0 */
#include "actor.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "stack.h"

static void report(const struct actor_script *script, int pipe, enum actor_phase phase)
{
    char byte = (char)phase;
    if (write(pipe, &byte, 1) != 1)
        _exit(3);
    if (script->stop_at == phase && phase != ACTOR_STEPPING && phase != ACTOR_FINISHED)
        for (;;)
            pause();
}

static int fail(const struct actor_script *script, const char *what)
{
    fprintf(stderr, "actor %s rank %u: %s: %s\n", script->group, script->rank, what, mok_last_error());
    return 1;
}

static int play(const struct actor_script *script, int pipe)
{
    struct workload_rank rank;
    if (script->stop_at == ACTOR_SESSION) {
        mok_session *session;
        mok_session_options options = { .size = sizeof(options), .socket_path = script->socket, .job = script->group };
        if (mok_session_open(&options, &session) < 0)
            return fail(script, "session");
        report(script, pipe, ACTOR_SESSION);
    }
    if (workload_open(&rank, script->problem, script->rank, script->tokens, script->first_token, script->socket,
                     script->group, script->device) < 0)
        return fail(script, "open");
    report(script, pipe, ACTOR_JOINED);
    if (script->stop_at == ACTOR_FORWARD) {
        mok_ticket ticket;
        if (workload_forward(&rank, &ticket) < 0)
            return fail(script, "forward");
        report(script, pipe, ACTOR_FORWARD);
    }
    report(script, pipe, ACTOR_STEPPING);
    for (int i = 0; script->stop_at == ACTOR_STEPPING || i < script->steps; i++)
        if (workload_step(&rank, NULL, NULL) < 0)
            return fail(script, "step");
    report(script, pipe, ACTOR_FINISHED);
    workload_close(&rank);
    return 0;
}

int actor_start(struct actor *actor, const struct actor_script *script)
{
    int fds[2];
    if (pipe(fds) < 0)
        return -1;
    fflush(NULL);
    actor->pid = fork();
    if (actor->pid == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        close(fds[0]);
        _exit(play(script, fds[1]));
    }
    close(fds[1]);
    actor->pipe = fds[0];
    return actor->pid < 0 ? -1 : 0;
}

int actor_await(struct actor *actor, enum actor_phase phase, int timeout_ms)
{
    double end = stack_now_ms() + timeout_ms;
    for (;;) {
        char byte;
        struct pollfd pollfd = { .fd = actor->pipe, .events = POLLIN };
        int left = (int)(end - stack_now_ms());
        if (left < 0 || poll(&pollfd, 1, left) <= 0 || read(actor->pipe, &byte, 1) != 1)
            return -1;
        if (byte == (char)phase)
            return 0;
    }
}

static int reap(struct actor *actor, int status)
{
    close(actor->pipe);
    actor->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void actor_kill(struct actor *actor)
{
    int status = 0;
    if (actor->pid <= 0)
        return;
    kill(actor->pid, SIGKILL);
    waitpid(actor->pid, &status, 0);
    reap(actor, status);
}

int actor_join(struct actor *actor, int timeout_ms)
{
    double end = stack_now_ms() + timeout_ms;
    int status;
    while (waitpid(actor->pid, &status, WNOHANG) == 0) {
        if (stack_now_ms() > end)
            return -1;
        usleep(5000);
    }
    return reap(actor, status);
}
