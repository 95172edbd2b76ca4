/* SPDX-License-Identifier: Apache-2.0 */
/* What those see who only look: every layer of the node, the plan of each, and the plan of one that is not there. */
#include "fixture.h"

#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "layer.h"

enum { HIDDEN = 32, INTERMEDIATE = 64, EXPERTS = 4 };

static Mok__LayerSpec make_spec(void)
{
    Mok__LayerSpec spec = MOK__LAYER_SPEC__INIT;

    spec.hidden = HIDDEN;
    spec.intermediate = INTERMEDIATE;
    spec.experts = EXPERTS;
    spec.topk = 2;
    spec.max_tokens = 16;
    spec.precision = MOK_MXFP8_PER128;
    return spec;
}

static struct answer ask_query(struct client *client, Mok__LayerSpec *spec, uint32_t group, uint32_t ep,
                               uint32_t device)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerQuery body = MOK__LAYER_QUERY__INIT;

    body.group = group;
    body.spec = spec;
    body.ep = ep;
    body.device = device;
    request.body_case = MOK__REQUEST__BODY_LAYER_QUERY;
    request.layer_query = &body;
    return client_ask(client, &request);
}

static struct answer ask_describe(struct client *client, uint32_t layer, uint32_t rank)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerDescribe body = MOK__LAYER_DESCRIBE__INIT;

    body.layer = layer;
    body.rank = rank;
    request.body_case = MOK__REQUEST__BODY_LAYER_DESCRIBE;
    request.layer_describe = &body;
    return client_ask(client, &request);
}

static void expect_refused(const struct answer *answer, int code, const char *part)
{
    if (answer->reply->code != code || !strstr(answer->reply->text, part))
        fail_msg("%d \"%s\" is not %d \"%s\"", answer->reply->code, answer->reply->text, code, part);
}

/* A layer of two ranks; returns its id. */
static uint32_t make_layer(struct client *clients, uint32_t group, Mok__LayerMemory *ret_memory)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LayerCreate body = MOK__LAYER_CREATE__INIT;
    Mok__LayerSpec spec = make_spec();
    uint32_t layer = 0;

    body.group = group;
    body.spec = &spec;
    request.body_case = MOK__REQUEST__BODY_LAYER_CREATE;
    request.layer_create = &body;
    client_send(&clients[0], &request);
    client_send(&clients[1], &request);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&clients[i]);
        assert_int_equal(answer.reply->code, 0);
        layer = answer.reply->layer_create->layer;
        *ret_memory = *answer.reply->layer_create->memory;
    }
    return layer;
}

struct scene {
    struct client clients[2], observer;
    uint32_t group, layer;
    Mok__LayerMemory memory; /* numbers only */
};

static void open_scene(struct scene *scene, const struct daemon *daemon)
{
    for (uint32_t i = 0; i < 2; i++) {
        client_open(&scene->clients[i], daemon);
        client_queue(&scene->clients[i], i);
    }
    client_observe(&scene->observer, daemon);
    scene->group = client_join(scene->clients, 2, "looks");
    scene->layer = make_layer(scene->clients, scene->group, &scene->memory);
}

static void close_scene(struct scene *scene)
{
    client_close(&scene->clients[0]);
    client_close(&scene->clients[1]);
    client_close(&scene->observer);
}

static void status_has_a_line_for_each_rank_of_a_layer(void **state)
{
    struct scene scene;

    open_scene(&scene, *state);
    {
        _cleanup_answer_ struct answer answer = client_status(&scene.observer);
        const Mok__StatusReply *status = answer.reply->status;
        assert_int_equal(status->n_layer, 2);
        for (uint32_t rank = 0; rank < 2; rank++) {
            const Mok__LayerInfo *info = status->layer[rank];
            assert_int_equal(info->layer, scene.layer);
            assert_int_equal(info->group, scene.group);
            assert_string_equal(info->group_name, "looks");
            assert_int_equal(info->rank, rank);
            assert_int_equal(info->device, rank);
            assert_int_equal(info->session, scene.clients[rank].session);
            assert_int_equal(info->uid, getuid());
            assert_int_equal(info->spec->hidden, HIDDEN);
            assert_int_equal(info->spec->intermediate, INTERMEDIATE);
            assert_int_equal(info->spec->experts, EXPERTS);
            assert_int_equal(info->spec->precision, MOK_MXFP8_PER128);
            assert_int_equal(info->memory->context_full_bytes, scene.memory.context_full_bytes);
            assert_int_equal(info->bytes, scene.memory.symmetric_bytes + scene.memory.private_bytes);
        }
    }
    client_close(&scene.clients[0]);
    for (int i = 0;; i++) {
        _cleanup_answer_ struct answer answer = client_status(&scene.observer);
        if (answer.reply->status->n_layer == 1) {
            assert_int_equal(answer.reply->status->layer[0]->rank, 1);
            break;
        }
        assert_true(i < 1000);
        sleep_ms(10);
    }
    client_close(&scene.clients[1]);
    client_close(&scene.observer);
}

