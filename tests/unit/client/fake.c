/* SPDX-License-Identifier: Apache-2.0 */
#include "fake.h"

#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cmocka.h>

#include "memory.h"
#include "mok/types.h"
#include "queue.h"
#include "sync.h"
#include "util.h"

#define MAX_QUEUES 8
#define MAX_HELD 8192
#define MAX_LATE 16

struct served {
    struct mok_queue queue;
    struct mok_queue_worker worker;
    uint32_t held[MAX_HELD];
    unsigned held_count;
    uint32_t device;
    bool closed;
    bool given_back;
};

struct fake_connection {
    struct fake *fake;
    int fd;
    pthread_t thread;
    pthread_mutex_t lock; /* the queues */
    struct served *queue[MAX_QUEUES];
    unsigned queues;
    uint32_t last_id;                 /* of buffers, groups and layers */
    ProtobufCMessage *late[MAX_LATE]; /* requests not answered yet */
    unsigned late_count;
    int kept_fd; /* -1: none */
};

#define flag(fake, name) __atomic_load_n(&(fake)->name, __ATOMIC_ACQUIRE)

/* ------------------------------------------------------------------ the worker's side */

static void complete(struct fake *fake, struct served *q, uint32_t slot, const struct mok_cqe *cqe)
{
    mok_queue_worker_complete(&q->worker, slot, cqe);
    __atomic_fetch_add(&fake->completed, 1, __ATOMIC_RELEASE);
}

static void finish(struct fake *fake, struct served *q, const struct mok_sqe *sqe, uint32_t slot)
{
    struct mok_cqe cqe = { .engine = MOK_DEVICE_HOST };

    if (sqe->opcode == MOK_OP_FORWARD || sqe->opcode == MOK_OP_BACKWARD) {
        pthread_mutex_lock(&fake->lock);
        cqe = fake->cqe;
        pthread_mutex_unlock(&fake->lock);
    }
    if (sqe->opcode == MOK_OP_CANCEL)
        cqe.result = flag(fake, cancel_result);
    complete(fake, q, slot, &cqe);
}

static void serve(struct fake *fake, struct served *q)
{
    struct mok_sqe sqe;
    uint32_t slot;

    if (q->closed || flag(fake, idle))
        return;
    if (!flag(fake, hold)) {
        const struct mok_cqe cqe = { .engine = MOK_DEVICE_HOST };
        while (q->held_count > 0)
            complete(fake, q, q->held[--q->held_count], &cqe);
    }
    while (mok_queue_worker_take(&q->worker, &sqe, &slot) == 1) {
        pthread_mutex_lock(&fake->lock);
        fake->last_sqe = sqe;
        pthread_mutex_unlock(&fake->lock);
        __atomic_fetch_add(&fake->taken, 1, __ATOMIC_RELEASE);
        if (flag(fake, hold) && sqe.opcode != MOK_OP_CANCEL)
            q->held[q->held_count++] = slot;
        else
            finish(fake, q, &sqe, slot);
    }
}

static void serve_all(struct fake_connection *c)
{
    pthread_mutex_lock(&c->lock);
    for (unsigned i = 0; i < c->queues; i++)
        serve(c->fake, c->queue[i]);
    pthread_mutex_unlock(&c->lock);
}

static void open_queue(struct fake_connection *c, const Mok__QueueOpen *ask, Mok__QueueOpenReply *ret, int fds[4])
{
    struct served *q = calloc(1, sizeof(*q));
    uint32_t entries = flag(c->fake, entries) ? flag(c->fake, entries) : ask->entries;

    if (!q || c->queues == MAX_QUEUES || mok_queue_create(entries, ask->initial_counter, &q->queue) < 0 ||
        mok_queue_worker_open(q->queue.control_fd, q->queue.submit_fd, q->queue.inflight_fd, &q->worker) < 0 ||
        mok_queue_seal(&q->queue) < 0)
        abort();
    q->device = ask->device;
    pthread_mutex_lock(&c->lock);
    c->queue[c->queues++] = q;
    ret->queue = c->queues;
    pthread_mutex_unlock(&c->lock);
    fds[0] = q->queue.control_fd;
    fds[1] = q->queue.submit_fd;
    fds[2] = q->queue.doorbell_fd;
}

