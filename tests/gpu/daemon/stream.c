/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations in the order of CUDA streams, many of them queued: same bits whatever comes between, streams that wait for
 * each other, several jobs over the same workers, and operations that fail, are cancelled or have nothing to do among
 * others that are well.
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

#include "busy.h"
#include "gpu.h"
#include "workload.h"

#ifdef MOK_EMULATED
#define WAIT_NS 300000000000
#define ROUNDS 2
#define JOB_ROUNDS 2
#define TURNS 1
#define TOKENS 40
#else
#define WAIT_NS 20000000000
#define ROUNDS 125 /* of QUEUED operations each */
#define JOB_ROUNDS 100
#define TURNS 100 /* of QUEUED operations of two ranks */
#define TOKENS 200
#endif
#define QUEUED 8

#define cuda(call) assert_int_equal(call, cudaSuccess)

static const struct workload alone = { .hidden = 256,
                                       .intermediate = 128,
                                       .experts = 8,
                                       .topk = 2,
                                       .ep = 1,
                                       .max_tokens = TOKENS,
                                       .seed = 5,
                                       .forward_only = true };

/* One for all tests: mokd and two workers on one GPU. */
static struct stack stack;

static int start(void **state)
{
    (void)state;
    return gpu_stack_start(&stack, 2, 0);
}

static int stop(void **state)
{
    (void)state;
    return stack_stop(&stack);
}

static void open_rank(struct workload_rank *rank, const struct workload *problem, uint32_t index, const char *group)
{
    if (workload_open(rank, problem, index, TOKENS, TOKENS * index, stack.socket, group, index) < 0)
        fail_msg("%s", mok_last_error());
}

static void open_stream(cudaStream_t *ret)
{
    cuda(cudaStreamCreateWithFlags(ret, cudaStreamNonBlocking));
}

static uint64_t output_bytes(const struct workload_rank *rank)
{
    return (uint64_t)rank->tokens * rank->problem->hidden * 2;
}

static int submit(struct workload_rank *r, mok_layer *layer, mok_buffer *ids, uint32_t tokens, cudaStream_t stream,
                  mok_ticket *ret)
{
    mok_forward_args args = { .size = sizeof(args),
                              .tokens = tokens,
                              .x = { .buffer = r->x },
                              .ids = { .buffer = ids },
                              .topk_weight = { .buffer = r->weight },
                              .out = { .buffer = r->out } };
    return mok_layer_forward_on_stream(layer, &args, (mok_stream)stream, ret);
}

static void submit_well(struct workload_rank *r, cudaStream_t stream, mok_ticket *ret)
{
    if (submit(r, r->layer, r->ids, r->tokens, stream, ret) < 0)
        fail_msg("%s", mok_last_error());
}

static int code_of(struct workload_rank *r, mok_ticket ticket)
{
    mok_result result = { 0 };

    assert_int_equal(mok_wait(r->session, ticket, WAIT_NS, &result), 0);
    return result.code;
}

/* What one operation alone gives. */
static uint8_t *wanted(struct workload_rank *rank)
{
    mok_result result = { 0 };
    uint8_t *want = malloc(output_bytes(rank));

    assert_non_null(want);
    assert_int_equal(workload_step(rank, &result, NULL), 0);
    workload_copy(want, mok_buffer_data(rank->out), output_bytes(rank));
    return want;
}

static uint32_t random_below(uint32_t bound)
{
    static uint32_t state = 12345;

    state = state * 1664525u + 1013904223u;
    return (state >> 8) % bound;
}

/* ------------------------------------------------------------------ the same bits */

