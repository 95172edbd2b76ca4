/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok_mxfp8_quantize_on_stream: every form of every shape has the bits of the host's mok_mxfp8_quantize, nothing beside
 * the tensors is written, wrong arguments are refused by name. Needs libmok alone; skipped where there is no GPU.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "mok/mok.h"
#include "rng.h"

#define CANARY 0xa5
#define EDGE 64u /* bytes before and behind each tensor */

static cudaStream_t stream;

/* A tensor on the GPU, `offset` bytes behind an aligned address, and its contents here. */
struct tensor {
    uint8_t *memory, *at, *host;
    uint64_t bytes;
};

static struct tensor tensor_new(uint64_t bytes, uint32_t offset)
{
    struct tensor t = { .bytes = bytes };
    void *memory = NULL;

    assert_int_equal(cudaMalloc(&memory, bytes + 2 * EDGE), 0);
    assert_int_equal(cudaMemset(memory, CANARY, bytes + 2 * EDGE), 0);
    assert_int_equal(cudaDeviceSynchronize(), 0); /* `stream` does not wait for the default one */
    t.memory = memory;
    t.at = t.memory + EDGE / 2 + offset;
    t.host = malloc(bytes + 2 * EDGE);
    assert_non_null(t.host);
    return t;
}

static void tensor_free(struct tensor *t)
{
    cudaFree(t->memory);
    free(t->host);
}

/* What the GPU has of it is `want`, with canaries around it. */
static void check(struct tensor *t, const uint8_t *want, const char *what)
{
    uint64_t before = (uint64_t)(t->at - t->memory);

    assert_int_equal(cudaMemcpy(t->host, t->memory, t->bytes + 2 * EDGE, cudaMemcpyDeviceToHost), 0);
    for (uint64_t i = 0; i < t->bytes + 2 * EDGE; i++) {
        bool inside = i >= before && i < before + t->bytes;
        uint8_t must = inside ? want[i - before] : CANARY;
        if (t->host[i] != must)
            fail_msg("%s: byte %lld of %llu is %#x, must be %#x", what, (long long)i - (long long)before,
                     (unsigned long long)t->bytes, t->host[i], must);
    }
}

struct shape {
    uint64_t matrices, rows, columns;
    uint32_t offset; /* of every tensor, in bytes; of the values in values */
};

static uint64_t count_of(const struct shape *s)
{
    return s->matrices * s->rows * s->columns;
}

/* Values of all sizes; whole groups of the largest and the smallest, of zeros, of NaN and infinities, and some
 * anywhere. */
static void make_values(const struct shape *s, uint16_t *narrow, float *wide)
{
    static const uint16_t odd[] = { 0x7fc0, 0xffc1, 0x7f80, 0xff80, 0x7f7f, 0xff7f, 0x0001, 0x8001, 0x0080, 0x8000 };
    struct rng rng = { s->rows * 1000003 + s->columns };

    for (uint64_t i = 0; i < count_of(s); i++) {
        uint64_t row = i / s->columns % s->rows, column = i % s->columns;
        uint16_t v = (uint16_t)((rng_below(&rng, 60) + 90) << 7 | rng_below(&rng, 128) | rng_below(&rng, 2) << 15);

        switch ((row / 40 * 3 + column / 50) % 11) {
        case 3:
            v = 0;
            break;
        case 4:
            v = (uint16_t)(0x7f70 | (i & 0x800f)); /* the largest */
            break;
        case 5:
            v = (uint16_t)(i * 40503u & 0x80ff); /* the smallest */
            break;
        case 6:
            v = (uint16_t)(0x4300u + (i * 7u & 0xffu)); /* ties */
            break;
        case 7:
            v = odd[i % 4];
            break;
        case 8:
            v = i % 37 == 0 ? odd[i / 37 % (sizeof(odd) / sizeof(odd[0]))] : v;
            break;
        }
        uint32_t bits = (uint32_t)v << 16 | (uint32_t)(i % 3 ? i * 2654435761u & 0xffff : 0);
        narrow[i] = v;
        memcpy(&wide[i], &bits, sizeof(bits));
    }
}

