/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A whole job for tests: one layer of a group, with every buffer that its operations need, spread over workers.
 * Symmetric: x, d_out. Private: one buffer a rank with everything else at fixed places.
 */
#ifndef MOK_TESTS_WORKER_JOB_H
#define MOK_TESTS_WORKER_JOB_H

#include "harness.h"

enum job_part {
    JOB_IDS = 0,
    JOB_TOPK_WEIGHT,
    JOB_OUT,
    JOB_CONTEXT,
    JOB_D_X,
    JOB_D_TOPK_WEIGHT,
    JOB_GATE,
    JOB_UP,
    JOB_DOWN,
    JOB_D_GATE,
    JOB_D_UP,
    JOB_D_DOWN,
    JOB_PARTS,
};

struct job {
    struct client client[HARNESS_MAX_EP];
    struct group group;
    struct layer layer;
    uint32_t ep;
    uint32_t rank_tokens[HARNESS_MAX_EP]; /* max_tokens at first */
    struct buffer x, d_out;
    struct buffer own[HARNESS_MAX_EP];
    uint64_t offset[JOB_PARTS], bytes[JOB_PARTS];
};

/* A small layer: H 32, I 16, E 4, K 2, at most 16 tokens. */
extern const struct mok_layer_spec job_small;

/* Queue, group, buffers, layer, parameters on workers[0..ep-1]; contents are zero, ids 0. */
void job_open(struct job *job, struct worker *const *workers, uint32_t ep, const struct mok_layer_spec *spec);
/* Closes group and queue on each worker that still runs, and frees this side. */
void job_close(struct job *job);
/* Frees this side alone. */
void job_free(struct job *job);

void *job_part(struct job *job, uint32_t rank, enum job_part part);
struct mok_sqe job_forward(struct job *job, uint32_t rank, uint64_t user_data);
struct mok_sqe job_backward(struct job *job, uint32_t rank, uint64_t user_data);
void job_submit_forward(struct job *job, uint32_t rank, uint64_t user_data);
void job_submit_backward(struct job *job, uint32_t rank, uint64_t user_data);
void job_submit_cancel(struct job *job, uint32_t rank, uint64_t user_data, uint64_t target);

#endif
