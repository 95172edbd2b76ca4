/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Objects from the state that the mokd before has left. It is checked as a message of a stranger is; what is damaged is
 * refused as a whole, what only misses a descriptor or a device loses the session, or the group, that needs it.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "common/layer_spec.h"
#include "fdstore.h"
#include "group.h"
#include "layer.h"
#include "memory.h"
#include "names.h"
#include "state.h"

/* ------------------------------------------------------------------ checking */

enum owner { OWNER_PRIVATE, OWNER_SYMMETRIC, OWNER_GROUP, OWNER_LAYER };

struct named {
    uint32_t id;
    enum owner owner;
    uint64_t session;
    uint32_t group;
};

struct names {
    struct named *list;
    size_t count;
};

static int bad(struct mokd_error *error, const char *what, uint64_t value, const char *bound)
{
    return mokd_error_set(error, -MOK_EPROTO, "%s = %" PRIu64 ": %s", what, value, bound);
}

static int compare_named(const void *a, const void *b)
{
    uint32_t x = ((const struct named *)a)->id, y = ((const struct named *)b)->id;
    return x < y ? -1 : x > y;
}

static const Mok__StateSession *session_of(const Mok__State *state, uint64_t id)
{
    for (size_t i = 0; i < state->n_session; i++)
        if (state->session[i]->session == id)
            return state->session[i];
    return NULL;
}

static const Mok__StateGroup *group_of(const Mok__State *state, uint32_t id)
{
    for (size_t i = 0; i < state->n_group; i++)
        if (state->group[i]->group == id)
            return state->group[i];
    return NULL;
}

static bool is_rank_of(const Mok__StateGroup *group, uint64_t session)
{
    for (size_t i = 0; i < group->n_member; i++)
        if (group->member[i]->session == session)
            return true;
    return false;
}

static int check_sessions(const Mok__State *state, struct mokd_error *error)
{
    for (size_t i = 0; i < state->n_session; i++) {
        const Mok__StateSession *session = state->session[i];
        if (session->session == 0 || session->session > state->last_session)
            return bad(error, "session", session->session, "never given out");
        if (session_of(state, session->session) != session)
            return bad(error, "session", session->session, "there twice");
        if (session->token.len != MOKD_TOKEN_BYTES || !mok_name_is_valid(session->job))
            return bad(error, "session", session->session, "its token or job is none");
        for (size_t k = 0; k < session->n_buffer; k++) {
            const Mok__StateBuffer *buffer = session->buffer[k];
            const Mok__StateGroup *group = buffer->group ? group_of(state, buffer->group) : NULL;
            if (buffer->bytes == 0 || buffer->bytes > INT64_MAX || buffer->memory == 0)
                return bad(error, "buffer", buffer->buffer, "no size, or no memory");
            if (buffer->group && (!group || !is_rank_of(group, session->session)))
                return bad(error, "buffer", buffer->buffer, "of a group that its session is not in");
        }
    }
    return 0;
}

static int check_layer(const Mok__StateGroup *group, const Mok__StateLayer *layer, struct mokd_error *error)
{
    if (!layer->spec || layer->n_part != group->n_member)
        return bad(error, "layer", layer->layer, "has no shape, or other ranks than its group");
    for (size_t rank = 0; rank < layer->n_part; rank++)
        if (layer->part[rank]->rank != rank || !layer->part[rank]->memory)
            return bad(error, "layer", layer->layer, "its ranks are in no order, or have no sizes");
    return 0;
}

static int check_group(const Mok__State *state, const Mok__StateGroup *group, struct mokd_error *error)
{
    if (!mok_name_is_valid(group->name) || group->n_member < 1 || group->n_member > MOK_MAX_EP)
        return bad(error, "group", group->group, "has no name or no size");
    for (size_t rank = 0; rank < group->n_member; rank++) {
        const Mok__StateMember *member = group->member[rank];
        const Mok__StateSession *session = session_of(state, member->session);
        if (!session || session->uid != group->uid)
            return bad(error, "group", group->group, "a rank's session is not there, or another user's");
        for (size_t other = 0; other < rank; other++)
            if (group->member[other]->session == member->session || group->member[other]->device == member->device)
                return bad(error, "group", group->group, "two ranks on one device or of one session");
    }
    for (size_t i = 0; i < group->n_layer; i++)
        if (check_layer(group, group->layer[i], error) < 0)
            return error->code;
    return 0;
}

static size_t count_names(const Mok__State *state)
{
    size_t count = state->n_group;

    for (size_t i = 0; i < state->n_session; i++)
        count += state->session[i]->n_buffer;
    for (size_t i = 0; i < state->n_group; i++)
        count += state->group[i]->n_layer;
    return count;
}

