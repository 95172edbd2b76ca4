/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parameters of the model: where they lie, how they start, how they are updated and hashed. The passes are in
 * model_step.c.
 */
#include <stdlib.h>
#include <string.h>

#include "model_private.h"
#include "mok/types.h"
#include "ops.h"
#include "report.h"
#include "rng.h"

/* Streams of the generator, so that no two tensors share numbers. */
#define STREAM_DENSE 0x64656e73u
#define STREAM_EXPERT 0x65787074u

/* Initial size of the nearest byte's embedding, and of each further one relative to the one before. */
#define EMBEDDING 0.3f
#define EMBEDDING_FADE 0.5f

static size_t spans_wanted(const struct model_shape *shape)
{
    return shape->window + shape->layers * (shape->shared_intermediate ? 5u : 2u) + 3;
}

static void add(struct model *model, struct model_span span)
{
    span.at = model->dense_count;
    model->spans[model->span_count++] = span;
    model->dense_count += span.count;
}

static void add_shared(struct model *model, unsigned layer)
{
    const struct model_shape *s = &model->shape;
    size_t count = (size_t)s->shared_intermediate * s->hidden;
    float in = 1 / sqrtf((float)s->hidden), out = 1 / sqrtf((float)s->shared_intermediate);

    for (unsigned w = MOE_SHARED_GATE; w <= MOE_SHARED_DOWN; w++)
        add(model, (struct model_span){ .count = count,
                                        .deviation = w == MOE_SHARED_DOWN ? out : in,
                                        .decay = 1,
                                        .weight = (enum moe_weight)w,
                                        .layer = layer });
}

static void lay_out(struct model *model)
{
    const struct model_shape *s = &model->shape;
    float in = 1 / sqrtf((float)s->hidden);

    /* Near bytes say more than far ones: they start louder. */
    for (unsigned w = 0; w < s->window; w++)
        add(model, (struct model_span){ .count = (size_t)MODEL_CLASSES * s->hidden,
                                        .deviation = EMBEDDING * powf(EMBEDDING_FADE, (float)w),
                                        .decay = 1,
                                        .weight = MOE_WEIGHTS });
    for (unsigned l = 0; l < s->layers; l++) {
        model->layers[l].gain = model->dense_count;
        add(model, (struct model_span){ .count = s->hidden, .constant = 1, .weight = MOE_WEIGHTS });
        model->layers[l].router = model->dense_count;
        add(model, (struct model_span){
                       .count = (size_t)s->experts * s->hidden, .deviation = in, .decay = 1, .weight = MOE_WEIGHTS });
        if (s->shared_intermediate)
            add_shared(model, l);
    }
    model->gain = model->dense_count;
    add(model, (struct model_span){ .count = s->hidden, .constant = 1, .weight = MOE_WEIGHTS });
    model->out = model->dense_count;
    add(model, (struct model_span){ .count = (size_t)MODEL_CLASSES * s->hidden, .decay = 1, .weight = MOE_WEIGHTS });
    model->bias = model->dense_count;
    add(model, (struct model_span){ .count = MODEL_CLASSES, .weight = MOE_WEIGHTS });
}

struct part {
    void *to; /* the pointer */
    size_t bytes;
};

static int take(const struct model *model, const struct part *parts, size_t count)
{
    int rc = 0;

    for (size_t i = 0; i < count && rc == 0; i++) {
        void *memory = NULL;

        rc = model->backend->allocate(parts[i].bytes, &memory);
        memcpy(parts[i].to, &memory, sizeof(memory));
    }
    return rc;
}

