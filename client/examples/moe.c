/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libmok as a training program uses it: a few large buffers, views into them, submissions that never block, and one
 * wait where the result is needed. Never touches memory of an operation that is in flight.
 */
#include "moe.h"

#include <stdlib.h>

#include "mok/mok.h"
#include "report.h"

#define JOIN_MS 60000u               /* until all ranks of the job are there */
#define ALLOC_MS 30000u              /* for each collective answer */
#define RECOVER_MS 120000u           /* until mokd is back and all ranks have noticed */
#define OPERATION_NS 120000000000ull /* counted from the moment all ranks joined the operation */
#define VIEW_ALIGN 256u

struct slot {
    mok_view x, d_out;                                           /* symmetric */
    mok_view ids, topk_weight, out, d_x, d_topk_weight, context; /* private */
    mok_ticket forward, backward;
};

struct layer {
    mok_layer *layer;
    mok_buffer *symmetric, *private;
    mok_view weights[MOE_WEIGHTS], scales[MOE_WEIGHTS], gradients[MOE_WEIGHTS];
    mok_view transposed[MOE_WEIGHTS], transposed_scales[MOE_WEIGHTS]; /* MXFP8 per 128; scales are not bound */
    struct slot *slots;
};

struct moe {
    struct moe_config config;
    mok_session *session;
    mok_group *group;
    struct layer *layers;
    struct moe_totals totals;
};

static int failed(int code, const char *what)
{
    return fail(code, "%s: %s (%s)", what, mok_last_error(), mok_error_name(code));
}

/* Whether it is the end is decided by moe_recover. */
static int operation_failed(int code, const char *what)
{
    return code == -MOK_EDAEMON ? code : failed(code, what);
}

size_t moe_weight_count(const struct moe *moe, enum moe_weight which)
{
    const struct moe_config *config = &moe->config;

    if (which < MOE_SHARED_GATE)
        return (size_t)(config->experts / config->ranks) * config->intermediate * config->hidden;
    return (size_t)config->shared_intermediate * config->hidden;
}

/* Length of the tensor's rows, along which MXFP8 blocks lie. */
static size_t row_length(const struct moe_config *config, enum moe_weight which)
{
    return which == MOE_DOWN ? config->intermediate : config->hidden;
}

/* Rows of one expert's matrix. */
static size_t matrix_rows(const struct moe_config *config, enum moe_weight which)
{
    return which == MOE_DOWN ? config->hidden : config->intermediate;
}

static int in_mxfp8(const struct moe_config *config, enum moe_weight which)
{
    return config->precision != MOK_BF16 && which < MOE_SHARED_GATE;
}

/*
 * Weights per 128 have one scale for 128 x 128 values: the fastest, and it holds both ways, so a backward need not turn
 * them itself.
 */
static int in_tiles(const struct moe_config *config, enum moe_weight which)
{
    return config->precision == MOK_MXFP8_PER128 && which < MOE_SHARED_GATE;
}

static unsigned weight_kinds(const struct moe_config *config)
{
    return config->shared_intermediate ? MOE_WEIGHTS : MOE_SHARED_GATE;
}

/* Takes the next `bytes` of a buffer that is still to be allocated. */
static mok_view carve(uint64_t *used, uint64_t bytes)
{
    mok_view view = { .offset = *used, .bytes = bytes };

    *used += (bytes + VIEW_ALIGN - 1) / VIEW_ALIGN * VIEW_ALIGN;
    return view;
}

