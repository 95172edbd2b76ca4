/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a loop over elements reads and writes, said to ThreadSanitizer at once. Files that use it are compiled without
 * its calls for each element, which would take most of the tests' time there; no race is missed by that, as long as
 * each function says all that it touches. Nothing in any other build.
 */
#ifndef MOK_KERNELS_HOST_TOUCH_H
#define MOK_KERNELS_HOST_TOUCH_H

#include <stddef.h>
#include <stdint.h>

#ifdef MOK_TOUCHES
void __tsan_read_range(void *from, size_t bytes);
void __tsan_write_range(void *from, size_t bytes);
#define MOK_READS(from, count) __tsan_read_range((void *)(uintptr_t)(from), (count) * sizeof(*(from)))
#define MOK_WRITES(to, count) __tsan_write_range((void *)(uintptr_t)(to), (count) * sizeof(*(to)))
#else
#define MOK_READS(from, count) ((void)0)
#define MOK_WRITES(to, count) ((void)0)
#endif

#endif
