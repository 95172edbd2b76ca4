/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plays mokd and the clients against real mok-worker processes: real sockets, queues and shared memory, nothing between
 * the test and the worker. What goes wrong in here fails the test that runs.
 */
#ifndef MOK_TESTS_WORKER_HARNESS_H
#define MOK_TESTS_WORKER_HARNESS_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

#include <cmocka.h>

#include "control.pb-c.h"
#include "layer.h"
#include "mok/ring_abi.h"
#include "queue.h"
#include "wire.h"

#define HARNESS_MAX_EP 4
#define HARNESS_WAIT_MS 20000 /* longer than anything takes, also under a sanitizer */

/* ------------------------------------------------------------------ a worker process */

struct worker_options {
    uint64_t poll_us;
    uint32_t chaos_delay_us;
    uint32_t threads; /* 0: 1 */
};

struct worker {
    pid_t pid; /* 0: ended and reaped */
    int control, bell;
    uint64_t last_id;
    struct mok_device_limits limits;
    Mok__WorkerReply *event[8]; /* not yet fetched */
    size_t events;
};

/* The process alone: no start message has been sent. */
void worker_spawn(struct worker *worker);
/* Spawned and started. options NULL: all zero. */
void worker_start(struct worker *worker, const struct worker_options *options);
/* Asks, and waits for the one answer; events that come before are kept. ret_reply may be NULL. Returns the code. */
int worker_ask(struct worker *worker, Mok__WorkerRequest *request, const int *fds, size_t count,
               Mok__WorkerReply **ret_reply);
/* Sends; the answer may bring descriptors. Returns its code. Only while nothing else is under way. */
int worker_ask_fds(struct worker *worker, Mok__WorkerRequest *request, struct mok_wire_fds *ret_fds);
/* The next event within `wait_ms`, or NULL; free with mok_wire_free. */
Mok__WorkerReply *worker_event(struct worker *worker, int wait_ms);
/* Waits for the end of the process; returns the exit code, or -signal. */
int worker_wait(struct worker *worker);
/* Closes the socket and expects a clean end. Fine after worker_wait. */
void worker_end(struct worker *worker);
void worker_kill(struct worker *worker);

/* ------------------------------------------------------------------ a client's queue on it */

struct client {
    struct worker *worker;
    uint64_t session;
    uint32_t id;
    struct mok_queue queue;
    struct mok_queue_client end;
};

void client_open(struct client *client, struct worker *worker, uint32_t id, uint32_t entries, uint32_t counter);
/* WorkerQueueClose; returns the code. */
int client_close(struct client *client);
/* Frees this side alone. */
void client_free(struct client *client);
void client_submit(struct client *client, const struct mok_sqe *sqe);
/* The next completion within `wait_ms`; false: none came. */
bool client_reap(struct client *client, struct mok_cqe *ret_cqe, int wait_ms);
/* The next completion must come, for this operation and with this code. */
struct mok_cqe client_expect(struct client *client, uint64_t user_data, int code);
/* A no-op goes through. */
void client_expect_alive(struct client *client);

/* ------------------------------------------------------------------ groups, buffers, layers */

struct group {
    uint32_t id, size;
    struct client *rank[HARNESS_MAX_EP];
};

struct buffer {
    uint32_t id;
    uint32_t copies; /* 1: private, or a group of one */
    uint64_t bytes;
    int fd[HARNESS_MAX_EP];
    void *address[HARNESS_MAX_EP]; /* by rank; private: [0] */
};

struct layer {
    uint32_t id;
    struct group *group;
    struct mok_layer_spec spec;
    struct mok_plan plan; /* of rank 0 */
};

void group_open(struct group *group, uint32_t id, struct client *const *ranks, uint32_t size);
int group_fail(struct group *group, uint32_t rank, int code, uint32_t fault_rank);
int group_close(struct group *group, uint32_t rank);

void buffer_symmetric(struct buffer *buffer, struct group *group, uint64_t bytes);
void buffer_private(struct buffer *buffer, struct client *client, uint64_t bytes);
int buffer_unmap(struct worker *worker, uint64_t session, uint32_t group, uint32_t rank, uint32_t id);
void buffer_free(struct buffer *buffer);

/* spec.ep and spec.rank are filled in. */
void layer_open(struct layer *layer, struct group *group, const struct mok_layer_spec *spec);
int layer_bind(struct layer *layer, uint32_t rank, Mok__LayerParams *params);
int layer_close(struct layer *layer, uint32_t rank);
/* State and missing ranks (one bit each) of an operation. Returns the code. */
int op_query(struct client *client, uint64_t user_data, uint32_t *ret_state, uint64_t *ret_missing);
/* Waits until an operation has reached `want` (enum mok_op_state); returns the missing ranks. */
uint64_t op_await(struct client *client, uint64_t user_data, uint32_t want);

/* An id that no other object of this test program has. */
uint32_t harness_id(void);

#endif
