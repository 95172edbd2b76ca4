/* SPDX-License-Identifier: Apache-2.0 */
#include "config_internal.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <ini.h>

#include "endpoint.h"
#include "kernels/layer.h"
#include "memory_bound.h"
#include "names.h"

static const struct key daemon_keys[] = {
    { "socket", VALUE_PATH, offsetof(struct mokd_config, socket), 1, sizeof(((struct sockaddr_un *)0)->sun_path) - 1 },
    { "socket_mode", VALUE_MODE, offsetof(struct mokd_config, socket_mode), 0600, 0777 },
    { "admin_socket", VALUE_PATH, offsetof(struct mokd_config, admin_socket), 1,
      sizeof(((struct sockaddr_un *)0)->sun_path) - 1 },
    { "admin_socket_mode", VALUE_MODE, offsetof(struct mokd_config, admin_socket_mode), 0600, 0777 },
    { "start_timeout", VALUE_U32, offsetof(struct mokd_config, start_timeout), 1, 86400 },
    { "worker_timeout", VALUE_U32, offsetof(struct mokd_config, worker_timeout), 1, 3600 },
    { "device_failure", VALUE_FAILURE, offsetof(struct mokd_config, device_failure), 0, 0 },
    { "log_level", VALUE_LEVEL, offsetof(struct mokd_config, log_level), 0, 0 },
    { "worker", VALUE_PATH, offsetof(struct mokd_config, worker), 1, MOKD_PATH_MAX - 1 },
    { "poll_us", VALUE_U32, offsetof(struct mokd_config, poll_us), 0, 1000000 },
    { "resume_timeout", VALUE_U32, offsetof(struct mokd_config, resume_timeout), 0, 3600 },
    { "sharing", VALUE_SHARING, offsetof(struct mokd_config, sharing), 0, 0 },
    { "mps", VALUE_MPS, offsetof(struct mokd_config, mps), 0, 0 },
    { "mps_pipe", VALUE_PATH, offsetof(struct mokd_config, mps_pipe), 1, MOKD_PATH_MAX - 17 },
    { "admin_group", VALUE_ADMIN_GROUP, 0, 0, 0 },
    { "state_dir", VALUE_PATH, offsetof(struct mokd_config, state_dir), 1, MOKD_PATH_MAX - 1 },
    { "usage_days", VALUE_U32, offsetof(struct mokd_config, usage_days), 1, 36500 },
    { "usage_bytes", VALUE_SIZE, offsetof(struct mokd_config, usage_bytes), 1u << 20, UINT64_MAX },
};

static const struct key metrics_keys[] = {
    { "listen", VALUE_ENDPOINT, offsetof(struct mokd_config, metrics_listen), 1, MOKD_PATH_MAX - 1 },
    { "socket_mode", VALUE_MODE, offsetof(struct mokd_config, metrics_mode), 0600, 0777 },
};

static const struct key device_keys[] = {
    { "kind", VALUE_DEVICE_KIND, offsetof(struct mokd_device_config, kind), 0, 0 },
    { "threads", VALUE_U32, offsetof(struct mokd_device_config, threads), 1, 1024 },
    { "memory", VALUE_SIZE, offsetof(struct mokd_device_config, memory), 1u << 20, UINT64_MAX },
    { "cuda", VALUE_U32, offsetof(struct mokd_device_config, cuda), 0, MOK_MAX_DEVICES - 1 },
    { "mps_pipe", VALUE_PATH, offsetof(struct mokd_device_config, mps_pipe), 1, MOKD_PATH_MAX - 1 },
    { "reserve_sms", VALUE_U32, offsetof(struct mokd_device_config, reserve_sms), 0, 1024 },
    { "yield_us", VALUE_U32, offsetof(struct mokd_device_config, yield_us), 0, 1000000 },
    { "chaos_delay_us", VALUE_U32, offsetof(struct mokd_device_config, chaos_delay_us), 0, 10000000 },
};

/* ------------------------------------------------------------------ reporting */

