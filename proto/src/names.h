/* SPDX-License-Identifier: Apache-2.0 */
/* Texts for the numbers of the ABI, and the rule for names that people choose. */
#ifndef MOK_NAMES_H
#define MOK_NAMES_H

#include <stdbool.h>

const char *mok_error_text(int code);     /* either sign; never NULL */
const char *mok_error_symbol(int code);   /* "MOK_ERANGE"; "0"; "MOK_E?" */
const char *mok_argument_text(int argument); /* enum mok_argument */
const char *mok_device_kind_text(unsigned kind);
const char *mok_precision_text(unsigned precision);

/* [A-Za-z0-9._-]{1,MOK_MAX_NAME} */
bool mok_name_is_valid(const char *name);

#endif
