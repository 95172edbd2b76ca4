/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of kernels share: how one is launched, sums inside a warp, a block's shared memory. */
#ifndef EXAMPLE_LAUNCH_CUH
#define EXAMPLE_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

constexpr uint32_t BLOCK = 256, WARP = 32, WARPS = BLOCK / WARP;

/* A thread's elements are `stride` apart, so that neighbours read neighbours. */
struct range {
    size_t first, stride;
};

__device__ inline range elements()
{
    return { static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x, static_cast<size_t>(gridDim.x) * blockDim.x };
}

/* The sum over a warp, in all its lanes, always in the same order. */
__device__ inline float warp_sum(float v)
{
    for (int with = WARP / 2; with; with /= 2)
        v += __shfl_xor_sync(~0u, v, with);
    return v;
}

__device__ inline float *block_memory()
{
#ifdef MOK_EMULATED
    return reinterpret_cast<float *>(::emu::shared_base());
#else
    extern __shared__ __align__(16) float memory[];
    return memory;
#endif
}

inline uint32_t blocks_of(size_t count, size_t each)
{
    return static_cast<uint32_t>((count + each - 1) / each);
}

/* Enough for element-wise work of any length. */
inline uint32_t blocks_for(size_t count)
{
    const size_t most = 2048, wanted = (count + 4 * BLOCK - 1) / (4 * BLOCK);
    return static_cast<uint32_t>(wanted < most ? (wanted ? wanted : 1) : most);
}

template <class... Parameters, class... Arguments>
int launch(void *stream, void (*kernel)(Parameters...), dim3 grid, uint32_t threads, size_t shared,
           Arguments... arguments)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

#endif
