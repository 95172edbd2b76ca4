/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench sim: a rack of up to 18 nodes x 4 devices in virtual time; prints what control traffic, waiting and the
 * schedule cost as it grows. Everything but `schedule_ms` is the same on every machine.
 */
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "cost.h"
#include "world.h"

static const char *const order_names[] = { "same", "opposite", "random" };

struct size {
    uint32_t nodes, devices;
};
static const struct size sizes[] = { { 1, 4 }, { 2, 4 }, { 4, 4 }, { 9, 4 }, { 18, 4 } };

static int emit(const struct world_options *o)
{
    uint32_t ranks = o->nodes * o->devices;
    struct world_result w;
    struct schedule_cost cost;
    char extra[400], shape[32];

    if (world_run(o, &w) < 0 || schedule_cost(ranks, o->experts_per_rank, 2048, o->topk, o->seed, &cost) < 0) {
        fprintf(stderr, "mok-bench: out of memory\n");
        return -1;
    }
    struct visits v = count_visits(ranks);
    double operations = (double)w.operations, over = (double)w.virtual_ns / (double)w.busiest_ns;
    double bells = (double)w.bells / operations, looks = (double)w.looks / operations;
    snprintf(shape, sizeof(shape), "%u x %u", o->nodes, o->devices);
    snprintf(extra, sizeof(extra),
             "\"jobs\":%u,\"layers\":%u,\"order\":\"%s\",\"done\":%s,\"operations\":%llu,\"failed\":%llu,"
             "\"over_busiest\":%.3f,\"bells_an_op\":%.1f,\"looks_an_op\":%.1f,\"share_spread\":%.3f,"
             "\"visits_at_once\":%u,\"schedule_slots\":%llu,\"schedule_ms\":%.3f",
             o->jobs, o->layers, order_names[o->order], w.done ? "true" : "false", (unsigned long long)w.operations,
             (unsigned long long)w.failed, over, bells, looks, w.fair_spread, v.most_at_once,
             (unsigned long long)cost.slots, cost.ms);
    struct bench_record record = { .engine = "simulated",
                                   .op = "forward",
                                   .shape = shape,
                                   .ep = (int)ranks,
                                   .tokens = o->tokens,
                                   .routing = "uniform",
                                   .ms = (double)w.virtual_ns * 1e-6,
                                   .gflop = (double)NAN,
                                   .dense_tflops = (double)NAN,
                                   .peer_ms = (double)NAN,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%-7s %-9s %-6s %8llu %9.3f %10.1f %10.1f %8.3f %9u %12llu %9.3f\n", shape, order_names[o->order],
               w.done ? "done" : "STUCK", (unsigned long long)w.operations, over, bells, looks, w.fair_spread,
               v.most_at_once, (unsigned long long)cost.slots, cost.ms);
    return w.done && w.failed == 0 ? 0 : -1;
}

static int usage(FILE *file)
{
    fprintf(file,
            "Usage: mok-bench sim [--jobs N] [--layers N] [--rounds N] [--seed N] [--json]\n"
            "Runs racks of 1, 2, 4, 9 and 18 nodes x 4 devices in virtual time, N jobs (default 3) on all of them, a\n"
            "rank submitting N layers (default 4, at most 64) N times (default 4) in three orders. Exit code 1 if\n"
            "anything got stuck.\n");
    return file == stdout ? 0 : 2;
}

int bench_sim(int argc, char **argv)
{
    static const struct option options[] = {
        { "jobs", required_argument, NULL, 'j' },
        { "layers", required_argument, NULL, 'l' },
        { "rounds", required_argument, NULL, 'r' },
        { "seed", required_argument, NULL, 's' },
        { "json", no_argument, NULL, 'o' },
        { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    struct world_options o = {
        .jobs = 3, .layers = 4, .rounds = 4, .tokens = 256, .experts_per_rank = 4, .topk = 8, .seed = 1
    };
    int c, code = 0;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 'j':
            o.jobs = bench_number("jobs", optarg, 1, 64);
            break;
        case 'l':
            o.layers = bench_number("layers", optarg, 1, 64);
            break;
        case 'r':
            o.rounds = bench_number("rounds", optarg, 1, 1000);
            break;
        case 's':
            o.seed = bench_number("seed", optarg, 1, UINT32_MAX);
            break;
        case 'o':
            bench.json = true;
            break;
        case 'h':
            return usage(stdout);
        default:
            return usage(stderr);
        }
    }
    if (!bench.json)
        printf("rack    order     all         ops over busy bells / op looks / op   shares  at once      slots, "
               "schedule ms\n");
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++)
        for (int order = WORLD_SAME; order <= WORLD_RANDOM; order++) {
            o.nodes = sizes[i].nodes;
            o.devices = sizes[i].devices;
            o.order = (enum world_order)order;
            code |= emit(&o) < 0;
        }
    return code;
}
