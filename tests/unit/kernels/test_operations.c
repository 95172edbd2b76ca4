/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sequences of operations on one group: sums into the callers' buffers, contexts used in any order and more than once,
 * layers side by side, memory that the caller changes at bad moments.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "check.h"
#include "harness.h"
#include "plain_bf16.h"

#define RANKS 2

static const struct problem_options base = { .hidden = 48,
                                             .intermediate = 80,
                                             .experts = 4,
                                             .topk = 3,
                                             .tokens = 29,
                                             .masked = 0.1,
                                             .shared_intermediate = 32,
                                             .seed = 100 };

struct group {
    struct problem problem;
    struct harness *harness;
    struct layer *layer;
};

static struct group group_open(const struct problem_options *options)
{
    struct group g;

    problem_make(&g.problem, options);
    g.harness = harness_open(&(struct harness_options){ .ranks = RANKS, .jitter = 5, .seed = 101 });
    g.layer = layer_open(g.harness, &g.problem, &(struct layer_options){ .ring_tiles = 2, .max_tokens = 100 });
    return g;
}

static void group_close(struct group *g)
{
    layer_check_canaries(g->layer);
    harness_close(g->harness);
    problem_free(&g->problem);
}

static void run_forward(struct tensors *t, uint32_t flags)
{
    struct operation *op = layer_forward(t, flags);
    harness_drive(t->layer->harness);
    operation_expect_success(op);
}

static void run_backward(struct tensors *t, uint32_t flags)
{
    struct operation *op = layer_backward(t, flags);
    harness_drive(t->layer->harness);
    operation_expect_success(op);
}

/* A whole step on fresh tensors, checked against the oracle. */
static void must_step_rightly(struct group *g, struct result *ret)
{
    struct tensors *t = tensors_make(g->layer, &g->problem, NULL, MOK_CONTEXT_FULL);
    struct result got;

    layer_zero_gradients(g->layer);
    run_forward(t, 0);
    run_backward(t, 0);
    tensors_collect(t, &g->problem, &got);
    check_against_oracle("a step", &g->problem, &got);
    tensors_check_canaries(t);
    tensors_free(t);
    if (ret)
        *ret = got;
    else
        result_free(&got);
}

static void every_context_mode_gives_the_same_out(void **state)
{
    struct group g = group_open(&base);
    struct result want;

    (void)state;
    must_step_rightly(&g, &want);
    for (uint32_t mode = MOK_CONTEXT_NONE; mode <= MOK_CONTEXT_RECOMPUTE; mode++) {
        struct tensors *t = tensors_make(g.layer, &g.problem, NULL, mode);
        struct result got;
        run_forward(t, 0);
        tensors_collect(t, &g.problem, &got);
        check_bitwise("out", &got, &want, 1u << RESULT_OUT);
        result_free(&got);
        tensors_check_canaries(t);
        tensors_free(t);
    }
    result_free(&want);
    group_close(&g);
}

/* out starts as `start` everywhere; accumulating adds the layer's FP32 sum to it and rounds once. */
static void accumulating_adds_to_what_out_held(void **state)
{
    struct group g = group_open(&base);
    struct tensors *t = tensors_make(g.layer, &g.problem, NULL, MOK_CONTEXT_NONE);
    struct result got, want, reference;
    float start = 3;

    (void)state;
    for (uint32_t r = 0; r < RANKS; r++)
        for (size_t i = 0; i < t->out[r].bytes / 2; i++)
            ((uint16_t *)(void *)t->out[r].data)[i] = bf16_from_float(start);
    run_forward(t, MOK_OPF_ACCUMULATE_OUT);
    tensors_collect(t, &g.problem, &got);
    oracle_run(&g.problem, &want);
    reference_run(&g.problem, &reference);
    for (size_t i = 0; i < want.count[RESULT_OUT]; i++) {
        double sum = want.array[RESULT_OUT][i] + (double)start;
        /* half a BF16 step of the sum, and the error that the layer alone may have */
        double bound = fabs(sum) / 256 + 3 * fabs(reference.array[RESULT_OUT][i] - want.array[RESULT_OUT][i]) + 1e-3;
        assert_true(fabs(got.array[RESULT_OUT][i] - sum) <= bound);
    }
    result_free(&got);
    result_free(&want);
    result_free(&reference);
    tensors_check_canaries(t);
    tensors_free(t);
    group_close(&g);
}

