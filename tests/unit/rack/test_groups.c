/* SPDX-License-Identifier: Apache-2.0 */
/* Groups over nodes as state machines: every order of messages, every way to disagree, every node that goes. */
#include "group_rack.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef MOK_SANITIZED /* ten times slower */
enum { STORMS = 400, CYCLES = 1000 };
#else
enum { STORMS = 2000, CYCLES = 10000 };
#endif

/* ------------------------------------------------------------------ coming together */

static void ranks_come_together_in_any_order_of_arrival(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        struct rack *rack = rack_new(4, seed);
        uint32_t order[8] = { 0, 1, 2, 3, 4, 5, 6, 7 };
        for (uint32_t i = 7; i > 0; i--) {
            uint32_t j = rack_random(rack, i + 1), swap = order[i];
            order[i] = order[j];
            order[j] = swap;
        }
        for (uint32_t i = 0; i < 8; i++) {
            rack_join(rack, order[i] % 4, "any", 8, order[i]);
            for (uint32_t n = rack_random(rack, 4); n > 0; n--)
                rack_deliver(rack);
        }
        rack_settle(rack);
        uint32_t group = rack->node[0].note[0].group;
        assert_true(group & GROUP_ID_FLAG);
        for (uint32_t node = 0; node < 4; node++)
            assert_non_null(rack_note(rack, node, NOTE_COMMIT, group, 0));
        rack_forget(rack, group);
        rack_expect_nothing_left(rack);
        rack_free(rack);
    }
}

static void all_nodes_choose_the_same_home_and_names_are_spread(void **state)
{
    (void)state;
    struct rack *rack = rack_new(18, 1);
    unsigned count[18] = { 0 };
    for (unsigned i = 0; i < 3600; i++) {
        char name[16];
        snprintf(name, sizeof(name), "job-%u", i);
        uint32_t home = group_node_home(&rack->node[0].node, 1000, name);
        for (uint32_t node = 1; node < 18; node++)
            assert_int_equal(group_node_home(&rack->node[node].node, 1000, name), home);
        count[home]++;
    }
    for (uint32_t node = 0; node < 18; node++)
        assert_in_range(count[node], 120, 300); /* 200 each */
    rack_free(rack);
}

static void ranks_that_differ_on_the_size_all_learn_who_said_what(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 2);
    uint64_t first = rack_join(rack, 0, "size", 3, 0);
    rack_settle(rack);
    uint64_t second = rack_join(rack, 1, "size", 3, 1);
    rack_settle(rack);
    uint64_t third = rack_join(rack, 2, "size", 4, 2);
    rack_settle(rack);
    const char *says = "rank 2 (node n02) says that the size is 4, rank 0 (node n00) said 3";
    rack_expect_text(rack_note(rack, 0, NOTE_REFUSED, 0, first), -MOK_EMISMATCH, says);
    rack_expect_text(rack_note(rack, 1, NOTE_REFUSED, 0, second), -MOK_EMISMATCH, says);
    rack_expect_text(rack_note(rack, 2, NOTE_REFUSED, 0, third), -MOK_EMISMATCH, says);
    rack_expect_nothing_left(rack);
    assert_int_not_equal(rack_form(rack, "size", 3), 0); /* the name is free again */
    rack_free(rack);
}

static void devices_of_two_kinds_do_not_come_together(void **state)
{
    (void)state;
    struct rack *rack = rack_new(2, 3);
    struct group_joining joining = {
        .uid = 1000, .user = "", .name = "kind", .size = 2, .rank = 1, .kind = MOK_DEVICE_CUDA
    };
    uint64_t first = rack_join(rack, 0, "kind", 2, 0), second;
    rack_settle(rack);
    assert_int_equal(group_node_join(&rack->node[1].node, &joining, rack->now_ms, &second), 0);
    rack_settle(rack);
    const char *says = "ranks 0 (node n00) and 1 (node n01) differ on the kind of their devices: host and cuda";
    rack_expect_text(rack_note(rack, 0, NOTE_REFUSED, 0, first), -MOK_EMISMATCH, says);
    rack_expect_text(rack_note(rack, 1, NOTE_REFUSED, 0, second), -MOK_EMISMATCH, says);
    rack_expect_nothing_left(rack);
    rack_free(rack);
}

