/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the rank processes of one job say to each other outside the MoE layer: barrier, deterministic all-reduce of the
 * dense gradients, a board of 64-bit words. Anonymous shared memory made before the fork: it has no name and goes with
 * the last process. Every wait ends when the launcher reports a dead rank.
 */
#ifndef EXAMPLE_COMM_H
#define EXAMPLE_COMM_H

#include <stddef.h>
#include <stdint.h>

#define COMM_MAX_SUM 16u /* doubles of one comm_sum_double */

struct comm;

/* `floats`: the longest comm_sum; `words`: size of the board. Before the fork. */
int comm_create(unsigned ranks, size_t floats, size_t words, struct comm **ret);
void comm_destroy(struct comm *comm);

/* The calls below are collective; all return 0, or -MOK_EPEER when a rank is gone. */
int comm_barrier(struct comm *comm);
/* data[i] = sum over ranks, added in rank order: every rank gets the same bits, run after run. */
int comm_sum(struct comm *comm, unsigned rank, float *data, size_t count);
int comm_sum_double(struct comm *comm, unsigned rank, double *values, unsigned count);

/* Shared words; who writes which, and the barrier between, is the callers' business. */
uint64_t *comm_board(struct comm *comm);

/* Launcher only: rank `rank` is gone, wake everybody who waits. The first caller's rank stays. */
void comm_abort(struct comm *comm, unsigned rank);
/* The rank that is gone, or -1. */
int comm_aborted(const struct comm *comm);

/* Asks all ranks to stop after the current step. Safe in a signal handler. */
void comm_request_stop(struct comm *comm);
int comm_stop_requested(const struct comm *comm);

#endif
