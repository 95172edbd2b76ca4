/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What an engine takes and gives back: memory to share by descriptor, and nothing left after close.
 */
#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "check.h"
#include "harness.h"

static uint32_t entries(const char *directory)
{
    uint32_t count = 0;
    DIR *d = opendir(directory);

    assert_non_null(d);
    while (readdir(d))
        count++;
    closedir(d);
    return count;
}

static long resident_kib(void)
{
    long pages = 0, ignored;
    FILE *file = fopen("/proc/self/statm", "re");

    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld %ld", &ignored, &pages), 2);
    fclose(file);
    return pages * (sysconf(_SC_PAGESIZE) / 1024);
}

static bool only_zeros(const uint8_t *from, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if (from[i])
            return false;
    return true;
}

static void memory_is_zeroed_sized_exactly_and_shared_through_its_descriptor(void **state)
{
    static const uint64_t sizes[] = { 1, 4096, 5000, 3 << 20 };
    struct harness *h = harness_open(&(struct harness_options){ 0 });
    struct mok_message message;

    (void)state;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        uint64_t bytes = sizes[i];
        struct stat st;
        void *first, *second;
        int fd;
        assert_int_equal(h->ops->memory_alloc(h->engine[0], bytes, &fd, NULL, &message), 0);
        assert_int_equal(fstat(fd, &st), 0);
        assert_true((uint64_t)st.st_size >= bytes && (uint64_t)st.st_size < bytes + 4096);
        assert_true((uint64_t)st.st_blocks * 512 >= bytes); /* really there: no SIGBUS later */
        assert_true(fcntl(fd, F_GETFD) & FD_CLOEXEC);
        assert_int_equal(fcntl(fd, F_GET_SEALS) & (F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL),
                         F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL);
        assert_int_equal(h->ops->memory_map(h->engine[0], fd, bytes, &first, &message), 0);
        assert_int_equal(h->ops->memory_map(h->engine[0], fd, bytes, &second, &message), 0);
        close(fd);
        assert_true(only_zeros(first, bytes));
        ((uint8_t *)first)[bytes - 1] = 7;
        assert_int_equal(((uint8_t *)second)[bytes - 1], 7);
        h->ops->memory_unmap(h->engine[0], first, bytes);
        h->ops->memory_unmap(h->engine[0], second, bytes);
    }
    harness_close(h);
}

static void memory_that_cannot_be_is_refused_in_words(void **state)
{
    struct harness *h = harness_open(&(struct harness_options){ 0 });
    struct mok_message message = { { 0 } };
    struct rlimit unlimited, limit = { 1u << 30, RLIM_INFINITY };
    int fd = -77;
    void *address = &fd;

    (void)state;
    assert_true(h->ops->memory_alloc(h->engine[0], 0, &fd, NULL, &message) < 0);
    assert_true(strlen(message.text) > 0);
    /* An engine that just tries would take the machine's last page; the limit is for that case alone. */
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &unlimited), 0);
    limit.rlim_max = unlimited.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    assert_int_equal(h->ops->memory_alloc(h->engine[0], 1ull << 62, &fd, NULL, &message), -MOK_ENOMEM);
    assert_non_null(strstr(message.text, "4611686018427387904"));
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &unlimited), 0);
    assert_int_equal(fd, -77);
    message.text[0] = 0;
    assert_true(h->ops->memory_map(h->engine[0], -1, 4096, &address, &message) < 0);
    assert_true(strlen(message.text) > 0);
    assert_ptr_equal(address, &fd);
    harness_close(h);
}

static void a_mapping_larger_than_its_descriptor_is_refused(void **state)
{
    struct harness *h = harness_open(&(struct harness_options){ 0 });
    struct mok_message message = { { 0 } };
    void *address;
    int fd;

    (void)state;
    assert_int_equal(h->ops->memory_alloc(h->engine[0], 4096, &fd, NULL, &message), 0);
    assert_true(h->ops->memory_map(h->engine[0], fd, 1 << 20, &address, &message) < 0);
    close(fd);
    harness_close(h);
}

static void probe_says_how_big_the_device_is(void **state)
{
    struct mok_engine_config config = { .threads = 3 };
    struct mok_device_limits limits;
    struct mok_message message;
    const struct mok_engine_ops *ops = harness_engine();

    (void)state;
    assert_int_equal(ops->probe(&config, &limits, &message), 0);
    assert_int_equal(limits.kind, ops->kind);
    assert_true(limits.memory_bytes > 1 << 20);
    if (ops->kind == MOK_DEVICE_HOST)
        assert_int_equal(limits.units, 3);
    assert_ptr_equal(mok_engine_find(ops->kind), ops);
    assert_null(mok_engine_find(99));
}

static void a_device_without_threads_is_refused(void **state)
{
    struct mok_engine_config config = { .threads = 0 };
    struct mok_device_limits limits;
    struct mok_message message = { { 0 } };
    struct mok_engine *engine = NULL;

    (void)state;
    if (harness_engine()->kind != MOK_DEVICE_HOST)
        skip();
    assert_true(mok_host_engine.probe(&config, &limits, &message) < 0);
    assert_true(strlen(message.text) > 0);
    assert_true(mok_host_engine.open(&config, &engine, &message) < 0);
    assert_null(engine);
    mok_host_engine.close(NULL);
}

