/* SPDX-License-Identifier: Apache-2.0 */
#include "fork.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "error.h"

/*
 * The kernel wipes the page in a child, so the word differs from every mark that the parent gave out. Where it
 * cannot, the process id takes the word's place.
 */
static uint32_t *wiped_word;
static pid_t wiped_pid;
static uint32_t last_mark;

static pthread_mutex_t owned_lock = PTHREAD_MUTEX_INITIALIZER;
static int *owned;
static size_t owned_count, owned_capacity;

static void before_fork(void)
{
    pthread_mutex_lock(&owned_lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&owned_lock);
}

static void in_child(void)
{
    for (size_t i = 0; i < owned_count; i++)
        close(owned[i]);
    owned_count = 0;
    pthread_mutex_unlock(&owned_lock);
}

/* Under the lock. */
static int prepare(void)
{
    if (wiped_word)
        return 0;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *memory = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return client_fail(MOK_ENOMEM, "no memory for the fork mark (%zu bytes)", page);
    if (pthread_atfork(before_fork, in_parent, in_child) != 0) {
        munmap(memory, page);
        return client_fail(MOK_ENOMEM, "no memory for the fork handlers");
    }
    if (madvise(memory, page, MADV_WIPEONFORK) < 0)
        wiped_pid = getpid();
    wiped_word = memory;
    return 0;
}

int fork_mark(uint32_t *ret_mark)
{
    pthread_mutex_lock(&owned_lock);
    int r = prepare();
    if (r < 0) {
        pthread_mutex_unlock(&owned_lock);
        return r;
    }
    uint32_t mark = __atomic_load_n(wiped_word, __ATOMIC_RELAXED);
    if (mark == 0 || (wiped_pid != 0 && wiped_pid != getpid())) {
        if (wiped_pid != 0)
            wiped_pid = getpid();
        mark = ++last_mark;
        __atomic_store_n(wiped_word, mark, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&owned_lock);
    *ret_mark = mark;
    return 0;
}

bool fork_happened(uint32_t mark)
{
    if (__atomic_load_n(wiped_word, __ATOMIC_RELAXED) != mark)
        return true;
    return wiped_pid != 0 && wiped_pid != getpid();
}

int fork_own_fd(int fd)
{
    int r = 0;

    pthread_mutex_lock(&owned_lock);
    if (owned_count == owned_capacity) {
        size_t capacity = owned_capacity ? 2 * owned_capacity : 16;
        int *larger = realloc(owned, capacity * sizeof(*owned));
        if (larger) {
            owned = larger;
            owned_capacity = capacity;
        } else {
            r = client_fail(MOK_ENOMEM, "no memory to note a descriptor");
        }
    }
    if (r == 0)
        owned[owned_count++] = fd;
    pthread_mutex_unlock(&owned_lock);
    return r;
}

void fork_disown_fd(int fd)
{
    pthread_mutex_lock(&owned_lock);
    for (size_t i = 0; i < owned_count; i++) {
        if (owned[i] == fd) {
            owned[i] = owned[--owned_count];
            break;
        }
    }
    pthread_mutex_unlock(&owned_lock);
}
