/* SPDX-License-Identifier: Apache-2.0 */
/* Launches a kernel so that it may be readied while the one before it in the stream still runs (see ptx.cuh). */
#ifndef MOK_CUDA_LAUNCH_CUH
#define MOK_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>
#include <stdint.h>

namespace mok {

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, uint32_t threads, size_t smem, void *stream, Arguments &&...arguments) {
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = smem;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = &early;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Arguments &&>(arguments)...);
}

} // namespace mok
#endif