static void add_name(struct names *names, uint32_t id, enum owner owner, uint64_t session, uint32_t group)
{
    names->list[names->count++] = (struct named){ .id = id, .owner = owner, .session = session, .group = group };
}

static void collect_names(const Mok__State *state, struct names *names)
{
    for (size_t i = 0; i < state->n_session; i++) {
        const Mok__StateSession *session = state->session[i];
        for (size_t k = 0; k < session->n_buffer; k++)
            add_name(names, session->buffer[k]->buffer,
                     session->buffer[k]->group ? OWNER_SYMMETRIC : OWNER_PRIVATE, session->session,
                     session->buffer[k]->group);
    }
    for (size_t i = 0; i < state->n_group; i++) {
        add_name(names, state->group[i]->group, OWNER_GROUP, 0, 0);
        for (size_t k = 0; k < state->group[i]->n_layer; k++)
            add_name(names, state->group[i]->layer[k]->layer, OWNER_LAYER, 0, 0);
    }
    qsort(names->list, names->count, sizeof(names->list[0]), compare_named);
}

/* One id is one thing; only the ranks' copies of a symmetric buffer share theirs. */
static int check_names(const Mok__State *state, struct mokd_error *error)
{
    _cleanup_free_ struct named *list = calloc(count_names(state) + 1, sizeof(*list));
    struct names names = { .list = list };

    if (!list)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    collect_names(state, &names);
    for (size_t i = 0; i < names.count; i++) {
        const struct named *a = &list[i];
        if (a->id == 0 || (!state->ids_wrapped && a->id > state->last_id))
            return bad(error, "id", a->id, "never given out");
        for (size_t k = i + 1; k < names.count && list[k].id == a->id; k++)
            if (a->owner != OWNER_SYMMETRIC || list[k].owner != OWNER_SYMMETRIC || list[k].group != a->group ||
                list[k].session == a->session)
                return bad(error, "id", a->id, "of two things");
    }
    return 0;
}

int mokd_state_check(const struct mokd_server *server, const Mok__State *state, struct mokd_error *error)
{
    (void)server;
    int r = check_sessions(state, error);
    for (size_t i = 0; i < state->n_group && r == 0; i++) {
        if (group_of(state, state->group[i]->group) != state->group[i])
            return bad(error, "group", state->group[i]->group, "there twice");
        r = check_group(state, state->group[i], error);
    }
    return r < 0 ? r : check_names(state, error);
}

/* ------------------------------------------------------------------ what is still there */

/* One session's descriptors, in the order of its buffers; -1: missing. */
struct found {
    const Mok__StateSession *from;
    struct mokd_session *session; /* once made */
    int *fd;
    bool usable;
};

struct building {
    struct mokd_server *server;
    const Mok__State *state;
    struct found *found; /* [state->n_session] */
};

/* That it is there has been checked. */
static struct found *found_of(const struct building *b, uint64_t session)
{
    size_t i = 0;

    while (b->found[i].from->session != session)
        i++;
    return &b->found[i];
}

/* The device of that index, if it is the one of that time. */
static struct mokd_device *device_of(const struct building *b, uint32_t index)
{
    for (size_t i = 0; i < b->state->n_device; i++) {
        const Mok__StateDevice *then = b->state->device[i];
        if (then->index != index || index >= b->server->n_devices)
            continue;
        struct mokd_device *now = b->server->devices[index];
        return strcmp(then->name, now->config->name) == 0 && then->kind == now->config->kind ? now : NULL;
    }
    return NULL;
}

/* A host device's memory is what we sealed it to be; that of a GPU only its worker can judge. */
static bool holds(const struct mokd_device *device, int fd, uint64_t bytes)
{
    void *address = NULL;

    if (device->config->kind != MOK_DEVICE_HOST)
        return true;
    if (mok_memory_map(fd, bytes, MOK_MAP_WRITE, &address) < 0)
        return false;
    mok_memory_unmap(address, bytes);
    return true;
}

static int take_memory(const struct building *b, const Mok__StateBuffer *buffer)
{
    const struct mokd_device *device = device_of(b, buffer->device);
    int fd = device ? mokd_fdstore_take(b->server->store, buffer->memory) : -1;

    if (fd < 0)
        return -1;
    if (holds(device, fd, buffer->bytes))
        return fd;
    mok_close(fd);
    mokd_fdstore_drop(b->server->store, buffer->memory);
    return -1;
}

