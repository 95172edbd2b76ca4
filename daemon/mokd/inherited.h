/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors that the service manager passed at start: sockets, and what an earlier mokd left in the manager's store.
 * Read once, before anything else is opened; each is taken by name, by whoever knows what it is, and the rest closed.
 */
#ifndef MOKD_INHERITED_H
#define MOKD_INHERITED_H

#include <stddef.h>

struct mokd_inherited_fd {
    int fd; /* close-on-exec; -1 once taken */
    char *name;
};

struct mokd_inherited {
    size_t count;
    struct mokd_inherited_fd *list;
};

/* 0 also when there are none. -MOK_ENOMEM, -MOK_EIO. Takes $LISTEN_FDS and its kin out of the environment. */
int mokd_inherited_load(struct mokd_inherited *ret);
/* The first descriptor of that name, which is the caller's then; -1: none. */
int mokd_inherited_take(struct mokd_inherited *inherited, const char *name);
/* Closes what nobody took. */
void mokd_inherited_release(struct mokd_inherited *inherited);

#endif
