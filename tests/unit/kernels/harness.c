/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices, layers and the driver of the harness. The driver is one thread that goes round all ranks and layers in a
 * random order and does what dispatch.h asks for; it never waits for one rank in particular.
 */
#include "harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>

#include "mx.h"
#include "plain_bf16.h"
#include "util.h"

/* Engine threads ring; the driver sleeps until then. */
struct harness_notifier {
    pthread_mutex_t lock;
    pthread_cond_t rung;
    uint64_t rings, seen;
};

static void notify(void *cookie)
{
    struct harness_notifier *notifier = cookie;

    pthread_mutex_lock(&notifier->lock);
    notifier->rings++;
    pthread_cond_signal(&notifier->rung);
    pthread_mutex_unlock(&notifier->lock);
}

/* Sleeps until an engine rings, or a millisecond: nothing here may depend on a ring. */
static void notifier_wait(struct harness_notifier *notifier)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_sec++;
        until.tv_nsec -= 1000000000;
    }
    pthread_mutex_lock(&notifier->lock);
    while (notifier->rings == notifier->seen)
        if (pthread_cond_timedwait(&notifier->rung, &notifier->lock, &until))
            break;
    notifier->seen = notifier->rings;
    pthread_mutex_unlock(&notifier->lock);
}

const struct mok_engine_ops *harness_engine(void)
{
    const char *name = getenv("MOK_TEST_ENGINE");
    const struct mok_engine_ops *ops =
        mok_engine_find(name && !strcmp(name, "cuda") ? MOK_DEVICE_CUDA : MOK_DEVICE_HOST);

    if (!ops)
        fail_msg("this build has no engine %s", name ? name : "host");
    return ops;
}

struct harness *harness_open(const struct harness_options *options)
{
    struct harness *h = test_calloc(1, sizeof(*h));
    struct mok_message message = { { 0 } };

    h->options = *options;
    h->options.ranks = options->ranks ? options->ranks : 1;
    h->options.threads = options->threads ? options->threads : 1;
    assert_true(h->options.ranks <= HARNESS_MAX_RANKS);
    h->ops = options->engine ? options->engine : harness_engine();
    h->rng = (struct rng){ options->seed };
    h->notifier = test_calloc(1, sizeof(*h->notifier));
    pthread_mutex_init(&h->notifier->lock, NULL);
    pthread_cond_init(&h->notifier->rung, NULL);
    for (uint32_t r = 0; r < h->options.ranks; r++) {
        struct mok_engine_config config = { .threads = h->options.threads,
                                            .notify = notify,
                                            .cookie = h->notifier,
                                            .chaos_delay_us = h->options.chaos_delay_us };
        if (h->ops->probe(&config, &h->limits, &message) < 0 || h->ops->open(&config, &h->engine[r], &message) < 0)
            fail_msg("engine of rank %u: %s", r, message.text);
    }
    return h;
}

void harness_close(struct harness *h)
{
    for (uint32_t i = 0; i < HARNESS_MAX_LAYERS; i++)
        if (h->layers[i])
            layer_close(h->layers[i]);
    for (uint32_t r = 0; r < h->options.ranks; r++)
        h->ops->close(h->engine[r]);
    pthread_mutex_destroy(&h->notifier->lock);
    pthread_cond_destroy(&h->notifier->rung);
    test_free(h->notifier);
    test_free(h);
}

/* ------------------------------------------------------------------ layers */

struct mok_layer_spec layer_spec(const struct harness *h, const struct problem *shape,
                                 const struct layer_options *options, uint32_t rank)
{
    return (struct mok_layer_spec){
        .hidden = shape->hidden,
        .intermediate = shape->intermediate,
        .experts = shape->experts,
        .topk = shape->topk,
        .ep = h->options.ranks,
        .rank = rank,
        .max_tokens = options->max_tokens ? options->max_tokens
                      : shape->tokens     ? shape->tokens
                                          : 1,
        .precision = options->precision ? options->precision : MOK_BF16,
        .shared_intermediate = shape->shared_intermediate,
        .clamp = shape->clamp,
        .ring_bytes = options->ring_bytes,
        .minibatch_rows = options->minibatch_rows,
        .comm_units = options->comm_units,
        .gradient_dtype = options->bf16_gradients ? MOK_DTYPE_BF16 : 0,
        .wgrad_precision = options->mxfp8_wgrad ? MOK_WGRAD_MXFP8 : 0,
    };
}

