/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Nodes, workers and ranks that go while operations run: the others learn who and where within twice the heartbeat
 * time-out, other groups do not notice, the job forms its group again, and nothing is left behind. MOK_TEST_CYCLES=N
 * sets how many groups come and go.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "rack_stack.h"
#include "util.h"
#include "workload.h"

static const struct workload wide = { .hidden = 96,
                                      .intermediate = 64,
                                      .experts = 6,
                                      .topk = 3,
                                      .ep = 3,
                                      .max_tokens = 48,
                                      .context_mode = MOK_CONTEXT_FULL,
                                      .seed = 22 };
static const struct workload narrow = { .hidden = 96,
                                        .intermediate = 64,
                                        .experts = 6,
                                        .topk = 3,
                                        .ep = 2,
                                        .max_tokens = 48,
                                        .context_mode = MOK_CONTEXT_FULL,
                                        .seed = 23 };

/* ---------------------------------------------------------------- ranks that step until something happens */

struct runner {
    pthread_t thread;
    const struct rack_stack *rack;
    const struct workload *problem;
    const char *group;
    uint32_t rank, node, device;
    unsigned late_ms; /* before its first step */
    int limit;        /* steps; 0: until an error, or as many as *until */
    int *until;       /* 0: not known yet; the same for all ranks of a group */
    bool begun;       /* its thread has not been joined */
    int steps, code;
    double ended_ms;
    char text[512];
    struct workload_rank state;
};

/* A test may end anywhere: who still runs then is found here, and ended before the next one. */
static struct runner runners[8];
static struct runner *const hurt = &runners[0], *const well = &runners[3], *const ranks = &runners[5];
static bool give_up;

static bool is_enough(const struct runner *r)
{
    int until = r->until ? __atomic_load_n(r->until, __ATOMIC_ACQUIRE) : 0;
    return (until && r->steps >= until) || __atomic_load_n(&give_up, __ATOMIC_ACQUIRE);
}

static void *run(void *argument)
{
    struct runner *r = argument;

    r->code = workload_open(&r->state, r->problem, r->rank, 48, 48u * r->rank, r->rack->node[r->node].socket, r->group,
                            r->device);
    usleep(r->late_ms * 1000);
    while (r->code == 0 && (!r->limit || r->steps < r->limit) && !is_enough(r)) {
        r->code = workload_step(&r->state, NULL, NULL);
        __atomic_add_fetch(&r->steps, r->code == 0, __ATOMIC_RELEASE);
    }
    r->ended_ms = stack_now_ms();
    if (r->code < 0 && r->state.session) { /* what the group itself says */
        mok_buffer *buffer;
        int code = mok_buffer_alloc_symmetric(r->state.group, 4096, 30000, &buffer);
        snprintf(r->text, sizeof(r->text), "%s: %s", mok_error_name(code), mok_last_error());
    } else if (r->code < 0) {
        snprintf(r->text, sizeof(r->text), "%s", mok_last_error());
    }
    workload_close(&r->state);
    return NULL;
}

static void begin_as(struct runner *r, struct runner as)
{
    *r = as;
    r->begun = pthread_create(&r->thread, NULL, run, r) == 0;
    assert_true(r->begun);
}

static void begin(struct runner *r, const struct rack_stack *rack, const struct workload *problem, const char *group,
                  uint32_t rank, int limit)
{
    begin_as(r, (struct runner){
                    .rack = rack, .problem = problem, .group = group, .rank = rank, .node = rank, .limit = limit });
}

static void join(struct runner *r)
{
    pthread_join(r->thread, NULL);
    r->begun = false;
}

static int steps_of(struct runner *r)
{
    return __atomic_load_n(&r->steps, __ATOMIC_ACQUIRE);
}

static void await_steps(struct runner *r, int steps)
{
    for (int waited = 0; steps_of(r) < steps; waited++) {
        if (waited > 6000)
            fail_msg("group %s rank %u makes no steps: %s", r->group, r->rank, r->text);
        usleep(10000);
    }
}

