/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One function a request: finds and checks what it names, makes what it needs, and posts the command. An object that is
 * being closed is not found any more, but keeps its id until it is gone.
 */
#include "control_internal.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>

#include "common/log.h"
#include "memory.h"
#include "names.h"
#include "validate.h"

/* ------------------------------------------------------------------ finding */

static struct worker_queue *find_queue(struct control *c, uint32_t id)
{
    struct worker_node *node = worker_index_find(&c->tables.queues, id);
    struct worker_queue *queue = node ? worker_container_of(node, struct worker_queue, control_node) : NULL;
    return queue && !queue->closing ? queue : NULL;
}

static struct worker_group *find_group(struct control *c, uint32_t id)
{
    struct worker_node *node = worker_index_find(&c->tables.groups, id);
    struct worker_group *group = node ? worker_container_of(node, struct worker_group, control_node) : NULL;
    return group && !group->closing ? group : NULL;
}

static struct worker_layer *find_layer(struct control *c, uint32_t id)
{
    struct worker_node *node = worker_index_find(&c->tables.layers, id);
    struct worker_layer *layer = node ? worker_container_of(node, struct worker_layer, control_node) : NULL;
    return layer && !layer->closing && !layer->group->closing ? layer : NULL;
}

static int no_such(struct mok_message *message, const char *what, uint32_t id)
{
    return mok_fail(message, -MOK_ENOENT, "%s: %u, no such object", what, id);
}

static int exists(struct mok_message *message, const char *what, uint32_t id)
{
    return mok_fail(message, -MOK_EEXIST, "%s: %u exists already", what, id);
}

/* ------------------------------------------------------------------ queues */

static int queue_open(struct control *c, const Mok__WorkerQueueOpen *request, struct mok_wire_fds *fds,
                      struct dispatcher_command *command)
{
    struct mok_message *message = &command->report.message;

    if (worker_index_find(&c->tables.queues, request->queue))
        return exists(message, "queue", request->queue);
    int r = objects_queue_make(request, fds, &command->queue, message);
    if (r < 0)
        return r;
    worker_index_insert(&c->tables.queues, &command->queue->control_node, request->queue);
    command->kind = COMMAND_QUEUE_OPEN;
    return 0;
}

static int queue_close(struct control *c, const Mok__WorkerQueueClose *request, struct dispatcher_command *command)
{
    command->queue = find_queue(c, request->queue);
    if (!command->queue)
        return no_such(&command->report.message, "queue", request->queue);
    command->queue->closing = true;
    command->code = request->code < 0 ? request->code : -MOK_ESESSION;
    command->kind = COMMAND_QUEUE_CLOSE;
    return 0;
}

static int share(struct control *c, const Mok__WorkerShare *request, struct dispatcher_command *command)
{
    command->queue = request->queue ? find_queue(c, request->queue) : NULL;
    if (request->queue && !command->queue)
        return no_such(&command->report.message, "queue", request->queue);
    if (request->weight < 1 || request->weight > MOK_MAX_WEIGHT)
        return mok_fail(&command->report.message, -MOK_ERANGE, "weight: %u, bound 1..%u", request->weight,
                        MOK_MAX_WEIGHT);
    command->share.uid = request->uid;
    command->share.claim = (struct worker_claim){ request->weight, request->priority };
    command->share.elsewhere_ns = request->elsewhere_ns;
    command->kind = COMMAND_SHARE;
    return 0;
}

/* ------------------------------------------------------------------ groups */

static int group_open(struct control *c, const Mok__WorkerGroupOpen *request, struct mok_wire_fds *fds,
                      struct dispatcher_command *command)
{
    struct mok_message *message = &command->report.message;

    if (worker_index_find(&c->tables.groups, request->group))
        return exists(message, "group", request->group);
    if (!request->group)
        return mok_fail(message, -MOK_EARG, "group: 0, bound at least 1");
    int r = objects_group_make(request, fds, &command->group, message);
    if (r < 0)
        return r;
    worker_index_insert(&c->tables.groups, &command->group->control_node, request->group);
    command->kind = COMMAND_GROUP_OPEN;
    return 0;
}

static int group_fail(struct control *c, const Mok__WorkerGroupFail *request, struct dispatcher_command *command)
{
    command->group = find_group(c, request->group);
    if (!command->group)
        return no_such(&command->report.message, "group", request->group);
    command->code = request->code < 0 ? request->code : -MOK_EPEER;
    command->rank = request->rank;
    command->kind = COMMAND_GROUP_FAIL;
    return 0;
}

