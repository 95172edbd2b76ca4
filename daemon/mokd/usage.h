/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What each user's jobs used of each device, kept on disk over restarts and crashes: device time, operations, rows, and
 * memory by time. Counted in memory, written by a work thread every few seconds; a disk that is full or broken costs
 * nobody anything but the history: what could not be written is kept and tried again.
 */
#ifndef MOKD_USAGE_H
#define MOKD_USAGE_H

#include "session.h"

struct mokd_usage; /* of the server */

/* One user, job and device. */
struct mokd_usage_row;

/*
 * `dir` NULL or "": nothing is kept longer than mokd runs. A directory that cannot be used is logged, and tried again.
 * -MOK_ENOMEM.
 */
int mokd_usage_open(struct mokd_server *server, const char *dir);
/* Writes what there is; the loop has ended. NULL is fine. */
void mokd_usage_close(struct mokd_server *server);
/* No more writing by itself; the last is done by mokd_usage_close. */
void mokd_usage_stop(struct mokd_server *server);

/* The row of a session on a device; NULL when out of memory: not counted then. Each call below takes NULL. */
struct mokd_usage_row *mokd_usage_ref(const struct mokd_session *session, const struct mokd_device *device);
void mokd_usage_unref(struct mokd_usage_row *row);
void mokd_usage_work(struct mokd_usage_row *row, uint64_t ops, uint64_t rows, uint64_t device_ns);
/* Memory that is held from now on, and memory that no longer is. */
void mokd_usage_hold_bytes(struct mokd_usage_row *row, uint64_t bytes);
void mokd_usage_free_bytes(struct mokd_usage_row *row, uint64_t bytes);

void mokd_usage_query(struct mokd_session *session, uint64_t id, const Mok__UsageQuery *request);

#endif
