/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Arithmetic of the example: generator, BF16, router, norm and loss against finite differences, optimizer, text.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "data.h"
#include "mok/types.h"
#include "ops.h"
#include "optimizer.h"
#include "rng.h"
#include "router.h"

static void generator_gives_the_same_number_for_the_same_place(void **state)
{
    (void)state;
    assert_true(rng_u64(1, 2, 3) == rng_u64(1, 2, 3));
    assert_true(rng_u64(1, 2, 3) != rng_u64(2, 2, 3));
    assert_true(rng_u64(1, 2, 3) != rng_u64(1, 3, 3));
    assert_true(rng_u64(1, 2, 3) != rng_u64(1, 2, 4));
    assert_true(rng_u64(1, 2, 3) != rng_u64(1, 3, 2));
}

static void mix_is_splitmix64(void **state)
{
    (void)state;
    /* First output of SplitMix64 seeded with 0. */
    assert_true(rng_mix(0) == 0xe220a8397b1dcdafull);
}

static void normal_numbers_have_mean_0_and_deviation_1(void **state)
{
    double sum = 0, squares = 0;
    int count = 20000;

    (void)state;
    for (int i = 0; i < count; i++) {
        double value = (double)rng_normal(7, 1, (uint64_t)i);

        sum += value;
        squares += value * value;
    }
    assert_true(fabs(sum / count) < 0.03);
    assert_true(fabs(squares / count - 1) < 0.05);
}

static void below_stays_below_and_reaches_everything(void **state)
{
    int seen[7] = { 0 };

    (void)state;
    for (uint64_t i = 0; i < 500; i++) {
        uint64_t value = rng_below(3, 4, i, 7);

        assert_true(value < 7);
        seen[value]++;
    }
    for (int i = 0; i < 7; i++)
        assert_true(seen[i] > 30);
}

static void bf16_rounds_to_nearest_even(void **state)
{
    (void)state;
    assert_int_equal(bf16_from_float(1.0f), 0x3f80);
    assert_int_equal(bf16_from_float(1.0f + 0x1p-8f), 0x3f80);            /* tie: to even */
    assert_int_equal(bf16_from_float(1.0f + 0x3p-8f), 0x3f82);            /* tie: to even, upwards */
    assert_int_equal(bf16_from_float(1.0f + 0x1p-8f + 0x1p-20f), 0x3f81); /* past the tie */
    assert_int_equal(bf16_from_float(-INFINITY), 0xff80);
    assert_true(isnan(bf16_to_float(bf16_from_float(NAN))));
}

static void router_chooses_the_largest_logits_and_the_lower_id_of_equals(void **state)
{
    const float logits[] = { 1, 3, 2, 3, 0 };
    int32_t ids[3];
    float weight[3];

    (void)state;
    router_forward(1, 5, 3, logits, ids, weight);
    assert_int_equal(ids[0], 1);
    assert_int_equal(ids[1], 3);
    assert_int_equal(ids[2], 2);
    assert_true(weight[0] == weight[1]);
    assert_true(fabsf(weight[0] + weight[1] + weight[2] - 1) < 1e-6f);
    assert_true(fabsf(weight[2] / weight[0] - expf(-1)) < 1e-6f);
}

static void router_with_nan_logits_still_gives_distinct_valid_ids(void **state)
{
    const float logits[] = { NAN, NAN, 1, NAN };
    int32_t ids[3];
    float weight[3];

    (void)state;
    router_forward(1, 4, 3, logits, ids, weight);
    assert_int_equal(ids[0], 2);
    assert_int_equal(ids[1], 0);
    assert_int_equal(ids[2], 1);
}

/* Sum over slots of c * weight. */
static double router_sum(const float *logits, const float *c, size_t tokens, size_t experts, size_t topk)
{
    int32_t ids[16];
    float weight[16];
    double sum = 0;

    router_forward(tokens, experts, topk, logits, ids, weight);
    for (size_t i = 0; i < tokens * topk; i++)
        sum += (double)c[i] * (double)weight[i];
    return sum;
}

static void router_gradient_equals_finite_differences(void **state)
{
    enum { T = 4, E = 6, K = 3 };
    float logits[T * E], c[T * K], weight[T * K], gradient[T * E];
    int32_t ids[T * K];

    (void)state;
    for (int i = 0; i < T * E; i++)
        logits[i] = 2 * rng_normal(11, 1, (uint64_t)i);
    for (int i = 0; i < T * K; i++)
        c[i] = rng_normal(11, 2, (uint64_t)i);
    router_forward(T, E, K, logits, ids, weight);
    memset(gradient, 0xff, sizeof(gradient)); /* NaN: everything must be written */
    router_backward(T, E, K, ids, weight, c, gradient);
    for (int i = 0; i < T * E; i++) {
        float saved = logits[i], step = 1e-2f; /* too small to change the order of these logits */
        double difference;

        logits[i] = saved + step;
        difference = router_sum(logits, c, T, E, K);
        logits[i] = saved - step;
        difference = (difference - router_sum(logits, c, T, E, K)) / (2 * (double)step);
        logits[i] = saved;
        assert_true(fabs(difference - (double)gradient[i]) < 1e-3);
    }
}

