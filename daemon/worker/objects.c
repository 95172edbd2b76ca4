/* SPDX-License-Identifier: Apache-2.0 */
/* Making and destroying what a worker holds: see objects.h. */
#include "objects.h"

#include <inttypes.h>
#include <stdio.h>

#include "common/layer_spec.h"
#include "common/log.h"
#include "flags_board.h"
#include "memory.h"
#include "names.h"

static int expect_fds(struct mok_wire_fds *fds, size_t count, struct mok_message *message)
{
    size_t came = fds->count;

    if (mok_wire_fds_expect(fds, count) < 0)
        return mok_fail(message, -MOK_EPROTO, "descriptors: %zu came, bound %zu", came, count);
    return 0;
}

/* Device memory: of this host by the descriptor, of another one by its fabric handle. */
static int map_memory(const struct objects_engine *on, int fd, const ProtobufCBinaryData *fabric, uint64_t bytes,
                      void **ret, struct mok_message *message)
{
    if (!fabric->len)
        return on->ops->memory_map(on->engine, fd, bytes, ret, message);
    if (fabric->len != MOK_FABRIC_BYTES)
        return mok_fail(message, -MOK_EPROTO, "fabric: a handle of %zu bytes, bound %u", fabric->len, MOK_FABRIC_BYTES);
    if (!on->ops->fabric_map)
        return mok_fail(message, -MOK_ENOTSUP, "fabric: this device maps no memory by fabric handles");
    return on->ops->fabric_map(on->engine, fabric->data, bytes, ret, message);
}

/* ------------------------------------------------------------------ queues */

static int queue_map(const Mok__WorkerQueueOpen *request, struct mok_wire_fds *fds, struct worker_queue *queue,
                     struct mok_message *message)
{
    int r = mok_queue_worker_open(fds->fd[0], fds->fd[1], fds->fd[2], &queue->ring);
    if (r < 0)
        return mok_fail(message, r, "queue %u: cannot be mapped: %s", queue->id, mok_error_text(r));
    const struct mok_queue_layout *layout = &queue->ring.layout;
    if (request->control_bytes != layout->control_bytes || request->submit_bytes != layout->submit_bytes ||
        request->inflight_bytes != layout->inflight_bytes)
        return mok_fail(message, -MOK_ESIZE,
                        "queue %u: sizes %" PRIu64 ", %" PRIu64 ", %" PRIu64 ", bound %" PRIu64 ", %" PRIu64
                        ", %" PRIu64,
                        queue->id, request->control_bytes, request->submit_bytes, request->inflight_bytes,
                        layout->control_bytes, layout->submit_bytes, layout->inflight_bytes);
    queue->ops = calloc(layout->cq_entries, sizeof(*queue->ops));
    queue->spare_user = calloc(1, sizeof(*queue->spare_user));
    if (!queue->ops || !queue->spare_user)
        return mok_fail(message, -MOK_ENOMEM, "queue %u: out of memory", queue->id);
    queue->doorbell = mok_wire_fds_take(fds, 3);
    return 0;
}

int objects_queue_make(const Mok__WorkerQueueOpen *request, struct mok_wire_fds *fds, struct worker_queue **ret,
                       struct mok_message *message)
{
    int r = expect_fds(fds, 4, message);
    if (r < 0)
        return r;
    struct worker_queue *queue = calloc(1, sizeof(*queue));
    if (!queue)
        return mok_fail(message, -MOK_ENOMEM, "queue %u: out of memory", request->queue);
    queue->id = request->queue;
    queue->uid = request->uid;
    queue->weight = request->weight;
    if (request->share)
        queue->claim = (struct worker_claim){ request->share->weight, request->share->priority };
    queue->session = request->session;
    queue->doorbell = -1;
    r = queue_map(request, fds, queue, message);
    if (r < 0) {
        objects_queue_free(NULL, queue);
        return r;
    }
    *ret = queue;
    return 0;
}

int objects_stream_map(const struct objects_engine *on, const Mok__WorkerStreamOpen *request, struct mok_wire_fds *fds,
                       struct worker_queue *queue, struct mok_message *message)
{
    uint64_t needed = queue->ring.layout.cq_entries * sizeof(struct mok_stream_slot);
    void *memory;

