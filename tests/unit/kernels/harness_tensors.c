/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The caller's side of the harness: tensors of a micro-batch, operations on them, and their results put together.
 */
#include "harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "plain_bf16.h"
#include "util.h"

static void split_evenly(uint32_t tokens, uint32_t ranks, uint32_t *ret)
{
    for (uint32_t r = 0; r < ranks; r++)
        ret[r] = tokens / ranks + (r < tokens % ranks);
}

/* `bytes` from `offset` on; in a sparse layer absent inputs are zeros. */
static struct guarded copied(const struct layer *layer, const void *from, size_t offset, size_t bytes)
{
    struct guarded memory = layer->sparse ? guarded_alloc_sparse(bytes) : guarded_alloc(bytes, GUARDED_AT_END);
    if (bytes && from)
        memcpy(memory.data, (const uint8_t *)from + offset, bytes);
    return memory;
}

static struct guarded output(const struct layer *layer, size_t bytes)
{
    return copied(layer, NULL, 0, bytes);
}

static size_t context_bytes(const struct mok_plan *plan, uint32_t mode)
{
    return mode == MOK_CONTEXT_FULL        ? plan->context_full_bytes
           : mode == MOK_CONTEXT_RECOMPUTE ? plan->context_recompute_bytes
                                           : 0;
}

static void make_rank(struct tensors *t, const struct problem *p, uint32_t r)
{
    size_t rows = (size_t)t->tokens[r] * p->hidden * sizeof(uint16_t), slots = (size_t)t->tokens[r] * p->topk;
    size_t row0 = t->first[r] * p->hidden * sizeof(uint16_t), slot0 = t->first[r] * p->topk;
    const struct layer *layer = t->layer;

    t->x[r] = copied(layer, p->x, row0, rows);
    t->d_out[r] = copied(layer, p->d_out, row0, rows);
    t->ids[r] = copied(layer, p->ids, slot0 * sizeof(int32_t), slots * sizeof(int32_t));
    t->topk_weight[r] = copied(layer, p->topk_weight, slot0 * sizeof(float), slots * sizeof(float));
    t->out[r] = output(layer, rows);
    t->d_x[r] = output(layer, rows);
    t->d_topk_weight[r] = output(layer, slots * sizeof(float));
    t->context[r] = output(layer, context_bytes(&layer->plan[r], t->context_mode));
}

struct tensors *tensors_make(struct layer *layer, const struct problem *p, const uint32_t *tokens,
                             uint32_t context_mode)
{
    struct harness *h = layer->harness;
    struct tensors *t = test_calloc(1, sizeof(*t));
    uint64_t first = 0;

    assert_true(h->sets < HARNESS_MAX_SETS);
    t->layer = layer;
    t->context_mode = context_mode;
    t->x_buffer = 2 * h->sets + 1;
    t->d_out_buffer = 2 * h->sets + 2;
    h->sets++;
    if (tokens)
        memcpy(t->tokens, tokens, layer->ranks * sizeof(*tokens));
    else
        split_evenly(p->tokens, layer->ranks, t->tokens);
    for (uint32_t r = 0; r < layer->ranks; r++) {
        t->first[r] = first;
        make_rank(t, p, r);
        first += t->tokens[r];
        h->registry[t->x_buffer][r] = t->x[r].data;
        h->registry[t->d_out_buffer][r] = t->d_out[r].data;
    }
    assert_int_equal(first, p->tokens);
    return t;
}

void tensors_free(struct tensors *t)
{
    for (uint32_t r = 0; r < HARNESS_MAX_RANKS; r++) {
        struct guarded *all[] = { &t->x[r],   &t->d_out[r], &t->ids[r],           &t->topk_weight[r],
                                  &t->out[r], &t->d_x[r],   &t->d_topk_weight[r], &t->context[r] };
        for (size_t i = 0; i < ARRAY_SIZE(all); i++)
            guarded_free(all[i]);
    }
    test_free(t);
}

