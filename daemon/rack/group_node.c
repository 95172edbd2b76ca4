/* SPDX-License-Identifier: Apache-2.0 */
#include "group_node.h"

#include <stdio.h>
#include <string.h>

#include "group_internal.h"
#include "names.h"

/* A message of this node to itself, packed: it is looked at when the entry point has done its own work. */
struct group_letter {
    TAILQ_ENTRY(group_letter) link;
    size_t size;
    uint8_t bytes[];
};

bool group_roster_has(const struct group_roster *roster, uint32_t peer)
{
    for (uint32_t rank = 0; rank < roster->size; rank++)
        if (roster->rank[rank].node == peer)
            return true;
    return false;
}

int group_unreached(const struct group_node *node, uint32_t rank, const char *name, struct group_error *error)
{
    char why[200];

    node->ops->unreached(node->cookie, name, why, sizeof(why));
    return group_error_set(error, -MOK_EPEER, rank, "node %s does not reach node %.63s (rank %u): %s",
                           group_node_name(node, node->self), name, rank, why);
}

struct group_roster *group_roster_of(const struct group_node *node, const Mok__GroupFormed *message, bool strict,
                                     struct group_error *error)
{
    if (!message || message->n_rank < 1 || message->n_rank > MOK_MAX_EP || !mok_name_is_valid(message->name) ||
        !(message->group & GROUP_ID_FLAG)) {
        group_error_set(error, -MOK_EPROTO, 0, "what node %s was told of the group is malformed",
                        group_node_name(node, node->self));
        return NULL;
    }
    struct group_roster *roster = calloc(1, sizeof(*roster) + message->n_rank * sizeof(roster->rank[0]));
    if (!roster) {
        group_error_set(error, -MOK_ENOMEM, 0, "node %s is out of memory", group_node_name(node, node->self));
        return NULL;
    }
    roster->id = message->group;
    roster->uid = message->uid;
    roster->size = (uint32_t)message->n_rank;
    roster->kept = message->kept;
    snprintf(roster->name, sizeof(roster->name), "%s", message->name);
    for (uint32_t r = 0; r < roster->size; r++) {
        const Mok__GroupRank *rank = message->rank[r];
        roster->rank[r] = (struct group_rank){
            .device = rank->device,
            .kind = rank->kind,
            .session = rank->session,
            .join = rank->join,
            .fabric = rank->fabric,
        };
        snprintf(roster->rank[r].no_fabric, sizeof(roster->rank[r].no_fabric), "%s", rank->no_fabric);
        int found = group_find_peer(node, rank->node, &roster->rank[r].node);
        if (found == 0 && node->peer[roster->rank[r].node].up)
            continue;
        roster->rank[r].node = GROUP_MAX_NODES;
        if (strict) {
            group_unreached(node, r, rank->node, error);
            free(roster);
            return NULL;
        }
    }
    return roster;
}

bool group_handle_is_sound(const Mok__Handle *handle)
{
    if (handle->kind < MOK__HANDLE_KIND__HANDLE_BELL || handle->kind > MOK__HANDLE_KIND__HANDLE_FLAGS ||
        handle->rank >= MOK_MAX_EP || !(handle->group & GROUP_ID_FLAG))
        return false;
    return handle->fabric.len == (handle->kind == MOK__HANDLE_KIND__HANDLE_BELL ? 0 : GROUP_FABRIC_BYTES);
}

void group_node_init(struct group_node *node, const struct group_ops *ops, void *cookie, uint32_t self,
                     const char *name)
{
    memset(node, 0, sizeof(*node));
    node->ops = ops;
    node->cookie = cookie;
    node->self = self;
    node->peer[self].known = node->peer[self].up = true;
    snprintf(node->peer[self].name, sizeof(node->peer[self].name), "%s", name);
    TAILQ_INIT(&node->meetings);
    TAILQ_INIT(&node->standings);
    TAILQ_INIT(&node->leads);
    TAILQ_INIT(&node->members);
    TAILQ_INIT(&node->joins);
    TAILQ_INIT(&node->drops);
    TAILQ_INIT(&node->letters);
}

