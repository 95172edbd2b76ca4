/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What has gone wrong for users of comparable systems, each as a test of its own; the number is that of the report.
 * The tests of a kind elsewhere go further; these make sure that the very cases stay right.
 */
#include <dirent.h>
#include <limits.h>
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
#include "large.h"
#include "mx.h"
#include "plain_bf16.h"

#ifdef MOK_SANITIZED
enum { LAYERS = 100 };
#else
enum { LAYERS = 1000 };
#endif

static const struct problem_options base = {
    .hidden = 64, .intermediate = 48, .experts = 5, .topk = 2, .tokens = 23, .seed = 90
};

static void must_match_oracle(const char *what, const struct problem_options *options, const struct run_options *run)
{
    struct problem p;
    struct result got;

    problem_make(&p, options);
    run_problem(&p, run, &got);
    check_against_oracle(what, &p, &got);
    result_free(&got);
    problem_free(&p);
}

static void report_5_every_subset_of_experts_empty_neither_hangs_nor_errs(void **state)
{
    (void)state;
    for (uint64_t subset = 0; subset < 32; subset++)
        for (uint32_t ep = 1; ep <= 5; ep += 4) {
            struct problem_options o = base;
            o.allowed_experts = subset;
            o.masked = subset ? 0 : 1;
            must_match_oracle("a subset of experts", &o, &(struct run_options){ .harness = { .ranks = ep } });
        }
    static const uint32_t one_token[] = { 1, 22, 0, 0, 0 };
    must_match_oracle("one token on a rank", &base,
                      &(struct run_options){ .harness = { .ranks = 5 }, .tokens = one_token });
}

static void report_7_ranks_without_tokens(void **state)
{
    static const uint32_t splits[][5] = { { 0, 6, 6, 6, 5 }, { 23, 0, 0, 0, 0 }, { 0, 0, 0, 23, 0 } };

    (void)state;
    for (size_t i = 0; i < 3; i++)
        must_match_oracle("no tokens on some ranks", &base,
                          &(struct run_options){ .harness = { .ranks = 5 }, .tokens = splits[i] });
    struct problem_options none = base;
    none.tokens = 0;
    must_match_oracle("no tokens on any rank", &none, &(struct run_options){ .harness = { .ranks = 5 } });
}

/* Masks every slot of one token, one slot of another, all of rank 1; then tries ids that are none. */
static void report_8_id_minus_one_is_no_index_and_other_strays_are_refused(void **state)
{
    static const int32_t strays[] = { 5, INT_MAX, -7 };
    static const uint32_t tokens[] = { 9, 6, 4, 4, 0 };
    struct run_options run = { .harness = { .ranks = 5 }, .tokens = tokens };
    struct problem p;
    struct result got;

    (void)state;
    problem_make(&p, &base);
    p.ids[2 * p.topk] = p.ids[2 * p.topk + 1] = -1;
    p.ids[4 * p.topk + 1] = -1;
    for (uint32_t i = 9 * p.topk; i < 15 * p.topk; i++)
        p.ids[i] = -1;
    run_problem(&p, &run, &got);
    check_against_oracle("ids -1", &p, &got);
    result_free(&got);

    for (size_t i = 0; i < 3; i++) {
        struct harness *h = harness_open(&run.harness);
        struct layer *layer = layer_open(h, &p, &run.layer);
        struct tensors *t = tensors_make(layer, &p, tokens, MOK_CONTEXT_FULL);
        ((int32_t *)(void *)t->ids[3].data)[3] = strays[i];
        struct operation *op = layer_forward(t, 0);
        harness_drive(h);
        assert_int_equal(op->rank[0].fault_rank, 3);
        assert_int_equal(op->rank[0].result.bad_token, 1);
        assert_int_equal(op->rank[0].result.bad_slot, 1);
        assert_int_equal(op->rank[0].result.bad_value, strays[i]);
        operation_expect_failure(op, -MOK_EEXPERT);
        for (uint32_t r = 0; r < 5; r++)
            assert_true(is_poison(t->out[r].data, t->out[r].bytes));
        tensors_free(t);
        harness_close(h);
    }
    problem_free(&p);
}