uint64_t smallest_ring(const struct harness *h, const struct mok_layer_spec *spec)
{
    struct mok_layer_spec trial = *spec;
    struct mok_message message;
    struct mok_plan plan;
    uint64_t refused = 0, accepted = 1ull << 40;

    while (accepted - refused > 1) {
        trial.ring_bytes = refused + (accepted - refused) / 2;
        if (mok_plan_make(&trial, &h->limits, &plan, NULL, 0, &message) < 0)
            refused = trial.ring_bytes;
        else
            accepted = trial.ring_bytes;
    }
    return accepted;
}

static struct guarded filled(const void *from, size_t bytes, bool sparse)
{
    struct guarded memory = sparse ? guarded_alloc_sparse(bytes) : guarded_alloc(bytes, GUARDED_AT_END);
    if (from && bytes)
        memcpy(memory.data, from, bytes);
    return memory;
}

/* The slice of a [E][rows][columns] parameter that rank r owns; as codes and scales where the layer is MXFP8. */
static void open_expert_parameter(const struct layer *layer, const uint16_t *all, uint32_t r, uint64_t rows,
                                  uint64_t columns, struct guarded *ret, struct guarded *ret_scale)
{
    uint32_t precision = layer->plan[r].spec.precision;
    uint64_t count = rows * layer->local_experts * columns, blocks = (columns + 31) / 32;
    const uint16_t *slice = all ? all + r * count : NULL;

    if (precision == MOK_BF16) {
        *ret = filled(slice, count * sizeof(uint16_t), layer->sparse);
        return;
    }
    *ret = guarded_alloc(count, GUARDED_AT_END);
    *ret_scale = guarded_alloc(rows * layer->local_experts * blocks, GUARDED_AT_END);
    assert_int_equal(mok_mx_quantize(slice, rows * layer->local_experts, columns,
                                     precision == MOK_MXFP8_PER32 ? 32 : 128, 1, ret->data, ret_scale->data),
                     0);
}

static void params_open(struct layer *layer, const struct problem *p, uint32_t r)
{
    struct params *params = &layer->params[r];
    size_t experts = problem_expert_elements(p) * layer->local_experts;
    size_t shared = (size_t)p->shared_intermediate * p->hidden;
    size_t gradient = mok_spec_bf16_gradients(&layer->plan[r].spec) ? sizeof(uint16_t) : sizeof(float);
    struct guarded *expert_gradients[] = { &params->d_gate, &params->d_up, &params->d_down };
    struct guarded *shared_gradients[] = { &params->d_shared_gate, &params->d_shared_up, &params->d_shared_down };

    open_expert_parameter(layer, p->gate, r, p->intermediate, p->hidden, &params->gate, &params->gate_scale);
    open_expert_parameter(layer, p->up, r, p->intermediate, p->hidden, &params->up, &params->up_scale);
    open_expert_parameter(layer, p->down, r, p->hidden, p->intermediate, &params->down, &params->down_scale);
    for (size_t i = 0; i < ARRAY_SIZE(expert_gradients); i++)
        *expert_gradients[i] = filled(NULL, experts * gradient, layer->sparse);
    if (!shared)
        return;
    params->shared_gate = filled(p->shared_gate, shared * sizeof(uint16_t), false);
    params->shared_up = filled(p->shared_up, shared * sizeof(uint16_t), false);
    params->shared_down = filled(p->shared_down, shared * sizeof(uint16_t), false);
    for (size_t i = 0; i < ARRAY_SIZE(shared_gradients); i++)
        *shared_gradients[i] = filled(NULL, shared * gradient, false);
}

static void each_gradient(struct layer *layer, void (*act)(struct guarded *))
{
    for (uint32_t r = 0; r < layer->ranks; r++) {
        struct params *p = &layer->params[r];
        struct guarded *all[] = { &p->d_gate,        &p->d_up,        &p->d_down,
                                  &p->d_shared_gate, &p->d_shared_up, &p->d_shared_down };
        for (size_t i = 0; i < ARRAY_SIZE(all); i++)
            act(all[i]);
    }
}

