/* SPDX-License-Identifier: Apache-2.0 */
#include "usage_store.h"

#include <pwd.h>
#include <sqlite3.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define SCHEMA_VERSION 1
#define PAGE_BYTES 4096u
#define BUSY_MS 1000
/* What is kept in memory alone, and the rows of an answer; a packet holds fewer. */
#define MEMORY_BYTES (8u << 20)
#define MAX_ROWS 2048u

struct mokd_usage_store {
    char *path; /* NULL: in memory */
    struct mokd_usage_limits limits;
    sqlite3 *db;       /* NULL: not open */
    uint64_t pruned_s; /* when old rows were looked for */
};

static const char schema[] =
    "CREATE TABLE IF NOT EXISTS usage("
    "  start INTEGER NOT NULL, uid INTEGER NOT NULL, job TEXT NOT NULL, device TEXT NOT NULL,"
    "  device_ns INTEGER NOT NULL, ops INTEGER NOT NULL, rows INTEGER NOT NULL, byte_seconds INTEGER NOT NULL,"
    "  PRIMARY KEY(start, uid, job, device)) WITHOUT ROWID;";

static const char upsert[] =
    "INSERT INTO usage VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) ON CONFLICT DO UPDATE SET"
    "  device_ns = device_ns + excluded.device_ns, ops = ops + excluded.ops, rows = rows + excluded.rows,"
    "  byte_seconds = byte_seconds + excluded.byte_seconds";

static void finalize(sqlite3_stmt **statement)
{
    sqlite3_finalize(*statement);
}
#define _cleanup_statement_ __attribute__((cleanup(finalize)))

struct mokd_usage_store *mokd_usage_store_new(const char *path, const struct mokd_usage_limits *limits)
{
    struct mokd_usage_store *store = calloc(1, sizeof(*store));

    if (!store)
        return NULL;
    store->limits = *limits;
    if (!path && store->limits.bytes > MEMORY_BYTES)
        store->limits.bytes = MEMORY_BYTES;
    store->path = path ? strdup(path) : NULL;
    if (path && !store->path) {
        free(store);
        return NULL;
    }
    return store;
}

static void close_db(struct mokd_usage_store *store)
{
    sqlite3_close(store->db);
    store->db = NULL;
}

void mokd_usage_store_free(struct mokd_usage_store *store)
{
    if (!store)
        return;
    close_db(store);
    free(store->path);
    free(store);
}

/* ------------------------------------------------------------------ opening */

static const char *place(const struct mokd_usage_store *store)
{
    return store->path ? store->path : ":memory:";
}

static int run(const struct mokd_usage_store *store, const char *sql)
{
    return sqlite3_exec(store->db, sql, NULL, NULL, NULL);
}

static int version_of(const struct mokd_usage_store *store, int *ret_version)
{
    _cleanup_statement_ sqlite3_stmt *statement = NULL;

    int r = sqlite3_prepare_v2(store->db, "PRAGMA user_version", -1, &statement, NULL);
    if (r != SQLITE_OK)
        return r;
    r = sqlite3_step(statement);
    if (r != SQLITE_ROW)
        return r == SQLITE_DONE ? SQLITE_CORRUPT : r;
    *ret_version = sqlite3_column_int(statement, 0);
    return SQLITE_OK;
}

/* The journal is emptied and not removed: less work for the disk, and no directory to write. */
static int set_up(struct mokd_usage_store *store)
{
    char sql[512];
    int version = 0;

    sqlite3_busy_timeout(store->db, BUSY_MS);
    int r = version_of(store, &version);
    if (r == SQLITE_OK && version > SCHEMA_VERSION)
        return SQLITE_NOTADB; /* of a newer mokd: its business */
    if (r != SQLITE_OK)
        return r;
    snprintf(sql, sizeof(sql),
             "PRAGMA journal_mode = TRUNCATE; PRAGMA synchronous = NORMAL; PRAGMA page_size = %u;"
             "PRAGMA max_page_count = %llu; PRAGMA cache_size = -512;",
             PAGE_BYTES, (unsigned long long)(store->limits.bytes / PAGE_BYTES));
    r = run(store, sql);
    if (r != SQLITE_OK || version == SCHEMA_VERSION) /* a full disk can be read, and this would write */
        return r;
    snprintf(sql, sizeof(sql), "BEGIN; %s PRAGMA user_version = %d; COMMIT", schema, SCHEMA_VERSION);
    return run(store, sql);
}

