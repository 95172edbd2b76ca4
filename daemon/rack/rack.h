/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The mesh of the rack's daemons: who is there, and messages to them. Everything below is called, and calls back, on
 * the loop's thread; sockets, keys and parsing live in a thread of their own. Knows nothing of groups or devices.
 *
 *   UNKNOWN --both hear each other--> UP --beats missed--> SUSPECT --a beat--> UP
 *                                     UP, SUSPECT --silence, restart, loss of a message, removal--> LOST
 *                                     UP, SUSPECT --its goodbye--> LEFT
 *   LOST, LEFT --both hear each other--> UP
 *
 * Between two changes to UP a peer has one boot id and one epoch, and gets what is sent to it in order, each once,
 * without a gap: a message that cannot be had any more makes the peer LOST on both sides. All that was agreed with it
 * before is void then.
 */
#ifndef MOK_RACK_H
#define MOK_RACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "mok/types.h"
#include "rack.pb-c.h"

#define RACK_MAX_NODES 128u
#define RACK_MAX_ADDRESS 63       /* bytes of host:port */
#define RACK_BOOT_BYTES 16        /* of a boot id */
#define RACK_KEY_BYTES 32         /* of a CURVE key */
#define RACK_MAX_TEXT 256         /* bytes of a reason, with its terminator */
#define RACK_MAX_PAYLOAD 65000u   /* bytes that the body of a frame may pack to */
#define RACK_QUEUE_MESSAGES 4096u /* that may wait for one peer */
#define RACK_QUEUE_BYTES (8u << 20)
#define RACK_GOODBYE_MS 200u

struct rack;

/* Versions that a daemon speaks: neighbours have one in common, so that a rack can be upgraded node by node. */
struct rack_versions {
    uint8_t min, max;
};

/* ------------------------------------------------------------------ configuration */

struct rack_node_config {
    char name[MOK_MAX_NAME + 1];
    char address[RACK_MAX_ADDRESS + 1]; /* host:port, where the others reach it */
    char link_domain[MOK_MAX_NAME + 1]; /* nodes with the same one reach each other's memory; "": none */
    uint8_t public_key[RACK_KEY_BYTES];
};

struct rack_config {
    char node[MOK_MAX_NAME + 1];       /* this node's name; one of nodes[] */
    char listen[RACK_MAX_ADDRESS + 1]; /* host:port; "": the node's own address */
    char key[256];                     /* file of the secret key */
    uint32_t heartbeat_ms;
    uint32_t timeout_ms;                  /* of silence until a peer is lost */
    const struct rack_node_config *nodes; /* the inventory, this node too; the same on all nodes */
    size_t n_nodes;
    uint32_t newest_protocol;      /* speaks no newer version, though it could; 0: all it can */
    struct rack_versions versions; /* tests: pretends to be another version; 0: what it is */
};

/* ------------------------------------------------------------------ nodes */

enum rack_state { RACK_UNKNOWN = 0, RACK_UP = 1, RACK_SUSPECT = 2, RACK_LOST = 3, RACK_LEFT = 4 };
const char *rack_state_text(enum rack_state state); /* "up" */
/* What a goodbye of one node to another means, as the end of a sentence; `ret` has RACK_MAX_TEXT bytes. */
void rack_goodbye_text(Mok__GoodbyeReason reason, const char *from, const char *to, char *ret);

struct rack_counters {
    uint64_t sent, received;
    uint64_t stale;     /* dropped: boot id, epoch or sequence is not the present one */
    uint64_t expired;   /* dropped: past the deadline */
    uint64_t malformed; /* dropped: not a message */
};

struct rack_node_info {
    uint32_t index; /* a node keeps it until it is removed; below RACK_MAX_NODES */
    bool self;
    enum rack_state state; /* this node itself is always UP */
    const char *name;      /* these four live until the loop turns */
    const char *address;
    const char *link_domain;          /* "": none, or peer and inventory disagree on it */
    const char *error;                /* the last one; "": none */
    uint8_t boot_id[RACK_BOOT_BYTES]; /* of the present or last time UP */
    uint64_t epoch;                   /* ours for it; changes when it is lost */
    int64_t rtt_ns;                   /* loop to loop; -1: not measured */
    int64_t clock_offset_ns;          /* its wall clock less ours, +- rtt / 2; for people alone */
    uint64_t silent_ms;               /* since it was last heard */
    uint32_t protocol;                /* version spoken with it; 0: none yet */
    bool inventory_agrees;            /* its inventory has the hash of ours; false also while not UP */
    bool tenants_agree;               /* its sections of users and groups have the hash of ours, or it does not say */
    bool draining;                    /* it takes no new group */
    struct rack_counters counters;
};