/* A token that names one expert in all its slots with different weights: as if the weights were added up. */
static void report_9_duplicate_experts_in_a_token_count_a_slot_each(void **state)
{
    struct problem_options o = base;
    struct problem p;
    struct result got;

    (void)state;
    o.topk = 3;
    o.routing = ROUTE_HOT_EXPERT;
    problem_make(&p, &o);
    for (uint32_t ep = 1; ep <= 5; ep += 4) {
        run_problem(&p, &(struct run_options){ .harness = { .ranks = ep } }, &got);
        check_against_oracle("duplicates", &p, &got);
        for (uint32_t t = 0; t < p.tokens; t++) /* the slots of a token differ in nothing but their weight */
            for (uint32_t k = 1; k < 3; k++)
                assert_true(got.array[RESULT_D_TOPK_WEIGHT][t * 3 + k] == got.array[RESULT_D_TOPK_WEIGHT][t * 3] &&
                            got.array[RESULT_D_TOPK_WEIGHT][t * 3] != 0);
        result_free(&got);
    }
    problem_free(&p);
}

static void report_10_no_white_list_of_topk_and_hidden(void **state)
{
    static const uint32_t topks[] = { 1, 3, 5, 6, 7, 14, 32 };
    struct mok_device_limits host = { .kind = MOK_DEVICE_HOST, .units = 1, .memory_bytes = 1u << 30 };
    struct mok_layer_spec spec = {
        .hidden = 2880, .intermediate = 16, .experts = 5, .topk = 65, .ep = 1, .max_tokens = 1, .precision = MOK_BF16
    };
    struct mok_message message;
    struct mok_plan plan;

    (void)state;
    for (size_t i = 0; i < sizeof(topks) / sizeof(topks[0]); i++) {
        struct problem_options o = base;
        o.topk = topks[i];
        must_match_oracle("top-k", &o, &(struct run_options){ .harness = { .ranks = 5 } });
    }
    struct problem_options wide = base;
    wide.hidden = 2880;
    wide.intermediate = 16;
    wide.tokens = 5;
    must_match_oracle("H = 2880", &wide, &(struct run_options){ .harness = { .ranks = 5 } });
    assert_int_equal(mok_plan_make(&spec, &host, &plan, NULL, 0, &message), -MOK_ERANGE);
    assert_non_null(strstr(message.text, "64"));
    spec.topk = 1;
    spec.hidden = 2888;
    assert_int_equal(mok_plan_make(&spec, &host, &plan, NULL, 0, &message), -MOK_EALIGN);
    assert_non_null(strstr(message.text, "16"));
}

static void report_11_any_share_of_masked_slots(void **state)
{
    static const double shares[] = { 0, 0.1, 0.5, 0.9, 1 };

    (void)state;
    for (size_t i = 0; i < 5; i++) {
        struct problem_options o = base;
        o.masked = shares[i];
        o.topk = 4;
        must_match_oracle("masked", &o,
                          &(struct run_options){ .harness = { .ranks = 5 }, .layer = { .ring_tiles = 1 } });
    }
}

static void report_12_offsets_beyond_32_bits(void **state)
{
    (void)state;
#ifdef MOK_SANITIZED
    skip(); /* shadow memory of what is touched here does not fit a small machine */
#endif
    large_slots_match_the_small_problem();
    large_rows_match_the_small_problem();
    large_weights_match_the_small_problem();
}

