/* SPDX-License-Identifier: Apache-2.0 */
#include "workload.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static uint64_t mix(uint64_t z)
{
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t draw(const struct workload *problem, unsigned stream, uint64_t index)
{
    return mix(mix(problem->seed * 0x9e3779b97f4a7c15u + stream) + index * 0x9e3779b97f4a7c15u);
}

static float uniform(uint64_t bits)
{
    return (float)(bits >> 40) * 0x1p-24f;
}

float workload_value(const struct workload *problem, enum workload_stream stream, uint64_t index)
{
    /* sum of four uniforms: bounded, smooth, variance 1 after scaling */
    uint64_t bits = draw(problem, stream, index);
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)((bits >> (16 * i)) & 0xffff) * 0x1p-16f;
    return (sum - 2.0f) * 1.7320508f;
}

uint16_t workload_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x40);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float workload_float(uint16_t bf16)
{
    uint32_t bits = (uint32_t)bf16 << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint32_t draw_expert(const struct workload *p, uint64_t bits)
{
    uint32_t local = p->experts / p->ep;
    float u = uniform(bits);
    switch (p->routing) {
    case WORKLOAD_ZIPF: /* P(e) ~ 1 / (e + 1), by inverse of the continuous law */
        return (uint32_t)fminf(powf((float)p->experts + 1.0f, u) - 1.0f, (float)(p->experts - 1));
    case WORKLOAD_HOT_RANK: /* half of all rows go to rank 0 */
        if (bits & 1)
            return (uint32_t)(u * (float)local) % local;
        break;
    case WORKLOAD_HOT_EXPERT:
        if (bits & 1)
            return 0;
        break;
    case WORKLOAD_UNIFORM:
        break;
    }
    return (uint32_t)(u * (float)p->experts) % p->experts;
}

void workload_ids(const struct workload *p, uint64_t token, int32_t *ret_ids)
{
    for (uint32_t k = 0; k < p->topk; k++) {
        uint64_t slot = token * p->topk + k;
        uint32_t e = draw_expert(p, draw(p, STREAM_IDS, slot));
        for (uint32_t tries = 0, j = 0; j < k && tries < p->experts; j++)
            if (ret_ids[j] == (int32_t)e) { /* distinct as long as there are enough experts */
                e = (e + 1) % p->experts;
                tries++;
                j = UINT32_MAX;
            }
        ret_ids[k] = (int32_t)e;
    }
    for (uint32_t k = 0; k < p->topk; k++)
        if (uniform(draw(p, STREAM_MASK, token * p->topk + k)) < p->masked)
            ret_ids[k] = -1;
}

static void copy_here(void *to, const void *from, uint64_t bytes)
{
    memcpy(to, from, bytes);
}

void (*workload_copy)(void *to, const void *from, uint64_t bytes) = copy_here;

/* A period that no row or tile has. */
enum { REPEATED_VALUES = (2 << 20) - 17 };

static void *stage(uint64_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory)
        abort();
    return memory;
}

static void put(mok_buffer *buffer, void *staged, uint64_t bytes)
{
    workload_copy(mok_buffer_data(buffer), staged, bytes);
    free(staged);
}

static uint16_t *stage_bf16(const struct workload_rank *r, enum workload_stream stream, uint64_t first, uint64_t count,
                            float scale)
{
    uint64_t drawn = r->problem->repeated && count > REPEATED_VALUES ? REPEATED_VALUES : count;
    uint16_t *data = stage(count * 2);
    for (uint64_t i = 0; i < drawn; i++)
        data[i] = workload_bf16(workload_value(r->problem, stream, first + i) * scale);
    for (uint64_t i = drawn; i < count; i += drawn)
        memcpy(data + i, data, (count - i < drawn ? count - i : drawn) * 2);
    return data;
}

static void fill_bf16(const struct workload_rank *r, mok_buffer *buffer, enum workload_stream stream, uint64_t first,
                      uint64_t count, float scale)
{
    put(buffer, stage_bf16(r, stream, first, count, scale), count * 2);
}

static bool is_mx(const struct workload *p)
{
    return p->precision > MOK_BF16;
}

static void fill_transposed(mok_buffer *buffer, mok_mxfp8_options o, const uint16_t *values, uint64_t count)
{
    uint8_t *code = stage(count), *code_scale = stage(mok_mxfp8_scale_bytes(o.matrices * o.columns, o.rows));
    o.flags |= MOK_QUANTIZE_TRANSPOSE;
    if (mok_mxfp8_quantize(&o, values, code, code_scale) < 0)
        abort();
    free(code_scale);
    put(buffer, code, count);
}

