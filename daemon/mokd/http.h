/* SPDX-License-Identifier: Apache-2.0 */
/*
 * HTTP for people and for Prometheus, beside the loop and never in its way: libmicrohttpd's own descriptors are watched
 * by the loop, what is sent is made at once and written as the other end takes it. One request a connection,
 * connections and their time bounded.
 *
 *   /             status page    /status.json  what it shows    /metrics  OpenMetrics
 */
#ifndef MOKD_HTTP_H
#define MOKD_HTTP_H

#include "error.h"

struct mokd_http;

/* Listens where the configuration says; *ret NULL when it says off. */
int mokd_http_open(struct mokd_server *server, struct mokd_http **ret, struct mokd_error *error);
/* NULL is fine. Freed once the loop has closed what it watches. */
void mokd_http_close(struct mokd_http *http);

uint64_t mokd_http_scrapes(const struct mokd_http *http); /* NULL: 0 */

#endif
