/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The life of one rank: opens its session, trains, saves, reports.
 */
#ifndef EXAMPLE_TRAIN_H
#define EXAMPLE_TRAIN_H

#include "backend.h"
#include "comm.h"
#include "data.h"
#include "model.h"
#include "moe.h"
#include "options.h"

/* What the launcher hands to every rank. */
struct job {
    const struct options *options;
    const struct text *text;
    struct comm *comm;
    const struct backend *backend;
};

struct model_shape train_shape(const struct options *options, unsigned rank);
struct moe_config train_moe_config(const struct options *options, unsigned rank);
/* Words of the comm board: one hash an expert, one a rank for its dense parameters. */
size_t train_board_words(const struct options *options);

/* Before the fork: what would fail later in every rank (checkpoint to resume, folder to write it to) fails once. */
int train_check(const struct options *options, const struct text *text);

/* launch_rank; `argument` is a struct job. */
int train_rank(unsigned rank, void *argument);

#endif
