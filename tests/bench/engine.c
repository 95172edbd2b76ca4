/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mok-bench engine: the host engine in this process, without a daemon: what each choice of the plan costs.
 * One run alternates the plan's own choice with every other setting, so that a figure is a ratio within a round.
 */
#include <getopt.h>
#include <math.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench.h"
#include "dispatch.h"
#include "engine.h"
#include "workload.h"

enum { MAX_RANKS = 8, MAX_ROUNDS = 200, MAX_SETTINGS = 12 };

/* One rank of a layer: engine, memory, operation. */
struct seat {
    struct mok_engine *engine;
    struct mok_engine_layer *layer;
    struct mok_plan plan;
    void *symmetric, *private_memory, *context;
    uint16_t *x, *d_out, *out, *d_x;
    int32_t *ids;
    float *weight, *d_weight;
    struct mok_expert_params params;
    struct mok_op_args args;
    struct mok_dispatch_op op;
    bool running;
};

/* All ranks of one layer with one setting of the plan. */
struct rig {
    struct workload workload;
    uint32_t tokens, threads;
    struct seat seat[MAX_RANKS];
    struct mok_dispatch_view view[MAX_RANKS];
    struct mok_layer_flags *flags; /* [ep] */
    struct mok_peer peer[MAX_RANKS];
    sem_t moved;
    uint64_t seq;
};

struct sample {
    double ms, schedule, transfer, compute; /* ms; sums over the units for the last two; slowest rank */
};

static void notify(void *cookie)
{
    sem_post(cookie);
}

static void *zeroed(uint64_t bytes)
{
    void *memory = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!memory) {
        fprintf(stderr, "mok-bench: out of memory\n");
        exit(1);
    }
    memset(memory, 0, (bytes + 4095) / 4096 * 4096);
    return memory;
}

static uint16_t *values(const struct workload *w, enum workload_stream stream, uint64_t first, uint64_t count, float scale)
{
    uint16_t *to = zeroed(count * 2);
    for (uint64_t i = 0; i < count; i++)
        to[i] = workload_bf16(workload_value(w, stream, first + i) * scale);
    return to;
}

static void fill_seat(struct rig *rig, uint32_t r)
{
    const struct workload *w = &rig->workload;
    struct seat *s = &rig->seat[r];
    uint64_t h = w->hidden, n = w->intermediate, t = rig->tokens, k = w->topk, e = w->experts / w->ep * n * h;
    float sh = 1.0f / sqrtf((float)h), si = 1.0f / sqrtf((float)n);
    s->x = values(w, STREAM_X, r * t * h, t * h, 1.0f);
    s->d_out = values(w, STREAM_D_OUT, r * t * h, t * h, 1.0f);
    s->out = zeroed(t * h * 2);
    s->d_x = zeroed(t * h * 2);
    s->ids = zeroed(t * k * 4);
    s->weight = zeroed(t * k * 4);
    s->d_weight = zeroed(t * k * 4);
    for (uint64_t i = 0; i < t; i++)
        workload_ids(w, r * t + i, s->ids + i * k);
    for (uint64_t i = 0; i < t * k; i++)
        s->weight[i] = workload_value(w, STREAM_WEIGHT, r * t * k + i) * 0.5f;
    s->params = (struct mok_expert_params){
        .gate = values(w, STREAM_GATE, r * e, e, sh), .up = values(w, STREAM_UP, r * e, e, sh),
        .down = values(w, STREAM_DOWN, r * e, e, si), .d_gate = zeroed(e * 4), .d_up = zeroed(e * 4), .d_down = zeroed(e * 4),
    };
}

static void check(int code, const struct mok_message *message)
{
    if (code < 0) {
        fprintf(stderr, "mok-bench: %s\n", message->text);
        exit(1);
    }
}

