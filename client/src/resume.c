/* SPDX-License-Identifier: Apache-2.0 */
#include "resume.h"

#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

#include "fork.h"
#include "port.h"

#define PROTOCOL_VERSION 1u
#define TOKEN_BYTES 32u
#define NAP_FIRST_MS 5
#define NAP_MAX_MS 200
#define CONNECT_MS 1000u
/* Names beyond this many are not listed: what mokd made and could not tell then stays until the session ends. */
#define MAX_NAMES 8192u

struct keeper {
    mok_session *session;
    char *path;
    uint64_t id, resume_ms;
    uint8_t token[TOKEN_BYTES];
    pthread_t thread;
    int wake; /* eventfd: written once, to end the thread */

    pthread_mutex_t lock;
    bool stopping;
    struct control *next; /* the connection that is being made; NULL: none */
};

/* ------------------------------------------------------------------ the other mokd */

static bool is_stopping(struct keeper *keeper)
{
    pthread_mutex_lock(&keeper->lock);
    bool stopping = keeper->stopping;
    pthread_mutex_unlock(&keeper->lock);
    return stopping;
}

/* False: it is to end. */
static bool nap(struct keeper *keeper, int ms)
{
    struct pollfd wait = { .fd = keeper->wake, .events = POLLIN };

    poll(&wait, 1, ms);
    return !is_stopping(keeper);
}

/* What this side has names for. */
struct names {
    uint32_t *list;
    size_t groups, objects; /* groups first */
    bool complete;
};

static void collect(mok_session *session, bool settled, struct names *ret)
{
    *ret = (struct names){ .list = calloc(MAX_NAMES, sizeof(uint32_t)) };
    ret->complete = settled && ret->list;
    if (!ret->list)
        return;
    pthread_mutex_lock(&session->lock);
    for (const mok_group *g = session->groups; g && ret->groups < MAX_NAMES; g = g->next)
        ret->list[ret->groups++] = g->id;
    for (const mok_layer *l = session->layers; l && ret->groups + ret->objects < MAX_NAMES; l = l->next)
        ret->list[ret->groups + ret->objects++] = l->id;
    for (const mok_buffer *b = session->buffers; b && ret->groups + ret->objects < MAX_NAMES; b = b->next)
        ret->list[ret->groups + ret->objects++] = b->id;
    pthread_mutex_unlock(&session->lock);
    if (ret->groups + ret->objects == MAX_NAMES)
        ret->complete = false;
}

static int say_hello(struct keeper *keeper, struct control *next, const struct names *names, uint64_t timeout_ms)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Hello body = MOK__HELLO__INIT;
    Mok__Resume resume = MOK__RESUME__INIT;

    resume.session = keeper->id;
    resume.token = (ProtobufCBinaryData){ .len = sizeof(keeper->token), .data = keeper->token };
    resume.complete = names->complete;
    resume.n_group = names->groups;
    resume.group = names->list;
    resume.n_object = names->objects;
    resume.object = names->list ? names->list + names->groups : NULL;
    body.protocol_min = body.protocol_max = PROTOCOL_VERSION;
    body.features = MOK_FEATURE_RESUME | MOK_FEATURE_GRADIENTS | MOK_FEATURE_WGRAD |
                    MOK_FEATURE_TRANSPOSED;
    body.job = (char *)"resume"; /* the session has its own */
    body.resume = &resume;
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = &body;
    int r = control_call(next, &request, timeout_ms, MOK__REPLY__BODY_HELLO, 0, &answer);
    if (r == 0 && answer.reply->hello->session != keeper->id)
        return client_fail(MOK_EPROTO, "mokd answered for session %" PRIu64 ", must be %" PRIu64,
                           answer.reply->hello->session, keeper->id);
    return r;
}

static bool show(struct keeper *keeper, struct control *next)
{
    pthread_mutex_lock(&keeper->lock);
    keeper->next = next;
    bool stopping = keeper->stopping;
    pthread_mutex_unlock(&keeper->lock);
    return !stopping;
}

