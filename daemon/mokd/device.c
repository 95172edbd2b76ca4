/* SPDX-License-Identifier: Apache-2.0 */
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>

#include "buffer.h"
#include "client_queue.h"
#include "group.h"
#include "mps.h"
#include "state.h"
#include "timer.h"

#define TICK_MS 1000u
/* What takes longer to start than this is told why. */
#define SLOW_START_NS UINT64_C(1500000000)
/* A gap between two ticks longer than this means that mokd, or the whole machine, did not run. */
#define STALL_NS UINT64_C(3000000000)
#define STOP_TIMEOUT_MS 3000u
/* A worker that was up this long has proved that it can live: the next one starts at once. */
#define GOOD_LIFE_NS 1000000000ull
#define BACKOFF_FIRST_MS 250u
#define BACKOFF_MAX_MS 4000u
#define MAX_SHORT_LIVES 12u

static void respawn_later(struct mokd_device *device);

static const char *name_of(const struct mokd_device *device)
{
    return device->config->name;
}

/* ------------------------------------------------------------------ starting */

static void take_fabric(struct mokd_device *device, const Mok__WorkerStarted *about)
{
    char clean[sizeof(device->no_fabric)];

    device->fabric = about->fabric;
    snprintf(device->no_fabric, sizeof(device->no_fabric), "%s", mok_log_text(clean, sizeof(clean), about->no_fabric));
    if (device->config->kind == MOK_DEVICE_CUDA)
        mok_log(MOK_LOG_INFO, "device", device->fabric ? "has fabric handles" : "has no fabric handles",
                "device=%s reason=\"%s\"", name_of(device), device->no_fabric);
}

static void started(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_device *device = cookie;
    char text[MOKD_TEXT_MAX];

    (void)tag;
    if (!answer->reply) /* died first: mokd_device_worker_gone sees to it */
        return;
    if (answer->code < 0 || answer->reply->body_case != MOK__WORKER_REPLY__BODY_STARTED) {
        char clean[MOKD_TEXT_MAX / 2];
        snprintf(text, sizeof(text), "could not start: %s", mok_log_text(clean, sizeof(clean), answer->text));
        device->hopeless = device->config->kind == MOK_DEVICE_CUDA && !device->was_up;
        mokd_worker_kill(device->worker, text);
        return;
    }
    const Mok__WorkerStarted *about = answer->reply->started;
    device->units = about->sms_or_threads;
    if (about->uuid.len == sizeof(device->uuid))
        memcpy(device->uuid, about->uuid.data, sizeof(device->uuid));
    take_fabric(device, about);
    device->was_up = true;
    device->state = MOKD_DEVICE_UP;
    device->up_ns = device->beat_ns = mok_now_ns();
    device->reason[0] = '\0';
    mok_log(MOK_LOG_INFO, "device", "up", "device=%s pid=%u units=%u restarts=%u", name_of(device),
            mokd_worker_pid(device->worker), device->units, device->restarts);
}

static void send_start(struct mokd_device *device)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerStart start = MOK__WORKER_START__INIT;

    start.device = device->index;
    start.name = (char *)name_of(device);
    start.kind = device->config->kind;
    start.threads = device->config->threads;
    start.poll_us = device->server->config->poll_us;
    start.cuda_device = 0; /* the only one that it sees */
    start.mps = device->server->config->sharing == MOKD_SHARING_MPS;
    start.chaos_delay_us = device->config->chaos_delay_us;
    start.reserve_sms = device->config->reserve_sms;
    start.yield_us = device->config->yield_us;
    start.stats_bytes = sizeof(struct mok_stats);
    request.body_case = MOK__WORKER_REQUEST__BODY_START;
    request.start = &start;
    const int fds[] = { device->bell, device->stats.fd };
    mokd_device_send(device, &request, fds, ARRAY_SIZE(fds), device->server->config->start_timeout * UINT64_C(1000),
                     started, device, 0);
}

/* Of the dispatcher, over all workers that the device has had. */
static uint64_t rounds_of(const struct mokd_device *device)
{
    const struct mok_stats *stats = mokd_stats_page_read(&device->stats);
    return stats ? mok_stats_get(&stats->rounds) : 0;
}

