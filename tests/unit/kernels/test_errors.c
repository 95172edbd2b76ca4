/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations that cannot be: every rank gets the same verdict, nothing of the callers' is written, and the layer works
 * as before afterwards.
 */
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "args.h"
#include "check.h"
#include "harness.h"
#include "mok/ring_abi.h"

#define RANKS 3

struct fixture {
    struct problem problem;
    struct harness *harness;
    struct layer *layer;
    struct tensors *tensors;
};

static struct fixture fixture_open(uint32_t context_mode)
{
    struct fixture f;

    problem_make(&f.problem, &(struct problem_options){ .hidden = 48,
                                                        .intermediate = 32,
                                                        .experts = 6,
                                                        .topk = 2,
                                                        .tokens = 31,
                                                        .shared_intermediate = 16,
                                                        .seed = 60 });
    f.harness = harness_open(&(struct harness_options){ .ranks = RANKS, .jitter = 10, .seed = 61 });
    f.layer = layer_open(f.harness, &f.problem, &(struct layer_options){ .ring_tiles = 2 });
    f.tensors = tensors_make(f.layer, &f.problem, NULL, context_mode);
    return f;
}

static void fixture_close(struct fixture *f)
{
    tensors_check_canaries(f->tensors);
    layer_check_canaries(f->layer);
    tensors_free(f->tensors);
    harness_close(f->harness);
    problem_free(&f->problem);
}

static void run_forward(struct fixture *f)
{
    struct operation *op = layer_forward(f->tensors, 0);
    harness_drive(f->harness);
    operation_expect_success(op);
}

/* After a failure: a whole step on the same layer and buffers is right. */
static void must_still_work(struct fixture *f)
{
    struct result got;

    tensors_poison_outputs(f->tensors, true);
    layer_zero_gradients(f->layer);
    run_forward(f);
    struct operation *backward = layer_backward(f->tensors, 0);
    harness_drive(f->harness);
    operation_expect_success(backward);
    tensors_collect(f->tensors, &f->problem, &got);
    check_against_oracle("after a failure", &f->problem, &got);
    result_free(&got);
}

static void outputs_must_be_untouched(const struct fixture *f)
{
    const struct tensors *t = f->tensors;

    for (uint32_t r = 0; r < RANKS; r++) {
        assert_true(is_poison(t->out[r].data, t->out[r].bytes));
        assert_true(is_poison(t->d_x[r].data, t->d_x[r].bytes));
        assert_true(is_poison(t->d_topk_weight[r].data, t->d_topk_weight[r].bytes));
    }
}

static int32_t *ids_of(struct fixture *f, uint32_t rank)
{
    return (int32_t *)(void *)f->tensors->ids[rank].data;
}

static void a_bad_expert_id_is_named(int32_t id, uint32_t rank, uint64_t token, uint64_t slot)
{
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);
    int32_t *ids = ids_of(&f, rank), *at = &ids[token * f.problem.topk + slot], good = *at;
    int32_t *later = &ids[9 * f.problem.topk + 1], later_good = *later;

    *at = id;
    if (at < later)
        *later = 1234; /* only the first one counts */
    struct operation *op = layer_forward(f.tensors, 0);
    harness_drive(f.harness);
    const struct mok_op_result *result = &op->rank[0].result;
    assert_int_equal(result->bad_token, token);
    assert_int_equal(result->bad_slot, slot);
    assert_int_equal(result->bad_value, id);
    assert_int_equal(result->argument, MOK_ARG_IDS);
    assert_int_equal(op->rank[0].fault_rank, rank);
    operation_expect_failure(op, -MOK_EEXPERT);
    outputs_must_be_untouched(&f);
    for (uint32_t r = 0; r < RANKS; r++) /* a context without a forward is refused, whatever is in it */
        if (r == rank)
            assert_true(is_poison(f.tensors->context[r].data, f.tensors->context[r].bytes));
    *later = later_good;
    *at = good;
    must_still_work(&f);
    fixture_close(&f);
}

