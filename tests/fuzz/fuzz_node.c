/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What mokd does with the messages of two peers with valid keys, and with the packets of one on its host, between clients
 * that form groups, allocate and leave, workers that agree or do not, and time that passes: nothing comes apart, and once
 * all clients are gone nothing is left. Bytes: an action each, and what it takes. The mesh is the fake one; timers fire
 * when an action says so, and the thread pool's work is done in the loop's thread, so that an input does the same each time.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "buffer.h"
#include "fake_rack.h"
#include "input.h"
#include "kinds.h"
#include "rack_groups_internal.h"
#include "rack_orders.h"
#include "rack_share.h"
#include "storage.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { SELF, OFFERED, OFFERS, NODES }; /* by their names: "b" offers a link to "c", and gets offers of "a" */
#define SESSIONS 3u
#define DEVICES 2u

static void must(bool condition)
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

static bool workers_refuse;

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

static void fire(uint8_t which)
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
    if (workers_refuse)
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

struct world {
    struct mokd_server server;
    struct mokd_config config;
    struct mokd_options options;
    struct mokd_device_config device_config[DEVICES];
    struct mokd_device device[DEVICES], *devices[DEVICES];
    struct fake_net *net;
    int client[SESSIONS], link; /* our ends */
    uint64_t last_request;
};

static const char *runtime_dir(void)
{
    static char dir[] = "/tmp/mok-fuzz-node-XXXXXX";
    static bool made;

    if (!made)
        must(mkdtemp(dir) != NULL);
    made = true;
    return dir;
}

static void remove_dir(void)
{
    rmdir(runtime_dir());
}

/* Until nothing moves by itself. */
static void settle(struct world *w)
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

static struct mokd_session *session_of(struct world *w, uint64_t n)
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
    settle(w);
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

