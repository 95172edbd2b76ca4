/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA engine's backward through the common interface: every gradient of every test vector at every EP degree that
 * fits, against FP64; both context modes; bits that no setting changes; contexts that lie. Skipped where there is no GPU.
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
#include "mok/ring_abi.h"
#include "plain_bf16.h"
#include "vectors.h"

#ifndef REPEATS
#define REPEATS 1000
#endif
#ifndef MAX_EP
#define MAX_EP DEVICE_MAX_RANKS /* where there is a test for each EP degree */
#endif
#ifndef TOKENS
#define TOKENS 400 /* of the larger problem */
#endif
#define GRADIENTS (CHECK_ALL & ~(1u << RESULT_OUT))

static struct vector_set set;
static const char *filter = "";

/* A forward and a backward; the group stays open. */
static void run(struct device_group *g, const struct problem *p, const struct device_options *options,
                const uint32_t *tokens, float start)
{
    device_group_open(g, p, options, tokens);
    device_forward(g);
    device_backward(g, start);
    device_check_canaries(g);
}

static void check_case(const char *name, const struct problem *p, const struct result *want,
                       const struct device_options *options, const uint32_t *tokens)
{
    struct device_group group;
    struct result got;
    char what[200];

    snprintf(what, sizeof(what), "%s at EP %u, ring rows %llu, context %u, flags %u", name, options->ranks,
             (unsigned long long)options->ring_rows, options->context_mode, options->flags);
    run(&group, p, options, tokens, 0.0f);
    device_gradients(&group, 0.0f, &got);
    /* shared gradients are each rank's own sums, rounded once more when they are added up */
    check_result(what, p, &got, want, GRADIENTS);
    check_zeros(what, p, &got, want);
    result_free(&got);
    device_group_close(&group);
}

static void every_vector_matches_at_every_ep(void **state)
{
    (void)state;
    for (size_t i = 0; i < set.count; i++)
        for (uint32_t ep = 1; ep <= MAX_EP; ep *= 2) {
            const struct vector_case *c = &set.cases[i];
            uint32_t tokens[DEVICE_MAX_RANKS];
            struct rng rng = { ep };

            if (c->problem.experts % ep || !strstr(c->name, filter))
                continue;
            problem_cut(c->problem.tokens, ep, &rng, tokens);
            check_case(c->name, &c->problem, &c->want,
                       &(struct device_options){ .ranks = ep, .context_mode = MOK_CONTEXT_FULL }, tokens);
            check_case(c->name, &c->problem, &c->want,
                       &(struct device_options){ .ranks = ep,
                                                 .ring_rows = 64,
                                                 .context_mode = ep % 4 ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL,
                                                 .flags = MOK_OPF_OVERWRITE_WGRAD },
                       tokens);
        }
}

static void larger_problem(struct problem *p, float clamp)
{
    problem_make(p, &(struct problem_options){ .hidden = 336,
                                               .intermediate = 208,
                                               .experts = 8,
                                               .topk = 3,
                                               .tokens = TOKENS,
                                               .shared_intermediate = 80,
                                               .clamp = clamp,
                                               .routing = ROUTE_ZIPF,
                                               .weighting = WEIGHT_ZERO_NEGATIVE,
                                               .masked = 0.1,
                                               .allowed_experts = 0xbf,
                                               .seed = 11 });
}

static void a_larger_problem_matches_fp64(void **state)
{
    struct result want;
    struct problem p;

    (void)state;
    for (int clamped = 0; clamped < 2; clamped++) {
        larger_problem(&p, clamped ? 0.4f : 0.0f);
        result_alloc(&p, &want);
        oracle_run(&p, &want);
        check_case("larger problem", &p, &want,
                   &(struct device_options){ .ranks = 1,
                                             .context_mode = clamped ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL,
                                             .flags = MOK_OPF_OVERWRITE_WGRAD },
                   &p.tokens);
        result_free(&want);
        problem_free(&p);
    }
}

static uint8_t *bits(const struct problem *p, const struct device_options *options, const uint32_t *tokens, float start,
                     size_t *ret_size)
{
    struct device_group group;
    uint8_t *bytes;

    run(&group, p, options, tokens, start);
    bytes = device_gradient_bytes(&group, ret_size);
    device_group_close(&group);
    return bytes;
}

