/* SPDX-License-Identifier: Apache-2.0 */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "mok/types.h"
#include "util.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

/* Small enough that a signal, which makes the kernel undo the chunk, cannot hold us up for ever. */
#define ALLOCATE_CHUNK (64u << 20)

/* From here on it is worth a look whether the memory is there: the kernel would rather kill someone than say no. */
#define LOOK_BEFORE (16u << 20)

static int memory_error(int error)
{
    switch (error) {
    case ENOSPC:
    case ENOMEM:
    case EFBIG:
        return -MOK_ENOMEM;
    case EMFILE:
    case ENFILE:
        return -MOK_EFDS;
    case EPERM:
    case EACCES:
        return -MOK_EACCESS;
    }
    return -MOK_EIO;
}

uint64_t mok_memory_round(uint64_t bytes)
{
    uint64_t up;
    return mok_add_u64(bytes, MOK_MEMORY_PAGE - 1, &up) ? up & ~(uint64_t)(MOK_MEMORY_PAGE - 1) : 0;
}

/* What the kernel could hand out now; UINT64_MAX when it does not say. */
static uint64_t available_bytes(void)
{
    unsigned long long kib = 0;
    char line[128];

    FILE *file = fopen("/proc/meminfo", "re");
    if (!file)
        return UINT64_MAX;
    bool found = false;
    while (!found && fgets(line, sizeof(line), file))
        found = sscanf(line, "MemAvailable: %llu kB", &kib) == 1;
    fclose(file);
    return found ? (uint64_t)kib * 1024 : UINT64_MAX;
}

static int allocate(int fd, uint64_t bytes)
{
    for (uint64_t at = 0; at < bytes;) {
        uint64_t size = bytes - at < ALLOCATE_CHUNK ? bytes - at : ALLOCATE_CHUNK;
        if (fallocate(fd, 0, (off_t)at, (off_t)size) < 0) {
            if (errno == EINTR)
                continue;
            return memory_error(errno);
        }
        at += size;
    }
    return 0;
}

static int create(const char *name, uint64_t bytes, int seals, int *ret_fd)
{
    if (bytes == 0 || bytes > INT64_MAX)
        return -MOK_ESIZE;
    if (bytes >= LOOK_BEFORE && bytes > available_bytes())
        return -MOK_ENOMEM;
    _cleanup_fd_ int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) /* kernels before 6.3 */
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return memory_error(errno);
    if (ftruncate(fd, (off_t)bytes) < 0)
        return memory_error(errno);
    int r = allocate(fd, bytes);
    if (r < 0)
        return r;
    if (fcntl(fd, F_ADD_SEALS, seals) < 0)
        return -MOK_EIO;
    *ret_fd = mok_take_fd(&fd);
    return 0;
}

int mok_memory_create(const char *name, uint64_t bytes, int *ret_fd)
{
    return create(name, bytes, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL, ret_fd);
}

int mok_memory_create_open(const char *name, uint64_t bytes, int *ret_fd)
{
    return create(name, bytes, F_SEAL_GROW | F_SEAL_SHRINK, ret_fd);
}

void mok_memory_empty(int fd, uint64_t bytes)
{
    int r;

    do
        r = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)mok_memory_round(bytes));
    while (r < 0 && errno == EINTR);
}

int mok_memory_seal_future_write(int fd)
{
    return fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL) < 0 ? memory_error(errno) : 0;
}

int mok_memory_map(int fd, uint64_t bytes, unsigned flags, void **ret_address)
{
    struct stat st;

    if (fstat(fd, &st) < 0)
        return -MOK_EIO;
    if (bytes == 0 || bytes > SIZE_MAX || st.st_size < 0 || (uint64_t)st.st_size < bytes)
        return -MOK_ESIZE;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || !(seals & F_SEAL_SHRINK))
        return -MOK_EACCESS;
    int protection = PROT_READ | (flags & MOK_MAP_WRITE ? PROT_WRITE : 0);
    void *address =
        mmap(NULL, (size_t)bytes, protection, MAP_SHARED | (flags & MOK_MAP_POPULATE ? MAP_POPULATE : 0), fd, 0);
    if (address == MAP_FAILED)
        return memory_error(errno);
    *ret_address = address;
    return 0;
}

void mok_memory_unmap(void *address, uint64_t bytes)
{
    if (address)
        munmap(address, (size_t)bytes);
}
