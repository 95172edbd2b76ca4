/* SPDX-License-Identifier: Apache-2.0 */
#include "span.h"

#include <stdio.h>
#include <string.h>

#include "rack_groups.h"

/* A link comes within a moment of the mesh's; longer than this, it does not come. */
#define LINK_MS 5000u
/* Handles that other nodes may hand in for one group. */
#define MAX_FOREIGN 65536u
/* Aborts that are kept for one group: more than it can have calls under way here. What a lead says beyond is made up.
 */
#define MAX_ABORTED 1024u

/* ------------------------------------------------------------------ the object */

struct mokd_span *mokd_span_new(const struct group_roster *roster)
{
    struct mokd_span *span = calloc(1, sizeof(*span));

    if (!span)
        return NULL;
    span->roster = roster;
    TAILQ_INIT(&span->waits);
    TAILQ_INIT(&span->foreign);
    TAILQ_INIT(&span->aborted);
    return span;
}

static void foreign_free(struct mokd_span *span, struct mokd_foreign *foreign)
{
    TAILQ_REMOVE(&span->foreign, foreign, link);
    span->n_foreign--;
    mok_close(foreign->fd);
    free(foreign);
}

void mokd_span_forget_foreign(struct mokd_group *group, struct mokd_foreign *foreign)
{
    foreign_free(group->span, foreign);
}

static void aborted_free(struct mokd_span *span, struct mokd_aborted *aborted)
{
    TAILQ_REMOVE(&span->aborted, aborted, link);
    span->n_aborted--;
    free(aborted);
}

void mokd_span_free(struct mokd_span *span)
{
    struct mokd_foreign *foreign;
    struct mokd_aborted *aborted;

    if (!span)
        return;
    while ((foreign = TAILQ_FIRST(&span->foreign)))
        foreign_free(span, foreign);
    while ((aborted = TAILQ_FIRST(&span->aborted)))
        aborted_free(span, aborted);
    free(span);
}

bool mokd_span_is_here(const struct mokd_group *group, uint32_t rank)
{
    return !group->span || mokd_rack_is_self(group->server, group->span->roster->rank[rank].node);
}

const char *mokd_span_node(const struct mokd_group *group, uint32_t rank)
{
    return group->span ? mokd_rack_name(group->server, group->span->roster->rank[rank].node) : "";
}

/* The first rank of a rank's node, for walks that visit each node once. */
static bool is_first_of_node(const struct group_roster *roster, uint32_t rank)
{
    for (uint32_t before = 0; before < rank; before++)
        if (roster->rank[before].node == roster->rank[rank].node)
            return false;
    return true;
}

/* ------------------------------------------------------------------ waiting */

static void failure_of(const struct mokd_group *group, struct mokd_error *ret)
{
    mokd_error_set(ret, -MOK_EPEER, "group %s: %s", group->name, group->failure);
}

static struct mokd_aborted *find_aborted(const struct mokd_span *span, uint64_t index)
{
    struct mokd_aborted *aborted;

    TAILQ_FOREACH(aborted, &span->aborted, link)
        if (aborted->index == index)
            return aborted;
    return NULL;
}

static void keep_aborted(struct mokd_span *span, uint64_t index, const struct mokd_error *error)
{
    struct mokd_aborted *aborted =
        span->n_aborted < MAX_ABORTED && !find_aborted(span, index) ? calloc(1, sizeof(*aborted)) : NULL;

    if (!aborted)
        return;
    aborted->index = index;
    aborted->error = *error;
    TAILQ_INSERT_TAIL(&span->aborted, aborted, link);
    span->n_aborted++;
}

/* False: no memory, and `done` has been told. */
static bool begin_wait(struct mokd_group *group, const struct mokd_wait *what)
{
    struct mokd_wait *wait = malloc(sizeof(*wait));
    struct mokd_error error;

    if (!wait) {
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
        what->done(what->cookie, &error);
        return false;
    }
    *wait = *what;
    wait->since_ms = mokd_rack_now_ms();
    TAILQ_INSERT_TAIL(&group->span->waits, wait, link);
    return true;
}

/*
 * Whether the call is over before it was prepared here: somebody else could not. It stays so until that is asked for.
 */
static bool is_over(const struct mokd_group *group, uint64_t index, struct mokd_error *error)
{
    const struct mokd_aborted *aborted = group->span ? find_aborted(group->span, index) : NULL;

    if (group->span && group->state == MOKD_GROUP_FAILED)
        failure_of(group, error);
    else if (aborted)
        *error = aborted->error;
    return error->code < 0;
}

