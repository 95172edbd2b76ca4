/* SPDX-License-Identifier: Apache-2.0 */
/* Greetings, and messages that are not what they should be: their sender loses his session, nobody else anything. */
#include "fixture.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "util.h"

static Mok__Request ask_limits(Mok__LimitsQuery *query)
{
    Mok__Request request = MOK__REQUEST__INIT;

    *query = (Mok__LimitsQuery)MOK__LIMITS_QUERY__INIT;
    request.body_case = MOK__REQUEST__BODY_LIMITS_QUERY;
    request.limits_query = query;
    return request;
}

/* A bystander opened before the misdeed still gets his answers after it. */
static void expect_alive(struct client *bystander)
{
    client_bytes_used(bystander);
    client_close(bystander);
}

static void hello_opens_a_session(void **state)
{
    struct client client;
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    client_connect(&client, *state);
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, 0);
    assert_int_equal(answer.reply->hello->protocol, 1);
    assert_int_not_equal(answer.reply->hello->session, 0);
    assert_int_equal(answer.reply->hello->boot_id.len, 16);
    assert_int_equal(answer.reply->hello->limits->sessions, 256);
    assert_true(answer.reply->hello->limits->sessions_used >= 1);
    client_close(&client);
}

static void a_protocol_range_without_ours_is_refused(void **state)
{
    struct client client;
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    client_connect(&client, *state);
    hello.protocol_min = 2;
    hello.protocol_max = 7;
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, -MOK_EVERSION);
    assert_non_null(strstr(answer.reply->text, "2..7"));
    client_expect_end(&client);
    client_close(&client);
}

static void a_job_name_with_a_space_is_refused(void **state)
{
    struct client client;
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    client_connect(&client, *state);
    hello.job = (char *)"my job";
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, -MOK_ENAME);
    assert_non_null(strstr(answer.reply->text, "my job"));
    client_expect_end(&client);
    client_close(&client);
}

static void the_first_message_must_be_hello(void **state)
{
    struct client client, bystander;
    Mok__LimitsQuery query;
    Mok__Request request = ask_limits(&query);

    client_open(&bystander, *state);
    client_connect(&client, *state);
    client_send(&client, &request);
    assert_int_equal(client_expect_end(&client), -MOK_EPROTO);
    client_close(&client);
    expect_alive(&bystander);
}

static void hello_is_said_once(void **state)
{
    struct client client;
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    client_open(&client, *state);
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, -MOK_ESTATE);
    client_bytes_used(&client); /* and goes on */
    client_close(&client);
}

static void bytes_that_are_no_message_end_the_session(void **state)
{
    struct client client, bystander;

    client_open(&bystander, *state);
    client_open(&client, *state);
    assert_true(send(client.fd, "\xff\xff\xff\xff\xff\xff\xff\xff", 8, 0) > 0);
    assert_int_equal(client_expect_end(&client), -MOK_EPROTO);
    client_close(&client);
    expect_alive(&bystander);
}

static void a_message_cut_short_ends_the_session(void **state)
{
    struct client client, bystander;
    Mok__GroupJoin join;
    Mok__Request request = ask_join(&join, "cut-short", 2, 0, 0);
    uint8_t bytes[128];

    client_open(&bystander, *state);
    client_open(&client, *state);
    request.id = 9;
    size_t size = mok__request__pack(&request, bytes);
    assert_true(send(client.fd, bytes, size - 3, 0) > 0);
    assert_int_equal(client_expect_end(&client), -MOK_EPROTO);
    client_close(&client);
    expect_alive(&bystander);
}

static void a_name_with_a_nul_inside_is_refused_by_its_field(void **state)
{
    struct client client;
    Mok__GroupJoin join;
    Mok__Request request = ask_join(&join, "ours#theirs", 2, 0, 0);
    uint8_t bytes[128];

    client_open(&client, *state);
    request.id = 9;
    size_t size = mok__request__pack(&request, bytes);
    uint8_t *mark = memchr(bytes, '#', size);
    assert_non_null(mark);
    *mark = 0;
    assert_true(send(client.fd, bytes, size, 0) > 0);
    _cleanup_answer_ struct answer answer = client_receive(&client);
    assert_int_equal(answer.reply->code, -MOK_ENAME);
    assert_non_null(strstr(answer.reply->text, "name = "));
    client_close(&client);
}

