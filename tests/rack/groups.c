/* SPDX-License-Identifier: Apache-2.0 */
/* Groups over several real daemons: the same bits as on one node, every way to disagree, every way to go. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "rack_stack.h"
#include "workload.h"

static const struct workload base = { .hidden = 96, .intermediate = 64, .experts = 8, .topk = 3, .ep = 4, .max_tokens = 48,
                                      .context_mode = MOK_CONTEXT_FULL, .seed = 21, .masked = 0.1f };

/* ---------------------------------------------------------------- ranks as threads */

struct rank_thread {
    pthread_t thread;
    const char *socket, *group;
    const struct workload *problem;
    uint32_t rank, device;
    int steps, late_ms;
    int code;
    char text[512];
    uint64_t hash;
};

static void *run_rank(void *argument)
{
    struct rank_thread *t = argument;
    struct workload_rank rank;

    usleep((useconds_t)t->late_ms * 1000);
    t->code = workload_open(&rank, t->problem, t->rank, 48 - 5 * t->rank, 48u * t->rank, t->socket, t->group, t->device);
    if (t->code < 0) {
        snprintf(t->text, sizeof(t->text), "%s", mok_last_error());
        return NULL;
    }
    workload_poison(&rank);
    for (int i = 0; i < t->steps && t->code == 0; i++)
        t->code = workload_step(&rank, NULL, NULL);
    if (t->code < 0)
        snprintf(t->text, sizeof(t->text), "%s", mok_last_error());
    t->hash = workload_hash(&rank);
    workload_close(&rank);
    return NULL;
}

/* Rank r at node_of[r]; nodes NULL: all on one daemon, rank r on device r. */
static void run_group(const struct rack_stack *rack, const struct stack *one, const unsigned *node_of,
                      const unsigned *device_of, const char *group, uint64_t ret_hash[4])
{
    struct rank_thread t[4];

    for (uint32_t r = 0; r < 4; r++) {
        t[r] = (struct rank_thread){ .socket = one ? one->socket : rack->node[node_of[r]].socket,
                                     .group = group,
                                     .problem = &base,
                                     .rank = r,
                                     .device = one ? r : device_of[r],
                                     .steps = 3,
                                     .late_ms = (int)((3 - r) * 5) };
        pthread_create(&t[r].thread, NULL, run_rank, &t[r]);
    }
    for (uint32_t r = 0; r < 4; r++) {
        pthread_join(t[r].thread, NULL);
        if (t[r].code < 0)
            fprintf(stderr, "%s rank %u: %s\n", group, r, t[r].text);
    }
    for (uint32_t r = 0; r < 4; r++) {
        assert_int_equal(t[r].code, 0);
        ret_hash[r] = t[r].hash;
    }
}

static void two_and_four_nodes_give_the_bits_of_one(void **state)
{
    static const unsigned two_nodes[] = { 0, 1, 0, 1 }, two_devices[] = { 0, 0, 1, 1 };
    static const unsigned four_nodes[] = { 2, 0, 3, 1 }, four_devices[] = { 0, 0, 1, 0 };
    struct stack one;
    struct rack_stack *rack = *state;
    uint64_t first[4], other[4];

    assert_int_equal(stack_start(&one, &(struct stack_options){ .devices = 4 }), 0);
    run_group(NULL, &one, NULL, NULL, "one", first);
    assert_int_equal(stack_stop(&one), 0);
    for (int round = 0; round < 3; round++) {
        run_group(rack, NULL, two_nodes, two_devices, "two", other);
        assert_memory_equal(first, other, sizeof(first));
        run_group(rack, NULL, four_nodes, four_devices, "four", other);
        assert_memory_equal(first, other, sizeof(first));
    }
}

/* ---------------------------------------------------------------- set-up */

static int set_up(void **state)
{
    static struct rack_stack rack;

    *state = &rack;
    return rack_stack_start(&rack, &(struct rack_stack_options){ .nodes = 4, .devices = 2 });
}

static int tear_down(void **state)
{
    return rack_stack_stop(*state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_and_four_nodes_give_the_bits_of_one),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
