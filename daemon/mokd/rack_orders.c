/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_orders.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "admission.h"
#include "names.h"
#include "rack/frame.h"
#include "rack/rack.h"
#include "status.h"
#include "timer.h"

#define MAX_ORDERS 64u
/* Of one node in a second; more are dropped, and their asker gives up. */
#define MAX_ORDERED 32u
#define ANSWER_MS 8000u /* mokctl waits a little longer */

/* An administrator of this node who waits for another one's answer. */
struct order {
    TAILQ_ENTRY(order) link;
    struct mokd_rack_orders *orders;
    uint64_t request;
    uint32_t node;
    struct mokd_call call;
    struct mokd_timer *deadline;
};

struct mokd_rack_orders {
    struct mokd_server *server;
    uint64_t last_request;
    struct {
        uint64_t second;
        unsigned count;
    } ordered[RACK_MAX_NODES]; /* by other nodes */
    size_t count;
    TAILQ_HEAD(, order) list;
};

static void order_end(struct order *order)
{
    TAILQ_REMOVE(&order->orders->list, order, link);
    order->orders->count--;
    mokd_timer_cancel(&order->deadline);
    free(order);
}

static void fail(struct order *order, const struct mokd_error *error)
{
    struct mokd_call call = order->call;

    order_end(order);
    mokd_call_fail(&call, error);
}

static const char *name_of(const struct mokd_server *server, uint32_t node)
{
    struct rack_node_info info;

    return rack_info(server->rack, node, &info) == 0 ? info.name : "?";
}

static void overdue(void *cookie)
{
    struct order *order = cookie;
    struct mokd_error error;

    mokd_error_set(&error, -MOK_ETIMEDOUT, "node %s does not answer within %u ms",
                   name_of(order->orders->server, order->node), ANSWER_MS);
    fail(order, &error);
}

/* ------------------------------------------------------------------ asking */

static int find_node(const struct mokd_server *server, const char *name, struct rack_node_info *ret,
                     struct mokd_error *error)
{
    uint32_t node;

    if (!server->rack)
        return mokd_error_set(error, -MOK_ESTATE, "on = %.63s: this mokd is in no rack", name);
    if (!mok_name_is_valid(name) || rack_find(server->rack, name, &node) < 0 ||
        rack_info(server->rack, node, ret) < 0)
        return mokd_error_set(error, -MOK_ENOENT, "on = %.63s: the inventory of this mokd has no such node",
                              mok_name_is_valid(name) ? name : "(no name)");
    if (ret->state != RACK_UP && ret->state != RACK_SUSPECT)
        return mokd_error_set(error, -MOK_EPEER, "node %s is %s: %.200s", name, rack_state_text(ret->state),
                              ret->error);
    if (ret->protocol < RACK_PROTOCOL_SHARED)
        return mokd_error_set(error, -MOK_ENOTSUP,
                              "node %s speaks version %u of the rack's protocol, which carries no orders: "
                              "ask its own mokd",
                              name, ret->protocol);
    return 0;
}

static int send_order(struct order *order, const Mok__Drain *request)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackDrain body = MOK__RACK_DRAIN__INIT;

    body.request = order->request;
    body.what = (Mok__Drain *)request;
    body.by = order->call.session->user->name;
    frame.body_case = MOK__RACK_FRAME__BODY_DRAIN;
    frame.drain = &body;
    return rack_send(order->orders->server->rack, order->node, &frame, ANSWER_MS);
}

int mokd_rack_order(struct mokd_session *session, uint64_t id, const Mok__Drain *request, struct mokd_error *error)
{
    struct mokd_rack_orders *orders = session->server->rack_orders;
    struct rack_node_info info;

    int r = find_node(session->server, request->on, &info, error);
    if (r < 0)
        return r;
    struct order *order = orders->count < MAX_ORDERS ? calloc(1, sizeof(*order)) : NULL;
    if (!order)
        return mokd_error_set(error, -MOK_EBUSY, "%zu orders to other nodes wait already", orders->count);
    *order = (struct order){ .orders = orders, .request = ++orders->last_request, .node = info.index };
    order->call.session = session; /* until it is begun */
    order->deadline = mokd_timer_start(&session->server->loop, ANSWER_MS, overdue, order);
    TAILQ_INSERT_TAIL(&orders->list, order, link);
    orders->count++;
    r = order->deadline ? send_order(order, request) : -MOK_ENOMEM;
    if (r < 0) {
        order_end(order);
        return mokd_error_set(error, r, "node %s: %s", info.name, mok_error_text(r));
    }
    order->call = mokd_call_begin(session, id);
    return 0;
}