static void a_message_too_large_ends_the_session(void **state)
{
    struct client client, bystander;
    _cleanup_free_ char *bytes = calloc(1, MOK_WIRE_MAX_BYTES + 1);

    assert_non_null(bytes);
    client_open(&bystander, *state);
    client_open(&client, *state);
    assert_int_equal(send(client.fd, bytes, MOK_WIRE_MAX_BYTES + 1, 0), MOK_WIRE_MAX_BYTES + 1);
    assert_int_equal(client_expect_end(&client), -MOK_EPROTO);
    client_close(&client);
    expect_alive(&bystander);
}

static void descriptors_in_a_message_end_the_session_and_do_not_stay(void **state)
{
    struct client client, bystander;
    Mok__LimitsQuery query;
    Mok__Request request = ask_limits(&query);
    int fds[2] = { STDIN_FILENO, STDOUT_FILENO };

    client_open(&bystander, *state);
    unsigned before = daemon_descriptors(*state);
    client_open(&client, *state);
    request.id = 1;
    assert_int_equal(mok_wire_send(client.fd, &request.base, fds, 2), 0);
    assert_int_equal(client_expect_end(&client), -MOK_EPROTO);
    client_close(&client);
    client_expect_bytes(&bystander, 0);
    assert_true(daemon_descriptors_settle(*state, before));
    client_close(&bystander);
}

static void a_request_without_an_id_ends_the_session(void **state)
{
    struct client client;
    Mok__LimitsQuery query;
    Mok__Request request = ask_limits(&query);

    client_open(&client, *state);
    request.id = 0;
    assert_int_equal(mok_wire_send(client.fd, &request.base, NULL, 0), 0);
    assert_int_equal(client_expect_end(&client), -MOK_EPROTO);
    client_close(&client);
}

static void a_request_of_an_unknown_kind_is_refused_and_the_session_goes_on(void **state)
{
    struct client client;
    Mok__Request request = MOK__REQUEST__INIT; /* what an unknown body looks like here */

    client_open(&client, *state);
    _cleanup_answer_ struct answer answer = client_ask(&client, &request);
    assert_int_equal(answer.reply->code, -MOK_ENOTSUP);
    client_bytes_used(&client);
    client_close(&client);
}

static void an_observer_may_only_look(void **state)
{
    struct client client;
    Mok__BufferAlloc alloc;
    Mok__Request wish = ask_alloc(&alloc, 0, 0, 4096);

    client_observe(&client, *state);
    _cleanup_answer_ struct answer status = client_status(&client);
    assert_int_equal(status.reply->status->n_device, 2);
    _cleanup_answer_ struct answer refusal = client_ask(&client, &wish);
    assert_int_equal(refusal.reply->code, -MOK_ESTATE);
    client_close(&client);
}

static void status_names_the_session_and_its_job(void **state)
{
    struct client client;
    bool found = false;

    client_open(&client, *state);
    client_queue(&client, 1);
    _cleanup_answer_ struct answer answer = client_status(&client);
    const Mok__StatusReply *status = answer.reply->status;
    for (size_t i = 0; i < status->n_job; i++) {
        if (status->job[i]->session != client.session)
            continue;
        found = true;
        assert_string_equal(status->job[i]->job, "test");
        assert_int_equal(status->job[i]->uid, getuid());
        assert_int_equal(status->job[i]->pid, getpid());
        assert_int_equal(status->job[i]->queues, 1);
    }
    assert_true(found);
    assert_string_equal(status->device[1]->name, "host1");
    assert_int_equal(status->device[1]->sessions, 1);
    assert_int_equal(status->omitted, 0);
    client_close(&client);
}

static void a_client_that_does_not_read_is_ended(void **state)
{
    struct client client, bystander;
    Mok__StatusQuery query = MOK__STATUS_QUERY__INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    unsigned sent = 0;

    client_open(&bystander, *state);
    client_open(&client, *state);
    request.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
    request.status_query = &query;
    while (sent < 100000) {
        request.id = ++sent;
        if (mok_wire_send(client.fd, &request.base, NULL, 0) < 0)
            break;
    }
    assert_true(sent < 100000);
    client_close(&client);
    expect_alive(&bystander);
}

static void a_queue_is_one_a_device_and_has_a_power_of_two_of_entries(void **state)
{
    struct client client;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueOpen open = MOK__QUEUE_OPEN__INIT;
    const struct {
        uint32_t device, entries;
        int code;
    } wrong[] = {
        { 0, 16, -MOK_EEXIST },   { 1, 0, -MOK_ERANGE },    { 1, 3, -MOK_ERANGE },  { 1, 48, -MOK_ERANGE },
        { 1, 8192, -MOK_ERANGE }, { 1, 4096, -MOK_EQUOTA }, { 2, 16, -MOK_ENODEV },
    };

    client_open(&client, *state);
    client_queue(&client, 0);
    request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
    request.queue_open = &open;
    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++) {
        open.device = wrong[i].device;
        open.entries = wrong[i].entries;
        _cleanup_answer_ struct answer answer = client_ask(&client, &request);
        assert_int_equal(answer.reply->code, wrong[i].code);
        assert_int_equal(answer.fds.count, 0);
    }
    client_queue(&client, 1);
    client_close(&client);
}

