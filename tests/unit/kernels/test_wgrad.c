/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 weight gradients: which values their operands have, by a model that shares nothing with the product; that
 * nothing else of a backward changes; that no cut of an expert's rows shows; every number of experts.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "harness.h"
#include "host/host.h"
#include "mx_model.h"
#include "plain_bf16.h"

static const struct problem_options options[] = {
    { .hidden = 144,
      .intermediate = 48,
      .experts = 4,
      .topk = 2,
      .tokens = 290,
      .routing = ROUTE_ZIPF,
      .weighting = WEIGHT_ZERO_NEGATIVE,
      .masked = 0.2,
      .shared_intermediate = 32,
      .seed = 71 },
    { .hidden = 32, .intermediate = 144, .experts = 8, .topk = 1, .tokens = 330, .allowed_experts = 0xbf, .seed = 72 },
};
#define PROBLEMS (sizeof(options) / sizeof(options[0]))

#ifdef MOK_SANITIZED
#define EVERY 3        /* cut of the list, each problem others of them */
#define EXPERTS_STEP 7 /* odd: both precisions in turn */
#else
#define EVERY 1
#define EXPERTS_STEP 1
#endif
#define WGRADS (1u << RESULT_D_GATE | 1u << RESULT_D_UP | 1u << RESULT_D_DOWN)

static const uint32_t precisions[] = { MOK_MXFP8_PER32, MOK_MXFP8_PER128 };
static struct problem problem[2][PROBLEMS]; /* of each precision */

static int setup(void **state)
{
    (void)state;
    for (size_t q = 0; q < 2; q++)
        for (size_t i = 0; i < PROBLEMS; i++) {
            problem_make(&problem[q][i], &options[i]);
            problem_quantise_weights(&problem[q][i], precisions[q] == MOK_MXFP8_PER32 ? 32 : 128);
        }
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    for (size_t q = 0; q < 2; q++)
        for (size_t i = 0; i < PROBLEMS; i++)
            problem_free(&problem[q][i]);
    return 0;
}

/* ------------------------------------------------------------------ operands */

/* Rows of codes with scales at both ends of what there is, of NaN too, and what they are as operands, in FP64. */
struct operand {
    uint64_t rows, columns;
    uint8_t *code, *scale;
    double *value;
};

static void *must(void *memory)
{
    assert_non_null(memory);
    return memory;
}

static int tile_exponent(const struct operand *o, uint64_t row, uint64_t column, uint32_t group)
{
    uint64_t blocks = (o->columns + 31) / 32;
    int largest = 0;

    for (uint64_t r = row; r < o->rows && r < row + group; r++)
        for (uint64_t b = column / 32; b < blocks && b < (column + group) / 32; b++)
            if (o->scale[r * blocks + b] != 255 && o->scale[r * blocks + b] > largest)
                largest = o->scale[r * blocks + b];
    return largest - 127;
}

static void operand_make(struct operand *o, uint64_t rows, uint64_t columns, uint32_t group, bool nan, struct rng *rng)
{
    uint64_t blocks = (columns + 31) / 32;

    *o = (struct operand){ rows, columns, must(malloc(rows * columns)), must(malloc(rows * blocks)),
                           must(calloc(rows * columns, sizeof(double))) };
    for (uint64_t r = 0; r < rows; r++)
        for (uint64_t b = 0; b < blocks; b++) {
            /* neighbours of one size, of very different ones, zeros */
            uint32_t kind = rng_below(rng, 8);
            bool first = b % (group / 32) == 0;
            uint8_t scale = (uint8_t)(kind < 5 ? 120 + rng_below(rng, 6) : kind < 7 ? 90 + rng_below(rng, 40) : 0);
            if (nan && rng_below(rng, 40) == 0)
                scale = 255;
            o->scale[r * blocks + b] = first ? scale : o->scale[r * blocks + b - 1];
        }
    for (uint64_t i = 0; i < rows * columns; i++) {
        uint8_t code = (uint8_t)rng_below(rng, 256);
        o->code[i] = (code & 0x7f) == 0x7f && !nan ? 0 : code;
    }
    for (uint64_t i = 0; i < rows * columns; i++) {
        uint64_t row = i / columns, column = i % columns;
        uint8_t own = o->scale[row * blocks + column / 32];
        int exponent = tile_exponent(o, row / group * group, column / group * group, group);
        double value = own == 255 ? (double)NAN : ldexp(mx_model_decode(o->code[i]), own - 127);
        o->value[i] = ldexp(mx_model_decode(mx_model_encode(ldexp(value, -exponent))), exponent);
    }
}

