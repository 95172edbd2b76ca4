/* SPDX-License-Identifier: Apache-2.0 */
/* Meshes of real sockets in one process: who finds whom, what arrives, what ends a link. */
#include <arpa/inet.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "rack/frame.h"
#include "rack_net.h"

/* Commands each way; `mok-bench mesh` does a million. */
#ifdef MOK_SANITIZED
#define SMALL 10000u
#else
#define SMALL 50000u
#endif

static struct rack_net net;

static int open_two(void **state)
{
    (void)state;
    rack_net_open(&net, 2);
    return 0;
}

static int open_three(void **state)
{
    (void)state;
    rack_net_open(&net, 3);
    return 0;
}

static int close_net(void **state)
{
    (void)state;
    rack_net_close(&net);
    return 0;
}

static void three_nodes_find_each_other(void **state)
{
    (void)state;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "three nodes do not find each other");
    struct rack_node_info info = rack_net_info(&net, 0, 1);
    assert_memory_equal(info.boot_id, net.node[1].boot_id, RACK_BOOT_BYTES);
    assert_string_equal(info.link_domain, "rack");
    assert_int_equal(info.protocol, RACK_PROTOCOL_MAX);
    assert_true(info.inventory_agrees);
    assert_true(rack_net_info(&net, 0, 0).self);
    rack_net_turn_for(&net, 300);
    info = rack_net_info(&net, 0, 1);
    assert_true(info.rtt_ns > 0);
    assert_in_range((uint64_t)(info.clock_offset_ns + 1000000000), 0, 2000000000);
}

/* ------------------------------------------------------------------ many small commands */

static uint64_t sent[2];

static bool push_both(struct rack_net *it)
{
    for (uint32_t from = 0; from < 2; from++)
        while (sent[from] < SMALL && rack_net_ping(it, from, 1 - from, sent[from] + 1, 16, 0) == 0)
            sent[from]++;
    return it->node[0].messages == SMALL && it->node[1].messages == SMALL;
}

static void report_30_many_small_commands_arrive_both_ways_in_order(void **state)
{
    (void)state;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    sent[0] = sent[1] = 0;
    rack_net_until(&net, push_both, "the commands stall");
    for (uint32_t i = 0; i < 2; i++) {
        assert_false(net.node[i].out_of_order);
        assert_int_equal(net.node[i].losses, 0);
    }
}

static uint64_t pushed;

static bool all_pushed_arrived(struct rack_net *it)
{
    return it->node[0].drains > 0 && it->node[1].messages == pushed;
}

static void a_peer_that_does_not_read_is_refused_more_and_gets_all_later(void **state)
{
    int r = 0;

    (void)state;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    for (pushed = 0; r == 0 && pushed < 100000; pushed++) /* the loop does not turn, so nobody reads */
        r = rack_net_ping(&net, 0, 1, pushed + 1, 4096, 0);
    assert_int_equal(r, -MOK_EAGAIN);
    pushed--;
    rack_net_until(&net, all_pushed_arrived, "what waited does not arrive");
    assert_false(net.node[1].out_of_order);
    assert_int_equal(net.node[0].losses + net.node[1].losses, 0);
}

static bool first_has_four(struct rack_net *it)
{
    return it->node[1].messages >= 4;
}

static void the_largest_command_arrives_and_a_larger_one_is_refused(void **state)
{
    (void)state;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    for (uint64_t i = 1; i <= 4; i++)
        assert_int_equal(rack_net_ping(&net, 0, 1, i, RACK_MAX_PAYLOAD - 16, 0), 0);
    assert_int_equal(rack_net_ping(&net, 0, 1, 5, 65536, 0), -MOK_ESIZE);
    rack_net_until(&net, first_has_four, "large commands do not arrive");
    assert_int_equal(rack_net_info(&net, 0, 1).state, RACK_UP);
}

static bool both_rose_again(struct rack_net *it)
{
    return it->node[0].ups >= 2 && it->node[1].ups >= 2 && rack_net_all_up(it);
}

