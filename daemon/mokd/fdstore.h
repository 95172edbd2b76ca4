/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The service manager's descriptor store: what is put here outlives mokd, and the next mokd inherits it. Each
 * descriptor has a number that is never used twice, and the name "mok-NUMBER" by which the manager knows it; the state
 * (state.h) says what the numbers mean. Knows nothing of sessions or buffers, and never waits for an answer: the
 * manager gives none.
 */
#ifndef MOKD_FDSTORE_H
#define MOKD_FDSTORE_H

#include <stdbool.h>
#include <stdint.h>

#include "inherited.h"

struct mokd_fdstore;

/*
 * There is a store when $NOTIFY_SOCKET says where the manager listens and $FDSTORE how many descriptors it keeps;
 * managers that do not say so themselves are helped by the unit. Takes what is ours out of `inherited`. -MOK_ENOMEM.
 */
int mokd_fdstore_open(struct mokd_inherited *inherited, struct mokd_fdstore **ret);
/* Closes our descriptors; the manager's stay. NULL is fine. */
void mokd_fdstore_close(struct mokd_fdstore *store);

bool mokd_fdstore_is_there(const struct mokd_fdstore *store); /* NULL is fine */
/* How many descriptors it holds, and how many it may. */
void mokd_fdstore_count(const struct mokd_fdstore *store, uint32_t *ret_used, uint32_t *ret_bound);

enum mokd_fdstore_use {
    MOKD_FDSTORE_OWN,    /* of mokd itself: a few places are kept free for these */
    MOKD_FDSTORE_CLIENT, /* of a session */
};
/*
 * The number that the manager keeps a duplicate under; 0: there is no store, it is full, or the manager does not
 * listen.
 */
uint64_t mokd_fdstore_keep(struct mokd_fdstore *store, int fd, enum mokd_fdstore_use use);
/* Forgets one, inherited ones too. 0 is fine. */
void mokd_fdstore_drop(struct mokd_fdstore *store, uint64_t number);

/* The state's own descriptor has a name instead of a number. */
int mokd_fdstore_keep_state(struct mokd_fdstore *store, int fd);
/* The inherited state; -1: none. The caller's. */
int mokd_fdstore_take_state(struct mokd_fdstore *store);
/* The inherited descriptor of that number, the caller's; the manager keeps it. -1: there is none. */
int mokd_fdstore_take(struct mokd_fdstore *store, uint64_t number);
/* Drops, at the manager too, what was inherited and nobody took. Returns how many. */
unsigned mokd_fdstore_drop_rest(struct mokd_fdstore *store);
/* The same with everything, taken or not: nothing of the earlier mokd is of use. */
void mokd_fdstore_clear(struct mokd_fdstore *store);

/* The last number that was given out, so that the next mokd goes on behind it. */
uint64_t mokd_fdstore_last(const struct mokd_fdstore *store);
void mokd_fdstore_continue(struct mokd_fdstore *store, uint64_t last);

#endif
