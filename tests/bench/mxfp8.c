/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench mxfp8: what the two scale rules cost in accuracy. Relative error of the quantised values, and of a matrix
 * product with a quantised Gaussian weight, both against the BF16 values: ||got - want|| / ||want||.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "mok/mok.h"
#include "workload.h"

enum { ROWS = 512, COLUMNS = 1024, OUTPUTS = 128 };

/* Uniform in (0, 1]; a value depends on its index alone. */
static double uniform(uint64_t index)
{
    uint64_t z = (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    z ^= z >> 31;
    return ((double)(z >> 11) + 1.0) * 0x1p-53;
}

/* Box-Muller. */
static double normal(uint64_t index)
{
    return sqrt(-2.0 * log(uniform(2 * index))) * cos(6.283185307179586 * uniform(2 * index + 1));
}

/* Student's t with three degrees of freedom: tails like those of activations with outliers. */
static double heavy(uint64_t index)
{
    double chi = 0;
    for (uint64_t i = 0; i < 3; i++) {
        double z = normal(1000003 * (i + 1) + index);
        chi += z * z;
    }
    return normal(index) / sqrt(chi / 3.0 + 1e-12);
}

/* A Gaussian whose channels have very different sizes, a few of them huge. */
static double channels(uint64_t index)
{
    uint64_t column = index % COLUMNS;
    double scale = column % 97 == 5 ? 60.0 : exp(0.7 * normal(77777777 + column));
    return scale * normal(index);
}

static double norm_of_difference(const float *got, const float *want, size_t count)
{
    double difference = 0, norm = 0;
    for (size_t i = 0; i < count; i++) {
        double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return sqrt(difference / norm);
}

static void product(const float *a, const float *b, size_t rows, size_t columns, float *ret)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t o = 0; o < OUTPUTS; o++) {
            double sum = 0;
            for (size_t c = 0; c < columns; c++)
                sum += (double)a[r * columns + c] * (double)b[o * columns + c];
            ret[r * OUTPUTS + o] = (float)sum;
        }
}

static void quantised(const float *values, size_t rows, size_t columns, uint32_t rule, uint32_t flags, float *ret)
{
    mok_mxfp8_options options = { .size = sizeof(options), .rows = rows, .columns = columns, .dtype = MOK_DTYPE_F32,
                                  .precision = rule, .flags = flags };
    uint8_t *data = malloc(rows * columns), *scales = malloc(mok_mxfp8_scale_bytes(rows, columns));
    if (!data || !scales || mok_mxfp8_quantize(&options, values, data, scales) < 0 ||
        mok_mxfp8_dequantize(rows, columns, data, scales, ret) < 0) {
        fprintf(stderr, "mok-bench: %s\n", mok_last_error());
        exit(1);
    }
    free(data);
    free(scales);
}

static void measure(const char *name, const float *values, size_t rows, size_t columns)
{
    static const struct {
        const char *name;
        uint32_t rule, weight_flags;
    } rules[] = { { "per32", MOK_MXFP8_PER32, 0 },
                  { "per128", MOK_MXFP8_PER128, 0 },
                  { "per128, weights 128 x 128", MOK_MXFP8_PER128, MOK_QUANTIZE_TILES } };
    float *weight = malloc(OUTPUTS * columns * 4), *got = malloc(rows * columns * 4), *got_weight = malloc(OUTPUTS * columns * 4);
    float *want_out = malloc(rows * OUTPUTS * 4), *out = malloc(rows * OUTPUTS * 4);
    if (!weight || !got || !got_weight || !want_out || !out)
        exit(1);
    for (size_t i = 0; i < OUTPUTS * columns; i++)
        weight[i] = workload_float(workload_bf16((float)normal(900000000 + i)));
    product(values, weight, rows, columns, want_out);
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        quantised(values, rows, columns, rules[i].rule, 0, got);
        quantised(weight, OUTPUTS, columns, rules[i].rule, rules[i].weight_flags, got_weight);
        product(got, got_weight, rows, columns, out);
        double error = norm_of_difference(got, values, rows * columns), gemm = norm_of_difference(out, want_out, rows * OUTPUTS);
        char extra[160];
        snprintf(extra, sizeof(extra), "\"values\":\"%s\",\"rule\":\"%s\",\"value_error\":%.6f,\"product_error\":%.6f", name,
                 rules[i].name, error, gemm);
        struct bench_record record = { .engine = "host", .op = "quantize", .precision = rules[i].name, .shape = name, .tokens = (long)rows,
                                       .ms = (double)NAN, .gflop = (double)NAN, .dense_tflops = (double)NAN, .peer_ms = (double)NAN,
                                       .extra = extra };
        bench_emit(&record);
        if (!bench.json)
            printf("%-28s %-28s %10.6f %10.6f\n", name, rules[i].name, error, gemm);
    }
    free(weight);
    free(got);
    free(got_weight);
    free(want_out);
    free(out);
}

static void measure_made(const char *name, double (*draw)(uint64_t))
{
    float *values = malloc((size_t)ROWS * COLUMNS * 4);
    if (!values)
        exit(1);
    for (size_t i = 0; i < (size_t)ROWS * COLUMNS; i++)
        values[i] = workload_float(workload_bf16((float)draw(i)));
    measure(name, values, ROWS, COLUMNS);
    free(values);
}

/* The halves of a file that train_moe_lm --dump wrote. */
static int measure_file(const char *path, size_t hidden)
{
    static const char *const names[] = { "example: x", "example: d_out" };
    FILE *file = fopen(path, "re");
    if (!file || fseek(file, 0, SEEK_END) != 0) {
        perror(path);
        return 1;
    }
    size_t rows = (size_t)ftell(file) / 4 / hidden;
    rewind(file);
    uint16_t *raw = malloc(rows * hidden * 2);
    float *values = malloc(rows * hidden * 4);
    for (int i = 0; i < 2 && raw && values; i++) {
        if (rows == 0 || fread(raw, 2 * hidden, rows, file) != rows) {
            fprintf(stderr, "mok-bench: %s is no dump of hidden size %zu\n", path, hidden);
            fclose(file);
            return 1;
        }
        for (size_t j = 0; j < rows * hidden; j++)
            values[j] = workload_float(raw[j]);
        measure(names[i], values, rows, hidden);
    }
    free(raw);
    free(values);
    fclose(file);
    return 0;
}

int bench_mxfp8(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' }, { "dump", required_argument, NULL, 'd' },
                                             { "hidden", required_argument, NULL, 'k' }, { "help", no_argument, NULL, 'h' }, { 0 } };
    const char *dump = NULL;
    uint32_t hidden = 64;
    int c;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'j')
            bench.json = true;
        else if (c == 'd')
            dump = optarg;
        else if (c == 'k')
            hidden = bench_number("hidden", optarg, 16, 1 << 20);
        else {
            fprintf(c == 'h' ? stdout : stderr, "Usage: mok-bench mxfp8 [--dump FILE --hidden H] [--json]\n"
                                                "FILE is what train_moe_lm --dump FILE wrote with hidden size H (64).\n");
            return c == 'h' ? 0 : 2;
        }
    }
    if (!bench.json)
        printf("values                       rule                         of values  of product\n");
    measure_made("Gaussian", normal);
    measure_made("heavy-tailed (t, 3 degrees)", heavy);
    measure_made("uneven channels", channels);
    return dump ? measure_file(dump, hidden) : 0;
}
