/* SPDX-License-Identifier: Apache-2.0 */
/* What the files that read the configuration share: the parser's state and the tables of keys. No one else's. */
#ifndef MOKD_CONFIG_INTERNAL_H
#define MOKD_CONFIG_INTERNAL_H

#include <stdbool.h>
#include <stdio.h>

#include "config.h"
#include "util.h"

/* inih's own line buffer; a longer line would reach it in pieces. */
#define CONFIG_MAX_LINE 197

enum section { SECTION_NONE, SECTION_BAD, SECTION_DAEMON, SECTION_LIMITS, SECTION_USER, SECTION_GROUP, SECTION_DEVICE,
               SECTION_METRICS, SECTION_RACK, SECTION_NODE };
enum value_kind {
    VALUE_U32,
    VALUE_ENTRIES, /* of a queue: a power of two */
    VALUE_SIZE,
    VALUE_COUNT, /* 64 bits */
    VALUE_MODE,
    VALUE_PATH,
    VALUE_LEVEL,
    VALUE_DEVICE_KIND,
    VALUE_SHARING,
    VALUE_FAILURE,
    VALUE_MPS,
    VALUE_TENANTS,
    VALUE_PRIORITY,
    VALUE_BOOL,
    VALUE_DEVICES,
    VALUE_ADMIN_GROUP,
    VALUE_ENDPOINT,
    VALUE_RACK_NAME,
    VALUE_RACK_ADDRESS,
    VALUE_RACK_KEY,
};

struct parser {
    const char *path;
    mokd_config_report report;
    void *cookie;
    FILE *file;
    struct mokd_config *config;
    unsigned line;
    unsigned errors;
    enum section section;
    char section_text[CONFIG_MAX_LINE + 1];
    uint32_t seen;   /* keys of this section, by index in its table */
    bool expect_key; /* the line just handed to inih holds a key */
    bool out_of_memory;
    bool seen_daemon, seen_limits, seen_metrics, seen_rack;
    uint32_t rack_keys, node_keys[RACK_MAX_NODES]; /* that are there, be they right or wrong */
    unsigned rack_errors;                          /* in [rack] and the nodes */
    struct spare {                                 /* takes the values of a section that cannot be kept */
        struct mokd_device_config device;
        struct mokd_limits limits;
        struct rack_node_config node;
    } spare;
};

struct key {
    const char *name;
    enum value_kind kind;
    size_t offset;
    uint64_t min, max;
};

/* One error: a sentence of "file:line: what is wrong". */
void config_complain(struct parser *parser, const char *format, ...) _printf_(2, 3);
/* An array with room for one more entry, zeroed; NULL when out of memory, which the parser notes. */
void *config_grow(struct parser *parser, void *array, size_t count, size_t size);
void *config_field(void *base, const struct key *key);

/* config_tenants.c: users, Unix groups and what they may have. */
#define CONFIG_LIMIT_KEYS (MOKD_RESOURCES + 5)
extern const struct key config_limit_keys[CONFIG_LIMIT_KEYS];
enum section config_begin_tenant(struct parser *parser, const char *name, enum section section);
void config_set_priority(struct parser *parser, const struct key *key, void *base, const char *text);
void config_keep_devices(struct parser *parser, const char *text);
void config_resolve_devices(struct parser *parser); /* at the file's end */
bool config_group_to_gid(const char *name, gid_t *ret);

/* config_rack.c: this node's place in a rack, and the rack's nodes. */
#define CONFIG_RACK_KEYS 8
#define CONFIG_NODE_KEYS 3
extern const struct key config_rack_keys[CONFIG_RACK_KEYS];
extern const struct key config_node_keys[CONFIG_NODE_KEYS];
enum section config_begin_node(struct parser *parser, const char *name);
void config_set_rack(struct parser *parser, const struct key *key, void *base, const char *text);
void config_check_rack(struct parser *parser); /* at the file's end */

#endif
