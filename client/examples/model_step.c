/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward and backward of one step. Layer by layer, micro-batch by micro-batch: while the layer of one micro-batch is
 * in flight, this process prepares the next one (on a GPU all are queued in that order). Sums run in micro-batch order,
 * whatever finishes first.
 */
#include "model_private.h"

struct pass {
    struct model *model;
    const struct backend *backend;
    struct moe *moe;
    float scale;
    double *loss; /* of the step, in the backend's memory */
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

static void embed(const struct pass *pass, unsigned micro)
{
    const struct model *model = pass->model;
    struct model_micro *m = &model->micro[micro];

    pass->backend->embed(&m->batch, model->shape.tokens, model->shape.hidden, model->dense.value, m->place,
                         h_of(model, micro, 0));
}

static void embed_backward(const struct pass *pass, unsigned micro)
{
    const struct model *model = pass->model;
    const struct model_micro *m = &model->micro[micro];

    pass->backend->embed_backward(&m->batch, model->shape.tokens, model->shape.hidden, m->place, m->d_h,
                                  model->gradients);
}

/* Norm, router, and the layer's submission. */
static int layer_forward(const struct pass *pass, unsigned layer, unsigned micro)
{
    const struct model *model = pass->model;
    const struct model_shape *s = &model->shape;
    const struct backend *b = pass->backend;
    struct moe_activations a = moe_activations(pass->moe, layer, micro);
    float *u = u_of(model, micro, layer);
    int rc;

    b->rmsnorm(s->tokens, s->hidden, h_of(model, micro, layer), model->dense.value + model->layers[layer].gain, u,
               inverse_of(model, micro, layer));
    b->gemm_nt(s->tokens, s->experts, s->hidden, u, model->dense.value + model->layers[layer].router, 0,
               model->routing);
    b->router(s->tokens, s->experts, s->topk, model->routing, a.ids, a.topk_weight);
    b->to_bf16((size_t)s->tokens * s->hidden, u, a.x);
    b->mark(PHASE_FORWARD);
    rc = moe_forward(pass->moe, layer, micro);
    b->mark(PHASE_DENSE);
    return rc;
}

/* Residual: h after the layer. */
static int layer_forward_done(const struct pass *pass, unsigned layer, unsigned micro)
{
    const struct model *model = pass->model;
    size_t count = (size_t)model->shape.tokens * model->shape.hidden;
    int rc = moe_forward_wait(pass->moe, layer, micro);

    if (rc < 0)
        return rc;
    pass->backend->copy(h_of(model, micro, layer + 1), h_of(model, micro, layer), count * sizeof(float));
    pass->backend->add_bf16(count, moe_activations(pass->moe, layer, micro).out, h_of(model, micro, layer + 1));
    return 0;
}

/* Loss and its gradient; leaves d_h of the last layer's output. */
static void head(const struct pass *pass, unsigned micro)
{
    struct model *model = pass->model;
    const struct model_shape *s = &model->shape;
    const struct backend *b = pass->backend;
    struct model_micro *m = &model->micro[micro];
    const float *gain = model->dense.value + model->gain, *out = model->dense.value + model->out;
    float *h = h_of(model, micro, s->layers), *u = u_of(model, micro, s->layers);
    float *inverse = inverse_of(model, micro, s->layers);

    b->rmsnorm(s->tokens, s->hidden, h, gain, u, inverse);
    b->spread(s->tokens, MODEL_CLASSES, model->dense.value + model->bias, model->logits);
    b->gemm_nt(s->tokens, MODEL_CLASSES, s->hidden, u, out, 1, model->logits);
    b->cross_entropy(&m->batch, s->tokens, MODEL_CLASSES, m->place, model->logits, pass->scale, model->token_loss,
                     pass->loss);
    b->add_rows(s->tokens, MODEL_CLASSES, model->logits, model->gradients + model->bias);
    b->gemm_tn(MODEL_CLASSES, s->hidden, s->tokens, model->logits, u, 1, model->gradients + model->out);
    b->gemm_nn(s->tokens, s->hidden, MODEL_CLASSES, model->logits, out, 0, model->d_u);
    b->zero(m->d_h, (size_t)s->tokens * s->hidden * sizeof(float));
    b->rmsnorm_backward(s->tokens, s->hidden, h, gain, inverse, model->d_u, m->d_h, model->gradients + model->gain);
}

static int layer_backward(const struct pass *pass, unsigned layer, unsigned micro)
{
    const struct model *model = pass->model;
    size_t count = (size_t)model->shape.tokens * model->shape.hidden;
    int rc;

    pass->backend->to_bf16(count, model->micro[micro].d_h, moe_activations(pass->moe, layer, micro).d_out);
    pass->backend->mark(PHASE_BACKWARD);
    rc = moe_backward(pass->moe, layer, micro, micro == 0);
    pass->backend->mark(PHASE_DENSE);
    return rc;
}

/* Adds what came back through the experts and through the router to the residual's gradient. */
static int layer_backward_done(const struct pass *pass, unsigned layer, unsigned micro)
{
    struct model *model = pass->model;
    const struct model_shape *s = &model->shape;
    struct moe_activations a = moe_activations(pass->moe, layer, micro);
    const struct backend *b = pass->backend;
    size_t router = model->layers[layer].router, gain = model->layers[layer].gain;
    const float *u = u_of(model, micro, layer);
    int rc = moe_backward_wait(pass->moe, layer, micro);

    if (rc < 0)
        return rc;
    b->router_backward(s->tokens, s->experts, s->topk, a.ids, a.topk_weight, a.d_topk_weight, model->routing);
    b->gemm_tn(s->experts, s->hidden, s->tokens, model->routing, u, 1, model->gradients + router);
    b->gemm_nn(s->tokens, s->hidden, s->experts, model->routing, model->dense.value + router, 0, model->d_u);
    b->add_bf16((size_t)s->tokens * s->hidden, a.d_x, model->d_u);
    b->rmsnorm_backward(s->tokens, s->hidden, h_of(model, micro, layer), model->dense.value + gain,
                        inverse_of(model, micro, layer), model->d_u, model->micro[micro].d_h, model->gradients + gain);
    return 0;
}

static int forward(const struct pass *pass)
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

static int backward(const struct pass *pass)
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
            pass->backend->copy(model->gradients + span->at, moe_gradients(pass->moe, span->layer, span->weight),
                                span->count * sizeof(float));
    }
}

int model_step(struct model *model, struct moe *moe, const struct batch *batch, float scale)
{
    struct pass pass = { .model = model,
                         .backend = model->backend,
                         .moe = moe,
                         .scale = scale,
                         .loss = model->losses + batch->step % MODEL_LOSSES };
    unsigned sequences = model->shape.tokens / batch->seq;
    int rc;

    model->backend->mark(PHASE_DENSE);
    model->backend->zero(model->gradients, model->dense_count * sizeof(float));
    model->backend->zero(pass.loss, sizeof(*pass.loss));
    for (unsigned m = 0; m < model->shape.micro_batches; m++) {
        model->micro[m].batch = *batch;
        model->micro[m].batch.first += (uint64_t)m * sequences;
    }
    rc = forward(&pass);
    if (rc == 0)
        rc = backward(&pass);
    if (rc == 0)
        take_shared_gradients(&pass);
    return rc;
}

int model_losses(struct model *model, uint64_t first, unsigned count, double *ret)
{
    double losses[MODEL_LOSSES];
    int rc = model->backend->get(losses, model->losses, sizeof(losses));

    for (unsigned i = 0; i < count && rc == 0; i++)
        ret[i] = losses[(first + i) % MODEL_LOSSES];
    return rc;
}
