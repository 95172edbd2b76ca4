/* SPDX-License-Identifier: Apache-2.0 */
#include "session.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "buffer.h"
#include "client_queue.h"
#include "group.h"
#include "names.h"
#include "state.h"
#include "talk.h"
#include "timer.h"
#include "trace.h"

#define GREETING_MS 10000u
/* Connections of a user that are no session. */
#define MAX_STRANGERS 128u
/* Replies that may wait for a client that does not read. */
#define MAX_UNREAD_BYTES (256u * 1024u)
#define MAX_UNREAD_DESCRIPTORS 64u
/* Requests of a session that wait for something. */
#define MAX_CALLS 512u
#define READ_BATCH 16

/* ------------------------------------------------------------------ going away */

static void advance_close(struct mokd_session *session);

void mokd_session_ref(struct mokd_session *session)
{
    session->refs++;
}

void mokd_session_unref(struct mokd_session *session)
{
    if (--session->refs == 0)
        advance_close(session);
}

void mokd_session_totals(const struct mokd_session *session, Mok__StateSession *ret)
{
    const struct mokd_queue *queue;

    ret->ops_done = session->ops_done;
    TAILQ_FOREACH(queue, &session->queues, link)
        ret->ops_done += queue->ops_done;
    ret->rows = session->rows;
    ret->device_ns = session->device_ns;
    TAILQ_FOREACH(queue, &session->queues, link) {
        ret->rows += queue->counted.rows;
        ret->device_ns += queue->counted.device_ns;
    }
    ret->weight = session->weight;
}

void mokd_session_resume_totals(struct mokd_session *session, const Mok__StateSession *from)
{
    session->ops_done = from->ops_done;
    session->rows = from->rows;
    session->device_ns = from->device_ns;
    session->weight = from->weight ? from->weight : 1;
}

static void uncount(struct mokd_session *session)
{
    if (session->counted)
        mokd_user_give(session->user, MOKD_SESSIONS, 1);
    else
        session->user->strangers--;
}

static void session_free(struct mokd_session *session)
{
    struct mokd_server *server = session->server;

    if (session->id && !(session->resumable && mokd_state_is_frozen(server)))
        mokd_log_of(session->peer.uid, MOK_LOG_INFO, "session", "closed", "session=%" PRIu64 " ops=%" PRIu64,
                    session->id, session->ops_done);
    TAILQ_REMOVE(&server->sessions, session, link);
    mokd_user_unref(session->user);
    mok_close(session->peer.pidfd);
    free(session);
    mokd_server_session_gone(server);
}

/* Nothing refers to the session: the next step of its end may begin. */
static void advance_close(struct mokd_session *session)
{
    unsigned step = session->close_step++;

    session->refs++; /* the step itself, lest it be overtaken by what it starts */
    if (step == 0)
        mokd_members_leave(session);
    else if (step == 1)
        mokd_buffers_drop(session);
    session->refs--;
    if (session->refs > 0)
        return;
    if (step < 2)
        advance_close(session);
    else
        session_free(session);
}

static void poll_closed(uv_handle_t *handle)
{
    struct mokd_session *session = handle->data;

    session->fd = mok_close(session->fd);
    mokd_session_unref(session);
}

static void log_end(const struct mokd_session *session, int code, const char *text)
{
    char clean[MOKD_TEXT_MAX];

    if (!code) {
        mok_log(MOK_LOG_DEBUG, "session", "client left", "session=%" PRIu64 " pid=%d", session->id, session->peer.pid);
        return;
    }
    if (session->resumable && mokd_state_is_frozen(session->server)) {
        mok_log(MOK_LOG_INFO, "session", "left to the next mokd", "session=%" PRIu64, session->id);
        return;
    }
    enum mok_log_level level = session->server->stopping ? MOK_LOG_INFO : MOK_LOG_WARNING;
    mokd_log_of(session->peer.uid, level, "session", "ended by mokd",
                "session=%" PRIu64 " uid=%u pid=%d code=%s error=\"%s\"", session->id, session->peer.uid,
                session->peer.pid, mok_error_symbol(code), mok_log_text(clean, sizeof(clean), text));
}

