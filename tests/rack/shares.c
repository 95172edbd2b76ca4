/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Users and their jobs over the rack: what one has and uses on another node counts against his limits and his share
 * here. Two nodes of one device; users 4242 and 4243.
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
#include <sys/stat.h>
#include <unistd.h>

#include "rack_stack.h"
#include "workload.h"

#define MANY 4242u
#define FEW 4243u
#define MIB (1u << 20)

#ifdef MOK_SANITIZED /* where each takes a hundred times as long */
enum { WIDTH = 64, TOKENS = 16 };
#else
enum { WIDTH = 256, TOKENS = 64 };
#endif

static struct rack_stack rack;

static int start(void **state)
{
    (void)state;
    if (rack_stack_start(&rack, &(struct rack_stack_options){ .nodes = 2, .extra = "[user 4242]\nbytes = 48M\n" }) < 0)
        return -1;
    return chmod(rack.node[0].dir, 0755) | chmod(rack.node[1].dir, 0755);
}

static int stop(void **state)
{
    (void)state;
    return rack_stack_stop(&rack);
}

static mok_session *open_session(unsigned node, uid_t uid)
{
    mok_session_options options = { .size = sizeof(options), .socket_path = rack.node[node].socket, .job = "tenant" };
    mok_session *session = NULL;

    assert_int_equal(seteuid(uid), 0);
    int r = mok_session_open(&options, &session);
    assert_int_equal(seteuid(0), 0);
    if (r < 0)
        fail_msg("%s: %s", mok_error_name(r), mok_last_error());
    return session;
}

/* Reports take a moment; what is asked for is refused, or given, from some moment on. */
static mok_buffer *alloc_until(mok_session *session, uint64_t bytes, int code, const char *says)
{
    mok_buffer *buffer = NULL;

    for (int waited = 0; waited < 3000; waited++) {
        int r = mok_buffer_alloc_private(session, 0, bytes, &buffer);
        if (r == code && (r == 0 || strstr(mok_last_error(), says)))
            return r == 0 ? buffer : NULL;
        if (r == 0)
            mok_buffer_free(buffer);
        usleep(10000);
    }
    fail_msg("never %d, but: %s", code, mok_last_error());
    return NULL;
}

static void what_a_user_has_on_one_node_counts_against_his_limit_on_the_other(void **state)
{
    mok_session *here = open_session(0, MANY), *there = open_session(1, MANY), *other = open_session(1, FEW);
    mok_buffer *first, *second, *others;

    (void)state;
    assert_int_equal(mok_buffer_alloc_private(here, 0, 32 * MIB, &first), 0);
    /* Sessions take some of it, too, and what was freed a moment ago; but only the other node's 32 MiB leave no 20. */
    alloc_until(there, 20 * MIB, -MOK_EQUOTA, " on other nodes");
    assert_non_null(strstr(mok_last_error(), "bytes = 20971520: user 4242 may have 50331648 bytes and has "));
    second = alloc_until(there, 12 * MIB, 0, ""); /* which fits */
    assert_int_equal(mok_buffer_alloc_private(other, 0, 64 * MIB, &others), 0); /* it is his limit, not theirs */
    mok_buffer_free(first);
    mok_buffer_free(second);
    second = alloc_until(there, 44 * MIB, 0, "");
    alloc_until(here, 20 * MIB, -MOK_EQUOTA, " on other nodes");
    mok_session_close(there); /* with all it has */
    alloc_until(here, 44 * MIB, 0, "");
    mok_session_close(here);
    mok_session_close(other);
}

static void what_is_on_a_node_that_is_gone_counts_no_more(void **state)
{
    mok_session *here = open_session(0, MANY), *there = open_session(1, MANY);

    (void)state;
    alloc_until(here, 44 * MIB, 0, "");
    alloc_until(there, 20 * MIB, -MOK_EQUOTA, " on other nodes");
    rack_stack_kill(&rack, 0);
    alloc_until(there, 44 * MIB, 0, "");
    mok_session_close(here);
    mok_session_close(there);
    assert_int_equal(rack_stack_boot(&rack, 0), 0);
    assert_int_equal(chmod(rack.node[0].dir, 0755), 0);
    assert_int_equal(rack_stack_await(&rack, 0, 1), 0);
    assert_int_equal(rack_stack_await(&rack, 1, 1), 0);
}

/* ------------------------------------------------------------------ device time */

