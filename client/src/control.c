/* SPDX-License-Identifier: Apache-2.0 */
#include "control.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "error.h"
#include "fork.h"
#include "names.h"
#include "plain.h"

/* How long who replaces a connection waits for others to be done with the lost one. */
#define SETTLE_NS UINT64_C(1000000000)

/* A request whose answer a thread waits for; lives on that thread's stack. */
struct pending {
    struct pending *next;
    uint64_t id;
    bool done;
    bool lost; /* the connection, before the answer came */
    int code;  /* failed without a usable answer */
    struct control_answer answer;
};

struct control {
    int fd;
    control_event_fn on_event;
    void *event_data;

    pthread_mutex_t lock; /* all below */
    pthread_cond_t moved; /* an answer was handed over, the reader stopped, or the connection ended */
    bool reading;         /* some thread is the reader */
    uint64_t last_id;
    struct pending *pending;
    int over; /* why the connection is over, or lost; 0: it is there */
    char over_text[320];
    bool kept, given_up;
    unsigned answers; /* handed over and not cleared */
    uint32_t losses;  /* atomic, for those without the lock */
};

void control_answer_clear(struct control_answer *answer)
{
    mok_wire_fds_close(&answer->fds);
    if (answer->reply)
        mok_wire_free(&answer->reply->base);
    answer->reply = NULL;
    if (!answer->from)
        return;
    pthread_mutex_lock(&answer->from->lock);
    answer->from->answers--;
    pthread_cond_broadcast(&answer->from->moved);
    pthread_mutex_unlock(&answer->from->lock);
    answer->from = NULL;
}

/* ------------------------------------------------------------------ connecting */

const char *control_socket_path(const char *path)
{
    if (path)
        return path;
    path = secure_getenv("MOK_SOCKET");
    return path && path[0] ? path : MOK_DEFAULT_SOCKET;
}

/* What stands at the path may be something else altogether, which the kernel calls a refusal. */
static bool is_socket(const char *path)
{
    struct stat status;

    return stat(path, &status) < 0 || S_ISSOCK(status.st_mode);
}

static int connect_error(int error, const char *path)
{
    if (error != ENOENT && !is_socket(path))
        return client_fail(MOK_EDAEMON, "%s is no socket", path);
    switch (error) {
    case ENOENT:
        return client_fail(MOK_EDAEMON, "no socket %s: mokd is not running, or its socket is elsewhere ($MOK_SOCKET)",
                           path);
    case ECONNREFUSED:
        return client_fail(MOK_EDAEMON, "nobody listens on %s: mokd is not running", path);
    case EPROTOTYPE:
        return client_fail(MOK_EDAEMON, "%s is not a socket of mokd", path);
    case EACCES:
    case EPERM:
        return client_fail(MOK_EACCESS, "no permission to open %s", path);
    case EAGAIN:
    case EINPROGRESS:
    case ETIMEDOUT:
        return client_fail(MOK_ETIMEDOUT, "mokd did not accept the connection to %s in time", path);
    case EMFILE:
    case ENFILE:
        return client_fail(MOK_EFDS, "no descriptor left for the connection to mokd");
    }
    return client_fail(MOK_EDAEMON, "cannot connect to %s: %s", path, strerror(error));
}

static int connect_socket(int fd, const char *path, uint64_t timeout_ms)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    struct timeval limit = {
        .tv_sec = (time_t)(timeout_ms / 1000),
        .tv_usec = (suseconds_t)(timeout_ms % 1000 * 1000),
    };

    memcpy(address.sun_path, path, strlen(path) + 1);
    /* A Unix socket's connection waits for room in the listener's backlog, for as long as a send may wait. */
    if (setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) < 0)
        return client_fail(MOK_EIO, "cannot bound the connection's time: %s", strerror(errno));
    int r;
    do
        r = connect(fd, (struct sockaddr *)&address, sizeof(address));
    while (r < 0 && errno == EINTR);
    if (r < 0)
        return connect_error(errno, path);
    if (fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
        return client_fail(MOK_EIO, "cannot make the connection non-blocking: %s", strerror(errno));
    return 0;
}

