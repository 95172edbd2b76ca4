/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What this mokd leaves to the next: sessions with their buffers, and the groups and layers whose ranks are all of
 * them. Written before any reply that tells of a change, so that nothing a client knows can be missing. Workers,
 * queues, operations and workspaces are not in it: they begin anew.
 */
#ifndef MOKD_STATE_H
#define MOKD_STATE_H

#include "error.h"
#include "server.h"
#include "state.pb-c.h"

struct mokd_device;
struct mokd_session;
struct mokd_state;

/*
 * Begins to keep state where there is a store and the configuration wants it; reads what the mokd before left, if it
 * did. What cannot be used is said and dropped. Waits for the workers of that mokd, so that nobody writes to its
 * buffers any more. Never fails the start but for -MOK_ENOMEM.
 */
int mokd_state_open(struct mokd_server *server);
/* Makes sessions, buffers, groups and layers of what was read; the devices are there, their workers are not. */
void mokd_state_restore(struct mokd_server *server);
/* Sessions that come can be kept. */
bool mokd_state_is_kept(const struct mokd_server *server);

/* Something that is kept has changed. */
void mokd_state_touch(struct mokd_server *server);
/* Writes it down if anything has. */
void mokd_state_save(struct mokd_server *server);
/* From now on mokd comes apart, and what is kept stays as it is, with or without a last word. */
void mokd_state_freeze(struct mokd_server *server, bool save);
bool mokd_state_is_frozen(const struct mokd_server *server);
void mokd_state_close(struct mokd_server *server);

/* A worker of the device has started: the next mokd is to wait for its end. */
void mokd_state_note_worker(struct mokd_device *device, uint32_t pid);

/* state_restore.c: checks all of it before it makes anything. */
int mokd_state_check(const struct mokd_server *server, const Mok__State *state, struct mokd_error *error);
void mokd_state_build(struct mokd_server *server, const Mok__State *state);

#endif
