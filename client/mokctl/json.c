/* SPDX-License-Identifier: Apache-2.0 */
/* mokd's status as JSON: one object, keys as in control.proto, whole numbers exact. */
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "mokctl.h"
#include "names.h"

/* cJSON's own numbers are doubles. */
static void add_number(cJSON *object, const char *name, uint64_t value)
{
    char text[24];

    snprintf(text, sizeof(text), "%" PRIu64, value);
    cJSON_AddRawToObject(object, name, text);
}

static cJSON *numbers64(const uint64_t *values, size_t count)
{
    cJSON *array = cJSON_CreateArray();
    char text[24];

    for (size_t i = 0; i < count; i++) {
        snprintf(text, sizeof(text), "%" PRIu64, values[i]);
        cJSON_AddItemToArray(array, cJSON_CreateRaw(text));
    }
    return array;
}

static cJSON *numbers32(const uint32_t *values, size_t count)
{
    cJSON *array = cJSON_CreateArray();

    for (size_t i = 0; i < count; i++)
        cJSON_AddItemToArray(array, cJSON_CreateNumber(values[i]));
    return array;
}

static cJSON *device_json(const Mok__DeviceInfo *d)
{
    cJSON *object = cJSON_CreateObject();

    add_number(object, "index", d->index);
    cJSON_AddStringToObject(object, "name", d->name);
    cJSON_AddStringToObject(object, "kind", mok_device_kind_text(d->kind));
    add_number(object, "units", d->threads);
    cJSON_AddStringToObject(object, "state", mokctl_device_state(d->state));
    add_number(object, "memory_bytes", d->memory_bytes);
    add_number(object, "memory_used", d->memory_used);
    add_number(object, "sessions", d->sessions);
    add_number(object, "ops_done", d->ops_done);
    add_number(object, "device_ns", d->device_ns);
    add_number(object, "restarts", d->restarts);
    add_number(object, "worker_pid", d->worker_pid);
    return object;
}

static cJSON *job_json(const Mok__JobInfo *j)
{
    cJSON *object = cJSON_CreateObject();

    add_number(object, "session", j->session);
    cJSON_AddStringToObject(object, "job", j->job);
    cJSON_AddStringToObject(object, "user", j->user);
    add_number(object, "uid", j->uid);
    add_number(object, "pid", j->pid);
    add_number(object, "bytes", j->bytes);
    add_number(object, "queues", j->queues);
    add_number(object, "groups", j->groups);
    add_number(object, "layers", j->layers);
    add_number(object, "buffers", j->buffers);
    add_number(object, "ops_done", j->ops_done);
    add_number(object, "age_ms", j->age_ms);
    return object;
}

static cJSON *group_json(const Mok__GroupInfo *g)
{
    cJSON *object = cJSON_CreateObject();

    add_number(object, "group", g->group);
    cJSON_AddStringToObject(object, "name", g->name);
    add_number(object, "uid", g->uid);
    add_number(object, "size", g->size);
    add_number(object, "joined", g->joined);
    cJSON_AddStringToObject(object, "state", g->state);
    add_number(object, "layers", g->layers);
    cJSON_AddItemToObject(object, "session", numbers64(g->session, g->n_session));
    cJSON_AddItemToObject(object, "device", numbers32(g->device, g->n_device));
    cJSON_AddNumberToObject(object, "code", g->code);
    cJSON_AddStringToObject(object, "error", g->error);
    return object;
}

static void add_devices(cJSON *root, const Mok__StatusReply *status)
{
    cJSON *array = cJSON_AddArrayToObject(root, "devices");

    for (size_t i = 0; i < status->n_device; i++)
        cJSON_AddItemToArray(array, device_json(status->device[i]));
}

static void add_jobs(cJSON *root, const Mok__StatusReply *status)
{
    cJSON *array = cJSON_AddArrayToObject(root, "jobs");

    for (size_t i = 0; i < status->n_job; i++)
        cJSON_AddItemToArray(array, job_json(status->job[i]));
}

static void add_groups(cJSON *root, const Mok__StatusReply *status)
{
    cJSON *array = cJSON_AddArrayToObject(root, "groups");

    for (size_t i = 0; i < status->n_group; i++)
        cJSON_AddItemToArray(array, group_json(status->group[i]));
}

static int print(cJSON *root)
{
    char *text = root ? cJSON_Print(root) : NULL;

    if (text)
        puts(text);
    cJSON_free(text);
    cJSON_Delete(root);
    return text ? 0 : -1;
}

int mokctl_print_json(enum mokctl_part part, const Mok__StatusReply *status)
{
    cJSON *root = cJSON_CreateObject();

    if (part == MOKCTL_STATUS) {
        cJSON_AddStringToObject(root, "version", status->version);
        add_number(root, "pid", status->pid);
        add_number(root, "uptime_ms", status->uptime_ms);
        add_number(root, "ops_done", status->ops_done);
        add_number(root, "errors", status->errors);
    }
    if (part == MOKCTL_STATUS || part == MOKCTL_DEVICES)
        add_devices(root, status);
    if (part == MOKCTL_STATUS || part == MOKCTL_JOBS)
        add_jobs(root, status);
    if (part == MOKCTL_STATUS || part == MOKCTL_GROUPS)
        add_groups(root, status);
    return print(root);
}

int mokctl_print_version_json(const char *client, const char *daemon, unsigned protocol)
{
    cJSON *root = cJSON_CreateObject();

    cJSON_AddStringToObject(root, "mokctl", client);
    cJSON_AddStringToObject(root, "mokd", daemon);
    add_number(root, "protocol", protocol);
    return print(root);
}