/* Whether the session has a queue on the device; one that was given back stays for `linger` questions more. */
static bool has_queue(struct fake_connection *c, uint32_t device)
{
    bool has = false;

    pthread_mutex_lock(&c->lock);
    for (unsigned i = 0; i < c->queues && !has; i++) {
        const struct served *q = c->queue[i];
        if (q->device != device || q->closed)
            continue;
        has = !q->given_back || flag(c->fake, linger) > 0;
        if (has && q->given_back)
            __atomic_fetch_sub(&c->fake->linger, 1, __ATOMIC_RELEASE);
    }
    pthread_mutex_unlock(&c->lock);
    return has;
}

static void give_back(struct fake_connection *c, uint32_t queue)
{
    pthread_mutex_lock(&c->lock);
    if (queue > 0 && queue <= c->queues)
        c->queue[queue - 1]->given_back = true;
    pthread_mutex_unlock(&c->lock);
}

static void close_queues(struct fake_connection *c)
{
    for (unsigned i = 0; i < c->queues; i++) {
        mok_queue_worker_release(&c->queue[i]->worker);
        mok_queue_destroy(&c->queue[i]->queue);
        free(c->queue[i]);
    }
    c->queues = 0;
}

/* ------------------------------------------------------------------ mokd's side */

/* Everything that any answer may need; the reply points into it. */
struct draft {
    Mok__Reply reply;
    Mok__HelloReply hello;
    Mok__Limits limits;
    Mok__DeviceListReply list;
    Mok__DeviceInfo device[2], *device_pointer[2];
    Mok__QueueOpenReply queue;
    Mok__GroupJoinReply group;
    Mok__BufferAllocReply buffer;
    Mok__LayerMemory memory;
    Mok__LayerQueryReply layer_query;
    Mok__LayerCreateReply layer;
    Mok__LayerDescribeReply describe;
    Mok__StatusReply status;
    Mok__JobInfo job, *job_pointer[1];
    Mok__GroupInfo group_info, *group_pointer[1];
    Mok__LayerInfo layer_info, *layer_pointer[1];
    Mok__LayerSpec spec;
    uint64_t group_session[2];
    uint32_t group_device[2];
    Mok__OpQueryReply op;
    int fds[4];
    size_t count;
    int own_fd; /* to close once sent; -1: none */
};

static void draft_devices(struct draft *d)
{
    static const char *const names[] = { "host0", "host1" };

    for (uint32_t i = 0; i < 2; i++) {
        mok__device_info__init(&d->device[i]);
        d->device[i].index = i;
        d->device[i].name = (char *)names[i];
        d->device[i].kind = MOK_DEVICE_HOST;
        d->device[i].threads = 1;
        d->device[i].memory_bytes = UINT64_C(9007199254740993); /* not a double */
        d->device[i].state = i == 0 ? MOK__DEVICE_STATE__DEVICE_UP : MOK__DEVICE_STATE__DEVICE_FAILED;
        d->device_pointer[i] = &d->device[i];
    }
}

static void draft_memory(struct draft *d)
{
    mok__layer_memory__init(&d->memory);
    d->memory.symmetric_bytes = 1;
    d->memory.private_bytes = 2;
    d->memory.context_full_bytes = FAKE_LAYER_FULL;
    d->memory.context_recompute_bytes = FAKE_LAYER_RECOMPUTE;
}

static void draft_layer_info(struct draft *d)
{
    draft_memory(d);
    mok__layer_info__init(&d->layer_info);
    mok__layer_spec__init(&d->spec);
    d->spec.hidden = 2880;
    d->spec.intermediate = 1440;
    d->spec.experts = 128;
    d->spec.topk = 4;
    d->spec.max_tokens = 8192;
    d->spec.precision = MOK_MXFP8_PER128;
    d->layer_info.layer = 11;
    d->layer_info.group = 3;
    d->layer_info.group_name = (char *)"ep";
    d->layer_info.rank = 1;
    d->layer_info.device = 1;
    d->layer_info.session = 7;
    d->layer_info.spec = &d->spec;
    d->layer_info.memory = &d->memory;
    d->layer_info.bytes = UINT64_C(9007199254740995); /* not a double */
    d->layer_pointer[0] = &d->layer_info;
    d->status.n_layer = 1;
    d->status.layer = d->layer_pointer;
}

