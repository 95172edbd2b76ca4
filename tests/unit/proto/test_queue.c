/* SPDX-License-Identifier: Apache-2.0 */
/* The queue itself: order, bounds, wrap-around, what a hostile client can do (to itself), and closing. */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>

#include "memory.h"
#include "sync.h"

#define ENTRIES 4u
#define NEAR_WRAP 0xFFFFFFF0u

static void operations_complete_with_their_user_data_in_any_order(void **state)
{
    (void)state;
    struct parties p;
    struct mok_cqe cqe;

    parties_open(&p, ENTRIES, 0);
    for (uint64_t i = 1; i <= 3; i++)
        assert_int_equal(submit(&p.client, i), 0);
    uint32_t one = take(&p.worker, 1), two = take(&p.worker, 2), three = take(&p.worker, 3);
    assert_int_equal(mok_queue_client_reap(&p.client, &cqe), 0);
    complete(&p.worker, two, 0);
    complete(&p.worker, three, -MOK_ECANCELED);
    complete(&p.worker, one, 0);
    reap(&p.client, 2, 0);
    reap(&p.client, 3, -MOK_ECANCELED);
    reap(&p.client, 1, 0);
    assert_int_equal(mok_queue_client_reap(&p.client, &cqe), 0);
    parties_close(&p);
}

static void every_field_of_an_entry_arrives(void **state)
{
    (void)state;
    struct parties p;
    struct mok_sqe *sqe, want, got;
    struct mok_cqe sent, received;
    uint32_t slot;

    parties_open(&p, ENTRIES, 0);
    assert_int_equal(mok_queue_client_reserve(&p.client, &sqe), 0);
    for (size_t i = 0; i < sizeof(want); i++)
        assert_int_equal(((uint8_t *)sqe)[i], 0);
    for (size_t i = 0; i < sizeof(want); i++)
        ((uint8_t *)&want)[i] = (uint8_t)(i * 7 + 1);
    *sqe = want;
    mok_queue_client_publish(&p.client);
    assert_int_equal(mok_queue_worker_take(&p.worker, &got, &slot), 1);
    assert_memory_equal(&want, &got, sizeof(want));

    for (size_t i = 0; i < sizeof(sent); i++)
        ((uint8_t *)&sent)[i] = (uint8_t)(i * 5 + 3);
    mok_queue_worker_complete(&p.worker, slot, &sent);
    assert_int_equal(mok_queue_client_reap(&p.client, &received), 1);
    sent.user_data = want.user_data;
    assert_memory_equal(&sent, &received, sizeof(sent));
    parties_close(&p);
}

static void counters_that_start_anywhere_wrap_around_unnoticed(void **state)
{
    (void)state;
    const uint32_t starts[] = { 0, NEAR_WRAP, 0xFFFFFFFFu, 0x7FFFFFF8u, 0x80000000u, 3 };

    for (size_t s = 0; s < ARRAY_SIZE(starts); s++) {
        struct parties p;
        parties_open(&p, ENTRIES, starts[s]);
        assert_int_equal(p.mokd.header->initial_counter, starts[s]);
        for (uint64_t i = 0; i < 100; i++) {
            uint32_t slots[ENTRIES];
            for (uint64_t k = 0; k < ENTRIES; k++)
                assert_int_equal(submit(&p.client, 10 * i + k), 0);
            assert_int_equal(submit(&p.client, 9), -MOK_EAGAIN);
            for (uint64_t k = 0; k < ENTRIES; k++)
                slots[k] = take(&p.worker, 10 * i + k);
            for (uint64_t k = 0; k < ENTRIES; k++)
                complete(&p.worker, slots[k], 0);
            for (uint64_t k = 0; k < ENTRIES; k++)
                reap(&p.client, 10 * i + k, 0);
        }
        assert_int_equal(p.mokd.header->cq_tail, starts[s] + 100 * ENTRIES);
        parties_close(&p);
    }
}

static void a_full_queue_refuses_until_the_worker_takes(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    for (uint64_t i = 0; i < ENTRIES; i++)
        assert_int_equal(submit(&p.client, i), 0);
    assert_int_equal(submit(&p.client, 99), -MOK_EAGAIN);
    take(&p.worker, 0);
    assert_int_equal(submit(&p.client, ENTRIES), 0);
    assert_int_equal(submit(&p.client, 99), -MOK_EAGAIN);
    parties_close(&p);
}

