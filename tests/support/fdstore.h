/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A service manager as far as its descriptor store goes: a socket for notifications, what was put there by name, and
 * programs that are started with it. Keeps silent about what it does not take, as systemd does.
 */
#ifndef MOK_TEST_FDSTORE_H
#define MOK_TEST_FDSTORE_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct fdstore {
    char path[108];
    unsigned bound;
    int socket;
    pthread_t thread;
    pthread_mutex_t lock; /* all below */
    bool closing;
    size_t count, capacity;
    struct fdstore_entry {
        char name[64];
        int fd;
    } * entry;
    unsigned removed; /* names that were asked to be dropped */
};

/* `bound`: descriptors it keeps, also what $FDSTORE says; 0: it says nothing and keeps nothing. 0 or -1. */
int fdstore_open(struct fdstore *store, const char *path, unsigned bound);
void fdstore_close(struct fdstore *store);

/* Takes what has been sent so far. */
void fdstore_settle(struct fdstore *store);
/*
 * In a child, before exec: what it keeps becomes descriptors 3, 4 ... of this process, with the environment that says
 * so.
 */
void fdstore_hand_over(struct fdstore *store);

size_t fdstore_count(struct fdstore *store);
/* A duplicate of what is kept under a name; -1: nothing. */
int fdstore_dup(struct fdstore *store, const char *name);
/* Forgets one, as if it had never been taken. */
void fdstore_lose(struct fdstore *store, const char *name);
/* The name of the i-th entry; "" beyond the last. */
void fdstore_name(struct fdstore *store, size_t i, char ret[64]);
/* Puts one in from outside. */
int fdstore_plant(struct fdstore *store, const char *name, int fd);

#endif
