/* SPDX-License-Identifier: Apache-2.0 */
/* mokd and clients for tests of the worker: see harness.h. */
#include "harness.h"

#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include "dispatch.h"
#include "memory.h"
#include "names.h"
#include "util.h"
#include "wire.h"

extern char **environ;

uint32_t harness_id(void)
{
    static uint32_t last = 100;
    return ++last;
}

/* ------------------------------------------------------------------ a worker process */

void worker_spawn(struct worker *worker)
{
    const char *build = getenv("MOK_BUILD_DIR");
    char path[512], name[] = "mok-worker";
    char *argv[] = { name, NULL };
    posix_spawn_file_actions_t actions;
    int pair[2];

    snprintf(path, sizeof(path), "%s/daemon/worker/mok-worker", build ? build : "build/dev");
    *worker = (struct worker){ .control = -1, .bell = -1 };
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    worker->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    assert_true(worker->bell >= 0);
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, pair[1], 3);
    assert_int_equal(posix_spawn(&worker->pid, path, &actions, NULL, argv, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(pair[1]);
    worker->control = pair[0];
}

void worker_start(struct worker *worker, const struct worker_options *options)
{
    static const struct worker_options none;
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerStart start = MOK__WORKER_START__INIT;
    Mok__WorkerReply *reply;
    char name[] = "test";

    options = options ? options : &none;
    worker_spawn(worker);
    start.name = name;
    start.kind = MOK_DEVICE_HOST;
    start.threads = options->threads ? options->threads : 1;
    start.poll_us = options->poll_us;
    start.chaos_delay_us = options->chaos_delay_us;
    request.body_case = MOK__WORKER_REQUEST__BODY_START;
    request.start = &start;
    assert_int_equal(worker_ask(worker, &request, &worker->bell, 1, &reply), 0);
    assert_int_equal(reply->body_case, MOK__WORKER_REPLY__BODY_STARTED);
    worker->limits = (struct mok_device_limits){ .kind = MOK_DEVICE_HOST,
                                                 .units = reply->started->sms_or_threads,
                                                 .memory_bytes = reply->started->memory_bytes };
    mok_wire_free(&reply->base);
}

static Mok__WorkerReply *receive(struct worker *worker, int wait_ms)
{
    struct pollfd wait = { .fd = worker->control, .events = POLLIN };
    ProtobufCMessage *message;

    if (poll(&wait, 1, wait_ms) <= 0)
        return NULL;
    if (mok_wire_recv(worker->control, &mok__worker_reply__descriptor, &message, NULL) != 1)
        return NULL;
    return (Mok__WorkerReply *)message;
}

static int answer_of(struct worker *worker, uint64_t id, Mok__WorkerReply **ret_reply)
{
    for (;;) {
        Mok__WorkerReply *reply = receive(worker, HARNESS_WAIT_MS);
        assert_non_null(reply);
        if (reply->id == 0) {
            assert_true(worker->events < ARRAY_SIZE(worker->event));
            worker->event[worker->events++] = reply;
            continue;
        }
        assert_int_equal(reply->id, id);
        /* A code and a sentence come together. */
        assert_int_equal(reply->code < 0, reply->text && *reply->text);
        int code = reply->code;
        if (ret_reply)
            *ret_reply = reply;
        else
            mok_wire_free(&reply->base);
        return code;
    }
}

int worker_ask(struct worker *worker, Mok__WorkerRequest *request, const int *fds, size_t count,
               Mok__WorkerReply **ret_reply)
{
    request->id = ++worker->last_id;
    assert_int_equal(mok_wire_send(worker->control, &request->base, fds, count), 0);
    return answer_of(worker, request->id, ret_reply);
}

int worker_ask_fds(struct worker *worker, Mok__WorkerRequest *request, struct mok_wire_fds *ret_fds)
{
    struct pollfd wait = { .fd = worker->control, .events = POLLIN };
    ProtobufCMessage *message = NULL;

    request->id = ++worker->last_id;
    assert_int_equal(mok_wire_send(worker->control, &request->base, NULL, 0), 0);
    assert_true(poll(&wait, 1, HARNESS_WAIT_MS) > 0);
    assert_int_equal(mok_wire_recv(worker->control, &mok__worker_reply__descriptor, &message, ret_fds), 1);
    int code = ((const Mok__WorkerReply *)message)->code;
    mok_wire_free(message);
    return code;
}

Mok__WorkerReply *worker_event(struct worker *worker, int wait_ms)
{
    if (worker->events) {
        Mok__WorkerReply *event = worker->event[0];
        memmove(worker->event, worker->event + 1, --worker->events * sizeof(worker->event[0]));
        return event;
    }
    Mok__WorkerReply *reply = receive(worker, wait_ms);
    if (reply)
        assert_int_equal(reply->id, 0);
    return reply;
}

int worker_wait(struct worker *worker)
{
    int status = 0;
    pid_t pid = 0;

    if (!worker->pid)
        return 0;
    for (int i = 0; pid == 0 && i < HARNESS_WAIT_MS; i++) {
        pid = waitpid(worker->pid, &status, WNOHANG);
        if (pid == 0)
            usleep(1000);
    }
    assert_int_equal(pid, worker->pid);
    worker->pid = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static void worker_free(struct worker *worker)
{
    while (worker->events)
        mok_wire_free(&worker->event[--worker->events]->base);
    worker->control = mok_close(worker->control);
    worker->bell = mok_close(worker->bell);
}

void worker_end(struct worker *worker)
{
    worker->control = mok_close(worker->control);
    assert_int_equal(worker_wait(worker), 0);
    worker_free(worker);
}

void worker_kill(struct worker *worker)
{
    assert_int_equal(kill(worker->pid, SIGKILL), 0);
    assert_int_equal(worker_wait(worker), -SIGKILL);
    worker_free(worker);
}

/* ------------------------------------------------------------------ a client's queue */

void client_open(struct client *client, struct worker *worker, uint32_t id, uint32_t entries, uint32_t counter)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerQueueOpen open = MOK__WORKER_QUEUE_OPEN__INIT;

    *client = (struct client){ .worker = worker, .session = 1000u + id, .id = id };
    assert_int_equal(mok_queue_create(entries, counter, &client->queue), 0);
    open.queue = id;
    open.session = client->session;
    open.uid = id;
    open.control_bytes = client->queue.layout.control_bytes;
    open.submit_bytes = client->queue.layout.submit_bytes;
    open.inflight_bytes = client->queue.layout.inflight_bytes;
    request.body_case = MOK__WORKER_REQUEST__BODY_QUEUE_OPEN;
    request.queue_open = &open;
    const int fds[] = { client->queue.control_fd, client->queue.submit_fd, client->queue.inflight_fd,
                        client->queue.doorbell_fd };
    assert_int_equal(worker_ask(worker, &request, fds, 4, NULL), 0);
    assert_int_equal(mok_queue_seal(&client->queue), 0);
    assert_int_equal(mok_queue_client_open(client->queue.control_fd, client->queue.submit_fd, client->queue.doorbell_fd,
                                           &client->end),
                     0);
}

int client_close(struct client *client)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerQueueClose close_ = MOK__WORKER_QUEUE_CLOSE__INIT;

    close_.queue = client->id;
    close_.code = -MOK_ESESSION;
    request.body_case = MOK__WORKER_REQUEST__BODY_QUEUE_CLOSE;
    request.queue_close = &close_;
    return worker_ask(client->worker, &request, NULL, 0, NULL);
}

