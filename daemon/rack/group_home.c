/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The home of a group's name: where the joins of its ranks meet.
 *
 *   (none) --first join--> GATHERING --all ranks have come--> formed: told to all, kept by group_standing.c
 *                             |  ^
 *                             |  +-- a rank comes, goes, is lost with its node, or waits too long: makes room
 *                             +--- ranks that cannot come together --> all refused, forgotten
 *
 * A rank that is taken is refused and the others wait on, as on one node. Of a group that stands all ranks are taken;
 * but its end may be known elsewhere before it is here, so who comes meanwhile is refused only after a while.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "group_internal.h"
#include "names.h"

struct guest {
    bool here;
    uint32_t node, device, kind;
    uint64_t session, join;
    uint64_t since_ms;
    uint64_t timeout_ms, deadline_ms; /* 0: none */
    bool fabric, tells_over;
    char no_fabric[GROUP_REASON_MAX + 1];
};

struct group_meeting {
    TAILQ_ENTRY(group_meeting) link;
    uint32_t uid, size, joined;
    bool exclusive;
    char name[MOK_MAX_NAME + 1];
    char user[MOK_MAX_NAME + 1]; /* "": nobody has said */
    uint32_t user_node;          /* who has said */
    struct guest guest[];        /* [size] */
};

/* ------------------------------------------------------------------ the object */

static struct group_meeting *find(const struct group_node *node, uint32_t uid, const char *name)
{
    struct group_meeting *meeting;

    TAILQ_FOREACH(meeting, &node->meetings, link)
        if (meeting->uid == uid && strcmp(meeting->name, name) == 0)
            return meeting;
    return NULL;
}

static void meeting_free(struct group_node *node, struct group_meeting *meeting)
{
    TAILQ_REMOVE(&node->meetings, meeting, link);
    node->n_meetings--;
    free(meeting);
}

static struct group_meeting *meeting_new(struct group_node *node, const Mok__GroupJoining *message)
{
    struct group_meeting *meeting;

    if (node->n_meetings >= GROUP_MAX_MEETINGS)
        return NULL;
    meeting = calloc(1, sizeof(*meeting) + message->size * sizeof(meeting->guest[0]));
    if (!meeting)
        return NULL;
    meeting->uid = message->uid;
    meeting->size = message->size;
    meeting->exclusive = message->exclusive;
    snprintf(meeting->name, sizeof(meeting->name), "%s", message->name);
    TAILQ_INSERT_TAIL(&node->meetings, meeting, link);
    node->n_meetings++;
    return meeting;
}

void group_home_release(struct group_node *node)
{
    struct group_meeting *meeting;

    while ((meeting = TAILQ_FIRST(&node->meetings)))
        meeting_free(node, meeting);
}

/* ------------------------------------------------------------------ answers */

static void refuse(struct group_node *node, uint32_t peer, uint64_t join, const struct group_error *error)
{
    Mok__GroupRefused body = MOK__GROUP_REFUSED__INIT;
    Mok__GroupMessage message = group_message(refused, REFUSED, &body);

    body.join = join;
    body.code = error->code;
    body.text = (char *)error->text;
    group_send(node, peer, &message);
}

static void refuse_taken(struct group_node *node, uint32_t peer, uint64_t join, const char *name, uint32_t rank,
                         uint64_t session, uint32_t by)
{
    struct group_error error;

    group_error_set(&error, -MOK_ERANK, rank, "rank = %u: taken in group %s by session %" PRIu64 " of node %s", rank,
                    name, session, group_node_name(node, by));
    refuse(node, peer, join, &error);
}

static void refuse_all(struct group_node *node, struct group_meeting *meeting, const struct group_error *error)
{
    for (uint32_t rank = 0; rank < meeting->size; rank++)
        if (meeting->guest[rank].here)
            refuse(node, meeting->guest[rank].node, meeting->guest[rank].join, error);
    meeting_free(node, meeting);
}

static void make_room(struct group_node *node, struct group_meeting *meeting, uint32_t rank)
{
    meeting->guest[rank] = (struct guest){ 0 };
    if (--meeting->joined == 0)
        meeting_free(node, meeting);
}