/* Lays out one layer's memory; returns the bytes of the symmetric and of the private buffer. */
static void lay_out(struct moe *moe, struct layer *layer, uint64_t context_bytes, uint64_t *ret_symmetric,
                    uint64_t *ret_private)
{
    const struct moe_config *config = &moe->config;
    uint64_t rows = (uint64_t)config->tokens * config->hidden * sizeof(uint16_t);
    uint64_t slots = (uint64_t)config->tokens * config->topk * sizeof(float);
    uint64_t symmetric = 0, private = 0;

    for (unsigned w = 0; w < weight_kinds(config); w++) {
        size_t count = moe_weight_count(moe, (enum moe_weight)w), length = row_length(config, (enum moe_weight)w);

        if (in_mxfp8(config, (enum moe_weight)w)) {
            layer->weights[w] = carve(&private, count);
            layer->scales[w] = carve(&private, mok_mxfp8_scale_bytes(count / length, length));
            if (in_tiles(config, (enum moe_weight)w)) {
                size_t height = matrix_rows(config, (enum moe_weight)w);

                layer->transposed[w] = carve(&private, count);
                layer->transposed_scales[w] = carve(&private, mok_mxfp8_scale_bytes(count / height, height));
            }
        } else {
            layer->weights[w] = carve(&private, count * sizeof(uint16_t));
        }
        layer->gradients[w] = carve(&private, count * sizeof(float));
    }
    for (unsigned m = 0; m < config->micro_batches; m++) {
        struct slot *slot = &layer->slots[m];

        slot->x = carve(&symmetric, rows);
        slot->d_out = carve(&symmetric, rows);
        slot->ids = carve(&private, slots);
        slot->topk_weight = carve(&private, slots);
        slot->out = carve(&private, rows);
        slot->d_x = carve(&private, rows);
        slot->d_topk_weight = carve(&private, slots);
        slot->context = carve(&private, context_bytes);
    }
    *ret_symmetric = symmetric;
    *ret_private = private;
}

static void give_memory(const struct moe_config *config, struct layer *layer)
{
    for (unsigned w = 0; w < weight_kinds(config); w++) {
        layer->weights[w].buffer = layer->gradients[w].buffer = layer->private;
        if (in_mxfp8(config, (enum moe_weight)w))
            layer->scales[w].buffer = layer->private;
        if (in_tiles(config, (enum moe_weight)w))
            layer->transposed[w].buffer = layer->transposed_scales[w].buffer = layer->private;
    }
    for (unsigned m = 0; m < config->micro_batches; m++) {
        struct slot *slot = &layer->slots[m];

        slot->x.buffer = slot->d_out.buffer = layer->symmetric;
        slot->ids.buffer = slot->topk_weight.buffer = slot->out.buffer = layer->private;
        slot->d_x.buffer = slot->d_topk_weight.buffer = slot->context.buffer = layer->private;
    }
}

static int bind_weights(struct layer *layer)
{
    const mok_view *w = layer->weights, *g = layer->gradients;
    mok_layer_params params = {
        .size = sizeof(params),
        .gate = w[MOE_GATE],
        .up = w[MOE_UP],
        .down = w[MOE_DOWN],
        .d_gate = g[MOE_GATE],
        .d_up = g[MOE_UP],
        .d_down = g[MOE_DOWN],
        .shared_gate = w[MOE_SHARED_GATE],
        .shared_up = w[MOE_SHARED_UP],
        .shared_down = w[MOE_SHARED_DOWN],
        .d_shared_gate = g[MOE_SHARED_GATE],
        .d_shared_up = g[MOE_SHARED_UP],
        .d_shared_down = g[MOE_SHARED_DOWN],
        .gate_scale = layer->scales[MOE_GATE],
        .up_scale = layer->scales[MOE_UP],
        .down_scale = layer->scales[MOE_DOWN],
        .gate_transposed = layer->transposed[MOE_GATE],
        .up_transposed = layer->transposed[MOE_UP],
        .down_transposed = layer->transposed[MOE_DOWN],
    };
    int rc = mok_layer_bind(layer->layer, &params);

    return rc < 0 ? failed(rc, "mok_layer_bind") : 0;
}

