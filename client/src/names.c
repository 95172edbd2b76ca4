/* SPDX-License-Identifier: Apache-2.0 */
/* Names of precisions and types, for programs that take them from people and show them. Needs no session. */
#include "names.h"
#include "error.h"
#include "mok/mok.h"

static int find(const struct mok_words *words, const char *what, const char *name, uint32_t *ret)
{
    unsigned value = name ? mok_word_find(words, name) : 0;
    char list[64];

    if (!name || !ret)
        return client_fail(MOK_EARG, "%s is NULL", name ? "the place for the value" : what);
    if (!value) {
        mok_words_list(words, list, sizeof(list));
        return client_fail(MOK_EARG, "%s is \"%.64s\", must be one of %s", what, name, list);
    }
    *ret = value;
    return 0;
}

_public_ const char *mok_precision_name(uint32_t precision)
{
    return mok_word_of(&mok_precisions, precision);
}

_public_ int mok_precision_from_name(const char *name, uint32_t *ret_precision)
{
    return find(&mok_precisions, "precision", name, ret_precision);
}

_public_ const char *mok_wgrad_name(uint32_t wgrad)
{
    return mok_word_of(&mok_wgrads, wgrad);
}

_public_ int mok_wgrad_from_name(const char *name, uint32_t *ret_wgrad)
{
    return find(&mok_wgrads, "wgrad", name, ret_wgrad);
}

_public_ const char *mok_dtype_name(uint32_t dtype)
{
    return mok_word_of(&mok_dtypes, dtype);
}

_public_ int mok_dtype_from_name(const char *name, uint32_t *ret_dtype)
{
    return find(&mok_dtypes, "dtype", name, ret_dtype);
}

_public_ const char *mok_device_kind_name(uint32_t kind)
{
    return mok_word_of(&mok_device_kinds, kind);
}

_public_ int mok_device_kind_from_name(const char *name, uint32_t *ret_kind)
{
    return find(&mok_device_kinds, "device kind", name, ret_kind);
}
