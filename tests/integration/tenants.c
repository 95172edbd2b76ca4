/* SPDX-License-Identifier: Apache-2.0 */
/* Tenants through the whole stack: shares of a device by weight, usage that outlives mokd, devices that drain. */
#include <inttypes.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "json.h"
#include "shell.h"
#include "stack.h"
#include "workload.h"

#ifdef MOK_SANITIZED /* where each takes a hundred times as long */
enum { WIDTH = 64, TOKENS = 16 };
#else
enum { WIDTH = 256, TOKENS = 64 };
#endif
enum { OPS = 600, ENOUGH = 300, CLASS = 16, COLD = 3 };

static const struct workload base = { .hidden = WIDTH,
                                      .intermediate = WIDTH,
                                      .experts = 4,
                                      .topk = 2,
                                      .ep = 1,
                                      .max_tokens = TOKENS,
                                      .context_mode = MOK_CONTEXT_NONE,
                                      .seed = 3,
                                      .forward_only = true,
                                      .queue_entries = 1024 };

static void sleep_ms(long ms)
{
    const struct timespec time = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&time, NULL);
}

/* What mokctl says, as JSON; free with cJSON_Delete. As user `uid`. */
static cJSON *mokctl(const struct stack *stack, uid_t uid, const char *arguments)
{
    static char text[1 << 20];
    char command[1024], prefix[64] = "";

    if (uid != getuid())
        snprintf(prefix, sizeof(prefix), "setpriv --reuid %u --clear-groups ", (unsigned)uid);
    snprintf(command, sizeof(command), "%s%s --socket %s --json %s", prefix, stack_program("client/mokctl"),
             stack->socket, arguments);
    FILE *pipe = popen(command, "re");
    assert_non_null(pipe);
    size_t length = fread(text, 1, sizeof(text) - 1, pipe);
    text[length] = '\0';
    int status = pclose(pipe);
    if (status != 0)
        fail_msg("%s: %d: %s", command, status, text);
    cJSON *root = cJSON_Parse(text);
    assert_non_null(root);
    return root;
}

static double number(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItem(object, name);
    if (!cJSON_IsNumber(item))
        fail_msg("no number %s", name);
    return item->valuedouble;
}

static void open_rank(struct workload_rank *rank, const struct workload *problem, const struct stack *stack,
                      const char *job, uint32_t device, uid_t uid)
{
    assert_int_equal(seteuid(uid), 0);
    int r = workload_open(rank, problem, 0, TOKENS, 0, stack->socket, job, device);
    assert_int_equal(seteuid(getuid()), 0);
    if (r < 0)
        fail_msg("%s: %s", mok_error_name(r), mok_last_error());
}

/* ------------------------------------------------------------------ fair share */

static void submit_all(struct workload_rank *rank, mok_ticket ret_ticket[static OPS])
{
    for (int i = 0; i < OPS; i++)
        if (workload_forward(rank, &ret_ticket[i]) < 0)
            fail_msg("operation %d: %s", i, mok_last_error());
}

/* How much longer than an operation of its session on average the longest one took, of those that are done. */
static double excess_ns(struct workload_rank *rank, const mok_ticket ticket[static OPS])
{
    double longest = 0, sum = 0;
    int done = 0;
    mok_result result;

    for (int i = COLD; i < OPS && mok_poll(rank->session, ticket[i], &result) == 1; i++, done++) {
        double ns = (double)result.device_ns;
        longest = ns > longest ? ns : longest;
        sum += ns;
    }
    return done ? longest - sum / done : 0;
}

/* Device time and operations done of two jobs, of one moment. */
struct moment {
    double ns[2], ops[2];
};

static struct moment look(const struct stack *stack)
{
    cJSON *root = mokctl(stack, getuid(), "jobs");
    const cJSON *jobs = cJSON_GetObjectItem(root, "jobs");
    const cJSON *heavy = json_find(jobs, "job", "heavy"), *light = json_find(jobs, "job", "light");

