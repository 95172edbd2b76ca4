/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forward and backward on a GPU through mokd: every gradient beside the host engine's at EP 1, 2 and 4 with a worker a
 * rank on one GPU; two jobs on the same workers; thousands of steps; and a backward in the order of a CUDA stream.
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "gpu.h"
#include "workload.h"

#define GPUS 4
#define GRADIENTS 8
#ifdef MOK_EMULATED
#define WAIT_NS 300000000000
#define REPEATS 2
#else
#define WAIT_NS 20000000000
#define REPEATS 50
#endif
#define SOAK 2000
#define LOOK_EVERY 25 /* steps of it */
/* The engines round the same values at the same places, but sum in another order. */
static const double tolerance = 6e-3;

static const char *const names[GRADIENTS] = { "d_x",  "d_topk_weight", "d_gate",        "d_up",
                                              "d_down", "d_shared_gate", "d_shared_up", "d_shared_down" };

struct part {
    pthread_t thread;
    const struct stack *stack;
    struct workload workload;
    const char *group;
    uint32_t rank, tokens, first, device, repeats, every;
    float *gradient[GRADIENTS];
    size_t count[GRADIENTS];
    int code;
};

static void read_gradients(const struct workload_rank *r, struct part *t)
{
    mok_buffer *buffers[GRADIENTS] = { r->d_x,    r->d_weight, r->d_gate,   r->d_up,
                                       r->d_down, r->d_s_gate, r->d_s_up, r->d_s_down };
    const struct workload *w = &t->workload;
    const size_t expert = (size_t)w->experts / w->ep * w->hidden * w->intermediate,
                 shared = (size_t)w->shared_intermediate * w->hidden,
                 counts[GRADIENTS] = { (size_t)t->tokens * w->hidden, (size_t)t->tokens * w->topk, expert, expert, expert,
                                       shared, shared, shared };

    for (int i = 0; i < GRADIENTS; i++) {
        float *values = calloc(counts[i] + 1, sizeof(float));
        if (!values)
            abort();
        if (counts[i])
            workload_copy(values, mok_buffer_data(buffers[i]), counts[i] * (i ? 4 : 2));
        for (size_t n = i ? 0 : counts[0]; n-- > 0;) { /* BF16 in its own place, from the back */
            uint16_t bf16;
            memcpy(&bf16, (const uint8_t *)values + 2 * n, 2);
            values[n] = workload_float(bf16);
        }
        t->gradient[i] = values;
        t->count[i] = counts[i];
    }
}

static void *run_rank(void *argument)
{
    struct part *t = argument;
    struct workload_rank rank;
    mok_result forward, backward;
    uint64_t hash = 0;

    t->code = workload_open(&rank, &t->workload, t->rank, t->tokens, t->first, t->stack->socket, t->group, t->device);
    for (uint32_t i = 0; i < t->repeats && t->code == 0; i++) {
        bool looks = i == 0 || (i + 1) % t->every == 0 || i + 1 == t->repeats;

        if (looks)
            workload_poison(&rank);
        t->code = workload_step(&rank, &forward, &backward);
        if (t->code == 0 && (forward.dropped != 0 || backward.dropped != 0))
            t->code = -MOK_EINTERNAL;
        if (t->code == 0 && i == 0)
            hash = workload_hash(&rank);
        else if (t->code == 0 && looks && workload_hash(&rank) != hash)
            t->code = -MOK_EINTERNAL;
    }
    if (t->code == 0)
        read_gradients(&rank, t);
    else
        fprintf(stderr, "rank %u: %s: %s\n", t->rank, mok_error_name(t->code), mok_last_error());
    workload_close(&rank);
    return NULL;
}

