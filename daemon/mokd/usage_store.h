/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The usage on disk: one SQLite file, a row for each user, job, device and ten minutes. Called by one thread at a time,
 * never the loop's, since a disk may take its time. Knows nothing of sessions.
 */
#ifndef MOKD_USAGE_STORE_H
#define MOKD_USAGE_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "mok/types.h"
#include "util.h"

#define MOKD_USAGE_BUCKET_S 600u

struct mokd_usage_count {
    uint32_t uid;
    char job[MOK_MAX_NAME + 1];
    char device[MOK_MAX_NAME + 1];
    char user[MOK_MAX_NAME + 1]; /* of an answer: his name, or number */
    uint64_t device_ns, ops, rows, byte_seconds;
};

struct mokd_usage_store;

struct mokd_usage_limits {
    uint32_t days;  /* older rows go */
    uint64_t bytes; /* the file is at most this large; the oldest rows go before it is reached */
};

/* `path` NULL: in memory. Opens nothing yet. NULL: no memory. */
struct mokd_usage_store *mokd_usage_store_new(const char *path, const struct mokd_usage_limits *limits);
void mokd_usage_store_free(struct mokd_usage_store *store); /* NULL is fine */

/*
 * Adds counts to the rows of the time `now_s` (seconds since 1970): all or nothing. -MOK_EIO with a sentence: nothing
 * was written. A file that is no database of ours is put aside, and another begun; *ret_aside says so.
 */
int mokd_usage_store_add(struct mokd_usage_store *store, uint64_t now_s, const struct mokd_usage_count *list,
                         size_t count, bool *ret_aside, char *ret_text, size_t size);

enum mokd_usage_by { MOKD_USAGE_ALL, MOKD_USAGE_USER, MOKD_USAGE_JOB, MOKD_USAGE_DEVICE };
struct mokd_usage_question {
    uint64_t since_s;
    enum mokd_usage_by by;
    bool one_user; /* `uid` alone */
    uint32_t uid;
    const struct mokd_usage_count *more; /* not written yet, counts too */
    size_t n_more;
};
struct mokd_usage_answer {
    struct mokd_usage_count *list; /* most device time first; free() it */
    size_t count;
    size_t beyond;         /* rows of less device time that are not in it */
    uint64_t kept_since_s; /* 0: there is nothing */
};
/* 0, -MOK_ENOMEM, -MOK_EIO with a sentence. */
int mokd_usage_store_ask(struct mokd_usage_store *store, const struct mokd_usage_question *question,
                         struct mokd_usage_answer *ret, char *ret_text, size_t size);

#endif