static int group_close(struct control *c, const Mok__WorkerGroupClose *request, struct dispatcher_command *command)
{
    command->group = find_group(c, request->group);
    if (!command->group)
        return no_such(&command->report.message, "group", request->group);
    command->group->closing = true;
    command->kind = COMMAND_GROUP_CLOSE;
    return 0;
}

/* ------------------------------------------------------------------ stream slots */

static int stream_open(struct control *c, const Mok__WorkerStreamOpen *request, struct mok_wire_fds *fds,
                       struct dispatcher_command *command)
{
    command->queue = find_queue(c, request->queue);
    if (!command->queue)
        return no_such(&command->report.message, "queue", request->queue);
    command->kind = COMMAND_STREAM_OPEN;
    return objects_stream_map(&c->on, request, fds, command->queue, &command->report.message);
}

/* ------------------------------------------------------------------ buffers */

/* The group that a buffer belongs to, NULL for a private one, and the key that the buffer is found by. */
static int buffer_place(struct control *c, uint32_t group_id, uint32_t rank, uint32_t buffer,
                        struct worker_group **ret_group, uint64_t *ret_key, struct mok_message *message)
{
    struct worker_group *group = NULL;

    if (group_id) {
        group = find_group(c, group_id);
        if (!group)
            return no_such(message, "group", group_id);
        if (rank >= group->size)
            return mok_fail(message, -MOK_ERANK, "rank: %u, bound %u", rank, group->size);
    }
    *ret_group = group;
    *ret_key = worker_buffer_key(buffer, !group || rank == group->rank ? WORKER_OWN_RANK : rank);
    return 0;
}

static int buffer_map(struct control *c, const Mok__WorkerBufferMap *request, struct mok_wire_fds *fds,
                      struct dispatcher_command *command)
{
    struct mok_message *message = &command->report.message;
    struct worker_group *group;
    uint64_t key;

    int r = buffer_place(c, request->group, request->rank, request->buffer, &group, &key, message);
    if (r < 0)
        return r;
    if (worker_index_find(&c->tables.buffers, key))
        return exists(message, "buffer", request->buffer);
    r = objects_buffer_make(&c->on, request, group, fds, &command->buffer, message);
    if (r < 0)
        return r;
    worker_index_insert(&c->tables.buffers, &command->buffer->control_node, key);
    command->kind = COMMAND_BUFFER_MAP;
    return 0;
}

static int buffer_unmap(struct control *c, const Mok__WorkerBufferUnmap *request, struct dispatcher_command *command)
{
    struct mok_message *message = &command->report.message;
    struct worker_group *group;
    uint64_t key;

    int r = buffer_place(c, request->group, request->rank, request->buffer, &group, &key, message);
    if (r < 0)
        return r;
    struct worker_node *node = worker_index_find(&c->tables.buffers, key);
    struct worker_buffer *buffer = node ? worker_container_of(node, struct worker_buffer, control_node) : NULL;
    if (!buffer || buffer->closing || buffer->group != group)
        return no_such(message, "buffer", request->buffer);
    if (!group && buffer->session != request->session)
        return mok_fail(message, -MOK_EACCESS, "buffer: %u is of session %" PRIu64 ", not %" PRIu64, request->buffer,
                        buffer->session, request->session);
    buffer->closing = true;
    command->buffer = buffer;
    command->kind = COMMAND_BUFFER_UNMAP;
    return 0;
}

/* ------------------------------------------------------------------ layers */

static int layer_open(struct control *c, const Mok__WorkerLayerOpen *request, struct mok_wire_fds *fds,
                      struct dispatcher_command *command)
{
    struct mok_message *message = &command->report.message;
    struct worker_group *group = find_group(c, request->group);
    struct worker_queue *queue = find_queue(c, request->queue);

