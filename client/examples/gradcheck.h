/* SPDX-License-Identifier: Apache-2.0 */
/*
 * --check-gradients: compares what the layer's backward returns with central differences of its forward.
 */
#ifndef EXAMPLE_GRADCHECK_H
#define EXAMPLE_GRADCHECK_H

/* launch_rank; `argument` is a struct job. Exit code 0: every tensor within its tolerance. */
int gradcheck_rank(unsigned rank, void *argument);

#endif