static bool second_hears_again(struct rack_net *it)
{
    if (it->node[1].messages == 0)
        rack_net_ping(it, 0, 1, 1, 16, 0);
    return it->node[1].messages > 0;
}

static void a_node_that_is_given_up_loses_this_one_too_and_both_begin_anew(void **state)
{
    uint32_t other = 0;

    (void)state;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    assert_int_equal(rack_find(net.node[0].rack, "n1", &other), 0);
    assert_int_equal(rack_net_ping(&net, 0, 1, 7, 16, 0), 0); /* under way: it may never arrive */
    rack_lose(net.node[0].rack, other, "no room for what it has to be told");
    assert_int_equal(rack_net_info(&net, 0, 1).state, RACK_LOST);
    assert_string_equal(net.node[0].reason, "no room for what it has to be told");
    rack_lose(net.node[0].rack, other, "lost once is enough");
    rack_lose(net.node[0].rack, rack_self(net.node[0].rack), "nobody loses himself");
    assert_int_equal(net.node[0].losses, 1);
    rack_net_until(&net, both_rose_again, "they do not find each other again");
    assert_true(net.node[1].losses > 0);
    net.node[1].messages = 0;
    rack_net_until(&net, second_hears_again, "nothing arrives any more");
}

static bool own_has_one(struct rack_net *it)
{
    return it->node[0].messages == 1;
}

static bool own_has_two(struct rack_net *it)
{
    return it->node[0].messages == 2;
}

static void a_node_can_send_to_itself(void **state)
{
    (void)state;
    rack_net_start(&net, 0);
    assert_int_equal(rack_net_ping(&net, 0, 0, 1, 3, 100), 0);
    assert_int_equal(rack_net_ping(&net, 0, 0, 2, 3, 100), 0);
    assert_int_equal(net.node[0].messages, 0); /* never before the loop has turned */
    rack_net_until(&net, own_has_two, "nothing comes back");
    assert_false(net.node[0].out_of_order);
}

static void sending_to_who_is_not_up_is_refused(void **state)
{
    (void)state;
    rack_net_start(&net, 0);
    assert_int_equal(rack_net_ping(&net, 0, 1, 1, 3, 0), -MOK_EPEER);
}

/* ------------------------------------------------------------------ restarts, reloads */

static bool zero_has_lost_one(struct rack_net *it)
{
    return it->node[0].losses > 0;
}

static bool zero_has_risen_twice(struct rack_net *it)
{
    return it->node[0].ups == 2 && rack_net_all_up(it);
}

static void a_restarted_peer_is_lost_first_and_has_a_new_boot_id(void **state)
{
    (void)state;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    uint64_t epoch = rack_net_info(&net, 0, 1).epoch;
    rack_net_stop(&net, 1);
    rack_net_start(&net, 1);
    rack_net_until(&net, zero_has_risen_twice, "the restarted node does not come back");
    assert_int_equal(net.node[0].losses, 1);
    assert_non_null(strstr(net.node[0].reason, "new boot id"));
    assert_memory_equal(rack_net_info(&net, 0, 1).boot_id, net.node[1].boot_id, RACK_BOOT_BYTES);
    assert_true(rack_net_info(&net, 0, 1).epoch > epoch);
}

/* Connections are made anew all the time meanwhile, from both sides. */
static void a_peer_that_comes_and_goes_stalls_nobody(void **state)
{
    (void)state;
    net.timeout_ms = 5000;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    for (unsigned i = 0; i < 30; i++) {
        rack_net_stop(&net, 1);
        rack_net_start(&net, 1);
        if (i % 3 == 0)
            rack_net_until(&net, rack_net_all_up, "the node that comes and goes does not come back");
    }
    rack_net_until(&net, rack_net_all_up, "the node that comes and goes does not come back");
    assert_int_equal(rack_net_info(&net, 0, 2).epoch, 1);
    assert_int_equal(rack_net_info(&net, 2, 0).epoch, 1);
}

