/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Progress on stdout and in the log file. Never part of the arithmetic.
 */
#include "progress.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "mok/types.h"
#include "report.h"

#define PLAIN_EVERY 10 /* steps between lines where stdout is no terminal */

static uint64_t now_ns(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

int progress_open(const char *job, const char *log, int quiet, uint64_t steps, uint64_t tokens, struct progress *ret)
{
    FILE *file = NULL;

    if (log) {
        file = fopen(log, "we");
        if (!file)
            return fail(-MOK_EIO, "--log %s: %s", log, strerror(errno));
    }
    *ret = (struct progress){
        .log = file, .job = job, .steps = steps, .tokens = tokens, .terminal = isatty(STDOUT_FILENO), .quiet = quiet
    };
    return 0;
}

void progress_start(struct progress *progress, uint64_t first_step)
{
    progress->first_step = first_step;
    progress->started_ns = progress->step_ns = now_ns();
}

static double rate(uint64_t tokens, uint64_t ns)
{
    return ns ? (double)tokens * 1e9 / (double)ns : 0;
}

static void show(const struct progress *progress, uint64_t step, double loss, double tokens_per_s)
{
    int last = step == progress->steps, width = 24;
    int filled = (int)((uint64_t)width * step / progress->steps);

    if (progress->quiet)
        return;
    if (progress->terminal) {
        printf("\r%s [%.*s%*s] step %" PRIu64 "/%" PRIu64 "  loss %.4f  %.0f tokens/s  ", progress->job, filled,
               "########################", width - filled, "", step, progress->steps, loss, tokens_per_s);
    } else if (step == progress->first_step || last || step % PLAIN_EVERY == 0) {
        printf("%s step %" PRIu64 "/%" PRIu64 " loss %.4f %.0f tokens/s\n", progress->job, step, progress->steps, loss,
               tokens_per_s);
    }
    fflush(stdout);
}

static int tell(struct progress *progress, uint64_t step, double loss, double tokens_per_s)
{
    progress->done++;
    if (step == progress->first_step)
        progress->first_loss = loss;
    progress->last_loss = loss;
    show(progress, step, loss, tokens_per_s);
    if (progress->log && (fprintf(progress->log, "{\"step\": %" PRIu64 ", \"loss\": %.17g, \"tokens_per_s\": %.1f}\n",
                                  step, loss, tokens_per_s) < 0 ||
                          fflush(progress->log) != 0))
        return fail(-MOK_EIO, "--log: %s", strerror(errno));
    return 0;
}

int progress_steps(struct progress *progress, uint64_t first, const double *losses, unsigned count)
{
    uint64_t now = now_ns();
    double tokens_per_s = rate(progress->tokens * count, now - progress->step_ns);
    int rc = 0;

    progress->step_ns = now;
    for (unsigned i = 0; i < count && rc == 0; i++)
        rc = tell(progress, first + i, losses[i], tokens_per_s);
    return rc;
}

int progress_step(struct progress *progress, uint64_t step, double loss)
{
    return progress_steps(progress, step, &loss, 1);
}

double progress_rate(const struct progress *progress)
{
    return rate(progress->tokens * progress->done, progress->step_ns - progress->started_ns);
}

void progress_end_line(const struct progress *progress)
{
    if (progress->terminal && !progress->quiet && progress->done > 0) {
        putchar('\n');
        fflush(stdout);
    }
}

int progress_close(struct progress *progress)
{
    if (progress->log && fclose(progress->log) != 0)
        return fail(-MOK_EIO, "--log: %s", strerror(errno));
    progress->log = NULL;
    return 0;
}
