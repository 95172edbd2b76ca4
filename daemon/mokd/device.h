/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A device of the node and the supervision of its worker.
 *
 *   RESTING --spawn--> STARTING --answers WorkerStart--> UP
 *      ^                  |                              |
 *      +---- back-off ----+---------- worker dies -------+
 *      |
 *      +--too many in a row--> FAILED (until mokd itself is started again)
 *
 * A GPU that its first worker cannot open is FAILED at once: nothing that a restart would change.
 *
 * When a worker dies: its queues are recovered and closed with MOK_EWORKER, groups with ranks here fail, requests to it
 * are answered MOK_EWORKER, and the next worker gets the private buffers of the live sessions again.
 */
#ifndef MOKD_DEVICE_H
#define MOKD_DEVICE_H

#include "stats_page.h"
#include "worker_process.h"

struct mokd_group;
struct mokd_queue;

enum mokd_device_state { MOKD_DEVICE_RESTING, MOKD_DEVICE_STARTING, MOKD_DEVICE_UP, MOKD_DEVICE_FAILED };

struct mokd_device {
    struct mokd_server *server;
    const struct mokd_device_config *config;
    const char *worker_path;
    uint32_t index;
    enum mokd_device_state state;
    char reason[MOKD_TEXT_MAX]; /* why it is not up */
    int bell;                   /* eventfd that rings its worker, whichever that is */
    struct mokd_stats_page stats;
    uint32_t units;             /* threads or SMs */
    uint8_t uuid[16];           /* cuda: the GPU, once it has been up */
    bool fabric;                /* cuda: its memory can be had by a fabric handle */
    char no_fabric[160];        /* cuda: why it cannot, once it has been up */
    struct mokd_worker *worker; /* NULL: none */
    struct mokd_timer *respawn;
    uv_timer_t tick;
    uint64_t up_ns;
    uint64_t spawned_ns, ticked_ns;
    uint64_t beat_base;          /* what a worker before this one had counted to */
    uint64_t beat_seen, beat_ns; /* the count at the last look, and when it was last seen to have moved */
    bool was_up;
    bool hopeless; /* the worker that dies now has said why no other would do better */
    bool starved;  /* the last start failed for what mokd lacks: that counts as no life */
    unsigned short_lives; /* in a row */
    uint32_t restarts;
    uint64_t memory_used;            /* storage.c */
    TAILQ_HEAD(, mokd_queue) queues; /* of all sessions, by device_link */
    uint32_t n_queues, n_ranks;
    bool draining;                      /* admission.c */
    const struct mokd_group *exclusive; /* that has it alone; NULL: none */
    uint64_t recovered_ops; /* completed by us, for workers that died */
    uint64_t ops_done, device_ns, errors; /* of workers that are dead */
    Mok__WorkerStats latest;              /* of the living one */
};

/* Time that a worker has for a request that takes longer than any other ([daemon] worker_timeout is for those): mapping
 * may touch all of the memory; dropping waits for what still runs. */
#define MOKD_WORKER_TIMEOUT_MS 10000u
#define MOKD_WORKER_MAP_TIMEOUT_MS 120000u
#define MOKD_WORKER_DROP_TIMEOUT_MS 60000u

/* Descriptors that only the start of a worker may use. */
void mokd_reserve_open(struct mokd_server *server);
void mokd_reserve_close(struct mokd_server *server);

int mokd_device_new(struct mokd_server *server, uint32_t index, const char *worker_path, struct mokd_device **ret);
void mokd_device_start(struct mokd_device *device); /* its worker */
void mokd_device_free(struct mokd_device *device); /* its handles are closed */

/* What mps.c has to say: its worker cannot go on; it may start again; it never will. Harmless where it does not fit. */
void mokd_device_end_worker(struct mokd_device *device, const char *reason);
void mokd_device_wake(struct mokd_device *device, const char *reason);
void mokd_device_fail(struct mokd_device *device, const char *reason);

/* No more restarts: asks the worker to stop, kills it if it does not. */
void mokd_device_stop(struct mokd_device *device);
void mokd_device_kill(struct mokd_device *device);
void mokd_device_close_handles(struct mokd_device *device);

/* The device of an index that a client named: -MOK_ENODEV; -MOK_EDEVICE when it has failed for good. */
int mokd_device_find(struct mokd_server *server, uint32_t index, struct mokd_device **ret, struct mokd_error *error);

/* As mokd_worker_send; without a worker the answer is MOK_EWORKER or MOK_EDEVICE, at once. */
void mokd_device_send(struct mokd_device *device, Mok__WorkerRequest *request, const int *fds, size_t count,
                      uint64_t timeout_ms, mokd_answer_handler handler, void *cookie, uint32_t tag);

/* Asks the worker what it has done so far, ahead of any later request. Happens every second anyway. */
void mokd_device_refresh(struct mokd_device *device);

/* How long a worker may stand still before it is replaced. */
uint64_t mokd_device_patience_ns(const struct mokd_device *device);

void mokd_device_info(const struct mokd_device *device, Mok__DeviceInfo *ret); /* borrows the device's strings */

/* Called by worker_process.c. */
void mokd_device_event(struct mokd_device *device, const Mok__WorkerReply *event);
void mokd_device_worker_gone(struct mokd_device *device, const char *reason);

/* Many requests, one continuation. */
struct mokd_gather {
    unsigned pending;
    struct mokd_error first; /* first failure, if any */
    uint32_t first_tag;
    void (*done)(struct mokd_gather *gather);
};
void mokd_gather_begin(struct mokd_gather *gather, void (*done)(struct mokd_gather *gather));
void mokd_gather_send(struct mokd_gather *gather, struct mokd_device *device, Mok__WorkerRequest *request,
                      const int *fds, size_t count, uint64_t timeout_ms, uint32_t tag);
/* One more thing to wait for that is no request, and its end. */
void mokd_gather_hold(struct mokd_gather *gather);
void mokd_gather_drop(struct mokd_gather *gather, uint32_t tag, const struct mokd_error *error);
/* After the last send: `done` is called once everything is answered, maybe now; it may free the gather. */
void mokd_gather_end(struct mokd_gather *gather);

#endif
