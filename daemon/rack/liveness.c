/* SPDX-License-Identifier: Apache-2.0 */
#include "liveness.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "util.h"

#define NS_PER_MS 1000000u
/* A round trip beyond this is a lie or a machine that was stopped, and no measurement. */
#define MAX_RTT_NS (60 * INT64_C(1000000000))

static _printf_(2, 3) void note(struct rack_peer *peer, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(peer->error, sizeof(peer->error), format, arguments);
    va_end(arguments);
}

/* ------------------------------------------------------------------ the smallest of a few */

static void window_add(struct rack_window *window, int64_t sample)
{
    window->sample[window->count++ % RACK_WINDOW] = sample;
}

static int64_t window_min(const struct rack_window *window)
{
    uint32_t count = window->count < RACK_WINDOW ? window->count : RACK_WINDOW;
    int64_t smallest = INT64_MAX;

    for (uint32_t i = 0; i < count; i++)
        if (window->sample[i] < smallest)
            smallest = window->sample[i];
    return smallest;
}

/* ------------------------------------------------------------------ states */

void rack_peer_init(struct rack_peer *peer, const char *name, const char *link_domain, uint64_t now_ns)
{
    *peer = (struct rack_peer){ .state = RACK_UNKNOWN, .epoch = 1, .heard_ns = now_ns };
    snprintf(peer->name, sizeof(peer->name), "%s", name);
    snprintf(peer->link_domain, sizeof(peer->link_domain), "%s", link_domain);
}

bool rack_peer_is_up(const struct rack_peer *peer)
{
    return peer->state == RACK_UP || peer->state == RACK_SUSPECT;
}

static void go_down(struct rack_peer *peer, enum rack_state state)
{
    peer->state = state;
    peer->draining = false;
    peer->epoch++;
    peer->sent_sequence = peer->received_sequence = 0;
}

void rack_peer_lose(struct rack_peer *peer, const char *reason)
{
    if (reason != peer->error)
        note(peer, "%s", reason);
    if (!rack_peer_is_up(peer))
        return;
    memcpy(peer->loss, peer->error, sizeof(peer->loss));
    go_down(peer, RACK_LOST);
}

/* Nothing is wrong with it: once it is back, nothing is left to say about this. */
static void take_leave(const struct rack_self *self, struct rack_peer *peer, const Mok__RackGoodbye *goodbye)
{
    rack_goodbye_text((Mok__GoodbyeReason)goodbye->reason, peer->name, self->name, peer->error);
    peer->loss[0] = '\0';
    go_down(peer, RACK_LEFT);
}

void rack_peer_excuse(struct rack_peer *peer, uint64_t ns, uint64_t now_ns)
{
    peer->heard_ns = now_ns - peer->heard_ns > ns ? peer->heard_ns + ns : now_ns;
}

void rack_peer_check(const struct rack_self *self, struct rack_peer *peer, uint64_t now_ns)
{
    if (!rack_peer_is_up(peer) || now_ns <= peer->heard_ns)
        return;
    uint64_t silence = now_ns - peer->heard_ns;
    if (silence > self->timeout_ns) {
        note(peer, "not heard for %" PRIu64 " ms", silence / NS_PER_MS);
        rack_peer_lose(peer, peer->error);
    } else if (peer->state == RACK_UP && silence > 2 * self->heartbeat_ns + self->heartbeat_ns / 2) {
        note(peer, "missed two heartbeats: not heard for %" PRIu64 " ms", silence / NS_PER_MS);
        peer->state = RACK_SUSPECT;
    }
}

/* ------------------------------------------------------------------ hearing */

static bool same_boot(ProtobufCBinaryData bytes, const uint8_t *boot_id)
{
    return bytes.len == RACK_BOOT_BYTES && memcmp(bytes.data, boot_id, RACK_BOOT_BYTES) == 0;
}

