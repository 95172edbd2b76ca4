/* SPDX-License-Identifier: Apache-2.0 */
#include "server.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/resource.h>

#include "buffer.h"
#include "client_queue.h"
#include "device.h"
#include "group.h"
#include "layer.h"
#include "listener.h"
#include "names.h"
#include "reload.h"
#include "session.h"
#include "state.h"
#include "storage.h"
#include "timer.h"

/* From the signal on: this long to take everything down in order, then workers are killed. */
#define STOP_MS 8000u

/* ------------------------------------------------------------------ ids */

static bool id_is_taken(const struct mokd_server *server, uint32_t id)
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
        if (++server->last_id == 0) {
            server->ids_wrapped = true;
            server->last_id = 1;
        }
    } while (server->ids_wrapped && id_is_taken(server, server->last_id));
    return server->last_id;
}

/* ------------------------------------------------------------------ stopping, step by step */

static void close_handles(struct mokd_server *server)
{
    server->handles_closed = true;
    mokd_timer_cancel(&server->stop_deadline);
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
 * The next mokd goes on with the sessions. Clients are told first, all of them before any worker, so that whoever sees an
 * operation end knows that mokd has gone; then workers end what they have; then we forget, and what is kept stays.
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
    mokd_listener_close(server->listener);
    server->listener = NULL;
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

/* Half for any one user, so that he alone cannot turn the others away. */
static uint32_t descriptor_share(void)
{
    rlim_t limit = raise_descriptor_limit();

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

static int start(struct mokd_server *server, const char *socket, const char *worker)
{
    struct mokd_error error = { 0 };

    server->descriptor_share = descriptor_share();
    memset(server->reserve, -1, sizeof(server->reserve));
    mokd_reserve_open(server);
    int r = 0;
    if (getrandom(server->boot_id, sizeof(server->boot_id), 0) != sizeof(server->boot_id))
        r = mokd_error_set(&error, -MOK_EIO, "no random bytes");
    if (r == 0 && mokd_storage_start(server) < 0)
        r = mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (r == 0 && mokd_inherited_load(&server->inherited) < 0)
        r = mokd_error_set(&error, -MOK_ENOMEM, "no memory for what the service manager passed");
    if (r == 0 && mokd_state_open(server) < 0)
        r = mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    mokd_inherited_release(&server->inherited);
    if (r == 0)
        r = mokd_listener_open(server, socket, server->config->socket_mode, &server->listener, &error);
    if (r == 0)
        r = make_devices(server, worker, &error);
    if (r == 0) {
        mokd_state_restore(server);
        for (size_t i = 0; i < server->n_devices; i++)
            mokd_device_start(server->devices[i]);
    }
    if (r < 0) {
        mok_log(MOK_LOG_ERROR, "server", "cannot start", "code=%s error=\"%s\"", mok_error_symbol(r), error.text);
        return r;
    }
    mok_log(MOK_LOG_NOTICE, "server", "ready", "version=%s socket=%s devices=%zu worker=%s pid=%d", MOK_BUILD_VERSION,
            socket, server->n_devices, worker, getpid());
    return 0;
}

static void free_all(struct mokd_server *server)
{
    for (size_t i = 0; i < server->n_devices; i++)
        mokd_device_free(server->devices[i]);
    free(server->devices);
    mokd_storage_stop(server);
    mokd_state_close(server);
    mokd_reserve_close(server);
    int r = uv_loop_close(&server->loop);
    if (r < 0)
        mok_log(MOK_LOG_ERROR, "server", "the loop still has handles", "error=\"%s\"", uv_strerror(r));
}

int mokd_server_run(struct mokd_config *config, const char *socket, const char *worker)
{
    struct mokd_server server = { .config = config, .started_ns = mok_now_ns() };

    TAILQ_INIT(&server.sessions);
    TAILQ_INIT(&server.users);
    TAILQ_INIT(&server.pools);
    TAILQ_INIT(&server.groups);
    /* A large allocation holds a thread for a while; of libuv's four, a few users could hold all. */
    setenv("UV_THREADPOOL_SIZE", "16", 0);
    signal(SIGPIPE, SIG_IGN);
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
    r = start(&server, socket, worker);
    if (r < 0) {
        mokd_state_freeze(&server, false);
        stop(&server);
    }
    uv_run(&server.loop, UV_RUN_DEFAULT);
    free_all(&server);
    if (r == 0)
        mok_log(MOK_LOG_NOTICE, "server", "stopped", NULL);
    return r;
}
