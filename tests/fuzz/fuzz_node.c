/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What mokd does with the messages of two peers with valid keys, and with the packets of one on its host, between
 * clients that form groups, allocate and leave, workers that agree or do not, and time that passes: nothing comes
 * apart, and once all clients are gone nothing is left. Bytes: an action each, and what it takes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "fuzz_node_world.h"
#include "input.h"
#include "kinds.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ------------------------------------------------------------------ peers */

/* As the mesh hands it in: unpacked from bytes. */
static void deliver(struct world *w, uint32_t from, const uint8_t *bytes, size_t size)
{
    ProtobufCMessage *frame = NULL;

    if (mok_wire_unpack(&mok__rack_frame__descriptor, bytes, size, &frame) < 0)
        return;
    mokd_rack_groups_handlers.message(&w->server, from, (const Mok__RackFrame *)(const void *)frame);
    mok_wire_free(frame);
}

static void say(struct world *w, uint32_t from, Mok__GroupMessage *message)
{
    uint8_t bytes[4096];
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;

    frame.body_case = MOK__RACK_FRAME__BODY_GROUP;
    frame.group = message;
    must(protobuf_c_message_get_packed_size(&frame.base) <= sizeof(bytes));
    deliver(w, from, bytes, protobuf_c_message_pack(&frame.base, bytes));
}

/* Of one kind, and where that has kinds, of one of those: whatever comes as the body. */
static void say_anything(struct world *w, struct input *in, uint32_t from)
{
    enum { ROOM = 64 };
    uint8_t bytes[ROOM + 256];
    const ProtobufCFieldDescriptor *outer = kind_of(&mok__rack_frame__descriptor, take(in));
    const ProtobufCFieldDescriptor *inner = kind_of(outer->descriptor, take(in));
    size_t size = take(in);

    size = size < in->size ? size : in->size;
    uint8_t *start = memcpy(bytes + ROOM, in->data, size);
    in->data += size;
    in->size -= size;
    if (inner)
        start = wrap(inner, start, &size);
    start = wrap(outer, start, &size);
    deliver(w, from, start, size);
}

/* A group that is known here, or none. */
static uint32_t a_group(const struct world *w, uint8_t n)
{
    const struct mokd_group *group;
    uint32_t last = GROUP_ID_FLAG | n;

    TAILQ_FOREACH(group, &w->server.groups, link)
        if (group->id & GROUP_ID_FLAG) {
            last = group->id;
            if (n-- % 4 == 0)
                break;
        }
    return last;
}

static void say_joining(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__GroupJoining body = MOK__GROUP_JOINING__INIT;
    uint8_t what = take(in), more = take(in);

    message.body_case = MOK__GROUP_MESSAGE__BODY_JOINING;
    message.joining = &body;
    body.uid = getuid();
    body.user = (char *)"";
    body.name = (char *)(what & 1 ? "x" : "y");
    body.size = 2 + (what >> 1 & 1);
    body.rank = what >> 2 & 3;
    body.join = 1 + (what >> 4);
    body.kind = more & 1 ? MOK_DEVICE_CUDA : MOK_DEVICE_HOST;
    body.fabric = more >> 1 & 1;
    body.exclusive = more >> 2 & 1;
    body.no_fabric = (char *)(body.fabric ? "" : "none");
    body.session = 1;
    say(w, from, &message);
}

struct roster {
    Mok__GroupFormed body;
    Mok__GroupRank rank[3], *pointers[3];
};

static void fill_roster(struct input *in, struct roster *ret)
{
    static const char *const names[] = { "b", "a", "c", "b" };
    uint8_t what = take(in), nodes = take(in), joins = take(in);

    ret->body = (Mok__GroupFormed)MOK__GROUP_FORMED__INIT;
    ret->body.group = GROUP_ID_FLAG | (what >> 4);
    ret->body.uid = getuid();
    ret->body.name = (char *)(what & 1 ? "x" : "y");
    ret->body.n_rank = 2 + (what >> 1 & 1);
    ret->body.rank = ret->pointers;
    for (unsigned i = 0; i < 3; i++) {
        ret->pointers[i] = &ret->rank[i];
        ret->rank[i] = (Mok__GroupRank)MOK__GROUP_RANK__INIT;
        ret->rank[i].node = (char *)names[nodes >> 2 * i & 3];
        ret->rank[i].join = 1 + (joins >> 2 * i & 3);
        ret->rank[i].fabric = what >> 2 & 1;
        ret->rank[i].kind = ret->rank[i].fabric ? MOK_DEVICE_CUDA : MOK_DEVICE_HOST;
        ret->rank[i].no_fabric = (char *)"";
        ret->rank[i].session = 1;
    }
}

