/* SPDX-License-Identifier: Apache-2.0 */
/*
 * OCP MX by search; see the header.
 */
#include "mx_model.h"

#include <math.h>

#include "plain_bf16.h"

double mx_model_decode(uint8_t code)
{
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double sign = code & 0x80 ? -1.0 : 1.0;

    if (exponent == 15 && mantissa == 7)
        return copysign((double)NAN, sign);
    if (exponent == 0)
        return sign * ldexp(mantissa, -9);
    return sign * ldexp(8 + mantissa, exponent - 7 - 3);
}

uint8_t mx_model_encode(double value)
{
    static double decoded[0x7f]; /* of all magnitudes, made at the first call */
    for (uint8_t code = 0; decoded[0x7e] == 0 && code < 0x7f; code++)
        decoded[code] = mx_model_decode(code);

    uint8_t sign = signbit(value) ? 0x80 : 0, best = 0;
    double magnitude = fabs(value);

    if (isnan(value))
        return sign | 0x7f;
    double nearest = magnitude; /* of code 0 */
    for (uint8_t code = 1; code <= 0x7e; code++) {
        double distance = fabs(decoded[code] - magnitude);
        /* Beside an infinite value all codes are equally far. */
        if (isinf(magnitude) || distance < nearest || (distance == nearest && code % 2 == 0)) {
            best = code;
            nearest = distance;
        }
    }
    return sign | best;
}

int mx_model_exponent(double amax)
{
    for (int e = MX_MODEL_MIN_EXPONENT; e < MX_MODEL_MAX_EXPONENT; e++)
        if (amax <= ldexp(448, e))
            return e;
    return MX_MODEL_MAX_EXPONENT;
}

double mx_model_amax(const uint16_t *values, size_t count)
{
    double amax = 0;

    for (size_t i = 0; i < count; i++) {
        double magnitude = fabs((double)bf16_to_float(values[i]));
        if (isfinite(magnitude) && magnitude > amax)
            amax = magnitude;
    }
    return amax;
}

void mx_model_round(float *values, size_t count, uint32_t group)
{
    for (size_t at = 0; at < count; at += group) {
        size_t end = count - at < group ? count : at + group;
        double amax = 0;
        for (size_t i = at; i < end; i++)
            if (isfinite(values[i]))
                amax = fmax(amax, fabs((double)values[i]));
        int exponent = mx_model_exponent(amax);
        for (size_t i = at; i < end; i++)
            values[i] = (float)ldexp(mx_model_decode(mx_model_encode(ldexp((double)values[i], -exponent))), exponent);
    }
}

static double tile_amax(const float *values, size_t rows, size_t columns, size_t stride)
{
    double amax = 0;

    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < columns; i++)
            if (isfinite(values[r * stride + i]))
                amax = fmax(amax, fabs((double)values[r * stride + i]));
    return amax;
}

void mx_model_round_tiles(float *values, size_t rows, size_t columns, uint32_t group)
{
    for (size_t row = 0; row < rows; row += group)
        for (size_t column = 0; column < columns; column += group) {
            size_t height = rows - row < group ? rows - row : group;
            size_t width = columns - column < group ? columns - column : group;
            float *tile = values + row * columns + column;
            int exponent = mx_model_exponent(tile_amax(tile, height, width, columns));
            for (size_t r = 0; r < height; r++)
                for (size_t i = 0; i < width; i++) {
                    double scaled = ldexp((double)tile[r * columns + i], -exponent);
                    tile[r * columns + i] = (float)ldexp(mx_model_decode(mx_model_encode(scaled)), exponent);
                }
        }
}