/* Rows of experts' weights, as the layer's precision wants them. */
static void fill_weight(const struct workload_rank *r, mok_buffer *buffer, mok_buffer *scales, mok_buffer *transposed,
                        enum workload_stream stream, uint64_t rows, uint64_t columns, float scale)
{
    const struct workload *p = r->problem;
    uint64_t local = p->experts / p->ep, count = rows * columns, scale_bytes = mok_mxfp8_scale_bytes(rows, columns);
    if (!is_mx(p)) {
        fill_bf16(r, buffer, stream, r->rank * count, count, scale);
        return;
    }
    mok_mxfp8_options o = { .size = sizeof(o),
                            .matrices = local,
                            .rows = rows / local,
                            .columns = columns,
                            .dtype = MOK_DTYPE_BF16,
                            .precision = p->precision,
                            .flags = p->tiles ? MOK_QUANTIZE_TILES : 0 };
    uint16_t *values = stage_bf16(r, stream, r->rank * count, count, scale);
    uint8_t *code = stage(count), *code_scale = stage(scale_bytes);
    if (mok_mxfp8_quantize(&o, values, code, code_scale) < 0)
        abort();
    put(buffer, code, count);
    put(scales, code_scale, scale_bytes);
    if (transposed)
        fill_transposed(transposed, o, values, count);
    free(values);
}

static void fill_routing(struct workload_rank *r)
{
    const struct workload *p = r->problem;
    uint64_t slots = (uint64_t)r->tokens * p->topk;
    int32_t *ids = stage(slots * sizeof(*ids));
    float *weight = stage(slots * sizeof(*weight));
    for (uint32_t t = 0; t < r->tokens; t++) {
        workload_ids(p, r->first_token + t, ids + (uint64_t)t * p->topk);
        for (uint32_t k = 0; k < p->topk; k++)
            weight[(uint64_t)t * p->topk + k] =
                workload_value(p, STREAM_WEIGHT, (r->first_token + t) * p->topk + k) * 0.5f;
    }
    put(r->ids, ids, slots * sizeof(*ids));
    put(r->weight, weight, slots * sizeof(*weight));
}

void workload_fill(struct workload_rank *r)
{
    const struct workload *p = r->problem;
    uint64_t h = p->hidden, n = p->intermediate, local = p->experts / p->ep, is = p->shared_intermediate;
    float sh = 1.0f / sqrtf((float)h), si = 1.0f / sqrtf((float)n);
    fill_bf16(r, r->x, STREAM_X, r->first_token * h, r->tokens * h, 1.0f);
    if (!p->forward_only)
        fill_bf16(r, r->d_out, STREAM_D_OUT, r->first_token * h, r->tokens * h, 1.0f);
    fill_weight(r, r->gate, r->gate_scale, r->gate_transposed, STREAM_GATE, local * n, h, sh);
    fill_weight(r, r->up, r->up_scale, r->up_transposed, STREAM_UP, local * n, h, sh);
    fill_weight(r, r->down, r->down_scale, r->down_transposed, STREAM_DOWN, local * h, n, si);
    if (is) {
        fill_bf16(r, r->s_gate, STREAM_S_GATE, 0, is * h, sh);
        fill_bf16(r, r->s_up, STREAM_S_UP, 0, is * h, sh);
        fill_bf16(r, r->s_down, STREAM_S_DOWN, 0, is * h, 1.0f / sqrtf((float)is));
    }
    fill_routing(r);
}

/* ---------------------------------------------------------------- buffers */

static int private_buffer(struct workload_rank *r, uint32_t device, uint64_t bytes, mok_buffer **ret)
{
    return mok_buffer_alloc_private(r->session, device, bytes ? bytes : 16, ret);
}

