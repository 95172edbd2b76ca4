/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loads a directory of test vectors: layers.json with NAME.bin beside it, and mx.json. Any directory of the same
 * generator will do. Everything read is checked against the file's size; a malformed one is an error, not a crash.
 */
#ifndef MOK_TESTS_VECTORS_H
#define MOK_TESTS_VECTORS_H

#include "oracle.h"
#include "problem.h"

struct vector_case {
    char name[64];
    struct problem problem;
    struct result want;
    uint32_t has; /* bit a: result_array a was in the file */
};

struct vector_set {
    struct vector_case *cases;
    size_t count;
};

/* The directory to test: $MOK_VECTORS, else the one in the source tree. */
const char *vectors_directory(void);
/* 0, or -1 with a sentence on stderr. */
int vectors_load(const char *directory, struct vector_set *ret);
void vectors_free(struct vector_set *set);

#define MX_NO_SCALE INT32_MIN /* a group of zeros: any scale will do */
struct mx_vectors {
    uint32_t rows, columns;
    uint16_t *bf16; /* [rows][columns] */
    struct mx_rule {
        uint32_t groups;   /* of a row */
        int32_t *exponent; /* [rows][groups]; MX_NO_SCALE */
        uint8_t *code;     /* [rows][columns] */
    } per32, per128;
};
int mx_vectors_load(const char *directory, struct mx_vectors *ret);
void mx_vectors_free(struct mx_vectors *vectors);

#endif
