/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layout of one shared-memory queue between a client and a device worker. ABI.md is the normative text.
 *
 * Three sealed memfds, all made by mokd:
 *   control  worker writes, client maps read-only: header, SQ head, wake-up flag, CQ tail, CQ entries
 *   submit   client writes, worker maps read-only and trusts nothing: SQ tail, SQ entries, CQ head, sleeping count
 *   inflight worker and mokd only: what was taken and not yet completed, so that it survives a worker
 */
#ifndef MOK_RING_ABI_H
#define MOK_RING_ABI_H

#include <stddef.h>
#include <stdint.h>

#define MOK_STATIC_ASSERT _Static_assert

#define MOK_RING_MAGIC 0x474e4952u /* "RING" */
#define MOK_RING_ABI_VERSION 1u
#define MOK_RING_MIN_ENTRIES 4u
#define MOK_RING_MAX_ENTRIES 4096u

/* Feature bits of mok_ring_header.features; unknown bits are ignored by the client. */
#define MOK_RING_FEAT_CANCEL (1u << 0)
#define MOK_RING_FEAT_STREAM (1u << 1) /* MOK_SQE_ON_STREAM */

/* mok_ring_header.state */
#define MOK_RING_OPEN 0u
#define MOK_RING_CLOSED 1u /* close_code says why; nothing more will be completed */

/* sq_flags */
#define MOK_SQ_NEED_WAKEUP (1u << 0) /* the worker sleeps: write the doorbell after publishing */

enum mok_opcode {
    MOK_OP_NOP = 0,
    MOK_OP_FORWARD = 1,
    MOK_OP_BACKWARD = 2,
    MOK_OP_CANCEL = 3,
};

/* A region of a buffer: never a pointer. id 0 means absent (offset and length are then 0). */
struct mok_region {
    uint32_t buffer;
    uint32_t reserved; /* 0 */
    uint64_t offset;   /* bytes */
    uint64_t length;   /* bytes */
};
MOK_STATIC_ASSERT(sizeof(struct mok_region) == 24, "ABI");

enum mok_region_slot {
    MOK_REGION_X = 0,         /* fwd, bwd  BF16 [T][H], symmetric                        */
    MOK_REGION_IDS = 1,       /* fwd       I32  [T][K]                                   */
    MOK_REGION_TOPK_WEIGHT = 2, /* fwd     F32  [T][K]                                   */
    MOK_REGION_OUT = 3,       /* fwd       BF16 [T][H]                                   */
    MOK_REGION_CONTEXT = 4,   /* fwd, bwd  bytes, as mok_layer_memory_query says         */
    MOK_REGION_D_OUT = 5,     /* bwd       BF16 [T][H], symmetric                        */
    MOK_REGION_D_X = 6,       /* bwd       BF16 [T][H]                                   */
    MOK_REGION_D_TOPK_WEIGHT = 7, /* bwd   F32  [T][K]                                   */
    MOK_REGION_COUNT = 8,
};

/* mok_sqe.flags */
#define MOK_SQE_ACCUMULATE_OUT (1u << 0)   /* forward: out += layer(x) instead of out = */
#define MOK_SQE_OVERWRITE_WGRAD (1u << 1)  /* backward: weight gradients = instead of += */
#define MOK_SQE_ON_STREAM (1u << 2)        /* its inputs are there once its slot's doorbell says so */
#define MOK_SQE_FLAGS_KNOWN (MOK_SQE_ACCUMULATE_OUT | MOK_SQE_OVERWRITE_WGRAD | MOK_SQE_ON_STREAM)

/* One submission. The worker copies it once and validates the copy. */
struct mok_sqe {
    uint8_t opcode;         /* enum mok_opcode */
    uint8_t context_mode;   /* enum mok_context_mode, forward and backward */
    uint16_t reserved0;     /* 0 */
    uint32_t flags;         /* MOK_SQE_* */
    uint64_t user_data;     /* copied to the completion */
    uint32_t layer;         /* layer id; 0 for no-op and cancel */
    uint32_t tokens;        /* T of this rank */
    uint64_t timeout_ns;    /* from the moment all ranks joined; 0: none */
    uint64_t cancel_target; /* cancel: user_data of the operation to cancel */
    uint32_t stream_slot;   /* with MOK_SQE_ON_STREAM, else 0 */
    uint32_t stream_number; /* with MOK_SQE_ON_STREAM: what doorbell and done will hold; else 0 */
    uint64_t reserved1[2];  /* 0 */
    struct mok_region region[MOK_REGION_COUNT];
};
MOK_STATIC_ASSERT(sizeof(struct mok_sqe) == 256, "ABI");

/*
 * Where a client's CUDA stream and the worker hand an operation to each other, one slot an operation in flight, cq_entries
 * of them in a memfd of its own that client and worker map. All words are counters that only move forward (as signed
 * differences); the client may write any of them and harms nobody but itself.
 *   start     the client's stream, before doorbell: a device may wait for this word by itself. The worker writes it too,
 *             where the device waits for an operation that is not to begin there
 *   doorbell  the client's stream: the inputs of `stream_number` are there
 *   done      the worker: that operation is over, well or not; the client's library where no worker will say so
 *   passed    the client's stream: it has seen `done`; the slot can be used again
 */
struct mok_stream_slot {
    uint32_t doorbell;
    uint32_t passed;
    uint32_t start;
    uint32_t reserved0[13];
    uint32_t done;
    uint32_t reserved1[15];
};
MOK_STATIC_ASSERT(sizeof(struct mok_stream_slot) == 128, "ABI");