static struct control *control_new(control_event_fn on_event, void *event_data)
{
    pthread_condattr_t attributes;
    struct control *control = calloc(1, sizeof(*control));

    if (!control)
        return NULL;
    control->fd = -1;
    control->on_event = on_event;
    control->event_data = event_data;
    pthread_mutex_init(&control->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&control->moved, &attributes);
    pthread_condattr_destroy(&attributes);
    return control;
}

int control_open(const char *path, uint64_t timeout_ms, control_event_fn on_event, void *event_data,
                 struct control **ret_control)
{
    const size_t longest = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;

    path = control_socket_path(path);
    if (!path[0] || strlen(path) > longest)
        return client_fail(MOK_ERANGE, "socket_path has %zu bytes, must have 1..%zu", strlen(path), longest);

    struct control *control = control_new(on_event, event_data);
    if (!control)
        return client_fail(MOK_ENOMEM, "no memory for a connection");
    control->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    int r = control->fd < 0 ? connect_error(errno, path) : fork_own_fd(control->fd);
    if (r >= 0)
        r = connect_socket(control->fd, path, timeout_ms ? timeout_ms : MOK_DEFAULT_TIMEOUT_MS);
    if (r < 0) {
        control_close(control);
        return r;
    }
    *ret_control = control;
    return 0;
}

void control_close(struct control *control)
{
    if (!control)
        return;
    if (control->fd >= 0) {
        shutdown(control->fd, SHUT_RDWR);
        fork_disown_fd(control->fd);
        mok_close(control->fd);
    }
    pthread_cond_destroy(&control->moved);
    pthread_mutex_destroy(&control->lock);
    free(control);
}

/* ------------------------------------------------------------------ the end of a connection */

/* Under the lock. The first reason stays. */
static void end(struct control *control, int code, const char *text)
{
    if (control->over)
        return;
    control->over = code;
    snprintf(control->over_text, sizeof(control->over_text), "%s", text);
    if (code != -MOK_EDAEMON)
        control->given_up = true;
    for (struct pending *p = control->pending; p; p = p->next)
        p->lost = true; /* whatever comes later answers somebody else */
    control->pending = NULL;
    if (control->kept && !control->given_up)
        __atomic_add_fetch(&control->losses, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&control->moved);
}

/* Under the lock: lost, and perhaps soon there again. */
static bool is_lost(const struct control *control)
{
    return control->over && control->kept && !control->given_up;
}

/* Under the lock. */
static void end_by_read(struct control *control, int r)
{
    switch (r) {
    case 0:
        end(control, -MOK_EDAEMON, "connection to mokd lost: mokd has closed it or is gone");
        break;
    case -MOK_EPROTO:
        end(control, r, "mokd sent a malformed or truncated message; the session is over");
        break;
    case -MOK_ENOMEM:
        end(control, r, "no memory to read mokd's message; the session is over");
        break;
    default:
        end(control, r, "cannot read from mokd; the session is over");
    }
    /* Nobody reads any more: let mokd see it, so that it frees what the session owned. */
    shutdown(control->fd, SHUT_RDWR);
}

/* It may be there again by now; why it was not is still known. */
int control_fail(struct control *control)
{
    pthread_mutex_lock(&control->lock);
    int code = client_fail_text(control->over ? control->over : -MOK_EDAEMON, control->over_text);
    pthread_mutex_unlock(&control->lock);
    return code;
}

/* ------------------------------------------------------------------ reading */

