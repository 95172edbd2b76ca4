/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A session that outlives mokd: a thread of its own watches the connection, and when mokd goes away finds the next one
 * and proves there whose session it is. Groups come back when the program asks for that (mok_session_recover), since
 * only it knows which operations are to be done again. Sessions of a mokd that keeps nothing have no such thread.
 */
#ifndef MOK_CLIENT_RESUME_H
#define MOK_CLIENT_RESUME_H

#include "session.h"

struct keeper;

/* After Hello; where mokd gave no token, nothing happens and *ret_keeper is NULL. -MOK_ENOMEM, -MOK_EFDS. */
int keeper_start(mok_session *session, const char *path, uint64_t resume_ms, const Mok__HelloReply *hello,
                 struct keeper **ret_keeper);
/* Ends the thread, whatever it waits for. NULL is fine. */
void keeper_stop(struct keeper *keeper);

/* Whether mokd went away since the program last recovered: 0, or -MOK_EDAEMON with the sentence. */
int session_recovered(const mok_session *session);

#endif