static void operand_free(struct operand *o)
{
    free(o->code);
    free(o->scale);
    free(o->value);
}

/* got[m][n] against the FP64 sum over rows of a(row, m) * b(row, n), from `start` on. */
static void check_sums(const char *what, const float *got, const struct operand *a, const struct operand *b,
                       float start)
{
    for (uint64_t m = 0; m < a->columns; m++)
        for (uint64_t n = 0; n < b->columns; n++) {
            double sum = (double)start, magnitude = fabs((double)start);
            for (uint64_t r = 0; r < a->rows; r++) {
                double term = a->value[r * a->columns + m] * b->value[r * b->columns + n];
                sum += term;
                magnitude += fabs(term);
            }
            double value = (double)got[m * b->columns + n];
            double bound = (double)(a->rows + 1) * ldexp(magnitude, -24);
            if (isnan(sum) ? !isnan(value) : !(fabs(value - sum) <= bound))
                fail_msg("%s[%llu][%llu] is %g, must be %g within %g", what, (unsigned long long)m,
                         (unsigned long long)n, value, sum, bound);
        }
}

static void operands_have(uint64_t rows, uint32_t hidden, uint32_t intermediate, uint32_t group, bool nan,
                          uint64_t seed)
{
    enum { X, D_OUT, D_A, D_B, H, OPERANDS };
    const uint64_t columns[OPERANDS] = { hidden, hidden, intermediate, intermediate, intermediate };
    const uint64_t elements = (uint64_t)hidden * intermediate, block = MOK_HOST_BLOCK_FLOATS + 1024;
    struct mok_engine engine = { .gemm = mok_gemm_choose() };
    float *memory = must(malloc(4 * block * sizeof(float))), *gradient = must(malloc(3 * elements * sizeof(float)));
    struct mok_host_unit unit = { .engine = &engine,
                                  .weight = { memory, NULL },
                                  .rows = { memory + block, memory + 2 * block },
                                  .out = { memory + 3 * block, NULL } };
    struct operand o[OPERANDS];
    struct rng rng = { seed };

    for (int i = 0; i < OPERANDS; i++)
        operand_make(&o[i], rows, columns[i], group, nan, &rng);
    for (uint64_t i = 0; i < 3 * elements; i++)
        gradient[i] = 0.5f;
    struct mok_host_ffn ffn = {
        .hidden = hidden,
        .intermediate = intermediate,
        .group = group,
        .wgrad_tile = group,
        .d_gate = gradient,
        .d_up = gradient + elements,
        .d_down = gradient + 2 * elements,
        .x = { .data = o[X].code, .scale = o[X].scale, .columns = hidden },
        .g = { .data = o[D_OUT].code, .scale = o[D_OUT].scale, .columns = hidden },
        .h = { o[H].code, o[H].scale, intermediate },
        .d_a = { o[D_A].code, o[D_A].scale, intermediate },
        .d_b = { o[D_B].code, o[D_B].scale, intermediate },
        .weight = memory, /* nobody may apply it again */
    };
    for (uint32_t tile = 0; tile < mok_host_wgrad_tiles(&ffn); tile++)
        mok_host_wgrad(&unit, &ffn, 0, rows, tile);
    check_sums("d_gate", gradient, &o[D_A], &o[X], 0.5f);
    check_sums("d_up", gradient + elements, &o[D_B], &o[X], 0.5f);
    check_sums("d_down", gradient + 2 * elements, &o[D_OUT], &o[H], 0.5f);
    for (int i = 0; i < OPERANDS; i++)
        operand_free(&o[i]);
    free(gradient);
    free(memory);
}

