/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much of the log one user can fill: a burst of lines that his doing causes, then a few a second. So whoever
 * connects in a loop hides neither what others cause nor what mokd itself has to say, and journald has no reason to
 * drop either.
 */
#ifndef MOKD_TALK_H
#define MOKD_TALK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/log.h"

#define MOKD_TALK_BURST 1000u
#define MOKD_TALK_A_SECOND 10u

/* Whether one more line about him may be logged now; says in the log when lines begin to be kept back, and how many
 * were. */
bool mokd_talk_may(uid_t uid);
#define mokd_log_of(uid, ...) (mokd_talk_may(uid) ? mok_log(__VA_ARGS__) : (void)0)

/* The same at a given time: *ret_kept lines were kept back before this one; UINT64_MAX: this is the first that is. */
bool mokd_talk_may_at(uid_t uid, uint64_t now_ns, uint64_t *ret_kept);

#endif