void config_complain(struct parser *parser, const char *format, ...)
{
    char what[512], sentence[1024];
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(what, sizeof(what), format, arguments);
    va_end(arguments);
    if (parser->line > 0)
        snprintf(sentence, sizeof(sentence), "%s:%u: %s", parser->path, parser->line, what);
    else
        snprintf(sentence, sizeof(sentence), "%s: %s", parser->path, what);
    for (char *c = sentence; *c; c++) /* what is in the file tells nobody's terminal what to do */
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            *c = '?';
    parser->errors++;
    if (strcmp(parser->section_text, "rack") == 0 || strncmp(parser->section_text, "node ", 5) == 0)
        parser->rack_errors++;
    parser->report(parser->cookie, sentence);
}

/* ------------------------------------------------------------------ values */

int mokd_parse_size(const char *text, uint64_t *ret)
{
    static const char suffixes[] = "KMGT";
    char *end;

    if (!isdigit((unsigned char)*text))
        return -MOK_EARG;
    errno = 0;
    uint64_t value = strtoull(text, &end, 10);
    if (errno == ERANGE)
        return -MOK_ERANGE;
    if (*end) {
        const char *suffix = strchr(suffixes, toupper((unsigned char)*end));
        if (!suffix || (end[1] && strcmp(end + 1, "iB") != 0))
            return -MOK_EARG;
        if (!mok_mul_u64(value, (uint64_t)1 << (10 * (suffix - suffixes + 1)), &value))
            return -MOK_ERANGE;
    }
    *ret = value;
    return 0;
}

void *config_field(void *base, const struct key *key)
{
    return (char *)base + key->offset;
}

static void set_number(struct parser *parser, const struct key *key, void *base, const char *text)
{
    uint64_t value = 0;
    bool is_size = key->kind == VALUE_SIZE;
    int r = mokd_parse_size(text, &value);

    if (r == -MOK_EARG || (!is_size && !isdigit((unsigned char)text[strlen(text) - 1]))) {
        config_complain(parser, "[%s] %s = %s: not a number%s", parser->section_text, key->name, text,
                 is_size ? " (bytes, or with a suffix K, M, G or T, or KiB, MiB, GiB or TiB)" : "");
        return;
    }
    if (is_size && (r < 0 || value < key->min)) { /* the other bound is that of the type */
        config_complain(parser, "[%s] %s = %s: must be at least %" PRIu64 "M and less than 2^64 bytes",
                        parser->section_text, key->name, text, key->min >> 20);
        return;
    }
    if (r < 0 || value < key->min || value > key->max) {
        config_complain(parser, "[%s] %s = %s: must be in %" PRIu64 "..%" PRIu64, parser->section_text, key->name, text,
                 key->min, key->max);
        return;
    }
    if (key->kind == VALUE_ENTRIES && (value & (value - 1)) != 0) {
        config_complain(parser, "[%s] %s = %s: must be a power of two in %" PRIu64 "..%" PRIu64, parser->section_text,
                 key->name, text, key->min, key->max);
        return;
    }
    if (is_size || key->kind == VALUE_COUNT)
        *(uint64_t *)config_field(base, key) = value;
    else
        *(uint32_t *)config_field(base, key) = (uint32_t)value;
}

static void set_mode(struct parser *parser, const struct key *key, void *base, const char *text)
{
    char *end;
    unsigned long mode = strtoul(text, &end, 8);

    if (!isdigit((unsigned char)*text) || *end || mode < key->min || mode > key->max) {
        config_complain(parser, "[%s] %s = %s: must be an octal mode in 0%o..0%o", parser->section_text, key->name,
                        text, (unsigned)key->min, (unsigned)key->max);
        return;
    }
    *(uint32_t *)config_field(base, key) = (uint32_t)mode;
}

static void set_path(struct parser *parser, const struct key *key, void *base, const char *text)
{
    size_t length = strlen(text);

    if (text[0] != '/') {
        config_complain(parser, "[%s] %s = %s: must be an absolute path", parser->section_text, key->name, text);
        return;
    }
    if (length > key->max) {
        config_complain(parser, "[%s] %s = %s: %zu bytes long, at most %" PRIu64, parser->section_text, key->name, text,
                 length, key->max);
        return;
    }
    memcpy(config_field(base, key), text, length + 1);
}

/* Asks the planner, not the engines: mokd links none, so that it touches no device and starts no thread of theirs. */
static bool has_engine(uint32_t kind)
{
    struct mok_layer_spec spec = {
        .hidden = 16, .intermediate = 16, .experts = 1, .topk = 1, .ep = 1, .max_tokens = 1, .precision = MOK_BF16
    };
    struct mok_device_limits device = { .kind = kind, .units = 1, .memory_bytes = 1u << 30 };
    struct mok_message message;
    struct mok_plan plan;

    return mok_plan_make(&spec, &device, &plan, NULL, 0, &message) != -MOK_ENODEV;
}