static void zero_memory(struct guarded *memory)
{
    if (memory->map && !memory->sparse)
        memset(memory->data, 0, memory->bytes);
}

static void poison_memory(struct guarded *memory)
{
    if (memory->map && !memory->sparse)
        poison(memory->data, memory->bytes);
}

void layer_zero_gradients(struct layer *layer)
{
    each_gradient(layer, zero_memory);
}

void layer_start_gradients(struct layer *layer, float start)
{
    for (uint32_t r = 0; r < layer->ranks; r++) {
        struct params *p = &layer->params[r];
        struct guarded *all[] = { &p->d_gate,        &p->d_up,        &p->d_down,
                                  &p->d_shared_gate, &p->d_shared_up, &p->d_shared_down };
        bool narrow = mok_spec_bf16_gradients(&layer->plan[r].spec);
        for (size_t a = 0; a < ARRAY_SIZE(all); a++) {
            size_t count = all[a]->bytes / (narrow ? 2 : 4), first = a < 3 ? r * count : 0;
            for (size_t i = 0; i < count; i++) {
                float value = start * (float)((int)((first + i) % 7) - 3) + 0.0f; /* of 0 never -0 */
                if (narrow)
                    ((uint16_t *)(void *)all[a]->data)[i] = bf16_from_float(value);
                else
                    ((float *)(void *)all[a]->data)[i] = value;
            }
        }
    }
}

void layer_poison_gradients(struct layer *layer)
{
    each_gradient(layer, poison_memory);
}

static void open_on_rank(struct layer *layer, uint32_t r, void *const *symmetric)
{
    struct harness *h = layer->harness;
    struct mok_message message = { { 0 } };
    int code = h->ops->layer_open(h->engine[r], &layer->plan[r], symmetric, layer->private_memory[r].data,
                                  &layer->engine_layer[r], &message);
    if (code < 0)
        fail_msg("layer_open of rank %u: %d, %s", r, code, message.text);
}

struct layer *layer_open(struct harness *h, const struct problem *p, const struct layer_options *options)
{
    struct layer *layer = test_calloc(1, sizeof(*layer));
    void *symmetric[HARNESS_MAX_RANKS];
    struct mok_message message = { { 0 } };
    uint32_t at = 0;

    while (at < HARNESS_MAX_LAYERS && h->layers[at])
        at++;
    assert_true(at < HARNESS_MAX_LAYERS);
    h->layers[at] = layer;
    *layer = (struct layer){ .harness = h,
                             .shape = *p,
                             .ranks = h->options.ranks,
                             .poison_private = !options->sparse,
                             .sparse = options->sparse };
    assert_int_equal(p->experts % layer->ranks, 0);
    layer->local_experts = p->experts / layer->ranks;
    layer->flags = guarded_alloc(layer->ranks * MOK_FLAGS_BYTES, GUARDED_PAGE_START);
    memset(layer->flags.data, 0, layer->flags.bytes);
    for (uint32_t r = 0; r < layer->ranks; r++) {
        struct mok_layer_spec spec = layer_spec(h, p, options, r);
        if (options->ring_tiles)
            spec.ring_bytes = options->ring_tiles * smallest_ring(h, &spec);
        if (mok_plan_make(&spec, &h->limits, &layer->plan[r], NULL, 0, &message) < 0)
            fail_msg("plan of rank %u: %s", r, message.text);
        const struct mok_plan *plan = &layer->plan[r];
        layer->symmetric[r] = options->sparse ? guarded_alloc_sparse(plan->symmetric_bytes)
                                              : guarded_alloc(plan->symmetric_bytes, GUARDED_PAGE_START);
        layer->private_memory[r] = options->sparse ? guarded_alloc_sparse(plan->private_bytes)
                                                   : guarded_alloc(plan->private_bytes, GUARDED_PAGE_START);
        symmetric[r] = layer->symmetric[r].data;
        params_open(layer, p, r);
    }
    for (uint32_t r = 0; r < layer->ranks; r++) {
        open_on_rank(layer, r, symmetric);
        layer->view[r] = (struct mok_dispatch_view){ .ep = layer->ranks, .rank = r };
        for (uint32_t peer = 0; peer < layer->ranks; peer++)
            layer->view[r].flags[peer] = (void *)(layer->flags.data + peer * MOK_FLAGS_BYTES);
    }
    layer_zero_gradients(layer);
    return layer;
}

