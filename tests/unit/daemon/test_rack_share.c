/* SPDX-License-Identifier: Apache-2.0 */
/* Reports of what users have on other nodes: counted whatever a node says, and as fast as it can say it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include <cmocka.h>

#include "config.h"
#include "fake_rack.h"
#include "rack_share.h"
#include "server.h"
#include "session.h"

#define LINES 8000u

static struct mokd_config config;
static struct mokd_server server;
static struct fake_net *net;
static struct mokd_user user;

static int set_up(void **state)
{
    static const struct rack_handlers none;
    struct mokd_error error;

    (void)state;
    net = fake_net_new(1);
    server.rack = fake_net_add(net, "n0", "", &none, NULL);
    fake_net_add(net, "n1", "", &none, NULL);
    server.config = &config;
    TAILQ_INIT(&server.users);
    TAILQ_INIT(&server.pools);
    TAILQ_INIT(&server.sessions);
    TAILQ_INIT(&server.job_totals);
    user = (struct mokd_user){ .server = &server, .uid = 1000, .name = "alice" };
    assert_int_equal(uv_loop_init(&server.loop), 0);
    assert_int_equal(mokd_rack_share_start(&server, &error), 0);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mokd_rack_share_stop(&server);
    uv_run(&server.loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&server.loop), 0);
    fake_net_free(net);
    return 0;
}

static double cpu_seconds(void)
{
    struct timespec now;

    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static double cost_of(uint32_t lines)
{
    static Mok__RackUserUse line[LINES], *pointers[LINES];
    Mok__RackUse report = MOK__RACK_USE__INIT;

    for (uint32_t i = 0; i < lines; i++) {
        line[i] = (Mok__RackUserUse)MOK__RACK_USER_USE__INIT;
        line[i].uid = i;
        pointers[i] = &line[i];
    }
    report.n_user = lines;
    report.user = pointers;
    report.last = true;
    double before = cpu_seconds();
    for (int i = 0; i < 100; i++)
        mokd_rack_share_report(&server, 1, &report);
    return cpu_seconds() - before;
}

/* Sixteen times the lines cost some sixteen times as much, not 256 times: whatever the machine and the build. */
static void reports_cost_no_more_than_reading_them(void **state)
{
    (void)state;
    double few = cost_of(LINES / 16);
    assert_true(cost_of(LINES) < 64 * few);
}

static void what_a_user_has_elsewhere_is_counted_once_it_is_looked_at(void **state)
{
    uint64_t amount[MOKD_RESOURCES] = { 0 };
    Mok__RackUserUse line = MOK__RACK_USER_USE__INIT, *pointer = &line;
    Mok__RackUse report = MOK__RACK_USE__INIT;

    (void)state;
    amount[MOKD_BYTES] = 4096;
    line.uid = 1000;
    line.name = (char *)"alice";
    line.n_amount = MOKD_RESOURCES;
    line.amount = amount;
    report.n_user = 1;
    report.user = &pointer;
    report.last = true;
    mokd_rack_share_report(&server, 1, &report);
    for (int i = 0; i < 1000 && user.elsewhere[MOKD_BYTES] == 0; i++) {
        uv_run(&server.loop, UV_RUN_ONCE);
        mokd_rack_share_user(&user);
    }
    assert_int_equal(user.elsewhere[MOKD_BYTES], 4096);
    mokd_rack_share_peer_down(&server, 1);
    mokd_rack_share_user(&user);
    assert_int_equal(user.elsewhere[MOKD_BYTES], 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(reports_cost_no_more_than_reading_them, set_up, tear_down),
        cmocka_unit_test_setup_teardown(what_a_user_has_elsewhere_is_counted_once_it_is_looked_at, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
