/* SPDX-License-Identifier: Apache-2.0 */
#include "buffer.h"

#include <inttypes.h>

#include "collective.h"
#include "group.h"
#include "rack_groups.h"
#include "span.h"
#include "state.h"

/* ------------------------------------------------------------------ the object */

/* Takes over the storage; NULL: out of memory. */
static struct mokd_buffer *buffer_of_storage(struct mokd_session *session, struct mokd_member *member, uint32_t id,
                                             struct mokd_storage *storage)
{
    struct mokd_buffer *buffer = calloc(1, sizeof(*buffer));

    if (!buffer)
        return NULL;
    buffer->session = session;
    buffer->device = storage->device;
    buffer->member = member;
    buffer->id = id;
    buffer->bytes = storage->bytes;
    buffer->storage = storage;
    TAILQ_INSERT_TAIL(&session->buffers, buffer, link);
    session->n_buffers++;
    if (member)
        TAILQ_INSERT_TAIL(&member->buffers, buffer, member_link);
    return buffer;
}

/* Charged to the session's user, with its memory. */
static int buffer_new(struct mokd_session *session, struct mokd_device *device, struct mokd_member *member, uint32_t id,
                      uint64_t bytes, struct mokd_buffer **ret, struct mokd_error *error)
{
    struct mokd_storage *storage;

    int r = mokd_user_take(session->user, MOKD_BUFFERS, 1, error);
    if (r < 0)
        return r;
    r = mokd_storage_charge(session, device, bytes, &storage, error);
    if (r < 0) {
        mokd_user_give(session->user, MOKD_BUFFERS, 1);
        return r;
    }
    struct mokd_buffer *buffer = buffer_of_storage(session, member, id, storage);
    if (!buffer) {
        mokd_user_give(session->user, MOKD_BUFFERS, 1);
        mokd_storage_release(storage);
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    }
    *ret = buffer;
    return 0;
}

/* No worker maps it any more. */
static void buffer_release(struct mokd_buffer *buffer)
{
    TAILQ_REMOVE(&buffer->session->buffers, buffer, link);
    buffer->session->n_buffers--;
    mokd_user_give(buffer->session->user, MOKD_BUFFERS, 1);
    if (buffer->member)
        TAILQ_REMOVE(&buffer->member->buffers, buffer, member_link);
    mokd_state_touch(buffer->session->server);
    mokd_storage_release(buffer->storage);
    free(buffer);
}

struct mokd_buffer *mokd_buffer_of(const struct mokd_session *session, uint32_t id)
{
    struct mokd_buffer *buffer;

    TAILQ_FOREACH(buffer, &session->buffers, link)
        if (buffer->id == id)
            return buffer->ready && !buffer->going ? buffer : NULL;
    return NULL;
}

/* A session of which the next mokd cannot have everything ends with this one. */
static void keep(struct mokd_buffer *buffer)
{
    struct mokd_session *session = buffer->session;

    if (session->resumable && mokd_storage_keep(buffer->storage) < 0)
        session->resumable = false;
    mokd_state_touch(session->server);
}

static void hand_out(struct mokd_buffer *buffer, struct mokd_call *call)
{
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__BufferAllocReply body = MOK__BUFFER_ALLOC_REPLY__INIT;

    buffer->ready = true;
    keep(buffer);
    body.buffer = buffer->id;
    body.bytes = buffer->bytes;
    body.kind = buffer->device->config->kind;
    if (body.kind == MOK_DEVICE_CUDA) {
        body.uuid.data = buffer->device->uuid;
        body.uuid.len = sizeof(buffer->device->uuid);
        body.mps_pipe = (char *)buffer->device->config->mps_pipe;
    }
    reply.body_case = MOK__REPLY__BODY_BUFFER_ALLOC;
    reply.buffer_alloc = &body;
    mokd_call_reply(call, &reply, &buffer->storage->fd, 1);
}

/* ------------------------------------------------------------------ messages to workers */

/* A worker knows private buffers by their session; copies of a symmetric one by group and rank. */
struct map {
    Mok__WorkerRequest request;
    Mok__WorkerBufferMap body;
};