static void run_forms(const struct shape *s, uint32_t dtype, uint32_t precision, uint32_t flags, const void *values)
{
    uint64_t count = count_of(s), size = dtype == MOK_DTYPE_F32 ? 4 : 2;
    uint64_t scales = s->matrices * mok_mxfp8_scale_bytes(s->rows, s->columns);
    uint64_t turned_scales = s->matrices * mok_mxfp8_scale_bytes(s->columns, s->rows);
    mok_mxfp8_options o = { .size = sizeof(o),
                            .matrices = s->matrices,
                            .rows = s->rows,
                            .columns = s->columns,
                            .dtype = dtype,
                            .precision = precision,
                            .flags = flags };
    uint8_t *data = malloc(count), *scale = malloc(scales), *turned = malloc(count),
            *turned_scale = malloc(turned_scales);
    struct tensor from = tensor_new(count * size, s->offset * (uint32_t)size);

    assert_int_equal(mok_mxfp8_quantize(&o, values, data, scale), 0);
    o.flags |= MOK_QUANTIZE_TRANSPOSE;
    assert_int_equal(mok_mxfp8_quantize(&o, values, turned, turned_scale), 0);
    o.flags = flags;
    assert_int_equal(cudaMemcpy(from.at, values, count * size, cudaMemcpyHostToDevice), 0);
    for (unsigned outputs = 1; outputs <= 3; outputs++) {
        struct tensor to[] = { tensor_new(count, s->offset), tensor_new(scales, s->offset),
                               tensor_new(count, s->offset), tensor_new(turned_scales, s->offset) };
        bool plain = outputs & 1, turn = outputs & 2;
        char what[160];

        snprintf(what, sizeof(what), "%llu x %llu x %llu, offset %u, dtype %u, precision %u, flags %u, outputs %u",
                 (unsigned long long)s->matrices, (unsigned long long)s->rows, (unsigned long long)s->columns,
                 s->offset, dtype, precision, flags, outputs);
        int r = mok_mxfp8_quantize_on_stream(&o, from.at, plain ? to[0].at : NULL, plain ? to[1].at : NULL,
                                             turn ? to[2].at : NULL, turn ? to[3].at : NULL, (mok_stream)stream);
        if (r != 0)
            fail_msg("%s: %s", what, mok_last_error());
        assert_int_equal(cudaStreamSynchronize(stream), 0);
        if (plain) {
            check(&to[0], data, what);
            check(&to[1], scale, what);
        }
        if (turn) {
            check(&to[2], turned, what);
            check(&to[3], turned_scale, what);
        }
        for (size_t i = 0; i < 4; i++)
            tensor_free(&to[i]);
    }
    tensor_free(&from);
    free(data);
    free(scale);
    free(turned);
    free(turned_scale);
}

static void run_shape(const struct shape *s, bool every_form)
{
    uint16_t *narrow = malloc(count_of(s) * sizeof(*narrow));
    float *wide = malloc(count_of(s) * sizeof(*wide));

    make_values(s, narrow, wide);
    run_forms(s, MOK_DTYPE_BF16, MOK_MXFP8_PER32, 0, narrow);
    run_forms(s, MOK_DTYPE_BF16, MOK_MXFP8_PER128, MOK_QUANTIZE_TILES, narrow);
    run_forms(s, MOK_DTYPE_F32, MOK_MXFP8_PER128, 0, wide);
    if (every_form) {
        run_forms(s, MOK_DTYPE_BF16, MOK_MXFP8_PER128, 0, narrow);
        run_forms(s, MOK_DTYPE_F32, MOK_MXFP8_PER32, 0, wide);
        run_forms(s, MOK_DTYPE_F32, MOK_MXFP8_PER128, MOK_QUANTIZE_TILES, wide);
    }
    free(narrow);
    free(wide);
}

