/* SPDX-License-Identifier: Apache-2.0 */
/* What mokd serves over HTTP: numbers that are those of the work done, and a door that nobody can block. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cjson/cJSON.h>

#include "actor.h"
#include "http.h"
#include "json.h"
#include "shell.h"
#include "stack.h"
#include "workload.h"

enum { TOKENS = 32, TOPK = 2, EXPERTS = 4, STEPS = 3, LONG_MS = 30000 };

static const struct workload small = { .hidden = 64, .intermediate = 64, .experts = EXPERTS, .topk = TOPK, .ep = 1,
                                      .max_tokens = TOKENS, .context_mode = MOK_CONTEXT_FULL, .seed = 3 };
static struct stack stack;
static char door[64];
static int idle_connection = -1; /* made at the start: at the end it must have been closed */
static double idle_since_ms;

static int set_up(void **state)
{
    char extra[128];
    struct stack_options options = { .devices = 2, .extra = extra };

    (void)state;
    snprintf(door, sizeof(door), "/tmp/mok-door-%d", (int)getpid());
    snprintf(extra, sizeof(extra), "[metrics]\nlisten = unix:%s\nsocket_mode = 0600", door);
    if (stack_start(&stack, &options) < 0)
        return -1;
    idle_connection = http_connect(door);
    idle_since_ms = stack_now_ms();
    return idle_connection < 0 ? -1 : 0;
}

static int tear_down(void **state)
{
    struct stat status;

    (void)state;
    int code = stack_stop(&stack);
    if (stat(door, &status) == 0) {
        fprintf(stderr, "%s is still there\n", door);
        code = -1;
    }
    close(idle_connection);
    return code;
}

static char *scrape(void)
{
    char *answer = http_get(door, "/metrics", "Accept: application/openmetrics-text\r\n");
    assert_non_null(answer);
    return answer;
}

static double value_of(const char *name)
{
    char *answer = scrape();
    double value = http_sample(answer, name);

    free(answer);
    return value;
}

static void run_steps(const char *group, uint32_t device, int steps)
{
    struct workload_rank rank;

    assert_int_equal(workload_open(&rank, &small, 0, TOKENS, 0, stack.socket, group, device), 0);
    for (int i = 0; i < steps; i++)
        assert_int_equal(workload_step(&rank, NULL, NULL), 0);
    workload_close(&rank);
}

/* ------------------------------------------------------------------ numbers */

static void a_scrape_counts_what_a_job_did(void **state)
{
    (void)state;
    run_steps("count", 0, STEPS);
    char *answer = scrape();
    assert_int_equal(http_sample(answer, "mok_ops_total{device=\"host0\",op=\"forward\",result=\"ok\"}"), STEPS);
    assert_int_equal(http_sample(answer, "mok_ops_total{device=\"host0\",op=\"backward\",result=\"ok\"}"), STEPS);
    assert_int_equal(http_sample(answer, "mok_ops_total{device=\"host1\",op=\"forward\",result=\"ok\"}"), 0);
    assert_int_equal(http_sample(answer, "mok_rows_total{device=\"host0\"}"), 2 * STEPS * TOKENS * TOPK);
    assert_int_equal(http_sample(answer, "mok_tokens_total{device=\"host0\"}"), 2 * STEPS * TOKENS);
    assert_int_equal(http_sample(answer, "mok_rows_dropped_total{device=\"host0\"}"), 0);
    assert_int_equal(http_sample(answer, "mok_ops_in_flight{device=\"host0\"}"), 0);
    assert_int_equal(http_sample(answer, "mok_device_phases_total{device=\"host0\",phase=\"whole\"}"), 2 * STEPS);
    assert_true(http_sample(answer, "mok_device_busy_seconds_total{device=\"host0\",phase=\"whole\"}") > 0);
    assert_true(http_sample(answer, "mok_minibatches_total{device=\"host0\"}") >= 2 * STEPS);
    assert_true(http_sample(answer, "mok_ring_rows_total{device=\"host0\"}") <=
                http_sample(answer, "mok_ring_capacity_rows_total{device=\"host0\"}"));
    assert_true(http_sample(answer, "mok_expert_max_rows_total{device=\"host0\"}") >=
                http_sample(answer, "mok_expert_mean_rows_total{device=\"host0\"}"));
    free(answer);
}

