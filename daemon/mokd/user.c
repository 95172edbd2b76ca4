/* SPDX-License-Identifier: Apache-2.0 */
#include "user.h"

#include <inttypes.h>
#include <pwd.h>
#include <stdio.h>
#include <string.h>

#include "memory.h"

/* A name server may take seconds to answer, so it is asked outside the loop. */
struct lookup {
    uv_work_t work;
    struct mokd_user *user;
    uid_t uid;
    char name[MOK_MAX_NAME + 1];
};

static void look_up(uv_work_t *work)
{
    struct lookup *lookup = work->data;
    struct passwd entry, *found = NULL;
    char buffer[4096];

    if (getpwuid_r(lookup->uid, &entry, buffer, sizeof(buffer), &found) == 0 && found)
        snprintf(lookup->name, sizeof(lookup->name), "%s", found->pw_name);
}

static void looked_up(uv_work_t *work, int status)
{
    struct lookup *lookup = work->data;

    if (status == 0 && lookup->name[0])
        memcpy(lookup->user->name, lookup->name, sizeof(lookup->name));
    mokd_user_unref(lookup->user);
    free(lookup);
}

static void start_lookup(struct mokd_user *user)
{
    struct lookup *lookup = calloc(1, sizeof(*lookup));
    if (!lookup)
        return;
    lookup->uid = user->uid;
    lookup->user = mokd_user_hold(user);
    lookup->work.data = lookup;
    if (uv_queue_work(&user->server->loop, &lookup->work, look_up, looked_up) < 0)
        looked_up(&lookup->work, UV_ECANCELED);
}

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
    user->limits = mokd_config_limits(server->config, uid);
    user->refs = 1;
    TAILQ_INIT(&user->waiting_fills);
    snprintf(user->name, sizeof(user->name), "%u", uid);
    TAILQ_INSERT_TAIL(&server->users, user, link);
    start_lookup(user);
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
    TAILQ_REMOVE(&user->server->users, user, link);
    free(user);
}

int mokd_user_take_bytes(struct mokd_user *user, uint64_t bytes, struct mokd_error *error)
{
    uint64_t bound = user->limits->bytes, taken = mok_memory_round(bytes);

    if (taken < bytes || user->bytes_used > bound || taken > bound - user->bytes_used)
        return mokd_error_set(error, -MOK_EQUOTA,
                              "bytes = %" PRIu64 ": user %s may have %" PRIu64 " bytes and has %" PRIu64, bytes,
                              user->name, bound, user->bytes_used);
    user->bytes_used += taken;
    return 0;
}

void mokd_user_give_bytes(struct mokd_user *user, uint64_t bytes)
{
    user->bytes_used -= mok_memory_round(bytes);
}

void mokd_user_adopt(struct mokd_user *user, uint64_t bytes, uint32_t descriptors)
{
    user->bytes_used += mok_memory_round(bytes);
    user->descriptors_used += descriptors;
}

int mokd_user_take_descriptors(struct mokd_user *user, uint32_t count, struct mokd_error *error)
{
    uint32_t share = user->server->descriptor_share;

    if (count > share || user->descriptors_used > share - count)
        return mokd_error_set(error, -MOK_EQUOTA,
                              "descriptors = %u: user %s may hold %u of mokd's with buffers, layers and queues and holds %u",
                              count, user->name, share, user->descriptors_used);
    user->descriptors_used += count;
    return 0;
}

void mokd_user_give_descriptors(struct mokd_user *user, uint32_t count)
{
    user->descriptors_used -= count;
}
