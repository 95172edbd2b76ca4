/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The worker's side of a queue. Each word of the client's memory is read once a step, into a variable, and only the
 * variable is looked at.
 */
#include "queue_internal.h"

#include <string.h>

#include "memory.h"
#include "mok/types.h"
#include "util.h"

static int map_all(int control_fd, int submit_fd, int inflight_fd, struct mok_queue_worker *queue)
{
    void *memory;

    int r = mok_queue_control_map(control_fd, MOK_MAP_WRITE, &queue->header, &queue->layout);
    if (r < 0)
        return r;
    queue->cqe = mok_at(queue->header, queue->layout.cqe_offset);
    r = mok_memory_map(inflight_fd, queue->layout.inflight_bytes, MOK_MAP_WRITE | MOK_MAP_POPULATE, &memory);
    if (r < 0)
        return r;
    queue->inflight = memory;
    r = mok_memory_map(submit_fd, queue->layout.submit_bytes, MOK_MAP_READ | MOK_MAP_POPULATE, &memory);
    if (r < 0)
        return r;
    queue->submit = memory;
    queue->sqe = mok_at(memory, queue->layout.sqe_offset);
    return 0;
}

static int set_up(struct mok_queue_worker *queue)
{
    uint32_t slots = queue->layout.cq_entries;

    if (queue->header->state != MOK_RING_OPEN)
        return -MOK_ESTATE;
    queue->free_slots = malloc(slots * sizeof(*queue->free_slots));
    if (!queue->free_slots)
        return -MOK_ENOMEM;
    for (uint32_t i = 0; i < slots; i++) {
        if (queue->inflight[i].state != MOK_INFLIGHT_FREE)
            return -MOK_ESTATE;
        queue->free_slots[i] = slots - 1 - i;
    }
    queue->free_count = slots;
    queue->sq_head = queue->header->sq_head;
    queue->cq_tail = queue->header->cq_tail;
    queue->cq_wakeups = queue->header->cq_wakeups;
    return 0;
}

int mok_queue_worker_open(int control_fd, int submit_fd, int inflight_fd, struct mok_queue_worker *ret_queue)
{
    struct mok_queue_worker queue = { 0 };

    int r = map_all(control_fd, submit_fd, inflight_fd, &queue);
    if (r >= 0)
        r = set_up(&queue);
    if (r < 0) {
        mok_queue_worker_release(&queue);
        return r;
    }
    *ret_queue = queue;
    return 0;
}

void mok_queue_worker_release(struct mok_queue_worker *queue)
{
    mok_memory_unmap(queue->header, queue->layout.control_bytes);
    mok_memory_unmap(queue->inflight, queue->layout.inflight_bytes);
    mok_memory_unmap((void *)queue->submit, queue->layout.submit_bytes);
    free(queue->free_slots);
    *queue = (struct mok_queue_worker){ 0 };
}

/* ------------------------------------------------------------------ taking */

static int broken(struct mok_queue_worker *queue, uint16_t argument, uint32_t value, uint32_t bound)
{
    queue->fault = (struct mok_queue_fault){ .argument = argument, .value = value, .bound = bound };
    return -MOK_ESESSION;
}

struct client_words {
    uint32_t sq_tail, cq_head;
};

/* Acquire: sq_tail brings the entry's bytes; cq_head says that the client has read what we may now overwrite. */
static struct client_words read_client(const struct mok_queue_worker *queue)
{
    return (struct client_words){
        .sq_tail = mok_load_acquire(&queue->submit->sq_tail),
        .cq_head = mok_load_acquire(&queue->submit->cq_head),
    };
}

static bool has_fault(const struct mok_queue_worker *queue, struct client_words words)
{
    return queue->fault.argument != MOK_ARG_NONE || words.sq_tail - queue->sq_head > queue->layout.sq_entries ||
           queue->cq_tail - words.cq_head > queue->layout.cq_entries;
}

