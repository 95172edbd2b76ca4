/* SPDX-License-Identifier: Apache-2.0 */
/* Layers: made and bound by mokd and the worker; this side knows their shapes, so that it can refuse what cannot fit.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "port.h"
#include "session.h"
#include "wire.h"

int layer_check(const mok_layer *layer)
{
    return layer ? group_check(layer->group) : client_fail(MOK_EARG, "layer is NULL");
}

int layer_ready(const mok_layer *layer, unsigned opcode)
{
    if (layer->changing)
        return client_fail(MOK_EBUSY, "layer %" PRIu32 " is being bound or destroyed by another thread", layer->id);
    if (!layer->has_weights)
        return client_fail(MOK_ESTATE, "layer %" PRIu32 " has not all its weights bound, see mok_layer_bind",
                           layer->id);
    if (opcode == MOK_OP_BACKWARD && !layer->has_gradients)
        return client_fail(MOK_ESTATE, "layer %" PRIu32 " has not all its weight gradients%s bound, see mok_layer_bind",
                           layer->id, layer->spec.transposed_weights ? " and transposed weights" : "");
    return 0;
}

void layer_drop(mok_layer *layer)
{
    mok_session *session = layer->group->session;

    for (size_t i = 0; i < LAYER_PARAMS; i++) {
        if (layer->bound[i])
            layer->bound[i]->bindings--;
    }
    for (mok_layer **at = &session->layers; *at; at = &(*at)->next) {
        if (*at == layer) {
            *at = layer->next;
            break;
        }
    }
    free(layer);
}

/* ------------------------------------------------------------------ creation */

static void copy_memory(mok_layer_memory *ret, const Mok__LayerMemory *memory)
{
    *ret = (mok_layer_memory){
        .symmetric_bytes = memory->symmetric_bytes,
        .private_bytes = memory->private_bytes,
        .context_full_bytes = memory->context_full_bytes,
        .context_recompute_bytes = memory->context_recompute_bytes,
    };
}

/* A layer that does not say has on an older mokd what that mokd has. */
static int choose_wgrad(uint64_t features, Mok__LayerSpec *ret)
{
    bool known = features & MOK_FEATURE_WGRAD;
    if (!known && ret->wgrad_precision == MOK_WGRAD_MXFP8)
        return client_fail(MOK_ENOTSUP,
                           "wgrad_precision is %d (mxfp8), must be 0 or %d: mokd is older and knows BF16 alone",
                           MOK_WGRAD_MXFP8, MOK_WGRAD_BF16);
    ret->wgrad_precision = known ? mok_wire_wgrad(ret->wgrad_precision, ret->precision) : 0;
    return 0;
}

static int check_spec(const mok_group *group, const mok_layer_options *options, Mok__LayerSpec *ret)
{
    int r = check_layer_options(options, group->ranks, ret);
    if (r < 0)
        return r;
    if (ret->gradient_dtype && !(group->session->features & MOK_FEATURE_GRADIENTS))
        return client_fail(MOK_ENOTSUP, "gradient_dtype is %" PRIu32 ", must be 0: mokd is older and knows F32 alone",
                           ret->gradient_dtype);
    r = choose_wgrad(group->session->features, ret);
    if (r < 0)
        return r;
    if (ret->transposed_weights && !(group->session->features & MOK_FEATURE_TRANSPOSED))
        return client_fail(MOK_ENOTSUP, "transposed_weights is %" PRIu32 ", must be 0: mokd is older and takes none",
                           ret->transposed_weights);
    return 0;
}

_public_ int mok_layer_memory_query(mok_group *group, const mok_layer_options *options, mok_layer_memory *ret_memory)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerQuery body = MOK__LAYER_QUERY__INIT;
    Mok__LayerSpec spec;

    int r = group_check(group);
    if (r < 0)
        return r;
    if (!ret_memory)
        return client_fail(MOK_EARG, "ret_memory is NULL");
    r = check_spec(group, options, &spec);
    if (r < 0)
        return r;
    body.group = group->id;
    body.spec = &spec;
    request.body_case = MOK__REQUEST__BODY_LAYER_QUERY;
    request.layer_query = &body;
    r = session_call(group->session, &request, MOK__REPLY__BODY_LAYER_QUERY, 0, &answer);
    if (r < 0)
        return r;
    if (!answer.reply->layer_query->memory)
        return client_fail(MOK_EPROTO, "mokd's answer to layer_query has no memory");
    copy_memory(ret_memory, answer.reply->layer_query->memory);
    return 0;
}

