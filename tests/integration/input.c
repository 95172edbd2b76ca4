/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bad input through the public functions: a distinct code, a sentence with argument, value and bound, nothing else
 * hurt.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "workload.h"
#include "stack.h"

static struct stack stack;
static struct workload_rank rank;
static const struct workload one = { .hidden = 64,
                                     .intermediate = 96,
                                     .experts = 4,
                                     .topk = 2,
                                     .ep = 1,
                                     .max_tokens = 32,
                                     .context_mode = MOK_CONTEXT_FULL,
                                     .seed = 5 };

static int set_up(void **state)
{
    (void)state;
    struct stack_options options = { .devices = 2, .extra = "[limits]\nbytes = 1G\nsessions = 8\n" };
    return stack_start(&stack, &options) < 0 || workload_open(&rank, &one, 0, 32, 0, stack.socket, "input", 0) < 0 ? -1
                                                                                                                   : 0;
}

static int tear_down(void **state)
{
    (void)state;
    workload_close(&rank);
    return stack_stop(&stack);
}

/* The session still does a right step. */
static void assert_healthy(void)
{
    mok_result forward, backward;
    assert_int_equal(workload_step(&rank, &forward, &backward), 0);
    assert_int_equal(forward.dropped, 0);
    assert_int_equal(forward.engine, MOK_DEVICE_HOST);
    assert_int_equal(forward.precision, MOK_BF16);
}

static void expect(int code, int wanted, const char *word)
{
    if (code != wanted)
        fail_msg("got %s, want %s: %s", mok_error_name(code), mok_error_name(wanted), mok_last_error());
    if (word && !strstr(mok_last_error(), word))
        fail_msg("'%s' is not in: %s", word, mok_last_error());
}

static mok_layer_options good_layer(void)
{
    return (mok_layer_options){ .size = sizeof(mok_layer_options),
                                .hidden = 64,
                                .intermediate = 96,
                                .experts = 4,
                                .topk = 2,
                                .max_tokens = 32,
                                .precision = MOK_BF16 };
}

static void layer_options_are_refused_with_the_option_and_its_bound(void **state)
{
    (void)state;
    mok_layer *layer = NULL;
    mok_layer_memory memory;
    struct {
        size_t offset;
        uint32_t value;
        int code;
        const char *word;
    } cases[] = {
        { offsetof(mok_layer_options, hidden), 0, -MOK_ERANGE, "hidden" },
        { offsetof(mok_layer_options, hidden), 40, -MOK_EALIGN, "hidden" },
        { offsetof(mok_layer_options, intermediate), 17, -MOK_EALIGN, "intermediate" },
        { offsetof(mok_layer_options, hidden), 1u << 30, -MOK_ERANGE, "hidden" },
        { offsetof(mok_layer_options, experts), 0, -MOK_ERANGE, "experts" },
        { offsetof(mok_layer_options, experts), 100000, -MOK_ERANGE, "experts" },
        { offsetof(mok_layer_options, topk), 0, -MOK_ERANGE, "topk" },
        { offsetof(mok_layer_options, topk), 65, -MOK_ERANGE, "topk" },
        { offsetof(mok_layer_options, max_tokens), 0, -MOK_ERANGE, "max_tokens" },
        { offsetof(mok_layer_options, max_tokens), UINT32_MAX, -MOK_ERANGE, "max_tokens" },
        { offsetof(mok_layer_options, precision), 9, -MOK_EDTYPE, "precision" },
        { offsetof(mok_layer_options, shared_intermediate), 8, -MOK_EALIGN, "shared_intermediate" },
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        mok_layer_options options = good_layer();
        memcpy((char *)&options + cases[i].offset, &cases[i].value, 4);
        expect(mok_layer_create(rank.group, &options, 1000, &layer), cases[i].code, cases[i].word);
        expect(mok_layer_memory_query(rank.group, &options, &memory), cases[i].code, cases[i].word);
    }
    mok_layer_options options = good_layer();
    options.clamp = -1.0f;
    expect(mok_layer_create(rank.group, &options, 1000, &layer), -MOK_ERANGE, "clamp");
    options = good_layer();
    options.size = 4;
    expect(mok_layer_create(rank.group, &options, 1000, &layer), -MOK_ESIZE, "size");
    assert_null(layer);
    assert_healthy();
}

