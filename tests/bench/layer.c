/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench layer: forward and backward through mokd, everything included, alternated with dense SGEMMs of the same
 * FLOPs on as many threads, or with a plain all-to-all implementation of the layer. One thread of this process plays
 * one rank. Slowest rank, median over the rounds.
 */
#include <cblas.h>
#include <getopt.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "layer_cuda.h"
#include "plain.h"
#include "workload.h"
#include "stack.h"

enum { MAX_ROUNDS = 1000, MAX_RANKS = 16 };

struct shape {
    const char *name;
    uint32_t hidden, intermediate, experts_per_rank, topk;
};

/* Sizes that a CPU finishes; the first is the one with a bar. */
static const struct shape shapes[] = {
    { "h1024-i2048", 1024, 2048, 8, 2 },
    { "h512-i1408", 512, 1408, 16, 4 },
    { "h2048-i768", 2048, 768, 8, 4 },
    { "h256-i512", 256, 512, 8, 2 },
};

struct options {
    const char *shape; /* NULL: all */
    uint32_t ep, tokens, threads, rounds;
    enum workload_routing routing;
    uint32_t context_mode;
    uint64_t ring_bytes;
    uint32_t minibatch_rows, comm_units;
    bool bf16_gradients;
    bool plain; /* the peer is the plain implementation, not SGEMM */
};

/* What a round measures, in this order. */
enum step { FORWARD, BACKWARD, DENSE, PLAIN_FORWARD, PLAIN_BACKWARD, STEPS };

struct run {
    const struct options *options;
    struct workload problem;
    struct workload_rank rank[MAX_RANKS];
    struct bench_dense dense[MAX_RANKS];
    struct plain *plain;
    pthread_barrier_t barrier;
    double ms[STEPS][MAX_RANKS][MAX_ROUNDS];
    uint64_t rows[MAX_RANKS];
    int code[MAX_RANKS];
    const char *socket;
};

struct part {
    struct run *run;
    uint32_t rank;
};

static const char *routing_names[] = { "uniform", "zipf", "hot-rank", "hot-expert" };

static int timed(struct workload_rank *rank, bool backward, double *ret_ms, uint64_t *ret_rows)
{
    mok_ticket ticket;
    mok_result result;
    double start = bench_now_ms();
    int code = backward ? workload_backward(rank, MOK_BACKWARD_OVERWRITE_WGRAD, &ticket) : workload_forward(rank, &ticket);
    if (code == 0)
        code = mok_wait(rank->session, ticket, -1, &result);
    if (code == 0 && result.code < 0)
        code = result.code;
    *ret_ms = bench_now_ms() - start;
    *ret_rows = result.rows;
    return code;
}

/* The comparators; collective over the ranks' threads where they are plain. */
static double timed_peer(struct run *run, uint32_t rank, enum step step)
{
    double start = bench_now_ms();
    if (step == DENSE)
        return bench_dense_ms(&run->dense[rank]);
    if (step == PLAIN_FORWARD)
        plain_forward(run->plain, rank);
    else
        plain_backward(run->plain, rank);
    return bench_now_ms() - start;
}

static bool step_wanted(const struct options *o, enum step step)
{
    return step == FORWARD || step == BACKWARD || (step == DENSE) == !o->plain;
}

static bool all_well(const struct run *run)
{
    bool ok = true;
    for (uint32_t r = 0; r < run->options->ep; r++)
        ok = ok && run->code[r] == 0;
    return ok;
}

static void one_step(struct run *run, uint32_t r, enum step step, double *ret_ms)
{
    pthread_barrier_wait(&run->barrier);
    bool ok = all_well(run);
    int code = run->code[r];
    pthread_barrier_wait(&run->barrier);
    if (ok && step > BACKWARD)
        *ret_ms = timed_peer(run, r, step);
    else if (ok)
        code = timed(&run->rank[r], step == BACKWARD, ret_ms, &run->rows[r]);
    if (code < 0 && run->code[r] == 0)
        fprintf(stderr, "mok-bench: rank %u: %s\n", r, mok_last_error());
    pthread_barrier_wait(&run->barrier);
    run->code[r] = code;
}

static void *play_rank(void *argument)
{
    struct part *part = argument;
    struct run *run = part->run;
    uint32_t r = part->rank, warm = 2;
    uint64_t first = (uint64_t)r * run->options->tokens, rows = (uint64_t)run->options->tokens * run->problem.topk;
    int code = workload_open(&run->rank[r], &run->problem, r, run->options->tokens, first, run->socket, "bench", r);
    if (code < 0)
        fprintf(stderr, "mok-bench: rank %u: %s\n", r, mok_last_error());
    if (code == 0 && bench_dense_open(&run->dense[r], rows, run->problem.hidden, run->problem.intermediate) < 0)
        code = -MOK_ENOMEM;
    run->code[r] = code;
    for (uint32_t i = 0; i < run->options->rounds + warm; i++) {
        for (int step = 0; step < STEPS; step++) {
            double ms = 0;
            if (!step_wanted(run->options, (enum step)step))
                continue;
            one_step(run, r, (enum step)step, &ms);
            if (i >= warm)
                run->ms[step][r][i - warm] = ms;
        }
    }
    workload_close(&run->rank[r]);
    bench_dense_close(&run->dense[r]);
    return NULL;
}

