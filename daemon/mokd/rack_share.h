/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Users over the rack: each node tells the others what its users have and have used, and counts what they have
 * elsewhere against the limits and shares that it gives them here. A node that is not up counts for nothing. What two
 * nodes admit between two reports, neither knows of the other: a limit may be passed by that much, and holds again from
 * then on.
 */
#ifndef MOKD_RACK_SHARE_H
#define MOKD_RACK_SHARE_H

#include "rack.pb-c.h"
#include "user.h"

struct mokd_rack_share;

/* -MOK_ENOMEM. Nothing where mokd is in no rack, or tenants are each node's own. */
int mokd_rack_share_start(struct mokd_server *server, struct mokd_error *error);
void mokd_rack_share_stop(struct mokd_server *server);

/* What the mesh says. */
void mokd_rack_share_report(struct mokd_server *server, uint32_t node, const Mok__RackUse *report);
void mokd_rack_share_peer_up(struct mokd_server *server);
void mokd_rack_share_peer_down(struct mokd_server *server, uint32_t node);

/* An account or pool is new, or others are in it: what it has elsewhere. */
void mokd_rack_share_user(struct mokd_user *user);
void mokd_rack_share_pool(struct mokd_server *server, struct mokd_pool *pool);

#endif
