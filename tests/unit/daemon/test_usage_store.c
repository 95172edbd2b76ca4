/* SPDX-License-Identifier: Apache-2.0 */
/* The usage on disk by itself: what is added is found again, whatever happens to the file. */
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

#include "mokd/usage_store.h"

#define NOW 1800000000u
#define DAY 86400u

static const struct mokd_usage_limits limits = { .days = 400, .bytes = 64u << 20 };

static char dir[64], path[96];

static int make_dir(void **state)
{
    (void)state;
    snprintf(dir, sizeof(dir), "/tmp/mok-usage-XXXXXX");
    if (!mkdtemp(dir))
        return -1;
    snprintf(path, sizeof(path), "%s/usage.db", dir);
    return 0;
}

static int drop_dir(void **state)
{
    char other[160];

    (void)state;
    unlink(path);
    snprintf(other, sizeof(other), "%s-journal", path);
    unlink(other);
    snprintf(other, sizeof(other), "%s.broken", path);
    unlink(other);
    return rmdir(dir);
}

static struct mokd_usage_count count_of(uint32_t uid, const char *job, const char *device, uint64_t ns)
{
    struct mokd_usage_count count = { .uid = uid, .device_ns = ns, .ops = 1, .rows = 10, .byte_seconds = 100 };

    snprintf(count.job, sizeof(count.job), "%s", job);
    snprintf(count.device, sizeof(count.device), "%s", device);
    return count;
}

/* Returns whether a broken file was put aside. */
static bool add(struct mokd_usage_store *store, uint64_t now, struct mokd_usage_count count)
{
    char text[256] = "";
    bool aside;

    int r = mokd_usage_store_add(store, now, &count, 1, &aside, text, sizeof(text));
    if (r < 0)
        fail_msg("%s", text);
    return aside;
}

static struct mokd_usage_answer ask(struct mokd_usage_store *store, const struct mokd_usage_question *question)
{
    struct mokd_usage_answer answer;
    char text[256] = "";

    if (mokd_usage_store_ask(store, question, &answer, text, sizeof(text)) < 0)
        fail_msg("%s", text);
    return answer;
}

static uint64_t total_ns(struct mokd_usage_store *store, uint64_t since)
{
    struct mokd_usage_answer answer = ask(store, &(struct mokd_usage_question){ .since_s = since });
    uint64_t ns = 0;

    for (size_t i = 0; i < answer.count; i++)
        ns += answer.list[i].device_ns;
    free(answer.list);
    return ns;
}

static void counts_of_one_time_add_up_and_are_there_after_a_restart(void **state)
{
    (void)state;
    struct mokd_usage_store *store = mokd_usage_store_new(path, &limits);
    for (int i = 0; i < 3; i++)
        assert_false(add(store, NOW + (unsigned)i, count_of(1000, "train", "host0", 5)));
    mokd_usage_store_free(store);
    store = mokd_usage_store_new(path, &limits);
    add(store, NOW + 2 * MOKD_USAGE_BUCKET_S, count_of(1000, "train", "host0", 5));
    struct mokd_usage_answer answer = ask(store, &(struct mokd_usage_question){ .since_s = 0 });
    assert_int_equal(answer.count, 1);
    assert_int_equal(answer.list[0].device_ns, 20);
    assert_int_equal(answer.list[0].ops, 4);
    assert_int_equal(answer.list[0].rows, 40);
    assert_int_equal(answer.list[0].byte_seconds, 400);
    assert_int_equal(answer.kept_since_s, NOW - NOW % MOKD_USAGE_BUCKET_S);
    free(answer.list);
    assert_int_equal(total_ns(store, NOW + MOKD_USAGE_BUCKET_S), 5); /* the first three were before */
    mokd_usage_store_free(store);
}

static void answers_are_by_user_job_or_device_and_most_time_comes_first(void **state)
{
    (void)state;
    struct mokd_usage_store *store = mokd_usage_store_new(NULL, &limits);
    add(store, NOW, count_of(0, "a", "host0", 1));
    add(store, NOW, count_of(0, "a", "host1", 2));
    add(store, NOW, count_of(0, "b", "host1", 4));
    add(store, NOW, count_of(4242, "b", "host1", 80));

    struct mokd_usage_answer users = ask(store, &(struct mokd_usage_question){ .by = MOKD_USAGE_USER });
    assert_int_equal(users.count, 2);
    assert_string_equal(users.list[0].user, "4242"); /* nobody of that name here */
    assert_string_equal(users.list[1].user, "root");
    assert_int_equal(users.list[1].device_ns, 7);
    assert_string_equal(users.list[1].job, "");
    free(users.list);
    struct mokd_usage_answer jobs = ask(store, &(struct mokd_usage_question){ .by = MOKD_USAGE_JOB });
    assert_int_equal(jobs.count, 3); /* b of two users is two jobs */
    free(jobs.list);
    struct mokd_usage_answer devices = ask(store, &(struct mokd_usage_question){ .by = MOKD_USAGE_DEVICE });
    assert_int_equal(devices.count, 2);
    assert_string_equal(devices.list[0].device, "host1");
    assert_int_equal(devices.list[0].device_ns, 86);
    assert_string_equal(devices.list[0].user, "");
    free(devices.list);
    struct mokd_usage_answer own = ask(store, &(struct mokd_usage_question){ .one_user = true, .uid = 0 });
    assert_int_equal(own.count, 3);
    free(own.list);
    mokd_usage_store_free(store);
}

