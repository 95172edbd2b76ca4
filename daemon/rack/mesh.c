/* SPDX-License-Identifier: Apache-2.0 */
/* The loop's half of the mesh: peers, heartbeats, and what is called back. Only the loop's thread is ever in here. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/log.h"
#include "inventory.h"
#include "link.h"
#include "liveness.h"
#include "rack_key.h"
#include "wire.h"

struct slot {
    bool used;
    uint32_t serial; /* counts the users of this index */
    struct rack_node_config config;
    struct rack_peer peer;
    uint64_t garbage_ns; /* when its garbage was last logged */
};

/* A message from this node to itself. */
struct own_message {
    struct own_message *next;
    Mok__RackFrame *frame;
};

struct rack {
    uv_async_t async;
    uv_timer_t timer;
    unsigned open_handles;
    struct rack_handlers handlers;
    void *cookie;
    struct rack_self self;
    struct mok_rack_key key;
    struct rack_link *link;
    char key_path[sizeof(((struct rack_config *)NULL)->key)];
    char listen[RACK_MAX_ADDRESS + 1];
    struct slot slots[RACK_MAX_NODES];
    uint32_t own; /* index of this node */
    struct own_message *own_first, *own_last;
    uint64_t ticked_ns;
    uint64_t past_epoch; /* the last of any node that was removed: what it knows of us must not fit who comes anew */
    bool leaving, stopped;
    uint64_t inventory_ns; /* when it was last read again; 0: never */
};

static struct rack_moment moment(void)
{
    struct timespec wall;

    clock_gettime(CLOCK_REALTIME, &wall);
    return (struct rack_moment){
        .now_ns = mok_now_ns(),
        .realtime_ns = (uint64_t)wall.tv_sec * 1000000000u + (uint64_t)wall.tv_nsec,
    };
}

static bool is_peer(const struct rack *rack, uint32_t index)
{
    return index < RACK_MAX_NODES && rack->slots[index].used && index != rack->own;
}

/* ------------------------------------------------------------------ heartbeats */

static void send_beat(struct rack *rack, uint32_t index)
{
    struct rack_peer *peer = &rack->slots[index].peer;
    struct rack_beat_frame beat;
    uint8_t *bytes;
    size_t size;

    if (rack->leaving)
        return;
    rack_peer_beat(&rack->self, peer, moment(), &beat);
    struct rack_head head = rack_peer_head(&rack->self, peer);
    if (rack_frame_pack(&head, &beat.frame, &bytes, &size) == 0)
        rack_link_send_beat(rack->link, index, bytes, size);
}

/* Tells everybody of a change of state; a lost peer's messages go, and its connection is made anew. */
static void follow(struct rack *rack, uint32_t index, enum rack_state before)
{
    struct rack_peer *peer = &rack->slots[index].peer;
    enum rack_state now = peer->state;
    char reason[RACK_MAX_TEXT] = "", clean[RACK_MAX_TEXT];

    if (now == before)
        return;
    if (now != RACK_UP)
        memcpy(reason, peer->error, sizeof(reason));
    if (now == RACK_LOST || now == RACK_LEFT)
        rack_link_reset(rack->link, index);
    enum mok_log_level level = now == RACK_UP || now == RACK_LEFT ? MOK_LOG_NOTICE : MOK_LOG_WARNING;
    mok_log(level, "rack", "a node has changed its state",
            "node=%s state=%s before=%s epoch=%" PRIu64 " reason=\"%s\"", peer->name, rack_state_text(now),
            rack_state_text(before), peer->epoch, mok_log_text(clean, sizeof(clean), reason));
    if (now != RACK_SUSPECT)
        send_beat(rack, index);
    if (rack->handlers.state)
        rack->handlers.state(rack->cookie, index, before, now, reason);
}

/* ------------------------------------------------------------------ what comes in */