/* What mokd lacks says nothing about the device. */
static bool is_shortage(int code)
{
    return code == -MOK_EFDS || code == -MOK_ENOMEM;
}

/* So that a worker can be started though others have taken all other descriptors. */
void mokd_reserve_open(struct mokd_server *server)
{
    for (size_t i = 0; i < MOKD_RESERVE; i++)
        if (server->reserve[i] < 0)
            server->reserve[i] = open("/dev/null", O_RDONLY | O_CLOEXEC);
}

void mokd_reserve_close(struct mokd_server *server)
{
    for (size_t i = 0; i < MOKD_RESERVE; i++)
        server->reserve[i] = mok_close(server->reserve[i]);
}

/* Without its GPU's MPS a worker would come up in the wrong place; mokd_device_wake is called once it is there. */
static bool waits_for_mps(struct mokd_device *device)
{
    const char *reason;

    if (device->config->kind != MOK_DEVICE_CUDA || mokd_mps_is_up(device->server->mps, device->config->cuda, &reason))
        return false;
    device->state = MOKD_DEVICE_RESTING;
    snprintf(device->reason, sizeof(device->reason), "%s", reason);
    return true;
}

static void spawn(struct mokd_device *device)
{
    struct mokd_error error = { 0 };

    if (waits_for_mps(device))
        return;

    device->state = MOKD_DEVICE_STARTING;
    device->spawned_ns = mok_now_ns();
    device->beat_base = device->beat_seen = rounds_of(device);
    mokd_reserve_close(device->server);
    int r = mokd_worker_spawn(device, device->worker_path, &device->worker, &error);
    mokd_reserve_open(device->server);
    device->starved = r < 0 && is_shortage(error.code);
    if (r < 0) {
        snprintf(device->reason, sizeof(device->reason), "%s", error.text);
        device->server->errors++;
        mok_log(MOK_LOG_ERROR, "device", "no worker", "device=%s error=\"%s\"", name_of(device), error.text);
        respawn_later(device);
        return;
    }
    mokd_state_note_worker(device, mokd_worker_pid(device->worker));
    send_start(device);
    mokd_buffers_attach(device); /* behind the start in the worker's socket */
}

static void respawn(void *cookie)
{
    struct mokd_device *device = cookie;
    mokd_timer_cancel(&device->respawn);
    spawn(device);
}

void mokd_device_wake(struct mokd_device *device, const char *reason)
{
    bool rests = !device->worker && device->state == MOKD_DEVICE_RESTING && !device->respawn;

    (void)reason;
    if (!rests || device->server->workers_stopping)
        return;
    device->reason[0] = '\0'; /* what it waited for is there */
    spawn(device);
}

void mokd_device_end_worker(struct mokd_device *device, const char *reason)
{
    char text[MOKD_TEXT_MAX];

    if (!device->worker)
        return;
    snprintf(text, sizeof(text), "was ended: %.*s", MOKD_TEXT_MAX - 16, reason);
    mokd_worker_kill(device->worker, text);
}

static void give_up(struct mokd_device *device)
{
    device->state = MOKD_DEVICE_FAILED;
    mok_log(MOK_LOG_ERROR, "device", "failed", "device=%s starts=%u error=\"%s\"", name_of(device), device->short_lives,
            device->reason);
}

void mokd_device_fail(struct mokd_device *device, const char *reason)
{
    if (device->worker || device->state == MOKD_DEVICE_FAILED || device->server->workers_stopping)
        return;
    mokd_timer_cancel(&device->respawn);
    snprintf(device->reason, sizeof(device->reason), "%s", reason);
    give_up(device);
}

