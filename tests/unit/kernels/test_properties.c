/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layer against the FP64 oracle on random shapes, routings and splits. MOK_TEST_ITERATIONS=N runs the random part
 * N times; the tolerance is check.h's.
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
#include "plain_bf16.h"

#ifdef MOK_SANITIZED
#define ITERATIONS 8
#else
#define ITERATIONS 40
#endif

static int iterations(void)
{
    const char *asked = getenv("MOK_TEST_ITERATIONS");
    return asked ? atoi(asked) : ITERATIONS;
}

/* Runs the problem and holds every array against the oracle. */
static void run_and_check(const char *what, const struct problem *p, const struct run_options *options)
{
    struct result got;

    run_problem(p, options, &got);
    check_against_oracle(what, p, &got);
    result_free(&got);
}

static void make_run_and_check(const char *what, const struct problem_options *options, const struct run_options *run)
{
    struct problem p;

    problem_make(&p, options);
    run_and_check(what, &p, run);
    problem_free(&p);
}

static uint32_t random_dim(struct rng *rng)
{
    static const uint32_t dims[] = { 16, 32, 48, 80, 96, 112, 144 };
    return dims[rng_below(rng, 7)];
}

static struct problem_options random_options(struct rng *rng, uint32_t ep)
{
    static const double masked[] = { 0, 0, 0.1, 0.5, 0.9 };
    struct problem_options o = {
        .hidden = random_dim(rng),
        .experts = ep * (1 + rng_below(rng, ep > 2 ? 2 : 5)),
        .topk = 1 + rng_below(rng, 8),
        .tokens = 2 * rng_below(rng, 30) + 1,
        .clamp = rng_below(rng, 4) ? 0 : 0.8f,
        .shared_intermediate = rng_below(rng, 4) ? 0 : random_dim(rng),
        .routing = (enum routing)rng_below(rng, ROUTE_COUNT),
        .weighting = (enum weighting)rng_below(rng, WEIGHT_COUNT),
        .masked = masked[rng_below(rng, 5)],
        .seed = rng_u64(rng),
    };

    do
        o.intermediate = random_dim(rng);
    while (o.intermediate == o.hidden);
    if (rng_below(rng, 5) == 0) { /* more rows an expert than a tile has */
        o.tokens += 200;
        o.hidden = 16;
        o.intermediate = 48;
    }
    return o;
}

static void random_shapes_routings_and_splits_match_the_oracle(void **state)
{
    static const uint32_t eps[] = { 1, 1, 2, 4, 8 };
    struct rng rng = { 20 };

    (void)state;
    for (int n = 0; n < iterations(); n++) {
        uint32_t ep = eps[rng_below(&rng, 5)], tokens[8];
        struct problem_options o = random_options(&rng, ep);
        struct run_options run = {
            .harness = { .ranks = ep,
                         .threads = 1 + rng_below(&rng, 2),
                         .jitter = rng_below(&rng, 20),
                         .seed = o.seed },
            .layer = { .ring_tiles = rng_below(&rng, 4), .minibatch_rows = rng_below(&rng, 3) * 16 },
            .context_mode = rng_below(&rng, 2) ? MOK_CONTEXT_FULL : MOK_CONTEXT_RECOMPUTE,
        };
        char what[200];
        problem_cut(o.tokens, ep, &rng, tokens);
        if (rng_below(&rng, 2))
            run.tokens = tokens;
        snprintf(what, sizeof(what),
                 "case %d: H %u I %u E %u K %u T %u EP %u ring %u routing %d masked %g clamp %g "
                 "shared %u",
                 n, o.hidden, o.intermediate, o.experts, o.topk, o.tokens, ep, run.layer.ring_tiles, (int)o.routing,
                 o.masked, (double)o.clamp, o.shared_intermediate);
        make_run_and_check(what, &o, &run);
    }
}

static void mxfp8_layers_are_as_right_as_a_reference_with_e4m3_operands(void **state)
{
    static const uint32_t eps[] = { 1, 2, 4 };
    struct rng rng = { 21 };

    (void)state;
    for (int n = 0; n < iterations() / 2; n++) {
        uint32_t ep = eps[rng_below(&rng, 3)], precision = n % 2 ? MOK_MXFP8_PER32 : MOK_MXFP8_PER128;
        struct problem_options o = random_options(&rng, ep);
        struct run_options run = {
            .harness = { .ranks = ep, .seed = o.seed },
            .layer = { .ring_tiles = rng_below(&rng, 3), .precision = precision },
            .context_mode = rng_below(&rng, 2) ? MOK_CONTEXT_FULL : MOK_CONTEXT_RECOMPUTE,
        };
        struct problem p;
        struct result got;
        char what[200];

        o.clamp = 0; /* E4M3 puts values on either side of a limit as it likes */
        snprintf(what, sizeof(what), "case %d: precision %u H %u I %u E %u K %u T %u EP %u routing %d masked %g", n,
                 precision, o.hidden, o.intermediate, o.experts, o.topk, o.tokens, ep, (int)o.routing, o.masked);
        problem_make(&p, &o);
        problem_quantise_weights(&p, precision == MOK_MXFP8_PER32 ? 32 : 128);
        run_problem(&p, &run, &got);
        check_against_mx_oracle(what, &p, &got, precision, false);
        result_free(&got);
        problem_free(&p);
    }
}

