/* SPDX-License-Identifier: Apache-2.0 */
/* See layer_cuda_rank.h. */
#include "layer_cuda_rank.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mok/mok.h"

enum { MAX_QUEUED = 32 };

static int say(const struct cuda_rank *rank, const char *what, const char *why)
{
    fprintf(stderr, "mok-bench: rank %u: %s: %s\n", rank->index, what, why);
    return -1;
}

static int check(const struct cuda_rank *rank, cudaError_t e, const char *what)
{
    return e == cudaSuccess ? 0 : say(rank, what, cudaGetErrorString(e));
}

int cuda_rank_meet(struct cuda_rank *rank, int code)
{
    struct cuda_run *run = rank->run;
    bool well = true;

    run->code[rank->index] = code;
    pthread_barrier_wait(&run->barrier);
    for (uint32_t r = 0; r < run->problem.ep; r++)
        well = well && run->code[r] == 0;
    pthread_barrier_wait(&run->barrier);
    return well ? 0 : -1;
}

/* ------------------------------------------------------------------ in process */

/* The other ranks' GPUs are within reach. */
static int reach_peers(struct cuda_rank *rank)
{
    for (int gpu = 0; gpu < (int)rank->run->gpus; gpu++) {
        if (gpu == rank->gpu)
            continue;
        cudaError_t e = cudaDeviceEnablePeerAccess(gpu, 0);
        if (e != cudaSuccess && e != cudaErrorPeerAccessAlreadyEnabled)
            return check(rank, e, "reaching the other GPUs");
        cudaGetLastError();
    }
    return 0;
}

static int copy_of(struct cuda_rank *rank, mok_buffer *buffer, void **ret)
{
    if (!buffer)
        return 0;
    int r = check(rank, cudaMalloc(ret, mok_buffer_size(buffer)), "allocating");
    return r < 0 ? r
                 : check(rank,
                         cudaMemcpy(*ret, mok_buffer_data(buffer), mok_buffer_size(buffer), cudaMemcpyDeviceToDevice),
                         "copying inputs");
}

static int own_memory(struct cuda_rank *rank)
{
    const struct workload *p = &rank->run->problem;
    struct mok_engine_config config = { .index = (uint32_t)rank->gpu };
    struct mok_device_limits limits;
    struct mok_message message = { "" };
    struct mok_layer_spec spec = { .hidden = p->hidden,
                                   .intermediate = p->intermediate,
                                   .experts = p->experts,
                                   .topk = p->topk,
                                   .ep = p->ep,
                                   .rank = rank->index,
                                   .max_tokens = p->max_tokens,
                                   .precision = p->precision,
                                   .ring_bytes = p->ring_bytes,
                                   .minibatch_rows = p->minibatch_rows,
                                   .gradient_dtype = p->bf16_gradients ? MOK_DTYPE_BF16 : 0,
                                   .wgrad_precision = p->mxfp8_wgrad ? MOK_WGRAD_MXFP8 : MOK_WGRAD_BF16,
                                   .transposed_weights = p->transposed };

    int r = mok_cuda_engine.probe(&config, &limits, &message);
    if (r == 0)
        r = mok_cuda_engine.open(&config, &rank->engine, &message);
    if (r == 0)
        r = mok_plan_make(&spec, &limits, &rank->plan, NULL, 0, &message);
    if (r < 0)
        return say(rank, "in process", message.text);
    if (cudaMalloc(&rank->symmetric, rank->plan.symmetric_bytes) != cudaSuccess ||
        cudaMalloc(&rank->private_memory, rank->plan.private_bytes) != cudaSuccess ||
        (rank->run->backward && cudaMalloc(&rank->context, mok_buffer_size(rank->daemon.context)) != cudaSuccess))
        return say(rank, "in process", "out of memory");
    if (copy_of(rank, rank->daemon.x, &rank->x) < 0 || copy_of(rank, rank->daemon.d_out, &rank->d_out) < 0)
        return -1;
    return reach_peers(rank);
}

static void *at(mok_buffer *buffer)
{
    return buffer ? mok_buffer_data(buffer) : NULL;
}

