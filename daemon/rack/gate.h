/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The listening socket, and whom the kernel lets through to it. Connections that libzmq has accepted are its own, and
 * all of them end when it stops listening; so who is not to come in is stopped before, by a filter on the socket: then
 * a flood of connections costs neither descriptors nor those that are there.
 */
#ifndef MOK_RACK_GATE_H
#define MOK_RACK_GATE_H

#include "inventory.h"

#define RACK_GATE_BACKLOG 32 /* of the listening socket: so many may come in after the gate was closed */

enum rack_gate_level {
    RACK_GATE_OPEN = 0,
    RACK_GATE_MEMBERS = 1, /* only from addresses of the inventory */
    RACK_GATE_CLOSED = 2,
};

struct rack_gate {
    int fd; /* the socket; libzmq has a duplicate */
    enum rack_gate_level level;
    int spare[RACK_GATE_BACKLOG]; /* given up where descriptors run out, for those that are on their way in */
    bool spared;
};
#define RACK_GATE_INIT                                                                                                 \
    {                                                                                                                  \
        .fd = -1                                                                                                       \
    }

/*
 * Listens; *ret_fd is the duplicate for libzmq, which closes it. `text` gets the sentence of a failure: -MOK_EEXIST,
 * -MOK_EACCESS, -MOK_EARG (no such address here), -MOK_EFDS, -MOK_EIO.
 */
int rack_gate_open(struct rack_gate *gate, const char *address, int *ret_fd, char *text);
void rack_gate_close(struct rack_gate *gate);

/* False: the kernel refuses the filter, and the gate is as it was. */
bool rack_gate_set(struct rack_gate *gate, enum rack_gate_level level, const struct rack_address *members,
                   size_t count);

/* There are no descriptors left: closes the gate, and lets those in, to be turned away, who wait in the queue. */
void rack_gate_starve(struct rack_gate *gate);
/* Takes the spare descriptors back. False: there still are none. */
bool rack_gate_recover(struct rack_gate *gate);

#endif
