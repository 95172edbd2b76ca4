/* SPDX-License-Identifier: Apache-2.0 */
#include "status.h"

#include <string.h>

#include "buffer.h"
#include "client_queue.h"
#include "device.h"
#include "fdstore.h"
#include "group.h"
#include "job_totals.h"
#include "layer.h"
#include "rack_groups.h"
#include "span.h"

/* A status and its envelope stay within one packet. */
#define STATUS_BYTES (MOK_WIRE_MAX_BYTES - 4096u)

static void answer(struct mokd_session *session, uint64_t id, Mok__Reply *reply)
{
    struct mokd_call call = mokd_call_begin(session, id);
    mokd_call_reply(&call, reply, NULL, 0);
}

/* ------------------------------------------------------------------ devices and limits */

static void fill_devices(const struct mokd_server *server, Mok__DeviceInfo *infos, Mok__DeviceInfo **pointers)
{
    for (size_t i = 0; i < server->n_devices; i++) {
        mokd_device_info(server->devices[i], &infos[i]);
        pointers[i] = &infos[i];
    }
}

void mokd_status_fill_devices(const struct mokd_server *server, struct mokd_device_list *ret)
{
    fill_devices(server, ret->infos, ret->pointers);
    ret->body = (Mok__DeviceListReply)MOK__DEVICE_LIST_REPLY__INIT;
    ret->body.n_device = server->n_devices;
    ret->body.device = ret->pointers;
}

void mokd_status_devices(struct mokd_session *session, uint64_t id)
{
    struct mokd_device_list list;
    Mok__Reply reply = MOK__REPLY__INIT;

    mokd_status_fill_devices(session->server, &list);
    reply.body_case = MOK__REPLY__BODY_DEVICE_LIST;
    reply.device_list = &list.body;
    answer(session, id, &reply);
}

static uint32_t narrow(uint64_t value)
{
    return value < UINT32_MAX ? (uint32_t)value : UINT32_MAX;
}

void mokd_status_fill_limits(const struct mokd_session *session, Mok__Limits *ret)
{
    const struct mokd_user *user = session->user;

    *ret = (Mok__Limits)MOK__LIMITS__INIT;
    ret->bytes = user->limits.of[MOKD_BYTES];
    ret->bytes_used = user->used[MOKD_BYTES];
    ret->sessions = narrow(user->limits.of[MOKD_SESSIONS]);
    ret->sessions_used = narrow(user->used[MOKD_SESSIONS]);
    ret->groups = narrow(user->limits.of[MOKD_GROUPS]);
    ret->groups_used = narrow(user->used[MOKD_GROUPS]);
    ret->layers = narrow(user->limits.of[MOKD_LAYERS]);
    ret->layers_used = narrow(user->used[MOKD_LAYERS]);
    ret->buffers = narrow(user->limits.of[MOKD_BUFFERS]);
    ret->buffers_used = narrow(user->used[MOKD_BUFFERS]);
    ret->descriptors = narrow(mokd_user_bound(user, MOKD_DESCRIPTORS));
    ret->descriptors_used = narrow(user->used[MOKD_DESCRIPTORS]);
    ret->queue_entries = user->limits.queue_entries;
    ret->weight = user->limits.weight;
    ret->priority = user->limits.priority;
    ret->devices = user->limits.devices;
    ret->exclusive = user->limits.exclusive;
}

void mokd_status_limits(struct mokd_session *session, uint64_t id)
{
    Mok__Reply reply = MOK__REPLY__INIT;
    Mok__Limits limits;

    mokd_status_fill_limits(session, &limits);
    reply.body_case = MOK__REPLY__BODY_LIMITS;
    reply.limits = &limits;
    answer(session, id, &reply);
}

/* ------------------------------------------------------------------ jobs, groups, layers */

/* What is charged for a session's parts of layers. */
static uint64_t layer_bytes(const struct mokd_session *session)
{
    const struct mokd_member *member;
    const struct mokd_layer *layer;
    uint64_t bytes = 0;

    TAILQ_FOREACH(member, &session->members, link) {
        TAILQ_FOREACH(layer, &member->group->layers, link) {
            const struct mokd_layer_part *part = &layer->part[member->rank];
            bytes += part->symmetric ? part->symmetric->bytes : 0;
            bytes += part->private_memory ? part->private_memory->bytes : 0;
        }
    }
    return bytes;
}