static void say_formed(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    struct roster roster;

    fill_roster(in, &roster);
    message.body_case = MOK__GROUP_MESSAGE__BODY_FORMED;
    message.formed = &roster.body;
    say(w, from, &message);
}

static void say_step(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__GroupPrepare prepare = MOK__GROUP_PREPARE__INIT;
    Mok__GroupPrepared prepared = MOK__GROUP_PREPARED__INIT;
    Mok__GroupVerdict verdict = MOK__GROUP_VERDICT__INIT;
    Mok__GroupOver over = MOK__GROUP_OVER__INIT;
    Mok__GroupDrop drop = MOK__GROUP_DROP__INIT;
    Mok__GroupCall call = MOK__GROUP_CALL__INIT;
    struct roster roster;
    uint8_t what = take(in), more = take(in);
    uint32_t group = a_group(w, what >> 6), index = more & 3, rank = more >> 2 & 3;
    int code = what & 0x20 ? -MOK_EPEER : 0;

    switch (what & 7) {
    case 0:
        message.body_case = MOK__GROUP_MESSAGE__BODY_PREPARE;
        message.prepare = &prepare;
        prepare.group = group, prepare.index = index, prepare.kind = more >> 4 & 3;
        prepare.object = GROUP_ID_FLAG | take(in);
        if (index == 0) { /* the opening */
            fill_roster(in, &roster);
            prepare.group = roster.body.group;
            prepare.kind = GROUP_OPEN;
            prepare.object = 0;
            prepare.formed = &roster.body;
        }
        break;
    case 1:
        message.body_case = MOK__GROUP_MESSAGE__BODY_PREPARED;
        message.prepared = &prepared;
        prepared.group = group, prepared.index = index, prepared.rank = rank, prepared.code = code;
        break;
    case 2:
        message.body_case = MOK__GROUP_MESSAGE__BODY_VERDICT;
        message.verdict = &verdict;
        verdict.group = group, verdict.index = index, verdict.rank = rank, verdict.code = code;
        break;
    case 3:
        message.body_case = MOK__GROUP_MESSAGE__BODY_OVER;
        message.over = &over;
        over.group = group, over.rank = rank;
        break;
    case 4:
        message.body_case = MOK__GROUP_MESSAGE__BODY_DROP;
        message.drop = &drop;
        drop.group = group, drop.rank = rank, drop.buffer = more & 1 ? 0 : GROUP_ID_FLAG | take(in);
        drop.request = take(in);
        break;
    default:
        message.body_case = MOK__GROUP_MESSAGE__BODY_CALL;
        message.call = &call;
        call.group = group, call.index = index, call.rank = rank, call.kind = GROUP_ALLOC, call.bytes = 4096;
    }
    say(w, from, &message);
}

static void fill_handle(struct world *w, struct input *in, Mok__Handle *ret)
{
    static uint8_t fabric[MOKD_FABRIC_BYTES];
    uint8_t what = take(in);

    ret->group = a_group(w, what & 3);
    ret->kind = 1 + (what >> 2 & 3);
    ret->rank = what >> 4 & 3;
    ret->across = what >> 6 & 1;
    ret->object = ret->kind == MOK__HANDLE_KIND__HANDLE_BELL ? 0 : GROUP_ID_FLAG | take(in);
    ret->bytes = 4096;
    if (what & 0x80 && ret->kind != MOK__HANDLE_KIND__HANDLE_BELL)
        ret->fabric = (ProtobufCBinaryData){ .len = sizeof(fabric), .data = fabric };
}

static void say_handle(struct world *w, struct input *in, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__Handle handle = MOK__HANDLE__INIT;

    fill_handle(w, in, &handle);
    message.body_case = MOK__GROUP_MESSAGE__BODY_HANDLE;
    message.handle = &handle;
    say(w, from, &message);
}

static void say_refused_link(struct world *w, uint32_t from)
{
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    Mok__GroupHostRefused body = MOK__GROUP_HOST_REFUSED__INIT;

    body.text = (char *)"not here";
    message.body_case = MOK__GROUP_MESSAGE__BODY_HOST_REFUSED;
    message.host_refused = &body;
    say(w, from, &message);
}

/* ------------------------------------------------------------------ a daemon on this host */

static void send_packet(struct world *w, const Mok__HandlePacket *packet, int fd)
{
    if (w->link >= 0 && mok_wire_send(w->link, &packet->base, &fd, fd >= 0) < 0)
        w->link = mok_close(w->link);
}