/* Seats share inputs and parameters with `like`, so that many settings of one workload fit into memory. */
static struct rig *rig_open(const struct workload *workload, uint32_t tokens, uint32_t threads, const struct rig *like)
{
    struct rig *rig = zeroed(sizeof(*rig));
    struct mok_message message = { "" };
    void *symmetric[MAX_RANKS];
    rig->workload = *workload;
    rig->tokens = tokens;
    rig->threads = threads;
    rig->flags = zeroed(workload->ep * sizeof(*rig->flags));
    sem_init(&rig->moved, 0, 0);
    for (uint32_t r = 0; r < workload->ep; r++) {
        struct seat *s = &rig->seat[r];
        struct mok_engine_config config = { .threads = threads, .notify = notify, .cookie = &rig->moved };
        struct mok_device_limits limits;
        struct mok_layer_spec spec = { .hidden = workload->hidden, .intermediate = workload->intermediate,
                                       .experts = workload->experts, .topk = workload->topk, .ep = workload->ep, .rank = r,
                                       .max_tokens = tokens, .precision = MOK_BF16, .ring_bytes = workload->ring_bytes,
                                       .minibatch_rows = workload->minibatch_rows, .comm_units = workload->comm_units };
        if (like)
            *s = like->seat[r];
        else
            fill_seat(rig, r);
        check(mok_host_engine.probe(&config, &limits, &message), &message);
        check(mok_plan_make(&spec, &limits, &s->plan, NULL, 0, &message), &message);
        check(mok_host_engine.open(&config, &s->engine, &message), &message);
        s->symmetric = symmetric[r] = zeroed(s->plan.symmetric_bytes);
        s->private_memory = zeroed(s->plan.private_bytes);
        s->context = zeroed(s->plan.context_full_bytes);
        rig->peer[r] = (struct mok_peer){ .x = s->x, .d_out = s->d_out, .tokens = tokens };
    }
    for (uint32_t r = 0; r < workload->ep; r++) {
        struct seat *s = &rig->seat[r];
        check(mok_host_engine.layer_open(s->engine, &s->plan, symmetric, s->private_memory, &s->layer, &message), &message);
        rig->view[r] = (struct mok_dispatch_view){ .ep = workload->ep, .rank = r };
        for (uint32_t q = 0; q < workload->ep; q++)
            rig->view[r].flags[q] = &rig->flags[q];
    }
    return rig;
}

static void rig_close(struct rig *rig)
{
    for (uint32_t r = 0; r < rig->workload.ep; r++) {
        struct seat *s = &rig->seat[r];
        mok_host_engine.layer_close(s->layer);
        mok_host_engine.close(s->engine);
        free(s->symmetric);
        free(s->private_memory);
        free(s->context);
    }
    sem_destroy(&rig->moved);
    free(rig->flags);
    free(rig);
}

/* Advances one rank; true once its operation is complete. */
static bool drive(struct rig *rig, uint32_t r)
{
    static const enum mok_phase phase_of[] = { [MOK_ACT_PREPARE] = MOK_PHASE_PREPARE, [MOK_ACT_MAIN] = MOK_PHASE_MAIN,
                                               [MOK_ACT_REDUCE] = MOK_PHASE_REDUCE };
    struct seat *s = &rig->seat[r];
    struct mok_op_result result;
    bool moved;
    if (s->running) {
        if (!mok_host_engine.poll(s->engine, &result))
            return false;
        s->running = false;
        mok_dispatch_phase_done(&s->op, &result);
        sem_post(&rig->moved);
    }
    enum mok_dispatch_action action = mok_dispatch_step(&s->op, &rig->view[r], 1, &moved);
    if (moved)
        sem_post(&rig->moved);
    if (action == MOK_ACT_COMPLETE)
        return true;
    if (action != MOK_ACT_WAIT) {
        s->running = true;
        mok_host_engine.start(s->layer, &s->args, phase_of[action]);
    }
    return false;
}