static uint64_t join_as(struct rack *rack, uint32_t node, uint32_t uid, const char *user, uint32_t rank)
{
    struct group_joining joining = {
        .uid = uid, .user = user, .name = "user", .size = 2, .rank = rank, .kind = MOK_DEVICE_HOST
    };
    uint64_t join = 0;

    assert_int_equal(group_node_join(&rack->node[node].node, &joining, rack->now_ms, &join), 0);
    rack_settle(rack);
    return join;
}

static void another_user_is_not_let_in_nor_one_who_only_has_the_same_number(void **state)
{
    (void)state;
    struct rack *rack = rack_new(2, 4);
    join_as(rack, 0, 1000, "ann", 0);
    join_as(rack, 1, 1001, "bob", 1); /* a group of his own */
    assert_int_equal(rack->node[0].n_notes + rack->node[1].n_notes, 0);
    uint64_t liar = join_as(rack, 1, 1000, "bob", 1);
    const char *says = "uid 1000 is user ann on node n00 and user bob on node n01 (rank 1)";
    rack_expect_text(rack_note(rack, 1, NOTE_REFUSED, 0, liar), -MOK_EACCESS, says);
    rack_expect_text(&rack->node[0].note[0], -MOK_EACCESS, says);
    rack_free(rack);
}

static void a_rank_that_is_taken_is_refused_and_the_group_still_forms(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 5);
    rack_join(rack, 0, "taken", 2, 0);
    rack_settle(rack);
    uint64_t second = rack_join(rack, 2, "taken", 2, 0);
    rack_settle(rack);
    rack_expect_text(rack_note(rack, 2, NOTE_REFUSED, 0, second), -MOK_ERANK,
                "rank = 0: taken in group taken by session 1 of node n00");
    rack_join(rack, 1, "taken", 2, 1);
    rack_settle(rack);
    assert_int_equal(rack->node[0].note[0].kind, NOTE_OPENED);
    assert_int_equal(rack->node[1].note[1].kind, NOTE_COMMIT);
    rack_free(rack);
}

/*
 * Nodes 0 and 1 have lost each other; where both can get to the home, it brings them together, and the lead finds out.
 */
static void who_waits_in_vain_is_told_whom_his_node_does_not_reach(void **state)
{
    (void)state;
    struct rack *rack = rack_new(2, 26);
    struct group_joining joining = {
        .uid = 1000, .user = "", .name = "apart", .size = 2, .kind = MOK_DEVICE_HOST, .timeout_ms = 1000
    };
    uint64_t join[2];
    rack_cut(rack, 0, 1);
    for (joining.rank = 0; joining.rank < 2; joining.rank++)
        group_node_join(&rack->node[joining.rank].node, &joining, rack->now_ms, &join[joining.rank]);
    rack_wait(rack, 1500);
    rack_expect_text(rack_note(rack, 0, NOTE_REFUSED, 0, join[0]), -MOK_ETIMEDOUT,
                "missing is rank 1; node n00 does not reach node n01 (lost)");
    rack_expect_text(rack_note(rack, 1, NOTE_REFUSED, 0, join[1]), -MOK_ETIMEDOUT,
                "missing is rank 0; node n01 does not reach node n00 (lost)");
    rack_free(rack);

    rack = rack_new(3, 27);
    unsigned i = 0;
    char name[16];
    do
        snprintf(name, sizeof(name), "apart-%u", i++);
    while (group_node_home(&rack->node[0].node, 1000, name) != 2);
    rack_cut(rack, 0, 1);
    uint64_t waits = rack_join(rack, 0, name, 2, 0);
    rack_join(rack, 1, name, 2, 1);
    rack_settle(rack);
    rack_expect_text(rack_note(rack, 0, NOTE_REFUSED, 0, waits), -MOK_EPEER,
                     "node n00 does not reach node n01 (rank 1): lost");
    rack_free(rack);
}

static void a_rank_that_waits_too_long_learns_who_is_missing_and_makes_room(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 6);
    struct group_joining joining = {
        .uid = 1000, .user = "", .name = "late", .size = 3, .rank = 1, .kind = MOK_DEVICE_HOST, .timeout_ms = 2000
    };
    uint64_t join;
    assert_int_equal(group_node_join(&rack->node[1].node, &joining, rack->now_ms, &join), 0);
    rack_join(rack, 0, "late", 3, 0);
    rack_wait(rack, 1500);
    assert_null(rack_note(rack, 1, NOTE_REFUSED, 0, join));
    rack_wait(rack, 1000);
    rack_expect_text(rack_note(rack, 1, NOTE_REFUSED, 0, join), -MOK_ETIMEDOUT,
                     "rank 1 waited 2000 ms, missing is rank 2");
    rack_join(rack, 1, "late", 3, 1);
    rack_join(rack, 2, "late", 3, 2);
    rack_settle(rack);
    assert_int_equal(rack->node[2].note[1].kind, NOTE_COMMIT);
    rack_free(rack);
}