static void reserving_twice_without_publishing_gives_the_same_entry_empty(void **state)
{
    (void)state;
    struct parties p;
    struct mok_sqe *first, *second, sqe;
    uint32_t slot;

    parties_open(&p, ENTRIES, 0);
    assert_int_equal(mok_queue_client_reserve(&p.client, &first), 0);
    first->layer = 77;
    assert_int_equal(mok_queue_worker_take(&p.worker, &sqe, &slot), 0);
    assert_int_equal(mok_queue_client_reserve(&p.client, &second), 0);
    assert_ptr_equal(first, second);
    assert_int_equal(second->layer, 0);
    parties_close(&p);
}

/* A client that never reaps gets its completions all the same, later: the worker stops taking instead. */
static void completions_are_never_dropped_however_late_the_client_reaps(void **state)
{
    (void)state;
    struct parties p;
    struct mok_sqe sqe;
    uint64_t seed = 42, submitted = 0, reaped = 0;
    uint32_t slots[2 * ENTRIES], held = 0, slot;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    for (int step = 0; step < 200000; step++) {
        switch (next_random(&seed) % 8) {
        case 0 ... 2:
            submitted += submit(&p.client, submitted) == 0;
            break;
        case 3 ... 4:
            if (mok_queue_worker_take(&p.worker, &sqe, &slot) == 1)
                slots[held++] = slot;
            assert_true(held <= 2 * ENTRIES);
            break;
        case 5 ... 6:
            if (held > 0)
                complete(&p.worker, slots[--held], 0);
            break;
        case 7: {
            struct mok_cqe cqe;
            for (int lazy = (int)(next_random(&seed) % 3); lazy-- && mok_queue_client_reap(&p.client, &cqe) == 1;)
                reaped++;
            break;
        }
        }
        assert_true(p.mokd.header->cq_tail - p.client.cq_head <= 2 * ENTRIES);
        assert_true(p.mokd.header->sq_head - p.client.cq_head <= 2 * ENTRIES);
    }
    assert_true(submitted > 10000);
    for (int quiet = 0; quiet < 3; quiet++) {
        struct mok_cqe cqe;
        while (mok_queue_client_reap(&p.client, &cqe) == 1)
            reaped++, quiet = 0;
        while (mok_queue_worker_take(&p.worker, &sqe, &slot) == 1)
            slots[held++] = slot, quiet = 0;
        while (held > 0)
            complete(&p.worker, slots[--held], 0);
    }
    assert_int_equal(submitted, reaped);
    parties_close(&p);
}

static void with_no_room_for_one_more_completion_nothing_is_taken(void **state)
{
    (void)state;
    struct parties p;
    struct mok_sqe sqe;
    uint32_t slot;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    for (uint64_t i = 0; i < 2 * ENTRIES; i++) {
        assert_int_equal(submit(&p.client, i), 0);
        complete(&p.worker, take(&p.worker, i), 0);
    }
    assert_int_equal(submit(&p.client, 100), 0);
    assert_int_equal(mok_queue_worker_take(&p.worker, &sqe, &slot), 0);
    assert_false(mok_queue_worker_ready(&p.worker));
    reap(&p.client, 0, 0);
    assert_true(mok_queue_worker_ready(&p.worker));
    take(&p.worker, 100);
    parties_close(&p);
}

/* ------------------------------------------------------------------ hostile clients */

static void assert_broken(struct parties *p, uint16_t argument, uint64_t value, uint64_t bound)
{
    struct mok_sqe sqe;
    uint32_t slot;

    assert_true(mok_queue_worker_ready(&p->worker));
    assert_int_equal(mok_queue_worker_take(&p->worker, &sqe, &slot), -MOK_ESESSION);
    assert_int_equal(p->worker.fault.argument, argument);
    assert_int_equal(p->worker.fault.value, value);
    assert_int_equal(p->worker.fault.bound, bound);
}

