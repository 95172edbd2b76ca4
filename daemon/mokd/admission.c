/* SPDX-License-Identifier: Apache-2.0 */
#include "admission.h"

#include <inttypes.h>
#include <string.h>

#include "client_queue.h"
#include "rack_groups.h"
#include "rack_orders.h"
#include "state.h"
#include "status.h"

/* ------------------------------------------------------------------ draining */

static int refuse_drained(const struct mokd_device *device, struct mokd_error *error)
{
    return mokd_error_set(
        error, -MOK_EDRAIN,
        "device = %u: %s is being drained, takes no new group or queue, and has %u ranks and %u queues "
        "to finish",
        device->index, device->config->name, device->n_ranks, device->n_queues);
}

void mokd_device_emptier(const struct mokd_device *device)
{
    if (device->draining && device->n_ranks == 0 && device->n_queues == 0)
        mok_log(MOK_LOG_NOTICE, "device", "drained", "device=%s", device->config->name);
}

/* Groups that wait for ranks are new ones; those that are whole go on. */
static void turn_away_forming(struct mokd_device *device)
{
    struct mokd_error error = { 0 };

    refuse_drained(device, &error);
    for (struct mokd_group *group = NULL; (group = mokd_group_walk(device->server, group));)
        if (group->state == MOKD_GROUP_FORMING && mokd_group_has_rank_on(group, device))
            mokd_group_turn_away(group, &error);
}

static void drain(struct mokd_device *device, bool draining, const char *by)
{
    if (device->draining == draining)
        return;
    device->draining = draining;
    mokd_state_touch(device->server); /* an upgrade may come in the middle of it */
    mok_log(MOK_LOG_NOTICE, "device", draining ? "draining" : "open again", "device=%s by=%s ranks=%u queues=%u",
            device->config->name, by, device->n_ranks, device->n_queues);
    if (!draining)
        return;
    turn_away_forming(device);
    mokd_device_emptier(device);
}

void mokd_drain_announce(struct mokd_server *server)
{
    bool all = server->n_devices > 0;

    for (size_t i = 0; i < server->n_devices; i++)
        all &= server->devices[i]->draining;
    if (server->rack)
        rack_set_draining(server->rack, all);
}

int mokd_drain_apply(struct mokd_server *server, const Mok__Drain *request, const char *by, struct mokd_error *error)
{
    if (!request->node && request->device >= server->n_devices)
        return mokd_error_set(error, -MOK_ENODEV, "device = %u: this node has %zu devices", request->device,
                              server->n_devices);
    for (size_t i = 0; i < server->n_devices && !request->look; i++)
        if (request->node || request->device == i)
            drain(server->devices[i], !request->undo, by);
    mokd_drain_announce(server);
    return 0;
}

void mokd_drain(struct mokd_session *session, uint64_t id, const Mok__Drain *request)
{
    struct mokd_server *server = session->server;
    struct mokd_error error = { 0 };

    if (!mokd_session_is_admin(session))
        mokd_error_set(&error, -MOK_EACCESS, "drain: user %s is no administrator of this mokd", session->user->name);
    else if (request->on[0] && strcmp(request->on, mokd_rack_own_name(server)) != 0)
        mokd_rack_order(session, id, request, &error);
    else if (mokd_drain_apply(server, request, session->user->name, &error) == 0)
        mokd_status_devices(session, id);
    if (error.code < 0)
        mokd_session_refuse(session, id, &error);
}

/* ------------------------------------------------------------------ devices of one group alone */

static bool has_rank_on(const struct mokd_session *session, const struct mokd_device *device,
                        const struct mokd_group *group)
{
    const struct mokd_member *member;

    TAILQ_FOREACH(member, &session->members, link)
        if (member->device == device && (!group || member->group == group))
            return true;
    return false;
}

static int refuse_taken(const struct mokd_device *device, struct mokd_error *error)
{
    const struct mokd_group *holder = device->exclusive;

    return mokd_error_set(error, -MOK_EEXCLUSIVE, "device = %u: group %s of user %u has %s alone", device->index,
                          holder->name, holder->uid, device->config->name);
}

/* Nobody but the session itself and the ranks of `group` may be on a device that is to be theirs alone. */
static int check_alone(const struct mokd_session *session, const struct mokd_device *device,
                       const struct mokd_group *group, struct mokd_error *error)
{
    const struct mokd_queue *queue;
    const struct mokd_group *other;

    TAILQ_FOREACH(queue, &device->queues, device_link)
        if (queue->session != session)
            return mokd_error_set(error, -MOK_EEXCLUSIVE,
                                  "device = %u: session %" PRIu64 " of user %s has a queue on %s, which is to be for "
                                  "group %s alone",
                                  device->index, queue->session->id, queue->session->user->name, device->config->name,
                                  group ? group->name : "this");
    TAILQ_FOREACH(other, &device->server->groups, link)
        for (uint32_t rank = 0; other != group && rank < other->size; rank++)
            if (other->member[rank] && other->member[rank]->device == device && other->member[rank]->session != session)
                return mokd_error_set(error, -MOK_EEXCLUSIVE,
                                      "device = %u: rank %u of group %s of user %u is on %s, which is to be for one "
                                      "group alone",
                                      device->index, rank, other->name, other->uid, device->config->name);
    return 0;
}

int mokd_admit_rank(const struct mokd_session *session, const struct mokd_device *device,
                    const struct mokd_group *group, bool exclusive, struct mokd_error *error)
{
    if (device->draining)
        return refuse_drained(device, error);
    if (device->exclusive && device->exclusive != group)
        return refuse_taken(device, error);
    if (!exclusive)
        return 0;
    if (!session->user->limits.exclusive)
        return mokd_error_set(error, -MOK_EACCESS, "exclusive: user %s may not ask for devices of his own",
                              session->user->name);
    return check_alone(session, device, group, error);
}

int mokd_admit_queue(const struct mokd_session *session, const struct mokd_device *device, struct mokd_error *error)
{
    if (device->draining && !has_rank_on(session, device, NULL))
        return refuse_drained(device, error);
    if (device->exclusive && !has_rank_on(session, device, device->exclusive))
        return refuse_taken(device, error);
    return 0;
}
