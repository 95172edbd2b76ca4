/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Inside of struct model; for model.c and model_step.c only.
 */
#ifndef EXAMPLE_MODEL_PRIVATE_H
#define EXAMPLE_MODEL_PRIVATE_H

#include <math.h>

#include "model.h"

/* Activations of one micro-batch that backward needs; index `layers` of h, u, inverse belongs to the output head. */
struct model_micro {
    float *h;        /* [layers + 1][tokens][hidden]: before layer l */
    float *u;        /* [layers + 1][tokens][hidden]: after its norm */
    float *inverse;  /* [layers + 1][tokens] */
    float *d_h;      /* [tokens][hidden] */
    uint32_t *place; /* [tokens]: in the text */
    struct batch batch;
};

struct model_layer {
    size_t gain, router; /* offsets in the dense parameters */
};

struct model {
    struct model_shape shape;
    const struct backend *backend;
    struct model_span *spans;
    size_t span_count, dense_count;
    struct model_layer *layers;
    size_t gain, out, bias; /* of the output head; the embedding is at 0 */
    struct adamw_tensor dense, expert;
    float *gradients;
    struct model_micro *micro;
    float *logits;      /* [tokens][classes] */
    float *routing;     /* [tokens][experts] */
    float *d_u;         /* [tokens][hidden] */
    double *token_loss; /* [tokens] */
    double *losses;     /* [MODEL_LOSSES] */
};

#endif
