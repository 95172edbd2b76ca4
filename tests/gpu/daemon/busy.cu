/* SPDX-License-Identifier: Apache-2.0 */
/* What a client's own kernels look like to a test: some blocks that are busy for a given time. */
#include "busy.h"

#include <stdint.h>

__global__ void busy(uint64_t ns)
{
    uint64_t from, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(from));
    do {
        __nanosleep(200);
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - from < ns);
}

extern "C" int busy_launch(uint32_t blocks, uint64_t ns, void *stream)
{
    busy<<<blocks, 128, 0, (cudaStream_t)stream>>>(ns);
    return (int)cudaGetLastError();
}
