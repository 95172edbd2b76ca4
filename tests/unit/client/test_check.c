/* SPDX-License-Identifier: Apache-2.0 */
/* What is wrong with an argument is said before anything is sent: code, argument, value, bound. */
#include "support.h"

#include <math.h>

#include "check.h"
#include "session.h"

static const mok_layer_options good_layer = {
    .size = sizeof(good_layer),
    .hidden = 64,
    .intermediate = 32,
    .experts = 8,
    .topk = 2,
    .max_tokens = 16,
    .precision = MOK_BF16,
};

/* ------------------------------------------------------------------ sizes of options */

static void a_null_options_pointer_is_refused(void **state)
{
    mok_group_options ret;
    (void)state;
    assert_fails(check_group_options(NULL, &ret), MOK_EARG, "mok_group_options is NULL");
}

static void a_size_of_zero_is_refused_with_the_size_that_is_due(void **state)
{
    const mok_group_options from = { .size = 0, .name = "g", .ranks = 1 };
    mok_group_options ret;
    (void)state;
    assert_fails(check_group_options(&from, &ret), MOK_ESIZE, "mok_group_options.size is 0, must be 28..4096");
}

static void an_uninitialised_size_is_refused_and_not_read(void **state)
{
    const mok_group_options from = { .size = SIZE_MAX, .name = "g", .ranks = 1 };
    mok_group_options ret;
    (void)state;
    assert_fails(check_group_options(&from, &ret), MOK_ESIZE, "mok_group_options.size is 18446744073709551615");
}

static void an_older_program_s_smaller_options_are_taken_and_the_rest_is_zero(void **state)
{
    const mok_group_options from = {
        .size = offsetof(mok_group_options, timeout_ms), .name = "g", .ranks = 2, .rank = 1, .timeout_ms = 77
    };
    mok_group_options ret;
    (void)state;
    assert_works(check_group_options(&from, &ret));
    assert_int_equal(ret.rank, 1);
    assert_int_equal(ret.timeout_ms, 0);
}

struct newer {
    mok_layer_options known;
    uint64_t more[2];
};

static void a_newer_program_s_larger_options_are_taken_while_the_rest_is_zero(void **state)
{
    struct newer from = { .known = good_layer };
    Mok__LayerSpec ret;
    (void)state;
    from.known.size = sizeof(from);
    assert_works(check_layer_options(&from.known, 2, &ret));
    assert_int_equal(ret.hidden, 64);
}

static void a_newer_program_s_larger_options_are_refused_when_the_rest_means_something(void **state)
{
    struct newer from = { .known = good_layer, .more = { 0, 1 } };
    Mok__LayerSpec ret;
    (void)state;
    from.known.size = sizeof(from);
    assert_fails(check_layer_options(&from.known, 2, &ret), MOK_ESIZE, "is not zero; this library knows 72 bytes");
}

/* ------------------------------------------------------------------ sessions and groups */

static void session_options_may_be_left_out(void **state)
{
    mok_session_options ret;
    (void)state;
    assert_works(check_session_options(NULL, &ret));
    assert_int_equal(ret.queue_entries, 64);
    assert_null(ret.job);
}

static void queue_entries_are_a_power_of_two_in_4_to_4096(void **state)
{
    static const uint32_t bad[] = { 1, 2, 3, 48, 4095, 4097, 8192, UINT32_MAX };
    mok_session_options from = { .size = sizeof(from) }, ret;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        from.queue_entries = bad[i];
        assert_fails(check_session_options(&from, &ret), MOK_ERANGE, "must be a power of two in 4..4096");
    }
    for (from.queue_entries = 4; from.queue_entries <= 4096; from.queue_entries *= 2)
        assert_works(check_session_options(&from, &ret));
}

static void names_have_1_to_63_of_their_characters(void **state)
{
    static const char *const bad[] = {
        "", " ", "a b", "a/b", "caf\xc3\xa9", "a\n", "0123456789012345678901234567890123456789012345678901234567890123"
    };
    mok_session_options from = { .size = sizeof(from) }, ret;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        from.job = bad[i];
        assert_fails(check_session_options(&from, &ret), MOK_ENAME, "job is \"");
    }
    from.job = "012345678901234567890123456789012345678901234567890123456789._-";
    assert_works(check_session_options(&from, &ret));
}

