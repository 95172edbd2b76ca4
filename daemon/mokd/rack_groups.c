/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_groups.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "collective.h"
#include "layer.h"
#include "names.h"
#include "rack_groups_internal.h"
#include "rack_orders.h"
#include "rack_share.h"
#include "span.h"

#define TICK_MS 250u

/* Other nodes' answers that a gather waits for. */
struct dropping {
    TAILQ_ENTRY(dropping) link;
    uint64_t request;
    uint32_t left;
    struct mokd_gather *gather;
};

/* Another node's wish that our workers let go of a copy. */
struct letting_go {
    struct mokd_gather gather;
    struct mokd_rack_groups *groups;
    struct mokd_group *group;
    uint32_t node;
    uint64_t request;
};

uint64_t mokd_rack_now_ms(void)
{
    return mok_now_ns() / 1000000u;
}

bool mokd_rack_is_self(const struct mokd_server *server, uint32_t node)
{
    return server->rack_groups && server->rack_groups->node.self == node;
}

const char *mokd_rack_name(const struct mokd_server *server, uint32_t node)
{
    return server->rack_groups ? group_node_name(&server->rack_groups->node, node) : "";
}

const struct group_node *mokd_rack_node(const struct mokd_server *server)
{
    return server->rack_groups ? &server->rack_groups->node : NULL;
}

const char *mokd_rack_own_name(const struct mokd_server *server)
{
    return server->rack_groups ? mokd_rack_name(server, server->rack_groups->node.self) : "";
}

struct mokd_group *mokd_rack_find_group(const struct mokd_server *server, uint32_t id)
{
    struct mokd_group *group;

    TAILQ_FOREACH(group, &server->groups, link)
        if (group->span && group->id == id)
            return group;
    return NULL;
}

static void error_of(const struct group_error *from, struct mokd_error *ret)
{
    *ret = (struct mokd_error){ .code = from->code };
    snprintf(ret->text, sizeof(ret->text), "%s", from->text);
}

/* ------------------------------------------------------------------ what the state machines ask for */

static struct mokd_member *member_of_join(struct mokd_server *server, uint64_t join)
{
    struct mokd_group *group;

    TAILQ_FOREACH(group, &server->groups, link)
        for (uint32_t rank = 0; group->state == MOKD_GROUP_FORMING && rank < group->size; rank++)
            if (group->member[rank] && group->member[rank]->rack_join == join)
                return group->member[rank];
    return NULL;
}

static void op_refused(void *cookie, uint64_t join, const struct group_error *error)
{
    struct mokd_rack_groups *groups = cookie;
    struct mokd_member *member = member_of_join(groups->server, join);
    struct mokd_error sentence;

    if (!member)
        return;
    error_of(error, &sentence);
    member->rack_join = 0;
    mokd_group_join_failed(member, &sentence);
}

/* The ranks of this node that the roster names wait in one FORMING group. */
static struct mokd_group *find_forming(const struct mokd_rack_groups *groups, const struct group_roster *roster)
{
    struct mokd_group *group;

    TAILQ_FOREACH(group, &groups->server->groups, link)
        if (group->state == MOKD_GROUP_FORMING && group->uid == roster->uid && group->size == roster->size &&
            strcmp(group->name, roster->name) == 0)
            return group;
    return NULL;
}

static void op_open(void *cookie, const struct group_roster *roster)
{
    struct mokd_rack_groups *groups = cookie;
    struct mokd_group *group = find_forming(groups, roster);
    struct mokd_span *span = group ? mokd_span_new(roster) : NULL;
    struct group_error error;

    if (!span) {
        group_error_set(&error, -MOK_ENOMEM, 0, "node %s is out of memory",
                        group_node_name(&groups->node, groups->node.self));
        group_node_prepared(&groups->node, roster->id, 0, &error, mokd_rack_now_ms());
        group_node_forget(&groups->node, roster->id);
        if (group)
            mokd_group_turn_away(group, &(struct mokd_error){ .code = -MOK_ENOMEM, .text = "mokd is out of memory" });
        return;
    }
    mokd_group_run_begin(group);
    mokd_group_come_together(group, span);
    mokd_early_adopt(&groups->early, group);
    mokd_group_run_end(group);
}

