/* SPDX-License-Identifier: Apache-2.0 */
#include "storage.h"

#include <inttypes.h>
#include <string.h>

#include "fdstore.h"
#include "memory.h"
#include "names.h"
#include "state.h"

TAILQ_HEAD(storage_list, mokd_storage);

/* Storages whose memory goes; one batch at a time is in a work thread. */
struct mokd_storage_queue {
    uv_work_t work;
    struct mokd_server *server;
    struct storage_list waiting, batch;
    bool running;
};

/* So that one user's large allocations leave threads for the others. */
#define USER_FILLS 4u

struct mokd_fill {
    TAILQ_ENTRY(mokd_fill) link; /* while it waits */
    struct mokd_user *user;
    uv_work_t work;
    mokd_storage_filled done;
    void *cookie;
    struct mokd_error error;      /* the loop's: first failure */
    struct mokd_error work_error; /* the work thread's until it has ended */
    unsigned pending;
    size_t count;
    struct mokd_storage *list[];
};

/* ------------------------------------------------------------------ charging */

/* GPUs give memory in pieces of this; the device is charged for whole ones, the user for whole pages. */
#define CUDA_GRANULE (2u << 20)

static uint64_t taken_bytes(const struct mokd_device *device, uint64_t bytes)
{
    if (device->config->kind != MOK_DEVICE_CUDA)
        return mok_memory_round(bytes);
    return (bytes + CUDA_GRANULE - 1) / CUDA_GRANULE * CUDA_GRANULE;
}

int mokd_storage_charge(struct mokd_session *session, struct mokd_device *device, uint64_t bytes,
                        struct mokd_storage **ret, struct mokd_error *error)
{
    /* what the mokd before left may be more than the configuration gives now */
    uint64_t device_left =
        device->config->memory > device->memory_used ? device->config->memory - device->memory_used : 0;
    uint64_t taken = taken_bytes(device, bytes);
    struct mokd_user *user = session->user;

    int r = mokd_user_take_bytes(user, bytes, error);
    if (r < 0)
        return r;
    if (taken < bytes || taken > device_left) {
        mokd_user_give_bytes(user, bytes);
        return mokd_error_set(error, -MOK_ENOMEM,
                              "bytes = %" PRIu64 ": device %s has %" PRIu64 " bytes, %" PRIu64 " of them in use", bytes,
                              device->config->name, device->config->memory, device->memory_used);
    }
    r = mokd_user_take(user, MOKD_DESCRIPTORS, 1, error);
    if (r < 0) {
        mokd_user_give_bytes(user, bytes);
        return r;
    }
    struct mokd_storage *storage = calloc(1, sizeof(*storage));
    if (!storage) {
        mokd_user_give_bytes(user, bytes);
        mokd_user_give(user, MOKD_DESCRIPTORS, 1);
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    }
    storage->user = mokd_user_hold(user);
    storage->device = device;
    storage->bytes = bytes;
    storage->fd = -1;
    storage->usage = mokd_usage_ref(session, device);
    mokd_usage_hold_bytes(storage->usage, taken);
    device->memory_used += taken;
    *ret = storage;
    return 0;
}

struct mokd_storage *mokd_storage_adopt(struct mokd_session *session, struct mokd_device *device, uint64_t bytes,
                                        int fd, uint64_t number)
{
    struct mokd_storage *storage = calloc(1, sizeof(*storage));
    struct mokd_user *user = session->user;

    if (!storage)
        return NULL;
    mokd_user_adopt(user, MOKD_BYTES, mok_memory_round(bytes));
    mokd_user_adopt(user, MOKD_DESCRIPTORS, 1);
    device->memory_used += taken_bytes(device, bytes);
    storage->user = mokd_user_hold(user);
    storage->device = device;
    storage->usage = mokd_usage_ref(session, device);
    mokd_usage_hold_bytes(storage->usage, taken_bytes(device, bytes));
    storage->bytes = bytes;
    storage->fd = fd;
    storage->number = number;
    return storage;
}