/* One attempt. A connection that mokd may have taken is not given up: its end would be the session's. */
static int attempt(struct keeper *keeper, const struct names *names, uint64_t left_ms)
{
    mok_session *session = keeper->session;
    struct control *next = NULL;

    int r = control_open(keeper->path, CONNECT_MS, session_on_event, session, &next);
    if (r < 0)
        return r;
    r = show(keeper, next) ? say_hello(keeper, next, names, left_ms ? left_ms : 1) : -MOK_ECANCELED;
    show(keeper, NULL);
    if (r == 0)
        return control_replace(session->control, next);
    control_close(next);
    return r;
}

/* A mokd that answered so will not say anything else. */
static bool is_final(int code)
{
    return code == -MOK_ESESSION || code == -MOK_EACCESS || code == -MOK_EVERSION || code == -MOK_EPROTO ||
           code == -MOK_ENAME;
}

/* The path may be shut for a moment while mokd makes its socket; that is no answer of mokd's. */
static int resume(struct keeper *keeper, const struct names *names)
{
    uint64_t deadline = control_deadline(keeper->resume_ms);
    int pause = NAP_FIRST_MS, r;

    for (;;) {
        uint64_t now = mok_now_ns();
        r = attempt(keeper, names, now < deadline ? (deadline - now) / 1000000u : 0);
        if (r == 0 || is_final(r) || mok_now_ns() >= deadline || !nap(keeper, pause))
            return r;
        pause = 2 * pause < NAP_MAX_MS ? 2 * pause : NAP_MAX_MS;
    }
}

/* ------------------------------------------------------------------ the thread */

/* False: it is to end, or the session is over. */
static bool await_loss(struct keeper *keeper)
{
    struct pollfd wait[] = {
        { .fd = control_fd(keeper->session->control), .events = POLLRDHUP },
        { .fd = keeper->wake, .events = POLLIN },
    };

    while (!(wait[0].revents & (POLLRDHUP | POLLHUP | POLLERR | POLLNVAL))) {
        poll(wait, ARRAY_SIZE(wait), -1);
        if (is_stopping(keeper))
            return false;
    }
    return true;
}

static void give_up(struct keeper *keeper)
{
    char text[400];

    snprintf(text, sizeof(text), "mokd went away, and the session cannot go on with another one: %s",
             client_last_error());
    control_give_up(keeper->session->control, -MOK_EDAEMON, text);
}

static void *keep(void *cookie)
{
    struct keeper *keeper = cookie;
    mok_session *session = keeper->session;
    struct names names;

    while (await_loss(keeper)) {
        bool settled = control_settle(session->control);
        if (control_look(session->control) != -MOK_EDAEMON) /* mokd has ended the session */
            break;
        collect(session, settled, &names);
        int r = resume(keeper, &names);
        free(names.list);
        if (r < 0) {
            give_up(keeper);
            break;
        }
    }
    return NULL;
}

/* All signals are the caller's threads' affair. */
static int thread_start(struct keeper *keeper)
{
    sigset_t all, before;

    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&keeper->thread, NULL, keep, keeper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? client_fail(MOK_ENOMEM, "no thread to watch the connection to mokd: %s", strerror(error)) : 0;
}

static void keeper_free(struct keeper *keeper)
{
    if (keeper->wake >= 0) {
        fork_disown_fd(keeper->wake);
        mok_close(keeper->wake);
    }
    pthread_mutex_destroy(&keeper->lock);
    free(keeper->path);
    free(keeper);
}

int keeper_start(mok_session *session, const char *path, uint64_t resume_ms, const Mok__HelloReply *hello,
                 struct keeper **ret_keeper)
{
    *ret_keeper = NULL;
    if (hello->resume_token.len != TOKEN_BYTES)
        return 0;
    struct keeper *keeper = calloc(1, sizeof(*keeper));
    if (!keeper)
        return client_fail(MOK_ENOMEM, "no memory for a session");
    pthread_mutex_init(&keeper->lock, NULL);
    keeper->session = session;
    keeper->id = hello->session;
    keeper->resume_ms = resume_ms;
    memcpy(keeper->token, hello->resume_token.data, TOKEN_BYTES);
    keeper->path = strdup(control_socket_path(path));
    keeper->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int r = keeper->path ? 0 : client_fail(MOK_ENOMEM, "no memory for a session");
    if (r == 0 && keeper->wake < 0)
        r = client_fail(MOK_EFDS, "no descriptor left for a session");
    if (r == 0)
        r = fork_own_fd(keeper->wake);
    if (r == 0) {
        control_keep(session->control);
        r = thread_start(keeper);
    }
    if (r < 0) {
        keeper_free(keeper);
        return r;
    }
    *ret_keeper = keeper;
    return 0;
}

