/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The machine code of this library's kernels, and PTX for GPUs that are newer than the compiler, as cuLibraryLoadData
 * takes it. Nothing here refers to CUDA.
 */
#ifndef MOK_CLIENT_IMAGE_H
#define MOK_CLIENT_IMAGE_H

struct client_image {
    const void *data; /* NULL: built without nvcc */
};

extern const struct client_image client_image;

#endif