static void expect_peer(struct runner *r, const char *part, double since_ms, double bound_ms)
{
    join(r);
    if (r->code != -MOK_EPEER || !strstr(r->text, "MOK_EPEER") || !strstr(r->text, part))
        fail_msg("group %s rank %u got %d, \"%s\"; that does not say \"%s\"", r->group, r->rank, r->code, r->text,
                 part);
    if (r->ended_ms - since_ms > bound_ms)
        fail_msg("rank %u learnt it after %.0f ms, bound %.0f", r->rank, r->ended_ms - since_ms, bound_ms);
}

static void expect_well(struct runner *r)
{
    join(r);
    if (r->code != 0)
        fail_msg("group %s rank %u got %d: %s", r->group, r->rank, r->code, r->text);
}

static void form_and_step(struct rack_stack *rack, const char *group)
{
    for (uint32_t rank = 0; rank < 3; rank++)
        begin(&ranks[rank], rack, &wide, group, rank, 2);
    for (uint32_t rank = 0; rank < 3; rank++)
        expect_well(&ranks[rank]);
}

/* The bound, and what a loaded machine may add to it. */
static double bound_of(const struct rack_stack *rack)
{
    return 2.0 * rack->timeout_ms + 3000;
}

/* ---------------------------------------------------------------- daemons */

/* One group over all three nodes, and one over the first two, which must not notice. */
static int well_until;

static void set_scene(struct rack_stack *rack)
{
    well_until = 0;
    for (uint32_t rank = 0; rank < 3; rank++)
        begin(&hurt[rank], rack, &wide, "hurt", rank, 0);
    for (uint32_t rank = 0; rank < 2; rank++)
        begin_as(&well[rank], (struct runner){ .rack = rack,
                                               .problem = &narrow,
                                               .group = "well",
                                               .rank = rank,
                                               .node = rank,
                                               .device = 1,
                                               .until = &well_until });
    await_steps(&hurt[0], 3);
    await_steps(&well[0], 3);
}

static void end_scene(struct rack_stack *rack, const char *says, double since_ms)
{
    expect_peer(&hurt[0], says, since_ms, bound_of(rack));
    expect_peer(&hurt[1], says, since_ms, bound_of(rack));
    /* Neither rank is more than a step ahead of the other. */
    __atomic_store_n(&well_until, steps_of(&well[0]) + 10, __ATOMIC_RELEASE);
    expect_well(&well[0]);
    expect_well(&well[1]);
}

static void a_killed_daemon_ends_its_groups_and_comes_back(void **state)
{
    struct rack_stack *rack = *state;

    set_scene(rack);
    double since = stack_now_ms();
    rack_stack_kill(rack, 2);
    end_scene(rack, "rank 2 is gone: node n2", since);
    join(&hurt[2]);
    assert_int_equal(hurt[2].code, -MOK_EDAEMON);
    assert_int_equal(rack_stack_boot(rack, 2), 0);
    for (unsigned node = 0; node < 3; node++)
        assert_int_equal(rack_stack_await(rack, node, 2), 0);
    form_and_step(rack, "hurt");
}

static void a_daemon_that_stops_in_order_ends_its_groups_at_once(void **state)
{
    struct rack_stack *rack = *state;

    set_scene(rack);
    double since = stack_now_ms();
    assert_int_equal(stack_stop(&rack->node[2]), 0);
    end_scene(rack, "rank 2 is gone: node n2 has left: it was stopped in order", since);
    join(&hurt[2]);
    assert_int_equal(hurt[2].code, -MOK_EDAEMON);
    assert_int_equal(rack_stack_boot(rack, 2), 0);
    for (unsigned node = 0; node < 3; node++)
        assert_int_equal(rack_stack_await(rack, node, 2), 0);
    form_and_step(rack, "hurt");
}

/*
 * Rank 0 of a group whose other ranks are where its node does not get to. What its node knows of that may still be
 * news.
 */