/* Two steps in a row; between them everything that the engine or the caller would call garbage is NaN. */
static void report_13_stale_memory_never_reaches_a_result(void **state)
{
    struct problem p;
    struct result first, second;
    struct harness *h = harness_open(&(struct harness_options){ .ranks = 5 });

    (void)state;
    problem_make(&p, &base);
    struct layer *layer = layer_open(h, &p, &(struct layer_options){ .max_tokens = 300 });
    struct tensors *t = tensors_make(layer, &p, NULL, MOK_CONTEXT_FULL);
    for (int step = 0; step < 2; step++) {
        tensors_poison_outputs(t, true);
        layer_poison_gradients(layer);
        for (uint32_t r = 0; r < 5; r++)
            poison(layer->symmetric[r].data, layer->symmetric[r].bytes);
        struct operation *forward = layer_forward(t, 0), *backward = layer_backward(t, MOK_OPF_OVERWRITE_WGRAD);
        harness_drive(h);
        operation_expect_success(forward);
        operation_expect_success(backward);
        tensors_collect(t, &p, step ? &second : &first);
    }
    check_bitwise("second step", &second, &first, CHECK_ALL);
    check_against_oracle("second step", &p, &second);
    result_free(&first);
    result_free(&second);
    tensors_free(t);
    harness_close(h);
    problem_free(&p);
}

static const float *gradient(const struct guarded *memory)
{
    return (const float *)(const void *)memory->data;
}

/* Overwritten: exactly 0. Accumulated: exactly what was there before. */
static void report_14_weight_gradients_of_an_expert_without_rows(void **state)
{
    struct problem_options o = base;
    struct problem p;
    struct harness *h = harness_open(&(struct harness_options){ 0 });

    (void)state;
    o.allowed_experts = 0x1b; /* all but expert 2 */
    problem_make(&p, &o);
    struct layer *layer = layer_open(h, &p, &(struct layer_options){ 0 });
    struct tensors *t = tensors_make(layer, &p, NULL, MOK_CONTEXT_FULL);
    const struct guarded *all[] = { &layer->params[0].d_gate, &layer->params[0].d_up, &layer->params[0].d_down };
    size_t size = problem_expert_elements(&p);

    for (int overwrite = 0; overwrite < 2; overwrite++) {
        for (int a = 0; a < 3; a++)
            for (size_t i = 0; i < all[a]->bytes / 4; i++)
                ((float *)(void *)all[a]->data)[i] = overwrite ? NAN : 3.25f;
        struct operation *forward = layer_forward(t, 0);
        struct operation *backward = layer_backward(t, overwrite ? MOK_OPF_OVERWRITE_WGRAD : 0);
        harness_drive(h);
        operation_expect_success(forward);
        operation_expect_success(backward);
        for (int a = 0; a < 3; a++)
            for (size_t i = 0; i < 5 * size; i++) {
                float value = gradient(all[a])[i];
                assert_true(isfinite(value));
                if (i / size == 2)
                    assert_true(overwrite ? value == 0 : value == 3.25f);
            }
    }
    tensors_free(t);
    harness_close(h);
    problem_free(&p);
}

/* run_problem holds every tensor between canaries and inaccessible pages; here with odd sizes and forty rings. */
static void report_15_nothing_is_written_beyond_the_callers_tensors(void **state)
{
    (void)state;
    for (uint32_t tokens = 1; tokens < 40; tokens += 3) {
        struct problem_options o = base;
        o.tokens = tokens;
        o.topk = 1 + tokens % 7;
        o.hidden = 16 * (1 + tokens % 5);
        must_match_oracle("canaries", &o, &(struct run_options){ .layer = { .ring_tiles = 1 + tokens % 3 } });
    }
}

