/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stands in for the mesh of daemon/rack/rack.h at link time: several nodes in one process and one thread, no sockets,
 * no clock. The test says when which message arrives, who loses whom, who restarts. Keeps the mesh's promises: in order
 * between two nodes, each once, nothing from before a loss.
 */
#ifndef FAKE_RACK_H
#define FAKE_RACK_H

#include "rack/rack.h"

struct fake_net;

struct fake_net *fake_net_new(uint64_t inventory_hash);
void fake_net_free(struct fake_net *net); /* and every rack on it */

/* A node; all nodes hold each other for UP at once, without a call of a handler. `link_domain` "": none. */
struct rack *fake_net_add(struct fake_net *net, const char *name, const char *link_domain,
                          const struct rack_handlers *handlers, void *cookie);

/* Messages under way; 0 is the one sent first. */
size_t fake_net_pending(const struct fake_net *net);
uint32_t fake_net_from(const struct fake_net *net, size_t i);
uint32_t fake_net_to(const struct fake_net *net, size_t i);
/* Delivers the oldest message of the pair that message i belongs to (so any i is a legal order). */
void fake_net_deliver(struct fake_net *net, size_t i);
/* Delivers oldest first until nothing is under way; aborts after `limit` messages. Returns how many. */
size_t fake_net_run(struct fake_net *net, size_t limit);

/* a and b lose each other, as both sides of the mesh do; what is under way between them is gone. */
void fake_net_cut(struct fake_net *net, uint32_t a, uint32_t b);
/* They find each other again. */
void fake_net_heal(struct fake_net *net, uint32_t a, uint32_t b);
/* All others lose a node (kill -9); restart: they find it again with a new boot id. Its own handlers are not called. */
void fake_net_kill(struct fake_net *net, uint32_t node);
void fake_net_restart(struct fake_net *net, uint32_t node, const struct rack_handlers *handlers, void *cookie);
/* SUSPECT and back to UP, in the eyes of one. */
void fake_net_suspect(struct fake_net *net, uint32_t in_the_eyes_of, uint32_t node, bool suspect);
/* From now on sends from a to b are refused with -MOK_EAGAIN; lifting it calls drained. */
void fake_net_choke(struct fake_net *net, uint32_t a, uint32_t b, bool choke);

#endif