static void a_silent_peer_is_suspected_then_lost(void **state)
{
    (void)state;
    net.timeout_ms = 500;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    rack_net_stop(&net, 1);
    rack_net_until(&net, zero_has_lost_one, "a silent node is not noticed");
    assert_true(net.node[0].suspicions > 0);
    assert_non_null(strstr(net.node[0].reason, "not heard for"));
    assert_int_equal(rack_net_ping(&net, 0, 1, 1, 3, 0), -MOK_EPEER);
}

/* The second node's loop, which the test can leave standing while its sockets live. */
static uv_loop_t second_loop;

static bool both_are_up_by_two_loops(struct rack_net *it)
{
    uv_run(&second_loop, UV_RUN_NOWAIT);
    return rack_net_all_up(it);
}

static void close_second_loop(void)
{
    rack_net_stop(&net, 1);
    uv_run(&second_loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&second_loop), 0);
}

static void a_node_whose_loop_hangs_is_lost_and_comes_back(void **state)
{
    (void)state;
    uv_loop_init(&second_loop);
    net.node[1].loop = &second_loop;
    net.timeout_ms = 1000;
    rack_net_start_all(&net);
    rack_net_until(&net, both_are_up_by_two_loops, "not up");
    rack_net_until(&net, zero_has_lost_one, "a node whose loop hangs is not noticed");
    rack_net_until(&net, both_are_up_by_two_loops, "the node does not come back");
    assert_true(net.node[1].losses > 0); /* it learns that it was lost */
    close_second_loop();
}

static bool zero_and_one_are_up(struct rack_net *it)
{
    return rack_net_info(it, 0, 1).state == RACK_UP && rack_net_info(it, 1, 0).state == RACK_UP;
}

static bool zero_and_two_are_up(struct rack_net *it)
{
    return rack_net_info(it, 0, 2).state == RACK_UP && rack_net_info(it, 2, 0).state == RACK_UP;
}

static bool one_knows_it_is_removed(struct rack_net *it)
{
    return rack_net_info(it, 1, 0).state == RACK_LEFT;
}

static bool one_is_refused(struct rack_net *it)
{
    return strstr(rack_net_info(it, 1, 0).error, "refuses the key of this node") != NULL;
}

static void a_reload_adds_and_removes_nodes(void **state)
{
    char text[RACK_MAX_TEXT];

    (void)state;
    net.node[0].config.n_nodes = net.node[1].config.n_nodes = 2;
    rack_net_start_all(&net);
    rack_net_until(&net, zero_and_one_are_up, "not up");
    uint32_t index;
    assert_int_equal(rack_find(net.node[0].rack, "n2", &index), -MOK_ENOENT);
    assert_false(rack_net_info(&net, 2, 0).state == RACK_UP);

    net.node[0].config.n_nodes = 3;
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
    assert_int_equal(net.node[0].added, 1);
    rack_net_until(&net, zero_and_two_are_up, "the new node does not come up");
    assert_int_equal(rack_net_info(&net, 0, 1).state, RACK_UP);
    assert_false(rack_net_info(&net, 0, 1).inventory_agrees);

    net.node[0].inventory[1] = net.node[0].inventory[2]; /* n1 goes */
    net.node[0].config.n_nodes = 2;
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
    assert_int_equal(net.node[0].removed, 1);
    assert_int_equal(net.node[0].losses, 0);
    assert_int_equal(net.node[0].leaves, 1);
    assert_string_equal(net.node[0].reason, "node n1 was removed from the configuration of node n0");
    rack_net_until(&net, one_knows_it_is_removed, "who is removed hears no goodbye");
    assert_string_equal(net.node[1].reason, "node n1 was removed from the configuration of node n0");
    assert_int_equal(net.node[1].losses, 0);
    rack_net_until(&net, one_is_refused, "who is removed does not say that its key is refused");
    assert_int_equal(rack_net_info(&net, 0, 2).state, RACK_UP);
    assert_int_equal(rack_net_ping(&net, 0, 2, 1, 3, 0), 0);
}

