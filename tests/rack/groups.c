/* SPDX-License-Identifier: Apache-2.0 */
/* Groups over several real daemons: the same bits as on one node, every way to disagree, every way to go. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "rack_stack.h"
#include "workload.h"

static const struct workload base = { .hidden = 96,
                                      .intermediate = 64,
                                      .experts = 8,
                                      .topk = 3,
                                      .ep = 4,
                                      .max_tokens = 48,
                                      .context_mode = MOK_CONTEXT_FULL,
                                      .seed = 21,
                                      .masked = 0.1f };

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
    t->code =
        workload_open(&rank, t->problem, t->rank, 48 - 5 * t->rank, 48u * t->rank, t->socket, t->group, t->device);
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

/* ---------------------------------------------------------------- small conversations */

struct seat {
    mok_session *session;
    mok_group *group;
};

static int sit(struct seat *seat, const char *socket)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = socket, .job = "seat" };

    *seat = (struct seat){ 0 };
    return mok_session_open(&options, &seat->session);
}

struct joiner {
    pthread_t thread;
    struct seat *seat;
    mok_group_options options;
    int code;
    char text[512];
    bool ended;
};

static void *run_joiner(void *argument)
{
    struct joiner *j = argument;

    j->code = mok_group_join(j->seat->session, &j->options, &j->seat->group);
    snprintf(j->text, sizeof(j->text), "%s", j->code < 0 ? mok_last_error() : "");
    __atomic_store_n(&j->ended, true, __ATOMIC_RELEASE);
    return NULL;
}

static bool ends_within(const struct joiner *j, double ms)
{
    double until = stack_now_ms() + ms;

    while (!__atomic_load_n(&j->ended, __ATOMIC_ACQUIRE) && stack_now_ms() < until)
        usleep(1000);
    return __atomic_load_n(&j->ended, __ATOMIC_ACQUIRE);
}

static void begin_join(struct joiner *j, struct seat *seat, const char *group, uint32_t ranks, uint32_t rank,
                       uint32_t device, uint64_t timeout_ms)
{
    *j = (struct joiner){ .seat = seat };
    j->options = (mok_group_options){ .size = sizeof(j->options),
                                      .name = group,
                                      .ranks = ranks,
                                      .rank = rank,
                                      .device = device,
                                      .timeout_ms = timeout_ms };
    pthread_create(&j->thread, NULL, run_joiner, j);
}

/* Says one of two things. */
static void end_join_as(struct joiner *j, int code, const char *part, const char *or_part)
{
    pthread_join(j->thread, NULL);
    if (j->code != code || (!strstr(j->text, part) && !strstr(j->text, or_part)))
        fail_msg("rank %u got %d, \"%s\"; that is not %d, \"%s\"", j->options.rank, j->code, j->text, code, part);
}

static void end_join(struct joiner *j, int code, const char *part)
{
    end_join_as(j, code, part, part);
}

/* Rank r on node r, device 0. */
static void form(struct rack_stack *rack, struct seat *seats, uint32_t ranks, const char *group)
{
    struct joiner j[RACK_STACK_MAX];

    for (uint32_t r = 0; r < ranks; r++) {
        assert_int_equal(sit(&seats[r], rack->node[r].socket), 0);
        begin_join(&j[r], &seats[r], group, ranks, r, 0, 30000);
    }
    for (uint32_t r = 0; r < ranks; r++)
        end_join(&j[r], 0, "");
}

static void leave_all(struct seat *seats, uint32_t ranks)
{
    for (uint32_t r = 0; r < ranks; r++) {
        mok_session_close(seats[r].session);
        seats[r].session = NULL;
    }
}

/* ---------------------------------------------------------------- those who do not go together */

