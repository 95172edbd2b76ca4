/* SPDX-License-Identifier: Apache-2.0 */
#include "stream.h"

#include <inttypes.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "error.h"
#include "memory.h"
#include "mok/mok.h"
#include "util.h"

/* How long an ending session waits for streams that it has just released. */
#define PASS_TRIES 200
#define PASS_NAP_NS 1000000

static bool reached(const uint32_t *word, uint32_t number)
{
    return (int32_t)(__atomic_load_n(word, __ATOMIC_ACQUIRE) - number) >= 0;
}

int stream_page_open(int fd, uint64_t bytes, uint32_t count, struct cuda_device *device, struct stream_page **ret)
{
    struct stream_page *page = NULL;
    struct stream_use *use = NULL;
    void *memory = NULL;

    if (count == 0 || bytes < count * sizeof(struct mok_stream_slot))
        return client_fail(MOK_EPROTO, "mokd sent %" PRIu64 " bytes for %" PRIu32 " stream slots", bytes, count);
    int r = mok_memory_map(fd, bytes, MOK_MAP_WRITE, &memory);
    if (r < 0)
        return client_fail(r, "the stream slots that mokd sent cannot be mapped: %s", mok_strerror(r));
    page = calloc(1, sizeof(*page));
    use = calloc(count, sizeof(*use));
    if (!page || !use || madvise(memory, bytes, MADV_DONTFORK) < 0)
        r = client_fail(MOK_ENOMEM, "no memory for %" PRIu32 " stream slots", count);
    else
        r = cuda_register(device, memory, bytes, &page->device_address);
    if (r < 0) {
        free(use);
        free(page);
        mok_memory_unmap(memory, bytes);
        return r;
    }
    page->device = device;
    page->slot = memory;
    page->bytes = bytes;
    page->count = count;
    page->use = use;
    *ret = page;
    return 0;
}

static bool all_passed(const struct stream_page *page)
{
    for (uint32_t i = 0; i < page->count; i++)
        if (!reached(&page->slot[i].passed, page->use[i].number))
            return false;
    return true;
}

void stream_page_close(struct stream_page *page)
{
    const struct timespec nap = { .tv_nsec = PASS_NAP_NS };

    if (!page)
        return;
    for (uint32_t i = 0; i < page->count; i++)
        stream_end(page, i);
    for (int i = 0; i < PASS_TRIES && !all_passed(page); i++)
        nanosleep(&nap, NULL);
    if (all_passed(page)) {
        cuda_unregister(page->device, page->slot);
        mok_memory_unmap(page->slot, page->bytes);
    }
    free(page->use);
    free(page);
}

int stream_take(struct stream_page *page, uint32_t *ret_slot)
{
    for (uint32_t tried = 0; tried < page->count; tried++) {
        uint32_t i = page->turn++ % page->count;
        struct stream_use *use = &page->use[i];
        if (use->busy || !reached(&page->slot[i].passed, use->number))
            continue;
        use->busy = true;
        use->number++;
        *ret_slot = i;
        return 0;
    }
    return client_fail(MOK_EAGAIN, "streams have not come past %" PRIu32 " operations yet, must be past one of them",
                       page->count);
}

int stream_check(struct stream_page *page, void *stream)
{
    return cuda_check_stream(page->device, stream);
}

int stream_hand_over(struct stream_page *page, uint32_t slot, void *stream)
{
    uint64_t at = page->device_address + slot * sizeof(struct mok_stream_slot);
    const struct cuda_words words = {
        .start = at + offsetof(struct mok_stream_slot, start),
        .doorbell = at + offsetof(struct mok_stream_slot, doorbell),
        .done = at + offsetof(struct mok_stream_slot, done),
        .passed = at + offsetof(struct mok_stream_slot, passed),
    };
    return cuda_hand_over(page->device, stream, &words, page->use[slot].number);
}

void stream_end(struct stream_page *page, uint32_t slot)
{
    if (!reached(&page->slot[slot].done, page->use[slot].number))
        __atomic_store_n(&page->slot[slot].done, page->use[slot].number, __ATOMIC_RELEASE);
    page->use[slot].busy = false;
}

void stream_forget(struct stream_page *page, uint32_t slot)
{
    __atomic_store_n(&page->slot[slot].passed, page->use[slot].number, __ATOMIC_RELEASE);
}