static void op_prepare(void *cookie, uint32_t id, uint64_t index, uint32_t kind, uint32_t object)
{
    struct mokd_rack_groups *groups = cookie;
    struct mokd_group *group = mokd_rack_find_group(groups->server, id);

    (void)kind;
    if (group)
        mokd_collective_prepare(group, index, object);
}

static void op_verdict(void *cookie, uint32_t id, uint64_t index, const struct group_error *error)
{
    struct mokd_rack_groups *groups = cookie;
    struct mokd_group *group = mokd_rack_find_group(groups->server, id);
    struct mokd_error sentence;

    if (!group)
        return;
    error_of(error, &sentence);
    mokd_group_run_begin(group);
    if (index == 0 || !mokd_collective_refuse(group, index, &sentence))
        mokd_span_verdict(group, index, &sentence);
    mokd_group_run_end(group);
}

static void op_over(void *cookie, uint32_t id, const struct group_error *error)
{
    struct mokd_rack_groups *groups = cookie;
    struct mokd_group *group = mokd_rack_find_group(groups->server, id);

    if (group)
        mokd_group_fail(group, error->rank, error->text);
}

static void let_go(struct mokd_gather *gather)
{
    struct letting_go *job = mokd_container_of(gather, struct letting_go, gather);
    struct mokd_group *group = job->group;

    group_node_dropped(&job->groups->node, job->node, job->request, mokd_rack_now_ms());
    free(job);
    mokd_group_run_end(group);
}

static void op_drop(void *cookie, uint32_t node, uint64_t request, uint32_t id, uint32_t rank, uint32_t buffer)
{
    struct mokd_rack_groups *groups = cookie;
    struct mokd_group *group = mokd_rack_find_group(groups->server, id);
    struct letting_go *job = group ? calloc(1, sizeof(*job)) : NULL;

    if (!job) {
        group_node_dropped(&groups->node, node, request, mokd_rack_now_ms());
        return;
    }
    job->groups = groups;
    job->group = group;
    job->node = node;
    job->request = request;
    mokd_group_run_begin(group);
    mokd_gather_begin(&job->gather, let_go);
    mokd_foreign_buffers_unmap(group, rank, buffer, &job->gather);
    mokd_gather_end(&job->gather);
}

static void op_dropped(void *cookie, uint32_t node, uint64_t request)
{
    struct mokd_rack_groups *groups = cookie;
    struct dropping *dropping;

    (void)node;
    TAILQ_FOREACH(dropping, &groups->dropping, link)
        if (dropping->request == request)
            break;
    if (!dropping || --dropping->left > 0)
        return;
    struct mokd_gather *gather = dropping->gather;
    TAILQ_REMOVE(&groups->dropping, dropping, link);
    free(dropping);
    mokd_gather_drop(gather, 0, NULL);
}

static void op_layer_gone(void *cookie, uint32_t id, uint32_t layer, uint32_t rank)
{
    struct mokd_rack_groups *groups = cookie;
    struct mokd_group *group = mokd_rack_find_group(groups->server, id);

    if (group)
        mokd_layer_part_gone_elsewhere(group, layer, rank);
}

static void op_apart(void *cookie, char *ret, size_t size)
{
    struct mokd_rack_groups *groups = cookie;
    mokd_rack_apart(groups->server, ret, size);
}

static void op_unreached(void *cookie, const char *name, char *ret, size_t size)
{
    struct mokd_rack_groups *groups = cookie;
    mokd_rack_unreached(groups->server, name, ret, size);
}

static bool op_id_is_taken(void *cookie, uint32_t id)
{
    struct mokd_rack_groups *groups = cookie;
    return mokd_server_id_is_taken(groups->server, id);
}