    assert_non_null(heavy);
    assert_non_null(light);
    struct moment moment = { .ns = { number(heavy, "device_ns"), number(light, "device_ns") },
                             .ops = { number(heavy, "ops_done"), number(light, "ops_done") } };
    cJSON_Delete(root);
    return moment;
}

/* Device time of the heavy and of the light one, and by how much their longest operations stand out. */
struct measured {
    double got[2], excess[2];
};

/*
 * Everything is submitted before it is looked at, so that both always have something to run however busy this machine
 * is; and what counts is device time between two looks while both have, each just behind an operation of the light one:
 * of the turns between two of those there are whole ones then. Its first ones take longer, and it waits for that: they
 * are not looked at. False: the looks came too late.
 */
static bool measure(const struct stack *stack, uid_t heavy_uid, uint32_t heavy_weight, uid_t light_uid,
                    uint32_t light_weight, struct measured *ret)
{
    static mok_ticket ticket[2][OPS];
    struct workload heavy = base, light = base;
    struct workload_rank ranks[2];
    struct moment first, last, now;

    heavy.session_weight = heavy_weight;
    light.session_weight = light_weight;
    open_rank(&ranks[0], &heavy, stack, "heavy", 0, heavy_uid);
    open_rank(&ranks[1], &light, stack, "light", 0, light_uid);
    submit_all(&ranks[1], ticket[1]);
    submit_all(&ranks[0], ticket[0]);
    do {
        first = look(stack);
        sleep_ms(5);
    } while (first.ns[0] <= 0 || first.ops[1] < COLD);
    for (last = now = first; now.ops[0] < OPS && now.ops[1] < OPS; now = look(stack))
        if (now.ops[1] > last.ops[1])
            last = now;
    for (int i = 0; i < 2; i++) {
        ret->got[i] = last.ns[i] - first.ns[i];
        ret->excess[i] = excess_ns(&ranks[i], ticket[i]);
        workload_close(&ranks[i]);
    }
    return last.ops[0] - first.ops[0] + last.ops[1] - first.ops[1] >= ENOUGH;
}

/*
 * The heavy one gets at least `low` and at most `high` times the device time of the light one. Whoever is furthest
 * behind goes next, so at either look it may be an operation of each more or less; and one from which this machine
 * takes its processor away is long.
 */
static void expect_share(const struct stack *stack, uid_t heavy_uid, uint32_t heavy_weight, uid_t light_uid,
                         uint32_t light_weight, double low, double high)
{
    struct measured m;
    int tries = 0;

    while (!measure(stack, heavy_uid, heavy_weight, light_uid, light_weight, &m))
        assert_true(++tries < 5);
    double slack = 2 * (m.excess[0] + high * m.excess[1]);
    if (m.got[0] < low * m.got[1] - slack || m.got[0] > high * m.got[1] + slack)
        fail_msg("%.3f to 1 of device time, %.0f and %.0f ns, with operations up to %.0f and %.0f ns above the average",
                 m.got[0] / m.got[1], m.got[0], m.got[1], m.excess[0], m.excess[1]);
    printf("%.2f to 1 of device time\n", m.got[0] / m.got[1]);
}

static void expect_two_to_one(const struct stack *stack, uid_t heavy_uid, uint32_t heavy_weight, uid_t light_uid,
                              uint32_t light_weight)
{
    expect_share(stack, heavy_uid, heavy_weight, light_uid, light_weight, 1.9, 2.1);
}

static void two_busy_sessions_of_one_user_share_the_device_time_two_to_one_by_their_weights(void **state)
{
    struct stack stack;

    (void)state;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 1 }), 0);
    expect_two_to_one(&stack, getuid(), 20, getuid(), 10);
    assert_int_equal(stack_stop(&stack), 0);
}