static void an_observer_is_told_the_plan_of_any_rank(void **state)
{
    struct scene scene;

    open_scene(&scene, *state);
    for (uint32_t rank = 0; rank < 2; rank++) {
        _cleanup_answer_ struct answer seen = ask_describe(&scene.observer, scene.layer, rank);
        _cleanup_answer_ struct answer own = ask_describe(&scene.clients[rank], scene.layer, 0);
        assert_int_equal(seen.reply->code, 0);
        assert_int_equal(own.reply->code, 0);
        assert_string_equal(seen.reply->layer_describe->text, own.reply->layer_describe->text);
        assert_non_null(strstr(own.reply->layer_describe->text, "ring_rows = "));
    }
    _cleanup_answer_ struct answer beyond = ask_describe(&scene.observer, scene.layer, 2);
    expect_refused(&beyond, -MOK_ERANK, "rank = 2: layer");
    _cleanup_answer_ struct answer none = ask_describe(&scene.observer, scene.layer + 1000, 0);
    expect_refused(&none, -MOK_ENOENT, "there is no such layer");
    close_scene(&scene);
}

static void a_session_is_told_only_of_its_own_layers(void **state)
{
    struct scene scene;
    struct client stranger;

    open_scene(&scene, *state);
    client_open(&stranger, *state);
    _cleanup_answer_ struct answer answer = ask_describe(&stranger, scene.layer, 0);
    expect_refused(&answer, -MOK_ENOENT, "the session has no such layer");
    client_close(&stranger);
    close_scene(&scene);
}

static void a_query_without_a_group_plans_for_any_device_and_number_of_ranks(void **state)
{
    struct client observer, session;
    Mok__LayerSpec spec = make_spec();
    const struct mok_device_limits device = { .kind = MOK_DEVICE_HOST, .units = 1, .memory_bytes = 64 << 20 };
    struct mok_layer_spec wanted = { .hidden = HIDDEN,
                                     .intermediate = INTERMEDIATE,
                                     .experts = EXPERTS,
                                     .topk = 2,
                                     .ep = 4,
                                     .max_tokens = 16,
                                     .precision = MOK_MXFP8_PER128,
                                     .ring_bytes = 1 << 20,
                                     .minibatch_rows = 64 };
    struct mok_plan plan;
    char text[4096];

    assert_int_equal(mok_plan_make(&wanted, &device, &plan, text, sizeof(text), NULL), 0);
    spec.ring_bytes = 1 << 20;
    spec.minibatch_rows = 64;
    client_observe(&observer, *state);
    client_open(&session, *state);
    for (int i = 0; i < 2; i++) {
        _cleanup_answer_ struct answer answer = ask_query(i ? &session : &observer, &spec, 0, 4, 1);
        assert_int_equal(answer.reply->code, 0);
        const Mok__LayerQueryReply *reply = answer.reply->layer_query;
        assert_string_equal(reply->describe, text);
        assert_int_equal(reply->memory->symmetric_bytes, plan.symmetric_bytes);
        assert_int_equal(reply->memory->private_bytes, plan.private_bytes);
        assert_int_equal(reply->memory->context_full_bytes, plan.context_full_bytes);
        assert_int_equal(reply->memory->context_recompute_bytes, plan.context_recompute_bytes);
    }
    client_close(&session);
    client_close(&observer);
}

static void a_query_that_cannot_be_is_refused_by_name(void **state)
{
    struct client observer;
    Mok__LayerSpec spec = make_spec(), odd = make_spec();

    odd.hidden = 33;
    client_observe(&observer, *state);
    _cleanup_answer_ struct answer device = ask_query(&observer, &spec, 0, 1, 2);
    expect_refused(&device, -MOK_ENODEV, "device = 2");
    _cleanup_answer_ struct answer none = ask_query(&observer, &spec, 0, 0, 0);
    expect_refused(&none, -MOK_ERANGE, "ep = 0");
    _cleanup_answer_ struct answer many = ask_query(&observer, &spec, 0, MOK_MAX_EP + 1, 0);
    expect_refused(&many, -MOK_ERANGE, "ep = 129");
    _cleanup_answer_ struct answer uneven = ask_query(&observer, &spec, 0, 3, 0);
    expect_refused(&uneven, -MOK_ERANGE, "experts = 4");
    _cleanup_answer_ struct answer shape = ask_query(&observer, &odd, 0, 1, 0);
    expect_refused(&shape, -MOK_EALIGN, "hidden = 33");
    _cleanup_answer_ struct answer empty = ask_query(&observer, NULL, 0, 1, 0);
    expect_refused(&empty, -MOK_EARG, "spec");
    _cleanup_answer_ struct answer group = ask_query(&observer, &spec, 1, 1, 0);
    expect_refused(&group, -MOK_ESTATE, "may only look");
    client_close(&observer);
}

#define test(name) cmocka_unit_test_setup_teardown(name, daemon_setup, daemon_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        test(status_has_a_line_for_each_rank_of_a_layer),
        test(an_observer_is_told_the_plan_of_any_rank),
        test(a_session_is_told_only_of_its_own_layers),
        test(a_query_without_a_group_plans_for_any_device_and_number_of_ranks),
        test(a_query_that_cannot_be_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
