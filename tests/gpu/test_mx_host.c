/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA engine's MXFP8 beside the host engine's: whole layers, between which only the order of sums lies, and what is
 * quantised in epilogues: h from the gate and up that a context keeps, d_a and d_b by what holds of any codes and scales.
 * Skipped where there is no GPU.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "check.h"
#include "cuda/layout.h"
#include "device.h"
#include "harness.h"
#include "hd.h"
#include "mx/bf16.h"
#include "mx/mx.h"
#include "plain_bf16.h"
#include "swiglu.h"

#ifdef MAX_EP
#define FEWER(many, few) few
#else
#define FEWER(many, few) many
#endif

static const struct problem_options layers[] = {
    { .hidden = 336,
      .intermediate = 208,
      .experts = 8,
      .topk = 3,
      .tokens = FEWER(500, 40),
      .shared_intermediate = 80,
      .routing = ROUTE_ZIPF,
      .masked = 0.1,
      .seed = 31 },
    { .hidden = 256, .intermediate = 512, .experts = 4, .topk = 2, .tokens = FEWER(300, 20), .seed = 32 },
    { .hidden = 80,
      .intermediate = 144,
      .experts = 8,
      .topk = 5,
      .tokens = FEWER(130, 24),
      .clamp = 0.9f,
      .weighting = WEIGHT_ZERO_NEGATIVE,
      .seed = 33 },
};

/*
 * What both engines round has the same value but where a sum is near a tie, so they lie far closer to each other than
 * either to FP64.
 */
static void forwards_are_the_host_engines_but_for_the_order_of_sums(void **state)
{
    (void)state;
    for (size_t i = MX_IN_SHORT ? 2 : 0; i < sizeof(layers) / sizeof(layers[0]); i++) {
        struct result host, got, want;
        struct device_group group;
        struct problem p;
        uint16_t *out;

        problem_make(&p, &layers[i]);
        problem_quantise_weights(&p, MX_SCALE);
        run_problem(&p, &(struct run_options){ .layer = { .precision = MX }, .overwrite = true }, &host);
        device_group_open(&group, &p, &(struct device_options){ .ranks = 1, .precision = MX }, &p.tokens);
        device_forward(&group);
        out = device_out(&group);
        result_alloc(&p, &got);
        result_alloc(&p, &want);
        for (size_t n = 0; n < problem_rows_elements(&p); n++)
            got.array[RESULT_OUT][n] = (double)bf16_to_float(out[n]);
        oracle_run(&p, &want);
        double between = result_error(&got, &host, RESULT_OUT), from_fp64 = result_error(&host, &want, RESULT_OUT);
        if (getenv("MOK_TEST_PRINT_ERRORS"))
            print_message("layer %zu: %.3e from the host engine, which is %.3e from FP64\n", i, between, from_fp64);
        if (!(between <= 0.25 * from_fp64))
            fail_msg("layer %zu: %g from the host engine, which is %g from FP64", i, between, from_fp64);
        free(out);
        result_free(&host);
        result_free(&got);
        result_free(&want);
        device_group_close(&group);
        problem_free(&p);
    }
}

/* What PREPARE and MAIN left of expert rows: their number, and where they are. */
struct kept {
    uint64_t rows;
    uint16_t *a, *b;       /* [rows][I] */
    uint8_t *code, *scale; /* [rows][I], [rows][scale_bytes] */
    uint64_t scale_bytes;
};

static void *copy_of(const void *device, uint64_t bytes)
{
    void *copy = malloc(bytes);

    assert_non_null(copy);
    assert_int_equal(cudaMemcpy(copy, device, bytes, cudaMemcpyDeviceToHost), 0);
    return copy;
}

static struct kept fetch(const struct device_group *g)
{
    const struct mok_plan *plan = &g->plan[0];
    const uint8_t *ring = (const uint8_t *)g->args[0].context + plan->ctx_ring, *own = g->private_memory[0].at;
    const uint64_t row_bytes = plan->spec.intermediate * sizeof(uint16_t);
    struct mok_cuda_layout layout;
    struct mok_cuda_kept kept;
    struct kept k = { .rows = plan->ring_rows, .scale_bytes = mok_cuda_h_scale_bytes(plan) };

