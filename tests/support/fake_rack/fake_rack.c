/* SPDX-License-Identifier: Apache-2.0 */
#include "fake_rack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rack/frame.h"
#include "util.h"
#include "wire.h"

struct view { /* what a node is to another */
    enum rack_state state;
    uint64_t epoch;
    uint64_t sent, received;
    bool choked;
};

struct rack {
    struct fake_net *net;
    uint32_t index;
    char name[MOK_MAX_NAME + 1], link_domain[MOK_MAX_NAME + 1];
    uint8_t boot_id[RACK_BOOT_BYTES];
    struct rack_handlers handlers;
    void *cookie;
    struct view view[RACK_MAX_NODES];
};

struct packet {
    uint32_t from, to;
    size_t size;
    uint8_t *bytes;
};

struct fake_net {
    uint64_t inventory_hash;
    uint32_t boots;
    struct rack *racks[RACK_MAX_NODES];
    uint32_t n_racks;
    struct packet *packets;
    size_t n_packets, capacity;
};

static void must(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "fake rack: %s\n", what);
    abort();
}

/* ------------------------------------------------------------------ the net */

struct fake_net *fake_net_new(uint64_t inventory_hash)
{
    struct fake_net *net = calloc(1, sizeof(*net));
    must(net != NULL, "no memory");
    net->inventory_hash = inventory_hash;
    return net;
}

void fake_net_free(struct fake_net *net)
{
    for (size_t i = 0; i < net->n_packets; i++)
        free(net->packets[i].bytes);
    free(net->packets);
    for (uint32_t i = 0; i < net->n_racks; i++)
        free(net->racks[i]);
    free(net);
}

static void new_boot(struct rack *rack)
{
    uint32_t number = ++rack->net->boots;

    memset(rack->boot_id, 0, sizeof(rack->boot_id));
    memcpy(rack->boot_id, &number, sizeof(number));
}

struct rack *fake_net_add(struct fake_net *net, const char *name, const char *link_domain,
                          const struct rack_handlers *handlers, void *cookie)
{
    struct rack *rack = calloc(1, sizeof(*rack));

    must(rack != NULL, "no memory");
    must(net->n_racks < RACK_MAX_NODES, "too many nodes");
    rack->net = net;
    rack->index = net->n_racks;
    snprintf(rack->name, sizeof(rack->name), "%s", name);
    snprintf(rack->link_domain, sizeof(rack->link_domain), "%s", link_domain);
    rack->handlers = *handlers;
    rack->cookie = cookie;
    new_boot(rack);
    net->racks[net->n_racks++] = rack;
    for (uint32_t i = 0; i < net->n_racks; i++) {
        rack->view[i] = (struct view){ .state = RACK_UP, .epoch = 1 };
        net->racks[i]->view[rack->index] = (struct view){ .state = RACK_UP, .epoch = 1 };
    }
    return rack;
}

size_t fake_net_pending(const struct fake_net *net)
{
    return net->n_packets;
}

uint32_t fake_net_from(const struct fake_net *net, size_t i)
{
    return net->packets[i].from;
}

uint32_t fake_net_to(const struct fake_net *net, size_t i)
{
    return net->packets[i].to;
}

static struct packet take_packet(struct fake_net *net, size_t i)
{
    struct packet packet = net->packets[i];

    net->n_packets--;
    memmove(net->packets + i, net->packets + i + 1, (net->n_packets - i) * sizeof(packet));
    return packet;
}

void fake_net_deliver(struct fake_net *net, size_t i)
{
    ProtobufCMessage *message = NULL;

    must(i < net->n_packets, "no such message under way");
    size_t first = 0;
    while (net->packets[first].from != net->packets[i].from || net->packets[first].to != net->packets[i].to)
        first++;
    struct packet packet = take_packet(net, first);
    struct rack *rack = net->racks[packet.to];
    must(mok_wire_unpack(&mok__rack_frame__descriptor, packet.bytes, packet.size, &message) == 0, "does not unpack");
    free(packet.bytes);
    rack->view[packet.from].received++;
    if (rack->handlers.message)
        rack->handlers.message(rack->cookie, packet.from, (const Mok__RackFrame *)(const void *)message);
    mok_wire_free(message);
}