static void operands_are_rounded_for_the_largest_scale_of_their_tile(void **state)
{
    static const uint64_t rows[] = { 1, 33, 129 };

    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        for (uint32_t group = 32; group <= 128; group += 96) {
            operands_have(rows[i], 16, 144, group, false, 80 + i);
            operands_have(rows[i], 144, 16, group, true, 90 + i);
        }
    /* wider than what is staged at once */
    operands_have(3, 2064, 16, 128, false, 100);
    operands_have(260, 16, 16, 128, false, 101);
}

/* ------------------------------------------------------------------ layers */

static struct run_options tokenwise(uint32_t precision)
{
    return (struct run_options){ .start = 0.25f, .layer = { .precision = precision, .mxfp8_wgrad = true } };
}

static void they_are_those_of_a_reference_and_nothing_else_of_a_backward_changes(void **state)
{
    (void)state;
    for (size_t q = 0; q < 2; q++)
        for (size_t i = 0; i < PROBLEMS; i++) {
            struct run_options how = { .layer = { .precision = precisions[q] } };
            struct result bf16, mxfp8;
            char what[60];
            snprintf(what, sizeof(what), "precision %u, problem %zu", precisions[q], i);
            run_problem(&problem[q][i], &how, &bf16);
            how.layer.mxfp8_wgrad = true;
            run_problem(&problem[q][i], &how, &mxfp8);
            check_bitwise(what, &mxfp8, &bf16, CHECK_ALL & ~WGRADS);
            check_against_mx_oracle(what, &problem[q][i], &mxfp8, precisions[q], true);
            for (int a = RESULT_D_GATE; a <= RESULT_D_DOWN; a++)
                if (!(result_error(&mxfp8, &bf16, (enum result_array)a) > 0))
                    fail_msg("%s: %s is that of BF16 operands", what, result_name[a]);
            result_free(&bf16);
            result_free(&mxfp8);
        }
}

static void no_cut_of_an_experts_rows_shows(void **state)
{
    static const struct run_options cuts[] = {
        { .layer = { .minibatch_rows = 128 } },
        { .harness = { .threads = 3 }, .layer = { .ring_tiles = 1 } },
        { .harness = { .threads = 2 }, .layer = { .ring_tiles = 3, .minibatch_rows = 128 } },
        { .context_mode = MOK_CONTEXT_RECOMPUTE, .layer = { .ring_tiles = 2 } },
        { .harness = { .ranks = 2, .threads = 2, .chaos_delay_us = 30 }, .layer = { .ring_tiles = 1 } },
        { .harness = { .ranks = 4 }, .layer = { .ring_tiles = 2 } },
    };

    (void)state;
    for (size_t q = 0; q < 2; q++)
        for (size_t i = 0; i < PROBLEMS; i++) {
            struct run_options plain = tokenwise(precisions[q]);
            struct result want, got;
            run_problem(&problem[q][i], &plain, &want);
            for (size_t c = (q + i) % EVERY; c < sizeof(cuts) / sizeof(cuts[0]); c += EVERY) {
                struct run_options cut = cuts[c];
                char what[60];
                snprintf(what, sizeof(what), "precision %u, problem %zu, cut %zu", precisions[q], i, c);
                cut.start = plain.start;
                cut.layer.precision = precisions[q];
                cut.layer.mxfp8_wgrad = true;
                run_problem(&problem[q][i], &cut, &got);
                check_bitwise(what, &got, &want, cut.harness.ranks > 1 ? CHECK_ANY_EP : CHECK_ALL);
                result_free(&got);
            }
            result_free(&want);
        }
}

static void bf16_gradients_are_the_same_rounded_once(void **state)
{
    const struct problem *p = &problem[1][0];
    struct run_options how = tokenwise(MOK_MXFP8_PER128);
    struct result want, got;

    (void)state;
    run_problem(p, &how, &want);
    how.layer.bf16_gradients = true;
    how.layer.ring_tiles = 2;
    run_problem(p, &how, &got);
    for (int a = RESULT_D_GATE; a < RESULT_COUNT; a++)
        for (size_t i = 0; i < want.count[a]; i++)
            want.array[a][i] = (double)bf16_round((float)want.array[a][i]);
    check_bitwise("BF16", &got, &want, CHECK_ALL);
    result_free(&want);
    result_free(&got);
}