static void expect_in_vain(const struct rack_stack *rack, unsigned node, const char *says)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = rack->node[node].socket, .job = "vain" };
    mok_group_options group = { .size = sizeof(group), .name = "vain", .ranks = 2, .timeout_ms = 50 };
    mok_session *session;
    mok_group *joined;

    assert_int_equal(mok_session_open(&options, &session), 0);
    for (unsigned tries = 0; tries < 400; tries++) {
        assert_int_equal(mok_group_join(session, &group, &joined), -MOK_ETIMEDOUT);
        if (strstr(mok_last_error(), says))
            break;
        if (tries == 399)
            fail_msg("node n%u says \"%s\", not \"%s\"", node, mok_last_error(), says);
    }
    mok_session_close(session);
}

static void a_node_that_another_removes_hears_so_at_once_and_may_come_back(void **state)
{
    static const char *const says = "node n2 was removed from the configuration of node n0";
    struct rack_stack *rack = *state;

    set_scene(rack);
    double since = stack_now_ms();
    assert_int_equal(rack_stack_reload(rack, 0, 2, 1), 0);
    expect_peer(&hurt[2], says, since, bound_of(rack));
    end_scene(rack, "has left: node n2 was removed from the configuration of node n0", since); /* who is told by which end first */
    expect_in_vain(rack, 2, "missing is rank 1; node n2 does not reach node n0 (left: ");
    expect_in_vain(rack, 0, "missing is rank 1; node n0 does not reach a node at 127.");
    expect_in_vain(rack, 0, "; node n1 has another inventory (see mokctl rack)");
    expect_in_vain(rack, 1, "missing is rank 1; node n0 has another inventory (see mokctl rack)");
    assert_int_equal(rack_stack_reload(rack, 0, 2, 0), 0);
    for (unsigned node = 0; node < 3; node++)
        assert_int_equal(rack_stack_await(rack, node, 2), 0);
    form_and_step(rack, "hurt");
}

static void a_daemon_that_stands_still_is_lost_and_learns_it_when_it_goes_on(void **state)
{
    struct rack_stack *rack = *state;

    set_scene(rack);
    double since = stack_now_ms();
    kill(rack->node[2].mokd, SIGSTOP);
    end_scene(rack, "rank 2 is gone: node n2 was lost", since);
    since = stack_now_ms();
    kill(rack->node[2].mokd, SIGCONT);
    expect_peer(&hurt[2], "rank ", since, 30000);
    for (unsigned node = 0; node < 3; node++)
        assert_int_equal(rack_stack_await(rack, node, 2), 0);
    form_and_step(rack, "hurt");
}

static void a_worker_that_dies_on_another_node_is_named_with_it(void **state)
{
    struct rack_stack *rack = *state;
    pid_t workers[2];

    for (uint32_t rank = 0; rank < 3; rank++)
        begin(&ranks[rank], rack, &wide, "worker", rank, 0);
    await_steps(&ranks[0], 3);
    assert_int_equal(stack_workers(&rack->node[1], workers, 2), 2);
    double since = stack_now_ms();
    kill(workers[0], SIGKILL);
    kill(workers[1], SIGKILL);
    expect_peer(&ranks[0], "rank 1 (node n1): the worker of device host0", since, bound_of(rack));
    expect_peer(&ranks[2], "rank 1 (node n1): the worker of device host0", since, bound_of(rack));
    join(&ranks[1]);
    assert_int_equal(ranks[1].code, -MOK_EWORKER);
    form_and_step(rack, "worker");
}

static void a_rank_that_leaves_is_named_with_its_node(void **state)
{
    struct rack_stack *rack = *state;

    for (uint32_t rank = 0; rank < 3; rank++)
        begin(&ranks[rank], rack, &wide, "left", rank, rank == 1 ? 3 : 0);
    expect_well(&ranks[1]);
    double since = stack_now_ms();
    expect_peer(&ranks[0], "rank 1 (node n1) is gone: session", since, bound_of(rack));
    expect_peer(&ranks[2], "rank 1 (node n1) is gone: session", since, bound_of(rack));
    form_and_step(rack, "left");
}

/* ---------------------------------------------------------------- a layer, and buffers that stay */

static int forward(struct workload_rank *rank)
{
    mok_ticket ticket;
    mok_result result = { 0 };
    int code = workload_forward(rank, &ticket);

    if (code == 0)
        code = mok_wait(rank->session, ticket, 20000000000, &result);
    return code < 0 ? code : result.code;
}

