/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests on a GPU share. Whether there is one is found out without starting CUDA, so that a test may still fork. */
#ifndef MOK_TEST_GPU_H
#define MOK_TEST_GPU_H

#include "stack.h"

/* Ends the program with 77 where there is no GPU. */
void gpu_or_skip(void);
/* Makes workload_copy copy to and from GPUs. */
void gpu_copies(void);
/* Lines of [daemon] for the MPS whose pipe directory MOK_TEST_MPS_PIPE names, if it does; else NULL. Static buffer. */
const char *gpu_daemon_lines(void);
/* As stack_start, under the MPS whose pipe directory MOK_TEST_MPS_PIPE names, if it does. */
int gpu_stack_start(struct stack *stack, unsigned gpus, unsigned hosts);
/* How many GPUs this machine has, at least 1. */
unsigned gpu_count(void);
/* Whether it does. */
int gpu_mps(void);

#endif
