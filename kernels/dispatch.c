/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dispatcher's state machine as ordinary functions, for the workers' CPU threads. The steps are in dispatch_step.h.
 */
#include "dispatch_step.h"

_Static_assert(sizeof(struct mok_layer_flags) <= MOK_FLAGS_BYTES, "flags outgrow their page");
_Static_assert(offsetof(struct mok_layer_flags, pushed) == 128, "one hot word a cache line pair");
_Static_assert(offsetof(struct mok_layer_flags, sleeping) == 256, "one hot word a cache line pair");
_Static_assert(offsetof(struct mok_layer_flags, cancel) == 384, "one hot word a cache line pair");

void mok_dispatch_begin(struct mok_dispatch_op *op, uint64_t seq, const struct mok_op_info *info)
{
    mok_dispatch_begin_inline(op, seq, info);
}

enum mok_dispatch_action mok_dispatch_step(struct mok_dispatch_op *op, const struct mok_dispatch_view *view,
                                           uint64_t now_ns, bool *ret_flags_moved)
{
    return mok_dispatch_step_inline(op, view, now_ns, ret_flags_moved);
}

void mok_dispatch_whole(struct mok_dispatch_op *op, const struct mok_dispatch_view *view, uint64_t now_ns)
{
    mok_dispatch_whole_inline(op, view, now_ns);
}

void mok_dispatch_phase_done(struct mok_dispatch_op *op, const struct mok_op_result *result)
{
    mok_dispatch_phase_done_inline(op, result);
}

int mok_dispatch_cancel(struct mok_dispatch_op *op, const struct mok_dispatch_view *view, int code)
{
    return mok_dispatch_cancel_inline(op, view, code);
}

uint32_t mok_dispatch_missing(const struct mok_dispatch_op *op, const struct mok_dispatch_view *view,
                              uint64_t ret_mask[MOK_MAX_EP / 64])
{
    return mok_dispatch_missing_inline(op, view, ret_mask);
}
