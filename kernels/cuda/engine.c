/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The CUDA engine's host side: opens a device, readies a layer's arguments and tensor maps, queues phases on a stream.
 * Never waits for the device except when a layer is opened or the engine closed.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../args.h"
#include "../hd.h"
#include "driver.h"
#include "engine.h"
#include "engine_layer.h"

#ifndef MOK_CUDA_WAIT_LIMIT_NS
#define MOK_CUDA_WAIT_LIMIT_NS 10000000000ull
#endif

static void cuda_close(struct mok_engine *engine);

static int check(cudaError_t e, const char *what, struct mok_message *message)
{
    if (e == cudaSuccess)
        return 0;
    return mok_fail(message, e == cudaErrorMemoryAllocation ? -MOK_ENOMEM : -MOK_EDEVICE, "%s: %s", what,
                    cudaGetErrorString(e));
}

static int cuda_probe(const struct mok_engine_config *config, struct mok_device_limits *ret,
                      struct mok_message *message)
{
    struct cudaDeviceProp prop;
    int count = 0, mps = 0, r;

    r = check(cudaGetDeviceCount(&count), "counting CUDA devices", message);
    if (r < 0)
        return r;
    if (config->index >= (uint32_t)count)
        return mok_fail(message, -MOK_ENODEV, "CUDA device %u: this machine has %d", config->index, count);
    r = check(cudaGetDeviceProperties(&prop, (int)config->index), "reading the device's properties", message);
    if (r < 0)
        return r;
    if (prop.major != 9 || prop.minor != 0)
        return mok_fail(message, -MOK_ENOTSUP, "CUDA device %u (%s): compute capability %d.%d, this build needs 9.0",
                        config->index, prop.name, prop.major, prop.minor);
    *ret = (struct mok_device_limits){ .kind = MOK_DEVICE_CUDA,
                                       .units = (uint32_t)prop.multiProcessorCount,
                                       .memory_bytes = prop.totalGlobalMem };
    memcpy(ret->uuid, prop.uuid.bytes, sizeof(ret->uuid));
    ret->mps = cudaDeviceGetAttribute(&mps, cudaDevAttrMpsEnabled, (int)config->index) == cudaSuccess && mps;
    return 0;
}

/* Each entry's words lie apart, so that no line has two owners. */
static int open_entries(struct mok_engine *e, struct mok_message *message)
{
    const size_t report = mok_round_up(sizeof(struct mok_cuda_report), 256), words = 256;
    uint8_t *host = NULL, *device = NULL;

    int r = check(cudaHostAlloc((void **)&host, MOK_CUDA_ENTRIES * report, cudaHostAllocPortable | cudaHostAllocMapped),
                  "allocating the report", message);
    e->entry[0].report = (struct mok_cuda_report *)host;
    if (r == 0)
        r = check(cudaMalloc((void **)&device, MOK_CUDA_ENTRIES * words), "allocating the abort word", message);
    e->entry[0].abort_word = (uint32_t *)device;
    if (r == 0)
        r = check(cudaMemset(device, 0, MOK_CUDA_ENTRIES * words), "clearing the abort word", message);
    if (r < 0)
        return r;
    memset(host, 0, MOK_CUDA_ENTRIES * report);
    for (uint32_t i = 0; i < MOK_CUDA_ENTRIES; i++) {
        e->entry[i].report = (struct mok_cuda_report *)(host + i * report);
        e->entry[i].abort_word = (uint32_t *)(device + i * words);
        e->entry[i].bad_id = e->entry[i].abort_word + 32;
    }
    e->now = &e->entry[0];
    return 0;
}

static int open_resources(struct mok_engine *e, struct mok_message *message)
{
    int r = check(cudaSetDevice((int)e->config.index), "choosing the device", message);
    if (r == 0)
        r = mok_cuda_driver_load(&e->driver, message);
    if (r == 0)
        r = check(cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking), "making a stream", message);
    if (r == 0)
        r = check(cudaStreamCreateWithFlags(&e->side, cudaStreamNonBlocking), "making a stream", message);
    if (r == 0)
        r = check(cudaStreamCreateWithFlags(&e->capture, cudaStreamNonBlocking), "making a stream", message);
    if (r == 0)
        r = check(cudaStreamCreateWithFlags(&e->boards, cudaStreamNonBlocking), "making a stream", message);
    if (r == 0)
        r = open_entries(e, message);
    if (r == 0)
        r = check((cudaError_t)mok_cuda_kernels_setup(), "readying the kernels", message);
    if (r == 0)
        r = check((cudaError_t)mok_cuda_mx_ready(), "readying the kernels of MXFP8", message);
    if (r == 0 && mok_cuda_run_find_room(e) < 0)
        r = mok_fail(message, -MOK_EDEVICE, "trying the streams of the device: %s",
                     cudaGetErrorString(cudaGetLastError()));
    return r;
}

