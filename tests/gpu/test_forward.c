/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA engine's forward through the common interface: every test vector at every EP degree that fits, against FP64;
 * bits that no setting changes; phases that fail. Skipped where there is no GPU.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "check.h"
#include "device.h"
#include "plain_bf16.h"
#include "vectors.h"

#ifndef REPEATS
#define REPEATS 1000
#endif
#ifndef MAX_EP
#define MAX_EP DEVICE_MAX_RANKS /* where there is a test for each EP degree */
#endif

static struct vector_set set;

static void check_out(const char *what, const struct problem *p, const uint16_t *out, const struct result *want)
{
    struct result got;

    result_alloc(p, &got);
    for (size_t i = 0; i < problem_rows_elements(p); i++)
        got.array[RESULT_OUT][i] = (double)bf16_to_float(out[i]);
    check_result(what, p, &got, want, 1u << RESULT_OUT);
    result_free(&got);
}

static uint16_t *forward(const struct problem *p, const struct device_options *options, const uint32_t *tokens)
{
    struct device_group group;
    uint16_t *out;

    device_group_open(&group, p, options, tokens);
    device_forward(&group);
    out = device_out(&group);
    device_group_close(&group);
    return out;
}

static void run_case(const struct vector_case *c, const struct device_options *options, const uint32_t *tokens)
{
    uint16_t *out = forward(&c->problem, options, tokens);
    char what[160];

    snprintf(what, sizeof(what), "%s at EP %u, ring rows %llu", c->name, options->ranks,
             (unsigned long long)options->ring_rows);
    check_out(what, &c->problem, out, &c->want);
    free(out);
}

static void every_vector_matches_at_every_ep(void **state)
{
    (void)state;
    for (size_t i = 0; i < set.count; i++)
        for (uint32_t ep = 1; ep <= MAX_EP; ep *= 2) {
            const struct vector_case *c = &set.cases[i];
            uint32_t tokens[DEVICE_MAX_RANKS];
            struct rng rng = { ep };

            if (c->problem.experts % ep)
                continue;
            problem_cut(c->problem.tokens, ep, &rng, tokens);
            run_case(c, &(struct device_options){ .ranks = ep }, tokens);
            run_case(c, &(struct device_options){ .ranks = ep, .ring_rows = 64 }, tokens);
        }
}

static void larger_problem(struct problem *p)
{
    problem_make(p, &(struct problem_options){ .hidden = 336,
                                               .intermediate = 208,
                                               .experts = 8,
                                               .topk = 3,
                                               .tokens = 700,
                                               .shared_intermediate = 80,
                                               .routing = ROUTE_ZIPF,
                                               .masked = 0.1,
                                               .seed = 11 });
}

static void no_setting_changes_a_bit(void **state)
{
    static const struct device_options others[] = {
        { .ranks = 1, .minibatch_rows = 64 },
        { .ranks = 1, .ring_rows = 128 },
        { .ranks = 1, .blocks = 2 },
        { .ranks = 1, .chaos_delay_us = 30 },
        { .ranks = 1, .yield_us = 1 },
        { .ranks = 1, .yield_us = 5, .blocks = 2, .ring_rows = 128 },
        { .ranks = 2 },
        { .ranks = 2, .comm_units = 1, .ring_rows = 256, .minibatch_rows = 64 },
        { .ranks = 4, .ring_rows = 64, .yield_us = 1 },
        { .ranks = 4, .ring_rows = 192, .comm_units = 2, .blocks = 2 },
        { .ranks = 8, .chaos_delay_us = 10 },
    };
    struct problem p;
    uint16_t *want;

    (void)state;
    larger_problem(&p);
    want = forward(&p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        uint32_t tokens[DEVICE_MAX_RANKS];
        struct rng rng = { i + 1 };
        uint16_t *got;

        problem_cut(p.tokens, others[i].ranks, &rng, tokens);
        got = forward(&p, &others[i], tokens);
        if (memcmp(got, want, problem_rows_elements(&p) * 2) != 0)
            fail_msg("setting %zu: other bits", i);
        free(got);
    }
    free(want);
    problem_free(&p);
}

