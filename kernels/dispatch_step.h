/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps of the dispatcher's state machine (dispatch.h has the drawing and the rules), inline for the host and for a
 * CUDA device. Never waits: every step looks at flags once and says what to do next.
 */
#ifndef MOK_KERNELS_DISPATCH_STEP_H
#define MOK_KERNELS_DISPATCH_STEP_H

#include "dispatch.h"
#include "flags.h"
#include "mok/ring_abi.h"

MOK_HD void mok_dispatch_begin_inline(struct mok_dispatch_op *op, uint64_t seq, const struct mok_op_info *info)
{
    struct mok_op_result none = { 0 };

    op->state = MOK_ST_SUBMITTED;
    op->published = false;
    op->whole = false;
    op->seq = seq;
    op->info = *info;
    op->info.seq = seq;
    op->result = none;
    op->fault_rank = 0;
    op->all_ready_ns = 0;
}

/* Copies what a rank says about its fault into the result that every rank reports. */
MOK_HD void mok_dispatch_fail(struct mok_dispatch_op *op, uint32_t rank, const struct mok_op_info *info)
{
    op->fault_rank = rank;
    op->result.status = info->status;
    op->result.argument = info->argument;
    op->result.bad_token = info->bad_token;
    op->result.bad_slot = info->bad_slot;
    op->result.bad_value = info->bad_value;
}

MOK_HD void mok_dispatch_mismatch(struct mok_dispatch_op *op, uint32_t rank, uint32_t argument, uint32_t value)
{
    op->fault_rank = rank;
    op->result.status = -MOK_EMISMATCH;
    op->result.argument = argument;
    op->result.bad_value = value;
}

MOK_HD struct mok_layer_flags *mok_dispatch_own(const struct mok_dispatch_view *view)
{
    return view->own ? view->own : view->flags[view->rank];
}

MOK_HD bool mok_dispatch_cancel_is(const struct mok_dispatch_op *op, const struct mok_layer_flags *flags,
                                   enum mok_cancel_word word)
{
    return mok_flag_load(&flags->cancel) == (op->seq << 2 | (uint64_t)word);
}

/* A rank that asks has its answer in a moment; all do as it says. */
MOK_HD bool mok_dispatch_cancel_pending(const struct mok_dispatch_op *op, const struct mok_dispatch_view *view)
{
    uint32_t r;

    for (r = 0; r < view->ep; r++)
        if (mok_dispatch_cancel_is(op, view->flags[r], MOK_CANCEL_ASKED))
            return true;
    return false;
}

/* All infos are there and constant: the same verdict on every rank. */
MOK_HD void mok_dispatch_verdict(struct mok_dispatch_op *op, const struct mok_dispatch_view *view)
{
    const struct mok_op_info *first = &view->flags[0]->info;
    uint32_t r;

    for (r = 0; r < view->ep; r++)
        if (mok_dispatch_cancel_is(op, view->flags[r], MOK_CANCEL_GRANTED)) {
            op->fault_rank = r;
            op->result.status = -MOK_ECANCELED;
            op->result.argument = MOK_ARG_RANKS;
            op->result.bad_value = r;
            return;
        }
    for (r = 0; r < view->ep; r++)
        if (view->flags[r]->info.status < 0) {
            mok_dispatch_fail(op, r, &view->flags[r]->info);
            return;
        }
    for (r = 0; r < view->ep; r++) {
        const struct mok_op_info *info = &view->flags[r]->info;

        if (info->seq != op->seq) {
            op->fault_rank = r;
            op->result.status = -MOK_EINTERNAL;
            op->result.argument = MOK_ARG_RANKS;
            op->result.bad_value = (int64_t)info->seq;
            return;
        }
        if (info->kind != first->kind) {
            mok_dispatch_mismatch(op, r, MOK_ARG_OPCODE, info->kind);
            return;
        }
        if (info->context_mode != first->context_mode) {
            mok_dispatch_mismatch(op, r, MOK_ARG_CONTEXT_MODE, info->context_mode);
            return;
        }
        if (info->flags != first->flags) {
            mok_dispatch_mismatch(op, r, MOK_ARG_FLAGS, info->flags);
            return;
        }
    }
}

