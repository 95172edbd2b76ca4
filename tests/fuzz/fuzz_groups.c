/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any messages about groups from two peers with valid keys, in any order, with nodes that come, go and stand still: the
 * state machines never come apart, and forget everything in the end. Bytes: an action each, and what it takes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "input.h"
#include "rack/group_node.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void must(bool condition)
{
    if (!condition)
        abort();
}

static const char a_long_reason[] =
    "a reason that is longer than what is kept of one, and than what goes into a sentence of any kind at all: "
    "0123456789012345678901234567890123456789012345678901234567890123456789";

/* ------------------------------------------------------------------ a daemon that does what it is told */

struct daemon {
    struct group_node node;
    uint32_t group[64]; /* that it has been told to open */
    size_t n_groups;
    uint64_t now_ms;
};

static void op_send(void *cookie, uint32_t node, const Mok__GroupMessage *message)
{
    const struct daemon *d = cookie;
    must(node != d->node.self && node < GROUP_MAX_NODES);
    must(mok__group_message__get_packed_size(message) <= 65000); /* what the mesh carries */
}

static void op_refused(void *cookie, uint64_t join, const struct group_error *error)
{
    (void)cookie;
    must(join > 0 && error->code < 0 && strlen(error->text) < sizeof(error->text));
}

static void op_open(void *cookie, const struct group_roster *roster)
{
    struct daemon *d = cookie;

    must(roster->size >= 1 && roster->size <= MOK_MAX_EP);
    for (uint32_t rank = 0; rank < roster->size; rank++)
        must(memchr(roster->rank[rank].no_fabric, '\0', sizeof(roster->rank[rank].no_fabric)) != NULL);
    if (d->n_groups == 64)
        return;
    d->group[d->n_groups++] = roster->id;
    group_node_prepared(&d->node, roster->id, 0, NULL, d->now_ms);
}

static void op_prepare(void *cookie, uint32_t group, uint64_t index, uint32_t kind, uint32_t object)
{
    struct daemon *d = cookie;

    (void)kind;
    must(object & GROUP_ID_FLAG);
    group_node_prepared(&d->node, group, index, NULL, d->now_ms);
}

static void op_verdict(void *cookie, uint32_t group, uint64_t index, const struct group_error *error)
{
    (void)cookie;
    (void)group;
    (void)index;
    must(error->code <= 0);
}

static void op_over(void *cookie, uint32_t group, const struct group_error *error)
{
    (void)cookie;
    (void)group;
    must(error->code < 0);
}

static void op_drop(void *cookie, uint32_t node, uint64_t request, uint32_t group, uint32_t rank, uint32_t buffer)
{
    struct daemon *d = cookie;

    (void)group;
    (void)rank;
    (void)buffer;
    group_node_dropped(&d->node, node, request, d->now_ms);
}

static void op_dropped(void *cookie, uint32_t node, uint64_t request)
{
    (void)cookie;
    (void)node;
    (void)request;
}

static void op_layer_gone(void *cookie, uint32_t group, uint32_t layer, uint32_t rank)
{
    (void)cookie;
    (void)group;
    (void)layer;
    must(rank < MOK_MAX_EP);
}

static void op_unreached(void *cookie, const char *name, char *ret, size_t size)
{
    (void)cookie;
    snprintf(ret, size, "%s", name);
}

static void op_apart(void *cookie, char *ret, size_t size)
{
    (void)cookie;
    snprintf(ret, size, "%s", a_long_reason);
}

static bool op_id_is_taken(void *cookie, uint32_t id)
{
    (void)cookie;
    return id % 7 == 3;
}

