/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Streams of the emulated GPU: each a thread that takes steps in order. A step may wait for a word of memory, so one
 * stream never runs another's steps.
 */
#ifndef MOK_EMULATOR_STREAM_H
#define MOK_EMULATOR_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_runtime_api.h"

#define EXPORT __attribute__((visibility("default")))

enum step_kind { STEP_CALL, STEP_WAIT_VALUE, STEP_WRITE_VALUE, STEP_COPY, STEP_SET };

struct step {
    struct step *next;
    enum step_kind kind;
    bool early; /* CALL: the call before it may take it over */
    void (*function)(void *);
    void *cookie;
    uint32_t *word, value; /* WAIT_VALUE, WRITE_VALUE, SET (a byte) */
    void *to;
    const void *from;
    uint64_t bytes;
};

/* NULL: no memory. */
struct CUstream_st *stream_new(void);
/* After all that is queued has run. */
void stream_free(struct CUstream_st *stream);
/* A copy of the step; NULL stream: the default one. */
cudaError_t stream_push(struct CUstream_st *stream, struct step step);
/* By the call that runs: takes over the next step if it is an early one of the same function; its cookie, or NULL. */
void *stream_take_early(struct CUstream_st *stream, void (*function)(void *));
/* Waits for all that is queued now; false after timeout_ms (-1: never). */
bool stream_wait(struct CUstream_st *stream, int timeout_ms);
bool stream_busy(struct CUstream_st *stream);
/* Waits for every stream of the process. */
void streams_wait_all(void);

#endif