/* Two ranks, so that there is somebody to wait for. */
static void run_two_ranks(const char *group)
{
    static const struct workload both = { .hidden = 64, .intermediate = 64, .experts = EXPERTS, .topk = TOPK, .ep = 2,
                                         .max_tokens = TOKENS, .context_mode = MOK_CONTEXT_FULL, .seed = 3 };
    struct actor actor[2];

    for (uint32_t rank = 0; rank < 2; rank++) {
        struct actor_script script = { .socket = stack.socket, .group = group, .problem = &both, .rank = rank,
                                       .device = rank, .tokens = TOKENS / 2, .first_token = rank * TOKENS / 2,
                                       .stop_at = ACTOR_FINISHED, .steps = STEPS };
        assert_int_equal(actor_start(&actor[rank], &script), 0);
    }
    for (int rank = 0; rank < 2; rank++)
        assert_int_equal(actor_join(&actor[rank], LONG_MS), 0);
}

static void every_stage_of_every_operation_is_in_its_histogram(void **state)
{
    static const char *const stages[] = { "queue", "ready_wait", "main", "push_wait", "reduce", "total" };
    char name[160];

    (void)state;
    run_two_ranks("stages");
    char *answer = scrape();
    for (size_t i = 0; i < sizeof(stages) / sizeof(stages[0]); i++) {
        snprintf(name, sizeof(name), "mok_op_latency_seconds_count{device=\"host1\",op=\"forward\",stage=\"%s\"}",
                 stages[i]);
        assert_int_equal(http_sample(answer, name), STEPS);
        snprintf(name, sizeof(name),
                 "mok_op_latency_seconds_bucket{device=\"host1\",op=\"forward\",stage=\"%s\",le=\"+Inf\"}", stages[i]);
        assert_int_equal(http_sample(answer, name), STEPS);
    }
    assert_true(http_sample(answer, "mok_op_latency_seconds_sum{device=\"host1\",op=\"forward\",stage=\"total\"}") >=
                http_sample(answer, "mok_op_latency_seconds_sum{device=\"host1\",op=\"forward\",stage=\"main\"}"));
    free(answer);
}

static void a_failure_is_counted_by_its_name(void **state)
{
    struct workload_rank rank;

    (void)state;
    assert_int_equal(workload_open(&rank, &small, 0, TOKENS, 0, stack.socket, "fault", 1), 0);
    ((int32_t *)mok_buffer_data(rank.ids))[3] = EXPERTS;
    assert_int_equal(workload_step(&rank, NULL, NULL), -MOK_EEXPERT);
    workload_close(&rank);
    assert_int_equal(value_of("mok_ops_total{device=\"host1\",op=\"forward\",result=\"EEXPERT\"}"), 1);
}

static void sessions_are_added_up_by_job_and_stay_when_they_are_gone(void **state)
{
    char name[128];

    (void)state;
    run_steps("sum", 0, 1);
    snprintf(name, sizeof(name), "mok_job_ops_total{user=\"");
    char *answer = scrape(), *line = strstr(answer, "job=\"sum\"");
    assert_non_null(line);
    free(answer);
    run_steps("sum", 1, 1);
    answer = scrape();
    line = strstr(answer, name);
    double ops = -1;
    for (; line; line = strstr(line + 1, name))
        if (strstr(line, "job=\"sum\"") && strstr(line, "job=\"sum\"") < strchr(line, '\n'))
            ops = strtod(strchr(line, '}') + 1, NULL);
    assert_int_equal(ops, 4);
    free(answer);
}

