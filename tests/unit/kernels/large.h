/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layers whose offsets pass 2^32, in memory that is mostly not there. Each is a small problem whose few tokens or
 * experts are spread over a huge one; it must give the small one's bits. Ends the test where it does not.
 */
#ifndef MOK_TESTS_LARGE_H
#define MOK_TESTS_LARGE_H

/* Slot buffers of 9 GiB: byte and element offsets beyond 2^32; tokens on both sides of each border. */
void large_slots_match_the_small_problem(void);
/* x, out and d_x of more than 4 GiB; first and last rows. */
void large_rows_match_the_small_problem(void);
/* Parameters of 8 GiB and gradients of 16 GiB a matrix; first and last expert. */
void large_weights_match_the_small_problem(void);

#endif