static void fill_job(struct mokd_session *session, Mok__JobInfo *ret)
{
    const struct mokd_queue *queue;
    const struct mokd_buffer *buffer;

    *ret = (Mok__JobInfo)MOK__JOB_INFO__INIT;
    ret->ops_done = session->ops_done;
    ret->device_ns = session->device_ns;
    ret->rows = session->rows;
    ret->weight = session->weight;
    TAILQ_FOREACH(queue, &session->queues, link) {
        /* The page is of this moment, what the worker answered maybe a second old. */
        ret->ops_done += queue->counted.ops > queue->ops_done ? queue->counted.ops : queue->ops_done;
        ret->device_ns += queue->counted.device_ns;
        ret->rows += queue->counted.rows;
        ret->queues++;
    }
    ret->bytes = layer_bytes(session);
    TAILQ_FOREACH(buffer, &session->buffers, link)
        ret->bytes += buffer->bytes;
    ret->session = session->id;
    ret->job = session->job;
    ret->uid = session->peer.uid;
    ret->pid = (uint32_t)session->peer.pid;
    ret->groups = session->n_members;
    ret->layers = session->n_layers;
    ret->buffers = session->n_buffers;
    ret->age_ms = (mok_now_ns() - session->started_ns) / 1000000u;
    ret->user = session->user->name;
    ret->resumable = session->resumable;
    ret->away = session->state == MOKD_SESSION_AWAY;
}

static void finish_group(struct mokd_group_info *ret)
{
    ret->info.node = ret->node;
    ret->info.n_session = ret->info.n_device = ret->info.size;
    ret->info.session = ret->session;
    ret->info.device = ret->device;
}

/* Of ranks that meet here: who has come, from whatever node. */
static void fill_ranks(const struct group_node *node, const struct group_gathering *gathering,
                       struct mokd_group_info *ret)
{
    uint32_t from;

    ret->info.joined = gathering->joined;
    ret->info.n_node = gathering->size;
    for (uint32_t rank = 0; rank < gathering->size; rank++) {
        bool here = group_gathering_rank(gathering, rank, &from, &ret->device[rank], &ret->session[rank]);
        ret->node[rank] = here ? (char *)group_node_name(node, from) : (char *)"";
        if (!here)
            ret->session[rank] = ret->device[rank] = 0;
    }
}

static void fill_home(const struct mokd_group *group, struct mokd_group_info *ret)
{
    const struct group_node *node = mokd_rack_node(group->server);
    struct group_gathering gathering;

    if (!node || group->state != MOKD_GROUP_FORMING)
        return;
    ret->info.home = (char *)group_node_name(node, group_node_home(node, group->uid, group->name));
    ret->info.partial = !group_gathering_find(node, group->uid, group->name, &gathering);
    if (!ret->info.partial)
        fill_ranks(node, &gathering, ret);
}

/* One whose ranks meet here, and none is ours. */
static void fill_gathering(const struct group_node *node, const struct group_gathering *gathering,
                           struct mokd_group_info *ret)
{
    ret->info = (Mok__GroupInfo)MOK__GROUP_INFO__INIT;
    ret->info.name = (char *)gathering->name;
    ret->info.uid = gathering->uid;
    ret->info.size = gathering->size;
    ret->info.state = (char *)mokd_group_state_text(MOKD_GROUP_FORMING);
    ret->info.home = (char *)group_node_name(node, node->self);
    fill_ranks(node, gathering, ret);
    finish_group(ret);
}

