/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Routing of one rank's tokens. Needs topk <= experts; never chooses an expert twice for a token.
 */
#include "router.h"

#include <math.h>
#include <string.h>

/* Inserts an expert into the sorted list of the best so far; strict comparison keeps the lower id first. */
static size_t insert(size_t have, size_t topk, int32_t *ids, float *best, int32_t expert, float logit)
{
    size_t at;

    if (have == topk && !(logit > best[topk - 1]))
        return have;
    for (at = have < topk ? have : topk - 1; at > 0 && logit > best[at - 1]; at--) {
        best[at] = best[at - 1];
        ids[at] = ids[at - 1];
    }
    best[at] = logit;
    ids[at] = expert;
    return have < topk ? have + 1 : have;
}

void router_forward(size_t tokens, size_t experts, size_t topk, const float *logits, int32_t *ids, float *weight)
{
    for (size_t t = 0; t < tokens; t++, ids += topk, weight += topk) {
        size_t have = 0;
        float sum = 0, peak;

        for (size_t e = 0; e < experts; e++) {
            float logit = logits[t * experts + e];

            have = insert(have, topk, ids, weight, (int32_t)e, isnan(logit) ? -INFINITY : logit);
        }
        peak = weight[0];
        for (size_t k = 0; k < topk; k++) {
            weight[k] = expf(weight[k] - peak);
            sum += weight[k];
        }
        for (size_t k = 0; k < topk; k++)
            weight[k] /= sum;
    }
}

void router_backward(size_t tokens, size_t experts, size_t topk, const int32_t *ids, const float *weight,
                     const float *d_weight, float *d_logits)
{
    memset(d_logits, 0, tokens * experts * sizeof(*d_logits));
    for (size_t t = 0; t < tokens; t++, ids += topk, weight += topk, d_weight += topk) {
        float mean = 0;

        for (size_t k = 0; k < topk; k++)
            mean += weight[k] * d_weight[k];
        for (size_t k = 0; k < topk; k++)
            d_logits[t * experts + (size_t)ids[k]] = weight[k] * (d_weight[k] - mean);
    }
}
