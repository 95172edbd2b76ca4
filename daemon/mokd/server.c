/* SPDX-License-Identifier: Apache-2.0 */
#include "server.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

#include "buffer.h"
#include "admission.h"
#include "client_queue.h"
#include "device.h"
#include "group.h"
#include "http.h"
#include "inherited.h"
#include "layer.h"
#include "listener.h"
#include "memory_bound.h"
#include "mps.h"
#include "names.h"
#include "rack_groups.h"
#include "rack_node.h"
#include "rack_orders.h"
#include "rack_share.h"
#include "recent.h"
#include "reload.h"
#include "service.h"
#include "session.h"
#include "state.h"
#include "storage.h"
#include "threads.h"
#include "timer.h"
#include "trace.h"
#include "usage.h"

/* From the signal on: this long to take everything down in order, then workers are killed. */
#define STOP_MS 8000u

/* ------------------------------------------------------------------ ids */

bool mokd_server_id_is_taken(const struct mokd_server *server, uint32_t id)
{
    const struct mokd_session *session;
    const struct mokd_queue *queue;
    const struct mokd_buffer *buffer;
    const struct mokd_group *group;
    const struct mokd_layer *layer;

    TAILQ_FOREACH(session, &server->sessions, link) {
        TAILQ_FOREACH(queue, &session->queues, link)
            if (queue->id == id)
                return true;
        TAILQ_FOREACH(buffer, &session->buffers, link)
            if (buffer->id == id)
                return true;
    }
    TAILQ_FOREACH(group, &server->groups, link) {
        if (group->id == id)
            return true;
        TAILQ_FOREACH(layer, &group->layers, link)
            if (layer->id == id)
                return true;
    }
    return false;
}

uint32_t mokd_server_next_id(struct mokd_server *server)
{
    do {
        if (++server->last_id >= GROUP_ID_FLAG) { /* from there on they are the rack's */
            server->ids_wrapped = true;
            server->last_id = 1;
        }
    } while (server->ids_wrapped && mokd_server_id_is_taken(server, server->last_id));
    return server->last_id;
}

/* ------------------------------------------------------------------ stopping, step by step */

static void close_handles(struct mokd_server *server)
{
    server->handles_closed = true;
    mokd_usage_stop(server);
    mokd_timer_cancel(&server->stop_deadline);
    mokd_rack_share_stop(server);
    mokd_rack_groups_stop(server);
    mokd_rack_stop(server);
    mokd_mps_close(server->mps);
    server->mps = NULL;
    mokd_service_close(server->service);
    server->service = NULL;
    for (size_t i = 0; i < server->n_devices; i++)
        mokd_device_close_handles(server->devices[i]);
    uv_close((uv_handle_t *)&server->save, NULL);
    uv_close((uv_handle_t *)&server->sigterm, NULL);
    uv_close((uv_handle_t *)&server->sigint, NULL);
    uv_close((uv_handle_t *)&server->sighup, NULL);
}

static void close_sessions(struct mokd_server *server);
static void stop_workers(struct mokd_server *server);

void mokd_server_worker_gone(struct mokd_server *server)
{
    if (!server->workers_stopping || server->handles_closed)
        return;
    for (size_t i = 0; i < server->n_devices; i++)
        if (server->devices[i]->worker)
            return;
    if (TAILQ_EMPTY(&server->sessions))
        close_handles(server);
    else if (!server->closing_sessions)
        close_sessions(server);
}

void mokd_server_session_gone(struct mokd_server *server)
{
    if (!server->stopping || !TAILQ_EMPTY(&server->sessions))
        return;
    if (server->workers_stopping) {
        mokd_server_worker_gone(server);
        return;
    }
    stop_workers(server);
}

static void stop_overdue(void *cookie)
{
    struct mokd_server *server = cookie;

    mok_log(MOK_LOG_WARNING, "server", "the orderly stop takes too long, workers are killed", NULL);
    for (size_t i = 0; i < server->n_devices; i++)
        mokd_device_kill(server->devices[i]);
}

