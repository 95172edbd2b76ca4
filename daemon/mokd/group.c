/* SPDX-License-Identifier: Apache-2.0 */
#include "group.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "admission.h"
#include "buffer.h"
#include "collective.h"
#include "layer.h"
#include "names.h"
#include "rack_groups.h"
#include "span.h"
#include "state.h"
#include "talk.h"
#include "timer.h"

bool mokd_group_has_rank_on(const struct mokd_group *group, const struct mokd_device *device)
{
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->member[rank] && group->member[rank]->device == device)
            return true;
    return false;
}

const char *mokd_group_state_text(enum mokd_group_state state)
{
    switch (state) {
    case MOKD_GROUP_FORMING:
    case MOKD_GROUP_OPENING:
        return "forming";
    case MOKD_GROUP_READY:
        return "ready";
    case MOKD_GROUP_FAILED:
        return "failed";
    case MOKD_GROUP_SUSPENDED:
        return "suspended";
    }
    return "?";
}

/* ------------------------------------------------------------------ the objects */

struct mokd_group *mokd_group_adopt(struct mokd_server *server, uint32_t id, uid_t uid, const char *name, uint32_t size)
{
    struct mokd_group *group = calloc(1, sizeof(*group) + size * sizeof(group->member[0]));

    if (!group)
        return NULL;
    group->server = server;
    group->id = id;
    group->state = MOKD_GROUP_SUSPENDED;
    group->uid = uid;
    group->size = size;
    snprintf(group->name, sizeof(group->name), "%s", name);
    TAILQ_INIT(&group->collectives);
    TAILQ_INIT(&group->layers);
    TAILQ_INSERT_TAIL(&server->groups, group, link);
    return group;
}

static struct mokd_group *group_new(struct mokd_server *server, uid_t uid, const char *name, uint32_t size)
{
    struct mokd_group *group = mokd_group_adopt(server, mokd_server_next_id(server), uid, name, size);

    if (group)
        group->state = MOKD_GROUP_FORMING;
    return group;
}

void mokd_group_collect(struct mokd_group *group)
{
    if (group->joined > 0 || group->running > 0)
        return;
    TAILQ_REMOVE(&group->server->groups, group, link);
    mokd_rack_forget(group);
    mokd_span_free(group->span);
    free(group);
}

struct mokd_member *mokd_member_adopt(struct mokd_group *group, struct mokd_session *session,
                                      struct mokd_device *device, uint32_t rank)
{
    struct mokd_member *member = calloc(1, sizeof(*member));

    if (!member)
        return NULL;
    member->group = group;
    member->session = session;
    member->device = device;
    member->rank = rank;
    TAILQ_INIT(&member->buffers);
    group->member[rank] = member;
    group->joined++;
    TAILQ_INSERT_TAIL(&session->members, member, link);
    session->n_members++;
    device->n_ranks++;
    if (group->exclusive)
        device->exclusive = group;
    return member;
}

/* May free the group. */
static void member_free(struct mokd_member *member)
{
    struct mokd_group *group = member->group;

    mokd_rack_withdraw(member, NULL);
    mokd_timer_cancel(&member->deadline);
    group->member[member->rank] = NULL;
    group->joined--;
    mokd_state_touch(group->server);
    TAILQ_REMOVE(&member->session->members, member, link);
    member->session->n_members--;
    mokd_user_give(member->session->user, MOKD_GROUPS, 1);
    member->device->n_ranks--;
    if (member->device->exclusive == group)
        member->device->exclusive = NULL;
    mokd_device_emptier(member->device);
    free(member);
    mokd_group_collect(group);
}

int mokd_member_find(const struct mokd_session *session, uint32_t id, struct mokd_member **ret,
                     struct mokd_error *error)
{
    struct mokd_member *member;

