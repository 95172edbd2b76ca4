/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Knows whether this process is a forked child of the one that opened a session, at the price of one memory load,
 * and sees to it that a child does not hold the parent's lease. Never takes a session's locks.
 */
#ifndef MOK_CLIENT_FORK_H
#define MOK_CLIENT_FORK_H

#include <stdbool.h>
#include <stdint.h>

/* Mark of this process, never 0; a session keeps the one it was opened under. 0, or -MOK_E* with a sentence. */
int fork_mark(uint32_t *ret_mark);
/* True in a child of the process that got `mark`, also after vfork-like calls that run no handlers. */
bool fork_happened(uint32_t mark);

/*
 * While owned, a descriptor is closed in every forked child, so that the child cannot keep a dead parent's session
 * alive. -MOK_ENOMEM with a sentence.
 */
int fork_own_fd(int fd);
void fork_disown_fd(int fd);

#endif