static void every_form_of_every_shape_has_the_bits_of_the_host(void **state)
{
    static const struct shape shapes[] = {
        { 2, 130, 144, 0 },   { 1, 272, 160, 0 },   { 3, 33, 50, 1 },    { 1, 1, 1, 0 },     { 2, 1, 261, 3 },
#ifndef MOK_EMULATED
        { 1, 128, 128, 0 },   { 1, 128, 128, 1 },   { 5, 261, 1, 0 },    { 1, 129, 4, 0 },   { 1, 2048, 7168, 0 },
        { 2, 7168, 2048, 0 }, { 3, 1000, 1000, 0 }, { 1, 1001, 999, 5 }, { 70001, 2, 3, 0 }, { 1, 3, 70001, 0 },
#endif
    };

    (void)state;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
#ifdef MOK_EMULATED
        run_shape(&shapes[i], i == 0);
#else
        run_shape(&shapes[i], true);
#endif
}

/* The default stream, and a second use of the same one, in its order. */
static void what_is_queued_before_is_seen_and_the_bits_repeat(void **state)
{
    enum { ROWS = 144, COLUMNS = 160, COUNT = ROWS * COLUMNS };
    const struct shape s = { 1, ROWS, COLUMNS, 0 };
    mok_mxfp8_options o = {
        .size = sizeof(o), .rows = ROWS, .columns = COLUMNS, .dtype = MOK_DTYPE_BF16, .precision = MOK_MXFP8_PER32
    };
    static uint16_t values[COUNT];
    static float wide[COUNT];
    static uint8_t data[COUNT], scale[COUNT / 32];
    struct tensor from = tensor_new(sizeof(values), 0), to = tensor_new(COUNT, 0),
                  scales = tensor_new(sizeof(scale), 0);

    (void)state;
    make_values(&s, values, wide);
    assert_int_equal(mok_mxfp8_quantize(&o, values, data, scale), 0);
    for (int i = 0; i < 3; i++) {
        cudaStream_t of = i == 2 ? NULL : stream;
        assert_int_equal(cudaMemsetAsync(from.at, 0, sizeof(values), of), 0);
        assert_int_equal(cudaMemcpyAsync(from.at, values, sizeof(values), cudaMemcpyHostToDevice, of), 0);
        assert_int_equal(mok_mxfp8_quantize_on_stream(&o, from.at, to.at, scales.at, NULL, NULL, (mok_stream)of), 0);
        assert_int_equal(cudaStreamSynchronize(of), 0);
        check(&to, data, "data");
        check(&scales, scale, "scales");
        assert_int_equal(cudaMemset(to.at, CANARY, COUNT), 0);
        assert_int_equal(cudaMemset(scales.at, CANARY, sizeof(scale)), 0);
        assert_int_equal(cudaDeviceSynchronize(), 0);
    }
    tensor_free(&from);
    tensor_free(&to);
    tensor_free(&scales);
}

#ifndef MOK_EMULATED
static void a_captured_stream_records_it(void **state)
{
    const struct shape s = { 1, 300, 400, 0 };
    uint64_t count = count_of(&s), scales = mok_mxfp8_scale_bytes(s.rows, s.columns);
    mok_mxfp8_options o = { .size = sizeof(o),
                            .rows = s.rows,
                            .columns = s.columns,
                            .dtype = MOK_DTYPE_BF16,
                            .precision = MOK_MXFP8_PER128,
                            .flags = MOK_QUANTIZE_TILES };
    uint16_t *values = malloc(count * 2);
    float *wide = malloc(count * 4);
    uint8_t *data = malloc(count), *scale = malloc(scales);
    struct tensor from = tensor_new(count * 2, 0), to = tensor_new(count, 0), to_scale = tensor_new(scales, 0);
    cudaGraph_t graph;
    cudaGraphExec_t ready;

    (void)state;
    assert_int_equal(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), 0);
    int r = mok_mxfp8_quantize_on_stream(&o, from.at, to.at, to_scale.at, NULL, NULL, (mok_stream)stream);
    assert_int_equal(cudaStreamEndCapture(stream, &graph), 0);
    if (r != 0)
        fail_msg("%s", mok_last_error());
    assert_int_equal(cudaGraphInstantiate(&ready, graph, 0), 0);
    make_values(&s, values, wide);
    assert_int_equal(mok_mxfp8_quantize(&o, values, data, scale), 0);
    assert_int_equal(cudaMemcpy(from.at, values, count * 2, cudaMemcpyHostToDevice), 0);
    assert_int_equal(cudaGraphLaunch(ready, stream), 0);
    assert_int_equal(cudaStreamSynchronize(stream), 0);
    check(&to, data, "data");
    check(&to_scale, scale, "scales");
    cudaGraphExecDestroy(ready);
    cudaGraphDestroy(graph);
    tensor_free(&from);
    tensor_free(&to);
    tensor_free(&to_scale);
    free(values);
    free(wide);
    free(data);
    free(scale);
}

