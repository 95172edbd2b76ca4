/* SPDX-License-Identifier: Apache-2.0 */
/* What users and Unix groups have of mokd's and may have. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "command.h"
#include "mok/types.h"
#include "table.h"
#include "util.h"

static const char *priority_text(uint32_t priority)
{
    static const char *const texts[] = {
        [MOK_PRIORITY_NORMAL] = "normal",
        [MOK_PRIORITY_HIGH] = "high",
        [MOK_PRIORITY_LOW] = "low",
    };
    return priority < ARRAY_SIZE(texts) ? texts[priority] : "?";
}

/* Names of devices by their bits; "all" for all that there are. */
static void device_names(const Mok__DeviceListReply *devices, uint64_t bits, char *ret, size_t size)
{
    size_t used = 0, named = 0;

    ret[0] = '\0';
    for (size_t i = 0; i < devices->n_device && i < 64 && used < size; i++) {
        if (!(bits >> i & 1))
            continue;
        used += (size_t)snprintf(ret + used, size - used, "%s%s", named ? "," : "", devices->device[i]->name);
        named++;
    }
    if (named == devices->n_device || named == 0)
        snprintf(ret, size, "%s", named ? "all" : "none");
}

static void put_amount(struct table *table, uint64_t amount, bool bytes)
{
    if (amount == UINT64_MAX)
        table_put(table, "-");
    else if (bytes)
        table_put_bytes(table, amount);
    else
        table_put(table, "%" PRIu64, amount);
}

static bool is_over(const Mok__QuotaLine *line)
{
    return line->used > line->limit || line->elsewhere > line->limit - line->used;
}

static int print_one(const Mok__Quota *quota, const Mok__DeviceListReply *devices)
{
    static const char *const names[] = { "WHAT", "USED", "OTHER NODES", "LIMIT", "FROM", "" };
    _cleanup_table_ struct table table = { 0 };
    char text[512];

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < quota->n_line; i++) {
        const Mok__QuotaLine *line = quota->line[i];
        bool bytes = strcmp(line->what, "bytes") == 0;
        table_put(&table, "%s", line->what);
        put_amount(&table, line->used, bytes);
        put_amount(&table, line->elsewhere, bytes);
        put_amount(&table, line->limit, bytes);
        table_put(&table, "%s", line->from);
        table_put(&table, "%s", is_over(line) ? "OVER" : "");
    }
    if (quota->group) {
        printf("group %s, together\n", quota->name);
    } else {
        device_names(devices, quota->devices, text, sizeof(text));
        printf("user %s: weight %" PRIu32 ", priority %s, devices %s, %sof his own, queues of %" PRIu32 " entries\n",
               quota->name, quota->weight, priority_text(quota->priority), text, quota->exclusive ? "also " : "none ",
               quota->queue_entries);
    }
    return table_print(&table);
}

static cJSON *quota_json(const Mok__Quota *quota)
{
    cJSON *object = cJSON_CreateObject(), *lines;

    cJSON_AddStringToObject(object, "kind", quota->group ? "group" : "user");
    mokctl_json_number(object, "id", quota->id);
    cJSON_AddStringToObject(object, "name", quota->name);
    lines = cJSON_AddArrayToObject(object, "limits");
    for (size_t i = 0; i < quota->n_line; i++) {
        const Mok__QuotaLine *line = quota->line[i];
        cJSON *entry = cJSON_CreateObject();
        cJSON_AddStringToObject(entry, "what", line->what);
        mokctl_json_number(entry, "used", line->used);
        mokctl_json_number(entry, "elsewhere", line->elsewhere);
        if (line->limit == UINT64_MAX)
            cJSON_AddNullToObject(entry, "limit");
        else
            mokctl_json_number(entry, "limit", line->limit);
        cJSON_AddStringToObject(entry, "from", line->from);
        cJSON_AddBoolToObject(entry, "over", is_over(line));
        cJSON_AddItemToArray(lines, entry);
    }
    if (quota->group)
        return object;
    mokctl_json_number(object, "weight", quota->weight);
    cJSON_AddStringToObject(object, "priority", priority_text(quota->priority));
    mokctl_json_number(object, "devices", quota->devices);
    cJSON_AddBoolToObject(object, "exclusive", quota->exclusive);
    mokctl_json_number(object, "queue_entries", quota->queue_entries);
    return object;
}

static int print_json(const Mok__QuotaReply *reply)
{
    cJSON *root = cJSON_CreateObject(), *array = cJSON_AddArrayToObject(root, "quota");

    for (size_t i = 0; i < reply->n_quota; i++)
        cJSON_AddItemToArray(array, quota_json(reply->quota[i]));
    mokctl_json_number(root, "omitted", reply->omitted);
    return mokctl_json_print(root);
}

int mokctl_quota(struct mokctl_line *line)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT, devices = CONTROL_ANSWER_INIT;
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__QuotaQuery body = MOK__QUOTA_QUERY__INIT;

    if (line->user && (line->all || !line->user[0])) {
        fprintf(stderr, line->all ? "mokctl: quota takes --user or --all, not both\n"
                                  : "mokctl: --user: needs the name or number of a user\n");
        return EXIT_USAGE;
    }
    if (line->user)
        body.user = (char *)line->user;
    body.all = line->all;
    request.body_case = MOK__REQUEST__BODY_QUOTA_QUERY;
    request.quota_query = &body;
    int r = control_call(line->control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_QUOTA, 0, &answer);
    if (r < 0)
        return r;
    const Mok__QuotaReply *reply = answer.reply->quota;
    if (line->json)
        return print_json(reply);
    r = mokctl_ask_devices(line->control, &devices);
    for (size_t i = 0; r == 0 && i < reply->n_quota; i++) {
        if (i > 0)
            putchar('\n');
        r = print_one(reply->quota[i], devices.reply->device_list);
    }
    if (r == 0 && reply->omitted > 0)
        fprintf(stderr, "mokctl: mokd's answer had no room for %u more\n", reply->omitted);
    return r;
}