static int cuda_open(const struct mok_engine_config *config, struct mok_engine **ret, struct mok_message *message)
{
    struct mok_device_limits limits;
    struct mok_engine *e;
    int r = cuda_probe(config, &limits, message);
    if (r < 0)
        return r;
    e = calloc(1, sizeof(*e));
    if (!e)
        return mok_fail(message, -MOK_ENOMEM, "out of memory");
    e->config = *config;
    e->blocks = limits.units - (uint32_t)mok_min_u64(config->reserve, limits.units);
    e->blocks = config->blocks && config->blocks < e->blocks ? config->blocks : e->blocks;
    e->blocks = (uint32_t)mok_max_u64(mok_round_down(e->blocks, MOK_CLUSTER), MOK_CLUSTER);
    r = open_resources(e, message);
    if (r < 0) {
        cuda_close(e);
        return r;
    }
    *ret = e;
    return 0;
}

static int cuda_memory_alloc(struct mok_engine *engine, uint64_t bytes, int *ret_fd, uint8_t *ret_fabric,
                             struct mok_message *message)
{
    cudaSetDevice((int)engine->config.index);
    return mok_cuda_memory_alloc(&engine->driver, (int)engine->config.index, bytes, ret_fd, ret_fabric, message);
}

static int cuda_fabric_map(struct mok_engine *engine, const uint8_t *fabric, uint64_t bytes, void **ret,
                           struct mok_message *message)
{
    cudaSetDevice((int)engine->config.index);
    return mok_cuda_fabric_map(&engine->driver, (int)engine->config.index, fabric, bytes, ret, message);
}

static int cuda_memory_map(struct mok_engine *engine, int fd, uint64_t bytes, void **ret, struct mok_message *message)
{
    cudaSetDevice((int)engine->config.index);
    return mok_cuda_memory_map(&engine->driver, (int)engine->config.index, fd, bytes, ret, message);
}

static void cuda_memory_unmap(struct mok_engine *engine, void *address, uint64_t bytes)
{
    cudaSetDevice((int)engine->config.index);
    mok_cuda_memory_unmap(&engine->driver, address, bytes);
}

static int cuda_fabric_try(struct mok_engine *engine, struct mok_message *message)
{
    int r = check(cudaSetDevice((int)engine->config.index), "selecting the device", message);
    return r < 0 ? -MOK_ENOTSUP : mok_cuda_fabric_try(&engine->driver, (int)engine->config.index, message);
}

static void fill_schedule(struct mok_engine_layer *l)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    uint8_t *m = l->private_memory;
    l->schedule = (struct mok_cuda_schedule_args){
        .ep = spec->ep,
        .rank = spec->rank,
        .topk = spec->topk,
        .hidden = spec->hidden,
        .x_row_bytes = (uint32_t)mok_cuda_x_row_bytes(&l->plan),
        .g_row_bytes = (uint32_t)mok_cuda_x_row_bytes(&l->plan),
        .local_experts = l->plan.local_experts,
        .first_expert = spec->rank * l->plan.local_experts,
        .gate_up_tiles = l->layout.gate_up_tiles,
        .down_tiles = l->layout.down_tiles,
        .shared_gate_up_tiles = l->layout.shared_gate_up_tiles,
        .units_per_chunk = l->layout.units_per_chunk,
        .shared_row64 = (uint32_t)(l->layout.padded_rows / MOK_SEGMENT_ALIGN),
        .ring_rows = l->plan.ring_rows,
        .tile_rows64 = l->plan.tile_rows / MOK_SEGMENT_ALIGN,
        .counters = l->layout.counters,
        .head = (struct mok_cuda_head *)(m + l->layout.head),
        .segments = (struct mok_cuda_segment *)(m + l->layout.segments),
        .chunks = (struct mok_cuda_chunk *)(m + l->layout.chunks),
        .macrobatches = (struct mok_cuda_macrobatch *)(m + l->layout.macrobatches),
        .tasks = (struct mok_cuda_task *)(m + l->layout.tasks),
        .hidden_done = (uint32_t *)(m + l->layout.hidden_done),
        .pull_done = (uint32_t *)(m + l->layout.pull_done),
        .row_src = (uint64_t *)(m + l->layout.row_src),
        .row_dst = (uint64_t *)(m + l->layout.row_dst),
        .pulls = (struct mok_cuda_task *)(m + l->layout.pulls),
        .row_pull = (uint64_t *)(m + l->layout.row_pull),
        .shared_y = spec->shared_intermediate ? m + l->layout.shared_y : NULL,
        .hidden_tiles = l->layout.hidden_tiles,
        .shared_hidden_tiles = l->layout.shared_hidden_tiles,
        .shared_ring64 = (uint32_t)(l->layout.shared_rows / MOK_SEGMENT_ALIGN),
        .runs = (struct mok_cuda_run *)(m + l->layout.runs),
        .gates_done = (uint32_t *)(m + l->layout.gates_done),
        .row_g = (uint64_t *)(m + l->layout.row_g),
        .row_weight_dst = (uint64_t *)(m + l->layout.row_weight_dst),
        .row_weight = (float *)(m + l->layout.row_weight),
        .weight_from_ids = (int64_t)l->plan.sym_topk_weight - (int64_t)l->plan.sym_ids,
        .weight_slots_from_ids = (int64_t)l->plan.sym_weight_slots - (int64_t)l->plan.sym_ids,
    };
    for (uint32_t r = 0; r < spec->ep; r++) {
        l->schedule.ids[r] = (const int32_t *)(l->symmetric[r] + l->plan.sym_ids);
        l->schedule.slot_rows[r] = l->symmetric[r] + l->plan.sym_slots;
    }
}