static void set_device_kind(struct parser *parser, const struct key *key, void *base, const char *text)
{
    uint32_t kind = mok_word_find(&mok_device_kinds, text);

    if (!kind) {
        config_complain(parser, "[%s] kind = %s: must be host or cuda", parser->section_text, text);
        return;
    }
    if (!has_engine(kind))
        config_complain(parser, "[%s] kind = %s: this build of mokd has no %s engine", parser->section_text, text,
                        text);
    *(uint32_t *)config_field(base, key) = kind;
}

static const char *const sharing_words[] = { [MOKD_SHARING_SLICES] = "slices", [MOKD_SHARING_MPS] = "mps", NULL };
static const char *const mps_words[] = { [MOKD_MPS_SITE] = "site", [MOKD_MPS_OWN] = "own", NULL };
static const char *const tenants_words[] = { [MOKD_TENANTS_RACK] = "rack", [MOKD_TENANTS_NODE] = "node", NULL };
static const char *const failure_words[] = { [MOKD_FAILURE_SERVE] = "serve", [MOKD_FAILURE_EXIT] = "exit", NULL };

/* One of some words, by its place among them. */
static void set_choice(struct parser *parser, const struct key *key, void *base, const char *text,
                       const char *const *words)
{
    char list[128] = "";
    size_t used = 0;

    for (uint32_t i = 0; words[i]; i++) {
        if (strcmp(text, words[i]) == 0) {
            *(uint32_t *)config_field(base, key) = i;
            return;
        }
        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i == 0 ? "" : " or ", words[i]);
    }
    config_complain(parser, "[%s] %s = %s: must be %s", parser->section_text, key->name, text, list);
}

static void set_endpoint(struct parser *parser, const struct key *key, void *base, const char *text)
{
    struct mokd_endpoint endpoint;
    struct mokd_error error = { 0 };

    if (strlen(text) <= key->max && mokd_endpoint_parse(text, &endpoint, &error) == 0)
        memcpy(config_field(base, key), text, strlen(text) + 1);
    else
        config_complain(parser, "[%s] %s = %s: %s", parser->section_text, key->name, text,
                 error.code ? error.text : "is too long");
}

static void set_value(struct parser *parser, const struct key *key, void *base, const char *text)
{
    if (!*text) {
        config_complain(parser, "[%s] %s: has no value", parser->section_text, key->name);
        return;
    }
    switch (key->kind) {
    case VALUE_U32:
    case VALUE_ENTRIES:
    case VALUE_SIZE:
    case VALUE_COUNT:
        set_number(parser, key, base, text);
        return;
    case VALUE_MODE:
        set_mode(parser, key, base, text);
        return;
    case VALUE_PATH:
        set_path(parser, key, base, text);
        return;
    case VALUE_DEVICE_KIND:
        set_device_kind(parser, key, base, text);
        return;
    case VALUE_ENDPOINT:
        set_endpoint(parser, key, base, text);
        return;
    case VALUE_SHARING:
        set_choice(parser, key, base, text, sharing_words);
        return;
    case VALUE_MPS:
        set_choice(parser, key, base, text, mps_words);
        return;
    case VALUE_TENANTS:
        set_choice(parser, key, base, text, tenants_words);
        return;
    case VALUE_FAILURE:
        set_choice(parser, key, base, text, failure_words);
        return;
    case VALUE_PRIORITY:
        config_set_priority(parser, key, base, text);
        return;
    case VALUE_BOOL:
        if (strcmp(text, "yes") != 0 && strcmp(text, "no") != 0)
            config_complain(parser, "[%s] %s = %s: must be yes or no", parser->section_text, key->name, text);
        *(uint32_t *)config_field(base, key) = strcmp(text, "yes") == 0;
        return;
    case VALUE_DEVICES:
        config_keep_devices(parser, text);
        return;
    case VALUE_ADMIN_GROUP:
        parser->config->has_admin_group = config_group_to_gid(text, &parser->config->admin_gid);
        if (!parser->config->has_admin_group)
            config_complain(parser, "[%s] %s = %s: this machine knows no such group", parser->section_text, key->name,
                            text);
        return;
    case VALUE_RACK_NAME:
    case VALUE_RACK_ADDRESS:
    case VALUE_RACK_KEY:
        config_set_rack(parser, key, base, text);
        return;
    case VALUE_LEVEL:
        if (mok_log_level_parse(text, (enum mok_log_level *)config_field(base, key)) < 0)
            config_complain(parser, "[%s] %s = %s: must be error, warning, notice, info or debug", parser->section_text,
                     key->name, text);
        return;
    }
}