static void draft_status(struct draft *d)
{
    draft_devices(d);
    mok__status_reply__init(&d->status);
    mok__job_info__init(&d->job);
    mok__group_info__init(&d->group_info);
    d->status.version = (char *)"9.9.9";
    d->status.pid = 4242;
    d->status.uptime_ms = 3723000;
    d->status.n_device = 2;
    d->status.device = d->device_pointer;
    d->job.job = (char *)"train\x1b[31m";
    d->job.user = (char *)"ada";
    d->job.session = 7;
    d->job.resumable = true;
    d->status.store_used = 12;
    d->status.store_bound = 16384;
    d->job_pointer[0] = &d->job;
    d->status.n_job = 1;
    d->status.job = d->job_pointer;
    d->group_info.name = (char *)"ep";
    d->group_info.state = (char *)"forming";
    d->group_info.error = (char *)"";
    d->group_info.size = 2;
    d->group_info.joined = 1;
    d->group_info.home = (char *)"n7";
    d->group_info.partial = true;
    d->group_session[0] = 7;
    d->group_device[0] = 1;
    d->group_info.n_session = d->group_info.n_device = 2;
    d->group_info.session = d->group_session;
    d->group_info.device = d->group_device;
    d->group_pointer[0] = &d->group_info;
    d->status.n_group = 1;
    d->status.group = d->group_pointer;
    draft_layer_info(d);
    d->reply.body_case = MOK__REPLY__BODY_STATUS;
    d->reply.status = &d->status;
}

static void draft_hello(struct draft *d, const Mok__Hello *hello, struct fake *fake)
{
    pthread_mutex_lock(&fake->lock);
    fake->last_hello = *hello;
    pthread_mutex_unlock(&fake->lock);
    mok__hello_reply__init(&d->hello);
    d->hello.protocol = 1;
    d->hello.session = hello->observer ? 0 : 7;
    d->hello.daemon_version = (char *)"9.9.9";
    d->hello.features = __atomic_load_n(&fake->old, __ATOMIC_RELAXED)
                            ? 0
                            : hello->features & (MOK_FEATURE_GRADIENTS | MOK_FEATURE_WGRAD | MOK_FEATURE_TRANSPOSED);
    d->reply.body_case = MOK__REPLY__BODY_HELLO;
    d->reply.hello = &d->hello;
}

static void draft_buffer(struct draft *d, struct fake_connection *c, const Mok__BufferAlloc *ask, bool small)
{
    mok__buffer_alloc_reply__init(&d->buffer);
    d->buffer.buffer = ++c->last_id;
    d->buffer.bytes = ask->bytes;
    if (mok_memory_create("fake-buffer", small ? 4096 : mok_memory_round(ask->bytes), &d->own_fd) < 0)
        abort();
    d->fds[0] = d->own_fd;
    d->count = 1;
    d->reply.body_case = MOK__REPLY__BODY_BUFFER_ALLOC;
    d->reply.buffer_alloc = &d->buffer;
}

/* Keeps what was asked for. */
static void note_layer(struct fake *fake, const Mok__LayerSpec *spec, uint32_t ep, uint32_t device)
{
    pthread_mutex_lock(&fake->lock);
    fake->last_spec = *spec;
    fake->last_ep = ep;
    fake->last_device = device;
    pthread_mutex_unlock(&fake->lock);
}

static void draft_layer(struct draft *d, struct fake_connection *c)
{
    draft_memory(d);
    mok__layer_create_reply__init(&d->layer);
    d->layer.layer = ++c->last_id;
    d->layer.memory = &d->memory;
    d->layer.queue = c->queues; /* the last one opened */
    d->reply.body_case = MOK__REPLY__BODY_LAYER_CREATE;
    d->reply.layer_create = &d->layer;
}

static void draft_op(struct draft *d, struct fake *fake)
{
    mok__op_query_reply__init(&d->op);
    d->op.n_missing_rank = flag(fake, missing);
    d->op.missing_rank = fake->missing_rank;
    d->reply.body_case = MOK__REPLY__BODY_OP_QUERY;
    d->reply.op_query = &d->op;
}

