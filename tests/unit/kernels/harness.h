/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Runs layers with all their ranks inside one process: one engine a rank, driven through dispatch.h and engine.h as a
 * worker would, by any engine. Every tensor and workspace is guarded memory and starts as poison, so that a test
 * notices reads of what was never written and writes beyond what was given.
 *
 *   harness_open -> layer_open -> tensors_make -> { layer_forward, layer_backward } ... -> harness_drive -> collect
 */
#ifndef MOK_TESTS_HARNESS_H
#define MOK_TESTS_HARNESS_H

#include "dispatch.h"
#include "engine.h"
#include "guarded.h"
#include "oracle.h"
#include "problem.h"

#define HARNESS_MAX_RANKS 16
#define HARNESS_MAX_LAYERS 4
#define HARNESS_MAX_SETS 64

struct harness_options {
    const struct mok_engine_ops *engine; /* NULL: the host engine */
    uint32_t ranks;                      /* 0: 1 */
    uint32_t threads;                    /* of each engine; 0: 1 */
    uint32_t chaos_delay_us;             /* random delays inside the engines */
    uint32_t jitter;                     /* a rank begins an operation up to this many rounds of the driver late */
    uint64_t seed;                       /* of jitter and of the order in which the driver looks at ranks and layers */
};

struct layer_options {
    uint64_t ring_bytes; /* overrides of the plan; 0: its choice */
    uint32_t ring_tiles; /* a ring of so many tiles instead of ring_bytes; 0: no */
    uint32_t minibatch_rows, comm_units;
    uint32_t precision;  /* 0: MOK_BF16; MXFP8: expert parameters are quantised on the way in */
    uint32_t max_tokens; /* 0: all tokens of the problem, so that any split fits */
    bool bf16_gradients; /* weight gradients are BF16 */
    bool mxfp8_wgrad;    /* and products of E4M3 operands; of an MXFP8 layer */
    bool sparse;         /* all memory without reservation, not poisoned, for sizes beyond memory; inputs may be NULL */
};

struct layer;
struct tensors;

/* One operation on all ranks. Until harness_drive, `args` and `cancel` of a rank may be changed. */
struct operation {
    struct layer *layer;
    struct rank_operation {
        struct mok_op_args args;
        struct mok_peer peer[HARNESS_MAX_RANKS];
        uint32_t x_buffer, d_out_buffer; /* 0: none */
        int cancel;                      /* asked for before the operation begins; 0: no */
        bool absent;                     /* this rank never joins */
        enum mok_phase abort_in;         /* abort the engine right after starting this phase; 0: no */
        struct mok_dispatch_op dispatch;
        enum mok_dispatch_action pending; /* asked for while the device was busy */
        bool begun, done;
        uint32_t late; /* driver rounds before it begins */
        struct mok_op_result result;
        uint32_t fault_rank;
    } rank[HARNESS_MAX_RANKS];
    struct operation *next;
};

struct params {
    struct guarded gate, up, down, d_gate, d_up, d_down;
    struct guarded shared_gate, shared_up, shared_down, d_shared_gate, d_shared_up, d_shared_down;
    struct guarded gate_scale, up_scale, down_scale;
};

struct layer {
    struct harness *harness;
    struct problem shape; /* dimensions only; no arrays */
    uint32_t ranks, local_experts;
    bool poison_private; /* before every operation; on by default */
    bool sparse;
    struct mok_plan plan[HARNESS_MAX_RANKS];
    struct guarded flags, symmetric[HARNESS_MAX_RANKS], private_memory[HARNESS_MAX_RANKS];
    struct mok_engine_layer *engine_layer[HARNESS_MAX_RANKS];
    struct params params[HARNESS_MAX_RANKS];
    struct mok_dispatch_view view[HARNESS_MAX_RANKS];
    uint64_t begun[HARNESS_MAX_RANKS];
    struct operation *operations; /* in order of submission */
};