static void fill_main(struct mok_engine_layer *l)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    uint8_t *m = l->private_memory;
    l->main.common = (struct mok_cuda_common){
        .head = l->schedule.head,
        .macrobatches = l->schedule.macrobatches,
        .tasks = l->schedule.tasks,
        .hidden_done = l->schedule.hidden_done,
        .pull_done = l->schedule.pull_done,
        .row_src = l->schedule.row_src,
        .row_dst = l->schedule.row_dst,
        .pulls = l->schedule.pulls,
        .row_pull = l->schedule.row_pull,
        .x_ring = { NULL, spec->ep > 1 ? m + l->layout.x : NULL },
        .ring_bytes = spec->ep > 1 ? l->plan.ring_rows * l->schedule.x_row_bytes : 0,
        .x_row_bytes = l->schedule.x_row_bytes,
        .pull_clusters = spec->ep > 1 ? (uint32_t)mok_max_u64(l->plan.comm_units / MOK_CLUSTER, 1) : 0,
        .wait_limit_ns = MOK_CUDA_WAIT_LIMIT_NS,
        .hidden = spec->hidden,
        .k_blocks = (spec->hidden + MOK_TILE_K - 1) / MOK_TILE_K,
        .down_tiles = l->layout.down_tiles,
        .clamp = spec->clamp,
        .sides = mok_sides_of(spec->clamp),
        .chaos_delay_us = l->engine->config.chaos_delay_us,
        .slots = (uint32_t)mok_div_up(l->plan.ring_rows, l->plan.minibatch_rows),
        .slot_rows64 = (uint32_t)mok_div_up(l->plan.minibatch_rows, MOK_SEGMENT_ALIGN),
    };
    l->main.set[0].h = m + l->layout.h;
    l->main.set[0].inter = spec->intermediate;
    l->main.set[0].tiles = l->layout.gate_up_tiles;
    l->main.set[1].h = m + l->layout.shared_h;
    l->main.set[1].inter = spec->shared_intermediate;
    l->main.set[1].tiles = l->layout.shared_gate_up_tiles;
    for (int i = 0; i < 2; i++)
        l->main.set[i].k_blocks = (l->main.set[i].inter + MOK_TILE_K - 1) / MOK_TILE_K;
}

static void cuda_layer_close(struct mok_engine_layer *layer)
{
    mok_cuda_graph_free(layer);
    free(layer);
}

