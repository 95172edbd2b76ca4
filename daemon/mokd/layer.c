/* SPDX-License-Identifier: Apache-2.0 */
#include "layer.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "client_queue.h"
#include "collective.h"
#include "common/layer_spec.h"
#include "kernels/board.h"
#include "memory.h"
#include "names.h"
#include "rack_groups.h"
#include "span.h"
#include "state.h"

/* ------------------------------------------------------------------ plans */

void mokd_layer_memory_message(const struct mok_plan *plan, Mok__LayerMemory *ret)
{
    *ret = (Mok__LayerMemory)MOK__LAYER_MEMORY__INIT;
    ret->symmetric_bytes = plan->symmetric_bytes;
    ret->private_bytes = plan->private_bytes;
    ret->context_full_bytes = plan->context_full_bytes;
    ret->context_recompute_bytes = plan->context_recompute_bytes;
}

int mokd_layer_plan(const struct mok_layer_spec *spec, const struct mokd_device *device, struct mok_plan *ret,
                    char *describe, struct mokd_error *error)
{
    struct mok_device_limits limits = {
        .kind = device->config->kind,
        .units = device->units,
        .memory_bytes = device->config->memory,
    };
    struct mok_message message = { 0 };

    int r = mok_plan_make(spec, &limits, ret, describe, describe ? MOKD_DESCRIBE_BYTES : 0, &message);
    return r < 0 ? mokd_error_set(error, r, "%s", message.text) : 0;
}

/* ------------------------------------------------------------------ the object */

int mokd_layer_find(const struct mokd_session *session, uint32_t id, struct mokd_layer **ret_layer,
                    struct mokd_member **ret_member, struct mokd_error *error)
{
    struct mokd_member *member;
    struct mokd_layer *layer;

    TAILQ_FOREACH(member, &session->members, link) {
        TAILQ_FOREACH(layer, &member->group->layers, link) {
            if (layer->id != id || !layer->ready || !layer->part[member->rank].open || member->leaving)
                continue;
            *ret_layer = layer;
            *ret_member = member;
            return 0;
        }
    }
    return mokd_error_set(error, -MOK_ENOENT, "layer = %u: the session has no such layer", id);
}

static void unbind(struct mokd_layer_part *part)
{
    for (size_t i = 0; i < MOKD_PARAMS; i++) {
        if (part->bound[i])
            part->bound[i]->bindings--;
        part->bound[i] = NULL;
    }
}

static void part_uncount(struct mokd_layer_part *part)
{
    if (part->charged)
        mokd_user_give(part->charged, MOKD_LAYERS, 1);
    mokd_user_unref(part->charged);
    part->charged = NULL;
}

/* Peers map the symmetric workspaces until they close the layer themselves, so these all go at the end. */
static void layer_free(struct mokd_layer *layer)
{
    for (uint32_t rank = 0; rank < layer->group->size; rank++) {
        mokd_storage_release(layer->part[rank].symmetric);
        mokd_storage_release(layer->part[rank].private_memory);
        part_uncount(&layer->part[rank]);
    }
    mok_close(layer->flags_fd);
    mokd_storage_release(layer->board);
    TAILQ_REMOVE(&layer->group->layers, layer, link);
    free(layer);
}

/* Of any node's rank. */
static void part_gone(struct mokd_layer *layer, uint32_t rank)
{
    struct mokd_layer_part *part = &layer->part[rank];
    const struct mokd_member *member = layer->group->member[rank];

    if (!part->open)
        return;
    unbind(part);
    mokd_storage_release(part->private_memory);
    part->private_memory = NULL;
    part->open = false;
    part->busy = false;
    if (member)
        member->session->n_layers--;
    part_uncount(part);
    mokd_state_touch(layer->group->server);
    if (--layer->open_parts == 0)
        layer_free(layer);
}

void mokd_layer_part_gone(struct mokd_layer *layer, struct mokd_member *member)
{
    part_gone(layer, member->rank);
}

