/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The schedule table against the obvious construction: walk all sources, tokens and slots for each expert in turn and
 * write down what comes by.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "rng.h"
#include "schedule.h"

#define MAX_EP 8
#define MAX_LOCAL 6
#define MAX_SLOTS 400

struct routing {
    uint32_t ep, rank, local_experts, tile;
    uint64_t slots[MAX_EP];
    int32_t ids[MAX_EP][MAX_SLOTS];
};

struct table {
    struct mok_schedule schedule;
    uint64_t count[MAX_EP * MAX_LOCAL], start[MAX_LOCAL * MAX_EP], first[MAX_LOCAL + 1], expert_rows[MAX_LOCAL];
    uint32_t live[MAX_LOCAL];
    struct mok_row row[MAX_EP * MAX_SLOTS + 64 * MAX_LOCAL];
};

static struct routing random_routing(struct rng *rng)
{
    static const uint32_t tiles[] = { 1, 4, 8, 16, 64 };
    struct routing routing = { .ep = 1 + rng_below(rng, MAX_EP),
                               .local_experts = 1 + rng_below(rng, MAX_LOCAL),
                               .tile = tiles[rng_below(rng, 5)] };
    uint32_t experts = routing.ep * routing.local_experts, masked = rng_below(rng, 3);
    uint64_t allowed = rng_below(rng, 2) ? ~0ull : rng_u64(rng);

    routing.rank = rng_below(rng, routing.ep);
    for (uint32_t s = 0; s < routing.ep; s++) {
        routing.slots[s] = rng_below(rng, 3) ? rng_below(rng, MAX_SLOTS + 1) : 0;
        for (uint64_t i = 0; i < routing.slots[s]; i++) {
            int32_t id = (int32_t)rng_below(rng, experts);
            routing.ids[s][i] = rng_below(rng, 3) < masked || !(allowed >> id & 1) ? -1 : id;
        }
    }
    return routing;
}

static void build(const struct routing *routing, struct table *table)
{
    struct mok_schedule *s = &table->schedule;

    memset(table, 0xee, sizeof(*table));
    *s = (struct mok_schedule){ .ep = routing->ep,
                                .local_experts = routing->local_experts,
                                .tile_rows = routing->tile,
                                .count = table->count,
                                .start = table->start,
                                .first = table->first,
                                .expert_rows = table->expert_rows,
                                .live = table->live,
                                .row = table->row };
    uint32_t first = routing->rank * routing->local_experts;
    for (uint32_t p = 0; p < routing->ep; p++)
        mok_schedule_count(routing->ids[p], routing->slots[p], first, routing->local_experts,
                           &table->count[p * routing->local_experts]);
    mok_schedule_scan(s);
    /* Sources are independent of each other: any order must do. */
    for (uint32_t q = 0; q < routing->ep; q++) {
        uint32_t p = (routing->rank + routing->ep - q) % routing->ep;
        mok_schedule_fill(s, p, routing->ids[p], routing->slots[p], first);
    }
}

static void check_expert(const struct routing *routing, const struct table *table, uint32_t e, uint64_t *row)
{
    const struct mok_schedule *s = &table->schedule;
    int32_t expert = (int32_t)(routing->rank * routing->local_experts + e);
    uint64_t begin = *row;

    assert_int_equal(s->first[e], begin);
    assert_int_equal(begin % routing->tile, 0);
    for (uint32_t source = 0; source < routing->ep; source++) {
        assert_int_equal(s->start[e * routing->ep + source], *row);
        for (uint64_t i = 0; i < routing->slots[source]; i++) {
            if (routing->ids[source][i] != expert)
                continue;
            assert_int_equal(s->row[*row].rank, source);
            assert_int_equal(s->row[*row].slot, i);
            (*row)++;
        }
        assert_int_equal(mok_schedule_end(s, e, source), *row);
    }
    assert_int_equal(s->expert_rows[e], *row - begin);
    *row = (*row + routing->tile - 1) / routing->tile * routing->tile;
}

