/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Element-wise work, products and sums over rows. The products are plain FP32 in tiles, k ascending: an example's,
 * which needs no library; a training program would call one with a deterministic mode.
 */
#include <cuda_bf16.h>

#include "kernels.h"
#include "launch.cuh"

namespace
{

__global__ void initialise(float *to, size_t count, float constant, float deviation, uint64_t seed, uint64_t numbers)
{
    const range r = elements();
    for (size_t i = r.first; i < count; i += r.stride)
        to[i] = deviation > 0 ? constant + deviation * rng_normal(seed, numbers, i) : constant;
}

__global__ void to_bf16(size_t count, const float *from, uint16_t *to)
{
    const range r = elements();
    for (size_t i = r.first; i < count; i += r.stride)
        to[i] = __bfloat16_as_ushort(__float2bfloat16_rn(from[i]));
}

__global__ void add_bf16(size_t count, const uint16_t *from, float *to)
{
    const range r = elements();
    for (size_t i = r.first; i < count; i += r.stride)
        to[i] += __bfloat162float(__ushort_as_bfloat16(from[i]));
}

__global__ void update(struct adamw a, struct adamw_scales s, struct adamw_tensor t, const float *gradient)
{
    const range r = elements();
    for (size_t i = r.first; i < t.count; i += r.stride) {
        const float g = gradient[i];
        const float first = a.beta1 * t.first[i] + (1.0f - a.beta1) * g;
        const float second = a.beta2 * t.second[i] + (1.0f - a.beta2) * g * g;
        t.first[i] = first;
        t.second[i] = second;
        t.value[i] = t.value[i] * s.keep - s.rate * (first / s.first) / (sqrtf(second) / s.second + a.epsilon);
    }
}

__global__ void spread(size_t count, size_t columns, const float *row, float *to)
{
    const range r = elements();
    for (size_t i = r.first; i < count; i += r.stride)
        to[i] = row[i % columns];
}

/* A block sums 32 columns, each of its warps every eighth row; then warp 0 adds the warps' sums in their order. */
__global__ void add_rows(size_t rows, size_t columns, const float *from, float *row)
{
    float *sums = block_memory(); /* [WARPS][WARP] */
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t column = static_cast<size_t>(blockIdx.x) * WARP + lane;
    float sum = 0;
    if (column < columns)
        for (size_t r = warp; r < rows; r += WARPS)
            sum += from[r * columns + column];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0 || column >= columns)
        return;
    for (uint32_t w = 1; w < WARPS; w++)
        sum += sums[w * WARP + lane];
    row[column] += sum;
}

/* ---- products: a block has a tile of 64 x 64, a thread 4 x 4 of it; 16 of k are in shared memory at a time ---- */

constexpr uint32_t TILE = 64, DEPTH = 16, PART = 4, PITCH = TILE + 4;
constexpr size_t GEMM_SHARED = 2 * DEPTH * PITCH * sizeof(float);

/* This thread's part of tile[k][i] = from[i][k], or from[k][i] where the matrix is stored so; zero outside of it. */
template <bool KByRow> struct tile_part {
    float value[TILE * DEPTH / BLOCK];

    __device__ void read(const float *from, size_t rows, size_t depth, size_t row0, size_t k0)
    {
        for (uint32_t e = 0; e < TILE * DEPTH / BLOCK; e++) {
            const uint32_t n = e * BLOCK + threadIdx.x;
            const size_t row = row0 + (KByRow ? n % TILE : n / DEPTH), k = k0 + (KByRow ? n / TILE : n % DEPTH);
            value[e] = row < rows && k < depth ? from[KByRow ? k * rows + row : row * depth + k] : 0;
        }
    }

    __device__ void put(float *tile) const
    {
        for (uint32_t e = 0; e < TILE * DEPTH / BLOCK; e++) {
            const uint32_t n = e * BLOCK + threadIdx.x;
            tile[(KByRow ? n / TILE : n % DEPTH) * PITCH + (KByRow ? n % TILE : n / DEPTH)] = value[e];
        }
    }
};

