/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Glue kernels of the strong PyTorch baseline (strong.py): everything of an unfused MoE layer that is no GEMM, at the
 * speed of memory and without a host's help. Slots (token, k) are what is routed: a token that names an expert twice has
 * two rows. All results are in a fixed order, so a repeat gives the same bits. Comparator only, not part of the product.
 */
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

constexpr int kThreads = 256;      /* of most kernels */
constexpr int kPlanThreads = 1024; /* of number_slots */
constexpr int kSlotsOfThread = 8;  /* that a thread of number_slots looks at in one go */
constexpr int kMaxExperts = 1024;  /* of a rank */
constexpr int kMaxTopk = 64;
constexpr int kMaxRanks = 16;
constexpr int kMaxSegments = 4;
constexpr int kWave = 132 * 8; /* blocks of kernels that stride over rows */
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ void unpack(const uint4 &packed, float *values)
{
    const __nv_bfloat162 *pair = reinterpret_cast<const __nv_bfloat162 *>(&packed);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 both = __bfloat1622float2(pair[i]);
        values[2 * i] = both.x;
        values[2 * i + 1] = both.y;
    }
}

__device__ __forceinline__ uint4 pack(const float *values)
{
    uint4 packed;
    __nv_bfloat162 *pair = reinterpret_cast<__nv_bfloat162 *>(&packed);
#pragma unroll
    for (int i = 0; i < 4; i++)
        pair[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    return packed;
}

__device__ __forceinline__ float sigmoid(float a)
{
    return 1.0f / (1.0f + __expf(-a));
}

/* Sum over this lane and those before it. */
__device__ __forceinline__ int scan_of_warp(int value)
{
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kAll, value, step);
        value += lane >= step ? other : 0;
    }
    return value;
}

/* ------------------------------------------------------------------ plan */

/* Block e: how many slots of local expert e come before each of its slots, and how many it has. */
__global__ void __launch_bounds__(kPlanThreads)
number_slots(const int *ids, int slots, int first, int *place, int *count)
{
    __shared__ int of_warp[32];
    const int expert = first + blockIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int before = 0;

    for (int base = 0; base < slots; base += kPlanThreads * kSlotsOfThread) {
        const int at = base + threadIdx.x * kSlotsOfThread;
        unsigned hits = 0;
        if (at + kSlotsOfThread <= slots) {
            const int4 low = *reinterpret_cast<const int4 *>(ids + at), high = *reinterpret_cast<const int4 *>(ids + at + 4);
            hits = (low.x == expert) | (low.y == expert) << 1 | (low.z == expert) << 2 | (low.w == expert) << 3 |
                   (high.x == expert) << 4 | (high.y == expert) << 5 | (high.z == expert) << 6 | (high.w == expert) << 7;
        } else {
            for (int j = 0; at + j < slots; j++)
                hits |= (unsigned)(ids[at + j] == expert) << j;
        }
        const int mine = __popc(hits), scan = scan_of_warp(mine);
        if (lane == 31)
            of_warp[warp] = scan;
        __syncthreads();
        int offset = 0, total = 0;
#pragma unroll
        for (int w = 0; w < 32; w++) {
            const int its = of_warp[w];
            offset += w < warp ? its : 0;
            total += its;
        }
        int next = before + offset + scan - mine;
        for (int j = 0; j < kSlotsOfThread; j++)
            if (hits >> j & 1)
                place[at + j] = next++;
        before += total;
        __syncthreads();
    }
    if (threadIdx.x == 0)
        count[blockIdx.x] = before;
}

/*
 * Each local expert's rows begin at a multiple of `align`; one without rows has padding alone, so that its weight
 * gradients are sums of zeros and not what memory held. Writes the row of each slot (-1: not of this rank), the slot
 * of each row (-1: padding), and where each expert's rows end. Slots of others get a router gradient of 0.
 */
__global__ void __launch_bounds__(kThreads)
lay_out(const int *ids, int slots, int first, int experts, int align, const int *place, const int *count, int *row,
        int *slot, int *end, float *d_weight)
{
    __shared__ int start[kMaxExperts + 1];

    if (threadIdx.x < 32) {
        int carry = 0;
        for (int e = threadIdx.x; e - (int)threadIdx.x < experts; e += 32) {
            const int rows = e < experts ? (max(count[e], 1) + align - 1) / align * align : 0;
            const int scan = scan_of_warp(rows);
            if (e < experts)
                start[e + 1] = carry + scan;
            carry += __shfl_sync(kAll, scan, 31);
        }
        if (threadIdx.x == 0)
            start[0] = 0;
    }
    __syncthreads();
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < slots) {
        const int e = ids[i] - first;
        const bool local = e >= 0 && e < experts;
        const int its = local ? start[e] + place[i] : -1;
        row[i] = its;
        if (local)
            slot[its] = i;
        else if (d_weight)
            d_weight[i] = 0.0f;
    }
    if (i < experts * align) {
        const int e = i / align, r = start[e] + count[e] + i % align;
        if (r < start[e + 1])
            slot[r] = -1;
    }
    if (i < experts)
        end[i] = start[i + 1];
}

