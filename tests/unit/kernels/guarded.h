/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that notices strays: exactly the bytes asked for, canaries up to the page's borders, and pages without any
 * access before and behind. A write past the end within a page is found by guarded_check, beyond it by the MMU.
 */
#ifndef MOK_TESTS_GUARDED_H
#define MOK_TESTS_GUARDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct guarded {
    uint8_t *map; /* whole mapping, guard pages included */
    size_t map_bytes;
    uint8_t *data;
    size_t bytes;
    bool sparse;
};

enum guarded_end {
    GUARDED_AT_END = 0, /* data ends at the guard page but for up to 15 bytes: 16-byte alignment, no better */
    GUARDED_PAGE_START, /* data starts at a page, as a mapped descriptor would */
};

/* Filled with poison. Aborts the test when memory is short. */
struct guarded guarded_alloc(size_t bytes, enum guarded_end end);
/* Zeroed, without reservation, canaries left out: for areas of many GiB that are hardly touched. */
struct guarded guarded_alloc_sparse(size_t bytes);
void guarded_free(struct guarded *memory);
/* True while the canaries are whole. */
bool guarded_check(const struct guarded *memory);

/* Fills with bits that are a NaN as BF16 and as FP32, and an expert id far out of range. */
void poison(void *memory, size_t bytes);
bool is_poison(const void *memory, size_t bytes);

#endif
