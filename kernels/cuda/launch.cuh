/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Launches kernels. An `early` one may be readied while the one before it in the stream still runs (see ptx.cuh); until
 * then it keeps kernels of other streams from starting too, so nothing is early after a kernel that runs long.
 */
#ifndef MOK_CUDA_LAUNCH_CUH
#define MOK_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stdint.h>

namespace mok
{

template <class... Parameters, class... Arguments>
int launch(bool early, void (*kernel)(Parameters...), dim3 grid, uint32_t threads, size_t smem, void *stream,
           Arguments &&...arguments)
{
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &attribute;
    config.numAttrs = early ? 1 : 0;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments &&>(arguments)...);
}

} // namespace mok
#endif
