/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A node's own ranks. First each is a join:
 *
 *   ASKED --home: refused--> told, forgotten
 *     |    \--home: formed--> GIVEN to the lead --lead: prepare--> its group is OPEN
 *     |                          |
 *     +<-- the lead is lost -----+     (another home, if who lives changes: asked anew there)
 *
 * then a rank of a group, of which this node has one object:
 *
 *   OPEN --a rank or its node is gone, here or anywhere; the opening is aborted--> OVER --forgotten-->
 *
 * and of each collective call that the lead lets prepare: PREPARING -> PREPARED -> verdict; an abort may come at any
 * time.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/layer_spec.h"
#include "group_internal.h"
#include "names.h"

/* The home refuses who waits too long; this long after, a home that does not is not waited for. */
#define HOME_GRACE_MS 3000u
/* A lead that does not begin within this has lost what the home said. */
#define LEAD_GRACE_MS 10000u

struct group_join {
    TAILQ_ENTRY(group_join) link;
    uint64_t id;
    uint32_t uid, size, rank, device, kind;
    uint64_t session, timeout_ms, deadline_ms; /* 0: none */
    bool exclusive, fabric;
    char name[MOK_MAX_NAME + 1], user[MOK_MAX_NAME + 1], no_fabric[GROUP_REASON_MAX + 1];
    uint32_t home;
    bool given;
    uint32_t lead;     /* given */
    uint64_t given_ms; /* given: when */
};

struct part {
    TAILQ_ENTRY(part) link;
    uint64_t index;
    bool prepared;
};

/* What another node was asked to let go of. */
struct group_drop {
    TAILQ_ENTRY(group_drop) link;
    uint32_t peer;
    uint64_t request;
};

struct group_member {
    TAILQ_ENTRY(group_member) link;
    struct group_roster *roster;
    bool over;
    uint64_t next; /* number of the next call that may be prepared */
    TAILQ_HEAD(, part) parts;
};

/* ------------------------------------------------------------------ the objects */

static struct group_member *find(const struct group_node *node, uint32_t group)
{
    struct group_member *member;

    TAILQ_FOREACH(member, &node->members, link)
        if (member->roster->id == group)
            return member;
    return NULL;
}

static void member_free(struct group_node *node, struct group_member *member)
{
    struct part *part;

    while ((part = TAILQ_FIRST(&member->parts))) {
        TAILQ_REMOVE(&member->parts, part, link);
        free(part);
    }
    TAILQ_REMOVE(&node->members, member, link);
    free(member->roster);
    free(member);
}

static struct part *find_part(const struct group_member *member, uint64_t index)
{
    struct part *part;

    TAILQ_FOREACH(part, &member->parts, link)
        if (part->index == index)
            return part;
    return NULL;
}

static void join_free(struct group_node *node, struct group_join *join)
{
    TAILQ_REMOVE(&node->joins, join, link);
    free(join);
}

static struct group_join *find_join(const struct group_node *node, uint64_t id)
{
    struct group_join *join;

    TAILQ_FOREACH(join, &node->joins, link)
        if (join->id == id)
            return join;
    return NULL;
}

void group_member_release(struct group_node *node)
{
    struct group_member *member;
    struct group_join *join;

    while ((member = TAILQ_FIRST(&node->members)))
        member_free(node, member);
    while ((join = TAILQ_FIRST(&node->joins)))
        join_free(node, join);
    for (struct group_drop *drop; (drop = TAILQ_FIRST(&node->drops));) {
        TAILQ_REMOVE(&node->drops, drop, link);
        free(drop);
    }
}

/* The home first: a rank of ours that wants to be in the next group of that name comes behind it. */
static void end(struct group_node *node, struct group_member *member)
{
    member->over = true;
    group_tell_over(node, group_node_home(node, member->roster->uid, member->roster->name), member->roster);
}

bool group_member_lives(const struct group_node *node, uint32_t group)
{
    const struct group_member *member = find(node, group);
    return member && !member->over;
}

static uint32_t lead_of(const struct group_member *member)
{
    return member->roster->rank[0].node;
}

size_t group_node_count(const struct group_node *node)
{
    const struct group_member *member;
    const struct group_join *join;
    const struct group_drop *drop;
    size_t count = node->n_meetings + node->n_standings + group_lead_count(node);

    TAILQ_FOREACH(member, &node->members, link)
        count++;
    TAILQ_FOREACH(join, &node->joins, link)
        count++;
    TAILQ_FOREACH(drop, &node->drops, link)
        count++;
    return count;
}

