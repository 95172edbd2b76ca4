/* SPDX-License-Identifier: Apache-2.0 */
/* Operations from submission to result, against workers that complete, hold, refuse and die. */
#include "support.h"

#include <pthread.h>

#include "fake.h"

#define REQUEST(name) MOK__REQUEST__BODY_##name
#define ENTRIES 8
#define TOKENS 4
#define SECOND INT64_C(1000000000)

static struct fake fake;
static mok_session *session;
static mok_group *group;
static mok_layer *layer;
static mok_buffer *symmetric, *private, *weights;
static size_t fds_before;

/* A layer of H = I = 16, E = 2, K = 1, T <= 4 in a group of 2; every tensor of an operation is at most 128 bytes. */
static const mok_layer_options layer_options = {
    .size = sizeof(layer_options),
    .hidden = 16,
    .intermediate = 16,
    .experts = 2,
    .topk = 1,
    .max_tokens = TOKENS,
    .precision = MOK_BF16,
};

static mok_view view(mok_buffer *buffer, uint64_t index)
{
    return (mok_view){ buffer, index * 128, 0 };
}

static mok_forward_args forward_args(void)
{
    return (mok_forward_args){
        .size = sizeof(mok_forward_args),
        .tokens = TOKENS,
        .context_mode = MOK_CONTEXT_RECOMPUTE,
        .x = view(symmetric, 0),
        .ids = view(private, 0),
        .topk_weight = view(private, 1),
        .out = view(private, 2),
        .context = view(private, 8),
    };
}

static mok_backward_args backward_args(void)
{
    return (mok_backward_args){
        .size = sizeof(mok_backward_args),
        .tokens = TOKENS,
        .context_mode = MOK_CONTEXT_FULL,
        .x = view(symmetric, 0),
        .context = view(private, 8),
        .d_out = view(symmetric, 1),
        .d_x = view(private, 2),
        .d_topk_weight = view(private, 3),
    };
}

static mok_layer_params params(bool gradients)
{
    mok_layer_params p = {
        .size = sizeof(p),
        .gate = { weights, 0, 0 },
        .up = { weights, 512, 0 },
        .down = { weights, 1024, 0 },
    };
    if (gradients) {
        p.d_gate = (mok_view){ weights, 2048, 0 };
        p.d_up = (mok_view){ weights, 3072, 0 };
        p.d_down = (mok_view){ weights, 4096, 0 };
    }
    return p;
}

static int open_session(mok_session **ret)
{
    const mok_session_options options = {
        .size = sizeof(options), .socket_path = fake.path, .queue_entries = ENTRIES, .timeout_ms = 2000
    };
    return mok_session_open(&options, ret);
}

static int set_up(void **state)
{
    const mok_group_options options = { .size = sizeof(options), .name = "ep", .ranks = 2, .rank = 0, .device = 1 };
    (void)state;
    fds_before = count_fds();
    fake_start(&fake);
    assert_works(open_session(&session));
    return mok_group_join(session, &options, &group);
}

static int set_up_layer(void **state)
{
    set_up(state);
    assert_works(mok_layer_create(group, &layer_options, 0, &layer));
    assert_works(mok_buffer_alloc_symmetric(group, 4096, 0, &symmetric));
    assert_works(mok_buffer_alloc_private(session, 1, 1024 + FAKE_LAYER_FULL, &private));
    assert_works(mok_buffer_alloc_private(session, 1, 8192, &weights));
    const mok_layer_params p = params(true);
    return mok_layer_bind(layer, &p);
}

static int tear_down(void **state)
{
    (void)state;
    mok_session_close(session);
    fake_stop(&fake);
    assert_int_equal(count_fds(), fds_before);
    return 0;
}

/* ------------------------------------------------------------------ submit, poll, wait */

static void a_no_op_completes_and_its_result_can_be_had_once(void **state)
{
    mok_result result;
    mok_ticket ticket;
    (void)state;
    assert_works(mok_nop(session, 1, &ticket));
    assert_int_not_equal(ticket, 0);
    assert_int_equal(mok_wait(session, ticket, -1, &result), 0);
    assert_int_equal(result.code, 0);
    assert_int_equal(result.engine, MOK_DEVICE_HOST);
    assert_fails(mok_wait(session, ticket, -1, &result), MOK_ENOENT, "must be one whose result has not been had");
    assert_fails(mok_poll(session, ticket, &result), MOK_ENOENT, "must be one whose result has not been had");
}

