/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The operation that a client has not submitted yet but, by its habits, will submit next: it is on the device behind a
 * word of ours before it comes, so that only the word is left to be written then. It is asked back as soon as anything
 * else comes. Never runs what nobody has submitted.
 */
#include "dispatcher_internal.h"

#include <string.h>

#include "util.h"

/*
 * After so long on the device: an operation that is over sooner leaves the driver's calls quick, and a stream that
 * waits makes it slower to start others' kernels.
 */
#define LONG_NS 200000u
#define EXPECT_NS 100000000u /* one that does not come is given up after so long: who is idle holds nothing */
#define BACK_OFF_NS 10000000u

/* A layer of this queue, whose habits are those of today; or NULL. */
static struct worker_layer *find(const struct dispatcher *d, const struct worker_queue *queue, uint32_t id)
{
    struct worker_node *node = id ? worker_index_find(&d->tables.layers, id) : NULL;
    struct worker_layer *layer = node ? worker_container_of(node, struct worker_layer, dispatch_node) : NULL;

    return layer && layer->queue == queue ? layer : NULL;
}

/* ------------------------------------------------------------------ habits */

static void describe(const struct worker_op *op, struct mok_op_args *ret_args, struct mok_peer *ret_peer)
{
    phases_fill_args(op->layer, op, ret_args);
    ret_args->peer = NULL;
    ahead_fill_peer(op, ret_peer);
}

static bool known(const struct dispatcher *d, const struct worker_habit *habit)
{
    return habit->epoch == d->epoch;
}

static bool same(const struct worker_habit *habit, const struct mok_op_args *args, const struct mok_peer *peer)
{
    return memcmp(&habit->args, args, sizeof(*args)) == 0 && habit->peer.x == peer->x &&
           habit->peer.d_out == peer->d_out && habit->peer.tokens == peer->tokens;
}

void expect_learn(struct dispatcher *d, const struct worker_op *op)
{
    struct worker_queue *queue = op->queue;
    struct worker_layer *layer = op->layer, *last = find(d, queue, queue->last_layer);
    uint32_t last_kind = queue->last_kind;
    struct mok_op_args args;
    struct mok_peer peer;

    queue->last_layer = 0;
    if (!d->ops->start_ahead || !ahead_can_be_whole(op))
        return;
    describe(op, &args, &peer);
    struct worker_habit *habit = &layer->habit[args.kind];
    bool again = known(d, habit) && same(habit, &args, &peer);
    if (last) {
        struct worker_habit *before = &last->habit[last_kind];
        before->sure = again && before->next_layer == layer->id && before->next_kind == args.kind;
        before->next_layer = layer->id;
        before->next_kind = args.kind;
    }
    if (!again)
        *habit = (struct worker_habit){ .args = args, .peer = peer, .epoch = d->epoch };
    queue->last_layer = layer->id;
    queue->last_kind = args.kind;
}

void expect_forget(struct dispatcher *d)
{
    d->epoch++;
    expect_drop(d);
}

/* ------------------------------------------------------------------ to the device and back */

/* While the one that runs is all that there is, and what comes behind it is as certain as can be. */
static struct worker_habit *candidate(const struct dispatcher *d, struct worker_layer **ret_layer)
{
    struct worker_layer *running = d->running;
    const struct worker_op *op = running ? running->first : NULL;

    if (!op || d->running_phase != MOK_PHASE_WHOLE || d->now_ns - d->running_since_ns < LONG_NS ||
        d->active != running || running->active_next || op->queue->last != op || op->dying_code || !op->queue->open ||
        op->queue->last_layer != running->id)
        return NULL;
    const struct worker_habit *habit = &running->habit[op->queue->last_kind];
    struct worker_layer *layer = known(d, habit) && habit->sure ? find(d, op->queue, habit->next_layer) : NULL;
    if (!layer || layer->draining || worker_layer_is_over(layer) || layer->group->closed)
        return NULL;
    struct worker_habit *next = &layer->habit[habit->next_kind];
    *ret_layer = layer;
    return known(d, next) ? next : NULL;
}

void expect_offer(struct dispatcher *d)
{
    const struct mok_engine_gate gate = { 0 };
    struct worker_layer *layer;
    const struct worker_habit *habit = candidate(d, &layer);

    if (!habit || !ahead_may(d))
        return;
    d->ahead.args = habit->args;
    d->ahead.peer = habit->peer;
    d->ahead.args.peer = &d->ahead.peer;
    if (d->ops->start_ahead(layer->engine_layer, &d->ahead.args, MOK_PHASE_WHOLE, &gate) < 0) {
        d->ahead.not_before_ns = d->now_ns + BACK_OFF_NS;
        ahead_let_go(d);
        return;
    }
    d->ahead.expected = layer;
    d->ahead.phase = MOK_PHASE_WHOLE;
    d->ahead.withdrawn = false;
    d->ahead.until_ns = d->now_ns + EXPECT_NS;
}

static bool is_it(const struct dispatcher *d, const struct worker_op *op)
{
    const struct worker_habit expected = { .args = d->ahead.args, .peer = d->ahead.peer };
    struct mok_op_args args;
    struct mok_peer peer;

    if (d->ahead.withdrawn || op->layer != d->ahead.expected || !ahead_can_be_whole(op) || !ahead_comes_next(d, op))
        return false;
    describe(op, &args, &peer);
    args.peer = &d->ahead.peer;
    return same(&expected, &args, &peer);
}

void expect_meet(struct dispatcher *d, struct worker_op *op)
{
    if (!d->ahead.expected)
        return;
    if (!is_it(d, op)) {
        ahead_withdraw(d);
        return;
    }
    d->ahead.expected = NULL;
    d->ahead.op = op;
    d->ahead.we_let_go = true;
}

void expect_drop(struct dispatcher *d)
{
    if (d->ahead.expected)
        ahead_withdraw(d);
}

bool expect_poll(struct dispatcher *d)
{
    struct mok_op_result result = { 0 };

    if (d->ops->poll(d->engine, &result)) { /* an end in its own right: the device fails, as the next start will say */
        d->ahead.not_before_ns = d->now_ns + BACK_OFF_NS;
        ahead_let_go(d);
        d->something_ended = true;
        return true;
    }
    if (d->now_ns >= d->ahead.until_ns)
        ahead_withdraw(d);
    return false;
}