void mokd_session_close(struct mokd_session *session, int code, const char *text)
{
    if (session->state == MOKD_SESSION_CLOSING)
        return;
    log_end(session, code, text);
    mok_wire_queue_clear(&session->out); /* so that the last event need not wait behind what is not sent any more */
    if (code) {
        Mok__Reply event = MOK__REPLY__INIT;
        event.code = code;
        event.text = (char *)text;
        mokd_session_event(session, &event);
        session->server->errors += !session->server->stopping;
    }
    bool away = session->state == MOKD_SESSION_AWAY;
    session->state = MOKD_SESSION_CLOSING;
    mokd_state_touch(session->server);
    mokd_timer_cancel(&session->greeting);
    mokd_timer_cancel(&session->recover_deadline);
    if (session->recover.session)
        mokd_call_done(&session->recover); /* to nobody */
    mok_wire_queue_clear(&session->out);
    uncount(session);
    mokd_queues_close(session, code ? code : -MOK_ESESSION);
    mokd_members_fail(session);
    mokd_trace_hurry(session->server, session);
    if (away) {
        mokd_session_unref(session); /* may be its end */
        return;
    }
    uv_poll_stop(&session->poll);
    uv_close((uv_handle_t *)&session->poll, poll_closed);
}

void mokd_session_hang_up(struct mokd_session *session, const char *text)
{
    Mok__Reply event = MOK__REPLY__INIT;

    if (session->state == MOKD_SESSION_CLOSING || session->fd < 0)
        return;
    mok_wire_queue_clear(&session->out);
    event.code = -MOK_EDAEMON;
    event.text = (char *)text;
    mokd_session_event(session, &event);
    mok_wire_queue_clear(&session->out);
    session->deaf = true;
    uv_poll_stop(&session->poll);
    shutdown(session->fd, SHUT_RDWR);
}

/* ------------------------------------------------------------------ sending */

static void on_ready(uv_poll_t *poll, int status, int events);

static void watch(struct mokd_session *session, bool writable)
{
    session->watched = true;
    uv_poll_start(&session->poll, UV_READABLE | UV_DISCONNECT | (writable ? UV_WRITABLE : 0), on_ready);
}

/* Nothing of it reaches the client that does not fit: a client that does not read ends, mokd does not grow. */
static int transmit(struct mokd_session *session, Mok__Reply *reply, const int *fds, size_t count)
{
    mokd_state_save(session->server); /* what a client knows, the next mokd knows */
    int r = mok_wire_queue_send(&session->out, session->fd, &reply->base, fds, count);
    if (r > 0)
        watch(session, true);
    return r < 0 ? r : 0;
}

/* Only marks the session: replies go out from the middle of group-wide changes, where no session may end. */
static void transmit_failed(struct mokd_session *session, int code)
{
    if (session->doom)
        return;
    session->doom = code == -MOK_EQUOTA ? -MOK_ESESSION : code;
    session->doom_text = code == -MOK_EQUOTA ? "the client does not read its replies" : mok_error_text(code);
    shutdown(session->fd, SHUT_RD); /* brings on_ready back */
}

static void meet_doom(struct mokd_session *session)
{
    bool gone = session->doom == -MOK_EDAEMON; /* the other end */
    mokd_session_close(session, gone ? 0 : session->doom, session->doom_text);
}

void mokd_session_event(struct mokd_session *session, Mok__Reply *event)
{
    if (session->state == MOKD_SESSION_CLOSING || session->state == MOKD_SESSION_AWAY || session->deaf)
        return;
    event->id = 0;
    transmit(session, event, NULL, 0); /* a client that cannot be told is found out by its next reply */
}

/* ------------------------------------------------------------------ calls */

struct mokd_call mokd_call_begin(struct mokd_session *session, uint64_t id)
{
    mokd_session_ref(session);
    session->calls++;
    return (struct mokd_call){ .session = session, .id = id };
}

static void call_end(struct mokd_call *call)
{
    struct mokd_session *session = call->session;

    call->session = NULL;
    session->calls--;
    mokd_session_unref(session);
}

static void send_reply(struct mokd_session *session, uint64_t id, Mok__Reply *reply, const int *fds, size_t count)
{
    if (session->state == MOKD_SESSION_CLOSING || session->deaf)
        return;
    reply->id = id;
    int r = transmit(session, reply, fds, count);
    if (r < 0)
        transmit_failed(session, r);
}

void mokd_session_decline(struct mokd_session *session, uint64_t id, const struct mokd_error *error)
{
    Mok__Reply reply = MOK__REPLY__INIT;

    reply.code = error->code;
    reply.text = (char *)error->text;
    send_reply(session, id, &reply, NULL, 0);
}

