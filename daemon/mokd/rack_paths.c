/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How memory gets to other nodes: as descriptors by a local socket where they are on this host, which is tried with
 * each that is up; else as fabric handles by the mesh, where both are in one link domain and the devices have such
 * handles.
 */
#include <stdio.h>
#include <string.h>

#include "rack/frame.h"
#include "rack_groups_internal.h"

/* A peer that is not on this host is asked again now and then: a path may have become visible. */
#define OFFER_AGAIN_MS 10000u

/* ------------------------------------------------------------------ links to daemons of the same host */

void mokd_rack_look_at_groups(struct mokd_rack_groups *groups)
{
    uint64_t now_ms = mokd_rack_now_ms();

    for (struct mokd_group *group = NULL; (group = mokd_group_walk(groups->server, group));)
        if (group->span)
            mokd_span_look(group, now_ms);
}

static void link_up(void *cookie, uint32_t node)
{
    struct mokd_rack_groups *groups = cookie;

    groups->peer[node].refusal[0] = '\0';
    mok_log(MOK_LOG_INFO, "rack", "node is on this host", "node=%s", group_node_name(&groups->node, node));
    mokd_rack_look_at_groups(groups);
}

/* Before the mesh knows of it, or at the same time. */
static void end_groups_of(struct mokd_rack_groups *groups, uint32_t node, const char *reason)
{
    char text[2 * RACK_MAX_TEXT];

    for (struct mokd_group *group = NULL; (group = mokd_group_walk(groups->server, group));) {
        for (uint32_t rank = 0; group->span && rank < group->size; rank++) {
            if (group->span->roster->rank[rank].node != node)
                continue;
            snprintf(text, sizeof(text), "rank %u is gone: node %s %s", rank, group_node_name(&groups->node, node),
                     reason);
            mokd_group_fail(group, rank, text);
            break;
        }
    }
}

/* A daemon that dies closes it before its heartbeats are missed. */
static void link_down(void *cookie, uint32_t node, const char *reason)
{
    char text[RACK_MAX_TEXT];

    snprintf(text, sizeof(text), "was lost: %s", reason);
    end_groups_of(cookie, node, text);
}

static void link_left(void *cookie, uint32_t node, Mok__GoodbyeReason reason)
{
    struct mokd_rack_groups *groups = cookie;
    char text[RACK_MAX_TEXT], why[RACK_MAX_TEXT];

    rack_goodbye_text(reason, group_node_name(&groups->node, node), group_node_name(&groups->node, groups->node.self),
                      why);
    snprintf(text, sizeof(text), "%s: %.230s", reason == MOK__GOODBYE_REASON__GOODBYE_LOST ? "was lost" : "has left",
             why);
    end_groups_of(groups, node, text);
}

void mokd_rack_unlink(struct mokd_rack_groups *groups, uint32_t node, Mok__GoodbyeReason reason)
{
    struct rack_node_info info;

    if (rack_info(groups->server->rack, node, &info) == 0 && info.protocol >= RACK_PROTOCOL_GOODBYE)
        mokd_host_goodbye(groups->links, node, reason);
    mokd_host_forget(groups->links, node);
}

/* Takes the descriptor. */
static void take_handle(struct mokd_rack_groups *groups, uint32_t node, const Mok__Handle *handle, int fd)
{
    struct mokd_group *group = mokd_rack_find_group(groups->server, handle->group);
    struct mokd_foreign what = {
        .kind = handle->kind,
        .object = handle->object,
        .rank = handle->rank,
        .bytes = handle->bytes,
        .fd = fd,
        .by_fabric = fd < 0 && handle->fabric.len == MOKD_FABRIC_BYTES,
        .across = handle->across || fd < 0,
    };

    if (what.by_fabric)
        memcpy(what.fabric, handle->fabric.data, MOKD_FABRIC_BYTES);
    if (group && what.rank < group->size && group->span->roster->rank[what.rank].node == node)
        mokd_span_handle(group, &what);
    else if (group)
        mok_close(fd);
    else
        mokd_early_keep(&groups->early, node, handle->group, &what);
}

static void link_handle(void *cookie, uint32_t node, const Mok__Handle *handle, int fd)
{
    take_handle(cookie, node, handle, fd);
}

const struct mokd_host_handlers mokd_rack_host_handlers = {
    .up = link_up,
    .down = link_down,
    .left = link_left,
    .handle = link_handle,
};

/* Of two nodes the one whose name comes first offers, the other connects. */
static bool offers(const struct mokd_rack_groups *groups, uint32_t node)
{
    return strcmp(group_node_name(&groups->node, groups->node.self), group_node_name(&groups->node, node)) < 0;
}

