/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions of the mokd before: they wait for their clients, who prove by the session's secret, and by the user that the
 * kernel says they are, that it is theirs. What a client does not know of, because mokd ended before it could say so,
 * goes; what the client knows and this mokd does not, it is told.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "client_queue.h"
#include "collective.h"
#include "group.h"
#include "layer.h"
#include "names.h"
#include "state.h"
#include "talk.h"
#include "timer.h"

/* ------------------------------------------------------------------ waiting for clients */

static void nobody_came(void *cookie)
{
    struct mokd_server *server = cookie;
    struct mokd_session *session, *next;
    char text[96];

    mokd_timer_cancel(&server->resume_deadline);
    snprintf(text, sizeof(text), "its client did not come back within %u s of mokd's restart",
             server->config->resume_timeout);
    for (session = TAILQ_FIRST(&server->sessions); session; session = next) {
        next = TAILQ_NEXT(session, link);
        if (session->state == MOKD_SESSION_AWAY)
            mokd_session_close(session, -MOK_ETIMEDOUT, text);
    }
}

void mokd_sessions_await(struct mokd_server *server)
{
    server->resume_deadline =
        mokd_timer_start(&server->loop, (uint64_t)server->config->resume_timeout * 1000u, nobody_came, server);
    if (!server->resume_deadline)
        nobody_came(server);
}

/* ------------------------------------------------------------------ coming back */

/* Takes as long for any two tokens. */
static bool is_token(const struct mokd_session *session, const ProtobufCBinaryData *token)
{
    uint8_t differs = 0;

    if (token->len != sizeof(session->token))
        return false;
    for (size_t i = 0; i < sizeof(session->token); i++)
        differs |= session->token[i] ^ token->data[i];
    return differs == 0;
}

static struct mokd_session *find(const struct mokd_server *server, uint64_t id)
{
    struct mokd_session *session;

    TAILQ_FOREACH(session, &server->sessions, link)
        if (session->id == id && session->state != MOKD_SESSION_CLOSING)
            return session;
    return NULL;
}

static int check(const struct mokd_session *guest, const Mok__Resume *resume, struct mokd_session **ret,
                 struct mokd_error *error)
{
    struct mokd_session *session = resume->session ? find(guest->server, resume->session) : NULL;

    if (!session)
        return mokd_error_set(error, -MOK_ESESSION,
                              "session %" PRIu64 ": this mokd has none such; it was not kept, or its time is over",
                              resume->session);
    if (session->peer.uid != guest->peer.uid || !is_token(session, &resume->token))
        return mokd_error_set(error, -MOK_EACCESS, "session %" PRIu64 ": not of this user, or not with this token",
                              resume->session);
    if (session->state != MOKD_SESSION_AWAY)
        return mokd_error_set(error, -MOK_ESESSION, "session %" PRIu64 ": its client is connected", resume->session);
    *ret = session;
    return 0;
}

static bool has(const uint32_t *list, size_t count, uint32_t id)
{
    for (size_t i = 0; i < count; i++)
        if (list[i] == id)
            return true;
    return false;
}

/* What was made, and the client never heard of. Groups first, since their layers and buffers go with them. */
static void drop_unknown(struct mokd_session *session, const Mok__Resume *resume)
{
    struct mokd_member *member, *next_member;
    struct mokd_layer *layer, *next_layer;
    struct mokd_buffer *buffer, *next_buffer;

    for (member = TAILQ_FIRST(&session->members); member; member = next_member) {
        next_member = TAILQ_NEXT(member, link);
        if (!has(resume->group, resume->n_group, member->group->id)) {
            mokd_member_drop(member);
            continue;
        }
        for (layer = TAILQ_FIRST(&member->group->layers); layer; layer = next_layer) {
            next_layer = TAILQ_NEXT(layer, link);
            if (!has(resume->object, resume->n_object, layer->id))
                mokd_layer_part_gone(layer, member);
        }
    }
    for (buffer = TAILQ_FIRST(&session->buffers); buffer; buffer = next_buffer) {
        next_buffer = TAILQ_NEXT(buffer, link);
        if (buffer->bindings == 0 && !buffer->going && !has(resume->object, resume->n_object, buffer->id))
            mokd_buffer_drop(buffer);
    }
}

static void tell_failed(struct mokd_session *session, uint32_t group, uint32_t rank, const struct mokd_error *error)
{
    Mok__Reply event = MOK__REPLY__INIT;
    Mok__GroupFailed body = MOK__GROUP_FAILED__INIT;

    body.group = group;
    body.rank = rank;
    event.code = error->code;
    event.text = (char *)error->text;
    event.body_case = MOK__REPLY__BODY_GROUP_FAILED;
    event.group_failed = &body;
    mokd_session_event(session, &event);
}