static void queued_operations_have_the_same_bits_behind_delays_and_beside_kernels(void **state)
{
    struct workload_rank rank;
    cudaStream_t stream, beside;
    mok_ticket ticket[QUEUED];
    uint8_t *out;
    (void)state;

    open_rank(&rank, &alone, 0, "repeats");
    uint64_t bytes = output_bytes(&rank);
    uint8_t *want = wanted(&rank);
    open_stream(&stream);
    open_stream(&beside);
    cuda(cudaMallocHost((void **)&out, bytes * QUEUED));
    for (int round = 0; round < ROUNDS; round++) {
        memset(out, 0xee, bytes * QUEUED);
        assert_int_equal(busy_launch(16, random_below(200) * 1000, beside), 0);
        for (int i = 0; i < QUEUED; i++) {
            if (random_below(2))
                assert_int_equal(busy_launch(4, random_below(60) * 1000, stream), 0);
            cuda(cudaMemsetAsync(mok_buffer_data(rank.out), 0xff, bytes, stream));
            submit_well(&rank, stream, &ticket[i]);
            cuda(cudaMemcpyAsync(out + bytes * (uint64_t)i, mok_buffer_data(rank.out), bytes, cudaMemcpyDefault,
                                 stream));
        }
        cuda(cudaStreamSynchronize(stream));
        for (int i = 0; i < QUEUED; i++) {
            assert_memory_equal(out + bytes * (uint64_t)i, want, bytes);
            assert_int_equal(code_of(&rank, ticket[i]), 0);
        }
    }
    cuda(cudaStreamSynchronize(beside));
    cuda(cudaStreamDestroy(stream));
    cuda(cudaStreamDestroy(beside));
    cuda(cudaFreeHost(out));
    free(want);
    workload_close(&rank);
}

/* Runs of operations with the same arguments, which a device may then know, and others among them. */
static void change_arguments(const struct workload *problem, const uint32_t *tokens, int count)
{
    enum { COUNT = 16 };
    struct workload_rank rank;
    mok_ticket ticket[COUNT];
    cudaStream_t stream;
    uint8_t *out;

    assert_in_range(count, 1, COUNT);
    open_rank(&rank, problem, 0, "arguments");
    uint64_t bytes = output_bytes(&rank);
    uint8_t *want = wanted(&rank);
    open_stream(&stream);
    cuda(cudaMallocHost((void **)&out, bytes * (uint64_t)count));
    for (int i = 0; i < count; i++) {
        cuda(cudaMemsetAsync(mok_buffer_data(rank.out), 0xff, bytes, stream));
        assert_int_equal(submit(&rank, rank.layer, rank.ids, tokens[i], stream, &ticket[i]), 0);
        cuda(cudaMemcpyAsync(out + bytes * (uint64_t)i, mok_buffer_data(rank.out), bytes, cudaMemcpyDefault, stream));
    }
    cuda(cudaStreamSynchronize(stream));
    for (int i = 0; i < count; i++) {
        const uint8_t *one = out + bytes * (uint64_t)i;
        uint64_t written = bytes * tokens[i] / TOKENS;
        assert_int_equal(code_of(&rank, ticket[i]), 0);
        assert_memory_equal(one, want, written);
        for (uint64_t k = written; k < bytes; k++)
            assert_int_equal(one[k], 0xff);
    }
    cuda(cudaStreamDestroy(stream));
    cuda(cudaFreeHost(out));
    free(want);
    workload_close(&rank);
}

static void operations_whose_arguments_change_have_their_own_bits(void **state)
{
    static const uint32_t tokens[] = { TOKENS, TOKENS,     TOKENS,     TOKENS, TOKENS / 2, TOKENS / 2,
                                       TOKENS, TOKENS / 2, TOKENS / 2, 0,      TOKENS,     TOKENS };
    struct workload narrow = alone;
    (void)state;

    change_arguments(&alone, tokens, sizeof(tokens) / sizeof(tokens[0]));
    narrow.precision = MOK_MXFP8_PER128;
    change_arguments(&narrow, tokens, 5);
}

/* ------------------------------------------------------------------ streams that wait for each other */

static mok_layer *second_layer(struct workload_rank *r)
{
    mok_layer_options options = { .size = sizeof(options),
                                  .hidden = alone.hidden,
                                  .intermediate = alone.intermediate,
                                  .experts = alone.experts,
                                  .topk = alone.topk,
                                  .max_tokens = alone.max_tokens,
                                  .precision = MOK_BF16 };
    mok_layer_params params = {
        .size = sizeof(params), .gate = { .buffer = r->gate }, .up = { .buffer = r->up }, .down = { .buffer = r->down }
    };
    mok_layer *layer = NULL;

    if (mok_layer_create(r->group, &options, 30000, &layer) < 0 || mok_layer_bind(layer, &params) < 0)
        fail_msg("%s", mok_last_error());
    return layer;
}