void tensors_poison_outputs(struct tensors *t, bool context)
{
    for (uint32_t r = 0; r < t->layer->ranks; r++) {
        poison(t->out[r].data, t->out[r].bytes);
        poison(t->d_x[r].data, t->d_x[r].bytes);
        poison(t->d_topk_weight[r].data, t->d_topk_weight[r].bytes);
        if (context)
            poison(t->context[r].data, t->context[r].bytes);
    }
}

void tensors_check_canaries(const struct tensors *t)
{
    static const char *const name[] = { "x", "d_out", "ids", "topk_weight", "out", "d_x", "d_topk_weight", "context" };

    for (uint32_t r = 0; r < t->layer->ranks; r++) {
        const struct guarded *all[] = { &t->x[r],   &t->d_out[r], &t->ids[r],           &t->topk_weight[r],
                                        &t->out[r], &t->d_x[r],   &t->d_topk_weight[r], &t->context[r] };
        for (size_t i = 0; i < ARRAY_SIZE(all); i++)
            if (!guarded_check(all[i]))
                fail_msg("rank %u: written beyond %s", r, name[i]);
    }
}

/* ------------------------------------------------------------------ operations */

static struct mok_expert_params bind(const struct params *p)
{
    return (struct mok_expert_params){
        .gate = p->gate.data,
        .up = p->up.data,
        .down = p->down.data,
        .gate_scale = p->gate_scale.data,
        .up_scale = p->up_scale.data,
        .down_scale = p->down_scale.data,
        .shared_gate = p->shared_gate.data,
        .shared_up = p->shared_up.data,
        .shared_down = p->shared_down.data,
        .d_gate = p->d_gate.data,
        .d_up = p->d_up.data,
        .d_down = p->d_down.data,
        .d_shared_gate = p->d_shared_gate.data,
        .d_shared_up = p->d_shared_up.data,
        .d_shared_down = p->d_shared_down.data,
    };
}

static struct operation *queue(struct tensors *t, uint32_t kind, uint32_t flags)
{
    struct layer *layer = t->layer;
    struct operation *op = test_calloc(1, sizeof(*op)), **end = &layer->operations;

    op->layer = layer;
    for (uint32_t r = 0; r < layer->ranks; r++) {
        struct rank_operation *mine = &op->rank[r];
        bool forward = kind == MOK_KIND_FORWARD;
        mine->args = (struct mok_op_args){
            .kind = kind,
            .context_mode = t->context_mode,
            .flags = flags,
            .tokens = t->tokens[r],
            .context = t->context_mode ? t->context[r].data : NULL,
            .params = bind(&layer->params[r]),
        };
        mine->x_buffer = t->x_buffer;
        mine->d_out_buffer = forward ? 0 : t->d_out_buffer;
        if (forward) {
            mine->args.ids = (const int32_t *)(void *)t->ids[r].data;
            mine->args.topk_weight = (const float *)(void *)t->topk_weight[r].data;
            mine->args.out = t->out[r].data;
        } else {
            mine->args.d_x = t->d_x[r].data;
            mine->args.d_topk_weight = (float *)(void *)t->d_topk_weight[r].data;
        }
        uint32_t jitter = layer->harness->options.jitter;
        mine->late = jitter ? rng_below(&layer->harness->rng, jitter + 1) : 0;
    }
    while (*end)
        end = &(*end)->next;
    *end = op;
    return op;
}

struct operation *layer_forward(struct tensors *t, uint32_t flags)
{
    return queue(t, MOK_KIND_FORWARD, flags);
}

struct operation *layer_backward(struct tensors *t, uint32_t flags)
{
    return queue(t, MOK_KIND_BACKWARD, flags);
}

void operation_free(struct operation *op)
{
    struct operation **at = &op->layer->operations;

    while (*at && *at != op)
        at = &(*at)->next;
    if (*at)
        *at = op->next;
    test_free(op);
}

void operation_expect_success(struct operation *op)
{
    for (uint32_t r = 0; r < op->layer->ranks; r++) {
        assert_true(op->rank[r].done);
        if (op->rank[r].result.status)
            fail_msg("rank %u: status %d, argument %u, fault rank %u", r, op->rank[r].result.status,
                     op->rank[r].result.argument, op->rank[r].fault_rank);
    }
    operation_free(op);
}