static void groups_have_1_to_128_ranks_and_a_rank_is_one_of_them(void **state)
{
    mok_group_options from = { .size = sizeof(from), .name = "g", .ranks = 0 }, ret;
    (void)state;
    assert_fails(check_group_options(&from, &ret), MOK_ERANGE, "ranks is 0, must be 1..128");
    from.ranks = 129;
    assert_fails(check_group_options(&from, &ret), MOK_ERANGE, "ranks is 129, must be 1..128");
    from.ranks = 4;
    from.rank = 4;
    assert_fails(check_group_options(&from, &ret), MOK_ERANK, "rank is 4, must be 0..3");
    from.rank = 3;
    from.device = 64;
    assert_fails(check_group_options(&from, &ret), MOK_ERANGE, "device is 64, must be 0..63");
    from.device = 63;
    from.name = NULL;
    assert_fails(check_group_options(&from, &ret), MOK_ENAME, "name is NULL");
}

/* ------------------------------------------------------------------ layers */

struct layer_case {
    size_t field;
    uint32_t value;
    int code;
    const char *words;
};
#define FIELD(name) offsetof(mok_layer_options, name)

static void each_layer_option_out_of_its_range_is_named_with_value_and_bound(void **state)
{
    static const struct layer_case cases[] = {
        { FIELD(hidden), 0, MOK_ERANGE, "hidden is 0, must be 16..1048576" },
        { FIELD(hidden), 1048592, MOK_ERANGE, "hidden is 1048592, must be 16..1048576" },
        { FIELD(hidden), 72, MOK_EALIGN, "hidden is 72, must be a multiple of 16" },
        { FIELD(intermediate), 0, MOK_ERANGE, "intermediate is 0" },
        { FIELD(intermediate), 17, MOK_EALIGN, "intermediate is 17, must be a multiple of 16" },
        { FIELD(shared_intermediate), 8, MOK_EALIGN, "shared_intermediate is 8" },
        { FIELD(experts), 0, MOK_ERANGE, "experts is 0, must be 1..4096" },
        { FIELD(experts), 4098, MOK_ERANGE, "experts is 4098" },
        { FIELD(experts), 7, MOK_ERANGE, "experts is 7, must be a multiple of the group's 2 ranks" },
        { FIELD(topk), 0, MOK_ERANGE, "topk is 0, must be 1..64" },
        { FIELD(topk), 65, MOK_ERANGE, "topk is 65, must be 1..64" },
        { FIELD(max_tokens), 0, MOK_ERANGE, "max_tokens is 0" },
        { FIELD(max_tokens), 16777217, MOK_ERANGE, "max_tokens is 16777217, must be 1..16777216" },
        { FIELD(precision), 0, MOK_EDTYPE, "precision is 0" },
        { FIELD(precision), 4, MOK_EDTYPE, "precision is 4" },
        { FIELD(gradient_dtype), 3, MOK_EDTYPE, "gradient_dtype is 3, must be 0, 2 (F32) or 1 (BF16)" },
        { FIELD(wgrad_precision), 3, MOK_EDTYPE, "wgrad_precision is 3, must be 0, 1 (bf16) or 2 (mxfp8)" },
        { FIELD(wgrad_precision), 2, MOK_EDTYPE,
          "wgrad_precision is 2 (mxfp8), must be 0 or 1 (bf16) where precision is 1" },
        { FIELD(transposed_weights), 2, MOK_ERANGE, "transposed_weights is 2, must be 0..1" },
        { FIELD(transposed_weights), 1, MOK_EDTYPE, "transposed_weights is 1, must be 0 where precision is not 3" },
    };
    Mok__LayerSpec ret;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        mok_layer_options from = good_layer;
        memcpy((char *)&from + cases[i].field, &cases[i].value, sizeof(cases[i].value));
        assert_fails(check_layer_options(&from, 2, &ret), cases[i].code, cases[i].words);
    }
}

static void a_clamp_that_is_no_number_or_negative_is_refused(void **state)
{
    static const float bad[] = { -1.0f, INFINITY, NAN };
    Mok__LayerSpec ret;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        mok_layer_options from = good_layer;
        from.clamp = bad[i];
        assert_fails(check_layer_options(&from, 2, &ret), MOK_ERANGE, "clamp is ");
    }
}