struct opener {
    pthread_t thread;
    struct workload_rank *rank;
    const struct rack_stack *rack;
    uint32_t index;
    int code;
};

static void *run_opener(void *argument)
{
    struct opener *o = argument;

    o->code =
        workload_open(o->rank, &narrow, o->index, 48, 48u * o->index, o->rack->node[o->index].socket, "layers", 0);
    return NULL;
}

/* The same session, weights, ids, output and context in a new group; only what is symmetric is made anew. */
static void *run_again(void *argument)
{
    struct opener *o = argument;
    struct workload_rank *r = o->rank;
    mok_group_options group = {
        .size = sizeof(group), .name = "again", .ranks = 2, .rank = o->index, .timeout_ms = 30000
    };
    mok_layer_options layer = { .size = sizeof(layer), .hidden = narrow.hidden, .intermediate = narrow.intermediate,
                                .experts = narrow.experts, .topk = narrow.topk, .max_tokens = narrow.max_tokens,
                                .precision = MOK_BF16 };
    mok_layer_params params = { .size = sizeof(params), .gate = { .buffer = r->gate }, .up = { .buffer = r->up },
                                .down = { .buffer = r->down } };
    o->code = mok_group_join(r->session, &group, &r->group);
    if (o->code == 0)
        o->code = mok_layer_create(r->group, &layer, 30000, &r->layer);
    if (o->code == 0)
        o->code = mok_layer_bind(r->layer, &params);
    if (o->code == 0)
        o->code = mok_buffer_alloc_symmetric(r->group, 48u * narrow.hidden * 2, 30000, &r->x);
    if (o->code == 0)
        o->code = forward(r);
    if (o->code < 0)
        fprintf(stderr, "rank %u: %s\n", o->index, mok_last_error());
    return NULL;
}

static void expect_opened(struct opener o[static 2])
{
    for (uint32_t i = 0; i < 2; i++)
        pthread_join(o[i].thread, NULL);
    assert_int_equal(o[0].code, 0);
    assert_int_equal(o[1].code, 0);
}

static void a_layer_destroyed_on_one_node_ends_on_the_other_and_its_memory_goes(void **state)
{
    struct rack_stack *rack = *state;
    struct workload_rank rank[2];
    struct opener o[2];
    mok_ticket ticket;
    mok_result result;
    mok_limits limits;

    for (uint32_t i = 0; i < 2; i++) {
        o[i] = (struct opener){ .rank = &rank[i], .rack = rack, .index = i };
        pthread_create(&o[i].thread, NULL, run_opener, &o[i]);
    }
    expect_opened(o);
    assert_int_equal(workload_forward(&rank[0], &ticket), 0); /* waits for rank 1 */
    assert_int_equal(mok_layer_destroy(rank[1].layer), 0);
    assert_int_equal(mok_wait(rank[0].session, ticket, 20000000000, &result), 0);
    assert_int_equal(result.code, -MOK_EPEER);
    assert_int_equal(forward(&rank[0]), -MOK_EPEER);
    assert_int_equal(mok_layer_destroy(rank[0].layer), 0);
    assert_int_equal(mok_buffer_free(rank[0].x), 0);
    assert_int_equal(mok_buffer_free(rank[1].x), 0);
    assert_int_equal(mok_group_leave(rank[1].group), 0);
    assert_int_equal(mok_group_leave(rank[0].group), 0);
    /* Private buffers are their session's, not the group's: the next group takes them as they are. */
    assert_int_equal(mok_limits_query(rank[0].session, &limits), 0);
    assert_true(limits.bytes_used > 0);
    for (uint32_t i = 0; i < 2; i++) {
        o[i].code = -1;
        pthread_create(&o[i].thread, NULL, run_again, &o[i]);
    }
    expect_opened(o);
    workload_close(&rank[0]);
    workload_close(&rank[1]);
}

/* ---------------------------------------------------------------- many times */

