/* SPDX-License-Identifier: Apache-2.0 */
/* Layers: charged to the byte, made by all ranks alike, bound to what fits and to nothing else. */
#include "fixture.h"

#include <string.h>

#include "layer.h"

enum { HIDDEN = 32, INTERMEDIATE = 64, EXPERTS = 4, LOCAL = EXPERTS / 2 };
#define WEIGHT_BYTES (LOCAL * HIDDEN * INTERMEDIATE * 2u)
#define GRADIENT_BYTES (2 * WEIGHT_BYTES)

static void make_spec(Mok__LayerSpec *spec)
{
    *spec = (Mok__LayerSpec)MOK__LAYER_SPEC__INIT;
    spec->hidden = HIDDEN;
    spec->intermediate = INTERMEDIATE;
    spec->experts = EXPERTS;
    spec->topk = 2;
    spec->max_tokens = 16;
    spec->precision = MOK_BF16;
}

static void expect_text(const struct answer *answer, int code, const char *part)
{
    assert_non_null(answer->reply);
    if (answer->reply->code != code)
        fail_msg("code %d (%s) is not %d", answer->reply->code, answer->reply->text, code);
    if (!strstr(answer->reply->text, part))
        fail_msg("\"%s\" does not say \"%s\"", answer->reply->text, part);
}

/* Two sessions with a queue each, ranks of one group. */
struct pair {
    struct client client[2];
    uint32_t group;
    uint64_t queues; /* bytes charged for them */
};

static void open_pair(struct pair *pair, const struct daemon *daemon)
{
    for (uint32_t i = 0; i < 2; i++) {
        client_open(&pair->client[i], daemon);
        client_queue(&pair->client[i], i);
    }
    pair->group = client_join(pair->client, 2, "layers");
    pair->queues = client_bytes_used(&pair->client[0]);
}

static void close_pair(struct pair *pair)
{
    client_close(&pair->client[0]);
    client_close(&pair->client[1]);
}

static void send_create(struct client *client, uint32_t group, Mok__LayerSpec *spec)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerCreate body = MOK__LAYER_CREATE__INIT;

    body.group = group;
    body.spec = spec;
    request.body_case = MOK__REQUEST__BODY_LAYER_CREATE;
    request.layer_create = &body;
    client_send(client, &request);
}

static uint32_t create(struct pair *pair, Mok__LayerMemory *ret_memory)
{
    Mok__LayerSpec spec;
    uint32_t layer = 0;

    make_spec(&spec);
    send_create(&pair->client[0], pair->group, &spec);
    send_create(&pair->client[1], pair->group, &spec);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&pair->client[i]);
        expect_text(&answer, 0, "");
        layer = answer.reply->layer_create->layer;
        assert_int_not_equal(answer.reply->layer_create->queue, 0);
        if (ret_memory)
            *ret_memory = *answer.reply->layer_create->memory;
    }
    return layer;
}

static struct answer ask_query(struct pair *pair, Mok__LayerSpec *spec)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerQuery body = MOK__LAYER_QUERY__INIT;

    body.group = pair->group;
    body.spec = spec;
    request.body_case = MOK__REQUEST__BODY_LAYER_QUERY;
    request.layer_query = &body;
    return client_ask(&pair->client[0], &request);
}

static struct answer ask_destroy(struct client *client, uint32_t layer)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerDestroy body = MOK__LAYER_DESTROY__INIT;

    body.layer = layer;
    request.body_case = MOK__REQUEST__BODY_LAYER_DESTROY;
    request.layer_destroy = &body;
    return client_ask(client, &request);
}

static void destroy(struct client *client, uint32_t layer, int code)
{
    _cleanup_answer_ struct answer answer = ask_destroy(client, layer);
    assert_int_equal(answer.reply->code, code);
}

static void expect_bind(struct client *client, uint32_t layer, Mok__LayerParams *params, int code, const char *part)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerBind body = MOK__LAYER_BIND__INIT;

    body.layer = layer;
    body.params = params;
    request.body_case = MOK__REQUEST__BODY_LAYER_BIND;
    request.layer_bind = &body;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    expect_text(&answer, code, part);
}

static void expect_free(struct client *client, uint32_t buffer, int code)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__BufferFree body = MOK__BUFFER_FREE__INIT;

    body.buffer = buffer;
    request.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
    request.buffer_free = &body;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    assert_int_equal(answer.reply->code, code);
}

/* ------------------------------------------------------------------ planning and creating */