/* More matrices than a grid has room for, and more values than 32 bits count: the last matrix has its own bits. */
static void offsets_beyond_32_bits_are_right(void **state)
{
    const struct shape last = { 1, 64, 1024, 0 };
    const uint64_t matrices = 70000, each = 64 * 1024, count = matrices * each;
    mok_mxfp8_options o = { .size = sizeof(o),
                            .matrices = matrices,
                            .rows = 64,
                            .columns = 1024,
                            .dtype = MOK_DTYPE_BF16,
                            .precision = MOK_MXFP8_PER32 };
    uint16_t *values = malloc(each * 2);
    float *wide = malloc(each * 4);
    uint8_t *want = malloc(each), *want_scale = malloc(each / 32), *got = malloc(each);
    uint8_t *from = NULL, *data = NULL, *scale = NULL, *turned = NULL, *turned_scale = NULL;

    (void)state;
    if (cudaMalloc((void **)&from, 2 * count) || cudaMalloc((void **)&data, count) ||
        cudaMalloc((void **)&turned, count) || cudaMalloc((void **)&scale, count / 32) ||
        cudaMalloc((void **)&turned_scale, count / 32))
        skip();
    make_values(&last, values, wide);
    assert_int_equal(cudaMemset(from, 0x41, 2 * count), 0);
    assert_int_equal(cudaMemcpy(from + (count - each) * 2, values, each * 2, cudaMemcpyHostToDevice), 0);
    assert_int_equal(cudaDeviceSynchronize(), 0);
    assert_int_equal(mok_mxfp8_quantize_on_stream(&o, from, data, scale, turned, turned_scale, (mok_stream)stream), 0);
    assert_int_equal(cudaStreamSynchronize(stream), 0);
    o.matrices = 1;
    for (uint32_t turn = 0; turn < 2; turn++) {
        o.flags = turn ? MOK_QUANTIZE_TRANSPOSE : 0;
        assert_int_equal(mok_mxfp8_quantize(&o, values, want, want_scale), 0);
        assert_int_equal(cudaMemcpy(got, (turn ? turned : data) + count - each, each, cudaMemcpyDeviceToHost), 0);
        assert_memory_equal(got, want, each);
        assert_int_equal(
            cudaMemcpy(got, (turn ? turned_scale : scale) + (count - each) / 32, each / 32, cudaMemcpyDeviceToHost), 0);
        assert_memory_equal(got, want_scale, each / 32);
    }
    cudaFree(from);
    cudaFree(data);
    cudaFree(turned);
    cudaFree(scale);
    cudaFree(turned_scale);
    free(values);
    free(wide);
    free(want);
    free(want_scale);
    free(got);
}
#endif

static void refused(const mok_mxfp8_options *o, void *values, uint8_t *const outputs[4], int code, const char *words)
{
    int r = mok_mxfp8_quantize_on_stream(o, values, outputs[0], outputs[1], outputs[2], outputs[3], (mok_stream)stream);

    assert_int_equal(r, -code);
    if (!strstr(mok_last_error(), words))
        fail_msg("said \"%s\", must say \"%s\"", mok_last_error(), words);
}