static struct sample run_op(struct rig *rig, enum mok_op_kind kind)
{
    struct mok_op_info info = { .kind = kind, .context_mode = rig->workload.context_mode, .tokens = rig->tokens };
    struct sample sample = { 0 };
    uint32_t done = 0, ep = rig->workload.ep;
    rig->seq++;
    info.flags = kind == MOK_KIND_BACKWARD ? MOK_OPF_OVERWRITE_WGRAD : 0;
    double start = bench_now_ms();
    for (uint32_t r = 0; r < ep; r++) {
        struct seat *s = &rig->seat[r];
        s->args = (struct mok_op_args){ .kind = kind, .context_mode = info.context_mode, .flags = info.flags,
                                        .tokens = rig->tokens, .ids = s->ids, .topk_weight = s->weight, .context = s->context,
                                        .out = s->out, .d_x = s->d_x, .d_topk_weight = s->d_weight, .params = s->params,
                                        .peer = rig->peer };
        mok_dispatch_begin(&s->op, rig->seq, &info);
    }
    for (;;) {
        done = 0;
        for (uint32_t r = 0; r < ep; r++)
            done += drive(rig, r);
        if (done == ep)
            break;
        sem_wait(&rig->moved);
    }
    sample.ms = bench_now_ms() - start;
    while (sem_trywait(&rig->moved) == 0)
        ;
    for (uint32_t r = 0; r < ep; r++) {
        const struct mok_op_result *result = &rig->seat[r].op.result;
        if (result->status < 0) {
            fprintf(stderr, "mok-bench: operation failed: %s\n", mok_strerror(result->status));
            exit(1);
        }
        sample.schedule = fmax(sample.schedule, (double)result->schedule_ns * 1e-6);
        sample.transfer = fmax(sample.transfer, (double)result->transfer_ns * 1e-6);
        sample.compute = fmax(sample.compute, (double)result->compute_ns * 1e-6);
    }
    return sample;
}

/* ---------------------------------------------------------------- sweeps */

struct setting {
    char name[32];
    struct workload workload;
    uint32_t tokens, threads;
    struct rig *rig;
    struct sample sample[2][MAX_ROUNDS];
};

struct sweep {
    const char *name, *shape;
    uint32_t rounds;
    size_t count;
    struct setting setting[MAX_SETTINGS]; /* [0]: what the others are compared with */
};

static struct setting *add(struct sweep *sweep, const struct workload *workload, uint32_t tokens, uint32_t threads, const char *name)
{
    struct setting *s = &sweep->setting[sweep->count++];
    s->workload = *workload;
    s->tokens = tokens;
    s->threads = threads;
    snprintf(s->name, sizeof(s->name), "%s", name);
    return s;
}

static double median_of(struct setting *s, int what, size_t offset, uint32_t rounds)
{
    double values_[MAX_ROUNDS];
    for (uint32_t i = 0; i < rounds; i++)
        memcpy(&values_[i], (char *)&s->sample[what][i] + offset, sizeof(double));
    return bench_quantile(values_, rounds, 0.5);
}

static void report(struct sweep *sweep)
{
    for (int what = 0; what < 2; what++) {
        double base = median_of(&sweep->setting[0], what, offsetof(struct sample, ms), sweep->rounds);
        for (size_t i = 0; i < sweep->count; i++) {
            struct setting *s = &sweep->setting[i];
            double ms = median_of(s, what, offsetof(struct sample, ms), sweep->rounds);
            double schedule = median_of(s, what, offsetof(struct sample, schedule), sweep->rounds);
            double transfer = median_of(s, what, offsetof(struct sample, transfer), sweep->rounds) / s->threads;
            double compute = median_of(s, what, offsetof(struct sample, compute), sweep->rounds) / s->threads;
            double floor = fmax(transfer, compute);
            char extra[256];
            snprintf(extra, sizeof(extra),
                     "\"sweep\":\"%s\",\"setting\":\"%s\",\"relative\":%.4f,\"schedule_share\":%.4f,\"transfer_ms\":%.3f,"
                     "\"compute_ms\":%.3f,\"over_larger_part\":%.3f,\"threads\":%u",
                     sweep->name, s->name, ms / base, schedule / ms, transfer, compute, ms / floor, s->threads);
            const struct workload *w = &s->workload;
            struct bench_record record = {
                .engine = "host", .op = what ? "backward" : "forward", .precision = "bf16", .shape = sweep->shape,
                .ep = (int)w->ep, .tokens = s->tokens, .routing = "uniform", .ms = ms,
                .gflop = 6e-9 * s->tokens * w->topk * w->hidden * w->intermediate * (what + 1), .dense_tflops = (double)NAN,
                .peer = sweep->setting[0].name, .peer_ms = base, .extra = extra,
            };
            bench_emit(&record);
            if (!bench.json)
                printf("%-10s %-9s %-26s %9.2f %9.3f %9.2f%% %12.2f\n", sweep->name, record.op, s->name, ms, ms / base,
                       schedule / ms * 100, ms / floor);
        }
    }
}