static void fill_group(const struct mokd_group *group, struct mokd_group_info *ret)
{
    const struct mokd_layer *layer;

    ret->info = (Mok__GroupInfo)MOK__GROUP_INFO__INIT;
    ret->info.group = group->id;
    ret->info.name = (char *)group->name;
    ret->info.size = group->size;
    ret->info.joined = group->joined;
    ret->info.state = (char *)mokd_group_state_text(group->state);
    ret->info.uid = group->uid;
    ret->info.error = (char *)group->failure;
    if (group->state == MOKD_GROUP_FAILED)
        ret->info.code = group->lost ? -MOK_EWORKER : -MOK_EPEER;
    TAILQ_FOREACH(layer, &group->layers, link)
        ret->info.layers++;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const struct mokd_member *member = group->member[rank];
        ret->session[rank] = member ? member->session->id : 0;
        ret->device[rank] = member ? member->device->index : 0;
        if (mokd_span_is_here(group, rank))
            continue;
        ret->session[rank] = group->span->roster->rank[rank].session;
        ret->device[rank] = group->span->roster->rank[rank].device;
        ret->info.joined++;
    }
    for (uint32_t rank = 0; group->span && rank < group->size; rank++)
        ret->node[rank] = (char *)mokd_span_node(group, rank);
    ret->info.n_node = group->span ? group->size : 0;
    ret->info.fabric = mokd_span_is_across(group);
    fill_home(group, ret);
    finish_group(ret);
}

static bool has_forming(const struct mokd_server *server, uint32_t uid, const char *name)
{
    const struct mokd_group *group;

    TAILQ_FOREACH(group, &server->groups, link)
        if (group->state == MOKD_GROUP_FORMING && group->uid == uid && strcmp(group->name, name) == 0)
            return true;
    return false;
}

bool mokd_status_next_group(const struct mokd_server *server, struct mokd_group_look *look, struct mokd_group_info *ret)
{
    const struct group_node *node = mokd_rack_node(server);

    if (!look->past_ours) {
        look->group = look->group ? TAILQ_NEXT(look->group, link) : TAILQ_FIRST(&server->groups);
        look->past_ours = !look->group;
    }
    if (look->group) {
        fill_group(look->group, ret);
        return true;
    }
    while (node && group_gathering_next(node, &look->gathering)) {
        if (has_forming(server, look->gathering.uid, look->gathering.name))
            continue;
        fill_gathering(node, &look->gathering, ret);
        return true;
    }
    return false;
}

/* ------------------------------------------------------------------ the whole */

/* The lists of one status, and the memory behind them. */
struct status {
    Mok__StatusReply body;
    Mok__DeviceInfo devices[MOK_MAX_DEVICES], *device_pointers[MOK_MAX_DEVICES];
    Mok__JobInfo *jobs, **job_pointers;
    struct mokd_group_info *groups;
    Mok__GroupInfo **group_pointers;
    struct mokd_layer_info *layers;
    Mok__LayerInfo **layer_pointers;
    size_t bytes; /* packed, so far */
};

static bool fits(struct status *status, const ProtobufCMessage *entry)
{
    size_t bytes = protobuf_c_message_get_packed_size(entry) + 8;
    if (status->bytes + bytes > STATUS_BYTES)
        return false;
    status->bytes += bytes;
    return true;
}

static void add_jobs(const struct mokd_server *server, struct status *status)
{
    struct mokd_session *session;
    size_t n = 0;

    TAILQ_FOREACH(session, &server->sessions, link) {
        if (session->state != MOKD_SESSION_OPEN && session->state != MOKD_SESSION_AWAY)
            continue;
        fill_job(session, &status->jobs[n]);
        status->job_pointers[n] = &status->jobs[n];
        if (fits(status, &status->jobs[n].base))
            n++;
        else
            status->body.omitted++;
    }
    status->body.n_job = n;
    status->body.job = status->job_pointers;
}

/* Of the one that has been filled in behind those that are there. */
static void take_group(struct status *status)
{
    size_t n = status->body.n_group;

    status->group_pointers[n] = &status->groups[n].info;
    if (fits(status, &status->groups[n].info.base))
        status->body.n_group++;
    else
        status->body.omitted++;
}

static void add_groups(const struct mokd_server *server, struct status *status)
{
    struct mokd_group_look look = { 0 };

    while (mokd_status_next_group(server, &look, &status->groups[status->body.n_group]))
        take_group(status);
    status->body.group = status->group_pointers;
}

static void add_layer(const struct mokd_layer *layer, struct status *status)
{
    for (uint32_t rank = 0; rank < layer->group->size; rank++) {
        size_t n = status->body.n_layer;
        if (!layer->part[rank].open || !layer->group->member[rank])
            continue;
        mokd_layer_info(layer, rank, &status->layers[n]);
        status->layer_pointers[n] = &status->layers[n].info;
        if (fits(status, &status->layers[n].info.base))
            status->body.n_layer++;
        else
            status->body.omitted++;
    }
}