/* ------------------------------------------------------------------ what is called back */

struct rack_handlers {
    /* A command of an UP (or SUSPECT) peer, or of this node itself. The frame is freed when this returns. */
    void (*message)(void *cookie, uint32_t node, const Mok__RackFrame *frame);
    /*
     * The state of a peer has changed. `reason` is a sentence for LOST, LEFT and SUSPECT, else "". A peer that is
     * removed from the inventory becomes LOST first (if it was up), then `removed` is called and its index may be used
     * again.
     */
    void (*state)(void *cookie, uint32_t node, enum rack_state before, enum rack_state now, const char *reason);
    void (*added)(void *cookie, uint32_t node);   /* by a reload */
    void (*removed)(void *cookie, uint32_t node); /* by a reload */
    /* A peer that is up has been said goodbye to: whoever has other ways to it says it there too. */
    void (*goodbye)(void *cookie, uint32_t node, Mok__GoodbyeReason reason);
    /* There is room again for a peer that a send was refused for with -MOK_EAGAIN. */
    void (*drained)(void *cookie, uint32_t node);
};

/* ------------------------------------------------------------------ the mesh */

/*
 * Reads the key, binds, connects. Handlers may be NULL one by one. `text` (RACK_MAX_TEXT bytes) gets the sentence of
 * a failure: -MOK_EARG, -MOK_EACCESS (key file), -MOK_EEXIST (address in use), -MOK_EFDS, -MOK_ENOMEM, -MOK_EIO.
 */
int rack_start(uv_loop_t *loop, const struct rack_config *config, const uint8_t boot_id[static RACK_BOOT_BYTES],
               const struct rack_handlers *handlers, void *cookie, struct rack **ret, char *text);
/* Says goodbye to who is up, and nothing more to anybody. What others send is not looked at any more. NULL is fine. */
void rack_leave(struct rack *rack);
/*
 * No handler is called any more; the loop holds nothing of it once it has turned. After rack_leave this waits for
 * goodbyes that are still on their way, for RACK_GOODBYE_MS at most. NULL is fine.
 */
void rack_stop(struct rack *rack);
/*
 * Takes over inventory and intervals. -MOK_ESTATE: node, listen or key are not as they were. An error leaves all as it
 * was, but -MOK_ENOMEM, which leaves nodes out. A node with another key, address or link domain is removed and added.
 */
int rack_reload(struct rack *rack, const struct rack_config *config, char *text);

/*
 * Sends frame->body to a node; everything else of the frame is filled in here. To this node itself: delivered when the
 * loop turns next. `ttl_ms` 0: no deadline. 0; -MOK_ENOENT: no such node; -MOK_EPEER: it is not up; -MOK_EAGAIN: too
 * much waits for it, see drained; -MOK_ESIZE; -MOK_ENOMEM.
 */
int rack_send(struct rack *rack, uint32_t node, Mok__RackFrame *frame, uint32_t ttl_ms);
/*
 * Something for this node can never be sent: it is lost for that reason, if it is up, and so are we to it; soon both
 * are up again with nothing under way. Tells `state` at once.
 */
void rack_lose(struct rack *rack, uint32_t node, const char *reason);

/* Hash of what this node says of users and Unix groups; 0: nothing that holds over the rack. */
void rack_set_tenants(struct rack *rack, uint64_t hash);
/* This node takes no new group: the next beats say so. */
void rack_set_draining(struct rack *rack, bool draining);

uint32_t rack_self(const struct rack *rack); /* index of this node */
/* -MOK_ENOENT when there is no node of this index; so go over all below RACK_MAX_NODES. */
int rack_info(const struct rack *rack, uint32_t node, struct rack_node_info *ret);
int rack_find(const struct rack *rack, const char *name, uint32_t *ret_node); /* -MOK_ENOENT */
uint64_t rack_inventory_hash(const struct rack *rack);
/* What belongs to no node. */
struct rack_totals {
    uint64_t refused;                        /* handshakes with a key that is not in the inventory */
    uint64_t refused_ns;                     /* when the last was; 0: never since the inventory is what it is */
    uint64_t refused_lately;                 /* in the last five minutes; 0 with refused_ns */
    char refused_from[RACK_MAX_ADDRESS + 1]; /* the last one's address */
    uint64_t unknown;                        /* messages of a node that has been removed */
    uint32_t connections;                    /* from others, the unauthenticated ones too */
    uint32_t max_connections;
};
void rack_totals(const struct rack *rack, struct rack_totals *ret);
uint32_t rack_timeout_ms(const struct rack *rack);
/* Turns of its thread: as rack_link_rounds. */
uint64_t rack_rounds(const struct rack *rack);

#endif
