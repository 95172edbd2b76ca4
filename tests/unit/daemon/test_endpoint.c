/* SPDX-License-Identifier: Apache-2.0 */
/* Where metrics are served: what can be said in the configuration, and what listening there needs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "config.h"
#include "endpoint.h"

static char sentence[1024];

static void take(void *cookie, const char *text)
{
    (void)cookie;
    snprintf(sentence, sizeof(sentence), "%s", text);
}

static int load(const char *metrics, struct mokd_config *ret)
{
    char path[] = "/tmp/mokd-endpoint-XXXXXX", text[512];
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    int length = snprintf(text, sizeof(text), "[device d]\n%s\n", metrics);
    assert_int_equal(write(fd, text, (size_t)length), length);
    close(fd);
    sentence[0] = '\0';
    int r = mokd_config_load(path, take, NULL, ret);
    unlink(path);
    return r;
}

static void without_the_section_nothing_is_served(void **state)
{
    struct mokd_config config;

    (void)state;
    assert_int_equal(load("", &config), 0);
    assert_string_equal(config.metrics_listen, "");
    mokd_config_release(&config);
}

static void the_section_alone_means_the_loopback(void **state)
{
    struct mokd_config config;
    struct mokd_endpoint endpoint;
    struct mokd_error error;

    (void)state;
    assert_int_equal(load("[metrics]", &config), 0);
    assert_string_equal(config.metrics_listen, MOKD_DEFAULT_METRICS);
    assert_int_equal(config.metrics_mode, 0660);
    assert_int_equal(mokd_endpoint_parse(config.metrics_listen, &endpoint, &error), 0);
    assert_true(endpoint.loopback);
    mokd_config_release(&config);
}

static void expect_refusal(const char *listen, const char *why)
{
    struct mokd_config config;
    char text[256], expected[512];

    snprintf(text, sizeof(text), "[metrics]\nlisten = %s", listen);
    snprintf(expected, sizeof(expected), ":3: [metrics] listen = %s: %s", listen, why);
    assert_int_equal(load(text, &config), -MOK_EARG);
    if (!strstr(sentence, expected))
        fail_msg("\"%s\" does not say \"%s\"", sentence, expected);
}

static void a_refusal_says_what_is_wrong(void **state)
{
    (void)state;
    expect_refusal("on", "must be off, unix:/PATH or ADDRESS:PORT");
    expect_refusal(":9643", "must be off, unix:/PATH or ADDRESS:PORT");
    expect_refusal("127.0.0.1:0", "the port must be in 1..65535");
    expect_refusal("127.0.0.1:65536", "the port must be in 1..65535");
    expect_refusal("127.0.0.1:", "the port must be in 1..65535");
    expect_refusal("example.org:80", "before the port must stand");
    expect_refusal("::1:80", "an IPv6 address stands in brackets");
    expect_refusal("unix:metrics", "the path after unix: must be absolute");
}

static void loopback_is_told_from_the_network(void **state)
{
    static const struct {
        const char *text;
        bool loopback;
    } cases[] = { { "127.0.0.1:1", true }, { "127.3.2.1:1", true },  { "localhost:1", true }, { "[::1]:1", true },
                  { "0.0.0.0:1", false },  { "10.0.0.1:1", false }, { "[::]:1", false },     { "unix:/a", true } };
    struct mokd_endpoint endpoint;
    struct mokd_error error;

    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        assert_int_equal(mokd_endpoint_parse(cases[i].text, &endpoint, &error), 0);
        assert_int_equal(endpoint.loopback, cases[i].loopback);
    }
}

static void a_stale_unix_socket_is_replaced_and_a_living_one_is_not(void **state)
{
    struct mokd_endpoint endpoint;
    struct mokd_error error = { 0 };
    char dir[] = "/tmp/mok-endpoint-XXXXXX", text[128];
    struct stat status;
    int fd = -1, other = -1;

    (void)state;
    assert_non_null(mkdtemp(dir));
    snprintf(text, sizeof(text), "unix:%s/m", dir);
    assert_int_equal(mokd_endpoint_parse(text, &endpoint, &error), 0);
    assert_int_equal(mokd_endpoint_listen(&endpoint, 0640, &fd, &error), 0);
    assert_int_equal(stat(text + 5, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0640);
    assert_int_equal(mokd_endpoint_listen(&endpoint, 0640, &other, &error), -MOK_EEXIST);
    assert_non_null(strstr(error.text, "served by another process"));
    close(fd);
    assert_int_equal(mokd_endpoint_listen(&endpoint, 0640, &fd, &error), 0);
    close(fd);
    mokd_endpoint_remove(&endpoint);
    assert_int_not_equal(stat(text + 5, &status), 0);

    snprintf(text, sizeof(text), "unix:%s/fXXXXXX", dir);
    int file = mkstemp(text + 5);
    assert_true(file >= 0);
    close(file);
    assert_int_equal(mokd_endpoint_parse(text, &endpoint, &error), 0);
    assert_int_equal(mokd_endpoint_listen(&endpoint, 0640, &fd, &error), -MOK_EEXIST);
    assert_non_null(strstr(error.text, "is no socket; it stays"));
    unlink(text + 5);
    rmdir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(without_the_section_nothing_is_served),
        cmocka_unit_test(the_section_alone_means_the_loopback),
        cmocka_unit_test(a_refusal_says_what_is_wrong),
        cmocka_unit_test(loopback_is_told_from_the_network),
        cmocka_unit_test(a_stale_unix_socket_is_replaced_and_a_living_one_is_not),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