int mokd_storage_keep(struct mokd_storage *storage)
{
    if (storage->number == 0)
        storage->number = mokd_fdstore_keep(storage->user->server->store, storage->fd, MOKD_FDSTORE_CLIENT);
    return storage->number ? 0 : -MOK_EFDS;
}

static void discharge(struct mokd_storage *storage)
{
    uint64_t taken = taken_bytes(storage->device, storage->bytes);

    mokd_user_give_bytes(storage->user, storage->bytes);
    storage->device->memory_used -= taken;
    mokd_usage_free_bytes(storage->usage, taken);
    mokd_usage_unref(storage->usage);
    mokd_user_give(storage->user, MOKD_DESCRIPTORS, 1);
    mokd_user_unref(storage->user);
    free(storage);
}

/* ------------------------------------------------------------------ filling */

static void start_fills(struct mokd_user *user);

/* The end of one part of a job: of the work thread, or of a worker's answer. */
static void part_done(struct mokd_fill *job)
{
    struct mokd_user *user = job->user;

    if (--job->pending > 0)
        return;
    user->fills--;
    start_fills(user);
    job->done(job->cookie, &job->error);
    free(job);
    mokd_user_unref(user);
}

static void fill(uv_work_t *work)
{
    struct mokd_fill *job = work->data;

    for (size_t i = 0; i < job->count; i++) {
        struct mokd_storage *storage = job->list[i];
        if (storage->device->config->kind != MOK_DEVICE_HOST)
            continue;
        int r = mok_memory_create("mok-buffer", storage->bytes, &storage->fd);
        if (r < 0) {
            mokd_error_set(&job->work_error, r, "bytes = %" PRIu64 ": the machine does not give them: %s",
                           storage->bytes, mok_error_text(r));
            return;
        }
    }
}

static void filled(uv_work_t *work, int status)
{
    struct mokd_fill *job = work->data;

    if (status < 0)
        mokd_error_set(&job->work_error, -MOK_EINTERNAL, "no thread to allocate it: %s", uv_strerror(status));
    if (job->error.code == 0)
        job->error = job->work_error;
    part_done(job);
}

/* False: it was wanted, and did not come. */
static bool take_fabric(struct mokd_storage *storage, const struct mokd_answer *answer)
{
    const Mok__WorkerReply *reply = answer->reply;

    if (!storage->fabric)
        return true;
    if (!reply || reply->body_case != MOK__WORKER_REPLY__BODY_MEMORY || reply->memory->fabric.len != MOKD_FABRIC_BYTES)
        return false;
    memcpy(storage->handle, reply->memory->fabric.data, MOKD_FABRIC_BYTES);
    return true;
}

/* A GPU's memory, of which we keep the descriptor: so it outlives the worker that made it. */
static void allocated(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_fill *job = cookie;
    struct mokd_storage *storage = job->list[tag];
    const char *name = storage->device->config->name;

    if (answer->code == 0 && answer->fds && answer->fds->count == 1 && take_fabric(storage, answer))
        storage->fd = mok_wire_fds_take(answer->fds, 0);
    else if (job->error.code == 0 && answer->code == 0)
        mokd_error_set(&job->error, -MOK_EPROTO, "device %s: the worker sent no memory", name);
    else if (job->error.code == 0)
        mokd_error_set(&job->error, answer->code, "bytes = %" PRIu64 ": device %s does not give them: %s",
                       storage->bytes, name, answer->text);
    part_done(job);
}

static void ask_worker(struct mokd_fill *job, size_t index)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerMemoryAlloc body = MOK__WORKER_MEMORY_ALLOC__INIT;

    body.bytes = job->list[index]->bytes;
    body.fabric = job->list[index]->fabric;
    request.body_case = MOK__WORKER_REQUEST__BODY_MEMORY_ALLOC;
    request.memory_alloc = &body;
    job->pending++;
    mokd_device_send(job->list[index]->device, &request, NULL, 0, MOKD_WORKER_MAP_TIMEOUT_MS, allocated, job,
                     (uint32_t)index);
}