static void begin(struct world *w)
{
    static char socket[128];
    struct mokd_server *server = &w->server;
    struct mokd_error error;

    n_armed = n_jobs = 0;
    workers_refuse = false;
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

static void end(struct world *w)
{
    struct mokd_server *server = &w->server;
    struct mokd_session *session, *next;

    workers_refuse = false;
    for (session = TAILQ_FIRST(&server->sessions); session; session = next) {
        next = TAILQ_NEXT(session, link);
        mokd_session_close(session, 0, "");
    }
    settle(w);
    /* What waits for the word of other nodes ends with them. */
    fake_net_cut(w->net, SELF, OFFERED);
    fake_net_cut(w->net, SELF, OFFERS);
    settle(w);
    must(TAILQ_EMPTY(&server->sessions) && TAILQ_EMPTY(&server->groups));
    mokd_rack_orders_stop(server);
    mokd_rack_share_stop(server);
    mokd_rack_groups_stop(server);
    settle(w);
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

/* ------------------------------------------------------------------ peers */

/* As the mesh hands it in: unpacked from bytes. */
static void deliver(struct world *w, uint32_t from, const uint8_t *bytes, size_t size)
{
    ProtobufCMessage *frame = NULL;

    if (mok_wire_unpack(&mok__rack_frame__descriptor, bytes, size, &frame) < 0)
        return;
    mokd_rack_groups_handlers.message(&w->server, from, (const Mok__RackFrame *)(const void *)frame);
    mok_wire_free(frame);
}

static void say(struct world *w, uint32_t from, Mok__GroupMessage *message)
{
    uint8_t bytes[4096];
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;

    frame.body_case = MOK__RACK_FRAME__BODY_GROUP;
    frame.group = message;
    must(protobuf_c_message_get_packed_size(&frame.base) <= sizeof(bytes));
    deliver(w, from, bytes, protobuf_c_message_pack(&frame.base, bytes));
}

/* Of one kind, and where that has kinds, of one of those: whatever comes as the body. */
static void say_anything(struct world *w, struct input *in, uint32_t from)
{
    enum { ROOM = 64 };
    uint8_t bytes[ROOM + 256];
    const ProtobufCFieldDescriptor *outer = kind_of(&mok__rack_frame__descriptor, take(in));
    const ProtobufCFieldDescriptor *inner = kind_of(outer->descriptor, take(in));
    size_t size = take(in);

    size = size < in->size ? size : in->size;
    uint8_t *start = memcpy(bytes + ROOM, in->data, size);
    in->data += size;
    in->size -= size;
    if (inner)
        start = wrap(inner, start, &size);
    start = wrap(outer, start, &size);
    deliver(w, from, start, size);
}

/* A group that is known here, or none. */
static uint32_t a_group(const struct world *w, uint8_t n)
{
    const struct mokd_group *group;
    uint32_t last = GROUP_ID_FLAG | n;

    TAILQ_FOREACH(group, &w->server.groups, link)
        if (group->id & GROUP_ID_FLAG) {
            last = group->id;
            if (n-- % 4 == 0)
                break;
        }
    return last;
}

static void say_joining(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__GroupJoining body = MOK__GROUP_JOINING__INIT;
    uint8_t what = take(in), more = take(in);

    message.body_case = MOK__GROUP_MESSAGE__BODY_JOINING;
    message.joining = &body;
    body.uid = getuid();
    body.user = (char *)"";
    body.name = (char *)(what & 1 ? "x" : "y");
    body.size = 2 + (what >> 1 & 1);
    body.rank = what >> 2 & 3;
    body.join = 1 + (what >> 4);
    body.kind = more & 1 ? MOK_DEVICE_CUDA : MOK_DEVICE_HOST;
    body.fabric = more >> 1 & 1;
    body.exclusive = more >> 2 & 1;
    body.no_fabric = (char *)(body.fabric ? "" : "none");
    body.session = 1;
    say(w, from, &message);
}

struct roster {
    Mok__GroupFormed body;
    Mok__GroupRank rank[3], *pointers[3];
};

static void fill_roster(struct input *in, struct roster *ret)
{
    static const char *const names[] = { "b", "a", "c", "b" };
    uint8_t what = take(in), nodes = take(in), joins = take(in);

    ret->body = (Mok__GroupFormed)MOK__GROUP_FORMED__INIT;
    ret->body.group = GROUP_ID_FLAG | (what >> 4);
    ret->body.uid = getuid();
    ret->body.name = (char *)(what & 1 ? "x" : "y");
    ret->body.n_rank = 2 + (what >> 1 & 1);
    ret->body.rank = ret->pointers;
    for (unsigned i = 0; i < 3; i++) {
        ret->pointers[i] = &ret->rank[i];
        ret->rank[i] = (Mok__GroupRank)MOK__GROUP_RANK__INIT;
        ret->rank[i].node = (char *)names[nodes >> 2 * i & 3];
        ret->rank[i].join = 1 + (joins >> 2 * i & 3);
        ret->rank[i].fabric = what >> 2 & 1;
        ret->rank[i].kind = ret->rank[i].fabric ? MOK_DEVICE_CUDA : MOK_DEVICE_HOST;
        ret->rank[i].no_fabric = (char *)"";
        ret->rank[i].session = 1;
    }
}

static void say_formed(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    struct roster roster;

    fill_roster(in, &roster);
    message.body_case = MOK__GROUP_MESSAGE__BODY_FORMED;
    message.formed = &roster.body;
    say(w, from, &message);
}

static void say_step(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__GroupPrepare prepare = MOK__GROUP_PREPARE__INIT;
    Mok__GroupPrepared prepared = MOK__GROUP_PREPARED__INIT;
    Mok__GroupVerdict verdict = MOK__GROUP_VERDICT__INIT;
    Mok__GroupOver over = MOK__GROUP_OVER__INIT;
    Mok__GroupDrop drop = MOK__GROUP_DROP__INIT;
    Mok__GroupCall call = MOK__GROUP_CALL__INIT;
    struct roster roster;
    uint8_t what = take(in), more = take(in);
    uint32_t group = a_group(w, what >> 6), index = more & 3, rank = more >> 2 & 3;
    int code = what & 0x20 ? -MOK_EPEER : 0;

    switch (what & 7) {
    case 0:
        message.body_case = MOK__GROUP_MESSAGE__BODY_PREPARE;
        message.prepare = &prepare;
        prepare.group = group, prepare.index = index, prepare.kind = more >> 4 & 3;
        prepare.object = GROUP_ID_FLAG | take(in);
        if (index == 0) { /* the opening */
            fill_roster(in, &roster);
            prepare.group = roster.body.group;
            prepare.kind = GROUP_OPEN;
            prepare.object = 0;
            prepare.formed = &roster.body;
        }
        break;
    case 1:
        message.body_case = MOK__GROUP_MESSAGE__BODY_PREPARED;
        message.prepared = &prepared;
        prepared.group = group, prepared.index = index, prepared.rank = rank, prepared.code = code;
        break;
    case 2:
        message.body_case = MOK__GROUP_MESSAGE__BODY_VERDICT;
        message.verdict = &verdict;
        verdict.group = group, verdict.index = index, verdict.rank = rank, verdict.code = code;
        break;
    case 3:
        message.body_case = MOK__GROUP_MESSAGE__BODY_OVER;
        message.over = &over;
        over.group = group, over.rank = rank;
        break;
    case 4:
        message.body_case = MOK__GROUP_MESSAGE__BODY_DROP;
        message.drop = &drop;
        drop.group = group, drop.rank = rank, drop.buffer = more & 1 ? 0 : GROUP_ID_FLAG | take(in);
        drop.request = take(in);
        break;
    default:
        message.body_case = MOK__GROUP_MESSAGE__BODY_CALL;
        message.call = &call;
        call.group = group, call.index = index, call.rank = rank, call.kind = GROUP_ALLOC, call.bytes = 4096;
    }
    say(w, from, &message);
}

static void fill_handle(struct world *w, struct input *in, Mok__Handle *ret)
{
    static uint8_t fabric[MOKD_FABRIC_BYTES];
    uint8_t what = take(in);

    ret->group = a_group(w, what & 3);
    ret->kind = 1 + (what >> 2 & 3);
    ret->rank = what >> 4 & 3;
    ret->across = what >> 6 & 1;
    ret->object = ret->kind == MOK__HANDLE_KIND__HANDLE_BELL ? 0 : GROUP_ID_FLAG | take(in);
    ret->bytes = 4096;
    if (what & 0x80 && ret->kind != MOK__HANDLE_KIND__HANDLE_BELL)
        ret->fabric = (ProtobufCBinaryData){ .len = sizeof(fabric), .data = fabric };
}

static void say_handle(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__Handle handle = MOK__HANDLE__INIT;

    fill_handle(w, in, &handle);
    message.body_case = MOK__GROUP_MESSAGE__BODY_HANDLE;
    message.handle = &handle;
    say(w, from, &message);
}

static void say_refused_link(struct world *w, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__GroupHostRefused body = MOK__GROUP_HOST_REFUSED__INIT;

    body.text = (char *)"not here";
    message.body_case = MOK__GROUP_MESSAGE__BODY_HOST_REFUSED;
    message.host_refused = &body;
    say(w, from, &message);
}

/* ------------------------------------------------------------------ a daemon on this host */

static void send_packet(struct world *w, const Mok__HandlePacket *packet, int fd)
{
    if (w->link >= 0 && mok_wire_send(w->link, &packet->base, &fd, fd >= 0) < 0)
        w->link = mok_close(w->link);
}

static void connect_link(struct world *w, bool right)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__HandleHello hello = MOK__HANDLE_HELLO__INIT;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    uint8_t token[HOST_TOKEN_BYTES];
    const char *path;

    mok_close(w->link);
    w->link = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    mokd_host_offer(w->server.rack_groups->links, OFFERED, "c", &path, token);
    snprintf(address.sun_path, sizeof(address.sun_path), "%.100s", path);
    if (connect(w->link, (struct sockaddr *)&address, sizeof(address)) < 0)
        return;
    token[0] ^= !right;
    packet.body_case = MOK__HANDLE_PACKET__BODY_HELLO;
    packet.hello = &hello;
    hello.node = (char *)"c";
    hello.token = (ProtobufCBinaryData){ .len = sizeof(token), .data = token };
    send_packet(w, &packet, -1);
}

static void hand_in(struct world *w, struct input *in)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__Handle handle = MOK__HANDLE__INIT;

    fill_handle(w, in, &handle);
    packet.body_case = MOK__HANDLE_PACKET__BODY_HANDLE;
    packet.handle = &handle;
    send_packet(w, &packet, w->device[0].bell);
}

