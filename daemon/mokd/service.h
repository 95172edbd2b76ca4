/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What mokd says to the service manager that started it (sd_notify), if one did: when it is ready, what it is doing,
 * that it lives. Never more than two messages a second, whatever happens; the last word of a burst is the one said.
 *
 *   WAITING --every device is up, or has failed for good--> SERVING --signal--> STOPPING
 *
 * While WAITING the start's time limit is extended. WATCHDOG=1 goes out only while every worker moves and everything
 * that was given to mokd_service_watch lives; a worker that stands still is mokd's own to replace, long before that.
 */
#ifndef MOKD_SERVICE_H
#define MOKD_SERVICE_H

#include <stdbool.h>

#include "error.h"

struct mokd_service;

/* Once sockets listen and devices have been begun. Without a service manager it only sees to device_failure = exit. */
int mokd_service_start(struct mokd_server *server, struct mokd_service **ret, struct mokd_error *error);
/* Something else without which mokd is of no use, as the rack thread: `lives` is asked in the loop and must not wait.
 * `name` must stay. At most eight; false beyond. */
bool mokd_service_watch(struct mokd_service *service, const char *name, bool (*lives)(void *cookie), void *cookie);
/* SIGHUP was taken: tells begin and end. `failure`: "" or why the old configuration stays. */
void mokd_service_reloaded(struct mokd_service *service, const char *failure);
void mokd_service_stopping(struct mokd_service *service); /* NULL is fine */
/* Its handles; the memory goes at the loop's next turn. NULL is fine. */
void mokd_service_close(struct mokd_service *service);

#endif
