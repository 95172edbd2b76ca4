/* SPDX-License-Identifier: Apache-2.0 */
/* Turns the numbers of a completion into the sentence that people read. Looks at nothing but its arguments. */
#ifndef MOK_CLIENT_DESCRIBE_H
#define MOK_CLIENT_DESCRIBE_H

#include <stddef.h>
#include <stdint.h>

#include "mok/ring_abi.h"

/* `opcode`: enum mok_opcode of the operation that failed. */
void describe_completion(unsigned opcode, const struct mok_cqe *cqe, char *ret_text, size_t capacity);

/* "rank 3", "ranks 1, 3 and 17"; "no rank" for none. */
void describe_ranks(const uint32_t *ranks, size_t count, char *ret_text, size_t capacity);

#endif
