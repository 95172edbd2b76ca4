/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finite differences through the real layer, for L = sum(out * d_out) over all ranks' tokens, in the layer's own BF16.
 *
 * A token's out depends on that token's x and weights alone, so one pair of forwards serves all tokens at once:
 * d_topk_weight is checked element by element, d_x along random directions of each token. Parameters are shared by
 * tokens: each expert's tensor is checked along random directions, one expert at a time. The step that really happened
 * (after rounding to BF16) is what the analytic gradient is multiplied with.
 *
 * BF16 rounds out and the hidden activations by up to 2^-9 each. With steps of a tenth to one of a value's size
 * that is one or two percent of a difference; curvature adds as much for x and gate. A wrong factor, a missing term, a
 * swapped index show as 30 to 140 percent. Tolerance: 4 percent of the norm of a tensor's differences.
 */
#include "gradcheck.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ops.h"
#include "report.h"
#include "rng.h"
#include "train.h"

#define TOLERANCE 0.04
#define MAX_TOKENS 64u   /* a rank; more would only take longer */
#define X_DIRECTIONS 16u /* a token */
#define DIRECTIONS 4u    /* a tensor of an expert */

/* Steps relative to a value's usual size: large where the layer is linear, small where curvature counts. */
#define STEP_LINEAR 1.0f
#define STEP_GATE 0.24f
#define STEP_X 0.1f

enum { STREAM_X = 1, STREAM_IDS, STREAM_TOPK, STREAM_D_OUT, STREAM_WEIGHT, STREAM_DIRECTION };

struct tensor_error {
    double difference, reference; /* squared norms */
};

struct gradcheck {
    struct comm *comm;
    struct moe *moe;
    struct moe_config config;
    uint64_t seed;
    struct moe_activations a;
    double *plus, *minus; /* [tokens]: L of each token */
};

static uint64_t stream(const struct gradcheck *g, unsigned kind, unsigned which)
{
    return ((uint64_t)kind << 48) | ((uint64_t)which << 32) | g->config.rank;
}

static float bf16_round(float value)
{
    return bf16_to_float(bf16_from_float(value));
}

static void fill_bf16(const struct gradcheck *g, uint16_t *to, size_t count, float deviation, uint64_t which)
{
    for (size_t i = 0; i < count; i++)
        to[i] = bf16_from_float(deviation * rng_normal(g->seed, which, i));
}

/* Distinct experts a token, as the router chooses them; weights of both signs and any size. */
static void fill_routing(struct gradcheck *g)
{
    const struct moe_config *c = &g->config;

    for (size_t t = 0; t < c->tokens; t++) {
        uint64_t first = rng_below(g->seed, stream(g, STREAM_IDS, 0), t, c->experts);

        for (unsigned k = 0; k < c->topk; k++) {
            size_t at = t * c->topk + k;

            g->a.ids[at] = (int32_t)((first + k) % c->experts);
            g->a.topk_weight[at] = 0.5f + 0.5f * rng_normal(g->seed, stream(g, STREAM_TOPK, 0), at);
        }
    }
}

static void fill(struct gradcheck *g)
{
    const struct moe_config *c = &g->config;
    size_t elements = (size_t)c->tokens * c->hidden;

    fill_bf16(g, g->a.x, elements, 1, stream(g, STREAM_X, 0));
    fill_bf16(g, g->a.d_out, elements, 1, stream(g, STREAM_D_OUT, 0));
    fill_routing(g);
    for (unsigned w = 0; w < (c->shared_intermediate ? MOE_WEIGHTS : MOE_SHARED_GATE); w++) {
        int down = w == MOE_DOWN || w == MOE_SHARED_DOWN;
        float fan_in = (float)(down ? c->intermediate : c->hidden);

        fill_bf16(g, moe_weights(g->moe, 0, (enum moe_weight)w), moe_weight_count(g->moe, (enum moe_weight)w),
                  1 / sqrtf(fan_in), stream(g, STREAM_WEIGHT, w));
    }
}

static void *copy_of(const void *data, size_t bytes)
{
    void *copy = malloc(bytes);

    if (copy)
        memcpy(copy, data, bytes);
    return copy;
}

