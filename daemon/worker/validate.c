/* SPDX-License-Identifier: Apache-2.0 */
/* Validation of submissions: see validate.h. The order of the checks is the order of the fields. */
#include "validate.h"

#include <string.h>

#include "util.h"

#define BF16_BYTES 2u
#define WORD_BYTES 4u
#define REGION_ALIGN 16u

#define SLOT(name) (1u << MOK_REGION_##name)
#define FORWARD_SLOTS (SLOT(X) | SLOT(IDS) | SLOT(TOPK_WEIGHT) | SLOT(OUT) | SLOT(CONTEXT))
#define BACKWARD_SLOTS (SLOT(X) | SLOT(CONTEXT) | SLOT(D_OUT) | SLOT(D_X) | SLOT(D_TOPK_WEIGHT))
#define FORWARD_WRITES (SLOT(OUT) | SLOT(CONTEXT))
#define BACKWARD_WRITES (SLOT(D_X) | SLOT(D_TOPK_WEIGHT))
#define SYMMETRIC_SLOTS (SLOT(X) | SLOT(D_OUT))

static int fault(struct worker_fault *ret, int code, unsigned argument, uint64_t value, uint64_t bound)
{
    *ret = (struct worker_fault){ .code = code, .argument = (uint16_t)argument, .value = value, .bound = bound };
    return code;
}

static uint32_t flags_of(uint8_t opcode)
{
    switch (opcode) {
    case MOK_OP_FORWARD:
        return MOK_SQE_ACCUMULATE_OUT | MOK_SQE_ON_STREAM;
    case MOK_OP_BACKWARD:
        return MOK_SQE_OVERWRITE_WGRAD | MOK_SQE_ON_STREAM;
    }
    return 0;
}

static uint32_t slots_of(uint8_t opcode)
{
    switch (opcode) {
    case MOK_OP_FORWARD:
        return FORWARD_SLOTS;
    case MOK_OP_BACKWARD:
        return BACKWARD_SLOTS;
    }
    return 0;
}

static int check_reserved(const struct mok_sqe *sqe, struct worker_fault *ret)
{
    if (sqe->reserved0)
        return fault(ret, -MOK_ERESERVED, MOK_ARG_RESERVED, sqe->reserved0, 0);
    for (size_t i = 0; i < ARRAY_SIZE(sqe->reserved1); i++)
        if (sqe->reserved1[i])
            return fault(ret, -MOK_ERESERVED, MOK_ARG_RESERVED, sqe->reserved1[i], 0);
    for (unsigned slot = 0; slot < MOK_REGION_COUNT; slot++)
        if (sqe->region[slot].reserved)
            return fault(ret, -MOK_ERESERVED, MOK_ARG_REGION0 + slot, sqe->region[slot].reserved, 0);
    return 0;
}

/* Regions that the operation has no use for, and absent ones, are all zero. */
static int check_unused(const struct mok_sqe *sqe, struct worker_fault *ret)
{
    uint32_t used = slots_of(sqe->opcode);
    for (unsigned slot = 0; slot < MOK_REGION_COUNT; slot++) {
        const struct mok_region *region = &sqe->region[slot];
        if (!(used >> slot & 1) && region->buffer)
            return fault(ret, -MOK_ERESERVED, MOK_ARG_REGION0 + slot, region->buffer, 0);
        if (!region->buffer && (region->offset || region->length))
            return fault(ret, -MOK_ERESERVED, MOK_ARG_REGION0 + slot, region->offset | region->length, 0);
    }
    return 0;
}

