/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The engine interface: what the worker (or a test, in its own process) drives.
 * An engine owns one device. It runs one phase of one operation at a time and never waits for another rank.
 */
#ifndef MOK_KERNELS_ENGINE_H
#define MOK_KERNELS_ENGINE_H

#include "layer.h"

#ifdef __cplusplus
extern "C" {
#endif

struct mok_engine;       /* one open device */
struct mok_engine_layer; /* one layer of one rank on it */
struct mok_engine_board; /* flags of a layer whose ranks are on several hosts: board.h */
struct mok_board_slot;

#define MOK_FABRIC_BYTES 64u /* of a fabric handle */

struct mok_engine_config {
    uint32_t index;       /* cuda: device ordinal */
    uint32_t threads;     /* host: threads, >= 1 */
    uint32_t blocks;      /* cuda: thread blocks of a megakernel at most, so that other kernels find SMs free; 0: one an SM */
    uint32_t reserve;     /* cuda: SMs that its kernels leave to others */
    uint32_t yield_us;    /* cuda: a block retires at a task border after about so long, so that a kernel that waits gets its
                             place; 0: never */
    void (*notify)(void *cookie); /* called from an engine thread when a phase has ended; may be NULL */
    void *cookie;
    uint32_t chaos_delay_us; /* tests: random delays at task borders, up to this; 0: none */
};

/* The phases of an operation. Between them the device is free for other operations. */
enum mok_phase {
    MOK_PHASE_PREPARE = 1, /* validate ids or context; stage routing in the symmetric workspace */
    MOK_PHASE_MAIN = 2,    /* all ranks ready: schedule, dispatch, experts, push */
    MOK_PHASE_REDUCE = 3,  /* all ranks pushed: sum the slots */
    /* A group of one rank, which waits for nobody: all three in turn. A PREPARE that fails ends it, and nothing is
     * written. Only where the engine says so (`runs_whole`). */
    MOK_PHASE_WHOLE = 4,
};

/* What a unit of an engine does, for traces. */
enum mok_engine_work {
    MOK_WORK_OTHER = 0,
    MOK_WORK_SCHEDULE,
    MOK_WORK_DISPATCH, /* rows in; of backward: reverse-combine */
    MOK_WORK_GATE_UP,
    MOK_WORK_DOWN,
    MOK_WORK_COMBINE,  /* rows out; of backward: reverse-dispatch */
    MOK_WORK_D_HIDDEN,
    MOK_WORK_D_INPUT,
    MOK_WORK_WGRAD,
    MOK_WORK_SHARED,   /* the shared expert, any of it */
    MOK_WORK_REDUCE,
    MOK_WORK_PREPARE,
    MOK_WORKS,
};

/* A piece of work that is done: of a minibatch's place in the ring and a turn of macrobatches where it has them. */
struct mok_engine_span {
    enum mok_engine_work work;
    uint32_t slot;
    uint32_t turn;
    uint64_t start_ns, end_ns; /* CLOCK_MONOTONIC */
};

/*
 * Words in host memory by which a device starts a phase by itself and says that it is over. The client may write
 * both at any time, and harms nobody but itself.
 */
struct mok_engine_gate {
    const uint32_t *start; /* the phase goes once this has come to `number`, as a signed difference; NULL: at go() */
    uint32_t *done;        /* gets `number` when the phase is over, well or not; NULL: nobody is told */
    uint32_t number;
};

struct mok_engine_ops {
    const char *name;
    uint32_t kind;   /* enum mok_device_kind */
    bool runs_whole; /* knows MOK_PHASE_WHOLE */

    /* Says whether the device can be used and how big it is. 0, or -MOK_E* with the reason. */
    int (*probe)(const struct mok_engine_config *config, struct mok_device_limits *ret, struct mok_message *message);

    int (*open)(const struct mok_engine_config *config, struct mok_engine **ret, struct mok_message *message);
    void (*close)(struct mok_engine *engine); /* NULL is fine; aborts what runs */

    /* Memory: zeroed, shareable by descriptor, mapped where asked. `ret_fabric`: its fabric handle too; NULL: not wanted. */
    int (*memory_alloc)(struct mok_engine *engine, uint64_t bytes, int *ret_fd, uint8_t *ret_fabric,
                        struct mok_message *message);
    int (*memory_map)(struct mok_engine *engine, int fd, uint64_t bytes, void **ret, struct mok_message *message);
    void (*memory_unmap)(struct mok_engine *engine, void *address, uint64_t bytes);
    /*
     * Whether the device's memory can be had by a fabric handle, which reaches other hosts of its NVLink domain: tried out.
     * 0, or -MOK_ENOTSUP with the reason. The pointer is NULL where an engine has no such memory.
     */
    int (*fabric_try)(struct mok_engine *engine, struct mok_message *message);
    /* As memory_map, of what another host's device has exported. NULL as above. */
    int (*fabric_map)(struct mok_engine *engine, const uint8_t fabric[MOK_FABRIC_BYTES], uint64_t bytes, void **ret,
                      struct mok_message *message);

    /*
     * A board (board.h) of `slots` in mapped device memory, of whatever device. Posts and looks happen in the order of the calls.
     * None waits, but for a post behind many others. The pointers are NULL where an engine has no such memory; a negative code
     * means that the device is lost.
     */
    int (*board_open)(struct mok_engine *engine, void *memory, uint32_t slots, struct mok_engine_board **ret,
                      struct mok_message *message);
    int (*board_post)(struct mok_engine_board *board, uint32_t slot, const struct mok_board_slot *what);
    int (*board_look)(struct mok_engine_board *board); /* -MOK_EBUSY while one is under way */
    /* 1 and both readings once the look has ended (told once; until the next one begins), 0 while there is none. */
    int (*board_poll)(struct mok_engine_board *board, const struct mok_board_slot **ret_first,
                      const struct mok_board_slot **ret_second);
    void (*board_close)(struct mok_engine_board *board); /* NULL is fine */

    /* `symmetric`: [ep] mapped symmetric workspaces in rank order. `private_memory`: plan->private_bytes. */
    int (*layer_open)(struct mok_engine *engine, const struct mok_plan *plan, void *const *symmetric,
                      void *private_memory, struct mok_engine_layer **ret, struct mok_message *message);
    void (*layer_close)(struct mok_engine_layer *layer); /* not while a phase of it runs */

    /* Starts a phase; `args` must live until it has ended. -MOK_EBUSY while another phase runs. */
    int (*start)(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase);
    /*
     * 1 and *ret once the oldest phase has ended (told once), 0 while it runs or when none was started; 2 in the place
     * of 1 where it was started ahead and has been withdrawn: it did nothing.
     */
    int (*poll)(struct mok_engine *engine, struct mok_op_result *ret);
    /* NULL, or says why the phase that ended last with -MOK_EINTERNAL did: for a log, people read it. */
    void (*explain)(const struct mok_engine *engine, struct mok_message *message);
    /* Asks the running phase to stop soon; it then ends with -MOK_ECANCELED. */
    void (*abort)(struct mok_engine *engine);

    /*
     * These are NULL where a device cannot start by itself. WHOLE, PREPARE or REDUCE, behind what runs, at most one at a
     * time; it goes when its gate opens, at once if that is open. A negative code: nothing was started; what the arguments
     * lack, start() says. The memory of its words has been mapped before, which returns 0 or -MOK_E*.
     */
    int (*gate_map)(struct mok_engine *engine, void *memory, uint64_t bytes, struct mok_message *message);
    void (*gate_unmap)(struct mok_engine *engine, void *memory);
    int (*start_ahead)(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase,
                       const struct mok_engine_gate *gate);
    /*
     * Opens the gate of the phase that was started ahead where nobody else does. It is not withdrawn after that.
     * `tell`: whom it tells of its end, in the place of what was said when it was started; NULL: as was said.
     */
    void (*go)(struct mok_engine *engine, const struct mok_engine_gate *tell);
    /* Lets it pass without doing anything, unless it runs already; poll tells which. */
    void (*withdraw)(struct mok_engine *engine);

    /*
     * From now on `told` hears of each piece of work that ends, from the engine's threads, and must be quick; NULL:
     * nobody, and once this returns nobody is being told any more. The pointer is NULL where an engine cannot tell.
     */
    void (*trace)(struct mok_engine *engine, void (*told)(void *cookie, const struct mok_engine_span *span),
                  void *cookie);
};

extern const struct mok_engine_ops mok_host_engine;

/* The engine of a device kind, or NULL where this build has none. */
const struct mok_engine_ops *mok_engine_find(uint32_t kind);

#ifdef __cplusplus
}
#endif
#endif
