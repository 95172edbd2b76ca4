/* SPDX-License-Identifier: Apache-2.0 */
/* Sessions and what they own, against a mokd that answers rightly, wrongly, late, or not at all. */
#include "support.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "fake.h"

#define REQUEST(name) MOK__REQUEST__BODY_##name

static struct fake fake;
static mok_session *session;
static mok_group *group;
static size_t fds_before;

static int open_session(uint64_t timeout_ms, mok_session **ret)
{
    const mok_session_options options = {
        .size = sizeof(options), .socket_path = fake.path, .job = "test", .queue_entries = 8, .timeout_ms = timeout_ms
    };
    return mok_session_open(&options, ret);
}

static int join(mok_group **ret)
{
    const mok_group_options options = { .size = sizeof(options), .name = "ep", .ranks = 2, .rank = 1, .device = 1 };
    return mok_group_join(session, &options, ret);
}

static int set_up(void **state)
{
    (void)state;
    fds_before = count_fds();
    session = NULL;
    group = NULL;
    fake_start(&fake);
    return 0;
}

static int set_up_session(void **state)
{
    set_up(state);
    assert_works(open_session(2000, &session));
    assert_works(join(&group));
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    mok_session_close(session);
    fake_stop(&fake);
    assert_int_equal(count_fds(), fds_before);
    return 0;
}

/* ------------------------------------------------------------------ opening */

static void a_session_says_who_it_is_and_closes_without_a_trace(void **state)
{
    (void)state;
    assert_works(open_session(0, &session));
    assert_int_equal(fake_last_hello(&fake).protocol_min, 1);
    assert_false(fake_last_hello(&fake).observer);
}

static void a_session_takes_the_socket_from_the_environment(void **state)
{
    (void)state;
    setenv("MOK_SOCKET", fake.path, 1);
    assert_works(mok_session_open(NULL, &session));
    unsetenv("MOK_SOCKET");
}

static void no_socket_and_no_listener_are_told_apart(void **state)
{
    const mok_session_options nowhere = { .size = sizeof(nowhere), .socket_path = "/nonexistent/mokd.sock" };
    mok_session_options deaf = { .size = sizeof(deaf) };
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    char path[80];
    (void)state;
    assert_fails(mok_session_open(&nowhere, &session), MOK_EDAEMON, "no socket /nonexistent/mokd.sock");

    snprintf(path, sizeof(path), "%s/deaf.sock", fake.dir);
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    deaf.socket_path = path;
    assert_fails(mok_session_open(&deaf, &session), MOK_EDAEMON, "nobody listens on");
    close(fd);
    unlink(path);
}

static void a_path_that_is_no_socket_s_is_refused(void **state)
{
    char longest[200];
    mok_session_options options = { .size = sizeof(options), .socket_path = longest };
    (void)state;
    memset(longest, 'x', sizeof(longest));
    longest[sizeof(longest) - 1] = 0;
    assert_fails(mok_session_open(&options, &session), MOK_ERANGE, "socket_path has 199 bytes, must have 1..107");
    options.socket_path = "";
    assert_fails(mok_session_open(&options, &session), MOK_ERANGE, "socket_path has 0 bytes");
    options.socket_path = "/etc/passwd";
    assert_true(mok_session_open(&options, &session) < 0);
    assert_null(session);
}

static void a_listener_that_never_accepts_ends_in_the_session_s_time(void **state)
{
    mok_session_options options = { .size = sizeof(options), .timeout_ms = 100 };
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int queued[16];
    char path[80];
    (void)state;
    snprintf(path, sizeof(path), "%s/full.sock", fake.dir);
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof(address)), 0);
    assert_int_equal(listen(fd, 0), 0);
    for (size_t i = 0; i < ARRAY_SIZE(queued); i++) {
        queued[i] = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0);
        if (connect(queued[i], (struct sockaddr *)&address, sizeof(address)) < 0)
            assert_int_equal(errno, EAGAIN);
    }
    options.socket_path = path;
    uint64_t start = mok_now_ns();
    assert_fails(mok_session_open(&options, &session), MOK_ETIMEDOUT, "did not accept");
    assert_true(mok_now_ns() - start < UINT64_C(2000000000));
    for (size_t i = 0; i < ARRAY_SIZE(queued); i++)
        close(queued[i]);
    close(fd);
    unlink(path);
}

