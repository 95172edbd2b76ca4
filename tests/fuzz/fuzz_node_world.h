/* SPDX-License-Identifier: Apache-2.0 */
/*
 * For fuzz_node: a mokd without sockets, workers and clocks, so that an input does the same each time. The mesh is the
 * fake one; timers fire when they are told to, workers answer at once, and the thread pool's work is done in the loop's
 * thread (linked with --wrap).
 */
#ifndef MOK_FUZZ_NODE_WORLD_H
#define MOK_FUZZ_NODE_WORLD_H

#include "buffer.h"
#include "fake_rack.h"
#include "rack_groups_internal.h"

enum { SELF, OFFERED, OFFERS, NODES }; /* by their names: "b" offers a link to "c", and gets offers of "a" */
#define SESSIONS 3u
#define DEVICES 2u

struct world {
    struct mokd_server server;
    struct mokd_config config;
    struct mokd_options options;
    struct mokd_device_config device_config[DEVICES];
    struct mokd_device device[DEVICES], *devices[DEVICES];
    struct fake_net *net;
    int client[SESSIONS], link; /* our ends */
    uint64_t last_request;
};

/* Aborts, which the fuzzer reports. */
void must(bool condition);

void world_begin(struct world *w); /* which is all zeros */
/* All clients go, then the peers; nothing may be left. */
void world_end(struct world *w);
/* Until nothing moves by itself. */
void world_settle(struct world *w);
/* One of the timers that are set. */
void world_fire(uint8_t which);
/* NULL: it is not there any more. */
struct mokd_session *world_session(struct world *w, uint64_t n);
extern bool world_workers_refuse;

#endif