static void the_first_bad_expert_id_is_named_on_all_ranks_and_nothing_is_written(void **state)
{
    (void)state;
    a_bad_expert_id_is_named(6, 0, 0, 0);
    a_bad_expert_id_is_named(6, 2, 8, 1);
    a_bad_expert_id_is_named(INT_MAX, 1, 9, 1);
    a_bad_expert_id_is_named(-7, 1, 3, 0);
    a_bad_expert_id_is_named(-2, 2, 5, 0);
    a_bad_expert_id_is_named(INT_MIN, 0, 7, 1);
}

static void bad_ids_on_several_ranks_give_one_verdict(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_RECOMPUTE);

    (void)state;
    ids_of(&f, 1)[4] = 99;
    ids_of(&f, 2)[2] = -3;
    struct operation *op = layer_forward(f.tensors, 0);
    harness_drive(f.harness);
    assert_true(op->rank[0].fault_rank == 1 || op->rank[0].fault_rank == 2);
    operation_expect_failure(op, -MOK_EEXPERT);
    outputs_must_be_untouched(&f);
    fixture_close(&f);
}

static void ranks_that_disagree_all_get_mismatch(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);

    (void)state;
    struct operation *op = layer_forward(f.tensors, 0);
    op->rank[1].args.flags = MOK_OPF_ACCUMULATE_OUT;
    harness_drive(f.harness);
    assert_int_equal(op->rank[0].result.argument, MOK_ARG_FLAGS);
    operation_expect_failure(op, -MOK_EMISMATCH);

    op = layer_forward(f.tensors, 0);
    op->rank[2].args.context_mode = MOK_CONTEXT_RECOMPUTE;
    harness_drive(f.harness);
    assert_int_equal(op->rank[0].result.argument, MOK_ARG_CONTEXT_MODE);
    operation_expect_failure(op, -MOK_EMISMATCH);

    outputs_must_be_untouched(&f);
    must_still_work(&f); /* leaves a valid context */

    tensors_poison_outputs(f.tensors, false);
    op = layer_backward(f.tensors, 0);
    struct operation *forward = layer_forward(f.tensors, 0);
    op->rank[1].args = forward->rank[1].args;
    operation_free(forward);
    harness_drive(f.harness);
    assert_int_equal(op->rank[0].result.argument, MOK_ARG_OPCODE);
    operation_expect_failure(op, -MOK_EMISMATCH);
    outputs_must_be_untouched(&f);
    must_still_work(&f);
    fixture_close(&f);
}

/* Backward with what is in the contexts now; every rank must refuse it alike. */
static void backward_must_be_refused(struct fixture *f, uint32_t rank)
{
    struct operation *op = layer_backward(f->tensors, 0);

    tensors_poison_outputs(f->tensors, false);
    harness_drive(f->harness);
    int code = op->rank[0].result.status;
    assert_true(code < 0);
    assert_int_equal(op->rank[0].fault_rank, rank);
    operation_expect_failure(op, code);
    outputs_must_be_untouched(f);
}

static void a_context_that_no_forward_wrote_is_refused(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);

    (void)state;
    for (uint32_t r = 0; r < RANKS; r++)
        memset(f.tensors->context[r].data, 0, f.tensors->context[r].bytes);
    backward_must_be_refused(&f, 0);
    tensors_poison_outputs(f.tensors, true);
    backward_must_be_refused(&f, 0);
    must_still_work(&f);
    fixture_close(&f);
}

