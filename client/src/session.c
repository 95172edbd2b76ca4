/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "fork.h"
#include "names.h"
#include "port.h"
#include "resume.h"

#define PROTOCOL_VERSION 1u
#define DEFAULT_RESUME_MS 30000u

int session_check(const mok_session *session, const char *name)
{
    if (!session)
        return client_fail(MOK_EARG, "%s is NULL", name);
    if (fork_happened(session->fork_mark))
        return client_fail(MOK_EFORK, "%s belongs to the parent of this forked process; open a session of its own",
                           name);
    return 0;
}

int session_call(mok_session *session, Mok__Request *request, Mok__Reply__BodyCase body, size_t fds,
                 struct control_answer *ret_answer)
{
    return control_call(session->control, request, session->timeout_ms, body, fds, ret_answer);
}

int session_call_collective(mok_session *session, Mok__Request *request, uint64_t timeout_ms, Mok__Reply__BodyCase body,
                            size_t fds, struct control_answer *ret_answer)
{
    uint64_t patience;

    if (timeout_ms == 0 || !mok_add_u64(timeout_ms, session->timeout_ms, &patience))
        patience = 0;
    return control_call(session->control, request, patience, body, fds, ret_answer);
}

/* ------------------------------------------------------------------ failures of groups */

const struct failure *session_failure(const mok_session *session, uint32_t id)
{
    for (const struct failure *f = session->failures; f; f = f->next) {
        if (f->group == id)
            return f;
    }
    return NULL;
}

void session_on_event(void *data, const Mok__Reply *reply)
{
    mok_session *session = data;

    if (reply->body_case != MOK__REPLY__BODY_GROUP_FAILED)
        return;
    struct failure *failure = calloc(1, sizeof(*failure));
    if (!failure)
        return; /* operations still complete with their code */
    failure->group = reply->group_failed->group;
    failure->rank = reply->group_failed->rank;
    failure->code = reply->code < 0 ? reply->code : -MOK_EPEER;
    snprintf(failure->text, sizeof(failure->text), "%s", reply->text[0] ? reply->text : mok_error_text(failure->code));

    pthread_mutex_lock(&session->lock);
    if (session_failure(session, failure->group)) {
        free(failure);
    } else {
        failure->next = session->failures;
        session->failures = failure;
        for (mok_group *g = session->groups; g; g = g->next) {
            if (g->id == failure->group)
                __atomic_store_n(&g->failure, failure, __ATOMIC_RELEASE);
        }
    }
    pthread_mutex_unlock(&session->lock);
}

/* ------------------------------------------------------------------ open and close */

/* The program's name as far as a job's name allows. */
static void default_job(char ret[MOK_MAX_NAME + 1])
{
    snprintf(ret, MOK_MAX_NAME + 1, "%s", program_invocation_short_name);
    for (char *c = ret; *c; c++) {
        const char one[2] = { *c, 0 };
        if (!mok_name_is_valid(one))
            *c = '_';
    }
    if (!ret[0])
        snprintf(ret, MOK_MAX_NAME + 1, "job");
}

static int hello(mok_session *session, const mok_session_options *o, const char *job)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Hello body = MOK__HELLO__INIT;

    body.protocol_min = PROTOCOL_VERSION;
    body.protocol_max = PROTOCOL_VERSION;
    body.job = (char *)job;
    body.weight = o->weight;
    body.features = MOK_FEATURE_RESUME | MOK_FEATURE_GRADIENTS | MOK_FEATURE_WGRAD |
                    MOK_FEATURE_TRANSPOSED;
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = &body;
    int r = session_call(session, &request, MOK__REPLY__BODY_HELLO, 0, &answer);
    if (r < 0)
        return r;
    if (answer.reply->hello->protocol != PROTOCOL_VERSION)
        return client_fail(MOK_EVERSION, "mokd %s chose protocol %u, this library speaks %u",
                           answer.reply->hello->daemon_version, answer.reply->hello->protocol, PROTOCOL_VERSION);
    session->features = answer.reply->hello->features;
    snprintf(session->mps_pipe, sizeof(session->mps_pipe), "%s", answer.reply->hello->mps_pipe);
    return keeper_start(session, o->socket_path, o->resume_ms ? o->resume_ms : DEFAULT_RESUME_MS, answer.reply->hello,
                        &session->keeper);
}