/* ------------------------------------------------------------------ joining */

static void ask(struct group_node *node, struct group_join *join)
{
    Mok__GroupJoining body = MOK__GROUP_JOINING__INIT;
    Mok__GroupMessage message = group_message(joining, JOINING, &body);

    join->home = group_node_home(node, join->uid, join->name);
    join->given = false;
    body.uid = join->uid;
    body.user = join->user;
    body.name = join->name;
    body.size = join->size;
    body.rank = join->rank;
    body.join = join->id;
    body.device = join->device;
    body.kind = join->kind;
    body.session = join->session;
    body.exclusive = join->exclusive;
    body.fabric = join->fabric;
    body.no_fabric = join->no_fabric;
    body.tells_over = true;
    if (join->deadline_ms) /* what is left of it */
        body.timeout_ms = join->deadline_ms > node->now_ms ? join->deadline_ms - node->now_ms : 1;
    group_send(node, join->home, &message);
}

int group_node_join(struct group_node *node, const struct group_joining *joining, uint64_t now_ms, uint64_t *ret_join)
{
    struct group_join *join = calloc(1, sizeof(*join));

    if (!join)
        return -MOK_ENOMEM;
    node->now_ms = now_ms;
    join->id = ++node->last_join;
    join->uid = joining->uid;
    join->size = joining->size;
    join->rank = joining->rank;
    join->device = joining->device;
    join->kind = joining->kind;
    join->session = joining->session;
    join->exclusive = joining->exclusive;
    join->fabric = joining->fabric;
    join->timeout_ms = joining->timeout_ms;
    join->deadline_ms = group_deadline(node, joining->timeout_ms);
    snprintf(join->name, sizeof(join->name), "%s", joining->name);
    snprintf(join->user, sizeof(join->user), "%s", joining->user);
    snprintf(join->no_fabric, sizeof(join->no_fabric), "%s", joining->no_fabric ? joining->no_fabric : "");
    TAILQ_INSERT_TAIL(&node->joins, join, link);
    *ret_join = join->id;
    ask(node, join);
    group_turn(node);
    return 0;
}

static void tell_withdrawn(struct group_node *node, const struct group_join *join, const struct group_error *error)
{
    Mok__GroupWithdrawn body = MOK__GROUP_WITHDRAWN__INIT;
    Mok__GroupMessage message = group_message(withdrawn, WITHDRAWN, &body);

    body.uid = join->uid;
    body.name = (char *)join->name;
    body.rank = join->rank;
    body.join = join->id;
    body.code = error ? error->code : 0;
    body.text = error ? (char *)error->text : (char *)"";
    group_send(node, join->home, &message);
}

void group_node_withdraw(struct group_node *node, uint64_t id, const struct group_error *error, uint64_t now_ms)
{
    struct group_join *join = find_join(node, id);

    node->now_ms = now_ms;
    if (!join)
        return;
    if (!join->given) /* else the lead finds out when it lets us prepare */
        tell_withdrawn(node, join, error);
    join_free(node, join);
    group_turn(node);
}

void group_node_decline(struct group_node *node, uint32_t uid, const char *name, uint32_t rank,
                        const struct group_error *error, uint64_t now_ms)
{
    struct group_join join = { .uid = uid, .rank = rank, .home = group_node_home(node, uid, name) };

    node->now_ms = now_ms;
    snprintf(join.name, sizeof(join.name), "%s", name);
    tell_withdrawn(node, &join, error);
    group_turn(node);
}

/* Takes the join out, then tells. */
static void refuse(struct group_node *node, struct group_join *join, const struct group_error *error)
{
    uint64_t id = join->id;

    join_free(node, join);
    node->ops->refused(node->cookie, id, error);
}

/* Who is missing may be waiting, at another home than ours. */
static void add_apart(const struct group_node *node, struct group_error *error)
{
    size_t length = strlen(error->text);
    char why[320];

    node->ops->apart(node->cookie, why, sizeof(why));
    if (why[0])
        snprintf(error->text + length, sizeof(error->text) - length, "; %s", why);
}

void group_member_refused(struct group_node *node, uint32_t peer, const Mok__GroupRefused *message)
{
    struct group_join *join = find_join(node, message->join);
    struct group_error error;

    if (!join || join->given || join->home != peer)
        return;
    group_error_set(&error, message->code < 0 ? message->code : -MOK_EPROTO, join->rank, "%s", message->text);
    if (error.code == -MOK_ETIMEDOUT)
        add_apart(node, &error);
    refuse(node, join, &error);
}