void client_free(struct client *client)
{
    mok_queue_client_release(&client->end);
    mok_queue_destroy(&client->queue);
}

void client_submit(struct client *client, const struct mok_sqe *sqe)
{
    struct mok_sqe *entry;

    assert_int_equal(mok_queue_client_reserve(&client->end, &entry), 0);
    *entry = *sqe;
    mok_queue_client_publish(&client->end);
}

bool client_reap(struct client *client, struct mok_cqe *ret_cqe, int wait_ms)
{
    uint64_t deadline = mok_now_ns() + (uint64_t)wait_ms * 1000000u;

    for (;;) {
        int r = mok_queue_client_reap(&client->end, ret_cqe);
        if (r != 0)
            return r == 1;
        r = mok_queue_client_wait(&client->end, mok_queue_client_seen(&client->end), deadline);
        if (r == -MOK_ETIMEDOUT)
            return false;
    }
}

struct mok_cqe client_expect(struct client *client, uint64_t user_data, int code)
{
    struct mok_cqe cqe = { 0 };

    if (!client_reap(client, &cqe, HARNESS_WAIT_MS))
        fail_msg("no completion of %llu", (unsigned long long)user_data);
    if (cqe.user_data != user_data || cqe.result != code)
        fail_msg("completion of %llu with %s, want %llu with %s (argument %s, value %lld)",
                 (unsigned long long)cqe.user_data, mok_error_symbol(cqe.result), (unsigned long long)user_data,
                 mok_error_symbol(code), mok_argument_text(cqe.argument), (long long)cqe.value);
    assert_int_equal(cqe.dropped, 0);
    return cqe;
}

void client_expect_alive(struct client *client)
{
    const struct mok_sqe nop = { .opcode = MOK_OP_NOP, .user_data = 0xa11fe };

    client_submit(client, &nop);
    client_expect(client, nop.user_data, 0);
}

/* ------------------------------------------------------------------ groups */

