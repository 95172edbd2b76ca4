/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a worker holds: queues, groups, buffers, layers, and the operations in flight, found by id.
 *
 * Two threads know these objects. The control thread makes and destroys them and owns the fields under `identity`,
 * which do not change while the dispatcher thread has the object; everything under `dispatcher` is that thread's alone
 * from the moment the object was posted to it until it hands it back. Each thread has an index of its own.
 */
#ifndef MOK_WORKER_TABLES_H
#define MOK_WORKER_TABLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "board.h"
#include "dispatch.h"
#include "engine.h"
#include "fairness.h"
#include "mok/ring_abi.h"
#include "queue.h"
#include "report.h"
#include "stats.h"
#include "trace_events.h"

#define worker_container_of(pointer, type, member) ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

/* ------------------------------------------------------------------ index by a 64-bit key */

#define WORKER_INDEX_BUCKETS 512

struct worker_node {
    uint64_t key;
    struct worker_node *next;
};

struct worker_index {
    struct worker_node *bucket[WORKER_INDEX_BUCKETS];
    size_t count;
};

struct worker_node *worker_index_find(const struct worker_index *index, uint64_t key);
void worker_index_insert(struct worker_index *index, struct worker_node *node, uint64_t key);
void worker_index_remove(struct worker_index *index, struct worker_node *node);
/* Any order; NULL starts and ends. A node that was removed must not be passed in. */
struct worker_node *worker_index_next(const struct worker_index *index, const struct worker_node *node);

/* The one walk that may remove the entry it looks at. */
#define worker_index_each(index, node, following)                                                                      \
    for (struct worker_node *node = worker_index_next(index, NULL),                                                    \
                            *following = node ? worker_index_next(index, node) : NULL;                                 \
         node; node = following, following = node ? worker_index_next(index, node) : NULL)

/* One index a kind of object, one table a thread. */
struct worker_tables {
    struct worker_index queues, groups, layers;
    struct worker_index buffers; /* see worker_buffer_key */
};

/* ------------------------------------------------------------------ objects */

#define WORKER_OWN_RANK 0xffffffffu

/* Own memory, private or this rank's copy, is found by the buffer's id alone; a peer's copy by id and rank. */
static inline uint64_t worker_buffer_key(uint32_t buffer, uint32_t rank)
{
    return (uint64_t)rank << 32 | buffer;
}

struct worker_group {
    struct worker_node control_node, dispatch_node;
    /* identity */
    uint32_t id, size, rank;
    uint64_t session;
    int *bell; /* [size], eventfds of the workers of all ranks; all -1 where ranks are on several hosts */
    bool closing;
    /* dispatcher */
    int code; /* 0, or -MOK_E*: broken, nothing of it runs any more */
    uint32_t fault_rank;
    bool closed; /* its buffers take no new user */
    struct worker_report broken;
};

struct worker_buffer {
    struct worker_node control_node, dispatch_node;
    /* identity */
    uint32_t id, rank;
    bool own;                   /* of this worker's session: private, or this rank's copy */
    uint64_t session;           /* own only */
    struct worker_group *group; /* NULL: private */
    uint64_t bytes;
    void *address;
    bool closing;
    /* dispatcher */
    uint32_t pins; /* operations, running phases and bindings that hold the address */
};

/* A user's claim to the device; weight 0: none is said. */
struct worker_claim {
    uint32_t weight, priority;
};

struct worker_queue {
    struct worker_node control_node, dispatch_node;
    /* identity */
    uint32_t id, uid;
    uint32_t weight;           /* of the session */
    struct worker_claim claim; /* of its user */
    uint64_t session;
    int doorbell;
    bool closing;
    struct worker_op *ops;        /* [cq_entries], by slot of the in-flight table */
    struct fair_user *spare_user; /* for fair_join; NULL once that took it */
    struct mok_stream_slot *stream_memory; /* [cq_entries]; NULL: no operation of it is on a stream */
    uint64_t stream_bytes;
    bool gated; /* the device can wait for words in it */
    /* dispatcher */
    struct mok_stream_slot *stream; /* as stream_memory, once that was told */
    struct mok_queue_worker ring;
    struct fair_session share;
    struct worker_op *first, *last; /* in flight, oldest first */
    uint32_t last_layer, last_kind; /* of the operation that was taken last */
    uint64_t ops_done, device_ns, rows;
    struct mok_stats_queue *stats; /* NULL: there are too many queues to count it apart */
    bool open;                   /* false once broken or closed: nothing is taken or completed any more */
    struct fair_user *left_user; /* account of a user whose last queue this was */
    struct worker_report broken;
    struct worker_queue *next;
};

/* The memory that a bound parameter or a region comes to; address NULL: absent. */
struct worker_span {
    struct worker_buffer *buffer;
    uint64_t offset, bytes; /* what is really used */
    void *address;
};