static void a_layer_is_charged_exactly_what_the_query_says(void **state)
{
    struct pair pair;
    Mok__LayerSpec spec;
    Mok__LayerMemory memory, created;

    open_pair(&pair, *state);
    make_spec(&spec);
    {
        _cleanup_answer_ struct answer answer = ask_query(&pair, &spec);
        expect_text(&answer, 0, "");
        memory = *answer.reply->layer_query->memory;
        assert_non_null(strstr(answer.reply->layer_query->describe, "ring"));
    }
    assert_int_equal(client_bytes_used(&pair.client[0]), pair.queues);
    uint32_t layer = create(&pair, &created);
    assert_int_equal(created.symmetric_bytes, memory.symmetric_bytes);
    assert_int_equal(created.private_bytes, memory.private_bytes);
    assert_int_equal(client_bytes_used(&pair.client[0]),
                     pair.queues + 2 * (memory.symmetric_bytes + memory.private_bytes));
    destroy(&pair.client[0], layer, 0);
    /* the peer maps rank 0's symmetric workspace until its own part goes */
    client_expect_bytes(&pair.client[0], pair.queues + 2 * memory.symmetric_bytes + memory.private_bytes);
    destroy(&pair.client[1], layer, 0);
    client_expect_bytes(&pair.client[0], pair.queues);
    close_pair(&pair);
}

static void the_query_is_the_planners_word(void **state)
{
    struct pair pair;
    Mok__LayerSpec spec;
    struct mok_plan plan;
    struct mok_message message;
    struct mok_layer_spec wanted = { .hidden = HIDDEN,
                                     .intermediate = INTERMEDIATE,
                                     .experts = EXPERTS,
                                     .topk = 2,
                                     .ep = 2,
                                     .max_tokens = 16,
                                     .precision = MOK_BF16 };
    struct mok_device_limits device = { .kind = MOK_DEVICE_HOST, .units = 1, .memory_bytes = 64 << 20 };

    open_pair(&pair, *state);
    make_spec(&spec);
    assert_int_equal(mok_plan_make(&wanted, &device, &plan, NULL, 0, &message), 0);
    _cleanup_answer_ struct answer answer = ask_query(&pair, &spec);
    expect_text(&answer, 0, "");
    assert_int_equal(answer.reply->layer_query->memory->symmetric_bytes, plan.symmetric_bytes);
    assert_int_equal(answer.reply->layer_query->memory->private_bytes, plan.private_bytes);
    assert_int_equal(answer.reply->layer_query->memory->context_full_bytes, plan.context_full_bytes);
    assert_int_equal(answer.reply->layer_query->memory->context_recompute_bytes, plan.context_recompute_bytes);
    close_pair(&pair);
}

static void an_impossible_spec_is_the_callers_own_affair(void **state)
{
    struct pair pair;
    Mok__LayerSpec spec;

    open_pair(&pair, *state);
    make_spec(&spec);
    spec.hidden = 33;
    {
        _cleanup_answer_ struct answer answer = ask_query(&pair, &spec);
        assert_true(answer.reply->code < 0);
        assert_non_null(strstr(answer.reply->text, "hidden = 33"));
    }
    send_create(&pair.client[0], pair.group, &spec);
    {
        _cleanup_answer_ struct answer answer = client_receive(&pair.client[0]);
        assert_true(answer.reply->code < 0);
        assert_non_null(strstr(answer.reply->text, "hidden = 33"));
    }
    create(&pair, NULL); /* the ranks are still in step */
    close_pair(&pair);
}

static void ranks_that_differ_learn_field_and_values(void **state)
{
    struct pair pair;
    Mok__LayerSpec first, second;

    open_pair(&pair, *state);
    make_spec(&first);
    make_spec(&second);
    second.intermediate += 16;
    send_create(&pair.client[0], pair.group, &first);
    send_create(&pair.client[1], pair.group, &second);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&pair.client[i]);
        expect_text(&answer, -MOK_EMISMATCH, "ranks 0 and 1 differ on intermediate: 64 and 80");
    }
    second = first;
    second.clamp = 7;
    send_create(&pair.client[0], pair.group, &first);
    send_create(&pair.client[1], pair.group, &second);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&pair.client[i]);
        expect_text(&answer, -MOK_EMISMATCH, "ranks 0 and 1 differ on clamp: 0 and 7");
    }
    assert_int_equal(client_bytes_used(&pair.client[0]), pair.queues);
    close_pair(&pair);
}

static void a_layer_and_a_buffer_do_not_meet(void **state)
{
    struct pair pair;
    Mok__LayerSpec spec;
    Mok__BufferAlloc alloc;

    open_pair(&pair, *state);
    make_spec(&spec);
    Mok__Request request = ask_alloc(&alloc, pair.group, 0, 4096);
    send_create(&pair.client[0], pair.group, &spec);
    client_send(&pair.client[1], &request);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&pair.client[i]);
        expect_text(&answer, -MOK_EMISMATCH, "rank 0 asks for a layer and rank 1 for a symmetric allocation");
    }
    close_pair(&pair);
}

