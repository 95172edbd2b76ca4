/* SPDX-License-Identifier: Apache-2.0 */
/* The whole stack against the FP64 oracle: what comes out of libmok is what the formulas say, at EP 1, 2 and 4. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "oracle.h"
#include "stack.h"
#include "workload.h"

/* Roundings of a, b, h, y and the output to BF16 (2^-9 each) leave no more than this, as a share of the norm. */
static const double tolerance = 8e-3;

struct rank_thread {
    pthread_t thread;
    const struct stack *stack;
    const struct problem *problem;
    struct workload workload;
    struct result *result;
    uint32_t rank, first, tokens;
    int code;
};

static void put(mok_buffer *buffer, const void *from, size_t bytes)
{
    memcpy(mok_buffer_data(buffer), from, bytes);
}

static void put_inputs(struct workload_rank *r, const struct rank_thread *t)
{
    const struct problem *p = t->problem;
    size_t expert = problem_expert_elements(p), local = p->experts / t->workload.ep, e0 = t->rank * local;
    put(r->x, p->x + (size_t)t->first * p->hidden, (size_t)t->tokens * p->hidden * 2);
    put(r->d_out, p->d_out + (size_t)t->first * p->hidden, (size_t)t->tokens * p->hidden * 2);
    put(r->ids, p->ids + (size_t)t->first * p->topk, (size_t)t->tokens * p->topk * 4);
    put(r->weight, p->topk_weight + (size_t)t->first * p->topk, (size_t)t->tokens * p->topk * 4);
    put(r->gate, p->gate + e0 * expert, local * expert * 2);
    put(r->up, p->up + e0 * expert, local * expert * 2);
    put(r->down, p->down + e0 * expert, local * expert * 2);
}

static void widen_bf16(double *to, mok_buffer *buffer, size_t count)
{
    const uint16_t *from = mok_buffer_data(buffer);
    for (size_t i = 0; i < count; i++)
        to[i] = (double)workload_float(from[i]);
}

static void widen_f32(double *to, mok_buffer *buffer, size_t count)
{
    const float *from = mok_buffer_data(buffer);
    for (size_t i = 0; i < count; i++)
        to[i] = (double)from[i];
}

static void widen_gradient(double *to, mok_buffer *buffer, size_t count, bool bf16)
{
    (bf16 ? widen_bf16 : widen_f32)(to, buffer, count);
}

static void get_outputs(const struct workload_rank *r, const struct rank_thread *t)
{
    const struct problem *p = t->problem;
    size_t expert = problem_expert_elements(p), local = p->experts / t->workload.ep, at = t->rank * local * expert;
    size_t row = (size_t)t->first * p->hidden, slot = (size_t)t->first * p->topk;
    double **a = t->result->array;
    widen_bf16(a[RESULT_OUT] + row, r->out, (size_t)t->tokens * p->hidden);
    widen_bf16(a[RESULT_D_X] + row, r->d_x, (size_t)t->tokens * p->hidden);
    widen_f32(a[RESULT_D_TOPK_WEIGHT] + slot, r->d_weight, (size_t)t->tokens * p->topk);
    widen_gradient(a[RESULT_D_GATE] + at, r->d_gate, local * expert, t->workload.bf16_gradients);
    widen_gradient(a[RESULT_D_UP] + at, r->d_up, local * expert, t->workload.bf16_gradients);
    widen_gradient(a[RESULT_D_DOWN] + at, r->d_down, local * expert, t->workload.bf16_gradients);
}

static void *run_rank(void *argument)
{
    struct rank_thread *t = argument;
    struct workload_rank rank;
    t->code = workload_open(&rank, &t->workload, t->rank, t->tokens, t->first, t->stack->socket, "oracle", t->rank);
    if (t->code == 0) {
        put_inputs(&rank, t);
        workload_poison(&rank);
        t->code = workload_step(&rank, NULL, NULL);
    }
    if (t->code == 0)
        get_outputs(&rank, t);
    else
        fprintf(stderr, "rank %u: %s\n", t->rank, mok_last_error());
    workload_close(&rank);
    return NULL;
}