/* ------------------------------------------------------------------ rows */

/* Blocks below `tokens`: a token's values to all its rows here. The others: zeros to the padding. */
__global__ void __launch_bounds__(kThreads)
expand(const uint4 *x, int tokens, int width, int topk, int align, const int *row, const int *count, const int *end, uint4 *rows)
{
    __shared__ int target[kMaxTopk];
    const int b = blockIdx.x;

    if (b >= tokens) {
        const int e = (b - tokens) / align, r = (e ? end[e - 1] : 0) + count[e] + (b - tokens) % align;
        if (r < end[e])
            for (int c = threadIdx.x; c < width; c += kThreads)
                rows[(int64_t)r * width + c] = make_uint4(0, 0, 0, 0);
        return;
    }
    if (threadIdx.x < topk)
        target[threadIdx.x] = row[(int64_t)b * topk + threadIdx.x];
    __syncthreads();
    for (int c = threadIdx.x; c < width; c += 4 * kThreads) {
        uint4 value[4];
#pragma unroll
        for (int u = 0; u < 4; u++)
            if (c + u * kThreads < width)
                value[u] = __ldg(x + (int64_t)b * width + c + u * kThreads);
        for (int k = 0; k < topk; k++) {
            if (target[k] < 0)
                continue;
            uint4 *to = rows + (int64_t)target[k] * width + c;
#pragma unroll
            for (int u = 0; u < 4; u++)
                if (c + u * kThreads < width)
                    to[u * kThreads] = value[u];
        }
    }
}

/* act = silu(gate) * up; a row of `h` is [gate | up]. Padding is zero and stays so. */
__global__ void __launch_bounds__(kThreads) swiglu(const uint4 *h, unsigned width, const int *rows, uint4 *act)
{
    const int64_t all = (int64_t)*rows * width;

    for (int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x; i < all; i += (int64_t)gridDim.x * kThreads) {
        const int64_t r = all < (1ll << 32) ? (unsigned)i / width : i / width, gate = r * width + i;
        float a[8], b[8];
        unpack(__ldg(h + gate), a);
        unpack(__ldg(h + gate + width), b);
#pragma unroll
        for (int j = 0; j < 8; j++)
            b[j] *= a[j] * sigmoid(a[j]);
        act[i] = pack(b);
    }
}

/*
 * One warp a row, from d = d(h) of the unweighted output: d_h = [d_gate | d_up] and weight * act, both weighted, and
 * the router gradient <act, d> of the row's slot.
 */
__global__ void __launch_bounds__(kThreads)
swiglu_backward(const uint4 *h, const uint4 *d, int width, const int *rows, const int *slot, const float *weight, uint4 *d_h,
                uint4 *weighted, float *d_weight)
{
    const int lane = threadIdx.x & 31, warps = gridDim.x * (kThreads / 32), all = *rows;

    for (int r = blockIdx.x * (kThreads / 32) + (threadIdx.x >> 5); r < all; r += warps) {
        const int its = slot[r];
        const float w = its < 0 ? 0.0f : weight[its];
        const int64_t gate = (int64_t)r * 2 * width, up = gate + width;
        float sum = 0;
#pragma unroll 2
        for (int c = lane; c < width; c += 32) {
            float a[8], b[8], g[8], act[8];
            unpack(__ldg(h + gate + c), a);
            unpack(__ldg(h + up + c), b);
            unpack(__ldg(d + (int64_t)r * width + c), g);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const float s = sigmoid(a[j]), silu = a[j] * s, value = silu * b[j], scaled = g[j] * w;
                sum += value * g[j];
                act[j] = value * w;
                a[j] = scaled * b[j] * (s + silu * (1.0f - s));
                b[j] = scaled * silu;
            }
            d_h[gate + c] = pack(a);
            d_h[up + c] = pack(b);
            weighted[(int64_t)r * width + c] = pack(act);
        }
#pragma unroll
        for (int step = 16; step; step /= 2)
            sum += __shfl_xor_sync(kAll, sum, step);
        if (lane == 0 && its >= 0)
            d_weight[its] = sum;
    }
}

