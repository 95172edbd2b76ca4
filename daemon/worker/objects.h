/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Making and destroying what a worker holds: mapping memory, opening layers on the engine, keeping descriptors.
 * Runs on the control thread (making) and on the reaper thread (destroying), never on the dispatcher's. Objects are
 * made whole or not at all; destroying one that the dispatcher still has is a bug.
 */
#ifndef MOK_WORKER_OBJECTS_H
#define MOK_WORKER_OBJECTS_H

#include "control.pb-c.h"
#include "tables.h"
#include "util.h"
#include "wire.h"

struct dispatcher;

struct objects_engine {
    const struct mok_engine_ops *ops;
    struct mok_engine *engine;
    struct mok_device_limits limits;
    struct dispatcher *dispatcher;
};

/* Each takes the descriptors it needs out of `fds`. 0, or -MOK_E* and the sentence. */
int objects_queue_make(const Mok__WorkerQueueOpen *request, struct mok_wire_fds *fds, struct worker_queue **ret,
                       struct mok_message *message);
/* Maps the slots by which streams hand over to the queue. */
int objects_stream_map(const struct objects_engine *on, const Mok__WorkerStreamOpen *request, struct mok_wire_fds *fds,
                       struct worker_queue *queue, struct mok_message *message);
int objects_group_make(const Mok__WorkerGroupOpen *request, struct mok_wire_fds *fds, struct worker_group **ret,
                       struct mok_message *message);
/* `group`: NULL for a private buffer. */
int objects_buffer_make(const struct objects_engine *on, const Mok__WorkerBufferMap *request,
                        struct worker_group *group, struct mok_wire_fds *fds, struct worker_buffer **ret,
                        struct mok_message *message);
int objects_layer_make(const struct objects_engine *on, const Mok__WorkerLayerOpen *request, struct worker_group *group,
                       struct worker_queue *queue, struct mok_wire_fds *fds, struct worker_layer **ret,
                       struct mok_message *message);

/* All accept NULL and half-made objects. */
void objects_queue_free(const struct objects_engine *on, struct worker_queue *queue);
void objects_group_free(struct worker_group *group);
void objects_buffer_free(const struct objects_engine *on, struct worker_buffer *buffer);
void objects_layer_free(const struct objects_engine *on, struct worker_layer *layer);

#endif
