/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of a trace, in memory that a worker fills while one is asked for, and that mokd copies to whoever asked: a
 * ring that overwrites its oldest. Several threads write, each its own event; nobody reads before all have stopped.
 */
#ifndef MOK_TRACE_EVENTS_H
#define MOK_TRACE_EVENTS_H

#include <stdint.h>

#define MOK_TRACE_MAGIC 0x454341525451304dull
#define MOK_TRACE_VERSION 1u

enum mok_trace_type {
    MOK_TRACE_NONE = 0,
    MOK_TRACE_OP,    /* an operation, taken -> completed; kind: opcode */
    MOK_TRACE_WAIT,  /* it waits; kind: enum mok_latency (queue, ready, push) */
    MOK_TRACE_PHASE, /* the engine runs a phase of it; kind: enum mok_phase */
    MOK_TRACE_WORK,  /* a step of a phase; kind: enum mok_engine_work; slot: minibatch of the ring, turn: macrobatch */
    MOK_TRACE_SLEEP, /* the dispatcher sleeps */
    MOK_TRACE_TYPES,
};

struct mok_trace_event {
    uint64_t start_ns, end_ns; /* of the monotonic clock */
    uint32_t type;             /* written last */
    uint32_t device;           /* index; mokd fills it in */
    uint32_t queue, layer;     /* 0: of none, or of somebody else's */
    uint64_t op;               /* number that its client knows it by */
    uint32_t kind, slot;
    uint32_t turn;
    int32_t result; /* of an operation: 0 or -MOK_E* */
    uint64_t rows;  /* of an operation */
};

struct mok_trace {
    uint64_t magic;
    uint32_t version;
    uint32_t capacity; /* events that fit */
    uint64_t written;  /* ever; the last `capacity` of them are there */
    uint64_t reserved[5];
    struct mok_trace_event event[];
};

_Static_assert(sizeof(struct mok_trace_event) == 64, "layout");
_Static_assert(sizeof(struct mok_trace) == 64, "layout");

static inline uint64_t mok_trace_bytes(uint32_t capacity)
{
    return sizeof(struct mok_trace) + (uint64_t)capacity * sizeof(struct mok_trace_event);
}

/* From any thread. */
static inline void mok_trace_write(struct mok_trace *trace, const struct mok_trace_event *event)
{
    uint64_t number = __atomic_fetch_add(&trace->written, 1, __ATOMIC_RELAXED);
    struct mok_trace_event *place = &trace->event[number % trace->capacity];
    uint32_t type = event->type;

    __atomic_store_n(&place->type, MOK_TRACE_NONE, __ATOMIC_RELAXED);
    place->start_ns = event->start_ns;
    place->end_ns = event->end_ns;
    place->queue = event->queue;
    place->layer = event->layer;
    place->op = event->op;
    place->kind = event->kind;
    place->slot = event->slot;
    place->turn = event->turn;
    place->result = event->result;
    place->rows = event->rows;
    __atomic_store_n(&place->type, type, __ATOMIC_RELEASE);
}

#endif
