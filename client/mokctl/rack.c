/* SPDX-License-Identifier: Apache-2.0 */
/* The rack's nodes as mokd sees them: for people and as JSON. */
#include <cjson/cJSON.h>
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mokctl.h"

#define COLUMNS 8
#define CELL 288

static void nanoseconds(int64_t ns, bool sign, char *ret)
{
    double value = (double)ns;
    double size = value < 0 ? -value : value;

    if (size >= 1e9)
        snprintf(ret, CELL, sign ? "%+.3f s" : "%.3f s", value / 1e9);
    else if (size >= 1e6)
        snprintf(ret, CELL, sign ? "%+.3f ms" : "%.3f ms", value / 1e6);
    else
        snprintf(ret, CELL, sign ? "%+.1f us" : "%.1f us", value / 1e3);
}

static void fill_row(const Mok__RackNode *node, char row[COLUMNS][CELL])
{
    snprintf(row[0], CELL, "%s", node->name);
    snprintf(row[1], CELL, "%s", node->self ? "this" : node->state);
    snprintf(row[2], CELL, "-");
    snprintf(row[3], CELL, "-");
    snprintf(row[4], CELL, "-");
    if (!node->self)
        snprintf(row[3], CELL, "%" PRIu64, node->epoch);
    if (!node->self && node->rtt_ns >= 0) {
        nanoseconds(node->rtt_ns, false, row[2]);
        nanoseconds(node->clock_offset_ns, true, row[4]);
    }
    snprintf(row[5], CELL, "%s", node->address);
    snprintf(row[6], CELL, "%s", node->link_domain[0] ? node->link_domain : "-");
    snprintf(row[7], CELL, "%s%s", node->error,
             !node->inventory_agrees && strcmp(node->state, "up") == 0 ? " (its inventory is another)" : "");
    /* A terminal must not be told what to do by a peer's words. */
    for (char *c = row[7]; *c; c++)
        if (iscntrl((unsigned char)*c))
            *c = '?';
}

int mokctl_print_rack(const Mok__RackReply *rack)
{
    static const char *const heads[COLUMNS] = { "NODE",  "STATE",   "ROUND TRIP", "EPOCH",
                                                "CLOCK", "ADDRESS", "LINK",       "LAST ERROR" };
    int width[COLUMNS] = { 0 };
    size_t rows = rack->n_node + 1;
    char(*table)[COLUMNS][CELL] = calloc(rows, sizeof(*table));

    if (!table)
        return -1;
    for (size_t c = 0; c < COLUMNS; c++)
        snprintf(table[0][c], CELL, "%s", heads[c]);
    for (size_t i = 1; i < rows; i++)
        fill_row(rack->node[i - 1], table[i]);
    for (size_t i = 0; i < rows; i++)
        for (size_t c = 0; c < COLUMNS; c++)
            if (width[c] < (int)strlen(table[i][c]))
                width[c] = (int)strlen(table[i][c]);
    for (size_t i = 0; i < rows; i++) {
        for (size_t c = 0; c + 1 < COLUMNS; c++)
            printf("%-*s  ", width[c], table[i][c]);
        printf("%s\n", table[i][COLUMNS - 1]);
    }
    free(table);
    if (rack->refused > 0)
        printf("\n%" PRIu64 " handshakes with a key that is not in the inventory were refused\n", rack->refused);
    return 0;
}

/* ------------------------------------------------------------------ JSON */

/* cJSON's own numbers are doubles. */
static void add_number(cJSON *object, const char *name, uint64_t value)
{
    char text[24];

    snprintf(text, sizeof(text), "%" PRIu64, value);
    cJSON_AddRawToObject(object, name, text);
}

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
    add_number(object, "epoch", node->epoch);
    add_signed(object, "rtt_ns", node->rtt_ns);
    add_signed(object, "clock_offset_ns", node->clock_offset_ns);
    add_number(object, "silent_ms", node->silent_ms);
    cJSON_AddStringToObject(object, "error", node->error);
    add_number(object, "protocol", node->protocol);
    cJSON_AddBoolToObject(object, "inventory_agrees", node->inventory_agrees);
    add_number(object, "sent", node->sent);
    add_number(object, "received", node->received);
    add_number(object, "stale", node->stale);
    add_number(object, "expired", node->expired);
    add_number(object, "malformed", node->malformed);
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
    add_number(root, "refused", rack->refused);
    add_number(root, "unknown", rack->unknown);
    add_number(root, "connections", rack->connections);
    add_number(root, "max_connections", rack->max_connections);
    add_number(root, "timeout_ms", rack->timeout_ms);
    add_number(root, "omitted", rack->omitted);
    char *text = root ? cJSON_Print(root) : NULL;
    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(root);
    return text ? 0 : -1;
}