static void forward_arguments_are_refused_by_name(void **state)
{
    (void)state;
    mok_ticket ticket = 0;
    mok_view x = { .buffer = rank.x }, ids = { .buffer = rank.ids }, weight = { .buffer = rank.weight },
             out = { .buffer = rank.out }, context = { .buffer = rank.context };
    const mok_forward_args good = { .size = sizeof(good),
                                    .tokens = 32,
                                    .context_mode = MOK_CONTEXT_FULL,
                                    .x = x,
                                    .ids = ids,
                                    .topk_weight = weight,
                                    .out = out,
                                    .context = context };
    mok_forward_args a;
    struct {
        const char *word;
        int code;
        mok_forward_args args;
    } cases[12];
    size_t n = 0;
#define CASE(word_, code_, change)                                                                                     \
    a = good;                                                                                                          \
    change;                                                                                                            \
    cases[n].word = word_;                                                                                             \
    cases[n].code = code_;                                                                                             \
    cases[n++].args = a
    CASE("tokens", -MOK_ERANGE, a.tokens = 33);
    CASE("context_mode", -MOK_ERANGE, a.context_mode = 7);
    CASE("flags", -MOK_ERANGE, a.flags = 0x80);
    CASE("x", -MOK_EALIGN, a.x.offset = 8);
    CASE("x", -MOK_ESIZE, a.x.offset = 64);
    CASE("x", -MOK_EBUFFER, a.x.buffer = rank.out); /* not symmetric */
    CASE("x", -MOK_ERANGE, a.x.offset = UINT64_MAX - 15);
    CASE("ids", -MOK_ESIZE, a.ids.bytes = 32 * 2 * 4 - 16);
    CASE("out", -MOK_EBUFFER, a.out.buffer = NULL);
    CASE("context", -MOK_ESIZE, a.context.bytes = 1024);
    CASE("out", -MOK_EARG, a.out = a.x); /* overlaps an input */
#undef CASE
    for (size_t i = 0; i < n; i++) {
        mok_result result = { 0 };
        int code = mok_layer_forward(rank.layer, &cases[i].args, &ticket);
        if (code == 0) {
            assert_int_equal(mok_wait(rank.session, ticket, 5000000000, &result), 0);
            code = result.code;
        }
        if (code != cases[i].code)
            fail_msg("case %zu (%s): got %s: %s", i, cases[i].word, mok_error_name(code), mok_last_error());
        expect(code, cases[i].code, cases[i].word);
    }
    assert_healthy();
}

static void a_bad_expert_id_names_rank_token_and_slot_and_writes_nothing(void **state)
{
    (void)state;
    static const int32_t bad[] = { 4, INT32_MAX, -7, INT32_MIN };
    int32_t *ids = mok_buffer_data(rank.ids);
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        mok_ticket ticket;
        mok_result result;
        int32_t saved = ids[2 * 7 + 1];
        memset(mok_buffer_data(rank.out), 0x5a, mok_buffer_size(rank.out));
        ids[2 * 7 + 1] = bad[i];
        ids[2 * 9] = bad[i];
        assert_int_equal(workload_forward(&rank, &ticket), 0);
        assert_int_equal(mok_wait(rank.session, ticket, 5000000000, &result), 0);
        expect(result.code, -MOK_EEXPERT, "token 7");
        assert_non_null(strstr(mok_last_error(), "slot 1"));
        const uint8_t *out = mok_buffer_data(rank.out);
        for (uint64_t b = 0; b < mok_buffer_size(rank.out); b++)
            assert_int_equal(out[b], 0x5a);
        ids[2 * 7 + 1] = saved;
        workload_fill(&rank);
    }
    assert_healthy();
}