/* ------------------------------------------------------------------ sections */

void *config_grow(struct parser *parser, void *array, size_t count, size_t size)
{
    void *larger = reallocarray(array, count + 1, size);
    if (!larger) {
        parser->out_of_memory = true;
        return NULL;
    }
    memset((char *)larger + count * size, 0, size);
    return larger;
}

static enum section begin_device(struct parser *parser, const char *name)
{
    struct mokd_config *config = parser->config;

    if (!mok_name_is_valid(name)) {
        config_complain(parser, "[%s]: a device's name has 1..%d of the characters A-Z a-z 0-9 . _ -",
                        parser->section_text, MOK_MAX_NAME);
        return SECTION_BAD;
    }
    for (size_t i = 0; i < config->n_devices; i++) {
        if (strcmp(config->devices[i].name, name) == 0) {
            config_complain(parser, "[%s]: the device is there twice", parser->section_text);
            return SECTION_BAD;
        }
    }
    if (config->n_devices == MOK_MAX_DEVICES) {
        config_complain(parser, "[%s]: at most %u devices", parser->section_text, MOK_MAX_DEVICES);
        return SECTION_BAD;
    }
    struct mokd_device_config *devices = config_grow(parser, config->devices, config->n_devices, sizeof(*devices));
    if (!devices)
        return SECTION_BAD;
    config->devices = devices;
    struct mokd_device_config *device = &devices[config->n_devices++];
    device->kind = MOK_DEVICE_HOST;
    memcpy(device->name, name, strlen(name) + 1);
    return SECTION_DEVICE;
}

static enum section begin_once(struct parser *parser, bool *seen, enum section section)
{
    if (*seen) {
        config_complain(parser, "[%s]: the section is there twice", parser->section_text);
        return SECTION_BAD;
    }
    *seen = true;
    return section;
}

static enum section begin_section(struct parser *parser)
{
    char *text = parser->section_text;

    parser->seen = 0;
    if (strcmp(text, "daemon") == 0)
        return begin_once(parser, &parser->seen_daemon, SECTION_DAEMON);
    if (strcmp(text, "limits") == 0)
        return begin_once(parser, &parser->seen_limits, SECTION_LIMITS);
    if (strcmp(text, "metrics") == 0) {
        snprintf(parser->config->metrics_listen, sizeof(parser->config->metrics_listen), MOKD_DEFAULT_METRICS);
        return begin_once(parser, &parser->seen_metrics, SECTION_METRICS);
    }
    if (strcmp(text, "rack") == 0)
        return begin_once(parser, &parser->seen_rack, SECTION_RACK);
    if (strncmp(text, "node ", 5) == 0)
        return config_begin_node(parser, text + 5 + strspn(text + 5, " \t"));
    if (strncmp(text, "device ", 7) == 0)
        return begin_device(parser, text + 7 + strspn(text + 7, " \t"));
    if (strncmp(text, "user ", 5) == 0)
        return config_begin_tenant(parser, text + 5 + strspn(text + 5, " \t"), SECTION_USER);
    if (strncmp(text, "group ", 6) == 0)
        return config_begin_tenant(parser, text + 6 + strspn(text + 6, " \t"), SECTION_GROUP);
    config_complain(parser,
                    "[%s]: unknown section; known are [daemon], [limits], [metrics], [user NAME], [group NAME], "
                    "[device NAME], [rack] and [node NAME]",
                    text);
    return SECTION_BAD;
}

/* ------------------------------------------------------------------ lines */

