/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may begin something on a device: devices that drain take nothing new, and a device that one group has alone takes
 * nobody else. Ends nothing that runs.
 */
#ifndef MOKD_ADMISSION_H
#define MOKD_ADMISSION_H

#include "group.h"

/*
 * A rank wants to join `group` (NULL: a new one) on the device: -MOK_EDRAIN, -MOK_EEXCLUSIVE; with `exclusive` also
 * -MOK_EACCESS, when the user may not ask for that, and -MOK_EEXCLUSIVE while others are there.
 */
int mokd_admit_rank(const struct mokd_session *session, const struct mokd_device *device,
                    const struct mokd_group *group, bool exclusive, struct mokd_error *error);
/* A session wants a queue on the device: -MOK_EDRAIN, -MOK_EEXCLUSIVE, but for those who have a rank there. */
int mokd_admit_queue(const struct mokd_session *session, const struct mokd_device *device, struct mokd_error *error);

/* A rank or a queue of the device is gone. */
void mokd_device_emptier(const struct mokd_device *device);

/* The same for `by`, of whichever node; says nothing to anybody. -MOK_ENODEV. */
int mokd_drain_apply(struct mokd_server *server, const Mok__Drain *request, const char *by, struct mokd_error *error);
/* Tells the rack whether this node takes new groups. */
void mokd_drain_announce(struct mokd_server *server);
void mokd_drain(struct mokd_session *session, uint64_t id, const Mok__Drain *request);

#endif
