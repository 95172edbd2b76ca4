/* SPDX-License-Identifier: Apache-2.0 */
/* What control.c (the loop, the answers) and requests.c (one function a request) share. Control thread only. */
#ifndef MOK_WORKER_CONTROL_INTERNAL_H
#define MOK_WORKER_CONTROL_INTERNAL_H

#include "control.h"
#include "dispatcher.h"
#include "objects.h"
#include "reaper.h"
#include "util.h"
#include "wire.h"

struct control {
    int fd; /* -1 once the other end is gone */
    struct mok_wire_queue unsent;
    struct objects_engine on;
    struct dispatcher *dispatcher; /* NULL before start */
    struct mok_stats *stats;
    bool stats_mapped; /* else allocated */
    struct mok_trace *trace; /* mapped; NULL: none */
    uint64_t trace_bytes;
    struct reaper *reaper;
    struct worker_tables tables;
    struct dispatcher_command stop;
    bool stopping, stopped;
    int error; /* why the socket could not be used, for the exit code */
    char name[16 + MOK_MAX_NAME + 1];
};

/* control.c */
void control_reply(struct control *c, uint64_t request, int code, const char *text);
/* Ends the dispatcher, which completes all that is owed with `code`; request 0: nobody asked. */
void control_stop(struct control *c, uint64_t request, int code);
/* Memory that was asked for, with its fabric handle or NULL; the descriptor stays the caller's. */
void control_reply_memory(struct control *c, uint64_t request, int memory, uint8_t *fabric);
/* WorkerStarted. */
void control_reply_started(struct control *c, uint64_t request);

/* requests.c */
/* Answers at once, or posts a command whose return is the answer. */
void control_handle(struct control *c, const Mok__WorkerRequest *request, struct mok_wire_fds *fds);
/* A command has come back: takes what it closed out of the tables, into command->load. */
void control_collect(struct control *c, struct dispatcher_command *command);
/* Memory of a trace that nobody writes to any more; none is fine. */
void control_release_trace(struct control *c);
/* The page for numbers; once the dispatcher is freed. */
void control_release_stats(struct control *c);
/* Whatever is left; only once the dispatcher has ended. */
void control_destroy_all(struct control *c);

#endif
