/* SPDX-License-Identifier: Apache-2.0 */
#include "worker_process.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "device.h"
#include "gpu_visible.h"

/* Replies that are taken at a time, so that one worker cannot keep the loop. */
#define READ_BATCH 64

/* Deadlines are looked at every second. A gap longer than this means that mokd did not run. */
#define STALL_NS UINT64_C(3000000000)

struct request {
    TAILQ_ENTRY(request) link;
    uint64_t id;
    uint64_t deadline_ns;
    mokd_answer_handler handler;
    void *cookie;
    uint32_t tag;
};

TAILQ_HEAD(request_list, request);

struct mokd_worker {
    struct mokd_device *device;
    uv_process_t process;
    uv_poll_t poll;
    int fd;
    struct mok_wire_queue out;
    struct request_list requests; /* oldest first */
    uint64_t last_id;
    uint64_t doomed_ns;
    uint64_t checked_ns; /* when deadlines were looked at last; 0: never */
    bool dying;          /* nothing goes to it any more */
    bool hung_up;        /* its socket ended by itself: it is dead, or has a moment to die before it is killed */
    char reason[MOKD_TEXT_MAX];
    unsigned open_handles;
    bool buried;
};

static void free_when_done(struct mokd_worker *worker)
{
    if (worker->buried && worker->open_handles == 0)
        free(worker);
}

static void handle_closed(uv_handle_t *handle)
{
    struct mokd_worker *worker = handle->data;
    worker->open_handles--;
    free_when_done(worker);
}

/* ------------------------------------------------------------------ requests */

static void answer(struct request *request, int code, const char *text, const Mok__WorkerReply *reply,
                   struct mok_wire_fds *fds)
{
    struct mokd_answer result = { .code = code, .text = text ? text : "", .reply = reply, .fds = fds };

    if (request->handler)
        request->handler(request->cookie, request->tag, &result);
    free(request);
}

static void on_ready(uv_poll_t *poll, int status, int events);

static void watch(struct mokd_worker *worker, bool writable)
{
    uv_poll_start(&worker->poll, UV_READABLE | UV_DISCONNECT | (writable ? UV_WRITABLE : 0), on_ready);
}

static void send_failed(struct mokd_worker *worker, struct request *request, int code, bool carries_fds)
{
    char text[96];

    TAILQ_REMOVE(&worker->requests, request, link);
    snprintf(text, sizeof(text), "the request to the worker could not be sent (code %d)", code);
    answer(request, code, text, NULL, NULL);
    /* Descriptors are only with requests that begin something: that one does not begin. One that is too large is its
     * client's affair. Without any other request mokd and the worker would no longer agree on what there is. */
    if (!carries_fds && code != -MOK_ESIZE)
        mokd_worker_kill(worker, text);
}

/* No earlier than that of the requests before it, which the worker takes first. */
static uint64_t next_deadline(const struct mokd_worker *worker, uint64_t timeout_ms)
{
    const struct request *last = TAILQ_LAST(&worker->requests, request_list);
    uint64_t deadline_ns = mok_now_ns() + timeout_ms * 1000000u;

    return last && last->deadline_ns > deadline_ns ? last->deadline_ns : deadline_ns;
}

void mokd_worker_send(struct mokd_worker *worker, Mok__WorkerRequest *message, const int *fds, size_t count,
                      uint64_t timeout_ms, mokd_answer_handler handler, void *cookie, uint32_t tag)
{
    struct mokd_answer none = { .code = -MOK_EWORKER, .text = worker->reason };

    if (worker->dying) {
        if (handler)
            handler(cookie, tag, &none);
        return;
    }
    struct request *request = calloc(1, sizeof(*request));
    if (!request) {
        none = (struct mokd_answer){ .code = -MOK_ENOMEM, .text = "mokd is out of memory" };
        if (handler)
            handler(cookie, tag, &none);
        mokd_worker_kill(worker, "could not be asked: mokd is out of memory");
        return;
    }
    message->id = request->id = ++worker->last_id;
    request->deadline_ns = next_deadline(worker, timeout_ms);
    request->handler = handler;
    request->cookie = cookie;
    request->tag = tag;
    TAILQ_INSERT_TAIL(&worker->requests, request, link);
    int r = mok_wire_queue_send(&worker->out, worker->fd, &message->base, fds, count);
    if (r < 0)
        send_failed(worker, request, r, count > 0);
    else if (r > 0)
        watch(worker, true);
}

