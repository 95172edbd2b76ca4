/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench layer --engine cuda: a layer on one or several GPUs, through mokd in the order of CUDA streams, alternated
 * with the same kernels launched in this process on the same inputs. What is left between the two is what the daemon
 * costs. CUDA events round each operation, the slowest rank counts; medians. `queued`: several operations in a row on
 * the stream, time of one. --beside-bf16: a BF16 layer of the same shape is measured in turn with the one that is
 * asked for. A dense product of cuBLAS, where that is found, takes its turn in every round: shares are of its rate.
 */
#include <cuda_runtime_api.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "layer_cuda.h"
#include "layer_cuda_rank.h"
#include "mok/mok.h"
#include "names.h"
#include "stack.h"

enum { MAX_ROUNDS = 1000, WARM = 10, QUEUED = 8 };

/* `local`: experts of a rank, more where `topk` needs them; 0: `experts` in all. */
struct shape {
    const char *name;
    uint32_t hidden, intermediate, local, experts, topk;
};

static const struct shape shapes[] = {
    { "kimi", 7168, 2048, 6, 0, 8 }, { "glm", 6144, 2048, 4, 0, 8 },      { "qwen", 4096, 1024, 8, 0, 10 },
    { "dsv4", 7168, 3072, 6, 0, 6 }, { "mixtral", 4096, 14336, 0, 8, 2 }, { "qwen3-30b", 2048, 768, 0, 128, 8 },
    { "small", 1024, 512, 8, 0, 2 }, { "tiny", 128, 64, 4, 0, 2 },
};

static const char *routing_names[] = { "uniform", "zipf", "hot-rank", "hot-expert" };

struct options {
    const char *shape; /* NULL: all, but for the last, which is for tests */
    uint32_t tokens, rounds, poll_us, ep, gpus, memory_gib;
    enum workload_routing routing;
    uint32_t context_mode;
    uint64_t ring_bytes;
    uint32_t minibatch_rows;
    bool backward, bf16_gradients, mxfp8_wgrad;
    bool both;  /* a forward before each backward */
    uint32_t precision; /* enum mok_precision */
    bool tiles; /* weights in tiles of 128 x 128 */
    bool transposed; /* those are bound transposed, too */
    bool beside_bf16;
    bool dense;
};

enum figure { DAEMON, OWN, DAEMON_QUEUED, OWN_QUEUED, OPERATIONS, DENSE = OPERATIONS, FIGURES };
_Static_assert((DAEMON ^ OWN) == (DAEMON_QUEUED ^ OWN_QUEUED), "measure() changes them about");
_Static_assert(WARM % 2 == 0, "rounds are measured in pairs");

struct figures {
    double ms[FIGURES][CUDA_MAX_RANKS][MAX_ROUNDS];
};

/* A layer that is measured; the second one is BF16's. */
enum { ASKED, BESIDE, LAYERS };
struct layer {
    struct options options;
    struct cuda_run run;
    struct figures figures;
};

struct part {
    struct layer *layer; /* [layers] */
    uint32_t layers, rank;
    int code;
};

static void copy(void *to, const void *from, uint64_t bytes)
{
    if (cudaMemcpy(to, from, bytes, cudaMemcpyDefault) != cudaSuccess) {
        fprintf(stderr, "mok-bench: copying %llu bytes: %s\n", (unsigned long long)bytes,
                cudaGetErrorString(cudaGetLastError()));
        exit(1);
    }
}

static int measure_one(struct layer *layer, enum figure f, uint32_t index, uint32_t round)
{
    static const enum cuda_work work[FIGURES] = { [DAEMON] = CUDA_THROUGH_MOKD, [DAEMON_QUEUED] = CUDA_THROUGH_MOKD,
                                                  [OWN] = CUDA_IN_PROCESS, [OWN_QUEUED] = CUDA_IN_PROCESS,
                                                  [DENSE] = CUDA_DENSE };
    bool queued = f == DAEMON_QUEUED || f == OWN_QUEUED;
    double one = cuda_rank_time(&layer->run.rank[index], work[f], queued ? QUEUED : 1);

    if (round >= WARM)
        layer->figures.ms[f][index][round - WARM] = one;
    return isnan(one) ? -1 : 0;
}

