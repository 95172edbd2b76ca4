/* SPDX-License-Identifier: Apache-2.0 */
/* See world.h. */
#include "world.h"

#include <stdlib.h>
#include <string.h>

#include "dispatch.h"
#include "fairness.h"
#include "rng.h"
#include "schedule.h"

/* Durations of the model, in ns. */
enum {
    LINK_NS = 1500,
    PREPARE_NS = 5000,
    ROW_NS = 50,
    MAIN_NS = 30000,
    REDUCE_NS = 20000,
    BURST_NS = 20000000,
    GAP_NS = 60000
};

struct seat { /* one layer of one job on one device */
    struct mok_dispatch_view view;
    struct mok_dispatch_op op;
    enum mok_dispatch_action action;
    struct fair_session *session;
    uint32_t job;
    uint64_t submitted, seq, completed;
    uint64_t order;
    bool begun;
};

struct device {
    struct seat *seat; /* [jobs * layers] */
    struct fair_share share;
    struct fair_session *session; /* [jobs] */
    struct fair_user *user;       /* [jobs] */
    uint64_t *job_ns;             /* [jobs] */
    uint64_t order, busy_ns;
    struct seat *running;
    struct seat *holder; /* with `hold` */
    uint64_t last_ns;    /* of the running phase */
};

enum event_kind { SUBMIT, PHASE_END, BELL };

struct event {
    uint64_t at, number; /* earlier ones first, then those that were made first */
    enum event_kind kind;
    uint32_t device, seat;
};

struct world {
    struct world_options o;
    uint32_t ranks, seats;
    struct rng rng;
    uint64_t now, made;
    struct device *device;
    uint64_t *rows; /* [jobs][ranks] */
    struct event *heap;
    uint64_t events, room;
    bool out_of_memory, someone_idle;
    struct world_result result;
};

/* ------------------------------------------------------------------ events */

static bool before(const struct event *a, const struct event *b)
{
    return a->at != b->at ? a->at < b->at : a->number < b->number;
}

static void swap(struct event *a, struct event *b)
{
    struct event c = *a;
    *a = *b;
    *b = c;
}

static void push(struct world *w, uint64_t delay, enum event_kind kind, uint32_t device, uint32_t seat)
{
    if (w->events == w->room) {
        uint64_t room = w->room ? 2 * w->room : 1024;
        struct event *heap = realloc(w->heap, room * sizeof(*heap));
        if (!heap) {
            w->out_of_memory = true;
            return;
        }
        w->heap = heap;
        w->room = room;
    }
    uint64_t i = w->events++;
    w->heap[i] = (struct event){ w->now + delay, w->made++, kind, device, seat };
    for (; i > 0 && before(&w->heap[i], &w->heap[(i - 1) / 2]); i = (i - 1) / 2)
        swap(&w->heap[i], &w->heap[(i - 1) / 2]);
}

static struct event pop(struct world *w)
{
    struct event first = w->heap[0];

    w->heap[0] = w->heap[--w->events];
    for (uint64_t i = 0;;) {
        uint64_t least = i;
        for (uint64_t child = 2 * i + 1; child <= 2 * i + 2 && child < w->events; child++)
            if (before(&w->heap[child], &w->heap[least]))
                least = child;
        if (least == i)
            return first;
        swap(&w->heap[i], &w->heap[least]);
        i = least;
    }
}

/* ------------------------------------------------------------------ a worker */

static void ring_peers(struct world *w, const struct seat *seat, uint32_t number)
{
    w->result.flags++;
    for (uint32_t p = 0; p < seat->view.ep; p++)
        if (p != seat->view.rank) {
            w->result.bells++;
            push(w, LINK_NS, BELL, p, number);
        }
}

/* A rank's next round: its layers in its order, with its own work in between. */
static void submit_round(struct world *w, uint32_t job, uint32_t rank, uint64_t delay)
{
    uint32_t layers = w->o.layers, order[64];

    for (uint32_t l = 0; l < layers; l++)
        order[l] = w->o.order == WORLD_OPPOSITE && rank % 2 ? layers - 1 - l : l;
    for (uint32_t l = 0; w->o.order == WORLD_RANDOM && l + 1 < layers; l++) {
        uint32_t other = l + rng_below(&w->rng, layers - l), kept = order[l];
        order[l] = order[other];
        order[other] = kept;
    }
    for (uint32_t l = 0; l < layers; l++, delay += GAP_NS)
        push(w, delay + rng_below(&w->rng, GAP_NS / 4), SUBMIT, rank, job * layers + order[l]);
}

