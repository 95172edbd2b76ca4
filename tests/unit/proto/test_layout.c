/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers of the ABI that must never move, and the texts and names that go with them. */
#include "support.h"

#include "memory.h"
#include "names.h"

#define at(type, member, offset) assert_int_equal(offsetof(struct type, member), offset)

static void the_fields_of_a_submission_are_where_the_abi_says(void **state)
{
    (void)state;
    at(mok_sqe, opcode, 0);
    at(mok_sqe, context_mode, 1);
    at(mok_sqe, reserved0, 2);
    at(mok_sqe, flags, 4);
    at(mok_sqe, user_data, 8);
    at(mok_sqe, layer, 16);
    at(mok_sqe, tokens, 20);
    at(mok_sqe, timeout_ns, 24);
    at(mok_sqe, cancel_target, 32);
    at(mok_sqe, stream_slot, 40);
    at(mok_sqe, stream_number, 44);
    at(mok_sqe, reserved1, 48);
    at(mok_sqe, region, 64);
    at(mok_region, buffer, 0);
    at(mok_region, reserved, 4);
    at(mok_region, offset, 8);
    at(mok_region, length, 16);
}

static void the_fields_of_a_completion_are_where_the_abi_says(void **state)
{
    (void)state;
    at(mok_cqe, user_data, 0);
    at(mok_cqe, result, 8);
    at(mok_cqe, engine, 12);
    at(mok_cqe, precision, 13);
    at(mok_cqe, argument, 14);
    at(mok_cqe, rows, 16);
    at(mok_cqe, dropped, 24);
    at(mok_cqe, device_ns, 32);
    at(mok_cqe, value, 40);
    at(mok_cqe, bound, 48);
    at(mok_cqe, detail, 56);
}

static void the_shared_words_have_a_line_each(void **state)
{
    (void)state;
    at(mok_ring_header, magic, 0);
    at(mok_ring_header, abi_version, 4);
    at(mok_ring_header, features, 8);
    at(mok_ring_header, header_bytes, 12);
    at(mok_ring_header, sq_entries, 16);
    at(mok_ring_header, cq_entries, 20);
    at(mok_ring_header, sqe_bytes, 24);
    at(mok_ring_header, cqe_bytes, 28);
    at(mok_ring_header, control_bytes, 32);
    at(mok_ring_header, submit_bytes, 40);
    at(mok_ring_header, cqe_offset, 48);
    at(mok_ring_header, sqe_offset, 56);
    at(mok_ring_header, initial_counter, 64);
    at(mok_ring_header, sq_head, 128);
    at(mok_ring_header, sq_flags, 192);
    at(mok_ring_header, cq_tail, 256);
    at(mok_ring_header, cq_wakeups, 260);
    at(mok_ring_header, state, 320);
    at(mok_ring_header, close_code, 324);
    at(mok_ring_submit, sq_tail, 0);
    at(mok_ring_submit, cq_head, 64);
    at(mok_ring_submit, cq_sleepers, 128);
}

static void every_queue_size_has_room_for_all_its_entries(void **state)
{
    (void)state;
    struct mok_queue_layout layout;

    for (uint32_t n = MOK_RING_MIN_ENTRIES; n <= MOK_RING_MAX_ENTRIES; n *= 2) {
        assert_int_equal(mok_queue_layout(n, &layout), 0);
        assert_int_equal(layout.sq_entries, n);
        assert_int_equal(layout.cq_entries, 2 * n);
        assert_true(layout.cqe_offset >= sizeof(struct mok_ring_header));
        assert_true(layout.sqe_offset >= sizeof(struct mok_ring_submit));
        assert_true(layout.control_bytes >= layout.cqe_offset + 2 * n * sizeof(struct mok_cqe));
        assert_true(layout.submit_bytes >= layout.sqe_offset + n * sizeof(struct mok_sqe));
        assert_true(layout.inflight_bytes >= 2 * n * sizeof(struct mok_inflight_entry));
        assert_int_equal(layout.control_bytes % MOK_MEMORY_PAGE, 0);
    }
}

