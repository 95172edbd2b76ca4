/* SPDX-License-Identifier: Apache-2.0 */
#include "usage.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "device.h"
#include "job_totals.h"
#include "usage_store.h"

#define FLUSH_MS 10000u
/* Rows in memory: beyond, what is not in use any more is counted as job OTHER of its user and device. */
#define MAX_ROWS 4096u
#define OTHER "(other)"
/*
 * Names of jobs that a user has rows for in one step of the store: beyond, what he does is counted as job OTHER. Names
 * are his to make up, and every row is room in the file that others' rows have to make.
 */
#define MAX_NAMES 64u
#define MAX_NAMERS 256u
#define ANSWER_BYTES (MOK_WIRE_MAX_BYTES - 4096u)
#define MAX_QUESTIONS 64u

struct mokd_usage_row {
    TAILQ_ENTRY(mokd_usage_row) link;
    struct mokd_usage *usage;
    unsigned refs; /* sessions' queues and memory */
    uint64_t bytes, since_ns;
    unsigned __int128 byte_ns;
    struct mokd_usage_count count; /* not written yet; byte_seconds is made of byte_ns */
};

struct question {
    TAILQ_ENTRY(question) link;
    struct mokd_call call;
    struct mokd_usage_question ask;
    struct mokd_usage_answer answer;
    int code;
    char text[MOKD_TEXT_MAX];
};
TAILQ_HEAD(questions, question);

/* Hashes of the names that a user has had in one step. */
struct namer {
    uint32_t uid, count;
    uint64_t step;
    uint64_t name[MAX_NAMES];
};

struct mokd_usage {
    struct mokd_server *server;
    struct namer *namers; /* MAX_NAMERS, those of the latest steps; NULL: there was no memory */
    struct mokd_usage_store *store;
    uv_timer_t timer;
    bool timer_closed;
    TAILQ_HEAD(, mokd_usage_row) rows;
    size_t n_rows;
    bool failing; /* the last write did not succeed: said once */
    struct questions waiting;
    size_t n_waiting;
    /* One at a time, of the work thread while `busy`. */
    uv_work_t work;
    bool busy;
    struct mokd_usage_count *batch;
    size_t n_batch;
    struct questions asked;
    int result;
    bool aside;
    char text[MOKD_TEXT_MAX];
};

/* ------------------------------------------------------------------ counting */

static void advance(struct mokd_usage_row *row)
{
    uint64_t now = mok_now_ns();

    row->byte_ns += (unsigned __int128)row->bytes * (now - row->since_ns);
    row->since_ns = now;
}

static bool is_empty(const struct mokd_usage_row *row)
{
    const struct mokd_usage_count *c = &row->count;

    return c->device_ns == 0 && c->ops == 0 && c->rows == 0 && row->byte_ns == 0 && row->bytes == 0;
}

static struct mokd_usage_row *find(struct mokd_usage *usage, uint32_t uid, const char *job, const char *device)
{
    struct mokd_usage_row *row;

    TAILQ_FOREACH(row, &usage->rows, link)
        if (row->count.uid == uid && strcmp(row->count.job, job) == 0 && strcmp(row->count.device, device) == 0)
            return row;
    return NULL;
}

static struct mokd_usage_row *find_or_make(struct mokd_usage *usage, uint32_t uid, const char *job, const char *device)
{
    struct mokd_usage_row *row = find(usage, uid, job, device);

    if (row)
        return row;
    row = calloc(1, sizeof(*row));
    if (!row)
        return NULL;
    row->usage = usage;
    row->since_ns = mok_now_ns();
    row->count.uid = uid;
    snprintf(row->count.job, sizeof(row->count.job), "%s", job);
    snprintf(row->count.device, sizeof(row->count.device), "%s", device);
    TAILQ_INSERT_HEAD(&usage->rows, row, link);
    usage->n_rows++;
    return row;
}

static void row_free(struct mokd_usage_row *row)
{
    TAILQ_REMOVE(&row->usage->rows, row, link);
    row->usage->n_rows--;
    free(row);
}

static void add_count(struct mokd_usage_row *row, const struct mokd_usage_count *count)
{
    row->count.device_ns += count->device_ns;
    row->count.ops += count->ops;
    row->count.rows += count->rows;
    row->byte_ns += (unsigned __int128)count->byte_seconds * 1000000000u;
}