static void a_rank_that_leaves_before_the_others_come_makes_room(void **state)
{
    (void)state;
    struct rack *rack = rack_new(2, 7);
    uint64_t join = rack_join(rack, 0, "room", 2, 0);
    rack_settle(rack);
    group_node_withdraw(&rack->node[0].node, join, NULL, rack->now_ms);
    rack_settle(rack);
    rack_expect_nothing_left(rack);
    assert_int_not_equal(rack_form(rack, "room", 2), 0);
    rack_free(rack);
}

static void a_rank_that_leaves_while_the_group_forms_fails_it_for_all(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 300; seed++) {
        struct rack *rack = rack_new(4, seed);
        uint64_t join[4];
        for (uint32_t r = 0; r < 4; r++)
            join[r] = rack_join(rack, r, "quick", 4, r);
        for (uint32_t n = rack_random(rack, 24); n > 0; n--)
            rack_deliver(rack);
        bool opened = rack->node[2].n_notes > 0;
        uint32_t group = rack->node[2].note[0].group;
        group_node_withdraw(&rack->node[2].node, join[2], NULL, rack->now_ms);
        if (opened)
            group_node_over(&rack->node[2].node, group, 2, "rank 2 (node n02) left", rack->now_ms);
        rack_settle(rack);
        for (uint32_t node = 0; node < 4; node++) {
            const struct rack_node *at = &rack->node[node];
            if (node == 2 || at->n_notes == 0)
                continue; /* it waits on: the home let rank 2 make room */
            const struct note *last = &at->note[at->n_notes - 1];
            assert_true(last->kind == NOTE_ABORT || last->kind == NOTE_OVER || last->kind == NOTE_REFUSED);
            assert_int_equal(last->error.rank == 2 || last->kind == NOTE_REFUSED, true);
            rack_forget(rack, at->note[0].group);
        }
        rack_free(rack);
    }
}

static void a_home_that_is_lost_is_replaced_by_another(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= 200; seed++) {
        struct rack *rack = rack_new(5, seed);
        uint32_t home = group_node_home(&rack->node[0].node, 1000, "homeless");
        uint32_t place[3], n = 0;
        for (uint32_t node = 0; n < 3; node++)
            if (node != home)
                place[n++] = node;
        for (uint32_t r = 0; r < 3; r++)
            rack_join(rack, place[r], "homeless", 3, r);
        for (uint32_t i = rack_random(rack, 12); i > 0; i--)
            rack_deliver(rack);
        rack_kill(rack, home);
        rack_settle(rack);
        rack_wait(rack, 12000);
        uint32_t group = 0;
        for (uint32_t r = 0; r < 3; r++) {
            const struct rack_node *at = &rack->node[place[r]];
            assert_true(at->n_notes >= 2);
            const struct note *last = &at->note[at->n_notes - 1];
            /* All have it, or all know that it failed. */
            assert_true(r == 0 || group == (last->kind == NOTE_COMMIT ? last->group : 0));
            group = last->kind == NOTE_COMMIT ? last->group : 0;
        }
        rack_free(rack);
    }
}

static void nodes_whose_inventories_differ_find_a_common_id_taken(void **state)
{
    (void)state;
    struct rack *rack = rack_new(2, 8);
    uint32_t group = rack_form(rack, "first", 2);
    rack_forget(rack, group);
    rack_forget_notes(rack);
    rack->node[1].taken = group + 1; /* the next one that the same home gives */
    uint32_t home = group_node_home(&rack->node[0].node, 1000, "first");
    rack->node[home].node.last_id = group & 0xffffffu;
    assert_int_equal(rack_form(rack, "first", 2), 0);
    const struct rack_node *at = &rack->node[0];
    rack_expect_text(&at->note[at->n_notes - 1], -MOK_EEXIST, "node n01 has an object");
    rack_free(rack);
}

/* ------------------------------------------------------------------ acting together */

