/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <string.h>
#include <errno.h>

#include "mok/ring_abi.h"
#include "mok/types.h"
#include "util.h"

int mok_close(int fd)
{
    if (fd >= 0) {
        int saved = errno;
        close(fd);
        errno = saved;
    }
    return -1;
}

const char *mok_error_text(int code)
{
    switch (code < 0 ? -code : code) {
    case 0:
        return "success";
#define X(value, name, text)                                                                                           \
    case value:                                                                                                        \
        return text;
        MOK_ERROR_MAP(X)
#undef X
    }
    return "unknown error";
}

const char *mok_error_symbol(int code)
{
    switch (code < 0 ? -code : code) {
    case 0:
        return "0";
#define X(value, name, text)                                                                                           \
    case value:                                                                                                        \
        return "MOK_E" #name;
        MOK_ERROR_MAP(X)
#undef X
    }
    return "MOK_E?";
}

const char *mok_argument_text(int argument)
{
    switch (argument) {
#define X(value, name, text)                                                                                           \
    case value:                                                                                                        \
        return text;
        MOK_ARGUMENT_MAP(X)
#undef X
    }
    return "?";
}

const char *mok_device_kind_text(unsigned kind)
{
    switch (kind) {
    case MOK_DEVICE_HOST:
        return "host";
    case MOK_DEVICE_CUDA:
        return "cuda";
    }
    return "?";
}

const char *mok_precision_text(unsigned precision)
{
    switch (precision) {
    case MOK_BF16:
        return "bf16";
    case MOK_MXFP8_PER32:
        return "mxfp8-per32";
    case MOK_MXFP8_PER128:
        return "mxfp8-per128";
    }
    return "?";
}

bool mok_name_is_valid(const char *name)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t length = name ? strlen(name) : 0;
    return length >= 1 && length <= MOK_MAX_NAME && strspn(name, allowed) == length;
}