static int open_db(struct mokd_usage_store *store)
{
    int flags = SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX | SQLITE_OPEN_EXRESCODE;

    if (store->db)
        return SQLITE_OK;
    int r = sqlite3_open_v2(place(store), &store->db, flags, NULL);
    if (r == SQLITE_OK)
        r = set_up(store);
    if (r != SQLITE_OK)
        close_db(store);
    return r;
}

/* What is no database, or is broken, is kept beside for whoever wants to look. */
static bool put_aside(struct mokd_usage_store *store)
{
    char other[4096];

    close_db(store);
    int length = snprintf(other, sizeof(other), "%s.broken", place(store));
    return store->path && length > 0 && (size_t)length < sizeof(other) && rename(store->path, other) == 0;
}

static bool is_broken(int r)
{
    return (r & 0xff) == SQLITE_NOTADB || (r & 0xff) == SQLITE_CORRUPT;
}

static int fail(const struct mokd_usage_store *store, int r, char *ret_text, size_t size)
{
    snprintf(ret_text, size, "%s: %s", place(store), sqlite3_errstr(r));
    return -MOK_EIO;
}

/* ------------------------------------------------------------------ writing */

static int bind_and_step(sqlite3_stmt *statement, uint64_t start, const struct mokd_usage_count *c)
{
    sqlite3_bind_int64(statement, 1, (sqlite3_int64)start);
    sqlite3_bind_int64(statement, 2, c->uid);
    sqlite3_bind_text(statement, 3, c->job, -1, SQLITE_STATIC);
    sqlite3_bind_text(statement, 4, c->device, -1, SQLITE_STATIC);
    sqlite3_bind_int64(statement, 5, (sqlite3_int64)c->device_ns);
    sqlite3_bind_int64(statement, 6, (sqlite3_int64)c->ops);
    sqlite3_bind_int64(statement, 7, (sqlite3_int64)c->rows);
    sqlite3_bind_int64(statement, 8, (sqlite3_int64)c->byte_seconds);
    int r = sqlite3_step(statement);
    sqlite3_reset(statement);
    return r == SQLITE_DONE ? SQLITE_OK : r;
}

static int insert_all(struct mokd_usage_store *store, uint64_t now_s, const struct mokd_usage_count *list, size_t count)
{
    _cleanup_statement_ sqlite3_stmt *statement = NULL;
    uint64_t start = now_s - now_s % MOKD_USAGE_BUCKET_S;

    int r = sqlite3_prepare_v2(store->db, upsert, -1, &statement, NULL);
    for (size_t i = 0; r == SQLITE_OK && i < count; i++)
        r = bind_and_step(statement, start, &list[i]);
    return r;
}

static uint64_t pragma_number(const struct mokd_usage_store *store, const char *sql)
{
    _cleanup_statement_ sqlite3_stmt *statement = NULL;

    if (sqlite3_prepare_v2(store->db, sql, -1, &statement, NULL) != SQLITE_OK || sqlite3_step(statement) != SQLITE_ROW)
        return 0;
    return (uint64_t)sqlite3_column_int64(statement, 0);
}

/* The oldest tenth goes while nine tenths of the room are taken; what is older than it may be goes once an hour. */
static int prune(struct mokd_usage_store *store, uint64_t now_s)
{
    uint64_t pages = pragma_number(store, "PRAGMA page_count"), unused = pragma_number(store, "PRAGMA freelist_count");
    uint64_t oldest = (uint64_t)store->limits.days * 86400u;
    char sql[256];

    if ((pages - unused) * PAGE_BYTES > store->limits.bytes / 10 * 9) {
        int r = run(store, "DELETE FROM usage WHERE start <= (SELECT start FROM usage ORDER BY start LIMIT 1 OFFSET"
                           " (SELECT COUNT(*) / 10 FROM usage))");
        if (r != SQLITE_OK)
            return r;
    }
    if (now_s < oldest || now_s - store->pruned_s < 3600)
        return SQLITE_OK;
    store->pruned_s = now_s;
    snprintf(sql, sizeof(sql), "DELETE FROM usage WHERE start < %llu", (unsigned long long)(now_s - oldest));
    return run(store, sql);
}