static void two_busy_users_share_the_device_time_two_to_one_by_the_weights_of_the_configuration(void **state)
{
    struct stack stack;

    (void)state;
    if (getuid() != 0)
        skip();
    assert_int_equal(
        stack_start(&stack, &(struct stack_options){ .devices = 1,
                                                     .extra = "[user 4242]\nweight = 4\n[user 4243]\nweight = 2\n" }),
        0);
    assert_int_equal(chmod(stack.dir, 0755), 0);
    /* What a user's own sessions weigh is no matter between users. */
    expect_two_to_one(&stack, 4242, 1, 4243, 1000);
    assert_int_equal(stack_stop(&stack), 0);
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Of both, while they have something to run: how long the device takes for one. */
static double operation_ms(const struct stack *stack)
{
    struct moment first = look(stack);
    double began = stack_now_ms();

    sleep_ms(20);
    struct moment last = look(stack);
    double elapsed = stack_now_ms() - began;
    if (last.ops[0] >= OPS || last.ops[1] >= OPS)
        return 0;
    return elapsed / (last.ops[0] - first.ops[0] + last.ops[1] - first.ops[1] + 1);
}

/*
 * Three sessions, weights 20, 10 and 1; the third, of user `uid`, asks for less than its share. Its median latency, in
 * operations.
 */
static double latency_of_a_light_session(const struct stack *stack, uid_t uid)
{
    enum { LOOKS = 9, REST = 40 };
    static const uint32_t weight[3] = { 20, 10, 1 };
    static const char *const job[3] = { "heavy", "light", "rare" };
    struct workload problem = base;
    struct workload_rank ranks[3];
    double took[LOOKS];
    static mok_ticket tickets[2][OPS];
    mok_ticket ticket;

    for (int i = 0; i < 3; i++) {
        problem.session_weight = weight[i];
        open_rank(&ranks[i], &problem, stack, job[i], 0, i == 2 ? uid : getuid());
    }
    submit_all(&ranks[1], tickets[1]);
    submit_all(&ranks[0], tickets[0]);
    double operation = operation_ms(stack);
    for (int i = 0; i < LOOKS; i++) {
        sleep_ms((long)(REST * operation));
        double submitted = stack_now_ms();
        assert_int_equal(workload_forward(&ranks[2], &ticket), 0);
        assert_int_equal(mok_wait(ranks[2].session, ticket, -1, NULL), 0);
        took[i] = stack_now_ms() - submitted;
    }
    double again = operation_ms(stack);
    for (int i = 0; i < 3; i++)
        workload_close(&ranks[i]);
    qsort(took, LOOKS, sizeof(took[0]), by_size);
    return operation > 0 && again > 0 ? took[LOOKS / 2] / (operation > again ? operation : again) : -1;
}

/*
 * Served in order it would wait for hundreds of operations, by its weight alone for thirty; who had nothing to run
 * waits for the one that runs. Operations are measured beside it, since this machine may have more to do.
 */
static void expect_short_wait(const struct stack *stack, uid_t uid)
{
    double waited;
    int tries = 0;

    while ((waited = latency_of_a_light_session(stack, uid)) < 0) /* the others were done too early */
        assert_true(++tries < 5);
    if (waited > 8)
        fail_msg("waits for %.1f operations", waited);
    printf("a light session waits for %.1f operations, its own among them\n", waited);
}

static void a_light_session_keeps_its_latency_beside_two_that_saturate_the_device_two_to_one(void **state)
{
    struct stack stack;

    (void)state;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 1 }), 0);
    expect_short_wait(&stack, getuid());
    assert_int_equal(stack_stop(&stack), 0);
}

/* Between classes weights are no matter, and who is of the lowest is served all the same. */
static void a_class_gets_sixteen_times_the_device_time_of_the_one_below_and_who_is_low_does_not_starve(void **state)
{
    struct stack stack;

    (void)state;
    if (getuid() != 0)
        skip();
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 1,
                                                                  .extra = "[user 4242]\nweight = 1\npriority = high\n"
                                                                           "[user 4243]\nweight = 1000\n"
                                                                           "[user 4244]\npriority = low\n" }),
                     0);
    assert_int_equal(chmod(stack.dir, 0755), 0);
    expect_share(&stack, 4242, 1, 4243, 1, CLASS * 0.7, CLASS * 1.5); /* the lower one has had some twenty operations */
    expect_short_wait(&stack, 4244);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ------------------------------------------------------------------ quota */