static bool is_retired(const struct rack_peer *peer, ProtobufCBinaryData boot)
{
    uint32_t count = peer->n_retired < RACK_RETIRED ? peer->n_retired : RACK_RETIRED;

    for (uint32_t i = 0; i < count; i++)
        if (same_boot(boot, peer->retired[i]))
            return true;
    return false;
}

/* Everything that was known of the peer's life before is void. */
static void begin_boot(struct rack_peer *peer, ProtobufCBinaryData boot)
{
    if (peer->heard) {
        memcpy(peer->retired[peer->n_retired++ % RACK_RETIRED], peer->boot_id, RACK_BOOT_BYTES);
        rack_peer_lose(peer, "restarted: it has a new boot id");
    }
    memcpy(peer->boot_id, boot.data, RACK_BOOT_BYTES);
    peer->heard = true;
    peer->named = false;
    peer->seen_epoch = 0;
    peer->echo_ns = 0;
    peer->rtt.count = peer->transit.count = 0;
}

/* False: the frame is of a life that is over. */
static bool take_boot(struct rack_peer *peer, const Mok__RackFrame *frame)
{
    if (peer->heard && same_boot(frame->sender_boot, peer->boot_id))
        return true;
    if (is_retired(peer, frame->sender_boot)) {
        note(peer, "still heard under an earlier boot id: do two daemons use its key?");
        return false;
    }
    if (frame->body_case != MOK__RACK_FRAME__BODY_HELLO)
        return false; /* its hello comes first */
    begin_boot(peer, frame->sender_boot);
    return true;
}

static void take_name(const struct rack_self *self, struct rack_peer *peer, const Mok__RackHello *hello)
{
    if (strcmp(hello->node, peer->name) != 0) {
        note(peer, "says it is node %s, but has the key of node %s", hello->node, peer->name);
        rack_peer_lose(peer, peer->error);
        peer->named = false;
        return;
    }
    peer->named = true;
    peer->link_domain_agrees = strcmp(hello->link_domain, peer->link_domain) == 0;
    if (!peer->link_domain_agrees)
        note(peer, "says its link domain is \"%s\", the inventory of %s says \"%s\"", hello->link_domain, self->name,
             peer->link_domain);
}

static void take_clocks(const struct rack_self *self, struct rack_peer *peer, const Mok__RackFrame *frame,
                        const Mok__RackBeat *beat, uint64_t arrived_ns, struct rack_moment when)
{
    peer->echo_ns = frame->sent_ns;
    peer->echo_at_ns = arrived_ns;
    window_add(&peer->transit, (int64_t)(arrived_ns - frame->sent_ns));
    if (beat->echo_ns == 0 || !same_boot(frame->target_boot, self->boot_id))
        return;
    int64_t rtt = (int64_t)(arrived_ns - beat->echo_ns - beat->echo_age_ns);
    if (rtt < 0 || rtt > MAX_RTT_NS)
        return;
    window_add(&peer->rtt, rtt);
    /* Of all samples the one with the shortest round trip is the best. */
    if (rtt <= window_min(&peer->rtt)) {
        uint64_t ours = when.realtime_ns - (when.now_ns - arrived_ns);
        peer->clock_offset_ns = (int64_t)(beat->realtime_ns + (uint64_t)rtt / 2 - ours);
    }
}

bool rack_peer_versions_fit(const struct rack_self *self, struct rack_peer *peer, const struct rack_head *head)
{
    peer->versions = head->speaks;
    peer->version = rack_version_common(self->versions, head->speaks);
    if (peer->version != 0)
        return true;
    note(peer, "speaks protocol %u..%u, this mokd %u..%u", head->speaks.min, head->speaks.max, self->versions.min,
         self->versions.max);
    rack_peer_lose(peer, peer->error);
    return false;
}

/* The peer has our boot id and our epoch for it: with ours of it, that is a link. */
static void rise(struct rack_peer *peer)
{
    peer->sent_sequence = peer->received_sequence = 0;
    peer->state = RACK_UP;
    if (peer->link_domain_agrees)
        memcpy(peer->error, peer->loss, sizeof(peer->error));
}

