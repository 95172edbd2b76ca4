/* SPDX-License-Identifier: Apache-2.0 */
/* What jobs used of the devices since a time. */
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "command.h"
#include "table.h"
#include "util.h"

static const char *const groupings[] = { [MOK__USAGE_BY__USAGE_BY_ALL] = "all",
                                         [MOK__USAGE_BY__USAGE_BY_USER] = "user",
                                         [MOK__USAGE_BY__USAGE_BY_JOB] = "job",
                                         [MOK__USAGE_BY__USAGE_BY_DEVICE] = "device" };

/* "90s", "30m", "24h", "7d": so long ago. */
static bool parse_ago(const char *text, uint64_t now, uint64_t *ret)
{
    static const struct {
        char unit;
        uint64_t seconds;
    } units[] = { { 's', 1 }, { 'm', 60 }, { 'h', 3600 }, { 'd', 86400 }, { 'w', 7 * 86400 } };
    char *end;

    if (!isdigit((unsigned char)*text))
        return false;
    errno = 0;
    uint64_t count = strtoull(text, &end, 10), ago;
    for (size_t i = 0; i < ARRAY_SIZE(units); i++) {
        if (*end != units[i].unit || end[1] || errno || !mok_mul_u64(count, units[i].seconds, &ago))
            continue;
        *ret = ago < now ? now - ago : 0;
        return true;
    }
    return false;
}

/* "2026-11-29", with or without a time of the day, as the clock on the wall shows it. */
static bool parse_date(const char *text, uint64_t *ret)
{
    static const char *const formats[] = { "%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S" };

    for (size_t i = 0; i < ARRAY_SIZE(formats); i++) {
        struct tm parts = { .tm_isdst = -1 };
        const char *end = strptime(text, formats[i], &parts);
        if (!end || *end)
            continue;
        int day = parts.tm_mday;
        time_t when = mktime(&parts);
        if (when < 0 || parts.tm_mday != day) /* 30 February is no 2 March */
            return false;
        *ret = (uint64_t)when;
        return true;
    }
    return false;
}

static int parse_by(const char *text, uint32_t *ret)
{
    for (uint32_t i = 0; i < ARRAY_SIZE(groupings); i++) {
        if (strcmp(groupings[i], text) == 0) {
            *ret = i;
            return 0;
        }
    }
    fprintf(stderr, "mokctl: --by %s: must be user, job, device or all\n", text);
    return -1;
}

static void put_time(struct table *table, uint64_t ns)
{
    if (ns >= 3600000000000u)
        table_put(table, "%.2f h", (double)ns / 3600e9);
    else if (ns >= 1000000000u)
        table_put(table, "%.2f s", (double)ns / 1e9);
    else
        table_put(table, "%.2f ms", (double)ns / 1e6);
}

static int print_rows(const Mok__UsageReply *reply)
{
    static const char *const names[] = { "USER", "JOB", "DEVICE", "DEVICE TIME", "OPS", "ROWS", "GIB HOURS" };
    _cleanup_table_ struct table table = { 0 };

    table_head(&table, ARRAY_SIZE(names), names);
    for (size_t i = 0; i < reply->n_row; i++) {
        const Mok__UsageRow *row = reply->row[i];
        table_put(&table, "%s", row->user[0] ? row->user : "-");
        table_put(&table, "%s", row->job[0] ? row->job : "-");
        table_put(&table, "%s", row->device[0] ? row->device : "-");
        put_time(&table, row->device_ns);
        table_put(&table, "%" PRIu64, row->ops);
        table_put(&table, "%" PRIu64, row->rows);
        table_put(&table, "%.3f", (double)row->byte_seconds / (1024.0 * 1024 * 1024 * 3600));
    }
    return table_print(&table);
}

static int print_json(const Mok__UsageReply *reply, uint32_t by)
{
    cJSON *root = cJSON_CreateObject(), *array;

    mokctl_json_number(root, "since", reply->since_s);
    mokctl_json_number(root, "kept_since", reply->kept_since_s);
    cJSON_AddStringToObject(root, "by", groupings[by]);
    array = cJSON_AddArrayToObject(root, "usage");
    for (size_t i = 0; i < reply->n_row; i++) {
        const Mok__UsageRow *row = reply->row[i];
        cJSON *entry = cJSON_CreateObject();
        if (row->user[0]) {
            cJSON_AddStringToObject(entry, "user", row->user);
            mokctl_json_number(entry, "uid", row->uid);
        }
        if (row->job[0])
            cJSON_AddStringToObject(entry, "job", row->job);
        if (row->device[0])
            cJSON_AddStringToObject(entry, "device", row->device);
        mokctl_json_number(entry, "device_ns", row->device_ns);
        mokctl_json_number(entry, "ops", row->ops);
        mokctl_json_number(entry, "rows", row->rows);
        mokctl_json_number(entry, "byte_seconds", row->byte_seconds);
        cJSON_AddItemToArray(array, entry);
    }
    mokctl_json_number(root, "omitted", reply->omitted);
    return mokctl_json_print(root);
}

int mokctl_usage_of_jobs(struct mokctl_line *line)
{
    _cleanup_answer_ struct control_answer answer = CONTROL_ANSWER_INIT;
    const char *since = line->since ? line->since : "24h";
    Mok__Request request = MOK__REQUEST__INIT;
    Mok__UsageQuery body = MOK__USAGE_QUERY__INIT;

    if (!parse_ago(since, (uint64_t)time(NULL), &body.since_s) && !parse_date(since, &body.since_s)) {
        fprintf(stderr,
                "mokctl: --since %s: must be so long ago as 30m, 24h, 7d or 4w, or a date as 2026-01-31 or "
                "2026-01-31T08:00\n",
                since);
        return EXIT_USAGE;
    }
    if (line->by && parse_by(line->by, &body.by) < 0)
        return EXIT_USAGE;
    request.body_case = MOK__REQUEST__BODY_USAGE_QUERY;
    request.usage_query = &body;
    int r = control_call(line->control, &request, MOKCTL_TIMEOUT_MS, MOK__REPLY__BODY_USAGE, 0, &answer);
    if (r < 0)
        return r;
    const Mok__UsageReply *reply = answer.reply->usage;
    r = line->json ? print_json(reply, body.by) : print_rows(reply);
    if (r == 0 && reply->omitted > 0)
        fprintf(stderr, "mokctl: %u more, of less device time, did not fit mokd's answer; --by groups them\n",
                reply->omitted);
    return r;
}