static void a_deadline_counts_from_when_the_rank_of_another_node_has_joined(void **state)
{
    static struct workload quick;

    quick = narrow;
    quick.timeout_ns = UINT64_C(1000000000);
    for (uint32_t rank = 0; rank < 2; rank++)
        begin_as(&ranks[rank], (struct runner){ .rack = *state,
                                                .problem = &quick,
                                                .group = "late",
                                                .rank = rank,
                                                .node = rank,
                                                .limit = 1,
                                                .late_ms = rank ? 1300 : 0 });
    for (uint32_t rank = 0; rank < 2; rank++)
        expect_well(&ranks[rank]);
}

static void hundreds_of_groups_come_and_go_without_growth(void **state)
{
    struct rack_stack *rack = *state;
    const char *asked = getenv("MOK_TEST_CYCLES");
    const int WARM = 20, CYCLES = asked ? atoi(asked) : 120;
    int descriptors[3];
    long kb[3];

    for (int cycle = 0; cycle < CYCLES; cycle++) {
        for (uint32_t rank = 0; rank < 3; rank++)
            begin(&ranks[rank], rack, &wide, "cycle", rank, 1);
        for (uint32_t rank = 0; rank < 3; rank++)
            expect_well(&ranks[rank]);
        for (unsigned node = 0; node < 3 && cycle == WARM; node++) {
            descriptors[node] = stack_descriptors(rack->node[node].mokd);
            kb[node] = stack_resident_kb(rack->node[node].mokd);
        }
    }
    for (unsigned node = 0; node < 3; node++) {
        int now = 0;
        for (int waited = 0; waited < 500; waited++) { /* sessions end after their clients are gone */
            now = stack_descriptors(rack->node[node].mokd);
            if (now <= descriptors[node])
                break;
            usleep(10000);
        }
        assert_true(now <= descriptors[node] + 4);
#ifndef MOK_SANITIZED /* which keeps what is freed */
        assert_true(stack_resident_kb(rack->node[node].mokd) <= kb[node] + 4096);
#else
        (void)kb;
#endif
    }
}

/* ---------------------------------------------------------------- set-up */

static int set_up(void **state)
{
    static struct rack_stack rack;

    *state = &rack;
    return rack_stack_start(&rack, &(struct rack_stack_options){ .nodes = 3, .devices = 2 });
}

/* Whatever a test has left, the next one finds all nodes up and nobody in a group. */
static int set_right(void **state)
{
    struct rack_stack *rack = *state;
    int code = 0;

    __atomic_store_n(&give_up, true, __ATOMIC_RELEASE);
    for (unsigned node = 0; node < 3; node++)
        if (rack->node[node].mokd > 0)
            kill(rack->node[node].mokd, SIGCONT);
    for (size_t i = 0; i < ARRAY_SIZE(runners); i++)
        if (runners[i].begun)
            join(&runners[i]);
    for (unsigned node = 0; node < 3; node++)
        if (rack->node[node].mokd <= 0)
            code |= rack_stack_boot(rack, node);
    code |= rack_stack_reload(rack, 0, 2, 0);
    for (unsigned node = 0; node < 3; node++)
        code |= rack_stack_await(rack, node, 2);
    __atomic_store_n(&give_up, false, __ATOMIC_RELEASE);
    return code;
}

static int tear_down(void **state)
{
    return rack_stack_stop(*state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(a_rank_that_leaves_is_named_with_its_node, set_right),
        cmocka_unit_test_teardown(a_worker_that_dies_on_another_node_is_named_with_it, set_right),
        cmocka_unit_test_teardown(a_layer_destroyed_on_one_node_ends_on_the_other_and_its_memory_goes, set_right),
        cmocka_unit_test_teardown(a_deadline_counts_from_when_the_rank_of_another_node_has_joined, set_right),
        cmocka_unit_test_teardown(hundreds_of_groups_come_and_go_without_growth, set_right),
        cmocka_unit_test_teardown(a_node_that_another_removes_hears_so_at_once_and_may_come_back, set_right),
        cmocka_unit_test_teardown(a_daemon_that_stands_still_is_lost_and_learns_it_when_it_goes_on, set_right),
        cmocka_unit_test_teardown(a_daemon_that_stops_in_order_ends_its_groups_at_once, set_right),
        cmocka_unit_test_teardown(a_killed_daemon_ends_its_groups_and_comes_back, set_right),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
