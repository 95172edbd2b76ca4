/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Small helpers that every module needs: clean-up attributes, overflow-safe arithmetic, clocks.
 * Nothing here allocates, logs or keeps state.
 */
#ifndef MOK_UTIL_H
#define MOK_UTIL_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))

/* Closes if open and returns -1, so that `fd = mok_close(fd)` leaves nothing behind. Keeps errno. */
int mok_close(int fd);

static inline void mok_cleanup_fd(int *fd)
{
    mok_close(*fd);
}
static inline void mok_cleanup_free(void *pointer)
{
    free(*(void **)pointer);
}
#define _cleanup_fd_ __attribute__((cleanup(mok_cleanup_fd)))
#define _cleanup_free_ __attribute__((cleanup(mok_cleanup_free)))
#define _printf_(text, first) __attribute__((format(printf, text, first)))

/* Takes ownership out of a variable with a clean-up attribute. */
static inline int mok_take_fd(int *fd)
{
    int value = *fd;
    *fd = -1;
    return value;
}
static inline void *mok_take_pointer_(void *pointer)
{
    void *value = *(void **)pointer;
    *(void **)pointer = NULL;
    return value;
}
#define mok_take_pointer(p) ((__typeof__(*(p)))mok_take_pointer_(p))

static inline uint64_t mok_now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline bool mok_is_power_of_two(uint64_t value)
{
    return value && !(value & (value - 1));
}

/* True and *ret = a * b when it fits. */
static inline bool mok_mul_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    return !__builtin_mul_overflow(a, b, ret);
}
static inline bool mok_add_u64(uint64_t a, uint64_t b, uint64_t *ret)
{
    return !__builtin_add_overflow(a, b, ret);
}

#endif