/* Only while the disk does not take them do rows of ended jobs pile up; job names are the clients' to make up. */
static void fold(struct mokd_usage_row *row)
{
    struct mokd_usage_row *other = find_or_make(row->usage, row->count.uid, OTHER, row->count.device);

    if (!other || other == row)
        return;
    add_count(other, &row->count);
    other->byte_ns += row->byte_ns;
    row_free(row);
}

static uint64_t hash_of(const char *text)
{
    uint64_t hash = UINT64_C(14695981039346656037);

    for (; *text; text++)
        hash = (hash ^ (uint8_t)*text) * UINT64_C(1099511628211);
    return hash;
}

static struct namer *namer_of(struct mokd_usage *usage, uint32_t uid)
{
    uint64_t step = (uint64_t)time(NULL) / MOKD_USAGE_BUCKET_S;
    struct namer *oldest = &usage->namers[0];

    for (size_t i = 0; i < MAX_NAMERS; i++) {
        struct namer *namer = &usage->namers[i];
        if (namer->step == step && namer->uid == uid)
            return namer;
        oldest = namer->step < oldest->step ? namer : oldest;
    }
    *oldest = (struct namer){ .uid = uid, .step = step };
    return oldest;
}

/* The name that a job's row has: its own, or that of all of his that are too many. */
static const char *name_for(struct mokd_usage *usage, uint32_t uid, const char *job)
{
    if (!usage->namers)
        usage->namers = calloc(MAX_NAMERS, sizeof(*usage->namers));
    struct namer *namer = usage->namers ? namer_of(usage, uid) : NULL;
    uint64_t hash = hash_of(job);

    for (uint32_t i = 0; namer && i < namer->count; i++)
        if (namer->name[i] == hash)
            return job;
    if (!namer || namer->count == MAX_NAMES)
        return OTHER;
    namer->name[namer->count++] = hash;
    return job;
}

struct mokd_usage_row *mokd_usage_ref(const struct mokd_session *session, const struct mokd_device *device)
{
    struct mokd_usage *usage = session->server->usage;

    if (!usage)
        return NULL;
    const char *job = name_for(usage, session->peer.uid, session->job);
    struct mokd_usage_row *row = find_or_make(usage, session->peer.uid, job, device->config->name);
    if (row)
        row->refs++;
    return row;
}

void mokd_usage_unref(struct mokd_usage_row *row)
{
    if (!row || --row->refs > 0)
        return;
    advance(row);
    if (is_empty(row))
        row_free(row);
    else if (row->usage->n_rows > MAX_ROWS)
        fold(row);
}

void mokd_usage_work(struct mokd_usage_row *row, uint64_t ops, uint64_t rows, uint64_t device_ns)
{
    if (!row)
        return;
    row->count.ops += ops;
    row->count.rows += rows;
    row->count.device_ns += device_ns;
}

void mokd_usage_hold_bytes(struct mokd_usage_row *row, uint64_t bytes)
{
    if (!row)
        return;
    advance(row);
    row->bytes += bytes;
}

void mokd_usage_free_bytes(struct mokd_usage_row *row, uint64_t bytes)
{
    if (!row)
        return;
    advance(row);
    row->bytes -= bytes;
}

/* ------------------------------------------------------------------ writing and asking, in a work thread */

/* Takes what has been counted out of the rows. Without memory it stays there. */
static void make_batch(struct mokd_usage *usage)
{
    struct mokd_usage_row *row, *next;

    mokd_job_totals_take_all(usage->server);
    usage->n_batch = 0;
    usage->batch = calloc(usage->n_rows ? usage->n_rows : 1, sizeof(*usage->batch));
    if (!usage->batch)
        return;
    for (row = TAILQ_FIRST(&usage->rows); row; row = next) {
        struct mokd_usage_count *count = &usage->batch[usage->n_batch];
        next = TAILQ_NEXT(row, link);
        advance(row);
        *count = row->count;
        count->byte_seconds = (uint64_t)(row->byte_ns / 1000000000u);
        if (count->device_ns == 0 && count->ops == 0 && count->rows == 0 && count->byte_seconds == 0)
            continue;
        usage->n_batch++;
        row->byte_ns -= (unsigned __int128)count->byte_seconds * 1000000000u;
        row->count.device_ns = row->count.ops = row->count.rows = 0;
        if (row->refs == 0)
            row_free(row);
    }
}

