/* SPDX-License-Identifier: Apache-2.0 */
/* A forked child cannot use, keep alive or disturb its parent's session. */
#include "support.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "fake.h"

static struct fake fake;
static mok_session *session;
static mok_group *group;
static mok_layer *layer;
static mok_buffer *buffer;
static mok_ticket ticket;

static const mok_group_options group_options = { .size = sizeof(group_options), .name = "ep", .ranks = 1 };
static const mok_layer_options layer_options = {
    .size = sizeof(layer_options),
    .hidden = 16,
    .intermediate = 16,
    .experts = 2,
    .topk = 1,
    .max_tokens = 4,
    .precision = MOK_BF16,
};

static int open_session(mok_session **ret)
{
    const mok_session_options options = { .size = sizeof(options), .socket_path = fake.path, .queue_entries = 8 };
    return mok_session_open(&options, ret);
}

static int set_up(void **state)
{
    (void)state;
    fake_start(&fake);
    fake_flag(&fake, hold, true);
    assert_works(open_session(&session));
    assert_works(mok_group_join(session, &group_options, &group));
    assert_works(mok_layer_create(group, &layer_options, 0, &layer));
    assert_works(mok_buffer_alloc_private(session, 0, 4096, &buffer));
    assert_works(mok_nop(session, 0, &ticket));
    fake_await_taken(&fake, 1);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mok_session_close(session);
    fake_stop(&fake);
    return 0;
}