static double slowest_median(struct run *run, enum step step)
{
    double worst[MAX_ROUNDS];
    for (uint32_t i = 0; i < run->options->rounds; i++) {
        worst[i] = 0;
        for (uint32_t r = 0; r < run->options->ep; r++)
            worst[i] = fmax(worst[i], run->ms[step][r][i]);
    }
    return bench_quantile(worst, run->options->rounds, 0.5);
}

static void report(struct run *run, const struct shape *shape)
{
    const struct options *o = run->options;
    double gflop = 6.0 * o->tokens * shape->topk * shape->hidden * shape->intermediate * 1e-9;
    double dense = o->plain ? (double)NAN : slowest_median(run, DENSE);
    for (int what = FORWARD; what <= BACKWARD; what++) {
        double flops = gflop * (what + 1), ms = slowest_median(run, (enum step)what);
        double peer = o->plain ? slowest_median(run, what == FORWARD ? PLAIN_FORWARD : PLAIN_BACKWARD) : dense * (what + 1);
        char extra[200];
        snprintf(extra, sizeof(extra), "\"peer_over_ours\":%.3f,\"threads\":%u,\"ring_bytes\":%llu,\"minibatch_rows\":%u,\"comm_units\":%u,\"grads\":\"%s\"",
                 peer / ms, o->threads, (unsigned long long)o->ring_bytes, o->minibatch_rows, o->comm_units,
                 o->bf16_gradients ? "bf16" : "f32");
        struct bench_record record = {
            .engine = "host", .op = what ? "backward" : "forward", .precision = "bf16", .shape = shape->name,
            .ep = (int)o->ep, .tokens = o->tokens, .routing = routing_names[o->routing], .ms = ms, .gflop = flops,
            .dense_tflops = o->plain ? (double)NAN : flops / peer,
            .peer = o->plain ? "plain all-to-all, no overlap" : "OpenBLAS SGEMM, same FLOPs", .peer_ms = peer, .extra = extra,
        };
        bench_emit(&record);
        if (!bench.json)
            printf("%-14s %-9s %3u %7u %-10s %9.2f %9.1f %10.2f %12.2f\n", shape->name, record.op, o->ep, o->tokens,
                   record.routing, ms, flops / ms * 1e3, peer, peer / ms);
    }
}

static int run_shape(const struct options *o, const struct shape *shape, const struct stack *stack)
{
    struct run *run = calloc(1, sizeof(*run));
    struct part part[MAX_RANKS];
    pthread_t thread[MAX_RANKS];
    int code = 0;
    if (!run)
        return -1;
    run->options = o;
    run->socket = stack->socket;
    run->problem = (struct workload){ .hidden = shape->hidden, .intermediate = shape->intermediate,
                                     .experts = shape->experts_per_rank * o->ep, .topk = shape->topk, .ep = o->ep,
                                     .max_tokens = o->tokens, .context_mode = o->context_mode, .seed = 1,
                                     .routing = o->routing, .ring_bytes = o->ring_bytes,
                                     .minibatch_rows = o->minibatch_rows, .comm_units = o->comm_units,
                                     .bf16_gradients = o->bf16_gradients };
    if (o->plain && !(run->plain = plain_open(&run->problem, o->tokens))) {
        fprintf(stderr, "mok-bench: not enough memory for the comparator\n");
        free(run);
        return -1;
    }
    pthread_barrier_init(&run->barrier, NULL, o->ep);
    for (uint32_t r = 0; r < o->ep; r++) {
        part[r] = (struct part){ run, r };
        pthread_create(&thread[r], NULL, play_rank, &part[r]);
    }
    for (uint32_t r = 0; r < o->ep; r++) {
        pthread_join(thread[r], NULL);
        code = run->code[r] < 0 ? run->code[r] : code;
    }
    pthread_barrier_destroy(&run->barrier);
    if (code == 0)
        report(run, shape);
    plain_close(run->plain);
    free(run);
    return code;
}

