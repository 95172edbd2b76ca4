/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA engine's MXFP8 backward through the common interface: every gradient within the bound of a reference with
 * E4M3 operands, in every context mode, ring and EP degree; bits that no setting changes; d_out quantised bit for bit;
 * strange values. Skipped where there is no GPU.
 */
#include <math.h>
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
#include "mx/bf16.h"
#include "mx/mx.h"
#include "plain_bf16.h"

/* An emulated GPU is slow. */
#ifdef MAX_EP
#define FEWER(many, few) few
#else
#define REPEATS 200
#define FEWER(many, few) many
#endif
#define WHOLE 4096u /* workspaces are multiples of it */
#define SHARED ((1u << RESULT_D_SHARED_GATE) | (1u << RESULT_D_SHARED_UP) | (1u << RESULT_D_SHARED_DOWN))

static const struct problem_options layers[] = {
    { .hidden = 336,
      .intermediate = 208,
      .experts = 8,
      .topk = 3,
      .tokens = FEWER(500, 50),
      .shared_intermediate = 80,
      .routing = ROUTE_ZIPF,
      .weighting = WEIGHT_ZERO_NEGATIVE,
      .masked = 0.1,
      .allowed_experts = 0xbf,
      .seed = 11 },
    { .hidden = 256, .intermediate = 512, .experts = 4, .topk = 2, .tokens = FEWER(300, 40), .seed = 12 },
    { .hidden = 80, .intermediate = 144, .experts = 8, .topk = 5, .tokens = FEWER(130, 30), .clamp = 0.9f, .seed = 13 },
    { .hidden = 16, .intermediate = 16, .experts = 4, .topk = 1, .tokens = 40, .shared_intermediate = 16, .seed = 14 },
};

/* Experts of more rows than a tile of scales has, which rings cut. */
static const struct problem_options long_layer = { .hidden = 48, .intermediate = 32, .experts = 2, .topk = 1, .tokens = 330, .seed = 15 };

static void make(struct problem *p, size_t i)
{
    problem_make(p, &layers[i]);
    problem_quantise_weights(p, MX_SCALE);
}

static void run(struct device_group *g, const struct problem *p, const struct device_options *options,
                const uint32_t *tokens, float start)
{
    device_group_open(g, p, options, tokens);
    device_forward(g);
    device_backward(g, start);
    device_check_canaries(g);
}

static void check_layer(const char *name, const struct problem *p, const struct device_options *options,
                        const uint32_t *tokens, float start)
{
    struct device_group group;
    struct result got, want;
    char what[160];
    uint16_t *out;

    snprintf(what, sizeof(what), "%s at EP %u, ring rows %llu, context %u, flags %u, start %g, %s weight gradients", name,
             options->ranks, (unsigned long long)options->ring_rows, options->context_mode, options->flags,
             (double)start, options->mxfp8_wgrad ? "MXFP8" : "BF16");
    run(&group, p, options, tokens, start);
    device_gradients(&group, start, &got);
    out = device_out(&group);
    for (size_t i = 0; i < problem_rows_elements(p); i++)
        got.array[RESULT_OUT][i] = (double)bf16_to_float(out[i]);
    check_against_mx_oracle(what, p, &got, MX, options->mxfp8_wgrad);
    if (p->shared_intermediate) {
        result_alloc(p, &want);
        oracle_run(p, &want);
        check_result(what, p, &got, &want, SHARED);
        result_free(&want);
    }
    free(out);
    result_free(&got);
    device_group_close(&group);
}

/* Layer `i`, its tokens dealt to the ranks by chance. */
static void check_known_layer(size_t i, uint64_t seed, const struct device_options *way)
{
    uint32_t tokens[DEVICE_MAX_RANKS];
    struct rng rng = { seed };
    char name[20];
    struct problem p;

    make(&p, i);
    problem_cut(p.tokens, way->ranks, &rng, tokens);
    snprintf(name, sizeof(name), "layer %zu", i);
    check_layer(name, &p, way, tokens, 0);
    problem_free(&p);
}

