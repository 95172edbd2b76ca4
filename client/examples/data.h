/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The training text, and which bytes belong to which sequence of which step. Sequences are drawn by number, so the
 * global batch is the same however many ranks share it.
 */
#ifndef EXAMPLE_DATA_H
#define EXAMPLE_DATA_H

#include <stddef.h>
#include <stdint.h>

#include "rng.h"

struct text {
    uint8_t *bytes;
    size_t size;
    uint64_t hash;
};

/* Reads the file whole. It must hold at least `window + seq + 1` bytes and at most 1 GiB. */
int text_read(const char *path, size_t window, size_t seq, struct text *ret);
void text_free(struct text *text);

/*
 * Position of sequence `index` of step `step`'s global batch, in a text of `size` bytes: token t sees the bytes at
 * position + t, position + t - 1, ... position + t - (window - 1), and is to predict the byte at position + t + 1.
 */
RNG_FUNCTION size_t text_position(size_t size, size_t window, size_t seq, uint64_t seed, uint64_t step, uint64_t index)
{
    size_t first = window - 1, last = size - seq - 1;

    return first + (size_t)rng_below(seed, 0x74657874u ^ (step << 32), index, last - first + 1);
}

/* The sequences of one micro-batch of one rank. */
struct batch {
    const uint8_t *text;
    size_t size;
    unsigned window, seq;
    uint64_t seed, step;
    uint64_t first; /* of the step's sequences */
};

/* Where in the text token `token` of a micro-batch is. */
RNG_FUNCTION size_t batch_place(const struct batch *b, size_t token)
{
    return text_position(b->size, b->window, b->seq, b->seed, b->step, b->first + token / b->seq) + token % b->seq;
}

#endif
