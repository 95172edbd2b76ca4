/* SPDX-License-Identifier: Apache-2.0 */
/* Tables for people: columns as wide as what is in them. What others wrote cannot tell a terminal what to do. */
#ifndef MOKCTL_TABLE_H
#define MOKCTL_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "util.h"

#define TABLE_MAX_COLUMNS 12

/* Cells of a table, row by row; the first row is the head. */
struct table {
    size_t columns, cells, capacity;
    char **cell;
    bool failed; /* for want of memory */
};

void table_clear(struct table *table);
#define _cleanup_table_ __attribute__((cleanup(table_clear)))

void table_head(struct table *table, size_t columns, const char *const *names);
void table_put(struct table *table, const char *format, ...) _printf_(2, 3);
void table_put_bytes(struct table *table, uint64_t bytes); /* with a binary unit */
/* 0, or -MOK_ENOMEM with the sentence. */
int table_write(const struct table *table, FILE *out);
int table_print(const struct table *table); /* to standard output */

#endif
