/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A group of ranks on one GPU, an engine a rank, driven through the common interface with memory that the engine made:
 * exported, imported and mapped as a worker does it.
 */
#ifndef MOK_TESTS_GPU_DEVICE_H
#define MOK_TESTS_GPU_DEVICE_H

#include "engine.h"
#include "oracle.h"
#include "problem.h"

#define DEVICE_MAX_RANKS 8

/* How many values a scale is for in tests of MXFP8, which are built for both rules. */
#ifndef MX_SCALE
#define MX_SCALE 128
#endif
/* An emulated GPU is slow: of scales of 32 values it does only what they may get wrong alone. */
#if defined(MAX_EP) && MX_SCALE == 32
#define MX_IN_SHORT 1
#else
#define MX_IN_SHORT 0
#endif
#define MX (MX_SCALE == 32 ? MOK_MXFP8_PER32 : MOK_MXFP8_PER128)

struct device_memory {
    void *at;
    uint64_t bytes;
};

struct device_group {
    uint32_t ranks;
    uint32_t flags;       /* of a backward */
    bool bf16_gradients;
    struct problem shape; /* dimensions only */
    struct mok_plan plan[DEVICE_MAX_RANKS];
    struct mok_engine *engine[DEVICE_MAX_RANKS];
    struct mok_engine_layer *layer[DEVICE_MAX_RANKS];
    struct device_memory symmetric[DEVICE_MAX_RANKS], private_memory[DEVICE_MAX_RANKS];
    struct device_memory params[DEVICE_MAX_RANKS][6], scales[DEVICE_MAX_RANKS][3],
        transposed[DEVICE_MAX_RANKS][3];
    struct device_memory x[DEVICE_MAX_RANKS], ids[DEVICE_MAX_RANKS], weight[DEVICE_MAX_RANKS], out[DEVICE_MAX_RANKS];
    /* with a context mode */
    struct device_memory context[DEVICE_MAX_RANKS], d_out[DEVICE_MAX_RANKS], d_x[DEVICE_MAX_RANKS],
        d_weight[DEVICE_MAX_RANKS], gradients[DEVICE_MAX_RANKS][6]; /* behind canaries, as d_x and d_weight */
    uint32_t tokens[DEVICE_MAX_RANKS];
    struct mok_peer peer[DEVICE_MAX_RANKS];
    struct mok_op_args args[DEVICE_MAX_RANKS];
};

struct device_options {
    uint32_t ranks, blocks, minibatch_rows, comm_units, chaos_delay_us, yield_us;
    uint64_t ring_rows;    /* 0: the plan's */
    uint32_t context_mode; /* not 0: backward can be run too */
    uint32_t flags;        /* of the backward */
    uint32_t precision;    /* 0: BF16; else weights are quantised, with 128 x 128 tiles or each row by itself, as it says */
    bool tiles;
    bool transposed; /* weights are given transposed, too */
    bool bf16_gradients, mxfp8_wgrad;
};

/* Ends the test with a sentence when something is refused. `tokens`: [ranks]. */
void device_group_open(struct device_group *ret, const struct problem *problem, const struct device_options *options,
                       const uint32_t *tokens);
void device_group_close(struct device_group *group);

/* Runs a phase on one rank and waits for its end. */
struct mok_op_result device_phase(struct device_group *group, uint32_t rank, enum mok_phase phase);
/* All phases on all ranks, which must succeed. */
void device_forward(struct device_group *group);
/* PREPARE, MAIN and REDUCE of a backward on all ranks, which must succeed; its outputs are poisoned or, where it adds to
 * them, filled with `start` before. A forward must have left its context. */
void device_backward(struct device_group *group, float start);
/* All gradients in the problem's order, less `start` where the backward added to it; shared ones are summed over ranks. */
void device_gradients(const struct device_group *group, float start, struct result *ret);
/* The same as bytes, for comparisons of bits: freed by the caller. */
uint8_t *device_gradient_bytes(const struct device_group *group, size_t *ret_size);
/* Ends the test when something around the outputs was written. */
void device_check_canaries(const struct device_group *group);
/* The outputs of all ranks in the problem's order; BF16 [T][H], freed by the caller. */
uint16_t *device_out(const struct device_group *group);

/* Does it `times` times; each time the outputs must have these bits. */
void device_repeat_forward(struct device_group *group, const uint16_t *want, int times);
/* The same for gradients; `all`: with a forward before each. */
void device_repeat_backward(struct device_group *group, bool all, const uint8_t *want, int times);

/* Ends the program as skipped, with the reason, where this machine has no GPU that the engine takes. */
void device_or_skip(void);

#endif