/* What goes on to a terminal of ours. */
static void clean_devices(Mok__DeviceListReply *list)
{
    for (size_t i = 0; i < list->n_device; i++) {
        Mok__DeviceInfo *device = list->device[i];
        if (device->name[0] && !mok_name_is_valid(device->name))
            device->name[0] = '\0';
        if (device->reason[0])
            device->reason[0] = '\0';
    }
}

static void answered(struct mokd_rack_orders *orders, uint32_t node, const Mok__RackDrained *message)
{
    struct order *order;
    struct mokd_error error;
    char clean[MOKD_TEXT_MAX];

    TAILQ_FOREACH(order, &orders->list, link)
        if (order->request == message->request && order->node == node)
            break;
    if (!order)
        return; /* too late */
    if (message->code < 0 || !message->devices || message->devices->n_device > MOK_MAX_DEVICES) {
        mokd_error_set(&error, message->code < 0 ? message->code : -MOK_EPROTO, "node %s: %.300s",
                       name_of(orders->server, node), mok_log_text(clean, sizeof(clean), message->text));
        fail(order, &error);
        return;
    }
    struct mokd_call call = order->call;
    Mok__Reply reply = MOK__REPLY__INIT;
    reply.body_case = MOK__REPLY__BODY_DEVICE_LIST;
    clean_devices(message->devices);
    reply.device_list = message->devices;
    order_end(order);
    mokd_call_reply(&call, &reply, NULL, 0);
}

/* ------------------------------------------------------------------ being asked */

/* Whoever has a node's key may order, and not keep us busy with it. */
static bool is_too_much(struct mokd_rack_orders *orders, uint32_t node)
{
    uint64_t second = mok_now_ns() / 1000000000u;

    if (orders->ordered[node].second != second) {
        orders->ordered[node].second = second;
        orders->ordered[node].count = 0;
    }
    return ++orders->ordered[node].count > MAX_ORDERED;
}

static void ordered(struct mokd_server *server, uint32_t node, const Mok__RackDrain *message)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    Mok__RackDrained body = MOK__RACK_DRAINED__INIT;
    struct mokd_device_list list;
    struct mokd_error error = { 0 };
    char by[2 * MOK_MAX_NAME + 16], clean[MOK_MAX_NAME + 2];

    snprintf(by, sizeof(by), "%s@%s", mok_log_text(clean, sizeof(clean), message->by), name_of(server, node));
    if (message->what)
        mokd_drain_apply(server, message->what, by, &error);
    else
        mokd_error_set(&error, -MOK_EPROTO, "the order does not say what");
    mokd_status_fill_devices(server, &list);
    body.request = message->request;
    body.code = error.code;
    body.text = error.text;
    body.devices = &list.body;
    frame.body_case = MOK__RACK_FRAME__BODY_DRAINED;
    frame.drained = &body;
    rack_send(server->rack, node, &frame, ANSWER_MS);
}

bool mokd_rack_orders_message(struct mokd_server *server, uint32_t node, const Mok__RackFrame *frame)
{
    if (frame->body_case == MOK__RACK_FRAME__BODY_DRAIN) {
        if (server->rack_orders && node < RACK_MAX_NODES && !is_too_much(server->rack_orders, node))
            ordered(server, node, frame->drain);
        return true;
    }
    if (frame->body_case != MOK__RACK_FRAME__BODY_DRAINED)
        return false;
    if (server->rack_orders)
        answered(server->rack_orders, node, frame->drained);
    return true;
}

void mokd_rack_orders_peer_down(struct mokd_server *server, uint32_t node, const char *why)
{
    struct order *order, *next;
    struct mokd_error error;

    for (order = server->rack_orders ? TAILQ_FIRST(&server->rack_orders->list) : NULL; order; order = next) {
        next = TAILQ_NEXT(order, link);
        if (order->node != node)
            continue;
        mokd_error_set(&error, -MOK_EPEER, "node %s %s", name_of(server, node), why);
        fail(order, &error);
    }
}

/* ------------------------------------------------------------------ start and stop */

int mokd_rack_orders_start(struct mokd_server *server, struct mokd_error *error)
{
    if (!server->rack)
        return 0;
    server->rack_orders = calloc(1, sizeof(*server->rack_orders));
    if (!server->rack_orders)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    server->rack_orders->server = server;
    TAILQ_INIT(&server->rack_orders->list);
    return 0;
}

void mokd_rack_orders_stop(struct mokd_server *server)
{
    struct mokd_error error;
    struct order *order;

    if (!server->rack_orders)
        return;
    mokd_error_set(&error, -MOK_EDAEMON, "mokd is stopping");
    while ((order = TAILQ_FIRST(&server->rack_orders->list)))
        fail(order, &error);
    free(server->rack_orders);
    server->rack_orders = NULL;
}
