/* SPDX-License-Identifier: Apache-2.0 */
/* See device.h. */
#include "device.h"
#include "mx/mx.h"
#include "plain_bf16.h"
#include "plan_backend.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

static const struct mok_engine_ops *ops(void)
{
    const struct mok_engine_ops *found = mok_engine_find(MOK_DEVICE_CUDA);

    assert_non_null(found);
    return found;
}

void device_repeat_forward(struct device_group *group, const uint16_t *want, int times)
{
    for (int i = 0; i < times; i++) {
        device_forward(group);
        uint16_t *got = device_out(group);
        if (memcmp(got, want, problem_rows_elements(&group->shape) * sizeof(*got)) != 0)
            fail_msg("forward %d: other bits", i);
        free(got);
    }
}

void device_repeat_backward(struct device_group *group, bool all, const uint8_t *want, int times)
{
    size_t size;

    for (int i = 0; i < times; i++) {
        if (all)
            device_forward(group);
        device_backward(group, 0.0f);
        uint8_t *got = device_gradient_bytes(group, &size);
        if (memcmp(got, want, size) != 0)
            fail_msg("backward %d: other bits", i);
        free(got);
    }
}

void device_or_skip(void)
{
    struct mok_engine_config config = { 0 };
    struct mok_device_limits limits;
    struct mok_message message = { { 0 } };

    if (ops()->probe(&config, &limits, &message) == 0)
        return;
    printf("skipped: %s\n", message.text);
    exit(77);
}

static struct device_memory take(struct mok_engine *engine, const void *from, uint64_t bytes)
{
    struct device_memory memory = { NULL, bytes };
    struct mok_message message = { { 0 } };
    int fd = -1;

    if (bytes == 0)
        return memory;
    if (ops()->memory_alloc(engine, bytes, &fd, NULL, &message) < 0 ||
        ops()->memory_map(engine, fd, bytes, &memory.at, &message) < 0)
        fail_msg("%llu bytes of device memory: %s", (unsigned long long)bytes, message.text);
    close(fd);
    if (from)
        assert_int_equal(cudaMemcpy(memory.at, from, bytes, cudaMemcpyHostToDevice), 0);
    return memory;
}

static void give(struct mok_engine *engine, struct device_memory *memory)
{
    if (memory->at)
        ops()->memory_unmap(engine, memory->at, memory->bytes);
    memory->at = NULL;
}

static void open_plan(struct device_group *g, const struct problem *p, const struct device_options *options, uint32_t r,
                      const struct mok_device_limits *limits, uint32_t max_tokens)
{
    struct mok_message message = { { 0 } };
    struct mok_layer_spec spec = {
        .hidden = p->hidden,
        .intermediate = p->intermediate,
        .experts = p->experts,
        .topk = p->topk,
        .ep = options->ranks,
        .rank = r,
        .max_tokens = max_tokens,
        .precision = options->precision ? options->precision : MOK_BF16,
        .shared_intermediate = p->shared_intermediate,
        .clamp = p->clamp,
        .minibatch_rows = options->minibatch_rows,
        .comm_units = options->comm_units,
        .gradient_dtype = options->bf16_gradients ? MOK_DTYPE_BF16 : 0,
        .wgrad_precision = options->mxfp8_wgrad ? MOK_WGRAD_MXFP8 : 0,
        .transposed_weights = options->transposed,
    };
    spec.ring_bytes = options->ring_rows * mok_cuda_plan_backend.ring_row_bytes(&(struct mok_plan){ .spec = spec });

    if (mok_plan_make(&spec, limits, &g->plan[r], NULL, 0, &message) < 0)
        fail_msg("plan of rank %u: %s", r, message.text);
}

/* The codes of matrices [rows][columns], transposed. */
static struct device_memory take_transposed(struct mok_engine *engine, const uint8_t *code, uint64_t matrices, uint64_t rows,
                                            uint64_t columns)
{
    uint64_t size = rows * columns;
    uint8_t *turned = malloc(matrices * size);
    struct device_memory memory;

    assert_non_null(turned);
    for (uint64_t i = 0; i < matrices * size; i++)
        turned[i / size * size + i % columns * rows + i % size / columns] = code[i];
    memory = take(engine, turned, matrices * size);
    free(turned);
    return memory;
}