static void polling_says_0_until_the_operation_has_completed(void **state)
{
    mok_ticket ticket;
    int r;
    (void)state;
    fake_flag(&fake, hold, true);
    assert_works(mok_nop(session, 1, &ticket));
    fake_await_taken(&fake, 1);
    assert_int_equal(mok_poll(session, ticket, NULL), 0);
    assert_int_equal(mok_poll(session, ticket, NULL), 0);
    fake_flag(&fake, hold, false);
    while ((r = mok_poll(session, ticket, NULL)) == 0)
        usleep(500);
    assert_int_equal(r, 1);
}

static void tickets_of_nobody_are_unknown(void **state)
{
    static const mok_ticket bad[] = { 0, 1, 5, UINT64_MAX };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        assert_fails(mok_poll(session, bad[i], NULL), MOK_ENOENT, "ticket is ");
        assert_fails(mok_wait(session, bad[i], 0, NULL), MOK_ENOENT, "ticket is ");
        assert_fails(mok_cancel(session, bad[i]), MOK_ENOENT, "ticket is ");
    }
    assert_fails(mok_wait(NULL, 1, 0, NULL), MOK_EARG, "session is NULL");
}

static void a_wait_that_is_over_leaves_the_operation_in_flight(void **state)
{
    mok_ticket ticket;
    (void)state;
    fake_flag(&fake, hold, true);
    assert_works(mok_nop(session, 1, &ticket));
    uint64_t start = mok_now_ns();
    assert_fails(mok_wait(session, ticket, SECOND / 20, NULL), MOK_ETIMEDOUT, "not completed within 50000000 ns");
    assert_true(mok_now_ns() - start >= (uint64_t)SECOND / 20);
    assert_fails(mok_wait(session, ticket, 0, NULL), MOK_ETIMEDOUT, "not completed within 0 ns");
    fake_flag(&fake, hold, false);
    assert_works(mok_wait(session, ticket, 10 * SECOND, NULL));
}

static void a_wait_that_is_over_names_the_ranks_that_mokd_misses(void **state)
{
    mok_ticket ticket;
    (void)state;
    fake.missing_rank[0] = 1;
    fake.missing_rank[1] = 3;
    fake_flag(&fake, missing, 2);
    fake_flag(&fake, hold, true);
    assert_works(mok_nop(session, 1, &ticket));
    assert_fails(mok_wait(session, ticket, SECOND / 50, NULL), MOK_ETIMEDOUT, "waiting for ranks 1 and 3");
    fake_set(&fake, REQUEST(OP_QUERY), FAKE_NONE);
    assert_fails(mok_wait(session, ticket, SECOND / 50, NULL), MOK_ETIMEDOUT, "still in flight");
}

static void as_many_operations_as_entries_are_in_flight_and_then_it_says_reap(void **state)
{
    mok_ticket ticket[ENTRIES], more;
    (void)state;
    fake_flag(&fake, idle, true);
    for (int i = 0; i < ENTRIES; i++)
        assert_works(mok_nop(session, 1, &ticket[i]));
    assert_fails(mok_nop(session, 1, &more), MOK_EAGAIN, "must be fewer than queue_entries, 8");
    fake_flag(&fake, idle, false);
    for (int i = ENTRIES - 1; i >= 0; i--) {
        assert_works(mok_wait(session, ticket[i], -1, NULL));
        assert_works(mok_nop(session, 1, &more));
        assert_works(mok_wait(session, more, -1, NULL));
    }
}

static void results_that_nobody_asked_for_count_until_they_are_asked_for(void **state)
{
    mok_ticket ticket[ENTRIES], more;
    (void)state;
    for (int i = 0; i < ENTRIES; i++)
        assert_works(mok_nop(session, 1, &ticket[i]));
    fake_await_completed(&fake, ENTRIES);
    assert_fails(mok_nop(session, 1, &more), MOK_EAGAIN, "a result not yet asked for are 8");
    assert_works(mok_wait(session, ticket[3], -1, NULL));
    assert_works(mok_nop(session, 1, &more));
}

