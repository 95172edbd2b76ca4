/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The oracle itself: its gradients against finite differences, its values against the published vectors, and the
 * FP32 reference and the MX model against both. A test of the product is worth what these are worth.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "mx_model.h"
#include "oracle.h"
#include "plain_bf16.h"
#include "vectors.h"

static const enum result_array gradient_of[INPUT_COUNT] = {
    RESULT_D_X,    RESULT_D_TOPK_WEIGHT, RESULT_D_GATE,      RESULT_D_UP,
    RESULT_D_DOWN, RESULT_D_SHARED_GATE, RESULT_D_SHARED_UP, RESULT_D_SHARED_DOWN,
};

/* Two central differences: where they disagree the loss has a kink (a clamp) between, and nothing is to be said. */
static void check_gradient(const struct problem *p, const struct result *result, enum oracle_input input,
                           size_t element)
{
    double step = 1e-4;
    double wide = (oracle_loss(p, input, element, step) - oracle_loss(p, input, element, -step)) / (2 * step);
    double narrow = (oracle_loss(p, input, element, step / 8) - oracle_loss(p, input, element, -step / 8)) / (step / 4);
    double got = result->array[gradient_of[input]][element];

    if (fabs(wide - narrow) > 1e-5 * (1 + fabs(wide)))
        return;
    if (fabs(got - narrow) > 1e-5 * (1 + fabs(narrow)))
        fail_msg("%s[%zu] is %g, finite differences give %g", result_name[gradient_of[input]], element, got, narrow);
}

static void check_gradients(const struct problem_options *options)
{
    struct problem p;
    struct result result;
    struct rng rng = { options->seed };

    problem_make(&p, options);
    oracle_run(&p, &result);
    for (int input = 0; input < INPUT_COUNT; input++) {
        size_t count = result.count[gradient_of[input]];
        for (int n = 0; count && n < 40; n++) {
            size_t element = rng_below(&rng, (uint32_t)count);
            if (input == INPUT_TOPK_WEIGHT && p.ids[element] < 0)
                assert_true(result.array[RESULT_D_TOPK_WEIGHT][element] == 0);
            check_gradient(&p, &result, (enum oracle_input)input, element);
        }
    }
    result_free(&result);
    problem_free(&p);
}

static void oracle_gradients_match_finite_differences(void **state)
{
    (void)state;
    check_gradients(&(struct problem_options){ .hidden = 16,
                                               .intermediate = 32,
                                               .experts = 3,
                                               .topk = 2,
                                               .tokens = 7,
                                               .weighting = WEIGHT_ZERO_NEGATIVE,
                                               .masked = 0.2,
                                               .seed = 1 });
}

static void oracle_gradients_match_finite_differences_with_duplicates(void **state)
{
    (void)state;
    check_gradients(&(struct problem_options){ .hidden = 32,
                                               .intermediate = 16,
                                               .experts = 2,
                                               .topk = 4,
                                               .tokens = 5,
                                               .routing = ROUTE_DUPLICATES,
                                               .seed = 2 });
}

static void oracle_gradients_match_finite_differences_with_clamp_and_shared_expert(void **state)
{
    (void)state;
    check_gradients(&(struct problem_options){ .hidden = 32,
                                               .intermediate = 16,
                                               .experts = 3,
                                               .topk = 2,
                                               .tokens = 6,
                                               .clamp = 0.5f,
                                               .shared_intermediate = 48,
                                               .seed = 3 });
}

/* The vectors come from another program: agreement to FP64 rounding means that both read the formulas alike. */
static void oracle_agrees_with_every_vector_case(void **state)
{
    struct vector_set set;

    (void)state;
    assert_int_equal(vectors_load(vectors_directory(), &set), 0);
    for (size_t i = 0; i < set.count; i++) {
        struct result got;
        oracle_run(&set.cases[i].problem, &got);
        for (int a = 0; a < RESULT_COUNT; a++) {
            double error = result_error(&got, &set.cases[i].want, (enum result_array)a);
            if ((set.cases[i].has >> a & 1) && !(error < 1e-12))
                fail_msg("%s: %s differs by %g", set.cases[i].name, result_name[a], error);
        }
        result_free(&got);
    }
    vectors_free(&set);
}