void control_give_back(struct control *control, const Mok__Reply *reply)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueClose queue = MOK__QUEUE_CLOSE__INIT;
    Mok__BufferFree buffer = MOK__BUFFER_FREE__INIT;
    Mok__GroupLeave group = MOK__GROUP_LEAVE__INIT;
    Mok__LayerDestroy layer = MOK__LAYER_DESTROY__INIT;

    if (reply->code != 0)
        return;
    switch (reply->body_case) {
    case MOK__REPLY__BODY_QUEUE_OPEN:
        queue.queue = reply->queue_open->queue;
        request.body_case = MOK__REQUEST__BODY_QUEUE_CLOSE;
        request.queue_close = &queue;
        break;
    case MOK__REPLY__BODY_BUFFER_ALLOC:
        buffer.buffer = reply->buffer_alloc->buffer;
        request.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
        request.buffer_free = &buffer;
        break;
    case MOK__REPLY__BODY_GROUP_JOIN:
        group.group = reply->group_join->group;
        request.body_case = MOK__REQUEST__BODY_GROUP_LEAVE;
        request.group_leave = &group;
        break;
    case MOK__REPLY__BODY_LAYER_CREATE:
        layer.layer = reply->layer_create->layer;
        request.body_case = MOK__REQUEST__BODY_LAYER_DESTROY;
        request.layer_destroy = &layer;
        break;
    default:
        return;
    }
    pthread_mutex_lock(&control->lock);
    request.id = ++control->last_id; /* nobody waits for its answer */
    pthread_mutex_unlock(&control->lock);
    mok_wire_send(control->fd, &request.base, NULL, 0);
}

/* An event without a body is mokd's last word to this session. */
static void take_event(struct control *control, const Mok__Reply *reply)
{
    if (reply->body_case == MOK__REPLY__BODY__NOT_SET) {
        if (reply->code < 0) {
            pthread_mutex_lock(&control->lock);
            end(control, reply->code, reply->text);
            pthread_mutex_unlock(&control->lock);
        }
        return;
    }
    if (control->on_event)
        control->on_event(control->event_data, reply);
}

/* As the reader, without the lock. Takes over the message and its descriptors. */
static void deliver(struct control *control, Mok__Reply *reply, struct mok_wire_fds *fds, bool lost_fds)
{
    struct pending **at, *pending = NULL;

    if (reply->id == 0) {
        take_event(control, reply);
    } else {
        pthread_mutex_lock(&control->lock);
        for (at = &control->pending; *at; at = &(*at)->next) {
            if ((*at)->id != reply->id)
                continue;
            pending = *at;
            *at = pending->next;
            if (lost_fds) {
                pending->code = -MOK_EFDS;
            } else {
                pending->answer.reply = reply;
                pending->answer.fds = *fds;
                pending->answer.from = control;
                control->answers++;
                fds->count = 0;
            }
            pending->done = true;
            pthread_cond_broadcast(&control->moved);
            break;
        }
        pthread_mutex_unlock(&control->lock);
        if (pending && !lost_fds)
            return;
        control_give_back(control, reply);
    }
    mok_wire_fds_close(fds);
    mok_wire_free(&reply->base);
}

/* As the reader, without the lock. 1: a message was dealt with; -MOK_EAGAIN: none is there; else the end. */
static int read_one(struct control *control)
{
    struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    ProtobufCMessage *message = NULL;

    int r = mok_wire_recv_lossy(control->fd, &mok__reply__descriptor, &message, &fds);
    if (r <= 0)
        return r;
    mok_plain_message(message); /* a terminal must not be told what to do by a name */
    deliver(control, (Mok__Reply *)message, &fds, r == 2);
    return 1;
}

/* Under the lock, which it gives up meanwhile. Reads what is there as the reader. */
static void read_all(struct control *control)
{
    int r;

    control->reading = true;
    pthread_mutex_unlock(&control->lock);
    do
        r = read_one(control);
    while (r == 1);
    pthread_mutex_lock(&control->lock);
    control->reading = false;
    if (r != -MOK_EAGAIN)
        end_by_read(control, r);
    pthread_cond_broadcast(&control->moved);
}

int control_look(struct control *control)
{
    pthread_mutex_lock(&control->lock);
    if (!control->over && !control->reading)
        read_all(control);
    int code = control->over;
    pthread_mutex_unlock(&control->lock);
    return code;
}

/* ------------------------------------------------------------------ waiting */

uint64_t control_deadline(uint64_t timeout_ms)
{
    uint64_t ns;

    if (timeout_ms == 0 || !mok_mul_u64(timeout_ms, 1000000u, &ns) || !mok_add_u64(ns, mok_now_ns(), &ns))
        return UINT64_MAX;
    return ns;
}

