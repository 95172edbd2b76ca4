/* SPDX-License-Identifier: Apache-2.0 */
/* mok-bench: entry point, and what its subcommands share. */
#include "bench.h"

#include <cblas.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "mok/mok.h"

struct bench_options bench;

double bench_now_ms(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec * 1e-6;
}

uint32_t bench_number(const char *option, const char *text, uint32_t low, uint32_t high)
{
    char *end;
    long long value = strtoll(text, &end, 10);
    if (*end || end == text || value < low || value > high) {
        fprintf(stderr, "mok-bench: --%s is '%s', must be %u..%u\n", option, text, low, high);
        exit(2);
    }
    return (uint32_t)value;
}

static int compare_double(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double bench_quantile(double *values, size_t count, double q)
{
    if (count == 0)
        return (double)NAN;
    qsort(values, count, sizeof(*values), compare_double);
    size_t index = (size_t)(q * (double)(count - 1) + 0.5);
    return values[index];
}

/* ---------------------------------------------------------------- the JSON line */

static void print_string(const char *name, const char *value)
{
    printf(",\"%s\":", name);
    if (!value) {
        printf("null");
        return;
    }
    putchar('"');
    for (; *value; value++) {
        if (*value == '"' || *value == '\\')
            putchar('\\');
        if ((unsigned char)*value >= 0x20)
            putchar(*value);
    }
    putchar('"');
}

static void print_number(const char *name, double value)
{
    if (isnan(value))
        printf(",\"%s\":null", name);
    else
        printf(",\"%s\":%.6g", name, value);
}

static const char *cpu_name(void)
{
    static char name[128] = "unknown CPU";
    char line[256];
    FILE *file = fopen("/proc/cpuinfo", "re");
    while (file && fgets(line, sizeof(line), file))
        if (sscanf(line, "model name : %127[^\n]", name) == 1)
            break;
    if (file)
        fclose(file);
    return name;
}

static void print_command(void)
{
    char text[512] = "mok-bench";
    for (int i = 1; i < bench.argc; i++) {
        strncat(text, " ", sizeof(text) - strlen(text) - 1);
        strncat(text, bench.argv[i], sizeof(text) - strlen(text) - 1);
    }
    print_string("command", text);
}

static void emit_json(const struct bench_record *r)
{
    char date[32];
    time_t now = time(NULL);
    struct tm tm;
    strftime(date, sizeof(date), "%Y-%m-%d", gmtime_r(&now, &tm));
    printf("{\"date\":\"%s\"", date);
    print_string("device", r->device ? r->device : cpu_name());
    print_string("driver", r->driver ? r->driver : openblas_get_config());
    print_string("commit", getenv("MOK_COMMIT") ? getenv("MOK_COMMIT") : MOK_BENCH_COMMIT);
    print_string("engine", r->engine);
    print_string("op", r->op);
    print_string("precision", r->precision);
    print_string("shape", r->shape);
    print_number("ep", r->ep ? r->ep : (double)NAN);
    print_number("tokens", r->tokens >= 0 ? (double)r->tokens : (double)NAN);
    print_string("routing", r->routing);
    print_number("ms", r->ms);
    print_number("gflop", r->gflop);
    print_number("dense_tflops", r->dense_tflops);
    print_string("peer", r->peer);
    print_number("peer_ms", r->peer_ms);
    print_command();
    if (r->extra)
        printf(",%s", r->extra);
    printf("}\n");
    fflush(stdout);
}

void bench_emit(const struct bench_record *r)
{
    if (bench.json)
        emit_json(r);
}

/* ---------------------------------------------------------------- the dense reference */

static float *random_floats(uint64_t count)
{
    float *values = malloc(count * sizeof(float));
    uint32_t state = 12345;
    for (uint64_t i = 0; values && i < count; i++) {
        state = state * 1664525u + 1013904223u;
        values[i] = (float)(state >> 8) * 0x1p-24f - 0.5f;
    }
    return values;
}

int bench_dense_open(struct bench_dense *d, uint64_t rows, uint64_t hidden, uint64_t intermediate)
{
    uint64_t wide = hidden > 2 * intermediate ? hidden : 2 * intermediate;
    *d = (struct bench_dense){ .rows = rows, .hidden = hidden, .intermediate = intermediate };
    d->a = random_floats(rows * wide);
    d->b = random_floats(2 * intermediate * hidden);
    d->c = random_floats(rows * wide);
    return d->a && d->b && d->c ? 0 : -1;
}

double bench_dense_ms(struct bench_dense *d)
{
    int m = (int)d->rows, h = (int)d->hidden, n = (int)d->intermediate;
    double start = bench_now_ms();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, 2 * n, h, 1, d->a, h, d->b, h, 0, d->c, 2 * n);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, h, n, 1, d->a, n, d->b, n, 0, d->c, h);
    return bench_now_ms() - start;
}