static void a_damaged_context_header_is_refused(void **state)
{
    static const struct {
        size_t offset, size;
    } field[] = {
        { offsetof(struct mok_context_header, magic), 8 },
        { offsetof(struct mok_context_header, layer_hash), 8 },
        { offsetof(struct mok_context_header, mode), 4 },
        { offsetof(struct mok_context_header, tokens), 4 },
        { offsetof(struct mok_context_header, ring_rows_kept), 8 },
    };
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);

    (void)state;
    run_forward(&f);
    for (size_t i = 0; i < sizeof(field) / sizeof(field[0]); i++)
        for (int value = 0; value < 3; value++) {
            uint8_t *at = f.tensors->context[1].data + field[i].offset, saved[8];
            memcpy(saved, at, field[i].size);
            if (value == 2)
                memset(at, 0xff, field[i].size);
            else
                at[value ? field[i].size - 1 : 0] ^= 0x41;
            backward_must_be_refused(&f, 1);
            memcpy(at, saved, field[i].size);
        }
    must_still_work(&f);
    fixture_close(&f);
}

static void damaged_ids_in_a_context_are_refused(void **state)
{
    static const int32_t bad[] = { 6, -2, INT_MAX, INT_MIN };
    struct fixture f = fixture_open(MOK_CONTEXT_RECOMPUTE);

    (void)state;
    run_forward(&f);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        int32_t *at = (int32_t *)(void *)(f.tensors->context[2].data + f.layer->plan[2].ctx_ids) + 5, saved = *at;
        *at = bad[i];
        backward_must_be_refused(&f, 2);
        *at = saved;
    }
    must_still_work(&f);
    fixture_close(&f);
}

/* Whatever a client does to its context, nothing beyond its own results may suffer; sanitizers and guards look on. */
static void a_context_scribbled_upon_harms_nobody(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);
    struct rng rng = { 62 };

    (void)state;
    for (int n = 0; n < 60; n++) {
        tensors_poison_outputs(f.tensors, true);
        run_forward(&f);
        const struct mok_plan *plan = &f.layer->plan[1];
        struct guarded *context = &f.tensors->context[1];
        if (n % 2) { /* ids that are valid but not those of the forward: the saved rows no longer fit them */
            int32_t *ids = (int32_t *)(void *)(context->data + plan->ctx_ids);
            for (uint32_t i = 0; i < f.tensors->tokens[1] * f.problem.topk; i++)
                ids[i] = n % 4 == 1 ? 3 : (int32_t)rng_below(&rng, 7) - 1;
        } else {
            for (int i = 0; i < 20; i++)
                context->data[rng_below(&rng, (uint32_t)context->bytes)] = (uint8_t)rng_u64(&rng);
        }
        struct operation *op = layer_backward(f.tensors, 0);
        harness_drive(f.harness);
        operation_free(op);
        tensors_check_canaries(f.tensors);
        layer_check_canaries(f.layer);
    }
    must_still_work(&f);
    fixture_close(&f);
}

static void a_context_of_another_layer_is_refused(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_RECOMPUTE);
    struct problem other;

    (void)state;
    problem_make(&other, &(struct problem_options){
                             .hidden = 32, .intermediate = 48, .experts = 6, .topk = 2, .tokens = 31, .seed = 63 });
    struct layer *layer = layer_open(f.harness, &other, &(struct layer_options){ 0 });
    struct tensors *t = tensors_make(layer, &other, NULL, MOK_CONTEXT_RECOMPUTE);
    struct operation *op = layer_forward(t, 0);
    harness_drive(f.harness);
    operation_expect_success(op);
    run_forward(&f);
    assert_true(t->context[0].bytes >= f.tensors->context[0].bytes);
    memcpy(f.tensors->context[0].data, t->context[0].data, f.tensors->context[0].bytes);
    backward_must_be_refused(&f, 0);
    must_still_work(&f);
    tensors_free(t);
    problem_free(&other);
    fixture_close(&f);
}

static void another_number_of_tokens_than_in_forward_is_refused(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);

    (void)state;
    run_forward(&f);
    tensors_poison_outputs(f.tensors, false);
    struct operation *op = layer_backward(f.tensors, 0);
    op->rank[1].args.tokens--;
    harness_drive(f.harness);
    assert_int_equal(op->rank[0].fault_rank, 1);
    assert_true(op->rank[0].result.status < 0);
    operation_expect_failure(op, op->rank[0].result.status);
    outputs_must_be_untouched(&f);
    must_still_work(&f);
    fixture_close(&f);
}