static int allocate(struct model *model)
{
    const struct model_shape *s = &model->shape;
    size_t rows = (size_t)s->tokens * s->hidden, dense = model->dense_count;
    size_t expert = (size_t)s->intermediate * s->hidden;
    size_t experts = (size_t)s->layers * MOE_SHARED_GATE * (s->experts / s->ranks) * expert;
    const struct part parts[] = {
        { &model->dense.value, dense * sizeof(float) },
        { &model->dense.first, dense * sizeof(float) },
        { &model->dense.second, dense * sizeof(float) },
        { &model->gradients, dense * sizeof(float) },
        { &model->expert.value, experts * sizeof(float) },
        { &model->expert.first, experts * sizeof(float) },
        { &model->expert.second, experts * sizeof(float) },
        { &model->logits, (size_t)s->tokens * MODEL_CLASSES * sizeof(float) },
        { &model->routing, (size_t)s->tokens * s->experts * sizeof(float) },
        { &model->d_u, rows * sizeof(float) },
        { &model->token_loss, s->tokens * sizeof(double) },
        { &model->losses, MODEL_LOSSES * sizeof(double) },
    };
    int rc = take(model, parts, sizeof(parts) / sizeof(parts[0]));

    model->dense.count = dense;
    model->expert.count = experts;
    model->micro = calloc(s->micro_batches, sizeof(*model->micro));
    if (rc == 0 && !model->micro)
        rc = fail(-MOK_ENOMEM, "no memory");
    for (unsigned m = 0; m < s->micro_batches && rc == 0; m++) {
        struct model_micro *micro = &model->micro[m];
        const struct part of_micro[] = {
            { &micro->h, (s->layers + 1) * rows * sizeof(float) },
            { &micro->u, (s->layers + 1) * rows * sizeof(float) },
            { &micro->inverse, (size_t)(s->layers + 1) * s->tokens * sizeof(float) },
            { &micro->d_h, rows * sizeof(float) },
            { &micro->place, s->tokens * sizeof(uint32_t) },
        };

        rc = take(model, of_micro, sizeof(of_micro) / sizeof(of_micro[0]));
    }
    return rc;
}

int model_create(const struct model_shape *shape, const struct backend *backend, struct model **ret)
{
    struct model *model = calloc(1, sizeof(*model));

    if (!model)
        return fail(-MOK_ENOMEM, "no memory");
    model->shape = *shape;
    model->backend = backend;
    model->spans = calloc(spans_wanted(shape), sizeof(*model->spans));
    model->layers = calloc(shape->layers, sizeof(*model->layers));
    if (!model->spans || !model->layers) {
        model_free(model);
        return fail(-MOK_ENOMEM, "no memory");
    }
    lay_out(model);
    if (allocate(model) < 0) {
        model_free(model);
        return fail(-MOK_ENOMEM, "no memory for a model of %zu dense parameters", model->dense_count);
    }
    *ret = model;
    return 0;
}

static void tensor_free(const struct model *model, struct adamw_tensor *tensor)
{
    model->backend->release(tensor->value);
    model->backend->release(tensor->first);
    model->backend->release(tensor->second);
}

void model_free(struct model *model)
{
    if (!model)
        return;
    void (*release)(void *memory) = model->backend->release;

    for (unsigned m = 0; model->micro && m < model->shape.micro_batches; m++) {
        release(model->micro[m].h);
        release(model->micro[m].u);
        release(model->micro[m].inverse);
        release(model->micro[m].d_h);
        release(model->micro[m].place);
    }
    tensor_free(model, &model->dense);
    tensor_free(model, &model->expert);
    release(model->gradients);
    release(model->logits);
    release(model->routing);
    release(model->d_u);
    release(model->token_loss);
    release(model->losses);
    free(model->micro);
    free(model->spans);
    free(model->layers);
    free(model);
}

size_t model_dense_count(const struct model_shape *s)
{
    size_t layer = s->hidden + (size_t)s->experts * s->hidden + 3 * (size_t)s->shared_intermediate * s->hidden;

    return (size_t)s->window * MODEL_CLASSES * s->hidden + s->layers * layer + s->hidden +
           (size_t)MODEL_CLASSES * s->hidden + MODEL_CLASSES;
}

struct adamw_tensor model_dense(struct model *model)
{
    return model->dense;
}

float *model_gradients(struct model *model)
{
    return model->gradients;
}

const struct model_span *model_spans(const struct model *model, size_t *ret_count)
{
    *ret_count = model->span_count;
    return model->spans;
}

struct adamw_tensor model_expert(struct model *model, unsigned layer, unsigned expert, enum moe_weight which)
{
    const struct model_shape *s = &model->shape;
    size_t count = (size_t)s->intermediate * s->hidden, local = s->experts / s->ranks;
    size_t at = (((size_t)layer * MOE_SHARED_GATE + (size_t)which) * local + expert) * count;

