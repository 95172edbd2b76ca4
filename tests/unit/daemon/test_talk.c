/* SPDX-License-Identifier: Apache-2.0 */
/* What one user can do to the log, and to the page that shows its last lines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "recent.h"
#include "talk.h"

#define SECOND UINT64_C(1000000000)

static unsigned said(uid_t uid, uint64_t now, unsigned lines, unsigned *ret_words)
{
    unsigned count = 0;
    uint64_t kept;

    *ret_words = 0;
    for (unsigned i = 0; i < lines; i++) {
        count += mokd_talk_may_at(uid, now + i * 1000, &kept);
        *ret_words += kept > 0;
    }
    return count;
}

static void a_user_has_a_burst_of_lines_and_others_have_theirs(void **state)
{
    unsigned words;

    (void)state;
    assert_int_equal(said(1, SECOND, 5000, &words), MOKD_TALK_BURST);
    assert_int_equal(words, 1); /* that lines are kept back is said once */
    assert_int_equal(said(2, SECOND, 500, &words), 500);
    assert_int_equal(words, 0);
}

static void who_goes_on_gets_few_lines_and_who_rests_all_of_them_with_the_number_that_were_kept_back(void **state)
{
    unsigned words, lines = said(3, SECOND, 2000, &words);
    uint64_t kept;

    (void)state;
    for (unsigned second = 2; second < 62; second++)
        lines += said(3, second * SECOND, 200, &words);
    assert_in_range(lines, MOKD_TALK_BURST + 50 * MOKD_TALK_A_SECOND, MOKD_TALK_BURST + 60 * MOKD_TALK_A_SECOND);
    assert_true(mokd_talk_may_at(3, 1000 * SECOND, &kept));
    assert_true(kept > 0 && kept != UINT64_MAX);
    assert_int_equal(said(3, 1000 * SECOND, 2000, &words), MOKD_TALK_BURST - 1);
}

static void many_users_at_once_are_bounded_each(void **state)
{
    unsigned words;

    (void)state;
    for (uid_t uid = 100; uid < 250; uid++)
        assert_in_range(said(uid, 2000 * SECOND + uid, 1200, &words), 1, MOKD_TALK_BURST);
}

static void what_is_said_again_and_again_pushes_nothing_else_off_the_page(void **state)
{
    struct mokd_recent recent[MOKD_RECENT];
    unsigned again = 0;

    (void)state;
    mok_log_open("test", MOK_LOG_ERROR);
    mokd_recent_start();
    mok_log(MOK_LOG_ERROR, "device", "worker lost", "device=host0");
    for (int i = 0; i < 100; i++)
        mok_log(MOK_LOG_ERROR, "session", "ended by mokd", "session=%d", i);
    mokd_recent_stop();
    size_t count = mokd_recent_read(recent);
    for (size_t i = 0; i < count; i++)
        again += strcmp(recent[i].message, "ended by mokd") == 0;
    assert_true(again >= 4 && again == count - 1);
    assert_string_equal(recent[0].fields, "session=99");
    assert_string_equal(recent[1].fields, "session=98");
    assert_string_equal(recent[count - 1].message, "worker lost");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_user_has_a_burst_of_lines_and_others_have_theirs),
        cmocka_unit_test(who_goes_on_gets_few_lines_and_who_rests_all_of_them_with_the_number_that_were_kept_back),
        cmocka_unit_test(many_users_at_once_are_bounded_each),
        cmocka_unit_test(what_is_said_again_and_again_pushes_nothing_else_off_the_page),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
