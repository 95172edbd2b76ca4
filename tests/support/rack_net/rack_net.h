/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Real meshes of several nodes in one process: keys in a directory of their own, each node at an address of 127.0.0.0/8
 * that no other test has. All on one loop, which the test turns.
 */
#ifndef RACK_NET_H
#define RACK_NET_H

#include "rack/rack.h"

#define RACK_NET_MAX 4u

struct rack_net_node {
    struct rack_net *net;
    uint32_t number;
    struct rack *rack; /* NULL: not started */
    uv_loop_t *loop;   /* NULL: the net's; else the test turns it */
    struct rack_config config;
    struct rack_node_config inventory[RACK_NET_MAX]; /* this node's own; config refers to it */
    uint8_t boot_id[RACK_BOOT_BYTES];
    void (*has_said_goodbye)(void); /* called at once; NULL is fine */
    /* What was called back. */
    uint64_t messages, last_number;
    bool out_of_order; /* pings have the numbers 1, 2, 3 ... since it was up */
    unsigned ups, losses, leaves, suspicions, drains, added, removed;
    char reason[RACK_MAX_TEXT]; /* of the last loss or suspicion */
};

struct rack_net {
    uv_loop_t loop;
    char dir[64];
    uint32_t size;
    uint32_t heartbeat_ms, timeout_ms; /* may be changed before a node is started */
    struct rack_net_node node[RACK_NET_MAX];
};

void rack_net_open(struct rack_net *net, uint32_t size);
void rack_net_start(struct rack_net *net, uint32_t number); /* a new boot each time; aborts when it fails */
void rack_net_start_all(struct rack_net *net);
void rack_net_stop(struct rack_net *net, uint32_t number);
void rack_net_leave(struct rack_net *net, uint32_t number); /* says goodbye, then stops at once */
void rack_net_close(struct rack_net *net); /* stops all, removes the directory */

/* Turns the loop until `done`; aborts with `what` when that takes a minute. */
typedef bool (*rack_net_condition)(struct rack_net *net);
void rack_net_until(struct rack_net *net, rack_net_condition done, const char *what);
void rack_net_until_for(struct rack_net *net, rack_net_condition done, uint32_t seconds, const char *what);
void rack_net_turn_for(struct rack_net *net, uint32_t ms);

/* How node `of` sees node `number`. */
struct rack_node_info rack_net_info(const struct rack_net *net, uint32_t of, uint32_t number);
bool rack_net_all_up(struct rack_net *net);

/* A ping to node `to`, with a number. As rack_send. */
int rack_net_ping(struct rack_net *net, uint32_t from, uint32_t to, uint64_t number, size_t payload, uint32_t ttl_ms);

#endif