static int allocate(struct workload_rank *r, uint32_t device, const mok_layer_memory *memory)
{
    const struct workload *p = r->problem;
    uint64_t h = p->hidden, local = p->experts / p->ep, t = p->max_tokens, k = p->topk, is = p->shared_intermediate;
    uint64_t expert = local * p->intermediate * h, weight = is_mx(p) ? expert : expert * 2,
             grad = p->bf16_gradients ? 2 : 4;
    uint64_t context = p->context_mode == MOK_CONTEXT_RECOMPUTE ? memory->context_recompute_bytes
                                                                 : memory->context_full_bytes;
    bool both = !p->forward_only;
    struct {
        mok_buffer **buffer;
        uint64_t bytes;
        bool backward; /* only then */
    } wanted[] = {
        { &r->ids, t * k * 4, false },       { &r->weight, t * k * 4, false },
        { &r->out, t * h * 2, false },       { &r->d_x, t * h * 2, true },
        { &r->d_weight, t * k * 4, true },   { &r->context, context, false },
        { &r->gate, weight, false },         { &r->up, weight, false },
        { &r->down, weight, false },         { &r->d_gate, expert * grad, true },
        { &r->d_up, expert * grad, true },   { &r->d_down, expert * grad, true },
        { &r->s_gate, is * h * 2, false },   { &r->s_up, is * h * 2, false },
        { &r->s_down, is * h * 2, false },   { &r->d_s_gate, is * h * grad, true },
        { &r->d_s_up, is * h * grad, true }, { &r->d_s_down, is * h * grad, true },
    };
    int code = mok_buffer_alloc_symmetric(r->group, t * h * 2, 0, &r->x);
    if (code == 0 && both)
        code = mok_buffer_alloc_symmetric(r->group, t * h * 2, 0, &r->d_out);
    size_t count = is ? sizeof(wanted) / sizeof(wanted[0]) : 12;
    for (size_t i = 0; i < count && code == 0; i++)
        if (both || !wanted[i].backward)
            code = private_buffer(r, device, wanted[i].bytes, wanted[i].buffer);
    uint64_t in = mok_mxfp8_scale_bytes(local * p->intermediate, h),
             out = mok_mxfp8_scale_bytes(local * h, p->intermediate);
    if (code == 0 && is_mx(p))
        code = private_buffer(r, device, in, &r->gate_scale);
    if (code == 0 && is_mx(p))
        code = private_buffer(r, device, in, &r->up_scale);
    if (code == 0 && is_mx(p))
        code = private_buffer(r, device, out, &r->down_scale);
    mok_buffer **transposed[] = { &r->gate_transposed, &r->up_transposed, &r->down_transposed };
    for (size_t i = 0; i < 3 && code == 0 && p->transposed; i++)
        code = private_buffer(r, device, expert, transposed[i]);
    return code;
}

static mok_view whole(mok_buffer *buffer)
{
    return (mok_view){ .buffer = buffer };
}

static int bind(struct workload_rank *r)
{
    mok_layer_params params = {
        .size = sizeof(params), .gate = whole(r->gate), .up = whole(r->up), .down = whole(r->down),
        .d_gate = whole(r->d_gate), .d_up = whole(r->d_up), .d_down = whole(r->d_down),
        .shared_gate = whole(r->s_gate), .shared_up = whole(r->s_up), .shared_down = whole(r->s_down),
        .gate_scale = whole(r->gate_scale), .up_scale = whole(r->up_scale), .down_scale = whole(r->down_scale),
        .gate_transposed = whole(r->gate_transposed), .up_transposed = whole(r->up_transposed),
        .down_transposed = whole(r->down_transposed),
        .d_shared_gate = whole(r->d_s_gate), .d_shared_up = whole(r->d_s_up), .d_shared_down = whole(r->d_s_down),
    };
    return mok_layer_bind(r->layer, &params);
}

int workload_open(struct workload_rank *r, const struct workload *p, uint32_t index, uint32_t tokens,
                  uint64_t first_token, const char *socket, const char *group, uint32_t device)
{
    *r = (struct workload_rank){ .problem = p, .rank = index, .tokens = tokens, .first_token = first_token };
    mok_session_options so = { .size = sizeof(so), .socket_path = socket, .job = group,
                               .queue_entries = p->queue_entries, .weight = p->session_weight };
    mok_group_options go = { .size = sizeof(go), .name = group, .ranks = p->ep, .rank = index, .device = device,
                             .timeout_ms = 30000 };
    mok_layer_options lo = { .size = sizeof(lo),
                             .hidden = p->hidden,
                             .intermediate = p->intermediate,
                             .experts = p->experts,
                             .topk = p->topk,
                             .max_tokens = p->max_tokens,
                             .precision = p->precision ? p->precision : MOK_BF16,
                             .shared_intermediate = p->shared_intermediate,
                             .clamp = p->clamp,
                             .ring_bytes = p->ring_bytes,
                             .minibatch_rows = p->minibatch_rows,
                             .comm_units = p->comm_units,
                             .gradient_dtype = p->bf16_gradients ? MOK_DTYPE_BF16 : MOK_DTYPE_F32,
                             .wgrad_precision = p->mxfp8_wgrad ? MOK_WGRAD_MXFP8 : MOK_WGRAD_BF16,
                             .transposed_weights = p->transposed };
    mok_layer_memory memory;
    int code = mok_session_open(&so, &r->session);
    if (code == 0)
        code = mok_group_join(r->session, &go, &r->group);
    if (code == 0)
        code = mok_layer_memory_query(r->group, &lo, &memory);
    if (code == 0)
        code = mok_layer_create(r->group, &lo, 30000, &r->layer);
    if (code == 0)
        code = allocate(r, device, &memory);
    if (code == 0)
        code = bind(r);
    if (code < 0) {
        workload_close(r);
        return code;
    }
    workload_fill(r);
    return 0;
}