void group_node_release(struct group_node *node)
{
    struct group_letter *letter;

    while ((letter = TAILQ_FIRST(&node->letters))) {
        TAILQ_REMOVE(&node->letters, letter, link);
        free(letter);
    }
    group_home_release(node);
    group_standing_release(node);
    group_lead_release(node);
    group_member_release(node);
}

const char *group_node_name(const struct group_node *node, uint32_t peer)
{
    return peer < GROUP_MAX_NODES && node->peer[peer].known ? node->peer[peer].name : "?";
}

int group_find_peer(const struct group_node *node, const char *name, uint32_t *ret)
{
    for (uint32_t peer = 0; peer < GROUP_MAX_NODES; peer++) {
        if (node->peer[peer].known && strcmp(node->peer[peer].name, name) == 0) {
            *ret = peer;
            return 0;
        }
    }
    return -MOK_ENOENT;
}

/* ------------------------------------------------------------------ who meets where */

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

/* FNV's last bytes move too few bits to compare by; this spreads them. */
static uint64_t finish(uint64_t hash)
{
    hash ^= hash >> 33;
    hash *= UINT64_C(0xff51afd7ed558ccd);
    hash ^= hash >> 33;
    hash *= UINT64_C(0xc4ceb9fe1a85ec53);
    return hash ^ hash >> 33;
}

uint32_t group_node_home(const struct group_node *node, uint32_t uid, const char *name)
{
    uint32_t best = node->self;
    uint64_t highest = 0;

    for (uint32_t peer = 0; peer < GROUP_MAX_NODES; peer++) {
        const struct group_peer *p = &node->peer[peer];
        if (!p->up)
            continue;
        uint8_t user[4] = { (uint8_t)uid, (uint8_t)(uid >> 8), (uint8_t)(uid >> 16), (uint8_t)(uid >> 24) };
        uint64_t hash = hash_bytes(UINT64_C(0xcbf29ce484222325), p->name, strlen(p->name) + 1);
        hash = finish(hash_bytes(hash_bytes(hash, user, sizeof(user)), name, strlen(name)));
        if (hash >= highest) {
            highest = hash;
            best = peer;
        }
    }
    return best;
}

/*
 * GROUP_ID_FLAG, then 7 bits that say which node gave it, then 24 that count. The 7 bits are the node's place among all
 * names it knows; where inventories differ two nodes may give the same id, which is found out before it is used.
 */
uint32_t group_next_id(struct group_node *node)
{
    uint32_t place = 0;

    for (uint32_t peer = 0; peer < GROUP_MAX_NODES; peer++)
        if (node->peer[peer].known && strcmp(node->peer[peer].name, node->peer[node->self].name) < 0)
            place++;
    for (;;) {
        node->last_id = (node->last_id + 1) & 0xffffffu;
        uint32_t id = GROUP_ID_FLAG | place << 24 | node->last_id;
        node->ids_wrapped |= node->last_id == 0;
        if (!node->ids_wrapped || !node->ops->id_is_taken(node->cookie, id))
            return id;
    }
}

/* ------------------------------------------------------------------ sending */

/* A letter that gets lost for lack of memory is the loss of this node to itself: what waits for it ends by its
 * deadline. */
static void post(struct group_node *node, const Mok__GroupMessage *message)
{
    size_t size = mok__group_message__get_packed_size(message);
    struct group_letter *letter = malloc(sizeof(*letter) + size);

    if (!letter)
        return;
    letter->size = mok__group_message__pack(message, letter->bytes);
    TAILQ_INSERT_TAIL(&node->letters, letter, link);
}

void group_send(struct group_node *node, uint32_t peer, const Mok__GroupMessage *message)
{
    if (peer == node->self)
        post(node, message);
    else if (node->peer[peer].up)
        node->ops->send(node->cookie, peer, message);
}

/* ------------------------------------------------------------------ receiving */

