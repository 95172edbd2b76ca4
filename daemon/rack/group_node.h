/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups whose ranks are on several nodes, as the daemon of one node takes part in them. Pure state machines: no input
 * or output, no clock of its own, nothing of libuv or ZeroMQ, so that a simulator can run a whole rack of them.
 * All memory that grows is bounded; without memory a request is refused and nothing else is touched.
 *
 *   group_home.c    the rendezvous: joins of one (user, name) meet at the daemon that the name's hash chooses
 *   group_standing.c  there too: the names of groups that have formed, so that a rank of them is known to be taken
 *   group_lead.c    the daemon of rank 0 drives what the ranks do together: agree, prepare, commit or abort
 *   group_member.c  what this node's ranks wait for; the group is over for all as soon as it is for one
 *
 * A home is any node that lives, perhaps without a rank of the group; so it only brings the ranks together, and a
 * group that has formed does not notice its end: the lead tells the next one that the group stands. The lead's node has
 * rank 0, whose loss is the group's end anyway.
 *
 * The mesh brings messages in the order in which a node sent them, each once, while it is up; between two nodes'
 * messages there is no order. A node that was down and is up again has nothing to do with what was before.
 */
#ifndef MOK_RACK_GROUP_NODE_H
#define MOK_RACK_GROUP_NODE_H

#include <sys/queue.h>

#include "group_agree.h"
#include "rack_groups.pb-c.h"

#define GROUP_MAX_NODES 128u
#define GROUP_PREPARE_MS 60000u /* for a node's part of a collective call, however large its memory */
#define GROUP_MAX_MEETINGS 4096u
#define GROUP_MAX_STANDINGS 4096u
#define GROUP_TAKEN_MS 500u       /* after so long a group is thought to stand as its home says */
#define GROUP_ID_FLAG 0x80000000u /* in ids that nodes have in common; a node's own ones are below it */

#define GROUP_REASON_MAX 120u
#define GROUP_FABRIC_BYTES 64u /* of a fabric handle */

/* A rank of a group that has formed. */
struct group_rank {
    uint32_t node;
    uint32_t device, kind;
    uint64_t session, join;
    bool fabric;                          /* its device's memory can be had by fabric handles */
    char no_fabric[GROUP_REASON_MAX + 1]; /* why not */
};

/* Which group, and who is in it; the same on all its nodes. */
struct group_roster {
    uint32_t id, uid, size;
    bool kept; /* the home wants to know when it is over */
    char name[MOK_MAX_NAME + 1];
    struct group_rank rank[]; /* [size] */
};

/* A join as the client asked for it. */
struct group_joining {
    uint32_t uid;
    const char *user; /* "": not known */
    const char *name;
    uint32_t size, rank, device, kind;
    uint64_t session, timeout_ms;
    bool exclusive;
    bool fabric;
    const char *no_fabric;
};

/*
 * What the daemon is to do. Called as the last thing of an entry point, so each may call back in; pointers live until
 * it returns. A collective call goes: prepare -> group_node_prepared -> verdict; or at once verdict, where the
 * ranks do not agree or one gave up waiting (only those that have called so far are meant; later ones are told anew).
 */
struct group_ops {
    /* To another node that is up; never to this one. */
    void (*send)(void *cookie, uint32_t node, const Mok__GroupMessage *message);
    /* A join of this node is refused. */
    void (*refused)(void *cookie, uint64_t join, const struct group_error *error);
    /* All ranks have come. The roster is the group's until it is forgotten. Prepare the opening (index 0). */
    void (*open)(void *cookie, const struct group_roster *roster);
    void (*prepare)(void *cookie, uint32_t group, uint64_t index, uint32_t kind, uint32_t object);
    /* code 0: commit. Comes once for each prepare, after group_node_prepared or (an abort) before it. */
    void (*verdict)(void *cookie, uint32_t group, uint64_t index, const struct group_error *error);
    /* The group is over. No verdict of it comes any more: whatever waits for one has this as its abort. */
    void (*over)(void *cookie, uint32_t group, const struct group_error *error);
    /* Let go of that copy, then group_node_dropped(node, request). */
    void (*drop)(void *cookie, uint32_t node, uint64_t request, uint32_t group, uint32_t rank, uint32_t buffer);
    void (*dropped)(void *cookie, uint32_t node, uint64_t request);
    void (*layer_gone)(void *cookie, uint32_t group, uint32_t layer, uint32_t rank);
    /* Why this node does not reach another: "lost: not heard for 900 ms". */
    void (*unreached)(void *cookie, const char *name, char *ret, size_t size);
    /* Why ranks elsewhere may meet at another home: "node a does not reach node b (lost)"; "": none is known. */
    void (*apart)(void *cookie, char *ret, size_t size);
    /* Whether this node has an object of that id. */
    bool (*id_is_taken)(void *cookie, uint32_t id);
};

struct group_meeting;
struct group_standing;
struct group_lead;
struct group_member;
struct group_join;
struct group_drop;
struct group_letter;

struct group_peer {
    bool known, up;
    char name[MOK_MAX_NAME + 1];
};