static int check_stream(const struct worker_queue *queue, const struct mok_sqe *sqe, struct worker_fault *ret)
{
    if (!(sqe->flags & MOK_SQE_ON_STREAM)) {
        uint32_t extra = sqe->stream_slot | sqe->stream_number;
        return extra ? fault(ret, -MOK_ERESERVED, MOK_ARG_STREAM, extra, 0) : 0;
    }
    if (!queue->stream)
        return fault(ret, -MOK_ESTATE, MOK_ARG_STREAM, sqe->stream_slot, 0);
    if (sqe->stream_slot >= queue->ring.layout.cq_entries)
        return fault(ret, -MOK_ERANGE, MOK_ARG_STREAM, sqe->stream_slot, queue->ring.layout.cq_entries - 1);
    return 0;
}

static int check_head(const struct worker_queue *queue, const struct mok_sqe *sqe, struct worker_fault *ret)
{
    if (sqe->opcode > MOK_OP_CANCEL)
        return fault(ret, -MOK_EOPCODE, MOK_ARG_OPCODE, sqe->opcode, MOK_OP_CANCEL);
    if (sqe->flags & ~flags_of(sqe->opcode))
        return fault(ret, -MOK_ERANGE, MOK_ARG_FLAGS, sqe->flags, flags_of(sqe->opcode));
    int r = check_reserved(sqe, ret);
    if (r == 0)
        r = check_unused(sqe, ret);
    return r < 0 ? r : check_stream(queue, sqe, ret);
}

/* No-op and cancel name no layer and carry nothing. */
static int check_simple(const struct mok_sqe *sqe, struct worker_fault *ret)
{
    if (sqe->layer)
        return fault(ret, -MOK_ERESERVED, MOK_ARG_LAYER, sqe->layer, 0);
    if (sqe->tokens)
        return fault(ret, -MOK_ERESERVED, MOK_ARG_TOKENS, sqe->tokens, 0);
    if (sqe->context_mode)
        return fault(ret, -MOK_ERESERVED, MOK_ARG_CONTEXT_MODE, sqe->context_mode, 0);
    if (sqe->timeout_ns)
        return fault(ret, -MOK_ERESERVED, MOK_ARG_TIMEOUT, sqe->timeout_ns, 0);
    if (sqe->opcode == MOK_OP_NOP && sqe->cancel_target)
        return fault(ret, -MOK_ERESERVED, MOK_ARG_TARGET, sqe->cancel_target, 0);
    return 0;
}

static int check_layer(const struct worker_layer *layer, const struct worker_queue *queue, const struct mok_sqe *sqe,
                       struct worker_fault *ret)
{
    if (!layer || layer->queue != queue || layer->session != queue->session)
        return fault(ret, -MOK_ENOENT, MOK_ARG_LAYER, sqe->layer, 0);
    uint32_t rank;
    int code = worker_layer_failure(layer, &rank);
    if (code) {
        fault(ret, code, MOK_ARG_RANKS, rank, layer->group->size);
        ret->detail = rank;
        return ret->code;
    }
    if (sqe->tokens > layer->plan.spec.max_tokens)
        return fault(ret, -MOK_ERANGE, MOK_ARG_TOKENS, sqe->tokens, layer->plan.spec.max_tokens);
    if (sqe->context_mode > MOK_CONTEXT_RECOMPUTE)
        return fault(ret, -MOK_ERANGE, MOK_ARG_CONTEXT_MODE, sqe->context_mode, MOK_CONTEXT_RECOMPUTE);
    if (sqe->opcode == MOK_OP_BACKWARD && sqe->context_mode == MOK_CONTEXT_NONE)
        return fault(ret, -MOK_EARG, MOK_ARG_CONTEXT_MODE, sqe->context_mode, MOK_CONTEXT_FULL);
    if (sqe->cancel_target)
        return fault(ret, -MOK_ERESERVED, MOK_ARG_TARGET, sqe->cancel_target, 0);
    return 0;
}

static bool has(const struct worker_layer *layer, enum worker_param first, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (!layer->param[first + i].address)
            return false;
    return true;
}

