/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_node.h"

#include <stdio.h>
#include <string.h>

#include "names.h"
#include "rack/rack.h"
#include "rack_groups.h"
#include "rack_orders.h"
#include "session.h"

/* An answer and its envelope stay within one packet. */
#define ANSWER_BYTES (MOK_WIRE_MAX_BYTES - 4096u)

int mokd_rack_start(struct mokd_server *server, struct mokd_error *error)
{
    char text[RACK_MAX_TEXT];

    if (!server->config->rack.node[0])
        return 0;
    int r = rack_start(&server->loop, &server->config->rack, server->boot_id, &mokd_rack_groups_handlers, server,
                       &server->rack, text);
    if (r < 0)
        return mokd_error_set(error, r, "%s", text);
    rack_set_tenants(server->rack, mokd_config_tenants_hash(server->config));
    return 0;
}

void mokd_rack_leave(struct mokd_server *server)
{
    rack_leave(server->rack);
    mokd_rack_groups_leave(server);
    mokd_rack_orders_stop(server);
}

void mokd_rack_stop(struct mokd_server *server)
{
    rack_stop(server->rack);
    server->rack = NULL;
}

/* It turns at least once a second. It may stand still as long as a worker may, but for this a machine may be too busy.
 */
#define LEAST_STILL_S 3u

static uint64_t still_ns(const struct mokd_config *config)
{
    uint32_t seconds = config->worker_timeout;
    return (seconds > LEAST_STILL_S ? seconds : LEAST_STILL_S) * UINT64_C(1000000000);
}

bool mokd_rack_lives(void *cookie)
{
    struct mokd_server *server = cookie;
    uint64_t now = mok_now_ns();

    if (!server->rack)
        return true;
    uint64_t rounds = rack_rounds(server->rack);
    if (rounds != server->rack_rounds || server->rack_seen_ns == 0) {
        server->rack_rounds = rounds;
        server->rack_seen_ns = now;
    }
    return now - server->rack_seen_ns < still_ns(server->config);
}

static void swap_inventory(struct mokd_config *now, struct mokd_config *next)
{
    struct rack_config rack = now->rack;
    struct rack_node_config *nodes = now->nodes;

    now->rack = next->rack;
    now->nodes = next->nodes;
    next->rack = rack;
    next->nodes = nodes;
}

void mokd_rack_reload(struct mokd_server *server, struct mokd_config *next, char *failure, size_t size)
{
    char text[RACK_MAX_TEXT] = "";

    if (server->rack)
        rack_set_tenants(server->rack, mokd_config_tenants_hash(server->config)); /* those are taken over by now */
    if (!server->rack && !next->rack.node[0])
        return;
    if (!server->rack)
        snprintf(text, sizeof(text), "[rack] is new, which needs a restart");
    else if (!next->rack.node[0])
        snprintf(text, sizeof(text), "[rack] is gone, which needs a restart");
    else if (rack_reload(server->rack, &next->rack, text) == 0)
        swap_inventory(server->config, next);
    if (!text[0])
        return;
    mok_log(MOK_LOG_ERROR, "rack", "the rack goes on as it was", "error=\"%s\"", text);
    snprintf(failure, size, "%s", text);
}

/* ------------------------------------------------------------------ what it looks like */

struct answer {
    Mok__RackReply body;
    struct rack_totals totals;
    Mok__RackNode nodes[RACK_MAX_NODES], *pointers[RACK_MAX_NODES];
    uint8_t boot_ids[RACK_MAX_NODES][RACK_BOOT_BYTES];
};

static void fill_node(const struct rack_node_info *info, uint8_t *boot_id, Mok__RackNode *ret)
{
    *ret = (Mok__RackNode)MOK__RACK_NODE__INIT;
    memcpy(boot_id, info->boot_id, RACK_BOOT_BYTES);
    ret->name = (char *)info->name;
    ret->address = (char *)info->address;
    ret->link_domain = (char *)info->link_domain;
    ret->self = info->self;
    ret->state = (char *)rack_state_text(info->state);
    ret->boot_id = (ProtobufCBinaryData){ .len = RACK_BOOT_BYTES, .data = boot_id };
    ret->epoch = info->epoch;
    ret->rtt_ns = info->rtt_ns;
    ret->clock_offset_ns = info->clock_offset_ns;
    ret->silent_ms = info->silent_ms;
    ret->error = (char *)info->error;
    ret->protocol = info->protocol;
    ret->inventory_agrees = info->inventory_agrees;
    ret->sent = info->counters.sent;
    ret->received = info->counters.received;
    ret->stale = info->counters.stale;
    ret->expired = info->counters.expired;
    ret->malformed = info->counters.malformed;
    ret->draining = info->draining;
    ret->tenants_differ = !info->tenants_agree;
}

static void fill_totals(const struct rack *rack, struct answer *answer)
{
    struct rack_totals *totals = &answer->totals;

    rack_totals(rack, totals);
    answer->body.refused = totals->refused;
    answer->body.unknown = totals->unknown;
    answer->body.connections = totals->connections;
    answer->body.max_connections = totals->max_connections;
    if (totals->refused_lately == 0)
        return;
    answer->body.refused_lately = totals->refused_lately;
    answer->body.refused_age_ms = (mok_now_ns() - totals->refused_ns) / 1000000u;
    answer->body.refused_from = totals->refused_from;
}

static void fill_answer(const struct rack *rack, struct answer *answer)
{
    struct rack_node_info info;
    size_t bytes = 0;

    answer->body = (Mok__RackReply)MOK__RACK_REPLY__INIT;
    answer->body.inventory = rack_inventory_hash(rack);
    fill_totals(rack, answer);
    answer->body.timeout_ms = rack_timeout_ms(rack);
    answer->body.node = answer->pointers;
    for (uint32_t i = 0; i < RACK_MAX_NODES; i++) {
        size_t n = answer->body.n_node;
        if (rack_info(rack, i, &info) < 0)
            continue;
        fill_node(&info, answer->boot_ids[n], &answer->nodes[n]);
        answer->pointers[n] = &answer->nodes[n];
        bytes += protobuf_c_message_get_packed_size(&answer->nodes[n].base) + 8;
        if (bytes <= ANSWER_BYTES)
            answer->body.n_node++;
        else
            answer->body.omitted++;
    }
}

void mokd_rack_query(struct mokd_session *session, uint64_t id)
{
    struct mokd_error error = { 0 };
    Mok__Reply reply = MOK__REPLY__INIT;

    if (!session->server->rack) {
        mokd_error_set(&error, -MOK_ESTATE, "this mokd is in no rack: its configuration has no [rack]");
        mokd_session_decline(session, id, &error);
        return;
    }
    _cleanup_free_ struct answer *answer = calloc(1, sizeof(*answer));
    if (!answer) {
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
        mokd_session_refuse(session, id, &error);
        return;
    }
    fill_answer(session->server->rack, answer);
    reply.body_case = MOK__REPLY__BODY_RACK;
    reply.rack = &answer->body;
    struct mokd_call call = mokd_call_begin(session, id);
    mokd_call_reply(&call, &reply, NULL, 0);
}
