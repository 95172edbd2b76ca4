/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA engine keeps in a rank's private workspace, and what its kernels are told. Compiles as C and CUDA C.
 * Rows are counted in padded rows: each expert's rows start at a multiple of MOK_SEGMENT_ALIGN.
 */
#ifndef MOK_CUDA_LAYOUT_H
#define MOK_CUDA_LAYOUT_H

#include <cuda.h>
#include <stdint.h>

#include "../layer.h"
#include "../swiglu.h"
#include "arch.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOK_CUDA_MAX_MACROBATCHES (1u << 19) /* a task has 19 bits for its number */

/*
 * A task of the megakernel, 16 bytes; taken in list order by one cluster.
 *   row64   first padded row of the unit / 64          ring64  its place in the ring / 64
 *   what    column tile | expert << 16
 *   how     rows - 1 (8 bits) | type << 8 | single << 11 | shared << 12 | macrobatch << 13
 * A unit is up to 256 rows of one expert, 128 a block. `single`: at most 128 rows, so the two blocks take
 * neighbouring column tiles of the same rows instead.
 * Where MOK_TASK_PULL is in a list of its own `what` is the first task of its macrobatch, for all before which it may wait.
 * MOK_TASK_WGRAD has no unit: row64 is the number of its run, ring64 its tile of 256 hidden columns, 128 a block, what
 * its tile of 256 intermediate columns, rows - 1 its matrix (enum mok_cuda_wgrad).
 */
struct mok_cuda_task {
    uint32_t row64, ring64, what, how;
};

#define MOK_TASK_TYPE_BIT 8
#define MOK_TASK_SINGLE_BIT 11
#define MOK_TASK_SHARED_BIT 12
#define MOK_TASK_MACROBATCH_BIT 13

enum mok_cuda_task_type {
    MOK_TASK_END = 0,
    MOK_TASK_PULL = 1, /* copy the unit's remote rows into the ring */
    MOK_TASK_GATE_UP = 2,
    MOK_TASK_DOWN = 3,
    MOK_TASK_D_HIDDEN = 4, /* backward: from here on */
    MOK_TASK_D_INPUT = 5,
    MOK_TASK_WGRAD = 6,
    MOK_TASK_TYPES = 8,
};

enum mok_cuda_wgrad { MOK_WGRAD_GATE = 0, MOK_WGRAD_UP = 1, MOK_WGRAD_DOWN = 2 };

/* A run of rows of one expert that is worked on at once. */
struct mok_cuda_segment {
    uint32_t row64, ring64;
    uint32_t rows;
    uint32_t expert; /* | shared << 31 */
    uint32_t macrobatch;
    uint32_t chunk;
    uint32_t pull, gate_up, down; /* its first tasks, counted from its chunk's first; backward: down is d_input */
    uint32_t d_hidden;
};

/* Tasks of a chunk: of segments that are worked on together. `first` once the order is known. */
struct mok_cuda_chunk {
    uint32_t pulls, gate_ups, downs;
    uint32_t macrobatch;
    uint32_t first_pull, first_gate_up, first_down;
    uint32_t d_hiddens, first_d_hidden;
    uint32_t runs;  /* that begin in it */
    uint32_t begin; /* first task of its macrobatch */
};

/* Warps that end tasks of a macrobatch: how many will, and how many have. */
struct mok_cuda_macrobatch {
    uint32_t gate_up_warps, down_warps;
    uint32_t gate_up_done, down_done;
    /* backward */
    uint32_t d_hidden_warps, wgrad_warps;
    uint32_t d_hidden_done, wgrad_done;
    uint32_t first_wgrad; /* task */
    uint32_t pad[3];
};

/* All rows that an expert has in one macrobatch: what one weight gradient task adds up. */
struct mok_cuda_run {
    uint32_t row64, ring64;
    uint32_t rows; /* 0: an expert without rows, whose gradients are overwritten with zeros */
    uint32_t expert; /* | shared << 31 */
    uint32_t macrobatch;
    uint32_t index; /* in its macrobatch, or among those without rows */
    uint32_t fresh; /* the sums start from zero, not from what is stored */
    uint32_t cuts;  /* MOK_RUN_*: the expert has rows in the macrobatch before, and behind */
};

#define MOK_RUN_GOES_ON 1u
#define MOK_RUN_IS_CUT 2u