static int check_params(const struct worker_layer *layer, uint8_t opcode, struct worker_fault *ret)
{
    bool shared = layer->plan.spec.shared_intermediate != 0;
    bool scaled = layer->plan.spec.precision != MOK_BF16;

    if (!has(layer, WORKER_PARAM_GATE, 3) || (shared && !has(layer, WORKER_PARAM_SHARED_GATE, 3)) ||
        (scaled && !has(layer, WORKER_PARAM_GATE_SCALE, 3)))
        return fault(ret, -MOK_ESTATE, MOK_ARG_PARAMS, 0, 0);
    if (opcode == MOK_OP_BACKWARD &&
        (!has(layer, WORKER_PARAM_D_GATE, 3) || (shared && !has(layer, WORKER_PARAM_D_SHARED_GATE, 3))))
        return fault(ret, -MOK_ESTATE, MOK_ARG_WGRADS, 0, 0);
    return 0;
}

static uint64_t bytes_needed(const struct mok_plan *plan, const struct mok_sqe *sqe, unsigned slot)
{
    uint64_t tokens = sqe->tokens;
    switch (slot) {
    case MOK_REGION_X:
    case MOK_REGION_OUT:
    case MOK_REGION_D_OUT:
    case MOK_REGION_D_X:
        return tokens * plan->spec.hidden * BF16_BYTES;
    case MOK_REGION_IDS:
    case MOK_REGION_TOPK_WEIGHT:
    case MOK_REGION_D_TOPK_WEIGHT:
        return tokens * plan->spec.topk * WORD_BYTES;
    case MOK_REGION_CONTEXT:
        if (sqe->context_mode == MOK_CONTEXT_FULL)
            return plan->context_full_bytes;
        return sqe->context_mode == MOK_CONTEXT_RECOMPUTE ? plan->context_recompute_bytes : 0;
    }
    return 0;
}

static int check_region(const struct worker_tables *tables, const struct worker_layer *layer, const struct mok_sqe *sqe,
                        unsigned slot, struct worker_span *ret_span, struct worker_fault *ret)
{
    const struct mok_region *region = &sqe->region[slot];
    unsigned argument = MOK_ARG_REGION0 + slot;
    bool optional = sqe->tokens == 0 && slot != MOK_REGION_CONTEXT;
    uint64_t needed = bytes_needed(&layer->plan, sqe, slot), end;

    if (slot == MOK_REGION_CONTEXT && sqe->context_mode == MOK_CONTEXT_NONE) {
        if (region->buffer)
            return fault(ret, -MOK_EARG, argument, region->buffer, 0);
        return 0;
    }
    if (!region->buffer)
        return optional ? 0 : fault(ret, -MOK_EBUFFER, argument, 0, 1);
    struct worker_node *node = worker_index_find(&tables->buffers, worker_buffer_key(region->buffer, WORKER_OWN_RANK));
    struct worker_buffer *buffer = node ? worker_container_of(node, struct worker_buffer, dispatch_node) : NULL;
    if (!buffer || buffer->session != layer->session || (buffer->group && buffer->group->closed))
        return fault(ret, -MOK_EBUFFER, argument, region->buffer, 0);
    if ((SYMMETRIC_SLOTS >> slot & 1) && buffer->group != layer->group)
        return fault(ret, -MOK_EBUFFER, argument, region->buffer, layer->group->id);
    if (region->offset % REGION_ALIGN)
        return fault(ret, -MOK_EALIGN, argument, region->offset, REGION_ALIGN);
    if (!mok_add_u64(region->offset, region->length, &end))
        end = UINT64_MAX;
    if (end > buffer->bytes)
        return fault(ret, -MOK_ERANGE, argument, end, buffer->bytes);
    if (region->length < needed)
        return fault(ret, -MOK_ESIZE, argument, region->length, needed);
    *ret_span = (struct worker_span){
        .buffer = buffer, .offset = region->offset, .bytes = needed, .address = (char *)buffer->address + region->offset
    };
    return 0;
}