static void connect_link(struct world *w, bool right)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__HandleHello hello = MOK__HANDLE_HELLO__INIT;
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    uint8_t token[HOST_TOKEN_BYTES];
    const char *path;

    mok_close(w->link);
    w->link = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    mokd_host_offer(w->server.rack_groups->links, OFFERED, "c", &path, token);
    snprintf(address.sun_path, sizeof(address.sun_path), "%.100s", path);
    if (connect(w->link, (struct sockaddr *)&address, sizeof(address)) < 0)
        return;
    token[0] ^= !right;
    packet.body_case = MOK__HANDLE_PACKET__BODY_HELLO;
    packet.hello = &hello;
    hello.node = (char *)"c";
    hello.token = (ProtobufCBinaryData){ .len = sizeof(token), .data = token };
    send_packet(w, &packet, -1);
}

static void hand_in(struct world *w, struct input *in)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__Handle handle = MOK__HANDLE__INIT;

    fill_handle(w, in, &handle);
    packet.body_case = MOK__HANDLE_PACKET__BODY_HANDLE;
    packet.handle = &handle;
    send_packet(w, &packet, w->device[0].bell);
}

static void part(struct world *w, uint8_t reason)
{
    Mok__HandlePacket packet = MOK__HANDLE_PACKET__INIT;
    Mok__HandleGoodbye goodbye = MOK__HANDLE_GOODBYE__INIT;

    goodbye.reason = reason;
    packet.body_case = MOK__HANDLE_PACKET__BODY_GOODBYE;
    packet.goodbye = &goodbye;
    send_packet(w, &packet, -1);
}