static bool one_is_not_reached(struct rack_net *it)
{
    return strstr(rack_net_info(it, 0, 1).error, "no connection to tcp://127.0.0.1:9") != NULL;
}

/* It still calls, and knows the epoch that it was known by before. */
static void a_node_that_is_sought_at_a_wrong_address_is_not_up(void **state)
{
    char text[RACK_MAX_TEXT];

    (void)state;
    rack_net_start_all(&net);
    rack_net_until(&net, zero_and_one_are_up, "not up");
    snprintf(net.node[0].inventory[1].address, sizeof(net.node[0].inventory[1].address), "127.0.0.1:9");
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
    rack_net_until(&net, one_is_not_reached, "it is not said that there is no connection");
    rack_net_turn_for(&net, 5 * net.heartbeat_ms);
    assert_int_equal(rack_net_info(&net, 0, 1).state, RACK_UNKNOWN);
}

static void the_address_that_a_node_listens_at_is_not_changed_by_a_reload(void **state)
{
    char text[RACK_MAX_TEXT] = "";

    (void)state;
    rack_net_start_all(&net);
    snprintf(net.node[0].inventory[0].address, sizeof(net.node[0].inventory[0].address), "127.0.0.1:9");
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), -MOK_ESTATE);
    assert_non_null(strstr(text, "own address where there is no listen"));
}

/* The second node hears the goodbye and connects anew, before the first has gone on. */
static void let_the_second_call_again(void)
{
    for (unsigned i = 0; i < 400 && !one_is_refused(&net); i++) {
        uv_run(&second_loop, UV_RUN_NOWAIT);
        usleep(1000);
    }
}

static bool one_is_refused_by_two_loops(struct rack_net *it)
{
    uv_run(&second_loop, UV_RUN_NOWAIT);
    return one_is_refused(it);
}

static void a_removed_node_that_calls_again_at_once_is_refused(void **state)
{
    char text[RACK_MAX_TEXT];

    (void)state;
    uv_loop_init(&second_loop);
    net.node[1].loop = &second_loop;
    rack_net_start_all(&net);
    rack_net_until(&net, both_are_up_by_two_loops, "not up");
    net.node[0].has_said_goodbye = let_the_second_call_again;
    net.node[0].config.n_nodes = 1;
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
    rack_net_until_for(&net, one_is_refused_by_two_loops, 20, "who is removed gets in once more");
    struct rack_totals totals;
    rack_totals(net.node[0].rack, &totals);
    assert_true(totals.refused_lately > 0); /* though that was before the reload was over */
    close_second_loop();
}

/* Sockets whose connections fail are closed while libzmq has something to tell about them. */
static void a_dead_node_that_comes_and_goes_in_the_inventory_stalls_nobody(void **state)
{
    char text[RACK_MAX_TEXT];
    struct rack_node_config dead;

    (void)state;
    dead = net.node[0].inventory[1];
    net.node[0].inventory[1] = net.node[0].inventory[2];
    net.node[0].inventory[2] = dead;
    rack_net_start(&net, 0);
    rack_net_start(&net, 2);
    rack_net_until(&net, zero_and_two_are_up, "not up");
    for (unsigned i = 0; i < 400; i++) {
        net.node[0].config.n_nodes = 2 + i % 2;
        assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
        uv_run(&net.loop, UV_RUN_NOWAIT);
        usleep((unsigned)rand() % 1000);
    }
    rack_net_turn_for(&net, 300);
    assert_int_equal(rack_net_ping(&net, 2, 0, 1, 3, 0), 0);
    rack_net_until(&net, own_has_one, "the node is stalled");
    assert_int_equal(net.node[0].losses + net.node[2].losses, 0);
}

static void what_a_removed_node_sends_is_dropped_unread(void **state)
{
    char text[RACK_MAX_TEXT];
    struct rack_totals totals;

    (void)state;
    net.node[1].config.versions = (struct rack_versions){ 1, 1 }; /* hears no goodbye, and goes on */
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    net.node[0].config.n_nodes = 1;
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
    for (uint64_t i = 1; i <= 10; i++)
        rack_net_ping(&net, 1, 0, i, 3, 0);
    rack_net_turn_for(&net, 500);
    rack_totals(net.node[0].rack, &totals);
    assert_int_equal(net.node[0].messages, 0);
    assert_true(totals.unknown > 0);
}

