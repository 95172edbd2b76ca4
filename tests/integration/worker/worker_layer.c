/* SPDX-License-Identifier: Apache-2.0 */
/* What workers compute, against the FP64 oracle: forward and every gradient, alone and as two ranks. */
#include "job.h"

#include <math.h>
#include <stdlib.h>

#include "mok/types.h"
#include "oracle.h"

/* BF16 keeps 8 bits; rows pass through a few roundings. */
#define TOLERANCE 0.02

static double from_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof(value));
    return (double)value;
}

static void widen_bf16(double *to, const uint16_t *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = from_bf16(from[i]);
}

static void widen_f32(double *to, const float *from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = (double)from[i];
}

/* Token ranges of the ranks, and their experts, in the global problem. */
struct slice {
    size_t token, tokens, weight, weights;
};

static struct slice slice_of(const struct problem *p, uint32_t ep, uint32_t rank)
{
    size_t first = (size_t)p->tokens * rank / ep, last = (size_t)p->tokens * (rank + 1) / ep;
    size_t weights = problem_expert_elements(p) * (p->experts / ep);

    return (struct slice){ .token = first, .tokens = last - first, .weight = weights * rank, .weights = weights };
}

static void give(struct job *job, const struct problem *p, uint32_t rank)
{
    struct slice s = slice_of(p, job->ep, rank);
    size_t h = p->hidden, k = p->topk;

    job->rank_tokens[rank] = (uint32_t)s.tokens;
    memcpy(job->x.address[rank], p->x + s.token * h, s.tokens * h * 2);
    memcpy(job->d_out.address[rank], p->d_out + s.token * h, s.tokens * h * 2);
    memcpy(job_part(job, rank, JOB_IDS), p->ids + s.token * k, s.tokens * k * 4);
    memcpy(job_part(job, rank, JOB_TOPK_WEIGHT), p->topk_weight + s.token * k, s.tokens * k * 4);
    memcpy(job_part(job, rank, JOB_GATE), p->gate + s.weight, s.weights * 2);
    memcpy(job_part(job, rank, JOB_UP), p->up + s.weight, s.weights * 2);
    memcpy(job_part(job, rank, JOB_DOWN), p->down + s.weight, s.weights * 2);
    /* What is only written must not be read. */
    memset(job_part(job, rank, JOB_OUT), 0xff, job->bytes[JOB_OUT]);
    memset(job_part(job, rank, JOB_D_X), 0xff, job->bytes[JOB_D_X]);
    memset(job_part(job, rank, JOB_D_TOPK_WEIGHT), 0xff, job->bytes[JOB_D_TOPK_WEIGHT]);
}

static void take(struct job *job, const struct problem *p, uint32_t rank, struct result *got)
{
    struct slice s = slice_of(p, job->ep, rank);
    size_t h = p->hidden, k = p->topk;

    widen_bf16(got->array[RESULT_OUT] + s.token * h, job_part(job, rank, JOB_OUT), s.tokens * h);
    widen_bf16(got->array[RESULT_D_X] + s.token * h, job_part(job, rank, JOB_D_X), s.tokens * h);
    widen_f32(got->array[RESULT_D_TOPK_WEIGHT] + s.token * k, job_part(job, rank, JOB_D_TOPK_WEIGHT), s.tokens * k);
    widen_f32(got->array[RESULT_D_GATE] + s.weight, job_part(job, rank, JOB_D_GATE), s.weights);
    widen_f32(got->array[RESULT_D_UP] + s.weight, job_part(job, rank, JOB_D_UP), s.weights);
    widen_f32(got->array[RESULT_D_DOWN] + s.weight, job_part(job, rank, JOB_D_DOWN), s.weights);
}

static void compute(const struct problem *p, uint32_t ep, const struct worker_options *options, struct result *got)
{
    const struct mok_layer_spec spec = { .hidden = p->hidden,
                                         .intermediate = p->intermediate,
                                         .experts = p->experts,
                                         .topk = p->topk,
                                         .max_tokens = p->tokens,
                                         .precision = MOK_BF16 };
    struct worker worker[2];
    struct worker *workers[2] = { &worker[0], &worker[1] };
    struct job job;

    for (uint32_t rank = 0; rank < ep; rank++)
        worker_start(&worker[rank], options);
    job_open(&job, workers, ep, &spec);
    for (uint32_t rank = 0; rank < ep; rank++)
        give(&job, p, rank);
    for (uint32_t rank = 0; rank < ep; rank++) {
        job_submit_forward(&job, rank, 1);
        job_submit_backward(&job, rank, 2);
    }
    for (uint32_t rank = 0; rank < ep; rank++) {
        client_expect(&job.client[rank], 1, 0);
        client_expect(&job.client[rank], 2, 0);
    }
    result_alloc(p, got);
    for (uint32_t rank = 0; rank < ep; rank++)
        take(&job, p, rank, got);
    job_close(&job);
    for (uint32_t rank = 0; rank < ep; rank++)
        worker_end(&worker[rank]);
}

static void forward_and_every_gradient_are_those_of_the_oracle(void **state)
{
    const struct problem_options options = { .hidden = 48,
                                             .intermediate = 32,
                                             .experts = 6,
                                             .topk = 3,
                                             .tokens = 37,
                                             .routing = ROUTE_ZIPF,
                                             .weighting = WEIGHT_ZERO_NEGATIVE,
                                             .masked = 0.2,
                                             .seed = 11 };
    struct problem p;
    struct result want, got;
    (void)state;

    problem_make(&p, &options);
    oracle_run(&p, &want);
    for (uint32_t ep = 1; ep <= 2; ep++) {
        compute(&p, ep, NULL, &got);
        for (unsigned array = RESULT_OUT; array <= RESULT_D_DOWN; array++) {
            double error = result_error(&got, &want, (enum result_array)array);
            if (!(error <= TOLERANCE))
                fail_msg("EP %u, %s: relative error %g", ep, result_name[array], error);
        }
        result_free(&got);
    }
    result_free(&want);
    problem_free(&p);
}

static void random_delays_change_no_bit(void **state)
{
    const struct problem_options options = {
        .hidden = 32, .intermediate = 16, .experts = 4, .topk = 2, .tokens = 24, .seed = 5
    };
    const struct worker_options chaos = { .chaos_delay_us = 300, .threads = 2 };
    struct problem p;
    struct result first, again;
    (void)state;

    problem_make(&p, &options);
    compute(&p, 2, NULL, &first);
    for (unsigned i = 0; i < 3; i++) {
        compute(&p, 2, &chaos, &again);
        for (unsigned array = RESULT_OUT; array <= RESULT_D_DOWN; array++)
            assert_memory_equal(again.array[array], first.array[array], first.count[array] * sizeof(double));
        result_free(&again);
    }
    result_free(&first);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forward_and_every_gradient_are_those_of_the_oracle),
        cmocka_unit_test(random_delays_change_no_bit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