/* What the schedule says about itself. */
struct mok_cuda_head {
    uint32_t tasks, segments, macrobatches;
    uint32_t pad0;
    uint64_t rows;
    uint64_t padded_rows;
    uint32_t next_task; /* first one not taken yet */
    /* backward: runs, the shared expert's last; first tasks of those without rows, and of the shared expert's */
    uint32_t runs, first_empty_wgrad, first_shared_wgrad;
    uint32_t pulls, next_pull; /* of a list of their own */
    uint32_t clusters;         /* that have started */
    uint32_t pad[17];
};

/* A wait that did not end in time. */
struct mok_cuda_trip {
    uint32_t what; /* enum mok_cuda_wait */
    uint32_t block, want, seen;
    struct mok_cuda_task task;
};

enum mok_cuda_wait {
    MOK_WAIT_ROWS_HERE = 1, /* gate/up: remote rows in the ring */
    MOK_WAIT_HIDDEN = 2,    /* down: all column tiles of h */
    MOK_WAIT_RING_X = 3,    /* pull: the ring's previous rows have been read */
    MOK_WAIT_RING_H = 4,    /* gate/up: the ring's previous h has been read */
    MOK_WAIT_GATES = 5,     /* d_hidden: gate and up of its rows, made again */
    MOK_WAIT_GRADIENTS = 6, /* d_input: all column tiles of d_a and d_b */
    MOK_WAIT_RUN = 7,       /* wgrad: d_a, d_b and h of the run's rows */
    MOK_WAIT_RING_GATES = 8,     /* gate/up of a backward: the ring's previous a and b have been read */
    MOK_WAIT_RING_WGRADS = 9,    /* pull, d_hidden: the ring's previous rows have been added to the weight gradients */
    MOK_WAIT_RING_GRADIENTS = 10, /* d_hidden: the ring's previous d_a and d_b have been read */
};

/*
 * While somebody wants to know: when the first task of a kind in a minibatch's place of the ring began, and the last ended,
 * by the device's clock. A task counts as begun when it is handed out.
 */
#define MOK_CUDA_MARKS 4096u
#define MOK_CUDA_MARK_KINDS 8u /* enum mok_cuda_task_type, and 0: of the shared expert */
struct mok_cuda_marks {
    uint64_t begun[MOK_CUDA_MARKS]; /* ~0: none */
    uint64_t ended[MOK_CUDA_MARKS];
};

/* In host memory that the device writes; one for each operation that an engine may hold. */
struct mok_cuda_report {
    uint64_t bad_slot_flat; /* PREPARE: token * K + k of the first bad id; ~0: none */
    int32_t bad_value;
    uint32_t tripped;
    uint64_t rows;
    uint64_t schedule_from_ns, schedule_to_ns; /* of the device's clock */
    uint64_t begun_ns, main_over_ns, over_ns;  /* the same, while somebody wants to know */
    struct mok_cuda_trip trip;
    struct mok_context_header header; /* PREPARE of a backward: the copy of the context's that was checked */
    uint32_t ended; /* number of the phase that ended last; written by the stream behind its kernels */
    uint32_t withdrawn; /* of an operation that starts by itself: written before `ended`, the operation did nothing */
    uint32_t withdraw;  /* written by the host: it shall do nothing */
    uint32_t go;        /* by the host: the gate that nobody else opens */
    struct {
        uint32_t *done; /* of the client, as the device sees it; gets done_number; NULL: it is not told */
        uint32_t done_number, number;
    } tell; /* by the host: what tell_kernel says */
    uint32_t expert_rows[MOK_MAX_EXPERTS]; /* [E_l] */
};

/* Operands of MXFP8 weight gradients, the first two as wide as x, the others as h. */
enum mok_cuda_tokenwise_operand {
    MOK_TOKENWISE_X = 0,
    MOK_TOKENWISE_G, /* d_out */
    MOK_TOKENWISE_D_A,
    MOK_TOKENWISE_D_B,
    MOK_TOKENWISE_H, /* weighted */
    MOK_TOKENWISE,
};