/* Counters start at 0xFFFFFFF0 (port.c), so this goes through the wrap-around. */
static void a_thousand_operations_pass_the_wrap_around_of_the_counters(void **state)
{
    mok_ticket ticket[ENTRIES], previous = 0;
    (void)state;
    for (int i = 0; i < 1000 / ENTRIES; i++) {
        for (int k = 0; k < ENTRIES; k++) {
            assert_works(mok_nop(session, 1, &ticket[k]));
            assert_int_not_equal(ticket[k], previous);
            previous = ticket[k];
        }
        for (int k = 0; k < ENTRIES; k++)
            assert_works(mok_wait(session, ticket[(k + i) % ENTRIES], -1, NULL));
    }
    assert_int_equal(__atomic_load_n(&fake.taken, __ATOMIC_ACQUIRE), 1000);
}

static void two_devices_and_two_sessions_do_not_mix(void **state)
{
    mok_ticket here, there, elsewhere;
    mok_session *other;
    (void)state;
    assert_works(open_session(&other));
    fake_flag(&fake, hold, true);
    assert_works(mok_nop(session, 1, &here));
    assert_works(mok_nop(session, 0, &there));
    assert_works(mok_nop(other, 1, &elsewhere));
    assert_int_not_equal(here, there);
    fake_flag(&fake, hold, false);
    assert_works(mok_wait(session, there, -1, NULL));
    assert_works(mok_wait(session, here, -1, NULL));
    assert_works(mok_wait(other, elsewhere, -1, NULL));
    mok_session_close(other);
}

/* ------------------------------------------------------------------ layers' operations */

static void a_forward_reaches_the_worker_as_it_was_meant(void **state)
{
    mok_forward_args args = forward_args();
    mok_ticket ticket;
    mok_result result;
    (void)state;
    fake_complete_with(
        &fake, (struct mok_cqe){ .engine = MOK_DEVICE_HOST, .precision = MOK_BF16, .rows = 11, .device_ns = 12 });
    args.flags = MOK_FORWARD_ACCUMULATE_OUT;
    args.timeout_ns = 77;
    assert_works(mok_layer_forward(layer, &args, &ticket));
    assert_works(mok_wait(session, ticket, -1, &result));
    assert_int_equal(result.code, 0);
    assert_int_equal(result.precision, MOK_BF16);
    assert_int_equal(result.rows, 11);
    assert_int_equal(result.dropped, 0);
    assert_int_equal(result.device_ns, 12);

    const struct mok_sqe copy = fake_last_sqe(&fake), *sqe = &copy;
    assert_int_equal(sqe->opcode, MOK_OP_FORWARD);
    assert_int_equal(sqe->context_mode, MOK_CONTEXT_RECOMPUTE);
    assert_int_equal(sqe->flags, MOK_SQE_ACCUMULATE_OUT);
    assert_int_equal(sqe->tokens, TOKENS);
    assert_int_equal(sqe->timeout_ns, 77);
    assert_int_equal(sqe->user_data, ticket);
    assert_int_equal(sqe->region[MOK_REGION_X].length, 128);
    assert_int_equal(sqe->region[MOK_REGION_IDS].length, 16);
    assert_int_equal(sqe->region[MOK_REGION_TOPK_WEIGHT].offset, 128);
    assert_int_equal(sqe->region[MOK_REGION_OUT].offset, 256);
    assert_int_equal(sqe->region[MOK_REGION_CONTEXT].length, FAKE_LAYER_RECOMPUTE);
    assert_int_equal(sqe->region[MOK_REGION_D_X].buffer, 0);
}

