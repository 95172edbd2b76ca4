/* SPDX-License-Identifier: Apache-2.0 */
/* mok-bench mesh: small commands between two nodes of a rack, both ways at once, and the longest time without any. */
#include <getopt.h>
#include <math.h>
#include <stdio.h>

#include "bench.h"
#include "rack_net.h"

struct flow {
    uint64_t count, sent[2], seen;
    double last_ms, longest_ms; /* since a command arrived; the longest such time */
};

static struct flow flow;

static bool push_both(struct rack_net *net)
{
    for (uint32_t from = 0; from < 2; from++)
        while (flow.sent[from] < flow.count && rack_net_ping(net, from, 1 - from, flow.sent[from] + 1, 16, 0) == 0)
            flow.sent[from]++;
    uint64_t seen = net->node[0].messages + net->node[1].messages;
    double now_ms = bench_now_ms();
    if (seen == flow.seen && now_ms - flow.last_ms > flow.longest_ms)
        flow.longest_ms = now_ms - flow.last_ms;
    if (seen != flow.seen)
        flow.last_ms = now_ms;
    flow.seen = seen;
    return seen == 2 * flow.count;
}

static void report(double ms)
{
    char extra[128];
    double rate = 2 * (double)flow.count / ms;

    snprintf(extra, sizeof(extra), "\"commands\":%llu,\"per_ms\":%.1f,\"longest_gap_ms\":%.2f",
             2 * (unsigned long long)flow.count, rate, flow.longest_ms);
    struct bench_record record = { .engine = "mesh",
                                   .op = "ping",
                                   .shape = "two nodes, both ways",
                                   .tokens = -1,
                                   .ms = ms,
                                   .gflop = (double)NAN,
                                   .dense_tflops = (double)NAN,
                                   .peer_ms = (double)NAN,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%llu commands in %.0f ms: %.0f a second; longest time without one %.1f ms\n",
               2 * (unsigned long long)flow.count, ms, rate * 1e3, flow.longest_ms);
}

int bench_mesh(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' },
                                             { "count", required_argument, NULL, 'n' },
                                             { "help", no_argument, NULL, 'h' },
                                             { 0 } };
    static struct rack_net net;

    flow.count = 1000000;
    for (int c; (c = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        if (c == 'j') {
            bench.json = true;
        } else if (c == 'n') {
            flow.count = bench_number("count", optarg, 1, 1000000000);
        } else {
            fprintf(c == 'h' ? stdout : stderr, "Usage: mok-bench mesh [--count N] [--json]\n");
            return c == 'h' ? 0 : 2;
        }
    }
    rack_net_open(&net, 2);
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "the nodes do not find each other");
    double start = flow.last_ms = bench_now_ms();
    rack_net_until_for(&net, push_both, 3600, "the commands stall");
    report(bench_now_ms() - start);
    bool whole = !net.node[0].out_of_order && !net.node[1].out_of_order && net.node[0].losses + net.node[1].losses == 0;
    rack_net_close(&net);
    if (!whole)
        fprintf(stderr, "mok-bench: commands were lost or came out of order\n");
    return whole ? 0 : 1;
}