/* At once after a good life, else after a pause that grows. */
static void respawn_later(struct mokd_device *device)
{
    bool good = device->up_ns && mok_now_ns() - device->up_ns >= GOOD_LIFE_NS;

    device->state = MOKD_DEVICE_RESTING;
    device->up_ns = 0;
    if (device->server->workers_stopping)
        return;
    if (!device->starved)
        device->short_lives = good ? 0 : device->short_lives + 1;
    if (device->hopeless || device->short_lives > MAX_SHORT_LIVES) {
        give_up(device);
        return;
    }
    uint64_t pause = 0;
    if (device->short_lives > 1)
        pause = (uint64_t)BACKOFF_FIRST_MS << (device->short_lives - 2);
    if (device->starved && pause < TICK_MS)
        pause = TICK_MS;
    if (pause > BACKOFF_MAX_MS)
        pause = BACKOFF_MAX_MS;
    device->restarts++;
    device->respawn = mokd_timer_start(&device->server->loop, pause, respawn, device);
    if (!device->respawn) {
        snprintf(device->reason, sizeof(device->reason), "mokd is out of memory");
        give_up(device);
    }
}

/* ------------------------------------------------------------------ living */

static void pinged(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_device *device = cookie;

    (void)tag;
    if (answer->code < 0 || answer->reply->body_case != MOK__WORKER_REPLY__BODY_STATS)
        return;
    const Mok__WorkerStats *stats = answer->reply->stats;
    device->latest.ops_done = stats->ops_done;
    device->latest.device_ns = stats->device_ns;
    device->latest.errors = stats->errors;
    for (size_t i = 0; i < stats->n_queue; i++)
        mokd_queue_take_stats(device, stats->queue[i]);
}

void mokd_device_refresh(struct mokd_device *device)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerPing ping = MOK__WORKER_PING__INIT;

    request.body_case = MOK__WORKER_REQUEST__BODY_PING;
    request.ping = &ping;
    mokd_device_send(device, &request, NULL, 0, mokd_device_patience_ns(device) / 1000000u, pinged, device, 0);
}

uint64_t mokd_device_patience_ns(const struct mokd_device *device)
{
    return device->server->config->worker_timeout * UINT64_C(1000000000);
}

/*
 * The dispatcher never waits for long, unlike the control thread, which may have minutes for a request. One that sleeps
 * counts when it is woken, so it is woken before it is judged. A worker that never counted does not know of this.
 */
static void feel_pulse(struct mokd_device *device, uint64_t now)
{
    uint64_t beat = rounds_of(device), one = 1;
    char text[96];

    if (beat != device->beat_seen || now - device->ticked_ns > STALL_NS) {
        device->beat_seen = beat;
        device->beat_ns = now;
        return;
    }
    if (beat == device->beat_base) {
        device->beat_ns = now;
        return;
    }
    if (now - device->beat_ns > mokd_device_patience_ns(device)) {
        snprintf(text, sizeof(text), "stood still for %u s", device->server->config->worker_timeout);
        mokd_worker_kill(device->worker, text);
        return;
    }
    ssize_t n = write(device->bell, &one, sizeof(one)); /* full: it rings already */
    (void)n;
}

/* Drivers wait for a fabric that never comes up without a word, for as long as start_timeout allows. */
static void name_slow_start(struct mokd_device *device, uint64_t now)
{
    const char *why =
        device->config->kind == MOK_DEVICE_CUDA
            ? ": CUDA is slow, or the fabric of the GPUs is not up (systemctl status nvidia-fabricmanager)"
            : "";

    if (device->reason[0] || now - device->spawned_ns < SLOW_START_NS)
        return;
    snprintf(device->reason, sizeof(device->reason), "its worker has not answered in %.1f s%s",
             (double)(now - device->spawned_ns) / 1e9, why);
    mok_log(MOK_LOG_WARNING, "device", "slow to start", "device=%s reason=\"%s\"", name_of(device), device->reason);
}

/* Whatever request is under way says as well as a ping that the control thread lives. */
static void tick(uv_timer_t *timer)
{
    struct mokd_device *device = timer->data;
    uint64_t now = mok_now_ns();

    mokd_reserve_open(device->server);
    if (device->worker && device->state == MOKD_DEVICE_UP)
        feel_pulse(device, now);
    device->ticked_ns = now;
    if (!device->worker)
        return;
    mokd_worker_check(device->worker);
    if (device->state == MOKD_DEVICE_STARTING)
        name_slow_start(device, now);
    if (device->state == MOKD_DEVICE_UP && !mokd_worker_has_requests(device->worker))
        mokd_device_refresh(device);
}