static int measure_round(struct layer *layer, uint32_t index, uint32_t round)
{
    /*
     * What comes behind long work finds a slower card, so each operation comes behind each other one, and behind the dense
     * product, as often; and every second round is the one before with mokd and this process changed about, so that either
     * finds what the other has left.
     */
    static const uint8_t order[OPERATIONS][OPERATIONS] = { { DAEMON, OWN, OWN_QUEUED, DAEMON_QUEUED },
                                                           { OWN, DAEMON_QUEUED, DAEMON, OWN_QUEUED },
                                                           { DAEMON_QUEUED, OWN_QUEUED, OWN, DAEMON },
                                                           { OWN_QUEUED, DAEMON, DAEMON_QUEUED, OWN } };
    if (layer->options.dense && measure_one(layer, DENSE, index, round) < 0)
        return -1;
    for (int n = 0; n < OPERATIONS; n++) {
        int f = order[round / 2 % OPERATIONS][n] ^ (round % 2 ? DAEMON ^ OWN : 0);
        if (measure_one(layer, (enum figure)f, index, round) < 0)
            return -1;
    }
    return 0;
}

/* Layers in turns, each first in every second pair of rounds. */
static int measure(struct part *part)
{
    for (uint32_t i = 0; i < part->layer->options.rounds + WARM; i++)
        for (uint32_t n = 0; n < part->layers; n++)
            if (measure_round(&part->layer[(i / 2 + n) % part->layers], part->rank, i) < 0)
                return -1;
    return 0;
}

static void *play_rank(void *argument)
{
    struct part *part = argument;
    uint32_t opened = 0;

    while (opened < part->layers && part->code == 0)
        part->code = cuda_rank_open(&part->layer[opened++].run.rank[part->rank]);
    if (part->code == 0)
        part->code = measure(part);
    while (opened > 0)
        cuda_rank_close(&part->layer[--opened].run.rank[part->rank]);
    return NULL;
}

static double slowest(const struct figures *figures, enum figure f, uint32_t ep, uint32_t round)
{
    double worst = 0;

    for (uint32_t r = 0; r < ep; r++)
        worst = fmax(worst, figures->ms[f][r][round]);
    return worst;
}

static double slowest_median(const struct figures *figures, enum figure f, uint32_t ep, uint32_t rounds)
{
    static double worst[MAX_ROUNDS];

    for (uint32_t i = 0; i < rounds; i++)
        worst[i] = slowest(figures, f, ep, i);
    return bench_quantile(worst, rounds, 0.5);
}

/* What one takes longer than the other in a pair of rounds, in us: the card's temperature is in neither. */
static double median_cost(const struct figures *figures, enum figure f, enum figure peer, uint32_t ep, uint32_t rounds)
{
    static double more[MAX_ROUNDS];
    uint32_t pairs = rounds < 2 ? 1 : rounds / 2;

    for (uint32_t i = 0; i < pairs * 2 && i < rounds; i++) {
        double one = (slowest(figures, f, ep, i) - slowest(figures, peer, ep, i)) * 1e3;
        more[i / 2] = i % 2 ? (more[i / 2] + one) / 2 : one;
    }
    return bench_quantile(more, pairs, 0.5);
}

/* "NVIDIA H200", "580.159.04, CUDA 13.0". */
static void describe_gpu(char device[256], char driver[128])
{
    struct cudaDeviceProp properties;
    char version[64] = "";
    int runtime = 0;
    FILE *file = fopen("/sys/module/nvidia/version", "re");

    if (file && fscanf(file, "%63s", version) != 1)
        version[0] = 0;
    if (file)
        fclose(file);
    cudaRuntimeGetVersion(&runtime);
    bool known = cudaGetDeviceProperties(&properties, 0) == cudaSuccess;
    snprintf(device, 256, "%.255s", known ? properties.name : "unknown GPU");
    snprintf(driver, 128, "%s%sCUDA %d.%d", version, version[0] ? ", " : "", runtime / 1000, runtime % 1000 / 10);
}