/* Offsets in bytes from the start of the private workspace. */
struct mok_cuda_layout {
    uint64_t head, segments, chunks, macrobatches, tasks, pulls;
    uint64_t hidden_done, pull_done; /* u32 a 64-row block of padded rows, the shared expert's last */
    uint64_t row_src, row_dst;       /* u64 a padded row */
    uint64_t row_pull;               /* u64 a padded row (ep > 1) */
    uint64_t h, x;                   /* BF16 [ring_rows][I], [ring_rows][H] (ep > 1); MXFP8: codes, rows of x (any ep) */
    uint64_t h_scale;                /* MXFP8: E8M0 [ring_rows][4 a gate/up tile] */
    uint64_t x_factor, h_factor;     /* MXFP8: scales of x and h as floats, [k-blocks][factor_rows] */
    uint64_t gate_up_pairs, down_pairs; /* struct mok_cuda_mx_pair [E_l][tiles][k-blocks] */
    uint64_t shared_h, shared_y;
    /* backward; h is weighted there, x and g are d_out's counterparts */
    uint64_t runs;
    uint64_t gates_done;                             /* as hidden_done */
    uint64_t row_g, row_weight_dst;                  /* u64 a padded row */
    uint64_t row_weight;                             /* F32 a padded row */
    uint64_t a, b, d_a, d_b, h_wide;                 /* BF16 [ring_rows][I]; h_wide: h, of MXFP8 not the codes */
    uint64_t g;                                      /* BF16 [ring_rows][H] (ep > 1) */
    uint64_t partial; /* F32 [ring_rows][hidden_tiles], MXFP8 [gate_up_tiles]: parts of d_topk_weight */
    uint64_t shared_a, shared_b, shared_d_a, shared_d_b; /* BF16 [shared_rows][Is] */
    /* MXFP8. This rank's x and d_out as BF16, of the codes' values: [max_tokens][H]; remote ones: [ring_rows][H] (ep > 1) */
    uint64_t x_wide, g_wide, x_wide_ring, g_wide_ring;
    uint64_t row_x_wide, row_g_wide;         /* u64 a padded row: where they lie; row_src and row_g say where the codes do */
    uint64_t d_a_code, d_b_code;             /* E4M3 [ring_rows][I]; d_a, d_b and h are their values as BF16 */
    uint64_t d_a_scale, d_b_scale;           /* as h_scale */
    uint64_t d_a_factor, d_b_factor;         /* as h_factor */
    uint64_t gate_t, up_t, down_t;           /* E4M3 [E_l][H][I], [E_l][H][I], [E_l][I][H] */
    uint64_t gate_t_scale, up_t_scale, down_t_scale; /* see struct mok_cuda_turned */
    uint64_t spans;                          /* struct mok_cuda_head, two a macrobatch */
    /* MXFP8 weight gradients, in the place of what is BF16: see struct mok_cuda_tokenwise */
    uint64_t tokenwise[MOK_TOKENWISE], tokenwise_scale[MOK_TOKENWISE];
    /* BF16 weight gradients: F32 [sums_count][3][H * I] of the expert that a macrobatch's border cuts, of every other border */
    uint64_t sums, sums_count;
    uint64_t bytes;

    uint64_t padded_rows; /* routed rows, padded, at worst */
    uint64_t shared_rows; /* padded */
    uint64_t counters;    /* 64-row blocks */
    uint64_t max_macrobatches, max_tasks, max_pulls, max_segments, max_chunks, max_runs;
    uint32_t units_per_chunk;
    uint32_t gate_up_tiles, down_tiles, shared_gate_up_tiles;
    uint32_t hidden_tiles, shared_hidden_tiles; /* of 256 intermediate columns */
};

/* Bytes of a row of x as experts read it: BF16, or E4M3 codes with their scales behind them. */
uint64_t mok_cuda_x_row_bytes(const struct mok_plan *plan);
/* Rows of factors: the ring's, and what a tile that begins in its last rows reads behind them. */
uint64_t mok_cuda_factor_rows(const struct mok_plan *plan);
/* Rows and columns that share a scale in MXFP8 weight gradients. */
uint32_t mok_cuda_tokenwise_values(const struct mok_plan *plan);
/* Bytes of the scales of a weight [rows][columns] of each expert, turned. */
uint64_t mok_cuda_turned_scale_bytes(const struct mok_plan *plan, uint64_t rows, uint64_t columns);
/* Bytes of a row of h's scales: four a gate/up tile, in whole 16; 0 for BF16. */
uint64_t mok_cuda_h_scale_bytes(const struct mok_plan *plan);
void mok_cuda_layout_make(const struct mok_plan *plan, struct mok_cuda_layout *ret);

/* The ring as a full context keeps it, in bytes from ctx_ring: remote rows of x [ring_rows] (ep > 1), BF16 a, b
 * [ring_rows][I]. */