/* One completion. */
struct mok_cqe {
    uint64_t user_data;
    int32_t result;       /* 0 or -MOK_E* */
    uint8_t engine;       /* enum mok_device_kind that really ran */
    uint8_t precision;    /* enum mok_precision that really ran */
    uint16_t argument;    /* on error: enum mok_argument at fault */
    uint64_t rows;        /* rows this rank's experts processed */
    uint64_t dropped;     /* always 0 */
    uint64_t device_ns;   /* device time of the operation */
    uint64_t value;       /* on error: the offending value (as two's complement) */
    uint64_t bound;       /* on error: the bound it broke */
    uint64_t detail;      /* on error: MOK_EEXPERT, MOK_EMISMATCH, MOK_ETIMEDOUT, MOK_EPEER: see ABI.md */
};
MOK_STATIC_ASSERT(sizeof(struct mok_cqe) == 64, "ABI");

/* What an error code is about; the library turns it into a sentence. */
#define MOK_ARGUMENT_MAP(M)                                                                        \
    M(0, NONE, "")                                                                                 \
    M(1, OPCODE, "opcode")                                                                         \
    M(2, FLAGS, "flags")                                                                           \
    M(3, RESERVED, "reserved")                                                                     \
    M(4, LAYER, "layer")                                                                           \
    M(5, TOKENS, "tokens")                                                                         \
    M(6, CONTEXT_MODE, "context_mode")                                                             \
    M(7, TIMEOUT, "timeout_ns")                                                                    \
    M(8, TARGET, "cancel_target")                                                                  \
    M(9, STREAM, "stream_slot")                                                                    \
    M(16, X, "x")                                                                                  \
    M(17, IDS, "ids")                                                                              \
    M(18, TOPK_WEIGHT, "topk_weight")                                                              \
    M(19, OUT, "out")                                                                              \
    M(20, CONTEXT, "context")                                                                      \
    M(21, D_OUT, "d_out")                                                                          \
    M(22, D_X, "d_x")                                                                              \
    M(23, D_TOPK_WEIGHT, "d_topk_weight")                                                          \
    M(32, PARAMS, "layer parameters")                                                              \
    M(33, WGRADS, "layer weight gradients")                                                        \
    M(34, RANKS, "ranks")                                                                          \
    M(35, SQ_TAIL, "sq_tail")                                                                      \
    M(36, CQ_HEAD, "cq_head")
enum mok_argument {
#define MOK_ARGUMENT_ENUM(code, name, text) MOK_ARG_##name = code,
    MOK_ARGUMENT_MAP(MOK_ARGUMENT_ENUM)
#undef MOK_ARGUMENT_ENUM
    MOK_ARG_REGION0 = 16, /* + enum mok_region_slot */
};

/* First page of the control memfd; constant after creation except the words on lines of their own. */
struct mok_ring_header {
    uint32_t magic;
    uint32_t abi_version;
    uint32_t features;
    uint32_t header_bytes;    /* sizeof(struct mok_ring_header) */
    uint32_t sq_entries;      /* power of two */
    uint32_t cq_entries;      /* 2 * sq_entries */
    uint32_t sqe_bytes;       /* sizeof(struct mok_sqe) */
    uint32_t cqe_bytes;       /* sizeof(struct mok_cqe) */
    uint64_t control_bytes;   /* size of the control memfd */
    uint64_t submit_bytes;    /* size of the submit memfd */
    uint64_t cqe_offset;      /* of the CQ entries, in the control memfd */
    uint64_t sqe_offset;      /* of the SQ entries, in the submit memfd */
    uint32_t initial_counter; /* all four counters start here */
    uint32_t reserved;

    _Alignas(64) uint32_t sq_head;  /* worker: entries taken */
    _Alignas(64) uint32_t sq_flags; /* worker: MOK_SQ_* */
    _Alignas(64) uint32_t cq_tail;  /* worker: completions published */
    uint32_t cq_wakeups;            /* worker or mokd: the futex clients sleep on; moves at each wake-up */
    _Alignas(64) uint32_t state;    /* worker or mokd: MOK_RING_OPEN or _CLOSED */
    int32_t close_code;             /* -MOK_E*, valid once state is closed */
};
MOK_STATIC_ASSERT(offsetof(struct mok_ring_header, sq_head) == 128, "ABI");
MOK_STATIC_ASSERT(offsetof(struct mok_ring_header, sq_flags) == 192, "ABI");
MOK_STATIC_ASSERT(offsetof(struct mok_ring_header, cq_tail) == 256, "ABI");
MOK_STATIC_ASSERT(offsetof(struct mok_ring_header, state) == 320, "ABI");
MOK_STATIC_ASSERT(sizeof(struct mok_ring_header) == 384, "ABI");

/* Start of the submit memfd; every word here is the client's and may hold anything. */
struct mok_ring_submit {
    _Alignas(64) uint32_t sq_tail;     /* client: entries published */
    _Alignas(64) uint32_t cq_head;     /* client: completions consumed */
    _Alignas(64) uint32_t cq_sleepers; /* client: threads that sleep on cq_wakeups */
};
MOK_STATIC_ASSERT(sizeof(struct mok_ring_submit) == 192, "ABI");

/* In-flight table (third memfd): one entry a taken operation, cq_entries of them. */
enum mok_inflight_state {
    MOK_INFLIGHT_FREE = 0,
    MOK_INFLIGHT_TAKEN = 1,      /* owed a completion */
    MOK_INFLIGHT_COMPLETING = 2, /* its completion is at cq_index; published once cq_tail is past it */
};
struct mok_inflight_entry {
    uint32_t state;    /* enum mok_inflight_state */
    uint32_t sq_index; /* counter value of its submission */
    uint32_t cq_index; /* counter value of its completion, in COMPLETING */
    uint32_t opcode;
    uint64_t user_data;
    uint64_t reserved;
};
MOK_STATIC_ASSERT(sizeof(struct mok_inflight_entry) == 32, "ABI");

#endif
