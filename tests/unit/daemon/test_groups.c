/* SPDX-License-Identifier: Apache-2.0 */
/* Groups: joining in any order, every way in which ranks can disagree, and what the others learn when one goes. */
#include "fixture.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void open_all(struct client *clients, size_t count, const struct daemon *daemon)
{
    for (size_t i = 0; i < count; i++)
        client_open(&clients[i], daemon);
}

static void close_all(struct client *clients, size_t count)
{
    for (size_t i = 0; i < count; i++)
        client_close(&clients[i]);
}

static void expect_code(struct client *client, int code, const char *part)
{
    _cleanup_answer_ struct answer answer = client_receive(client);
    assert_non_null(answer.reply);
    assert_int_equal(answer.reply->code, code);
    if (!strstr(answer.reply->text, part))
        fail_msg("\"%s\" does not say \"%s\"", answer.reply->text, part);
}

static void send_join(struct client *client, const char *name, uint32_t size, uint32_t rank, uint32_t device,
                      uint64_t timeout_ms)
{
    Mok__GroupJoin join;
    Mok__Request request = ask_join(&join, name, size, rank, device);

    join.timeout_ms = timeout_ms;
    client_send(client, &request);
}

/* Returns once mokd has seen all that the client sent: another client's message then comes after it. */
static void settle(struct client *client)
{
    client_bytes_used(client);
}

static void leave(struct client *client, uint32_t group)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__GroupLeave body = MOK__GROUP_LEAVE__INIT;

    body.group = group;
    request.body_case = MOK__REQUEST__BODY_GROUP_LEAVE;
    request.group_leave = &body;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    assert_int_equal(answer.reply->code, 0);
}

/* The next message must say that the group failed. */
static void expect_failed(struct client *client, uint32_t group, uint32_t rank, int code)
{
    _cleanup_answer_ struct answer answer = client_receive(client);
    assert_non_null(answer.reply);
    assert_int_equal(answer.reply->id, 0);
    assert_int_equal(answer.reply->code, code);
    assert_int_equal(answer.reply->body_case, MOK__REPLY__BODY_GROUP_FAILED);
    assert_int_equal(answer.reply->group_failed->group, group);
    assert_int_equal(answer.reply->group_failed->rank, rank);
}

static void ranks_join_in_any_order(void **state)
{
    struct client clients[3];
    uint32_t groups[3];

    open_all(clients, 3, *state);
    send_join(&clients[2], "any", 3, 2, 2, 0);
    send_join(&clients[0], "any", 3, 0, 0, 0);
    send_join(&clients[1], "any", 3, 1, 1, 0);
    for (int i = 0; i < 3; i++) {
        _cleanup_answer_ struct answer answer = client_receive(&clients[i]);
        assert_int_equal(answer.reply->code, 0);
        groups[i] = answer.reply->group_join->group;
    }
    assert_int_not_equal(groups[0], 0);
    assert_int_equal(groups[0], groups[1]);
    assert_int_equal(groups[0], groups[2]);
    close_all(clients, 3);
}

static void ranks_that_differ_on_the_size_all_learn_it(void **state)
{
    struct client clients[2];

    open_all(clients, 2, *state);
    send_join(&clients[0], "sizes", 2, 0, 0, 0);
    settle(&clients[0]);
    send_join(&clients[1], "sizes", 3, 1, 1, 0);
    expect_code(&clients[0], -MOK_EMISMATCH, "rank 1 says that the size is 3, ranks before it said 2");
    expect_code(&clients[1], -MOK_EMISMATCH, "rank 1 says that the size is 3, ranks before it said 2");
    client_join(clients, 2, "sizes"); /* and the name is free again */
    close_all(clients, 2);
}

static void a_rank_that_is_taken_is_refused_and_the_group_still_forms(void **state)
{
    struct client clients[3];

    open_all(clients, 3, *state);
    send_join(&clients[0], "taken", 2, 0, 0, 0);
    settle(&clients[0]);
    send_join(&clients[2], "taken", 2, 0, 1, 0);
    expect_code(&clients[2], -MOK_ERANK, "rank = 0: taken");
    send_join(&clients[1], "taken", 2, 1, 1, 0);
    expect_code(&clients[0], 0, "");
    expect_code(&clients[1], 0, "");
    send_join(&clients[2], "taken", 2, 1, 2, 0);
    expect_code(&clients[2], -MOK_ERANK, "rank = 1: taken");
    close_all(clients, 3);
}