/* One scale layout, also where H is no multiple of 128; a layer in MXFP8 at that H is as right as E4M3 can be. */
static void report_16_mxfp8_at_hidden_2880(void **state)
{
    enum { ROWS = 3, H = 2880 };
    static uint16_t value[ROWS * H];
    static uint8_t code[ROWS * H], scale[ROWS * H / 32];
    static float back[ROWS * H];
    struct rng rng = { 91 };

    (void)state;
    for (size_t i = 0; i < ROWS * H; i++)
        value[i] = bf16_from_float((float)rng_normal(&rng));
    for (uint32_t group = 32; group <= 128; group += 96) {
        assert_int_equal(mok_mx_scales(H), H / 32);
        assert_int_equal(mok_mx_quantize(value, ROWS, H, group, 1, code, scale), 0);
        mok_mx_dequantize(code, scale, ROWS, H, back);
        for (size_t i = 0; i < ROWS * H; i++) {
            float exact = bf16_to_float(value[i]), step = ldexpf(1, scale[i / 32] - 127 - 9);
            assert_true(fabsf(back[i] - exact) <= fmaxf(fabsf(exact) / 16, step / 2));
        }
    }
    struct problem_options o = { .hidden = H, .intermediate = 48, .experts = 2, .topk = 2, .tokens = 6, .seed = 92 };
    for (uint32_t precision = MOK_MXFP8_PER32; precision <= MOK_MXFP8_PER128; precision++) {
        struct problem p;
        struct result got;
        problem_make(&p, &o);
        problem_quantise_weights(&p, precision == MOK_MXFP8_PER32 ? 32 : 128);
        run_problem(&p, &(struct run_options){ .layer = { .precision = precision } }, &got);
        check_against_mx_oracle("MXFP8 at H = 2880", &p, &got, precision, false);
        result_free(&got);
        problem_free(&p);
    }
}

static uint32_t open_descriptors(void)
{
    uint32_t count = 0;
    DIR *d = opendir("/proc/self/fd");

    assert_non_null(d);
    while (readdir(d))
        count++;
    closedir(d);
    return count;
}

static void report_17_the_query_is_exact_and_a_thousand_layers_leave_nothing(void **state)
{
    struct problem p;
    struct harness *h = harness_open(&(struct harness_options){ 0 });

    (void)state;
    problem_make(&p, &base);
    struct layer *layer = layer_open(h, &p, &(struct layer_options){ 0 });
    /* what the harness allocated is what the plan says, and guard pages stand behind it */
    assert_int_equal(layer->symmetric[0].bytes, layer->plan[0].symmetric_bytes);
    assert_int_equal(layer->private_memory[0].bytes, layer->plan[0].private_bytes);
    struct tensors *t = tensors_make(layer, &p, NULL, MOK_CONTEXT_FULL);
    assert_int_equal(t->context[0].bytes, layer->plan[0].context_full_bytes);
    tensors_free(t);
    layer_close(layer);
    uint32_t before = open_descriptors();
    for (int n = 0; n < LAYERS; n++)
        layer_close(layer_open(h, &p, &(struct layer_options){ 0 }));
    assert_int_equal(open_descriptors(), before);
    harness_close(h);
    problem_free(&p);
}

static void report_18_the_routers_gradient_alone(void **state)
{
    struct problem_options o = base;

    (void)state;
    o.weighting = WEIGHT_ZERO_NEGATIVE;
    o.masked = 0.3;
    o.topk = 4;
    o.tokens = 61;
    for (uint32_t ep = 1; ep <= 5; ep += 4) {
        struct problem p;
        struct result got, want;
        problem_make(&p, &o);
        oracle_run(&p, &want);
        run_problem(&p, &(struct run_options){ .harness = { .ranks = ep } }, &got);
        check_result("router", &p, &got, &want, 1u << RESULT_D_TOPK_WEIGHT);
        for (size_t i = 0; i < problem_slots(&p); i++)
            assert_true((got.array[RESULT_D_TOPK_WEIGHT][i] == 0) == (p.ids[i] < 0)); /* weight 0 has a gradient too */
        result_free(&got);
        result_free(&want);
        problem_free(&p);
    }
}