void mokd_session_refuse(struct mokd_session *session, uint64_t id, const struct mokd_error *error)
{
    char clean[MOKD_TEXT_MAX];

    if (session->state != MOKD_SESSION_CLOSING) {
        session->server->errors++;
        mok_log(MOK_LOG_DEBUG, "request", "refused", "session=%" PRIu64 " uid=%u code=%s error=\"%s\"", session->id,
                session->peer.uid, mok_error_symbol(error->code), mok_log_text(clean, sizeof(clean), error->text));
    }
    mokd_session_decline(session, id, error);
}

void mokd_call_reply(struct mokd_call *call, Mok__Reply *reply, const int *fds, size_t count)
{
    send_reply(call->session, call->id, reply, fds, count);
    call_end(call);
}

void mokd_call_done(struct mokd_call *call)
{
    Mok__Reply reply = MOK__REPLY__INIT;
    mokd_call_reply(call, &reply, NULL, 0);
}

void mokd_call_fail(struct mokd_call *call, const struct mokd_error *error)
{
    mokd_session_refuse(call->session, call->id, error);
    call_end(call);
}

/* ------------------------------------------------------------------ receiving */

static void take_message(struct mokd_session *session, const Mok__Request *request)
{
    char text[96];

    if (request->id == 0) {
        mokd_session_close(session, -MOK_EPROTO, "id = 0: a request has an id");
        return;
    }
    if (session->calls >= MAX_CALLS) {
        snprintf(text, sizeof(text), "more than %u requests wait for their answers", MAX_CALLS);
        mokd_session_close(session, -MOK_EPROTO, text);
        return;
    }
    mokd_request_handle(session, request);
}

static bool read_one(struct mokd_session *session)
{
    ProtobufCMessage *message = NULL;
    int r = mok_wire_recv(session->fd, &mok__request__descriptor, &message, NULL);

    switch (r) {
    case 1:
        take_message(session, (const Mok__Request *)message);
        mok_wire_free(message);
        return true;
    case 0:
        mokd_session_close(session, 0, "");
        return false;
    case -MOK_EAGAIN:
        return false;
    case -MOK_EPROTO:
        mokd_session_close(session, r,
                           "malformed message: truncated, larger than 65536 bytes, with descriptors, or "
                           "not of this protocol");
        return false;
    default:
        mokd_session_close(session, r, mok_error_text(r));
        return false;
    }
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    struct mokd_session *session = poll->data;

    if (session->doom) {
        meet_doom(session);
        return;
    }
    if (status < 0) { /* it closed with replies of ours unread */
        mokd_session_close(session, 0, "");
        return;
    }
    if (events & UV_WRITABLE) {
        int r = mok_wire_queue_flush(&session->out, session->fd);
        if (r < 0) {
            transmit_failed(session, r);
            return;
        }
        watch(session, r > 0);
    }
    for (int i = 0; i < READ_BATCH && session->state != MOKD_SESSION_CLOSING && !session->doom; i++)
        if (!read_one(session))
            break;
}

/* ------------------------------------------------------------------ coming */

static void greeting_overdue(void *cookie)
{
    struct mokd_session *session = cookie;
    char text[128];

    if (session->watched)
        snprintf(text, sizeof(text), "no Hello within %u ms", GREETING_MS);
    else
        snprintf(text, sizeof(text), "the user database does not say within %u ms which groups user %u is in",
                 GREETING_MS, session->peer.uid);
    mokd_session_close(session, -MOK_ETIMEDOUT, text);
}

static struct mokd_session *session_new(struct mokd_server *server, int fd)
{
    struct mokd_session *session = calloc(1, sizeof(*session));

    if (!session)
        return NULL;
    session->server = server;
    session->fd = fd;
    session->out.max_bytes = MAX_UNREAD_BYTES;
    session->out.max_fds = MAX_UNREAD_DESCRIPTORS;
    session->peer.pidfd = -1;
    session->started_ns = mok_now_ns();
    session->refs = 1; /* the connection */
    TAILQ_INIT(&session->queues);
    TAILQ_INIT(&session->buffers);
    TAILQ_INIT(&session->members);
    return session;
}

/* A connection that mokd cannot keep is told why, since its client has nothing else to go by. */
static void turn_away(int fd, uid_t uid, int code, const char *text)
{
    Mok__Reply reply = MOK__REPLY__INIT;

    reply.code = code;
    reply.text = (char *)text;
    mok_wire_send(fd, &reply.base, NULL, 0);
    if (code == -MOK_EFDS) /* the listener says it, once for many */
        return;
    mokd_log_of(uid, MOK_LOG_WARNING, "session", "connection refused", "uid=%u code=%s error=\"%s\"", uid,
                mok_error_symbol(code), text);
}

