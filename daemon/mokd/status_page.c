/* SPDX-License-Identifier: Apache-2.0 */
#include "status_page.h"

#include <stdlib.h>
#include <string.h>

/* The file as it is. In the source it has 32 times W wherever the word goes. */
__asm__(".pushsection .rodata\n"
        "mokd_status_html:\n"
        ".incbin \"" MOKD_STATUS_HTML "\"\n"
        "mokd_status_html_end:\n"
        ".byte 0\n"
        ".popsection\n");
extern const char mokd_status_html[], mokd_status_html_end[];

#define MARK "WWWWWWWWWWWWWWWWWWWWWWWWWWWWWWWW"

char *mokd_status_page(const char *word, size_t *ret_length)
{
    size_t length = (size_t)(mokd_status_html_end - mokd_status_html);
    char *page = malloc(length + 1);

    if (!page)
        return NULL;
    memcpy(page, mokd_status_html, length + 1);
    for (char *mark = strstr(page, MARK); mark; mark = strstr(mark, MARK))
        memcpy(mark, word, sizeof(MARK) - 1);
    *ret_length = length;
    return page;
}
