/* SPDX-License-Identifier: Apache-2.0 */
/* This mokd's place in the rack: starts and ends the mesh, takes over a new inventory, answers who asks about it. */
#ifndef MOKD_RACK_NODE_H
#define MOKD_RACK_NODE_H

#include "error.h"
#include "server.h"

struct mokd_session;

/* Nothing when the configuration has no [rack]: then server->rack is NULL. */
int mokd_rack_start(struct mokd_server *server, struct mokd_error *error);
/* Tells the others, before anything else ends. */
void mokd_rack_leave(struct mokd_server *server);
void mokd_rack_stop(struct mokd_server *server);
/* Whether the mesh's thread has turned of late; the cookie is the server. For mokd_service_watch. */
bool mokd_rack_lives(void *cookie);
/* Swaps the rack's part of a configuration that was read again for ours. A sentence in `failure` when it goes on as it
 * was. */
void mokd_rack_reload(struct mokd_server *server, struct mokd_config *next, char *failure, size_t size);

void mokd_rack_query(struct mokd_session *session, uint64_t id);

#endif
