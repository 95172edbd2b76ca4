/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One line on stderr per failure, written in one call so that the lines of several ranks do not mix.
 */
#include "report.h"

#include <stdarg.h>
#include <stdio.h>

static int report_rank = -1;

void report_set_rank(int rank)
{
    report_rank = rank;
}

static __attribute__((format(printf, 1, 0))) void say(const char *format, va_list arguments)
{
    char sentence[768];

    vsnprintf(sentence, sizeof(sentence), format, arguments);
    if (report_rank < 0)
        fprintf(stderr, "train_moe_lm: %s\n", sentence);
    else
        fprintf(stderr, "train_moe_lm: rank %d: %s\n", report_rank, sentence);
}

int fail(int code, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
    return code;
}

void note(const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    say(format, arguments);
    va_end(arguments);
}