/* A stream that stands until another one has come to a place behind its operations. */
struct latch {
    uint32_t *seen; /* the host's, that the other stream writes */
    void *one;      /* what it writes */
};

static void open_latch(struct latch *latch)
{
    cuda(cudaMallocHost((void **)&latch->seen, 4));
    cuda(cudaMalloc(&latch->one, 4));
    cuda(cudaMemset(latch->one, 1, 4));
}

static void close_latch(struct latch *latch)
{
    cuda(cudaFreeHost(latch->seen));
    cuda(cudaFree(latch->one));
}

static void CUDART_CB stand(void *argument)
{
    const struct timespec nap = { .tv_nsec = 100000 };

    while (!__atomic_load_n((uint32_t *)argument, __ATOMIC_ACQUIRE))
        nanosleep(&nap, NULL);
}

/* `first` is submitted first, and goes when `second` is over. */
static void in_the_other_order(struct latch *latch, struct workload_rank *first_rank, mok_layer *first,
                               cudaStream_t first_stream, struct workload_rank *second_rank, mok_layer *second,
                               cudaStream_t second_stream)
{
    mok_ticket ticket[2];

    *latch->seen = 0;
    workload_poison(first_rank);
    workload_poison(second_rank);
    cuda(cudaDeviceSynchronize());
    cuda(cudaLaunchHostFunc(first_stream, stand, latch->seen));
    assert_int_equal(submit(first_rank, first, first_rank->ids, TOKENS, first_stream, &ticket[0]), 0);
    assert_int_equal(busy_launch(1, random_below(100) * 1000, second_stream), 0);
    assert_int_equal(submit(second_rank, second, second_rank->ids, TOKENS, second_stream, &ticket[1]), 0);
    cuda(cudaMemcpyAsync(latch->seen, latch->one, 4, cudaMemcpyDefault, second_stream));
    assert_int_equal(code_of(second_rank, ticket[1]), 0);
    assert_int_equal(code_of(first_rank, ticket[0]), 0);
    cuda(cudaStreamSynchronize(first_stream));
    cuda(cudaStreamSynchronize(second_stream));
}

static void assert_output(struct workload_rank *rank, const uint8_t *want)
{
    uint8_t *out = malloc(output_bytes(rank));

    assert_non_null(out);
    workload_copy(out, mok_buffer_data(rank->out), output_bytes(rank));
    assert_memory_equal(out, want, output_bytes(rank));
    free(out);
}

static void the_streams_of_two_layers_come_in_the_other_order(void **state)
{
    struct workload_rank rank;
    struct latch latch;
    cudaStream_t one, two;
    (void)state;

    open_rank(&rank, &alone, 0, "layers");
    mok_layer *layer = second_layer(&rank);
    uint8_t *want = wanted(&rank);
    open_stream(&one);
    open_stream(&two);
    open_latch(&latch);
    for (int round = 0; round < ROUNDS; round++) {
        in_the_other_order(&latch, &rank, rank.layer, one, &rank, layer, two);
        assert_output(&rank, want);
    }
    close_latch(&latch);
    cuda(cudaStreamDestroy(one));
    cuda(cudaStreamDestroy(two));
    free(want);
    workload_close(&rank);
}

static void the_streams_of_two_sessions_wait_for_each_other(void **state)
{
    struct workload_rank rank[2];
    struct latch latch;
    cudaStream_t stream[2];
    (void)state;

    for (uint32_t i = 0; i < 2; i++) {
        open_rank(&rank[i], &alone, 0, i ? "b" : "a");
        open_stream(&stream[i]);
    }
    open_latch(&latch);
    uint8_t *want = wanted(rank);
    for (int round = 0; round < ROUNDS; round++) {
        int a = round & 1, b = !a;
        in_the_other_order(&latch, &rank[a], rank[a].layer, stream[a], &rank[b], rank[b].layer, stream[b]);
        assert_output(&rank[a], want);
        assert_output(&rank[b], want);
    }
    close_latch(&latch);
    cuda(cudaStreamDestroy(stream[0]));
    cuda(cudaStreamDestroy(stream[1]));
    free(want);
    workload_close(&rank[0]);
    workload_close(&rank[1]);
}