static void layers_are_within_the_bound_of_e4m3_operands(void **state)
{
    static const struct device_options ways[] = {
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .flags = MOK_OPF_OVERWRITE_WGRAD },
        { .ranks = 2, .context_mode = MOK_CONTEXT_RECOMPUTE, .precision = MX, .ring_rows = 64 },
        { .ranks = 4, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .ring_rows = 128, .bf16_gradients = true },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(layers) / sizeof(layers[0]); i += FEWER(1, 2))
        for (size_t n = FEWER(0u, (i == 0 ? 2u : 0u)); n < FEWER(3u, (i == 0 ? 3u : 1u)); n++)
            check_known_layer(i, n + 1, &ways[n]);
}

/* Tiles' scales differ from those of the rows that a reference has: weights are made so that both are the same. */
static void weights_in_tiles_are_turned_exactly(void **state)
{
    struct problem p;

    (void)state;
    problem_make(&p, &layers[1]);
    uint64_t count = (uint64_t)p.experts * problem_expert_elements(&p);
    for (uint64_t i = 0; i < count; i++) {
        if (i % p.hidden % 128 == 0)
            p.gate[i] = p.up[i] = 0x3f80; /* 1 */
        if (i % p.intermediate % 128 == 0)
            p.down[i] = 0x3f80;
    }
    problem_quantise_weights(&p, 128);
    check_layer(
        "tiles", &p,
        &(struct device_options){ .ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE, .precision = MX, .tiles = true },
        &p.tokens, 0);
    problem_free(&p);
}

/*
 * Weights that come transposed give the bits of those that the engine turns, whatever it does beside; and there is no
 * room for turned ones then.
 */
static void weights_that_come_transposed_change_no_bit(void **state)
{
    struct device_options ways[] = {
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .tiles = true },
        { .ranks = 2, .context_mode = MOK_CONTEXT_RECOMPUTE, .precision = MX, .tiles = true, .ring_rows = 64 },
    };

    (void)state;
    if (MX_SCALE != 128)
        skip();
    for (size_t i = FEWER(0, 2); i < 3; i++)
        for (size_t n = FEWER(0, 1); n < 2; n++) {
            uint32_t tokens[DEVICE_MAX_RANKS];
            struct rng rng = { n + 1 };
            uint64_t private_bytes[2];
            uint8_t *got[2];
            struct problem p;
            size_t size;

            problem_make(&p, &layers[i]);
            problem_cut(p.tokens, ways[n].ranks, &rng, tokens);
            for (int t = 0; t < 2; t++) {
                struct device_group group;

                ways[n].transposed = t == 1;
                run(&group, &p, &ways[n], tokens, 0.25f);
                got[t] = device_gradient_bytes(&group, &size);
                private_bytes[t] = group.plan[0].private_bytes;
                device_group_close(&group);
            }
            assert_memory_equal(got[0], got[1], size);
            assert_true(private_bytes[1] + 3 * problem_expert_elements(&p) * (p.experts / ways[n].ranks) <
                        private_bytes[0] + WHOLE);
            free(got[0]);
            free(got[1]);
            problem_free(&p);
        }
}

/* A tile's transposed codes have one scale; where its rows have several, d_x says so. */
static void transposed_weights_that_are_not_in_tiles_give_nan(void **state)
{
    struct device_group group;
    struct result result;
    struct problem p;

    (void)state;
    if (MX_SCALE != 128)
        skip();
    problem_make(&p, &layers[1]);
    for (uint32_t i = 0; i < p.hidden; i++) /* one row, of one expert's gate */
        p.gate[5 * p.hidden + i] = bf16_from_float(1000.0f);
    run(&group, &p,
        &(struct device_options){
            .ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE, .precision = MX, .transposed = true },
        &p.tokens, 0);
    device_gradients(&group, 0, &result);
    for (uint32_t t = 0; t < p.tokens; t++) {
        bool nan = isnan(result.array[RESULT_D_X][(size_t)t * p.hidden]);

        for (uint32_t k = 0; k < p.topk; k++)
            assert_true(nan || p.ids[t * p.topk + k] != 0);
    }
    result_free(&result);
    device_group_close(&group);
    problem_free(&p);
}

