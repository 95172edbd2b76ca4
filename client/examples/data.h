/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The training text, and which bytes belong to which sequence of which step. Sequences are drawn by number, so the
 * global batch is the same however many ranks share it.
 */
#ifndef EXAMPLE_DATA_H
#define EXAMPLE_DATA_H

#include <stddef.h>
#include <stdint.h>

struct text {
    uint8_t *bytes;
    size_t size;
    uint64_t hash;
};

/* Reads the file whole. It must hold at least `window + seq + 1` bytes and at most 1 GiB. */
int text_read(const char *path, size_t window, size_t seq, struct text *ret);
void text_free(struct text *text);

/*
 * Position of sequence `index` of step `step`'s global batch: token t sees the bytes at position + t, position + t - 1,
 * ... position + t - (window - 1), and is to predict the byte at position + t + 1.
 */
size_t text_position(const struct text *text, size_t window, size_t seq, uint64_t seed, uint64_t step, uint64_t index);

#endif
