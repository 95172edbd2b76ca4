/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a process: its wall clock is off by as many seconds as the file $MOK_TEST_CLOCK says, from the moment
 * that it says so. The monotonic clock stays.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

__attribute__((visibility("default"))) int clock_gettime(clockid_t clock, struct timespec *ret)
{
    long r = syscall(SYS_clock_gettime, clock, ret);
    const char *path = clock == CLOCK_REALTIME ? getenv("MOK_TEST_CLOCK") : NULL;
    FILE *file = path ? fopen(path, "re") : NULL;
    long seconds = 0;

    if (file && fscanf(file, "%ld", &seconds) == 1)
        ret->tv_sec += seconds;
    if (file)
        fclose(file);
    return (int)r;
}