/* One that is being made has no open part yet, or some of ours. */
static bool is_forsaken(const struct mokd_layer *layer)
{
    for (uint32_t rank = 0; rank < layer->group->size; rank++)
        if (layer->part[rank].open && mokd_span_is_here(layer->group, rank))
            return false;
    return layer->open_parts > 0;
}

void mokd_layers_forsake(struct mokd_group *group)
{
    struct mokd_layer *layer, *next;

    for (layer = TAILQ_FIRST(&group->layers); layer; layer = next) {
        next = TAILQ_NEXT(layer, link);
        if (!is_forsaken(layer))
            continue;
        for (uint32_t rank = 0, left = layer->open_parts; left > 0; rank++) {
            if (!layer->part[rank].open)
                continue;
            left--; /* the last one takes the layer with it */
            part_gone(layer, rank);
        }
    }
}

void mokd_member_layers_gone(struct mokd_member *member)
{
    struct mokd_layer *layer, *next;

    for (layer = TAILQ_FIRST(&member->group->layers); layer; layer = next) {
        next = TAILQ_NEXT(layer, link);
        mokd_layer_part_gone(layer, member);
    }
    mokd_layers_forsake(member->group);
}

/* ------------------------------------------------------------------ creating */

/* One creation by all ranks; calls by rank. */
struct making {
    struct mokd_gather gather;
    struct mokd_group *group;
    struct mokd_layer *layer;
    struct mokd_job job;
    struct mokd_error error;
    struct mokd_call call[]; /* none where the rank is on another node */
};

static void answer_made(struct making *job, uint32_t rank)
{
    const struct mokd_member *member = job->group->member[rank];
    const struct mokd_queue *queue = mokd_queue_of(member->session, member->device);
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__LayerCreateReply body = MOK__LAYER_CREATE_REPLY__INIT;
    Mok__LayerMemory memory;

    mokd_layer_memory_message(&job->layer->part[rank].plan, &memory);
    body.layer = job->layer->id;
    body.memory = &memory;
    body.queue = queue ? queue->id : 0;
    reply.body_case = MOK__REPLY__BODY_LAYER_CREATE;
    reply.layer_create = &body;
    mokd_call_reply(&job->call[rank], &reply, NULL, 0);
}

static void making_end(struct making *job)
{
    struct mokd_group *group = job->group;

    if (job->error.code == 0) {
        job->layer->ready = true;
        mokd_state_touch(group->server);
        for (uint32_t rank = 0; rank < group->size; rank++)
            if (job->call[rank].session)
                answer_made(job, rank);
    }
    for (uint32_t rank = 0; rank < group->size; rank++) {
        if (!job->call[rank].session)
            continue;
        if (group->state == MOKD_GROUP_FAILED)
            mokd_member_failure(group->member[rank], &job->error);
        mokd_call_fail(&job->call[rank], &job->error);
    }
    mokd_span_settle(group, job->job.id, false);
    free(job);
    mokd_group_run_end(group);
}

static void unmade(struct mokd_gather *gather)
{
    struct making *job = mokd_container_of(gather, struct making, gather);

    for (uint32_t rank = 0, left = job->layer->open_parts; left > 0; rank++) {
        if (!job->layer->part[rank].open)
            continue;
        left--; /* the last one takes the layer with it */
        part_gone(job->layer, rank);
    }
    making_end(job);
}

static void close_message(const struct mokd_layer *layer, Mok__WorkerRequest *request, Mok__WorkerLayerClose *body)
{
    *request = (Mok__WorkerRequest)MOK__WORKER_REQUEST__INIT;
    *body = (Mok__WorkerLayerClose)MOK__WORKER_LAYER_CLOSE__INIT;
    body->layer = layer->id;
    request->body_case = MOK__WORKER_REQUEST__BODY_LAYER_CLOSE;
    request->layer_close = body;
}

static void unmake(struct making *job)
{
    Mok__WorkerRequest request;
    Mok__WorkerLayerClose body;

    mokd_gather_begin(&job->gather, unmade);
    for (uint32_t rank = 0; rank < job->group->size; rank++) {
        if (!job->group->member[rank])
            continue;
        close_message(job->layer, &request, &body);
        mokd_gather_send(&job->gather, job->group->member[rank]->device, &request, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS,
                         rank);
    }
    mokd_gather_end(&job->gather);
}

