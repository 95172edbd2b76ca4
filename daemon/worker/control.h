/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control thread of a worker: answers mokd's requests, each exactly once, and passes on what breaks by itself.
 * Holds no client's hand: it never touches a queue's entries or an operation.
 */
#ifndef MOK_WORKER_CONTROL_H
#define MOK_WORKER_CONTROL_H

/*
 * Serves the socket until the other end is gone or has said stop; by then every completion that was owed is out, with
 * -MOK_EDAEMON where it had not run. Returns 0, or -MOK_E* when the socket could not be understood. Closes `fd`.
 */
int control_serve(int fd);

#endif
