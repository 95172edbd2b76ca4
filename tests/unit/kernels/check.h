/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How right a result has to be.
 *
 * Per array, with error(v) = |v - want| / |want| against FP64: error(product) <= error(reference) * (1.5 + 6 /
 * sqrt(n)), where the reference accumulates in FP32 with BF16 tensors and n is the number of elements (few elements
 * scatter). What is 0 by definition must be exactly 0: gradients of slots with id -1, of experts without a row, rows of
 * tokens that no expert sees.
 */
#ifndef MOK_TESTS_CHECK_H
#define MOK_TESTS_CHECK_H

#include "oracle.h"

/* Arrays are selected by bits: 1u << RESULT_OUT ... */
#define CHECK_ALL ((1u << RESULT_COUNT) - 1)
/* What no split over ranks may change: gradients of a shared expert are a rank's own. */
#define CHECK_ANY_EP ((1u << RESULT_D_SHARED_GATE) - 1)

double error_bound(double reference_error, size_t count);
/* Ends the test with a sentence that names `what` and the array. */
void check_result(const char *what, const struct problem *problem, const struct result *got, const struct result *want,
                  uint32_t arrays);
void check_zeros(const char *what, const struct problem *problem, const struct result *got, const struct result *want);
/* Both of the above against the oracle. */
void check_against_oracle(const char *what, const struct problem *problem, const struct result *got);
/*
 * For a layer in MXFP8 whose problem has MX weights: the bound is that of a reference with E4M3 operands, and errors
 * far below it mean that nothing was quantised.
 */
void check_against_mx_oracle(const char *what, const struct problem *problem, const struct result *got,
                             uint32_t precision, bool mxfp8_wgrad);
/* Ends the test unless the selected arrays of both have the same bits. */
void check_bitwise(const char *what, const struct result *got, const struct result *want, uint32_t arrays);

#endif