struct mok_cuda_kept {
    uint64_t x, a, b;
    uint64_t bytes;
};
void mok_cuda_kept_make(const struct mok_plan *plan, struct mok_cuda_kept *ret);

/* Arguments of the schedule's kernels. */
struct mok_cuda_schedule_args {
    uint32_t ep, rank, topk, hidden;
    uint32_t x_row_bytes;
    uint32_t unit_pulls; /* pull tasks of a unit */
    uint32_t local_experts, first_expert;
    uint32_t gate_up_tiles, down_tiles, shared_gate_up_tiles;
    uint32_t units_per_chunk;
    uint32_t shared_tokens; /* of this rank, 0 without a shared expert */
    uint32_t shared_row64;
    uint32_t tile_rows64; /* an expert's rows begin at multiples of it, in 64 rows */
    /* backward */
    uint32_t backward, kept, overwrite; /* kept: the context holds macrobatch 0's a, b and remote x */
    uint32_t hidden_tiles, shared_hidden_tiles;
    uint32_t shared_ring64; /* rows of the shared expert's buffers / 64 */
    uint64_t ring_rows;
    uint64_t slots; /* over all ranks */
    uint64_t counters;
    const uint32_t *bad_id; /* not 0: leave no task */
    struct mok_cuda_head *head;
    struct mok_cuda_segment *segments;
    struct mok_cuda_chunk *chunks;
    struct mok_cuda_macrobatch *macrobatches;
    struct mok_cuda_task *tasks;
    uint32_t *hidden_done, *pull_done;
    uint64_t *row_src, *row_dst;
    /* A BF16 forward of several ranks: pulls are a list of their own, and a token is pulled once a macrobatch. */
    uint32_t apart;
    /* Of a backward: the context's ring has the rows of other ranks where such a forward left them. */
    uint32_t left_apart;
    struct mok_cuda_task *pulls;
    uint64_t *row_pull; /* where a row is fetched from; 0: it is of this rank, or an earlier one of the macrobatch brings its token */
    void *x_ring[2];    /* of macrobatch 0, of the others */
    const void *shared_x;
    void *shared_y;
    struct mok_cuda_report *report;
    uint64_t slot_first[MOK_MAX_EP + 1]; /* first slot of each rank in canonical order */
    const int32_t *ids[MOK_MAX_EP];
    const void *x[MOK_MAX_EP];
    void *slot_rows[MOK_MAX_EP];
    /* backward */
    struct mok_cuda_run *runs;
    uint32_t *gates_done;
    uint64_t *row_g, *row_weight_dst;
    float *row_weight;
    uint32_t g_row_bytes;
    /* MXFP8: where this rank's rows lie as BF16, which only it reads; NULL: as x and g are */
    uint64_t *row_x_wide, *row_g_wide;
    const void *x_wide, *g_wide;
    /* not NULL: each macrobatch's tasks are two lists of their own, those but weight gradients, and these */
    struct mok_cuda_head *spans;
    uint32_t max_macrobatches;
    const void *shared_g;
    int64_t weight_from_ids, weight_slots_from_ids; /* bytes; the same on all ranks */
    const void *g[MOK_MAX_EP];
};

/* One expert set of the megakernel: the routed experts, or the shared one. */
struct mok_cuda_set {
    CUtensorMap gate, up, down, h_map;
    void *h;
    uint32_t inter, tiles, k_blocks, pad;
};

/* What the megakernels of both directions are told. */
struct mok_cuda_common {
    struct mok_cuda_head *head;
    struct mok_cuda_macrobatch *macrobatches;
    const struct mok_cuda_task *tasks;
    uint32_t *hidden_done, *pull_done;
    /* a BF16 forward, see above; pull_done counts a cluster's warps there, for 64 rows each */
    const struct mok_cuda_task *pulls;
    const uint64_t *row_pull;
    uint64_t ring_bytes;    /* of x_ring; 0 with ep = 1 */
    uint32_t x_row_bytes;
    uint32_t pull_clusters; /* so many take pulls first */
    uint64_t *row_src; /* where a padded row comes from, bit 0: another rank; a backward names its place in the ring there */
    const uint64_t *row_dst;
    void *x_ring[2]; /* of macrobatch 0 (in the context when that is kept), of the others; NULL with ep = 1 */
    uint32_t *abort_word;        /* not 0: end soon */
    struct mok_cuda_report *report;
    uint64_t wait_limit_ns;
    uint32_t hidden, k_blocks, down_tiles;
    float clamp;
    uint32_t chaos_delay_us, chaos_seed;
    struct mok_sides sides; /* of clamp */
    /* The first blocks of a grid retire at a task border once they have done so much, in k-blocks; see retire.c. */
    uint32_t retiring_blocks, retire_after;
    uint32_t work[MOK_TASK_TYPES]; /* k-blocks of a task, about */
    struct mok_cuda_marks *marks;  /* NULL: nobody wants to know */
    uint32_t slots, slot_rows64;   /* places of the ring, and rows / 64 of each */
};