static bool read_one(struct mokd_worker *worker);

/* While mokd itself, or the whole machine, did not run, no worker could be heard: that time does not count. */
static void forgive_stall(struct mokd_worker *worker, uint64_t now)
{
    struct request *request;
    uint64_t since = worker->checked_ns ? now - worker->checked_ns : 0;

    worker->checked_ns = now;
    if (since < STALL_NS)
        return;
    TAILQ_FOREACH(request, &worker->requests, link)
        request->deadline_ns += since;
}

void mokd_worker_check(struct mokd_worker *worker)
{
    const struct request *first;
    uint64_t now = mok_now_ns();

    if (worker->hung_up)
        uv_process_kill(&worker->process, SIGKILL);
    forgive_stall(worker, now);
    /* Timers run before sockets: what the worker has said already is heard before it is judged. */
    while (!worker->dying && read_one(worker))
        ;
    first = TAILQ_FIRST(&worker->requests);
    if (first && first->deadline_ns < now)
        mokd_worker_kill(worker, "did not answer in time");
}

uint64_t mokd_worker_doomed_ns(const struct mokd_worker *worker)
{
    return worker->doomed_ns;
}

bool mokd_worker_has_requests(const struct mokd_worker *worker)
{
    return !TAILQ_EMPTY(&worker->requests);
}

uint32_t mokd_worker_pid(const struct mokd_worker *worker)
{
    return (uint32_t)worker->process.pid;
}

/* ------------------------------------------------------------------ replies */

static void take_reply(struct mokd_worker *worker, const Mok__WorkerReply *reply, struct mok_wire_fds *fds)
{
    struct request *request;

    if (reply->id == 0) {
        if (!worker->dying)
            mokd_device_event(worker->device, reply);
        return;
    }
    TAILQ_FOREACH(request, &worker->requests, link)
        if (request->id == reply->id)
            break;
    if (!request) {
        mokd_worker_kill(worker, "answered a request that nobody made");
        return;
    }
    TAILQ_REMOVE(&worker->requests, request, link);
    answer(request, reply->code > 0 ? -MOK_EINTERNAL : reply->code, reply->text, reply,
           fds);
}

/* A dying process closes its socket before it can be waited for; how it died says more than that. */
static void hung_up(struct mokd_worker *worker)
{
    if (worker->dying)
        return;
    worker->dying = worker->hung_up = true;
    worker->doomed_ns = mok_now_ns();
    snprintf(worker->reason, sizeof(worker->reason), "closed its socket");
    uv_poll_stop(&worker->poll);
}

/* False once there is nothing to read. */
static bool read_one(struct mokd_worker *worker)
{
    _cleanup_wire_fds_ struct mok_wire_fds fds = MOK_WIRE_FDS_INIT;
    ProtobufCMessage *message = NULL;
    int r = mok_wire_recv(worker->fd, &mok__worker_reply__descriptor, &message, &fds);

    if (r == -MOK_EAGAIN)
        return false;
    if (r == 0)
        hung_up(worker);
    else if (r < 0)
        mokd_worker_kill(worker,
                         r == -MOK_ENOMEM ? "could not be heard: mokd is out of memory" : "sent a malformed message");
    if (r <= 0)
        return false;
    take_reply(worker, (const Mok__WorkerReply *)message, &fds);
    mok_wire_free(message);
    return true;
}

/* The requests that wait are the last ones of all. */
static struct request *first_waiting(const struct mokd_worker *worker)
{
    struct request *request = TAILQ_LAST(&worker->requests, request_list);

    for (size_t i = 1; i < worker->out.packets && request; i++)
        request = TAILQ_PREV(request, request_list, link);
    return request;
}

/* One whose descriptors the kernel does not take is refused, so that those behind it get through. */
static int flush(struct mokd_worker *worker)
{
    int r;

    while ((r = mok_wire_queue_flush(&worker->out, worker->fd)) == -MOK_EFDS) {
        struct request *request = first_waiting(worker);
        mok_wire_queue_drop(&worker->out);
        if (request)
            send_failed(worker, request, r, true);
    }
    return r;
}