static void calls_are_committed_once_all_have_called_and_all_are_prepared(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 9);
    uint32_t group = rack_form(rack, "calls", 6);
    rack->node[1].slow = true;
    rack_alloc(rack, group, 6, 1, 4096);
    rack_settle(rack);
    for (uint32_t node = 0; node < 3; node++)
        assert_null(rack_note(rack, node, NOTE_COMMIT, group, 1));
    group_node_prepared(&rack->node[1].node, group, 1, NULL, rack->now_ms);
    rack_settle(rack);
    for (uint32_t node = 0; node < 3; node++)
        assert_non_null(rack_note(rack, node, NOTE_COMMIT, group, 1));
    rack_forget(rack, group);
    rack_expect_nothing_left(rack);
    rack_free(rack);
}

static void call(struct rack *rack, uint32_t group, uint32_t rank, uint64_t index, const struct group_params *params,
                 uint64_t timeout_ms)
{
    assert_int_equal(group_node_call(&rack->node[rank].node, group, rank, index, params, timeout_ms, rack->now_ms), 0);
}

static void a_difference_names_ranks_nodes_and_field_to_all(void **state)
{
    (void)state;
    struct mok_layer_spec spec = { .hidden = 64,
                                   .intermediate = 32,
                                   .experts = 4,
                                   .topk = 2,
                                   .max_tokens = 16,
                                   .precision = MOK_BF16,
                                   .clamp = 1.5f };
    struct group_params base = { .kind = GROUP_LAYER, .spec = spec, .map = { .kind = MOK_DEVICE_HOST } };
    struct group_params other[] = { base, base, base, base, { .kind = GROUP_ALLOC, .bytes = 16 }, base };
    static const char *const says[] = {
        "ranks 0 (node n00) and 1 (node n01) differ on hidden: 64 and 128",
        "ranks 0 (node n00) and 1 (node n01) differ on topk: 2 and 3",
        "ranks 0 (node n00) and 1 (node n01) differ on clamp: 1.5 and 2",
        "symmetric workspace has 0 bytes on one and 4096 on the other",
        "rank 0 (node n00) asks for a layer and rank 1 (node n01) for a symmetric allocation",
        "their kinds are host and cuda",
    };
    other[0].spec.hidden = 128;
    other[1].spec.topk = 3;
    other[2].spec.clamp = 2;
    other[3].map.symmetric_bytes = 4096;
    other[5].map.kind = MOK_DEVICE_CUDA;
    struct rack *rack = rack_new(3, 10);
    uint32_t group = rack_form(rack, "differ", 3);
    for (uint64_t i = 0; i < ARRAY_SIZE(other); i++) {
        call(rack, group, 0, i + 1, &base, 0);
        call(rack, group, 2, i + 1, &base, 0);
        call(rack, group, 1, i + 1, &other[i], 0);
        rack_settle(rack);
        for (uint32_t node = 0; node < 3; node++)
            rack_expect_text(rack_note(rack, node, NOTE_ABORT, group, i + 1), -MOK_EMISMATCH, says[i]);
    }
    for (uint32_t rank = 0; rank < 3; rank++) /* and the ranks are still in step */
        call(rack, group, rank, ARRAY_SIZE(other) + 1, &base, 0);
    rack_settle(rack);
    assert_non_null(rack_note(rack, 2, NOTE_COMMIT, group, ARRAY_SIZE(other) + 1));
    rack_free(rack);
}

static void when_one_gives_up_waiting_all_do_and_the_counts_stay_in_step(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 11);
    struct group_params params = { .kind = GROUP_ALLOC, .bytes = 64 };
    uint32_t group = rack_form(rack, "wait", 3);
    call(rack, group, 0, 1, &params, 1000);
    call(rack, group, 1, 1, &params, 0);
    rack_wait(rack, 2000);
    rack_expect_text(rack_note(rack, 0, NOTE_ABORT, group, 1), -MOK_ETIMEDOUT, "no call came from rank 2");
    rack_expect_text(rack_note(rack, 1, NOTE_ABORT, group, 1), -MOK_ETIMEDOUT, "rank 0 of group wait waited 1000 ms");
    assert_null(rack_note(rack, 2, NOTE_ABORT, group, 1));
    call(rack, group, 2, 1, &params, 0);
    rack_settle(rack);
    rack_expect_text(rack_note(rack, 2, NOTE_ABORT, group, 1), -MOK_ETIMEDOUT, "rank 0 of group wait waited 1000 ms");
    rack_alloc(rack, group, 3, 2, 64);
    rack_settle(rack);
    assert_non_null(rack_note(rack, 2, NOTE_COMMIT, group, 2));
    rack_free(rack);
}