static void on_frame(struct rack *rack, const struct rack_item *item)
{
    struct rack_peer *peer = &rack->slots[item->slot].peer;
    enum rack_state before = peer->state;

    enum rack_verdict verdict = rack_peer_hear(&rack->self, peer, &item->head, item->frame, item->arrived_ns, moment());
    if (verdict == RACK_VERDICT_ANSWER && peer->state == before)
        send_beat(rack, item->slot);
    follow(rack, item->slot, before);
    if (verdict == RACK_VERDICT_DELIVER && !rack->stopped && rack->handlers.message)
        rack->handlers.message(rack->cookie, item->slot, item->frame);
}

static void on_malformed(struct slot *slot, const struct rack_item *item, uint64_t now_ns)
{
    struct rack_peer *peer = &slot->peer;

    peer->counters.malformed += item->bytes;
    snprintf(peer->error, sizeof(peer->error), "sent %" PRIu64 " messages that are malformed",
             peer->counters.malformed);
    if (slot->garbage_ns && now_ns - slot->garbage_ns < UINT64_C(10000000000))
        return;
    slot->garbage_ns = now_ns;
    mok_log(MOK_LOG_WARNING, "rack", "malformed messages", "node=%s count=%" PRIu64, peer->name,
            peer->counters.malformed);
}

static void on_item(struct rack *rack, const struct rack_item *item)
{
    struct slot *slot = &rack->slots[item->slot];
    enum rack_state before = slot->peer.state;

    if (!slot->used || slot->serial != item->serial)
        return; /* removed meanwhile */
    switch (item->kind) {
    case RACK_ITEM_FRAME:
        on_frame(rack, item);
        return;
    case RACK_ITEM_VERSION:
        rack_peer_versions_fit(&rack->self, &slot->peer, &item->head);
        follow(rack, item->slot, before);
        return;
    case RACK_ITEM_MALFORMED:
        on_malformed(slot, item, mok_now_ns());
        return;
    case RACK_ITEM_DRAINED:
        if (rack->handlers.drained)
            rack->handlers.drained(rack->cookie, item->slot);
        return;
    case RACK_ITEM_ERROR:
        /* Of a lost one, why it stays lost; of one that has left, nobody expects an answer. */
        if (!rack_peer_is_up(&slot->peer) &&
            (slot->peer.state != RACK_LEFT || strncmp(item->text, RACK_NOBODY_THERE, strlen(RACK_NOBODY_THERE)) != 0))
            snprintf(slot->peer.error, sizeof(slot->peer.error), "%s", item->text);
        return;
    }
}

static void take_items(struct rack *rack)
{
    struct rack_item *item = rack_link_take(rack->link);

    while (item) {
        struct rack_item *next = item->next;
        if (!rack->stopped && !rack->leaving)
            on_item(rack, item);
        rack_item_free(item);
        item = next;
    }
}

/* What handlers send to themselves meanwhile waits for the next turn. */
static void take_own(struct rack *rack)
{
    struct own_message *message = rack->own_first;

    rack->own_first = rack->own_last = NULL;
    while (message) {
        struct own_message *next = message->next;
        if (!rack->stopped && rack->handlers.message)
            rack->handlers.message(rack->cookie, rack->own, message->frame);
        mok_wire_free(&message->frame->base);
        free(message);
        message = next;
    }
}

/* A handler may stop the rack: then it is freed once its handles are closed, so not before this turn ends. */
static void on_async(uv_async_t *async)
{
    struct rack *rack = async->data;

    take_own(rack);
    if (!rack->stopped)
        take_items(rack);
}

static void wake(void *cookie)
{
    struct rack *rack = cookie;

    uv_async_send(&rack->async);
}

/* ------------------------------------------------------------------ the clock */

