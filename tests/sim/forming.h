/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemons of a rack in virtual time: groups with a rank on every device form, agree on allocations and dissolve,
 * over links that delay every message by another time. The group machines of daemon/rack are the real ones, and
 * messages are packed as on the wire; only durations are modelled. One event at a time, in an order that the seed alone
 * decides.
 */
#ifndef MOK_SIM_FORMING_H
#define MOK_SIM_FORMING_H

#include <stdbool.h>
#include <stdint.h>

#include "world.h"

struct forming_options {
    uint32_t nodes, devices; /* at most GROUP_MAX_NODES; a rank a device */
    uint32_t jobs;           /* each has all devices and a group of its own: they form at the same time */
    uint32_t calls;          /* allocations on which all ranks of a group agree, one after the other */
    enum world_order order;  /* in which ranks join: of each job from the first, odd jobs from the last, or in any order */
    bool kill;               /* one node dies in the middle of it, and comes back */
    bool intruders;          /* as soon as a group stands, somebody at another node wants a rank of it */
    uint64_t seed;
};

struct forming_result {
    bool done;               /* every job has had its group, and all its calls */
    uint64_t formed;         /* groups */
    uint64_t ended;          /* groups that a rank of a living node has lost */
    uint64_t taken;          /* ranks of groups that stand, wanted at another node, and refused for that */
    uint64_t left;           /* objects that the machines still hold, when all is over */
    uint64_t messages, bytes; /* between nodes */
    uint64_t busiest;        /* messages that came to one node */
    uint64_t largest;        /* bytes of a message */
    uint64_t form_ns;        /* from the last join of a job to its group's commit on the last node; the longest */
    uint64_t told_ns;        /* from the loss of a node, as the first learns it, to the end of its groups on the last */
    uint64_t virtual_ns;
};

/* 0, or -1 where there is no memory. */
int forming_run(const struct forming_options *options, struct forming_result *ret);

#endif