/* A home that a change of who lives has taken the name from forgets the join; the new one learns of it. */
static void look_for_homes(struct group_node *node)
{
    struct group_join *join;

    TAILQ_FOREACH(join, &node->joins, link) {
        if (join->given || group_node_home(node, join->uid, join->name) == join->home)
            continue;
        tell_withdrawn(node, join, NULL);
        ask(node, join);
    }
}

void group_member_tick(struct group_node *node)
{
    struct group_join *join, *next;

    for (join = TAILQ_FIRST(&node->joins); join; join = next) {
        struct group_error error;
        next = TAILQ_NEXT(join, link);
        if (join->given && join->given_ms + LEAD_GRACE_MS <= node->now_ms)
            ask(node, join);
        if (join->given || !join->deadline_ms || join->deadline_ms + HOME_GRACE_MS > node->now_ms)
            continue;
        group_error_set(&error, -MOK_ETIMEDOUT, join->rank,
                        "group %s: rank %u waited %" PRIu64
                        " ms; node %s, where its ranks meet, does not say who is missing",
                        join->name, join->rank, join->timeout_ms, group_node_name(node, join->home));
        add_apart(node, &error);
        tell_withdrawn(node, join, NULL);
        refuse(node, join, &error);
        next = TAILQ_FIRST(&node->joins); /* that may have changed the list */
    }
}

/* ------------------------------------------------------------------ coming together */

/* Our joins of a roster that will not become a group here. */
static void refuse_joins(struct group_node *node, const Mok__GroupFormed *message, const struct group_error *error)
{
    const char *self = group_node_name(node, node->self);

    for (size_t r = 0; message && r < message->n_rank; r++) {
        struct group_join *join =
            strcmp(message->rank[r]->node, self) == 0 ? find_join(node, message->rank[r]->join) : NULL;
        if (join && join->uid == message->uid && strcmp(join->name, message->name) == 0)
            refuse(node, join, error);
    }
}

/*
 * From the home. The lead begins, also where it cannot reach all, since the others learn it by its verdict; they learn
 * here whom to wait for, and whose loss makes them ask again.
 */
void group_member_formed(struct group_node *node, uint32_t peer, const Mok__GroupFormed *message)
{
    struct group_error error = { 0 };
    _cleanup_free_ struct group_roster *roster = group_roster_of(node, message, false, &error);

    if (roster && roster->rank[0].node == GROUP_MAX_NODES)
        group_unreached(node, 0, message->rank[0]->node, &error);
    if (error.code == 0 && roster->rank[0].node == node->self && group_lead_begin(node, peer, roster, message) < 0) {
        group_tell_over(node, peer, roster);
        group_error_set(&error, -MOK_ENOMEM, 0, "node %s is out of memory", group_node_name(node, node->self));
    }
    if (error.code < 0) {
        refuse_joins(node, message, &error);
        return;
    }
    for (uint32_t r = 0; r < roster->size; r++) {
        struct group_join *join = roster->rank[r].node == node->self ? find_join(node, roster->rank[r].join) : NULL;
        if (!join || join->home != peer)
            continue;
        join->given = true;
        join->lead = roster->rank[0].node;
        join->given_ms = node->now_ms;
    }
}

static void tell_prepared(struct group_node *node, uint32_t lead, uint32_t group, uint64_t index,
                          const struct group_error *error)
{
    Mok__GroupPrepared body = MOK__GROUP_PREPARED__INIT;
    Mok__GroupMessage message = group_message(prepared, PREPARED, &body);

    body.group = group;
    body.index = index;
    body.code = error ? error->code : 0;
    body.rank = error ? error->rank : 0;
    body.text = error ? (char *)error->text : (char *)"";
    group_send(node, lead, &message);
}

/* All ranks that the roster has here still wait for it. */
static int check_joins(const struct group_node *node, const struct group_roster *roster, struct group_error *error)
{
    for (uint32_t r = 0; r < roster->size; r++) {
        if (roster->rank[r].node != node->self)
            continue;
        const struct group_join *join = find_join(node, roster->rank[r].join);
        if (!join || join->rank != r || join->uid != roster->uid || strcmp(join->name, roster->name) != 0)
            return group_error_set(error, -MOK_EPEER, r, "rank %u (node %s) left while the group formed", r,
                                   group_node_name(node, node->self));
    }
    if (!group_roster_has(roster, node->self))
        return group_error_set(error, -MOK_EPROTO, 0, "node %s has no rank of the group",
                               group_node_name(node, node->self));
    if (node->ops->id_is_taken(node->cookie, roster->id))
        return group_error_set(error, -MOK_EEXIST, 0, "node %s has an object %u already: the nodes' inventories differ",
                               group_node_name(node, node->self), roster->id);
    return 0;
}

