/* SPDX-License-Identifier: Apache-2.0 */
#include "inventory.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stdio.h>
#include <string.h>

#include "names.h"
#include "util.h"

static bool parse_port(const char *text, uint16_t *ret)
{
    char *end;

    if (!isdigit((unsigned char)*text))
        return false;
    unsigned long port = strtoul(text, &end, 10);
    *ret = (uint16_t)port;
    return !*end && port > 0 && port <= 65535;
}

int rack_address_parse(const char *text, struct rack_address *ret)
{
    struct rack_address address = { .ipv6 = *text == '[' };
    char host[RACK_MAX_ADDRESS + 1];
    const char *colon = strrchr(text, ':');

    if (!colon || strlen(text) > RACK_MAX_ADDRESS || !parse_port(colon + 1, &address.port))
        return -MOK_EARG;
    if (address.ipv6 && (colon - text < 2 || colon[-1] != ']'))
        return -MOK_EARG;
    snprintf(host, sizeof(host), "%.*s", (int)(colon - text - (address.ipv6 ? 2 : 0)), text + (address.ipv6 ? 1 : 0));
    if (inet_pton(address.ipv6 ? AF_INET6 : AF_INET, host, address.bytes) != 1)
        return -MOK_EARG;
    *ret = address;
    return 0;
}

const struct rack_node_config *rack_config_find(const struct rack_config *config, const char *name)
{
    for (size_t i = 0; i < config->n_nodes; i++)
        if (strcmp(config->nodes[i].name, name) == 0)
            return &config->nodes[i];
    return NULL;
}

static int check_node(const struct rack_config *config, size_t index, char *text)
{
    const struct rack_node_config *node = &config->nodes[index];
    struct rack_address address;

    if (!mok_name_is_valid(node->name)) {
        snprintf(text, RACK_MAX_TEXT, "[node]: a name has 1..%d of the characters A-Z a-z 0-9 . _ -", MOK_MAX_NAME);
        return -MOK_ENAME;
    }
    if (rack_address_parse(node->address, &address) < 0) {
        snprintf(text, RACK_MAX_TEXT, "[node %s] address = %.80s: must be NUMBERS:PORT or [NUMBERS]:PORT", node->name,
                 node->address);
        return -MOK_EARG;
    }
    if (node->link_domain[0] && !mok_name_is_valid(node->link_domain)) {
        snprintf(text, RACK_MAX_TEXT, "[node %s] link_domain: has 1..%d of the characters A-Z a-z 0-9 . _ -",
                 node->name, MOK_MAX_NAME);
        return -MOK_ENAME;
    }
    for (size_t i = 0; i < index; i++) {
        const struct rack_node_config *other = &config->nodes[i];
        if (strcmp(other->name, node->name) == 0 || strcmp(other->address, node->address) == 0 ||
            memcmp(other->public_key, node->public_key, RACK_KEY_BYTES) == 0) {
            snprintf(text, RACK_MAX_TEXT, "[node %s]: has the name, address or public key of [node %s]", node->name,
                     other->name);
            return -MOK_EEXIST;
        }
    }
    return 0;
}

static int check_intervals(const struct rack_config *config, char *text)
{
    if (config->heartbeat_ms < RACK_MIN_HEARTBEAT_MS || config->heartbeat_ms > RACK_MAX_HEARTBEAT_MS) {
        snprintf(text, RACK_MAX_TEXT, "[rack] heartbeat_ms = %u: must be in %u..%u", config->heartbeat_ms,
                 RACK_MIN_HEARTBEAT_MS, RACK_MAX_HEARTBEAT_MS);
        return -MOK_ERANGE;
    }
    if (config->timeout_ms < RACK_TIMEOUT_BEATS * config->heartbeat_ms || config->timeout_ms > RACK_MAX_TIMEOUT_MS) {
        snprintf(text, RACK_MAX_TEXT, "[rack] timeout_ms = %u: must be in %u..%u, that is at least %u heartbeats",
                 config->timeout_ms, RACK_TIMEOUT_BEATS * config->heartbeat_ms, RACK_MAX_TIMEOUT_MS,
                 RACK_TIMEOUT_BEATS);
        return -MOK_ERANGE;
    }
    return 0;
}

int rack_config_check(const struct rack_config *config, char *text)
{
    struct rack_address address;

    if (config->listen[0] && rack_address_parse(config->listen, &address) < 0) {
        snprintf(text, RACK_MAX_TEXT, "[rack] listen = %.80s: must be NUMBERS:PORT or [NUMBERS]:PORT", config->listen);
        return -MOK_EARG;
    }
    int r = check_intervals(config, text);
    if (r < 0)
        return r;
    if (config->n_nodes > RACK_MAX_NODES) {
        snprintf(text, RACK_MAX_TEXT, "%zu sections [node NAME], at most %u", config->n_nodes, RACK_MAX_NODES);
        return -MOK_ERANGE;
    }
    for (size_t i = 0; i < config->n_nodes; i++) {
        r = check_node(config, i, text);
        if (r < 0)
            return r;
    }
    if (!rack_config_find(config, config->node)) {
        snprintf(text, RACK_MAX_TEXT, "[rack] node = %s: there is no section [node %s]", config->node, config->node);
        return -MOK_EARG;
    }
    return 0;
}

/* FNV-1a, with a mix at the end so that sums of hashes stay good. */
static uint64_t add_bytes(uint64_t hash, const void *bytes, size_t size)
{
    const uint8_t *byte = bytes;

    for (size_t i = 0; i < size; i++)
        hash = (hash ^ byte[i]) * UINT64_C(0x100000001b3);
    return hash;
}

uint64_t rack_config_hash(const struct rack_config *config)
{
    uint64_t sum = config->n_nodes;

    for (size_t i = 0; i < config->n_nodes; i++) {
        const struct rack_node_config *node = &config->nodes[i];
        uint64_t hash = UINT64_C(0xcbf29ce484222325);
        hash = add_bytes(hash, node->name, strlen(node->name) + 1);
        hash = add_bytes(hash, node->link_domain, strlen(node->link_domain) + 1);
        hash = add_bytes(hash, node->public_key, RACK_KEY_BYTES);
        hash ^= hash >> 29;
        sum += hash * UINT64_C(0xbf58476d1ce4e5b9);
    }
    return sum;
}
