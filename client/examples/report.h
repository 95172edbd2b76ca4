/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How the example tells people what went wrong: one line on stderr that names the rank. Never exits by itself.
 */
#ifndef EXAMPLE_REPORT_H
#define EXAMPLE_REPORT_H

/* Prefix of the lines of this process: -1 for the launcher, else the rank. */
void report_set_rank(int rank);

/* Prints "train_moe_lm: rank R: sentence" and returns `code`, so that a failure is one statement. */
int fail(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The same for things worth saying that are no failure. */
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
