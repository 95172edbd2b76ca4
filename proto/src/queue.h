/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The shared-memory queue of one (session, device): mokd makes it, the worker serves it, the client uses it.
 * Layout in mok/ring_abi.h, rules and proofs in ABI.md. The worker's side never blocks, never allocates an
 * operation, and trusts no word that the client can write.
 *
 * Life of a queue, in mokd:
 *   mok_queue_create -> descriptors to the worker, who answers once it has mapped them -> mok_queue_seal
 *     -> descriptors to the client -> ... -> mok_queue_destroy
 * The seal is what keeps the client's hands off the control page, whoever it runs as; it also means that no later
 * process can map that page writable. So a queue ends with its worker: when the worker is dead (reaped),
 * mok_queue_recover completes what it owed and mok_queue_close tells the client, which asks mokd for another queue.
 */
#ifndef MOK_QUEUE_H
#define MOK_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mok/ring_abi.h"

/* Sizes and offsets that follow from the number of submission entries. */
struct mok_queue_layout {
    uint32_t sq_entries, cq_entries;
    uint64_t control_bytes, submit_bytes, inflight_bytes;
    uint64_t cqe_offset, sqe_offset;
};
/* -MOK_ERANGE unless a power of two in MOK_RING_MIN_ENTRIES..MOK_RING_MAX_ENTRIES. */
int mok_queue_layout(uint32_t sq_entries, struct mok_queue_layout *ret_layout);

/* ------------------------------------------------------------------ mokd */

struct mok_queue {
    struct mok_queue_layout layout;
    int control_fd, submit_fd, inflight_fd, doorbell_fd; /* the queue's own; -1 when not open */
    struct mok_ring_header *header;                      /* writable: mapped before the seal */
    struct mok_inflight_entry *inflight;
};
#define MOK_QUEUE_INIT                                                                                                 \
    {                                                                                                                  \
        .control_fd = -1, .submit_fd = -1, .inflight_fd = -1, .doorbell_fd = -1                                        \
    }
/* All four counters start at `initial_counter`. -MOK_ERANGE, -MOK_ENOMEM, -MOK_EFDS, -MOK_EIO. */
int mok_queue_create(uint32_t sq_entries, uint32_t initial_counter, struct mok_queue *ret_queue);
void mok_queue_destroy(struct mok_queue *queue); /* closes, unmaps; fine on MOK_QUEUE_INIT and twice */

/* Forbids further writable mappings of the control page: after the worker has mapped, before the client gets it. */
int mok_queue_seal(struct mok_queue *queue);

/*
 * For a worker that is dead for certain: publishes a completion with `code` for each operation that was taken and
 * not completed, each exactly once. Returns how many. Doing it again is harmless.
 */
int mok_queue_recover(struct mok_queue *queue, int code);
/* State CLOSED with `code`, everyone woken. Only while no worker serves the queue. Completions stay readable. */
void mok_queue_close(struct mok_queue *queue, int code);

/* ------------------------------------------------------------------ worker */

/* Why a queue counts as broken: the word at fault (enum mok_argument), what it said, what it may say at most. */
struct mok_queue_fault {
    uint16_t argument;
    uint64_t value, bound;
};

struct mok_queue_worker {
    struct mok_queue_layout layout;
    struct mok_ring_header *header;
    struct mok_cqe *cqe;
    struct mok_inflight_entry *inflight;
    const struct mok_ring_submit *submit;  /* hostile */
    const struct mok_sqe *sqe;             /* hostile */
    uint32_t sq_head, cq_tail, cq_wakeups; /* the truth; the shared words are copies for the client */
    uint32_t free_count;
    uint32_t *free_slots;         /* [cq_entries]: slots of the in-flight table */
    struct mok_queue_fault fault; /* argument 0: none */
};

/*
 * Maps; the descriptors stay the caller's. -MOK_ESIZE, -MOK_EPROTO (header does not fit its sizes), -MOK_EVERSION,
 * -MOK_ESTATE (closed, or owes completions: recover first), -MOK_EACCESS (sealed already), -MOK_ENOMEM, -MOK_EIO.
 */