static void accumulating_onto_zeros_gives_the_bits_of_overwriting(void **state)
{
    struct group g = group_open(&base);
    struct result want, got;

    (void)state;
    must_step_rightly(&g, &want);
    struct tensors *t = tensors_make(g.layer, &g.problem, NULL, MOK_CONTEXT_FULL);
    for (uint32_t r = 0; r < RANKS; r++)
        memset(t->out[r].data, 0, t->out[r].bytes);
    layer_poison_gradients(g.layer);
    run_forward(t, MOK_OPF_ACCUMULATE_OUT);
    run_backward(t, MOK_OPF_OVERWRITE_WGRAD);
    tensors_collect(t, &g.problem, &got);
    for (int a = 0; a < RESULT_COUNT; a++)
        for (size_t i = 0; i < want.count[a]; i++) /* by value: 0 + -0 is 0 */
            if (!(got.array[a][i] == want.array[a][i]))
                fail_msg("%s[%zu] is %a, was %a", result_name[a], i, got.array[a][i], want.array[a][i]);
    result_free(&want);
    result_free(&got);
    tensors_free(t);
    group_close(&g);
}

/* Three micro-batches forward, then backward in another order: gradients are those of the three together. */
static void contexts_of_several_micro_batches_may_be_open_and_used_in_any_order(void **state)
{
    enum { BATCHES = 3 };
    static const int order[BATCHES] = { 1, 2, 0 };
    struct group g = group_open(&base);
    struct problem batch[BATCHES];
    struct tensors *t[BATCHES];
    struct result sum = { 0 }, reference_sum = { 0 }, got = { 0 };

    (void)state;
    result_alloc(&g.problem, &sum);
    result_alloc(&g.problem, &reference_sum);
    for (int n = 0; n < BATCHES; n++) {
        struct problem_options o = base;
        struct result want, reference;
        o.seed += 10 + (uint64_t)n;
        problem_make(&batch[n], &o);
        memcpy(batch[n].gate, g.problem.gate, problem_expert_elements(&g.problem) * base.experts * 2);
        memcpy(batch[n].up, g.problem.up, problem_expert_elements(&g.problem) * base.experts * 2);
        memcpy(batch[n].down, g.problem.down, problem_expert_elements(&g.problem) * base.experts * 2);
        memcpy(batch[n].shared_gate, g.problem.shared_gate, sum.count[RESULT_D_SHARED_GATE] * 2);
        memcpy(batch[n].shared_up, g.problem.shared_up, sum.count[RESULT_D_SHARED_UP] * 2);
        memcpy(batch[n].shared_down, g.problem.shared_down, sum.count[RESULT_D_SHARED_DOWN] * 2);
        t[n] = tensors_make(g.layer, &batch[n], NULL, n == 1 ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL);
        run_forward(t[n], 0);
        oracle_run(&batch[n], &want);
        reference_run(&batch[n], &reference);
        for (int a = RESULT_D_GATE; a < RESULT_COUNT; a++)
            for (size_t i = 0; i < sum.count[a]; i++) {
                sum.array[a][i] += want.array[a][i];
                reference_sum.array[a][i] += reference.array[a][i];
            }
        result_free(&want);
        result_free(&reference);
    }
    for (int n = 0; n < BATCHES; n++)
        run_backward(t[order[n]], 0);
    tensors_collect(t[0], &batch[0], &got);
    for (int a = RESULT_D_GATE; a < RESULT_COUNT; a++) {
        double error = result_error(&got, &sum, (enum result_array)a);
        double expected = result_error(&reference_sum, &sum, (enum result_array)a);
        assert_true(error <= error_bound(expected, sum.count[a]));
    }
    for (int n = 0; n < BATCHES; n++) {
        tensors_check_canaries(t[n]);
        tensors_free(t[n]);
        problem_free(&batch[n]);
    }
    result_free(&sum);
    result_free(&reference_sum);
    result_free(&got);
    group_close(&g);
}

static void a_context_may_be_used_again(void **state)
{
    struct group g = group_open(&base);
    struct result first, second;

    (void)state;
    for (uint32_t mode = MOK_CONTEXT_FULL; mode <= MOK_CONTEXT_RECOMPUTE; mode++) {
        struct tensors *t = tensors_make(g.layer, &g.problem, NULL, mode);
        run_forward(t, 0);
        run_backward(t, MOK_OPF_OVERWRITE_WGRAD);
        tensors_collect(t, &g.problem, &first);
        for (uint32_t r = 0; r < RANKS; r++) {
            poison(t->d_x[r].data, t->d_x[r].bytes);
            poison(t->d_topk_weight[r].data, t->d_topk_weight[r].bytes);
        }
        run_backward(t, MOK_OPF_OVERWRITE_WGRAD);
        tensors_collect(t, &g.problem, &second);
        check_bitwise("second backward", &second, &first, CHECK_ALL);
        result_free(&first);
        result_free(&second);
        tensors_free(t);
    }
    group_close(&g);
}

