/* SPDX-License-Identifier: Apache-2.0 */
#define SD_JOURNAL_SUPPRESS_LOCATION
#include "log.h"

#include <ctype.h>
#include <errno.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>

#include <systemd/sd-journal.h>

#include "message_ids.h"
#include "mok/types.h"
#include "plain.h"

#define LINE_MAX_BYTES 2048
#define MAX_FIELDS 24

static const char *log_identifier = "mok";
static atomic_int log_level = MOK_LOG_INFO;
static bool log_to_journal;
static _Atomic(mok_log_observer) log_observer;

static const struct {
    const char *text;
    enum mok_log_level level;
} level_names[] = {
    { "error", MOK_LOG_ERROR }, { "warning", MOK_LOG_WARNING }, { "notice", MOK_LOG_NOTICE },
    { "info", MOK_LOG_INFO },   { "debug", MOK_LOG_DEBUG },
};

/* systemd sets JOURNAL_STREAM=device:inode of the stream it gave us; a redirected stderr no longer matches. */
static bool stderr_is_journal(void)
{
    const char *stream = getenv("JOURNAL_STREAM");
    unsigned long long device, inode;
    struct stat status;

    if (!stream || sscanf(stream, "%llu:%llu", &device, &inode) != 2)
        return false;
    return fstat(STDERR_FILENO, &status) == 0 && status.st_dev == device && status.st_ino == inode;
}

void mok_log_open(const char *identifier, enum mok_log_level level)
{
    log_identifier = identifier;
    log_to_journal = stderr_is_journal();
    mok_log_set_level(level);
}

void mok_log_observe(mok_log_observer observer)
{
    atomic_store_explicit(&log_observer, observer, memory_order_release);
}

void mok_log_set_level(enum mok_log_level level)
{
    atomic_store_explicit(&log_level, (int)level, memory_order_relaxed);
}

int mok_log_level_parse(const char *text, enum mok_log_level *ret_level)
{
    for (size_t i = 0; i < ARRAY_SIZE(level_names); i++) {
        if (strcmp(text, level_names[i].text) == 0) {
            *ret_level = level_names[i].level;
            return 0;
        }
    }
    return -MOK_EARG;
}

const char *mok_log_level_text(enum mok_log_level level)
{
    for (size_t i = 0; i < ARRAY_SIZE(level_names); i++)
        if (level_names[i].level == level)
            return level_names[i].text;
    return "?";
}

/* Cuts the next key=value out of `*cursor`, in place; false at the end. A quoted value ends at the next quote. */
static bool next_field(char **cursor, char **ret_key, char **ret_value)
{
    char *p = *cursor + strspn(*cursor, " ");
    char *equals = strchr(p, '=');
    if (!equals)
        return false;
    char *value = equals + 1;
    char *end;
    if (*value == '"') {
        value++;
        end = strchr(value, '"');
    } else {
        end = strchr(value, ' ');
    }
    *cursor = end ? end + 1 : value + strlen(value);
    *equals = '\0';
    if (end)
        *end = '\0';
    *ret_key = p;
    *ret_value = value;
    return true;
}

static void send_to_journal(enum mok_log_level level, const char *component, const char *message, char *fields)
{
    char text[LINE_MAX_BYTES + 256], priority[32], component_field[128], identifier[128], identity[64];
    const char *id = mok_message_id_of(component, message);
    char values[LINE_MAX_BYTES + MAX_FIELDS * 16];
    struct iovec part[MAX_FIELDS + 5];
    int count = 0;
    size_t used = 0;

    snprintf(text, sizeof(text), "MESSAGE=%s: %s%s%s", component, message, *fields ? " " : "", fields);
    snprintf(priority, sizeof(priority), "PRIORITY=%d", (int)level);
    snprintf(component_field, sizeof(component_field), "MOK_COMPONENT=%s", component);
    snprintf(identifier, sizeof(identifier), "SYSLOG_IDENTIFIER=%s", log_identifier);
    part[count++] = (struct iovec){ text, strlen(text) };
    part[count++] = (struct iovec){ priority, strlen(priority) };
    part[count++] = (struct iovec){ component_field, strlen(component_field) };
    part[count++] = (struct iovec){ identifier, strlen(identifier) };
    if (id) {
        snprintf(identity, sizeof(identity), "MESSAGE_ID=%s", id);
        part[count++] = (struct iovec){ identity, strlen(identity) };
    }

    char *key, *value;
    while (count < (int)ARRAY_SIZE(part) && next_field(&fields, &key, &value)) {
        size_t room = sizeof(values) - used;
        int length = snprintf(values + used, room, "MOK_%s=%s", key, value);
        if (length < 0 || (size_t)length >= room)
            break;
        for (char *c = values + used; *c != '='; c++)
            *c = (char)toupper((unsigned char)*c);
        part[count++] = (struct iovec){ values + used, (size_t)length };
        used += (size_t)length + 1;
    }
    sd_journal_sendv(part, count);
}

static void write_to_stderr(enum mok_log_level level, const char *component, const char *message, const char *fields)
{
    char line[LINE_MAX_BYTES + 512];
    struct timespec now;
    struct tm parts;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &parts);
    int length =
        snprintf(line, sizeof(line), "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %s %s: %s%s%s\n", parts.tm_year + 1900,
                 parts.tm_mon + 1, parts.tm_mday, parts.tm_hour, parts.tm_min, parts.tm_sec, now.tv_nsec / 1000000,
                 mok_log_level_text(level), component, message, *fields ? " " : "", fields);
    if (length < 0)
        return;
    if ((size_t)length >= sizeof(line)) {
        length = (int)sizeof(line) - 1;
        line[length - 1] = '\n';
    }
    /* one write a line, so that lines of several processes do not mix; a stderr that is gone is nobody's error */
    ssize_t written = write(STDERR_FILENO, line, (size_t)length);
    (void)written;
}

void mok_log(enum mok_log_level level, const char *component, const char *message, const char *fields, ...)
{
    char text[LINE_MAX_BYTES] = "";
    int saved = errno;

    if ((int)level > atomic_load_explicit(&log_level, memory_order_relaxed))
        return;
    if (fields) {
        va_list arguments;
        va_start(arguments, fields);
        vsnprintf(text, sizeof(text), fields, arguments);
        va_end(arguments);
    }
    mok_log_observer observer = atomic_load_explicit(&log_observer, memory_order_acquire);
    if (observer)
        observer(level, component, message, text);
    if (log_to_journal)
        send_to_journal(level, component, message, text);
    else
        write_to_stderr(level, component, message, text);
    errno = saved;
}

const char *mok_log_text(char *buffer, size_t size, const char *text)
{
    size_t used = 0;

    for (; *text && used + 1 < size; text++) {
        if (*text == '"')
            buffer[used++] = '\'';
        else
            buffer[used++] = *text == '\\' ? '?' : *text;
    }
    buffer[used] = '\0';
    mok_plain_text(buffer, "");
    return buffer;
}
