/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Embedding, norm, router and loss of the model, forward and backward. A row's work is a warp's; sums over tokens run
 * in the order of the tokens, or in eight strands of it that are added in their order.
 */
#include "kernels.h"
#include "launch.cuh"

namespace
{

constexpr uint32_t CLASSES = 256; /* bytes */
constexpr float RMS_EPSILON = 1e-6f;

__global__ void embed(struct batch batch, size_t hidden, const float *table, uint32_t *place, float *h)
{
    const size_t t = blockIdx.x, at = batch_place(&batch, t);
    if (threadIdx.x == 0)
        place[t] = static_cast<uint32_t>(at);
    for (size_t i = threadIdx.x; i < hidden; i += blockDim.x) {
        float sum = 0;
        for (uint32_t w = 0; w < batch.window; w++)
            sum += table[(static_cast<size_t>(w) * CLASSES + batch.text[at - w]) * hidden + i];
        h[t * hidden + i] = sum;
    }
}

/* A block has one byte at one distance, and as many columns as threads: it adds the tokens that see this byte there. */
__global__ void embed_backward(struct batch batch, size_t tokens, size_t hidden, const uint32_t *place,
                               const float *d_h, float *d_table)
{
    uint32_t *const masks = reinterpret_cast<uint32_t *>(block_memory()); /* of a warp's tokens that do, one a warp */
    const uint32_t byte = blockIdx.x, distance = blockIdx.y, warps = blockDim.x / WARP;
    const size_t column = static_cast<size_t>(blockIdx.z) * blockDim.x + threadIdx.x;
    float sum = 0;
    for (size_t t0 = 0; t0 < tokens; t0 += blockDim.x) {
        const size_t t = t0 + threadIdx.x;
        const uint32_t mask = __ballot_sync(~0u, t < tokens && batch.text[place[t] - distance] == byte);
        if (threadIdx.x % WARP == 0)
            masks[threadIdx.x / WARP] = mask;
        __syncthreads();
        for (uint32_t w = 0; w < warps; w++)
            for (uint32_t left = masks[w]; left && column < hidden; left &= left - 1)
                sum +=
                    d_h[(t0 + w * WARP + static_cast<uint32_t>(__ffs(static_cast<int>(left))) - 1) * hidden + column];
        __syncthreads();
    }
    if (column < hidden)
        d_table[(static_cast<size_t>(distance) * CLASSES + byte) * hidden + column] += sum;
}

__device__ inline size_t row_of_warp()
{
    return static_cast<size_t>(blockIdx.x) * WARPS + threadIdx.x / WARP;
}

__global__ void rmsnorm(size_t tokens, size_t hidden, const float *h, const float *gain, float *u, float *inverse)
{
    const size_t t = row_of_warp();
    const uint32_t lane = threadIdx.x % WARP;
    if (t >= tokens)
        return;
    const float *row = h + t * hidden;
    float sum = 0;
    for (size_t i = lane; i < hidden; i += WARP)
        sum += row[i] * row[i];
    const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(hidden) + RMS_EPSILON);
    if (lane == 0)
        inverse[t] = scale;
    for (size_t i = lane; i < hidden; i += WARP)
        u[t * hidden + i] = row[i] * scale * gain[i];
}

__global__ void rmsnorm_backward(size_t tokens, size_t hidden, const float *h, const float *gain, const float *inverse,
                                 const float *d_u, float *d_h)
{
    const size_t t = row_of_warp();
    const uint32_t lane = threadIdx.x % WARP;
    if (t >= tokens)
        return;
    const float *row = h + t * hidden, *d = d_u + t * hidden, scale = inverse[t];
    float dot = 0;
    for (size_t i = lane; i < hidden; i += WARP)
        dot += d[i] * gain[i] * row[i];
    dot = warp_sum(dot) * scale * scale * scale / static_cast<float>(hidden);
    for (size_t i = lane; i < hidden; i += WARP)
        d_h[t * hidden + i] += d[i] * gain[i] * scale - row[i] * dot;
}

/* As add_rows of kernels_dense.cu. */
__global__ void gain_backward(size_t tokens, size_t hidden, const float *h, const float *inverse, const float *d_u,
                              float *d_gain)
{
    float *sums = block_memory();
    const uint32_t lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const size_t column = static_cast<size_t>(blockIdx.x) * WARP + lane;
    float sum = 0;
    if (column < hidden)
        for (size_t t = warp; t < tokens; t += WARPS)
            sum += d_u[t * hidden + column] * h[t * hidden + column] * inverse[t];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (warp > 0 || column >= hidden)
        return;
    for (uint32_t w = 1; w < WARPS; w++)
        sum += sums[w * WARP + lane];
    d_gain[column] += sum;
}

/* A thread has a token, whose row holds the best experts so far in order; of equal logits the lower comes first. */
__global__ void router(size_t tokens, size_t experts, size_t topk, const float *logits, int32_t *ids, float *weight)
{
    const size_t t = elements().first;
    size_t have = 0;
    float total = 0;
    if (t >= tokens)
        return;
    logits += t * experts;
    ids += t * topk;
    weight += t * topk;
    for (size_t e = 0; e < experts; e++) {
        const float logit = isnan(logits[e]) ? -INFINITY : logits[e];
        if (have == topk && !(logit > weight[topk - 1]))
            continue;
        size_t at = have < topk ? have++ : topk - 1;
        for (; at > 0 && logit > weight[at - 1]; at--) {
            weight[at] = weight[at - 1];
            ids[at] = ids[at - 1];
        }
        weight[at] = logit;
        ids[at] = static_cast<int32_t>(e);
    }
    const float peak = weight[0];
    for (size_t k = 0; k < topk; k++) {
        weight[k] = expf(weight[k] - peak);
        total += weight[k];
    }
    for (size_t k = 0; k < topk; k++)
        weight[k] /= total;
}

