/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an administrator asks of another node's devices: carried there by the mesh, and the answer back. That he is one
 * is settled on his own node; whoever has a node's key may order what that node may.
 */
#ifndef MOKD_RACK_ORDERS_H
#define MOKD_RACK_ORDERS_H

#include "session.h"

struct rack;
struct mokd_rack_orders;

/* -MOK_ENOMEM. Nothing where mokd is in no rack. */
int mokd_rack_orders_start(struct mokd_server *server, struct mokd_error *error);
/* Whoever waits for an answer is told that none comes. */
void mokd_rack_orders_stop(struct mokd_server *server);

/* request->on names a node. Answered with its devices; a negative return: not begun, with the sentence. */
int mokd_rack_order(struct mokd_session *session, uint64_t id, const Mok__Drain *request, struct mokd_error *error);

/* What the mesh says. False: the message is none of these. */
bool mokd_rack_orders_message(struct mokd_server *server, uint32_t node, const Mok__RackFrame *frame);
void mokd_rack_orders_peer_down(struct mokd_server *server, uint32_t node, const char *why);

#endif
