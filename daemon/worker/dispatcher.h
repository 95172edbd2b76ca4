/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dispatcher thread of a worker, as the control thread sees it: commands go in, answers and reports come out.
 * The dispatcher never blocks on a peer, a client or the control thread, and never allocates while it works.
 */
#ifndef MOK_WORKER_DISPATCHER_H
#define MOK_WORKER_DISPATCHER_H

#include "control.pb-c.h"
#include "tables.h"

struct dispatcher;

struct dispatcher_config {
    const struct mok_engine_ops *ops;
    struct mok_engine_config engine; /* notify and cookie are the dispatcher's to fill in */
    uint64_t poll_us;                /* how long it looks before it sleeps */
    uint32_t chaos_delay_us;
    int bell; /* eventfd that rings this worker; taken over on success */
    struct mok_stats *stats; /* writable, until the dispatcher is freed */
};

enum dispatcher_command_kind {
    COMMAND_QUEUE_OPEN = 1,
    COMMAND_QUEUE_CLOSE, /* answered once nothing of it runs */
    COMMAND_STREAM_OPEN,
    COMMAND_BUFFER_MAP,
    COMMAND_BUFFER_UNMAP, /* -MOK_EBUSY while in use by what can still run, else answered once nobody looks */
    COMMAND_GROUP_OPEN,
    COMMAND_GROUP_FAIL,
    COMMAND_GROUP_CLOSE, /* takes the group's layers and buffers with it; answered once nothing of it runs */
    COMMAND_LAYER_OPEN,
    COMMAND_LAYER_BIND,  /* -MOK_EBUSY while operations are in flight */
    COMMAND_LAYER_FAIL,  /* a rank has destroyed its part: operations that need it end with `code` */
    COMMAND_LAYER_CLOSE, /* as LAYER_BIND; but once layer or group is broken it is answered when nothing of it runs */
    COMMAND_SHARE,       /* what a user may claim from now on */
    COMMAND_STATS,
    COMMAND_TRACE, /* into `trace` from now on, NULL: nowhere; the one before is let go of by the answer */
    COMMAND_OP_QUERY,
    COMMAND_STOP, /* completes all that is owed with `code`, closes the rings, ends the thread */
};

/* Made and freed by the control thread; the dispatcher's between post and answer. */
struct dispatcher_command {
    struct worker_report report; /* code and message: the answer */
    enum dispatcher_command_kind kind;
    uint64_t request; /* the caller's, to find its way back */
    struct worker_queue *queue;
    struct worker_buffer *buffer;
    struct worker_group *group;
    struct worker_layer *layer;
    struct mok_trace *trace;
    int code; /* what GROUP_FAIL, LAYER_FAIL, QUEUE_CLOSE and STOP tell the clients */
    uint32_t rank;
    struct worker_span span[WORKER_PARAM_COUNT]; /* LAYER_BIND */
    struct {
        uint64_t ops_done, device_ns, errors;
        struct dispatcher_queue_stats {
            uint32_t queue;
            uint64_t ops_done, device_ns, rows;
        } * queue;
        size_t capacity, count;
    } stats;
    struct {
        uint32_t uid;
        struct worker_claim claim;
        uint64_t elsewhere_ns;
    } share;
    struct {
        uint64_t user_data;
        uint32_t state; /* enum mok_op_state */
        uint32_t missing[MOK_MAX_EP];
        uint32_t missing_count;
    } query;
    struct dispatcher_command *next_parked;
    struct reaper_load {
        struct worker_queue *queue;
        struct worker_group *group;
        struct worker_node *buffers, *layers; /* by control_node */
    } load;                                   /* what to destroy before the answer goes out: see reaper.h */
};

/* Opens the engine and starts the thread. 0, or -MOK_E* and the sentence. */
int dispatcher_start(const struct dispatcher_config *config, struct dispatcher **ret, struct mok_message *message);
/* Waits for the thread to end, which COMMAND_STOP makes it do. */
void dispatcher_join(struct dispatcher *dispatcher);
/* Closes the engine. NULL is fine. */
void dispatcher_free(struct dispatcher *dispatcher);

void dispatcher_post(struct dispatcher *dispatcher, struct dispatcher_command *command);
/* Readable when there are reports: answers to commands, and what happened by itself, in order. */
int dispatcher_fd(const struct dispatcher *dispatcher);
/* All reports so far, oldest first, by `next`; NULL: none. */
struct worker_report *dispatcher_reports(struct dispatcher *dispatcher);

/*
 * From true to false the device waits for no client's stream, which could hold up calls to its driver for as long; by
 * any other thread, nested too. True waits for an end of that, a moment.
 */
void dispatcher_quiet(struct dispatcher *dispatcher, bool quiet);

/* For mapping memory and opening layers, which the control thread does itself. */
struct mok_engine *dispatcher_engine(const struct dispatcher *dispatcher);

#endif
