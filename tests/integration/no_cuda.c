/* SPDX-License-Identifier: Apache-2.0 */
/* A client that cannot use the GPU that mokd has: a code and a reason, nothing left behind, and all else works. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "mok/mok.h"
#include "stack.h"

static void a_gpu_out_of_reach_is_refused_with_the_reason(void **state)
{
    mok_session_options options = { .size = sizeof(options), .job = "no-cuda" };
    mok_session *session = NULL;
    mok_buffer *buffer = NULL;
    mok_limits limits, before;
    mok_ticket ticket;
    struct stack stack;
    char lines[512];
    (void)state;

    /* The worker is one that agrees to everything, so mokd believes that it has a GPU. */
    snprintf(lines, sizeof(lines), "worker = %s", stack_program("tests/unit/daemon/fake-worker"));
    assert_int_equal(stack_start(&stack, &(struct stack_options){ .gpus = 1, .daemon = lines }), 0);
    options.socket_path = stack.socket;
    assert_int_equal(mok_session_open(&options, &session), 0);
    assert_int_equal(mok_nop(session, 0, &ticket), 0); /* so that the queue, which stays, is charged before */
    assert_int_equal(mok_limits_query(session, &before), 0);
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    int code = mok_buffer_alloc_private(session, 0, 4096, &buffer);
    if (driver) { /* this machine has a GPU perhaps, but not that one */
        assert_true(code == -MOK_ENODEV || code == -MOK_EDEVICE);
        dlclose(driver);
    } else {
        assert_int_equal(code, -MOK_ENOTSUP);
        assert_non_null(strstr(mok_last_error(), "libcuda.so.1"));
    }
    assert_null(buffer);
    assert_int_equal(mok_limits_query(session, &limits), 0);
    for (int i = 0; limits.bytes_used != before.bytes_used && i < 1000; i++) /* frees end after their answer */
        assert_int_equal(mok_limits_query(session, &limits), 0);
    assert_int_equal(limits.bytes_used, before.bytes_used);
    mok_session_close(session);
    assert_int_equal(stack_stop(&stack), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_gpu_out_of_reach_is_refused_with_the_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
