/* SPDX-License-Identifier: Apache-2.0 */
/* Where the metrics are served: "off", "unix:/PATH", "ADDRESS:PORT" or "[ADDRESS]:PORT". Asks no name server. */
#ifndef MOKD_ENDPOINT_H
#define MOKD_ENDPOINT_H

#include <stdbool.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "error.h"

struct mokd_endpoint {
    bool off;
    bool loopback; /* reached from this machine alone */
    socklen_t length;
    union {
        struct sockaddr any;
        struct sockaddr_un local;
        struct sockaddr_storage storage;
    } address;
};

/* 0, or -MOK_EARG with a sentence that does not repeat `text`. */
int mokd_endpoint_parse(const char *text, struct mokd_endpoint *ret, struct mokd_error *error);
/* A non-blocking socket that listens there; a Unix socket gets the mode. A stale Unix socket is replaced. */
int mokd_endpoint_listen(const struct mokd_endpoint *endpoint, unsigned mode, int *ret_fd, struct mokd_error *error);
/* Takes a Unix socket's name away. */
void mokd_endpoint_remove(const struct mokd_endpoint *endpoint);

#endif
