/* SPDX-License-Identifier: Apache-2.0 */
#include "group_rack.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint32_t rack_random(struct rack *rack, uint32_t bound)
{
    rack->random ^= rack->random << 13;
    rack->random ^= rack->random >> 7;
    rack->random ^= rack->random << 17;
    return (uint32_t)(rack->random >> 32) % bound;
}

static struct wire *wire_of(struct rack *rack, uint32_t from, uint32_t to)
{
    return &rack->wire[from * rack->size + to];
}

/* ------------------------------------------------------------------ operations of a node */

static void push(struct rack *rack, uint32_t from, uint32_t to, const void *bytes, size_t size)
{
    size_t capacity = WIRE_LETTERS;

    assert_true(wire_of(rack, from, to)->count < capacity);
    size_t at = (wire_of(rack, from, to)->first + wire_of(rack, from, to)->count++) % capacity;
    wire_of(rack, from, to)->letter[at].size = size;
    wire_of(rack, from, to)->letter[at].bytes = malloc(size + 1);
    assert_non_null(wire_of(rack, from, to)->letter[at].bytes);
    memcpy(wire_of(rack, from, to)->letter[at].bytes, bytes, size);
}

static void op_send(void *cookie, uint32_t to, const Mok__GroupMessage *message)
{
    struct rack_node *from = cookie;
    static uint8_t bytes[65536];

    size_t size = mok__group_message__get_packed_size(message);
    assert_true(size <= 65000); /* what the mesh carries */
    mok__group_message__pack(message, bytes);
    push(from->rack, from->index, to, bytes, size);
}

static struct note *add_note(struct rack_node *at, enum note_kind kind, uint32_t group, uint64_t index,
                             const struct group_error *error)
{
    struct note *note = &at->note[at->n_notes++ % RACK_NOTES];

    *note = (struct note){ .kind = kind, .group = group, .index = index };
    if (error)
        note->error = *error;
    return note;
}

static void op_refused(void *cookie, uint64_t join, const struct group_error *error)
{
    add_note(cookie, NOTE_REFUSED, 0, join, error);
}

static void prepare(struct rack_node *at, uint32_t group, uint64_t index)
{
    if (at->slow) {
        assert_true(at->n_unprepared < ARRAY_SIZE(at->unprepared));
        at->unprepared[at->n_unprepared].group = group;
        at->unprepared[at->n_unprepared++].index = index;
        return;
    }
    group_node_prepared(&at->node, group, index, at->fails.code ? &at->fails : NULL, at->rack->now_ms);
}

static void op_open(void *cookie, const struct group_roster *roster)
{
    add_note(cookie, NOTE_OPENED, roster->id, 0, NULL);
    prepare(cookie, roster->id, 0);
}

static void op_prepare(void *cookie, uint32_t group, uint64_t index, uint32_t kind, uint32_t object)
{
    assert_true(kind == GROUP_ALLOC || kind == GROUP_LAYER);
    assert_true(object & GROUP_ID_FLAG);
    prepare(cookie, group, index);
}

static void op_verdict(void *cookie, uint32_t group, uint64_t index, const struct group_error *error)
{
    add_note(cookie, error->code ? NOTE_ABORT : NOTE_COMMIT, group, index, error);
}

static void op_over(void *cookie, uint32_t group, const struct group_error *error)
{
    add_note(cookie, NOTE_OVER, group, 0, error);
}

static void op_drop(void *cookie, uint32_t peer, uint64_t request, uint32_t group, uint32_t rank, uint32_t buffer)
{
    struct rack_node *at = cookie;

    (void)rank;
    (void)buffer;
    add_note(at, NOTE_DROP, group, request, NULL);
    group_node_dropped(&at->node, peer, request, at->rack->now_ms);
}

static void op_dropped(void *cookie, uint32_t peer, uint64_t request)
{
    (void)peer;
    add_note(cookie, NOTE_DROPPED, 0, request, NULL);
}

static void op_layer_gone(void *cookie, uint32_t group, uint32_t layer, uint32_t rank)
{
    (void)rank;
    add_note(cookie, NOTE_LAYER_GONE, group, layer, NULL);
}

