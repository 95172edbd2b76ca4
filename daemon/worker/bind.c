/* SPDX-License-Identifier: Apache-2.0 */
/* Validation of a layer's parameters and gradients: see validate.h. */
#include "validate.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "util.h"

#define BF16_BYTES 2u
#define F32_BYTES 4u
#define REGION_ALIGN 16u
#define MX_BLOCK 32u

static const char *const param_name[WORKER_PARAM_COUNT] = {
    [WORKER_PARAM_GATE] = "gate",
    [WORKER_PARAM_UP] = "up",
    [WORKER_PARAM_DOWN] = "down",
    [WORKER_PARAM_GATE_SCALE] = "gate_scale",
    [WORKER_PARAM_UP_SCALE] = "up_scale",
    [WORKER_PARAM_DOWN_SCALE] = "down_scale",
    [WORKER_PARAM_SHARED_GATE] = "shared_gate",
    [WORKER_PARAM_SHARED_UP] = "shared_up",
    [WORKER_PARAM_SHARED_DOWN] = "shared_down",
    [WORKER_PARAM_GATE_TRANSPOSED] = "gate_transposed",
    [WORKER_PARAM_UP_TRANSPOSED] = "up_transposed",
    [WORKER_PARAM_DOWN_TRANSPOSED] = "down_transposed",
    [WORKER_PARAM_D_GATE] = "d_gate",
    [WORKER_PARAM_D_UP] = "d_up",
    [WORKER_PARAM_D_DOWN] = "d_down",
    [WORKER_PARAM_D_SHARED_GATE] = "d_shared_gate",
    [WORKER_PARAM_D_SHARED_UP] = "d_shared_up",
    [WORKER_PARAM_D_SHARED_DOWN] = "d_shared_down",
};

static const Mok__Region *region_of(const Mok__LayerParams *params, enum worker_param param)
{
    switch (param) {
    case WORKER_PARAM_GATE:
        return params->gate;
    case WORKER_PARAM_UP:
        return params->up;
    case WORKER_PARAM_DOWN:
        return params->down;
    case WORKER_PARAM_GATE_SCALE:
        return params->gate_scale;
    case WORKER_PARAM_UP_SCALE:
        return params->up_scale;
    case WORKER_PARAM_DOWN_SCALE:
        return params->down_scale;
    case WORKER_PARAM_SHARED_GATE:
        return params->shared_gate;
    case WORKER_PARAM_SHARED_UP:
        return params->shared_up;
    case WORKER_PARAM_SHARED_DOWN:
        return params->shared_down;
    case WORKER_PARAM_GATE_TRANSPOSED:
        return params->gate_transposed;
    case WORKER_PARAM_UP_TRANSPOSED:
        return params->up_transposed;
    case WORKER_PARAM_DOWN_TRANSPOSED:
        return params->down_transposed;
    case WORKER_PARAM_D_GATE:
        return params->d_gate;
    case WORKER_PARAM_D_UP:
        return params->d_up;
    case WORKER_PARAM_D_DOWN:
        return params->d_down;
    case WORKER_PARAM_D_SHARED_GATE:
        return params->d_shared_gate;
    case WORKER_PARAM_D_SHARED_UP:
        return params->d_shared_up;
    case WORKER_PARAM_D_SHARED_DOWN:
        return params->d_shared_down;
    case WORKER_PARAM_COUNT:
        break;
    }
    return NULL;
}

