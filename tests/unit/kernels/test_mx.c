/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MX numerics, bit for bit: against the published vectors, and against the model that searches for the nearest code.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "guarded.h"
#include "mok/types.h"
#include "mx.h"
#include "mx_model.h"
#include "rng.h"
#include "vectors.h"

/* The tests' own reading of BF16; the product's header has its own, so only this much is needed here. */
static float widen(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

static uint16_t narrow(float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
    return (uint16_t)(wide >> 16);
}

static uint8_t model_element(uint16_t value, int exponent)
{
    double wide = (double)widen(value);
    /* E4M3 has no Inf, and what is not finite must stay so. */
    return mx_model_encode(isinf(wide) ? copysign((double)NAN, wide) : ldexp(wide, -exponent));
}

/* Row-major codes and scales of `value`, group by group along the row. */
static void check_rows(const uint16_t *value, uint64_t rows, uint64_t columns, uint32_t group, const uint8_t *code,
                       const uint8_t *scale)
{
    uint64_t blocks = (columns + 31) / 32;

    for (uint64_t row = 0; row < rows; row++)
        for (uint64_t at = 0; at < columns; at += group) {
            uint64_t count = columns - at < group ? columns - at : group;
            const uint16_t *from = value + row * columns + at;
            int exponent = mx_model_exponent(mx_model_amax(from, count));
            for (uint64_t block = at / 32; block * 32 < at + count; block++)
                assert_int_equal(scale[row * blocks + block], exponent + 127);
            for (uint64_t i = 0; i < count; i++)
                assert_int_equal(code[row * columns + at + i], model_element(from[i], exponent));
        }
}

static void check_vectors(const struct mx_vectors *v, const struct mx_rule *rule, uint32_t group)
{
    size_t count = (size_t)v->rows * v->columns, blocks = v->columns / 32;
    struct guarded code = guarded_alloc(count, GUARDED_AT_END);
    struct guarded scale = guarded_alloc(v->rows * blocks, GUARDED_AT_END);

    assert_int_equal(mok_mx_quantize(v->bf16, v->rows, v->columns, group, 1, code.data, scale.data), 0);
    assert_memory_equal(code.data, rule->code, count);
    for (uint32_t row = 0; row < v->rows; row++)
        for (uint32_t block = 0; block < blocks; block++) {
            int want = rule->exponent[row * rule->groups + block * 32 / group];
            if (want != MX_NO_SCALE)
                assert_int_equal(scale.data[row * blocks + block], want + 127);
        }
    assert_true(guarded_check(&code) && guarded_check(&scale));
    guarded_free(&code);
    guarded_free(&scale);
}

static void every_vector_quantises_to_its_bits(void **state)
{
    struct mx_vectors vectors;

    (void)state;
    assert_int_equal(mx_vectors_load(vectors_directory(), &vectors), 0);
    check_vectors(&vectors, &vectors.per32, 32);
    check_vectors(&vectors, &vectors.per128, 128);
    mx_vectors_free(&vectors);
}

static void every_code_decodes_to_its_value(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 256; code++) {
        double want = mx_model_decode((uint8_t)code);
        float got = mok_e4m3_to_f32((uint8_t)code);
        assert_true(isnan(want) ? isnan(got) : (double)got == want && !signbit(got) == !signbit(want));
    }
    for (unsigned code = 0; code < 255; code++)
        assert_true((double)mok_e8m0_to_f32((uint8_t)code) == ldexp(1, (int)code - 127));
    assert_true(isnan(mok_e8m0_to_f32(255)));
}

static void every_bf16_value_encodes_to_the_nearest_code(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x10000; bits++)
        assert_int_equal(mok_e4m3_encode(widen((uint16_t)bits)), model_element((uint16_t)bits, 0));
}

/* Where rounding is decided: on the middle between two codes, and one FP32 step to either side. */
static void ties_go_to_the_even_code_and_nothing_else_does(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 0x7e; code++) {
        float middle = (float)((mx_model_decode((uint8_t)code) + mx_model_decode((uint8_t)(code + 1))) / 2);
        assert_int_equal(mok_e4m3_encode(middle), code % 2 ? code + 1 : code);
        assert_int_equal(mok_e4m3_encode(nextafterf(middle, 0)), code);
        assert_int_equal(mok_e4m3_encode(nextafterf(middle, 1e9f)), code + 1);
        assert_int_equal(mok_e4m3_encode(-middle), 0x80 | (code % 2 ? code + 1 : code));
    }
}

static void values_beyond_448_saturate(void **state)
{
    (void)state;
    assert_int_equal(mok_e4m3_encode(448), 0x7e);
    assert_int_equal(mok_e4m3_encode(449), 0x7e);
    assert_int_equal(mok_e4m3_encode(480), 0x7e); /* would be a NaN code if rounded up */
    assert_int_equal(mok_e4m3_encode(-1e38f), 0xfe);
}