static void start_fills(struct mokd_user *user)
{
    struct mokd_fill *job;

    while (user->fills < USER_FILLS && (job = TAILQ_FIRST(&user->waiting_fills))) {
        TAILQ_REMOVE(&user->waiting_fills, job, link);
        user->fills++;
        job->pending = 1; /* the work thread: also where it has nothing to do, since `done` may not be called in here */
        uv_queue_work(&user->server->loop, &job->work, fill, filled); /* fails only without a work function */
        for (size_t i = 0; i < job->count; i++)
            if (job->list[i]->device->config->kind != MOK_DEVICE_HOST)
                ask_worker(job, i);
    }
}

int mokd_storage_fill(struct mokd_storage *const *list, size_t count, mokd_storage_filled done, void *cookie)
{
    struct mokd_fill *job = calloc(1, sizeof(*job) + count * sizeof(*list));
    if (!job)
        return -MOK_ENOMEM;
    memcpy(job->list, list, count * sizeof(*list));
    job->count = count;
    job->done = done;
    job->cookie = cookie;
    job->work.data = job;
    job->user = mokd_user_hold(list[0]->user);
    TAILQ_INSERT_TAIL(&job->user->waiting_fills, job, link);
    start_fills(job->user);
    return 0;
}

/* ------------------------------------------------------------------ releasing */

/* A client that keeps its descriptor keeps an empty file: what it then touches, the kernel charges to the client. */
static void give_back(const struct mokd_storage *storage)
{
    if (storage->device->config->kind == MOK_DEVICE_HOST && !storage->left_behind)
        mok_memory_empty(storage->fd, storage->bytes);
}

static void release_batch(uv_work_t *work)
{
    struct mokd_storage_queue *queue = work->data;
    struct mokd_storage *storage;

    TAILQ_FOREACH(storage, &queue->batch, link) {
        give_back(storage);
        storage->fd = mok_close(storage->fd);
    }
}

/* The state first: it must name nothing that the store has not. */
static void forget(const struct mokd_storage *storage)
{
    struct mokd_server *server = storage->user->server;

    if (storage->number == 0)
        return;
    mokd_state_save(server);
    mokd_fdstore_drop(server->store, storage->number);
}

static void start_release(struct mokd_storage_queue *queue);

static void released_batch(uv_work_t *work, int status)
{
    struct mokd_storage_queue *queue = work->data;
    struct mokd_storage *storage;

    (void)status;
    while ((storage = TAILQ_FIRST(&queue->batch))) {
        TAILQ_REMOVE(&queue->batch, storage, link);
        mok_close(storage->fd);
        if (!storage->left_behind)
            forget(storage);
        discharge(storage);
    }
    queue->running = false;
    start_release(queue);
}

static void start_release(struct mokd_storage_queue *queue)
{
    if (queue->running || TAILQ_EMPTY(&queue->waiting))
        return;
    TAILQ_CONCAT(&queue->batch, &queue->waiting, link);
    queue->running = true;
    if (uv_queue_work(&queue->server->loop, &queue->work, release_batch, released_batch) < 0)
        released_batch(&queue->work, UV_ECANCELED);
}

void mokd_storage_release(struct mokd_storage *storage)
{
    if (!storage)
        return;
    if (storage->fd < 0) {
        discharge(storage);
        return;
    }
    struct mokd_storage_queue *queue = storage->user->server->releases;
    storage->left_behind = storage->number != 0 && mokd_state_is_frozen(storage->user->server);
    TAILQ_INSERT_TAIL(&queue->waiting, storage, link);
    start_release(queue);
}

int mokd_storage_start(struct mokd_server *server)
{
    struct mokd_storage_queue *queue = calloc(1, sizeof(*queue));
    if (!queue)
        return -MOK_ENOMEM;
    queue->server = server;
    queue->work.data = queue;
    TAILQ_INIT(&queue->waiting);
    TAILQ_INIT(&queue->batch);
    server->releases = queue;
    return 0;
}

void mokd_storage_stop(struct mokd_server *server)
{
    free(server->releases);
    server->releases = NULL;
}