/* Beside BF16 ones: h is rounded once instead of twice, and small values of a tile are. */
static void any_number_of_experts_will_do(void **state)
{
    (void)state;
    for (uint32_t experts = 1; experts <= 130; experts += EXPERTS_STEP) {
        struct problem_options o = { .hidden = 16, .intermediate = 16, .topk = 1, .tokens = 20, .seed = experts };
        struct run_options how = { .overwrite = true, .layer = { .precision = precisions[experts % 2] } };
        struct result got, bf16;
        struct problem p;
        char what[40];

        o.experts = experts;
        snprintf(what, sizeof(what), "%u experts", experts);
        problem_make(&p, &o);
        run_problem(&p, &how, &bf16);
        how.layer.mxfp8_wgrad = true;
        run_problem(&p, &how, &got);
        check_bitwise(what, &got, &bf16, CHECK_ALL & ~WGRADS);
        check_zeros(what, &p, &got, &bf16);
        for (int a = RESULT_D_GATE; a <= RESULT_D_DOWN; a++)
            if (!(result_error(&got, &bf16, (enum result_array)a) < 0.06))
                fail_msg("%s: %s is %g from that of BF16 operands", what, result_name[a],
                         result_error(&got, &bf16, (enum result_array)a));
        result_free(&got);
        result_free(&bf16);
        problem_free(&p);
    }
}

/* ------------------------------------------------------------------ plans */

static void they_take_no_memory_and_the_same_contexts(void **state)
{
    struct harness *h = harness_open(&(struct harness_options){ 0 });
    struct layer_options how = { .precision = MOK_MXFP8_PER128 };
    struct mok_layer_spec spec = layer_spec(h, &problem[1][0], &how, 0);
    struct mok_plan bf16, mxfp8;

    (void)state;
    assert_int_equal(mok_plan_make(&spec, &h->limits, &bf16, NULL, 0, NULL), 0);
    spec.wgrad_precision = MOK_WGRAD_MXFP8;
    assert_int_equal(mok_plan_make(&spec, &h->limits, &mxfp8, NULL, 0, NULL), 0);
    assert_int_equal(mxfp8.private_bytes, bf16.private_bytes);
    assert_int_equal(mxfp8.symmetric_bytes, bf16.symmetric_bytes);
    assert_int_equal(mxfp8.context_full_bytes, bf16.context_full_bytes);
    assert_int_equal(mok_plan_hash(&mxfp8), mok_plan_hash(&bf16));
    harness_close(h);
}

static void what_is_none_of_the_two_is_refused_and_mxfp8_of_a_bf16_layer(void **state)
{
    struct harness *h = harness_open(&(struct harness_options){ 0 });
    struct mok_layer_spec spec = layer_spec(h, &problem[1][0], &(struct layer_options){ 0 }, 0);
    struct mok_message message = { { 0 } };
    struct mok_plan plan;

    (void)state;
    spec.wgrad_precision = 3;
    assert_int_equal(mok_plan_make(&spec, &h->limits, &plan, NULL, 0, &message), -MOK_EDTYPE);
    assert_non_null(strstr(message.text, "wgrad_precision = 3"));
    spec.wgrad_precision = MOK_WGRAD_MXFP8;
    assert_int_equal(mok_plan_make(&spec, &h->limits, &plan, NULL, 0, &message), -MOK_EDTYPE);
    assert_non_null(strstr(message.text, "wgrad_precision = 2 (mxfp8)"));
    assert_non_null(strstr(message.text, "precision = 1 (bf16)"));
    spec.wgrad_precision = MOK_WGRAD_BF16;
    assert_int_equal(mok_plan_make(&spec, &h->limits, &plan, NULL, 0, &message), 0);
    harness_close(h);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operands_are_rounded_for_the_largest_scale_of_their_tile),
        cmocka_unit_test(they_are_those_of_a_reference_and_nothing_else_of_a_backward_changes),
        cmocka_unit_test(no_cut_of_an_experts_rows_shows),
        cmocka_unit_test(bf16_gradients_are_the_same_rounded_once),
        cmocka_unit_test(any_number_of_experts_will_do),
        cmocka_unit_test(they_take_no_memory_and_the_same_contexts),
        cmocka_unit_test(what_is_none_of_the_two_is_refused_and_mxfp8_of_a_bf16_layer),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
