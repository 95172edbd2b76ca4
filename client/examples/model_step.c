/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward and backward of one step. Layer by layer, micro-batch by micro-batch: while the layer of one micro-batch is
 * in flight, this process prepares the next one. Sums run in micro-batch order, whatever finishes first.
 */
#include <string.h>

#include "model_private.h"
#include "ops.h"
#include "router.h"

struct pass {
    struct model *model;
    struct moe *moe;
    const struct text *text;
    unsigned sequences; /* of one micro-batch */
    float scale;
    double loss;
};

static float *h_of(const struct model *model, unsigned micro, unsigned layer)
{
    return model->micro[micro].h + (size_t)layer * model->shape.tokens * model->shape.hidden;
}

static float *u_of(const struct model *model, unsigned micro, unsigned layer)
{
    return model->micro[micro].u + (size_t)layer * model->shape.tokens * model->shape.hidden;
}

static float *inverse_of(const struct model *model, unsigned micro, unsigned layer)
{
    return model->micro[micro].inverse + (size_t)layer * model->shape.tokens;
}

static const uint8_t *token_bytes(const struct pass *pass, unsigned micro, size_t token)
{
    size_t seq = pass->model->shape.tokens / pass->sequences;

    return pass->text->bytes + pass->model->micro[micro].positions[token / seq] + token % seq;
}

static size_t embedding_row(const struct model *model, const uint8_t *at, unsigned distance)
{
    return ((size_t)distance * MODEL_CLASSES + at[-(ptrdiff_t)distance]) * model->shape.hidden;
}

static void embed(const struct pass *pass, unsigned micro)
{
    const struct model *model = pass->model;
    size_t hidden = model->shape.hidden;
    float *h = h_of(model, micro, 0);

    memset(h, 0, model->shape.tokens * hidden * sizeof(*h));
    for (size_t t = 0; t < model->shape.tokens; t++, h += hidden) {
        const uint8_t *at = token_bytes(pass, micro, t);

        for (unsigned w = 0; w < model->shape.window; w++) {
            const float *row = model->dense.value + embedding_row(model, at, w);

            for (size_t i = 0; i < hidden; i++)
                h[i] += row[i];
        }
        model->micro[micro].target[t] = at[1];
    }
}

static void embed_backward(const struct pass *pass, unsigned micro)
{
    struct model *model = pass->model;
    size_t hidden = model->shape.hidden;
    const float *d_h = model->micro[micro].d_h;

    for (size_t t = 0; t < model->shape.tokens; t++, d_h += hidden) {
        const uint8_t *at = token_bytes(pass, micro, t);

        for (unsigned w = 0; w < model->shape.window; w++) {
            float *row = model->gradients + embedding_row(model, at, w);

            for (size_t i = 0; i < hidden; i++)
                row[i] += d_h[i];
        }
    }
}

/* Norm, router, and the layer's submission. */
static int layer_forward(const struct pass *pass, unsigned layer, unsigned micro)
{
    const struct model *model = pass->model;
    const struct model_shape *s = &model->shape;
    struct moe_activations a = moe_activations(pass->moe, layer, micro);
    float *u = u_of(model, micro, layer);

    ops_rmsnorm(s->tokens, s->hidden, h_of(model, micro, layer), model->dense.value + model->layers[layer].gain, u,
                inverse_of(model, micro, layer));
    ops_gemm_nt(s->tokens, s->experts, s->hidden, u, model->dense.value + model->layers[layer].router, 0,
                model->routing);
    router_forward(s->tokens, s->experts, s->topk, model->routing, a.ids, a.topk_weight);
    ops_to_bf16((size_t)s->tokens * s->hidden, u, a.x);
    return moe_forward(pass->moe, layer, micro);
}

/* Residual: h after the layer. */
static int layer_forward_done(const struct pass *pass, unsigned layer, unsigned micro)
{
    const struct model *model = pass->model;
    size_t count = (size_t)model->shape.tokens * model->shape.hidden;
    int rc = moe_forward_wait(pass->moe, layer, micro);

    if (rc < 0)
        return rc;
    memcpy(h_of(model, micro, layer + 1), h_of(model, micro, layer), count * sizeof(float));
    ops_add_bf16(count, moe_activations(pass->moe, layer, micro).out, h_of(model, micro, layer + 1));
    return 0;
}

