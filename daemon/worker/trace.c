/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Events of a trace, while one runs: what the dispatcher sees, and what the engine's threads tell of their own work.
 * Never allocates; the oldest events make room for new ones.
 */
#include "dispatcher_internal.h"

/* From a thread of the engine, while `trace` stays: see trace_begin. */
static void work_done(void *cookie, const struct mok_engine_span *span)
{
    struct dispatcher *d = cookie;
    struct mok_trace_event event = { .type = MOK_TRACE_WORK,
                                     .start_ns = span->start_ns,
                                     .end_ns = span->end_ns,
                                     .queue = __atomic_load_n(&d->traced_queue, __ATOMIC_RELAXED),
                                     .layer = __atomic_load_n(&d->traced_layer, __ATOMIC_RELAXED),
                                     .kind = span->work,
                                     .slot = span->slot,
                                     .turn = span->turn };

    mok_trace_write(d->trace, &event);
}

/* The engine's threads look at `trace` only between the two calls of its hook. */
void trace_begin(struct dispatcher *d, struct mok_trace *trace)
{
    if (d->ops->trace && d->trace)
        d->ops->trace(d->engine, NULL, NULL);
    d->trace = trace;
    if (d->ops->trace && trace)
        d->ops->trace(d->engine, work_done, d);
}

static void write_event(struct dispatcher *d, const struct worker_op *op, struct mok_trace_event *event)
{
    event->queue = op->queue->id;
    event->layer = op->layer->id;
    event->op = op->user_data;
    mok_trace_write(d->trace, event);
}

void trace_completed(struct dispatcher *d, const struct worker_op *op, const struct mok_cqe *cqe)
{
    struct mok_trace_event event = { .type = MOK_TRACE_OP,
                                     .start_ns = op->taken_ns,
                                     .end_ns = d->now_ns,
                                     .kind = op->opcode,
                                     .result = cqe->result,
                                     .rows = cqe->rows };

    if (d->trace)
        write_event(d, op, &event);
}

void trace_waited(struct dispatcher *d, const struct worker_op *op, enum mok_latency what, uint64_t since_ns,
                  uint64_t until_ns)
{
    struct mok_trace_event event = {
        .type = MOK_TRACE_WAIT, .start_ns = since_ns, .end_ns = until_ns, .kind = (uint32_t)what
    };

    if (d->trace && until_ns > since_ns)
        write_event(d, op, &event);
}

void trace_work_of(struct dispatcher *d, const struct worker_layer *layer)
{
    if (!d->trace)
        return;
    __atomic_store_n(&d->traced_queue, layer->first->queue->id, __ATOMIC_RELAXED);
    __atomic_store_n(&d->traced_layer, layer->id, __ATOMIC_RELAXED);
}

void trace_phase_next(struct dispatcher *d, const struct worker_layer *layer)
{
    trace_work_of(d, layer);
    if (d->trace)
        d->phase_started_ns = mok_now_ns();
}

void trace_phase_end(struct dispatcher *d, const struct worker_op *op, enum mok_phase phase)
{
    struct mok_trace_event event = {
        .type = MOK_TRACE_PHASE, .start_ns = d->phase_started_ns, .end_ns = d->now_ns, .kind = (uint32_t)phase
    };

    if (d->trace && d->phase_started_ns)
        write_event(d, op, &event);
    d->phase_started_ns = 0;
}

void trace_slept(struct dispatcher *d, uint64_t since_ns, uint64_t until_ns)
{
    struct mok_trace_event event = { .type = MOK_TRACE_SLEEP, .start_ns = since_ns, .end_ns = until_ns };

    if (d->trace)
        mok_trace_write(d->trace, &event);
}