    TAILQ_FOREACH(member, &session->members, link)
        if (member->group->id == id)
            break;
    if (!member || member->leaving || member->group->state < MOKD_GROUP_READY)
        return mokd_error_set(error, -MOK_ENOENT, "group = %u: the session is in no such group", id);
    if (member->group->state == MOKD_GROUP_FAILED) {
        mokd_member_failure(member, error);
        return error->code;
    }
    if (member->group->state == MOKD_GROUP_SUSPENDED)
        return mokd_error_set(error, -MOK_EBUSY, "group %s: it is being restored after a restart of mokd",
                              member->group->name);
    *ret = member;
    return 0;
}

void mokd_member_failure(const struct mokd_member *member, struct mokd_error *error)
{
    const struct mokd_group *group = member->group;
    int code = group->lost && group->lost == member->device ? -MOK_EWORKER : -MOK_EPEER;

    mokd_error_set(error, code, "group %s: %s", group->name, group->failure);
}

/* ------------------------------------------------------------------ failing */

static void tell_worker(struct mokd_member *member, const struct mokd_error *error, uint32_t rank)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerGroupFail body = MOK__WORKER_GROUP_FAIL__INIT;

    body.group = member->group->id;
    body.code = error->code;
    body.rank = rank;
    body.text = (char *)error->text;
    request.body_case = MOK__WORKER_REQUEST__BODY_GROUP_FAIL;
    request.group_fail = &body;
    mokd_device_send(member->device, &request, NULL, 0, MOKD_WORKER_TIMEOUT_MS, NULL, NULL, 0);
}

static void tell_client(struct mokd_member *member, const struct mokd_error *error, uint32_t rank)
{
    Mok__Reply event = MOK__REPLY__INIT;
    Mok__GroupFailed body = MOK__GROUP_FAILED__INIT;

    body.group = member->group->id;
    body.rank = rank;
    event.code = error->code;
    event.text = (char *)error->text;
    event.body_case = MOK__REPLY__BODY_GROUP_FAILED;
    event.group_failed = &body;
    mokd_session_event(member->session, &event);
}

/* A rank that leaves in order fails the group for the others too, who are mostly about to do the same. */
static void log_failure(const struct mokd_group *group, const char *text)
{
    char clean[MOKD_TEXT_MAX];

    mokd_log_of(group->uid, MOK_LOG_INFO, "group", "failed", "group=%u name=%s uid=%u rank=%u error=\"%s\"", group->id,
                group->name, group->uid, group->fault_rank, mok_log_text(clean, sizeof(clean), text));
}

/*
 * Tells everyone at once: operations that need the rank end, calls that wait end. `lost` is the device whose worker
 * died, if that is the reason. Ends no session. Callers keep the group, since what waited may have been the last that
 * kept its ranks.
 */
static void group_fail(struct mokd_group *group, uint32_t rank, const struct mokd_device *lost, const char *text)
{
    struct mokd_error error = { 0 };

    if (group->state == MOKD_GROUP_FORMING || group->state == MOKD_GROUP_FAILED)
        return;
    group->state = MOKD_GROUP_FAILED;
    mokd_state_touch(group->server);
    group->fault_rank = rank;
    group->lost = lost;
    snprintf(group->failure, sizeof(group->failure), "%s", text);
    log_failure(group, text);
    for (uint32_t r = 0; r < group->size; r++) {
        struct mokd_member *member = group->member[r];
        if (!member)
            continue;
        mokd_member_failure(member, &error);
        if (member->leaving)
            error.code = -MOK_ECANCELED;
        if (member->opened && member->device != lost)
            tell_worker(member, &error, rank);
        if (!member->leaving)
            tell_client(member, &error, rank);
    }
    mokd_collectives_abort(group);
    mokd_layers_forsake(group);
    mokd_rack_over(group, rank, text);
    for (uint32_t r = 0; r < group->size; r++)
        if (group->member[r])
            mokd_session_recovered(group->member[r]->session);
    mokd_span_abort(group);
}

