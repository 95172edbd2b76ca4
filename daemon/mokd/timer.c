/* SPDX-License-Identifier: Apache-2.0 */
#include "timer.h"

#include <stdlib.h>

struct mokd_timer {
    uv_timer_t handle;
    void (*fire)(void *cookie);
    void *cookie;
};

static void fired(uv_timer_t *handle)
{
    struct mokd_timer *timer = handle->data;
    timer->fire(timer->cookie);
}

static void closed(uv_handle_t *handle)
{
    free(handle->data);
}

struct mokd_timer *mokd_timer_start(uv_loop_t *loop, uint64_t ms, void (*fire)(void *cookie), void *cookie)
{
    struct mokd_timer *timer = calloc(1, sizeof(*timer));
    if (!timer)
        return NULL;
    timer->fire = fire;
    timer->cookie = cookie;
    timer->handle.data = timer;
    uv_timer_init(loop, &timer->handle);
    uv_timer_start(&timer->handle, fired, ms, 0);
    return timer;
}

void mokd_timer_cancel(struct mokd_timer **timer)
{
    if (!*timer)
        return;
    uv_timer_stop(&(*timer)->handle);
    uv_close((uv_handle_t *)&(*timer)->handle, closed);
    *timer = NULL;
}
