/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The checkpoint file: header, one hash a section, then the sections. Section 0 holds the dense parameters, section
 * 1 + layer * experts + expert one expert; each is a run of FP32 tensors (value, first, second moment). The layout does
 * not depend on the number of ranks. A file is complete or absent: it is written as FILE.tmp and renamed.
 */
#ifndef EXAMPLE_CHECKPOINT_H
#define EXAMPLE_CHECKPOINT_H

#include <stddef.h>
#include <stdint.h>

#include "optimizer.h"

#define CHECKPOINT_MAGIC 0x4e494152544b4f4dull /* "MOKTRAIN" in memory */
#define CHECKPOINT_VERSION 2u

/* Everything but `step` and `hash` must be the same in the run that resumes. */
struct checkpoint_header {
    uint64_t magic;
    uint32_t version;
    uint32_t hidden, intermediate, experts, topk, layers, window, shared_intermediate;
    uint32_t seq, micro_batches;
    uint64_t sequences; /* of a step, over all ranks */
    uint64_t seed, text_hash, dense_floats;
    uint32_t precision, wgrad; /* enum mok_precision (the rule of scales too), enum mok_wgrad: never 0 */
    uint64_t step; /* steps that were done */
    uint64_t hash; /* of this header with hash 0 */
};

struct checkpoint {
    int fd;
    int writing;
    char *path, *temporary;
    struct checkpoint_header header;
};

/* Creates FILE.tmp at its full size (one rank), or opens it for writing (the others, afterwards). */
int checkpoint_create(const char *path, const struct checkpoint_header *header, struct checkpoint *ret);
int checkpoint_join(const char *path, const struct checkpoint_header *header, struct checkpoint *ret);
/* Writes one section: `count` tensors, each as value, first, second. Different sections may be written at once. */
int checkpoint_write(struct checkpoint *checkpoint, uint64_t section, const struct adamw_tensor *tensors, size_t count);
/* Everybody who wrote calls checkpoint_sync; after all have, one calls checkpoint_commit: FILE is the new one. */
int checkpoint_sync(struct checkpoint *checkpoint);
int checkpoint_commit(struct checkpoint *checkpoint);

/*
 * Opens FILE for reading. -MOK_EMISMATCH names the first field in which it differs from `expected` (whose step and
 * hash do not count); -MOK_EIO: no such file, truncated, or damaged.
 */
int checkpoint_open(const char *path, const struct checkpoint_header *expected, struct checkpoint *ret);
/* Reads a section and checks its hash. */
int checkpoint_read(struct checkpoint *checkpoint, uint64_t section, const struct adamw_tensor *tensors, size_t count);

/* Closes; a file that was being written and not committed is removed when `discard`. Zeroed is fine, fd -1 too. */
void checkpoint_close(struct checkpoint *checkpoint, int discard);

#endif
