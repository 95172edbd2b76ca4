/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "rack_key.h"
#include "util.h"

#ifdef MOK_SANITIZED
#define PATIENCE_S 300u
#else
#define PATIENCE_S 60u
#endif

static void must(bool condition, const char *what)
{
    if (condition)
        return;
    fprintf(stderr, "rack net: %s\n", what);
    abort();
}

/* ------------------------------------------------------------------ what is called back */

static void on_message(void *cookie, uint32_t from, const Mok__RackFrame *frame)
{
    struct rack_net_node *node = cookie;

    (void)from;
    node->messages++;
    if (frame->body_case != MOK__RACK_FRAME__BODY_PING)
        return;
    if (frame->ping->number != node->last_number + 1)
        node->out_of_order = true;
    node->last_number = frame->ping->number;
}

static void on_state(void *cookie, uint32_t from, enum rack_state before, enum rack_state now, const char *reason)
{
    struct rack_net_node *node = cookie;

    (void)from;
    if (now == RACK_UP && before != RACK_SUSPECT)
        node->ups++;
    node->losses += now == RACK_LOST;
    node->leaves += now == RACK_LEFT;
    node->suspicions += now == RACK_SUSPECT;
    if (now != RACK_UP)
        snprintf(node->reason, sizeof(node->reason), "%s", reason);
}

static void on_drained(void *cookie, uint32_t from)
{
    struct rack_net_node *node = cookie;

    (void)from;
    node->drains++;
}

static void on_added(void *cookie, uint32_t from)
{
    struct rack_net_node *node = cookie;

    (void)from;
    node->added++;
}

static void on_removed(void *cookie, uint32_t from)
{
    struct rack_net_node *node = cookie;

    (void)from;
    node->removed++;
}

static void on_goodbye(void *cookie, uint32_t to, Mok__GoodbyeReason reason)
{
    const struct rack_net_node *node = cookie;

    (void)to;
    (void)reason;
    if (node->has_said_goodbye)
        node->has_said_goodbye();
}

static const struct rack_handlers handlers = {
    .message = on_message,
    .state = on_state,
    .goodbye = on_goodbye,
    .drained = on_drained,
    .added = on_added,
    .removed = on_removed,
};

/* ------------------------------------------------------------------ nodes */

static void make_key(struct rack_net *net, uint32_t number, uint8_t *ret_public)
{
    char dir[128], text[MOK_RACK_KEY_SENTENCE];
    struct mok_rack_key key;

    snprintf(dir, sizeof(dir), "%s/n%u", net->dir, number);
    must(mkdir(dir, 0700) == 0, "no directory for a key");
    must(mok_rack_key_generate(&key) == 0, "no key");
    must(mok_rack_key_write(dir, &key, text) == 0, text);
    memcpy(ret_public, key.public_key, RACK_KEY_BYTES);
}

void rack_net_open(struct rack_net *net, uint32_t size)
{
    unsigned id = (unsigned)getpid();
    struct rack_node_config nodes[RACK_NET_MAX] = { 0 };

    memset(net, 0, sizeof(*net));
    must(size <= RACK_NET_MAX, "too many nodes");
    must(uv_loop_init(&net->loop) == 0, "no loop");
    net->size = size;
    net->heartbeat_ms = 50;
    net->timeout_ms = 20000; /* a loaded machine loses nobody, unless a test asks for it */
    snprintf(net->dir, sizeof(net->dir), "/tmp/mok-rack-XXXXXX");
    must(mkdtemp(net->dir) != NULL, "no directory");
    for (uint32_t i = 0; i < size; i++) {
        snprintf(nodes[i].name, sizeof(nodes[i].name), "n%u", i);
        snprintf(nodes[i].address, sizeof(nodes[i].address), "127.%u.%u.%u:7117", 1 + id / 65536 % 250, id / 256 % 256,
                 (id % 64) * 4 + i + 1 > 254 ? 254 : (id % 64) * 4 + i + 1);
        snprintf(nodes[i].link_domain, sizeof(nodes[i].link_domain), "rack");
        make_key(net, i, nodes[i].public_key);
    }
    for (uint32_t i = 0; i < size; i++) {
        struct rack_net_node *node = &net->node[i];
        node->net = net;
        node->number = i;
        memcpy(node->inventory, nodes, sizeof(nodes));
        node->config.nodes = node->inventory;
        node->config.n_nodes = size;
        snprintf(node->config.node, sizeof(node->config.node), "n%u", i);
        snprintf(node->config.key, sizeof(node->config.key), "%s/n%u/rack.key", net->dir, i);
    }
}

