/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages of groups on their way to other nodes: in order and without a gap, or the node counts as lost. What the mesh
 * has no room for waits here.
 */
#include "rack_groups_internal.h"

#include <string.h>

/* A peer for whom more waits is as good as lost. */
#define MAX_BACKLOG_BYTES (8u << 20)

static int send_now(struct mokd_rack_groups *groups, uint32_t node, const Mok__GroupMessage *message)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;

    frame.body_case = MOK__RACK_FRAME__BODY_GROUP;
    frame.group = (Mok__GroupMessage *)message;
    return rack_send(groups->server->rack, node, &frame, 0);
}

static void drop_first(struct rack_groups_peer *peer)
{
    struct parcel *parcel = TAILQ_FIRST(&peer->backlog);

    TAILQ_REMOVE(&peer->backlog, parcel, link);
    peer->backlog_bytes -= parcel->size;
    free(parcel);
}

void mokd_rack_outbox_clear(struct mokd_rack_groups *groups, uint32_t node)
{
    struct rack_groups_peer *peer = &groups->peer[node];

    while (!TAILQ_EMPTY(&peer->backlog))
        drop_first(peer);
    peer->gap = NULL;
}

/* NULL: sent, or it waits, or the peer is down, which we are told of. Else why it is not. */
static const char *judge(int r)
{
    return r == 0 || r == -MOK_EAGAIN || r == -MOK_EPEER || r == -MOK_ENOENT ? NULL
           : r == -MOK_ENOMEM                                                ? "mokd is out of memory"
                                                                             : "a message for it cannot be sent";
}

/* NULL: it waits. */
static const char *keep(struct rack_groups_peer *peer, const Mok__GroupMessage *message)
{
    size_t size = mok__group_message__get_packed_size(message);

    if (peer->backlog_bytes + size > MAX_BACKLOG_BYTES)
        return "it does not take what waits for it";
    struct parcel *parcel = malloc(sizeof(*parcel) + size);
    if (!parcel)
        return judge(-MOK_ENOMEM);
    parcel->size = mok__group_message__pack(message, parcel->bytes);
    TAILQ_INSERT_TAIL(&peer->backlog, parcel, link);
    peer->backlog_bytes += size;
    return NULL;
}

/* In the middle of what the state machines do, so that nobody can be lost here: see mokd_rack_outbox_close_gaps. */
void mokd_rack_send(void *cookie, uint32_t node, const Mok__GroupMessage *message)
{
    struct mokd_rack_groups *groups = cookie;
    struct rack_groups_peer *peer = &groups->peer[node];

    if (peer->gap)
        return;
    int r = TAILQ_EMPTY(&peer->backlog) ? send_now(groups, node, message) : -MOK_EAGAIN;
    peer->gap = r == -MOK_EAGAIN ? keep(peer, message) : judge(r);
}

void mokd_rack_outbox_flush(struct mokd_rack_groups *groups, uint32_t node)
{
    struct rack_groups_peer *peer = &groups->peer[node];
    struct parcel *parcel;

    while (!peer->gap && (parcel = TAILQ_FIRST(&peer->backlog))) {
        Mok__GroupMessage *message = mok__group_message__unpack(NULL, parcel->size, parcel->bytes);
        int r = message ? send_now(groups, node, message) : -MOK_ENOMEM;
        mok__group_message__free_unpacked(message, NULL);
        if (r == -MOK_EAGAIN)
            return;
        peer->gap = judge(r);
        drop_first(peer);
    }
}

void mokd_rack_outbox_close_gaps(struct mokd_rack_groups *groups)
{
    for (uint32_t node = 0; node < GROUP_MAX_NODES; node++) {
        const char *gap = groups->peer[node].gap;
        if (!gap)
            continue;
        mokd_rack_outbox_clear(groups, node);
        rack_lose(groups->server->rack, node, gap);
    }
}