/* Without the lock. Sleeps until the socket has `events` or the deadline has come. */
static void sleep_on_socket(struct control *control, short events, uint64_t deadline)
{
    struct pollfd look = { .fd = control->fd, .events = events };
    int ms = -1;

    if (deadline != UINT64_MAX) {
        uint64_t now = mok_now_ns();
        uint64_t left = deadline > now ? (deadline - now + 999999u) / 1000000u : 0;
        ms = left > INT_MAX ? INT_MAX : (int)left;
    }
    poll(&look, 1, ms);
}

/* Under the lock. Sleeps until the reader has done something or the deadline has come. */
static void sleep_on_reader(struct control *control, uint64_t deadline)
{
    if (deadline == UINT64_MAX) {
        pthread_cond_wait(&control->moved, &control->lock);
        return;
    }
    struct timespec until = {
        .tv_sec = (time_t)(deadline / 1000000000u),
        .tv_nsec = (long)(deadline % 1000000000u),
    };
    pthread_cond_timedwait(&control->moved, &control->lock, &until);
}

static int send_request(struct control *control, const Mok__Request *request, uint64_t deadline)
{
    for (;;) {
        int r = mok_wire_send(control->fd, &request->base, NULL, 0);
        if (r != -MOK_EAGAIN)
            return r;
        if (mok_now_ns() >= deadline)
            return -MOK_ETIMEDOUT;
        sleep_on_socket(control, POLLOUT, deadline);
    }
}

/* Under the lock. */
static void wait_for(struct control *control, struct pending *pending, uint64_t deadline)
{
    while (!pending->done && !pending->lost && mok_now_ns() < deadline) {
        if (control->reading) {
            sleep_on_reader(control, deadline);
            continue;
        }
        control->reading = true;
        pthread_mutex_unlock(&control->lock);
        sleep_on_socket(control, POLLIN, deadline);
        pthread_mutex_lock(&control->lock);
        read_all(control);
    }
}

/* Under the lock. */
static void forget(struct control *control, struct pending *pending)
{
    for (struct pending **at = &control->pending; *at; at = &(*at)->next) {
        if (*at == pending) {
            *at = pending->next;
            return;
        }
    }
}

static const char *request_name(const Mok__Request *request)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field(&mok__request__descriptor, (unsigned)request->body_case);
    return field ? field->name : "request";
}

/* What came of a request that got its answer; clears the answer when it is a failure. */
static int judge(struct control *control, const Mok__Request *request, Mok__Reply__BodyCase body, size_t fds,
                 struct control_answer *answer)
{
    const Mok__Reply *reply = answer->reply;
    int code = reply->code;

    if (code < 0) {
        client_fail_text(code, reply->text);
    } else if (code > 0) {
        code =
            client_fail(MOK_EPROTO, "mokd's answer to %s has code %d, must be at most 0", request_name(request), code);
    } else if (body != MOK__REPLY__BODY__NOT_SET && reply->body_case != body) {
        code = client_fail(MOK_EPROTO, "mokd's answer to %s has body %d, must be %d", request_name(request),
                           (int)reply->body_case, (int)body);
    } else if (answer->fds.count != fds) {
        code = client_fail(MOK_EPROTO, "mokd's answer to %s came with %zu descriptors, must come with %zu",
                           request_name(request), answer->fds.count, fds);
    } else {
        return 0;
    }
    control_give_back(control, reply);
    control_answer_clear(answer);
    return code;
}

