/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dispatcher's numbers, on a page that mokd reads: plain additions by this one thread. Never allocates, asks the
 * clock for nothing that the dispatcher has not asked already, and what does not fit the page is counted in its totals
 * alone.
 */
#include "dispatcher_internal.h"

#include <string.h>

#include "probes.h"
#include "util.h"

/* Slots of queues that went, beyond one for each that is there. */
#define SPARE_SLOTS 32u

_Static_assert(MOK_STATS_PHASES == MOK_PHASE_WHOLE + 1, "one numbering");
_Static_assert(MOK_STATS_KINDS == MOK_OP_CANCEL + 2, "one numbering, and one for those that are none");

void count_begin(struct mok_stats *stats)
{
    if (stats->magic != MOK_STATS_MAGIC || stats->version != MOK_STATS_VERSION) {
        memset(stats, 0, sizeof(*stats));
        stats->version = MOK_STATS_VERSION;
        stats->bytes = sizeof(*stats);
    }
    for (unsigned i = 0; i < MOK_STATS_QUEUES && i < stats->queues_used; i++)
        __atomic_store_n(&stats->queue[i].queue, 0, __ATOMIC_RELEASE);
    for (unsigned i = 0; i < MOK_STATS_LAYERS && i < stats->layers_used; i++)
        __atomic_store_n(&stats->layer[i].layer, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&stats->in_flight, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&stats->generation, stats->generation + 1, __ATOMIC_RELAXED);
    __atomic_store_n(&stats->magic, MOK_STATS_MAGIC, __ATOMIC_RELEASE);
}

/* ------------------------------------------------------------------ queues and layers */

/* Slots are taken in turn, so that the last numbers of a queue that went stay for a while. */
void count_queue_open(struct dispatcher *d, struct worker_queue *queue)
{
    struct mok_stats *stats = d->stats;
    unsigned bound = 2 * (unsigned)d->tables.queues.count + SPARE_SLOTS, i = d->stats_slot, looked = 0;

    bound = bound < MOK_STATS_QUEUES ? bound : MOK_STATS_QUEUES;
    for (; looked < bound; looked++, i++) {
        i = i < bound ? i : 0;
        if (!stats->queue[i].queue || stats->queue[i].gone)
            break;
    }
    if (looked == bound)
        return;
    struct mok_stats_queue *slot = &stats->queue[i];
    __atomic_store_n(&slot->queue, 0, __ATOMIC_RELEASE);
    memset(slot, 0, sizeof(*slot));
    __atomic_store_n(&slot->queue, queue->id, __ATOMIC_RELEASE);
    if (i >= stats->queues_used)
        __atomic_store_n(&stats->queues_used, i + 1, __ATOMIC_RELEASE);
    queue->stats = slot;
    d->stats_slot = i + 1;
}

void count_queue_gone(struct worker_queue *queue)
{
    if (queue->stats)
        __atomic_store_n(&queue->stats->gone, 1, __ATOMIC_RELEASE);
    queue->stats = NULL;
}

void count_layer_open(struct dispatcher *d, struct worker_layer *layer)
{
    struct mok_stats *stats = d->stats;
    uint32_t experts = layer->plan.local_experts;
    unsigned i = 0;

    while (i < MOK_STATS_LAYERS && stats->layer[i].layer)
        i++;
    if (i == MOK_STATS_LAYERS)
        return;
    struct mok_stats_layer *slot = &stats->layer[i];
    memset(slot, 0, sizeof(*slot));
    slot->local_experts = experts;
    slot->bins = experts < MOK_STATS_BINS ? experts : MOK_STATS_BINS;
    __atomic_store_n(&slot->layer, layer->id, __ATOMIC_RELEASE);
    if (i >= stats->layers_used)
        __atomic_store_n(&stats->layers_used, i + 1, __ATOMIC_RELEASE);
    layer->stats = slot;
}

void count_layer_gone(struct worker_layer *layer)
{
    if (layer->stats)
        __atomic_store_n(&layer->stats->layer, 0, __ATOMIC_RELEASE);
    layer->stats = NULL;
}

/* ------------------------------------------------------------------ operations */

static void in_flight(struct dispatcher *d, struct worker_queue *queue, int32_t by)
{
    __atomic_store_n(&d->stats->in_flight, d->stats->in_flight + (uint32_t)by, __ATOMIC_RELAXED);
    if (queue->stats)
        __atomic_store_n(&queue->stats->in_flight, queue->stats->in_flight + (uint32_t)by, __ATOMIC_RELAXED);
}

void count_taken(struct dispatcher *d, struct worker_op *op)
{
    op->taken_ns = d->now_ns;
    op->waits_ns = 0;
    mok_stats_add(&d->stats->taken[op->opcode], 1);
    in_flight(d, op->queue, 1);
    MOK_PROBE4(op_submit, op->queue->id, op->layer->id, op->opcode, op->user_data);
}

static struct mok_stats_histogram *histogram_of(struct dispatcher *d, const struct worker_op *op,
                                                enum mok_latency latency)
{
    return &d->stats->latency[op->opcode == MOK_OP_BACKWARD][latency];
}