static int cuda_layer_open(struct mok_engine *engine, const struct mok_plan *plan, void *const *symmetric,
                           void *private_memory, struct mok_engine_layer **ret, struct mok_message *message)
{
    struct mok_engine_layer *l;

    if (plan->device.kind != MOK_DEVICE_CUDA)
        return mok_fail(message, -MOK_EDEVICE, "device kind of the plan = %u, this engine is %u", plan->device.kind,
                        MOK_DEVICE_CUDA);
    if ((uintptr_t)private_memory % 256)
        return mok_fail(message, -MOK_EALIGN, "the private workspace is not aligned to 256 bytes");
    l = aligned_alloc(_Alignof(struct mok_engine_layer), sizeof(*l)); /* tensor maps are aligned to 64 bytes */
    if (!l)
        return mok_fail(message, -MOK_ENOMEM, "no memory for a layer");
    memset(l, 0, sizeof(*l));
    l->engine = engine;
    l->plan = *plan;
    l->hash = mok_plan_hash(plan);
    l->private_memory = private_memory;
    for (uint32_t i = 0; i < plan->spec.ep; i++)
        l->symmetric[i] = symmetric[i];
    mok_cuda_layout_make(plan, &l->layout);
    mok_cuda_kept_make(plan, &l->kept);
    if (l->layout.max_macrobatches >= MOK_CUDA_MAX_MACROBATCHES) {
        int r =
            mok_fail(message, -MOK_ERANGE, "ring_rows = %llu: %llu macrobatches at worst, at most %u can be counted",
                     (unsigned long long)plan->ring_rows, (unsigned long long)l->layout.max_macrobatches,
                     MOK_CUDA_MAX_MACROBATCHES - 1);
        cuda_layer_close(l);
        return r;
    }
    fill_schedule(l);
    fill_main(l);
    mok_cuda_backward_fill(l);
    mok_cuda_mx_fill(l);
    mok_cuda_mx_backward_fill(l);
    *ret = l;
    return 0;
}

int mok_cuda_make_map(const struct mok_cuda_driver *d, CUtensorMap *ret, const void *base, uint32_t element_bytes,
                      uint64_t columns, uint64_t rows, uint64_t planes, uint32_t box_rows, uint32_t dimensions)
{
    return mok_cuda_make_row_map(d, ret, base, element_bytes, columns, rows, planes, box_rows, dimensions,
                                 columns * element_bytes);
}

int mok_cuda_make_row_map(const struct mok_cuda_driver *d, CUtensorMap *ret, const void *base, uint32_t element_bytes,
                          uint64_t columns, uint64_t rows, uint64_t planes, uint32_t box_rows, uint32_t dimensions,
                          uint64_t row_bytes)
{
    const cuuint64_t size[3] = { columns, rows, planes }, stride[2] = { row_bytes, row_bytes * rows };
    const cuuint32_t box[3] = { MOK_TILE_K * 2 / element_bytes, box_rows, 1 }, step[3] = { 1, 1, 1 };
    CUresult r = d->tensor_map_encode(
        ret, element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT32, dimensions,
        (void *)(uintptr_t)base, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return r == CUDA_SUCCESS ? 0 : -MOK_EDEVICE;
}

static int make_set_maps(const struct mok_cuda_driver *d, struct mok_cuda_set *s, const void *gate, const void *up,
                         const void *down, uint64_t hidden, uint64_t experts, uint64_t h_rows)
{
    int r = mok_cuda_make_map(d, &s->gate, gate, 2, hidden, s->inter, experts, MOK_TILE_N / 2, 3);
    if (r == 0)
        r = mok_cuda_make_map(d, &s->up, up, 2, hidden, s->inter, experts, MOK_TILE_N / 2, 3);
    if (r == 0)
        r = mok_cuda_make_map(d, &s->down, down, 2, s->inter, hidden, experts, MOK_TILE_N / 2, 3);
    if (r == 0)
        r = mok_cuda_make_map(d, &s->h_map, s->h, 2, s->inter, h_rows, 1, MOK_TILE_M, 2);
    return r;
}

static int make_maps(struct mok_engine_layer *l, const struct mok_expert_params *p)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    int r;

    if (l->maps_made && memcmp(&l->mapped, p, sizeof(*p)) == 0)
        return 0;
    l->maps_made = false;
    if (mok_cuda_is_mx(l))
        r = mok_cuda_mx_make_maps(l, p);
    else
        r = make_set_maps(&l->engine->driver, &l->main.set[0], p->gate, p->up, p->down, spec->hidden,
                          l->plan.local_experts, l->plan.ring_rows);
    if (r == 0 && spec->shared_intermediate)
        r = make_set_maps(&l->engine->driver, &l->main.set[1], p->shared_gate, p->shared_up, p->shared_down,
                          spec->hidden, 1, l->layout.shared_rows);
    if (r == 0) {
        l->mapped = *p;
        l->maps_made = true;
    }
    return r;
}

/* Where macrobatch 0, the last one, leaves its rows. */
static void keep_ring(struct mok_engine_layer *l, const struct mok_op_args *args)
{
    uint8_t *ring = args->context_mode == MOK_CONTEXT_FULL ? (uint8_t *)args->context + l->plan.ctx_ring : NULL;
    l->main.common.x_ring[0] = ring && l->plan.spec.ep > 1 ? ring + l->kept.x : l->main.common.x_ring[1];
    l->main.context_a = ring ? ring + l->kept.a : NULL;
    l->main.context_b = ring ? ring + l->kept.b : NULL;
}

