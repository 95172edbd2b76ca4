/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_share.h"

#include <stdio.h>
#include <string.h>

#include "client_queue.h"
#include "device.h"
#include "job_totals.h"
#include "names.h"
#include "rack/frame.h"
#include "session.h"

#define REPORT_MS 200u
/* Reports say everything: often enough for a peer that missed one, which the mesh does not let happen. */
#define SILENT_REPORTS 25u
/* Of one peer; users beyond them count there alone. */
#define MAX_ENTRIES 4096u
/* Bytes of a message; a report may take several. */
#define PART_BYTES 32768u

/* What a user, one of his jobs, or the members of a Unix group, have on another node. */
struct entry {
    bool group;
    uint32_t id;
    char name[MOK_MAX_NAME + 1]; /* "": not known */
    char job[MOK_MAX_NAME + 1];  /* "": all that is his; else what his sessions of that name have used */
    uint64_t amount[MOKD_RESOURCES];
    uint64_t device_ns;
};

struct entries {
    struct entry *list;
    size_t count, room;
};

struct peer {
    struct entries now;
    struct entries
        next; /* the latest report, not looked at yet: so that who sends many costs no more than who sends one */
    struct entries coming; /* of the report whose parts are arriving */
    bool fresh;            /* there is a next one */
};

struct mokd_rack_share {
    struct mokd_server *server;
    uv_timer_t timer;
    struct peer peer[RACK_MAX_NODES];
    uint64_t said; /* hash of the last report */
    unsigned quiet;
};