int control_call(struct control *control, Mok__Request *request, uint64_t timeout_ms, Mok__Reply__BodyCase body,
                 size_t fds, struct control_answer *ret_answer)
{
    uint64_t deadline = control_deadline(timeout_ms);
    struct pending pending = { .answer = CONTROL_ANSWER_INIT };

    pthread_mutex_lock(&control->lock);
    while (is_lost(control) && mok_now_ns() < deadline)
        sleep_on_reader(control, deadline);
    if (control->over) {
        pthread_mutex_unlock(&control->lock);
        return control_fail(control);
    }
    pending.id = request->id = ++control->last_id;
    pending.next = control->pending;
    control->pending = &pending;
    pthread_mutex_unlock(&control->lock);

    int r = send_request(control, request, deadline);

    pthread_mutex_lock(&control->lock);
    if (r == 0 || r == -MOK_EDAEMON) /* after EPIPE: mokd's last word may still be there to read */
        wait_for(control, &pending, deadline);
    if (!pending.done)
        forget(control, &pending);
    pthread_mutex_unlock(&control->lock);

    if (pending.done && pending.code == -MOK_EFDS)
        return client_fail(
            MOK_EFDS, "mokd's answer to %s brings %zu descriptors, more than this process may still have (ulimit -n)",
            request_name(request), fds);
    if (pending.done) {
        r = judge(control, request, body, fds, &pending.answer);
        if (r == 0)
            *ret_answer = pending.answer;
        return r;
    }
    if (pending.lost)
        return control_fail(control);
    if (r == 0 || r == -MOK_ETIMEDOUT)
        return client_fail(MOK_ETIMEDOUT, "mokd did not answer %s within %llu ms", request_name(request),
                           (unsigned long long)timeout_ms);
    return client_fail(r, "cannot send %s to mokd: %s", request_name(request), mok_error_text(r));
}

/* ------------------------------------------------------------------ another connection for the same object */

void control_keep(struct control *control)
{
    pthread_mutex_lock(&control->lock);
    control->kept = true;
    pthread_mutex_unlock(&control->lock);
}

uint32_t control_losses(const struct control *control)
{
    return __atomic_load_n(&control->losses, __ATOMIC_ACQUIRE);
}

int control_fd(const struct control *control)
{
    return control->fd;
}

int control_await(struct control *control, uint64_t deadline_ns)
{
    pthread_mutex_lock(&control->lock);
    while (is_lost(control) && mok_now_ns() < deadline_ns)
        sleep_on_reader(control, deadline_ns);
    bool lost = is_lost(control);
    int code = control->over;
    pthread_mutex_unlock(&control->lock);
    if (lost)
        return client_fail(MOK_ETIMEDOUT, "mokd is not back yet");
    return code ? control_fail(control) : 0;
}

bool control_settle(struct control *control)
{
    uint64_t deadline = mok_now_ns() + SETTLE_NS;

    pthread_mutex_lock(&control->lock);
    while (!control->over) {
        if (control->reading)
            sleep_on_reader(control, mok_now_ns() + SETTLE_NS);
        else
            read_all(control);
    }
    while ((control->reading || control->answers > 0) && mok_now_ns() < deadline)
        sleep_on_reader(control, deadline);
    bool settled = control->answers == 0;
    pthread_mutex_unlock(&control->lock);
    return settled;
}

/* By descriptor number, so that who is about to use it uses the new one. Nobody reads the old one meanwhile. */
int control_replace(struct control *control, struct control *other)
{
    pthread_mutex_lock(&control->lock);
    while (control->reading)
        sleep_on_reader(control, mok_now_ns() + SETTLE_NS);
    int r = dup3(other->fd, control->fd, O_CLOEXEC) < 0 ? -MOK_EFDS : 0;
    if (r == 0) {
        if (control->last_id < other->last_id)
            control->last_id = other->last_id;
        control->over = 0;
        pthread_cond_broadcast(&control->moved);
    }
    pthread_mutex_unlock(&control->lock);
    if (r == 0) {
        fork_disown_fd(other->fd);
        other->fd = mok_close(other->fd); /* no shutdown: the connection goes on */
    }
    control_close(other);
    return r;
}

void control_give_up(struct control *control, int code, const char *text)
{
    pthread_mutex_lock(&control->lock);
    control->given_up = true;
    control->over = code;
    snprintf(control->over_text, sizeof(control->over_text), "%s", text);
    pthread_cond_broadcast(&control->moved);
    pthread_mutex_unlock(&control->lock);
}

void control_interrupt(struct control *control)
{
    shutdown(control->fd, SHUT_RDWR);
}