/* Experts' weights as MX tensors. */
static void open_quantised(struct device_group *g, const struct device_options *options, const uint16_t *from,
                           uint64_t matrices, uint64_t rows, uint64_t columns, uint32_t r, unsigned i)
{
    const uint32_t group = options->tiles || g->plan[r].spec.precision == MOK_MXFP8_PER128 ? 128 : 32, tile_rows = options->tiles ? 128 : 1;
    uint64_t scales = mok_mx_scales(columns);
    uint8_t *code = malloc(matrices * rows * columns), *scale = malloc(matrices * rows * scales);

    assert_non_null(code);
    assert_non_null(scale);
    for (uint64_t m = 0; m < matrices; m++)
        assert_int_equal(mok_mx_quantize(from + m * rows * columns, rows, columns, group, tile_rows,
                                         code + m * rows * columns, scale + m * rows * scales),
                         0);
    g->params[r][i] = take(g->engine[r], code, matrices * rows * columns);
    g->scales[r][i] = take(g->engine[r], scale, matrices * rows * scales);
    if (options->transposed)
        g->transposed[r][i] = take_transposed(g->engine[r], code, matrices, rows, columns);
    free(code);
    free(scale);
}

static void open_params(struct device_group *g, const struct problem *p, const struct device_options *options, uint32_t r)
{
    uint64_t experts = problem_expert_elements(p) * (p->experts / g->ranks), skip = experts * r;
    uint64_t shared = (uint64_t)p->shared_intermediate * p->hidden * 2;
    struct device_memory *m = g->params[r];

    if (options->precision) {
        uint64_t matrices = p->experts / g->ranks;

        open_quantised(g, options, p->gate + skip, matrices, p->intermediate, p->hidden, r, 0);
        open_quantised(g, options, p->up + skip, matrices, p->intermediate, p->hidden, r, 1);
        open_quantised(g, options, p->down + skip, matrices, p->hidden, p->intermediate, r, 2);
    } else {
        m[0] = take(g->engine[r], p->gate + skip, experts * 2);
        m[1] = take(g->engine[r], p->up + skip, experts * 2);
        m[2] = take(g->engine[r], p->down + skip, experts * 2);
    }
    m[3] = take(g->engine[r], p->shared_gate, shared);
    m[4] = take(g->engine[r], p->shared_up, shared);
    m[5] = take(g->engine[r], p->shared_down, shared);
}

static void open_tensors(struct device_group *g, const struct problem *p, uint32_t r, uint64_t first)
{
    uint64_t rows = (uint64_t)g->tokens[r] * p->hidden * 2, slots = (uint64_t)g->tokens[r] * p->topk * 4;

    g->x[r] = take(g->engine[r], p->x + first * p->hidden, rows);
    g->ids[r] = take(g->engine[r], p->ids + first * p->topk, slots);
    g->weight[r] = take(g->engine[r], p->topk_weight + first * p->topk, slots);
    g->out[r] = take(g->engine[r], NULL, rows);
    if (rows)
        assert_int_equal(cudaMemset(g->out[r].at, 0xff, rows), 0);
    g->peer[r] = (struct mok_peer){ .x = g->x[r].at, .tokens = g->tokens[r] };
    g->args[r] = (struct mok_op_args){
        .kind = MOK_KIND_FORWARD,
        .tokens = g->tokens[r],
        .ids = g->ids[r].at,
        .topk_weight = g->weight[r].at,
        .out = g->out[r].at,
        .peer = g->peer,
        .params = { .gate = g->params[r][0].at,
                    .up = g->params[r][1].at,
                    .down = g->params[r][2].at,
                    .gate_scale = g->scales[r][0].at,
                    .up_scale = g->scales[r][1].at,
                    .down_scale = g->scales[r][2].at,
                    .gate_transposed = g->transposed[r][0].at,
                    .up_transposed = g->transposed[r][1].at,
                    .down_transposed = g->transposed[r][2].at,
                    .shared_gate = g->params[r][3].at,
                    .shared_up = g->params[r][4].at,
                    .shared_down = g->params[r][5].at },
    };
}

#define CANARY 256u /* bytes before and behind an output */

/* An output with canaries around; what the operation gets is `at` behind the first. */
static void *open_output(struct device_group *g, uint32_t r, struct device_memory *ret, uint64_t bytes)
{
    if (bytes == 0)
        return NULL;
    *ret = take(g->engine[r], NULL, bytes + 2 * CANARY);
    assert_int_equal(cudaMemset(ret->at, 0xa5, bytes + 2 * CANARY), 0);
    return (uint8_t *)ret->at + CANARY;
}

