/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MX numerics (OCP Microscaling, MXFP8): E4M3 elements, one E8M0 scale a block of 32 values along a row.
 *
 * Scale of a block: 2^e with the smallest e in [-127, 127] for which amax <= 448 * 2^e, stored as e + 127. amax is over
 * the block's finite values (per32) or over those of the aligned 128 values the block lies in (per128, all four blocks
 * store the same scale). A block of zeros has e = -127. Elements: value / 2^e to nearest even, saturated at +-448.
 * NaN and Inf become the element NaN (E4M3 has no Inf), so that what is not finite stays so; the scale 255, which means
 * NaN for a whole block, is never made and is honoured when read. A row whose length is no multiple of 32 ends in a
 * shorter block. Scales are stored row-major, [rows][ceil(columns / 32)] bytes.
 */
#ifndef MOK_MX_MX_H
#define MOK_MX_MX_H

#include <stdbool.h>
#include <stdint.h>

#include "bits.h"

#define MOK_MX_BLOCK 32u
#define MOK_E4M3_MAX 448.0f
#define MOK_E4M3_NAN 0x7fu
#define MOK_E8M0_NAN 0xffu

MOK_HD uint64_t mok_mx_scales(uint64_t columns)
{
    return columns / MOK_MX_BLOCK + (columns % MOK_MX_BLOCK != 0);
}

/* 2^(code - 127); code 0 is the subnormal 2^-127, 255 NaN. */
MOK_HD float mok_e8m0_to_f32(uint8_t code)
{
    uint32_t bits = code == MOK_E8M0_NAN ? 0x7fc00000u : code ? (uint32_t)code << 23 : 0x00400000u;

    return mok_f32_from_bits(bits);
}

/* 2^(127 - code), what elements are multiplied by; exact for every code but 255. */
MOK_HD float mok_e8m0_inverse(uint8_t code)
{
    uint32_t bits = code < 254 ? (254u - code) << 23 : 0x00400000u;

    return mok_f32_from_bits(bits);
}

/* The scale for a group whose largest finite magnitude is amax >= 0. */
MOK_HD uint8_t mok_mx_scale(float amax)
{
    uint32_t bits = mok_f32_bits(amax);
    int32_t e = (int32_t)(bits >> 23) - 127 - 8; /* 448 = 1.75 * 2^8 */

    if ((bits & 0x7fffffu) > 0x600000u)
        e++;
    if (bits < 0x00800000u || e < -127) /* amax below 2^-126 is below 448 * 2^-127 too */
        e = -127;
    return (uint8_t)(e + 127);
}

/* RNE, saturating; NaN and Inf give NaN. */
MOK_HD uint8_t mok_e4m3_encode(float value)
{
    uint32_t bits = mok_f32_bits(value), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
    /* normal: keep 3 bits of fraction, rebias 127 -> 7. Below 2^-6: count in units of 2^-9. */
    uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
    uint32_t small = mok_f32_bits(mok_f32_from_bits(magnitude) + 16384.0f) - 0x46800000u;
    uint32_t code = magnitude < 0x3c800000u ? small : normal;

    code = magnitude > 0x43e00000u ? 0x7eu : code;              /* beyond 448 */
    code = magnitude >= 0x7f800000u ? MOK_E4M3_NAN : code;
    return (uint8_t)(sign | code);
}

MOK_HD float mok_e4m3_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7fu;
    float normal = mok_f32_from_bits((magnitude << 20) + (120u << 23));
    float small = (float)(int32_t)magnitude * 0.001953125f; /* 2^-9 */
    float value = magnitude < 8 ? small : normal;

    value = magnitude == MOK_E4M3_NAN ? mok_f32_from_bits(0x7fc00000u) : value;
    return mok_f32_from_bits(mok_f32_bits(value) | sign);
}

/* Exact unless the product is below the binary32 range. */
MOK_HD float mok_mx_decode(uint8_t code, uint8_t scale)
{
    return mok_e4m3_to_f32(code) * mok_e8m0_to_f32(scale);
}