static void part(struct world *w, uint8_t reason)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__HandleGoodbye goodbye = MOK__HANDLE_GOODBYE__INIT;

    goodbye.reason = reason;
    packet.body_case = MOK__HANDLE_PACKET__BODY_GOODBYE;
    packet.goodbye = &goodbye;
    send_packet(w, &packet, -1);
}

static void use_link(struct world *w, struct input *in)
{
    uint8_t what = take(in);
    size_t size = what >> 2 < in->size ? what >> 2 : in->size;

    if (what >= 0xfc) {
        part(w, what & 3);
        return;
    }

    if ((what & 3) < 2) {
        connect_link(w, what & 1);
        return;
    }
    if ((what & 3) == 2) {
        hand_in(w, in);
        return;
    }
    if (w->link >= 0 && send(w->link, in->data, size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        w->link = mok_close(w->link);
    in->data += size;
    in->size -= size;
}

/* ------------------------------------------------------------------ clients */

static void request(struct world *w, struct input *in)
{
    uint8_t what = take(in), more = take(in);
    struct mokd_session *session = session_of(w, 1 + (what >> 3 & 3));
    Mok__Request message = MOK__REQUEST__INIT;
    Mok__GroupJoin join = MOK__GROUP_JOIN__INIT;
    Mok__GroupLeave leave = MOK__GROUP_LEAVE__INIT;
    Mok__BufferAlloc alloc = MOK__BUFFER_ALLOC__INIT;
    Mok__BufferFree release = MOK__BUFFER_FREE__INIT;
    Mok__Drain drain = MOK__DRAIN__INIT;

    if (!session)
        return;
    message.id = ++w->last_request;
    switch (what & 7) {
    case 0:
    case 1:
    case 2:
        message.body_case = MOK__REQUEST__BODY_GROUP_JOIN;
        message.group_join = &join;
        join.name = (char *)(more & 1 ? "x" : "y");
        join.size = 2 + (more >> 1 & 1);
        join.rank = more >> 2 & 3;
        join.device = more >> 4 & 1;
        join.exclusive = more >> 5 & 1;
        join.timeout_ms = more >> 6 & 1 ? 1000 : 0;
        break;
    case 3:
    case 4:
        message.body_case = MOK__REQUEST__BODY_BUFFER_ALLOC;
        message.buffer_alloc = &alloc;
        alloc.group = what & 0x80 ? 0 : a_group(w, more & 3);
        alloc.device = more >> 2 & 1;
        alloc.bytes = 4096;
        break;
    case 5:
        message.body_case = MOK__REQUEST__BODY_GROUP_LEAVE;
        message.group_leave = &leave;
        leave.group = a_group(w, more & 3);
        break;
    case 6:
        message.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
        message.buffer_free = &release;
        release.buffer = TAILQ_EMPTY(&session->buffers) ? more : TAILQ_FIRST(&session->buffers)->id;
        break;
    default:
        message.body_case = MOK__REQUEST__BODY_DRAIN_ON;
        message.drain_on = &drain;
        drain.on = (char *)(more & 1 ? "a" : "c");
        drain.node = more >> 1 & 1;
        drain.undo = more >> 2 & 1;
    }
    mokd_request_handle(session, &message);
}

static void answer_order(struct world *w, struct input *in, uint32_t from)
{
    uint8_t bytes[512], what = take(in);
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackDrained body = MOK__RACK_DRAINED__INIT;
    Mok__DeviceListReply list = MOK__DEVICE_LIST_REPLY__INIT;
    Mok__DeviceInfo device = MOK__DEVICE_INFO__INIT, *pointer = &device;

    frame.body_case = MOK__RACK_FRAME__BODY_DRAINED;
    frame.drained = &body;
    body.request = what & 7;
    body.code = what & 8 ? -MOK_EACCESS : 0;
    body.text = (char *)"\x1b[2J";
    device.name = (char *)(what & 0x20 ? "d" : "\x1b[2J");
    device.reason = (char *)"\n";
    list.n_device = what >> 4 & 1;
    list.device = &pointer;
    body.devices = what & 0x40 ? NULL : &list;
    deliver(w, from, bytes, protobuf_c_message_pack(&frame.base, bytes));
}

/* ------------------------------------------------------------------ a group that is whole */

static void do_bytes(void (*action)(struct world *w, struct input *in, uint32_t from), struct world *w, uint32_t from,
                     const uint8_t *bytes, size_t size)
{
    struct input in = { bytes, size };

    action(w, &in, from);
    settle(w);
}
#define DO(action, from, ...) do_bytes(action, w, from, (uint8_t[]){ __VA_ARGS__ }, sizeof((uint8_t[]){ __VA_ARGS__ }))

static void ask(struct world *w, struct input *in, uint32_t from)
{
    (void)from;
    request(w, in);
}

/*
 * The words that bring a group of one rank here and one at "c" together, over the fabric or by a link. Which of them fit is
 * a matter of whose name's home it is; the others are refused.
 */
static void form(struct world *w, uint8_t how)
{
    uint8_t name = how & 1, rank = how >> 1 & 1, fabric = how >> 2 & 1;
    uint8_t nodes = rank ? 2 : 2 << 2, id = a_group(w, 1) & 15;

    if (fabric)
        say_refused_link(w, OFFERED);
    else
        connect_link(w, true);
    settle(w);
    DO(ask, SELF, 0, (uint8_t)(name | rank << 2 | fabric << 4));
    DO(say_joining, OFFERED, (uint8_t)(name | !rank << 2), (uint8_t)(fabric ? 3 : 0));
    DO(say_formed, OFFERED, (uint8_t)(name | fabric << 2 | id << 4), nodes, 0);
    DO(say_step, OFFERED, 0, 0, 0, (uint8_t)(name | fabric << 2 | id << 4), nodes, 0);
    if (fabric)
        DO(say_handle, OFFERED, (uint8_t)(!rank << 4 | 0x40), 0);
    else
        hand_in(w, &(struct input){ (uint8_t[]){ (uint8_t)(!rank << 4) }, 1 });
    settle(w);
    DO(say_step, OFFERED, 1, 0);
    DO(say_step, OFFERED, 2, 0);
}

/* ------------------------------------------------------------------ actions */

static void act(struct world *w, struct input *in)
{
    uint8_t action = take(in);
    uint32_t peer = action & 0x80 ? OFFERED : OFFERS;
    struct mokd_session *session;

    switch (action & 15) {
    case 0:
    case 1:
        request(w, in);
        break;
    case 2:
        say_joining(w, in, peer);
        break;
    case 3:
        say_formed(w, in, peer);
        break;
    case 4:
    case 5:
        say_step(w, in, peer);
        break;
    case 6:
        say_handle(w, in, peer);
        break;
    case 7:
        say_refused_link(w, peer);
        break;
    case 8:
    case 9:
        say_anything(w, in, peer);
        break;
    case 10:
        use_link(w, in);
        break;
    case 11:
        answer_order(w, in, peer);
        break;
    case 12:
        fire(take(in));
        break;
    case 13:
        session = session_of(w, 1 + (action >> 4 & 3));
        if (session)
            mokd_session_close(session, 0, "");
        break;
    case 14:
        workers_refuse = action >> 4 & 1;
        break;
    default:
        if (action & 0x40)
            fake_net_choke(w->net, SELF, peer, action >> 4 & 1);
        else if (action & 0x20)
            fake_net_suspect(w->net, SELF, peer, action >> 4 & 1);
        else if (action & 0x10)
            fake_net_heal(w->net, SELF, peer);
        else
            fake_net_cut(w->net, SELF, peer);
    }
    settle(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool first = true;
    struct world *w = calloc(1, sizeof(*w));
    struct input in = { data, size };

    must(w != NULL);
    if (first) {
        mok_log_set_level(0);
        atexit(remove_dir);
    }
    first = false;
    begin(w);
    if (size > 0 && data[0] & 0xf8)
        form(w, take(&in));
    for (int n = 0; in.size && n < 64; n++)
        act(w, &in);
    end(w);
    free(w);
    return 0;
}
