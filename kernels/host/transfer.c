/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The four transfers: rows pulled from the ranks that own the tokens, results pushed back to their slots there. One
 * task moves rows of one source; sources are visited from this rank's own on.
 */
#include "host.h"

#include <string.h>

#include "ops.h"

/* Moves one padded row; ring: its row of the ring. */
typedef void move_row(const struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_ring *kept,
                      const struct mok_row *row, uint64_t ring);

static void each_row(const struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                     uint64_t index, move_row *move)
{
    const struct mok_schedule *schedule = &op->layer->schedule;
    struct mok_host_ring kept = mok_host_ring_of(op, mok_host_macrobatch(op, group));
    struct mok_host_span span = mok_host_transfer_of(op, group, index);
    uint32_t live;

    for (live = mok_schedule_find(schedule, span.begin); live < schedule->live_experts; live++) {
        uint32_t expert = schedule->live[live];
        uint64_t p, end;

        if (schedule->first[expert] >= span.end)
            break;
        p = mok_max_u64(schedule->start[(uint64_t)expert * schedule->ep + span.source], span.begin);
        end = mok_min_u64(mok_schedule_end(schedule, expert, span.source), span.end);
        for (; p < end; p++)
            move(op, unit, &kept, &schedule->row[p], p - span.base);
    }
}

/* A token's row of a source rank, into the ring as it is or quantised. */
static void fetch(const struct mok_host_op *op, struct mok_host_unit *unit, const void *tokens, uint64_t token,
                  const struct mok_host_rows *rows, uint64_t ring)
{
    uint64_t hidden = op->layer->plan.spec.hidden;
    const uint16_t *from = (const uint16_t *)tokens + token * hidden;

    if (!rows->scale) {
        memcpy(rows->data + ring * hidden * 2, from, hidden * 2);
        return;
    }
    mok_ops_widen(unit->out[0], from, hidden);
    mok_host_store(rows, mok_host_group_values(&op->layer->plan), ring, 0, hidden, unit->out[0]);
}

static void fetch_x(const struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_ring *kept,
                    const struct mok_row *row, uint64_t ring)
{
    fetch(op, unit, op->args->peer[row->rank].x, row->slot / op->layer->plan.spec.topk, &kept->x, ring);
}

static void fetch_d_out(const struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_ring *kept,
                        const struct mok_row *row, uint64_t ring)
{
    const struct mok_engine_layer *layer = op->layer;
    const struct mok_plan *plan = &layer->plan;
    struct mok_host_rows g = mok_host_rows_at(layer, &layer->layout.g, plan->spec.hidden);
    const float *weight = (const float *)(const void *)(layer->sym[row->rank] + plan->sym_topk_weight);

    (void)kept;
    ((float *)(void *)(layer->memory + layer->layout.weight))[ring] = weight[row->slot];
    fetch(op, unit, op->args->peer[row->rank].d_out, row->slot / plan->spec.topk, &g, ring);
}

static void fetch_both(const struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_ring *kept,
                       const struct mok_row *row, uint64_t ring)
{
    fetch_d_out(op, unit, kept, row, ring);
    fetch_x(op, unit, kept, row, ring);
}

void mok_host_dispatch(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                       uint64_t index)
{
    if (op->args->kind == MOK_KIND_FORWARD)
        each_row(op, unit, group, index, fetch_x);
    else if (mok_host_is_kept(op, mok_host_macrobatch(op, group)))
        each_row(op, unit, group, index, fetch_d_out);
    else
        each_row(op, unit, group, index, fetch_both);
}

static void push_y(const struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_ring *kept,
                   const struct mok_row *row, uint64_t ring)
{
    const struct mok_engine_layer *layer = op->layer;
    uint64_t bytes = (uint64_t)layer->plan.spec.hidden * 2;

    (void)unit;
    (void)kept;
    memcpy(layer->sym[row->rank] + layer->plan.sym_slots + row->slot * bytes,
           layer->memory + layer->layout.y + ring * bytes, bytes);
}

static void push_gradients(const struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_ring *kept,
                           const struct mok_row *row, uint64_t ring)
{
    const struct mok_engine_layer *layer = op->layer;
    const struct mok_plan *plan = &layer->plan;
    uint64_t tiles = mok_div_up(plan->spec.intermediate, mok_host_tile_columns(plan, plan->spec.hidden)), i;
    const float *partial = (const float *)(const void *)(layer->memory + layer->layout.partial) + ring * tiles;
    float *d_weight = (float *)(void *)(layer->sym[row->rank] + plan->sym_weight_slots), sum = 0;

    for (i = 0; i < tiles; i++)
        sum = sum + partial[i];
    d_weight[row->slot] = sum;
    push_y(op, unit, kept, row, ring);
}

void mok_host_combine(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                      uint64_t index)
{
    each_row(op, unit, group, index, op->args->kind == MOK_KIND_FORWARD ? push_y : push_gradients);
}
