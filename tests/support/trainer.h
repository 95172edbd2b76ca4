/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A job of several processes whose steps depend on each other, so that a step that is lost, doubled or torn shows in
 * the end. It recovers when mokd goes away: all ranks agree on whether a step is to be done again. Fork trainers before
 * the test itself opens a session.
 */
#ifndef MOK_TEST_TRAINER_H
#define MOK_TEST_TRAINER_H

#include <stdint.h>
#include <sys/types.h>

#include "workload.h"

#define TRAINER_RANKS 2u

struct trainer_board;

struct trainer {
    pid_t pid[TRAINER_RANKS];
    struct trainer_board *board; /* shared with the processes */
};

struct trainer_script {
    const char *socket, *group;
    const struct workload *problem;
    uint32_t tokens;
    int steps;
    int pause_us;              /* after each step */
    uint32_t devices[TRAINER_RANKS];
};

/* Starts the processes; 0 or -1. */
int trainer_start(struct trainer *trainer, const struct trainer_script *script);
/* Waits until `steps` are done; 0, or -1 after timeout_ms or when a rank has died. */
int trainer_await(struct trainer *trainer, int steps, int timeout_ms);
int trainer_steps(const struct trainer *trainer);
/* How often the ranks had to recover together. */
int trainer_recoveries(const struct trainer *trainer);
/* Asks it to end after one of the next steps; trainer_join says which. */
void trainer_stop(struct trainer *trainer);
/* Waits for the end: 0 and the hash of all that was computed, a rank's -MOK_E*, or -1 after timeout_ms. */
int trainer_join(struct trainer *trainer, int timeout_ms, uint64_t *ret_hash, int *ret_steps);
/* Kills what is left of it. */
void trainer_kill(struct trainer *trainer);
/* SIGKILL to one rank; reaps. */
void trainer_kill_rank(struct trainer *trainer, uint32_t rank);

#endif