static void a_backward_names_the_context_mode_of_its_forward(void **state)
{
    mok_backward_args args = backward_args();
    mok_ticket ticket;
    (void)state;
    args.context_mode = MOK_CONTEXT_FULL;
    assert_works(mok_layer_backward(layer, &args, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_int_equal(fake_last_sqe(&fake).context_mode, MOK_CONTEXT_FULL);
    assert_int_equal(fake_last_sqe(&fake).region[MOK_REGION_CONTEXT].length, FAKE_LAYER_FULL);
    args.context_mode = MOK_CONTEXT_RECOMPUTE;
    args.flags = MOK_BACKWARD_OVERWRITE_WGRAD;
    assert_works(mok_layer_backward(layer, &args, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_int_equal(fake_last_sqe(&fake).context_mode, MOK_CONTEXT_RECOMPUTE);
    assert_int_equal(fake_last_sqe(&fake).flags, MOK_SQE_OVERWRITE_WGRAD);
    assert_int_equal(fake_last_sqe(&fake).region[MOK_REGION_CONTEXT].length, FAKE_LAYER_RECOMPUTE);
    args.context_mode = MOK_CONTEXT_NONE;
    assert_fails(mok_layer_backward(layer, &args, &ticket), MOK_ERANGE, "context_mode is 0, must be 1 or 2");
}

static void no_tokens_need_no_tensors(void **state)
{
    mok_forward_args args = { .size = sizeof(args), .context_mode = MOK_CONTEXT_NONE };
    mok_ticket ticket;
    (void)state;
    assert_works(mok_layer_forward(layer, &args, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_int_equal(fake_last_sqe(&fake).region[MOK_REGION_X].buffer, 0);
}

static void wrong_arguments_are_refused_before_anything_is_submitted(void **state)
{
    mok_forward_args args;
    mok_backward_args back;
    mok_ticket ticket = 42;
    (void)state;
    args = forward_args();
    assert_fails(mok_layer_forward(NULL, &args, &ticket), MOK_EARG, "layer is NULL");
    assert_fails(mok_layer_forward(layer, NULL, &ticket), MOK_EARG, "mok_forward_args is NULL");
    assert_fails(mok_layer_forward(layer, &args, NULL), MOK_EARG, "ret_ticket is NULL");
    args.tokens = TOKENS + 1;
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_ERANGE,
                 "tokens is 5, must be at most the layer's max_tokens, 4");
    args = forward_args();
    args.flags = 2;
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_ERANGE, "flags is 0x2, known here are 0x1");
    args = forward_args();
    args.context_mode = 3;
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_ERANGE, "context_mode is 3, must be at most 2");
    args.context_mode = 256; /* would be 0 in the submission's byte */
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_ERANGE, "context_mode is 256");
    args.context_mode = MOK_CONTEXT_NONE;
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_EARG, "context is given");
    args = forward_args();
    args.x = view(private, 0);
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_EBUFFER, "x is in private buffer");
    args = forward_args();
    args.out = args.x;
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_EARG, "out, which is written, overlaps x");
    args = forward_args();
    args.context.bytes = FAKE_LAYER_RECOMPUTE - 16;
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_ESIZE,
                 "context has 4080 bytes, must have at least 4096");
    back = backward_args();
    back.context_mode = 3;
    assert_fails(mok_layer_backward(layer, &back, &ticket), MOK_ERANGE, "context_mode is 3");
    back = backward_args();
    back.context = (mok_view){ 0 };
    assert_fails(mok_layer_backward(layer, &back, &ticket), MOK_EBUFFER, "context is absent");
    back = backward_args();
    back.d_x = back.d_topk_weight;
    assert_fails(mok_layer_backward(layer, &back, &ticket), MOK_EARG, "overlaps");
    assert_fails(mok_nop(session, 64, &ticket), MOK_ERANGE, "device is 64");
    assert_fails(mok_nop(NULL, 1, &ticket), MOK_EARG, "session is NULL");
    assert_fails(mok_nop(session, 1, NULL), MOK_EARG, "ret_ticket is NULL");
    assert_int_equal(ticket, 42);
    assert_int_equal(__atomic_load_n(&fake.taken, __ATOMIC_ACQUIRE), 0);
}

static void parameters_must_fit_and_be_the_layer_s(void **state)
{
    mok_layer_params p = params(true);
    (void)state;
    p.up = (mok_view){ weights, 512, 500 };
    assert_fails(mok_layer_bind(layer, &p), MOK_ESIZE, "up has 500 bytes, must have at least 512");
    p = params(true);
    p.d_gate = (mok_view){ weights, 0, 0 };
    assert_fails(mok_layer_bind(layer, &p), MOK_EARG, "d_gate, which is written, overlaps gate");
    p = params(true);
    p.gate_scale = (mok_view){ weights, 0, 0 };
    assert_fails(mok_layer_bind(layer, &p), MOK_EDTYPE, "gate_scale is given");
    p = params(true);
    p.up_transposed = (mok_view){ weights, 0, 0 };
    assert_fails(mok_layer_bind(layer, &p), MOK_EARG,
                 "up_transposed is given, must be absent: the layer's transposed_weights is 0");
    p = params(true);
    p.shared_up = (mok_view){ weights, 0, 0 };
    assert_fails(mok_layer_bind(layer, &p), MOK_EARG, "shared_up is given");
    assert_fails(mok_layer_bind(layer, NULL), MOK_EARG, "mok_layer_params is NULL");
    assert_fails(mok_layer_bind(NULL, &p), MOK_EARG, "layer is NULL");
}

