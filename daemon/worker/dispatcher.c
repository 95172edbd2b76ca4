/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The dispatcher thread: one loop that looks at everything, and sleeps only when nothing moved and every party that
 * could move something knows that it has to ring.
 */
#include "dispatcher_internal.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>

#include "flags_board.h"
#include "sync.h"
#include "util.h"

#define FAIR_BURST_NS 20000000u
#define MAX_SLEEP_NS 3600000000000u
/* A GPU that has something to say is looked at at full speed for so long, then once in so long. */
#define GPU_POLL_NS 10000000u
#define GPU_NAP_NS 50000u
/* A GPU's client that has just been served has the next operation soon, and waking up takes longer than starting it. */
#define GPU_IDLE_NS 1000000u

/* ------------------------------------------------------------------ mail */

/*
 * From any thread of this process. Sequentially consistent on both words, as in sleep_a_while: either the dispatcher
 * sees `notified` before it sleeps, or we see that it sleeps.
 */
static void notify(void *cookie)
{
    struct dispatcher *d = cookie;

    __atomic_store_n(&d->notified, 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&d->asleep, __ATOMIC_SEQ_CST))
        worker_ring(d->bell);
}

void dispatcher_post(struct dispatcher *d, struct dispatcher_command *command)
{
    worker_mailbox_put(&d->inbox, &command->report);
    notify(d);
}

struct worker_report *dispatcher_inbox(struct dispatcher *d)
{
    return worker_mailbox_take_all(&d->inbox);
}

void dispatcher_report(struct dispatcher *d, struct worker_report *report)
{
    worker_mailbox_put(&d->outbox, report);
    worker_ring(d->report_fd);
}

int dispatcher_fd(const struct dispatcher *d)
{
    return d->report_fd;
}

struct worker_report *dispatcher_reports(struct dispatcher *d)
{
    worker_silence(d->report_fd);
    return worker_mailbox_take_all(&d->outbox);
}

void dispatcher_quiet(struct dispatcher *d, bool quiet)
{
    const struct timespec nap = { .tv_nsec = 20000 };

    /* Either it sees that we want quiet before it starts something, or we see that it has. */
    __atomic_add_fetch(&d->quiet, quiet ? 1u : -1u, __ATOMIC_SEQ_CST);
    while (quiet && __atomic_load_n(&d->waiting, __ATOMIC_SEQ_CST)) {
        notify(d);
        nanosleep(&nap, NULL);
    }
}

struct mok_engine *dispatcher_engine(const struct dispatcher *d)
{
    return d->engine;
}

/* ------------------------------------------------------------------ waking others */

static void ring_peer(struct dispatcher *d, int bell)
{
    worker_ring(bell);
    mok_stats_add(&d->stats->peer_bells, 1);
}

void dispatcher_ring_peers(struct dispatcher *d, const struct worker_layer *layer)
{
    const struct mok_dispatch_view *view = &layer->view;

    dispatcher_chaos(d);
    if (layer->board) {
        board_moved(layer->board);
        return;
    }
    /* Our flag moved before this; a peer that goes to sleep sets its word and then looks at our flag. */
    mok_fence_full();
    for (uint32_t rank = 0; rank < view->ep; rank++)
        if (rank != view->rank && mok_load_relaxed(&view->flags[rank]->sleeping))
            ring_peer(d, layer->group->bell[rank]);
}