/* Open here and everywhere, or not to be. */
static void making_verdict(void *cookie, const struct mokd_error *error)
{
    struct making *job = cookie;

    job->error = *error;
    if (error->code < 0)
        unmake(job);
    else
        making_end(job);
}

/* What cannot be made here is nowhere made; no worker has heard of it. */
static void making_failed(void *cookie, const struct mokd_error *error)
{
    struct making *job = cookie;

    job->error = *error;
    if (job->layer)
        layer_free(job->layer);
    making_end(job);
}

static void opened(struct mokd_gather *gather)
{
    struct making *job = mokd_container_of(gather, struct making, gather);
    struct mokd_error error = { 0 };

    if (gather->first.code < 0)
        mokd_error_set(&error, gather->first.code, "rank %u: %.400s", gather->first_tag, gather->first.text);
    else if (job->group->state == MOKD_GROUP_FAILED)
        mokd_error_set(&error, -MOK_EPEER, "%s", job->group->failure); /* each is told his own reason */
    mokd_span_prepared(job->group, job->job.index, &error, gather->first_tag, making_verdict, job);
}

/* The page or board of the ranks' flags, which is rank 0's node's. */
static struct mokd_handle handle_of_flags(const struct mokd_layer *layer)
{
    if (layer->board)
        return mokd_storage_handle(layer->board);
    if (layer->flags_fd >= 0)
        return (struct mokd_handle){ .fd = layer->flags_fd };
    return mokd_span_handle_of(layer->group, MOK__HANDLE_KIND__HANDLE_FLAGS, layer->id, 0);
}

/* What has no descriptor here goes by its fabric handle. */
struct opening {
    Mok__WorkerLayerOpen body;
    Mok__WorkerFabric fabric[MOK_MAX_EP], *pointer[MOK_MAX_EP];
    int fds[MOK_MAX_EP + 2];
    size_t n_fds;
};

static ProtobufCBinaryData fabric_bytes(const struct mokd_handle *handle)
{
    return (ProtobufCBinaryData){ .len = handle->fabric ? MOKD_FABRIC_BYTES : 0, .data = (uint8_t *)handle->fabric };
}

static void open_memory(const struct mokd_layer *layer, uint32_t rank, struct opening *ret)
{
    const struct mokd_group *group = layer->group;
    struct mokd_handle flags = handle_of_flags(layer);

    ret->body.board = mokd_span_is_across(group);
    if (flags.fd >= 0)
        ret->fds[ret->n_fds++] = flags.fd;
    else
        ret->body.board_fabric = fabric_bytes(&flags);
    for (uint32_t r = 0; r < group->size; r++) {
        struct mokd_handle workspace =
            layer->part[r].symmetric ? mokd_storage_handle(layer->part[r].symmetric)
                                     : mokd_span_handle_of(group, MOK__HANDLE_KIND__HANDLE_WORKSPACE, layer->id, r);
        Mok__WorkerFabric *entry = &ret->fabric[ret->body.n_fabric];
        if (workspace.fd >= 0) {
            ret->fds[ret->n_fds++] = workspace.fd;
            continue;
        }
        *entry = (Mok__WorkerFabric)MOK__WORKER_FABRIC__INIT;
        entry->rank = r;
        entry->handle = fabric_bytes(&workspace);
        ret->pointer[ret->body.n_fabric++] = entry;
    }
    ret->body.fabric = ret->pointer;
    ret->fds[ret->n_fds++] = layer->part[rank].private_memory->fd;
}

