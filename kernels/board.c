/* SPDX-License-Identifier: Apache-2.0 */
/* See board.h. */
#include "board.h"

#include <stddef.h>
#include <string.h>

_Static_assert(sizeof(struct mok_board_slot) == 128, "a slot is one pair of cache lines");
_Static_assert(offsetof(struct mok_board_slot, check) == 120, "no hole that the check does not see");

/* Of everything before it; never 0, so that a slot of zeros is none. */
static uint64_t check_of(const struct mok_board_slot *slot)
{
    uint64_t word[offsetof(struct mok_board_slot, check) / sizeof(uint64_t)];
    uint64_t hash = UINT64_C(0x9e3779b97f4a7c15);

    memcpy(word, slot, sizeof(word));
    for (size_t i = 0; i < sizeof(word) / sizeof(word[0]); i++) {
        hash = (hash ^ word[i]) * UINT64_C(0xff51afd7ed558ccd);
        hash ^= hash >> 32;
    }
    return hash ? hash : 1;
}

/* Whole, or never written. */
static bool is_sound(const struct mok_board_slot *slot)
{
    static const struct mok_board_slot none;

    return slot->number ? slot->check == check_of(slot) : memcmp(slot, &none, sizeof(none)) == 0;
}

void mok_board_begin(struct mok_board *board, uint32_t ep, uint32_t rank, struct mok_dispatch_view *ret_view)
{
    board->ep = ep;
    board->rank = rank;
    ret_view->ep = ep;
    ret_view->rank = rank;
    ret_view->own = &board->own;
    for (uint32_t r = 0; r < ep; r++)
        ret_view->flags[r] = &board->seen[r];
}

void mok_board_post(struct mok_board *board, struct mok_board_slot *ret)
{
    const struct mok_layer_flags *own = &board->own;

    *ret = (struct mok_board_slot){
        .number = ++board->posted,
        .ready = own->ready,
        .pushed = own->pushed,
        .cancel = own->cancel,
        .push_status = own->push_status,
        .info = own->info,
    };
    ret->check = check_of(ret);
}

bool mok_board_take(struct mok_board *board, const struct mok_board_slot *first, const struct mok_board_slot *second,
                    bool *ret_moved)
{
    bool moved = false;

    for (uint32_t r = 0; r < board->ep; r++)
        if (!is_sound(&first[r]) || !is_sound(&second[r]) || first[r].number < board->taken[r] ||
            second[r].number < first[r].number)
            return false;
    if (first[board->rank].number != board->posted)
        return false;
    for (uint32_t r = 0; r < board->ep; r++) {
        struct mok_layer_flags *seen = &board->seen[r];

        moved |= second[r].number != board->taken[r];
        seen->info = first[r].info;
        seen->push_status = first[r].push_status;
        seen->ready = first[r].ready;
        seen->pushed = first[r].pushed;
        seen->cancel = second[r].cancel;
        board->taken[r] = first[r].number;
    }
    *ret_moved = moved;
    return true;
}
