/* SPDX-License-Identifier: Apache-2.0 */
/* The sections about users and Unix groups, and what holds for a user in the end. Never looks at what is in use. */
#include "config_internal.h"

#include <ctype.h>
#include <grp.h>
#include <pwd.h>
#include <stddef.h>
#include <string.h>

#include "mok/ring_abi.h"

/* The resources first, in their order. */
const struct key config_limit_keys[CONFIG_LIMIT_KEYS] = {
    [MOKD_BYTES] = { "bytes", VALUE_SIZE, offsetof(struct mokd_limits, of[MOKD_BYTES]), 0, UINT64_MAX },
    [MOKD_SESSIONS] = { "sessions", VALUE_COUNT, offsetof(struct mokd_limits, of[MOKD_SESSIONS]), 1, 100000 },
    [MOKD_GROUPS] = { "groups", VALUE_COUNT, offsetof(struct mokd_limits, of[MOKD_GROUPS]), 0, 1000000 },
    [MOKD_LAYERS] = { "layers", VALUE_COUNT, offsetof(struct mokd_limits, of[MOKD_LAYERS]), 0, 1000000 },
    [MOKD_BUFFERS] = { "buffers", VALUE_COUNT, offsetof(struct mokd_limits, of[MOKD_BUFFERS]), 0, 1000000 },
    [MOKD_DESCRIPTORS] = { "descriptors", VALUE_COUNT, offsetof(struct mokd_limits, of[MOKD_DESCRIPTORS]), 0,
                           10000000 },
    { "queue_entries", VALUE_ENTRIES, offsetof(struct mokd_limits, queue_entries), MOK_RING_MIN_ENTRIES,
      MOK_RING_MAX_ENTRIES },
    { "weight", VALUE_U32, offsetof(struct mokd_limits, weight), 1, MOK_MAX_WEIGHT },
    { "priority", VALUE_PRIORITY, offsetof(struct mokd_limits, priority), 0, 0 },
    { "exclusive", VALUE_BOOL, offsetof(struct mokd_limits, exclusive), 0, 0 },
    { "devices", VALUE_DEVICES, offsetof(struct mokd_limits, devices), 0, 0 },
};

/* ------------------------------------------------------------------ values */

static const char *const priorities[] = {
    [MOK_PRIORITY_NORMAL] = "normal",
    [MOK_PRIORITY_HIGH] = "high",
    [MOK_PRIORITY_LOW] = "low",
};

const char *mokd_priority_text(uint32_t priority)
{
    return priority < ARRAY_SIZE(priorities) ? priorities[priority] : "?";
}

void config_set_priority(struct parser *parser, const struct key *key, void *base, const char *text)
{
    for (uint32_t i = 0; i < ARRAY_SIZE(priorities); i++) {
        if (strcmp(text, priorities[i]) == 0) {
            *(uint32_t *)config_field(base, key) = i;
            return;
        }
    }
    config_complain(parser, "[%s] %s = %s: must be low, normal or high", parser->section_text, key->name, text);
}

/* Devices may stand further down in the file: names are resolved at its end. */
void config_keep_devices(struct parser *parser, const char *text)
{
    struct mokd_config *config = parser->config;
    char **place = &config->limits_devices;

    if (parser->section == SECTION_BAD)
        return;
    if (parser->section == SECTION_USER)
        place = &config->users[config->n_users - 1].devices;
    else if (parser->section == SECTION_GROUP)
        place = &config->groups[config->n_groups - 1].devices;
    *place = strdup(text);
    if (!*place)
        parser->out_of_memory = true;
}

bool config_group_to_gid(const char *name, gid_t *ret)
{
    char *end;
    unsigned long number = strtoul(name, &end, 10);

    if (isdigit((unsigned char)*name) && !*end && number < UINT32_MAX) {
        *ret = (gid_t)number;
        return true;
    }
    const struct group *entry = getgrnam(name);
    if (!entry)
        return false;
    *ret = entry->gr_gid;
    return true;
}

/* ------------------------------------------------------------------ sections */

static bool user_to_uid(const char *name, uid_t *ret)
{
    char *end;
    unsigned long number = strtoul(name, &end, 10);

    if (isdigit((unsigned char)*name) && !*end && number < UINT32_MAX) {
        *ret = (uid_t)number;
        return true;
    }
    const struct passwd *entry = getpwnam(name);
    if (!entry)
        return false;
    *ret = entry->pw_uid;
    return true;
}

enum section config_begin_tenant(struct parser *parser, const char *name, enum section section)
{
    struct mokd_config *config = parser->config;
    bool is_user = section == SECTION_USER;
    struct mokd_tenant_config **list = is_user ? &config->users : &config->groups;
    size_t *count = is_user ? &config->n_users : &config->n_groups;
    const char *what = is_user ? "user" : "group";
    uint32_t id = 0;

