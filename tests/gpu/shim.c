/* SPDX-License-Identifier: Apache-2.0 */
/* Flat entry points over the CUDA engine, for scripts that drive it through ctypes. Test code only. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../kernels/cuda/engine.h"

#define SHIM __attribute__((visibility("default")))

static struct mok_message message;

SHIM const char *shim_message(void) {
    return message.text;
}

SHIM struct mok_engine *shim_open(uint32_t device, uint32_t chaos_delay_us) {
    struct mok_engine_config config = {.index = device, .chaos_delay_us = chaos_delay_us};
    struct mok_engine *e = NULL;
    return mok_cuda_engine.open(&config, &e, &message) < 0 ? NULL : e;
}

SHIM void shim_close(struct mok_engine *engine) {
    mok_cuda_engine.close(engine);
}

static uint64_t take(uint64_t *cursor, uint64_t bytes) {
    uint64_t at = *cursor;
    *cursor = (at + bytes + 1023) / 1024 * 1024;
    return at;
}

/* spec: H I E K ep rank T_max shared_I ring_rows minibatch_rows; sizes: symmetric, private, ids, weight, slots */
static int make_plan(const uint64_t *spec, float clamp, struct mok_plan *ret) {
    struct mok_plan p = {.spec = {.hidden = (uint32_t)spec[0],
                                  .intermediate = (uint32_t)spec[1],
                                  .experts = (uint32_t)spec[2],
                                  .topk = (uint32_t)spec[3],
                                  .ep = (uint32_t)spec[4],
                                  .rank = (uint32_t)spec[5],
                                  .max_tokens = (uint32_t)spec[6],
                                  .precision = MOK_BF16,
                                  .shared_intermediate = (uint32_t)spec[7],
                                  .clamp = clamp}};
    uint64_t cursor = 4096, slots = spec[6] * spec[3];
    p.local_experts = p.spec.experts / p.spec.ep;
    p.max_rows = p.spec.ep * slots;
    p.ring_rows = spec[8] ? spec[8] : p.max_rows + 64 * p.local_experts;
    p.minibatch_rows = (uint32_t)spec[9];
    p.sym_ids = take(&cursor, slots * 4);
    p.sym_topk_weight = take(&cursor, slots * 4);
    p.sym_slots = take(&cursor, slots * p.spec.hidden * 2);
    p.symmetric_bytes = cursor;
    *ret = p;
    return mok_cuda_private_bytes(&p, &ret->private_bytes, &message);
}

SHIM int shim_sizes(const uint64_t *spec, uint64_t *sizes) {
    struct mok_plan p;
    int r = make_plan(spec, 0.0f, &p);
    if (r == 0) {
        sizes[0] = p.symmetric_bytes;
        sizes[1] = p.private_bytes;
    }
    return r;
}

SHIM struct mok_engine_layer *shim_layer(struct mok_engine *engine, const uint64_t *spec, float clamp, void *const *symmetric,
                                         void *private_memory) {
    struct mok_engine_layer *l = NULL;
    struct mok_plan p;
    if (make_plan(spec, clamp, &p) < 0)
        return NULL;
    return mok_cuda_engine.layer_open(engine, &p, symmetric, private_memory, &l, &message) < 0 ? NULL : l;
}

SHIM void shim_layer_close(struct mok_engine_layer *layer) {
    mok_cuda_engine.layer_close(layer);
}

SHIM int shim_enqueue(struct mok_engine_layer *layer, uint32_t phase, uint32_t tokens, const int32_t *ids, const float *weight,
                      void *out, const void *const *params, uint32_t ep, const void *const *x, const uint32_t *peer_tokens,
                      uint32_t flags, void *stream) {
    struct mok_peer peer[MOK_MAX_EP];
    struct mok_op_args a = {.kind = MOK_KIND_FORWARD, .flags = flags, .tokens = tokens, .ids = ids, .topk_weight = weight,
                            .out = out, .peer = peer};
    for (uint32_t i = 0; i < ep; i++)
        peer[i] = (struct mok_peer){.x = x[i], .tokens = peer_tokens[i]};
    a.params.gate = params[0];
    a.params.up = params[1];
    a.params.down = params[2];
    a.params.shared_gate = params[3];
    a.params.shared_up = params[4];
    a.params.shared_down = params[5];
    return mok_cuda_enqueue(layer, &a, (enum mok_phase)phase, stream);
}

/* result: status, rows, bad token, slot, value */
SHIM int shim_outcome(struct mok_engine *engine, struct mok_engine_layer *layer, int64_t *result) {
    struct mok_op_result r;
    int e = mok_cuda_outcome(layer, &r);
    if (e < 0)
        return e;
    result[0] = r.status;
    result[1] = (int64_t)r.rows;
    result[2] = (int64_t)r.bad_token;
    result[3] = (int64_t)r.bad_slot;
    result[4] = r.bad_value;
    if (r.status == -MOK_EINTERNAL)
        mok_cuda_describe_trip(engine, &message);
    return 0;
}
