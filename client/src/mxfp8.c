/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 tensors for weights: checks what a caller asks, and leaves the numbers to proto/mx, which the engines use too,
 * or to a kernel with the same bits. Touches no session and writes nothing before everything is checked.
 */
#include <inttypes.h>
#include <stdbool.h>

#include "check.h"
#include "cuda.h"
#include "error.h"
#include "mok/mok.h"
#include "mx.h"
#include "quantize.h"

#define KNOWN_FLAGS (MOK_QUANTIZE_TRANSPOSE | MOK_QUANTIZE_TILES)
#define MOST_BYTES (UINT64_C(1) << 62)

struct span {
    const char *name;
    const void *at;
    uint64_t bytes;
};

static int check_count(const char *what, uint64_t value)
{
    if (value == 0)
        return client_fail(MOK_ERANGE, "%s is 0, must be at least 1", what);
    return 0;
}

/* Bytes of matrices * rows * columns values, at most MOST_BYTES. */
static int count_bytes(uint64_t matrices, uint64_t rows, uint64_t columns, uint64_t value_bytes, uint64_t *ret)
{
    uint64_t bytes = 0;

    if (!mok_mul_u64(matrices, rows, &bytes) || !mok_mul_u64(bytes, columns, &bytes) ||
        !mok_mul_u64(bytes, value_bytes, &bytes) || bytes > MOST_BYTES)
        return client_fail(MOK_ERANGE,
                           "matrices * rows * columns is %" PRIu64 " * %" PRIu64 " * %" PRIu64 " values of %" PRIu64
                           " bytes, must be at most 2^62 bytes",
                           matrices, rows, columns, value_bytes);
    *ret = bytes;
    return 0;
}

static bool overlap(const struct span *a, const struct span *b)
{
    uintptr_t from_a = (uintptr_t)a->at, from_b = (uintptr_t)b->at;

    return from_a < from_b + b->bytes && from_b < from_a + a->bytes;
}

/* Each is there, and those from `outputs` on overlap nothing. */
static int check_spans(const struct span *spans, size_t count, size_t outputs)
{
    for (size_t i = 0; i < count; i++) {
        if (!spans[i].at)
            return client_fail(MOK_EARG, "%s is NULL", spans[i].name);
    }
    for (size_t i = outputs; i < count; i++) {
        for (size_t k = 0; k < i; k++) {
            if (overlap(&spans[i], &spans[k]))
                return client_fail(MOK_EARG, "%s at %p, %" PRIu64 " bytes, overlaps %s at %p, %" PRIu64 " bytes",
                                   spans[i].name, spans[i].at, spans[i].bytes, spans[k].name, spans[k].at,
                                   spans[k].bytes);
        }
    }
    return 0;
}

static int check_alignment(const char *what, const void *at, size_t multiple)
{
    if ((uintptr_t)at % multiple)
        return client_fail(MOK_EALIGN, "%s is %p, must be a multiple of %zu", what, at, multiple);
    return 0;
}

static int check_rule(const mok_mxfp8_options *o)
{
    if (o->dtype != MOK_DTYPE_BF16 && o->dtype != MOK_DTYPE_F32)
        return client_fail(MOK_EDTYPE, "dtype is %" PRIu32 ", must be %d (BF16) or %d (F32)", o->dtype, MOK_DTYPE_BF16,
                           MOK_DTYPE_F32);
    if (o->precision != MOK_MXFP8_PER32 && o->precision != MOK_MXFP8_PER128)
        return client_fail(MOK_EDTYPE, "precision is %" PRIu32 ", must be %d (mxfp8-per32) or %d (mxfp8-per128)",
                           o->precision, MOK_MXFP8_PER32, MOK_MXFP8_PER128);
    if (o->flags & ~KNOWN_FLAGS)
        return client_fail(MOK_ERANGE, "flags are 0x%" PRIx32 ", must be of 0x%x", o->flags, KNOWN_FLAGS);
    if ((o->flags & MOK_QUANTIZE_TILES) && o->precision != MOK_MXFP8_PER128)
        return client_fail(MOK_EDTYPE, "precision is %" PRIu32 ", must be %d (mxfp8-per128) with MOK_QUANTIZE_TILES",
                           o->precision, MOK_MXFP8_PER128);
    return 0;
}