static void gradients_are_added_to_what_is_stored(void **state)
{
    struct problem p;

    (void)state;
    make(&p, 3);
    check_layer("added", &p, &(struct device_options){ .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX },
                &p.tokens, 0.5f);
    problem_free(&p);
}

static uint8_t *bits(const struct problem *p, const struct device_options *options, const uint32_t *tokens,
                     size_t *ret_size)
{
    struct device_group group;
    uint8_t *bytes;

    run(&group, p, options, tokens, 0.25f);
    bytes = device_gradient_bytes(&group, ret_size);
    device_group_close(&group);
    return bytes;
}

/* All of `others`, or on an emulated GPU the one at `few`. */
static void have_the_bits_of(const struct problem_options *layer, const struct device_options *plain,
                             const struct device_options *others, size_t count, size_t few)
{
    struct problem p;
    size_t size, same;
    uint8_t *want;

    (void)few;
    problem_make(&p, layer);
    problem_quantise_weights(&p, MX_SCALE);
    want = bits(&p, plain, &p.tokens, &size);
    /* gradients of the shared expert, the last ones, are sums over a rank's own tokens */
    same = size - 3 * (size_t)p.shared_intermediate * p.hidden * 4;
    for (size_t i = FEWER(0, few); i < count; i += FEWER(1, count)) {
        uint32_t tokens[DEVICE_MAX_RANKS];
        struct rng rng = { i + 1 };
        uint8_t *got;
        size_t got_size;

        problem_cut(p.tokens, others[i].ranks, &rng, tokens);
        got = bits(&p, &others[i], tokens, &got_size);
        if (memcmp(got, want, others[i].ranks == 1 ? size : same) != 0)
            fail_msg("setting %zu: other bits", i);
        free(got);
    }
    free(want);
    problem_free(&p);
}

static void no_setting_changes_a_bit(void **state)
{
    static const struct device_options plain = { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX };
    static const struct device_options others[] = {
        { .ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE, .precision = MX, .chaos_delay_us = 20 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .ring_rows = 128, .yield_us = 1 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .minibatch_rows = 64 },
        { .ranks = 4, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .ring_rows = 64, .chaos_delay_us = 10 },
        { .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .blocks = 2 },
        { .ranks = 2, .context_mode = MOK_CONTEXT_RECOMPUTE, .precision = MX, .blocks = 2 },
    };

    (void)state;
    have_the_bits_of(&layers[0], &plain, others, sizeof(others) / sizeof(others[0]), 3);
}

static void a_rank_without_tokens_takes_part(void **state)
{
    const uint32_t tokens[2] = { 0, 40 };
    struct problem p;

    (void)state;
    make(&p, 3);
    check_layer("a rank without tokens", &p,
                &(struct device_options){
                    .ranks = 2, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .flags = MOK_OPF_OVERWRITE_WGRAD },
                tokens, 0);
    problem_free(&p);
}

/* What makes a row of d_out: NaN, infinities, zeros, both ends of the range. */
static void strange_rows(struct problem *p)
{
    static const uint16_t odd[] = { 0x7fc0, 0xffc1, 0x7f80, 0xff80, 0x7f7f, 0x0001, 0x0080, 0x8000 };

    for (size_t i = 0; i < problem_rows_elements(p); i++) {
        uint32_t token = (uint32_t)(i / p->hidden);

        if (token == 9)
            p->d_out[i] = 0;
        else if (token == 12)
            p->d_out[i] = (uint16_t)(0x4300u + (i * 7u & 0xffu)); /* ties between codes */
        else if (token == 15)
            p->d_out[i] = (uint16_t)(i * 40503u >> 5 & 0x80ffu); /* about the smallest */
        else if (token == 17 && i % 37 == 0)
            p->d_out[i] = odd[i / 37 % (sizeof(odd) / sizeof(odd[0]))];
    }
}

