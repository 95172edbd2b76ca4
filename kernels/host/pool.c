/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine's threads and how they take tasks (host.h says by which rules). Everything that orders tasks happens under
 * one lock; tasks run outside it. A phase whose tasks wait for nothing that runs ends with an internal error.
 */
#include "host.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

uint64_t mok_host_now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Adds a task's time to the kind of work it was. */
static void account(struct mok_op_result *result, enum mok_host_stage stage, uint64_t ns)
{
    switch (stage) {
    case MOK_STAGE_COUNT:
    case MOK_STAGE_SCAN:
    case MOK_STAGE_FILL:
        result->schedule_ns += ns;
        return;
    case MOK_STAGE_DISPATCH:
    case MOK_STAGE_COMBINE:
        result->transfer_ns += ns;
        return;
    case MOK_STAGE_CHECK:
    case MOK_STAGE_SAVE:
    case MOK_STAGE_REDUCE:
        return;
    default:
        result->compute_ns += ns;
    }
}

static void complete_group(struct mok_engine *engine, const struct mok_host_group *group)
{
    struct mok_host_op *op = &engine->op;

    mok_host_progress_of(op, group->stage, group->slot)->turns++;
    op->completions++;
    if (group->stage == MOK_STAGE_WGRAD)
        op->wgrads++;
    pthread_cond_broadcast(&engine->moved);
}

/* True and the group at the head of a list if it can start now; *ret_end: nothing is left in the list. */
static bool open_head(struct mok_engine *engine, enum mok_host_list list, bool *ret_end)
{
    struct mok_host_op *op = &engine->op;
    __typeof__(op->list[0]) *head = &op->list[list];

    *ret_end = false;
    while (!head->open) {
        enum mok_host_at at = op->program->group(op, list, head->at, &head->group);

        if (at == MOK_AT_END) {
            *ret_end = true;
            return false;
        }
        if (at == MOK_AT_LATER || (at == MOK_AT_GROUP && !op->program->ready(op, &head->group)))
            return false;
        head->at++;
        if (at == MOK_AT_SKIP)
            continue;
        if (head->group.tasks == 0) {
            complete_group(engine, &head->group);
            continue;
        }
        mok_host_progress_of(op, head->group.stage, head->group.slot)->left = head->group.tasks;
        if (engine->told)
            mok_host_progress_of(op, head->group.stage, head->group.slot)->started_ns = mok_host_now_ns();
        head->next = 0;
        head->open = true;
    }
    return true;
}

static bool take(struct mok_engine *engine, enum mok_host_list list, struct mok_host_group *ret_group,
                 uint64_t *ret_index, bool *ret_end)
{
    __typeof__(engine->op.list[0]) *head = &engine->op.list[list];

    if (!open_head(engine, list, ret_end))
        return false;
    *ret_group = head->group;
    *ret_index = head->next++;
    if (head->next == head->group.tasks)
        head->open = false;
    return true;
}

static enum mok_engine_work work_of(enum mok_host_stage stage)
{
    static const enum mok_engine_work works[MOK_STAGES] = {
        [MOK_STAGE_COUNT] = MOK_WORK_SCHEDULE,           [MOK_STAGE_SCAN] = MOK_WORK_SCHEDULE,
        [MOK_STAGE_FILL] = MOK_WORK_SCHEDULE,            [MOK_STAGE_DISPATCH] = MOK_WORK_DISPATCH,
        [MOK_STAGE_GATE_UP] = MOK_WORK_GATE_UP,          [MOK_STAGE_DOWN] = MOK_WORK_DOWN,
        [MOK_STAGE_COMBINE] = MOK_WORK_COMBINE,          [MOK_STAGE_D_HIDDEN] = MOK_WORK_D_HIDDEN,
        [MOK_STAGE_D_INPUT] = MOK_WORK_D_INPUT,          [MOK_STAGE_WGRAD] = MOK_WORK_WGRAD,
        [MOK_STAGE_SHARED_GATE_UP] = MOK_WORK_SHARED,    [MOK_STAGE_SHARED_DOWN] = MOK_WORK_SHARED,
        [MOK_STAGE_SHARED_D_HIDDEN] = MOK_WORK_SHARED,   [MOK_STAGE_SHARED_D_INPUT] = MOK_WORK_SHARED,
        [MOK_STAGE_SHARED_WGRAD] = MOK_WORK_SHARED,      [MOK_STAGE_REDUCE] = MOK_WORK_REDUCE,
    };

    return works[stage];
}

/* A turn that began before anybody wanted to know has no beginning to tell. */
static void tell(struct mok_engine *engine, const struct mok_host_group *group, struct mok_host_progress *progress)
{
    struct mok_engine_span span = { .work = work_of(group->stage),
                                    .slot = group->slot,
                                    .turn = (uint32_t)group->turn,
                                    .start_ns = progress->started_ns,
                                    .end_ns = mok_host_now_ns() };

    progress->started_ns = 0;
    if (span.start_ns)
        engine->told(engine->told_cookie, &span);
}

static void finish(struct mok_engine *engine, const struct mok_host_group *group)
{
    struct mok_host_progress *progress = mok_host_progress_of(&engine->op, group->stage, group->slot);

    if (--progress->left > 0)
        return;
    if (engine->told)
        tell(engine, group, progress);
    complete_group(engine, group);
}

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void chaos(struct mok_host_unit *unit)
{
    uint32_t most = unit->engine->config.chaos_delay_us;

    if (most > 0)
        usleep((useconds_t)(next_random(&unit->random) % (most + 1ull)));
}

