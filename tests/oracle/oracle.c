/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The FP64 oracle: one token, one slot at a time, in the plainest order. Slow on purpose; never optimise it.
 */
#include "oracle.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plain_bf16.h"

const char *const result_name[RESULT_COUNT] = {
    "out", "d_x", "d_topk_weight", "d_gate", "d_up", "d_down", "d_shared_gate", "d_shared_up", "d_shared_down",
};

static double *must_zeros(size_t count)
{
    double *memory = calloc(count ? count : 1, sizeof(double));
    if (!memory) {
        fprintf(stderr, "oracle: out of memory\n");
        abort();
    }
    return memory;
}

void result_alloc(const struct problem *p, struct result *ret)
{
    size_t rows = problem_rows_elements(p), slots = problem_slots(p);
    size_t experts = problem_expert_elements(p) * p->experts;
    size_t shared = (size_t)p->shared_intermediate * p->hidden;
    const size_t count[RESULT_COUNT] = { rows, rows, slots, experts, experts, experts, shared, shared, shared };

    for (int i = 0; i < RESULT_COUNT; i++) {
        ret->count[i] = count[i];
        ret->array[i] = must_zeros(count[i]);
    }
}

void result_free(struct result *result)
{
    for (int i = 0; i < RESULT_COUNT; i++)
        free(result->array[i]);
    memset(result, 0, sizeof(*result));
}

double relative_error(const double *got, const double *want, size_t count)
{
    double difference = 0, norm = 0;

    for (size_t i = 0; i < count; i++) {
        difference += (got[i] - want[i]) * (got[i] - want[i]);
        norm += want[i] * want[i];
    }
    if (!isfinite(difference) || !isfinite(norm))
        return HUGE_VAL;
    if (difference == 0)
        return 0;
    return norm > 0 ? sqrt(difference / norm) : HUGE_VAL;
}

double result_error(const struct result *got, const struct result *want, enum result_array array)
{
    return relative_error(got->array[array], want->array[array], want->count[array]);
}

/* The inputs in FP64. */
struct inputs {
    double *value[INPUT_COUNT];
    double *d_out;
};

static double *widen(const uint16_t *values, size_t count)
{
    double *wide = must_zeros(count);
    for (size_t i = 0; values && i < count; i++)
        wide[i] = (double)bf16_to_float(values[i]);
    return wide;
}

static struct inputs inputs_make(const struct problem *p)
{
    size_t experts = problem_expert_elements(p) * p->experts;
    size_t shared = (size_t)p->shared_intermediate * p->hidden;
    struct inputs in;

    in.value[INPUT_X] = widen(p->x, problem_rows_elements(p));
    in.d_out = widen(p->d_out, problem_rows_elements(p));
    in.value[INPUT_GATE] = widen(p->gate, experts);
    in.value[INPUT_UP] = widen(p->up, experts);
    in.value[INPUT_DOWN] = widen(p->down, experts);
    in.value[INPUT_SHARED_GATE] = widen(p->shared_gate, shared);
    in.value[INPUT_SHARED_UP] = widen(p->shared_up, shared);
    in.value[INPUT_SHARED_DOWN] = widen(p->shared_down, shared);
    in.value[INPUT_TOPK_WEIGHT] = must_zeros(problem_slots(p));
    for (size_t i = 0; i < problem_slots(p); i++)
        in.value[INPUT_TOPK_WEIGHT][i] = (double)p->topk_weight[i];
    return in;
}

static void inputs_free(struct inputs *in)
{
    for (int i = 0; i < INPUT_COUNT; i++)
        free(in->value[i]);
    free(in->d_out);
}

/* One SwiGLU network of width `width` at one token. */
struct network {
    size_t hidden, width;
    double clamp;
    const double *gate, *up, *down;
    double *d_gate, *d_up, *d_down; /* NULL: no gradients wanted */
    double *a, *b, *h, *y, *d_h;    /* scratch */
};

static void network_forward(struct network *net, const double *x)
{
    for (size_t i = 0; i < net->width; i++) {
        double a = 0, b = 0;
        for (size_t j = 0; j < net->hidden; j++) {
            a += net->gate[i * net->hidden + j] * x[j];
            b += net->up[i * net->hidden + j] * x[j];
        }
        net->a[i] = a;
        net->b[i] = b;
        if (net->clamp > 0) {
            a = a > net->clamp ? net->clamp : a;
            b = b > net->clamp ? net->clamp : b < -net->clamp ? -net->clamp : b;
        }
        net->h[i] = a / (1 + exp(-a)) * b;
    }
    for (size_t j = 0; j < net->hidden; j++) {
        net->y[j] = 0;
        for (size_t i = 0; i < net->width; i++)
            net->y[j] += net->down[j * net->width + i] * net->h[i];
    }
}

