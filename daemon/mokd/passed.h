/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors that the service manager hands over at start: listening sockets and the FD store, each by its name.
 * Read once, before anything is spawned; whoever knows a name takes its descriptors, the rest is closed.
 */
#ifndef MOKD_PASSED_H
#define MOKD_PASSED_H

#include <stddef.h>

/* Names that the unit files give to the sockets (FileDescriptorName=). */
#define MOKD_PASSED_CLIENTS "mok"
#define MOKD_PASSED_ADMIN "mok-admin"

/* Takes them from the environment, which then says nothing of them any more. 0; -MOK_ENOMEM; -MOK_EIO. */
int mokd_passed_open(void);
/* The next descriptor of that name, the caller's from then on; -1: none (left). */
int mokd_passed_take(const char *name);
/* The same for names that begin with `prefix`; the whole name is copied out. */
int mokd_passed_take_prefixed(const char *prefix, char *ret_name, size_t size);
/* Closes what nobody took, with a warning for each. */
void mokd_passed_close(void);

#endif
