/* SPDX-License-Identifier: Apache-2.0 */
/* Takes devices out of service in order, and back. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"
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

static int wait_for_the_end(struct control *control, struct control_answer *answer)
{
    const struct timespec pause = { .tv_nsec = LOOK_MS * 1000000l };
    int r = 0;

    while (r == 0 && !is_drained(answer->reply->device_list)) {
        nanosleep(&pause, NULL);
        control_answer_clear(answer);
        r = mokctl_ask_devices(control, answer);
    }
    return r;
}

static int change(struct mokctl_line *line, bool undo)
{
    _cleanup_answer_ struct control_answer devices = CONTROL_ANSWER_INIT, answer = CONTROL_ANSWER_INIT;
    const Mok__DeviceInfo *device = NULL;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__Drain body = MOK__DRAIN__INIT;

    if (!line->argument == !line->node) {
        fprintf(stderr, "mokctl: %s needs a device by index or name, or --node for all of them\n",
                undo ? "undrain" : "drain");
        return EXIT_USAGE;
    }
    int r = mokctl_ask_devices(line->control, &devices);
    if (r < 0)
        return r;
    if (line->argument && !(device = find_device(devices.reply->device_list, line->argument))) {
        fprintf(stderr, "mokctl: no device \"%s\" among the %zu of this node\n", line->argument,
                devices.reply->device_list->n_device);
        return EXIT_USAGE;
    }
    body.device = device ? device->index : 0;
    body.node = line->node;
    body.undo = undo;
    request.body_case = MOK__REQUEST__BODY_DRAIN;
    request.drain = &body;
    r = control_call(line->control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_DEVICE_LIST, 0, &answer);
    if (r == 0 && line->wait)
        r = wait_for_the_end(line->control, &answer);
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
