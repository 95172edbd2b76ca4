/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The plan of a layer through the whole stack: each choice that was overridden says so, libmok and mokctl tell the
 * same, what is told is what was charged, and no override changes a bit of the result.
 */
#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "stack.h"
#include "workload.h"

enum { HIDDEN = 64, INTERMEDIATE = 48, EXPERTS = 4, TOPK = 2, TOKENS = 300, THREADS = 4 };
#define SHAPE "--explain --hidden 64 --intermediate 48 --experts 4 --topk 2 --max-tokens 300"

static struct stack stack;

static int start(void **state)
{
    (void)state;
    return stack_start(&stack, &(struct stack_options){ .devices = 1, .threads = THREADS });
}

static int stop(void **state)
{
    (void)state;
    return stack_stop(&stack);
}

static struct workload problem_with(uint64_t ring_bytes, uint32_t minibatch_rows, uint32_t comm_units)
{
    return (struct workload){
        .hidden = HIDDEN,
        .intermediate = INTERMEDIATE,
        .experts = EXPERTS,
        .topk = TOPK,
        .ep = 1,
        .max_tokens = TOKENS,
        .context_mode = MOK_CONTEXT_FULL,
        .seed = 5,
        .routing = WORKLOAD_ZIPF,
        .ring_bytes = ring_bytes,
        .minibatch_rows = minibatch_rows,
        .comm_units = comm_units,
    };
}

static void open_rank(struct workload_rank *rank, const struct workload *problem)
{
    int r = workload_open(rank, problem, 0, TOKENS, 0, stack.socket, "describe", 0);
    if (r < 0)
        fail_msg("%s: %s", mok_error_name(r), mok_last_error());
}

/* The line "what = value (reason)" of a plan. */
static uint64_t value_of(const char *plan, const char *what, char ret_reason[256])
{
    char head[64];
    uint64_t value = 0;

    snprintf(head, sizeof(head), "%s = ", what);
    const char *line = strstr(plan, head);
    if (!line || (line > plan && line[-1] != '\n') ||
        sscanf(line + strlen(head), "%" SCNu64 " (%255[^\n]", &value, ret_reason) != 2)
        fail_msg("no reason for %s in:\n%s", what, plan);
    return value;
}

static void describe(const struct workload_rank *rank, char *ret, size_t capacity)
{
    int length = mok_layer_describe(rank->layer, ret, capacity);
    assert_in_range(length, 1, capacity - 1);
}

/* Runs mokctl; *ret_text (to be freed) is its output. Returns the exit code. */
static int mokctl(const char *arguments, char **ret_text)
{
    char command[512];
    size_t used = 0, capacity = 65536;
    char *text = calloc(1, capacity);

    snprintf(command, sizeof(command), "%s --socket %s %s 2>&1", stack_program("client/mokctl"), stack.socket,
             arguments);
    FILE *stream = popen(command, "r");
    assert_non_null(stream);
    assert_non_null(text);
    while (used < capacity - 1) {
        size_t got = fread(text + used, 1, capacity - 1 - used, stream);
        if (got == 0)
            break;
        used += got;
    }
    int status = pclose(stream);
    assert_true(WIFEXITED(status));
    *ret_text = text;
    return WEXITSTATUS(status);
}

static void expect_mokctl(const char *arguments, char **ret_text)
{
    int code = mokctl(arguments, ret_text);
    if (code != 0)
        fail_msg("mokctl %s: exit code %d: %s", arguments, code, *ret_text);
}

/*
 * The only layer of the node, as mokctl's JSON has it. Those of sessions that have just closed may take a moment to go.
 */
static cJSON *only_layer(cJSON **ret_root)
{
    cJSON *layers = NULL;

    for (int tries = 0; tries < 100; tries++) {
        char *text;
        expect_mokctl("--json layer", &text);
        *ret_root = cJSON_Parse(text);
        free(text);
        layers = cJSON_GetObjectItem(*ret_root, "layers");
        if (cJSON_GetArraySize(layers) <= 1)
            break;
        cJSON_Delete(*ret_root);
        *ret_root = NULL;
        layers = NULL;
        usleep(20000);
    }
    assert_int_equal(cJSON_GetArraySize(layers), 1);
    return cJSON_GetArrayItem(layers, 0);
}

