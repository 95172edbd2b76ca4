/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Words shared between processes: atomic access, the full fence of the sleep/wake protocols, futexes.
 * Futexes here are always the shared kind, and may lie in a read-only mapping.
 */
#ifndef MOK_SYNC_H
#define MOK_SYNC_H

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define mok_load_relaxed(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define mok_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define mok_store_relaxed(p, value) __atomic_store_n((p), (value), __ATOMIC_RELAXED)
#define mok_store_release(p, value) __atomic_store_n((p), (value), __ATOMIC_RELEASE)

/*
 * Store, fence, load on one side against store, fence, load on the other: at least one sees the other's store.
 * The thread sanitizer does not model fences; nothing here relies on one for the visibility of plain data.
 */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wtsan"
#endif
static inline void mok_fence_full(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif

/* Sleeps while *word == expected, until CLOCK_MONOTONIC reaches deadline_ns (0: no limit). 0 or -errno. */
static inline int mok_futex_wait(const uint32_t *word, uint32_t expected, uint64_t deadline_ns)
{
    struct timespec until = { .tv_sec = (time_t)(deadline_ns / 1000000000u),
                              .tv_nsec = (long)(deadline_ns % 1000000000u) };
    long r = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, deadline_ns ? &until : NULL, NULL,
                     FUTEX_BITSET_MATCH_ANY);
    return r < 0 ? -errno : 0;
}

/* Wakes everyone who sleeps on the word. Never fails in a way that a caller could act on. */
static inline void mok_futex_wake_all(const uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

#endif
