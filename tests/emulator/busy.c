/* SPDX-License-Identifier: Apache-2.0 */
/* A client's own kernel, on the emulated GPU: its stream is busy for the time, and no SM is. */
#include "busy.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <time.h>

static void pass(void *cookie)
{
    uint64_t *ns = cookie;
    const struct timespec t = { (time_t)(*ns / 1000000000u), (long)(*ns % 1000000000u) };

    nanosleep(&t, NULL);
    free(ns);
}

int busy_launch(uint32_t blocks, uint64_t ns, void *stream)
{
    uint64_t *own = malloc(sizeof(*own));

    if (!own || blocks == 0)
        return cudaErrorInvalidValue;
    *own = ns;
    return cudaLaunchHostFunc(stream, pass, own);
}
