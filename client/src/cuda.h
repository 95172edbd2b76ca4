/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the library asks of CUDA, and only once a CUDA device is used: libcuda.so.1 is found at run time, so that the
 * library needs neither it nor its headers. Must not be called in a forked child, and changes no caller's current
 * context.
 */
#ifndef MOK_CLIENT_CUDA_H
#define MOK_CLIENT_CUDA_H

#include <stdbool.h>
#include <stdint.h>

/* One GPU as this process sees it, with its primary context held. */
struct cuda_device;

/*
 * The GPU of a UUID. `mps_pipe`: directory of the MPS control daemon that the node's workers run under, "" for none; it
 * is put into the environment where CUDA has not started in this process yet. -MOK_ENOTSUP: no libcuda here, or too
 * old; -MOK_ENODEV: this process does not see the GPU; -MOK_ESHARING: CUDA runs here without that MPS; -MOK_EDEVICE;
 * all with a sentence.
 */
int cuda_open(const uint8_t uuid[16], const char *mps_pipe, struct cuda_device **ret);
/* The one whose context is current in this thread, for streams beside a host device. -MOK_ESTATE: none is. */
int cuda_open_current(struct cuda_device **ret);
void cuda_close(struct cuda_device *device); /* NULL is fine */

/* Memory that mokd sent; the descriptor stays the caller's. */
int cuda_map(struct cuda_device *device, int fd, uint64_t bytes, void **ret_address);
void cuda_unmap(struct cuda_device *device, void *address, uint64_t bytes);

/* Makes host memory usable by the GPU. */
int cuda_register(struct cuda_device *device, void *address, uint64_t bytes, uint64_t *ret_device_address);
void cuda_unregister(struct cuda_device *device, void *address);

/* Addresses of the words of a slot as the GPU sees them. */
struct cuda_words {
    uint64_t start, doorbell, done, passed;
};

/* Whether operations can be handed over on the stream; -MOK_ESTATE: it is being captured. */
int cuda_check_stream(struct cuda_device *device, void *stream);
/*
 * Makes the stream write `number` to start and doorbell, wait until done has reached it, and write it to passed. Waits
 * only where the stream can take no more.
 */
int cuda_hand_over(struct cuda_device *device, void *stream, const struct cuda_words *words, uint32_t number);

/* What a kernel of ours is launched with; its argument is one struct. */
struct cuda_launch {
    const char *kernel;
    uint32_t grid[3], threads, shared_bytes;
    const void *argument;
};

/*
 * Queues a kernel of the image (image.h) on a stream, NULL: the default one of the current context. -MOK_ENOTSUP: no
 * libcuda here, or too old, or the image has nothing for this GPU; -MOK_ESTATE: no context is current; -MOK_EDEVICE.
 */
int cuda_launch(const struct cuda_launch *launch, void *stream);

#endif
