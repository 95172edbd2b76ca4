/* SPDX-License-Identifier: Apache-2.0 */
/* Accounts: what each user has at once, against his limits. A user lives while something is charged to him. */
#ifndef MOKD_USER_H
#define MOKD_USER_H

#include "error.h"
#include "server.h"

struct mokd_fill;

struct mokd_user {
    TAILQ_ENTRY(mokd_user) link;
    struct mokd_server *server;
    uid_t uid;
    char name[MOK_MAX_NAME + 1]; /* the number until the name has been looked up */
    const struct mokd_limits *limits;
    unsigned refs;
    uint64_t bytes_used;
    uint32_t sessions_used;
    uint32_t descriptors_used; /* of mokd's, by his buffers, layers and queues */
    unsigned fills; /* allocations under way, storage.c */
    TAILQ_HEAD(, mokd_fill) waiting_fills;
    uint32_t strangers; /* connections that are no session: before Hello, and observers */
};

/* The account of `uid`, made when it is the first use. NULL when out of memory. */
struct mokd_user *mokd_user_ref(struct mokd_server *server, uid_t uid);
/* Another reference to it, which cannot fail. */
struct mokd_user *mokd_user_hold(struct mokd_user *user);
void mokd_user_unref(struct mokd_user *user); /* NULL is fine */

/* Before he gets memory, in whole pages; give the same number back when it is gone. -MOK_EQUOTA. */
int mokd_user_take_bytes(struct mokd_user *user, uint64_t bytes, struct mokd_error *error);
void mokd_user_give_bytes(struct mokd_user *user, uint64_t bytes);
/* What he has of the mokd before is his, whatever his limits are now: bytes and descriptors, given back as any. */
void mokd_user_adopt(struct mokd_user *user, uint64_t bytes, uint32_t descriptors);

/* Before mokd opens `count` descriptors for the user; give them back when they are closed. -MOK_EQUOTA. */
int mokd_user_take_descriptors(struct mokd_user *user, uint32_t count, struct mokd_error *error);
void mokd_user_give_descriptors(struct mokd_user *user, uint32_t count);

#endif