static void mokd_s_refusal_is_passed_on_with_its_sentence(void **state)
{
    (void)state;
    fake_set(&fake, REQUEST(HELLO), FAKE_REFUSED);
    fake_flag(&fake, refusal, -MOK_EQUOTA);
    assert_fails(open_session(0, &session), MOK_EQUOTA, "refused, as the test wants it");
}

static void wrong_arguments_of_open_send_nothing(void **state)
{
    const mok_session_options bad = { .size = sizeof(bad), .socket_path = fake.path, .job = "a job" };
    (void)state;
    assert_fails(mok_session_open(NULL, NULL), MOK_EARG, "ret_session is NULL");
    assert_fails(mok_session_open(&bad, &session), MOK_ENAME, "job is \"a job\"");
    assert_int_equal(fake_seen(&fake, REQUEST(HELLO)), 0);
}

/* ------------------------------------------------------------------ wrong answers */

static void a_truncated_answer_ends_the_session_with_a_named_error(void **state)
{
    mok_device_info devices[2];
    (void)state;
    fake_set(&fake, REQUEST(DEVICE_LIST), FAKE_CUT);
    assert_fails(mok_device_list(session, devices, 2), MOK_EPROTO, "malformed or truncated");
    assert_fails(mok_limits_query(session, &(mok_limits){ 0 }), MOK_EPROTO, "malformed or truncated");
}

static void an_answer_without_its_body_fails_that_call_only(void **state)
{
    mok_limits limits;
    (void)state;
    fake_set(&fake, REQUEST(LIMITS_QUERY), FAKE_EMPTY);
    assert_fails(mok_limits_query(session, &limits), MOK_EPROTO, "mokd's answer to limits_query has body 0");
    fake_set(&fake, REQUEST(LIMITS_QUERY), FAKE_RIGHT);
    assert_works(mok_limits_query(session, &limits));
    assert_int_equal(limits.bytes, 1000);
}

static void a_missing_or_surplus_descriptor_fails_that_call_and_the_buffer_is_given_back(void **state)
{
    mok_buffer *buffer = NULL;
    (void)state;
    fake_set(&fake, REQUEST(BUFFER_ALLOC), FAKE_FEWER_FDS);
    assert_fails(mok_buffer_alloc_private(session, 1, 4096, &buffer), MOK_EPROTO,
                 "with 0 descriptors, must come with 1");
    fake_await(&fake, REQUEST(BUFFER_FREE), 1);
    fake_set(&fake, REQUEST(BUFFER_ALLOC), FAKE_MORE_FDS);
    assert_fails(mok_buffer_alloc_private(session, 1, 4096, &buffer), MOK_EPROTO,
                 "with 2 descriptors, must come with 1");
    fake_await(&fake, REQUEST(BUFFER_FREE), 2);
    assert_null(buffer);
    fake_set(&fake, REQUEST(BUFFER_ALLOC), FAKE_RIGHT);
    assert_works(mok_buffer_alloc_private(session, 1, 4096, &buffer));
}

static void a_descriptor_where_none_is_due_is_closed(void **state)
{
    (void)state;
    size_t before = count_fds();
    fake_set(&fake, REQUEST(LIMITS_QUERY), FAKE_MORE_FDS);
    assert_fails(mok_limits_query(session, &(mok_limits){ 0 }), MOK_EPROTO, "with 1 descriptors, must come with 0");
    assert_int_equal(count_fds(), before);
}

