/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA engine's MXFP8 forward through the common interface: x quantised bit for bit as mx.h says, whole layers
 * within the bound of a reference with E4M3 operands, bits that no setting changes. Skipped where there is no GPU.
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

static void check_layer(const char *what, const struct problem *p, const uint16_t *out)
{
    struct result want, reference, got;

    result_alloc(p, &got);
    for (size_t i = 0; i < problem_rows_elements(p); i++)
        got.array[RESULT_OUT][i] = (double)bf16_to_float(out[i]);
    oracle_run(p, &want);
    reference_run_mx(p, MX_SCALE, false, &reference);
    double error = result_error(&got, &want, RESULT_OUT), expected = result_error(&reference, &want, RESULT_OUT);
    if (getenv("MOK_TEST_PRINT_ERRORS"))
        print_message("%s: error %.3e, reference %.3e; between them %.3e\n", what, error, expected,
                      result_error(&got, &reference, RESULT_OUT));
    if (!(error <= error_bound(expected, want.count[RESULT_OUT]) && error >= 0.3 * expected))
        fail_msg("%s: error %g, a reference with E4M3 operands reaches %g", what, error, expected);
    result_free(&want);
    result_free(&reference);
    result_free(&got);
}

static const struct problem_options layers[] = {
    { .hidden = 336,
      .intermediate = 208,
      .experts = 8,
      .topk = 3,
      .tokens = FEWER(500, 90),
      .shared_intermediate = 80,
      .routing = ROUTE_ZIPF,
      .masked = 0.1,
      .seed = 11 },
    { .hidden = 256, .intermediate = 512, .experts = 4, .topk = 2, .tokens = FEWER(300, 70), .seed = 12 },
    { .hidden = 80,
      .intermediate = 144,
      .experts = 8,
      .topk = 5,
      .tokens = FEWER(130, 50),
      .clamp = 0.9f,
      .weighting = WEIGHT_ZERO_NEGATIVE,
      .seed = 13 },
    { .hidden = 16, .intermediate = 16, .experts = 4, .topk = 1, .tokens = 40, .shared_intermediate = 16, .seed = 14 },
    { .hidden = 8336, .intermediate = 16, .experts = 4, .topk = 1, .tokens = 10, .seed = 15 }, /* rows of two pieces */
};

/* Each MX_SCALE of a row get the same largest value, so that all columns of a tile have one scale. */
static void even_scales(const struct problem *p, uint16_t *weights, uint32_t columns)
{
    uint64_t count = (uint64_t)p->experts * problem_expert_elements(p);

    for (uint64_t i = 0; i < count; i++)
        if (i % columns % MX_SCALE == 0)
            weights[i] = 0x3f80; /* 1 */
}

static void make(struct problem *p, size_t i)
{
    problem_make(p, &layers[i]);
    if (i == 1) {
        even_scales(p, p->gate, p->hidden);
        even_scales(p, p->up, p->hidden);
        even_scales(p, p->down, p->intermediate);
    }
    problem_quantise_weights(p, MX_SCALE);
}

static void layers_are_within_the_bound_of_e4m3_operands(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(layers) / sizeof(layers[0]); i++)
        for (uint32_t ep = 1; ep <= (i == 0 ? 4u : FEWER(4u, 1u)); ep *= 4) {
            uint32_t tokens[DEVICE_MAX_RANKS];
            struct rng rng = { ep };
            char what[80];
            struct problem p;
            uint16_t *out;

            make(&p, i);
            problem_cut(p.tokens, ep, &rng, tokens);
            out = forward(&p, &(struct device_options){ .ranks = ep, .precision = MX }, tokens);
            snprintf(what, sizeof(what), "layer %zu at EP %u", i, ep);
            check_layer(what, &p, out);
            free(out);
            problem_free(&p);
        }
}