void mokd_rack_offer(struct mokd_rack_groups *groups, uint32_t node)
{
    Mok__GroupHostOffer body = MOK__GROUP_HOST_OFFER__INIT;
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    uint8_t token[HOST_TOKEN_BYTES];
    const char *path;
    struct rack_groups_peer *peer = &groups->peer[node];
    uint64_t now_ms = mokd_rack_now_ms();

    if (!offers(groups, node) || mokd_host_is_linked(groups->links, node) ||
        (peer->refusal[0] && now_ms - peer->offered_ms < OFFER_AGAIN_MS))
        return;
    peer->offered_ms = now_ms;
    mokd_host_offer(groups->links, node, group_node_name(&groups->node, node), &path, token);
    body.path = (char *)path;
    body.token = (ProtobufCBinaryData){ .len = sizeof(token), .data = token };
    message.body_case = MOK__GROUP_MESSAGE__BODY_HOST_OFFER;
    message.host_offer = &body;
    mokd_rack_send(groups, node, &message);
}

static void offered(struct mokd_rack_groups *groups, uint32_t node, const Mok__GroupHostOffer *message)
{
    Mok__GroupHostRefused body = MOK__GROUP_HOST_REFUSED__INIT;
    Mok__GroupMessage answer = MOK__GROUP_MESSAGE__INIT;
    struct rack_groups_peer *peer = &groups->peer[node];
    struct mokd_error error;

    if (offers(groups, node) || mokd_host_is_linked(groups->links, node))
        return;
    if (mokd_host_accept_offer(groups->links, node, message->path, message->token.data, message->token.len, &error) ==
        0)
        return;
    snprintf(peer->refusal, sizeof(peer->refusal), "not on one host (%.200s)", error.text);
    body.text = peer->refusal;
    answer.body_case = MOK__GROUP_MESSAGE__BODY_HOST_REFUSED;
    answer.host_refused = &body;
    mokd_rack_send(groups, node, &answer);
    mokd_rack_look_at_groups(groups);
}

uint32_t mokd_rack_self(const struct mokd_server *server)
{
    return server->rack_groups->node.self;
}

enum mokd_path mokd_rack_path(struct mokd_server *server, uint32_t node, struct mokd_error *why)
{
    struct mokd_rack_groups *groups = server->rack_groups;
    struct rack_node_info self, other;

    if (mokd_host_is_linked(groups->links, node))
        return MOKD_PATH_LOCAL;
    if (!groups->peer[node].refusal[0])
        return MOKD_PATH_UNKNOWN;
    if (rack_info(server->rack, groups->node.self, &self) == 0 && rack_info(server->rack, node, &other) == 0 &&
        self.link_domain[0] && strcmp(self.link_domain, other.link_domain) == 0) {
        mokd_error_set(why, -MOK_ENOTSUP, "%s", groups->peer[node].refusal);
        return MOKD_PATH_FABRIC;
    }
    mokd_error_set(why, -MOK_ENOTSUP, "%s, and they are in no common link domain", groups->peer[node].refusal);
    return MOKD_PATH_NONE;
}

int mokd_rack_hand(struct mokd_server *server, uint32_t node, const Mok__Handle *handle, const struct mokd_handle *own)
{
    struct mokd_rack_groups *groups = server->rack_groups;
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__Handle body = *handle;

    if (mokd_host_is_linked(groups->links, node))
        return mokd_host_hand(groups->links, node, handle, own->fd);
    if (handle->kind != MOK__HANDLE_KIND__HANDLE_BELL) { /* nobody rings there */
        if (!own->fabric)
            return -MOK_EPEER;
        body.fabric = (ProtobufCBinaryData){ .len = MOKD_FABRIC_BYTES, .data = (uint8_t *)own->fabric };
    }
    message.body_case = MOK__GROUP_MESSAGE__BODY_HANDLE;
    message.handle = &body;
    mokd_rack_send(groups, node, &message);
    return 0;
}

/* By the mesh: of memory a fabric handle, of a bell nothing. */
static void handle_came(struct mokd_rack_groups *groups, uint32_t node, const Mok__Handle *handle)
{
    if (group_handle_is_sound(handle))
        take_handle(groups, node, handle, -1);
    else
        mok_log(MOK_LOG_WARNING, "rack", "handle is malformed", "node=%s kind=%u bytes=%zu",
                group_node_name(&groups->node, node), handle->kind, handle->fabric.len);
}

bool mokd_rack_paths_message(struct mokd_rack_groups *groups, uint32_t node, const Mok__GroupMessage *message)
{
    char clean[200];

    switch (message->body_case) {
    case MOK__GROUP_MESSAGE__BODY_HOST_OFFER:
        offered(groups, node, message->host_offer);
        return true;
    case MOK__GROUP_MESSAGE__BODY_HOST_REFUSED:
        snprintf(groups->peer[node].refusal, sizeof(groups->peer[node].refusal), "%s",
                 mok_log_text(clean, sizeof(clean), message->host_refused->text));
        mokd_rack_look_at_groups(groups);
        return true;
    case MOK__GROUP_MESSAGE__BODY_HANDLE:
        handle_came(groups, node, message->handle);
        return true;
    default:
        return false;
    }
}