    mok_cuda_layout_make(plan, &layout);
    mok_cuda_kept_make(plan, &kept);
    k.a = copy_of(ring + kept.a, k.rows * row_bytes);
    k.b = copy_of(ring + kept.b, k.rows * row_bytes);
    k.code = copy_of(own + layout.h, k.rows * plan->spec.intermediate);
    k.scale = copy_of(own + layout.h_scale, k.rows * k.scale_bytes);
    return k;
}

static bool is_real(const struct mok_op_result *result, uint32_t experts, uint64_t row)
{
    for (uint32_t e = 0; e < experts; e++) {
        uint64_t padded = mok_round_up(result->expert_rows[e], 64);
        if (row < padded)
            return row < result->expert_rows[e];
        row -= padded;
    }
    return false;
}

/*
 * exp is approximated on the device, so h before it is quantised is known up to a few units in the last place: a scale
 * may then be another where its amax is at a bound, and a code its neighbour where the value is at a tie.
 */
static void check_row(const struct problem *p, const struct kept *k, uint64_t row, uint64_t *ret_ties)
{
    float h[512];
    uint8_t code[512], scale[16];

    for (uint32_t i = 0; i < p->intermediate; i++)
        h[i] = mok_swiglu(mok_bf16_to_f32(k->a[row * p->intermediate + i]),
                          mok_bf16_to_f32(k->b[row * p->intermediate + i]), p->clamp);
    mok_mx_quantize_row(h, p->intermediate, MX_SCALE, code, scale);
    for (uint32_t i = 0; i < p->intermediate; i++) {
        uint8_t got = k->code[row * p->intermediate + i],
                got_scale = k->scale[row * k->scale_bytes + i / 32];
        float exact = h[i] * mok_e8m0_inverse(scale[i / 32]), value = mok_e4m3_to_f32(got);
        if (got_scale != scale[i / 32])
            fail_msg("row %llu, column %u: scale %u, must be %u", (unsigned long long)row, i, got_scale, scale[i / 32]);
        if (got == code[i])
            continue;
        /* as near as the right one, within what the approximation may move it */
        float off = fabsf(value - exact), right = fabsf(mok_e4m3_to_f32(code[i]) - exact);
        if (!(off <= right + 1e-4f * fabsf(exact) + 1e-6f))
            fail_msg("row %llu, column %u: %g times %#x became %#x, must be %#x", (unsigned long long)row, i,
                     (double)exact, scale[i / 32], got, code[i]);
        ++*ret_ties;
    }
}

static void h_is_quantised_as_the_rules_say(void **state)
{
    (void)state;
    for (size_t i = MX_IN_SHORT ? 2 : 0; i < sizeof(layers) / sizeof(layers[0]); i += FEWER(1, 2)) {
        struct mok_op_result result;
        struct device_group group;
        uint64_t rows = 0, ties = 0;
        struct problem p;

        problem_make(&p, &layers[i]);
        problem_quantise_weights(&p, MX_SCALE);
        device_group_open(&group, &p,
                          &(struct device_options){ .ranks = 1, .precision = MX, .context_mode = MOK_CONTEXT_FULL },
                          &p.tokens);
        assert_int_equal(device_phase(&group, 0, MOK_PHASE_PREPARE).status, 0);
        result = device_phase(&group, 0, MOK_PHASE_MAIN);
        assert_int_equal(result.status, 0);
        assert_true(result.padded_rows <= group.plan[0].ring_rows);
        struct kept k = fetch(&group);
        for (uint64_t row = 0; row < result.padded_rows; row++)
            if (is_real(&result, p.experts, row)) {
                check_row(&p, &k, row, &ties);
                rows++;
            }
        assert_int_equal(rows, result.rows);
        if (ties > rows * p.intermediate / 1000 + 2)
            fail_msg("layer %zu: %llu codes of %llu are neighbours of the right ones", i, (unsigned long long)ties,
                     (unsigned long long)(rows * p.intermediate));
        free(k.a);
        free(k.b);
        free(k.code);
        free(k.scale);
        device_group_close(&group);
        problem_free(&p);
    }
}

