/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of mokctl share: the parts of mokd's status and the two ways to show them. */
#ifndef MOKCTL_H
#define MOKCTL_H

#include "control.pb-c.h"

enum mokctl_part {
    MOKCTL_STATUS, /* everything */
    MOKCTL_DEVICES,
    MOKCTL_JOBS,
    MOKCTL_GROUPS,
};

/* Print to stdout. 0; -1: no memory. */
int mokctl_print_table(enum mokctl_part part, const Mok__StatusReply *status);
int mokctl_print_json(enum mokctl_part part, const Mok__StatusReply *status);
int mokctl_print_version_json(const char *client, const char *daemon, unsigned protocol);

const char *mokctl_device_state(unsigned state);

#endif