static uint64_t gradient_bytes(const struct device_group *g, unsigned i)
{
    const struct problem *p = &g->shape;

    uint64_t elements =
        i < 3 ? problem_expert_elements(p) * (p->experts / g->ranks) : (uint64_t)p->shared_intermediate * p->hidden;

    return elements * (g->bf16_gradients ? 2 : 4);
}

static void open_backward(struct device_group *g, const struct problem *p, uint32_t r, uint64_t first)
{
    uint64_t rows = (uint64_t)g->tokens[r] * p->hidden * 2, slots = (uint64_t)g->tokens[r] * p->topk * 4;
    struct mok_op_args *args = &g->args[r];
    void **gradient[6] = { &args->params.d_gate,        &args->params.d_up,        &args->params.d_down,
                            &args->params.d_shared_gate, &args->params.d_shared_up, &args->params.d_shared_down };

    g->context[r] = take(g->engine[r], NULL,
                         args->context_mode == MOK_CONTEXT_FULL ? g->plan[r].context_full_bytes :
                                                                  g->plan[r].context_recompute_bytes);
    assert_int_equal(cudaMemset(g->context[r].at, 0xff, g->context[r].bytes), 0);
    args->context = g->context[r].at;
    g->d_out[r] = take(g->engine[r], p->d_out + first * p->hidden, rows);
    g->peer[r].d_out = g->d_out[r].at;
    args->d_x = open_output(g, r, &g->d_x[r], rows);
    args->d_topk_weight = open_output(g, r, &g->d_weight[r], slots);
    for (unsigned i = 0; i < 6; i++)
        *gradient[i] = open_output(g, r, &g->gradients[r][i], gradient_bytes(g, i));
}

void device_group_open(struct device_group *g, const struct problem *p, const struct device_options *options,
                       const uint32_t *tokens)
{
    struct mok_engine_config config = {
        .blocks = options->blocks, .chaos_delay_us = options->chaos_delay_us, .yield_us = options->yield_us
    };
    struct mok_message message = { { 0 } };
    struct mok_device_limits limits;
    void *symmetric[DEVICE_MAX_RANKS];
    uint32_t r, max_tokens = 1;
    uint64_t first = 0;

    memset(g, 0, sizeof(*g));
    g->ranks = options->ranks;
    g->shape = *p;
    g->bf16_gradients = options->bf16_gradients;
    memcpy(g->tokens, tokens, options->ranks * sizeof(*tokens));
    for (r = 0; r < g->ranks; r++)
        max_tokens = tokens[r] > max_tokens ? tokens[r] : max_tokens;
    for (r = 0; r < g->ranks; r++) {
        if (ops()->probe(&config, &limits, &message) < 0 || ops()->open(&config, &g->engine[r], &message) < 0)
            fail_msg("engine of rank %u: %s", r, message.text);
        open_plan(g, p, options, r, &limits, max_tokens);
        g->symmetric[r] = take(g->engine[r], NULL, g->plan[r].symmetric_bytes);
        g->private_memory[r] = take(g->engine[r], NULL, g->plan[r].private_bytes);
        symmetric[r] = g->symmetric[r].at;
        open_params(g, p, options, r);
    }
    for (r = 0; r < g->ranks; r++) {
        if (ops()->layer_open(g->engine[r], &g->plan[r], symmetric, g->private_memory[r].at, &g->layer[r], &message) <
            0)
            fail_msg("layer of rank %u: %s", r, message.text);
        open_tensors(g, p, r, first);
        g->args[r].context_mode = options->context_mode;
        g->flags = options->flags;
        if (options->context_mode)
            open_backward(g, p, r, first);
        first += tokens[r];
    }
}

void device_group_close(struct device_group *g)
{
    uint32_t r, i;

    for (r = 0; r < g->ranks; r++)
        ops()->layer_close(g->layer[r]);
    for (r = 0; r < g->ranks; r++) {
        struct device_memory *all[] = { &g->symmetric[r], &g->private_memory[r], &g->x[r],
                                        &g->ids[r],       &g->weight[r],         &g->out[r] };
        struct device_memory *backward[] = { &g->context[r], &g->d_out[r], &g->d_x[r], &g->d_weight[r] };
        for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
            give(g->engine[r], all[i]);
        for (i = 0; i < sizeof(backward) / sizeof(backward[0]); i++)
            give(g->engine[r], backward[i]);
        for (i = 0; i < 6; i++)
            give(g->engine[r], &g->gradients[r][i]);
        for (i = 0; i < 6; i++)
            give(g->engine[r], &g->params[r][i]);
        for (i = 0; i < 3; i++) {
            give(g->engine[r], &g->scales[r][i]);
            give(g->engine[r], &g->transposed[r][i]);
        }
    }
    for (r = 0; r < g->ranks; r++)
        ops()->close(g->engine[r]);
}

