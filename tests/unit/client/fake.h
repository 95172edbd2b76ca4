/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A mokd and its workers inside the test's process: speaks control.proto on a real socket, serves real queues, and
 * misbehaves on request. Computes nothing.
 */
#ifndef MOK_TEST_FAKE_H
#define MOK_TEST_FAKE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "control.pb-c.h"
#include "mok/ring_abi.h"
#include "wire.h"

#define FAKE_REQUESTS 32 /* body cases of a request stay below */
#define FAKE_CONNECTIONS 16
#define FAKE_LAYER_FULL 8192u /* bytes of a context */
#define FAKE_LAYER_RECOMPUTE 4096u
/* What it says of every layer's plan. */
/* The second one is U+009B, which begins an escape sequence too. */
#define FAKE_ESCAPED "9.9.9\x1b[31m\xc2\x9b" "32m\xff"

#define FAKE_PLAN "units = 1 (the only one)\nring_bytes = 9007199254740993 (as asked; it is (so to say) long)\n"

enum fake_answer {
    FAKE_RIGHT = 0,
    FAKE_NONE,      /* does not answer */
    FAKE_LATE,      /* answers when fake_let_go() is called */
    FAKE_REFUSED,   /* answers with `refusal` */
    FAKE_CUT,       /* answers with a packet that ends in the middle of the message */
    FAKE_EMPTY,     /* answers without a body */
    FAKE_FEWER_FDS, /* one descriptor fewer than due */
    FAKE_MORE_FDS,  /* one more */
    FAKE_SMALL_FD,  /* the memory is smaller than due */
    FAKE_ESCAPES,   /* with texts that would command a terminal */
    FAKE_HANG_UP,   /* closes instead of answering */
};

struct fake_connection;

struct fake {
    char dir[32], path[64];
    int listener;
    pthread_t accepter;
    struct fake_connection *connection[FAKE_CONNECTIONS]; /* only the accepter adds */
    unsigned connections;

    /* What it does; atomics, changed by the test at any time. */
    int answer[FAKE_REQUESTS]; /* enum fake_answer by body case */
    int refusal;
    bool stop, let_go;
    bool idle;          /* takes no submission */
    bool old;           /* knows no features */
    bool hold;          /* takes and does not complete */
    bool keep;          /* the memory it sends stays open here until its next answer */
    uint32_t entries;   /* of queues, instead of what was asked; 0: as asked */
    unsigned linger;    /* QueueOpens that a queue is in the way of after it was given back */
    int cancel_result;
    uint32_t missing_rank[4], missing;

    /* What it saw. */
    unsigned seen[FAKE_REQUESTS];
    unsigned taken, completed;
    unsigned ended;       /* connections */
    pthread_mutex_t lock; /* all below */
    struct mok_cqe cqe;   /* of forward and backward */
    struct mok_sqe last_sqe;
    Mok__Hello last_hello; /* numbers only */
    Mok__LayerSpec last_spec; /* of a query or a creation, as the two below */
    uint32_t last_ep, last_device;
};

void fake_start(struct fake *fake);
/* Ends every connection and thread; the socket and its directory are gone. */
void fake_stop(struct fake *fake);

void fake_set(struct fake *fake, Mok__Request__BodyCase request, enum fake_answer answer);
unsigned fake_seen(struct fake *fake, Mok__Request__BodyCase request);
/* Waits until `count` requests of the kind have been seen; fails the test after half a minute. */
void fake_await(struct fake *fake, Mok__Request__BodyCase request, unsigned count);
void fake_await_taken(struct fake *fake, unsigned count);
void fake_await_completed(struct fake *fake, unsigned count);
/* What forward and backward complete with from now on. */
void fake_complete_with(struct fake *fake, struct mok_cqe cqe);
struct mok_sqe fake_last_sqe(struct fake *fake);
Mok__Hello fake_last_hello(struct fake *fake);
Mok__LayerSpec fake_last_spec(struct fake *fake, uint32_t *ret_ep, uint32_t *ret_device);

/* On every connection: what a dying mokd, a dying worker, or a failing group looks like. */
void fake_hang_up(struct fake *fake);
void fake_close_queues(struct fake *fake, int code);
void fake_send(struct fake *fake, const Mok__Reply *event);
void fake_let_go(struct fake *fake);

#define fake_flag(fake, name, value) __atomic_store_n(&(fake)->name, (value), __ATOMIC_RELEASE)

#endif