static const struct group_ops operations = {
    .send = mokd_rack_send,
    .refused = op_refused,
    .open = op_open,
    .prepare = op_prepare,
    .verdict = op_verdict,
    .over = op_over,
    .drop = op_drop,
    .dropped = op_dropped,
    .layer_gone = op_layer_gone,
    .unreached = op_unreached,
    .apart = op_apart,
    .id_is_taken = op_id_is_taken,
};

/* ------------------------------------------------------------------ what the mesh says */

static void on_message(void *cookie, uint32_t node, const Mok__RackFrame *frame)
{
    struct mokd_server *server = cookie;
    struct mokd_rack_groups *groups = server->rack_groups;

    if (frame->body_case == MOK__RACK_FRAME__BODY_USE)
        mokd_rack_share_report(server, node, frame->use);
    if (mokd_rack_orders_message(server, node, frame) || !groups || frame->body_case != MOK__RACK_FRAME__BODY_GROUP)
        return;
    const Mok__GroupMessage *message = frame->group;
    if (!mokd_rack_paths_message(groups, node, message))
        group_node_receive(&groups->node, node, message, mokd_rack_now_ms());
}

static void peer_up(struct mokd_rack_groups *groups, uint32_t node)
{
    struct rack_node_info info;

    if (rack_info(groups->server->rack, node, &info) < 0 || info.self)
        return;
    groups->peer[node].refusal[0] = '\0';
    group_node_peer_up(&groups->node, node, info.name, mokd_rack_now_ms());
    mokd_rack_share_peer_up(groups->server);
    mokd_rack_offer(groups, node);
}

static void on_state(void *cookie, uint32_t node, enum rack_state before, enum rack_state now, const char *reason)
{
    struct mokd_server *server = cookie;
    struct mokd_rack_groups *groups = server->rack_groups;
    char text[RACK_MAX_TEXT];

    if (!groups || node == groups->node.self)
        return;
    if (now == RACK_UP && before != RACK_SUSPECT)
        peer_up(groups, node);
    if (now != RACK_LOST && now != RACK_LEFT)
        return;
    snprintf(text, sizeof(text), "%s: %.230s", now == RACK_LEFT ? "has left" : "was lost", reason);
    mokd_rack_orders_peer_down(server, node, text);
    mokd_rack_share_peer_down(server, node);
    mokd_rack_outbox_clear(groups, node);
    group_node_peer_lost(&groups->node, node, text, mokd_rack_now_ms());
    mokd_early_forget(&groups->early, 0, node);
    mokd_rack_unlink(groups, node, MOK__GOODBYE_REASON__GOODBYE_LOST);
}

static void on_goodbye(void *cookie, uint32_t node, Mok__GoodbyeReason reason)
{
    struct mokd_server *server = cookie;

    if (server->rack_groups)
        mokd_host_goodbye(server->rack_groups->links, node, reason);
}

static void on_drained(void *cookie, uint32_t node)
{
    struct mokd_server *server = cookie;

    if (server->rack_groups)
        mokd_rack_outbox_flush(server->rack_groups, node);
}

const struct rack_handlers mokd_rack_groups_handlers = {
    .message = on_message,
    .state = on_state,
    .drained = on_drained,
    .goodbye = on_goodbye,
};

static void tick(uv_timer_t *timer)
{
    struct mokd_rack_groups *groups = timer->data;
    uint64_t now_ms = mokd_rack_now_ms();

    mokd_rack_outbox_close_gaps(groups);
    group_node_tick(&groups->node, now_ms);
    mokd_rack_look_at_groups(groups);
    mokd_early_expire(&groups->early, now_ms);
    for (uint32_t node = 0; node < GROUP_MAX_NODES; node++)
        if (groups->node.peer[node].up && node != groups->node.self)
            mokd_rack_offer(groups, node);
}

/* ------------------------------------------------------------------ for group.c and its kin */

static const char *why_no_fabric(const struct mokd_device *device)
{
    if (device->config->kind != MOK_DEVICE_CUDA)
        return "it is no GPU";
    if (device->fabric || device->no_fabric[0])
        return device->no_fabric;
    return "its worker has not been up";
}