/* A loop that did not turn, or a process that was stopped, has not listened either. */
static void excuse_peers(struct rack *rack, uint64_t now_ns)
{
    uint64_t gap = now_ns - rack->ticked_ns;

    rack->ticked_ns = now_ns;
    if (gap < rack->self.heartbeat_ns + rack->self.timeout_ns / 3)
        return;
    mok_log(MOK_LOG_WARNING, "rack", "the main loop stood still", "ms=%" PRIu64, gap / 1000000u);
    for (uint32_t i = 0; i < RACK_MAX_NODES; i++)
        if (is_peer(rack, i))
            rack_peer_excuse(&rack->slots[i].peer, gap, now_ns);
}

static void on_tick(uv_timer_t *timer)
{
    struct rack *rack = timer->data;

    take_items(rack); /* what has come in is heard, before anybody is found silent */
    if (rack->leaving)
        return; /* nobody is listened to, so nobody is silent */
    excuse_peers(rack, mok_now_ns());
    for (uint32_t i = 0; i < RACK_MAX_NODES && !rack->stopped; i++) {
        if (!is_peer(rack, i))
            continue;
        struct rack_peer *peer = &rack->slots[i].peer;
        enum rack_state before = peer->state;
        rack_peer_check(&rack->self, peer, mok_now_ns());
        if (peer->state == before || peer->state == RACK_SUSPECT)
            send_beat(rack, i);
        follow(rack, i, before);
    }
}

/* ------------------------------------------------------------------ goodbye */

/* Who speaks version 1 learns it as it learns of any other end. */
static void say_goodbye(struct rack *rack, uint32_t index, Mok__GoodbyeReason reason)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackGoodbye body = MOK__RACK_GOODBYE__INIT;
    const struct rack_peer *peer = &rack->slots[index].peer;

    if (!rack_peer_is_up(peer) || peer->version < RACK_PROTOCOL_GOODBYE)
        return;
    body.reason = reason;
    frame.body_case = MOK__RACK_FRAME__BODY_GOODBYE;
    frame.goodbye = &body;
    rack_send(rack, index, &frame, 0);
    if (rack->handlers.goodbye)
        rack->handlers.goodbye(rack->cookie, index, reason);
}

/* ------------------------------------------------------------------ the inventory */

static void use_config(struct rack *rack, const struct rack_config *config)
{
    const struct rack_node_config *own = rack_config_find(config, config->node);

    snprintf(rack->self.link_domain, sizeof(rack->self.link_domain), "%s", own->link_domain);
    rack->self.heartbeat_ns = (uint64_t)config->heartbeat_ms * 1000000u;
    rack->self.timeout_ns = (uint64_t)config->timeout_ms * 1000000u;
    rack->self.inventory = rack_config_hash(config);
}

static int add_node(struct rack *rack, const struct rack_node_config *config, uint32_t *ret_index)
{
    uint32_t index = 0;

    while (index < RACK_MAX_NODES && rack->slots[index].used)
        index++;
    if (index == RACK_MAX_NODES)
        return -MOK_ERANGE;
    struct slot *slot = &rack->slots[index];
    bool own = strcmp(config->name, rack->self.name) == 0;
    slot->serial++;
    if (!own) {
        int r = rack_link_add(rack->link, index, slot->serial, config->address, config->public_key);
        if (r < 0)
            return r;
    }
    slot->used = true;
    slot->config = *config;
    slot->garbage_ns = 0;
    rack_peer_init(&slot->peer, config->name, config->link_domain, mok_now_ns());
    slot->peer.epoch += rack->past_epoch;
    if (own) {
        rack->own = index;
        slot->peer.state = RACK_UP;
    } else {
        send_beat(rack, index);
    }
    *ret_index = index;
    return 0;
}