/* The caller's tensors of one micro-batch on all ranks. */
struct tensors {
    struct layer *layer;
    uint32_t tokens[HARNESS_MAX_RANKS];
    uint64_t first[HARNESS_MAX_RANKS]; /* of this rank's tokens in the global problem */
    uint32_t context_mode;
    struct guarded x[HARNESS_MAX_RANKS], d_out[HARNESS_MAX_RANKS], ids[HARNESS_MAX_RANKS];
    struct guarded topk_weight[HARNESS_MAX_RANKS], out[HARNESS_MAX_RANKS], d_x[HARNESS_MAX_RANKS];
    struct guarded d_topk_weight[HARNESS_MAX_RANKS], context[HARNESS_MAX_RANKS];
    uint32_t x_buffer, d_out_buffer;
};

struct harness {
    struct harness_options options;
    const struct mok_engine_ops *ops;
    struct mok_device_limits limits;
    struct rng rng;
    struct harness_notifier *notifier;
    struct mok_engine *engine[HARNESS_MAX_RANKS];
    struct rank_operation *busy[HARNESS_MAX_RANKS]; /* whose phase runs on the device */
    struct layer *layers[HARNESS_MAX_LAYERS];
    uint8_t *registry[2 * HARNESS_MAX_SETS + 1][HARNESS_MAX_RANKS]; /* symmetric buffer id -> address */
    uint32_t sets;
};

/* The engine that $MOK_TEST_ENGINE (host, cuda) names; the host engine by default. */
const struct mok_engine_ops *harness_engine(void);
struct harness *harness_open(const struct harness_options *options);
void harness_close(struct harness *harness); /* closes its layers too */

/* The spec that layer_open would use for `rank`. */
struct mok_layer_spec layer_spec(const struct harness *harness, const struct problem *shape,
                                 const struct layer_options *options, uint32_t rank);
/* Bytes of the smallest ring the plan accepts: one tile. */
uint64_t smallest_ring(const struct harness *harness, const struct mok_layer_spec *spec);
/* Opens a layer and gives it the parameters of `problem`; weight gradients start at 0. */
struct layer *layer_open(struct harness *harness, const struct problem *problem, const struct layer_options *options);
void layer_close(struct layer *layer);
void layer_zero_gradients(struct layer *layer);
/* Element i of each, over all ranks' experts, gets start * (i % 7 - 3). */
void layer_start_gradients(struct layer *layer, float start);
void layer_poison_gradients(struct layer *layer);

/* `tokens`: [ranks], how many consecutive tokens of the problem each rank has; NULL: split evenly. */
struct tensors *tensors_make(struct layer *layer, const struct problem *problem, const uint32_t *tokens,
                             uint32_t context_mode);
void tensors_free(struct tensors *tensors);
/* Outputs back to poison (context too, if asked), as before a first use. */
void tensors_poison_outputs(struct tensors *tensors, bool context);

/* Queues the operation on all ranks; harness_drive runs all that is queued. */
struct operation *layer_forward(struct tensors *tensors, uint32_t flags);
struct operation *layer_backward(struct tensors *tensors, uint32_t flags);
/* Until every operation is done, but for those that wait for an absent rank. */
void harness_drive(struct harness *harness);
/* Ends the test if any rank's operation failed; frees it. */
void operation_expect_success(struct operation *operation);
/* Ends the test if not all ranks failed with `code` (negative) and the same fault; frees it. */
void operation_expect_failure(struct operation *operation, int code);
void operation_free(struct operation *operation);

/* Ends the test if a canary round any tensor, parameter or workspace was touched. */
void tensors_check_canaries(const struct tensors *tensors);
void layer_check_canaries(const struct layer *layer);

/* Puts the ranks' results together in the problem's order. Shared-expert gradients are summed over ranks in FP64. */
void tensors_collect(const struct tensors *tensors, const struct problem *problem, struct result *ret);

/* All of the above for one forward and one backward. */
struct run_options {
    struct harness_options harness;
    struct layer_options layer;
    const uint32_t *tokens;
    uint32_t context_mode; /* MOK_CONTEXT_FULL or MOK_CONTEXT_RECOMPUTE; 0: full */
    bool overwrite;        /* weight gradients start as NaN and are overwritten; else they start as `start` */
    float start;           /* times small whole numbers, so that neighbours differ */
};
void run_problem(const struct problem *problem, const struct run_options *options, struct result *ret);

#endif