static uint64_t number(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItem(object, name);
    assert_true(cJSON_IsNumber(item));
    return (uint64_t)item->valuedouble;
}

/* ------------------------------------------------------------------ overrides */

static void each_override_says_as_asked_and_the_others_keep_their_own_reasons(void **state)
{
    static const char *const what[] = { "ring_rows", "minibatch_rows", "comm_units" };
    (void)state;
    for (int set = 0; set < 8; set++) {
        struct workload problem = problem_with(set & 1 ? 256 << 10 : 0, set & 2 ? 40 : 0, set & 4 ? 3 : 0);
        struct workload_rank rank;
        char plan[8192], reason[256];

        open_rank(&rank, &problem);
        describe(&rank, plan, sizeof(plan));
        for (int i = 0; i < 3; i++) {
            value_of(plan, what[i], reason);
            bool asked = strncmp(reason, "as asked", strlen("as asked")) == 0;
            if (asked != !!(set & 1 << i))
                fail_msg("%s with overrides %d: (%s", what[i], set, reason);
        }
        workload_close(&rank);
    }
}

static void an_override_is_rounded_as_its_reason_says(void **state)
{
    struct workload problem = problem_with(256 << 10, 40, 3);
    struct workload_rank rank;
    char plan[8192], reason[256];

    (void)state;
    open_rank(&rank, &problem);
    describe(&rank, plan, sizeof(plan));
    uint64_t tile = value_of(plan, "tile_rows", reason);
    uint64_t rows = value_of(plan, "minibatch_rows", reason);
    assert_string_equal(reason, "as asked; multiple of tile_rows)");
    assert_int_equal(rows, (40 + tile - 1) / tile * tile);
    uint64_t ring_rows = value_of(plan, "ring_rows", reason);
    assert_non_null(strstr(reason, "bytes a row, multiple of tile_rows"));
    assert_int_equal(ring_rows % tile, 0);
    uint64_t ring_bytes = value_of(plan, "ring_bytes", reason);
    assert_in_range(ring_bytes, 1, 256 << 10);
    assert_true(ring_bytes + ring_bytes / ring_rows * tile > 256 << 10); /* one tile more would not fit */
    assert_true(value_of(plan, "macrobatches_at_worst", reason) > 1);
    assert_int_equal(value_of(plan, "comm_units", reason), 3);
    assert_int_equal(value_of(plan, "compute_units", reason), THREADS - 3);
    workload_close(&rank);
}

static void no_override_changes_a_bit_and_completions_say_what_ran(void **state)
{
    uint64_t first = 0;

    (void)state;
    for (int set = 0; set < 8; set += 7) {
        struct workload problem = problem_with(set & 1 ? 256 << 10 : 0, set & 2 ? 40 : 0, set & 4 ? 3 : 0);
        struct workload_rank rank;
        mok_result forward, backward;

        open_rank(&rank, &problem);
        workload_poison(&rank);
        assert_int_equal(workload_step(&rank, &forward, &backward), 0);
        assert_int_equal(forward.engine, MOK_DEVICE_HOST);
        assert_int_equal(forward.precision, MOK_BF16);
        assert_int_equal(backward.engine, MOK_DEVICE_HOST);
        assert_int_equal(forward.rows, TOKENS * TOPK);
        assert_int_equal(backward.rows, TOKENS * TOPK);
        assert_int_equal(forward.dropped, 0);
        if (set == 0)
            first = workload_hash(&rank);
        assert_int_equal(workload_hash(&rank), first);
        workload_close(&rank);
    }
}

static void an_override_that_cannot_be_is_refused_by_name(void **state)
{
    struct workload units = problem_with(0, 0, THREADS), ring = problem_with(16, 0, 0);
    struct workload_rank rank;

    (void)state;
    assert_int_equal(workload_open(&rank, &units, 0, TOKENS, 0, stack.socket, "describe", 0), -MOK_ERANGE);
    assert_non_null(strstr(mok_last_error(), "comm_units = 4 is outside 1..3"));
    assert_int_equal(workload_open(&rank, &ring, 0, TOKENS, 0, stack.socket, "describe", 0), -MOK_ERANGE);
    assert_non_null(strstr(mok_last_error(), "ring_bytes = 16 is below"));
}

/* ------------------------------------------------------------------ mokctl */

