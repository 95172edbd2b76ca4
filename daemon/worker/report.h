/* SPDX-License-Identifier: Apache-2.0 */
/* What one thread of the worker tells another, and the box that it lies in until that one looks. */
#ifndef MOK_WORKER_REPORT_H
#define MOK_WORKER_REPORT_H

#include <pthread.h>
#include <stdint.h>

#include "layer.h"

enum worker_report_kind {
    WORKER_REPORT_COMMAND = 0, /* head of a struct dispatcher_command, on its way there or back */
    WORKER_REPORT_QUEUE_BROKEN,
    WORKER_REPORT_GROUP_BROKEN,
};

struct worker_report {
    enum worker_report_kind kind;
    uint32_t id;   /* of the queue or group */
    uint32_t rank; /* group: who is at fault */
    int code;
    struct mok_message message;
    struct worker_report *next;
};

/* First in, first out; never full, since what lies in it is its sender's memory. */
struct worker_mailbox {
    pthread_mutex_t lock;
    struct worker_report *first, *last;
};

void worker_mailbox_init(struct worker_mailbox *box);
void worker_mailbox_destroy(struct worker_mailbox *box);
void worker_mailbox_put(struct worker_mailbox *box, struct worker_report *report);
/* Everything, oldest first, by `next`; NULL: empty. */
struct worker_report *worker_mailbox_take_all(struct worker_mailbox *box);

/* Eventfds, all non-blocking: a full counter is rung already, an empty one is silent. */
void worker_ring(int eventfd);
void worker_silence(int eventfd);

#endif
