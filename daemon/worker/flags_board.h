/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layers whose flags lie on a board (kernels/board.h), at work: what moved is posted; while an operation waits for
 * other ranks, the board is looked at. The dispatcher thread's alone, but for board_begin.
 */
#ifndef MOK_WORKER_FLAGS_BOARD_H
#define MOK_WORKER_FLAGS_BOARD_H

#include "tables.h"

/* `board` is zeroed; the layer's view is of it from then on. */
void board_begin(struct worker_board *board, const struct mok_engine_ops *ops, struct worker_layer *layer);
/* Own flags have moved. */
void board_moved(struct worker_board *board);
/* Takes a look that has ended, and begins the next if one is needed. 1: something is new; 0; or -MOK_E*: the board is
 * lost. */
int board_look(struct worker_layer *layer, uint64_t now_ns);
/*
 * Waits, for a moment, until what was posted is there and what the others had posted by then is here. -MOK_ETIMEDOUT,
 * or -MOK_E*: the board is lost.
 */
int board_settle(struct worker_layer *layer);
/* How long until it has to be looked at again; UINT64_MAX: nothing is waited for. */
uint64_t board_nap_ns(const struct worker_layer *layer, uint64_t now_ns);

#endif