/* Loss and its gradient; leaves d_h of the last layer's output. */
static void head(struct pass *pass, unsigned micro)
{
    struct model *model = pass->model;
    const struct model_shape *s = &model->shape;
    const float *gain = model->dense.value + model->gain, *out = model->dense.value + model->out;
    float *h = h_of(model, micro, s->layers), *u = u_of(model, micro, s->layers);
    float *inverse = inverse_of(model, micro, s->layers), *d_bias = model->gradients + model->bias;

    ops_rmsnorm(s->tokens, s->hidden, h, gain, u, inverse);
    for (size_t t = 0; t < s->tokens; t++)
        memcpy(model->logits + t * MODEL_CLASSES, model->dense.value + model->bias, MODEL_CLASSES * sizeof(float));
    ops_gemm_nt(s->tokens, MODEL_CLASSES, s->hidden, u, out, 1, model->logits);
    pass->loss += ops_cross_entropy(s->tokens, MODEL_CLASSES, model->logits, model->micro[micro].target, pass->scale);
    for (size_t t = 0; t < s->tokens; t++)
        for (size_t c = 0; c < MODEL_CLASSES; c++)
            d_bias[c] += model->logits[t * MODEL_CLASSES + c];
    ops_gemm_tn(MODEL_CLASSES, s->hidden, s->tokens, model->logits, u, 1, model->gradients + model->out);
    ops_gemm_nn(s->tokens, s->hidden, MODEL_CLASSES, model->logits, out, 0, model->d_u);
    memset(model->micro[micro].d_h, 0, (size_t)s->tokens * s->hidden * sizeof(float));
    ops_rmsnorm_backward(s->tokens, s->hidden, h, gain, inverse, model->d_u, model->micro[micro].d_h,
                         model->gradients + model->gain);
}

static int layer_backward(const struct pass *pass, unsigned layer, unsigned micro)
{
    const struct model *model = pass->model;
    size_t count = (size_t)model->shape.tokens * model->shape.hidden;

    ops_to_bf16(count, model->micro[micro].d_h, moe_activations(pass->moe, layer, micro).d_out);
    return moe_backward(pass->moe, layer, micro, micro == 0);
}

/* Adds what came back through the experts and through the router to the residual's gradient. */
static int layer_backward_done(const struct pass *pass, unsigned layer, unsigned micro)
{
    struct model *model = pass->model;
    const struct model_shape *s = &model->shape;
    struct moe_activations a = moe_activations(pass->moe, layer, micro);
    size_t router = model->layers[layer].router, gain = model->layers[layer].gain;
    const float *u = u_of(model, micro, layer);
    int rc = moe_backward_wait(pass->moe, layer, micro);

    if (rc < 0)
        return rc;
    router_backward(s->tokens, s->experts, s->topk, a.ids, a.topk_weight, a.d_topk_weight, model->routing);
    ops_gemm_tn(s->experts, s->hidden, s->tokens, model->routing, u, 1, model->gradients + router);
    ops_gemm_nn(s->tokens, s->hidden, s->experts, model->routing, model->dense.value + router, 0, model->d_u);
    ops_add_bf16((size_t)s->tokens * s->hidden, a.d_x, model->d_u);
    ops_rmsnorm_backward(s->tokens, s->hidden, h_of(model, micro, layer), model->dense.value + gain,
                         inverse_of(model, micro, layer), model->d_u, model->micro[micro].d_h, model->gradients + gain);
    return 0;
}

static int forward(struct pass *pass)
{
    const struct model_shape *s = &pass->model->shape;
    int rc = 0;

    for (unsigned m = 0; m < s->micro_batches && rc == 0; m++) {
        embed(pass, m);
        rc = layer_forward(pass, 0, m);
    }
    for (unsigned l = 1; l <= s->layers; l++) {
        for (unsigned m = 0; m < s->micro_batches && rc == 0; m++) {
            rc = layer_forward_done(pass, l - 1, m);
            if (rc == 0 && l < s->layers)
                rc = layer_forward(pass, l, m);
        }
    }
    return rc;
}

static int backward(struct pass *pass)
{
    const struct model_shape *s = &pass->model->shape;
    int rc = 0;

    for (unsigned m = 0; m < s->micro_batches && rc == 0; m++) {
        head(pass, m);
        rc = layer_backward(pass, s->layers - 1, m);
    }
    for (unsigned l = s->layers; l-- > 0;) {
        for (unsigned m = 0; m < s->micro_batches && rc == 0; m++) {
            rc = layer_backward_done(pass, l, m);
            if (rc == 0 && l > 0)
                rc = layer_backward(pass, l - 1, m);
            else if (rc == 0)
                embed_backward(pass, m);
        }
    }
    return rc;
}

/* The shared expert's gradients are this rank's tokens only; they join the dense ones. */
static void take_shared_gradients(const struct pass *pass)
{
    struct model *model = pass->model;

    for (size_t i = 0; i < model->span_count; i++) {
        const struct model_span *span = &model->spans[i];

        if (span->weight != MOE_WEIGHTS)
            memcpy(model->gradients + span->at, moe_gradients(pass->moe, span->layer, span->weight),
                   span->count * sizeof(float));
    }
}

int model_step(struct model *model, struct moe *moe, const struct text *text, const size_t *positions,
               unsigned sequences, float scale, double *ret_loss)
{
    struct pass pass = { .model = model, .moe = moe, .text = text, .sequences = sequences, .scale = scale };
    int rc;

    memset(model->gradients, 0, model->dense_count * sizeof(float));
    for (unsigned m = 0; m < model->shape.micro_batches; m++)
        model->micro[m].positions = positions + (size_t)m * sequences;
    rc = forward(&pass);
    if (rc == 0)
        rc = backward(&pass);
    if (rc < 0)
        return rc;
    take_shared_gradients(&pass);
    *ret_loss = pass.loss;
    return 0;
}
