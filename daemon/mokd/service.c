/* SPDX-License-Identifier: Apache-2.0 */
#include "service.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <systemd/sd-daemon.h>

#include "device.h"
#include "session.h"

#define TICK_MS 500u /* at most one message a tick */
#define EXTEND_EVERY_NS UINT64_C(5000000000)
#define EXTEND_BY_US UINT64_C(30000000)
/* What does not change is said again so often, so that a new reader of a log knows. */
#define STATUS_MAX 400
#define MAX_WATCHED 8
/* A killed process that is not gone after this long will not go. */
#define DEATH_NS UINT64_C(10000000000)

struct mokd_service {
    struct mokd_server *server;
    uv_timer_t tick;
    bool told;  /* a service manager listens */
    bool ready; /* said, or nobody to say it to */
    bool stopping;
    enum { RELOAD_NONE, RELOAD_BEGUN, RELOAD_DONE } reload;
    uint64_t reload_us;           /* CLOCK_MONOTONIC, as the manager wants it */
    uint64_t sent_ns;             /* the last message */
    uint64_t extended_ns, fed_ns; /* the last of its kind */
    uint64_t watchdog_ns;         /* feed it so often; 0: no watchdog */
    char status[STATUS_MAX];      /* as said last */
    char complaint[256];          /* about the configuration */
    char starving[128];           /* whom the watchdog goes unfed for */
    struct {
        const char *name;
        bool (*lives)(void *cookie);
        void *cookie;
    } watched[MAX_WATCHED];
    size_t n_watched;
};

/* ------------------------------------------------------------------ what there is to say */

static size_t count_devices(const struct mokd_server *server, enum mokd_device_state state)
{
    size_t count = 0;

    for (size_t i = 0; i < server->n_devices; i++)
        count += server->devices[i]->state == state;
    return count;
}

static bool is_settled(const struct mokd_server *server)
{
    for (size_t i = 0; i < server->n_devices; i++)
        if (!server->devices[i]->was_up && server->devices[i]->state != MOKD_DEVICE_FAILED)
            return false;
    return true;
}

/* The first device that is not up: who, and why. */
static const struct mokd_device *first_absent(const struct mokd_server *server)
{
    for (size_t i = 0; i < server->n_devices; i++)
        if (server->devices[i]->state != MOKD_DEVICE_UP)
            return server->devices[i];
    return NULL;
}

static size_t count_sessions(const struct mokd_server *server)
{
    const struct mokd_session *session;
    size_t count = 0;

    TAILQ_FOREACH(session, &server->sessions, link)
        count += session->state == MOKD_SESSION_OPEN;
    return count;
}

static const char *plight(const struct mokd_device *device)
{
    if (device->state == MOKD_DEVICE_FAILED)
        return "has failed";
    return device->was_up || device->restarts ? "is being restarted" : "is starting";
}

static void describe(const struct mokd_service *service, char *text, size_t size)
{
    const struct mokd_server *server = service->server;
    const struct mokd_device *absent = first_absent(server);
    char clean[160];

    if (service->stopping) {
        snprintf(text, size, "Stopping: %zu sessions are told, then %zu workers", count_sessions(server),
                 server->n_devices);
        return;
    }
    size_t used =
        (size_t)snprintf(text, size, "%s: %zu of %zu devices up, %zu sessions", service->ready ? "Serving" : "Starting",
                         count_devices(server, MOKD_DEVICE_UP), server->n_devices, count_sessions(server));
    if (absent && used < size)
        used += (size_t)snprintf(text + used, size - used, "; %s %s%s%s", absent->config->name, plight(absent),
                                 absent->reason[0] ? ": " : "", mok_log_text(clean, sizeof(clean), absent->reason));
    if (service->complaint[0] && used < size)
        snprintf(text + used, size - used, "; %.200s", service->complaint);
}

/* ------------------------------------------------------------------ whether all is well */

static bool worker_lives(const struct mokd_device *device, uint64_t now)
{
    if (!device->worker) /* dead ones are replaced by timers of the loop, which is what runs here */
        return true;
    uint64_t doomed_ns = mokd_worker_doomed_ns(device->worker);
    if (doomed_ns)
        return now - doomed_ns < DEATH_NS;
    return device->state != MOKD_DEVICE_UP || now - device->beat_ns < 2 * mokd_device_patience_ns(device);
}

/* NULL: everything lives; else who does not. */
static const char *first_dead(const struct mokd_service *service, uint64_t now)
{
    const struct mokd_server *server = service->server;

    for (size_t i = 0; i < server->n_devices; i++)
        if (!worker_lives(server->devices[i], now))
            return server->devices[i]->config->name;
    for (size_t i = 0; i < service->n_watched; i++)
        if (!service->watched[i].lives(service->watched[i].cookie))
            return service->watched[i].name;
    return NULL;
}

static bool may_feed(struct mokd_service *service, uint64_t now)
{
    const char *dead = first_dead(service, now);

    if (dead && strcmp(service->starving, dead) != 0)
        mok_log(MOK_LOG_ERROR, "service", "the watchdog is not fed", "because=%s", dead);
    snprintf(service->starving, sizeof(service->starving), "%s", dead ? dead : "");
    return !dead;
}

bool mokd_service_watch(struct mokd_service *service, const char *name, bool (*lives)(void *cookie), void *cookie)
{
    if (service->n_watched == MAX_WATCHED)
        return false;
    service->watched[service->n_watched].name = name;
    service->watched[service->n_watched].lives = lives;
    service->watched[service->n_watched++].cookie = cookie;
    return true;
}