    int r = expect_fds(fds, 1, message);
    if (r < 0)
        return r;
    if (queue->stream_memory)
        return mok_fail(message, -MOK_EEXIST, "queue %u: has its stream slots already", queue->id);
    if (request->bytes < needed)
        return mok_fail(message, -MOK_ESIZE, "queue %u: stream slots: %" PRIu64 " bytes, bound %" PRIu64, queue->id,
                        request->bytes, needed);
    r = mok_memory_map(fds->fd[0], request->bytes, MOK_MAP_WRITE | MOK_MAP_POPULATE, &memory);
    if (r < 0)
        return mok_fail(message, r, "queue %u: stream slots: cannot be mapped: %s", queue->id, mok_error_text(r));
    queue->stream_memory = memory;
    queue->stream_bytes = request->bytes;
    if (on->ops->gate_map) {
        struct mok_message why;
        queue->gated = on->ops->gate_map(on->engine, memory, request->bytes, &why) == 0;
        if (!queue->gated)
            mok_log(MOK_LOG_WARNING, "queue", "the CPU starts its operations", "queue=%u error=\"%s\"", queue->id,
                    why.text);
    }
    return 0;
}

void objects_queue_free(const struct objects_engine *on, struct worker_queue *queue)
{
    if (!queue)
        return;
    if (queue->gated)
        on->ops->gate_unmap(on->engine, queue->stream_memory);
    mok_memory_unmap(queue->stream_memory, queue->stream_bytes);
    mok_queue_worker_release(&queue->ring);
    mok_close(queue->doorbell);
    free(queue->ops);
    free(queue->spare_user);
    free(queue->left_user);
    free(queue);
}

/* ------------------------------------------------------------------ groups */

int objects_group_make(const Mok__WorkerGroupOpen *request, struct mok_wire_fds *fds, struct worker_group **ret,
                       struct mok_message *message)
{
    if (request->size < 1 || request->size > MOK_MAX_EP)
        return mok_fail(message, -MOK_ERANGE, "size: %u, bound %u", request->size, MOK_MAX_EP);
    if (request->rank >= request->size)
        return mok_fail(message, -MOK_ERANK, "rank: %u, bound %u", request->rank, request->size);
    int r = expect_fds(fds, request->across ? 0 : request->size, message);
    if (r < 0)
        return r;
    struct worker_group *group = calloc(1, sizeof(*group));
    if (group)
        group->bell = calloc(request->size, sizeof(*group->bell));
    if (!group || !group->bell) {
        free(group);
        return mok_fail(message, -MOK_ENOMEM, "group %u: out of memory", request->group);
    }
    group->id = request->group;
    group->size = request->size;
    group->rank = request->rank;
    group->session = request->session;
    for (uint32_t i = 0; i < group->size; i++) /* nobody rings himself */
        group->bell[i] = i == group->rank || request->across ? -1 : mok_wire_fds_take(fds, i);
    *ret = group;
    return 0;
}

void objects_group_free(struct worker_group *group)
{
    if (!group)
        return;
    for (uint32_t i = 0; i < group->size; i++)
        mok_close(group->bell[i]);
    free(group->bell);
    free(group);
}

/* ------------------------------------------------------------------ buffers */

int objects_buffer_make(const struct objects_engine *on, const Mok__WorkerBufferMap *request,
                        struct worker_group *group, struct mok_wire_fds *fds, struct worker_buffer **ret,
                        struct mok_message *message)
{
    if (!request->buffer || !request->bytes)
        return mok_fail(message, -MOK_EARG, "buffer: %u of %" PRIu64 " bytes, bound at least 1", request->buffer,
                        request->bytes);
    int r = expect_fds(fds, request->fabric.len ? 0 : 1, message);
    if (r < 0)
        return r;
    struct worker_buffer *buffer = calloc(1, sizeof(*buffer));
    if (!buffer)
        return mok_fail(message, -MOK_ENOMEM, "buffer %u: out of memory", request->buffer);
    r = map_memory(on, request->fabric.len ? -1 : fds->fd[0], &request->fabric, request->bytes, &buffer->address,
                   message);
    if (r < 0) {
        free(buffer);
        return r;
    }
    buffer->id = request->buffer;
    buffer->rank = group ? request->rank : 0;
    buffer->own = !group || request->rank == group->rank;
    buffer->session = group ? group->session : request->session;
    buffer->group = group;
    buffer->bytes = request->bytes;
    *ret = buffer;
    return 0;
}

