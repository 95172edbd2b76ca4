/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Brings a group of the mokd before back: once all ranks want it again, their workers are told of the group, map every
 * copy of its symmetric buffers, and get its layers with workspaces of their own and their bindings. Step by step,
 * since each may carry many descriptors; what goes wrong fails the group, as a worker's death does.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "client_queue.h"
#include "group.h"
#include "layer.h"
#include "names.h"
#include "state.h"

struct restore {
    struct mokd_gather gather;
    struct mokd_group *group;
    const struct mokd_buffer *buffer; /* the last that was mapped */
    uint32_t rank;                    /* whose buffers are being mapped */
    struct mokd_layer *layer;         /* the last that was opened */
    uint64_t full_bytes, recompute_bytes; /* of its contexts, as clients were told */
    struct mokd_error error;
};

static void next_buffer(struct mokd_gather *gather);
static void next_layer(struct mokd_gather *gather);

static void end(struct restore *r)
{
    struct mokd_group *group = r->group;
    char text[MOKD_TEXT_MAX];

    if (r->error.code < 0 && group->state == MOKD_GROUP_SUSPENDED) {
        snprintf(text, sizeof(text), "it could not be restored after a restart of mokd: %.400s", r->error.text);
        mok_log(MOK_LOG_WARNING, "group", "not restored", "group=%u name=%s code=%s error=\"%s\"", group->id,
                group->name, mok_error_symbol(r->error.code), r->error.text);
        mokd_group_fail(group, r->gather.first_tag < group->size ? r->gather.first_tag : 0, text);
    }
    if (group->state == MOKD_GROUP_SUSPENDED) {
        group->state = MOKD_GROUP_READY;
        mokd_state_touch(group->server);
        mok_log(MOK_LOG_INFO, "group", "restored", "group=%u name=%s uid=%u size=%u", group->id, group->name,
                group->uid, group->size);
    }
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->member[rank])
            mokd_session_recovered(group->member[rank]->session);
    free(r);
    mokd_group_run_end(group);
}

/* False: it is over, for what the last step came to or because the group has failed meanwhile. */
static bool goes_on(struct restore *r)
{
    if (r->gather.first.code < 0 && r->error.code == 0)
        r->error = r->gather.first;
    if (r->error.code == 0 && r->group->state == MOKD_GROUP_SUSPENDED)
        return true;
    end(r);
    return false;
}

/* ------------------------------------------------------------------ layers */

static bool is_everywhere(const struct mokd_layer *layer)
{
    return layer->open_parts == layer->group->size;
}

static void bound(struct mokd_gather *gather)
{
    next_layer(gather);
}

/* The bindings are checked as those of a client are: the plan may be another one. */
static int check_bindings(const struct mokd_layer *layer, struct mokd_error *error)
{
    struct mokd_buffer *unused[MOKD_PARAMS];
    struct mokd_params_message params;

    for (uint32_t rank = 0; rank < layer->group->size; rank++) {
        const struct mokd_layer_part *part = &layer->part[rank];
        const struct mokd_member *member = layer->group->member[rank];
        if (!part->is_bound)
            continue;
        int r = mokd_layer_params_check(member->session, member->device, &part->plan,
                                        mokd_layer_params_message(part->region, &params), unused, error);
        if (r < 0)
            return r;
    }
    return 0;
}

static void opened(struct mokd_gather *gather)
{
    struct restore *r = mokd_container_of(gather, struct restore, gather);

    if (!goes_on(r))
        return;
    mokd_gather_begin(&r->gather, bound);
    if (check_bindings(r->layer, &r->error) == 0)
        for (uint32_t rank = 0; rank < r->group->size; rank++)
            if (r->layer->part[rank].is_bound)
                mokd_layer_send_bind(r->layer, rank, &r->gather);
    mokd_gather_end(&r->gather);
}

