/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench rack: how long it takes to form and to dissolve a group over several daemons of this machine, beside a
 * group of as many ranks on one daemon. Ranks are threads with their sessions open; measured from when all may ask
 * until all know.
 */
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "bench.h"
#include "mok/mok.h"
#include "rack_stack.h"

struct rank {
    pthread_t thread;
    pthread_barrier_t *barrier;
    const char *socket;
    uint32_t ranks, rank, device;
    int rounds, code;
    double *formed_ms, *left_ms; /* [rounds], of this rank */
};

static int one_round(struct rank *r, mok_session *session, double *ret_formed_ms, double *ret_left_ms)
{
    mok_group_options options = { .size = sizeof(options),
                                  .name = "bench",
                                  .ranks = r->ranks,
                                  .rank = r->rank,
                                  .device = r->device,
                                  .timeout_ms = 30000 };
    mok_group *group = NULL;

    pthread_barrier_wait(r->barrier);
    double start = bench_now_ms();
    int code = mok_group_join(session, &options, &group);
    double formed = bench_now_ms();
    pthread_barrier_wait(r->barrier);
    double leaving = bench_now_ms();
    if (code == 0)
        code = mok_group_leave(group);
    *ret_formed_ms = formed - start;
    *ret_left_ms = bench_now_ms() - leaving;
    return code;
}

static void *run(void *argument)
{
    struct rank *r = argument;
    mok_session_options options = { .size = sizeof(options), .socket_path = r->socket, .job = "bench-rack" };
    mok_session *session = NULL;

    r->code = mok_session_open(&options, &session);
    for (int i = 0; i < r->rounds; i++) { /* all the way, since the others wait at the barrier */
        int code = r->code < 0 ? r->code : one_round(r, session, &r->formed_ms[i], &r->left_ms[i]);
        if (r->code < 0) {
            pthread_barrier_wait(r->barrier);
            pthread_barrier_wait(r->barrier);
        }
        if (code < 0 && r->code == 0) {
            fprintf(stderr, "mok-bench: rank %u: %s\n", r->rank, mok_last_error());
            r->code = code;
        }
    }
    mok_session_close(session);
    return NULL;
}

struct figures {
    double formed_p50_ms, formed_p99_ms, left_p50_ms;
};

static double slowest(const struct rank *r, uint32_t ranks, int round, bool left)
{
    double worst = 0;

    for (uint32_t i = 0; i < ranks; i++) {
        double ms = left ? r[i].left_ms[round] : r[i].formed_ms[round];
        worst = ms > worst ? ms : worst;
    }
    return worst;
}

/* `rack`: rank r on node r; else all on `one`. */
static int measure(const struct rack_stack *rack, const struct stack *one, uint32_t ranks, int rounds,
                   struct figures *ret)
{
    struct rank r[RACK_STACK_MAX];
    double *formed = calloc((size_t)rounds, sizeof(*formed)), *left = calloc((size_t)rounds, sizeof(*left));
    double *all = calloc((size_t)rounds * 2 * ranks, sizeof(*all));
    pthread_barrier_t barrier;
    int code = formed && left && all ? 0 : -1;

    pthread_barrier_init(&barrier, NULL, ranks);
    for (uint32_t i = 0; i < ranks && code == 0; i++) {
        r[i] = (struct rank){ .barrier = &barrier, .ranks = ranks, .rank = i, .rounds = rounds };
        r[i].socket = rack ? rack->node[i].socket : one->socket;
        r[i].device = rack ? 0 : i;
        r[i].formed_ms = all + (size_t)rounds * 2 * i;
        r[i].left_ms = r[i].formed_ms + rounds;
        pthread_create(&r[i].thread, NULL, run, &r[i]);
    }
    for (uint32_t i = 0; i < ranks && formed && left && all; i++) {
        pthread_join(r[i].thread, NULL);
        code = r[i].code < 0 ? r[i].code : code;
    }
    for (int i = 0; i < rounds && code == 0; i++) {
        formed[i] = slowest(r, ranks, i, false);
        left[i] = slowest(r, ranks, i, true);
    }
    if (code == 0) {
        ret->left_p50_ms = bench_quantile(left, (size_t)rounds, 0.5);
        ret->formed_p50_ms = bench_quantile(formed, (size_t)rounds, 0.5);
        ret->formed_p99_ms = bench_quantile(formed, (size_t)rounds, 0.99);
    }
    pthread_barrier_destroy(&barrier);
    free(formed);
    free(left);
    free(all);
    return code;
}

static void report(uint32_t nodes, const struct figures *rack, const struct figures *one)
{
    char extra[160], shape[32];

    snprintf(shape, sizeof(shape), "%u nodes", nodes);
    snprintf(extra, sizeof(extra), "\"p50_ms\":%.3f,\"p99_ms\":%.3f,\"leave_ms\":%.3f,\"one_node_p50_ms\":%.3f",
             rack->formed_p50_ms, rack->formed_p99_ms, rack->left_p50_ms, one->formed_p50_ms);
    struct bench_record record = { .engine = "host",
                                   .op = "form",
                                   .shape = shape,
                                   .ep = (int)nodes,
                                   .tokens = -1,
                                   .ms = rack->formed_p50_ms,
                                   .gflop = (double)NAN,
                                   .dense_tflops = (double)NAN,
                                   .peer = "one node",
                                   .peer_ms = one->formed_p50_ms,
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%-10s %12.2f %12.2f %12.2f %16.2f\n", shape, rack->formed_p50_ms, rack->formed_p99_ms,
               rack->left_p50_ms, one->formed_p50_ms);
}

static int run_case(uint32_t nodes, int rounds)
{
    struct rack_stack rack;
    struct stack stack;
    struct figures over_nodes, on_one;

    if (rack_stack_start(&rack, &(struct rack_stack_options){ .nodes = nodes }) < 0)
        return -1;
    int code = measure(&rack, NULL, nodes, rounds, &over_nodes);
    if (rack_stack_stop(&rack) < 0 || code < 0 || stack_start(&stack, &(struct stack_options){ .devices = nodes }) < 0)
        return -1;
    code = measure(NULL, &stack, nodes, rounds, &on_one);
    if (stack_stop(&stack) != 0 || code < 0)
        return -1;
    report(nodes, &over_nodes, &on_one);
    return 0;
}

int bench_rack(int argc, char **argv)
{
    static const struct option options[] = { { "json", no_argument, NULL, 'j' },
                                             { "rounds", required_argument, NULL, 'n' },
                                             { "help", no_argument, NULL, 'h' },
                                             { 0 } };
    int rounds = 200, c;

    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        if (c == 'j')
            bench.json = true;
        else if (c == 'n')
            rounds = (int)bench_number("rounds", optarg, 10, 100000);
        else {
            fprintf(c == 'h' ? stdout : stderr, "Usage: mok-bench rack [--rounds N] [--json]\n");
            return c == 'h' ? 0 : 2;
        }
    }
    if (!bench.json)
        printf("group formed, ms         p50          p99    left, p50   on one node, p50\n");
    int code = run_case(2, rounds);
    if (code == 0)
        code = run_case(4, rounds);
    return code == 0 ? 0 : 1;
}
