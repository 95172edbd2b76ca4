/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA engine beside the common interface (../engine.h): running a phase on a stream of the caller, in process.
 * Must not be used for a layer while the common interface runs a phase of it.
 */
#ifndef MOK_CUDA_ENGINE_H
#define MOK_CUDA_ENGINE_H

#include "../engine.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const struct mok_engine_ops mok_cuda_engine;

/* Queues a phase on `stream` (a cudaStream_t) and returns. `args` may be reused at once. Capturable in a graph. */
int mok_cuda_enqueue(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase, void *stream);

/* The outcome of the phase queued last, once the stream has passed it. */
int mok_cuda_outcome(struct mok_engine_layer *layer, struct mok_op_result *ret);

/* After a phase that ended with -MOK_EINTERNAL: which block waited for what, as a sentence. */
void mok_cuda_describe_trip(const struct mok_engine *engine, struct mok_message *ret);

#ifdef __cplusplus
}
#endif
#endif