void objects_buffer_free(const struct objects_engine *on, struct worker_buffer *buffer)
{
    if (!buffer)
        return;
    if (buffer->address)
        on->ops->memory_unmap(on->engine, buffer->address, buffer->bytes);
    free(buffer);
}

/* ------------------------------------------------------------------ layers */

/* mokd allocated by its own plan; the two must not differ by a byte. */
static int check_memory(const struct mok_plan *plan, const Mok__LayerMemory *memory, struct mok_message *message)
{
    if (!memory)
        return mok_fail(message, -MOK_EPROTO, "memory: absent");
    if (memory->symmetric_bytes != plan->symmetric_bytes)
        return mok_fail(message, -MOK_ESIZE, "symmetric_bytes: %" PRIu64 ", bound %" PRIu64, memory->symmetric_bytes,
                        plan->symmetric_bytes);
    if (memory->private_bytes != plan->private_bytes)
        return mok_fail(message, -MOK_ESIZE, "private_bytes: %" PRIu64 ", bound %" PRIu64, memory->private_bytes,
                        plan->private_bytes);
    return 0;
}

static int layer_plan(const struct objects_engine *on, const Mok__WorkerLayerOpen *request, struct worker_layer *layer,
                      struct mok_message *message)
{
    if (!request->spec)
        return mok_fail(message, -MOK_EPROTO, "spec: absent");
    struct mok_layer_spec spec = mok_layer_spec_read(request->spec, layer->group->size, layer->group->rank);
    int r = mok_plan_make(&spec, &on->limits, &layer->plan, NULL, 0, message);
    return r < 0 ? r : check_memory(&layer->plan, request->memory, message);
}

/* Host memory that all ranks map. */
static int map_flags(struct worker_layer *layer, int fd, struct mok_message *message)
{
    uint32_t ep = layer->group->size;

    int r = mok_memory_map(fd, (uint64_t)ep * MOK_FLAGS_BYTES, MOK_MAP_WRITE, &layer->flags);
    if (r < 0)
        return mok_fail(message, r, "layer %u: flags: cannot be mapped: %s", layer->id, mok_error_text(r));
    layer->view.ep = ep;
    layer->view.rank = layer->group->rank;
    for (uint32_t rank = 0; rank < ep; rank++)
        layer->view.flags[rank] = (void *)((char *)layer->flags + (uint64_t)rank * MOK_FLAGS_BYTES);
    return 0;
}

/* Device memory of rank 0. */
static int map_board(const struct objects_engine *on, const Mok__WorkerLayerOpen *request, int fd,
                     struct worker_layer *layer, struct mok_message *message)
{
    uint32_t ep = layer->group->size;

    if (!on->ops->board_open)
        return mok_fail(message, -MOK_ENOTSUP, "layer %u: flags: this device knows no board", layer->id);
    layer->board = calloc(1, sizeof(*layer->board));
    if (!layer->board)
        return mok_fail(message, -MOK_ENOMEM, "layer %u: out of memory", layer->id);
    board_begin(layer->board, on->ops, layer);
    int r = map_memory(on, fd, &request->board_fabric, mok_board_bytes(ep), &layer->board->memory, message);
    return r < 0 ? r : on->ops->board_open(on->engine, layer->board->memory, ep, &layer->board->engine, message);
}

static void free_board(const struct objects_engine *on, struct worker_board *board)
{
    if (!board)
        return;
    if (board->engine)
        on->ops->board_close(board->engine);
    if (board->memory)
        on->ops->memory_unmap(on->engine, board->memory, mok_board_bytes(board->state.ep));
    free(board);
}