/* Many chunks are under way at a time here, of one or of several macrobatches. */
static void small_minibatches_and_pulled_rows_change_no_bit(void **state)
{
    struct problem p;
    uint16_t *want;

    (void)state;
    problem_make(&p, &(struct problem_options){ .hidden = 80,
                                                .intermediate = 400,
                                                .experts = 4,
                                                .topk = 2,
                                                .tokens = 600,
                                                .routing = ROUTE_ZIPF,
                                                .seed = 23 });
    want = forward(&p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    for (uint32_t i = 0; i < 4; i++) {
        const struct device_options options = { .ranks = 2,
                                                .blocks = i % 2 ? 6 : 24,
                                                .minibatch_rows = 64,
                                                .ring_rows = i / 2 ? 256 : 0,
                                                .chaos_delay_us = 20 * i };
        uint32_t tokens[DEVICE_MAX_RANKS];
        struct rng rng = { i + 1 };
        uint16_t *got;

        problem_cut(p.tokens, options.ranks, &rng, tokens);
        got = forward(&p, &options, tokens);
        if (memcmp(got, want, problem_rows_elements(&p) * 2) != 0)
            fail_msg("round %u: other bits", i);
        free(got);
    }
    free(want);
    problem_free(&p);
}

static void a_larger_problem_matches_fp64(void **state)
{
    struct result want;
    struct problem p;
    uint16_t *out;

    (void)state;
    larger_problem(&p);
    result_alloc(&p, &want);
    oracle_run(&p, &want);
    out = forward(&p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    check_out("larger problem", &p, out, &want);
    free(out);
    result_free(&want);
    problem_free(&p);
}

static void the_first_bad_id_is_named(void **state)
{
    struct device_group group;
    struct mok_op_result result;
    struct problem p;

    (void)state;
    larger_problem(&p);
    p.ids[200 * p.topk + 1] = (int32_t)p.experts;
    p.ids[300 * p.topk] = -7;
    device_group_open(&group, &p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    result = device_phase(&group, 0, MOK_PHASE_PREPARE);
    assert_int_equal(result.status, -MOK_EEXPERT);
    assert_int_equal(result.bad_token, 200);
    assert_int_equal(result.bad_slot, 1);
    assert_int_equal(result.bad_value, p.experts);
    device_group_close(&group);
    problem_free(&p);
}

static void what_cannot_run_is_refused_as_a_phase_that_failed(void **state)
{
    struct device_group group;
    struct problem p;

    (void)state;
    larger_problem(&p);
    device_group_open(&group, &p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    group.args[0].out = NULL;
    assert_int_equal(device_phase(&group, 0, MOK_PHASE_PREPARE).status, -MOK_EARG);
    group.args[0].out = group.out[0].at;
    group.args[0].kind = MOK_KIND_BACKWARD; /* without a context */
    assert_int_equal(device_phase(&group, 0, MOK_PHASE_PREPARE).status, -MOK_EARG);
    group.args[0].kind = MOK_KIND_FORWARD;
    device_forward(&group); /* and the layer still works */
    device_group_close(&group);
    problem_free(&p);
}

static void an_aborted_phase_ends_and_the_next_operation_is_right(void **state)
{
    const struct mok_engine_ops *cuda = mok_engine_find(MOK_DEVICE_CUDA);
    struct mok_op_result result = { 0 };
    struct device_group group;
    uint16_t *want, *got;
    struct problem p;

    (void)state;
    larger_problem(&p);
    want = forward(&p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    device_group_open(&group, &p, &(struct device_options){ .ranks = 1, .blocks = 2, .chaos_delay_us = 1000 },
                      &p.tokens);
    assert_int_equal(device_phase(&group, 0, MOK_PHASE_PREPARE).status, 0);
    assert_int_equal(cuda->start(group.layer[0], &group.args[0], MOK_PHASE_MAIN), 0);
    assert_int_equal(cuda->start(group.layer[0], &group.args[0], MOK_PHASE_MAIN), -MOK_EBUSY);
    cuda->abort(group.engine[0]);
    while (cuda->poll(group.engine[0], &result) == 0) {
    }
    assert_int_equal(result.status, -MOK_ECANCELED);
    device_forward(&group);
    got = device_out(&group);
    assert_memory_equal(got, want, problem_rows_elements(&p) * 2);
    free(got);
    free(want);
    device_group_close(&group);
    problem_free(&p);
}

static void repeated_forwards_have_the_same_bits(void **state)
{
    struct device_group group;
    uint16_t *want;
    struct problem p;

    (void)state;
    larger_problem(&p);
    want = forward(&p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    device_group_open(&group, &p, &(struct device_options){ .ranks = 1, .chaos_delay_us = 3 }, &p.tokens);
    device_repeat_forward(&group, want, REPEATS);
    device_group_close(&group);
    free(want);
    problem_free(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_vector_matches_at_every_ep),
        cmocka_unit_test(a_larger_problem_matches_fp64),
        cmocka_unit_test(no_setting_changes_a_bit),
        cmocka_unit_test(small_minibatches_and_pulled_rows_change_no_bit),
        cmocka_unit_test(the_first_bad_id_is_named),
        cmocka_unit_test(what_cannot_run_is_refused_as_a_phase_that_failed),
        cmocka_unit_test(an_aborted_phase_ends_and_the_next_operation_is_right),
        cmocka_unit_test(repeated_forwards_have_the_same_bits),
    };

    device_or_skip();
    if (vectors_load(argc > 1 ? argv[1] : vectors_directory(), &set) < 0)
        return 1;
    cmocka_set_test_filter(argc > 2 ? argv[2] : NULL);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    vectors_free(&set);
    return failed;
}