/* What is said of the layer that ran in turn with this one; nothing if there was none. */
static void describe_beside(const struct layer *beside, char ret[160])
{
    const struct options *o = beside ? &beside->options : NULL;

    ret[0] = 0;
    if (beside)
        snprintf(ret, 160, ",\"bf16_ms\":%.4f,\"bf16_queued_ms\":%.4f,\"bf16_peer_ms\":%.4f",
                 slowest_median(&beside->figures, DAEMON, o->ep, o->rounds),
                 slowest_median(&beside->figures, DAEMON_QUEUED, o->ep, o->rounds),
                 slowest_median(&beside->figures, OWN, o->ep, o->rounds));
}

/* A share of the dense rate as a member of the record, and for the table; NAN: there was no dense product. */
static void describe_share(double share, char ret_member[48], char ret_cell[16])
{
    ret_member[0] = 0;
    snprintf(ret_cell, 16, "-");
    if (isnan(share))
        return;
    snprintf(ret_member, 48, ",\"share_of_dense\":%.4f", share);
    snprintf(ret_cell, 16, "%.1f %%", share * 100);
}

static void report(const struct layer *layer, const struct shape *s, const struct layer *beside)
{
    const struct options *o = &layer->options;
    const struct figures *figures = &layer->figures;
    double median[FIGURES];
    double gflop = (o->both ? 18.0 : o->backward ? 12.0 : 6.0) * o->tokens * s->topk * s->hidden * s->intermediate * 1e-9;
    bool mps = getenv("MOK_TEST_MPS_PIPE") != NULL;
    const char *op = o->both ? "forward+backward" : o->backward ? "backward" : "forward";
    char extra[704], device[256], driver[128], of_bf16[160], of_dense[48], share[16];

    describe_gpu(device, driver);
    describe_beside(beside, of_bf16);
    for (int f = 0; f < (o->dense ? FIGURES : OPERATIONS); f++)
        median[f] = slowest_median(figures, (enum figure)f, o->ep, o->rounds);
    double cost = median_cost(figures, DAEMON, OWN, o->ep, o->rounds);
    double queued = median_cost(figures, DAEMON_QUEUED, OWN_QUEUED, o->ep, o->rounds);
    double dense = o->dense ? DENSE_GFLOP / median[DENSE] : (double)NAN;
    describe_share(gflop / median[DAEMON] / dense, of_dense, share);
    snprintf(extra, sizeof(extra),
             "\"sharing\":\"%s\",\"gpus\":%u,\"cost_us\":%.1f,\"queued_ms\":%.4f,\"queued_peer_ms\":%.4f,"
             "\"queued_cost_us\":%.1f,\"ring_bytes\":%llu,\"minibatch_rows\":%u,\"grads\":\"%s\",\"wgrad\":\"%s\","
             "\"transposed\":%s%s%s",
             mps ? "mps" : "slices", o->gpus, cost, median[DAEMON_QUEUED], median[OWN_QUEUED], queued,
             (unsigned long long)o->ring_bytes, o->minibatch_rows, o->bf16_gradients ? "bf16" : "f32",
             o->mxfp8_wgrad ? "mxfp8" : "bf16", o->transposed ? "true" : "false", of_dense, of_bf16);
    struct bench_record record = { .engine = "cuda",
                                   .op = op,
                                   .precision = o->tiles ? "mxfp8-per128, tiles" : mok_precision_text(o->precision),
                                   .shape = s->name,
                                   .ep = (int)o->ep,
                                   .tokens = o->tokens,
                                   .routing = routing_names[o->routing],
                                   .ms = median[DAEMON],
                                   .gflop = gflop,
                                   .dense_tflops = dense,
                                   .peer = "the same kernels in process",
                                   .peer_ms = median[OWN],
                                   .extra = extra,
                                   .device = device,
                                   .driver = driver };
    bench_emit(&record);
    if (!bench.json)
        printf("%-10s %-16s %2u/%u %6u %-10s %-7s %9.4f %9.4f %9.1f us %9.4f %9.4f %9.1f us %8.1f %9s\n", s->name, op,
               o->ep, o->gpus, o->tokens, record.routing, mps ? "mps" : "slices", median[DAEMON], median[OWN], cost,
               median[DAEMON_QUEUED], median[OWN_QUEUED], queued, gflop / median[OWN_QUEUED], share);
}