void keeper_stop(struct keeper *keeper)
{
    const uint64_t one = 1;

    if (!keeper)
        return;
    pthread_mutex_lock(&keeper->lock);
    keeper->stopping = true;
    if (keeper->next)
        control_interrupt(keeper->next);
    pthread_mutex_unlock(&keeper->lock);
    (void)!write(keeper->wake, &one, sizeof(one));
    pthread_join(keeper->thread, NULL);
    keeper_free(keeper);
}

/* ------------------------------------------------------------------ what the program sees */

int session_recovered(const mok_session *session)
{
    if (control_losses(session->control) == __atomic_load_n(&session->recovered, __ATOMIC_ACQUIRE))
        return 0;
    return client_fail(MOK_EDAEMON, "mokd went away; the session's groups come back with mok_session_recover");
}

static uint64_t left_ms(uint64_t deadline_ns)
{
    uint64_t now = mok_now_ns();

    if (deadline_ns == UINT64_MAX)
        return 0;
    return now < deadline_ns ? (deadline_ns - now + 999999u) / 1000000u : 1;
}

/* Queues ended with their workers. */
static int reopen_queues(mok_session *session)
{
    for (uint32_t device = 0; device < MOK_MAX_DEVICES; device++) {
        struct port *port = __atomic_load_n(&session->port[device], __ATOMIC_ACQUIRE);
        uint32_t queue = 0;
        if (!port)
            continue;
        int r = port_get(session, device, &port, &queue);
        if (r < 0)
            return r;
        pthread_mutex_lock(&session->lock);
        for (mok_group *g = session->groups; g; g = g->next)
            if (g->port == port && !g->failure)
                __atomic_store_n(&g->queue, queue, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&session->lock);
    }
    return 0;
}

static int ask_for_groups(mok_session *session, uint64_t deadline_ns)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Recover body = MOK__RECOVER__INIT;

    body.timeout_ms = left_ms(deadline_ns);
    request.body_case = MOK__REQUEST__BODY_RECOVER;
    request.recover = &body;
    return session_call_collective(session, &request, body.timeout_ms, MOK__REPLY__BODY__NOT_SET, 0, &answer);
}

/* That nothing is lost is known by asking alone. */
static int ask_whether_there(mok_session *session)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LimitsQuery body = MOK__LIMITS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_LIMITS_QUERY;
    request.limits_query = &body;
    return session_call(session, &request, MOK__REPLY__BODY_LIMITS, 0, &answer);
}

static size_t count_failures(mok_session *session, const struct failure **ret_newest)
{
    size_t count = 0;

    pthread_mutex_lock(&session->lock);
    *ret_newest = session->failures;
    for (const struct failure *f = session->failures; f; f = f->next)
        count++;
    pthread_mutex_unlock(&session->lock);
    return count;
}

/* Under session->recovering. What has failed since `before` did not come back. */
static int recover(mok_session *session, uint64_t deadline_ns)
{
    const struct failure *newest;
    size_t before = count_failures(session, &newest);

    for (;;) {
        uint32_t losses = control_losses(session->control);
        int r = control_await(session->control, deadline_ns);
        if (r < 0)
            return r;
        bool lost = losses != __atomic_load_n(&session->recovered, __ATOMIC_ACQUIRE);
        r = lost ? reopen_queues(session) : ask_whether_there(session);
        if (r == 0 && lost)
            r = ask_for_groups(session, deadline_ns);
        if (r < 0 && losses != control_losses(session->control) && mok_now_ns() < deadline_ns)
            continue; /* lost once more meanwhile */
        if (r < 0)
            return r;
        __atomic_store_n(&session->recovered, losses, __ATOMIC_RELEASE);
        if (count_failures(session, &newest) > before)
            return client_fail_text(newest->code, newest->text);
        return 0;
    }
}

_public_ int mok_session_recover(mok_session *session, uint64_t timeout_ms)
{
    int r = session_check(session, "session");
    if (r < 0)
        return r;
    pthread_mutex_lock(&session->recovering);
    r = recover(session, control_deadline(timeout_ms));
    pthread_mutex_unlock(&session->recovering);
    return r;
}