static void a_canceled_operation_ends_alike_on_all_ranks(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);

    (void)state;
    struct operation *op = layer_forward(f.tensors, 0);
    op->rank[1].cancel = -MOK_ECANCELED;
    harness_drive(f.harness);
    assert_int_equal(op->rank[0].fault_rank, 1);
    operation_expect_failure(op, -MOK_ECANCELED);
    outputs_must_be_untouched(&f);
    must_still_work(&f);
    fixture_close(&f);
}

static void a_rank_that_never_comes_is_named_missing_and_may_still_come(void **state)
{
    struct fixture f = fixture_open(MOK_CONTEXT_FULL);
    uint64_t mask[MOK_MAX_EP / 64];

    (void)state;
    struct operation *op = layer_forward(f.tensors, 0);
    op->rank[2].absent = true;
    harness_drive(f.harness);
    for (uint32_t r = 0; r < 2; r++) {
        assert_false(op->rank[r].done);
        assert_int_equal(op->rank[r].dispatch.all_ready_ns, 0);
        assert_int_equal(mok_dispatch_missing(&op->rank[r].dispatch, &f.layer->view[r], mask), 1);
        assert_int_equal(mask[0], 1u << 2);
    }
    op->rank[2].absent = false;
    harness_drive(f.harness);
    operation_expect_success(op);
    fixture_close(&f);
}

/* The engine itself: one phase at a time, an outcome told once, an abort that ends a phase and spoils nothing. */
static int wait_for_phase(struct harness *h, struct mok_op_result *ret)
{
    int ended;
    while ((ended = h->ops->poll(h->engine[0], ret)) == 0)
        ;
    return ended;
}

static void transposed_weights_are_needed_by_a_backward_alone(void **state)
{
    const struct mok_plan plan = { .spec = { .precision = MOK_MXFP8_PER128, .transposed_weights = 1 } };
    struct mok_op_args args = { .kind = MOK_KIND_FORWARD };
    struct mok_expert_params *p = &args.params;
    struct mok_op_result result;
    char at[16] = { 0 };

    (void)state;
    p->gate = p->up = p->down = p->gate_scale = p->up_scale = p->down_scale = at;
    p->d_gate = p->d_up = p->d_down = at;
    assert_int_equal(mok_args_check(&plan, &args, &result), 0);
    args.kind = MOK_KIND_BACKWARD;
    args.context_mode = MOK_CONTEXT_FULL;
    args.context = at;
    p->gate_transposed = p->up_transposed = at;
    assert_int_equal(mok_args_check(&plan, &args, &result), -MOK_ESTATE);
    assert_int_equal(result.argument, MOK_ARG_PARAMS);
    p->down_transposed = at;
    assert_int_equal(mok_args_check(&plan, &args, &result), 0);
}

