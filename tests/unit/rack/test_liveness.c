/* SPDX-License-Identifier: Apache-2.0 */
/* What a peer is, from what is heard of it and when: two nodes in a time of the test's making, without sockets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "rack/liveness.h"
#include "wire.h"

#define MS UINT64_C(1000000)
#define HEARTBEAT_MS 100u
#define TIMEOUT_MS 1000u

/* One node, its clocks, and the peer that it sees. */
struct node {
    struct rack_self self;
    struct rack_peer peer;
    uint64_t clock_ns;    /* its monotonic clock is ahead of the test's time by so much */
    uint64_t realtime_ns; /* its wall clock likewise */
};

static struct node a, b;
static uint64_t now_ns;

static struct rack_moment at(const struct node *node)
{
    return (struct rack_moment){ .now_ns = now_ns + node->clock_ns, .realtime_ns = now_ns + node->realtime_ns };
}

static void boot(struct node *node, const char *name, const char *peer, uint8_t boot_id)
{
    memset(&node->self, 0, sizeof(node->self));
    snprintf(node->self.name, sizeof(node->self.name), "%s", name);
    snprintf(node->self.link_domain, sizeof(node->self.link_domain), "rack");
    memset(node->self.boot_id, boot_id, RACK_BOOT_BYTES);
    node->self.versions = (struct rack_versions){ 1, 1 };
    node->self.heartbeat_ns = HEARTBEAT_MS * MS;
    node->self.timeout_ns = TIMEOUT_MS * MS;
    rack_peer_init(&node->peer, peer, "rack", at(node).now_ns);
}

static int setup(void **state)
{
    (void)state;
    now_ns = 1000 * MS;
    a.clock_ns = 0;
    b.clock_ns = UINT64_MAX - 500 * MS; /* clocks of hosts have nothing in common, and may wrap */
    a.realtime_ns = b.realtime_ns = 1700000000000 * MS;
    boot(&a, "a", "b", 1);
    boot(&b, "b", "a", 2);
    return 0;
}

/* A frame as it is on the wire, and on its way. */
struct packet {
    uint8_t *bytes;
    size_t size;
};

static struct packet pack(const struct node *from, const Mok__RackFrame *frame)
{
    struct packet packet;
    struct rack_head head = rack_peer_head(&from->self, &from->peer);

    assert_int_equal(rack_frame_pack(&head, frame, &packet.bytes, &packet.size), 0);
    return packet;
}

static struct packet beat_of(struct node *from)
{
    struct rack_beat_frame beat;

    rack_peer_beat(&from->self, &from->peer, at(from), &beat);
    return pack(from, &beat.frame);
}

static struct packet command_of(struct node *from, uint32_t ttl_ms)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackPing ping = MOK__RACK_PING__INIT;

    frame.body_case = MOK__RACK_FRAME__BODY_PING;
    frame.ping = &ping;
    rack_peer_stamp(&from->self, &from->peer, &frame, ttl_ms, at(from).now_ns);
    rack_peer_sent(&from->peer);
    return pack(from, &frame);
}

static enum rack_verdict hear(struct node *to, struct packet packet)
{
    struct rack_head head;
    Mok__RackFrame *frame;

    assert_int_equal(rack_frame_unpack(to->self.versions, packet.bytes, packet.size, &head, &frame), 0);
    enum rack_verdict verdict = rack_peer_hear(&to->self, &to->peer, &head, frame, at(to).now_ns, at(to));
    mok_wire_free(&frame->base);
    free(packet.bytes);
    return verdict;
}

static void drop(struct packet packet)
{
    free(packet.bytes);
}

static void exchange(unsigned times)
{
    for (unsigned i = 0; i < times; i++) {
        hear(&b, beat_of(&a));
        hear(&a, beat_of(&b));
    }
}

static void rise(void)
{
    exchange(3);
    assert_int_equal(a.peer.state, RACK_UP);
    assert_int_equal(b.peer.state, RACK_UP);
}

/* ------------------------------------------------------------------ up */