/* To every node once; the lead first, so that it knows of the group when the others ask. */
static void tell_formed(struct group_node *node, const struct group_meeting *meeting, const Mok__GroupFormed *body)
{
    Mok__GroupMessage message = group_message(formed, FORMED, (Mok__GroupFormed *)body);

    for (uint32_t rank = 0; rank < meeting->size; rank++) {
        bool told = false;
        for (uint32_t before = 0; before < rank && !told; before++)
            told = meeting->guest[before].node == meeting->guest[rank].node;
        if (!told)
            group_send(node, meeting->guest[rank].node, &message);
    }
}

static void keep(struct group_node *node, const Mok__GroupFormed *formed)
{
    struct group_error error;
    struct group_roster *roster = formed->kept ? group_roster_of(node, formed, false, &error) : NULL;

    if (roster)
        group_standing_keep(node, roster);
}

static void form(struct group_node *node, struct group_meeting *meeting)
{
    Mok__GroupFormed body = MOK__GROUP_FORMED__INIT;
    Mok__GroupRank rank[MOK_MAX_EP], *pointer[MOK_MAX_EP];

    body.kept = true;
    for (uint32_t r = 0; r < meeting->size; r++) {
        const struct guest *guest = &meeting->guest[r];
        rank[r] = (Mok__GroupRank)MOK__GROUP_RANK__INIT;
        rank[r].node = (char *)group_node_name(node, guest->node);
        rank[r].join = guest->join;
        rank[r].device = guest->device;
        rank[r].kind = guest->kind;
        rank[r].session = guest->session;
        rank[r].fabric = guest->fabric;
        rank[r].no_fabric = (char *)guest->no_fabric;
        body.kept &= guest->tells_over;
        pointer[r] = &rank[r];
    }
    body.group = group_next_id(node);
    body.uid = meeting->uid;
    body.name = meeting->name;
    body.n_rank = meeting->size;
    body.rank = pointer;
    keep(node, &body);
    tell_formed(node, meeting, &body);
    meeting_free(node, meeting);
}

/* Those of the next group may all be here before the word that the one before is over. */
static bool form_if_complete(struct group_node *node, struct group_meeting *meeting)
{
    if (meeting->joined < meeting->size || group_standing_find(node, meeting->uid, meeting->name))
        return false;
    form(node, meeting);
    return true;
}

/* ------------------------------------------------------------------ coming */

/* What a node of our own version never sends. */
static bool is_sound(const Mok__GroupJoining *message)
{
    return mok_name_is_valid(message->name) && message->size >= 1 && message->size <= MOK_MAX_EP &&
           message->rank < message->size && strlen(message->user) <= MOK_MAX_NAME;
}

static uint32_t first_guest(const struct group_meeting *meeting)
{
    uint32_t rank = 0;

    while (!meeting->guest[rank].here)
        rank++;
    return rank;
}

/* The same number may be another person on another node; then they are not let together. */
static int check_user(const struct group_node *node, struct group_meeting *meeting, uint32_t peer,
                      const Mok__GroupJoining *message, struct group_error *error)
{
    if (!message->user[0])
        return 0;
    if (!meeting->user[0]) {
        snprintf(meeting->user, sizeof(meeting->user), "%s", message->user);
        meeting->user_node = peer;
        return 0;
    }
    if (strcmp(meeting->user, message->user) == 0)
        return 0;
    return group_error_set(error, -MOK_EACCESS, message->rank,
                           "group %s: uid %u is user %s on node %s and user %s on node %s (rank %u)", meeting->name,
                           meeting->uid, meeting->user, group_node_name(node, meeting->user_node), message->user,
                           group_node_name(node, peer), message->rank);
}

/* What the newcomer and those who wait cannot all be right about. */
static int check_fit(const struct group_node *node, struct group_meeting *meeting, uint32_t peer,
                     const Mok__GroupJoining *message, struct group_error *error)
{
    uint32_t first = first_guest(meeting);
    const struct guest *guest = &meeting->guest[first];

    if (message->size != meeting->size)
        return group_error_set(error, -MOK_EMISMATCH, message->rank,
                               "group %s: rank %u (node %s) says that the size is %u, rank %u (node %s) said %u",
                               meeting->name, message->rank, group_node_name(node, peer), message->size, first,
                               group_node_name(node, guest->node), meeting->size);
    if (message->exclusive != meeting->exclusive)
        return group_error_set(error, -MOK_EMISMATCH, message->rank,
                               "group %s: ranks %u (node %s) and %u (node %s) differ on exclusive: %d and %d",
                               meeting->name, first, group_node_name(node, guest->node), message->rank,
                               group_node_name(node, peer), meeting->exclusive, message->exclusive);
    if (message->kind != guest->kind)
        return group_error_set(error, -MOK_EMISMATCH, message->rank,
                               "group %s: ranks %u (node %s) and %u (node %s) differ on the kind of their devices: %s "
                               "and %s",
                               meeting->name, first, group_node_name(node, guest->node), message->rank,
                               group_node_name(node, peer), mok_device_kind_text(guest->kind),
                               mok_device_kind_text(message->kind));
    return check_user(node, meeting, peer, message, error);
}

