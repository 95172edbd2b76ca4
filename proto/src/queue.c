/* SPDX-License-Identifier: Apache-2.0 */
/* Layout of a queue, and mokd's side of it. */
#include "queue_internal.h"

#include <errno.h>
#include <sys/eventfd.h>

#include "memory.h"
#include "mok/types.h"
#include "util.h"

int mok_queue_layout(uint32_t sq_entries, struct mok_queue_layout *ret_layout)
{
    if (sq_entries < MOK_RING_MIN_ENTRIES || sq_entries > MOK_RING_MAX_ENTRIES || !mok_is_power_of_two(sq_entries))
        return -MOK_ERANGE;

    uint32_t cq_entries = 2 * sq_entries;
    *ret_layout = (struct mok_queue_layout){
        .sq_entries = sq_entries,
        .cq_entries = cq_entries,
        .cqe_offset = MOK_MEMORY_PAGE,
        .sqe_offset = MOK_MEMORY_PAGE,
        .control_bytes = mok_memory_round(MOK_MEMORY_PAGE + (uint64_t)cq_entries * sizeof(struct mok_cqe)),
        .submit_bytes = mok_memory_round(MOK_MEMORY_PAGE + (uint64_t)sq_entries * sizeof(struct mok_sqe)),
        .inflight_bytes = mok_memory_round((uint64_t)cq_entries * sizeof(struct mok_inflight_entry)),
    };
    return 0;
}

int mok_queue_header_check(const struct mok_ring_header *header, struct mok_queue_layout *ret_layout)
{
    struct mok_queue_layout layout;

    if (header->magic != MOK_RING_MAGIC)
        return -MOK_EPROTO;
    if (header->abi_version != MOK_RING_ABI_VERSION)
        return -MOK_EVERSION;
    if (mok_queue_layout(header->sq_entries, &layout) < 0)
        return -MOK_EPROTO;
    if (header->header_bytes != sizeof(*header) || header->sqe_bytes != sizeof(struct mok_sqe) ||
        header->cqe_bytes != sizeof(struct mok_cqe) || header->cq_entries != layout.cq_entries ||
        header->control_bytes != layout.control_bytes || header->submit_bytes != layout.submit_bytes ||
        header->cqe_offset != layout.cqe_offset || header->sqe_offset != layout.sqe_offset)
        return -MOK_EPROTO;
    *ret_layout = layout;
    return 0;
}

int mok_queue_control_map(int fd, unsigned flags, struct mok_ring_header **ret_header,
                          struct mok_queue_layout *ret_layout)
{
    void *page, *whole;
    struct mok_queue_layout layout;

    int r = mok_memory_map(fd, MOK_MEMORY_PAGE, MOK_MAP_READ, &page);
    if (r < 0)
        return r;
    r = mok_queue_header_check(page, &layout);
    mok_memory_unmap(page, MOK_MEMORY_PAGE);
    if (r < 0)
        return r;
    r = mok_memory_map(fd, layout.control_bytes, flags | MOK_MAP_POPULATE, &whole);
    if (r < 0)
        return r;
    *ret_header = whole;
    *ret_layout = layout;
    return 0;
}

/* ------------------------------------------------------------------ creation */

static void write_header(struct mok_ring_header *header, const struct mok_queue_layout *layout, uint32_t counter)
{
    header->magic = MOK_RING_MAGIC;
    header->abi_version = MOK_RING_ABI_VERSION;
    header->features = MOK_RING_FEAT_CANCEL | MOK_RING_FEAT_STREAM;
    header->header_bytes = sizeof(*header);
    header->sq_entries = layout->sq_entries;
    header->cq_entries = layout->cq_entries;
    header->sqe_bytes = sizeof(struct mok_sqe);
    header->cqe_bytes = sizeof(struct mok_cqe);
    header->control_bytes = layout->control_bytes;
    header->submit_bytes = layout->submit_bytes;
    header->cqe_offset = layout->cqe_offset;
    header->sqe_offset = layout->sqe_offset;
    header->initial_counter = counter;
    header->sq_head = counter;
    /* Set until the worker looks for the first time, so that a submission before that is not missed. */
    header->sq_flags = MOK_SQ_NEED_WAKEUP;
    header->cq_tail = counter;
    header->state = MOK_RING_OPEN;
}

static int write_submit(int fd, const struct mok_queue_layout *layout, uint32_t counter)
{
    void *page;

    int r = mok_memory_map(fd, layout->submit_bytes, MOK_MAP_WRITE, &page);
    if (r < 0)
        return r;
    struct mok_ring_submit *submit = page;
    submit->sq_tail = counter;
    submit->cq_head = counter;
    mok_memory_unmap(page, layout->submit_bytes);
    return 0;
}

