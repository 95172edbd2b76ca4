/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs one process a rank and watches them. The launcher itself never opens a session: a session does not survive a
 * fork, so each rank opens its own.
 */
#ifndef EXAMPLE_LAUNCH_H
#define EXAMPLE_LAUNCH_H

#include "comm.h"

#define LAUNCH_INTERRUPTED 130 /* exit code of a run that a signal ended in good order */

/* A rank's whole life; its value is the exit code of the rank's process. */
typedef int (*launch_rank)(unsigned rank, void *argument);

/*
 * Forks the ranks and returns the exit code of the job when all have ended: 0, LAUNCH_INTERRUPTED, or 1 when a rank
 * failed or died. Then the others are told (comm_abort), and killed if they have not ended five seconds later.
 * SIGINT and SIGTERM ask for a stop after the current step; a second one kills.
 */
int launch(unsigned ranks, const char *job, struct comm *comm, launch_rank run, void *argument);

#endif