void mokd_group_fail(struct mokd_group *group, uint32_t rank, const char *text)
{
    mokd_group_run_begin(group);
    group_fail(group, rank, NULL, text);
    mokd_group_run_end(group);
}

struct mokd_group *mokd_group_walk(struct mokd_server *server, struct mokd_group *group)
{
    struct mokd_group *next = group ? TAILQ_NEXT(group, link) : TAILQ_FIRST(&server->groups);

    if (next)
        mokd_group_run_begin(next);
    if (group)
        mokd_group_run_end(group);
    return next;
}

/* One that nobody but the walk holds, and that has not begun to be restored, has lost nothing. */
static bool is_at_workers(const struct mokd_group *group)
{
    return group->state != MOKD_GROUP_SUSPENDED || group->running > 1;
}

void mokd_groups_device_lost(struct mokd_device *device, const char *text)
{
    for (struct mokd_group *group = NULL; (group = mokd_group_walk(device->server, group));) {
        if (!is_at_workers(group))
            continue;
        for (uint32_t rank = 0; rank < group->size; rank++)
            if (group->member[rank] && group->member[rank]->device == device)
                group_fail(group, rank, device, text);
    }
}

void mokd_group_broken(struct mokd_device *device, uint32_t id, int code, uint32_t rank, const char *text)
{
    struct mokd_group *group;
    char sentence[MOKD_TEXT_MAX];

    TAILQ_FOREACH(group, &device->server->groups, link)
        if (group->id == id)
            break;
    if (!group)
        return;
    mokd_log_of(group->uid, MOK_LOG_WARNING, "group", "broken", "group=%u device=%s rank=%u code=%s error=\"%s\"", id,
                device->config->name, rank, mok_error_symbol(code), text);
    snprintf(sentence, sizeof(sentence), "rank %u: %.400s", rank, text);
    mokd_group_fail(group, rank < group->size ? rank : 0, sentence);
}

/* ------------------------------------------------------------------ leaving */

static struct mokd_member *member_of_gather(struct mokd_gather *gather)
{
    return mokd_container_of(gather, struct mokd_member, gather);
}

/* No worker knows of the rank any more. */
static void taken_down(struct mokd_gather *gather)
{
    struct mokd_member *member = member_of_gather(gather);
    struct mokd_session *session = member->session;
    struct mokd_call leave = member->leave;

    mokd_member_layers_gone(member);
    mokd_member_buffers_release(member);
    member_free(member);
    if (leave.session)
        mokd_call_done(&leave);
    mokd_session_unref(session);
}

/* The rank's own worker drops all that it has of the group; the others drop this rank's copies. */
static void take_down(struct mokd_member *member)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerGroupClose body = MOK__WORKER_GROUP_CLOSE__INIT;

    member->going = true;
    mokd_gather_begin(&member->gather, taken_down);
    if (member->opened) {
        body.group = member->group->id;
        request.body_case = MOK__WORKER_REQUEST__BODY_GROUP_CLOSE;
        request.group_close = &body;
        mokd_gather_send(&member->gather, member->device, &request, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS, member->rank);
    }
    mokd_member_buffers_unmap(member, &member->gather);
    mokd_gather_end(&member->gather);
}

/* Ends with the rank gone, as soon as nothing is under way in the group. */
static void leave(struct mokd_member *member, const char *text)
{
    if (member->leaving)
        return;
    member->leaving = true;
    mokd_session_ref(member->session);
    mokd_group_fail(member->group, member->rank, text); /* its end takes the rank down, unless something is under way */
}

void mokd_member_drop(struct mokd_member *member)
{
    char text[96];

    snprintf(text, sizeof(text), "rank %u does not know the group: it was made as mokd ended", member->rank);
    leave(member, text);
}

void mokd_group_run_begin(struct mokd_group *group)
{
    group->running++;
}

void mokd_group_run_end(struct mokd_group *group)
{
    if (--group->running > 0)
        return;
    group->running++; /* while this walks over it */
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->member[rank] && group->member[rank]->leaving && !group->member[rank]->going)
            take_down(group->member[rank]);
    group->running--;
    mokd_group_collect(group);
}