static const struct problem_options base = {
    .hidden = 48, .intermediate = 80, .experts = 8, .topk = 3, .tokens = 37, .seed = 30
};

static void every_topk_matches_the_oracle_even_beyond_the_number_of_experts(void **state)
{
    static const uint32_t topks[] = { 1, 2, 3, 4, 5, 6, 7, 8, 14, 32, 64 };

    (void)state;
    for (size_t i = 0; i < sizeof(topks) / sizeof(topks[0]); i++) {
        struct problem_options o = base;
        char what[40];
        o.topk = topks[i];
        o.tokens = 15;
        snprintf(what, sizeof(what), "K %u", o.topk);
        make_run_and_check(what, &o, &(struct run_options){ .harness = { .ranks = 2 } });
    }
}

static void every_share_of_masked_slots_matches_the_oracle(void **state)
{
    static const double masked[] = { 0, 0.1, 0.5, 0.9, 1 };

    (void)state;
    for (size_t i = 0; i < sizeof(masked) / sizeof(masked[0]); i++)
        for (uint32_t ep = 1; ep <= 4; ep *= 4) {
            struct problem_options o = base;
            char what[60];
            o.masked = masked[i];
            snprintf(what, sizeof(what), "masked %g at EP %u", o.masked, ep);
            make_run_and_check(what, &o, &(struct run_options){ .harness = { .ranks = ep } });
        }
}

static void every_routing_and_weighting_matches_the_oracle_at_every_ep(void **state)
{
    (void)state;
    for (int routing = 0; routing < ROUTE_COUNT; routing++)
        for (uint32_t ep = 1; ep <= 8; ep *= 2) {
            struct problem_options o = base;
            char what[60];
            o.routing = (enum routing)routing;
            o.weighting = ep % 4 ? WEIGHT_ZERO_NEGATIVE : WEIGHT_SOFTMAX;
            snprintf(what, sizeof(what), "routing %d at EP %u", routing, ep);
            make_run_and_check(what, &o,
                               &(struct run_options){ .harness = { .ranks = ep }, .layer = { .ring_tiles = 2 } });
        }
}

/* Tokens on a single rank, the first or the last; on every second; on none. */
static void any_ranks_may_be_without_tokens(void **state)
{
    static const uint32_t splits[][4] = { { 37, 0, 0, 0 }, { 0, 0, 0, 37 }, { 0, 30, 0, 7 }, { 1, 0, 35, 1 } };

    (void)state;
    for (size_t i = 0; i < sizeof(splits) / sizeof(splits[0]); i++) {
        char what[40];
        snprintf(what, sizeof(what), "split %zu", i);
        make_run_and_check(what, &base, &(struct run_options){ .harness = { .ranks = 4 }, .tokens = splits[i] });
    }
    struct problem_options none = base;
    none.tokens = 0;
    make_run_and_check("no tokens", &none, &(struct run_options){ .harness = { .ranks = 4 } });
}

/* What a run without the bad token gives, every other row must give too, bit for bit. */
static void check_row_apart(const struct result *got, const struct result *clean, enum result_array array,
                            uint32_t token, size_t width, bool must_be_bad)
{
    size_t bad = 0;

    for (size_t i = 0; i < got->count[array]; i++) {
        double value = got->array[array][i];
        if (i / width == token)
            bad += !isfinite(value);
        else if (memcmp(&value, &clean->array[array][i], sizeof(value)))
            fail_msg("%s[%zu] of another token changed from %g to %g", result_name[array], i, clean->array[array][i],
                     value);
    }
    assert_true(bad == width || !must_be_bad);
}

