/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whom this node does not reach, why, and who has another inventory: for the sentences of joins that come to nothing.
 * Changes nothing.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "rack_groups_internal.h"

/* Who is refused knocks again more often than that. */
#define REFUSED_OF_LATE_NS UINT64_C(15000000000)
#define NAMED_MAX 2u /* with their reasons; the others are counted */
#define REASON_MAX 72

static bool is_reached(const struct rack_node_info *info)
{
    return info->self || info->state == RACK_UP || info->state == RACK_SUSPECT;
}

static void why(const struct rack_node_info *info, char *ret, size_t size)
{
    snprintf(ret, size, "%s%s%.150s", rack_state_text(info->state), info->error[0] ? ": " : "", info->error);
}

static _printf_(3, 4) void add(char *text, size_t size, const char *format, ...)
{
    size_t length = strlen(text);
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(text + length, size - length, format, arguments);
    va_end(arguments);
}

/* An unknown key has no name; its owner learns from our end what is wrong, and we can say where it is. */
static void add_refused(const struct mokd_server *server, char *ret, size_t size)
{
    struct rack_totals totals;

    rack_totals(server->rack, &totals);
    if (totals.refused_ns && mok_now_ns() - totals.refused_ns < REFUSED_OF_LATE_NS)
        add(ret, size, "%sa node at %s, whose key is not in its inventory", ret[0] ? ", nor " : "",
            totals.refused_from);
}

/* "node b (lost: not heard for 900 ms)"; "": there is none. */
static void name_unreached(const struct mokd_server *server, char *ret, size_t size)
{
    struct rack_node_info info;
    char reason[RACK_MAX_TEXT];
    unsigned count = 0;

    for (uint32_t node = 0; node < RACK_MAX_NODES; node++) {
        if (rack_info(server->rack, node, &info) < 0 || is_reached(&info) || count++ >= NAMED_MAX)
            continue;
        why(&info, reason, sizeof(reason));
        add(ret, size, "%snode %.40s (%.*s)", count > 1 ? ", " : "", info.name, REASON_MAX, reason);
    }
    if (count > NAMED_MAX)
        add(ret, size, " and %u more", count - NAMED_MAX);
    add_refused(server, ret, size);
}

/* How many are up with another inventory, by which a name may have another home; and the first of them. */
static unsigned find_differing(const struct mokd_server *server, const char **ret_first)
{
    struct rack_node_info info;
    unsigned count = 0;

    for (uint32_t node = 0; node < RACK_MAX_NODES; node++)
        if (rack_info(server->rack, node, &info) == 0 && is_reached(&info) && !info.inventory_agrees && count++ == 0)
            *ret_first = info.name;
    return count;
}

void mokd_rack_apart(const struct mokd_server *server, char *ret, size_t size)
{
    const char *self = mokd_rack_own_name(server), *first = "";
    char unreached[240] = "";

    ret[0] = '\0';
    name_unreached(server, unreached, sizeof(unreached));
    if (unreached[0])
        add(ret, size, "node %.40s does not reach %s", self, unreached);
    unsigned differing = find_differing(server, &first);
    if (differing == 1)
        add(ret, size, "%snode %.40s has another inventory", ret[0] ? "; " : "", first);
    else if (differing > 1)
        add(ret, size, "%snode %.40s and %u more have another inventory", ret[0] ? "; " : "", first, differing - 1);
    if (differing)
        add(ret, size, " (see mokctl rack)");
}

void mokd_rack_unreached(const struct mokd_server *server, const char *name, char *ret, size_t size)
{
    struct rack_node_info info;
    uint32_t node;

    if (rack_find(server->rack, name, &node) < 0 || rack_info(server->rack, node, &info) < 0)
        snprintf(ret, size, "its inventory has no such node");
    else
        why(&info, ret, size);
}