void mokd_group_leave(struct mokd_session *session, uint64_t id, const Mok__GroupLeave *request)
{
    struct mokd_member *member;
    struct mokd_error error = { 0 };
    char text[64];

    TAILQ_FOREACH(member, &session->members, link)
        if (member->group->id == request->group)
            break;
    if (!member || member->leaving || member->group->state < MOKD_GROUP_READY) {
        mokd_error_set(&error, -MOK_ENOENT, "group = %u: the session is in no such group", request->group);
        mokd_session_refuse(session, id, &error);
        return;
    }
    snprintf(text, sizeof(text), "rank %u left", member->rank);
    mokd_log_of(member->group->uid, MOK_LOG_INFO, "group", "rank left", "group=%u name=%s rank=%u session=%" PRIu64,
                member->group->id, member->group->name, member->rank, session->id);
    member->leave = mokd_call_begin(session, id);
    leave(member, text);
}

/* Its call ends with `error`; the rank makes room, or goes the long way if its worker knows of it. */
void mokd_group_join_failed(struct mokd_member *member, const struct mokd_error *error)
{
    struct mokd_call call = member->join;

    member->join.session = NULL;
    if (member->group->state == MOKD_GROUP_FORMING)
        member_free(member);
    else
        leave(member, error->text);
    mokd_call_fail(&call, error);
}

void mokd_members_fail(struct mokd_session *session)
{
    struct mokd_member *member, *next;
    struct mokd_error error = { 0 };
    char text[96];

    mokd_error_set(&error, -MOK_ESESSION, "the session ended");
    for (member = TAILQ_FIRST(&session->members); member; member = next) {
        next = TAILQ_NEXT(member, link);
        if (member->group->state == MOKD_GROUP_FORMING) {
            mokd_group_join_failed(member, &error);
            continue;
        }
        snprintf(text, sizeof(text), "rank %u is gone: session %" PRIu64 " ended", member->rank, session->id);
        mokd_group_fail(member->group, member->rank, text);
    }
}

void mokd_members_leave(struct mokd_session *session)
{
    struct mokd_member *member, *next;

    for (member = TAILQ_FIRST(&session->members); member; member = next) {
        next = TAILQ_NEXT(member, link);
        leave(member, "the session ended");
    }
}

/* ------------------------------------------------------------------ opening */

static void answer_join(struct mokd_member *member)
{
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__GroupJoinReply body = MOK__GROUP_JOIN_REPLY__INIT;

    body.group = member->group->id;
    reply.body_case = MOK__REPLY__BODY_GROUP_JOIN;
    reply.group_join = &body;
    mokd_call_reply(&member->join, &reply, NULL, 0);
}

/* All nodes are done, or none is: `error` says. */
static void opening_over(void *cookie, const struct mokd_error *error)
{
    struct mokd_group *group = cookie;
    struct mokd_error why = *error;
    char text[MOKD_TEXT_MAX];

    if (error->code < 0 && group->state == MOKD_GROUP_OPENING) {
        uint32_t rank = group->gather.first_tag;
        if (group->span)
            snprintf(text, sizeof(text), "%s", error->text);
        else
            snprintf(text, sizeof(text), "rank %u: %.400s", rank, error->text);
        group_fail(group, rank, NULL, text);
    }
    if (group->state == MOKD_GROUP_OPENING) {
        group->state = MOKD_GROUP_READY;
        mokd_state_touch(group->server);
        mokd_log_of(group->uid, MOK_LOG_INFO, "group", "ready", "group=%u name=%s uid=%u size=%u here=%u hosts=%s",
                    group->id, group->name, group->uid, group->size, group->joined,
                    mokd_span_is_across(group) ? "several" : "one");
    }
    for (uint32_t rank = 0; rank < group->size; rank++) {
        struct mokd_member *member = group->member[rank];
        if (!member)
            continue;
        if (group->state == MOKD_GROUP_READY) {
            answer_join(member);
            continue;
        }
        if (error->code == 0)
            mokd_member_failure(member, &why);
        mokd_group_join_failed(member, &why);
    }
    mokd_group_run_end(group);
}