/* Of a section whose name is wrong, or that is there twice: what it says is looked at all the same, and nobody's. */
static const struct key *spare_keys(struct parser *parser, size_t *ret_count, void **ret_base)
{
    const char *text = parser->section_text;

    if (strncmp(text, "device ", 7) == 0) {
        *ret_count = ARRAY_SIZE(device_keys);
        *ret_base = &parser->spare.device;
        return device_keys;
    }
    if (strncmp(text, "user ", 5) == 0 || strncmp(text, "group ", 6) == 0) {
        *ret_count = CONFIG_LIMIT_KEYS;
        *ret_base = &parser->spare.limits;
        return config_limit_keys;
    }
    if (strncmp(text, "node ", 5) == 0) {
        *ret_count = CONFIG_NODE_KEYS;
        *ret_base = &parser->spare.node;
        return config_node_keys;
    }
    return NULL;
}

static const struct key *section_keys(struct parser *parser, size_t *ret_count, void **ret_base)
{
    struct mokd_config *config = parser->config;

    switch (parser->section) {
    case SECTION_DAEMON:
        *ret_count = ARRAY_SIZE(daemon_keys);
        *ret_base = config;
        return daemon_keys;
    case SECTION_LIMITS:
        *ret_count = CONFIG_LIMIT_KEYS;
        *ret_base = &config->limits;
        return config_limit_keys;
    case SECTION_USER:
        *ret_count = CONFIG_LIMIT_KEYS;
        *ret_base = &config->users[config->n_users - 1].limits;
        return config_limit_keys;
    case SECTION_GROUP:
        *ret_count = CONFIG_LIMIT_KEYS;
        *ret_base = &config->groups[config->n_groups - 1].limits;
        return config_limit_keys;
    case SECTION_DEVICE:
        *ret_count = ARRAY_SIZE(device_keys);
        *ret_base = &config->devices[config->n_devices - 1];
        return device_keys;
    case SECTION_METRICS:
        *ret_count = ARRAY_SIZE(metrics_keys);
        *ret_base = config;
        return metrics_keys;
    case SECTION_RACK:
        *ret_count = CONFIG_RACK_KEYS;
        *ret_base = config;
        return config_rack_keys;
    case SECTION_NODE:
        *ret_count = CONFIG_NODE_KEYS;
        *ret_base = &config->nodes[config->rack.n_nodes - 1];
        return config_node_keys;
    case SECTION_BAD:
        return spare_keys(parser, ret_count, ret_base);
    case SECTION_NONE:
        break;
    }
    return NULL;
}

static void note_key(struct parser *parser, uint32_t bit)
{
    struct mokd_config *config = parser->config;

    parser->seen |= bit;
    if (parser->section == SECTION_USER)
        config->users[config->n_users - 1].given |= bit;
    if (parser->section == SECTION_GROUP)
        config->groups[config->n_groups - 1].given |= bit;
    if (parser->section == SECTION_RACK)
        parser->rack_keys |= bit;
    if (parser->section == SECTION_NODE)
        parser->node_keys[config->rack.n_nodes - 1] |= bit;
}

/* inih's handler: one key = value. The section is the parser's own, since inih cuts long ones. */
static int take_key(void *cookie, const char *section, const char *name, const char *value)
{
    struct parser *parser = cookie;
    size_t count = 0;
    void *base = NULL;

    (void)section;
    parser->expect_key = false;
    if (parser->section == SECTION_NONE)
        config_complain(parser, "%s = %s: stands before the first section", name, value);
    const struct key *keys = section_keys(parser, &count, &base);
    if (!keys)
        return 1;
    for (size_t i = 0; i < count; i++) {
        if (strcmp(keys[i].name, name) != 0)
            continue;
        if (parser->seen & (1u << i)) {
            config_complain(parser, "[%s] %s = %s: the key is there twice", parser->section_text, name, value);
            return 1;
        }
        note_key(parser, 1u << i);
        set_value(parser, &keys[i], base, value);
        return 1;
    }
    config_complain(parser, "[%s] %s = %s: unknown key", parser->section_text, name, value);
    return 1;
}

/* A line without '=' reaches no handler: it is noticed when the next one is asked for. */
static void check_last_line(struct parser *parser)
{
    if (parser->expect_key)
        config_complain(parser, "neither a [section] nor a key = value");
    parser->expect_key = false;
}

static void take_section_line(struct parser *parser, const char *line)
{
    const char *end = strchr(line, ']');

    if (!end) {
        config_complain(parser, "a section's name ends with ]");
        parser->section = SECTION_BAD;
        return;
    }
    snprintf(parser->section_text, sizeof(parser->section_text), "%.*s", (int)(end - line - 1), line + 1);
    parser->section = begin_section(parser);
}

