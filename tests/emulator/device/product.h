/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of a warp's share of a matrix instruction. */
#ifndef MOK_EMULATOR_PRODUCT_H
#define MOK_EMULATOR_PRODUCT_H

#include <stdint.h>

namespace emu
{

/* sum[16][n] += a[16][16] b[16][n], n a multiple of 8; every element a chain over k ascending. */
void product_16(float *sum, uint32_t n, const float (*a)[16], const float *b);

} // namespace emu
#endif