static uint32_t first_here(const struct mokd_group *group)
{
    uint32_t rank = 0;

    while (rank + 1 < group->size && !group->member[rank])
        rank++;
    return rank;
}

/* Our part of the opening is done, or could not be. */
static void part_opened(struct mokd_group *group, const struct mokd_error *error)
{
    uint32_t rank = error->code < 0 ? group->gather.first_tag : 0;

    mokd_span_settle(group, 0, false);
    mokd_span_prepared(group, 0, error, rank, opening_over, group);
}

static void opened(struct mokd_gather *gather)
{
    struct mokd_group *group = mokd_container_of(gather, struct mokd_group, gather);
    struct mokd_error error = gather->first;

    if (error.code < 0 && group->span)
        mokd_error_set(&error, gather->first.code, "rank %u: %.300s", gather->first_tag, gather->first.text);
    part_opened(group, &error);
}

void mokd_group_send_open(struct mokd_group *group, struct mokd_gather *gather)
{
    bool across = mokd_span_is_across(group);
    int bells[MOK_MAX_EP];

    for (uint32_t rank = 0; rank < group->size; rank++)
        bells[rank] = group->member[rank] ? group->member[rank]->device->bell
                                          : mokd_span_handle_of(group, MOK__HANDLE_KIND__HANDLE_BELL, 0, rank).fd;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
        Mok__WorkerGroupOpen body = MOK__WORKER_GROUP_OPEN__INIT;
        struct mokd_member *member = group->member[rank];
        if (!member)
            continue;
        member->opened = true;
        body.group = group->id;
        body.session = member->session->id;
        body.size = group->size;
        body.rank = rank;
        body.name = group->name;
        body.across = across;
        request.body_case = MOK__WORKER_REQUEST__BODY_GROUP_OPEN;
        request.group_open = &body;
        mokd_gather_send(gather, member->device, &request, bells, across ? 0 : group->size, MOKD_WORKER_TIMEOUT_MS,
                         rank);
    }
}

/* The bells of all ranks are here. */
static void bells_came(void *cookie, const struct mokd_error *error)
{
    struct mokd_group *group = cookie;

    if (error->code < 0) {
        part_opened(group, error);
        return;
    }
    mokd_gather_begin(&group->gather, opened);
    mokd_group_send_open(group, &group->gather);
    mokd_gather_end(&group->gather);
}

static void reached(void *cookie, const struct mokd_error *error)
{
    struct mokd_group *group = cookie;
    struct mokd_handle bells[MOK_MAX_EP];

    if (error->code < 0) {
        part_opened(group, error);
        return;
    }
    for (uint32_t rank = 0; rank < group->size; rank++)
        bells[rank] = (struct mokd_handle){ .fd = group->member[rank] ? group->member[rank]->device->bell : -1 };
    mokd_span_exchange(group, 0, MOK__HANDLE_KIND__HANDLE_BELL, 0, bells, sizeof(uint64_t), bells_came, group);
}

static void open_group(struct mokd_group *group)
{
    group->state = MOKD_GROUP_OPENING;
    mokd_group_run_begin(group);
    for (uint32_t rank = 0; rank < group->size; rank++) {
        if (!group->member[rank])
            continue;
        mokd_timer_cancel(&group->member[rank]->deadline);
        mokd_rack_withdraw(group->member[rank], NULL);
    }
    group->gather.first_tag = first_here(group);
    mokd_span_reach(group, 0, reached, group);
}

