/* SPDX-License-Identifier: Apache-2.0 */
/* Command lines of tests. */
#ifndef MOK_TEST_SHELL_H
#define MOK_TEST_SHELL_H

/* What a command line prints, to be freed; its exit code in *ret_code. */
char *shell_output(int *ret_code, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