/* Runs `body` in a child; it must return 0 within five seconds. */
static void in_child(int (*body)(void))
{
    int status;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(5);
        _exit(body());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void parent_goes_on(void)
{
    fake_flag(&fake, hold, false);
    assert_works(mok_wait(session, ticket, -1, NULL));
    assert_works(mok_nop(session, 0, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
    memset(mok_buffer_data(buffer), 7, 4096);
    assert_works(mok_limits_query(session, &(mok_limits){ 0 }));
}

#define REFUSES(call)                                                                                                  \
    do {                                                                                                               \
        if ((call) != -MOK_EFORK || !strstr(mok_last_error(), "forked process")) {                                     \
            fprintf(stderr, "%s: \"%s\"\n", #call, mok_last_error());                                                  \
            return 1;                                                                                                  \
        }                                                                                                              \
    } while (0)

static int call_everything(void)
{
    const mok_layer_params params = { .size = sizeof(params) };
    const mok_forward_args forward = { .size = sizeof(forward) };
    const mok_backward_args backward = { .size = sizeof(backward) };
    mok_layer_memory memory;
    mok_device_info device;
    mok_limits limits;
    mok_ticket own;

    REFUSES(mok_device_list(session, &device, 1));
    REFUSES(mok_limits_query(session, &limits));
    REFUSES(mok_group_join(session, &group_options, &group));
    REFUSES(mok_group_leave(group));
    REFUSES(mok_buffer_alloc_symmetric(group, 64, 0, &buffer));
    REFUSES(mok_buffer_alloc_private(session, 0, 64, &buffer));
    REFUSES(mok_buffer_free(buffer));
    REFUSES(mok_layer_memory_query(group, &layer_options, &memory));
    REFUSES(mok_layer_create(group, &layer_options, 0, &layer));
    REFUSES(mok_layer_destroy(layer));
    REFUSES(mok_layer_describe(layer, NULL, 0));
    REFUSES(mok_layer_bind(layer, &params));
    REFUSES(mok_layer_forward(layer, &forward, &own));
    REFUSES(mok_layer_backward(layer, &backward, &own));
    REFUSES(mok_nop(session, 0, &own));
    REFUSES(mok_poll(session, ticket, NULL));
    REFUSES(mok_wait(session, ticket, -1, NULL));
    REFUSES(mok_cancel(session, ticket));
    return mok_buffer_data(buffer) == NULL && mok_buffer_size(buffer) == 0 ? 0 : 2;
}

static unsigned requests_seen(void)
{
    unsigned seen = 0;

    for (unsigned i = 0; i < FAKE_REQUESTS; i++)
        seen += fake_seen(&fake, (Mok__Request__BodyCase)i);
    return seen;
}

static void report_26_every_call_of_a_child_is_refused_and_changes_nothing(void **state)
{
    (void)state;
    unsigned before = requests_seen();
    in_child(call_everything);
    assert_int_equal(requests_seen(), before);
    assert_int_equal(__atomic_load_n(&fake.taken, __ATOMIC_ACQUIRE), 1);
    parent_goes_on();
}

static int close_parent_s(void)
{
    mok_session_close(session);
    return 0;
}

static void a_child_that_closes_the_parent_s_session_does_not_close_it(void **state)
{
    (void)state;
    in_child(close_parent_s);
    parent_goes_on();
}

static int open_own(void)
{
    mok_session *own;

    if (open_session(&own) < 0)
        return 1;
    if (mok_limits_query(own, &(mok_limits){ 0 }) < 0)
        return 2;
    if (mok_limits_query(session, &(mok_limits){ 0 }) != -MOK_EFORK)
        return 3;
    mok_session_close(own);
    return 0;
}

static void a_child_can_open_a_session_of_its_own(void **state)
{
    (void)state;
    in_child(open_own);
    parent_goes_on();
}

static int fork_again(void)
{
    int status;
    mok_session *own;

    if (open_session(&own) < 0)
        return 1;
    pid_t pid = fork();
    if (pid == 0)
        _exit(mok_limits_query(own, &(mok_limits){ 0 }) == -MOK_EFORK &&
                      mok_limits_query(session, &(mok_limits){ 0 }) == -MOK_EFORK
                  ? 0
                  : 1);
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
        return 2;
    if (mok_limits_query(own, &(mok_limits){ 0 }) < 0)
        return 3;
    mok_session_close(own);
    return 0;
}

static void a_grandchild_can_use_neither_session(void **state)
{
    (void)state;
    in_child(fork_again);
}

static void *wait_for_ever(void *argument)
{
    (void)argument;
    mok_wait(session, ticket, -1, NULL);
    return NULL;
}

static void a_child_forked_while_another_thread_waits_is_refused_and_not_stuck(void **state)
{
    pthread_t waiter;
    (void)state;
    assert_int_equal(pthread_create(&waiter, NULL, wait_for_ever, NULL), 0);
    for (int i = 0; i < 10; i++)
        in_child(call_everything);
    fake_flag(&fake, hold, false);
    pthread_join(waiter, NULL);
}

/* A process that opens a session, forks a child that stays until `stay` ends, and waits to be killed. */
static void opens_and_forks(int ready, int stay)
{
    mok_session *own;
    mok_ticket nop;
    char c = 'r';

    alarm(10);
    if (open_session(&own) < 0 || mok_nop(own, 0, &nop) < 0)
        _exit(1);
    if (fork() == 0) {
        close(ready);
        alarm(10);
        (void)!read(stay, &c, 1);
        _exit(0);
    }
    (void)!write(ready, &c, 1);
    pause();
    _exit(0);
}

static void a_child_does_not_keep_the_session_of_a_killed_parent_alive(void **state)
{
    int ready[2], stay[2];
    char c;
    (void)state;
    unsigned before = __atomic_load_n(&fake.ended, __ATOMIC_ACQUIRE);
    assert_int_equal(pipe2(ready, O_CLOEXEC), 0);
    assert_int_equal(pipe2(stay, O_CLOEXEC), 0);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        close(ready[0]);
        close(stay[1]);
        opens_and_forks(ready[1], stay[0]);
    }
    close(ready[1]);
    close(stay[0]);
    assert_int_equal(read(ready[0], &c, 1), 1);
    usleep(20000);
    assert_int_equal(__atomic_load_n(&fake.ended, __ATOMIC_ACQUIRE), before);
    assert_int_equal(kill(child, SIGKILL), 0);
    waitpid(child, NULL, 0);
    for (int i = 0; i < 1000 && __atomic_load_n(&fake.ended, __ATOMIC_ACQUIRE) == before; i++)
        usleep(1000);
    assert_int_equal(__atomic_load_n(&fake.ended, __ATOMIC_ACQUIRE), before + 1);
    /* The grandchild was there all the time: it alone still reads from `stay`. */
    assert_int_equal(write(stay[1], &c, 1), 1);
    close(stay[1]);
    close(ready[0]);
}

static void every_descriptor_is_closed_on_exec(void **state)
{
    (void)state;
    for (int fd = 3; fd < 256; fd++) {
        char link[32], path[64] = "";
        int flags = fcntl(fd, F_GETFD);
        if (flags < 0)
            continue;
        snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
        (void)!readlink(link, path, sizeof(path) - 1);
        if (strstr(path, "socket:") || strstr(path, "eventfd") || strstr(path, "memfd"))
            assert_true(flags & FD_CLOEXEC);
    }
    parent_goes_on();
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(report_26_every_call_of_a_child_is_refused_and_changes_nothing),
        TEST(a_child_that_closes_the_parent_s_session_does_not_close_it),
        TEST(a_child_can_open_a_session_of_its_own),
        TEST(a_grandchild_can_use_neither_session),
        TEST(a_child_forked_while_another_thread_waits_is_refused_and_not_stuck),
        TEST(a_child_does_not_keep_the_session_of_a_killed_parent_alive),
        TEST(every_descriptor_is_closed_on_exec),
    };
    signal(SIGPIPE, SIG_IGN);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