/* The home has let another node's rank in instead of this one, whose refusal is still under way. */
static void turn_away_others(struct mokd_group *group)
{
    for (uint32_t rank = 0; rank < group->size; rank++) {
        struct mokd_member *member = group->member[rank];
        struct mokd_error error;
        if (!member)
            continue;
        const struct group_rank *entry = &group->span->roster->rank[rank];
        if (mokd_span_is_here(group, rank) && entry->join == member->rack_join) {
            member->rack_join = 0; /* it is no join any more */
            continue;
        }
        mokd_error_set(&error, -MOK_ERANK, "rank = %u: taken in group %s by session %" PRIu64 " of node %s", rank,
                       group->name, entry->session, mokd_span_node(group, rank));
        mokd_group_join_failed(member, &error);
    }
}

void mokd_group_come_together(struct mokd_group *group, struct mokd_span *span)
{
    mokd_group_run_begin(group);
    group->id = span->roster->id;
    group->span = span;
    turn_away_others(group);
    open_group(group);
    mokd_group_run_end(group);
}

/* ------------------------------------------------------------------ joining */

static bool is_absent(const void *cookie, uint32_t rank)
{
    const struct mokd_group *group = cookie;
    return !group->member[rank];
}

static void join_overdue(void *cookie)
{
    struct mokd_member *member = cookie;
    struct mokd_group *group = member->group;
    struct mokd_error error = { 0 };
    char missing[200];

    mokd_error_set(&error, -MOK_ETIMEDOUT, "group %s: rank %u waited %" PRIu64 " ms, missing is rank %s", group->name,
                   member->rank, member->timeout_ms,
                   group_missing(group->size, is_absent, group, missing, sizeof(missing)));
    mokd_group_join_failed(member, &error);
}

static int check_request(const struct mokd_session *session, const Mok__GroupJoin *request,
                         struct mokd_device **ret_device, struct mokd_error *error)
{
    size_t devices = session->server->n_devices;
    char clean[MOK_MAX_NAME + 2];

    if (!mok_name_is_valid(request->name))
        return mokd_error_set(error, -MOK_ENAME, "name = %s: must have 1..%d of the characters A-Z a-z 0-9 . _ -",
                              mok_log_text(clean, sizeof(clean), request->name), MOK_MAX_NAME);
    if (request->size < 1 || request->size > MOK_MAX_EP)
        return mokd_error_set(error, -MOK_ERANGE, "size = %u: must be in 1..%u", request->size, MOK_MAX_EP);
    if (request->size > devices && !session->server->rack_groups)
        return mokd_error_set(error, -MOK_ERANGE, "size = %u: each rank has a device of its own, and there are %zu",
                              request->size, devices);
    if (request->rank >= request->size)
        return mokd_error_set(error, -MOK_ERANK, "rank = %u: must be in 0..%u", request->rank, request->size - 1);
    return mokd_session_device(session, request->device, ret_device, error);
}

static struct mokd_group *find_by_name(const struct mokd_session *session, const char *name)
{
    struct mokd_group *group;

    TAILQ_FOREACH(group, &session->server->groups, link)
        if (group->state != MOKD_GROUP_FAILED && group->uid == session->user->uid && strcmp(group->name, name) == 0)
            return group;
    return NULL;
}

/* The ranks that wait can no longer come together with one who expects another size. */
void mokd_group_turn_away(struct mokd_group *group, const struct mokd_error *error)
{
    group->running++; /* it goes with its last rank */
    for (uint32_t rank = 0; rank < group->size; rank++) {
        if (!group->member[rank])
            continue;
        mokd_rack_withdraw(group->member[rank], error); /* and those on other nodes */
        mokd_group_join_failed(group->member[rank], error);
    }
    group->running--;
    mokd_group_collect(group);
}