void dispatcher_chaos(struct dispatcher *d)
{
    if (!d->chaos_delay_us)
        return;
    d->chaos_state ^= d->chaos_state << 13;
    d->chaos_state ^= d->chaos_state >> 7;
    d->chaos_state ^= d->chaos_state << 17;
    uint64_t ns = d->chaos_state % (d->chaos_delay_us + 1u) * 1000u;
    struct timespec delay = { .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
    nanosleep(&delay, NULL);
}

/* ------------------------------------------------------------------ the loop */

static bool take_submissions(struct dispatcher *d)
{
    bool moved = false;
    struct worker_queue *start = d->turn ? d->turn : d->queues, *queue = start;

    if (!queue)
        return false;
    /* One of each queue a round, and another queue first next time: nobody gets in by being fast. */
    d->turn = start->next;
    do {
        moved |= operations_take(d, queue);
        queue = queue->next ? queue->next : d->queues;
    } while (queue != start);
    return moved;
}

/* The device that has the board is out of reach, so nobody can take turns any more. */
static void board_is_lost(struct dispatcher *d, struct worker_layer *layer, int code)
{
    operations_break_group(d, layer->group, -MOK_EPEER, 0, code,
                           "the flags of layer %u, in the memory of rank 0, cannot be reached", layer->id);
}

static bool step_layers(struct dispatcher *d)
{
    bool moved = false;

    for (struct worker_layer *layer = d->active, *next; layer; layer = next) {
        next = layer->active_next;
        int r = layer->board ? board_look(layer, d->now_ns) : 0;
        if (r < 0 && !layer->group->code) {
            board_is_lost(d, layer, r);
            return true; /* the group's other layers may have left the list, `next` among them */
        }
        moved |= r > 0;
        moved |= operations_step(d, layer);
    }
    return moved;
}

/* Looks at everything once; true if anything moved. */
static bool pass(struct dispatcher *d, uint64_t *ret_deadline_ns)
{
    bool moved = false;

    d->now_ns = mok_now_ns();
    mok_stats_add(&d->stats->rounds, 1);
    __atomic_store_n(&d->notified, 0, __ATOMIC_SEQ_CST);
    moved |= commands_take(d);
    moved |= phases_poll(d);
    moved |= take_submissions(d);
    moved |= step_layers(d);
    moved |= phases_start(d);
    ahead_offer(d);
    *ret_deadline_ns = operations_check_deadlines(d);
    if (d->something_ended) {
        d->something_ended = false;
        commands_resume(d);
        moved = true;
    }
    return moved;
}

static void set_sleeping(struct dispatcher *d, bool sleeping)
{
    for (struct worker_queue *queue = d->queues; queue; queue = queue->next)
        if (queue->open && sleeping)
            mok_queue_worker_arm(&queue->ring);
        else if (queue->open)
            mok_queue_worker_disarm(&queue->ring);
    for (struct worker_layer *layer = d->active; layer; layer = layer->active_next)
        mok_store_relaxed(&layer->view.flags[layer->view.rank]->sleeping, sleeping);
    __atomic_store_n(&d->asleep, sleeping, __ATOMIC_SEQ_CST);
}

/* Whether what comes next is a GPU's to say, which rings no bell. */
static bool waits_for_gpu(const struct dispatcher *d)
{
    return d->awaited || d->ahead.op || (d->ahead.expected && d->ahead.withdrawn) || (d->looks_at_engine && d->running);
}

/* The same, and how long it may sleep then; UINT64_MAX: for ever. */
static uint64_t longest_nap(const struct dispatcher *d)
{
    uint64_t nap = waits_for_gpu(d) ? GPU_NAP_NS : UINT64_MAX;

    for (const struct worker_layer *layer = d->active; layer; layer = layer->active_next) {
        uint64_t board = board_nap_ns(layer, d->now_ns);
        nap = board < nap ? board : nap;
    }
    return nap;
}

/* How long it looks before it sleeps. */
static uint64_t patience(const struct dispatcher *d)
{
    uint64_t least = longest_nap(d) != UINT64_MAX ? GPU_POLL_NS : d->looks_at_engine ? GPU_IDLE_NS : 0;

    return d->poll_ns < least ? least : d->poll_ns;
}

/* NULL: for ever. */
static const struct timespec *sleep_for(uint64_t now_ns, uint64_t deadline_ns, struct timespec *ret)
{
    if (deadline_ns == UINT64_MAX)
        return NULL;
    uint64_t ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
    ns = ns < MAX_SLEEP_NS ? ns : MAX_SLEEP_NS;
    *ret = (struct timespec){ .tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u) };
    return ret;
}

/* The last pass comes after everyone has been told to ring, so that nothing is lost between it and the wait. */
static void sleep_a_while(struct dispatcher *d)
{
    struct epoll_event events[16];
    struct timespec room;
    uint64_t deadline_ns;

    set_sleeping(d, true);
    mok_fence_full();
    dispatcher_chaos(d);
    if (!pass(d, &deadline_ns) && !__atomic_load_n(&d->notified, __ATOMIC_SEQ_CST)) {
        uint64_t nap_ns = longest_nap(d);
        if (nap_ns != UINT64_MAX && deadline_ns > d->now_ns + nap_ns)
            deadline_ns = d->now_ns + nap_ns;
        if (d->ahead.expected && deadline_ns > d->ahead.until_ns)
            deadline_ns = d->ahead.until_ns;
        /* Which descriptor it was does not matter: the pass looks at everything. */
        int count = epoll_pwait2(d->epoll, events, ARRAY_SIZE(events), sleep_for(d->now_ns, deadline_ns, &room), NULL);
        if (count < 0 && errno == ENOSYS) /* kernels before 5.11: looks a little more often than it had to */
            count = epoll_wait(d->epoll, events, ARRAY_SIZE(events), deadline_ns == UINT64_MAX ? -1 : 1);
        if (count > 0)
            worker_silence(d->bell);
        mok_stats_add(&d->stats->wakeups, 1);
        uint64_t woken_ns = mok_now_ns();
        mok_stats_add(&d->stats->sleep_ns, woken_ns - d->now_ns);
        trace_slept(d, d->now_ns, woken_ns);
    }
    set_sleeping(d, false);
}