static enum rack_verdict hear_beat(const struct rack_self *self, struct rack_peer *peer, const Mok__RackFrame *frame,
                                   const Mok__RackBeat *beat, uint64_t arrived_ns, struct rack_moment when)
{
    enum rack_state before = peer->state;
    bool is_hello = frame->body_case == MOK__RACK_FRAME__BODY_HELLO;

    take_clocks(self, peer, frame, beat, arrived_ns, when);
    peer->inventory = beat->inventory;
    peer->draining = beat->draining;
    peer->tenants = beat->tenants;
    bool knows_us = same_boot(frame->target_boot, self->boot_id) && beat->seen_epoch == peer->epoch;
    bool news = beat->epoch != peer->seen_epoch;
    peer->seen_epoch = beat->epoch;
    if (rack_peer_is_up(peer) && news) {
        rack_goodbye_text(MOK__GOODBYE_REASON__GOODBYE_LOST, peer->name, self->name, peer->error);
        rack_peer_lose(peer, peer->error);
        return RACK_VERDICT_ANSWER;
    }
    if (peer->state == RACK_SUSPECT)
        peer->state = RACK_UP;
    else if (!rack_peer_is_up(peer) && knows_us && peer->named)
        rise(peer);
    /* Who says hello waits for our side of the handshake, unless he has all of it. */
    bool waits = is_hello && (news || before != peer->state);
    return waits ? RACK_VERDICT_ANSWER : RACK_VERDICT_DROP;
}

static bool is_expired(const struct rack_peer *peer, const Mok__RackFrame *frame, uint64_t arrived_ns, uint64_t now_ns)
{
    if (frame->ttl_ms == 0)
        return false;
    uint64_t late = now_ns > arrived_ns ? now_ns - arrived_ns : 0;
    if (peer->transit.count > 0) {
        int64_t excess = (int64_t)(arrived_ns - frame->sent_ns - (uint64_t)window_min(&peer->transit));
        late += excess > 0 ? (uint64_t)excess : 0;
    }
    return late > (uint64_t)frame->ttl_ms * NS_PER_MS;
}

static enum rack_verdict hear_command(const struct rack_self *self, struct rack_peer *peer, const Mok__RackFrame *frame,
                                      uint64_t arrived_ns, uint64_t now_ns)
{
    bool current = same_boot(frame->target_boot, self->boot_id) && frame->epoch == peer->epoch && peer->named;
    bool in_order = rack_peer_is_up(peer) ? frame->sequence > peer->received_sequence : frame->sequence == 1;

    if (!current || !in_order) {
        peer->counters.stale++;
        return RACK_VERDICT_DROP;
    }
    if (!rack_peer_is_up(peer))
        rise(peer); /* a command for this epoch says that the sender knows all there is to know */
    if (frame->sequence != peer->received_sequence + 1) {
        note(peer, "messages %" PRIu64 "..%" PRIu64 " were lost on the way", peer->received_sequence + 1,
             frame->sequence - 1);
        rack_peer_lose(peer, peer->error);
        return RACK_VERDICT_ANSWER;
    }
    peer->received_sequence++;
    if (is_expired(peer, frame, arrived_ns, now_ns)) {
        peer->counters.expired++;
        return RACK_VERDICT_DROP;
    }
    peer->counters.received++;
    if (frame->body_case == MOK__RACK_FRAME__BODY_GOODBYE) {
        take_leave(self, peer, frame->goodbye);
        return RACK_VERDICT_DROP;
    }
    return RACK_VERDICT_DELIVER;
}

