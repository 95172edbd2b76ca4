/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that processes share: memfds of a fixed size whose pages are really there.
 * No named segment ever exists, so nothing can be left behind; a receiver that checked the size can rely on it.
 */
#ifndef MOK_MEMORY_H
#define MOK_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#define MOK_MEMORY_PAGE 4096u

enum mok_memory_map_flags {
    MOK_MAP_READ = 0,
    MOK_MAP_WRITE = 1 << 0,    /* also writable */
    MOK_MAP_POPULATE = 1 << 1, /* touch every page now */
};

/* Up to the next page border; 0 when that does not fit. */
uint64_t mok_memory_round(uint64_t bytes);

/*
 * Creates `bytes` (> 0) of zeroed, allocated memory that can neither grow nor shrink. `name` is for people who look
 * into /proc. The descriptor is close-on-exec. mok_memory_create also forbids further seals; _open leaves that to
 * mok_memory_seal_future_write. -MOK_ESIZE, -MOK_ENOMEM, -MOK_EFDS, -MOK_EIO.
 */
int mok_memory_create(const char *name, uint64_t bytes, int *ret_fd);
int mok_memory_create_open(const char *name, uint64_t bytes, int *ret_fd);

/* Gives the pages back whoever else still holds the file, which keeps its size and reads as zeros. Best effort. */
void mok_memory_empty(int fd, uint64_t bytes);

/* From now on nobody gets write access any more; mappings that are writable already stay so. Final. */
int mok_memory_seal_future_write(int fd);

/*
 * Maps the first `bytes`; the memory must be at least that large (else -MOK_ESIZE) and, since its size could change
 * under the mapping otherwise, sealed against shrinking (else -MOK_EACCESS). -MOK_EACCESS: sealed against writing;
 * -MOK_ENOMEM; -MOK_EIO.
 */
int mok_memory_map(int fd, uint64_t bytes, unsigned flags, void **ret_address);
void mok_memory_unmap(void *address, uint64_t bytes); /* NULL is fine */

#endif
