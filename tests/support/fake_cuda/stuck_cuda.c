/* SPDX-License-Identifier: Apache-2.0 */
/* A libcuda.so.1 that waits for a fabric which never comes up. */
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int cuInit(unsigned flags);
EXPORT int cuDriverGetVersion(int *ret);
EXPORT int cuDeviceGetCount(int *ret);

int cuInit(unsigned flags)
{
    (void)flags;
    for (;;)
        pause();
}

int cuDriverGetVersion(int *ret)
{
    *ret = 0;
    return 0;
}

int cuDeviceGetCount(int *ret)
{
    *ret = 0;
    return 0;
}