int mok_queue_worker_open(int control_fd, int submit_fd, int inflight_fd, struct mok_queue_worker *ret_queue);
/* Unmaps; the client is not told: see mok_queue_worker_close. Fine on zeroed memory and twice. */
void mok_queue_worker_release(struct mok_queue_worker *queue);

/*
 * Takes the next submission. 1: *ret_sqe is the only copy ever made (validate that), *ret_slot names the operation
 * until its completion, which must come. 0: nothing, or no room for one more completion until the client reaps.
 * -MOK_ESESSION: the client broke the queue, now and for ever; queue->fault says how. Close it.
 */
int mok_queue_worker_take(struct mok_queue_worker *queue, struct mok_sqe *ret_sqe, uint32_t *ret_slot);
/* Publishes the completion of a slot, user_data filled in, and wakes the client if it sleeps. Always has room. */
void mok_queue_worker_complete(struct mok_queue_worker *queue, uint32_t slot, const struct mok_cqe *cqe);
/* State CLOSED with `code`, everyone woken; nothing is completed afterwards. */
void mok_queue_worker_close(struct mok_queue_worker *queue, int code);

/*
 * Before sleeping: arm every queue, mok_fence_full() (sync.h), and sleep only if no queue is ready; disarm after
 * waking. Sleep on the doorbell with EPOLLIN | EPOLLET and never read it.
 */
void mok_queue_worker_arm(struct mok_queue_worker *queue);
void mok_queue_worker_disarm(struct mok_queue_worker *queue);
/* True when mok_queue_worker_take would return anything but 0, or the queue is known to be broken. */
bool mok_queue_worker_ready(const struct mok_queue_worker *queue);

/* ------------------------------------------------------------------ client */

/*
 * Submitting calls (reserve, publish) exclude each other by a lock of the caller's, and so do reaping calls (reap,
 * seen); one lock for both is fine. mok_queue_client_wait needs none.
 */
struct mok_queue_client {
    struct mok_queue_layout layout;
    const struct mok_ring_header *header;
    const struct mok_cqe *cqe;
    struct mok_ring_submit *submit;
    struct mok_sqe *sqe;
    int doorbell_fd; /* borrowed */
    uint32_t sq_tail, cq_head;
};

/*
 * Maps; the descriptors stay the caller's, and the doorbell must outlive the queue. -MOK_ESIZE, -MOK_EPROTO,
 * -MOK_EVERSION, -MOK_EACCESS, -MOK_ENOMEM, -MOK_EIO.
 */
int mok_queue_client_open(int control_fd, int submit_fd, int doorbell_fd, struct mok_queue_client *ret_queue);
void mok_queue_client_release(struct mok_queue_client *queue); /* fine on zeroed memory and twice */

/*
 * Next free entry, zeroed, to fill in and publish; reserving twice gives the same one.
 * -MOK_EAGAIN: full; else the code that the queue was closed with.
 */
int mok_queue_client_reserve(struct mok_queue_client *queue, struct mok_sqe **ret_sqe);
/* Hands the reserved entry to the worker and rings if it sleeps. Never blocks. */
void mok_queue_client_publish(struct mok_queue_client *queue);

/*
 * 1: *ret_cqe is the next completion; 0: none yet. Once the queue is closed and all its completions are reaped: the
 * code it was closed with (what is still in flight then will never complete).
 */
int mok_queue_client_reap(struct mok_queue_client *queue, struct mok_cqe *ret_cqe);
/* Completions reaped so far, to wait for more than these. */
uint32_t mok_queue_client_seen(const struct mok_queue_client *queue);
/*
 * Sleeps until more than `seen` completions are published or the queue is closed (0), or CLOCK_MONOTONIC has reached
 * deadline_ns (-MOK_ETIMEDOUT; 0: no deadline). A worker and a mokd that are both killed cannot close the queue, so
 * wait in slices and look at the control socket in between.
 */
int mok_queue_client_wait(struct mok_queue_client *queue, uint32_t seen, uint64_t deadline_ns);

#endif
