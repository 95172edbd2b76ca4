/* SPDX-License-Identifier: Apache-2.0 */
/* mokd's status as JSON: one object, keys as in control.proto, whole numbers exact. */
#include <cjson/cJSON.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "command.h"
#include "mok/types.h"
#include "mokctl.h"
#include "names.h"

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

    mokctl_json_number(object, "index", d->index);
    cJSON_AddStringToObject(object, "name", d->name);
    cJSON_AddStringToObject(object, "kind", mok_device_kind_text(d->kind));
    mokctl_json_number(object, "units", d->threads);
    cJSON_AddStringToObject(object, "state", mokctl_device_state(d->state));
    mokctl_json_number(object, "memory_bytes", d->memory_bytes);
    mokctl_json_number(object, "memory_used", d->memory_used);
    mokctl_json_number(object, "sessions", d->sessions);
    mokctl_json_number(object, "ops_done", d->ops_done);
    mokctl_json_number(object, "device_ns", d->device_ns);
    mokctl_json_number(object, "restarts", d->restarts);
    mokctl_json_number(object, "worker_pid", d->worker_pid);
    cJSON_AddBoolToObject(object, "draining", d->draining);
    mokctl_json_number(object, "groups", d->groups);
    mokctl_json_number(object, "exclusive_group", d->exclusive_group);
    if (d->fabric || d->no_fabric[0]) {
        cJSON_AddBoolToObject(object, "fabric", d->fabric);
        cJSON_AddStringToObject(object, "no_fabric", d->no_fabric);
    }
    if (d->mps_pipe[0]) {
        cJSON_AddStringToObject(object, "mps_pipe", d->mps_pipe);
        cJSON_AddBoolToObject(object, "mps_own", d->mps_own);
    }
    return object;
}

static cJSON *job_json(const Mok__JobInfo *j)
{
    cJSON *object = cJSON_CreateObject();

    mokctl_json_number(object, "session", j->session);
    cJSON_AddStringToObject(object, "job", j->job);
    cJSON_AddStringToObject(object, "user", j->user);
    mokctl_json_number(object, "uid", j->uid);
    mokctl_json_number(object, "pid", j->pid);
    mokctl_json_number(object, "bytes", j->bytes);
    mokctl_json_number(object, "queues", j->queues);
    mokctl_json_number(object, "groups", j->groups);
    mokctl_json_number(object, "layers", j->layers);
    mokctl_json_number(object, "buffers", j->buffers);
    mokctl_json_number(object, "ops_done", j->ops_done);
    mokctl_json_number(object, "device_ns", j->device_ns);
    mokctl_json_number(object, "rows", j->rows);
    mokctl_json_number(object, "weight", j->weight);
    mokctl_json_number(object, "age_ms", j->age_ms);
    cJSON_AddBoolToObject(object, "resumable", j->resumable);
    cJSON_AddBoolToObject(object, "away", j->away);
    return object;
}

static cJSON *group_json(const Mok__GroupInfo *g)
{
    cJSON *object = cJSON_CreateObject();

    mokctl_json_number(object, "group", g->group);
    cJSON_AddStringToObject(object, "name", g->name);
    mokctl_json_number(object, "uid", g->uid);
    mokctl_json_number(object, "size", g->size);
    mokctl_json_number(object, "joined", g->joined);
    cJSON_AddStringToObject(object, "state", g->state);
    mokctl_json_number(object, "layers", g->layers);
    cJSON_AddItemToObject(object, "session", numbers64(g->session, g->n_session));
    cJSON_AddItemToObject(object, "device", numbers32(g->device, g->n_device));
    if (g->home[0]) {
        cJSON_AddStringToObject(object, "home", g->home);
        cJSON_AddBoolToObject(object, "partial", g->partial);
    }
    if (g->n_node)
        cJSON_AddBoolToObject(object, "fabric", g->fabric);
    if (g->n_node)
        cJSON_AddItemToObject(object, "node", cJSON_CreateStringArray((const char *const *)g->node, (int)g->n_node));
    cJSON_AddNumberToObject(object, "code", g->code);
    cJSON_AddStringToObject(object, "error", g->error);
    return object;
}

static cJSON *memory_json(const Mok__LayerMemory *m)
{
    cJSON *object = cJSON_CreateObject();

    mokctl_json_number(object, "symmetric_bytes", m->symmetric_bytes);
    mokctl_json_number(object, "private_bytes", m->private_bytes);
    mokctl_json_number(object, "context_full_bytes", m->context_full_bytes);
    mokctl_json_number(object, "context_recompute_bytes", m->context_recompute_bytes);
    return object;
}

static cJSON *spec_json(const Mok__LayerSpec *s)
{
    cJSON *object = cJSON_CreateObject();

    mokctl_json_number(object, "hidden", s->hidden);
    mokctl_json_number(object, "intermediate", s->intermediate);
    mokctl_json_number(object, "experts", s->experts);
    mokctl_json_number(object, "topk", s->topk);
    mokctl_json_number(object, "max_tokens", s->max_tokens);
    cJSON_AddStringToObject(object, "precision", mok_precision_text(s->precision));
    mokctl_json_number(object, "shared_intermediate", s->shared_intermediate);
    cJSON_AddNumberToObject(object, "clamp", (double)s->clamp);
    mokctl_json_number(object, "ring_bytes", s->ring_bytes);
    mokctl_json_number(object, "minibatch_rows", s->minibatch_rows);
    mokctl_json_number(object, "comm_units", s->comm_units);
    cJSON_AddStringToObject(object, "gradients",
                            mok_word_of(&mok_dtypes, s->gradient_dtype ? s->gradient_dtype : MOK_DTYPE_F32));
    cJSON_AddStringToObject(object, "wgrad",
                            mok_word_of(&mok_wgrads, s->wgrad_precision ? s->wgrad_precision : MOK_WGRAD_BF16));
    cJSON_AddBoolToObject(object, "transposed_weights", s->transposed_weights != 0);
    return object;
}