static void remove_node(struct rack *rack, uint32_t index)
{
    struct slot *slot = &rack->slots[index];
    enum rack_state before = slot->peer.state;
    char reason[RACK_MAX_TEXT];

    rack_link_bar(rack->link, index); /* who hears the goodbye connects anew at once: in vain */
    say_goodbye(rack, index, MOK__GOODBYE_REASON__GOODBYE_REMOVED);
    rack_goodbye_text(MOK__GOODBYE_REASON__GOODBYE_REMOVED, rack->self.name, slot->peer.name, reason);
    rack_peer_lose(&slot->peer, reason);
    rack_link_remove(rack->link, index);
    slot->config.address[0] = '\0';
    if (slot->peer.epoch > rack->past_epoch)
        rack->past_epoch = slot->peer.epoch;
    if (before != slot->peer.state && rack->handlers.state)
        rack->handlers.state(rack->cookie, index, before, RACK_LEFT, slot->peer.error); /* nobody has lost it */
    mok_log(MOK_LOG_NOTICE, "rack", "a node is no longer in the inventory", "node=%s", slot->peer.name);
    if (rack->handlers.removed && !rack->stopped)
        rack->handlers.removed(rack->cookie, index);
    slot->used = false;
}

static bool is_same_node(const struct rack_node_config *a, const struct rack_node_config *b)
{
    return strcmp(a->address, b->address) == 0 && strcmp(a->link_domain, b->link_domain) == 0 &&
           memcmp(a->public_key, b->public_key, RACK_KEY_BYTES) == 0;
}

static void remove_missing(struct rack *rack, const struct rack_config *config)
{
    for (uint32_t i = 0; i < RACK_MAX_NODES && !rack->stopped; i++) {
        if (!is_peer(rack, i))
            continue;
        const struct rack_node_config *node = rack_config_find(config, rack->slots[i].config.name);
        if (!node || !is_same_node(node, &rack->slots[i].config))
            remove_node(rack, i);
    }
}

static int add_new(struct rack *rack, const struct rack_config *config, bool announce)
{
    uint32_t index;

    for (size_t i = 0; i < config->n_nodes && !rack->stopped; i++) {
        if (rack_find(rack, config->nodes[i].name, &index) == 0)
            continue;
        int r = add_node(rack, &config->nodes[i], &index);
        if (r < 0)
            return r;
        if (!announce)
            continue;
        mok_log(MOK_LOG_NOTICE, "rack", "a node is new in the inventory", "node=%s address=%s", config->nodes[i].name,
                config->nodes[i].address);
        if (rack->handlers.added)
            rack->handlers.added(rack->cookie, index);
    }
    return 0;
}

/* Sockets and keys stay as they were made. `own`: what it says of this node; NULL: nothing. */
static bool is_still_this_node(const struct rack *rack, const struct rack_config *config,
                               const struct rack_node_config *own)
{
    const struct rack_node_config *before = &rack->slots[rack->own].config;

    return strcmp(config->node, rack->self.name) == 0 && strcmp(config->key, rack->key_path) == 0 &&
           strcmp(config->listen, rack->listen) == 0 && own &&
           memcmp(own->public_key, rack->key.public_key, RACK_KEY_BYTES) == 0 &&
           (config->listen[0] || strcmp(own->address, before->address) == 0);
}

int rack_reload(struct rack *rack, const struct rack_config *config, char *text)
{
    const struct rack_node_config *own = rack_config_find(config, rack->self.name);

    int r = rack_config_check(config, text);
    if (r < 0)
        return r;
    if (!is_still_this_node(rack, config, own)) {
        snprintf(text, RACK_MAX_TEXT,
                 "[rack]: node, listen, key and this node's own key change at a restart alone, and so does its own "
                 "address where there is no listen");
        return -MOK_ESTATE;
    }
    use_config(rack, config);
    rack->slots[rack->own].config = *own;
    memcpy(rack->slots[rack->own].peer.link_domain, own->link_domain, sizeof(own->link_domain));
    rack->inventory_ns = mok_now_ns(); /* who is removed may be refused before this returns */
    remove_missing(rack, config);
    r = add_new(rack, config, true);
    if (r < 0)
        snprintf(text, RACK_MAX_TEXT, "out of memory: not all nodes were added");
    if (!rack->stopped)
        uv_timer_start(&rack->timer, on_tick, config->heartbeat_ms, config->heartbeat_ms);
    return r;
}