void mokd_device_send(struct mokd_device *device, Mok__WorkerRequest *request, const int *fds, size_t count,
                      uint64_t timeout_ms, mokd_answer_handler handler, void *cookie, uint32_t tag)
{
    char text[MOKD_TEXT_MAX + 128];

    if (device->worker) {
        mokd_worker_send(device->worker, request, fds, count, timeout_ms, handler, cookie, tag);
        return;
    }
    bool failed = device->state == MOKD_DEVICE_FAILED;
    snprintf(text, sizeof(text), "device %s %s: %s", name_of(device), failed ? "has failed" : "is being restarted",
             device->reason);
    struct mokd_answer answer = { .code = failed ? -MOK_EDEVICE : -MOK_EWORKER, .text = text };
    if (handler)
        handler(cookie, tag, &answer);
}

void mokd_device_event(struct mokd_device *device, const Mok__WorkerReply *event)
{
    char clean[MOKD_TEXT_MAX];
    const char *text = mok_log_text(clean, sizeof(clean), event->text);
    int code = event->code < 0 ? event->code : -MOK_EINTERNAL;

    switch (event->body_case) {
    case MOK__WORKER_REPLY__BODY_QUEUE_BROKEN:
        mokd_queue_broken(device, event->queue_broken->queue, code, text);
        return;
    case MOK__WORKER_REPLY__BODY_GROUP_BROKEN:
        mokd_group_broken(device, event->group_broken->group, code, event->group_broken->rank, text);
        return;
    default:
        mokd_worker_kill(device->worker, "reported something unknown");
    }
}

/* ------------------------------------------------------------------ dying */

void mokd_device_worker_gone(struct mokd_device *device, const char *reason)
{
    struct mokd_worker *worker = device->worker;
    struct mokd_server *server = device->server;
    char text[MOKD_TEXT_MAX + 64];

    /* One that took all of start_timeout would do so again, and again. */
    if (device->state == MOKD_DEVICE_STARTING && !device->was_up &&
        mok_now_ns() - device->spawned_ns >= server->config->start_timeout * UINT64_C(1000000000))
        device->hopeless = true;
    device->worker = NULL;
    device->state = MOKD_DEVICE_RESTING;
    device->ops_done += device->latest.ops_done;
    device->device_ns += device->latest.device_ns;
    device->errors += device->latest.errors;
    device->latest = (Mok__WorkerStats)MOK__WORKER_STATS__INIT;
    snprintf(device->reason, sizeof(device->reason), "the worker %s", reason);
    snprintf(text, sizeof(text), "the worker of device %s %s", name_of(device), reason);
    if (!server->workers_stopping) {
        server->errors++;
        mok_log(MOK_LOG_ERROR, "device", "worker lost", "device=%s pid=%u error=\"%s\"", name_of(device),
                mokd_worker_pid(worker), device->reason);
    }
    mokd_queues_recover(device);
    mokd_groups_device_lost(device, text);
    mokd_worker_bury(worker, -MOK_EWORKER, text);
    respawn_later(device);
    mokd_server_worker_gone(server);
}

static void stopped(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    (void)cookie;
    (void)tag;
    (void)answer;
}

static void stop_overdue(void *cookie)
{
    struct mokd_device *device = cookie;

    mokd_timer_cancel(&device->respawn);
    if (!device->worker)
        return;
    mok_log(MOK_LOG_WARNING, "device", "worker killed: it did not stop in time", "device=%s pid=%u", name_of(device),
            mokd_worker_pid(device->worker));
    mokd_worker_kill(device->worker, "did not stop in time");
}

void mokd_device_stop(struct mokd_device *device)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerStop stop = MOK__WORKER_STOP__INIT;

    mokd_timer_cancel(&device->respawn);
    if (!device->worker)
        return;
    request.body_case = MOK__WORKER_REQUEST__BODY_STOP;
    request.stop = &stop;
    mokd_device_send(device, &request, NULL, 0, 2 * STOP_TIMEOUT_MS, stopped, device, 0);
    device->respawn = mokd_timer_start(&device->server->loop, STOP_TIMEOUT_MS, stop_overdue, device);
    if (!device->respawn)
        mokd_worker_kill(device->worker, "is to stop, and mokd is out of memory");
}