bool worker_spans_overlap(const struct worker_span *a, const struct worker_span *b)
{
    return a->buffer && a->buffer == b->buffer && a->bytes && b->bytes && a->offset < b->offset + b->bytes &&
           b->offset < a->offset + a->bytes;
}

static int overlap_fault(const struct worker_span *written, const struct worker_span *other, unsigned argument,
                         struct worker_fault *ret)
{
    if (!worker_spans_overlap(written, other))
        return 0;
    return fault(ret, -MOK_EARG, argument, written->offset, other->offset + other->bytes);
}

/* What an operation writes shares no byte with anything else that it reads or writes. */
static int check_overlap(const struct worker_op *op, const struct worker_layer *layer, struct worker_fault *ret)
{
    bool backward = op->opcode == MOK_OP_BACKWARD;
    uint32_t writes = backward ? BACKWARD_WRITES : FORWARD_WRITES;

    for (unsigned slot = 0; slot < MOK_REGION_COUNT; slot++) {
        bool written = writes >> slot & 1;
        for (unsigned other = 0; written && other < MOK_REGION_COUNT; other++) {
            int r =
                other == slot ? 0 : overlap_fault(&op->region[slot], &op->region[other], MOK_ARG_REGION0 + slot, ret);
            if (r < 0)
                return r;
        }
        for (unsigned param = 0; param < WORKER_PARAM_COUNT; param++) {
            bool gradient = param >= WORKER_PARAM_FIRST_GRADIENT;
            if (gradient ? !backward : !written)
                continue;
            int r = overlap_fault(&op->region[slot], &layer->param[param], MOK_ARG_REGION0 + slot, ret);
            if (r < 0)
                return r;
        }
    }
    return 0;
}

static int check_layer_op(const struct worker_tables *tables, const struct worker_queue *queue,
                          const struct mok_sqe *sqe, struct worker_op *op, struct worker_fault *ret)
{
    struct worker_node *node = worker_index_find(&tables->layers, sqe->layer);
    struct worker_layer *layer = node ? worker_container_of(node, struct worker_layer, dispatch_node) : NULL;

    int r = check_layer(layer, queue, sqe, ret);
    if (r < 0)
        return r;
    r = check_params(layer, sqe->opcode, ret);
    if (r < 0)
        return r;
    memset(op->region, 0, sizeof(op->region));
    for (unsigned slot = 0; slot < MOK_REGION_COUNT; slot++) {
        if (!(slots_of(sqe->opcode) >> slot & 1))
            continue;
        r = check_region(tables, layer, sqe, slot, &op->region[slot], ret);
        if (r < 0)
            return r;
    }
    op->layer = layer;
    op->opcode = sqe->opcode;
    return check_overlap(op, layer, ret);
}

int worker_validate(const struct worker_tables *tables, const struct worker_queue *queue, const struct mok_sqe *sqe,
                    struct worker_op *ret_op, struct worker_fault *ret_fault)
{
    int r = check_head(queue, sqe, ret_fault);
    if (r < 0)
        return r;
    ret_op->layer = NULL;
    if (sqe->opcode == MOK_OP_NOP || sqe->opcode == MOK_OP_CANCEL)
        r = check_simple(sqe, ret_fault);
    else
        r = check_layer_op(tables, queue, sqe, ret_op, ret_fault);
    if (r < 0)
        return r;
    ret_op->opcode = sqe->opcode;
    ret_op->context_mode = sqe->context_mode;
    ret_op->flags = sqe->flags & ~MOK_SQE_ON_STREAM; /* how inputs arrive is nobody else's affair */
    ret_op->on_stream = sqe->flags & MOK_SQE_ON_STREAM;
    ret_op->stream_slot = sqe->stream_slot;
    ret_op->stream_number = sqe->stream_number;
    ret_op->tokens = sqe->tokens;
    ret_op->timeout_ns = sqe->timeout_ns;
    return 0;
}