static void report_19_two_runs_give_the_same_bits_under_random_delays(void **state)
{
    struct problem p;
    struct result first = { 0 }, again;

    (void)state;
    problem_make(&p, &base);
    for (uint64_t n = 0; n < 8; n++) {
        struct run_options run = {
            .harness = { .ranks = 5, .threads = 1 + n % 2, .chaos_delay_us = n ? 100 : 0, .jitter = 40, .seed = n },
            .layer = { .ring_tiles = 1 }
        };
        run_problem(&p, &run, n ? &again : &first);
        if (n) {
            check_bitwise("delays", &again, &first, CHECK_ALL);
            result_free(&again);
        }
    }
    result_free(&first);
    problem_free(&p);
}

/* 2,000 equal rows in many macrobatches: a BF16 sum would stand still at 256 of them, an FP32 sum is right. */
static void report_20_weight_gradients_are_summed_in_fp32_over_macrobatches(void **state)
{
    struct problem p;
    struct result got, want;
    struct problem_options o = {
        .hidden = 16, .intermediate = 16, .experts = 1, .topk = 1, .tokens = 2000, .seed = 93
    };

    (void)state;
    problem_make(&p, &o);
    for (uint32_t t = 1; t < p.tokens; t++) {
        memcpy(p.x + t * 16, p.x, 32);
        memcpy(p.d_out + t * 16, p.d_out, 32);
        p.topk_weight[t] = p.topk_weight[0];
    }
    oracle_run(&p, &want);
    run_problem(&p, &(struct run_options){ .layer = { .ring_tiles = 1 } }, &got);
    for (int a = RESULT_D_GATE; a <= RESULT_D_DOWN; a++)
        assert_true(result_error(&got, &want, (enum result_array)a) < 6e-3); /* of one row's BF16 rounding */
    result_free(&got);
    result_free(&want);
    problem_free(&p);
}

/* 64 slots a token, of both signs, so that the sum is far smaller than its terms. */
static void report_21_combine_loses_no_precision(void **state)
{
    struct problem_options o = base;

    (void)state;
    o.topk = 64;
    o.tokens = 12;
    o.weighting = WEIGHT_ZERO_NEGATIVE;
    for (uint32_t ep = 1; ep <= 5; ep += 4) {
        struct problem p;
        struct result got, want;
        problem_make(&p, &o);
        oracle_run(&p, &want);
        run_problem(&p, &(struct run_options){ .harness = { .ranks = ep } }, &got);
        check_result("combine", &p, &got, &want, 1u << RESULT_OUT | 1u << RESULT_D_X);
        result_free(&got);
        result_free(&want);
        problem_free(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(report_5_every_subset_of_experts_empty_neither_hangs_nor_errs),
        cmocka_unit_test(report_7_ranks_without_tokens),
        cmocka_unit_test(report_8_id_minus_one_is_no_index_and_other_strays_are_refused),
        cmocka_unit_test(report_9_duplicate_experts_in_a_token_count_a_slot_each),
        cmocka_unit_test(report_10_no_white_list_of_topk_and_hidden),
        cmocka_unit_test(report_11_any_share_of_masked_slots),
        cmocka_unit_test(report_12_offsets_beyond_32_bits),
        cmocka_unit_test(report_13_stale_memory_never_reaches_a_result),
        cmocka_unit_test(report_14_weight_gradients_of_an_expert_without_rows),
        cmocka_unit_test(report_15_nothing_is_written_beyond_the_callers_tensors),
        cmocka_unit_test(report_16_mxfp8_at_hidden_2880),
        cmocka_unit_test(report_17_the_query_is_exact_and_a_thousand_layers_leave_nothing),
        cmocka_unit_test(report_18_the_routers_gradient_alone),
        cmocka_unit_test(report_19_two_runs_give_the_same_bits_under_random_delays),
        cmocka_unit_test(report_20_weight_gradients_are_summed_in_fp32_over_macrobatches),
        cmocka_unit_test(report_21_combine_loses_no_precision),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