static uint32_t experts_of(const struct shape *s, uint32_t ep)
{
    if (s->experts)
        return s->experts;
    return ep * (s->local * ep >= s->topk ? s->local : (s->topk + ep - 1) / ep);
}

static void describe(struct layer *l, const struct options *o, const struct shape *s, const char *socket)
{
    l->options = *o;
    l->run.problem = (struct workload){ .hidden = s->hidden,
                                        .intermediate = s->intermediate,
                                        .experts = experts_of(s, o->ep),
                                        .topk = s->topk,
                                        .ep = o->ep,
                                        .precision = o->precision,
                                        .tiles = o->tiles,
                                        .transposed = o->transposed,
                                        .max_tokens = o->tokens,
                                        .context_mode = o->context_mode,
                                        .seed = 1,
                                        .routing = o->routing,
                                        .forward_only = !o->backward,
                                        .repeated = true,
                                        .ring_bytes = o->ring_bytes,
                                        .minibatch_rows = o->minibatch_rows,
                                        .bf16_gradients = o->bf16_gradients,
                                        .mxfp8_wgrad = o->mxfp8_wgrad };
    l->run.group = o->precision == MOK_BF16 ? "bench-bf16" : "bench";
    l->run.gpus = o->gpus;
    l->run.backward = o->backward;
    l->run.both = o->both;
    l->run.dense = o->dense;
    l->run.socket = socket;
    for (uint32_t r = 0; r < o->ep; r++)
        l->run.rank[r] = (struct cuda_rank){ .run = &l->run, .index = r, .gpu = (int)(r % o->gpus) };
}

/* A thread a rank. */
static int run_layers(struct layer *layer, uint32_t layers, uint32_t ep)
{
    struct part part[CUDA_MAX_RANKS];
    pthread_t thread[CUDA_MAX_RANKS];
    int code = 0;

    for (uint32_t i = 0; i < layers; i++)
        pthread_barrier_init(&layer[i].run.barrier, NULL, ep);
    for (uint32_t r = 0; r < ep; r++) {
        part[r] = (struct part){ layer, layers, r, 0 };
        pthread_create(&thread[r], NULL, play_rank, &part[r]);
    }
    for (uint32_t r = 0; r < ep; r++) {
        pthread_join(thread[r], NULL);
        code = part[r].code < 0 ? -1 : code;
    }
    for (uint32_t i = 0; i < layers; i++)
        pthread_barrier_destroy(&layer[i].run.barrier);
    return code;
}

static int run_shape(const struct options *o, const struct shape *s, const char *socket)
{
    struct options bf16 = *o;
    struct layer *layer;
    int code;

    if (experts_of(s, o->ep) % o->ep) {
        fprintf(stderr, "mok-bench: --ep is %u, must divide the %u experts of %s\n", o->ep, s->experts, s->name);
        return -1;
    }
    layer = calloc(LAYERS, sizeof(*layer));
    if (!layer)
        return -1;
    bf16.precision = MOK_BF16;
    bf16.tiles = bf16.transposed = bf16.mxfp8_wgrad = false;
    describe(&layer[ASKED], o, s, socket);
    describe(&layer[BESIDE], &bf16, s, socket);
    code = run_layers(layer, o->beside_bf16 ? LAYERS : 1, o->ep);
    if (code == 0)
        report(&layer[ASKED], s, o->beside_bf16 ? &layer[BESIDE] : NULL);
    if (code == 0 && o->beside_bf16)
        report(&layer[BESIDE], s, NULL);
    free(layer);
    return code;
}