static void begin(struct part *parts, const struct stack *stack, const struct workload *w, const char *group,
                  uint32_t first_device, uint32_t repeats)
{
    uint32_t first = 0;

    for (uint32_t r = 0; r < w->ep; r++) {
        parts[r] = (struct part){ .stack = stack,
                                  .workload = *w,
                                  .group = group,
                                  .rank = r,
                                  .tokens = w->ep > 1 && r == 1 ? w->max_tokens / 3 : w->max_tokens,
                                  .first = first,
                                  .device = first_device + r,
                                  .repeats = repeats,
                                  .every = repeats > REPEATS ? LOOK_EVERY : 1 };
        first += parts[r].tokens;
        assert_int_equal(pthread_create(&parts[r].thread, NULL, run_rank, &parts[r]), 0);
    }
}

static void end(struct part *parts)
{
    uint32_t ep = parts[0].workload.ep;
    int code = 0;

    for (uint32_t r = 0; r < ep; r++) {
        pthread_join(parts[r].thread, NULL);
        code = parts[r].code < 0 ? parts[r].code : code;
    }
    assert_int_equal(code, 0);
}

static void drop(struct part *parts)
{
    for (uint32_t r = 0; r < parts[0].workload.ep; r++)
        for (int i = 0; i < GRADIENTS; i++)
            free(parts[r].gradient[i]);
}

static double distance(const float *got, const float *want, size_t count)
{
    double difference = 0, norm = 0;

    for (size_t i = 0; i < count; i++) {
        double d = (double)got[i] - (double)want[i];
        difference += d * d;
        norm += (double)want[i] * (double)want[i];
    }
    return norm > 0 ? sqrt(difference / norm) : sqrt(difference);
}

static const struct workload cases[] = {
    { .hidden = 256, .intermediate = 192, .experts = 8, .topk = 3, .max_tokens = 150, .context_mode = MOK_CONTEXT_FULL, .seed = 1 },
    { .hidden = 208,
      .intermediate = 144,
      .experts = 8,
      .topk = 2,
      .max_tokens = 90,
      .context_mode = MOK_CONTEXT_RECOMPUTE,
      .routing = WORKLOAD_ZIPF,
      .masked = 0.2f,
      .shared_intermediate = 96,
      .seed = 2 },
};

static void every_gradient_is_what_the_host_engine_gives(void **state)
{
    struct stack stack;

    (void)state;
    assert_int_equal(gpu_stack_start(&stack, GPUS, GPUS), 0);
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++)
        for (uint32_t ep = 1; ep <= GPUS; ep *= 2) {
            struct part gpu[GPUS], host[GPUS];
            struct workload w = cases[c];

            w.ep = ep;
            begin(gpu, &stack, &w, "gpu", 0, REPEATS);
            end(gpu);
            begin(host, &stack, &w, "host", GPUS, 1);
            end(host);
            for (uint32_t r = 0; r < ep; r++)
                for (int i = 0; i < GRADIENTS; i++) {
                    double error = distance(gpu[r].gradient[i], host[r].gradient[i], gpu[r].count[i]);
                    if (!(error <= tolerance))
                        fail_msg("case %zu, EP %u, rank %u: %s is %g away", c, ep, r, names[i], error);
                }
            drop(gpu);
            drop(host);
        }
    assert_int_equal(stack_stop(&stack), 0);
}

static void two_jobs_share_the_workers_and_each_has_its_own_bits(void **state)
{
    struct part alone[2], one[2], other[2];
    struct workload w = cases[0], another = cases[1];
    struct stack stack;

    (void)state;
    w.ep = another.ep = 2;
    assert_int_equal(gpu_stack_start(&stack, 2, 0), 0);
    begin(alone, &stack, &w, "alone", 0, 1);
    end(alone);
    begin(one, &stack, &w, "one", 0, REPEATS);
    begin(other, &stack, &another, "other", 0, REPEATS);
    end(one);
    end(other);
    for (uint32_t r = 0; r < 2; r++)
        for (int i = 0; i < GRADIENTS; i++)
            assert_memory_equal(one[r].gradient[i], alone[r].gradient[i], one[r].count[i] * sizeof(float));
    drop(alone);
    drop(one);
    drop(other);
    assert_int_equal(stack_stop(&stack), 0);
}