/* out[token] = sum over k ascending of weight * its row here; weight NULL: 1. kChunk rows are in flight at once. */
template <int kChunk>
__global__ void __launch_bounds__(kThreads)
reduce(const uint4 *rows, int width, int topk, const int *row, const float *weight, uint4 *out)
{
    const int64_t first = (int64_t)blockIdx.x * topk;

    for (int c = threadIdx.x; c < width; c += kThreads) {
        float sum[8] = {};
        for (int k = 0; k < topk; k += kChunk) {
            uint4 value[kChunk];
            float w[kChunk];
#pragma unroll
            for (int j = 0; j < kChunk; j++) {
                const int r = k + j < topk ? __ldg(row + first + k + j) : -1;
                value[j] = r < 0 ? make_uint4(0, 0, 0, 0) : __ldg(rows + (int64_t)r * width + c);
                w[j] = !weight ? 1.0f : k + j < topk ? __ldg(weight + first + k + j) : 0.0f;
            }
#pragma unroll
            for (int j = 0; j < kChunk; j++) {
                float one[8];
                unpack(value[j], one);
#pragma unroll
                for (int i = 0; i < 8; i++)
                    sum[i] += w[j] * one[i];
            }
        }
        out[(int64_t)blockIdx.x * width + c] = pack(sum);
    }
}

/* ------------------------------------------------------------------ between ranks */

struct segments {
    const uint4 *from[kMaxSegments];
    int64_t vectors[kMaxSegments];
    uint4 *to[kMaxSegments][kMaxRanks];
    int segments, ranks;
};

/* Each segment to all ranks, read once. */
__global__ void __launch_bounds__(512) push(const segments all)
{
    const int64_t step = (int64_t)gridDim.x * blockDim.x;

    for (int s = 0; s < all.segments; s++) {
        const int64_t n = all.vectors[s];
        for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 4 * step) {
            uint4 value[4];
#pragma unroll
            for (int u = 0; u < 4; u++)
                if (i + u * step < n)
                    value[u] = all.from[s][i + u * step];
            for (int r = 0; r < all.ranks; r++)
#pragma unroll
                for (int u = 0; u < 4; u++)
                    if (i + u * step < n)
                        all.to[s][r][i + u * step] = value[u];
        }
    }
}

struct sources {
    const void *of[kMaxRanks];
};

/* out = sum of the ranks' parts, ranks ascending, one rounding. kRanks 0: as many as `ranks` says. */
template <int kRanks>
__global__ void __launch_bounds__(512) pull(const sources from, int ranks, int64_t vectors, uint4 *out)
{
    constexpr int kAtOnce = kRanks ? kRanks : kMaxRanks, kUnroll = kAtOnce <= 4 ? 2 : 1;
    const int64_t step = (int64_t)gridDim.x * blockDim.x;

    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < vectors; i += kUnroll * step) {
        uint4 value[kUnroll][kAtOnce];
#pragma unroll
        for (int u = 0; u < kUnroll; u++)
#pragma unroll
            for (int r = 0; r < kAtOnce; r++)
                value[u][r] = i + u * step < vectors && (kRanks || r < ranks)
                                  ? static_cast<const uint4 *>(from.of[r])[i + u * step]
                                  : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int u = 0; u < kUnroll; u++) {
            float sum[8] = {};
#pragma unroll
            for (int r = 0; r < kAtOnce; r++) {
                float one[8];
                unpack(value[u][r], one);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    sum[j] += one[j];
            }
            if (i + u * step < vectors)
                out[i + u * step] = pack(sum);
        }
    }
}

/* A slot's router gradient is where its expert is. */
__global__ void __launch_bounds__(kThreads)
pick(const sources from, const int *ids, int slots, int experts, float *out)
{
    const int i = blockIdx.x * kThreads + threadIdx.x;

    if (i < slots)
        out[i] = ids[i] < 0 ? 0.0f : static_cast<const float *>(from.of[ids[i] / experts])[i];
}

int blocks_of(int64_t things, int each)
{
    return (int)((things + each - 1) / each);
}

} // namespace

/* ------------------------------------------------------------------ entry points: 0 or a cudaError_t */

#define GLUE extern "C" __attribute__((visibility("default"))) int

GLUE glue_plan(const int *ids, int slots, int first, int experts, int align, int *place, int *count, int *row, int *slot,
               int *end, float *d_weight, cudaStream_t stream)
{
    const int64_t padding = (int64_t)experts * align;

    if (experts < 1 || experts > kMaxExperts)
        return cudaErrorInvalidValue;
    number_slots<<<experts, kPlanThreads, 0, stream>>>(ids, slots, first, place, count);
    lay_out<<<blocks_of(slots > padding ? slots : padding, kThreads), kThreads, 0, stream>>>(
        ids, slots, first, experts, align, place, count, row, slot, end, d_weight);
    return cudaGetLastError();
}

