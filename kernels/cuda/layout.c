/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sizes of a rank's private workspace on a CUDA device. Arithmetic only; needs no GPU, so that a plan can be made
 * and priced anywhere.
 */
#include <stdio.h>
#include <string.h>

#include "layout.h"

static uint64_t div_up(uint64_t a, uint64_t b) {
    return (a + b - 1) / b;
}

static uint64_t max_u64(uint64_t a, uint64_t b) {
    return a > b ? a : b;
}

static uint64_t take(uint64_t *cursor, uint64_t bytes) {
    uint64_t at = *cursor;
    *cursor = at + div_up(bytes, 1024) * 1024;
    return at;
}

int mok_cuda_layout_make(const struct mok_layer_spec *spec, uint64_t ring_rows, uint32_t minibatch_rows,
                         struct mok_cuda_layout *ret, struct mok_message *message) {
    struct mok_cuda_layout l = {0};
    uint64_t local = spec->experts / spec->ep;
    uint64_t rows = (uint64_t)spec->ep * spec->max_tokens * spec->topk;
    uint64_t shared_rows = spec->shared_intermediate ? div_up(spec->max_tokens, MOK_SEGMENT_ALIGN) * MOK_SEGMENT_ALIGN : 0;
    uint64_t units, shared_units, cursor = 0;

    l.padded_rows = rows ? rows + local * (MOK_SEGMENT_ALIGN - 1) : 0;
    l.padded_rows = div_up(l.padded_rows, MOK_SEGMENT_ALIGN) * MOK_SEGMENT_ALIGN;
    l.ring_rows = max_u64(ring_rows, div_up(l.padded_rows, MOK_CUDA_MAX_MACROBATCHES - 1));
    l.ring_rows = max_u64(div_up(l.ring_rows, MOK_UNIT_ROWS) * MOK_UNIT_ROWS, MOK_UNIT_ROWS);
    l.counters = (l.padded_rows + shared_rows) / MOK_SEGMENT_ALIGN + MOK_UNIT_ROWS / MOK_SEGMENT_ALIGN;
    if (l.counters > UINT32_MAX) {
        if (message)
            snprintf(message->text, sizeof(message->text), "rows of this rank at worst, %llu, exceed what a schedule can count",
                     (unsigned long long)rows);
        return -MOK_ERANGE;
    }

    l.gate_up_tiles = (uint32_t)div_up(spec->intermediate, MOK_TILE_N / 2);
    l.shared_gate_up_tiles = (uint32_t)div_up(spec->shared_intermediate, MOK_TILE_N / 2);
    l.down_tiles = (uint32_t)div_up(spec->hidden, MOK_TILE_N);
    units = l.padded_rows / MOK_UNIT_ROWS + local;
    shared_units = div_up(shared_rows, MOK_UNIT_ROWS);
    l.units_per_chunk = (uint32_t)max_u64(max_u64(div_up(minibatch_rows, MOK_UNIT_ROWS), div_up(units, 512)), 1);
    l.max_segments = div_up(units, l.units_per_chunk) + 2 * local + MOK_CUDA_MAX_MACROBATCHES + 8;
    units += l.max_segments; /* a segment that is cut may end in a unit of its own */
    l.max_tasks = units * (1 + l.gate_up_tiles + l.down_tiles) + shared_units * (l.shared_gate_up_tiles + l.down_tiles);

    l.head = take(&cursor, sizeof(struct mok_cuda_head));
    l.segments = take(&cursor, l.max_segments * sizeof(struct mok_cuda_segment));
    l.counts = take(&cursor, MOK_CUDA_MAX_BLOCKS * local * sizeof(uint32_t));
    l.expert_row64 = take(&cursor, local * sizeof(uint32_t));
    l.tasks = take(&cursor, l.max_tasks * sizeof(struct mok_cuda_task));
    l.hidden_done = take(&cursor, l.counters * sizeof(uint32_t));
    l.pull_done = take(&cursor, l.counters * sizeof(uint32_t));
    l.row_src = take(&cursor, l.counters * MOK_SEGMENT_ALIGN * sizeof(uint64_t));
    l.row_dst = take(&cursor, l.counters * MOK_SEGMENT_ALIGN * sizeof(uint64_t));
    l.h = take(&cursor, (l.ring_rows + MOK_UNIT_ROWS) * spec->intermediate * 2);
    if (spec->ep > 1)
        l.x = take(&cursor, (l.ring_rows + MOK_UNIT_ROWS) * spec->hidden * 2);
    if (spec->shared_intermediate) {
        l.shared_h = take(&cursor, (shared_rows + MOK_UNIT_ROWS) * spec->shared_intermediate * 2);
        l.shared_y = take(&cursor, (uint64_t)spec->max_tokens * spec->hidden * 2);
    }
    l.bytes = cursor;
    *ret = l;
    return 0;
}
