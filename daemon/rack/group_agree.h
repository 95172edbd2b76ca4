/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rules by which the ranks of a group agree on a collective call, the same whether they are on one node or many.
 * Pure: no clock, no memory, no input or output.
 */
#ifndef MOK_RACK_GROUP_AGREE_H
#define MOK_RACK_GROUP_AGREE_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/layer.h"
#include "util.h"

#define GROUP_TEXT_MAX 448 /* bytes of a sentence, with its terminator */

/* Why something does not happen, and because of which rank. */
struct group_error {
    int code; /* -MOK_E*; 0: none */
    uint32_t rank;
    char text[GROUP_TEXT_MAX];
};
int group_error_set(struct group_error *error, int code, uint32_t rank, const char *format, ...) _printf_(4, 5);

enum group_kind { GROUP_OPEN = 1, GROUP_ALLOC = 2, GROUP_LAYER = 3 };

/* What peers find each other's rows by: from a rank's plan. */
struct group_map {
    uint32_t kind; /* enum mok_device_kind */
    uint64_t symmetric_bytes, sym_ids, sym_topk_weight, sym_slots, sym_weight_slots;
};

/* One rank's collective call. */
struct group_params {
    uint32_t kind;              /* ALLOC or LAYER */
    uint64_t bytes;             /* ALLOC */
    struct mok_layer_spec spec; /* LAYER; ep and rank filled in */
    struct group_map map;       /* LAYER */
};
void group_map_of(const struct mok_plan *plan, struct group_map *ret);

/* The ranks' calls as the caller keeps them. `node` may be NULL: all are on one node, and none is named. */
struct group_calls {
    uint32_t size;
    const struct group_params *(*params)(const void *cookie, uint32_t rank);
    const char *(*node)(const void *cookie, uint32_t rank);
    const void *cookie;
};

/* All ranks' calls say the same: 0, or -MOK_EMISMATCH with a sentence that names ranks and field. */
int group_agree(const struct group_calls *calls, struct group_error *error);

/* "1, 3, 5": the ranks for which `is_missing` says so. Returns `buffer`. */
const char *group_missing(uint32_t size, bool (*is_missing)(const void *cookie, uint32_t rank), const void *cookie,
                          char *buffer, size_t length);

#endif
