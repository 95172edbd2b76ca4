/* SPDX-License-Identifier: Apache-2.0 */
/* What a message asks for and who may ask it: the greeting first, then a session anything, an observer only looks. */
#include <inttypes.h>
#include <stdio.h>
#include <sys/random.h>

#include "admission.h"
#include "buffer.h"
#include "client_queue.h"
#include "group.h"
#include "layer.h"
#include "names.h"
#include "quota.h"
#include "rack_node.h"
#include "state.h"
#include "stats_reply.h"
#include "status.h"
#include "talk.h"
#include "timer.h"
#include "trace.h"
#include "usage.h"

/* ------------------------------------------------------------------ Hello */

/* A session is charged to its user as the last thing. */
static int check_hello(struct mokd_session *session, const Mok__Hello *hello, struct mokd_error *error)
{
    char clean[MOK_MAX_NAME + 2];

    if (hello->protocol_min > MOKD_PROTOCOL || hello->protocol_max < MOKD_PROTOCOL)
        return mokd_error_set(error, -MOK_EVERSION, "protocol %u..%u: mokd " MOK_BUILD_VERSION " speaks %u",
                              hello->protocol_min, hello->protocol_max, MOKD_PROTOCOL);
    if (!mok_name_is_valid(hello->job))
        return mokd_error_set(error, -MOK_ENAME, "job = %s: must have 1..%d of the characters A-Z a-z 0-9 . _ -",
                              mok_log_text(clean, sizeof(clean), hello->job), MOK_MAX_NAME);
    if (hello->weight > MOK_MAX_WEIGHT)
        return mokd_error_set(error, -MOK_ERANGE, "weight = %u: must be in 0..%u", hello->weight, MOK_MAX_WEIGHT);
    if (hello->resume && !hello->observer)
        return 0; /* it is counted already */
    return hello->observer ? 0 : mokd_user_take(session->user, MOKD_SESSIONS, 1, error);
}

void mokd_hello_answer(struct mokd_session *session, uint64_t id, const Mok__Hello *hello)
{
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__HelloReply body = MOK__HELLO_REPLY__INIT;
    Mok__Limits limits;

    mokd_status_fill_limits(session, &limits);
    body.protocol = MOKD_PROTOCOL;
    body.features = hello->features & MOKD_FEATURES;
    body.session = session->id;
    body.daemon_version = (char *)MOK_BUILD_VERSION;
    body.limits = &limits;
    body.boot_id = (ProtobufCBinaryData){ .len = sizeof(session->server->boot_id), .data = session->server->boot_id };
    /* Of several control daemons BufferAllocReply names the right one. */
    if (session->server->config->mps == MOKD_MPS_SITE)
        body.mps_pipe = (char *)session->server->config->mps_pipe;
    if (session->resumable) {
        body.resume_token = (ProtobufCBinaryData){ .len = sizeof(session->token), .data = session->token };
        body.resume_ms = (uint64_t)session->server->config->resume_timeout * 1000u;
    }
    reply.body_case = MOK__REPLY__BODY_HELLO;
    reply.hello = &body;
    struct mokd_call call = mokd_call_begin(session, id);
    mokd_call_reply(&call, &reply, NULL, 0);
}

/* Where nothing is kept, or the client does not know how to come back, the session ends with this mokd. */
static bool make_resumable(struct mokd_session *session, uint64_t features)
{
    return (features & MOK_FEATURE_RESUME) && mokd_state_is_kept(session->server) &&
           getrandom(session->token, sizeof(session->token), 0) == (ssize_t)sizeof(session->token);
}

static void become_session(struct mokd_session *session, uint64_t features)
{
    session->resumable = make_resumable(session, features);
    session->returned = true; /* it has nothing of the mokd before */
    mokd_state_touch(session->server);
    session->state = MOKD_SESSION_OPEN;
    session->id = ++session->server->last_session;
    session->counted = true;
    session->user->strangers--;
    mokd_log_of(session->peer.uid, MOK_LOG_INFO, "session", "opened", "session=%" PRIu64 " uid=%u pid=%d job=%s",
                session->id, session->peer.uid, session->peer.pid, session->job);
}

static void greet(struct mokd_session *session, uint64_t id, const Mok__Hello *hello)
{
    struct mokd_error error = { 0 };

    if (check_hello(session, hello, &error) < 0) {
        mokd_session_refuse(session, id, &error);
        mokd_session_close(session, 0, "");
        return;
    }
    mokd_timer_cancel(&session->greeting);
    if (hello->resume && !hello->observer) {
        mokd_session_resume(session, id, hello);
        return;
    }
    snprintf(session->job, sizeof(session->job), "%s", hello->job);
    session->weight = hello->weight ? hello->weight : 1;
    if (hello->observer)
        session->state = MOKD_SESSION_OBSERVER;
    else
        become_session(session, hello->features);
    mokd_hello_answer(session, id, hello);
}

/* ------------------------------------------------------------------ everything else */

