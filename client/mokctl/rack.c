/* SPDX-License-Identifier: Apache-2.0 */
/* The rack's nodes as mokd sees them: for people and as JSON. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "command.h"
#include "mokctl.h"
#include "table.h"

static void put_nanoseconds(struct table *table, int64_t ns, bool sign)
{
    double value = (double)ns;
    double size = value < 0 ? -value : value;

    if (size >= 1e9)
        table_put(table, sign ? "%+.3f s" : "%.3f s", value / 1e9);
    else if (size >= 1e6)
        table_put(table, sign ? "%+.3f ms" : "%.3f ms", value / 1e6);
    else
        table_put(table, sign ? "%+.1f us" : "%.1f us", value / 1e3);
}

static void put_node(struct table *table, const Mok__RackNode *node)
{
    bool measured = !node->self && node->rtt_ns >= 0;

    table_put(table, "%s", node->name);
    table_put(table, "%s%s", node->self ? "this" : node->state, node->draining ? ", draining" : "");
    if (measured)
        put_nanoseconds(table, node->rtt_ns, false);
    else
        table_put(table, "-");
    if (node->self)
        table_put(table, "-");
    else
        table_put(table, "%" PRIu64, node->epoch);
    if (measured)
        put_nanoseconds(table, node->clock_offset_ns, true);
    else
        table_put(table, "-");
    table_put(table, "%s", node->address);
    table_put(table, "%s", node->link_domain[0] ? node->link_domain : "-");
    bool up = strcmp(node->state, "up") == 0;
    table_put(table, "%s%s%s", node->error, up && !node->inventory_agrees ? " (its inventory is another)" : "",
              up && node->tenants_differ ? " (its limits of users are others)" : "");
}

static void print_refused(const Mok__RackReply *rack)
{
    printf("\n%" PRIu64 " handshakes with a key that is not in the inventory were refused since mokd started",
           rack->refused);
    if (rack->refused_lately > 0)
        printf(", %" PRIu64 " in the last 5 minutes; the last one %" PRIu64 " s ago from %s", rack->refused_lately,
               rack->refused_age_ms / 1000, rack->refused_from);
    printf("\n");
}

int mokctl_print_rack(const Mok__RackReply *rack)
{
    static const char *const heads[] = { "NODE",  "STATE",   "ROUND TRIP", "EPOCH",
                                         "CLOCK", "ADDRESS", "LINK",       "LAST ERROR" };
    _cleanup_table_ struct table table = { 0 };

    table_head(&table, ARRAY_SIZE(heads), heads);
    for (size_t i = 0; i < rack->n_node; i++)
        put_node(&table, rack->node[i]);
    int r = table_print(&table);
    if (r == 0 && rack->refused > 0)
        print_refused(rack);
    return r;
}

/* ------------------------------------------------------------------ JSON */

static void add_signed(cJSON *object, const char *name, int64_t value)
{
    char text[24];

    snprintf(text, sizeof(text), "%" PRId64, value);
    cJSON_AddRawToObject(object, name, text);
}

static void add_hex(cJSON *object, const char *name, const uint8_t *bytes, size_t size)
{
    char text[65] = "";

    for (size_t i = 0; i < size && i < 32; i++)
        snprintf(text + 2 * i, 3, "%02x", bytes[i]);
    cJSON_AddStringToObject(object, name, text);
}

static cJSON *node_json(const Mok__RackNode *node)
{
    cJSON *object = cJSON_CreateObject();

    cJSON_AddStringToObject(object, "name", node->name);
    cJSON_AddStringToObject(object, "address", node->address);
    cJSON_AddStringToObject(object, "link_domain", node->link_domain);
    cJSON_AddBoolToObject(object, "self", node->self);
    cJSON_AddStringToObject(object, "state", node->state);
    add_hex(object, "boot_id", node->boot_id.data, node->boot_id.len);
    mokctl_json_number(object, "epoch", node->epoch);
    add_signed(object, "rtt_ns", node->rtt_ns);
    add_signed(object, "clock_offset_ns", node->clock_offset_ns);
    mokctl_json_number(object, "silent_ms", node->silent_ms);
    cJSON_AddStringToObject(object, "error", node->error);
    mokctl_json_number(object, "protocol", node->protocol);
    cJSON_AddBoolToObject(object, "inventory_agrees", node->inventory_agrees);
    cJSON_AddBoolToObject(object, "tenants_differ", node->tenants_differ);
    cJSON_AddBoolToObject(object, "draining", node->draining);
    mokctl_json_number(object, "sent", node->sent);
    mokctl_json_number(object, "received", node->received);
    mokctl_json_number(object, "stale", node->stale);
    mokctl_json_number(object, "expired", node->expired);
    mokctl_json_number(object, "malformed", node->malformed);
    return object;
}

int mokctl_print_rack_json(const Mok__RackReply *rack)
{
    cJSON *root = cJSON_CreateObject();
    char inventory[17];

    cJSON *array = cJSON_AddArrayToObject(root, "nodes");
    for (size_t i = 0; i < rack->n_node; i++)
        cJSON_AddItemToArray(array, node_json(rack->node[i]));
    snprintf(inventory, sizeof(inventory), "%016" PRIx64, rack->inventory);
    cJSON_AddStringToObject(root, "inventory", inventory);
    mokctl_json_number(root, "refused", rack->refused);
    mokctl_json_number(root, "refused_lately", rack->refused_lately);
    mokctl_json_number(root, "refused_age_ms", rack->refused_age_ms);
    cJSON_AddStringToObject(root, "refused_from", rack->refused_from);
    mokctl_json_number(root, "unknown", rack->unknown);
    mokctl_json_number(root, "connections", rack->connections);
    mokctl_json_number(root, "max_connections", rack->max_connections);
    mokctl_json_number(root, "timeout_ms", rack->timeout_ms);
    mokctl_json_number(root, "omitted", rack->omitted);
    return mokctl_json_print(root);
}
