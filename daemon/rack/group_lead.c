/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lead of a group, at the node of rank 0: it drives what the ranks do together, each call by its number.
 *
 *   GATHERING --all have called, and say the same--> PREPARING --all nodes are prepared--> committed, forgotten
 *       |                                               |
 *       +-- they differ, or one waited too long         +-- a node fails, or takes too long --> aborted, forgotten
 *       v
 *   REFUSED: told to those who have called and to those who still come; forgotten with the last of them
 *
 * Call 0 is the opening, for which nobody calls: the home has seen to that. The lead never looks at who is lost: the
 * group is over then, which every node finds out for itself.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "common/layer_spec.h"
#include "group_internal.h"

enum call_state { CALL_GATHERING, CALL_REFUSED, CALL_PREPARING };

/* Calls that were refused, of those that some rank has yet to come to, that are kept for the reason. */
#define MAX_REFUSED 64u
/* Calls of a group at a time. More are asked by nobody who waits for answers. */
#define MAX_CALLS 2048u

struct caller {
    bool called;
    uint64_t timeout_ms, deadline_ms; /* 0: none */
    struct group_params params;
};

struct call {
    TAILQ_ENTRY(call) link;
    uint64_t index;
    enum call_state state;
    uint32_t called;
    uint64_t deadline_ms;               /* PREPARING */
    uint32_t waiting;                   /* PREPARING: nodes that are not prepared */
    bool prepared[GROUP_MAX_NODES + 1]; /* PREPARING */
    struct group_error refusal;         /* REFUSED */
    const struct group_lead *lead;
    struct caller caller[]; /* [size], GATHERING and REFUSED; none for the opening */
};

struct group_lead {
    TAILQ_ENTRY(group_lead) link;
    const struct group_node *node;
    struct group_roster *roster;
    uint32_t home; /* that knows of the group, if it is kept */
    TAILQ_HEAD(, call) calls;
    uint64_t next[MOK_MAX_EP]; /* number of each rank's next call */
};

/* ------------------------------------------------------------------ the objects */

static struct group_lead *find(const struct group_node *node, uint32_t group)
{
    struct group_lead *lead;

    TAILQ_FOREACH(lead, &node->leads, link)
        if (lead->roster->id == group)
            return lead;
    return NULL;
}

static struct call *find_call(const struct group_lead *lead, uint64_t index)
{
    struct call *call;

    TAILQ_FOREACH(call, &lead->calls, link)
        if (call->index == index)
            return call;
    return NULL;
}

static struct call *call_new(struct group_lead *lead, uint64_t index)
{
    size_t callers = index ? lead->roster->size : 0;
    struct call *call = calloc(1, sizeof(*call) + callers * sizeof(call->caller[0]));

    if (!call)
        return NULL;
    call->index = index;
    call->lead = lead;
    TAILQ_INSERT_TAIL(&lead->calls, call, link);
    return call;
}

static void call_free(struct group_lead *lead, struct call *call)
{
    TAILQ_REMOVE(&lead->calls, call, link);
    free(call);
}

static void lead_free(struct group_node *node, struct group_lead *lead)
{
    struct call *call;

    while ((call = TAILQ_FIRST(&lead->calls)))
        call_free(lead, call);
    TAILQ_REMOVE(&node->leads, lead, link);
    free(lead->roster);
    free(lead);
}

void group_lead_end(struct group_node *node, uint32_t group)
{
    struct group_lead *lead = find(node, group);

    if (lead)
        lead_free(node, lead);
}

void group_lead_release(struct group_node *node)
{
    struct group_lead *lead;

    while ((lead = TAILQ_FIRST(&node->leads)))
        lead_free(node, lead);
}

size_t group_lead_count(const struct group_node *node)
{
    const struct group_lead *lead;
    const struct call *call;
    size_t count = 0;

    TAILQ_FOREACH(lead, &node->leads, link) {
        count++;
        TAILQ_FOREACH(call, &lead->calls, link)
            count++;
    }
    return count;
}

/* ------------------------------------------------------------------ telling */

