/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the layer must give: an FP64 implementation straight from the formulas, and a reference that accumulates in
 * FP32 and rounds to BF16 where the product may. Neither shares a line with the product.
 *
 *   a = gate x, b = up x;  clamp L: a <- min(a, L), b <- min(max(b, -L), L);  h = silu(a) b;  y = down h
 *   out[t] = shared(x[t]) + sum over k of topk_weight[t,k] y_{ids[t,k]}(x[t]);  ids -1: nothing
 *   loss = sum(out d_out); every gradient is of this loss
 */
#ifndef MOK_TESTS_ORACLE_H
#define MOK_TESTS_ORACLE_H

#include <stdbool.h>
#include <stddef.h>

#include "problem.h"

enum result_array {
    RESULT_OUT = 0,       /* [T][H] */
    RESULT_D_X,           /* [T][H] */
    RESULT_D_TOPK_WEIGHT, /* [T][K] */
    RESULT_D_GATE,        /* [E][I][H] */
    RESULT_D_UP,          /* [E][I][H] */
    RESULT_D_DOWN,        /* [E][H][I] */
    RESULT_D_SHARED_GATE, /* [Is][H] */
    RESULT_D_SHARED_UP,   /* [Is][H] */
    RESULT_D_SHARED_DOWN, /* [H][Is] */
    RESULT_COUNT,
};
extern const char *const result_name[RESULT_COUNT];

/* Everything a forward and a backward give, widened to FP64 (which keeps BF16 and FP32 values exact). */
struct result {
    double *array[RESULT_COUNT];
    size_t count[RESULT_COUNT]; /* elements; 0 for the shared arrays of a layer without a shared expert */
};

/* Zeroed arrays for the shape of `problem`. */
void result_alloc(const struct problem *problem, struct result *ret);
void result_free(struct result *result);
/* Norm of the difference over the norm of `want`; 0 when both are 0, infinity where anything is not finite. */
double relative_error(const double *got, const double *want, size_t count);
double result_error(const struct result *got, const struct result *want, enum result_array array);

void oracle_run(const struct problem *problem, struct result *ret);
void reference_run(const struct problem *problem, struct result *ret);
/*
 * The same with E4M3 operands in the experts: rows of x, h, d_out, d_a and d_b are quantised in groups of `group` along
 * the row before they enter a product. The expert weights must be MX tensors already: see problem_quantise_weights.
 * `mxfp8_wgrad`: operands of the experts' weight gradients are rounded once more, for scales of tiles of `group` rows
 * of the expert and `group` columns.
 */
void reference_run_mx(const struct problem *problem, uint32_t group, bool mxfp8_wgrad, struct result *ret);
/* Replaces the experts' weights by their MX values, quantised along rows. */
void problem_quantise_weights(struct problem *problem, uint32_t group);

/* The loss alone, with one element of one input moved by `step`: for finite differences. */
enum oracle_input {
    INPUT_X = 0,
    INPUT_TOPK_WEIGHT,
    INPUT_GATE,
    INPUT_UP,
    INPUT_DOWN,
    INPUT_SHARED_GATE,
    INPUT_SHARED_UP,
    INPUT_SHARED_DOWN,
    INPUT_COUNT,
};
double oracle_loss(const struct problem *problem, enum oracle_input input, size_t element, double step);

#endif
