/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A board of flags in device memory, as ranks on several hosts use it: two engines, on two GPUs where there are two,
 * each with its own mapping, post and look; the dispatcher's state machine runs over it. Skipped where there is no GPU.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "board.h"
#include "busy.h"
#include "device.h"

#define RANKS 2u
#define ROUNDS 2000

struct rank {
    struct mok_engine *engine;
    struct mok_engine_board *board;
    void *memory;
    struct mok_board state;
    struct mok_dispatch_view view;
    struct mok_dispatch_op op;
    bool looking;
    uint64_t seq;
    unsigned looks, thrown;
};

static const struct mok_engine_ops *ops(void)
{
    return mok_engine_find(MOK_DEVICE_CUDA);
}

static double now_us(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

/* Rank 0's memory, mapped by both. Returns the number of GPUs. */
static int open_ranks(struct rank rank[RANKS], uint32_t slots)
{
    struct mok_message message = { { 0 } };
    int gpus = 0, fd = -1;

    assert_int_equal(cudaGetDeviceCount(&gpus), 0);
    memset(rank, 0, RANKS * sizeof(*rank));
    for (uint32_t r = 0; r < RANKS; r++) {
        struct mok_engine_config config = { .index = gpus > 1 ? r : 0 };
        if (ops()->open(&config, &rank[r].engine, &message) < 0)
            fail_msg("%s", message.text);
    }
    assert_int_equal(ops()->memory_alloc(rank[0].engine, mok_board_bytes(slots), &fd, NULL, &message), 0);
    for (uint32_t r = 0; r < RANKS; r++) {
        if (ops()->memory_map(rank[r].engine, fd, mok_board_bytes(slots), &rank[r].memory, &message) < 0 ||
            ops()->board_open(rank[r].engine, rank[r].memory, slots, &rank[r].board, &message) < 0)
            fail_msg("rank %u: %s", r, message.text);
        mok_board_begin(&rank[r].state, slots, r, &rank[r].view);
    }
    close(fd);
    return gpus > 1 ? 2 : 1;
}

static void close_ranks(struct rank rank[RANKS], uint32_t slots)
{
    for (uint32_t r = 0; r < RANKS; r++) {
        ops()->board_close(rank[r].board);
        ops()->memory_unmap(rank[r].engine, rank[r].memory, mok_board_bytes(slots));
        ops()->close(rank[r].engine);
    }
}

static void post(struct rank *rank)
{
    struct mok_board_slot slot;

    mok_board_post(&rank->state, &slot);
    assert_int_equal(ops()->board_post(rank->board, rank->state.rank, &slot), 0);
}

/* Takes a look that has ended, and begins the next. */
static void look(struct rank *rank)
{
    const struct mok_board_slot *first, *second;
    bool moved;

    if (rank->looking) {
        int r = ops()->board_poll(rank->board, &first, &second);
        assert_true(r >= 0);
        if (r == 0)
            return;
        rank->looks++;
        rank->thrown += !mok_board_take(&rank->state, first, second, &moved);
    }
    assert_int_equal(ops()->board_look(rank->board), 0);
    assert_int_equal(ops()->board_look(rank->board), -MOK_EBUSY);
    rank->looking = true;
}

static void what_one_posts_the_other_sees_whole_and_in_order(void **state)
{
    struct rank rank[RANKS];
    uint64_t seen = 0;

    (void)state;
    int gpus = open_ranks(rank, 128);
    double start = now_us();
    for (uint64_t n = 1; n <= ROUNDS; n++) {
        rank[1].state.own.ready = n;
        rank[1].state.own.info.x_offset = n * 3;
        post(&rank[1]);
        if (n % 20) /* many behind each other, too */
            continue;
        while (rank[0].view.flags[1]->ready < n) {
            look(&rank[0]);
            assert_true(rank[0].view.flags[1]->ready >= seen);
            seen = rank[0].view.flags[1]->ready;
            assert_int_equal(rank[0].view.flags[1]->info.x_offset, 3 * seen);
            assert_true(now_us() - start < 60e6);
        }
    }
    printf("%u posts on %d GPUs: %.1f us each, %u looks, %u of them not whole\n", ROUNDS, gpus,
           (now_us() - start) / ROUNDS, rank[0].looks, rank[0].thrown);
    close_ranks(rank, 128);
}

static double run_operations(struct rank rank[RANKS], uint64_t count)
{
    const struct mok_op_result well = { 0 };
    double start = now_us();

    while (rank[0].seq <= count || rank[1].seq <= count) {
        for (uint32_t r = 0; r < RANKS; r++) {
            struct rank *me = &rank[r];
            bool moved;
            if (me->seq == 0 || me->op.state == MOK_ST_DONE)
                mok_dispatch_begin(&me->op, ++me->seq, &(struct mok_op_info){ .kind = MOK_KIND_FORWARD });
            switch (mok_dispatch_step(&me->op, &me->view, 1, &moved)) {
            case MOK_ACT_WAIT:
            case MOK_ACT_COMPLETE:
                break;
            default:
                mok_dispatch_phase_done(&me->op, &well);
            }
            if (moved)
                post(me);
            if (me->op.state == MOK_ST_READY || me->op.state == MOK_ST_PUSHED)
                look(me);
            assert_int_equal(me->op.result.status, 0);
            assert_true(now_us() - start < 60e6);
        }
    }
    return (now_us() - start) / (double)count;
}

static void operations_run_over_it(void **state)
{
    struct rank rank[RANKS];

    (void)state;
    int gpus = open_ranks(rank, RANKS);
    double us = run_operations(rank, ROUNDS / 4);
    printf("%d operations of %u ranks on %d GPUs: %.1f us each for both hand-overs, %u + %u looks\n", ROUNDS / 4, RANKS,
           gpus, us, rank[0].looks, rank[1].looks);
    close_ranks(rank, RANKS);
}

/* The kernel is of this process, on the GPU that has the board. */
static void a_kernel_that_has_all_sms_does_not_hold_it_up(void **state)
{
    struct rank rank[RANKS];
    cudaStream_t stream;

    (void)state;
    open_ranks(rank, RANKS);
    run_operations(rank, 1);
    assert_int_equal(cudaSetDevice(0), cudaSuccess);
    assert_int_equal(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    assert_int_equal(busy_launch(1u << 13, 100000000, stream), 0); /* far more than fit at once */
    double us = run_operations(rank, 10);
    cudaError_t e = cudaStreamQuery(stream);
    printf("beside a kernel on all SMs: %.1f us each\n", us);
#ifndef MOK_EMULATED /* whose SMs nobody waits for */
    assert_int_equal(e, cudaErrorNotReady);
#else
    (void)e;
#endif
    assert_int_equal(cudaStreamSynchronize(stream), cudaSuccess);
    assert_int_equal(cudaStreamDestroy(stream), cudaSuccess);
    close_ranks(rank, RANKS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_one_posts_the_other_sees_whole_and_in_order),
        cmocka_unit_test(operations_run_over_it),
        cmocka_unit_test(a_kernel_that_has_all_sms_does_not_hold_it_up),
    };

    device_or_skip();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
