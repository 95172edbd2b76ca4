/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operations of one queue that have a ticket: in flight, or completed and not yet asked for. A ticket says where
 * to look it up, and is never given out twice. Allocates once; the caller locks.
 */
#ifndef MOK_CLIENT_TICKETS_H
#define MOK_CLIENT_TICKETS_H

#include <stdbool.h>
#include <stdint.h>

#include "mok/mok.h"
#include "mok/ring_abi.h"

/* ticket = generation of the slot << 19 | slot << 6 | device; generations start at 1, so no ticket is 0. */
#define TICKET_DEVICE_BITS 6
#define TICKET_SLOT_BITS 13
_Static_assert(MOK_MAX_DEVICES <= 1u << TICKET_DEVICE_BITS, "a device must fit a ticket");

struct stream_page;

enum ticket_state {
    TICKET_FREE = 0,
    TICKET_FLYING, /* submitted */
    TICKET_DONE,   /* cqe is final */
};

struct ticket_slot {
    mok_ticket ticket;
    uint64_t generation;
    uint32_t index, next_free;
    uint8_t state;                        /* enum ticket_state */
    uint8_t opcode;                       /* enum mok_opcode */
    bool unwanted;                        /* nobody asks for the result: free the slot when it has completed */
    uint32_t group;                       /* id; 0: none */
    mok_layer *layer;                     /* while in flight; NULL: a no-op, a cancel, or its layer is gone */
    mok_buffer *buffer[MOK_REGION_COUNT]; /* that it uses while in flight; NULL: none */
    struct stream_page *page;             /* while in flight: whose slot a stream waits at; NULL: none does */
    uint32_t stream_slot;
    struct mok_cqe cqe;
};

struct ticket_table {
    uint32_t device, capacity, used;
    uint32_t free; /* index of the first free slot; capacity: none */
    struct ticket_slot *slot;
};

/* -MOK_ENOMEM without a sentence. */
int ticket_table_init(struct ticket_table *table, uint32_t device, uint32_t capacity);
void ticket_table_clear(struct ticket_table *table);

/* A slot in flight with a new ticket; NULL: all are in use. */
struct ticket_slot *ticket_take(struct ticket_table *table);
/* NULL: given back, or never given out. */
struct ticket_slot *ticket_find(struct ticket_table *table, mok_ticket ticket);
void ticket_give(struct ticket_table *table, struct ticket_slot *slot);

static inline uint32_t ticket_device(mok_ticket ticket)
{
    return (uint32_t)ticket & ((1u << TICKET_DEVICE_BITS) - 1);
}

#endif
