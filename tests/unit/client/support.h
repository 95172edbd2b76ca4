/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of client/ share: cmocka's preamble, and what a failure must say. */
#ifndef MOK_TEST_CLIENT_SUPPORT_H
#define MOK_TEST_CLIENT_SUPPORT_H

#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "mok/mok.h"
#include "util.h"

/* The call must fail with this code and a sentence that has `words` in it. */
#define assert_fails(call, code, words)                                                                                \
    do {                                                                                                               \
        int result_ = (call);                                                                                          \
        if (result_ != -(code) || !strstr(mok_last_error(), (words)))                                                  \
            fail_msg("%s: %s, \"%s\"; expected %s, \"...%s...\"", #call, mok_error_name(result_), mok_last_error(),    \
                     mok_error_name(code), (words));                                                                   \
    } while (0)

#define assert_works(call)                                                                                             \
    do {                                                                                                               \
        int result_ = (call);                                                                                          \
        if (result_ < 0)                                                                                               \
            fail_msg("%s: %s, \"%s\"", #call, mok_error_name(result_), mok_last_error());                              \
    } while (0)

static inline size_t count_fds(void)
{
    DIR *directory = opendir("/proc/self/fd");
    assert_non_null(directory);
    size_t count = 0;
    while (readdir(directory))
        count++;
    closedir(directory);
    return count;
}

#endif
