/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok_mxfp8_quantize and its inverse, as a program that links libmok sees them: bit for bit against the model that
 * searches for the nearest code, in every form, and whatever is refused by name.
 */
#include "support.h"

#include <dlfcn.h>
#include <math.h>
#include <stdbool.h>

#include "mx_model.h"
#include "rng.h"

/* No side is a multiple of 32, so that every kind of group is cut short, and each is beyond 128. */
enum { M = 2, R = 130, C = 144, COUNT = M * R * C };

static float wide[COUNT];
static uint16_t narrow[COUNT]; /* the upper halves of `wide` */
static uint8_t data[COUNT + 1], scales[COUNT + 1];

static float as_f32(uint16_t bits)
{
    uint32_t word = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &word, sizeof(value));
    return value;
}

/* Values of all sizes, with zeros, infinities and NaN among them; BF16 and F32 hold the same. */
static int fill(void **state)
{
    struct rng rng = { 7 };

    (void)state;
    for (size_t i = 0; i < COUNT; i++) {
        float value = ldexpf((float)rng_normal(&rng), (int)rng_below(&rng, 40) - 20);
        uint32_t bits;

        memcpy(&bits, &value, sizeof(bits));
        narrow[i] = (uint16_t)(bits >> 16);
        if (i % 997 == 3)
            narrow[i] = (uint16_t[]){ 0x7f80, 0xff80, 0x7fc0, 0, 0x8000, 0x7f7f }[i % 6];
        wide[i] = as_f32(narrow[i]);
    }
    memset(data, 0xaa, sizeof(data));
    memset(scales, 0xaa, sizeof(scales));
    return 0;
}

static mok_mxfp8_options options_of(uint32_t dtype, uint32_t precision, uint32_t flags)
{
    return (mok_mxfp8_options){
        .size = sizeof(mok_mxfp8_options),
        .matrices = M,
        .rows = R,
        .columns = C,
        .dtype = dtype,
        .precision = precision,
        .flags = flags,
    };
}

static uint8_t model_element(float value, int exponent)
{
    double x = (double)value;

    return mx_model_encode(isinf(x) ? copysign((double)NAN, x) : ldexp(x, -exponent));
}

/* Element (row, column) of the tensor that is stored. */
static float element(size_t matrix, size_t row, size_t column, bool turned)
{
    return wide[matrix * R * C + (turned ? column * C + row : row * C + column)];
}

/* The group of `height` rows by `width` columns at (row, column) of a stored matrix has the model's scale and codes. */
static void check_group(size_t matrix, size_t rows, size_t columns, size_t row, size_t column, size_t height,
                        size_t width, bool turned)
{
    size_t blocks = (columns + 31) / 32;
    double amax = 0;

    height = rows - row < height ? rows - row : height;
    width = columns - column < width ? columns - column : width;
    for (size_t r = row; r < row + height; r++)
        for (size_t c = column; c < column + width; c++) {
            double magnitude = fabs((double)element(matrix, r, c, turned));
            if (isfinite(magnitude) && magnitude > amax)
                amax = magnitude;
        }
    int exponent = mx_model_exponent(amax);
    for (size_t r = row; r < row + height; r++)
        for (size_t c = column; c < column + width; c++) {
            assert_int_equal(scales[(matrix * rows + r) * blocks + c / 32], exponent + 127);
            assert_int_equal(data[(matrix * rows + r) * columns + c],
                             model_element(element(matrix, r, c, turned), exponent));
        }
}

static void check_tensor(size_t height, size_t width, bool turned)
{
    size_t rows = turned ? C : R, columns = turned ? R : C;
    uint64_t scale_bytes = mok_mxfp8_scale_bytes(M * rows, columns);

    assert_int_equal(scale_bytes, M * rows * ((columns + 31) / 32));
    for (size_t m = 0; m < M; m++)
        for (size_t row = 0; row < rows; row += height)
            for (size_t column = 0; column < columns; column += width)
                check_group(m, rows, columns, row, column, height, width, turned);
    assert_int_equal(data[COUNT], 0xaa);
    assert_int_equal(scales[scale_bytes], 0xaa);
}

