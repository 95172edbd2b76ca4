/* SPDX-License-Identifier: Apache-2.0 */
/* What a rack's configuration must fulfil, and what all nodes must agree on. Looks at no file and no socket. */
#ifndef MOK_RACK_INVENTORY_H
#define MOK_RACK_INVENTORY_H

#include "rack.h"

#define RACK_MIN_HEARTBEAT_MS 10u
#define RACK_MAX_HEARTBEAT_MS 60000u
#define RACK_MAX_TIMEOUT_MS 600000u
#define RACK_TIMEOUT_BEATS 3u /* a time-out has at least so many heartbeats */

struct rack_address {
    bool ipv6;
    uint8_t bytes[16]; /* IPv4: the first four */
    uint16_t port;
};

/* "192.0.2.1:7117" or "[2001:db8::1]:7117": numbers, since the mesh waits for no name server. -MOK_EARG. */
int rack_address_parse(const char *text, struct rack_address *ret);

/* 0, or -MOK_EARG, -MOK_ENAME, -MOK_ERANGE, -MOK_EEXIST with a sentence in `text` (RACK_MAX_TEXT bytes). */
int rack_config_check(const struct rack_config *config, char *text);

/* This node's entry. NULL: there is none. */
const struct rack_node_config *rack_config_find(const struct rack_config *config, const char *name);

/* Of names, keys and link domains, whatever their order; addresses may differ from node to node. */
uint64_t rack_config_hash(const struct rack_config *config);

#endif