    if (!request->layer)
        return mok_fail(message, -MOK_EARG, "layer: 0, bound at least 1");
    if (worker_index_find(&c->tables.layers, request->layer))
        return exists(message, "layer", request->layer);
    if (!group)
        return no_such(message, "group", request->group);
    if (!queue)
        return no_such(message, "queue", request->queue);
    if (queue->session != group->session)
        return mok_fail(message, -MOK_EACCESS, "queue: %u is of session %" PRIu64 ", the group of %" PRIu64, queue->id,
                        queue->session, group->session);
    int r = objects_layer_make(&c->on, request, group, queue, fds, &command->layer, message);
    if (r < 0)
        return r;
    worker_index_insert(&c->tables.layers, &command->layer->control_node, request->layer);
    command->kind = COMMAND_LAYER_OPEN;
    return 0;
}

static int layer_bind(struct control *c, const Mok__WorkerLayerBind *request, struct dispatcher_command *command)
{
    struct mok_message *message = &command->report.message;

    command->layer = find_layer(c, request->layer);
    if (!command->layer)
        return no_such(message, "layer", request->layer);
    if (!request->params)
        return mok_fail(message, -MOK_EPROTO, "params: absent");
    command->kind = COMMAND_LAYER_BIND;
    return worker_validate_params(&c->tables, command->layer, request->params, command->span, message);
}

static int layer_fail(struct control *c, const Mok__WorkerLayerFail *request, struct dispatcher_command *command)
{
    command->layer = find_layer(c, request->layer);
    if (!command->layer)
        return no_such(&command->report.message, "layer", request->layer);
    command->code = request->code < 0 ? request->code : -MOK_EPEER;
    command->rank = request->rank;
    command->kind = COMMAND_LAYER_FAIL;
    return 0;
}

static int layer_close(struct control *c, const Mok__WorkerLayerClose *request, struct dispatcher_command *command)
{
    command->layer = find_layer(c, request->layer);
    if (!command->layer)
        return no_such(&command->report.message, "layer", request->layer);
    command->layer->closing = true;
    command->kind = COMMAND_LAYER_CLOSE;
    return 0;
}

/* ------------------------------------------------------------------ questions */

/* Queues in one answer: at 42 bytes each at most, two thirds of a packet. */
#define STATS_QUEUES 1000u

static int ping(struct control *c, struct dispatcher_command *command)
{
    size_t capacity = c->tables.queues.count < STATS_QUEUES ? c->tables.queues.count : STATS_QUEUES;

    command->stats.queue = calloc(capacity ? capacity : 1, sizeof(*command->stats.queue));
    if (!command->stats.queue)
        return mok_fail(&command->report.message, -MOK_ENOMEM, "ping: out of memory");
    command->stats.capacity = capacity;
    command->kind = COMMAND_STATS;
    return 0;
}

static int op_query(struct control *c, const Mok__OpQuery *request, struct dispatcher_command *command)
{
    command->queue = find_queue(c, request->queue);
    if (!command->queue)
        return no_such(&command->report.message, "queue", request->queue);
    command->query.user_data = request->user_data;
    command->kind = COMMAND_OP_QUERY;
    return 0;
}

/* ------------------------------------------------------------------ traces */

void control_release_trace(struct control *c)
{
    mok_memory_unmap(c->trace, c->trace_bytes);
    c->trace = NULL;
}

static int trace(struct control *c, const Mok__WorkerTrace *request, struct mok_wire_fds *fds,
                 struct dispatcher_command *command)
{
    struct mok_message *message = &command->report.message;
    uint64_t least = mok_trace_bytes(1);
    void *memory = NULL;

    command->kind = COMMAND_TRACE;
    if (!request->bytes)
        return 0;
    if (c->trace)
        return mok_fail(message, -MOK_EBUSY, "trace: one is under way");
    if (mok_wire_fds_expect(fds, 1) < 0)
        return mok_fail(message, -MOK_EPROTO, "descriptors: bound 1, the memory for events");
    if (request->bytes < least || request->bytes > UINT32_MAX)
        return mok_fail(message, -MOK_ESIZE, "bytes: %" PRIu64 ", bound %" PRIu64 "..%u", request->bytes, least,
                        UINT32_MAX);
    int r = mok_memory_map(fds->fd[0], request->bytes, MOK_MAP_WRITE | MOK_MAP_POPULATE, &memory);
    if (r < 0)
        return mok_fail(message, r, "trace: the memory cannot be mapped: %s", mok_error_text(r));
    c->trace = command->trace = memory;
    c->trace_bytes = request->bytes;
    c->trace->capacity = (uint32_t)((request->bytes - sizeof(struct mok_trace)) / sizeof(struct mok_trace_event));
    return 0;
}