/* L of each of this rank's tokens. Collective, as every forward. */
static int losses(struct gradcheck *g, double *ret)
{
    size_t hidden = g->config.hidden;
    int rc = moe_forward(g->moe, 0, 0);

    if (rc == 0)
        rc = moe_forward_wait(g->moe, 0, 0);
    for (size_t t = 0; t < g->config.tokens && rc == 0; t++) {
        double sum = 0;

        for (size_t i = t * hidden; i < (t + 1) * hidden; i++)
            sum += (double)bf16_to_float(g->a.out[i]) * (double)bf16_to_float(g->a.d_out[i]);
        ret[t] = sum;
    }
    return rc;
}

static void compare(struct tensor_error *error, double expected, double got)
{
    error->difference += (expected - got) * (expected - got);
    error->reference += expected * expected;
}

/* Moves every token's x by sign * its own random amounts; adds what the gradient says about the move to along[]. */
static void move_x(struct gradcheck *g, const uint16_t *saved, const uint16_t *d_x, unsigned direction, float sign,
                   double *along)
{
    size_t hidden = g->config.hidden;

    for (size_t t = 0; t < g->config.tokens; t++) {
        for (size_t i = t * hidden; i < (t + 1) * hidden; i++) {
            float amount = STEP_X * rng_normal(g->seed, stream(g, STREAM_DIRECTION, direction), i);
            float from = bf16_to_float(saved[i]), to = bf16_round(from + sign * amount);

            g->a.x[i] = bf16_from_float(to);
            along[t] += (double)(sign * (to - from)) * (double)bf16_to_float(d_x[i]);
        }
    }
}

static int check_d_x(struct gradcheck *g, const uint16_t *d_x, struct tensor_error *error)
{
    size_t tokens = g->config.tokens, bytes = tokens * g->config.hidden * sizeof(uint16_t);
    uint16_t *saved = copy_of(g->a.x, bytes);
    double *along = calloc(tokens, sizeof(*along));
    int rc = saved && along ? 0 : fail(-MOK_ENOMEM, "no memory");

    for (unsigned n = 0; n < X_DIRECTIONS && rc == 0; n++) {
        memset(along, 0, tokens * sizeof(*along));
        move_x(g, saved, d_x, n, 1, along);
        rc = losses(g, g->plus);
        move_x(g, saved, d_x, n, -1, along);
        if (rc == 0)
            rc = losses(g, g->minus);
        for (size_t t = 0; t < tokens && rc == 0; t++)
            compare(error, g->plus[t] - g->minus[t], along[t]);
    }
    if (saved)
        memcpy(g->a.x, saved, bytes);
    free(saved);
    free(along);
    return rc;
}

static int check_d_topk_weight(struct gradcheck *g, const float *d_topk_weight, struct tensor_error *error)
{
    size_t topk = g->config.topk, tokens = g->config.tokens;
    int rc = 0;

    for (size_t k = 0; k < topk && rc == 0; k++) {
        for (size_t t = 0; t < tokens; t++)
            g->a.topk_weight[t * topk + k] += 2 * STEP_LINEAR;
        rc = losses(g, g->plus);
        for (size_t t = 0; t < tokens; t++)
            g->a.topk_weight[t * topk + k] -= 4 * STEP_LINEAR;
        if (rc == 0)
            rc = losses(g, g->minus);
        for (size_t t = 0; t < tokens; t++) {
            g->a.topk_weight[t * topk + k] += 2 * STEP_LINEAR;
            if (rc == 0)
                compare(error, (g->plus[t] - g->minus[t]) / (4 * (double)STEP_LINEAR),
                        (double)d_topk_weight[t * topk + k]);
        }
    }
    return rc;
}

/* One direction of one tensor: all of `count` elements move at once, each by its own amount. */
struct direction {
    uint16_t *at; /* NULL: another rank's */
    const float *gradient;
    uint16_t *saved;
    size_t count;
    float step; /* standard deviation of the amounts */
    uint64_t stream;
};

