/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The schedule: one table a rank, which says for every row where it comes from and goes to, and serves all four
 * transfers. Built only from the ranks' symmetric copies of the routing, in O(T * K * EP + E_l * EP) work.
 *
 * The rows of a local expert e are stored in canonical order: by source rank, then token, then k. Their segment starts
 * at first[e], a multiple of the tile; the rows from source s start at start[e * ep + s]. All of a rank's segments
 * lie one behind the other in *padded rows*; macrobatch m is the padded rows [m * ring_rows, (m + 1) * ring_rows), and
 * padded row p is row p % ring_rows of the ring. Tiles never cross experts or macrobatches.
 */
#ifndef MOK_KERNELS_SCHEDULE_H
#define MOK_KERNELS_SCHEDULE_H

#include "hd.h"

/* Where padded row p comes from and goes to. Rows of padding have no entry. */
struct mok_row {
    uint32_t rank; /* source */
    uint32_t slot; /* token * K + k of the source; below 2^30 */
};

struct mok_schedule {
    uint32_t ep, local_experts, tile_rows;
    uint32_t live_experts; /* local experts with a row */
    uint64_t rows;         /* without padding */
    uint64_t padded_rows;
    uint64_t *count;       /* [ep][E_l] rows from a source; while filling: the source's next padded row */
    uint64_t *start;       /* [E_l][ep] */
    uint64_t *first;       /* [E_l + 1] */
    uint64_t *expert_rows; /* [E_l] without padding */
    uint32_t *live;        /* [live_experts] ascending */
    struct mok_row *row;   /* [padded_rows] */
};

/* Padded rows that a rank can get at worst: every slot of every rank, each live expert's segment ending in a tile. */
MOK_HD uint64_t mok_schedule_rows_at_worst(uint64_t max_rows, uint32_t local_experts, uint32_t tile_rows)
{
    return mok_round_up(max_rows + mok_min_u64(local_experts, max_rows) * (tile_rows - 1), tile_rows);
}

/* Counts the slots of one source that reach each of the experts [first_expert, first_expert + local_experts). */
MOK_HD void mok_schedule_count(const int32_t *ids, uint64_t slots, uint32_t first_expert, uint32_t local_experts,
                               uint64_t *ret_count)
{
    uint64_t i;
    uint32_t e;

    for (e = 0; e < local_experts; e++)
        ret_count[e] = 0;
    for (i = 0; i < slots; i++) {
        uint32_t local = (uint32_t)ids[i] - first_expert; /* -1 wraps far out of range */

        if (local < local_experts)
            ret_count[local]++;
    }
}

/* From all sources' counts to the segments; turns count into cursors for mok_schedule_fill. */
MOK_HD void mok_schedule_scan(struct mok_schedule *schedule)
{
    uint32_t ep = schedule->ep, experts = schedule->local_experts, e, s;
    uint64_t at = 0, rows = 0;

    schedule->live_experts = 0;
    for (e = 0; e < experts; e++) {
        uint64_t next = at;

        schedule->first[e] = at;
        for (s = 0; s < ep; s++) {
            uint64_t *count = &schedule->count[(uint64_t)s * experts + e];

            schedule->start[(uint64_t)e * ep + s] = next;
            next += *count;
            *count = schedule->start[(uint64_t)e * ep + s];
        }
        schedule->expert_rows[e] = next - at;
        if (next > at)
            schedule->live[schedule->live_experts++] = e;
        rows += next - at;
        at = mok_round_up(next, schedule->tile_rows);
    }
    schedule->first[experts] = at;
    schedule->rows = rows;
    schedule->padded_rows = at;
}

/* Writes the table entries of one source's rows; sources are independent of each other. */
MOK_HD void mok_schedule_fill(struct mok_schedule *schedule, uint32_t source, const int32_t *ids, uint64_t slots,
                              uint32_t first_expert)
{
    uint64_t *cursor = &schedule->count[(uint64_t)source * schedule->local_experts], i;

    for (i = 0; i < slots; i++) {
        uint32_t local = (uint32_t)ids[i] - first_expert;

        if (local < schedule->local_experts) {
            struct mok_row row = { source, (uint32_t)i };

            schedule->row[cursor[local]++] = row;
        }
    }
}

/* First padded row after the rows of (expert, source). */
MOK_HD uint64_t mok_schedule_end(const struct mok_schedule *schedule, uint32_t expert, uint32_t source)
{
    if (source + 1 < schedule->ep)
        return schedule->start[(uint64_t)expert * schedule->ep + source + 1];
    return schedule->first[expert] + schedule->expert_rows[expert];
}

/* Index in live[] of the first live expert whose segment ends after padded row p; live_experts if there is none. */
MOK_HD uint32_t mok_schedule_find(const struct mok_schedule *schedule, uint64_t p)
{
    uint32_t low = 0, high = schedule->live_experts;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if (schedule->first[schedule->live[middle] + 1] <= p)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

MOK_HD uint64_t mok_schedule_macrobatches(const struct mok_schedule *schedule, uint64_t ring_rows)
{
    return mok_div_up(schedule->padded_rows, ring_rows);
}

/* The source that a rank visits q-th: itself, then its right neighbours in turn. */
MOK_HD uint32_t mok_schedule_peer(uint32_t rank, uint32_t ep, uint32_t q)
{
    return (rank + q) % ep;
}

#endif