/* Who waits for what, when nothing that runs could end the wait: a fault in the order of the lists. */
static void fail_stuck(struct mok_host_op *op)
{
    const struct mok_host_group *group = &op->list[MOK_LIST_COMPUTE].group;

    op->result.status = -MOK_EINTERNAL;
    op->result.bad_value = group->stage;
    op->result.bad_token = group->turn;
    op->result.bad_slot = group->slot;
}

/* One unit's share of a phase; called and returns with the lock held. */
static void run_tasks(struct mok_engine *engine, struct mok_host_unit *unit)
{
    struct mok_host_op *op = &engine->op;
    enum mok_host_list first =
        op->entered++ < op->layer->plan.comm_units ? MOK_LIST_COMM : MOK_LIST_COMPUTE;
    enum mok_host_list second = first == MOK_LIST_COMM ? MOK_LIST_COMPUTE : MOK_LIST_COMM;

    op->inside++;
    for (;;) {
        uint64_t index, completions = op->completions;
        struct mok_host_group group;
        bool first_ended, second_ended = false;

        if (engine->aborted && op->result.status == 0)
            op->result.status = -MOK_ECANCELED;
        if (op->result.status < 0)
            break;
        if (take(engine, first, &group, &index, &first_ended) ||
            take(engine, second, &group, &index, &second_ended)) {
            uint64_t ns;

            op->running++;
            pthread_mutex_unlock(&engine->lock);
            chaos(unit);
            ns = mok_host_now_ns();
            op->program->task(op, unit, &group, index);
            ns = mok_host_now_ns() - ns;
            pthread_mutex_lock(&engine->lock);
            op->running--;
            account(&op->result, group.stage, ns);
            finish(engine, &group);
            continue;
        }
        if (first_ended && second_ended)
            break;
        if (op->completions != completions)
            continue; /* groups without tasks: a list that was not ready may be now */
        if (op->running == 0)
            fail_stuck(op);
        else
            pthread_cond_wait(&engine->moved, &engine->lock);
    }
    op->inside--;
    pthread_cond_broadcast(&engine->moved);
}

/*
 * The last unit to leave ends the phase; the next one of a whole operation begins at once. Called and returns with the
 * lock held.
 */
static void end_phase(struct mok_engine *engine)
{
    struct mok_host_op *op = &engine->op;

    if (mok_host_next_phase(engine))
        return;
    op->active = false;
    op->result.device_ns = mok_host_now_ns() - op->started_ns;
    engine->ended = true;
    if (!engine->config.notify)
        return;
    pthread_mutex_unlock(&engine->lock);
    engine->config.notify(engine->config.cookie);
    pthread_mutex_lock(&engine->lock);
}

static void *unit_main(void *argument)
{
    struct mok_host_unit *unit = argument;
    struct mok_engine *engine = unit->engine;

    pthread_mutex_lock(&engine->lock);
    while (!engine->stop) {
        uint64_t phase = engine->phase;

        if (!engine->op.active) {
            pthread_cond_wait(&engine->work, &engine->lock);
            continue;
        }
        run_tasks(engine, unit);
        if (engine->op.inside == 0) {
            if (engine->op.active)
                end_phase(engine);
        } else {
            /* Others still run tasks of this phase: no use in looking at its lists again. */
            while (engine->phase == phase && engine->op.active && engine->op.inside > 0)
                pthread_cond_wait(&engine->moved, &engine->lock);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

int mok_host_pool_start(struct mok_engine *engine, struct mok_message *message)
{
    uint32_t i;

    for (i = 0; i < engine->config.threads; i++) {
        int r;

        engine->unit[i].engine = engine;
        engine->unit[i].random = 0x9e3779b97f4a7c15ull * (i + 1) ^ (uint64_t)getpid();
        r = pthread_create(&engine->thread[i], NULL, unit_main, &engine->unit[i]);
        if (r != 0) {
            if (message)
                snprintf(message->text, sizeof(message->text), "thread %u of %u cannot be started (errno %d)", i + 1,
                         engine->config.threads, r);
            return r == EAGAIN ? -MOK_ENOMEM : -MOK_EIO;
        }
        engine->threads++;
    }
    return 0;
}

void mok_host_pool_stop(struct mok_engine *engine)
{
    uint32_t i;

    pthread_mutex_lock(&engine->lock);
    engine->stop = true;
    engine->aborted = true;
    pthread_cond_broadcast(&engine->work);
    pthread_cond_broadcast(&engine->moved);
    pthread_mutex_unlock(&engine->lock);
    for (i = 0; i < engine->threads; i++)
        pthread_join(engine->thread[i], NULL);
    engine->threads = 0;
}

static void fail_locked(struct mok_host_op *op, int code, uint32_t argument, uint64_t token, uint64_t slot,
                        int64_t value)
{
    struct mok_op_result *result = &op->result;
    bool earlier = code == -MOK_EEXPERT && result->status == code &&
                   (token < result->bad_token || (token == result->bad_token && slot < result->bad_slot));

    if (result->status < 0 && !earlier)
        return;
    result->status = code;
    result->argument = argument;
    result->bad_token = token;
    result->bad_slot = slot;
    result->bad_value = value;
}

void mok_host_fail(struct mok_host_op *op, int code, uint32_t argument)
{
    mok_host_fail_slot(op, code, argument, 0, 0, 0);
}

void mok_host_fail_slot(struct mok_host_op *op, int code, uint32_t argument, uint64_t token, uint64_t slot,
                        int64_t value)
{
    pthread_mutex_t *lock = &op->layer->engine->lock;

    pthread_mutex_lock(lock);
    fail_locked(op, code, argument, token, slot, value);
    pthread_mutex_unlock(lock);
}
