/* SPDX-License-Identifier: Apache-2.0 */
/* The status page, status.html: one file that needs nothing else but /status.json. */
#ifndef MOKD_STATUS_PAGE_H
#define MOKD_STATUS_PAGE_H

#include <stddef.h>

/* The page, with `word` (32 bytes) where its policy wants one; to be freed with free(). NULL: no memory. */
char *mokd_status_page(const char *word, size_t *ret_length);

#endif
