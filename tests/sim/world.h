/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rack in virtual time: devices that each run one phase at a time, jobs whose ranks submit operations of several
 * layers in any order. The dispatcher's state machine, the fair share and the schedule's counts are the real ones; only
 * durations are modelled. One event at a time, in an order that the seed alone decides.
 */
#ifndef MOK_SIM_WORLD_H
#define MOK_SIM_WORLD_H

#include <stdbool.h>
#include <stdint.h>

/* The order in which a rank submits a round of its layers. */
enum world_order {
    WORLD_SAME,     /* all ranks alike */
    WORLD_OPPOSITE, /* odd ranks backwards */
    WORLD_RANDOM,   /* each rank its own, anew each round */
};

struct world_options {
    uint32_t nodes, devices; /* devices of a node; a rank a device */
    uint32_t jobs;           /* each has all devices: jobs overlap everywhere */
    uint32_t layers, rounds; /* a rank submits each of its layers once a round, and waits for the round's end */
    uint32_t tokens, experts_per_rank, topk;
    enum world_order order;
    bool hold;        /* the mistake: an operation keeps its device until it completes, waiting for its peers there */
    uint64_t late_ns; /* one rank of each job begins so much later */
    uint64_t seed;
};

struct world_result {
    bool done;           /* false: nothing can move any more, and operations are left */
    uint64_t operations; /* completed, over all ranks */
    uint64_t failed;
    uint64_t virtual_ns;
    uint64_t busiest_ns; /* of a device: nobody could have been faster */
    uint64_t flags;      /* flag words written */
    uint64_t bells;      /* peers told that a flag moved */
    uint64_t looks;      /* steps of the state machine */
    double fair_spread;  /* largest over smallest device time of a job while all of them had work */
};

/* 0, or -1 where there is no memory. */
int world_run(const struct world_options *options, struct world_result *ret);

#endif