/* The nodes of a roster, each once. */
#define nodes_each(roster, peer)                                                                                       \
    for (uint32_t peer = 0; peer < GROUP_MAX_NODES; peer++)                                                            \
        if (group_roster_has(roster, peer))

static void tell_verdict(struct group_node *node, const struct group_lead *lead, uint32_t peer, uint64_t index,
                         const struct group_error *error)
{
    Mok__GroupVerdict body = MOK__GROUP_VERDICT__INIT;
    Mok__GroupMessage message = group_message(verdict, VERDICT, &body);

    body.group = lead->roster->id;
    body.index = index;
    body.code = error->code;
    body.rank = error->rank;
    body.text = (char *)error->text;
    group_send(node, peer, &message);
}

/* A home that is none any more, and lives, forgets the group; one that has been away knows nothing. */
static void look_for_home(struct group_node *node, struct group_lead *lead, uint32_t returned)
{
    uint32_t home = group_node_home(node, lead->roster->uid, lead->roster->name);

    if ((home == lead->home && home != returned) || !group_member_lives(node, lead->roster->id))
        return;
    if (home != lead->home)
        group_tell_over(node, lead->home, lead->roster);
    group_tell_stands(node, home, lead->roster);
    lead->home = home;
}

void group_lead_look_for_homes(struct group_node *node, uint32_t returned)
{
    struct group_lead *lead;

    TAILQ_FOREACH(lead, &node->leads, link)
        look_for_home(node, lead, returned);
}

/* A group whose opening is aborted has nothing more to be led to. */
static void conclude(struct group_node *node, struct group_lead *lead, struct call *call,
                     const struct group_error *error)
{
    bool ends = call->index == 0 && error->code < 0;

    nodes_each(lead->roster, peer) tell_verdict(node, lead, peer, call->index, error);
    if (call->index == 0 && !ends) /* it may have changed meanwhile */
        look_for_home(node, lead, GROUP_MAX_NODES);
    call_free(lead, call);
    if (!ends)
        return;
    group_tell_over(node, lead->home, lead->roster);
    lead_free(node, lead);
}

static void tell_prepare(struct group_node *node, struct group_lead *lead, struct call *call, Mok__GroupPrepare *body)
{
    Mok__GroupMessage message = group_message(prepare, PREPARE, body);

    call->state = CALL_PREPARING;
    call->deadline_ms = node->now_ms + GROUP_PREPARE_MS;
    body->group = lead->roster->id;
    body->index = call->index;
    nodes_each(lead->roster, peer)
    {
        call->waiting++;
        group_send(node, peer, &message);
    }
}

/* ------------------------------------------------------------------ the opening */

int group_lead_begin(struct group_node *node, uint32_t home, const struct group_roster *roster,
                     const Mok__GroupFormed *formed)
{
    size_t bytes = sizeof(*roster) + roster->size * sizeof(roster->rank[0]);
    Mok__GroupPrepare body = MOK__GROUP_PREPARE__INIT;

    if (find(node, roster->id))
        return 0; /* said twice */
    struct group_lead *lead = calloc(1, sizeof(*lead));
    if (!lead)
        return -MOK_ENOMEM;
    TAILQ_INIT(&lead->calls);
    TAILQ_INSERT_TAIL(&node->leads, lead, link);
    lead->node = node;
    lead->home = home;
    lead->roster = malloc(bytes);
    struct call *call = lead->roster ? call_new(lead, 0) : NULL;
    if (!call) {
        lead_free(node, lead);
        return -MOK_ENOMEM;
    }
    memcpy(lead->roster, roster, bytes);
    for (uint32_t r = 0; r < roster->size; r++)
        lead->next[r] = 1;
    body.kind = GROUP_OPEN;
    body.formed = (Mok__GroupFormed *)formed;
    tell_prepare(node, lead, call, &body);
    return 0;
}

/* ------------------------------------------------------------------ gathering */

static const struct group_params *params_of(const void *cookie, uint32_t rank)
{
    const struct call *call = cookie;
    return &call->caller[rank].params;
}