static void give_back_batch(struct mokd_usage *usage)
{
    for (size_t i = 0; i < usage->n_batch; i++) {
        const struct mokd_usage_count *count = &usage->batch[i];
        struct mokd_usage_row *row = find_or_make(usage, count->uid, count->job, count->device);
        if (!row)
            continue; /* no memory either */
        add_count(row, count);
        if (row->refs == 0 && usage->n_rows > MAX_ROWS)
            fold(row);
    }
}

static void write_and_ask(uv_work_t *work)
{
    struct mokd_usage *usage = work->data;
    struct question *question;

    usage->aside = false;
    usage->result = usage->n_batch == 0
                        ? 0
                        : mokd_usage_store_add(usage->store, (uint64_t)time(NULL), usage->batch, usage->n_batch,
                                               &usage->aside, usage->text, sizeof(usage->text));
    TAILQ_FOREACH(question, &usage->asked, link) {
        question->ask.more = usage->result < 0 ? usage->batch : NULL;
        question->ask.n_more = usage->result < 0 ? usage->n_batch : 0;
        question->code = mokd_usage_store_ask(usage->store, &question->ask, &question->answer, question->text,
                                              sizeof(question->text));
    }
}

static void say_how_it_went(struct mokd_usage *usage)
{
    char clean[MOKD_TEXT_MAX];

    if (usage->aside)
        mok_log(MOK_LOG_ERROR, "usage", "the store was broken: it is put aside and another one begun", NULL);
    if (usage->result < 0 && !usage->failing)
        mok_log(MOK_LOG_ERROR, "usage", "cannot be written, is kept in memory and tried again", "error=\"%s\"",
                mok_log_text(clean, sizeof(clean), usage->text));
    if (usage->result == 0 && usage->failing && usage->n_batch > 0)
        mok_log(MOK_LOG_NOTICE, "usage", "is written again", NULL);
    if (usage->n_batch > 0)
        usage->failing = usage->result < 0;
}

static void answer_question(struct question *question);
static void begin(struct mokd_usage *usage);

static void done(uv_work_t *work, int status)
{
    struct mokd_usage *usage = work->data;
    struct question *question;

    if (status < 0)
        usage->result = -MOK_EIO;
    say_how_it_went(usage);
    if (usage->result < 0)
        give_back_batch(usage);
    free(usage->batch);
    usage->batch = NULL;
    usage->n_batch = 0;
    usage->busy = false;
    while ((question = TAILQ_FIRST(&usage->asked))) {
        TAILQ_REMOVE(&usage->asked, question, link);
        if (status < 0)
            question->code = -MOK_EIO;
        answer_question(question);
    }
    if (!TAILQ_EMPTY(&usage->waiting))
        begin(usage);
}

static void begin(struct mokd_usage *usage)
{
    if (usage->busy)
        return;
    make_batch(usage);
    if (usage->n_batch == 0 && TAILQ_EMPTY(&usage->waiting)) {
        free(usage->batch);
        usage->batch = NULL;
        return;
    }
    TAILQ_CONCAT(&usage->asked, &usage->waiting, link);
    usage->n_waiting = 0;
    usage->busy = true;
    usage->work.data = usage;
    if (uv_queue_work(&usage->server->loop, &usage->work, write_and_ask, done) < 0)
        done(&usage->work, UV_ECANCELED);
}

static void on_timer(uv_timer_t *timer)
{
    begin(timer->data);
}

/* ------------------------------------------------------------------ questions */

static void send_answer(struct question *question)
{
    const struct mokd_usage_answer *answer = &question->answer;
    size_t count = answer->count, bytes = 0;
    _cleanup_free_ Mok__UsageRow *rows = calloc(count ? count : 1, sizeof(*rows));
    _cleanup_free_ Mok__UsageRow **pointers = calloc(count ? count : 1, sizeof(*pointers));
    Mok__UsageReply body = MOK__USAGE_REPLY__INIT;
    Mok__Reply reply = MOK__REPLY__INIT;

    for (size_t i = 0; rows && pointers && i < count; i++) {
        Mok__UsageRow *row = &rows[body.n_row];
        *row = (Mok__UsageRow)MOK__USAGE_ROW__INIT;
        row->uid = answer->list[i].uid;
        row->user = answer->list[i].user;
        row->job = answer->list[i].job;
        row->device = answer->list[i].device;
        row->device_ns = answer->list[i].device_ns;
        row->ops = answer->list[i].ops;
        row->rows = answer->list[i].rows;
        row->byte_seconds = answer->list[i].byte_seconds;
        bytes += mok__usage_row__get_packed_size(row) + 8;
        if (bytes > ANSWER_BYTES)
            break;
        pointers[body.n_row++] = row;
    }
    body.row = pointers;
    body.omitted = (uint32_t)(count - body.n_row + answer->beyond);
    body.since_s = question->ask.since_s - question->ask.since_s % MOKD_USAGE_BUCKET_S;
    body.kept_since_s = answer->kept_since_s;
    reply.body_case = MOK__REPLY__BODY_USAGE;
    reply.usage = &body;
    mokd_call_reply(&question->call, &reply, NULL, 0);
}