/* Only now, when all ranks are well: a forward that fails before leaves its context alone. */
static int save_context(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    const uint8_t *own = l->symmetric[l->plan.spec.rank];
    uint8_t *context = args->context;
    struct mok_cuda_save_args a = {
        .header = { .magic = MOK_CONTEXT_MAGIC,
                    .layer_hash = l->hash,
                    .mode = args->context_mode,
                    .tokens = args->tokens,
                    .ring_rows_kept = args->context_mode == MOK_CONTEXT_FULL ? l->plan.ring_rows : 0 },
        .ids = (const int32_t *)(own + l->plan.sym_ids),
        .weight = (const float *)(own + l->plan.sym_topk_weight),
        .slots = (uint64_t)args->tokens * l->plan.spec.topk,
        .head = l->schedule.head,
        .bad_id = l->engine->now->bad_id,
        .to = (struct mok_context_header *)context,
        .to_ids = (int32_t *)(context + l->plan.ctx_ids),
        .to_weight = (float *)(context + l->plan.ctx_topk_weight),
    };
    return mok_cuda_launch_save(&a, stream) == 0 ? 0 : -MOK_EDEVICE;
}

static int enqueue_main(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    const struct mok_layer_spec *spec = &l->plan.spec;
    struct mok_cuda_schedule_args *s = &l->schedule;
    const bool backward = args->kind == MOK_KIND_BACKWARD;
    int r = backward ? mok_cuda_backward_make_maps(l, args) : make_maps(l, &args->params);
    if (r < 0)
        return r;
    s->slot_first[0] = 0;
    for (uint32_t i = 0; i < spec->ep; i++) {
        s->slot_first[i + 1] = s->slot_first[i] + (uint64_t)args->peer[i].tokens * spec->topk;
        s->x[i] = args->peer[i].x;
        s->g[i] = args->peer[i].d_out;
    }
    s->slots = s->slot_first[spec->ep];
    s->shared_tokens = spec->shared_intermediate ? args->tokens : 0;
    s->shared_x = args->peer[spec->rank].x;
    s->shared_g = args->peer[spec->rank].d_out;
    s->backward = backward;
    s->kept = backward && args->context_mode == MOK_CONTEXT_FULL;
    s->overwrite = (args->flags & MOK_OPF_OVERWRITE_WGRAD) != 0;
    s->report = l->engine->now->report;
    s->bad_id = l->engine->now->bad_id;
    const bool mx = mok_cuda_is_mx(l);
    s->apart = spec->ep > 1 && !backward && !mx;
    s->left_apart = spec->ep > 1 && s->kept && !mx;
    s->unit_pulls = mx && !backward ? MOK_MX_PULLS : spec->ep > 1;
    if (!backward)
        keep_ring(l, args);
    for (uint32_t i = 0; i < 2; i++)
        s->x_ring[i] = l->main.common.x_ring[i];
    if (s->left_apart)
        s->x_ring[0] = (uint8_t *)args->context + l->plan.ctx_ring + l->kept.x;
    if (!mx)
        r = mok_cuda_launch_schedule(s, stream) == 0 ? 0 : -MOK_EDEVICE;
    else
        r = backward ? mok_cuda_mx_backward_schedule(l, args, stream) : mok_cuda_mx_schedule(l, args, stream);
    if (r < 0)
        return r;
    if (backward)
        return mok_cuda_backward_launch(l, args, stream);
    if (args->context_mode != MOK_CONTEXT_NONE && save_context(l, args, stream) < 0)
        return -MOK_EDEVICE;
    if (mx)
        return mok_cuda_mx_launch(l, args, stream);
    l->main.common.chaos_seed++;
    l->main.common.abort_word = l->engine->now->abort_word;
    l->main.common.report = l->engine->now->report;
    l->main.common.marks = l->engine->now->marks_now;
    mok_cuda_retire(l, args, s->slots, &l->main.common);
    return mok_cuda_launch_main(&l->main, l->engine->blocks, stream) == 0 ? 0 : -MOK_EDEVICE;
}

