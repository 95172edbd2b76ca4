/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of a group_node share; see group_node.h for what each is. */
#ifndef MOK_RACK_GROUP_INTERNAL_H
#define MOK_RACK_GROUP_INTERNAL_H

#include "group_node.h"

/* To any node, this one too: then it is delivered by the same turn. Best effort: a lost peer gets nothing. */
void group_send(struct group_node *node, uint32_t peer, const Mok__GroupMessage *message);
/* The end of every entry point: delivers what the node has said to itself. */
void group_turn(struct group_node *node);
/* When a time-out that begins now is over; 0: never, which is what 0 asks for, and what nobody could live to see. */
static inline uint64_t group_deadline(const struct group_node *node, uint64_t timeout_ms)
{
    return timeout_ms == 0 || timeout_ms > UINT64_MAX / 2 ? 0 : node->now_ms + timeout_ms;
}
/* A new id for what nodes have in common. */
uint32_t group_next_id(struct group_node *node);
/* -MOK_ENOENT */
int group_find_peer(const struct group_node *node, const char *name, uint32_t *ret);

/* ------------------------------------------------------------------ group_home.c */

void group_home_joining(struct group_node *node, uint32_t peer, const Mok__GroupJoining *message);
void group_home_withdrawn(struct group_node *node, uint32_t peer, const Mok__GroupWithdrawn *message);
void group_home_peer_lost(struct group_node *node, uint32_t peer);
void group_home_tick(struct group_node *node);
void group_home_release(struct group_node *node);

/* ------------------------------------------------------------------ group_standing.c */

/* Takes the roster. There is none of that name yet. Where there are too many, the oldest is forgotten. */
void group_standing_keep(struct group_node *node, struct group_roster *roster);
const struct group_roster *group_standing_find(const struct group_node *node, uint32_t uid, const char *name);
void group_standing_forget(struct group_node *node, const struct group_roster *roster);
void group_standing_message(struct group_node *node, uint32_t peer, const Mok__GroupStanding *message);
void group_standing_peer_up(struct group_node *node);
void group_standing_peer_lost(struct group_node *node, uint32_t peer);
void group_standing_release(struct group_node *node);
/* To a home: a group of ours stands, or is over. Nothing where it is not kept. */
void group_tell_stands(struct group_node *node, uint32_t home, const struct group_roster *roster);
void group_tell_over(struct group_node *node, uint32_t home, const struct group_roster *roster);

/* ------------------------------------------------------------------ group_lead.c */

/* All ranks have come, says `formed`. -MOK_ENOMEM */
int group_lead_begin(struct group_node *node, uint32_t home, const struct group_roster *roster,
                     const Mok__GroupFormed *formed);
void group_lead_end(struct group_node *node, uint32_t group);
void group_lead_call(struct group_node *node, uint32_t peer, const Mok__GroupCall *message);
void group_lead_prepared(struct group_node *node, uint32_t peer, const Mok__GroupPrepared *message);
void group_lead_tick(struct group_node *node);
/* Homes may have changed; `returned` (or GROUP_MAX_NODES) knows nothing of what it was told before. */
void group_lead_look_for_homes(struct group_node *node, uint32_t returned);
void group_lead_release(struct group_node *node);
size_t group_lead_count(const struct group_node *node); /* and what they have under way */

/* ------------------------------------------------------------------ group_member.c */

void group_member_refused(struct group_node *node, uint32_t peer, const Mok__GroupRefused *message);
void group_member_formed(struct group_node *node, uint32_t peer, const Mok__GroupFormed *message);
void group_member_prepare(struct group_node *node, uint32_t peer, const Mok__GroupPrepare *message);
void group_member_verdict(struct group_node *node, uint32_t peer, const Mok__GroupVerdict *message);
void group_member_over(struct group_node *node, uint32_t peer, const Mok__GroupOver *message);
void group_member_dropped(struct group_node *node, uint32_t peer, const Mok__GroupDropped *message);
void group_member_drop(struct group_node *node, uint32_t peer, const Mok__GroupDrop *message);
void group_member_layer_gone(struct group_node *node, uint32_t peer, const Mok__GroupLayerGone *message);
void group_member_tick(struct group_node *node);
void group_member_peer_up(struct group_node *node, uint32_t peer);
void group_member_peer_lost(struct group_node *node, uint32_t peer, const char *reason);
void group_member_leave(struct group_node *node);
void group_member_release(struct group_node *node);
/* This node has ranks of it, and it is not over. */
bool group_member_lives(const struct group_node *node, uint32_t group);

/*
 * What a message says of a group, in this node's numbers; NULL: it makes no sense here, `error` says why. With
 * `strict`, all its nodes must be up; else one that is not counts as nobody's.
 */
struct group_roster *group_roster_of(const struct group_node *node, const Mok__GroupFormed *message, bool strict,
                                     struct group_error *error);
/* "node a does not reach node b (rank 1): lost: not heard for 900 ms" */
int group_unreached(const struct group_node *node, uint32_t rank, const char *name, struct group_error *error);
/* Whether any rank of a roster is on a node. */
bool group_roster_has(const struct group_roster *roster, uint32_t peer);

#define group_message(NAME, CASE, body_pointer)                                                                        \
    ((Mok__GroupMessage){ PROTOBUF_C_MESSAGE_INIT(&mok__group_message__descriptor),                                    \
                          MOK__GROUP_MESSAGE__BODY_##CASE,                                                             \
                          { .NAME = (body_pointer) } })

#endif
