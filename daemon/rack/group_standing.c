/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The home of a group's name, once the group has formed: it keeps the name until a node of the group says that it is
 * over, so that a rank of it is refused as taken anywhere. Ranks that come are group_home.c's all the same.
 *
 *   (none) --formed here, or its lead says that it stands--> kept
 *   kept --over, or its lead is lost, or the home is another--> (none)
 *
 * What it keeps is a help, nothing depends on it: where it is not known that a group stands, a rank waits for others.
 * So in doubt it forgets, and never the other way round.
 */
#include <string.h>

#include "group_internal.h"

struct group_standing {
    TAILQ_ENTRY(group_standing) link;
    struct group_roster *roster;
};

static struct group_standing *find(const struct group_node *node, uint32_t uid, const char *name)
{
    struct group_standing *standing;

    TAILQ_FOREACH(standing, &node->standings, link)
        if (standing->roster->uid == uid && strcmp(standing->roster->name, name) == 0)
            return standing;
    return NULL;
}

static void standing_free(struct group_node *node, struct group_standing *standing)
{
    TAILQ_REMOVE(&node->standings, standing, link);
    node->n_standings--;
    free(standing->roster);
    free(standing);
}

void group_standing_release(struct group_node *node)
{
    struct group_standing *standing;

    while ((standing = TAILQ_FIRST(&node->standings)))
        standing_free(node, standing);
}

void group_standing_keep(struct group_node *node, struct group_roster *roster)
{
    struct group_standing *standing = calloc(1, sizeof(*standing));

    if (!standing) {
        free(roster);
        return;
    }
    if (node->n_standings >= GROUP_MAX_STANDINGS)
        standing_free(node, TAILQ_FIRST(&node->standings));
    standing->roster = roster;
    TAILQ_INSERT_TAIL(&node->standings, standing, link);
    node->n_standings++;
}

const struct group_roster *group_standing_find(const struct group_node *node, uint32_t uid, const char *name)
{
    const struct group_standing *standing = find(node, uid, name);
    return standing ? standing->roster : NULL;
}

void group_standing_forget(struct group_node *node, const struct group_roster *roster)
{
    struct group_standing *standing = find(node, roster->uid, roster->name);

    if (standing)
        standing_free(node, standing);
}

/* ------------------------------------------------------------------ what the group's nodes say */

static void over(struct group_node *node, uint32_t peer, uint32_t uid, const char *name, uint32_t group)
{
    struct group_standing *standing = find(node, uid, name);

    if (standing && standing->roster->id == group && group_roster_has(standing->roster, peer))
        standing_free(node, standing);
}

/* Only the lead says so. */
static void stands(struct group_node *node, uint32_t peer, const Mok__GroupFormed *group)
{
    struct group_error error;
    _cleanup_free_ struct group_roster *roster = group_roster_of(node, group, false, &error);

    if (!roster || roster->rank[0].node != peer || find(node, roster->uid, roster->name))
        return;
    if (group_node_home(node, roster->uid, roster->name) == node->self)
        group_standing_keep(node, mok_take_pointer(&roster));
}

void group_standing_message(struct group_node *node, uint32_t peer, const Mok__GroupStanding *message)
{
    if (message->group && message->over)
        over(node, peer, message->group->uid, message->group->name, message->group->group);
    else if (message->group)
        stands(node, peer, message->group);
}

static void tell(struct group_node *node, uint32_t home, const struct group_roster *roster, bool is_over)
{
    Mok__GroupStanding body = MOK__GROUP_STANDING__INIT;
    Mok__GroupFormed formed = MOK__GROUP_FORMED__INIT;
    Mok__GroupRank rank[MOK_MAX_EP], *pointer[MOK_MAX_EP];
    Mok__GroupMessage message = group_message(standing, STANDING, &body);

    body.group = &formed;
    body.over = is_over;
    formed.group = roster->id;
    formed.uid = roster->uid;
    formed.name = (char *)roster->name;
    formed.kept = true;
    for (uint32_t r = 0; r < roster->size && !is_over; r++) {
        rank[r] = (Mok__GroupRank)MOK__GROUP_RANK__INIT;
        rank[r].node = (char *)group_node_name(node, roster->rank[r].node);
        rank[r].join = roster->rank[r].join;
        rank[r].session = roster->rank[r].session;
        pointer[r] = &rank[r];
        formed.n_rank++;
    }
    formed.rank = pointer;
    group_send(node, home, &message);
}

void group_tell_stands(struct group_node *node, uint32_t home, const struct group_roster *roster)
{
    if (roster->kept)
        tell(node, home, roster, false);
}

/* To this node itself at once: nobody need turn for it. */
void group_tell_over(struct group_node *node, uint32_t home, const struct group_roster *roster)
{
    if (roster->kept && home == node->self)
        over(node, home, roster->uid, roster->name, roster->id);
    else if (roster->kept)
        tell(node, home, roster, true);
}

/* ------------------------------------------------------------------ nodes that come and go */

void group_standing_peer_up(struct group_node *node)
{
    struct group_standing *standing, *next;

    for (standing = TAILQ_FIRST(&node->standings); standing; standing = next) {
        next = TAILQ_NEXT(standing, link);
        if (group_node_home(node, standing->roster->uid, standing->roster->name) != node->self)
            standing_free(node, standing);
    }
}

void group_standing_peer_lost(struct group_node *node, uint32_t peer)
{
    struct group_standing *standing, *next;

    for (standing = TAILQ_FIRST(&node->standings); standing; standing = next) {
        next = TAILQ_NEXT(standing, link);
        if (standing->roster->rank[0].node == peer)
            standing_free(node, standing);
    }
}
