/* SPDX-License-Identifier: Apache-2.0 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>

int mokd_error_set(struct mokd_error *error, int code, const char *format, ...)
{
    va_list arguments;

    error->code = code;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof(error->text), format, arguments);
    va_end(arguments);
    return code;
}