static const char *node_of(const void *cookie, uint32_t rank)
{
    const struct call *call = cookie;
    return group_node_name(call->lead->node, call->lead->roster->rank[rank].node);
}

static void forget_oldest(struct group_lead *lead)
{
    struct call *call, *oldest = NULL;
    unsigned count = 0;

    TAILQ_FOREACH(call, &lead->calls, link) {
        if (call->state != CALL_REFUSED)
            continue;
        count++;
        oldest = oldest ? oldest : call;
    }
    if (count > MAX_REFUSED)
        call_free(lead, oldest);
}

/* To each node with a rank that has called. */
static void refuse(struct group_node *node, struct group_lead *lead, struct call *call)
{
    bool told[GROUP_MAX_NODES + 1] = { false };

    call->state = CALL_REFUSED;
    for (uint32_t rank = 0; rank < lead->roster->size; rank++) {
        uint32_t peer = lead->roster->rank[rank].node;
        if (call->caller[rank].called && !told[peer])
            tell_verdict(node, lead, peer, call->index, &call->refusal);
        told[peer] |= call->caller[rank].called;
    }
    if (call->called == lead->roster->size)
        call_free(lead, call);
    else
        forget_oldest(lead);
}

/* Another rank has come to it, and it is over. */
static bool is_forgotten(const struct group_lead *lead, uint64_t index)
{
    bool others_came = false;

    for (uint32_t rank = 0; rank < lead->roster->size; rank++)
        others_came |= lead->next[rank] > index;
    return others_came && !find_call(lead, index);
}

static bool has_too_many_calls(const struct group_lead *lead)
{
    const struct call *call;
    unsigned count = 0;

    TAILQ_FOREACH(call, &lead->calls, link)
        count++;
    return count >= MAX_CALLS;
}

static void all_called(struct group_node *node, struct group_lead *lead, struct call *call)
{
    struct group_calls calls = { .size = lead->roster->size, .params = params_of, .node = node_of, .cookie = call };
    Mok__GroupPrepare body = MOK__GROUP_PREPARE__INIT;

    if (group_agree(&calls, &call->refusal) < 0) {
        refuse(node, lead, call);
        return;
    }
    body.kind = call->caller[0].params.kind;
    body.object = group_next_id(node);
    tell_prepare(node, lead, call, &body);
}

static void take_params(const Mok__GroupCall *message, const struct group_lead *lead, struct group_params *ret)
{
    const Mok__GroupLayerMap *map = message->map;

    *ret = (struct group_params){ .kind = message->kind, .bytes = message->bytes };
    if (message->spec)
        ret->spec = mok_layer_spec_read(message->spec, lead->roster->size, message->rank);
    if (map)
        ret->map = (struct group_map){
            .kind = map->kind,
            .symmetric_bytes = map->symmetric_bytes,
            .sym_ids = map->sym_ids,
            .sym_topk_weight = map->sym_topk_weight,
            .sym_slots = map->sym_slots,
            .sym_weight_slots = map->sym_weight_slots,
        };
}

static void broken(struct group_node *node, const struct group_lead *lead, const char *text)
{
    Mok__GroupOver body = MOK__GROUP_OVER__INIT;
    Mok__GroupMessage message = group_message(over, OVER, &body);

    body.group = lead->roster->id;
    body.text = (char *)text;
    nodes_each(lead->roster, peer) group_send(node, peer, &message);
}

