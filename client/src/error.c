/* SPDX-License-Identifier: Apache-2.0 */
#include "error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "mok/mok.h"
#include "names.h"
#include "plain.h"

static _Thread_local char sentence[640];

static int negative(int code)
{
    return code < 0 ? code : -code;
}

int client_fail(int code, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(sentence, sizeof(sentence), format, arguments);
    va_end(arguments);
    mok_plain_text(sentence, ""); /* one line, whatever the caller's own texts are */
    return negative(code);
}

int client_fail_text(int code, const char *text)
{
    if (!text || !text[0])
        text = mok_error_text(code);
    if (text != sentence)
        snprintf(sentence, sizeof(sentence), "%s", text);
    mok_plain_text(sentence, ""); /* one line */
    return negative(code);
}

const char *client_last_error(void)
{
    return sentence;
}

_public_ const char *mok_last_error(void)
{
    return sentence;
}

_public_ const char *mok_strerror(int code)
{
    return mok_error_text(code);
}

_public_ const char *mok_error_name(int code)
{
    return mok_error_symbol(code);
}

_public_ const char *mok_version(void)
{
    return MOK_BUILD_VERSION;
}
