/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libuv's threads, which do what may take long. It makes them when the first work comes, and ends the process where it
 * cannot: so they are made at the start, after a look whether there may be so many (TasksMax= of the unit, ulimit -u).
 */
#ifndef MOKD_THREADS_H
#define MOKD_THREADS_H

#include <uv.h>

#include "error.h"

/* Says to libuv how many there shall be, unless the environment does; before any work. */
void mokd_threads_choose(void);
/* -MOK_ENOMEM: so many cannot be had. */
int mokd_threads_start(uv_loop_t *loop, struct mokd_error *error);

#endif