/* Takes it out, then calls. */
static void end_wait(struct mokd_span *span, struct mokd_wait *wait, const struct mokd_error *error)
{
    struct mokd_wait ended = *wait;

    TAILQ_REMOVE(&span->waits, wait, link);
    free(wait);
    ended.done(ended.cookie, error);
}

void mokd_span_abort(struct mokd_group *group)
{
    struct mokd_wait *wait;
    struct mokd_error error;

    if (!group->span)
        return;
    failure_of(group, &error);
    mokd_group_run_begin(group); /* who is called may let go of the last thing that keeps it */
    while ((wait = TAILQ_FIRST(&group->span->waits)))
        end_wait(group->span, wait, &error);
    mokd_group_run_end(group);
}

/* ------------------------------------------------------------------ ways for memory */

bool mokd_span_is_across(const struct mokd_group *group)
{
    return group->span && group->span->across;
}

/* The devices of two nodes' ranks, or (NOBODY) of all, must all export memory by fabric handles. */
static int check_fabric(const struct mokd_group *group, uint32_t a, uint32_t b, const char *why,
                        struct mokd_error *error)
{
    const struct group_roster *roster = group->span->roster;

    for (uint32_t rank = 0; rank < group->size; rank++) {
        const struct group_rank *entry = &roster->rank[rank];
        if (entry->fabric || (a != GROUP_MAX_NODES && entry->node != a && entry->node != b))
            continue;
        return mokd_error_set(error, -MOK_ENOTSUP, "%s%srank %u (node %s) exports no fabric handles: %s", why,
                              why[0] ? ", and " : "", rank, mokd_span_node(group, rank),
                              entry->no_fabric[0] ? entry->no_fabric : "its node says nothing of them");
    }
    return 0;
}

/* 1: to all nodes, with *ret_across by the fabric to some; 0: not known yet; negative: to some there is none. */
static int look_at_paths(const struct mokd_group *group, bool *ret_across, struct mokd_error *error)
{
    const struct group_roster *roster = group->span->roster;
    bool all = true;

    *ret_across = false;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        struct mokd_error why = { 0 }, lacks;
        if (mokd_span_is_here(group, rank) || !is_first_of_node(roster, rank))
            continue;
        uint32_t node = roster->rank[rank].node;
        enum mokd_path path = mokd_rack_path(group->server, node, &why);
        if (path == MOKD_PATH_FABRIC) {
            *ret_across = true;
            if (check_fabric(group, mokd_rack_self(group->server), node, why.text, &lacks) < 0) {
                why = lacks;
                path = MOKD_PATH_NONE;
            }
        }
        if (path == MOKD_PATH_NONE)
            return mokd_error_set(error, -MOK_ENOTSUP,
                                  "no way for memory between node %s and node %s (rank %u): %.300s",
                                  mokd_rack_own_name(group->server), mokd_span_node(group, rank), rank, why.text);
        all &= path != MOKD_PATH_UNKNOWN;
    }
    return all;
}

void mokd_span_reach(struct mokd_group *group, uint64_t index, mokd_span_done done, void *cookie)
{
    struct mokd_wait wait = { .what = MOKD_WAIT_LINKS, .index = index, .done = done, .cookie = cookie };
    struct mokd_error error = { 0 };
    int r = 1;

    if (group->span && !is_over(group, index, &error))
        r = look_at_paths(group, &group->span->across, &error);
    if (r == 0)
        begin_wait(group, &wait);
    else
        done(cookie, &error);
}

/* ------------------------------------------------------------------ handles */

static struct mokd_foreign *find_foreign(const struct mokd_group *group, uint32_t kind, uint32_t object, uint32_t rank)
{
    struct mokd_foreign *foreign;

    TAILQ_FOREACH(foreign, &group->span->foreign, link)
        if (foreign->kind == kind && foreign->object == object && foreign->rank == rank)
            return foreign;
    return NULL;
}

struct mokd_handle mokd_span_handle_of(const struct mokd_group *group, uint32_t kind, uint32_t object, uint32_t rank)
{
    const struct mokd_foreign *foreign = group->span ? find_foreign(group, kind, object, rank) : NULL;

    if (!foreign)
        return (struct mokd_handle){ .fd = -1 };
    return (struct mokd_handle){ .fd = foreign->fd, .fabric = foreign->by_fabric ? foreign->fabric : NULL };
}

struct mokd_handle mokd_storage_handle(const struct mokd_storage *storage)
{
    return (struct mokd_handle){ .fd = storage->fd, .fabric = storage->fabric ? storage->handle : NULL };
}