static void no_setting_changes_a_bit(void **state)
{
    static const struct device_options others[] = {
        { .ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .minibatch_rows = 64 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 128 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE, .ring_rows = 64, .chaos_delay_us = 20 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .blocks = 2 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .chaos_delay_us = 30 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE, .yield_us = 1 },
        { .ranks = 2, .context_mode = MOK_CONTEXT_FULL },
        { .ranks = 4, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 64, .yield_us = 5 },
        { .ranks = 8, .context_mode = MOK_CONTEXT_RECOMPUTE, .chaos_delay_us = 10, .blocks = 2 },
    };
    struct problem p;
    size_t size, same;
    uint8_t *want;

    (void)state;
    larger_problem(&p, 0.0f);
    want = bits(&p, &(struct device_options){ .ranks = 1, .context_mode = MOK_CONTEXT_FULL }, &p.tokens, 0.25f, &size);
    /* gradients of the shared expert, the last ones, are sums over a rank's own tokens */
    same = size - 3 * (size_t)p.shared_intermediate * p.hidden * 4;
    for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
        uint32_t tokens[DEVICE_MAX_RANKS];
        struct rng rng = { i + 1 };
        uint8_t *got;
        size_t got_size;

        problem_cut(p.tokens, others[i].ranks, &rng, tokens);
        got = bits(&p, &others[i], tokens, 0.25f, &got_size);
        if (memcmp(got, want, others[i].ranks == 1 ? size : same) != 0)
            fail_msg("setting %zu: other bits", i);
        free(got);
    }
    free(want);
    problem_free(&p);
}

static void weight_gradients_are_added_to_what_is_stored(void **state)
{
    struct device_group group;
    struct result want, got;
    struct problem p;

    (void)state;
    larger_problem(&p, 0.0f);
    result_alloc(&p, &want);
    oracle_run(&p, &want);
    run(&group, &p, &(struct device_options){ .ranks = 1, .context_mode = MOK_CONTEXT_FULL }, &p.tokens, 0.5f);
    device_gradients(&group, 0.5f, &got);
    check_result("added to 0.5", &p, &got, &want, GRADIENTS);
    result_free(&got);
    result_free(&want);
    device_group_close(&group);
    problem_free(&p);
}

static void must_be_rounded(const struct result *got, const struct result *want, uint32_t arrays, size_t cut)
{
    for (int a = RESULT_D_X; a < RESULT_COUNT; a++)
        for (size_t i = 0; (arrays >> a & 1) && i < want->count[a]; i++) {
            double value = a < RESULT_D_GATE ? want->array[a][i] : (double)bf16_round((float)want->array[a][i]);
            if (got->array[a][i] != value)
                fail_msg("cut %zu: %s[%zu] is %a, must be %a", cut, result_name[a], i, got->array[a][i], value);
        }
}

/* Whatever cuts an expert's rows, and also where gradients are no multiples of a tile. */
static void bf16_weight_gradients_are_the_fp32_ones_rounded_once(void **state)
{
    static const struct device_options cuts[] = {
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .flags = MOK_OPF_OVERWRITE_WGRAD },
        { .ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE, .ring_rows = 128, .flags = MOK_OPF_OVERWRITE_WGRAD },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 64, .chaos_delay_us = 20 },
        { .ranks = 2, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 64 },
    };
    struct device_options plain = { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .flags = ~0u };
    struct result want = { 0 }, got;
    struct device_group group;
    struct problem p;

    (void)state;
    larger_problem(&p, 0.0f);
    for (size_t c = 0; c < sizeof(cuts) / sizeof(cuts[0]); c++) {
        struct device_options narrow = cuts[c];
        uint32_t tokens[2] = { p.tokens / cuts[c].ranks, p.tokens - p.tokens / 2 };

        if (plain.flags != cuts[c].flags) {
            result_free(&want);
            plain.flags = cuts[c].flags;
            run(&group, &p, &plain, &p.tokens, 0.25f);
            device_gradients(&group, 0.0f, &want);
            device_group_close(&group);
        }
        narrow.bf16_gradients = true;
        run(&group, &p, &narrow, tokens, 0.25f);
        device_gradients(&group, 0.0f, &got);
        device_group_close(&group);
        /* gradients of the shared expert are each rank's own sums */
        must_be_rounded(&got, &want, cuts[c].ranks > 1 ? (1u << RESULT_D_SHARED_GATE) - 1 : CHECK_ALL, c);
        result_free(&got);
    }
    result_free(&want);
    problem_free(&p);
}

static void a_nan_stays_in_its_tokens_rows(void **state)
{
    const struct device_options options = { .ranks = 1, .context_mode = MOK_CONTEXT_FULL };
    struct result want, got;
    struct device_group group;
    struct problem p;

    (void)state;
    larger_problem(&p, 0.0f);
    run(&group, &p, &options, &p.tokens, 0.0f);
    device_gradients(&group, 0.0f, &want);
    device_group_close(&group);
    p.x[7 * p.hidden + 3] = 0x7fc0;
    run(&group, &p, &options, &p.tokens, 0.0f);
    device_gradients(&group, 0.0f, &got);
    device_group_close(&group);
    for (size_t i = 0; i < want.count[RESULT_D_X]; i++)
        if (i / p.hidden != 7 && got.array[RESULT_D_X][i] != want.array[RESULT_D_X][i])
            fail_msg("d_x of token %zu changed", i / p.hidden);
    for (size_t e = 0; e < p.experts; e++) {
        bool touched = false;
        for (size_t k = 0; k < p.topk; k++)
            touched |= p.ids[7 * p.topk + k] == (int32_t)e;
        for (size_t i = e * problem_expert_elements(&p); !touched && i < (e + 1) * problem_expert_elements(&p); i++)
            if (got.array[RESULT_D_GATE][i] != want.array[RESULT_D_GATE][i])
                fail_msg("d_gate of expert %zu changed", e);
    }
    result_free(&got);
    result_free(&want);
    problem_free(&p);
}

