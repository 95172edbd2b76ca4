/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Between mok_mxfp8_quantize_on_stream and its kernel. A block takes squares of 128 x 128 values of a matrix; numbers
 * of squares beyond a grid's bounds are taken in turns. Compiles as C and as CUDA C.
 */
#ifndef MOK_CLIENT_QUANTIZE_H
#define MOK_CLIENT_QUANTIZE_H

#include <stdint.h>

#define QUANTIZE_SIDE 128u
#define QUANTIZE_THREADS 256u
/* Codes of a square, the largest magnitudes of its columns by warp, and what the columns are multiplied by. */
#define QUANTIZE_CODE_BYTES (QUANTIZE_SIDE * QUANTIZE_SIDE)
#define QUANTIZE_MAXIMA_BYTES (QUANTIZE_THREADS / 32 * QUANTIZE_SIDE * 4)
#define QUANTIZE_INVERSE_BYTES (QUANTIZE_SIDE / 32 * QUANTIZE_SIDE * 4)
#define QUANTIZE_SHARED_BYTES (QUANTIZE_CODE_BYTES + QUANTIZE_MAXIMA_BYTES + QUANTIZE_INVERSE_BYTES)

/* Addresses and row lengths allow access to more than one element at a time. */
#define QUANTIZE_WIDE_VALUES (1u << 0)     /* 16 bytes */
#define QUANTIZE_WIDE_DATA (1u << 1)       /* 8 */
#define QUANTIZE_WIDE_TRANSPOSED (1u << 2) /* 16 */
#define QUANTIZE_WIDE_SCALES (1u << 3)     /* 4 */
#define QUANTIZE_WIDE_TRANSPOSED_SCALES (1u << 4)

struct quantize_args {
    const void *values;     /* [matrices][rows][columns] */
    uint8_t *data, *scales; /* or NULL, both */
    uint8_t *transposed;    /* [matrices][columns][rows], or NULL */
    uint8_t *transposed_scales;
    uint64_t matrices, rows, columns;
    uint32_t group; /* values of a row with one scale: 32 or 128 */
    uint32_t wide;  /* QUANTIZE_WIDE_* */
};

#endif
