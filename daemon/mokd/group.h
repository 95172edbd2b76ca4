/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Groups: the ranks of one job that share experts. Names belong to a user.
 *
 *   FORMING --all ranks joined--> OPENING --all workers know it--> READY
 *                                    |                               |
 *                                    +--- a rank or worker goes -----+--> FAILED --all left--> gone
 *
 *   SUSPENDED (of the mokd before) --all ranks want it again, all workers know it--> READY
 *                                  --a rank does not come back----------------> FAILED
 *
 * In a rack a rank that finds the others missing here waits for ranks on other nodes as well; where all ranks turn out
 * to be here, no other node has a part in it. Else the group has a span (span.h).
 *
 * A group never gets a rank back: once FAILED, its name is free and its ranks can only leave. A rank that goes while
 * the group is FORMING just makes room.
 */
#ifndef MOKD_GROUP_H
#define MOKD_GROUP_H

#include "device.h"
#include "session.h"

struct mokd_collective;
struct mokd_layer;
struct mokd_span;

enum mokd_group_state {
    MOKD_GROUP_FORMING,
    MOKD_GROUP_OPENING,
    MOKD_GROUP_READY,
    MOKD_GROUP_FAILED,
    MOKD_GROUP_SUSPENDED,
};

/* What the ranks make together. */
struct mokd_job {
    uint64_t index; /* of the call: 1, 2, ... */
    uint32_t id;    /* of the new thing */
};

struct mokd_member {
    TAILQ_ENTRY(mokd_member) link; /* of the session's ranks */
    struct mokd_group *group;
    struct mokd_session *session;
    struct mokd_device *device;
    uint32_t rank;
    struct mokd_call join, leave;
    struct mokd_timer *deadline; /* of the join */
    uint64_t timeout_ms;
    uint64_t rack_join; /* FORMING: of its wait for ranks on other nodes; 0: none */
    uint64_t next_collective;          /* index of its next collective call */
    TAILQ_HEAD(, mokd_buffer) buffers; /* its copies of symmetric buffers */
    bool opened;                       /* its worker was told of the group */
    bool leaving;
    bool going; /* being taken down at the workers */
    struct mokd_gather gather;
};

struct mokd_group {
    TAILQ_ENTRY(mokd_group) link;
    struct mokd_server *server;
    uint32_t id;
    uid_t uid;
    char name[MOK_MAX_NAME + 1];
    bool exclusive; /* it has the devices of its ranks alone */
    enum mokd_group_state state;
    char failure[MOKD_TEXT_MAX];
    uint32_t fault_rank;
    const struct mokd_device *lost; /* whose worker died, when that is the failure */
    unsigned running;               /* changes at the workers that are under way: nobody is taken down meanwhile */
    TAILQ_HEAD(, mokd_collective) collectives; /* in the order of their first call */
    uint64_t n_collectives;                    /* that some rank has come to */
    TAILQ_HEAD(, mokd_layer) layers;
    struct mokd_gather gather; /* of OPENING */
    struct mokd_span *span;    /* span.h: ranks are on other nodes too; NULL: all are here */
    uint32_t size, joined;     /* joined: here */
    struct mokd_member *member[]; /* [size]; NULL: not there, or on another node */
};

void mokd_group_join(struct mokd_session *session, uint64_t id, const Mok__GroupJoin *request);
void mokd_group_leave(struct mokd_session *session, uint64_t id, const Mok__GroupLeave *request);

/* The rank that a session is in a group; fails with MOK_ENOENT, or with why the group has failed. */
int mokd_member_find(const struct mokd_session *session, uint32_t group, struct mokd_member **ret,
                     struct mokd_error *error);
/* What a rank of a failed group is told. */
void mokd_member_failure(const struct mokd_member *member, struct mokd_error *error);

/* A change at the workers begins and ends. The end may take down ranks that wait to leave, and free the group. */
void mokd_group_run_begin(struct mokd_group *group);
void mokd_group_run_end(struct mokd_group *group);
/*
 * The group behind `group`, or with NULL the first; NULL: that was the last. A walk to its end holds each group while
 * it is looked at, and the next one before it lets go: whatever ends meanwhile, the walk goes on.
 */
struct mokd_group *mokd_group_walk(struct mokd_server *server, struct mokd_group *group);
/* A group of the mokd before, with its id; ranks are added in any order. NULL: out of memory. */
struct mokd_group *mokd_group_adopt(struct mokd_server *server, uint32_t id, uid_t uid, const char *name,
                                    uint32_t size);
struct mokd_member *mokd_member_adopt(struct mokd_group *group, struct mokd_session *session,
                                      struct mokd_device *device, uint32_t rank);
/* Tells all workers of the group, as part of `gather`; tags are ranks. */
void mokd_group_send_open(struct mokd_group *group, struct mokd_gather *gather);
/* All its ranks have come, on several nodes; takes the span. May free the group. */
void mokd_group_come_together(struct mokd_group *group, struct mokd_span *span);
/* A join is refused. May free the group. */
void mokd_group_join_failed(struct mokd_member *member, const struct mokd_error *error);
/* Fails it for a reason that is no rank's end, or that another node has found. May free the group. */
void mokd_group_fail(struct mokd_group *group, uint32_t rank, const char *text);
/* The client of a rank that is suspended does not know it. */
void mokd_member_drop(struct mokd_member *member);

/* restore.c: brings a suspended group back once all its ranks want it. */
void mokd_group_restore(struct mokd_group *group);

/* A FORMING group: all its ranks' joins end with the error. */
void mokd_group_turn_away(struct mokd_group *group, const struct mokd_error *error);
bool mokd_group_has_rank_on(const struct mokd_group *group, const struct mokd_device *device);
/* Frees a group that nobody is in any more. */
void mokd_group_collect(struct mokd_group *group);

/* Session ends: joins are withdrawn and groups fail at once; later, when its calls have ended, its ranks leave. */
void mokd_members_fail(struct mokd_session *session);
void mokd_members_leave(struct mokd_session *session);

/* The worker of a device is dead, or complains of a group. */
void mokd_groups_device_lost(struct mokd_device *device, const char *text);
void mokd_group_broken(struct mokd_device *device, uint32_t group, int code, uint32_t rank, const char *text);

const char *mokd_group_state_text(enum mokd_group_state state);

#endif