static void close_sessions(struct mokd_server *server)
{
    struct mokd_session *session, *next;

    server->closing_sessions = true;
    for (session = TAILQ_FIRST(&server->sessions); session; session = next) {
        next = TAILQ_NEXT(session, link);
        mokd_session_close(session, -MOK_EDAEMON, "mokd is stopping");
    }
    mokd_server_session_gone(server); /* there may be none */
}

static void stop_workers(struct mokd_server *server)
{
    server->workers_stopping = true;
    for (size_t i = 0; i < server->n_devices; i++)
        mokd_device_stop(server->devices[i]);
    mokd_server_worker_gone(server); /* there may be none */
}

/*
 * The next mokd goes on with the sessions. Clients are told first, all of them before any worker, so that whoever sees
 * an operation end knows that mokd has gone; then workers end what they have; then we forget, and what is kept stays.
 */
static void suspend(struct mokd_server *server)
{
    struct mokd_session *session;

    mokd_state_freeze(server, true);
    TAILQ_FOREACH(session, &server->sessions, link)
        mokd_session_hang_up(session, "mokd is stopping");
    stop_workers(server);
}

static void stop(struct mokd_server *server)
{
    if (server->stopping)
        return;
    server->stopping = true;
    mokd_service_stopping(server->service);
    mokd_rack_leave(server);
    mokd_listener_close(server->listener);
    mokd_listener_close(server->admin_listener);
    server->listener = server->admin_listener = NULL;
    mokd_trace_hurry(server, NULL);
    mokd_http_close(server->http);
    server->http = NULL;
    server->stop_deadline = mokd_timer_start(&server->loop, STOP_MS, stop_overdue, server);
    mokd_timer_cancel(&server->resume_deadline);
    if (mokd_state_is_kept(server))
        suspend(server);
    else
        close_sessions(server);
}

static void on_stop_signal(uv_signal_t *handle, int number)
{
    mok_log(MOK_LOG_NOTICE, "server", "stopping", "signal=%s", number == SIGTERM ? "SIGTERM" : "SIGINT");
    stop(handle->data);
}

void mokd_server_fail(struct mokd_server *server, int code)
{
    server->failure = code;
    stop(server);
}

static void on_hangup(uv_signal_t *handle, int number)
{
    (void)number;
    mokd_reload(handle->data);
}

/* ------------------------------------------------------------------ starting */

/* Changes that nobody is told of. */
static void save(uv_prepare_t *handle)
{
    mokd_state_save(handle->data);
}

static void watch_signal(struct mokd_server *server, uv_signal_t *handle, int number, uv_signal_cb callback)
{
    uv_signal_init(&server->loop, handle);
    handle->data = server;
    uv_signal_start(handle, callback, number);
}

/* Every buffer, queue and connection holds descriptors, and the soft limit is made for programs that use select(). */
static rlim_t raise_descriptor_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return 1024;
    rlim_t before = limit.rlim_cur;
    if (limit.rlim_cur == limit.rlim_max)
        return before;
    limit.rlim_cur = limit.rlim_max;
    if (setrlimit(RLIMIT_NOFILE, &limit) == 0)
        return limit.rlim_cur;
    mok_log(MOK_LOG_WARNING, "server", "descriptor limit not raised", "error=\"%s\"", strerror(errno));
    return before;
}

/* Below this a job or two are enough to run out of them. */
#define FEW_DESCRIPTORS 4096u

static bool has_gpu(const struct mokd_config *config)
{
    for (size_t i = 0; i < config->n_devices; i++)
        if (config->devices[i].kind == MOK_DEVICE_CUDA)
            return true;
    return false;
}

