/* SPDX-License-Identifier: Apache-2.0 */
#include "quota.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

/* An answer stays within one packet. */
#define ANSWER_BYTES (MOK_WIRE_MAX_BYTES - 4096u)

/* One entry and the memory behind it. */
struct entry {
    Mok__Quota quota;
    Mok__QuotaLine line[MOKD_RESOURCES], *pointer[MOKD_RESOURCES];
    char user_section[MOK_MAX_NAME + 16], group_section[MOK_MAX_NAME + 16];
};

struct answer {
    struct entry *entries;
    Mok__Quota **pointers;
    size_t count, capacity, bytes;
    uint32_t omitted;
};

static void begin_entry(struct entry *entry)
{
    entry->quota = (Mok__Quota)MOK__QUOTA__INIT;
    for (enum mokd_resource i = 0; i < MOKD_RESOURCES; i++) {
        entry->line[i] = (Mok__QuotaLine)MOK__QUOTA_LINE__INIT;
        entry->line[i].what = (char *)mokd_resource_text(i);
        entry->pointer[i] = &entry->line[i];
    }
    entry->quota.n_line = MOKD_RESOURCES;
    entry->quota.line = entry->pointer;
}

static void fill_rest(const struct mokd_limits *limits, Mok__Quota *ret)
{
    ret->weight = limits->weight;
    ret->priority = limits->priority;
    ret->devices = limits->devices;
    ret->exclusive = limits->exclusive;
    ret->queue_entries = limits->queue_entries;
}

static char *where_from(const struct mokd_tenant_config *tenant, const struct mokd_limits *limits,
                        const Mok__QuotaLine *line, enum mokd_resource resource, char *section)
{
    if (mokd_config_gives(tenant, resource))
        return section;
    return (char *)(line->limit < limits->of[resource] ? "mokd's own limit" : "[limits]");
}

static void fill_user(const struct mokd_config *config, const struct mokd_user *user, struct entry *ret)
{
    const struct mokd_tenant_config *tenant = mokd_config_user(config, user->uid);

    begin_entry(ret);
    if (tenant)
        snprintf(ret->user_section, sizeof(ret->user_section), "[user %s]", tenant->name);
    for (enum mokd_resource i = 0; i < MOKD_RESOURCES; i++) {
        ret->line[i].used = user->used[i];
        ret->line[i].elsewhere = user->elsewhere[i];
        ret->line[i].limit = mokd_user_bound(user, i);
        ret->line[i].from = where_from(tenant, &user->limits, &ret->line[i], i, ret->user_section);
    }
    ret->quota.id = user->uid;
    ret->quota.name = (char *)user->name;
    fill_rest(&user->limits, &ret->quota);
}

/* A user of the configuration who has nothing now; the groups that he is in are not known. */
static void fill_absent(const struct mokd_server *server, const struct mokd_tenant_config *tenant, struct entry *ret)
{
    struct mokd_limits limits;

    mokd_config_limits(server->config, tenant->id, NULL, 0, &limits);
    begin_entry(ret);
    snprintf(ret->user_section, sizeof(ret->user_section), "[user %s]", tenant->name);
    for (enum mokd_resource i = 0; i < MOKD_RESOURCES; i++) {
        ret->line[i].limit = mokd_bound_of(server, &limits, i);
        ret->line[i].from = where_from(tenant, &limits, &ret->line[i], i, ret->user_section);
    }
    ret->quota.id = tenant->id;
    ret->quota.name = (char *)tenant->name;
    fill_rest(&limits, &ret->quota);
}

static void fill_pool(const struct mokd_tenant_config *group, const struct mokd_pool *pool, struct entry *ret)
{
    begin_entry(ret);
    snprintf(ret->group_section, sizeof(ret->group_section), "[group %s]", group->name);
    for (enum mokd_resource i = 0; i < MOKD_RESOURCES; i++) {
        bool given = mokd_config_gives(group, i);
        ret->line[i].used = pool ? pool->used[i] : 0;
        ret->line[i].elsewhere = pool ? pool->elsewhere[i] : 0;
        ret->line[i].limit = given ? group->limits.of[i] : MOKD_NO_LIMIT;
        ret->line[i].from = given ? ret->group_section : (char *)"";
    }
    ret->quota.group = true;
    ret->quota.id = group->id;
    ret->quota.name = (char *)group->name;
}

static bool has_room(struct answer *answer)
{
    if (answer->count < answer->capacity)
        return true;
    answer->omitted++;
    return false;
}

static void keep_entry(struct answer *answer)
{
    struct entry *entry = &answer->entries[answer->count];
    size_t bytes = mok__quota__get_packed_size(&entry->quota) + 8;

    if (answer->bytes + bytes > ANSWER_BYTES) {
        answer->omitted++;
        return;
    }
    answer->bytes += bytes;
    answer->pointers[answer->count++] = &entry->quota;
}