static int set_up(struct mokd_session *session)
{
    struct mokd_server *server = session->server;

    session->user = mokd_user_ref(server, session->peer.uid);
    if (!session->user)
        return -MOK_ENOMEM;
    if (session->user->strangers >= MAX_STRANGERS)
        return -MOK_EQUOTA;
    session->greeting = mokd_timer_start(&server->loop, GREETING_MS, greeting_overdue, session);
    if (!session->greeting)
        return -MOK_ENOMEM;
    return uv_poll_init(&server->loop, &session->poll, session->fd) < 0 ? -MOK_EIO : 0;
}

bool mokd_session_is_admin(const struct mokd_session *session)
{
    return session->admin || mokd_user_is_admin(session->user);
}

int mokd_session_accept(struct mokd_server *server, int fd, bool admin)
{
    _cleanup_fd_ int owned = fd;
    struct mokd_session *session = session_new(server, fd);

    int r = session ? mok_wire_peer_query(fd, &session->peer) : -MOK_ENOMEM;
    if (r == 0)
        r = set_up(session);
    if (r < 0) {
        if (r != -MOK_EDAEMON)
            turn_away(fd, session ? session->peer.uid : 0, r,
                      r == -MOK_EQUOTA ? "the user has too many connections that are no session" : mok_error_text(r));
        if (session) {
            mokd_timer_cancel(&session->greeting);
            mokd_user_unref(session->user);
            mok_close(session->peer.pidfd);
        }
        free(session);
        return r;
    }
    mok_take_fd(&owned);
    session->admin = admin;
    session->user->strangers++;
    session->poll.data = session;
    TAILQ_INSERT_TAIL(&server->sessions, session, link);
    if (mokd_user_is_ready(session->user))
        watch(session, false);
    return 0;
}

void mokd_sessions_let_in(struct mokd_user *user)
{
    struct mokd_session *session;

    TAILQ_FOREACH(session, &user->server->sessions, link)
        if (session->user == user && session->state == MOKD_SESSION_GREETING && !session->watched)
            watch(session, false);
}

/* ------------------------------------------------------------------ what it may use */

static void device_names(const struct mokd_config *config, uint64_t bits, char *ret, size_t size)
{
    size_t used = 0;

    ret[0] = '\0';
    for (size_t i = 0; i < config->n_devices && used < size; i++)
        if (bits >> i & 1)
            used += (size_t)snprintf(ret + used, size - used, "%s%s", used ? ", " : "", config->devices[i].name);
}

int mokd_session_device(const struct mokd_session *session, uint32_t index, struct mokd_device **ret,
                        struct mokd_error *error)
{
    uint64_t allowed = session->user->limits.devices;
    char names[300];

    int r = mokd_device_find(session->server, index, ret, error);
    if (r < 0 || allowed >> index & 1)
        return r;
    device_names(session->server->config, allowed, names, sizeof(names));
    return mokd_error_set(error, -MOK_EACCESS, "device = %u: user %s may use %s%s", index, session->user->name,
                          names[0] ? "devices " : "no device", names);
}

/* ------------------------------------------------------------------ coming back */

struct mokd_session *mokd_session_new_away(struct mokd_server *server, uid_t uid)
{
    struct mokd_session *session = session_new(server, -1);

    if (!session)
        return NULL;
    session->user = mokd_user_ref(server, uid);
    if (!session->user) {
        free(session);
        return NULL;
    }
    session->state = MOKD_SESSION_AWAY;
    session->peer.uid = uid;
    session->counted = session->resumable = true;
    mokd_user_adopt(session->user, MOKD_SESSIONS, 1);
    TAILQ_INSERT_TAIL(&server->sessions, session, link);
    return session;
}

int mokd_session_attach(struct mokd_session *session, struct mokd_session *guest)
{
    int fd = guest->fd;

    guest->fd = -1;
    mokd_session_close(guest, 0, "");
    if (uv_poll_init(&session->server->loop, &session->poll, fd) < 0) {
        mok_close(fd);
        return -MOK_EIO;
    }
    session->fd = fd;
    session->poll.data = session;
    session->peer = guest->peer;
    guest->peer.pidfd = -1;
    session->state = MOKD_SESSION_OPEN;
    watch(session, false);
    return 0;
}
