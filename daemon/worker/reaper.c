/* SPDX-License-Identifier: Apache-2.0 */
/* The thread that gives memory back: see reaper.h. */
#include "reaper.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>

#include "dispatcher.h"
#include "util.h"

struct reaper {
    const struct objects_engine *on;
    struct worker_mailbox inbox, outbox;
    int wake_fd, done_fd;
    bool ending; /* set before the last wake-up */
    pthread_t thread;
};

void reaper_destroy(const struct objects_engine *on, struct reaper_load *load)
{
    while (load->layers) {
        struct worker_layer *layer = worker_container_of(load->layers, struct worker_layer, control_node);
        load->layers = load->layers->next;
        objects_layer_free(on, layer);
    }
    while (load->buffers) {
        struct worker_buffer *buffer = worker_container_of(load->buffers, struct worker_buffer, control_node);
        load->buffers = load->buffers->next;
        objects_buffer_free(on, buffer);
    }
    objects_queue_free(on, load->queue);
    objects_group_free(load->group);
    *load = (struct reaper_load){ 0 };
}

static void drain(struct reaper *reaper)
{
    struct worker_report *report = worker_mailbox_take_all(&reaper->inbox), *next;

    for (; report; report = next) {
        next = report->next;
        dispatcher_quiet(reaper->on->dispatcher, true);
        reaper_destroy(reaper->on, &worker_container_of(report, struct dispatcher_command, report)->load);
        dispatcher_quiet(reaper->on->dispatcher, false);
        worker_mailbox_put(&reaper->outbox, report);
        worker_ring(reaper->done_fd);
    }
}

static void *run(void *cookie)
{
    struct reaper *reaper = cookie;
    struct pollfd wait = { .fd = reaper->wake_fd, .events = POLLIN };
    bool ending;

    pthread_setname_np(pthread_self(), "mok-reaper");
    do {
        poll(&wait, 1, -1);
        worker_silence(reaper->wake_fd);
        ending = __atomic_load_n(&reaper->ending, __ATOMIC_ACQUIRE);
        drain(reaper);
    } while (!ending);
    return NULL;
}

int reaper_start(const struct objects_engine *on, struct reaper **ret, struct mok_message *message)
{
    struct reaper *reaper = calloc(1, sizeof(*reaper));

    if (!reaper)
        return mok_fail(message, -MOK_ENOMEM, "reaper: out of memory");
    reaper->on = on;
    worker_mailbox_init(&reaper->inbox);
    worker_mailbox_init(&reaper->outbox);
    reaper->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    reaper->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = reaper->wake_fd < 0 || reaper->done_fd < 0 ? errno : 0;
    if (!error)
        error = pthread_create(&reaper->thread, NULL, run, reaper);
    if (error) {
        reaper_free(reaper);
        errno = error;
        return mok_fail(message, error == EMFILE || error == ENFILE ? -MOK_EFDS : -MOK_EIO,
                        "the reaper's thread cannot be started: %m");
    }
    *ret = reaper;
    return 0;
}

void reaper_post(struct reaper *reaper, struct dispatcher_command *command)
{
    worker_mailbox_put(&reaper->inbox, &command->report);
    worker_ring(reaper->wake_fd);
}

int reaper_fd(const struct reaper *reaper)
{
    return reaper->done_fd;
}

struct worker_report *reaper_done(struct reaper *reaper)
{
    worker_silence(reaper->done_fd);
    return worker_mailbox_take_all(&reaper->outbox);
}

void reaper_stop(struct reaper *reaper)
{
    __atomic_store_n(&reaper->ending, true, __ATOMIC_RELEASE);
    worker_ring(reaper->wake_fd);
    pthread_join(reaper->thread, NULL);
}

void reaper_free(struct reaper *reaper)
{
    if (!reaper)
        return;
    mok_close(reaper->wake_fd);
    mok_close(reaper->done_fd);
    worker_mailbox_destroy(&reaper->inbox);
    worker_mailbox_destroy(&reaper->outbox);
    free(reaper);
}