/* ------------------------------------------------------------------ saying it */

struct message {
    char text[STATUS_MAX + 256];
    size_t used;
};

__attribute__((format(printf, 2, 3))) static void add(struct message *message, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    int n = vsnprintf(message->text + message->used, sizeof(message->text) - message->used, format, arguments);
    va_end(arguments);
    if (n > 0 && (size_t)n < sizeof(message->text) - message->used)
        message->used += (size_t)n;
}

static void say(struct mokd_service *service, const struct message *message, uint64_t now)
{
    service->sent_ns = now;
    if (sd_notify(0, message->text) < 0)
        mok_log(MOK_LOG_DEBUG, "service", "the service manager did not take a message", NULL);
}

static void add_status(struct mokd_service *service, struct message *message)
{
    char text[STATUS_MAX];

    describe(service, text, sizeof(text));
    if (strcmp(text, service->status) == 0)
        return;
    memcpy(service->status, text, sizeof(text));
    add(message, "STATUS=%s\n", text);
}

static void add_reload(struct mokd_service *service, struct message *message)
{
    switch (service->reload) {
    case RELOAD_NONE:
        return;
    case RELOAD_BEGUN:
        add(message, "RELOADING=1\nMONOTONIC_USEC=%" PRIu64 "\n", service->reload_us);
        service->reload = RELOAD_DONE;
        return;
    case RELOAD_DONE:
        add(message, "READY=1\n");
        service->reload = RELOAD_NONE;
    }
}

/* Everything that is due, in one message. */
static void speak(struct mokd_service *service, uint64_t now)
{
    struct message message = { .text = "" };

    if (!service->ready && is_settled(service->server)) {
        service->ready = true;
        add(&message, "READY=1\n");
    } else if (service->ready && !service->stopping) {
        add_reload(service, &message);
    }
    if (!service->ready && now - service->extended_ns >= EXTEND_EVERY_NS) {
        service->extended_ns = now;
        add(&message, "EXTEND_TIMEOUT_USEC=%" PRIu64 "\n", EXTEND_BY_US);
    }
    if (service->watchdog_ns && now - service->fed_ns >= service->watchdog_ns && may_feed(service, now)) {
        service->fed_ns = now;
        add(&message, "WATCHDOG=1\n");
    }
    add_status(service, &message);
    if (message.used)
        say(service, &message, now);
}

/* device_failure = exit: better no service than one without all its devices, but only before it has served. */
static const struct mokd_device *why_exit(const struct mokd_service *service)
{
    const struct mokd_server *server = service->server;

    if (service->ready || server->stopping || server->config->device_failure != MOKD_FAILURE_EXIT)
        return NULL;
    for (size_t i = 0; i < server->n_devices; i++)
        if (server->devices[i]->state == MOKD_DEVICE_FAILED)
            return server->devices[i];
    return NULL;
}

static void tick(uv_timer_t *timer)
{
    struct mokd_service *service = timer->data;
    uint64_t now = mok_now_ns();

    const struct mokd_device *device = why_exit(service);
    if (device) {
        mok_log(MOK_LOG_ERROR, "service", "a device has failed, and device_failure = exit", "device=%s error=\"%s\"",
                device->config->name, device->reason);
        mokd_server_fail(service->server, -MOK_EDEVICE);
        return;
    }
    if (service->told && now - service->sent_ns >= TICK_MS * UINT64_C(1000000))
        speak(service, now);
    else if (!service->told)
        service->ready = service->ready || is_settled(service->server);
}

void mokd_service_reloaded(struct mokd_service *service, const char *failure)
{
    snprintf(service->complaint, sizeof(service->complaint), "%s", failure);
    service->reload_us = mok_now_ns() / 1000u;
    service->reload = RELOAD_BEGUN;
}

/* Not kept back: there is only one, and the manager counts the time from it. */
void mokd_service_stopping(struct mokd_service *service)
{
    struct message message = { .text = "" };

    if (!service || !service->told || service->stopping)
        return;
    service->stopping = true;
    add(&message, "STOPPING=1\n");
    add_status(service, &message);
    say(service, &message, mok_now_ns());
}

/* ------------------------------------------------------------------ the object */

int mokd_service_start(struct mokd_server *server, struct mokd_service **ret, struct mokd_error *error)
{
    struct mokd_service *service = calloc(1, sizeof(*service));
    uint64_t watchdog_us = 0;

    if (!service)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    service->server = server;
    service->told = getenv("NOTIFY_SOCKET") != NULL;
    if (service->told && sd_watchdog_enabled(0, &watchdog_us) > 0)
        service->watchdog_ns = watchdog_us * 1000u / 2;
    if (service->watchdog_ns && service->watchdog_ns < 2 * TICK_MS * UINT64_C(1000000))
        mok_log(MOK_LOG_WARNING, "service", "WatchdogSec is too short to be kept, give it at least 2 s", NULL);
    uv_timer_init(&server->loop, &service->tick);
    service->tick.data = service;
    uv_timer_start(&service->tick, tick, TICK_MS / 10, TICK_MS);
    *ret = service;
    return 0;
}

static void closed(uv_handle_t *handle)
{
    free(handle->data);
}

void mokd_service_close(struct mokd_service *service)
{
    if (service)
        uv_close((uv_handle_t *)&service->tick, closed);
}