static void other_queue_sizes_are_refused(void **state)
{
    (void)state;
    const uint32_t wrong[] = { 0, 1, 2, 3, 5, 6, 7, 12, 100, 4095, 4097, 8192, 0x80000000u, UINT32_MAX };
    struct mok_queue_layout layout;

    for (size_t i = 0; i < ARRAY_SIZE(wrong); i++)
        assert_int_equal(mok_queue_layout(wrong[i], &layout), -MOK_ERANGE);
}

static void codes_keep_their_numbers_and_have_their_own_texts(void **state)
{
    (void)state;
    assert_int_equal(MOK_EARG, 1);
    assert_int_equal(MOK_EAGAIN, 15);
    assert_int_equal(MOK_EWORKER, 19);
    assert_int_equal(MOK_EINTERNAL, 35);
    for (int a = 0; a <= MOK_EINTERNAL; a++) {
        assert_string_equal(mok_error_text(a), mok_error_text(-a));
        assert_string_equal(mok_error_symbol(a), mok_error_symbol(-a));
        for (int b = a + 1; b <= MOK_EINTERNAL; b++) {
            assert_string_not_equal(mok_error_text(a), mok_error_text(b));
            assert_string_not_equal(mok_error_symbol(a), mok_error_symbol(b));
        }
    }
    assert_string_equal(mok_error_symbol(-MOK_ERANGE), "MOK_ERANGE");
    assert_string_equal(mok_error_symbol(0), "0");
    assert_string_equal(mok_error_symbol(9999), "MOK_E?");
    assert_string_equal(mok_error_text(9999), "unknown error");
}

static void arguments_and_kinds_have_names(void **state)
{
    (void)state;
    assert_string_equal(mok_argument_text(MOK_ARG_REGION0 + MOK_REGION_D_OUT), "d_out");
    assert_string_equal(mok_argument_text(MOK_ARG_CQ_HEAD), "cq_head");
    assert_string_equal(mok_argument_text(MOK_ARG_NONE), "");
    assert_string_equal(mok_argument_text(9999), "?");
    assert_string_equal(mok_device_kind_text(MOK_DEVICE_HOST), "host");
    assert_string_equal(mok_device_kind_text(77), "?");
    assert_string_equal(mok_precision_text(MOK_MXFP8_PER128), "mxfp8-per128");
    assert_string_equal(mok_precision_text(0), "?");
    assert_string_equal(mok_word_of(&mok_wgrads, MOK_WGRAD_MXFP8 + 1), "?");
}

static void names_are_of_the_allowed_letters_and_length(void **state)
{
    (void)state;
    const char *good[] = { "a", "job-1", "A.b_C-9", "..", "-" };
    const char *bad[] = { "", "a b", "a/b", "a\n", "\xc3\xa4", "a:b", "a\x7f" };
    char longest[MOK_MAX_NAME + 2];

    for (size_t i = 0; i < ARRAY_SIZE(good); i++)
        assert_true(mok_name_is_valid(good[i]));
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++)
        assert_false(mok_name_is_valid(bad[i]));
    assert_false(mok_name_is_valid(NULL));
    memset(longest, 'x', sizeof(longest));
    longest[MOK_MAX_NAME + 1] = '\0';
    assert_false(mok_name_is_valid(longest));
    longest[MOK_MAX_NAME] = '\0';
    assert_true(mok_name_is_valid(longest));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_fields_of_a_submission_are_where_the_abi_says),
        cmocka_unit_test(the_fields_of_a_completion_are_where_the_abi_says),
        cmocka_unit_test(the_shared_words_have_a_line_each),
        cmocka_unit_test(every_queue_size_has_room_for_all_its_entries),
        cmocka_unit_test(other_queue_sizes_are_refused),
        cmocka_unit_test(codes_keep_their_numbers_and_have_their_own_texts),
        cmocka_unit_test(arguments_and_kinds_have_names),
        cmocka_unit_test(names_are_of_the_allowed_letters_and_length),
    };
    return cmocka_run_group_tests_name("layout", tests, NULL, NULL);
}
