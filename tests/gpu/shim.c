/* SPDX-License-Identifier: Apache-2.0 */
/* Flat entry points over the CUDA engine, for scripts that drive it through ctypes. Test code only. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "../../kernels/cuda/engine.h"
#include "../../kernels/plan_backend.h"
#include "busy.h"

#define SHIM __attribute__((visibility("default")))

static struct mok_message message;

SHIM const char *shim_message(void)
{
    return message.text;
}

SHIM struct mok_engine *shim_open(uint32_t device, uint32_t chaos_delay_us, uint32_t blocks, uint32_t yield_us)
{
    struct mok_engine_config config = {
        .index = device, .chaos_delay_us = chaos_delay_us, .blocks = blocks, .yield_us = yield_us
    };
    struct mok_engine *e = NULL;
    return mok_cuda_engine.open(&config, &e, &message) < 0 ? NULL : e;
}

SHIM void shim_close(struct mok_engine *engine)
{
    mok_cuda_engine.close(engine);
}

/* A client's kernel, see daemon/busy.h. */
SHIM int shim_busy(uint32_t blocks, uint64_t ns, void *stream)
{
    return busy_launch(blocks, ns, stream);
}

/* Lets the GPUs of this machine read and write each other's memory. */
SHIM int shim_peers(int devices)
{
    for (int d = 0; d < devices; d++)
        for (int p = 0; p < devices; p++)
            if (p != d &&
                (cudaSetDevice(d) != cudaSuccess || (cudaDeviceEnablePeerAccess(p, 0) != cudaSuccess &&
                                                     cudaGetLastError() != cudaErrorPeerAccessAlreadyEnabled)))
                return -1;
    return 0;
}

/* spec: H I E K ep rank T_max shared_I ring_rows minibatch_rows units gradient_dtype precision comm_units transposed_weights wgrad_precision;
 * sizes: symmetric, private, context, ring rows, ctx_ring */
static int make_plan(const uint64_t *spec, float clamp, struct mok_plan *ret)
{
    struct mok_device_limits device = { .kind = MOK_DEVICE_CUDA,
                                        .units = (uint32_t)spec[10],
                                        .memory_bytes = 1ull << 37 };
    struct mok_layer_spec s = { .hidden = (uint32_t)spec[0],
                                .intermediate = (uint32_t)spec[1],
                                .experts = (uint32_t)spec[2],
                                .topk = (uint32_t)spec[3],
                                .ep = (uint32_t)spec[4],
                                .rank = (uint32_t)spec[5],
                                .max_tokens = (uint32_t)spec[6],
                                .precision = (uint32_t)spec[12],
                                .shared_intermediate = (uint32_t)spec[7],
                                .clamp = clamp,
                                .minibatch_rows = (uint32_t)spec[9],
                                .gradient_dtype = (uint32_t)spec[11],
                                .comm_units = (uint32_t)spec[13],
                                .transposed_weights = (uint32_t)spec[14],
                                .wgrad_precision = (uint32_t)spec[15] };
    s.ring_bytes = spec[8] * mok_cuda_plan_backend.ring_row_bytes(&(struct mok_plan){ .spec = s });
    return mok_plan_make(&s, &device, ret, NULL, 0, &message);
}

SHIM int shim_sizes(const uint64_t *spec, uint64_t *sizes)
{
    struct mok_plan p;
    int r = make_plan(spec, 0.0f, &p);
    if (r == 0) {
        sizes[0] = p.symmetric_bytes;
        sizes[1] = p.private_bytes;
        sizes[2] = p.context_full_bytes;
        sizes[3] = p.ring_rows;
        sizes[4] = p.ctx_ring;
    }
    return r;
}

SHIM struct mok_engine_layer *shim_layer(struct mok_engine *engine, const uint64_t *spec, float clamp,
                                         void *const *symmetric, void *private_memory)
{
    struct mok_engine_layer *l = NULL;
    struct mok_plan p;
    if (make_plan(spec, clamp, &p) < 0)
        return NULL;
    return mok_cuda_engine.layer_open(engine, &p, symmetric, private_memory, &l, &message) < 0 ? NULL : l;
}

