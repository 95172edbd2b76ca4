/* SPDX-License-Identifier: Apache-2.0 */
/* The fair share of a device, on made-up time: who gets how much, and what an idle session may keep. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "fairness.h"
#include "mok/types.h"

#define MS 1000000u
#define MAX_JOBS 8

/* A job is one session that always, or from some moment on, has the next phase ready. */
struct job {
    uint32_t uid, weight;
    uint64_t phase_ns;
    uint64_t from_ns; /* idle before this */
    uint64_t rest_ns; /* after each phase; 0: it always has the next one */
    uint64_t ready_ns, worst_wait_ns;
    struct fair_session session;
    struct fair_user spare;
    uint64_t got_ns, order;
    bool runnable;
};

struct device {
    struct fair_share share;
    struct job job[MAX_JOBS];
    size_t jobs;
    uint64_t now_ns, order;
};

static void add_of_class(struct device *device, uint32_t uid, uint32_t weight, uint64_t phase_ns, uint64_t from_ns,
                         uint32_t priority)
{
    struct job *job = &device->job[device->jobs++];

    *job = (struct job){ .uid = uid, .weight = weight, .phase_ns = phase_ns, .from_ns = from_ns };
    fair_join(&device->share, &job->session, uid, &job->spare);
    fair_weigh_user(&device->share, uid, weight, priority);
}

static void add(struct device *device, uint32_t uid, uint32_t weight, uint64_t phase_ns, uint64_t from_ns)
{
    add_of_class(device, uid, weight, phase_ns, from_ns, MOK_PRIORITY_NORMAL);
}

static struct job *next_job(struct device *device)
{
    struct job *best = NULL;

    for (size_t i = 0; i < device->jobs; i++) {
        struct job *job = &device->job[i];
        if (!job->runnable && device->now_ns >= job->from_ns) {
            job->runnable = true;
            job->order = ++device->order;
            job->ready_ns = device->now_ns > job->from_ns ? device->now_ns : job->from_ns;
            fair_wake(&device->share, &job->session);
        }
        if (job->runnable && (!best || fair_before(&job->session, job->order, &best->session, best->order)))
            best = job;
    }
    return best;
}

static void run_until(struct device *device, uint64_t end_ns)
{
    while (device->now_ns < end_ns) {
        struct job *job = next_job(device);
        if (!job) {
            device->now_ns += MS;
            continue;
        }
        fair_pick(&device->share, &job->session);
        uint64_t waited = device->now_ns - job->ready_ns;
        job->worst_wait_ns = waited > job->worst_wait_ns ? waited : job->worst_wait_ns;
        device->now_ns += job->phase_ns;
        job->got_ns += job->phase_ns;
        job->runnable = false;
        job->from_ns = device->now_ns + job->rest_ns;
        fair_charge(&job->session, job->phase_ns);
    }
}

static void assert_part(uint64_t got, uint64_t total, double part)
{
    double share = (double)got / (double)total;
    if (share < part - 0.01 || share > part + 0.01)
        fail_msg("share %.4f, want %.4f", share, part);
}

static void busy_users_of_weight_two_and_one_get_two_thirds_and_one_third(void **state)
{
    struct device device = { 0 };
    (void)state;

    add(&device, 1000, 2, 3 * MS, 0);
    add(&device, 1001, 1, 7 * MS, 0);
    run_until(&device, 10000ull * MS);
    assert_part(device.job[0].got_ns, device.now_ns, 2.0 / 3);
    assert_part(device.job[1].got_ns, device.now_ns, 1.0 / 3);
}

static void the_length_of_a_phase_gives_no_advantage(void **state)
{
    struct device device = { 0 };
    (void)state;

    add(&device, 1000, 1, 50 * MS, 0);
    add(&device, 1001, 1, MS / 10, 0);
    run_until(&device, 10000ull * MS);
    assert_part(device.job[0].got_ns, device.now_ns, 0.5);
}

static void many_sessions_of_one_user_share_that_users_part(void **state)
{
    struct device device = { 0 };
    (void)state;

    add(&device, 1000, 1, 5 * MS, 0);
    add(&device, 1000, 1, 2 * MS, 0);
    add(&device, 1000, 1, 3 * MS, 0);
    add(&device, 1001, 1, 5 * MS, 0);
    run_until(&device, 20000ull * MS);
    assert_part(device.job[3].got_ns, device.now_ns, 0.5);
    for (size_t i = 0; i < 3; i++)
        assert_part(device.job[i].got_ns, device.now_ns, 1.0 / 6);
}