static int check_mxfp8_options(const mok_mxfp8_options *from, mok_mxfp8_options *ret)
{
    int r = check_options(ret, sizeof(*ret), CHECK_THROUGH(mok_mxfp8_options, precision), from, "mok_mxfp8_options");
    if (r < 0 || (r = check_count("rows", ret->rows)) < 0 || (r = check_count("columns", ret->columns)) < 0)
        return r;
    if (ret->matrices == 0)
        ret->matrices = 1;
    return check_rule(ret);
}

_public_ uint64_t mok_mxfp8_scale_bytes(uint64_t rows, uint64_t columns)
{
    uint64_t bytes = 0;

    return mok_mul_u64(rows, mok_mx_scales(columns), &bytes) && bytes <= MOST_BYTES ? bytes : 0;
}

static uint64_t value_bytes(const mok_mxfp8_options *o)
{
    return o->dtype == MOK_DTYPE_F32 ? sizeof(float) : sizeof(uint16_t);
}

/* Checked options, and the bytes of all values. */
static int check_request(const mok_mxfp8_options *options, mok_mxfp8_options *ret, uint64_t *ret_bytes)
{
    int r = check_mxfp8_options(options, ret);
    return r < 0 ? r : count_bytes(ret->matrices, ret->rows, ret->columns, value_bytes(ret), ret_bytes);
}

_public_ int mok_mxfp8_quantize(const mok_mxfp8_options *options, const void *values, uint8_t *ret_data,
                                uint8_t *ret_scales)
{
    mok_mxfp8_options o;
    uint64_t bytes = 0;

    int r = check_request(options, &o, &bytes);
    if (r < 0)
        return r;
    bool turn = o.flags & MOK_QUANTIZE_TRANSPOSE;
    uint64_t count = o.rows * o.columns;
    uint64_t scales = turn ? mok_mxfp8_scale_bytes(o.columns, o.rows) : mok_mxfp8_scale_bytes(o.rows, o.columns);
    const struct span spans[] = {
        { "values", values, bytes },
        { "ret_data", ret_data, o.matrices * count },
        { "ret_scales", ret_scales, o.matrices * scales },
    };
    r = check_spans(spans, ARRAY_SIZE(spans), 1);
    if (r == 0)
        r = check_alignment("values", values, value_bytes(&o));
    if (r < 0)
        return r;
    for (uint64_t m = 0; m < o.matrices; m++) {
        const struct mok_mx_matrix matrix = {
            .value = (const uint8_t *)values + m * count * value_bytes(&o),
            .rows = o.rows,
            .columns = o.columns,
            .f32 = o.dtype == MOK_DTYPE_F32,
            .transpose = turn,
        };
        r = mok_mx_quantize_matrix(&matrix, o.precision == MOK_MXFP8_PER128 ? 128 : 32,
                                   o.flags & MOK_QUANTIZE_TILES ? 128 : 1, ret_data + m * count,
                                   ret_scales + m * scales);
        if (r < 0)
            return client_fail(MOK_EINTERNAL, "the quantiser refused what was checked: %s", mok_strerror(r));
    }
    return 0;
}

/* ------------------------------------------------------------------ on a GPU */

/* An orientation has both outputs or none, and there is one at least. */
static int check_outputs(const uint8_t *data, const uint8_t *scales, const uint8_t *transposed,
                         const uint8_t *transposed_scales)
{
    if (!data && !transposed)
        return client_fail(MOK_EARG, "ret_data and ret_transposed are NULL, must be one of them at least");
    if (!data != !scales)
        return client_fail(MOK_EARG, "ret_%s is NULL, must be given with ret_%s", data ? "scales" : "data",
                           data ? "data" : "scales");
    if (!transposed != !transposed_scales)
        return client_fail(MOK_EARG, "ret_transposed%s is NULL, must be given with ret_transposed%s",
                           transposed ? "_scales" : "", transposed ? "" : "_scales");
    return 0;
}

static int check_gpu_spans(const mok_mxfp8_options *o, uint64_t bytes, const struct quantize_args *a)
{
    uint64_t count = o->matrices * o->rows * o->columns;
    struct span spans[5] = { { "values", a->values, bytes } };
    size_t n = 1;

    if (a->data) {
        spans[n++] = (struct span){ "ret_data", a->data, count };
        spans[n++] = (struct span){ "ret_scales", a->scales, o->matrices * mok_mxfp8_scale_bytes(o->rows, o->columns) };
    }
    if (a->transposed) {
        spans[n++] = (struct span){ "ret_transposed", a->transposed, count };
        spans[n++] = (struct span){ "ret_transposed_scales", a->transposed_scales,
                                    o->matrices * mok_mxfp8_scale_bytes(o->columns, o->rows) };
    }
    int r = check_spans(spans, n, 1);
    return r < 0 ? r : check_alignment("values", a->values, value_bytes(o));
}