static void a_device_has_one_rank_of_a_group(void **state)
{
    struct client clients[2];

    open_all(clients, 2, *state);
    send_join(&clients[0], "devices", 2, 0, 1, 0);
    settle(&clients[0]);
    send_join(&clients[1], "devices", 2, 1, 1, 0);
    expect_code(&clients[1], -MOK_EBUSY, "device = 1: has rank 0");
    close_all(clients, 2);
}

static void a_session_is_one_rank_of_a_group(void **state)
{
    struct client client;

    client_open(&client, *state);
    send_join(&client, "twice", 2, 0, 0, 0);
    send_join(&client, "twice", 2, 1, 1, 0);
    expect_code(&client, -MOK_EEXIST, "the session is rank 0");
    client_close(&client);
}

static void requests_beyond_a_bound_are_refused_with_it(void **state)
{
    struct client client;
    char name[66];

    client_open(&client, *state);
    send_join(&client, "a b", 1, 0, 0, 0);
    expect_code(&client, -MOK_ENAME, "name = a b");
    send_join(&client, "", 1, 0, 0, 0);
    expect_code(&client, -MOK_ENAME, "1..63");
    memset(name, 'x', 64);
    name[64] = '\0';
    send_join(&client, name, 1, 0, 0, 0);
    expect_code(&client, -MOK_ENAME, "1..63");
    send_join(&client, "n", 0, 0, 0, 0);
    expect_code(&client, -MOK_ERANGE, "size = 0");
    send_join(&client, "n", 129, 0, 0, 0);
    expect_code(&client, -MOK_ERANGE, "1..128");
    send_join(&client, "n", 5, 0, 0, 0);
    expect_code(&client, -MOK_ERANGE, "there are 4");
    send_join(&client, "n", 2, 2, 0, 0);
    expect_code(&client, -MOK_ERANK, "rank = 2: must be in 0..1");
    send_join(&client, "n", 2, 0, 4, 0);
    expect_code(&client, -MOK_ENODEV, "device = 4");
    client_close(&client);
}

static void a_join_that_waits_in_vain_names_the_missing_ranks(void **state)
{
    struct client clients[3];

    open_all(clients, 3, *state);
    send_join(&clients[1], "late", 3, 1, 1, 60);
    expect_code(&clients[1], -MOK_ETIMEDOUT, "missing is rank 0, 2");
    client_join(clients, 3, "late"); /* nothing of it is left */
    close_all(clients, 3);
}

static void one_ranks_deadline_does_not_end_the_others_waiting(void **state)
{
    struct client clients[2];

    open_all(clients, 2, *state);
    send_join(&clients[0], "patience", 2, 0, 0, 0);
    send_join(&clients[1], "patience", 2, 1, 1, 0);
    expect_code(&clients[0], 0, "");
    expect_code(&clients[1], 0, "");
    send_join(&clients[0], "other", 2, 0, 0, 0);
    send_join(&clients[1], "third", 2, 0, 0, 40);
    expect_code(&clients[1], -MOK_ETIMEDOUT, "group third");
    send_join(&clients[1], "other", 2, 1, 1, 0);
    expect_code(&clients[0], 0, "");
    expect_code(&clients[1], 0, "");
    close_all(clients, 2);
}

static void when_a_rank_leaves_the_others_learn_it_and_the_name_is_free(void **state)
{
    struct client clients[2];

    open_all(clients, 2, *state);
    uint32_t group = client_join(clients, 2, "leave");
    leave(&clients[0], group);
    expect_failed(&clients[1], group, 0, -MOK_EPEER);
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, group, 0, 4096);
    {
        _cleanup_answer_ struct answer gone = client_ask(&clients[0], &request);
        assert_int_equal(gone.reply->code, -MOK_ENOENT);
        _cleanup_answer_ struct answer failed = client_ask(&clients[1], &request);
        assert_int_equal(failed.reply->code, -MOK_EPEER);
        assert_non_null(strstr(failed.reply->text, "rank 0 left"));
    }
    leave(&clients[1], group);
    assert_int_not_equal(client_join(clients, 2, "leave"), group);
    close_all(clients, 2);
}

static void a_group_of_one_rank_forms_at_once(void **state)
{
    struct client client;

    client_open(&client, *state);
    leave(&client, client_join(&client, 1, "alone"));
    client_close(&client);
}