static cJSON *layer_json(const Mok__LayerInfo *l)
{
    cJSON *object = cJSON_CreateObject();

    mokctl_json_number(object, "layer", l->layer);
    mokctl_json_number(object, "group", l->group);
    cJSON_AddStringToObject(object, "group_name", l->group_name);
    mokctl_json_number(object, "rank", l->rank);
    mokctl_json_number(object, "device", l->device);
    mokctl_json_number(object, "session", l->session);
    mokctl_json_number(object, "uid", l->uid);
    if (l->spec)
        cJSON_AddItemToObject(object, "spec", spec_json(l->spec));
    if (l->memory)
        cJSON_AddItemToObject(object, "memory", memory_json(l->memory));
    mokctl_json_number(object, "bytes", l->bytes);
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

static void add_layers(cJSON *root, const Mok__StatusReply *status)
{
    cJSON *array = cJSON_AddArrayToObject(root, "layers");

    for (size_t i = 0; i < status->n_layer; i++)
        cJSON_AddItemToArray(array, layer_json(status->layer[i]));
}

cJSON *mokctl_status_json(enum mokctl_part part, const Mok__StatusReply *status)
{
    cJSON *root = cJSON_CreateObject();

    if (part == MOKCTL_STATUS) {
        cJSON_AddStringToObject(root, "version", status->version);
        mokctl_json_number(root, "pid", status->pid);
        mokctl_json_number(root, "uptime_ms", status->uptime_ms);
        mokctl_json_number(root, "ops_done", status->ops_done);
        mokctl_json_number(root, "errors", status->errors);
        mokctl_json_number(root, "store_used", status->store_used);
        mokctl_json_number(root, "store_bound", status->store_bound);
        cJSON_AddStringToObject(root, "config", status->config);
    }
    if (part == MOKCTL_STATUS || part == MOKCTL_DEVICES)
        add_devices(root, status);
    if (part == MOKCTL_STATUS || part == MOKCTL_JOBS)
        add_jobs(root, status);
    if (part == MOKCTL_STATUS || part == MOKCTL_GROUPS)
        add_groups(root, status);
    if (part == MOKCTL_STATUS || part == MOKCTL_LAYERS)
        add_layers(root, status);
    mokctl_json_number(root, "omitted", status->omitted);
    return root;
}

int mokctl_print_json(enum mokctl_part part, const Mok__StatusReply *status)
{
    return mokctl_json_print(mokctl_status_json(part, status));
}

/* ------------------------------------------------------------------ plans */

static void add_text(cJSON *object, const char *name, const char *from, size_t length)
{
    char *text = strndup(from, length);

    if (text)
        cJSON_AddStringToObject(object, name, text);
    free(text);
}

/* Numbers as numbers; whatever else there may be as text. */
static void add_value(cJSON *object, const char *from, size_t length)
{
    char digits[24];

    if (length == 0 || length >= sizeof(digits) || strspn(from, "0123456789") < length) {
        add_text(object, "value", from, length);
        return;
    }
    memcpy(digits, from, length);
    digits[length] = 0;
    cJSON_AddRawToObject(object, "value", digits);
}

/* One line, "what = value (reason)"; the reason may have brackets of its own. */
static cJSON *choice_json(const char *line, size_t length)
{
    static const char is[] = " = ", because[] = " (";
    cJSON *object = cJSON_CreateObject();
    const char *end = line + length;
    const char *middle = memmem(line, length, is, sizeof(is) - 1);

    if (!middle) {
        add_text(object, "what", line, length);
        return object;
    }
    const char *value = middle + sizeof(is) - 1;
    const char *reason = memmem(value, (size_t)(end - value), because, sizeof(because) - 1);
    add_text(object, "what", line, (size_t)(middle - line));
    add_value(object, value, (size_t)((reason ? reason : end) - value));
    if (reason) {
        reason += sizeof(because) - 1;
        add_text(object, "reason", reason, (size_t)(end - reason) - (reason < end && end[-1] == ')'));
    }
    return object;
}

int mokctl_print_plan_json(const char *plan, const Mok__LayerMemory *memory)
{
    cJSON *root = cJSON_CreateObject();
    cJSON *array = cJSON_AddArrayToObject(root, "plan");

    for (const char *line = plan; *line;) {
        size_t length = strcspn(line, "\n");
        if (length > 0)
            cJSON_AddItemToArray(array, choice_json(line, length));
        line += length + (line[length] == '\n');
    }
    if (memory)
        cJSON_AddItemToObject(root, "memory", memory_json(memory));
    return mokctl_json_print(root);
}

int mokctl_print_version_json(const char *client, const char *daemon, unsigned protocol)
{
    cJSON *root = cJSON_CreateObject();

    cJSON_AddStringToObject(root, "mokctl", client);
    cJSON_AddStringToObject(root, "mokd", daemon);
    mokctl_json_number(root, "protocol", protocol);
    return mokctl_json_print(root);
}
