/* SPDX-License-Identifier: Apache-2.0 */
#include "user.h"

#include <grp.h>
#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#include "device.h"
#include "memory.h"
#include "rack_share.h"
#include "session.h"
#include "timer.h"

/* More groups than this of one user are not looked at. */
#define MAX_GIDS 1024
/* Where nothing but his name hangs on the user database, it has this long. */
#define PATIENCE_MS 1000u

/* ------------------------------------------------------------------ pools */

static struct mokd_pool *pool_ref(struct mokd_server *server, const struct mokd_tenant_config *group)
{
    struct mokd_pool *pool;

    TAILQ_FOREACH(pool, &server->pools, link)
        if (pool->gid == group->id)
            break;
    if (!pool) {
        pool = calloc(1, sizeof(*pool));
        if (!pool)
            return NULL;
        pool->gid = group->id;
        TAILQ_INSERT_TAIL(&server->pools, pool, link);
    }
    memcpy(pool->name, group->name, sizeof(pool->name));
    mokd_rack_share_pool(server, pool);
    for (enum mokd_resource i = 0; i < MOKD_RESOURCES; i++)
        pool->bound[i] = mokd_config_gives(group, i) ? group->limits.of[i] : MOKD_NO_LIMIT;
    pool->refs++;
    return pool;
}

static void leave_pools(struct mokd_user *user)
{
    for (size_t p = 0; p < user->n_pools; p++) {
        struct mokd_pool *pool = user->pools[p];
        for (enum mokd_resource i = 0; i < MOKD_RESOURCES; i++)
            pool->used[i] -= user->used[i];
        if (--pool->refs > 0)
            continue;
        TAILQ_REMOVE(&user->server->pools, pool, link);
        free(pool);
    }
    free(user->pools);
    user->pools = NULL;
    user->n_pools = 0;
}

static bool is_member(const struct mokd_user *user, gid_t gid)
{
    for (size_t i = 0; i < user->n_gids; i++)
        if (user->gids[i] == gid)
            return true;
    return false;
}

static bool join_pools(struct mokd_user *user)
{
    const struct mokd_config *config = user->server->config;

    if (config->n_groups == 0)
        return true;
    user->pools = calloc(config->n_groups, sizeof(struct mokd_pool *));
    if (!user->pools)
        return false;
    for (size_t i = 0; i < config->n_groups; i++) {
        if (!is_member(user, config->groups[i].id))
            continue;
        struct mokd_pool *pool = pool_ref(user->server, &config->groups[i]);
        if (!pool)
            return false;
        for (enum mokd_resource r = 0; r < MOKD_RESOURCES; r++)
            pool->used[r] += user->used[r];
        user->pools[user->n_pools++] = pool;
    }
    return true;
}

/* What holds for him, by the configuration and the groups that are known. False: no memory, and he stays unknown. */
static bool settle(struct mokd_user *user)
{
    leave_pools(user);
    mokd_config_limits(user->server->config, user->uid, user->gids, user->n_gids, &user->limits);
    return join_pools(user);
}

void mokd_user_claim(const struct mokd_user *user, Mok__WorkerShare *ret)
{
    *ret = (Mok__WorkerShare)MOK__WORKER_SHARE__INIT;
    ret->uid = user->uid;
    ret->weight = user->limits.weight;
    ret->priority = user->limits.priority;
}

/* Those that have no queue of his do not care. */
static void tell_workers(const struct mokd_user *user)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerShare share;

    mokd_user_claim(user, &share);
    request.body_case = MOK__WORKER_REQUEST__BODY_SHARE;
    request.share = &share;
    for (size_t i = 0; i < user->server->n_devices; i++)
        mokd_device_send(user->server->devices[i], &request, NULL, 0, MOKD_WORKER_TIMEOUT_MS, NULL, NULL, 0);
}