/* ------------------------------------------------------------------ start */

/* The doorbell is read after each wake-up, which must not wait for the next one. */
static int take_bell(const Mok__WorkerStart *request, struct mok_wire_fds *fds, int *ret_bell,
                     struct mok_message *message)
{
    if (mok_wire_fds_expect(fds, request->stats_bytes ? 2 : 1) < 0)
        return mok_fail(message, -MOK_EPROTO,
                        "descriptors: bound 1, the doorbell of this worker, and the page for its numbers if any");
    if (fcntl(fds->fd[0], F_SETFL, fcntl(fds->fd[0], F_GETFL) | O_NONBLOCK) < 0)
        return mok_fail(message, -MOK_EIO, "doorbell: %m");
    *ret_bell = mok_wire_fds_take(fds, 0);
    return 0;
}

/* Where numbers go that nobody asked for: they are counted all the same, which is simpler than to ask each time. */
static int map_stats(const Mok__WorkerStart *request, const struct mok_wire_fds *fds, struct control *c,
                     struct mok_message *message)
{
    void *page = NULL;

    if (!request->stats_bytes) {
        c->stats = calloc(1, sizeof(*c->stats));
        return c->stats ? 0 : mok_fail(message, -MOK_ENOMEM, "numbers: out of memory");
    }
    if (request->stats_bytes < sizeof(*c->stats))
        return mok_fail(message, -MOK_ESIZE, "stats_bytes: %" PRIu64 ", bound at least %zu", request->stats_bytes,
                        sizeof(*c->stats));
    int r = mok_memory_map(fds->fd[1], sizeof(*c->stats), MOK_MAP_WRITE, &page);
    if (r < 0)
        return mok_fail(message, r, "numbers: the page cannot be mapped: %s", mok_error_text(r));
    c->stats = page;
    c->stats_mapped = true;
    return 0;
}

void control_release_stats(struct control *c)
{
    if (c->stats_mapped)
        mok_memory_unmap(c->stats, sizeof(*c->stats));
    else
        free(c->stats);
    c->stats = NULL;
}

static int start_threads(struct control *c, const struct dispatcher_config *config, struct mok_message *message)
{
    int r = reaper_start(&c->on, &c->reaper, message);
    if (r < 0)
        return r;
    r = dispatcher_start(config, &c->dispatcher, message);
    if (r < 0) {
        reaper_stop(c->reaper);
        reaper_free(c->reaper);
        c->reaper = NULL;
        return r;
    }
    c->on.engine = dispatcher_engine(c->dispatcher);
    c->on.dispatcher = c->dispatcher;
    return 0;
}

/* CUDA does not say when it runs without the MPS that it was told of; the price would be milliseconds an operation. */
static int check_sharing(const Mok__WorkerStart *request, const struct mok_device_limits *limits,
                         struct mok_message *message)
{
    if (request->kind != MOK_DEVICE_CUDA || (bool)request->mps == (limits->mps != 0))
        return 0;
    return mok_fail(message, -MOK_ESHARING, "sharing: CUDA runs %s MPS here, mokd's configuration says %s",
                    limits->mps ? "under" : "without", request->mps ? "mps" : "slices");
}

static int start(struct control *c, const Mok__WorkerStart *request, struct mok_wire_fds *fds,
                 struct mok_message *message)
{
    _cleanup_fd_ int bell = -1;
    struct dispatcher_config config = {
        .ops = mok_engine_find(request->kind),
        .engine = { .index = request->cuda_device,
                    .threads = request->threads,
                    .blocks = request->threads,
                    .reserve = request->reserve_sms,
                    .yield_us = request->yield_us,
                    .chaos_delay_us = request->chaos_delay_us },
        .poll_us = request->poll_us,
        .chaos_delay_us = request->chaos_delay_us,
    };