static void a_layer_needs_a_queue_on_its_device(void **state)
{
    struct client client;
    Mok__LayerSpec spec;

    client_open(&client, *state);
    uint32_t group = client_join(&client, 1, "queueless");
    make_spec(&spec);
    send_create(&client, group, &spec);
    _cleanup_answer_ struct answer answer = client_receive(&client);
    expect_text(&answer, -MOK_ESTATE, "no queue on device 0");
    client_close(&client);
}

static void what_does_not_fit_the_device_is_refused_for_all(void **state)
{
    struct pair pair;
    Mok__LayerSpec spec;

    open_pair(&pair, *state);
    client_buffer(&pair.client[1], 1, (64 << 20) - 4096);
    make_spec(&spec);
    send_create(&pair.client[0], pair.group, &spec);
    send_create(&pair.client[1], pair.group, &spec);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&pair.client[i]);
        expect_text(&answer, -MOK_ENOMEM, "rank 1: ");
    }
    client_expect_bytes(&pair.client[0], pair.queues + (64 << 20) - 4096);
    close_pair(&pair);
}

static void a_layer_is_destroyed_once_and_described_until_then(void **state)
{
    struct pair pair;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerDescribe body = MOK__LAYER_DESCRIBE__INIT;

    open_pair(&pair, *state);
    uint32_t layer = create(&pair, NULL);
    body.layer = layer;
    request.body_case = MOK__REQUEST__BODY_LAYER_DESCRIBE;
    request.layer_describe = &body;
    {
        _cleanup_answer_ struct answer answer = client_ask(&pair.client[0], &request);
        expect_text(&answer, 0, "");
        assert_non_null(strstr(answer.reply->layer_describe->text, "local_experts = 2"));
    }
    destroy(&pair.client[0], layer, 0);
    destroy(&pair.client[0], layer, -MOK_ENOENT);
    _cleanup_answer_ struct answer answer = client_ask(&pair.client[0], &request);
    assert_int_equal(answer.reply->code, -MOK_ENOENT);
    close_pair(&pair);
}

static void a_layer_of_a_failed_group_says_why_it_cannot_be_bound(void **state)
{
    struct pair pair;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerBind body = MOK__LAYER_BIND__INIT;

    open_pair(&pair, *state);
    body.layer = create(&pair, NULL);
    client_close(&pair.client[1]);
    _cleanup_answer_ struct answer event = client_receive(&pair.client[0]);
    assert_int_equal(event.reply->body_case, MOK__REPLY__BODY_GROUP_FAILED);
    request.body_case = MOK__REQUEST__BODY_LAYER_BIND;
    request.layer_bind = &body;
    _cleanup_answer_ struct answer answer = client_ask(&pair.client[0], &request);
    expect_text(&answer, -MOK_EPEER, "group layers: rank 1 is gone");
    client_close(&pair.client[0]);
}

static void the_layers_of_an_ended_session_go_with_it(void **state)
{
    struct pair pair;

    open_pair(&pair, *state);
    create(&pair, NULL);
    create(&pair, NULL);
    client_close(&pair.client[1]);
    client_close(&pair.client[0]);
    client_open(&pair.client[0], *state);
    client_expect_bytes(&pair.client[0], 0);
    client_close(&pair.client[0]);
}

/* ------------------------------------------------------------------ binding */

static Mok__Region region(uint32_t buffer, uint64_t offset, uint64_t length)
{
    Mok__Region region = MOK__REGION__INIT;

    region.buffer = buffer;
    region.offset = offset;
    region.length = length;
    return region;
}

static void a_binding_is_checked_parameter_by_parameter(void **state)
{
    struct pair pair;
    Mok__LayerParams params = MOK__LAYER_PARAMS__INIT;

    open_pair(&pair, *state);
    struct client *client = &pair.client[0];
    uint32_t layer = create(&pair, NULL);
    uint32_t mine = client_buffer(client, 0, 1 << 16), elsewhere = client_buffer(client, 1, 1 << 16);
    uint32_t other = client_buffer(&pair.client[1], 0, 1 << 16);
    const struct {
        Mok__Region gate;
        int code;
        const char *text;
    } wrong[] = {
        { region(mine, 0, WEIGHT_BYTES - 16), -MOK_ESIZE, "gate: 8176 bytes, the layer needs 8192" },
        { region(mine, 8, WEIGHT_BYTES), -MOK_EALIGN, "gate: offset 8 is no multiple of 16" },
        { region(mine, (1 << 16) - 4096, WEIGHT_BYTES), -MOK_ERANGE, "gate: offset 61440 and length 8192 end after" },
        { region(mine, 16, UINT64_MAX), -MOK_ERANGE, "gate: offset 16" },
        { region(mine + 1000, 0, WEIGHT_BYTES), -MOK_EBUFFER, "gate: the session has no buffer" },
        { region(other, 0, WEIGHT_BYTES), -MOK_EBUFFER, "gate: the session has no buffer" },
        { region(elsewhere, 0, WEIGHT_BYTES), -MOK_EBUFFER, "is on device 1, the layer on device 0" },
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        Mok__Region gate = wrong[i].gate;
        params.gate = &gate;
        expect_bind(client, layer, &params, wrong[i].code, wrong[i].text);
    }
    Mok__Region shared = region(mine, 0, WEIGHT_BYTES), gradient = region(mine, 4096, GRADIENT_BYTES);
    Mok__Region gate = region(mine, 0, WEIGHT_BYTES);
    params.gate = NULL;
    params.shared_up = &shared;
    expect_bind(client, layer, &params, -MOK_EARG, "shared_up: this layer has no such parameter");
    params.shared_up = NULL;
    params.down_scale = &shared;
    expect_bind(client, layer, &params, -MOK_EARG, "down_scale: this layer has no such parameter");
    params.down_scale = NULL;
    params.gate = &gate;
    params.d_up = &gradient;
    expect_bind(client, layer, &params, -MOK_EARG, "d_up: overlaps gate");
    expect_bind(client, layer + 1000, &params, -MOK_ENOENT, "the session has no such layer");
    expect_free(client, mine, 0); /* nothing of all that has stuck to it */
    close_pair(&pair);
}