    return (struct adamw_tensor){ .value = model->expert.value + at,
                                  .first = model->expert.first + at,
                                  .second = model->expert.second + at,
                                  .count = count };
}

void model_initialise(struct model *model, uint64_t seed)
{
    const struct model_shape *s = &model->shape;
    const struct backend *b = model->backend;
    unsigned local = s->experts / s->ranks;

    for (size_t i = 0; i < model->span_count; i++) {
        const struct model_span *span = &model->spans[i];

        b->initialise(model->dense.value + span->at, span->count, span->constant, span->deviation, seed,
                      STREAM_DENSE + (i << 32));
    }
    for (unsigned l = 0; l < s->layers; l++) {
        for (unsigned e = 0; e < local; e++) {
            uint64_t number = (uint64_t)l * s->experts + s->rank * local + e;

            for (unsigned w = MOE_GATE; w <= MOE_DOWN; w++) {
                struct adamw_tensor tensor = model_expert(model, l, e, (enum moe_weight)w);
                float fan_in = (float)(w == MOE_DOWN ? s->intermediate : s->hidden);

                b->initialise(tensor.value, tensor.count, 0, 1 / sqrtf(fan_in), seed,
                              STREAM_EXPERT + ((3 * number + w) << 32));
            }
        }
    }
}

int model_publish(struct model *model, struct moe *moe)
{
    int rc = 0;

    for (unsigned l = 0; l < model->shape.layers && rc == 0; l++)
        for (unsigned w = MOE_GATE; w <= MOE_DOWN && rc == 0; w++)
            rc = moe_set_weights(moe, l, (enum moe_weight)w, model_expert(model, l, 0, (enum moe_weight)w).value);
    for (size_t i = 0; i < model->span_count && rc == 0; i++) {
        const struct model_span *span = &model->spans[i];

        if (span->weight != MOE_WEIGHTS)
            rc = moe_set_weights(moe, span->layer, span->weight, model->dense.value + span->at);
    }
    return rc;
}

void model_update(struct model *model, struct moe *moe, const struct adamw *adamw, uint64_t step)
{
    const struct model_shape *s = &model->shape;

    for (size_t i = 0; i < model->span_count; i++) {
        const struct model_span *span = &model->spans[i];
        struct adamw_tensor tensor = { .value = model->dense.value + span->at,
                                       .first = model->dense.first + span->at,
                                       .second = model->dense.second + span->at,
                                       .count = span->count };

        model->backend->adamw(adamw, step, span->decay, &tensor, model->gradients + span->at);
    }
    for (unsigned l = 0; l < s->layers; l++) {
        for (unsigned w = MOE_GATE; w <= MOE_DOWN; w++) {
            struct adamw_tensor all = model_expert(model, l, 0, (enum moe_weight)w);

            all.count *= s->experts / s->ranks;
            model->backend->adamw(adamw, step, 1, &all, moe_gradients(moe, l, (enum moe_weight)w));
        }
    }
}

static int hash_values(const struct model *model, const float *values, size_t count, uint64_t *hash)
{
    size_t bytes = count * sizeof(*values);
    float *copy = NULL;
    int rc = 0;

    if (model->backend->queued) {
        copy = malloc(bytes);
        rc = copy ? model->backend->get(copy, values, bytes) : fail(-MOK_ENOMEM, "no memory");
    }
    if (rc == 0)
        *hash = ops_hash(*hash, copy ? copy : values, bytes);
    free(copy);
    return rc;
}

int model_hash_dense(struct model *model, uint64_t *hash)
{
    return hash_values(model, model->dense.value, model->dense.count, hash);
}

int model_hash_expert(struct model *model, unsigned layer, unsigned expert, uint64_t *hash)
{
    int rc = 0;

    for (unsigned w = MOE_GATE; w <= MOE_DOWN && rc == 0; w++) {
        struct adamw_tensor tensor = model_expert(model, layer, expert, (enum moe_weight)w);

        rc = hash_values(model, tensor.value, tensor.count, hash);
    }
    return rc;
}
