/* SPDX-License-Identifier: Apache-2.0 */
#include "names.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

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

#define WORDS(name, ...)                                                                                               \
    static const char *const name##_word[] = { __VA_ARGS__ };                                                          \
    const struct mok_words name = { name##_word, ARRAY_SIZE(name##_word) }

WORDS(mok_device_kinds, [MOK_DEVICE_HOST] = "host", [MOK_DEVICE_CUDA] = "cuda");
WORDS(mok_dtypes, [MOK_DTYPE_BF16] = "bf16", [MOK_DTYPE_F32] = "f32");
WORDS(mok_precisions, [MOK_BF16] = "bf16", [MOK_MXFP8_PER32] = "mxfp8-per32", [MOK_MXFP8_PER128] = "mxfp8-per128");
WORDS(mok_wgrads, [MOK_WGRAD_BF16] = "bf16", [MOK_WGRAD_MXFP8] = "mxfp8");

const char *mok_word_of(const struct mok_words *words, unsigned value)
{
    return value < words->count && words->word[value] ? words->word[value] : "?";
}

unsigned mok_word_find(const struct mok_words *words, const char *word)
{
    for (unsigned value = 0; value < words->count; value++)
        if (words->word[value] && strcmp(word, words->word[value]) == 0)
            return value;
    return 0;
}

void mok_words_list(const struct mok_words *words, char *ret, size_t size)
{
    size_t used = 0;

    ret[0] = '\0';
    for (unsigned value = 0; value < words->count && used < size; value++)
        if (words->word[value])
            used += (size_t)snprintf(ret + used, size - used, "%s%s", used ? ", " : "", words->word[value]);
}

const char *mok_device_kind_text(unsigned kind)
{
    return mok_word_of(&mok_device_kinds, kind);
}

const char *mok_precision_text(unsigned precision)
{
    return mok_word_of(&mok_precisions, precision);
}

bool mok_name_is_valid(const char *name)
{
    static const char allowed[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-";
    size_t length = name ? strlen(name) : 0;
    return length >= 1 && length <= MOK_MAX_NAME && strspn(name, allowed) == length;
}