static void a_rank_that_calls_alone_again_and_again_leaves_little_behind(void **state)
{
    enum { CALLS = 80, KEPT = 64 };
    (void)state;
    struct rack *rack = rack_new(2, 29);
    struct group_params params = { .kind = GROUP_ALLOC, .bytes = 64 };
    uint32_t group = rack_form(rack, "alone", 2);
    for (uint64_t i = 1; i <= CALLS; i++) {
        call(rack, group, 1, i, &params, 1);
        rack_wait(rack, 300);
        rack_expect_text(rack_note(rack, 1, NOTE_ABORT, group, i), -MOK_ETIMEDOUT, "no call came from rank 0");
    }
    assert_in_range(group_node_count(&rack->node[0].node), KEPT, KEPT + 8);
    for (uint64_t i = 1; i <= CALLS; i++)
        call(rack, group, 0, i, &params, 0);
    rack_settle(rack);
    rack_expect_text(rack_note(rack, 0, NOTE_ABORT, group, CALLS - KEPT), -MOK_ETIMEDOUT,
                     "other ranks gave this call of rank 0 up");
    rack_expect_text(rack_note(rack, 0, NOTE_ABORT, group, CALLS - KEPT + 1), -MOK_ETIMEDOUT,
                     "rank 1 of group alone waited 1 ms");
    rack_alloc(rack, group, 2, CALLS + 1, 64); /* and they are in step */
    rack_settle(rack);
    assert_non_null(rack_note(rack, 1, NOTE_COMMIT, group, CALLS + 1));
    rack_free(rack);
}

static void a_time_out_beyond_all_time_is_none(void **state)
{
    (void)state;
    struct rack *rack = rack_new(2, 28);
    struct group_params params = { .kind = GROUP_ALLOC, .bytes = 16 };
    struct group_joining joining = {
        .uid = 1000, .user = "", .name = "patient", .size = 2, .kind = MOK_DEVICE_HOST, .timeout_ms = UINT64_MAX
    };
    uint64_t join[2];
    for (joining.rank = 0; joining.rank < 2; joining.rank++) {
        group_node_join(&rack->node[joining.rank].node, &joining, rack->now_ms, &join[joining.rank]);
        rack_wait(rack, 20000);
    }
    const struct note *formed = &rack->node[0].note[1];
    assert_int_equal(formed->kind, NOTE_COMMIT);
    call(rack, formed->group, 0, 1, &params, UINT64_MAX - 1);
    rack_wait(rack, 20000);
    call(rack, formed->group, 1, 1, &params, UINT64_MAX / 2 + 1);
    rack_settle(rack);
    assert_non_null(rack_note(rack, 1, NOTE_COMMIT, formed->group, 1));
    rack_free(rack);
}

static void what_one_node_cannot_do_is_undone_by_all_and_the_group_goes_on(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 12);
    uint32_t group = rack_form(rack, "undo", 3);
    group_error_set(&rack->node[2].fails, -MOK_ENOMEM, 2, "rank 2: device host0 has no room");
    rack_alloc(rack, group, 3, 1, 64);
    rack_settle(rack);
    for (uint32_t node = 0; node < 3; node++)
        rack_expect_text(rack_note(rack, node, NOTE_ABORT, group, 1), -MOK_ENOMEM, "rank 2: device host0 has no room");
    rack->node[2].fails.code = 0;
    rack_alloc(rack, group, 3, 2, 64);
    rack_settle(rack);
    for (uint32_t node = 0; node < 3; node++)
        assert_non_null(rack_note(rack, node, NOTE_COMMIT, group, 2));
    rack_free(rack);
}

static void a_node_that_does_not_prepare_in_time_is_named(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 13);
    uint32_t group = rack_form(rack, "slow", 3);
    rack->node[1].slow = true;
    rack_alloc(rack, group, 3, 1, 64);
    rack_wait(rack, GROUP_PREPARE_MS + 1000);
    for (uint32_t node = 0; node < 3; node++)
        rack_expect_text(rack_note(rack, node, NOTE_ABORT, group, 1), -MOK_ETIMEDOUT,
                    "node n01 (rank 1) did not do its part");
    group_node_prepared(&rack->node[1].node, group, 1, NULL, rack->now_ms); /* too late: nobody listens */
    rack_settle(rack);
    assert_null(rack_note(rack, 0, NOTE_COMMIT, group, 1));
    rack_free(rack);
}

/* ------------------------------------------------------------------ going */

