/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One rank of mok-bench layer --engine cuda: the same operation through mokd, and by the engine in this process. Every
 * rank has a thread of its own, whose current GPU is the rank's.
 */
#ifndef MOK_BENCH_LAYER_CUDA_RANK_H
#define MOK_BENCH_LAYER_CUDA_RANK_H

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "cuda/engine.h"
#include "dense_cuda.h"
#include "workload.h"

enum { CUDA_MAX_RANKS = 16 };

struct cuda_run;

struct cuda_rank {
    struct cuda_run *run;
    uint32_t index;
    int gpu;
    struct workload_rank daemon;
    cudaStream_t stream;
    cudaEvent_t from, to;
    cudaEvent_t met[2]; /* this rank's stream is ready, and has pushed */
    /* in process; x, d_out, out and the gradients of mokd's side are read and written here too */
    struct mok_engine *engine;
    struct mok_engine_layer *layer;
    struct mok_plan plan;
    void *symmetric, *private_memory, *context;
    void *x, *d_out; /* copies that the other GPUs can read */
    struct mok_peer peer[CUDA_MAX_RANKS];
    struct mok_op_args args;
    struct dense_cuda dense; /* on a GPU's first rank */
};

/* What the ranks share. */
struct cuda_run {
    struct workload problem;
    uint32_t gpus;
    bool backward; /* or, with `both`, a forward and then a backward */
    bool both;
    bool dense; /* a dense product is timed, too */
    const char *socket, *group;
    pthread_barrier_t barrier;
    struct cuda_rank rank[CUDA_MAX_RANKS];
    int code[CUDA_MAX_RANKS];
};

/* Collective over the ranks' threads; 0, or -1 after saying why. */
int cuda_rank_open(struct cuda_rank *rank);
void cuda_rank_close(struct cuda_rank *rank);

enum cuda_work { CUDA_THROUGH_MOKD, CUDA_IN_PROCESS, CUDA_DENSE };

/*
 * `count` operations in a row (pairs of them, with `both`; of dense products none but on a GPU's first rank) on the
 * rank's stream; milliseconds of one, NAN: failed. Collective.
 */
double cuda_rank_time(struct cuda_rank *rank, enum cuda_work work, int count);

/* All ranks are at this point; 0, or -1 if one of them has failed. */
int cuda_rank_meet(struct cuda_rank *rank, int code);

#endif
