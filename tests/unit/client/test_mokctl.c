/* SPDX-License-Identifier: Apache-2.0 */
/* mokctl's exit codes, tables and JSON, against a mokd inside the test. MOKCTL is its path. */
#include "support.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <sys/wait.h>

#include "fake.h"

#define REQUEST(name) MOK__REQUEST__BODY_##name

static struct fake fake;
static char output[16384];

/* Runs mokctl with these arguments; output holds both streams. Returns the exit code. */
static int mokctl(const char *arguments)
{
    char command[512];

    snprintf(command, sizeof(command), "MOK_SOCKET=%s exec " MOKCTL " %s 2>&1", fake.path, arguments);
    FILE *stream = popen(command, "r");
    assert_non_null(stream);
    size_t size = fread(output, 1, sizeof(output) - 1, stream);
    output[size] = 0;
    int status = pclose(stream);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

#define assert_says(words)                                                                                             \
    do {                                                                                                               \
        if (!strstr(output, (words)))                                                                                  \
            fail_msg("no \"%s\" in: %s", (words), output);                                                             \
    } while (0)

static int set_up(void **state)
{
    (void)state;
    fake_start(&fake);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    fake_stop(&fake);
    return 0;
}

static void each_command_prints_its_table_and_exits_with_0(void **state)
{
    (void)state;
    assert_int_equal(mokctl("status"), 0);
    assert_says("mokd 9.9.9, pid 4242, up 1h 2m");
    assert_says("host0");
    assert_says("ada");
    assert_says("forming");
    assert_int_equal(mokctl("devices"), 0);
    assert_says("DEVICE  NAME   KIND  UNITS  STATE");
    assert_says("1       host1  host  1      failed");
    assert_null(strstr(output, "JOB"));
    assert_int_equal(mokctl("jobs"), 0);
    assert_says("SESSION  JOB");
    assert_int_equal(mokctl("groups"), 0);
    assert_says("1,-");
    assert_int_equal(mokctl("version"), 0);
    assert_says("mokctl 0.1.0\nmokd 9.9.9, protocol 1\n");
}

static void it_observes_and_opens_no_session(void **state)
{
    (void)state;
    assert_int_equal(mokctl("status"), 0);
    assert_true(fake_last_hello(&fake).observer);
}

static void a_name_cannot_talk_to_the_terminal(void **state)
{
    (void)state;
    assert_int_equal(mokctl("jobs"), 0);
    assert_null(strchr(output, 0x1b));
    assert_says("train?[31m");
}

static void json_is_one_object_with_exact_numbers(void **state)
{
    static const char *const commands[] = { "status --json", "--json devices", "jobs --json", "groups --json",
                                            "version --json" };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        assert_int_equal(mokctl(commands[i]), 0);
        cJSON *root = cJSON_Parse(output);
        assert_true(cJSON_IsObject(root));
        cJSON_Delete(root);
    }
    assert_int_equal(mokctl("devices --json"), 0);
    assert_says("9007199254740993");
    cJSON *root = cJSON_Parse(output);
    const cJSON *devices = cJSON_GetObjectItem(root, "devices");
    assert_int_equal(cJSON_GetArraySize(devices), 2);
    assert_string_equal(cJSON_GetObjectItem(cJSON_GetArrayItem(devices, 0), "state")->valuestring, "up");
    assert_null(cJSON_GetObjectItem(root, "jobs"));
    cJSON_Delete(root);
}

static void wrong_usage_exits_with_2_and_the_usage(void **state)
{
    static const char *const bad[] = {
        "", "frobnicate", "status jobs", "--frob status", "--socket", "status --socket="
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        assert_int_equal(mokctl(bad[i]), 2);
        assert_says("mokctl: ");
    }
    assert_int_equal(fake_seen(&fake, REQUEST(HELLO)), 0);
}

static void help_exits_with_0(void **state)
{
    (void)state;
    assert_int_equal(mokctl("--help"), 0);
    assert_says("usage: mokctl");
    assert_says("exit codes:");
}

static void an_error_from_mokd_exits_with_1_and_its_sentence(void **state)
{
    (void)state;
    fake_flag(&fake, refusal, -MOK_EACCESS);
    fake_set(&fake, REQUEST(STATUS_QUERY), FAKE_REFUSED);
    assert_int_equal(mokctl("status"), 1);
    assert_says("refused, as the test wants it (MOK_EACCESS)");
    fake_set(&fake, REQUEST(STATUS_QUERY), FAKE_CUT);
    assert_int_equal(mokctl("status"), 1);
    fake_set(&fake, REQUEST(HELLO), FAKE_REFUSED);
    fake_flag(&fake, refusal, -MOK_EVERSION);
    assert_int_equal(mokctl("jobs"), 1);
}

static void a_mokd_that_cannot_be_reached_exits_with_3_and_what_to_do(void **state)
{
    (void)state;
    assert_int_equal(mokctl("status --socket /nonexistent/mokd.sock"), 3);
    assert_says("no socket /nonexistent/mokd.sock");
    assert_says("Start it");
    assert_int_equal(mokctl("--socket /nonexistent/mokd.sock version"), 3);
    assert_says("mokctl 0.1.0");
    fake_set(&fake, REQUEST(STATUS_QUERY), FAKE_HANG_UP);
    assert_int_equal(mokctl("status"), 3);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(each_command_prints_its_table_and_exits_with_0),
        TEST(it_observes_and_opens_no_session),
        TEST(a_name_cannot_talk_to_the_terminal),
        TEST(json_is_one_object_with_exact_numbers),
        TEST(wrong_usage_exits_with_2_and_the_usage),
        TEST(help_exits_with_0),
        TEST(an_error_from_mokd_exits_with_1_and_its_sentence),
        TEST(a_mokd_that_cannot_be_reached_exits_with_3_and_what_to_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