static struct part *part_new(struct group_member *member, uint64_t index)
{
    struct part *part = calloc(1, sizeof(*part));

    if (!part)
        return NULL;
    part->index = index;
    TAILQ_INSERT_TAIL(&member->parts, part, link);
    return part;
}

/* Takes the roster over. */
static struct group_member *member_new(struct group_node *node, struct group_roster *roster)
{
    struct group_member *member = calloc(1, sizeof(*member));

    if (!member)
        return NULL;
    TAILQ_INIT(&member->parts);
    if (!part_new(member, 0)) {
        free(member);
        return NULL;
    }
    member->roster = roster;
    member->next = 1;
    TAILQ_INSERT_TAIL(&node->members, member, link);
    return member;
}

static void take_joins(struct group_node *node, const struct group_roster *roster)
{
    for (uint32_t r = 0; r < roster->size; r++) {
        struct group_join *join = roster->rank[r].node == node->self ? find_join(node, roster->rank[r].join) : NULL;
        if (!join)
            continue;
        if (!join->given) /* perhaps another home has it meanwhile */
            tell_withdrawn(node, join, NULL);
        join_free(node, join);
    }
}

static void prepare_opening(struct group_node *node, uint32_t peer, const Mok__GroupPrepare *message)
{
    struct group_error error = { 0 };
    _cleanup_free_ struct group_roster *roster = NULL;
    struct group_member *member = NULL;

    if (find(node, message->group))
        return; /* said twice */
    roster = group_roster_of(node, message->formed, true, &error);
    if (roster && (roster->id != message->group || roster->rank[0].node != peer))
        group_error_set(&error, -MOK_EPROTO, 0, "node %s does not lead the group", group_node_name(node, peer));
    if (roster && error.code == 0 && check_joins(node, roster, &error) == 0) {
        member = member_new(node, roster);
        if (!member)
            group_error_set(&error, -MOK_ENOMEM, 0, "node %s is out of memory", group_node_name(node, node->self));
    }
    if (error.code < 0) {
        tell_prepared(node, peer, message->group, 0, &error);
        refuse_joins(node, message->formed, &error);
        return;
    }
    take_joins(node, mok_take_pointer(&roster));
    node->ops->open(node->cookie, member->roster);
}

void group_member_prepare(struct group_node *node, uint32_t peer, const Mok__GroupPrepare *message)
{
    struct group_error error;

    if (message->index == 0) {
        prepare_opening(node, peer, message);
        return;
    }
    struct group_member *member = find(node, message->group);
    if (!member || member->over || lead_of(member) != peer || message->index < member->next)
        return;
    member->next = message->index + 1;
    if (!(message->object & GROUP_ID_FLAG) || node->ops->id_is_taken(node->cookie, message->object)) {
        group_error_set(&error, -MOK_EEXIST, 0, "node %s has an object %u already: the nodes' inventories differ",
                        group_node_name(node, node->self), message->object);
        tell_prepared(node, peer, message->group, message->index, &error);
        return;
    }
    if (!part_new(member, message->index)) {
        group_error_set(&error, -MOK_ENOMEM, 0, "node %s is out of memory", group_node_name(node, node->self));
        tell_prepared(node, peer, message->group, message->index, &error);
        return;
    }
    node->ops->prepare(node->cookie, message->group, message->index, message->kind, message->object);
}

void group_node_prepared(struct group_node *node, uint32_t group, uint64_t index, const struct group_error *error,
                         uint64_t now_ms)
{
    struct group_member *member = find(node, group);
    struct part *part = member && !member->over ? find_part(member, index) : NULL;

    node->now_ms = now_ms;
    if (!part || part->prepared)
        return; /* aborted meanwhile */
    part->prepared = true;
    tell_prepared(node, lead_of(member), group, index, error);
    group_turn(node);
}