/* All layers of a job have completed `rounds` on a device. */
static bool job_is_at(const struct world *w, const struct device *d, uint32_t job, uint64_t rounds)
{
    for (uint32_t l = 0; l < w->o.layers; l++)
        if (d->seat[job * w->o.layers + l].completed < rounds)
            return false;
    return true;
}

static void completed(struct world *w, struct device *d, struct seat *seat)
{
    w->result.operations++;
    w->result.failed += seat->op.result.status < 0;
    seat->completed++;
    seat->begun = false;
    if (d->holder == seat)
        d->holder = NULL;
    if (!job_is_at(w, d, seat->job, seat->completed))
        return;
    if (seat->completed < w->o.rounds)
        submit_round(w, seat->job, seat->view.rank, GAP_NS);
    else
        w->someone_idle = true;
}

/* Moves the first operation of a seat as far as it goes without the engine. */
static void step(struct world *w, struct device *d, uint32_t number)
{
    struct seat *seat = &d->seat[number];

    while (seat->action == MOK_ACT_WAIT && (seat->begun || seat->seq < seat->submitted)) {
        bool moved = false;
        if (!seat->begun) {
            struct mok_op_info info = { .kind = MOK_KIND_FORWARD, .tokens = w->o.tokens };
            mok_dispatch_begin(&seat->op, ++seat->seq, &info);
            seat->begun = true;
        }
        enum mok_dispatch_action action = mok_dispatch_step(&seat->op, &seat->view, w->now, &moved);
        w->result.looks++;
        if (moved)
            ring_peers(w, seat, number);
        if (action == MOK_ACT_WAIT)
            return;
        if (action == MOK_ACT_COMPLETE) {
            completed(w, d, seat);
            continue;
        }
        seat->action = action;
        seat->order = ++d->order;
        fair_wake(&d->share, seat->session);
    }
}

static uint64_t duration(const struct world *w, const struct seat *seat)
{
    switch (seat->action) {
    case MOK_ACT_PREPARE:
        return PREPARE_NS;
    case MOK_ACT_MAIN:
        return MAIN_NS + ROW_NS * w->rows[(uint64_t)seat->job * w->ranks + seat->view.rank];
    default:
        return REDUCE_NS;
    }
}

static void start(struct world *w, struct device *d, uint32_t index)
{
    struct seat *best = NULL;

    if (d->running)
        return;
    for (uint32_t s = 0; s < w->seats; s++) {
        struct seat *seat = &d->seat[s];
        if (d->holder && d->holder != seat)
            continue;
        if (seat->action != MOK_ACT_WAIT &&
            (!best || fair_before(seat->session, seat->order, best->session, best->order)))
            best = seat;
    }
    if (!best)
        return;
    fair_pick(&d->share, best->session);
    d->running = best;
    d->holder = w->o.hold ? best : NULL;
    d->last_ns = duration(w, best);
    push(w, d->last_ns, PHASE_END, index, (uint32_t)(best - d->seat));
}

static void phase_end(struct world *w, struct device *d)
{
    struct seat *seat = d->running;
    struct mok_op_result result = { .rows = 1, .device_ns = d->last_ns };

    d->running = NULL;
    d->busy_ns += d->last_ns;
    if (!w->someone_idle)
        d->job_ns[seat->job] += d->last_ns;
    fair_charge(seat->session, d->last_ns);
    mok_dispatch_phase_done(&seat->op, &result);
    seat->action = MOK_ACT_WAIT;
}

static void handle(struct world *w, const struct event *e)
{
    struct device *d = &w->device[e->device];
    struct seat *seat = &d->seat[e->seat];

    if (e->kind == SUBMIT)
        seat->submitted++;
    else if (e->kind == PHASE_END)
        phase_end(w, d);
    step(w, d, e->seat);
    start(w, d, e->device);
}

/* ------------------------------------------------------------------ set-up */

/* How many rows each rank gets of a job, by the schedule's own count of random routing. */
static int count_rows(struct world *w, uint32_t job)
{
    uint32_t local = w->o.experts_per_rank, experts = local * w->ranks;
    uint64_t slots = (uint64_t)w->o.tokens * w->o.topk;
    int32_t *ids = malloc(slots * sizeof(*ids));
    uint64_t *count = malloc(local * sizeof(*count));

    for (uint32_t source = 0; ids && count && source < w->ranks; source++) {
        for (uint64_t i = 0; i < slots; i++)
            ids[i] = (int32_t)rng_below(&w->rng, experts);
        for (uint32_t r = 0; r < w->ranks; r++) {
            mok_schedule_count(ids, slots, r * local, local, count);
            for (uint32_t e = 0; e < local; e++)
                w->rows[(uint64_t)job * w->ranks + r] += count[e];
        }
    }
    int code = ids && count ? 0 : -1;
    free(ids);
    free(count);
    return code;
}

