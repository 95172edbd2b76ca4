/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of a rank's life; for train.c and train_stream.c only.
 */
#ifndef EXAMPLE_TRAIN_PRIVATE_H
#define EXAMPLE_TRAIN_PRIVATE_H

#include "progress.h"
#include "train.h"

struct rank {
    const struct options *options;
    const struct text *text;
    struct comm *comm;
    unsigned rank;
    const struct backend *backend;
    struct moe *moe;
    struct model *model;
    struct adamw adamw;
    const uint8_t *bytes; /* of the text, in the backend's memory */
    void *bytes_copy;     /* NULL: they are the text's own */
    float *gradients;     /* the dense ones in this process's memory; with a queued backend and several ranks */
    uint64_t step;        /* steps done, or queued */
};

/* This rank's first micro-batch of the step after r->step, and what a token counts in the loss. */
struct batch train_batch(const struct rank *r);
float train_scale(const struct rank *r);
/* Collective: writes the checkpoint. */
int train_save(struct rank *r);

/* The loop of a queued backend, as train_loop of train.c is that of the others. */
int train_stream(struct rank *r, struct progress *progress, int *ret_stopped);

#endif