static void a_link_is_up_once_both_know_that_the_other_knows(void **state)
{
    (void)state;
    hear(&b, beat_of(&a));
    assert_int_equal(b.peer.state, RACK_UNKNOWN); /* a does not know b yet */
    hear(&a, beat_of(&b));
    assert_int_equal(a.peer.state, RACK_UP);
    assert_int_equal(b.peer.state, RACK_UNKNOWN);
    hear(&b, beat_of(&a));
    assert_int_equal(b.peer.state, RACK_UP);
}

static void hearing_without_being_heard_is_no_link(void **state)
{
    (void)state;
    for (int i = 0; i < 20; i++)
        hear(&b, beat_of(&a)); /* nothing the other way */
    assert_int_equal(b.peer.state, RACK_UNKNOWN);
}

static void a_hello_with_another_name_than_the_keys_is_no_link(void **state)
{
    (void)state;
    strcpy(b.self.name, "c");
    exchange(4);
    assert_int_equal(a.peer.state, RACK_UNKNOWN);
    assert_non_null(strstr(a.peer.error, "says it is node c, but has the key of node b"));
}

static void link_domains_that_differ_are_noted(void **state)
{
    (void)state;
    strcpy(b.self.link_domain, "elsewhere");
    rise();
    assert_false(a.peer.link_domain_agrees);
    assert_non_null(strstr(a.peer.error, "elsewhere"));
    assert_true(b.peer.link_domain_agrees);
}

/* ------------------------------------------------------------------ silence */

static void silence_makes_suspect_then_lost(void **state)
{
    (void)state;
    rise();
    now_ns += 2 * HEARTBEAT_MS * MS;
    rack_peer_check(&a.self, &a.peer, at(&a).now_ns);
    assert_int_equal(a.peer.state, RACK_UP);
    now_ns += HEARTBEAT_MS * MS;
    rack_peer_check(&a.self, &a.peer, at(&a).now_ns);
    assert_int_equal(a.peer.state, RACK_SUSPECT);
    assert_int_equal(a.peer.epoch, 1);
    now_ns += TIMEOUT_MS * MS;
    rack_peer_check(&a.self, &a.peer, at(&a).now_ns);
    assert_int_equal(a.peer.state, RACK_LOST);
    assert_int_equal(a.peer.epoch, 2);
    assert_non_null(strstr(a.peer.error, "not heard for 1300 ms"));
}

static void a_suspect_that_is_heard_is_up_and_nothing_is_void(void **state)
{
    (void)state;
    rise();
    now_ns += 4 * HEARTBEAT_MS * MS;
    rack_peer_check(&a.self, &a.peer, at(&a).now_ns);
    assert_int_equal(a.peer.state, RACK_SUSPECT);
    struct packet command = command_of(&b, 0);
    hear(&a, beat_of(&b));
    assert_int_equal(a.peer.state, RACK_UP);
    assert_int_equal(hear(&a, command), RACK_VERDICT_DELIVER);
}

static void who_loses_a_peer_is_lost_by_it_and_both_find_each_other_again(void **state)
{
    (void)state;
    rise();
    now_ns += 2 * TIMEOUT_MS * MS;
    a.peer.heard_ns = at(&a).now_ns; /* a heard b all the time, b did not hear a */
    rack_peer_check(&b.self, &b.peer, at(&b).now_ns);
    assert_int_equal(b.peer.state, RACK_LOST);
    assert_int_equal(hear(&a, beat_of(&b)), RACK_VERDICT_ANSWER);
    assert_int_equal(a.peer.state, RACK_LOST);
    assert_string_equal(a.peer.error, "it has lost this node");
    rise();
    assert_int_equal(a.peer.epoch, 2);
    assert_int_equal(b.peer.epoch, 2);
}

static void a_node_that_stood_still_does_not_blame_the_others(void **state)
{
    (void)state;
    rise();
    now_ns += 5 * TIMEOUT_MS * MS;
    rack_peer_excuse(&a.peer, 5 * TIMEOUT_MS * MS, at(&a).now_ns);
    rack_peer_check(&a.self, &a.peer, at(&a).now_ns);
    assert_int_equal(a.peer.state, RACK_UP);
    now_ns += 2 * TIMEOUT_MS * MS;
    rack_peer_check(&a.self, &a.peer, at(&a).now_ns);
    assert_int_equal(a.peer.state, RACK_LOST);
}

