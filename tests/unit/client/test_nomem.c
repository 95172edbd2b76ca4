/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The n-th allocation of the library fails, for every n: each call then fails by name, nothing leaks, nothing hangs.
 * Linked with --wrap for malloc, calloc and realloc; only the thread that arms the trap meets it.
 */
#include "support.h"

#include "fake.h"

static _Thread_local long countdown = -1; /* allocations until one fails; negative: none does */

static bool fails_now(void)
{
    return countdown >= 0 && countdown-- == 0;
}

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__real_realloc(void *memory, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);
void *__wrap_realloc(void *memory, size_t size);

void *__wrap_malloc(size_t size)
{
    return fails_now() ? NULL : __real_malloc(size);
}
void *__wrap_calloc(size_t count, size_t size)
{
    return fails_now() ? NULL : __real_calloc(count, size);
}
void *__wrap_realloc(void *memory, size_t size)
{
    return fails_now() ? NULL : __real_realloc(memory, size);
}

static struct fake fake;

/* A life of a session, up to the first failure. */
static int live(mok_session **ret_session)
{
    const mok_session_options session_options = {
        .size = sizeof(session_options), .socket_path = fake.path, .queue_entries = 4, .timeout_ms = 1000
    };
    const mok_group_options group_options = { .size = sizeof(group_options), .name = "ep", .ranks = 1 };
    const mok_layer_options layer_options = { .size = sizeof(layer_options),
                                              .hidden = 16,
                                              .intermediate = 16,
                                              .experts = 2,
                                              .topk = 1,
                                              .max_tokens = 4,
                                              .precision = MOK_BF16 };
    const mok_layer_params nothing = { .size = sizeof(nothing) };
    mok_buffer *symmetric, *private;
    mok_layer *layer;
    mok_group *group;
    mok_ticket ticket;
    int r;

    if ((r = mok_session_open(&session_options, ret_session)) < 0 ||
        (r = mok_group_join(*ret_session, &group_options, &group)) < 0 ||
        (r = mok_buffer_alloc_symmetric(group, 4096, 0, &symmetric)) < 0 ||
        (r = mok_buffer_alloc_private(*ret_session, 0, 4096, &private)) < 0 ||
        (r = mok_layer_create(group, &layer_options, 0, &layer)) < 0 || (r = mok_layer_bind(layer, &nothing)) < 0 ||
        (r = mok_nop(*ret_session, 0, &ticket)) < 0 || (r = mok_wait(*ret_session, ticket, -1, NULL)) < 0 ||
        (r = mok_buffer_free(private)) < 0 || (r = mok_layer_destroy(layer)) < 0 || (r = mok_group_leave(group)) < 0)
        return r;
    return 0;
}

static void whichever_allocation_fails_the_call_fails_by_name_and_nothing_leaks(void **state)
{
    long n = 0;
    int r;
    (void)state;
    do {
        fake_start(&fake);
        size_t fds = count_fds();
        mok_session *session = NULL;
        countdown = n++;
        r = live(&session);
        bool met = countdown < 0;
        countdown = -1;
        mok_session_close(session);
        if (!met)
            assert_int_equal(r, 0);
        else if (r != 0 && r != -MOK_ENOMEM) /* 0: it met a look for messages that was one too many */
            fail_msg("allocation %ld failed: %s \"%s\"", n - 1, mok_error_name(r), mok_last_error());
        fake_stop(&fake);
        assert_true(count_fds() < fds); /* the listener is closed, and whatever it had accepted */
        if (!met)
            break;
    } while (n < 1000);
    assert_true(n > 20);
    assert_true(n < 1000);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(whichever_allocation_fails_the_call_fails_by_name_and_nothing_leaks),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
