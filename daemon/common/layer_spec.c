/* SPDX-License-Identifier: Apache-2.0 */
#include "layer_spec.h"

struct mok_layer_spec mok_layer_spec_read(const Mok__LayerSpec *message, uint32_t ep, uint32_t rank)
{
    return (struct mok_layer_spec){
        .hidden = message->hidden,
        .intermediate = message->intermediate,
        .experts = message->experts,
        .topk = message->topk,
        .ep = ep,
        .rank = rank,
        .max_tokens = message->max_tokens,
        .precision = message->precision,
        .shared_intermediate = message->shared_intermediate,
        .clamp = message->clamp,
        .ring_bytes = message->ring_bytes,
        .minibatch_rows = message->minibatch_rows,
        .comm_units = message->comm_units,
        .gradient_dtype = message->gradient_dtype,
        .wgrad_precision = message->wgrad_precision,
        .transposed_weights = message->transposed_weights,
    };
}

Mok__LayerSpec mok_layer_spec_message(const struct mok_layer_spec *spec)
{
    Mok__LayerSpec message = MOK__LAYER_SPEC__INIT;

    message.hidden = spec->hidden;
    message.intermediate = spec->intermediate;
    message.experts = spec->experts;
    message.topk = spec->topk;
    message.max_tokens = spec->max_tokens;
    message.precision = spec->precision;
    message.shared_intermediate = spec->shared_intermediate;
    message.clamp = spec->clamp;
    message.ring_bytes = spec->ring_bytes;
    message.minibatch_rows = spec->minibatch_rows;
    message.comm_units = spec->comm_units;
    message.gradient_dtype = spec->gradient_dtype;
    message.wgrad_precision = spec->wgrad_precision;
    message.transposed_weights = spec->transposed_weights;
    return message;
}