static double norm_sum(const float *h, const float *gain, const float *c, size_t tokens, size_t hidden)
{
    float u[64], inverse[8];
    double sum = 0;

    ops_rmsnorm(tokens, hidden, h, gain, u, inverse);
    for (size_t i = 0; i < tokens * hidden; i++)
        sum += (double)c[i] * (double)u[i];
    return sum;
}

static double norm_difference(float *at, const float *h, const float *gain, const float *c, size_t tokens,
                              size_t hidden)
{
    float saved = *at, step = 1e-2f;
    double plus, minus;

    *at = saved + step;
    plus = norm_sum(h, gain, c, tokens, hidden);
    *at = saved - step;
    minus = norm_sum(h, gain, c, tokens, hidden);
    *at = saved;
    return (plus - minus) / (2 * (double)step);
}

static void norm_gradients_equal_finite_differences_and_add_up(void **state)
{
    enum { T = 3, H = 16 };
    float h[T * H], gain[H], c[T * H], u[T * H], inverse[T], d_h[T * H], d_gain[H];

    (void)state;
    for (int i = 0; i < T * H; i++) {
        h[i] = rng_normal(5, 1, (uint64_t)i);
        c[i] = rng_normal(5, 2, (uint64_t)i);
        d_h[i] = 100; /* what was there stays */
    }
    for (int i = 0; i < H; i++) {
        gain[i] = 1 + 0.3f * rng_normal(5, 3, (uint64_t)i);
        d_gain[i] = 50;
    }
    ops_rmsnorm(T, H, h, gain, u, inverse);
    ops_rmsnorm_backward(T, H, h, gain, inverse, c, d_h, d_gain);
    for (int i = 0; i < T * H; i++)
        assert_true(fabs(norm_difference(&h[i], h, gain, c, T, H) - ((double)d_h[i] - 100)) < 2e-3);
    for (int i = 0; i < H; i++)
        assert_true(fabs(norm_difference(&gain[i], h, gain, c, T, H) - ((double)d_gain[i] - 50)) < 2e-3);
}

static void cross_entropy_of_equal_logits_is_the_logarithm_of_the_classes(void **state)
{
    float logits[8] = { 3, 3, 3, 3, 3, 3, 3, 3 };
    const uint8_t target[] = { 1, 2 };

    (void)state;
    assert_true(fabs(ops_cross_entropy(2, 4, logits, target, 0.5f) - 2 * log(4)) < 1e-6);
    assert_true(fabsf(logits[0] - 0.125f) < 1e-6f);
    assert_true(fabsf(logits[1] + 0.375f) < 1e-6f);
    assert_true(fabsf(logits[6] + 0.375f) < 1e-6f);
}

static void cross_entropy_of_huge_logits_is_finite(void **state)
{
    float logits[3] = { 1e30f, -1e30f, 0 };
    const uint8_t target[] = { 0 };

    (void)state;
    assert_true(ops_cross_entropy(1, 3, logits, target, 1) == 0);
    assert_true(logits[0] == 0 && logits[1] == 0 && logits[2] == 0);
}

static void gemms_multiply_as_their_names_say(void **state)
{
    const float a[6] = { 1, 2, 3, 4, 5, 6 };
    const float b[6] = { 1, 0, 2, 0, 1, 1 };
    float c[4];

    (void)state;
    ops_init();
    ops_gemm_nt(2, 2, 3, a, b, 0, c);
    assert_true(c[0] == 7 && c[1] == 5 && c[2] == 16 && c[3] == 11);
    ops_gemm_nn(2, 2, 3, a, b, 0, c);
    assert_true(c[0] == 8 && c[1] == 3 && c[2] == 20 && c[3] == 6);
    ops_gemm_tn(2, 2, 3, a, b, 1, c);
    assert_true(c[0] == 8 + 12 && c[1] == 3 + 5 && c[2] == 20 + 16 && c[3] == 6 + 6);
}

static void adamw_first_step_moves_by_the_rate_against_the_gradient(void **state)
{
    struct adamw adamw = adamw_default(0.1f);
    float value[2] = { 1, -1 }, first[2] = { 0 }, second[2] = { 0 };
    const float gradient[2] = { 0.3f, -5 };
    struct adamw_tensor tensor = { value, first, second, 2 };

    (void)state;
    adamw.warmup = 0;
    adamw_step(&adamw, 1, 0, &tensor, gradient);
    assert_true(fabsf(value[0] - 0.9f) < 1e-5f);
    assert_true(fabsf(value[1] + 0.9f) < 1e-5f);
}