/* ------------------------------------------------------------------ two jobs over the same workers */

static const struct workload pair = { .hidden = 256,
                                      .intermediate = 128,
                                      .experts = 8,
                                      .topk = 2,
                                      .ep = 2,
                                      .max_tokens = TOKENS,
                                      .seed = 6,
                                      .forward_only = true };

struct member {
    pthread_t thread;
    uint32_t index;
    uint64_t hash[2];
    int code;
};

static int take_part(struct member *m, struct workload_rank *job, cudaStream_t *stream)
{
    mok_ticket ticket[2];
    mok_result result = { 0 };

    for (int round = 0; round < JOB_ROUNDS; round++) {
        for (uint32_t i = 0; i < 2; i++) { /* one rank begins with one job, the other with the other */
            uint32_t j = i ^ m->index;
            if (submit(&job[j], job[j].layer, job[j].ids, TOKENS, stream[j], &ticket[j]) < 0)
                return -1;
        }
        for (uint32_t j = 0; j < 2; j++) {
            if (mok_wait(job[j].session, ticket[j], WAIT_NS, &result) < 0 || result.code < 0 ||
                cudaStreamSynchronize(stream[j]) != cudaSuccess)
                return -1;
            uint64_t hash = workload_hash(&job[j]);
            if (round && hash != m->hash[j])
                return -2;
            m->hash[j] = hash;
            workload_poison(&job[j]);
        }
    }
    return 0;
}

static void *play(void *argument)
{
    struct member *m = argument;
    struct workload_rank job[2];
    cudaStream_t stream[2] = { NULL, NULL };

    for (uint32_t j = 0; j < 2 && m->code == 0; j++)
        m->code =
            workload_open(&job[j], &pair, m->index, TOKENS, TOKENS * m->index, stack.socket, j ? "y" : "x", m->index);
    for (uint32_t j = 0; j < 2 && m->code == 0; j++)
        m->code = cudaStreamCreateWithFlags(&stream[j], cudaStreamNonBlocking) == cudaSuccess ? 0 : -1;
    if (m->code == 0)
        m->code = take_part(m, job, stream);
    if (m->code < 0)
        fprintf(stderr, "rank %u: %s\n", m->index, mok_last_error());
    for (uint32_t j = 0; j < 2; j++) {
        cudaStreamDestroy(stream[j]);
        workload_close(&job[j]);
    }
    return NULL;
}

static void two_jobs_submit_to_the_same_workers_in_opposite_order(void **state)
{
    struct member m[2];
    (void)state;

    double start = stack_now_ms();
    for (uint32_t i = 0; i < 2; i++) {
        m[i] = (struct member){ .index = i };
        pthread_create(&m[i].thread, NULL, play, &m[i]);
    }
    for (uint32_t i = 0; i < 2; i++)
        pthread_join(m[i].thread, NULL);
    printf("%d rounds of two jobs: %.0f ms\n", JOB_ROUNDS, stack_now_ms() - start);
    for (uint32_t i = 0; i < 2; i++) {
        assert_int_equal(m[i].code, 0);
        assert_true(m[i].hash[0] == m[i].hash[1]); /* the same problem in both jobs */
    }
}

/* ------------------------------------------------------------------ queued operations of several ranks */

