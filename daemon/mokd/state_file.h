/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that holds one blob of bytes and survives being cut off while a new one is written: two places by turns, each
 * with a sequence number and a checksum. A reader takes the newest that is whole. Knows nothing of what the bytes mean.
 */
#ifndef MOKD_STATE_FILE_H
#define MOKD_STATE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "error.h"

/* Version of the file and of what cannot be understood without knowing it; the bytes inside evolve by themselves. */
#ifndef MOKD_STATE_FORMAT /* a test builds a mokd of another format */
#define MOKD_STATE_FORMAT 1u
#endif
#define MOKD_STATE_MAX_BYTES (8u << 20)

/* An empty file of a fixed size. -MOK_EFDS, -MOK_ENOMEM, -MOK_EIO. */
int mokd_state_file_create(int *ret_fd);
/* Puts a blob in place of the older one; `sequence` is higher than that of any before. -MOK_ESIZE, -MOK_ENOMEM. */
int mokd_state_file_write(int fd, uint64_t sequence, const void *bytes, size_t size);
/* Nothing in the file is to be believed any more. */
void mokd_state_file_spoil(int fd);
/*
 * The newest whole blob, to be freed, and its sequence number. -MOK_ENOENT: nothing was ever written; -MOK_EPROTO: what
 * is there is not such a file, or damaged; -MOK_EVERSION: of another format; -MOK_ENOMEM. With the sentence.
 */
int mokd_state_file_read(int fd, void **ret_bytes, size_t *ret_size, uint64_t *ret_sequence, struct mokd_error *error);

#endif
