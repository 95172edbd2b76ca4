/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a peer is to this node, from what is heard of it and when: the state machine of rack.h, staleness of commands,
 * round trip, clocks. Time is an argument; no sockets, no allocation, no log, so that tests can run it in any time.
 *
 * A link is up once each side knows the other's boot id and epoch, and knows that the other knows its own (as BFD's
 * three-way handshake). Losing a peer counts the epoch up, so that the other side sees it and loses us too.
 */
#ifndef MOK_RACK_LIVENESS_H
#define MOK_RACK_LIVENESS_H

#include "frame.h"

#define RACK_RETIRED 4
#define RACK_WINDOW 16

struct rack_self {
    char name[MOK_MAX_NAME + 1];
    char link_domain[MOK_MAX_NAME + 1];
    uint8_t boot_id[RACK_BOOT_BYTES];
    struct rack_versions versions;
    uint64_t inventory;
    uint64_t heartbeat_ns, timeout_ns;
    bool draining;
    uint64_t tenants; /* hash; 0: not told */
};

/* The smallest of the last few samples: delay is only ever added, never taken away. */
struct rack_window {
    int64_t sample[RACK_WINDOW];
    uint32_t count;
};

struct rack_peer {
    char name[MOK_MAX_NAME + 1];        /* by the inventory, of the key */
    char link_domain[MOK_MAX_NAME + 1]; /* by the inventory */
    enum rack_state state;
    uint8_t boot_id[RACK_BOOT_BYTES];
    bool heard; /* boot_id is set */
    bool named; /* a hello of this boot had the right name */
    bool link_domain_agrees;
    uint8_t retired[RACK_RETIRED][RACK_BOOT_BYTES]; /* boots that have been replaced: never to come back */
    uint32_t n_retired;
    uint64_t epoch;      /* ours for it */
    uint64_t seen_epoch; /* its for us; 0: not heard */
    uint64_t sent_sequence, received_sequence;
    uint64_t beat_number;
    uint64_t heard_ns;               /* when last, or when we began to listen */
    uint64_t echo_ns, echo_at_ns;    /* its last beat: by its clock, and when it came */
    struct rack_window rtt, transit; /* transit: arrival by our clock less departure by its */
    int64_t clock_offset_ns;
    uint64_t inventory;
    uint64_t tenants;              /* as in rack_self */
    bool draining;                 /* takes no new group, says its last beat */
    struct rack_versions versions; /* what it speaks; {0, 0}: not heard */
    uint32_t version;              /* spoken with it; 0: none in common, or not heard */
    struct rack_counters counters;
    char error[RACK_MAX_TEXT]; /* the last one; the reason of LOST and SUSPECT */
    char loss[RACK_MAX_TEXT];  /* why it was lost last; all that is left of errors once it is up again */
};

/* When something was looked at: the clocks, read once. */
struct rack_moment {
    uint64_t now_ns;      /* monotonic */
    uint64_t realtime_ns; /* wall clock, at the same time */
};

enum rack_verdict {
    RACK_VERDICT_DROP = 0,
    RACK_VERDICT_DELIVER = 1, /* a command that is to be acted on */
    RACK_VERDICT_ANSWER = 2,  /* a beat or hello that the peer waits to be answered at once */
};

void rack_peer_init(struct rack_peer *peer, const char *name, const char *link_domain, uint64_t now_ns);

/*
 * A frame of this peer, that came in at `arrived_ns`. May change peer->state, at most once; to LOST or LEFT with the
 * reason in peer->error.
 */
enum rack_verdict rack_peer_hear(const struct rack_self *self, struct rack_peer *peer, const struct rack_head *head,
                                 const Mok__RackFrame *frame, uint64_t arrived_ns, struct rack_moment when);

/* All that is left of a frame in a version that we do not speak. False: there is none that both do. */
bool rack_peer_versions_fit(const struct rack_self *self, struct rack_peer *peer, const struct rack_head *head);

/* Looks at the silence. May change peer->state, at most once. */
void rack_peer_check(const struct rack_self *self, struct rack_peer *peer, uint64_t now_ns);

/* For reasons outside of what is heard. A peer that is not up stays as it is but for the error. */
void rack_peer_lose(struct rack_peer *peer, const char *reason);

/* This node did not listen for so long: silence of that time says nothing. */
void rack_peer_excuse(struct rack_peer *peer, uint64_t ns, uint64_t now_ns);

bool rack_peer_is_up(const struct rack_peer *peer);
int64_t rack_peer_rtt(const struct rack_peer *peer); /* -1: not measured */

/* The head of what is sent to it. */
struct rack_head rack_peer_head(const struct rack_self *self, const struct rack_peer *peer);

/* Fills everything but the body of a command. The frame refers to self and peer. */
void rack_peer_stamp(const struct rack_self *self, struct rack_peer *peer, Mok__RackFrame *frame, uint32_t ttl_ms,
                     uint64_t now_ns);
void rack_peer_sent(struct rack_peer *peer); /* it is under way: counts it */

/* The frame to send now and every heartbeat: a hello or a beat. */
struct rack_beat_frame {
    Mok__RackFrame frame;
    Mok__RackHello hello;
    Mok__RackBeat beat;
};
void rack_peer_beat(const struct rack_self *self, struct rack_peer *peer, struct rack_moment when,
                    struct rack_beat_frame *ret);

#endif