static void a_lost_node_ends_the_groups_with_ranks_there_and_no_others(void **state)
{
    (void)state;
    struct rack *rack = rack_new(4, 14);
    uint32_t hurt = rack_form(rack, "hurt", 4), well;
    rack_join(rack, 0, "well", 2, 0);
    rack_join(rack, 1, "well", 2, 1);
    rack_settle(rack);
    well = rack->node[1].note[rack->node[1].n_notes - 1].group;
    rack_alloc(rack, hurt, 3, 1, 64); /* rank 3 never calls */
    rack_settle(rack);
    rack_kill(rack, 3);
    rack_settle(rack);
    for (uint32_t node = 0; node < 3; node++) {
        const struct note *note = rack_note(rack, node, NOTE_OVER, hurt, 0);
        rack_expect_text(note, -MOK_EPEER, "rank 3 is gone: node n03 was lost: restarted");
        assert_int_equal(note->error.rank, 3);
        assert_null(rack_note(rack, node, NOTE_OVER, well, 0));
    }
    rack_forget(rack, hurt);
    rack_alloc(rack, well, 2, 1, 64);
    rack_settle(rack);
    assert_non_null(rack_note(rack, 1, NOTE_COMMIT, well, 1));
    rack_boot(rack, 3);
    rack_forget_notes(rack);
    assert_int_not_equal(rack_form(rack, "hurt", 4), 0); /* and can form again */
    rack_free(rack);
}

static void a_home_without_a_rank_may_go_unnoticed(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 15);
    char name[16];
    for (unsigned i = 0;; i++) {
        snprintf(name, sizeof(name), "away-%u", i);
        if (group_node_home(&rack->node[0].node, 1000, name) == 2)
            break;
    }
    rack_join(rack, 0, name, 2, 0);
    rack_join(rack, 1, name, 2, 1);
    rack_settle(rack);
    uint32_t group = rack->node[0].note[0].group;
    assert_non_null(rack_note(rack, 1, NOTE_COMMIT, group, 0));
    rack_kill(rack, 2);
    rack_settle(rack);
    assert_null(rack_note(rack, 0, NOTE_OVER, group, 0));
    rack_alloc(rack, group, 2, 1, 64);
    rack_settle(rack);
    assert_non_null(rack_note(rack, 1, NOTE_COMMIT, group, 1));
    rack_free(rack);
}

static void a_link_that_is_cut_ends_the_group_also_for_who_still_sees_both(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 16);
    uint32_t group = rack_form(rack, "cut", 3);
    rack_cut(rack, 0, 1);
    rack_settle(rack);
    for (uint32_t node = 0; node < 3; node++)
        assert_non_null(rack_note(rack, node, NOTE_OVER, group, 0));
    rack_forget(rack, group);
    rack_expect_nothing_left(rack);
    rack_free(rack);
}

static void who_is_asked_to_let_go_answers_or_is_lost(void **state)
{
    (void)state;
    struct rack *rack = rack_new(3, 17);
    uint32_t group = rack_form(rack, "drop", 3);
    assert_int_equal(group_node_drop(&rack->node[0].node, group, 0, 7, 1, rack->now_ms), 2);
    rack_settle(rack);
    assert_int_equal(rack->node[0].note[rack->node[0].n_notes - 1].kind, NOTE_DROPPED);
    assert_int_equal(rack->node[0].note[rack->node[0].n_notes - 2].kind, NOTE_DROPPED);
    assert_int_equal(group_node_drop(&rack->node[0].node, group, 0, 7, 2, rack->now_ms), 2);
    rack_kill(rack, 1);
    rack_kill(rack, 2);
    rack_settle(rack);
    assert_int_equal(rack->node[0].note[rack->node[0].n_notes - 1].index, 2);
    assert_int_equal(rack->node[0].note[rack->node[0].n_notes - 1].kind, NOTE_DROPPED);
    rack_forget(rack, group);
    rack_expect_nothing_left(rack);
    rack_free(rack);
}

/* ------------------------------------------------------------------ everything at once */

