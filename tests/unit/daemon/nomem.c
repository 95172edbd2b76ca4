/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into a mokd whose own allocations fail now and then: one of $MOK_TEST_ALLOC_FAILS, once it has started. */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

void *__real_malloc(size_t size);
void *__real_calloc(size_t count, size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_calloc(size_t count, size_t size);

enum { STARTED_AFTER = 100 };

static int fails(void)
{
    static _Thread_local uint32_t state = 12345, calls;
    static const char *text;
    static unsigned one_of;

    if (!text) {
        text = getenv("MOK_TEST_ALLOC_FAILS");
        text = text ? text : "0";
        one_of = (unsigned)strtoul(text, NULL, 10);
    }
    state = state * 1664525u + 1013904223u;
    return one_of > 0 && calls++ > STARTED_AFTER && (state >> 8) % one_of == 0;
}

void *__wrap_malloc(size_t size)
{
    return fails() ? NULL : __real_malloc(size);
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails() ? NULL : __real_calloc(count, size);
}
