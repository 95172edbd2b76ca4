/* SPDX-License-Identifier: Apache-2.0 */
/*
 * BF16 weight gradients are the FP32 ones, rounded once: whatever cuts an expert's rows (minibatches, macrobatches,
 * blocks of the shared expert), however many threads and ranks there are, added to what is stored or not.
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
#include "plain_bf16.h"

static const struct problem_options options[] = {
    { .hidden = 48,
      .intermediate = 112,
      .experts = 8,
      .topk = 3,
      .tokens = 290,
      .routing = ROUTE_ZIPF,
      .weighting = WEIGHT_ZERO_NEGATIVE,
      .masked = 0.2,
      .allowed_experts = 0xbf,
      .clamp = 0.7f,
      .shared_intermediate = 64,
      .seed = 61 },
    { .hidden = 1040, .intermediate = 272, .experts = 2, .topk = 1, .tokens = 150, .seed = 62 },
    { .hidden = 16,
      .intermediate = 16,
      .experts = 2,
      .topk = 1,
      .tokens = 2100,
      .shared_intermediate = 16,
      .seed = 63 },
};
#define PROBLEMS (sizeof(options) / sizeof(options[0]))
#define FIRST_GRADIENT RESULT_D_GATE

#ifdef MOK_SANITIZED
#define EVERY 3 /* cut of the list, each problem others of them */
#else
#define EVERY 1
#endif

static struct problem problem[PROBLEMS];

static int setup(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROBLEMS; i++)
        problem_make(&problem[i], &options[i]);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (size_t i = 0; i < PROBLEMS; i++)
        problem_free(&problem[i]);
    return 0;
}

/* What FP32 gradients come to, by the plan's choices on one rank, then rounded. */
static void rounded(const struct problem *p, const struct run_options *how, struct result *ret)
{
    struct run_options plain = { .overwrite = how->overwrite,
                                 .start = how->start,
                                 .layer = { .precision = how->layer.precision } };

    run_problem(p, &plain, ret);
    for (int a = FIRST_GRADIENT; a < RESULT_COUNT; a++)
        for (size_t i = 0; i < ret->count[a]; i++)
            ret->array[a][i] = (double)bf16_round((float)ret->array[a][i]);
}

static void must_be_rounded(const char *what, const struct problem *p, const struct run_options *how)
{
    uint32_t arrays = how->harness.ranks > 1 ? CHECK_ANY_EP : CHECK_ALL;
    struct run_options narrow = *how;
    struct result want, got;

    rounded(p, how, &want);
    narrow.layer.bf16_gradients = true;
    run_problem(p, &narrow, &got);
    check_bitwise(what, &got, &want, arrays);
    result_free(&want);
    result_free(&got);
}

static void they_are_rounded_once_whatever_cuts_the_rows(void **state)
{
    static const struct run_options cuts[] = {
        { .start = 0.25f },
        { .overwrite = true, .layer = { .minibatch_rows = 128 } },
        { .start = 0.25f, .harness = { .threads = 3 }, .layer = { .minibatch_rows = 256 } },
        { .start = 0.25f, .layer = { .ring_tiles = 1 } },
        { .overwrite = true, .harness = { .threads = 2 }, .layer = { .ring_tiles = 3, .minibatch_rows = 128 } },
        { .start = -1.5f, .context_mode = MOK_CONTEXT_RECOMPUTE, .layer = { .ring_tiles = 2 } },
        { .start = 0.25f, .harness = { .ranks = 2, .threads = 2, .chaos_delay_us = 30 }, .layer = { .ring_tiles = 1 } },
    };

    (void)state;
    for (size_t i = 0; i < PROBLEMS; i++)
        for (size_t c = i % EVERY; c < sizeof(cuts) / sizeof(cuts[0]); c += EVERY) {
            char what[60];
            snprintf(what, sizeof(what), "problem %zu, cut %zu", i, c);
            must_be_rounded(what, &problem[i], &cuts[c]);
        }
}

static void mxfp8_layers_have_them_too(void **state)
{
    (void)state;
    must_be_rounded("per128", &problem[0],
                    &(struct run_options){ .start = 0.5f,
                                           .layer = { .precision = MOK_MXFP8_PER128, .ring_tiles = 2 } });
}

static void only_cuts_take_memory(void **state)
{
    struct harness *h = harness_open(&(struct harness_options){ 0 });
    struct layer_options narrow = { .bf16_gradients = true }, cut = { .bf16_gradients = true, .minibatch_rows = 128 };
    struct mok_layer_spec f32 = layer_spec(h, &problem[0], &(struct layer_options){ 0 }, 0);
    struct mok_layer_spec whole = layer_spec(h, &problem[0], &narrow, 0), cuts = layer_spec(h, &problem[0], &cut, 0);
    struct mok_plan plan[3];
    uint64_t sums = 3 * sizeof(float) * problem[0].hidden * problem[0].intermediate;

    (void)state;
    f32.minibatch_rows = whole.minibatch_rows = 1 << 20;
    assert_int_equal(mok_plan_make(&f32, &h->limits, &plan[0], NULL, 0, NULL), 0);
    assert_int_equal(mok_plan_make(&whole, &h->limits, &plan[1], NULL, 0, NULL), 0);
    assert_int_equal(mok_plan_make(&cuts, &h->limits, &plan[2], NULL, 0, NULL), 0);
    assert_int_equal(plan[1].private_bytes, plan[0].private_bytes);
    assert_in_range(plan[2].private_bytes, plan[1].private_bytes + 2 * sums, plan[1].private_bytes + 3 * sums);
    /* a context of one serves the other */
    assert_int_equal(mok_plan_hash(&plan[0]), mok_plan_hash(&plan[1]));
    harness_close(h);
}

static void another_type_is_refused(void **state)
{
    struct harness *h = harness_open(&(struct harness_options){ 0 });
    struct mok_layer_spec spec = layer_spec(h, &problem[0], &(struct layer_options){ 0 }, 0);
    struct mok_message message = { { 0 } };
    struct mok_plan plan;

    (void)state;
    spec.gradient_dtype = 3;
    assert_int_equal(mok_plan_make(&spec, &h->limits, &plan, NULL, 0, &message), -MOK_EDTYPE);
    assert_non_null(strstr(message.text, "gradient_dtype = 3"));
    spec.gradient_dtype = MOK_DTYPE_F32;
    assert_int_equal(mok_plan_make(&spec, &h->limits, &plan, NULL, 0, &message), 0);
    harness_close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(they_are_rounded_once_whatever_cuts_the_rows),
        cmocka_unit_test(mxfp8_layers_have_them_too),
        cmocka_unit_test(only_cuts_take_memory),
        cmocka_unit_test(another_type_is_refused),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