static void names_that_a_user_makes_up_are_bounded(void **state)
{
    (void)state;
    for (int i = 0; i < 40; i++) {
        mok_session_options options = { .size = sizeof(options), .socket_path = stack.socket };
        mok_session *session;
        char job[32];
        snprintf(job, sizeof(job), "made-up-%d", i);
        options.job = job;
        assert_int_equal(mok_session_open(&options, &session), 0);
        mok_ticket ticket;
        mok_result result;
        assert_int_equal(mok_nop(session, 0, &ticket), 0);
        assert_int_equal(mok_wait(session, ticket, -1, &result), 0);
        mok_session_close(session);
    }
    char *answer = scrape();
    int series = 0;
    for (char *line = strstr(answer, "mok_job_ops_total{"); line; line = strstr(line + 1, "mok_job_ops_total{"))
        series++;
    assert_in_range(series, 3, 16);
    assert_non_null(strstr(answer, "job=\"other\""));
    free(answer);
}

static void await_up(const char *device)
{
    char name[64];
    double start = stack_now_ms();

    snprintf(name, sizeof(name), "mok_device_up{device=\"%s\"}", device);
    while (value_of(name) < 1) {
        assert_true(stack_now_ms() - start < LONG_MS);
        usleep(20000);
    }
}

static void counters_go_on_after_a_workers_death(void **state)
{
    static const char forward[] = "mok_ops_total{device=\"host0\",op=\"forward\",result=\"ok\"}";
    double before = value_of(forward);
    pid_t worker[2];

    (void)state;
    assert_int_equal(stack_workers(&stack, worker, 2), 2);
    kill(worker[0], SIGKILL);
    kill(worker[1], SIGKILL);
    double start = stack_now_ms();
    while (value_of("mok_device_restarts_total{device=\"host0\"}") < 1 ||
           value_of("mok_device_restarts_total{device=\"host1\"}") < 1) {
        assert_true(stack_now_ms() - start < LONG_MS);
        usleep(20000);
    }
    await_up("host0");
    assert_int_equal(value_of(forward), before);
    run_steps("again", 0, 1);
    assert_int_equal(value_of(forward), before + 1);
}

/* ------------------------------------------------------------------ the page's data */

static void the_status_shows_devices_sessions_and_the_load_of_experts(void **state)
{
    struct workload_rank rank;
    double rows = 0;

    (void)state;
    assert_int_equal(workload_open(&rank, &small, 0, TOKENS, 0, stack.socket, "shown", 0), 0);
    assert_int_equal(workload_step(&rank, NULL, NULL), 0);
    char *answer = http_get(door, "/status.json", "");
    cJSON *root = cJSON_Parse(http_body(answer));
    assert_non_null(root);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(root, "devices")), 2);
    /* Beside it there may be one whose client has gone, until its workers have let go of it. */
    const cJSON *session = json_find(cJSON_GetObjectItem(root, "sessions"), "job", "shown");
    assert_non_null(session);
    const cJSON *queue = cJSON_GetArrayItem(cJSON_GetObjectItem(session, "devices"), 0);
    assert_int_equal(cJSON_GetObjectItem(queue, "ops")->valueint, 2);
    assert_true(cJSON_GetObjectItem(queue, "device_ns")->valuedouble > 0);
    const cJSON *layer = json_find(cJSON_GetObjectItem(root, "layers"), "group", "shown"), *expert;
    assert_non_null(layer);
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(layer, "expert_rows")), EXPERTS);
    cJSON_ArrayForEach(expert, cJSON_GetObjectItem(layer, "expert_rows"))
        rows += expert->valuedouble;
    assert_int_equal(rows, 2 * TOKENS * TOPK);
    const cJSON *recent = cJSON_GetArrayItem(cJSON_GetObjectItem(root, "recent"), 0);
    assert_string_equal(cJSON_GetObjectItem(recent, "message")->valuestring, "worker lost");
    char imbalance[128];
    snprintf(imbalance, sizeof(imbalance),
             "mok_layer_imbalance{group=\"shown\",uid=\"%u\",layer=\"0\",rank=\"0\",device=\"host0\"}", getuid());
    assert_true(value_of(imbalance) >= 1);
    cJSON_Delete(root);
    free(answer);
    workload_close(&rank);
}