void mokd_layer_send_open(const struct mokd_layer *layer, uint32_t rank, struct mokd_gather *gather)
{
    const struct mokd_group *group = layer->group;
    const struct mokd_member *member = group->member[rank];
    const struct mokd_queue *queue = mokd_queue_of(member->session, member->device);
    const struct mokd_layer_part *part = &layer->part[rank];
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    struct opening opening = { .body = MOK__WORKER_LAYER_OPEN__INIT };
    Mok__LayerSpec spec = mok_layer_spec_message(&part->plan.spec);
    Mok__LayerMemory memory;

    open_memory(layer, rank, &opening);
    mokd_layer_memory_message(&part->plan, &memory);
    opening.body.group = group->id;
    opening.body.layer = layer->id;
    opening.body.queue = queue ? queue->id : 0; /* 0: it ended meanwhile; the worker refuses */
    opening.body.session = member->session->id;
    opening.body.spec = &spec;
    opening.body.memory = &memory;
    request.body_case = MOK__WORKER_REQUEST__BODY_LAYER_OPEN;
    request.layer_open = &opening.body;
    mokd_gather_send(gather, member->device, &request, opening.fds, opening.n_fds, MOKD_WORKER_MAP_TIMEOUT_MS, rank);
}

/* The memory of all ranks is here. From now on the parts count as open, whatever comes of it. */
static void workspaces_came(void *cookie, const struct mokd_error *error)
{
    struct making *job = cookie;
    struct mokd_group *group = job->group;

    if (error->code < 0) {
        mokd_span_prepared(group, job->job.index, error, 0, making_failed, job);
        return;
    }
    job->layer->open_parts = group->size;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        job->layer->part[rank].open = true;
        if (group->member[rank])
            group->member[rank]->session->n_layers++;
    }
    mokd_gather_begin(&job->gather, opened);
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->member[rank])
            mokd_layer_send_open(job->layer, rank, &job->gather);
    mokd_gather_end(&job->gather);
}

static void flags_came(void *cookie, const struct mokd_error *error)
{
    struct making *job = cookie;
    const struct mokd_layer *layer = job->layer;
    struct mokd_handle own[MOK_MAX_EP];
    uint64_t bytes = 0;

    if (error->code < 0) {
        mokd_span_prepared(job->group, job->job.index, error, 0, making_failed, job);
        return;
    }
    for (uint32_t rank = 0; rank < job->group->size; rank++) {
        if (!layer->part[rank].symmetric)
            continue;
        own[rank] = mokd_storage_handle(layer->part[rank].symmetric);
        bytes = layer->part[rank].symmetric->bytes;
    }
    mokd_span_exchange(job->group, job->job.index, MOK__HANDLE_KIND__HANDLE_WORKSPACE, layer->id, own, bytes,
                       workspaces_came, job);
}

/* The ranks' flags come from the node of rank 0. */
static void filled(void *cookie, const struct mokd_error *error)
{
    struct making *job = cookie;
    const struct mokd_layer *layer = job->layer;

    if (error->code < 0) {
        mokd_span_prepared(job->group, job->job.index, error, 0, making_failed, job);
        return;
    }
    struct mokd_handle own =
        layer->board ? mokd_storage_handle(layer->board) : (struct mokd_handle){ .fd = layer->flags_fd };
    uint64_t bytes = layer->board ? layer->board->bytes : (uint64_t)job->group->size * MOK_FLAGS_BYTES;
    mokd_span_exchange(job->group, job->job.index, MOK__HANDLE_KIND__HANDLE_FLAGS, layer->id, &own, bytes, flags_came,
                       job);
}

static int prepare_part(struct mokd_layer *layer, uint32_t rank, const struct mok_layer_spec *spec,
                        struct mokd_error *error)
{
    struct mokd_member *member = layer->group->member[rank];
    struct mokd_user *user = member->session->user;
    struct mokd_layer_part *part = &layer->part[rank];

    int r = mokd_layer_plan(spec, member->device, &part->plan, NULL, error);
    if (r == 0)
        r = mokd_user_take(user, MOKD_LAYERS, 1, error);
    if (r == 0)
        part->charged = mokd_user_hold(user);
    if (r == 0)
        r = mokd_storage_charge(member->session, member->device, part->plan.symmetric_bytes, &part->symmetric, error);
    if (r == 0)
        r = mokd_storage_charge(member->session, member->device, part->plan.private_bytes, &part->private_memory,
                                error);
    if (r == 0)
        part->symmetric->fabric = mokd_span_is_across(layer->group);
    return r;
}

