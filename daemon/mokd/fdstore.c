/* SPDX-License-Identifier: Apache-2.0 */
#include "fdstore.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <systemd/sd-daemon.h>

#include "common/log.h"
#include "mok/types.h"
#include "util.h"

#define PREFIX "mok-"
#define STATE_NAME PREFIX "state"
#define MAX_BOUND 1048576u
/* Places that only mokd itself may use: the state, and two lives of a few workers. */
#define RESERVED 8u

struct kept {
    uint64_t number; /* 0: the state */
    int fd;          /* inherited and not taken; else -1 */
};

struct mokd_fdstore {
    uint32_t bound; /* 0: there is no store */
    size_t count, capacity;
    struct kept *list; /* what the manager holds, by number ascending */
    uint64_t last;
    bool complained;
};

/* ------------------------------------------------------------------ the list */

/* Where a number is, or would be. */
static size_t place_of(const struct mokd_fdstore *store, uint64_t number)
{
    size_t low = 0, high = store->count;

    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (store->list[middle].number < number)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static struct kept *find(struct mokd_fdstore *store, uint64_t number)
{
    size_t at = place_of(store, number);
    return at < store->count && store->list[at].number == number ? &store->list[at] : NULL;
}

static int insert(struct mokd_fdstore *store, uint64_t number, int fd)
{
    size_t at = place_of(store, number);

    if (store->count == store->capacity) {
        size_t capacity = store->capacity ? 2 * store->capacity : 64;
        struct kept *larger = realloc(store->list, capacity * sizeof(*larger));
        if (!larger)
            return -MOK_ENOMEM;
        store->list = larger;
        store->capacity = capacity;
    }
    memmove(&store->list[at + 1], &store->list[at], (store->count - at) * sizeof(*store->list));
    store->list[at] = (struct kept){ .number = number, .fd = fd };
    store->count++;
    return 0;
}

static void erase(struct mokd_fdstore *store, struct kept *kept)
{
    size_t at = (size_t)(kept - store->list);

    mok_close(kept->fd);
    memmove(kept, kept + 1, (store->count - at - 1) * sizeof(*kept));
    store->count--;
}

/* ------------------------------------------------------------------ the manager */

static void name_of(uint64_t number, char *ret, size_t size)
{
    if (number == 0)
        snprintf(ret, size, STATE_NAME);
    else
        snprintf(ret, size, PREFIX "%" PRIu64, number);
}

/* False for names that are not ours. */
static bool number_of(const char *name, uint64_t *ret)
{
    char canonical[64];

    if (strcmp(name, STATE_NAME) == 0) {
        *ret = 0;
        return true;
    }
    if (strncmp(name, PREFIX, strlen(PREFIX)) != 0)
        return false;
    *ret = strtoull(name + strlen(PREFIX), NULL, 10);
    name_of(*ret, canonical, sizeof(canonical));
    return *ret != 0 && strcmp(name, canonical) == 0;
}

/* Said once: what follows from it is said of each session in status. */
static int complain(struct mokd_fdstore *store, const char *what, const char *remedy)
{
    if (!store->complained)
        mok_log(MOK_LOG_WARNING, "fdstore", "descriptors are not kept: new sessions end when mokd is restarted",
                "error=\"%s\" used=%zu bound=%" PRIu32 " remedy=\"%s\"", what, store->count, store->bound, remedy);
    store->complained = true;
    return -MOK_EFDS;
}

/* Watching what it keeps is no help: a memory that nobody else has is no reason to forget it. */
static int tell_keep(struct mokd_fdstore *store, uint64_t number, int fd)
{
    char name[64], text[128];

    name_of(number, name, sizeof(name));
    snprintf(text, sizeof(text), "FDSTORE=1\nFDPOLL=0\nFDNAME=%s", name);
    int r = sd_pid_notify_with_fds(0, 0, text, &fd, 1);
    return r > 0 ? 0 : complain(store, strerror(-r), "see why the service manager does not take notifications");
}

static void tell_drop(uint64_t number)
{
    char name[64];

    name_of(number, name, sizeof(name));
    sd_notifyf(0, "FDSTOREREMOVE=1\nFDNAME=%s", name);
}

/* ------------------------------------------------------------------ opening */

static uint32_t bound_from_environment(void)
{
    const char *text = getenv("FDSTORE"), *socket = getenv("NOTIFY_SOCKET");
    char *end;

    if (!text || !text[0] || !socket || !socket[0])
        return 0;
    unsigned long bound = strtoul(text, &end, 10);
    if (*end || bound == 0)
        return 0;
    return bound < MAX_BOUND ? (uint32_t)bound : MAX_BOUND;
}

/*
 * Two of one name are nothing that we left there: the second stays in `inherited`, the name is dropped by whoever
 * reads.
 */
static int take_inherited(struct mokd_fdstore *store, struct mokd_inherited *inherited)
{
    uint64_t number;

    for (size_t i = 0; i < inherited->count; i++) {
        struct mokd_inherited_fd *entry = &inherited->list[i];
        if (entry->fd < 0 || !number_of(entry->name, &number) || find(store, number))
            continue;
        if (insert(store, number, entry->fd) < 0)
            return -MOK_ENOMEM;
        entry->fd = -1;
        if (number > store->last)
            store->last = number;
    }
    return 0;
}

int mokd_fdstore_open(struct mokd_inherited *inherited, struct mokd_fdstore **ret)
{
    struct mokd_fdstore *store = calloc(1, sizeof(*store));

    if (!store)
        return -MOK_ENOMEM;
    store->bound = bound_from_environment();
    int r = take_inherited(store, inherited);
    if (r < 0) {
        mokd_fdstore_close(store);
        return r;
    }
    *ret = store;
    return 0;
}

void mokd_fdstore_close(struct mokd_fdstore *store)
{
    if (!store)
        return;
    for (size_t i = 0; i < store->count; i++)
        mok_close(store->list[i].fd);
    free(store->list);
    free(store);
}

bool mokd_fdstore_is_there(const struct mokd_fdstore *store)
{
    return store && store->bound > 0;
}

void mokd_fdstore_count(const struct mokd_fdstore *store, uint32_t *ret_used, uint32_t *ret_bound)
{
    *ret_used = store ? (uint32_t)store->count : 0;
    *ret_bound = store ? store->bound : 0;
}

/* ------------------------------------------------------------------ keeping and dropping */

static int keep(struct mokd_fdstore *store, uint64_t number, int fd, enum mokd_fdstore_use use)
{
    uint32_t free_for_clients = store->bound > RESERVED ? store->bound - RESERVED : 0;

    if (store->count >= (use == MOKD_FDSTORE_OWN ? store->bound : free_for_clients))
        return complain(store, "the service manager's store is full", "raise FileDescriptorStoreMax of the unit");
    if (insert(store, number, -1) < 0)
        return -MOK_ENOMEM;
    int r = tell_keep(store, number, fd);
    if (r < 0)
        erase(store, find(store, number));
    return r;
}

uint64_t mokd_fdstore_keep(struct mokd_fdstore *store, int fd, enum mokd_fdstore_use use)
{
    if (!mokd_fdstore_is_there(store) || keep(store, store->last + 1, fd, use) < 0)
        return 0;
    return ++store->last;
}

void mokd_fdstore_drop(struct mokd_fdstore *store, uint64_t number)
{
    struct kept *kept = store && number ? find(store, number) : NULL;

    if (!kept)
        return;
    erase(store, kept);
    tell_drop(number);
    store->complained = false; /* there is room again; that it goes again is news */
}

int mokd_fdstore_keep_state(struct mokd_fdstore *store, int fd)
{
    return mokd_fdstore_is_there(store) ? keep(store, 0, fd, MOKD_FDSTORE_OWN) : -MOK_ENOTSUP;
}

int mokd_fdstore_take_state(struct mokd_fdstore *store)
{
    struct kept *kept = find(store, 0);
    return kept ? mok_take_fd(&kept->fd) : -1;
}

int mokd_fdstore_take(struct mokd_fdstore *store, uint64_t number)
{
    struct kept *kept = number ? find(store, number) : NULL;
    return kept ? mok_take_fd(&kept->fd) : -1;
}

unsigned mokd_fdstore_drop_rest(struct mokd_fdstore *store)
{
    unsigned dropped = 0;

    for (size_t i = store->count; i-- > 0;) {
        uint64_t number = store->list[i].number;
        if (store->list[i].fd < 0)
            continue;
        erase(store, &store->list[i]);
        tell_drop(number);
        dropped++;
    }
    return dropped;
}

void mokd_fdstore_clear(struct mokd_fdstore *store)
{
    while (store->count > 0) {
        uint64_t number = store->list[store->count - 1].number;
        erase(store, &store->list[store->count - 1]);
        tell_drop(number);
    }
}

uint64_t mokd_fdstore_last(const struct mokd_fdstore *store)
{
    return store ? store->last : 0;
}

void mokd_fdstore_continue(struct mokd_fdstore *store, uint64_t last)
{
    if (last > store->last)
        store->last = last;
}
