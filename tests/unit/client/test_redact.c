/* SPDX-License-Identifier: Apache-2.0 */
/* What mokctl bundle takes out of text, and what it leaves. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "redact.h"

#define CURVE_KEY "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7" /* of the format's own description */

static void expect(const char *text, const char *clean)
{
    char *got = redact(text);

    assert_non_null(got);
    assert_string_equal(got, clean);
    free(got);
}

static void what_is_called_a_secret_loses_its_value(void **state)
{
    (void)state;
    expect("[rack]\nkey = /etc/mok/rack.key\nname = n1\n", "[rack]\nkey = (removed)\nname = n1\n");
    expect("Password: with spaces, all of it\n", "Password: (removed)\n");
    expect("at 12: login token=abc user=alice\n", "at 12: login token=(removed) user=alice\n");
    expect("api_key: \"a b c\", x=1", "api_key: (removed), x=1");
    expect("{\"resume_token\":\t\"q\", \"n\": 1}", "{\"resume_token\":\t(removed), \"n\": 1}");
    expect("MOK_SECRET=1", "MOK_SECRET=(removed)");
}

static void what_looks_like_a_key_goes_wherever_it_stands(void **state)
{
    (void)state;
    expect("peer " CURVE_KEY " came", "peer (removed) came");
    expect("deadbeef0123456789deadbeef0123456789", "(removed)");
    expect("public=" CURVE_KEY, "(removed)");
    expect("-----BEGIN PRIVATE KEY-----\nAAAA\nBBBB\n-----END PRIVATE KEY-----\nrest\n", "(removed)\nrest\n");
}

static void all_else_stays(void **state)
{
    static const char *const texts[] = {
        "",
        "\n\n",
        "socket = /run/mok/mokd.sock\n",
        "/a/rather/long/path/with-digits-1234567890/and/more/of-it/mokd.sock\n",
        "{\"max_tokens\":\t32}",
        "2026-11-29T20:27:21.123Z info session: opened session=7 uid=1000 job=train\n",
        "averyveryverylongwordwithoutanydigitatall\n",
        "no newline at the end",
    };

    (void)state;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        expect(texts[i], texts[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_is_called_a_secret_loses_its_value),
        cmocka_unit_test(what_looks_like_a_key_goes_wherever_it_stands),
        cmocka_unit_test(all_else_stays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
