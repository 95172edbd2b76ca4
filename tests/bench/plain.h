/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plain way to run the layer, as a comparator: all-to-all, expert SGEMMs one after the other, all-to-all back, with
 * a barrier between the steps and nothing overlapped. Ranks are threads; one SGEMM thread each. Not a part of the product.
 */
#ifndef MOK_BENCH_PLAIN_H
#define MOK_BENCH_PLAIN_H

#include <stdint.h>

#include "workload.h"

struct plain;

/* Same inputs as workload_fill() gives the ranks of `workload`, `tokens` a rank. NULL when memory is short. */
struct plain *plain_open(const struct workload *workload, uint32_t tokens);
/* Collective over the ranks' threads. */
void plain_forward(struct plain *plain, uint32_t rank);
void plain_backward(struct plain *plain, uint32_t rank); /* weight gradients are overwritten */
/* BF16 [tokens][H] of a rank. */
const uint16_t *plain_out(const struct plain *plain, uint32_t rank);
const uint16_t *plain_d_x(const struct plain *plain, uint32_t rank);
void plain_close(struct plain *plain);

#endif
