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
#include "rack/group_agree.h"

/* The next call of a rank. Answered once all have come, or with why not. timeout_ms 0: waits for ever. */
void mokd_collective_call(struct mokd_member *member, uint64_t id, const struct group_params *params,
                          uint64_t timeout_ms);

/* The lead of a group with ranks on other nodes says (index: 1, 2, ...): all ranks agree, make `object`. */
void mokd_collective_prepare(struct mokd_group *group, uint64_t index, uint32_t object);
/* Or that they do not. False: it is under way here. */
bool mokd_collective_refuse(struct mokd_group *group, uint64_t index, const struct mokd_error *error);

/* The group has failed: ends the calls that wait. */
void mokd_collectives_abort(struct mokd_group *group);

#endif