static void adamw_follows_the_published_formula_over_steps(void **state)
{
    struct adamw adamw = adamw_default(0.05f);
    float value = 0.7f, first = 0, second = 0;
    double v = 0.7, m = 0, s = 0;
    struct adamw_tensor tensor = { &value, &first, &second, 1 };

    (void)state;
    for (int step = 1; step <= 30; step++) {
        float gradient = rng_normal(1, 1, (uint64_t)step);
        double g = (double)gradient, rate = 0.05 * (step < 10 ? step / 10.0 : 1);

        adamw_step(&adamw, (uint64_t)step, 1, &tensor, &gradient);
        m = 0.9 * m + 0.1 * g;
        s = 0.99 * s + 0.01 * g * g;
        v = v * (1 - rate * 0.01) - rate * (m / (1 - pow(0.9, step))) / (sqrt(s / (1 - pow(0.99, step))) + 1e-8);
        assert_true(fabs(v - (double)value) < 1e-4);
    }
}

static void adamw_of_a_gradient_that_was_always_zero_changes_nothing(void **state)
{
    struct adamw adamw = adamw_default(0.1f);
    float value = 2, first = 0, second = 0, gradient = 0;
    struct adamw_tensor tensor = { &value, &first, &second, 1 };

    (void)state;
    for (uint64_t step = 1; step < 20; step++)
        adamw_step(&adamw, step, 0, &tensor, &gradient);
    assert_true(value == 2);
}

static void hash_depends_on_every_byte(void **state)
{
    unsigned char data[19] = { 0 };
    uint64_t hash = ops_hash(OPS_HASH_START, data, sizeof(data));

    (void)state;
    for (size_t i = 0; i < sizeof(data); i++) {
        data[i] = 1;
        assert_true(ops_hash(OPS_HASH_START, data, sizeof(data)) != hash);
        data[i] = 0;
    }
    assert_true(ops_hash(OPS_HASH_START, data, sizeof(data) - 1) != hash);
    assert_true(ops_hash(OPS_HASH_START, data, sizeof(data)) == hash);
}

static int read_text(size_t bytes, size_t window, size_t seq, struct text *ret)
{
    char path[] = "/tmp/mok-test-text-XXXXXX";
    int fd = mkstemp(path), rc;

    assert_true(fd >= 0);
    for (size_t i = 0; i < bytes; i++)
        assert_int_equal(write(fd, "x", 1), 1);
    close(fd);
    rc = text_read(path, window, seq, ret);
    unlink(path);
    return rc;
}

static void text_shorter_than_a_sequence_is_refused(void **state)
{
    struct text text = { 0 };

    (void)state;
    assert_int_equal(read_text(12, 4, 8, &text), -MOK_ESIZE);
    assert_null(text.bytes);
    assert_int_equal(text_read("/nonexistent/text", 4, 8, &text), -MOK_EIO);
}

static void every_position_has_its_window_before_and_its_target_after(void **state)
{
    struct text text;
    int first = 0, last = 0;

    (void)state;
    assert_int_equal(read_text(13, 4, 8, &text), 0);
    assert_int_equal(text.size, 13);
    for (uint64_t i = 0; i < 200; i++) {
        size_t at = text_position(text.size, 4, 8, 1, i / 10, i % 10);

        assert_true(at >= 3 && at + 8 <= 12);
        first |= at == 3;
        last |= at == 4;
    }
    assert_true(first && last);
    text_free(&text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(generator_gives_the_same_number_for_the_same_place),
        cmocka_unit_test(mix_is_splitmix64),
        cmocka_unit_test(normal_numbers_have_mean_0_and_deviation_1),
        cmocka_unit_test(below_stays_below_and_reaches_everything),
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(router_chooses_the_largest_logits_and_the_lower_id_of_equals),
        cmocka_unit_test(router_with_nan_logits_still_gives_distinct_valid_ids),
        cmocka_unit_test(router_gradient_equals_finite_differences),
        cmocka_unit_test(norm_gradients_equal_finite_differences_and_add_up),
        cmocka_unit_test(cross_entropy_of_equal_logits_is_the_logarithm_of_the_classes),
        cmocka_unit_test(cross_entropy_of_huge_logits_is_finite),
        cmocka_unit_test(gemms_multiply_as_their_names_say),
        cmocka_unit_test(adamw_first_step_moves_by_the_rate_against_the_gradient),
        cmocka_unit_test(adamw_follows_the_published_formula_over_steps),
        cmocka_unit_test(adamw_of_a_gradient_that_was_always_zero_changes_nothing),
        cmocka_unit_test(hash_depends_on_every_byte),
        cmocka_unit_test(text_shorter_than_a_sequence_is_refused),
        cmocka_unit_test(every_position_has_its_window_before_and_its_target_after),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
