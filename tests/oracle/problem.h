/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One global MoE problem: all tokens of all ranks, all experts. It knows nothing of how a group splits it, so the same
 * problem can be given to any EP degree and to the oracle.
 */
#ifndef MOK_TESTS_PROBLEM_H
#define MOK_TESTS_PROBLEM_H

#include <stddef.h>
#include <stdint.h>

#include "rng.h"

#define PROBLEM_MAX_RANKS 128

struct problem {
    uint32_t hidden, intermediate, experts, topk;
    uint32_t shared_intermediate; /* 0: no shared expert */
    float clamp;                  /* 0: none */
    uint32_t ranks;               /* the split the problem came with; ranks[] sums to tokens */
    uint32_t rank_tokens[PROBLEM_MAX_RANKS];
    uint32_t tokens;
    uint16_t *x, *d_out;                             /* BF16 [T][H] */
    int32_t *ids;                                    /* [T][K] */
    float *topk_weight;                              /* [T][K] */
    uint16_t *gate, *up;                             /* BF16 [E][I][H] */
    uint16_t *down;                                  /* BF16 [E][H][I] */
    uint16_t *shared_gate, *shared_up, *shared_down; /* BF16 [Is][H], [Is][H], [H][Is]; NULL without one */
};

enum routing {
    ROUTE_UNIFORM = 0, /* k distinct experts where K <= E */
    ROUTE_DUPLICATES,  /* each slot on its own, so that tokens name an expert twice */
    ROUTE_ZIPF,        /* expert e with probability ~ 1 / (e + 1), each slot on its own */
    ROUTE_HOT_EXPERT,  /* all slots to one expert */
    ROUTE_HOT_RANK,    /* all slots to the first quarter of the experts */
    ROUTE_COUNT,
};

enum weighting {
    WEIGHT_SOFTMAX = 0,   /* positive, sum 1 a token */
    WEIGHT_ZERO_NEGATIVE, /* a third 0, the others of either sign */
    WEIGHT_COUNT,
};

struct problem_options {
    uint32_t hidden, intermediate, experts, topk, tokens, shared_intermediate;
    float clamp;
    enum routing routing;
    enum weighting weighting;
    double masked;            /* share of slots that are -1 */
    uint64_t allowed_experts; /* bit e: expert e may get rows (E <= 64); 0: all */
    uint64_t seed;
};

/* Fills a problem with a split of one rank; never fails (the tests end when memory does). */
void problem_make(struct problem *ret, const struct problem_options *options);
/* Allocates the arrays for the shape that is already in `problem`. */
void problem_alloc(struct problem *problem);
void problem_free(struct problem *problem);

/* Cuts `tokens` into `ranks` parts at random places, some of them empty; `ranks` may exceed `tokens`. */
void problem_cut(uint32_t tokens, uint32_t ranks, struct rng *rng, uint32_t *ret_tokens);

static inline size_t problem_slots(const struct problem *p)
{
    return (size_t)p->tokens * p->topk;
}
static inline size_t problem_rows_elements(const struct problem *p)
{
    return (size_t)p->tokens * p->hidden;
}
static inline size_t problem_expert_elements(const struct problem *p)
{
    return (size_t)p->hidden * p->intermediate;
}

#endif
