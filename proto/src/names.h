/* SPDX-License-Identifier: Apache-2.0 */
/* Texts for the numbers of the ABI, and the rule for names that people choose. */
#ifndef MOK_NAMES_H
#define MOK_NAMES_H

#include <stdbool.h>
#include <stddef.h>

const char *mok_error_text(int code);     /* either sign; never NULL */
const char *mok_error_symbol(int code);   /* "MOK_ERANGE"; "0"; "MOK_E?" */
const char *mok_argument_text(int argument); /* enum mok_argument */

/* What people write for the values of an enumeration. None of these has a value 0. */
struct mok_words {
    const char *const *word; /* by value; NULL: there is no such value */
    unsigned count;
};
extern const struct mok_words mok_device_kinds, mok_dtypes, mok_precisions, mok_wgrads;

const char *mok_word_of(const struct mok_words *words, unsigned value);     /* "?" for none */
unsigned mok_word_find(const struct mok_words *words, const char *word);    /* 0: none */
void mok_words_list(const struct mok_words *words, char *ret, size_t size); /* "bf16, mxfp8" */

const char *mok_device_kind_text(unsigned kind);
const char *mok_precision_text(unsigned precision);

/* [A-Za-z0-9._-]{1,MOK_MAX_NAME} */
bool mok_name_is_valid(const char *name);

#endif