static void a_layer_runs_only_with_what_it_needs_bound(void **state)
{
    const mok_layer_params nothing = { .size = sizeof(nothing) }, inference = params(false);
    const mok_forward_args args = forward_args();
    const mok_backward_args back = backward_args();
    mok_ticket ticket;
    (void)state;
    assert_works(mok_layer_bind(layer, &nothing));
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_ESTATE, "has not all its weights bound");
    assert_works(mok_layer_bind(layer, &inference));
    assert_works(mok_layer_forward(layer, &args, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_fails(mok_layer_backward(layer, &back, &ticket), MOK_ESTATE, "has not all its weight gradients bound");
}

static void what_an_operation_or_a_binding_uses_is_busy_until_it_has_completed(void **state)
{
    const mok_layer_params p = params(true);
    const mok_forward_args args = forward_args();
    const mok_layer_params nothing = { .size = sizeof(nothing) };
    mok_ticket ticket;
    (void)state;
    fake_flag(&fake, hold, true);
    assert_works(mok_layer_forward(layer, &args, &ticket));
    assert_fails(mok_buffer_free(symmetric), MOK_EBUSY, "is used by 1 operations in flight");
    assert_fails(mok_buffer_free(private), MOK_EBUSY, "is used by 1 operations in flight");
    assert_fails(mok_buffer_free(weights), MOK_EBUSY, "is bound by 6 parameters");
    assert_fails(mok_layer_bind(layer, &p), MOK_EBUSY, "has 1 operations in flight");
    assert_fails(mok_layer_destroy(layer), MOK_EBUSY, "has 1 operations in flight");
    assert_int_equal(fake_seen(&fake, REQUEST(BUFFER_FREE)), 0);
    fake_flag(&fake, hold, false);
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_works(mok_buffer_free(symmetric));
    assert_works(mok_layer_bind(layer, &nothing));
    assert_works(mok_buffer_free(weights));
    assert_works(mok_layer_destroy(layer));
    assert_works(mok_buffer_free(private));
}

static void destroying_a_layer_releases_its_parameters(void **state)
{
    (void)state;
    assert_fails(mok_buffer_free(weights), MOK_EBUSY, "is bound by 6 parameters");
    assert_works(mok_layer_destroy(layer));
    assert_works(mok_buffer_free(weights));
}

static void an_operation_s_failure_is_its_result_and_its_sentence_the_last_error(void **state)
{
    const mok_forward_args args = forward_args();
    mok_ticket ticket;
    mok_result result;
    (void)state;
    fake_complete_with(&fake, (struct mok_cqe){ .result = -MOK_EEXPERT,
                                                .argument = MOK_ARG_IDS,
                                                .value = 9,
                                                .bound = 8,
                                                .detail = (uint64_t)1 << 48 | 7 << 8 | 2 });
    assert_works(mok_layer_forward(layer, &args, &ticket));
    assert_int_equal(mok_wait(session, ticket, -1, &result), 0);
    assert_int_equal(result.code, -MOK_EEXPERT);
    assert_string_equal(mok_last_error(), "ids: rank 1, token 7, slot 2 holds 9, must be -1..7");
    assert_works(mok_layer_forward(layer, &args, &ticket));
    assert_fails(mok_wait(session, ticket, -1, NULL), MOK_EEXPERT, "slot 2 holds 9");
    assert_works(mok_layer_forward(layer, &args, &ticket));
    int r;
    while ((r = mok_poll(session, ticket, NULL)) == 0)
        usleep(500);
    assert_fails(r, MOK_EEXPERT, "slot 2 holds 9");
}

/* ------------------------------------------------------------------ cancel */

static void cancel_passes_on_what_the_worker_says(void **state)
{
    mok_ticket ticket;
    (void)state;
    fake_flag(&fake, hold, true);
    assert_works(mok_nop(session, 1, &ticket));
    assert_works(mok_cancel(session, ticket));
    assert_int_equal(fake_last_sqe(&fake).opcode, MOK_OP_CANCEL);
    assert_int_equal(fake_last_sqe(&fake).cancel_target, ticket);
    fake_flag(&fake, cancel_result, -MOK_EBUSY);
    assert_fails(mok_cancel(session, ticket), MOK_EBUSY, "too late, it will complete by itself");
    fake_flag(&fake, cancel_result, -MOK_ENOENT);
    assert_fails(mok_cancel(session, ticket), MOK_ENOENT, "has completed");
    fake_flag(&fake, hold, false);
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_fails(mok_cancel(session, ticket), MOK_ENOENT, "ticket is ");
}

static void a_completed_operation_whose_result_waits_cannot_be_canceled(void **state)
{
    mok_ticket ticket;
    (void)state;
    assert_works(mok_nop(session, 1, &ticket));
    fake_await_completed(&fake, 1);
    assert_fails(mok_cancel(session, ticket), MOK_ENOENT, "has completed");
    assert_works(mok_wait(session, ticket, -1, NULL));
}

static void cancels_have_places_of_their_own_in_a_full_queue(void **state)
{
    mok_ticket ticket[ENTRIES];
    (void)state;
    fake_flag(&fake, hold, true);
    for (int i = 0; i < ENTRIES; i++)
        assert_works(mok_nop(session, 1, &ticket[i]));
    fake_await_taken(&fake, ENTRIES);
    for (int i = 0; i < ENTRIES; i++)
        assert_works(mok_cancel(session, ticket[i]));
    fake_flag(&fake, hold, false);
    for (int i = 0; i < ENTRIES; i++)
        assert_works(mok_wait(session, ticket[i], -1, NULL));
}

/* ------------------------------------------------------------------ death */

struct waiter {
    pthread_t thread;
    mok_ticket ticket;
    int result;
    uint64_t took_ns;
    char sentence[160];
};

static void *wait_for_ever(void *argument)
{
    struct waiter *waiter = argument;
    uint64_t start = mok_now_ns();

    waiter->result = mok_wait(session, waiter->ticket, -1, NULL);
    waiter->took_ns = mok_now_ns() - start;
    strncpy(waiter->sentence, mok_last_error(), sizeof(waiter->sentence) - 1);
    return NULL;
}

static void start_waiters(struct waiter *waiters, int count)
{
    fake_flag(&fake, hold, true);
    for (int i = 0; i < count; i++) {
        memset(&waiters[i], 0, sizeof(waiters[i]));
        assert_works(mok_nop(session, 1, &waiters[i].ticket));
        assert_int_equal(pthread_create(&waiters[i].thread, NULL, wait_for_ever, &waiters[i]), 0);
    }
    usleep(50000);
}

static void end_waiters(struct waiter *waiters, int count, int code, const char *words)
{
    for (int i = 0; i < count; i++) {
        pthread_join(waiters[i].thread, NULL);
        assert_int_equal(waiters[i].result, -code);
        assert_non_null(strstr(waiters[i].sentence, words));
        assert_true(waiters[i].took_ns < 2 * (uint64_t)SECOND);
    }
}

static void when_mokd_and_worker_are_gone_every_waiter_knows_within_two_seconds(void **state)
{
    struct waiter waiters[4];
    mok_ticket ticket;
    (void)state;
    start_waiters(waiters, 4);
    fake_hang_up(&fake);
    end_waiters(waiters, 4, MOK_EDAEMON, "no-op ended because mokd is gone");
    assert_true(mok_nop(session, 1, &ticket) == -MOK_EDAEMON);
}

static void when_mokd_is_gone_polling_ends_too(void **state)
{
    mok_ticket ticket;
    int r;
    (void)state;
    fake_flag(&fake, hold, true);
    assert_works(mok_nop(session, 1, &ticket));
    fake_hang_up(&fake);
    uint64_t start = mok_now_ns();
    while ((r = mok_poll(session, ticket, NULL)) == 0 && mok_now_ns() - start < 2 * (uint64_t)SECOND)
        usleep(1000);
    assert_int_equal(r, -MOK_EDAEMON);
}

static void a_result_that_came_before_the_death_is_still_the_result(void **state)
{
    mok_ticket ticket;
    (void)state;
    assert_works(mok_nop(session, 1, &ticket));
    fake_await_completed(&fake, 1);
    fake_hang_up(&fake);
    usleep(150000);
    assert_int_equal(mok_wait(session, ticket, -1, NULL), 0);
}

static void when_the_worker_ends_its_queue_operations_end_and_the_next_one_gets_another_queue(void **state)
{
    struct waiter waiters[3];
    mok_ticket ticket;
    (void)state;
    start_waiters(waiters, 3);
    fake_close_queues(&fake, -MOK_EWORKER);
    end_waiters(waiters, 3, MOK_EWORKER, "the worker of its device went away");
    fake_flag(&fake, hold, false);
    assert_works(mok_nop(session, 1, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_int_equal(fake_seen(&fake, REQUEST(QUEUE_OPEN)), 2);
}

static void a_layer_of_a_worker_that_went_away_is_not_used_on_the_next_one(void **state)
{
    const mok_forward_args args = forward_args();
    mok_ticket ticket;
    (void)state;
    fake_close_queues(&fake, -MOK_EWORKER);
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_EWORKER, "the queue to device 1 is closed");
    assert_works(mok_nop(session, 1, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_EWORKER, "form it again");
}

static void a_failed_group_says_why_at_submission_and_at_completion(void **state)
{
    const mok_forward_args args = forward_args();
    Mok__GroupFailed body = MOK__GROUP_FAILED__INIT;
    Mok__Reply event = MOK__REPLY__INIT;
    mok_ticket ticket;
    int r = 0;
    (void)state;
    fake_complete_with(&fake, (struct mok_cqe){ .result = -MOK_EPEER, .detail = 1 });
    assert_works(mok_layer_forward(layer, &args, &ticket));
    fake_await_taken(&fake, 1);
    body.group = 1;
    body.rank = 1;
    event.code = -MOK_EPEER;
    event.text = (char *)"rank 1 (pid 4711) of group ep is gone";
    event.body_case = MOK__REPLY__BODY_GROUP_FAILED;
    event.group_failed = &body;
    fake_send(&fake, &event);
    r = mok_wait(session, ticket, -1, NULL);
    assert_fails(r, MOK_EPEER, "rank 1 (pid 4711) of group ep is gone");
    assert_fails(mok_layer_forward(layer, &args, &ticket), MOK_EPEER, "rank 1 (pid 4711) of group ep is gone");
    assert_works(mok_nop(session, 1, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
}

static void leaving_with_operations_in_flight_lets_them_end_by_themselves(void **state)
{
    const mok_forward_args args = forward_args();
    mok_ticket ticket;
    (void)state;
    fake_flag(&fake, hold, true);
    assert_works(mok_layer_forward(layer, &args, &ticket));
    fake_await_taken(&fake, 1);
    assert_works(mok_group_leave(group));
    assert_fails(mok_buffer_free(private), MOK_EBUSY, "is used by 1 operations");
    fake_flag(&fake, hold, false);
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_works(mok_buffer_free(private));
}

/* ------------------------------------------------------------------ threads */

struct worker_bee {
    pthread_t thread;
    unsigned seed, device;
    int result;
    unsigned done;
};

/* Submits up to three, gets their results in some order and by either call, cancels now and then. */
static void *buzz(void *argument)
{
    struct worker_bee *bee = argument;
    mok_ticket ticket[3] = { 0 };

    for (int round = 0; round < 300; round++) {
        unsigned i = (bee->seed = bee->seed * 1103515245u + 12345u) >> 16 & 1;
        int r = 0;
        if (!ticket[i]) {
            r = mok_nop(session, bee->device, &ticket[i]);
            if (r == -MOK_EAGAIN)
                r = 0;
        } else if (bee->seed & 0x800000) {
            r = mok_poll(session, ticket[i], NULL);
            bee->done += r == 1;
            if (r == 1)
                ticket[i] = 0;
        } else {
            if (bee->seed & 0x400000)
                mok_cancel(session, ticket[i]);
            r = mok_wait(session, ticket[i], -1, NULL);
            bee->done++;
            ticket[i] = 0;
        }
        if (r < 0) {
            bee->result = r;
            return NULL;
        }
    }
    for (int i = 0; i < 3; i++) {
        if (ticket[i] && mok_wait(session, ticket[i], -1, NULL) == 0)
            bee->done++;
    }
    return NULL;
}

static void six_threads_on_two_devices_get_each_result_exactly_once(void **state)
{
    struct worker_bee bees[6] = { 0 };
    unsigned done = 0;
    (void)state;
    for (unsigned i = 0; i < ARRAY_SIZE(bees); i++) {
        bees[i].seed = 99 * i + 1;
        bees[i].device = i % 2;
        pthread_create(&bees[i].thread, NULL, buzz, &bees[i]);
    }
    for (unsigned i = 0; i < ARRAY_SIZE(bees); i++) {
        pthread_join(bees[i].thread, NULL);
        assert_int_equal(bees[i].result, 0);
        done += bees[i].done;
    }
    assert_true(done > 300);
}

static void *wait_in_turn(void *argument)
{
    struct worker_bee *bee = argument;
    for (int i = 0; i < 50 && bee->result == 0; i++) {
        mok_ticket ticket;
        bee->result = mok_nop(session, 1, &ticket);
        if (bee->result == 0)
            bee->result = mok_wait(session, ticket, 10 * SECOND, NULL);
    }
    return NULL;
}

static void waiters_are_woken_although_another_thread_reaps_their_completion(void **state)
{
    struct worker_bee bees[ENTRIES] = { 0 };
    (void)state;
    uint64_t start = mok_now_ns();
    for (unsigned i = 0; i < ARRAY_SIZE(bees); i++)
        pthread_create(&bees[i].thread, NULL, wait_in_turn, &bees[i]);
    for (unsigned i = 0; i < ARRAY_SIZE(bees); i++) {
        pthread_join(bees[i].thread, NULL);
        assert_int_equal(bees[i].result, 0);
    }
    /* One lost wake-up costs a slice of 200 ms; fifty rounds must not have had many. */
    assert_true(mok_now_ns() - start < 4 * (uint64_t)SECOND);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_LAYER(name) cmocka_unit_test_setup_teardown(name, set_up_layer, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_no_op_completes_and_its_result_can_be_had_once),
        TEST(polling_says_0_until_the_operation_has_completed),
        TEST(tickets_of_nobody_are_unknown),
        TEST(a_wait_that_is_over_leaves_the_operation_in_flight),
        TEST(a_wait_that_is_over_names_the_ranks_that_mokd_misses),
        TEST(as_many_operations_as_entries_are_in_flight_and_then_it_says_reap),
        TEST(results_that_nobody_asked_for_count_until_they_are_asked_for),
        TEST(a_thousand_operations_pass_the_wrap_around_of_the_counters),
        TEST(two_devices_and_two_sessions_do_not_mix),
        TEST_LAYER(a_forward_reaches_the_worker_as_it_was_meant),
        TEST_LAYER(a_backward_names_the_context_mode_of_its_forward),
        TEST_LAYER(no_tokens_need_no_tensors),
        TEST_LAYER(wrong_arguments_are_refused_before_anything_is_submitted),
        TEST_LAYER(parameters_must_fit_and_be_the_layer_s),
        TEST_LAYER(a_layer_runs_only_with_what_it_needs_bound),
        TEST_LAYER(what_an_operation_or_a_binding_uses_is_busy_until_it_has_completed),
        TEST_LAYER(destroying_a_layer_releases_its_parameters),
        TEST_LAYER(an_operation_s_failure_is_its_result_and_its_sentence_the_last_error),
        TEST(cancel_passes_on_what_the_worker_says),
        TEST(a_completed_operation_whose_result_waits_cannot_be_canceled),
        TEST(cancels_have_places_of_their_own_in_a_full_queue),
        TEST(when_mokd_and_worker_are_gone_every_waiter_knows_within_two_seconds),
        TEST(when_mokd_is_gone_polling_ends_too),
        TEST(a_result_that_came_before_the_death_is_still_the_result),
        TEST(when_the_worker_ends_its_queue_operations_end_and_the_next_one_gets_another_queue),
        TEST_LAYER(a_layer_of_a_worker_that_went_away_is_not_used_on_the_next_one),
        TEST_LAYER(a_failed_group_says_why_at_submission_and_at_completion),
        TEST_LAYER(leaving_with_operations_in_flight_lets_them_end_by_themselves),
        TEST(six_threads_on_two_devices_get_each_result_exactly_once),
        TEST(waiters_are_woken_although_another_thread_reaps_their_completion),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
