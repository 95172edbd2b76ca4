/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One MoE layer of one rank, as every engine sees it: shape, plan, memory map, and the arguments of an operation.
 * Knows nothing of sockets, sessions or users. Compiles as C and as CUDA C.
 */
#ifndef MOK_KERNELS_LAYER_H
#define MOK_KERNELS_LAYER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "message.h"
#include "mok/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Shape and options of a layer. H hidden, I intermediate, E experts, K top-k, T tokens; E_l = E / ep.
 * Rank r owns the experts [r * E_l, (r + 1) * E_l).
 */
struct mok_layer_spec {
    uint32_t hidden;       /* H, multiple of 16 */
    uint32_t intermediate; /* I, multiple of 16 */
    uint32_t experts;      /* E, multiple of ep */
    uint32_t topk;         /* K, 1..MOK_MAX_TOPK (may exceed E: duplicates are legal) */
    uint32_t ep;           /* ranks of the group */
    uint32_t rank;         /* 0..ep-1 */
    uint32_t max_tokens;   /* T of any rank never exceeds this */
    uint32_t precision;    /* enum mok_precision */
    uint32_t shared_intermediate; /* width of the shared expert, multiple of 16; 0: none */
    float clamp;                  /* SwiGLU limit L > 0; 0: none */
    /* overrides of the plan; 0: the plan's choice */
    uint64_t ring_bytes;
    uint32_t minibatch_rows;
    uint32_t comm_units;
    uint32_t gradient_dtype; /* of the weight gradients, enum mok_dtype; 0: FP32 */
    uint32_t wgrad_precision; /* of their operands in an MXFP8 layer, enum mok_wgrad; 0: BF16 */
    uint32_t transposed_weights; /* 1: a backward has the experts' weights transposed, too; of MXFP8 per 128 alone */
};

static inline bool mok_spec_bf16_gradients(const struct mok_layer_spec *spec)
{
    return spec->gradient_dtype == MOK_DTYPE_BF16;
}

/* Weight gradients are products of E4M3 operands that were quantised along the token axis. */
static inline bool mok_spec_mxfp8_wgrad(const struct mok_layer_spec *spec)
{
    return spec->wgrad_precision == MOK_WGRAD_MXFP8;
}

struct mok_device_limits {
    uint32_t kind;         /* enum mok_device_kind */
    uint32_t units;        /* host: threads; cuda: SMs */
    uint64_t memory_bytes;
    uint8_t uuid[16];      /* cuda: the GPU; else zeros */
    uint32_t mps;          /* cuda: not 0: this process shares the GPU through MPS */
};

/*
 * What the layer's spec and the device make of each other. All ranks of a group with equal specs and
 * equal devices get equal plans but for `rank`. Offsets are bytes.
 */
struct mok_plan {
    struct mok_layer_spec spec;
    struct mok_device_limits device;
    uint32_t local_experts;   /* E_l */
    uint32_t comm_units;
    uint32_t compute_units;
    uint32_t minibatch_rows;
    uint32_t tile_rows;       /* an expert's segment of a macrobatch starts at a multiple of this */
    uint64_t max_rows;        /* rows this rank can receive at worst: ep * max_tokens * K */
    uint64_t ring_rows;       /* rows of one macrobatch, the ring's capacity */

    /* symmetric workspace: peers map it. The ranks' flags (dispatch.h) are not in it, but in host memory of their own. */
    uint64_t sym_ids;          /* I32  [max_tokens][K], validated copy */
    uint64_t sym_topk_weight;  /* F32  [max_tokens][K] */
    uint64_t sym_slots;        /* BF16 [max_tokens][K][H]: y forward, d_x backward; one writer a slot */
    uint64_t sym_weight_slots; /* F32  [max_tokens][K]: d_topk_weight */
    uint64_t sym_engine;       /* what else the engine shares with its peers */
    uint64_t symmetric_bytes;

    /* private workspace of the rank; its inner map is the engine's */
    uint64_t private_bytes;

    /* saved context: struct mok_context_header, then the parts below */
    uint64_t ctx_ids;          /* I32 [max_tokens][K] */
    uint64_t ctx_topk_weight;  /* F32 [max_tokens][K] */
    uint64_t ctx_ring;         /* full only: the ring as forward left it */
    uint64_t context_recompute_bytes;
    uint64_t context_full_bytes;
};

