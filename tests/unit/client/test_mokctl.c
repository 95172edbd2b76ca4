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
    assert_says(
        "over a restart: 1 sessions go on (0 away), with 12 of 16384 descriptors in the service manager's store");
    assert_says("host0");
    assert_says("ada");
    assert_says("forming");
    assert_int_equal(mokctl("devices"), 0);
    assert_says("DEVICE  NAME   KIND  UNITS  STATE");
    assert_says("1       host1  host  1      failed");
    assert_null(strstr(output, "JOB"));
    assert_int_equal(mokctl("jobs"), 0);
    assert_says("SESSION  JOB");
    assert_says("RESTART");
    assert_says("goes on");
    assert_int_equal(mokctl("groups"), 0);
    assert_says("USER");
    assert_says("1,-");
    assert_says("1 here  forming at n7");
    assert_says("mokctl groups on the node where they meet (at NODE) shows all that have come");
    assert_int_equal(mokctl("layers"), 0);
    assert_says("LAYER  GROUP  RANK  DEVICE  SESSION  HIDDEN  INTERMEDIATE  EXPERTS  TOPK  TOKENS  PRECISION");
    assert_says(
        "11     ep     1     1       7        2880    1440          128      4     8192    mxfp8-per128  8.0 PiB");
    assert_int_equal(mokctl("status"), 0);
    assert_says("mxfp8-per128");
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

static void no_text_of_mokd_can_talk_to_the_terminal(void **state)
{
    static const char *const commands[] = { "status", "layers", "version", "status --json" };
    (void)state;
    fake_set(&fake, REQUEST(HELLO), FAKE_ESCAPES);
    fake_set(&fake, REQUEST(STATUS_QUERY), FAKE_ESCAPES);
    for (size_t i = 0; i < ARRAY_SIZE(commands); i++) {
        assert_int_equal(mokctl(commands[i]), 0);
        assert_says("9.9.9?[31m??32m?");
        assert_null(strchr(output, 0x1b));
        assert_null(strchr(output, 0x9b));
    }
}

static void json_is_one_object_with_exact_numbers(void **state)
{
    static const char *const commands[] = { "status --json", "--json devices", "jobs --json",
                                            "groups --json", "layer --json",   "version --json" };
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

static void the_layers_in_json_have_their_shape_and_exact_bytes(void **state)
{
    (void)state;
    assert_int_equal(mokctl("layer --json"), 0);
    assert_says("9007199254740995");
    cJSON *root = cJSON_Parse(output);
    const cJSON *layer = cJSON_GetArrayItem(cJSON_GetObjectItem(root, "layers"), 0);
    assert_int_equal(cJSON_GetObjectItem(layer, "layer")->valueint, 11);
    assert_string_equal(cJSON_GetObjectItem(layer, "group_name")->valuestring, "ep");
    const cJSON *spec = cJSON_GetObjectItem(layer, "spec");
    assert_int_equal(cJSON_GetObjectItem(spec, "hidden")->valueint, 2880);
    assert_string_equal(cJSON_GetObjectItem(spec, "precision")->valuestring, "mxfp8-per128");
    assert_int_equal(cJSON_GetObjectItem(cJSON_GetObjectItem(layer, "memory"), "private_bytes")->valueint, 2);
    assert_null(cJSON_GetObjectItem(root, "jobs"));
    cJSON_Delete(root);
}

static void the_plan_of_a_layer_is_mokd_s_lines(void **state)
{
    (void)state;
    assert_int_equal(mokctl("layer 11"), 0);
    assert_string_equal(output, FAKE_PLAN);
    assert_int_equal(mokctl("layer 11 --explain --rank 3"), 0);
    assert_int_equal(fake_seen(&fake, REQUEST(LAYER_DESCRIBE)), 2);
    assert_true(fake_last_hello(&fake).observer);
}

static void the_plan_in_json_has_what_value_and_reason(void **state)
{
    (void)state;
    assert_int_equal(mokctl("layer --explain 11 --json"), 0);
    assert_says("9007199254740993");
    cJSON *root = cJSON_Parse(output);
    const cJSON *plan = cJSON_GetObjectItem(root, "plan");
    assert_int_equal(cJSON_GetArraySize(plan), 2);
    const cJSON *units = cJSON_GetArrayItem(plan, 0), *ring = cJSON_GetArrayItem(plan, 1);
    assert_string_equal(cJSON_GetObjectItem(units, "what")->valuestring, "units");
    assert_int_equal(cJSON_GetObjectItem(units, "value")->valueint, 1);
    assert_string_equal(cJSON_GetObjectItem(units, "reason")->valuestring, "the only one");
    assert_string_equal(cJSON_GetObjectItem(ring, "reason")->valuestring, "as asked; it is (so to say) long");
    assert_null(cJSON_GetObjectItem(root, "memory"));
    cJSON_Delete(root);
}

#define SHAPE "layer --explain --hidden 2880 --intermediate 1440 --experts 128 --topk 4 --max-tokens 8192"

static void a_shape_is_asked_with_its_defaults(void **state)
{
    uint32_t ep, device;
    (void)state;
    assert_int_equal(mokctl(SHAPE), 0);
    assert_string_equal(output, FAKE_PLAN);
    Mok__LayerSpec spec = fake_last_spec(&fake, &ep, &device);
    assert_int_equal(ep, 1);
    assert_int_equal(device, 0);
    assert_int_equal(spec.hidden, 2880);
    assert_int_equal(spec.intermediate, 1440);
    assert_int_equal(spec.experts, 128);
    assert_int_equal(spec.topk, 4);
    assert_int_equal(spec.max_tokens, 8192);
    assert_int_equal(spec.precision, MOK_BF16);
    assert_int_equal(spec.ring_bytes, 0);
}

static void every_option_of_a_shape_reaches_mokd_and_json_has_the_memory(void **state)
{
    uint32_t ep, device;
    (void)state;
    assert_int_equal(
        mokctl(SHAPE
               " --json --ep 8 --device 1 --precision mxfp8-per32 --shared-intermediate 64 --clamp 7.5"
               " --ring-bytes 9007199254740993 --minibatch-rows 384 --comm-units 16 --gradients bf16 --wgrad mxfp8"
               " --transposed-weights"),
        0);
    Mok__LayerSpec spec = fake_last_spec(&fake, &ep, &device);
    assert_int_equal(ep, 8);
    assert_int_equal(device, 1);
    assert_int_equal(spec.precision, MOK_MXFP8_PER32);
    assert_int_equal(spec.shared_intermediate, 64);
    assert_true(spec.clamp == 7.5f);
    assert_int_equal(spec.ring_bytes, UINT64_C(9007199254740993));
    assert_int_equal(spec.minibatch_rows, 384);
    assert_int_equal(spec.comm_units, 16);
    assert_int_equal(spec.gradient_dtype, MOK_DTYPE_BF16);
    assert_int_equal(spec.wgrad_precision, MOK_WGRAD_MXFP8);
    assert_int_equal(spec.transposed_weights, 1);
    cJSON *root = cJSON_Parse(output);
    const cJSON *memory = cJSON_GetObjectItem(root, "memory");
    assert_int_equal(cJSON_GetObjectItem(memory, "context_full_bytes")->valueint, FAKE_LAYER_FULL);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(root, "plan")), 2);
    cJSON_Delete(root);
}

