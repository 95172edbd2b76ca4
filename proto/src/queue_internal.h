/* SPDX-License-Identifier: Apache-2.0 */
/* What the three sides of a queue share. Private to the queue_*.c files and queue.c. */
#ifndef MOK_QUEUE_INTERNAL_H
#define MOK_QUEUE_INTERNAL_H

#include "queue.h"
#include "sync.h"

/* 0 when the header is one of ours and says what the layout of its entry count says. -MOK_EPROTO, -MOK_EVERSION. */
int mok_queue_header_check(const struct mok_ring_header *header, struct mok_queue_layout *ret_layout);

/* Maps the control page, checks it, and maps it whole. */
int mok_queue_control_map(int fd, unsigned flags, struct mok_ring_header **ret_header,
                          struct mok_queue_layout *ret_layout);

static inline void *mok_at(const void *base, uint64_t offset)
{
    return (void *)((uintptr_t)base + (uintptr_t)offset);
}

/* The steps of a completion; a death between any two of them is told from the in-flight entry. See ABI.md. */
static inline void mok_queue_publish(struct mok_ring_header *header, struct mok_cqe *slot,
                                     struct mok_inflight_entry *entry, uint32_t cq_tail, const struct mok_cqe *cqe)
{
    *slot = *cqe;
    slot->user_data = entry->user_data;
    entry->cq_index = cq_tail;
    mok_store_release(&entry->state, MOK_INFLIGHT_COMPLETING);
    mok_store_release(&header->cq_tail, cq_tail + 1);
    mok_store_release(&entry->state, MOK_INFLIGHT_FREE);
}

static inline void mok_queue_wake(struct mok_ring_header *header, uint32_t wakeups)
{
    mok_store_release(&header->cq_wakeups, wakeups);
    mok_futex_wake_all(&header->cq_wakeups);
}

static inline void mok_queue_mark_closed(struct mok_ring_header *header, int code)
{
    mok_store_relaxed(&header->close_code, code);
    mok_store_release(&header->state, MOK_RING_CLOSED);
}

#endif