static void an_idle_session_does_not_save_up_the_device(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add(&device, 1000, 1, 2 * MS, 0);
    add(&device, 1001, 1, 2 * MS, 10000ull * MS);
    run_until(&device, 10000ull * MS);
    uint64_t before = device.now_ns;
    run_until(&device, 10100ull * MS);
    /* Half of what there was, and at most what the burst lets it catch up on. */
    assert_true(device.job[1].got_ns <= (device.now_ns - before) / 2 + 20 * MS + 2 * MS);
    assert_true(device.job[1].got_ns >= (device.now_ns - before) / 2);
}

static void a_session_that_comes_late_starts_where_the_others_are(void **state)
{
    struct device device = { 0 };
    (void)state;

    add(&device, 1000, 1, 2 * MS, 0);
    run_until(&device, 5000ull * MS);
    add(&device, 1001, 1, 2 * MS, 0);
    uint64_t start = device.now_ns;
    run_until(&device, 6000ull * MS);
    assert_part(device.job[1].got_ns, device.now_ns - start, 0.5);
}

static void equal_claims_go_first_come_first_served(void **state)
{
    struct device device = { 0 };
    (void)state;

    add(&device, 1000, 1, MS, 0);
    add(&device, 1001, 1, MS, 0);
    const struct fair_session *a = &device.job[0].session, *b = &device.job[1].session;
    assert_true(fair_before(a, 1, b, 2));
    assert_false(fair_before(a, 2, b, 1));
}

static void the_last_session_of_a_user_takes_the_account_with_it(void **state)
{
    struct fair_share share = { 0 };
    struct fair_session first, second, other;
    struct fair_user spare, unused, another;
    (void)state;

    assert_true(fair_join(&share, &first, 7, &spare));
    assert_false(fair_join(&share, &second, 7, &unused));
    assert_true(fair_join(&share, &other, 8, &another));
    assert_null(fair_leave(&share, &first));
    assert_ptr_equal(fair_leave(&share, &second), &spare);
    assert_ptr_equal(share.users, &another);
    assert_null(another.next);
    assert_ptr_equal(fair_leave(&share, &other), &another);
    assert_null(share.users);
}

static void absurd_times_saturate_instead_of_wrapping(void **state)
{
    struct device device = { 0 };
    (void)state;

    add(&device, 1000, 1, MS, 0);
    add(&device, 1001, 1, MS, 0);
    fair_charge(&device.job[0].session, UINT64_MAX);
    fair_charge(&device.job[0].session, UINT64_MAX);
    assert_true(fair_before(&device.job[1].session, 2, &device.job[0].session, 1));
}

/* What a light user waits for is the phase that runs when he comes, and with his rare ones no other. */
static void a_light_user_beside_two_busy_ones_of_weight_two_and_one_waits_for_one_phase_at_most(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add(&device, 1000, 2, 3 * MS, 0);
    add(&device, 1001, 1, 5 * MS, 0);
    add(&device, 1002, 1, MS / 2, 0);
    device.job[2].from_ns = 100 * MS;
    device.job[2].rest_ns = 40 * MS + 7;
    run_until(&device, 20000ull * MS);
    uint64_t busy = device.job[0].got_ns + device.job[1].got_ns;
    assert_part(device.job[0].got_ns, busy, 2.0 / 3);
    assert_part(device.job[1].got_ns, busy, 1.0 / 3);
    assert_true(device.job[2].got_ns > 200 * MS);
    assert_true(device.job[2].worst_wait_ns <= 5 * MS);
}

static void sessions_of_one_user_share_by_their_own_weights_and_take_nothing_from_others(void **state)
{
    struct device device = { 0 };
    (void)state;

    add(&device, 1000, 1, 2 * MS, 0);
    add(&device, 1000, 1, 3 * MS, 0);
    add(&device, 1001, 1, 4 * MS, 0);
    fair_weigh_session(&device.job[0].session, 200);
    fair_weigh_session(&device.job[1].session, 100);
    run_until(&device, 20000ull * MS);
    assert_part(device.job[0].got_ns, device.now_ns, 1.0 / 3);
    assert_part(device.job[1].got_ns, device.now_ns, 1.0 / 6);
    assert_part(device.job[2].got_ns, device.now_ns, 0.5);
}

/* 1/17 and not nothing: nobody starves; whatever weight a user of a lower class has, it counts inside the class alone.
 */