static void map_message(const struct mokd_buffer *buffer, uint64_t session, struct map *ret)
{
    ret->request = (Mok__WorkerRequest)MOK__WORKER_REQUEST__INIT;
    ret->body = (Mok__WorkerBufferMap)MOK__WORKER_BUFFER_MAP__INIT;
    ret->body.session = session;
    ret->body.group = buffer->member ? buffer->member->group->id : 0;
    ret->body.rank = buffer->member ? buffer->member->rank : 0;
    ret->body.buffer = buffer->id;
    ret->body.bytes = buffer->bytes;
    ret->request.body_case = MOK__WORKER_REQUEST__BODY_BUFFER_MAP;
    ret->request.buffer_map = &ret->body;
}

struct unmap {
    Mok__WorkerRequest request;
    Mok__WorkerBufferUnmap body;
};

static void unmap_message(const struct mokd_buffer *buffer, uint64_t session, struct unmap *ret)
{
    ret->request = (Mok__WorkerRequest)MOK__WORKER_REQUEST__INIT;
    ret->body = (Mok__WorkerBufferUnmap)MOK__WORKER_BUFFER_UNMAP__INIT;
    ret->body.session = session;
    ret->body.group = buffer->member ? buffer->member->group->id : 0;
    ret->body.rank = buffer->member ? buffer->member->rank : 0;
    ret->body.buffer = buffer->id;
    ret->request.body_case = MOK__WORKER_REQUEST__BODY_BUFFER_UNMAP;
    ret->request.buffer_unmap = &ret->body;
}

static void gather_unmap(struct mokd_gather *gather, const struct mokd_buffer *buffer, const struct mokd_member *at)
{
    struct unmap message;

    unmap_message(buffer, at->session->id, &message);
    mokd_gather_send(gather, at->device, &message.request, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS, at->rank);
}

static void unmap_at_peers(struct mokd_gather *gather, const struct mokd_buffer *buffer)
{
    const struct mokd_group *group = buffer->member->group;

    for (uint32_t rank = 0; rank < group->size; rank++)
        if (rank != buffer->member->rank && group->member[rank] && group->member[rank]->opened)
            gather_unmap(gather, buffer, group->member[rank]);
}

/* A copy of a rank of another node, at the worker of one of ours. */
static void send_foreign_map(const struct mokd_group *group, const struct mokd_job *job, uint32_t rank, uint64_t bytes,
                             const struct mokd_member *at, struct mokd_gather *gather)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerBufferMap body = MOK__WORKER_BUFFER_MAP__INIT;
    struct mokd_handle copy = mokd_span_handle_of(group, MOK__HANDLE_KIND__HANDLE_BUFFER, job->id, rank);

    body.session = at->session->id;
    body.group = group->id;
    body.rank = rank;
    body.buffer = job->id;
    body.bytes = bytes;
    if (copy.fd < 0 && copy.fabric)
        body.fabric = (ProtobufCBinaryData){ .len = MOKD_FABRIC_BYTES, .data = (uint8_t *)copy.fabric };
    request.body_case = MOK__WORKER_REQUEST__BODY_BUFFER_MAP;
    request.buffer_map = &body;
    mokd_gather_send(gather, at->device, &request, &copy.fd, copy.fd >= 0, MOKD_WORKER_MAP_TIMEOUT_MS, at->rank);
}

static void send_foreign_unmap(const struct mokd_group *group, uint32_t buffer, uint32_t rank,
                               const struct mokd_member *at, struct mokd_gather *gather)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerBufferUnmap body = MOK__WORKER_BUFFER_UNMAP__INIT;

    body.session = at->session->id;
    body.group = group->id;
    body.rank = rank;
    body.buffer = buffer;
    request.body_case = MOK__WORKER_REQUEST__BODY_BUFFER_UNMAP;
    request.buffer_unmap = &body;
    mokd_gather_send(gather, at->device, &request, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS, at->rank);
}

/* ------------------------------------------------------------------ private */

static void private_fail(struct mokd_buffer *buffer, const struct mokd_error *error)
{
    struct mokd_call call = buffer->call;

    buffer_release(buffer);
    mokd_call_fail(&call, error);
}

