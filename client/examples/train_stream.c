/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Training on a GPU: a step is queued on one stream, and this process runs a step ahead of it. It waits for the GPU
 * where ranks add their gradients, and every few steps to look at the losses and at what became of the operations.
 * Nothing is saved or shown that has not been looked at. Unlike on the host, a step cannot be done again once mokd has
 * gone away, since the next one has begun by then: the job ends, and goes on from its checkpoint.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "report.h"
#include "train_private.h"

#define LOOK_EVERY 10u /* steps; they and two more numbers are summed over the ranks at once */

_Static_assert(LOOK_EVERY <= MODEL_LOSSES && LOOK_EVERY + 2 <= COMM_MAX_SUM, "losses are kept and summed until a look");

/* What the report is about: the steps after the first look, when all kernels have run before. */
struct span {
    double seconds;
    struct moe_totals totals;
};

static struct span now(const struct rank *r)
{
    struct timespec ts;

    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (struct span){ (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec, moe_totals(r->moe) };
}

/* Through host memory, in rank order. Each rank's experts have their gradients summed by the layer. */
static int sum_gradients(struct rank *r)
{
    size_t count = model_dense(r->model).count;
    float *gradients = model_gradients(r->model);
    int rc;

    if (r->options->ranks == 1)
        return 0;
    r->backend->mark(PHASE_SUM);
    rc = r->backend->get(r->gradients, gradients, count * sizeof(float));
    if (rc == 0)
        rc = comm_sum(r->comm, r->rank, r->gradients, count);
    if (rc == 0)
        rc = r->backend->put(gradients, r->gradients, count * sizeof(float));
    return rc;
}

static int queue_step(struct rank *r)
{
    struct batch batch = train_batch(r);
    int rc = model_step(r->model, r->moe, &batch, train_scale(r));

    if (rc == 0)
        rc = sum_gradients(r);
    if (rc < 0)
        return rc;
    r->step++;
    r->backend->mark(PHASE_UPDATE);
    model_update(r->model, r->moe, &r->adamw, r->step);
    rc = model_publish(r->model, r->moe);
    r->backend->mark(PHASE_END);
    return rc;
}

/* Collective: waits for the steps since the last look, and tells their losses. */
static int look(struct rank *r, struct progress *progress, uint64_t looked, int *ret_stop)
{
    const struct options *o = r->options;
    double sums[COMM_MAX_SUM] = { 0 }, tokens = (double)o->ranks * o->batch * o->seq;
    unsigned count = (unsigned)(r->step - looked);
    int rc = moe_settle(r->moe);

    if (rc == -MOK_EDAEMON)
        return fail(rc, "mokd went away; what was queued is lost, --resume continues from a checkpoint");
    if (rc == 0)
        rc = model_losses(r->model, looked, count, sums);
    if (rc < 0)
        return rc;
    sums[count] = comm_stop_requested(r->comm);
    rc = comm_sum_double(r->comm, r->rank, sums, count + 1);
    if (rc < 0)
        return rc;
    *ret_stop = sums[count] > 0;
    for (unsigned i = 0; i < count; i++)
        if (!isfinite(sums[i]))
            return fail(-MOK_ESTATE, "step %" PRIu64 ": the loss is not finite; try a smaller --lr", looked + i + 1);
        else
            sums[i] /= tokens;
    return r->rank == 0 ? progress_steps(progress, looked + 1, sums, count) : 0;
}

static void line(const char *what, double ms, double step_ms)
{
    printf("  %-30s %8.3f ms  %5.1f %%\n", what, ms, 100 * ms / step_ms);
}

/*
 * Where a step's time went on the stream. Hand-over: what a layer's calls took on the stream beyond the device time
 * that the worker counts. Idle is that, and what lies between two steps because the second was queued too late.
 */
static void report(const struct rank *r, const struct span *from, const struct span *to)
{
    double ms[PHASES], all = 0, wall, hand_over, device;
    uint64_t operations = to->totals.operations - from->totals.operations;
    unsigned steps = r->backend->phases(ms);

    if (r->rank != 0)
        return;
    if (steps == 0) {
        note("--report: the first %u steps do not count", LOOK_EVERY);
        return;
    }
    for (unsigned p = 0; p < PHASES; p++)
        all += ms[p] /= steps;
    wall = (to->seconds - from->seconds) * 1e3 / steps;
    device = (double)(to->totals.device_ns - from->totals.device_ns) * 1e-6 / steps;
    hand_over = ms[PHASE_FORWARD] + ms[PHASE_BACKWARD] - device;
    printf("report of %u steps, rank 0, a step:        %8.3f ms\n", steps, wall);
    line("MoE, forward", ms[PHASE_FORWARD], wall);
    line("MoE, backward", ms[PHASE_BACKWARD], wall);
    line("model around the layers", ms[PHASE_DENSE], wall);
    if (r->options->ranks > 1)
        line("sum of gradients over ranks", ms[PHASE_SUM], wall);
    line("optimizer, weights to BF16", ms[PHASE_UPDATE], wall);
    line("idle: hand-over, in MoE", hand_over, wall);
    line("idle: between steps", wall - all, wall);
    printf("  hand-over %.1f us an operation, %.0f operations a step\n", hand_over * 1e3 * steps / (double)operations,
           (double)operations / steps);
}

int train_stream(struct rank *r, struct progress *progress, int *ret_stopped)
{
    const struct options *o = r->options;
    uint64_t looked = r->step;
    struct span from = { 0 }, to;

    r->gradients = calloc(o->ranks > 1 ? model_dense(r->model).count : 1, sizeof(float));
    if (!r->gradients)
        return fail(-MOK_ENOMEM, "no memory");
    while (r->step < o->steps && !*ret_stopped) {
        int rc = queue_step(r), due = r->step == o->steps || (o->save_every && r->step % o->save_every == 0);
        double before[PHASES];

        if (rc == -MOK_EDAEMON)
            return fail(rc, "mokd went away; what was queued is lost, --resume continues from a checkpoint");
        if (rc < 0)
            return rc;
        if (!due && r->step - looked < LOOK_EVERY)
            continue;
        rc = look(r, progress, looked, ret_stopped);
        looked = r->step;
        if (rc == 0 && o->save_every && due && r->step < o->steps && !*ret_stopped)
            rc = train_save(r);
        if (rc < 0)
            return rc;
        if (from.seconds <= 0 && o->report) {
            r->backend->phases(before);
            from = now(r);
        }
    }
    to = now(r);
    if (o->report)
        report(r, &from, &to);
    *ret_stopped = r->step < o->steps;
    return 0;
}
