/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A thread that gives memory back. Unmapping gigabytes takes long, and must delay neither an operation nor the answer
 * to somebody else's request; so what is closed is destroyed here, and its closing answered afterwards.
 */
#ifndef MOK_WORKER_REAPER_H
#define MOK_WORKER_REAPER_H

#include "dispatcher.h"
#include "objects.h"

struct reaper;

/* `on` must outlive the reaper; its engine is looked at only while a load is destroyed. */
int reaper_start(const struct objects_engine *on, struct reaper **ret, struct mok_message *message);
/* Destroys command->load; the command then comes back by reaper_done. */
void reaper_post(struct reaper *reaper, struct dispatcher_command *command);
/* Readable when commands have come back. */
int reaper_fd(const struct reaper *reaper);
struct worker_report *reaper_done(struct reaper *reaper);
/* Destroys what was posted and ends; commands that were not fetched are the caller's, by reaper_done before free. */
void reaper_stop(struct reaper *reaper);
void reaper_free(struct reaper *reaper); /* after reaper_stop; NULL is fine */

/* Destroys the objects of a load, none before what points to it. */
void reaper_destroy(const struct objects_engine *on, struct reaper_load *load);

#endif