size_t fake_net_run(struct fake_net *net, size_t limit)
{
    size_t count = 0;

    for (; net->n_packets > 0; count++) {
        must(count < limit, "messages without end");
        fake_net_deliver(net, 0);
    }
    return count;
}

/* ------------------------------------------------------------------ what happens to nodes */

static void drop_between(struct fake_net *net, uint32_t from, uint32_t to)
{
    for (size_t i = 0; i < net->n_packets;) {
        if (net->packets[i].from == from && net->packets[i].to == to)
            free(take_packet(net, i).bytes);
        else
            i++;
    }
}

static void set_state(struct fake_net *net, uint32_t of, uint32_t node, enum rack_state now, const char *reason)
{
    struct rack *rack = net->racks[of];
    enum rack_state before = rack->view[node].state;

    if (before == now)
        return;
    rack->view[node].state = now;
    if (now == RACK_LOST)
        rack->view[node].epoch++;
    if (rack->handlers.state)
        rack->handlers.state(rack->cookie, node, before, now, reason);
}

void fake_net_cut(struct fake_net *net, uint32_t a, uint32_t b)
{
    drop_between(net, a, b);
    drop_between(net, b, a);
    set_state(net, a, b, RACK_LOST, "the fake link is cut");
    set_state(net, b, a, RACK_LOST, "the fake link is cut");
}

void fake_net_heal(struct fake_net *net, uint32_t a, uint32_t b)
{
    drop_between(net, a, b);
    drop_between(net, b, a);
    set_state(net, a, b, RACK_UP, "");
    set_state(net, b, a, RACK_UP, "");
}

void fake_net_kill(struct fake_net *net, uint32_t node)
{
    memset(&net->racks[node]->handlers, 0, sizeof(net->racks[node]->handlers));
    for (uint32_t i = 0; i < net->n_racks; i++)
        if (i != node)
            fake_net_cut(net, i, node);
}

void fake_net_restart(struct fake_net *net, uint32_t node, const struct rack_handlers *handlers, void *cookie)
{
    struct rack *rack = net->racks[node];

    fake_net_kill(net, node);
    new_boot(rack);
    for (uint32_t i = 0; i < net->n_racks; i++)
        rack->view[i] = (struct view){ .state = RACK_UP, .epoch = 1 };
    rack->handlers = *handlers;
    rack->cookie = cookie;
    for (uint32_t i = 0; i < net->n_racks; i++)
        if (i != node)
            set_state(net, i, node, RACK_UP, "");
}

void fake_net_suspect(struct fake_net *net, uint32_t in_the_eyes_of, uint32_t node, bool suspect)
{
    set_state(net, in_the_eyes_of, node, suspect ? RACK_SUSPECT : RACK_UP, suspect ? "fake silence" : "");
}

void fake_net_choke(struct fake_net *net, uint32_t a, uint32_t b, bool choke)
{
    struct rack *rack = net->racks[a];
    bool lifted = rack->view[b].choked && !choke;

    rack->view[b].choked = choke;
    if (lifted && rack->handlers.drained)
        rack->handlers.drained(rack->cookie, b);
}

/* ------------------------------------------------------------------ rack.h */

int rack_start(uv_loop_t *loop, const struct rack_config *config, const uint8_t boot_id[static RACK_BOOT_BYTES],
               const struct rack_handlers *handlers, void *cookie, struct rack **ret, char *text)
{
    (void)loop, (void)config, (void)boot_id, (void)handlers, (void)cookie, (void)ret;
    snprintf(text, RACK_MAX_TEXT, "the fake rack is made by fake_net_add");
    return -MOK_ENOTSUP;
}

void rack_leave(struct rack *rack)
{
    (void)rack;
}

void rack_stop(struct rack *rack)
{
    (void)rack;
}

void rack_set_tenants(struct rack *rack, uint64_t hash)
{
    (void)rack, (void)hash;
}

void rack_set_draining(struct rack *rack, bool draining)
{
    (void)rack, (void)draining;
}

int rack_reload(struct rack *rack, const struct rack_config *config, char *text)
{
    (void)rack, (void)config;
    snprintf(text, RACK_MAX_TEXT, "the fake rack has no configuration");
    return -MOK_ENOTSUP;
}