int mokd_rack_join(struct mokd_member *member, const Mok__GroupJoin *request, struct mokd_error *error)
{
    struct mokd_rack_groups *groups = member->group->server->rack_groups;
    const struct mokd_session *session = member->session;
    char number[16];

    snprintf(number, sizeof(number), "%u", session->user->uid);
    struct group_joining joining = {
        .uid = session->user->uid,
        .user = strcmp(session->user->name, number) == 0 ? "" : session->user->name,
        .name = member->group->name,
        .size = member->group->size,
        .rank = member->rank,
        .device = member->device->index,
        .kind = member->device->config->kind,
        .session = session->id,
        .timeout_ms = request->timeout_ms,
        .exclusive = member->group->exclusive,
        .fabric = member->device->fabric,
        .no_fabric = why_no_fabric(member->device),
    };
    /* The number comes back before any answer: who is called back finds the member by it. */
    int r = group_node_join(&groups->node, &joining, mokd_rack_now_ms(), &member->rack_join);
    return r < 0 ? mokd_error_set(error, r, "mokd is out of memory") : 0;
}

/* As it is told to other nodes. */
static void say_where(const struct mokd_rack_groups *groups, uint32_t rank, const struct mokd_error *error,
                      struct group_error *ret)
{
    group_error_set(ret, error->code, rank, "rank %u (node %s): %.300s", rank,
                    group_node_name(&groups->node, groups->node.self), error->text);
}

void mokd_rack_decline(const struct mokd_session *session, const char *name, uint32_t rank,
                       const struct mokd_error *error)
{
    struct mokd_rack_groups *groups = session->server->rack_groups;
    struct group_error told;

    if (!groups)
        return;
    say_where(groups, rank, error, &told);
    group_node_decline(&groups->node, session->user->uid, name, rank, &told, mokd_rack_now_ms());
}

void mokd_rack_withdraw(struct mokd_member *member, const struct mokd_error *error)
{
    struct mokd_rack_groups *groups = member->group->server->rack_groups;
    uint64_t join = member->rack_join;
    struct group_error told;

    member->rack_join = 0;
    if (!groups || !join)
        return;
    if (error)
        say_where(groups, member->rank, error, &told);
    group_node_withdraw(&groups->node, join, error ? &told : NULL, mokd_rack_now_ms());
}

int mokd_rack_call(struct mokd_member *member, uint64_t index, const struct group_params *params, uint64_t timeout_ms)
{
    struct mokd_group *group = member->group;

    return group_node_call(&group->server->rack_groups->node, group->id, member->rank, index + 1, params, timeout_ms,
                           mokd_rack_now_ms());
}

void mokd_rack_prepared(struct mokd_group *group, uint64_t index, const struct group_error *error)
{
    group_node_prepared(&group->server->rack_groups->node, group->id, index, error, mokd_rack_now_ms());
}

/* "rank 1 left" becomes "rank 1 (node b) left"; what names the node already stays. */
static void with_node(const struct mokd_group *group, uint32_t rank, const char *text, char *ret, size_t size)
{
    char prefix[32];
    const char *node = mokd_span_node(group, rank);
    int length = snprintf(prefix, sizeof(prefix), "rank %u", rank);

    if (strstr(text, "node "))
        snprintf(ret, size, "%.400s", text);
    else if (strncmp(text, prefix, (size_t)length) == 0)
        snprintf(ret, size, "rank %u (node %s)%.300s", rank, node, text + length);
    else
        snprintf(ret, size, "rank %u (node %s): %.300s", rank, node, text);
}

void mokd_rack_over(struct mokd_group *group, uint32_t rank, const char *text)
{
    char sentence[GROUP_TEXT_MAX];

    if (!group->span || !group->server->rack_groups)
        return;
    with_node(group, rank, text, sentence, sizeof(sentence));
    group_node_over(&group->server->rack_groups->node, group->id, rank, sentence, mokd_rack_now_ms());
}

void mokd_rack_forget(struct mokd_group *group)
{
    if (group->span && group->server->rack_groups)
        group_node_forget(&group->server->rack_groups->node, group->id);
}

