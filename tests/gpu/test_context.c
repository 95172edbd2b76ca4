/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the CUDA engine's forward leaves in a context: header, routing, and with `full` the gate and up rows of
 * macrobatch 0, against plain sums. Skipped where there is no GPU.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "cuda/layout.h"
#include "device.h"
#include "plain_bf16.h"

static void make(struct problem *p)
{
    problem_make(p, &(struct problem_options){ .hidden = 144,
                                               .intermediate = 176,
                                               .experts = 6,
                                               .topk = 2,
                                               .tokens = 150,
                                               .routing = ROUTE_ZIPF,
                                               .masked = 0.1,
                                               .seed = 21 });
}

static uint16_t *forward(const struct problem *p, const struct device_options *options, enum mok_context_mode mode,
                         struct mok_plan *ret_plan, uint8_t **ret_context)
{
    struct device_group group;
    uint64_t bytes;
    uint16_t *out;
    void *context;

    device_group_open(&group, p, options, &p->tokens);
    *ret_plan = group.plan[0];
    bytes = mode == MOK_CONTEXT_FULL ? group.plan[0].context_full_bytes : group.plan[0].context_recompute_bytes;
    assert_int_equal(cudaMalloc(&context, bytes), cudaSuccess);
    group.args[0].context_mode = mode;
    group.args[0].context = context;
    device_forward(&group);
    out = device_out(&group);
    *ret_context = malloc(bytes);
    assert_non_null(*ret_context);
    assert_int_equal(cudaMemcpy(*ret_context, context, bytes, cudaMemcpyDeviceToHost), cudaSuccess);
    assert_int_equal(cudaFree(context), cudaSuccess);
    device_group_close(&group);
    return out;
}

static double dot(const uint16_t *a, const uint16_t *b, uint32_t n)
{
    double sum = 0;

    for (uint32_t i = 0; i < n; i++)
        sum += (double)bf16_to_float(a[i]) * (double)bf16_to_float(b[i]);
    return sum;
}

static void check_row(const struct problem *p, const uint16_t *row, const uint16_t *weight, uint32_t token, uint64_t at)
{
    for (uint32_t i = 0; i < p->intermediate; i++) {
        double want = dot(p->x + (size_t)token * p->hidden, weight + (size_t)i * p->hidden, p->hidden);
        double got = (double)bf16_to_float(row[i]);
        if (!(fabs(got - want) <= 0.005 * fabs(want) + 1e-4))
            fail_msg("padded row %llu (token %u), column %u: %g, want %g", (unsigned long long)at, token, i, got, want);
    }
}

/* Rows in canonical order: by expert, then token, then k; each expert's from a multiple of the tile's rows. */
static uint64_t check_rows(const struct problem *p, const struct mok_plan *plan, const uint8_t *ring)
{
    size_t expert = problem_expert_elements(p);
    struct mok_cuda_kept kept;
    uint64_t at = 0, checked = 0;

    mok_cuda_kept_make(plan, &kept);
    for (uint32_t e = 0; e < p->experts; e++) {
        for (uint32_t slot = 0; slot < p->tokens * p->topk; slot++) {
            if (p->ids[slot] != (int32_t)e)
                continue;
            if (at < plan->ring_rows) {
                const uint64_t offset = at * p->intermediate * 2;
                check_row(p, (const void *)(ring + kept.a + offset), p->gate + e * expert, slot / p->topk, at);
                check_row(p, (const void *)(ring + kept.b + offset), p->up + e * expert, slot / p->topk, at);
                checked++;
            }
            at++;
        }
        at = (at + plan->tile_rows - 1) / plan->tile_rows * plan->tile_rows;
    }
    return checked;
}

static void check_context(const struct problem *p, uint64_t ring_rows, enum mok_context_mode mode, const uint16_t *want)
{
    struct mok_context_header header;
    struct mok_plan plan;
    uint8_t *context;
    uint16_t *out = forward(p, &(struct device_options){ .ranks = 1, .ring_rows = ring_rows }, mode, &plan, &context);
    size_t slots = (size_t)p->tokens * p->topk;

    if (want)
        assert_memory_equal(out, want, problem_rows_elements(p) * 2);
    memcpy(&header, context, sizeof(header));
    assert_true(header.magic == MOK_CONTEXT_MAGIC);
    assert_true(header.layer_hash == mok_plan_hash(&plan));
    assert_int_equal(header.mode, mode);
    assert_int_equal(header.tokens, p->tokens);
    assert_memory_equal(context + plan.ctx_ids, p->ids, slots * 4);
    assert_memory_equal(context + plan.ctx_topk_weight, p->topk_weight, slots * 4);
    if (mode == MOK_CONTEXT_FULL) {
        assert_in_range(header.ring_rows_kept, 1, plan.ring_rows);
        assert_true(check_rows(p, &plan, context + plan.ctx_ring) > 0);
    } else {
        assert_int_equal(header.ring_rows_kept, 0);
    }
    free(context);
    free(out);
}

static void a_context_holds_what_the_forward_used(void **state)
{
    struct device_group group;
    struct problem p;
    uint16_t *want;

    (void)state;
    make(&p);
    device_group_open(&group, &p, &(struct device_options){ .ranks = 1 }, &p.tokens);
    device_forward(&group);
    want = device_out(&group);
    device_group_close(&group);
    check_context(&p, 0, MOK_CONTEXT_FULL, want);
    check_context(&p, 128, MOK_CONTEXT_FULL, want);
    check_context(&p, 64, MOK_CONTEXT_RECOMPUTE, want);
    free(want);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_context_holds_what_the_forward_used) };

    device_or_skip();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