enum worker_param {
    WORKER_PARAM_GATE = 0,
    WORKER_PARAM_UP,
    WORKER_PARAM_DOWN,
    WORKER_PARAM_GATE_SCALE,
    WORKER_PARAM_UP_SCALE,
    WORKER_PARAM_DOWN_SCALE,
    WORKER_PARAM_SHARED_GATE,
    WORKER_PARAM_SHARED_UP,
    WORKER_PARAM_SHARED_DOWN,
    WORKER_PARAM_GATE_TRANSPOSED,
    WORKER_PARAM_UP_TRANSPOSED,
    WORKER_PARAM_DOWN_TRANSPOSED,
    WORKER_PARAM_FIRST_GRADIENT,
    WORKER_PARAM_D_GATE = WORKER_PARAM_FIRST_GRADIENT,
    WORKER_PARAM_D_UP,
    WORKER_PARAM_D_DOWN,
    WORKER_PARAM_D_SHARED_GATE,
    WORKER_PARAM_D_SHARED_UP,
    WORKER_PARAM_D_SHARED_DOWN,
    WORKER_PARAM_COUNT,
};

/* Flags in device memory of rank 0 (board.h); the dispatcher's but for its making and end. */
struct worker_board {
    struct mok_board state;
    const struct mok_engine_ops *ops;
    void *memory; /* mapped */
    struct mok_engine_board *engine;
    bool looking;
    int lost; /* -MOK_E*: copies fail */
    uint64_t waiting_since_ns; /* 0: nothing is waited for */
};

/* What a layer's last operation of a kind was, and which one its client submitted behind it. */
struct worker_habit {
    struct mok_op_args args; /* `peer` NULL */
    struct mok_peer peer;
    uint64_t epoch;      /* the dispatcher's, when the addresses were seen: older ones may be nobody's */
    uint32_t next_layer; /* by id: it may be gone */
    uint32_t next_kind;  /* enum mok_op_kind */
    bool sure;           /* the same has come twice, with the same arguments */
};

struct worker_layer {
    struct worker_node control_node, dispatch_node;
    /* identity */
    uint32_t id;
    uint64_t session;
    struct worker_group *group;
    struct mok_plan plan;
    void *flags;      /* [ep] of MOK_FLAGS_BYTES each; NULL: on a board */
    struct worker_board *board; /* NULL: in host memory */
    void **workspace; /* [ep], mapped symmetric workspaces in rank order */
    void *private_memory;
    struct mok_engine_layer *engine_layer;
    struct mok_dispatch_view view;
    struct mok_peer *peer;           /* [ep], of the operation in MAIN */
    struct worker_buffer **peer_pin; /* [2 * ep], copies that the operation in MAIN reads */
    bool closing;
    /* dispatcher */
    struct worker_queue *queue; /* NULL once that is closed */
    struct worker_span param[WORKER_PARAM_COUNT];
    uint64_t seq;
    struct worker_op *first, *last;   /* operations, in the order in which they run */
    struct mok_dispatch_op withdrawn; /* completed by a cancel, but the ranks are not done with its number */
    bool draining;                    /* `withdrawn` comes before `first` */
    int code;                         /* 0, or -MOK_E*: a rank has destroyed its part, nothing of it runs any more */
    uint32_t fault_rank;              /* with code */
    enum mok_dispatch_action action;  /* what the first operation waits to get from the engine, or WAIT */
    uint64_t runnable_order, runnable_ns;
    struct mok_stats_layer *stats; /* NULL: there are too many layers to count it apart */
    struct mok_op_args args;
    struct worker_habit habit[MOK_KIND_BACKWARD + 1];
    uint32_t peer_pins;
    struct worker_layer *active_previous, *active_next; /* layers that have operations */
    bool active;
};

struct worker_op {
    struct worker_queue *queue;
    struct worker_layer *layer;
    uint64_t user_data;
    uint64_t timeout_ns;
    uint32_t slot; /* in the in-flight table */
    uint32_t tokens, flags;
    uint8_t opcode, context_mode;
    bool on_stream;         /* the slot's words are how its client's stream and we hand over */
    bool awaited;           /* its stream has not brought the inputs yet */
    bool kept_back;         /* cannot be started ahead */
    uint32_t stream_slot, stream_number;
    bool begun;     /* has its sequence number */
    bool cancelled; /* before it was ready; it is withdrawn once it is */
    int dying_code; /* completes with this once the engine has let go of it; never runs again */
    uint64_t device_ns;
    uint64_t taken_ns, waits_ns; /* when it was taken; since when it waits for its peers */
    struct worker_span region[MOK_REGION_COUNT];
    struct mok_dispatch_op dispatch;
    struct worker_op *layer_next;
    struct worker_op *queue_previous, *queue_next;
};

/* Why nothing of a layer runs any more: 0, or -MOK_E* and the rank at fault. The group's reason is the stronger one. */
static inline int worker_layer_failure(const struct worker_layer *layer, uint32_t *ret_rank)
{
    *ret_rank = layer->group->code ? layer->group->fault_rank : layer->fault_rank;
    return layer->group->code ? layer->group->code : layer->code;
}

static inline bool worker_layer_is_over(const struct worker_layer *layer)
{
    return layer->group->code || layer->code;
}

#endif
