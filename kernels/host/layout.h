/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host engine's memory: the inner map of the private workspace and of a full context's ring, and the block sizes
 * that follow from a layer's shape alone (never from threads, minibatch or ring: results must not depend on those).
 */
#ifndef MOK_KERNELS_HOST_LAYOUT_H
#define MOK_KERNELS_HOST_LAYOUT_H

#include "../layer.h"

/* An expert's segment starts at a multiple of this. */
#define MOK_HOST_TILE_ROWS 128u
/* Rows that a weight gradient adds at once; rows of a tile of a product. */
#define MOK_HOST_CHUNK_ROWS 128u
#define MOK_HOST_ROW_STEP 6u
/* Rows of the shared expert that are worked on at once. */
#define MOK_HOST_SHARED_ROWS 1024u
/* A FP32 block that stays in a core's cache. */
#define MOK_HOST_BLOCK_FLOATS (256u * 1024u)
/* Output tile of a weight gradient. */
#define MOK_HOST_WGRAD_ROWS 256u
#define MOK_HOST_WGRAD_COLUMNS 2048u
/* The same where its sums lie in a unit's memory. */
#define MOK_HOST_NARROW_COLUMNS (MOK_HOST_BLOCK_FLOATS / MOK_HOST_WGRAD_ROWS)

/* Rows of one operand; scale is there for MXFP8 only. Offsets in bytes. */
struct mok_host_part {
    uint64_t data, scale;
};

/* What forward keeps and backward uses: x rows, gate rows a, up rows b. */
struct mok_host_kept {
    struct mok_host_part x;
    uint64_t a, b;
};

struct mok_host_layout {
    uint64_t count, start, first, expert_rows, live, row; /* struct mok_schedule */
    struct mok_host_kept kept;
    struct mok_host_part h, g, d_a, d_b; /* g: rows of d_out */
    uint64_t y;                          /* forward: y; backward: d_x */
    uint64_t weight;                     /* F32 [ring_rows] routing weights */
    uint64_t partial;                    /* F32 [ring_rows][tiles of I]: parts of d_topk_weight */
    uint64_t shared_out;                 /* BF16 [max_tokens][H]: the shared expert's y, or its part of d_x */
    uint64_t shared_a, shared_b, shared_h, shared_d_a, shared_d_b; /* BF16 [shared_rows][Is] */
    uint64_t shared_rows;
    /* BF16 weight gradients: F32 [3][H * I] of an expert that a minibatch's border cuts, of every other border; and
     * F32 [3][H * Is] between blocks of the shared expert's rows */
    uint64_t sums[2], shared_sums;
    uint64_t bytes;
};

void mok_host_layout_make(const struct mok_plan *plan, struct mok_host_layout *ret);
/* The map of a full context's ring, relative to ctx_ring; returns its bytes. */
uint64_t mok_host_kept_make(const struct mok_plan *plan, struct mok_host_kept *ret);

/* Columns of an output tile, and rows of a block of it, of products that sum over `depth` values. */
uint32_t mok_host_tile_columns(const struct mok_plan *plan, uint32_t depth);
uint32_t mok_host_block_rows(uint32_t depth);

#endif