static int layer_open(struct moe *moe, struct layer *layer)
{
    const struct moe_config *config = &moe->config;
    mok_layer_options options = {
        .size = sizeof(options),
        .hidden = config->hidden,
        .intermediate = config->intermediate,
        .experts = config->experts,
        .topk = config->topk,
        .max_tokens = config->tokens,
        .precision = config->precision,
        .wgrad_precision = config->wgrad,
        .shared_intermediate = config->shared_intermediate,
        .transposed_weights = config->precision == MOK_MXFP8_PER128,
    };
    uint64_t symmetric, private;
    mok_layer_memory memory;
    int rc;

    layer->slots = calloc(config->micro_batches, sizeof(*layer->slots));
    if (!layer->slots)
        return fail(-MOK_ENOMEM, "no memory");
    rc = mok_layer_memory_query(moe->group, &options, &memory);
    if (rc < 0)
        return failed(rc, "mok_layer_memory_query");
    lay_out(moe, layer, config->recompute ? memory.context_recompute_bytes : memory.context_full_bytes, &symmetric,
            &private);
    rc = mok_layer_create(moe->group, &options, ALLOC_MS, &layer->layer);
    if (rc < 0)
        return failed(rc, "mok_layer_create");
    rc = mok_buffer_alloc_symmetric(moe->group, symmetric, ALLOC_MS, &layer->symmetric);
    if (rc < 0)
        return failed(rc, "mok_buffer_alloc_symmetric");
    rc = mok_buffer_alloc_private(moe->session, config->device, private, &layer->private);
    if (rc < 0)
        return failed(rc, "mok_buffer_alloc_private");
    give_memory(config, layer);
    return bind_weights(layer);
}

static const char *kind_name(unsigned kind)
{
    return kind == MOK_DEVICE_CUDA ? "CUDA" : "host";
}

/* The device that was asked for, which must be of the kind; or the `device`-th of them. */
static int choose_device(struct moe *moe)
{
    struct moe_config *config = &moe->config;
    mok_device_info devices[MOK_MAX_DEVICES];
    int count = mok_device_list(moe->session, devices, MOK_MAX_DEVICES);
    unsigned before = 0;

    if (count < 0)
        return failed(count, "mok_device_list");
    for (int i = 0; i < count; i++) {
        int is = devices[i].kind == config->kind;

        if (config->any_device ? is && before++ == config->device : devices[i].index == config->device) {
            if (!is)
                return fail(-MOK_ENODEV, "--devices: device %u (%s) is not a %s device", config->device,
                            devices[i].name, kind_name(config->kind));
            config->device = devices[i].index;
            return 0;
        }
    }
    if (config->any_device)
        return fail(-MOK_ENODEV, "mokd has %u %s devices, this job needs one more", before, kind_name(config->kind));
    return fail(-MOK_ENODEV, "--devices: mokd has no device %u", config->device);
}

/* What is in flight, and with a stream what was a step ago. */
static uint32_t queue_entries(const struct moe_config *config)
{
    uint32_t entries = 64, wanted = 2 * config->micro_batches * (config->backend->queued ? config->layers : 1);

    while (entries < wanted && entries < 4096)
        entries *= 2;
    return entries;
}