static void on_ready(uv_poll_t *poll, int status, int events)
{
    struct mokd_worker *worker = poll->data;

    if (status < 0) {
        hung_up(worker);
        return;
    }
    if (events & UV_WRITABLE) {
        int r = flush(worker);
        if (r == -MOK_EDAEMON)
            hung_up(worker);
        else if (r < 0)
            mokd_worker_kill(worker, "could not be written to");
        else if (r == 0)
            watch(worker, false);
    }
    for (int i = 0; i < READ_BATCH && !worker->dying; i++)
        if (!read_one(worker))
            break;
}

/* ------------------------------------------------------------------ life and death */

void mokd_worker_kill(struct mokd_worker *worker, const char *reason)
{
    if (worker->dying)
        return;
    worker->dying = true;
    worker->doomed_ns = mok_now_ns();
    snprintf(worker->reason, sizeof(worker->reason), "%s", reason);
    uv_poll_stop(&worker->poll);
    uv_process_kill(&worker->process, SIGKILL);
}

static void exited(uv_process_t *process, int64_t status, int signal)
{
    struct mokd_worker *worker = process->data;

    if (!worker->dying || worker->hung_up) {
        if (signal)
            snprintf(worker->reason, sizeof(worker->reason), "was ended by signal %d", signal);
        else
            snprintf(worker->reason, sizeof(worker->reason), "exited with status %" PRId64, status);
    }
    if (!worker->dying) {
        worker->dying = true;
        while (read_one(worker)) /* what it still said */
            ;
    }
    uv_close((uv_handle_t *)&worker->poll, handle_closed);
    uv_close((uv_handle_t *)&worker->process, handle_closed);
    worker->fd = mok_close(worker->fd);
    mok_wire_queue_clear(&worker->out);
    mokd_device_worker_gone(worker->device, worker->reason);
}

void mokd_worker_bury(struct mokd_worker *worker, int code, const char *text)
{
    struct request *request;

    while ((request = TAILQ_FIRST(&worker->requests))) {
        TAILQ_REMOVE(&worker->requests, request, link);
        answer(request, code, text, NULL, NULL);
    }
    worker->buried = true;
    free_when_done(worker);
}

static int make_sockets(int *ret_ours, int *ret_its, struct mokd_error *error)
{
    int pair[2];

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return mokd_error_set(error, errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_EIO,
                              "no socket for the worker: %s", strerror(errno));
    *ret_ours = pair[0];
    *ret_its = pair[1];
    return 0;
}

/* What a worker's environment says differently from ours. */
#define VISIBLE "CUDA_VISIBLE_DEVICES="
#define ORDER "CUDA_DEVICE_ORDER="
#define PIPE "CUDA_MPS_PIPE_DIRECTORY="
#define PRIORITY "CUDA_MPS_CLIENT_PRIORITY=" /* 0 normal, 1 below that */
/* Names no control daemon, so that CUDA does not join one at its default place. */
#define NO_PIPE "/nonexistent"

static void environment_free(char **list)
{
    for (char **entry = list; list && *entry; entry++)
        free(*entry);
    free(list);
}

static bool is_of(const char *entry, const char *name)
{
    return strncmp(entry, name, strlen(name)) == 0;
}

/* What the service manager means for mokd alone. */
static bool is_mokds(const char *entry)
{
    return is_of(entry, "NOTIFY_SOCKET=") || is_of(entry, "WATCHDOG_") || is_of(entry, "LISTEN_") ||
           is_of(entry, "FDSTORE=");
}

const char *mokd_worker_mps_pipe(const struct mokd_config *config, const struct mokd_device_config *device)
{
    return config->sharing == MOKD_SHARING_MPS && device->kind == MOK_DEVICE_CUDA ? device->mps_pipe : "";
}

/*
 * A worker sees no GPU but its own, so that no mistake of it reaches another; GPUs are numbered as the machine numbers
 * them. One that yields is placed below its clients, so that a kernel of theirs comes first where a block has made
 * room. NULL: no memory. Freed with environment_free.
 */