static int take_turns(struct member *m, struct workload_rank *rank, cudaStream_t stream)
{
    const uint64_t bytes = output_bytes(rank);
    mok_ticket ticket[QUEUED];
    mok_result result;
    uint8_t *out;
    int r = cudaMallocHost((void **)&out, bytes * QUEUED) == cudaSuccess ? 0 : -1;

    for (int round = 0; round < TURNS && r == 0; round++) {
        for (int i = 0; i < QUEUED && r == 0; i++) {
            if ((round + i + (int)m->index) % 3 == 0) /* now this rank is late, now the other */
                r = busy_launch(4, 40000, stream);
            cudaMemsetAsync(mok_buffer_data(rank->out), 0xff, bytes, stream);
            r = r ? r : submit(rank, rank->layer, rank->ids, i % 4 ? TOKENS : TOKENS / 2, stream, &ticket[i]);
            cudaMemcpyAsync(out + bytes * (uint64_t)i, mok_buffer_data(rank->out), bytes, cudaMemcpyDefault, stream);
        }
        r = r ? r : (int)cudaStreamSynchronize(stream);
        for (int i = 0; i < QUEUED && r == 0; i++) {
            uint64_t like = i % 4 ? 1 : 0;
            if (mok_wait(rank->session, ticket[i], WAIT_NS, &result) < 0 || result.code < 0)
                r = -1;
            else if (memcmp(out + bytes * (uint64_t)i, out + bytes * like, i % 4 ? bytes : bytes / 2) != 0)
                r = -2;
        }
        if (r == 0 && memcmp(out, out + bytes, bytes / 2) != 0) /* a token's row is its own */
            r = -3;
    }
    cudaFreeHost(out);
    return r;
}

static void *play_turns(void *argument)
{
    struct member *m = argument;
    struct workload_rank rank;
    cudaStream_t stream = NULL;

    m->code = workload_open(&rank, &pair, m->index, TOKENS, TOKENS * m->index, stack.socket, "turns", m->index);
    if (m->code == 0)
        m->code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess ? 0 : -1;
    if (m->code == 0)
        m->code = take_turns(m, &rank, stream);
    if (m->code != 0)
        fprintf(stderr, "rank %u: %d, %s\n", m->index, m->code, mok_last_error());
    cudaStreamDestroy(stream);
    workload_close(&rank);
    return NULL;
}

static void queued_operations_of_several_ranks_have_the_same_bits(void **state)
{
    struct member m[2];
    (void)state;

    for (uint32_t i = 0; i < 2; i++) {
        m[i] = (struct member){ .index = i };
        pthread_create(&m[i].thread, NULL, play_turns, &m[i]);
    }
    for (uint32_t i = 0; i < 2; i++)
        pthread_join(m[i].thread, NULL);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(m[i].code, 0);
}

/* ------------------------------------------------------------------ odd ones among others */

static void operations_that_fail_or_are_empty_leave_the_others_of_the_stream_alone(void **state)
{
    struct workload_rank rank;
    cudaStream_t stream;
    mok_ticket ticket[5];
    mok_buffer *bad;
    int32_t wrong = 8;
    (void)state;

    open_rank(&rank, &alone, 0, "odd");
    uint64_t bytes = output_bytes(&rank), ids_bytes = mok_buffer_size(rank.ids);
    uint8_t *want = wanted(&rank), *out = malloc(bytes);
    assert_int_equal(mok_buffer_alloc_private(rank.session, 0, ids_bytes, &bad), 0);
    open_stream(&stream);
    cuda(cudaMemcpy(mok_buffer_data(bad), mok_buffer_data(rank.ids), ids_bytes, cudaMemcpyDefault));
    cuda(cudaMemcpy((char *)mok_buffer_data(bad) + 20, &wrong, 4, cudaMemcpyDefault));
    for (int round = 0; round < ROUNDS; round++) {
        workload_poison(&rank);
        cuda(cudaDeviceSynchronize());
        assert_int_equal(busy_launch(1, 500000, stream), 0);
        assert_int_equal(submit(&rank, rank.layer, bad, rank.tokens, stream, &ticket[0]), 0);
        submit_well(&rank, stream, &ticket[1]);
        assert_int_equal(submit(&rank, rank.layer, rank.ids, 0, stream, &ticket[2]), 0);
        assert_int_equal(submit(&rank, rank.layer, bad, rank.tokens, stream, &ticket[3]), 0);
        submit_well(&rank, stream, &ticket[4]);
        cuda(cudaStreamSynchronize(stream));
        for (int i = 0; i < 5; i++)
            assert_int_equal(code_of(&rank, ticket[i]), i == 0 || i == 3 ? -MOK_EEXPERT : 0);
        workload_copy(out, mok_buffer_data(rank.out), bytes);
        assert_memory_equal(out, want, bytes);
    }
    /* a token of NaN is its own matter */
    uint64_t row = alone.hidden * 2;
    cuda(cudaMemset((char *)mok_buffer_data(rank.x) + 3 * row, 0xff, row));
    cuda(cudaDeviceSynchronize());
    submit_well(&rank, stream, &ticket[0]);
    cuda(cudaStreamSynchronize(stream));
    assert_int_equal(code_of(&rank, ticket[0]), 0);
    workload_copy(out, mok_buffer_data(rank.out), bytes);
    for (uint32_t t = 0; t < TOKENS; t++)
        if (t != 3)
            assert_memory_equal(out + t * row, want + t * row, row);
    for (uint64_t i = 0; i < alone.hidden; i++) {
        float value = workload_float(((uint16_t *)(void *)(out + 3 * row))[i]);
        assert_true(value != value);
    }
    cuda(cudaStreamDestroy(stream));
    free(out);
    free(want);
    workload_close(&rank);
}