/* What mokctl prints, and its exit code. */
static char *mokctl_text(const struct stack *stack, uid_t uid, int *ret_code, const char *arguments)
{
    char prefix[64] = "";

    if (uid != getuid())
        snprintf(prefix, sizeof(prefix), "setpriv --reuid %u --clear-groups ", (unsigned)uid);
    return shell_output(ret_code, "%s%s --socket %s %s 2>&1", prefix, stack_program("client/mokctl"), stack->socket,
                        arguments);
}

static const cJSON *quota_line(const cJSON *root, const char *user, const char *what)
{
    const cJSON *quota = json_find(cJSON_GetObjectItem(root, "quota"), "name", user);

    if (!quota)
        fail_msg("no quota of %s", user);
    return json_find(cJSON_GetObjectItem(quota, "limits"), "what", what);
}

static void expect_text(const struct stack *stack, uid_t uid, const char *arguments, int code, const char *const *texts)
{
    int got;
    char *said = mokctl_text(stack, uid, &got, arguments);

    if (got != code)
        fail_msg("mokctl %s: exit code %d: %s", arguments, got, said);
    for (; *texts; texts++)
        if (!strstr(said, *texts))
            fail_msg("mokctl %s does not say \"%s\": %s", arguments, *texts, said);
    free(said);
}

static void mokctl_quota_shows_what_is_used_and_allowed_and_where_that_is_said(void **state)
{
    struct stack stack;
    struct workload_rank rank;

    (void)state;
    if (getuid() != 0)
        skip();
    assert_int_equal(
        stack_start(&stack,
                    &(struct stack_options){ .devices = 2,
                                             .extra = "[limits]\nsessions = 7\n"
                                                      "[user 4242]\nbytes = 64M\nweight = 3\npriority = low\n"
                                                      "devices = host0\nexclusive = yes\n"
                                                      "[user 4243]\nsessions = 2\n[group 4250]\nbytes = 1G\n" }),
        0);
    assert_int_equal(chmod(stack.dir, 0755), 0);
    open_rank(&rank, &base, &stack, "counted", 0, 4242);
    cJSON *own = mokctl(&stack, 4242, "quota");
    const cJSON *bytes = quota_line(own, "4242", "bytes"), *sessions = quota_line(own, "4242", "sessions");
    assert_true(number(bytes, "used") > 0 && number(bytes, "limit") == 64 << 20);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(bytes, "from")), "[user 4242]");
    assert_true(number(sessions, "used") == 1 && number(sessions, "limit") == 7);
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(sessions, "from")), "[limits]");
    assert_true(cJSON_IsFalse(cJSON_GetObjectItem(bytes, "over")));
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(own, "quota")), 1);
    cJSON_Delete(own);

    expect_text(
        &stack, 4242, "quota", 0,
        (const char *[]){ "user 4242: weight 3, priority low, devices host0, also of his own, queues of 1024 entries",
                          "WHAT", "OTHER NODES", "64.0 MiB", "[user 4242]", "[limits]", NULL });
    expect_text(&stack, 4242, "quota --all", 1, (const char *[]){ "user 4242 is no administrator", NULL });
    expect_text(&stack, 4242, "quota --user 4243", 1, (const char *[]){ "sees his own", NULL });
    expect_text(&stack, 4242, "quota --user 4242", 0, (const char *[]){ "user 4242: weight 3", NULL });
    expect_text(&stack, getuid(), "quota --user nobody-of-that-name", 1,
                (const char *[]){ "user = nobody-of-that-name: has nothing of mokd's now", NULL });
    expect_text(&stack, getuid(), "quota --all --user 0", 2, (const char *[]){ "--user or --all, not both", NULL });
    expect_text(&stack, getuid(), "quota --user ''", 2, (const char *[]){ "--user: needs the name", NULL });
    expect_text(&stack, getuid(), "usage --since 2026-02-30", 2,
                (const char *[]){ "--since 2026-02-30: must be", NULL });
    expect_text(&stack, getuid(), "quota --all", 0,
                (const char *[]){ "user 4242:", "user 4243:", "group 4250, together", "1.0 GiB", NULL });

    /* What he has is taken from nobody when he may have less: it is over. */
    char command[160];
    snprintf(command, sizeof(command), "sed -i 's/^bytes = 64M/bytes = 4K/' %s", stack.config);
    assert_int_equal(system(command), 0);
    assert_int_equal(kill(stack.mokd, SIGHUP), 0);
    bool over = false;
    for (int i = 0; i < 500 && !over; i++) {
        cJSON *all = mokctl(&stack, getuid(), "quota --user 4242");
        over = cJSON_IsTrue(cJSON_GetObjectItem(quota_line(all, "4242", "bytes"), "over"));
        cJSON_Delete(all);
        sleep_ms(10);
    }
    assert_true(over);
    expect_text(&stack, 4242, "quota", 0, (const char *[]){ "OVER", NULL });
    workload_close(&rank);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ------------------------------------------------------------------ usage */