static void params_close(struct params *params)
{
    struct guarded *all = (struct guarded *)params;
    for (size_t i = 0; i < sizeof(*params) / sizeof(*all); i++)
        guarded_free(&all[i]);
}

void layer_close(struct layer *layer)
{
    struct harness *h = layer->harness;

    for (uint32_t r = 0; r < layer->ranks; r++) {
        if (layer->engine_layer[r])
            h->ops->layer_close(layer->engine_layer[r]);
        guarded_free(&layer->symmetric[r]);
        guarded_free(&layer->private_memory[r]);
        params_close(&layer->params[r]);
    }
    guarded_free(&layer->flags);
    for (uint32_t i = 0; i < HARNESS_MAX_LAYERS; i++)
        if (h->layers[i] == layer)
            h->layers[i] = NULL;
    test_free(layer);
}

void layer_check_canaries(const struct layer *layer)
{
    if (!guarded_check(&layer->flags))
        fail_msg("written beyond the flags");
    for (uint32_t r = 0; r < layer->ranks; r++) {
        const struct guarded *all = (const struct guarded *)&layer->params[r];
        if (!guarded_check(&layer->symmetric[r]))
            fail_msg("rank %u: written beyond the symmetric workspace", r);
        if (!guarded_check(&layer->private_memory[r]))
            fail_msg("rank %u: written beyond the private workspace", r);
        for (size_t i = 0; i < sizeof(struct params) / sizeof(*all); i++)
            if (!guarded_check(&all[i]))
                fail_msg("rank %u: written beyond parameter %zu", r, i);
    }
}

/* ------------------------------------------------------------------ driver */

static struct operation *head_of(const struct layer *layer, uint32_t rank)
{
    for (struct operation *op = layer->operations; op; op = op->next)
        if (!op->rank[rank].done)
            return op;
    return NULL;
}

static void begin(struct operation *op, uint32_t r)
{
    struct rank_operation *mine = &op->rank[r];
    struct layer *layer = op->layer;
    struct mok_op_info info = {
        .seq = ++layer->begun[r],
        .kind = mine->args.kind,
        .context_mode = mine->args.context_mode,
        .flags = mine->args.flags,
        .tokens = mine->args.tokens,
        .x_buffer = mine->args.tokens ? mine->x_buffer : 0,
        .d_out_buffer = mine->args.tokens ? mine->d_out_buffer : 0,
    };

    if (layer->poison_private)
        poison(layer->private_memory[r].data, layer->private_memory[r].bytes);
    mok_dispatch_begin(&mine->dispatch, info.seq, &info);
    if (mine->cancel)
        assert_int_equal(mok_dispatch_cancel(&mine->dispatch, &layer->view[r], mine->cancel), 0);
    mine->begun = true;
}

static const void *resolve(const struct harness *h, uint32_t buffer, uint64_t offset, uint32_t rank)
{
    return buffer ? h->registry[buffer][rank] + offset : NULL;
}

static void start_phase(struct operation *op, uint32_t r, enum mok_phase phase)
{
    struct harness *h = op->layer->harness;
    struct rank_operation *mine = &op->rank[r];

    bool main = phase == MOK_PHASE_MAIN || phase == MOK_PHASE_WHOLE;
    for (uint32_t p = 0; main && p < op->layer->ranks; p++) {
        const struct mok_op_info *info = &op->layer->view[r].flags[p]->info;
        mine->peer[p] = (struct mok_peer){
            .x = resolve(h, info->x_buffer, info->x_offset, p),
            .d_out = resolve(h, info->d_out_buffer, info->d_out_offset, p),
            .tokens = info->tokens,
        };
    }
    mine->args.peer = mine->peer;
    assert_int_equal(h->ops->start(op->layer->engine_layer[r], &mine->args, phase), 0);
    h->busy[r] = mine;
    mine->pending = MOK_ACT_WAIT;
    if (mine->abort_in == phase)
        h->ops->abort(h->engine[r]);
}

