/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sentence of a thread's last failed call. Every failure of the library passes through here, once.
 * Never allocates, never logs, never forgets the code.
 */
#ifndef MOK_CLIENT_ERROR_H
#define MOK_CLIENT_ERROR_H

#include "mok/types.h"
#include "util.h"

/* Exported from libmok.so; the symbol map names the same functions. */
#define _public_ __attribute__((visibility("default")))

/* Records the sentence and returns the code, negative whatever its sign was. */
int client_fail(int code, const char *format, ...) _printf_(2, 3);

/* As client_fail, for a sentence that came from elsewhere; an empty one becomes the code's own text. */
int client_fail_text(int code, const char *text);

const char *client_last_error(void);

#endif
