/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Structured logging of the daemon and its workers: journald with fields under systemd, else one line on stderr.
 * Callable from any thread. An error is logged once, by whoever handles it; never from a data path.
 *
 *     mok_log(MOK_LOG_INFO, "session", "opened", "session=%" PRIu64 " uid=%u", id, uid);
 *     mok_log(MOK_LOG_ERROR, "config", "unusable", "file=%s error=\"%s\"", path, sentence);
 *
 * gives "2026-01-31T12:00:00.123Z info session: opened session=7 uid=1000". In the journal every key becomes a field
 * MOK_<KEY>, the component MOK_COMPONENT; messages that others may rely on have a MESSAGE_ID (message_ids.h). Values
 * with spaces stand between double quotes; use mok_log_text() for text that others wrote.
 */
#ifndef MOK_DAEMON_LOG_H
#define MOK_DAEMON_LOG_H

#include <stddef.h>

#include "util.h"

enum mok_log_level {
    MOK_LOG_ERROR = 3, /* the numbers of syslog */
    MOK_LOG_WARNING = 4,
    MOK_LOG_NOTICE = 5,
    MOK_LOG_INFO = 6,
    MOK_LOG_DEBUG = 7,
};

/* `identifier` names the process ("mokd", "mok-worker host0"); the string must stay. Looks at $JOURNAL_STREAM. */
void mok_log_open(const char *identifier, enum mok_log_level level);
void mok_log_set_level(enum mok_log_level level);
/* "error" ... "debug" to a level; -MOK_EARG for anything else. */
int mok_log_level_parse(const char *text, enum mok_log_level *ret_level);
const char *mok_log_level_text(enum mok_log_level level);

/* `fields`: printf format of "key=value key=value", or NULL. Keeps errno. */
void mok_log(enum mok_log_level level, const char *component, const char *message, const char *fields, ...)
    _printf_(4, 5);

/*
 * Everything that is said is shown to `observer` as well, in the thread that says it; NULL: to nobody. It must not log.
 */
typedef void (*mok_log_observer)(enum mok_log_level level, const char *component, const char *message,
                                 const char *fields);
void mok_log_observe(mok_log_observer observer);

/*
 * A copy of foreign text without quotes, backslashes and what plain.h takes out; cut to the buffer. Returns `buffer`.
 */
const char *mok_log_text(char *buffer, size_t size, const char *text);

#endif