static void every_amax_gets_the_smallest_scale_that_holds_it(void **state)
{
    (void)state;
    for (uint32_t bits = 0; bits < 0x7f80; bits++)
        assert_int_equal(mok_mx_scale(widen((uint16_t)bits)), mx_model_exponent((double)widen((uint16_t)bits)) + 127);
    for (int e = -120; e < 110; e++) {
        float edge = ldexpf(448, e);
        assert_int_equal(mok_mx_scale(edge), e + 127);
        assert_int_equal(mok_mx_scale(nextafterf(edge, 1e38f)), e + 128);
    }
}

/* Values that a real tensor rarely has: zeros of both signs, subnormals, the largest, ties, and what is not finite. */
static uint16_t odd_value(struct rng *rng)
{
    static const uint16_t special[] = { 0x0000, 0x8000, 0x0001, 0x8001, 0x007f, 0x0080, 0x7f7f, 0xff7f, 0x43e0, 0x43e1,
                                        0x7f80, 0xff80, 0x7fc0, 0xffc1, 0x3f80, 0x3f88, 0x3f98, 0x0200, 0x3b00 };
    switch (rng_below(rng, 4)) {
    case 0:
        return special[rng_below(rng, sizeof(special) / sizeof(special[0]))];
    case 1:
        return (uint16_t)rng_u64(rng);
    default:
        return narrow((float)rng_normal(rng));
    }
}

static uint16_t *random_matrix(struct rng *rng, uint64_t count)
{
    uint16_t *value = test_malloc(count * sizeof(*value));
    bool tame = rng_below(rng, 2);
    int shift = (int)rng_below(rng, 200) - 100;

    for (uint64_t i = 0; i < count; i++)
        value[i] = tame ? narrow(ldexpf((float)rng_normal(rng), shift)) : odd_value(rng);
    return value;
}

static void rows_of_any_length_match_the_model(void **state)
{
    static const uint32_t lengths[] = { 16, 32, 48, 112, 128, 144, 2880 };
    struct rng rng = { 1 };

    (void)state;
    for (int n = 0; n < 60; n++) {
        uint64_t columns = lengths[rng_below(&rng, 7)], rows = 1 + rng_below(&rng, 5);
        uint32_t group = rng_below(&rng, 2) ? 32 : 128;
        uint16_t *value = random_matrix(&rng, rows * columns);
        struct guarded code = guarded_alloc(rows * columns, GUARDED_AT_END);
        struct guarded scale = guarded_alloc(rows * ((columns + 31) / 32), GUARDED_AT_END);

        assert_int_equal(mok_mx_quantize(value, rows, columns, group, 1, code.data, scale.data), 0);
        check_rows(value, rows, columns, group, code.data, scale.data);
        assert_true(guarded_check(&code) && guarded_check(&scale));
        guarded_free(&code);
        guarded_free(&scale);
        test_free(value);
    }
}

static void the_transposed_form_is_the_quantised_transpose(void **state)
{
    struct rng rng = { 2 };

    (void)state;
    for (int n = 0; n < 60; n++) {
        uint64_t rows = 1 + rng_below(&rng, 300), columns = 1 + rng_below(&rng, 40);
        uint32_t group = rng_below(&rng, 2) ? 32 : 128;
        uint16_t *value = random_matrix(&rng, rows * columns), *turned = test_malloc(rows * columns * 2);
        struct guarded code = guarded_alloc(rows * columns, GUARDED_AT_END);
        struct guarded scale = guarded_alloc(columns * ((rows + 31) / 32), GUARDED_AT_END);

        for (uint64_t i = 0; i < rows; i++)
            for (uint64_t j = 0; j < columns; j++)
                turned[j * rows + i] = value[i * columns + j];
        assert_int_equal(mok_mx_quantize_transposed(value, rows, columns, group, code.data, scale.data), 0);
        check_rows(turned, columns, rows, group, code.data, scale.data);
        assert_true(guarded_check(&code) && guarded_check(&scale));
        guarded_free(&code);
        guarded_free(&scale);
        test_free(value);
        test_free(turned);
    }
}

/* 128 x 128 tiles of a weight share the scale of their common amax. */
static void tiles_of_128_rows_share_one_scale(void **state)
{
    enum { ROWS = 272, COLUMNS = 160, BLOCKS = COLUMNS / 32 };
    struct rng rng = { 3 };
    uint8_t *code = test_malloc(ROWS * COLUMNS), *scale = test_malloc(ROWS * BLOCKS);
    uint16_t *value = random_matrix(&rng, ROWS * COLUMNS);

    (void)state;
    assert_int_equal(mok_mx_quantize(value, ROWS, COLUMNS, 128, 128, code, scale), 0);
    for (uint32_t row0 = 0; row0 < ROWS; row0 += 128)
        for (uint32_t column0 = 0; column0 < COLUMNS; column0 += 128) {
            uint32_t row1 = row0 + 128 < ROWS ? row0 + 128 : ROWS;
            uint32_t width = column0 + 128 < COLUMNS ? 128 : COLUMNS - column0;
            double amax = 0;
            for (uint32_t row = row0; row < row1; row++)
                amax = fmax(amax, mx_model_amax(value + row * COLUMNS + column0, width));
            int exponent = mx_model_exponent(amax);
            for (uint32_t row = row0; row < row1; row++)
                for (uint32_t column = column0; column < column0 + width; column++) {
                    assert_int_equal(scale[row * BLOCKS + column / 32], exponent + 127);
                    assert_int_equal(code[row * COLUMNS + column],
                                     model_element(value[row * COLUMNS + column], exponent));
                }
        }
    test_free(value);
    test_free(code);
    test_free(scale);
}

