/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The forward pass on a GPU through mokd: against the FP64 oracle and the host engine, at EP 1, 2 and 4 with a worker a
 * rank on one GPU; in the order of CUDA streams; beside a client's kernels; and through deaths.
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "busy.h"
#include "gpu.h"
#include "oracle.h"
#include "workload.h"

/* Roundings of h, y and the output to BF16 leave no more than this, as a share of the norm. */
static const double tolerance = 8e-3;

#define GPUS 4
/* An emulated GPU is slow, and slower on a busy machine. */
#ifdef MOK_EMULATED
#define WAIT_NS 300000000000
#define SOON_MS 100000
#define REPEATS 2
#define ROUNDS 2
#else
#define WAIT_NS 20000000000
#define SOON_MS 3000
#define REPEATS 200
#define ROUNDS 20
#endif

static void sleep_ms(long ms)
{
    const struct timespec t = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&t, NULL);
}

#define cuda(call) assert_int_equal(call, cudaSuccess)

/* ------------------------------------------------------------------ one problem on one kind of device */

struct part {
    pthread_t thread;
    const struct stack *stack;
    const struct problem *problem;
    struct workload workload;
    uint16_t *out; /* of the whole batch */
    uint32_t rank, first, tokens, device, repeats;
    bool beside; /* client kernels all the while */
    int code;
};

static void copy_in(mok_buffer *buffer, const void *from, size_t bytes)
{
    workload_copy(mok_buffer_data(buffer), from, bytes);
}

static void put_weights(const struct workload_rank *r, const uint16_t *from, uint64_t rows, uint64_t columns,
                        mok_buffer *buffer, mok_buffer *scales)
{
    const mok_mxfp8_options o = { .size = sizeof(o), .rows = rows, .columns = columns, .dtype = MOK_DTYPE_BF16,
                                  .precision = r->problem->precision };
    uint64_t scale_bytes = mok_mxfp8_scale_bytes(rows, columns);

    if (!o.precision) {
        copy_in(buffer, from, rows * columns * 2);
        return;
    }
    uint8_t *code = malloc(rows * columns), *scale = malloc(scale_bytes);
    if (code && scale && mok_mxfp8_quantize(&o, from, code, scale) == 0) {
        copy_in(buffer, code, rows * columns);
        copy_in(scales, scale, scale_bytes);
    }
    free(code);
    free(scale);
}

static void put_inputs(const struct workload_rank *r, const struct part *t)
{
    const struct problem *p = t->problem;
    size_t expert = problem_expert_elements(p), local = p->experts / t->workload.ep, e0 = t->rank * local;

    copy_in(r->x, p->x + (size_t)t->first * p->hidden, (size_t)t->tokens * p->hidden * 2);
    copy_in(r->ids, p->ids + (size_t)t->first * p->topk, (size_t)t->tokens * p->topk * 4);
    copy_in(r->weight, p->topk_weight + (size_t)t->first * p->topk, (size_t)t->tokens * p->topk * 4);
    put_weights(r, p->gate + e0 * expert, local * p->intermediate, p->hidden, r->gate, r->gate_scale);
    put_weights(r, p->up + e0 * expert, local * p->intermediate, p->hidden, r->up, r->up_scale);
    put_weights(r, p->down + e0 * expert, local * p->hidden, p->intermediate, r->down, r->down_scale);
    if (p->shared_intermediate) {
        size_t shared = (size_t)p->shared_intermediate * p->hidden;
        copy_in(r->s_gate, p->shared_gate, shared * 2);
        copy_in(r->s_up, p->shared_up, shared * 2);
        copy_in(r->s_down, p->shared_down, shared * 2);
    }
}

static int forward(struct workload_rank *rank)
{
    mok_result result = { 0 };
    int code = workload_step(rank, &result, NULL);

    if (code < 0)
        return code;
    return result.dropped == 0 ? 0 : -MOK_EINTERNAL;
}

