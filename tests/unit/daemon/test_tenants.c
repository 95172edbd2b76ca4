/* SPDX-License-Identifier: Apache-2.0 */
/* What users and Unix groups may have, devices that drain, and devices that one group has alone. */
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"
#include "util.h"

/* Two accounts of every Debian system whose group is the same one, and one that is not in it. */
#define NOBODY 65534
#define SYNC 4
#define STRANGER 4242
#define NOGROUP "65534"

/* A session of another user, while the test is root. */
static void open_as(struct client *client, const struct daemon *daemon, uid_t uid)
{
    assert_int_equal(seteuid(uid), 0);
    client_open(client, daemon);
    assert_int_equal(seteuid(0), 0);
}

static void expect(const struct answer *answer, int code, const char *part)
{
    assert_non_null(answer->reply);
    assert_int_equal(answer->reply->code, code);
    if (!strstr(answer->reply->text, part))
        fail_msg("\"%s\" does not say \"%s\"", answer->reply->text, part);
}

static void expect_alloc(struct client *client, uint32_t device, uint64_t bytes, int code, const char *part)
{
    Mok__BufferAlloc alloc;
    Mok__Request request = ask_alloc(&alloc, 0, device, bytes);
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    expect(&answer, code, part);
}

static void expect_queue(struct client *client, uint32_t device, int code, const char *part)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QueueOpen open = MOK__QUEUE_OPEN__INIT;

    open.device = device;
    open.entries = 16;
    request.body_case = MOK__REQUEST__BODY_QUEUE_OPEN;
    request.queue_open = &open;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    expect(&answer, code, part);
}

static void send_join(struct client *client, const char *name, uint32_t size, uint32_t rank, bool exclusive)
{
    Mok__GroupJoin join;
    Mok__Request request = ask_join(&join, name, size, rank, rank);

    join.exclusive = exclusive;
    client_send(client, &request);
}

/* Returns the group, if it was joined. */
static uint32_t expect_joined(struct client *client, int code, const char *part)
{
    _cleanup_answer_ struct answer answer = client_receive(client);

    expect(&answer, code, part);
    return code ? 0 : answer.reply->group_join->group;
}

static uint32_t join(struct client *client, const char *name, bool exclusive, int code, const char *part)
{
    send_join(client, name, 1, 0, exclusive);
    return expect_joined(client, code, part);
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

static struct answer ask_quota(struct client *client, const char *user, bool all)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QuotaQuery query = MOK__QUOTA_QUERY__INIT;

    query.user = (char *)user;
    query.all = all;
    request.body_case = MOK__REQUEST__BODY_QUOTA_QUERY;
    request.quota_query = &query;
    return client_ask(client, &request);
}

static const Mok__Quota *find_quota(const struct answer *answer, bool group, uint32_t id)
{
    assert_int_equal(answer->reply->body_case, MOK__REPLY__BODY_QUOTA);
    for (size_t i = 0; i < answer->reply->quota->n_quota; i++) {
        const Mok__Quota *quota = answer->reply->quota->quota[i];
        if ((bool)quota->group == group && quota->id == id)
            return quota;
    }
    return NULL;
}

static const Mok__QuotaLine *find_line(const Mok__Quota *quota, const char *what)
{
    for (size_t i = 0; i < quota->n_line; i++)
        if (strcmp(quota->line[i]->what, what) == 0)
            return quota->line[i];
    fail_msg("no line %s", what);
    return NULL;
}

/* ------------------------------------------------------------------ limits */