/* Both moments are those of passes, so they are never the wrong way round by more than rounding. */
static uint64_t since(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? now_ns - then_ns : 0;
}

void count_completed(struct dispatcher *d, struct worker_queue *queue, unsigned opcode, const struct worker_op *op,
                     const struct mok_cqe *cqe)
{
    struct mok_stats *stats = d->stats;
    unsigned kind = opcode < MOK_STATS_KINDS - 1u ? opcode : MOK_STATS_KINDS - 1u;
    unsigned code = cqe->result < 0 ? (unsigned)-cqe->result : 0;

    mok_stats_add(&stats->ops[kind][code < MOK_STATS_CODES ? code : MOK_STATS_CODES - 1u], 1);
    if (queue->stats) {
        mok_stats_add(&queue->stats->ops, 1);
        mok_stats_add(&queue->stats->rows, cqe->rows);
        mok_stats_add(&queue->stats->device_ns, cqe->device_ns);
        mok_stats_add(&queue->stats->errors, code != 0);
    }
    if (!op) {
        mok_stats_add(&stats->taken[kind], 1);
        return;
    }
    in_flight(d, queue, -1);
    mok_stats_add(&stats->rows, cqe->rows);
    mok_stats_add(&stats->tokens, code ? 0 : op->tokens);
    mok_stats_record(histogram_of(d, op, MOK_LATENCY_TOTAL), since(d->now_ns, op->taken_ns));
    trace_completed(d, op, cqe);
    MOK_PROBE4(op_finish, queue->id, op->layer->id, cqe->result, op->user_data);
}

/* ------------------------------------------------------------------ phases */

void count_phase_start(struct dispatcher *d, struct worker_layer *layer, enum mok_phase phase)
{
    struct worker_op *op = layer->first;

    if (phase == MOK_PHASE_PREPARE || phase == MOK_PHASE_WHOLE) {
        mok_stats_record(histogram_of(d, op, MOK_LATENCY_QUEUE), since(d->now_ns, op->taken_ns));
        trace_waited(d, op, MOK_LATENCY_QUEUE, op->taken_ns, d->now_ns);
        MOK_PROBE4(op_start, op->queue->id, layer->id, op->opcode, op->user_data);
        return;
    }
    enum mok_latency waited = phase == MOK_PHASE_MAIN ? MOK_LATENCY_READY : MOK_LATENCY_PUSH;
    mok_stats_record(histogram_of(d, op, waited), since(layer->runnable_ns, op->waits_ns));
    trace_waited(d, op, waited, op->waits_ns, layer->runnable_ns);
}

static void count_experts(struct mok_stats *stats, struct mok_stats_layer *slot, const struct worker_layer *layer,
                          const struct mok_op_result *result)
{
    uint32_t experts = layer->plan.local_experts;
    uint64_t most = 0;

    for (uint32_t e = 0; e < experts; e++) {
        uint64_t rows = result->expert_rows[e];
        most = rows > most ? rows : most;
        if (rows && slot)
            mok_stats_add(&slot->expert_rows[(uint64_t)e * slot->bins / experts], rows);
    }
    mok_stats_add(&stats->expert_max_rows, most);
    mok_stats_add(&stats->expert_mean_rows, result->rows / experts);
    if (!slot)
        return;
    mok_stats_add(&slot->rows, result->rows);
    mok_stats_add(&slot->max_rows, most);
    mok_stats_set(&slot->last_rows, result->rows);
    mok_stats_set(&slot->last_max_rows, most);
    mok_stats_add(&slot->ops, 1);
}

static void count_main(struct dispatcher *d, const struct worker_layer *layer, const struct mok_op_result *result)
{
    struct mok_stats *stats = d->stats;

    mok_stats_add(&stats->schedule_ns, result->schedule_ns);
    mok_stats_add(&stats->transfer_ns, result->transfer_ns);
    mok_stats_add(&stats->compute_ns, result->compute_ns);
    mok_stats_add(&stats->macrobatches, result->macrobatches);
    mok_stats_add(&stats->minibatches, result->minibatches);
    mok_stats_add(&stats->ring_rows, result->padded_rows);
    mok_stats_add(&stats->ring_capacity, result->macrobatches * layer->plan.ring_rows);
    if (result->expert_rows)
        count_experts(stats, layer->stats, layer, result);
}

void count_phase_end(struct dispatcher *d, struct worker_layer *layer, const struct mok_op_result *result)
{
    struct mok_stats *stats = d->stats;
    struct worker_op *op = layer->first;

    op->waits_ns = d->now_ns;
    trace_phase_end(d, op, d->running_phase);
    mok_stats_add(&stats->phases[d->running_phase], 1);
    mok_stats_add(&stats->phase_ns[d->running_phase], result->device_ns);
    if (result->status < 0 || d->running_phase == MOK_PHASE_PREPARE)
        return;
    if (d->running_phase != MOK_PHASE_REDUCE)
        count_main(d, layer, result);
    mok_stats_record(histogram_of(d, op, d->running_phase == MOK_PHASE_REDUCE ? MOK_LATENCY_REDUCE : MOK_LATENCY_MAIN),
                     result->device_ns);
}
