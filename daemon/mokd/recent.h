/* SPDX-License-Identifier: Apache-2.0 */
/* The last warnings and errors of mokd's own log, for the status page. Taken from any thread; bounded. */
#ifndef MOKD_RECENT_H
#define MOKD_RECENT_H

#include <stddef.h>
#include <stdint.h>

#define MOKD_RECENT 32u

struct mokd_recent {
    uint64_t unix_ms;
    int level; /* of syslog */
    char component[24];
    char message[64];
    char fields[256];
};

/* From now on the log's warnings and errors are kept as well. */
void mokd_recent_start(void);
void mokd_recent_stop(void);
/* Copies, newest first; returns how many. */
size_t mokd_recent_read(struct mokd_recent ret[MOKD_RECENT]);

#endif