static void stamp(const struct rack *rack, uint32_t node, Mok__RackFrame *frame, uint32_t ttl_ms)
{
    struct rack *target = rack->net->racks[node];

    frame->sender_boot = (ProtobufCBinaryData){ .len = RACK_BOOT_BYTES, .data = (uint8_t *)rack->boot_id };
    frame->target_boot = (ProtobufCBinaryData){ .len = RACK_BOOT_BYTES, .data = target->boot_id };
    frame->epoch = target->view[rack->index].epoch;
    frame->sequence = rack->view[node].sent;
    frame->ttl_ms = ttl_ms;
}

int rack_send(struct rack *rack, uint32_t node, Mok__RackFrame *frame, uint32_t ttl_ms)
{
    struct fake_net *net = rack->net;

    if (node >= net->n_racks)
        return -MOK_ENOENT;
    if (rack->view[node].state != RACK_UP && rack->view[node].state != RACK_SUSPECT)
        return -MOK_EPEER;
    if (rack->view[node].choked)
        return -MOK_EAGAIN;
    stamp(rack, node, frame, ttl_ms);
    size_t size = protobuf_c_message_get_packed_size(&frame->base);
    if (size > RACK_MAX_PAYLOAD)
        return -MOK_ESIZE;
    if (net->n_packets == net->capacity) {
        net->capacity = net->capacity ? 2 * net->capacity : 64;
        net->packets = realloc(net->packets, net->capacity * sizeof(*net->packets));
        must(net->packets != NULL, "no memory");
    }
    struct packet *packet = &net->packets[net->n_packets++];
    *packet = (struct packet){ .from = rack->index, .to = node, .size = size, .bytes = malloc(size + 1) };
    must(packet->bytes != NULL, "no memory");
    protobuf_c_message_pack(&frame->base, packet->bytes);
    rack->view[node].sent++;
    return 0;
}

void rack_lose(struct rack *rack, uint32_t node, const char *reason)
{
    struct fake_net *net = rack->net;
    enum rack_state state = node < net->n_racks ? rack->view[node].state : RACK_LOST;

    if (state != RACK_UP && state != RACK_SUSPECT)
        return;
    drop_between(net, rack->index, node);
    drop_between(net, node, rack->index);
    set_state(net, rack->index, node, RACK_LOST, reason);
    set_state(net, node, rack->index, RACK_LOST, "the other side has lost this one");
}

uint32_t rack_self(const struct rack *rack)
{
    return rack->index;
}

int rack_info(const struct rack *rack, uint32_t node, struct rack_node_info *ret)
{
    if (node >= rack->net->n_racks)
        return -MOK_ENOENT;
    const struct rack *peer = rack->net->racks[node];
    *ret = (struct rack_node_info){
        .index = node,
        .self = node == rack->index,
        .state = rack->view[node].state,
        .name = peer->name,
        .address = "",
        .link_domain = peer->link_domain,
        .error = "",
        .epoch = rack->view[node].epoch,
        .rtt_ns = -1,
        .protocol = RACK_PROTOCOL_SHARED,
        .inventory_agrees = rack->view[node].state == RACK_UP,
        .counters = { .sent = rack->view[node].sent, .received = rack->view[node].received },
    };
    memcpy(ret->boot_id, peer->boot_id, sizeof(ret->boot_id));
    return 0;
}

int rack_find(const struct rack *rack, const char *name, uint32_t *ret_node)
{
    for (uint32_t i = 0; i < rack->net->n_racks; i++) {
        if (strcmp(rack->net->racks[i]->name, name) != 0)
            continue;
        *ret_node = i;
        return 0;
    }
    return -MOK_ENOENT;
}

uint64_t rack_inventory_hash(const struct rack *rack)
{
    return rack->net->inventory_hash;
}

uint64_t rack_rounds(const struct rack *rack)
{
    (void)rack;
    return mok_now_ns();
}

uint32_t rack_timeout_ms(const struct rack *rack)
{
    (void)rack;
    return 2000;
}

void rack_totals(const struct rack *rack, struct rack_totals *ret)
{
    (void)rack;
    *ret = (struct rack_totals){ 0 };
}
