/* SPDX-License-Identifier: Apache-2.0 */
/* Operations: what the caller wants becomes a submission; what completed becomes a result and a sentence. */
#include <inttypes.h>
#include <string.h>

#include "describe.h"
#include "port.h"
#include "session.h"

/* How long a wait that has already run out may ask mokd which ranks are missing. */
#define QUERY_MS 250u

_Static_assert(MOK_FORWARD_ACCUMULATE_OUT == MOK_SQE_ACCUMULATE_OUT, "flags pass as they are");
_Static_assert(MOK_BACKWARD_OVERWRITE_WGRAD == MOK_SQE_OVERWRITE_WGRAD, "flags pass as they are");

/* ------------------------------------------------------------------ submitting */

static int check_flags(uint32_t flags, uint32_t known)
{
    if (flags & ~known)
        return client_fail(MOK_ERANGE, "flags is %#" PRIx32 ", known here are %#" PRIx32, flags, known);
    return 0;
}

static int check_tokens(const mok_layer *layer, uint32_t tokens)
{
    if (tokens > layer->spec.max_tokens)
        return client_fail(MOK_ERANGE, "tokens is %" PRIu32 ", must be at most the layer's max_tokens, %" PRIu32,
                           tokens, layer->spec.max_tokens);
    return 0;
}

static uint64_t context_bytes(const mok_layer *layer, uint32_t context_mode)
{
    switch (context_mode) {
    case MOK_CONTEXT_FULL:
        return layer->memory.context_full_bytes;
    case MOK_CONTEXT_RECOMPUTE:
        return layer->memory.context_recompute_bytes;
    }
    return 0;
}

/* One view of an operation and the region it goes to. */
struct use {
    enum mok_region_slot slot;
    struct check_view view;
};

/* Each buffer counts once, however many regions it holds. */
static void note_buffer(struct submission *s, mok_buffer *buffer)
{
    size_t i = 0;

    while (s->buffer[i] && s->buffer[i] != buffer)
        i++;
    s->buffer[i] = buffer;
}

/* How an operation is submitted: at once, or at a stream's end. */
struct road {
    bool by_stream;
    mok_stream stream;
};

/* Fills in regions and buffers, and submits. */
static int submit(mok_layer *layer, struct submission *s, const struct use *uses, size_t count, const struct road *road,
                  mok_ticket *ret_ticket)
{
    const mok_group *group = layer->group;
    const struct check_place place = { .session = group->session, .group = group, .device = group->device };
    struct check_view views[MOK_REGION_COUNT] = { 0 };
    struct mok_region regions[MOK_REGION_COUNT];

    for (size_t i = 0; i < count; i++)
        views[i] = uses[i].view;
    int r = check_views(&place, views, count, regions);
    if (r < 0)
        return r;
    for (size_t i = 0; i < count; i++) {
        s->sqe.region[uses[i].slot] = regions[i];
        if (regions[i].buffer)
            note_buffer(s, views[i].view->buffer);
    }
    s->layer = layer;
    s->sqe.layer = layer->id;
    s->queue = __atomic_load_n(&group->queue, __ATOMIC_ACQUIRE);
    r = group_well(group);
    if (r < 0)
        return r;
    return road->by_stream ? port_submit_on_stream(group->port, s, road->stream, ret_ticket)
                           : port_submit(group->port, s, ret_ticket);
}

static int forward(mok_layer *layer, const mok_forward_args *a, const struct road *road, mok_ticket *ret_ticket)
{
    const uint64_t row = 2 * (uint64_t)layer->spec.hidden, slots = 4 * (uint64_t)layer->spec.topk;
    struct submission s = { .sqe = {
                                .opcode = MOK_OP_FORWARD,
                                .context_mode = (uint8_t)a->context_mode,
                                .flags = a->flags,
                                .tokens = a->tokens,
                                .timeout_ns = a->timeout_ns,
                            } };
    const struct use uses[] = {
        { MOK_REGION_X, { "x", &a->x, a->tokens * row, .required = true, .symmetric = true } },
        { MOK_REGION_IDS, { "ids", &a->ids, a->tokens * slots, .required = true } },
        { MOK_REGION_TOPK_WEIGHT, { "topk_weight", &a->topk_weight, a->tokens * slots, .required = true } },
        { MOK_REGION_OUT, { "out", &a->out, a->tokens * row, .required = true, .written = true } },
        { MOK_REGION_CONTEXT,
          { "context", &a->context, context_bytes(layer, a->context_mode), .required = true, .written = true } },
    };

    if (a->context_mode > MOK_CONTEXT_RECOMPUTE)
        return client_fail(MOK_ERANGE, "context_mode is %" PRIu32 ", must be at most %d", a->context_mode,
                           MOK_CONTEXT_RECOMPUTE);
    if (a->context_mode == MOK_CONTEXT_NONE && a->context.buffer)
        return client_fail(MOK_EARG, "context is given, must be absent with context_mode 0");
    return submit(layer, &s, uses, ARRAY_SIZE(uses), road, ret_ticket);
}