struct mok_cuda_main_args {
    struct mok_cuda_set set[2];
    struct mok_cuda_common common;
    void *context_a, *context_b; /* BF16 [ring_rows][I]: keep macrobatch 0; or NULL */
};

/* What a tile's 256 columns of a weight have as scales in a k-block: one for all of either half of 128, or 0. */
struct mok_cuda_mx_pair {
    float half[2];
    uint32_t uneven; /* of a tile's first: a half has several somewhere */
    uint32_t pad;
};

/* Makes pairs of a layer's weights. The scales are those of struct mok_cuda_mx_args. */
struct mok_cuda_pairs_args {
    const uint8_t *gate_scale, *up_scale, *down_scale;
    struct mok_cuda_mx_pair *gate_up, *down;
    const uint32_t *bad_id; /* not 0: do nothing */
    uint32_t experts, hidden, inter, tiles, down_tiles;
};

/* The forward megakernel of an MXFP8 layer. Weights and h are E4M3: the maps' elements are pairs of codes. */
struct mok_cuda_mx_args {
    CUtensorMap gate, up, down, h_map;
    CUtensorMap x_map[2]; /* forward: of x_rows */
    struct mok_cuda_common common; /* k_blocks: of x, 128 values each */
    const uint8_t *gate_scale, *up_scale, *down_scale; /* E8M0 [E_l][I][H / 32], [E_l][H][I / 32], rounded up */
    uint8_t *h, *h_scale;
    float *x_factor, *h_factor; /* a row's scale in a k-block: [k-blocks][factor_rows], rows as in the ring */
    struct mok_cuda_mx_pair *gate_up_pairs, *down_pairs; /* [E_l][tiles][k-blocks] */
    uint32_t factor_rows;
    uint8_t *x_rows[2]; /* forward: all rows as padded, [ring_rows]; of macrobatch 0 (as x_ring), of the others */
    void *context_a, *context_b; /* BF16 [ring_rows][I]: keep macrobatch 0; or NULL */
    uint32_t inter, tiles, h_blocks;
    uint32_t x_row_bytes, h_scale_bytes; /* of a row */
};

/* x of this rank, quantised for everybody. */
struct mok_cuda_quantize_args {
    const void *x; /* BF16 [tokens][H] */
    const uint32_t *bad_id; /* NULL, or not 0: do nothing */
    uint8_t *to;
    void *wide; /* BF16 [tokens][H]: the codes' values; or NULL */
    uint32_t row_bytes, tokens, hidden;
    uint32_t beside; /* the kernel before makes nothing that it reads, and all before that one is over */
};

/*
 * A weight [experts][rows][columns] turned, so that a product along its rows finds them side by side: codes
 * [experts][columns][rows] with one scale for 128 x 128 of them, F32 [experts][rows / 128][columns / 256][2], rounded up.
 * `per32`: one for 32 x 32, told of each 32 of a column, E8M0 [experts][columns][rows / 32], rounded up.
 */
struct mok_cuda_turned {
    const uint8_t *code, *scale;
    uint8_t *to;
    void *to_scale;
    uint32_t rows, columns;
};

struct mok_cuda_turn_args {
    struct mok_cuda_turned weight[3];
    uint32_t experts;
    uint32_t per32;
    const uint32_t *bad_id; /* not 0: do nothing */
};

/*
 * The rows of a macrobatch turned, so that products along the token axis find them side by side: codes [columns][ring_rows]
 * with one scale for 128 x 128 or 32 x 32 of them, F32 [ring_rows / 128][columns / 128], or by 32, rounded up.
 */
