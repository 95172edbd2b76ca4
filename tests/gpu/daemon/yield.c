/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a client's kernel waits for while an operation runs, and what the operation loses by it: a device that leaves SMs
 * alone, and one whose blocks make room. Prints a line of JSON for each, medians; the bits must be the same for all.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "busy.h"
#include "gpu.h"
#include "workload.h"

#define ROUNDS 12
#define WARM 3
#define CLIENT_BLOCKS 16
#define CLIENT_US 50

static const struct workload kimi = { .hidden = 7168,
                                      .intermediate = 2048,
                                      .experts = 8,
                                      .topk = 8,
                                      .ep = 1,
                                      .max_tokens = 2048,
                                      .context_mode = MOK_CONTEXT_FULL,
                                      .seed = 1,
                                      .repeated = true };

static void cuda(cudaError_t e)
{
    if (e != cudaSuccess)
        fail_msg("%s", cudaGetErrorString(e));
}

static void submit(struct workload_rank *r, bool backward, cudaStream_t stream, mok_ticket *ret)
{
    mok_forward_args f = { .size = sizeof(f),
                           .tokens = r->tokens,
                           .context_mode = kimi.context_mode,
                           .x = MOK_VIEW(r->x),
                           .ids = MOK_VIEW(r->ids),
                           .topk_weight = MOK_VIEW(r->weight),
                           .out = MOK_VIEW(r->out),
                           .context = MOK_VIEW(r->context) };
    mok_backward_args b = { .size = sizeof(b),
                            .tokens = r->tokens,
                            .context_mode = kimi.context_mode,
                            .flags = MOK_BACKWARD_OVERWRITE_WGRAD,
                            .x = MOK_VIEW(r->x),
                            .context = MOK_VIEW(r->context),
                            .d_out = MOK_VIEW(r->d_out),
                            .d_x = MOK_VIEW(r->d_x),
                            .d_topk_weight = MOK_VIEW(r->d_weight) };
    int code = backward ? mok_layer_backward_on_stream(r->layer, &b, (mok_stream)stream, ret) :
                          mok_layer_forward_on_stream(r->layer, &f, (mok_stream)stream, ret);

    if (code < 0)
        fail_msg("%s", mok_last_error());
}

struct figures {
    double alone, beside, waits; /* ms */
};

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values)
{
    qsort(values + WARM, ROUNDS - WARM, sizeof(*values), by_value);
    return values[WARM + (ROUNDS - WARM) / 2];
}

static double between(cudaEvent_t from, cudaEvent_t to)
{
    float ms;

    cuda(cudaEventElapsedTime(&ms, from, to));
    return (double)ms;
}

/* Rounds alone and beside the client's kernel take turns. */
static void measure(struct workload_rank *rank, bool backward, int priority, struct figures *ret)
{
    double alone[ROUNDS], beside[ROUNDS], waits[ROUNDS];
    cudaStream_t stream, side;
    cudaEvent_t event[4];
    mok_result result;
    mok_ticket ticket;

    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda(cudaStreamCreateWithPriority(&side, cudaStreamNonBlocking, priority));
    for (int i = 0; i < 4; i++)
        cuda(cudaEventCreate(&event[i]));
    for (int i = 0; i < 2 * ROUNDS; i++) {
        cuda(cudaEventRecord(event[0], stream));
        submit(rank, backward, stream, &ticket);
        cuda(cudaEventRecord(event[1], stream));
        if (i % 2) {
            usleep(700); /* the operation is under way */
            cuda(cudaEventRecord(event[2], side));
            assert_int_equal(busy_launch(CLIENT_BLOCKS, CLIENT_US * 1000, side), 0);
            cuda(cudaEventRecord(event[3], side));
        }
        cuda(cudaStreamSynchronize(stream));
        cuda(cudaStreamSynchronize(side));
        assert_int_equal(mok_wait(rank->session, ticket, INT64_C(30000000000), &result), 0);
        assert_int_equal(result.code, 0);
        (i % 2 ? beside : alone)[i / 2] = between(event[0], event[1]);
        if (i % 2)
            waits[i / 2] = between(event[2], event[3]) - CLIENT_US * 1e-3;
    }
    *ret = (struct figures){ median(alone), median(beside), median(waits) };
    for (int i = 0; i < 4; i++)
        cuda(cudaEventDestroy(event[i]));
    cuda(cudaStreamDestroy(stream));
    cuda(cudaStreamDestroy(side));
}

/* Of what is small enough to be looked at in no time. */
static uint64_t hash_of(const struct workload_rank *r)
{
    mok_buffer *buffers[] = { r->out, r->d_x, r->d_weight };
    uint64_t hash = 0xcbf29ce484222325u;

    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        uint64_t bytes = mok_buffer_size(buffers[i]);
        uint8_t *values = malloc(bytes);
        assert_non_null(values);
        workload_copy(values, mok_buffer_data(buffers[i]), bytes);
        for (uint64_t k = 0; k < bytes; k++)
            hash = (hash ^ values[k]) * 0x100000001b3u;
        free(values);
    }
    return hash;
}

static unsigned asked[8], asked_count; /* yield_us of the command line */

static void a_clients_kernel_finds_room_and_no_bit_changes(void **state)
{
    static const struct {
        unsigned reserve_sms, yield_us;
    } ways[] = { { 0, 0 }, { 16, 0 }, { 0, 100 }, { 0, 200 }, { 0, 400 } };
    const char *worker = getenv("MOK_TEST_WORKER"), *mps = gpu_daemon_lines();
    uint64_t first = 0;
    char lines[600];
    (void)state;

    snprintf(lines, sizeof(lines), "%s\n%s%s", mps ? mps : "", worker ? "worker = " : "", worker ? worker : "");
    for (size_t i = 0; i < (asked_count ? asked_count : sizeof(ways) / sizeof(ways[0])); i++) {
        unsigned reserve_sms = asked_count ? 0 : ways[i].reserve_sms, yield_us = asked_count ? asked[i] : ways[i].yield_us;
        struct stack_options options = {
            .gpus = 1, .poll_us = 20000, .daemon = lines, .gpu_reserve = reserve_sms, .gpu_yield_us = yield_us
        };
        struct workload_rank rank;
        struct figures figures;
        struct stack stack;

        assert_int_equal(stack_start(&stack, &options), 0);
        if (workload_open(&rank, &kimi, 0, kimi.max_tokens, 0, stack.socket, "yield", 0) < 0)
            fail_msg("%s", mok_last_error());
        for (int what = 0; what < 4; what++) {
            measure(&rank, what / 2, what % 2 ? 0 : -1, &figures);
            printf("{\"op\":\"%s\",\"sharing\":\"%s\",\"reserve_sms\":%u,\"yield_us\":%u,\"client_priority\":%d,"
                   "\"alone_ms\":%.4f,\"beside_ms\":%.4f,\"waits_us\":%.1f}\n",
                   what / 2 ? "backward" : "forward", mps ? "mps" : "slices", reserve_sms, yield_us,
                   what % 2 ? 0 : -1, figures.alone, figures.beside, figures.waits * 1e3);
            fflush(stdout);
        }
        uint64_t hash = hash_of(&rank);
        first = i ? first : hash;
        assert_true(hash == first);
        workload_close(&rank);
        assert_int_equal(stack_stop(&stack), 0);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_clients_kernel_finds_room_and_no_bit_changes),
    };

    for (int i = 1; i < argc && asked_count < 8; i++)
        asked[asked_count++] = (unsigned)strtoul(argv[i], NULL, 10);
    gpu_or_skip();
    gpu_copies();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
