/* SPDX-License-Identifier: Apache-2.0 */
#include "collective.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "rack_groups.h"
#include "timer.h"

struct entry {
    struct mokd_collective *collective;
    struct mokd_call call; /* session NULL: not called yet, or answered */
    struct mokd_timer *deadline;
    uint64_t timeout_ms;
    struct group_params params;
    uint32_t rank;
    bool arrived;
};

struct mokd_collective {
    TAILQ_ENTRY(mokd_collective) link;
    struct mokd_group *group;
    uint64_t index;
    uint32_t arrived;
    struct mokd_error failure; /* code 0: undecided */
    struct entry entry[];      /* [group->size], by rank */
};

/*
 * Calls that were given up, of those that some rank has yet to come to: a group keeps so many, for the reason. Of an
 * older one such a rank hears that it was given up. Else a rank that comes alone again and again would fill mokd's
 * memory.
 */
#define MAX_GIVEN_UP 64u

/* ------------------------------------------------------------------ the object */

static struct mokd_collective *find(const struct mokd_group *group, uint64_t index)
{
    struct mokd_collective *collective;

    TAILQ_FOREACH(collective, &group->collectives, link)
        if (collective->index == index)
            return collective;
    return NULL;
}

static struct mokd_collective *collective_get(struct mokd_group *group, uint64_t index)
{
    struct mokd_collective *collective = find(group, index);

    if (collective)
        return collective;
    collective = calloc(1, sizeof(*collective) + group->size * sizeof(collective->entry[0]));
    if (!collective)
        return NULL;
    collective->group = group;
    collective->index = index;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        collective->entry[rank].collective = collective;
        collective->entry[rank].rank = rank;
    }
    TAILQ_INSERT_TAIL(&group->collectives, collective, link);
    if (group->n_collectives <= index)
        group->n_collectives = index + 1;
    return collective;
}

static void collective_free(struct mokd_collective *collective)
{
    for (uint32_t rank = 0; rank < collective->group->size; rank++)
        mokd_timer_cancel(&collective->entry[rank].deadline);
    TAILQ_REMOVE(&collective->group->collectives, collective, link);
    free(collective);
}

static void fail_waiting(struct mokd_collective *collective)
{
    for (uint32_t rank = 0; rank < collective->group->size; rank++) {
        struct entry *entry = &collective->entry[rank];
        mokd_timer_cancel(&entry->deadline);
        if (entry->call.session)
            mokd_call_fail(&entry->call, &collective->failure);
    }
}

/* ------------------------------------------------------------------ waiting in vain */

static void forget_oldest(struct mokd_group *group)
{
    struct mokd_collective *collective, *oldest = NULL;
    unsigned count = 0;

    TAILQ_FOREACH(collective, &group->collectives, link) {
        if (collective->failure.code == 0)
            continue;
        count++;
        oldest = oldest ? oldest : collective;
    }
    if (count > MAX_GIVEN_UP)
        collective_free(oldest);
}

/* Others have come to it, and none of them waits any more. Over several nodes the lead says so. */
static bool is_forgotten(const struct mokd_group *group, uint64_t index)
{
    return !group->span && index < group->n_collectives && !find(group, index);
}

static bool has_not_called(const void *cookie, uint32_t rank)
{
    const struct mokd_collective *collective = cookie;
    return !collective->entry[rank].arrived;
}

static void overdue(void *cookie)
{
    struct entry *entry = cookie;
    struct mokd_collective *collective = entry->collective;
    char missing[200];

    mokd_error_set(&collective->failure, -MOK_ETIMEDOUT,
                   "rank %u of group %s waited %" PRIu64 " ms: no call came from rank %s", entry->rank,
                   collective->group->name, entry->timeout_ms,
                   group_missing(collective->group->size, has_not_called, collective, missing, sizeof(missing)));
    fail_waiting(collective);
    forget_oldest(collective->group);
}

void mokd_collectives_abort(struct mokd_group *group)
{
    struct mokd_collective *collective;

    while ((collective = TAILQ_FIRST(&group->collectives))) {
        for (uint32_t rank = 0; rank < group->size; rank++) {
            struct entry *entry = &collective->entry[rank];
            struct mokd_error failure = { 0 };
            if (!entry->call.session)
                continue;
            mokd_member_failure(group->member[rank], &failure);
            mokd_call_fail(&entry->call, &failure);
        }
        collective_free(collective);
    }
}

/* ------------------------------------------------------------------ saying the same */

static const struct group_params *params_of(const void *cookie, uint32_t rank)
{
    const struct mokd_collective *collective = cookie;
    return &collective->entry[rank].params;
}