static void admit(struct group_node *node, struct group_meeting *meeting, uint32_t peer,
                  const Mok__GroupJoining *message)
{
    struct guest *guest = &meeting->guest[message->rank];

    meeting->joined += !guest->here;
    *guest = (struct guest){
        .here = true,
        .node = peer,
        .device = message->device,
        .kind = message->kind,
        .session = message->session,
        .join = message->join,
        .since_ms = node->now_ms,
        .timeout_ms = message->timeout_ms,
        .deadline_ms = group_deadline(node, message->timeout_ms),
        .fabric = message->fabric,
        .tells_over = message->tells_over,
    };
    snprintf(guest->no_fabric, sizeof(guest->no_fabric), "%s", message->no_fabric);
    form_if_complete(node, meeting);
}

/* A rank of a group that is thought to stand asks again: its lead never let it in. */
static void forget_unopened(struct group_node *node, uint32_t peer, const Mok__GroupJoining *message)
{
    const struct group_roster *standing = group_standing_find(node, message->uid, message->name);

    if (standing && message->rank < standing->size && standing->rank[message->rank].node == peer &&
        standing->rank[message->rank].join == message->join)
        group_standing_forget(node, standing);
}

void group_home_joining(struct group_node *node, uint32_t peer, const Mok__GroupJoining *message)
{
    struct group_error error = { 0 };

    if (!is_sound(message))
        return;
    forget_unopened(node, peer, message);
    struct group_meeting *meeting = find(node, message->uid, message->name);
    if (!meeting) {
        meeting = meeting_new(node, message);
        if (!meeting) {
            group_error_set(&error, -MOK_ENOMEM, message->rank, "group %s: its home, node %s, has no room for another",
                            message->name, group_node_name(node, node->self));
            refuse(node, peer, message->join, &error);
            return;
        }
        check_user(node, meeting, peer, message, &error);
        admit(node, meeting, peer, message);
        return;
    }
    if (check_fit(node, meeting, peer, message, &error) < 0) {
        refuse(node, peer, message->join, &error);
        refuse_all(node, meeting, &error);
        return;
    }
    const struct guest *guest = &meeting->guest[message->rank];
    if (guest->here && guest->node == peer && guest->join >= message->join)
        return; /* said twice, or overtaken */
    if (guest->here && guest->node != peer) {
        refuse_taken(node, peer, message->join, meeting->name, message->rank, guest->session, guest->node);
        return;
    }
    admit(node, meeting, peer, message);
}

/* ------------------------------------------------------------------ going */

void group_home_withdrawn(struct group_node *node, uint32_t peer, const Mok__GroupWithdrawn *message)
{
    struct group_meeting *meeting = find(node, message->uid, message->name);
    struct group_error error = { 0 };

    if (!meeting || message->rank >= meeting->size)
        return;
    const struct guest *guest = &meeting->guest[message->rank];
    bool ours = guest->here && guest->node == peer && guest->join == message->join;
    if (message->code < 0) {
        group_error_set(&error, message->code, message->rank, "%s", message->text);
        if (ours)
            meeting->guest[message->rank].here = false; /* it knows */
        refuse_all(node, meeting, &error);
        return;
    }
    if (ours)
        make_room(node, meeting, message->rank);
}

void group_home_peer_lost(struct group_node *node, uint32_t peer)
{
    struct group_meeting *meeting, *next;

    for (meeting = TAILQ_FIRST(&node->meetings); meeting; meeting = next) {
        next = TAILQ_NEXT(meeting, link);
        uint32_t left = meeting->joined, size = meeting->size;
        for (uint32_t rank = 0; rank < size && left > 0; rank++) {
            if (!meeting->guest[rank].here || meeting->guest[rank].node != peer)
                continue;
            left--; /* the last one takes the meeting with it */
            make_room(node, meeting, rank);
        }
    }
}

