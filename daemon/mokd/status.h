/* SPDX-License-Identifier: Apache-2.0 */
/* Answers about the node: devices, limits, jobs, groups. Reads everything, changes nothing. */
#ifndef MOKD_STATUS_H
#define MOKD_STATUS_H

#include "rack/group_node.h"
#include "session.h"

/* Pointers into `infos`, of which there are MOK_MAX_DEVICES. */
struct mokd_device_list {
    Mok__DeviceListReply body;
    Mok__DeviceInfo infos[MOK_MAX_DEVICES], *pointers[MOK_MAX_DEVICES];
};
void mokd_status_fill_devices(const struct mokd_server *server, struct mokd_device_list *ret);

/* A group as people see it. Pointers into itself, and to what is valid until anything changes. */
struct mokd_group_info {
    Mok__GroupInfo info;
    uint64_t session[MOK_MAX_EP];
    uint32_t device[MOK_MAX_EP];
    char *node[MOK_MAX_EP];
};
/* How far a look at all groups has come; begins with zeros. */
struct mokd_group_look {
    const struct mokd_group *group;
    bool past_ours;
    struct group_gathering gathering;
};
/* First the groups that clients have or form here, then those that meet here and are of other nodes. False: no more. */
bool mokd_status_next_group(const struct mokd_server *server, struct mokd_group_look *look,
                            struct mokd_group_info *ret);

void mokd_status_devices(struct mokd_session *session, uint64_t id);
void mokd_status_limits(struct mokd_session *session, uint64_t id);
void mokd_status_query(struct mokd_session *session, uint64_t id);
void mokd_status_fill_limits(const struct mokd_session *session, Mok__Limits *ret);

#endif