static void run_steps(const struct stack *stack, const char *job, uid_t uid, int steps)
{
    struct workload_rank rank;
    mok_ticket ticket;

    open_rank(&rank, &base, stack, job, 0, uid);
    for (int i = 0; i < steps; i++) {
        assert_int_equal(workload_forward(&rank, &ticket), 0);
        assert_int_equal(mok_wait(rank.session, ticket, -1, NULL), 0);
    }
    workload_close(&rank);
}

static double ops_of(const cJSON *root, const char *job)
{
    const cJSON *row = json_find(cJSON_GetObjectItem(root, "usage"), "job", job);
    return row ? number(row, "ops") : 0;
}

/* A queue's last operations are counted when it has gone. */
static void expect_ops(const struct stack *stack, const char *job, double ops)
{
    double got = -1;

    for (int i = 0; i < 500 && got != ops; i++) {
        cJSON *root = mokctl(stack, getuid(), "usage --since 1h --by job");
        got = ops_of(root, job);
        cJSON_Delete(root);
        sleep_ms(10);
    }
    if (got != ops)
        fail_msg("%s: %.0f operations, not %.0f", job, got, ops);
}

static void usage_is_there_after_a_crash_and_everyone_sees_his_own(void **state)
{
    struct stack stack;
    char daemon[128], dir[] = "/tmp/mok-usage-XXXXXX";

    (void)state;
    if (getuid() != 0)
        skip();
    assert_non_null(mkdtemp(dir));
    snprintf(daemon, sizeof(daemon), "state_dir = %s", dir);
    const struct stack_options options = { .devices = 1, .daemon = daemon };
    assert_int_equal(stack_start(&stack, &options), 0);
    assert_int_equal(chmod(stack.dir, 0755), 0);
    run_steps(&stack, "mine", 4242, 3);
    run_steps(&stack, "theirs", 4243, 5);
    expect_ops(&stack, "mine", 3); /* asking writes it as well */
    expect_ops(&stack, "theirs", 5);

    kill(stack.mokd, SIGKILL);
    stack_stop(&stack);
    assert_int_equal(stack_start(&stack, &options), 0);
    assert_int_equal(chmod(stack.dir, 0755), 0);
    run_steps(&stack, "mine", 4242, 4);
    expect_ops(&stack, "mine", 7);
    expect_ops(&stack, "theirs", 5);

    cJSON *own = mokctl(&stack, 4242, "usage --by job");
    const cJSON *row = json_find(cJSON_GetObjectItem(own, "usage"), "job", "mine");
    assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(own, "usage")), 1);
    assert_true(number(row, "ops") == 7 && number(row, "uid") == 4242);
    assert_true(number(row, "rows") == 7 * TOKENS * 2); /* each token's two slots reach an expert */
    assert_true(number(row, "device_ns") > 0);
    cJSON_Delete(own);
    assert_int_equal(stack_stop(&stack), 0);
    char command[128];
    snprintf(command, sizeof(command), "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

/* Whose names are without end fills no store that others' usage is in too: some have rows, and the rest one. */
static void names_without_end_have_few_rows_and_no_operation_is_lost(void **state)
{
    enum { NAMES = 100, ROWS = 64 + 1 };
    struct stack stack;
    double ops = 0, got = 0;

    (void)state;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 1 }), 0);
    for (int i = 0; i < NAMES; i++) {
        char job[32];
        mok_session_options options = { .size = sizeof(options), .socket_path = stack.socket, .job = job };
        mok_session *session;
        mok_ticket ticket;
        snprintf(job, sizeof(job), "made-up-%d", i);
        assert_int_equal(mok_session_open(&options, &session), 0);
        assert_int_equal(mok_nop(session, 0, &ticket), 0);
        assert_int_equal(mok_wait(session, ticket, -1, NULL), 0);
        mok_session_close(session);
        ops++;
    }
    for (int i = 0; i < 500 && got != ops; i++) { /* a queue's last operations are counted when it has gone */
        const cJSON *row;
        cJSON *root = mokctl(&stack, getuid(), "usage --since 1h --by job");
        got = 0;
        cJSON_ArrayForEach(row, cJSON_GetObjectItem(root, "usage"))
            got += number(row, "ops");
        assert_in_range(cJSON_GetArraySize(cJSON_GetObjectItem(root, "usage")), 1, ROWS * 2); /* two steps, if one ends now */
        if (got == ops)
            assert_true(ops_of(root, "(other)") > 0);
        cJSON_Delete(root);
        sleep_ms(10);
    }
    assert_true(got == ops);
    assert_int_equal(stack_stop(&stack), 0);
}

