/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How much memory there is for this service: the machine's, or what the control groups that it is in leave it
 * (MemoryMax= of the unit, a container's limit). Looks, and never changes anything.
 */
#ifndef MOKD_MEMORY_BOUND_H
#define MOKD_MEMORY_BOUND_H

#include <stdint.h>

/* 0: nobody says. *ret_limited (may be NULL): a control group has less than the machine. */
uint64_t mokd_memory_bound(int *ret_limited);
/* Of control groups alone, below `root` ("" but for tests); UINT64_MAX: none bounds it. */
uint64_t mokd_memory_bound_of_groups(const char *root);

#endif