static void reference_stays_within_a_percent_of_the_oracle(void **state)
{
    struct problem p;
    struct result want, got;

    (void)state;
    problem_make(&p, &(struct problem_options){ .hidden = 96,
                                                .intermediate = 64,
                                                .experts = 4,
                                                .topk = 3,
                                                .tokens = 40,
                                                .shared_intermediate = 32,
                                                .masked = 0.1,
                                                .seed = 4 });
    oracle_run(&p, &want);
    reference_run(&p, &got);
    for (int a = 0; a < RESULT_COUNT; a++) {
        double error = result_error(&got, &want, (enum result_array)a);
        if (!(error > 1e-5 && error < 1e-2))
            fail_msg("%s: error %g is not that of BF16 rounding", result_name[a], error);
    }
    result_free(&want);
    result_free(&got);
    problem_free(&p);
}

static void bf16_rounding_is_to_nearest_even_and_keeps_nan(void **state)
{
    (void)state;
    assert_int_equal(bf16_from_float(1.0f), 0x3f80);
    assert_int_equal(bf16_from_float(0x1.01p0f), 0x3f80);        /* tie, down to even */
    assert_int_equal(bf16_from_float(0x1.03p0f), 0x3f82);        /* tie, up to even */
    assert_int_equal(bf16_from_float(0x1.010002p0f), 0x3f81);    /* just above the tie */
    assert_int_equal(bf16_from_float(-0x1.fffffep127f), 0xff80); /* beyond the largest: infinite */
    assert_true(isnan(bf16_to_float(bf16_from_float(NAN))));
    for (uint32_t bits = 0; bits < 0x10000; bits++)
        if (!isnan(bf16_to_float((uint16_t)bits)))
            assert_int_equal(bf16_from_float(bf16_to_float((uint16_t)bits)), bits);
}

static void check_mx_rule(const struct mx_vectors *v, const struct mx_rule *rule)
{
    uint32_t group = v->columns / rule->groups;

    for (uint32_t row = 0; row < v->rows; row++) {
        for (uint32_t g = 0; g < rule->groups; g++) {
            const uint16_t *values = v->bf16 + (size_t)row * v->columns + (size_t)g * group;
            const uint8_t *codes = rule->code + (size_t)row * v->columns + (size_t)g * group;
            int want = rule->exponent[row * rule->groups + g];
            int exponent = mx_model_exponent(mx_model_amax(values, group));
            if (want != MX_NO_SCALE)
                assert_int_equal(exponent, want);
            for (uint32_t i = 0; i < group; i++)
                assert_int_equal(mx_model_encode(ldexp((double)bf16_to_float(values[i]), -exponent)), codes[i]);
        }
    }
}

static void mx_model_agrees_with_every_vector(void **state)
{
    struct mx_vectors vectors;

    (void)state;
    assert_int_equal(mx_vectors_load(vectors_directory(), &vectors), 0);
    check_mx_rule(&vectors, &vectors.per32);
    check_mx_rule(&vectors, &vectors.per128);
    mx_vectors_free(&vectors);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_gradients_match_finite_differences),
        cmocka_unit_test(oracle_gradients_match_finite_differences_with_duplicates),
        cmocka_unit_test(oracle_gradients_match_finite_differences_with_clamp_and_shared_expert),
        cmocka_unit_test(oracle_agrees_with_every_vector_case),
        cmocka_unit_test(reference_stays_within_a_percent_of_the_oracle),
        cmocka_unit_test(bf16_rounding_is_to_nearest_even_and_keeps_nan),
        cmocka_unit_test(mx_model_agrees_with_every_vector),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