static int open_all(struct moe *moe)
{
    const struct moe_config *config = &moe->config;
    mok_session_options session = {
        .size = sizeof(session),
        .socket_path = config->socket,
        .job = config->job,
        .queue_entries = queue_entries(config),
    };
    mok_group_options group = {
        .size = sizeof(group),
        .name = config->job,
        .ranks = config->ranks,
        .rank = config->rank,
        .device = config->device,
        .timeout_ms = JOIN_MS,
    };
    int rc = mok_session_open(&session, &moe->session);

    if (rc < 0)
        return failed(rc, "mok_session_open");
    rc = choose_device(moe);
    if (rc < 0)
        return rc;
    group.device = config->device;
    rc = mok_group_join(moe->session, &group, &moe->group);
    if (rc < 0)
        return failed(rc, "mok_group_join");
    moe->layers = calloc(config->layers, sizeof(*moe->layers));
    if (!moe->layers)
        return fail(-MOK_ENOMEM, "no memory");
    for (unsigned l = 0; l < config->layers; l++) {
        rc = layer_open(moe, &moe->layers[l]);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int moe_open(const struct moe_config *config, struct moe **ret)
{
    struct moe *moe = calloc(1, sizeof(*moe));
    int rc;

    if (!moe)
        return fail(-MOK_ENOMEM, "no memory");
    moe->config = *config;
    rc = open_all(moe);
    if (rc < 0) {
        moe_close(moe);
        return rc;
    }
    *ret = moe;
    return 0;
}

/* Takes things apart in the order that the library asks for; whatever is in use goes with the session. */
void moe_close(struct moe *moe)
{
    if (!moe)
        return;
    for (unsigned l = 0; moe->layers && l < moe->config.layers; l++) {
        struct layer *layer = &moe->layers[l];

        mok_layer_destroy(layer->layer);
        mok_buffer_free(layer->private);
        mok_buffer_free(layer->symmetric);
        free(layer->slots);
    }
    mok_group_leave(moe->group);
    mok_session_close(moe->session);
    free(moe->layers);
    free(moe);
}

static void *address(mok_view view)
{
    return view.buffer ? (char *)mok_buffer_data(view.buffer) + view.offset : NULL;
}

struct moe_activations moe_activations(struct moe *moe, unsigned layer, unsigned micro)
{
    const struct slot *slot = &moe->layers[layer].slots[micro];

    return (struct moe_activations){
        .x = address(slot->x),
        .d_out = address(slot->d_out),
        .ids = address(slot->ids),
        .topk_weight = address(slot->topk_weight),
        .out = address(slot->out),
        .d_x = address(slot->d_x),
        .d_topk_weight = address(slot->d_topk_weight),
    };
}

int moe_set_weights(struct moe *moe, unsigned layer, enum moe_weight which, const float *values)
{
    const struct moe_config *config = &moe->config;
    const struct layer *to = &moe->layers[layer];
    size_t count = moe_weight_count(moe, which), length = row_length(config, which), rows = matrix_rows(config, which);
    void *weights = address(to->weights[which]);
    mok_mxfp8_options options = {
        .size = sizeof(options),
        .matrices = count / length / rows,
        .rows = rows,
        .columns = length,
        .dtype = MOK_DTYPE_F32,
        .precision = config->precision,
        .flags = in_tiles(config, which) ? MOK_QUANTIZE_TILES : 0,
    };
    int rc;

    if (!in_mxfp8(config, which)) {
        config->backend->to_bf16(count, values, weights);
        return 0;
    }
    rc = config->backend->to_mxfp8(&options, values, weights, address(to->scales[which]),
                                   address(to->transposed[which]), address(to->transposed_scales[which]));
    return rc < 0 ? failed(rc, "quantising weights") : 0;
}

uint16_t *moe_weights(struct moe *moe, unsigned layer, enum moe_weight which)
{
    return address(moe->layers[layer].weights[which]);
}

float *moe_gradients(struct moe *moe, unsigned layer, enum moe_weight which)
{
    return address(moe->layers[layer].gradients[which]);
}

static mok_stream stream_of(const struct moe *moe)
{
    return (mok_stream)moe->config.backend->stream();
}

/* What became of an operation; nothing where none is in flight. */
static int finish(struct moe *moe, mok_ticket *ticket, const char *what)
{
    mok_result result;
    int rc;

    if (!*ticket)
        return 0;
    rc = mok_wait(moe->session, *ticket, -1, &result);
    *ticket = 0;
    if (rc == 0)
        rc = result.code;
    if (rc < 0)
        return operation_failed(rc, what);
    moe->totals.operations++;
    moe->totals.rows += result.rows;
    moe->totals.dropped += result.dropped;
    moe->totals.device_ns += result.device_ns;
    moe->totals.engine = result.engine;
    moe->totals.precision = result.precision;
    return 0;
}

int moe_forward(struct moe *moe, unsigned layer, unsigned micro)
{
    struct slot *slot = &moe->layers[layer].slots[micro];
    mok_forward_args args = {
        .size = sizeof(args),
        .tokens = moe->config.tokens,
        .context_mode = moe->config.recompute ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL,
        .timeout_ns = OPERATION_NS,
        .x = slot->x,
        .ids = slot->ids,
        .topk_weight = slot->topk_weight,
        .out = slot->out,
        .context = slot->context,
    };
    mok_layer *at = moe->layers[layer].layer;
    int rc = moe->config.backend->queued ? finish(moe, &slot->forward, "forward") : 0;

    if (rc < 0)
        return rc;
    rc = moe->config.backend->queued ? mok_layer_forward_on_stream(at, &args, stream_of(moe), &slot->forward)
                                     : mok_layer_forward(at, &args, &slot->forward);
    return rc < 0 ? operation_failed(rc, "mok_layer_forward") : 0;
}

int moe_backward(struct moe *moe, unsigned layer, unsigned micro, int overwrite)
{
    struct slot *slot = &moe->layers[layer].slots[micro];
    mok_backward_args args = {
        .size = sizeof(args),
        .tokens = moe->config.tokens,
        .context_mode = moe->config.recompute ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL,
        .flags = overwrite ? MOK_BACKWARD_OVERWRITE_WGRAD : 0,
        .timeout_ns = OPERATION_NS,
        .x = slot->x,
        .context = slot->context,
        .d_out = slot->d_out,
        .d_x = slot->d_x,
        .d_topk_weight = slot->d_topk_weight,
    };
    mok_layer *at = moe->layers[layer].layer;
    int rc = moe->config.backend->queued ? finish(moe, &slot->backward, "backward") : 0;

    if (rc < 0)
        return rc;
    rc = moe->config.backend->queued ? mok_layer_backward_on_stream(at, &args, stream_of(moe), &slot->backward)
                                     : mok_layer_backward(at, &args, &slot->backward);
    return rc < 0 ? operation_failed(rc, "mok_layer_backward") : 0;
}

int moe_forward_wait(struct moe *moe, unsigned layer, unsigned micro)
{
    return moe->config.backend->queued ? 0 : finish(moe, &moe->layers[layer].slots[micro].forward, "forward");
}

int moe_backward_wait(struct moe *moe, unsigned layer, unsigned micro)
{
    return moe->config.backend->queued ? 0 : finish(moe, &moe->layers[layer].slots[micro].backward, "backward");
}

int moe_settle(struct moe *moe)
{
    int rc = 0;

    for (unsigned l = 0; l < moe->config.layers && rc == 0; l++) {
        for (unsigned m = 0; m < moe->config.micro_batches && rc == 0; m++) {
            rc = finish(moe, &moe->layers[l].slots[m].forward, "forward");
            if (rc == 0)
                rc = finish(moe, &moe->layers[l].slots[m].backward, "backward");
        }
    }
    return rc;
}

static void drop(struct moe *moe, mok_ticket *ticket)
{
    mok_result result;

    if (*ticket)
        mok_wait(moe->session, *ticket, -1, &result);
    *ticket = 0;
}

int moe_recover(struct moe *moe)
{
    int rc;

    for (unsigned l = 0; l < moe->config.layers; l++) {
        for (unsigned m = 0; m < moe->config.micro_batches; m++) {
            drop(moe, &moe->layers[l].slots[m].forward);
            drop(moe, &moe->layers[l].slots[m].backward);
        }
    }
    rc = mok_session_recover(moe->session, RECOVER_MS);
    return rc < 0 ? failed(rc, "mok_session_recover") : 0;
}

struct moe_totals moe_totals(const struct moe *moe)
{
    return moe->totals;
}
