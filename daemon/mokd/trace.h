/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Traces: all workers record for a while what they do, and whoever asked gets a copy of what he may see. One at a time;
 * an administrator's ends one of anybody else, and follows it.
 *
 *   ask -> workers have the memory -> time passes, or the asker goes, or an administrator asks -> workers have let go
 * of it
 *       -> copied, answered
 */
#ifndef MOKD_TRACE_H
#define MOKD_TRACE_H

#include "session.h"

void mokd_trace(struct mokd_session *session, uint64_t id, const Mok__Trace *request);
/* The session is going: if the trace is its own, that ends now. NULL: whoever's it is. */
void mokd_trace_hurry(struct mokd_server *server, const struct mokd_session *session);

#endif