/* ------------------------------------------------------------------ start and stop */

static void free_own(struct rack *rack)
{
    rack->handlers.message = NULL;
    take_own(rack);
}

static void on_closed(uv_handle_t *handle)
{
    struct rack *rack = handle->data;

    if (--rack->open_handles > 0)
        return;
    free_own(rack);
    explicit_bzero(&rack->key, sizeof(rack->key));
    free(rack);
}

void rack_leave(struct rack *rack)
{
    if (!rack || rack->leaving || rack->stopped)
        return;
    for (uint32_t i = 0; i < RACK_MAX_NODES; i++)
        if (is_peer(rack, i))
            say_goodbye(rack, i, MOK__GOODBYE_REASON__GOODBYE_STOPPED);
    rack->leaving = true;
    rack_link_leave(rack->link);
}

void rack_set_tenants(struct rack *rack, uint64_t hash)
{
    rack->self.tenants = hash;
}

void rack_set_draining(struct rack *rack, bool draining)
{
    if (rack->self.draining == draining)
        return;
    rack->self.draining = draining;
    for (uint32_t i = 0; i < RACK_MAX_NODES; i++)
        if (is_peer(rack, i))
            send_beat(rack, i);
}

void rack_stop(struct rack *rack)
{
    if (!rack || rack->stopped)
        return;
    rack->stopped = true;
    rack_link_stop(rack->link);
    rack->link = NULL;
    uv_close((uv_handle_t *)&rack->async, on_closed);
    uv_close((uv_handle_t *)&rack->timer, on_closed);
}

static int load_key(struct rack *rack, const struct rack_config *config, char *text)
{
    char sentence[MOK_RACK_KEY_SENTENCE], digits[MOK_RACK_KEY_TEXT];

    int r = mok_rack_key_load(config->key, &rack->key, sentence);
    if (r < 0) {
        snprintf(text, RACK_MAX_TEXT, "[rack] key = %.*s", RACK_MAX_TEXT - 20, sentence);
        return r;
    }
    if (memcmp(rack->key.public_key, rack_config_find(config, config->node)->public_key, RACK_KEY_BYTES) == 0)
        return 0;
    mok_rack_key_text(rack->key.public_key, digits);
    snprintf(text, RACK_MAX_TEXT, "[node %s] public_key: is not that of this node's key file, which has %s",
             config->node, digits);
    return -MOK_EARG;
}

static int start_link(struct rack *rack, const struct rack_config *config, char *text)
{
    struct rack_link_config link = { .listen = rack->listen, .timeout_ms = config->timeout_ms };
    struct rack_address address;

    if (!rack->listen[0])
        link.listen = rack_config_find(config, config->node)->address;
    for (size_t i = 0; i < config->n_nodes; i++)
        if (rack_address_parse(config->nodes[i].address, &address) == 0)
            link.ipv6 |= address.ipv6;
    if (rack_address_parse(link.listen, &address) == 0)
        link.ipv6 |= address.ipv6;
    link.versions = rack->self.versions;
    memcpy(link.public_key, rack->key.public_key, RACK_KEY_BYTES);
    memcpy(link.secret_key, rack->key.secret_key, RACK_KEY_BYTES);
    int r = rack_link_start(&link, wake, rack, &rack->link, text);
    explicit_bzero(&link, sizeof(link));
    return r;
}

static void fill_self(struct rack *rack, const struct rack_config *config, const uint8_t *boot_id)
{
    struct rack_versions versions =
        config->versions.max ? config->versions : (struct rack_versions){ RACK_PROTOCOL_MIN, RACK_PROTOCOL_MAX };

    if (config->newest_protocol && config->newest_protocol < versions.max)
        versions.max = (uint8_t)config->newest_protocol;

    snprintf(rack->self.name, sizeof(rack->self.name), "%s", config->node);
    memcpy(rack->self.boot_id, boot_id, RACK_BOOT_BYTES);
    rack->self.versions = versions;
    memcpy(rack->key_path, config->key, sizeof(rack->key_path));
    memcpy(rack->listen, config->listen, sizeof(rack->listen));
    use_config(rack, config);
}

