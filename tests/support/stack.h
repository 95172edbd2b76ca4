/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A real mokd with host devices in a temporary directory, for tests and benchmarks.
 * Start, look at it from outside (pids, descriptors, memory), hurt it, stop it.
 */
#ifndef MOK_TEST_STACK_H
#define MOK_TEST_STACK_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "fdstore.h"

struct stack_options {
    unsigned devices;        /* host devices; 0: 2 */
    unsigned threads;        /* of each; 0: 1 */
    unsigned poll_us;        /* how long workers look before they sleep */
    unsigned chaos_delay_us; /* random delays in the workers */
    unsigned gpus;           /* CUDA devices; devices 0 then means 0 */
    unsigned gpu_spread;     /* GPUs that they are spread over; 0: 1 */
    unsigned gpu_first;      /* the first of those */
    unsigned gpu_gib;        /* memory of each; 0: 16 */
    unsigned gpu_blocks;     /* thread blocks of their kernels; 0: one an SM */
    unsigned gpu_yield_us;   /* after how long these make room; 0: never */
    unsigned gpu_reserve;    /* SMs that they leave alone */
    const char *daemon;      /* more lines of [daemon]; may be NULL */
    const char *extra;       /* more configuration text, appended; may be NULL */
    unsigned store;          /* descriptors that a service manager keeps for mokd; 0: there is none */
};

struct stack {
    pid_t mokd;
    char dir[64];
    char socket[96];
    char config[96];
    char log[96];
    struct fdstore *store; /* NULL: none */
    unsigned devices;
};

/* Starts mokd and waits until every device is up. 0, or -1 after printing why (with the log). */
int stack_start(struct stack *stack, const struct stack_options *options);
/* SIGTERM, waits for the end, removes the directory. Returns mokd's exit code; -1 if it had to be killed. */
int stack_stop(struct stack *stack);
/* Ends mokd by that signal; starts the next, without waiting for its devices; both. 0 or -1. */
int stack_end(struct stack *stack, int number);
int stack_begin(struct stack *stack);
int stack_restart(struct stack *stack, int number);
/* Waits until every device is up. 0 or -1. */
int stack_await(const struct stack *stack);
void stack_print_log(const struct stack *stack);

/* Worker pids (children of mokd) in ascending order; returns how many there are. */
size_t stack_workers(const struct stack *stack, pid_t *ret, size_t capacity);
/* Open descriptors and resident pages of a process; -1 if it is gone. */
int stack_descriptors(pid_t pid);
long stack_resident_kb(pid_t pid);
/* Number of processes whose parent is `pid`. */
size_t stack_children(pid_t pid);

/* A monotonic clock. */
double stack_now_ms(void);

/* Path of a built program, e.g. stack_program("daemon/mokd/mokd"); MOK_BUILD_DIR says where. Static buffer. */
const char *stack_program(const char *relative);

#endif