/* What is left of a code's value (decoded) under a scale that is no smaller than its own: rounded below 2^-6 of that. */
MOK_HD float mok_mx_reround(float value, uint8_t shared)
{
    return mok_e4m3_to_f32(mok_e4m3_encode(value * mok_e8m0_inverse(shared))) * mok_e8m0_to_f32(shared);
}

/* Largest finite magnitude of some values, 0 if there is none: NaN and Inf do not take part. */
MOK_HD float mok_mx_amax(const float *value, uint64_t count)
{
    uint32_t amax = 0;
    uint64_t i;

    for (i = 0; i < count; i++) {
        uint32_t magnitude = mok_f32_bits(value[i]) & 0x7fffffffu;

        magnitude = magnitude < 0x7f800000u ? magnitude : 0u;
        amax = magnitude > amax ? magnitude : amax;
    }
    return mok_f32_from_bits(amax);
}

/* One row of `columns` values; `group` is 32 (per32) or 128 (per128). */
MOK_HD void mok_mx_quantize_row(const float *value, uint64_t columns, uint32_t group, uint8_t *ret_code,
                                uint8_t *ret_scale)
{
    uint64_t at, i, block;

    for (at = 0; at < columns; at += group) {
        uint64_t count = columns - at < group ? columns - at : group;
        uint8_t scale = mok_mx_scale(mok_mx_amax(value + at, count));
        float inverse = mok_e8m0_inverse(scale);

        for (block = at / MOK_MX_BLOCK; block * MOK_MX_BLOCK < at + count; block++)
            ret_scale[block] = scale;
        for (i = at; i < at + count; i++)
            ret_code[i] = mok_e4m3_encode(value[i] * inverse);
    }
}

MOK_HD void mok_mx_dequantize_row(const uint8_t *code, const uint8_t *scale, uint64_t columns, float *ret)
{
    uint64_t at, i;

    for (at = 0; at < columns; at += MOK_MX_BLOCK) {
        uint64_t end = columns - at < MOK_MX_BLOCK ? columns : at + MOK_MX_BLOCK;
        float factor = mok_e8m0_to_f32(scale[at / MOK_MX_BLOCK]);

        for (i = at; i < end; i++)
            ret[i] = mok_e4m3_to_f32(code[i]) * factor;
    }
}

#ifdef __cplusplus
extern "C" {
#endif

/*
 * A matrix to quantise, row-major [rows][columns]. Codes are [rows][columns] and scales [rows][ceil(columns / 32)] of
 * the matrix or, with `transpose`, of its transpose: then scales lie along its columns.
 */
struct mok_mx_matrix {
    const void *value;
    uint64_t rows, columns;
    bool f32; /* binary32 values; else BF16 */
    bool transpose;
};

/*
 * `group` is 32 or 128. `tile_rows` 128 lets 128 x 128 tiles share one scale (weights of engines without block-scaled
 * products), 1 gives each row its own; group must then be 128. -MOK_ERANGE for anything else.
 */
int mok_mx_quantize_matrix(const struct mok_mx_matrix *matrix, uint32_t group, uint32_t tile_rows, uint8_t *ret_code,
                           uint8_t *ret_scale);
void mok_mx_dequantize(const uint8_t *code, const uint8_t *scale, uint64_t rows, uint64_t columns, float *ret);

#ifdef __cplusplus
}
#endif

/* BF16 matrices. */
static inline int mok_mx_quantize(const uint16_t *value, uint64_t rows, uint64_t columns, uint32_t group,
                                  uint32_t tile_rows, uint8_t *ret_code, uint8_t *ret_scale)
{
    struct mok_mx_matrix matrix = { value, rows, columns, false, false };

    return mok_mx_quantize_matrix(&matrix, group, tile_rows, ret_code, ret_scale);
}

static inline int mok_mx_quantize_transposed(const uint16_t *value, uint64_t rows, uint64_t columns, uint32_t group,
                                             uint8_t *ret_code, uint8_t *ret_scale)
{
    struct mok_mx_matrix matrix = { value, rows, columns, false, true };

    return mok_mx_quantize_matrix(&matrix, group, 1, ret_code, ret_scale);
}

#endif