static void a_tail_too_far_ahead_breaks_the_queue_for_ever(void **state)
{
    (void)state;
    const uint32_t ahead[] = { ENTRIES + 1, 1000, 0x7FFFFFFFu, 0x80000000u, 0xFFFFFFFFu };

    for (size_t i = 0; i < ARRAY_SIZE(ahead); i++) {
        struct parties p;
        struct mok_sqe sqe;
        uint32_t slot;
        parties_open(&p, ENTRIES, NEAR_WRAP);
        p.client.submit->sq_tail = NEAR_WRAP + ahead[i];
        assert_broken(&p, MOK_ARG_SQ_TAIL, ahead[i], ENTRIES);
        p.client.submit->sq_tail = NEAR_WRAP;
        assert_int_equal(mok_queue_worker_take(&p.worker, &sqe, &slot), -MOK_ESESSION);
        assert_true(mok_queue_worker_ready(&p.worker));
        parties_close(&p);
    }
}

static void a_completion_head_past_the_tail_breaks_the_queue(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    p.client.submit->cq_head = NEAR_WRAP + 1;
    assert_broken(&p, MOK_ARG_CQ_HEAD, UINT32_MAX, 2 * ENTRIES);
    parties_close(&p);

    parties_open(&p, ENTRIES, NEAR_WRAP);
    p.client.submit->cq_head = NEAR_WRAP - 2 * ENTRIES - 1;
    assert_broken(&p, MOK_ARG_CQ_HEAD, 2 * ENTRIES + 1, 2 * ENTRIES);
    parties_close(&p);
}

static void a_completion_head_that_moves_back_only_starves_its_owner(void **state)
{
    (void)state;
    struct parties p;
    struct mok_sqe sqe;
    uint32_t slot;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(submit(&p.client, 1), 0);
    p.client.submit->cq_head = NEAR_WRAP - 2 * ENTRIES;
    assert_int_equal(mok_queue_worker_take(&p.worker, &sqe, &slot), 0);
    p.client.submit->cq_head = NEAR_WRAP;
    take(&p.worker, 1);
    parties_close(&p);
}

static void a_broken_queue_harms_no_other(void **state)
{
    (void)state;
    struct parties bad, good;

    parties_open(&bad, ENTRIES, 0);
    parties_open(&good, ENTRIES, 0);
    bad.client.submit->sq_tail = 12345;
    assert_broken(&bad, MOK_ARG_SQ_TAIL, 12345, ENTRIES);
    mok_queue_worker_close(&bad.worker, -MOK_ESESSION);
    assert_int_equal(submit(&bad.client, 1), -MOK_ESESSION);
    assert_int_equal(submit(&good.client, 1), 0);
    complete(&good.worker, take(&good.worker, 1), 0);
    reap(&good.client, 1, 0);
    parties_close(&bad);
    parties_close(&good);
}

static int stop;

static void *scribble(void *argument)
{
    struct parties *p = argument;
    uint64_t *words = (uint64_t *)(void *)p->client.submit;
    uint64_t seed = 7;

    while (!mok_load_relaxed(&stop)) {
        uint64_t r = next_random(&seed);
        if (r % 256 == 0)
            sched_yield(); /* where both share a processor */
        mok_store_relaxed(&words[(r >> 8) % (p->client.layout.submit_bytes / 8)], r);
        if (r % 4 == 0) /* plausible counters, to get past the checks */
            mok_store_relaxed(&p->client.submit->sq_tail,
                              mok_load_relaxed(&p->client.header->sq_head) + (uint32_t)(r >> 60) % 5);
        if (r % 4 == 1)
            mok_store_relaxed(&p->client.submit->cq_head, mok_load_relaxed(&p->client.header->cq_tail));
    }
    return NULL;
}