static int enqueue_prepare(struct mok_engine_layer *l, const struct mok_op_args *args, uint32_t *bad_id, void *stream)
{
    const struct mok_cuda_run_entry *entry = l->engine->now;
    uint8_t *own = l->symmetric[l->plan.spec.rank];
    struct mok_cuda_prepare_args a = {
        .ids = args->ids,
        .weight = args->topk_weight,
        .slots = (uint64_t)args->tokens * l->plan.spec.topk,
        .experts = l->plan.spec.experts,
        .sym_ids = (int32_t *)(own + l->plan.sym_ids),
        .sym_weight = (float *)(own + l->plan.sym_topk_weight),
        .report = entry->report,
        .bad_id = bad_id,
        .withdraw = entry->gate.start ? &entry->report->withdraw : NULL,
    };
    if (args->kind == MOK_KIND_BACKWARD)
        mok_cuda_backward_prepare(l, args, &a);
    if (mok_cuda_launch_prepare(&a, stream) != 0)
        return -MOK_EDEVICE;
    return mok_cuda_is_mx(l) && !mok_cuda_mx_beside(l, args) ? mok_cuda_mx_quantize(l, args, bad_id, stream) : 0;
}

static int enqueue_reduce(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    const uint8_t *own = l->symmetric[l->plan.spec.rank];
    struct mok_cuda_reduce_args a = {
        .ids = (const int32_t *)(own + l->plan.sym_ids),
        .weight = (const float *)(own + l->plan.sym_topk_weight),
        .slots = own + l->plan.sym_slots,
        .shared = l->schedule.shared_y,
        .out = args->out,
        .bad_id = l->engine->now->bad_id,
        .tokens = args->tokens,
        .topk = l->plan.spec.topk,
        .hidden = l->plan.spec.hidden,
        .accumulate = (args->flags & MOK_OPF_ACCUMULATE_OUT) != 0,
    };
    if (args->kind == MOK_KIND_BACKWARD) {
        a.weight = NULL;
        a.out = args->d_x;
        a.weight_slots = (const float *)(own + l->plan.sym_weight_slots);
        a.d_topk_weight = args->d_topk_weight;
        a.accumulate = 0;
    }
    return mok_cuda_launch_reduce(&a, stream) == 0 ? 0 : -MOK_EDEVICE;
}

/* What can be said about the arguments without the device. */
static void check_phase(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase,
                        struct mok_op_result *ret)
{
    *ret = (struct mok_op_result){ 0 };
    if (phase == MOK_PHASE_WHOLE && layer->plan.spec.ep != 1)
        mok_args_refuse(ret, -MOK_EARG, MOK_ARG_RANKS, layer->plan.spec.ep);
    else if (phase == MOK_PHASE_PREPARE || phase == MOK_PHASE_WHOLE)
        mok_args_check(&layer->plan, args, ret);
    if (ret->status == 0 && mok_cuda_is_mx(layer) && phase == MOK_PHASE_PREPARE && args->tokens) {
        const struct mok_peer *own = args->peer ? &args->peer[layer->plan.spec.rank] : NULL;
        if (!own || !own->x)
            mok_args_refuse(ret, -MOK_EARG, MOK_ARG_X, layer->plan.spec.rank);
        else if (args->kind == MOK_KIND_BACKWARD && !own->d_out)
            mok_args_refuse(ret, -MOK_EARG, MOK_ARG_D_OUT, layer->plan.spec.rank);
    }
    if (ret->status == 0 && (phase == MOK_PHASE_MAIN || phase == MOK_PHASE_WHOLE))
        mok_args_check_peers(&layer->plan, args, ret);
}

static int enqueue_whole(struct mok_engine_layer *l, const struct mok_op_args *args, void *stream)
{
    int r = enqueue_prepare(l, args, l->engine->now->bad_id, stream);
    if (r == 0)
        r = enqueue_main(l, args, stream);
    if (r == 0)
        r = mok_cuda_trace_main_over(l->engine->now, stream);
    return r == 0 ? enqueue_reduce(l, args, stream) : r;
}

/* Makes the entry that of a phase; its `refused` says whether there is anything to queue. */
int mok_cuda_ready(struct mok_cuda_run_entry *entry, struct mok_engine_layer *layer, const struct mok_op_args *args,
                   enum mok_phase phase, const struct mok_engine_gate *gate)
{
    struct mok_engine *e = layer->engine;

    if (cudaSetDevice((int)e->config.index) != cudaSuccess)
        return -MOK_EDEVICE;
    e->now = entry;
    entry->layer = layer;
    entry->phase = phase;
    entry->gate = gate ? *gate : (struct mok_engine_gate){ 0 };
    if (gate && !gate->start)
        entry->gate.start = &entry->report->go;
    entry->open = entry->aborted = false;
    entry->report->bad_slot_flat = UINT64_MAX;
    entry->report->tripped = 0;
    entry->report->withdraw = entry->report->withdrawn = 0;
    entry->args = (struct mok_cuda_asked){ args->kind, args->context_mode, args->tokens };
    check_phase(layer, args, phase, &entry->refused);
    mok_cuda_trace_ready(entry);
    return 0;
}