static int fill(struct mok_queue *queue, uint32_t counter)
{
    const struct mok_queue_layout *layout = &queue->layout;
    void *page;

    int r = mok_memory_create_open("mok-queue-control", layout->control_bytes, &queue->control_fd);
    if (r < 0)
        return r;
    r = mok_memory_create("mok-queue-submit", layout->submit_bytes, &queue->submit_fd);
    if (r < 0)
        return r;
    r = mok_memory_create("mok-queue-inflight", layout->inflight_bytes, &queue->inflight_fd);
    if (r < 0)
        return r;
    queue->doorbell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (queue->doorbell_fd < 0)
        return errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_EIO;

    r = mok_memory_map(queue->control_fd, layout->control_bytes, MOK_MAP_WRITE, &page);
    if (r < 0)
        return r;
    queue->header = page;
    r = mok_memory_map(queue->inflight_fd, layout->inflight_bytes, MOK_MAP_WRITE, &page);
    if (r < 0)
        return r;
    queue->inflight = page;
    write_header(queue->header, layout, counter);
    return write_submit(queue->submit_fd, layout, counter);
}

int mok_queue_create(uint32_t sq_entries, uint32_t initial_counter, struct mok_queue *ret_queue)
{
    struct mok_queue queue = MOK_QUEUE_INIT;

    int r = mok_queue_layout(sq_entries, &queue.layout);
    if (r < 0)
        return r;
    r = fill(&queue, initial_counter);
    if (r < 0) {
        mok_queue_destroy(&queue);
        return r;
    }
    *ret_queue = queue;
    return 0;
}

void mok_queue_destroy(struct mok_queue *queue)
{
    mok_memory_unmap(queue->header, queue->layout.control_bytes);
    mok_memory_unmap(queue->inflight, queue->layout.inflight_bytes);
    mok_close(queue->control_fd);
    if (queue->submit_fd >= 0) /* a client that keeps its descriptor keeps an empty file */
        mok_memory_empty(queue->submit_fd, queue->layout.submit_bytes);
    mok_close(queue->submit_fd);
    mok_close(queue->inflight_fd);
    mok_close(queue->doorbell_fd);
    *queue = (struct mok_queue)MOK_QUEUE_INIT;
}

int mok_queue_seal(struct mok_queue *queue)
{
    return mok_memory_seal_future_write(queue->control_fd);
}

/* ------------------------------------------------------------------ after a worker's death */

/* The completion of a COMPLETING entry is whole: publish it as it stands if cq_tail had not moved yet. */
static bool finish_completing(struct mok_ring_header *header, struct mok_inflight_entry *entry)
{
    bool unpublished = entry->cq_index == header->cq_tail;

    if (unpublished)
        mok_store_release(&header->cq_tail, header->cq_tail + 1);
    mok_store_release(&entry->state, MOK_INFLIGHT_FREE);
    return unpublished;
}

static void complete_taken(struct mok_queue *queue, struct mok_inflight_entry *entry, int code)
{
    struct mok_ring_header *header = queue->header;
    struct mok_cqe *cqe = mok_at(header, queue->layout.cqe_offset);
    struct mok_cqe failed = { .result = code };
    uint32_t tail = header->cq_tail;

    /* The worker died after it had noted the operation and before it told the client so. */
    if (entry->sq_index == header->sq_head)
        mok_store_release(&header->sq_head, header->sq_head + 1);
    mok_queue_publish(header, &cqe[tail & (queue->layout.cq_entries - 1)], entry, tail, &failed);
}

int mok_queue_recover(struct mok_queue *queue, int code)
{
    int published = 0;

    /* First what has its place in the CQ already, at most one of which is not published. */
    for (uint32_t i = 0; i < queue->layout.cq_entries; i++) {
        struct mok_inflight_entry *entry = &queue->inflight[i];
        if (mok_load_acquire(&entry->state) == MOK_INFLIGHT_COMPLETING)
            published += finish_completing(queue->header, entry);
    }
    for (uint32_t i = 0; i < queue->layout.cq_entries; i++) {
        struct mok_inflight_entry *entry = &queue->inflight[i];
        if (mok_load_acquire(&entry->state) == MOK_INFLIGHT_TAKEN) {
            complete_taken(queue, entry, code);
            published++;
        }
    }
    /* Unconditional: the dead worker may have published without waking. */
    mok_queue_wake(queue->header, queue->header->cq_wakeups + 1);
    return published;
}

void mok_queue_close(struct mok_queue *queue, int code)
{
    mok_queue_mark_closed(queue->header, code);
    mok_queue_wake(queue->header, queue->header->cq_wakeups + 1);
}
