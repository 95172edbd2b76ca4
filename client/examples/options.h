/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command line: what can be asked for, its defaults, and sentences for what cannot.
 */
#ifndef EXAMPLE_OPTIONS_H
#define EXAMPLE_OPTIONS_H

#include <stdint.h>

#include "mok/types.h"

struct options {
    unsigned ranks;
    unsigned devices[MOK_MAX_EP];
    int any_devices; /* they count those of the engine's kind at each mokd */
    unsigned engine; /* enum mok_device_kind */
    const char *job, *text, *checkpoint, *log, *dump;
    const char *sockets[MOK_MAX_EP]; /* of mokd, by rank; NULL: the library's default */
    unsigned n_sockets;              /* given: none, one for all ranks, or one a rank */
    uint64_t steps, save_every, seed;
    unsigned batch, seq, micro_batches;
    unsigned hidden, intermediate, experts, topk, layers, window;
    unsigned precision; /* enum mok_precision */
    unsigned wgrad;     /* enum mok_wgrad; 0: libmok's choice */
    float rate;
    int resume, recompute, shared_expert, check_gradients, quiet, report;
};

/* Returns 0: run. 1: nothing to do (help was printed). -MOK_E*: refused, the sentence is on stderr. */
int options_parse(int argc, char **argv, struct options *ret);

/* What libmok chooses where nothing is said, too. */
static inline unsigned options_wgrad(const struct options *options)
{
    if (options->wgrad)
        return options->wgrad;
    return options->precision == MOK_MXFP8_PER128 ? MOK_WGRAD_MXFP8 : MOK_WGRAD_BF16;
}

/* Tokens of one micro-batch of one rank. */
static inline unsigned options_tokens(const struct options *options)
{
    return options->batch / options->micro_batches * options->seq;
}

#endif
