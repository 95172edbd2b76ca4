/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the dispatcher's own files share. Everything here but the mailboxes and the wake-up words is used by
 * the dispatcher thread alone.
 *
 *   dispatcher.c   the thread: what it looks at, in which order, and how it sleeps
 *   operations.c   an operation from submission to completion; groups that break
 *   phases.c       the engine: who gets it, with which arguments
 *   ahead.c        phases that are on the device before their time
 *   expect.c       operations that are there before they have been submitted
 *   commands.c     what the control thread asks for
 *   trace.c        events for whoever asks for them
 *   count.c        numbers for whoever looks from outside
 */
#ifndef MOK_WORKER_DISPATCHER_INTERNAL_H
#define MOK_WORKER_DISPATCHER_INTERNAL_H

#include <inttypes.h>
#include <pthread.h>

#include "dispatcher.h"
#include "util.h"
#include "validate.h"

struct dispatcher {
    /* set before the thread starts */
    const struct mok_engine_ops *ops;
    struct mok_engine *engine;
    uint64_t poll_ns;
    bool looks_at_engine; /* nobody says when a phase has ended */
    uint32_t chaos_delay_us;
    int bell, epoll, report_fd;
    pthread_t thread;
    struct mok_stats *stats;
    struct mok_trace *trace; /* NULL: nobody wants to know */
    uint32_t traced_queue, traced_layer; /* whose phase runs, for the engine's threads */
    uint64_t phase_started_ns;
    unsigned stats_slot; /* where the next queue looks for one first */

    /* both threads, and those of the engine */
    struct worker_mailbox inbox, outbox;
    uint32_t notified; /* a command or the end of a phase may be there */
    uint32_t asleep;   /* write the bell after setting `notified` */
    uint32_t quiet;    /* nothing is to be started ahead */
    uint32_t waiting;  /* something is */

    /* the dispatcher thread */
    struct worker_tables tables;
    struct worker_queue *queues; /* all that are linked, by `next` */
    struct worker_queue *turn;   /* whose submissions are taken first next time */
    struct worker_queue *stats_turn; /* of whose numbers the next answer begins */
    struct worker_layer *active; /* layers that have operations */
    struct fair_share share;
    struct worker_layer *running; /* its first operation has the engine */
    enum mok_phase running_phase;
    uint64_t running_since_ns;
    struct {
        struct worker_op *op; /* started ahead, behind `running` if there is one; NULL: none */
        struct worker_layer *expected; /* instead: of an operation that has not been submitted; NULL: none */
        enum mok_phase phase; /* WHOLE, PREPARE: the client's stream lets it go, not begun yet; REDUCE: we do */
        bool we_let_go;       /* WHOLE: once the client's stream has said so */
        struct mok_op_args args;
        struct mok_peer peer;
        bool withdrawn;         /* the engine has been told; it says what became of it */
        uint64_t not_before_ns; /* none is started ahead until then */
        uint64_t until_ns;      /* the expected one is given up then */
    } ahead;
    struct dispatcher_command *parked; /* commands that wait for something to end, oldest first */
    struct dispatcher_command *stop;   /* answered last */
    uint64_t order;                    /* of layers that became runnable */
    uint64_t epoch;                    /* moves when memory or layers come or go; never 0 */
    uint64_t ops_done, device_ns, errors;
    uint64_t now_ns;
    uint64_t chaos_state;
    bool something_ended; /* parked commands may go on */
    uint32_t awaited;     /* operations whose turn it is and whose stream has not brought the inputs */
};

/* dispatcher.c */
void dispatcher_report(struct dispatcher *d, struct worker_report *report);
struct worker_report *dispatcher_inbox(struct dispatcher *d);
void dispatcher_ring_peers(struct dispatcher *d, const struct worker_layer *layer);
void dispatcher_chaos(struct dispatcher *d);

/* operations.c */
/* Takes at most one submission of a queue; true if there was one. */
bool operations_take(struct dispatcher *d, struct worker_queue *queue);
/* Moves the first operation of a layer as far as it goes without the engine; true if anything moved. */
bool operations_step(struct dispatcher *d, struct worker_layer *layer);
/* Ends what waits for longer than it wanted to. Returns the next moment to look again, UINT64_MAX: none. */
uint64_t operations_check_deadlines(struct dispatcher *d);
/* Leaves a withdrawn operation's number to the other ranks: the layer runs no more. */
void operations_abandon(struct dispatcher *d, struct worker_layer *layer);
/* After a phase of a dying operation. */
void operations_bury(struct dispatcher *d, struct worker_op *op);
/* Nothing of the group runs any more; all its operations complete with `code`, at once or when the engine lets go. */
void operations_fail_group(struct dispatcher *d, struct worker_group *group, int code, uint32_t rank);
/* The same for one layer, of which `rank` has destroyed its part. */
void operations_fail_layer(struct dispatcher *d, struct worker_layer *layer, int code, uint32_t rank);
/* The same because of something that mokd does not know of: it is told `told` and the sentence. */
void operations_break_group(struct dispatcher *d, struct worker_group *group, int code, uint32_t rank, int told,
                            const char *format, ...) _printf_(6, 7);
/* Nothing of the queue is taken or completed any more; its groups fail. */
void operations_drop_queue(struct dispatcher *d, struct worker_queue *queue, int code);
struct worker_op *operations_find(const struct worker_queue *queue, uint64_t user_data);
/* Whether an operation that can still run uses the buffer. */
bool operations_use(const struct worker_layer *layer, const struct worker_buffer *buffer);