static int compare(const struct mokd_collective *collective, struct mokd_error *error)
{
    struct group_calls calls = { .size = collective->group->size, .params = params_of, .cookie = collective };
    struct group_error differ;

    int r = group_agree(&calls, &differ);
    return r < 0 ? mokd_error_set(error, r, "%s", differ.text) : 0;
}

/* ------------------------------------------------------------------ calling */

/* All ranks agree; calls of other nodes' ranks are theirs to answer. `object` is the new thing's id. */
static void run(struct mokd_collective *collective, uint32_t object)
{
    struct mokd_group *group = collective->group;
    struct mokd_call calls[MOK_MAX_EP];
    struct mok_layer_spec specs[MOK_MAX_EP];
    struct mokd_job job = { .index = collective->index + 1, .id = object };
    uint32_t first = 0;

    while (first + 1 < group->size && !collective->entry[first].arrived)
        first++;
    uint32_t kind = collective->entry[first].params.kind;
    uint64_t bytes = collective->entry[first].params.bytes;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        calls[rank] = collective->entry[rank].call;
        specs[rank] = collective->entry[rank].params.spec;
    }
    collective_free(collective);
    if (kind == GROUP_ALLOC)
        mokd_symmetric_alloc(group, &job, calls, bytes);
    else
        mokd_layer_make(group, &job, calls, specs);
}

static void all_called(struct mokd_collective *collective)
{
    if (collective->failure.code == 0 && compare(collective, &collective->failure) == 0) {
        run(collective, mokd_server_next_id(collective->group->server));
        return;
    }
    fail_waiting(collective);
    collective_free(collective);
}

static int arrive(struct mokd_member *member, uint64_t timeout_ms, struct mokd_collective **ret)
{
    struct mokd_collective *collective = collective_get(member->group, member->next_collective);
    if (!collective)
        return -MOK_ENOMEM;
    struct entry *entry = &collective->entry[member->rank];
    if (timeout_ms > 0 && !member->group->span) { /* else the lead counts it */
        entry->timeout_ms = timeout_ms;
        entry->deadline = mokd_timer_start(&member->group->server->loop, timeout_ms, overdue, entry);
        if (!entry->deadline)
            return -MOK_ENOMEM; /* the object stays for the other ranks */
    }
    *ret = collective;
    return 0;
}

static void ask_lead(struct mokd_member *member, struct mokd_collective *collective, const struct group_params *params,
                     uint64_t timeout_ms)
{
    struct entry *entry = &collective->entry[member->rank];
    struct mokd_error error;

    int r = mokd_rack_call(member, collective->index, params, timeout_ms);
    if (r == 0 || !entry->call.session)
        return;
    mokd_error_set(&error, r, "group %s: the lead of its ranks cannot be asked", member->group->name);
    mokd_call_fail(&entry->call, &error);
}

/* The lead counts from 1: its call 0 is the opening. */
void mokd_collective_prepare(struct mokd_group *group, uint64_t index, uint32_t object)
{
    struct mokd_collective *collective = find(group, index - 1);

    if (collective)
        run(collective, object);
}

bool mokd_collective_refuse(struct mokd_group *group, uint64_t index, const struct mokd_error *error)
{
    struct mokd_collective *collective = find(group, index - 1);

    if (!collective)
        return false;
    collective->failure = *error;
    fail_waiting(collective);
    if (collective->arrived == group->joined)
        collective_free(collective);
    else
        forget_oldest(group);
    return true;
}

void mokd_collective_call(struct mokd_member *member, uint64_t id, const struct group_params *params,
                          uint64_t timeout_ms)
{
    struct mokd_collective *collective = NULL;
    struct mokd_error error = { 0 };

    if (is_forgotten(member->group, member->next_collective)) {
        member->next_collective++;
        mokd_error_set(&error, -MOK_ETIMEDOUT, "group %s: other ranks gave this call of rank %u up long ago",
                       member->group->name, member->rank);
    } else if (arrive(member, timeout_ms, &collective) < 0) {
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    }
    if (!collective) {
        mokd_session_refuse(member->session, id, &error);
        return;
    }
    struct entry *entry = &collective->entry[member->rank];
    member->next_collective++;
    entry->call = mokd_call_begin(member->session, id);
    entry->params = *params;
    entry->arrived = true;
    collective->arrived++;
    if (member->group->span)
        ask_lead(member, collective, params, timeout_ms);
    else if (collective->arrived == member->group->size)
        all_called(collective);
    else if (collective->failure.code < 0)
        fail_waiting(collective);
}
