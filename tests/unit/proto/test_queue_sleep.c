/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nobody sleeps through what he waits for. Both sides sleep without any time-out here, so that a lost wake-up
 * hangs the test; each round takes random pauses at the places where one could be lost.
 */
#include "support.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/wait.h>

#include "sync.h"

#define ENTRIES 4u
#define NEAR_WRAP 0xFFFFFFF0u
#define STOP UINT64_MAX

#define ROUNDS 200000u
#define BUDGET_NS 600000000u
#define ROUNDS_AT_LEAST 1000u /* however busy the machine is */

/* Mostly none, often a few instructions, now and then the processor to somebody else. */
static void pause_at_random(uint64_t *seed)
{
    uint64_t r = next_random(seed);
    if (r % 1024 == 0)
        sched_yield();
    else if (r % 4 == 0)
        for (volatile unsigned i = 0; i < (r >> 32) % 200; i++)
            ;
}

/* ------------------------------------------------------------------ a worker as the real one */

static bool serve(struct mok_queue_worker *worker, uint64_t *seed)
{
    struct mok_sqe sqe;
    uint32_t slot;

    while (mok_queue_worker_take(worker, &sqe, &slot) == 1) {
        pause_at_random(seed);
        complete(worker, slot, 0);
        if (sqe.user_data == STOP)
            return false;
    }
    return true;
}

static void work(struct mok_queue_worker *worker, int doorbell)
{
    uint64_t seed = 3;
    struct epoll_event event = { .events = EPOLLIN | EPOLLET };
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    epoll_ctl(epoll, EPOLL_CTL_ADD, doorbell, &event);

    while (serve(worker, &seed)) {
        mok_queue_worker_arm(worker);
        mok_fence_full();
        pause_at_random(&seed);
        if (!mok_queue_worker_ready(worker))
            epoll_wait(epoll, &event, 1, -1);
        mok_queue_worker_disarm(worker);
    }
    mok_close(epoll);
}

static void *work_in_a_thread(void *argument)
{
    struct parties *p = argument;
    work(&p->worker, p->mokd.doorbell_fd);
    return NULL;
}

/* ------------------------------------------------------------------ clients */

static void wait_and_reap(struct mok_queue_client *client, uint64_t user_data)
{
    assert_int_equal(mok_queue_client_wait(client, mok_queue_client_seen(client), 0), 0);
    reap(client, user_data, 0);
}

static uint32_t one_at_a_time(struct mok_queue_client *client)
{
    uint64_t seed = 5, until = mok_now_ns() + BUDGET_NS;
    uint32_t round = 0;

    for (; round < ROUNDS && (round <= ROUNDS_AT_LEAST || round % 64 || mok_now_ns() < until); round++) {
        assert_int_equal(submit(client, round), 0);
        pause_at_random(&seed);
        wait_and_reap(client, round);
        pause_at_random(&seed);
    }
    assert_int_equal(submit(client, STOP), 0);
    wait_and_reap(client, STOP);
    return round;
}

/* Returns when every completion that has room is there, provided that more than these were submitted. */
static void wait_until_no_room(struct mok_queue_client *client)
{
    uint32_t tail = mok_load_acquire(&client->header->cq_tail);

    while (tail - client->cq_head < client->layout.cq_entries &&
           client->sq_tail - client->cq_head > client->layout.cq_entries) {
        mok_queue_client_wait(client, tail, 0);
        tail = mok_load_acquire(&client->header->cq_tail);
    }
}

/*
 * Keeps as much in the queue as goes in, and reaps one at a time and late: the worker often sleeps because there is
 * no room for another completion, and only the reaping can wake it.
 */
static uint32_t always_full(struct mok_queue_client *client)
{
    uint64_t seed = 9, until = mok_now_ns() + BUDGET_NS;
    uint64_t submitted = 0, reaped = 0;

    while (reaped < ROUNDS && (reaped <= ROUNDS_AT_LEAST || reaped % 64 || mok_now_ns() < until)) {
        while (submit(client, submitted) == 0)
            submitted++;
        wait_until_no_room(client);
        pause_at_random(&seed);
        wait_and_reap(client, reaped++);
    }
    while (reaped < submitted)
        wait_and_reap(client, reaped++);
    assert_int_equal(submit(client, STOP), 0);
    wait_and_reap(client, STOP);
    return (uint32_t)reaped;
}