/* What each node has of one group when all is quiet: all of them have it well, or none. */
static bool expect_same_end(struct rack *rack, uint32_t group)
{
    unsigned well = 0, ended = 0, nodes = 0;

    for (uint32_t node = 0; node < rack->size; node++) {
        bool opened = rack_note(rack, node, NOTE_OPENED, group, 0);
        if (!opened)
            continue;
        nodes++;
        bool over = rack_note(rack, node, NOTE_OVER, group, 0) || rack_note(rack, node, NOTE_ABORT, group, 0);
        ended += over;
        well += !over && rack_note(rack, node, NOTE_COMMIT, group, 0);
    }
    assert_int_equal(well + ended, nodes);
    assert_true(well == 0 || ended == 0);
    assert_true(well == 0 || nodes == rack->size);
    return well > 0;
}

/* Groups form and call while links are cut and healed and nodes restart; messages may also come twice. */
static void storm(uint64_t seed, unsigned duplicate_percent, unsigned *well, unsigned *ended)
{
    struct rack *rack = rack_new(4, seed);
    static const char *const names[] = { "a", "b" };
    uint32_t groups[64], n_groups = 0;

    rack->duplicate_percent = duplicate_percent;
    for (unsigned step = 0; step < 120; step++) {
        uint32_t a = rack_random(rack, 4), b = (a + 1 + rack_random(rack, 3)) % 4;
        switch (rack_random(rack, 12)) {
        case 0:
            rack_cut(rack, a, b);
            break;
        case 1:
            rack_heal(rack, a, b);
            break;
        case 2:
            rack_join(rack, a, names[step & 1], 4, a);
            break;
        case 3:
            rack->now_ms += 250;
            group_node_tick(&rack->node[a].node, rack->now_ms);
            break;
        default:
            for (unsigned n = rack_random(rack, 8); n > 0; n--)
                rack_deliver(rack);
        }
    }
    rack->duplicate_percent = 0;
    for (uint32_t x = 0; x < 4; x++)
        for (uint32_t y = x + 1; y < 4; y++)
            rack_heal(rack, x, y);
    rack_settle(rack);
    rack_wait(rack, GROUP_PREPARE_MS + 20000);
    for (uint32_t node = 0; node < 4; node++) {
        const struct rack_node *at = &rack->node[node];
        assert_true(at->n_notes < RACK_NOTES);
        for (size_t i = 0; i < at->n_notes; i++)
            if (at->note[i].kind == NOTE_OPENED && n_groups < 64)
                groups[n_groups++] = at->note[i].group;
    }
    for (uint32_t i = 0; i < n_groups; i++)
        ++*(expect_same_end(rack, groups[i]) ? well : ended);
    for (uint32_t i = 0; i < n_groups; i++)
        rack_forget(rack, groups[i]);
    rack_free(rack);
}

static void whatever_happens_all_nodes_end_with_the_same_groups(void **state)
{
    unsigned well = 0, ended = 0;
    (void)state;
    for (uint64_t seed = 1; seed <= STORMS; seed++)
        storm(seed, 0, &well, &ended);
    for (uint64_t seed = 1; seed <= STORMS / 2; seed++)
        storm(seed, 10, &well, &ended);
    print_message("of the groups that opened, %u are well and %u have ended (counted once a node)\n", well, ended);
    assert_true(well > STORMS / 4 && ended > STORMS / 4); /* both happened often enough to mean something */
}

static void ten_thousand_groups_come_and_go_without_growth(void **state)
{
    (void)state;
    struct rack *rack = rack_new(4, 18);
    size_t before = 0;
    for (unsigned cycle = 0; cycle < CYCLES; cycle++) {
        char name[16];
        snprintf(name, sizeof(name), "cycle-%u", cycle % 7);
        rack_forget_notes(rack);
        uint32_t group = rack_form(rack, name, 4);
        assert_int_not_equal(group, 0);
        rack_alloc(rack, group, 4, 1, 4096);
        rack_settle(rack);
        assert_non_null(rack_note(rack, 3, NOTE_COMMIT, group, 1));
        group_node_over(&rack->node[cycle % 4].node, group, cycle % 4, "left", rack->now_ms);
        rack_settle(rack);
        rack_forget(rack, group);
        rack_expect_nothing_left(rack);
        if (cycle == 100)
            before = mallinfo2().uordblks;
    }
    assert_true(mallinfo2().uordblks <= before + 65536);
    rack_free(rack);
}

