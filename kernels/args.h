/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of an operation's arguments, the same in every engine. */
#ifndef MOK_KERNELS_ARGS_H
#define MOK_KERNELS_ARGS_H

#include "layer.h"
#include "mok/ring_abi.h"

/* Fills in `ret` and returns `code`. */
int mok_args_refuse(struct mok_op_result *ret, int code, uint32_t argument, int64_t value);

/* PREPARE: everything but the contents of a context. 0, or the status that *ret has. */
int mok_args_check(const struct mok_plan *plan, const struct mok_op_args *args, struct mok_op_result *ret);

/* PREPARE of a backward: a copy of the context's header, which the caller's memory no longer reaches. */
int mok_args_check_context(const struct mok_plan *plan, uint64_t hash, const struct mok_context_header *header,
                           uint32_t mode, uint32_t tokens, struct mok_op_result *ret);

/* MAIN: what the peers said. */
int mok_args_check_peers(const struct mok_plan *plan, const struct mok_op_args *args, struct mok_op_result *ret);

#endif
