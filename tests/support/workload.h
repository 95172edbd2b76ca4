/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A random layer problem split over the ranks of a group, and one rank that runs it through libmok.
 * Used by integration and chaos tests and by the benchmarks. Values depend on (seed, global index) alone.
 */
#ifndef MOK_TEST_WORKLOAD_H
#define MOK_TEST_WORKLOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "mok/mok.h"

enum workload_routing { WORKLOAD_UNIFORM, WORKLOAD_ZIPF, WORKLOAD_HOT_RANK, WORKLOAD_HOT_EXPERT };

struct workload {
    uint32_t hidden, intermediate, experts, topk, ep;
    uint32_t max_tokens;
    uint32_t shared_intermediate;
    float clamp;
    uint32_t precision;     /* 0: MOK_BF16 */
    uint32_t context_mode;  /* of forward */
    uint64_t seed;
    enum workload_routing routing;
    float masked;           /* share of slots with id -1 */
    bool forward_only;      /* no backward in a step, and no memory for one */
    bool repeated;          /* large tensors repeat their first values: made in no time, for benchmarks */
    uint32_t session_weight, queue_entries; /* 0: as mok_session_options has it */
    uint64_t ring_bytes;    /* 0: the plan's choice, as in mok_layer_options */
    uint32_t minibatch_rows, comm_units;
    bool tiles; /* of an MXFP8 layer: weights in tiles of 128 x 128, not 1 x 128 */
    uint64_t timeout_ns; /* of an operation */
    bool mxfp8_wgrad; /* of an MXFP8 layer */
    bool bf16_gradients;
    bool transposed; /* with tiles: the weights are bound transposed, too */
};

struct workload_rank {
    const struct workload *problem;
    uint32_t rank, tokens;
    uint64_t first_token; /* index of this rank's first token in the whole batch */
    mok_session *session;
    mok_group *group;
    mok_layer *layer;
    mok_buffer *x, *d_out;                         /* symmetric */
    mok_buffer *ids, *weight, *out, *d_x, *d_weight, *context;
    mok_buffer *gate, *up, *down, *d_gate, *d_up, *d_down;
    mok_buffer *gate_scale, *up_scale, *down_scale; /* MXFP8 */
    mok_buffer *gate_transposed, *up_transposed, *down_transposed;
    mok_buffer *s_gate, *s_up, *s_down, *d_s_gate, *d_s_up, *d_s_down;
};

/* How bytes get into and out of buffers; for GPUs a test puts another function here. */
extern void (*workload_copy)(void *to, const void *from, uint64_t bytes);

/* Value streams, so that an oracle can make the same inputs. */
enum workload_stream { STREAM_X, STREAM_D_OUT, STREAM_WEIGHT, STREAM_IDS, STREAM_GATE, STREAM_UP, STREAM_DOWN,
                      STREAM_S_GATE, STREAM_S_UP, STREAM_S_DOWN, STREAM_MASK };
/* Standard-normal-like value of element `index` of a stream. */
float workload_value(const struct workload *problem, enum workload_stream stream, uint64_t index);
/* Expert ids of one token of the whole batch, K of them. */
void workload_ids(const struct workload *problem, uint64_t token, int32_t *ret_ids);
uint16_t workload_bf16(float value);
float workload_float(uint16_t bf16);

/*
 * Opens a session, joins `group`, allocates everything, creates and binds the layer, fills in the inputs.
 * 0, or -MOK_E* (mok_last_error() has the sentence) with *rank cleaned up.
 */
int workload_open(struct workload_rank *rank, const struct workload *problem, uint32_t index, uint32_t tokens,
                 uint64_t first_token, const char *socket, const char *group, uint32_t device);
void workload_fill(struct workload_rank *rank);
void workload_poison(struct workload_rank *rank); /* outputs to NaN */
int workload_forward(struct workload_rank *rank, mok_ticket *ret_ticket);
int workload_backward(struct workload_rank *rank, uint32_t flags, mok_ticket *ret_ticket);
/* Both, waited for; the operation's code or the first error. */
int workload_step(struct workload_rank *rank, mok_result *ret_forward, mok_result *ret_backward);
/* FNV-1a over every output and gradient. */
uint64_t workload_hash(const struct workload_rank *rank);
/* Leaves the group and closes the session. */
void workload_close(struct workload_rank *rank);

#endif