static int log_has(const struct stack *stack, const char *text)
{
    char line[1024];
    int found = 0;
    FILE *file = fopen(stack->log, "re");

    assert_non_null(file);
    while (fgets(line, sizeof(line), file))
        found += strstr(line, text) != NULL;
    fclose(file);
    return found;
}

static void fill_disk(const char *path)
{
    static const char block[4096];
    FILE *file = fopen(path, "we");

    assert_non_null(file);
    setbuf(file, NULL);
    while (fwrite(block, 1, sizeof(block), file) == sizeof(block))
        ;
    fclose(file);
}

/* Mounted while its test runs. */
static char small_disk[32];

static int drop_small_disk(void **state)
{
    (void)state;
    if (!small_disk[0])
        return 0;
    return umount2(small_disk, MNT_DETACH) == 0 && rmdir(small_disk) == 0 ? 0 : -1;
}

static void a_full_disk_costs_nobody_anything_and_what_was_counted_is_written_once_there_is_room(void **state)
{
    struct stack stack;
    char daemon[128], filler[128], *dir = strcpy(small_disk, "/tmp/mok-usage-XXXXXX");

    (void)state;
    assert_non_null(mkdtemp(dir));
    if (mount("none", dir, "tmpfs", 0, "size=128k") < 0) { /* not root, or a container that may not */
        rmdir(dir);
        small_disk[0] = '\0';
        skip();
    }
    snprintf(daemon, sizeof(daemon), "state_dir = %s", dir);
    snprintf(filler, sizeof(filler), "%s/filler", dir);
    const struct stack_options options = { .devices = 1, .daemon = daemon };
    assert_int_equal(stack_start(&stack, &options), 0);
    run_steps(&stack, "before", getuid(), 1);
    expect_ops(&stack, "before", 1);
    fill_disk(filler);
    run_steps(&stack, "meanwhile", getuid(), 6);
    expect_ops(&stack, "meanwhile", 6); /* counted, though it cannot be written */
    run_steps(&stack, "meanwhile", getuid(), 1);
    expect_ops(&stack, "meanwhile", 7);
    assert_int_equal(log_has(&stack, "usage: cannot be written, is kept in memory and tried again"), 1);
    assert_int_equal(unlink(filler), 0);
    expect_ops(&stack, "before", 1);
    assert_int_equal(log_has(&stack, "usage: is written again"), 1);
    kill(stack.mokd, SIGKILL);
    stack_stop(&stack);
    assert_int_equal(stack_start(&stack, &options), 0);
    expect_ops(&stack, "meanwhile", 7);
    assert_int_equal(stack_stop(&stack), 0);
}