    if (!*name || strlen(name) > MOK_MAX_NAME || !(is_user ? user_to_uid(name, &id) : config_group_to_gid(name, &id))) {
        config_complain(parser, "[%s]: this machine knows no such %s", parser->section_text, what);
        return SECTION_BAD;
    }
    for (size_t i = 0; i < *count; i++) {
        if ((*list)[i].id == id) {
            config_complain(parser, "[%s]: the %s is there twice", parser->section_text, what);
            return SECTION_BAD;
        }
    }
    struct mokd_tenant_config *larger = config_grow(parser, *list, *count, sizeof(*larger));
    if (!larger)
        return SECTION_BAD;
    *list = larger;
    struct mokd_tenant_config *tenant = &larger[(*count)++];
    tenant->id = id;
    memcpy(tenant->name, name, strlen(name) + 1);
    return section;
}

/* The bits of a list of names, or of all; 0 after a complaint. */
static uint64_t device_bits(struct parser *parser, const char *section, const char *name, char *list)
{
    const struct mokd_config *config = parser->config;
    uint64_t bits = 0;
    char *rest = NULL;

    if (strcmp(list, "all") == 0)
        return UINT64_MAX;
    for (char *one = strtok_r(list, ", \t", &rest); one; one = strtok_r(NULL, ", \t", &rest)) {
        size_t i = 0;
        while (i < config->n_devices && strcmp(config->devices[i].name, one) != 0)
            i++;
        if (i == config->n_devices)
            config_complain(parser, "[%s%s] devices: there is no [device %s]; must be names of devices, or all",
                            section, name, one);
        else
            bits |= 1ull << i;
    }
    return bits;
}

void config_resolve_devices(struct parser *parser)
{
    struct mokd_config *config = parser->config;

    if (config->limits_devices)
        config->limits.devices = device_bits(parser, "limits", "", config->limits_devices);
    for (size_t i = 0; i < config->n_users; i++)
        if (config->users[i].devices)
            config->users[i].limits.devices =
                device_bits(parser, "user ", config->users[i].name, config->users[i].devices);
    for (size_t i = 0; i < config->n_groups; i++)
        if (config->groups[i].devices)
            config->groups[i].limits.devices =
                device_bits(parser, "group ", config->groups[i].name, config->groups[i].devices);
}

/* ------------------------------------------------------------------ what holds for whom */

static const struct mokd_tenant_config *find_tenant(const struct mokd_tenant_config *list, size_t count, uint32_t id)
{
    for (size_t i = 0; i < count; i++)
        if (list[i].id == id)
            return &list[i];
    return NULL;
}

const struct mokd_tenant_config *mokd_config_user(const struct mokd_config *config, uid_t uid)
{
    return find_tenant(config->users, config->n_users, uid);
}

const struct mokd_tenant_config *mokd_config_group(const struct mokd_config *config, gid_t gid)
{
    return find_tenant(config->groups, config->n_groups, gid);
}

bool mokd_config_gives(const struct mokd_tenant_config *tenant, enum mokd_resource resource)
{
    return tenant && tenant->given >> resource & 1;
}

const char *mokd_resource_text(enum mokd_resource resource)
{
    return config_limit_keys[resource].name;
}

/* Takes over what a section has of the keys from `from` on. */
static void overlay(const struct mokd_tenant_config *tenant, size_t from, struct mokd_limits *ret)
{
    for (size_t k = from; k < CONFIG_LIMIT_KEYS; k++) {
        size_t offset = config_limit_keys[k].offset;
        bool wide = k < MOKD_RESOURCES || config_limit_keys[k].kind == VALUE_DEVICES;
        if (tenant->given >> k & 1)
            memcpy((char *)ret + offset, (const char *)&tenant->limits + offset,
                   wide ? sizeof(uint64_t) : sizeof(uint32_t));
    }
}

void mokd_config_limits(const struct mokd_config *config, uid_t uid, const gid_t *gids, size_t n_gids,
                        struct mokd_limits *ret)
{
    const struct mokd_tenant_config *user = mokd_config_user(config, uid);

    *ret = config->limits;
    for (size_t i = config->n_groups; i-- > 0;)
        for (size_t g = 0; g < n_gids; g++)
            if (gids[g] == config->groups[i].id)
                overlay(&config->groups[i], MOKD_RESOURCES, ret);
    if (user)
        overlay(user, 0, ret);
}

/* ------------------------------------------------------------------ the same on all nodes */

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ ((const uint8_t *)bytes)[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static uint64_t hash_limits(uint64_t hash, const struct mokd_limits *limits)
{
    const uint32_t rest[] = { limits->queue_entries, limits->weight, limits->priority, limits->exclusive };

    return hash_bytes(hash_bytes(hash, limits->of, sizeof(limits->of)), rest, sizeof(rest));
}

/* In the order of the file, which for groups matters. */
static uint64_t hash_tenants(uint64_t hash, const struct mokd_tenant_config *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        hash = hash_bytes(hash, list[i].name, strlen(list[i].name) + 1);
        hash = hash_bytes(hash, &list[i].given, sizeof(list[i].given));
        hash = hash_limits(hash, &list[i].limits);
    }
    return hash_bytes(hash, &count, sizeof(count));
}

uint64_t mokd_config_tenants_hash(const struct mokd_config *config)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    if (config->tenants == MOKD_TENANTS_NODE)
        return 0;
    hash = hash_limits(hash, &config->limits);
    hash = hash_tenants(hash, config->users, config->n_users);
    hash = hash_tenants(hash, config->groups, config->n_groups);
    return hash ? hash : 1;
}
