/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client process that plays one rank of a problem, tells how far it has come, and can be killed at any moment.
 * Fork actors before the test itself opens a session.
 */
#ifndef MOK_TEST_ACTOR_H
#define MOK_TEST_ACTOR_H

#include "workload.h"

#include <sys/types.h>

/* What an actor reports on its pipe as it passes; it goes on until told to stop at one. */
enum actor_phase {
    ACTOR_SESSION = 'S',  /* session open */
    ACTOR_JOINED = 'J',   /* group joined, layer and buffers there */
    ACTOR_FORWARD = 'F',  /* a forward submitted, not waited for */
    ACTOR_STEPPING = 'L', /* in an endless loop of steps */
    ACTOR_FINISHED = 'D', /* did all its steps; exits 0 */
};

struct actor {
    pid_t pid;
    int pipe; /* read end */
};

struct actor_script {
    const char *socket, *group;
    const struct workload *problem;
    uint32_t rank, device, tokens;
    uint64_t first_token;
    enum actor_phase stop_at; /* sleeps there for ever; ACTOR_FINISHED: runs `steps` and leaves */
    int steps;
};

/* Starts an actor; 0 or -1. */
int actor_start(struct actor *actor, const struct actor_script *script);
/* Waits until the actor has reported `phase`; 0, or -1 after timeout_ms or when it has died. */
int actor_await(struct actor *actor, enum actor_phase phase, int timeout_ms);
/* SIGKILL, reaps. */
void actor_kill(struct actor *actor);
/* Waits for the end; exit code, or 128 + signal, or -1 after timeout_ms. */
int actor_join(struct actor *actor, int timeout_ms);

#endif