static void run_stack(const struct stack *stack, const struct problem *p, const uint32_t *tokens, uint32_t ep,
                      uint32_t mode, bool bf16_gradients, struct result *result)
{
    struct rank_thread t[8];
    uint32_t most = 1, first = 0;
    for (uint32_t r = 0; r < ep; r++)
        most = tokens[r] > most ? tokens[r] : most;
    for (uint32_t r = 0; r < ep; r++) {
        t[r] = (struct rank_thread){ .stack = stack, .problem = p, .result = result, .rank = r, .first = first,
                                     .tokens = tokens[r] };
        t[r].workload = (struct workload){ .hidden = p->hidden,
                                           .intermediate = p->intermediate,
                                           .experts = p->experts,
                                           .topk = p->topk,
                                           .ep = ep,
                                           .max_tokens = most,
                                           .context_mode = mode,
                                           .seed = 1,
                                           .bf16_gradients = bf16_gradients };
        first += tokens[r];
        pthread_create(&t[r].thread, NULL, run_rank, &t[r]);
    }
    for (uint32_t r = 0; r < ep; r++) {
        pthread_join(t[r].thread, NULL);
        assert_int_equal(t[r].code, 0);
    }
}

static void assert_close(const struct result *got, const struct result *want, uint32_t ep)
{
    for (int a = 0; a < RESULT_D_SHARED_GATE; a++) {
        double error = result_error(got, want, (enum result_array)a);
        if (!(error <= tolerance))
            fail_msg("EP %u, %s: relative error %g, at most %g", ep, result_name[a], error, tolerance);
    }
}

static void assert_same_bits(const struct result *got, const struct result *first, uint32_t ep)
{
    for (int a = 0; a < RESULT_D_SHARED_GATE; a++)
        if (memcmp(got->array[a], first->array[a], got->count[a] * sizeof(double)) != 0)
            fail_msg("%s at EP %u differs from EP 1", result_name[a], ep);
}

static void bf16_gradients_are_the_same_rounded(const struct stack *stack, const struct problem *p,
                                                const struct result *f32)
{
    uint32_t tokens[2] = { p->tokens / 2, p->tokens - p->tokens / 2 };
    struct result got;

    result_alloc(p, &got);
    run_stack(stack, p, tokens, 2, MOK_CONTEXT_FULL, true, &got);
    for (int a = RESULT_D_GATE; a < RESULT_D_SHARED_GATE; a++)
        for (size_t i = 0; i < got.count[a]; i++)
            if (got.array[a][i] != (double)workload_float(workload_bf16((float)f32->array[a][i])))
                fail_msg("%s[%zu] in BF16 is %a, in FP32 %a", result_name[a], i, got.array[a][i], f32->array[a][i]);
    result_free(&got);
}

static void every_output_is_what_the_formulas_say_at_every_ep(void **state)
{
    (void)state;
    static const struct problem_options options[] = {
        { .hidden = 48, .intermediate = 80, .experts = 8, .topk = 2, .tokens = 61, .seed = 1 },
        { .hidden = 112,
          .intermediate = 32,
          .experts = 4,
          .topk = 3,
          .tokens = 40,
          .routing = ROUTE_DUPLICATES,
          .masked = 0.3,
          .weighting = WEIGHT_ZERO_NEGATIVE,
          .seed = 2 },
        { .hidden = 16,
          .intermediate = 16,
          .experts = 12,
          .topk = 1,
          .tokens = 9,
          .routing = ROUTE_HOT_EXPERT,
          .seed = 3 },
    };
    struct stack stack;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 4 }), 0);
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++) {
        struct problem problem;
        struct result want, first = { 0 };
        problem_make(&problem, &options[i]);
        oracle_run(&problem, &want);
        for (uint32_t ep = 1; ep <= 4; ep *= 2) {
            struct result got;
            struct rng rng = { options[i].seed };
            uint32_t tokens[4];
            problem_cut(problem.tokens, ep, &rng, tokens);
            result_alloc(&problem, &got);
            run_stack(&stack, &problem, tokens, ep, ep == 2 ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL, false, &got);
            assert_close(&got, &want, ep);
            if (ep == 1) {
                first = got;
            } else { /* the split changes no bit */
                assert_same_bits(&got, &first, ep);
                result_free(&got);
            }
        }
        bf16_gradients_are_the_same_rounded(&stack, &problem, &first);
        result_free(&first);
        result_free(&want);
        problem_free(&problem);
    }
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_output_is_what_the_formulas_say_at_every_ep),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