void mokd_users_reload(struct mokd_server *server)
{
    struct mokd_user *user;

    /* All at first, so that pools of sections that are gone, or say something else, go. */
    TAILQ_FOREACH(user, &server->users, link)
        leave_pools(user);
    TAILQ_FOREACH(user, &server->users, link) {
        if (!settle(user))
            mok_log(MOK_LOG_ERROR, "user", "no memory for the limits of groups", "uid=%u", user->uid);
        tell_workers(user);
    }
}

/* ------------------------------------------------------------------ looking up */

/* A name server may take seconds to answer, so it is asked outside the loop. */
struct lookup {
    uv_work_t work;
    struct mokd_user *user;
    uid_t uid;
    char name[MOK_MAX_NAME + 1];
    gid_t *gids;
    int n_gids;
};

static void look_up_groups(struct lookup *lookup, const struct passwd *entry)
{
    int count = MAX_GIDS;
    gid_t *gids = calloc(MAX_GIDS, sizeof(*gids));

    if (!gids)
        return;
    if (getgrouplist(entry->pw_name, entry->pw_gid, gids, &count) < 0)
        count = MAX_GIDS; /* it has more */
    lookup->gids = gids;
    lookup->n_gids = count;
}

static void look_up(uv_work_t *work)
{
    struct lookup *lookup = work->data;
    struct passwd entry, *found = NULL;
    char buffer[4096];

    if (getpwuid_r(lookup->uid, &entry, buffer, sizeof(buffer), &found) != 0 || !found)
        return;
    snprintf(lookup->name, sizeof(lookup->name), "%s", found->pw_name);
    look_up_groups(lookup, found);
}

static void looked_up(uv_work_t *work, int status)
{
    struct lookup *lookup = work->data;
    struct mokd_user *user = lookup->user;

    if (status == 0 && lookup->name[0])
        memcpy(user->name, lookup->name, sizeof(lookup->name));
    user->gids = lookup->gids;
    user->n_gids = (size_t)lookup->n_gids;
    mokd_rack_share_user(user); /* by his name now */
    user->known = status == 0 && settle(user);
    tell_workers(user); /* he may have a queue already, opened with what holds for everyone */
    mokd_timer_cancel(&user->patience);
    user->overdue = !user->known;
    if (mokd_user_is_ready(user))
        mokd_sessions_let_in(user);
    mokd_user_unref(user);
    free(lookup);
}

static void look_up_overdue(void *cookie)
{
    struct mokd_user *user = cookie;

    mokd_timer_cancel(&user->patience);
    user->overdue = true;
    if (mokd_user_is_ready(user))
        mokd_sessions_let_in(user);
}

static bool start_lookup(struct mokd_user *user)
{
    struct lookup *lookup = calloc(1, sizeof(*lookup));
    if (!lookup)
        return false;
    lookup->uid = user->uid;
    lookup->user = mokd_user_hold(user);
    lookup->work.data = lookup;
    user->patience = mokd_timer_start(&user->server->loop, PATIENCE_MS, look_up_overdue, user);
    user->overdue = !user->patience;
    if (uv_queue_work(&user->server->loop, &lookup->work, look_up, looked_up) == 0)
        return true;
    mokd_timer_cancel(&user->patience);
    mokd_user_unref(user);
    free(lookup);
    return false;
}

bool mokd_user_is_ready(const struct mokd_user *user)
{
    return user->known || (user->overdue && user->server->config->n_groups == 0);
}

bool mokd_user_is_admin(const struct mokd_user *user)
{
    const struct mokd_config *config = user->server->config;

    return user->uid == 0 || user->uid == geteuid() || (config->has_admin_group && is_member(user, config->admin_gid));
}

/* ------------------------------------------------------------------ the object */

struct mokd_user *mokd_user_ref(struct mokd_server *server, uid_t uid)
{
    struct mokd_user *user;

