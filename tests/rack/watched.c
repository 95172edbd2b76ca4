/* SPDX-License-Identifier: Apache-2.0 */
/* What a node of a rack serves to Prometheus and to browsers: its own name, which other nodes are there, groups that
 * form. */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "http.h"
#include "mok/mok.h"
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

/* Sits in a group whose rank 1 never comes, until it is killed. */
static pid_t wait_in_vain(const char *socket)
{
    pid_t pid = fork();

    if (pid != 0)
        return pid;
    mok_session_options so = { .size = sizeof(so), .socket_path = socket };
    mok_group_options go = { .size = sizeof(go), .name = "lonely", .ranks = 2 };
    mok_session *session;
    mok_group *group;
    if (mok_session_open(&so, &session) == 0)
        mok_group_join(session, &go, &group);
    _exit(1);
}

static void its_data_says_where_a_group_that_forms_meets(void **state)
{
    struct rack_stack rack;
    char path[64], extra[128];
    bool told = false;

    (void)state;
    snprintf(path, sizeof(path), "/tmp/mok-watched-%d.sock", (int)getpid());
    snprintf(extra, sizeof(extra), "[metrics]\nlisten = unix:%s\n", path);
    assert_int_equal(rack_stack_start(&rack, &(struct rack_stack_options){ .nodes = 1, .extra = extra }), 0);
    pid_t rank = wait_in_vain(rack.node[0].socket);
    assert_true(rank > 0);
    for (int waited = 0; waited < PATIENCE_MS && !told; waited += 20) {
        char *answer = http_get(path, "/status.json", "");
        told = answer && strstr(answer, "\"name\":\"lonely\"") &&
               strstr(answer, "\"joined\":1,\"state\":\"forming\",\"home\":\"n0\"");
        free(answer);
        sleep_ms(20);
    }
    assert_true(told);
    kill(rank, SIGKILL);
    waitpid(rank, NULL, 0);
    assert_int_equal(rack_stack_stop(&rack), 0);
    unlink(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_node_shows_which_other_nodes_it_sees_and_how_often_it_lost_them),
        cmocka_unit_test(its_data_says_where_a_group_that_forms_meets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
