/* SPDX-License-Identifier: Apache-2.0 */
#include "fuzz_node_world.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "rack_orders.h"
#include "rack_share.h"
#include "storage.h"

void must(bool condition)
{
    if (!condition)
        abort();
}

/* ------------------------------------------------------------------ the loop's surroundings: linked with --wrap */

void __real_uv_close(uv_handle_t *handle, uv_close_cb done);
void __wrap_uv_close(uv_handle_t *handle, uv_close_cb done);
int __wrap_uv_timer_start(uv_timer_t *timer, uv_timer_cb fire, uint64_t ms, uint64_t repeat);
int __wrap_uv_timer_stop(uv_timer_t *timer);
int __wrap_uv_queue_work(uv_loop_t *loop, uv_work_t *work, uv_work_cb job, uv_after_work_cb after);
void __wrap_mokd_device_send(struct mokd_device *device, Mok__WorkerRequest *request, const int *fds, size_t count,
                             uint64_t timeout_ms, mokd_answer_handler handler, void *cookie, uint32_t tag);

static struct armed {
    uv_timer_t *timer;
    uv_timer_cb fire;
    bool again;
} armed[256];
static size_t n_armed;

static struct job {
    uv_work_t *work;
    uv_work_cb job;
    uv_after_work_cb after;
} jobs[256];
static size_t n_jobs;

bool world_workers_refuse;

static size_t find_timer(const void *timer)
{
    size_t i = 0;

    while (i < n_armed && armed[i].timer != timer)
        i++;
    return i;
}

int __wrap_uv_timer_stop(uv_timer_t *timer)
{
    size_t i = find_timer(timer);

    if (i < n_armed)
        armed[i] = armed[--n_armed];
    return 0;
}

int __wrap_uv_timer_start(uv_timer_t *timer, uv_timer_cb fire, uint64_t ms, uint64_t repeat)
{
    (void)ms;
    __wrap_uv_timer_stop(timer);
    must(n_armed < ARRAY_SIZE(armed));
    armed[n_armed++] = (struct armed){ timer, fire, repeat > 0 };
    return 0;
}

void __wrap_uv_close(uv_handle_t *handle, uv_close_cb done)
{
    __wrap_uv_timer_stop((uv_timer_t *)(void *)handle);
    __real_uv_close(handle, done);
}

int __wrap_uv_queue_work(uv_loop_t *loop, uv_work_t *work, uv_work_cb job, uv_after_work_cb after)
{
    (void)loop;
    must(n_jobs < ARRAY_SIZE(jobs));
    jobs[n_jobs++] = (struct job){ work, job, after };
    return 0;
}

void world_fire(uint8_t which)
{
    struct armed one;

    if (n_armed == 0)
        return;
    one = armed[which % n_armed];
    if (!one.again)
        __wrap_uv_timer_stop(one.timer);
    one.fire(one.timer);
}

/* A worker that answers at once. */
void __wrap_mokd_device_send(struct mokd_device *device, Mok__WorkerRequest *request, const int *fds, size_t count,
                             uint64_t timeout_ms, mokd_answer_handler handler, void *cookie, uint32_t tag)
{
    static uint8_t handle[MOKD_FABRIC_BYTES];
    _cleanup_wire_fds_ struct mok_wire_fds memory = MOK_WIRE_FDS_INIT;
    Mok__WorkerReply reply = MOK__WORKER_REPLY__INIT;
    Mok__WorkerMemory body = MOK__WORKER_MEMORY__INIT;
    struct mokd_answer answer = { .text = "", .reply = &reply, .fds = &memory };

    (void)device, (void)timeout_ms;
    for (size_t i = 0; i < count; i++)
        must(fcntl(fds[i], F_GETFD) >= 0);
    if (!handler)
        return;
    if (world_workers_refuse)
        answer = (struct mokd_answer){ .code = -MOK_EWORKER, .text = "no" };
    else if (request->body_case == MOK__WORKER_REQUEST__BODY_MEMORY_ALLOC) {
        memory.fd[memory.count++] = open("/dev/null", O_RDONLY | O_CLOEXEC);
        body.fabric = (ProtobufCBinaryData){ .len = sizeof(handle), .data = handle };
        reply.body_case = MOK__WORKER_REPLY__BODY_MEMORY;
        reply.memory = &body;
    }
    handler(cookie, tag, &answer);
}

/* ------------------------------------------------------------------ a mokd without sockets, workers and clocks */

static char dir[] = "/tmp/mok-fuzz-node-XXXXXX";

static void remove_dir(void)
{
    rmdir(dir);
}

static const char *runtime_dir(void)
{
    static bool made;

    if (!made) {
        must(mkdtemp(dir) != NULL);
        atexit(remove_dir);
    }
    made = true;
    return dir;
}