void operation_expect_failure(struct operation *op, int code)
{
    for (uint32_t r = 0; r < op->layer->ranks; r++) {
        const struct rank_operation *mine = &op->rank[r], *first = &op->rank[0];
        assert_true(mine->done);
        assert_int_equal(mine->result.status, code);
        assert_int_equal(mine->fault_rank, first->fault_rank);
        assert_int_equal(mine->result.argument, first->result.argument);
        assert_int_equal(mine->result.bad_token, first->result.bad_token);
        assert_int_equal(mine->result.bad_slot, first->result.bad_slot);
        assert_int_equal(mine->result.bad_value, first->result.bad_value);
    }
    operation_free(op);
}

/* ------------------------------------------------------------------ results */

static void widen_bf16(double *to, const struct guarded *from)
{
    for (size_t i = 0; i < from->bytes / 2; i++)
        to[i] = (double)bf16_to_float(((const uint16_t *)(const void *)from->data)[i]);
}

static void widen_float(double *to, const struct guarded *from, bool add)
{
    for (size_t i = 0; i < from->bytes / 4; i++) {
        double value = (double)((const float *)(const void *)from->data)[i];
        to[i] = add ? to[i] + value : value;
    }
}

static void widen_gradient(double *to, const struct guarded *from, bool narrow, bool add)
{
    if (!narrow)
        return widen_float(to, from, add);
    for (size_t i = 0; i < from->bytes / 2; i++) {
        double value = (double)bf16_to_float(((const uint16_t *)(const void *)from->data)[i]);
        to[i] = add ? to[i] + value : value;
    }
}

void tensors_collect(const struct tensors *t, const struct problem *p, struct result *ret)
{
    size_t slice = problem_expert_elements(p) * t->layer->local_experts;

    result_alloc(p, ret);
    for (uint32_t r = 0; r < t->layer->ranks; r++) {
        const struct params *params = &t->layer->params[r];
        bool narrow = mok_spec_bf16_gradients(&t->layer->plan[r].spec);
        widen_bf16(ret->array[RESULT_OUT] + t->first[r] * p->hidden, &t->out[r]);
        widen_bf16(ret->array[RESULT_D_X] + t->first[r] * p->hidden, &t->d_x[r]);
        widen_float(ret->array[RESULT_D_TOPK_WEIGHT] + t->first[r] * p->topk, &t->d_topk_weight[r], false);
        widen_gradient(ret->array[RESULT_D_GATE] + r * slice, &params->d_gate, narrow, false);
        widen_gradient(ret->array[RESULT_D_UP] + r * slice, &params->d_up, narrow, false);
        widen_gradient(ret->array[RESULT_D_DOWN] + r * slice, &params->d_down, narrow, false);
        widen_gradient(ret->array[RESULT_D_SHARED_GATE], &params->d_shared_gate, narrow, r > 0);
        widen_gradient(ret->array[RESULT_D_SHARED_UP], &params->d_shared_up, narrow, r > 0);
        widen_gradient(ret->array[RESULT_D_SHARED_DOWN], &params->d_shared_down, narrow, r > 0);
    }
}

void run_problem(const struct problem *p, const struct run_options *options, struct result *ret)
{
    struct harness *h = harness_open(&options->harness);
    struct layer *layer = layer_open(h, p, &options->layer);
    struct tensors *t =
        tensors_make(layer, p, options->tokens, options->context_mode ? options->context_mode : MOK_CONTEXT_FULL);
    struct operation *forward = layer_forward(t, 0);
    struct operation *backward = layer_backward(t, options->overwrite ? MOK_OPF_OVERWRITE_WGRAD : 0);

    if (options->overwrite)
        layer_poison_gradients(layer);
    else
        layer_start_gradients(layer, options->start);
    harness_drive(h);
    operation_expect_success(forward);
    operation_expect_success(backward);
    tensors_check_canaries(t);
    layer_check_canaries(layer);
    tensors_collect(t, p, ret);
    tensors_free(t);
    harness_close(h);
}
