/* SPDX-License-Identifier: Apache-2.0 */
/* Fair share: see fairness.h. Virtual times are compared by plain order: 64 bits of ns * SCALE last for 9 years. */
#include "fairness.h"

#include <stddef.h>

#include "mok/types.h"

#define CLASS_FACTOR 16u

static uint32_t weight_of(const struct fair_account *account)
{
    return account->weight ? account->weight : 1;
}

static uint64_t virtual_ns(const struct fair_account *account, uint64_t ns)
{
    uint64_t scaled;
    if (__builtin_mul_overflow(ns, (uint64_t)FAIR_SCALE, &scaled))
        scaled = UINT64_MAX;
    return scaled / weight_of(account);
}

static void advance(struct fair_account *account, uint64_t ns)
{
    if (__builtin_add_overflow(account->used, virtual_ns(account, ns), &account->used))
        account->used = UINT64_MAX;
}

static void forget_idle(struct fair_account *account, uint64_t clock, uint64_t burst_ns)
{
    uint64_t burst = virtual_ns(account, burst_ns);
    uint64_t floor = clock > burst ? clock - burst : 0;
    if (account->used < floor)
        account->used = floor;
}

static struct fair_user *find_user(struct fair_share *share, uint32_t uid)
{
    for (struct fair_user *user = share->users; user; user = user->next)
        if (user->uid == uid)
            return user;
    return NULL;
}

static const uint32_t class_weight[FAIR_CLASSES] = {
    [MOK_PRIORITY_LOW] = 1,
    [MOK_PRIORITY_NORMAL] = CLASS_FACTOR,
    [MOK_PRIORITY_HIGH] = CLASS_FACTOR * CLASS_FACTOR,
};

static struct fair_class *class_of(struct fair_share *share, uint32_t priority)
{
    uint32_t which = priority < FAIR_CLASSES ? priority : MOK_PRIORITY_NORMAL;

    share->class[which].account.weight = class_weight[which];
    return &share->class[which];
}

bool fair_join(struct fair_share *share, struct fair_session *session, uint32_t uid, struct fair_user *spare)
{
    struct fair_user *user = find_user(share, uid);
    bool taken = !user;
    if (taken) {
        user = spare;
        struct fair_class *class = class_of(share, MOK_PRIORITY_NORMAL);
        *user = (struct fair_user){ .uid = uid, .next = share->users, .class = class, .account.used = class->clock };
        share->users = user;
    }
    user->sessions++;
    *session = (struct fair_session){ .user = user, .account.used = user->clock };
    return taken;
}

struct fair_user *fair_leave(struct fair_share *share, struct fair_session *session)
{
    struct fair_user *user = session->user;
    session->user = NULL;
    if (!user || --user->sessions)
        return NULL;
    for (struct fair_user **link = &share->users; *link; link = &(*link)->next) {
        if (*link == user) {
            *link = user->next;
            break;
        }
    }
    return user;
}

static uint32_t bounded(uint32_t weight)
{
    return weight > FAIR_MAX_WEIGHT ? FAIR_MAX_WEIGHT : weight;
}

void fair_weigh_session(struct fair_session *session, uint32_t weight)
{
    session->account.weight = bounded(weight);
}

void fair_weigh_user(struct fair_share *share, uint32_t uid, uint32_t weight, uint32_t priority)
{
    struct fair_user *user = find_user(share, uid);

    if (!user)
        return;
    user->account.weight = bounded(weight);
    struct fair_class *class = class_of(share, priority);
    if (user->class == class)
        return;
    user->class = class; /* what he was ahead or behind of others there means nothing here */
    user->account.used = class->clock;
    user->ahead = 0;
}

/* Where others have gone by, what it is ahead by grows less by as much. */
static void wake(struct fair_account *account, uint64_t *ahead, uint64_t clock, uint64_t burst_ns)
{
    uint64_t before = account->used;

    forget_idle(account, clock, burst_ns);
    uint64_t gone = account->used - before;
    *ahead = *ahead > gone ? *ahead - gone : 0;
}

/* What users, and sessions of one, are compared by. */
static uint64_t place(const struct fair_account *account, uint64_t ahead)
{
    return account->used > UINT64_MAX - ahead ? UINT64_MAX : account->used + ahead;
}

void fair_wake(const struct fair_share *share, struct fair_session *session)
{
    struct fair_user *user = session->user;

    forget_idle(&user->class->account, share->clock, share->burst_ns);
    wake(&user->account, &user->ahead, user->class->clock, share->burst_ns);
    wake(&session->account, &session->ahead, user->clock, share->burst_ns);
}

bool fair_before(const struct fair_session *a, uint64_t a_order, const struct fair_session *b, uint64_t b_order)
{
    const struct fair_class *above = a->user->class, *other = b->user->class;

    if (above != other && above->account.used != other->account.used)
        return above->account.used < other->account.used;
    if (above != other)
        return above->account.weight > other->account.weight;
    bool alike = a->user == b->user; /* then it is their own matter */
    uint64_t a_place = alike ? place(&a->account, a->ahead) : place(&a->user->account, a->user->ahead);
    uint64_t b_place = alike ? place(&b->account, b->ahead) : place(&b->user->account, b->user->ahead);
    return a_place != b_place ? a_place < b_place : a_order < b_order;
}

void fair_pick(struct fair_share *share, struct fair_session *session)
{
    struct fair_class *class = session->user->class;

    if (class->account.used > share->clock)
        share->clock = class->account.used;
    if (session->user->account.used > class->clock)
        class->clock = session->user->account.used;
    if (session->account.used > session->user->clock)
        session->user->clock = session->account.used;
}

void fair_charge(struct fair_session *session, uint64_t device_ns)
{
    advance(&session->account, device_ns);
    advance(&session->user->account, device_ns);
    advance(&session->user->class->account, device_ns);
}

static void put_ahead(const struct fair_account *account, uint64_t *ahead, uint64_t device_ns, uint64_t most_ns)
{
    uint64_t most = most_ns * FAIR_SCALE, more = virtual_ns(account, device_ns);

    *ahead = more < most && *ahead < most - more ? *ahead + more : most;
}

void fair_charge_elsewhere(struct fair_share *share, uint32_t uid, uint64_t device_ns, uint64_t most_ns)
{
    struct fair_user *user = find_user(share, uid);

    if (user)
        put_ahead(&user->account, &user->ahead, device_ns, most_ns);
}

void fair_charge_session_elsewhere(struct fair_session *session, uint64_t device_ns, uint64_t most_ns)
{
    put_ahead(&session->account, &session->ahead, device_ns, most_ns);
}