void world_settle(struct world *w)
{
    char bytes[4096];

    for (int turn = 0; turn < 3; turn++) {
        while (n_jobs > 0) {
            struct job job = jobs[0];
            memmove(jobs, jobs + 1, --n_jobs * sizeof(job));
            job.job(job.work);
            if (job.after)
                job.after(job.work, 0);
        }
        fake_net_run(w->net, 100000);
        uv_run(&w->server.loop, UV_RUN_NOWAIT);
        for (size_t i = 0; i < SESSIONS; i++)
            while (w->client[i] >= 0 && recv(w->client[i], bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
                ;
    }
}

struct mokd_session *world_session(struct world *w, uint64_t n)
{
    struct mokd_session *session;

    TAILQ_FOREACH(session, &w->server.sessions, link)
        if (session->id == n && session->state == MOKD_SESSION_OPEN)
            return session;
    return NULL;
}

static void open_session(struct world *w, size_t i)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Hello hello = MOK__HELLO__INIT;
    int fds[2];

    must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) == 0);
    w->client[i] = fds[1];
    must(mokd_session_accept(&w->server, fds[0], true) == 0);
    request.id = 1;
    request.body_case = MOK__REQUEST__BODY_HELLO;
    request.hello = &hello;
    hello.protocol_min = hello.protocol_max = MOKD_PROTOCOL;
    hello.job = (char *)(i ? "job" : "other");
    mokd_request_handle(TAILQ_LAST(&w->server.sessions, mokd_session_list), &request);
    world_settle(w);
}

static void make_devices(struct world *w)
{
    w->server.n_devices = DEVICES;
    w->server.devices = w->devices;
    for (uint32_t i = 0; i < DEVICES; i++) {
        snprintf(w->device_config[i].name, sizeof(w->device_config[i].name), "d%u", i);
        w->device_config[i].kind = i ? MOK_DEVICE_CUDA : MOK_DEVICE_HOST;
        w->device_config[i].memory = 1u << 20;
        w->device[i] = (struct mokd_device){
            .server = &w->server,
            .config = &w->device_config[i],
            .index = i,
            .state = MOKD_DEVICE_UP,
            .bell = open("/dev/null", O_RDWR | O_CLOEXEC),
            .stats = MOKD_STATS_PAGE_INIT,
            .fabric = i == 1,
            .latest = MOK__WORKER_STATS__INIT,
        };
        TAILQ_INIT(&w->device[i].queues);
        w->devices[i] = &w->device[i];
    }
}

void world_begin(struct world *w)
{
    static char socket[128];
    struct mokd_server *server = &w->server;
    struct mokd_error error;

    n_armed = n_jobs = 0;
    world_workers_refuse = false;
    w->link = -1;
    snprintf(socket, sizeof(socket), "%s/mokd.sock", runtime_dir());
    w->options = (struct mokd_options){ .config = &w->config, .socket = socket };
    for (size_t r = 0; r < MOKD_RESOURCES; r++)
        w->config.limits.of[r] = 64u << 20;
    w->config.limits.devices = UINT64_MAX;
    w->config.limits.exclusive = 1;
    w->config.limits.weight = 1;
    w->config.devices = w->device_config;
    w->config.n_devices = DEVICES;
    server->config = &w->config;
    server->options = &w->options;
    server->descriptor_share = 1000;
    TAILQ_INIT(&server->sessions);
    TAILQ_INIT(&server->users);
    TAILQ_INIT(&server->pools);
    TAILQ_INIT(&server->groups);
    TAILQ_INIT(&server->job_totals);
    must(uv_loop_init(&server->loop) == 0);
    make_devices(w);
    w->net = fake_net_new(1);
    server->rack = fake_net_add(w->net, "b", "here", &mokd_rack_groups_handlers, server);
    fake_net_add(w->net, "c", "here", &(struct rack_handlers){ 0 }, NULL);
    fake_net_add(w->net, "a", "here", &(struct rack_handlers){ 0 }, NULL);
    must(mokd_storage_start(server) == 0);
    must(mokd_rack_groups_start(server, &error) == 0);
    must(mokd_rack_orders_start(server, &error) == 0);
    must(mokd_rack_share_start(server, &error) == 0);
    for (size_t i = 0; i < SESSIONS; i++)
        open_session(w, i);
}

void world_end(struct world *w)
{
    struct mokd_server *server = &w->server;
    struct mokd_session *session, *next;

    world_workers_refuse = false;
    for (session = TAILQ_FIRST(&server->sessions); session; session = next) {
        next = TAILQ_NEXT(session, link);
        mokd_session_close(session, 0, "");
    }
    world_settle(w);
    /* What waits for the word of other nodes ends with them. */
    fake_net_cut(w->net, SELF, OFFERED);
    fake_net_cut(w->net, SELF, OFFERS);
    world_settle(w);
    must(TAILQ_EMPTY(&server->sessions) && TAILQ_EMPTY(&server->groups));
    mokd_rack_orders_stop(server);
    mokd_rack_share_stop(server);
    mokd_rack_groups_stop(server);
    world_settle(w);
    must(TAILQ_EMPTY(&server->users) && TAILQ_EMPTY(&server->pools));
    for (uint32_t i = 0; i < DEVICES; i++) {
        must(w->device[i].memory_used == 0 && w->device[i].n_ranks == 0 && !w->device[i].exclusive);
        mok_close(w->device[i].bell);
    }
    for (size_t i = 0; i < SESSIONS; i++)
        mok_close(w->client[i]);
    mok_close(w->link);
    mokd_job_totals_free(server);
    mokd_storage_stop(server);
    fake_net_free(w->net);
    must(uv_loop_close(&server->loop) == 0);
}