/* ------------------------------------------------------------------ who gets in */

static bool zero_has_refused(struct rack_net *it)
{
    struct rack_totals totals;

    rack_totals(it->node[0].rack, &totals);
    return totals.refused > 0;
}

static bool one_says_so(struct rack_net *it)
{
    return strstr(rack_net_info(it, 1, 0).error, "refuses the key") != NULL;
}

static void a_key_that_is_not_in_the_inventory_is_refused_and_says_so(void **state)
{
    struct rack_totals totals;

    (void)state;
    net.node[0].config.n_nodes = 1;
    rack_net_start_all(&net);
    rack_net_until(&net, zero_has_refused, "a strange key is let in");
    rack_net_until(&net, one_says_so, "the stranger is not told");
    assert_int_equal(net.node[0].messages, 0);
    rack_totals(net.node[0].rack, &totals);
    assert_in_range(totals.refused_lately, 1, totals.refused);
    assert_memory_equal(totals.refused_from, "127.", 4);
}

static void a_refused_node_comes_in_once_it_is_in_the_inventory(void **state)
{
    char text[RACK_MAX_TEXT];
    struct rack_totals totals;

    (void)state;
    net.node[0].config.n_nodes = 1;
    rack_net_start_all(&net);
    rack_net_until(&net, zero_has_refused, "a strange key is let in");
    net.node[0].config.n_nodes = 2;
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
    rack_net_until(&net, rack_net_all_up, "the node does not come in");
    rack_totals(net.node[0].rack, &totals);
    assert_true(totals.refused > 0);
    assert_int_equal(totals.refused_lately, 0); /* that was of another inventory */
}

static bool zero_sees_the_lie(struct rack_net *it)
{
    return strstr(rack_net_info(it, 0, 1).error, "says it is node n2") != NULL;
}

static void a_node_that_claims_anothers_name_is_refused(void **state)
{
    (void)state;
    struct rack_net_node *liar = &net.node[1];
    struct rack_node_config swap = liar->inventory[1]; /* its own key and address, under the name n2 */
    liar->inventory[1] = liar->inventory[2];
    liar->inventory[2] = swap;
    strcpy(liar->inventory[1].name, "n1");
    strcpy(liar->inventory[2].name, "n2");
    strcpy(liar->config.node, "n2");
    rack_net_start(&net, 0);
    rack_net_start(&net, 1);
    rack_net_until(&net, zero_sees_the_lie, "the lie is not noticed");
    rack_net_turn_for(&net, 200);
    assert_int_equal(rack_net_info(&net, 0, 1).state, RACK_UNKNOWN);
    assert_int_equal(rack_net_info(&net, 0, 2).state, RACK_UNKNOWN);
}

/* ------------------------------------------------------------------ descriptors */

/* Connects again and again from another process, which has its own limit. */
static pid_t start_knocking(const char *address)
{
    struct sockaddr_in server = { .sin_family = AF_INET, .sin_port = htons(7117) };
    char host[RACK_MAX_ADDRESS + 1];

    snprintf(host, sizeof(host), "%.*s", (int)strcspn(address, ":"), address);
    inet_pton(AF_INET, host, &server.sin_addr);
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    struct rlimit limit;
    getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    for (int i = 0; i < 100; i++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        connect(fd, (struct sockaddr *)&server, sizeof(server));
        usleep(2000);
    }
    pause();
    _exit(0);
}