static void no_setting_changes_a_bit(void **state)
{
    static const struct device_options others[] = {
        { .ranks = 1, .minibatch_rows = 64, .precision = MX },
        { .ranks = 1, .ring_rows = 128, .precision = MX },
        { .ranks = 1, .blocks = 2, .precision = MX },
        { .ranks = 1, .chaos_delay_us = 30, .precision = MX, .context_mode = MOK_CONTEXT_FULL },
        { .ranks = 2, .precision = MX },
        { .ranks = 4, .ring_rows = 64, .precision = MX, .context_mode = MOK_CONTEXT_FULL },
    };
    struct problem p;
    uint16_t *want;

    (void)state;
    make(&p, 0);
    want = forward(&p, &(struct device_options){ .ranks = 1, .precision = MX }, &p.tokens);
    for (size_t i = FEWER(0, 1); i < sizeof(others) / sizeof(others[0]); i += FEWER(1, 2)) {
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

/* Magnitudes at both ends, zeros, NaN and infinities of both signs, ties between codes. */
static void strange_values(struct problem *p)
{
    static const uint16_t odd[] = { 0x7fc0, 0xffc1, 0x7f80, 0xff80, 0x7f7f, 0xff7f, 0x0001, 0x8001, 0x0080, 0x8000 };

    for (size_t i = 0; i < problem_rows_elements(p); i++) {
        uint32_t token = (uint32_t)(i / p->hidden);
        uint16_t *v = &p->x[i];

        if (token % 8 == 1)
            *v = 0;
        else if (token % 8 == 2)
            *v = (uint16_t)(i * 40503u >> 3); /* any bits */
        else if (token % 8 == 3)
            *v = (uint16_t)((i * 40503u >> 5 & 0x80ffu)); /* about the smallest */
        else if (token % 8 == 4)
            *v = (uint16_t)(0x4300u + (i * 7u & 0xffu)); /* ties */
        else if (token % 8 == 5 && i % 37 == 0)
            *v = odd[i / 37 % (sizeof(odd) / sizeof(odd[0]))];
    }
}

static void x_is_quantised_bit_for_bit(void **state)
{
    const uint32_t hidden[] = { 16, 80, 336, 2064 };

    (void)state;
    for (size_t n = 0; n < sizeof(hidden) / sizeof(hidden[0]); n++) {
        const uint32_t tokens = 40;
        uint64_t scales = mok_mx_scales(hidden[n]), row_bytes = (hidden[n] + scales + 127) / 128 * 128;
        uint8_t *got = malloc(row_bytes), *code = malloc(hidden[n]), *scale = malloc(scales);
        float *values = malloc(hidden[n] * sizeof(*values));
        struct device_group group;
        struct problem p;

        problem_make(
            &p, &(struct problem_options){
                    .hidden = hidden[n], .intermediate = 16, .experts = 2, .topk = 1, .tokens = tokens, .seed = n });
        strange_values(&p);
        device_group_open(&group, &p, &(struct device_options){ .ranks = 1, .precision = MX }, &p.tokens);
        assert_int_equal(device_phase(&group, 0, MOK_PHASE_PREPARE).status, 0);
        for (uint32_t t = 0; t < tokens; t++) {
            const uint8_t *at = (const uint8_t *)group.symmetric[0].at + group.plan[0].sym_engine + t * row_bytes;

            for (uint32_t i = 0; i < hidden[n]; i++)
                values[i] = mok_bf16_to_f32(p.x[(size_t)t * hidden[n] + i]);
            mok_mx_quantize_row(values, hidden[n], MX_SCALE, code, scale);
            assert_int_equal(cudaMemcpy(got, at, row_bytes, cudaMemcpyDeviceToHost), 0);
            if (memcmp(got, code, hidden[n]) != 0)
                for (uint32_t i = 0; i < hidden[n]; i++)
                    if (got[i] != code[i])
                        fail_msg("hidden %u, token %u: code %u of %#x is %#x, must be %#x", hidden[n], t, i,
                                 p.x[(size_t)t * hidden[n] + i], got[i], code[i]);
            assert_memory_equal(got + hidden[n], scale, scales);
        }
        device_group_close(&group);
        problem_free(&p);
        free(values);
        free(scale);
        free(code);
        free(got);
    }
}

/* NaN of one token is that token's alone. */
static void what_is_not_finite_stays_with_its_token(void **state)
{
    struct problem p;
    uint16_t *out;

    (void)state;
    make(&p, 1);
    p.x[7 * p.hidden + 5] = 0x7fc0;
    p.x[60 * p.hidden] = 0xff80;
    out = forward(&p, &(struct device_options){ .ranks = 1, .precision = MX }, &p.tokens);
    for (uint32_t t = 0; t < p.tokens; t++)
        for (uint32_t i = 0; i < p.hidden; i++) {
            bool nan = (out[(size_t)t * p.hidden + i] & 0x7fffu) > 0x7f80u;
            if (nan != (t == 7 || t == 60))
                fail_msg("token %u, column %u is %s", t, i, nan ? "NaN" : "a number");
        }
    free(out);
    problem_free(&p);
}

static void every_number_of_experts_is_right(void **state)
{
#ifdef MAX_EP
    const uint32_t step = 129;
#else
    const uint32_t step = 1;
#endif
    (void)state;
    for (uint32_t experts = 1; experts <= 130; experts += step) {
        struct problem p;
        char what[40];
        uint16_t *out;

        problem_make(&p, &(struct problem_options){ .hidden = 32,
                                                    .intermediate = 48,
                                                    .experts = experts,
                                                    .topk = 2,
                                                    .tokens = FEWER(70, 40),
                                                    .routing = ROUTE_DUPLICATES,
                                                    .seed = experts });
        problem_quantise_weights(&p, MX_SCALE);
        out = forward(&p, &(struct device_options){ .ranks = 1, .precision = MX }, &p.tokens);
        snprintf(what, sizeof(what), "%u experts", experts);
        check_layer(what, &p, out);
        free(out);
        problem_free(&p);
    }
}

static void repeated_forwards_have_the_same_bits(void **state)
{
    struct device_group group;
    uint16_t *want;
    struct problem p;

    (void)state;
    make(&p, 0);
    want = forward(&p, &(struct device_options){ .ranks = 1, .precision = MX }, &p.tokens);
    device_group_open(&group, &p,
                      &(struct device_options){ .ranks = 1, .chaos_delay_us = 3, .precision = MX },
                      &p.tokens);
    device_repeat_forward(&group, want, FEWER(REPEATS, 2));
    device_group_close(&group);
    free(want);
    problem_free(&p);
}

/* Halves the codes of a row of 1 and -1 and doubles its scales. */
static void say_otherwise(struct device_group *group, uint32_t weight, uint64_t row, uint32_t columns)
{
    const uint64_t scales = mok_mx_scales(columns);
    uint8_t *code = (uint8_t *)group->params[0][weight].at + row * columns, *scale = (uint8_t *)group->scales[0][weight].at + row * scales;
    uint8_t *bytes = malloc(columns + scales);

    assert_non_null(bytes);
    assert_int_equal(cudaMemcpy(bytes, code, columns, cudaMemcpyDeviceToHost), 0);
    assert_int_equal(cudaMemcpy(bytes + columns, scale, scales, cudaMemcpyDeviceToHost), 0);
    for (uint32_t i = 0; i < columns; i++) {
        assert_int_equal(bytes[i] & 0x7fu, 0x78u); /* 256 */
        bytes[i] -= 8;
    }
    for (uint64_t i = 0; i < scales; i++)
        bytes[columns + i]++;
    assert_int_equal(cudaMemcpy(code, bytes, columns, cudaMemcpyHostToDevice), 0);
    assert_int_equal(cudaMemcpy(scale, bytes + columns, scales, cudaMemcpyHostToDevice), 0);
    free(bytes);
}

static void check_all_scales_are_equal(struct device_group *group, uint32_t weight, uint64_t count)
{
    uint8_t *scale = malloc(count);

    assert_non_null(scale);
    assert_int_equal(cudaMemcpy(scale, group->scales[0][weight].at, count, cudaMemcpyDeviceToHost), 0);
    for (uint64_t i = 0; i < count; i++)
        assert_int_equal(scale[i], scale[0]);
    free(scale);
}

/* Whether a tile's columns have one scale is nothing that the result knows. */
static void a_row_of_weights_with_another_scale_changes_no_bit(void **state)
{
    struct device_group group;
    uint16_t *want, *got;
    struct problem p;

    (void)state;
    problem_make(&p, &layers[1]);
    even_scales(&p, p.gate, p.hidden);
    even_scales(&p, p.up, p.hidden);
    even_scales(&p, p.down, p.intermediate);
    const uint64_t gate_row = p.intermediate + 200, down_row = 2ull * p.hidden + 7;
    for (uint32_t i = 0; i < p.hidden; i++)
        p.gate[gate_row * p.hidden + i] = i % 3 ? 0x3f80 : 0xbf80;
    for (uint32_t i = 0; i < p.intermediate; i++)
        p.down[down_row * p.intermediate + i] = i % 5 ? 0x3f80 : 0xbf80;
    device_group_open(&group, &p, &(struct device_options){ .ranks = 1, .precision = MX }, &p.tokens);
    check_all_scales_are_equal(&group, 0, (uint64_t)p.experts * p.intermediate * mok_mx_scales(p.hidden));
    check_all_scales_are_equal(&group, 2, (uint64_t)p.experts * p.hidden * mok_mx_scales(p.intermediate));
    device_forward(&group);
    want = device_out(&group);
    say_otherwise(&group, 0, gate_row, p.hidden);
    say_otherwise(&group, 2, down_row, p.intermediate);
    device_forward(&group);
    got = device_out(&group);
    assert_memory_equal(got, want, problem_rows_elements(&p) * sizeof(*want));
    free(got);
    free(want);
    device_group_close(&group);
    problem_free(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(x_is_quantised_bit_for_bit),
        cmocka_unit_test(layers_are_within_the_bound_of_e4m3_operands),
        cmocka_unit_test(no_setting_changes_a_bit),
        cmocka_unit_test(what_is_not_finite_stays_with_its_token),
        cmocka_unit_test(every_number_of_experts_is_right),
        cmocka_unit_test(repeated_forwards_have_the_same_bits),
        cmocka_unit_test(a_row_of_weights_with_another_scale_changes_no_bit),
    };
    const struct CMUnitTest in_short[] = {
        cmocka_unit_test(x_is_quantised_bit_for_bit),
        cmocka_unit_test(what_is_not_finite_stays_with_its_token),
    };

    device_or_skip();
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return MX_IN_SHORT ? cmocka_run_group_tests(in_short, NULL, NULL) : cmocka_run_group_tests(tests, NULL, NULL);
}
