/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host engine's own header: its threads ("units"), how they share the tasks of a phase, and what a layer holds.
 *
 * A phase is two lists of task groups, one of transfers (comm) and one of products (compute), each in an order in
 * which no group needs a later one. Units take tasks from the head of a list when the groups it needs are complete,
 * comm units from the comm list first, the others from the compute list first. So one thread alone never waits, and a
 * thread that waits, waits for tasks that have started.
 */
#ifndef MOK_KERNELS_HOST_HOST_H
#define MOK_KERNELS_HOST_HOST_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../dispatch.h"
#include "../engine.h"
#include "../hd.h"
#include "../schedule.h"
#include "gemm.h"
#include "mok/ring_abi.h"
#include "layout.h"

/* ---------------------------------------------------------------- operands */

/* Rows of BF16, or of E4M3 with their scales (scale not NULL). */
struct mok_host_rows {
    uint8_t *data;
    uint8_t *scale;
    uint64_t columns;
};
struct mok_host_matrix {
    const uint8_t *data;
    const uint8_t *scale;
    uint64_t columns;
    /* so many rows and columns are read as under one scale, from a row on that begins such a tile; 0: as they are */
    uint32_t tile;
};

static inline struct mok_host_matrix mok_host_matrix_of(struct mok_host_rows rows)
{
    return (struct mok_host_matrix){ .data = rows.data, .scale = rows.scale, .columns = rows.columns };
}

/*
 * Gradients of gate, up and down that lie in FP32 while an expert's rows are cut: by [3][H * I], NULL where they are
 * not.
 */
struct mok_host_sums {
    float *from, *to; /* of the rows before, for the rows behind */
};

/* One expert's forward and backward over some rows, wherever those are. */
struct mok_host_ffn {
    const struct mok_plan *plan;
    uint32_t hidden, intermediate;
    float clamp;
    uint32_t group; /* MXFP8: values that share a scale; 0: BF16 */
    struct mok_host_matrix gate, up, down;
    void *d_gate, *d_up, *d_down;
    uint32_t wgrad_tile; /* MXFP8 weight gradients: rows and columns of an operand that share a scale; 0: BF16 ones */
    bool narrow; /* gradients are BF16: sums go on in FP32 between cuts of an expert's rows */
    struct mok_host_sums sums;
    struct mok_host_matrix x, g;
    struct mok_host_rows h, d_a, d_b;
    uint16_t *a, *b;
    uint16_t *y;         /* forward: y; backward: d_x */
    const float *weight; /* a row's routing weight; NULL: 1 */
    float *partial;      /* [row][tiles of I], or NULL */
};

/* A thread's working memory. */
struct mok_host_unit {
    struct mok_engine *engine;
    float *weight[2], *rows[2], *out[2];
    uint64_t random;
};

/* ---------------------------------------------------------------- phases */

enum mok_host_stage {
    MOK_STAGE_CHECK = 0, /* PREPARE: copy and check routing */
    MOK_STAGE_REDUCE,
    MOK_STAGE_COUNT,     /* schedule */
    MOK_STAGE_SCAN,
    MOK_STAGE_FILL,
    MOK_STAGE_SAVE,      /* header and routing of the context */
    MOK_STAGE_ZERO,      /* overwritten weight gradients */
    MOK_STAGE_DISPATCH,  /* forward: pull x; backward: pull d_out and, for replay, x */
    MOK_STAGE_GATE_UP,
    MOK_STAGE_DOWN,
    MOK_STAGE_COMBINE,   /* forward: push y; backward: push d_x and d_topk_weight */
    MOK_STAGE_D_HIDDEN,
    MOK_STAGE_D_INPUT,
    MOK_STAGE_WGRAD,
    MOK_STAGE_SHARED_GATE_UP,
    MOK_STAGE_SHARED_DOWN,
    MOK_STAGE_SHARED_D_HIDDEN,
    MOK_STAGE_SHARED_D_INPUT,
    MOK_STAGE_SHARED_WGRAD,
    MOK_STAGES,
};

/* Tasks 0..tasks-1 of one stage. `turn` counts macrobatches in the order they are walked (shared expert: blocks). */
struct mok_host_group {
    enum mok_host_stage stage;
    uint32_t slot; /* minibatch of the ring */
    uint64_t turn;
    uint64_t tasks;
};

enum mok_host_list { MOK_LIST_COMM = 0, MOK_LIST_COMPUTE = 1, MOK_LISTS = 2 };
enum mok_host_at { MOK_AT_END, MOK_AT_LATER, MOK_AT_SKIP, MOK_AT_GROUP };