static int usage(FILE *file)
{
    fprintf(file, "Usage: mok-bench layer --engine cuda [OPTIONS]\n"
                  "  --shape NAME            one shape; default: all (");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        fprintf(file, "%s%s", i ? ", " : "", shapes[i].name);
    fprintf(file,
            ")\n"
            "  --op forward|backward|both   what to time (default forward; both: one behind the other)\n"
            "  --precision NAME        of the experts: bf16 (default), mxfp8-per32, mxfp8-per128 (or mxfp8; weights have scales\n"
            "                          of 1 x 128), mxfp8-per128-tiles (or mxfp8-tiles; of 128 x 128)\n"
            "  --transposed            with tiles: weights are bound transposed, too\n"
            "  --beside-bf16           a BF16 layer of the same shape in turn with it, in one process\n"
            "  --no-dense              no dense product in turn with it, which needs cuBLAS (MOK_CUBLAS: where it is)\n"
            "  --ep N                  ranks, a device of mokd each (1..16; default 1)\n"
            "  --gpus N                GPUs that they are spread over (default 1)\n"
            "  --tokens N              tokens a rank (default 2048)\n"
            "  --routing NAME          uniform, zipf, hot-rank, hot-expert\n"
            "  --context full|recompute  of a backward (default full)\n"
            "  --grads f32|bf16        type of a backward's weight gradients (default f32)\n"
            "  --wgrad bf16|mxfp8      operands of an MXFP8 backward's weight gradients (default bf16)\n"
            "  --ring BYTES --minibatch ROWS   override the plan\n"
            "  --memory GIB            what mokd may use of a device (default 16)\n"
            "  --poll US               how long workers look before they sleep (default 20000)\n"
            "  --rounds N              measured rounds (default 50)\n"
            "  --json                  one object a line\n"
            "With MOK_TEST_MPS_PIPE set everything runs under that MPS control daemon, otherwise in time slices.\n");
    return file == stdout ? 0 : 2;
}

static uint32_t name_of(const char *option, const char *text, const char *const *names, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (strcmp(text, names[i]) == 0)
            return i;
    fprintf(stderr, "mok-bench: --%s is '%s', must be one of", option, text);
    for (uint32_t i = 0; i < count; i++)
        fprintf(stderr, "%s %s", i ? "," : "", names[i]);
    fputc('\n', stderr);
    exit(2);
}

static void parse(int argc, char **argv, struct options *o)
{
    static const char *const ops[] = { "forward", "backward", "both" }, *const contexts[] = { "full", "recompute" },
                             *const types[] = { "f32", "bf16" }, *const operands[] = { "bf16", "mxfp8" },
                             *const precisions[] = { "bf16",  "mxfp8-per32", "mxfp8-per128", "mxfp8-per128-tiles",
                                                     "mxfp8", "mxfp8-tiles" };
    static const uint32_t precision[] = { MOK_BF16,         MOK_MXFP8_PER32,  MOK_MXFP8_PER128,
                                          MOK_MXFP8_PER128, MOK_MXFP8_PER128, MOK_MXFP8_PER128 };
    static const struct option options[] = {
        { "json", no_argument, NULL, 'j' },          { "engine", required_argument, NULL, 'e' },
        { "shape", required_argument, NULL, 's' },   { "tokens", required_argument, NULL, 't' },
        { "rounds", required_argument, NULL, 'n' },  { "poll", required_argument, NULL, 'p' },
        { "ep", required_argument, NULL, 'r' },      { "gpus", required_argument, NULL, 'g' },
        { "routing", required_argument, NULL, 'o' }, { "op", required_argument, NULL, 'b' },
        { "context", required_argument, NULL, 'c' }, { "ring", required_argument, NULL, 'i' },
        { "memory", required_argument, NULL, 'm' },  { "minibatch", required_argument, NULL, 'a' },
        { "precision", required_argument, NULL, 'x' }, { "grads", required_argument, NULL, 'd' },
        { "wgrad", required_argument, NULL, 'w' },   { "transposed", no_argument, NULL, 'q' },
        { "beside-bf16", no_argument, NULL, 'z' },   { "no-dense", no_argument, NULL, 'k' },
        { "help", no_argument, NULL, 'h' },
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
        case 'r':
            o->ep = bench_number("ep", optarg, 1, CUDA_MAX_RANKS);
            break;
        case 'g':
            o->gpus = bench_number("gpus", optarg, 1, CUDA_MAX_RANKS);
            break;
        case 'o':
            o->routing = (enum workload_routing)name_of("routing", optarg, routing_names, 4);
            break;
        case 'b':
            o->both = name_of("op", optarg, ops, 3) == 2;
            o->backward = o->both || strcmp(optarg, "backward") == 0;
            break;
        case 'x':
            o->precision = precision[name_of("precision", optarg, precisions, 6)];
            o->tiles = strstr(optarg, "-tiles") != NULL;
            break;
        case 'q':
            o->transposed = true;
            break;
        case 'z':
            o->beside_bf16 = true;
            break;
        case 'k':
            o->dense = false;
            break;
        case 'c':
            o->context_mode = name_of("context", optarg, contexts, 2) ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL;
            break;
        case 'd':
            o->bf16_gradients = name_of("grads", optarg, types, 2) == 1;
            break;
        case 'w':
            o->mxfp8_wgrad = name_of("wgrad", optarg, operands, 2) == 1;
            break;
        case 'i':
            o->ring_bytes = bench_number("ring", optarg, 0, UINT32_MAX);
            break;
        case 'a':
            o->minibatch_rows = bench_number("minibatch", optarg, 0, 1 << 24);
            break;
        case 'm':
            o->memory_gib = bench_number("memory", optarg, 1, 1024);
            break;
        case 'h':
            exit(usage(stdout));
        default:
            exit(usage(stderr));
        }
    }
    if (o->beside_bf16 && o->precision == MOK_BF16) {
        fprintf(stderr, "mok-bench: --beside-bf16 needs a --precision that is not bf16\n");
        exit(2);
    }
}