static void what_is_bound_cannot_be_freed(void **state)
{
    struct pair pair;
    Mok__LayerParams params = MOK__LAYER_PARAMS__INIT;

    open_pair(&pair, *state);
    struct client *client = &pair.client[0];
    uint32_t layer = create(&pair, NULL);
    uint32_t weights = client_buffer(client, 0, 1 << 16), gradients = client_buffer(client, 0, 1 << 16);
    Mok__Region gate = region(weights, 0, WEIGHT_BYTES), up = region(weights, WEIGHT_BYTES, WEIGHT_BYTES);
    Mok__Region down = region(weights, 2 * WEIGHT_BYTES, 1 << 14), d_gate = region(gradients, 0, GRADIENT_BYTES);
    params.gate = &gate;
    params.up = &up;
    params.down = &down;
    params.d_gate = &d_gate;
    expect_bind(client, layer, &params, 0, "");
    expect_free(client, weights, -MOK_EBUSY);
    expect_free(client, gradients, -MOK_EBUSY);
    params.d_gate = NULL; /* a new binding replaces the old one whole */
    expect_bind(client, layer, &params, 0, "");
    expect_free(client, gradients, 0);
    expect_free(client, weights, -MOK_EBUSY);
    destroy(client, layer, 0);
    expect_free(client, weights, 0);
    close_pair(&pair);
}

static void expect_queue_close(struct client *client, uint32_t queue, int code, const char *part)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueClose body = MOK__QUEUE_CLOSE__INIT;

    body.queue = queue;
    request.body_case = MOK__REQUEST__BODY_QUEUE_CLOSE;
    request.queue_close = &body;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    expect_text(&answer, code, part);
}

static void a_queue_that_serves_a_layer_is_not_given_back(void **state)
{
    struct client client[2];
    struct pair pair;
    uint32_t queue[2];

    for (uint32_t i = 0; i < 2; i++) {
        client_open(&client[i], *state);
        queue[i] = client_queue(&client[i], i);
    }
    pair = (struct pair){ { client[0], client[1] }, client_join(client, 2, "queues"), 0 };
    uint32_t layer = create(&pair, NULL);
    expect_queue_close(&pair.client[0], queue[0], -MOK_EBUSY, "of the session needs it");
    expect_queue_close(&pair.client[0], queue[1], -MOK_ENOENT, "has no such queue"); /* another session's */
    destroy(&pair.client[0], layer, 0);
    expect_queue_close(&pair.client[0], queue[0], 0, "");
    expect_queue_close(&pair.client[1], queue[1], -MOK_EBUSY, "of the session needs it");
    destroy(&pair.client[1], layer, 0);
    close_pair(&pair);
}

#define test(name) cmocka_unit_test_setup_teardown(name, daemon_setup, daemon_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        test(a_layer_is_charged_exactly_what_the_query_says),
        test(the_query_is_the_planners_word),
        test(an_impossible_spec_is_the_callers_own_affair),
        test(ranks_that_differ_learn_field_and_values),
        test(a_layer_and_a_buffer_do_not_meet),
        test(a_layer_needs_a_queue_on_its_device),
        test(what_does_not_fit_the_device_is_refused_for_all),
        test(a_layer_is_destroyed_once_and_described_until_then),
        test(a_layer_of_a_failed_group_says_why_it_cannot_be_bound),
        test(the_layers_of_an_ended_session_go_with_it),
        test(a_binding_is_checked_parameter_by_parameter),
        test(what_is_bound_cannot_be_freed),
        test(a_queue_that_serves_a_layer_is_not_given_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