/* Moves by sign * amount from the saved values; returns the analytic gradient times the distance from there. */
static double move(const struct gradcheck *g, const struct direction *d, float sign)
{
    double along = 0;

    for (size_t i = 0; i < d->count; i++) {
        float from = bf16_to_float(d->saved[i]);
        float to = bf16_round(from + sign * d->step * rng_normal(g->seed, d->stream, i));

        d->at[i] = bf16_from_float(to);
        along += (double)(to - from) * (double)d->gradient[i];
    }
    return along;
}

/* Collective; `shared`: each rank moves its own copy, and its own tokens alone count. */
static int check_direction(struct gradcheck *g, const struct direction *d, int shared, struct tensor_error *error)
{
    double sums[2] = { 0 };
    int rc;

    if (d->at)
        sums[1] = move(g, d, 1);
    rc = losses(g, g->plus);
    if (d->at)
        sums[1] -= move(g, d, -1);
    if (rc == 0)
        rc = losses(g, g->minus);
    if (d->at)
        memcpy(d->at, d->saved, d->count * sizeof(*d->at));
    if (rc < 0)
        return rc;
    for (size_t t = 0; t < g->config.tokens; t++)
        sums[0] += g->plus[t] - g->minus[t];
    if (!shared)
        rc = comm_sum_double(g->comm, g->config.rank, sums, 2);
    if (rc == 0 && (shared || g->config.rank == 0))
        compare(error, sums[0], sums[1]);
    return rc;
}

static int check_weight(struct gradcheck *g, enum moe_weight which, const float *gradient, struct tensor_error *error)
{
    const struct moe_config *c = &g->config;
    int shared = which >= MOE_SHARED_GATE, down = which == MOE_DOWN || which == MOE_SHARED_DOWN;
    unsigned local = shared ? 1 : c->experts / c->ranks, experts = shared ? 1 : c->experts;
    size_t count = moe_weight_count(g->moe, which) / local;
    float step = which == MOE_GATE || which == MOE_SHARED_GATE ? STEP_GATE : STEP_LINEAR;
    uint16_t *weights = moe_weights(g->moe, 0, which), *saved = malloc(count * sizeof(*saved));
    int rc = saved ? 0 : fail(-MOK_ENOMEM, "no memory");

    for (unsigned e = 0; e < experts && rc == 0; e++) {
        int mine = shared || e / local == c->rank;
        size_t at = mine ? (shared ? 0 : e % local) * count : 0;

        for (unsigned n = 0; n < DIRECTIONS && rc == 0; n++) {
            struct direction direction = {
                .at = mine ? weights + at : NULL,
                .gradient = gradient + at,
                .saved = saved,
                .count = count,
                .step = step / sqrtf((float)(down ? c->intermediate : c->hidden)),
                .stream = stream(g, STREAM_DIRECTION, which * DIRECTIONS + n) + ((uint64_t)e << 8),
            };

            if (mine)
                memcpy(saved, weights + at, count * sizeof(*saved));
            rc = check_direction(g, &direction, shared, error);
        }
    }
    free(saved);
    return rc;
}

/* Adds the ranks' errors, prints the row; returns 1 when the tensor is out of tolerance. */
static int row(const struct gradcheck *g, const char *name, const char *method, const struct tensor_error *error,
               int *ret_bad)
{
    double sums[2] = { error->difference, error->reference }, relative;
    int rc = comm_sum_double(g->comm, g->config.rank, sums, 2), bad;

    if (rc < 0)
        return rc;
    relative = sqrt(sums[0] / sums[1]);
    bad = !(relative <= TOLERANCE); /* NaN is bad */
    if (g->config.rank == 0)
        printf("%-14s %-26s %12.5g %12.2e %10.2e  %s\n", name, method, sqrt(sums[1]), relative, TOLERANCE,
               bad ? "FAILED" : "ok");
    *ret_bad |= bad;
    return 0;
}

/* The analytic gradients, copied out before the layer's buffers are used for differences. */
struct analytic {
    uint16_t *d_x;
    float *d_topk_weight, *weights[MOE_WEIGHTS];
};

