/* SPDX-License-Identifier: Apache-2.0 */
#include "shell.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>

char *shell_output(int *ret_code, const char *format, ...)
{
    char command[1024], *text = NULL;
    size_t length = 0;
    va_list arguments;

    va_start(arguments, format);
    vsnprintf(command, sizeof(command), format, arguments);
    va_end(arguments);
    *ret_code = -1;
    FILE *out = open_memstream(&text, &length), *pipe = popen(command, "re");
    if (!out || !pipe)
        abort();
    for (int c; (c = fgetc(pipe)) != EOF;)
        fputc(c, out);
    int status = pclose(pipe);
    *ret_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    fclose(out);
    return text;
}
