/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Any bytes as messages of an authenticated peer: refused by name, or a frame that packs and unpacks to itself; and
 * whatever a peer says, what it is to us stays one of four states, and only a loss makes our epoch move. The first byte
 * says how the input is cut into messages, so that a sequence of them reaches the state machine; or, when it is odd,
 * that the rest is the body of one message, of the kind that the next two bytes choose among all that there are.
 */
#include <string.h>

#include "kinds.h"
#include "rack/liveness.h"
#include "rack/zap.h"
#include "wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct rack_versions ours = { 1, 2 };

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void pack_and_unpack(const struct rack_head *head, const Mok__RackFrame *frame)
{
    _cleanup_free_ uint8_t *bytes = NULL;
    struct rack_head head_again;
    Mok__RackFrame *again;
    size_t size;

    int r = rack_frame_pack(head, frame, &bytes, &size);
    must(r == 0 || r == -MOK_ESIZE); /* longer than it came: numbers may be written shorter than they are */
    if (r < 0)
        return;
    r = rack_frame_unpack(ours, bytes, size, &head_again, &again);
    must(r == 0 || r == -MOK_EPROTO);
    if (r < 0)
        return;
    must(protobuf_c_message_get_packed_size(&again->base) == size - RACK_HEAD_BYTES);
    must(memcmp(&head_again, head, sizeof(head_again)) == 0);
    mok_wire_free(&again->base);
}

static void hear(const struct rack_self *self, struct rack_peer *peer, const struct rack_head *head,
                 const Mok__RackFrame *frame, uint64_t now_ns)
{
    struct rack_moment when = { .now_ns = now_ns, .realtime_ns = now_ns };
    enum rack_state before = peer->state;
    uint64_t epoch = peer->epoch;

    enum rack_verdict verdict = rack_peer_hear(self, peer, head, frame, now_ns, when);
    must((unsigned)peer->state <= RACK_LEFT);
    must(memchr(peer->error, '\0', sizeof(peer->error)) != NULL);
    must(peer->epoch == epoch || peer->epoch == epoch + 1);
    /* Whoever is told of states misses no loss. */
    if (peer->epoch != epoch && (before == RACK_UP || before == RACK_SUSPECT))
        must(peer->state == RACK_LOST || peer->state == RACK_LEFT);
    if (verdict == RACK_VERDICT_DELIVER)
        must(rack_peer_is_up(peer) && frame->epoch == peer->epoch &&
             memcmp(frame->target_boot.data, self->boot_id, RACK_BOOT_BYTES) == 0);
}

/* As this node would answer: so that a link can come up by luck. */
static void answer(const struct rack_self *self, struct rack_peer *peer, uint64_t now_ns)
{
    struct rack_moment when = { .now_ns = now_ns, .realtime_ns = now_ns };
    struct rack_beat_frame beat;
    struct rack_head head = rack_peer_head(self, peer);
    _cleanup_free_ uint8_t *bytes = NULL;
    size_t size;

    rack_peer_beat(self, peer, when, &beat);
    must(rack_frame_pack(&head, &beat.frame, &bytes, &size) == 0);
}

static void one_message(const struct rack_self *self, struct rack_peer *peer, const uint8_t *data, size_t size,
                        uint64_t now_ns)
{
    struct rack_head head = { 0 };
    Mok__RackFrame *frame = NULL;

    int r = rack_frame_unpack(ours, data, size, &head, &frame);
    must(r == 0 || r == -MOK_EPROTO || r == -MOK_EVERSION);
    if (r == -MOK_EVERSION)
        rack_peer_versions_fit(self, peer, &head);
    if (r < 0)
        return;
    pack_and_unpack(&head, frame);
    hear(self, peer, &head, frame, now_ns);
    mok_wire_free(&frame->base);
    answer(self, peer, now_ns);
    rack_peer_check(self, peer, now_ns);
}

static bool allow_some(void *cookie, const uint8_t public_key[static RACK_KEY_BYTES])
{
    (void)cookie;
    return public_key[0] & 1;
}

/* The same bytes as a question of libzmq. */
static void as_zap(const uint8_t *data, size_t size)
{
    struct rack_zap_frame frames[RACK_ZAP_FRAMES];
    struct rack_zap_answer zap;
    size_t count = 0;

    while (count < RACK_ZAP_FRAMES && size > 0) {
        size_t part = data[0] < size - 1 ? data[0] : size - 1;
        frames[count++] = (struct rack_zap_frame){ data + 1, part };
        data += part + 1;
        size -= part + 1;
    }
    rack_zap_decide(frames, count, allow_some, NULL, &zap);
    must(strcmp(zap.status, "200") != 0 || count == RACK_ZAP_FRAMES);
}

/* A good head and addresses, and whatever comes as the body: of one kind, and where that has kinds, of one of those. */
static void one_body(const struct rack_self *self, struct rack_peer *peer, const uint8_t *data, size_t size)
{
    enum { ROOM = 256 };
    static uint8_t bytes[ROOM + RACK_MAX_BYTES];
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    const uint8_t head[RACK_HEAD_BYTES] = { 'M', 'o', 'K', 'r', 1, 1, 2, 0 };

    peer->state = RACK_UP;
    peer->heard = peer->named = true;
    rack_peer_stamp(self, peer, &frame, 0, 1);
    frame.sender_boot.data = peer->boot_id;
    frame.target_boot.data = (uint8_t *)self->boot_id;
    frame.epoch = peer->epoch;
    if (size < 2 || size > RACK_MAX_BYTES - ROOM)
        return;
    const ProtobufCFieldDescriptor *outer = kind_of(&mok__rack_frame__descriptor, data[0]);
    const ProtobufCFieldDescriptor *inner = kind_of(outer->descriptor, data[1]);
    size_t total = size - 2;
    uint8_t *start = memcpy(bytes + ROOM, data + 2, total);
    if (inner)
        start = wrap(inner, start, &total);
    start = wrap(outer, start, &total);
    size_t packed = protobuf_c_message_get_packed_size(&frame.base);
    start -= packed;
    protobuf_c_message_pack(&frame.base, start);
    start -= sizeof(head);
    memcpy(start, head, sizeof(head));
    one_message(self, peer, start, sizeof(head) + packed + total, 2);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct rack_self self = { .name = "a", .versions = ours, .heartbeat_ns = 100000000, .timeout_ns = 1000000000 };
    struct rack_peer peer;
    uint64_t now_ns = 1;

    if (size < 2)
        return 0;
    memset(self.boot_id, 1, sizeof(self.boot_id));
    rack_peer_init(&peer, "b", "", now_ns);
    if (data[0] & 1) {
        one_body(&self, &peer, data + 1, size - 1);
        return 0;
    }
    size_t step = data[0] == 0 ? size : (size_t)data[0] * 4;
    as_zap(data + 1, size - 1);
    for (size_t at = 1; at < size; at += step) {
        now_ns += (uint64_t)data[at] * 10000000;
        one_message(&self, &peer, data + at, size - at < step ? size - at : step, now_ns);
    }
    return 0;
}
