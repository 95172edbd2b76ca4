/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Top-k softmax router in FP32: the k largest logits of a token, weighted by the softmax over those k.
 */
#ifndef EXAMPLE_ROUTER_H
#define EXAMPLE_ROUTER_H

#include <stddef.h>
#include <stdint.h>

/* Slots are in descending order of the logit; of equal logits the lower expert comes first. NaN logits lose. */
void router_forward(size_t tokens, size_t experts, size_t topk, const float *logits, int32_t *ids, float *weight);

/* d_logits[tokens][experts] is written: zero for experts that were not chosen. */
void router_backward(size_t tokens, size_t experts, size_t topk, const int32_t *ids, const float *weight,
                     const float *d_weight, float *d_logits);

#endif
