/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Accounts: what each user has at once, against his limits, and against those that the members of a Unix group share.
 * A user lives while something is charged to him. Which groups he is in is the user database's word, asked once.
 */
#ifndef MOKD_USER_H
#define MOKD_USER_H

#include "control.pb-c.h"
#include "error.h"
#include "server.h"

struct mokd_fill;

/* What the members of one Unix group have together. Lives while a user with an account is in it. */
struct mokd_pool {
    TAILQ_ENTRY(mokd_pool) link;
    gid_t gid;
    char name[MOK_MAX_NAME + 1];
    unsigned refs;
    uint64_t bound[MOKD_RESOURCES], used[MOKD_RESOURCES];
    uint64_t elsewhere[MOKD_RESOURCES]; /* on other nodes: rack_share.c */
};

struct mokd_user {
    TAILQ_ENTRY(mokd_user) link;
    struct mokd_server *server;
    uid_t uid;
    char name[MOK_MAX_NAME + 1]; /* the number until the name has been looked up */
    bool known;                  /* it has been looked up, and his groups too: limits and pools are right */
    bool overdue;                /* the user database takes long, or failed: he goes by his number */
    struct mokd_timer *patience; /* with it */
    struct mokd_limits limits;
    gid_t *gids;
    size_t n_gids;
    struct mokd_pool **pools; /* of those groups that the configuration has a section of */
    size_t n_pools;
    unsigned refs;
    uint64_t used[MOKD_RESOURCES];
    uint64_t elsewhere[MOKD_RESOURCES]; /* on other nodes, which counts against his limits too: rack_share.c */
    uint64_t device_ns; /* that he has used here, as long as he has an account */
    unsigned fills; /* allocations under way, storage.c */
    TAILQ_HEAD(, mokd_fill) waiting_fills;
    uint32_t strangers; /* connections that are no session: before Hello, and observers */
};

/* The account of `uid`, made when it is the first use. NULL when out of memory. */
struct mokd_user *mokd_user_ref(struct mokd_server *server, uid_t uid);
/* Another reference to it, which cannot fail. */
struct mokd_user *mokd_user_hold(struct mokd_user *user);
void mokd_user_unref(struct mokd_user *user); /* NULL is fine */

/*
 * Whether he may be let in: where groups have limits, not before it is known which he is in; else once his name is
 * known, or has not come for a while.
 */
bool mokd_user_is_ready(const struct mokd_user *user);
/* Root, the user that mokd runs as, and the members of the configuration's admin_group. */
bool mokd_user_is_admin(const struct mokd_user *user);

/* Before he gets `amount` more; give the same back when it is gone. -MOK_EQUOTA names what, who and the bound. */
int mokd_user_take(struct mokd_user *user, enum mokd_resource resource, uint64_t amount, struct mokd_error *error);
void mokd_user_give(struct mokd_user *user, enum mokd_resource resource, uint64_t amount);
/* The same for memory, in whole pages. */
int mokd_user_take_bytes(struct mokd_user *user, uint64_t bytes, struct mokd_error *error);
void mokd_user_give_bytes(struct mokd_user *user, uint64_t bytes);
/* What he has of the mokd before is his, whatever his limits are now; given back as any. */
void mokd_user_adopt(struct mokd_user *user, enum mokd_resource resource, uint64_t amount);

/* What he may have of it himself, which for descriptors is also a matter of mokd's own limit. */
uint64_t mokd_user_bound(const struct mokd_user *user, enum mokd_resource resource);
/* The same for limits of anybody. */
uint64_t mokd_bound_of(const struct mokd_server *server, const struct mokd_limits *limits, enum mokd_resource resource);

/* His claim to a device's time. */
void mokd_user_claim(const struct mokd_user *user, Mok__WorkerShare *ret);

/* The configuration is another one: what is held stays, also where it is more than one may have now. */
void mokd_users_reload(struct mokd_server *server);

#endif