/* Ranks whose ready (before MAIN) or pushed (after) flag is short of this operation; ret_mask may be NULL. */
MOK_HD uint32_t mok_dispatch_missing_inline(const struct mok_dispatch_op *op, const struct mok_dispatch_view *view,
                                            uint64_t *ret_mask)
{
    uint32_t missing = 0, r;

    if (ret_mask)
        for (r = 0; r < MOK_MAX_EP / 64; r++)
            ret_mask[r] = 0;
    if (op->state == MOK_ST_DONE)
        return 0;
    for (r = 0; r < view->ep; r++) {
        const struct mok_layer_flags *flags = view->flags[r];
        uint64_t reached = mok_flag_load(op->state < MOK_ST_MAIN ? &flags->ready : &flags->pushed);

        if (reached >= op->seq)
            continue;
        missing++;
        if (ret_mask)
            ret_mask[r / 64] |= (uint64_t)1 << (r % 64);
    }
    return missing;
}

MOK_HD void mok_dispatch_publish_ready(struct mok_dispatch_op *op, const struct mok_dispatch_view *view)
{
    struct mok_layer_flags *own = mok_dispatch_own(view);

    own->info = op->info;
    mok_flag_store(&own->ready, op->seq);
    op->published = true;
}

MOK_HD void mok_dispatch_publish_pushed(struct mok_dispatch_op *op, const struct mok_dispatch_view *view, int32_t status)
{
    struct mok_layer_flags *own = mok_dispatch_own(view);

    own->push_status = status;
    mok_flag_store(&own->pushed, op->seq);
    op->published = true;
}

/* All ranks have pushed: what failed in some rank's MAIN fails here too. After a bad verdict nobody's MAIN ran. */
MOK_HD void mok_dispatch_push_verdict(struct mok_dispatch_op *op, const struct mok_dispatch_view *view)
{
    uint32_t r;

    for (r = 0; r < view->ep; r++)
        if (view->flags[r]->push_status < 0) {
            if (r != view->rank) {
                op->result.argument = 0;
                op->result.bad_token = op->result.bad_slot = 0;
                op->result.bad_value = 0;
            }
            op->fault_rank = r;
            op->result.status = view->flags[r]->push_status;
            return;
        }
}

MOK_HD enum mok_dispatch_action mok_dispatch_step_inline(struct mok_dispatch_op *op,
                                                         const struct mok_dispatch_view *view, uint64_t now_ns,
                                                         bool *ret_flags_moved)
{
    int32_t push_status = op->result.status;

    *ret_flags_moved = false;
    switch (op->state) {
    case MOK_ST_SUBMITTED:
        if (op->info.status >= 0) {
            op->state = MOK_ST_PREPARING;
            return MOK_ACT_PREPARE;
        }
        op->state = MOK_ST_READY;
        op->published = false;
        break;
    case MOK_ST_PREPARING:
    case MOK_ST_MAIN:
    case MOK_ST_REDUCING:
        return MOK_ACT_WAIT;
    case MOK_ST_DONE:
        return MOK_ACT_COMPLETE;
    case MOK_ST_READY:
    case MOK_ST_PUSHED:
        break;
    }

    if (op->state == MOK_ST_READY) {
        if (!op->published) {
            mok_dispatch_publish_ready(op, view);
            *ret_flags_moved = true;
        }
        if (mok_dispatch_missing_inline(op, view, NULL) > 0)
            return MOK_ACT_WAIT;
        mok_flag_fence(); /* between all ready flags and the first look at `cancel` */
        if (mok_dispatch_cancel_pending(op, view))
            return MOK_ACT_WAIT;
        op->all_ready_ns = now_ns ? now_ns : 1;
        mok_dispatch_verdict(op, view);
        op->published = false;
        if (op->result.status >= 0) {
            op->state = MOK_ST_MAIN;
            return MOK_ACT_MAIN;
        }
        op->state = MOK_ST_PUSHED;
        push_status = 0; /* the verdict is everybody's already */
    }

    if (!op->published) {
        mok_dispatch_publish_pushed(op, view, push_status);
        *ret_flags_moved = true;
    }
    if (mok_dispatch_missing_inline(op, view, NULL) > 0)
        return MOK_ACT_WAIT;
    mok_dispatch_push_verdict(op, view);
    if (op->result.status < 0) {
        op->state = MOK_ST_DONE;
        return MOK_ACT_COMPLETE;
    }
    op->state = MOK_ST_REDUCING;
    return MOK_ACT_REDUCE;
}