/* Requests that need no session: looks, and an administrator's. False: it is something else. */
static bool handle_question(struct mokd_session *session, const Mok__Request *request)
{
    switch (request->body_case) {
    case MOK__REQUEST__BODY_DEVICE_LIST:
        mokd_status_devices(session, request->id);
        return true;
    case MOK__REQUEST__BODY_LIMITS_QUERY:
        mokd_status_limits(session, request->id);
        return true;
    case MOK__REQUEST__BODY_STATUS_QUERY:
        mokd_status_query(session, request->id);
        return true;
    case MOK__REQUEST__BODY_RACK_QUERY:
        mokd_rack_query(session, request->id);
        return true;
    case MOK__REQUEST__BODY_QUOTA_QUERY:
        mokd_quota_query(session, request->id, request->quota_query);
        return true;
    case MOK__REQUEST__BODY_USAGE_QUERY:
        mokd_usage_query(session, request->id, request->usage_query);
        return true;
    case MOK__REQUEST__BODY_STATS_QUERY:
        mokd_stats_query(session, request->id);
        return true;
    case MOK__REQUEST__BODY_TRACE:
        mokd_trace(session, request->id, request->trace);
        return true;
    case MOK__REQUEST__BODY_DRAIN:
        mokd_drain(session, request->id, request->drain);
        return true;
    case MOK__REQUEST__BODY_DRAIN_ON:
        mokd_drain(session, request->id, request->drain_on);
        return true;
    case MOK__REQUEST__BODY_LAYER_QUERY:
        if (request->layer_query->group != 0)
            return false;
        mokd_layer_query(session, request->id, request->layer_query);
        return true;
    case MOK__REQUEST__BODY_LAYER_DESCRIBE:
        if (session->state != MOKD_SESSION_OBSERVER)
            return false;
        mokd_layer_describe(session, request->id, request->layer_describe);
        return true;
    default:
        return false;
    }
}

static void handle_action(struct mokd_session *session, const Mok__Request *request)
{
    struct mokd_error error = { 0 };
    uint64_t id = request->id;

    switch (request->body_case) {
    case MOK__REQUEST__BODY_QUEUE_OPEN:
        mokd_queue_open(session, id, request->queue_open);
        return;
    case MOK__REQUEST__BODY_QUEUE_CLOSE:
        mokd_queue_close(session, id, request->queue_close);
        return;
    case MOK__REQUEST__BODY_STREAM_OPEN:
        mokd_stream_open(session, id, request->stream_open);
        return;
    case MOK__REQUEST__BODY_GROUP_JOIN:
        mokd_group_join(session, id, request->group_join);
        return;
    case MOK__REQUEST__BODY_GROUP_LEAVE:
        mokd_group_leave(session, id, request->group_leave);
        return;
    case MOK__REQUEST__BODY_BUFFER_ALLOC:
        mokd_buffer_alloc(session, id, request->buffer_alloc);
        return;
    case MOK__REQUEST__BODY_BUFFER_FREE:
        mokd_buffer_free(session, id, request->buffer_free);
        return;
    case MOK__REQUEST__BODY_LAYER_QUERY:
        mokd_layer_query(session, id, request->layer_query);
        return;
    case MOK__REQUEST__BODY_LAYER_CREATE:
        mokd_layer_create(session, id, request->layer_create);
        return;
    case MOK__REQUEST__BODY_LAYER_BIND:
        mokd_layer_bind(session, id, request->layer_bind);
        return;
    case MOK__REQUEST__BODY_LAYER_DESTROY:
        mokd_layer_destroy(session, id, request->layer_destroy);
        return;
    case MOK__REQUEST__BODY_LAYER_DESCRIBE:
        mokd_layer_describe(session, id, request->layer_describe);
        return;
    case MOK__REQUEST__BODY_RECOVER:
        mokd_session_recover(session, id, request->recover);
        return;
    case MOK__REQUEST__BODY_OP_QUERY:
        mokd_op_query(session, id, request->op_query);
        return;
    case MOK__REQUEST__BODY_HELLO:
        mokd_error_set(&error, -MOK_ESTATE, "Hello: said already");
        break;
    default:
        mokd_error_set(&error, -MOK_ENOTSUP, "request %" PRIu64 ": mokd " MOK_BUILD_VERSION " does not know this kind",
                       id);
    }
    mokd_session_refuse(session, id, &error);
}

void mokd_request_handle(struct mokd_session *session, const Mok__Request *request)
{
    struct mokd_error error = { 0 };

    if (session->state == MOKD_SESSION_GREETING) {
        if (request->body_case == MOK__REQUEST__BODY_HELLO)
            greet(session, request->id, request->hello);
        else
            mokd_session_close(session, -MOK_EPROTO, "the first message must be Hello");
        return;
    }
    if (handle_question(session, request))
        return;
    if (session->state == MOKD_SESSION_OPEN) {
        handle_action(session, request);
        return;
    }
    mokd_error_set(&error, -MOK_ESTATE, "request %" PRIu64 ": an observer may only look", request->id);
    mokd_session_refuse(session, request->id, &error);
}
