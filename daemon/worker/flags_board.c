/* SPDX-License-Identifier: Apache-2.0 */
/* See flags_board.h. */
#include "flags_board.h"

#include <time.h>

#include "util.h"

/* A look is a moment of a copy engine; of a device that others use in turns, a few milliseconds. */
#define SETTLE_NS 200000000u
#define SETTLE_NAP_NS 2000u
/* Ranks that are late are looked for at leisure. */
#define NAP_NS 50000u
#define LATE_NS 100000000u
#define LATE_NAP_NS 500000u

static int settle(void *cookie)
{
    return board_settle(cookie);
}

void board_begin(struct worker_board *board, const struct mok_engine_ops *ops, struct worker_layer *layer)
{
    board->ops = ops;
    mok_board_begin(&board->state, layer->group->size, layer->group->rank, &layer->view);
    layer->view.settle = settle;
    layer->view.cookie = layer;
}

void board_moved(struct worker_board *board)
{
    struct mok_board_slot slot;

    mok_board_post(&board->state, &slot);
    int r = board->ops->board_post(board->engine, board->state.rank, &slot);
    if (r < 0)
        board->lost = r; /* who looks next tells */
}

static int begin(struct worker_board *board)
{
    int r = board->ops->board_look(board->engine);

    board->looking = r == 0;
    board->lost = r < 0 ? r : board->lost;
    return r;
}

/* 1: a look was taken over; 0: none has ended, or it was not whole. */
static int take(struct worker_board *board, bool *ret_moved)
{
    const struct mok_board_slot *first, *second;

    int r = board->looking ? board->ops->board_poll(board->engine, &first, &second) : 0;
    board->looking &= r == 0;
    board->lost = r < 0 ? r : board->lost;
    return r == 1 ? mok_board_take(&board->state, first, second, ret_moved) : r;
}

/* The operation whose turn it is has done its part and needs the others. */
static bool waits(const struct worker_layer *layer)
{
    const struct worker_op *op = layer->first;

    if (layer->draining)
        return true;
    return op && op->begun && !op->dying_code && op->dispatch.published &&
           (op->dispatch.state == MOK_ST_READY || op->dispatch.state == MOK_ST_PUSHED);
}

int board_look(struct worker_layer *layer, uint64_t now_ns)
{
    struct worker_board *board = layer->board;
    bool moved = false;

    if (board->lost)
        return board->lost;
    int r = take(board, &moved);
    if (!waits(layer)) {
        board->waiting_since_ns = 0;
    } else {
        if (moved || !board->waiting_since_ns)
            board->waiting_since_ns = now_ns;
        if (r >= 0 && !board->looking)
            r = begin(board);
    }
    return r < 0 ? r : moved;
}

int board_settle(struct worker_layer *layer)
{
    const struct timespec nap = { .tv_nsec = SETTLE_NAP_NS };
    struct worker_board *board = layer->board;
    uint64_t end_ns = mok_now_ns() + SETTLE_NS;
    bool moved, fresh = false; /* the look under way began after we came */

    board_moved(board);
    for (;;) {
        if (board->lost)
            return board->lost;
        int r = take(board, &moved);
        if (r < 0 || (r == 1 && fresh))
            return r < 0 ? r : 0;
        if (!board->looking) {
            fresh = true;
            r = begin(board);
            if (r < 0)
                return r;
        }
        if (mok_now_ns() > end_ns)
            return -MOK_ETIMEDOUT;
        nanosleep(&nap, NULL);
    }
}

uint64_t board_nap_ns(const struct worker_layer *layer, uint64_t now_ns)
{
    const struct worker_board *board = layer->board;

    if (!board || !waits(layer))
        return UINT64_MAX;
    return board->waiting_since_ns && now_ns - board->waiting_since_ns > LATE_NS ? LATE_NAP_NS : NAP_NS;
}
