/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a test without CUDA's headers may do with the emulated GPU: streams, and what the driver answers. A test that
 * links it has it found by libmok's dlopen of libcuda.so.1.
 */
#ifndef MOK_TEST_FAKE_CUDA_H
#define MOK_TEST_FAKE_CUDA_H

#include <stdbool.h>
#include <stddef.h>

#define FAKE_CUDA_UUID 0xCA /* each of the 16 bytes */

struct CUstream_st *fake_stream_new(void);
/* Waits for the end of all that is queued; false after timeout_ms. */
bool fake_stream_drain(struct CUstream_st *stream, int timeout_ms);
/* Queues a function. */
void fake_stream_call(struct CUstream_st *stream, void (*function)(void *), void *cookie);
/* Drained. */
void fake_stream_free(struct CUstream_st *stream);

extern bool fake_cuda_mps;       /* what CU_DEVICE_ATTRIBUTE_MPS_ENABLED says */
extern bool fake_cuda_capturing; /* every stream */
extern int fake_cuda_batch_code; /* what cuStreamBatchMemOp returns */
extern int fake_cuda_register_code; /* what cuMemHostRegister returns */

#endif
