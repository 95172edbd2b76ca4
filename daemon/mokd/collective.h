/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Collective calls of a group: the n-th call of each rank belongs together. When all have come they must say the same;
 * then the operation runs, else all get MOK_EMISMATCH. When one gives up waiting, all do, and those who come later are
 * told the same, so that the ranks' counts stay in step.
 */
#ifndef MOKD_COLLECTIVE_H
#define MOKD_COLLECTIVE_H

#include "group.h"
#include "layer.h"

enum mokd_collective_kind { MOKD_COLLECTIVE_ALLOC = 1, MOKD_COLLECTIVE_LAYER = 2 };

struct mokd_collective_params {
    enum mokd_collective_kind kind;
    uint64_t bytes;             /* ALLOC */
    struct mok_layer_spec spec; /* LAYER; ep and rank filled in */
};

/* The next call of a rank. Answered once all have come, or with why not. timeout_ms 0: waits for ever. */
void mokd_collective_call(struct mokd_member *member, uint64_t id, const struct mokd_collective_params *params,
                          uint64_t timeout_ms);

/* The group has failed: ends the calls that wait. */
void mokd_collectives_abort(struct mokd_group *group);

/* "1, 3 and 5": ranks of the group for which `is_missing` says so. Returns `buffer`. */
const char *mokd_missing_ranks(uint32_t size, bool (*is_missing)(const void *cookie, uint32_t rank), const void *cookie,
                               char *buffer, size_t length);

#endif