struct mok_op_result device_phase(struct device_group *g, uint32_t r, enum mok_phase phase)
{
    const struct timespec nap = { 0, 20000 };
    struct mok_op_result result = { 0 };
    int told;

    assert_int_equal(cudaStreamSynchronize(NULL), 0); /* a small copy may return before its end, and no engine waits for it */
    assert_int_equal(ops()->start(g->layer[r], &g->args[r], phase), 0);
    while ((told = ops()->poll(g->engine[r], &result)) == 0)
        nanosleep(&nap, NULL);
    assert_int_equal(told, 1);
    assert_int_equal(ops()->poll(g->engine[r], &result), 0); /* told once */
    if (result.expert_rows) { /* each expert's rows are all rows, and what the ring held is no less */
        uint64_t rows = 0;
        for (uint32_t e = 0; e < g->plan[r].local_experts; e++)
            rows += result.expert_rows[e];
        assert_int_equal(rows, result.rows);
        assert_in_range(result.padded_rows, rows,
                        rows + g->plan[r].tile_rows * (uint64_t)g->plan[r].local_experts);
    }
    return result;
}

void device_forward(struct device_group *g)
{
    for (int phase = MOK_PHASE_PREPARE; phase <= MOK_PHASE_REDUCE; phase++)
        for (uint32_t r = 0; r < g->ranks; r++) {
            struct mok_op_result result = device_phase(g, r, (enum mok_phase)phase);
            if (result.status < 0)
                fail_msg("rank %u, phase %d: status %d", r, phase, result.status);
        }
}

static void fill(const struct device_memory *memory, float start, bool poison, bool narrow)
{
    uint64_t bytes = memory->bytes ? memory->bytes - 2 * CANARY : 0, i;
    uint8_t *at = (uint8_t *)memory->at + CANARY;
    void *values;

    if (bytes == 0)
        return;
    if (poison) {
        assert_int_equal(cudaMemset(at, 0xff, bytes), 0);
        return;
    }
    values = malloc(bytes);
    assert_non_null(values);
    for (i = 0; i < bytes / (narrow ? 2 : 4); i++)
        if (narrow)
            ((uint16_t *)values)[i] = bf16_from_float(start);
        else
            ((float *)values)[i] = start;
    assert_int_equal(cudaMemcpy(at, values, bytes, cudaMemcpyHostToDevice), 0);
    free(values);
}

void device_backward(struct device_group *g, float start)
{
    for (uint32_t r = 0; r < g->ranks; r++) {
        fill(&g->d_x[r], 0, true, false);
        fill(&g->d_weight[r], 0, true, false);
        for (unsigned i = 0; i < 6; i++)
            fill(&g->gradients[r][i], start, (g->flags & MOK_OPF_OVERWRITE_WGRAD) != 0, g->bf16_gradients);
        g->args[r].kind = MOK_KIND_BACKWARD;
        g->args[r].flags = g->flags;
    }
    for (int phase = MOK_PHASE_PREPARE; phase <= MOK_PHASE_REDUCE; phase++)
        for (uint32_t r = 0; r < g->ranks; r++) {
            struct mok_op_result result = device_phase(g, r, (enum mok_phase)phase);
            if (result.status < 0)
                fail_msg("backward, rank %u, phase %d: status %d", r, phase, result.status);
        }
    for (uint32_t r = 0; r < g->ranks; r++) {
        g->args[r].kind = MOK_KIND_FORWARD;
        g->args[r].flags = 0;
    }
}

