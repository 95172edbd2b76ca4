/* SPDX-License-Identifier: Apache-2.0 */
/* Answers about the node: devices, limits, jobs, groups. Reads everything, changes nothing. */
#ifndef MOKD_STATUS_H
#define MOKD_STATUS_H

#include "session.h"

void mokd_status_devices(struct mokd_session *session, uint64_t id);
void mokd_status_limits(struct mokd_session *session, uint64_t id);
void mokd_status_query(struct mokd_session *session, uint64_t id);
void mokd_status_fill_limits(const struct mokd_session *session, Mok__Limits *ret);

#endif