static void add_user(const struct mokd_user *user, struct answer *answer)
{
    if (!has_room(answer))
        return;
    fill_user(user->server->config, user, &answer->entries[answer->count]);
    keep_entry(answer);
}

static const struct mokd_pool *pool_of(const struct mokd_server *server, gid_t gid)
{
    const struct mokd_pool *pool;

    TAILQ_FOREACH(pool, &server->pools, link)
        if (pool->gid == gid)
            return pool;
    return NULL;
}

static void add_pool(const struct mokd_server *server, const struct mokd_tenant_config *group, struct answer *answer)
{
    if (!has_room(answer))
        return;
    fill_pool(group, pool_of(server, group->id), &answer->entries[answer->count]);
    keep_entry(answer);
}

/* With the Unix groups whose limits bind him too. */
static void add_with_pools(const struct mokd_user *user, struct answer *answer)
{
    add_user(user, answer);
    for (size_t i = 0; i < user->n_pools; i++) {
        const struct mokd_tenant_config *group = mokd_config_group(user->server->config, user->pools[i]->gid);
        if (group)
            add_pool(user->server, group, answer);
    }
}

static const struct mokd_user *account_of(const struct mokd_server *server, uid_t uid)
{
    const struct mokd_user *user;

    TAILQ_FOREACH(user, &server->users, link)
        if (user->uid == uid)
            return user;
    return NULL;
}

static void add_absent(const struct mokd_server *server, const struct mokd_tenant_config *tenant, struct answer *answer)
{
    if (account_of(server, tenant->id) || !has_room(answer))
        return;
    fill_absent(server, tenant, &answer->entries[answer->count]);
    keep_entry(answer);
}

static void add_all(const struct mokd_server *server, struct answer *answer)
{
    const struct mokd_user *user;

    TAILQ_FOREACH(user, &server->users, link)
        add_user(user, answer);
    for (size_t i = 0; i < server->config->n_users; i++)
        add_absent(server, &server->config->users[i], answer);
    for (size_t i = 0; i < server->config->n_groups; i++)
        add_pool(server, &server->config->groups[i], answer);
}

static bool is_named(const char *text, const char *name, uint32_t id)
{
    char number[16];

    snprintf(number, sizeof(number), "%u", id);
    return strcmp(text, name) == 0 || strcmp(text, number) == 0;
}

/* Someone who has an account now, or a section. */
static void add_named(const struct mokd_server *server, const char *name, struct answer *answer)
{
    const struct mokd_user *user;

    TAILQ_FOREACH(user, &server->users, link)
        if (is_named(name, user->name, user->uid))
            add_with_pools(user, answer);
    for (size_t i = 0; i < server->config->n_users; i++)
        if (is_named(name, server->config->users[i].name, server->config->users[i].id))
            add_absent(server, &server->config->users[i], answer);
}

static int collect(struct mokd_session *session, const Mok__QuotaQuery *request, struct answer *answer,
                   struct mokd_error *error)
{
    const struct mokd_user *self = session->user;
    bool own = !request->all && (!request->user[0] || is_named(request->user, self->name, self->uid));
    char clean[MOK_MAX_NAME + 2];

    if (own) {
        add_with_pools(self, answer);
        return 0;
    }
    if (!mokd_session_is_admin(session))
        return mokd_error_set(error, -MOK_EACCESS, "quota: user %s is no administrator of this mokd and sees his own",
                              self->name);
    if (request->all)
        add_all(session->server, answer);
    else
        add_named(session->server, request->user, answer);
    if (answer->count == 0 && answer->omitted == 0)
        return mokd_error_set(error, -MOK_ENOENT,
                              "user = %s: has nothing of mokd's now, and no section of the "
                              "configuration: [limits] holds",
                              mok_log_text(clean, sizeof(clean), request->user));
    return 0;
}

static size_t count_most(const struct mokd_server *server)
{
    const struct mokd_user *user;
    size_t count = 1 + server->config->n_users + server->config->n_groups;

    TAILQ_FOREACH(user, &server->users, link)
        count++;
    return count;
}

void mokd_quota_query(struct mokd_session *session, uint64_t id, const Mok__QuotaQuery *request)
{
    struct answer answer = { .capacity = count_most(session->server) };
    _cleanup_free_ struct entry *entries = calloc(answer.capacity, sizeof(*entries));
    _cleanup_free_ Mok__Quota **pointers = calloc(answer.capacity, sizeof(*pointers));
    struct mokd_error error = { 0 };

    answer.entries = entries;
    answer.pointers = pointers;
    int r = entries && pointers ? 0 : mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (r == 0)
        r = collect(session, request, &answer, &error);
    if (r < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__QuotaReply body = MOK__QUOTA_REPLY__INIT;
    body.n_quota = answer.count;
    body.quota = answer.pointers;
    body.omitted = answer.omitted;
    reply.body_case = MOK__REPLY__BODY_QUOTA;
    reply.quota = &body;
    struct mokd_call call = mokd_call_begin(session, id);
    mokd_call_reply(&call, &reply, NULL, 0);
}