void group_member_verdict(struct group_node *node, uint32_t peer, const Mok__GroupVerdict *message)
{
    struct group_member *member = find(node, message->group);
    struct group_error error = { 0 };

    if (!member || member->over || lead_of(member) != peer)
        return;
    struct part *part = find_part(member, message->index);
    if (message->code >= 0 && (!part || !part->prepared))
        return; /* nobody commits what is not prepared */
    if (message->code < 0)
        group_error_set(&error, message->code, message->rank < member->roster->size ? message->rank : 0, "%s",
                        message->text);
    if (part) {
        TAILQ_REMOVE(&member->parts, part, link);
        free(part);
    }
    if (message->index == 0 && error.code < 0)
        end(node, member);
    node->ops->verdict(node->cookie, message->group, message->index, &error);
}

/* ------------------------------------------------------------------ calling */

int group_node_call(struct group_node *node, uint32_t group, uint32_t rank, uint64_t index,
                    const struct group_params *params, uint64_t timeout_ms, uint64_t now_ms)
{
    struct group_member *member = find(node, group);
    Mok__GroupCall body = MOK__GROUP_CALL__INIT;
    Mok__GroupMessage message = group_message(call, CALL, &body);
    Mok__LayerSpec spec;
    Mok__GroupLayerMap map = MOK__GROUP_LAYER_MAP__INIT;

    node->now_ms = now_ms;
    if (!member || member->over)
        return -MOK_ENOENT;
    body.group = group;
    body.index = index;
    body.rank = rank;
    body.kind = params->kind;
    body.bytes = params->bytes;
    body.timeout_ms = timeout_ms;
    if (params->kind == GROUP_LAYER) {
        spec = mok_layer_spec_message(&params->spec);
        map.kind = params->map.kind;
        map.symmetric_bytes = params->map.symmetric_bytes;
        map.sym_ids = params->map.sym_ids;
        map.sym_topk_weight = params->map.sym_topk_weight;
        map.sym_slots = params->map.sym_slots;
        map.sym_weight_slots = params->map.sym_weight_slots;
        body.spec = &spec;
        body.map = &map;
    }
    group_send(node, lead_of(member), &message);
    group_turn(node);
    return 0;
}

/* ------------------------------------------------------------------ the end */

static void tell_others(struct group_node *node, const struct group_member *member, const Mok__GroupMessage *message)
{
    for (uint32_t peer = 0; peer < GROUP_MAX_NODES; peer++)
        if (peer != node->self && group_roster_has(member->roster, peer))
            group_send(node, peer, message);
}

static void tell_over(struct group_node *node, const struct group_member *member, uint32_t rank, const char *text)
{
    Mok__GroupOver body = MOK__GROUP_OVER__INIT;
    Mok__GroupMessage message = group_message(over, OVER, &body);

    body.group = member->roster->id;
    body.rank = rank;
    body.text = (char *)text;
    tell_others(node, member, &message);
}

void group_node_over(struct group_node *node, uint32_t group, uint32_t rank, const char *text, uint64_t now_ms)
{
    struct group_member *member = find(node, group);

    node->now_ms = now_ms;
    if (!member || member->over)
        return;
    end(node, member);
    tell_over(node, member, rank, text);
    group_turn(node);
}

void group_member_over(struct group_node *node, uint32_t peer, const Mok__GroupOver *message)
{
    struct group_member *member = find(node, message->group);
    struct group_error error;

    if (!member || member->over || !group_roster_has(member->roster, peer) || message->rank >= member->roster->size)
        return;
    end(node, member);
    group_error_set(&error, -MOK_EPEER, message->rank, "%s", message->text);
    if (lead_of(member) == node->self) /* to those who heard of it before they heard of the group, and forgot it */
        tell_over(node, member, message->rank, error.text);
    node->ops->over(node->cookie, message->group, &error);
}

void group_node_forget(struct group_node *node, uint32_t group)
{
    struct group_member *member = find(node, group);

    if (member && !member->over)
        end(node, member);
    group_lead_end(node, group);
    if (member)
        member_free(node, member);
}

/* ------------------------------------------------------------------ nodes that come and go */

void group_member_peer_up(struct group_node *node, uint32_t peer)
{
    (void)peer;
    look_for_homes(node);
}

/* The first of our groups that is not over and has a rank on the lost node. */
static struct group_member *next_hurt(const struct group_node *node, uint32_t peer, uint32_t *ret_rank)
{
    struct group_member *member;

    TAILQ_FOREACH(member, &node->members, link) {
        for (uint32_t rank = 0; rank < member->roster->size && !member->over; rank++) {
            if (member->roster->rank[rank].node != peer)
                continue;
            *ret_rank = rank;
            return member;
        }
    }
    return NULL;
}