/* Bytes of a parameter, 0 for one that this layer does not have. Dimensions are bounded, so nothing overflows. */
static uint64_t param_bytes(const struct mok_plan *plan, enum worker_param param)
{
    const struct mok_layer_spec *spec = &plan->spec;
    uint64_t h = spec->hidden, i = spec->intermediate, s = spec->shared_intermediate, e = plan->local_experts;
    uint64_t gradient = mok_spec_bf16_gradients(spec) ? BF16_BYTES : F32_BYTES;
    bool scaled = spec->precision != MOK_BF16;

    switch (param) {
    case WORKER_PARAM_GATE:
    case WORKER_PARAM_UP:
    case WORKER_PARAM_DOWN:
        return e * i * h * (scaled ? 1 : BF16_BYTES);
    case WORKER_PARAM_GATE_SCALE:
    case WORKER_PARAM_UP_SCALE:
        return scaled ? e * i * ((h + MX_BLOCK - 1) / MX_BLOCK) : 0;
    case WORKER_PARAM_DOWN_SCALE:
        return scaled ? e * h * ((i + MX_BLOCK - 1) / MX_BLOCK) : 0;
    case WORKER_PARAM_SHARED_GATE:
    case WORKER_PARAM_SHARED_UP:
    case WORKER_PARAM_SHARED_DOWN:
        return s * h * BF16_BYTES;
    case WORKER_PARAM_GATE_TRANSPOSED:
    case WORKER_PARAM_UP_TRANSPOSED:
    case WORKER_PARAM_DOWN_TRANSPOSED:
        return spec->transposed_weights ? e * i * h : 0;
    case WORKER_PARAM_D_GATE:
    case WORKER_PARAM_D_UP:
    case WORKER_PARAM_D_DOWN:
        return e * i * h * gradient;
    case WORKER_PARAM_D_SHARED_GATE:
    case WORKER_PARAM_D_SHARED_UP:
    case WORKER_PARAM_D_SHARED_DOWN:
        return s * h * gradient;
    case WORKER_PARAM_COUNT:
        break;
    }
    return 0;
}

static int refuse(struct mok_message *message, int code, const char *name, const char *what, uint64_t value,
                  uint64_t bound)
{
    snprintf(message->text, sizeof(message->text), "%s: %s (value %" PRIu64 ", bound %" PRIu64 ")", name, what, value,
             bound);
    return code;
}

static int check_param(const struct worker_tables *tables, const struct worker_layer *layer, const Mok__Region *region,
                       enum worker_param param, struct worker_span *ret, struct mok_message *message)
{
    const char *name = param_name[param];
    uint64_t needed = param_bytes(&layer->plan, param), end;

    if (!needed)
        return refuse(message, -MOK_EARG, name, "this layer has no such parameter", region->buffer, 0);
    struct worker_node *node = worker_index_find(&tables->buffers, worker_buffer_key(region->buffer, WORKER_OWN_RANK));
    struct worker_buffer *buffer = node ? worker_container_of(node, struct worker_buffer, control_node) : NULL;
    if (!buffer || buffer->closing || buffer->session != layer->session || (buffer->group && buffer->group->closing))
        return refuse(message, -MOK_EBUFFER, name, "no such buffer of this session", region->buffer, 0);
    if (region->offset % REGION_ALIGN)
        return refuse(message, -MOK_EALIGN, name, "offset is not aligned", region->offset, REGION_ALIGN);
    if (!mok_add_u64(region->offset, region->length, &end))
        end = UINT64_MAX;
    if (end > buffer->bytes)
        return refuse(message, -MOK_ERANGE, name, "region ends past its buffer", end, buffer->bytes);
    if (region->length < needed)
        return refuse(message, -MOK_ESIZE, name, "region is too short", region->length, needed);
    *ret = (struct worker_span){
        .buffer = buffer, .offset = region->offset, .bytes = needed, .address = (char *)buffer->address + region->offset
    };
    return 0;
}

/* A gradient is written, so it shares no byte with anything else that is bound. */
static int check_gradients_apart(const struct worker_span *span, struct mok_message *message)
{
    for (unsigned gradient = WORKER_PARAM_FIRST_GRADIENT; gradient < WORKER_PARAM_COUNT; gradient++) {
        for (unsigned other = 0; other < gradient; other++) {
            if (worker_spans_overlap(&span[gradient], &span[other])) {
                snprintf(message->text, sizeof(message->text), "%s: overlaps %s (value %" PRIu64 ", bound %" PRIu64 ")",
                         param_name[gradient], param_name[other], span[gradient].offset,
                         span[other].offset + span[other].bytes);
                return -MOK_EARG;
            }
        }
    }
    return 0;
}

int worker_validate_params(const struct worker_tables *tables, const struct worker_layer *layer,
                           const Mok__LayerParams *params, struct worker_span *ret_span, struct mok_message *message)
{
    struct worker_span span[WORKER_PARAM_COUNT] = { 0 };

    for (unsigned param = 0; param < WORKER_PARAM_COUNT; param++) {
        const Mok__Region *region = region_of(params, (enum worker_param)param);
        if (!region || !region->buffer)
            continue;
        int r = check_param(tables, layer, region, (enum worker_param)param, &span[param], message);
        if (r < 0)
            return r;
    }
    int r = check_gradients_apart(span, message);
    if (r < 0)
        return r;
    memcpy(ret_span, span, sizeof(span));
    return 0;
}
