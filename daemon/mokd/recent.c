/* SPDX-License-Identifier: Apache-2.0 */
#include "recent.h"

#include <pthread.h>
#include <stdio.h>
#include <time.h>

#include "common/log.h"

static struct {
    pthread_mutex_t lock;
    struct mokd_recent entry[MOKD_RECENT];
    uint64_t count; /* ever */
} recent = { .lock = PTHREAD_MUTEX_INITIALIZER };

static void keep(enum mok_log_level level, const char *component, const char *message, const char *fields)
{
    struct timespec now;

    if (level > MOK_LOG_WARNING)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    pthread_mutex_lock(&recent.lock);
    struct mokd_recent *entry = &recent.entry[recent.count++ % MOKD_RECENT];
    entry->unix_ms = (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
    entry->level = (int)level;
    snprintf(entry->component, sizeof(entry->component), "%s", component);
    snprintf(entry->message, sizeof(entry->message), "%s", message);
    snprintf(entry->fields, sizeof(entry->fields), "%s", fields);
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
    size_t count = recent.count < MOKD_RECENT ? (size_t)recent.count : MOKD_RECENT;
    for (size_t i = 0; i < count; i++)
        ret[i] = recent.entry[(recent.count - 1 - i) % MOKD_RECENT];
    pthread_mutex_unlock(&recent.lock);
    return count;
}