/* NULL: its workspace comes by descriptor. */
static const ProtobufCBinaryData *fabric_of(const Mok__WorkerLayerOpen *request, uint32_t rank)
{
    for (size_t i = 0; i < request->n_fabric; i++)
        if (request->fabric[i]->rank == rank)
            return &request->fabric[i]->handle;
    return NULL;
}

/* Flags, workspaces of all ranks in their order, the private one; what has a fabric handle has no descriptor. */
static size_t count_fds(const Mok__WorkerLayerOpen *request, uint32_t ep)
{
    size_t count = request->board_fabric.len ? 1 : 2;

    for (uint32_t rank = 0; rank < ep; rank++)
        count += !fabric_of(request, rank);
    return count;
}

static int layer_map(const struct objects_engine *on, const Mok__WorkerLayerOpen *request,
                     const struct mok_wire_fds *fds, struct worker_layer *layer, struct mok_message *message)
{
    static const ProtobufCBinaryData none;
    uint32_t ep = layer->group->size;
    size_t next = 0;

    layer->workspace = calloc(ep, sizeof(*layer->workspace));
    layer->peer = calloc(ep, sizeof(*layer->peer));
    layer->peer_pin = calloc(2 * (size_t)ep, sizeof(*layer->peer_pin));
    if (!layer->workspace || !layer->peer || !layer->peer_pin)
        return mok_fail(message, -MOK_ENOMEM, "layer %u: out of memory", layer->id);
    int flags = request->board_fabric.len ? -1 : fds->fd[next++];
    int r = request->board ? map_board(on, request, flags, layer, message) : map_flags(layer, flags, message);
    for (uint32_t rank = 0; r >= 0 && rank < ep; rank++) {
        const ProtobufCBinaryData *fabric = fabric_of(request, rank);
        r = map_memory(on, fabric ? -1 : fds->fd[next], fabric ? fabric : &none, layer->plan.symmetric_bytes,
                       &layer->workspace[rank], message);
        next += !fabric;
    }
    if (r < 0 || !layer->plan.private_bytes)
        return r;
    return on->ops->memory_map(on->engine, fds->fd[next], layer->plan.private_bytes, &layer->private_memory, message);
}

int objects_layer_make(const struct objects_engine *on, const Mok__WorkerLayerOpen *request, struct worker_group *group,
                       struct worker_queue *queue, struct mok_wire_fds *fds, struct worker_layer **ret,
                       struct mok_message *message)
{
    int r = expect_fds(fds, count_fds(request, group->size), message);
    if (r < 0)
        return r;
    if (request->board_fabric.len && !request->board)
        return mok_fail(message, -MOK_EPROTO, "board_fabric: the layer's flags lie on no board");
    struct worker_layer *layer = calloc(1, sizeof(*layer));
    if (!layer)
        return mok_fail(message, -MOK_ENOMEM, "layer %u: out of memory", request->layer);
    layer->id = request->layer;
    layer->session = group->session;
    layer->group = group;
    layer->queue = queue;
    r = layer_plan(on, request, layer, message);
    if (r >= 0)
        r = layer_map(on, request, fds, layer, message);
    if (r >= 0)
        r = on->ops->layer_open(on->engine, &layer->plan, layer->workspace, layer->private_memory, &layer->engine_layer,
                                message);
    if (r < 0) {
        objects_layer_free(on, layer);
        return r;
    }
    *ret = layer;
    return 0;
}

void objects_layer_free(const struct objects_engine *on, struct worker_layer *layer)
{
    if (!layer)
        return;
    if (layer->engine_layer)
        on->ops->layer_close(layer->engine_layer);
    if (layer->flags)
        mok_memory_unmap(layer->flags, (uint64_t)layer->group->size * MOK_FLAGS_BYTES);
    free_board(on, layer->board);
    for (uint32_t rank = 0; layer->workspace && rank < layer->group->size; rank++)
        if (layer->workspace[rank])
            on->ops->memory_unmap(on->engine, layer->workspace[rank], layer->plan.symmetric_bytes);
    if (layer->private_memory)
        on->ops->memory_unmap(on->engine, layer->private_memory, layer->plan.private_bytes);
    free(layer->workspace);
    free(layer->peer);
    free(layer->peer_pin);
    free(layer);
}