enum rack_verdict rack_peer_hear(const struct rack_self *self, struct rack_peer *peer, const struct rack_head *head,
                                 const Mok__RackFrame *frame, uint64_t arrived_ns, struct rack_moment when)
{
    enum rack_state before = peer->state;

    /* The boot first: what a life that is over, or a stranger's frame, speaks says nothing of the present one. */
    if (!take_boot(peer, frame) || !rack_peer_versions_fit(self, peer, head)) {
        peer->counters.stale++;
        return RACK_VERDICT_DROP;
    }
    if (arrived_ns > peer->heard_ns)
        peer->heard_ns = arrived_ns;
    if (frame->body_case == MOK__RACK_FRAME__BODY_HELLO)
        take_name(self, peer, frame->hello);
    if (peer->state != before)
        return RACK_VERDICT_ANSWER; /* lost; whatever comes next is of the next epoch */
    switch (frame->body_case) {
    case MOK__RACK_FRAME__BODY_HELLO:
        return hear_beat(self, peer, frame, frame->hello->beat, arrived_ns, when);
    case MOK__RACK_FRAME__BODY_BEAT:
        return hear_beat(self, peer, frame, frame->beat, arrived_ns, when);
    default:
        return hear_command(self, peer, frame, arrived_ns, when.now_ns);
    }
}

int64_t rack_peer_rtt(const struct rack_peer *peer)
{
    return peer->rtt.count > 0 ? window_min(&peer->rtt) : -1;
}

/* ------------------------------------------------------------------ sending */

struct rack_head rack_peer_head(const struct rack_self *self, const struct rack_peer *peer)
{
    uint8_t version = peer->version != 0 ? (uint8_t)peer->version : self->versions.min;

    return (struct rack_head){ .version = version, .speaks = self->versions };
}

static void address_frame(const struct rack_self *self, struct rack_peer *peer, Mok__RackFrame *frame, uint64_t now_ns)
{
    frame->sender_boot = (ProtobufCBinaryData){ .len = RACK_BOOT_BYTES, .data = (uint8_t *)self->boot_id };
    frame->target_boot = (ProtobufCBinaryData){ .len = peer->heard ? RACK_BOOT_BYTES : 0, .data = peer->boot_id };
    frame->sent_ns = now_ns;
}

void rack_peer_stamp(const struct rack_self *self, struct rack_peer *peer, Mok__RackFrame *frame, uint32_t ttl_ms,
                     uint64_t now_ns)
{
    address_frame(self, peer, frame, now_ns);
    frame->epoch = peer->seen_epoch;
    frame->sequence = peer->sent_sequence + 1;
    frame->ttl_ms = ttl_ms;
}

void rack_peer_sent(struct rack_peer *peer)
{
    peer->sent_sequence++;
    peer->counters.sent++;
}

void rack_peer_beat(const struct rack_self *self, struct rack_peer *peer, struct rack_moment when,
                    struct rack_beat_frame *ret)
{
    ret->frame = (Mok__RackFrame)MOK__RACK_FRAME__INIT;
    ret->hello = (Mok__RackHello)MOK__RACK_HELLO__INIT;
    ret->beat = (Mok__RackBeat)MOK__RACK_BEAT__INIT;
    address_frame(self, peer, &ret->frame, when.now_ns);
    ret->beat.epoch = peer->epoch;
    ret->beat.seen_epoch = peer->seen_epoch;
    ret->beat.number = ++peer->beat_number;
    ret->beat.realtime_ns = when.realtime_ns;
    ret->beat.echo_ns = peer->echo_ns;
    ret->beat.echo_age_ns = peer->echo_ns ? when.now_ns - peer->echo_at_ns : 0;
    ret->beat.inventory = self->inventory;
    ret->beat.state = peer->state;
    ret->beat.draining = self->draining;
    ret->beat.tenants = self->tenants;
    if (rack_peer_is_up(peer)) {
        ret->frame.body_case = MOK__RACK_FRAME__BODY_BEAT;
        ret->frame.beat = &ret->beat;
        return;
    }
    ret->hello.node = (char *)self->name;
    ret->hello.link_domain = (char *)self->link_domain;
    ret->hello.daemon_version = (char *)MOK_BUILD_VERSION;
    ret->hello.beat = &ret->beat;
    ret->frame.body_case = MOK__RACK_FRAME__BODY_HELLO;
    ret->frame.hello = &ret->hello;
}