static void top_shows_the_shares_of_the_time_between_two_looks(void **state)
{
    struct actor actor;
    struct actor_script script = { .socket = stack.socket, .group = "top", .problem = &small, .device = 1,
                                   .tokens = TOKENS, .stop_at = ACTOR_STEPPING };

    (void)state;
    assert_int_equal(actor_start(&actor, &script), 0);
    assert_int_equal(actor_await(&actor, ACTOR_STEPPING, LONG_MS), 0);
    int code;
    char *text = shell_output(&code, "%s --socket %s top --once --json --interval 1", stack_program("client/mokctl"),
                              stack.socket);
    assert_int_equal(code, 0);
    cJSON *root = cJSON_Parse(text);
    assert_non_null(root);
    const cJSON *device = cJSON_GetArrayItem(cJSON_GetObjectItem(root, "devices"), 1);
    assert_string_equal(cJSON_GetObjectItem(device, "name")->valuestring, "host1");
    assert_true(cJSON_GetObjectItem(device, "ops_per_second")->valuedouble > 0);
    assert_true(cJSON_GetObjectItem(device, "busy")->valuedouble > 0);
    const cJSON *total = cJSON_GetObjectItem(cJSON_GetObjectItem(device, "latency_ns"), "total");
    assert_true(cJSON_GetObjectItem(total, "p99")->valuedouble >= cJSON_GetObjectItem(total, "p50")->valuedouble);
    const cJSON *session = json_find(cJSON_GetObjectItem(root, "sessions"), "job", "top");
    assert_non_null(session);
    assert_true(cJSON_GetObjectItem(session, "share")->valuedouble > 0.99);
    assert_true(cJSON_GetObjectItem(session, "ops_per_second")->valuedouble > 0);
    cJSON_Delete(root);
    free(text);
    text = shell_output(&code, "%s --socket %s top --once --interval 1", stack_program("client/mokctl"), stack.socket);
    assert_non_null(strstr(text, "DEVICE"));
    assert_non_null(strstr(text, "100.0%"));
    free(text);
    actor_kill(&actor);
}

/* ------------------------------------------------------------------ HTTP */

static void expect_begin(char *answer, const char *begin)
{
    assert_non_null(answer);
    if (strncmp(answer, begin, strlen(begin)) != 0)
        fail_msg("\"%.40s\" does not begin with \"%s\"", answer, begin);
    free(answer);
}

