/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the files of the CUDA engine's host side share: its device, its layers, and the calls between them. Nothing outside
 * of them includes this.
 */
#ifndef MOK_CUDA_ENGINE_LAYER_H
#define MOK_CUDA_ENGINE_LAYER_H

#include <cuda_runtime_api.h>

#include "driver.h"
#include "engine.h"
#include "layout.h"

/* What PREPARE was asked, for its outcome. */
struct mok_cuda_asked {
    uint32_t kind, context_mode, tokens;
};

/* A phase from its start to its outcome; what it shares with the device is its own. */
struct mok_cuda_run_entry {
    struct mok_cuda_report *report; /* host memory that the device writes */
    uint32_t *abort_word;           /* device memory, 256 bytes */
    uint32_t *bad_id;               /* behind it: enum mok_cuda_stop, the rest of the operation does nothing */
    uint32_t number;                /* what report->ended will be */
    uint64_t started_ns;
    bool aborted;
    enum mok_phase phase;
    struct mok_engine_layer *layer;
    struct mok_cuda_asked args;
    uint64_t expert_rows[MOK_MAX_EXPERTS]; /* of the outcome */
    struct mok_op_result refused; /* its status is not 0: the phase was refused and ran nothing */
    struct mok_engine_gate gate;  /* start NULL: runs at once */
    cudaGraphExec_t graph;        /* all of it in one launch; NULL: kernel by kernel */
    bool open;                    /* the gate was seen open, or has been opened to let it pass */
    /* of a trace; device memory, its copy here; NULL until somebody wanted to know */
    struct mok_cuda_marks *marks, *marks_copy;
    struct mok_cuda_marks *marks_now; /* marks, where this phase makes some; or NULL */
    bool traced;                      /* this phase is */
};

#define MOK_CUDA_ENTRIES 2 /* what runs, and what starts by itself behind it */
#define MOK_CUDA_GRAPHS 512 /* of all layers at most; operations of the others are launched kernel by kernel */

struct mok_engine {
    struct mok_engine_config config;
    struct mok_cuda_driver driver;
    uint32_t blocks; /* of the megakernel */
    cudaStream_t stream, side, capture;
    cudaStream_t boards; /* copies to and from all boards, in order */
    bool crowded;        /* those stand behind a wait of `stream`: nothing is started ahead */
    uint32_t number;    /* of the phase started last */
    uint64_t looked_ns; /* when the device was last asked */
    struct mok_cuda_run_entry entry[MOK_CUDA_ENTRIES];
    uint32_t oldest, started;       /* of the entries: the oldest that has not ended, and how many have not */
    struct mok_cuda_trip trip;      /* of the phase that waited in vain last */
    struct mok_cuda_run_entry *now; /* that phases are being queued for, or were last */
    uint32_t graphs;                /* of all layers; layers may be closed by another thread */
    void (*told)(void *cookie, const struct mok_engine_span *span); /* of a trace; NULL: none */
    void *told_cookie;
};

/* The kernels of an operation as a graph, for the arguments that it was made for. */
struct mok_cuda_graph {
    cudaGraphExec_t graph; /* NULL: not yet, or it cannot be */
    bool refused;
    struct mok_op_args args; /* `peer` NULL */
    struct mok_peer peer;
};

struct mok_engine_layer {
    struct mok_engine *engine;
    struct mok_plan plan;
    uint64_t hash;
    struct mok_cuda_layout layout;
    struct mok_cuda_kept kept;
    uint8_t *private_memory;
    uint8_t *symmetric[MOK_MAX_EP];
    struct mok_expert_params mapped; /* what forward's tensor maps were made for */
    struct mok_expert_params backward_mapped;
    const void *backward_context; /* whose ring backward's maps name; NULL: none's */
    bool maps_made, backward_maps_made;
    struct mok_cuda_main_args main;
    struct mok_cuda_backward_args backward;
    struct mok_cuda_mx_args mx;
    struct mok_cuda_mx_backward_args mx_backward;
    struct mok_cuda_tokenwise_args tokenwise;
    struct mok_cuda_mx_wgrad_args mx_wgrad;
    struct mok_cuda_schedule_args schedule;
    struct mok_cuda_graph graph[MOK_CUDA_ENTRIES][MOK_KIND_BACKWARD + 1]; /* by entry and enum mok_op_kind */
};

/*
 * A row-major tensor [planes][rows][columns] of BF16 (2 bytes) or FP32 (4), read in boxes of box_rows rows of 128 bytes,
 * swizzled by 128 bytes.
 */
int mok_cuda_make_map(const struct mok_cuda_driver *d, CUtensorMap *ret, const void *base, uint32_t element_bytes,
                      uint64_t columns, uint64_t rows, uint64_t planes, uint32_t box_rows, uint32_t dimensions);
/* The same where rows lie so many bytes apart. */
int mok_cuda_make_row_map(const struct mok_cuda_driver *d, CUtensorMap *ret, const void *base, uint32_t element_bytes,
                          uint64_t columns, uint64_t rows, uint64_t planes, uint32_t box_rows, uint32_t dimensions,
                          uint64_t row_bytes);

/* engine.c. Makes the entry that of a phase; its `refused` says whether there is anything to queue. */
int mok_cuda_ready(struct mok_cuda_run_entry *entry, struct mok_engine_layer *layer, const struct mok_op_args *args,
                   enum mok_phase phase, const struct mok_engine_gate *gate);
