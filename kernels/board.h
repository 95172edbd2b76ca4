/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The flags of a layer (dispatch.h) whose ranks are on several hosts, which have no host memory in common. They lie on
 * one board in device memory of rank 0, a slot a rank, which every rank's worker reaches through the fabric by copies
 * in the order of one stream (mok_engine_ops.board_*); no kernel and no host mapping takes part. The state machine is
 * the same: it writes into `own`, and sees in `seen` what a look has brought.
 *
 *   post   a rank's own slot is copied there, whole
 *   look   all slots are copied here, twice: the second reading begins when the first has ended
 *
 * What makes this as good as common memory:
 * - There is one copy of each slot, so all ranks see its changes in one order. A rank sees itself ready or pushed no
 *   earlier than the others can: `seen` of its own slot is read back as well.
 * - A slot carries its number and a check over all of it. A look that meets a slot while that is being written, or in
 *   which our own latest post is not there yet, is thrown away. So nothing hangs on the order in which the bytes of a
 *   copy arrive.
 * - `cancel` comes from the second reading, all else from the first: who sees all ranks ready has looked at `cancel`
 *   after that, as the fence does in common memory. Who asks waits for a look that began after its word was there
 *   (`settle`).
 *
 * Nobody is woken: who waits looks again. Pure: knows of no device.
 */
#ifndef MOK_KERNELS_BOARD_H
#define MOK_KERNELS_BOARD_H

#include "dispatch.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Of one rank, in rank order; all zero: nothing has been posted. */
struct mok_board_slot {
    uint64_t number;                /* of the post: 1, 2, ... */
    uint64_t ready, pushed, cancel; /* as in struct mok_layer_flags */
    int32_t push_status;
    uint32_t zero;
    struct mok_op_info info;
    uint64_t check;
};

struct mok_board {
    uint32_t ep, rank;
    uint64_t posted; /* number of our latest post */
    uint64_t taken[MOK_MAX_EP];
    struct mok_layer_flags own;
    struct mok_layer_flags seen[MOK_MAX_EP];
};

static inline uint64_t mok_board_bytes(uint32_t ep)
{
    return ep * sizeof(struct mok_board_slot);
}

/* `board` is zeroed memory; the view's flags are the board's from then on, its `settle` is left to the caller. */
void mok_board_begin(struct mok_board *board, uint32_t ep, uint32_t rank, struct mok_dispatch_view *ret_view);
/* What is to be posted now that `own` has moved. */
void mok_board_post(struct mok_board *board, struct mok_board_slot *ret);
/* Takes both readings of a look over into `seen`; false: look again. *ret_moved: something is new. */
bool mok_board_take(struct mok_board *board, const struct mok_board_slot *first, const struct mok_board_slot *second,
                    bool *ret_moved);

#ifdef __cplusplus
}
#endif
#endif
