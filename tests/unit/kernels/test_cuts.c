/* SPDX-License-Identifier: Apache-2.0 */
/*
 * No cut of the work changes a bit where cuts are many: experts whose rows span several tiles, minibatches and
 * macrobatches, products of several output tiles that end in narrow ones, in every precision.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "harness.h"

#ifdef MOK_SANITIZED
#define EVERY 4 /* cut of the list, each body others of them */
#else
#define EVERY 1
#endif

/* Zipf: expert 0 gets about a third of some 600 rows, the last ones less than a tile. */
static const struct problem_options wide = {
    .hidden = 80, .intermediate = 528, .experts = 8, .topk = 3, .tokens = 210, .routing = ROUTE_ZIPF,
    .masked = 0.05, .seed = 60,
};
static const struct problem_options narrow = {
    .hidden = 176, .intermediate = 208, .experts = 8, .topk = 5, .tokens = 130, .routing = ROUTE_ZIPF,
    .weighting = WEIGHT_ZERO_NEGATIVE, .clamp = 0.9f, .shared_intermediate = 96, .seed = 61,
};

struct cut {
    uint32_t ranks, threads, comm_units, ring_tiles, minibatch_rows, context_mode;
};
#define ALL 16 /* tiles that hold every row */
static const struct cut cuts[] = {
    {1, 1, 0, ALL, 0, MOK_CONTEXT_RECOMPUTE},   {1, 2, 1, 1, 128, MOK_CONTEXT_FULL},
    {1, 3, 2, 2, 128, MOK_CONTEXT_RECOMPUTE}, {1, 1, 0, 3, 256, MOK_CONTEXT_FULL},
    {1, 2, 0, 5, 384, MOK_CONTEXT_RECOMPUTE}, {1, 1, 0, ALL, 128, MOK_CONTEXT_FULL},
    {2, 1, 0, 1, 128, MOK_CONTEXT_FULL},      {4, 2, 1, 2, 256, MOK_CONTEXT_RECOMPUTE},
    {8, 1, 0, 3, 128, MOK_CONTEXT_FULL},      {8, 1, 0, ALL, 0, MOK_CONTEXT_RECOMPUTE},
};

static void no_cut_changes_a_bit(const struct problem_options *options, uint32_t precision, uint32_t first)
{
    struct problem p;
    struct result plain, got;
    struct rng rng = {62};

    problem_make(&p, options);
    run_problem(&p, &(struct run_options){.layer = {.precision = precision, .ring_tiles = ALL}}, &plain);
    if (precision == MOK_BF16)
        check_against_oracle("plain", &p, &plain);
    for (size_t i = first % EVERY; i < sizeof(cuts) / sizeof(cuts[0]); i += EVERY) {
        const struct cut *cut = &cuts[i];
        uint32_t tokens[8];
        char what[120];

        problem_cut(p.tokens, cut->ranks, &rng, tokens);
        snprintf(what, sizeof(what), "EP %u, %u threads, %u comm units, ring of %u tiles, minibatch %u, context %u",
                 cut->ranks, cut->threads, cut->comm_units, cut->ring_tiles, cut->minibatch_rows, cut->context_mode);
        run_problem(&p, &(struct run_options){
                            .harness = {.ranks = cut->ranks, .threads = cut->threads},
                            .layer = {.precision = precision, .ring_tiles = cut->ring_tiles,
                                      .minibatch_rows = cut->minibatch_rows, .comm_units = cut->comm_units},
                            .tokens = tokens, .context_mode = cut->context_mode}, &got);
        check_bitwise(what, &got, &plain, cut->ranks > 1 ? CHECK_ANY_EP : CHECK_ALL);
        result_free(&got);
    }
    result_free(&plain);
    problem_free(&p);
}

static void wide_experts_in_bf16(void **state)
{
    (void)state;
    no_cut_changes_a_bit(&wide, MOK_BF16, 0);
}

static void narrow_experts_with_a_limit_and_a_shared_expert_in_bf16(void **state)
{
    (void)state;
    no_cut_changes_a_bit(&narrow, MOK_BF16, 1);
}

static void narrow_experts_in_mxfp8_per32(void **state)
{
    (void)state;
    no_cut_changes_a_bit(&narrow, MOK_MXFP8_PER32, 2);
}

static void narrow_experts_in_mxfp8_per128(void **state)
{
    (void)state;
    no_cut_changes_a_bit(&narrow, MOK_MXFP8_PER128, 3);
}

/* Backward into gradients that hold something: the bits do not tell where a macrobatch ended. */
static void gradients_that_are_added_to_have_the_same_bits_with_any_ring(void **state)
{
    struct problem p;
    struct result want = {0}, got;

    (void)state;
    problem_make(&p, &narrow);
    for (uint32_t tiles = 0; tiles < 4; tiles++) {
        struct harness *h = harness_open(&(struct harness_options){.ranks = 2});
        struct layer *layer = layer_open(h, &p, &(struct layer_options){.ring_tiles = tiles ? tiles : ALL});
        struct tensors *t = tensors_make(layer, &p, NULL, MOK_CONTEXT_FULL);

        for (int n = 0; n < 3; n++) {
            struct operation *forward = layer_forward(t, 0), *backward = layer_backward(t, 0);

            harness_drive(h);
            operation_expect_success(forward);
            operation_expect_success(backward);
        }
        tensors_collect(t, &p, tiles ? &got : &want);
        if (tiles) {
            check_bitwise("three times added", &got, &want, CHECK_ALL);
            result_free(&got);
        }
        tensors_free(t);
        harness_close(h);
    }
    result_free(&want);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(wide_experts_in_bf16),
        cmocka_unit_test(narrow_experts_with_a_limit_and_a_shared_expert_in_bf16),
        cmocka_unit_test(narrow_experts_in_mxfp8_per32),
        cmocka_unit_test(narrow_experts_in_mxfp8_per128),
        cmocka_unit_test(gradients_that_are_added_to_have_the_same_bits_with_any_ring),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