static void more_slots_than_experts_are_fine(void **state)
{
    mok_layer_options from = good_layer;
    Mok__LayerSpec ret;
    (void)state;
    from.topk = 14;
    assert_works(check_layer_options(&from, 2, &ret));
}

/* ------------------------------------------------------------------ views */

struct place {
    mok_session session, other_session;
    mok_group group, other_group;
    mok_buffer symmetric, private, other_device, other_group_s, other_session_s;
    struct check_place place;
};

static int set_up(void **state)
{
    struct place *p = calloc(1, sizeof(*p));

    p->group.session = &p->session;
    p->symmetric = (mok_buffer){ .session = &p->session, .group = &p->group, .id = 1, .device = 3, .bytes = 4096 };
    p->private = (mok_buffer){ .session = &p->session, .id = 2, .device = 3, .bytes = 4096 };
    p->other_device = (mok_buffer){ .session = &p->session, .id = 3, .device = 4, .bytes = 4096 };
    p->other_group_s =
        (mok_buffer){ .session = &p->session, .group = &p->other_group, .id = 4, .device = 3, .bytes = 4096 };
    p->other_session_s = (mok_buffer){ .session = &p->other_session, .id = 5, .device = 3, .bytes = 4096 };
    p->place = (struct check_place){ .session = &p->session, .group = &p->group, .device = 3 };
    *state = p;
    return 0;
}

static int tear_down(void **state)
{
    free(*state);
    return 0;
}

static int check_one(struct place *p, mok_view view, uint64_t bytes, bool symmetric, struct mok_region *ret)
{
    const struct check_view one = {
        .name = "x", .view = &view, .bytes = bytes, .required = true, .symmetric = symmetric
    };
    return check_views(&p->place, &one, 1, ret);
}

static void a_view_without_a_length_goes_to_the_end_and_only_what_is_needed_is_passed_on(void **state)
{
    struct place *p = *state;
    struct mok_region region;
    assert_works(check_one(p, (mok_view){ &p->symmetric, 32, 0 }, 64, true, &region));
    assert_int_equal(region.buffer, 1);
    assert_int_equal(region.offset, 32);
    assert_int_equal(region.length, 64);
}

static void a_view_that_is_too_short_is_refused_with_both_lengths(void **state)
{
    struct place *p = *state;
    struct mok_region region;
    assert_fails(check_one(p, (mok_view){ &p->symmetric, 0, 63 }, 64, true, &region), MOK_ESIZE,
                 "x has 63 bytes, must have at least 64");
    assert_fails(check_one(p, (mok_view){ &p->symmetric, 4080, 0 }, 64, true, &region), MOK_ESIZE,
                 "x has 16 bytes, must have at least 64");
}

static void a_view_past_its_buffer_is_refused_however_large_its_numbers_are(void **state)
{
    struct place *p = *state;
    struct mok_region region;
    assert_fails(check_one(p, (mok_view){ &p->symmetric, 4112, 0 }, 1, true, &region), MOK_ERANGE, "x has offset 4112");
    assert_fails(check_one(p, (mok_view){ &p->symmetric, 4080, 32 }, 1, true, &region), MOK_ERANGE,
                 "x has 32 bytes at offset 4080, must end at most at the buffer's 4096");
    assert_fails(check_one(p, (mok_view){ &p->symmetric, 16, UINT64_MAX }, 1, true, &region), MOK_ERANGE, "x has ");
    assert_fails(check_one(p, (mok_view){ &p->symmetric, UINT64_MAX - 15, 32 }, 1, true, &region), MOK_ERANGE,
                 "x has ");
}

static void an_offset_is_a_multiple_of_16(void **state)
{
    struct place *p = *state;
    struct mok_region region;
    assert_fails(check_one(p, (mok_view){ &p->symmetric, 8, 0 }, 1, true, &region), MOK_EALIGN,
                 "x has offset 8, must be a multiple of 16");
}

