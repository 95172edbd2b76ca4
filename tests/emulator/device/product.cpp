/* SPDX-License-Identifier: Apache-2.0 */
/* Nearly all of the emulator's time. Multiplications and additions may be fused here, alike for every element. */
#include "product.h"

#include <string.h>

namespace emu
{

namespace
{

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));

/* Four rows by sixteen columns at a time, so that sums stay in registers. */
inline __attribute__((always_inline)) void tile(float *sum, uint32_t n, const float (*a)[16], const float *b)
{
    v8 s[4][2];
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 2; c++)
            s[r][c] = *reinterpret_cast<const v8 *>(sum + static_cast<uint32_t>(r) * n + c * 8);
    for (int k = 0; k < 16; k++) {
        const v8 b0 = *reinterpret_cast<const v8 *>(b + static_cast<uint32_t>(k) * n);
        const v8 b1 = *reinterpret_cast<const v8 *>(b + static_cast<uint32_t>(k) * n + 8);
        for (int r = 0; r < 4; r++) {
            s[r][0] = s[r][0] + b0 * a[r][k];
            s[r][1] = s[r][1] + b1 * a[r][k];
        }
    }
    for (int r = 0; r < 4; r++)
        for (int c = 0; c < 2; c++)
            *reinterpret_cast<v8 *>(sum + static_cast<uint32_t>(r) * n + c * 8) = s[r][c];
}

inline __attribute__((always_inline)) void all(float *sum, uint32_t n, const float (*a)[16], const float *b)
{
    for (uint32_t r = 0; r < 16; r += 4)
        for (uint32_t c = 0; c + 16 <= n; c += 16)
            tile(sum + r * n + c, n, a + r, b + c);
    for (uint32_t c = n / 16 * 16; c < n; c++)
        for (uint32_t r = 0; r < 16; r++)
            for (uint32_t k = 0; k < 16; k++)
                sum[r * n + c] += a[r][k] * b[k * n + c];
}

void plain(float *sum, uint32_t n, const float (*a)[16], const float *b)
{
    all(sum, n, a, b);
}

__attribute__((target("avx2,fma"))) void wide(float *sum, uint32_t n, const float (*a)[16], const float *b)
{
    all(sum, n, a, b);
}

} // namespace

void product_16(float *sum, uint32_t n, const float (*a)[16], const float *b)
{
    static const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    (can ? wide : plain)(sum, n, a, b);
}

} // namespace emu
