/* SPDX-License-Identifier: Apache-2.0 */
/* What a layer's parameters and gradients may be: checked here for the client's sake, and by the worker for its own. */
#include <inttypes.h>
#include <stddef.h>

#include "buffer.h"
#include "layer.h"

#define REGION_ALIGN 16u
#define MX_BLOCK 32u
#define BF16_BYTES 2u
#define F32_BYTES 4u

enum role {
    ROLE_WEIGHT,
    ROLE_SCALE_HIDDEN,
    ROLE_SCALE_INTERMEDIATE,
    ROLE_GRADIENT,
    ROLE_SHARED,
    ROLE_SHARED_GRADIENT,
    ROLE_TRANSPOSED,
};

struct param {
    const char *name;
    enum role role;
    const Mok__Region *region; /* NULL: absent */
};

static void list_params(const Mok__LayerParams *params, struct param ret[MOKD_PARAMS])
{
    const struct param list[MOKD_PARAMS] = {
        { "gate", ROLE_WEIGHT, params->gate },
        { "up", ROLE_WEIGHT, params->up },
        { "down", ROLE_WEIGHT, params->down },
        { "gate_scale", ROLE_SCALE_HIDDEN, params->gate_scale },
        { "up_scale", ROLE_SCALE_HIDDEN, params->up_scale },
        { "down_scale", ROLE_SCALE_INTERMEDIATE, params->down_scale },
        { "d_gate", ROLE_GRADIENT, params->d_gate },
        { "d_up", ROLE_GRADIENT, params->d_up },
        { "d_down", ROLE_GRADIENT, params->d_down },
        { "shared_gate", ROLE_SHARED, params->shared_gate },
        { "shared_up", ROLE_SHARED, params->shared_up },
        { "shared_down", ROLE_SHARED, params->shared_down },
        { "d_shared_gate", ROLE_SHARED_GRADIENT, params->d_shared_gate },
        { "d_shared_up", ROLE_SHARED_GRADIENT, params->d_shared_up },
        { "d_shared_down", ROLE_SHARED_GRADIENT, params->d_shared_down },
        { "gate_transposed", ROLE_TRANSPOSED, params->gate_transposed },
        { "up_transposed", ROLE_TRANSPOSED, params->up_transposed },
        { "down_transposed", ROLE_TRANSPOSED, params->down_transposed },
    };
    for (size_t i = 0; i < MOKD_PARAMS; i++)
        ret[i] = list[i];
}

/* Where they stand in the message, in the same order. */
static const size_t places[MOKD_PARAMS] = {
    offsetof(Mok__LayerParams, gate),          offsetof(Mok__LayerParams, up),
    offsetof(Mok__LayerParams, down),          offsetof(Mok__LayerParams, gate_scale),
    offsetof(Mok__LayerParams, up_scale),      offsetof(Mok__LayerParams, down_scale),
    offsetof(Mok__LayerParams, d_gate),        offsetof(Mok__LayerParams, d_up),
    offsetof(Mok__LayerParams, d_down),        offsetof(Mok__LayerParams, shared_gate),
    offsetof(Mok__LayerParams, shared_up),     offsetof(Mok__LayerParams, shared_down),
    offsetof(Mok__LayerParams, d_shared_gate), offsetof(Mok__LayerParams, d_shared_up),
    offsetof(Mok__LayerParams, d_shared_down), offsetof(Mok__LayerParams, gate_transposed),
    offsetof(Mok__LayerParams, up_transposed), offsetof(Mok__LayerParams, down_transposed),
};

void mokd_layer_params_regions(const Mok__LayerParams *params, struct mokd_region ret[MOKD_PARAMS])
{
    struct param list[MOKD_PARAMS];

    list_params(params, list);
    for (size_t i = 0; i < MOKD_PARAMS; i++) {
        const Mok__Region *region = list[i].region;
        ret[i] = (struct mokd_region){ 0 };
        if (region && region->buffer)
            ret[i] = (struct mokd_region){ region->buffer, region->offset, region->length };
    }
}

Mok__LayerParams *mokd_layer_params_message(const struct mokd_region region[MOKD_PARAMS],
                                            struct mokd_params_message *ret)
{
    mok__layer_params__init(&ret->params);
    for (size_t i = 0; i < MOKD_PARAMS; i++) {
        Mok__Region **at = (Mok__Region **)(void *)((char *)&ret->params + places[i]);
        mok__region__init(&ret->region[i]);
        ret->region[i].buffer = region[i].buffer;
        ret->region[i].offset = region[i].offset;
        ret->region[i].length = region[i].length;
        *at = region[i].buffer ? &ret->region[i] : NULL;
    }
    return &ret->params;
}