struct mok_host_op;
struct mok_host_program {
    /* The group at place `at` of a list; LATER: not known before more groups are complete. */
    enum mok_host_at (*group)(const struct mok_host_op *op, enum mok_host_list list, uint64_t at,
                              struct mok_host_group *ret);
    bool (*ready)(const struct mok_host_op *op, const struct mok_host_group *group);
    void (*task)(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                 uint64_t index);
};

extern const struct mok_host_program mok_host_prepare, mok_host_forward, mok_host_backward, mok_host_reduce;

/* A stage's progress in one slot of the ring: turns that are complete, tasks left of the one in progress. */
struct mok_host_progress {
    uint64_t turns, left;
    uint64_t started_ns; /* of the turn in progress, while somebody wants to know */
};

/* The phase that runs. Fields below the line change under the engine's lock only. */
struct mok_host_op {
    struct mok_engine_layer *layer;
    const struct mok_op_args *args;
    const struct mok_host_program *program;
    uint64_t macrobatches, padded_rows; /* once SCAN is complete */
    uint32_t slots;                     /* minibatches of a macrobatch */
    uint64_t started_ns;
    /* ---- */
    struct {
        struct mok_host_group group;
        uint64_t at, next;
        bool open;
    } list[MOK_LISTS];
    uint64_t completions; /* groups that are complete */
    uint64_t wgrads;      /* groups of MOK_STAGE_WGRAD that are complete */
    uint32_t running, inside, entered;
    bool active;
    enum mok_phase phase;
    bool whole; /* the next phase follows by itself */
    struct mok_op_result result;
};

struct mok_engine_layer {
    struct mok_engine *engine;
    struct mok_plan plan;
    struct mok_host_layout layout;
    struct mok_host_kept context_ring;
    uint64_t hash;
    uint32_t max_slots;
    uint8_t *sym[MOK_MAX_EP];
    uint8_t *memory; /* private workspace */
    struct mok_schedule schedule;
    struct mok_host_progress *progress; /* [MOK_STAGES][max_slots] */
    uint64_t kept_rows;                 /* of the context that PREPARE of a backward checked */
};

struct mok_engine {
    struct mok_engine_config config;
    mok_gemm_run *gemm;
    pthread_t *thread;
    struct mok_host_unit *unit;
    uint32_t threads; /* running */
    float *scratch, *scratch_next;
    uint64_t scratch_floats, scratch_next_floats; /* of one block */
    pthread_mutex_t lock;
    pthread_cond_t work, moved;
    /* under the lock */
    bool stop, aborted;
    void (*told)(void *cookie, const struct mok_engine_span *span); /* of a trace; NULL: none */
    void *told_cookie;
    bool ended;     /* and not yet told by poll */
    uint64_t phase; /* phases started */
    struct mok_host_op op;
};

static inline struct mok_host_progress *mok_host_progress_of(const struct mok_host_op *op, enum mok_host_stage stage,
                                                             uint32_t slot)
{
    return &op->layer->progress[(uint64_t)stage * op->layer->max_slots + slot];
}

static inline uint64_t mok_host_turns(const struct mok_host_op *op, enum mok_host_stage stage, uint32_t slot)
{
    return mok_host_progress_of(op, stage, slot)->turns;
}

/* pool.c */
uint64_t mok_host_now_ns(void);
/*
 * Of a whole operation: begins the phase behind the one that has ended. With the lock held; false: that was the last.
 */
bool mok_host_next_phase(struct mok_engine *engine);

int mok_host_pool_start(struct mok_engine *engine, struct mok_message *message);
void mok_host_pool_stop(struct mok_engine *engine);
/* Ends the operation with a failure; the first one counts. */
void mok_host_fail(struct mok_host_op *op, int code, uint32_t argument);
void mok_host_fail_slot(struct mok_host_op *op, int code, uint32_t argument, uint64_t token, uint64_t slot,
                        int64_t value);

/* ffn.c: each does one output tile of `rows` rows from `row` on */
uint32_t mok_host_hidden_tiles(const struct mok_host_ffn *ffn);       /* tiles over I that sum over H */
uint32_t mok_host_output_tiles(const struct mok_host_ffn *ffn);       /* tiles over H that sum over I */
uint32_t mok_host_wgrad_tiles(const struct mok_host_ffn *ffn);        /* of d_gate and d_up, then of d_down */
void mok_host_gate_up(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                      uint32_t tile, bool store_h);
void mok_host_down(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                   uint32_t tile);
void mok_host_d_hidden(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                       uint32_t tile);
void mok_host_d_input(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                      uint32_t tile);
void mok_host_wgrad(struct mok_host_unit *unit, const struct mok_host_ffn *ffn, uint64_t row, uint64_t rows,
                    uint32_t tile);