/* Who fills a device's memory must not make the kernel end something for want of it. */
static void check_memory(const struct mokd_server *server)
{
    int limited;
    uint64_t bound = mokd_memory_bound(&limited), promised = 0;

    for (size_t i = 0; i < server->config->n_devices; i++)
        if (server->config->devices[i].kind == MOK_DEVICE_HOST)
            promised += server->config->devices[i].memory;
    if (bound > 0 && promised > bound)
        mok_log(MOK_LOG_WARNING, "server", "devices promise more memory than there is: the kernel will end processes",
                "promised=%" PRIu64 " bound=%" PRIu64 " remedy=\"%s\"", promised, bound,
                limited ? "raise MemoryMax of the unit, or lower memory of the devices"
                        : "lower memory of the devices");
}

/* A limit that will be missed later, in a driver or in somebody's request, is named now. */
static void check_limits(const struct mokd_server *server, rlim_t descriptors)
{
    struct rlimit locked;

    check_memory(server);
    if (descriptors < FEW_DESCRIPTORS)
        mok_log(MOK_LOG_WARNING, "server", "few descriptors: jobs will be refused some",
                "limit=%" PRIu64 " wanted=%u remedy=\"raise LimitNOFILE of the unit, or ulimit -n\"",
                (uint64_t)descriptors, FEW_DESCRIPTORS);
    if (has_gpu(server->config) && getrlimit(RLIMIT_MEMLOCK, &locked) == 0 && locked.rlim_cur != RLIM_INFINITY)
        mok_log(MOK_LOG_WARNING, "server", "locked memory is limited: a GPU's workers may fail to pin theirs",
                "limit=%" PRIu64 " remedy=\"LimitMEMLOCK=infinity in the unit, or ulimit -l unlimited\"",
                (uint64_t)locked.rlim_cur);
}

/* Half for any one user, so that he alone cannot turn the others away. */
static uint32_t descriptor_share(const struct mokd_server *server)
{
    rlim_t limit = raise_descriptor_limit();

    check_limits(server, limit);
    return limit / 2 < UINT32_MAX ? (uint32_t)(limit / 2) : UINT32_MAX;
}

static int make_devices(struct mokd_server *server, const char *worker, struct mokd_error *error)
{
    size_t count = server->config->n_devices;

    server->devices = calloc(count, sizeof(struct mokd_device *));
    if (!server->devices)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    for (size_t i = 0; i < count; i++) {
        int r = mokd_device_new(server, (uint32_t)i, worker, &server->devices[i]);
        if (r < 0)
            return mokd_error_set(error, r, "device %s: %s", server->config->devices[i].name, mok_error_text(r));
        server->n_devices++;
    }
    return 0;
}

/* A socket of the service manager's, or else our own. */
static int open_door(struct mokd_server *server, enum mokd_door door, struct mokd_listener **ret,
                     struct mokd_error *error)
{
    bool admin = door == MOKD_DOOR_ADMIN;
    const char *path = admin ? server->options->admin_socket : server->options->socket;
    unsigned mode = admin ? server->config->admin_socket_mode : server->config->socket_mode;
    int fd = mokd_inherited_take(server->options->inherited, admin ? "mok-admin" : "mok");

    if (fd < 0)
        return path[0] ? mokd_listener_open(server, door, path, mode, ret, error) : 0;
    int r = mokd_listener_adopt(server, door, fd, ret, error);
    if (r < 0)
        mok_close(fd);
    return r;
}

static int open_doors(struct mokd_server *server, struct mokd_error *error)
{
    int r = open_door(server, MOKD_DOOR_CLIENTS, &server->listener, error);
    return r < 0 ? r : open_door(server, MOKD_DOOR_ADMIN, &server->admin_listener, error);
}

/* systemd gives a list where the unit has several. */
static const char *state_dir(const struct mokd_config *config)
{
    static char first[MOKD_PATH_MAX];
    const char *given = getenv("STATE_DIRECTORY");

    if (config->state_dir[0] || !given)
        return config->state_dir;
    snprintf(first, sizeof(first), "%.*s", (int)strcspn(given, ":"), given);
    return first;
}

