/* SPDX-License-Identifier: Apache-2.0 */
/*
 * MXFP8 quantiser for the example's weights: short and obvious rather than fast.
 */
#include "mxfp8.h"

#include <math.h>

#define SCALE_BIAS 127
#define ELEMENT_MAX 448.0f    /* 1.75 * 2^8 */
#define ELEMENT_UNIT_MIN (-9) /* spacing of the subnormal elements is 2^-9 */

uint8_t mxfp8_element(float value)
{
    uint8_t sign = signbit(value) ? 0x80 : 0;
    float magnitude = fabsf(value);
    int exponent, unit;

    if (!isfinite(value))
        return sign | 0x7f;
    if (magnitude >= ELEMENT_MAX)
        return sign | 0x7e;
    if (magnitude == 0)
        return sign;
    frexpf(magnitude, &exponent); /* magnitude in [2^(exponent - 1), 2^exponent): four significant bits */
    unit = exponent - 4 > ELEMENT_UNIT_MIN ? exponent - 4 : ELEMENT_UNIT_MIN;
    /* Codes count units; each further unit size starts eight codes later, so a carry needs no care. */
    return sign | (uint8_t)(((unit - ELEMENT_UNIT_MIN) << 3) + (int)nearbyintf(ldexpf(magnitude, -unit)));
}

/* Exponent of the smallest power of two that keeps `largest` within 448. */
static int scale_exponent(float largest)
{
    int exponent, least;
    float fraction = frexpf(largest, &exponent); /* 448 is 0.875 * 2^9 */

    least = fraction <= 0.875f ? exponent - 9 : exponent - 8;
    return largest > 0 && least > -SCALE_BIAS ? least : -SCALE_BIAS;
}

static float largest_of(size_t count, const float *values)
{
    float largest = 0;

    for (size_t i = 0; i < count; i++)
        if (isfinite(values[i]) && fabsf(values[i]) > largest)
            largest = fabsf(values[i]);
    return largest;
}

void mxfp8_quantize(size_t rows, size_t length, size_t group, const float *values, uint8_t *elements, uint8_t *scales)
{
    for (size_t r = 0; r < rows; r++, values += length, elements += length, scales += mxfp8_scales(length)) {
        for (size_t from = 0; from < length; from += group) {
            size_t to = from + group < length ? from + group : length;
            int exponent = scale_exponent(largest_of(to - from, values + from));
            float inverse = ldexpf(1, -exponent);

            for (size_t block = from / MXFP8_BLOCK; block * MXFP8_BLOCK < to; block++)
                scales[block] = (uint8_t)(exponent + SCALE_BIAS);
            for (size_t i = from; i < to; i++)
                elements[i] = mxfp8_element(values[i] * inverse);
        }
    }
}