/* Each node's ranks join the jobs in an order of their own, and call in the middle of the others' joins. */
static void overlapping_jobs_of_a_whole_rack_all_form_and_act(void **state)
{
    enum { JOBS = 6, RANKS = 72, NODES = 18 };
    (void)state;
    struct rack *rack = rack_new(NODES, 20);
    for (uint32_t turn = 0; turn < JOBS * 4; turn++) {
        for (uint32_t node = 0; node < NODES; node++) {
            uint32_t at = node % 2 ? JOBS * 4 - 1 - turn : (turn + node) % (JOBS * 4);
            char name[16];
            snprintf(name, sizeof(name), "job-%u", at % JOBS);
            rack_join(rack, node, name, RANKS, node + NODES * (at / JOBS));
            for (uint32_t n = rack_random(rack, 8); n > 0; n--)
                rack_deliver(rack);
        }
    }
    rack_settle(rack);
    unsigned formed = 0;
    for (size_t i = 0; i < rack->node[5].n_notes; i++) {
        const struct note *note = &rack->node[5].note[i];
        if (note->kind != NOTE_COMMIT || note->index != 0)
            continue;
        formed++;
        rack_alloc(rack, note->group, RANKS, 1, 4096);
    }
    assert_int_equal(formed, JOBS);
    rack_settle(rack);
    for (uint32_t node = 0; node < NODES; node++) {
        unsigned acted = 0;
        for (size_t i = 0; i < rack->node[node].n_notes; i++)
            acted += rack->node[node].note[i].kind == NOTE_COMMIT && rack->node[node].note[i].index == 1;
        assert_int_equal(acted, JOBS);
    }
    rack_free(rack);
}

static void messages_of_a_group_grow_linearly_with_its_nodes(void **state)
{
    (void)state;
    uint64_t messages[2];
    static const uint32_t nodes[2] = { 6, 18 };
    for (int i = 0; i < 2; i++) {
        struct rack *rack = rack_new(nodes[i], 19);
        uint32_t group = rack_form(rack, "linear", nodes[i] * 4);
        assert_int_not_equal(group, 0);
        rack_alloc(rack, group, nodes[i] * 4, 1, 4096);
        rack_settle(rack);
        messages[i] = rack->delivered;
        rack_free(rack);
    }
    assert_true(messages[1] <= messages[0] * 3 + 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(ranks_come_together_in_any_order_of_arrival),
        cmocka_unit_test(all_nodes_choose_the_same_home_and_names_are_spread),
        cmocka_unit_test(ranks_that_differ_on_the_size_all_learn_who_said_what),
        cmocka_unit_test(devices_of_two_kinds_do_not_come_together),
        cmocka_unit_test(another_user_is_not_let_in_nor_one_who_only_has_the_same_number),
        cmocka_unit_test(a_rank_that_is_taken_is_refused_and_the_group_still_forms),
        cmocka_unit_test(a_rank_that_waits_too_long_learns_who_is_missing_and_makes_room),
        cmocka_unit_test(a_rank_that_leaves_before_the_others_come_makes_room),
        cmocka_unit_test(a_rank_that_leaves_while_the_group_forms_fails_it_for_all),
        cmocka_unit_test(a_home_that_is_lost_is_replaced_by_another),
        cmocka_unit_test(who_waits_in_vain_is_told_whom_his_node_does_not_reach),
        cmocka_unit_test(nodes_whose_inventories_differ_find_a_common_id_taken),
        cmocka_unit_test(calls_are_committed_once_all_have_called_and_all_are_prepared),
        cmocka_unit_test(a_difference_names_ranks_nodes_and_field_to_all),
        cmocka_unit_test(when_one_gives_up_waiting_all_do_and_the_counts_stay_in_step),
        cmocka_unit_test(a_rank_that_calls_alone_again_and_again_leaves_little_behind),
        cmocka_unit_test(a_time_out_beyond_all_time_is_none),
        cmocka_unit_test(what_one_node_cannot_do_is_undone_by_all_and_the_group_goes_on),
        cmocka_unit_test(a_node_that_does_not_prepare_in_time_is_named),
        cmocka_unit_test(a_lost_node_ends_the_groups_with_ranks_there_and_no_others),
        cmocka_unit_test(a_home_without_a_rank_may_go_unnoticed),
        cmocka_unit_test(a_link_that_is_cut_ends_the_group_also_for_who_still_sees_both),
        cmocka_unit_test(who_is_asked_to_let_go_answers_or_is_lost),
        cmocka_unit_test(whatever_happens_all_nodes_end_with_the_same_groups),
        cmocka_unit_test(ten_thousand_groups_come_and_go_without_growth),
        cmocka_unit_test(overlapping_jobs_of_a_whole_rack_all_form_and_act),
        cmocka_unit_test(messages_of_a_group_grow_linearly_with_its_nodes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