#ifndef MOK_EMULATED /* which would take an hour */
static void a_small_layer_keeps_its_bits_for_thousands_of_steps(void **state)
{
    struct part one[2], other[2];
    struct workload w = { .hidden = 128,
                          .intermediate = 64,
                          .experts = 8,
                          .topk = 2,
                          .ep = 2,
                          .max_tokens = 48,
                          .context_mode = MOK_CONTEXT_FULL,
                          .seed = 3 },
                    another = w;
    struct stack stack;
    double start;

    (void)state;
    another.context_mode = MOK_CONTEXT_RECOMPUTE;
    another.shared_intermediate = 32;
    another.seed = 4;
    assert_int_equal(gpu_stack_start(&stack, 2, 0), 0);
    start = stack_now_ms();
    begin(one, &stack, &w, "one", 0, SOAK);
    begin(other, &stack, &another, "other", 0, SOAK / 4);
    end(one);
    end(other);
    printf("%d steps at EP 2, beside %d of another job: %.0f ms\n", SOAK, SOAK / 4, stack_now_ms() - start);
    drop(one);
    drop(other);
    assert_int_equal(stack_stop(&stack), 0);
}
#endif

static void a_backward_keeps_its_place_in_a_stream(void **state)
{
    struct workload w = cases[0];
    struct workload_rank rank;
    enum { STEPS = 4 }; /* from the third on, a device may know their arguments */
    mok_ticket ticket[STEPS][2];
    struct stack stack;
    cudaStream_t stream;
    uint64_t want;

    (void)state;
    w.ep = 1;
    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    assert_int_equal(workload_open(&rank, &w, 0, w.max_tokens, 0, stack.socket, "stream", 0), 0);
    assert_int_equal(workload_step(&rank, NULL, NULL), 0);
    want = workload_hash(&rank);
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    mok_forward_args forward = { .size = sizeof(forward), .tokens = rank.tokens, .context_mode = w.context_mode };
    mok_backward_args backward = { .size = sizeof(backward),
                                   .tokens = rank.tokens,
                                   .context_mode = w.context_mode,
                                   .flags = MOK_BACKWARD_OVERWRITE_WGRAD };
#define WHOLE(at) ((mok_view){ .buffer = (at) })
    forward.x = backward.x = WHOLE(rank.x);
    forward.ids = WHOLE(rank.ids);
    forward.topk_weight = WHOLE(rank.weight);
    forward.out = WHOLE(rank.out);
    forward.context = backward.context = WHOLE(rank.context);
    backward.d_out = WHOLE(rank.d_out);
    backward.d_x = WHOLE(rank.d_x);
    backward.d_topk_weight = WHOLE(rank.d_weight);
    for (int step = 0; step < STEPS; step++) {
        workload_poison(&rank);
        mok_ticket *of = ticket[step];
        assert_int_equal(mok_layer_forward_on_stream(rank.layer, &forward, (mok_stream)stream, &of[0]), 0);
        assert_int_equal(mok_layer_backward_on_stream(rank.layer, &backward, (mok_stream)stream, &of[1]), 0);
        assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
        assert_true(workload_hash(&rank) == want);
    }
    for (int i = 0; i < 2 * STEPS; i++) {
        mok_result result;
        assert_int_equal(mok_wait(rank.session, ticket[i / 2][i % 2], WAIT_NS, &result), 0);
        assert_int_equal(result.code, 0);
    }
    cudaStreamDestroy(stream);
    workload_close(&rank);
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_gradient_is_what_the_host_engine_gives),
        cmocka_unit_test(two_jobs_share_the_workers_and_each_has_its_own_bits),
#ifndef MOK_EMULATED
        cmocka_unit_test(a_small_layer_keeps_its_bits_for_thousands_of_steps),
#endif
        cmocka_unit_test(a_backward_keeps_its_place_in_a_stream),
    };

    gpu_or_skip();
    gpu_copies();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