/* Where the ranks' flags will lie, if that is here: charged like a workspace where it is device memory. */
static int prepare_flags(struct mokd_layer *layer, struct mokd_error *error)
{
    const struct mokd_group *group = layer->group;
    struct mokd_member *first = group->member[0];

    if (!first)
        return 0;
    if (mokd_span_is_across(group)) {
        int r = mokd_storage_charge(first->session, first->device, mok_board_bytes(group->size), &layer->board, error);
        if (r == 0)
            layer->board->fabric = true;
        return r;
    }
    int r = mok_memory_create("mok-flags", (uint64_t)group->size * MOK_FLAGS_BYTES, &layer->flags_fd);
    return r < 0 ? mokd_error_set(error, r, "the machine does not give memory for its flags: %s", mok_error_text(r))
                 : 0;
}

struct mokd_layer *mokd_layer_new(struct mokd_group *group, uint32_t id)
{
    struct mokd_layer *layer = calloc(1, sizeof(*layer) + group->size * sizeof(layer->part[0]));

    if (!layer)
        return NULL;
    layer->group = group;
    layer->id = id;
    layer->flags_fd = -1;
    TAILQ_INSERT_TAIL(&group->layers, layer, link);
    return layer;
}

int mokd_layer_prepare(struct mokd_layer *layer, const struct mok_layer_spec *specs, mokd_storage_filled done,
                       void *cookie, struct mokd_error *error)
{
    const struct mokd_group *group = layer->group;
    struct mokd_error why = { 0 };
    _cleanup_free_ struct mokd_storage **list = calloc(2 * (size_t)group->size + 1, sizeof(*list));
    size_t count = 0;

    if (!list)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    int r = prepare_flags(layer, &why);
    if (r < 0)
        return mokd_error_set(error, r, "layer: %.400s", why.text);
    if (layer->board)
        list[count++] = layer->board;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        if (!group->member[rank])
            continue;
        r = prepare_part(layer, rank, &specs[rank], &why);
        if (r < 0)
            return mokd_error_set(error, r, "rank %u: %.400s", rank, why.text);
        list[count++] = layer->part[rank].symmetric;
        list[count++] = layer->part[rank].private_memory;
    }
    r = mokd_storage_fill(list, count, done, cookie);
    return r < 0 ? mokd_error_set(error, r, "mokd is out of memory") : 0;
}

static int making_begin(struct making *job, const struct mok_layer_spec *specs, struct mokd_error *error)
{
    job->layer = mokd_layer_new(job->group, job->job.id);
    if (!job->layer)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    return mokd_layer_prepare(job->layer, specs, filled, job, error);
}

void mokd_layer_make(struct mokd_group *group, const struct mokd_job *what, struct mokd_call *calls,
                     const struct mok_layer_spec *specs)
{
    struct making *job = calloc(1, sizeof(*job) + group->size * sizeof(job->call[0]));
    struct mokd_error error = { 0 };

    if (!job) {
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
        for (uint32_t rank = 0; rank < group->size; rank++)
            if (calls[rank].session)
                mokd_call_fail(&calls[rank], &error);
        if (group->span) /* not even that can be told in order */
            mokd_group_fail(group, 0, error.text);
        return;
    }
    job->group = group;
    job->job = *what;
    memcpy(job->call, calls, group->size * sizeof(job->call[0]));
    mokd_group_run_begin(group);
    if (making_begin(job, specs, &error) < 0)
        mokd_span_prepared(group, what->index, &error, 0, making_failed, job);
}