static const struct group_ops operations = {
    .send = op_send,
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

/* ------------------------------------------------------------------ actions */

static void receive(struct daemon *d, struct input *in, uint32_t from)
{
    size_t size = take(in);

    size = size < in->size ? size : in->size;
    Mok__GroupMessage *message = mok__group_message__unpack(NULL, size, in->data);
    in->data += size;
    in->size -= size;
    if (!message)
        return;
    if (message->body_case == MOK__GROUP_MESSAGE__BODY_HANDLE && group_handle_is_sound(message->handle))
        must(message->handle->rank < MOK_MAX_EP && message->handle->group & GROUP_ID_FLAG &&
             (message->handle->fabric.len == 0 || message->handle->fabric.len == GROUP_FABRIC_BYTES));
    group_node_receive(&d->node, from, message, d->now_ms);
    mok__group_message__free_unpacked(message, NULL);
}

/* What a peer says of a group that stands, or is over. */
static void stand(struct daemon *d, struct input *in, uint32_t from)
{
    static char *const nodes[] = { (char *)"b", (char *)"a", (char *)"c", (char *)"nobody" };
    Mok__GroupStanding body = MOK__GROUP_STANDING__INIT;
    Mok__GroupFormed formed = MOK__GROUP_FORMED__INIT;
    Mok__GroupRank rank[2] = { MOK__GROUP_RANK__INIT, MOK__GROUP_RANK__INIT }, *pointer[2] = { &rank[0], &rank[1] };
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    uint8_t what = take(in), more = take(in);

    message.body_case = MOK__GROUP_MESSAGE__BODY_STANDING;
    message.standing = &body;
    body.group = what & 0x80 ? NULL : &formed;
    body.over = what & 1;
    formed.kept = true;
    formed.group = d->n_groups && what & 2 ? d->group[(what >> 3) % d->n_groups] : GROUP_ID_FLAG | (what >> 3 & 7);
    formed.uid = more & 1;
    formed.name = (char *)(what & 4 ? "a" : "b");
    formed.n_rank = more >> 1 & 1 ? 2 : 1;
    formed.rank = pointer;
    rank[0].node = nodes[more >> 2 & 3];
    rank[1].node = nodes[more >> 4 & 3];
    group_node_receive(&d->node, from, &message, d->now_ms);
}

/* A rank that is not let in, of a group that others may wait for. */
static void decline(struct daemon *d, struct input *in)
{
    uint8_t what = take(in);
    struct group_error error;

    group_error_set(&error, -MOK_EDRAIN, 0, "%s", a_long_reason);
    group_node_decline(&d->node, what & 1, what & 4 ? "a" : "b", take(in), &error, d->now_ms);
}

static void join(struct daemon *d, struct input *in)
{
    uint8_t what = take(in);
    struct group_joining joining = { .uid = what & 1,
                                     .user = what & 2 ? "ann" : "",
                                     .name = what & 4 ? "a" : "b",
                                     .size = 1 + (what >> 3 & 3),
                                     .kind = 1,
                                     .timeout_ms = what & 0x80 ? 500 : 0 };
    uint64_t number;

    uint8_t more = take(in);
    joining.rank = more % joining.size;
    joining.fabric = more & 0x80;
    joining.no_fabric = more & 0x40 ? a_long_reason : "";
    must(group_node_join(&d->node, &joining, d->now_ms, &number) == 0 && number > 0);
}

static void act_on_group(struct daemon *d, struct input *in, uint8_t action)
{
    struct group_params params = { .kind = GROUP_ALLOC + (action & 1), .bytes = take(in) };
    uint32_t group = d->n_groups ? d->group[take(in) % d->n_groups] : 0;

    if (action & 2)
        group_node_call(&d->node, group, take(in) % 4, take(in) % 8, &params, action & 4 ? 100 : 0, d->now_ms);
    else if (action & 4)
        group_node_over(&d->node, group, take(in) % 4, "gone", d->now_ms);
    else if (action & 8)
        group_node_forget(&d->node, group);
    else
        group_node_drop(&d->node, group, 0, take(in), 1, d->now_ms);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = { "b", "a", "c" };
    struct input in = { data, size };
    struct daemon d = { .now_ms = 1000 };

    group_node_init(&d.node, &operations, &d, 0, names[0]);
    while (in.size) {
        uint8_t action = take(&in);
        uint32_t peer = 1 + (action >> 7);
        switch (action & 7) {
        case 0:
            group_node_peer_up(&d.node, peer, names[peer], d.now_ms);
            break;
        case 1:
            group_node_peer_lost(&d.node, peer, "gone", d.now_ms);
            break;
        case 2:
            join(&d, &in);
            break;
        case 3:
            act_on_group(&d, &in, action >> 3);
            break;
        case 4:
            d.now_ms += 250;
            group_node_tick(&d.node, d.now_ms);
            break;
        case 5:
            if (action & 0x10)
                stand(&d, &in, peer);
            else if (action & 8)
                decline(&d, &in);
            else
                group_node_withdraw(&d.node, 1 + take(&in) % 8, NULL, d.now_ms);
            break;
        default:
            receive(&d, &in, peer);
        }
    }
    /* Once all peers and groups are gone, no name is kept. */
    group_node_peer_lost(&d.node, 1, "gone", d.now_ms);
    group_node_peer_lost(&d.node, 2, "gone", d.now_ms);
    for (size_t i = 0; i < d.n_groups; i++)
        group_node_forget(&d.node, d.group[i]);
    must(d.node.n_standings == 0 || d.n_groups == 64);
    group_node_release(&d.node);
    return 0;
}