static int layer_take(mok_layer *layer, const Mok__LayerCreateReply *reply)
{
    if (!reply->memory)
        return client_fail(MOK_EPROTO, "mokd's answer to layer_create has no memory");
    if (reply->queue != __atomic_load_n(&layer->group->queue, __ATOMIC_ACQUIRE))
        return client_fail(MOK_EPROTO, "mokd's answer to layer_create has queue %" PRIu32 ", must be %" PRIu32,
                           reply->queue, layer->group->queue);
    layer->id = reply->layer;
    copy_memory(&layer->memory, reply->memory);
    return 0;
}

_public_ int mok_layer_create(mok_group *group, const mok_layer_options *options, uint64_t timeout_ms,
                              mok_layer **ret_layer)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    _cleanup_free_ mok_layer *layer = NULL;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerCreate body = MOK__LAYER_CREATE__INIT;

    int r = group_check(group);
    if (r < 0)
        return r;
    if (!ret_layer)
        return client_fail(MOK_EARG, "ret_layer is NULL");
    layer = calloc(1, sizeof(*layer));
    if (!layer)
        return client_fail(MOK_ENOMEM, "no memory for a layer's handle");
    r = check_spec(group, options, &layer->spec);
    if (r < 0)
        return r;
    body.group = group->id;
    body.spec = &layer->spec;
    body.timeout_ms = timeout_ms;
    request.body_case = MOK__REQUEST__BODY_LAYER_CREATE;
    request.layer_create = &body;
    r = session_call_collective(group->session, &request, timeout_ms, MOK__REPLY__BODY_LAYER_CREATE, 0, &answer);
    if (r < 0)
        return r;
    layer->group = group;
    r = layer_take(layer, answer.reply->layer_create);
    if (r < 0)
        return r;
    mok_session *session = group->session;
    pthread_mutex_lock(&session->lock);
    layer->next = session->layers;
    session->layers = layer;
    pthread_mutex_unlock(&session->lock);
    *ret_layer = mok_take_pointer(&layer);
    return 0;
}

_public_ int mok_layer_destroy(mok_layer *layer)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerDestroy body = MOK__LAYER_DESTROY__INIT;

    if (!layer)
        return 0;
    int r = layer_check(layer);
    if (r < 0)
        return r;
    mok_session *session = layer->group->session;
    struct port *port = layer->group->port;
    r = port_layer_hold(port, layer);
    if (r < 0)
        return r;
    body.layer = layer->id;
    request.body_case = MOK__REQUEST__BODY_LAYER_DESTROY;
    request.layer_destroy = &body;
    r = session_call(session, &request, MOK__REPLY__BODY__NOT_SET, 0, &answer);
    if (r == -MOK_EBUSY) {
        port_layer_settle(port, layer, layer->has_weights, layer->has_gradients);
        return r;
    }
    pthread_mutex_lock(&session->lock);
    layer_drop(layer);
    pthread_mutex_unlock(&session->lock);
    return r;
}

_public_ int mok_layer_describe(mok_layer *layer, char *ret_text, size_t capacity)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerDescribe body = MOK__LAYER_DESCRIBE__INIT;

    int r = layer_check(layer);
    if (r < 0)
        return r;
    if (!ret_text && capacity > 0)
        return client_fail(MOK_EARG, "ret_text is NULL, capacity is %zu, must be 0 then", capacity);
    body.layer = layer->id;
    request.body_case = MOK__REQUEST__BODY_LAYER_DESCRIBE;
    request.layer_describe = &body;
    r = session_call(layer->group->session, &request, MOK__REPLY__BODY_LAYER_DESCRIBE, 0, &answer);
    if (r < 0)
        return r;
    return snprintf(ret_text, capacity, "%s", answer.reply->layer_describe->text);
}