static void wrong_arguments_are_refused_by_name(void **state)
{
    const mok_mxfp8_options good = {
        .size = sizeof(good), .rows = 3, .columns = 64, .dtype = MOK_DTYPE_F32, .precision = MOK_MXFP8_PER128
    };
    struct tensor t = tensor_new(8192, 0);
    uint8_t *v = t.at, *a = v + 1024, *b = v + 2048, *c = v + 3072, *d = v + 4096;
    mok_mxfp8_options o;

    (void)state;
    refused(NULL, v, (uint8_t *[]){ a, b, c, d }, MOK_EARG, "mok_mxfp8_options is NULL");
    refused(&good, NULL, (uint8_t *[]){ a, b, c, d }, MOK_EARG, "values is NULL");
    refused(&good, v, (uint8_t *[]){ NULL, NULL, NULL, NULL }, MOK_EARG, "ret_data and ret_transposed are NULL");
    refused(&good, v, (uint8_t *[]){ a, NULL, c, d }, MOK_EARG, "ret_scales is NULL, must be given with ret_data");
    refused(&good, v, (uint8_t *[]){ NULL, b, c, d }, MOK_EARG, "ret_data is NULL, must be given with ret_scales");
    refused(&good, v, (uint8_t *[]){ a, b, NULL, d }, MOK_EARG, "ret_transposed is NULL");
    refused(&good, v, (uint8_t *[]){ a, b, c, NULL }, MOK_EARG, "ret_transposed_scales is NULL");
    refused(&good, v, (uint8_t *[]){ a, b, v + 767, d }, MOK_EARG, "ret_transposed at");
    refused(&good, v, (uint8_t *[]){ a, a + 191, c, d }, MOK_EARG, "overlaps ret_data");
    refused(&good, v + 2, (uint8_t *[]){ a, b, c, d }, MOK_EALIGN, "must be a multiple of 4");
    o = good, o.rows = 0;
    refused(&o, v, (uint8_t *[]){ a, b, c, d }, MOK_ERANGE, "rows is 0, must be at least 1");
    o = good, o.columns = UINT64_MAX;
    refused(&o, v, (uint8_t *[]){ a, b, c, d }, MOK_ERANGE, "must be at most 2^62 bytes");
    o = good, o.flags = MOK_QUANTIZE_TRANSPOSE;
    refused(&o, v, (uint8_t *[]){ a, b, c, d }, MOK_ERANGE, "flags are 0x1, must be without MOK_QUANTIZE_TRANSPOSE");
    o = good, o.precision = MOK_MXFP8_PER32, o.flags = MOK_QUANTIZE_TILES;
    refused(&o, v, (uint8_t *[]){ a, b, c, d }, MOK_EDTYPE, "with MOK_QUANTIZE_TILES");
    assert_int_equal(cudaMemcpy(t.host, t.memory, t.bytes + 2 * EDGE, cudaMemcpyDeviceToHost), 0);
    for (uint64_t i = 0; i < t.bytes + 2 * EDGE; i++)
        assert_int_equal(t.host[i], CANARY);
    tensor_free(&t);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
#ifndef MOK_EMULATED
        cmocka_unit_test(a_captured_stream_records_it), /* also where nothing was loaded yet */
#endif
        cmocka_unit_test(every_form_of_every_shape_has_the_bits_of_the_host),
        cmocka_unit_test(what_is_queued_before_is_seen_and_the_bits_repeat),
        cmocka_unit_test(wrong_arguments_are_refused_by_name),
#ifndef MOK_EMULATED
        cmocka_unit_test(offsets_beyond_32_bits_are_right),
#endif
    };
    int count = 0;

    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        printf("skipped: no GPU\n");
        return 77;
    }
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
        return 1;
    cmocka_set_test_filter(argc > 1 ? argv[1] : NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