static void begin_job(struct world *w, uint32_t job, uint32_t rank)
{
    bool late = w->o.late_ns && rank == job % w->ranks;

    submit_round(w, job, rank, late ? w->o.late_ns : rng_below(&w->rng, GAP_NS));
}

static int open_device(struct world *w, uint32_t rank)
{
    struct device *d = &w->device[rank];

    d->seat = calloc(w->seats, sizeof(*d->seat));
    d->session = calloc(w->o.jobs, sizeof(*d->session));
    d->user = calloc(w->o.jobs, sizeof(*d->user));
    d->job_ns = calloc(w->o.jobs, sizeof(*d->job_ns));
    if (!d->seat || !d->session || !d->user || !d->job_ns)
        return -1;
    d->share.burst_ns = BURST_NS;
    for (uint32_t j = 0; j < w->o.jobs; j++)
        fair_join(&d->share, &d->session[j], 1000 + j, &d->user[j]);
    return 0;
}

static void seat_ranks(struct world *w, struct mok_layer_flags *flags)
{
    for (uint32_t r = 0; r < w->ranks; r++)
        for (uint32_t s = 0; s < w->seats; s++) {
            struct seat *seat = &w->device[r].seat[s];
            seat->job = s / w->o.layers;
            seat->session = &w->device[r].session[seat->job];
            seat->view = (struct mok_dispatch_view){ .ep = w->ranks, .rank = r };
            for (uint32_t p = 0; p < w->ranks; p++)
                seat->view.flags[p] = &flags[(uint64_t)s * w->ranks + p];
        }
}

static void summarise(struct world *w)
{
    struct world_result *result = &w->result;
    uint64_t least = UINT64_MAX, most = 0;

    result->virtual_ns = w->now;
    result->done = result->operations == (uint64_t)w->ranks * w->seats * w->o.rounds;
    for (uint32_t r = 0; r < w->ranks; r++)
        result->busiest_ns = w->device[r].busy_ns > result->busiest_ns ? w->device[r].busy_ns : result->busiest_ns;
    for (uint32_t j = 0; j < w->o.jobs; j++) {
        uint64_t ns = 0;
        for (uint32_t r = 0; r < w->ranks; r++)
            ns += w->device[r].job_ns[j];
        least = ns < least ? ns : least;
        most = ns > most ? ns : most;
    }
    result->fair_spread = least ? (double)most / (double)least : 0;
}

static void close_world(struct world *w, struct mok_layer_flags *flags)
{
    for (uint32_t r = 0; w->device && r < w->ranks; r++) {
        free(w->device[r].seat);
        free(w->device[r].session);
        free(w->device[r].user);
        free(w->device[r].job_ns);
    }
    free(w->device);
    free(w->rows);
    free(w->heap);
    free(flags);
}

int world_run(const struct world_options *options, struct world_result *ret)
{
    struct world w = { .o = *options, .ranks = options->nodes * options->devices, .rng = { options->seed } };
    w.seats = options->jobs * options->layers;
    uint64_t bytes = (uint64_t)w.seats * w.ranks * sizeof(struct mok_layer_flags);
    struct mok_layer_flags *flags = aligned_alloc(128, (bytes + 127) / 128 * 128);
    int code = 0;

    w.device = calloc(w.ranks, sizeof(*w.device));
    w.rows = calloc((size_t)options->jobs * w.ranks, sizeof(*w.rows));
    if (!flags || !w.device || !w.rows)
        code = -1;
    for (uint32_t r = 0; r < w.ranks && code == 0; r++)
        code = open_device(&w, r);
    for (uint32_t j = 0; j < options->jobs && code == 0; j++)
        code = count_rows(&w, j);
    if (code == 0) {
        memset(flags, 0, bytes);
        seat_ranks(&w, flags);
        for (uint32_t r = 0; r < w.ranks; r++)
            for (uint32_t j = 0; j < options->jobs; j++)
                begin_job(&w, j, r);
        while (w.events && !w.out_of_memory) {
            struct event e = pop(&w);
            w.now = e.at;
            handle(&w, &e);
        }
        summarise(&w);
        *ret = w.result;
        code = w.out_of_memory ? -1 : 0;
    }
    close_world(&w, flags);
    return code;
}