static void draft_answer(struct draft *d, struct fake_connection *c, const Mok__Request *request, bool small)
{
    switch (request->body_case) {
    case MOK__REQUEST__BODY_HELLO:
        draft_hello(d, request->hello, c->fake);
        break;
    case MOK__REQUEST__BODY_DEVICE_LIST:
        draft_devices(d);
        mok__device_list_reply__init(&d->list);
        d->list.n_device = 2;
        d->list.device = d->device_pointer;
        d->reply.body_case = MOK__REPLY__BODY_DEVICE_LIST;
        d->reply.device_list = &d->list;
        break;
    case MOK__REQUEST__BODY_LIMITS_QUERY:
        mok__limits__init(&d->limits);
        d->limits.bytes = 1000;
        d->reply.body_case = MOK__REPLY__BODY_LIMITS;
        d->reply.limits = &d->limits;
        break;
    case MOK__REQUEST__BODY_QUEUE_OPEN:
        if (has_queue(c, request->queue_open->device)) {
            d->reply.code = -MOK_EEXIST;
            break;
        }
        mok__queue_open_reply__init(&d->queue);
        open_queue(c, request->queue_open, &d->queue, d->fds);
        d->count = 3;
        d->reply.body_case = MOK__REPLY__BODY_QUEUE_OPEN;
        d->reply.queue_open = &d->queue;
        break;
    case MOK__REQUEST__BODY_QUEUE_CLOSE:
        give_back(c, request->queue_close->queue);
        break;
    case MOK__REQUEST__BODY_GROUP_JOIN:
        mok__group_join_reply__init(&d->group);
        d->group.group = ++c->last_id;
        d->reply.body_case = MOK__REPLY__BODY_GROUP_JOIN;
        d->reply.group_join = &d->group;
        break;
    case MOK__REQUEST__BODY_BUFFER_ALLOC:
        draft_buffer(d, c, request->buffer_alloc, small);
        break;
    case MOK__REQUEST__BODY_LAYER_QUERY:
        note_layer(c->fake, request->layer_query->spec, request->layer_query->ep, request->layer_query->device);
        draft_memory(d);
        mok__layer_query_reply__init(&d->layer_query);
        d->layer_query.memory = &d->memory;
        d->layer_query.describe = (char *)FAKE_PLAN;
        d->reply.body_case = MOK__REPLY__BODY_LAYER_QUERY;
        d->reply.layer_query = &d->layer_query;
        break;
    case MOK__REQUEST__BODY_LAYER_CREATE:
        note_layer(c->fake, request->layer_create->spec, 0, 0);
        draft_layer(d, c);
        break;
    case MOK__REQUEST__BODY_LAYER_DESCRIBE:
        mok__layer_describe_reply__init(&d->describe);
        d->describe.text = (char *)FAKE_PLAN;
        d->reply.body_case = MOK__REPLY__BODY_LAYER_DESCRIBE;
        d->reply.layer_describe = &d->describe;
        break;
    case MOK__REQUEST__BODY_STATUS_QUERY:
        draft_status(d);
        break;
    case MOK__REQUEST__BODY_OP_QUERY:
        draft_op(d, c->fake);
        break;
    default:
        break; /* a plain yes */
    }
}

static void send_cut(struct fake_connection *c, const Mok__Reply *reply)
{
    uint8_t bytes[4096];
    size_t size = mok__reply__get_packed_size(reply);

    if (size > sizeof(bytes))
        abort();
    mok__reply__pack(reply, bytes);
    if (send(c->fd, bytes, size - 1, MSG_NOSIGNAL) < 0)
        perror("fake: send");
}

