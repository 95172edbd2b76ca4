/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench layer --engine cuda: the forward pass on one GPU, through mokd in the order of a CUDA stream, alternated
 * with the same kernels launched in this process on the same buffers. What is left between the two is what the daemon
 * costs. CUDA events round each operation; medians. `queued`: several operations in a row on the stream, time of one.
 */
#include <cuda_runtime_api.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "cuda/engine.h"
#include "layer_cuda.h"
#include "mok/mok.h"
#include "stack.h"

enum { MAX_ROUNDS = 1000, WARM = 10, QUEUED = 8, PATTERN_BYTES = 4 << 20 };

struct shape {
    const char *name;
    uint32_t hidden, intermediate, experts, topk;
};

static const struct shape shapes[] = {
    { "kimi", 7168, 2048, 8, 8 }, { "glm", 6144, 2048, 8, 8 },      { "qwen", 4096, 1024, 10, 10 },
    { "dsv4", 7168, 3072, 6, 6 }, { "mixtral", 4096, 14336, 8, 2 }, { "qwen3-30b", 2048, 768, 128, 8 },
    { "small", 1024, 512, 8, 2 },
};

struct options {
    const char *shape; /* NULL: all */
    uint32_t tokens, rounds, poll_us;
};

struct layer {
    const struct shape *shape;
    uint32_t tokens;
    mok_session *session;
    mok_group *group;
    mok_layer *layer;
    mok_buffer *x, *ids, *weight, *out, *gate, *up, *down;
    cudaStream_t stream;
    cudaEvent_t from, to;
    /* in process */
    struct mok_engine *engine;
    struct mok_engine_layer *own;
    struct mok_plan plan;
    void *symmetric, *private_memory;
    struct mok_peer peer;
    struct mok_op_args args;
};

static int say(const char *what)
{
    fprintf(stderr, "mok-bench: %s: %s\n", what, mok_last_error());
    return -1;
}

static int cuda(cudaError_t e, const char *what)
{
    if (e == cudaSuccess)
        return 0;
    fprintf(stderr, "mok-bench: %s: %s\n", what, cudaGetErrorString(e));
    return -1;
}

/* ------------------------------------------------------------------ inputs */