static bool is_settled(const struct mokd_span *span, uint32_t object)
{
    for (uint32_t i = 0; i < span->n_over && i < MOKD_SPAN_OVER; i++)
        if (span->over[i] == object)
            return true;
    return false;
}

void mokd_span_settle(struct mokd_group *group, uint32_t object, bool mapped)
{
    struct mokd_foreign *foreign = group->span ? TAILQ_FIRST(&group->span->foreign) : NULL;

    if (group->span && !mapped)
        group->span->over[group->span->n_over++ % MOKD_SPAN_OVER] = object;
    while (foreign) {
        struct mokd_foreign *next = TAILQ_NEXT(foreign, link);
        if (foreign->object == object) {
            foreign->fd = mok_close(foreign->fd);
            foreign->by_fabric = false;
            foreign->mapped = mapped;
            if (!mapped || foreign->kind != MOK__HANDLE_KIND__HANDLE_BUFFER)
                foreign_free(group->span, foreign);
        }
        foreign = next;
    }
}

/* Fabric handles are of no use where the flags of a group are this host's. */
static bool has(const struct mokd_group *group, uint32_t kind, uint32_t object, uint32_t rank)
{
    const struct mokd_foreign *foreign = find_foreign(group, kind, object, rank);

    if (!foreign)
        return false;
    return kind == MOK__HANDLE_KIND__HANDLE_BELL || foreign->fd >= 0 || (group->span->across && foreign->by_fabric);
}

static bool has_all(const struct mokd_group *group, uint32_t kind, uint32_t object)
{
    for (uint32_t rank = 0; rank < group->size; rank++) {
        bool wanted = kind == MOK__HANDLE_KIND__HANDLE_FLAGS ? rank == 0 : true;
        if (wanted && !mokd_span_is_here(group, rank) && !has(group, kind, object, rank))
            return false;
    }
    return true;
}

static int hand_to_all(struct mokd_group *group, uint32_t kind, uint32_t object, uint32_t rank, uint64_t bytes,
                       const struct mokd_handle *own)
{
    const struct group_roster *roster = group->span->roster;
    Mok__Handle handle = MOK__HANDLE__INIT;
    int r = 0;

    handle.group = group->id;
    handle.kind = kind;
    handle.object = object;
    handle.rank = rank;
    handle.bytes = bytes;
    handle.across = kind == MOK__HANDLE_KIND__HANDLE_BELL && group->span->across;
    for (uint32_t other = 0; other < group->size && r == 0; other++)
        if (!mokd_span_is_here(group, other) && is_first_of_node(roster, other))
            r = mokd_rack_hand(group->server, roster->rank[other].node, &handle, own);
    return r;
}

/*
 * All have said whether they have a node of the group on another host. One that has makes it so for all, which all
 * learn from the same words; then every device has to have fabric handles.
 */
static int take_bells(struct mokd_group *group, struct mokd_error *error)
{
    const struct mokd_foreign *foreign;

    TAILQ_FOREACH(foreign, &group->span->foreign, link)
        if (foreign->kind == MOK__HANDLE_KIND__HANDLE_BELL)
            group->span->across |= foreign->across;
    if (!group->span->across)
        return 0;
    return check_fabric(group, GROUP_MAX_NODES, GROUP_MAX_NODES, "the group is on several hosts", error);
}

static void end_exchange(struct mokd_group *group, struct mokd_wait *wait)
{
    struct mokd_error error = { 0 };

    if (wait->kind == MOK__HANDLE_KIND__HANDLE_BELL)
        take_bells(group, &error);
    end_wait(group->span, wait, &error);
}

void mokd_span_exchange(struct mokd_group *group, uint64_t index, uint32_t kind, uint32_t object,
                        const struct mokd_handle *own, uint64_t bytes, mokd_span_done done, void *cookie)
{
    struct mokd_wait wait = {
        .what = MOKD_WAIT_HANDLES, .index = index, .kind = kind, .object = object, .done = done, .cookie = cookie
    };
    struct mokd_error error = { 0 };
    uint32_t ranks = kind == MOK__HANDLE_KIND__HANDLE_FLAGS ? 1 : group->size;
    int r = is_over(group, index, &error) ? error.code : 0;

    for (uint32_t rank = 0; group->span && rank < ranks && r == 0; rank++) {
        if (!mokd_span_is_here(group, rank))
            continue;
        r = hand_to_all(group, kind, object, rank, bytes, &own[rank]);
        if (r < 0)
            mokd_error_set(&error, r, "the other nodes' daemons do not take handles of memory");
    }
    if (r == 0 && group->span && !has_all(group, kind, object)) {
        begin_wait(group, &wait);
        return;
    }
    if (r == 0 && group->span && kind == MOK__HANDLE_KIND__HANDLE_BELL)
        take_bells(group, &error);
    done(cookie, &error);
}

