/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a group has beside its own when some of its ranks are on other nodes. Where none are, group->span is NULL and
 * every function here answers at once, so that a change at the workers is written once for both.
 *
 * A change goes: memory made here -> mokd_span_exchange: handed to the other nodes, theirs are here -> mapped here ->
 * mokd_span_prepared: all nodes are done, or nobody is. When the group fails, whatever waits is called with that.
 */
#ifndef MOKD_SPAN_H
#define MOKD_SPAN_H

#include "device.h"
#include "group.h"
#include "rack/group_node.h"
#include "storage.h"

/*
 * How memory is found: by a descriptor on this host, by a fabric handle on another one of the link domain; often by
 * both.
 */
struct mokd_handle {
    int fd;                /* -1: none */
    const uint8_t *fabric; /* MOKD_FABRIC_BYTES; NULL: none */
};

/* A copy, bell, workspace or page of flags of a rank of another node. */
struct mokd_foreign {
    TAILQ_ENTRY(mokd_foreign) link;
    uint32_t kind; /* enum HandleKind */
    uint32_t object, rank;
    uint64_t bytes;
    int fd;      /* -1 once it is mapped here, or not wanted, or where it came by the fabric */
    bool by_fabric;
    uint8_t fabric[MOKD_FABRIC_BYTES];
    bool across; /* a bell's: its node has one of the group on another host */
    bool mapped; /* a buffer's: by our workers */
};

/* Something that waits for other nodes. */
struct mokd_wait {
    TAILQ_ENTRY(mokd_wait) link;
    enum { MOKD_WAIT_LINKS = 1, MOKD_WAIT_HANDLES, MOKD_WAIT_VERDICT } what;
    uint64_t index;  /* of the call that it is for; 0: the join */
    uint32_t kind, object; /* HANDLES */
    uint64_t since_ms;
    void (*done)(void *cookie, const struct mokd_error *error);
    void *cookie;
};

/* An abort that came before our own part was done. */
struct mokd_aborted {
    TAILQ_ENTRY(mokd_aborted) link;
    uint64_t index;
    struct mokd_error error;
};

/* A handle that is late is so by a moment: no node begins that many calls meanwhile. */
#define MOKD_SPAN_OVER 64u

struct mokd_span {
    const struct group_roster *roster;
    bool across; /* some nodes are on different hosts: no bells, and flags on a board in device memory of rank 0 */
    TAILQ_HEAD(, mokd_wait) waits;
    TAILQ_HEAD(, mokd_foreign) foreign;
    TAILQ_HEAD(, mokd_aborted) aborted;
    size_t n_foreign, n_aborted;
    uint32_t over[MOKD_SPAN_OVER]; /* objects that were settled last: what comes of them now is late */
    uint32_t n_over;               /* so many ever */
};

/* NULL: no memory. */
struct mokd_span *mokd_span_new(const struct group_roster *roster);
/* Nothing waits any more. NULL is fine. */
void mokd_span_free(struct mokd_span *span);

/* Whether a rank is one of this node's; true for all of a group without a span. */
bool mokd_span_is_here(const struct mokd_group *group, uint32_t rank);
const char *mokd_span_node(const struct mokd_group *group, uint32_t rank); /* name of the rank's node */

typedef void (*mokd_span_done)(void *cookie, const struct mokd_error *error);

/* Whether the ranks are on several hosts: known once the bells have been exchanged. */
bool mokd_span_is_across(const struct mokd_group *group);

/*
 * There is a way for memory to every node of the group. Waits here and below end with the error of a call that is
 * aborted meanwhile.
 */
void mokd_span_reach(struct mokd_group *group, uint64_t index, mokd_span_done done, void *cookie);
/*
 * Hands own[r] of every rank r of this node to the other nodes (flags: own[0] alone, if rank 0 is here) and waits for
 * theirs. The descriptors stay the caller's.
 */
void mokd_span_exchange(struct mokd_group *group, uint64_t index, uint32_t kind, uint32_t object,
                        const struct mokd_handle *own, uint64_t bytes, mokd_span_done done, void *cookie);
/* What came for it; nothing of it is there if nothing did. All stays the span's. */
struct mokd_handle mokd_span_handle_of(const struct mokd_group *group, uint32_t kind, uint32_t object, uint32_t rank);
/* Of memory that was made here. */
struct mokd_handle mokd_storage_handle(const struct mokd_storage *storage);
/* Descriptors of the object are not needed any more; `mapped`: our workers map it. */
void mokd_span_settle(struct mokd_group *group, uint32_t object, bool mapped);
void mokd_span_forget_foreign(struct mokd_group *group, struct mokd_foreign *foreign);
/* Our part is done, or has failed: `done` gets the verdict. */
void mokd_span_prepared(struct mokd_group *group, uint64_t index, const struct mokd_error *error, uint32_t rank,
                        mokd_span_done done, void *cookie);

/* The group has failed. */
void mokd_span_abort(struct mokd_group *group);

/* rack_groups.c hands these in. */
void mokd_span_verdict(struct mokd_group *group, uint64_t index, const struct mokd_error *error);
void mokd_span_handle(struct mokd_group *group, const struct mokd_foreign *what);
/* Links have come or gone, or time has passed. May end anything that waits. */
void mokd_span_look(struct mokd_group *group, uint64_t now_ms);

#endif