static void lost(const char *what, uint64_t id, const char *why)
{
    mok_log(MOK_LOG_WARNING, "state", "cannot go on", "%s=%" PRIu64 " error=\"%s\"", what, id, why);
}

static bool find_session(struct building *b, const Mok__StateSession *from, struct found *ret)
{
    ret->from = from;
    ret->fd = calloc(from->n_buffer + 1, sizeof(*ret->fd));
    ret->usable = ret->fd != NULL;
    for (size_t i = 0; i < from->n_buffer && ret->fd; i++) {
        ret->fd[i] = take_memory(b, from->buffer[i]);
        if (ret->fd[i] < 0 && from->buffer[i]->group == 0 && ret->usable) {
            ret->usable = false;
            lost("session", from->session, "a buffer's memory or device is not there any more");
        }
    }
    return ret->fd != NULL;
}

static bool group_is_whole(const struct building *b, const Mok__StateGroup *group)
{
    for (size_t rank = 0; rank < group->n_member; rank++) {
        const struct found *found = found_of(b, group->member[rank]->session);
        if (!found->usable || !device_of(b, group->member[rank]->device))
            return false;
        for (size_t i = 0; i < found->from->n_buffer; i++) {
            const Mok__StateBuffer *buffer = found->from->buffer[i];
            if (buffer->group == group->group &&
                (found->fd[i] < 0 || buffer->device != group->member[rank]->device))
                return false;
        }
    }
    return true;
}

/* ------------------------------------------------------------------ making */

static int adopt(struct building *b, struct found *found, size_t i, struct mokd_member *member)
{
    const Mok__StateBuffer *from = found->from->buffer[i];
    struct mokd_storage *storage = mokd_storage_adopt(found->session, device_of(b, from->device), from->bytes,
                                                      found->fd[i], from->memory);

    if (!storage)
        return -MOK_ENOMEM;
    found->fd[i] = -1;
    int r = mokd_buffer_adopt(found->session, member, from->buffer, storage);
    if (r < 0)
        mokd_storage_release(storage);
    return r;
}

static void give_up_session(struct found *found)
{
    lost("session", found->from->session, "mokd is out of memory");
    mokd_session_close(found->session, -MOK_ENOMEM, "mokd is out of memory");
    found->session = NULL;
}

static void make_session(struct building *b, struct found *found)
{
    const Mok__StateSession *from = found->from;

    found->session = mokd_session_new_away(b->server, from->uid);
    if (!found->session) {
        lost("session", from->session, "mokd is out of memory");
        return;
    }
    struct mokd_session *session = found->session;
    session->id = from->session;
    session->peer.pid = (pid_t)from->pid;
    session->started_ns = mok_now_ns() - from->age_ms * 1000000u;
    memcpy(session->token, from->token.data, sizeof(session->token));
    snprintf(session->job, sizeof(session->job), "%s", from->job);
    mokd_session_resume_totals(session, from);
    for (size_t i = 0; i < from->n_buffer; i++) {
        if (from->buffer[i]->group == 0 && adopt(b, found, i, NULL) < 0) {
            give_up_session(found);
            return;
        }
    }
}

static int make_member(struct building *b, const Mok__StateGroup *from, uint32_t rank, struct mokd_group *group)
{
    struct found *found = found_of(b, from->member[rank]->session);
    struct mokd_device *device = device_of(b, from->member[rank]->device);
    struct mokd_member *member = mokd_member_adopt(group, found->session, device, rank);

    if (!member)
        return -MOK_ENOMEM;
    mokd_user_adopt(found->session->user, MOKD_GROUPS, 1);
    for (size_t i = 0; i < found->from->n_buffer; i++)
        if (found->from->buffer[i]->group == from->group && adopt(b, found, i, member) < 0)
            return -MOK_ENOMEM;
    return 0;
}

static void remember_binding(struct mokd_session *session, const Mok__StatePart *from, struct mokd_layer_part *part)
{
    part->is_bound = true;
    mokd_layer_params_regions(from->params, part->region);
    for (size_t i = 0; i < MOKD_PARAMS; i++) {
        if (part->region[i].buffer == 0)
            continue;
        part->bound[i] = mokd_buffer_of(session, part->region[i].buffer);
        if (part->bound[i])
            part->bound[i]->bindings++;
        else
            part->is_bound = false; /* found out when it is bound again */
    }
}