/* Whether the engine finds a GPU. A child asks: CUDA starts in this process once mokd runs, and not before. */
static bool finds_gpu(const char *mps_pipe)
{
    pid_t child = fork();
    int status;

    if (child == 0) {
        struct mok_engine_config config = { .index = 0 };
        struct mok_device_limits limits;
        struct mok_message message = { "" };

        if (mps_pipe)
            setenv("CUDA_MPS_PIPE_DIRECTORY", mps_pipe, 1);
        int r = mok_cuda_engine.probe(&config, &limits, &message);
        if (r < 0)
            fprintf(stderr, "mok-bench: %s\n", message.text);
        _exit(r < 0);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static bool is_shape(const char *name)
{
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++)
        if (!name || strcmp(name, shapes[i].name) == 0)
            return true;
    fprintf(stderr, "mok-bench: --shape is '%s'; --help names those that there are\n", name);
    return false;
}

int bench_layer_cuda(int argc, char **argv)
{
    struct options o = { .tokens = 2048,
                         .rounds = 50,
                         .precision = MOK_BF16,
                         .poll_us = 20000,
                         .ep = 1,
                         .gpus = 1,
                         .memory_gib = 16,
                         .context_mode = MOK_CONTEXT_FULL,
                         .dense = true };
    const char *pipe = getenv("MOK_TEST_MPS_PIPE");
    size_t count = sizeof(shapes) / sizeof(shapes[0]);
    char lines[400] = "";
    struct stack stack;
    int r = 0;

    parse(argc, argv, &o);
    if (!is_shape(o.shape))
        return 2;
    if (!finds_gpu(pipe))
        return 77;
    o.dense = o.dense && dense_cuda_load();
    if (pipe)
        snprintf(lines, sizeof(lines), "sharing = mps\nmps_pipe = %s", pipe);
    struct stack_options so = {
        .gpus = o.ep, .gpu_spread = o.gpus, .gpu_gib = o.memory_gib, .poll_us = o.poll_us, .daemon = lines
    };
    if (stack_start(&stack, &so) < 0)
        return 1;
    /* CUDA starts here before the ranks open their sessions, so libmok comes too late to say so. */
    if (pipe)
        setenv("CUDA_MPS_PIPE_DIRECTORY", pipe, 1);
    workload_copy = copy;
    if (!bench.json)
        printf("shape      op               EP/GPUs tokens routing  sharing     mokd ms  own ms      mokd's cost   queued: "
               "mokd  own  "
               "     mokd's cost  own TFLOP/s  of dense\n");
    for (size_t i = 0; i < count && r == 0; i++) {
        if (o.shape ? strcmp(o.shape, shapes[i].name) != 0 : i == count - 1)
            continue;
        r = run_shape(&o, &shapes[i], stack.socket);
    }
    if (stack_stop(&stack) != 0)
        r = -1;
    return r == 0 ? 0 : 1;
}
