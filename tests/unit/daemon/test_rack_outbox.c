/* SPDX-License-Identifier: Apache-2.0 */
/* Messages of groups to other nodes, over a mesh that the test plays: they wait in order, or the node is lost to both.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "fake_rack.h"
#include "rack_groups_internal.h"

#define FAR_TOO_MANY 4096

/* What the other node sees. */
static struct {
    uint64_t got, next, losses;
    bool out_of_order;
} other;
static struct {
    unsigned losses;
    char reason[RACK_MAX_TEXT];
} own;

static struct mokd_server server;
static struct mokd_rack_groups groups;
static struct fake_net *net;

static void own_state(void *cookie, uint32_t node, enum rack_state before, enum rack_state now, const char *reason)
{
    (void)cookie, (void)node, (void)before;
    own.losses += now == RACK_LOST;
    if (now == RACK_LOST)
        snprintf(own.reason, sizeof(own.reason), "%s", reason);
}

static void own_drained(void *cookie, uint32_t node)
{
    mokd_rack_outbox_flush(cookie, node);
}

static void other_message(void *cookie, uint32_t node, const Mok__RackFrame *frame)
{
    (void)cookie, (void)node;
    other.out_of_order |= frame->group->over->group != other.next++;
    other.got++;
}

static void other_state(void *cookie, uint32_t node, enum rack_state before, enum rack_state now, const char *reason)
{
    (void)cookie, (void)node, (void)before, (void)reason;
    other.losses += now == RACK_LOST;
}

static int set_up(void **state)
{
    static const struct rack_handlers ours = { .state = own_state, .drained = own_drained };
    static const struct rack_handlers theirs = { .state = other_state, .message = other_message };

    (void)state;
    memset(&other, 0, sizeof(other));
    memset(&own, 0, sizeof(own));
    memset(&groups, 0, sizeof(groups));
    net = fake_net_new(1);
    groups.server = &server;
    server.rack = fake_net_add(net, "n0", "", &ours, &groups);
    fake_net_add(net, "n1", "", &theirs, NULL);
    for (uint32_t node = 0; node < GROUP_MAX_NODES; node++)
        TAILQ_INIT(&groups.peer[node].backlog);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mokd_rack_outbox_clear(&groups, 1);
    fake_net_free(net);
    return 0;
}

static void say(uint32_t number, const char *text)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__GroupOver body = MOK__GROUP_OVER__INIT;

    body.group = number;
    body.text = (char *)text;
    message.body_case = MOK__GROUP_MESSAGE__BODY_OVER;
    message.over = &body;
    mokd_rack_send(&groups, 1, &message);
}

static void what_there_is_no_room_for_waits_and_arrives_in_order(void **state)
{
    (void)state;
    say(0, "");
    fake_net_choke(net, 0, 1, true);
    for (uint32_t i = 1; i < 100; i++)
        say(i, "");
    fake_net_choke(net, 0, 1, false);
    say(100, "");
    mokd_rack_outbox_close_gaps(&groups);
    fake_net_run(net, FAR_TOO_MANY);
    assert_int_equal(other.got, 101);
    assert_false(other.out_of_order);
    assert_int_equal(own.losses + other.losses, 0);
}

/* Else that node would wait for ever for what it is never told. */
static void a_node_that_takes_nothing_is_lost_to_both_and_gets_nothing_behind_the_gap(void **state)
{
    static char long_text[8192];

    (void)state;
    memset(long_text, 'x', sizeof(long_text) - 1);
    fake_net_choke(net, 0, 1, true);
    for (uint32_t i = 0; i < FAR_TOO_MANY; i++)
        say(i, long_text);
    fake_net_choke(net, 0, 1, false);
    say(FAR_TOO_MANY, "");
    fake_net_run(net, FAR_TOO_MANY);
    assert_int_equal(other.got, 0);
    assert_int_equal(own.losses, 0); /* not in the middle of what group_node does */
    mokd_rack_outbox_close_gaps(&groups);
    assert_int_equal(own.losses, 1);
    assert_int_equal(other.losses, 1);
    assert_string_equal(own.reason, "it does not take what waits for it");

    fake_net_heal(net, 0, 1);
    say(0, "");
    fake_net_run(net, FAR_TOO_MANY);
    assert_int_equal(other.got, 1); /* with nothing of what was before */
    mokd_rack_outbox_close_gaps(&groups);
    assert_int_equal(own.losses, 1);
}

static void a_message_that_can_never_be_sent_makes_its_node_lost(void **state)
{
    _cleanup_free_ char *huge = malloc(RACK_MAX_PAYLOAD + 1);

    (void)state;
    assert_non_null(huge);
    memset(huge, 'x', RACK_MAX_PAYLOAD);
    huge[RACK_MAX_PAYLOAD] = '\0';
    say(0, huge);
    mokd_rack_outbox_close_gaps(&groups);
    assert_int_equal(own.losses, 1);
    assert_int_equal(other.losses, 1);
}

static void a_node_that_is_down_is_no_reason_for_anything(void **state)
{
    (void)state;
    fake_net_cut(net, 0, 1);
    say(0, "");
    mokd_rack_outbox_close_gaps(&groups);
    assert_int_equal(own.losses, 1); /* the cut */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(what_there_is_no_room_for_waits_and_arrives_in_order, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_node_that_takes_nothing_is_lost_to_both_and_gets_nothing_behind_the_gap,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_message_that_can_never_be_sent_makes_its_node_lost, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_node_that_is_down_is_no_reason_for_anything, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