static void complete(struct rank_operation *mine)
{
    mine->result = mine->dispatch.result;
    mine->fault_rank = mine->dispatch.fault_rank;
    mine->done = true;
}

/* One look at one layer on one rank; true if anything moved. */
static bool advance(struct layer *layer, uint32_t r)
{
    static const enum mok_phase phase_of[] = {
        [MOK_ACT_PREPARE] = MOK_PHASE_PREPARE, [MOK_ACT_MAIN] = MOK_PHASE_MAIN, [MOK_ACT_REDUCE] = MOK_PHASE_REDUCE
    };
    struct harness *h = layer->harness;
    struct operation *op = head_of(layer, r);
    bool moved = false;

    if (!op || op->rank[r].absent)
        return false;
    struct rank_operation *mine = &op->rank[r];
    if (!mine->begun && mine->late) {
        mine->late--;
        return true;
    }
    if (!mine->begun)
        begin(op, r);
    if (h->busy[r] == mine)
        return false;
    if (mine->pending == MOK_ACT_WAIT)
        mine->pending = mok_dispatch_step(&mine->dispatch, &layer->view[r], mok_now_ns(), &moved);
    if (mine->pending == MOK_ACT_COMPLETE) {
        complete(mine);
        return true;
    }
    if (mine->pending == MOK_ACT_WAIT || h->busy[r])
        return moved;
    enum mok_phase phase = phase_of[mine->pending];
    /* Either way must give the same. */
    if (phase == MOK_PHASE_PREPARE && layer->ranks == 1 && h->ops->runs_whole && !mine->abort_in &&
        rng_below(&h->rng, 2)) {
        phase = MOK_PHASE_WHOLE;
        mok_dispatch_whole(&mine->dispatch, &layer->view[r], mok_now_ns());
    }
    start_phase(op, r, phase);
    return true;
}

static bool reap_phase(struct harness *h, uint32_t r)
{
    struct mok_op_result result;

    if (!h->busy[r])
        return false;
    int ended = h->ops->poll(h->engine[r], &result);
    assert_true(ended == 0 || ended == 1);
    if (!ended)
        return false;
    mok_dispatch_phase_done(&h->busy[r]->dispatch, &result);
    h->busy[r] = NULL;
    return true;
}

static bool all_done(const struct harness *h)
{
    for (uint32_t i = 0; i < HARNESS_MAX_LAYERS; i++)
        for (uint32_t r = 0; h->layers[i] && r < h->options.ranks; r++) {
            const struct operation *op = head_of(h->layers[i], r);
            if (op && !op->rank[r].absent)
                return false;
        }
    return true;
}

static bool anyone_absent(const struct harness *h)
{
    for (uint32_t i = 0; i < HARNESS_MAX_LAYERS; i++)
        for (const struct operation *op = h->layers[i] ? h->layers[i]->operations : NULL; op; op = op->next)
            for (uint32_t r = 0; r < h->options.ranks; r++)
                if (op->rank[r].absent)
                    return true;
    return false;
}

void harness_drive(struct harness *h)
{
    uint64_t last_move = mok_now_ns();
    uint64_t patience = anyone_absent(h) ? 50000000 : 20000000000;

    while (!all_done(h)) {
        bool moved = false;
        uint32_t rank_start = rng_below(&h->rng, h->options.ranks), layer_start = rng_below(&h->rng, 4);
        for (uint32_t i = 0; i < h->options.ranks; i++) {
            uint32_t r = (rank_start + i) % h->options.ranks;
            moved |= reap_phase(h, r);
            for (uint32_t n = 0; n < HARNESS_MAX_LAYERS; n++) {
                struct layer *layer = h->layers[(layer_start + n + r) % HARNESS_MAX_LAYERS];
                if (layer)
                    moved |= advance(layer, r);
            }
        }
        if (moved) {
            last_move = mok_now_ns();
            continue;
        }
        notifier_wait(h->notifier);
        if (mok_now_ns() - last_move < patience)
            continue;
        if (anyone_absent(h))
            return;
        fail_msg("no rank moved for 20 s");
    }
}
