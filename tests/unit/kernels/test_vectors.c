/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every case of a directory of test vectors, at every EP degree that divides its experts. MOK_VECTORS=DIR, or the
 * first argument, names another directory of the same generator.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "harness.h"
#include "vectors.h"

#define MAX_EP 8

static struct vector_set set;

static void run_case(const struct vector_case *c, const struct run_options *options)
{
    char what[160];
    struct result got;

    snprintf(what, sizeof(what), "%s at EP %u, context mode %u", c->name, options->harness.ranks,
             options->context_mode);
    run_problem(&c->problem, options, &got);
    check_result(what, &c->problem, &got, &c->want, c->has);
    check_zeros(what, &c->problem, &got, &c->want);
    result_free(&got);
}

static void run_case_at(const struct vector_case *c, uint32_t ep, uint32_t context_mode)
{
    struct run_options options = { .harness = { .ranks = ep }, .context_mode = context_mode };
    uint32_t tokens[MAX_EP];
    struct rng rng = { ep };

    if (ep == c->problem.ranks)
        options.tokens = c->problem.rank_tokens;
    run_case(c, &options);
    problem_cut(c->problem.tokens, ep, &rng, tokens);
    options.tokens = tokens;
    run_case(c, &options);
}

static void every_case_at_every_ep_that_divides(uint32_t context_mode)
{
    for (size_t i = 0; i < set.count; i++)
        for (uint32_t ep = 1; ep <= MAX_EP; ep++)
            if (set.cases[i].problem.experts % ep == 0)
                run_case_at(&set.cases[i], ep, context_mode);
}

static void every_case_matches_with_a_full_context(void **state)
{
    (void)state;
    every_case_at_every_ep_that_divides(MOK_CONTEXT_FULL);
}

static void every_case_matches_with_a_recomputed_context(void **state)
{
    (void)state;
    every_case_at_every_ep_that_divides(MOK_CONTEXT_RECOMPUTE);
}

/* A ring of a few rows: every case then takes many macrobatches. */
static void every_case_matches_through_a_tiny_ring(void **state)
{
    (void)state;
    for (size_t i = 0; i < set.count; i++)
        for (uint32_t mode = MOK_CONTEXT_FULL; mode <= MOK_CONTEXT_RECOMPUTE; mode++)
            run_case(
                &set.cases[i],
                &(struct run_options){ .harness = { .ranks = 1 }, .layer = { .ring_tiles = 1 }, .context_mode = mode });
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_case_matches_with_a_full_context),
        cmocka_unit_test(every_case_matches_with_a_recomputed_context),
        cmocka_unit_test(every_case_matches_through_a_tiny_ring),
    };

    if (vectors_load(argc > 1 ? argv[1] : vectors_directory(), &set) < 0)
        return 1;
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    vectors_free(&set);
    return failed;
}