/* What was copied is what was noted: nothing is fetched from the client's memory a second time. */
static void a_client_that_scribbles_while_the_worker_takes_gets_what_it_deserves_and_no_more(void **state)
{
    (void)state;
    struct parties p;
    pthread_t thread;
    uint64_t taken = 0, rounds = 0;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    mok_store_relaxed(&stop, 0);
    assert_int_equal(pthread_create(&thread, NULL, scribble, &p), 0);
    /* As many as prove something, however busy the machine is. */
    for (uint64_t until = mok_now_ns() + 30000000000u; taken < 2000 && mok_now_ns() < until; rounds++) {
        struct mok_sqe sqe;
        uint32_t slot;
        int r = mok_queue_worker_take(&p.worker, &sqe, &slot);
        if (r == 1) {
            assert_true(slot < 2 * ENTRIES);
            assert_int_equal(p.worker.inflight[slot].user_data, sqe.user_data);
            assert_int_equal(p.worker.inflight[slot].opcode, sqe.opcode);
            complete(&p.worker, slot, 0);
            taken++;
        } else {
            sched_yield();
        }
        p.worker.fault.argument = MOK_ARG_NONE; /* keep going where a worker would have closed */
        mok_queue_worker_ready(&p.worker);
    }
    mok_store_relaxed(&stop, 1);
    pthread_join(thread, NULL);
    assert_true(taken == 2000 && rounds > taken);
    parties_close(&p);
}

static void a_client_cannot_pull_its_memory_from_under_the_worker(void **state)
{
    (void)state;
    struct parties p;
    struct mok_sqe sqe;
    uint32_t slot;

    parties_open(&p, ENTRIES, 0);
    assert_int_equal(submit(&p.client, 1), 0);
    assert_int_equal(ftruncate(p.mokd.submit_fd, 0), -1);
    /* A hole reads as zeros, which are counters like any other. */
    assert_int_equal(
        fallocate(p.mokd.submit_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)p.mokd.layout.submit_bytes),
        0);
    assert_int_equal(mok_queue_worker_take(&p.worker, &sqe, &slot), 0);
    parties_close(&p);
}

/* ------------------------------------------------------------------ rights */

static void the_client_can_only_read_the_control_page(void **state)
{
    (void)state;
    struct parties p;
    struct mok_queue_worker another;

    parties_open(&p, ENTRIES, 0);
    assert_ptr_equal(mmap(NULL, MOK_MEMORY_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, p.mokd.control_fd, 0), MAP_FAILED);
    assert_int_equal(mprotect((void *)p.client.header, MOK_MEMORY_PAGE, PROT_READ | PROT_WRITE), -1);
    assert_true(pwrite(p.mokd.control_fd, "x", 1, 0) < 0);
    assert_int_equal(mok_queue_worker_open(p.mokd.control_fd, p.mokd.submit_fd, p.mokd.inflight_fd, &another),
                     -MOK_EACCESS);
    parties_close(&p);
}

static void the_worker_maps_the_clients_memory_for_reading_only(void **state)
{
    (void)state;
    struct parties p;
    char line[512];
    bool found = false;

    parties_open(&p, ENTRIES, 0);
    FILE *maps = fopen("/proc/self/maps", "re");
    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps)) {
        unsigned long long start;
        char rights[8];
        if (sscanf(line, "%llx-%*x %7s", &start, rights) == 2 && start == (uintptr_t)p.worker.submit) {
            assert_string_equal(rights, "r--s");
            found = true;
        }
    }
    fclose(maps);
    assert_true(found);
    parties_close(&p);
}

static void descriptors_in_the_wrong_order_or_too_small_are_refused(void **state)
{
    (void)state;
    struct mok_queue small, large;
    struct mok_queue_worker worker;
    struct mok_queue_client client;

    assert_int_equal(mok_queue_create(ENTRIES, 0, &small), 0);
    assert_int_equal(mok_queue_create(1024, 0, &large), 0);
    assert_int_equal(mok_queue_worker_open(small.submit_fd, small.control_fd, small.inflight_fd, &worker), -MOK_EPROTO);
    assert_int_equal(mok_queue_worker_open(large.control_fd, small.submit_fd, large.inflight_fd, &worker), -MOK_ESIZE);
    assert_int_equal(mok_queue_worker_open(large.control_fd, large.submit_fd, small.inflight_fd, &worker), -MOK_ESIZE);
    assert_int_equal(mok_queue_client_open(large.control_fd, small.submit_fd, large.doorbell_fd, &client), -MOK_ESIZE);
    assert_int_equal(mok_queue_client_open(small.submit_fd, small.control_fd, small.doorbell_fd, &client), -MOK_EPROTO);
    large.header->abi_version++;
    assert_int_equal(mok_queue_client_open(large.control_fd, large.submit_fd, large.doorbell_fd, &client),
                     -MOK_EVERSION);
    large.header->abi_version--;
    large.header->cqe_bytes++;
    assert_int_equal(mok_queue_client_open(large.control_fd, large.submit_fd, large.doorbell_fd, &client), -MOK_EPROTO);
    mok_queue_destroy(&small);
    mok_queue_destroy(&large);
    mok_queue_destroy(&large);
}