/* Sizes are as its client was told; the plan is made anew. */
static void make_part(const Mok__StateLayer *from, struct mokd_group *group, uint32_t rank, struct mokd_layer *layer)
{
    struct mokd_layer_part *part = &layer->part[rank];
    const Mok__StatePart *state = from->part[rank];

    part->plan.spec = mok_layer_spec_read(from->spec, group->size, rank);
    part->plan.symmetric_bytes = state->memory->symmetric_bytes;
    part->plan.private_bytes = state->memory->private_bytes;
    part->plan.context_full_bytes = state->memory->context_full_bytes;
    part->plan.context_recompute_bytes = state->memory->context_recompute_bytes;
    if (!state->open)
        return;
    part->open = true;
    layer->open_parts++;
    group->member[rank]->session->n_layers++;
    if (state->params)
        remember_binding(group->member[rank]->session, state, part);
}

static bool is_open_somewhere(const Mok__StateLayer *layer)
{
    for (size_t rank = 0; rank < layer->n_part; rank++)
        if (layer->part[rank]->open)
            return true;
    return false;
}

static int make_layers(const Mok__StateGroup *from, struct mokd_group *group)
{
    for (size_t i = 0; i < from->n_layer; i++) {
        if (!is_open_somewhere(from->layer[i]))
            continue;
        struct mokd_layer *layer = mokd_layer_new(group, from->layer[i]->layer);
        if (!layer)
            return -MOK_ENOMEM;
        layer->ready = true;
        for (uint32_t rank = 0; rank < group->size; rank++)
            make_part(from->layer[i], group, rank, layer);
    }
    return 0;
}

static void make_group(struct building *b, const Mok__StateGroup *from)
{
    struct mokd_group *group = NULL;
    int r = 0;

    if (!group_is_whole(b, from)) {
        lost("group", from->group, "a rank, its memory or its device is not there any more");
        return;
    }
    for (uint32_t rank = 0; rank < from->n_member; rank++)
        if (!found_of(b, from->member[rank]->session)->session)
            r = -MOK_ENOMEM;
    if (r == 0)
        group = mokd_group_adopt(b->server, from->group, from->uid, from->name, (uint32_t)from->n_member);
    if (group)
        group->exclusive = from->exclusive;
    for (uint32_t rank = 0; group && rank < group->size && r == 0; rank++)
        r = make_member(b, from, rank, group);
    if (group && r == 0)
        r = make_layers(from, group);
    if (group && r == 0)
        return;
    lost("group", from->group, "mokd is out of memory");
    for (uint32_t rank = 0; group && rank < from->n_member; rank++) {
        struct found *found = found_of(b, from->member[rank]->session);
        if (found->session)
            give_up_session(found);
    }
}

static void make_devices(const struct building *b)
{
    for (size_t i = 0; i < b->state->n_device; i++) {
        const Mok__StateDevice *from = b->state->device[i];
        struct mokd_device *device = device_of(b, from->index);
        if (!device)
            continue;
        device->ops_done = from->ops_done;
        device->device_ns = from->device_ns;
        device->errors = from->errors;
        device->restarts = from->restarts;
        device->draining = from->draining;
    }
}

static void drop_unused(const struct building *b)
{
    for (size_t i = 0; i < b->state->n_session; i++) {
        struct found *found = &b->found[i];
        for (size_t k = 0; found->fd && k < found->from->n_buffer; k++) {
            if (found->fd[k] < 0)
                continue;
            mok_close(found->fd[k]);
            mokd_fdstore_drop(b->server->store, found->from->buffer[k]->memory);
        }
        free(found->fd);
    }
}

void mokd_state_build(struct mokd_server *server, const Mok__State *state)
{
    _cleanup_free_ struct found *found = calloc(state->n_session + 1, sizeof(*found));
    struct building b = { .server = server, .state = state, .found = found };
    size_t sessions = 0;

    server->last_session = state->last_session;
    server->last_id = state->last_id;
    server->ids_wrapped = state->ids_wrapped;
    server->errors = state->errors;
    make_devices(&b);
    if (!found) {
        lost("sessions", state->n_session, "mokd is out of memory");
        return;
    }
    for (size_t i = 0; i < state->n_session; i++)
        found[i].from = state->session[i];
    for (size_t i = 0; i < state->n_session; i++)
        if (find_session(&b, state->session[i], &found[i]) && found[i].usable)
            make_session(&b, &found[i]);
    for (size_t i = 0; i < state->n_group; i++)
        make_group(&b, state->group[i]);
    for (size_t i = 0; i < state->n_session; i++)
        sessions += found[i].session != NULL;
    drop_unused(&b);
    mok_log(MOK_LOG_NOTICE, "state", "sessions of the mokd before wait for their clients",
            "sessions=%zu of=%zu groups=%zu version=%s", sessions, state->n_session, state->n_group, state->version);
    if (sessions > 0)
        mokd_sessions_await(server);
}