MOK_HD void mok_dispatch_whole_inline(struct mok_dispatch_op *op, const struct mok_dispatch_view *view, uint64_t now_ns)
{
    mok_dispatch_publish_ready(op, view);
    op->all_ready_ns = now_ns ? now_ns : 1;
    op->state = MOK_ST_MAIN;
    op->whole = true;
}

MOK_HD void mok_dispatch_phase_done_inline(struct mok_dispatch_op *op, const struct mok_op_result *result)
{
    op->result.device_ns += result->device_ns;
    op->result.schedule_ns += result->schedule_ns;
    op->result.transfer_ns += result->transfer_ns;
    op->result.compute_ns += result->compute_ns;
    switch (op->state) {
    case MOK_ST_PREPARING:
        if (op->info.status >= 0 && result->status < 0) {
            op->info.status = result->status;
            op->info.argument = result->argument;
            op->info.bad_token = result->bad_token;
            op->info.bad_slot = result->bad_slot;
            op->info.bad_value = result->bad_value;
        }
        op->state = MOK_ST_READY;
        op->published = false;
        return;
    case MOK_ST_MAIN:
        op->result.rows = result->status < 0 ? 0 : result->rows;
        op->state = op->whole ? MOK_ST_DONE : MOK_ST_PUSHED;
        op->published = false;
        break;
    case MOK_ST_REDUCING:
        op->state = MOK_ST_DONE;
        break;
    default:
        return;
    }
    if (result->status < 0) {
        op->result.status = result->status;
        op->result.argument = result->argument;
        op->result.bad_token = result->bad_token;
        op->result.bad_slot = result->bad_slot;
        op->result.bad_value = result->bad_value;
    }
}

/* After ready: see dispatch.h. An answer is final. */
MOK_HD int mok_dispatch_ask_cancel(struct mok_dispatch_op *op, const struct mok_dispatch_view *view)
{
    struct mok_layer_flags *own = mok_dispatch_own(view);
    uint64_t *word = &own->cancel;

    if (mok_dispatch_cancel_is(op, own, MOK_CANCEL_GRANTED))
        return 0;
    if (mok_dispatch_cancel_is(op, own, MOK_CANCEL_REFUSED))
        return -MOK_EBUSY;
    mok_flag_store(word, op->seq << 2 | MOK_CANCEL_ASKED);
    mok_flag_fence();
    /* What cannot be known is not granted. */
    if ((view->settle && view->settle(view->cookie) < 0) || mok_dispatch_missing_inline(op, view, NULL) == 0) {
        mok_flag_store(word, op->seq << 2 | MOK_CANCEL_REFUSED);
        return -MOK_EBUSY;
    }
    mok_flag_store(word, op->seq << 2 | MOK_CANCEL_GRANTED);
    return 0;
}

MOK_HD int mok_dispatch_cancel_inline(struct mok_dispatch_op *op, const struct mok_dispatch_view *view, int code)
{
    if (op->state > MOK_ST_READY)
        return -MOK_EBUSY;
    if (op->state == MOK_ST_READY && op->published)
        return mok_dispatch_ask_cancel(op, view);
    if (op->info.status >= 0) {
        op->info.status = code;
        op->info.argument = 0;
        op->info.bad_token = op->info.bad_slot = 0;
        op->info.bad_value = 0;
    }
    return 0;
}

#endif