static void the_members_of_a_unix_group_share_what_it_may_have(void **state)
{
    struct daemon daemon;
    struct client one, two, stranger;

    (void)state;
    if (getuid() != 0)
        skip();
    daemon_start(
        &daemon,
        "[group " NOGROUP "]\nbytes = 1M\nsessions = 2\n[device host0]\nmemory = 8M\n[device host1]\nmemory = 8M\n", 0);
    open_as(&one, &daemon, NOBODY);
    open_as(&two, &daemon, SYNC);
    open_as(&stranger, &daemon, STRANGER);
    client_buffer(&one, 0, 512 << 10);
    expect_alloc(&two, 1, (512 << 10) + 1, -MOK_EQUOTA, "may have 1048576 bytes together and have 524288");
    client_buffer(&two, 1, 512 << 10);
    expect_alloc(&one, 0, 1, -MOK_EQUOTA, "the members of group " NOGROUP);
    client_buffer(&stranger, 0, 2 << 20); /* who is in no such group is not bound by it */

    struct client third;
    Mok__Hello hello;
    Mok__Request request = ask_hello(&hello);
    assert_int_equal(seteuid(NOBODY), 0);
    client_connect(&third, &daemon);
    assert_int_equal(seteuid(0), 0);
    _cleanup_answer_ struct answer answer = client_ask(&third, &request);
    expect(&answer, -MOK_EQUOTA, "may have 2 sessions together and have 2");
    client_close(&third);

    client_close(&two); /* and what a member gives back the others may have */
    client_close(&stranger);
    client_expect_bytes(&one, 512 << 10);
    for (int waited = 0; waited < 1000; waited++) {
        _cleanup_answer_ struct answer quota = ask_quota(&one, "", false);
        if (find_line(find_quota(&quota, true, NOBODY), "bytes")->used == 512 << 10)
            break;
        sleep_ms(5);
    }
    client_buffer(&one, 0, 512 << 10);
    client_close(&one);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_user_uses_the_devices_that_he_may_use(void **state)
{
    struct daemon daemon;
    struct client client;

    (void)state;
    if (getuid() != 0)
        skip();
    daemon_start(&daemon, "[user 4242]\ndevices = host1\n[device host0]\n[device host1]\n", 0);
    open_as(&client, &daemon, STRANGER);
    expect_alloc(&client, 0, 4096, -MOK_EACCESS, "device = 0: user 4242 may use devices host1");
    expect_queue(&client, 0, -MOK_EACCESS, "may use devices host1");
    join(&client, "g", false, -MOK_EACCESS, "may use devices host1");
    expect_alloc(&client, 1, 4096, 0, "");
    client_queue(&client, 1);
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void each_limit_is_named_with_its_value_and_bound(void **state)
{
    struct daemon daemon;
    struct client client, other;

    (void)state;
    daemon_start(&daemon, "[limits]\ngroups = 1\nbuffers = 1\ndescriptors = 5\nqueue_entries = 8\n[device host0]\n", 0);
    client_open(&client, &daemon);
    client_open(&other, &daemon);
    expect_queue(&client, 0, -MOK_EQUOTA, "entries = 16: user");
    join(&client, "g", false, 0, "");
    join(&other, "h", false, -MOK_EQUOTA, "may have 1 groups and has 1"); /* of the user, over his sessions */
    expect_alloc(&client, 0, 4096, 0, "");
    expect_alloc(&other, 0, 4096, -MOK_EQUOTA, "may have 1 buffers and has 1");
    client_close(&client);
    client_expect_bytes(&other, 0);
    join(&other, "h", false, 0, "");
    client_close(&other);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static uint64_t limit_of_bytes(struct client *client)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__LimitsQuery query = MOK__LIMITS_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_LIMITS_QUERY;
    request.limits_query = &query;
    _cleanup_answer_ struct answer answer = client_ask(client, &request);
    return answer.reply->limits->bytes;
}

static void a_hangup_brings_new_limits_and_takes_nothing_away(void **state)
{
    struct daemon daemon;
    struct client client;

    (void)state;
    daemon_start(&daemon, "[limits]\nbytes = 1M\n[device host0]\n", 0);
    client_open(&client, &daemon);
    client_buffer(&client, 0, 1 << 20);
    daemon_reload(&daemon, "[limits]\nbytes = 512K\nweight = 7\npriority = low\n[device host0]\n");
    for (int waited = 0; waited < 1000 && limit_of_bytes(&client) != 512 << 10; waited++)
        sleep_ms(5);
    expect_alloc(&client, 0, 1, -MOK_EQUOTA, "may have 524288 bytes and has 1048576");
    _cleanup_answer_ struct answer quota = ask_quota(&client, "", false);
    const Mok__Quota *own = find_quota(&quota, false, getuid());
    assert_int_equal(find_line(own, "bytes")->used, 1 << 20);
    assert_int_equal(own->weight, 7);
    assert_int_equal(own->priority, MOK_PRIORITY_LOW);

    daemon_reload(&daemon, "[limits]\nbytes = 9M\nspeed = 1\n[device host0]\n"); /* wrong: nothing changes */
    daemon_reload(&daemon, "[limits]\nbytes = 9M\n[device another]\n"); /* other devices: not while mokd runs */
    sleep_ms(200);
    assert_int_equal(limit_of_bytes(&client), 512 << 10);
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

enum { LONG_BYTES = 1000000, HANGUPS = 20 };

/* A file takes its time to be read if it is long: the second hangup of a round mostly comes meanwhile. */
static void a_hangup_while_the_file_is_being_read_is_not_lost(void **state)
{
    static char text[LONG_BYTES + 64];
    struct daemon daemon;
    struct client client;

    (void)state;
    daemon_start(&daemon, "[limits]\nbytes = 1M\n[device host0]\n", 0);
    client_open(&client, &daemon);
    memset(text, '\n', LONG_BYTES);
    strcpy(text + LONG_BYTES, "[limits]\nbytes = 2M\n[device host0]\n");
    for (uint64_t megabytes = 3; megabytes < 3 + HANGUPS; megabytes++) {
        char next[64];
        daemon_reload(&daemon, text);
        sleep_ms(2);
        snprintf(next, sizeof(next), "[limits]\nbytes = %" PRIu64 "M\n[device host0]\n", megabytes);
        daemon_reload(&daemon, next);
        for (int waited = 0; waited < 2000 && limit_of_bytes(&client) != megabytes << 20; waited++)
            sleep_ms(1);
        assert_int_equal(limit_of_bytes(&client), megabytes << 20);
    }
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_user_sees_his_own_quota_and_an_administrator_everybodys(void **state)
{
    struct daemon daemon;
    struct client root, client;

    (void)state;
    if (getuid() != 0)
        skip();
    daemon_start(&daemon,
                 "[user 4242]\nbytes = 3M\nweight = 5\nexclusive = yes\n[user 77]\nsessions = 9\n"
                 "[group " NOGROUP "]\nlayers = 8\n[device host0]\n",
                 0);
    open_as(&client, &daemon, STRANGER);
    client_observe(&root, &daemon);
    client_buffer(&client, 0, 8192);

    _cleanup_answer_ struct answer own = ask_quota(&client, "", false);
    assert_int_equal(own.reply->quota->n_quota, 1);
    const Mok__Quota *quota = find_quota(&own, false, STRANGER);
    assert_int_equal(find_line(quota, "bytes")->used, 8192);
    assert_int_equal(find_line(quota, "bytes")->limit, 3 << 20);
    assert_string_equal(find_line(quota, "bytes")->from, "[user 4242]");
    assert_string_equal(find_line(quota, "sessions")->from, "[limits]");
    assert_int_equal(quota->weight, 5);
    assert_true(quota->exclusive);

    _cleanup_answer_ struct answer others = ask_quota(&client, "77", false);
    expect(&others, -MOK_EACCESS, "user 4242 is no administrator");
    _cleanup_answer_ struct answer everybody = ask_quota(&client, "", true);
    expect(&everybody, -MOK_EACCESS, "no administrator");

    _cleanup_answer_ struct answer all = ask_quota(&root, "", true);
    assert_non_null(find_quota(&all, false, 0));
    assert_int_equal(find_line(find_quota(&all, false, 77), "sessions")->limit, 9); /* who has nothing now */
    const Mok__QuotaLine *descriptors = find_line(find_quota(&all, false, 77), "descriptors");
    assert_int_equal(descriptors->limit, find_line(find_quota(&all, false, STRANGER), "descriptors")->limit);
    assert_string_equal(descriptors->from, "mokd's own limit");
    assert_int_equal(find_line(find_quota(&all, true, NOBODY), "layers")->limit, 8);
    _cleanup_answer_ struct answer named = ask_quota(&root, "4242", false);
    assert_int_equal(find_line(find_quota(&named, false, STRANGER), "bytes")->used, 8192);
    _cleanup_answer_ struct answer unknown = ask_quota(&root, "mallory", false);
    expect(&unknown, -MOK_ENOENT, "user = mallory");
    client_close(&client);
    client_close(&root);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void a_user_is_called_by_his_name_from_the_first_request_on(void **state)
{
    struct daemon daemon;

    (void)state;
    if (getuid() != 0)
        skip();
    for (int i = 0; i < 5; i++) {
        struct client client;
        daemon_start(&daemon, "[device host0]\n", 0);
        open_as(&client, &daemon, NOBODY);
        _cleanup_answer_ struct answer answer = ask_quota(&client, "", true);
        expect(&answer, -MOK_EACCESS, "user nobody is no administrator");
        client_close(&client);
        assert_int_equal(daemon_stop(&daemon), 0);
    }
}

/* ------------------------------------------------------------------ devices of one group alone */

static const char two_of_theirs[] = "[limits]\nexclusive = yes\n[device host0]\n[device host1]\n";

static void a_group_that_may_has_its_devices_alone_until_it_leaves(void **state)
{
    struct daemon daemon;
    struct client clients[2], other;

    (void)state;
    daemon_start(&daemon, two_of_theirs, 0);
    for (int i = 0; i < 2; i++)
        client_open(&clients[i], &daemon);
    client_open(&other, &daemon);
    client_queue(&clients[0], 0); /* one's own queue is nobody else's */
    send_join(&clients[0], "alone", 2, 0, true);
    client_bytes_used(&clients[0]); /* the join has been taken */
    expect_queue(&other, 0, -MOK_EEXCLUSIVE, "group alone of user");
    send_join(&clients[1], "alone", 2, 1, true);
    uint32_t group = expect_joined(&clients[0], 0, "");
    expect_joined(&clients[1], 0, "");
    expect_queue(&other, 1, -MOK_EEXCLUSIVE, "has host1 alone");
    join(&other, "late", false, -MOK_EEXCLUSIVE, "group alone of user");
    client_queue(&clients[1], 1);

    _cleanup_answer_ struct answer status = client_status(&other);
    assert_int_equal(status.reply->status->device[0]->exclusive_group, group);
    leave(&clients[0], group);
    _cleanup_answer_ struct answer after = client_status(&other);
    assert_int_equal(after.reply->status->device[0]->exclusive_group, 0);
    assert_int_equal(after.reply->status->device[1]->exclusive_group, group); /* until this rank has left, too */
    expect_queue(&other, 0, 0, "");
    client_close(&clients[1]);
    for (int waited = 0; waited < 1000; waited++) {
        _cleanup_answer_ struct answer look = client_status(&other);
        if (look.reply->status->device[1]->exclusive_group == 0)
            break;
        sleep_ms(5);
    }
    expect_queue(&other, 1, 0, "");
    client_close(&clients[0]);
    client_close(&other);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void devices_that_others_use_cannot_be_had_alone(void **state)
{
    struct daemon daemon;
    struct client client, other;

    (void)state;
    daemon_start(&daemon, two_of_theirs, 0);
    client_open(&client, &daemon);
    client_open(&other, &daemon);
    uint32_t group = join(&other, "there", false, 0, "");
    join(&client, "alone", true, -MOK_EEXCLUSIVE, "rank 0 of group there");
    leave(&other, group);
    client_queue(&other, 0);
    join(&client, "alone", true, -MOK_EEXCLUSIVE, "has a queue on host0");
    client_close(&other);
    for (int waited = 0; waited < 1000; waited++) {
        _cleanup_answer_ struct answer look = client_status(&client);
        if (look.reply->status->device[0]->sessions == 0)
            break;
        sleep_ms(5);
    }
    join(&client, "alone", true, 0, "");
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void who_may_not_ask_for_devices_of_his_own_is_told_so(void **state)
{
    struct client client;

    client_open(&client, *state);
    join(&client, "alone", true, -MOK_EACCESS, "may not ask for devices of his own");
    join(&client, "alone", false, 0, "");
    client_close(&client);
}

static void ranks_that_differ_on_it_all_learn_that(void **state)
{
    struct daemon daemon;
    struct client clients[2];

    (void)state;
    daemon_start(&daemon, two_of_theirs, 0);
    for (int i = 0; i < 2; i++)
        client_open(&clients[i], &daemon);
    send_join(&clients[0], "half", 2, 0, true);
    client_bytes_used(&clients[0]);
    send_join(&clients[1], "half", 2, 1, false);
    for (int i = 0; i < 2; i++) {
        expect_joined(&clients[i], -MOK_EMISMATCH, "rank 1 asks for devices that others may use too");
        client_close(&clients[i]);
    }
    assert_int_equal(daemon_stop(&daemon), 0);
}

/* ------------------------------------------------------------------ draining */

static struct answer ask_drain(struct client *client, uint32_t device, bool node, bool undo)
{
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Drain drain = MOK__DRAIN__INIT;

    drain.device = device;
    drain.node = node;
    drain.undo = undo;
    request.body_case = MOK__REQUEST__BODY_DRAIN;
    request.drain = &drain;
    return client_ask(client, &request);
}

static void a_device_that_drains_finishes_what_runs_and_takes_nothing_new(void **state)
{
    struct client clients[2], other, admin;

    client_observe(&admin, *state);
    client_open(&other, *state);
    for (int i = 0; i < 2; i++)
        client_open(&clients[i], *state);
    uint32_t group = client_join(clients, 2, "running");
    send_join(&other, "forming", 2, 0, false);
    client_bytes_used(&other);

    _cleanup_answer_ struct answer drained = ask_drain(&admin, 0, false, false);
    assert_int_equal(drained.reply->body_case, MOK__REPLY__BODY_DEVICE_LIST);
    assert_true(drained.reply->device_list->device[0]->draining);
    assert_false(drained.reply->device_list->device[1]->draining);
    expect_joined(&other, -MOK_EDRAIN, "host0 is being drained"); /* it waited for ranks, so it is new */
    join(&other, "new", false, -MOK_EDRAIN, "device = 0");
    expect_queue(&other, 0, -MOK_EDRAIN, "takes no new group or queue");
    expect_queue(&other, 1, 0, "");
    client_queue(&clients[0], 0); /* what runs may have what it needs */
    client_buffer(&clients[0], 0, 4096);

    leave(&clients[0], group);
    client_close(&clients[0]);
    for (int waited = 0; waited < 1000; waited++) {
        _cleanup_answer_ struct answer look = client_status(&admin);
        const Mok__DeviceInfo *device = look.reply->status->device[0];
        if (device->draining && device->groups == 0 && device->sessions == 0)
            break;
        sleep_ms(5);
        assert_true(waited < 999);
    }
    join(&other, "new", false, -MOK_EDRAIN, "has 0 ranks and 0 queues to finish");
    _cleanup_answer_ struct answer open = ask_drain(&admin, 0, false, true);
    assert_false(open.reply->device_list->device[0]->draining);
    join(&other, "new", false, 0, "");
    client_close(&clients[1]);
    client_close(&other);
    client_close(&admin);
}

static void a_whole_node_drains_and_opens_again(void **state)
{
    struct client client, admin;

    client_observe(&admin, *state);
    client_open(&client, *state);
    _cleanup_answer_ struct answer none = ask_drain(&admin, 2, false, false);
    expect(&none, -MOK_ENODEV, "device = 2: this node has 2 devices");
    _cleanup_answer_ struct answer all = ask_drain(&admin, 0, true, false);
    assert_true(all.reply->device_list->device[0]->draining && all.reply->device_list->device[1]->draining);
    expect_queue(&client, 1, -MOK_EDRAIN, "device = 1");
    _cleanup_answer_ struct answer open = ask_drain(&admin, 0, true, true);
    assert_false(open.reply->device_list->device[0]->draining || open.reply->device_list->device[1]->draining);
    expect_queue(&client, 1, 0, "");
    client_close(&client);
    client_close(&admin);
}

/* Where the service manager keeps mokd's state: the usual reason to drain a node is to upgrade it. */
static void a_drain_outlives_a_restart(void **state)
{
    struct daemon daemon;
    struct client client, admin;

    (void)state;
    daemon_start_kept(&daemon, "[device host0]\n[device host1]\n", 64);
    client_observe(&admin, &daemon);
    _cleanup_answer_ struct answer drained = ask_drain(&admin, 1, false, false);
    assert_int_equal(drained.reply->code, 0);
    client_close(&admin);
    daemon_end(&daemon, SIGTERM);
    daemon_begin(&daemon);
    client_open(&client, &daemon);
    expect_queue(&client, 1, -MOK_EDRAIN, "host1 is being drained");
    expect_queue(&client, 0, 0, "");
    client_close(&client);
    assert_int_equal(daemon_stop(&daemon), 0);
}

static void only_an_administrator_drains(void **state)
{
    struct daemon daemon;
    struct client client, member;

    (void)state;
    if (getuid() != 0)
        skip();
    /* [daemon] is open where the fixture's text ends */
    daemon_start(&daemon, "admin_group = " NOGROUP "\n[device host0]\n", 0);
    open_as(&client, &daemon, STRANGER);
    _cleanup_answer_ struct answer refused = ask_drain(&client, 0, false, false);
    expect(&refused, -MOK_EACCESS, "user 4242 is no administrator");
    open_as(&member, &daemon, NOBODY);
    for (int waited = 0; waited < 1000; waited++) { /* his groups are looked up beside */
        _cleanup_answer_ struct answer answer = ask_drain(&member, 0, false, false);
        if (answer.reply->code == 0)
            break;
        assert_true(waited < 999);
        sleep_ms(5);
    }
    client_close(&client);
    client_close(&member);
    assert_int_equal(daemon_stop(&daemon), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_members_of_a_unix_group_share_what_it_may_have),
        cmocka_unit_test(a_user_uses_the_devices_that_he_may_use),
        cmocka_unit_test(each_limit_is_named_with_its_value_and_bound),
        cmocka_unit_test(a_hangup_brings_new_limits_and_takes_nothing_away),
        cmocka_unit_test(a_hangup_while_the_file_is_being_read_is_not_lost),
        cmocka_unit_test(a_user_sees_his_own_quota_and_an_administrator_everybodys),
        cmocka_unit_test(a_user_is_called_by_his_name_from_the_first_request_on),
        cmocka_unit_test(a_group_that_may_has_its_devices_alone_until_it_leaves),
        cmocka_unit_test(devices_that_others_use_cannot_be_had_alone),
        cmocka_unit_test(who_may_not_ask_for_devices_of_his_own_is_told_so),
        cmocka_unit_test(ranks_that_differ_on_it_all_learn_that),
        cmocka_unit_test(a_device_that_drains_finishes_what_runs_and_takes_nothing_new),
        cmocka_unit_test(a_whole_node_drains_and_opens_again),
        cmocka_unit_test(a_drain_outlives_a_restart),
        cmocka_unit_test(only_an_administrator_drains),
    };
    return cmocka_run_group_tests(tests, daemon_setup, daemon_teardown);
}
