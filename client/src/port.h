/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One device as a session sees it: the queue to its worker and the tickets of what was submitted there. A queue
 * lives as long as its worker; the port goes on with another, and tickets of the earlier one keep their results.
 * Submitting never sleeps. Waiting sleeps without the port's lock.
 */
#ifndef MOK_CLIENT_PORT_H
#define MOK_CLIENT_PORT_H

#include "cuda.h"
#include "session.h"
#include "stream.h"
#include "tickets.h"

/* Cancels that one session may have in flight on a device; each has a place of its own beside queue_entries. */
#define PORT_CANCELS 4u

/*
 * The port of a device; opens a queue when there is none or the last one has ended with its worker. *ret_queue (may be
 * NULL) is its id. Sleeps for mokd's answer. -MOK_ERANGE; what mokd answers; -MOK_EPROTO.
 */
int port_get(mok_session *session, uint32_t device, struct port **ret_port, uint32_t *ret_queue);
/* The port of a ticket's device; NULL: no such. */
struct port *port_of(mok_session *session, mok_ticket ticket);
/*
 * The GPU of the port's device, opened at the first call. `uuid` NULL: a device without one, whose streams are those of
 * the current context.
 */
int port_cuda(struct port *port, const uint8_t *uuid, const char *mps_pipe, struct cuda_device **ret);
/* The port must not be in use. NULL is fine. */
void port_close(struct port *port);

struct submission {
    struct mok_sqe sqe;                   /* but for user_data */
    uint32_t queue;                       /* that the submission is meant for; 0: whichever is there */
    mok_layer *layer;                     /* NULL: none */
    mok_buffer *buffer[MOK_REGION_COUNT]; /* that the operation uses, each once */
};

/*
 * Never sleeps. -MOK_EAGAIN: as many operations as the queue has entries are in flight or completed with a result that
 * nobody asked for yet; -MOK_EWORKER: the queue is not there any more; what layer_ready() says.
 */
int port_submit(struct port *port, const struct submission *submission, mok_ticket *ret_ticket);

/*
 * The same, handed over by a CUDA stream, at its present end. The first on a queue asks mokd for stream slots and waits
 * for that. Releases the stream if the submission is refused after all.
 */
int port_submit_on_stream(struct port *port, const struct submission *submission, void *stream, mok_ticket *ret_ticket);

struct outcome {
    struct mok_cqe cqe;
    uint32_t group; /* id; 0: none */
    uint8_t opcode;
};

/*
 * Sleeps until the operation has completed (1, *ret_outcome, the ticket is used up) or CLOCK_MONOTONIC has come to
 * deadline_ns (0); deadline 0 never sleeps. -MOK_ENOENT, with a sentence.
 */
int port_await(struct port *port, mok_ticket ticket, uint64_t deadline_ns, struct outcome *ret_outcome);
/* Id of the queue that the port has now. */
uint32_t port_queue(struct port *port);
/* 0: in flight; -MOK_ENOENT: completed or unknown, with a sentence. */
int port_is_flying(struct port *port, mok_ticket ticket);
/* The result of `ticket` is not wanted any more, whenever it comes. */
void port_disown(struct port *port, mok_ticket ticket);

/* Operations in flight that use the buffer. */
uint32_t port_buffer_operations(struct port *port, const mok_buffer *buffer);
/* Marks the layer as changing unless operations of it are in flight or it changes already: -MOK_EBUSY. */
int port_layer_hold(struct port *port, mok_layer *layer);
/* Ends that; `has_*` are what the layer has bound from now on. */
void port_layer_settle(struct port *port, mok_layer *layer, bool has_weights, bool has_gradients);
/* Operations in flight do not refer to the group's layers and buffers any more. */
void port_forget_group(struct port *port, const mok_group *group);

#endif