static int check_fit(struct mokd_group *group, const struct mokd_session *session, const Mok__GroupJoin *request,
                     struct mokd_error *error)
{
    if (request->size != group->size) {
        mokd_error_set(error, -MOK_EMISMATCH, "group %s: rank %u says that the size is %u, ranks before it said %u",
                       group->name, request->rank, request->size, group->size);
        if (group->state == MOKD_GROUP_FORMING)
            mokd_group_turn_away(group, error);
        return error->code;
    }
    if (request->exclusive != group->exclusive) {
        mokd_error_set(error, -MOK_EMISMATCH, "group %s: rank %u asks for devices %s, ranks before it for devices %s",
                       group->name, request->rank, request->exclusive ? "of their own" : "that others may use too",
                       group->exclusive ? "of their own" : "that others may use too");
        if (group->state == MOKD_GROUP_FORMING)
            mokd_group_turn_away(group, error);
        return error->code;
    }
    if (group->member[request->rank])
        return mokd_error_set(error, -MOK_ERANK, "rank = %u: taken in group %s by session %" PRIu64, request->rank,
                              group->name, group->member[request->rank]->session->id);
    if (!mokd_span_is_here(group, request->rank))
        return mokd_error_set(error, -MOK_ERANK, "rank = %u: taken in group %s by session %" PRIu64 " of node %s",
                              request->rank, group->name, group->span->roster->rank[request->rank].session,
                              mokd_span_node(group, request->rank));
    for (uint32_t rank = 0; rank < group->size; rank++) {
        if (!group->member[rank])
            continue;
        if (group->member[rank]->session == session)
            return mokd_error_set(error, -MOK_EEXIST, "group %s: the session is rank %u of it already", group->name,
                                  rank);
        if (group->member[rank]->device->index == request->device)
            return mokd_error_set(error, -MOK_EBUSY, "device = %u: has rank %u of group %s already", request->device,
                                  rank, group->name);
    }
    return 0;
}

/* NULL when out of memory; the rank is charged then no more. */
static struct mokd_member *add_member(struct mokd_session *session, const Mok__GroupJoin *request,
                                      struct mokd_group *group, struct mokd_device *device)
{
    struct mokd_server *server = session->server;

    if (!group) {
        group = group_new(server, session->user->uid, request->name, request->size);
        if (group)
            group->exclusive = request->exclusive;
    }
    struct mokd_member *member = group ? mokd_member_adopt(group, session, device, request->rank) : NULL;
    if (!member) {
        mokd_user_give(session->user, MOKD_GROUPS, 1);
        if (group)
            mokd_group_collect(group);
        return NULL;
    }
    member->timeout_ms = request->timeout_ms;
    if (request->timeout_ms > 0 && !server->rack_groups) { /* else the home of the name counts it */
        member->deadline = mokd_timer_start(&server->loop, request->timeout_ms, join_overdue, member);
        if (!member->deadline) {
            member_free(member);
            return NULL;
        }
    }
    return member;
}

/* NULL: refused, with the error. */
static struct mokd_member *join(struct mokd_session *session, const Mok__GroupJoin *request, struct mokd_error *error)
{
    struct mokd_device *device = NULL;

    if (check_request(session, request, &device, error) < 0)
        return NULL;
    struct mokd_group *group = find_by_name(session, request->name);
    if (group && check_fit(group, session, request, error) < 0)
        return NULL;
    int r = mokd_admit_rank(session, device, group, request->exclusive, error);
    if (r == -MOK_EDRAIN)
        mokd_rack_decline(session, request->name, request->rank, error);
    if (r < 0)
        return NULL;
    if (mokd_user_take(session->user, MOKD_GROUPS, 1, error) < 0)
        return NULL;
    struct mokd_member *member = add_member(session, request, group, device);
    if (!member)
        mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    return member;
}

void mokd_group_join(struct mokd_session *session, uint64_t id, const Mok__GroupJoin *request)
{
    struct mokd_error error = { 0 };
    struct mokd_member *member = join(session, request, &error);

    if (!member) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    member->join = mokd_call_begin(session, id);
    if (member->group->joined == member->group->size)
        open_group(member->group);
    else if (session->server->rack_groups && mokd_rack_join(member, request, &error) < 0)
        mokd_group_join_failed(member, &error);
}