/* False: hang up. */
static bool answer(struct fake_connection *c, const Mok__Request *request, enum fake_answer how)
{
    struct fake *fake = c->fake;
    struct draft d = { .own_fd = -1 };

    c->kept_fd = mok_close(c->kept_fd);
    mok__reply__init(&d.reply);
    d.reply.id = request->id;
    if (how == FAKE_NONE)
        return true;
    if (how == FAKE_HANG_UP)
        return false;
    draft_answer(&d, c, request, how == FAKE_SMALL_FD);
    if (how == FAKE_REFUSED) {
        d.reply.code = flag(fake, refusal);
        d.reply.text = (char *)"refused, as the test wants it";
        d.reply.body_case = MOK__REPLY__BODY__NOT_SET;
        d.count = 0;
    }
    if (how == FAKE_ESCAPES)
        d.hello.daemon_version = d.status.version = d.layer_info.group_name = (char *)FAKE_ESCAPED;
    if (how == FAKE_EMPTY)
        d.reply.body_case = MOK__REPLY__BODY__NOT_SET;
    if (how == FAKE_FEWER_FDS)
        d.count--;
    if (how == FAKE_MORE_FDS) {
        d.fds[d.count] = d.count ? d.fds[0] : c->fd;
        d.count++;
    }
    if (how == FAKE_CUT)
        send_cut(c, &d.reply);
    else
        mok_wire_send(c->fd, &d.reply.base, d.fds, d.count);
    if (flag(fake, keep))
        c->kept_fd = mok_take_fd(&d.own_fd);
    mok_close(d.own_fd);
    return true;
}

/* The last one first, so that answers come in another order than the requests. */
static void answer_late(struct fake_connection *c)
{
    while (c->late_count > 0 && flag(c->fake, let_go)) {
        ProtobufCMessage *message = c->late[--c->late_count];
        answer(c, (const Mok__Request *)message, FAKE_RIGHT);
        mok_wire_free(message);
    }
}

/* Takes over the message. False: hang up. */
static bool receive(struct fake_connection *c, ProtobufCMessage *message)
{
    const Mok__Request *request = (const Mok__Request *)message;
    enum fake_answer how = (enum fake_answer)flag(c->fake, answer[request->body_case]);

    if (how == FAKE_LATE && c->late_count < MAX_LATE) {
        c->late[c->late_count++] = message;
        __atomic_fetch_add(&c->fake->seen[request->body_case], 1, __ATOMIC_RELEASE);
        return true;
    }
    __atomic_fetch_add(&c->fake->seen[request->body_case], 1, __ATOMIC_RELEASE);
    bool go_on = answer(c, request, how);
    mok_wire_free(message);
    return go_on;
}

static void *connection_main(void *argument)
{
    struct fake_connection *c = argument;

    while (!flag(c->fake, stop)) {
        struct pollfd look = { .fd = c->fd, .events = POLLIN };
        ProtobufCMessage *message = NULL;

        serve_all(c);
        answer_late(c);
        if (poll(&look, 1, 1) <= 0)
            continue;
        answer_late(c); /* before what may have been asked after the test let them go */
        if (mok_wire_recv(c->fd, &mok__request__descriptor, &message, NULL) != 1 || !receive(c, message))
            break;
    }
    shutdown(c->fd, SHUT_RDWR);
    __atomic_fetch_add(&c->fake->ended, 1, __ATOMIC_RELEASE);
    while (c->late_count > 0)
        mok_wire_free(c->late[--c->late_count]);
    return NULL;
}

static void *accepter_main(void *argument)
{
    struct fake *fake = argument;

    while (!flag(fake, stop)) {
        struct pollfd look = { .fd = fake->listener, .events = POLLIN };
        if (poll(&look, 1, 5) <= 0)
            continue;
        int fd = accept4(fake->listener, NULL, NULL, SOCK_CLOEXEC);
        if (fd < 0)
            continue;
        struct fake_connection *c = calloc(1, sizeof(*c));
        if (!c || fake->connections == FAKE_CONNECTIONS)
            abort();
        c->fake = fake;
        c->fd = fd;
        c->kept_fd = -1;
        pthread_mutex_init(&c->lock, NULL);
        fake->connection[fake->connections] = c;
        __atomic_fetch_add(&fake->connections, 1, __ATOMIC_RELEASE);
        if (pthread_create(&c->thread, NULL, connection_main, c) != 0)
            abort();
    }
    return NULL;
}

/* ------------------------------------------------------------------ the test's side */

void fake_start(struct fake *fake)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    memset(fake, 0, sizeof(*fake));
    pthread_mutex_init(&fake->lock, NULL);
    snprintf(fake->dir, sizeof(fake->dir), "/tmp/mok-fake-XXXXXX");
    assert_non_null(mkdtemp(fake->dir));
    snprintf(fake->path, sizeof(fake->path), "%s/mokd.sock", fake->dir);
    memcpy(address.sun_path, fake->path, strlen(fake->path) + 1);
    fake->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    assert_true(fake->listener >= 0);
    assert_int_equal(bind(fake->listener, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(fake->listener, 8), 0);
    assert_int_equal(pthread_create(&fake->accepter, NULL, accepter_main, fake), 0);
}