static void a_queue_with_a_missing_descriptor_or_another_size_is_refused(void **state)
{
    mok_ticket ticket;
    (void)state;
    fake_set(&fake, REQUEST(QUEUE_OPEN), FAKE_FEWER_FDS);
    assert_fails(mok_nop(session, 0, &ticket), MOK_EPROTO, "with 2 descriptors, must come with 3");
    fake_await(&fake, REQUEST(QUEUE_CLOSE), 1);
    fake_set(&fake, REQUEST(QUEUE_OPEN), FAKE_RIGHT);
    fake_flag(&fake, entries, 16);
    assert_fails(mok_nop(session, 0, &ticket), MOK_EPROTO, "has 16 entries, must have 8");
    fake_await(&fake, REQUEST(QUEUE_CLOSE), 2);
    fake_flag(&fake, entries, 0);
    assert_works(mok_nop(session, 0, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
}

static void memory_smaller_than_the_buffer_is_refused_and_given_back(void **state)
{
    mok_buffer *buffer = NULL;
    (void)state;
    fake_set(&fake, REQUEST(BUFFER_ALLOC), FAKE_SMALL_FD);
    assert_fails(mok_buffer_alloc_symmetric(group, 1 << 20, 0, &buffer), MOK_EPROTO, "does not hold 1048576");
    fake_await(&fake, REQUEST(BUFFER_FREE), 1);
}

static void an_answer_that_does_not_come_ends_in_the_session_s_time_and_what_came_late_is_given_back(void **state)
{
    mok_session *hasty;
    mok_buffer *buffer = NULL;
    (void)state;
    assert_works(open_session(100, &hasty));
    assert_works(mok_buffer_alloc_private(hasty, 0, 64, &buffer));
    buffer = NULL;
    fake_set(&fake, REQUEST(BUFFER_ALLOC), FAKE_LATE);
    uint64_t start = mok_now_ns();
    assert_fails(mok_buffer_alloc_private(hasty, 0, 64, &buffer), MOK_ETIMEDOUT,
                 "did not answer buffer_alloc within 100 ms");
    assert_true(mok_now_ns() - start < UINT64_C(2000000000));
    fake_let_go(&fake);
    fake_set(&fake, REQUEST(BUFFER_ALLOC), FAKE_RIGHT);
    for (int i = 0; i < 20 && fake_seen(&fake, REQUEST(BUFFER_FREE)) == 0; i++) {
        assert_works(mok_limits_query(hasty, &(mok_limits){ 0 }));
        usleep(5000);
    }
    fake_await(&fake, REQUEST(BUFFER_FREE), 1);
    assert_null(buffer);
    mok_session_close(hasty);
}

static void a_queue_that_came_too_late_is_given_back_and_the_next_call_gets_another(void **state)
{
    mok_session *hasty;
    mok_ticket ticket = 0;
    (void)state;
    assert_works(open_session(200, &hasty));
    fake_set(&fake, REQUEST(QUEUE_OPEN), FAKE_LATE);
    assert_fails(mok_nop(hasty, 0, &ticket), MOK_ETIMEDOUT, "did not answer queue_open within 200 ms");
    fake_flag(&fake, linger, 2); /* the worker takes its time to let go */
    fake_set(&fake, REQUEST(QUEUE_OPEN), FAKE_RIGHT);
    fake_let_go(&fake);
    assert_works(mok_nop(hasty, 0, &ticket));
    assert_works(mok_wait(hasty, ticket, -1, NULL));
    assert_int_equal(fake_seen(&fake, REQUEST(QUEUE_CLOSE)), 1);
    mok_session_close(hasty);
}

static void a_queue_that_stays_in_the_way_ends_the_call_in_the_session_s_time(void **state)
{
    mok_session *hasty;
    mok_ticket ticket = 0;
    (void)state;
    assert_works(open_session(100, &hasty));
    fake_set(&fake, REQUEST(QUEUE_OPEN), FAKE_LATE);
    assert_fails(mok_nop(hasty, 1, &ticket), MOK_ETIMEDOUT, "did not answer queue_open");
    fake_flag(&fake, linger, 1u << 30);
    fake_set(&fake, REQUEST(QUEUE_OPEN), FAKE_RIGHT);
    fake_let_go(&fake);
    assert_fails(mok_nop(hasty, 1, &ticket), MOK_ETIMEDOUT,
                 "the queue to device 1 whose answer came too late is still there after 100 ms");
    assert_int_equal(ticket, 0);
    mok_session_close(hasty);
}

static void mokd_hanging_up_ends_the_call_and_every_later_one(void **state)
{
    mok_buffer *buffer;
    (void)state;
    fake_set(&fake, REQUEST(BUFFER_ALLOC), FAKE_HANG_UP);
    assert_fails(mok_buffer_alloc_private(session, 1, 64, &buffer), MOK_EDAEMON, "connection to mokd lost");
    assert_fails(mok_limits_query(session, &(mok_limits){ 0 }), MOK_EDAEMON, "connection to mokd lost");
    assert_fails(mok_buffer_alloc_symmetric(group, 64, 0, &buffer), MOK_EDAEMON, "connection to mokd lost");
}

static void mokd_s_last_word_is_the_reason_of_later_calls(void **state)
{
    Mok__Reply event = MOK__REPLY__INIT;
    (void)state;
    event.code = -MOK_ESESSION;
    event.text = (char *)"sq_tail is 12 apart, must be at most 8";
    fake_send(&fake, &event);
    fake_hang_up(&fake);
    assert_fails(mok_limits_query(session, &(mok_limits){ 0 }), MOK_ESESSION, "sq_tail is 12 apart");
}

/* ------------------------------------------------------------------ descriptors at their limit */

/* Leaves room for `room` more descriptors. */
static void limit_fds(struct rlimit *ret_before, int room)
{
    int next = fcntl(0, F_DUPFD, 0);
    assert_true(next >= 0);
    close(next);
    assert_int_equal(getrlimit(RLIMIT_NOFILE, ret_before), 0);
    struct rlimit tight = { .rlim_cur = (rlim_t)(next + room), .rlim_max = ret_before->rlim_max };
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
}

static void report_24_at_the_descriptor_limit_an_allocation_fails_by_name_and_the_session_lives(void **state)
{
    mok_buffer *buffer = NULL;
    struct rlimit before;
    mok_ticket ticket;
    (void)state;
    size_t fds = count_fds();
    /* Room for what mokd opens here, in the same process, and none for what it sends. */
    fake_flag(&fake, keep, true);
    limit_fds(&before, 1);
    int r = mok_buffer_alloc_symmetric(group, 4096, 0, &buffer);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_fails(r, MOK_EFDS, "buffer_alloc brings 1 descriptors, more than this process may still have");
    fake_flag(&fake, keep, false);
    fake_await(&fake, REQUEST(BUFFER_FREE), 1);
    assert_null(buffer);
    assert_works(mok_buffer_alloc_symmetric(group, 4096, 0, &buffer));
    assert_works(mok_limits_query(session, &(mok_limits){ 0 })); /* mokd has closed its end of the memory by now */
    assert_int_equal(count_fds(), fds);
    assert_works(mok_nop(session, 1, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
}

static void at_the_descriptor_limit_no_queue_is_asked_for(void **state)
{
    struct rlimit before;
    mok_ticket ticket;
    (void)state;
    unsigned asked = fake_seen(&fake, REQUEST(QUEUE_OPEN));
    limit_fds(&before, 2);
    int r = mok_nop(session, 0, &ticket);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
    assert_fails(r, MOK_EFDS, "a queue brings 3 descriptors");
    assert_int_equal(fake_seen(&fake, REQUEST(QUEUE_OPEN)), asked);
    assert_works(mok_nop(session, 0, &ticket));
    assert_works(mok_wait(session, ticket, -1, NULL));
}

static void at_the_descriptor_limit_a_session_cannot_open_and_says_so(void **state)
{
    struct rlimit before;
    (void)state;
    limit_fds(&before, 0);
    int r = open_session(0, &session);
    setrlimit(RLIMIT_NOFILE, &before);
    assert_int_equal(r, -MOK_EFDS);
}

/* ------------------------------------------------------------------ what a session owns */

static void devices_are_listed_as_far_as_there_is_room_and_counted_all(void **state)
{
    mok_device_info devices[2] = { 0 };
    (void)state;
    assert_int_equal(mok_device_list(session, devices, 1), 2);
    assert_string_equal(devices[0].name, "host0");
    assert_int_equal(devices[0].up, 1);
    assert_int_equal(devices[0].memory_bytes, UINT64_C(9007199254740993));
    assert_string_equal(devices[1].name, "");
    assert_int_equal(mok_device_list(session, NULL, 0), 2);
    assert_int_equal(mok_device_list(session, devices, 2), 2);
    assert_int_equal(devices[1].up, 0);
    assert_fails(mok_device_list(session, NULL, 1), MOK_EARG, "ret_devices is NULL, capacity is 1");
}

static void buffers_are_zeroed_memory_of_their_size_and_go_when_freed(void **state)
{
    mok_buffer *symmetric, *private;
    (void)state;
    assert_works(mok_buffer_alloc_symmetric(group, 5000, 0, &symmetric));
    assert_works(mok_buffer_alloc_private(session, 1, 1, &private));
    assert_int_equal(mok_buffer_size(symmetric), 5000);
    assert_int_equal(mok_buffer_size(private), 1);
    unsigned char *data = mok_buffer_data(symmetric);
    assert_int_equal((uintptr_t)data % 4096, 0);
    for (int i = 0; i < 5000; i++)
        assert_int_equal(data[i], 0);
    data[4999] = 1;
    assert_works(mok_buffer_free(symmetric));
    assert_works(mok_buffer_free(private));
    assert_works(mok_buffer_free(NULL));
    assert_int_equal(fake_seen(&fake, REQUEST(BUFFER_FREE)), 2);
    assert_null(mok_buffer_data(NULL));
    assert_int_equal(mok_buffer_size(NULL), 0);
}

static void a_buffer_has_at_least_one_byte_and_fits_an_address_space(void **state)
{
    mok_buffer *buffer;
    (void)state;
    assert_fails(mok_buffer_alloc_private(session, 1, 0, &buffer), MOK_ERANGE, "bytes is 0, must be 1..");
    assert_fails(mok_buffer_alloc_private(session, 1, UINT64_MAX, &buffer), MOK_ERANGE,
                 "bytes is 18446744073709551615");
    assert_fails(mok_buffer_alloc_private(session, 64, 1, &buffer), MOK_ERANGE, "device is 64, must be 0..63");
    assert_fails(mok_buffer_alloc_private(session, 1, 1, NULL), MOK_EARG, "ret_buffer is NULL");
    assert_fails(mok_buffer_alloc_symmetric(NULL, 1, 0, &buffer), MOK_EARG, "group is NULL");
}

static void leaving_a_group_frees_its_layers_and_symmetric_buffers(void **state)
{
    const mok_layer_options options = { .size = sizeof(options),
                                        .hidden = 16,
                                        .intermediate = 16,
                                        .experts = 2,
                                        .topk = 1,
                                        .max_tokens = 4,
                                        .precision = MOK_BF16 };
    mok_buffer *symmetric, *private;
    mok_layer *layer;
    (void)state;
    assert_works(mok_buffer_alloc_symmetric(group, 64, 0, &symmetric));
    assert_works(mok_buffer_alloc_private(session, 1, 64, &private));
    assert_works(mok_layer_create(group, &options, 0, &layer));
    assert_works(mok_group_leave(group));
    assert_int_equal(fake_seen(&fake, REQUEST(GROUP_LEAVE)), 1);
    assert_int_equal(mok_buffer_size(private), 64);
    assert_works(mok_buffer_free(private));
    assert_works(mok_group_leave(NULL));
}

struct caller {
    pthread_t thread;
    mok_session *session;
    int result;
};

static void *join_late(void *argument)
{
    struct caller *caller = argument;
    mok_group *late;
    const mok_group_options options = { .size = sizeof(options), .name = "late", .ranks = 2, .device = 1 };
    caller->result = mok_group_join(caller->session, &options, &late);
    return NULL;
}

static void a_collective_call_waits_as_long_as_mokd_does_not_as_long_as_plain_ones(void **state)
{
    struct caller waiting;
    (void)state;
    assert_works(open_session(50, &waiting.session));
    fake_set(&fake, REQUEST(GROUP_JOIN), FAKE_LATE);
    pthread_create(&waiting.thread, NULL, join_late, &waiting);
    fake_await(&fake, REQUEST(GROUP_JOIN), 2);
    usleep(150000);
    fake_let_go(&fake);
    pthread_join(waiting.thread, NULL);
    assert_int_equal(waiting.result, 0);
    mok_session_close(waiting.session);
}

static void a_group_that_mokd_refuses_leaves_nothing(void **state)
{
    mok_group *other = NULL;
    (void)state;
    fake_set(&fake, REQUEST(GROUP_JOIN), FAKE_REFUSED);
    fake_flag(&fake, refusal, -MOK_ETIMEDOUT);
    assert_fails(join(&other), MOK_ETIMEDOUT, "refused, as the test wants it");
    assert_null(other);
}

static void other_threads_get_their_answers_while_one_waits_for_a_group(void **state)
{
    struct caller waiting[3];
    mok_limits limits;
    (void)state;
    fake_set(&fake, REQUEST(GROUP_JOIN), FAKE_LATE);
    for (int i = 0; i < 3; i++) {
        waiting[i].session = session;
        pthread_create(&waiting[i].thread, NULL, join_late, &waiting[i]);
    }
    fake_await(&fake, REQUEST(GROUP_JOIN), 4);
    for (int i = 0; i < 100; i++)
        assert_works(mok_limits_query(session, &limits));
    fake_let_go(&fake);
    for (int i = 0; i < 3; i++) {
        pthread_join(waiting[i].thread, NULL);
        assert_int_equal(waiting[i].result, 0);
    }
}

static void *query_many(void *argument)
{
    struct caller *caller = argument;
    mok_limits limits;
    mok_buffer *buffer;
    caller->result = 0;
    for (int i = 0; i < 100 && caller->result == 0; i++) {
        caller->result = mok_limits_query(session, &limits);
        if (caller->result == 0)
            caller->result = mok_buffer_alloc_private(session, 1, 4096, &buffer);
        if (caller->result == 0) {
            memset(mok_buffer_data(buffer), 1, 4096);
            caller->result = mok_buffer_free(buffer);
        }
    }
    return NULL;
}

static void four_threads_ask_at_once_and_each_gets_its_own_answers(void **state)
{
    struct caller callers[4];
    (void)state;
    for (int i = 0; i < 4; i++)
        pthread_create(&callers[i].thread, NULL, query_many, &callers[i]);
    for (int i = 0; i < 4; i++) {
        pthread_join(callers[i].thread, NULL);
        assert_int_equal(callers[i].result, 0);
    }
}

static void layers_are_created_described_and_destroyed(void **state)
{
    mok_layer_options options = { .size = sizeof(options),
                                  .hidden = 16,
                                  .intermediate = 16,
                                  .experts = 2,
                                  .topk = 1,
                                  .max_tokens = 4,
                                  .precision = MOK_BF16 };
    mok_layer_memory memory;
    mok_layer *layer;
    char text[8];
    (void)state;
    assert_works(mok_layer_memory_query(group, &options, &memory));
    assert_int_equal(memory.context_full_bytes, FAKE_LAYER_FULL);
    assert_works(mok_layer_create(group, &options, 0, &layer));
    assert_int_equal(mok_layer_describe(layer, text, sizeof(text)), strlen(FAKE_PLAN));
    assert_string_equal(text, "units =");
    assert_int_equal(mok_layer_describe(layer, NULL, 0), strlen(FAKE_PLAN));
    assert_works(mok_layer_destroy(layer));
    assert_works(mok_layer_destroy(NULL));
    options.topk = 65;
    assert_fails(mok_layer_create(group, &options, 0, &layer), MOK_ERANGE, "topk is 65");
    assert_fails(mok_layer_memory_query(group, &options, &memory), MOK_ERANGE, "topk is 65");
    assert_int_equal(fake_seen(&fake, REQUEST(LAYER_CREATE)), 1);
}

static void every_override_of_the_plan_reaches_mokd_and_its_reason_comes_back(void **state)
{
    mok_layer_options options = {
        .size = sizeof(options),
        .hidden = 64,
        .intermediate = 48,
        .experts = 2,
        .topk = 1,
        .max_tokens = 8,
        .precision = MOK_MXFP8_PER128,
        .shared_intermediate = 32,
        .clamp = 7.5f,
        .ring_bytes = UINT64_C(9007199254740993),
        .minibatch_rows = 384,
        .comm_units = 3,
        .gradient_dtype = MOK_DTYPE_BF16,
        .wgrad_precision = MOK_WGRAD_MXFP8,
        .transposed_weights = 1,
    };
    mok_layer_memory memory;
    mok_layer *layer;
    char text[256];
    (void)state;
    for (int created = 0; created < 2; created++) {
        if (created)
            assert_works(mok_layer_create(group, &options, 0, &layer));
        else
            assert_works(mok_layer_memory_query(group, &options, &memory));
        Mok__LayerSpec spec = fake_last_spec(&fake, NULL, NULL);
        assert_int_equal(spec.shared_intermediate, 32);
        assert_true(spec.clamp == 7.5f);
        assert_int_equal(spec.ring_bytes, UINT64_C(9007199254740993));
        assert_int_equal(spec.minibatch_rows, 384);
        assert_int_equal(spec.comm_units, 3);
        assert_int_equal(spec.gradient_dtype, MOK_DTYPE_BF16);
        assert_int_equal(spec.wgrad_precision, MOK_WGRAD_MXFP8);
        assert_int_equal(spec.transposed_weights, 1);
    }
    assert_works(mok_layer_describe(layer, text, sizeof(text)));
    assert_string_equal(text, FAKE_PLAN);
}

static void weight_gradients_are_of_mxfp8_where_nobody_says_and_scales_are_of_128_values(void **state)
{
    static const struct {
        uint32_t precision, asked, sent;
    } cases[] = {
        { MOK_BF16, 0, 0 },
        { MOK_MXFP8_PER32, 0, 0 },
        { MOK_MXFP8_PER32, MOK_WGRAD_MXFP8, MOK_WGRAD_MXFP8 },
        { MOK_MXFP8_PER128, 0, MOK_WGRAD_MXFP8 },
        { MOK_MXFP8_PER128, MOK_WGRAD_BF16, 0 },
        { MOK_MXFP8_PER128, MOK_WGRAD_MXFP8, MOK_WGRAD_MXFP8 },
    };
    mok_layer_memory memory;
    (void)state;
    for (size_t i = 0; i < ARRAY_SIZE(cases); i++) {
        const mok_layer_options options = { .size = sizeof(options),
                                            .hidden = 64,
                                            .intermediate = 48,
                                            .experts = 2,
                                            .topk = 1,
                                            .max_tokens = 8,
                                            .precision = cases[i].precision,
                                            .wgrad_precision = cases[i].asked };
        assert_works(mok_layer_memory_query(group, &options, &memory));
        assert_int_equal(fake_last_spec(&fake, NULL, NULL).wgrad_precision, cases[i].sent);
    }
}

static void an_older_mokd_is_not_asked_for_what_it_does_not_know(void **state)
{
    mok_layer_options options = { .size = sizeof(options), .hidden = 64, .intermediate = 48, .experts = 2, .topk = 1,
                                  .max_tokens = 8, .precision = MOK_MXFP8_PER32, .gradient_dtype = MOK_DTYPE_F32,
                                  .wgrad_precision = MOK_WGRAD_BF16 };
    mok_layer_memory memory;
    mok_layer *layer;
    (void)state;
    __atomic_store_n(&fake.old, true, __ATOMIC_RELAXED);
    assert_works(open_session(2000, &session));
    assert_works(join(&group));
    assert_works(mok_layer_memory_query(group, &options, &memory));
    options.gradient_dtype = MOK_DTYPE_BF16;
    assert_fails(mok_layer_memory_query(group, &options, &memory), MOK_ENOTSUP, "gradient_dtype is 1");
    assert_fails(mok_layer_create(group, &options, 0, &layer), MOK_ENOTSUP, "mokd is older");
    options.gradient_dtype = 0;
    options.wgrad_precision = MOK_WGRAD_MXFP8;
    assert_fails(mok_layer_create(group, &options, 0, &layer), MOK_ENOTSUP, "wgrad_precision is 2");
    options.wgrad_precision = 0;
    options.precision = MOK_MXFP8_PER128;
    assert_works(mok_layer_memory_query(group, &options, &memory)); /* what it does not know is not the default */
    assert_int_equal(fake_last_spec(&fake, NULL, NULL).wgrad_precision, 0);
    options.transposed_weights = 1;
    assert_fails(mok_layer_memory_query(group, &options, &memory), MOK_ENOTSUP, "transposed_weights is 1");
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)
#define TEST_SESSION(name) cmocka_unit_test_setup_teardown(name, set_up_session, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_session_says_who_it_is_and_closes_without_a_trace),
        TEST(a_session_takes_the_socket_from_the_environment),
        TEST(no_socket_and_no_listener_are_told_apart),
        TEST(a_path_that_is_no_socket_s_is_refused),
        TEST(a_listener_that_never_accepts_ends_in_the_session_s_time),
        TEST(mokd_s_refusal_is_passed_on_with_its_sentence),
        TEST(wrong_arguments_of_open_send_nothing),
        TEST_SESSION(a_truncated_answer_ends_the_session_with_a_named_error),
        TEST_SESSION(an_answer_without_its_body_fails_that_call_only),
        TEST_SESSION(a_missing_or_surplus_descriptor_fails_that_call_and_the_buffer_is_given_back),
        TEST_SESSION(a_descriptor_where_none_is_due_is_closed),
        TEST_SESSION(a_queue_with_a_missing_descriptor_or_another_size_is_refused),
        TEST_SESSION(memory_smaller_than_the_buffer_is_refused_and_given_back),
        TEST_SESSION(an_answer_that_does_not_come_ends_in_the_session_s_time_and_what_came_late_is_given_back),
        TEST_SESSION(a_queue_that_came_too_late_is_given_back_and_the_next_call_gets_another),
        TEST_SESSION(a_queue_that_stays_in_the_way_ends_the_call_in_the_session_s_time),
        TEST_SESSION(mokd_hanging_up_ends_the_call_and_every_later_one),
        TEST_SESSION(mokd_s_last_word_is_the_reason_of_later_calls),
        TEST_SESSION(report_24_at_the_descriptor_limit_an_allocation_fails_by_name_and_the_session_lives),
        TEST_SESSION(at_the_descriptor_limit_no_queue_is_asked_for),
        TEST(at_the_descriptor_limit_a_session_cannot_open_and_says_so),
        TEST_SESSION(devices_are_listed_as_far_as_there_is_room_and_counted_all),
        TEST_SESSION(buffers_are_zeroed_memory_of_their_size_and_go_when_freed),
        TEST_SESSION(a_buffer_has_at_least_one_byte_and_fits_an_address_space),
        TEST_SESSION(leaving_a_group_frees_its_layers_and_symmetric_buffers),
        TEST_SESSION(a_collective_call_waits_as_long_as_mokd_does_not_as_long_as_plain_ones),
        TEST_SESSION(a_group_that_mokd_refuses_leaves_nothing),
        TEST_SESSION(other_threads_get_their_answers_while_one_waits_for_a_group),
        TEST_SESSION(four_threads_ask_at_once_and_each_gets_its_own_answers),
        TEST_SESSION(layers_are_created_described_and_destroyed),
        TEST(an_older_mokd_is_not_asked_for_what_it_does_not_know),
        TEST_SESSION(weight_gradients_are_of_mxfp8_where_nobody_says_and_scales_are_of_128_values),
        TEST_SESSION(every_override_of_the_plan_reaches_mokd_and_its_reason_comes_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