static void wrong_usage_exits_with_2_and_says_what_is_wrong(void **state)
{
    static const char *const bad[] = {
        "",
        "frobnicate",
        "status jobs",
        "--frob status",
        "--socket",
        "status --socket=",
        "layer x",
        "layer 11 12",
        "layers 11 --hidden 64",
        "layer --explain",
        "layer --explain x",
        "layer --explain -- -1",
        "layer --explain 11 12",
        "layer --explain 4294967296",
        "layer --explain 11 --rank no",
        "layer --explain 11 --hidden 64",
        "layer --rank 1",
        "layer --hidden 64",
        "jobs --explain",
        "jobs --explain 11",
        "version --ep 2",
        SHAPE " --rank 1",
        SHAPE " --precision fp4",
        SHAPE " --clamp wide",
        SHAPE " --gradients fp8",
        SHAPE " --wgrad f32",
        SHAPE " --ring-bytes 1e9",
        SHAPE " --hidden 5000000000",
        "layer --explain --hidden 64 --intermediate 64 --experts 4 --topk 2",
    };
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(bad); i++) {
        assert_int_equal(mokctl(bad[i]), 2);
        assert_says("mokctl: ");
        assert_says("try: mokctl --help");
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

static void a_plan_that_mokd_refuses_exits_with_1(void **state)
{
    (void)state;
    fake_flag(&fake, refusal, -MOK_ENOENT);
    fake_set(&fake, REQUEST(LAYER_DESCRIBE), FAKE_REFUSED);
    assert_int_equal(mokctl("layer --explain 12"), 1);
    assert_says("refused, as the test wants it (MOK_ENOENT)");
    fake_set(&fake, REQUEST(LAYER_QUERY), FAKE_REFUSED);
    assert_int_equal(mokctl(SHAPE), 1);
    fake_set(&fake, REQUEST(LAYER_QUERY), FAKE_EMPTY);
    assert_int_equal(mokctl(SHAPE), 1);
    fake_set(&fake, REQUEST(LAYER_QUERY), FAKE_HANG_UP);
    assert_int_equal(mokctl(SHAPE), 3);
}

static void a_mokd_that_cannot_be_reached_exits_with_3_and_what_to_do(void **state)
{
    (void)state;
    assert_int_equal(mokctl("status --socket /dev/null"), 3);
    assert_says("/dev/null is no socket");
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
        TEST(no_text_of_mokd_can_talk_to_the_terminal),
        TEST(json_is_one_object_with_exact_numbers),
        TEST(the_layers_in_json_have_their_shape_and_exact_bytes),
        TEST(the_plan_of_a_layer_is_mokd_s_lines),
        TEST(the_plan_in_json_has_what_value_and_reason),
        TEST(a_shape_is_asked_with_its_defaults),
        TEST(every_option_of_a_shape_reaches_mokd_and_json_has_the_memory),
        TEST(wrong_usage_exits_with_2_and_says_what_is_wrong),
        TEST(help_exits_with_0),
        TEST(an_error_from_mokd_exits_with_1_and_its_sentence),
        TEST(a_plan_that_mokd_refuses_exits_with_1),
        TEST(a_mokd_that_cannot_be_reached_exits_with_3_and_what_to_do),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
