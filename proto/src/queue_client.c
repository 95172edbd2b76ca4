/* SPDX-License-Identifier: Apache-2.0 */
/* The client's side of a queue. */
#include "queue_internal.h"

#include <string.h>

#include "memory.h"
#include "mok/types.h"
#include "util.h"

static int map_all(int control_fd, int submit_fd, struct mok_queue_client *queue)
{
    struct mok_ring_header *header;
    void *memory;

    int r = mok_queue_control_map(control_fd, MOK_MAP_READ, &header, &queue->layout);
    if (r < 0)
        return r;
    queue->header = header;
    queue->cqe = mok_at(header, queue->layout.cqe_offset);
    r = mok_memory_map(submit_fd, queue->layout.submit_bytes, MOK_MAP_WRITE | MOK_MAP_POPULATE, &memory);
    if (r < 0)
        return r;
    queue->submit = memory;
    queue->sqe = mok_at(memory, queue->layout.sqe_offset);
    return 0;
}

int mok_queue_client_open(int control_fd, int submit_fd, int doorbell_fd, struct mok_queue_client *ret_queue)
{
    struct mok_queue_client queue = { .doorbell_fd = doorbell_fd };

    int r = map_all(control_fd, submit_fd, &queue);
    if (r < 0) {
        mok_queue_client_release(&queue);
        return r;
    }
    queue.sq_tail = queue.submit->sq_tail;
    queue.cq_head = queue.submit->cq_head;
    *ret_queue = queue;
    return 0;
}

void mok_queue_client_release(struct mok_queue_client *queue)
{
    mok_memory_unmap((void *)queue->header, queue->layout.control_bytes);
    mok_memory_unmap(queue->submit, queue->layout.submit_bytes);
    *queue = (struct mok_queue_client){ .doorbell_fd = -1 };
}

/* 0 while open, else the code, which is negative whatever the page says. Acquire: what came before is visible. */
static int closed_code(const struct mok_queue_client *queue)
{
    if (mok_load_acquire(&queue->header->state) == MOK_RING_OPEN)
        return 0;
    int code = mok_load_relaxed(&queue->header->close_code);
    return code < 0 ? code : -MOK_ESESSION;
}

/* A write that finds the counter full has nothing to add: the worker has not slept since. */
static void ring(const struct mok_queue_client *queue)
{
    uint64_t one = 1;
    ssize_t r;

    do
        r = write(queue->doorbell_fd, &one, sizeof(one));
    while (r < 0 && errno == EINTR);
}

/* ------------------------------------------------------------------ submitting */

int mok_queue_client_reserve(struct mok_queue_client *queue, struct mok_sqe **ret_sqe)
{
    int code = closed_code(queue);
    if (code < 0)
        return code;
    /* Acquire: the worker has read the entry that we are about to overwrite. */
    uint32_t head = mok_load_acquire(&queue->header->sq_head);
    if (queue->sq_tail - head >= queue->layout.sq_entries)
        return -MOK_EAGAIN;

    struct mok_sqe *sqe = &queue->sqe[queue->sq_tail & (queue->layout.sq_entries - 1)];
    memset(sqe, 0, sizeof(*sqe));
    *ret_sqe = sqe;
    return 0;
}

void mok_queue_client_publish(struct mok_queue_client *queue)
{
    mok_store_release(&queue->submit->sq_tail, ++queue->sq_tail);
    mok_fence_full();
    if (mok_load_relaxed(&queue->header->sq_flags) & MOK_SQ_NEED_WAKEUP)
        ring(queue);
}

/* ------------------------------------------------------------------ reaping */

int mok_queue_client_reap(struct mok_queue_client *queue, struct mok_cqe *ret_cqe)
{
    /* The state first: once closed, the tail that follows is the last one. */
    int code = closed_code(queue);
    if (mok_load_acquire(&queue->header->cq_tail) == queue->cq_head)
        return code;

    *ret_cqe = queue->cqe[queue->cq_head & (queue->layout.cq_entries - 1)];
    mok_store_release(&queue->submit->cq_head, queue->cq_head + 1);
    mok_store_relaxed(&queue->cq_head, queue->cq_head + 1);

    /* The worker may have gone to sleep for want of room with submissions waiting: then room is news to it. */
    mok_fence_full();
    if ((mok_load_relaxed(&queue->header->sq_flags) & MOK_SQ_NEED_WAKEUP) &&
        mok_load_relaxed(&queue->header->sq_head) != mok_load_relaxed(&queue->submit->sq_tail))
        ring(queue);
    return 1;
}

uint32_t mok_queue_client_seen(const struct mok_queue_client *queue)
{
    return mok_load_relaxed(&queue->cq_head);
}

static bool worth_waking(const struct mok_queue_client *queue, uint32_t seen)
{
    return mok_load_acquire(&queue->header->cq_tail) != seen || closed_code(queue) < 0;
}

int mok_queue_client_wait(struct mok_queue_client *queue, uint32_t seen, uint64_t deadline_ns)
{
    int r = 0;

    if (worth_waking(queue, seen))
        return 0;
    __atomic_fetch_add(&queue->submit->cq_sleepers, 1, __ATOMIC_RELAXED);
    for (;;) {
        mok_fence_full();
        /* The futex word before what it guards: a wake-up after this load makes the futex call return at once. */
        uint32_t wakeups = mok_load_acquire(&queue->header->cq_wakeups);
        if (worth_waking(queue, seen))
            break;
        r = mok_futex_wait(&queue->header->cq_wakeups, wakeups, deadline_ns);
        if (r == -ETIMEDOUT) {
            r = worth_waking(queue, seen) ? 0 : -MOK_ETIMEDOUT;
            break;
        }
        r = 0;
    }
    __atomic_fetch_sub(&queue->submit->cq_sleepers, 1, __ATOMIC_RELAXED);
    return r;
}