struct mok_cuda_tokenwise {
    const uint64_t *rows;    /* where each padded row's codes begin, scales behind them; bit 0: in `ring`. NULL: in `code` */
    const uint8_t *ring;     /* [ring_rows], as x's rows */
    const uint8_t *code, *scale; /* [ring_rows][columns], and rows of mx.h_scale_bytes */
    uint8_t *to;
    float *to_scale;
    uint32_t columns;
};

struct mok_cuda_tokenwise_args {
    struct mok_cuda_tokenwise operand[MOK_TOKENWISE];
    const struct mok_cuda_head *head;
    const struct mok_cuda_run *runs;
    const uint32_t *bad_id; /* not 0: do nothing */
    uint32_t macrobatch, ring_rows, x_row_bytes, h_scale_bytes, per32;
};

/* One expert set of the backward megakernel. Every map's boxes are 64 rows of 128 bytes. */
struct mok_cuda_backward_set {
    CUtensorMap gate, up, down;
    CUtensorMap a[2], b[2]; /* of macrobatch 0, of the others */
    CUtensorMap d_a, d_b, h; /* h is weighted */
    CUtensorMap gradient[3]; /* by enum mok_cuda_wgrad */
    void *a_rows, *b_rows;   /* gate and up, made again */
    void *d_a_rows, *d_b_rows, *h_rows;
    void *gradient_rows[3];
    uint32_t inter, tiles, hidden_tiles, k_blocks;
};

struct mok_cuda_backward_args {
    struct mok_cuda_backward_set set[2];
    struct mok_cuda_common common;
    const struct mok_cuda_run *runs;
    uint32_t *gates_done;
    uint64_t *row_g; /* as row_src */
    const uint64_t *row_weight_dst;
    const float *row_weight;
    void *g_ring;
    float *partial;
    uint32_t kept;   /* macrobatch 0's a, b and remote x are there */
    uint32_t narrow; /* weight gradients are BF16 */
    CUtensorMap sums[2]; /* FP32, the sums' planes as [I][H] and as [H][I] */
    float *sums_rows;    /* NULL: no border can cut an expert, or gradients are FP32 */
};

/* The backward of an MXFP8 layer but for its weight gradients, which are backward_kernel's. */
struct mok_cuda_mx_backward_args {
    struct mok_cuda_common common;
    struct mok_cuda_mx_args mx; /* gate and up made again; its common is the same */
    CUtensorMap gate_t, up_t, down_t; /* pairs of codes, boxes of 128 rows */
    CUtensorMap d_a, d_b;             /* the same */
    CUtensorMap a[2], b[2];           /* BF16, boxes of 64 rows: of macrobatch 0, of the others */
    const void *gate_t_scale, *up_t_scale, *down_t_scale; /* see struct mok_cuda_turned */
    uint8_t *d_a_code, *d_b_code, *d_a_scale, *d_b_scale; /* a row of scales: mx.h_scale_bytes */
    float *d_a_factor, *d_b_factor; /* scales of 128 values: a row's in a k-block, [k-blocks][mx.factor_rows] */
    void *a_rows, *b_rows, *d_a_rows, *d_b_rows, *h_rows; /* BF16 [ring_rows][I]; h is weighted */
    uint32_t *gates_done;
    uint64_t *row_g; /* as row_src */
    uint64_t *row_x_wide, *row_g_wide;
    void *g_ring, *x_wide_ring, *g_wide_ring;
    const uint64_t *row_weight_dst;
    const float *row_weight;
    float *partial;
    uint32_t hidden_tiles; /* of 256 intermediate columns */
    uint32_t kept;         /* macrobatch 0's a, b and remote x are there */
    uint32_t tokenwise;    /* weight gradients are MXFP8: h is quantised, into mx.h, and nothing is BF16 */
};

/* MXFP8 weight gradients: of turned rows. What is made of the sums is backward_kernel's. */
struct mok_cuda_mx_wgrad_args {
    struct mok_cuda_backward_args wide; /* its common is this kernel's */
    struct mok_cuda_common common;
    CUtensorMap operand[MOK_TOKENWISE]; /* pairs of codes, boxes of 128 rows */
    const float *scale[MOK_TOKENWISE];
    uint32_t hidden_blocks, inter_blocks; /* of as many columns as have one scale */
    uint32_t ring_rows, per32;
};

struct mok_cuda_reduce_args {
    const int32_t *ids;
    const float *weight; /* NULL: 1 */
    const void *slots, *shared;
    void *out;
    const float *weight_slots; /* backward: copied to d_topk_weight, 0 for what is not routed; or NULL */
    float *d_topk_weight;
    const uint32_t *bad_id; /* not 0: do nothing */
    uint32_t tokens, topk, hidden, accumulate;
};