/* Clients have contexts of the sizes that they were told. */
static int check_contexts(const struct restore *r, struct mokd_error *error)
{
    const struct mok_plan *plan = &r->layer->part[0].plan;

    if (plan->context_full_bytes <= r->full_bytes && plan->context_recompute_bytes <= r->recompute_bytes)
        return 0;
    return mokd_error_set(error, -MOK_ESIZE,
                          "layer %u: this mokd needs contexts of %" PRIu64 " and %" PRIu64 " bytes, "
                          "the one before needed %" PRIu64 " and %" PRIu64,
                          r->layer->id, plan->context_full_bytes, plan->context_recompute_bytes, r->full_bytes,
                          r->recompute_bytes);
}

static void filled(void *cookie, const struct mokd_error *error)
{
    struct restore *r = cookie;

    r->error = *error;
    mokd_gather_begin(&r->gather, opened);
    if (r->error.code == 0 && check_contexts(r, &r->error) == 0)
        for (uint32_t rank = 0; rank < r->group->size; rank++)
            mokd_layer_send_open(r->layer, rank, &r->gather);
    mokd_gather_end(&r->gather);
}

static int prepare(struct restore *r)
{
    struct mokd_layer *layer = r->layer;
    struct mok_layer_spec specs[MOK_MAX_EP];

    r->full_bytes = layer->part[0].plan.context_full_bytes;
    r->recompute_bytes = layer->part[0].plan.context_recompute_bytes;
    for (uint32_t rank = 0; rank < r->group->size; rank++)
        specs[rank] = layer->part[rank].plan.spec;
    return mokd_layer_prepare(layer, specs, filled, r, &r->error);
}

static void next_layer(struct mokd_gather *gather)
{
    struct restore *r = mokd_container_of(gather, struct restore, gather);

    if (!goes_on(r))
        return;
    do
        r->layer = r->layer ? TAILQ_NEXT(r->layer, link) : TAILQ_FIRST(&r->group->layers);
    while (r->layer && !is_everywhere(r->layer)); /* one that a rank has destroyed runs nothing any more */
    if (!r->layer || prepare(r) < 0)
        end(r);
}

/* ------------------------------------------------------------------ buffers */

/* The next copy of a symmetric buffer, by rank; NULL: all are mapped. */
static const struct mokd_buffer *following(struct restore *r)
{
    const struct mokd_buffer *buffer = r->buffer ? TAILQ_NEXT(r->buffer, member_link) : NULL;

    if (!r->buffer)
        buffer = TAILQ_FIRST(&r->group->member[r->rank]->buffers);
    while (!buffer && ++r->rank < r->group->size)
        buffer = TAILQ_FIRST(&r->group->member[r->rank]->buffers);
    return buffer;
}

static void next_buffer(struct mokd_gather *gather)
{
    struct restore *r = mokd_container_of(gather, struct restore, gather);

    if (!goes_on(r))
        return;
    r->buffer = following(r);
    if (!r->buffer) {
        next_layer(gather);
        return;
    }
    mokd_gather_begin(&r->gather, next_buffer);
    for (uint32_t at = 0; at < r->group->size; at++)
        mokd_buffer_send_map(r->buffer, r->group->member[at], &r->gather);
    mokd_gather_end(&r->gather);
}

/* ------------------------------------------------------------------ the whole */

static bool all_want_it(const struct mokd_group *group)
{
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (!group->member[rank] || !group->member[rank]->session->returned)
            return false;
    return true;
}

void mokd_group_restore(struct mokd_group *group)
{
    if (group->state != MOKD_GROUP_SUSPENDED || group->running > 0 || !all_want_it(group))
        return;
    struct restore *r = calloc(1, sizeof(*r));
    if (!r) {
        mokd_group_fail(group, 0, "it could not be restored after a restart of mokd: mokd is out of memory");
        return;
    }
    r->group = group;
    mokd_group_run_begin(group);
    mokd_gather_begin(&r->gather, next_buffer);
    mokd_group_send_open(group, &r->gather);
    mokd_gather_end(&r->gather);
}
