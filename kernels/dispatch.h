/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dispatcher's state machine: one operation of one rank, from submitted to done, without ever waiting.
 *
 *   SUBMITTED -> PREPARING -> READY -(all ranks ready)-> MAIN -> PUSHED -(all ranks pushed)-> REDUCING -> DONE
 *                                  \-(some rank not well)-----> PUSHED (nothing ran) ------------------> DONE
 *
 * Ranks tell each other through struct mok_layer_flags: monotonic sequence numbers, one writer each. Within a host they
 * lie in host memory whatever the devices are, MOK_FLAGS_BYTES a rank in rank order, one such block a layer; across
 * hosts on a board in device memory (board.h). A rank publishes ready(n + 1) only after its own done(n), and done(n) only
 * after all ranks pushed(n): so info(n) and the slots stay valid for as long as anyone can look.
 * An operation that fails takes the same road, so that all ranks see the same verdict. It is reached twice: from all
 * infos once all are ready, and from all push statuses once all have pushed; the lowest rank at fault is the one told.
 *
 * Cancel. Before a rank publishes ready(n), cancelling n makes its own info unwell. Later its info is constant, so it
 * says ASKED, fences, and looks at the ready flags. Is one missing, then whoever sees all ready later also sees ASKED,
 * waits for the answer, which comes in a moment, and nobody runs: GRANTED. Are all ready, somebody may run already:
 * REFUSED, everybody runs. So a cancel is known to have worked, or not, when it returns.
 * The functions themselves are in dispatch_step.h, inline, for the host and for a CUDA device.
 */
#ifndef MOK_KERNELS_DISPATCH_H
#define MOK_KERNELS_DISPATCH_H

#include "layer.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a rank says about its operation `seq`; constant from ready(seq) until its done(seq). */
struct mok_op_info {
    uint64_t seq;
    uint32_t kind;
    uint32_t context_mode;
    uint32_t flags;
    uint32_t tokens;
    int32_t status; /* 0, or -MOK_E*: this rank is not well, nobody runs */
    uint32_t argument;
    uint64_t bad_token;
    uint64_t bad_slot;
    int64_t bad_value;
    uint32_t x_buffer, d_out_buffer; /* symmetric buffer ids; 0: none (T = 0) */
    uint64_t x_offset, d_out_offset;
};

#define MOK_FLAGS_BYTES 4096 /* of one rank */
struct mok_layer_flags {
    uint64_t ready;  /* highest sequence number whose inputs are there */
    uint8_t pad0[120];
    uint64_t pushed; /* highest sequence number whose rows have been pushed */
    int32_t push_status; /* 0, or -MOK_E*: MAIN of `pushed` failed on this rank, nobody reduces; written before it */
    uint8_t pad1[116];
    uint32_t sleeping; /* the worker of this rank sleeps: ring its doorbell after writing a flag */
    uint8_t pad2[124];
    uint64_t cancel; /* seq << 2 | enum mok_cancel_word: asked for although ready(seq) was published */
    uint8_t pad3[120];
    struct mok_op_info info;
};

enum mok_cancel_word {
    MOK_CANCEL_ASKED = 1,
    MOK_CANCEL_GRANTED = 2,
    MOK_CANCEL_REFUSED = 3,
};

enum mok_op_state {
    MOK_ST_SUBMITTED = 0,
    MOK_ST_PREPARING,
    MOK_ST_READY,
    MOK_ST_MAIN,
    MOK_ST_PUSHED,
    MOK_ST_REDUCING,
    MOK_ST_DONE,
};

/* What the caller has to do next. */
enum mok_dispatch_action {
    MOK_ACT_WAIT = 0,  /* nothing: look again when a flag moved */
    MOK_ACT_PREPARE,   /* start MOK_PHASE_PREPARE, then report with mok_dispatch_phase_done */
    MOK_ACT_MAIN,      /* fill in the peers from their infos, start MOK_PHASE_MAIN, then report */
    MOK_ACT_REDUCE,    /* start MOK_PHASE_REDUCE, then report */
    MOK_ACT_COMPLETE,  /* result is final */
};

struct mok_dispatch_op {
    enum mok_op_state state;
    bool published;               /* of READY and PUSHED: this rank's flag has been moved */
    bool whole;                   /* in MAIN: MOK_PHASE_WHOLE runs */
    uint64_t seq;
    struct mok_op_info info;      /* this rank's, published at READY */
    struct mok_op_result result;  /* final in DONE */
    uint32_t fault_rank;          /* rank whose status made the operation fail */
    uint64_t all_ready_ns;        /* when all ranks were seen ready; 0: not yet */
};

/* One layer's flags as one rank sees them. `own` and `settle`: NULL where the flags are memory that all have in common. */
struct mok_dispatch_view {
    uint32_t ep, rank;
    struct mok_layer_flags *flags[MOK_MAX_EP];
    struct mok_layer_flags *own; /* where this rank writes; NULL: flags[rank] */
    /* Brings what was written to the others, then what they have written by that time here. A negative code: it cannot. */
    int (*settle)(void *cookie);
    void *cookie;
};

/* Readies `op` to run as number `seq` (1, 2, ...: the layer's count of operations). */
void mok_dispatch_begin(struct mok_dispatch_op *op, uint64_t seq, const struct mok_op_info *info);

/* Advances as far as flags allow; `now_ns` is any monotonic clock. Sets *ret_flags_moved when peers should be woken. */
enum mok_dispatch_action mok_dispatch_step(struct mok_dispatch_op *op, const struct mok_dispatch_view *view,
                                           uint64_t now_ns, bool *ret_flags_moved);

/*
 * In the place of the PREPARE that the last step asked for, where the group has one rank: moves on to MAIN, ready
 * for MOK_PHASE_WHOLE, whose outcome ends the operation. It can no longer be cancelled.
 */
void mok_dispatch_whole(struct mok_dispatch_op *op, const struct mok_dispatch_view *view, uint64_t now_ns);

/* Takes the outcome of the phase that the last action asked for; the next step goes on from there. */
void mok_dispatch_phase_done(struct mok_dispatch_op *op, const struct mok_op_result *result);

/*
 * Makes the operation fail on all ranks: with `code` while this rank has not published ready, with -MOK_ECANCELED when
 * it has. 0: no rank will run it, so nobody touches the caller's memory for it any more; go on stepping all the same,
 * until the missing ranks have joined and learnt it. -MOK_EBUSY: all ranks are ready, it completes by itself. Peers are
 * to be woken either way.
 */
int mok_dispatch_cancel(struct mok_dispatch_op *op, const struct mok_dispatch_view *view, int code);

/* Ranks that are not ready (before MAIN) or have not pushed (after): bit r % 64 of ret_mask[r / 64]. Returns the count. */
uint32_t mok_dispatch_missing(const struct mok_dispatch_op *op, const struct mok_dispatch_view *view,
                              uint64_t ret_mask[MOK_MAX_EP / 64]);

#ifdef __cplusplus
}
#endif
#endif