/* ------------------------------------------------------------------ tests */

static void litmus_with_two_threads(uint32_t (*client)(struct mok_queue_client *))
{
    struct parties p;
    pthread_t thread;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(pthread_create(&thread, NULL, work_in_a_thread, &p), 0);
    uint32_t rounds = client(&p.client);
    pthread_join(thread, NULL);
    assert_int_equal(p.client.submit->cq_sleepers, 0);
    parties_close(&p);
    print_message("%u rounds\n", rounds);
    assert_true(rounds > ROUNDS_AT_LEAST);
}

static void report_34_two_threads_never_sleep_through_a_wake_up(void **state)
{
    (void)state;
    litmus_with_two_threads(one_at_a_time);
}

static void a_worker_that_sleeps_for_want_of_room_is_woken_by_reaping(void **state)
{
    (void)state;
    litmus_with_two_threads(always_full);
}

static void report_34_two_processes_never_sleep_through_a_wake_up(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        work(&p.worker, p.mokd.doorbell_fd);
        _exit(0);
    }
    uint32_t rounds = one_at_a_time(&p.client);
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    parties_close(&p);
    print_message("%u rounds\n", rounds);
    assert_true(rounds > ROUNDS_AT_LEAST);
}

/* ------------------------------------------------------------------ head on */

/*
 * Two threads meet at a barrier in each round and then do one step each at the same moment, so that a store that
 * is still on its way when the other side looks (the classic lost wake-up) has every chance to happen. Who was
 * early in one round is held back in the next, which keeps the two steps on top of each other.
 */
struct meeting {
    struct parties p;
    uint32_t arrived; /* counts both threads' arrivals */
    bool over;        /* told at a meeting */
    uint32_t slot;    /* of the operation that the worker is to complete */
    int32_t lean;     /* > 0: the other side waits so much longer, < 0: this side does */
    uint64_t until;   /* CLOCK_MONOTONIC, ns */
    void (*other)(struct meeting *meeting);
};

static void meet(struct meeting *m, uint32_t *arrivals)
{
    *arrivals += 2;
    __atomic_add_fetch(&m->arrived, 1, __ATOMIC_ACQ_REL);
    for (unsigned spins = 0; (int32_t)(mok_load_acquire(&m->arrived) - *arrivals) < 0; spins++)
        if (spins > 2000)
            sched_yield();
}

static void spin(uint64_t *seed, int32_t lean)
{
    for (volatile int32_t i = (int32_t)(next_random(seed) % 64) + (lean > 0 ? lean : 0); i > 0; i--)
        ;
}

#define LEAN_STEP 8
#define LEAN_MAX 8000

static void learn(struct meeting *m, bool other_was_early)
{
    if (other_was_early && m->lean < LEAN_MAX)
        m->lean += LEAN_STEP;
    else if (!other_was_early && m->lean > -LEAN_MAX)
        m->lean -= LEAN_STEP;
}

/* To the n-th processor that we may use, if there are so many: on one processor, steps cannot overlap. */
static void stay_on_processor(unsigned n)
{
    static cpu_set_t allowed; /* before anyone was pinned */
    cpu_set_t one;

    if (CPU_COUNT(&allowed) == 0 && sched_getaffinity(0, sizeof(allowed), &allowed) < 0)
        return;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed) && n-- == 0)
            CPU_SET(cpu, &one);
    if (CPU_COUNT(&one) == 1)
        pthread_setaffinity_np(pthread_self(), sizeof(one), &one);
}

static void *other_side(void *argument)
{
    struct meeting *m = argument;
    uint64_t seed = 31;
    uint32_t arrivals = 0;

    stay_on_processor(1);
    for (;;) {
        meet(m, &arrivals);
        if (m->over)
            return NULL;
        spin(&seed, m->lean);
        m->other(m);
        meet(m, &arrivals);
    }
}

static uint64_t rings(const struct parties *p)
{
    uint64_t count = 0;
    return read(p->mokd.doorbell_fd, &count, sizeof(count)) == sizeof(count) ? count : 0;
}