static void ranks_that_do_not_fit_are_refused_with_names_of_ranks_and_nodes(void **state)
{
    struct rack_stack *rack = *state;
    struct seat seats[3];
    struct joiner j[3];

    for (uint32_t r = 0; r < 3; r++)
        assert_int_equal(sit(&seats[r], rack->node[r].socket), 0);
    begin_join(&j[0], &seats[0], "misfit", 2, 0, 0, 30000);
    begin_join(&j[1], &seats[1], "misfit", 3, 1, 0, 30000);
    for (uint32_t r = 0; r < 2; r++) /* whoever came second */
        end_join_as(&j[r], -MOK_EMISMATCH, "rank 1 (node n1) says that the size is 3, rank 0 (node n0) said 2",
                    "rank 0 (node n0) says that the size is 2, rank 1 (node n1) said 3");

    begin_join(&j[0], &seats[0], "misfit", 2, 0, 0, 30000);
    begin_join(&j[2], &seats[2], "misfit", 2, 0, 0, 30000);
    while (!ends_within(&j[0], 5) && !ends_within(&j[2], 5))
        ;
    uint32_t second = ends_within(&j[0], 0) ? 0 : 2, first = 2 - second;
    end_join(&j[second], -MOK_ERANK, "rank = 0: taken in group misfit by session");
    begin_join(&j[1], &seats[1], "misfit", 2, 1, 0, 30000);
    end_join(&j[1], 0, "");
    end_join(&j[first], 0, "");
    begin_join(&j[second], &seats[second], "misfit", 2, 1, 0, 30000); /* on a node that has no rank of it */
    end_join(&j[second], -MOK_ERANK, "rank = 1: taken in group misfit by session");

    mok_session_close(seats[first].session); /* the group is over: its name is free, and rank 0 another's */
    assert_int_equal(sit(&seats[first], rack->node[first].socket), 0);
    assert_int_equal(mok_group_leave(seats[1].group), 0);
    begin_join(&j[1], &seats[1], "misfit", 2, 1, 0, 30000);
    begin_join(&j[second], &seats[second], "misfit", 2, 0, 0, 30000);
    end_join(&j[1], 0, "");
    end_join(&j[second], 0, "");
    leave_all(seats, 3);
}

/* Ranks 0 and 1 have come, on the nodes of these numbers: the home knows of both, the others of their own. */
static void expect_view(struct rack_stack *rack, unsigned at, unsigned home, const char *name)
{
    struct rack_stack_forming seen;
    char home_name[16];

    if (rack_stack_forming(rack, at, name, &seen) < 0) {
        assert_in_range(at, 2, rack->nodes - 1);
        assert_int_not_equal(at, home);
        return;
    }
    snprintf(home_name, sizeof(home_name), "n%u", home);
    assert_string_equal(seen.home, home_name);
    assert_int_equal(seen.partial, at != home);
    assert_int_equal(seen.joined, at == home ? 2 : 1);
}

/* The node where `joined` ranks have come together, once they have. */
static unsigned find_home(struct rack_stack *rack, const char *name, uint32_t joined)
{
    struct rack_stack_forming seen;

    for (int tries = 0; tries < 3000; tries++) {
        for (unsigned node = 0; node < rack->nodes; node++)
            if (rack_stack_forming(rack, node, name, &seen) == 0 && !seen.partial && seen.joined == joined)
                return node;
        usleep(10000);
    }
    fail_msg("no node shows %u ranks of group %s", joined, name);
    return 0;
}

static unsigned look_at_a_group_that_forms(struct rack_stack *rack, const char *name)
{
    struct rack_stack_forming seen;
    struct seat seats[3];
    struct joiner j[3];

    for (uint32_t r = 0; r < 3; r++)
        assert_int_equal(sit(&seats[r], rack->node[r].socket), 0);
    for (uint32_t r = 0; r < 2; r++)
        begin_join(&j[r], &seats[r], name, 3, r, 0, 60000);
    unsigned home = find_home(rack, name, 2);
    for (unsigned at = 0; at < rack->nodes; at++)
        expect_view(rack, at, home, name);
    begin_join(&j[2], &seats[2], name, 3, 2, 0, 60000);
    for (uint32_t r = 0; r < 3; r++)
        end_join(&j[r], 0, "");
    for (unsigned at = 0; at < rack->nodes; at++)
        assert_int_equal(rack_stack_forming(rack, at, name, &seen), -1);
    leave_all(seats, 3);
    return home;
}