/* ------------------------------------------------------------------ draining */

static void mokctl_drain_waits_until_what_runs_has_ended(void **state)
{
    struct stack stack;
    struct workload_rank rank;
    mok_session_options options = { .size = sizeof(options) };
    mok_session *session;
    mok_ticket ticket;

    (void)state;
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .devices = 2 }), 0);
    open_rank(&rank, &base, &stack, "running", 0, getuid());
    cJSON *root = mokctl(&stack, getuid(), "drain host0");
    const cJSON *drained = json_find(root, "name", "host0"), *other = json_find(root, "name", "host1");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(drained, "state")), "draining");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(other, "state")), "open");
    cJSON_Delete(root);
    assert_int_equal(workload_forward(&rank, &ticket), 0);
    assert_int_equal(mok_wait(rank.session, ticket, -1, NULL), 0);

    options.socket_path = stack.socket;
    assert_int_equal(mok_session_open(&options, &session), 0);
    assert_int_equal(mok_nop(session, 0, &ticket), -MOK_EDRAIN);
    assert_non_null(strstr(mok_last_error(), "host0 is being drained"));
    assert_int_equal(mok_nop(session, 1, &ticket), 0);
    mok_session_close(session);

    pid_t waiter = fork();
    assert_true(waiter >= 0);
    if (waiter == 0) {
        execl(stack_program("client/mokctl"), "mokctl", "--socket", stack.socket, "--json", "drain", "0", "--wait",
              (char *)NULL);
        _exit(127);
    }
    sleep_ms(300);
    int status;
    assert_int_equal(waitpid(waiter, &status, WNOHANG), 0); /* the job is still there */
    workload_close(&rank);
    assert_int_equal(waitpid(waiter, &status, 0), waiter);
    assert_int_equal(status, 0);
    assert_int_equal(log_has(&stack, "device: drained device=host0"), 1);
    cJSON_Delete(mokctl(&stack, getuid(), "undrain --node"));
    open_rank(&rank, &base, &stack, "again", 0, getuid());
    workload_close(&rank);
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_busy_sessions_of_one_user_share_the_device_time_two_to_one_by_their_weights),
        cmocka_unit_test(two_busy_users_share_the_device_time_two_to_one_by_the_weights_of_the_configuration),
        cmocka_unit_test(a_light_session_keeps_its_latency_beside_two_that_saturate_the_device_two_to_one),
        cmocka_unit_test(a_class_gets_sixteen_times_the_device_time_of_the_one_below_and_who_is_low_does_not_starve),
        cmocka_unit_test(mokctl_quota_shows_what_is_used_and_allowed_and_where_that_is_said),
        cmocka_unit_test(usage_is_there_after_a_crash_and_everyone_sees_his_own),
        cmocka_unit_test(names_without_end_have_few_rows_and_no_operation_is_lost),
        cmocka_unit_test_teardown(a_full_disk_costs_nobody_anything_and_what_was_counted_is_written_once_there_is_room,
                                  drop_small_disk),
        cmocka_unit_test(mokctl_drain_waits_until_what_runs_has_ended),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