static void report_31_no_descriptor_left_ends_no_connection_and_not_the_process(void **state)
{
    struct rlimit limit, low;

    (void)state;
    net.node[0].config.n_nodes = net.node[1].config.n_nodes = 2;
    rack_net_start(&net, 0);
    rack_net_start(&net, 1);
    rack_net_until(&net, zero_and_one_are_up, "not up");
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    int next = dup(0); /* the lowest that is free */
    close(next);
    low = limit;
    low.rlim_cur = (rlim_t)next + 4;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    pid_t pid = start_knocking(net.node[0].inventory[0].address);
    rack_net_turn_for(&net, 1000);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_int_equal(net.node[0].losses, 0);
    assert_int_equal(net.node[1].losses, 0);

    net.node[0].config.n_nodes = net.node[1].config.n_nodes = 3; /* and others come in again */
    char text[RACK_MAX_TEXT];
    assert_int_equal(rack_reload(net.node[0].rack, &net.node[0].config, text), 0);
    assert_int_equal(rack_reload(net.node[1].rack, &net.node[1].config, text), 0);
    rack_net_start(&net, 2);
    rack_net_until(&net, rack_net_all_up, "nobody comes in any more");
}

static void a_mesh_without_descriptors_is_refused_with_their_number(void **state)
{
    struct rlimit limit, low;
    char text[RACK_MAX_TEXT];
    struct rack *rack;
    const struct rack_handlers none = { 0 };

    (void)state;
    net.node[0].config.heartbeat_ms = 50;
    net.node[0].config.timeout_ms = 500;
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &limit), 0);
    low = limit;
    low.rlim_cur = 16;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
    int r = rack_start(&net.loop, &net.node[0].config, net.node[0].boot_id, &none, NULL, &rack, text);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &limit), 0);
    assert_int_equal(r, -MOK_EFDS);
    assert_non_null(strstr(text, "raise LimitNOFILE"));
}

/* ------------------------------------------------------------------ versions */

static bool both_have_four(struct rack_net *it)
{
    return it->node[0].messages == 4 && it->node[1].messages == 4;
}

static bool zero_has_lost(struct rack_net *it)
{
    return it->node[0].losses == 1;
}

static bool two_has_left(struct rack_net *it)
{
    return it->node[0].leaves == 1 && it->node[1].leaves == 1;
}

static void neighbouring_versions_speak_the_newest_that_both_know(void **state)
{
    (void)state;
    net.node[0].config.versions = (struct rack_versions){ 1, 2 };
    net.node[1].config.versions = (struct rack_versions){ 2, 3 };
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "neighbours do not speak");
    assert_int_equal(rack_net_info(&net, 0, 1).protocol, 2);
    assert_int_equal(rack_net_info(&net, 1, 0).protocol, 2);
}

static bool both_say_versions(struct rack_net *it)
{
    return strstr(rack_net_info(it, 0, 1).error, "speaks protocol 3..4, this mokd 1..2") &&
           strstr(rack_net_info(it, 1, 0).error, "speaks protocol 1..2, this mokd 3..4");
}

static void versions_that_do_not_fit_are_named(void **state)
{
    (void)state;
    net.node[0].config.versions = (struct rack_versions){ 1, 2 };
    net.node[1].config.versions = (struct rack_versions){ 3, 4 };
    rack_net_start_all(&net);
    rack_net_until(&net, both_say_versions, "the versions are not named");
    assert_int_equal(rack_net_info(&net, 0, 1).state, RACK_UNKNOWN);
}

/* The older one is what a release before this one speaks. */
static void an_older_version_and_this_one_exchange_commands_and_the_older_hears_no_goodbye(void **state)
{
    (void)state;
    net.node[0].config.versions = (struct rack_versions){ 1, 1 };
    net.timeout_ms = 5000;
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "an older version is not spoken with");
    assert_int_equal(rack_net_info(&net, 0, 1).protocol, 1);
    assert_int_equal(rack_net_info(&net, 1, 0).protocol, 1);
    for (uint64_t number = 1; number <= 4; number++) {
        assert_int_equal(rack_net_ping(&net, 0, 1, number, 8, 0), 0);
        assert_int_equal(rack_net_ping(&net, 1, 0, number, 8, 0), 0);
    }
    rack_net_until(&net, both_have_four, "commands between versions do not arrive");
    rack_net_leave(&net, 1);
    rack_net_until(&net, zero_has_lost, "the silence is not noticed");
    assert_int_equal(net.node[0].leaves, 0);
}