/* ------------------------------------------------------------------ waiting in vain */

static bool is_absent(const void *cookie, uint32_t rank)
{
    const struct group_meeting *meeting = cookie;
    return !meeting->guest[rank].here;
}

static void overdue(struct group_node *node, struct group_meeting *meeting, uint32_t rank)
{
    const struct guest *guest = &meeting->guest[rank];
    struct group_error error;
    char missing[200];

    group_error_set(&error, -MOK_ETIMEDOUT, rank, "group %s: rank %u waited %" PRIu64 " ms, missing is rank %s",
                    meeting->name, rank, guest->timeout_ms,
                    group_missing(meeting->size, is_absent, meeting, missing, sizeof(missing)));
    refuse(node, guest->node, guest->join, &error);
    make_room(node, meeting, rank);
}

/* The name is another group's, and that has had time to say that it is over. */
static void turn_away(struct group_node *node, struct group_meeting *meeting, uint32_t rank,
                      const struct group_roster *standing)
{
    const struct guest *guest = &meeting->guest[rank];
    struct group_error error;

    if (meeting->size == standing->size) {
        refuse_taken(node, guest->node, guest->join, meeting->name, rank, standing->rank[rank].session,
                     standing->rank[rank].node);
    } else {
        group_error_set(&error, -MOK_EMISMATCH, rank,
                        "group %s: rank %u (node %s) says that the size is %u, the group that stands has %u",
                        meeting->name, rank, group_node_name(node, guest->node), meeting->size, standing->size);
        refuse(node, guest->node, guest->join, &error);
    }
    make_room(node, meeting, rank);
}

static void look_at_guests(struct group_node *node, struct group_meeting *meeting)
{
    const struct group_roster *standing = group_standing_find(node, meeting->uid, meeting->name);
    uint32_t left = meeting->joined, size = meeting->size;

    for (uint32_t rank = 0; rank < size && left > 0; rank++) {
        const struct guest *guest = &meeting->guest[rank];
        if (!guest->here)
            continue;
        bool late = guest->deadline_ms && guest->deadline_ms <= node->now_ms;
        if (!late && !(standing && guest->since_ms + GROUP_TAKEN_MS <= node->now_ms))
            continue;
        left--; /* the last one takes the meeting with it */
        if (standing)
            turn_away(node, meeting, rank, standing);
        else
            overdue(node, meeting, rank);
    }
}

void group_home_tick(struct group_node *node)
{
    struct group_meeting *meeting, *next;

    for (meeting = TAILQ_FIRST(&node->meetings); meeting; meeting = next) {
        next = TAILQ_NEXT(meeting, link);
        if (!form_if_complete(node, meeting))
            look_at_guests(node, meeting);
    }
}

/* ------------------------------------------------------------------ looking */

static void look_at(const struct group_meeting *meeting, struct group_gathering *ret)
{
    *ret = (struct group_gathering){
        .meeting = meeting,
        .name = meeting->name,
        .uid = meeting->uid,
        .size = meeting->size,
        .joined = meeting->joined,
    };
}

bool group_gathering_find(const struct group_node *node, uint32_t uid, const char *name, struct group_gathering *ret)
{
    const struct group_meeting *meeting = find(node, uid, name);

    if (meeting)
        look_at(meeting, ret);
    return meeting;
}

bool group_gathering_next(const struct group_node *node, struct group_gathering *gathering)
{
    const struct group_meeting *next =
        gathering->meeting ? TAILQ_NEXT(gathering->meeting, link) : TAILQ_FIRST(&node->meetings);

    if (next)
        look_at(next, gathering);
    return next;
}

bool group_gathering_rank(const struct group_gathering *gathering, uint32_t rank, uint32_t *ret_node,
                          uint32_t *ret_device, uint64_t *ret_session)
{
    const struct guest *guest = &gathering->meeting->guest[rank];

    if (!guest->here)
        return false;
    *ret_node = guest->node;
    *ret_device = guest->device;
    *ret_session = guest->session;
    return true;
}
