/* SPDX-License-Identifier: Apache-2.0 */
/* What link.c (queues), link_thread.c (the thread's turns) and link_sockets.c (ZeroMQ's side) share. */
#ifndef MOK_RACK_LINK_PRIVATE_H
#define MOK_RACK_LINK_PRIVATE_H

#include <pthread.h>

#include "gate.h"
#include "link.h"
#include "zap.h"

enum rack_op_kind { RACK_OP_ADD, RACK_OP_SEND, RACK_OP_BEAT };

/* What the loop asks of the thread. */
struct rack_op {
    struct rack_op *next;
    enum rack_op_kind kind;
    uint32_t slot, serial;
    uint8_t *bytes;
    size_t size;
    char address[RACK_MAX_ADDRESS + 1];
    uint8_t public_key[RACK_KEY_BYTES];
};

struct rack_ops {
    struct rack_op *first, *last;
};
void rack_ops_push(struct rack_ops *ops, struct rack_op *op);
struct rack_op *rack_ops_pop(struct rack_ops *ops);
void rack_ops_append(struct rack_ops *ops, struct rack_ops *more); /* which is empty then */
void rack_op_free(struct rack_op *op);

struct rack_items {
    struct rack_item *first, *last;
    size_t count, bytes;
};
void rack_items_push(struct rack_items *items, struct rack_item *item);
void rack_items_clear(struct rack_items *items);

/* The thread's side of a peer. */
struct rack_connection {
    bool used;
    bool barred; /* its key gets in no more */
    uint32_t slot, serial;
    char endpoint[RACK_MAX_ADDRESS + 8];
    uint8_t public_key[RACK_KEY_BYTES];
    char user_id[RACK_USER_ID_MAX];
    void *dealer, *monitor; /* NULL: to be opened at retry_ns */
    bool connected;         /* the handshake is done */
    bool owes_word;         /* that there is room again */
    bool dead;              /* libzmq has given up on it */
    uint64_t opened_ns, retry_ns;
    uint32_t backoff_ms;
    struct rack_op *beat;
    struct rack_ops queue;
    char error[RACK_MAX_TEXT]; /* said last */
    uint64_t error_ns;
};

/* What waits for a peer, the thread's queue included. */
struct rack_load {
    size_t messages, bytes;
    bool starved; /* a send was refused since */
};

/* What the loop has asked of each peer without an operation. */
struct rack_flags {
    bool bar[RACK_MAX_NODES], reset[RACK_MAX_NODES], remove[RACK_MAX_NODES];
    struct rack_ops last_words[RACK_MAX_NODES]; /* to who is to be removed */
};

struct rack_link {
    /* Set before the thread starts. */
    struct rack_link_config config;
    void (*wake)(void *cookie);
    void *cookie;
    void *context, *zap, *router, *router_monitor;
    int kick; /* eventfd: the loop has asked for something */
    pthread_t thread;
    bool running;

    /* Under the mutex. */
    pthread_mutex_t mutex;
    struct rack_ops ops;
    struct rack_items inbox;
    struct rack_load load[RACK_MAX_NODES];
    struct rack_link_stats stats;
    struct rack_flags flags;
    bool kicked, woken, inbox_full, leave, stop;
    uint64_t rounds; /* turns of the thread; written by it alone, read without the mutex */

    /* The thread's own. */
    struct rack_connection connections[RACK_MAX_NODES]; /* by slot */
    uint32_t last_sender;                               /* slot: the next message is likely from the same */
    struct rack_items arrived;                          /* to be moved to the inbox at the end of the turn */
    uint64_t refused, unknown, refused_ns;
    struct rack_lately refused_lately;
    char refused_from[RACK_MAX_ADDRESS + 1];
    uint32_t inbound;
    struct rack_gate gate;
    uint64_t starved_ns; /* when there was no descriptor; 0: there are some */
    uint64_t complained_ns;
};

void *rack_link_thread(void *argument);
struct rack_item *rack_item_new(enum rack_item_kind kind, const struct rack_connection *connection, const char *text);

/* link_sockets.c */
int rack_sockets_open(struct rack_link *link, char *text);
void rack_sockets_close(struct rack_link *link);
int rack_descriptors_check(size_t count); /* -MOK_EFDS when so many cannot be had */
void rack_connection_open(struct rack_link *link, struct rack_connection *connection);
void rack_connection_close(struct rack_connection *connection);
/* Closing it will wait for what it has taken, so long at most. */
void rack_connection_linger(struct rack_connection *connection, int ms);
/* Looks at what has happened to it. A sentence to report, or NULL. */
const char *rack_connection_watch(struct rack_connection *connection, char *text);
/* Inbound connections: counts, and lets nobody in while there are too many. */
void rack_listener_watch(struct rack_link *link, uint64_t now_ns);

#endif