void mokd_span_handle(struct mokd_group *group, const struct mokd_foreign *what)
{
    _cleanup_fd_ int owned = what->fd;
    struct mokd_span *span = group->span;
    struct mokd_wait *wait, *next;

    if (what->rank >= group->size || is_settled(span, what->object) ||
        find_foreign(group, what->kind, what->object, what->rank) || span->n_foreign >= MAX_FOREIGN)
        return;
    struct mokd_foreign *foreign = malloc(sizeof(*foreign));
    if (!foreign)
        return; /* who waits for it is told by the lead's deadline */
    *foreign = *what;
    foreign->mapped = false;
    foreign->fd = mok_take_fd(&owned);
    TAILQ_INSERT_TAIL(&span->foreign, foreign, link);
    span->n_foreign++;
    mokd_group_run_begin(group);
    for (wait = TAILQ_FIRST(&span->waits); wait; wait = next) {
        next = TAILQ_NEXT(wait, link);
        if (wait->what == MOKD_WAIT_HANDLES && wait->kind == what->kind && wait->object == what->object &&
            has_all(group, wait->kind, wait->object)) {
            end_exchange(group, wait);
            break;
        }
    }
    mokd_group_run_end(group);
}

void mokd_span_look(struct mokd_group *group, uint64_t now_ms)
{
    struct mokd_wait *wait, *next;

    mokd_group_run_begin(group);
    for (wait = TAILQ_FIRST(&group->span->waits); wait; wait = next) {
        struct mokd_error error = { 0 };
        next = TAILQ_NEXT(wait, link);
        if (wait->what != MOKD_WAIT_LINKS)
            continue;
        int r = look_at_paths(group, &group->span->across, &error);
        if (r == 0 && now_ms - wait->since_ms > LINK_MS)
            r = mokd_error_set(&error, -MOK_ENOTSUP, "no way for memory to all nodes of the group within %u ms",
                               LINK_MS);
        if (r == 0)
            continue;
        end_wait(group->span, wait, &error);
        next = TAILQ_FIRST(&group->span->waits);
    }
    mokd_group_run_end(group);
}

/* ------------------------------------------------------------------ all or nobody */

void mokd_span_prepared(struct mokd_group *group, uint64_t index, const struct mokd_error *error, uint32_t rank,
                        mokd_span_done done, void *cookie)
{
    struct mokd_wait wait = { .what = MOKD_WAIT_VERDICT, .index = index, .done = done, .cookie = cookie };
    struct mokd_error failure;
    struct group_error told;

    if (!group->span) {
        done(cookie, error);
        return;
    }
    if (group->state == MOKD_GROUP_FAILED) {
        failure_of(group, &failure);
        done(cookie, &failure);
        return;
    }
    struct mokd_aborted *aborted = find_aborted(group->span, index);
    if (aborted) {
        failure = aborted->error;
        aborted_free(group->span, aborted);
        done(cookie, &failure);
        return;
    }
    told = (struct group_error){ .code = error->code, .rank = rank };
    snprintf(told.text, sizeof(told.text), "node %s: %.300s", mokd_rack_own_name(group->server), error->text);
    mokd_group_run_begin(group);
    if (!begin_wait(group, &wait))
        group_error_set(&told, -MOK_ENOMEM, rank, "mokd is out of memory");
    mokd_rack_prepared(group, index, told.code < 0 ? &told : NULL);
    mokd_group_run_end(group);
}

static struct mokd_wait *find_wait(const struct mokd_span *span, uint64_t index)
{
    struct mokd_wait *wait;

    TAILQ_FOREACH(wait, &span->waits, link)
        if (wait->index == index)
            return wait;
    return NULL;
}

/*
 * An abort may come while the call is still prepared here. It is kept for whoever asks for the verdict, and ends the
 * wait for what a node that gave up does not hand over any more.
 */
void mokd_span_verdict(struct mokd_group *group, uint64_t index, const struct mokd_error *error)
{
    struct mokd_wait *wait = find_wait(group->span, index);

    if (wait && wait->what == MOKD_WAIT_VERDICT) {
        end_wait(group->span, wait, error);
        return;
    }
    if (error->code >= 0)
        return;
    keep_aborted(group->span, index, error);
    if (wait)
        end_wait(group->span, wait, error);
}