static void an_operation_that_waits_for_its_stream_can_be_cancelled(void **state)
{
    struct workload_rank rank;
    cudaStream_t stream;
    mok_ticket ticket[3];
    (void)state;

    open_rank(&rank, &alone, 0, "cancel");
    uint64_t bytes = output_bytes(&rank);
    uint8_t *want = wanted(&rank), *out = malloc(bytes);
    open_stream(&stream);
    for (int round = 0; round < ROUNDS; round++) {
        workload_poison(&rank);
        cuda(cudaDeviceSynchronize());
        assert_int_equal(busy_launch(1, 3000000, stream), 0);
        for (int i = 0; i < 3; i++)
            submit_well(&rank, stream, &ticket[i]);
        int r = mok_cancel(rank.session, ticket[0]);
        assert_true(r == 0 || r == -MOK_EBUSY || r == -MOK_ENOENT);
        int code = code_of(&rank, ticket[0]);
        assert_int_equal(code, r == 0 ? -MOK_ECANCELED : 0);
        assert_int_equal(code_of(&rank, ticket[1]), 0);
        assert_int_equal(code_of(&rank, ticket[2]), 0);
        cuda(cudaStreamSynchronize(stream));
        workload_copy(out, mok_buffer_data(rank.out), bytes);
        assert_memory_equal(out, want, bytes);
    }
    cuda(cudaStreamDestroy(stream));
    free(out);
    free(want);
    workload_close(&rank);
}

/* A stream that comes late holds up nobody who opens, maps, runs or leaves meanwhile. */
static void others_come_and_go_while_a_stream_is_late(void **state)
{
    struct workload_rank rank, other;
    struct latch latch;
    cudaStream_t stream;
    mok_ticket ticket;
    mok_result result = { 0 };
    (void)state;

    open_rank(&rank, &alone, 0, "late");
    open_stream(&stream);
    open_latch(&latch);
    uint8_t *want = wanted(&rank);
    *latch.seen = 0;
    cuda(cudaDeviceSynchronize());
    cuda(cudaLaunchHostFunc(stream, stand, latch.seen));
    submit_well(&rank, stream, &ticket);
    for (int i = 0; i < 2; i++) {
        open_rank(&other, &alone, 0, "meanwhile");
        free(wanted(&other));
        workload_close(&other);
    }
    assert_int_equal(mok_poll(rank.session, ticket, &result), 0);
    __atomic_store_n(latch.seen, 1, __ATOMIC_RELEASE);
    assert_int_equal(code_of(&rank, ticket), 0);
    cuda(cudaStreamSynchronize(stream));
    assert_output(&rank, want);
    close_latch(&latch);
    cuda(cudaStreamDestroy(stream));
    free(want);
    workload_close(&rank);
}

/* ------------------------------------------------------------------ a client with habits */

/* As many as make its next operation foreseeable. */
static void keep_to_a_habit(struct workload_rank *rank, cudaStream_t stream, const uint8_t *want)
{
    mok_ticket ticket;

    for (int i = 0; i < 4; i++) {
        cuda(cudaMemsetAsync(mok_buffer_data(rank->out), 0xff, output_bytes(rank), stream));
        submit_well(rank, stream, &ticket);
        assert_int_equal(code_of(rank, ticket), 0);
        cuda(cudaStreamSynchronize(stream));
        assert_output(rank, want);
    }
}