static int start(struct mokd_server *server)
{
    const char *worker = server->options->worker;
    struct mokd_error error = { 0 };

    server->descriptor_share = descriptor_share(server);
    memset(server->reserve, -1, sizeof(server->reserve));
    mokd_reserve_open(server);
    int r = mokd_threads_start(&server->loop, &error);
    if (r == 0 && getrandom(server->boot_id, sizeof(server->boot_id), 0) != sizeof(server->boot_id))
        r = mokd_error_set(&error, -MOK_EIO, "no random bytes");
    if (r == 0 && mokd_storage_start(server) < 0)
        r = mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (r == 0 && mokd_usage_open(server, state_dir(server->config)) < 0)
        r = mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (r == 0 && mokd_state_open(server) < 0)
        r = mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (r == 0)
        r = open_doors(server, &error);
    if (r == 0)
        r = mokd_http_open(server, &server->http, &error);
    if (r == 0)
        r = mokd_rack_start(server, &error);
    if (r == 0)
        r = mokd_rack_groups_start(server, &error);
    if (r == 0)
        r = mokd_rack_orders_start(server, &error);
    if (r == 0)
        r = mokd_rack_share_start(server, &error);
    if (r == 0)
        r = make_devices(server, worker, &error);
    if (r == 0)
        r = mokd_mps_start(server, &server->mps, &error);
    if (r == 0) {
        mokd_state_restore(server);
        mokd_drain_announce(server);
        for (size_t i = 0; i < server->n_devices; i++)
            mokd_device_start(server->devices[i]);
    }
    if (r == 0)
        r = mokd_service_start(server, &server->service, &error);
    if (r == 0 && server->rack)
        mokd_service_watch(server->service, "rack", mokd_rack_lives, server);
    if (r < 0) {
        mok_log(MOK_LOG_ERROR, "server", "cannot start", "code=%s error=\"%s\"", mok_error_symbol(r), error.text);
        return r;
    }
    mok_log(MOK_LOG_NOTICE, "server", "ready", "version=%s socket=%s devices=%zu worker=%s pid=%d", MOK_BUILD_VERSION,
            server->options->socket, server->n_devices, worker, getpid());
    return 0;
}

static void free_all(struct mokd_server *server)
{
    mokd_usage_close(server);
    for (size_t i = 0; i < server->n_devices; i++)
        mokd_device_free(server->devices[i]);
    free(server->devices);
    mokd_job_totals_free(server);
    mokd_storage_stop(server);
    mokd_state_close(server);
    mokd_reserve_close(server);
    int r = uv_loop_close(&server->loop);
    if (r < 0)
        mok_log(MOK_LOG_ERROR, "server", "the loop still has handles", "error=\"%s\"", uv_strerror(r));
}

int mokd_server_run(const struct mokd_options *options)
{
    struct mokd_server server = {
        .config = options->config,
        .options = options,
        .started_ns = mok_now_ns(),
    };

    TAILQ_INIT(&server.sessions);
    TAILQ_INIT(&server.users);
    TAILQ_INIT(&server.pools);
    TAILQ_INIT(&server.groups);
    TAILQ_INIT(&server.job_totals);
    mokd_threads_choose();
    signal(SIGPIPE, SIG_IGN);
    mokd_recent_start();
    int r = uv_loop_init(&server.loop);
    if (r < 0) {
        mok_log(MOK_LOG_ERROR, "server", "cannot start", "error=\"%s\"", uv_strerror(r));
        return -MOK_EIO;
    }
    uv_prepare_init(&server.loop, &server.save);
    server.save.data = &server;
    uv_prepare_start(&server.save, save);
    watch_signal(&server, &server.sigterm, SIGTERM, on_stop_signal);
    watch_signal(&server, &server.sigint, SIGINT, on_stop_signal);
    watch_signal(&server, &server.sighup, SIGHUP, on_hangup);
    r = start(&server);
    if (r < 0) {
        mokd_state_freeze(&server, false);
        stop(&server);
    }
    uv_run(&server.loop, UV_RUN_DEFAULT);
    free_all(&server);
    r = r < 0 ? r : server.failure;
    if (r == 0)
        mok_log(MOK_LOG_NOTICE, "server", "stopped", NULL);
    return r;
}
