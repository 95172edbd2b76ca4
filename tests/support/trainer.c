/* SPDX-License-Identifier: Apache-2.0 */
#include "trainer.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "stack.h"

enum { RECOVER_MS = 60000, NAP_US = 200 };

struct trainer_board {
    atomic_uint arrived, turn; /* of the barrier */
    atomic_int failed;         /* a rank that could not go on: its code */
    atomic_int steps, recoveries;
    atomic_int stop; /* somebody wants it to end */
    atomic_int last; /* then that many steps are all; 0: not yet */
    int code[TRAINER_RANKS];
    uint64_t hash[TRAINER_RANKS];
};

/* Spins politely, so that a rank that died makes the others end instead of hang. */
static int meet(struct trainer_board *board)
{
    unsigned turn = atomic_load(&board->turn);

    if (atomic_fetch_add(&board->arrived, 1) + 1 == TRAINER_RANKS) {
        atomic_store(&board->arrived, 0);
        atomic_fetch_add(&board->turn, 1);
        return 0;
    }
    while (atomic_load(&board->turn) == turn) {
        if (atomic_load(&board->failed))
            return -MOK_EPEER;
        usleep(NAP_US);
    }
    return 0;
}

/* The worst of all ranks' codes. */
static int agree(struct trainer_board *board, uint32_t rank, int code)
{
    int worst = 0;

    board->code[rank] = code;
    if (meet(board) < 0)
        return -MOK_EPEER;
    for (uint32_t r = 0; r < TRAINER_RANKS; r++)
        worst = board->code[r] < 0 && (worst == 0 || worst == -MOK_EDAEMON) ? board->code[r] : worst;
    return meet(board) < 0 ? -MOK_EPEER : worst;
}

static int wait_for(struct workload_rank *r, mok_ticket ticket)
{
    mok_result result = { 0 };
    int code = ticket ? mok_wait(r->session, ticket, -1, &result) : 0;
    return code < 0 ? code : result.code;
}

static int try_step(struct workload_rank *r)
{
    mok_ticket forward = 0, backward = 0;
    int code = workload_forward(r, &forward);

    if (code == 0)
        code = workload_backward(r, MOK_BACKWARD_OVERWRITE_WGRAD, &backward);
    int first = wait_for(r, forward), second = wait_for(r, backward);
    return code < 0 ? code : first < 0 ? first : second;
}

/* The next input is half this one and half what came of it. */
static void feed_back(struct workload_rank *r)
{
    uint64_t count = (uint64_t)r->tokens * r->problem->hidden;
    uint16_t *x = mok_buffer_data(r->x);
    const uint16_t *out = mok_buffer_data(r->out), *d_x = mok_buffer_data(r->d_x);

    for (uint64_t i = 0; i < count; i++)
        x[i] = workload_bf16(0.5f * workload_float(x[i]) + 0.25f * workload_float(out[i]) +
                             0.125f * workload_float(d_x[i]));
}

static int step(struct workload_rank *r, struct trainer_board *board)
{
    for (;;) {
        int code = agree(board, r->rank, try_step(r));
        if (code != -MOK_EDAEMON)
            return code;
        code = mok_session_recover(r->session, RECOVER_MS);
        if (code < 0) {
            fprintf(stderr, "rank %u cannot recover: %s\n", r->rank, mok_last_error());
            return code;
        }
        if (r->rank == 0)
            atomic_fetch_add(&board->recoveries, 1);
    }
}

static int train(const struct trainer_script *script, uint32_t rank, struct trainer_board *board)
{
    struct workload_rank r;
    int code = workload_open(&r, script->problem, rank, script->tokens, rank * script->tokens, script->socket,
                             script->group, script->devices[rank]);

    for (int i = 0; i < script->steps && code == 0; i++) {
        int last = atomic_load(&board->last);
        if (last && i >= last)
            break;
        /* The others know by their next step at the latest. */
        if (rank == 0 && !last && atomic_load(&board->stop))
            atomic_store(&board->last, i + 2);
        code = step(&r, board);
        if (code < 0)
            break;
        board->hash[rank] = board->hash[rank] * 0x100000001b3u + workload_hash(&r);
        feed_back(&r);
        if (rank == 0)
            atomic_store(&board->steps, i + 1);
        usleep((useconds_t)script->pause_us);
    }
    if (code < 0) {
        fprintf(stderr, "trainer %s rank %u: %s: %s\n", script->group, rank, mok_error_name(code), mok_last_error());
        atomic_store(&board->failed, code);
    }
    workload_close(&r);
    return code < 0;
}

int trainer_start(struct trainer *trainer, const struct trainer_script *script)
{
    *trainer = (struct trainer){ 0 };
    trainer->board = mmap(NULL, sizeof(*trainer->board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (trainer->board == MAP_FAILED)
        return -1;
    fflush(NULL);
    for (uint32_t rank = 0; rank < TRAINER_RANKS; rank++) {
        trainer->pid[rank] = fork();
        if (trainer->pid[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            _exit(train(script, rank, trainer->board));
        }
        if (trainer->pid[rank] < 0)
            return -1;
    }
    return 0;
}

int trainer_steps(const struct trainer *trainer)
{
    return atomic_load(&trainer->board->steps);
}

void trainer_stop(struct trainer *trainer)
{
    atomic_store(&trainer->board->stop, 1);
}

int trainer_recoveries(const struct trainer *trainer)
{
    return atomic_load(&trainer->board->recoveries);
}

int trainer_await(struct trainer *trainer, int steps, int timeout_ms)
{
    double end = stack_now_ms() + timeout_ms;

    while (trainer_steps(trainer) < steps) {
        if (atomic_load(&trainer->board->failed) || stack_now_ms() > end)
            return -1;
        usleep(1000);
    }
    return 0;
}

void trainer_kill_rank(struct trainer *trainer, uint32_t rank)
{
    if (trainer->pid[rank] <= 0)
        return;
    kill(trainer->pid[rank], SIGKILL);
    waitpid(trainer->pid[rank], NULL, 0);
    trainer->pid[rank] = 0;
}

void trainer_kill(struct trainer *trainer)
{
    for (uint32_t rank = 0; rank < TRAINER_RANKS; rank++)
        trainer_kill_rank(trainer, rank);
    munmap(trainer->board, sizeof(*trainer->board));
    trainer->board = NULL;
}

int trainer_join(struct trainer *trainer, int timeout_ms, uint64_t *ret_hash, int *ret_steps)
{
    double end = stack_now_ms() + timeout_ms;
    int code = 0;

    for (uint32_t rank = 0; rank < TRAINER_RANKS; rank++) {
        int status = 0;
        while (trainer->pid[rank] > 0 && stack_now_ms() < end) {
            if (waitpid(trainer->pid[rank], &status, WNOHANG) == trainer->pid[rank])
                trainer->pid[rank] = 0;
            else
                usleep(1000);
        }
        if (trainer->pid[rank] > 0)
            code = -1;
        else if (status != 0 && code == 0)
            code = atomic_load(&trainer->board->failed) ? atomic_load(&trainer->board->failed) : -1;
    }
    if (ret_steps)
        *ret_steps = trainer_steps(trainer);
    *ret_hash = trainer->board->hash[0] * 31 + trainer->board->hash[1];
    trainer_kill(trainer);
    return code;
}