/* Round by round, setting by setting: drift of the machine hits all settings alike. */
static void run_sweep(struct sweep *sweep)
{
    for (size_t i = 0; i < sweep->count; i++) {
        struct setting *s = &sweep->setting[i];
        bool same = i > 0 && s->tokens == sweep->setting[0].tokens && s->workload.ep == sweep->setting[0].workload.ep;
        s->rig = rig_open(&s->workload, s->tokens, s->threads, same ? sweep->setting[0].rig : NULL);
    }
    for (uint32_t round = 0; round < sweep->rounds + 1; round++)
        for (size_t i = 0; i < sweep->count; i++)
            for (int what = 0; what < 2; what++) {
                struct sample sample = run_op(sweep->setting[i].rig, what ? MOK_KIND_BACKWARD : MOK_KIND_FORWARD);
                if (round > 0)
                    sweep->setting[i].sample[what][round - 1] = sample;
            }
    report(sweep);
    for (size_t i = 0; i < sweep->count; i++)
        rig_close(sweep->setting[i].rig);
}

/* Bytes that a row takes in the ring, as the plan explains it. */
static uint64_t ring_row_bytes(const struct workload *w, uint32_t tokens, uint32_t threads)
{
    struct mok_device_limits limits = { .kind = MOK_DEVICE_HOST, .units = threads, .memory_bytes = 1ull << 40 };
    struct mok_layer_spec spec = { .hidden = w->hidden, .intermediate = w->intermediate, .experts = w->experts, .topk = w->topk,
                                   .ep = w->ep, .max_tokens = tokens, .precision = MOK_BF16 };
    struct mok_message message = { "" };
    struct mok_plan plan;
    char text[4096];
    unsigned long long rows = 1, bytes = 0;
    check(mok_plan_make(&spec, &limits, &plan, text, sizeof(text), &message), &message);
    const char *at = strstr(text, "ring_bytes = ");
    if (!at || sscanf(at, "ring_bytes = %llu", &bytes) != 1)
        exit(1);
    rows = plan.ring_rows;
    return bytes / rows;
}

static void ring_sweep(struct sweep *sweep, const struct workload *base, uint32_t tokens, uint32_t threads)
{
    char name[32];
    uint64_t row = ring_row_bytes(base, tokens, threads), mean = (uint64_t)tokens * base->topk, padding = 128ull * base->experts / base->ep;
    struct workload w = *base;
    w.ring_bytes = (mean * base->ep + padding) * row * 2;
    add(sweep, &w, tokens, threads, "holds everything");
    for (uint64_t part = 1; part <= 8; part *= 2) {
        w.ring_bytes = (mean + padding) / part * row;
        snprintf(name, sizeof(name), part == 1 ? "the mean rows" : "1/%llu of the mean rows", (unsigned long long)part);
        add(sweep, &w, tokens, threads, name);
    }
    w.ring_bytes = 0;
    add(sweep, &w, tokens, threads, "the plan's choice");
}

/* The walk through the ring alone: backward replays everything, whatever the ring holds. */
static void ring_recompute_sweep(struct sweep *sweep, const struct workload *base, uint32_t tokens, uint32_t threads)
{
    struct workload w = *base;
    w.context_mode = MOK_CONTEXT_RECOMPUTE;
    ring_sweep(sweep, &w, tokens, threads);
}

static void minibatch_sweep(struct sweep *sweep, const struct workload *base, uint32_t tokens, uint32_t threads)
{
    struct workload w = *base;
    add(sweep, &w, tokens, threads, "the plan's choice");
    for (uint32_t rows = 32; rows <= 1024; rows *= 2) {
        char name[32];
        w.minibatch_rows = rows;
        snprintf(name, sizeof(name), "%u rows", rows);
        add(sweep, &w, tokens, threads, name);
    }
}