static void mokctl_tells_of_a_layer_what_libmok_tells(void **state)
{
    struct workload problem = problem_with(256 << 10, 40, 3);
    struct workload_rank rank;
    char plan[8192], arguments[64];
    char *text;
    cJSON *root;

    (void)state;
    open_rank(&rank, &problem);
    describe(&rank, plan, sizeof(plan));
    cJSON *layer = only_layer(&root);
    assert_string_equal(cJSON_GetObjectItem(layer, "group_name")->valuestring, "describe");
    assert_int_equal(number(layer, "rank"), 0);
    assert_int_equal(number(layer, "device"), 0);
    cJSON *spec = cJSON_GetObjectItem(layer, "spec");
    assert_int_equal(number(spec, "hidden"), HIDDEN);
    assert_int_equal(number(spec, "ring_bytes"), 256 << 10);
    assert_string_equal(cJSON_GetObjectItem(spec, "precision")->valuestring, "bf16");
    snprintf(arguments, sizeof(arguments), "layer --explain %" PRIu64, number(layer, "layer"));
    expect_mokctl(arguments, &text);
    assert_string_equal(text, plan);
    free(text);
    cJSON_Delete(root);
    expect_mokctl("layer", &text);
    assert_non_null(strstr(text, "describe"));
    free(text);
    workload_close(&rank);
}

static void what_mokctl_says_would_be_is_what_is_made_and_charged(void **state)
{
    struct workload problem = problem_with(256 << 10, 40, 3);
    struct workload_rank rank;
    char plan[8192], reason[256];
    char *text;
    cJSON *root;

    (void)state;
    expect_mokctl("layer " SHAPE " --ring-bytes 262144 --minibatch-rows 40 --comm-units 3", &text);
    open_rank(&rank, &problem);
    describe(&rank, plan, sizeof(plan));
    assert_string_equal(text, plan);
    free(text);

    expect_mokctl("--json layer " SHAPE " --ring-bytes 262144 --minibatch-rows 40 --comm-units 3", &text);
    cJSON *would = cJSON_Parse(text);
    free(text);
    const cJSON *memory = cJSON_GetObjectItem(would, "memory"), *layer = only_layer(&root);
    uint64_t workspaces = number(memory, "symmetric_bytes") + number(memory, "private_bytes");
    assert_int_equal(number(layer, "bytes"), workspaces);
    assert_int_equal(number(memory, "context_full_bytes"), mok_buffer_size(rank.context));
    assert_int_equal(number(memory, "symmetric_bytes"), value_of(plan, "symmetric_bytes", reason));
    assert_int_equal(number(memory, "private_bytes"), value_of(plan, "private_bytes", reason));
    cJSON_Delete(would);
    cJSON_Delete(root);
    workload_close(&rank);
}

static void what_mokctl_cannot_explain_has_exit_code_1_and_a_sentence(void **state)
{
    char *text;

    (void)state;
    assert_int_equal(mokctl("layer --explain 4000000", &text), 1);
    assert_non_null(strstr(text, "there is no such layer (MOK_ENOENT)"));
    free(text);
    assert_int_equal(mokctl("layer " SHAPE " --device 7", &text), 1);
    assert_non_null(strstr(text, "MOK_ENODEV"));
    free(text);
    assert_int_equal(mokctl("layer " SHAPE " --ep 3", &text), 1);
    assert_non_null(strstr(text, "experts = 4 is not a multiple of the group's 3 ranks (MOK_ERANGE)"));
    free(text);
    expect_mokctl("layer " SHAPE " --ep 4 --precision mxfp8-per128 --shared-intermediate 32 --clamp 7", &text);
    assert_non_null(strstr(text, "local_experts = 1 (4 experts over 4 ranks)"));
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_override_says_as_asked_and_the_others_keep_their_own_reasons),
        cmocka_unit_test(an_override_is_rounded_as_its_reason_says),
        cmocka_unit_test(no_override_changes_a_bit_and_completions_say_what_ran),
        cmocka_unit_test(an_override_that_cannot_be_is_refused_by_name),
        cmocka_unit_test(mokctl_tells_of_a_layer_what_libmok_tells),
        cmocka_unit_test(what_mokctl_says_would_be_is_what_is_made_and_charged),
        cmocka_unit_test(what_mokctl_cannot_explain_has_exit_code_1_and_a_sentence),
    };
    return cmocka_run_group_tests(tests, start, stop);
}
