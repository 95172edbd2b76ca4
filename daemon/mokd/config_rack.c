/* SPDX-License-Identifier: Apache-2.0 */
/* The sections about the rack: this node's place in it, and the inventory. Opens no key file and no socket. */
#include "config_internal.h"

#include <stddef.h>
#include <string.h>

#include "names.h"
#include "rack/frame.h"
#include "rack/inventory.h"
#include "rack_key.h"

#define RACK(member) offsetof(struct mokd_config, rack.member)

const struct key config_rack_keys[CONFIG_RACK_KEYS] = {
    { "node", VALUE_RACK_NAME, RACK(node), 0, 0 },
    { "listen", VALUE_RACK_ADDRESS, RACK(listen), 0, 0 },
    { "key", VALUE_PATH, RACK(key), 1, sizeof(((struct rack_config *)NULL)->key) - 1 },
    { "link_domain", VALUE_RACK_NAME, offsetof(struct mokd_config, link_domain), 0, 0 },
    { "heartbeat_ms", VALUE_U32, RACK(heartbeat_ms), RACK_MIN_HEARTBEAT_MS, RACK_MAX_HEARTBEAT_MS },
    { "timeout_ms", VALUE_U32, RACK(timeout_ms), RACK_TIMEOUT_BEATS *RACK_MIN_HEARTBEAT_MS, RACK_MAX_TIMEOUT_MS },
    { "tenants", VALUE_TENANTS, offsetof(struct mokd_config, tenants), 0, 0 },
    { "newest_protocol", VALUE_U32, RACK(newest_protocol), RACK_PROTOCOL_MIN, RACK_PROTOCOL_MAX },
};

const struct key config_node_keys[CONFIG_NODE_KEYS] = {
    { "address", VALUE_RACK_ADDRESS, offsetof(struct rack_node_config, address), 0, 0 },
    { "public_key", VALUE_RACK_KEY, offsetof(struct rack_node_config, public_key), 0, 0 },
    { "link_domain", VALUE_RACK_NAME, offsetof(struct rack_node_config, link_domain), 0, 0 },
};

enum section config_begin_node(struct parser *parser, const char *name)
{
    struct mokd_config *config = parser->config;
    size_t count = config->rack.n_nodes;

    if (!mok_name_is_valid(name)) {
        config_complain(parser, "[%s]: a node's name has 1..%d of the characters A-Z a-z 0-9 . _ -",
                        parser->section_text, MOK_MAX_NAME);
        return SECTION_BAD;
    }
    if (rack_config_find(&config->rack, name)) {
        config_complain(parser, "[%s]: the node is there twice", parser->section_text);
        return SECTION_BAD;
    }
    if (count == RACK_MAX_NODES) {
        config_complain(parser, "[%s]: at most %u nodes", parser->section_text, RACK_MAX_NODES);
        return SECTION_BAD;
    }
    struct rack_node_config *nodes = config_grow(parser, config->nodes, count, sizeof(*nodes));
    if (!nodes)
        return SECTION_BAD;
    memcpy(nodes[count].name, name, strlen(name) + 1);
    config->rack.nodes = config->nodes = nodes;
    config->rack.n_nodes++;
    return SECTION_NODE;
}

void config_set_rack(struct parser *parser, const struct key *key, void *base, const char *text)
{
    void *field = config_field(base, key);
    struct rack_address address;

    switch (key->kind) {
    case VALUE_RACK_NAME:
        if (mok_name_is_valid(text))
            memcpy(field, text, strlen(text) + 1);
        else
            config_complain(parser, "[%s] %s = %s: must have 1..%d of the characters A-Z a-z 0-9 . _ -",
                            parser->section_text, key->name, text, MOK_MAX_NAME);
        return;
    case VALUE_RACK_ADDRESS:
        if (rack_address_parse(text, &address) == 0)
            memcpy(field, text, strlen(text) + 1);
        else
            config_complain(
                parser, "[%s] %s = %s: must be an address in numbers and a port, 192.0.2.1:7117 or [2001:db8::1]:7117",
                parser->section_text, key->name, text);
        return;
    default:
        if (mok_rack_key_parse(text, field) < 0)
            config_complain(parser, "[%s] %s = %s: must be the 64 hexadecimal digits that mokctl keygen prints",
                            parser->section_text, key->name, text);
        return;
    }
}

/* A key that is there with an error in it is not missing. */
static bool has_key(uint32_t there, const struct key *keys, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(keys[i].name, name) == 0)
            return there >> i & 1;
    return false;
}

static void check_node(struct parser *parser, size_t index)
{
    static const uint8_t none[RACK_KEY_BYTES];
    struct rack_node_config *node = &parser->config->nodes[index];
    uint32_t there = parser->node_keys[index];

    if (!has_key(there, config_node_keys, CONFIG_NODE_KEYS, "address"))
        config_complain(parser, "[node %s] address: missing", node->name);
    if (!has_key(there, config_node_keys, CONFIG_NODE_KEYS, "public_key"))
        config_complain(parser, "[node %s] public_key: missing", node->name);
    else if (parser->rack_errors == 0 && memcmp(node->public_key, none, sizeof(none)) == 0)
        config_complain(parser, "[node %s] public_key: is all zeros, which is no key", node->name);
    if (!node->link_domain[0])
        memcpy(node->link_domain, parser->config->link_domain, sizeof(node->link_domain));
}

void config_check_rack(struct parser *parser)
{
    struct mokd_config *config = parser->config;
    char text[RACK_MAX_TEXT];

    if (!parser->seen_rack) {
        if (config->rack.n_nodes > 0)
            config_complain(parser, "[node %s]: has no meaning without [rack]", config->nodes[0].name);
        return;
    }
    unsigned before = parser->errors;
    if (!has_key(parser->rack_keys, config_rack_keys, CONFIG_RACK_KEYS, "node"))
        config_complain(parser, "[rack] node: missing, this node's name");
    if (!has_key(parser->rack_keys, config_rack_keys, CONFIG_RACK_KEYS, "key"))
        config_complain(parser, "[rack] key: missing, the file of this node's secret key");
    for (size_t i = 0; i < config->rack.n_nodes; i++)
        check_node(parser, i);
    if (parser->rack_errors == 0 && parser->errors == before && rack_config_check(&config->rack, text) < 0)
        config_complain(parser, "%s", text);
}