struct mok_cuda_prepare_args {
    const int32_t *ids;
    const float *weight;
    uint64_t slots;
    uint32_t experts;
    int32_t *sym_ids;
    float *sym_weight;
    struct mok_cuda_report *report;
    /* not NULL: raised to enum mok_cuda_stop, so that the kernels behind this one do nothing */
    uint32_t *bad_id;
    const uint32_t *withdraw;                /* not NULL: asked once whether the operation is withdrawn */
    const struct mok_context_header *header; /* of a backward's context, or NULL */
    struct mok_context_header want;          /* what it must be; ring_rows_kept at most */
};

enum mok_cuda_stop { MOK_STOP_NONE = 0, MOK_STOP_BAD, MOK_STOP_WITHDRAWN };

/* The end of an operation that has started by itself. */
struct mok_cuda_tell_args {
    uint32_t *bad_id; /* read, and cleared for the next operation */
    struct mok_cuda_report *report;
};

/* What a context keeps beside the ring. */
struct mok_cuda_save_args {
    struct mok_context_header header; /* ring_rows_kept: at most; the rest follows from the schedule */
    const int32_t *ids;
    const float *weight;
    uint64_t slots;
    const struct mok_cuda_head *head;
    const uint32_t *bad_id; /* not 0: do nothing */
    struct mok_context_header *to;
    int32_t *to_ids;
    float *to_weight;
};

/* Launchers; all return a cudaError_t as int. `stream` is a cudaStream_t. */
int mok_cuda_launch_prepare(const struct mok_cuda_prepare_args *args, void *stream);
int mok_cuda_launch_save(const struct mok_cuda_save_args *args, void *stream);
int mok_cuda_launch_schedule(const struct mok_cuda_schedule_args *args, void *stream);
/* `blocks` a multiple of MOK_CLUSTER: resident at once; the retiring ones are in addition */
int mok_cuda_launch_main(const struct mok_cuda_main_args *args, uint32_t blocks, void *stream);
int mok_cuda_launch_quantize(const struct mok_cuda_quantize_args *args, void *stream);
int mok_cuda_launch_pairs(const struct mok_cuda_pairs_args *args, void *stream);
int mok_cuda_launch_mx_main(const struct mok_cuda_mx_args *args, uint32_t blocks, void *stream);
int mok_cuda_mx_setup(void);
/* *_32: the same with scales of 32 values */
int mok_cuda_launch_quantize_32(const struct mok_cuda_quantize_args *args, void *stream);
int mok_cuda_launch_mx_main_32(const struct mok_cuda_mx_args *args, uint32_t blocks, void *stream);
int mok_cuda_mx_setup_32(void);
int mok_cuda_launch_turn(const struct mok_cuda_turn_args *args, void *stream);
/* Scales alone; that of a tile whose rows have different ones is NaN. */
int mok_cuda_launch_tile_scales(const struct mok_cuda_turn_args *args, void *stream);
int mok_cuda_launch_mx_backward(const struct mok_cuda_mx_backward_args *args, uint32_t blocks, void *stream);
int mok_cuda_mx_backward_setup(void);
int mok_cuda_launch_mx_backward_32(const struct mok_cuda_mx_backward_args *args, uint32_t blocks, void *stream);
int mok_cuda_mx_backward_setup_32(void);
int mok_cuda_launch_tokenwise(const struct mok_cuda_tokenwise_args *args, void *stream);
int mok_cuda_launch_mx_wgrad(const struct mok_cuda_mx_wgrad_args *args, uint32_t blocks, void *stream);
int mok_cuda_mx_wgrad_setup(void);
int mok_cuda_launch_backward(const struct mok_cuda_backward_args *args, uint32_t blocks, void *stream);
int mok_cuda_launch_reduce(const struct mok_cuda_reduce_args *args, void *stream);
int mok_cuda_launch_tell(const struct mok_cuda_tell_args *args, void *stream);
/* *to = the device's clock, once all before it is over */
int mok_cuda_launch_clock(uint64_t *to, void *stream);
int mok_cuda_schedule_setup(void);
int mok_cuda_backward_setup(void);
/* Once a device: raises the kernels' shared-memory limits. */
int mok_cuda_kernels_setup(void);

#ifdef __cplusplus
}
#endif
#endif