void mokd_device_kill(struct mokd_device *device)
{
    if (device->worker)
        mokd_worker_kill(device->worker, "is to stop now");
}

/* ------------------------------------------------------------------ the object */

int mokd_device_new(struct mokd_server *server, uint32_t index, const char *worker_path, struct mokd_device **ret)
{
    struct mokd_device *device = calloc(1, sizeof(*device));

    if (!device)
        return -MOK_ENOMEM;
    device->server = server;
    device->config = &server->config->devices[index];
    device->worker_path = worker_path;
    device->index = index;
    device->units = device->config->threads;
    device->latest = (Mok__WorkerStats)MOK__WORKER_STATS__INIT;
    TAILQ_INIT(&device->queues);
    device->stats = (struct mokd_stats_page)MOKD_STATS_PAGE_INIT;
    device->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int r = device->bell >= 0 ? 0 : errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_EIO;
    if (r == 0)
        r = mokd_stats_page_open(&device->stats);
    if (r < 0) {
        mok_close(device->bell);
        free(device);
        return r;
    }
    uv_timer_init(&server->loop, &device->tick);
    device->tick.data = device;
    uv_timer_start(&device->tick, tick, TICK_MS, TICK_MS);
    *ret = device;
    return 0;
}

void mokd_device_start(struct mokd_device *device)
{
    spawn(device);
}

void mokd_device_close_handles(struct mokd_device *device)
{
    mokd_timer_cancel(&device->respawn);
    uv_close((uv_handle_t *)&device->tick, NULL);
}

void mokd_device_free(struct mokd_device *device)
{
    mokd_stats_page_close(&device->stats);
    mok_close(device->bell);
    free(device);
}

int mokd_device_find(struct mokd_server *server, uint32_t index, struct mokd_device **ret, struct mokd_error *error)
{
    if (index >= server->n_devices)
        return mokd_error_set(error, -MOK_ENODEV, "device = %u: this node has %zu devices", index, server->n_devices);
    struct mokd_device *device = server->devices[index];
    if (device->state == MOKD_DEVICE_FAILED)
        return mokd_error_set(error, -MOK_EDEVICE, "device = %u: %s has failed: %s", index, name_of(device),
                              device->reason);
    *ret = device;
    return 0;
}

static uint32_t public_state(const struct mokd_device *device)
{
    switch (device->state) {
    case MOKD_DEVICE_UP:
        return MOK__DEVICE_STATE__DEVICE_UP;
    case MOKD_DEVICE_FAILED:
        return MOK__DEVICE_STATE__DEVICE_FAILED;
    case MOKD_DEVICE_RESTING:
    case MOKD_DEVICE_STARTING:
        break;
    }
    return MOK__DEVICE_STATE__DEVICE_STARTING;
}

void mokd_device_info(const struct mokd_device *device, Mok__DeviceInfo *ret)
{
    *ret = (Mok__DeviceInfo)MOK__DEVICE_INFO__INIT;
    ret->index = device->index;
    ret->name = (char *)name_of(device);
    ret->kind = device->config->kind;
    ret->threads = device->units;
    ret->memory_bytes = device->config->memory;
    ret->memory_used = device->memory_used;
    ret->state = public_state(device);
    ret->restarts = device->restarts;
    ret->sessions = device->n_queues;
    ret->ops_done = device->ops_done + device->latest.ops_done;
    ret->device_ns = device->device_ns + device->latest.device_ns;
    ret->reason = (char *)device->reason;
    ret->draining = device->draining;
    ret->exclusive_group = device->exclusive ? device->exclusive->id : 0;
    ret->groups = device->n_ranks;
    ret->fabric = device->fabric;
    ret->no_fabric = (char *)device->no_fabric;
    ret->mps_pipe = (char *)mokd_worker_mps_pipe(device->server->config, device->config);
    ret->mps_own = ret->mps_pipe[0] && device->server->config->mps == MOKD_MPS_OWN;
    if (device->config->kind == MOK_DEVICE_CUDA && device->was_up) {
        ret->uuid.data = (uint8_t *)device->uuid;
        ret->uuid.len = sizeof(device->uuid);
    }
    ret->worker_pid = device->worker ? mokd_worker_pid(device->worker) : 0;
}