static void answer_question(struct question *question)
{
    struct mokd_error error = { 0 };

    if (question->code < 0) {
        mokd_error_set(&error, question->code, "usage: %s", question->text[0] ? question->text : "cannot be read");
        mokd_call_fail(&question->call, &error);
    } else {
        send_answer(question);
    }
    free(question->answer.list);
    free(question);
}

void mokd_usage_query(struct mokd_session *session, uint64_t id, const Mok__UsageQuery *request)
{
    struct mokd_usage *usage = session->server->usage;
    struct mokd_error error = { 0 };
    struct question *question = NULL;

    if (request->by > MOK__USAGE_BY__USAGE_BY_DEVICE)
        mokd_error_set(&error, -MOK_ERANGE, "by = %u: must be in 0..%d", request->by, MOK__USAGE_BY__USAGE_BY_DEVICE);
    else if (request->since_s > INT64_MAX)
        mokd_error_set(&error, -MOK_ERANGE, "since_s = %" PRIu64 ": must be in 0..%" PRId64, request->since_s,
                       INT64_MAX);
    else if (usage && usage->n_waiting >= MAX_QUESTIONS)
        mokd_error_set(&error, -MOK_EBUSY, "usage: %u questions wait already", MAX_QUESTIONS);
    else if (!usage || !(question = calloc(1, sizeof(*question))))
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
    if (!question) {
        mokd_session_refuse(session, id, &error);
        return;
    }
    question->ask.since_s = request->since_s;
    question->ask.by = (enum mokd_usage_by)request->by;
    question->ask.one_user = !mokd_session_is_admin(session);
    question->ask.uid = session->peer.uid;
    question->call = mokd_call_begin(session, id);
    TAILQ_INSERT_TAIL(&usage->waiting, question, link);
    usage->n_waiting++;
    begin(usage);
}

/* ------------------------------------------------------------------ life */

int mokd_usage_open(struct mokd_server *server, const char *dir)
{
    struct mokd_usage_limits limits = { .days = server->config->usage_days, .bytes = server->config->usage_bytes };
    struct mokd_usage *usage = calloc(1, sizeof(*usage));
    char path[4096];

    if (!usage)
        return -MOK_ENOMEM;
    snprintf(path, sizeof(path), "%s/usage.db", dir ? dir : "");
    usage->store = mokd_usage_store_new(dir && *dir ? path : NULL, &limits);
    if (!usage->store) {
        free(usage);
        return -MOK_ENOMEM;
    }
    usage->server = server;
    TAILQ_INIT(&usage->rows);
    TAILQ_INIT(&usage->waiting);
    TAILQ_INIT(&usage->asked);
    uv_timer_init(&server->loop, &usage->timer);
    usage->timer.data = usage;
    uv_timer_start(&usage->timer, on_timer, FLUSH_MS, FLUSH_MS);
    server->usage = usage;
    return 0;
}

void mokd_usage_stop(struct mokd_server *server)
{
    if (!server->usage || server->usage->timer_closed)
        return;
    server->usage->timer_closed = true;
    uv_close((uv_handle_t *)&server->usage->timer, NULL);
}

void mokd_usage_close(struct mokd_server *server)
{
    struct mokd_usage *usage = server->usage;
    struct mokd_usage_row *row;

    if (!usage)
        return;
    make_batch(usage);
    usage->work.data = usage;
    write_and_ask(&usage->work);
    say_how_it_went(usage);
    free(usage->batch);
    while ((row = TAILQ_FIRST(&usage->rows)))
        row_free(row);
    mokd_usage_store_free(usage->store);
    free(usage->namers);
    free(usage);
    server->usage = NULL;
}
