/* SPDX-License-Identifier: Apache-2.0 */
/* See stream.h. */
#include "stream.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct CUstream_st {
    struct CUstream_st *next; /* of all streams */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t moved; /* something was queued, or has ended */
    struct step *first, **end;
    uint64_t queued, done;
    uint64_t taken; /* steps that the one that runs has taken over */
    bool stop;
};

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *all, *by_default;

static void nap(void)
{
    const struct timespec t = { .tv_nsec = 100000 };
    nanosleep(&t, NULL);
}

static void run_step(const struct step *step)
{
    switch (step->kind) {
    case STEP_CALL:
        step->function(step->cookie);
        return;
    case STEP_WAIT_VALUE:
        while ((int32_t)(__atomic_load_n(step->word, __ATOMIC_ACQUIRE) - step->value) < 0)
            nap();
        return;
    case STEP_WRITE_VALUE:
        __atomic_store_n(step->word, step->value, __ATOMIC_RELEASE);
        return;
    case STEP_COPY:
        if (step->bytes == sizeof(uint32_t)) /* kernels of other streams may look at such a word meanwhile */
            __atomic_store_n((uint32_t *)step->to, *(const uint32_t *)step->from, __ATOMIC_RELEASE);
        else
            memmove(step->to, step->from, step->bytes);
        return;
    case STEP_SET:
        memset(step->to, (int)step->value, step->bytes);
        return;
    }
}

static void drop_first(struct CUstream_st *s)
{
    s->first = s->first->next;
    s->end = s->first ? s->end : &s->first;
}

static void *run(void *cookie)
{
    struct CUstream_st *s = cookie;

    pthread_mutex_lock(&s->lock);
    for (;;) {
        struct step *step = s->first;
        if (!step) {
            if (s->stop)
                break;
            pthread_cond_wait(&s->moved, &s->lock);
            continue;
        }
        drop_first(s);
        pthread_mutex_unlock(&s->lock);
        run_step(step);
        free(step);
        pthread_mutex_lock(&s->lock);
        s->done += 1 + s->taken;
        s->taken = 0;
        pthread_cond_broadcast(&s->moved);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static struct CUstream_st *new_locked(void)
{
    struct CUstream_st *s = calloc(1, sizeof(*s));
    pthread_condattr_t clock;

    if (!s)
        return NULL;
    s->end = &s->first;
    pthread_mutex_init(&s->lock, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&s->moved, &clock);
    pthread_condattr_destroy(&clock);
    if (pthread_create(&s->thread, NULL, run, s) != 0) {
        free(s);
        return NULL;
    }
    s->next = all;
    all = s;
    return s;
}

struct CUstream_st *stream_new(void)
{
    struct CUstream_st *s;

    pthread_mutex_lock(&all_lock);
    s = new_locked();
    pthread_mutex_unlock(&all_lock);
    return s;
}

/* The stream that NULL means. It lives as long as the process. */
static struct CUstream_st *which(struct CUstream_st *stream)
{
    if (stream)
        return stream;
    pthread_mutex_lock(&all_lock);
    if (!by_default)
        by_default = new_locked();
    stream = by_default;
    pthread_mutex_unlock(&all_lock);
    return stream;
}

cudaError_t stream_push(struct CUstream_st *stream, struct step step)
{
    struct CUstream_st *s = which(stream);
    struct step *own = malloc(sizeof(*own));

    if (!s || !own) {
        free(own);
        return cudaErrorMemoryAllocation;
    }
    *own = step;
    own->next = NULL;
    pthread_mutex_lock(&s->lock);
    *s->end = own;
    s->end = &own->next;
    s->queued++;
    pthread_cond_broadcast(&s->moved);
    pthread_mutex_unlock(&s->lock);
    return cudaSuccess;
}

void *stream_take_early(struct CUstream_st *stream, void (*function)(void *))
{
    struct CUstream_st *s = which(stream);
    struct step *step;
    void *cookie = NULL;

    pthread_mutex_lock(&s->lock);
    step = s->first;
    if (step && step->kind == STEP_CALL && step->early && step->function == function) {
        cookie = step->cookie;
        drop_first(s);
        s->taken++;
        free(step);
    }
    pthread_mutex_unlock(&s->lock);
    return cookie;
}

bool stream_wait(struct CUstream_st *stream, int timeout_ms)
{
    struct CUstream_st *s = which(stream);
    struct timespec until;
    bool in_time = true;
    uint64_t target;

    if (!s)
        return true;
    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += timeout_ms / 1000;
    until.tv_nsec += timeout_ms % 1000 * 1000000L;
    if (until.tv_nsec >= 1000000000L) {
        until.tv_nsec -= 1000000000L;
        until.tv_sec++;
    }
    pthread_mutex_lock(&s->lock);
    target = s->queued;
    while (s->done < target && in_time)
        if (timeout_ms < 0)
            pthread_cond_wait(&s->moved, &s->lock);
        else
            in_time = pthread_cond_timedwait(&s->moved, &s->lock, &until) == 0;
    in_time = s->done >= target;
    pthread_mutex_unlock(&s->lock);
    return in_time;
}

bool stream_busy(struct CUstream_st *stream)
{
    struct CUstream_st *s = which(stream);
    bool busy;

    if (!s)
        return false;
    pthread_mutex_lock(&s->lock);
    busy = s->done < s->queued;
    pthread_mutex_unlock(&s->lock);
    return busy;
}

void streams_wait_all(void)
{
    /* streams are not freed while their owner waits for the device */
    pthread_mutex_lock(&all_lock);
    struct CUstream_st *first = all;
    pthread_mutex_unlock(&all_lock);
    for (struct CUstream_st *s = first; s; s = s->next)
        stream_wait(s, -1);
}

void stream_free(struct CUstream_st *stream)
{
    if (!stream)
        return;
    pthread_mutex_lock(&all_lock);
    for (struct CUstream_st **at = &all; *at; at = &(*at)->next)
        if (*at == stream) {
            *at = stream->next;
            break;
        }
    pthread_mutex_unlock(&all_lock);
    pthread_mutex_lock(&stream->lock);
    stream->stop = true;
    pthread_cond_broadcast(&stream->moved);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    pthread_mutex_destroy(&stream->lock);
    pthread_cond_destroy(&stream->moved);
    free(stream);
}
