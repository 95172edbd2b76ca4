/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of a layer: checks the spec, makes every choice with its reason, and counts every byte.
 * With the bounds of mok/types.h no product or sum here can leave 64 bits: rows stay below 2^38, bytes of a row of the
 * ring below 2^25, so that a ring that holds everything stays below 2^63.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "dispatch.h"
#include "hd.h"
#include "layer.h"
#include "plan_backend.h"
#include "schedule.h"

#define PART_ALIGN 256u   /* parts of a workspace and of a context */
#define BUFFER_ALIGN 4096u /* sizes of whole buffers */

struct text {
    char *at;
    size_t left;
};

static void explain(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void explain(struct text *text, const char *format, ...)
{
    va_list args;
    int length;

    if (!text->at || text->left == 0)
        return;
    va_start(args, format);
    length = vsnprintf(text->at, text->left, format, args);
    va_end(args);
    if (length < 0)
        return;
    if ((size_t)length >= text->left)
        length = (int)text->left - 1;
    text->at += length;
    text->left -= (size_t)length;
}

static int check_range(const char *name, uint64_t value, uint64_t low, uint64_t high, struct mok_message *message)
{
    if (value >= low && value <= high)
        return 0;
    return mok_fail(message, -MOK_ERANGE, "%s = %llu is outside %llu..%llu", name, (unsigned long long)value,
                    (unsigned long long)low, (unsigned long long)high);
}

static int check_dim(const char *name, uint32_t value, struct mok_message *message)
{
    int r = check_range(name, value, MOK_DIM_MULTIPLE, MOK_MAX_DIM, message);

    if (r < 0)
        return r;
    if (value % MOK_DIM_MULTIPLE)
        return mok_fail(message, -MOK_EALIGN, "%s = %u is not a multiple of %u", name, value, MOK_DIM_MULTIPLE);
    return 0;
}

static int check_spec(const struct mok_layer_spec *spec, struct mok_message *message)
{
    int r;

    if ((r = check_dim("hidden", spec->hidden, message)) < 0)
        return r;
    if ((r = check_dim("intermediate", spec->intermediate, message)) < 0)
        return r;
    if (spec->shared_intermediate && (r = check_dim("shared_intermediate", spec->shared_intermediate, message)) < 0)
        return r;
    if ((r = check_range("ep", spec->ep, 1, MOK_MAX_EP, message)) < 0)
        return r;
    if (spec->rank >= spec->ep)
        return mok_fail(message, -MOK_ERANK, "rank = %u is not below ep = %u", spec->rank, spec->ep);
    if ((r = check_range("experts", spec->experts, 1, MOK_MAX_EXPERTS, message)) < 0)
        return r;
    if (spec->experts % spec->ep)
        return mok_fail(message, -MOK_ERANGE, "experts = %u is not a multiple of the group's %u ranks", spec->experts,
                        spec->ep);
    if ((r = check_range("topk", spec->topk, 1, MOK_MAX_TOPK, message)) < 0)
        return r;
    if ((r = check_range("max_tokens", spec->max_tokens, 1, MOK_MAX_TOKENS, message)) < 0)
        return r;
    if (spec->precision < MOK_BF16 || spec->precision > MOK_MXFP8_PER128)
        return mok_fail(message, -MOK_EDTYPE, "precision = %u is none of 1 (bf16), 2 (mxfp8 per32), 3 (mxfp8 per128)",
                        spec->precision);
    if (spec->gradient_dtype && spec->gradient_dtype != MOK_DTYPE_BF16 && spec->gradient_dtype != MOK_DTYPE_F32)
        return mok_fail(message, -MOK_EDTYPE, "gradient_dtype = %u is none of 0, %u (f32), %u (bf16)",
                        spec->gradient_dtype, MOK_DTYPE_F32, MOK_DTYPE_BF16);
    if (spec->wgrad_precision && spec->wgrad_precision != MOK_WGRAD_BF16 && spec->wgrad_precision != MOK_WGRAD_MXFP8)
        return mok_fail(message, -MOK_EDTYPE, "wgrad_precision = %u is none of 0, %u (bf16), %u (mxfp8)",
                        spec->wgrad_precision, MOK_WGRAD_BF16, MOK_WGRAD_MXFP8);
    if (mok_spec_mxfp8_wgrad(spec) && spec->precision == MOK_BF16)
        return mok_fail(message, -MOK_EDTYPE,
                        "wgrad_precision = %u (mxfp8) is of MXFP8 layers, not of precision = %u (bf16)",
                        spec->wgrad_precision, spec->precision);
    if ((r = check_range("transposed_weights", spec->transposed_weights, 0, 1, message)) < 0)
        return r;
    if (spec->transposed_weights && spec->precision != MOK_MXFP8_PER128)
        return mok_fail(message, -MOK_EDTYPE,
                        "transposed_weights = %u is of layers of precision %u (mxfp8 per128) alone, not of %u",
                        spec->transposed_weights, MOK_MXFP8_PER128, spec->precision);
    if (!isfinite(spec->clamp) || spec->clamp < 0)
        return mok_fail(message, -MOK_ERANGE, "clamp = %g is not 0 (none) or a finite positive limit",
                        (double)spec->clamp);
    return 0;
}

static const struct mok_plan_backend *find_backend(uint32_t kind)
{
    switch (kind) {
    case MOK_DEVICE_HOST:
        return &mok_host_plan_backend;
#if defined(MOK_HAVE_CUDA)
    case MOK_DEVICE_CUDA:
        return &mok_cuda_plan_backend;
#endif
    default:
        return NULL;
    }
}

static int choose_units(struct mok_plan *plan, const struct mok_plan_backend *backend, struct text *text,
                        struct mok_message *message)
{
    uint32_t limit = backend->max_comm_units(plan);
    struct mok_plan_choice comm = backend->comm_units(plan);

    if (plan->spec.comm_units) {
        int r = check_range("comm_units", plan->spec.comm_units, 1, limit, message);

        if (r < 0)
            return r;
        comm = (struct mok_plan_choice){ plan->spec.comm_units, "as asked" };
    }
    plan->comm_units = (uint32_t)comm.value;
    plan->compute_units = backend->compute_units(plan, plan->comm_units);
    explain(text, "comm_units = %u (%s)\n", plan->comm_units, comm.reason);
    explain(text, "compute_units = %u (of the device's %u units)\n", plan->compute_units, plan->device.units);
    return 0;
}

static int choose_ring(struct mok_plan *plan, const struct mok_plan_backend *backend, struct text *text,
                       struct mok_message *message)
{
    uint64_t row_bytes = backend->ring_row_bytes(plan), tile_bytes = row_bytes * plan->tile_rows;
    uint64_t worst = mok_schedule_rows_at_worst(plan->max_rows, plan->local_experts, plan->tile_rows);
    struct mok_plan_choice ring = backend->ring_bytes(plan);

    if (plan->spec.ring_bytes) {
        ring = (struct mok_plan_choice){ plan->spec.ring_bytes, "as asked" };
        if (ring.value < tile_bytes)
            return mok_fail(message, -MOK_ERANGE, "ring_bytes = %llu is below %llu, one tile of %u rows",
                            (unsigned long long)ring.value, (unsigned long long)tile_bytes, plan->tile_rows);
    }
    plan->ring_rows = mok_max_u64(mok_round_down(ring.value / row_bytes, plan->tile_rows), plan->tile_rows);
    if (plan->ring_rows >= worst) {
        plan->ring_rows = worst;
        ring.reason = "holds every row that can come: one macrobatch";
    }
    explain(text, "ring_rows = %llu (%s; %llu bytes a row, multiple of tile_rows)\n",
            (unsigned long long)plan->ring_rows, ring.reason, (unsigned long long)row_bytes);
    explain(text, "ring_bytes = %llu (ring_rows rows)\n", (unsigned long long)(plan->ring_rows * row_bytes));
    explain(text, "macrobatches_at_worst = %llu (all ranks' tokens on this rank's experts)\n",
            (unsigned long long)mok_div_up(worst, plan->ring_rows));
    return 0;
}

static void choose_minibatch(struct mok_plan *plan, const struct mok_plan_backend *backend, struct text *text)
{
    struct mok_plan_choice rows = backend->minibatch_rows(plan);

    if (plan->spec.minibatch_rows)
        rows = (struct mok_plan_choice){ plan->spec.minibatch_rows, "as asked" };
    rows.value = mok_round_up(rows.value, plan->tile_rows);
    if (rows.value > plan->ring_rows) {
        rows.value = plan->ring_rows;
        rows.reason = "the whole ring";
    }
    plan->minibatch_rows = (uint32_t)mok_min_u64(rows.value, mok_round_down(UINT32_MAX, plan->tile_rows));
    explain(text, "minibatch_rows = %u (%s; multiple of tile_rows)\n", plan->minibatch_rows, rows.reason);
}

static uint64_t place(uint64_t *offset, uint64_t bytes)
{
    uint64_t at = *offset;

    *offset = mok_round_up(at + bytes, PART_ALIGN);
    return at;
}

static void count_bytes(struct mok_plan *plan, const struct mok_plan_backend *backend, struct text *text)
{
    const struct mok_layer_spec *spec = &plan->spec;
    uint64_t slots = (uint64_t)spec->max_tokens * spec->topk, at = 0;

    plan->sym_ids = place(&at, slots * sizeof(int32_t));
    plan->sym_topk_weight = place(&at, slots * sizeof(float));
    plan->sym_weight_slots = place(&at, slots * sizeof(float));
    plan->sym_slots = place(&at, slots * spec->hidden * 2);
    plan->sym_engine = place(&at, backend->symmetric_bytes ? backend->symmetric_bytes(plan) : 0);
    plan->symmetric_bytes = mok_round_up(at, BUFFER_ALIGN);

    at = 0;
    place(&at, sizeof(struct mok_context_header));
    plan->ctx_ids = place(&at, slots * sizeof(int32_t));
    plan->ctx_topk_weight = place(&at, slots * sizeof(float));
    plan->context_recompute_bytes = mok_round_up(at, BUFFER_ALIGN);
    plan->ctx_ring = place(&at, backend->context_ring_bytes(plan));
    plan->context_full_bytes = mok_round_up(at, BUFFER_ALIGN);

    plan->private_bytes = mok_round_up(mok_max_u64(backend->private_bytes(plan), 1), BUFFER_ALIGN);

    explain(text, "symmetric_bytes = %llu (routing of %u tokens, a row of H for each of their %u slots)\n",
            (unsigned long long)plan->symmetric_bytes, spec->max_tokens, spec->topk);
    explain(text, "private_bytes = %llu (schedule, ring, shared expert)\n", (unsigned long long)plan->private_bytes);
    explain(text, "context_full_bytes = %llu (routing and one macrobatch's x, gate and up rows)\n",
            (unsigned long long)plan->context_full_bytes);
    explain(text, "context_recompute_bytes = %llu (routing)\n", (unsigned long long)plan->context_recompute_bytes);
}

static void explain_mxfp8(struct text *text, const struct mok_layer_spec *spec)
{
    if (spec->precision == MOK_BF16)
        return;
    explain(text, "wgrad_precision = %s (operands of the experts' weight gradients)\n",
            mok_spec_mxfp8_wgrad(spec) ? "mxfp8" : "bf16");
    explain(text, "transposed_weights = %u (%s)\n", spec->transposed_weights,
            spec->transposed_weights ? "bound by the program" : "a GPU's backward turns weights itself");
}

int mok_plan_make(const struct mok_layer_spec *spec, const struct mok_device_limits *device, struct mok_plan *ret,
                  char *describe, size_t describe_size, struct mok_message *message)
{
    const struct mok_plan_backend *backend;
    struct mok_plan_choice tile_rows;
    struct text text = { describe, describe_size };
    struct mok_plan plan;
    int r;

    if (describe && describe_size > 0)
        describe[0] = '\0';
    r = check_spec(spec, message);
    if (r < 0)
        return r;
    backend = find_backend(device->kind);
    if (!backend)
        return mok_fail(message, -MOK_ENODEV, "device kind = %u has no engine in this build", device->kind);
    if (device->units == 0)
        return mok_fail(message, -MOK_ERANGE, "device units = 0, at least 1 is needed");

    memset(&plan, 0, sizeof(plan));
    plan.spec = *spec;
    plan.device = *device;
    plan.local_experts = spec->experts / spec->ep;
    plan.max_rows = (uint64_t)spec->ep * spec->max_tokens * spec->topk;
    tile_rows = backend->tile_rows(&plan);
    plan.tile_rows = (uint32_t)tile_rows.value;

    explain(&text, "local_experts = %u (%u experts over %u ranks)\n", plan.local_experts, spec->experts, spec->ep);
    explain(&text, "max_rows = %llu (ep * max_tokens * topk: every slot of every rank)\n",
            (unsigned long long)plan.max_rows);
    explain(&text, "tile_rows = %u (%s)\n", plan.tile_rows, tile_rows.reason);
    explain_mxfp8(&text, spec);
    r = choose_units(&plan, backend, &text, message);
    if (r < 0)
        return r;
    r = choose_ring(&plan, backend, &text, message);
    if (r < 0)
        return r;
    choose_minibatch(&plan, backend, &text);
    count_bytes(&plan, backend, &text);
    *ret = plan;
    return 0;
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    unsigned i;

    for (i = 0; i < 8; i++) {
        hash ^= (value >> (8 * i)) & 0xff;
        hash *= 0x100000001b3ull;
    }
    return hash;
}

uint64_t mok_plan_hash(const struct mok_plan *plan)
{
    const struct mok_layer_spec *spec = &plan->spec;
    uint64_t hash = 0xcbf29ce484222325ull;

    hash = mix(hash, spec->hidden);
    hash = mix(hash, spec->intermediate);
    hash = mix(hash, spec->experts);
    hash = mix(hash, spec->topk);
    hash = mix(hash, spec->ep);
    hash = mix(hash, spec->rank);
    hash = mix(hash, spec->max_tokens);
    hash = mix(hash, spec->precision);
    hash = mix(hash, mok_f32_bits(spec->clamp));
    hash = mix(hash, plan->device.kind);
    hash = mix(hash, plan->tile_rows);
    return mix(hash, plan->ring_rows);
}
