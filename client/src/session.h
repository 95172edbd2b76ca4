/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The objects behind the handles of mok.h, and what the files of the library ask of each other.
 *
 * Locks: session->lock guards the lists of objects, failures of groups and bindings; a port's lock (port.h) guards
 * its queue, the tickets, and which operations use which buffer or layer. session->lock is taken before a port's,
 * never after. No lock is held over a control_call() but session->opening, which only orders the opening of queues, and
 * session->recovering, which does the same for recoveries.
 */
#ifndef MOK_CLIENT_SESSION_H
#define MOK_CLIENT_SESSION_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "check.h"
#include "control.h"
#include "error.h"
#include "mok/mok.h"

struct keeper;
struct port;

/* What mokd said when a group failed. Kept until the session closes. */
struct failure {
    struct failure *next;
    uint32_t group, rank;
    int code;
    char text[256];
};

struct mok_session {
    struct control *control;
    struct keeper *keeper;      /* resume.h; NULL: the session ends with mokd */
    uint32_t recovered;         /* losses of the connection that the program knows of; atomic */
    pthread_mutex_t recovering; /* one mok_session_recover at a time; taken before all others */
    uint32_t fork_mark;
    uint32_t queue_entries;
    uint64_t timeout_ms; /* of a plain answer */
    char mps_pipe[256];  /* of the MPS that mokd's workers run under; "": none */
    uint64_t features;   /* that mokd has too, see wire.h */
    pthread_mutex_t opening;
    struct port *port[MOK_MAX_DEVICES]; /* set once, with release */

    pthread_mutex_t lock; /* all below */
    mok_group *groups;
    mok_buffer *buffers;
    mok_layer *layers;
    struct failure *failures;
};

struct mok_group {
    mok_session *session;
    mok_group *next;
    uint32_t id, ranks, rank, device;
    struct port *port;
    uint32_t queue;                /* of the worker that the group is on; atomic */
    const struct failure *failure; /* set once, with release; NULL: well */
    char name[MOK_MAX_NAME + 1];
};

struct mok_buffer {
    mok_session *session;
    mok_buffer *next;
    mok_group *group; /* NULL: private */
    uint32_t id, device;
    struct port *port;
    uint64_t bytes;
    void *data;
    struct cuda_device *cuda; /* whose memory it is, the port's; NULL: a host's */
    uint32_t bindings;   /* of layers; session->lock */
    uint32_t operations; /* in flight; the port's lock */
};

#define LAYER_PARAMS 18

struct mok_layer {
    mok_group *group;
    mok_layer *next;
    uint32_t id;
    Mok__LayerSpec spec;
    mok_layer_memory memory;
    mok_buffer *bound[LAYER_PARAMS]; /* session->lock */
    bool has_weights, has_gradients; /* the port's lock, as the two below */
    bool changing;                   /* being bound or destroyed */
    uint32_t operations;             /* in flight */
};

/* 0; -MOK_EARG for NULL, -MOK_EFORK in a child. */
int session_check(const mok_session *session, const char *name);
int group_check(const mok_group *group);
int layer_check(const mok_layer *layer);

/* What mokd says without having been asked; `data` is the session. */
void session_on_event(void *data, const Mok__Reply *reply);

/* A plain request: the session's time-out. */
int session_call(mok_session *session, Mok__Request *request, Mok__Reply__BodyCase body, size_t fds,
                 struct control_answer *ret_answer);
/* A collective one: mokd keeps the time; this side waits a plain answer's time longer. 0: for ever. */
int session_call_collective(mok_session *session, Mok__Request *request, uint64_t timeout_ms, Mok__Reply__BodyCase body,
                            size_t fds, struct control_answer *ret_answer);

/* Under session->lock: what mokd said about group `id`; NULL: nothing. */
const struct failure *session_failure(const mok_session *session, uint32_t id);
/* 0; or records why the group failed. */
int group_well(const mok_group *group);

/* Under the port's lock: 0, or why no operation of this kind can be submitted now. */
int layer_ready(const mok_layer *layer, unsigned opcode);

/* Takes the object out of the session's list and frees what this process has of it. Under session->lock. */
void buffer_drop(mok_buffer *buffer);
void layer_drop(mok_layer *layer);
void group_drop(mok_group *group);

#endif