static int usage(FILE *file)
{
    fprintf(file, "Usage: mok-bench layer [OPTIONS]\n"
                  "  --engine host|cuda      engine to measure; cuda has options of its own (--engine cuda --help)\n"
                  "  --shape NAME            one shape; default: all (");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        fprintf(file, "%s%s", i ? ", " : "", shapes[i].name);
    fprintf(file, ")\n"
                  "  --ep N                  ranks, a device each (1..16; default 1)\n"
                  "  --tokens N              tokens a rank (default 1024)\n"
                  "  --threads N             threads a device (default 1)\n"
                  "  --routing NAME          uniform, zipf, hot-rank, hot-expert\n"
                  "  --context full|recompute\n"
                  "  --grads f32|bf16        type of the weight gradients (default f32)\n"
                  "  --ring BYTES --minibatch ROWS --comm-units N   override the plan\n"
                  "  --peer sgemm|plain      what to alternate with (default sgemm)\n"
                  "  --rounds N              measured rounds (default 10)\n"
                  "  --json                  one object a line\n");
    return file == stdout ? 0 : 2;
}

static enum workload_routing routing_of(const char *text)
{
    for (int i = 0; i < 4; i++)
        if (strcmp(text, routing_names[i]) == 0)
            return (enum workload_routing)i;
    fprintf(stderr, "mok-bench: --routing is '%s', must be uniform, zipf, hot-rank or hot-expert\n", text);
    exit(2);
}

static void parse(int argc, char **argv, struct options *o)
{
    static const struct option options[] = {
        { "json", no_argument, NULL, 'j' },          { "engine", required_argument, NULL, 'e' },
        { "shape", required_argument, NULL, 's' },   { "ep", required_argument, NULL, 'p' },
        { "tokens", required_argument, NULL, 't' },  { "threads", required_argument, NULL, 'u' },
        { "routing", required_argument, NULL, 'r' }, { "context", required_argument, NULL, 'c' },
        { "ring", required_argument, NULL, 'g' },    { "minibatch", required_argument, NULL, 'm' },
        { "comm-units", required_argument, NULL, 'o' }, { "rounds", required_argument, NULL, 'n' },
        { "grads", required_argument, NULL, 'd' },
        { "peer", required_argument, NULL, 'q' },    { "help", no_argument, NULL, 'h' },
        { 0 },
    };
    int c;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 'j': bench.json = true; break;
        case 'e':
            if (strcmp(optarg, "host") != 0) {
                fprintf(stderr, "mok-bench: --engine is '%s', must be host or, in a build with that engine, cuda\n", optarg);
                exit(2);
            }
            break;
        case 's': o->shape = optarg; break;
        case 'p': o->ep = bench_number("ep", optarg, 1, MAX_RANKS); break;
        case 't': o->tokens = bench_number("tokens", optarg, 1, 1 << 20); break;
        case 'u': o->threads = bench_number("threads", optarg, 1, 1024); break;
        case 'r': o->routing = routing_of(optarg); break;
        case 'c': o->context_mode = strcmp(optarg, "recompute") == 0 ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL; break;
        case 'g': o->ring_bytes = bench_number("ring", optarg, 0, 1u << 31); break;
        case 'm': o->minibatch_rows = bench_number("minibatch", optarg, 0, 1 << 24); break;
        case 'o': o->comm_units = bench_number("comm-units", optarg, 0, 1024); break;
        case 'n': o->rounds = bench_number("rounds", optarg, 1, MAX_ROUNDS); break;
        case 'd':
            if (strcmp(optarg, "f32") != 0 && strcmp(optarg, "bf16") != 0) {
                fprintf(stderr, "mok-bench: --grads is '%s', must be f32 or bf16\n", optarg);
                exit(2);
            }
            o->bf16_gradients = strcmp(optarg, "bf16") == 0;
            break;
        case 'q': o->plain = strcmp(optarg, "plain") == 0; break;
        case 'h': exit(usage(stdout));
        default: exit(usage(stderr));
        }
    }
}

int bench_layer(int argc, char **argv)
{
    struct options o = { .ep = 1, .tokens = 1024, .threads = 1, .rounds = 10, .context_mode = MOK_CONTEXT_FULL };
#if defined(MOK_HAVE_CUDA)
    for (int i = 1; i + 1 < argc; i++)
        if (strcmp(argv[i], "--engine") == 0 && strcmp(argv[i + 1], "cuda") == 0)
            return bench_layer_cuda(argc, argv);
#endif
    parse(argc, argv, &o);
    struct stack stack;
    struct stack_options so = { .devices = o.ep, .threads = o.threads, .poll_us = 50 };
    if (stack_start(&stack, &so) < 0)
        return 1;
    openblas_set_num_threads((int)o.threads);
    if (!bench.json)
        printf("shape          op         ep  tokens routing           ms   GFLOP/s    peer ms  peer / ours\n");
    int code = 0, matched = 0;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]) && code == 0; i++) {
        if (o.shape && strcmp(o.shape, shapes[i].name) != 0)
            continue;
        matched++;
        code = run_shape(&o, &shapes[i], &stack);
    }
    if (!matched) {
        fprintf(stderr, "mok-bench: no shape '%s'\n", o.shape);
        code = -2;
    }
    if (stack_stop(&stack) != 0 && code == 0)
        code = -1;
    return code == 0 ? 0 : code == -2 ? 2 : 1;
}