struct group_node {
    const struct group_ops *ops;
    void *cookie;
    uint64_t now_ms; /* of the entry point that runs */
    uint32_t self;
    struct group_peer peer[GROUP_MAX_NODES];
    uint64_t last_join;
    uint32_t last_id; /* the part that counts */
    size_t n_meetings, n_standings;
    bool ids_wrapped;
    bool turning, leaving;
    TAILQ_HEAD(, group_meeting) meetings;   /* group_home.c */
    TAILQ_HEAD(, group_standing) standings; /* group_standing.c: the oldest first */
    TAILQ_HEAD(, group_lead) leads;         /* group_lead.c */
    TAILQ_HEAD(, group_member) members;     /* group_member.c */
    TAILQ_HEAD(, group_join) joins;         /* group_member.c: this node's, not formed yet */
    TAILQ_HEAD(, group_drop) drops;         /* group_member.c: what others were asked to let go of */
    TAILQ_HEAD(, group_letter) letters;     /* to this node itself */
};

void group_node_init(struct group_node *node, const struct group_ops *ops, void *cookie, uint32_t self,
                     const char *name);
/* Forgets everything without a word. */
void group_node_release(struct group_node *node);

/* ------------------------------------------------------------------ the rack */

void group_node_peer_up(struct group_node *node, uint32_t peer, const char *name, uint64_t now_ms);
/* Lost, restarted, removed, or gone in order. `reason` is for people: "was lost: no heartbeat for 900 ms". */
void group_node_peer_lost(struct group_node *node, uint32_t peer, const char *reason, uint64_t now_ms);
/* This node stops: no answer of others is waited for any more. */
void group_node_leave(struct group_node *node, uint64_t now_ms);
/* What a peer that is up has sent. */
void group_node_receive(struct group_node *node, uint32_t peer, const Mok__GroupMessage *message, uint64_t now_ms);
/* Deadlines; often enough is four times a second. */
void group_node_tick(struct group_node *node, uint64_t now_ms);
const char *group_node_name(const struct group_node *node, uint32_t peer);

/* ------------------------------------------------------------------ this node's ranks */

/* A rank waits for the others. -MOK_ENOMEM; else refused or open follows. */
int group_node_join(struct group_node *node, const struct group_joining *joining, uint64_t now_ms, uint64_t *ret_join);
/* It waits no more. With an error, the ranks cannot come together and the others are told so. */
void group_node_withdraw(struct group_node *node, uint64_t join, const struct group_error *error, uint64_t now_ms);

/*
 * A rank that wanted to join is not let in, and will not be for a while: the others, if they wait, are told so instead
 * of waiting for it.
 */
void group_node_decline(struct group_node *node, uint32_t uid, const char *name, uint32_t rank,
                        const struct group_error *error, uint64_t now_ms);

/* The next collective call (1, 2, ...) of a rank. -MOK_ENOMEM; -MOK_ENOENT when the group is over. */
int group_node_call(struct group_node *node, uint32_t group, uint32_t rank, uint64_t index,
                    const struct group_params *params, uint64_t timeout_ms, uint64_t now_ms);
/* This node's part is done, or failed. */
void group_node_prepared(struct group_node *node, uint32_t group, uint64_t index, const struct group_error *error,
                         uint64_t now_ms);
/* A rank of this node is gone, or finds that the group cannot go on. Others are told; this node is not. */
void group_node_over(struct group_node *node, uint32_t group, uint32_t rank, const char *text, uint64_t now_ms);
/* No rank of this node is in the group any more. */
void group_node_forget(struct group_node *node, uint32_t group);

/* The other nodes are to let go of a rank's copy of a buffer (0: of all). Returns how many will answer `dropped`. */
uint32_t group_node_drop(struct group_node *node, uint32_t group, uint32_t rank, uint32_t buffer, uint64_t request,
                         uint64_t now_ms);
void group_node_dropped(struct group_node *node, uint32_t peer, uint64_t request, uint64_t now_ms);
void group_node_layer_gone(struct group_node *node, uint32_t group, uint32_t layer, uint32_t rank, uint64_t now_ms);

/* Whether a handle that came by the mesh is one: of memory by the fabric, of a bell nothing. */
bool group_handle_is_sound(const Mok__Handle *handle);

/* The node where the joins of a name meet, of those that are up. */
uint32_t group_node_home(const struct group_node *node, uint32_t uid, const char *name);

/* ------------------------------------------------------------------ what meets here, for people to look at */

struct group_gathering {
    const struct group_meeting *meeting;
    const char *name;
    uint32_t uid, size, joined;
};
/* Of a name whose home is this node, until all its ranks have come. False: none. Valid until the node is called. */
bool group_gathering_find(const struct group_node *node, uint32_t uid, const char *name, struct group_gathering *ret);
/* The one behind `gathering`, or with meeting NULL the first. False: that was the last. */
bool group_gathering_next(const struct group_node *node, struct group_gathering *gathering);
/* False: this rank has not come. */
bool group_gathering_rank(const struct group_gathering *gathering, uint32_t rank, uint32_t *ret_node,
                          uint32_t *ret_device, uint64_t *ret_session);

/* How many objects it holds: for tests that look for growth. */
size_t group_node_count(const struct group_node *node);

#endif