static void a_session_that_ends_while_it_joins_makes_room(void **state)
{
    struct client clients[2];

    open_all(clients, 2, *state);
    send_join(&clients[0], "room", 2, 0, 0, 0);
    settle(&clients[0]);
    client_close(&clients[0]);
    client_open(&clients[0], *state);
    client_join(clients, 2, "room");
    close_all(clients, 2);
}

/* A process that joins as rank 1 and is then killed. */
static pid_t start_victim(const struct daemon *daemon, const char *name)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid > 0)
        return pid;
    struct client client;
    client_open(&client, daemon);
    client_queue(&client, 1);
    client_buffer(&client, 1, 1 << 20);
    send_join(&client, name, 2, 1, 1, 0);
    for (;;)
        pause();
}

static void a_killed_rank_is_noticed_and_all_it_had_is_freed(void **state)
{
    struct client client;

    client_open(&client, *state);
    pid_t victim = start_victim(*state, "killed");
    send_join(&client, "killed", 2, 0, 0, 0);
    uint32_t group;
    {
        _cleanup_answer_ struct answer answer = client_receive(&client);
        assert_int_equal(answer.reply->code, 0);
        group = answer.reply->group_join->group;
    }
    assert_in_range(client_bytes_used(&client), 1 << 20, (1 << 20) + (64 << 10)); /* its buffer and its queue */
    kill(victim, SIGKILL);
    waitpid(victim, NULL, 0);
    expect_failed(&client, group, 1, -MOK_EPEER);
    client_expect_bytes(&client, 0);
    client_close(&client);
}

static void a_name_belongs_to_its_user(void **state)
{
    struct client client;
    int status;

    if (getuid() != 0)
        skip();
    client_open(&client, *state);
    send_join(&client, "mine", 2, 0, 0, 0);
    settle(&client);
    pid_t other = fork();
    assert_true(other >= 0);
    if (other == 0) {
        struct client stranger;
        if (setuid(4242) < 0)
            _exit(2);
        client_open(&stranger, *state);
        send_join(&stranger, "mine", 2, 1, 1, 80);
        struct answer answer = client_receive(&stranger);
        _exit(answer.reply && answer.reply->code == -MOK_ETIMEDOUT ? 0 : 1);
    }
    assert_int_equal(waitpid(other, &status, 0), other);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
    client_close(&client);
}

static void a_group_that_a_worker_refuses_fails_on_all_ranks(void **state)
{
    struct daemon daemon;
    struct client clients[2];

    (void)state;
    daemon_start(&daemon, "[device host0]\n[device deny-groups]\n", 0);
    open_all(clients, 2, &daemon);
    for (int round = 0; round < 2; round++) {
        send_join(&clients[0], "denied", 2, 0, 0, 0);
        send_join(&clients[1], "denied", 2, 1, 1, 0);
        for (int i = 0; i < 2; i++) {
            int code = 0;
            for (uint64_t id = 0; id == 0;) { /* past the event */
                _cleanup_answer_ struct answer answer = client_receive(&clients[i]);
                assert_non_null(answer.reply);
                id = answer.reply->id;
                code = answer.reply->code;
            }
            assert_int_equal(code, -MOK_EDEVICE);
        }
    }
    close_all(clients, 2);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static int setup(void **state)
{
    static struct daemon daemon;

    daemon_start(&daemon, "[device a]\n[device b]\n[device c]\n[device d]\n", 0);
    *state = &daemon;
    return 0;
}

static int teardown(void **state)
{
    return daemon_stop(*state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_join_in_any_order),
        cmocka_unit_test(ranks_that_differ_on_the_size_all_learn_it),
        cmocka_unit_test(a_rank_that_is_taken_is_refused_and_the_group_still_forms),
        cmocka_unit_test(a_device_has_one_rank_of_a_group),
        cmocka_unit_test(a_session_is_one_rank_of_a_group),
        cmocka_unit_test(requests_beyond_a_bound_are_refused_with_it),
        cmocka_unit_test(a_join_that_waits_in_vain_names_the_missing_ranks),
        cmocka_unit_test(one_ranks_deadline_does_not_end_the_others_waiting),
        cmocka_unit_test(when_a_rank_leaves_the_others_learn_it_and_the_name_is_free),
        cmocka_unit_test(a_group_of_one_rank_forms_at_once),
        cmocka_unit_test(a_session_that_ends_while_it_joins_makes_room),
        cmocka_unit_test(a_killed_rank_is_noticed_and_all_it_had_is_freed),
        cmocka_unit_test(a_name_belongs_to_its_user),
        cmocka_unit_test(a_group_that_a_worker_refuses_fails_on_all_ranks),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