static int backward(mok_layer *layer, const mok_backward_args *a, const struct road *road, mok_ticket *ret_ticket)
{
    const uint64_t row = 2 * (uint64_t)layer->spec.hidden, slots = 4 * (uint64_t)layer->spec.topk;
    struct submission s = { .sqe = {
                                .opcode = MOK_OP_BACKWARD,
                                .context_mode = (uint8_t)a->context_mode,
                                .flags = a->flags,
                                .tokens = a->tokens,
                                .timeout_ns = a->timeout_ns,
                            } };
    const struct use uses[] = {
        { MOK_REGION_X, { "x", &a->x, a->tokens * row, .required = true, .symmetric = true } },
        { MOK_REGION_CONTEXT, { "context", &a->context, context_bytes(layer, a->context_mode), .required = true } },
        { MOK_REGION_D_OUT, { "d_out", &a->d_out, a->tokens * row, .required = true, .symmetric = true } },
        { MOK_REGION_D_X, { "d_x", &a->d_x, a->tokens * row, .required = true, .written = true } },
        { MOK_REGION_D_TOPK_WEIGHT,
          { "d_topk_weight", &a->d_topk_weight, a->tokens * slots, .required = true, .written = true } },
    };

    if (a->context_mode != MOK_CONTEXT_FULL && a->context_mode != MOK_CONTEXT_RECOMPUTE)
        return client_fail(MOK_ERANGE, "context_mode is %" PRIu32 ", must be %d or %d, as in the forward",
                           a->context_mode, MOK_CONTEXT_FULL, MOK_CONTEXT_RECOMPUTE);
    return submit(layer, &s, uses, ARRAY_SIZE(uses), road, ret_ticket);
}

static int check_forward(mok_layer *layer, const mok_forward_args *args, const struct road *road,
                         mok_ticket *ret_ticket)
{
    mok_forward_args own;

    int r = layer_check(layer);
    if (r < 0)
        return r;
    if (!ret_ticket)
        return client_fail(MOK_EARG, "ret_ticket is NULL");
    r = check_options(&own, sizeof(own), CHECK_THROUGH(mok_forward_args, out), args, "mok_forward_args");
    if (r < 0 || (r = check_tokens(layer, own.tokens)) < 0 ||
        (r = check_flags(own.flags, MOK_FORWARD_ACCUMULATE_OUT)) < 0)
        return r;
    return forward(layer, &own, road, ret_ticket);
}

static int check_backward(mok_layer *layer, const mok_backward_args *args, const struct road *road,
                          mok_ticket *ret_ticket)
{
    mok_backward_args own;

    int r = layer_check(layer);
    if (r < 0)
        return r;
    if (!ret_ticket)
        return client_fail(MOK_EARG, "ret_ticket is NULL");
    r = check_options(&own, sizeof(own), CHECK_THROUGH(mok_backward_args, d_topk_weight), args, "mok_backward_args");
    if (r < 0 || (r = check_tokens(layer, own.tokens)) < 0 ||
        (r = check_flags(own.flags, MOK_BACKWARD_OVERWRITE_WGRAD)) < 0)
        return r;
    return backward(layer, &own, road, ret_ticket);
}

_public_ int mok_layer_forward(mok_layer *layer, const mok_forward_args *args, mok_ticket *ret_ticket)
{
    const struct road road = { .by_stream = false };
    return check_forward(layer, args, &road, ret_ticket);
}

_public_ int mok_layer_backward(mok_layer *layer, const mok_backward_args *args, mok_ticket *ret_ticket)
{
    const struct road road = { .by_stream = false };
    return check_backward(layer, args, &road, ret_ticket);
}

_public_ int mok_layer_forward_on_stream(mok_layer *layer, const mok_forward_args *args, mok_stream stream,
                                         mok_ticket *ret_ticket)
{
    const struct road road = { .by_stream = true, .stream = stream };
    return check_forward(layer, args, &road, ret_ticket);
}

_public_ int mok_layer_backward_on_stream(mok_layer *layer, const mok_backward_args *args, mok_stream stream,
                                          mok_ticket *ret_ticket)
{
    const struct road road = { .by_stream = true, .stream = stream };
    return check_backward(layer, args, &road, ret_ticket);
}

_public_ int mok_nop(mok_session *session, uint32_t device, mok_ticket *ret_ticket)
{
    struct submission s = { .sqe = { .opcode = MOK_OP_NOP } };
    struct port *port;

    int r = session_check(session, "session");
    if (r < 0)
        return r;
    if (!ret_ticket)
        return client_fail(MOK_EARG, "ret_ticket is NULL");
    r = port_get(session, device, &port, NULL);
    return r < 0 ? r : port_submit(port, &s, ret_ticket);
}

/* ------------------------------------------------------------------ results */