void workload_close(struct workload_rank *r)
{
    mok_session_close(r->session); /* mokd frees everything else with it */
    r->session = NULL;
}

void workload_poison(struct workload_rank *r)
{
    mok_buffer *all[] = { r->out, r->d_x, r->d_weight, r->context };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        uint64_t bytes = all[i] ? mok_buffer_size(all[i]) : 0;
        if (bytes)
            put(all[i], memset(stage(bytes), 0xff, bytes), bytes);
    }
}

/* ---------------------------------------------------------------- operations */

int workload_forward(struct workload_rank *r, mok_ticket *ret_ticket)
{
    mok_forward_args args = {
        .size = sizeof(args), .tokens = r->tokens, .context_mode = r->problem->context_mode,
        .timeout_ns = r->problem->timeout_ns, .x = whole(r->x),
        .ids = whole(r->ids), .topk_weight = whole(r->weight), .out = whole(r->out),
    };
    if (args.context_mode != MOK_CONTEXT_NONE)
        args.context = whole(r->context);
    return mok_layer_forward(r->layer, &args, ret_ticket);
}

int workload_backward(struct workload_rank *r, uint32_t flags, mok_ticket *ret_ticket)
{
    mok_backward_args args = {
        .size = sizeof(args), .tokens = r->tokens, .context_mode = r->problem->context_mode,
        .timeout_ns = r->problem->timeout_ns, .flags = flags, .x = whole(r->x), .context = whole(r->context),
        .d_out = whole(r->d_out), .d_x = whole(r->d_x), .d_topk_weight = whole(r->d_weight),
    };
    return mok_layer_backward(r->layer, &args, ret_ticket);
}

int workload_step(struct workload_rank *r, mok_result *ret_forward, mok_result *ret_backward)
{
    mok_ticket forward, backward = 0;
    mok_result result[2] = { 0 };
    int code = workload_forward(r, &forward);
    if (code < 0)
        return code;
    if (!r->problem->forward_only)
        code = workload_backward(r, MOK_BACKWARD_OVERWRITE_WGRAD, &backward);
    if (code < 0)
        return code;
    code = mok_wait(r->session, forward, -1, &result[0]);
    if (code == 0 && !r->problem->forward_only)
        code = mok_wait(r->session, backward, -1, &result[1]);
    if (ret_forward)
        *ret_forward = result[0];
    if (ret_backward)
        *ret_backward = result[1];
    return code < 0 ? code : result[0].code < 0 ? result[0].code : result[1].code;
}

static uint64_t hash_buffer(uint64_t hash, mok_buffer *buffer, uint64_t bytes)
{
    uint8_t *p = stage(bytes);
    workload_copy(p, mok_buffer_data(buffer), bytes);
    for (uint64_t i = 0; i < bytes; i++)
        hash = (hash ^ p[i]) * 0x100000001b3u;
    free(p);
    return hash;
}

uint64_t workload_hash(const struct workload_rank *r)
{
    const struct workload *p = r->problem;
    mok_buffer *gradients[] = { r->d_gate, r->d_up, r->d_down };
    uint64_t hash = hash_buffer(0xcbf29ce484222325u, r->out, (uint64_t)r->tokens * p->hidden * 2);
    if (p->forward_only)
        return hash;
    hash = hash_buffer(hash, r->d_x, (uint64_t)r->tokens * p->hidden * 2);
    hash = hash_buffer(hash, r->d_weight, (uint64_t)r->tokens * p->topk * 4);
    for (int i = 0; i < 3; i++)
        hash = hash_buffer(hash, gradients[i], mok_buffer_size(gradients[i]));
    return hash;
}