static void every_form_of_a_tensor_has_the_bits_of_the_model(void **state)
{
    static const uint32_t forms[] = { 0, MOK_QUANTIZE_TRANSPOSE, MOK_QUANTIZE_TILES,
                                      MOK_QUANTIZE_TRANSPOSE | MOK_QUANTIZE_TILES };

    for (uint32_t dtype = MOK_DTYPE_BF16; dtype <= MOK_DTYPE_F32; dtype++)
        for (uint32_t precision = MOK_MXFP8_PER32; precision <= MOK_MXFP8_PER128; precision++)
            for (size_t i = 0; i < ARRAY_SIZE(forms); i++) {
                bool tiles = forms[i] & MOK_QUANTIZE_TILES;
                if (tiles && precision != MOK_MXFP8_PER128)
                    continue;
                if (dtype == MOK_DTYPE_F32 && i % 3 != 0) /* these differ in reading only */
                    continue;
                mok_mxfp8_options options = options_of(dtype, precision, forms[i]);
                fill(state);
                assert_works(
                    mok_mxfp8_quantize(&options, dtype == MOK_DTYPE_F32 ? (void *)wide : narrow, data, scales));
                check_tensor(tiles ? 128 : 1, precision == MOK_MXFP8_PER128 ? 128 : 32,
                             forms[i] & MOK_QUANTIZE_TRANSPOSE);
            }
}

static void f32_values_are_rounded_once_and_not_through_bf16(void **state)
{
    /* Just above the middle between codes 0x38 (1.0) and 0x39 (1.125); as BF16 it would be the middle, a tie to 1.0. */
    float value = nextafterf(1.0625f, 2);
    mok_mxfp8_options options = options_of(MOK_DTYPE_F32, MOK_MXFP8_PER32, 0);
    float values[2] = { value, 448 };
    uint8_t code[2], scale;

    (void)state;
    options.matrices = 0; /* one */
    options.rows = 1;
    options.columns = 2;
    assert_works(mok_mxfp8_quantize(&options, values, code, &scale));
    assert_int_equal(scale, 127);
    assert_int_equal(code[0], 0x39);
    assert_int_equal(code[1], 0x7e);
}

static void a_tensor_that_is_read_back_has_data_times_scale(void **state)
{
    enum { ROWS = 3, COLUMNS = 48 };
    uint8_t code[ROWS * COLUMNS], scale[ROWS * 2] = { 127, 0, 140, 255, 100, 126 };
    float values[ROWS * COLUMNS];

    (void)state;
    for (size_t i = 0; i < sizeof(code); i++)
        code[i] = (uint8_t)(i * 7);
    assert_works(mok_mxfp8_dequantize(ROWS, COLUMNS, code, scale, values));
    for (size_t i = 0; i < sizeof(code); i++) {
        uint8_t of_block = scale[i / COLUMNS * 2 + i % COLUMNS / 32];
        double want = of_block == 255 ? (double)NAN : ldexp(mx_model_decode(code[i]), of_block - 127);
        assert_true(isnan(want) ? isnan(values[i]) : (double)values[i] == want);
    }
}

static void an_error_of_quantising_a_normal_block_is_within_half_a_unit(void **state)
{
    mok_mxfp8_options options = options_of(MOK_DTYPE_F32, MOK_MXFP8_PER32, 0);
    static float back[COUNT];
    struct rng rng = { 8 };

    (void)state;
    for (size_t i = 0; i < COUNT; i++)
        wide[i] = (float)rng_normal(&rng);
    assert_works(mok_mxfp8_quantize(&options, wide, data, scales));
    assert_works(mok_mxfp8_dequantize(M * R, C, data, scales, back));
    for (size_t i = 0; i < COUNT; i++) {
        double unit = ldexp(1, scales[i / C * ((C + 31) / 32) + i % C / 32] - 127);
        double allowed = fmax(fabs((double)wide[i]) / 16, unit / 1024);
        assert_true(fabs((double)back[i] - (double)wide[i]) <= allowed);
    }
}

static void scale_bytes_of_what_cannot_be_are_0(void **state)
{
    (void)state;
    assert_int_equal(mok_mxfp8_scale_bytes(5, 31), 5);
    assert_int_equal(mok_mxfp8_scale_bytes(5, 33), 10);
    assert_int_equal(mok_mxfp8_scale_bytes(0, 33), 0);
    assert_int_equal(mok_mxfp8_scale_bytes(UINT64_MAX, 33), 0);
    assert_int_equal(mok_mxfp8_scale_bytes(UINT64_C(1) << 62, 33), 0);
}

static void refused(const mok_mxfp8_options *options, int code, const char *words)
{
    assert_fails(mok_mxfp8_quantize(options, wide, data, scales), code, words);
    assert_int_equal(data[0], 0xaa);
    assert_int_equal(scales[0], 0xaa);
}