static int enqueue(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase, void *stream)
{
    switch (phase) {
    case MOK_PHASE_PREPARE:
        return enqueue_prepare(layer, args, layer->engine->now->gate.start ? layer->engine->now->bad_id : NULL, stream);
    case MOK_PHASE_MAIN:
        return enqueue_main(layer, args, stream);
    case MOK_PHASE_REDUCE:
        return enqueue_reduce(layer, args, stream);
    case MOK_PHASE_WHOLE:
        return enqueue_whole(layer, args, stream);
    }
    return -MOK_EARG;
}

int mok_cuda_queue(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase, void *stream)
{
    struct mok_cuda_run_entry *entry = layer->engine->now;

    if (entry->refused.status < 0)
        return 0;
    int r = mok_cuda_trace_begin(entry, stream);
    if (r == 0)
        r = enqueue(layer, args, phase, stream);
    return r == 0 ? mok_cuda_trace_end(entry, stream) : r;
}

int mok_cuda_enqueue(struct mok_engine_layer *layer, const struct mok_op_args *args, enum mok_phase phase, void *stream)
{
    int r = mok_cuda_ready(&layer->engine->entry[0], layer, args, phase, NULL);
    return r == 0 ? mok_cuda_queue(layer, args, phase, stream) : r;
}

/* The first bad id; the copy in the symmetric workspace is what was checked. */
static int report_bad_slot(struct mok_cuda_run_entry *entry, uint64_t slot, struct mok_op_result *ret)
{
    struct mok_engine_layer *layer = entry->layer;
    const uint8_t *ids = layer->symmetric[layer->plan.spec.rank] + layer->plan.sym_ids;
    int32_t value = 0;

    if (cudaMemcpyAsync(&value, ids + 4 * slot, sizeof(value), cudaMemcpyDeviceToHost, layer->engine->side) !=
            cudaSuccess ||
        cudaStreamSynchronize(layer->engine->side) != cudaSuccess)
        return -MOK_EDEVICE;
    *ret = (struct mok_op_result){ .status = -MOK_EEXPERT,
                                   .argument = entry->args.kind == MOK_KIND_FORWARD ? MOK_ARG_IDS : MOK_ARG_CONTEXT,
                                   .bad_token = slot / layer->plan.spec.topk,
                                   .bad_slot = slot % layer->plan.spec.topk,
                                   .bad_value = value };
    return 0;
}

/* Clears words of an entry, before anything that is queued later can see them. */
int mok_cuda_clear(struct mok_engine *e, uint32_t *word)
{
    if (cudaMemsetAsync(word, 0, sizeof(*word), e->side) != cudaSuccess)
        return -MOK_EDEVICE;
    return cudaStreamSynchronize(e->side) == cudaSuccess ? 0 : -MOK_EDEVICE;
}

/* What passed the ring, from what each expert got. */
static void describe_rows(struct mok_cuda_run_entry *e, struct mok_op_result *ret)
{
    const volatile struct mok_cuda_report *report = e->report;
    const struct mok_plan *plan = &e->layer->plan;

    for (uint32_t i = 0; i < plan->local_experts; i++) {
        e->expert_rows[i] = report->expert_rows[i];
        ret->padded_rows += mok_round_up(e->expert_rows[i], plan->tile_rows);
    }
    uint64_t whole = ret->padded_rows / plan->ring_rows, rest = ret->padded_rows % plan->ring_rows;
    ret->macrobatches = whole + (rest != 0);
    ret->minibatches =
        whole * mok_div_up(plan->ring_rows, plan->minibatch_rows) + mok_div_up(rest, plan->minibatch_rows);
    ret->expert_rows = e->expert_rows;
}

