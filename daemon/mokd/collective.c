/* SPDX-License-Identifier: Apache-2.0 */
#include "collective.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "buffer.h"
#include "timer.h"

struct entry {
    struct mokd_collective *collective;
    struct mokd_call call; /* session NULL: not called yet, or answered */
    struct mokd_timer *deadline;
    uint64_t timeout_ms;
    struct mokd_collective_params params;
    uint32_t rank;
    bool arrived;
};

struct mokd_collective {
    TAILQ_ENTRY(mokd_collective) link;
    struct mokd_group *group;
    uint64_t index;
    uint32_t arrived;
    struct mokd_error failure; /* code 0: undecided */
    struct entry entry[];      /* [group->size], by rank */
};

/* ------------------------------------------------------------------ the object */

static struct mokd_collective *collective_get(struct mokd_group *group, uint64_t index)
{
    struct mokd_collective *collective;

    TAILQ_FOREACH(collective, &group->collectives, link)
        if (collective->index == index)
            return collective;
    collective = calloc(1, sizeof(*collective) + group->size * sizeof(collective->entry[0]));
    if (!collective)
        return NULL;
    collective->group = group;
    collective->index = index;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        collective->entry[rank].collective = collective;
        collective->entry[rank].rank = rank;
    }
    TAILQ_INSERT_TAIL(&group->collectives, collective, link);
    return collective;
}

static void collective_free(struct mokd_collective *collective)
{
    for (uint32_t rank = 0; rank < collective->group->size; rank++)
        mokd_timer_cancel(&collective->entry[rank].deadline);
    TAILQ_REMOVE(&collective->group->collectives, collective, link);
    free(collective);
}

static void fail_waiting(struct mokd_collective *collective)
{
    for (uint32_t rank = 0; rank < collective->group->size; rank++) {
        struct entry *entry = &collective->entry[rank];
        mokd_timer_cancel(&entry->deadline);
        if (entry->call.session)
            mokd_call_fail(&entry->call, &collective->failure);
    }
}

/* ------------------------------------------------------------------ waiting in vain */

const char *mokd_missing_ranks(uint32_t size, bool (*is_missing)(const void *cookie, uint32_t rank), const void *cookie,
                               char *buffer, size_t length)
{
    size_t used = 0;

    buffer[0] = '\0';
    for (uint32_t rank = 0; rank < size && used + 16 < length; rank++) {
        if (!is_missing(cookie, rank))
            continue;
        used += (size_t)snprintf(buffer + used, length - used, "%s%u", used ? ", " : "", rank);
    }
    if (used + 16 >= length)
        snprintf(buffer + used, length - used, " and others");
    return buffer;
}

static bool has_not_called(const void *cookie, uint32_t rank)
{
    const struct mokd_collective *collective = cookie;
    return !collective->entry[rank].arrived;
}

static void overdue(void *cookie)
{
    struct entry *entry = cookie;
    struct mokd_collective *collective = entry->collective;
    char missing[200];

    mokd_error_set(&collective->failure, -MOK_ETIMEDOUT,
                   "rank %u of group %s waited %" PRIu64 " ms: no call came from rank %s", entry->rank,
                   collective->group->name, entry->timeout_ms,
                   mokd_missing_ranks(collective->group->size, has_not_called, collective, missing, sizeof(missing)));
    fail_waiting(collective);
}

void mokd_collectives_abort(struct mokd_group *group)
{
    struct mokd_collective *collective;

    while ((collective = TAILQ_FIRST(&group->collectives))) {
        for (uint32_t rank = 0; rank < group->size; rank++) {
            struct entry *entry = &collective->entry[rank];
            struct mokd_error failure = { 0 };
            if (!entry->call.session)
                continue;
            mokd_member_failure(group->member[rank], &failure);
            mokd_call_fail(&entry->call, &failure);
        }
        collective_free(collective);
    }
}

/* ------------------------------------------------------------------ saying the same */

static const char *kind_text(enum mokd_collective_kind kind)
{
    return kind == MOKD_COLLECTIVE_ALLOC ? "a symmetric allocation" : "a layer";
}

static int differ(struct mokd_error *error, uint32_t rank, const char *field, uint64_t first, uint64_t other)
{
    return mokd_error_set(error, -MOK_EMISMATCH, "ranks 0 and %u differ on %s: %" PRIu64 " and %" PRIu64, rank, field,
                          first, other);
}