/* What is wrong with a rank's own call is its own affair and no call at all; only sound ones are matched. */
void mokd_layer_create(struct mokd_session *session, uint64_t id, const Mok__LayerCreate *request)
{
    struct group_params params = { .kind = GROUP_LAYER };
    struct mokd_member *member = NULL;
    struct mokd_error error = { 0 };
    struct mok_plan plan;

    int r = mokd_member_find(session, request->group, &member, &error);
    if (r == 0 && !request->spec)
        r = mokd_error_set(&error, -MOK_EARG, "spec: missing");
    if (r == 0) {
        params.spec = mok_layer_spec_read(request->spec, member->group->size, member->rank);
        r = mokd_layer_plan(&params.spec, member->device, &plan, NULL, &error);
    }
    if (r == 0)
        group_map_of(&plan, &params.map);
    if (r == 0 && !mokd_queue_of(session, member->device))
        r = mokd_error_set(&error, -MOK_ESTATE, "layer: the session has no queue on device %u, open one first",
                           member->device->index);
    if (r < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    mokd_collective_call(member, id, &params, request->timeout_ms);
}

/* ------------------------------------------------------------------ binding, destroying */

/* A change to one part; `may_fail`: a failed group answers with its failure. The group keeps its ranks until it has
 * ended. */
struct change {
    struct mokd_layer *layer;
    struct mokd_member *member;
    struct mokd_call call;
    struct mokd_buffer *bound[MOKD_PARAMS];
    struct mokd_region region[MOKD_PARAMS];
};

static struct change *change_begin(struct mokd_session *session, uint64_t id, uint32_t layer_id, bool may_fail,
                                   struct mokd_error *error)
{
    struct mokd_layer *layer;
    struct mokd_member *member;

    if (mokd_layer_find(session, layer_id, &layer, &member, error) < 0)
        return NULL;
    if (member->group->state == MOKD_GROUP_SUSPENDED) {
        mokd_error_set(error, -MOK_EBUSY, "layer = %u: its group is being restored after a restart of mokd", layer_id);
        return NULL;
    }
    if (may_fail && member->group->state == MOKD_GROUP_FAILED) {
        mokd_member_failure(member, error);
        return NULL;
    }
    if (layer->part[member->rank].busy) {
        mokd_error_set(error, -MOK_EBUSY, "layer = %u: another change of it is under way", layer_id);
        return NULL;
    }
    struct change *change = calloc(1, sizeof(*change));
    if (!change) {
        mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
        return NULL;
    }
    change->layer = layer;
    change->member = member;
    change->call = mokd_call_begin(session, id);
    layer->part[member->rank].busy = true;
    mokd_group_run_begin(layer->group);
    return change;
}

/* Answers; the part may be gone by now. */
static void change_end(struct change *change, const struct mokd_error *error)
{
    struct mokd_group *group = change->member->group;

    if (error->code < 0)
        mokd_call_fail(&change->call, error);
    else
        mokd_call_done(&change->call);
    free(change);
    mokd_group_run_end(group);
}

static void bound(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct change *change = cookie;
    struct mokd_layer_part *part = &change->layer->part[change->member->rank];
    struct mokd_error error = { 0 };

    (void)tag;
    if (answer->code < 0) {
        mokd_error_set(&error, answer->code, "layer = %u: %s", change->layer->id, answer->text);
        for (size_t i = 0; i < MOKD_PARAMS; i++)
            if (change->bound[i])
                change->bound[i]->bindings--;
    } else {
        unbind(part);
        memcpy(part->bound, change->bound, sizeof(part->bound));
        memcpy(part->region, change->region, sizeof(part->region));
        part->is_bound = true;
        mokd_state_touch(change->layer->group->server);
    }
    part->busy = false;
    change_end(change, &error);
}

void mokd_layer_bind(struct mokd_session *session, uint64_t id, const Mok__LayerBind *request)
{
    Mok__LayerParams none = MOK__LAYER_PARAMS__INIT;
    struct mokd_error error = { 0 };
    struct change *change = change_begin(session, id, request->layer, true, &error);

    if (!change) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    struct mokd_layer_part *part = &change->layer->part[change->member->rank];
    Mok__LayerParams *params = request->params ? request->params : &none;
    if (mokd_layer_params_check(session, change->member->device, &part->plan, params, change->bound, &error) < 0) {
        part->busy = false;
        change_end(change, &error);
        return;
    }
    for (size_t i = 0; i < MOKD_PARAMS; i++)
        if (change->bound[i])
            change->bound[i]->bindings++; /* from now on: nobody may free it while the worker is asked */
    mokd_layer_params_regions(params, change->region);
    Mok__WorkerRequest message = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerLayerBind body = MOK__WORKER_LAYER_BIND__INIT;
    body.layer = request->layer;
    body.params = params;
    message.body_case = MOK__WORKER_REQUEST__BODY_LAYER_BIND;
    message.layer_bind = &body;
    mokd_device_send(change->member->device, &message, NULL, 0, MOKD_WORKER_TIMEOUT_MS, bound, change, 0);
}

void mokd_layer_send_bind(const struct mokd_layer *layer, uint32_t rank, struct mokd_gather *gather)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerLayerBind body = MOK__WORKER_LAYER_BIND__INIT;
    struct mokd_params_message params;

    body.layer = layer->id;
    body.params = mokd_layer_params_message(layer->part[rank].region, &params);
    request.body_case = MOK__WORKER_REQUEST__BODY_LAYER_BIND;
    request.layer_bind = &body;
    mokd_gather_send(gather, layer->group->member[rank]->device, &request, NULL, 0, MOKD_WORKER_TIMEOUT_MS, rank);
}