static int own_layer(struct cuda_rank *rank)
{
    const struct cuda_run *run = rank->run;
    const struct workload_rank *d = &rank->daemon;
    void *symmetric[CUDA_MAX_RANKS];
    struct mok_message message = { "" };

    for (uint32_t r = 0; r < run->problem.ep; r++) {
        symmetric[r] = run->rank[r].symmetric;
        rank->peer[r] =
            (struct mok_peer){ .x = run->rank[r].x, .d_out = run->rank[r].d_out, .tokens = run->problem.max_tokens };
    }
    if (mok_cuda_engine.layer_open(rank->engine, &rank->plan, symmetric, rank->private_memory, &rank->layer, &message) <
        0)
        return say(rank, "in process", message.text);
    rank->args = (struct mok_op_args){ .kind = MOK_KIND_FORWARD,
                                       .context_mode = run->backward ? run->problem.context_mode : MOK_CONTEXT_NONE,
                                       .tokens = d->tokens,
                                       .ids = at(d->ids),
                                       .topk_weight = at(d->weight),
                                       .context = rank->context,
                                       .out = at(d->out),
                                       .d_x = at(d->d_x),
                                       .d_topk_weight = at(d->d_weight),
                                       .peer = rank->peer };
    rank->args.params = (struct mok_expert_params){
        .gate = at(d->gate),
        .up = at(d->up),
        .down = at(d->down),
        .gate_scale = at(d->gate_scale),
        .up_scale = at(d->up_scale),
        .down_scale = at(d->down_scale),
        .gate_transposed = at(d->gate_transposed),
        .up_transposed = at(d->up_transposed),
        .down_transposed = at(d->down_transposed),
        .d_gate = at(d->d_gate),
        .d_up = at(d->d_up),
        .d_down = at(d->d_down),
    };
    return 0;
}

/* Everybody's stream goes on when all have come here. */
static int meet_on_device(struct cuda_rank *rank, uint32_t which)
{
    struct cuda_run *run = rank->run;
    int r = check(rank, cudaEventRecord(rank->met[which], rank->stream), "event");

    if (cuda_rank_meet(rank, r) < 0)
        return -1;
    for (uint32_t p = 0; p < run->problem.ep && r == 0; p++)
        if (p != rank->index)
            r = check(rank, cudaStreamWaitEvent(rank->stream, run->rank[p].met[which], 0), "waiting for a rank");
    return cuda_rank_meet(rank, r);
}

static int run_own(struct cuda_rank *rank, enum mok_op_kind kind)
{
    uint32_t ep = rank->run->problem.ep;

    rank->args.kind = kind;
    rank->args.flags = kind == MOK_KIND_BACKWARD ? MOK_OPF_OVERWRITE_WGRAD : 0;
    for (int phase = MOK_PHASE_PREPARE; phase <= MOK_PHASE_REDUCE; phase++) {
        int r = mok_cuda_enqueue(rank->layer, &rank->args, (enum mok_phase)phase, rank->stream);
        if (ep == 1 && r == 0)
            continue;
        if (cuda_rank_meet(rank, r) < 0)
            return -1;
        if (phase < MOK_PHASE_REDUCE && meet_on_device(rank, (uint32_t)phase - 1) < 0)
            return -1;
    }
    return 0;
}

/* ------------------------------------------------------------------ through mokd */

static int run_daemon(struct cuda_rank *rank, enum mok_op_kind kind, mok_ticket *ret)
{
    struct workload_rank *d = &rank->daemon;
    mok_stream stream = (mok_stream)rank->stream;
    int r;

    if (kind == MOK_KIND_FORWARD) {
        mok_forward_args args = { .size = sizeof(args),
                                  .tokens = d->tokens,
                                  .context_mode = rank->args.context_mode,
                                  .x = { .buffer = d->x },
                                  .ids = { .buffer = d->ids },
                                  .topk_weight = { .buffer = d->weight },
                                  .out = { .buffer = d->out } };
        if (rank->run->backward)
            args.context = (mok_view){ .buffer = d->context };
        r = mok_layer_forward_on_stream(d->layer, &args, stream, ret);
    } else {
        mok_backward_args args = { .size = sizeof(args),
                                   .tokens = d->tokens,
                                   .context_mode = rank->args.context_mode,
                                   .flags = MOK_BACKWARD_OVERWRITE_WGRAD,
                                   .x = { .buffer = d->x },
                                   .context = { .buffer = d->context },
                                   .d_out = { .buffer = d->d_out },
                                   .d_x = { .buffer = d->d_x },
                                   .d_topk_weight = { .buffer = d->d_weight } };
        r = mok_layer_backward_on_stream(d->layer, &args, stream, ret);
    }
    return r < 0 ? say(rank, "an operation", mok_last_error()) : 0;
}

static int reap(struct cuda_rank *rank, const mok_ticket *ticket, int count)
{
    mok_result result;

    for (int i = 0; i < count; i++)
        if (mok_wait(rank->daemon.session, ticket[i], -1, &result) < 0 || result.code < 0)
            return say(rank, "an operation", mok_last_error());
    return 0;
}

/* ------------------------------------------------------------------ both */

