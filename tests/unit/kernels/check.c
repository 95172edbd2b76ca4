/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Comparison of results; see the header for the tolerance and where it comes from.
 */
#include "check.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "mok/types.h"

double error_bound(double reference_error, size_t count)
{
    return reference_error * (1.5 + 6 / sqrt((double)count + 1)) + 1e-7;
}

void check_result(const char *what, const struct problem *p, const struct result *got, const struct result *want,
                  uint32_t arrays)
{
    struct result reference;

    reference_run(p, &reference);
    for (int a = 0; a < RESULT_COUNT; a++) {
        if (!(arrays >> a & 1) || !want->count[a])
            continue;
        double error = result_error(got, want, (enum result_array)a);
        double expected = result_error(&reference, want, (enum result_array)a);
        if (getenv("MOK_TEST_PRINT_ERRORS"))
            print_message("%s: %s error %.3e, reference %.3e\n", what, result_name[a], error, expected);
        if (!(error <= error_bound(expected, want->count[a])))
            fail_msg("%s: error of %s is %g, an FP32-accumulating reference reaches %g", what, result_name[a], error,
                     expected);
    }
    result_free(&reference);
}

static void must_be_zero(const char *what, const struct result *got, enum result_array array, size_t from, size_t count)
{
    for (size_t i = from; i < from + count; i++)
        if (got->array[array][i] != 0)
            fail_msg("%s: %s[%zu] is %g, must be 0", what, result_name[array], i, got->array[array][i]);
}

/* Zeros that no rounding may touch. */
static void check_structural_zeros(const char *what, const struct problem *p, const struct result *got)
{
    size_t size = problem_expert_elements(p);
    bool *used = calloc(p->experts, sizeof(*used));

    assert_non_null(used);
    for (uint32_t t = 0; t < p->tokens; t++) {
        bool routed = false;
        for (uint32_t k = 0; k < p->topk; k++) {
            size_t slot = (size_t)t * p->topk + k;
            if (p->ids[slot] < 0) {
                must_be_zero(what, got, RESULT_D_TOPK_WEIGHT, slot, 1);
                continue;
            }
            used[p->ids[slot]] = routed = true;
        }
        if (!routed && !p->shared_intermediate) {
            must_be_zero(what, got, RESULT_OUT, (size_t)t * p->hidden, p->hidden);
            must_be_zero(what, got, RESULT_D_X, (size_t)t * p->hidden, p->hidden);
        }
    }
    for (uint32_t e = 0; e < p->experts; e++) {
        if (used[e])
            continue;
        must_be_zero(what, got, RESULT_D_GATE, e * size, size);
        must_be_zero(what, got, RESULT_D_UP, e * size, size);
        must_be_zero(what, got, RESULT_D_DOWN, e * size, size);
    }
    free(used);
}

void check_zeros(const char *what, const struct problem *p, const struct result *got, const struct result *want)
{
    check_structural_zeros(what, p, got);
    /* A clamp's zeros depend on which side of it a rounded value falls. */
    for (int a = 0; a < RESULT_COUNT && !(p->clamp > 0); a++)
        for (size_t i = 0; i < want->count[a]; i++)
            if (want->array[a][i] == 0)
                must_be_zero(what, got, (enum result_array)a, i, 1);
}

void check_against_oracle(const char *what, const struct problem *p, const struct result *got)
{
    struct result want;

    oracle_run(p, &want);
    check_result(what, p, got, &want, CHECK_ALL);
    check_zeros(what, p, got, &want);
    result_free(&want);
}

void check_against_mx_oracle(const char *what, const struct problem *p, const struct result *got, uint32_t precision,
                             bool mxfp8_wgrad)
{
    struct result want, reference;

    oracle_run(p, &want);
    reference_run_mx(p, precision == MOK_MXFP8_PER32 ? 32 : 128, mxfp8_wgrad, &reference);
    for (int a = 0; a < RESULT_D_SHARED_GATE; a++) {
        double error = result_error(got, &want, (enum result_array)a);
        double expected = result_error(&reference, &want, (enum result_array)a);
        if (getenv("MOK_TEST_PRINT_ERRORS"))
            print_message("%s: %s error %.3e, reference %.3e\n", what, result_name[a], error, expected);
        if (!(error <= error_bound(expected, want.count[a]) && error >= 0.3 * expected))
            fail_msg("%s: error of %s is %g, a reference with E4M3 operands reaches %g", what, result_name[a], error,
                     expected);
    }
    check_structural_zeros(what, p, got);
    result_free(&want);
    result_free(&reference);
}

void check_bitwise(const char *what, const struct result *got, const struct result *want, uint32_t arrays)
{
    for (int a = 0; a < RESULT_COUNT; a++)
        for (size_t i = 0; (arrays >> a & 1) && i < want->count[a]; i++)
            if (memcmp(&got->array[a][i], &want->array[a][i], sizeof(double)))
                fail_msg("%s: %s[%zu] is %a, was %a", what, result_name[a], i, got->array[a][i], want->array[a][i]);
}
