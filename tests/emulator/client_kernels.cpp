/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libmok's kernels on the emulated GPU: the image that libmok loads is this file's word that there is one, and their
 * names lead to their C++ functions. Linked before libmok's own image, it takes its place.
 */
#include "cuda.h"
#include "cuda_runtime.h"
#include "quantize.h"

extern "C" {
#include "image.h"

void mok_quantize_bf16(quantize_args a);
void mok_quantize_bf16_tiles(quantize_args a);
void mok_quantize_f32(quantize_args a);
void mok_quantize_f32_tiles(quantize_args a);

extern const struct client_image client_image;
const struct client_image client_image = { "emulated" };
}

namespace
{

template <void (*kernel)(quantize_args)>
int run(const uint32_t grid[3], const uint32_t block[3], uint32_t shared_bytes, CUstream stream, void **parameters)
{
    const quantize_args args = *static_cast<const quantize_args *>(parameters[0]);
    return emu::launch(reinterpret_cast<const void *>(kernel), dim3(grid[0], grid[1], grid[2]),
                       dim3(block[0], block[1], block[2]), shared_bytes, stream, false, [args] { kernel(args); });
}

[[gnu::constructor]] void make_known()
{
    emulated_kernel("mok_quantize_bf16", run<mok_quantize_bf16>);
    emulated_kernel("mok_quantize_bf16_tiles", run<mok_quantize_bf16_tiles>);
    emulated_kernel("mok_quantize_f32", run<mok_quantize_f32>);
    emulated_kernel("mok_quantize_f32_tiles", run<mok_quantize_f32_tiles>);
}

} // namespace
