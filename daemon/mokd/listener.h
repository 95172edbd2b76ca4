/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The listening socket. A lock beside it, held by flock as long as mokd lives, says whether a socket that is there
 * already belongs to a living mokd (then this one refuses) or is a leftover (then it goes).
 */
#ifndef MOKD_LISTENER_H
#define MOKD_LISTENER_H

#include "error.h"

/* What comes in through it: anybody's requests, or those of an administrator as well. */
enum mokd_door { MOKD_DOOR_CLIENTS, MOKD_DOOR_ADMIN };

/* -MOK_EEXIST: another mokd serves `path`; -MOK_ERANGE; -MOK_EACCESS; -MOK_EIO. */
int mokd_listener_open(struct mokd_server *server, enum mokd_door door, const char *path, unsigned mode,
                       struct mokd_listener **ret, struct mokd_error *error);
/* The same with a socket that the service manager made, keeps and removes; taken over on success. */
int mokd_listener_adopt(struct mokd_server *server, enum mokd_door door, int fd, struct mokd_listener **ret,
                        struct mokd_error *error);
/* Takes no more connections and removes a socket of its own. NULL is fine. Its memory goes at the loop's next turn. */
void mokd_listener_close(struct mokd_listener *listener);

#endif