static void a_group_that_forms_is_shown_whole_at_its_home_and_as_a_part_elsewhere(void **state)
{
    bool with_ranks = false, without_ranks = false;
    char name[16];

    for (unsigned i = 0; i < 64 && !(with_ranks && without_ranks); i++) {
        snprintf(name, sizeof(name), "forms-%u", i);
        unsigned home = look_at_a_group_that_forms(*state, name);
        with_ranks |= home < 2;
        without_ranks |= home >= 2;
    }
    assert_true(with_ranks && without_ranks);
}

/* Rank 1 is turned away, again and again: rank 0 may come to wait for it only now. */
static void end_join_of_who_waits(struct joiner *waits, struct joiner *other, struct seat *seat)
{
    for (int tries = 0; !ends_within(waits, 500); tries++) {
        assert_true(tries < 60);
        begin_join(other, seat, waits->options.name, waits->options.ranks, 1, 0, 60000);
        end_join(other, -MOK_EDRAIN, "host0 is being drained");
    }
    end_join(waits, -MOK_EDRAIN, "rank 1 (node n1): device = 0: host0 is being drained");
}

/* Whoever comes first: those who wait for a rank on a node that drains are told, and wait for it no longer. */
static void ranks_that_wait_for_one_on_a_node_that_drains_are_told(void **state)
{
    struct rack_stack *rack = *state;
    struct seat seats[2];
    struct joiner j[2];

    for (uint32_t r = 0; r < 2; r++)
        assert_int_equal(sit(&seats[r], rack->node[r].socket), 0);
    begin_join(&j[0], &seats[0], "drained", 3, 0, 0, 60000);
    begin_join(&j[1], &seats[1], "drained", 3, 1, 0, 60000);
    find_home(rack, "drained", 2);
    assert_int_equal(rack_stack_drain(rack, 2, 1, false), 0);
    end_join(&j[1], -MOK_EDRAIN, "host0 is being drained");
    end_join_of_who_waits(&j[0], &j[1], &seats[1]);
    begin_join(&j[0], &seats[0], "drained", 2, 0, 0, 60000);
    find_home(rack, "drained", 1);
    begin_join(&j[1], &seats[1], "drained", 2, 1, 0, 60000);
    end_join(&j[1], -MOK_EDRAIN, "host0 is being drained");
    end_join_of_who_waits(&j[0], &j[1], &seats[1]);
    assert_int_equal(rack_stack_drain(rack, 0, 1, true), 0);
    begin_join(&j[0], &seats[0], "drained", 2, 0, 0, 60000);
    begin_join(&j[1], &seats[1], "drained", 2, 1, 0, 60000);
    end_join(&j[0], 0, "");
    end_join(&j[1], 0, "");
    leave_all(seats, 2);
}

struct maker {
    pthread_t thread;
    mok_group *group;
    mok_layer_options options;
    mok_layer *layer;
    uint64_t timeout_ms;
    int code;
    char text[512];
};

static void *run_maker(void *argument)
{
    struct maker *m = argument;

    m->code = mok_layer_create(m->group, &m->options, m->timeout_ms, &m->layer);
    snprintf(m->text, sizeof(m->text), "%s", m->code < 0 ? mok_last_error() : "");
    return NULL;
}

static void begin_make(struct maker *m, mok_group *group, uint32_t hidden, uint64_t timeout_ms)
{
    *m = (struct maker){ .group = group, .timeout_ms = timeout_ms };
    m->options = (mok_layer_options){ .size = sizeof(m->options),
                                      .hidden = hidden,
                                      .intermediate = 32,
                                      .experts = 6,
                                      .topk = 2,
                                      .max_tokens = 16,
                                      .precision = MOK_BF16 };
    pthread_create(&m->thread, NULL, run_maker, m);
}

static void end_make(struct maker *m, int code, const char *part)
{
    pthread_join(m->thread, NULL);
    if (m->code != code || !strstr(m->text, part))
        fail_msg("got %d, \"%s\"; that is not %d, \"%s\"", m->code, m->text, code, part);
}