/* The other ranks' operations of the layer that still need this one will never get it. */
static void tell_destroyed(const struct mokd_layer *layer, uint32_t rank)
{
    const char *node = mokd_span_node(layer->group, rank);
    char text[128];

    snprintf(text, sizeof(text), "rank %u%s%s%s destroyed the layer", rank, node[0] ? " (node " : "", node,
             node[0] ? ")" : "");
    for (uint32_t other = 0; other < layer->group->size; other++) {
        Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
        Mok__WorkerLayerFail body = MOK__WORKER_LAYER_FAIL__INIT;
        if (other == rank || !layer->part[other].open || !layer->group->member[other])
            continue;
        body.layer = layer->id;
        body.code = -MOK_EPEER;
        body.rank = rank;
        body.text = text;
        request.body_case = MOK__WORKER_REQUEST__BODY_LAYER_FAIL;
        request.layer_fail = &body;
        mokd_device_send(layer->group->member[other]->device, &request, NULL, 0, MOKD_WORKER_TIMEOUT_MS, NULL, NULL, 0);
    }
}

/* Every answer but "operations are in flight" means that the worker has it no more. */
static void destroyed(void *cookie, uint32_t tag, const struct mokd_answer *answer)
{
    struct change *change = cookie;
    struct mokd_error error = { 0 };

    (void)tag;
    if (answer->code == -MOK_EBUSY) {
        change->layer->part[change->member->rank].busy = false;
        mokd_error_set(&error, answer->code, "layer = %u: %s", change->layer->id, answer->text);
    } else {
        tell_destroyed(change->layer, change->member->rank);
        mokd_rack_layer_gone(change->layer->group, change->layer->id, change->member->rank);
        mokd_layer_part_gone(change->layer, change->member);
    }
    change_end(change, &error);
}

void mokd_layer_part_gone_elsewhere(struct mokd_group *group, uint32_t id, uint32_t rank)
{
    struct mokd_layer *layer;

    TAILQ_FOREACH(layer, &group->layers, link)
        if (layer->id == id)
            break;
    if (!layer || rank >= group->size || !layer->part[rank].open || mokd_span_is_here(group, rank))
        return;
    tell_destroyed(layer, rank);
    part_gone(layer, rank);
}

void mokd_layer_destroy(struct mokd_session *session, uint64_t id, const Mok__LayerDestroy *request)
{
    struct mokd_error error = { 0 };
    struct change *change = change_begin(session, id, request->layer, false, &error);
    Mok__WorkerRequest message;
    Mok__WorkerLayerClose body;

    if (!change) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    close_message(change->layer, &message, &body);
    mokd_device_send(change->member->device, &message, NULL, 0, MOKD_WORKER_DROP_TIMEOUT_MS, destroyed, change, 0);
}