/* 29 tokens, then 3, none, 29 again: nothing of an earlier operation shines through. */
static void the_number_of_tokens_may_change_from_one_operation_to_the_next(void **state)
{
    static const uint32_t tokens[] = { 29, 3, 0, 1, 29 };
    struct group g = group_open(&base);

    (void)state;
    for (size_t i = 0; i < sizeof(tokens) / sizeof(tokens[0]); i++) {
        struct problem part = g.problem; /* the first tokens of the whole */
        struct result got;
        part.tokens = tokens[i];
        struct tensors *t = tensors_make(g.layer, &part, NULL, MOK_CONTEXT_FULL);
        layer_zero_gradients(g.layer);
        run_forward(t, 0);
        run_backward(t, 0);
        tensors_collect(t, &part, &got);
        check_against_oracle("changing tokens", &part, &got);
        result_free(&got);
        tensors_free(t);
    }
    group_close(&g);
}

/* Two layers of equal shape on the same devices, their operations in another order on each rank. */
static void layers_of_one_group_stay_apart_in_any_interleaving(void **state)
{
    struct problem p[2];
    struct result alone[2], got;

    (void)state;
    for (int i = 0; i < 2; i++) {
        struct problem_options o = base;
        o.seed += 20 + (uint64_t)i;
        problem_make(&p[i], &o);
        run_problem(&p[i], &(struct run_options){ .harness = { .ranks = RANKS } }, &alone[i]);
    }
    for (uint64_t seed = 0; seed < 12; seed++) {
        struct harness *h = harness_open(&(struct harness_options){
            .ranks = RANKS, .jitter = 40, .seed = seed, .chaos_delay_us = seed % 2 ? 50 : 0 });
        struct layer *layer[2];
        struct tensors *t[2];
        struct operation *op[2][2];
        for (int i = 0; i < 2; i++) {
            layer[i] = layer_open(h, &p[i], &(struct layer_options){ .ring_tiles = 1 });
            t[i] = tensors_make(layer[i], &p[i], NULL, MOK_CONTEXT_FULL);
            op[i][0] = layer_forward(t[i], 0);
            op[i][1] = layer_backward(t[i], 0);
        }
        harness_drive(h);
        for (int i = 0; i < 2; i++) {
            operation_expect_success(op[i][0]);
            operation_expect_success(op[i][1]);
            tensors_collect(t[i], &p[i], &got);
            check_bitwise("interleaved", &got, &alone[i], CHECK_ALL);
            result_free(&got);
            tensors_free(t[i]);
        }
        harness_close(h);
    }
    for (int i = 0; i < 2; i++) {
        problem_free(&p[i]);
        result_free(&alone[i]);
    }
}

/* Drives until rank 0 is ready and waits for rank 1, then scribbles, then lets rank 1 come. */
static void let_rank_1_come_late(struct group *g, struct operation *op, const struct guarded *scribble, size_t bytes)
{
    op->rank[1].absent = true;
    harness_drive(g->harness);
    assert_int_equal(op->rank[0].dispatch.state, MOK_ST_READY);
    memset(scribble->data, 0x3c, bytes);
    op->rank[1].absent = false;
    harness_drive(g->harness);
    operation_expect_success(op);
}

/* The caller's routing is looked at once; what it becomes afterwards has no effect. */
static void routing_that_changes_after_it_was_checked_has_no_effect(void **state)
{
    struct group g = group_open(&base);
    struct result want, got;

    (void)state;
    must_step_rightly(&g, &want);
    for (uint32_t mode = MOK_CONTEXT_FULL; mode <= MOK_CONTEXT_RECOMPUTE; mode++) {
        struct tensors *t = tensors_make(g.layer, &g.problem, NULL, mode);
        layer_zero_gradients(g.layer);
        let_rank_1_come_late(&g, layer_forward(t, 0), &t->ids[0], t->ids[0].bytes);
        let_rank_1_come_late(&g, layer_backward(t, 0), &t->context[0], sizeof(struct mok_context_header));
        tensors_collect(t, &g.problem, &got);
        check_bitwise("scribbled after ready", &got, &want, CHECK_ALL);
        result_free(&got);

        layer_zero_gradients(g.layer);
        tensors_free(t);
        t = tensors_make(g.layer, &g.problem, NULL, mode);
        run_forward(t, 0);
        /* header, ids and weights of the context, but not the saved rows behind them */
        let_rank_1_come_late(&g, layer_backward(t, 0), &t->context[0],
                             mode == MOK_CONTEXT_FULL ? g.layer->plan[0].ctx_ring
                                                      : g.layer->plan[0].context_recompute_bytes);
        tensors_collect(t, &g.problem, &got);
        check_bitwise("context scribbled after ready", &got, &want, CHECK_ALL);
        result_free(&got);
        tensors_free(t);
    }
    result_free(&want);
    group_close(&g);
}