static void a_layer_on_which_ranks_differ_is_made_nowhere_and_the_next_one_is(void **state)
{
    struct rack_stack *rack = *state;
    struct seat seats[3];
    struct maker m[3];

    form(rack, seats, 3, "differ");
    for (uint32_t r = 0; r < 3; r++)
        begin_make(&m[r], seats[r].group, r == 2 ? 128 : 64, 30000);
    for (uint32_t r = 0; r < 3; r++)
        end_make(&m[r], -MOK_EMISMATCH, "ranks 0 (node n0) and 2 (node n2) differ on hidden: 64 and 128");
    begin_make(&m[0], seats[0].group, 64, 300); /* the others do not come */
    end_make(&m[0], -MOK_ETIMEDOUT, "no call came from rank 1, 2");
    begin_make(&m[1], seats[1].group, 64, 30000);
    begin_make(&m[2], seats[2].group, 64, 30000);
    end_make(&m[1], -MOK_ETIMEDOUT, "rank 0 of group differ waited 300 ms");
    end_make(&m[2], -MOK_ETIMEDOUT, "rank 0 of group differ waited 300 ms");
    for (uint32_t r = 0; r < 3; r++)
        begin_make(&m[r], seats[r].group, 64, 30000);
    for (uint32_t r = 0; r < 3; r++)
        end_make(&m[r], 0, "");
    leave_all(seats, 3);
}

#define LIMIT_OF_LAST (64u << 20)

struct allocator {
    pthread_t thread;
    mok_group *group;
    uint64_t bytes;
    mok_buffer *buffer;
    int code;
    char text[512];
};

static void *run_allocator(void *argument)
{
    struct allocator *a = argument;

    a->code = mok_buffer_alloc_symmetric(a->group, a->bytes, 30000, &a->buffer);
    snprintf(a->text, sizeof(a->text), "%s", a->code < 0 ? mok_last_error() : "");
    return NULL;
}

static void allocate(struct seat *seats, uint32_t ranks, uint64_t bytes, int code, const char *part,
                     mok_buffer **ret_buffers)
{
    struct allocator a[RACK_STACK_MAX];

    for (uint32_t r = 0; r < ranks; r++) {
        a[r] = (struct allocator){ .group = seats[r].group, .bytes = bytes };
        pthread_create(&a[r].thread, NULL, run_allocator, &a[r]);
    }
    for (uint32_t r = 0; r < ranks; r++) {
        pthread_join(a[r].thread, NULL);
        if (a[r].code != code || !strstr(a[r].text, part))
            fail_msg("rank %u got %d, \"%s\"; that is not %d, \"%s\"", r, a[r].code, a[r].text, code, part);
        if (ret_buffers)
            ret_buffers[r] = a[r].buffer;
    }
}

static void memory_that_one_node_does_not_give_is_given_nowhere(void **state)
{
    struct rack_stack *rack = *state;
    struct seat seats[2];
    mok_buffer *buffers[2];

    form(rack, seats, 2, "poor");
    allocate(seats, 2, 16ull << 30, -MOK_ENOMEM, "node n", NULL);
    allocate(seats, 2, 1 << 20, 0, "", buffers);
    assert_int_equal(mok_buffer_free(buffers[1]), 0);
    assert_int_equal(mok_buffer_free(buffers[0]), 0);
    leave_all(seats, 2);
}

/* The other node waits for handles that do not come, or still fills its part, when it hears of it. */
static void memory_beyond_the_limit_of_one_node_is_refused_on_all_at_once(void **state)
{
    struct rack_stack *rack = *state;
    struct seat seats[4];

    form(rack, seats, 4, "limited");
    double since = stack_now_ms();
    for (uint64_t bytes = LIMIT_OF_LAST + 4096; bytes <= 2 * LIMIT_OF_LAST; bytes += LIMIT_OF_LAST - 4096)
        allocate(seats, 4, bytes, -MOK_EQUOTA, "node n3: ", NULL);
    assert_true(stack_now_ms() - since < 20000); /* a call waits for 30 s */
    leave_all(seats, 4);
}