/* The next part of the matrices is read while this one is multiplied. */
template <bool TransposedA, bool TransposedB>
__global__ void __launch_bounds__(BLOCK)
    product(size_t m, size_t n, size_t k, const float *a, const float *b, float beta, float *c)
{
    float *tile_a = block_memory(), *tile_b = tile_a + DEPTH * PITCH, sum[PART][PART] = {};
    const size_t row0 = static_cast<size_t>(blockIdx.y) * TILE, column0 = static_cast<size_t>(blockIdx.x) * TILE;
    const uint32_t y = threadIdx.x / (TILE / PART) * PART, x = threadIdx.x % (TILE / PART) * PART;
    tile_part<TransposedA> part_a;
    tile_part<!TransposedB> part_b;
    part_a.read(a, m, k, row0, 0);
    part_b.read(b, n, k, column0, 0);
    for (size_t k0 = 0; k0 < k; k0 += DEPTH) {
        part_a.put(tile_a);
        part_b.put(tile_b);
        __syncthreads();
        part_a.read(a, m, k, row0, k0 + DEPTH);
        part_b.read(b, n, k, column0, k0 + DEPTH);
        for (uint32_t d = 0; d < DEPTH; d++) {
            const float4 va = *reinterpret_cast<const float4 *>(&tile_a[d * PITCH + y]);
            const float4 vb = *reinterpret_cast<const float4 *>(&tile_b[d * PITCH + x]);
            const float of_a[PART] = { va.x, va.y, va.z, va.w }, of_b[PART] = { vb.x, vb.y, vb.z, vb.w };
            for (uint32_t i = 0; i < PART; i++)
                for (uint32_t j = 0; j < PART; j++)
                    sum[i][j] += of_a[i] * of_b[j];
        }
        __syncthreads();
    }
    for (uint32_t i = 0; i < PART; i++)
        for (uint32_t j = 0; j < PART; j++)
            if (row0 + y + i < m && column0 + x + j < n) {
                float *to = &c[(row0 + y + i) * n + column0 + x + j];
                *to = beta > 0 ? sum[i][j] + *to : sum[i][j];
            }
}

} // namespace

int kernel_initialise(void *stream, float *to, size_t count, float constant, float deviation, uint64_t seed,
                      uint64_t numbers)
{
    return launch(stream, initialise, blocks_for(count), BLOCK, 0, to, count, constant, deviation, seed, numbers);
}

int kernel_to_bf16(void *stream, size_t count, const float *from, uint16_t *to)
{
    return launch(stream, to_bf16, blocks_for(count), BLOCK, 0, count, from, to);
}

int kernel_add_bf16(void *stream, size_t count, const uint16_t *from, float *to)
{
    return launch(stream, add_bf16, blocks_for(count), BLOCK, 0, count, from, to);
}

int kernel_adamw(void *stream, const struct adamw *a, const struct adamw_scales *scales,
                 const struct adamw_tensor *tensor, const float *gradient)
{
    return launch(stream, update, blocks_for(tensor->count), BLOCK, 0, *a, *scales, *tensor, gradient);
}

int kernel_gemm(void *stream, enum gemm kind, size_t m, size_t n, size_t k, const float *a, const float *b, float beta,
                float *c)
{
    const dim3 grid(blocks_of(n, TILE), blocks_of(m, TILE));
    void (*const kernel)(size_t, size_t, size_t, const float *, const float *, float, float *) =
        kind == GEMM_NT   ? product<false, true>
        : kind == GEMM_NN ? product<false, false>
                          : product<true, false>;
    return launch(stream, kernel, grid, BLOCK, GEMM_SHARED, m, n, k, a, b, beta, c);
}

int kernel_spread(void *stream, size_t rows, size_t columns, const float *row, float *to)
{
    return launch(stream, spread, blocks_for(rows * columns), BLOCK, 0, rows * columns, columns, row, to);
}

int kernel_add_rows(void *stream, size_t rows, size_t columns, const float *from, float *row)
{
    return launch(stream, add_rows, blocks_of(columns, WARP), BLOCK, BLOCK * sizeof(float), rows, columns, from, row);
}