/* ------------------------------------------------------------------ binding */

enum param_role { WEIGHT, SCALE, TRANSPOSED, GRADIENT }; /* the last two are a backward's */
enum param_shape { EXPERT_IN, EXPERT_OUT, SHARED_IN, SHARED_OUT }; /* [E_l][I][H], [E_l][H][I], [Is][H], [H][Is] */

struct param {
    const char *name;
    size_t view;   /* offset in mok_layer_params */
    size_t region; /* offset of the pointer in the message */
    enum param_role role;
    enum param_shape shape;
};

#define PARAM(name, role, shape)                                                                                       \
    {                                                                                                                  \
#name, offsetof(mok_layer_params, name), offsetof(Mok__LayerParams, name), role, shape                         \
    }
static const struct param params[LAYER_PARAMS] = {
    PARAM(gate, WEIGHT, EXPERT_IN),          PARAM(up, WEIGHT, EXPERT_IN),
    PARAM(down, WEIGHT, EXPERT_OUT),         PARAM(d_gate, GRADIENT, EXPERT_IN),
    PARAM(d_up, GRADIENT, EXPERT_IN),        PARAM(d_down, GRADIENT, EXPERT_OUT),
    PARAM(shared_gate, WEIGHT, SHARED_IN),   PARAM(shared_up, WEIGHT, SHARED_IN),
    PARAM(shared_down, WEIGHT, SHARED_OUT),  PARAM(d_shared_gate, GRADIENT, SHARED_IN),
    PARAM(d_shared_up, GRADIENT, SHARED_IN), PARAM(d_shared_down, GRADIENT, SHARED_OUT),
    PARAM(gate_scale, SCALE, EXPERT_IN),     PARAM(up_scale, SCALE, EXPERT_IN),
    PARAM(down_scale, SCALE, EXPERT_OUT),    PARAM(gate_transposed, TRANSPOSED, EXPERT_IN),
    PARAM(up_transposed, TRANSPOSED, EXPERT_IN), PARAM(down_transposed, TRANSPOSED, EXPERT_OUT),
};
#undef PARAM

static bool param_is_shared(const struct param *p)
{
    return p->shape == SHARED_IN || p->shape == SHARED_OUT;
}

/* Whether a layer of this shape has the parameter at all. */
static bool param_exists(const Mok__LayerSpec *spec, const struct param *p)
{
    if (p->role == SCALE && spec->precision == MOK_BF16)
        return false;
    if (p->role == TRANSPOSED)
        return spec->transposed_weights != 0;
    return !param_is_shared(p) || spec->shared_intermediate > 0;
}

static uint64_t param_bytes(const Mok__LayerSpec *spec, uint32_t ranks, const struct param *p)
{
    uint64_t inner = param_is_shared(p) ? spec->shared_intermediate : spec->intermediate;
    uint64_t matrices = param_is_shared(p) ? 1 : spec->experts / ranks;
    bool in = p->shape == EXPERT_IN || p->shape == SHARED_IN;
    uint64_t rows = in ? inner : spec->hidden, columns = in ? spec->hidden : inner;
    uint64_t elements = matrices * rows * columns;

    switch (p->role) {
    case GRADIENT:
        return (spec->gradient_dtype == MOK_DTYPE_BF16 ? 2 : 4) * elements;
    case SCALE:
        return matrices * rows * ((columns + 31) / 32);
    default:
        return spec->precision == MOK_BF16 || param_is_shared(p) ? 2 * elements : elements;
    }
}

static const mok_view *param_view(const mok_layer_params *from, const struct param *p)
{
    return (const mok_view *)(const void *)((const char *)from + p->view);
}

/* Refuses a parameter that the layer has not. */
static int fail_absent(const struct param *p)
{
    static const char *const why[] = {
        [WEIGHT] = "shared_intermediate is 0",
        [SCALE] = "precision is bf16",
        [TRANSPOSED] = "transposed_weights is 0",
        [GRADIENT] = "shared_intermediate is 0",
    };

    return client_fail(p->role == SCALE ? MOK_EDTYPE : MOK_EARG, "%s is given, must be absent: the layer's %s", p->name,
                       why[p->role]);
}

