/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What every benchmark shares: statistics, the JSON line, the dense reference, the environment it ran in.
 * Figures are ratios within one run wherever something is compared.
 */
#ifndef MOK_BENCH_H
#define MOK_BENCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One measured figure. Strings are borrowed; NAN and NULL print as null. */
struct bench_record {
    const char *engine;    /* "host", "cuda" */
    const char *op;        /* "nop", "forward", "backward" */
    const char *precision; /* "bf16" ...; NULL where it does not apply */
    const char *shape;     /* name or "HxIxExK" */
    int ep;                /* 0: does not apply */
    long tokens;           /* of a rank; -1: does not apply */
    const char *routing;
    double ms;           /* median, slowest rank */
    double gflop;        /* of a rank */
    double dense_tflops; /* dense rate in the same run */
    const char *peer;    /* what peer_ms is of */
    double peer_ms;
    const char *extra;           /* further members, "\"a\":1", or NULL */
    const char *device, *driver; /* NULL: this machine's CPU and OpenBLAS */
};

struct bench_options {
    bool json;
    int argc;
    char **argv;
};
extern struct bench_options bench;

void bench_emit(const struct bench_record *record);
/* Sorts in place. */
double bench_quantile(double *values, size_t count, double q);
double bench_now_ms(void);
/* An option's number; says what is wrong and exits with 2 when it is not in low..high. */
uint32_t bench_number(const char *option, const char *text, uint32_t low, uint32_t high);

/* Dense SGEMMs with the FLOPs of a layer forward over `rows` rows; operands are made once. */
struct bench_dense {
    uint64_t rows, hidden, intermediate;
    float *a, *b, *c;
};
int bench_dense_open(struct bench_dense *dense, uint64_t rows, uint64_t hidden, uint64_t intermediate);
double bench_dense_ms(struct bench_dense *dense); /* one run */
void bench_dense_close(struct bench_dense *dense);

/* Subcommands; exit codes. */
int bench_queue(int argc, char **argv);
int bench_layer(int argc, char **argv);
int bench_engine(int argc, char **argv);
int bench_mxfp8(int argc, char **argv);
int bench_quantize(int argc, char **argv); /* only with the CUDA engine */
int bench_metrics(int argc, char **argv);
int bench_crowd(int argc, char **argv);
int bench_mesh(int argc, char **argv);
int bench_sim(int argc, char **argv);
int bench_restart(int argc, char **argv);
int bench_rack(int argc, char **argv);

#endif