/* 0: this layer has no such parameter. The plan bounds every factor, so no product overflows. */
static uint64_t needed_bytes(const struct mok_plan *plan, enum role role)
{
    const struct mok_layer_spec *spec = &plan->spec;
    uint64_t hidden = spec->hidden, wide = spec->intermediate, shared = spec->shared_intermediate;
    uint64_t experts = plan->local_experts;
    uint64_t gradient = mok_spec_bf16_gradients(spec) ? BF16_BYTES : F32_BYTES;
    bool scaled = spec->precision != MOK_BF16;

    switch (role) {
    case ROLE_WEIGHT:
        return experts * wide * hidden * (scaled ? 1 : BF16_BYTES);
    case ROLE_SCALE_HIDDEN:
        return scaled ? experts * wide * ((hidden + MX_BLOCK - 1) / MX_BLOCK) : 0;
    case ROLE_SCALE_INTERMEDIATE:
        return scaled ? experts * hidden * ((wide + MX_BLOCK - 1) / MX_BLOCK) : 0;
    case ROLE_GRADIENT:
        return experts * wide * hidden * gradient;
    case ROLE_SHARED:
        return shared * hidden * BF16_BYTES;
    case ROLE_SHARED_GRADIENT:
        return shared * hidden * gradient;
    case ROLE_TRANSPOSED:
        return spec->transposed_weights ? experts * wide * hidden : 0;
    }
    return 0;
}

static int check_region(const struct mokd_session *session, const struct mokd_device *device, const struct param *param,
                        uint64_t needed, struct mokd_buffer **ret, struct mokd_error *error)
{
    const Mok__Region *region = param->region;
    struct mokd_buffer *buffer = mokd_buffer_of(session, region->buffer);
    uint64_t end;

    if (needed == 0)
        return mokd_error_set(error, -MOK_EARG, "%s: this layer has no such parameter", param->name);
    if (!buffer)
        return mokd_error_set(error, -MOK_EBUFFER, "%s: the session has no buffer %u", param->name, region->buffer);
    if (buffer->device != device)
        return mokd_error_set(error, -MOK_EBUFFER, "%s: buffer %u is on device %u, the layer on device %u", param->name,
                              buffer->id, buffer->device->index, device->index);
    if (region->offset % REGION_ALIGN)
        return mokd_error_set(error, -MOK_EALIGN, "%s: offset %" PRIu64 " is no multiple of %u", param->name,
                              region->offset, REGION_ALIGN);
    if (!mok_add_u64(region->offset, region->length, &end) || end > buffer->bytes)
        return mokd_error_set(error, -MOK_ERANGE,
                              "%s: offset %" PRIu64 " and length %" PRIu64 " end after buffer %u's %" PRIu64 " bytes",
                              param->name, region->offset, region->length, buffer->id, buffer->bytes);
    if (region->length < needed)
        return mokd_error_set(error, -MOK_ESIZE, "%s: %" PRIu64 " bytes, the layer needs %" PRIu64, param->name,
                              region->length, needed);
    *ret = buffer;
    return 0;
}

static bool is_written(const struct param *param)
{
    return param->role == ROLE_GRADIENT || param->role == ROLE_SHARED_GRADIENT;
}

/* A gradient shares no byte with anything else. */
static int check_apart(const struct mok_plan *plan, const struct param params[MOKD_PARAMS], struct mokd_error *error)
{
    for (size_t i = 0; i < MOKD_PARAMS; i++) {
        const Mok__Region *a = params[i].region;
        if (!a || !is_written(&params[i]))
            continue;
        for (size_t j = 0; j < MOKD_PARAMS; j++) {
            const Mok__Region *b = params[j].region;
            if (!b || i == j || a->buffer != b->buffer)
                continue;
            if (a->offset < b->offset + needed_bytes(plan, params[j].role) &&
                b->offset < a->offset + needed_bytes(plan, params[i].role))
                return mokd_error_set(error, -MOK_EARG, "%s: overlaps %s in buffer %u", params[i].name, params[j].name,
                                      a->buffer);
        }
    }
    return 0;
}

int mokd_layer_params_check(const struct mokd_session *session, const struct mokd_device *device,
                            const struct mok_plan *plan, const Mok__LayerParams *message,
                            struct mokd_buffer *ret_bound[MOKD_PARAMS], struct mokd_error *error)
{
    struct param params[MOKD_PARAMS];
    struct mokd_buffer *bound[MOKD_PARAMS] = { NULL };

    list_params(message, params);
    for (size_t i = 0; i < MOKD_PARAMS; i++) {
        if (params[i].region && params[i].region->buffer == 0)
            params[i].region = NULL;
        if (!params[i].region)
            continue;
        int r = check_region(session, device, &params[i], needed_bytes(plan, params[i].role), &bound[i], error);
        if (r < 0)
            return r;
    }
    int r = check_apart(plan, params, error);
    if (r < 0)
        return r;
    for (size_t i = 0; i < MOKD_PARAMS; i++)
        ret_bound[i] = bound[i];
    return 0;
}
