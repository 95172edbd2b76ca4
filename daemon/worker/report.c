/* SPDX-License-Identifier: Apache-2.0 */
/* Mailboxes between the threads of the worker, and the eventfds that say that something lies in one. */
#include "report.h"

#include <unistd.h>

void worker_mailbox_init(struct worker_mailbox *box)
{
    *box = (struct worker_mailbox){ 0 };
    pthread_mutex_init(&box->lock, NULL);
}

void worker_mailbox_destroy(struct worker_mailbox *box)
{
    pthread_mutex_destroy(&box->lock);
}

void worker_mailbox_put(struct worker_mailbox *box, struct worker_report *report)
{
    report->next = NULL;
    pthread_mutex_lock(&box->lock);
    if (box->last)
        box->last->next = report;
    else
        box->first = report;
    box->last = report;
    pthread_mutex_unlock(&box->lock);
}

struct worker_report *worker_mailbox_take_all(struct worker_mailbox *box)
{
    pthread_mutex_lock(&box->lock);
    struct worker_report *first = box->first;
    box->first = box->last = NULL;
    pthread_mutex_unlock(&box->lock);
    return first;
}

void worker_ring(int eventfd)
{
    uint64_t one = 1;
    ssize_t written = write(eventfd, &one, sizeof(one));
    (void)written;
}

void worker_silence(int eventfd)
{
    uint64_t count;
    ssize_t got = read(eventfd, &count, sizeof(count));
    (void)got;
}