/* ------------------------------------------------------------------ boots */

static void a_new_boot_id_is_a_loss_and_the_old_one_never_comes_back(void **state)
{
    (void)state;
    rise();
    struct packet late_command = command_of(&b, 0), late_beat = beat_of(&b);
    boot(&b, "b", "a", 3);
    assert_int_equal(hear(&a, beat_of(&b)), RACK_VERDICT_ANSWER);
    assert_int_equal(a.peer.state, RACK_LOST);
    assert_string_equal(a.peer.error, "restarted: it has a new boot id");
    assert_int_equal(hear(&a, late_command), RACK_VERDICT_DROP);
    assert_int_equal(hear(&a, late_beat), RACK_VERDICT_DROP);
    assert_int_equal(a.peer.state, RACK_LOST);
    assert_int_equal(a.peer.counters.stale, 2);
    rise();
    assert_memory_equal(a.peer.boot_id, b.self.boot_id, RACK_BOOT_BYTES);
}

static void a_new_boot_id_that_claims_to_know_the_next_epoch_is_a_loss_all_the_same(void **state)
{
    (void)state;
    rise();
    boot(&b, "b", "a", 3);
    b.peer = (struct rack_peer){ .heard = true, .epoch = 7, .seen_epoch = 2 };
    memcpy(b.peer.boot_id, a.self.boot_id, RACK_BOOT_BYTES);
    hear(&a, beat_of(&b));
    assert_int_equal(a.peer.state, RACK_LOST);
}

static void two_daemons_with_one_key_are_noticed(void **state)
{
    (void)state;
    struct node twin = b;

    memset(twin.self.boot_id, 9, RACK_BOOT_BYTES);
    rise();
    hear(&a, beat_of(&twin)); /* the second one replaces the first */
    hear(&a, beat_of(&b));
    assert_non_null(strstr(a.peer.error, "do two daemons use its key?"));
}

/* ------------------------------------------------------------------ commands */

static void commands_are_delivered_in_order_and_once(void **state)
{
    (void)state;
    rise();
    struct packet first = command_of(&a, 0), again = { malloc(first.size), first.size };
    memcpy(again.bytes, first.bytes, first.size);
    assert_int_equal(hear(&b, first), RACK_VERDICT_DELIVER);
    assert_int_equal(hear(&b, again), RACK_VERDICT_DROP);
    assert_int_equal(hear(&b, command_of(&a, 0)), RACK_VERDICT_DELIVER);
    assert_int_equal(b.peer.counters.received, 2);
    assert_int_equal(b.peer.counters.stale, 1);
}

static void a_gap_ends_the_link(void **state)
{
    (void)state;
    rise();
    drop(command_of(&a, 0));
    drop(command_of(&a, 0));
    assert_int_equal(hear(&b, command_of(&a, 0)), RACK_VERDICT_ANSWER);
    assert_int_equal(b.peer.state, RACK_LOST);
    assert_string_equal(b.peer.error, "messages 1..2 were lost on the way");
    hear(&a, beat_of(&b));
    assert_int_equal(a.peer.state, RACK_LOST);
    rise();
    assert_int_equal(hear(&b, command_of(&a, 0)), RACK_VERDICT_DELIVER);
}

static void a_command_of_an_earlier_epoch_is_dropped(void **state)
{
    (void)state;
    rise();
    struct packet old = command_of(&a, 0);
    rack_peer_lose(&b.peer, "a test");
    hear(&a, beat_of(&b));
    rise();
    assert_int_equal(hear(&b, old), RACK_VERDICT_DROP);
    assert_int_equal(b.peer.counters.stale, 1);
    assert_int_equal(b.peer.state, RACK_UP);
}

static void a_command_for_another_boot_of_ours_is_dropped(void **state)
{
    (void)state;
    rise();
    struct packet old = command_of(&a, 0);
    boot(&b, "b", "a", 3);
    assert_int_equal(hear(&b, old), RACK_VERDICT_DROP);
    assert_int_equal(b.peer.counters.stale, 1);
}