static void dequantising_gives_code_times_scale(void **state)
{
    enum { ROWS = 9, COLUMNS = 80, BLOCKS = 3 };
    struct rng rng = { 4 };
    uint8_t code[ROWS * COLUMNS], scale[ROWS * BLOCKS];
    float got[ROWS * COLUMNS];

    (void)state;
    for (size_t i = 0; i < sizeof(code); i++)
        code[i] = (uint8_t)rng_u64(&rng);
    for (size_t i = 0; i < sizeof(scale); i++)
        scale[i] = (uint8_t)rng_below(&rng, 240); /* larger ones reach beyond FP32 */
    scale[4] = 255;
    mok_mx_dequantize(code, scale, ROWS, COLUMNS, got);
    for (uint32_t row = 0; row < ROWS; row++)
        for (uint32_t column = 0; column < COLUMNS; column++) {
            uint8_t block_scale = scale[row * BLOCKS + column / 32];
            float want = (float)ldexp(mx_model_decode(code[row * COLUMNS + column]), block_scale - 127);
            float value = got[row * COLUMNS + column];
            assert_true(isnan(want) || block_scale == 255 ? isnan(value) : value == want);
        }
}

/* Its scale may halve (an amax that was rounded down to 448 fits the next one), its values may not change. */
static void a_quantised_tensor_keeps_its_values_when_quantised_again(void **state)
{
    enum { COUNT = 32 * 128 };
    struct rng rng = { 5 };
    static uint16_t value[COUNT];
    static uint8_t code[COUNT], scale[COUNT / 32];
    static float wide[COUNT], again[COUNT];

    (void)state;
    for (uint32_t group = 32; group <= 128; group += 96) {
        for (size_t i = 0; i < COUNT; i++)
            value[i] = narrow((float)rng_normal(&rng));
        assert_int_equal(mok_mx_quantize(value, 32, 128, group, 1, code, scale), 0);
        mok_mx_dequantize(code, scale, 32, 128, wide);
        for (size_t i = 0; i < COUNT; i++)
            value[i] = narrow(wide[i]); /* exact: 4 significant bits */
        assert_int_equal(mok_mx_quantize(value, 32, 128, group, 1, code, scale), 0);
        mok_mx_dequantize(code, scale, 32, 128, again);
        assert_memory_equal(wide, again, sizeof(wide));
    }
}

static void unknown_groups_and_tiles_are_refused_and_write_nothing(void **state)
{
    uint16_t value[256] = { 0 };
    uint8_t code[256], scale[8];

    (void)state;
    poison(code, sizeof(code));
    poison(scale, sizeof(scale));
    assert_true(mok_mx_quantize(value, 2, 128, 64, 1, code, scale) < 0);
    assert_true(mok_mx_quantize(value, 2, 128, 0, 1, code, scale) < 0);
    assert_true(mok_mx_quantize(value, 2, 128, 32, 128, code, scale) < 0);
    assert_true(mok_mx_quantize(value, 2, 128, 128, 0, code, scale) < 0);
    assert_true(mok_mx_quantize_transposed(value, 2, 128, 64, code, scale) < 0);
    assert_true(is_poison(code, sizeof(code)) && is_poison(scale, sizeof(scale)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_vector_quantises_to_its_bits),
        cmocka_unit_test(every_code_decodes_to_its_value),
        cmocka_unit_test(every_bf16_value_encodes_to_the_nearest_code),
        cmocka_unit_test(ties_go_to_the_even_code_and_nothing_else_does),
        cmocka_unit_test(values_beyond_448_saturate),
        cmocka_unit_test(every_amax_gets_the_smallest_scale_that_holds_it),
        cmocka_unit_test(rows_of_any_length_match_the_model),
        cmocka_unit_test(the_transposed_form_is_the_quantised_transpose),
        cmocka_unit_test(tiles_of_128_rows_share_one_scale),
        cmocka_unit_test(dequantising_gives_code_times_scale),
        cmocka_unit_test(a_quantised_tensor_keeps_its_values_when_quantised_again),
        cmocka_unit_test(unknown_groups_and_tiles_are_refused_and_write_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
