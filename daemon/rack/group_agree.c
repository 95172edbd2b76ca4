/* SPDX-License-Identifier: Apache-2.0 */
#include "group_agree.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "names.h"

int group_error_set(struct group_error *error, int code, uint32_t rank, const char *format, ...)
{
    va_list arguments;

    error->code = code;
    error->rank = rank;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof(error->text), format, arguments);
    va_end(arguments);
    return code;
}

void group_map_of(const struct mok_plan *plan, struct group_map *ret)
{
    *ret = (struct group_map){
        .kind = plan->device.kind,
        .symmetric_bytes = plan->symmetric_bytes,
        .sym_ids = plan->sym_ids,
        .sym_topk_weight = plan->sym_topk_weight,
        .sym_slots = plan->sym_slots,
        .sym_weight_slots = plan->sym_weight_slots,
    };
}

const char *group_missing(uint32_t size, bool (*is_missing)(const void *cookie, uint32_t rank), const void *cookie,
                          char *buffer, size_t length)
{
    size_t used = 0;

    buffer[0] = '\0';
    for (uint32_t rank = 0; rank < size && used + 16 < length; rank++) {
        if (!is_missing(cookie, rank))
            continue;
        used += (size_t)snprintf(buffer + used, length - used, "%s%u", used ? ", " : "", rank);
    }
    if (used + 16 >= length)
        snprintf(buffer + used, length - used, " and others");
    return buffer;
}

static const char *kind_text(uint32_t kind)
{
    return kind == GROUP_ALLOC ? "a symmetric allocation" : "a layer";
}

/* " (node a)", or nothing where all are on one node. */
static const char *place(const struct group_calls *calls, uint32_t rank, char buffer[80])
{
    buffer[0] = '\0';
    if (calls->node)
        snprintf(buffer, 80, " (node %s)", calls->node(calls->cookie, rank));
    return buffer;
}

/* "ranks 0 and 3", or "ranks 0 (node a) and 3 (node b)". */
static const char *ranks(const struct group_calls *calls, uint32_t rank, char buffer[200])
{
    char first[80], other[80];

    snprintf(buffer, 200, "ranks 0%s and %u%s", place(calls, 0, first), rank, place(calls, rank, other));
    return buffer;
}

static int differ_on_call(const struct group_calls *calls, uint32_t rank, uint32_t first_kind, uint32_t other_kind,
                          struct group_error *error)
{
    char first[80], other[80];

    return group_error_set(error, -MOK_EMISMATCH, rank, "rank 0%s asks for %s and rank %u%s for %s",
                           place(calls, 0, first), kind_text(first_kind), rank, place(calls, rank, other),
                           kind_text(other_kind));
}

/* As a program says it: 0 is BF16 here. */
static uint32_t wgrad_of(const struct mok_layer_spec *spec)
{
    return mok_spec_mxfp8_wgrad(spec) ? MOK_WGRAD_MXFP8 : MOK_WGRAD_BF16;
}

/* The first field on which two specs differ. */
static int agree_on_spec(const struct mok_layer_spec *first, const struct mok_layer_spec *other, const char *who,
                         uint32_t rank, struct group_error *error)
{
    const struct {
        const char *name;
        uint64_t first, other;
    } field[] = {
        { "hidden", first->hidden, other->hidden },
        { "intermediate", first->intermediate, other->intermediate },
        { "experts", first->experts, other->experts },
        { "topk", first->topk, other->topk },
        { "max_tokens", first->max_tokens, other->max_tokens },
        { "precision", first->precision, other->precision },
        { "shared_intermediate", first->shared_intermediate, other->shared_intermediate },
        { "ring_bytes", first->ring_bytes, other->ring_bytes },
        { "minibatch_rows", first->minibatch_rows, other->minibatch_rows },
        { "comm_units", first->comm_units, other->comm_units },
        { "gradient_dtype", first->gradient_dtype, other->gradient_dtype },
        { "wgrad_precision", wgrad_of(first), wgrad_of(other) },
        { "transposed_weights", first->transposed_weights, other->transposed_weights },
    };
    for (size_t i = 0; i < ARRAY_SIZE(field); i++)
        if (field[i].first != field[i].other)
            return group_error_set(error, -MOK_EMISMATCH, rank, "%s differ on %s: %" PRIu64 " and %" PRIu64, who,
                                   field[i].name, field[i].first, field[i].other);
    if (memcmp(&first->clamp, &other->clamp, sizeof(first->clamp)) != 0)
        return group_error_set(error, -MOK_EMISMATCH, rank, "%s differ on clamp: %g and %g", who, (double)first->clamp,
                               (double)other->clamp);
    return 0;
}

/* Peers find each other's rows by their own plan's offsets, so devices that plan differently do not go together. */
static int agree_on_map(const struct group_map *first, const struct group_map *other, const char *who, uint32_t rank,
                        struct group_error *error)
{
    if (first->kind != other->kind)
        return group_error_set(error, -MOK_EMISMATCH, rank,
                               "%s have devices that do not go together: their kinds are %s and %s", who,
                               mok_device_kind_text(first->kind), mok_device_kind_text(other->kind));
    if (first->symmetric_bytes == other->symmetric_bytes && first->sym_ids == other->sym_ids &&
        first->sym_topk_weight == other->sym_topk_weight && first->sym_slots == other->sym_slots &&
        first->sym_weight_slots == other->sym_weight_slots)
        return 0;
    return group_error_set(error, -MOK_EMISMATCH, rank,
                           "%s have devices that do not go together: the layer's symmetric workspace has %" PRIu64
                           " bytes on one and %" PRIu64 " on the other",
                           who, first->symmetric_bytes, other->symmetric_bytes);
}

int group_agree(const struct group_calls *calls, struct group_error *error)
{
    const struct group_params *first = calls->params(calls->cookie, 0);

    for (uint32_t rank = 1; rank < calls->size; rank++) {
        const struct group_params *other = calls->params(calls->cookie, rank);
        char buffer[200];
        const char *who = ranks(calls, rank, buffer);
        int r = 0;
        if (first->kind != other->kind)
            r = differ_on_call(calls, rank, first->kind, other->kind, error);
        else if (first->kind == GROUP_ALLOC && first->bytes != other->bytes)
            r = group_error_set(error, -MOK_EMISMATCH, rank, "%s differ on bytes: %" PRIu64 " and %" PRIu64, who,
                                first->bytes, other->bytes);
        else if (first->kind == GROUP_LAYER)
            r = agree_on_spec(&first->spec, &other->spec, who, rank, error);
        if (r == 0 && first->kind == GROUP_LAYER)
            r = agree_on_map(&first->map, &other->map, who, rank, error);
        if (r < 0)
            return r;
    }
    return 0;
}