/* Each repeat into a poisoned output; all must have the bits of the first. */
static int repeat(struct workload_rank *rank, struct part *t)
{
    size_t bytes = (size_t)t->tokens * t->problem->hidden * 2;
    uint16_t *first = t->out + (size_t)t->first * t->problem->hidden, *again = malloc(bytes + 1);
    cudaStream_t stream = NULL;
    int code = again ? 0 : -MOK_ENOMEM;

    if (t->beside && cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
        code = -MOK_EDEVICE;
    for (uint32_t i = 0; i < t->repeats && code == 0; i++) {
        workload_poison(rank);
        if (t->beside && busy_launch(16, 100000, stream) != 0)
            code = -MOK_EDEVICE;
        if (code == 0)
            code = forward(rank);
        workload_copy(i ? again : first, mok_buffer_data(rank->out), bytes);
        if (code == 0 && i && memcmp(again, first, bytes) != 0)
            code = -MOK_EINTERNAL;
    }
    if (stream)
        cudaStreamDestroy(stream);
    free(again);
    return code;
}

static void *run_rank(void *argument)
{
    struct part *t = argument;
    struct workload_rank rank;

    t->code = workload_open(&rank, &t->workload, t->rank, t->tokens, t->first, t->stack->socket, "gpu", t->device);
    if (t->code == 0) {
        put_inputs(&rank, t);
        t->code = repeat(&rank, t);
    }
    if (t->code < 0)
        fprintf(stderr, "rank %u: %s: %s\n", t->rank, mok_error_name(t->code), mok_last_error());
    workload_close(&rank);
    return NULL;
}

struct run_options {
    uint32_t ep, first_device, repeats, precision;
    uint64_t ring_bytes;
    bool beside;
};

static int run(const struct stack *stack, const struct problem *p, const uint32_t *tokens, const struct run_options *o,
               uint16_t *ret_out)
{
    struct part t[GPUS];
    uint32_t most = 1, first = 0;
    int code = 0;

    for (uint32_t r = 0; r < o->ep; r++)
        most = tokens[r] > most ? tokens[r] : most;
    for (uint32_t r = 0; r < o->ep; r++) {
        t[r] = (struct part){ .stack = stack,
                              .problem = p,
                              .out = ret_out,
                              .rank = r,
                              .first = first,
                              .tokens = tokens[r],
                              .device = o->first_device + r,
                              .repeats = o->repeats,
                              .beside = o->beside };
        t[r].workload = (struct workload){ .hidden = p->hidden,
                                           .intermediate = p->intermediate,
                                           .experts = p->experts,
                                           .topk = p->topk,
                                           .ep = o->ep,
                                           .max_tokens = most,
                                           .clamp = p->clamp,
                                           .shared_intermediate = p->shared_intermediate,
                                           .seed = 1,
                                           .precision = o->precision,
                                           .ring_bytes = o->ring_bytes,
                                           .forward_only = true };
        first += tokens[r];
        pthread_create(&t[r].thread, NULL, run_rank, &t[r]);
    }
    for (uint32_t r = 0; r < o->ep; r++) {
        pthread_join(t[r].thread, NULL);
        code = t[r].code < 0 ? t[r].code : code;
    }
    return code;
}

static double error_of(const uint16_t *got, const double *want, size_t count)
{
    double *wide = calloc(count + 1, sizeof(*wide));
    for (size_t i = 0; i < count; i++)
        wide[i] = (double)workload_float(got[i]);
    double error = relative_error(wide, want, count);
    free(wide);
    return error;
}

static const struct problem_options cases[] = {
    { .hidden = 512, .intermediate = 256, .experts = 8, .topk = 2, .tokens = 500, .seed = 1 },
    { .hidden = 208,
      .intermediate = 144,
      .experts = 8,
      .topk = 3,
      .tokens = 77,
      .routing = ROUTE_DUPLICATES,
      .masked = 0.3,
      .weighting = WEIGHT_ZERO_NEGATIVE,
      .seed = 2 },
    { .hidden = 16, .intermediate = 16, .experts = 4, .topk = 1, .tokens = 9, .routing = ROUTE_HOT_EXPERT, .seed = 3 },
    { .hidden = 256, .intermediate = 128, .experts = 4, .topk = 6, .tokens = 300, .routing = ROUTE_ZIPF, .seed = 4 },
    { .hidden = 320,
      .intermediate = 192,
      .experts = 8,
      .topk = 2,
      .tokens = 200,
      .shared_intermediate = 96,
      .clamp = 0.5f,
      .seed = 5 },
    { .hidden = 128, .intermediate = 64, .experts = 4, .topk = 2, .tokens = 60, .masked = 1.0, .seed = 6 },
    { .hidden = 256, .intermediate = 128, .experts = 8, .topk = 4, .tokens = 3, .routing = ROUTE_HOT_RANK, .seed = 7 },
};

static void every_output_is_what_the_formulas_say_and_what_the_host_engine_gives(void **state)
{
    struct stack stack;
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, GPUS, GPUS), 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct problem p;
        struct result want;
        problem_make(&p, &cases[i]);
        result_alloc(&p, &want);
        oracle_run(&p, &want);
        size_t count = problem_rows_elements(&p);
        uint16_t *host = calloc(count + 1, 2), *gpu = calloc(count + 1, 2), *first = calloc(count + 1, 2);
        for (uint32_t ep = 1; ep <= GPUS; ep *= 2) {
            struct rng rng = { cases[i].seed };
            uint32_t tokens[GPUS];
            problem_cut(p.tokens, ep, &rng, tokens);
            struct run_options on_gpu = { .ep = ep, .repeats = REPEATS < 3 ? REPEATS : 3 },
                               on_host = { .ep = ep, .first_device = GPUS, .repeats = 1 };
            assert_int_equal(run(&stack, &p, tokens, &on_gpu, gpu), 0);
            assert_int_equal(run(&stack, &p, tokens, &on_host, host), 0);
            double error = error_of(gpu, want.array[RESULT_OUT], count),
                   theirs = error_of(host, want.array[RESULT_OUT], count);
            printf("case %zu ep %u: error %.2e, host engine %.2e\n", i, ep, error, theirs);
            if (!(error <= tolerance))
                fail_msg("case %zu, EP %u: relative error %g, at most %g", i, ep, error, tolerance);
            if (ep == 1)
                memcpy(first, gpu, count * 2);
            else if (memcmp(first, gpu, count * 2) != 0)
                fail_msg("case %zu: EP %u gives other bits than EP 1", i, ep);
        }
        free(host);
        free(gpu);
        free(first);
        result_free(&want);
        problem_free(&p);
    }
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_layer_in_mxfp8_is_what_the_host_engine_gives(void **state)
{
    static const size_t which[] = { 1, 4 };
    struct stack stack;
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, 2, 1), 0);
    for (size_t i = 0; i < sizeof(which) / sizeof(which[0]); i++) {
        struct problem p;
        problem_make(&p, &cases[which[i]]);
        size_t count = problem_rows_elements(&p);
        uint16_t *host = calloc(count + 1, 2), *gpu = calloc(count + 1, 2), *two = calloc(count + 1, 2);
        double *want = calloc(count + 1, sizeof(*want));
        const uint32_t halves[2] = { p.tokens / 3, p.tokens - p.tokens / 3 };
        struct run_options o = { .ep = 1, .repeats = 2, .precision = MOK_MXFP8_PER128 };
        assert_int_equal(run(&stack, &p, &p.tokens, &o, gpu), 0);
        o.ep = 2;
        assert_int_equal(run(&stack, &p, halves, &o, two), 0);
        assert_memory_equal(gpu, two, count * 2);
        o.ep = 1;
        o.first_device = 2;
        assert_int_equal(run(&stack, &p, &p.tokens, &o, host), 0);
        for (size_t e = 0; e < count; e++)
            want[e] = (double)workload_float(host[e]);
        double error = error_of(gpu, want, count);
        printf("case %zu in mxfp8: %.2e from the host engine\n", which[i], error);
        if (!(error <= 5e-3)) /* a sum on the other side of a rounding border is another code of h */
            fail_msg("case %zu in mxfp8: %g from the host engine, at most 5e-3", which[i], error);
        free(want);
        free(two);
        free(gpu);
        free(host);
        problem_free(&p);
    }
    assert_int_equal(stack_stop(&stack), 0);
}

