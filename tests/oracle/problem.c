/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Makes and frees test problems. Values are of the size that real activations and weights have, so that relative
 * errors mean something: x and d_out of unit variance, weights scaled by the fan-in.
 */
#include "problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plain_bf16.h"

static void *must_alloc(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (!memory) {
        fprintf(stderr, "test problem: out of memory\n");
        abort();
    }
    return memory;
}

void problem_alloc(struct problem *p)
{
    size_t expert = problem_expert_elements(p) * p->experts;
    size_t shared = (size_t)p->shared_intermediate * p->hidden;

    p->x = must_alloc(problem_rows_elements(p), sizeof(uint16_t));
    p->d_out = must_alloc(problem_rows_elements(p), sizeof(uint16_t));
    p->ids = must_alloc(problem_slots(p), sizeof(int32_t));
    p->topk_weight = must_alloc(problem_slots(p), sizeof(float));
    p->gate = must_alloc(expert, sizeof(uint16_t));
    p->up = must_alloc(expert, sizeof(uint16_t));
    p->down = must_alloc(expert, sizeof(uint16_t));
    if (!shared)
        return;
    p->shared_gate = must_alloc(shared, sizeof(uint16_t));
    p->shared_up = must_alloc(shared, sizeof(uint16_t));
    p->shared_down = must_alloc(shared, sizeof(uint16_t));
}

void problem_free(struct problem *p)
{
    free(p->x);
    free(p->d_out);
    free(p->ids);
    free(p->topk_weight);
    free(p->gate);
    free(p->up);
    free(p->down);
    free(p->shared_gate);
    free(p->shared_up);
    free(p->shared_down);
    memset(p, 0, sizeof(*p));
}

static void fill_normal(uint16_t *values, size_t count, double scale, struct rng *rng)
{
    for (size_t i = 0; i < count; i++)
        values[i] = bf16_from_float((float)(scale * rng_normal(rng)));
}

static uint32_t zipf(uint32_t experts, struct rng *rng)
{
    double total = 0;
    for (uint32_t e = 0; e < experts; e++)
        total += 1.0 / (e + 1);
    double at = rng_unit(rng) * total;
    for (uint32_t e = 0; e < experts; e++) {
        at -= 1.0 / (e + 1);
        if (at < 0)
            return e;
    }
    return experts - 1;
}

static uint32_t draw_expert(const struct problem_options *o, struct rng *rng)
{
    switch (o->routing) {
    case ROUTE_ZIPF:
        return zipf(o->experts, rng);
    case ROUTE_HOT_EXPERT:
        return o->experts / 2;
    case ROUTE_HOT_RANK:
        return rng_below(rng, o->experts < 4 ? 1 : o->experts / 4);
    default:
        return rng_below(rng, o->experts);
    }
}

static int named_before(const int32_t *ids, uint32_t count, int32_t id)
{
    for (uint32_t k = 0; k < count; k++)
        if (ids[k] == id)
            return 1;
    return 0;
}

static void route_token(const struct problem_options *o, int32_t *ids, struct rng *rng)
{
    for (uint32_t k = 0; k < o->topk; k++) {
        int32_t id;
        do
            id = (int32_t)draw_expert(o, rng);
        while (o->routing == ROUTE_UNIFORM && o->topk <= o->experts && named_before(ids, k, id));
        ids[k] = id;
    }
    /* Masking comes last, so that it does not disturb which experts the other slots name. */
    for (uint32_t k = 0; k < o->topk; k++) {
        if (o->allowed_experts && !(o->allowed_experts >> ids[k] & 1))
            ids[k] = -1;
        if (rng_unit(rng) < o->masked)
            ids[k] = -1;
    }
}

static void weigh_token(const struct problem_options *o, float *weight, struct rng *rng)
{
    double sum = 0;

    for (uint32_t k = 0; k < o->topk; k++) {
        weight[k] = (float)exp(rng_normal(rng));
        sum += (double)weight[k];
    }
    for (uint32_t k = 0; k < o->topk; k++) {
        if (o->weighting == WEIGHT_SOFTMAX) {
            weight[k] = (float)((double)weight[k] / sum);
            continue;
        }
        uint32_t kind = rng_below(rng, 6);
        if (kind < 2)
            weight[k] = kind ? -0.0f : 0.0f;
        else if (kind < 4)
            weight[k] = -weight[k];
    }
}

void problem_make(struct problem *ret, const struct problem_options *o)
{
    struct rng rng = { o->seed * 0x2545f4914f6cdd1dull + 1 };
    struct problem p = {
        .hidden = o->hidden,
        .intermediate = o->intermediate,
        .experts = o->experts,
        .topk = o->topk,
        .shared_intermediate = o->shared_intermediate,
        .clamp = o->clamp,
        .tokens = o->tokens,
        .ranks = 1,
    };

    p.rank_tokens[0] = o->tokens;
    problem_alloc(&p);
    fill_normal(p.x, problem_rows_elements(&p), 1, &rng);
    fill_normal(p.d_out, problem_rows_elements(&p), 1, &rng);
    size_t expert = problem_expert_elements(&p) * p.experts;
    double in = 1 / sqrt(o->hidden), middle = 1 / sqrt(o->intermediate);
    fill_normal(p.gate, expert, in, &rng);
    fill_normal(p.up, expert, in, &rng);
    fill_normal(p.down, expert, middle, &rng);
    if (p.shared_intermediate) {
        size_t shared = (size_t)p.shared_intermediate * p.hidden;
        fill_normal(p.shared_gate, shared, in, &rng);
        fill_normal(p.shared_up, shared, in, &rng);
        fill_normal(p.shared_down, shared, 1 / sqrt(p.shared_intermediate), &rng);
    }
    for (uint32_t t = 0; t < p.tokens; t++) {
        route_token(o, p.ids + (size_t)t * p.topk, &rng);
        weigh_token(o, p.topk_weight + (size_t)t * p.topk, &rng);
    }
    *ret = p;
}

static int compare_u32(const void *left, const void *right)
{
    uint32_t a = *(const uint32_t *)left, b = *(const uint32_t *)right;
    return (a > b) - (a < b);
}

void problem_cut(uint32_t tokens, uint32_t ranks, struct rng *rng, uint32_t *ret_tokens)
{
    uint32_t border[PROBLEM_MAX_RANKS + 1];

    for (uint32_t r = 1; r < ranks; r++)
        border[r] = rng_below(rng, tokens + 1);
    border[0] = 0;
    border[ranks] = tokens;
    qsort(border + 1, ranks - 1, sizeof(border[0]), compare_u32);
    for (uint32_t r = 0; r < ranks; r++)
        ret_tokens[r] = border[r + 1] - border[r];
}
