/* SPDX-License-Identifier: Apache-2.0 */
/* What a node of a rack serves to Prometheus: its own name, and of each other node whether it is there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "http.h"
#include "rack_stack.h"

#define PATIENCE_MS 30000

static void sleep_ms(long ms)
{
    struct timespec ts = { ms / 1000, ms % 1000 * 1000000 };
    nanosleep(&ts, NULL);
}

/* -1: it is not served. */
static double sample(const char *path, const char *name)
{
    char *answer = http_get(path, "/metrics", "");
    double value = answer ? http_sample(answer, name) : -2;

    free(answer);
    return value;
}

static void expect_sample(const char *path, const char *name, double wanted)
{
    double value = -2;

    for (int waited = 0; waited < PATIENCE_MS && value != wanted; waited += 20) {
        value = sample(path, name);
        sleep_ms(20);
    }
    if (value != wanted)
        fail_msg("%s is %g, not %g", name, value, wanted);
}

static void a_node_shows_which_other_nodes_it_sees_and_how_often_it_lost_them(void **state)
{
    struct rack_stack rack;
    char path[64], extra[128];

    (void)state;
    snprintf(path, sizeof(path), "/tmp/mok-watched-%d.sock", (int)getpid());
    snprintf(extra, sizeof(extra), "[metrics]\nlisten = unix:%s\n", path);
    assert_int_equal(rack_stack_start(&rack, &(struct rack_stack_options){ .nodes = 2 }), 0);
    /* One of them is watched. */
    rack_stack_kill(&rack, 0);
    rack.options.extra = extra;
    assert_int_equal(rack_stack_boot(&rack, 0), 0);
    assert_int_equal(rack_stack_await(&rack, 0, 1), 0);

    expect_sample(path, "mok_peer_up{peer=\"n1\"}", 1);
    assert_true(sample(path, "mok_peer_up{peer=\"n0\"}") == -1); /* it is no peer of itself */
    assert_true(sample(path, "mok_node_info{node=\"n0\",link_domain=\"\"}") == 1);
    assert_true(sample(path, "mok_peer_silence_seconds{peer=\"n1\"}") < PATIENCE_MS / 1000);
    double epoch = sample(path, "mok_peer_epoch{peer=\"n1\"}");

    rack.options.extra = NULL;
    rack_stack_kill(&rack, 1);
    expect_sample(path, "mok_peer_up{peer=\"n1\"}", 0);
    assert_int_equal(rack_stack_boot(&rack, 1), 0);
    expect_sample(path, "mok_peer_up{peer=\"n1\"}", 1);
    double later = sample(path, "mok_peer_epoch{peer=\"n1\"}");
    if (later <= epoch)
        fail_msg("lost once, and its epoch went from %g to %g", epoch, later);
    assert_int_equal(rack_stack_stop(&rack), 0);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_node_shows_which_other_nodes_it_sees_and_how_often_it_lost_them),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