static void private_mapped(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_buffer *buffer = cookie;
    struct mokd_error error = { 0 };

    (void)tag;
    if (answer->code < 0) {
        mokd_error_set(&error, answer->code, "buffer on device %s: %s", buffer->device->config->name, answer->text);
        private_fail(buffer, &error);
        return;
    }
    hand_out(buffer, &buffer->call);
}

static void private_filled(void *cookie, const struct mokd_error *error)
{
    struct mokd_buffer *buffer = cookie;
    struct map message;

    if (error->code < 0 || buffer->session->state == MOKD_SESSION_CLOSING) {
        private_fail(buffer, error);
        return;
    }
    map_message(buffer, buffer->session->id, &message);
    mokd_device_send(buffer->device, &message.request, &buffer->storage->fd, 1, MOKD_WORKER_MAP_TIMEOUT_MS,
                     private_mapped, buffer, 0);
}

static int private_begin(struct mokd_session *session, const Mok__BufferAlloc *request, struct mokd_buffer **ret,
                         struct mokd_error *error)
{
    struct mokd_server *server = session->server;
    struct mokd_device *device;
    struct mokd_buffer *buffer;

    int r = mokd_session_device(session, request->device, &device, error);
    if (r == 0)
        r = buffer_new(session, device, NULL, mokd_server_next_id(server), request->bytes, &buffer, error);
    if (r < 0)
        return r;
    r = mokd_storage_fill(&buffer->storage, 1, private_filled, buffer);
    if (r < 0) {
        buffer_release(buffer);
        return mokd_error_set(error, r, "mokd is out of memory");
    }
    *ret = buffer;
    return 0;
}