static int compare_specs(const struct mok_layer_spec *first, const struct mok_layer_spec *other, uint32_t rank,
                         struct mokd_error *error)
{
    const struct {
        const char *name;
        uint64_t first, other;
    } field[] = {
        { "hidden", first->hidden, other->hidden },
        { "intermediate", first->intermediate, other->intermediate },
        { "experts", first->experts, other->experts },
        { "topk", first->topk, other->topk },
        { "max_tokens", first->max_tokens, other->max_tokens },
        { "precision", first->precision, other->precision },
        { "shared_intermediate", first->shared_intermediate, other->shared_intermediate },
        { "ring_bytes", first->ring_bytes, other->ring_bytes },
        { "minibatch_rows", first->minibatch_rows, other->minibatch_rows },
        { "comm_units", first->comm_units, other->comm_units },
    };
    for (size_t i = 0; i < ARRAY_SIZE(field); i++)
        if (field[i].first != field[i].other)
            return differ(error, rank, field[i].name, field[i].first, field[i].other);
    if (memcmp(&first->clamp, &other->clamp, sizeof(first->clamp)) != 0)
        return mokd_error_set(error, -MOK_EMISMATCH, "ranks 0 and %u differ on clamp: %g and %g", rank,
                              (double)first->clamp, (double)other->clamp);
    return 0;
}

static int compare(const struct mokd_collective *collective, struct mokd_error *error)
{
    const struct mokd_collective_params *first = &collective->entry[0].params;

    for (uint32_t rank = 1; rank < collective->group->size; rank++) {
        const struct mokd_collective_params *other = &collective->entry[rank].params;
        int r = 0;
        if (first->kind != other->kind)
            r = mokd_error_set(error, -MOK_EMISMATCH, "rank 0 asks for %s and rank %u for %s", kind_text(first->kind),
                               rank, kind_text(other->kind));
        else if (first->kind == MOKD_COLLECTIVE_ALLOC && first->bytes != other->bytes)
            r = differ(error, rank, "bytes", first->bytes, other->bytes);
        else if (first->kind == MOKD_COLLECTIVE_LAYER)
            r = compare_specs(&first->spec, &other->spec, rank, error);
        if (r < 0)
            return r;
    }
    return 0;
}

/* ------------------------------------------------------------------ calling */

static void run(struct mokd_collective *collective)
{
    struct mokd_group *group = collective->group;
    struct mokd_call calls[MOK_MAX_EP];
    struct mok_layer_spec specs[MOK_MAX_EP];
    enum mokd_collective_kind kind = collective->entry[0].params.kind;
    uint64_t bytes = collective->entry[0].params.bytes;

    for (uint32_t rank = 0; rank < group->size; rank++) {
        calls[rank] = collective->entry[rank].call;
        specs[rank] = collective->entry[rank].params.spec;
    }
    collective_free(collective);
    if (kind == MOKD_COLLECTIVE_ALLOC)
        mokd_symmetric_alloc(group, calls, bytes);
    else
        mokd_layer_make(group, calls, specs);
}

static void all_called(struct mokd_collective *collective)
{
    if (collective->failure.code == 0 && compare(collective, &collective->failure) == 0) {
        run(collective);
        return;
    }
    fail_waiting(collective);
    collective_free(collective);
}

static int arrive(struct mokd_member *member, uint64_t timeout_ms, struct mokd_collective **ret)
{
    struct mokd_collective *collective = collective_get(member->group, member->next_collective);
    if (!collective)
        return -MOK_ENOMEM;
    struct entry *entry = &collective->entry[member->rank];
    if (timeout_ms > 0) {
        entry->timeout_ms = timeout_ms;
        entry->deadline = mokd_timer_start(&member->group->server->loop, timeout_ms, overdue, entry);
        if (!entry->deadline)
            return -MOK_ENOMEM; /* the object stays for the other ranks */
    }
    *ret = collective;
    return 0;
}

void mokd_collective_call(struct mokd_member *member, uint64_t id, const struct mokd_collective_params *params,
                          uint64_t timeout_ms)
{
    struct mokd_collective *collective;

    if (arrive(member, timeout_ms, &collective) < 0) {
        struct mokd_error error = { 0 };
        mokd_error_set(&error, -MOK_ENOMEM, "mokd is out of memory");
        mokd_session_refuse(member->session, id, &error);
        return;
    }
    struct entry *entry = &collective->entry[member->rank];
    member->next_collective++;
    entry->call = mokd_call_begin(member->session, id);
    entry->params = *params;
    entry->arrived = true;
    collective->arrived++;
    if (collective->arrived == member->group->size)
        all_called(collective);
    else if (collective->failure.code < 0)
        fail_waiting(collective);
}
