/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The MoE layers of one rank through libmok: one session, one group, `layers` layers with `micro_batches` sets of
 * activations each. The only file of the example that calls libmok. Pointers are into memory that mokd owns.
 */
#ifndef EXAMPLE_MOE_H
#define EXAMPLE_MOE_H

#include <stddef.h>
#include <stdint.h>

#include "backend.h"

struct moe_config {
    const char *socket; /* NULL: the library's default */
    const char *job;    /* also the group's name */
    unsigned ranks, rank;
    unsigned kind;  /* enum mok_device_kind */
    int any_device; /* `device` counts those of that kind */
    unsigned device;
    const struct backend *backend; /* of the model around the layers */
    unsigned layers, micro_batches;
    unsigned hidden, intermediate, experts, topk;
    unsigned shared_intermediate; /* 0: no shared expert */
    unsigned tokens;              /* of one micro-batch */
    unsigned precision;           /* enum mok_precision */
    unsigned wgrad;               /* enum mok_wgrad; 0: libmok's choice */
    int recompute;                /* keep only the routing for backward */
};

/* The first three are [local experts][...], the others belong to the shared expert. */
enum moe_weight {
    MOE_GATE,
    MOE_UP,
    MOE_DOWN,
    MOE_SHARED_GATE,
    MOE_SHARED_UP,
    MOE_SHARED_DOWN,
    MOE_WEIGHTS,
};

/* Activations of one (layer, micro-batch). */
struct moe_activations {
    uint16_t *x, *d_out;  /* in: BF16 [tokens][hidden] */
    int32_t *ids;         /* in: [tokens][topk] */
    float *topk_weight;   /* in: [tokens][topk] */
    uint16_t *out, *d_x;  /* written by forward, by backward */
    float *d_topk_weight; /* written by backward */
};

struct moe_totals {
    uint64_t operations, rows, dropped, device_ns;
    uint32_t engine, precision; /* of the last operation */
};

struct moe;

/* Collective over the ranks. */
int moe_open(const struct moe_config *config, struct moe **ret);
void moe_close(struct moe *moe);

struct moe_activations moe_activations(struct moe *moe, unsigned layer, unsigned micro);
/* Gives the layer this tensor's values, rounded to its precision (a shared expert's are BF16 always). */
int moe_set_weights(struct moe *moe, unsigned layer, enum moe_weight which, const float *values);
/* The BF16 tensor itself; not for experts of another precision. */
uint16_t *moe_weights(struct moe *moe, unsigned layer, enum moe_weight which);
float *moe_gradients(struct moe *moe, unsigned layer, enum moe_weight which);
/* Elements of that tensor on this rank. */
size_t moe_weight_count(const struct moe *moe, enum moe_weight which);

/*
 * Submit; `overwrite`: weight gradients are replaced instead of added to. Waits return the operation's result.
 * -MOK_EDAEMON, without a message: mokd went away; moe_recover, then all operations of the step again, on all ranks.
 *
 * With a queued backend the operations take their place in its stream, and its waits do not wait. What became of an
 * operation is looked at when its slot is used again, a step later, and by moe_settle; so what was computed from it in
 * the meantime counts only when that has returned 0. It is the end of the job otherwise.
 */
int moe_forward(struct moe *moe, unsigned layer, unsigned micro);
int moe_forward_wait(struct moe *moe, unsigned layer, unsigned micro);
int moe_backward(struct moe *moe, unsigned layer, unsigned micro, int overwrite);
int moe_backward_wait(struct moe *moe, unsigned layer, unsigned micro);
int moe_settle(struct moe *moe);
/* Collective: drops what is left of a step that was lost, and waits for the next mokd and the other ranks. */
int moe_recover(struct moe *moe);

struct moe_totals moe_totals(const struct moe *moe);

#endif