/* What was taken and not yet reaped must fit the CQ, or a completion would have no place. */
static bool can_take(const struct mok_queue_worker *queue, struct client_words words)
{
    return words.sq_tail != queue->sq_head && queue->sq_head - words.cq_head < queue->layout.cq_entries;
}

/* Word by word and atomically, so that no byte is fetched a second time behind the copy's back. */
static void copy_entry(struct mok_sqe *to, const struct mok_sqe *from)
{
    _Static_assert(sizeof(*to) % sizeof(uint64_t) == 0, "copied in words");
    const uint64_t *source = (const uint64_t *)(const void *)from;
    uint64_t words[sizeof(*to) / sizeof(uint64_t)];

    for (size_t i = 0; i < ARRAY_SIZE(words); i++)
        words[i] = mok_load_relaxed(&source[i]);
    memcpy(to, words, sizeof(*to));
}

static uint32_t note_taken(struct mok_queue_worker *queue, const struct mok_sqe *sqe)
{
    uint32_t slot = queue->free_slots[--queue->free_count];
    struct mok_inflight_entry *entry = &queue->inflight[slot];

    entry->sq_index = queue->sq_head;
    entry->opcode = sqe->opcode;
    entry->user_data = sqe->user_data;
    mok_store_release(&entry->state, MOK_INFLIGHT_TAKEN);
    mok_store_release(&queue->header->sq_head, ++queue->sq_head);
    return slot;
}

int mok_queue_worker_take(struct mok_queue_worker *queue, struct mok_sqe *ret_sqe, uint32_t *ret_slot)
{
    struct client_words words = read_client(queue);
    uint32_t published = words.sq_tail - queue->sq_head;
    uint32_t unreaped = queue->cq_tail - words.cq_head;

    if (queue->fault.argument != MOK_ARG_NONE)
        return -MOK_ESESSION;
    if (published > queue->layout.sq_entries)
        return broken(queue, MOK_ARG_SQ_TAIL, published, queue->layout.sq_entries);
    if (unreaped > queue->layout.cq_entries)
        return broken(queue, MOK_ARG_CQ_HEAD, unreaped, queue->layout.cq_entries);
    if (!can_take(queue, words))
        return 0;

    copy_entry(ret_sqe, &queue->sqe[queue->sq_head & (queue->layout.sq_entries - 1)]);
    *ret_slot = note_taken(queue, ret_sqe);
    return 1;
}

/* ------------------------------------------------------------------ completing */

void mok_queue_worker_complete(struct mok_queue_worker *queue, uint32_t slot, const struct mok_cqe *cqe)
{
    struct mok_cqe *place = &queue->cqe[queue->cq_tail & (queue->layout.cq_entries - 1)];

    mok_queue_publish(queue->header, place, &queue->inflight[slot], queue->cq_tail, cqe);
    queue->cq_tail++;
    queue->free_slots[queue->free_count++] = slot;

    mok_fence_full();
    if (mok_load_relaxed(&queue->submit->cq_sleepers) != 0)
        mok_queue_wake(queue->header, ++queue->cq_wakeups);
}

void mok_queue_worker_close(struct mok_queue_worker *queue, int code)
{
    mok_queue_mark_closed(queue->header, code);
    mok_queue_wake(queue->header, ++queue->cq_wakeups);
}

/* ------------------------------------------------------------------ sleeping */

void mok_queue_worker_arm(struct mok_queue_worker *queue)
{
    mok_store_relaxed(&queue->header->sq_flags, MOK_SQ_NEED_WAKEUP);
}

void mok_queue_worker_disarm(struct mok_queue_worker *queue)
{
    mok_store_relaxed(&queue->header->sq_flags, 0);
}

bool mok_queue_worker_ready(const struct mok_queue_worker *queue)
{
    struct client_words words = read_client(queue);

    return has_fault(queue, words) || can_take(queue, words);
}