/* d_out's codes and scales are mx.h's; NaN of one token is that token's alone; zeros give zeros. */
static void strange_values_stay_with_their_token(void **state)
{
    const size_t row_bytes = (layers[1].hidden + layers[1].hidden / 32 + 127) / 128 * 128;
    uint8_t got[512], code[256], scale[8];
    struct device_group group;
    struct result result;
    struct problem p;
    float values[256];

    (void)state;
    make(&p, 1);
    strange_rows(&p);
    run(&group, &p,
        &(struct device_options){
            .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .flags = MOK_OPF_OVERWRITE_WGRAD },
        &p.tokens, 0);
    for (uint32_t t = 0; t < p.tokens; t++) {
        const uint8_t *at =
            (const uint8_t *)group.symmetric[0].at + group.plan[0].sym_engine + ((size_t)p.tokens + t) * row_bytes;

        for (uint32_t i = 0; i < p.hidden; i++)
            values[i] = mok_bf16_to_f32(p.d_out[(size_t)t * p.hidden + i]);
        mok_mx_quantize_row(values, p.hidden, MX_SCALE, code, scale);
        assert_int_equal(cudaMemcpy(got, at, row_bytes, cudaMemcpyDeviceToHost), 0);
        assert_memory_equal(got, code, p.hidden);
        assert_memory_equal(got + p.hidden, scale, sizeof(scale));
    }
    device_gradients(&group, 0, &result);
    for (size_t i = 0; i < problem_rows_elements(&p); i++) {
        const double value = result.array[RESULT_D_X][i];
        const size_t token = i / p.hidden;

        if ((value != value) != (token == 17) || (token == 9 && value != 0))
            fail_msg("d_x of token %zu, column %zu is %g", token, i % p.hidden, value);
    }
    result_free(&result);
    device_group_close(&group);
    problem_free(&p);
}

static void repeated_backwards_have_the_same_bits(void **state)
{
    struct device_group group;
    uint8_t *want;
    struct problem p;
    size_t size;

    (void)state;
    make(&p, FEWER(0, 2));
    run(&group, &p,
        &(struct device_options){ .ranks = 1,
                                  .context_mode = MOK_CONTEXT_FULL,
                                  .precision = MX,
                                  .chaos_delay_us = 3,
                                  .flags = MOK_OPF_OVERWRITE_WGRAD },
        &p.tokens, 0);
    want = device_gradient_bytes(&group, &size);
    device_repeat_backward(&group, false, want, FEWER(REPEATS, 1));
    device_group_close(&group);
    free(want);
    problem_free(&p);
}

static void check_numbers_of_experts(const struct device_options *way, uint32_t first, uint32_t last)
{
    for (uint32_t experts = first; experts <= last; experts++) {
        struct problem p;
        char name[40];

        problem_make(&p, &(struct problem_options){ .hidden = 32,
                                                    .intermediate = 48,
                                                    .experts = experts,
                                                    .topk = 2,
                                                    .tokens = FEWER(70, 20),
                                                    .routing = ROUTE_DUPLICATES,
                                                    .seed = experts });
        problem_quantise_weights(&p, MX_SCALE);
        snprintf(name, sizeof(name), "%u experts", experts);
        check_layer(name, &p, way, &p.tokens, 0);
        problem_free(&p);
    }
}

static void every_number_of_experts_is_right(void **state)
{
    static const struct device_options way = {
        .ranks = 1, .context_mode = MOK_CONTEXT_FULL, .precision = MX, .flags = MOK_OPF_OVERWRITE_WGRAD
    };

    (void)state;
    check_numbers_of_experts(&way, FEWER(1, 130), 130);
}

/* ---- weight gradients that are MXFP8, too ---- */

#define MXFP8(...) { .precision = MX, .mxfp8_wgrad = true, __VA_ARGS__ }