static bool multiple(const void *at, uint64_t length, uint64_t of)
{
    return (uintptr_t)at % of == 0 && length % of == 0;
}

static uint32_t squares(uint64_t length, uint32_t most)
{
    uint64_t count = length / QUANTIZE_SIDE + (length % QUANTIZE_SIDE != 0);
    return count < most ? (uint32_t)count : most;
}

static int queue(const mok_mxfp8_options *o, struct quantize_args *a, mok_stream stream)
{
    static const char *const kernels[2][2] = { { "mok_quantize_bf16", "mok_quantize_bf16_tiles" },
                                               { "mok_quantize_f32", "mok_quantize_f32_tiles" } };
    bool tiles = o->flags & MOK_QUANTIZE_TILES;

    if (!tiles && !a->transposed) { /* then no square ends with its matrix */
        a->rows *= a->matrices;
        a->matrices = 1;
    }
    a->wide = (multiple(a->values, a->columns * value_bytes(o), 16) ? QUANTIZE_WIDE_VALUES : 0) |
              (multiple(a->data, a->columns, 8) ? QUANTIZE_WIDE_DATA : 0) |
              (multiple(a->transposed, a->rows, 16) ? QUANTIZE_WIDE_TRANSPOSED : 0) |
              (multiple(a->scales, mok_mx_scales(a->columns), 4) ? QUANTIZE_WIDE_SCALES : 0) |
              (multiple(a->transposed_scales, mok_mx_scales(a->rows), 4) ? QUANTIZE_WIDE_TRANSPOSED_SCALES : 0);
    const struct cuda_launch launch = {
        .kernel = kernels[o->dtype == MOK_DTYPE_F32][tiles],
        .grid = { squares(a->columns, INT32_MAX), squares(a->rows, UINT16_MAX),
                  a->matrices < UINT16_MAX ? (uint32_t)a->matrices : UINT16_MAX },
        .threads = QUANTIZE_THREADS,
        .shared_bytes = QUANTIZE_SHARED_BYTES,
        .argument = a,
    };
    return cuda_launch(&launch, stream);
}

_public_ int mok_mxfp8_quantize_on_stream(const mok_mxfp8_options *options, const void *values, uint8_t *ret_data,
                                          uint8_t *ret_scales, uint8_t *ret_transposed, uint8_t *ret_transposed_scales,
                                          mok_stream stream)
{
    mok_mxfp8_options o;
    uint64_t bytes = 0;

    int r = check_request(options, &o, &bytes);
    if (r < 0)
        return r;
    if (o.flags & MOK_QUANTIZE_TRANSPOSE)
        return client_fail(MOK_ERANGE,
                           "flags are 0x%" PRIx32 ", must be without MOK_QUANTIZE_TRANSPOSE: ret_transposed asks for "
                           "the transpose",
                           o.flags);
    struct quantize_args args = {
        .values = values,
        .data = ret_data,
        .scales = ret_scales,
        .transposed = ret_transposed,
        .transposed_scales = ret_transposed_scales,
        .matrices = o.matrices,
        .rows = o.rows,
        .columns = o.columns,
        .group = o.precision == MOK_MXFP8_PER128 ? 128 : 32,
    };
    r = check_outputs(ret_data, ret_scales, ret_transposed, ret_transposed_scales);
    if (r < 0 || (r = check_gpu_spans(&o, bytes, &args)) < 0)
        return r;
    return queue(&o, &args, stream);
}

_public_ int mok_mxfp8_dequantize(uint64_t rows, uint64_t columns, const uint8_t *data, const uint8_t *scales,
                                  float *ret_values)
{
    uint64_t bytes = 0;

    int r = check_count("rows", rows);
    if (r < 0 || (r = check_count("columns", columns)) < 0 ||
        (r = count_bytes(1, rows, columns, sizeof(float), &bytes)) < 0)
        return r;
    const struct span spans[] = {
        { "data", data, rows * columns },
        { "scales", scales, mok_mxfp8_scale_bytes(rows, columns) },
        { "ret_values", ret_values, bytes },
    };
    r = check_spans(spans, ARRAY_SIZE(spans), 2);
    if (r == 0)
        r = check_alignment("ret_values", ret_values, sizeof(float));
    if (r < 0)
        return r;
    mok_mx_dequantize(data, scales, rows, columns, ret_values);
    return 0;
}