static void assert_untouched(struct workload_rank *rank, uint64_t from)
{
    uint64_t bytes = output_bytes(rank);
    uint8_t *out = malloc(bytes);

    assert_non_null(out);
    workload_copy(out, mok_buffer_data(rank->out), bytes);
    for (uint64_t i = from; i < bytes; i++)
        assert_int_equal(out[i], 0xff);
    free(out);
}

static void an_operation_that_was_to_be_expected_runs_when_it_comes_and_no_other_in_its_place(void **state)
{
    const struct timespec moment = { .tv_nsec = 2000000 };
    struct workload_rank rank, other;
    cudaStream_t stream;
    mok_ticket ticket;
    (void)state;

    open_rank(&rank, &alone, 0, "habit");
    open_rank(&other, &alone, 0, "another");
    open_stream(&stream);
    uint64_t bytes = output_bytes(&rank);
    uint8_t *want = wanted(&rank), *its = malloc(bytes);
    for (int round = 0; round < TURNS; round++) {
        keep_to_a_habit(&rank, stream, want);
        cuda(cudaMemset(mok_buffer_data(rank.out), 0xff, bytes));
        nanosleep(&moment, NULL);
        assert_untouched(&rank, 0);
        /* the same, with inputs that come late */
        cuda(cudaMemset(mok_buffer_data(rank.x), 0, bytes));
        assert_int_equal(busy_launch(1, 500000, stream), 0);
        cuda(cudaMemcpyAsync(mok_buffer_data(rank.x), mok_buffer_data(other.x), bytes, cudaMemcpyDefault, stream));
        submit_well(&rank, stream, &ticket);
        assert_int_equal(code_of(&rank, ticket), 0);
        assert_output(&rank, want);
        /* another one */
        cuda(cudaMemset(mok_buffer_data(rank.out), 0xff, bytes));
        assert_int_equal(submit(&rank, rank.layer, rank.ids, TOKENS / 2, stream, &ticket), 0);
        assert_int_equal(code_of(&rank, ticket), 0);
        workload_copy(its, mok_buffer_data(rank.out), bytes);
        assert_memory_equal(its, want, bytes / 2);
        assert_untouched(&rank, bytes / 2);
        /* somebody else's */
        keep_to_a_habit(&rank, stream, want);
        cuda(cudaMemset(mok_buffer_data(rank.out), 0xff, bytes));
        uint8_t *theirs = wanted(&other);
        assert_memory_equal(theirs, want, bytes);
        free(theirs);
        assert_untouched(&rank, 0);
    }
    keep_to_a_habit(&rank, stream, want);
    cuda(cudaStreamDestroy(stream));
    free(its);
    free(want);
    workload_close(&rank); /* while it is expected */
    workload_close(&other);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(queued_operations_have_the_same_bits_behind_delays_and_beside_kernels),
        cmocka_unit_test(operations_whose_arguments_change_have_their_own_bits),
        cmocka_unit_test(the_streams_of_two_layers_come_in_the_other_order),
        cmocka_unit_test(the_streams_of_two_sessions_wait_for_each_other),
        cmocka_unit_test(queued_operations_of_several_ranks_have_the_same_bits),
        cmocka_unit_test(two_jobs_submit_to_the_same_workers_in_opposite_order),
        cmocka_unit_test(operations_that_fail_or_are_empty_leave_the_others_of_the_stream_alone),
        cmocka_unit_test(an_operation_that_waits_for_its_stream_can_be_cancelled),
        cmocka_unit_test(others_come_and_go_while_a_stream_is_late),
        cmocka_unit_test(an_operation_that_was_to_be_expected_runs_when_it_comes_and_no_other_in_its_place),
    };
    /* Streams that share a queue of the hardware would wait for each other: a process has eight, unless it says more.
     */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
    gpu_or_skip();
    gpu_copies();
    return cmocka_run_group_tests(tests, start, stop);
}
