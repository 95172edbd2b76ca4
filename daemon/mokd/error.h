/* SPDX-License-Identifier: Apache-2.0 */
/* A code and the sentence that goes with it, as it travels from where a thing failed to whoever is told. */
#ifndef MOKD_ERROR_H
#define MOKD_ERROR_H

#include "server.h"

struct mokd_error {
    int code; /* -MOK_E*; 0: none */
    char text[MOKD_TEXT_MAX];
};

/* Sets both and returns the code, so that `return mokd_error_set(error, -MOK_ERANGE, "size %u: ...")` reads well. */
int mokd_error_set(struct mokd_error *error, int code, const char *format, ...) _printf_(3, 4);

#endif
