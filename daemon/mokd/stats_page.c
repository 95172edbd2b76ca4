/* SPDX-License-Identifier: Apache-2.0 */
#include "stats_page.h"

#include <stddef.h>
#include <string.h>

#include "memory.h"
#include "util.h"

#define PAGE_BYTES sizeof(struct mok_stats)

int mokd_stats_page_open(struct mokd_stats_page *page)
{
    _cleanup_fd_ int fd = -1;
    void *address = NULL;

    int r = mok_memory_create("mok-stats", mok_memory_round(PAGE_BYTES), &fd);
    if (r == 0)
        r = mok_memory_map(fd, PAGE_BYTES, MOK_MAP_READ, &address);
    if (r < 0)
        return r;
    page->fd = mok_take_fd(&fd);
    page->stats = address;
    return 0;
}

void mokd_stats_page_close(struct mokd_stats_page *page)
{
    mok_memory_unmap((void *)page->stats, PAGE_BYTES);
    page->fd = mok_close(page->fd);
    page->stats = NULL;
}

const struct mok_stats *mokd_stats_page_read(const struct mokd_stats_page *page)
{
    const struct mok_stats *stats = page->stats;

    if (!stats || __atomic_load_n(&stats->magic, __ATOMIC_ACQUIRE) != MOK_STATS_MAGIC)
        return NULL;
    return stats->version == MOK_STATS_VERSION ? stats : NULL;
}

static uint32_t used(const uint32_t *word, uint32_t bound)
{
    uint32_t value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    return value < bound ? value : bound;
}

bool mokd_stats_page_queue(const struct mokd_stats_page *page, uint32_t queue, struct mok_stats_queue *ret)
{
    const struct mok_stats *stats = mokd_stats_page_read(page);
    uint32_t count = stats ? used(&stats->queues_used, MOK_STATS_QUEUES) : 0;

    for (uint32_t i = 0; i < count; i++) {
        const struct mok_stats_queue *slot = &stats->queue[i];
        if (__atomic_load_n(&slot->queue, __ATOMIC_ACQUIRE) != queue)
            continue;
        memcpy(ret, slot, sizeof(*ret));
        return true;
    }
    return false;
}

bool mokd_stats_page_layer(const struct mokd_stats_page *page, uint32_t layer, struct mok_stats_layer *ret)
{
    const struct mok_stats *stats = mokd_stats_page_read(page);
    uint32_t count = stats ? used(&stats->layers_used, MOK_STATS_LAYERS) : 0;

    for (uint32_t i = 0; i < count; i++) {
        const struct mok_stats_layer *slot = &stats->layer[i];
        if (__atomic_load_n(&slot->layer, __ATOMIC_ACQUIRE) != layer)
            continue;
        memcpy(ret, slot, sizeof(*ret));
        ret->bins = ret->bins < MOK_STATS_BINS ? ret->bins : MOK_STATS_BINS;
        return ret->bins > 0;
    }
    return false;
}
