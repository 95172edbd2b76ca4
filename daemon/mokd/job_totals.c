/* SPDX-License-Identifier: Apache-2.0 */
#include "job_totals.h"

#include <stdio.h>
#include <string.h>

#include "client_queue.h"
#include "device.h"
#include "usage.h"

#define OTHER MOKD_JOB_TOTALS_OTHER
#define OTHER_UID MOKD_JOB_TOTALS_NOBODY

static struct mokd_job_total *find(struct mokd_server *server, uid_t uid, const char *job)
{
    struct mokd_job_total *total;

    TAILQ_FOREACH(total, &server->job_totals, link)
        if (total->uid == uid && strcmp(total->job, job) == 0)
            return total;
    return NULL;
}

/* Entries of `uid`, and of all. */
static unsigned count(const struct mokd_server *server, uid_t uid, unsigned *ret_all)
{
    const struct mokd_job_total *total;
    unsigned own = 0;

    *ret_all = 0;
    TAILQ_FOREACH(total, &server->job_totals, link)
    {
        own += total->uid == uid;
        ++*ret_all;
    }
    return own;
}

static struct mokd_job_total *add(struct mokd_server *server, uid_t uid, const char *user, const char *job)
{
    struct mokd_job_total *total = calloc(1, sizeof(*total));

    if (!total)
        return NULL;
    total->uid = uid;
    snprintf(total->user, sizeof(total->user), "%s", user);
    snprintf(total->job, sizeof(total->job), "%s", job);
    TAILQ_INSERT_TAIL(&server->job_totals, total, link);
    return total;
}

/* The last entry of a user, and the last of all, are kept for what has none of its own. */
static struct mokd_job_total *entry_of(const struct mokd_session *session)
{
    struct mokd_server *server = session->server;
    uid_t uid = session->peer.uid;
    const char *user = session->user->name, *job = session->job;
    unsigned all;

    struct mokd_job_total *total = find(server, uid, job);
    if (!total && count(server, uid, &all) >= MOKD_JOB_TOTALS_USER - 1u)
        total = find(server, uid, job = OTHER);
    if (total)
        return total;
    count(server, uid, &all);
    if (all < MOKD_JOB_TOTALS - 1u)
        return add(server, uid, user, job);
    total = find(server, OTHER_UID, OTHER);
    return total ? total : add(server, OTHER_UID, "-", OTHER);
}

static uint64_t grown(uint64_t *before, uint64_t now)
{
    uint64_t by = now > *before ? now - *before : 0;

    *before = now;
    return by;
}

static void take(struct mokd_queue *queue, const struct mok_stats_queue *now)
{
    struct mokd_job_total *total = entry_of(queue->session);
    if (!total) /* no memory: the next time, then */
        return;
    uint64_t ops = grown(&queue->counted.ops, now->ops), rows = grown(&queue->counted.rows, now->rows);
    uint64_t device_ns = grown(&queue->counted.device_ns, now->device_ns);
    total->ops += ops;
    total->errors += grown(&queue->counted.errors, now->errors);
    total->rows += rows;
    total->device_ns += device_ns;
    queue->session->user->device_ns += device_ns;
    mokd_usage_work(queue->usage, ops, rows, device_ns);
    queue->in_flight = now->in_flight;
    /* The name may have been looked up only after the first operation. */
    if (total->uid == queue->session->peer.uid)
        memcpy(total->user, queue->session->user->name, sizeof(total->user));
}

void mokd_job_totals_take(struct mokd_queue *queue)
{
    struct mok_stats_queue now;

    if (mokd_stats_page_queue(&queue->device->stats, queue->id, &now))
        take(queue, &now);
}

void mokd_job_totals_take_stats(struct mokd_queue *queue, const Mok__WorkerQueueStats *stats)
{
    struct mok_stats_queue now;

    if (mokd_stats_page_queue(&queue->device->stats, queue->id, &now))
        return;
    now = (struct mok_stats_queue){ .ops = stats->ops_done, .rows = stats->rows, .device_ns = stats->device_ns };
    take(queue, &now);
}

void mokd_job_totals_take_all(struct mokd_server *server)
{
    for (size_t i = 0; i < server->n_devices; i++) {
        struct mokd_queue *queue;
        TAILQ_FOREACH(queue, &server->devices[i]->queues, device_link)
            mokd_job_totals_take(queue);
    }
}

void mokd_job_totals_free(struct mokd_server *server)
{
    struct mokd_job_total *total;

    while ((total = TAILQ_FIRST(&server->job_totals))) {
        TAILQ_REMOVE(&server->job_totals, total, link);
        free(total);
    }
}
