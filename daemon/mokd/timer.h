/* SPDX-License-Identifier: Apache-2.0 */
/* One-shot timers of the loop that need no closing callback of their owner. */
#ifndef MOKD_TIMER_H
#define MOKD_TIMER_H

#include <stdint.h>
#include <uv.h>

struct mokd_timer;

/* Calls fire(cookie) once, `ms` from now. NULL when out of memory. The owner cancels it, fired or not. */
struct mokd_timer *mokd_timer_start(uv_loop_t *loop, uint64_t ms, void (*fire)(void *cookie), void *cookie);
/* Stops it, gives it back to the loop and sets *timer to NULL; NULL is fine. Also from within its own fire(). */
void mokd_timer_cancel(struct mokd_timer **timer);

#endif