static void open_handles(struct rack *rack, uv_loop_t *loop, uint32_t heartbeat_ms)
{
    rack->async.data = rack->timer.data = rack;
    uv_timer_init(loop, &rack->timer);
    uv_timer_start(&rack->timer, on_tick, heartbeat_ms, heartbeat_ms);
    rack->open_handles = 2;
    rack->ticked_ns = mok_now_ns();
}

int rack_start(uv_loop_t *loop, const struct rack_config *config, const uint8_t boot_id[static RACK_BOOT_BYTES],
               const struct rack_handlers *handlers, void *cookie, struct rack **ret, char *text)
{
    int r = rack_config_check(config, text);
    if (r < 0)
        return r;
    struct rack *rack = calloc(1, sizeof(*rack));
    if (!rack) {
        snprintf(text, RACK_MAX_TEXT, "out of memory");
        return -MOK_ENOMEM;
    }
    rack->handlers = *handlers;
    rack->cookie = cookie;
    fill_self(rack, config, boot_id);
    r = load_key(rack, config, text);
    if (r == 0 && uv_async_init(loop, &rack->async, on_async) < 0) {
        snprintf(text, RACK_MAX_TEXT, "no descriptor for the rack");
        r = -MOK_EFDS;
    }
    if (r < 0) {
        free(rack);
        return r;
    }
    open_handles(rack, loop, config->heartbeat_ms);
    r = start_link(rack, config, text);
    if (r == 0) {
        r = add_new(rack, config, false);
        if (r < 0)
            snprintf(text, RACK_MAX_TEXT, "out of memory");
    }
    if (r < 0) {
        rack_stop(rack);
        return r;
    }
    *ret = rack;
    return 0;
}

/* ------------------------------------------------------------------ sending */

static int send_to_self(struct rack *rack, Mok__RackFrame *frame, uint32_t ttl_ms)
{
    struct rack_peer *peer = &rack->slots[rack->own].peer;
    struct rack_head head = { .version = rack->self.versions.max, .speaks = rack->self.versions };
    _cleanup_free_ uint8_t *bytes = NULL;
    struct own_message *message = calloc(1, sizeof(*message));
    size_t size;

    if (!message)
        return -MOK_ENOMEM;
    peer->heard = true;
    memcpy(peer->boot_id, rack->self.boot_id, RACK_BOOT_BYTES);
    rack_peer_stamp(&rack->self, peer, frame, ttl_ms, mok_now_ns());
    int r = rack_frame_pack(&head, frame, &bytes, &size);
    if (r == 0)
        r = rack_frame_unpack(rack->self.versions, bytes, size, &head, &message->frame);
    if (r < 0) {
        free(message);
        return r == -MOK_EPROTO ? -MOK_ESIZE : r;
    }
    if (rack->own_last)
        rack->own_last->next = message;
    else
        rack->own_first = message;
    rack->own_last = message;
    rack_peer_sent(peer);
    peer->counters.received++;
    uv_async_send(&rack->async);
    return 0;
}

int rack_send(struct rack *rack, uint32_t node, Mok__RackFrame *frame, uint32_t ttl_ms)
{
    uint8_t *bytes;
    size_t size;

    if (node >= RACK_MAX_NODES || !rack->slots[node].used)
        return -MOK_ENOENT;
    if (node == rack->own)
        return send_to_self(rack, frame, ttl_ms);
    struct rack_peer *peer = &rack->slots[node].peer;
    if (!rack_peer_is_up(peer) || rack->leaving)
        return -MOK_EPEER;
    rack_peer_stamp(&rack->self, peer, frame, ttl_ms, mok_now_ns());
    struct rack_head head = rack_peer_head(&rack->self, peer);
    int r = rack_frame_pack(&head, frame, &bytes, &size);
    if (r == 0)
        r = rack_link_send(rack->link, node, bytes, size);
    if (r == 0)
        rack_peer_sent(peer);
    return r;
}

