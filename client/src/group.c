/* SPDX-License-Identifier: Apache-2.0 */
/* Joining and leaving groups. mokd decides who is in; this side keeps what it was told. */
#include <inttypes.h>
#include <stdio.h>

#include "port.h"
#include "session.h"

int group_check(const mok_group *group)
{
    return group ? session_check(group->session, "group's session") : client_fail(MOK_EARG, "group is NULL");
}

int group_well(const mok_group *group)
{
    const struct failure *failure = __atomic_load_n(&group->failure, __ATOMIC_ACQUIRE);
    return failure ? client_fail_text(failure->code, failure->text) : 0;
}

static void group_add(mok_group *group)
{
    mok_session *session = group->session;

    pthread_mutex_lock(&session->lock);
    group->next = session->groups;
    session->groups = group;
    group->failure = session_failure(session, group->id);
    pthread_mutex_unlock(&session->lock);
}

void group_drop(mok_group *group)
{
    mok_session *session = group->session;
    mok_layer *layer, *next_layer;
    mok_buffer *buffer, *next_buffer;

    for (layer = session->layers; layer; layer = next_layer) {
        next_layer = layer->next;
        if (layer->group == group)
            layer_drop(layer);
    }
    for (buffer = session->buffers; buffer; buffer = next_buffer) {
        next_buffer = buffer->next;
        if (buffer->group == group)
            buffer_drop(buffer);
    }
    for (mok_group **at = &session->groups; *at; at = &(*at)->next) {
        if (*at == group) {
            *at = group->next;
            break;
        }
    }
    free(group);
}

_public_ int mok_group_join(mok_session *session, const mok_group_options *options, mok_group **ret_group)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    _cleanup_free_ mok_group *group = NULL;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__GroupJoin body = MOK__GROUP_JOIN__INIT;
    mok_group_options o;

    int r = session_check(session, "session");
    if (r < 0)
        return r;
    if (!ret_group)
        return client_fail(MOK_EARG, "ret_group is NULL");
    r = check_group_options(options, &o);
    if (r < 0)
        return r;
    group = calloc(1, sizeof(*group));
    if (!group)
        return client_fail(MOK_ENOMEM, "no memory for a group");
    r = port_get(session, o.device, &group->port, &group->queue);
    if (r < 0)
        return r;

    body.name = (char *)o.name;
    body.size = o.ranks;
    body.rank = o.rank;
    body.device = o.device;
    body.timeout_ms = o.timeout_ms;
    body.exclusive = o.flags & MOK_GROUP_EXCLUSIVE;
    request.body_case = MOK__REQUEST__BODY_GROUP_JOIN;
    request.group_join = &body;
    r = session_call_collective(session, &request, o.timeout_ms, MOK__REPLY__BODY_GROUP_JOIN, 0, &answer);
    if (r < 0)
        return r;
    group->session = session;
    group->id = answer.reply->group_join->group;
    group->ranks = o.ranks;
    group->rank = o.rank;
    group->device = o.device;
    snprintf(group->name, sizeof(group->name), "%s", o.name);
    group_add(group);
    *ret_group = mok_take_pointer(&group);
    return 0;
}

_public_ int mok_group_leave(mok_group *group)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__GroupLeave body = MOK__GROUP_LEAVE__INIT;

    if (!group)
        return 0;
    int r = group_check(group);
    if (r < 0)
        return r;
    mok_session *session = group->session;
    body.group = group->id;
    request.body_case = MOK__REQUEST__BODY_GROUP_LEAVE;
    request.group_leave = &body;
    r = session_call(session, &request, MOK__REPLY__BODY__NOT_SET, 0, &answer);

    pthread_mutex_lock(&session->lock);
    port_forget_group(group->port, group);
    group_drop(group);
    pthread_mutex_unlock(&session->lock);
    return r;
}
