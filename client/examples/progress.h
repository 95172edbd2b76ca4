/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What rank 0 shows while it trains: a line that is rewritten on a terminal, a line every few steps elsewhere, and the
 * log file. Numbers of the log are exact: two equal runs write equal losses.
 */
#ifndef EXAMPLE_PROGRESS_H
#define EXAMPLE_PROGRESS_H

#include <stdint.h>
#include <stdio.h>

struct progress {
    FILE *log;
    const char *job;
    uint64_t steps, first_step, done;
    uint64_t started_ns, step_ns; /* of the run, of the last step's end */
    uint64_t tokens;              /* of a step, over all ranks */
    int terminal, quiet;
    double first_loss, last_loss;
};

int progress_open(const char *job, const char *log, int quiet, uint64_t steps, uint64_t tokens, struct progress *ret);
/* Starts the clock. */
void progress_start(struct progress *progress, uint64_t first_step);
int progress_step(struct progress *progress, uint64_t step, double loss);
/* The same for steps that were done one after the other since the last call. */
int progress_steps(struct progress *progress, uint64_t first, const double *losses, unsigned count);
/* Tokens a second over all steps of this run. */
double progress_rate(const struct progress *progress);
/* Ends the line that progress_step rewrites on a terminal. */
void progress_end_line(const struct progress *progress);
/* Closes the log; an error that only shows then is reported. Zeroed is fine. */
int progress_close(struct progress *progress);

#endif
