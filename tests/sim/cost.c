/* SPDX-License-Identifier: Apache-2.0 */
/* See cost.h. */
#include "cost.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "rng.h"
#include "schedule.h"

enum { REPEATS = 5, TILE_ROWS = 64 };

static double now_ms(void)
{
    struct timespec ts;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &ts);
    return (double)ts.tv_sec * 1e3 + (double)ts.tv_nsec * 1e-6;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void build(struct mok_schedule *s, const int32_t *ids, uint64_t slots)
{
    for (uint32_t r = 0; r < s->ep; r++)
        mok_schedule_count(ids + r * slots, slots, 0, s->local_experts, s->count + (uint64_t)r * s->local_experts);
    mok_schedule_scan(s);
    for (uint32_t r = 0; r < s->ep; r++)
        mok_schedule_fill(s, r, ids + r * slots, slots, 0);
}

int schedule_cost(uint32_t ranks, uint32_t experts_per_rank, uint32_t tokens, uint32_t topk, uint64_t seed,
                  struct schedule_cost *ret)
{
    uint64_t slots = (uint64_t)tokens * topk, all = slots * ranks, local = experts_per_rank;
    uint64_t at_worst = mok_schedule_rows_at_worst(all, experts_per_rank, TILE_ROWS);
    struct rng rng = { seed };
    double ms[REPEATS];
    int32_t *ids = malloc(all * sizeof(*ids));
    struct mok_schedule s = {
        .ep = ranks,
        .local_experts = experts_per_rank,
        .tile_rows = TILE_ROWS,
        .count = calloc(ranks * local, sizeof(*s.count)),
        .start = calloc(ranks * local, sizeof(*s.start)),
        .first = calloc(local + 1, sizeof(*s.first)),
        .expert_rows = calloc(local, sizeof(*s.expert_rows)),
        .live = calloc(local, sizeof(*s.live)),
        .row = malloc(at_worst * sizeof(*s.row)),
    };
    int code = ids && s.count && s.start && s.first && s.expert_rows && s.live && s.row ? 0 : -1;

    for (uint64_t i = 0; code == 0 && i < all; i++)
        ids[i] = (int32_t)rng_below(&rng, experts_per_rank * ranks);
    for (int n = 0; code == 0 && n < REPEATS; n++) {
        double start = now_ms();
        build(&s, ids, slots);
        ms[n] = now_ms() - start;
    }
    if (code == 0) {
        qsort(ms, REPEATS, sizeof(*ms), by_value);
        *ret = (struct schedule_cost){ .slots = 2 * all,
                                       .rows = s.rows,
                                       .table_bytes = s.padded_rows * sizeof(*s.row) +
                                                      (2 * ranks * local + 2 * local + 1) * sizeof(uint64_t) +
                                                      local * sizeof(uint32_t),
                                       .ms = ms[REPEATS / 2] };
    }
    free(ids);
    free(s.count);
    free(s.start);
    free(s.first);
    free(s.expert_rows);
    free(s.live);
    free(s.row);
    return code;
}

struct visits count_visits(uint32_t ranks)
{
    struct visits v = { .least = UINT32_MAX };
    uint32_t *total = calloc(ranks, sizeof(*total)), *now = calloc(ranks, sizeof(*now));

    for (uint32_t q = 0; total && now && q < ranks; q++) {
        memset(now, 0, ranks * sizeof(*now));
        for (uint32_t r = 0; r < ranks; r++) {
            uint32_t peer = mok_schedule_peer(r, ranks, q);
            total[peer]++;
            if (++now[peer] > v.most_at_once)
                v.most_at_once = now[peer];
        }
    }
    for (uint32_t r = 0; total && now && r < ranks; r++) {
        v.least = total[r] < v.least ? total[r] : v.least;
        v.most = total[r] > v.most ? total[r] : v.most;
    }
    free(total);
    free(now);
    return v;
}
