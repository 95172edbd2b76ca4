/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each user's jobs have used since mokd started, by user and job name, for metrics: totals that never fall while
 * they are shown. Bounded: a user who makes up names shares one entry from some number on, and so do users.
 */
#ifndef MOKD_JOB_TOTALS_H
#define MOKD_JOB_TOTALS_H

#include <stdint.h>
#include <sys/queue.h>
#include <sys/types.h>

#include "control.pb-c.h"
#include "mok/types.h"

struct mokd_queue;
struct mokd_server;

/* Entries of all users, and of one. Those beyond are counted as job "other", or as user and job "other". */
#define MOKD_JOB_TOTALS 256u
#define MOKD_JOB_TOTALS_USER 16u
#define MOKD_JOB_TOTALS_OTHER "other"
#define MOKD_JOB_TOTALS_NOBODY ((uid_t)-1)

struct mokd_job_total {
    TAILQ_ENTRY(mokd_job_total) link;
    uid_t uid;
    char user[MOK_MAX_NAME + 1], job[MOK_MAX_NAME + 1];
    uint64_t ops, errors, rows, device_ns;
};
TAILQ_HEAD(mokd_job_total_list, mokd_job_total);

/* Adds what the queue's worker has counted since the last time. Before the queue goes, and before totals are shown. */
void mokd_job_totals_take(struct mokd_queue *queue);
/* The same from what the worker says of a queue that has no place on its page. */
void mokd_job_totals_take_stats(struct mokd_queue *queue, const Mok__WorkerQueueStats *stats);
void mokd_job_totals_take_all(struct mokd_server *server);
void mokd_job_totals_free(struct mokd_server *server);

#endif