int mok_cuda_entry_outcome(struct mok_cuda_run_entry *e, struct mok_op_result *ret)
{
    struct mok_engine_layer *layer = e->layer;
    const volatile struct mok_cuda_report *report = e->report;
    struct mok_op_result r = e->refused;

    bool prepared = e->phase == MOK_PHASE_PREPARE || e->phase == MOK_PHASE_WHOLE;
    bool ran = e->phase == MOK_PHASE_MAIN || e->phase == MOK_PHASE_WHOLE;

    if (r.status == 0 && prepared && e->args.kind == MOK_KIND_BACKWARD)
        mok_cuda_backward_check_context(layer, e, &r);
    if (r.status == 0 && prepared && report->bad_slot_flat != UINT64_MAX) {
        int code = report_bad_slot(e, report->bad_slot_flat, &r);
        if (code < 0)
            return code;
    }
    if (r.status < 0 && e->refused.status == 0 && prepared && mok_cuda_clear(layer->engine, e->bad_id) < 0)
        return -MOK_EDEVICE;
    if (r.status == 0 && ran) {
        r.rows = report->rows;
        r.schedule_ns = report->schedule_to_ns - report->schedule_from_ns;
        describe_rows(e, &r);
        if (report->tripped) {
            r.status = -MOK_EINTERNAL;
            layer->engine->trip = e->report->trip;
            mok_cuda_clear(layer->engine, e->abort_word);
        }
    }
    *ret = r;
    return 0;
}

int mok_cuda_outcome(struct mok_engine_layer *layer, struct mok_op_result *ret)
{
    return mok_cuda_entry_outcome(&layer->engine->entry[0], ret);
}

void mok_cuda_describe_trip(const struct mok_engine *engine, struct mok_message *ret)
{
    static const char *const waits[] = {
        [0] = "nothing",
        [MOK_WAIT_ROWS_HERE] = "pulled rows",
        [MOK_WAIT_HIDDEN] = "all of h",
        [MOK_WAIT_RING_X] = "free ring rows (x)",
        [MOK_WAIT_RING_H] = "free ring rows (h)",
        [MOK_WAIT_GATES] = "gate and up made again",
        [MOK_WAIT_GRADIENTS] = "all of d_a and d_b",
        [MOK_WAIT_RUN] = "a run's d_a, d_b and h",
        [MOK_WAIT_RING_GATES] = "free ring rows (a, b)",
        [MOK_WAIT_RING_WGRADS] = "weight gradients of the ring's rows before",
        [MOK_WAIT_RING_GRADIENTS] = "free ring rows (d_a, d_b)",
    };
    const uint32_t known = sizeof(waits) / sizeof(waits[0]);
    const struct mok_cuda_trip *t = &engine->trip;
    snprintf(ret->text, sizeof(ret->text),
             "block %u waited for %s until %u of %u; task: row %llu, ring row %llu, what %#x, how %#x", t->block,
             waits[t->what < known ? t->what : 0], t->seen, t->want, (unsigned long long)t->task.row64 * MOK_SEGMENT_ALIGN,
             (unsigned long long)t->task.ring64 * MOK_SEGMENT_ALIGN, t->task.what, t->task.how);
}

static void cuda_close(struct mok_engine *engine)
{
    if (!engine)
        return;
    if (cudaSetDevice((int)engine->config.index) == cudaSuccess) {
        mok_cuda_run_abort(engine);
        mok_cuda_run_withdraw(engine);
        if (engine->stream)
            cudaStreamSynchronize(engine->stream);
        if (engine->side)
            cudaStreamDestroy(engine->side);
        if (engine->capture)
            cudaStreamDestroy(engine->capture);
        if (engine->boards)
            cudaStreamDestroy(engine->boards);
        if (engine->stream)
            cudaStreamDestroy(engine->stream);
        mok_cuda_trace_close(engine);
        cudaFree(engine->entry[0].abort_word);
        cudaFreeHost(engine->entry[0].report);
    }
    free(engine);
}

const struct mok_engine_ops mok_cuda_engine = {
    .name = "cuda",
    .kind = MOK_DEVICE_CUDA,
    .runs_whole = true,
    .probe = cuda_probe,
    .open = cuda_open,
    .close = cuda_close,
    .memory_alloc = cuda_memory_alloc,
    .memory_map = cuda_memory_map,
    .memory_unmap = cuda_memory_unmap,
    .fabric_try = cuda_fabric_try,
    .fabric_map = cuda_fabric_map,
    .board_open = mok_cuda_board_open,
    .board_post = mok_cuda_board_post,
    .board_look = mok_cuda_board_look,
    .board_poll = mok_cuda_board_poll,
    .board_close = mok_cuda_board_close,
    .layer_open = cuda_layer_open,
    .layer_close = cuda_layer_close,
    .start = mok_cuda_run_start,
    .poll = mok_cuda_run_poll,
    .explain = mok_cuda_describe_trip,
    .abort = mok_cuda_run_abort,
    .gate_map = mok_cuda_run_gate_map,
    .gate_unmap = mok_cuda_run_gate_unmap,
    .start_ahead = mok_cuda_run_start_ahead,
    .go = mok_cuda_run_go,
    .withdraw = mok_cuda_run_withdraw,
    .trace = mok_cuda_trace,
};