/* inih's reader: counts lines, and strips indentation, which inih would take for a continued value. */
static char *read_line(char *buffer, int size, void *cookie)
{
    struct parser *parser = cookie;

    check_last_line(parser);
    if (!fgets(buffer, size, parser->file))
        return NULL;
    parser->line++;
    if (!strchr(buffer, '\n') && strlen(buffer) > CONFIG_MAX_LINE) {
        config_complain(parser, "the line is longer than %d bytes", CONFIG_MAX_LINE);
        for (int c = fgetc(parser->file); c != EOF && c != '\n'; c = fgetc(parser->file))
            ;
        buffer[0] = '\0';
    }
    size_t indent = strspn(buffer, " \t");
    memmove(buffer, buffer + indent, strlen(buffer + indent) + 1);
    if (buffer[0] == '[')
        take_section_line(parser, buffer);
    else
        parser->expect_key = buffer[0] && !strchr("#;\r\n", buffer[0]);
    return buffer;
}

/* ------------------------------------------------------------------ the whole */

/* Devices that name no memory share half of what there is. */
static void fill_device_memory(struct mokd_config *config)
{
    uint64_t sharers = 0;

    for (size_t i = 0; i < config->n_devices; i++)
        sharers += config->devices[i].memory == 0;
    if (sharers == 0)
        return;
    uint64_t half = mokd_memory_bound(NULL) / 2;
    for (size_t i = 0; i < config->n_devices; i++)
        if (config->devices[i].memory == 0)
            config->devices[i].memory = half / sharers;
}

static bool has_gpu_without_pipe(const struct mokd_config *config)
{
    for (size_t i = 0; i < config->n_devices; i++)
        if (config->devices[i].kind == MOK_DEVICE_CUDA && !config->devices[i].mps_pipe[0])
            return true;
    return false;
}

/* Each GPU's directory, as the device says it or as the whole does. */
static void check_mps(struct parser *parser)
{
    struct mokd_config *config = parser->config;
    bool mps = config->sharing == MOKD_SHARING_MPS, own = config->mps == MOKD_MPS_OWN;
    size_t named = 0;

    if (!mps && config->mps_pipe[0])
        config_complain(parser, "[daemon] mps_pipe = %s: has no meaning without sharing = mps", config->mps_pipe);
    if (!mps && own)
        config_complain(parser, "[daemon] mps = own: has no meaning without sharing = mps");
    if (mps && own && !config->mps_pipe[0])
        snprintf(config->mps_pipe, sizeof(config->mps_pipe), MOKD_DEFAULT_MPS_DIR);
    for (size_t i = 0; i < config->n_devices; i++) {
        struct mokd_device_config *device = &config->devices[i];
        bool gpu = device->kind == MOK_DEVICE_CUDA;
        named += gpu && device->mps_pipe[0];
        if (device->mps_pipe[0] && (!gpu || !mps || own))
            config_complain(parser, "[device %s] mps_pipe = %s: only a GPU with sharing = mps and mps = site has one",
                            device->name, device->mps_pipe);
        else if (gpu && own)
            snprintf(device->mps_pipe, sizeof(device->mps_pipe), "%.*s/gpu%u", MOKD_PATH_MAX - 17, config->mps_pipe,
                     device->cuda);
        else if (gpu && !device->mps_pipe[0])
            memcpy(device->mps_pipe, config->mps_pipe, sizeof(device->mps_pipe));
    }
    if (mps && !config->mps_pipe[0] && (named == 0 || has_gpu_without_pipe(config)))
        config_complain(parser,
                        "[daemon] sharing = mps: mps_pipe is missing, the directory of the MPS control daemon's pipes");
}

static void check_whole(struct parser *parser)
{
    struct mokd_config *config = parser->config;

    parser->line = 0;
    parser->section_text[0] = '\0';
    check_mps(parser);
    if (config->n_devices == 0)
        config_complain(parser, "no [device NAME] section: mokd needs at least one device");
    for (size_t i = 0; i < config->n_devices; i++) {
        struct mokd_device_config *device = &config->devices[i];
        if (device->kind == MOK_DEVICE_CUDA && device->memory == 0)
            config_complain(parser, "[device %s] memory: missing; say how much of the GPU's memory mokd may hand out",
                     device->name);
        if (device->kind == MOK_DEVICE_HOST && (device->reserve_sms || device->yield_us))
            config_complain(parser, "[device %s] %s: only a device of kind cuda has it", device->name,
                            device->reserve_sms ? "reserve_sms" : "yield_us");
        if (device->kind == MOK_DEVICE_HOST && device->threads == 0)
            device->threads = 1;
    }
}