static void every_row_stands_where_canonical_order_puts_it(void **state)
{
    static struct table table;
    struct rng rng = { 5 };

    (void)state;
    for (int n = 0; n < 2000; n++) {
        struct routing routing = random_routing(&rng);
        uint64_t row = 0, rows = 0;
        uint32_t live = 0;
        build(&routing, &table);
        for (uint32_t e = 0; e < routing.local_experts; e++) {
            check_expert(&routing, &table, e, &row);
            rows += table.schedule.expert_rows[e];
            if (table.schedule.expert_rows[e])
                assert_int_equal(table.schedule.live[live++], e);
        }
        assert_int_equal(table.schedule.live_experts, live);
        assert_int_equal(table.schedule.rows, rows);
        assert_int_equal(table.schedule.padded_rows, row);
        assert_int_equal(table.schedule.first[routing.local_experts], row);
    }
}

/* Together the ranks hold every routed slot exactly once: nothing is dropped, nothing doubled. */
static void the_ranks_tables_partition_all_routed_slots(void **state)
{
    static struct table table;
    static uint8_t seen[MAX_EP][MAX_SLOTS];
    struct rng rng = { 6 };

    (void)state;
    for (int n = 0; n < 300; n++) {
        struct routing routing = random_routing(&rng);
        memset(seen, 0, sizeof(seen));
        for (routing.rank = 0; routing.rank < routing.ep; routing.rank++) {
            const struct mok_schedule *s = &table.schedule;
            build(&routing, &table);
            for (uint32_t e = 0; e < routing.local_experts; e++)
                for (uint64_t p = s->first[e]; p < s->first[e] + s->expert_rows[e]; p++)
                    seen[s->row[p].rank][s->row[p].slot]++;
        }
        for (uint32_t s = 0; s < routing.ep; s++)
            for (uint64_t i = 0; i < routing.slots[s]; i++)
                assert_int_equal(seen[s][i], routing.ids[s][i] >= 0);
    }
}

static void find_names_the_live_expert_whose_segment_holds_a_row(void **state)
{
    static struct table table;
    struct rng rng = { 7 };

    (void)state;
    for (int n = 0; n < 300; n++) {
        struct routing routing = random_routing(&rng);
        const struct mok_schedule *s = &table.schedule;
        build(&routing, &table);
        for (uint64_t p = 0; p < s->padded_rows; p++) {
            uint32_t want = 0;
            while (s->first[s->live[want] + 1] <= p)
                want++;
            assert_int_equal(mok_schedule_find(s, p), want);
        }
        assert_int_equal(mok_schedule_find(s, s->padded_rows), s->live_experts);
    }
}

static void macrobatches_cover_all_padded_rows_and_none_is_empty(void **state)
{
    struct mok_schedule s = { 0 };

    (void)state;
    for (s.padded_rows = 0; s.padded_rows < 200; s.padded_rows++)
        for (uint64_t ring = 1; ring < 70; ring++) {
            uint64_t count = mok_schedule_macrobatches(&s, ring);
            assert_true(count * ring >= s.padded_rows);
            assert_true(count == 0 || (count - 1) * ring < s.padded_rows);
        }
}

static void peers_are_visited_once_each_from_a_different_one_on_each_rank(void **state)
{
    (void)state;
    for (uint32_t ep = 1; ep <= 128; ep++)
        for (uint32_t q = 0; q < ep; q++) {
            uint64_t by_rank[2] = { 0 }, by_turn[2] = { 0 };
            for (uint32_t i = 0; i < ep; i++) {
                uint32_t at_turn = mok_schedule_peer(i, ep, q), of_rank = mok_schedule_peer(q, ep, i);
                by_turn[at_turn / 64] |= 1ull << at_turn % 64;
                by_rank[of_rank / 64] |= 1ull << of_rank % 64;
            }
            assert_int_equal(__builtin_popcountll(by_turn[0]) + __builtin_popcountll(by_turn[1]), ep);
            assert_int_equal(__builtin_popcountll(by_rank[0]) + __builtin_popcountll(by_rank[1]), ep);
            assert_int_equal(mok_schedule_peer(q, ep, 0), q);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_row_stands_where_canonical_order_puts_it),
        cmocka_unit_test(the_ranks_tables_partition_all_routed_slots),
        cmocka_unit_test(find_names_the_live_expert_whose_segment_holds_a_row),
        cmocka_unit_test(macrobatches_cover_all_padded_rows_and_none_is_empty),
        cmocka_unit_test(peers_are_visited_once_each_from_a_different_one_on_each_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
