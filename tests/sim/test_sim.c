/* SPDX-License-Identifier: Apache-2.0 */
/* A rack of 18 nodes x 4 devices in virtual time: nothing gets stuck, and nothing grows faster than it may. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "cost.h"
#include "forming.h"
#include "world.h"

#ifdef MOK_SANITIZED
#define ROUNDS 1
#else
#define ROUNDS 2
#endif

static struct world_options rack(uint32_t nodes, enum world_order order, uint64_t seed)
{
    return (struct world_options){ .nodes = nodes,
                                   .devices = 4,
                                   .jobs = 3,
                                   .layers = 4,
                                   .rounds = ROUNDS,
                                   .tokens = 32,
                                   .experts_per_rank = 4,
                                   .topk = 8,
                                   .order = order,
                                   .late_ns = 2000000,
                                   .seed = seed };
}

static void jobs_that_overlap_in_any_order_all_finish(void **state)
{
    (void)state;
    for (int order = WORLD_SAME; order <= WORLD_RANDOM; order++)
        for (uint64_t seed = 1; seed <= 3; seed++) {
            struct world_options o = rack(seed == 1 ? 18 : 3, (enum world_order)order, seed);
            struct world_result result;
            assert_int_equal(world_run(&o, &result), 0);
            assert_true(result.done);
            assert_int_equal(result.failed, 0);
            assert_int_equal(result.operations, (uint64_t)o.nodes * o.devices * o.jobs * o.layers * o.rounds);
        }
}

/* What the design avoids; and the proof that this world can get stuck. */
static void operations_that_held_their_device_would_lock_each_other_out(void **state)
{
    struct world_options o = rack(2, WORLD_OPPOSITE, 1);
    struct world_result result;

    (void)state;
    o.hold = true;
    assert_int_equal(world_run(&o, &result), 0);
    assert_false(result.done);
}

static void the_same_seed_gives_the_same_history(void **state)
{
    struct world_options o = rack(4, WORLD_RANDOM, 9);
    struct world_result a, b;

    (void)state;
    assert_int_equal(world_run(&o, &a), 0);
    assert_int_equal(world_run(&o, &b), 0);
    assert_memory_equal(&a, &b, sizeof(a));
    o.seed++;
    assert_int_equal(world_run(&o, &b), 0);
    assert_int_not_equal(a.virtual_ns, b.virtual_ns);
}

/* Two flags an operation of a rank, each told to every peer once, and looks that do not outgrow the bells. */
static void control_traffic_of_a_rank_grows_with_the_number_of_its_peers(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 18; nodes += 17) {
        struct world_options o = rack(nodes, WORLD_OPPOSITE, 5);
        struct world_result result;
        uint32_t ranks = nodes * o.devices;
        assert_int_equal(world_run(&o, &result), 0);
        assert_int_equal(result.flags, 2 * result.operations);
        assert_int_equal(result.bells, 2 * (ranks - 1) * result.operations);
        assert_true(result.looks <= result.bells + 8 * result.operations);
    }
}

static void a_schedule_looks_at_every_slot_twice_whatever_the_number_of_ranks(void **state)
{
    struct schedule_cost one, many;

    (void)state;
    assert_int_equal(schedule_cost(4, 4, 64, 8, 1, &one), 0);
    assert_int_equal(schedule_cost(72, 4, 64, 8, 1, &many), 0);
    assert_int_equal(one.slots, 2 * 4 * 64 * 8);
    assert_int_equal(many.slots, 18 * one.slots);
    assert_true(many.table_bytes <= 18 * one.table_bytes);
}

static void ranks_visit_each_other_evenly(void **state)
{
    (void)state;
    for (uint32_t ranks = 1; ranks <= 72; ranks++) {
        struct visits v = count_visits(ranks);
        assert_int_equal(v.most_at_once, 1);
        assert_int_equal(v.least, ranks);
        assert_int_equal(v.most, ranks);
    }
}