    TAILQ_FOREACH(user, &server->users, link)
        if (user->uid == uid)
            return mokd_user_hold(user);
    user = calloc(1, sizeof(*user));
    if (!user)
        return NULL;
    user->server = server;
    user->uid = uid;
    mokd_config_limits(server->config, uid, NULL, 0, &user->limits);
    user->refs = 1;
    TAILQ_INIT(&user->waiting_fills);
    snprintf(user->name, sizeof(user->name), "%u", uid);
    TAILQ_INSERT_TAIL(&server->users, user, link);
    mokd_rack_share_user(user);
    if (!start_lookup(user)) {
        mokd_user_unref(user);
        return NULL;
    }
    return user;
}

struct mokd_user *mokd_user_hold(struct mokd_user *user)
{
    user->refs++;
    return user;
}

void mokd_user_unref(struct mokd_user *user)
{
    if (!user || --user->refs > 0)
        return;
    leave_pools(user);
    TAILQ_REMOVE(&user->server->users, user, link);
    free(user->gids);
    free(user);
}

/* ------------------------------------------------------------------ charging */

uint64_t mokd_bound_of(const struct mokd_server *server, const struct mokd_limits *limits, enum mokd_resource resource)
{
    uint64_t bound = limits->of[resource];

    if (resource == MOKD_DESCRIPTORS && bound > server->descriptor_share)
        return server->descriptor_share;
    return bound;
}

uint64_t mokd_user_bound(const struct mokd_user *user, enum mokd_resource resource)
{
    return mokd_bound_of(user->server, &user->limits, resource);
}

static bool fits(uint64_t used, uint64_t elsewhere, uint64_t amount, uint64_t bound)
{
    return used <= bound && elsewhere <= bound - used && amount <= bound - used - elsewhere;
}

static const char *and_elsewhere(uint64_t amount, char ret[static 64])
{
    if (amount == 0)
        return "";
    snprintf(ret, 64, " here and %" PRIu64 " on other nodes", amount);
    return ret;
}

void mokd_user_adopt(struct mokd_user *user, enum mokd_resource resource, uint64_t amount)
{
    user->used[resource] += amount;
    for (size_t i = 0; i < user->n_pools; i++)
        user->pools[i]->used[resource] += amount;
}

int mokd_user_take(struct mokd_user *user, enum mokd_resource resource, uint64_t amount, struct mokd_error *error)
{
    const char *what = mokd_resource_text(resource);
    uint64_t bound = mokd_user_bound(user, resource);
    char more[64];

    if (!fits(user->used[resource], user->elsewhere[resource], amount, bound))
        return mokd_error_set(error, -MOK_EQUOTA,
                              "%s = %" PRIu64 ": user %s may have %" PRIu64 " %s and has %" PRIu64 "%s", what, amount,
                              user->name, bound, what, user->used[resource],
                              and_elsewhere(user->elsewhere[resource], more));
    for (size_t i = 0; i < user->n_pools; i++) {
        const struct mokd_pool *pool = user->pools[i];
        if (!fits(pool->used[resource], pool->elsewhere[resource], amount, pool->bound[resource]))
            return mokd_error_set(
                error, -MOK_EQUOTA,
                "%s = %" PRIu64 ": the members of group %s, of which user %s is one, may have %" PRIu64
                " %s together and have %" PRIu64 "%s",
                what, amount, pool->name, user->name, pool->bound[resource], what, pool->used[resource],
                and_elsewhere(pool->elsewhere[resource], more));
    }
    mokd_user_adopt(user, resource, amount);
    return 0;
}

void mokd_user_give(struct mokd_user *user, enum mokd_resource resource, uint64_t amount)
{
    user->used[resource] -= amount;
    for (size_t i = 0; i < user->n_pools; i++)
        user->pools[i]->used[resource] -= amount;
}

int mokd_user_take_bytes(struct mokd_user *user, uint64_t bytes, struct mokd_error *error)
{
    uint64_t taken = mok_memory_round(bytes);

    return mokd_user_take(user, MOKD_BYTES, taken < bytes ? UINT64_MAX : taken, error);
}

void mokd_user_give_bytes(struct mokd_user *user, uint64_t bytes)
{
    mokd_user_give(user, MOKD_BYTES, mok_memory_round(bytes));
}
