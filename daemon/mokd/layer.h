/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layers: planned here (by kernels/), with their workspaces charged to the byte; run by the workers.
 * A layer is one object of its group with a part a rank. A rank's private workspace goes with its part; the symmetric
 * ones, which the peers map, and the ranks' flags go when the last part does.
 */
#ifndef MOKD_LAYER_H
#define MOKD_LAYER_H

/* The plan. Named through its folder, since this file has the same name. */
#include "kernels/layer.h"

#include "group.h"
#include "storage.h"

#define MOKD_DESCRIBE_BYTES 16384u
#define MOKD_PARAMS 18u /* regions of LayerParams */

/* Where a parameter lies; buffer 0: absent. */
struct mokd_region {
    uint32_t buffer;
    uint64_t offset, length;
};

struct mokd_layer_part {
    bool open; /* at its worker, or will be once its group has been restored; or on another node */
    bool busy; /* a bind or a close is under way */
    struct mokd_user *charged; /* for the layer */
    struct mok_plan plan;
    struct mokd_storage *symmetric, *private_memory;
    struct mokd_buffer *bound[MOKD_PARAMS]; /* NULL: not bound */
    struct mokd_region region[MOKD_PARAMS]; /* of the last binding, for the next mokd */
    bool is_bound;                          /* was bound at all */
};

struct mokd_layer {
    TAILQ_ENTRY(mokd_layer) link;
    struct mokd_group *group;
    uint32_t id;
    uint32_t open_parts;
    bool ready;                    /* all workers have it, or will, once its group has been restored; clients may name it */
    int flags_fd;                  /* host memory by which the ranks take turns: MOK_FLAGS_BYTES each */
    struct mokd_storage *board;    /* across hosts: device memory of rank 0 in its place; NULL: rank 0 is elsewhere */
    struct mokd_layer_part part[]; /* [group->size], by rank */
};

/* A rank of a layer as status shows it; borrows the group's strings. */
struct mokd_layer_info {
    Mok__LayerInfo info;
    Mok__LayerSpec spec;
    Mok__LayerMemory memory;
};
void mokd_layer_info(const struct mokd_layer *layer, uint32_t rank, struct mokd_layer_info *ret); /* its part is open */

/* Group 0, and describing to an observer, need no session. */
void mokd_layer_query(struct mokd_session *session, uint64_t id, const Mok__LayerQuery *request);
void mokd_layer_create(struct mokd_session *session, uint64_t id, const Mok__LayerCreate *request);
void mokd_layer_bind(struct mokd_session *session, uint64_t id, const Mok__LayerBind *request);
void mokd_layer_destroy(struct mokd_session *session, uint64_t id, const Mok__LayerDestroy *request);
void mokd_layer_describe(struct mokd_session *session, uint64_t id, const Mok__LayerDescribe *request);

/* All ranks of `group` have asked for a layer: takes over the calls of those here, in rank order, and answers them. */
void mokd_layer_make(struct mokd_group *group, const struct mokd_job *job, struct mokd_call *calls,
                     const struct mok_layer_spec *specs);
/* A rank of another node has destroyed its part. */
void mokd_layer_part_gone_elsewhere(struct mokd_group *group, uint32_t layer, uint32_t rank);
/* The group has failed: layers of which only other nodes have parts are of no use any more. */
void mokd_layers_forsake(struct mokd_group *group);

/* The worker has dropped the rank's part of every layer of the group. */
void mokd_member_layers_gone(struct mokd_member *member);

/* The part of a layer that the client of `session` can name; MOK_ENOENT. */
int mokd_layer_find(const struct mokd_session *session, uint32_t id, struct mokd_layer **ret_layer,
                    struct mokd_member **ret_member, struct mokd_error *error);
/* A rank's part is closed at its worker. May free the layer. */
void mokd_layer_part_gone(struct mokd_layer *layer, struct mokd_member *member);

/* The plan for a device; `describe`, if not NULL, has MOKD_DESCRIBE_BYTES. */
int mokd_layer_plan(const struct mok_layer_spec *spec, const struct mokd_device *device, struct mok_plan *ret,
                    char *describe, struct mokd_error *error);
/* The words for a plan's memory. */
void mokd_layer_memory_message(const struct mok_plan *plan, Mok__LayerMemory *ret);

/* A layer of a group that is being restored: with its ids and specs, but nothing at any worker. NULL: out of memory. */
struct mokd_layer *mokd_layer_new(struct mokd_group *group, uint32_t id);
/*
 * Plans it, and charges and makes its workspaces; `filled` as mokd_storage_fill. A negative return: not started, with
 * the error. What was charged goes with the layer.
 */
int mokd_layer_prepare(struct mokd_layer *layer, const struct mok_layer_spec *specs, mokd_storage_filled filled,
                       void *cookie, struct mokd_error *error);
/* Tells a rank's worker, as part of `gather`; the tag is the rank. */
void mokd_layer_send_open(const struct mokd_layer *layer, uint32_t rank, struct mokd_gather *gather);
void mokd_layer_send_bind(const struct mokd_layer *layer, uint32_t rank, struct mokd_gather *gather);

/* layer_params.c: LayerParams to regions and back. */
struct mokd_params_message {
    Mok__LayerParams params;
    Mok__Region region[MOKD_PARAMS];
};
void mokd_layer_params_regions(const Mok__LayerParams *params, struct mokd_region ret[MOKD_PARAMS]);
Mok__LayerParams *mokd_layer_params_message(const struct mokd_region region[MOKD_PARAMS],
                                            struct mokd_params_message *ret);

/* layer_params.c: checks the regions of LayerParams against the layer and the session's buffers. */
int mokd_layer_params_check(const struct mokd_session *session, const struct mokd_device *device,
                            const struct mok_plan *plan, const Mok__LayerParams *params,
                            struct mokd_buffer *ret_bound[MOKD_PARAMS], struct mokd_error *error);

#endif
