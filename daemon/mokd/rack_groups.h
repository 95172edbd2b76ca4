/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups over nodes at work: the state machines of daemon/rack on one side, this node's groups, the mesh and the links
 * to daemons of the same host on the other. Everything is a no-op where mokd is in no rack.
 */
#ifndef MOKD_RACK_GROUPS_H
#define MOKD_RACK_GROUPS_H

#include "group.h"
#include "rack/group_node.h"
#include "rack/rack.h"
#include "span.h"

struct mokd_rack_groups;

/* After the mesh has started, which is given mokd_rack_groups_handlers with the server as cookie. */
int mokd_rack_groups_start(struct mokd_server *server, struct mokd_error *error);
/* The mesh has said goodbye. */
void mokd_rack_groups_leave(struct mokd_server *server);
/* Before the mesh stops. */
void mokd_rack_groups_stop(struct mokd_server *server);
extern const struct rack_handlers mokd_rack_groups_handlers;

/* ------------------------------------------------------------------ for group.c and its kin */

/* A rank waits for ranks on other nodes too. */
int mokd_rack_join(struct mokd_member *member, const Mok__GroupJoin *request, struct mokd_error *error);
/* A rank of the user's is not let in here: the others, if they wait, are told. */
void mokd_rack_decline(const struct mokd_session *session, const char *name, uint32_t rank,
                       const struct mokd_error *error);
/* It waits no more; `error`: nor can the others come together. */
void mokd_rack_withdraw(struct mokd_member *member, const struct mokd_error *error);
int mokd_rack_call(struct mokd_member *member, uint64_t index, const struct group_params *params, uint64_t timeout_ms);
/* The group is over, because of a rank, which is ours unless another node has said so already. */
void mokd_rack_over(struct mokd_group *group, uint32_t rank, const char *text);
void mokd_rack_forget(struct mokd_group *group);
/* Other nodes let go of a rank's copy (buffer 0: of all), as part of `gather`. */
void mokd_rack_drop(struct mokd_group *group, uint32_t rank, uint32_t buffer, struct mokd_gather *gather);
void mokd_rack_layer_gone(struct mokd_group *group, uint32_t layer, uint32_t rank);

/* ------------------------------------------------------------------ for status.c */

/* NULL: in no rack. */
const struct group_node *mokd_rack_node(const struct mokd_server *server);

/* ------------------------------------------------------------------ for span.c */

uint64_t mokd_rack_now_ms(void);
bool mokd_rack_is_self(const struct mokd_server *server, uint32_t node);
const char *mokd_rack_name(const struct mokd_server *server, uint32_t node);
const char *mokd_rack_own_name(const struct mokd_server *server);
void mokd_rack_prepared(struct mokd_group *group, uint64_t index, const struct group_error *error);
uint32_t mokd_rack_self(const struct mokd_server *server);
/* How memory can get to a node: as descriptors, as fabric handles if the devices have them, not at all. */
enum mokd_path { MOKD_PATH_UNKNOWN = 0, MOKD_PATH_LOCAL, MOKD_PATH_FABRIC, MOKD_PATH_NONE };
/* Of the last two, `why` says why the ones before are none. */
enum mokd_path mokd_rack_path(struct mokd_server *server, uint32_t node, struct mokd_error *why);
/* Gives a node `own`, which `handle` is about. -MOK_E* when it cannot be handed over. */
int mokd_rack_hand(struct mokd_server *server, uint32_t node, const Mok__Handle *handle, const struct mokd_handle *own);

#endif