static void publish_one(struct meeting *m)
{
    assert_int_equal(submit(&m->p.client, 1), 0);
}

static void reap_one(struct meeting *m)
{
    struct mok_cqe cqe;
    assert_int_equal(mok_queue_client_reap(&m->p.client, &cqe), 1);
}

static void complete_one(struct meeting *m)
{
    complete(&m->p.worker, m->slot, 0);
}

static bool arm_and_look(struct meeting *m)
{
    mok_queue_worker_arm(&m->p.worker);
    mok_fence_full();
    return mok_queue_worker_ready(&m->p.worker);
}

#define HEAD_ON_ROUNDS 60000u
#define HEAD_ON_NS 700000000u

static bool another_round(const struct meeting *m, uint32_t done)
{
    return done < HEAD_ON_ROUNDS && (done % 64 || mok_now_ns() < m->until);
}

static void end_meeting(struct meeting *m, pthread_t thread, uint32_t *arrivals)
{
    m->over = true;
    meet(m, arrivals);
    pthread_join(thread, NULL);
    parties_close(&m->p);
}

static void start_meeting(struct meeting *m, pthread_t *ret_thread, void (*other)(struct meeting *))
{
    *m = (struct meeting){ .other = other, .until = mok_now_ns() + HEAD_ON_NS };
    parties_open(&m->p, ENTRIES, NEAR_WRAP);
    stay_on_processor(0);
    assert_int_equal(pthread_create(ret_thread, NULL, other_side, m), 0);
}

static void publishing_while_the_worker_lies_down_is_either_seen_or_rung(void **state)
{
    (void)state;
    struct meeting m;
    pthread_t thread;
    uint64_t seed = 33;
    uint32_t arrivals = 0, rounds = 0, lost = 0, seen = 0;

    start_meeting(&m, &thread, publish_one);
    for (; another_round(&m, rounds); rounds++) {
        mok_queue_worker_disarm(&m.p.worker);
        meet(&m, &arrivals);
        spin(&seed, -m.lean);
        bool ready = arm_and_look(&m);
        meet(&m, &arrivals);
        lost += !ready && rings(&m.p) == 0;
        seen += ready;
        learn(&m, ready);
        rings(&m.p);
        complete(&m.p.worker, take(&m.p.worker, 1), 0);
        reap(&m.p.client, 1, 0);
        rings(&m.p);
    }
    end_meeting(&m, thread, &arrivals);
    print_message("%u seen, %u rung\n", seen, rounds - seen);
    assert_int_equal(lost, 0);
}

static void reaping_while_the_worker_lies_down_for_want_of_room_is_either_seen_or_rung(void **state)
{
    (void)state;
    struct meeting m;
    pthread_t thread;
    uint64_t seed = 35;
    uint32_t arrivals = 0, rounds = 0, lost = 0, seen = 0;

    start_meeting(&m, &thread, reap_one);
    for (uint32_t i = 0; i < 2 * ENTRIES; i++) {
        assert_int_equal(submit(&m.p.client, 1), 0);
        complete(&m.p.worker, take(&m.p.worker, 1), 0);
    }
    for (; another_round(&m, rounds); rounds++) {
        mok_queue_worker_disarm(&m.p.worker);
        assert_int_equal(submit(&m.p.client, 1), 0);
        rings(&m.p);
        meet(&m, &arrivals);
        spin(&seed, -m.lean);
        bool ready = arm_and_look(&m);
        meet(&m, &arrivals);
        lost += !ready && rings(&m.p) == 0;
        seen += ready;
        learn(&m, ready);
        complete(&m.p.worker, take(&m.p.worker, 1), 0);
    }
    end_meeting(&m, thread, &arrivals);
    print_message("%u seen, %u rung\n", seen, rounds - seen);
    assert_int_equal(lost, 0);
}