static int check_params(const mok_layer *layer, const mok_layer_params *from, struct mok_region regions[LAYER_PARAMS])
{
    const mok_group *group = layer->group;
    const struct check_place place = { .session = group->session, .group = group, .device = group->device };
    struct check_view views[LAYER_PARAMS];

    for (size_t i = 0; i < LAYER_PARAMS; i++) {
        const struct param *p = &params[i];
        const mok_view *view = param_view(from, p);
        if (view->buffer && !param_exists(&layer->spec, p))
            return fail_absent(p);
        views[i] = (struct check_view){
            .name = p->name,
            .view = view,
            .bytes = param_bytes(&layer->spec, group->ranks, p),
            .written = p->role == GRADIENT,
        };
    }
    return check_views(&place, views, LAYER_PARAMS, regions);
}

/* All that a forward needs, or all that a backward needs beside it. */
static bool all_bound(const mok_layer *layer, const struct mok_region regions[LAYER_PARAMS], bool backward)
{
    for (size_t i = 0; i < LAYER_PARAMS; i++) {
        bool counts = param_exists(&layer->spec, &params[i]) && (params[i].role >= TRANSPOSED) == backward;
        if (counts && !regions[i].buffer)
            return false;
    }
    return true;
}

static int send_bind(mok_layer *layer, const struct mok_region regions[LAYER_PARAMS])
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerBind body = MOK__LAYER_BIND__INIT;
    Mok__LayerParams message = MOK__LAYER_PARAMS__INIT;
    Mok__Region region[LAYER_PARAMS];

    for (size_t i = 0; i < LAYER_PARAMS; i++) {
        Mok__Region **at = (Mok__Region **)(void *)((char *)&message + params[i].region);
        mok__region__init(&region[i]);
        region[i].buffer = regions[i].buffer;
        region[i].offset = regions[i].offset;
        region[i].length = regions[i].length;
        *at = regions[i].buffer ? &region[i] : NULL;
    }
    body.layer = layer->id;
    body.params = &message;
    request.body_case = MOK__REQUEST__BODY_LAYER_BIND;
    request.layer_bind = &body;
    return session_call(layer->group->session, &request, MOK__REPLY__BODY__NOT_SET, 0, &answer);
}

static void note_bound(mok_layer *layer, const mok_layer_params *from)
{
    mok_session *session = layer->group->session;

    pthread_mutex_lock(&session->lock);
    for (size_t i = 0; i < LAYER_PARAMS; i++) {
        mok_buffer *buffer = param_view(from, &params[i])->buffer;
        if (buffer)
            buffer->bindings++;
        if (layer->bound[i])
            layer->bound[i]->bindings--;
        layer->bound[i] = buffer;
    }
    pthread_mutex_unlock(&session->lock);
}

_public_ int mok_layer_bind(mok_layer *layer, const mok_layer_params *from)
{
    struct mok_region regions[LAYER_PARAMS];
    mok_layer_params own;

    int r = layer_check(layer);
    if (r < 0)
        return r;
    r = check_options(&own, sizeof(own), CHECK_THROUGH(mok_layer_params, down), from, "mok_layer_params");
    if (r < 0)
        return r;
    r = check_params(layer, &own, regions);
    if (r < 0)
        return r;
    struct port *port = layer->group->port;
    r = port_layer_hold(port, layer);
    if (r < 0)
        return r;
    r = send_bind(layer, regions);
    if (r < 0) {
        /* Whether mokd still did it, only another binding can tell. */
        bool stays = r != -MOK_EDAEMON;
        port_layer_settle(port, layer, stays && layer->has_weights, stays && layer->has_gradients);
        return r;
    }
    note_bound(layer, &own);
    port_layer_settle(port, layer, all_bound(layer, regions, false), all_bound(layer, regions, true));
    return 0;
}
