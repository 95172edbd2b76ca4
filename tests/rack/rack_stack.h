/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Several real mokds that are the nodes of one rack, on addresses of 127.0.0.0/8 that no other test has. Each has its
 * own directory and socket, and host devices.
 */
#ifndef RACK_STACK_H
#define RACK_STACK_H

#include "stack.h"

#define RACK_STACK_MAX 6u

struct rack_stack_options {
    unsigned nodes;
    unsigned devices;                  /* of each node; 0: 1 */
    unsigned heartbeat_ms, timeout_ms; /* 0: 100 and 1000 */
    unsigned chaos_delay_us;
    unsigned gpus;         /* CUDA devices of each node; devices 0 then means 0 */
    unsigned gpu_spread;   /* GPUs that the nodes are spread over; 0: 1 */
    const char *daemon;    /* more lines of [daemon], of all nodes; may be NULL */
    const char *mesh;      /* more lines of [rack], of all nodes; may be NULL */
    const char *extra;     /* more configuration, of all nodes; may be NULL */
    const char *last;      /* more configuration, of the last node alone; may be NULL */
};

struct rack_stack {
    char dir[64]; /* of keys */
    unsigned nodes, timeout_ms;
    struct rack_stack_options options;
    char inventory[RACK_STACK_MAX * 256];
    struct stack node[RACK_STACK_MAX];
};

/* All nodes are there, and hold each other for up. 0, or -1 after printing why. */
int rack_stack_start(struct rack_stack *rack, const struct rack_stack_options *options);
/* Starts a node again that was killed. */
int rack_stack_boot(struct rack_stack *rack, unsigned node);
/* SIGKILL, to mokd and thereby its workers. */
void rack_stack_kill(struct rack_stack *rack, unsigned node);
/* Waits until node `of` says that `count` other nodes are up; 0, or -1. */
int rack_stack_await(struct rack_stack *rack, unsigned of, unsigned count);
/* A group of which not all ranks have come, as a node shows it. */
struct rack_stack_forming {
    char home[16];
    unsigned joined;
    bool partial;
};
/* -1: node `at` shows no such group. */
int rack_stack_forming(struct rack_stack *rack, unsigned at, const char *name, struct rack_stack_forming *ret);
/* Node `at` reads its inventory again: without `node`, or with it as before. 0, or -1. */
int rack_stack_reload(struct rack_stack *rack, unsigned at, unsigned node, int without);
/* Node `at` is told to drain, or with `undo` to open, all devices of another; 0, or what it answers. */
int rack_stack_drain(struct rack_stack *rack, unsigned at, unsigned node, int undo);
/* 0 when all that still live ended in order. */
int rack_stack_stop(struct rack_stack *rack);

#endif