/* Keeps operations in flight until told to stop; counts those that are done. */
struct worker {
    pthread_t thread;
    struct workload_rank rank;
    bool stop;
    int done, code;
};

static const struct workload problem = { .hidden = WIDTH,
                                         .intermediate = WIDTH,
                                         .experts = 4,
                                         .topk = 2,
                                         .ep = 1,
                                         .max_tokens = TOKENS,
                                         .context_mode = MOK_CONTEXT_NONE,
                                         .seed = 3,
                                         .forward_only = true };

static void *work(void *argument)
{
    struct worker *w = argument;
    mok_ticket ticket[8];
    mok_result result;

    for (int i = 0; i < 8 && w->code == 0; i++)
        w->code = workload_forward(&w->rank, &ticket[i]);
    for (int i = 0; w->code == 0 && !__atomic_load_n(&w->stop, __ATOMIC_ACQUIRE); i = (i + 1) % 8) {
        w->code = mok_wait(w->rank.session, ticket[i], -1, &result);
        if (w->code == 0)
            w->code = workload_forward(&w->rank, &ticket[i]);
        __atomic_add_fetch(&w->done, 1, __ATOMIC_RELEASE);
    }
    return NULL;
}

static void begin(struct worker *w, unsigned node, uid_t uid, const char *job)
{
    *w = (struct worker){ 0 };
    assert_int_equal(seteuid(uid), 0);
    int r = workload_open(&w->rank, &problem, 0, TOKENS, 0, rack.node[node].socket, job, 0);
    assert_int_equal(seteuid(0), 0);
    if (r < 0)
        fail_msg("%s: %s", mok_error_name(r), mok_last_error());
    pthread_create(&w->thread, NULL, work, w);
}

static void end(struct worker *w)
{
    __atomic_store_n(&w->stop, true, __ATOMIC_RELEASE);
    pthread_join(w->thread, NULL);
    assert_int_equal(w->code, 0);
    workload_close(&w->rank);
}

static int done_of(struct worker *w)
{
    return __atomic_load_n(&w->done, __ATOMIC_ACQUIRE);
}

/* Operations of `few` from now on until it has done `count` more, and of `many` meanwhile: the share of the first. */
static double share_of(struct worker *few, struct worker *many, int count)
{
    int before = done_of(few), others = done_of(many);

    while (done_of(few) - before < count)
        usleep(2000);
    double got = done_of(few) - before;
    return got / (got + done_of(many) - others);
}

/* The first node's share of `few` beside `many`, before and once `there` has the second one; equal weights. */
static void contend(uid_t many_uid, const char *many_job, uid_t few_uid, const char *few_job, const char *there_job)
{
    struct worker there, many, few;
    double alike = 1, share = 0;

    begin(&many, 0, many_uid, many_job);
    begin(&few, 0, few_uid, few_job);
    /* A busy machine may keep either client from what it wants to do, for a while. */
    for (int tries = 0; tries < 20 && alike > 0.58; tries++) /* nothing elsewhere */
        alike = share_of(&few, &many, 150);
    begin(&there, 1, many_uid, there_job);
    share_of(&few, &many, 50); /* the first reports are on their way */
    for (int tries = 0; tries < 20 && share < 0.7; tries++) /* one device each */
        share = share_of(&few, &many, 250);
    end(&there);
    end(&few);
    end(&many);
    printf("share of the first node: %.2f, and %.2f once the other has the second one\n", alike, share);
    assert_true(alike < 0.6);
    assert_true(share >= 0.7);
}

static void who_has_another_node_for_himself_leaves_this_one_to_the_other(void **state)
{
    (void)state;
    contend(MANY, "many", FEW, "few", "there");
}

static void a_job_that_has_another_node_for_itself_leaves_this_one_to_the_users_other_job(void **state)
{
    (void)state;
    contend(FEW, "big", FEW, "small", "big");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_user_has_on_one_node_counts_against_his_limit_on_the_other),
        cmocka_unit_test(what_is_on_a_node_that_is_gone_counts_no_more),
        cmocka_unit_test(who_has_another_node_for_himself_leaves_this_one_to_the_other),
        cmocka_unit_test(a_job_that_has_another_node_for_itself_leaves_this_one_to_the_users_other_job),
    };
    if (getuid() != 0) {
        fprintf(stderr, "skipped: needs root, to be two users\n");
        return 77;
    }
    return cmocka_run_group_tests(tests, start, stop);
}