SHIM void shim_layer_close(struct mok_engine_layer *layer)
{
    mok_cuda_engine.layer_close(layer);
}

SHIM int shim_enqueue(struct mok_engine_layer *layer, uint32_t phase, uint32_t tokens, const int32_t *ids,
                      const float *weight, void *out, const void *const *params, uint32_t ep, const void *const *x,
                      const uint32_t *peer_tokens, uint32_t flags, uint32_t context_mode, void *context, void *stream)
{
    struct mok_peer peer[MOK_MAX_EP];
    struct mok_op_args a = { .kind = MOK_KIND_FORWARD,
                             .flags = flags,
                             .tokens = tokens,
                             .ids = ids,
                             .topk_weight = weight,
                             .out = out,
                             .peer = peer,
                             .context_mode = context_mode,
                             .context = context };
    for (uint32_t i = 0; i < ep; i++)
        peer[i] = (struct mok_peer){ .x = x[i], .tokens = peer_tokens[i] };
    a.params.gate = params[0];
    a.params.up = params[1];
    a.params.down = params[2];
    a.params.shared_gate = params[3];
    a.params.shared_up = params[4];
    a.params.shared_down = params[5];
    a.params.gate_scale = params[6];
    a.params.up_scale = params[7];
    a.params.down_scale = params[8];
    return mok_cuda_enqueue(layer, &a, (enum mok_phase)phase, stream);
}

/* params: gate, up, down, the shared ones, scales of the first three, and these transposed; gradients: of gate, up, down, shared gate, up, down */
SHIM int shim_enqueue_backward(struct mok_engine_layer *layer, uint32_t phase, uint32_t tokens,
                               const void *const *params, void *const *gradients, void *d_x, float *d_topk_weight,
                               uint32_t ep, const void *const *x, const void *const *d_out, const uint32_t *peer_tokens,
                               uint32_t flags, uint32_t context_mode, void *context, void *stream)
{
    struct mok_peer peer[MOK_MAX_EP];
    struct mok_op_args a = { .kind = MOK_KIND_BACKWARD,
                             .flags = flags,
                             .tokens = tokens,
                             .d_x = d_x,
                             .d_topk_weight = d_topk_weight,
                             .peer = peer,
                             .context_mode = context_mode,
                             .context = context };
    for (uint32_t i = 0; i < ep; i++)
        peer[i] = (struct mok_peer){ .x = x[i], .d_out = d_out[i], .tokens = peer_tokens[i] };
    a.params = (struct mok_expert_params){
        .gate = params[0],
        .up = params[1],
        .down = params[2],
        .shared_gate = params[3],
        .shared_up = params[4],
        .shared_down = params[5],
        .gate_scale = params[6],
        .up_scale = params[7],
        .down_scale = params[8],
        .gate_transposed = params[9],
        .up_transposed = params[10],
        .down_transposed = params[11],
        .d_gate = gradients[0],
        .d_up = gradients[1],
        .d_down = gradients[2],
        .d_shared_gate = gradients[3],
        .d_shared_up = gradients[4],
        .d_shared_down = gradients[5],
    };
    return mok_cuda_enqueue(layer, &a, (enum mok_phase)phase, stream);
}

/* result: status, rows, bad token, slot, value, schedule ns */
SHIM int shim_outcome(struct mok_engine *engine, struct mok_engine_layer *layer, int64_t *result)
{
    struct mok_op_result r;
    int e = mok_cuda_outcome(layer, &r);
    if (e < 0)
        return e;
    result[0] = r.status;
    result[1] = (int64_t)r.rows;
    result[2] = (int64_t)r.bad_token;
    result[3] = (int64_t)r.bad_slot;
    result[4] = r.bad_value;
    result[5] = (int64_t)r.schedule_ns;
    if (r.status == -MOK_EINTERNAL)
        mok_cuda_describe_trip(engine, &message);
    return 0;
}
