/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench quantize: mok_mxfp8_quantize_on_stream beside a device-to-device copy that moves as many bytes, alternated
 * on one stream. What is compared is memory that is read and written, over time.
 */
#include <cuda_runtime_api.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "mok/mok.h"

enum { ROUNDS = 15, QUEUED = 4 };

static const struct shape {
    const char *name;
    uint64_t experts, rows, columns;
} shapes[] = { { "kimi gate", 8, 2048, 7168 }, { "kimi down", 8, 7168, 2048 }, { "qwen gate", 10, 1024, 4096 } };

static const struct form {
    const char *name;
    uint32_t dtype, precision, flags;
    bool data, transposed;
} forms[] = {
    { "per128", MOK_DTYPE_BF16, MOK_MXFP8_PER128, 0, true, false },
    { "per128, both", MOK_DTYPE_BF16, MOK_MXFP8_PER128, 0, true, true },
    { "per32, both", MOK_DTYPE_BF16, MOK_MXFP8_PER32, 0, true, true },
    { "128 x 128", MOK_DTYPE_BF16, MOK_MXFP8_PER128, MOK_QUANTIZE_TILES, true, false },
    { "128 x 128, both", MOK_DTYPE_BF16, MOK_MXFP8_PER128, MOK_QUANTIZE_TILES, true, true },
    { "transpose alone, per128", MOK_DTYPE_BF16, MOK_MXFP8_PER128, 0, false, true },
    { "F32, per128, both", MOK_DTYPE_F32, MOK_MXFP8_PER128, 0, true, true },
    { "F32, 128 x 128, both", MOK_DTYPE_F32, MOK_MXFP8_PER128, MOK_QUANTIZE_TILES, true, true },
};

static void need(int code, const char *what)
{
    if (code == 0)
        return;
    fprintf(stderr, "mok-bench: %s: %s\n", what, code > 0 ? cudaGetErrorString((cudaError_t)code) : mok_last_error());
    exit(1);
}

static void *memory(uint64_t bytes)
{
    void *at = NULL;

    need(cudaMalloc(&at, bytes), "allocating on the GPU");
    need(cudaMemset(at, 0x3c, bytes), "filling memory");
    return at;
}

struct run {
    cudaStream_t stream;
    cudaEvent_t begin, end;
    mok_mxfp8_options options;
    uint8_t *values, *data, *scales, *transposed, *transposed_scales, *copy;
    uint64_t moved; /* bytes read and written */
};

static void quantise(const struct run *r)
{
    need(mok_mxfp8_quantize_on_stream(&r->options, r->values, r->data, r->scales, r->transposed, r->transposed_scales,
                                      (mok_stream)r->stream),
         "quantising");
}

static void copy(const struct run *r)
{
    need(cudaMemcpyAsync(r->copy, r->copy + r->moved / 2, r->moved / 2, cudaMemcpyDeviceToDevice, r->stream), "copying");
}

static double measure(const struct run *r, void (*work)(const struct run *))
{
    float ms = 0;

    need(cudaEventRecord(r->begin, r->stream), "an event");
    for (int i = 0; i < QUEUED; i++)
        work(r);
    need(cudaEventRecord(r->end, r->stream), "an event");
    need(cudaEventSynchronize(r->end), "waiting");
    need(cudaEventElapsedTime(&ms, r->begin, r->end), "an event");
    return (double)ms / QUEUED;
}

static void open_run(struct run *r, const struct shape *s, const struct form *f)
{
    uint64_t count = s->experts * s->rows * s->columns, size = f->dtype == MOK_DTYPE_F32 ? 4 : 2;
    uint64_t scales = s->experts * mok_mxfp8_scale_bytes(s->rows, s->columns);
    uint64_t transposed_scales = s->experts * mok_mxfp8_scale_bytes(s->columns, s->rows);

    *r = (struct run){ .options = { .size = sizeof(r->options),
                                    .matrices = s->experts,
                                    .rows = s->rows,
                                    .columns = s->columns,
                                    .dtype = f->dtype,
                                    .precision = f->precision,
                                    .flags = f->flags } };
    need(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking), "a stream");
    need(cudaEventCreate(&r->begin), "an event");
    need(cudaEventCreate(&r->end), "an event");
    r->values = memory(count * size);
    r->moved = count * size;
    if (f->data) {
        r->data = memory(count);
        r->scales = memory(scales);
        r->moved += count + scales;
    }
    if (f->transposed) {
        r->transposed = memory(count);
        r->transposed_scales = memory(transposed_scales);
        r->moved += count + transposed_scales;
    }
    r->copy = memory(r->moved / 2 * 2);
}

static void close_run(struct run *r)
{
    uint8_t *all[] = { r->values, r->data, r->scales, r->transposed, r->transposed_scales, r->copy };

    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        cudaFree(all[i]);
    cudaEventDestroy(r->begin);
    cudaEventDestroy(r->end);
    cudaStreamDestroy(r->stream);
}

static void measure_form(const struct shape *s, const struct form *f, const char *device, const char *driver)
{
    double ours[ROUNDS], copies[ROUNDS];
    struct run r;

    open_run(&r, s, f);
    quantise(&r);
    copy(&r);
    for (int i = 0; i < ROUNDS; i++) {
        ours[i] = measure(&r, quantise);
        copies[i] = measure(&r, copy);
    }
    double ms = bench_quantile(ours, ROUNDS, 0.5), copy_ms = bench_quantile(copies, ROUNDS, 0.5);
    double rate = (double)r.moved / ms * 1e-6, copy_rate = (double)(r.moved / 2 * 2) / copy_ms * 1e-6;
    char extra[200];
    snprintf(extra, sizeof(extra), "\"form\":\"%s\",\"gb_per_s\":%.0f,\"copy_gb_per_s\":%.0f,\"of_copy\":%.3f", f->name, rate,
             copy_rate, rate / copy_rate);
    struct bench_record record = { .engine = "cuda", .op = "quantize", .shape = s->name, .tokens = -1, .ms = ms,
                                   .gflop = (double)NAN, .dense_tflops = (double)NAN, .peer = "device-to-device copy",
                                   .peer_ms = copy_ms, .extra = extra, .device = device, .driver = driver };
    bench_emit(&record);
    if (!bench.json)
        printf("%-12s %-26s %8.4f ms %6.0f GB/s, copy %6.0f GB/s: %5.3f\n", s->name, f->name, ms, rate, copy_rate,
               rate / copy_rate);
    close_run(&r);
}

int bench_quantize(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' }, { "help", no_argument, NULL, 'h' }, { 0 } };
    struct cudaDeviceProp properties;
    char driver[64];
    int c, count = 0, version = 0;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c != 'j') {
            fprintf(c == 'h' ? stdout : stderr, "Usage: mok-bench quantize [--json]\n");
            return c == 'h' ? 0 : 2;
        }
        bench.json = true;
    }
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
        fprintf(stderr, "mok-bench: quantize needs a GPU\n");
        return 1;
    }
    need(cudaGetDeviceProperties(&properties, 0), "asking for the GPU's name");
    need(cudaDriverGetVersion(&version), "asking for the driver's version");
    snprintf(driver, sizeof(driver), "CUDA %d.%d", version / 1000, version % 1000 / 10);
    for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++)
        for (size_t f = 0; f < sizeof(forms) / sizeof(forms[0]); f++)
            measure_form(&shapes[s], &forms[f], properties.name, driver);
    return 0;
}