static void a_class_counts_sixteen_times_the_one_below_and_starves_none(void **state)
{
    struct device device = { 0 };
    (void)state;

    add_of_class(&device, 1000, 1, 2 * MS, 0, MOK_PRIORITY_HIGH);
    add_of_class(&device, 1001, 300, 2 * MS, 0, MOK_PRIORITY_NORMAL);
    add_of_class(&device, 1002, 100, 2 * MS, 0, MOK_PRIORITY_NORMAL);
    add_of_class(&device, 1003, 1000, 2 * MS, 0, MOK_PRIORITY_LOW);
    run_until(&device, 100000ull * MS);
    assert_part(device.job[0].got_ns, device.now_ns, 256.0 / 273);
    uint64_t normal = device.job[1].got_ns + device.job[2].got_ns;
    assert_part(normal, device.now_ns, 16.0 / 273);
    assert_part(device.job[1].got_ns, normal, 0.75);
    assert_part(device.job[3].got_ns, normal + device.job[3].got_ns, 1.0 / 17);
    assert_true(device.job[3].worst_wait_ns <= 2 * 273 * 2 * MS);
}

static void a_light_user_of_a_high_class_goes_before_any_lower_one(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add_of_class(&device, 1000, 1000, 3 * MS, 0, MOK_PRIORITY_NORMAL);
    add_of_class(&device, 1001, 1000, 3 * MS, 0, MOK_PRIORITY_NORMAL);
    add_of_class(&device, 1002, 1, 5 * MS, 0, MOK_PRIORITY_HIGH);
    device.job[2].rest_ns = 10 * MS;
    run_until(&device, 20000ull * MS);
    assert_true(device.job[2].worst_wait_ns <= 3 * MS);
}

static void a_user_who_changes_class_starts_where_its_users_are(void **state)
{
    struct device device = { 0 };
    (void)state;

    add_of_class(&device, 1000, 1, 2 * MS, 0, MOK_PRIORITY_LOW);
    add(&device, 1001, 1, 2 * MS, 0);
    run_until(&device, 10000ull * MS);
    uint64_t before = device.job[0].got_ns, start = device.now_ns;
    fair_weigh_user(&device.share, 1000, 1, MOK_PRIORITY_NORMAL);
    run_until(&device, 20000ull * MS);
    assert_part(device.job[0].got_ns - before, device.now_ns - start, 0.5);
    fair_weigh_user(&device.share, 1000, 3, 77); /* no such class: the normal one */
    before = device.job[0].got_ns;
    start = device.now_ns;
    run_until(&device, 30000ull * MS);
    assert_part(device.job[0].got_ns - before, device.now_ns - start, 0.75);
    fair_weigh_user(&device.share, 4711, 1, 0); /* nobody there: nothing happens */
}

/* ------------------------------------------------------------------ what is used elsewhere */

/* Reports of another node's device time, as they come: every 200 ms. */
static void run_with_reports(struct device *device, uint32_t uid, uint64_t elsewhere_ns, uint64_t end_ns)
{
    while (device->now_ns < end_ns) {
        run_until(device, device->now_ns + 200 * (uint64_t)MS);
        fair_charge_elsewhere(&device->share, uid, elsewhere_ns, FAIR_LEAD_NS);
    }
}

static void who_has_as_much_elsewhere_leaves_a_contended_device_to_the_other(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add(&device, 1, 1, 3 * MS, 0);
    add(&device, 2, 1, 3 * MS, 0);
    run_with_reports(&device, 1, 200 * (uint64_t)MS, 10000 * (uint64_t)MS);
    assert_true(device.job[1].got_ns > device.job[0].got_ns * 19);
    /* Once it has nothing elsewhere any more, both are alike again after a second. */
    run_until(&device, device.now_ns + 1500 * (uint64_t)MS);
    device.job[0].got_ns = device.job[1].got_ns = 0;
    run_until(&device, device.now_ns + 5000 * (uint64_t)MS);
    assert_part(device.job[0].got_ns, device.job[0].got_ns + device.job[1].got_ns, 0.5);
}

/* Two devices of 1 each: who has weight 3 has 1.5 of them coming, one elsewhere and half of this one. */
static void what_is_used_elsewhere_counts_by_weight(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add(&device, 1, 3, 2 * MS, 0);
    add(&device, 2, 1, 2 * MS, 0);
    run_with_reports(&device, 1, 200 * (uint64_t)MS, 20000 * (uint64_t)MS);
    double part = (double)device.job[0].got_ns / (double)(device.job[0].got_ns + device.job[1].got_ns);
    assert_true(part > 0.45 && part < 0.55);
}

