/* SPDX-License-Identifier: Apache-2.0 */
/* Shared-memory queues: made and recovered here, served by the worker. One a session and device. */
#ifndef MOKD_CLIENT_QUEUE_H
#define MOKD_CLIENT_QUEUE_H

#include "device.h"
#include "queue.h"
#include "session.h"

struct mokd_queue {
    TAILQ_ENTRY(mokd_queue) link, device_link;
    struct mokd_session *session;
    struct mokd_device *device;
    uint32_t id;
    struct mok_queue ring;
    bool open;    /* the worker serves it and the client has it */
    bool closing; /* the worker has been told to let go */
    uint64_t bytes; /* charged to the user */
    struct {
        int fd;         /* kept, for who asks again because the answer did not reach him; -1: there are none */
        uint64_t bytes; /* charged too */
        bool open;      /* the worker has them */
    } stream; /* slots */
    struct mokd_usage_row *usage;
    uint64_t ops_done;
    struct {
        uint64_t ops, errors, rows, device_ns;
    } counted; /* what its worker had counted when it was looked at last: job_totals.c */
    uint32_t in_flight; /* the same */
    struct mokd_call call;       /* the QueueOpen under way */
    struct mokd_call close_call; /* the QueueClose under way */
};

void mokd_queue_open(struct mokd_session *session, uint64_t id, const Mok__QueueOpen *request);
void mokd_queue_close(struct mokd_session *session, uint64_t id, const Mok__QueueClose *request);
void mokd_stream_open(struct mokd_session *session, uint64_t id, const Mok__StreamOpen *request);
void mokd_op_query(struct mokd_session *session, uint64_t id, const Mok__OpQuery *request);

/* The open queue of a session on a device, or NULL. */
struct mokd_queue *mokd_queue_of(const struct mokd_session *session, const struct mokd_device *device);

/* Lets the workers drop every queue of an ending session; clients see `code`. */
void mokd_queues_close(struct mokd_session *session, int code);

/* The worker of a device is dead: what its queues owed completes with MOK_EWORKER, and they end. */
void mokd_queues_recover(struct mokd_device *device);

/* What a worker says about a queue. */
void mokd_queue_broken(struct mokd_device *device, uint32_t queue, int code, const char *text);
void mokd_queue_take_stats(struct mokd_device *device, const Mok__WorkerQueueStats *stats);

#endif