static void names_ranks_devices_and_queues_are_checked(void **state)
{
    (void)state;
    mok_session *session = NULL;
    mok_group *group = NULL;
    mok_session_options so = { .size = sizeof(so), .socket_path = stack.socket, .job = "bad name" };
    expect(mok_session_open(&so, &session), -MOK_ENAME, "job");
    so.job = "good";
    so.queue_entries = 33;
    expect(mok_session_open(&so, &session), -MOK_ERANGE, "queue_entries");
    so.queue_entries = 0;
    so.socket_path = "/nonexistent/socket";
    expect(mok_session_open(&so, &session), -MOK_EDAEMON, "/nonexistent/socket");
    so.socket_path = stack.socket;
    assert_int_equal(mok_session_open(&so, &session), 0);
    mok_group_options go = { .size = sizeof(go), .name = "g/h", .ranks = 1, .device = 0, .timeout_ms = 100 };
    expect(mok_group_join(session, &go, &group), -MOK_ENAME, "name");
    go.name = "g";
    go.ranks = MOK_MAX_EP + 1;
    expect(mok_group_join(session, &go, &group), -MOK_ERANGE, "ranks");
    go.ranks = 2;
    go.rank = 2;
    expect(mok_group_join(session, &go, &group), -MOK_ERANK, "rank");
    go.rank = 0;
    go.device = 17;
    expect(mok_group_join(session, &go, &group), -MOK_ENODEV, "device");
    go.device = 0;
    expect(mok_group_join(session, &go, &group), -MOK_ETIMEDOUT, "1");
    assert_null(group);
    mok_buffer *buffer = NULL;
    expect(mok_buffer_alloc_private(session, 0, 0, &buffer), -MOK_ERANGE, "bytes");
    expect(mok_buffer_alloc_private(session, 9, 4096, &buffer), -MOK_ENODEV, "device");
    expect(mok_buffer_alloc_private(session, 0, 2ull << 30, &buffer), -MOK_EQUOTA, "bytes");
    assert_null(buffer);
    mok_ticket ticket;
    expect(mok_nop(session, 17, &ticket), -MOK_ENODEV, "device");
    expect(mok_wait(session, 12345, 0, NULL), -MOK_ENOENT, "12345");
    mok_session_close(session);
    assert_healthy();
}

static void sessions_beyond_the_limit_of_a_user_are_refused(void **state)
{
    (void)state;
    mok_session *session[16] = { 0 };
    mok_session_options so = { .size = sizeof(so), .socket_path = stack.socket, .job = "many" };
    int code = 0, n = 0;
    while (n < 16 && (code = mok_session_open(&so, &session[n])) == 0)
        n++;
    expect(code, -MOK_EQUOTA, "sessions");
    assert_int_equal(n, 7);
    for (int i = 0; i < n; i++)
        mok_session_close(session[i]);
    assert_healthy();
}

static void at_the_descriptor_limit_of_the_client_the_error_has_a_name_and_nothing_leaks(void **state)
{
    (void)state;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        mok_session *session;
        mok_buffer *buffer;
        mok_session_options so = { .size = sizeof(so), .socket_path = stack.socket, .job = "poor" };
        if (mok_session_open(&so, &session) < 0 || mok_buffer_alloc_private(session, 0, 4096, &buffer) < 0)
            _exit(10);
        int before = stack_descriptors(getpid());
        struct rlimit limit;
        getrlimit(RLIMIT_NOFILE, &limit);
        int next = dup(0);
        close(next);
        struct rlimit tight = { (rlim_t)next, limit.rlim_max };
        setrlimit(RLIMIT_NOFILE, &tight);
        int code = mok_buffer_alloc_private(session, 0, 4096, &buffer);
        setrlimit(RLIMIT_NOFILE, &limit);
        if (code != -MOK_EFDS)
            _exit(11);
        if (stack_descriptors(getpid()) != before)
            _exit(12);
        _exit(mok_buffer_alloc_private(session, 0, 4096, &buffer) == 0 ? 0 : 13);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(WIFEXITED(status) ? WEXITSTATUS(status) : -1, 0);
    assert_healthy();
}

static void a_forked_child_cannot_use_its_parents_session(void **state)
{
    (void)state;
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        mok_ticket ticket;
        mok_limits limits;
        if (workload_forward(&rank, &ticket) != -MOK_EFORK || mok_limits_query(rank.session, &limits) != -MOK_EFORK)
            _exit(1);
        mok_session_close(rank.session);
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    assert_healthy();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layer_options_are_refused_with_the_option_and_its_bound),
        cmocka_unit_test(forward_arguments_are_refused_by_name),
        cmocka_unit_test(a_bad_expert_id_names_rank_token_and_slot_and_writes_nothing),
        cmocka_unit_test(names_ranks_devices_and_queues_are_checked),
        cmocka_unit_test(sessions_beyond_the_limit_of_a_user_are_refused),
        cmocka_unit_test(at_the_descriptor_limit_of_the_client_the_error_has_a_name_and_nothing_leaks),
        cmocka_unit_test(a_forked_child_cannot_use_its_parents_session),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
