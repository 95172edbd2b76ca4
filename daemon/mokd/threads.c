/* SPDX-License-Identifier: Apache-2.0 */
#include "threads.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* A large allocation holds a thread for a while; of libuv's four, a few users could hold all. */
#define THREADS "16"
#define MOST 1024 /* libuv's own bound */

void mokd_threads_choose(void)
{
    setenv("UV_THREADPOOL_SIZE", THREADS, 0);
}

static void *pass(void *gate)
{
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* How many of them can be there at once; *ret_error is what hinders the next. */
static long count_possible(long wanted, int *ret_error)
{
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_t thread[MOST];
    long count = 0;

    pthread_mutex_lock(&gate);
    while (count < wanted && (*ret_error = pthread_create(&thread[count], NULL, pass, &gate)) == 0)
        count++;
    pthread_mutex_unlock(&gate);
    for (long i = 0; i < count; i++)
        pthread_join(thread[i], NULL);
    return count;
}

static void do_nothing(uv_work_t *work)
{
    (void)work;
}

int mokd_threads_start(uv_loop_t *loop, struct mokd_error *error)
{
    static uv_work_t first;
    const char *said = getenv("UV_THREADPOOL_SIZE");
    long wanted = said ? strtol(said, NULL, 10) : 0;
    int hindrance = 0;

    if (wanted < 1 || wanted > MOST)
        wanted = wanted < 1 ? 1 : MOST;
    long possible = count_possible(wanted, &hindrance);
    if (possible < wanted)
        return mokd_error_set(error, -MOK_ENOMEM,
                              "mokd needs %ld threads of its own and can have %ld (%s): raise TasksMax of the unit, "
                              "or ulimit -u",
                              wanted, possible, strerror(hindrance));
    uv_queue_work(loop, &first, do_nothing, NULL); /* fails only without a work function */
    return 0;
}