static void both_formats_are_told_by_their_types(void **state)
{
    (void)state;
    char *answer = http_get(door, "/metrics", "");
    assert_non_null(strstr(answer, "Content-Type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"));
    assert_string_equal(answer + strlen(answer) - 6, "# EOF\n");
    assert_non_null(strstr(answer, "# TYPE mok_ops counter\n"));
    free(answer);
    answer = http_get(door, "/metrics", "Accept: text/plain;version=0.0.4;q=0.5,*/*;q=0.1\r\n");
    assert_non_null(strstr(answer, "Content-Type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    assert_non_null(strstr(answer, "# TYPE mok_ops_total counter\n"));
    free(answer);
    answer = http_get(door, "/metrics", "Accept: application/openmetrics-text;version=1.0.0,text/plain;q=0.5\r\n");
    assert_non_null(strstr(answer, "Content-Type: application/openmetrics-text"));
    free(answer);
}

static void what_is_not_there_or_not_allowed_is_refused(void **state)
{
    static const char post[] = "POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nabcd";
    static const char garbage[] = "\x16\x03\x01 what is this\r\n\r\n";

    (void)state;
    expect_begin(http_get(door, "/../etc/passwd", ""), "HTTP/1.1 404 ");
    expect_begin(http_raw(door, post, sizeof(post) - 1), "HTTP/1.1 405 ");
    expect_begin(http_raw(door, garbage, sizeof(garbage) - 1), "HTTP/1.");
    expect_begin(http_get(door, "/metrics", ""), "HTTP/1.1 200 ");
}

static void the_page_may_load_nothing_and_its_words_are_new_each_time(void **state)
{
    char *first = http_get(door, "/", ""), *second = http_get(door, "/", "");
    const char *policy = strstr(first, "Content-Security-Policy: default-src 'none'; script-src 'nonce-");

    (void)state;
    assert_non_null(policy);
    const char *word = strstr(policy, "nonce-") + 6;
    assert_memory_not_equal(word, strstr(strstr(second, "script-src"), "nonce-") + 6, 32);
    char script[64];
    snprintf(script, sizeof(script), "<script nonce=\"%.32s\">", word);
    assert_non_null(strstr(first, script));
    assert_null(strstr(http_body(first), "WWWWWWWW"));
    assert_null(strstr(http_body(first), "://cdn"));
    assert_null(strstr(http_body(first), "<link rel=\"stylesheet\""));
    free(first);
    free(second);
}

/* Nobody who does not read, or does not finish to ask, keeps mokd from its other clients or from the next scrape. */
static void slow_clients_are_in_nobodys_way(void **state)
{
    static const char half[] = "GET /metrics HTTP/1.1\r\nHo",
                      whole[] = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
    int fd[20];

    (void)state;
    for (size_t i = 0; i < 20; i++) {
        fd[i] = http_connect(door);
        assert_true(fd[i] >= 0);
        const char *said = i % 2 ? half : whole;
        assert_int_equal(send(fd[i], said, strlen(said), MSG_NOSIGNAL), strlen(said));
    }
    run_steps("beside", 1, 1);
    expect_begin(http_get(door, "/metrics", ""), "HTTP/1.1 200 ");
    for (size_t i = 0; i < 20; i++)
        close(fd[i]);
}

/* More connections than mokd takes, which ask for nothing, make room for one that does long before their time is up. */
static void too_many_connections_keep_nobody_out(void **state)
{
    enum { CROWD = 80 };
    int fd[CROWD];

    (void)state;
    for (size_t i = 0; i < CROWD; i++)
        fd[i] = http_connect_at_once(door); /* those beyond the backlog fail */
    run_steps("flood", 0, 1);
    double start = stack_now_ms();
    expect_begin(http_get(door, "/metrics", ""), "HTTP/1.1 200 ");
    assert_true(stack_now_ms() - start < 8000);
    for (size_t i = 0; i < CROWD; i++)
        if (fd[i] >= 0)
            close(fd[i]);
    expect_begin(http_get(door, "/metrics", ""), "HTTP/1.1 200 ");
}

static void who_asks_for_nothing_is_hung_up_on(void **state)
{
    struct pollfd wait = { .fd = idle_connection, .events = POLLIN };
    char byte;

    (void)state;
    assert_int_equal(poll(&wait, 1, LONG_MS), 1);
    assert_true(read(idle_connection, &byte, 1) <= 0);
    assert_true(stack_now_ms() - idle_since_ms > 5000); /* but not at once */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_scrape_counts_what_a_job_did),
        cmocka_unit_test(every_stage_of_every_operation_is_in_its_histogram),
        cmocka_unit_test(a_failure_is_counted_by_its_name),
        cmocka_unit_test(sessions_are_added_up_by_job_and_stay_when_they_are_gone),
        cmocka_unit_test(names_that_a_user_makes_up_are_bounded),
        cmocka_unit_test(counters_go_on_after_a_workers_death),
        cmocka_unit_test(the_status_shows_devices_sessions_and_the_load_of_experts),
        cmocka_unit_test(top_shows_the_shares_of_the_time_between_two_looks),
        cmocka_unit_test(both_formats_are_told_by_their_types),
        cmocka_unit_test(what_is_not_there_or_not_allowed_is_refused),
        cmocka_unit_test(the_page_may_load_nothing_and_its_words_are_new_each_time),
        cmocka_unit_test(slow_clients_are_in_nobodys_way),
        cmocka_unit_test(who_asks_for_nothing_is_hung_up_on),
        cmocka_unit_test(too_many_connections_keep_nobody_out),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