static void end_drops(struct group_node *node, uint32_t peer)
{
    struct group_drop *drop = TAILQ_FIRST(&node->drops);

    while (drop) {
        struct group_drop *next = TAILQ_NEXT(drop, link);
        uint64_t request = drop->request;
        if (drop->peer == peer) {
            TAILQ_REMOVE(&node->drops, drop, link);
            free(drop);
            node->ops->dropped(node->cookie, peer, request);
            next = TAILQ_FIRST(&node->drops);
        }
        drop = next;
    }
}

void group_member_leave(struct group_node *node)
{
    for (uint32_t peer = 0; peer < GROUP_MAX_NODES; peer++)
        end_drops(node, peer);
}

/* The others may not have noticed (a link that is cut one way), so they are told. */
void group_member_peer_lost(struct group_node *node, uint32_t peer, const char *reason)
{
    struct group_member *member;
    struct group_join *join;
    uint32_t rank;

    TAILQ_FOREACH(join, &node->joins, link)
        if (join->given && join->lead == peer)
            ask(node, join);
    look_for_homes(node);
    while ((member = next_hurt(node, peer, &rank))) {
        struct group_error error;
        end(node, member);
        group_error_set(&error, -MOK_EPEER, rank, "rank %u is gone: node %s %s", rank,
                        group_node_name(node, peer), reason);
        tell_over(node, member, rank, error.text);
        node->ops->over(node->cookie, member->roster->id, &error);
    }
    end_drops(node, peer);
}

/* ------------------------------------------------------------------ memory and layers */

uint32_t group_node_drop(struct group_node *node, uint32_t group, uint32_t rank, uint32_t buffer, uint64_t request,
                         uint64_t now_ms)
{
    struct group_member *member = find(node, group);
    uint32_t count = 0;

    node->now_ms = now_ms;
    for (uint32_t peer = 0; member && peer < GROUP_MAX_NODES; peer++) {
        Mok__GroupDrop body = MOK__GROUP_DROP__INIT;
        Mok__GroupMessage message = group_message(drop, DROP, &body);
        if (peer == node->self || node->leaving || !node->peer[peer].up || !group_roster_has(member->roster, peer))
            continue;
        struct group_drop *drop = malloc(sizeof(*drop));
        if (!drop)
            continue; /* nobody is waited for; the memory is emptied whoever maps it */
        drop->peer = peer;
        drop->request = request;
        TAILQ_INSERT_TAIL(&node->drops, drop, link);
        body.group = group;
        body.rank = rank;
        body.buffer = buffer;
        body.request = request;
        count++;
        group_send(node, peer, &message);
    }
    return count;
}

void group_member_dropped(struct group_node *node, uint32_t peer, const Mok__GroupDropped *message)
{
    struct group_drop *drop;
    uint64_t request = message->request;

    TAILQ_FOREACH(drop, &node->drops, link)
        if (drop->peer == peer && drop->request == request)
            break;
    if (!drop)
        return;
    TAILQ_REMOVE(&node->drops, drop, link);
    free(drop);
    node->ops->dropped(node->cookie, peer, request);
}

void group_member_drop(struct group_node *node, uint32_t peer, const Mok__GroupDrop *message)
{
    struct group_member *member = find(node, message->group);
    bool its = member && message->rank < member->roster->size && member->roster->rank[message->rank].node == peer;

    if (its)
        node->ops->drop(node->cookie, peer, message->request, message->group, message->rank, message->buffer);
    else
        group_node_dropped(node, peer, message->request, node->now_ms);
}

void group_node_layer_gone(struct group_node *node, uint32_t group, uint32_t layer, uint32_t rank, uint64_t now_ms)
{
    struct group_member *member = find(node, group);
    Mok__GroupLayerGone body = MOK__GROUP_LAYER_GONE__INIT;
    Mok__GroupMessage message = group_message(layer_gone, LAYER_GONE, &body);

    node->now_ms = now_ms;
    if (!member)
        return;
    body.group = group;
    body.layer = layer;
    body.rank = rank;
    tell_others(node, member, &message);
    group_turn(node);
}

void group_member_layer_gone(struct group_node *node, uint32_t peer, const Mok__GroupLayerGone *message)
{
    struct group_member *member = find(node, message->group);

    if (member && message->rank < member->roster->size && member->roster->rank[message->rank].node == peer)
        node->ops->layer_gone(node->cookie, message->group, message->layer, message->rank);
}
