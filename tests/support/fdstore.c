/* SPDX-License-Identifier: Apache-2.0 */
#include "fdstore.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define FIRST_FD 3
#define FAR_FD 1000 /* where descriptors are out of the way of those that are being placed */

/* ------------------------------------------------------------------ entries */

/* Under the lock. */
static void add(struct fdstore *store, const char *name, int fd)
{
    if (store->count == store->capacity) {
        store->capacity = store->capacity ? 2 * store->capacity : 64;
        store->entry = realloc(store->entry, store->capacity * sizeof(*store->entry));
        if (!store->entry)
            abort();
    }
    struct fdstore_entry *entry = &store->entry[store->count++];
    snprintf(entry->name, sizeof(entry->name), "%s", name);
    entry->fd = fd;
}

/* Under the lock. All of that name. */
static void drop(struct fdstore *store, const char *name)
{
    size_t kept = 0;

    for (size_t i = 0; i < store->count; i++) {
        if (strcmp(store->entry[i].name, name) == 0)
            close(store->entry[i].fd);
        else
            store->entry[kept++] = store->entry[i];
    }
    store->count = kept;
}

/* ------------------------------------------------------------------ messages */

static bool has_line(const char *text, const char *line)
{
    size_t length = strlen(line);

    for (const char *at = text; (at = strstr(at, line)); at += length)
        if ((at == text || at[-1] == '\n') && (at[length] == '\n' || at[length] == 0))
            return true;
    return false;
}

static void name_in(const char *text, char ret[64])
{
    const char *at = strstr(text, "FDNAME=");

    snprintf(ret, 64, "%s", at ? at + strlen("FDNAME=") : "stored");
    ret[strcspn(ret, "\n")] = 0;
}

/* Under the lock. */
static void take(struct fdstore *store, const char *text, const int *fds, size_t count)
{
    char name[64];

    name_in(text, name);
    bool keep = has_line(text, "FDSTORE=1");
    for (size_t i = 0; i < count; i++) {
        if (keep && store->count < store->bound)
            add(store, name, fds[i]);
        else
            close(fds[i]);
    }
    if (has_line(text, "FDSTOREREMOVE=1")) {
        drop(store, name);
        store->removed++;
    }
}

/* Under the lock. False: nothing is there. */
static bool receive(struct fdstore *store)
{
    char text[1024];
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(16 * sizeof(int))];
    } control;
    struct iovec part = { .iov_base = text, .iov_len = sizeof(text) - 1 };
    struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = &control,
                              .msg_controllen = sizeof(control) };
    int fds[16];
    size_t count = 0;

    ssize_t n = recvmsg(store->socket, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (n < 0)
        return false;
    text[n] = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        memcpy(fds, CMSG_DATA(c), count * sizeof(int));
    }
    take(store, text, fds, count);
    return true;
}

static void *serve(void *cookie)
{
    struct fdstore *store = cookie;

    for (;;) {
        struct pollfd wait = { .fd = store->socket, .events = POLLIN };
        poll(&wait, 1, 20);
        pthread_mutex_lock(&store->lock);
        while (receive(store))
            ;
        bool closing = store->closing;
        pthread_mutex_unlock(&store->lock);
        if (closing)
            return NULL;
    }
}

/* ------------------------------------------------------------------ the whole */

int fdstore_open(struct fdstore *store, const char *path, unsigned bound)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };

    *store = (struct fdstore){ .bound = bound };
    snprintf(store->path, sizeof(store->path), "%s", path);
    memcpy(address.sun_path, store->path, sizeof(address.sun_path));
    pthread_mutex_init(&store->lock, NULL);
    store->socket = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (store->socket < 0 || bind(store->socket, (struct sockaddr *)&address, sizeof(address)) < 0)
        return -1;
    return pthread_create(&store->thread, NULL, serve, store) == 0 ? 0 : -1;
}

void fdstore_close(struct fdstore *store)
{
    pthread_mutex_lock(&store->lock);
    store->closing = true;
    pthread_mutex_unlock(&store->lock);
    pthread_join(store->thread, NULL);
    for (size_t i = 0; i < store->count; i++)
        close(store->entry[i].fd);
    free(store->entry);
    close(store->socket);
    unlink(store->path);
    pthread_mutex_destroy(&store->lock);
}

void fdstore_settle(struct fdstore *store)
{
    pthread_mutex_lock(&store->lock);
    while (receive(store))
        ;
    pthread_mutex_unlock(&store->lock);
}

void fdstore_hand_over(struct fdstore *store)
{
    char number[32], *names = calloc(store->count + 1, 65);
    int *moved = calloc(store->count + 1, sizeof(*moved));

    if (!names || !moved)
        _exit(127);
    for (size_t i = 0; i < store->count; i++)
        moved[i] = fcntl(store->entry[i].fd, F_DUPFD, FAR_FD);
    for (size_t i = 0; i < store->count; i++) {
        dup2(moved[i], FIRST_FD + (int)i);
        close(moved[i]);
        snprintf(names + strlen(names), 66, "%s%s", i ? ":" : "", store->entry[i].name);
    }
    setenv("NOTIFY_SOCKET", store->path, 1);
    if (store->bound > 0) {
        snprintf(number, sizeof(number), "%u", store->bound);
        setenv("FDSTORE", number, 1);
    }
    if (store->count == 0)
        return;
    snprintf(number, sizeof(number), "%zu", store->count);
    setenv("LISTEN_FDS", number, 1);
    setenv("LISTEN_FDNAMES", names, 1);
    snprintf(number, sizeof(number), "%d", (int)getpid());
    setenv("LISTEN_PID", number, 1);
}

size_t fdstore_count(struct fdstore *store)
{
    fdstore_settle(store);
    pthread_mutex_lock(&store->lock);
    size_t count = store->count;
    pthread_mutex_unlock(&store->lock);
    return count;
}

int fdstore_dup(struct fdstore *store, const char *name)
{
    int fd = -1;

    pthread_mutex_lock(&store->lock);
    for (size_t i = 0; i < store->count && fd < 0; i++)
        if (strcmp(store->entry[i].name, name) == 0)
            fd = fcntl(store->entry[i].fd, F_DUPFD_CLOEXEC, 0);
    pthread_mutex_unlock(&store->lock);
    return fd;
}

void fdstore_lose(struct fdstore *store, const char *name)
{
    pthread_mutex_lock(&store->lock);
    drop(store, name);
    pthread_mutex_unlock(&store->lock);
}

void fdstore_name(struct fdstore *store, size_t i, char ret[64])
{
    pthread_mutex_lock(&store->lock);
    snprintf(ret, 64, "%s", i < store->count ? store->entry[i].name : "");
    pthread_mutex_unlock(&store->lock);
}

int fdstore_plant(struct fdstore *store, const char *name, int fd)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);

    if (own < 0)
        return -1;
    pthread_mutex_lock(&store->lock);
    add(store, name, own);
    pthread_mutex_unlock(&store->lock);
    return 0;
}