void mokd_rack_drop(struct mokd_group *group, uint32_t rank, uint32_t buffer, struct mokd_gather *gather)
{
    struct mokd_rack_groups *groups = group->server->rack_groups;
    struct dropping *dropping = group->span && groups ? calloc(1, sizeof(*dropping)) : NULL;

    if (!dropping)
        return; /* nobody is waited for: the memory is emptied whoever maps it */
    dropping->request = ++groups->last_request;
    dropping->gather = gather;
    dropping->left = 1; /* us, until all are asked */
    mokd_gather_hold(gather);
    TAILQ_INSERT_TAIL(&groups->dropping, dropping, link);
    dropping->left += group_node_drop(&groups->node, group->id, rank, buffer, dropping->request, mokd_rack_now_ms());
    op_dropped(groups, 0, dropping->request);
}

void mokd_rack_layer_gone(struct mokd_group *group, uint32_t layer, uint32_t rank)
{
    if (group->span && group->server->rack_groups)
        group_node_layer_gone(&group->server->rack_groups->node, group->id, layer, rank, mokd_rack_now_ms());
}

/* ------------------------------------------------------------------ start and stop */

/* Beside the clients' socket, since who may reach that directory is settled. */
static void path_of_links(const struct mokd_server *server, const char *name, char *ret, size_t size)
{
    const char *socket = server->options->socket;
    const char *slash = strrchr(socket, '/');

    snprintf(ret, size, "%.*s/rack.%s", slash ? (int)(slash - socket) : 1, slash ? socket : ".", name);
}

int mokd_rack_groups_start(struct mokd_server *server, struct mokd_error *error)
{
    struct rack_node_info info;
    char path[MOKD_PATH_MAX];

    if (!server->rack)
        return 0;
    struct mokd_rack_groups *groups = calloc(1, sizeof(*groups));
    if (!groups)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    groups->server = server;
    mokd_early_init(&groups->early);
    TAILQ_INIT(&groups->dropping);
    for (uint32_t node = 0; node < GROUP_MAX_NODES; node++)
        TAILQ_INIT(&groups->peer[node].backlog);
    int r = rack_info(server->rack, rack_self(server->rack), &info);
    if (r < 0) {
        free(groups);
        return mokd_error_set(error, r, "the rack does not know this node");
    }
    path_of_links(server, info.name, path, sizeof(path));
    group_node_init(&groups->node, &operations, groups, info.index, info.name);
    r = mokd_host_links_new(server, path, info.name, &mokd_rack_host_handlers, groups, &groups->links, error);
    if (r < 0) {
        free(groups);
        return r;
    }
    uv_timer_init(&server->loop, &groups->tick);
    groups->tick.data = groups;
    uv_timer_start(&groups->tick, tick, TICK_MS, TICK_MS);
    server->rack_groups = groups;
    for (uint32_t node = 0; node < RACK_MAX_NODES; node++)
        if (rack_info(server->rack, node, &info) == 0 && (info.state == RACK_UP || info.state == RACK_SUSPECT))
            peer_up(groups, node);
    return 0;
}

static void freed(uv_handle_t *handle)
{
    free(handle->data);
}

void mokd_rack_groups_leave(struct mokd_server *server)
{
    if (server->rack_groups)
        group_node_leave(&server->rack_groups->node, mokd_rack_now_ms());
}

void mokd_rack_groups_stop(struct mokd_server *server)
{
    struct mokd_rack_groups *groups = server->rack_groups;
    struct dropping *dropping;

    if (!groups)
        return;
    server->rack_groups = NULL;
    mokd_early_forget(&groups->early, UINT64_MAX, UINT32_MAX);
    for (uint32_t node = 0; node < GROUP_MAX_NODES; node++)
        mokd_rack_outbox_clear(groups, node);
    while ((dropping = TAILQ_FIRST(&groups->dropping))) {
        TAILQ_REMOVE(&groups->dropping, dropping, link);
        free(dropping);
    }
    group_node_release(&groups->node);
    mokd_host_links_free(groups->links);
    uv_close((uv_handle_t *)&groups->tick, freed);
}
