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

/* A copy, bell or workspace of a rank of another node. */
struct mokd_foreign {
    TAILQ_ENTRY(mokd_foreign) link;
    uint32_t kind; /* enum HandleKind */
    uint32_t object, rank;
    uint64_t bytes;
    int fd;      /* -1 once it is mapped here, or not wanted */
    bool mapped; /* a buffer's: by our workers */
};

/* Something that waits for other nodes. */
struct mokd_wait {
    TAILQ_ENTRY(mokd_wait) link;
    enum { MOKD_WAIT_LINKS = 1, MOKD_WAIT_HANDLES, MOKD_WAIT_VERDICT } what;
    uint64_t index;  /* VERDICT */
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

struct mokd_span {
    const struct group_roster *roster;
    TAILQ_HEAD(, mokd_wait) waits;
    TAILQ_HEAD(, mokd_foreign) foreign;
    TAILQ_HEAD(, mokd_aborted) aborted;
    size_t n_foreign;
};

/* NULL: no memory. */
struct mokd_span *mokd_span_new(const struct group_roster *roster);
/* Nothing waits any more. NULL is fine. */
void mokd_span_free(struct mokd_span *span);

/* Whether a rank is one of this node's; true for all of a group without a span. */
bool mokd_span_is_here(const struct mokd_group *group, uint32_t rank);
const char *mokd_span_node(const struct mokd_group *group, uint32_t rank); /* name of the rank's node */

typedef void (*mokd_span_done)(void *cookie, const struct mokd_error *error);

/* There is a way for memory to every node of the group. */
void mokd_span_reach(struct mokd_group *group, mokd_span_done done, void *cookie);
/*
 * Hands fds[r] of every rank r of this node to the other nodes (flags: fds[0] alone, if rank 0 is here) and waits for
 * theirs. The descriptors stay the caller's.
 */
void mokd_span_exchange(struct mokd_group *group, uint32_t kind, uint32_t object, const int *fds, uint64_t bytes,
                        mokd_span_done done, void *cookie);
/* What came for it: -1 if nothing did. The descriptor stays the span's. */
int mokd_span_fd(const struct mokd_group *group, uint32_t kind, uint32_t object, uint32_t rank);
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
void mokd_span_handle(struct mokd_group *group, uint32_t kind, uint32_t object, uint32_t rank, uint64_t bytes, int fd);
/* Links have come or gone, or time has passed. May end anything that waits. */
void mokd_span_look(struct mokd_group *group, uint64_t now_ms);

#endif