/* After network_forward of the same token: adds the gradients for d_y = weight * d_out; returns d(loss)/d(weight). */
static double network_backward(struct network *net, const double *x, const double *d_out, double weight, double *d_x)
{
    double d_weight = 0;

    for (size_t j = 0; j < net->hidden; j++)
        d_weight += d_out[j] * net->y[j];
    for (size_t i = 0; i < net->width; i++) {
        net->d_h[i] = 0;
        for (size_t j = 0; j < net->hidden; j++) {
            double d_y = weight * d_out[j];
            net->d_h[i] += net->down[j * net->width + i] * d_y;
            net->d_down[j * net->width + i] += d_y * net->h[i];
        }
    }
    for (size_t i = 0; i < net->width; i++) {
        double a = net->a[i], b = net->b[i];
        bool a_moves = true, b_moves = true;
        if (net->clamp > 0) {
            a_moves = a <= net->clamp;
            b_moves = b <= net->clamp && b >= -net->clamp;
            a = a_moves ? a : net->clamp;
            b = b_moves ? b : b > 0 ? net->clamp : -net->clamp;
        }
        double sigma = 1 / (1 + exp(-a));
        double d_a = a_moves ? net->d_h[i] * b * sigma * (1 + a * (1 - sigma)) : 0;
        double d_b = b_moves ? net->d_h[i] * a * sigma : 0;
        for (size_t j = 0; j < net->hidden; j++) {
            net->d_gate[i * net->hidden + j] += d_a * x[j];
            net->d_up[i * net->hidden + j] += d_b * x[j];
            d_x[j] += d_a * net->gate[i * net->hidden + j] + d_b * net->up[i * net->hidden + j];
        }
    }
    return d_weight;
}

static void network_open(struct network *net, const struct problem *p, size_t width)
{
    *net = (struct network){ .hidden = p->hidden, .width = width, .clamp = (double)p->clamp };
    net->a = must_zeros(width);
    net->b = must_zeros(width);
    net->h = must_zeros(width);
    net->d_h = must_zeros(width);
    net->y = must_zeros(p->hidden);
}

static void network_close(struct network *net)
{
    free(net->a);
    free(net->b);
    free(net->h);
    free(net->d_h);
    free(net->y);
}

static void run_experts(const struct problem *p, const struct inputs *in, struct result *ret, bool gradients)
{
    size_t H = p->hidden, size = problem_expert_elements(p);
    struct network net;

    network_open(&net, p, p->intermediate);
    for (uint32_t t = 0; t < p->tokens; t++) {
        const double *x = in->value[INPUT_X] + t * H;
        double *out = ret->array[RESULT_OUT] + t * H, *d_x = ret->array[RESULT_D_X] + t * H;

        for (uint32_t k = 0; k < p->topk; k++) {
            size_t slot = (size_t)t * p->topk + k;
            if (p->ids[slot] < 0)
                continue;
            size_t at = (size_t)p->ids[slot] * size;
            double weight = in->value[INPUT_TOPK_WEIGHT][slot];
            net.gate = in->value[INPUT_GATE] + at;
            net.up = in->value[INPUT_UP] + at;
            net.down = in->value[INPUT_DOWN] + at;
            network_forward(&net, x);
            for (size_t j = 0; j < H; j++)
                out[j] += weight * net.y[j];
            if (!gradients)
                continue;
            net.d_gate = ret->array[RESULT_D_GATE] + at;
            net.d_up = ret->array[RESULT_D_UP] + at;
            net.d_down = ret->array[RESULT_D_DOWN] + at;
            ret->array[RESULT_D_TOPK_WEIGHT][slot] = network_backward(&net, x, in->d_out + t * H, weight, d_x);
        }
    }
    network_close(&net);
}

static void run_shared(const struct problem *p, const struct inputs *in, struct result *ret, bool gradients)
{
    size_t H = p->hidden;
    struct network net;

    network_open(&net, p, p->shared_intermediate);
    net.gate = in->value[INPUT_SHARED_GATE];
    net.up = in->value[INPUT_SHARED_UP];
    net.down = in->value[INPUT_SHARED_DOWN];
    net.d_gate = ret->array[RESULT_D_SHARED_GATE];
    net.d_up = ret->array[RESULT_D_SHARED_UP];
    net.d_down = ret->array[RESULT_D_SHARED_DOWN];
    for (uint32_t t = 0; t < p->tokens; t++) {
        const double *x = in->value[INPUT_X] + t * H;
        network_forward(&net, x);
        for (size_t j = 0; j < H; j++)
            ret->array[RESULT_OUT][t * H + j] += net.y[j];
        if (gradients)
            network_backward(&net, x, in->d_out + t * H, 1, ret->array[RESULT_D_X] + t * H);
    }
    network_close(&net);
}

void oracle_run(const struct problem *p, struct result *ret)
{
    struct inputs in = inputs_make(p);

    result_alloc(p, ret);
    run_experts(p, &in, ret, true);
    if (p->shared_intermediate)
        run_shared(p, &in, ret, true);
    inputs_free(&in);
}

double oracle_loss(const struct problem *p, enum oracle_input input, size_t element, double step)
{
    struct inputs in = inputs_make(p);
    struct result result;
    double loss = 0;

    result_alloc(p, &result);
    in.value[input][element] += step;
    run_experts(p, &in, &result, false);
    if (p->shared_intermediate)
        run_shared(p, &in, &result, false);
    for (size_t i = 0; i < result.count[RESULT_OUT]; i++)
        loss += result.array[RESULT_OUT][i] * (double)bf16_to_float(p->d_out[i]);
    result_free(&result);
    inputs_free(&in);
    return loss;
}