static void repeats_have_the_same_bits_beside_a_clients_kernels(void **state)
{
    struct stack stack;
    struct problem p;
    const struct stack_options yielding = {
        .gpus = 2, .poll_us = 100, .daemon = gpu_daemon_lines(), .gpu_yield_us = 2 /* each block at every task */
    };
    (void)state;

    assert_int_equal(stack_start(&stack, &yielding), 0);
    problem_make(&p, &(struct problem_options){ .hidden = 512,
                                                .intermediate = 384,
                                                .experts = 8,
                                                .topk = 4,
                                                .tokens = 700,
                                                .routing = ROUTE_ZIPF,
                                                .seed = 9 });
    uint16_t *out = calloc(problem_rows_elements(&p), 2);
    uint32_t tokens[2] = { 400, 300 };
    double start = stack_now_ms();
    assert_int_equal(run(&stack, &p, tokens, &(struct run_options){ .ep = 2, .repeats = REPEATS, .beside = true }, out), 0);
    printf("%d forwards at EP 2 beside a client kernel each: %.0f ms\n", REPEATS, stack_now_ms() - start);
    free(out);
    problem_free(&p);
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_bad_expert_id_is_named_and_nothing_is_written(void **state)
{
    static const int32_t bad[] = { 8, INT32_MAX, -7 };
    const struct workload w = { .hidden = 64,
                                .intermediate = 32,
                                .experts = 8,
                                .topk = 2,
                                .ep = 1,
                                .max_tokens = 20,
                                .seed = 1,
                                .forward_only = true };
    struct stack stack;
    struct workload_rank rank;
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    assert_int_equal(workload_open(&rank, &w, 0, 20, 0, stack.socket, "bad", 0), 0);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        mok_ticket ticket;
        mok_result result = { 0 };
        workload_fill(&rank);
        workload_poison(&rank);
        uint64_t before = workload_hash(&rank);
        workload_copy((int32_t *)mok_buffer_data(rank.ids) + 2 * 7 + 1, &bad[i], 4);
        assert_int_equal(workload_forward(&rank, &ticket), 0);
        assert_int_equal(mok_wait(rank.session, ticket, WAIT_NS, &result), 0);
        assert_int_equal(result.code, -MOK_EEXPERT);
        assert_non_null(strstr(mok_last_error(), "token 7"));
        assert_true(workload_hash(&rank) == before);
    }
    workload_fill(&rank);
    assert_int_equal(forward(&rank), 0);
    workload_close(&rank);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ------------------------------------------------------------------ streams */

static const struct workload small = { .hidden = 256,
                                       .intermediate = 128,
                                       .experts = 8,
                                       .topk = 2,
                                       .ep = 1,
                                       .max_tokens = 200,
                                       .seed = 3,
                                       .forward_only = true };

static int submit(const struct workload_rank *r, cudaStream_t stream, mok_ticket *ret)
{
    mok_forward_args args = { .size = sizeof(args),
                              .tokens = r->tokens,
                              .x = { .buffer = r->x },
                              .ids = { .buffer = r->ids },
                              .topk_weight = { .buffer = r->weight },
                              .out = { .buffer = r->out } };
    return mok_layer_forward_on_stream(r->layer, &args, stream, ret);
}

static void an_operation_keeps_its_place_in_a_stream(void **state)
{
    struct stack stack;
    struct workload_rank rank;
    mok_ticket ticket[8];
    mok_result result;
    cudaStream_t stream;
    void *x, *out;
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    if (workload_open(&rank, &small, 0, 200, 0, stack.socket, "stream", 0) < 0)
        fail_msg("%s", mok_last_error());
    size_t bytes = mok_buffer_size(rank.out), x_bytes = mok_buffer_size(rank.x);
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda(cudaMallocHost(&x, x_bytes));
    cuda(cudaMallocHost(&out, bytes));
    assert_int_equal(forward(&rank), 0);
    uint64_t want = workload_hash(&rank);
    cuda(cudaMemcpy(x, mok_buffer_data(rank.x), x_bytes, cudaMemcpyDefault));

    for (int round = 0; round < ROUNDS; round++) {
        cuda(cudaMemset(mok_buffer_data(rank.x), 0, x_bytes));
        workload_poison(&rank);
        cuda(cudaDeviceSynchronize());
        assert_int_equal(busy_launch(1, 3000000, stream), 0); /* the inputs come late */
        cuda(cudaMemcpyAsync(mok_buffer_data(rank.x), x, x_bytes, cudaMemcpyDefault, stream));
        for (int i = 0; i < 8; i++)
            if (submit(&rank, stream, &ticket[i]) < 0)
                fail_msg("%s", mok_last_error());
        cuda(cudaMemcpyAsync(out, mok_buffer_data(rank.out), bytes, cudaMemcpyDefault, stream));
        if (round == 0)
            assert_int_equal(mok_poll(rank.session, ticket[0], &result), 0);
        cuda(cudaStreamSynchronize(stream));
        uint64_t hash = 0xcbf29ce484222325u;
        for (size_t i = 0; i < (size_t)rank.tokens * small.hidden * 2; i++)
            hash = (hash ^ ((uint8_t *)out)[i]) * 0x100000001b3u;
        assert_true(hash == want);
        for (int i = 0; i < 8; i++) {
            assert_int_equal(mok_wait(rank.session, ticket[i], WAIT_NS, &result), 0);
            assert_int_equal(result.code, 0);
            assert_int_equal(result.engine, MOK_DEVICE_CUDA);
        }
    }
    workload_close(&rank);
    cuda(cudaFreeHost(x));
    cuda(cudaFreeHost(out));
    cuda(cudaStreamDestroy(stream));
    assert_int_equal(stack_stop(&stack), 0);
}

/* `victim` is killed while the stream has yet to bring an operation's inputs. */
static void stream_goes_on(struct stack *stack, pid_t victim, struct workload_rank *rank, int want)
{
    cudaStream_t stream;
    mok_ticket ticket;
    mok_result result = { 0 };

    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (submit(rank, stream, &ticket) < 0)
        fail_msg("%s", mok_last_error());
    cuda(cudaStreamSynchronize(stream));
    assert_int_equal(mok_wait(rank->session, ticket, WAIT_NS, &result), 0);
    assert_int_equal(result.code, 0);
    assert_int_equal(busy_launch(1, 100000000, stream), 0);
    assert_int_equal(submit(rank, stream, &ticket), 0);
    kill(victim, SIGKILL);
    double start = stack_now_ms();
    cuda(cudaStreamSynchronize(stream));
    printf("stream released %.0f ms after the kill (its own kernel takes 100)\n", stack_now_ms() - start);
    assert_true(stack_now_ms() - start < SOON_MS);
    assert_int_equal(mok_wait(rank->session, ticket, WAIT_NS, &result), 0);
    assert_int_equal(result.code, want);
    cuda(cudaStreamDestroy(stream));
    (void)stack;
}

static void a_killed_worker_releases_streams_and_comes_back_with_all_memory(void **state)
{
    struct stack stack;
    struct workload_rank rank, again;
    mok_buffer *kept;
    pid_t worker[GPUS];
    char before[64], after[64] = "";
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    assert_int_equal(workload_open(&rank, &small, 0, 200, 0, stack.socket, "worker", 0), 0);
    assert_int_equal(mok_buffer_alloc_private(rank.session, 0, 64u << 20, &kept), 0);
    memset(before, 'k', sizeof(before));
    workload_copy((char *)mok_buffer_data(kept) + (63u << 20), before, sizeof(before));
    assert_int_equal(forward(&rank), 0);
    uint64_t want = workload_hash(&rank);
    assert_int_equal(stack_workers(&stack, worker, GPUS), 1);
    stream_goes_on(&stack, worker[0], &rank, -MOK_EWORKER);
    double start = stack_now_ms();
    int code = -1;
    while (code < 0 && stack_now_ms() - start < SOON_MS) {
        code = workload_open(&again, &small, 0, 200, 0, stack.socket, "again", 0);
        if (code < 0)
            sleep_ms(50);
    }
    assert_int_equal(code, 0);
    assert_int_equal(forward(&again), 0);
    printf("new operations worked %.0f ms after the worker's death was seen\n", stack_now_ms() - start);
    assert_true(stack_now_ms() - start < SOON_MS);
    assert_true(workload_hash(&again) == want);
    workload_copy(after, (char *)mok_buffer_data(kept) + (63u << 20), sizeof(after));
    assert_memory_equal(after, before, sizeof(after));
    workload_close(&again);
    workload_close(&rank);
    assert_int_equal(stack_stop(&stack), 0);
}

static void a_killed_mokd_releases_streams(void **state)
{
    struct stack stack;
    struct workload_rank rank;
    (void)state;

    assert_int_equal(gpu_stack_start(&stack, 1, 0), 0);
    assert_int_equal(workload_open(&rank, &small, 0, 200, 0, stack.socket, "mokd", 0), 0);
    stream_goes_on(&stack, stack.mokd, &rank, -MOK_EDAEMON);
    workload_close(&rank);
    stack_stop(&stack);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_output_is_what_the_formulas_say_and_what_the_host_engine_gives),
        cmocka_unit_test(a_layer_in_mxfp8_is_what_the_host_engine_gives),
        cmocka_unit_test(a_bad_expert_id_is_named_and_nothing_is_written),
        cmocka_unit_test(an_operation_keeps_its_place_in_a_stream),
        cmocka_unit_test(repeats_have_the_same_bits_beside_a_clients_kernels),
        cmocka_unit_test(a_killed_worker_releases_streams_and_comes_back_with_all_memory),
        cmocka_unit_test(a_killed_mokd_releases_streams),
    };
    gpu_or_skip();
    gpu_copies();
    /* Under MPS a process that dies while its kernels run takes the others on its GPU with it: ourselves. */
    if (gpu_mps())
        cmocka_set_skip_filter("a_killed_*");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