static void a_command_that_overtakes_the_last_beat_raises_the_link(void **state)
{
    (void)state;
    hear(&b, beat_of(&a));
    hear(&a, beat_of(&b));
    assert_int_equal(a.peer.state, RACK_UP);
    assert_int_equal(hear(&b, command_of(&a, 0)), RACK_VERDICT_DELIVER);
    assert_int_equal(b.peer.state, RACK_UP);
}

static void a_deadline_counts_the_time_on_the_way_whatever_the_clocks_say(void **state)
{
    (void)state;
    rise();
    a.realtime_ns += 3600000 * MS; /* steps of wall clocks are nothing */
    struct packet in_time = command_of(&a, 50), late = command_of(&a, 50), without = command_of(&a, 0);
    now_ns += 40 * MS;
    assert_int_equal(hear(&b, in_time), RACK_VERDICT_DELIVER);
    now_ns += 20 * MS;
    assert_int_equal(hear(&b, late), RACK_VERDICT_DROP);
    assert_int_equal(hear(&b, without), RACK_VERDICT_DELIVER);
    assert_int_equal(b.peer.counters.expired, 1);
    assert_int_equal(b.peer.state, RACK_UP); /* too late is no loss */
}

/* ------------------------------------------------------------------ clocks and versions */

/* Beats both ways that take `ms` each. */
static void beats_take(uint64_t ms)
{
    for (int i = 0; i < RACK_WINDOW + 1; i++) {
        struct packet there = beat_of(&a), back;
        now_ns += ms * MS;
        hear(&b, there);
        back = beat_of(&b);
        now_ns += ms * MS;
        hear(&a, back);
    }
}

static void round_trip_and_wall_clock_are_measured(void **state)
{
    (void)state;
    b.realtime_ns = a.realtime_ns + 5000 * MS;
    assert_int_equal(rack_peer_rtt(&a.peer), -1);
    beats_take(7);
    assert_int_equal(rack_peer_rtt(&a.peer), 14 * MS);
    assert_int_equal(a.peer.clock_offset_ns, 5000 * MS);
    b.realtime_ns = a.realtime_ns - 9000 * MS; /* a step */
    beats_take(3);
    assert_int_equal(rack_peer_rtt(&a.peer), 6 * MS);
    assert_int_equal(a.peer.clock_offset_ns, -9000 * (int64_t)MS);
    assert_int_equal(a.peer.state, RACK_UP);
}

static void versions_without_a_common_one_are_no_link(void **state)
{
    (void)state;
    struct rack_head head = { .version = 4, .speaks = { 3, 4 } };

    a.self.versions = (struct rack_versions){ 1, 2 };
    assert_false(rack_peer_versions_fit(&a.self, &a.peer, &head));
    assert_string_equal(a.peer.error, "speaks protocol 3..4, this mokd 1..2");
    head.speaks.min = 2;
    assert_true(rack_peer_versions_fit(&a.self, &a.peer, &head));
    assert_int_equal(rack_peer_head(&a.self, &a.peer).version, 2);
}

static void a_peer_that_steps_down_to_a_version_we_do_not_speak_is_lost(void **state)
{
    (void)state;
    struct rack_head head = { .version = 4, .speaks = { 4, 4 } };

    rise();
    assert_false(rack_peer_versions_fit(&a.self, &a.peer, &head));
    assert_int_equal(a.peer.state, RACK_LOST);
}

static void what_an_earlier_life_spoke_does_not_change_what_is_spoken_now(void **state)
{
    (void)state;
    a.self.versions = (struct rack_versions){ 1, 2 };
    rise();
    assert_int_equal(a.peer.version, 1);
    struct packet late = beat_of(&b);
    boot(&b, "b", "a", 3);
    b.self.versions = (struct rack_versions){ 1, 2 };
    rise();
    assert_int_equal(a.peer.version, 2);
    assert_int_equal(hear(&a, late), RACK_VERDICT_DROP);
    assert_int_equal(a.peer.version, 2);
}

static void a_beat_under_a_boot_id_that_said_no_hello_does_not_change_what_is_spoken(void **state)
{
    (void)state;
    a.self.versions = b.self.versions = (struct rack_versions){ 1, 2 };
    rise();
    struct node strange = b;
    memset(strange.self.boot_id, 9, RACK_BOOT_BYTES);
    strange.self.versions = (struct rack_versions){ 1, 1 };
    strange.peer.version = 1;
    assert_int_equal(hear(&a, beat_of(&strange)), RACK_VERDICT_DROP);
    assert_int_equal(a.peer.version, 2);
    assert_int_equal(a.peer.state, RACK_UP);
}