static void comm_sweep(struct sweep *sweep, const struct workload *base, uint32_t tokens, uint32_t threads)
{
    struct workload w = *base;
    uint32_t most = threads > 1 ? threads - 1 : 1;
    add(sweep, &w, tokens, threads, "the plan's choice");
    for (uint32_t units = 1; units <= most && sweep->count < MAX_SETTINGS; units++) {
        char name[32];
        w.comm_units = units;
        snprintf(name, sizeof(name), "%u comm units", units);
        add(sweep, &w, tokens, threads, name);
    }
}

/* Equal work a rank: ep ranks of `tokens` each with the same number of local experts, one thread a rank. */
static void ep_sweep(struct sweep *sweep, const struct workload *base, uint32_t tokens, uint32_t threads)
{
    for (uint32_t ep = 1; ep <= 4; ep *= 2) {
        struct workload w = *base;
        char name[32];
        w.ep = ep;
        w.experts = base->experts / base->ep * ep;
        snprintf(name, sizeof(name), "EP %u", ep);
        add(sweep, &w, tokens, threads, name);
    }
}

static int usage(FILE *file)
{
    fprintf(file, "Usage: mok-bench engine [--sweep ring|ring-recompute|minibatch|comm|ep|all] [--threads N] [--ep N] [--tokens N] [--rounds N] [--json]\n");
    return file == stdout ? 0 : 2;
}

int bench_engine(int argc, char **argv)
{
    static const struct option options[] = {
        { "json", no_argument, NULL, 'j' },        { "sweep", required_argument, NULL, 's' }, { "threads", required_argument, NULL, 'u' },
        { "ep", required_argument, NULL, 'p' },    { "tokens", required_argument, NULL, 't' }, { "rounds", required_argument, NULL, 'n' },
        { "help", no_argument, NULL, 'h' },        { 0 },
    };
    static const struct {
        const char *name;
        void (*make)(struct sweep *, const struct workload *, uint32_t, uint32_t);
    } sweeps[] = { { "ring", ring_sweep }, { "ring-recompute", ring_recompute_sweep }, { "minibatch", minibatch_sweep }, { "comm", comm_sweep }, { "ep", ep_sweep } };
    const char *which = "all";
    uint32_t threads = 1, ep = 1, tokens = 1024, rounds = 7;
    int c, matched = 0;
    while ((c = getopt_long(argc, argv, "", options, NULL)) != -1) {
        switch (c) {
        case 'j': bench.json = true; break;
        case 's': which = optarg; break;
        case 'u': threads = bench_number("threads", optarg, 1, 64); break;
        case 'p': ep = bench_number("ep", optarg, 1, MAX_RANKS); break;
        case 't': tokens = bench_number("tokens", optarg, 1, 1 << 20); break;
        case 'n': rounds = bench_number("rounds", optarg, 1, MAX_ROUNDS); break;
        case 'h': return usage(stdout);
        default: return usage(stderr);
        }
    }
    if (!bench.json)
        printf("sweep      op        setting                           ms  relative  schedule  over larger part\n");
    for (size_t i = 0; i < sizeof(sweeps) / sizeof(sweeps[0]); i++) {
        if (strcmp(which, "all") != 0 && strcmp(which, sweeps[i].name) != 0)
            continue;
        struct workload base = { .hidden = 1024, .intermediate = 2048, .experts = 8 * ep, .topk = 2, .ep = ep,
                                 .max_tokens = tokens, .context_mode = MOK_CONTEXT_FULL, .seed = 1 };
        struct sweep *sweep = calloc(1, sizeof(*sweep));
        if (!sweep)
            return 1;
        sweep->name = sweeps[i].name;
        sweep->shape = "h1024-i2048";
        sweep->rounds = rounds;
        sweeps[i].make(sweep, &base, tokens, threads);
        run_sweep(sweep);
        free(sweep);
        matched++;
    }
    return matched ? 0 : usage(stderr);
}