static int add(struct mokd_usage_store *store, uint64_t now_s, const struct mokd_usage_count *list, size_t count)
{
    int r = open_db(store);
    if (r == SQLITE_OK)
        r = run(store, "BEGIN IMMEDIATE");
    if (r != SQLITE_OK)
        return r;
    r = prune(store, now_s);
    if (r == SQLITE_OK)
        r = insert_all(store, now_s, list, count);
    if (r == SQLITE_OK)
        r = run(store, "COMMIT");
    if (r != SQLITE_OK) {
        run(store, "ROLLBACK");
        if (store->path) /* whatever went wrong, the next try begins anew */
            close_db(store);
    }
    return r;
}

int mokd_usage_store_add(struct mokd_usage_store *store, uint64_t now_s, const struct mokd_usage_count *list,
                         size_t count, bool *ret_aside, char *ret_text, size_t size)
{
    int r = add(store, now_s, list, count);

    *ret_aside = is_broken(r) && put_aside(store);
    if (*ret_aside)
        r = add(store, now_s, list, count);
    return r == SQLITE_OK ? 0 : fail(store, r, ret_text, size);
}

/* ------------------------------------------------------------------ asking */

static bool same_row(const struct mokd_usage_count *a, const struct mokd_usage_count *b, enum mokd_usage_by by)
{
    bool user = by != MOKD_USAGE_DEVICE, job = by == MOKD_USAGE_JOB || by == MOKD_USAGE_ALL;
    bool device = by == MOKD_USAGE_DEVICE || by == MOKD_USAGE_ALL;

    return (!user || a->uid == b->uid) && (!job || strcmp(a->job, b->job) == 0) &&
           (!device || strcmp(a->device, b->device) == 0);
}

static struct mokd_usage_count *room_for_one(struct mokd_usage_answer *answer)
{
    if (answer->count % 64 == 0) {
        struct mokd_usage_count *larger = reallocarray(answer->list, answer->count + 64, sizeof(*larger));
        if (!larger)
            return NULL;
        answer->list = larger;
    }
    return &answer->list[answer->count++];
}

static uint64_t sum(uint64_t a, uint64_t b)
{
    return __builtin_add_overflow(a, b, &a) ? UINT64_MAX : a;
}

static int append(const struct mokd_usage_count *count, enum mokd_usage_by by, struct mokd_usage_answer *answer)
{
    struct mokd_usage_count *row = room_for_one(answer);

    if (!row)
        return -MOK_ENOMEM;
    *row = *count;
    if (by == MOKD_USAGE_DEVICE)
        row->uid = UINT32_MAX;
    if (by == MOKD_USAGE_DEVICE || by == MOKD_USAGE_USER)
        row->job[0] = '\0';
    if (by == MOKD_USAGE_USER || by == MOKD_USAGE_JOB)
        row->device[0] = '\0';
    return 0;
}

static int add_to_row(const struct mokd_usage_count *count, enum mokd_usage_by by, struct mokd_usage_answer *answer)
{
    for (size_t i = 0; i < answer->count; i++) {
        struct mokd_usage_count *row = &answer->list[i];
        if (!same_row(row, count, by))
            continue;
        row->device_ns = sum(row->device_ns, count->device_ns);
        row->ops = sum(row->ops, count->ops);
        row->rows = sum(row->rows, count->rows);
        row->byte_seconds = sum(row->byte_seconds, count->byte_seconds);
        return 0;
    }
    return append(count, by, answer);
}

/* A double: the sum over years of many gigabytes does not fit the integers of the database. */
static uint64_t from_double(double value)
{
    return value >= 18446744073709549568.0 ? UINT64_MAX : value <= 0 ? 0 : (uint64_t)value;
}

static void take_text(sqlite3_stmt *statement, int column, char *ret, size_t size)
{
    const char *text = (const char *)sqlite3_column_text(statement, column);
    snprintf(ret, size, "%s", text ? text : "");
}

static const char *const groupings[] = {
    [MOKD_USAGE_ALL] = "uid, job, device",
    [MOKD_USAGE_USER] = "uid",
    [MOKD_USAGE_JOB] = "uid, job",
    [MOKD_USAGE_DEVICE] = "device",
};

