/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "workload.h"

void gpu_or_skip(void)
{
#ifndef MOK_EMULATED
    if (access("/dev/nvidia0", F_OK) < 0 && access("/dev/dxg", F_OK) < 0) {
        fprintf(stderr, "skipped: no NVIDIA GPU here\n");
        exit(77);
    }
#endif
}

/* A buffer is mapped for its own GPU alone, so that one has to copy. */
static cudaError_t choose_gpu_of(const void *memory)
{
    struct cudaPointerAttributes a;
    cudaError_t e = cudaPointerGetAttributes(&a, memory);

    return e == cudaSuccess && a.type == cudaMemoryTypeDevice ? cudaSetDevice(a.device) : e;
}

static void copy(void *to, const void *from, uint64_t bytes)
{
    cudaError_t e = choose_gpu_of(to);

    if (e == cudaSuccess)
        e = choose_gpu_of(from);
    if (e == cudaSuccess)
        e = cudaMemcpy(to, from, bytes, cudaMemcpyDefault);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(NULL); /* a copy to the GPU may return before its last bytes are there */
    if (e == cudaSuccess)
        return;
    fprintf(stderr, "copying %llu bytes: %s\n", (unsigned long long)bytes, cudaGetErrorString(e));
    abort();
}

void gpu_copies(void)
{
    workload_copy = copy;
}

int gpu_mps(void)
{
    return getenv("MOK_TEST_MPS_PIPE") != NULL;
}

unsigned gpu_count(void)
{
    char path[32];
    unsigned count = 0;

    do
        snprintf(path, sizeof(path), "/dev/nvidia%u", count);
    while (access(path, F_OK) == 0 && ++count < 64);
    return count ? count : 1;
}

const char *gpu_daemon_lines(void)
{
    static char lines[400];

    if (!gpu_mps())
        return NULL;
    snprintf(lines, sizeof(lines), "sharing = mps\nmps_pipe = %s", getenv("MOK_TEST_MPS_PIPE"));
    return lines;
}

int gpu_stack_start(struct stack *stack, unsigned gpus, unsigned hosts)
{
    struct stack_options options = {
        .gpus = gpus, .devices = hosts, .threads = 2, .poll_us = 100, .daemon = gpu_daemon_lines()
    };

    return stack_start(stack, &options);
}
