/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines as people and the journal get them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/log.h"
#include "mok/types.h"

static char captured[8192];

/* Runs `say` with stderr in a file and keeps what it wrote. */
static void capture(void (*say)(void))
{
    FILE *file = tmpfile();
    int saved = dup(STDERR_FILENO);

    assert_non_null(file);
    assert_true(saved >= 0);
    dup2(fileno(file), STDERR_FILENO);
    say();
    dup2(saved, STDERR_FILENO);
    close(saved);
    rewind(file);
    captured[fread(captured, 1, sizeof(captured) - 1, file)] = '\0';
    fclose(file);
}

static void say_opened(void)
{
    mok_log(MOK_LOG_INFO, "session", "opened", "session=%d job=%s", 7, "train");
}

static void a_line_has_time_level_component_message_and_fields(void **state)
{
    (void)state;
    capture(say_opened);
    assert_int_equal(captured[4], '-');
    assert_int_equal(captured[10], 'T');
    assert_int_equal(captured[23], 'Z');
    assert_string_equal(captured + 24, " info session: opened session=7 job=train\n");
}

static void say_bare(void)
{
    mok_log(MOK_LOG_ERROR, "server", "gone", NULL);
}

static void fields_may_be_absent(void **state)
{
    (void)state;
    capture(say_bare);
    assert_string_equal(captured + 24, " error server: gone\n");
}

static void say_debug_and_warning(void)
{
    mok_log(MOK_LOG_DEBUG, "x", "hidden", NULL);
    mok_log(MOK_LOG_WARNING, "x", "shown", NULL);
}

static void what_is_below_the_level_is_not_said(void **state)
{
    (void)state;
    capture(say_debug_and_warning);
    assert_null(strstr(captured, "hidden"));
    assert_non_null(strstr(captured, "shown"));
    mok_log_set_level(MOK_LOG_DEBUG);
    capture(say_debug_and_warning);
    assert_non_null(strstr(captured, "hidden"));
    mok_log_set_level(MOK_LOG_INFO);
}

static void say_much(void)
{
    char text[4000];

    memset(text, 'x', sizeof(text) - 1);
    text[sizeof(text) - 1] = '\0';
    mok_log(MOK_LOG_INFO, "x", "long", "text=%s", text);
}

static void a_line_too_long_is_cut_and_still_one_line(void **state)
{
    (void)state;
    capture(say_much);
    size_t length = strlen(captured);
    assert_in_range(length, 1000, 3000);
    assert_ptr_equal(strchr(captured, '\n'), captured + length - 1);
}

static void foreign_text_cannot_break_the_line(void **state)
{
    char buffer[32];

    (void)state;
    assert_string_equal(mok_log_text(buffer, sizeof(buffer), "a\"b\nc\\d\x7f"), "a'b?c?d?");
    assert_string_equal(mok_log_text(buffer, sizeof(buffer), "\xc2\x9b" "31m\xff"), "??31m?"); /* U+009B is an escape */
    assert_string_equal(mok_log_text(buffer, 4, "abcdef"), "abc");
    assert_string_equal(mok_log_text(buffer, sizeof(buffer), ""), "");
}

static void levels_have_names(void **state)
{
    enum mok_log_level level;

    (void)state;
    assert_int_equal(mok_log_level_parse("warning", &level), 0);
    assert_int_equal(level, MOK_LOG_WARNING);
    assert_string_equal(mok_log_level_text(level), "warning");
    assert_int_equal(mok_log_level_parse("loud", &level), -MOK_EARG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_line_has_time_level_component_message_and_fields),
        cmocka_unit_test(fields_may_be_absent),
        cmocka_unit_test(what_is_below_the_level_is_not_said),
        cmocka_unit_test(a_line_too_long_is_cut_and_still_one_line),
        cmocka_unit_test(foreign_text_cannot_break_the_line),
        cmocka_unit_test(levels_have_names),
    };
    unsetenv("JOURNAL_STREAM");
    mok_log_open("test", MOK_LOG_INFO);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