void group_lead_call(struct group_node *node, uint32_t peer, const Mok__GroupCall *message)
{
    struct group_lead *lead = find(node, message->group);

    if (!lead || message->rank >= lead->roster->size || lead->roster->rank[message->rank].node != peer ||
        message->index != lead->next[message->rank])
        return; /* of a group that is over, said twice, or by who has nothing to say */
    if (message->kind != GROUP_ALLOC && message->kind != GROUP_LAYER)
        return;
    if (is_forgotten(lead, message->index)) {
        struct group_error given_up;
        group_error_set(&given_up, -MOK_ETIMEDOUT, message->rank,
                        "group %s: other ranks gave this call of rank %u up long ago", lead->roster->name,
                        message->rank);
        lead->next[message->rank]++;
        tell_verdict(node, lead, peer, message->index, &given_up);
        return;
    }
    struct call *call = find_call(lead, message->index);
    if (!call && has_too_many_calls(lead)) {
        broken(node, lead, "there are more calls than a group can have");
        return;
    }
    if (!call)
        call = call_new(lead, message->index);
    if (!call) {
        broken(node, lead, "the lead, the node of rank 0, is out of memory");
        return;
    }
    lead->next[message->rank]++;
    struct caller *caller = &call->caller[message->rank];
    caller->called = true;
    caller->timeout_ms = message->timeout_ms;
    caller->deadline_ms = group_deadline(node, message->timeout_ms);
    take_params(message, lead, &caller->params);
    call->called++;
    if (call->state == CALL_REFUSED) {
        tell_verdict(node, lead, peer, call->index, &call->refusal);
        if (call->called == lead->roster->size)
            call_free(lead, call);
        return;
    }
    if (call->called == lead->roster->size)
        all_called(node, lead, call);
}

/* ------------------------------------------------------------------ preparing */

void group_lead_prepared(struct group_node *node, uint32_t peer, const Mok__GroupPrepared *message)
{
    struct group_lead *lead = find(node, message->group);
    struct call *call = lead ? find_call(lead, message->index) : NULL;
    struct group_error error = { 0 };

    if (!call || call->state != CALL_PREPARING || !group_roster_has(lead->roster, peer) || call->prepared[peer])
        return;
    if (message->code < 0) {
        group_error_set(&error, message->code, message->rank < lead->roster->size ? message->rank : 0, "%s",
                        message->text);
        conclude(node, lead, call, &error);
        return;
    }
    call->prepared[peer] = true;
    if (--call->waiting == 0)
        conclude(node, lead, call, &error);
}

/* ------------------------------------------------------------------ deadlines */

static bool has_not_called(const void *cookie, uint32_t rank)
{
    const struct call *call = cookie;
    return !call->caller[rank].called;
}

static void check_gathering(struct group_node *node, struct group_lead *lead, struct call *call)
{
    char missing[200];

    for (uint32_t rank = 0; rank < lead->roster->size; rank++) {
        const struct caller *caller = &call->caller[rank];
        if (!caller->called || !caller->deadline_ms || caller->deadline_ms > node->now_ms)
            continue;
        group_error_set(&call->refusal, -MOK_ETIMEDOUT, rank,
                        "rank %u of group %s waited %" PRIu64 " ms: no call came from rank %s", rank,
                        lead->roster->name, caller->timeout_ms,
                        group_missing(lead->roster->size, has_not_called, call, missing, sizeof(missing)));
        refuse(node, lead, call);
        return;
    }
}

static void late(struct group_node *node, struct group_lead *lead, struct call *call)
{
    struct group_error error;

    for (uint32_t rank = 0; rank < lead->roster->size; rank++) {
        uint32_t peer = lead->roster->rank[rank].node;
        if (call->prepared[peer])
            continue;
        group_error_set(&error, -MOK_ETIMEDOUT, rank, "node %s (rank %u) did not do its part within %u ms",
                        group_node_name(node, peer), rank, GROUP_PREPARE_MS);
        conclude(node, lead, call, &error);
        return;
    }
}

void group_lead_tick(struct group_node *node)
{
    struct group_lead *lead, *next_lead;
    struct call *call, *next;

    for (lead = TAILQ_FIRST(&node->leads); lead; lead = next_lead) {
        next_lead = TAILQ_NEXT(lead, link);
        for (call = TAILQ_FIRST(&lead->calls); call; call = next) {
            next = TAILQ_NEXT(call, link);
            if (call->state == CALL_GATHERING) {
                check_gathering(node, lead, call);
            } else if (call->state == CALL_PREPARING && call->deadline_ms <= node->now_ms) {
                late(node, lead, call);
                break; /* the next turn goes on: the lead may be gone */
            }
        }
    }
}