/* Two sessions of one user, of two jobs, beside another user: only the two notice what the one's job has elsewhere. */
static void a_job_that_has_as_much_elsewhere_leaves_a_contended_device_to_the_users_other_one(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add(&device, 1, 1, 3 * MS, 0);
    add(&device, 1, 1, 3 * MS, 0);
    add(&device, 2, 1, 3 * MS, 0);
    while (device.now_ns < 10000 * (uint64_t)MS) {
        run_until(&device, device.now_ns + 200 * (uint64_t)MS);
        fair_charge_session_elsewhere(&device.job[0].session, 200 * (uint64_t)MS, FAIR_LEAD_NS);
    }
    assert_true(device.job[1].got_ns > device.job[0].got_ns * 19);
    assert_part(device.job[2].got_ns, device.now_ns, 0.5);
    /* Once it has nothing elsewhere any more, both are alike again after a while. */
    run_until(&device, device.now_ns + 3000 * (uint64_t)MS);
    device.job[0].got_ns = device.job[1].got_ns = 0;
    run_until(&device, device.now_ns + 5000 * (uint64_t)MS);
    assert_part(device.job[0].got_ns, device.job[0].got_ns + device.job[1].got_ns, 0.5);
}

/* As of users: weight 3 of 1 + 1 comes to 1.5, one of them elsewhere. */
static void what_a_job_uses_elsewhere_counts_by_the_sessions_weight(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add(&device, 1, 1, 2 * MS, 0);
    add(&device, 1, 1, 2 * MS, 0);
    fair_weigh_session(&device.job[0].session, 3);
    while (device.now_ns < 20000 * (uint64_t)MS) {
        run_until(&device, device.now_ns + 200 * (uint64_t)MS);
        fair_charge_session_elsewhere(&device.job[0].session, 200 * (uint64_t)MS, FAIR_LEAD_NS);
    }
    double part = (double)device.job[0].got_ns / (double)(device.job[0].got_ns + device.job[1].got_ns);
    assert_true(part > 0.45 && part < 0.55);
}

static void use_elsewhere_costs_nothing_where_nobody_else_wants_the_device(void **state)
{
    struct device device = { .share.burst_ns = 20 * MS };
    (void)state;

    add(&device, 1, 1, 3 * MS, 0);
    run_with_reports(&device, 1, UINT64_MAX, 2000 * (uint64_t)MS);
    assert_true(device.job[0].got_ns + 10 * MS > device.now_ns);
    /* Who comes then is behind by no more than the lead, however much was used. */
    add(&device, 2, 1, 3 * MS, device.now_ns);
    device.job[0].got_ns = 0;
    run_until(&device, device.now_ns + 4000 * (uint64_t)MS);
    assert_true(device.job[0].got_ns > 1300 * (uint64_t)MS);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(busy_users_of_weight_two_and_one_get_two_thirds_and_one_third),
        cmocka_unit_test(a_light_user_beside_two_busy_ones_of_weight_two_and_one_waits_for_one_phase_at_most),
        cmocka_unit_test(sessions_of_one_user_share_by_their_own_weights_and_take_nothing_from_others),
        cmocka_unit_test(a_class_counts_sixteen_times_the_one_below_and_starves_none),
        cmocka_unit_test(a_light_user_of_a_high_class_goes_before_any_lower_one),
        cmocka_unit_test(a_user_who_changes_class_starts_where_its_users_are),
        cmocka_unit_test(the_length_of_a_phase_gives_no_advantage),
        cmocka_unit_test(many_sessions_of_one_user_share_that_users_part),
        cmocka_unit_test(an_idle_session_does_not_save_up_the_device),
        cmocka_unit_test(a_session_that_comes_late_starts_where_the_others_are),
        cmocka_unit_test(equal_claims_go_first_come_first_served),
        cmocka_unit_test(the_last_session_of_a_user_takes_the_account_with_it),
        cmocka_unit_test(who_has_as_much_elsewhere_leaves_a_contended_device_to_the_other),
        cmocka_unit_test(what_is_used_elsewhere_counts_by_weight),
        cmocka_unit_test(a_job_that_has_as_much_elsewhere_leaves_a_contended_device_to_the_users_other_one),
        cmocka_unit_test(what_a_job_uses_elsewhere_counts_by_the_sessions_weight),
        cmocka_unit_test(use_elsewhere_costs_nothing_where_nobody_else_wants_the_device),
        cmocka_unit_test(absurd_times_saturate_instead_of_wrapping),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