static void a_view_must_be_of_the_session_the_device_and_where_due_the_group(void **state)
{
    struct place *p = *state;
    struct mok_region region;
    assert_fails(check_one(p, (mok_view){ &p->other_session_s, 0, 0 }, 1, false, &region), MOK_EBUFFER,
                 "another session");
    assert_fails(check_one(p, (mok_view){ &p->other_device, 0, 0 }, 1, false, &region), MOK_EBUFFER,
                 "on device 4, must be on device 3");
    assert_fails(check_one(p, (mok_view){ &p->private, 0, 0 }, 1, true, &region), MOK_EBUFFER,
                 "x is in private buffer 2");
    assert_fails(check_one(p, (mok_view){ &p->other_group_s, 0, 0 }, 1, true, &region), MOK_EBUFFER,
                 "x is in another group's buffer 4");
    assert_works(check_one(p, (mok_view){ &p->private, 0, 0 }, 1, false, &region));
}

static void an_absent_view_is_all_zero_and_allowed_only_where_nothing_is_needed(void **state)
{
    struct place *p = *state;
    struct mok_region region;
    assert_fails(check_one(p, (mok_view){ NULL, 0, 0 }, 64, true, &region), MOK_EBUFFER,
                 "x is absent, must have 64 bytes");
    assert_fails(check_one(p, (mok_view){ NULL, 16, 0 }, 0, true, &region), MOK_EARG, "x has no buffer but offset 16");
    assert_works(check_one(p, (mok_view){ NULL, 0, 0 }, 0, true, &region));
    assert_int_equal(region.buffer, 0);
    assert_works(check_one(p, (mok_view){ &p->symmetric, 16, 0 }, 0, true, &region));
    assert_int_equal(region.buffer, 0);
    assert_int_equal(region.offset, 0);
}

static void what_is_written_overlaps_nothing_and_what_is_read_may(void **state)
{
    struct place *p = *state;
    const mok_view first = { &p->symmetric, 0, 0 }, second = { &p->symmetric, 48, 0 }, apart = { &p->symmetric, 64, 0 };
    struct check_view views[] = {
        { .name = "x", .view = &first, .bytes = 64 },
        { .name = "out", .view = &second, .bytes = 64, .written = true },
    };
    struct mok_region regions[2];

    assert_fails(check_views(&p->place, views, 2, regions), MOK_EARG, "out, which is written, overlaps x in buffer 1");
    views[1].view = &apart;
    assert_works(check_views(&p->place, views, 2, regions));
    views[1].view = &second;
    views[1].written = false;
    assert_works(check_views(&p->place, views, 2, regions));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_null_options_pointer_is_refused),
        cmocka_unit_test(a_size_of_zero_is_refused_with_the_size_that_is_due),
        cmocka_unit_test(an_uninitialised_size_is_refused_and_not_read),
        cmocka_unit_test(an_older_program_s_smaller_options_are_taken_and_the_rest_is_zero),
        cmocka_unit_test(a_newer_program_s_larger_options_are_taken_while_the_rest_is_zero),
        cmocka_unit_test(a_newer_program_s_larger_options_are_refused_when_the_rest_means_something),
        cmocka_unit_test(session_options_may_be_left_out),
        cmocka_unit_test(queue_entries_are_a_power_of_two_in_4_to_4096),
        cmocka_unit_test(names_have_1_to_63_of_their_characters),
        cmocka_unit_test(groups_have_1_to_128_ranks_and_a_rank_is_one_of_them),
        cmocka_unit_test(each_layer_option_out_of_its_range_is_named_with_value_and_bound),
        cmocka_unit_test(a_clamp_that_is_no_number_or_negative_is_refused),
        cmocka_unit_test(more_slots_than_experts_are_fine),
        cmocka_unit_test_setup_teardown(a_view_without_a_length_goes_to_the_end_and_only_what_is_needed_is_passed_on,
                                        set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_view_that_is_too_short_is_refused_with_both_lengths, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_view_past_its_buffer_is_refused_however_large_its_numbers_are, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(an_offset_is_a_multiple_of_16, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_view_must_be_of_the_session_the_device_and_where_due_the_group, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(an_absent_view_is_all_zero_and_allowed_only_where_nothing_is_needed, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(what_is_written_overlaps_nothing_and_what_is_read_may, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