static void dispatch(struct group_node *node, uint32_t peer, const Mok__GroupMessage *message)
{
    switch (message->body_case) {
    case MOK__GROUP_MESSAGE__BODY_JOINING:
        group_home_joining(node, peer, message->joining);
        return;
    case MOK__GROUP_MESSAGE__BODY_WITHDRAWN:
        group_home_withdrawn(node, peer, message->withdrawn);
        return;
    case MOK__GROUP_MESSAGE__BODY_REFUSED:
        group_member_refused(node, peer, message->refused);
        return;
    case MOK__GROUP_MESSAGE__BODY_FORMED:
        group_member_formed(node, peer, message->formed);
        return;
    case MOK__GROUP_MESSAGE__BODY_CALL:
        group_lead_call(node, peer, message->call);
        return;
    case MOK__GROUP_MESSAGE__BODY_PREPARE:
        group_member_prepare(node, peer, message->prepare);
        return;
    case MOK__GROUP_MESSAGE__BODY_PREPARED:
        group_lead_prepared(node, peer, message->prepared);
        return;
    case MOK__GROUP_MESSAGE__BODY_VERDICT:
        group_member_verdict(node, peer, message->verdict);
        return;
    case MOK__GROUP_MESSAGE__BODY_OVER:
        group_member_over(node, peer, message->over);
        return;
    case MOK__GROUP_MESSAGE__BODY_DROP:
        group_member_drop(node, peer, message->drop);
        return;
    case MOK__GROUP_MESSAGE__BODY_DROPPED:
        group_member_dropped(node, peer, message->dropped);
        return;
    case MOK__GROUP_MESSAGE__BODY_STANDING:
        group_standing_message(node, peer, message->standing);
        return;
    case MOK__GROUP_MESSAGE__BODY_LAYER_GONE:
        group_member_layer_gone(node, peer, message->layer_gone);
        return;
    default:
        return; /* of a version that knows more */
    }
}

/* Entry points nest (operations call back in); the outermost one delivers what the node has said to itself. */
void group_turn(struct group_node *node)
{
    struct group_letter *letter;

    if (node->turning)
        return;
    node->turning = true;
    while ((letter = TAILQ_FIRST(&node->letters))) {
        Mok__GroupMessage *message = mok__group_message__unpack(NULL, letter->size, letter->bytes);
        TAILQ_REMOVE(&node->letters, letter, link);
        free(letter);
        if (!message)
            continue;
        dispatch(node, node->self, message);
        mok__group_message__free_unpacked(message, NULL);
    }
    node->turning = false;
}

void group_node_receive(struct group_node *node, uint32_t peer, const Mok__GroupMessage *message, uint64_t now_ms)
{
    node->now_ms = now_ms;
    if (peer >= GROUP_MAX_NODES || !node->peer[peer].up || peer == node->self)
        return;
    dispatch(node, peer, message);
    group_turn(node);
}

void group_node_peer_up(struct group_node *node, uint32_t peer, const char *name, uint64_t now_ms)
{
    node->now_ms = now_ms;
    if (peer >= GROUP_MAX_NODES || peer == node->self)
        return;
    node->peer[peer].known = node->peer[peer].up = true;
    snprintf(node->peer[peer].name, sizeof(node->peer[peer].name), "%s", name);
    group_standing_peer_up(node);
    group_lead_look_for_homes(node, peer);
    group_member_peer_up(node, peer);
    group_turn(node);
}

void group_node_peer_lost(struct group_node *node, uint32_t peer, const char *reason, uint64_t now_ms)
{
    node->now_ms = now_ms;
    if (peer >= GROUP_MAX_NODES || peer == node->self || !node->peer[peer].up)
        return;
    node->peer[peer].up = false;
    group_home_peer_lost(node, peer);
    group_standing_peer_lost(node, peer);
    group_member_peer_lost(node, peer, reason);
    group_lead_look_for_homes(node, GROUP_MAX_NODES);
    group_turn(node);
}

void group_node_leave(struct group_node *node, uint64_t now_ms)
{
    node->now_ms = now_ms;
    node->leaving = true;
    group_member_leave(node);
    group_turn(node);
}

/* ------------------------------------------------------------------ entry points that only say something */

void group_node_tick(struct group_node *node, uint64_t now_ms)
{
    node->now_ms = now_ms;
    group_home_tick(node);
    group_lead_tick(node);
    group_member_tick(node);
    group_turn(node);
}

void group_node_dropped(struct group_node *node, uint32_t peer, uint64_t request, uint64_t now_ms)
{
    Mok__GroupDropped body = MOK__GROUP_DROPPED__INIT;
    Mok__GroupMessage message = group_message(dropped, DROPPED, &body);

    node->now_ms = now_ms;
    body.request = request;
    group_send(node, peer, &message);
    group_turn(node);
}