static uint64_t plus(uint64_t a, uint64_t b)
{
    uint64_t sum;

    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

/* ------------------------------------------------------------------ counting what is elsewhere */

/* The same number may be another person on another node; then it is not he. */
static bool is_about(const struct entry *entry, bool group, uint32_t id, const char *name)
{
    char number[16];

    if (entry->group != group || entry->id != id)
        return false;
    snprintf(number, sizeof(number), "%u", id);
    return !entry->name[0] || strcmp(name, number) == 0 || strcmp(entry->name, name) == 0;
}

static void sum(const struct mokd_rack_share *share, bool group, uint32_t id, const char *name, uint64_t *ret)
{
    memset(ret, 0, MOKD_RESOURCES * sizeof(*ret));
    for (uint32_t node = 0; node < RACK_MAX_NODES; node++) {
        const struct entries *entries = &share->peer[node].now;
        for (size_t i = 0; i < entries->count; i++)
            for (int r = 0;
                 r < MOKD_RESOURCES && !entries->list[i].job[0] && is_about(&entries->list[i], group, id, name); r++)
                ret[r] =
                    r == MOKD_DESCRIPTORS ? 0 : plus(ret[r], entries->list[i].amount[r]); /* those are mokd's own */
    }
}

void mokd_rack_share_user(struct mokd_user *user)
{
    if (user->server->rack_share)
        sum(user->server->rack_share, false, user->uid, user->name, user->elsewhere);
}

void mokd_rack_share_pool(struct mokd_server *server, struct mokd_pool *pool)
{
    if (server->rack_share)
        sum(server->rack_share, true, pool->gid, pool->name, pool->elsewhere);
}

static void sum_all(struct mokd_server *server)
{
    struct mokd_user *user;
    struct mokd_pool *pool;

    TAILQ_FOREACH(user, &server->users, link)
        mokd_rack_share_user(user);
    TAILQ_FOREACH(pool, &server->pools, link)
        mokd_rack_share_pool(server, pool);
}

/* ------------------------------------------------------------------ device time */

static bool has_queue(const struct mokd_device *device, const struct mokd_user *user)
{
    const struct mokd_queue *queue;

    TAILQ_FOREACH(queue, &device->queues, device_link)
        if (queue->session->user == user)
            return true;
    return false;
}

/* Workers charge it to the sessions of that job, as far as they are compared with others of the user. */
static void charge_job(struct mokd_session *session, uint64_t ns)
{
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerShare body;
    const struct mokd_queue *queue;

    mokd_user_claim(session->user, &body);
    body.elsewhere_ns = ns;
    request.body_case = MOK__WORKER_REQUEST__BODY_SHARE;
    request.share = &body;
    TAILQ_FOREACH(queue, &session->queues, link) {
        body.queue = queue->id;
        if (queue->open)
            mokd_device_send(queue->device, &request, NULL, 0, MOKD_WORKER_TIMEOUT_MS, NULL, NULL, 0);
    }
}

/* Workers where he has something to run charge him for it. */
static void charge(struct mokd_user *user, uint64_t ns)
{
    struct mokd_server *server = user->server;
    Mok__WorkerRequest request = MOK__WORKER_REQUEST__INIT;
    Mok__WorkerShare body;

    mokd_user_claim(user, &body);
    body.elsewhere_ns = ns;
    request.body_case = MOK__WORKER_REQUEST__BODY_SHARE;
    request.share = &body;
    for (size_t i = 0; i < server->n_devices; i++)
        if (has_queue(server->devices[i], user))
            mokd_device_send(server->devices[i], &request, NULL, 0, MOKD_WORKER_TIMEOUT_MS, NULL, NULL, 0);
}

static const struct entry *find(const struct entries *entries, bool group, uint32_t id, const char *job)
{
    for (size_t i = 0; i < entries->count; i++)
        if (entries->list[i].group == group && entries->list[i].id == id && strcmp(entries->list[i].job, job) == 0)
            return &entries->list[i];
    return NULL;
}

/* What a user or a job of his has used there since the report before; one who was not in that begins to be counted. */
static uint64_t used_since(const struct entries *before, const struct entries *now, const struct mokd_user *user,
                           const char *job)
{
    const struct entry *entry = find(now, false, user->uid, job), *old = find(before, false, user->uid, job);

    if (!entry || !old || entry->device_ns <= old->device_ns || !is_about(entry, false, user->uid, user->name))
        return 0;
    return entry->device_ns - old->device_ns;
}

static void charge_all(struct mokd_server *server, const struct entries *before, const struct entries *now)
{
    struct mokd_user *user;
    struct mokd_session *session;
    uint64_t ns;

    TAILQ_FOREACH(user, &server->users, link) {
        ns = used_since(before, now, user, "");
        if (ns > 0)
            charge(user, ns);
    }
    TAILQ_FOREACH(session, &server->sessions, link) {
        ns = session->user && session->job[0] ? used_since(before, now, session->user, session->job) : 0;
        if (ns > 0)
            charge_job(session, ns);
    }
}

/* ------------------------------------------------------------------ reports of others */

static void entries_clear(struct entries *entries)
{
    free(entries->list);
    *entries = (struct entries){ 0 };
}

static struct entry *entries_add(struct entries *entries)
{
    if (entries->count == entries->room) {
        size_t room = entries->room ? 2 * entries->room : 16;
        struct entry *list = room <= MAX_ENTRIES ? realloc(entries->list, room * sizeof(*list)) : NULL;
        if (!list)
            return NULL;
        entries->list = list;
        entries->room = room;
    }
    entries->list[entries->count] = (struct entry){ 0 };
    return &entries->list[entries->count++];
}

/* Whether it is there already is not looked for: who says it twice could as well say twice as much. */
static void take(struct entries *entries, const Mok__RackUserUse *from)
{
    if ((from->name[0] && !mok_name_is_valid(from->name)) || (from->job[0] && !mok_name_is_valid(from->job)))
        return;
    struct entry *entry = entries_add(entries);
    if (!entry)
        return;
    entry->group = from->group;
    entry->id = from->uid;
    entry->device_ns = from->device_ns;
    snprintf(entry->name, sizeof(entry->name), "%s", from->name);
    snprintf(entry->job, sizeof(entry->job), "%s", from->job);
    for (size_t i = 0; i < from->n_amount && i < MOKD_RESOURCES; i++)
        entry->amount[i] = from->amount[i];
}

void mokd_rack_share_report(struct mokd_server *server, uint32_t node, const Mok__RackUse *report)
{
    struct mokd_rack_share *share = server->rack_share;

    if (!share || node >= RACK_MAX_NODES)
        return;
    struct peer *peer = &share->peer[node];
    if (report->part == 0)
        entries_clear(&peer->coming);
    for (size_t i = 0; i < report->n_user; i++)
        take(&peer->coming, report->user[i]);
    if (!report->last)
        return;
    entries_clear(&peer->next);
    peer->next = peer->coming;
    peer->coming = (struct entries){ 0 };
    peer->fresh = true;
}

static void look_at_reports(struct mokd_rack_share *share)
{
    bool any = false;

    for (uint32_t node = 0; node < RACK_MAX_NODES; node++) {
        struct peer *peer = &share->peer[node];
        if (!peer->fresh)
            continue;
        charge_all(share->server, &peer->now, &peer->next);
        entries_clear(&peer->now);
        peer->now = peer->next;
        peer->next = (struct entries){ 0 };
        peer->fresh = false;
        any = true;
    }
    if (any)
        sum_all(share->server);
}

static void peer_clear(struct peer *peer)
{
    entries_clear(&peer->now);
    entries_clear(&peer->next);
    entries_clear(&peer->coming);
    peer->fresh = false;
}

void mokd_rack_share_peer_down(struct mokd_server *server, uint32_t node)
{
    struct mokd_rack_share *share = server->rack_share;

    if (!share || node >= RACK_MAX_NODES)
        return;
    peer_clear(&share->peer[node]);
    sum_all(server);
}

void mokd_rack_share_peer_up(struct mokd_server *server)
{
    if (server->rack_share)
        server->rack_share->quiet = SILENT_REPORTS; /* it is told with the next turn */
}

/* ------------------------------------------------------------------ our reports */

struct line {
    Mok__RackUserUse body;
    uint64_t amount[MOKD_RESOURCES];
};

static void fill(struct line *line, bool group, uint32_t id, const char *name, const uint64_t *used, uint64_t device_ns)
{
    char number[16];

    snprintf(number, sizeof(number), "%u", id);
    line->body = (Mok__RackUserUse)MOK__RACK_USER_USE__INIT;
    line->body.group = group;
    line->body.uid = id;
    if (strcmp(name, number) != 0 && mok_name_is_valid(name))
        line->body.name = (char *)name;
    line->body.device_ns = device_ns;
    memcpy(line->amount, used, sizeof(line->amount));
    line->body.n_amount = MOKD_RESOURCES;
    line->body.amount = line->amount;
}

/* Jobs that share an entry, because there are many, are nobody's in particular. */
static bool is_of_one_job(const struct mokd_job_total *total)
{
    return total->uid != MOKD_JOB_TOTALS_NOBODY && mok_name_is_valid(total->job) &&
           strcmp(total->job, MOKD_JOB_TOTALS_OTHER) != 0;
}

static void fill_job(struct line *line, const struct mokd_job_total *total)
{
    static const uint64_t nothing[MOKD_RESOURCES];

    fill(line, false, total->uid, total->user, nothing, total->device_ns);
    line->body.n_amount = 0;
    line->body.job = (char *)total->job;
}

static void send_part(struct mokd_rack_share *share, Mok__RackUse *report)
{
    Mok__RackFrame frame = MOK__RACK_FRAME__INIT;
    struct rack_node_info info;

    frame.body_case = MOK__RACK_FRAME__BODY_USE;
    frame.use = report;
    for (uint32_t node = 0; node < RACK_MAX_NODES; node++)
        if (rack_info(share->server->rack, node, &info) == 0 && !info.self && info.protocol >= RACK_PROTOCOL_SHARED)
            rack_send(share->server->rack, node, &frame, 0); /* who is not up, or has too much to read, gets the next */
}

static void send_all(struct mokd_rack_share *share, Mok__RackUserUse **lines, size_t count)
{
    size_t first = 0;
    uint32_t part = 0;

    do {
        Mok__RackUse report = MOK__RACK_USE__INIT;
        size_t bytes = 0, end = first;
        while (end < count && bytes < PART_BYTES)
            bytes += mok__rack_user_use__get_packed_size(lines[end++]) + 4;
        report.part = part++;
        report.last = end == count;
        report.n_user = end - first;
        report.user = lines + first;
        send_part(share, &report);
        first = end;
    } while (first < count);
}

static uint64_t hash_of(Mok__RackUserUse **lines, size_t count)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < count; i++) {
        uint64_t word[MOKD_RESOURCES + 2] = { lines[i]->uid, lines[i]->device_ns };
        memcpy(word + 2, lines[i]->amount, lines[i]->n_amount * sizeof(*word));
        for (size_t b = 0; b < sizeof(word); b++)
            hash = (hash ^ ((const uint8_t *)word)[b]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

static size_t count_lines(const struct mokd_server *server)
{
    const struct mokd_user *user;
    const struct mokd_pool *pool;
    const struct mokd_job_total *total;
    size_t count = 0;

    TAILQ_FOREACH(user, &server->users, link)
        count++;
    TAILQ_FOREACH(pool, &server->pools, link)
        count++;
    TAILQ_FOREACH(total, &server->job_totals, link)
        count++;
    return count < MAX_ENTRIES ? count : MAX_ENTRIES;
}

static void on_timer(uv_timer_t *timer)
{
    struct mokd_rack_share *share = timer->data;
    struct mokd_server *server = share->server;
    const struct mokd_user *user;
    const struct mokd_pool *pool;
    const struct mokd_job_total *total;

    look_at_reports(share);
    mokd_job_totals_take_all(server);
    size_t room = count_lines(server), n = 0;
    _cleanup_free_ struct line *lines = calloc(room + 1, sizeof(*lines));
    _cleanup_free_ Mok__RackUserUse **pointers = calloc(room + 1, sizeof(*pointers));
    if (!lines || !pointers)
        return; /* the next time */
    TAILQ_FOREACH(user, &server->users, link)
        if (n < room)
            fill(&lines[n++], false, user->uid, user->name, user->used, user->device_ns);
    TAILQ_FOREACH(pool, &server->pools, link)
        if (n < room)
            fill(&lines[n++], true, pool->gid, pool->name, pool->used, 0);
    TAILQ_FOREACH(total, &server->job_totals, link)
        if (n < room && is_of_one_job(total))
            fill_job(&lines[n++], total);
    for (size_t i = 0; i < n; i++)
        pointers[i] = &lines[i].body;
    uint64_t hash = hash_of(pointers, n);
    if (hash == share->said && ++share->quiet < SILENT_REPORTS)
        return;
    share->said = hash;
    share->quiet = 0;
    send_all(share, pointers, n);
}

/* ------------------------------------------------------------------ start and stop */

int mokd_rack_share_start(struct mokd_server *server, struct mokd_error *error)
{
    if (!server->rack || server->config->tenants == MOKD_TENANTS_NODE)
        return 0;
    struct mokd_rack_share *share = calloc(1, sizeof(*share));
    if (!share)
        return mokd_error_set(error, -MOK_ENOMEM, "mokd is out of memory");
    share->server = server;
    share->timer.data = share;
    uv_timer_init(&server->loop, &share->timer);
    uv_timer_start(&share->timer, on_timer, REPORT_MS, REPORT_MS);
    server->rack_share = share;
    return 0;
}

static void closed(uv_handle_t *handle)
{
    free(handle->data);
}

void mokd_rack_share_stop(struct mokd_server *server)
{
    struct mokd_rack_share *share = server->rack_share;

    if (!share)
        return;
    server->rack_share = NULL;
    for (uint32_t node = 0; node < RACK_MAX_NODES; node++)
        peer_clear(&share->peer[node]);
    uv_close((uv_handle_t *)&share->timer, closed);
}
