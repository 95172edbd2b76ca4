/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles of other nodes that are here before the group that they are for: between two daemons' words there is no
 * order.
 */
#ifndef MOKD_RACK_EARLY_H
#define MOKD_RACK_EARLY_H

#include "group.h"
#include "span.h"

struct mokd_early;

struct mokd_early_list {
    TAILQ_HEAD(, mokd_early) list;
    size_t count;
};

void mokd_early_init(struct mokd_early_list *early);
/* Takes the descriptor over, also where there are too many already. */
void mokd_early_keep(struct mokd_early_list *early, uint32_t node, uint32_t group, const struct mokd_foreign *what);
/* The group is there: hands it what has come for it from the right nodes. */
void mokd_early_adopt(struct mokd_early_list *early, struct mokd_group *group);
/* Those of a node, and all that came before a time. */
void mokd_early_forget(struct mokd_early_list *early, uint64_t before_ms, uint32_t node);
/* Those whose group does not come any more. */
void mokd_early_expire(struct mokd_early_list *early, uint64_t now_ms);

#endif