/* ------------------------------------------------------------------ leaving */

static void who_leaves_is_known_to_have_left_before_any_time_out(void **state)
{
    (void)state;
    net.timeout_ms = 60000; /* nobody is lost by silence in this test */
    rack_net_start_all(&net);
    rack_net_until(&net, rack_net_all_up, "not up");
    for (uint64_t number = 1; number <= 100; number++)
        assert_int_equal(rack_net_ping(&net, 2, 0, number, 1024, 0), 0);
    rack_net_leave(&net, 2);
    rack_net_until(&net, two_has_left, "the goodbye does not arrive");
    assert_int_equal(net.node[0].messages, 100); /* it was the last word */
    assert_int_equal(net.node[0].losses + net.node[1].losses, 0);
    assert_string_equal(net.node[0].reason, "it was stopped in order");
    assert_int_equal(rack_net_info(&net, 0, 1).state, RACK_UP);
    rack_net_start(&net, 2);
    rack_net_until(&net, rack_net_all_up, "who has left does not come back");
    assert_string_equal(rack_net_info(&net, 0, 2).error, "");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(three_nodes_find_each_other, open_three, close_net),
        cmocka_unit_test_setup_teardown(report_30_many_small_commands_arrive_both_ways_in_order, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_peer_that_does_not_read_is_refused_more_and_gets_all_later, open_two,
                                        close_net),
        cmocka_unit_test_setup_teardown(the_largest_command_arrives_and_a_larger_one_is_refused, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_node_that_is_given_up_loses_this_one_too_and_both_begin_anew, open_two,
                                        close_net),
        cmocka_unit_test_setup_teardown(a_node_can_send_to_itself, open_two, close_net),
        cmocka_unit_test_setup_teardown(sending_to_who_is_not_up_is_refused, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_restarted_peer_is_lost_first_and_has_a_new_boot_id, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_peer_that_comes_and_goes_stalls_nobody, open_three, close_net),
        cmocka_unit_test_setup_teardown(a_silent_peer_is_suspected_then_lost, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_node_whose_loop_hangs_is_lost_and_comes_back, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_reload_adds_and_removes_nodes, open_three, close_net),
        cmocka_unit_test_setup_teardown(a_node_that_is_sought_at_a_wrong_address_is_not_up, open_two, close_net),
        cmocka_unit_test_setup_teardown(the_address_that_a_node_listens_at_is_not_changed_by_a_reload, open_two,
                                        close_net),
        cmocka_unit_test_setup_teardown(a_removed_node_that_calls_again_at_once_is_refused, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_dead_node_that_comes_and_goes_in_the_inventory_stalls_nobody, open_three,
                                        close_net),
        cmocka_unit_test_setup_teardown(what_a_removed_node_sends_is_dropped_unread, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_key_that_is_not_in_the_inventory_is_refused_and_says_so, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_refused_node_comes_in_once_it_is_in_the_inventory, open_two, close_net),
        cmocka_unit_test_setup_teardown(a_node_that_claims_anothers_name_is_refused, open_three, close_net),
        cmocka_unit_test_setup_teardown(report_31_no_descriptor_left_ends_no_connection_and_not_the_process, open_three,
                                        close_net),
        cmocka_unit_test_setup_teardown(a_mesh_without_descriptors_is_refused_with_their_number, open_two, close_net),
        cmocka_unit_test_setup_teardown(neighbouring_versions_speak_the_newest_that_both_know, open_two, close_net),
        cmocka_unit_test_setup_teardown(versions_that_do_not_fit_are_named, open_two, close_net),
        cmocka_unit_test_setup_teardown(an_older_version_and_this_one_exchange_commands_and_the_older_hears_no_goodbye,
                                        open_two, close_net),
        cmocka_unit_test_setup_teardown(who_leaves_is_known_to_have_left_before_any_time_out, open_three, close_net),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