static bool finished(const struct dispatcher *d)
{
    return d->stop && !d->running && !ahead_is_busy(d) && !d->active;
}

/* Whatever still runs has been told to stop; every completion that is owed is out. */
static void close_rings(struct dispatcher *d)
{
    for (struct worker_queue *queue = d->queues; queue; queue = queue->next) {
        if (queue->open) {
            queue->open = false;
            mok_queue_worker_close(&queue->ring, d->stop->code);
        }
    }
}

static void relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void *run(void *cookie)
{
    struct dispatcher *d = cookie;
    uint64_t idle_since_ns = mok_now_ns(), deadline_ns;

    pthread_setname_np(pthread_self(), "mok-dispatcher");
    while (!finished(d)) {
        if (pass(d, &deadline_ns)) {
            idle_since_ns = d->now_ns;
        } else if (d->now_ns - idle_since_ns >= patience(d)) {
            sleep_a_while(d);
            /* After a nap for a GPU it is not looked at at full speed again until something has moved. */
            idle_since_ns = longest_nap(d) != UINT64_MAX ? idle_since_ns : mok_now_ns();
        } else {
            relax();
        }
    }
    close_rings(d);
    commands_finish(d);
    return NULL;
}

/* ------------------------------------------------------------------ life */

void dispatcher_free(struct dispatcher *d)
{
    if (!d)
        return;
    while (d->share.users) {
        struct fair_user *user = d->share.users;
        d->share.users = user->next;
        free(user);
    }
    d->ops->close(d->engine);
    mok_close(d->epoll);
    mok_close(d->report_fd);
    mok_close(d->bell);
    worker_mailbox_destroy(&d->inbox);
    worker_mailbox_destroy(&d->outbox);
    free(d);
}

static int system_error(struct mok_message *message, const char *what)
{
    snprintf(message->text, sizeof(message->text), "%s: %m", what);
    return errno == EMFILE || errno == ENFILE ? -MOK_EFDS : -MOK_EIO;
}

static int open_descriptors(struct dispatcher *d, struct mok_message *message)
{
    struct epoll_event event = { .events = EPOLLIN };

    d->report_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (d->report_fd < 0)
        return system_error(message, "eventfd");
    d->epoll = epoll_create1(EPOLL_CLOEXEC);
    if (d->epoll < 0)
        return system_error(message, "epoll_create1");
    if (epoll_ctl(d->epoll, EPOLL_CTL_ADD, d->bell, &event) < 0)
        return system_error(message, "bell");
    return 0;
}

int dispatcher_start(const struct dispatcher_config *config, struct dispatcher **ret, struct mok_message *message)
{
    struct mok_engine_config engine = config->engine;
    struct dispatcher *d = calloc(1, sizeof(*d));

    if (!d) {
        snprintf(message->text, sizeof(message->text), "dispatcher: out of memory");
        return -MOK_ENOMEM;
    }
    d->ops = config->ops;
    d->poll_ns = config->poll_us * 1000u;
    d->chaos_delay_us = config->chaos_delay_us;
    d->chaos_state = mok_now_ns() | 1;
    d->bell = config->bell;
    d->stats = config->stats;
    count_begin(d->stats);
    d->epoll = d->report_fd = -1;
    d->share.burst_ns = FAIR_BURST_NS;
    d->epoch = 1;
    worker_mailbox_init(&d->inbox);
    worker_mailbox_init(&d->outbox);

    int r = open_descriptors(d, message);
    if (r >= 0) {
        /*
         * A GPU's notice would go through a thread of the driver, and hold up the next phase: it is looked at instead.
         */
        d->looks_at_engine = d->ops->kind == MOK_DEVICE_CUDA;
        engine.notify = d->looks_at_engine ? NULL : notify;
        engine.cookie = d;
        r = d->ops->open(&engine, &d->engine, message);
    }
    if (r >= 0) {
        int error = pthread_create(&d->thread, NULL, run, d);
        if (error) {
            errno = error;
            r = system_error(message, "dispatcher thread");
        }
    }
    if (r < 0) {
        d->bell = -1; /* still the caller's */
        dispatcher_free(d);
        return r;
    }
    *ret = d;
    return 0;
}

void dispatcher_join(struct dispatcher *d)
{
    pthread_join(d->thread, NULL);
}
