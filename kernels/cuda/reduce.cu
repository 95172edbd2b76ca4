/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The last phase: out = (out +) shared + sum over k ascending of weight_k * y_k, in FP32, products and sums each rounded,
 * the total rounded to BF16 once. Of a backward: d_x, the weights 1, and d_topk_weight from where it was pushed.
 * Reads only slots of routed ids: the others were never written. One thread, eight columns of one token.
 */
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "launch.cuh"
#include "layout.h"
#include "ptx.cuh"

namespace
{

constexpr uint32_t threads = 128;
constexpr uint32_t batch = 8; /* slots in flight */

__device__ __forceinline__ void add_scaled(float (&sum)[8], uint4 v, float w)
{
    const uint32_t part[4] = { v.x, v.y, v.z, v.w };
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) {
        sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(w, __uint_as_float(part[i] << 16)));
        sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(w, __uint_as_float(part[i] & 0xffff0000u)));
    }
}

__global__ void __launch_bounds__(threads) reduce_kernel(const __grid_constant__ mok_cuda_reduce_args a)
{
    const uint32_t vectors = a.hidden / 8, column = blockIdx.y * threads + threadIdx.x;
    const uint64_t token = blockIdx.x;
    mok::let_next_kernel_start();
    mok::wait_for_previous_kernel();
    if (__ldcg(a.bad_id))
        return;
    if (a.d_topk_weight != nullptr && column < a.topk) {
        const uint64_t i = token * a.topk + column;
        a.d_topk_weight[i] = __ldg(a.ids + i) >= 0 ? __ldcs(a.weight_slots + i) : 0.0f;
    }
    if (column >= vectors)
        return;
    const uint4 *slot = static_cast<const uint4 *>(a.slots) + token * a.topk * vectors + column;
    const int32_t *ids = a.ids + token * a.topk;
    const float *weight = a.weight != nullptr ? a.weight + token * a.topk : nullptr;
    uint4 *out = static_cast<uint4 *>(a.out) + token * vectors + column;
    float sum[8] = {};
    if (a.accumulate)
        add_scaled(sum, *out, 1.0f);
    if (a.shared != nullptr)
        add_scaled(sum, __ldcs(static_cast<const uint4 *>(a.shared) + token * vectors + column), 1.0f);
    for (uint32_t k0 = 0; k0 < a.topk; k0 += batch) {
        uint4 v[batch];
        float w[batch];
        bool routed[batch];
#pragma unroll
        for (uint32_t i = 0; i < batch; i++) {
            routed[i] = k0 + i < a.topk && __ldg(ids + k0 + i) >= 0;
            w[i] = routed[i] && weight != nullptr ? __ldg(weight + k0 + i) : 1.0f;
            if (routed[i])
                v[i] = __ldcs(slot + (uint64_t)(k0 + i) * vectors);
        }
#pragma unroll
        for (uint32_t i = 0; i < batch; i++)
            if (routed[i])
                add_scaled(sum, v[i], w[i]);
    }
    *out = make_uint4(mok::pack_bf16(sum[0], sum[1]), mok::pack_bf16(sum[2], sum[3]), mok::pack_bf16(sum[4], sum[5]),
                      mok::pack_bf16(sum[6], sum[7]));
}

/* One thread: what the stream's own writes would say, but only of an operation that was done. */
__global__ void tell_kernel(const __grid_constant__ mok_cuda_tell_args a)
{
    mok::let_next_kernel_start();
    /* a trip to the host's memory, while the kernel before this one still runs */
    uint32_t *const done =
        reinterpret_cast<uint32_t *>(__ldcv(reinterpret_cast<const unsigned long long *>(&a.report->tell.done)));
    const uint32_t done_number = __ldcv(&a.report->tell.done_number), number = __ldcv(&a.report->tell.number);
    mok::wait_for_previous_kernel();
    const bool withdrawn = __ldcg(a.bad_id) == MOK_STOP_WITHDRAWN;
    __threadfence_system(); /* quick while this thread has written nothing */
    if (!withdrawn && done != nullptr)
        *static_cast<volatile uint32_t *>(done) = done_number;
    *a.bad_id = MOK_STOP_NONE;
    a.report->withdrawn = withdrawn;
    __threadfence_system();
    *static_cast<volatile uint32_t *>(&a.report->ended) = number;
}

__global__ void clock_kernel(uint64_t *to)
{
    *to = mok::timer_ns();
}

} // namespace

extern "C" int mok_cuda_launch_clock(uint64_t *to, void *stream)
{
    return mok::launch(false, clock_kernel, dim3(1), 1, 0, stream, to);
}

extern "C" int mok_cuda_launch_tell(const mok_cuda_tell_args *args, void *stream)
{
    return mok::launch(true, tell_kernel, dim3(1), 1, 0, stream, *args);
}

extern "C" int mok_cuda_launch_reduce(const mok_cuda_reduce_args *args, void *stream)
{
    if (args->tokens == 0)
        return 0;
    dim3 grid(args->tokens, (args->hidden / 8 + threads - 1) / threads);
    return mok::launch(false, reduce_kernel, grid, threads, 0, stream, *args);
}