static int run_one(struct cuda_rank *rank, enum cuda_work work, enum mok_op_kind kind, mok_ticket *ret)
{
    switch (work) {
    case CUDA_THROUGH_MOKD:
        return run_daemon(rank, kind, ret);
    case CUDA_IN_PROCESS:
        return run_own(rank, kind);
    case CUDA_DENSE:
        return rank->dense.handle ? dense_cuda_multiply(&rank->dense) : 0;
    }
    return -1;
}

double cuda_rank_time(struct cuda_rank *rank, enum cuda_work work, int count)
{
    const enum mok_op_kind last = rank->run->backward ? MOK_KIND_BACKWARD : MOK_KIND_FORWARD;
    const int each = work != CUDA_DENSE && rank->run->both ? 2 : 1;
    mok_ticket ticket[2 * MAX_QUEUED];
    float ms = 0;

    if (cuda_rank_meet(rank, count > MAX_QUEUED ? -1 : 0) < 0)
        return (double)NAN;
    int r = check(rank, cudaEventRecord(rank->from, rank->stream), "event");
    for (int i = 0; i < each * count && r == 0; i++) {
        const enum mok_op_kind kind = i % each == each - 1 ? last : MOK_KIND_FORWARD;
        r = run_one(rank, work, kind, &ticket[i]);
    }
    if (r == 0)
        r = check(rank, cudaEventRecord(rank->to, rank->stream), "event");
    if (r == 0)
        r = check(rank, cudaStreamSynchronize(rank->stream), "waiting");
    if (r == 0 && work == CUDA_THROUGH_MOKD)
        r = reap(rank, ticket, each * count);
    if (r == 0)
        r = check(rank, cudaEventElapsedTime(&ms, rank->from, rank->to), "events");
    return cuda_rank_meet(rank, r) < 0 ? (double)NAN : (double)ms / count;
}

/* A forward of either kind, so that both have a context for the backward. */
static int first_forward(struct cuda_rank *rank)
{
    mok_ticket ticket;
    int r = run_daemon(rank, MOK_KIND_FORWARD, &ticket);

    if (r == 0)
        r = check(rank, cudaStreamSynchronize(rank->stream), "waiting");
    if (r == 0)
        r = reap(rank, &ticket, 1);
    if (cuda_rank_meet(rank, r) < 0)
        return -1;
    r = run_own(rank, MOK_KIND_FORWARD);
    return r < 0 ? r : check(rank, cudaStreamSynchronize(rank->stream), "waiting");
}

static int open_streams(struct cuda_rank *rank)
{
    int r = check(rank, cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking), "stream");

    for (int i = 0; i < 2 && r == 0; i++)
        r = check(rank, cudaEventCreateWithFlags(&rank->met[i], cudaEventDisableTiming), "event");
    if (r == 0)
        r = check(rank, cudaEventCreate(&rank->from), "event");
    return r < 0 ? r : check(rank, cudaEventCreate(&rank->to), "event");
}

int cuda_rank_open(struct cuda_rank *rank)
{
    struct cuda_run *run = rank->run;
    uint32_t tokens = run->problem.max_tokens;
    int r;

    r = check(rank, cudaSetDevice(rank->gpu), "choosing a GPU");
    if (cuda_rank_meet(rank, r) < 0)
        return -1;
    if (workload_open(&rank->daemon, &run->problem, rank->index, tokens, (uint64_t)rank->index * tokens, run->socket,
                      run->group, rank->index) < 0)
        r = say(rank, "opening", mok_last_error());
    if (r == 0)
        r = open_streams(rank);
    if (r == 0 && run->dense && rank->index < run->gpus)
        r = dense_cuda_open(&rank->dense, rank->stream);
    if (r == 0)
        r = own_memory(rank);
    if (cuda_rank_meet(rank, r) < 0)
        return -1;
    if (cuda_rank_meet(rank, own_layer(rank)) < 0)
        return -1;
    return cuda_rank_meet(rank, first_forward(rank));
}

void cuda_rank_close(struct cuda_rank *rank)
{
    if (rank->layer)
        mok_cuda_engine.layer_close(rank->layer);
    mok_cuda_engine.close(rank->engine);
    pthread_barrier_wait(&rank->run->barrier); /* no GPU reads another's memory any more */
    cudaFree(rank->symmetric);
    cudaFree(rank->private_memory);
    cudaFree(rank->context);
    cudaFree(rank->x);
    cudaFree(rank->d_out);
    dense_cuda_close(&rank->dense);
    if (rank->stream)
        cudaStreamDestroy(rank->stream);
    workload_close(&rank->daemon);
}