/* The last to be added: where there are too many, the rest of the status is whole. */
static void add_layers(const struct mokd_server *server, struct status *status)
{
    const struct mokd_group *group;
    const struct mokd_layer *layer;

    TAILQ_FOREACH(group, &server->groups, link) {
        TAILQ_FOREACH(layer, &group->layers, link)
            if (layer->ready)
                add_layer(layer, status);
    }
    status->body.layer = status->layer_pointers;
}

static void add_totals(const struct mokd_server *server, struct status *status)
{
    Mok__StatusReply *body = &status->body;

    *body = (Mok__StatusReply)MOK__STATUS_REPLY__INIT;
    body->version = (char *)MOK_BUILD_VERSION;
    body->uptime_ms = (mok_now_ns() - server->started_ns) / 1000000u;
    body->pid = (uint32_t)getpid();
    body->errors = server->errors;
    mokd_fdstore_count(server->store, &body->store_used, &body->store_bound);
    body->config = server->config->path;
    fill_devices(server, status->devices, status->device_pointers);
    body->n_device = server->n_devices;
    body->device = status->device_pointers;
    for (size_t i = 0; i < server->n_devices; i++) {
        body->ops_done += status->devices[i].ops_done;
        body->errors += server->devices[i]->errors + server->devices[i]->latest.errors;
    }
    status->bytes = protobuf_c_message_get_packed_size(&body->base);
}

/* At most so many of each, and never 0. */
static void count(const struct mokd_server *server, size_t *ret_sessions, size_t *ret_groups, size_t *ret_parts)
{
    const struct mokd_session *session;
    const struct mokd_group *group;
    const struct mokd_layer *layer;
    const struct group_node *node = mokd_rack_node(server);

    *ret_sessions = *ret_groups = *ret_parts = 1;
    *ret_groups += node ? node->n_meetings : 0;
    TAILQ_FOREACH(session, &server->sessions, link)
        ++*ret_sessions;
    TAILQ_FOREACH(group, &server->groups, link) {
        ++*ret_groups;
        TAILQ_FOREACH(layer, &group->layers, link)
            *ret_parts += group->size;
    }
}

void mokd_status_query(struct mokd_session *session, uint64_t id)
{
    const struct mokd_server *server = session->server;
    struct mokd_error error = { 0 };
    size_t n_sessions, n_groups, n_parts;

    mokd_job_totals_take_all(session->server);
    count(server, &n_sessions, &n_groups, &n_parts);
    _cleanup_free_ struct status *status = calloc(1, sizeof(*status));
    _cleanup_free_ Mok__JobInfo *jobs = calloc(n_sessions, sizeof(*jobs));
    _cleanup_free_ Mok__JobInfo **job_pointers = calloc(n_sessions, sizeof(*job_pointers));
    _cleanup_free_ struct mokd_group_info *groups = calloc(n_groups, sizeof(*groups));
    _cleanup_free_ Mok__GroupInfo **group_pointers = calloc(n_groups, sizeof(*group_pointers));
    _cleanup_free_ struct mokd_layer_info *layers = calloc(n_parts, sizeof(*layers));
    _cleanup_free_ Mok__LayerInfo **layer_pointers = calloc(n_parts, sizeof(*layer_pointers));
    if (!status || !jobs || !job_pointers || !groups || !group_pointers || !layers || !layer_pointers) {
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
        mokd_session_refuse(session, id, &error);
        return;
    }
    status->jobs = jobs;
    status->job_pointers = job_pointers;
    status->groups = groups;
    status->group_pointers = group_pointers;
    status->layers = layers;
    status->layer_pointers = layer_pointers;
    add_totals(server, status);
    add_jobs(server, status);
    add_groups(server, status);
    add_layers(server, status);
    Mok__Reply reply = MOK__REPLY__INIT;
    reply.body_case = MOK__REPLY__BODY_STATUS;
    reply.status = &status->body;
    answer(session, id, &reply);
}