static void no_tokens_at_all_give_zeros(void **state)
{
    uint32_t none[2] = { 0, 0 };
    struct device_group group;
    struct result got;
    struct problem p;

    (void)state;
    larger_problem(&p, 0.0f);
    run(&group, &p,
        &(struct device_options){ .ranks = 2, .context_mode = MOK_CONTEXT_FULL, .flags = MOK_OPF_OVERWRITE_WGRAD }, none,
        0.0f);
    group.shape.tokens = 0;
    device_gradients(&group, 0.0f, &got);
    for (int a = RESULT_D_GATE; a < RESULT_COUNT; a++)
        for (size_t i = 0; i < got.count[a]; i++)
            if (got.array[a][i] != 0)
                fail_msg("%s[%zu] is %g", result_name[a], i, got.array[a][i]);
    result_free(&got);
    device_group_close(&group);
    problem_free(&p);
}

static void poke(struct device_group *g, uint64_t offset, uint32_t value)
{
    assert_int_equal(cudaMemcpy((uint8_t *)g->context[0].at + offset, &value, sizeof(value), cudaMemcpyHostToDevice), 0);
}

static struct mok_op_result prepare_backward(struct device_group *g, enum mok_phase phase)
{
    struct mok_op_result result;

    g->args[0].kind = MOK_KIND_BACKWARD;
    result = device_phase(g, 0, phase);
    g->args[0].kind = MOK_KIND_FORWARD;
    return result;
}

static void a_context_that_lies_is_refused(void **state)
{
    const enum mok_phase phases[2] = { MOK_PHASE_PREPARE, MOK_PHASE_WHOLE };
    struct mok_op_result result;
    struct device_group group;
    struct problem p;

    (void)state;
    larger_problem(&p, 0.0f);
    device_group_open(&group, &p, &(struct device_options){ .ranks = 1, .context_mode = MOK_CONTEXT_FULL }, &p.tokens);
    for (int i = 0; i < 2; i++) {
        device_forward(&group);
        poke(&group, offsetof(struct mok_context_header, magic), 1);
        result = prepare_backward(&group, phases[i]);
        assert_int_equal(result.status, -MOK_EARG);
        assert_int_equal(result.argument, MOK_ARG_CONTEXT);
        device_forward(&group);
        poke(&group, offsetof(struct mok_context_header, tokens), p.tokens - 1);
        assert_int_equal(prepare_backward(&group, phases[i]).status, -MOK_ESIZE);
        device_forward(&group);
        poke(&group, offsetof(struct mok_context_header, mode), MOK_CONTEXT_RECOMPUTE);
        assert_int_equal(prepare_backward(&group, phases[i]).argument, MOK_ARG_CONTEXT_MODE);
        device_forward(&group);
        poke(&group, group.plan[0].ctx_ids + 4 * (100 * p.topk + 1), p.experts);
        result = prepare_backward(&group, phases[i]);
        assert_int_equal(result.status, -MOK_EEXPERT);
        assert_int_equal(result.argument, MOK_ARG_CONTEXT);
        assert_int_equal(result.bad_token, 100);
        assert_int_equal(result.bad_slot, 1);
    }
    device_forward(&group);
    device_backward(&group, 0.0f); /* and the layer still works */
    device_group_close(&group);
    problem_free(&p);
}

static void many_backwards_have_the_same_bits(void **state)
{
    struct device_group group;
    size_t size;
    uint8_t *want;
    struct problem p;

    (void)state;
    larger_problem(&p, 0.0f);
    run(&group, &p,
        &(struct device_options){
            .ranks = 1, .chaos_delay_us = 3, .context_mode = MOK_CONTEXT_FULL, .flags = MOK_OPF_OVERWRITE_WGRAD },
        &p.tokens, 0.0f);
    want = device_gradient_bytes(&group, &size);
    device_repeat_backward(&group, true, want, REPEATS);
    device_group_close(&group);
    free(want);
    problem_free(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_larger_problem_matches_fp64),
        cmocka_unit_test(every_vector_matches_at_every_ep),
        cmocka_unit_test(weight_gradients_are_added_to_what_is_stored),
        cmocka_unit_test(bf16_weight_gradients_are_the_fp32_ones_rounded_once),
        cmocka_unit_test(no_setting_changes_a_bit),
        cmocka_unit_test(a_nan_stays_in_its_tokens_rows),
        cmocka_unit_test(no_tokens_at_all_give_zeros),
        cmocka_unit_test(a_context_that_lies_is_refused),
        cmocka_unit_test(many_backwards_have_the_same_bits),
    };

    device_or_skip();
    if (vectors_load(argc > 1 ? argv[1] : vectors_directory(), &set) < 0)
        return 1;
    filter = argc > 2 ? argv[2] : "";
    if (argc > 3)
        cmocka_set_test_filter(argv[3]);
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    vectors_free(&set);
    return failed;
}
