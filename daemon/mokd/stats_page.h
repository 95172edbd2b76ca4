/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The page that a device's workers count on (stats.h), as mokd sees it: made once a device, read-only for us, and
 * handed to each worker in turn, so that counters never fall while mokd lives. What a worker wrote is never trusted as
 * an index.
 */
#ifndef MOKD_STATS_PAGE_H
#define MOKD_STATS_PAGE_H

#include <stdbool.h>
#include <stdint.h>

#include "stats.h"

struct mokd_stats_page {
    int fd;
    const struct mok_stats *stats; /* NULL: none */
};
#define MOKD_STATS_PAGE_INIT { .fd = -1 }

/* -MOK_ENOMEM, -MOK_EFDS, -MOK_EIO. */
int mokd_stats_page_open(struct mokd_stats_page *page);
void mokd_stats_page_close(struct mokd_stats_page *page);

/* The numbers, or NULL before the first worker has begun. */
const struct mok_stats *mokd_stats_page_read(const struct mokd_stats_page *page);
/* Copies of a queue's and a layer's; false: not on the page. */
bool mokd_stats_page_queue(const struct mokd_stats_page *page, uint32_t queue, struct mok_stats_queue *ret);
bool mokd_stats_page_layer(const struct mokd_stats_page *page, uint32_t layer, struct mok_stats_layer *ret);

#endif
