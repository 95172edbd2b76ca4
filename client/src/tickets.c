/* SPDX-License-Identifier: Apache-2.0 */
#include "tickets.h"

#include <stdlib.h>
#include <string.h>

int ticket_table_init(struct ticket_table *table, uint32_t device, uint32_t capacity)
{
    struct ticket_slot *slot = calloc(capacity, sizeof(*slot));

    if (!slot)
        return -MOK_ENOMEM;
    for (uint32_t i = 0; i < capacity; i++) {
        slot[i].index = i;
        slot[i].next_free = i + 1;
    }
    *table = (struct ticket_table){ .device = device, .capacity = capacity, .slot = slot };
    return 0;
}

void ticket_table_clear(struct ticket_table *table)
{
    free(table->slot);
    *table = (struct ticket_table){ 0 };
}

struct ticket_slot *ticket_take(struct ticket_table *table)
{
    if (table->free == table->capacity)
        return NULL;
    struct ticket_slot *slot = &table->slot[table->free];
    table->free = slot->next_free;
    table->used++;
    slot->generation++;
    slot->ticket = slot->generation << (TICKET_SLOT_BITS + TICKET_DEVICE_BITS) |
                   (uint64_t)slot->index << TICKET_DEVICE_BITS | table->device;
    slot->state = TICKET_FLYING;
    slot->opcode = MOK_OP_NOP;
    slot->unwanted = false;
    slot->group = 0;
    slot->layer = NULL;
    slot->page = NULL;
    memset(slot->buffer, 0, sizeof(slot->buffer));
    memset(&slot->cqe, 0, sizeof(slot->cqe));
    return slot;
}

struct ticket_slot *ticket_find(struct ticket_table *table, mok_ticket ticket)
{
    uint64_t index = ticket >> TICKET_DEVICE_BITS & ((1u << TICKET_SLOT_BITS) - 1);

    if (index >= table->capacity || table->slot[index].state == TICKET_FREE || table->slot[index].ticket != ticket)
        return NULL;
    return &table->slot[index];
}

void ticket_give(struct ticket_table *table, struct ticket_slot *slot)
{
    slot->state = TICKET_FREE;
    slot->next_free = table->free;
    table->free = slot->index;
    table->used--;
}
