/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "control.pb-c.h"
#include "plain.h"

static void expect(const char *text, const char *kept, const char *plain)
{
    char copy[64];

    snprintf(copy, sizeof(copy), "%s", text);
    mok_plain_text(copy, kept);
    assert_string_equal(copy, plain);
}

static void text_of_any_language_stays(void **state)
{
    (void)state;
    expect("", "", "");
    expect("a \"b\" \\ ~", "", "a \"b\" \\ ~");
    expect("gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x90\xbe \xc2\xa0", "",
           "gr\xc3\xbc\xc3\x9f \xe2\x82\xac \xf0\x9f\x90\xbe \xc2\xa0");
}

static void control_characters_go_unless_they_are_kept(void **state)
{
    (void)state;
    expect("\x1b[31m\x7f\r\n", "", "?[31m???");
    expect("a\nb\tc", "\n", "a\nb?c");
    expect("\xc2\x80\xc2\x9b"
           "0m\xc2\x9f",
           "\n", "????0m??");
}

static void what_is_no_utf8_goes_byte_by_byte(void **state)
{
    (void)state;
    expect("\x9b"
           "31m",
           "", "?31m");
    expect("\xff\xfe\xc2", "", "???");                     /* the end is part of no character */
    expect("\xc0\x9b\xe0\x82\x9b", "", "?????");           /* longer than need be */
    expect("\xed\xa0\x80\xf4\x90\x80\x80", "", "???????"); /* surrogates; beyond the last character */
    expect("\xe2\x82x\xe2\x82\xac", "", "??x\xe2\x82\xac");
}

static void all_texts_of_a_message_are_made_plain_and_nothing_else(void **state)
{
    char version[] = "1\x1b", config[] = "a\nb", error[] = "\x1b", job[] = "\xc2\x9b";
    char *nodes[] = { error };
    Mok__GroupInfo group = MOK__GROUP_INFO__INIT, *groups[] = { &group };
    Mok__JobInfo info = MOK__JOB_INFO__INIT, *jobs[] = { &info };
    Mok__StatusReply status = MOK__STATUS_REPLY__INIT;
    Mok__Reply reply = MOK__REPLY__INIT;

    (void)state;
    status.version = version;
    status.config = config;
    group.node = nodes;
    group.n_node = status.n_group = status.n_job = 1;
    status.group = groups;
    info.job = job;
    info.pid = 0x1b1b1b1b;
    status.job = jobs;
    reply.status = &status;
    reply.body_case = MOK__REPLY__BODY_STATUS;
    mok_plain_message(&reply.base);
    assert_string_equal(version, "1?");
    assert_string_equal(config, "a\nb");
    assert_string_equal(error, "?");
    assert_string_equal(job, "??");
    assert_int_equal(info.pid, 0x1b1b1b1b);
    reply.body_case = MOK__REPLY__BODY__NOT_SET; /* whatever the pointer is */
    reply.status = (void *)1;
    mok_plain_message(&reply.base);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(text_of_any_language_stays),
        cmocka_unit_test(control_characters_go_unless_they_are_kept),
        cmocka_unit_test(what_is_no_utf8_goes_byte_by_byte),
        cmocka_unit_test(all_texts_of_a_message_are_made_plain_and_nothing_else),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
