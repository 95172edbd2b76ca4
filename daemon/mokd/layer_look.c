/* SPDX-License-Identifier: Apache-2.0 */
/* What layers look like to those who ask: plans of layers that are, or might be. Changes nothing. */
#include <inttypes.h>

#include "common/layer_spec.h"
#include "layer.h"
#include "span.h"

/* ------------------------------------------------------------------ what would be */

/* Which rank's plan on which device is asked for: the session's own in a group, or without one, any. */
static int resolve_query(struct mokd_session *session, const Mok__LayerQuery *request, struct mok_layer_spec *ret_spec,
                         struct mokd_device **ret_device, struct mokd_error *error)
{
    struct mokd_member *member;

    if (!request->spec)
        return mokd_error_set(error, -MOK_EARG, "spec: missing");
    if (request->group == 0) {
        *ret_spec = mok_layer_spec_read(request->spec, request->ep, 0);
        return mokd_device_find(session->server, request->device, ret_device, error);
    }
    int r = mokd_member_find(session, request->group, &member, error);
    if (r < 0)
        return r;
    *ret_spec = mok_layer_spec_read(request->spec, member->group->size, member->rank);
    *ret_device = member->device;
    return 0;
}

void mokd_layer_query(struct mokd_session *session, uint64_t id, const Mok__LayerQuery *request)
{
    struct mokd_device *device = NULL;
    struct mokd_error error = { 0 };
    struct mok_layer_spec spec;
    struct mok_plan plan;
    _cleanup_free_ char *describe = calloc(1, MOKD_DESCRIBE_BYTES);

    int r = describe ? 0 : mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (r == 0)
        r = resolve_query(session, request, &spec, &device, &error);
    if (r == 0)
        r = mokd_layer_plan(&spec, device, &plan, describe, &error);
    if (r < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__LayerQueryReply body = MOK__LAYER_QUERY_REPLY__INIT;
    Mok__LayerMemory memory;
    mokd_layer_memory_message(&plan, &memory);
    body.memory = &memory;
    body.describe = describe;
    reply.body_case = MOK__REPLY__BODY_LAYER_QUERY;
    reply.layer_query = &body;
    struct mokd_call call = mokd_call_begin(session, id);
    mokd_call_reply(&call, &reply, NULL, 0);
}

/* ------------------------------------------------------------------ what is */

/* Any layer that clients can name, for those who only look. */
static int find_anywhere(const struct mokd_server *server, const Mok__LayerDescribe *request,
                         struct mokd_layer **ret_layer, struct mokd_member **ret_member, struct mokd_error *error)
{
    struct mokd_group *group;
    struct mokd_layer *layer;

    TAILQ_FOREACH(group, &server->groups, link) {
        TAILQ_FOREACH(layer, &group->layers, link) {
            if (layer->id != request->layer || !layer->ready)
                continue;
            if (request->rank >= group->size)
                return mokd_error_set(error, -MOK_ERANK, "rank = %u: layer %u has %u ranks", request->rank, layer->id,
                                      group->size);
            if (!layer->part[request->rank].open)
                return mokd_error_set(error, -MOK_ENOENT, "rank = %u: it has left layer %u", request->rank, layer->id);
            if (!mokd_span_is_here(group, request->rank))
                return mokd_error_set(error, -MOK_ENOENT, "rank = %u: it is on node %s, whose mokd knows its plan",
                                      request->rank, mokd_span_node(group, request->rank));
            *ret_layer = layer;
            *ret_member = group->member[request->rank];
            return 0;
        }
    }
    return mokd_error_set(error, -MOK_ENOENT, "layer = %u: there is no such layer", request->layer);
}

void mokd_layer_info(const struct mokd_layer *layer, uint32_t rank, struct mokd_layer_info *ret)
{
    const struct mokd_group *group = layer->group;
    const struct mok_plan *plan = &layer->part[rank].plan;

    ret->spec = mok_layer_spec_message(&plan->spec);
    mokd_layer_memory_message(plan, &ret->memory);
    ret->info = (Mok__LayerInfo)MOK__LAYER_INFO__INIT;
    ret->info.layer = layer->id;
    ret->info.group = group->id;
    ret->info.group_name = (char *)group->name;
    ret->info.rank = rank;
    ret->info.device = group->member[rank]->device->index;
    ret->info.session = group->member[rank]->session->id;
    ret->info.uid = group->uid;
    ret->info.spec = &ret->spec;
    ret->info.memory = &ret->memory;
    ret->info.bytes = plan->symmetric_bytes + plan->private_bytes;
}

void mokd_layer_describe(struct mokd_session *session, uint64_t id, const Mok__LayerDescribe *request)
{
    struct mokd_layer *layer = NULL;
    struct mokd_member *member = NULL;
    struct mokd_error error = { 0 };
    struct mok_plan plan;
    _cleanup_free_ char *describe = calloc(1, MOKD_DESCRIBE_BYTES);

    int r = describe ? 0 : mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (r == 0)
        r = session->state == MOKD_SESSION_OBSERVER
                ? find_anywhere(session->server, request, &layer, &member, &error)
                : mokd_layer_find(session, request->layer, &layer, &member, &error);
    if (r == 0)
        r = mokd_layer_plan(&layer->part[member->rank].plan.spec, member->device, &plan, describe, &error);
    if (r < 0) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__LayerDescribeReply body = MOK__LAYER_DESCRIBE_REPLY__INIT;
    body.text = describe;
    reply.body_case = MOK__REPLY__BODY_LAYER_DESCRIBE;
    reply.layer_describe = &body;
    struct mokd_call call = mokd_call_begin(session, id);
    mokd_call_reply(&call, &reply, NULL, 0);
}
