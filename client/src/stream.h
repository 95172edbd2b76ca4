/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The slots of one queue by which CUDA streams hand operations over (ring_abi.h), as the client has them. The caller
 * locks, but for stream_hand_over, which may wait for the GPU. Memory that a stream may still look at is never
 * unmapped.
 */
#ifndef MOK_CLIENT_STREAM_H
#define MOK_CLIENT_STREAM_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda.h"
#include "mok/ring_abi.h"

struct stream_page {
    struct stream_page *next;
    struct cuda_device *device;
    struct mok_stream_slot *slot; /* [count] */
    uint64_t bytes, device_address;
    uint32_t queue; /* id */
    uint32_t count, turn;
    struct stream_use {
        uint32_t number; /* of the last operation */
        bool busy;       /* until that has completed */
    } * use;
};

/* Maps what mokd sent, and makes the GPU see it. The device stays the caller's. */
int stream_page_open(int fd, uint64_t bytes, uint32_t count, struct cuda_device *device, struct stream_page **ret);
/* Releases all streams; unmaps if they have passed within a moment, else leaves the memory where it is. */
void stream_page_close(struct stream_page *page);

/* A slot that no stream looks at, with its next number; -MOK_EAGAIN with a sentence. */
int stream_take(struct stream_page *page, uint32_t *ret_slot);
/* Whether an operation can be handed over on the stream. */
int stream_check(struct stream_page *page, void *stream);
/* Queues the hand-over on the stream. */
int stream_hand_over(struct stream_page *page, uint32_t slot, void *stream);
/* Nothing was queued: no stream will ever pass at this number. */
void stream_forget(struct stream_page *page, uint32_t slot);
/* The operation is over: releases its stream unless the worker has, and gives the slot back. */
void stream_end(struct stream_page *page, uint32_t slot);

#endif