static int ask_queue_close(struct client *client, uint32_t queue)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueClose body = MOK__QUEUE_CLOSE__INIT;

    body.queue = queue;
    request.body_case = MOK__REQUEST__BODY_QUEUE_CLOSE;
    request.queue_close = &body;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    return answer.reply->code;
}

static void a_queue_that_is_given_back_makes_room_for_another(void **state)
{
    struct client client, other;

    client_open(&client, *state);
    client_open(&other, *state);
    unsigned before = daemon_descriptors(*state);
    for (int i = 0; i < 20; i++) {
        uint32_t queue = client_queue(&client, 0);
        assert_int_equal(ask_queue_close(&other, queue), -MOK_ENOENT);
        assert_int_equal(ask_queue_close(&client, queue), 0);
        assert_int_equal(ask_queue_close(&client, queue), -MOK_ENOENT);
    }
    assert_int_equal(ask_queue_close(&client, 0), -MOK_ENOENT);
    assert_true(daemon_descriptors_settle(*state, before)); /* fewer once sessions of earlier tests have gone */
    client_queue(&client, 0);
    client_close(&client);
    client_close(&other);
}

static void a_session_may_end_while_its_queue_is_given_back(void **state)
{
    struct client client;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueClose body = MOK__QUEUE_CLOSE__INIT;

    for (int i = 0; i < 10; i++) {
        client_open(&client, *state);
        body.queue = client_queue(&client, 0);
        request.body_case = MOK__REQUEST__BODY_QUEUE_CLOSE;
        request.queue_close = &body;
        client_send(&client, &request);
        client_close(&client);
    }
    client_open(&client, *state);
    client_queue(&client, 0);
    client_close(&client);
}

static void the_sessions_of_a_user_are_bounded_and_come_back(void **state)
{
    struct daemon daemon;
    struct client first, second, third;
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);

    (void)state;
    daemon_start(&daemon, "[limits]\nsessions = 2\n[device host0]\n", 0);
    client_open(&first, &daemon);
    client_open(&second, &daemon);
    client_connect(&third, &daemon);
    {
        _cleanup_answer_ struct answer answer = client_ask(&third, &request);
        assert_int_equal(answer.reply->code, -MOK_EQUOTA);
        assert_non_null(strstr(answer.reply->text, "may have 2"));
    }
    client_close(&third);
    client_close(&second);
    sleep_ms(50);
    client_open(&third, &daemon);
    client_close(&third);
    client_close(&first);
    assert_int_equal(daemon_stop(&daemon), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(hello_opens_a_session),
        cmocka_unit_test(a_protocol_range_without_ours_is_refused),
        cmocka_unit_test(a_job_name_with_a_space_is_refused),
        cmocka_unit_test(the_first_message_must_be_hello),
        cmocka_unit_test(hello_is_said_once),
        cmocka_unit_test(bytes_that_are_no_message_end_the_session),
        cmocka_unit_test(a_message_cut_short_ends_the_session),
        cmocka_unit_test(a_name_with_a_nul_inside_is_refused_by_its_field),
        cmocka_unit_test(a_message_too_large_ends_the_session),
        cmocka_unit_test(descriptors_in_a_message_end_the_session_and_do_not_stay),
        cmocka_unit_test(a_request_without_an_id_ends_the_session),
        cmocka_unit_test(a_request_of_an_unknown_kind_is_refused_and_the_session_goes_on),
        cmocka_unit_test(an_observer_may_only_look),
        cmocka_unit_test(status_names_the_session_and_its_job),
        cmocka_unit_test(a_client_that_does_not_read_is_ended),
        cmocka_unit_test(a_queue_is_one_a_device_and_has_a_power_of_two_of_entries),
        cmocka_unit_test(a_queue_that_is_given_back_makes_room_for_another),
        cmocka_unit_test(a_session_may_end_while_its_queue_is_given_back),
        cmocka_unit_test(the_sessions_of_a_user_are_bounded_and_come_back),
    };
    return cmocka_run_group_tests(tests, daemon_setup, daemon_teardown);
}
