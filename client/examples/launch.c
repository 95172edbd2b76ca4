/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Fork, watch, and leave no process behind: ranks die with their launcher, and the launcher ends after its last rank.
 */
#include "launch.h"

#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "report.h"

#define GRACE_S 5 /* between a rank's death and SIGTERM for the others, and from there to SIGKILL */

struct job {
    unsigned ranks, alive;
    const char *name;
    struct comm *comm;
    pid_t *pids; /* 0: ended */
    int code;
    int kills;       /* signals sent since a rank failed */
    time_t deadline; /* of the next one; 0: nothing is wrong */
};

static time_t now_s(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return ts.tv_sec;
}

static void signal_ranks(const struct job *job, int number)
{
    for (unsigned r = 0; r < job->ranks; r++)
        if (job->pids[r] > 0)
            kill(job->pids[r], number);
}

static void job_fails(struct job *job, unsigned rank)
{
    if (job->deadline == 0)
        job->deadline = now_s() + GRACE_S;
    job->code = 1;
    comm_abort(job->comm, rank);
}

static void rank_ended(struct job *job, unsigned rank, int status)
{
    job->pids[rank] = 0;
    job->alive--;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return;
    if (WIFEXITED(status) && WEXITSTATUS(status) == LAUNCH_INTERRUPTED) {
        if (job->code == 0)
            job->code = LAUNCH_INTERRUPTED;
        return;
    }
    if (job->deadline == 0 && WIFSIGNALED(status))
        note("rank %u of job %s was killed by signal %d (%s), the job ends", rank, job->name, WTERMSIG(status),
             strsignal(WTERMSIG(status)));
    else if (job->deadline == 0)
        note("rank %u of job %s ended with exit code %d, the job ends", rank, job->name, WEXITSTATUS(status));
    job_fails(job, rank);
}

/* Whether rank r has ended, and how; it is still to be reaped. */
static bool has_ended(const struct job *job, unsigned r, siginfo_t *ret)
{
    *ret = (siginfo_t){ .si_pid = 0 };
    return job->pids[r] > 0 && waitid(P_PID, (id_t)job->pids[r], ret, WEXITED | WNOHANG | WNOWAIT) == 0 &&
           ret->si_pid != 0;
}

static void reap_some(struct job *job, bool killed_alone)
{
    siginfo_t info;
    int status;

    for (unsigned r = 0; r < job->ranks; r++)
        if (has_ended(job, r, &info) && !(killed_alone && info.si_code == CLD_EXITED) &&
            waitpid(job->pids[r], &status, WNOHANG) == job->pids[r])
            rank_ended(job, r, status);
}

static bool one_gave_up(const struct job *job)
{
    siginfo_t info;

    for (unsigned r = 0; r < job->ranks; r++)
        if (has_ended(job, r, &info) && info.si_code == CLD_EXITED && info.si_status != 0 &&
            info.si_status != LAUNCH_INTERRUPTED)
            return true;
    return false;
}

/*
 * A killed rank makes the others end, so of those that have ended the killed ones come first. Its sockets close before
 * its end is to be seen, so another may have given up by then.
 */
static void reap(struct job *job)
{
    const struct timespec moment = { .tv_nsec = 100000000 };

    reap_some(job, true);
    if (job->deadline == 0 && one_gave_up(job)) {
        nanosleep(&moment, NULL);
        reap_some(job, true);
    }
    reap_some(job, false);
}

static void interrupted(struct job *job)
{
    if (!comm_stop_requested(job->comm)) {
        comm_request_stop(job->comm);
        return;
    }
    signal_ranks(job, SIGKILL);
}

static void hurry(struct job *job)
{
    if (job->deadline == 0 || now_s() < job->deadline)
        return;
    signal_ranks(job, job->kills++ == 0 ? SIGTERM : SIGKILL);
    job->deadline = now_s() + GRACE_S;
}

static void watch(struct job *job, const sigset_t *signals)
{
    struct timespec slice = { .tv_sec = 1 };

    reap(job);
    while (job->alive > 0) {
        int number = sigtimedwait(signals, NULL, &slice);

        if (number == SIGINT || number == SIGTERM)
            interrupted(job);
        reap(job);
        hurry(job);
    }
}

static _Noreturn void rank_process(unsigned rank, pid_t launcher, const sigset_t *mask, launch_rank run, void *argument)
{
    int code;

    report_set_rank((int)rank);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher)
        _exit(1);
    /* A terminal's Ctrl-C reaches the whole process group; only the launcher acts on it. */
    signal(SIGINT, SIG_IGN);
    sigprocmask(SIG_SETMASK, mask, NULL);
    code = run(rank, argument);
    fflush(NULL);
    exit(code);
}

int launch(unsigned ranks, const char *name, struct comm *comm, launch_rank run, void *argument)
{
    struct job job = { .ranks = ranks, .name = name, .comm = comm };
    pid_t launcher = getpid();
    sigset_t signals, mask;

    job.pids = calloc(ranks, sizeof(*job.pids));
    if (!job.pids) {
        note("no memory");
        return 1;
    }
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, &mask);
    fflush(NULL);
    for (unsigned r = 0; r < ranks; r++) {
        pid_t pid = fork();

        if (pid == 0) {
            free(job.pids);
            rank_process(r, launcher, &mask, run, argument);
        }
        if (pid < 0) {
            note("cannot start rank %u: %s", r, strerror(errno));
            job_fails(&job, r);
            break;
        }
        job.pids[r] = pid;
        job.alive++;
    }
    watch(&job, &signals);
    sigprocmask(SIG_SETMASK, &mask, NULL);
    free(job.pids);
    return job.code;
}