static void what_is_not_finite_stays_in_its_tokens_rows(uint16_t bits)
{
    enum { TOKEN = 11 };
    struct problem_options o = base;
    struct run_options run = { .harness = { .ranks = 2 } };
    struct problem p;
    struct result clean, got;

    for (int variant = 0; variant < 5; variant++) {
        o.shared_intermediate = variant == 1 ? 32 : 0;
        o.clamp = variant == 2 ? 0.5f : 0;
        run.layer.precision = variant == 3 ? MOK_MXFP8_PER32 : variant == 4 ? MOK_MXFP8_PER128 : MOK_BF16;
        problem_make(&p, &o);
        run_problem(&p, &run, &clean);
        p.x[TOKEN * o.hidden + 5] = bits;
        run_problem(&p, &run, &got);
        check_row_apart(&got, &clean, RESULT_OUT, TOKEN, o.hidden, isnan(bf16_to_float(bits)));
        check_row_apart(&got, &clean, RESULT_D_X, TOKEN, o.hidden, isnan(bf16_to_float(bits)));
        check_row_apart(&got, &clean, RESULT_D_TOPK_WEIGHT, TOKEN, o.topk, isnan(bf16_to_float(bits)));
        for (uint32_t e = 0; e < o.experts; e++) {
            size_t size = problem_expert_elements(&p) * sizeof(double);
            bool reached = false;
            for (uint32_t k = 0; k < o.topk; k++)
                reached |= p.ids[TOKEN * o.topk + k] == (int32_t)e;
            for (int a = RESULT_D_GATE; !reached && a <= RESULT_D_DOWN; a++)
                assert_memory_equal((char *)got.array[a] + e * size, (char *)clean.array[a] + e * size, size);
        }
        result_free(&clean);
        result_free(&got);
        problem_free(&p);
    }
}

static void a_nan_in_one_token_stays_in_its_rows(void **state)
{
    (void)state;
    what_is_not_finite_stays_in_its_tokens_rows(0x7fc0);
}

static void an_infinity_in_one_token_stays_in_its_rows(void **state)
{
    (void)state;
    what_is_not_finite_stays_in_its_tokens_rows(0x7f80);
    what_is_not_finite_stays_in_its_tokens_rows(0xff80);
}

/* One array alone, in its own shape, so that a mistake in one gradient is named by the test that fails. */
static void one_array_matches_the_oracle(void **state)
{
    int array = (int)(intptr_t)*state;
    struct problem_options o = { .hidden = 64 + 16u * (uint32_t)array,
                                 .intermediate = 48,
                                 .experts = 6,
                                 .topk = 2,
                                 .tokens = 45,
                                 .weighting = WEIGHT_ZERO_NEGATIVE,
                                 .masked = 0.1,
                                 .shared_intermediate = array >= RESULT_D_SHARED_GATE ? 80 : 0,
                                 .seed = 40 + (uint64_t)array };
    struct problem p;
    struct result got, want;

    problem_make(&p, &o);
    oracle_run(&p, &want);
    for (uint32_t ep = 1; ep <= 3; ep++) {
        run_problem(&p, &(struct run_options){ .harness = { .ranks = ep } }, &got);
        check_result("alone", &p, &got, &want, 1u << array);
        result_free(&got);
    }
    result_free(&want);
    problem_free(&p);
}

#define ALONE(array, title)                                                                                            \
    {                                                                                                                  \
        title, one_array_matches_the_oracle, NULL, NULL, (void *)(intptr_t)(array)                                     \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        ALONE(RESULT_OUT, "out_alone_matches_the_oracle"),
        ALONE(RESULT_D_X, "d_x_alone_matches_the_oracle"),
        ALONE(RESULT_D_TOPK_WEIGHT, "d_topk_weight_alone_matches_the_oracle"),
        ALONE(RESULT_D_GATE, "d_gate_alone_matches_the_oracle"),
        ALONE(RESULT_D_UP, "d_up_alone_matches_the_oracle"),
        ALONE(RESULT_D_DOWN, "d_down_alone_matches_the_oracle"),
        ALONE(RESULT_D_SHARED_GATE, "d_shared_gate_alone_matches_the_oracle"),
        ALONE(RESULT_D_SHARED_UP, "d_shared_up_alone_matches_the_oracle"),
        ALONE(RESULT_D_SHARED_DOWN, "d_shared_down_alone_matches_the_oracle"),
        cmocka_unit_test(random_shapes_routings_and_splits_match_the_oracle),
        cmocka_unit_test(mxfp8_layers_are_as_right_as_a_reference_with_e4m3_operands),
        cmocka_unit_test(every_topk_matches_the_oracle_even_beyond_the_number_of_experts),
        cmocka_unit_test(every_share_of_masked_slots_matches_the_oracle),
        cmocka_unit_test(every_routing_and_weighting_matches_the_oracle_at_every_ep),
        cmocka_unit_test(any_ranks_may_be_without_tokens),
        cmocka_unit_test(a_nan_in_one_token_stays_in_its_rows),
        cmocka_unit_test(an_infinity_in_one_token_stays_in_its_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