__global__ void router_backward(size_t tokens, size_t experts, size_t topk, const int32_t *ids, const float *weight,
                                const float *d_weight, float *d_logits)
{
    const size_t t = elements().first;
    float mean = 0;
    if (t >= tokens)
        return;
    for (size_t e = 0; e < experts; e++)
        d_logits[t * experts + e] = 0;
    for (size_t k = t * topk; k < (t + 1) * topk; k++)
        mean += weight[k] * d_weight[k];
    for (size_t k = t * topk; k < (t + 1) * topk; k++)
        d_logits[t * experts + static_cast<size_t>(ids[k])] = weight[k] * (d_weight[k] - mean);
}

__global__ void cross_entropy(struct batch batch, size_t tokens, size_t classes, const uint32_t *place, float *logits,
                              float scale, double *token_loss)
{
    const size_t t = row_of_warp();
    const uint32_t lane = threadIdx.x % WARP;
    if (t >= tokens)
        return;
    float *row = logits + t * classes;
    const uint32_t target = batch.text[place[t] + 1];
    const float wanted = row[target];
    float peak = row[0], sum = 0;
    for (size_t c = lane; c < classes; c += WARP)
        peak = row[c] > peak ? row[c] : peak;
    for (int with = WARP / 2; with; with /= 2) {
        const float other = __shfl_xor_sync(~0u, peak, with);
        peak = other > peak ? other : peak;
    }
    __syncwarp(); /* all have read what is now written */
    for (size_t c = lane; c < classes; c += WARP) {
        row[c] = expf(row[c] - peak);
        sum += row[c];
    }
    sum = warp_sum(sum);
    for (size_t c = lane; c < classes; c += WARP)
        row[c] = row[c] * (scale / sum) - (c == target ? scale : 0.0f);
    if (lane == 0)
        token_loss[t] = log(static_cast<double>(sum)) - static_cast<double>(wanted - peak);
}

/* One warp. */
__global__ void add_losses(size_t tokens, const double *token_loss, double *loss)
{
    double sum = 0;
    for (size_t t = threadIdx.x; t < tokens; t += WARP)
        sum += token_loss[t];
    for (int with = WARP / 2; with; with /= 2)
        sum += __shfl_xor_sync(~0u, sum, with);
    if (threadIdx.x == 0)
        *loss += sum;
}

} // namespace

int kernel_embed(void *stream, const struct batch *batch, size_t tokens, size_t hidden, const float *table,
                 uint32_t *place, float *h)
{
    return launch(stream, embed, static_cast<uint32_t>(tokens), BLOCK, 0, *batch, hidden, table, place, h);
}

int kernel_embed_backward(void *stream, const struct batch *batch, size_t tokens, size_t hidden, const uint32_t *place,
                          const float *d_h, float *d_table)
{
    const uint32_t threads = hidden < BLOCK ? blocks_of(hidden, WARP) * WARP : BLOCK;
    return launch(stream, embed_backward, dim3(CLASSES, batch->window, blocks_of(hidden, threads)), threads,
                  WARPS * sizeof(uint32_t), *batch, tokens, hidden, place, d_h, d_table);
}

int kernel_rmsnorm(void *stream, size_t tokens, size_t hidden, const float *h, const float *gain, float *u,
                   float *inverse)
{
    return launch(stream, rmsnorm, blocks_of(tokens, WARPS), BLOCK, 0, tokens, hidden, h, gain, u, inverse);
}

int kernel_rmsnorm_backward(void *stream, size_t tokens, size_t hidden, const float *h, const float *gain,
                            const float *inverse, const float *d_u, float *d_h, float *d_gain)
{
    int code = launch(stream, gain_backward, blocks_of(hidden, WARP), BLOCK, BLOCK * sizeof(float), tokens, hidden, h,
                      inverse, d_u, d_gain);
    return code ? code
                : launch(stream, rmsnorm_backward, blocks_of(tokens, WARPS), BLOCK, 0, tokens, hidden, h, gain, inverse,
                         d_u, d_h);
}

int kernel_router(void *stream, size_t tokens, size_t experts, size_t topk, const float *logits, int32_t *ids,
                  float *weight)
{
    return launch(stream, router, blocks_of(tokens, WARP), WARP, 0, tokens, experts, topk, logits, ids, weight);
}

int kernel_router_backward(void *stream, size_t tokens, size_t experts, size_t topk, const int32_t *ids,
                           const float *weight, const float *d_weight, float *d_logits)
{
    return launch(stream, router_backward, blocks_of(tokens, WARP), WARP, 0, tokens, experts, topk, ids, weight,
                  d_weight, d_logits);
}

int kernel_cross_entropy(void *stream, const struct batch *batch, size_t tokens, size_t classes, const uint32_t *place,
                         float *logits, float scale, double *token_loss, double *loss)
{
    int code = launch(stream, cross_entropy, blocks_of(tokens, WARPS), BLOCK, 0, *batch, tokens, classes, place, logits,
                      scale, token_loss);
    return code ? code : launch(stream, add_losses, 1, WARP, 0, tokens, token_loss, loss);
}
