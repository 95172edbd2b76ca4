/* SPDX-License-Identifier: Apache-2.0 */
#include "message.h"

#include <stdarg.h>
#include <stdio.h>

int mok_fail(struct mok_message *message, int code, const char *format, ...)
{
    va_list arguments;

    if (message) {
        va_start(arguments, format);
        vsnprintf(message->text, sizeof(message->text), format, arguments);
        va_end(arguments);
    }
    return code;
}
