/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parameters of the model: where they lie, how they start, how they are updated and hashed. The passes are in
 * model_step.c.
 */
#include <stdlib.h>

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

static int allocate(struct model *model)
{
    const struct model_shape *s = &model->shape;
    size_t rows = (size_t)s->tokens * s->hidden;
    size_t expert = (size_t)s->intermediate * s->hidden;
    size_t experts = (size_t)s->layers * MOE_SHARED_GATE * (s->experts / s->ranks) * expert;

    model->dense = (struct adamw_tensor){ .value = calloc(model->dense_count, sizeof(float)),
                                          .first = calloc(model->dense_count, sizeof(float)),
                                          .second = calloc(model->dense_count, sizeof(float)),
                                          .count = model->dense_count };
    model->gradients = calloc(model->dense_count, sizeof(float));
    model->expert = (struct adamw_tensor){ .value = calloc(experts, sizeof(float)),
                                           .first = calloc(experts, sizeof(float)),
                                           .second = calloc(experts, sizeof(float)),
                                           .count = experts };
    model->logits = calloc((size_t)s->tokens * MODEL_CLASSES, sizeof(float));
    model->routing = calloc((size_t)s->tokens * s->experts, sizeof(float));
    model->d_u = calloc(rows, sizeof(float));
    model->micro = calloc(s->micro_batches, sizeof(*model->micro));
    if (!model->dense.value || !model->dense.first || !model->dense.second || !model->gradients ||
        !model->expert.value || !model->expert.first || !model->expert.second || !model->logits || !model->routing ||
        !model->d_u || !model->micro)
        return -MOK_ENOMEM;
    for (unsigned m = 0; m < s->micro_batches; m++) {
        struct model_micro *micro = &model->micro[m];

        micro->h = calloc((s->layers + 1) * rows, sizeof(float));
        micro->u = calloc((s->layers + 1) * rows, sizeof(float));
        micro->inverse = calloc((size_t)(s->layers + 1) * s->tokens, sizeof(float));
        micro->d_h = calloc(rows, sizeof(float));
        micro->target = calloc(s->tokens, 1);
        if (!micro->h || !micro->u || !micro->inverse || !micro->d_h || !micro->target)
            return -MOK_ENOMEM;
    }
    return 0;
}

int model_create(const struct model_shape *shape, struct model **ret)
{
    struct model *model = calloc(1, sizeof(*model));

    if (!model)
        return fail(-MOK_ENOMEM, "no memory");
    model->shape = *shape;
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

static void tensor_free(struct adamw_tensor *tensor)
{
    free(tensor->value);
    free(tensor->first);
    free(tensor->second);
}

void model_free(struct model *model)
{
    if (!model)
        return;
    for (unsigned m = 0; model->micro && m < model->shape.micro_batches; m++) {
        free(model->micro[m].h);
        free(model->micro[m].u);
        free(model->micro[m].inverse);
        free(model->micro[m].d_h);
        free(model->micro[m].target);
    }
    tensor_free(&model->dense);
    tensor_free(&model->expert);
    free(model->gradients);
    free(model->logits);
    free(model->routing);
    free(model->d_u);
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

static void fill_normal(float *values, size_t count, float deviation, uint64_t seed, uint64_t stream)
{
    for (size_t i = 0; i < count; i++)
        values[i] = deviation * rng_normal(seed, stream, i);
}

void model_initialise(struct model *model, uint64_t seed)
{
    const struct model_shape *s = &model->shape;
    unsigned local = s->experts / s->ranks;

    for (size_t i = 0; i < model->span_count; i++) {
        const struct model_span *span = &model->spans[i];
        float *values = model->dense.value + span->at;

        if (span->deviation > 0)
            fill_normal(values, span->count, span->deviation, seed, STREAM_DENSE + (i << 32));
        else
            for (size_t j = 0; j < span->count; j++)
                values[j] = span->constant;
    }
    for (unsigned l = 0; l < s->layers; l++) {
        for (unsigned e = 0; e < local; e++) {
            uint64_t number = (uint64_t)l * s->experts + s->rank * local + e;

            for (unsigned w = MOE_GATE; w <= MOE_DOWN; w++) {
                struct adamw_tensor tensor = model_expert(model, l, e, (enum moe_weight)w);
                float fan_in = (float)(w == MOE_DOWN ? s->intermediate : s->hidden);

                fill_normal(tensor.value, tensor.count, 1 / sqrtf(fan_in), seed,
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

        adamw_step(adamw, step, span->decay, &tensor, model->gradients + span->at);
    }
    for (unsigned l = 0; l < s->layers; l++) {
        for (unsigned w = MOE_GATE; w <= MOE_DOWN; w++) {
            struct adamw_tensor all = model_expert(model, l, 0, (enum moe_weight)w);

            all.count *= s->experts / s->ranks;
            adamw_step(adamw, step, 1, &all, moe_gradients(moe, l, (enum moe_weight)w));
        }
    }
}

uint64_t model_hash_dense(struct model *model)
{
    return ops_hash(OPS_HASH_START, model->dense.value, model->dense.count * sizeof(float));
}

uint64_t model_hash_expert(struct model *model, unsigned layer, unsigned expert)
{
    uint64_t hash = OPS_HASH_START;

    for (unsigned w = MOE_GATE; w <= MOE_DOWN; w++) {
        struct adamw_tensor tensor = model_expert(model, layer, expert, (enum moe_weight)w);

        hash = ops_hash(hash, tensor.value, tensor.count * sizeof(float));
    }
    return hash;
}