/* A loss would let the client sleep for ever. */
static void completing_while_the_client_lies_down_is_either_seen_or_wakes_it(void **state)
{
    (void)state;
    struct meeting m;
    pthread_t thread;
    uint64_t seed = 37;
    uint32_t arrivals = 0, rounds = 0, seen = 0;

    start_meeting(&m, &thread, complete_one);
    for (; another_round(&m, rounds); rounds++) {
        assert_int_equal(submit(&m.p.client, 1), 0);
        m.slot = take(&m.p.worker, 1);
        uint32_t wakeups = m.p.worker.cq_wakeups;
        meet(&m, &arrivals);
        spin(&seed, -m.lean);
        assert_int_equal(mok_queue_client_wait(&m.p.client, mok_queue_client_seen(&m.p.client), 0), 0);
        meet(&m, &arrivals);
        bool woken = m.p.worker.cq_wakeups != wakeups;
        seen += !woken;
        learn(&m, !woken);
        reap(&m.p.client, 1, 0);
    }
    end_meeting(&m, thread, &arrivals);
    print_message("%u seen, %u woken\n", seen, rounds - seen);
}

/* ------------------------------------------------------------------ closing */

struct closing {
    struct parties p;
    uint32_t round; /* closes when this moves */
    bool over;
};

static void *close_each_round(void *argument)
{
    struct closing *c = argument;
    uint64_t seed = 21;

    stay_on_processor(1);
    for (uint32_t done = 0;;) {
        while (mok_load_acquire(&c->round) == done)
            sched_yield();
        if (mok_load_acquire(&c->over))
            return NULL;
        done++;
        pause_at_random(&seed);
        mok_queue_close(&c->p.mokd, -MOK_EWORKER);
    }
}

static void a_close_is_never_slept_through(void **state)
{
    (void)state;
    struct closing c = { .round = 0 };
    uint64_t seed = 23, until = mok_now_ns() + 400000000u;
    pthread_t thread;
    uint32_t rounds = 0;

    parties_open(&c.p, ENTRIES, NEAR_WRAP);
    assert_int_equal(pthread_create(&thread, NULL, close_each_round, &c), 0);
    for (; rounds <= 100 || mok_now_ns() < until; rounds++) {
        mok_store_release(&c.round, rounds + 1);
        pause_at_random(&seed);
        assert_int_equal(mok_queue_client_wait(&c.p.client, NEAR_WRAP, 0), 0);
        struct mok_cqe cqe;
        assert_int_equal(mok_queue_client_reap(&c.p.client, &cqe), -MOK_EWORKER);
        mok_store_release(&c.p.mokd.header->state, MOK_RING_OPEN);
    }
    mok_store_release(&c.over, true);
    mok_store_release(&c.round, rounds + 1);
    pthread_join(thread, NULL);
    parties_close(&c.p);
    print_message("%u rounds\n", rounds);
    assert_true(rounds > 100);
}

/* ------------------------------------------------------------------ many sleepers, time-outs, bells */

struct sleeper {
    struct mok_queue_client *client;
    pthread_t thread;
    int result;
};

static void *sleep_once(void *argument)
{
    struct sleeper *sleeper = argument;
    sleeper->result = mok_queue_client_wait(sleeper->client, NEAR_WRAP, 0);
    return NULL;
}

static void one_completion_wakes_all_who_wait_for_one(void **state)
{
    (void)state;
    struct parties p;
    struct sleeper sleepers[4];

    parties_open(&p, ENTRIES, NEAR_WRAP);
    for (size_t i = 0; i < ARRAY_SIZE(sleepers); i++) {
        sleepers[i] = (struct sleeper){ .client = &p.client, .result = 1 };
        assert_int_equal(pthread_create(&sleepers[i].thread, NULL, sleep_once, &sleepers[i]), 0);
    }
    while (mok_load_relaxed(&p.client.submit->cq_sleepers) < ARRAY_SIZE(sleepers))
        sched_yield();
    assert_int_equal(submit(&p.client, 1), 0);
    complete(&p.worker, take(&p.worker, 1), 0);
    for (size_t i = 0; i < ARRAY_SIZE(sleepers); i++) {
        pthread_join(sleepers[i].thread, NULL);
        assert_int_equal(sleepers[i].result, 0);
    }
    assert_int_equal(p.client.submit->cq_sleepers, 0);
    parties_close(&p);
}

