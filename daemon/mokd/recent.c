/* SPDX-License-Identifier: Apache-2.0 */
#include "recent.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "common/log.h"

/* Of one kind at most, so that none is pushed out by another that somebody causes again and again. */
#define OF_A_KIND (MOKD_RECENT / 4)

static struct {
    pthread_mutex_t lock;
    struct mokd_recent entry[MOKD_RECENT]; /* newest first */
    size_t count;
} recent = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* The place that the next one of a kind takes: of too many its oldest, else the oldest of all where there is no other.
 */
static size_t place_for(const char *component, const char *message)
{
    size_t same = 0, oldest = 0;

    for (size_t i = 0; i < recent.count; i++) {
        const struct mokd_recent *entry = &recent.entry[i];
        if (strcmp(entry->component, component) != 0 || strcmp(entry->message, message) != 0)
            continue;
        same++;
        oldest = i;
    }
    if (same >= OF_A_KIND)
        return oldest;
    return recent.count < MOKD_RECENT ? recent.count++ : MOKD_RECENT - 1;
}

static void keep(enum mok_log_level level, const char *component, const char *message, const char *fields)
{
    struct mokd_recent next;
    struct timespec now;

    if (level > MOK_LOG_WARNING)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    next.unix_ms = (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
    next.level = (int)level;
    snprintf(next.component, sizeof(next.component), "%s", component);
    snprintf(next.message, sizeof(next.message), "%s", message);
    snprintf(next.fields, sizeof(next.fields), "%s", fields);
    pthread_mutex_lock(&recent.lock);
    size_t place = place_for(next.component, next.message);
    memmove(&recent.entry[1], &recent.entry[0], place * sizeof(recent.entry[0]));
    recent.entry[0] = next;
    pthread_mutex_unlock(&recent.lock);
}

void mokd_recent_start(void)
{
    mok_log_observe(keep);
}

void mokd_recent_stop(void)
{
    mok_log_observe(NULL);
}

size_t mokd_recent_read(struct mokd_recent ret[MOKD_RECENT])
{
    pthread_mutex_lock(&recent.lock);
    size_t count = recent.count;
    memcpy(ret, recent.entry, count * sizeof(recent.entry[0]));
    pthread_mutex_unlock(&recent.lock);
    return count;
}
