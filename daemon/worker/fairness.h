/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Weighted fair share of one device's time over classes of users, over the users of a class, then over the sessions of
 * a user. Pure arithmetic on virtual time: who used d ns moves ahead by d * SCALE / weight, and whoever is furthest
 * behind goes next. A class counts 16 times the one below: a saturated device gives the lower one 1/17 of its time,
 * which is what keeps it from starving, and a class that was idle goes first. An account that was idle keeps at most
 * `burst_ns` of unused time, so nobody saves up a device. Never reads a clock.
 */
#ifndef MOK_WORKER_FAIRNESS_H
#define MOK_WORKER_FAIRNESS_H

#include <stdbool.h>
#include <stdint.h>

#define FAIR_SCALE 64u /* virtual ns of one device ns at weight 1; divides without losing much up to weight 64 */
#define FAIR_LEAD_NS 1000000000u /* how far use elsewhere puts a user ahead, at most */
#define FAIR_MAX_WEIGHT 65536u
#define FAIR_CLASSES 3u /* low, normal, high */

struct fair_account {
    uint64_t used;   /* virtual time */
    uint32_t weight; /* 0 counts as 1 */
};

struct fair_class {
    struct fair_account account; /* its weight is its rank's */
    uint64_t clock;              /* virtual time of its users: that of the one picked last, never falls */
};

struct fair_user {
    struct fair_account account;
    struct fair_class *class;
    uint64_t ahead; /* virtual time of what it used elsewhere: put on top of `used` when users are compared */
    uint64_t clock; /* virtual time of its sessions: that of the one picked last, never falls */
    uint32_t uid;
    uint32_t sessions;
    struct fair_user *next;
};

struct fair_session {
    struct fair_account account;
    uint64_t ahead; /* as fair_user.ahead, among the sessions of its user */
    struct fair_user *user;
};

struct fair_share {
    uint64_t clock;    /* as fair_class.clock, of the classes */
    uint64_t burst_ns; /* device time that an idle account may keep, at weight 1 */
    struct fair_user *users;
    struct fair_class class[FAIR_CLASSES]; /* by enum mok_priority */
};

/* Joins user `uid`; takes `spare` as the user's account if it is the first of its sessions and returns whether. */
bool fair_join(struct fair_share *share, struct fair_session *session, uint32_t uid, struct fair_user *spare);
/* Leaves; returns the user's account when this was its last session, for the caller to free, else NULL. */
struct fair_user *fair_leave(struct fair_share *share, struct fair_session *session);
/* Sets the weight of a session among those of its user. */
void fair_weigh_session(struct fair_session *session, uint32_t weight);
/* Sets the weight and the class of a user, if he has a session; an unknown class is the normal one. */
void fair_weigh_user(struct fair_share *share, uint32_t uid, uint32_t weight, uint32_t priority);

/* The session has something to run: forgets what it did not use beyond the burst. */
void fair_wake(const struct fair_share *share, struct fair_session *session);
/* Whether `a`, which became runnable as number `a_order`, goes before `b`. */
bool fair_before(const struct fair_session *a, uint64_t a_order, const struct fair_session *b, uint64_t b_order);
/* The session is the one that runs now. */
void fair_pick(struct fair_share *share, struct fair_session *session);
/*
 * A user used `device_ns` of devices elsewhere, which counts here as if it were of this one; but it never puts him
 * further ahead than `most_ns` at weight 1, so that others have caught up after that. Where nobody else wants the
 * device it costs him nothing.
 */
void fair_charge_elsewhere(struct fair_share *share, uint32_t uid, uint64_t device_ns, uint64_t most_ns);
/* The same of a session's job, among the sessions of its user. */
void fair_charge_session_elsewhere(struct fair_session *session, uint64_t device_ns, uint64_t most_ns);
/* It used `device_ns` of the device. */
void fair_charge(struct fair_session *session, uint64_t device_ns);

#endif