static void wrong_options_are_refused_by_name_and_nothing_is_written(void **state)
{
    const mok_mxfp8_options good = options_of(MOK_DTYPE_F32, MOK_MXFP8_PER32, 0);
    mok_mxfp8_options o;

    (void)state;
    refused(NULL, MOK_EARG, "mok_mxfp8_options is NULL");
    o = good, o.size = 1, refused(&o, MOK_ESIZE, "mok_mxfp8_options.size is 1");
    o = good, o.rows = 0, refused(&o, MOK_ERANGE, "rows is 0, must be at least 1");
    o = good, o.columns = 0, refused(&o, MOK_ERANGE, "columns is 0, must be at least 1");
    o = good, o.rows = UINT64_MAX, refused(&o, MOK_ERANGE, "18446744073709551615");
    o = good, o.matrices = UINT64_C(1) << 50, refused(&o, MOK_ERANGE, "must be at most 2^62 bytes");
    o = good, o.dtype = 0, refused(&o, MOK_EDTYPE, "dtype is 0, must be 1 (BF16) or 2 (F32)");
    o = good, o.dtype = 3, refused(&o, MOK_EDTYPE, "dtype is 3");
    o = good, o.precision = MOK_BF16, refused(&o, MOK_EDTYPE, "precision is 1, must be 2 (mxfp8-per32)");
    o = good, o.precision = 4, refused(&o, MOK_EDTYPE, "precision is 4");
    o = good, o.flags = 4, refused(&o, MOK_ERANGE, "flags are 0x4, must be of 0x3");
    o = good, o.flags = MOK_QUANTIZE_TILES, refused(&o, MOK_EDTYPE, "with MOK_QUANTIZE_TILES");
}

static void wrong_memory_is_refused_by_name(void **state)
{
    const mok_mxfp8_options o = options_of(MOK_DTYPE_F32, MOK_MXFP8_PER32, 0);
    float *values = wide;

    (void)state;
    assert_fails(mok_mxfp8_quantize(&o, NULL, data, scales), MOK_EARG, "values is NULL");
    assert_fails(mok_mxfp8_quantize(&o, wide, NULL, scales), MOK_EARG, "ret_data is NULL");
    assert_fails(mok_mxfp8_quantize(&o, wide, data, NULL), MOK_EARG, "ret_scales is NULL");
    assert_fails(mok_mxfp8_quantize(&o, (char *)wide + 2, data, scales), MOK_EALIGN, "must be a multiple of 4");
    assert_fails(mok_mxfp8_quantize(&o, wide, (uint8_t *)wide, scales), MOK_EARG, "overlaps values");
    assert_fails(mok_mxfp8_quantize(&o, wide, data, data + COUNT - 1), MOK_EARG, "overlaps ret_data");
    assert_fails(mok_mxfp8_dequantize(0, 32, data, scales, values), MOK_ERANGE, "rows is 0");
    assert_fails(mok_mxfp8_dequantize(1, 0, data, scales, values), MOK_ERANGE, "columns is 0");
    assert_fails(mok_mxfp8_dequantize(UINT64_MAX, 2, data, scales, values), MOK_ERANGE, "2^62");
    assert_fails(mok_mxfp8_dequantize(1, 32, NULL, scales, values), MOK_EARG, "data is NULL");
    assert_fails(mok_mxfp8_dequantize(1, 32, data, NULL, values), MOK_EARG, "scales is NULL");
    assert_fails(mok_mxfp8_dequantize(1, 32, data, scales, NULL), MOK_EARG, "ret_values is NULL");
    assert_fails(mok_mxfp8_dequantize(1, 32, (uint8_t *)wide, scales, wide), MOK_EARG, "overlaps data");
}

static void a_stream_without_cuda_is_refused_with_the_reason(void **state)
{
    const mok_mxfp8_options o = options_of(MOK_DTYPE_F32, MOK_MXFP8_PER32, 0);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);

    (void)state;
    if (driver) { /* tests/gpu has what happens then */
        dlclose(driver);
        skip();
    }
    int r = mok_mxfp8_quantize_on_stream(&o, wide, data, scales, NULL, NULL, NULL);
    assert_int_equal(r, -MOK_ENOTSUP);
    if (!strstr(mok_last_error(), "libcuda.so.1") && !strstr(mok_last_error(), "built without nvcc"))
        fail_msg("said \"%s\"", mok_last_error());
    assert_int_equal(data[0], 0xaa);
}

#define TEST(name) cmocka_unit_test_setup(name, fill)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(every_form_of_a_tensor_has_the_bits_of_the_model),
        TEST(f32_values_are_rounded_once_and_not_through_bf16),
        TEST(a_tensor_that_is_read_back_has_data_times_scale),
        TEST(an_error_of_quantising_a_normal_block_is_within_half_a_unit),
        TEST(scale_bytes_of_what_cannot_be_are_0),
        TEST(wrong_options_are_refused_by_name_and_nothing_is_written),
        TEST(wrong_memory_is_refused_by_name),
        TEST(a_stream_without_cuda_is_refused_with_the_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