static int select_rows(struct mokd_usage_store *store, const struct mokd_usage_question *question,
                       struct mokd_usage_answer *answer)
{
    _cleanup_statement_ sqlite3_stmt *statement = NULL;
    char sql[512];

    snprintf(sql, sizeof(sql),
             "SELECT uid, job, device, TOTAL(device_ns) AS time, TOTAL(ops), TOTAL(rows), TOTAL(byte_seconds),"
             " COUNT(*) OVER () FROM usage WHERE start >= ?1 AND (?2 OR uid = ?3) GROUP BY %s"
             " ORDER BY time DESC LIMIT %u",
             groupings[question->by], MAX_ROWS);
    int r = sqlite3_prepare_v2(store->db, sql, -1, &statement, NULL);
    if (r != SQLITE_OK)
        return r;
    sqlite3_bind_int64(statement, 1, (sqlite3_int64)(question->since_s - question->since_s % MOKD_USAGE_BUCKET_S));
    sqlite3_bind_int(statement, 2, !question->one_user);
    sqlite3_bind_int64(statement, 3, question->uid);
    while ((r = sqlite3_step(statement)) == SQLITE_ROW) {
        struct mokd_usage_count count = { .uid = (uint32_t)sqlite3_column_int64(statement, 0) };
        take_text(statement, 1, count.job, sizeof(count.job));
        take_text(statement, 2, count.device, sizeof(count.device));
        count.device_ns = from_double(sqlite3_column_double(statement, 3));
        count.ops = from_double(sqlite3_column_double(statement, 4));
        count.rows = from_double(sqlite3_column_double(statement, 5));
        count.byte_seconds = from_double(sqlite3_column_double(statement, 6));
        if (append(&count, question->by, answer) < 0)
            return SQLITE_NOMEM;
        answer->beyond = (size_t)sqlite3_column_int64(statement, 7) - answer->count;
    }
    return r == SQLITE_DONE ? SQLITE_OK : r;
}

static int most_time_first(const void *a, const void *b)
{
    const struct mokd_usage_count *x = a, *y = b;

    if (x->device_ns != y->device_ns)
        return x->device_ns < y->device_ns ? 1 : -1;
    if (x->uid != y->uid)
        return x->uid < y->uid ? -1 : 1;
    int r = strcmp(x->job, y->job);
    return r ? r : strcmp(x->device, y->device);
}

static void name_users(struct mokd_usage_answer *answer)
{
    char buffer[4096];

    for (size_t i = 0; i < answer->count; i++) {
        struct mokd_usage_count *row = &answer->list[i];
        struct passwd entry, *found = NULL;
        size_t same = 0;
        row->user[0] = '\0';
        if (row->uid == UINT32_MAX)
            continue;
        while (answer->list[same].uid != row->uid)
            same++;
        if (same < i) {
            memcpy(row->user, answer->list[same].user, sizeof(row->user));
            continue;
        }
        if (getpwuid_r(row->uid, &entry, buffer, sizeof(buffer), &found) == 0 && found)
            snprintf(row->user, sizeof(row->user), "%s", found->pw_name);
        else
            snprintf(row->user, sizeof(row->user), "%u", row->uid);
    }
}

int mokd_usage_store_ask(struct mokd_usage_store *store, const struct mokd_usage_question *question,
                         struct mokd_usage_answer *ret, char *ret_text, size_t size)
{
    struct mokd_usage_answer answer = { 0 };

    int r = open_db(store);
    if (r == SQLITE_OK)
        r = select_rows(store, question, &answer);
    for (size_t i = 0; r == SQLITE_OK && i < question->n_more; i++)
        if (!question->one_user || question->more[i].uid == question->uid)
            r = add_to_row(&question->more[i], question->by, &answer) < 0 ? SQLITE_NOMEM : SQLITE_OK;
    if (r != SQLITE_OK) {
        free(answer.list);
        return r == SQLITE_NOMEM ? -MOK_ENOMEM : fail(store, r, ret_text, size);
    }
    answer.kept_since_s = pragma_number(store, "SELECT MIN(start) FROM usage");
    if (answer.count > 0)
        qsort(answer.list, answer.count, sizeof(*answer.list), most_time_first);
    name_users(&answer);
    *ret = answer;
    return 0;
}