void fake_stop(struct fake *fake)
{
    fake_flag(fake, stop, true);
    pthread_join(fake->accepter, NULL);
    for (unsigned i = 0; i < fake->connections; i++) {
        struct fake_connection *c = fake->connection[i];
        pthread_join(c->thread, NULL);
        close_queues(c);
        mok_close(c->fd);
        mok_close(c->kept_fd);
        pthread_mutex_destroy(&c->lock);
        free(c);
    }
    mok_close(fake->listener);
    pthread_mutex_destroy(&fake->lock);
    unlink(fake->path);
    rmdir(fake->dir);
}

void fake_set(struct fake *fake, Mok__Request__BodyCase request, enum fake_answer how)
{
    fake_flag(fake, answer[request], (int)how);
}

unsigned fake_seen(struct fake *fake, Mok__Request__BodyCase request)
{
    return flag(fake, seen[request]);
}

enum { PATIENCE_S = 30 };

static void await(const unsigned *counter, unsigned count, const char *what)
{
    for (int i = 0; i < 1000 * PATIENCE_S; i++) {
        if (__atomic_load_n(counter, __ATOMIC_ACQUIRE) >= count)
            return;
        usleep(1000);
    }
    fail_msg("%s: fewer than %u after %d seconds", what, count, PATIENCE_S);
}

void fake_await(struct fake *fake, Mok__Request__BodyCase request, unsigned count)
{
    await(&fake->seen[request], count, "requests");
}

void fake_await_taken(struct fake *fake, unsigned count)
{
    await(&fake->taken, count, "taken submissions");
}

void fake_await_completed(struct fake *fake, unsigned count)
{
    await(&fake->completed, count, "completions");
}

void fake_complete_with(struct fake *fake, struct mok_cqe cqe)
{
    pthread_mutex_lock(&fake->lock);
    fake->cqe = cqe;
    pthread_mutex_unlock(&fake->lock);
}

struct mok_sqe fake_last_sqe(struct fake *fake)
{
    pthread_mutex_lock(&fake->lock);
    struct mok_sqe sqe = fake->last_sqe;
    pthread_mutex_unlock(&fake->lock);
    return sqe;
}

Mok__Hello fake_last_hello(struct fake *fake)
{
    pthread_mutex_lock(&fake->lock);
    Mok__Hello hello = fake->last_hello;
    pthread_mutex_unlock(&fake->lock);
    return hello;
}

Mok__LayerSpec fake_last_spec(struct fake *fake, uint32_t *ret_ep, uint32_t *ret_device)
{
    pthread_mutex_lock(&fake->lock);
    Mok__LayerSpec spec = fake->last_spec;
    if (ret_ep)
        *ret_ep = fake->last_ep;
    if (ret_device)
        *ret_device = fake->last_device;
    pthread_mutex_unlock(&fake->lock);
    return spec;
}

void fake_hang_up(struct fake *fake)
{
    for (unsigned i = 0; i < flag(fake, connections); i++)
        shutdown(fake->connection[i]->fd, SHUT_RDWR);
}

void fake_close_queues(struct fake *fake, int code)
{
    for (unsigned i = 0; i < flag(fake, connections); i++) {
        struct fake_connection *c = fake->connection[i];
        pthread_mutex_lock(&c->lock);
        for (unsigned k = 0; k < c->queues; k++) {
            if (!c->queue[k]->closed)
                mok_queue_worker_close(&c->queue[k]->worker, code);
            c->queue[k]->closed = true;
        }
        pthread_mutex_unlock(&c->lock);
    }
}

void fake_send(struct fake *fake, const Mok__Reply *event)
{
    for (unsigned i = 0; i < flag(fake, connections); i++)
        mok_wire_send(fake->connection[i]->fd, &event->base, NULL, 0);
}

void fake_let_go(struct fake *fake)
{
    fake_flag(fake, let_go, true);
}