static char **environment_of(const struct mokd_config *config, const struct mokd_device_config *device)
{
    bool mps = config->sharing == MOKD_SHARING_MPS, yields = mps && device->yield_us > 0;
    size_t count = 0, kept = yields ? 4 : 3;

    while (environ[count])
        count++;
    char **list = calloc(count + kept + 1, sizeof(*list));
    if (!list)
        return NULL;
    char visible[sizeof(VISIBLE) + MOKD_GPU_VISIBLE_MAX] = VISIBLE, pipe[sizeof(PIPE) + MOKD_PATH_MAX];
    mokd_gpu_visible(config, device, "", visible + strlen(VISIBLE));
    const char *its = mokd_worker_mps_pipe(config, device);
    snprintf(pipe, sizeof(pipe), PIPE "%s", its[0] ? its : NO_PIPE);
    list[0] = strdup(visible);
    list[1] = list[0] ? strdup(pipe) : NULL;
    list[2] = list[1] ? strdup(ORDER "PCI_BUS_ID") : NULL;
    if (yields && list[2])
        list[3] = strdup(PRIORITY "1");
    if (!list[kept - 1]) {
        environment_free(list);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        if (is_of(environ[i], VISIBLE) || is_of(environ[i], ORDER) || is_of(environ[i], PIPE) ||
            (yields && is_of(environ[i], PRIORITY)) || is_mokds(environ[i]))
            continue;
        list[kept] = strdup(environ[i]);
        kept += list[kept] != NULL;
    }
    return list;
}

/* In a session of its own, so that Ctrl-C on a terminal reaches mokd alone. It ends when our end of the socket does. */
static int spawn(struct mokd_worker *worker, const char *path, int its, char **environment)
{
    char title[MOK_MAX_NAME + 16];
    snprintf(title, sizeof(title), "mok-worker:%s", worker->device->config->name);
    char *arguments[] = { title, NULL };
    uv_stdio_container_t stdio[4] = {
        { .flags = UV_IGNORE },
        { .flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO },
        { .flags = UV_INHERIT_FD, .data.fd = STDERR_FILENO },
        { .flags = UV_INHERIT_FD, .data.fd = its },
    };
    uv_process_options_t options = {
        .exit_cb = exited,
        .file = path,
        .args = arguments,
        .flags = UV_PROCESS_DETACHED,
        .stdio_count = ARRAY_SIZE(stdio),
        .stdio = stdio,
        .env = environment,
    };
    worker->process.data = worker;
    return uv_spawn(&worker->device->server->loop, &worker->process, &options);
}

static void discard(struct mokd_worker *worker)
{
    worker->buried = true;
    worker->fd = mok_close(worker->fd);
    free_when_done(worker);
}

/* Half of what one user may hold, but any single request. */
static size_t max_waiting_fds(const struct mokd_server *server)
{
    size_t half = server->descriptor_share / 2;
    return half < MOK_WIRE_MAX_FDS ? MOK_WIRE_MAX_FDS : half;
}

static int spawn_code(int error)
{
    switch (error) {
    case UV_EMFILE:
    case UV_ENFILE:
        return -MOK_EFDS;
    case UV_ENOMEM:
    case UV_EAGAIN:
        return -MOK_ENOMEM;
    }
    return -MOK_EWORKER;
}

int mokd_worker_spawn(struct mokd_device *device, const char *path, struct mokd_worker **ret, struct mokd_error *error)
{
    _cleanup_fd_ int its = -1;
    struct mokd_worker *worker = calloc(1, sizeof(*worker));

    if (!worker)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    worker->device = device;
    worker->fd = -1;
    worker->out.max_fds = max_waiting_fds(device->server);
    TAILQ_INIT(&worker->requests);
    int r = make_sockets(&worker->fd, &its, error);
    if (r < 0) {
        discard(worker);
        return r;
    }
    char **environment = environment_of(device->server->config, device->config);
    if (!environment) {
        discard(worker);
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    }
    r = uv_poll_init(&device->server->loop, &worker->poll, worker->fd);
    if (r < 0) {
        environment_free(environment);
        discard(worker);
        return mokd_error_set(error, -MOK_EIO, "the worker's socket cannot be watched: %s", uv_strerror(r));
    }
    worker->poll.data = worker;
    worker->open_handles = 2;
    r = spawn(worker, path, its, environment);
    environment_free(environment);
    if (r < 0) { /* libuv wants the handle closed even so */
        uv_close((uv_handle_t *)&worker->process, handle_closed);
        uv_close((uv_handle_t *)&worker->poll, handle_closed);
        discard(worker);
        return mokd_error_set(error, spawn_code(r), "%s cannot be started: %s", path, uv_strerror(r));
    }
    watch(worker, false);
    *ret = worker;
    return 0;
}