static void op_unreached(void *cookie, const char *name, char *ret, size_t size)
{
    (void)cookie;
    (void)name;
    snprintf(ret, size, "lost");
}

/* One that is cut off, if any. */
static void op_apart(void *cookie, char *ret, size_t size)
{
    const struct group_node *node = &((struct rack_node *)cookie)->node;

    ret[0] = '\0';
    for (uint32_t peer = 0; peer < GROUP_MAX_NODES; peer++)
        if (node->peer[peer].known && !node->peer[peer].up)
            snprintf(ret, size, "node %s does not reach node %s (lost)", group_node_name(node, node->self),
                     group_node_name(node, peer));
}

static bool op_id_is_taken(void *cookie, uint32_t id)
{
    return ((struct rack_node *)cookie)->taken == id;
}

static const struct group_ops ops = {
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

/* ------------------------------------------------------------------ the rack */

static const char *name_of(uint32_t node, char buffer[16])
{
    snprintf(buffer, 16, "n%02u", node);
    return buffer;
}

static void start(struct rack *rack, uint32_t node)
{
    struct rack_node *at = &rack->node[node];
    char name[16];

    at->rack = rack;
    at->index = node;
    at->n_unprepared = 0;
    group_node_init(&at->node, &ops, at, node, name_of(node, name));
}

struct rack *rack_new(uint32_t size, uint64_t seed)
{
    struct rack *rack = calloc(1, sizeof(*rack));

    assert_non_null(rack);
    rack->wire = calloc((size_t)size * size, sizeof(rack->wire[0]));
    assert_non_null(rack->wire);
    rack->size = size;
    rack->random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    rack->now_ms = 1000;
    for (uint32_t node = 0; node < size; node++)
        start(rack, node);
    for (uint32_t a = 0; a < size; a++)
        for (uint32_t b = a + 1; b < size; b++)
            rack_heal(rack, a, b);
    return rack;
}

static void clear(struct rack *rack, uint32_t from, uint32_t to)
{
    size_t capacity = WIRE_LETTERS;

    for (; wire_of(rack, from, to)->count > 0; wire_of(rack, from, to)->count--) {
        free(wire_of(rack, from, to)->letter[wire_of(rack, from, to)->first].bytes);
        wire_of(rack, from, to)->first = (wire_of(rack, from, to)->first + 1) % capacity;
    }
}

void rack_free(struct rack *rack)
{
    for (uint32_t a = 0; a < rack->size; a++)
        for (uint32_t b = 0; b < rack->size; b++)
            clear(rack, a, b);
    for (uint32_t a = 0; a < rack->size; a++)
        group_node_release(&rack->node[a].node);
    free(rack->wire);
    free(rack);
}

bool rack_deliver(struct rack *rack)
{
    uint32_t pairs = rack->size * rack->size, start_at = rack_random(rack, pairs);
    size_t capacity = WIRE_LETTERS;

    for (uint32_t i = 0; i < pairs; i++) {
        uint32_t pair = (start_at + i) % pairs, from = pair / rack->size, to = pair % rack->size;
        if (!wire_of(rack, from, to)->count)
            continue;
        struct letter letter = wire_of(rack, from, to)->letter[wire_of(rack, from, to)->first];
        wire_of(rack, from, to)->first = (wire_of(rack, from, to)->first + 1) % capacity;
        wire_of(rack, from, to)->count--;
        rack->delivered++;
        if (rack_random(rack, 100) < rack->duplicate_percent)
            push(rack, from, to, letter.bytes, letter.size);
        Mok__GroupMessage *message = mok__group_message__unpack(NULL, letter.size, letter.bytes);
        assert_non_null(message);
        group_node_receive(&rack->node[to].node, from, message, rack->now_ms);
        mok__group_message__free_unpacked(message, NULL);
        free(letter.bytes);
        return true;
    }
    return false;
}

void rack_settle(struct rack *rack)
{
    while (rack_deliver(rack))
        ;
}

void rack_wait(struct rack *rack, uint64_t ms)
{
    for (uint64_t end = rack->now_ms + ms; rack->now_ms < end;) {
        rack->now_ms += 250;
        for (uint32_t node = 0; node < rack->size; node++)
            group_node_tick(&rack->node[node].node, rack->now_ms);
        rack_settle(rack);
    }
}

void rack_cut(struct rack *rack, uint32_t a, uint32_t b)
{
    clear(rack, a, b);
    clear(rack, b, a);
    group_node_peer_lost(&rack->node[a].node, b, "was lost: no heartbeat for 900 ms", rack->now_ms);
    clear(rack, a, b);
    group_node_peer_lost(&rack->node[b].node, a, "was lost: no heartbeat for 900 ms", rack->now_ms);
    clear(rack, b, a);
}

void rack_heal(struct rack *rack, uint32_t a, uint32_t b)
{
    char name[16];

    group_node_peer_up(&rack->node[a].node, b, name_of(b, name), rack->now_ms);
    group_node_peer_up(&rack->node[b].node, a, name_of(a, name), rack->now_ms);
}

void rack_kill(struct rack *rack, uint32_t a)
{
    group_node_release(&rack->node[a].node);
    start(rack, a);
    for (uint32_t b = 0; b < rack->size; b++) {
        if (b == a)
            continue;
        clear(rack, a, b);
        clear(rack, b, a);
        group_node_peer_lost(&rack->node[b].node, a, "was lost: restarted", rack->now_ms);
    }
}

void rack_boot(struct rack *rack, uint32_t a)
{
    for (uint32_t b = 0; b < rack->size; b++)
        if (b != a)
            rack_heal(rack, a, b);
}

/* ------------------------------------------------------------------ what ranks do */

uint64_t rack_join(struct rack *rack, uint32_t node, const char *name, uint32_t size, uint32_t rank)
{
    struct group_joining joining = {
        .uid = 1000, .user = "", .name = name, .size = size, .rank = rank, .kind = MOK_DEVICE_HOST, .session = rank + 1
    };
    uint64_t join = 0;

    assert_int_equal(group_node_join(&rack->node[node].node, &joining, rack->now_ms, &join), 0);
    return join;
}

uint32_t rack_form(struct rack *rack, const char *name, uint32_t size)
{
    for (uint32_t rank = 0; rank < size; rank++)
        rack_join(rack, rank % rack->size, name, size, rank);
    rack_settle(rack);
    const struct rack_node *first = &rack->node[0];
    for (size_t i = first->n_notes; i-- > 0;)
        if (first->note[i % RACK_NOTES].kind == NOTE_COMMIT && first->note[i % RACK_NOTES].index == 0)
            return first->note[i % RACK_NOTES].group;
    return 0;
}

void rack_alloc(struct rack *rack, uint32_t group, uint32_t size, uint64_t index, uint64_t bytes)
{
    struct group_params params = { .kind = GROUP_ALLOC, .bytes = bytes };

    for (uint32_t rank = 0; rank < size; rank++)
        assert_int_equal(
            group_node_call(&rack->node[rank % rack->size].node, group, rank, index, &params, 0, rack->now_ms), 0);
}

const struct note *rack_note(const struct rack *rack, uint32_t node, enum note_kind kind, uint32_t group,
                             uint64_t index)
{
    const struct rack_node *at = &rack->node[node];

    for (size_t i = 0; i < at->n_notes && i < RACK_NOTES; i++)
        if (at->note[i].kind == kind && at->note[i].group == group && at->note[i].index == index)
            return &at->note[i];
    return NULL;
}

void rack_forget_notes(struct rack *rack)
{
    for (uint32_t node = 0; node < rack->size; node++)
        rack->node[node].n_notes = 0;
}

/* ------------------------------------------------------------------ what is expected */

void rack_expect_text(const struct note *note, int code, const char *part)
{
    assert_non_null(note);
    assert_int_equal(note->error.code, code);
    if (!strstr(note->error.text, part))
        fail_msg("\"%s\" does not say \"%s\"", note->error.text, part);
}

void rack_forget(struct rack *rack, uint32_t group)
{
    for (uint32_t node = 0; node < rack->size; node++)
        group_node_forget(&rack->node[node].node, group);
}

void rack_expect_nothing_left(struct rack *rack)
{
    for (uint32_t node = 0; node < rack->size; node++)
        assert_int_equal(group_node_count(&rack->node[node].node), 0);
}