/* So little memory is there at once: some nodes hand theirs over before they hear that the call is over. */
static void handles_that_come_late_are_not_kept(void **state)
{
    struct rack_stack *rack = *state;
    struct seat seats[4];
    mok_buffer *buffers[4];
    int before[4];

    form(rack, seats, 4, "late");
    allocate(seats, 4, LIMIT_OF_LAST - (384 << 10), 0, "", buffers);
    for (uint32_t node = 0; node < 4; node++)
        before[node] = stack_descriptors(rack->node[node].mokd);
    for (int i = 0; i < 60; i++)
        allocate(seats, 4, 1 << 19, -MOK_EQUOTA, "node n3: ", NULL);
    for (uint32_t node = 0; node < 4; node++) {
        int now = stack_descriptors(rack->node[node].mokd);
        for (int waited = 0; waited < 5000 && now > before[node] + 4; waited += 10) {
            usleep(10000); /* the last ones may be on their way */
            now = stack_descriptors(rack->node[node].mokd);
        }
        if (now > before[node] + 4)
            fail_msg("node n%u has %d descriptors, not %d", node, now, before[node]);
    }
    leave_all(seats, 4);
}

#ifdef MOK_SANITIZED
enum { RACE_MS = 2500 };
#else
enum { RACE_MS = 1200 };
#endif

/* Whoever comes second for a rank is refused, or waits with his own time-out, whatever the others are at. */
static void ranks_that_race_for_a_place_end_all(void **state)
{
    struct rack_stack *rack = *state;

    for (uint32_t round = 0; round < 4; round++) {
        static const struct {
            uint32_t node, rank, device;
        } who[] = { { 0, 0, 0 }, { 0, 1, 1 }, { 1, 0, 0 } };
        struct seat seats[3];
        struct joiner j[3];
        char group[32];
        double since = stack_now_ms();

        snprintf(group, sizeof(group), "race%u", round);
        for (uint32_t r = 0; r < 3; r++)
            assert_int_equal(sit(&seats[r], rack->node[who[r].node].socket), 0);
        for (uint32_t r = 0; r < 3; r++)
            begin_join(&j[r], &seats[r], group, 2, (who[r].rank + round % 2 * r / 2) % 2, who[r].device, RACE_MS);
        for (uint32_t r = 0; r < 3; r++)
            pthread_join(j[r].thread, NULL);
        if ((j[0].code == 0) + (j[1].code == 0) + (j[2].code == 0) != 2)
            fail_msg("round %u: \"%s\", \"%s\", \"%s\"", round, j[0].text, j[1].text, j[2].text);
        assert_true(stack_now_ms() - since < RACE_MS + 8000);
        leave_all(seats, 3);
    }
}

/* ---------------------------------------------------------------- set-up */

static int set_up(void **state)
{
    static struct rack_stack rack;

    *state = &rack;
    return rack_stack_start(&rack, &(struct rack_stack_options){ .nodes = 4,
                                                                 .devices = 2,
                                                                 .mesh = "tenants = node\n",
                                                                 .last = "[limits]\nbytes = 64M\n" });
}

static int tear_down(void **state)
{
    return rack_stack_stop(*state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_and_four_nodes_give_the_bits_of_one),
        cmocka_unit_test(ranks_that_do_not_fit_are_refused_with_names_of_ranks_and_nodes),
        cmocka_unit_test(a_group_that_forms_is_shown_whole_at_its_home_and_as_a_part_elsewhere),
        cmocka_unit_test(ranks_that_wait_for_one_on_a_node_that_drains_are_told),
        cmocka_unit_test(a_layer_on_which_ranks_differ_is_made_nowhere_and_the_next_one_is),
        cmocka_unit_test(memory_that_one_node_does_not_give_is_given_nowhere),
        cmocka_unit_test(memory_beyond_the_limit_of_one_node_is_refused_on_all_at_once),
        cmocka_unit_test(ranks_that_race_for_a_place_end_all),
        cmocka_unit_test(handles_that_come_late_are_not_kept),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
