/* SPDX-License-Identifier: Apache-2.0 */
/* Groups that stand: their ranks are taken at any node, until the end of the group is known to the home of its name. */
#include "group_rack.h"

#include <stdio.h>
#include <string.h>

/* A name whose home is a node, of those that are up. */
static const char *name_at(const struct rack *rack, uint32_t home)
{
    static char name[16];

    for (unsigned i = 0;; i++) {
        snprintf(name, sizeof(name), "stands-%u", i);
        if (group_node_home(&rack->node[home == 0].node, 1000, name) == home)
            return name;
    }
}

/* Rank 0 on node 0, rank 1 on node 1, of four nodes. */
static uint32_t form_two(struct rack *rack, const char *name)
{
    rack_forget_notes(rack);
    rack_join(rack, 0, name, 2, 0);
    rack_join(rack, 1, name, 2, 1);
    rack_settle(rack);
    uint32_t group = rack->node[0].note[0].group;
    assert_non_null(rack_note(rack, 1, NOTE_COMMIT, group, 0));
    return group;
}

static void expect_taken(struct rack *rack, uint32_t node, const char *name)
{
    char says[128];

    for (uint32_t rank = 0; rank < 2; rank++) {
        uint64_t join = rack_join(rack, node, name, 2, rank);
        rack_settle(rack);
        assert_null(rack_note(rack, node, NOTE_REFUSED, 0, join)); /* the end may be on its way */
        rack_wait(rack, GROUP_TAKEN_MS);
        snprintf(says, sizeof(says), "rank = %u: taken in group %s by session %u of node n0%u", rank, name, rank + 1,
                 rank);
        rack_expect_text(rack_note(rack, node, NOTE_REFUSED, 0, join), -MOK_ERANK, says);
    }
}

/* It ends, and the job forms it again, with rank 1 at another node than before. */
static void expect_free_once_over(struct rack *rack, uint32_t group, const char *name)
{
    group_node_over(&rack->node[1].node, group, 1, "left", rack->now_ms);
    rack_settle(rack);
    rack_forget(rack, group);
    rack_settle(rack);
    rack_expect_nothing_left(rack);
    rack_forget_notes(rack);
    rack_join(rack, 3, name, 2, 1);
    rack_join(rack, 0, name, 2, 0);
    rack_settle(rack);
    assert_non_null(rack_note(rack, 3, NOTE_COMMIT, rack->node[0].note[0].group, 0));
}

static void a_rank_of_a_group_that_stands_is_taken_at_any_node_until_it_is_over(void **state)
{
    (void)state;
    for (uint32_t home = 0; home < 4; home++) {
        struct rack *rack = rack_new(4, 21);
        const char *name = name_at(rack, home);
        uint32_t group = form_two(rack, name);
        expect_taken(rack, 2, name);
        expect_taken(rack, 3, name);
        uint64_t join = rack_join(rack, 2, name, 3, 2);
        rack_settle(rack);
        rack_wait(rack, GROUP_TAKEN_MS);
        assert_int_equal(rack_note(rack, 2, NOTE_REFUSED, 0, join)->error.code, -MOK_EMISMATCH);
        assert_null(rack_note(rack, 0, NOTE_OVER, group, 0)); /* nobody in the group has noticed */
        expect_free_once_over(rack, group, name);
        rack_free(rack);
    }
}

static void the_next_home_of_a_group_that_stands_knows_it_too_and_so_does_the_first_when_it_is_back(void **state)
{
    (void)state;
    struct rack *rack = rack_new(4, 22);
    const char *name = name_at(rack, 2);
    uint32_t group = form_two(rack, name);
    rack_kill(rack, 2);
    rack_settle(rack);
    expect_taken(rack, 3, name);
    rack_boot(rack, 2);
    rack_settle(rack);
    expect_taken(rack, 3, name);
    expect_taken(rack, 2, name);
    rack_cut(rack, 0, 2); /* the home and the lead, which has another home then */
    rack_settle(rack);
    rack_heal(rack, 0, 2);
    rack_settle(rack);
    expect_taken(rack, 3, name);
    expect_free_once_over(rack, group, name);
    rack_free(rack);
}