static void mxfp8_weight_gradients_are_within_their_bound(void **state)
{
    static const struct device_options ways[] = {
        MXFP8(.ranks = 1, .context_mode = MOK_CONTEXT_FULL, .flags = MOK_OPF_OVERWRITE_WGRAD),
        MXFP8(.ranks = 2, .context_mode = MOK_CONTEXT_RECOMPUTE, .ring_rows = 128),
        MXFP8(.ranks = 4, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 256, .bf16_gradients = true),
    };

    (void)state;
    for (size_t i = FEWER(0, 2); i < sizeof(layers) / sizeof(layers[0]); i += FEWER(1, 2))
        for (size_t n = FEWER(0u, 1u); n < FEWER(3u, 2u); n++)
            check_known_layer(i, n + 1, &ways[n]);
}

static void mxfp8_weight_gradients_are_added_to_what_is_stored(void **state)
{
    static const struct device_options way = MXFP8(.ranks = 1, .context_mode = MOK_CONTEXT_FULL);
    struct problem p;

    (void)state;
    make(&p, 3);
    check_layer("added", &p, &way, &p.tokens, 0.5f);
    problem_free(&p);
}

static void no_setting_changes_a_bit_of_them(void **state)
{
    static const struct device_options plain = MXFP8(.ranks = 1, .context_mode = MOK_CONTEXT_FULL);
    static const struct device_options others[] = {
        MXFP8(.ranks = 1, .context_mode = MOK_CONTEXT_RECOMPUTE, .chaos_delay_us = 20),
        MXFP8(.ranks = 2, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 128, .chaos_delay_us = 10),
        MXFP8(.ranks = 1, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 256, .yield_us = 1),
        MXFP8(.ranks = 1, .context_mode = MOK_CONTEXT_FULL, .ring_rows = 128),
        MXFP8(.ranks = 2, .context_mode = MOK_CONTEXT_RECOMPUTE, .blocks = 2, .minibatch_rows = 64),
    };

    (void)state;
    have_the_bits_of(&long_layer, &plain, others, sizeof(others) / sizeof(others[0]), 1);
}

static void every_number_of_experts_has_them(void **state)
{
    static const struct device_options way =
        MXFP8(.ranks = 1, .context_mode = MOK_CONTEXT_FULL, .flags = MOK_OPF_OVERWRITE_WGRAD);

    (void)state;
    check_numbers_of_experts(&way, FEWER(1, 19), FEWER(130, 19));
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_are_within_the_bound_of_e4m3_operands),
        cmocka_unit_test(weights_in_tiles_are_turned_exactly),
        cmocka_unit_test(weights_that_come_transposed_change_no_bit),
        cmocka_unit_test(transposed_weights_that_are_not_in_tiles_give_nan),
        cmocka_unit_test(gradients_are_added_to_what_is_stored),
        cmocka_unit_test(no_setting_changes_a_bit),
        cmocka_unit_test(a_rank_without_tokens_takes_part),
        cmocka_unit_test(strange_values_stay_with_their_token),
        cmocka_unit_test(repeated_backwards_have_the_same_bits),
        cmocka_unit_test(every_number_of_experts_is_right),
        cmocka_unit_test(mxfp8_weight_gradients_are_within_their_bound),
        cmocka_unit_test(mxfp8_weight_gradients_are_added_to_what_is_stored),
        cmocka_unit_test(no_setting_changes_a_bit_of_them),
        cmocka_unit_test(every_number_of_experts_has_them),
    };
    const struct CMUnitTest in_short[] = {
        cmocka_unit_test(gradients_are_added_to_what_is_stored),
        cmocka_unit_test(a_rank_without_tokens_takes_part),
        cmocka_unit_test(strange_values_stay_with_their_token),
        cmocka_unit_test(mxfp8_weight_gradients_are_added_to_what_is_stored),
        cmocka_unit_test(no_setting_changes_a_bit_of_them),
    };

    device_or_skip();
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return MX_IN_SHORT ? cmocka_run_group_tests(in_short, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
