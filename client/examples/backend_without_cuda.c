/* SPDX-License-Identifier: Apache-2.0 */
/* Stands for backend_cuda.c where there is no nvcc. */
#include "backend.h"

const struct backend *backend_cuda(void)
{
    return NULL;
}