/* ------------------------------------------------------------------ groups over nodes */

static struct forming_options groups(uint32_t nodes, enum world_order order, uint64_t seed)
{
    return (struct forming_options){
        .nodes = nodes, .devices = 4, .jobs = 3, .calls = 4, .order = order, .seed = seed
    };
}

static void groups_of_72_ranks_form_at_the_same_time_in_any_order_and_leave_nothing(void **state)
{
    (void)state;
    for (int order = WORLD_SAME; order <= WORLD_RANDOM; order++)
        for (uint64_t seed = 1; seed <= 3; seed++) {
            struct forming_options o = groups(18, (enum world_order)order, seed);
            struct forming_result result;
            assert_int_equal(forming_run(&o, &result), 0);
            assert_true(result.done);
            assert_int_equal(result.formed, o.jobs);
            assert_int_equal(result.ended, 0);
            assert_int_equal(result.left, 0);
            assert_true(result.form_ns < 10000000);
        }
}

static void a_rank_of_a_group_that_stands_is_refused_at_any_node(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        struct forming_options o = groups(seed == 1 ? 6 : 3, WORLD_RANDOM, seed);
        struct forming_result result;
        o.calls = 2000; /* so that none is done before they are refused */
        o.intruders = true;
        assert_int_equal(forming_run(&o, &result), 0);
        assert_true(result.done);
        assert_int_equal(result.taken, o.jobs);
        assert_int_equal(result.left, 0);
    }
}

/*
 * A join and each call once a rank; what is formed, prepare, prepared and verdict of each call, and the end once a
 * node.
 */
static void messages_of_a_group_grow_with_its_ranks_and_nodes(void **state)
{
    (void)state;
    for (uint32_t nodes = 1; nodes <= 18; nodes += nodes < 4 ? 1 : 7) {
        struct forming_options o = groups(nodes, WORLD_RANDOM, 7);
        struct forming_result result;
        uint64_t ranks = (uint64_t)nodes * o.devices;
        assert_int_equal(forming_run(&o, &result), 0);
        assert_true(result.done);
        assert_true(result.messages <= o.jobs * (ranks * (1 + o.calls) + nodes * (2 + 3 * (1 + o.calls))));
        if (nodes == 1)
            assert_int_equal(result.messages, 0);
    }
}

static void a_node_that_dies_in_the_middle_ends_the_groups_on_all_and_they_form_again(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 5; seed++) {
        struct forming_options o = groups(seed == 1 ? 18 : 5, WORLD_RANDOM, seed);
        struct forming_result result;
        o.calls = 200; /* so that none is done before */
        o.kill = true;
        assert_int_equal(forming_run(&o, &result), 0);
        assert_true(result.done);
        assert_int_equal(result.ended, o.jobs * (o.nodes - 1)); /* on each that lives, once */
        assert_int_equal(result.left, 0);
        assert_true(result.told_ns < 1000000); /* the first who knows tells the others */
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(jobs_that_overlap_in_any_order_all_finish),
        cmocka_unit_test(operations_that_held_their_device_would_lock_each_other_out),
        cmocka_unit_test(the_same_seed_gives_the_same_history),
        cmocka_unit_test(control_traffic_of_a_rank_grows_with_the_number_of_its_peers),
        cmocka_unit_test(a_schedule_looks_at_every_slot_twice_whatever_the_number_of_ranks),
        cmocka_unit_test(ranks_visit_each_other_evenly),
        cmocka_unit_test(groups_of_72_ranks_form_at_the_same_time_in_any_order_and_leave_nothing),
        cmocka_unit_test(a_rank_of_a_group_that_stands_is_refused_at_any_node),
        cmocka_unit_test(messages_of_a_group_grow_with_its_ranks_and_nodes),
        cmocka_unit_test(a_node_that_dies_in_the_middle_ends_the_groups_on_all_and_they_form_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