static void group_open_rank(struct group *group, uint32_t rank)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerGroupOpen open = MOK__WORKER_GROUP_OPEN__INIT;
    char name[] = "group";
    int bells[HARNESS_MAX_EP];

    for (uint32_t i = 0; i < group->size; i++)
        bells[i] = group->rank[i]->worker->bell;
    open.group = group->id;
    open.session = group->rank[rank]->session;
    open.size = group->size;
    open.rank = rank;
    open.name = name;
    request.body_case = MOK__WORKER_REQUEST__BODY_GROUP_OPEN;
    request.group_open = &open;
    assert_int_equal(worker_ask(group->rank[rank]->worker, &request, bells, group->size, NULL), 0);
}

void group_open(struct group *group, uint32_t id, struct client *const *ranks, uint32_t size)
{
    *group = (struct group){ .id = id, .size = size };
    for (uint32_t i = 0; i < size; i++)
        group->rank[i] = ranks[i];
    for (uint32_t i = 0; i < size; i++)
        group_open_rank(group, i);
}

int group_fail(struct group *group, uint32_t rank, int code, uint32_t fault_rank)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerGroupFail fail_ = MOK__WORKER_GROUP_FAIL__INIT;

    fail_.group = group->id;
    fail_.code = code;
    fail_.rank = fault_rank;
    request.body_case = MOK__WORKER_REQUEST__BODY_GROUP_FAIL;
    request.group_fail = &fail_;
    return worker_ask(group->rank[rank]->worker, &request, NULL, 0, NULL);
}

int group_close(struct group *group, uint32_t rank)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerGroupClose close_ = MOK__WORKER_GROUP_CLOSE__INIT;

    close_.group = group->id;
    request.body_case = MOK__WORKER_REQUEST__BODY_GROUP_CLOSE;
    request.group_close = &close_;
    return worker_ask(group->rank[rank]->worker, &request, NULL, 0, NULL);
}

/* ------------------------------------------------------------------ buffers */

static int buffer_map(struct worker *worker, const struct buffer *buffer, uint64_t session, uint32_t group,
                      uint32_t rank)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerBufferMap map = MOK__WORKER_BUFFER_MAP__INIT;

    map.session = session;
    map.group = group;
    map.rank = rank;
    map.buffer = buffer->id;
    map.bytes = buffer->bytes;
    request.body_case = MOK__WORKER_REQUEST__BODY_BUFFER_MAP;
    request.buffer_map = &map;
    return worker_ask(worker, &request, &buffer->fd[group ? rank : 0], 1, NULL);
}

static void buffer_create(struct buffer *buffer, uint32_t copies, uint64_t bytes)
{
    *buffer = (struct buffer){ .id = harness_id(), .copies = copies, .bytes = mok_memory_round(bytes) };
    for (uint32_t i = 0; i < copies; i++) {
        assert_int_equal(mok_memory_create("test-buffer", buffer->bytes, &buffer->fd[i]), 0);
        assert_int_equal(mok_memory_map(buffer->fd[i], buffer->bytes, MOK_MAP_WRITE, &buffer->address[i]), 0);
    }
}

void buffer_symmetric(struct buffer *buffer, struct group *group, uint64_t bytes)
{
    buffer_create(buffer, group->size, bytes);
    for (uint32_t on = 0; on < group->size; on++)
        for (uint32_t rank = 0; rank < group->size; rank++) {
            int r = buffer_map(group->rank[on]->worker, buffer, group->rank[rank]->session, group->id, rank);
            assert_int_equal(r, 0);
        }
}

void buffer_private(struct buffer *buffer, struct client *client, uint64_t bytes)
{
    buffer_create(buffer, 1, bytes);
    assert_int_equal(buffer_map(client->worker, buffer, client->session, 0, 0), 0);
}

int buffer_unmap(struct worker *worker, uint64_t session, uint32_t group, uint32_t rank, uint32_t id)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerBufferUnmap unmap = MOK__WORKER_BUFFER_UNMAP__INIT;

    unmap.session = session;
    unmap.group = group;
    unmap.rank = rank;
    unmap.buffer = id;
    request.body_case = MOK__WORKER_REQUEST__BODY_BUFFER_UNMAP;
    request.buffer_unmap = &unmap;
    return worker_ask(worker, &request, NULL, 0, NULL);
}

void buffer_free(struct buffer *buffer)
{
    for (uint32_t i = 0; i < buffer->copies; i++) {
        mok_memory_unmap(buffer->address[i], buffer->bytes);
        mok_close(buffer->fd[i]);
    }
    *buffer = (struct buffer){ 0 };
}

/* ------------------------------------------------------------------ layers */