/* One rank's engine is told to stop while its MAIN may be running: all ranks end alike, and the next step is right. */
static void an_abort_on_one_rank_fails_the_operation_on_all(void **state)
{
    struct group g = group_open(&base);
    int failed = 0;

    (void)state;
    harness_close(g.harness);
    for (uint64_t seed = 0; seed < 10; seed++) {
        g.harness = harness_open(&(struct harness_options){ .ranks = RANKS, .chaos_delay_us = 300, .seed = seed });
        g.layer = layer_open(g.harness, &g.problem, &(struct layer_options){ .ring_tiles = 1 });
        struct tensors *t = tensors_make(g.layer, &g.problem, NULL, MOK_CONTEXT_FULL);
        struct operation *op = layer_forward(t, 0);
        op->rank[seed % 2].abort_in = MOK_PHASE_MAIN;
        harness_drive(g.harness);
        int code = op->rank[0].result.status;
        failed += code != 0;
        if (code)
            operation_expect_failure(op, -MOK_ECANCELED);
        else
            operation_expect_success(op);
        tensors_free(t);
        must_step_rightly(&g, NULL);
        harness_close(g.harness);
    }
    assert_true(failed > 0);
    problem_free(&g.problem);
}

/* Slots with id -1 and tokens that no expert sees: whatever stands in their weights and rows, they give exactly 0. */
static void garbage_in_masked_slots_and_unrouted_tokens_reaches_nothing(void **state)
{
    struct problem_options o = base;
    struct problem p, clean;
    struct result got, want;

    (void)state;
    o.shared_intermediate = 0;
    o.masked = 0.4;
    problem_make(&p, &o);
    problem_make(&clean, &o);
    for (uint32_t t = 0; t < p.tokens; t++) {
        bool routed = false;
        for (uint32_t k = 0; k < p.topk; k++) {
            if (p.ids[t * p.topk + k] < 0)
                p.topk_weight[t * p.topk + k] = k % 2 ? NAN : INFINITY;
            routed |= p.ids[t * p.topk + k] >= 0;
        }
        for (uint32_t j = 0; j < p.hidden && !routed; j++)
            p.x[t * p.hidden + j] = p.d_out[t * p.hidden + j] = 0x7fc0;
    }
    for (uint32_t ep = 1; ep <= 4; ep *= 2) {
        struct run_options run = { .harness = { .ranks = ep }, .layer = { .ring_tiles = 2 } };
        run_problem(&p, &run, &got);
        run_problem(&clean, &run, &want);
        check_bitwise("garbage", &got, &want, CHECK_ALL);
        check_against_oracle("clean", &clean, &want);
        result_free(&got);
        result_free(&want);
    }
    problem_free(&p);
    problem_free(&clean);
}

/* SwiGLU far out: exponentials that overflow and underflow must not make a NaN, nor cost precision. */
static void extreme_magnitudes_stay_finite_and_right(void **state)
{
    static const int shifts[] = { -60, -20, 6, 12, 30 };

    (void)state;
    for (size_t i = 0; i < sizeof(shifts) / sizeof(shifts[0]); i++) {
        struct problem p;
        struct result got;
        char what[40];
        problem_make(&p, &base);
        for (size_t n = 0; n < problem_rows_elements(&p); n++)
            p.x[n] = bf16_from_float(ldexpf(bf16_to_float(p.x[n]), shifts[i]));
        run_problem(&p, &(struct run_options){ .harness = { .ranks = 2 } }, &got);
        snprintf(what, sizeof(what), "x times 2^%d", shifts[i]);
        check_against_oracle(what, &p, &got);
        result_free(&got);
        problem_free(&p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_context_mode_gives_the_same_out),
        cmocka_unit_test(accumulating_adds_to_what_out_held),
        cmocka_unit_test(accumulating_onto_zeros_gives_the_bits_of_overwriting),
        cmocka_unit_test(contexts_of_several_micro_batches_may_be_open_and_used_in_any_order),
        cmocka_unit_test(a_context_may_be_used_again),
        cmocka_unit_test(the_number_of_tokens_may_change_from_one_operation_to_the_next),
        cmocka_unit_test(layers_of_one_group_stay_apart_in_any_interleaving),
        cmocka_unit_test(routing_that_changes_after_it_was_checked_has_no_effect),
        cmocka_unit_test(an_abort_on_one_rank_fails_the_operation_on_all),
        cmocka_unit_test(garbage_in_masked_slots_and_unrouted_tokens_reaches_nothing),
        cmocka_unit_test(extreme_magnitudes_stay_finite_and_right),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