/* Records the sentence of a failed operation; what mokd said about its group beats what the numbers say. */
static void record_failure(mok_session *session, const struct outcome *outcome)
{
    char text[320] = "";

    describe_completion(outcome->opcode, &outcome->cqe, text, sizeof(text));
    if (outcome->group != 0) {
        control_look(session->control); /* mokd's word may have come by now */
        pthread_mutex_lock(&session->lock);
        const struct failure *failure = session_failure(session, outcome->group);
        pthread_mutex_unlock(&session->lock); /* failures stay until the session closes */
        if (failure && failure->code == outcome->cqe.result) {
            client_fail_text(failure->code, failure->text);
            return;
        }
    }
    client_fail_text(outcome->cqe.result, text);
}

/* `done`: what the call returns when the operation did not fail or the caller gets the result. */
static int hand_over(mok_session *session, const struct outcome *outcome, int done, mok_result *ret_result)
{
    const struct mok_cqe *cqe = &outcome->cqe;

    if (cqe->result < 0)
        record_failure(session, outcome);
    if (!ret_result)
        return cqe->result < 0 ? cqe->result : done;
    *ret_result = (mok_result){
        .code = cqe->result,
        .engine = cqe->engine,
        .precision = cqe->precision,
        .rows = cqe->rows,
        .dropped = cqe->dropped,
        .device_ns = cqe->device_ns,
    };
    return done;
}

static int ticket_port(mok_session *session, mok_ticket ticket, struct port **ret_port)
{
    int r = session_check(session, "session");
    if (r < 0)
        return r;
    *ret_port = ticket ? port_of(session, ticket) : NULL;
    return *ret_port ? 0 : client_fail(MOK_ENOENT, "ticket is %" PRIu64 ", must be one of this session", ticket);
}

_public_ int mok_poll(mok_session *session, mok_ticket ticket, mok_result *ret_result)
{
    struct outcome outcome;
    struct port *port;

    int r = ticket_port(session, ticket, &port);
    if (r < 0)
        return r;
    r = port_await(port, ticket, 0, &outcome);
    return r == 1 ? hand_over(session, &outcome, 1, ret_result) : r;
}

/* The time-out's sentence, with what mokd knows about the operation. */
static int waited_in_vain(mok_session *session, struct port *port, mok_ticket ticket, int64_t timeout_ns)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__OpQuery body = MOK__OP_QUERY__INIT;
    char missing[160];

    body.queue = port_queue(port);
    body.user_data = ticket;
    request.body_case = MOK__REQUEST__BODY_OP_QUERY;
    request.op_query = &body;
    if (timeout_ns > 0 &&
        control_call(session->control, &request, QUERY_MS, MOK__REPLY__BODY_OP_QUERY, 0, &answer) == 0 &&
        answer.reply->op_query->n_missing_rank > 0) {
        describe_ranks(answer.reply->op_query->missing_rank, answer.reply->op_query->n_missing_rank, missing,
                       sizeof(missing));
        return client_fail(MOK_ETIMEDOUT, "not completed within %" PRId64 " ns: waiting for %s", timeout_ns, missing);
    }
    return client_fail(MOK_ETIMEDOUT, "not completed within %" PRId64 " ns; still in flight", timeout_ns);
}

_public_ int mok_wait(mok_session *session, mok_ticket ticket, int64_t timeout_ns, mok_result *ret_result)
{
    uint64_t deadline = UINT64_MAX;
    struct outcome outcome;
    struct port *port;

    int r = ticket_port(session, ticket, &port);
    if (r < 0)
        return r;
    if (timeout_ns >= 0 && !mok_add_u64(mok_now_ns(), (uint64_t)timeout_ns, &deadline))
        deadline = UINT64_MAX;
    r = port_await(port, ticket, deadline, &outcome);
    if (r == 1)
        return hand_over(session, &outcome, 0, ret_result);
    return r == 0 ? waited_in_vain(session, port, ticket, timeout_ns) : r;
}

_public_ int mok_cancel(mok_session *session, mok_ticket ticket)
{
    struct submission s = { .sqe = { .opcode = MOK_OP_CANCEL, .cancel_target = ticket } };
    struct outcome outcome;
    struct port *port;
    mok_ticket own;

    int r = ticket_port(session, ticket, &port);
    if (r < 0)
        return r;
    r = port_is_flying(port, ticket);
    if (r < 0)
        return r;
    r = port_submit(port, &s, &own);
    if (r < 0)
        return r;
    r = port_await(port, own, control_deadline(session->timeout_ms), &outcome);
    if (r == 0) {
        port_disown(port, own);
        return client_fail(MOK_ETIMEDOUT, "the worker did not answer the cancel within %" PRIu64 " ms",
                           session->timeout_ms);
    }
    if (r < 0)
        return r;
    switch (outcome.cqe.result) {
    case 0:
        return 0;
    case -MOK_EBUSY:
        return client_fail(MOK_EBUSY, "ticket %" PRIu64 ": too late, it will complete by itself", ticket);
    case -MOK_ENOENT:
        return client_fail(MOK_ENOENT, "ticket %" PRIu64 " has completed", ticket);
    }
    return hand_over(session, &outcome, 0, NULL);
}