/* The operation's turn has come: it gets its number. */
void operations_begin(struct worker_layer *layer, struct worker_op *op);
/* It does not wait for its stream any more. */
void operations_await_no_more(struct dispatcher *d, struct worker_op *op);
void operations_make_runnable(struct dispatcher *d, struct worker_layer *layer, enum mok_dispatch_action action);

/* ahead.c */
/* Whether the engine has something that was started ahead. */
bool ahead_is_busy(const struct dispatcher *d);
/* Whether it has not begun, so that the engine says what becomes of it. */
bool ahead_has(const struct dispatcher *d, const struct worker_op *op);
/* Starts the phase that comes next ahead, if there is one that can be; cheap. */
void ahead_offer(struct dispatcher *d);
/* While nothing runs: whether the one ahead has started, ended or been let go; true if anything moved. */
bool ahead_poll(struct dispatcher *d);
/* Whether what has been started ahead is this phase of the layer's first operation, and waits for us alone. */
bool ahead_is(const struct dispatcher *d, const struct worker_layer *layer, enum mok_phase phase);
/* Lets it go. */
void ahead_go(struct dispatcher *d);
/* Starts a phase of the layer's first operation, so that the device tells its client's stream of the end if it can. */
int ahead_start(struct dispatcher *d, struct worker_layer *layer, enum mok_phase phase);
/* Asks for it back; ahead_poll tells. */
void ahead_withdraw(struct dispatcher *d);
/* The same at once: waits until it is back or over, a moment. True: it has done nothing. */
bool ahead_take_back(struct dispatcher *d);

/* Of expect.c: whether something may be started ahead now, so that it is for who wants quiet; ended by ahead_let_go. */
bool ahead_may(struct dispatcher *d);
void ahead_let_go(struct dispatcher *d);
/* An operation of one rank that its client's stream hands over; nothing but its stream, and what runs, is before it. */
bool ahead_can_be_whole(const struct worker_op *op);
bool ahead_comes_next(const struct dispatcher *d, const struct worker_op *op);
/* Its inputs, where it is of one rank. */
void ahead_fill_peer(const struct worker_op *op, struct mok_peer *ret);

/* expect.c */
/* An operation has been taken: what its client does. Before it is linked. */
void expect_learn(struct dispatcher *d, const struct worker_op *op);
/* Memory or layers come or go: no address of before is used any more. */
void expect_forget(struct dispatcher *d);
/* Starts what is expected ahead, if there is something; cheap. */
void expect_offer(struct dispatcher *d);
/* An operation has come: it is the one, or that is asked back. */
void expect_meet(struct dispatcher *d, struct worker_op *op);
void expect_drop(struct dispatcher *d);
/* While nothing runs: whether it has been let go; true if it has. */
bool expect_poll(struct dispatcher *d);

/* phases.c */
void phases_fill_args(const struct worker_layer *layer, const struct worker_op *op, struct mok_op_args *ret);
/* This rank's inputs, for PREPARE. */
void phases_fill_own(struct worker_layer *layer, const struct worker_op *op);
/* The layer's first operation has the engine. */
void phases_running(struct dispatcher *d, struct worker_layer *layer, enum mok_phase phase);
/* The end of what runs. */
void phases_ended(struct dispatcher *d, const struct mok_op_result *result);
/* Takes the end of the running phase; true if it had ended. */
bool phases_poll(struct dispatcher *d);
/* Gives the engine to the most deserving layer; true if one got it. */
bool phases_start(struct dispatcher *d);

/* count.c */
/* A new worker has the page: what belonged to objects of the one before goes, the counters go on. */
void count_begin(struct mok_stats *stats);
void count_queue_open(struct dispatcher *d, struct worker_queue *queue);
void count_queue_gone(struct worker_queue *queue);
void count_layer_open(struct dispatcher *d, struct worker_layer *layer);
void count_layer_gone(struct worker_layer *layer);
void count_taken(struct dispatcher *d, struct worker_op *op);
/* A completion goes out; `op` NULL: of a submission that was refused or needed no layer. */
void count_completed(struct dispatcher *d, struct worker_queue *queue, unsigned opcode, const struct worker_op *op,
                     const struct mok_cqe *cqe);
/* The engine starts on a phase of the layer's first operation; has ended it. */
void count_phase_start(struct dispatcher *d, struct worker_layer *layer, enum mok_phase phase);
void count_phase_end(struct dispatcher *d, struct worker_layer *layer, const struct mok_op_result *result);

/* trace.c */
void trace_begin(struct dispatcher *d, struct mok_trace *trace); /* NULL: ends it */
/* Each is quick, and nothing at all while there is no trace. */
void trace_completed(struct dispatcher *d, const struct worker_op *op, const struct mok_cqe *cqe);
void trace_waited(struct dispatcher *d, const struct worker_op *op, enum mok_latency what, uint64_t since_ns,
                  uint64_t until_ns);
/* Whose operation the engine tells of from now on; and that its phase begins now. */
void trace_work_of(struct dispatcher *d, const struct worker_layer *layer);
void trace_phase_next(struct dispatcher *d, const struct worker_layer *layer);
void trace_phase_end(struct dispatcher *d, const struct worker_op *op, enum mok_phase phase);
void trace_slept(struct dispatcher *d, uint64_t since_ns, uint64_t until_ns);

/* commands.c */
bool commands_take(struct dispatcher *d);
/* Goes on with the parked commands that have nothing to wait for any more. */
void commands_resume(struct dispatcher *d);
/* Answers the parked commands that will never get there, and STOP. */
void commands_finish(struct dispatcher *d);

#endif