/* One gradient of gate or up: codes, scales, and the values that weight gradients are made of. */
struct turned {
    const char *name;
    uint8_t *code, *scale;
    uint16_t *value;
};

static struct turned fetch_turned(const struct device_group *g, const char *name, uint64_t code, uint64_t scale,
                                  uint64_t value)
{
    const struct mok_plan *plan = &g->plan[0];
    const uint8_t *own = g->private_memory[0].at;
    const uint64_t count = plan->ring_rows * plan->spec.intermediate;

    return (struct turned){ name, copy_of(own + code, count),
                            copy_of(own + scale, plan->ring_rows * mok_cuda_h_scale_bytes(plan)),
                            copy_of(own + value, 2 * count) };
}

/* The MX_SCALE from `first` of a row: one scale, the smallest that holds them, and beside each code its value. */
static void check_group(const struct turned *t, const struct problem *p, uint64_t row, uint32_t first,
                        uint64_t scale_bytes)
{
    const uint8_t *scales = t->scale + row * scale_bytes + first / 32;
    const uint32_t end = first + MX_SCALE < p->intermediate ? first + MX_SCALE : p->intermediate;
    float largest = 0;

    for (uint32_t i = first; i < end; i++) {
        const uint8_t code = t->code[row * p->intermediate + i];
        const float value = mok_mx_decode(code, scales[0]);
        assert_int_equal(scales[(i - first) / 32], scales[0]);
        if (mok_bf16_to_f32(t->value[row * p->intermediate + i]) != value)
            fail_msg("%s, row %llu, column %u: code %#x of scale %u stands beside %#x", t->name,
                     (unsigned long long)row, i, code, scales[0], t->value[row * p->intermediate + i]);
        largest = fmaxf(largest, fabsf(mok_e4m3_to_f32(code)));
    }
    if (scales[0] != 0 && largest < 224) /* half of 448: with half the scale it would fit */
        fail_msg("%s, row %llu, columns from %u: scale %u is larger than it must be", t->name, (unsigned long long)row,
                 first, scales[0]);
}

static void gradients_of_gate_and_up_are_quantised_as_the_rules_say(void **state)
{
    (void)state;
    for (size_t i = FEWER(0, 2); i < sizeof(layers) / sizeof(layers[0]); i++) {
        struct mok_op_result result;
        struct mok_cuda_layout layout;
        struct device_group group;
        struct problem p;

        problem_make(&p, &layers[i]);
        problem_quantise_weights(&p, MX_SCALE);
        device_group_open(&group, &p,
                          &(struct device_options){ .ranks = 1, .precision = MX, .context_mode = MOK_CONTEXT_FULL },
                          &p.tokens);
        assert_int_equal(device_phase(&group, 0, MOK_PHASE_PREPARE).status, 0);
        result = device_phase(&group, 0, MOK_PHASE_MAIN);
        assert_int_equal(result.status, 0);
        uint64_t rows[MOK_MAX_EXPERTS], padded = result.padded_rows;
        memcpy(rows, result.expert_rows, p.experts * sizeof(rows[0]));
        result.expert_rows = rows;
        device_backward(&group, 0);
        mok_cuda_layout_make(&group.plan[0], &layout);
        struct turned all[] = { fetch_turned(&group, "d_a", layout.d_a_code, layout.d_a_scale, layout.d_a),
                                fetch_turned(&group, "d_b", layout.d_b_code, layout.d_b_scale, layout.d_b) };
        for (size_t t = 0; t < 2; t++) {
            for (uint64_t row = 0; row < padded; row++)
                for (uint32_t first = 0; is_real(&result, p.experts, row) && first < p.intermediate; first += MX_SCALE)
                    check_group(&all[t], &p, row, first, mok_cuda_h_scale_bytes(&group.plan[0]));
            free(all[t].code);
            free(all[t].scale);
            free(all[t].value);
        }
        device_group_close(&group);
        problem_free(&p);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forwards_are_the_host_engines_but_for_the_order_of_sums),
        cmocka_unit_test(h_is_quantised_as_the_rules_say),
        cmocka_unit_test(gradients_of_gate_and_up_are_quantised_as_the_rules_say),
    };

    device_or_skip();
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