#define MAX_CONFIG_BYTES (1 << 20)

static void set_defaults(struct mokd_config *config)
{
    *config = (struct mokd_config){
        .socket_mode = 0666,
        .admin_socket_mode = 0600,
        .start_timeout = 300,
        .worker_timeout = 10,
        .log_level = MOK_LOG_INFO,
        .poll_us = 0,
        .usage_days = 400,
        .usage_bytes = 256u << 20,
        .resume_timeout = 10,
        .metrics_mode = 0660,
        .rack = { .heartbeat_ms = 250, .timeout_ms = 2000 },
        .limits = { .of = { [MOKD_BYTES] = MOKD_NO_LIMIT,
                            [MOKD_SESSIONS] = 256, /* a job of a whole rack, and some more */
                            [MOKD_GROUPS] = 1024,
                            [MOKD_LAYERS] = 16384,
                            [MOKD_BUFFERS] = 65536,
                            [MOKD_DESCRIPTORS] = MOKD_NO_LIMIT },
                    .queue_entries = 1024,
                    .weight = 1,
                    .devices = UINT64_MAX },
    };
}

/* Whoever is told of it may stand elsewhere. Links stay as they are: they may be set anew before the next reload. */
static char *absolute(const char *path)
{
    char directory[PATH_MAX], *ret = NULL;

    if (path[0] == '/' || !getcwd(directory, sizeof(directory)))
        return strdup(path);
    return asprintf(&ret, "%s/%s", directory, path) < 0 ? NULL : ret;
}

/* Without waiting for anybody: opening a pipe would, for who writes to it. */
static FILE *open_file(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");

    if (!file && fd >= 0) {
        int error = errno;
        mok_close(fd);
        errno = error;
    }
    return file;
}

int mokd_config_load(const char *path, mokd_config_report report, void *cookie, struct mokd_config *ret)
{
    struct mokd_config config;
    struct parser parser = { .path = path, .report = report, .cookie = cookie, .config = &config };

    struct stat about;

    set_defaults(&config);
    parser.file = open_file(path);
    if (!parser.file) {
        int error = errno;
        config_complain(&parser, "cannot be read: %s", strerror(error));
        return error == ENOENT ? -MOK_ENOENT : error == EACCES ? -MOK_EACCESS : -MOK_EIO;
    }
    if (fstat(fileno(parser.file), &about) < 0 || !S_ISREG(about.st_mode) || about.st_size > MAX_CONFIG_BYTES) {
        config_complain(&parser, "is no regular file of at most %d bytes", MAX_CONFIG_BYTES);
        fclose(parser.file);
        mokd_config_release(&config);
        return -MOK_EARG;
    }
    ini_parse_stream(read_line, &parser, take_key, &parser);
    check_last_line(&parser);
    if (ferror(parser.file))
        config_complain(&parser, "cannot be read to its end");
    fclose(parser.file);
    check_whole(&parser);
    config_resolve_devices(&parser);
    config_check_rack(&parser);
    config.path = absolute(path);
    if (parser.out_of_memory || !config.path)
        config_complain(&parser, "out of memory");
    if (parser.errors > 0) {
        mokd_config_release(&config);
        return -MOK_EARG;
    }
    fill_device_memory(&config);
    *ret = config;
    return 0;
}

void mokd_config_release(struct mokd_config *config)
{
    for (size_t i = 0; i < config->n_users; i++)
        free(config->users[i].devices);
    for (size_t i = 0; i < config->n_groups; i++)
        free(config->groups[i].devices);
    free(config->limits_devices);
    free(config->users);
    free(config->groups);
    free(config->devices);
    free(config->path);
    free(config->nodes);
    config->users = config->groups = NULL;
    config->devices = NULL;
    config->nodes = NULL;
    config->rack.nodes = NULL;
    config->rack.n_nodes = 0;
    config->limits_devices = config->path = NULL;
    config->n_users = config->n_groups = config->n_devices = 0;
}
