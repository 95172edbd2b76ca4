/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Guarded memory; see the header.
 */
#include "guarded.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define CANARY 0xa5
static const uint8_t poison_bytes[2] = { 0xc1, 0x7f };

static size_t page_size(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static struct guarded map(size_t bytes, int flags)
{
    size_t page = page_size(), inner = (bytes + page - 1) / page * page;
    struct guarded memory = { .map_bytes = inner + 2 * page, .bytes = bytes };

    memory.map = mmap(NULL, memory.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    if (memory.map == MAP_FAILED || (inner && mprotect(memory.map + page, inner, PROT_READ | PROT_WRITE) < 0)) {
        perror("guarded memory");
        abort();
    }
    memory.data = memory.map + page;
    return memory;
}

struct guarded guarded_alloc(size_t bytes, enum guarded_end end)
{
    struct guarded memory = map(bytes, 0);
    size_t inner = memory.map_bytes - 2 * page_size();

    memset(memory.map + page_size(), CANARY, inner);
    if (end == GUARDED_AT_END)
        memory.data += (inner - bytes) / 16 * 16;
    poison(memory.data, bytes);
    return memory;
}

struct guarded guarded_alloc_sparse(size_t bytes)
{
    struct guarded memory = map(bytes, MAP_NORESERVE);
    memory.sparse = true;
    return memory;
}

void guarded_free(struct guarded *memory)
{
    if (memory->map)
        munmap(memory->map, memory->map_bytes);
    memset(memory, 0, sizeof(*memory));
}

/* Each byte equals the one before it, and the first one is right. */
static bool all_bytes(const uint8_t *from, const uint8_t *to, uint8_t value)
{
    return from == to || (*from == value && !memcmp(from, from + 1, (size_t)(to - from) - 1));
}

bool guarded_check(const struct guarded *memory)
{
    size_t page = page_size();

    if (!memory->map || memory->sparse)
        return true;
    return all_bytes(memory->map + page, memory->data, CANARY) &&
           all_bytes(memory->data + memory->bytes, memory->map + memory->map_bytes - page, CANARY);
}

void poison(void *memory, size_t bytes)
{
    uint8_t *to = memory;

    memcpy(to, poison_bytes, bytes < 2 ? bytes : 2);
    for (size_t done = 2; done < bytes; done *= 2)
        memcpy(to + done, to, done < bytes - done ? done : bytes - done);
}

bool is_poison(const void *memory, size_t bytes)
{
    const uint8_t *from = memory;

    if (bytes < 2)
        return bytes == 0 || from[0] == poison_bytes[0];
    return !memcmp(from, poison_bytes, 2) && !memcmp(from, from + 2, bytes - 2);
}
