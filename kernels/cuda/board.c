/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Boards (../board.h) of a CUDA device: copies between pinned host memory and the board, wherever in the fabric that
 * is, in the order of one stream of their own. No kernel takes part, so a megakernel that has all SMs does not hold
 * them up.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../board.h"
#include "engine_layer.h"

/* Posts whose copy may be under way; between two looks there are three at most. */
#define POSTS 8u

/* What the copies use, in pinned memory; behind it two readings of all slots. */
struct staged {
    struct mok_board_slot post[POSTS];
    struct mok_board_slot reading[];
};

struct mok_engine_board {
    struct mok_engine *engine;
    struct mok_board_slot *memory; /* of some device */
    struct staged *staged;
    uint32_t slots;
    uint32_t posts, copied; /* since it was opened: begun; known to be there */
    uint32_t posts_before;  /* those that the look under way comes after */
    bool looking;
    cudaEvent_t looked;
};

static int say(struct mok_message *message, int code, const char *what)
{
    if (message)
        snprintf(message->text, sizeof(message->text), "readying the board of a layer's flags: %s", what);
    return code;
}

static int lost(cudaError_t e)
{
    return e == cudaSuccess ? 0 : -MOK_EDEVICE;
}

void mok_cuda_board_close(struct mok_engine_board *board)
{
    if (!board)
        return;
    cudaSetDevice((int)board->engine->config.index);
    cudaStreamSynchronize(board->engine->boards);
    if (board->looked)
        cudaEventDestroy(board->looked);
    cudaFreeHost(board->staged);
    free(board);
}

int mok_cuda_board_open(struct mok_engine *engine, void *memory, uint32_t slots, struct mok_engine_board **ret,
                        struct mok_message *message)
{
    struct mok_engine_board *board = calloc(1, sizeof(*board));
    size_t bytes = sizeof(struct staged) + 2 * mok_board_bytes(slots);

    if (!board)
        return say(message, -MOK_ENOMEM, "no memory");
    board->engine = engine;
    board->memory = memory;
    board->slots = slots;
    cudaError_t e = cudaSetDevice((int)engine->config.index);
    if (e == cudaSuccess)
        e = cudaHostAlloc((void **)&board->staged, bytes, cudaHostAllocPortable);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&board->looked, cudaEventDisableTiming);
    if (e != cudaSuccess) {
        mok_cuda_board_close(board);
        return say(message, e == cudaErrorMemoryAllocation ? -MOK_ENOMEM : -MOK_EDEVICE, cudaGetErrorString(e));
    }
    *ret = board;
    return 0;
}

int mok_cuda_board_post(struct mok_engine_board *board, uint32_t slot, const struct mok_board_slot *what)
{
    struct mok_board_slot *place = &board->staged->post[board->posts % POSTS];

    cudaSetDevice((int)board->engine->config.index);
    if (board->posts - board->copied >= POSTS) {
        if (cudaStreamSynchronize(board->engine->boards) != cudaSuccess)
            return -MOK_EDEVICE;
        board->copied = board->posts;
    }
    *place = *what;
    board->posts++;
    return lost(cudaMemcpyAsync(&board->memory[slot], place, sizeof(*place), cudaMemcpyDefault, board->engine->boards));
}

/* The second copy begins when the first has ended, as copies of one stream do. */
int mok_cuda_board_look(struct mok_engine_board *board)
{
    const size_t bytes = mok_board_bytes(board->slots);
    cudaStream_t stream = board->engine->boards;

    if (board->looking)
        return -MOK_EBUSY;
    cudaSetDevice((int)board->engine->config.index);
    for (uint32_t i = 0; i < 2; i++)
        if (cudaMemcpyAsync(&board->staged->reading[i * board->slots], board->memory, bytes, cudaMemcpyDefault,
                            stream) != cudaSuccess)
            return -MOK_EDEVICE;
    board->posts_before = board->posts;
    board->looking = true;
    return lost(cudaEventRecord(board->looked, stream));
}

int mok_cuda_board_poll(struct mok_engine_board *board, const struct mok_board_slot **ret_first,
                        const struct mok_board_slot **ret_second)
{
    if (!board->looking)
        return 0;
    cudaError_t e = cudaEventQuery(board->looked);
    if (e == cudaErrorNotReady)
        return 0;
    board->looking = false;
    if (e != cudaSuccess)
        return -MOK_EDEVICE;
    board->copied = board->posts_before;
    *ret_first = board->staged->reading;
    *ret_second = board->staged->reading + board->slots;
    return 1;
}
