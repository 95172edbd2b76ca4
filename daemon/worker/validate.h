/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether what a client asks for can run. Looks only at the worker's own copy of a submission, never at memory that
 * the client can change, and changes nothing: a refusal has no effect on anyone.
 */
#ifndef MOK_WORKER_VALIDATE_H
#define MOK_WORKER_VALIDATE_H

#include "control.pb-c.h"
#include "tables.h"

/* Why a submission is refused; the fields of the completion that says so. */
struct worker_fault {
    int code;          /* -MOK_E* */
    uint16_t argument; /* enum mok_argument */
    uint64_t value, bound, detail;
};

/*
 * Checks a copied submission of `queue`. On success fills in opcode, context_mode, flags, tokens, timeout, user_data,
 * layer and regions of `ret_op`; else returns the code and fills in `ret_fault`. `tables` are the dispatcher's.
 */
int worker_validate(const struct worker_tables *tables, const struct worker_queue *queue, const struct mok_sqe *sqe,
                    struct worker_op *ret_op, struct worker_fault *ret_fault);

/*
 * Checks parameters that a session wants to bind to a layer; `tables` are the control thread's. Fills in
 * ret_span[WORKER_PARAM_COUNT], or returns -MOK_E* and the sentence.
 */
int worker_validate_params(const struct worker_tables *tables, const struct worker_layer *layer,
                           const Mok__LayerParams *params, struct worker_span *ret_span, struct mok_message *message);

/* Whether two spans share a byte. */
bool worker_spans_overlap(const struct worker_span *a, const struct worker_span *b);

#endif