void bench_dense_close(struct bench_dense *d)
{
    free(d->a);
    free(d->b);
    free(d->c);
    *d = (struct bench_dense){ 0 };
}

/* ---------------------------------------------------------------- entry point */

static int usage(FILE *file)
{
    fprintf(file, "Usage: mok-bench COMMAND [OPTIONS]\n\n"
                  "  queue   round trip of a no-op, sleeping and polling worker\n"
                  "  layer   forward and backward of a layer, beside dense SGEMM of the same FLOPs\n"
                  "  engine  the host engine in this process: sweeps of ring, minibatch, comm units and EP\n"
                  "  metrics what being scraped costs a busy mokd, and what an idle one takes\n"
                  "  crowd   many sessions with many operations in flight each\n"
                  "  mxfp8   accuracy of the two MXFP8 scale rules\n"
#ifdef MOK_HAVE_CUDA
                  "  quantize weights to MXFP8 on a GPU, beside a copy\n"
#endif
                  "  restart from the end of mokd to the next finished operation of a job\n"
                  "  mesh    a million small commands between two nodes of a rack, both ways\n"
                  "  sim     racks of up to 18 nodes x 4 devices in virtual time\n"
                  "  rack    groups over daemons: time to form and to leave one\n\n"
                  "Every command takes --json (one object a line) and --help. mokd is started on the spot.\n");
    return file == stdout ? 0 : 2;
}

int main(int argc, char **argv)
{
    bench = (struct bench_options){ .argc = argc, .argv = argv };
    if (argc < 2)
        return usage(stderr);
    if (strcmp(argv[1], "--help") == 0)
        return usage(stdout);
    if (strcmp(argv[1], "queue") == 0)
        return bench_queue(argc - 1, argv + 1);
    if (strcmp(argv[1], "layer") == 0)
        return bench_layer(argc - 1, argv + 1);
    if (strcmp(argv[1], "engine") == 0)
        return bench_engine(argc - 1, argv + 1);
    if (strcmp(argv[1], "metrics") == 0)
        return bench_metrics(argc - 1, argv + 1);
    if (strcmp(argv[1], "crowd") == 0)
        return bench_crowd(argc - 1, argv + 1);
    if (strcmp(argv[1], "mxfp8") == 0)
        return bench_mxfp8(argc - 1, argv + 1);
#ifdef MOK_HAVE_CUDA
    if (strcmp(argv[1], "quantize") == 0)
        return bench_quantize(argc - 1, argv + 1);
#endif
    if (strcmp(argv[1], "mesh") == 0)
        return bench_mesh(argc - 1, argv + 1);
    if (strcmp(argv[1], "sim") == 0)
        return bench_sim(argc - 1, argv + 1);
    if (strcmp(argv[1], "restart") == 0)
        return bench_restart(argc - 1, argv + 1);
    if (strcmp(argv[1], "rack") == 0)
        return bench_rack(argc - 1, argv + 1);
    fprintf(stderr, "mok-bench: unknown command '%s'\n", argv[1]);
    return usage(stderr);
}
