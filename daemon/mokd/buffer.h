/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Buffers. A private one belongs to a session and is known to one worker. A symmetric one has the same id on all ranks
 * of a group; each rank owns its copy, and every worker of the group maps every copy. The client gets its own.
 * A copy goes once no worker maps it any more.
 */
#ifndef MOKD_BUFFER_H
#define MOKD_BUFFER_H

#include "session.h"
#include "storage.h"

struct mokd_group;
struct mokd_job;

struct mokd_buffer {
    TAILQ_ENTRY(mokd_buffer) link, member_link;
    struct mokd_session *session;
    struct mokd_member *member; /* NULL: private */
    struct mokd_device *device;
    uint32_t id;
    uint64_t bytes;
    struct mokd_storage *storage;
    unsigned bindings; /* regions of layers that lie in it */
    bool ready;        /* the client has it */
    bool going;        /* being unmapped */
    struct mokd_call call;
    struct mokd_gather gather;
};

void mokd_buffer_alloc(struct mokd_session *session, uint64_t id, const Mok__BufferAlloc *request);
void mokd_buffer_free(struct mokd_session *session, uint64_t id, const Mok__BufferFree *request);

/* The buffer of a session that the client can name, or NULL. */
struct mokd_buffer *mokd_buffer_of(const struct mokd_session *session, uint32_t id);

/* All ranks of `group` have asked for `bytes`: takes over the calls of those here, in rank order, and answers them. */
void mokd_symmetric_alloc(struct mokd_group *group, const struct mokd_job *job, struct mokd_call *calls,
                          uint64_t bytes);

/* Unmaps a rank's copies at the other ranks' workers, as part of `gather`; its own worker drops them with the group. */
void mokd_member_buffers_unmap(struct mokd_member *member, struct mokd_gather *gather);
/* Unmaps what a rank of another node has of a buffer (0: of all) at our workers, as part of `gather`. */
void mokd_foreign_buffers_unmap(struct mokd_group *group, uint32_t rank, uint32_t buffer, struct mokd_gather *gather);
/* Gives a rank's copies back; no worker maps them any more. */
void mokd_member_buffers_release(struct mokd_member *member);

/* One that the mokd before has left, with its storage; `member` NULL: private. -MOK_ENOMEM. */
int mokd_buffer_adopt(struct mokd_session *session, struct mokd_member *member, uint32_t id,
                      struct mokd_storage *storage);
/* Its client does not know it: a private one, or one of a group that is suspended. */
void mokd_buffer_drop(struct mokd_buffer *buffer);
/* Tells the worker of rank `at` of a symmetric buffer's copy, as part of `gather`; the tag is the rank. */
void mokd_buffer_send_map(const struct mokd_buffer *buffer, const struct mokd_member *at, struct mokd_gather *gather);

/* Unmaps and frees the private buffers of an ending session. */
void mokd_buffers_drop(struct mokd_session *session);

/* A new worker of the device gets the private buffers of the live sessions. */
void mokd_buffers_attach(struct mokd_device *device);

#endif
