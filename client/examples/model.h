/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The language model around the MoE layers, of one rank:
 *
 *     h    = sum over w < window of embedding[w][byte at distance w]
 *     h   += moe_l(rmsnorm_l(h)), routed by top-k of router_l rmsnorm_l(h)      for each layer l
 *     loss = cross entropy of out rmsnorm(h) + bias against the next byte
 *
 * Dense parameters are replicas, equal on all ranks; the experts are this rank's share. All FP32 masters.
 *
 * The model lives in its backend's memory. On a GPU a step is queued, not done, when model_step and model_update
 * return: the stream brings the layers' operations, the kernels around them and the optimizer into their order.
 */
#ifndef EXAMPLE_MODEL_H
#define EXAMPLE_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "backend.h"
#include "data.h"
#include "moe.h"
#include "optimizer.h"

#define MODEL_CLASSES 256u
#define MODEL_LOSSES 16u /* steps whose losses are kept */

struct model_shape {
    unsigned ranks, rank;
    unsigned hidden, intermediate, experts, topk, layers, window;
    unsigned shared_intermediate;
    unsigned tokens, micro_batches; /* of one rank; tokens of one micro-batch */
};

/* A tensor inside the dense parameters. */
struct model_span {
    size_t at, count;
    float deviation; /* of the initial values; 0: all are `constant` */
    float constant;
    int decay;
    enum moe_weight weight; /* of a shared expert's tensor; MOE_WEIGHTS: not handed to the layer */
    unsigned layer;
};

struct model;

int model_create(const struct model_shape *shape, const struct backend *backend, struct model **ret);
void model_free(struct model *model);

/* Initial parameters; those of an expert depend on the seed and its global number alone. */
void model_initialise(struct model *model, uint64_t seed);
/* Gives the layers the present parameters, in their precision. */
int model_publish(struct model *model, struct moe *moe);

/*
 * Forward and backward of one step over all micro-batches; dense gradients of this rank are in model_gradients after,
 * expert gradients in the layers' buffers. `batch`: the first micro-batch; the others have the sequences that follow.
 * `scale` is 1 / tokens of the global batch.
 */
int model_step(struct model *model, struct moe *moe, const struct batch *batch, float scale);
/* Sums over this rank's tokens of the steps first .. first + count - 1, of the last MODEL_LOSSES; waits for them. */
int model_losses(struct model *model, uint64_t first, unsigned count, double *ret);

/* Dense parameters, in the backend's memory: master, moments, gradients, and where each tensor lies. */
struct adamw_tensor model_dense(struct model *model);
float *model_gradients(struct model *model);
size_t model_dense_count(const struct model_shape *shape);
const struct model_span *model_spans(const struct model *model, size_t *ret_count);

/* Expert tensor `which` (gate, up, down) of local expert `expert`. */
struct adamw_tensor model_expert(struct model *model, unsigned layer, unsigned expert, enum moe_weight which);

/* Applies AdamW to everything. */
void model_update(struct model *model, struct moe *moe, const struct adamw *adamw, uint64_t step);

/* Hashes of the parameters, chained through *hash: of the dense ones, and of an expert. */
int model_hash_dense(struct model *model, uint64_t *hash);
int model_hash_expert(struct model *model, unsigned layer, unsigned expert, uint64_t *hash);

#endif
