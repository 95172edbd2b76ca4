/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A rack of group_nodes in one process: messages wait in a queue a pair of nodes and are delivered when a test says so,
 * in any order between pairs. Nodes prepare by themselves unless told otherwise, and note what they are told.
 */
#ifndef GROUP_RACK_H
#define GROUP_RACK_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "rack/group_node.h"

#define RACK_NODES 18u
#define RACK_NOTES 512u

enum note_kind {
    NOTE_REFUSED = 1,
    NOTE_OPENED,
    NOTE_COMMIT,
    NOTE_ABORT,
    NOTE_OVER,
    NOTE_DROP,
    NOTE_DROPPED,
    NOTE_LAYER_GONE
};

struct note {
    enum note_kind kind;
    uint32_t group;
    uint64_t index; /* or the join, or the request */
    struct group_error error;
};

struct rack_node {
    struct rack *rack;
    struct group_node node;
    uint32_t index;
    bool slow;                /* does not prepare by itself */
    struct group_error fails; /* code: what it answers instead */
    struct note note[RACK_NOTES];
    size_t n_notes;
    struct {
        uint32_t group;
        uint64_t index;
    } unprepared[64];
    size_t n_unprepared;
    uint32_t taken; /* an id that it has */
};

struct letter {
    size_t size;
    uint8_t *bytes;
};

#define WIRE_LETTERS 1024u
struct wire {
    struct letter letter[WIRE_LETTERS];
    size_t first, count;
};

struct rack {
    uint32_t size;
    uint64_t now_ms;
    uint64_t random;
    unsigned duplicate_percent; /* of messages that arrive twice, the second time at any moment later */
    uint64_t delivered;
    struct rack_node node[RACK_NODES];
    struct wire *wire; /* [size][size] */
};

struct rack *rack_new(uint32_t size, uint64_t seed);
void rack_free(struct rack *rack);
uint32_t rack_random(struct rack *rack, uint32_t bound);
/* One message of a random pair that has one; false: nothing is under way. */
bool rack_deliver(struct rack *rack);
void rack_settle(struct rack *rack);
/* Time passes, with ticks. */
void rack_wait(struct rack *rack, uint64_t ms);
/* Both lose each other and what is under way; both find each other again. */
void rack_cut(struct rack *rack, uint32_t a, uint32_t b);
void rack_heal(struct rack *rack, uint32_t a, uint32_t b);
/* All lose a node, which has forgotten everything when it comes back. */
void rack_kill(struct rack *rack, uint32_t a);
void rack_boot(struct rack *rack, uint32_t a);

uint64_t rack_join(struct rack *rack, uint32_t node, const char *name, uint32_t size, uint32_t rank);
/* All ranks of a group, rank r on node r % nodes; settles; returns the id. */
uint32_t rack_form(struct rack *rack, const char *name, uint32_t size);
/* Everyone calls the same allocation. */
void rack_alloc(struct rack *rack, uint32_t group, uint32_t size, uint64_t index, uint64_t bytes);
const struct note *rack_note(const struct rack *rack, uint32_t node, enum note_kind kind, uint32_t group,
                             uint64_t index);
void rack_forget_notes(struct rack *rack);

/* A refusal, an end or a verdict of this code, whose sentence says `part`. */
void rack_expect_text(const struct note *note, int code, const char *part);
/* All nodes let go of a group. */
void rack_forget(struct rack *rack, uint32_t group);
void rack_expect_nothing_left(struct rack *rack);

#endif