GLUE glue_expand(const void *x, int tokens, int hidden, int topk, int experts, int align, const int *row, const int *count,
                 const int *end, void *rows, cudaStream_t stream)
{
    if (topk > kMaxTopk)
        return cudaErrorInvalidValue;
    expand<<<tokens + experts * align, kThreads, 0, stream>>>(static_cast<const uint4 *>(x), tokens, hidden / 8, topk,
                                                              align, row, count, end, static_cast<uint4 *>(rows));
    return cudaGetLastError();
}

GLUE glue_swiglu(const void *h, int intermediate, const int *rows, void *act, cudaStream_t stream)
{
    swiglu<<<kWave, kThreads, 0, stream>>>(static_cast<const uint4 *>(h), (unsigned)intermediate / 8, rows,
                                           static_cast<uint4 *>(act));
    return cudaGetLastError();
}

GLUE glue_swiglu_backward(const void *h, const void *d, int intermediate, const int *rows, const int *slot,
                          const float *weight, void *d_h, void *weighted, float *d_weight, cudaStream_t stream)
{
    swiglu_backward<<<kWave, kThreads, 0, stream>>>(static_cast<const uint4 *>(h), static_cast<const uint4 *>(d),
                                                    intermediate / 8, rows, slot, weight, static_cast<uint4 *>(d_h),
                                                    static_cast<uint4 *>(weighted), d_weight);
    return cudaGetLastError();
}

GLUE glue_reduce(const void *rows, int tokens, int hidden, int topk, const int *row, const float *weight, void *out,
                 cudaStream_t stream)
{
    const uint4 *from = static_cast<const uint4 *>(rows);
    uint4 *to = static_cast<uint4 *>(out);

    if (topk == 10)
        reduce<10><<<tokens, kThreads, 0, stream>>>(from, hidden / 8, topk, row, weight, to);
    else if (topk == 6)
        reduce<6><<<tokens, kThreads, 0, stream>>>(from, hidden / 8, topk, row, weight, to);
    else if (topk <= 4)
        reduce<4><<<tokens, kThreads, 0, stream>>>(from, hidden / 8, topk, row, weight, to);
    else
        reduce<8><<<tokens, kThreads, 0, stream>>>(from, hidden / 8, topk, row, weight, to);
    return cudaGetLastError();
}

/* `to`: for each segment the addresses of all ranks; bytes are multiples of 16. */
GLUE glue_push(int blocks, int ranks, int count, const void *const *from, const int64_t *bytes, void *const *to,
               cudaStream_t stream)
{
    segments all = {};

    if (ranks > kMaxRanks || count > kMaxSegments)
        return cudaErrorInvalidValue;
    all.segments = count;
    all.ranks = ranks;
    for (int s = 0; s < count; s++) {
        all.from[s] = static_cast<const uint4 *>(from[s]);
        all.vectors[s] = bytes[s] / 16;
        for (int r = 0; r < ranks; r++)
            all.to[s][r] = static_cast<uint4 *>(to[s * ranks + r]);
    }
    push<<<blocks, 512, 0, stream>>>(all);
    return cudaGetLastError();
}

GLUE glue_pull(int blocks, int ranks, const void *const *from, int64_t values, void *out, cudaStream_t stream)
{
    sources all = {};
    uint4 *to = static_cast<uint4 *>(out);

    if (ranks > kMaxRanks)
        return cudaErrorInvalidValue;
    for (int r = 0; r < ranks; r++)
        all.of[r] = from[r];
    if (ranks == 2)
        pull<2><<<blocks, 512, 0, stream>>>(all, ranks, values / 8, to);
    else if (ranks == 4)
        pull<4><<<blocks, 512, 0, stream>>>(all, ranks, values / 8, to);
    else if (ranks == 8)
        pull<8><<<blocks, 512, 0, stream>>>(all, ranks, values / 8, to);
    else
        pull<0><<<blocks, 512, 0, stream>>>(all, ranks, values / 8, to);
    return cudaGetLastError();
}

GLUE glue_pick(int ranks, const void *const *from, const int *ids, int slots, int experts, float *out, cudaStream_t stream)
{
    sources all = {};

    if (ranks > kMaxRanks)
        return cudaErrorInvalidValue;
    for (int r = 0; r < ranks; r++)
        all.of[r] = from[r];
    pick<<<blocks_of(slots, kThreads), kThreads, 0, stream>>>(all, ids, slots, experts, out);
    return cudaGetLastError();
}