/* The kernels of the phase that was readied last. */
int mok_cuda_queue(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase, void *stream);
int mok_cuda_entry_outcome(struct mok_cuda_run_entry *entry, struct mok_op_result *ret);
/* Clears a word of an entry, before anything that is queued later can see it. */
int mok_cuda_clear(struct mok_engine *engine, uint32_t *word);

/*
 * engine_graph.c. All kernels of a phase that says by itself that it is over, on the engine's stream; those of a whole
 * operation are one graph where the layer has seen the same arguments before, which is looked for, or made, first.
 */
void mok_cuda_graph_ready(struct mok_cuda_run_entry *entry, const struct mok_op_args *args);
int mok_cuda_graph_queue(struct mok_cuda_run_entry *entry, const struct mok_op_args *args);
void mok_cuda_graph_free(struct mok_engine_layer *layer);

/* engine_run.c; see ../engine.h. `find_room`: once, while nothing runs. */
int mok_cuda_run_find_room(struct mok_engine *engine);
int mok_cuda_run_start(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase);
int mok_cuda_run_poll(struct mok_engine *engine, struct mok_op_result *ret);
void mok_cuda_run_abort(struct mok_engine *engine);
int mok_cuda_run_gate_map(struct mok_engine *engine, void *memory, uint64_t bytes, struct mok_message *message);
void mok_cuda_run_gate_unmap(struct mok_engine *engine, void *memory);
int mok_cuda_run_start_ahead(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase,
                             const struct mok_engine_gate *gate);
void mok_cuda_run_go(struct mok_engine *engine, const struct mok_engine_gate *tell);
void mok_cuda_run_withdraw(struct mok_engine *engine);

/* engine_trace.c; begin and end around what is queued of a traced phase, main_over between MAIN's kernels and REDUCE's */
void mok_cuda_trace(struct mok_engine *engine, void (*told)(void *cookie, const struct mok_engine_span *span),
                    void *cookie);
void mok_cuda_trace_ready(struct mok_cuda_run_entry *entry);
int mok_cuda_trace_begin(struct mok_cuda_run_entry *entry, void *stream);
int mok_cuda_trace_main_over(struct mok_cuda_run_entry *entry, void *stream);
int mok_cuda_trace_end(struct mok_cuda_run_entry *entry, void *stream);
/* The phase is over, and was seen to be at `now`. */
void mok_cuda_trace_tell(struct mok_cuda_run_entry *entry, uint64_t now_ns);
void mok_cuda_trace_close(struct mok_engine *engine);

/* retire.c: which blocks of the operation's megakernel retire, for what it will have to do over `slots` of all ranks */
void mok_cuda_retire(const struct mok_engine_layer *l, const struct mok_op_args *args, uint64_t slots,
                     struct mok_cuda_common *ret);

/* engine_backward.c; `fill` once a layer, behind forward's arguments */
void mok_cuda_backward_fill(struct mok_engine_layer *l);
int mok_cuda_backward_make_maps(struct mok_engine_layer *l, const struct mok_op_args *args);
void mok_cuda_backward_prepare(const struct mok_engine_layer *l, const struct mok_op_args *args,
                               struct mok_cuda_prepare_args *ret);
int mok_cuda_backward_check_context(const struct mok_engine_layer *l, const struct mok_cuda_run_entry *entry,
                                    struct mok_op_result *ret);
int mok_cuda_backward_launch(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream);

/* engine_mx.c; `fill` once a layer, behind forward's arguments; the others in the place of the BF16 forward's */
bool mok_cuda_is_mx(const struct mok_engine_layer *l);
bool mok_cuda_is_per32(const struct mok_engine_layer *l);
/* Once a device: raises the kernels' shared-memory limits; a cudaError_t. */
int mok_cuda_mx_ready(void);
void mok_cuda_mx_fill(struct mok_engine_layer *l);
int mok_cuda_mx_make_maps(struct mok_engine_layer *l, const struct mok_expert_params *p);
/* Whether x is quantised beside the schedule: of one rank's forward, which nobody else reads it of. */
bool mok_cuda_mx_beside(const struct mok_engine_layer *l, const struct mok_op_args *args);
/* x, of a backward d_out too */
int mok_cuda_mx_quantize(struct mok_engine_layer *l, const struct mok_op_args *args, const uint32_t *bad_id, void *stream);
int mok_cuda_mx_schedule(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream);
int mok_cuda_mx_launch(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream);

/* engine_mx_backward.c; `fill` once a layer, behind all others; `ring`: of a context that keeps it, or NULL */
void mok_cuda_mx_backward_fill(struct mok_engine_layer *l);
int mok_cuda_mx_backward_make_maps(struct mok_engine_layer *l, const struct mok_expert_params *p, const uint8_t *ring);
int mok_cuda_mx_backward_schedule(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream);
int mok_cuda_mx_backward_launch(struct mok_engine_layer *l, const struct mok_op_args *args, const uint8_t *ring,
                                void *stream);

/* board.c */
int mok_cuda_board_open(struct mok_engine *engine, void *memory, uint32_t slots, struct mok_engine_board **ret,
                        struct mok_message *message);
int mok_cuda_board_post(struct mok_engine_board *board, uint32_t slot, const struct mok_board_slot *what);
int mok_cuda_board_look(struct mok_engine_board *board);
int mok_cuda_board_poll(struct mok_engine_board *board, const struct mok_board_slot **ret_first,
                        const struct mok_board_slot **ret_second);
void mok_cuda_board_close(struct mok_engine_board *board);

#endif
