/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What rack_groups.c (what the state machines ask for, the mesh), rack_outbox.c (what goes to other nodes),
 * rack_paths.c (how memory gets there) and rack_reach.c (who is apart from this node) share. Nothing else includes
 * this.
 */
#ifndef MOKD_RACK_GROUPS_INTERNAL_H
#define MOKD_RACK_GROUPS_INTERNAL_H

#include "host_link.h"
#include "rack_early.h"
#include "rack_groups.h"

/* A message that waits for the mesh. */
struct parcel {
    TAILQ_ENTRY(parcel) link;
    size_t size;
    uint8_t bytes[];
};

struct rack_groups_peer {
    char refusal[256]; /* why it is not on this host; "": not known */
    uint64_t offered_ms;
    TAILQ_HEAD(, parcel) backlog;
    size_t backlog_bytes;
    const char *gap; /* why a message did not even get into the backlog; NULL: all did */
};

struct mokd_rack_groups {
    struct mokd_server *server;
    struct group_node node;
    uv_timer_t tick;
    struct mokd_host_links *links;
    struct rack_groups_peer peer[GROUP_MAX_NODES];
    struct mokd_early_list early;
    TAILQ_HEAD(, dropping) dropping;
    uint64_t last_request;
};

/* rack_groups.c */
struct mokd_group *mokd_rack_find_group(const struct mokd_server *server, uint32_t id);

/* rack_outbox.c */
void mokd_rack_send(void *cookie, uint32_t node, const Mok__GroupMessage *message); /* as group_ops.send */
void mokd_rack_outbox_flush(struct mokd_rack_groups *groups, uint32_t node);        /* there is room again */
void mokd_rack_outbox_clear(struct mokd_rack_groups *groups, uint32_t node);
/* Nodes that miss a message are lost, on both sides; nothing has gone to them since. Not from within group_node. */
void mokd_rack_outbox_close_gaps(struct mokd_rack_groups *groups);

/* rack_reach.c: as group_ops.unreached and .apart */
void mokd_rack_unreached(const struct mokd_server *server, const char *name, char *ret, size_t size);
void mokd_rack_apart(const struct mokd_server *server, char *ret, size_t size);

/* rack_paths.c */
extern const struct mokd_host_handlers mokd_rack_host_handlers; /* the cookie: the groups */
/* A peer is up, or has not been found on this host for a while: it is asked, if that is ours to do. */
void mokd_rack_offer(struct mokd_rack_groups *groups, uint32_t node);
/* The link to a node of this host ends for that reason, which is said there if the node knows how to listen. */
void mokd_rack_unlink(struct mokd_rack_groups *groups, uint32_t node, Mok__GoodbyeReason reason);
/* True: the message was about paths and handles. */
bool mokd_rack_paths_message(struct mokd_rack_groups *groups, uint32_t node, const Mok__GroupMessage *message);
/* A path has come or gone, or time has passed. */
void mokd_rack_look_at_groups(struct mokd_rack_groups *groups);

#endif