/* ------------------------------------------------------------------ leaving */

static struct packet goodbye_of(struct node *from)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackGoodbye body = MOK__RACK_GOODBYE__INIT;

    frame.body_case = MOK__RACK_FRAME__BODY_GOODBYE;
    frame.goodbye = &body;
    rack_peer_stamp(&from->self, &from->peer, &frame, 0, at(from).now_ns);
    rack_peer_sent(&from->peer);
    return pack(from, &frame);
}

static void who_says_goodbye_has_left_at_once_and_all_it_had_is_void(void **state)
{
    (void)state;
    rise();
    uint64_t epoch = b.peer.epoch;
    struct packet late_beat = beat_of(&a), late_command = command_of(&a, 0), goodbye = goodbye_of(&a);

    assert_int_equal(hear(&b, late_command), RACK_VERDICT_DELIVER);
    hear(&b, goodbye);
    assert_int_equal(b.peer.state, RACK_LEFT);
    assert_int_equal(b.peer.epoch, epoch + 1);
    assert_string_equal(b.peer.error, "it was stopped in order");
    hear(&b, late_beat);
    assert_int_equal(b.peer.state, RACK_LEFT); /* a beat that was overtaken brings nobody back */
    now_ns += 10 * TIMEOUT_MS * MS;
    rack_peer_check(&b.self, &b.peer, at(&b).now_ns);
    assert_int_equal(b.peer.state, RACK_LEFT);
    boot(&a, "a", "b", 3);
    exchange(3);
    assert_int_equal(b.peer.state, RACK_UP);
    assert_string_equal(b.peer.error, ""); /* nothing was wrong */
}

static void a_goodbye_of_an_earlier_epoch_is_dropped(void **state)
{
    (void)state;
    rise();
    struct packet goodbye = goodbye_of(&a);
    rack_peer_lose(&b.peer, "test");
    exchange(3);
    hear(&b, goodbye);
    assert_int_equal(b.peer.state, RACK_UP);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup(name, setup)
    const struct CMUnitTest tests[] = {
        TEST(a_link_is_up_once_both_know_that_the_other_knows),
        TEST(hearing_without_being_heard_is_no_link),
        TEST(a_hello_with_another_name_than_the_keys_is_no_link),
        TEST(link_domains_that_differ_are_noted),
        TEST(silence_makes_suspect_then_lost),
        TEST(a_suspect_that_is_heard_is_up_and_nothing_is_void),
        TEST(who_loses_a_peer_is_lost_by_it_and_both_find_each_other_again),
        TEST(a_node_that_stood_still_does_not_blame_the_others),
        TEST(a_new_boot_id_is_a_loss_and_the_old_one_never_comes_back),
        TEST(a_new_boot_id_that_claims_to_know_the_next_epoch_is_a_loss_all_the_same),
        TEST(two_daemons_with_one_key_are_noticed),
        TEST(commands_are_delivered_in_order_and_once),
        TEST(a_gap_ends_the_link),
        TEST(a_command_of_an_earlier_epoch_is_dropped),
        TEST(a_command_for_another_boot_of_ours_is_dropped),
        TEST(a_command_that_overtakes_the_last_beat_raises_the_link),
        TEST(a_deadline_counts_the_time_on_the_way_whatever_the_clocks_say),
        TEST(round_trip_and_wall_clock_are_measured),
        TEST(versions_without_a_common_one_are_no_link),
        TEST(a_peer_that_steps_down_to_a_version_we_do_not_speak_is_lost),
        TEST(what_an_earlier_life_spoke_does_not_change_what_is_spoken_now),
        TEST(a_beat_under_a_boot_id_that_said_no_hello_does_not_change_what_is_spoken),
        TEST(who_says_goodbye_has_left_at_once_and_all_it_had_is_void),
        TEST(a_goodbye_of_an_earlier_epoch_is_dropped),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