static void a_client_ignores_features_that_it_does_not_know(void **state)
{
    (void)state;
    struct mok_queue mokd;
    struct mok_queue_client client;

    assert_int_equal(mok_queue_create(ENTRIES, 0, &mokd), 0);
    mokd.header->features = UINT32_MAX;
    assert_int_equal(mok_queue_client_open(mokd.control_fd, mokd.submit_fd, mokd.doorbell_fd, &client), 0);
    mok_queue_client_release(&client);
    mok_queue_client_release(&client);
    mok_queue_destroy(&mokd);
}

/* ------------------------------------------------------------------ closing, life */

static void a_closed_queue_gives_what_it_has_and_then_its_code(void **state)
{
    (void)state;
    struct parties p;
    struct mok_cqe cqe;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(submit(&p.client, 1), 0);
    assert_int_equal(submit(&p.client, 2), 0);
    complete(&p.worker, take(&p.worker, 1), 0);
    mok_queue_worker_close(&p.worker, -MOK_EDAEMON);
    assert_int_equal(submit(&p.client, 3), -MOK_EDAEMON);
    assert_int_equal(mok_queue_client_wait(&p.client, mok_queue_client_seen(&p.client), 0), 0);
    reap(&p.client, 1, 0);
    assert_int_equal(mok_queue_client_reap(&p.client, &cqe), -MOK_EDAEMON);
    assert_int_equal(mok_queue_client_wait(&p.client, mok_queue_client_seen(&p.client), 0), 0);
    parties_close(&p);
}

static void a_thousand_queues_leave_nothing_behind(void **state)
{
    (void)state;
    size_t before = count_fds();

    for (int i = 0; i < 1000; i++) {
        struct parties p;
        parties_open(&p, ENTRIES, 0);
        parties_close(&p);
    }
    assert_int_equal(count_fds(), before);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations_complete_with_their_user_data_in_any_order),
        cmocka_unit_test(every_field_of_an_entry_arrives),
        cmocka_unit_test(counters_that_start_anywhere_wrap_around_unnoticed),
        cmocka_unit_test(a_full_queue_refuses_until_the_worker_takes),
        cmocka_unit_test(reserving_twice_without_publishing_gives_the_same_entry_empty),
        cmocka_unit_test(completions_are_never_dropped_however_late_the_client_reaps),
        cmocka_unit_test(with_no_room_for_one_more_completion_nothing_is_taken),
        cmocka_unit_test(a_tail_too_far_ahead_breaks_the_queue_for_ever),
        cmocka_unit_test(a_completion_head_past_the_tail_breaks_the_queue),
        cmocka_unit_test(a_completion_head_that_moves_back_only_starves_its_owner),
        cmocka_unit_test(a_broken_queue_harms_no_other),
        cmocka_unit_test(a_client_that_scribbles_while_the_worker_takes_gets_what_it_deserves_and_no_more),
        cmocka_unit_test(a_client_cannot_pull_its_memory_from_under_the_worker),
        cmocka_unit_test(the_client_can_only_read_the_control_page),
        cmocka_unit_test(the_worker_maps_the_clients_memory_for_reading_only),
        cmocka_unit_test(descriptors_in_the_wrong_order_or_too_small_are_refused),
        cmocka_unit_test(a_client_ignores_features_that_it_does_not_know),
        cmocka_unit_test(a_closed_queue_gives_what_it_has_and_then_its_code),
        cmocka_unit_test(a_thousand_queues_leave_nothing_behind),
    };
    return cmocka_run_group_tests_name("queue", tests, NULL, NULL);
}