static void what_is_not_written_yet_counts_too(void **state)
{
    struct mokd_usage_count more[] = { count_of(7, "a", "host0", 3), count_of(8, "a", "host0", 50) };
    (void)state;

    struct mokd_usage_store *store = mokd_usage_store_new(NULL, &limits);
    add(store, NOW, count_of(7, "a", "host0", 1));
    struct mokd_usage_answer answer =
        ask(store, &(struct mokd_usage_question){ .more = more, .n_more = 2, .one_user = true, .uid = 7 });
    assert_int_equal(answer.count, 1);
    assert_int_equal(answer.list[0].device_ns, 4);
    free(answer.list);
    mokd_usage_store_free(store);
}

static void rows_older_than_they_may_be_go(void **state)
{
    (void)state;
    struct mokd_usage_store *store = mokd_usage_store_new(path, &(struct mokd_usage_limits){ 2, 64u << 20 });
    add(store, NOW, count_of(7, "old", "host0", 1));
    add(store, NOW + DAY, count_of(7, "young", "host0", 2));
    assert_int_equal(total_ns(store, 0), 3);
    add(store, NOW + 2 * DAY + 3600, count_of(7, "now", "host0", 4));
    assert_int_equal(total_ns(store, 0), 6);
    mokd_usage_store_free(store);
}

/* Names are the clients' to make up: whatever they do, the file stays small and the latest rows are in it. */
static void the_file_keeps_its_bound_and_the_oldest_rows_go(void **state)
{
    enum { BATCH = 500, BATCHES = 80 };
    static struct mokd_usage_count list[BATCH];
    struct mokd_usage_limits small = { 400, 1u << 20 };
    char text[256] = "";
    struct stat about;
    bool aside;
    (void)state;

    struct mokd_usage_store *store = mokd_usage_store_new(path, &small);
    for (unsigned b = 0; b < BATCHES; b++) {
        for (unsigned i = 0; i < BATCH; i++) {
            list[i] = count_of(7, "", "host0", 1);
            snprintf(list[i].job, sizeof(list[i].job), "a-long-name-of-a-job-%u-%u", b, i);
        }
        if (mokd_usage_store_add(store, NOW + b * MOKD_USAGE_BUCKET_S, list, BATCH, &aside, text, sizeof(text)) < 0)
            fail_msg("batch %u: %s", b, text);
    }
    assert_int_equal(stat(path, &about), 0);
    assert_true(about.st_size <= 1 << 20);
    assert_int_equal(total_ns(store, NOW + (BATCHES - 1) * MOKD_USAGE_BUCKET_S), BATCH);
    struct mokd_usage_answer answer = ask(store, &(struct mokd_usage_question){ .by = MOKD_USAGE_ALL });
    assert_true(answer.kept_since_s > NOW);
    assert_true(answer.count + answer.beyond > BATCH); /* an answer has its bound as well, and says what is beyond */
    free(answer.list);
    mokd_usage_store_free(store);
}

static void what_is_no_database_is_put_aside_and_another_begun(void **state)
{
    char aside[160], word[16] = "";
    (void)state;

    FILE *file = fopen(path, "we");
    assert_non_null(file);
    for (int i = 0; i < 1000; i++)
        fputs("not a database\n", file);
    fclose(file);
    struct mokd_usage_store *store = mokd_usage_store_new(path, &limits);
    assert_true(add(store, NOW, count_of(7, "a", "host0", 9)));
    assert_int_equal(total_ns(store, 0), 9);
    mokd_usage_store_free(store);
    snprintf(aside, sizeof(aside), "%s.broken", path);
    file = fopen(aside, "re");
    assert_non_null(file);
    assert_non_null(fgets(word, 4, file));
    assert_string_equal(word, "not");
    fclose(file);
}

static void a_place_that_cannot_be_written_is_named_and_works_once_it_can(void **state)
{
    struct mokd_usage_count count = count_of(7, "a", "host0", 1);
    char text[256] = "", missing[128];
    bool aside;
    (void)state;

    snprintf(missing, sizeof(missing), "%s/later/usage.db", dir);
    struct mokd_usage_store *store = mokd_usage_store_new(missing, &limits);
    assert_int_equal(mokd_usage_store_add(store, NOW, &count, 1, &aside, text, sizeof(text)), -MOK_EIO);
    assert_non_null(strstr(text, "/later/usage.db: unable to open database file"));
    snprintf(missing, sizeof(missing), "%s/later", dir);
    assert_int_equal(mkdir(missing, 0700), 0);
    assert_false(add(store, NOW, count));
    assert_int_equal(total_ns(store, 0), 1);
    mokd_usage_store_free(store);
    char file[160];
    snprintf(file, sizeof(file), "%s/usage.db", missing);
    unlink(file);
    snprintf(file, sizeof(file), "%s/usage.db-journal", missing);
    unlink(file);
    assert_int_equal(rmdir(missing), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(counts_of_one_time_add_up_and_are_there_after_a_restart, make_dir, drop_dir),
        cmocka_unit_test(answers_are_by_user_job_or_device_and_most_time_comes_first),
        cmocka_unit_test(what_is_not_written_yet_counts_too),
        cmocka_unit_test_setup_teardown(rows_older_than_they_may_be_go, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(the_file_keeps_its_bound_and_the_oldest_rows_go, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(what_is_no_database_is_put_aside_and_another_begun, make_dir, drop_dir),
        cmocka_unit_test_setup_teardown(a_place_that_cannot_be_written_is_named_and_works_once_it_can, make_dir,
                                        drop_dir),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
