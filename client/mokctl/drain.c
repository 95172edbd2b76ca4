/* SPDX-License-Identifier: Apache-2.0 */
/* Takes devices out of service in order, and back: of this node, or through its mokd of another one of the rack. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"
#include "mok/types.h"
#include "table.h"
#include "util.h"

#define LOOK_MS 200

/* By index or name. */
static const Mok__DeviceInfo *find_device(const Mok__DeviceListReply *devices, const char *text)
{
    char *end;
    unsigned long index = strtoul(text, &end, 10);

    for (size_t i = 0; i < devices->n_device; i++)
        if (strcmp(devices->device[i]->name, text) == 0)
            return devices->device[i];
    if (text[0] < '0' || text[0] > '9' || *end || index >= devices->n_device)
        return NULL;
    return devices->device[index];
}

static const char *state_text(const Mok__DeviceInfo *device)
{
    if (!device->draining)
        return "open";
    return device->groups || device->sessions ? "draining" : "drained";
}

static int print(const Mok__DeviceListReply *devices, bool json)
{
    static const char *const names[] = { "DEVICE", "NAME", "STATE", "RANKS", "QUEUES" };
    _cleanup_table_ struct table table = { 0 };
    cJSON *root = json ? cJSON_CreateArray() : NULL;

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < devices->n_device; i++) {
        const Mok__DeviceInfo *device = devices->device[i];
        table_put(&table, "%" PRIu32, device->index);
        table_put(&table, "%s", device->name);
        table_put(&table, "%s", state_text(device));
        table_put(&table, "%" PRIu32, device->groups);
        table_put(&table, "%" PRIu32, device->sessions);
        if (!json)
            continue;
        cJSON *entry = cJSON_CreateObject();
        mokctl_json_number(entry, "index", device->index);
        cJSON_AddStringToObject(entry, "name", device->name);
        cJSON_AddStringToObject(entry, "state", state_text(device));
        mokctl_json_number(entry, "ranks", device->groups);
        mokctl_json_number(entry, "queues", device->sessions);
        cJSON_AddItemToArray(root, entry);
    }
    return json ? mokctl_json_print(root) : table_print(&table);
}

/* Whether nothing is left to finish on what drains. */
static bool is_drained(const Mok__DeviceListReply *devices)
{
    for (size_t i = 0; i < devices->n_device; i++)
        if (devices->device[i]->draining && (devices->device[i]->groups || devices->device[i]->sessions))
            return false;
    return true;
}

/* What a command is about: a node, or one device of it. */
struct target {
    char on[MOK_MAX_NAME + 1]; /* "": the node that is asked */
    const char *device;        /* NULL: all */
};

static int order(struct control *control, Mok__Drain *body, struct control_answer *ret)
{
    Mok__Request request = MOK__REQUEST__INIT;

    request.body_case = body->on[0] ? MOK__REQUEST__BODY_DRAIN_ON : MOK__REQUEST__BODY_DRAIN;
    request.drain = body; /* both are of one type */
    return control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_DEVICE_LIST, 0, ret);
}

static int ask_devices(struct control *control, struct target *target, struct control_answer *ret)
{
    Mok__Drain body = MOK__DRAIN__INIT;

    if (!target->on[0])
        return mokctl_ask_devices(control, ret);
    body.on = target->on;
    body.node = body.look = true;
    return order(control, &body, ret);
}

static int wait_for_the_end(struct control *control, struct target *target, struct control_answer *answer)
{
    const struct timespec pause = { .tv_nsec = LOOK_MS * 1000000l };
    int r = 0;

    while (r == 0 && !is_drained(answer->reply->device_list)) {
        nanosleep(&pause, NULL);
        control_answer_clear(answer);
        r = ask_devices(control, target, answer);
    }
    return r;
}

/* Whether the rack has a node of that name; not where there is no rack. */
static bool is_node(struct control *control, const char *name)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__RackQuery body = MOK__RACK_QUERY__INIT;

    request.body_case = MOK__REQUEST__BODY_RACK_QUERY;
    request.rack_query = &body;
    if (control_call(control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_RACK, 0, &answer) < 0)
        return false;
    for (size_t i = 0; i < answer.reply->rack->n_node; i++)
        if (strcmp(answer.reply->rack->node[i]->name, name) == 0)
            return true;
    return false;
}

/* DEVICE of this node, NODE, or NODE:DEVICE. 0, or an exit code after saying what is wrong. */
static int find_target(struct mokctl_line *line, const Mok__DeviceListReply *own, struct target *ret)
{
    const char *text = line->argument, *colon = text ? strchr(text, ':') : NULL;
    size_t length = colon ? (size_t)(colon - text) : text ? strlen(text) : 0;

    *ret = (struct target){ .device = colon ? colon + 1 : NULL };
    if (!text)
        return 0;
    if (!colon && find_device(own, text)) {
        ret->device = text;
        return 0;
    }
    if (length > 0 && length < sizeof(ret->on)) {
        memcpy(ret->on, text, length);
        if (is_node(line->control, ret->on))
            return 0;
    }
    if (colon)
        fprintf(stderr, "mokctl: the rack of this node has no node \"%.*s\"\n", (int)length, text);
    else
        fprintf(stderr, "mokctl: no device \"%s\" among the %zu of this node, and no node of that name in its rack\n",
                text, own->n_device);
    return EXIT_USAGE;
}

static int change(struct mokctl_line *line, bool undo)
{
    _cleanup_answer_ struct control_answer own = CONTROL_ANSWER_INIT, devices = CONTROL_ANSWER_INIT,
                                           answer = CONTROL_ANSWER_INIT;
    const Mok__DeviceInfo *device = NULL;
    Mok__Drain body = MOK__DRAIN__INIT;
    struct target target;

    if (!line->argument == !line->node) {
        fprintf(stderr,
                "mokctl: %s needs a device by index or name, a node of the rack, NODE:DEVICE, or --node for all "
                "devices of this node\n",
                undo ? "undrain" : "drain");
        return EXIT_USAGE;
    }
    int r = mokctl_ask_devices(line->control, &own);
    if (r == 0)
        r = find_target(line, own.reply->device_list, &target);
    if (r == 0 && target.device)
        r = ask_devices(line->control, &target, &devices);
    if (r != 0)
        return r;
    if (target.device && !(device = find_device(devices.reply->device_list, target.device))) {
        fprintf(stderr, "mokctl: no device \"%s\" among the %zu of node %s\n", target.device,
                devices.reply->device_list->n_device, target.on);
        return EXIT_USAGE;
    }
    body.device = device ? device->index : 0;
    body.node = !device;
    body.undo = undo;
    body.on = target.on;
    r = order(line->control, &body, &answer);
    if (r == 0 && line->wait)
        r = wait_for_the_end(line->control, &target, &answer);
    return r < 0 ? r : print(answer.reply->device_list, line->json);
}

int mokctl_drain(struct mokctl_line *line)
{
    return change(line, false);
}

int mokctl_undrain(struct mokctl_line *line)
{
    return change(line, true);
}