static int backward(struct gradcheck *g, struct analytic *ret)
{
    const struct moe_config *c = &g->config;
    int rc = losses(g, g->plus);

    if (rc == 0)
        rc = moe_backward(g->moe, 0, 0, 1);
    if (rc == 0)
        rc = moe_backward_wait(g->moe, 0, 0);
    if (rc < 0)
        return rc;
    ret->d_x = copy_of(g->a.d_x, (size_t)c->tokens * c->hidden * sizeof(*ret->d_x));
    ret->d_topk_weight = copy_of(g->a.d_topk_weight, (size_t)c->tokens * c->topk * sizeof(float));
    if (!ret->d_x || !ret->d_topk_weight)
        return fail(-MOK_ENOMEM, "no memory");
    for (unsigned w = 0; w < (c->shared_intermediate ? MOE_WEIGHTS : MOE_SHARED_GATE); w++) {
        ret->weights[w] = copy_of(moe_gradients(g->moe, 0, (enum moe_weight)w),
                                  moe_weight_count(g->moe, (enum moe_weight)w) * sizeof(float));
        if (!ret->weights[w])
            return fail(-MOK_ENOMEM, "no memory");
    }
    return 0;
}

static int check_all(struct gradcheck *g, const struct analytic *analytic, int *ret_bad)
{
    static const char *const names[] = { "d_gate", "d_up", "d_down", "d_shared_gate", "d_shared_up", "d_shared_down" };
    struct tensor_error error = { 0 };
    int rc;

    if (g->config.rank == 0)
        printf("%-14s %-26s %12s %12s %10s\n", "gradient", "compared", "norm", "rel. error", "tolerance");
    rc = check_d_x(g, analytic->d_x, &error);
    if (rc == 0)
        rc = row(g, "d_x", "16 directions a token", &error, ret_bad);
    error = (struct tensor_error){ 0 };
    if (rc == 0)
        rc = check_d_topk_weight(g, analytic->d_topk_weight, &error);
    if (rc == 0)
        rc = row(g, "d_topk_weight", "every element", &error, ret_bad);
    for (unsigned w = 0; w < MOE_WEIGHTS && rc == 0; w++) {
        if (!analytic->weights[w])
            continue;
        error = (struct tensor_error){ 0 };
        rc = check_weight(g, (enum moe_weight)w, analytic->weights[w], &error);
        if (rc == 0)
            rc = row(g, names[w], w < MOE_SHARED_GATE ? "4 directions an expert" : "4 directions a rank", &error,
                     ret_bad);
    }
    return rc;
}

static int check(struct gradcheck *g, int *ret_bad)
{
    struct analytic analytic = { 0 };
    int rc = moe_open(&g->config, &g->moe);

    if (rc < 0)
        return rc;
    g->a = moe_activations(g->moe, 0, 0);
    fill(g);
    rc = comm_barrier(g->comm);
    if (rc == 0)
        rc = backward(g, &analytic);
    if (rc == 0)
        rc = check_all(g, &analytic, ret_bad);
    free(analytic.d_x);
    free(analytic.d_topk_weight);
    for (unsigned w = 0; w < MOE_WEIGHTS; w++)
        free(analytic.weights[w]);
    moe_close(g->moe);
    return rc;
}

int gradcheck_rank(unsigned rank, void *argument)
{
    const struct job *job = argument;
    struct gradcheck g = { .comm = job->comm, .config = train_moe_config(job->options, rank) };
    int bad = 0, rc;

    ops_init();
    g.seed = job->options->seed;
    g.config.layers = g.config.micro_batches = 1;
    if (g.config.tokens > MAX_TOKENS)
        g.config.tokens = MAX_TOKENS;
    g.plus = calloc(g.config.tokens, sizeof(*g.plus));
    g.minus = calloc(g.config.tokens, sizeof(*g.minus));
    rc = g.plus && g.minus ? check(&g, &bad) : fail(-MOK_ENOMEM, "no memory");
    free(g.plus);
    free(g.minus);
    if (rc == 0 && rank == 0)
        printf("job %s: %u ranks, gradients %s\n", job->options->job, job->options->ranks, bad ? "WRONG" : "ok");
    return rc < 0 || bad ? 1 : 0;
}
