/* SPDX-License-Identifier: Apache-2.0 */
/* Answers about the node: devices, limits, jobs, groups. Reads everything, changes nothing. */
#ifndef MOKD_STATUS_H
#define MOKD_STATUS_H

#include "session.h"

/* Pointers into `infos`, of which there are MOK_MAX_DEVICES. */
struct mokd_device_list {
    Mok__DeviceListReply body;
    Mok__DeviceInfo infos[MOK_MAX_DEVICES], *pointers[MOK_MAX_DEVICES];
};
void mokd_status_fill_devices(const struct mokd_server *server, struct mokd_device_list *ret);
void mokd_status_devices(struct mokd_session *session, uint64_t id);
void mokd_status_limits(struct mokd_session *session, uint64_t id);
void mokd_status_query(struct mokd_session *session, uint64_t id);
void mokd_status_fill_limits(const struct mokd_session *session, Mok__Limits *ret);

#endif
