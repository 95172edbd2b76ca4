/* SPDX-License-Identifier: Apache-2.0 */
/* As much HTTP as tests of the metrics need: one request over a Unix socket, the whole answer. */
#ifndef MOK_TEST_HTTP_H
#define MOK_TEST_HTTP_H

#include <stddef.h>

/* A connection; -1. */
int http_connect(const char *path);
int http_connect_at_once(const char *path); /* non-blocking; -1 also when it would have to wait */
/* Sends `request` as it is and reads to the end, into memory to be freed; NULL: no connection, or nothing in 20 s. */
char *http_raw(const char *path, const char *request, size_t length);
/* GET of `url` with more header lines (each ending in \r\n, or ""). */
char *http_get(const char *path, const char *url, const char *headers);
/* Behind the header lines; "" if there is nothing. */
const char *http_body(const char *answer);
/* The value of the sample that begins with `name` (labels included); -1: there is none. */
double http_sample(const char *answer, const char *name);

#endif