/*
 * Makes the plan; returns 0, or -MOK_E* and a sentence. `describe` (may be NULL) gets lines "what = value (reason)".
 * Every byte count that is reported to anyone comes from here.
 */
int mok_plan_make(const struct mok_layer_spec *spec, const struct mok_device_limits *device, struct mok_plan *ret,
                  char *describe, size_t describe_size, struct mok_message *message);

/* Of what a saved context depends on, so that another layer's context is refused. */
uint64_t mok_plan_hash(const struct mok_plan *plan);

/* Head of a saved context. Client-writable memory: every field is checked again when it is read. */
#define MOK_CONTEXT_MAGIC 0x544e4f434b4f4dull
struct mok_context_header {
    uint64_t magic;
    uint64_t layer_hash; /* mok_plan_hash */
    uint32_t mode;       /* enum mok_context_mode */
    uint32_t tokens;
    uint64_t ring_rows_kept; /* rows of macrobatch 0 that ctx_ring holds */
    uint8_t reserved[224];
};

enum mok_op_kind { MOK_KIND_FORWARD = 1, MOK_KIND_BACKWARD = 2 };

#define MOK_OPF_ACCUMULATE_OUT (1u << 0)
#define MOK_OPF_OVERWRITE_WGRAD (1u << 1)

/* Expert parameters (fixed pointers of this rank) and gradients of the spec's type; see control.proto for shapes. */
struct mok_expert_params {
    const void *gate, *up, *down;
    const void *gate_scale, *up_scale, *down_scale;
    const void *gate_transposed, *up_transposed, *down_transposed; /* codes alone; an engine need not use them */
    const void *shared_gate, *shared_up, *shared_down;
    void *d_gate, *d_up, *d_down;
    void *d_shared_gate, *d_shared_up, *d_shared_down;
};

/* One rank as the engine of another sees it for one operation. */
struct mok_peer {
    const void *x;     /* BF16 [tokens][H], that rank's symmetric buffer */
    const void *d_out; /* BF16 [tokens][H]; backward */
    uint32_t tokens;
};

/* Everything one operation of one rank needs; pointers are of this process. */
struct mok_op_args {
    uint32_t kind;         /* enum mok_op_kind */
    uint32_t context_mode; /* enum mok_context_mode */
    uint32_t flags;        /* MOK_OPF_* */
    uint32_t tokens;       /* T of this rank */
    const int32_t *ids;           /* forward, PREPARE: caller's [T][K] */
    const float *topk_weight;     /* forward, PREPARE: caller's [T][K] */
    void *context;                /* NULL with MOK_CONTEXT_NONE */
    void *out;                    /* forward: BF16 [T][H] */
    void *d_x;                    /* backward: BF16 [T][H] */
    float *d_topk_weight;         /* backward: F32 [T][K] */
    struct mok_expert_params params;
    const struct mok_peer *peer;  /* [ep], filled in before MAIN; own entry included */
};

/* What a phase came to. */
struct mok_op_result {
    int32_t status;      /* 0 or -MOK_E* */
    uint32_t argument;   /* enum mok_argument at fault */
    uint64_t rows;       /* rows this rank's experts processed (MAIN) */
    uint64_t bad_token;  /* MOK_EEXPERT: first bad slot */
    uint64_t bad_slot;
    int64_t bad_value;
    uint64_t device_ns;
    /* MAIN's time by kind of work, summed over the units that did it; 0 where an engine does not tell them apart */
    uint64_t schedule_ns; /* building the schedule */
    uint64_t transfer_ns; /* the transfers between ranks: dispatch and combine, or their reverses */
    uint64_t compute_ns;  /* the experts, the shared one included */
    /* MAIN: what passed the ring, and what each expert got; 0 and NULL where an engine does not tell */
    uint64_t padded_rows;
    uint64_t macrobatches;
    uint64_t minibatches;
    const uint64_t *expert_rows; /* [E_l], the engine's own; stays until a next MAIN starts */
};

#ifdef __cplusplus
}
#endif
#endif