static void a_deadline_ends_a_wait_and_not_before(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    uint64_t deadline = mok_now_ns() + 20000000u;
    assert_int_equal(mok_queue_client_wait(&p.client, NEAR_WRAP, deadline), -MOK_ETIMEDOUT);
    assert_true(mok_now_ns() >= deadline);
    assert_int_equal(p.client.submit->cq_sleepers, 0);
    assert_int_equal(mok_queue_client_wait(&p.client, NEAR_WRAP, 1), -MOK_ETIMEDOUT);
    assert_int_equal(mok_queue_client_wait(&p.client, NEAR_WRAP - 1, 0), 0);
    parties_close(&p);
}

static void the_bell_rings_only_for_a_worker_that_sleeps(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    assert_int_equal(submit(&p.client, 1), 0);
    assert_int_equal(rings(&p), 1); /* nobody has looked yet */
    mok_queue_worker_disarm(&p.worker);
    assert_int_equal(submit(&p.client, 2), 0);
    assert_int_equal(rings(&p), 0);
    mok_queue_worker_arm(&p.worker);
    assert_int_equal(submit(&p.client, 3), 0);
    assert_int_equal(rings(&p), 1);
    parties_close(&p);
}

static void reaping_rings_only_when_a_submission_waits(void **state)
{
    (void)state;
    struct parties p;

    parties_open(&p, ENTRIES, NEAR_WRAP);
    mok_queue_worker_disarm(&p.worker);
    for (uint64_t i = 0; i < 2 * ENTRIES; i++) {
        assert_int_equal(submit(&p.client, i), 0);
        complete(&p.worker, take(&p.worker, i), 0);
    }
    mok_queue_worker_arm(&p.worker);
    reap(&p.client, 0, 0);
    assert_int_equal(rings(&p), 0);
    mok_queue_worker_disarm(&p.worker);
    assert_int_equal(submit(&p.client, 100), 0);
    mok_queue_worker_arm(&p.worker);
    reap(&p.client, 1, 0);
    assert_int_equal(rings(&p), 1);
    parties_close(&p);
}

/* Every ring is an edge, also when nobody ever reads the counter. */
static void a_bell_that_nobody_reads_keeps_ringing(void **state)
{
    (void)state;
    struct parties p;
    struct epoll_event event = { .events = EPOLLIN | EPOLLET };

    parties_open(&p, ENTRIES, NEAR_WRAP);
    int epoll = epoll_create1(EPOLL_CLOEXEC);
    assert_int_equal(epoll_ctl(epoll, EPOLL_CTL_ADD, p.mokd.doorbell_fd, &event), 0);
    for (uint64_t i = 0; i < 100; i++) {
        assert_int_equal(epoll_wait(epoll, &event, 1, 0), 0);
        assert_int_equal(submit(&p.client, i), 0);
        assert_int_equal(epoll_wait(epoll, &event, 1, 0), 1);
        complete(&p.worker, take(&p.worker, i), 0);
        reap(&p.client, i, 0);
    }
    mok_close(epoll);
    parties_close(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(report_34_two_threads_never_sleep_through_a_wake_up),
        cmocka_unit_test(a_worker_that_sleeps_for_want_of_room_is_woken_by_reaping),
        cmocka_unit_test(report_34_two_processes_never_sleep_through_a_wake_up),
        cmocka_unit_test(publishing_while_the_worker_lies_down_is_either_seen_or_rung),
        cmocka_unit_test(reaping_while_the_worker_lies_down_for_want_of_room_is_either_seen_or_rung),
        cmocka_unit_test(completing_while_the_client_lies_down_is_either_seen_or_wakes_it),
        cmocka_unit_test(a_close_is_never_slept_through),
        cmocka_unit_test(one_completion_wakes_all_who_wait_for_one),
        cmocka_unit_test(a_deadline_ends_a_wait_and_not_before),
        cmocka_unit_test(the_bell_rings_only_for_a_worker_that_sleeps),
        cmocka_unit_test(reaping_rings_only_when_a_submission_waits),
        cmocka_unit_test(a_bell_that_nobody_reads_keeps_ringing),
    };
    return cmocka_run_group_tests_name("queue sleep", tests, NULL, NULL);
}