static void use_link(struct world *w, struct input *in)
{
    uint8_t what = take(in);
    size_t size = what >> 2 < in->size ? what >> 2 : in->size;

    if (what >= 0xfc) {
        part(w, what & 3);
        return;
    }

    if ((what & 3) < 2) {
        connect_link(w, what & 1);
        return;
    }
    if ((what & 3) == 2) {
        hand_in(w, in);
        return;
    }
    if (w->link >= 0 && send(w->link, in->data, size, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
        w->link = mok_close(w->link);
    in->data += size;
    in->size -= size;
}

/* ------------------------------------------------------------------ clients */

static void request(struct world *w, struct input *in)
{
    uint8_t what = take(in), more = take(in);
    struct mokd_session *session = world_session(w, 1 + (what >> 3 & 3));
    Mok__Request message = MOK__REQUEST__INIT;
    Mok__GroupJoin join = MOK__GROUP_JOIN__INIT;
    Mok__GroupLeave leave = MOK__GROUP_LEAVE__INIT;
    Mok__BufferAlloc alloc = MOK__BUFFER_ALLOC__INIT;
    Mok__BufferFree release = MOK__BUFFER_FREE__INIT;
    Mok__Drain drain = MOK__DRAIN__INIT;
    Mok__StatusQuery look = MOK__STATUS_QUERY__INIT;

    if (!session)
        return;
    message.id = ++w->last_request;
    switch (what & 7) {
    case 0:
    case 1:
    case 2:
        message.body_case = MOK__REQUEST__BODY_GROUP_JOIN;
        message.group_join = &join;
        join.name = (char *)(more & 1 ? "x" : "y");
        join.size = 2 + (more >> 1 & 1);
        join.rank = more >> 2 & 3;
        join.device = more >> 4 & 1;
        join.exclusive = more >> 5 & 1;
        join.timeout_ms = more >> 6 & 1 ? 1000 : 0;
        break;
    case 3:
    case 4:
        message.body_case = MOK__REQUEST__BODY_BUFFER_ALLOC;
        message.buffer_alloc = &alloc;
        alloc.group = what & 0x80 ? 0 : a_group(w, more & 3);
        alloc.device = more >> 2 & 1;
        alloc.bytes = 4096;
        break;
    case 5:
        message.body_case = MOK__REQUEST__BODY_GROUP_LEAVE;
        message.group_leave = &leave;
        leave.group = a_group(w, more & 3);
        break;
    case 6:
        message.body_case = MOK__REQUEST__BODY_BUFFER_FREE;
        message.buffer_free = &release;
        release.buffer = TAILQ_EMPTY(&session->buffers) ? more : TAILQ_FIRST(&session->buffers)->id;
        break;
    default:
        if (more & 8) {
            message.body_case = MOK__REQUEST__BODY_STATUS_QUERY;
            message.status_query = &look;
            break;
        }
        message.body_case = MOK__REQUEST__BODY_DRAIN_ON;
        message.drain_on = &drain;
        drain.on = (char *)(more & 1 ? "a" : "c");
        drain.node = more >> 1 & 1;
        drain.undo = more >> 2 & 1;
    }
    mokd_request_handle(session, &message);
}

static void answer_order(struct world *w, struct input *in, uint32_t from)
{
    uint8_t bytes[512], what = take(in);
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackDrained body = MOK__RACK_DRAINED__INIT;
    Mok__DeviceListReply list = MOK__DEVICE_LIST_REPLY__INIT;
    Mok__DeviceInfo device = MOK__DEVICE_INFO__INIT, *pointer = &device;

    frame.body_case = MOK__RACK_FRAME__BODY_DRAINED;
    frame.drained = &body;
    body.request = what & 7;
    body.code = what & 8 ? -MOK_EACCESS : 0;
    body.text = (char *)"\x1b[2J";
    device.name = (char *)(what & 0x20 ? "d" : "\x1b[2J");
    device.reason = (char *)"\n";
    list.n_device = what >> 4 & 1;
    list.device = &pointer;
    body.devices = what & 0x40 ? NULL : &list;
    deliver(w, from, bytes, protobuf_c_message_pack(&frame.base, bytes));
}

/* ------------------------------------------------------------------ a group that is whole */

static void do_bytes(void (*action)(struct world *w, struct input *in, uint32_t from), struct world *w, uint32_t from,
                     const uint8_t *bytes, size_t size)
{
    struct input in = { bytes, size };

    action(w, &in, from);
    world_settle(w);
}
#define DO(action, from, ...) do_bytes(action, w, from, (uint8_t[]){ __VA_ARGS__ }, sizeof((uint8_t[]){ __VA_ARGS__ }))

static void ask(struct world *w, struct input *in, uint32_t from)
{
    (void)from;
    request(w, in);
}

/*
 * The words that bring a group of one rank here and one at "c" together, over the fabric or by a link. Which of them
 * fit is a matter of whose name's home it is; the others are refused.
 */
static void form(struct world *w, uint8_t how)
{
    uint8_t name = how & 1, rank = how >> 1 & 1, fabric = how >> 2 & 1;
    uint8_t nodes = rank ? 2 : 2 << 2, id = a_group(w, 1) & 15;

    if (fabric)
        say_refused_link(w, OFFERED);
    else
        connect_link(w, true);
    world_settle(w);
    DO(ask, SELF, 0, (uint8_t)(name | rank << 2 | fabric << 4));
    DO(say_joining, OFFERED, (uint8_t)(name | !rank << 2), (uint8_t)(fabric ? 3 : 0));
    DO(say_formed, OFFERED, (uint8_t)(name | fabric << 2 | id << 4), nodes, 0);
    DO(say_step, OFFERED, 0, 0, 0, (uint8_t)(name | fabric << 2 | id << 4), nodes, 0);
    if (fabric)
        DO(say_handle, OFFERED, (uint8_t)(!rank << 4 | 0x40), 0);
    else
        hand_in(w, &(struct input){ (uint8_t[]){ (uint8_t)(!rank << 4) }, 1 });
    world_settle(w);
    DO(say_step, OFFERED, 1, 0);
    DO(say_step, OFFERED, 2, 0);
}

/* ------------------------------------------------------------------ actions */

static void act(struct world *w, struct input *in)
{
    uint8_t action = take(in);
    uint32_t peer = action & 0x80 ? OFFERED : OFFERS;
    struct mokd_session *session;

    switch (action & 15) {
    case 0:
    case 1:
        request(w, in);
        break;
    case 2:
        say_joining(w, in, peer);
        break;
    case 3:
        say_formed(w, in, peer);
        break;
    case 4:
    case 5:
        say_step(w, in, peer);
        break;
    case 6:
        say_handle(w, in, peer);
        break;
    case 7:
        say_refused_link(w, peer);
        break;
    case 8:
    case 9:
        say_anything(w, in, peer);
        break;
    case 10:
        use_link(w, in);
        break;
    case 11:
        answer_order(w, in, peer);
        break;
    case 12:
        world_fire(take(in));
        break;
    case 13:
        session = world_session(w, 1 + (action >> 4 & 3));
        if (session)
            mokd_session_close(session, 0, "");
        break;
    case 14:
        world_workers_refuse = action >> 4 & 1;
        break;
    default:
        if (action & 0x40)
            fake_net_choke(w->net, SELF, peer, action >> 4 & 1);
        else if (action & 0x20)
            fake_net_suspect(w->net, SELF, peer, action >> 4 & 1);
        else if (action & 0x10)
            fake_net_heal(w->net, SELF, peer);
        else
            fake_net_cut(w->net, SELF, peer);
    }
    world_settle(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool first = true;
    struct world *w = calloc(1, sizeof(*w));
    struct input in = { data, size };

    must(w != NULL);
    if (first)
        mok_log_set_level(0);
    first = false;
    world_begin(w);
    if (size > 0 && data[0] & 0xf8)
        form(w, take(&in));
    for (int n = 0; in.size && n < 64; n++)
        act(w, &in);
    world_end(w);
    free(w);
    return 0;
}