    if (c->dispatcher)
        return mok_fail(message, -MOK_ESTATE, "start: device %u has started already", request->device);
    if (!config.ops)
        return mok_fail(message, -MOK_ENOTSUP, "kind: %u (%s), this build has no such engine", request->kind,
                        mok_device_kind_text(request->kind));
    int r = take_bell(request, fds, &bell, message);
    if (r == 0 && !c->stats)
        r = map_stats(request, fds, c, message);
    if (r < 0)
        return r;
    r = config.ops->probe(&config.engine, &c->on.limits, message);
    if (r == 0)
        r = check_sharing(request, &c->on.limits, message);
    if (r < 0)
        return r;
    c->on.ops = config.ops;
    config.bell = bell;
    config.stats = c->stats;
    r = start_threads(c, &config, message);
    if (r < 0)
        return r;
    mok_take_fd(&bell);
    snprintf(c->name, sizeof(c->name), "mok-worker %.*s", MOK_MAX_NAME, request->name);
    mok_log_open(c->name, MOK_LOG_INFO);
    return 0;
}

/* ------------------------------------------------------------------ memory */

/* mokd keeps what comes of this, so that it outlives this process; whoever uses it maps it by descriptor. */
static void memory_alloc(struct control *c, uint64_t id, const Mok__WorkerMemoryAlloc *request)
{
    struct mok_message message = { "" };
    _cleanup_fd_ int memory = -1;
    uint8_t fabric[MOK_FABRIC_BYTES], *wanted = request->fabric ? fabric : NULL;

    dispatcher_quiet(c->dispatcher, true);
    int r = request->bytes ? c->on.ops->memory_alloc(c->on.engine, request->bytes, &memory, wanted, &message)
                           : mok_fail(&message, -MOK_ESIZE, "bytes: 0, bound at least 1");
    dispatcher_quiet(c->dispatcher, false);
    if (r < 0)
        control_reply(c, id, r, message.text);
    else
        control_reply_memory(c, id, memory, wanted);
}

/* ------------------------------------------------------------------ one request */

/* Fills in the command; an error is the answer, and the command is not posted. */
static int prepare(struct control *c, const Mok__WorkerRequest *request, struct mok_wire_fds *fds,
                   struct dispatcher_command *command)
{
    switch (request->body_case) {
    case MOK__WORKER_REQUEST__BODY_QUEUE_OPEN:
        return queue_open(c, request->queue_open, fds, command);
    case MOK__WORKER_REQUEST__BODY_QUEUE_CLOSE:
        return queue_close(c, request->queue_close, command);
    case MOK__WORKER_REQUEST__BODY_SHARE:
        return share(c, request->share, command);
    case MOK__WORKER_REQUEST__BODY_STREAM_OPEN:
        return stream_open(c, request->stream_open, fds, command);
    case MOK__WORKER_REQUEST__BODY_BUFFER_MAP:
        return buffer_map(c, request->buffer_map, fds, command);
    case MOK__WORKER_REQUEST__BODY_BUFFER_UNMAP:
        return buffer_unmap(c, request->buffer_unmap, command);
    case MOK__WORKER_REQUEST__BODY_GROUP_OPEN:
        return group_open(c, request->group_open, fds, command);
    case MOK__WORKER_REQUEST__BODY_GROUP_FAIL:
        return group_fail(c, request->group_fail, command);
    case MOK__WORKER_REQUEST__BODY_GROUP_CLOSE:
        return group_close(c, request->group_close, command);
    case MOK__WORKER_REQUEST__BODY_LAYER_OPEN:
        return layer_open(c, request->layer_open, fds, command);
    case MOK__WORKER_REQUEST__BODY_LAYER_BIND:
        return layer_bind(c, request->layer_bind, command);
    case MOK__WORKER_REQUEST__BODY_LAYER_CLOSE:
        return layer_close(c, request->layer_close, command);
    case MOK__WORKER_REQUEST__BODY_LAYER_FAIL:
        return layer_fail(c, request->layer_fail, command);
    case MOK__WORKER_REQUEST__BODY_PING:
        return ping(c, command);
    case MOK__WORKER_REQUEST__BODY_TRACE:
        return trace(c, request->trace, fds, command);
    case MOK__WORKER_REQUEST__BODY_OP_QUERY:
        return op_query(c, request->op_query, command);
    default:
        return mok_fail(&command->report.message, -MOK_EPROTO, "request: kind %d is not known",
                        (int)request->body_case);
    }
}

/* Whether `prepare` maps memory or opens a layer. */
static bool calls_driver(const Mok__WorkerRequest *request)
{
    return request->body_case == MOK__WORKER_REQUEST__BODY_STREAM_OPEN ||
           request->body_case == MOK__WORKER_REQUEST__BODY_BUFFER_MAP ||
           request->body_case == MOK__WORKER_REQUEST__BODY_LAYER_OPEN;
}