static void a_name_is_free_when_its_lead_is_lost_or_its_nodes_do_not_say_when_it_is_over(void **state)
{
    (void)state;
    struct rack *rack = rack_new(4, 23);
    const char *name = name_at(rack, 2);
    form_two(rack, name);
    rack_kill(rack, 0);
    rack_settle(rack);
    assert_int_equal(rack->node[2].node.n_standings, 0);
    rack_boot(rack, 0);

    Mok__GroupJoining joining = MOK__GROUP_JOINING__INIT;
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    message.body_case = MOK__GROUP_MESSAGE__BODY_JOINING;
    message.joining = &joining;
    name = name_at(rack, 2);
    joining.uid = 1000;
    joining.name = (char *)name;
    joining.size = 2;
    for (uint32_t rank = 0; rank < 2; rank++) { /* daemons of before say no tells_over */
        joining.rank = rank;
        joining.join = 7;
        group_node_receive(&rack->node[2].node, rank, &message, rack->now_ms);
    }
    assert_int_equal(rack->node[2].node.n_standings, 0);
    rack_free(rack);
}

/* Whoever hears first that the group is over joins first, and is never told that his own rank is taken. */
static void a_group_forms_again_at_once_in_whatever_order_its_end_becomes_known(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        struct rack *rack = rack_new(4, seed);
        bool joined[4] = { false };
        uint32_t group = rack_form(rack, "again", 4);
        rack_forget_notes(rack);
        group_node_over(&rack->node[seed % 4].node, group, seed % 4, "left", rack->now_ms);
        do {
            for (uint32_t node = 0; node < 4; node++) {
                if (joined[node] || (node != seed % 4 && !rack_note(rack, node, NOTE_OVER, group, 0)))
                    continue;
                joined[node] = true;
                group_node_forget(&rack->node[node].node, group);
                rack_join(rack, node, "again", 4, node);
            }
        } while (rack_deliver(rack));
        for (uint32_t node = 0; node < 4; node++)
            for (size_t i = 0; i < rack->node[node].n_notes; i++)
                assert_int_not_equal(rack->node[node].note[i].kind, NOTE_REFUSED);
        rack_free(rack);
    }
}

/* On other nodes, which hear of the end by other ways than the mesh. */
static void the_next_group_forms_though_all_its_ranks_came_before_the_end_of_the_one_before(void **state)
{
    (void)state;
    struct rack *rack = rack_new(4, 25);
    const char *name = name_at(rack, 2);
    uint32_t group = form_two(rack, name);
    rack_join(rack, 2, name, 2, 0);
    rack_join(rack, 3, name, 2, 1);
    rack_settle(rack);
    group_node_over(&rack->node[1].node, group, 1, "left", rack->now_ms);
    rack_settle(rack);
    rack_wait(rack, GROUP_TAKEN_MS / 2);
    uint32_t next = rack->node[3].note[0].group;
    assert_non_null(rack_note(rack, 3, NOTE_COMMIT, next, 0));
    assert_non_null(rack_note(rack, 2, NOTE_COMMIT, next, 0));
    rack_forget(rack, group);
    rack_forget(rack, next);
    rack_settle(rack);
    rack_expect_nothing_left(rack);
    rack_free(rack);
}

static void a_home_forgets_the_oldest_of_too_many_groups(void **state)
{
    (void)state;
    struct rack *rack = rack_new(2, 24);
    Mok__GroupRank rank = MOK__GROUP_RANK__INIT, *pointer = &rank;
    Mok__GroupFormed formed = MOK__GROUP_FORMED__INIT;
    Mok__GroupStanding standing = MOK__GROUP_STANDING__INIT;
    Mok__GroupMessage message = MOK__GROUP_MESSAGE__INIT;
    char name[16];

    message.body_case = MOK__GROUP_MESSAGE__BODY_STANDING;
    message.standing = &standing;
    standing.group = &formed;
    formed.name = name;
    formed.n_rank = 1;
    formed.rank = &pointer;
    rank.node = (char *)"n01";
    for (uint32_t i = 0; i < 3 * GROUP_MAX_STANDINGS; i++) {
        snprintf(name, sizeof(name), "many-%u", i);
        formed.group = GROUP_ID_FLAG | i;
        group_node_receive(&rack->node[0].node, 1, &message, rack->now_ms);
    }
    assert_int_equal(rack->node[0].node.n_standings, GROUP_MAX_STANDINGS);
    rack_cut(rack, 0, 1);
    rack_expect_nothing_left(rack);
    rack_free(rack);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_rank_of_a_group_that_stands_is_taken_at_any_node_until_it_is_over),
        cmocka_unit_test(the_next_home_of_a_group_that_stands_knows_it_too_and_so_does_the_first_when_it_is_back),
        cmocka_unit_test(a_name_is_free_when_its_lead_is_lost_or_its_nodes_do_not_say_when_it_is_over),
        cmocka_unit_test(a_group_forms_again_at_once_in_whatever_order_its_end_becomes_known),
        cmocka_unit_test(the_next_group_forms_though_all_its_ranks_came_before_the_end_of_the_one_before),
        cmocka_unit_test(a_home_forgets_the_oldest_of_too_many_groups),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