static uint64_t draw(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

/* Random BF16 of about unit size times `scale`, repeated with a period that no tile has. */
static int fill(mok_buffer *buffer, float scale, uint64_t seed)
{
    uint64_t bytes = mok_buffer_size(buffer), state = seed;
    uint64_t period = PATTERN_BYTES - 34;
    uint16_t *pattern = malloc(PATTERN_BYTES);
    int r = pattern ? 0 : -1;

    for (size_t i = 0; pattern && i < PATTERN_BYTES / 2; i++) {
        uint64_t bits = draw(&state);
        float value =
            ((float)(bits & 0xffff) + (float)(bits >> 16 & 0xffff) + (float)(bits >> 32 & 0xffff) - 98302.5f) *
            (scale / 32768.0f);
        uint32_t word;
        memcpy(&word, &value, 4);
        pattern[i] = (uint16_t)(word >> 16);
    }
    for (uint64_t at = 0; r == 0 && at < bytes; at += period)
        r = cuda(cudaMemcpy((char *)mok_buffer_data(buffer) + at, pattern, bytes - at < period ? bytes - at : period,
                            cudaMemcpyHostToDevice),
                 "filling a buffer");
    free(pattern);
    return r;
}

/* K distinct experts a token. */
static int fill_routing(struct layer *l)
{
    uint32_t k = l->shape->topk, e = l->shape->experts, order[128];
    size_t slots = (size_t)l->tokens * k;
    int32_t *ids = malloc(slots * 4);
    float *weight = malloc(slots * 4);
    uint64_t state = 7;
    int r = ids && weight ? 0 : -1;

    for (uint32_t t = 0; r == 0 && t < l->tokens; t++) {
        for (uint32_t i = 0; i < e; i++)
            order[i] = i;
        for (uint32_t i = 0; i < k; i++) {
            uint32_t j = i + (uint32_t)(draw(&state) >> 20) % (e - i), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
            ids[t * k + i] = (int32_t)order[i];
            weight[t * k + i] = 1.0f / (float)k;
        }
    }
    if (r == 0)
        r = cuda(cudaMemcpy(mok_buffer_data(l->ids), ids, slots * 4, cudaMemcpyHostToDevice), "ids");
    if (r == 0)
        r = cuda(cudaMemcpy(mok_buffer_data(l->weight), weight, slots * 4, cudaMemcpyHostToDevice), "weights");
    free(ids);
    free(weight);
    return r;
}

static int fill_all(struct layer *l)
{
    float in = 1.0f / sqrtf((float)l->shape->hidden), mid = 1.0f / sqrtf((float)l->shape->intermediate);

    if (fill(l->x, 1.0f, 11) < 0 || fill(l->gate, in, 13) < 0 || fill(l->up, in, 17) < 0 || fill(l->down, mid, 19) < 0)
        return -1;
    return fill_routing(l);
}

/* ------------------------------------------------------------------ through mokd */

static int allocate(struct layer *l)
{
    const struct shape *s = l->shape;
    uint64_t t = l->tokens, expert = (uint64_t)s->experts * s->intermediate * s->hidden * 2;

    if (mok_buffer_alloc_symmetric(l->group, t * s->hidden * 2, 0, &l->x) < 0 ||
        mok_buffer_alloc_private(l->session, 0, t * s->topk * 4, &l->ids) < 0 ||
        mok_buffer_alloc_private(l->session, 0, t * s->topk * 4, &l->weight) < 0 ||
        mok_buffer_alloc_private(l->session, 0, t * s->hidden * 2, &l->out) < 0 ||
        mok_buffer_alloc_private(l->session, 0, expert, &l->gate) < 0 ||
        mok_buffer_alloc_private(l->session, 0, expert, &l->up) < 0 ||
        mok_buffer_alloc_private(l->session, 0, expert, &l->down) < 0)
        return say("allocating");
    return 0;
}

static int open_session(struct layer *l, const char *socket)
{
    const struct shape *s = l->shape;
    mok_session_options so = { .size = sizeof(so), .socket_path = socket, .job = "bench" };
    mok_group_options go = { .size = sizeof(go), .name = "bench", .ranks = 1 };
    mok_layer_options lo = { .size = sizeof(lo),
                             .hidden = s->hidden,
                             .intermediate = s->intermediate,
                             .experts = s->experts,
                             .topk = s->topk,
                             .max_tokens = l->tokens,
                             .precision = MOK_BF16 };

    if (mok_session_open(&so, &l->session) < 0 || mok_group_join(l->session, &go, &l->group) < 0 ||
        mok_layer_create(l->group, &lo, 30000, &l->layer) < 0)
        return say("opening");
    if (allocate(l) < 0)
        return -1;
    mok_layer_params params = {
        .size = sizeof(params), .gate = { .buffer = l->gate }, .up = { .buffer = l->up }, .down = { .buffer = l->down }
    };
    return mok_layer_bind(l->layer, &params) < 0 ? say("binding") : 0;
}

static int forward_daemon(struct layer *l, mok_ticket *ret)
{
    mok_forward_args args = { .size = sizeof(args),
                              .tokens = l->tokens,
                              .x = { .buffer = l->x },
                              .ids = { .buffer = l->ids },
                              .topk_weight = { .buffer = l->weight },
                              .out = { .buffer = l->out } };
    return mok_layer_forward_on_stream(l->layer, &args, l->stream, ret) < 0 ? say("forward") : 0;
}

/* ------------------------------------------------------------------ in process */

static int open_own(struct layer *l)
{
    const struct shape *s = l->shape;
    struct mok_engine_config config = { 0 };
    struct mok_device_limits limits;
    struct mok_message message = { "" };
    struct mok_layer_spec spec = { .hidden = s->hidden,
                                   .intermediate = s->intermediate,
                                   .experts = s->experts,
                                   .topk = s->topk,
                                   .ep = 1,
                                   .max_tokens = l->tokens,
                                   .precision = MOK_BF16 };

    int r = mok_cuda_engine.probe(&config, &limits, &message);
    if (r == 0)
        r = mok_cuda_engine.open(&config, &l->engine, &message);
    if (r == 0)
        r = mok_plan_make(&spec, &limits, &l->plan, NULL, 0, &message);
    if (r == 0 && (cudaMalloc(&l->symmetric, l->plan.symmetric_bytes) != cudaSuccess ||
                   cudaMalloc(&l->private_memory, l->plan.private_bytes) != cudaSuccess))
        r = -MOK_ENOMEM;
    if (r == 0)
        r = mok_cuda_engine.layer_open(l->engine, &l->plan, &l->symmetric, l->private_memory, &l->own, &message);
    if (r < 0) {
        fprintf(stderr, "mok-bench: in process: %d, %s\n", r, message.text);
        return -1;
    }
    l->peer = (struct mok_peer){ .x = mok_buffer_data(l->x), .tokens = l->tokens };
    l->args = (struct mok_op_args){ .kind = MOK_KIND_FORWARD,
                                    .tokens = l->tokens,
                                    .ids = mok_buffer_data(l->ids),
                                    .topk_weight = mok_buffer_data(l->weight),
                                    .out = mok_buffer_data(l->out),
                                    .peer = &l->peer };
    l->args.params.gate = mok_buffer_data(l->gate);
    l->args.params.up = mok_buffer_data(l->up);
    l->args.params.down = mok_buffer_data(l->down);
    return 0;
}

static int forward_own(struct layer *l)
{
    for (int phase = MOK_PHASE_PREPARE; phase <= MOK_PHASE_REDUCE; phase++)
        if (mok_cuda_enqueue(l->own, &l->args, (enum mok_phase)phase, l->stream) < 0)
            return -1;
    return 0;
}

/* ------------------------------------------------------------------ measuring */

/* `count` operations in a row; milliseconds of one. */
static double timed(struct layer *l, bool daemon, int count)
{
    mok_ticket ticket[QUEUED];
    mok_result result;
    float ms = 0;
    int r = cuda(cudaEventRecord(l->from, l->stream), "event");

    for (int i = 0; i < count && r == 0; i++)
        r = daemon ? forward_daemon(l, &ticket[i]) : forward_own(l);
    if (r == 0)
        r = cuda(cudaEventRecord(l->to, l->stream), "event");
    if (r == 0)
        r = cuda(cudaStreamSynchronize(l->stream), "waiting");
    for (int i = 0; i < count && r == 0 && daemon; i++) {
        if (mok_wait(l->session, ticket[i], -1, &result) < 0 || result.code < 0)
            r = say("an operation");
    }
    if (r == 0)
        r = cuda(cudaEventElapsedTime(&ms, l->from, l->to), "events");
    return r < 0 ? (double)NAN : (double)ms / count;
}

enum figure { DAEMON, OWN, DAEMON_QUEUED, OWN_QUEUED, FIGURES };

static int measure(struct layer *l, uint32_t rounds, double median[FIGURES])
{
    static double ms[FIGURES][MAX_ROUNDS];

    for (uint32_t i = 0; i < rounds + WARM; i++) {
        for (int f = 0; f < FIGURES; f++) {
            double one = timed(l, f == DAEMON || f == DAEMON_QUEUED, f >= DAEMON_QUEUED ? QUEUED : 1);
            if (isnan(one))
                return -1;
            if (i >= WARM)
                ms[f][i - WARM] = one;
        }
    }
    for (int f = 0; f < FIGURES; f++)
        median[f] = bench_quantile(ms[f], rounds, 0.5);
    return 0;
}

static void report(const struct layer *l, const double median[FIGURES])
{
    const struct shape *s = l->shape;
    double gflop = 6.0 * l->tokens * s->topk * s->hidden * s->intermediate * 1e-9;
    double cost = (median[DAEMON] - median[OWN]) * 1e3, queued = (median[DAEMON_QUEUED] - median[OWN_QUEUED]) * 1e3;
    bool mps = getenv("MOK_TEST_MPS_PIPE") != NULL;
    char extra[256];

    snprintf(
        extra, sizeof(extra),
        "\"sharing\":\"%s\",\"daemon_us\":%.1f,\"queued_ms\":%.4f,\"queued_peer_ms\":%.4f,\"queued_daemon_us\":%.1f",
        mps ? "mps" : "slices", cost, median[DAEMON_QUEUED], median[OWN_QUEUED], queued);
    struct bench_record record = { .engine = "cuda",
                                   .op = "forward",
                                   .precision = "bf16",
                                   .shape = s->name,
                                   .ep = 1,
                                   .tokens = l->tokens,
                                   .routing = "uniform",
                                   .ms = median[DAEMON],
                                   .gflop = gflop,
                                   .dense_tflops = (double)NAN,
                                   .peer = "the same kernels in process",
                                   .peer_ms = median[OWN],
                                   .extra = extra };
    bench_emit(&record);
    if (!bench.json)
        printf("%-10s %7u %-7s %9.4f %9.4f %9.1f us %9.4f %9.4f %9.1f us %8.1f\n", s->name, l->tokens,
               mps ? "mps" : "slices", median[DAEMON], median[OWN], cost, median[DAEMON_QUEUED], median[OWN_QUEUED],
               queued, gflop / median[OWN_QUEUED]);
}

static void close_layer(struct layer *l)
{
    if (l->own)
        mok_cuda_engine.layer_close(l->own);
    mok_cuda_engine.close(l->engine);
    cudaFree(l->symmetric);
    cudaFree(l->private_memory);
    mok_session_close(l->session);
}

static int run_shape(const struct options *o, const struct shape *shape, const char *socket)
{
    struct layer l = { .shape = shape, .tokens = o->tokens };
    double median[FIGURES];

    int r = open_session(&l, socket);
    if (r == 0)
        r = fill_all(&l);
    if (r == 0)
        r = open_own(&l);
    if (r == 0)
        r = cuda(cudaStreamCreateWithFlags(&l.stream, cudaStreamNonBlocking), "stream");
    if (r == 0)
        r = cuda(cudaEventCreate(&l.from), "event");
    if (r == 0)
        r = cuda(cudaEventCreate(&l.to), "event");
    if (r == 0)
        r = measure(&l, o->rounds, median);
    if (r == 0)
        report(&l, median);
    close_layer(&l);
    return r;
}

static void parse(int argc, char **argv, struct options *o)
{
    static const struct option options[] = {
        { "json", no_argument, NULL, 'j' },
        { "engine", required_argument, NULL, 'e' },
        { "shape", required_argument, NULL, 's' },
        { "tokens", required_argument, NULL, 't' },
        { "rounds", required_argument, NULL, 'n' },
        { "poll", required_argument, NULL, 'p' },
        { 0 },
    };
    int c;

    optind = 1;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 'j':
            bench.json = true;
            break;
        case 'e':
            break;
        case 's':
            o->shape = optarg;
            break;
        case 't':
            o->tokens = bench_number("tokens", optarg, 1, 1 << 20);
            break;
        case 'n':
            o->rounds = bench_number("rounds", optarg, 1, MAX_ROUNDS);
            break;
        case 'p':
            o->poll_us = bench_number("poll", optarg, 0, 1000000);
            break;
        default:
            exit(2);
        }
    }
}

int bench_layer_cuda(int argc, char **argv)
{
    struct options o = { .tokens = 2048, .rounds = 50, .poll_us = 20000 };
    const char *pipe = getenv("MOK_TEST_MPS_PIPE");
    char lines[400] = "";
    struct stack stack;
    int r = 0, matched = 0;

    parse(argc, argv, &o);
    if (pipe)
        snprintf(lines, sizeof(lines), "sharing = mps\nmps_pipe = %s", pipe);
    struct stack_options so = { .gpus = 1, .poll_us = o.poll_us, .daemon = lines };
    if (stack_start(&stack, &so) < 0)
        return 1;
    if (!bench.json)
        printf("shape       tokens sharing     mokd ms  own ms      mokd's cost   queued: mokd  own       mokd's cost  "
               "own TFLOP/s\n");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]) && r == 0; i++) {
        if (o.shape && strcmp(o.shape, shapes[i].name) != 0)
            continue;
        matched++;
        r = run_shape(&o, &shapes[i], stack.socket);
    }
    if (!matched)
        fprintf(stderr, "mok-bench: no shape '%s'\n", o.shape);
    if (stack_stop(&stack) != 0)
        r = -1;
    return !matched ? 2 : r == 0 ? 0 : 1;
}