void control_handle(struct control *c, const Mok__WorkerRequest *request, struct mok_wire_fds *fds)
{
    struct mok_message message = { "" };

    if (request->body_case == MOK__WORKER_REQUEST__BODY_STOP) {
        control_stop(c, request->id, -MOK_EDAEMON);
        return;
    }
    if (request->body_case == MOK__WORKER_REQUEST__BODY_START) {
        int r = start(c, request->start, fds, &message);
        if (r < 0)
            control_reply(c, request->id, r, message.text);
        else
            control_reply_started(c, request->id);
        return;
    }
    if (!c->dispatcher) {
        control_reply(c, request->id, -MOK_ESTATE, "the worker has not been started");
        return;
    }
    if (request->body_case == MOK__WORKER_REQUEST__BODY_MEMORY_ALLOC) {
        memory_alloc(c, request->id, request->memory_alloc);
        return;
    }
    struct dispatcher_command *command = calloc(1, sizeof(*command));
    if (!command) {
        control_reply(c, request->id, -MOK_ENOMEM, "request: out of memory");
        return;
    }
    command->request = request->id;
    bool quiet = calls_driver(request);
    if (quiet)
        dispatcher_quiet(c->dispatcher, true);
    int r = prepare(c, request, fds, command);
    if (quiet)
        dispatcher_quiet(c->dispatcher, false);
    if (r < 0) {
        control_reply(c, request->id, r, command->report.message.text);
        free(command);
        return;
    }
    dispatcher_post(c->dispatcher, command);
}

/* ------------------------------------------------------------------ what comes back */

static void chain(struct worker_index *index, struct worker_node *node, struct worker_node **list)
{
    worker_index_remove(index, node);
    node->next = *list;
    *list = node;
}

/* What is being closed by a command of its own comes with that. */
static void collect_group(struct control *c, struct worker_group *group, struct reaper_load *load)
{
    worker_index_each(&c->tables.layers, node, next)
    {
        struct worker_layer *layer = worker_container_of(node, struct worker_layer, control_node);
        if (layer->group == group && !layer->closing)
            chain(&c->tables.layers, node, &load->layers);
    }
    worker_index_each(&c->tables.buffers, node, next)
    {
        struct worker_buffer *buffer = worker_container_of(node, struct worker_buffer, control_node);
        if (buffer->group == group && !buffer->closing)
            chain(&c->tables.buffers, node, &load->buffers);
    }
    worker_index_remove(&c->tables.groups, &group->control_node);
    load->group = group;
}

void control_collect(struct control *c, struct dispatcher_command *command)
{
    bool refused = command->report.code < 0;

    switch (command->kind) {
    case COMMAND_QUEUE_OPEN:
    case COMMAND_QUEUE_CLOSE:
        /* Closing cannot fail; what did not open goes at once. */
        if (command->kind == COMMAND_QUEUE_OPEN && !refused)
            return;
        worker_index_remove(&c->tables.queues, &command->queue->control_node);
        command->load.queue = command->queue;
        return;
    case COMMAND_BUFFER_UNMAP:
        command->buffer->closing = !refused;
        if (!refused)
            chain(&c->tables.buffers, &command->buffer->control_node, &command->load.buffers);
        return;
    case COMMAND_LAYER_CLOSE:
        command->layer->closing = !refused;
        if (!refused)
            chain(&c->tables.layers, &command->layer->control_node, &command->load.layers);
        return;
    case COMMAND_GROUP_CLOSE:
        collect_group(c, command->group, &command->load);
        return;
    case COMMAND_TRACE:
        if (!command->trace)
            control_release_trace(c);
        return;
    default:
        return;
    }
}

void control_destroy_all(struct control *c)
{
    struct reaper_load load = { 0 };

    worker_index_each(&c->tables.layers, node, next) chain(&c->tables.layers, node, &load.layers);
    worker_index_each(&c->tables.buffers, node, next) chain(&c->tables.buffers, node, &load.buffers);
    reaper_destroy(&c->on, &load);
    worker_index_each(&c->tables.queues, node, next)
        objects_queue_free(&c->on, worker_container_of(node, struct worker_queue, control_node));
    worker_index_each(&c->tables.groups, node, next)
        objects_group_free(worker_container_of(node, struct worker_group, control_node));
}