/* Runs a step in workspaces of exactly the plan's bytes between inaccessible pages, at several shapes and modes. */
static void the_plans_bytes_are_enough_and_nothing_beyond_is_touched(void **state)
{
    static const struct problem_options options[] = {
        { .hidden = 16, .intermediate = 16, .experts = 1, .topk = 1, .tokens = 1, .seed = 80 },
        { .hidden = 16, .intermediate = 144, .experts = 2, .topk = 7, .tokens = 3, .seed = 81 },
        { .hidden = 144,
          .intermediate = 16,
          .experts = 6,
          .topk = 2,
          .tokens = 129,
          .routing = ROUTE_HOT_EXPERT,
          .seed = 82 },
        { .hidden = 48,
          .intermediate = 80,
          .experts = 4,
          .topk = 3,
          .tokens = 64,
          .shared_intermediate = 112,
          .seed = 83 },
    };

    (void)state;
    for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
        for (uint32_t tiles = 0; tiles < 4; tiles++)
            for (uint32_t ep = 1; ep <= 2 && options[i].experts % ep == 0; ep++) {
                struct problem p;
                struct result got;
                struct run_options run = { .harness = { .ranks = ep, .threads = 1 + tiles % 2 },
                                           .layer = { .ring_tiles = tiles },
                                           .context_mode = tiles % 2 ? MOK_CONTEXT_RECOMPUTE : MOK_CONTEXT_FULL };
                problem_make(&p, &options[i]);
                run_problem(&p, &run, &got);
                check_against_oracle("exact bytes", &p, &got);
                result_free(&got);
                problem_free(&p);
            }
}

/* Fewer tokens than the layer allows: nothing behind the last token's row is written. */
static void fewer_tokens_than_the_layer_allows_are_fine(void **state)
{
    struct problem p;
    struct result got;

    (void)state;
    problem_make(&p, &(struct problem_options){
                         .hidden = 48, .intermediate = 32, .experts = 4, .topk = 2, .tokens = 9, .seed = 84 });
    for (uint32_t mode = MOK_CONTEXT_FULL; mode <= MOK_CONTEXT_RECOMPUTE; mode++) {
        run_problem(
            &p,
            &(struct run_options){ .harness = { .ranks = 2 }, .layer = { .max_tokens = 500 }, .context_mode = mode },
            &got);
        check_against_oracle("few tokens", &p, &got);
        result_free(&got);
    }
    problem_free(&p);
}

static void open_and_close(const struct problem *p, uint32_t threads)
{
    struct harness *h = harness_open(&(struct harness_options){ .threads = threads });
    layer_open(h, p, &(struct layer_options){ 0 });
    harness_close(h);
}

/* Threads that stay: one that has been joined may be seen for a moment longer. */
static uint32_t threads_that_stay(void)
{
    uint32_t fewest = entries("/proc/self/task");

    for (int look = 0; look < 50; look++) {
        usleep(1000);
        uint32_t now = entries("/proc/self/task");
        fewest = now < fewest ? now : fewest;
    }
    return fewest;
}

static void engines_and_layers_that_come_and_go_leave_nothing(void **state)
{
    struct problem p;

    (void)state;
    problem_make(&p, &(struct problem_options){
                         .hidden = 32, .intermediate = 16, .experts = 2, .topk = 2, .tokens = 5, .seed = 85 });
    for (int n = 0; n < 20; n++)
        open_and_close(&p, 2);
    uint32_t descriptors = entries("/proc/self/fd"), threads = threads_that_stay();
    /* The allocator may take an arena for a thread at any time and keep it; a leak grows in every round. */
    bool grows = true;
    for (int round = 0; round < 6 && grows; round++) {
        long kib = resident_kib();
        for (int n = 0; n < 200; n++)
            open_and_close(&p, 2);
        assert_int_equal(entries("/proc/self/fd"), descriptors);
        assert_int_equal(threads_that_stay(), threads);
        grows = resident_kib() - kib >= 256;
#ifdef MOK_SANITIZED /* sanitizers keep freed memory for a while, and find leaks themselves */
        grows = false;
#endif
    }
    assert_false(grows);
    problem_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_zeroed_sized_exactly_and_shared_through_its_descriptor),
        cmocka_unit_test(memory_that_cannot_be_is_refused_in_words),
        cmocka_unit_test(a_mapping_larger_than_its_descriptor_is_refused),
        cmocka_unit_test(probe_says_how_big_the_device_is),
        cmocka_unit_test(a_device_without_threads_is_refused),
        cmocka_unit_test(the_plans_bytes_are_enough_and_nothing_beyond_is_touched),
        cmocka_unit_test(fewer_tokens_than_the_layer_allows_are_fine),
        cmocka_unit_test(engines_and_layers_that_come_and_go_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
