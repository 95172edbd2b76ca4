/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The listening socket. A lock beside it, held by flock as long as mokd lives, says whether a socket that is there
 * already belongs to a living mokd (then this one refuses) or is a leftover (then it goes).
 */
#ifndef MOKD_LISTENER_H
#define MOKD_LISTENER_H

#include "error.h"

/* -MOK_EEXIST: another mokd serves `path`; -MOK_ERANGE; -MOK_EACCESS; -MOK_EIO. */
int mokd_listener_open(struct mokd_server *server, const char *path, unsigned mode, struct mokd_listener **ret,
                       struct mokd_error *error);
/* Takes no more connections and removes the socket. NULL is fine. Its memory goes at the loop's next turn. */
void mokd_listener_close(struct mokd_listener *listener);

#endif