/* Calls `each` for every output in the problem's order, with its bytes on the host. */
static void read_outputs(const struct device_group *g, void (*each)(void *cookie, enum result_array array, uint32_t rank,
                                                                    const void *values, uint64_t bytes),
                         void *cookie)
{
    for (int a = RESULT_D_X; a < RESULT_COUNT; a++)
        for (uint32_t r = 0; r < g->ranks; r++) {
            const struct device_memory *m = a == RESULT_D_X             ? &g->d_x[r] :
                                            a == RESULT_D_TOPK_WEIGHT ? &g->d_weight[r] :
                                                                        &g->gradients[r][a - RESULT_D_GATE];
            uint64_t bytes = m->bytes ? m->bytes - 2 * CANARY : 0;
            void *values = malloc(bytes + 1);

            assert_non_null(values);
            if (bytes)
                assert_int_equal(cudaMemcpy(values, (uint8_t *)m->at + CANARY, bytes, cudaMemcpyDeviceToHost), 0);
            each(cookie, (enum result_array)a, r, values, bytes);
            free(values);
        }
}

struct widened {
    struct result *result;
    double start;
    bool narrow;
    size_t at[RESULT_COUNT];
};

static void widen(void *cookie, enum result_array array, uint32_t rank, const void *values, uint64_t bytes)
{
    struct widened *w = cookie;
    bool shared = array >= RESULT_D_SHARED_GATE;
    double *to = w->result->array[array] + (shared ? 0 : w->at[array]);

    if (array == RESULT_D_X) {
        for (uint64_t i = 0; i < bytes / 2; i++)
            to[i] = (double)bf16_to_float(((const uint16_t *)values)[i]);
        w->at[array] += bytes / 2;
        return;
    }
    bool narrow = w->narrow && array >= RESULT_D_GATE;
    for (uint64_t i = 0; i < bytes / (narrow ? 2 : 4); i++) {
        float stored = narrow ? bf16_to_float(((const uint16_t *)values)[i]) : ((const float *)values)[i];
        double value = (double)stored - (array >= RESULT_D_GATE ? w->start : 0);
        to[i] = shared && rank > 0 ? to[i] + value : value;
    }
    w->at[array] += bytes / (narrow ? 2 : 4);
}

void device_gradients(const struct device_group *g, float start, struct result *ret)
{
    struct widened w = { .result = ret, .start = (double)start, .narrow = g->bf16_gradients };

    result_alloc(&g->shape, ret);
    read_outputs(g, widen, &w);
}

struct gathered {
    uint8_t *bytes;
    size_t size;
};

static void gather(void *cookie, enum result_array array, uint32_t rank, const void *values, uint64_t bytes)
{
    struct gathered *all = cookie;

    (void)array;
    (void)rank;
    all->bytes = realloc(all->bytes, all->size + bytes + 1);
    assert_non_null(all->bytes);
    memcpy(all->bytes + all->size, values, bytes);
    all->size += bytes;
}

uint8_t *device_gradient_bytes(const struct device_group *g, size_t *ret_size)
{
    struct gathered all = { 0 };

    read_outputs(g, gather, &all);
    *ret_size = all.size;
    return all.bytes;
}

static void check_canary(const struct device_memory *m)
{
    uint8_t around[2][CANARY];

    if (!m->bytes)
        return;
    assert_int_equal(cudaMemcpy(around[0], m->at, CANARY, cudaMemcpyDeviceToHost), 0);
    assert_int_equal(cudaMemcpy(around[1], (uint8_t *)m->at + m->bytes - CANARY, CANARY, cudaMemcpyDeviceToHost), 0);
    for (unsigned i = 0; i < 2 * CANARY; i++)
        if (around[i / CANARY][i % CANARY] != 0xa5)
            fail_msg("byte %u %s an output was written", i % CANARY, i < CANARY ? "before" : "behind");
}

void device_check_canaries(const struct device_group *g)
{
    for (uint32_t r = 0; r < g->ranks; r++) {
        check_canary(&g->d_x[r]);
        check_canary(&g->d_weight[r]);
        for (unsigned i = 0; i < 6; i++)
            check_canary(&g->gradients[r][i]);
    }
}

uint16_t *device_out(const struct device_group *g)
{
    uint16_t *all = calloc((size_t)g->shape.tokens * g->shape.hidden + 1, sizeof(*all)), *at = all;

    assert_non_null(all);
    for (uint32_t r = 0; r < g->ranks; r++) {
        if (g->out[r].bytes)
            assert_int_equal(cudaMemcpy(at, g->out[r].at, g->out[r].bytes, cudaMemcpyDeviceToHost), 0);
        at += (size_t)g->tokens[r] * g->shape.hidden;
    }
    return all;
}