void rack_net_start(struct rack_net *net, uint32_t number)
{
    struct rack_net_node *node = &net->node[number];
    char text[RACK_MAX_TEXT] = "";

    node->config.heartbeat_ms = net->heartbeat_ms;
    node->config.timeout_ms = net->timeout_ms;
    must(getrandom(node->boot_id, sizeof(node->boot_id), 0) == sizeof(node->boot_id), "no random bytes");
    must(rack_start(node->loop ? node->loop : &net->loop, &node->config, node->boot_id, &handlers, node, &node->rack,
                    text) == 0,
         text);
}

void rack_net_start_all(struct rack_net *net)
{
    for (uint32_t i = 0; i < net->size; i++)
        rack_net_start(net, i);
}

void rack_net_stop(struct rack_net *net, uint32_t number)
{
    rack_stop(net->node[number].rack);
    net->node[number].rack = NULL;
}

void rack_net_leave(struct rack_net *net, uint32_t number)
{
    rack_leave(net->node[number].rack);
    rack_net_stop(net, number);
}

void rack_net_close(struct rack_net *net)
{
    char path[192];

    for (uint32_t i = 0; i < net->size; i++)
        rack_net_stop(net, i);
    uv_run(&net->loop, UV_RUN_DEFAULT);
    must(uv_loop_close(&net->loop) == 0, "the loop still has handles");
    for (uint32_t i = 0; i < net->size; i++) {
        snprintf(path, sizeof(path), "%s/n%u/rack.key", net->dir, i);
        unlink(path);
        snprintf(path, sizeof(path), "%s/n%u/rack.pub", net->dir, i);
        unlink(path);
        snprintf(path, sizeof(path), "%s/n%u", net->dir, i);
        rmdir(path);
    }
    rmdir(net->dir);
}

/* ------------------------------------------------------------------ turning */

static void nothing(uv_timer_t *timer)
{
    (void)timer;
}

void rack_net_turn_for(struct rack_net *net, uint32_t ms)
{
    uint64_t end = mok_now_ns() + (uint64_t)ms * 1000000u;
    uv_timer_t timer;

    uv_timer_init(&net->loop, &timer);
    uv_timer_start(&timer, nothing, 1, 5);
    while (mok_now_ns() < end)
        uv_run(&net->loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&net->loop, UV_RUN_NOWAIT);
}

void rack_net_until_for(struct rack_net *net, rack_net_condition done, uint32_t seconds, const char *what)
{
    uint64_t end = mok_now_ns() + (uint64_t)seconds * 1000000000u;
    uv_timer_t timer;

    uv_timer_init(&net->loop, &timer);
    uv_timer_start(&timer, nothing, 1, 5);
    while (!done(net)) {
        must(mok_now_ns() < end, what);
        uv_run(&net->loop, UV_RUN_ONCE);
    }
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&net->loop, UV_RUN_NOWAIT);
}

void rack_net_until(struct rack_net *net, rack_net_condition done, const char *what)
{
    rack_net_until_for(net, done, PATIENCE_S, what);
}

/* ------------------------------------------------------------------ looking */

static uint32_t index_of(const struct rack_net *net, uint32_t of, uint32_t number)
{
    char name[16];
    uint32_t index = RACK_MAX_NODES;

    snprintf(name, sizeof(name), "n%u", number);
    rack_find(net->node[of].rack, name, &index);
    return index;
}

struct rack_node_info rack_net_info(const struct rack_net *net, uint32_t of, uint32_t number)
{
    struct rack_node_info info = { 0 };

    must(rack_info(net->node[of].rack, index_of(net, of, number), &info) == 0, "no such node");
    return info;
}

bool rack_net_all_up(struct rack_net *net)
{
    for (uint32_t a = 0; a < net->size; a++)
        for (uint32_t b = 0; b < net->size; b++)
            if (net->node[a].rack && net->node[b].rack && rack_net_info(net, a, b).state != RACK_UP)
                return false;
    return true;
}

int rack_net_ping(struct rack_net *net, uint32_t from, uint32_t to, uint64_t number, size_t payload, uint32_t ttl_ms)
{
    static uint8_t zeros[65536];
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackPing ping = MOK__RACK_PING__INIT;

    ping.number = number;
    ping.payload = (ProtobufCBinaryData){ .len = payload, .data = zeros };
    frame.body_case = MOK__RACK_FRAME__BODY_PING;
    frame.ping = &ping;
    return rack_send(net->node[from].rack, index_of(net, from, to), &frame, ttl_ms);
}
