/* SPDX-License-Identifier: Apache-2.0 */
#include "rack_early.h"

#include "rack/group_node.h"
#include "rack_groups.h"

/* A node that hands in more, or whose group does not come, loses them. */
#define MAX_EARLY 4096u
#define EARLY_MS (2u * GROUP_PREPARE_MS)

struct mokd_early {
    TAILQ_ENTRY(mokd_early) link;
    uint32_t node, group;
    uint64_t since_ms;
    struct mokd_foreign what;
};

void mokd_early_init(struct mokd_early_list *early)
{
    TAILQ_INIT(&early->list);
    early->count = 0;
}

void mokd_early_keep(struct mokd_early_list *early, uint32_t node, uint32_t group, const struct mokd_foreign *what)
{
    struct mokd_early *one = early->count < MAX_EARLY ? calloc(1, sizeof(*one)) : NULL;

    if (!one) {
        mok_close(what->fd);
        return;
    }
    *one = (struct mokd_early){
        .node = node,
        .group = group,
        .since_ms = mokd_rack_now_ms(),
        .what = *what,
    };
    TAILQ_INSERT_TAIL(&early->list, one, link);
    early->count++;
}

void mokd_early_adopt(struct mokd_early_list *early, struct mokd_group *group)
{
    struct mokd_early *one, *next;

    for (one = TAILQ_FIRST(&early->list); one; one = next) {
        next = TAILQ_NEXT(one, link);
        if (one->group != group->id)
            continue;
        TAILQ_REMOVE(&early->list, one, link);
        early->count--;
        if (one->what.rank < group->size && group->span->roster->rank[one->what.rank].node == one->node)
            mokd_span_handle(group, &one->what);
        else
            mok_close(one->what.fd);
        free(one);
    }
}

void mokd_early_forget(struct mokd_early_list *early, uint64_t before_ms, uint32_t node)
{
    struct mokd_early *one, *next;

    for (one = TAILQ_FIRST(&early->list); one; one = next) {
        next = TAILQ_NEXT(one, link);
        if (one->since_ms >= before_ms && one->node != node)
            continue;
        TAILQ_REMOVE(&early->list, one, link);
        early->count--;
        mok_close(one->what.fd);
        free(one);
    }
}

void mokd_early_expire(struct mokd_early_list *early, uint64_t now_ms)
{
    if (now_ms > EARLY_MS)
        mokd_early_forget(early, now_ms - EARLY_MS, UINT32_MAX);
}