static void spec_message(const struct mok_layer_spec *spec, Mok__LayerSpec *ret)
{
    mok__layer_spec__init(ret);
    ret->hidden = spec->hidden;
    ret->intermediate = spec->intermediate;
    ret->experts = spec->experts;
    ret->topk = spec->topk;
    ret->max_tokens = spec->max_tokens;
    ret->precision = spec->precision;
    ret->shared_intermediate = spec->shared_intermediate;
    ret->clamp = spec->clamp;
    ret->ring_bytes = spec->ring_bytes;
    ret->minibatch_rows = spec->minibatch_rows;
    ret->comm_units = spec->comm_units;
    ret->gradient_dtype = spec->gradient_dtype;
    ret->wgrad_precision = spec->wgrad_precision;
}

static void layer_open_rank(struct layer *layer, uint32_t rank, const int *fds)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerLayerOpen open = MOK__WORKER_LAYER_OPEN__INIT;
    Mok__LayerMemory memory = MOK__LAYER_MEMORY__INIT;
    Mok__LayerSpec spec;
    struct client *client = layer->group->rank[rank];

    spec_message(&layer->spec, &spec);
    memory.symmetric_bytes = layer->plan.symmetric_bytes;
    memory.private_bytes = layer->plan.private_bytes;
    memory.context_full_bytes = layer->plan.context_full_bytes;
    memory.context_recompute_bytes = layer->plan.context_recompute_bytes;
    open.group = layer->group->id;
    open.layer = layer->id;
    open.queue = client->id;
    open.session = client->session;
    open.spec = &spec;
    open.memory = &memory;
    request.body_case = MOK__WORKER_REQUEST__BODY_LAYER_OPEN;
    request.layer_open = &open;
    assert_int_equal(worker_ask(client->worker, &request, fds, layer->group->size + 2, NULL), 0);
}

void layer_open(struct layer *layer, struct group *group, const struct mok_layer_spec *spec)
{
    struct mok_message message;
    int fds[HARNESS_MAX_EP + 2];

    *layer = (struct layer){ .id = harness_id(), .group = group, .spec = *spec };
    layer->spec.ep = group->size;
    if (mok_plan_make(&layer->spec, &group->rank[0]->worker->limits, &layer->plan, NULL, 0, &message) < 0)
        fail_msg("%s", message.text);
    assert_int_equal(mok_memory_create("test-flags", group->size * MOK_FLAGS_BYTES, &fds[0]), 0);
    for (uint32_t rank = 0; rank < group->size; rank++)
        assert_int_equal(mok_memory_create("test-sym", mok_memory_round(layer->plan.symmetric_bytes), &fds[1 + rank]),
                         0);
    for (uint32_t rank = 0; rank < group->size; rank++) {
        uint64_t bytes = mok_memory_round(layer->plan.private_bytes ? layer->plan.private_bytes : 1);
        assert_int_equal(mok_memory_create("test-private", bytes, &fds[1 + group->size]), 0);
        layer_open_rank(layer, rank, fds);
        close(fds[1 + group->size]);
    }
    for (uint32_t i = 0; i < group->size + 1; i++)
        close(fds[i]);
}

int layer_bind(struct layer *layer, uint32_t rank, Mok__LayerParams *params)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerLayerBind bind = MOK__WORKER_LAYER_BIND__INIT;

    bind.layer = layer->id;
    bind.params = params;
    request.body_case = MOK__WORKER_REQUEST__BODY_LAYER_BIND;
    request.layer_bind = &bind;
    return worker_ask(layer->group->rank[rank]->worker, &request, NULL, 0, NULL);
}

int layer_close(struct layer *layer, uint32_t rank)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerLayerClose close_ = MOK__WORKER_LAYER_CLOSE__INIT;

    close_.layer = layer->id;
    request.body_case = MOK__WORKER_REQUEST__BODY_LAYER_CLOSE;
    request.layer_close = &close_;
    return worker_ask(layer->group->rank[rank]->worker, &request, NULL, 0, NULL);
}

int op_query(struct client *client, uint64_t user_data, uint32_t *ret_state, uint64_t *ret_missing)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__OpQuery query = MOK__OP_QUERY__INIT;
    Mok__WorkerReply *reply;

    query.queue = client->id;
    query.user_data = user_data;
    request.body_case = MOK__WORKER_REQUEST__BODY_OP_QUERY;
    request.op_query = &query;
    int r = worker_ask(client->worker, &request, NULL, 0, &reply);
    if (r == 0) {
        *ret_state = reply->op_query->state;
        *ret_missing = 0;
        for (size_t i = 0; i < reply->op_query->n_missing_rank; i++)
            *ret_missing |= 1ull << reply->op_query->missing_rank[i];
    }
    mok_wire_free(&reply->base);
    return r;
}

uint64_t op_await(struct client *client, uint64_t user_data, uint32_t want)
{
    uint64_t until = mok_now_ns() + HARNESS_WAIT_MS * 1000000ull, missing = 0;
    uint32_t state = 0;

    while (op_query(client, user_data, &state, &missing) < 0 || state != want) {
        assert_true(mok_now_ns() < until);
        usleep(200);
    }
    return missing;
}
