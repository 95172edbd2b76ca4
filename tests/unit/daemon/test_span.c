/* SPDX-License-Identifier: Apache-2.0 */
/* What a group over nodes keeps of what its lead says, sound or not. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "group.h"
#include "span.h"

static struct mokd_group *group;
static struct mokd_error told;

static int set_up(void **state)
{
    (void)state;
    group = calloc(1, sizeof(*group));
    assert_non_null(group);
    group->state = MOKD_GROUP_READY;
    group->running = 1; /* so that nothing takes it down */
    group->span = mokd_span_new(NULL);
    assert_non_null(group->span);
    told = (struct mokd_error){ .code = 1 };
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mokd_span_free(group->span);
    free(group);
    return 0;
}

static void remember(void *cookie, const struct mokd_error *error)
{
    (void)cookie;
    told = *error;
}

static size_t kept(void)
{
    const struct mokd_aborted *aborted;
    size_t count = 0;

    TAILQ_FOREACH(aborted, &group->span->aborted, link)
        count++;
    return count;
}

static void an_abort_that_comes_early_is_kept_for_who_asks_once(void **state)
{
    const struct mokd_error fine = { 0 }, first = { .code = -MOK_EPEER, .text = "first" };
    const struct mokd_error second = { .code = -MOK_ENOMEM, .text = "second" };

    (void)state;
    mokd_span_verdict(group, 7, &first);
    mokd_span_verdict(group, 7, &second); /* said twice */
    mokd_span_verdict(group, 8, &fine);   /* nothing to keep */
    assert_int_equal(kept(), 1);
    mokd_span_prepared(group, 7, &fine, 0, remember, NULL);
    assert_int_equal(told.code, -MOK_EPEER);
    assert_string_equal(told.text, "first");
    assert_int_equal(kept(), 0);
}

static void a_lead_that_aborts_what_nobody_began_fills_no_memory(void **state)
{
    const struct mokd_error abort = { .code = -MOK_EPEER, .text = "made up" };

    (void)state;
    for (uint64_t index = 1; index <= 100000; index++)
        mokd_span_verdict(group, index, &abort);
    assert_in_range(kept(), 1, 1024);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(an_abort_that_comes_early_is_kept_for_who_asks_once, set_up, tear_down),
        cmocka_unit_test_setup_teardown(a_lead_that_aborts_what_nobody_began_fills_no_memory, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
