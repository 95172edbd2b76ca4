/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Takes secrets out of text that is meant for a bug report. Rather too much than too little: whatever is called a key,
 * a token, a secret or a password loses its value, and so does any long word that looks like one.
 */
#ifndef MOKCTL_REDACT_H
#define MOKCTL_REDACT_H

#define REDACTED "(removed)"

/* A new text, the caller's to free; NULL: no memory. */
char *redact(const char *text);

#endif
