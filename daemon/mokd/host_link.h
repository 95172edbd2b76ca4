/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Links between the daemons of one host, over which descriptors travel. That two daemons are on one host is shown, not
 * believed: one offers a path and a token over the mesh, which only the right peer can read; the other connects to the
 * path and gives the token back. A path socket reaches nobody on another host, whatever the namespaces of the network.
 * The kernel says who is at the other end: root, or the user that mokd itself is.
 */
#ifndef MOKD_HOST_LINK_H
#define MOKD_HOST_LINK_H

#include "error.h"
#include "rack_groups.pb-c.h"
#include "wire.h"

#define HOST_TOKEN_BYTES 32u

struct mokd_host_links;

struct mokd_host_handlers {
    void (*up)(void *cookie, uint32_t node);
    /* After `up` one of these two: the link broke, or was closed without a word; or the peer said why it ends it. */
    void (*down)(void *cookie, uint32_t node, const char *reason);
    void (*left)(void *cookie, uint32_t node, Mok__GoodbyeReason reason);
    /* The descriptor is the handler's. */
    void (*handle)(void *cookie, uint32_t node, const Mok__Handle *handle, int fd);
};

/* Listens at `path`. */
int mokd_host_links_new(struct mokd_server *server, const char *path, const char *self,
                        const struct mokd_host_handlers *handlers, void *cookie, struct mokd_host_links **ret,
                        struct mokd_error *error);
/* Calls nobody any more; its memory goes when the loop has turned. NULL is fine. */
void mokd_host_links_free(struct mokd_host_links *links);

/* What a node is to be offered: who connects within reach of the path with this token is that node. */
void mokd_host_offer(struct mokd_host_links *links, uint32_t node, const char *name, const char **ret_path,
                     uint8_t ret_token[static HOST_TOKEN_BYTES]);
/* A peer has offered: connects. -MOK_E* and a sentence: why it is not on this host. */
int mokd_host_accept_offer(struct mokd_host_links *links, uint32_t node, const char *path, const uint8_t *token,
                           size_t token_bytes, struct mokd_error *error);
bool mokd_host_is_linked(const struct mokd_host_links *links, uint32_t node);
/*
 * The last word to a peer, behind all that was handed to it: so it knows why, whichever it sees first, the end of the
 * link or what the mesh says. Nothing where there is no link.
 */
void mokd_host_goodbye(struct mokd_host_links *links, uint32_t node, Mok__GoodbyeReason reason);
/* The peer is lost, or leaves. */
void mokd_host_forget(struct mokd_host_links *links, uint32_t node);
int mokd_host_hand(struct mokd_host_links *links, uint32_t node, const Mok__Handle *handle, int fd);

#endif
