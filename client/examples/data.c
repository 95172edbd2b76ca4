/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads the text once, before the ranks are forked. Never writes it.
 */
#include "data.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "mok/types.h"
#include "ops.h"
#include "report.h"

#define TEXT_MAX ((size_t)1 << 30)

/* Whole stream into memory that grows by doubling, so that pipes work as well as files. */
static int read_all(FILE *file, const char *path, struct text *text)
{
    size_t capacity = 0;

    for (;;) {
        size_t got;

        if (text->size == capacity) {
            uint8_t *grown;

            capacity = capacity ? 2 * capacity : 1 << 16;
            if (capacity > 2 * TEXT_MAX)
                return fail(-MOK_ERANGE, "--text %s: more than %zu bytes", path, TEXT_MAX);
            grown = realloc(text->bytes, capacity);
            if (!grown)
                return fail(-MOK_ENOMEM, "--text %s: no memory for %zu bytes", path, capacity);
            text->bytes = grown;
        }
        got = fread(text->bytes + text->size, 1, capacity - text->size, file);
        text->size += got;
        if (got == 0)
            break;
    }
    if (ferror(file))
        return fail(-MOK_EIO, "--text %s: %s", path, strerror(errno));
    if (text->size > TEXT_MAX)
        return fail(-MOK_ERANGE, "--text %s: %zu bytes, at most %zu", path, text->size, TEXT_MAX);
    return 0;
}

int text_read(const char *path, size_t window, size_t seq, struct text *ret)
{
    struct text text = { 0 };
    FILE *file = fopen(path, "re");
    int rc;

    if (!file)
        return fail(-MOK_EIO, "--text %s: %s", path, strerror(errno));
    rc = read_all(file, path, &text);
    fclose(file);
    if (rc == 0 && text.size < window + seq + 1)
        rc = fail(-MOK_ESIZE, "--text %s: %zu bytes, a sequence needs %zu (window %zu + seq %zu + 1)", path, text.size,
                  window + seq + 1, window, seq);
    if (rc < 0) {
        text_free(&text);
        return rc;
    }
    text.hash = ops_hash(OPS_HASH_START, text.bytes, text.size);
    *ret = text;
    return 0;
}

void text_free(struct text *text)
{
    free(text->bytes);
    *text = (struct text){ 0 };
}