void mokd_buffer_alloc(struct mokd_session *session, uint64_t id, const Mok__BufferAlloc *request)
{
    struct mokd_error error = { 0 };
    struct mokd_buffer *buffer = NULL;
    struct mokd_member *member = NULL;

    int r = 0;
    if (request->bytes == 0 || request->bytes > INT64_MAX)
        r = mokd_error_set(&error, -MOK_ESIZE, "bytes = %" PRIu64 ": must be in 1..%" PRId64, request->bytes,
                           INT64_MAX);
    else if (request->group)
        r = mokd_member_find(session, request->group, &member, &error);
    else
        r = private_begin(session, request, &buffer, &error);
    if (r < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    if (member) {
        struct group_params params = { .kind = GROUP_ALLOC, .bytes = request->bytes };
        mokd_collective_call(member, id, &params, request->timeout_ms);
        return;
    }
    buffer->call = mokd_call_begin(session, id);
}

/* ------------------------------------------------------------------ symmetric */

/* One allocation by all ranks; entries by rank, those of other nodes empty. */
struct symmetric {
    struct mokd_gather gather;
    struct mokd_group *group;
    struct mokd_job job;
    struct mokd_error error;
    uint64_t bytes;
    uint32_t size;
    struct {
        struct mokd_call call;
        struct mokd_buffer *buffer; /* NULL: of another node */
    } rank[];
};

static void symmetric_end(struct symmetric *job)
{
    struct mokd_group *group = job->group;

    if (job->error.code < 0)
        mokd_span_settle(group, job->job.id, false);
    for (uint32_t r = 0; r < job->size; r++) {
        if (!job->rank[r].call.session)
            continue;
        if (job->error.code == 0) {
            hand_out(job->rank[r].buffer, &job->rank[r].call);
            continue;
        }
        if (job->rank[r].buffer)
            buffer_release(job->rank[r].buffer);
        if (group->state == MOKD_GROUP_FAILED)
            mokd_member_failure(group->member[r], &job->error);
        mokd_call_fail(&job->rank[r].call, &job->error);
    }
    free(job);
    mokd_group_run_end(group);
}

static void symmetric_undone(struct mokd_gather *gather)
{
    symmetric_end(mokd_container_of(gather, struct symmetric, gather));
}

/* Some worker may have mapped some copy: all drop all. */
static void symmetric_undo(struct symmetric *job)
{
    const struct mokd_group *group = job->group;

    mokd_gather_begin(&job->gather, symmetric_undone);
    for (uint32_t at = 0; at < job->size; at++) {
        for (uint32_t r = 0; group->member[at] && r < job->size; r++) {
            if (job->rank[r].buffer)
                gather_unmap(&job->gather, job->rank[r].buffer, group->member[at]);
            else
                send_foreign_unmap(group, job->job.id, r, group->member[at], &job->gather);
        }
    }
    mokd_gather_end(&job->gather);
}

/* Mapped here and everywhere, or not to be. */
static void symmetric_verdict(void *cookie, const struct mokd_error *error)
{
    struct symmetric *job = cookie;

    job->error = *error;
    if (error->code < 0)
        symmetric_undo(job);
    else
        symmetric_end(job);
}

/* What cannot be made here is nowhere made; no worker has heard of it. */
static void symmetric_unmade(void *cookie, const struct mokd_error *error)
{
    struct symmetric *job = cookie;

    job->error = *error;
    symmetric_end(job);
}

static void symmetric_mapped(struct mokd_gather *gather)
{
    struct symmetric *job = mokd_container_of(gather, struct symmetric, gather);
    struct mokd_error error = { 0 };

    if (gather->first.code < 0)
        mokd_error_set(&error, gather->first.code, "buffer on device %s of rank %u: %.300s",
                       job->group->member[gather->first_tag]->device->config->name, gather->first_tag,
                       gather->first.text);
    else if (job->group->state == MOKD_GROUP_FAILED)
        mokd_error_set(&error, -MOK_EPEER, "%s", job->group->failure); /* each is told his own reason */
    mokd_span_prepared(job->group, job->job.index, &error, gather->first_tag, symmetric_verdict, job);
}

static void symmetric_exchanged(void *cookie, const struct mokd_error *error)
{
    struct symmetric *job = cookie;
    const struct mokd_group *group = job->group;

    if (error->code < 0) {
        mokd_span_prepared(job->group, job->job.index, error, 0, symmetric_unmade, job);
        return;
    }
    mokd_gather_begin(&job->gather, symmetric_mapped);
    for (uint32_t at = 0; at < job->size; at++) {
        struct mokd_member *member = group->member[at];
        for (uint32_t r = 0; member && r < job->size; r++) {
            if (job->rank[r].buffer)
                mokd_buffer_send_map(job->rank[r].buffer, member, &job->gather);
            else
                send_foreign_map(group, &job->job, r, job->bytes, member, &job->gather);
        }
    }
    mokd_span_settle(job->group, job->job.id, true); /* from now on their owners may have them unmapped */
    mokd_gather_end(&job->gather);
}

static void symmetric_filled(void *cookie, const struct mokd_error *error)
{
    struct symmetric *job = cookie;
    struct mokd_handle own[MOK_MAX_EP];

    if (error->code < 0) {
        mokd_span_prepared(job->group, job->job.index, error, 0, symmetric_unmade, job);
        return;
    }
    for (uint32_t r = 0; r < job->size; r++)
        if (job->rank[r].buffer)
            own[r] = mokd_storage_handle(job->rank[r].buffer->storage);
    mokd_span_exchange(job->group, job->job.index, MOK__HANDLE_KIND__HANDLE_BUFFER, job->job.id, own, job->bytes,
                       symmetric_exchanged, job);
}

static int symmetric_charge(struct symmetric *job, uint32_t rank, struct mokd_error *error)
{
    struct mokd_member *member = job->group->member[rank];

    return buffer_new(member->session, member->device, member, job->job.id, job->bytes, &job->rank[rank].buffer, error);
}

static int symmetric_begin(struct symmetric *job, struct mokd_error *error)
{
    struct mokd_error why = { 0 };
    _cleanup_free_ struct mokd_storage **list = calloc(job->size, sizeof(*list));
    size_t count = 0;

    if (!list)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    for (uint32_t r = 0; r < job->size; r++) {
        if (!job->rank[r].call.session)
            continue;
        if (symmetric_charge(job, r, &why) < 0)
            return mokd_error_set(error, why.code, "rank %u: %.400s", r, why.text);
        job->rank[r].buffer->storage->fabric = mokd_span_is_across(job->group);
        list[count++] = job->rank[r].buffer->storage;
    }
    int r = mokd_storage_fill(list, count, symmetric_filled, job);
    return r < 0 ? mokd_error_set(error, r, "mokd is out of memory") : 0;
}

/* So little is left that not even that can be kept. */
static void forget_job(struct mokd_group *group, const struct mokd_error *error)
{
    if (group->span)
        mokd_group_fail(group, 0, error->text);
}

void mokd_symmetric_alloc(struct mokd_group *group, const struct mokd_job *what, struct mokd_call *calls,
                          uint64_t bytes)
{
    struct symmetric *job = calloc(1, sizeof(*job) + group->size * sizeof(job->rank[0]));
    struct mokd_error error = { 0 };

    if (!job) {
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
        for (uint32_t r = 0; r < group->size; r++)
            if (calls[r].session)
                mokd_call_fail(&calls[r], &error);
        forget_job(group, &error);
        return;
    }
    job->group = group;
    job->job = *what;
    job->bytes = bytes;
    job->size = group->size;
    for (uint32_t r = 0; r < group->size; r++)
        job->rank[r].call = calls[r];
    mokd_group_run_begin(group);
    if (symmetric_begin(job, &error) < 0)
        mokd_span_prepared(group, what->index, &error, 0, symmetric_unmade, job);
}

/* ------------------------------------------------------------------ freeing */

static void freed(struct mokd_gather *gather);

static void free_at_peers(struct mokd_buffer *buffer)
{
    mokd_gather_begin(&buffer->gather, freed);
    if (buffer->member) {
        unmap_at_peers(&buffer->gather, buffer);
        mokd_rack_drop(buffer->member->group, buffer->member->rank, buffer->id, &buffer->gather);
    }
    mokd_gather_end(&buffer->gather);
}

static void freed(struct mokd_gather *gather)
{
    struct mokd_buffer *buffer = mokd_container_of(gather, struct mokd_buffer, gather);
    struct mokd_group *group = buffer->member ? buffer->member->group : NULL;
    struct mokd_call call = buffer->call;

    buffer_release(buffer);
    mokd_call_done(&call);
    if (group)
        mokd_group_run_end(group);
}

/* Its own worker knows whether an operation still uses it; any answer but that means that it maps it no more. */
static void free_answered(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_buffer *buffer = cookie;
    struct mokd_error error = { 0 };

    (void)tag;
    if (answer->code != -MOK_EBUSY) {
        free_at_peers(buffer);
        return;
    }
    struct mokd_group *group = buffer->member ? buffer->member->group : NULL;
    struct mokd_call call = buffer->call;
    buffer->going = false;
    mokd_error_set(&error, answer->code, "buffer = %u: %s", buffer->id, answer->text);
    mokd_call_fail(&call, &error);
    if (group)
        mokd_group_run_end(group);
}

void mokd_buffer_free(struct mokd_session *session, uint64_t id, const Mok__BufferFree *request)
{
    struct mokd_buffer *buffer = mokd_buffer_of(session, request->buffer);
    struct mokd_error error = { 0 };
    struct unmap message;

    if (!buffer)
        mokd_error_set(&error, -MOK_EBUFFER, "buffer = %u: the session has no such buffer", request->buffer);
    else if (buffer->bindings > 0)
        mokd_error_set(&error, -MOK_EBUSY, "buffer = %u: bound to a layer in %u places", buffer->id, buffer->bindings);
    else if (buffer->member && buffer->member->group->state == MOKD_GROUP_SUSPENDED)
        mokd_error_set(&error, -MOK_EBUSY, "buffer = %u: its group is being restored after a restart of mokd",
                       buffer->id);
    else if (buffer->member && buffer->member->leaving)
        mokd_error_set(&error, -MOK_EBUSY, "buffer = %u: the session is leaving its group", buffer->id);
    if (error.code < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    buffer->going = true;
    buffer->call = mokd_call_begin(session, id);
    if (buffer->member)
        mokd_group_run_begin(buffer->member->group);
    unmap_message(buffer, session->id, &message);
    mokd_device_send(buffer->device, &message.request, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS, free_answered, buffer, 0);
}

/* ------------------------------------------------------------------ with their owners */

void mokd_member_buffers_unmap(struct mokd_member *member, struct mokd_gather *gather)
{
    struct mokd_buffer *buffer;

    TAILQ_FOREACH(buffer, &member->buffers, member_link)
        unmap_at_peers(gather, buffer);
    if (!TAILQ_EMPTY(&member->buffers))
        mokd_rack_drop(member->group, member->rank, 0, gather);
}

void mokd_foreign_buffers_unmap(struct mokd_group *group, uint32_t rank, uint32_t buffer, struct mokd_gather *gather)
{
    struct mokd_foreign *foreign, *next;

    for (foreign = TAILQ_FIRST(&group->span->foreign); foreign; foreign = next) {
        next = TAILQ_NEXT(foreign, link);
        if (!foreign->mapped || foreign->rank != rank || (buffer && foreign->object != buffer))
            continue;
        for (uint32_t at = 0; at < group->size; at++)
            if (group->member[at] && group->member[at]->opened && !group->member[at]->going)
                send_foreign_unmap(group, foreign->object, rank, group->member[at], gather);
        mokd_span_forget_foreign(group, foreign);
    }
}

void mokd_member_buffers_release(struct mokd_member *member)
{
    struct mokd_buffer *buffer;

    while ((buffer = TAILQ_FIRST(&member->buffers)))
        buffer_release(buffer);
}

static void dropped(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_buffer *buffer = cookie;
    struct mokd_session *session = buffer->session;

    (void)tag;
    (void)answer;
    buffer_release(buffer);
    mokd_session_unref(session);
}

static void drop(struct mokd_buffer *buffer)
{
    struct unmap message;

    buffer->going = true;
    mokd_session_ref(buffer->session);
    unmap_message(buffer, buffer->session->id, &message);
    mokd_device_send(buffer->device, &message.request, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS, dropped, buffer, 0);
}

void mokd_buffers_drop(struct mokd_session *session)
{
    struct mokd_buffer *buffer, *next;

    for (buffer = TAILQ_FIRST(&session->buffers); buffer; buffer = next) {
        next = TAILQ_NEXT(buffer, link);
        drop(buffer);
    }
}

/* No worker knows a copy of a symmetric one while its group is suspended. */
void mokd_buffer_drop(struct mokd_buffer *buffer)
{
    if (buffer->member)
        buffer_release(buffer);
    else
        drop(buffer);
}

int mokd_buffer_adopt(struct mokd_session *session, struct mokd_member *member, uint32_t id,
                      struct mokd_storage *storage)
{
    struct mokd_buffer *buffer = buffer_of_storage(session, member, id, storage);

    if (!buffer)
        return -MOK_ENOMEM;
    mokd_user_adopt(session->user, MOKD_BUFFERS, 1);
    buffer->ready = true;
    return 0;
}

void mokd_buffer_send_map(const struct mokd_buffer *buffer, const struct mokd_member *at, struct mokd_gather *gather)
{
    struct map message;

    map_message(buffer, at->session->id, &message);
    mokd_gather_send(gather, at->device, &message.request, &buffer->storage->fd, 1, MOKD_WORKER_MAP_TIMEOUT_MS,
                     at->rank);
}

static void attached(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct mokd_session *session = cookie;
    struct mokd_error error = { 0 };

    if (answer->code < 0 && (answer->reply || answer->code == -MOK_EFDS || answer->code == -MOK_EQUOTA)) {
        mokd_error_set(&error, -MOK_EWORKER, "the new worker cannot map buffer %u: %s", tag, answer->text);
        mokd_session_close(session, error.code, error.text);
    }
    mokd_session_unref(session);
}

void mokd_buffers_attach(struct mokd_device *device)
{
    struct mokd_session *session;
    struct mokd_buffer *buffer;
    struct map message;

    TAILQ_FOREACH(session, &device->server->sessions, link) {
        if (session->state != MOKD_SESSION_OPEN && session->state != MOKD_SESSION_AWAY)
            continue;
        TAILQ_FOREACH(buffer, &session->buffers, link) {
            if (buffer->member || buffer->device != device || !buffer->ready || buffer->going)
                continue;
            mokd_session_ref(session);
            map_message(buffer, session->id, &message);
            mokd_device_send(device, &message.request, &buffer->storage->fd, 1, MOKD_WORKER_MAP_TIMEOUT_MS, attached,
                             session, buffer->id);
        }
    }
}
