/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The thread that owns the ZeroMQ sockets, and the bounded queues between it and the loop. It authenticates, parses and
 * carries; it decides nothing about peers. A peer is a slot, and a serial number that tells users of a slot apart.
 *
 * Back-pressure: what waits for a peer is bounded here and then in the socket, and rack_link_send says -MOK_EAGAIN
 * beyond. What has come in is bounded as well, and then stays in the sockets, and so with its senders.
 */
#ifndef MOK_RACK_LINK_H
#define MOK_RACK_LINK_H

#include "frame.h"
#include "lately.h"

#define RACK_INBOX_ITEMS 8192u
#define RACK_INBOX_BYTES (16u << 20)

struct rack_link;

struct rack_link_config {
    const char *listen; /* host:port */
    uint8_t public_key[RACK_KEY_BYTES], secret_key[RACK_KEY_BYTES];
    struct rack_versions versions;
    uint32_t timeout_ms; /* of a peer: connections that carry nothing for so long are made anew */
    bool ipv6;
};

enum rack_item_kind {
    RACK_ITEM_FRAME,     /* frame and head are set */
    RACK_ITEM_VERSION,   /* a frame in a version that is not ours; head is set */
    RACK_ITEM_MALFORMED, /* `bytes` messages of an authenticated peer are no frames */
    RACK_ITEM_DRAINED,   /* there is room again */
    RACK_ITEM_ERROR,     /* text says what the connection suffers from */
};

struct rack_item {
    struct rack_item *next;
    enum rack_item_kind kind;
    uint32_t slot, serial;
    uint64_t arrived_ns;
    struct rack_head head;
    Mok__RackFrame *frame;
    size_t bytes;
    char text[]; /* ERROR alone */
};
#define RACK_NOBODY_THERE "no "              /* what the text of an ERROR begins with where nobody answers */
void rack_item_free(struct rack_item *item); /* NULL is fine */

/* Counters of what has no peer. */
struct rack_link_stats {
    uint64_t refused;                        /* handshakes of keys that are not in the inventory */
    uint64_t refused_ns;                     /* when the last was; 0: never */
    struct rack_lately refused_lately;
    char refused_from[RACK_MAX_ADDRESS + 1]; /* the last one's address */
    uint64_t unknown;                        /* messages of a peer that has been removed */
    uint32_t connections;                    /* inbound, the unauthenticated ones too */
    uint32_t max_connections;
};

/*
 * Binds, then starts the thread. `wake` is called on the thread, whenever there is something to take and the last take
 * has been answered. `text` as in rack_start.
 */
int rack_link_start(const struct rack_link_config *config, void (*wake)(void *cookie), void *cookie,
                    struct rack_link **ret, char *text);
void rack_link_stop(struct rack_link *link); /* ends the thread and frees; NULL is fine */

/* A peer: its key may connect from now on, and we connect to it. -MOK_ENOMEM. */
int rack_link_add(struct rack_link *link, uint32_t slot, uint32_t serial, const char *address,
                  const uint8_t public_key[static RACK_KEY_BYTES]);
/* Its key gets in no more, from before anything that is sent to it from now on; how it is connected stays. */
void rack_link_bar(struct rack_link *link, uint32_t slot);
/* What has been sent to it by now is given RACK_GOODBYE_MS to get away; nobody waits for that. */
void rack_link_remove(struct rack_link *link, uint32_t slot);
/* What has been sent by now is given RACK_GOODBYE_MS to get away when the link stops; else it is dropped. */
void rack_link_leave(struct rack_link *link);
/* Drops all that waits for it and connects anew. */
void rack_link_reset(struct rack_link *link, uint32_t slot);

/* Takes over `bytes` (malloc) whatever it returns. -MOK_EAGAIN: too much waits; -MOK_ENOMEM. */
int rack_link_send(struct rack_link *link, uint32_t slot, uint8_t *bytes, size_t size);
/* The same for a beat, which goes before all else and replaces one that has not gone yet. -MOK_ENOMEM. */
int rack_link_send_beat(struct rack_link *link, uint32_t slot, uint8_t *bytes, size_t size);

/* All that has come in, oldest first; the caller frees each. NULL: nothing. */
struct rack_item *rack_link_take(struct rack_link *link);
void rack_link_stats(struct rack_link *link, struct rack_link_stats *ret);

/* Counts the turns of the link's thread, one a second at least: whoever sees it stand still knows that the thread
 * hangs. */
uint64_t rack_link_rounds(const struct rack_link *link);

#endif