void rack_lose(struct rack *rack, uint32_t node, const char *reason)
{
    if (!is_peer(rack, node))
        return;
    enum rack_state before = rack->slots[node].peer.state;
    rack_peer_lose(&rack->slots[node].peer, reason);
    follow(rack, node, before);
}

/* ------------------------------------------------------------------ looking */

uint32_t rack_self(const struct rack *rack)
{
    return rack->own;
}

int rack_find(const struct rack *rack, const char *name, uint32_t *ret_node)
{
    for (uint32_t i = 0; i < RACK_MAX_NODES; i++) {
        if (!rack->slots[i].used || strcmp(rack->slots[i].config.name, name) != 0)
            continue;
        *ret_node = i;
        return 0;
    }
    return -MOK_ENOENT;
}

uint64_t rack_inventory_hash(const struct rack *rack)
{
    return rack->self.inventory;
}

uint32_t rack_timeout_ms(const struct rack *rack)
{
    return (uint32_t)(rack->self.timeout_ns / 1000000u);
}

static void fill_own(const struct rack *rack, struct rack_node_info *info)
{
    info->self = true;
    info->link_domain = rack->self.link_domain;
    memcpy(info->boot_id, rack->self.boot_id, RACK_BOOT_BYTES);
    info->rtt_ns = info->clock_offset_ns = 0;
    info->silent_ms = 0;
    info->protocol = rack->self.versions.max;
    info->draining = rack->self.draining;
    info->tenants_agree = true;
    info->inventory_agrees = true;
}

int rack_info(const struct rack *rack, uint32_t node, struct rack_node_info *ret)
{
    if (node >= RACK_MAX_NODES || !rack->slots[node].used)
        return -MOK_ENOENT;
    const struct slot *slot = &rack->slots[node];
    const struct rack_peer *peer = &slot->peer;
    uint64_t now_ns = mok_now_ns();
    *ret = (struct rack_node_info){
        .index = node,
        .state = peer->state,
        .name = slot->config.name,
        .address = slot->config.address,
        .link_domain = peer->named && !peer->link_domain_agrees ? "" : slot->config.link_domain,
        .error = peer->error,
        .epoch = peer->epoch,
        .rtt_ns = rack_peer_rtt(peer),
        .clock_offset_ns = peer->clock_offset_ns,
        .silent_ms = now_ns > peer->heard_ns ? (now_ns - peer->heard_ns) / 1000000u : 0,
        .protocol = peer->version,
        .inventory_agrees = rack_peer_is_up(peer) && peer->inventory == rack->self.inventory,
        .tenants_agree = !peer->tenants || !rack->self.tenants || peer->tenants == rack->self.tenants,
        .draining = peer->draining,
        .counters = peer->counters,
    };
    memcpy(ret->boot_id, peer->boot_id, RACK_BOOT_BYTES);
    if (node == rack->own)
        fill_own(rack, ret);
    return 0;
}

void rack_totals(const struct rack *rack, struct rack_totals *ret)
{
    struct rack_link_stats stats;

    rack_link_stats(rack->link, &stats);
    *ret = (struct rack_totals){
        .refused = stats.refused,
        .refused_ns = stats.refused_ns > rack->inventory_ns ? stats.refused_ns : 0,
        .unknown = stats.unknown,
        .connections = stats.connections,
        .max_connections = stats.max_connections,
    };
    memcpy(ret->refused_from, stats.refused_from, sizeof(ret->refused_from));
    if (ret->refused_ns)
        ret->refused_lately = rack_lately_count(&stats.refused_lately, mok_now_ns());
}

uint64_t rack_rounds(const struct rack *rack)
{
    return rack_link_rounds(rack->link);
}
