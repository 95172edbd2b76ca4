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
#include "forming.h"
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

/* Groups with a rank on every device: what they say to each other until they stand, agree and go. */
static int emit_groups(const struct size *size, enum world_order order, uint32_t jobs, bool kill, uint64_t seed)
{
    struct forming_options o = { .nodes = size->nodes,
                                 .devices = size->devices,
                                 .jobs = jobs,
                                 .calls = kill ? 200 : 4,
                                 .order = order,
                                 .kill = kill,
                                 .seed = seed };
    uint32_t ranks = o.nodes * o.devices;
    struct forming_result f;
    char extra[400], shape[32];

    if (forming_run(&o, &f) < 0) {
        fprintf(stderr, "mok-bench: out of memory\n");
        return -1;
    }
    double a_rank = (double)f.messages / (double)(ranks * o.jobs * (1 + o.calls));
    bool well = f.done && f.left == 0;
    snprintf(shape, sizeof(shape), "%u x %u", o.nodes, o.devices);
    snprintf(extra, sizeof(extra),
             "\"jobs\":%u,\"calls\":%u,\"order\":\"%s\",\"killed\":%s,\"done\":%s,\"formed\":%llu,\"left\":%llu,"
             "\"messages\":%llu,\"messages_a_rank_and_call\":%.3f,\"bytes\":%llu,\"largest\":%llu,\"busiest\":%llu,"
             "\"form_ms\":%.3f,\"told_ms\":%.3f",
             o.jobs, o.calls, order_names[o.order], kill ? "true" : "false", f.done ? "true" : "false",
             (unsigned long long)f.formed, (unsigned long long)f.left, (unsigned long long)f.messages, a_rank,
             (unsigned long long)f.bytes, (unsigned long long)f.largest, (unsigned long long)f.busiest,
             (double)f.form_ns * 1e-6, (double)f.told_ns * 1e-6);
    struct bench_record record = { .engine = "simulated",
                                   .op = "form",
                                   .shape = shape,
                                   .ep = (int)ranks,
                                   .tokens = -1,
                                   .ms = (double)f.virtual_ns * 1e-6,
                                   .gflop = (double)NAN,
                                   .dense_tflops = (double)NAN,
                                   .peer_ms = (double)NAN,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%-7s %-9s %-6s %-6s %9llu %10.3f %10llu %8llu %8llu %9.3f %9.3f\n", shape, order_names[o.order],
               kill ? "killed" : "-", well ? "done" : "STUCK", (unsigned long long)f.messages, a_rank,
               (unsigned long long)f.bytes, (unsigned long long)f.largest, (unsigned long long)f.busiest,
               (double)f.form_ns * 1e-6, (double)f.told_ns * 1e-6);
    return well ? 0 : -1;
}

static int all_groups(uint32_t jobs, uint64_t seed)
{
    int code = 0;

    if (!bench.json)
        printf("rack    order     node   all     messages rank, call      bytes  largest  busiest   form ms   told ms\n");
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        for (int order = WORLD_SAME; order <= WORLD_RANDOM; order++)
            code |= emit_groups(&sizes[i], (enum world_order)order, jobs, false, seed) < 0;
        if (sizes[i].nodes > 1)
            code |= emit_groups(&sizes[i], WORLD_RANDOM, jobs, true, seed) < 0;
    }
    return code;
}

static int usage(FILE *file)
{
    fprintf(file,
            "Usage: mok-bench sim [--jobs N] [--layers N] [--rounds N] [--seed N] [--groups] [--json]\n"
            "Runs racks of 1, 2, 4, 9 and 18 nodes x 4 devices in virtual time, N jobs (default 3) on all of them, a\n"
            "rank submitting N layers (default 4, at most 64) N times (default 4) in three orders; with --groups, N\n"
            "groups of all ranks that form, agree on four allocations and go, also with a node that dies. Exit code 1\n"
            "if anything got stuck.\n");
    return file == stdout ? 0 : 2;
}

int bench_sim(int argc, char **argv)
{
    static const struct option options[] = {
        { "jobs", required_argument, NULL, 'j' },
        { "layers", required_argument, NULL, 'l' },
        { "rounds", required_argument, NULL, 'r' },
        { "seed", required_argument, NULL, 's' },
        { "groups", no_argument, NULL, 'g' },
        { "json", no_argument, NULL, 'o' },
        { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    struct world_options o = {
        .jobs = 3, .layers = 4, .rounds = 4, .tokens = 256, .experts_per_rank = 4, .topk = 8, .seed = 1
    };
    int c, code = 0;
    bool only_groups = false;

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
        case 'g':
            only_groups = true;
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
    if (only_groups)
        return all_groups(o.jobs, o.seed);
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