static void an_engine_runs_one_phase_at_a_time_and_tells_its_outcome_once(void **state)
{
    struct problem p;
    struct mok_op_result result;
    struct harness *h = harness_open(&(struct harness_options){ .chaos_delay_us = 2000 });

    (void)state;
    problem_make(&p, &(struct problem_options){
                         .hidden = 64, .intermediate = 64, .experts = 4, .topk = 2, .tokens = 64, .seed = 64 });
    struct layer *layer = layer_open(h, &p, &(struct layer_options){ .ring_tiles = 1 });
    struct tensors *t = tensors_make(layer, &p, NULL, MOK_CONTEXT_NONE);
    struct operation *op = layer_forward(t, 0);
    struct mok_op_args *args = &op->rank[0].args;
    struct mok_peer peer = { .x = t->x[0].data, .tokens = p.tokens };
    args->peer = &peer;

    assert_int_equal(h->ops->poll(h->engine[0], &result), 0);
    assert_int_equal(h->ops->start(layer->engine_layer[0], args, MOK_PHASE_PREPARE), 0);
    assert_int_equal(wait_for_phase(h, &result), 1);
    assert_int_equal(result.status, 0);
    assert_int_equal(h->ops->poll(h->engine[0], &result), 0);
    assert_int_equal(h->ops->start(layer->engine_layer[0], args, MOK_PHASE_MAIN), 0);
    assert_int_equal(h->ops->start(layer->engine_layer[0], args, MOK_PHASE_MAIN), -MOK_EBUSY);
    h->ops->abort(h->engine[0]);
    assert_int_equal(wait_for_phase(h, &result), 1);
    assert_int_equal(result.status, -MOK_ECANCELED);
    assert_true(is_poison(t->out[0].data, t->out[0].bytes));
    operation_free(op);

    op = layer_forward(t, 0);
    harness_drive(h);
    operation_expect_success(op);
    h->ops->abort(h->engine[0]); /* nothing runs: no effect, not even on the next phase */
    op = layer_forward(t, 0);
    harness_drive(h);
    operation_expect_success(op);
    tensors_free(t);
    harness_close(h);
    problem_free(&p);
}

static void closing_an_engine_ends_the_phase_that_runs(void **state)
{
    struct problem p;
    struct harness *h = harness_open(&(struct harness_options){ .chaos_delay_us = 2000, .threads = 2 });

    (void)state;
    problem_make(&p, &(struct problem_options){
                         .hidden = 64, .intermediate = 64, .experts = 4, .topk = 2, .tokens = 64, .seed = 65 });
    struct layer *layer = layer_open(h, &p, &(struct layer_options){ .ring_tiles = 1 });
    struct tensors *t = tensors_make(layer, &p, NULL, MOK_CONTEXT_NONE);
    struct operation *op = layer_forward(t, 0);
    struct mok_op_result result;

    assert_int_equal(h->ops->start(layer->engine_layer[0], &op->rank[0].args, MOK_PHASE_PREPARE), 0);
    wait_for_phase(h, &result);
    op->rank[0].peer[0] = (struct mok_peer){ .x = t->x[0].data, .tokens = p.tokens };
    op->rank[0].args.peer = op->rank[0].peer;
    assert_int_equal(h->ops->start(layer->engine_layer[0], &op->rank[0].args, MOK_PHASE_MAIN), 0);
    h->ops->close(h->engine[0]); /* must not hang, and nothing may run on afterwards */
    h->engine[0] = NULL;
    tensors_check_canaries(t);
    layer_check_canaries(layer);
    h->ops->layer_close(layer->engine_layer[0]);
    layer->engine_layer[0] = NULL;
    operation_free(op);
    tensors_free(t);
    harness_close(h); /* closing NULL is fine too */
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_first_bad_expert_id_is_named_on_all_ranks_and_nothing_is_written),
        cmocka_unit_test(bad_ids_on_several_ranks_give_one_verdict),
        cmocka_unit_test(ranks_that_disagree_all_get_mismatch),
        cmocka_unit_test(a_context_that_no_forward_wrote_is_refused),
        cmocka_unit_test(a_damaged_context_header_is_refused),
        cmocka_unit_test(damaged_ids_in_a_context_are_refused),
        cmocka_unit_test(a_context_scribbled_upon_harms_nobody),
        cmocka_unit_test(a_context_of_another_layer_is_refused),
        cmocka_unit_test(another_number_of_tokens_than_in_forward_is_refused),
        cmocka_unit_test(a_canceled_operation_ends_alike_on_all_ranks),
        cmocka_unit_test(a_rank_that_never_comes_is_named_missing_and_may_still_come),
        cmocka_unit_test(transposed_weights_are_needed_by_a_backward_alone),
        cmocka_unit_test(an_engine_runs_one_phase_at_a_time_and_tells_its_outcome_once),
        cmocka_unit_test(closing_an_engine_ends_the_phase_that_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