static void session_free(mok_session *session)
{
    keeper_stop(session->keeper);
    pthread_mutex_lock(&session->lock);
    while (session->layers)
        layer_drop(session->layers);
    while (session->buffers)
        buffer_drop(session->buffers);
    while (session->groups)
        group_drop(session->groups);
    while (session->failures) {
        struct failure *failure = session->failures;
        session->failures = failure->next;
        free(failure);
    }
    pthread_mutex_unlock(&session->lock);
    for (uint32_t i = 0; i < MOK_MAX_DEVICES; i++)
        port_close(session->port[i]);
    control_close(session->control);
    pthread_mutex_destroy(&session->recovering);
    pthread_mutex_destroy(&session->opening);
    pthread_mutex_destroy(&session->lock);
    free(session);
}

_public_ int mok_session_open(const mok_session_options *options, mok_session **ret_session)
{
    char job[MOK_MAX_NAME + 1];
    mok_session_options o;

    if (!ret_session)
        return client_fail(MOK_EARG, "ret_session is NULL");
    int r = check_session_options(options, &o);
    if (r < 0)
        return r;
    mok_session *session = calloc(1, sizeof(*session));
    if (!session)
        return client_fail(MOK_ENOMEM, "no memory for a session");
    pthread_mutex_init(&session->lock, NULL);
    pthread_mutex_init(&session->opening, NULL);
    pthread_mutex_init(&session->recovering, NULL);
    session->queue_entries = o.queue_entries;
    session->timeout_ms = o.timeout_ms ? o.timeout_ms : MOK_DEFAULT_TIMEOUT_MS;

    default_job(job);
    r = fork_mark(&session->fork_mark);
    if (r == 0)
        r = control_open(o.socket_path, session->timeout_ms, session_on_event, session, &session->control);
    if (r == 0)
        r = hello(session, &o, o.job ? o.job : job);
    if (r < 0) {
        session_free(session);
        return r;
    }
    *ret_session = session;
    return 0;
}

_public_ void mok_session_close(mok_session *session)
{
    /* In a child everything but the heap copy is the parent's, and locks may be held by threads that are not here. */
    if (session && !fork_happened(session->fork_mark))
        session_free(session);
}

/* ------------------------------------------------------------------ queries */

static void fill_device(mok_device_info *ret, const Mok__DeviceInfo *device)
{
    *ret = (mok_device_info){
        .index = device->index,
        .kind = device->kind,
        .units = device->threads,
        .up = device->state == MOK__DEVICE_STATE__DEVICE_UP,
        .memory_bytes = device->memory_bytes,
        .memory_used = device->memory_used,
    };
    snprintf(ret->name, sizeof(ret->name), "%s", device->name);
}

_public_ int mok_device_list(mok_session *session, mok_device_info *ret_devices, size_t capacity)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__DeviceList body = MOK__DEVICE_LIST__INIT;

    int r = session_check(session, "session");
    if (r < 0)
        return r;
    if (!ret_devices && capacity > 0)
        return client_fail(MOK_EARG, "ret_devices is NULL, capacity is %zu, must be 0 then", capacity);
    request.body_case = MOK__REQUEST__BODY_DEVICE_LIST;
    request.device_list = &body;
    r = session_call(session, &request, MOK__REPLY__BODY_DEVICE_LIST, 0, &answer);
    if (r < 0)
        return r;
    const Mok__DeviceListReply *list = answer.reply->device_list;
    for (size_t i = 0; i < list->n_device && i < capacity; i++)
        fill_device(&ret_devices[i], list->device[i]);
    return (int)list->n_device;
}

_public_ int mok_limits_query(mok_session *session, mok_limits *ret_limits)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LimitsQuery body = MOK__LIMITS_QUERY__INIT;

    int r = session_check(session, "session");
    if (r < 0)
        return r;
    if (!ret_limits)
        return client_fail(MOK_EARG, "ret_limits is NULL");
    request.body_case = MOK__REQUEST__BODY_LIMITS_QUERY;
    request.limits_query = &body;
    r = session_call(session, &request, MOK__REPLY__BODY_LIMITS, 0, &answer);
    if (r < 0)
        return r;
    const Mok__Limits *l = answer.reply->limits;
    *ret_limits = (mok_limits){
        .bytes = l->bytes,
        .bytes_used = l->bytes_used,
        .sessions = l->sessions,
        .sessions_used = l->sessions_used,
        .groups = l->groups,
        .groups_used = l->groups_used,
        .queue_entries = l->queue_entries,
        .layers = l->layers,
        .buffers = l->buffers,
    };
    return 0;
}