/* Groups that have failed while nobody listened, and those that did not outlive the mokd before. */
static void tell_groups(struct mokd_session *session, const Mok__Resume *resume)
{
    struct mokd_member *member;
    struct mokd_error error = { 0 };

    for (size_t i = 0; i < resume->n_group; i++) {
        TAILQ_FOREACH(member, &session->members, link)
            if (member->group->id == resume->group[i])
                break;
        if (member && member->group->state != MOKD_GROUP_FAILED)
            continue;
        if (member)
            mokd_member_failure(member, &error);
        else
            mokd_error_set(&error, -MOK_EDAEMON, "the group did not outlive a restart of mokd");
        tell_failed(session, resume->group[i], member ? member->group->fault_rank : 0, &error);
    }
}

void mokd_session_resume(struct mokd_session *guest, uint64_t id, const Mok__Hello *hello)
{
    struct mokd_session *session = NULL;
    struct mokd_error error = { 0 };

    if (check(guest, hello->resume, &session, &error) < 0) {
        mokd_log_of(guest->peer.uid, MOK_LOG_WARNING, "session", "not resumed",
                    "session=%" PRIu64 " uid=%u pid=%d code=%s", hello->resume->session, guest->peer.uid,
                    guest->peer.pid, mok_error_symbol(error.code));
        mokd_session_refuse(guest, id, &error);
        mokd_session_close(guest, 0, "");
        return;
    }
    if (mokd_session_attach(session, guest) < 0)
        return;
    mok_log(MOK_LOG_INFO, "session", "resumed", "session=%" PRIu64 " uid=%u pid=%d job=%s", session->id,
            session->peer.uid, session->peer.pid, session->job);
    if (hello->resume->complete)
        drop_unknown(session, hello->resume);
    mokd_hello_answer(session, id, hello);
    tell_groups(session, hello->resume);
}

/* ------------------------------------------------------------------ wanting the groups again */

static struct mokd_member *pending(const struct mokd_session *session)
{
    struct mokd_member *member;

    TAILQ_FOREACH(member, &session->members, link)
        if (member->group->state == MOKD_GROUP_SUSPENDED)
            return member;
    return NULL;
}

void mokd_session_recovered(struct mokd_session *session)
{
    if (!session->recover.session || pending(session))
        return;
    mokd_timer_cancel(&session->recover_deadline);
    mokd_call_done(&session->recover);
}

static bool does_not_want_it(const void *cookie, uint32_t rank)
{
    const struct mokd_group *group = cookie;
    return group->member[rank] && !group->member[rank]->session->returned;
}

static void overdue(void *cookie)
{
    struct mokd_session *session = cookie;
    const struct mokd_member *member = pending(session);
    struct mokd_error error = { 0 };
    char missing[200];

    mokd_timer_cancel(&session->recover_deadline);
    if (!member) /* it would have been answered */
        return;
    mokd_error_set(&error, -MOK_ETIMEDOUT,
                   "group %s: rank %u waited %" PRIu64 " ms after mokd's restart: rank %s has not recovered",
                   member->group->name, member->rank, session->recover_ms,
                   group_missing(member->group->size, does_not_want_it, member->group, missing, sizeof(missing)));
    mokd_call_fail(&session->recover, &error);
}

/* Layers run through the queue of the device. */
static int check_queues(const struct mokd_session *session, struct mokd_error *error)
{
    const struct mokd_member *member;

    TAILQ_FOREACH(member, &session->members, link)
        if (member->group->state == MOKD_GROUP_SUSPENDED && !mokd_queue_of(session, member->device))
            return mokd_error_set(error, -MOK_ESTATE, "recover: the session has no queue on device %u, open one first",
                                  member->device->index);
    return session->recover.session ? mokd_error_set(error, -MOK_EBUSY, "recover: one is under way") : 0;
}

void mokd_session_recover(struct mokd_session *session, uint64_t id, const Mok__Recover *request)
{
    struct mokd_member *member, *next;
    struct mokd_error error = { 0 };

    int r = check_queues(session, &error);
    if (r == 0 && request->timeout_ms > 0) {
        session->recover_deadline = mokd_timer_start(&session->server->loop, request->timeout_ms, overdue, session);
        if (!session->recover_deadline)
            r = mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    }
    if (r < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    session->recover = mokd_call_begin(session, id);
    session->recover_ms = request->timeout_ms;
    session->returned = true;
    for (member = TAILQ_FIRST(&session->members); member; member = next) {
        next = TAILQ_NEXT(member, link);
        mokd_group_restore(member->group);
    }
    mokd_session_recovered(session);
}