uint64_t mok_host_block_floats(const struct mok_plan *plan);

/* operand.c: rows as they are, `stride` floats apart */
void mok_host_stage(float *ret, uint64_t stride, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows,
                    uint64_t column, uint64_t columns);
/* panels of a right operand whose k is the matrix's rows and whose n its columns; */
void mok_host_stage_panels(float *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows,
                           uint64_t column, uint64_t columns);
/* and of one whose k is the matrix's columns, all of them, and whose n its rows, a multiple of 16 */
void mok_host_stage_transposed(float *ret, const struct mok_host_matrix *matrix, uint64_t row, uint64_t rows);
/* Writes columns [column, column + count) of a row, rounded to BF16 or quantised. */
void mok_host_store(const struct mok_host_rows *rows, uint32_t group, uint64_t row, uint64_t column, uint64_t count,
                    const float *value);

/* routed.c: where the rows of a macrobatch are, and which tasks they make */
struct mok_host_ring {
    struct mok_host_rows x;
    uint16_t *a, *b;
};
struct mok_host_span { /* padded rows of a transfer task, those of one source */
    uint32_t source;
    uint64_t base, begin, end; /* base: the macrobatch's first */
};
struct mok_host_piece { /* rows of the ring of an expert's task, and its tile */
    uint32_t expert, tile;
    uint64_t row, rows;
};
/* Values that share a scale; 0: BF16. */
uint32_t mok_host_group_values(const struct mok_plan *plan);
uint64_t mok_host_macrobatch(const struct mok_host_op *op, const struct mok_host_group *group);
/* The context holds this macrobatch's x, a and b for a backward. */
bool mok_host_is_kept(const struct mok_host_op *op, uint64_t macrobatch);
struct mok_host_ring mok_host_ring_of(const struct mok_host_op *op, uint64_t macrobatch);
struct mok_host_rows mok_host_rows_at(const struct mok_engine_layer *layer, const struct mok_host_part *part,
                                      uint64_t columns);
uint64_t mok_host_transfer_tasks(const struct mok_host_op *op, const struct mok_host_group *group);
struct mok_host_span mok_host_transfer_of(const struct mok_host_op *op, const struct mok_host_group *group,
                                          uint64_t index);
uint64_t mok_host_piece_tasks(const struct mok_host_op *op, const struct mok_host_group *group, uint32_t tiles);
struct mok_host_piece mok_host_piece_of(const struct mok_host_op *op, const struct mok_host_group *group,
                                        uint32_t tiles, uint64_t index);
/* Bytes of a value of a weight gradient. */
static inline uint64_t mok_host_gradient_bytes(const struct mok_plan *plan)
{
    return mok_spec_bf16_gradients(&plan->spec) ? 2 : sizeof(float);
}
/* Where the weight gradients of a piece come from and go to, if its expert's rows are cut. */
struct mok_host_sums mok_host_sums_of(const struct mok_host_op *op, const struct mok_host_group *group,
                                      const struct mok_host_piece *piece);
void mok_host_routed_ffn(const struct mok_host_op *op, uint64_t macrobatch, uint32_t expert, struct mok_host_ffn *ret);
enum mok_host_at mok_host_routed_comm(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret);

/* prepare.c: what needs no task. 0, or -MOK_E* with *ret filled in. */
int mok_host_check_args(struct mok_engine_layer *layer, const struct mok_op_args *args, struct mok_op_result *ret);
int mok_host_check_peers(const struct mok_engine_layer *layer, const struct mok_op_args *args,
                         struct mok_op_result *ret);

/* transfer.c */
void mok_host_dispatch(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                       uint64_t index);
void mok_host_combine(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                      uint64_t index);

/* schedule.c */
enum mok_host_at mok_host_schedule_group(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret);
#define MOK_HOST_SCHEDULE_GROUPS 3u
bool mok_host_schedule_ready(const struct mok_host_op *op, const struct mok_host_group *group);
void mok_host_schedule_task(struct mok_host_op *op, const struct mok_host_group *group, uint64_t index);

/* shared.c: the shared expert's groups, `at` from 0 */
enum mok_host_at mok_host_shared_group(const struct mok_host_op *op, uint64_t at, struct mok_host_group *ret);
uint64_t mok_host_shared_groups(const struct mok_host_op *op);
bool mok_host_shared_ready(const struct mok_host_op *op, const struct mok_host_group *group);
void mok_host_shared_task(struct mok_host_op *op, struct mok_host_unit *unit, const struct mok_host_group *group,
                          uint64_t index);

#endif
